//! Graceful shutdown: one signal, many watchers, and guards that hold the end open.
//!
//! The grace period is the caller's: it wraps [`Signal::drain`] in a timeout and then forces the end.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

/// Starts the drain.
#[derive(Debug)]
pub struct Signal {
    shared: Arc<Shared>,
}

/// Learns of the drain; clones watch the same one.
#[derive(Clone, Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

/// Holds the drain open while it is alive.
#[derive(Debug)]
pub struct Guard {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    signaled: watch::Sender<bool>,
    n_guards: AtomicUsize,
    /// Told when there is no guard left.
    unguarded: Notify,
}

/// A signal and its watch. A signal that is dropped unused never fires.
pub fn channel() -> (Signal, Watch) {
    let shared = Arc::new(Shared {
        signaled: watch::Sender::new(false),
        n_guards: AtomicUsize::new(0),
        unguarded: Notify::new(),
    });
    (Signal { shared: shared.clone() }, Watch { shared })
}

impl Signal {
    /// Tells all watches, then waits until no guard is left.
    pub async fn drain(self) {
        self.shared.signaled.send_replace(true);
        loop {
            let mut unguarded = pin!(self.shared.unguarded.notified());
            // From here on it is told; before it would not have been.
            unguarded.as_mut().enable();
            if self.shared.n_guards.load(Ordering::Acquire) == 0 {
                return;
            }
            unguarded.await;
        }
    }
}

impl Watch {
    /// Waits for the signal; at once when it has been given.
    pub async fn signaled(&self) {
        // An error means that the sender is gone, and it outlives this borrow.
        let _ = self.shared.signaled.subscribe().wait_for(|signaled| *signaled).await;
    }

    pub fn is_signaled(&self) -> bool {
        *self.shared.signaled.borrow()
    }

    /// Holds the drain open until the guard is dropped.
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
    async fn nothing_happens_before_the_signal() {
        let (signal, watch) = channel();
        assert!(timeout(Duration::from_secs(60), watch.signaled()).await.is_err());
        drop(watch);
        timeout(Duration::from_secs(1), signal.drain()).await.unwrap();
    }
}
