//! Whether an endpoint is available: failure accrual, and the backoff after a failed dial.
//!
//! Each of the two is an [`Availability`]. An unavailable endpoint gets one request, the probe, when its backoff is over. The
//! result of the probe makes the endpoint available again, or starts a longer backoff. For an available endpoint,
//! [`Breaker::admit`] costs a few atomic loads and takes no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;
use tulle_core::backoff::{Backoff, BackoffDelays};

use crate::policy::client::{AccrualKind, FailureAccrual};

/// How a request to an endpoint ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Success,
    /// A server error of HTTP or gRPC, or a transport error.
    Failure,
    /// The endpoint refused the request because of load: 429, or `RESOURCE_EXHAUSTED`.
    Overloaded,
}

/// State that the breakers of one balancer's endpoints share.
#[derive(Clone, Debug, Default)]
pub(crate) struct BreakerGroup(Arc<GroupState>);

#[derive(Debug, Default)]
struct GroupState {
    /// Wakes the requests that wait for an endpoint when one becomes available or is added.
    changed: Notify,
    n_endpoints: AtomicU32,
    /// Number of ejected endpoints plus number of unreachable endpoints. An endpoint that is both counts twice. The number is
    /// then too high and fewer endpoints are ejected, which is safe.
    n_unavailable: AtomicU32,
}

/// The circuit breaker of one endpoint, shared by all workers.
#[derive(Debug)]
pub(crate) struct Breaker {
    start: Instant,
    group: BreakerGroup,
    dial_availability: Availability,
    /// Whether the endpoint was removed from its balancer. It is then not counted in the group.
    is_retired: AtomicBool,
    dial_failure_cause: Mutex<Option<&'static str>>,
    accrual: Option<Accrual>,
}

#[derive(Debug)]
struct Accrual {
    policy: FailureAccrual,
    availability: Availability,
    n_consecutive_failures: AtomicU32,
    window: Mutex<SuccessRateWindow>,
}

/// Admits all requests while the endpoint is available, and one probe after each backoff while it is not. Times are nanoseconds
/// since the breaker's start, plus one.
#[derive(Debug)]
struct Availability {
    /// When the next probe is admitted; 0 while the endpoint is available.
    next_probe_at: AtomicU64,
    state: Mutex<AvailabilityState>,
}

#[derive(Debug)]
struct AvailabilityState {
    backoff: BackoffDelays,
    delay: Duration,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Available,
    Unavailable,
    /// A probe is in flight.
    Probing,
}

impl Breaker {
    pub(crate) fn new(accrual: Option<FailureAccrual>, group: BreakerGroup, now: Instant) -> Self {
        let accrual = accrual.map(|policy| Accrual {
            availability: Availability::new(policy.backoff.delays),
            policy,
            n_consecutive_failures: AtomicU32::new(0),
            window: Mutex::default(),
        });
        Self {
            start: now,
            group,
            dial_availability: Availability::new(DIAL_BACKOFF),
            is_retired: AtomicBool::new(false),
            dial_failure_cause: Mutex::default(),
            accrual,
        }
    }

    /// Whether the endpoint may get a request: it is available, its next probe is due, or `min_ready_endpoints` requires it.
    /// The request also needs [`Self::admit`].
    pub(crate) fn can_be_picked(&self, now: Instant) -> bool {
        self.dial_availability.allows(|| self.nanos_at(now))
            && self.accrual.as_ref().is_none_or(|accrual| {
                accrual.availability.allows(|| self.nanos_at(now)) || self.is_needed_for_minimum(accrual)
            })
    }

    /// Whether fewer than `min_ready_endpoints` are ready, so that this endpoint gets requests although it is ejected. This
    /// happens if other endpoints are removed or become unreachable after the ejection.
    fn is_needed_for_minimum(&self, accrual: &Accrual) -> bool {
        self.group.n_ready() < accrual.policy.min_ready_endpoints
    }

    /// Admits one request to this endpoint, which may be the probe. Returns false if no request may be sent.
    ///
    /// If the result of a probe is not recorded, another probe is admitted after the same delay.
    #[must_use]
    pub(crate) fn admit(&self, now: Instant) -> bool {
        self.can_be_picked(now)
            && self.dial_availability.try_admit(|| self.nanos_at(now))
            && self.accrual.as_ref().is_none_or(|accrual| {
                accrual.availability.try_admit(|| self.nanos_at(now)) || self.is_needed_for_minimum(accrual)
            })
    }

