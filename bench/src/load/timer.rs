//! A timer with microsecond precision. Tokio's timer has millisecond precision, which would distort the latencies of an open loop.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// A timerfd for one waiting task.
pub(super) struct Timer(AsyncFd<Fd>);

impl Timer {
    #[allow(unsafe_code)]
    pub(super) fn new() -> io::Result<Self> {
        let fd = Fd(TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?);
        // SAFETY: `Fd` owns its descriptor and always returns the same one, and `AsyncFd` keeps `Fd` alive until it is
        // deregistered.
        Ok(Self(unsafe {
            AsyncFd::register_with_interest(fd, Interest::READABLE)
        }?))
    }

    /// Waits until `at`. Returns immediately if it has passed.
    pub(super) async fn sleep_until(&self, at: Instant) -> io::Result<()> {
        let left = at.saturating_duration_since(Instant::now());
        // A value of zero would disarm the timer.
        if left.is_zero() {
            return Ok(());
        }
        let once = Expiration::OneShot(TimeSpec::from_duration(left));
        self.0.get_ref().0.set(once, TimerSetTimeFlags::empty())?;
        self.0.async_io(Interest::READABLE, |fd| Ok(fd.0.wait()?)).await
    }
}

/// Implements `AsRawFd`, which `AsyncFd` requires.
struct Fd(TimerFd);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}
