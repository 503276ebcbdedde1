//! Readiness by latches: the process is ready when no latch is held.
//!
//! Only the [`Readiness`] behind `/ready` decides whether the process is ready. The control plane has a second one that does not
//! affect `/ready`: its reasons are the list of stale kinds of Kubernetes objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Whether the process is ready; clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    latches: Arc<Mutex<Latches>>,
}

/// Makes the process not ready while it is held. It can be held again after its release.
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

    /// Makes the process not ready until the latch is released; the reason appears in [`reasons`](Self::reasons).
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

    /// The reasons why the process is not ready, oldest first.
    pub fn reasons(&self) -> Vec<String> {
        self.latches.lock().reasons.values().cloned().collect()
    }
}

impl Latch {
    /// Sets the reason. If the latch was [released](Self::release), the process becomes not ready again.
    pub fn set_reason(&self, reason: impl Into<String>) {
        self.readiness.latches.lock().reasons.insert(self.id, reason.into());
    }

    /// Releases the latch, until a reason is set again.
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
    fn ready_after_the_last_latch_is_dropped() {
        let readiness = Readiness::new();
        assert!(readiness.is_ready());
        let certificate = readiness.latch("first certificate");
        let listeners = readiness.latch("listeners");
        assert_eq!(readiness.reasons(), ["first certificate", "listeners"]);
        certificate.set_reason("first certificate: no issuer");
        assert_eq!(readiness.reasons(), ["first certificate: no issuer", "listeners"]);
        drop(certificate);
        assert!(!readiness.is_ready());
        drop(listeners);
        assert!(readiness.is_ready());
    }

    #[test]
    fn a_released_latch_can_be_held_again() {
        let readiness = Readiness::new();
        let latch = readiness.latch("certificate");
        latch.release();
        assert!(readiness.is_ready());
        latch.set_reason("certificate: refused");
        assert_eq!(readiness.reasons(), ["certificate: refused"]);
        latch.release();
        latch.set_reason("certificate: refused");
        drop(latch);
        assert!(readiness.is_ready());
    }
}
