//! The time from which a dialled connection gets no further request.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{
    task::JoinHandle,
    time::{Instant, sleep_until},
};

/// The time from which a connection gets no further request. Requests in progress are not affected.
#[derive(Debug)]
pub(crate) struct Retirement {
    pub(crate) at: Instant,
    /// Set when a trust anchor is removed. The connection is then retired after `delay_after_removal`.
    pub(crate) anchor_removed_at: Arc<OnceLock<Instant>>,
    pub(crate) delay_after_removal: Duration,
}

/// A [`Retirement`] whose time a task waits for, so that the clock is read only after a trust anchor was removed.
#[derive(Debug)]
pub(crate) struct RetirementTimer {
    sleep: JoinHandle<()>,
    retirement: Retirement,
}

impl Retirement {
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now >= self.at || self.is_due_after_removal(|| now)
    }

    fn is_due_after_removal(&self, now: impl FnOnce() -> Instant) -> bool {
        let removed_at = self.anchor_removed_at.get();
        removed_at.is_some_and(|removed_at| now() >= *removed_at + self.delay_after_removal)
    }

    pub(crate) fn start_timer(self) -> RetirementTimer {
        RetirementTimer {
            sleep: tokio::spawn(sleep_until(self.at)),
            retirement: self,
        }
    }
}

impl RetirementTimer {
    pub(crate) fn is_due(&self) -> bool {
        self.sleep.is_finished() || self.retirement.is_due_after_removal(Instant::now)
    }
}

impl Drop for RetirementTimer {
    fn drop(&mut self) {
        self.sleep.abort();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_retired_at_its_time_or_after_a_trust_anchor_was_removed() {
        let at = Instant::now() + Duration::from_secs(60);
        let new = || {
            let anchor_removed_at = Arc::new(OnceLock::new());
            let retirement = || Retirement {
                at,
                anchor_removed_at: anchor_removed_at.clone(),
                delay_after_removal: Duration::from_secs(3),
            };
            (retirement(), retirement().start_timer(), anchor_removed_at)
        };
        let is_due = |retirement: &Retirement, timer: &RetirementTimer| {
            let is_due = retirement.is_due(Instant::now());
            assert_eq!(timer.is_due(), is_due);
            is_due
        };
        let (regular, regular_timer, _) = new();
        let (early, early_timer, anchor_removed_at) = new();
        sleep(Duration::from_secs(50)).await;
        anchor_removed_at.set(Instant::now()).unwrap();
        sleep(Duration::from_secs(2)).await;
        assert!(!is_due(&early, &early_timer));
        sleep(Duration::from_secs(2)).await;
        assert!(is_due(&early, &early_timer));
        assert!(!is_due(&regular, &regular_timer));
        sleep(Duration::from_secs(7)).await;
        assert!(is_due(&regular, &regular_timer));
    }
}
