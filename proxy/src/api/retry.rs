//! Pauses between attempts, cut short when something waits for the next one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

/// Asks for the next attempt soon; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RetrySignal(Arc<Notify>);

impl RetrySignal {
    /// Cuts the current pause short, or the next one if there is none.
    pub(crate) fn retry_soon(&self) {
        self.0.notify_one();
    }

    /// Pauses for `delay`. Once a retry is asked for, no longer than [`MIN_RETRY_DELAY`], counted from the beginning.
    pub(super) async fn pause(&self, delay: Duration) {
        let least = delay.min(MIN_RETRY_DELAY);
        sleep(least).await;
        tokio::select! {
            () = sleep(delay - least) => {}
            () = self.0.notified() => {}
        }
    }
}

/// Minimum pause between attempts, however many connections wait for the next one.
pub(crate) const MIN_RETRY_DELAY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_cut_short_to_its_minimum_once_a_retry_is_asked_for() {
        let signal = RetrySignal::default();
        let minute = Duration::from_secs(60);
        let took = async |delay| {
            let began_at = Instant::now();
            signal.pause(delay).await;
            began_at.elapsed()
        };
        assert_eq!(took(minute).await, minute);
        for _ in 0..3 {
            signal.retry_soon();
        }
        assert_eq!(took(minute).await, MIN_RETRY_DELAY);
        assert_eq!(took(minute).await, minute, "it was asked for once");
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
