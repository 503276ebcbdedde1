//! ServiceProfiles: routes by condition, response classes, a retry budget, and weighted destinations.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::addr::NameAddr;
use tulle_core::metrics::Labels;

use crate::policy::endpoint::EndpointSpec;
use crate::policy::matches::{Pattern, RequestAttributes};
use crate::policy::meta::Meta;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Profile {
    /// The service's name; absent if the address belongs to no service.
    pub(crate) name: Option<Arc<str>>,
    /// Whether the server's protocol is opaque, so that detection is skipped.
    pub(crate) is_opaque: bool,
    pub(crate) routes: Arc<[ProfileRoute]>,
    pub(crate) retry_budget: Option<RetryBudget>,
    pub(crate) traffic_split: Arc<[WeightedDestination]>,
    /// The single endpoint of an address that belongs to no service.
    pub(crate) endpoint: Option<Arc<EndpointSpec>>,
    /// The Service that the control plane names, for debug output.
    pub(crate) parent: Option<Arc<Meta>>,
    /// The ServiceProfile that the control plane names, for debug output.
    pub(crate) resource: Option<Arc<Meta>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProfileRoute {
    pub(crate) condition: RequestCondition,
    /// The first class that matches decides.
    pub(crate) response_classes: Vec<ResponseClass>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) is_retryable: bool,
    /// Maximum time from the start of the request to the response head, all attempts included.
    pub(crate) timeout: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestCondition {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Path(Pattern),
    Method(Method),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseClass {
    pub(crate) condition: ResponseCondition,
    pub(crate) class: Class,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Success,
    Failure,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ResponseCondition {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    /// The range includes both ends.
    Status {
        min: u16,
        max: u16,
    },
}

/// Limits retries to a share of the requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RetryBudget {
    /// Maximum ratio of retries to requests.
    pub(crate) ratio: f32,
    /// Number of retries per second that are allowed without requests.
    pub(crate) min_per_second: u32,
    /// Time for which a request counts towards the budget; at least one second.
    pub(crate) ttl: Duration,
}

/// A destination of a traffic split, and its weight, which is not zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WeightedDestination {
    pub(crate) destination: NameAddr,
    pub(crate) weight: u32,
    /// The Service that the control plane names, for debug output.
    pub(crate) backend: Option<Arc<Meta>>,
}

/// Finds the first route whose condition a request matches. Returns its index.
pub(crate) fn find_route(routes: &[ProfileRoute], attributes: &RequestAttributes<'_>) -> Option<usize> {
    routes.iter().position(|route| route.condition.matches(attributes))
}

/// Metric labels of a route, or of requests that match no route; `dst` is the logical name with its port.
pub(crate) fn route_labels(direction: &str, dst: &str, route: Option<&ProfileRoute>) -> Labels {
    let labels = Labels::new().with("direction", direction).with("dst", dst);
    let labels_of_route = route.into_iter().flat_map(|route| &route.labels);
    labels_of_route.fold(labels, |labels, (name, value)| {
        labels.with(&format!("rt_{name}"), value)
    })
}

impl Profile {
    /// Whether HTTP requests are routed by this profile instead of the client policy.
    pub(crate) fn overrides_http_policy(&self) -> bool {
        self.name.is_some() && !(self.routes.is_empty() && self.traffic_split.is_empty())
    }

    /// Whether opaque connections are routed by this profile instead of the client policy.
    pub(crate) fn overrides_opaque_policy(&self) -> bool {
        !self.traffic_split.is_empty()
    }
}

impl ProfileRoute {
    /// The class of a status on this route; `None` if no class matches.
    pub(crate) fn classify(&self, status: StatusCode) -> Option<Class> {
        let class = self
            .response_classes
            .iter()
            .find(|class| class.condition.matches(status));
        class.map(|class| class.class)
    }
}

impl RequestCondition {
    fn matches(&self, attributes: &RequestAttributes<'_>) -> bool {
        match self {
            Self::All(conditions) => conditions.iter().all(|condition| condition.matches(attributes)),
            Self::Any(conditions) => conditions.iter().any(|condition| condition.matches(attributes)),
            Self::Not(condition) => !condition.matches(attributes),
            Self::Path(pattern) => pattern.matches(attributes.path.as_bytes()),
            Self::Method(method) => method == attributes.method,
        }
    }
}

impl ResponseCondition {
    fn matches(&self, status: StatusCode) -> bool {
        match self {
            Self::All(conditions) => conditions.iter().all(|condition| condition.matches(status)),
            Self::Any(conditions) => conditions.iter().any(|condition| condition.matches(status)),
            Self::Not(condition) => !condition.matches(status),
            Self::Status { min, max } => (*min..=*max).contains(&status.as_u16()),
        }
    }
}

/// The state of a [`RetryBudget`], shared by all routes of a profile.
///
/// Requests and retries count for `ttl`, which is divided into [`SLOTS_PER_TTL`] steps of equal length. Steps are numbered from
/// `start`. Each recent step has a slot.
#[derive(Debug)]
pub(crate) struct RetryBudgetState {
    config: RetryBudget,
    start: Instant,
    /// Length of a step, in nanoseconds.
    step_nanos: u64,
    window: Mutex<BudgetWindow>,
}

#[derive(Debug, Default)]
struct BudgetWindow {
    /// The step of the newest slot.
    newest_step: u64,
    slots: [Slot; SLOTS_PER_TTL as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    requests: u32,
    retries: u32,
}

impl RetryBudgetState {
    pub(crate) fn new(config: RetryBudget, now: Instant) -> Self {
        Self {
            config,
            start: now,
            step_nanos: nanos(config.ttl / SLOTS_PER_TTL).max(1),
            window: Mutex::default(),
        }
    }

    /// Counts a request that is not a retry.
    pub(crate) fn deposit(&self, now: Instant) {
        let step = self.step_at(now);
        let mut window = self.window.lock();
        window.advance_to(step);
        let slot = window.newest_slot();
        slot.requests = slot.requests.saturating_add(1);
    }

    /// Takes one retry from the budget; returns whether it was allowed.
    #[must_use]
    pub(crate) fn withdraw(&self, now: Instant) -> bool {
        let step = self.step_at(now);
        let mut window = self.window.lock();
        window.advance_to(step);
        let (requests, retries) = window.slots.iter().fold((0.0, 0.0), |(requests, retries), slot| {
            (requests + f64::from(slot.requests), retries + f64::from(slot.retries))
        });
        let always_allowed = f64::from(self.config.min_per_second) * self.config.ttl.as_secs_f64();
        let balance = always_allowed + requests * f64::from(self.config.ratio) - retries;
        let is_allowed = balance >= 1.0;
        if is_allowed {
            window.newest_slot().retries += 1;
        }
        is_allowed
    }

    fn step_at(&self, now: Instant) -> u64 {
        nanos(now.saturating_duration_since(self.start)) / self.step_nanos
    }
}

/// A duration in nanoseconds, saturated at 584 years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl BudgetWindow {
    /// Makes the slot of `step` the newest one, and clears the slots that have expired. If a newer slot exists, nothing changes:
    /// the caller may have read its clock before another worker did.
    fn advance_to(&mut self, step: u64) {
        for reused in (self.newest_step + 1..=step).rev().take(self.slots.len()) {
            self.slots[slot_index(reused)] = Slot::default();
        }
        self.newest_step = step.max(self.newest_step);
    }

    fn newest_slot(&mut self) -> &mut Slot {
        &mut self.slots[slot_index(self.newest_step)]
    }
}

/// Steps that are [`SLOTS_PER_TTL`] apart use the same slot.
fn slot_index(step: u64) -> usize {
    (step % u64::from(SLOTS_PER_TTL)) as usize
}

/// Number of steps in the `ttl` of a budget, each with a slot of its own.
const SLOTS_PER_TTL: u32 = 10;

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;

    fn path(pattern: &str) -> RequestCondition {
        RequestCondition::Path(Pattern::new(pattern).unwrap())
    }

    #[test]
    fn conditions_combine() {
        use RequestCondition::{All, Any, Method as M, Not};
        let headers = HeaderMap::new();
        for (condition, method, target, expected) in [
            (path("/api/.*"), Method::GET, "/api/x", true),
            (path("/api"), Method::GET, "/api/x", false),
            (All(vec![path("/a"), M(Method::GET)]), Method::GET, "/a", true),
            (All(vec![path("/a"), M(Method::GET)]), Method::PUT, "/a", false),
            (Any(vec![path("/b"), M(Method::GET)]), Method::GET, "/a", true),
            (Not(Box::new(M(Method::GET))), Method::GET, "/a", false),
            (All(vec![]), Method::GET, "/", true),
            (Any(vec![]), Method::GET, "/", false),
        ] {
            let attributes = RequestAttributes {
                method: &method,
                authority: None,
                path: target,
                query: None,
                headers: &headers,
            };
            assert_eq!(
                condition.matches(&attributes),
                expected,
                "{condition:?} {method} {target}"
            );
        }
    }

    #[test]
    fn the_first_matching_response_class_decides() {
        let class = |min, max, class| ResponseClass {
            condition: ResponseCondition::Status { min, max },
            class,
        };
        let route = ProfileRoute {
            condition: path("/"),
            response_classes: vec![class(404, 404, Class::Failure), class(503, 503, Class::Success)],
            labels: BTreeMap::new(),
            is_retryable: false,
            timeout: None,
        };
        for (status, expected) in [
            (404, Some(Class::Failure)),
            (410, None),
            (500, None),
            (503, Some(Class::Success)),
        ] {
            assert_eq!(
                route.classify(StatusCode::from_u16(status).unwrap()),
                expected,
                "{status}"
            );
        }
    }

    #[test]
    fn an_empty_profile_overrides_no_policy() {
        let profile = Profile {
            name: Some("web.test".into()),
            ..Profile::default()
        };
        assert!(!profile.overrides_http_policy());
        assert!(!profile.overrides_opaque_policy());
    }

    #[test]
    fn each_request_allows_a_fraction_of_a_retry_until_it_expires() {
        let config = RetryBudget {
            ratio: 0.2,
            min_per_second: 0,
            ttl: Duration::from_secs(10),
        };
        let start = Instant::now();
        let budget = RetryBudgetState::new(config, start);
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
    fn the_minimum_number_of_retries_is_allowed_without_requests() {
        let config = RetryBudget {
            ratio: 0.0,
            min_per_second: 1,
            ttl: Duration::from_secs(2),
        };
        let now = Instant::now();
        let budget = RetryBudgetState::new(config, now);
        assert!(budget.withdraw(now));
        assert!(budget.withdraw(now));
        assert!(!budget.withdraw(now));
        assert!(budget.withdraw(now + Duration::from_secs(3)));
    }
}
