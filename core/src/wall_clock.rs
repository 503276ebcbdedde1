//! Deadlines by the wall clock, such as the renewal of a certificate.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

/// Returns the wall-clock time.
pub type Clock = fn() -> SystemTime;

/// A deadline by the monotonic clock and by the wall clock, whichever comes first.
///
/// Certificates expire by the wall clock, which continues while the machine is suspended, and which can be set. Tokio's timers
/// stop while the machine is suspended, and ignore changes of the wall clock.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    monotonic: Instant,
    wall: SystemTime,
    clock: Clock,
}

impl Deadline {
    pub fn after(delay: Duration, clock: Clock) -> Self {
        Self {
            monotonic: Instant::now() + delay,
            wall: clock() + delay,
            clock,
        }
    }

    pub fn has_passed(&self) -> bool {
        self.monotonic <= Instant::now() || self.wall <= (self.clock)()
    }

    /// Waits until the deadline has passed. A jump of the wall clock is noticed within [`CLOCK_CHECK_INTERVAL`].
    /// Cancel-safe.
    pub async fn wait(&self) {
        while !self.has_passed() {
            sleep_until(self.monotonic.min(Instant::now() + CLOCK_CHECK_INTERVAL)).await;
        }
    }
}

/// Interval between two checks of the wall clock.
pub const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::UNIX_EPOCH;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_deadline_passes_by_the_timer_even_if_the_clock_is_set_back() {
        let due = Deadline::after(HOUR, || UNIX_EPOCH + HOUR);
        let started_at = Instant::now();
        assert!(!due.has_passed());
        due.wait().await;
        assert_eq!(started_at.elapsed(), HOUR);
        assert!(due.has_passed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_jump_is_noticed_at_the_next_check() {
        static NOW: AtomicU64 = AtomicU64::new(0);
        let due = Deadline::after(HOUR, || UNIX_EPOCH + Duration::from_secs(NOW.load(Ordering::SeqCst)));
        let started_at = Instant::now();
        let waiting = tokio::spawn(async move { due.wait().await });
        tokio::time::sleep(CLOCK_CHECK_INTERVAL / 2).await;
        assert!(!waiting.is_finished());
        NOW.store(3600, Ordering::SeqCst);
        assert!(due.has_passed());
        waiting.await.unwrap();
        assert_eq!(started_at.elapsed(), CLOCK_CHECK_INTERVAL);
    }
}
