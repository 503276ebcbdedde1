//! Decides when an HTTP/2 connection without requests is closed.

use std::time::Duration;

/// Measures how long a connection has had no request.
pub(super) struct IdleTracker {
    pub(super) check_interval: Duration,
    idle_for: Duration,
    /// The idle limit that applies now. Before the first request, it is at most the header timeout.
    current_limit: Duration,
    limit_after_first_request: Duration,
}

/// How long a connection has been idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleState {
    /// Not idle, or idle for less than the limit.
    BelowLimit,
    /// Idle for the limit: GOAWAY must be sent.
    LimitReached,
    /// Idle for one more interval: the connection is closed if GOAWAY was sent.
    LimitExceeded,
}

/// Activity of a connection since the last check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionActivity {
    Idle,
    Busy,
}

impl IdleTracker {
    pub(super) fn new(head_timeout: Duration, idle_timeout: Duration) -> Self {
        let current_limit = head_timeout.min(idle_timeout);
        Self {
            check_interval: CHECK_INTERVAL.min(current_limit).max(Duration::from_millis(1)),
            idle_for: Duration::ZERO,
            current_limit,
            limit_after_first_request: idle_timeout,
        }
    }

    pub(super) fn update(&mut self, activity: ConnectionActivity) -> IdleState {
        match activity {
            ConnectionActivity::Idle => self.idle_for += self.check_interval,
            ConnectionActivity::Busy => {
                self.idle_for = Duration::ZERO;
                self.current_limit = self.limit_after_first_request;
            }
        }
        match self.idle_for {
            idle_for if idle_for < self.current_limit => IdleState::BelowLimit,
            idle_for if idle_for < self.current_limit.saturating_add(self.check_interval) => IdleState::LimitReached,
            _ => IdleState::LimitExceeded,
        }
    }
}

/// Interval of the activity checks, unless a timeout is shorter. Each check also ends request tasks that are not needed.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn an_idle_connection_gets_go_away_and_is_then_closed() {
        use ConnectionActivity::{Busy, Idle};
        use IdleState::{BelowLimit, LimitExceeded, LimitReached};
        let cases: [(_, _, &[_]); 4] = [
            (
                30 * S,
                3600 * S,
                &[
                    (Idle, BelowLimit),
                    (Idle, BelowLimit),
                    (Idle, LimitReached),
                    (Idle, LimitExceeded),
                ],
            ),
            // After the first request, the longer timeout applies.
            (
                10 * S,
                30 * S,
                &[
                    (Busy, BelowLimit),
                    (Idle, BelowLimit),
                    (Idle, BelowLimit),
                    (Idle, LimitReached),
                    (Busy, BelowLimit),
                ],
            ),
            // Activity after GOAWAY keeps the connection open.
            (
                10 * S,
                20 * S,
                &[
                    (Idle, LimitReached),
                    (Busy, BelowLimit),
                    (Idle, BelowLimit),
                    (Idle, LimitReached),
                    (Idle, LimitExceeded),
                ],
            ),
            (S / 5, S / 10, &[(Idle, LimitReached), (Idle, LimitExceeded)]),
        ];
        for (head, idle, steps) in cases {
            let mut idle_tracker = IdleTracker::new(head, idle);
            for (activity, expected) in steps {
                assert_eq!(
                    idle_tracker.update(*activity),
                    *expected,
                    "{head:?}, {idle:?}: {steps:?}"
                );
            }
        }
        assert_eq!(IdleTracker::new(30 * S, 3600 * S).check_interval, CHECK_INTERVAL);
        assert!(IdleTracker::new(Duration::ZERO, Duration::ZERO).check_interval > Duration::ZERO);
    }
}
