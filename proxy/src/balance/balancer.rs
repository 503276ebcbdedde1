//! Picks an endpoint: immediately, or after a bounded wait in the queue. After a wait has timed out, requests fail fast.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::balance::breaker::BreakerGroup;
use crate::balance::candidate::Candidate;
use crate::balance::endpoint_set::DiscoveryState;
use crate::balance::p2c;
use crate::metrics::balancers::{BalancerSeries, QueueMode, UpdateOp};
use crate::policy::client::Queue;

/// How an endpoint is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// Two endpoints are drawn at random, and the one with the lower load is picked.
    #[default]
    PeakEwma,
    /// The endpoints are picked in turn.
    RoundRobin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PickError {
    #[error("the service has no endpoints")]
    NoEndpoints,
    /// The duration is the time that this request has waited. As in Linkerd, the first timeout ends the wait of all queued
    /// requests.
    #[error("no endpoint became available within {0:?}")]
    QueueTimeout(Duration, UnavailableReason),
    /// An earlier request has timed out in the queue, so this one has not waited.
    #[error("no endpoint is available")]
    FailingFast(UnavailableReason),
    #[error("the queue is full: {0} requests already wait for an endpoint")]
    QueueFull(usize),
}

/// Why endpoints are not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnavailableReason {
    /// The endpoints cannot be reached. The value is the cause of one of their failed dials; `None` if no dial has failed, for
    /// example because no endpoint is known.
    Unreachable(Option<&'static str>),
    /// A breaker has ejected at least one endpoint.
    Ejected,
}

/// The endpoints of one service, shared by all workers.
#[derive(Debug)]
pub(crate) struct Balancer<E> {
    strategy: Strategy,
    queue: Queue,
    discovery_state: ArcSwap<DiscoveryState<E>>,
    breaker_group: BreakerGroup,
    round_robin_next: AtomicUsize,
    n_queued: AtomicUsize,
    /// Set when a request times out in the queue; cleared when an endpoint is picked.
    is_failing_fast: AtomicBool,
    /// Series of all routes that use this balancer.
    series: Mutex<Vec<Weak<BalancerSeries>>>,
}

impl<E: Candidate> Balancer<E> {
    pub(crate) fn new(strategy: Strategy, queue: Queue) -> Self {
        Self {
            strategy,
            queue,
            discovery_state: ArcSwap::from_pointee(DiscoveryState::Unknown),
            breaker_group: BreakerGroup::default(),
            round_robin_next: AtomicUsize::new(0),
            n_queued: AtomicUsize::new(0),
            is_failing_fast: AtomicBool::new(false),
            series: Mutex::default(),
        }
    }

    /// Adds metric series that the balancer updates. It holds weak references to them.
    pub(crate) fn register_series(&self, series: &Arc<BalancerSeries>) {
        series.set_queue_timeout(self.queue.failfast_timeout.as_secs_f64());
        let mut all = self.series.lock();
        all.retain(|other| other.strong_count() > 0);
        // If a series with the same labels is registered, it has recorded the mode already.
        if !all
            .iter()
            .filter_map(Weak::upgrade)
            .any(|other| other.has_same_labels(series))
        {
            series.record_queue_mode(match self.is_failing_fast.load(Ordering::Relaxed) {
                true => QueueMode::FailingFast,
                false => QueueMode::Waiting,
            });
        }
        all.push(Arc::downgrade(series));
    }

    pub(crate) fn record_update(&self, op: UpdateOp) {
        self.for_each_series(|series| series.record_update(op));
    }

