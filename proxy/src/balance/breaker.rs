//! Whether an endpoint may be used: failure accrual and the backoff after a failed dial.
//!
//! Both are gates. A gate that has shut lets one probe pass when its backoff is over; the probe's fate opens it or
//! shuts it for longer. Asking a gate that is open costs one atomic load; locks are for those that are not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;
use tulle_core::backoff::{Backoff, Steps};

use crate::policy::client::{AccrualKind, FailureAccrual};

/// How a request to an endpoint ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Success,
    /// A server error, in the terms of the protocol, or of the transport.
    Failure,
    /// The endpoint turned the request away for load: 429, or `RESOURCE_EXHAUSTED`.
    Overloaded,
}

/// What the breakers of one balancer's endpoints share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fleet(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Wakes those who wait for an endpoint when one opens or appears.
    woken: Notify,
    endpoints: AtomicU32,
    /// Those that were taken out for failing, and those that could not be reached; who is both counts twice, which lets others
    /// stay.
    out: AtomicU32,
}

/// The gates of one endpoint, shared by all workers.
#[derive(Debug)]
pub(crate) struct Breaker {
    start: Instant,
    fleet: Fleet,
    dial: Gate,
    /// Whether the endpoint is gone from its balancer: it counts neither as one that is there nor as one that is out.
    is_retired: AtomicBool,
    /// Why the endpoint could not be reached, when it was last tried.
    unreached: Mutex<Option<&'static str>>,
    accrual: Option<Accrual>,
}

#[derive(Debug)]
struct Accrual {
    policy: FailureAccrual,
    gate: Gate,
    consecutive: AtomicU32,
    window: Mutex<Window>,
}

/// Times are nanoseconds since the breaker's start, plus one.
#[derive(Debug)]
struct Gate {
    /// When the next probe may pass; 0 while the gate is open.
    until: AtomicU64,
    state: Mutex<GateState>,
}

#[derive(Debug)]
struct GateState {
    steps: Steps,
    delay: Duration,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Shut,
    Probing,
}

impl Breaker {
    pub(crate) fn new(accrual: Option<FailureAccrual>, fleet: Fleet, now: Instant) -> Self {
        let accrual = accrual.map(|policy| Accrual {
            gate: Gate::new(policy.backoff.steps),
            policy,
            consecutive: AtomicU32::new(0),
            window: Mutex::default(),
        });
        Self {
            start: now,
            fleet,
            dial: Gate::new(DIAL_BACKOFF),
            is_retired: AtomicBool::new(false),
            unreached: Mutex::default(),
            accrual,
        }
    }

    /// Whether a request may go to this endpoint; it still has to be admitted.
    pub(crate) fn available(&self, now: Instant) -> bool {
        self.dial.is_passable(|| self.at(now))
            && self
                .accrual
                .as_ref()
                .is_none_or(|accrual| accrual.gate.is_passable(|| self.at(now)) || self.is_needed(accrual))
    }

    /// Whether too few are left without this endpoint, however it does: others have gone since it was taken out.
    fn is_needed(&self, accrual: &Accrual) -> bool {
        self.fleet.ready() < accrual.policy.min_ready_endpoints
    }

    /// Lets one request go to this endpoint, perhaps as the probe that decides whether others may follow.
    ///
    /// A probe that nobody reports on is replaced by another after as long again.
    #[must_use]
    pub(crate) fn admit(&self, now: Instant) -> bool {
        self.available(now)
            && self.dial.pass(|| self.at(now))
            && self
                .accrual
                .as_ref()
                .is_none_or(|accrual| accrual.gate.pass(|| self.at(now)) || self.is_needed(accrual))
    }

    /// When an unavailable endpoint may be tried again.
    pub(crate) fn available_at(&self) -> Option<Instant> {
        let until = self.gates().map(|gate| gate.until.load(Ordering::Relaxed)).max()?;
        (until > 0).then(|| self.start + Duration::from_nanos(until - 1))
    }

