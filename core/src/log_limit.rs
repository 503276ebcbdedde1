//! Limits repeated log lines: one line per minute for each kind and source.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Permits one log line per minute for each kind and source, and counts the suppressed ones. The source is what the line is
/// about: the client's address, or another key such as a verified name; `()` if each kind has one line.
pub struct LogLimiter<S = IpAddr> {
    state: Mutex<State<S>>,
}

struct State<S> {
    /// The start of the current minute.
    window_started_at: Option<Instant>,
    /// Suppressed lines by kind and source, of the keys that have logged a line in this minute.
    suppressed: HashMap<(&'static str, S), u64>,
    /// Suppressed lines of the keys that came after [`MAX_KEYS_PER_WINDOW`] others.
    suppressed_of_other_keys: u64,
}

impl<S> Default for LogLimiter<S> {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
        }
    }
}

impl<S> Default for State<S> {
    fn default() -> Self {
        Self {
            window_started_at: None,
            suppressed: HashMap::new(),
            suppressed_of_other_keys: 0,
        }
    }
}

impl<S: Eq + Hash> LogLimiter<S> {
    /// Permits a line of this kind about this source, or suppresses it and returns `None`.
    ///
    /// `kind` is a constant that identifies the log statement. At most 256 keys (pairs of kind and source) have a line in a
    /// minute; lines of further keys are suppressed.
    pub fn allow(&self, kind: &'static str, source: S) -> Option<SuppressedLines> {
        let now = Instant::now();
        let mut state = self.state.lock();
        let mut previously_suppressed = 0;
        if state
            .window_started_at
            .is_none_or(|started_at| now - started_at >= LOG_WINDOW)
        {
            previously_suppressed = state.suppressed.values().sum::<u64>() + state.suppressed_of_other_keys;
            *state = State {
                window_started_at: Some(now),
                ..State::default()
            };
        }
        let is_full = state.suppressed.len() >= MAX_KEYS_PER_WINDOW;
        let key = (kind, source);
        match state.suppressed.get_mut(&key) {
            Some(suppressed) => *suppressed += 1,
            None if is_full => state.suppressed_of_other_keys += 1,
            None => {
                state.suppressed.insert(key, 0);
                return Some(SuppressedLines(previously_suppressed));
            }
        }
        None
    }
}

/// The number of lines that the limiter suppressed in its previous minute, of all kinds and sources. Only the first line of a
/// minute has the number; the others have 0. The previous minute may have ended long before, because a minute begins with its
/// first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuppressedLines(u64);

impl SuppressedLines {
    /// The number for a log field; `None` if no line was suppressed.
    pub fn count(self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

/// Writes an `info` line about a source if the [`LogLimiter`] permits it; the message is its kind.
#[macro_export]
macro_rules! info_limited {
    ($limiter:expr, $source:expr, $message:literal $(, $($fields:tt)+)?) => {
        if let Some(suppressed) = $limiter.allow($message, $source) {
            ::tracing::info!(suppressed_all_kinds = suppressed.count(), $($($fields)+,)? $message);
        }
    };
}

/// As [`info_limited`], at the level `warn`.
#[macro_export]
macro_rules! warn_limited {
    ($limiter:expr, $source:expr, $message:literal $(, $($fields:tt)+)?) => {
        if let Some(suppressed) = $limiter.allow($message, $source) {
            ::tracing::warn!(suppressed_all_kinds = suppressed.count(), $($($fields)+,)? $message);
        }
    };
}

const LOG_WINDOW: Duration = Duration::from_secs(60);
const MAX_KEYS_PER_WINDOW: usize = 256;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_kind_and_source_has_a_line_per_minute_and_there_are_at_most_256_lines() {
        let limiter = LogLimiter::<IpAddr>::default();
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
