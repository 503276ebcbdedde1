//! Graceful shutdown: one signal, many watches, and guards that delay the end of the drain.
//!
//! The caller applies the grace period: it wraps [`Signal::drain`] in a timeout and then forces the end.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

/// Starts the drain.
#[derive(Debug)]
pub struct Signal {
    shared: Arc<Shared>,
}

/// Observes the drain; clones observe the same one.
#[derive(Clone, Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

/// Keeps the drain from ending until it is dropped.
#[derive(Debug)]
pub struct Guard {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    signaled: watch::Sender<bool>,
    n_guards: AtomicUsize,
    /// Notified when the last guard is dropped.
    unguarded: Notify,
}

/// Creates a signal and its watch. If the signal is dropped without a drain, the watches never fire.
pub fn channel() -> (Signal, Watch) {
    let shared = Arc::new(Shared {
        signaled: watch::Sender::new(false),
        n_guards: AtomicUsize::new(0),
        unguarded: Notify::new(),
    });
    (Signal { shared: shared.clone() }, Watch { shared })
}

impl Signal {
    /// Signals all watches, then waits until no guard is left.
    pub async fn drain(self) {
        self.shared.signaled.send_replace(true);
        loop {
            let mut unguarded = pin!(self.shared.unguarded.notified());
            // Registers for notifications before the check below, so that none is missed.
            unguarded.as_mut().enable();
            if self.shared.n_guards.load(Ordering::Acquire) == 0 {
                return;
            }
            unguarded.await;
        }
    }
}

impl Watch {
    /// Waits for the signal; returns immediately if it was sent before.
    pub async fn signaled(&self) {
        // `wait_for` fails only if the sender is dropped, and `self` keeps the sender alive.
        let _ = self.shared.signaled.subscribe().wait_for(|signaled| *signaled).await;
    }

    pub fn is_signaled(&self) -> bool {
        *self.shared.signaled.borrow()
    }

    /// Keeps the drain from ending until the guard is dropped.
    pub fn guard(&self) -> Guard {
        self.shared.n_guards.fetch_add(1, Ordering::Relaxed);
        Guard {
            shared: self.shared.clone(),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.shared.n_guards.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.unguarded.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_the_last_guard() {
        let (signal, watch) = channel();
        let guards = [watch.guard(), watch.guard()];
        let drain = tokio::spawn(signal.drain());
        watch.signaled().await;
        assert!(watch.is_signaled());
        let [first, second] = guards;
        drop(first);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!drain.is_finished());
        drop(second);
        timeout(Duration::from_secs(1), drain).await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn watches_wait_for_the_signal() {
        let (signal, watch) = channel();
        assert!(timeout(Duration::from_secs(60), watch.signaled()).await.is_err());
        drop(watch);
        timeout(Duration::from_secs(1), signal.drain()).await.unwrap();
    }
}
