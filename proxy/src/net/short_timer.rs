//! Waits with a finer resolution than that of the runtime's timers, which is a millisecond.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    time::Duration,
};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use tokio::io::{Interest, unix::AsyncFd};

/// A kernel timer with a fixed duration that wakes one task at a time.
pub(crate) struct ShortTimer {
    timer: AsyncFd<AsRawTimerFd>,
    time: Duration,
}

struct AsRawTimerFd(TimerFd);

impl AsRawFd for AsRawTimerFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl ShortTimer {
    /// # Errors
    /// The process lacks the resources to create or register a timer.
    pub(crate) fn new(time: Duration) -> io::Result<Self> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        let timer = register(AsRawTimerFd(timer))?;
        Ok(Self { timer, time })
    }

    /// Never ends with a duration of zero.
    ///
    /// # Errors
    /// The runtime shuts down.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        let once = Expiration::OneShot(TimeSpec::from_duration(self.time));
        self.timer.get_ref().0.set(once, TimerSetTimeFlags::empty())?;
        loop {
            // After a cancelled wait, the runtime may still report the timer as ready.
            let mut ready = self.timer.readable().await?;
            if let Ok(ended) = ready.try_io(|timer| Ok(timer.get_ref().0.wait()?)) {
                return ended;
            }
        }
    }
}

#[expect(unsafe_code, reason = "AsyncFd requires a safety guarantee")]
fn register(timer: AsRawTimerFd) -> io::Result<AsyncFd<AsRawTimerFd>> {
    // SAFETY: a timer owns its descriptor and keeps it until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;

    async fn check_duration(pause: &ShortTimer) {
        let began_at = Instant::now();
        pause.wait().await.unwrap();
        assert!(began_at.elapsed() >= pause.time);
    }

    #[tokio::test]
    async fn a_wait_ends_when_the_time_has_passed_and_not_before() {
        for micros in [200, 50] {
            check_duration(&ShortTimer::new(Duration::from_micros(micros)).unwrap()).await;
        }
    }

    #[tokio::test]
    async fn a_cancelled_wait_does_not_end_the_next_one() {
        let pause = ShortTimer::new(Duration::from_micros(200)).unwrap();
        for _ in 0..5 {
            assert!(pause.wait().now_or_never().is_none());
            // The runtime has marked the timer as ready.
            pause.timer.readable().await.unwrap().retain_ready();
            check_duration(&pause).await;
        }
    }
}
