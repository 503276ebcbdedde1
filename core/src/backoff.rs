//! Jittered exponential backoff, for every loop that connects.

use std::time::Duration;

/// Parameters of the delay between attempts.
///
/// The base doubles from `min` to `max`; the delay is drawn from `base` to `base * (1 + jitter)`. The jitter also applies
/// to `max`, so that many clients do not retry at the same time after a long outage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub min: Duration,
    pub max: Duration,
    /// Maximum fraction of the base that is added; zero, negative and NaN add nothing.
    pub jitter: f64,
}

/// The delays of one series of attempts.
#[derive(Clone, Debug)]
pub struct BackoffDelays {
    backoff: Backoff,
    base: Duration,
}

impl Backoff {
    pub fn start(&self) -> BackoffDelays {
        BackoffDelays {
            backoff: *self,
            base: self.min,
        }
    }

    /// The same parameters, with `min` and `max` of at most `limit`.
    #[must_use]
    pub fn capped_at(self, limit: Duration) -> Self {
        Self {
            min: self.min.min(limit),
            max: self.max.min(limit),
            ..self
        }
    }
}

impl BackoffDelays {
    /// Returns the delay before the next attempt, and doubles the base.
    pub fn next_delay(&mut self) -> Duration {
        let base = self.base;
        self.base = base.saturating_mul(2).min(self.backoff.max).max(self.backoff.min);
        let extra = base.as_secs_f64() * self.backoff.jitter.max(0.0) * fastrand::f64();
        base.saturating_add(Duration::try_from_secs_f64(extra).unwrap_or(Duration::ZERO))
    }

    /// Starts again at `min`; called after a success.
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
        .start();
        let delays: Vec<u128> = (0..4).map(|_| steps.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 200, 350, 350]);
        steps.reset();
        assert_eq!(steps.next_delay().as_millis(), 100);
        let mut steps = steps.backoff.capped_at(Duration::from_millis(150)).start();
        let delays: Vec<u128> = (0..3).map(|_| steps.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 150, 150]);
    }

    #[test]
    fn jitter_only_adds_and_invalid_values_add_nothing() {
        let second = Duration::from_secs(1);
        for _ in 0..100 {
            let delay = Backoff {
                min: second,
                max: second,
                jitter: 0.5,
            }
            .start()
            .next_delay();
            assert!((1.0..1.5001).contains(&delay.as_secs_f64()), "{delay:?}");
        }
        for jitter in [f64::NAN, f64::INFINITY, -1.0] {
            let mut steps = Backoff {
                min: Duration::ZERO,
                max: Duration::MAX,
                jitter,
            }
            .start();
            assert_eq!(steps.next_delay(), Duration::ZERO);
        }
    }
}
