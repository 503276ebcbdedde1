//! Requests that go by a ServiceProfile: its routes, their metrics and timeouts, and retries within a budget.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use http::{HeaderValue, Request, Response};
use tokio::{sync::oneshot, time::Instant};
use tulle_core::{
    metrics::{Counter, Family, Registry},
    names::header as names,
};

use crate::{
    http::{
        body::Body,
        classify::{self, Classified},
        error::Error,
        limits::Terms,
        replay,
        tunnel::Leg,
    },
    metrics::http::{self as http_metrics, End, Outcome, Series},
    outbound::{
        backend::Backends,
        http::Attempt,
        tries::{self, After, Retries, Tally},
    },
    policy::{
        filter::Filter,
        matches::Head,
        profile::{self, Budget, Class, Profile, ProfileRoute},
    },
};

/// A profile, compiled.
pub(crate) struct ProfilePlan {
    profile: Profile,
    /// The traffic split, or the service itself.
    pub(super) backends: Backends<Filter>,
    /// In the order of the profile's routes; the last one is for requests that no route matches.
    routes: Vec<RouteMetrics>,
    budget: Option<Arc<Budget>>,
    canonical: Option<HeaderValue>,
}

/// The `route_*` families.
#[derive(Clone)]
pub(crate) struct Families {
    logical: http_metrics::Families,
    attempts: http_metrics::Families,
    retryable: Family<Counter>,
}

struct RouteMetrics {
    /// A request, whatever it takes.
    logical: Arc<Series>,
    /// Each try.
    attempts: Arc<Series>,
    no_budget: Arc<Counter>,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            logical: http_metrics::Families::with_prefix(registry, "route_"),
            attempts: http_metrics::Families::with_prefix(registry, "route_actual_"),
            retryable: registry.counter("route_retryable_total", "Requests that could have been retried"),
        }
    }

    fn route(&self, dst: &str, route: Option<&ProfileRoute>) -> RouteMetrics {
        let labels = profile::labels("outbound", dst, route);
        RouteMetrics {
            no_budget: self.retryable.get(&labels.clone().with("skipped", "no_budget")),
            attempts: self.attempts.series(labels.clone()),
            logical: self.logical.series(labels),
        }
    }
}

impl ProfilePlan {
    /// `dst` is the logical name, with the port that was dialled; `before` is what this takes the place of.
    pub(super) fn new(
        families: &Families,
        profile: &Profile,
        dst: &str,
        backends: Backends<Filter>,
        before: Option<&Self>,
    ) -> Self {
        // What was used of a budget stays used.
        let same = before.filter(|before| before.profile.retry_budget == profile.retry_budget);
        let budget = |terms| Arc::new(Budget::new(terms, Instant::now()));
        let routes = profile.routes.iter().map(Some).chain([None]);
        Self {
            routes: routes.map(|route| families.route(dst, route)).collect(),
            budget: same.map_or_else(|| profile.retry_budget.map(budget), |same| same.budget.clone()),
            canonical: HeaderValue::from_str(dst).ok(),
            profile: profile.clone(),
            backends,
        }
    }

    /// The profile's routes.
    pub(super) fn routes(&self) -> &[ProfileRoute] {
        &self.profile.routes
    }

    /// Sends a request by its route: once, or again after a failure that the route calls retryable, unless it asks for an upgrade.
    ///
    /// # Errors
    /// The last try brought no response, or the route's time is over.
    pub(super) async fn send(
        &self,
        attempt: &Attempt<'_>,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
    ) -> Result<Response<Body>, Error> {
        let started = Instant::now();
        let head = Head::of(req.method(), req.uri(), req.headers());
        let index = profile::find(&self.profile.routes, &head);
        let route = index.and_then(|index| self.profile.routes.get(index));
        let metrics = &self.routes[index.unwrap_or(self.profile.routes.len())];
        if let Some(canonical) = &self.canonical {
            req.headers_mut().insert(names::L5D_DST_CANONICAL, canonical.clone());
        }
        let mut tally = Attempts::begin(route, metrics);
        if let Some(budget) = &self.budget {
            budget.deposit(started);
        }
        let retryable = route.filter(|route| route.is_retryable).zip(self.budget.as_deref());
        let retries = retryable.map(|(route, budget)| Retries {
            after: After::Failures(route),
            most: u16::MAX,
            max_body: replay::LIMIT,
            timeout: None,
            backoff: None,
            budget,
        });
        let timeout = route.and_then(|route| route.timeout);
        let terms = Terms {
            answer: timeout.map(|limit| (started + limit, limit)),
            ..Terms::default()
        };
        let sent = match upgrade {
            None => tries::run(attempt, started, req, terms, retries.as_ref(), &tally).await,
            Some(_) => tries::once(attempt, started, req, upgrade, terms, &tally).await,
        };
        tally.is_over = true;
        match sent {
            Ok(rsp) => {
                let class = route.and_then(|route| route.classify(rsp.status()));
                let series = metrics.logical.clone();
                Ok(classify::observe(rsp, started, Classified { series, class }))
            }
            Err(error) => {
                metrics.logical.response(classify::failed(&error));
                Err(error)
            }
        }
    }
}

/// A request and its tries, as its route counts them.
struct Attempts<'a> {
    route: Option<&'a ProfileRoute>,
    metrics: &'a RouteMetrics,
    /// Whether a try is under way.
    is_trying: AtomicBool,
    /// Whether there is nothing left to try.
    is_over: bool,
}

impl<'a> Attempts<'a> {
    fn begin(route: Option<&'a ProfileRoute>, metrics: &'a RouteMetrics) -> Self {
        metrics.logical.request();
        Self {
            route,
            metrics,
            is_trying: AtomicBool::new(false),
            is_over: false,
        }
    }
}

/// The client has left.
impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let left = classify::failed(&Error::Left);
        if *self.is_trying.get_mut() {
            self.metrics.attempts.response(left);
        }
        self.metrics.logical.response(left);
    }
}

impl Tally for Attempts<'_> {
    fn begun(&self) {
        self.is_trying.store(true, Ordering::Relaxed);
        self.metrics.attempts.request();
    }

    fn ended(&self, result: &Result<Response<Body>, Error>, grpc: Option<i32>) {
        self.is_trying.store(false, Ordering::Relaxed);
        self.metrics.attempts.response(match result {
            Ok(rsp) => {
                let class = self.route.and_then(|route| route.classify(rsp.status()));
                Outcome {
                    status: rsp.status(),
                    grpc,
                    success: class.map_or_else(
                        || classify::is_success(rsp.status(), grpc),
                        |class| class == Class::Success,
                    ),
                    end: End::Complete,
                }
            }
            Err(error) => classify::failed(error),
        });
    }

    fn no_budget(&self) {
        self.metrics.no_budget.inc();
    }
}