    /// When the next probe of the endpoint is due; `None` if it is available.
    pub(crate) fn next_probe_at(&self) -> Option<Instant> {
        let next_probe_at = self
            .availabilities()
            .map(|availability| availability.next_probe_at.load(Ordering::Relaxed))
            .max()?;
        (next_probe_at > 0).then(|| self.start + Duration::from_nanos(next_probe_at - 1))
    }

    /// Records the outcome of a request and its `Retry-After`.
    ///
    /// While the endpoint is ejected and no probe is in flight, outcomes are ignored: these requests were sent before the
    /// ejection, or because of `min_ready_endpoints`. While a probe is in flight, any outcome counts as the result of the
    /// probe.
    pub(crate) fn record_outcome(&self, outcome: RequestOutcome, retry_after: Option<Duration>, now: Instant) {
        let Some(accrual) = &self.accrual else { return };
        let action = match accrual.availability.phase() {
            Phase::Available => accrual.evaluate(outcome, self.nanos_at(now)),
            Phase::Unavailable => AccrualAction::Keep,
            Phase::Probing if accrual.is_failure(outcome) => AccrualAction::Eject,
            Phase::Probing => AccrualAction::Restore,
        };
        let Backoff { max, .. } = accrual.policy.backoff.delays;
        let retry_after = retry_after.filter(|_| accrual.policy.backoff.honors_retry_after);
        let (min_delay, min_ready) = (
            retry_after.unwrap_or_default().min(max),
            accrual.policy.min_ready_endpoints,
        );
        match action {
            AccrualAction::Keep => {}
            AccrualAction::Eject => {
                let is_ejected = accrual
                    .availability
                    .make_unavailable(self.nanos_at(now), min_delay, || self.try_count_unavailable(min_ready));
                if !is_ejected {
                    // Too few other endpoints are ready. Restart the count, so that not each further failure tries an ejection.
                    accrual.reset();
                }
            }
            AccrualAction::Restore => {
                accrual.reset();
                accrual.availability.make_available(|| self.group.uncount_unavailable());
                self.group.notify();
            }
        }
    }

    /// Whether failure accrual has ejected the endpoint.
    pub(crate) fn is_ejected(&self) -> bool {
        let accrual = self.accrual.as_ref();
        accrual.is_some_and(|accrual| accrual.availability.phase() != Phase::Available)
    }

