//! Keeps those who can be made to write lines into the log from filling it: one line a minute for each source.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Who had a line, and when.
#[derive(Default)]
pub struct LogLimiter {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Since when the sources are counted.
    began_at: Option<Instant>,
    /// Lines left out, for each source that has had one.
    sources: HashMap<(&'static str, IpAddr), u64>,
    /// Lines of sources that are one too many.
    n_left_out: u64,
}

impl LogLimiter {
    /// Whether a line of this kind about this client is to be written; with how many were left out since the last minute's first.
    ///
    /// A kind is a word of the caller's for one line of the code. There are 256 sources a minute at most, then lines are left out,
    /// whoever they are about.
    pub fn permits(&self, kind: &'static str, client: IpAddr) -> Option<LeftOut> {
        let now = Instant::now();
        let mut state = self.state.lock();
        let mut n_before = 0;
        if state.began_at.is_none_or(|began_at| now - began_at >= INTERVAL) {
            n_before = state.sources.values().sum::<u64>() + state.n_left_out;
            *state = State {
                began_at: Some(now),
                ..State::default()
            };
        }
        let is_full = state.sources.len() >= MAX_SOURCES;
        match state.sources.get_mut(&(kind, client)) {
            Some(n_left_out) => *n_left_out += 1,
            None if is_full => state.n_left_out += 1,
            None => {
                state.sources.insert((kind, client), 0);
                return Some(LeftOut(n_before));
            }
        }
        None
    }
}

/// How many lines, of all sources, were left out in the minute before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut(u64);

impl LeftOut {
    /// What a line says of it: nothing where there were none.
    pub fn shown(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

/// Writes a line of level `info` about a client, as far as a [`LogLimiter`] permits it; the message is its kind.
#[macro_export]
macro_rules! info_limited {
    ($limiter:expr, $client:expr, $message:literal $(, $($fields:tt)+)?) => {
        if let Some(left_out) = $limiter.permits($message, $client) {
            ::tracing::info!(left_out = left_out.shown(), $($($fields)+,)? $message);
        }
    };
}

const INTERVAL: Duration = Duration::from_secs(60);
const MAX_SOURCES: usize = 256;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_source_has_a_line_a_minute_and_there_are_no_more_than_256_sources() {
        let limiter = LogLimiter::default();
        let permits = |kind, n: u32| limiter.permits(kind, Ipv4Addr::from(n).into());
        assert_eq!(permits("refused", 1), Some(LeftOut(0)));
        assert_eq!(permits("refused", 1), None);
        assert_eq!(permits("handshake", 1), Some(LeftOut(0)));
        let n_lines = (0..10_000).filter(|n| permits("refused", *n).is_some()).count();
        assert_eq!(n_lines, 254);
        advance(INTERVAL).await;
        assert_eq!(permits("refused", 1), Some(LeftOut(9747)), "all but those 256");
    }
}
