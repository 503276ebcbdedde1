//! Limits log lines that clients can cause: one line a minute for each kind of line and client address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Counts the lines of the current minute by source.
#[derive(Default)]
pub struct LogLimiter {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The start of the current minute.
    window_started_at: Option<Instant>,
    /// Number of suppressed lines of each source that had a line.
    sources: HashMap<(&'static str, IpAddr), u64>,
    /// Number of suppressed lines of sources above the maximum.
    n_suppressed: u64,
}

impl LogLimiter {
    /// Whether to write a line of this kind about this client. `Some` carries the number of lines suppressed in the
    /// previous window.
    ///
    /// `kind` is a constant that identifies the log statement. At most 256 sources have a line in a minute; lines of
    /// further sources are suppressed.
    pub fn allow(&self, kind: &'static str, client: IpAddr) -> Option<SuppressedLines> {
        let now = Instant::now();
        let mut state = self.state.lock();
        let mut n_before = 0;
        if state
            .window_started_at
            .is_none_or(|began_at| now - began_at >= LOG_WINDOW)
        {
            n_before = state.sources.values().sum::<u64>() + state.n_suppressed;
            *state = State {
                window_started_at: Some(now),
                ..State::default()
            };
        }
        let is_full = state.sources.len() >= MAX_SOURCES_PER_WINDOW;
        match state.sources.get_mut(&(kind, client)) {
            Some(n_left_out) => *n_left_out += 1,
            None if is_full => state.n_suppressed += 1,
            None => {
                state.sources.insert((kind, client), 0);
                return Some(SuppressedLines(n_before));
            }
        }
        None
    }
}

/// The number of lines, of all sources, that were suppressed in the previous minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuppressedLines(u64);

impl SuppressedLines {
    /// The number for a log field; `None` if no line was suppressed.
    pub fn count(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

/// Writes an `info` line about a client if the [`LogLimiter`] permits it; the message is its kind.
#[macro_export]
macro_rules! info_limited {
    ($limiter:expr, $client:expr, $message:literal $(, $($fields:tt)+)?) => {
        if let Some(suppressed) = $limiter.allow($message, $client) {
            ::tracing::info!(left_out = suppressed.count(), $($($fields)+,)? $message);
        }
    };
}

const LOG_WINDOW: Duration = Duration::from_secs(60);
const MAX_SOURCES_PER_WINDOW: usize = 256;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_source_has_a_line_a_minute_and_there_are_no_more_than_256_sources() {
        let limiter = LogLimiter::default();
        let permits = |kind, n: u32| limiter.allow(kind, Ipv4Addr::from(n).into());
        assert_eq!(permits("refused", 1), Some(SuppressedLines(0)));
        assert_eq!(permits("refused", 1), None);
        assert_eq!(permits("handshake", 1), Some(SuppressedLines(0)));
        let n_lines = (0..10_000).filter(|n| permits("refused", *n).is_some()).count();
        assert_eq!(n_lines, 254);
        advance(LOG_WINDOW).await;
        assert_eq!(permits("refused", 1), Some(SuppressedLines(9747)), "all but those 256");
    }
}
