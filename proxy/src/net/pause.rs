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

/// A clock of the kernel's that wakes one task at a time.
pub(crate) struct Pause(AsyncFd<Timer>);

struct Timer(TimerFd);

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Pause {
    /// # Errors
    /// The process is short of what the system needs to watch a timer.
    pub(crate) fn new() -> io::Result<Self> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        Ok(Self(watched(Timer(timer))?))
    }

    /// May end at once where the wait before was given up.
    ///
    /// # Errors
    /// The time is none, or the runtime ends.
    pub(crate) async fn wait(&self, time: Duration) -> io::Result<()> {
        let once = Expiration::OneShot(TimeSpec::from_duration(time));
        self.0.get_ref().0.set(once, TimerSetTimeFlags::empty())?;
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}

#[expect(unsafe_code, reason = "tokio asks for a promise")]
fn watched(timer: Timer) -> io::Result<AsyncFd<Timer>> {
    // SAFETY: a timer owns its descriptor, and has the same one until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn it_ends_when_the_time_has_passed_and_not_before() {
        let pause = Pause::new().unwrap();
        for micros in [200, 50] {
            let (began_at, time) = (Instant::now(), Duration::from_micros(micros));
            pause.wait(time).await.unwrap();
            assert!(began_at.elapsed() >= time);
        }
    }
}
