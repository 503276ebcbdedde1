//! Backoff delays that can be shortened when something waits for the next attempt.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

/// A request to make the next attempt early; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RetrySignal(Arc<Notify>);

impl RetrySignal {
    /// Shortens the current delay, or the next one if there is none.
    pub(crate) fn retry_soon(&self) {
        self.0.notify_one();
    }

    /// Waits for `delay`. A request for an early attempt ends the wait, but not before [`MIN_RETRY_DELAY`].
    pub(super) async fn wait(&self, delay: Duration) {
        let min_delay = delay.min(MIN_RETRY_DELAY);
        sleep(min_delay).await;
        tokio::select! {
            () = sleep(delay - min_delay) => {}
            () = self.0.notified() => {}
        }
    }
}

/// Minimum delay before an early attempt, however often one is requested. A shorter backoff is not extended.
pub(crate) const MIN_RETRY_DELAY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_retry_request_shortens_the_delay_to_its_minimum() {
        let signal = RetrySignal::default();
        let minute = Duration::from_secs(60);
        let took = async |delay| {
            let began_at = Instant::now();
            signal.wait(delay).await;
            began_at.elapsed()
        };
        assert_eq!(took(minute).await, minute);
        for _ in 0..3 {
            signal.retry_soon();
        }
        assert_eq!(took(minute).await, MIN_RETRY_DELAY);
        assert_eq!(
            took(minute).await,
            minute,
            "several requests before an attempt count as one"
        );
        let later = async {
            sleep(Duration::from_secs(1)).await;
            signal.retry_soon();
        };
        let (paused, ()) = tokio::join!(took(minute), later);
        assert_eq!(paused, Duration::from_secs(1));
        let short = Duration::from_millis(20);
        assert_eq!(took(short).await, short);
    }
}