    pub(crate) fn update_gauges(&self, now: Instant) {
        let (ready, known) = match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => {
                let ready = endpoints
                    .iter()
                    .filter(|endpoint| endpoint.breaker().can_be_picked(now));
                (ready.count(), endpoints.len())
            }
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => (0, 0),
        };
        self.for_each_series(|series| series.set_endpoints(ready, known - ready));
    }

    /// Calls `record` once for each set of labels: several routes may have the same.
    fn for_each_series(&self, record: impl Fn(&BalancerSeries)) {
        let all: Vec<_> = self.series.lock().iter().filter_map(Weak::upgrade).collect();
        for (index, series) in all.iter().enumerate() {
            if !all[..index].iter().any(|other| other.has_same_labels(series)) {
                record(series);
            }
        }
    }

    /// The discovery state, and whether requests fail fast.
    pub(crate) fn status(&self) -> (Arc<DiscoveryState<E>>, bool) {
        (
            self.discovery_state.load_full(),
            self.is_failing_fast.load(Ordering::Relaxed),
        )
    }

    /// Sets whether requests wait in the queue or fail fast.
    #[cold]
    fn set_queue_mode(&self, mode: QueueMode) {
        let is_failing_fast = mode == QueueMode::FailingFast;
        if self.is_failing_fast.swap(is_failing_fast, Ordering::Relaxed) != is_failing_fast {
            self.for_each_series(|series| series.record_queue_mode(mode));
        }
    }

    /// The group for the breakers of this balancer's endpoints. It wakes waiting requests when an endpoint becomes
    /// available.
    pub(crate) fn breaker_group(&self) -> BreakerGroup {
        self.breaker_group.clone()
    }

    pub(crate) fn publish(&self, discovered: DiscoveryState<E>) {
        self.breaker_group.set_n_endpoints(discovered.endpoints().len());
        let discovered = Arc::new(discovered);
        let previous = self.discovery_state.swap(discovered.clone());
        let kept: HashSet<_> = discovered.endpoints().iter().map(Arc::as_ptr).collect();
        for gone in previous.endpoints() {
            if !kept.contains(&Arc::as_ptr(gone)) {
                gone.breaker().retire();
            }
        }
        self.breaker_group.notify();
    }

    /// Whether one of the endpoints can be picked.
    pub(crate) fn can_pick(&self, now: Instant) -> bool {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => {
                endpoints.iter().any(|endpoint| endpoint.breaker().can_be_picked(now))
            }
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => false,
        }
    }

    /// Picks an endpoint if one can be picked now. Prefers endpoints that [`Self::pick_responding`] accepts, then those that are
    /// not in `tried`, and then those that are not fallback endpoints. Success ends the fail-fast state.
    pub(crate) fn try_pick(&self, now: Instant, tried: &[Arc<E>]) -> Option<Arc<E>> {
        let state = self.discovery_state.load();
        let DiscoveryState::Endpoints(endpoints) = &**state else {
            return None;
        };
        let is_untried = |endpoint: &Arc<E>| !tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint));
        let (preferred, fallback) = endpoints.by_preference();
        let picked = self
            .pick_responding(preferred, now, is_untried)
            .or_else(|| self.pick_responding(fallback, now, is_untried))
            .or_else(|| self.pick_responding(preferred, now, |_| true))
            .or_else(|| self.pick_responding(fallback, now, |_| true))
            .or_else(|| self.pick_and_admit(endpoints, now, is_untried))
            .or_else(|| self.pick_and_admit(endpoints, now, |_| true));
        if picked.is_some() && self.is_failing_fast.load(Ordering::Relaxed) {
            self.set_queue_mode(QueueMode::Waiting);
        }
        picked
    }

    /// Picks an endpoint for which `is_allowed` is true and which [`Self::pick_responding`] accepts; `None` if there is none now.
    /// Prefers endpoints that are not fallback endpoints. Does not end the fail-fast state.
    pub(crate) fn pick_where(&self, now: Instant, is_allowed: impl Fn(&Arc<E>) -> bool) -> Option<Arc<E>> {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => {
                let (preferred, fallback) = endpoints.by_preference();
                self.pick_responding(preferred, now, &is_allowed)
                    .or_else(|| self.pick_responding(fallback, now, &is_allowed))
            }
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => None,
        }
    }

    /// Picks an endpoint, or waits in the queue for one; `series` records the wait.
    ///
    /// # Errors
    /// The service has no endpoints, none became available in time, requests fail fast after such a timeout, or the queue is
    /// full.
    pub(crate) async fn pick(&self, tried: &[Arc<E>], series: &BalancerSeries) -> Result<Arc<E>, PickError> {
        match self.try_pick(Instant::now(), tried) {
            Some(endpoint) => Ok(endpoint),
            // Boxed: a wait is rare, and its timer is large.
            None => Box::pin(self.wait_for_endpoint(tried, series)).await,
        }
    }

    async fn wait_for_endpoint(&self, tried: &[Arc<E>], series: &BalancerSeries) -> Result<Arc<E>, PickError> {
        self.fail_if_no_endpoints()?;
        if self.is_failing_fast.load(Ordering::Relaxed) {
            return Err(PickError::FailingFast(self.unavailable_reason()));
        }
        // The queue is unlimited until discovery has answered: all requests wait for the same answer.
        let capacity = match &**self.discovery_state.load() {
            DiscoveryState::Unknown => usize::MAX,
            DiscoveryState::Endpoints(_) | DiscoveryState::NoEndpoints => self.queue.capacity,
        };
        let _permit = match QueuePermit::try_acquire(&self.n_queued, capacity) {
            Ok(permit) => permit,
            // The queue may be full of requests that a discovery update has just woken, so try once more.
            Err(full) => return self.try_pick(Instant::now(), tried).ok_or(full),
        };
        let _queue_guard = series.enter_queue();
        let queued_at = Instant::now();
        let deadline = queued_at + self.queue.failfast_timeout;
        loop {
            // Registered before the check, so that no notification between the two is missed.
            let mut woken = std::pin::pin!(self.breaker_group.changed());
            woken.as_mut().enable();
            let now = Instant::now();
            if let Some(endpoint) = self.try_pick(now, tried) {
                return Ok(endpoint);
            }
            self.fail_if_no_endpoints()?;
            if now >= deadline {
                self.set_queue_mode(QueueMode::FailingFast);
                self.breaker_group.notify(); // wakes the other waiting requests, which fail too
            }
            if self.is_failing_fast.load(Ordering::Relaxed) {
                let waited = (now - queued_at).min(self.queue.failfast_timeout);
                return Err(PickError::QueueTimeout(waited, self.unavailable_reason()));
            }
            let next = self.next_probe_at().map_or(deadline, |at| at.min(deadline));
            tokio::select! {
                // Both branches are cancel-safe: a notification and a timer.
                () = woken => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// As [`Self::pick_and_admit`], but picks an endpoint that is late to respond only if [`may_get_request`] permits it.
    fn pick_responding(
        &self,
        endpoints: &[Arc<E>],
        now: Instant,
        is_allowed: impl Fn(&Arc<E>) -> bool,
    ) -> Option<Arc<E>> {
        self.pick_and_admit(endpoints, now, |endpoint| {
            is_allowed(endpoint) && may_get_request(&**endpoint, now)
        })
    }

    /// Picks an endpoint and admits the request to it.
    fn pick_and_admit(
        &self,
        endpoints: &[Arc<E>],
        now: Instant,
        is_allowed: impl Fn(&Arc<E>) -> bool,
    ) -> Option<Arc<E>> {
        // An endpoint may have been picked for a probe or a trial request that another worker sends first. Then pick again.
        for _ in 0..MAX_PICKS {
            let can_be_picked = |endpoint: &Arc<E>| endpoint.breaker().can_be_picked(now) && is_allowed(endpoint);
            let endpoint = &endpoints[self.choose(endpoints, now, can_be_picked)?];
            let load = endpoint.load();
            let late = load.late_response(now).filter(|_| !endpoint.can_be_checked());
            let is_trial_taken =
                late.is_some_and(|late| late.is_trial_due() && !load.try_record_check_or_trial(late, now));
            if !is_trial_taken && endpoint.breaker().admit(now) {
                return Some(endpoint.clone());
            }
        }
        None
    }

    fn choose(&self, endpoints: &[Arc<E>], now: Instant, can_be_picked: impl Fn(&Arc<E>) -> bool) -> Option<usize> {
        match self.strategy {
            Strategy::PeakEwma => p2c::choose(
                endpoints.len(),
                |below| fastrand::usize(..below),
                |index| {
                    let endpoint = &endpoints[index];
                    can_be_picked(endpoint).then(|| endpoint.load().cost(now))
                },
            ),
            Strategy::RoundRobin if endpoints.is_empty() => None,
            Strategy::RoundRobin => {
                let start = self.round_robin_next.fetch_add(1, Ordering::Relaxed);
                let found = (0..endpoints.len())
                    .map(|step| start.wrapping_add(step) % endpoints.len())
                    .find(|index| can_be_picked(&endpoints[*index]));
                if found.is_none() {
                    // The request may choose among the fallback endpoints next. If it counted twice, one of them would be skipped.
                    self.round_robin_next.fetch_sub(1, Ordering::Relaxed);
                }
                found
            }
        }
    }

    /// # Errors
    /// The control plane has reported that the service has no endpoints. An empty list of endpoints is not an error.
    fn fail_if_no_endpoints(&self) -> Result<(), PickError> {
        match &**self.discovery_state.load() {
            DiscoveryState::NoEndpoints => Err(PickError::NoEndpoints),
            DiscoveryState::Unknown | DiscoveryState::Endpoints(_) => Ok(()),
        }
    }

    fn unavailable_reason(&self) -> UnavailableReason {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints)
                if endpoints.iter().any(|endpoint| endpoint.breaker().is_ejected()) =>
            {
                UnavailableReason::Ejected
            }
            DiscoveryState::Endpoints(endpoints) => UnavailableReason::Unreachable(
                endpoints
                    .iter()
                    .find_map(|endpoint| endpoint.breaker().dial_failure_cause()),
            ),
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => UnavailableReason::Unreachable(None),
        }
    }

    /// The earliest time at which a probe of an endpoint is due; `None` if no endpoint is unavailable.
    fn next_probe_at(&self) -> Option<Instant> {
        match &**self.discovery_state.load() {
            DiscoveryState::Endpoints(endpoints) => endpoints
                .iter()
                .filter_map(|endpoint| endpoint.breaker().next_probe_at())
                .min(),
            DiscoveryState::Unknown | DiscoveryState::NoEndpoints => None,
        }
    }
}