    /// Notes how a request ended, and for how long the endpoint asks to be left alone.
    ///
    /// What was sent before the gate shut does not count; what answers while a probe is out counts as the probe.
    pub(crate) fn record(&self, outcome: Outcome, retry_after: Option<Duration>, now: Instant) {
        let Some(accrual) = &self.accrual else { return };
        let verdict = match accrual.gate.phase() {
            Phase::Open => accrual.judge(outcome, self.at(now)),
            Phase::Shut => Verdict::Keep,
            Phase::Probing if accrual.is_failure(outcome) => Verdict::Shut,
            Phase::Probing => Verdict::Open,
        };
        let Backoff { max, .. } = accrual.policy.backoff.steps;
        let asked = retry_after.filter(|_| accrual.policy.backoff.heeds_hints);
        let (least, stay) = (asked.unwrap_or_default().min(max), accrual.policy.min_ready_endpoints);
        match verdict {
            Verdict::Keep => {}
            Verdict::Shut => {
                if !accrual.gate.shut(self.at(now), least, || self.take_out(stay)) {
                    accrual.forget(); // the others are too few
                }
            }
            Verdict::Open => {
                accrual.forget();
                accrual.gate.open(|| self.fleet.take_back());
                self.fleet.wake();
            }
        }
    }

    /// Whether it was taken out for failing.
    pub(crate) fn is_ejected(&self) -> bool {
        let accrual = self.accrual.as_ref();
        accrual.is_some_and(|accrual| accrual.gate.phase() != Phase::Open)
    }

