//! The end of the use of a dialled connection for new requests.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    task::JoinHandle,
    time::{Instant, sleep_until},
};

/// When a connection gets no further request. Requests in progress are not affected.
#[derive(Debug)]
pub(crate) struct Retirement {
    pub(crate) at: Instant,
    /// Set to end its use before this time.
    pub(crate) is_early: Arc<AtomicBool>,
}

/// Tells whether a connection has to be retired, without reading the clock.
#[derive(Debug)]
pub(crate) struct RetirementTimer {
    sleep: JoinHandle<()>,
    is_early: Arc<AtomicBool>,
}

impl Retirement {
    pub(crate) fn is_due(&self) -> bool {
        self.is_early.load(Ordering::Relaxed) || Instant::now() >= self.at
    }

    pub(crate) fn start_timer(self) -> RetirementTimer {
        RetirementTimer {
            sleep: tokio::spawn(sleep_until(self.at)),
            is_early: self.is_early,
        }
    }
}

impl RetirementTimer {
    pub(crate) fn is_due(&self) -> bool {
        self.is_early.load(Ordering::Relaxed) || self.sleep.is_finished()
    }
}

impl Drop for RetirementTimer {
    fn drop(&mut self) {
        self.sleep.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_retired_at_its_time_or_earlier_on_request() {
        let is_early = Arc::new(AtomicBool::new(false));
        let at = Instant::now() + Duration::from_secs(60);
        let new = || Retirement {
            at,
            is_early: is_early.clone(),
        };
        let (retirement, timer) = (new(), new().start_timer());
        sleep(Duration::from_secs(59)).await;
        assert!(!retirement.is_due() && !timer.is_due());
        is_early.store(true, Ordering::Relaxed);
        assert!(retirement.is_due() && timer.is_due());
        is_early.store(false, Ordering::Relaxed);
        sleep(Duration::from_secs(2)).await;
        assert!(retirement.is_due() && timer.is_due());
    }
}
