//! When something is due by the time of day, such as a certificate's renewal.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

/// Tells the time of day.
pub type Clock = fn() -> SystemTime;

/// A time that has come when a timer has run for so long, or when it is so late by the time of day, whichever is first.
///
/// Certificates expire by the time of day, which goes on while a machine is suspended, and may be set; timers do not.
#[derive(Clone, Copy, Debug)]
pub struct Due {
    at: Instant,
    by_clock: SystemTime,
    clock: Clock,
}

impl Due {
    pub fn after(delay: Duration, clock: Clock) -> Self {
        Self {
            at: Instant::now() + delay,
            by_clock: clock() + delay,
            clock,
        }
    }

    pub fn is_now(&self) -> bool {
        self.at <= Instant::now() || self.by_clock <= (self.clock)()
    }

    /// Waits until it is due, or [`CLOCK_INTERVAL`] longer after the clock has jumped; nothing is lost when it is dropped.
    pub async fn wait(&self) {
        while !self.is_now() {
            sleep_until(self.at.min(Instant::now() + CLOCK_INTERVAL)).await;
        }
    }
}

/// How often the clock is looked at.
pub const CLOCK_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::UNIX_EPOCH;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_timer_that_ran_is_due_whatever_the_clock_says() {
        let due = Due::after(HOUR, || UNIX_EPOCH + HOUR);
        let started_at = Instant::now();
        assert!(!due.is_now());
        due.wait().await;
        assert_eq!(started_at.elapsed(), HOUR);
        assert!(due.is_now());
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_jumps_is_noticed_at_the_next_look() {
        static NOW: AtomicU64 = AtomicU64::new(0);
        let due = Due::after(HOUR, || UNIX_EPOCH + Duration::from_secs(NOW.load(Ordering::SeqCst)));
        let started_at = Instant::now();
        let waiting = tokio::spawn(async move { due.wait().await });
        tokio::time::sleep(CLOCK_INTERVAL / 2).await;
        assert!(!waiting.is_finished());
        NOW.store(3600, Ordering::SeqCst);
        assert!(due.is_now());
        waiting.await.unwrap();
        assert_eq!(started_at.elapsed(), CLOCK_INTERVAL);
    }
}