/// Whether the endpoint may get a request. Starts one check of an endpoint that is late to respond; the endpoint then gets requests
/// until the answer to the check is late too. An endpoint that cannot be checked gets only trial requests, when they are due.
fn may_get_request(endpoint: &impl Candidate, now: Instant) -> bool {
    let load = endpoint.load();
    let Some(late) = load.late_response(now) else {
        return true;
    };
    if !endpoint.can_be_checked() {
        return late.is_trial_due();
    }
    if late.is_unchecked() && load.try_record_check_or_trial(late, now) {
        endpoint.check();
    }
    !late.is_check_late()
}

/// A place in the queue. It is freed on drop.
struct QueuePermit<'a>(&'a AtomicUsize);

impl<'a> QueuePermit<'a> {
    fn try_acquire(n_queued: &'a AtomicUsize, capacity: usize) -> Result<Self, PickError> {
        let taken = n_queued.fetch_add(1, Ordering::Relaxed);
        let permit = Self(n_queued);
        if taken < capacity {
            Ok(permit)
        } else {
            Err(PickError::QueueFull(taken))
        }
    }
}

impl Drop for QueuePermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Maximum number of picks for one request. A pick is in vain if another worker sends the probe or the trial request of the
/// picked endpoint first. After the last pick, the request waits in the queue.
const MAX_PICKS: usize = 3;

#[cfg(test)]
mod tests;
