//! Keeping a retry budget: requests pay for retries.

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::policy::profile::RetryBudget;

/// The account behind a [`RetryBudget`], shared by all routes of a profile.
///
/// Requests count for `ttl`, in ten steps; so do the retries that were paid.
#[derive(Debug)]
pub(crate) struct Budget {
    terms: RetryBudget,
    start: Instant,
    account: Mutex<Account>,
}

#[derive(Debug, Default)]
struct Account {
    /// The step that `slots[step % SLOTS]` stands for.
    step: u64,
    slots: [Slot; SLOTS as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    requests: u32,
    retries: u32,
}

impl Budget {
    pub(crate) fn new(terms: RetryBudget, now: Instant) -> Self {
        Self {
            terms,
            start: now,
            account: Mutex::default(),
        }
    }

    /// Counts a request that is not a retry.
    pub(crate) fn deposit(&self, now: Instant) {
        let step = self.step(now);
        let mut account = self.account.lock();
        let slot = account.current(step);
        slot.requests = slot.requests.saturating_add(1);
    }

    /// Pays for one retry, if there is enough.
    #[must_use]
    pub(crate) fn withdraw(&self, now: Instant) -> bool {
        let step = self.step(now);
        let mut account = self.account.lock();
        account.current(step);
        let (requests, retries) = account.slots.iter().fold((0.0, 0.0), |(requests, retries), slot| {
            (requests + f64::from(slot.requests), retries + f64::from(slot.retries))
        });
        let free = f64::from(self.terms.min_per_second) * self.terms.ttl.as_secs_f64();
        let balance = free + requests * f64::from(self.terms.ratio) - retries;
        let enough = balance >= 1.0;
        if enough {
            account.current(step).retries += 1;
        }
        enough
    }

    fn step(&self, now: Instant) -> u64 {
        let step = (self.terms.ttl / SLOTS).as_nanos().max(1);
        u64::try_from(now.saturating_duration_since(self.start).as_nanos() / step).unwrap_or(u64::MAX)
    }
}

impl Account {
    /// The slot of a step, once those that have expired are empty.
    fn current(&mut self, step: u64) -> &mut Slot {
        let slots = u64::from(SLOTS);
        // A worker whose clock was read earlier must not empty anything.
        let step = step.max(self.step);
        for expired in (self.step + 1..=step).rev().take(self.slots.len()) {
            self.slots[(expired % slots) as usize] = Slot::default();
        }
        self.step = step;
        &mut self.slots[(step % slots) as usize]
    }
}

/// Steps in which a budget's time passes.
const SLOTS: u32 = 10;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn requests_pay_for_retries_until_they_expire() {
        let terms = RetryBudget {
            ratio: 0.2,
            min_per_second: 0,
            ttl: Duration::from_secs(10),
        };
        let start = Instant::now();
        let budget = Budget::new(terms, start);
        assert!(!budget.withdraw(start));
        for _ in 0..10 {
            budget.deposit(start);
        }
        assert!(budget.withdraw(start));
        let later = start + Duration::from_secs(5);
        assert!(budget.withdraw(later));
        assert!(!budget.withdraw(later));
        for _ in 0..10 {
            budget.deposit(start + Duration::from_secs(30));
        }
        assert!(budget.withdraw(start + Duration::from_secs(39)));
        assert!(!budget.withdraw(start + Duration::from_secs(41)));
    }

    #[test]
    fn some_retries_are_free() {
        let terms = RetryBudget {
            ratio: 0.0,
            min_per_second: 1,
            ttl: Duration::from_secs(2),
        };
        let now = Instant::now();
        let budget = Budget::new(terms, now);
        assert!(budget.withdraw(now));
        assert!(budget.withdraw(now));
        assert!(!budget.withdraw(now));
        assert!(budget.withdraw(now + Duration::from_secs(3)));
    }
}