    /// Why the endpoint cannot be reached; `None` if it can.
    pub(crate) fn dial_failure_cause(&self) -> Option<&'static str> {
        match self.dial_availability.phase() {
            Phase::Available => None,
            Phase::Unavailable | Phase::Probing => *self.dial_failure_cause.lock(),
        }
    }

    /// Records a failed dial. The endpoint is unavailable until its backoff of 100 ms to 10 s is over.
    pub(crate) fn record_dial_failure(&self, cause: &'static str, now: Instant) {
        *self.dial_failure_cause.lock() = Some(cause);
        self.dial_availability
            .make_unavailable(self.nanos_at(now), Duration::ZERO, || self.try_count_unavailable(0));
    }

    pub(crate) fn record_connected(&self) {
        if self.dial_availability.phase() != Phase::Available {
            self.dial_availability
                .make_available(|| self.group.uncount_unavailable());
            self.group.notify();
        }
    }

    /// Records that the endpoint was removed from its balancer, even if requests still use it.
    pub(crate) fn retire(&self) {
        // Set first: a concurrent `make_unavailable` either sees the flag or is undone below.
        self.is_retired.store(true, Ordering::Relaxed);
        for availability in self.availabilities() {
            availability.make_available(|| self.group.uncount_unavailable());
        }
    }

    /// Counts the endpoint as unavailable, if it is not retired and at least `min_ready` other endpoints are ready. Returns
    /// whether it was counted.
    fn try_count_unavailable(&self, min_ready: u32) -> bool {
        !self.is_retired.load(Ordering::Relaxed) && self.group.try_count_unavailable(min_ready)
    }

    fn availabilities(&self) -> impl Iterator<Item = &Availability> {
        std::iter::once(&self.dial_availability).chain(self.accrual.as_ref().map(|accrual| &accrual.availability))
    }

    fn nanos_at(&self, now: Instant) -> u64 {
        let nanos = now.saturating_duration_since(self.start).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl Drop for Breaker {
    fn drop(&mut self) {
        for availability in self.availabilities() {
            availability.make_available(|| self.group.uncount_unavailable());
        }
    }
}

enum AccrualAction {
    Keep,
    Eject,
    /// Ends the ejection.
    Restore,
}

impl Accrual {
    /// Counts an outcome, and decides whether it ejects the endpoint.
    fn evaluate(&self, outcome: RequestOutcome, now: u64) -> AccrualAction {
        let is_failure = outcome == RequestOutcome::Failure;
        let consecutive = match (outcome, self.n_consecutive_failures.load(Ordering::Relaxed)) {
            (RequestOutcome::Failure, _) => self
                .n_consecutive_failures
                .fetch_add(1, Ordering::Relaxed)
                .saturating_add(1),
            (_, 0) => 0,
            _ => {
                self.n_consecutive_failures.store(0, Ordering::Relaxed);
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
                let rate = self
                    .window
                    .lock()
                    .record(outcome == RequestOutcome::Success, now, window);
                let too_many = max_consecutive_failures > 0 && is_failure && consecutive >= max_consecutive_failures;
                too_many
                    || (outcome != RequestOutcome::Success && rate.success_rate_is_below(success_rate, min_requests))
            }
        };
        if trips {
            AccrualAction::Eject
        } else {
            AccrualAction::Keep
        }
    }

    fn is_failure(&self, outcome: RequestOutcome) -> bool {
        match self.policy.kind {
            AccrualKind::Consecutive { .. } => outcome == RequestOutcome::Failure,
            AccrualKind::Unified { .. } => outcome != RequestOutcome::Success,
        }
    }

    fn reset(&self) {
        self.n_consecutive_failures.store(0, Ordering::Relaxed);
        *self.window.lock() = SuccessRateWindow::default();
    }
}

impl Availability {
    fn new(backoff: Backoff) -> Self {
        let state = AvailabilityState {
            backoff: backoff.start(),
            delay: backoff.min,
            phase: Phase::Available,
        };
        Self {
            next_probe_at: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    fn phase(&self) -> Phase {
        match self.next_probe_at.load(Ordering::Relaxed) {
            0 => Phase::Available,
            _ => self.state.lock().phase,
        }
    }

    /// Whether the endpoint is available, or its next probe is due.
    fn allows(&self, now: impl FnOnce() -> u64) -> bool {
        match self.next_probe_at.load(Ordering::Relaxed) {
            0 => true,
            next_probe_at => next_probe_at <= now(),
        }
    }

    /// Admits one request. If the endpoint is unavailable, the request is the probe, and must be due.
    fn try_admit(&self, now: impl FnOnce() -> u64) -> bool {
        if self.next_probe_at.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut state = self.state.lock();
        let (next_probe_at, now) = (self.next_probe_at.load(Ordering::Relaxed), now());
        if next_probe_at == 0 {
            return true;
        }
        if next_probe_at > now {
            return false;
        }
        state.phase = Phase::Probing;
        self.set_next_probe(now, state.delay);
        true
    }

    /// Makes the endpoint unavailable for the next backoff delay, at least for `min_delay`. If the endpoint was available,
    /// calls `count_unavailable` first. If that returns `false`, the endpoint stays available, and the result is `false`.
    fn make_unavailable(&self, now: u64, min_delay: Duration, count_unavailable: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        // Several workers may record the same failure: only the first one extends the backoff.
        if state.phase == Phase::Unavailable {
            return true;
        }
        if state.phase == Phase::Available && !count_unavailable() {
            return false;
        }
        state.phase = Phase::Unavailable;
        state.delay = state.backoff.next_delay().max(min_delay);
        self.set_next_probe(now, state.delay);
        true
    }

    /// Makes the endpoint available. If it was unavailable, calls `uncount_unavailable`, which undoes the `count_unavailable`
    /// of [`Self::make_unavailable`].
    fn make_available(&self, uncount_unavailable: impl FnOnce()) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.phase, Phase::Available) != Phase::Available {
            uncount_unavailable();
        }
        state.backoff.reset();
        self.next_probe_at.store(0, Ordering::Relaxed);
    }

    fn set_next_probe(&self, now: u64, delay: Duration) {
        let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.next_probe_at.store(now.saturating_add(delay), Ordering::Relaxed);
    }
}

impl BreakerGroup {
    pub(crate) fn notify(&self) {
        self.0.changed.notify_waiters();
    }

    pub(super) fn changed(&self) -> Notified<'_> {
        self.0.changed.notified()
    }

    pub(super) fn set_n_endpoints(&self, endpoints: usize) {
        let endpoints = u32::try_from(endpoints).unwrap_or(u32::MAX);
        self.0.n_endpoints.store(endpoints, Ordering::Relaxed);
    }

    /// Number of endpoints that are neither ejected nor unreachable. An endpoint whose probe is due does not count.
    fn n_ready(&self) -> u32 {
        let endpoints = self.0.n_endpoints.load(Ordering::Relaxed);
        endpoints.saturating_sub(self.0.n_unavailable.load(Ordering::Relaxed))
    }

    /// Counts one more endpoint as unavailable, if at least `min_ready` other endpoints are ready. Returns whether it was
    /// counted.
    fn try_count_unavailable(&self, min_ready: u32) -> bool {
        let endpoints = self.0.n_endpoints.load(Ordering::Relaxed);
        let incremented = |n: u32| (min_ready == 0 || n + 1 + min_ready <= endpoints).then_some(n + 1);
        let update = self
            .0
            .n_unavailable
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, incremented);
        update.is_ok()
    }

    fn uncount_unavailable(&self) {
        self.0.n_unavailable.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts successes and requests within a time window, in slots of equal length.
#[derive(Debug, Default)]
struct SuccessRateWindow {
    current_slot: u64,
    slots: [RequestCounts; WINDOW_SLOTS as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct RequestCounts {
    successes: u32,
    requests: u32,
}

impl SuccessRateWindow {
    /// Adds one outcome and returns the counts of the window.
    fn record(&mut self, is_success: bool, now: u64, length: Duration) -> RequestCounts {
        let slot_nanos = (length / WINDOW_SLOTS).as_nanos().max(1);
        let slot = u64::try_from(u128::from(now) / slot_nanos)
            .unwrap_or(u64::MAX)
            .max(self.current_slot);
        // Clears the slots that have passed since the last outcome, at most all slots.
        for expired in (self.current_slot + 1..=slot).rev().take(self.slots.len()) {
            self.slots[(expired % u64::from(WINDOW_SLOTS)) as usize] = RequestCounts::default();
        }
        self.current_slot = slot;
        let counts = &mut self.slots[(slot % u64::from(WINDOW_SLOTS)) as usize];
        counts.requests = counts.requests.saturating_add(1);
        counts.successes = counts.successes.saturating_add(is_success.into());
        self.slots
            .iter()
            .fold(RequestCounts::default(), |sum, counts| RequestCounts {
                successes: sum.successes.saturating_add(counts.successes),
                requests: sum.requests.saturating_add(counts.requests),
            })
    }
}

impl RequestCounts {
    fn success_rate_is_below(self, threshold: f64, min_requests: u32) -> bool {
        self.requests >= min_requests.max(1) && f64::from(self.successes) / f64::from(self.requests) < threshold
    }
}

/// Backoff after failed dials.
const DIAL_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(100),
    max: Duration::from_secs(10),
    jitter: 0.1,
};

/// Number of slots of a [`SuccessRateWindow`].
const WINDOW_SLOTS: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::client::BackoffPolicy;

    const SECOND: Duration = Duration::from_secs(1);

    fn accrual(kind: AccrualKind) -> FailureAccrual {
        FailureAccrual {
            kind,
            backoff: BackoffPolicy {
                delays: Backoff {
                    min: SECOND,
                    max: Duration::from_secs(3),
                    jitter: 0.0,
                },
                honors_retry_after: false,
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
        (Breaker::new(policy, BreakerGroup::default(), now), now)
    }

    /// A group of `endpoints` breakers. Each trips at the first failure, unless fewer than `min_ready_endpoints` would be
    /// ready.
    fn breaker_group(endpoints: usize, min_ready_endpoints: u32) -> (BreakerGroup, Vec<Breaker>, Instant) {
        let (group, now) = (BreakerGroup::default(), Instant::now());
        group.set_n_endpoints(endpoints);
        let policy = FailureAccrual {
            min_ready_endpoints,
            ..consecutive(1)
        };
        let breakers = (0..endpoints).map(|_| Breaker::new(Some(policy), group.clone(), now));
        (group.clone(), breakers.collect(), now)
    }

    #[test]
    fn min_ready_endpoints_stay_available() {
        let (group, mut breakers, now) = breaker_group(4, 2);
        for breaker in &breakers {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
        }
        let available = |breakers: &[Breaker]| breakers.iter().filter(|breaker| breaker.can_be_picked(now)).count();
        assert_eq!(available(&breakers), 2);
        let later = now + SECOND;
        assert!(breakers[0].admit(later));
        breakers[0].record_outcome(RequestOutcome::Success, None, later);
        assert_eq!(available(&breakers), 3);
        breakers[3].record_outcome(RequestOutcome::Failure, None, now);
        breakers[2].record_outcome(RequestOutcome::Failure, None, now);
        assert_eq!(available(&breakers), 2, "one has recovered, so another may be ejected");
        breakers.truncate(3);
        group.set_n_endpoints(3);
        assert_eq!(available(&breakers), 2);
        breakers.remove(0);
        group.set_n_endpoints(2);
        assert_eq!(available(&breakers), 2, "an ejected endpoint is needed for the minimum");
    }

    #[test]
    fn a_removed_endpoint_does_not_count_as_unavailable() {
        let (group, breakers, now) = breaker_group(4, 2);
        let (removed, kept) = breakers.split_at(2);
        for breaker in removed {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
            breaker.record_dial_failure("connect-refused", now);
        }
        group.set_n_endpoints(2);
        removed.iter().for_each(Breaker::retire);
        assert_eq!(group.n_ready(), 2);
        // The results of requests that are still in flight to a removed endpoint have no effect.
        for breaker in removed {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
            breaker.record_dial_failure("connect-refused", now);
        }
        assert_eq!(group.n_ready(), 2);
        group.set_n_endpoints(3);
        kept[0].record_outcome(RequestOutcome::Failure, None, now);
        assert!(!kept[0].can_be_picked(now), "two others are ready");
        drop(breakers);
        assert_eq!(group.n_ready(), 3);
    }

    #[test]
    fn retry_after_extends_the_backoff_when_the_policy_honors_it() {
        for (honors_retry_after, seconds) in [(true, 2), (false, 1)] {
            let mut policy = consecutive(1);
            policy.backoff.honors_retry_after = honors_retry_after;
            let (breaker, now) = breaker(Some(policy));
            breaker.record_outcome(RequestOutcome::Failure, Some(2 * SECOND), now);
            assert_eq!(breaker.next_probe_at(), Some(now + seconds * SECOND));
        }
    }

    #[test]
    fn without_a_policy_failures_do_not_eject_the_endpoint() {
        let (breaker, now) = breaker(None);
        for _ in 0..100 {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
        }
        assert!(breaker.admit(now));
    }

    #[test]
    fn consecutive_failures_eject_the_endpoint_and_a_success_restarts_the_count() {
        let (breaker, now) = breaker(Some(consecutive(3)));
        use RequestOutcome::{Failure, Overloaded, Success};
        for outcome in [
            Failure, Failure, Success, Failure, Failure, Overloaded, Failure, Failure,
        ] {
            breaker.record_outcome(outcome, None, now);
            assert!(breaker.can_be_picked(now));
        }
        breaker.record_outcome(Failure, None, now);
        assert!(!breaker.can_be_picked(now));
        assert_eq!(breaker.next_probe_at(), Some(now + SECOND));
    }

    #[test]
    fn one_probe_is_admitted_after_the_backoff_and_its_success_ends_the_ejection() {
        let (breaker, now) = breaker(Some(consecutive(1)));
        breaker.record_outcome(RequestOutcome::Failure, None, now);
        breaker.record_outcome(RequestOutcome::Success, None, now);
        assert!(
            !breaker.can_be_picked(now),
            "a request sent before the ejection does not end it"
        );
        let later = now + SECOND;
        assert!(breaker.can_be_picked(later));
        assert!(breaker.admit(later));
        assert!(!breaker.admit(later), "only one");
        breaker.record_outcome(RequestOutcome::Success, None, later);
        assert!(breaker.admit(later) && breaker.admit(later));
    }

    #[test]
    fn failed_probes_lengthen_the_backoff_up_to_its_maximum() {
        let (breaker, mut now) = breaker(Some(consecutive(1)));
        breaker.record_outcome(RequestOutcome::Failure, None, now);
        for seconds in [1, 2, 3, 3] {
            let due = now + SECOND * seconds;
            assert!(!breaker.can_be_picked(due - Duration::from_millis(1)));
            assert!(breaker.admit(due), "after {seconds} s");
            breaker.record_outcome(RequestOutcome::Failure, None, due);
            breaker.record_outcome(RequestOutcome::Failure, None, due);
            now = due;
        }
    }

    #[test]
    fn another_probe_is_admitted_if_the_first_has_no_outcome() {
        let (breaker, now) = breaker(Some(consecutive(1)));
        breaker.record_outcome(RequestOutcome::Failure, None, now);
        assert!(breaker.admit(now + SECOND));
        assert!(!breaker.admit(now + SECOND + SECOND / 2));
        assert!(breaker.admit(now + 2 * SECOND));
    }

    #[test]
    fn a_low_success_rate_ejects_once_there_are_enough_requests() {
        let (breaker, now) = breaker(Some(unified(0)));
        for index in 0..9 {
            let outcome = if index % 3 == 0 {
                RequestOutcome::Overloaded
            } else {
                RequestOutcome::Success
            };
            breaker.record_outcome(outcome, None, now);
            assert!(breaker.can_be_picked(now), "{index}");
        }
        breaker.record_outcome(RequestOutcome::Overloaded, None, now);
        assert!(!breaker.can_be_picked(now));
        assert!(breaker.admit(now + SECOND));
        breaker.record_outcome(RequestOutcome::Overloaded, None, now + SECOND);
        assert!(!breaker.can_be_picked(now + 2 * SECOND), "an overloaded probe fails");
    }

    #[test]
    fn old_failures_leave_the_window() {
        let (breaker, now) = breaker(Some(unified(0)));
        for _ in 0..9 {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
        }
        let later = now + 11 * SECOND;
        for _ in 0..9 {
            breaker.record_outcome(RequestOutcome::Success, None, later);
        }
        breaker.record_outcome(RequestOutcome::Failure, None, later);
        assert!(breaker.can_be_picked(later));
    }

    #[test]
    fn the_unified_policy_limits_consecutive_failures_too() {
        let (breaker, now) = breaker(Some(unified(4)));
        for _ in 0..3 {
            breaker.record_outcome(RequestOutcome::Failure, None, now);
        }
        assert!(breaker.can_be_picked(now));
        breaker.record_outcome(RequestOutcome::Failure, None, now);
        assert!(!breaker.can_be_picked(now));
    }

    #[test]
    fn an_unreachable_endpoint_is_skipped_during_its_backoff() {
        let (breaker, now) = breaker(None);
        assert_eq!(breaker.dial_failure_cause(), None);
        breaker.record_dial_failure("connect-refused", now);
        breaker.record_dial_failure("connect-refused", now);
        assert!(!breaker.can_be_picked(now + Duration::from_millis(99)));
        let later = now + Duration::from_millis(111);
        assert!(
            breaker.admit(later),
            "a second report of the same failure does not extend the backoff"
        );
        breaker.record_dial_failure("connect-timeout", later);
        assert!(!breaker.can_be_picked(later + Duration::from_millis(199)));
        assert_eq!(breaker.dial_failure_cause(), Some("connect-timeout"));
        breaker.record_connected();
        assert_eq!(breaker.dial_failure_cause(), None);
        assert!(breaker.admit(later) && breaker.admit(later));
    }

    #[tokio::test]
    async fn an_endpoint_that_becomes_available_wakes_waiting_requests() {
        let now = Instant::now();
        let group = BreakerGroup::default();
        let breaker = Breaker::new(None, group.clone(), now);
        breaker.record_dial_failure("connect-refused", now);
        let mut woken = std::pin::pin!(group.changed());
        assert!(!woken.as_mut().enable());
        breaker.record_connected();
        woken.await;
    }
}
