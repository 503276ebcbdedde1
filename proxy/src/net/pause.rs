//! Waits shorter than a millisecond, which is what the runtime's timers count in.

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

/// A clock of the kernel's that wakes one task at a time, always after the same time.
pub(crate) struct Pause {
    timer: AsyncFd<Timer>,
    time: Duration,
}

struct Timer(TimerFd);

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Pause {
    /// # Errors
    /// The process is short of what the system needs to watch a timer.
    pub(crate) fn new(time: Duration) -> io::Result<Self> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        let timer = watched(Timer(timer))?;
        Ok(Self { timer, time })
    }

    /// # Errors
    /// The time is none, or the runtime ends.
    pub(crate) async fn wait(&self) -> io::Result<()> {
        let once = Expiration::OneShot(TimeSpec::from_duration(self.time));
        self.timer.get_ref().0.set(once, TimerSetTimeFlags::empty())?;
        loop {
            // Of a wait before that was given up, the runtime may still believe that it has ended.
            let mut ready = self.timer.readable().await?;
            if let Ok(ended) = ready.try_io(|timer| Ok(timer.get_ref().0.wait()?)) {
                return ended;
            }
        }
    }
}

#[expect(unsafe_code, reason = "tokio asks for a promise")]
fn watched(timer: Timer) -> io::Result<AsyncFd<Timer>> {
    // SAFETY: a timer owns its descriptor, and has the same one until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;

    async fn lasts(pause: &Pause) {
        let began_at = Instant::now();
        pause.wait().await.unwrap();
        assert!(began_at.elapsed() >= pause.time);
    }

    #[tokio::test]
    async fn it_ends_when_the_time_has_passed_and_not_before() {
        for micros in [200, 50] {
            lasts(&Pause::new(Duration::from_micros(micros)).unwrap()).await;
        }
    }

    #[tokio::test]
    async fn it_does_not_end_for_a_wait_that_was_given_up() {
        let pause = Pause::new(Duration::from_micros(200)).unwrap();
        for _ in 0..5 {
            assert!(pause.wait().now_or_never().is_none());
            // The runtime knows that this has ended.
            pause.timer.readable().await.unwrap().retain_ready();
            lasts(&pause).await;
        }
    }
}
