//! Readiness as guards: ready is when nobody holds a reason against it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Whether the process is ready; clones see the same state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    latches: Arc<Mutex<Latches>>,
}

/// Holds readiness back while it is alive.
#[derive(Debug)]
pub struct Latch {
    readiness: Readiness,
    id: u64,
}

#[derive(Debug, Default)]
struct Latches {
    next_id: u64,
    reasons: BTreeMap<u64, String>,
}

impl Readiness {
    pub fn new() -> Self {
        Self::default()
    }

    /// Holds readiness back, for a reason that [`reasons`](Self::reasons) tells.
    pub fn latch(&self, reason: impl Into<String>) -> Latch {
        let mut latches = self.latches.lock();
        let id = latches.next_id;
        latches.next_id += 1;
        latches.reasons.insert(id, reason.into());
        Latch {
            readiness: self.clone(),
            id,
        }
    }

    pub fn is_ready(&self) -> bool {
        self.latches.lock().reasons.is_empty()
    }

    /// What is still missing, oldest first.
    pub fn reasons(&self) -> Vec<String> {
        self.latches.lock().reasons.values().cloned().collect()
    }
}

impl Latch {
    /// Says anew what is missing, and holds readiness back again if it was [released](Self::release).
    pub fn explain(&self, reason: impl Into<String>) {
        self.readiness.latches.lock().reasons.insert(self.id, reason.into());
    }

    /// Holds readiness back no longer, until there is another reason.
    pub fn release(&self) {
        self.readiness.latches.lock().reasons.remove(&self.id);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        self.readiness.latches.lock().reasons.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_once_the_last_latch_is_gone() {
        let readiness = Readiness::new();
        assert!(readiness.is_ready());
        let certificate = readiness.latch("first certificate");
        let listeners = readiness.latch("listeners");
        assert_eq!(readiness.reasons(), ["first certificate", "listeners"]);
        certificate.explain("first certificate: no issuer");
        assert_eq!(readiness.reasons(), ["first certificate: no issuer", "listeners"]);
        drop(certificate);
        assert!(!readiness.is_ready());
        drop(listeners);
        assert!(readiness.is_ready());
    }

    #[test]
    fn a_latch_that_was_released_can_hold_readiness_back_again() {
        let readiness = Readiness::new();
        let latch = readiness.latch("certificate");
        latch.release();
        assert!(readiness.is_ready());
        latch.explain("certificate: refused");
        assert_eq!(readiness.reasons(), ["certificate: refused"]);
        latch.release();
        latch.explain("certificate: refused");
        drop(latch);
        assert!(readiness.is_ready());
    }
}
