//! Requests that go by a ServiceProfile: its routes, their metrics and timeouts, and retries within a budget.

use std::sync::Arc;

use http::{HeaderValue, Request, Response};
use tokio::time::Instant;
use tulle_core::{
    metrics::{Counter, Family, Labels, Registry},
    names::header as names,
};

use crate::{
    http::{
        body::Body,
        classify::{self, Ended},
        error::Error,
    },
    metrics::http::{self as http_metrics, Outcome, Series},
    outbound::{
        backend::Backends,
        dispatch::{Copy, Dispatch},
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
    /// The traffic split, where there is one.
    pub(super) overrides: Option<Backends<Filter>>,
    /// In the order of the profile's routes; the last one is for requests that no route matches.
    routes: Vec<RouteMetrics>,
    budget: Option<Budget>,
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
        let mut labels = Labels::new().with("direction", "outbound").with("dst", dst);
        for (name, value) in route.iter().flat_map(|route| &route.labels) {
            labels = labels.with(&format!("rt_{name}"), value);
        }
        RouteMetrics {
            no_budget: self.retryable.get(&labels.clone().with("skipped", "no_budget")),
            attempts: self.attempts.series(labels.clone()),
            logical: self.logical.series(labels),
        }
    }
}

impl ProfilePlan {
    /// `port` is the one that was dialled; it is part of the logical name.
    pub(super) fn new(families: &Families, profile: &Profile, port: u16, overrides: Option<Backends<Filter>>) -> Self {
        let dst = format!("{}:{port}", profile.name.as_deref().unwrap_or_default());
        let routes = profile.routes.iter().map(Some).chain([None]);
        Self {
            routes: routes.map(|route| families.route(&dst, route)).collect(),
            budget: profile.retry_budget.map(|terms| Budget::new(terms, Instant::now())),
            canonical: HeaderValue::from_str(&dst).ok(),
            profile: profile.clone(),
            overrides,
        }
    }

    /// Sends a request by its route: once, or again after a failure that the route calls retryable.
    ///
    /// # Errors
    /// The last try brought no response, or the route's time is over.
    pub(super) async fn send(&self, dispatch: &Dispatch<'_>, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        let started = Instant::now();
        let head = Head::of(req.method(), req.uri(), req.headers());
        let index = profile::find(&self.profile.routes, &head);
        let route = index.and_then(|index| self.profile.routes.get(index));
        let metrics = &self.routes[index.unwrap_or(self.profile.routes.len())];
        if let Some(canonical) = &self.canonical {
            req.headers_mut().insert(names::L5D_DST_CANONICAL, canonical.clone());
        }
        metrics.logical.request();
        if let Some(budget) = &self.budget {
            budget.deposit(started);
        }
        let tries = self.attempts(dispatch, req, route, metrics);
        let result = match route.and_then(|route| route.timeout) {
            None => tries.await,
            Some(limit) => Box::pin(tokio::time::timeout(limit, tries))
                .await
                .unwrap_or(Err(Error::RequestTimeout(limit))),
        };
        match result {
            Ok(rsp) => {
                let class = route.map(|route| route.classify(rsp.status()));
                Ok(classify::observe(
                    rsp,
                    metrics.logical.clone(),
                    started,
                    Classified(class),
                ))
            }
            Err(error) => {
                metrics.logical.response(failed(&error));
                Err(error)
            }
        }
    }

    async fn attempts(
        &self,
        dispatch: &Dispatch<'_>,
        req: &mut Request<Body>,
        route: Option<&ProfileRoute>,
        metrics: &RouteMetrics,
    ) -> Result<Response<Body>, Error> {
        loop {
            let copy = match route {
                Some(route) if route.is_retryable && self.budget.is_some() => Copy::of(req),
                _ => None,
            };
            metrics.attempts.request();
            let result = dispatch.run(req, None).await;
            let (outcome, failure) = match &result {
                Ok(rsp) => {
                    let grpc = classify::grpc_status(rsp.headers());
                    let success = match route {
                        Some(route) => route.classify(rsp.status()) == Class::Success,
                        None => classify::is_success(rsp.status(), grpc),
                    };
                    (
                        Outcome {
                            status: rsp.status(),
                            grpc,
                            success,
                            error: false,
                        },
                        !success,
                    )
                }
                // Whatever was safe to repeat after an error has been repeated already.
                Err(error) => (failed(error), false),
            };
            metrics.attempts.response(outcome);
            let Some(copy) = copy.filter(|_| failure) else {
                return result;
            };
            if !self
                .budget
                .as_ref()
                .is_some_and(|budget| budget.withdraw(Instant::now()))
            {
                metrics.no_budget.inc();
                return result;
            }
            match copy.request() {
                Some(again) => *req = again,
                None => return result, // its body was too long to be kept
            }
        }
    }
}

fn failed(error: &Error) -> Outcome {
    Outcome {
        status: error.answer().status,
        grpc: None,
        success: false,
        error: true,
    }
}

/// The class that a route gives a response, instead of the usual one.
struct Classified(Option<Class>);

impl Ended for Classified {
    fn first_data(&mut self) {}

    fn class(&self, outcome: &Outcome) -> bool {
        match self.0 {
            Some(class) => class == Class::Success && !outcome.error,
            None => outcome.success,
        }
    }

    fn ended(&mut self, _: Outcome) {}
}
