//! Jittered exponential backoff, for everything that dials in a loop.

use std::time::Duration;

/// How long to wait between attempts.
///
/// The base doubles from `min` to `max`; the delay is drawn from `base` to `base * (1 + jitter)`.
/// The jitter goes on top of `max` as well, so that a fleet that has waited long stays spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub min: Duration,
    pub max: Duration,
    /// Part of the base that is added at most; nothing when it is not a positive number.
    pub jitter: f64,
}

/// One run of attempts.
#[derive(Clone, Debug)]
pub struct Steps {
    backoff: Backoff,
    base: Duration,
}

impl Backoff {
    pub fn steps(&self) -> Steps {
        Steps {
            backoff: *self,
            base: self.min,
        }
    }

    /// The same, with a base of no more than `limit`.
    #[must_use]
    pub fn at_most(self, limit: Duration) -> Self {
        Self {
            min: self.min.min(limit),
            max: self.max.min(limit),
            ..self
        }
    }
}

impl Steps {
    /// The time to wait before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let base = self.base;
        self.base = base.saturating_mul(2).min(self.backoff.max).max(self.backoff.min);
        let extra = base.as_secs_f64() * self.backoff.jitter.max(0.0) * fastrand::f64();
        base.saturating_add(Duration::try_from_secs_f64(extra).unwrap_or(Duration::ZERO))
    }

    /// Starts over, after a success.
    pub fn reset(&mut self) {
        self.base = self.backoff.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_start_over() {
        let mut steps = Backoff {
            min: Duration::from_millis(100),
            max: Duration::from_millis(350),
            jitter: 0.0,
        }
        .steps();
        let delays: Vec<u128> = (0..4).map(|_| steps.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 200, 350, 350]);
        steps.reset();
        assert_eq!(steps.next_delay().as_millis(), 100);
        let mut steps = steps.backoff.at_most(Duration::from_millis(150)).steps();
        let delays: Vec<u128> = (0..3).map(|_| steps.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 150, 150]);
    }

    #[test]
    fn jitter_only_adds_and_nonsense_adds_nothing() {
        let second = Duration::from_secs(1);
        for _ in 0..100 {
            let delay = Backoff {
                min: second,
                max: second,
                jitter: 0.5,
            }
            .steps()
            .next_delay();
            assert!((1.0..1.5001).contains(&delay.as_secs_f64()), "{delay:?}");
        }
        for jitter in [f64::NAN, f64::INFINITY, -1.0] {
            let mut steps = Backoff {
                min: Duration::ZERO,
                max: Duration::MAX,
                jitter,
            }
            .steps();
            assert_eq!(steps.next_delay(), Duration::ZERO);
        }
    }
}