    /// Why it cannot be reached, where that is so.
    pub(crate) fn unreached(&self) -> Option<&'static str> {
        match self.dial.phase() {
            Phase::Open => None,
            Phase::Shut | Phase::Probing => *self.unreached.lock(),
        }
    }

    /// Notes that the endpoint could not be reached, and why; others are preferred until a backoff from 100 ms to 10 s is over.
    pub(crate) fn connect_failed(&self, cause: &'static str, now: Instant) {
        *self.unreached.lock() = Some(cause);
        self.dial.shut(self.at(now), Duration::ZERO, || self.take_out(0));
    }

    /// Notes that the endpoint can be reached.
    pub(crate) fn connected(&self) {
        if self.dial.phase() != Phase::Open {
            self.dial.open(|| self.fleet.take_back());
            self.fleet.wake();
        }
    }

    /// Notes that the endpoint is gone from its balancer, whoever still holds it.
    pub(crate) fn retire(&self) {
        // Before its gates open: one that shuts at the same time has seen it, or is opened here.
        self.is_retired.store(true, Ordering::Relaxed);
        for gate in self.gates() {
            gate.open(|| self.fleet.take_back());
        }
    }

    /// Counts the endpoint as out, if it is there and as many as `stay` others are ready.
    fn take_out(&self, stay: u32) -> bool {
        !self.is_retired.load(Ordering::Relaxed) && self.fleet.take_out(stay)
    }

    fn gates(&self) -> impl Iterator<Item = &Gate> {
        std::iter::once(&self.dial).chain(self.accrual.as_ref().map(|accrual| &accrual.gate))
    }

    fn at(&self, now: Instant) -> u64 {
        let nanos = now.saturating_duration_since(self.start).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl Drop for Breaker {
    fn drop(&mut self) {
        for gate in self.gates() {
            gate.open(|| self.fleet.take_back());
        }
    }
}

enum Verdict {
    Keep,
    Shut,
    Open,
}

impl Accrual {
    fn judge(&self, outcome: Outcome, now: u64) -> Verdict {
        let is_failure = outcome == Outcome::Failure;
        let consecutive = match (outcome, self.consecutive.load(Ordering::Relaxed)) {
            (Outcome::Failure, _) => self.consecutive.fetch_add(1, Ordering::Relaxed).saturating_add(1),
            (_, 0) => 0,
            _ => {
                self.consecutive.store(0, Ordering::Relaxed);
                0
            }
        };
        let trips = match self.policy.kind {
            AccrualKind::Consecutive { max_failures } => is_failure && consecutive >= max_failures,
            AccrualKind::Unified {
                success_rate,
                window,
                min_requests,
                max_consecutive_failures,
            } => {
                let rate = self.window.lock().record(outcome == Outcome::Success, now, window);
                let too_many = max_consecutive_failures > 0 && is_failure && consecutive >= max_consecutive_failures;
                too_many || (outcome != Outcome::Success && rate.is_below(success_rate, min_requests))
            }
        };
        if trips { Verdict::Shut } else { Verdict::Keep }
    }

    fn is_failure(&self, outcome: Outcome) -> bool {
        match self.policy.kind {
            AccrualKind::Consecutive { .. } => outcome == Outcome::Failure,
            AccrualKind::Unified { .. } => outcome != Outcome::Success,
        }
    }

    fn forget(&self) {
        self.consecutive.store(0, Ordering::Relaxed);
        *self.window.lock() = Window::default();
    }
}

impl Gate {
    fn new(backoff: Backoff) -> Self {
        let state = GateState {
            steps: backoff.steps(),
            delay: backoff.min,
            phase: Phase::Open,
        };
        Self {
            until: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    fn phase(&self) -> Phase {
        match self.until.load(Ordering::Relaxed) {
            0 => Phase::Open,
            _ => self.state.lock().phase,
        }
    }

    fn is_passable(&self, now: impl FnOnce() -> u64) -> bool {
        match self.until.load(Ordering::Relaxed) {
            0 => true,
            until => until <= now(),
        }
    }

    fn pass(&self, now: impl FnOnce() -> u64) -> bool {
        if self.until.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut state = self.state.lock();
        let (until, now) = (self.until.load(Ordering::Relaxed), now());
        if until == 0 {
            return true;
        }
        if until > now {
            return false;
        }
        state.phase = Phase::Probing;
        self.set_until(now, state.delay);
        true
    }

    /// Shuts for as long as the next step of the backoff says, and for `least` at least; `false` if `may` forbids it, which is
    /// asked where the gate was open.
    fn shut(&self, now: u64, least: Duration, may: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        // Several workers may see the same failure: one lengthens the backoff.
        if state.phase == Phase::Shut {
            return true;
        }
        if state.phase == Phase::Open && !may() {
            return false;
        }
        state.phase = Phase::Shut;
        state.delay = state.steps.next_delay().max(least);
        self.set_until(now, state.delay);
        true
    }

    /// Opens; `then` is called if it was not open.
    fn open(&self, then: impl FnOnce()) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.phase, Phase::Open) != Phase::Open {
            then();
        }
        state.steps.reset();
        self.until.store(0, Ordering::Relaxed);
    }

    fn set_until(&self, now: u64, delay: Duration) {
        let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.until.store(now.saturating_add(delay), Ordering::Relaxed);
    }
}

impl Fleet {
    pub(crate) fn wake(&self) {
        self.0.woken.notify_waiters();
    }

    pub(super) fn woken(&self) -> Notified<'_> {
        self.0.woken.notified()
    }

    /// Notes how many endpoints there are.
    pub(super) fn resize(&self, endpoints: usize) {
        let endpoints = u32::try_from(endpoints).unwrap_or(u32::MAX);
        self.0.endpoints.store(endpoints, Ordering::Relaxed);
    }

    /// Endpoints that are not out.
    fn ready(&self) -> u32 {
        let endpoints = self.0.endpoints.load(Ordering::Relaxed);
        endpoints.saturating_sub(self.0.out.load(Ordering::Relaxed))
    }

    /// Takes one out, if as many as `stay` others are ready.
    fn take_out(&self, stay: u32) -> bool {
        let endpoints = self.0.endpoints.load(Ordering::Relaxed);
        let one_more = |out: u32| (stay == 0 || out + 1 + stay <= endpoints).then_some(out + 1);
        let update = self.0.out.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        update.is_ok()
    }

    fn take_back(&self) {
        self.0.out.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Successes and failures of the recent past, in ten steps.
#[derive(Debug, Default)]
struct Window {
    step: u64,
    slots: [Rate; SLOTS as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    successes: u32,
    requests: u32,
}

impl Window {
    /// Adds one outcome and returns what the window holds.
    fn record(&mut self, is_success: bool, now: u64, length: Duration) -> Rate {
        let nanos = (length / SLOTS).as_nanos().max(1);
        let step = u64::try_from(u128::from(now) / nanos)
            .unwrap_or(u64::MAX)
            .max(self.step);
        for expired in (self.step + 1..=step).rev().take(self.slots.len()) {
            self.slots[(expired % u64::from(SLOTS)) as usize] = Rate::default();
        }
        self.step = step;
        let slot = &mut self.slots[(step % u64::from(SLOTS)) as usize];
        slot.requests = slot.requests.saturating_add(1);
        slot.successes = slot.successes.saturating_add(is_success.into());
        self.slots.iter().fold(Rate::default(), |sum, slot| Rate {
            successes: sum.successes.saturating_add(slot.successes),
            requests: sum.requests.saturating_add(slot.requests),
        })
    }
}

impl Rate {
    fn is_below(self, threshold: f64, min_requests: u32) -> bool {
        self.requests >= min_requests.max(1) && f64::from(self.successes) / f64::from(self.requests) < threshold
    }
}

/// For an endpoint that cannot be reached.
const DIAL_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(100),
    max: Duration::from_secs(10),
    jitter: 0.1,
};

/// Steps in which a window's time passes.
const SLOTS: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::client::HintedBackoff;

    const SECOND: Duration = Duration::from_secs(1);

    fn accrual(kind: AccrualKind) -> FailureAccrual {
        FailureAccrual {
            kind,
            backoff: HintedBackoff {
                steps: Backoff {
                    min: SECOND,
                    max: Duration::from_secs(3),
                    jitter: 0.0,
                },
                heeds_hints: false,
            },
            min_ready_endpoints: 0,
        }
    }

    fn consecutive(max_failures: u32) -> FailureAccrual {
        accrual(AccrualKind::Consecutive { max_failures })
    }

    fn unified(max_consecutive_failures: u32) -> FailureAccrual {
        accrual(AccrualKind::Unified {
            success_rate: 0.8,
            window: 10 * SECOND,
            min_requests: 10,
            max_consecutive_failures,
        })
    }

    fn breaker(policy: Option<FailureAccrual>) -> (Breaker, Instant) {
        let now = Instant::now();
        (Breaker::new(policy, Fleet::default(), now), now)
    }

    /// Breakers of as many endpoints, of which so many are to stay.
    fn fleet(endpoints: usize, min_ready_endpoints: u32) -> (Fleet, Vec<Breaker>, Instant) {
        let (fleet, now) = (Fleet::default(), Instant::now());
        fleet.resize(endpoints);
        let policy = FailureAccrual {
            min_ready_endpoints,
            ..consecutive(1)
        };
        let breakers = (0..endpoints).map(|_| Breaker::new(Some(policy), fleet.clone(), now));
        (fleet.clone(), breakers.collect(), now)
    }

    #[test]
    fn some_endpoints_stay_however_many_fail() {
        let (fleet, mut breakers, now) = fleet(4, 2);
        for breaker in &breakers {
            breaker.record(Outcome::Failure, None, now);
        }
        let available = |breakers: &[Breaker]| breakers.iter().filter(|breaker| breaker.available(now)).count();
        assert_eq!(available(&breakers), 2);
        let later = now + SECOND;
        assert!(breakers[0].admit(later));
        breakers[0].record(Outcome::Success, None, later);
        assert_eq!(available(&breakers), 3);
        breakers[3].record(Outcome::Failure, None, now);
        breakers[2].record(Outcome::Failure, None, now);
        assert_eq!(available(&breakers), 2, "as one has come back, another may go");
        breakers.truncate(3);
        fleet.resize(3);
        assert_eq!(available(&breakers), 2);
        breakers.remove(0);
        fleet.resize(2);
        assert_eq!(available(&breakers), 2, "one that was taken out is needed now");
    }

    #[test]
    fn an_endpoint_that_is_gone_does_not_count_as_out_whoever_still_holds_it() {
        let (fleet, breakers, now) = fleet(4, 2);
        let (gone, left) = breakers.split_at(2);
        for breaker in gone {
            breaker.record(Outcome::Failure, None, now);
            breaker.connect_failed("connect-refused", now);
        }
        fleet.resize(2);
        gone.iter().for_each(Breaker::retire);
        assert_eq!(fleet.ready(), 2);
        // What is still under way to them changes nothing.
        for breaker in gone {
            breaker.record(Outcome::Failure, None, now);
            breaker.connect_failed("connect-refused", now);
        }
        assert_eq!(fleet.ready(), 2);
        fleet.resize(3);
        left[0].record(Outcome::Failure, None, now);
        assert!(!left[0].available(now), "two others are ready");
        drop(breakers);
        assert_eq!(fleet.ready(), 3);
    }

    #[test]
    fn who_asks_to_be_left_alone_is_left_alone_where_the_policy_says_so() {
        for (heeds_hints, seconds) in [(true, 2), (false, 1)] {
            let mut policy = consecutive(1);
            policy.backoff.heeds_hints = heeds_hints;
            let (breaker, now) = breaker(Some(policy));
            breaker.record(Outcome::Failure, Some(2 * SECOND), now);
            assert_eq!(breaker.available_at(), Some(now + seconds * SECOND));
        }
    }

    #[test]
    fn without_a_policy_no_failure_counts() {
        let (breaker, now) = breaker(None);
        for _ in 0..100 {
            breaker.record(Outcome::Failure, None, now);
        }
        assert!(breaker.admit(now));
    }

    #[test]
    fn failures_in_a_row_shut_it_and_a_success_between_does_not() {
        let (breaker, now) = breaker(Some(consecutive(3)));
        use Outcome::{Failure, Overloaded, Success};
        for outcome in [
            Failure, Failure, Success, Failure, Failure, Overloaded, Failure, Failure,
        ] {
            breaker.record(outcome, None, now);
            assert!(breaker.available(now));
        }
        breaker.record(Failure, None, now);
        assert!(!breaker.available(now));
        assert_eq!(breaker.available_at(), Some(now + SECOND));
    }

    #[test]
    fn one_probe_passes_after_the_backoff_and_its_success_opens() {
        let (breaker, now) = breaker(Some(consecutive(1)));
        breaker.record(Outcome::Failure, None, now);
        breaker.record(Outcome::Success, None, now);
        assert!(!breaker.available(now), "an answer from before it shut opens nothing");
        let later = now + SECOND;
        assert!(breaker.available(later));
        assert!(breaker.admit(later));
        assert!(!breaker.admit(later), "only one");
        breaker.record(Outcome::Success, None, later);
        assert!(breaker.admit(later) && breaker.admit(later));
    }

    #[test]
    fn failed_probes_lengthen_the_backoff_up_to_its_maximum() {
        let (breaker, mut now) = breaker(Some(consecutive(1)));
        breaker.record(Outcome::Failure, None, now);
        for seconds in [1, 2, 3, 3] {
            let due = now + SECOND * seconds;
            assert!(!breaker.available(due - Duration::from_millis(1)));
            assert!(breaker.admit(due), "after {seconds} s");
            breaker.record(Outcome::Failure, None, due);
            breaker.record(Outcome::Failure, None, due);
            now = due;
        }
    }

    #[test]
    fn a_probe_without_a_report_is_replaced() {
        let (breaker, now) = breaker(Some(consecutive(1)));
        breaker.record(Outcome::Failure, None, now);
        assert!(breaker.admit(now + SECOND));
        assert!(!breaker.admit(now + SECOND + SECOND / 2));
        assert!(breaker.admit(now + 2 * SECOND));
    }

    #[test]
    fn a_low_success_rate_shuts_once_there_are_enough_requests() {
        let (breaker, now) = breaker(Some(unified(0)));
        for index in 0..9 {
            let outcome = if index % 3 == 0 {
                Outcome::Overloaded
            } else {
                Outcome::Success
            };
            breaker.record(outcome, None, now);
            assert!(breaker.available(now), "{index}");
        }
        breaker.record(Outcome::Overloaded, None, now);
        assert!(!breaker.available(now));
        assert!(breaker.admit(now + SECOND));
        breaker.record(Outcome::Overloaded, None, now + SECOND);
        assert!(!breaker.available(now + 2 * SECOND), "turning a probe away fails it");
    }

    #[test]
    fn old_failures_leave_the_window() {
        let (breaker, now) = breaker(Some(unified(0)));
        for _ in 0..9 {
            breaker.record(Outcome::Failure, None, now);
        }
        let later = now + 11 * SECOND;
        for _ in 0..9 {
            breaker.record(Outcome::Success, None, later);
        }
        breaker.record(Outcome::Failure, None, later);
        assert!(breaker.available(later));
    }

    #[test]
    fn the_unified_policy_limits_failures_in_a_row_too() {
        let (breaker, now) = breaker(Some(unified(4)));
        for _ in 0..3 {
            breaker.record(Outcome::Failure, None, now);
        }
        assert!(breaker.available(now));
        breaker.record(Outcome::Failure, None, now);
        assert!(!breaker.available(now));
    }

    #[test]
    fn an_endpoint_that_cannot_be_reached_is_left_alone_for_a_while() {
        let (breaker, now) = breaker(None);
        assert_eq!(breaker.unreached(), None);
        breaker.connect_failed("connect-refused", now);
        breaker.connect_failed("connect-refused", now);
        assert!(!breaker.available(now + Duration::from_millis(99)));
        let later = now + Duration::from_millis(111);
        assert!(
            breaker.admit(later),
            "the second report of one failure lengthens nothing"
        );
        breaker.connect_failed("connect-timeout", later);
        assert!(!breaker.available(later + Duration::from_millis(199)));
        assert_eq!(breaker.unreached(), Some("connect-timeout"));
        breaker.connected();
        assert_eq!(breaker.unreached(), None);
        assert!(breaker.admit(later) && breaker.admit(later));
    }

    #[tokio::test]
    async fn opening_wakes_those_who_wait() {
        let now = Instant::now();
        let fleet = Fleet::default();
        let breaker = Breaker::new(None, fleet.clone(), now);
        breaker.connect_failed("connect-refused", now);
        let mut woken = std::pin::pin!(fleet.woken());
        assert!(!woken.as_mut().enable());
        breaker.connected();
        woken.await;
    }
}
