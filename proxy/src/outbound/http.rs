//! The request path of the outbound side: route, filters, dispatch, response (O5–O12).

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use http::{HeaderValue, Method, Request, Response, Version};
use tokio::{sync::oneshot, time::Instant};
use tulle_core::{
    addr::{Addr, NameAddr},
    drain,
    metrics::Labels,
    names::header as names,
};

use crate::{
    http::{
        body::Body, classify, error::Error, filters, headers, limits::Limits, replay::Copy, tunnel::Leg, upload::Upload,
    },
    outbound::{
        Outbound,
        backend::Backends,
        destination::{Destination, HttpPlan, Plan, Router},
        discover::Found,
        dispatch::{Counted, Dispatch},
        metrics::{self, BackendSeries, Passage, RouteSeries},
        reach::Tried,
    },
    policy::{
        filter::{self, Filter},
        matches::Head,
        meta::Meta,
        profile::{self, ProfileRoute},
        route,
    },
};

/// One connection that speaks HTTP.
pub(super) struct HttpConnection {
    pub(super) outbound: Arc<Outbound>,
    pub(super) worker: usize,
    /// The application's end.
    pub(super) client: SocketAddr,
    pub(super) targets: Targets,
    pub(super) drain: drain::Watch,
}

/// Where the requests of a connection go.
pub(super) enum Targets {
    /// To what was dialled.
    Dialled(Arc<Destination>),
    /// To the services that they name in `l5d-dst-override`, and else to what was dialled.
    Named(Arc<Destination>),
    /// Where each of them says, as to a proxy.
    Asked,
    /// To what was dialled, of which nobody has said anything.
    Undiscovered(Addr),
}

impl HttpConnection {
    /// Carries one request from the application to a backend.
    pub(super) async fn serve(&self, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        headers::check_request(req)?;
        let mut upgrade = req.body_mut().take_client();
        if req.version() <= Version::HTTP_11 {
            match upgrade {
                None => headers::strip_hop_by_hop(req.headers_mut()),
                Some(_) => headers::strip_all_but_upgrade(req.headers_mut()),
            }
        }
        let (destination, others) = match &self.targets {
            Targets::Dialled(destination) => return self.send(destination, req, &mut upgrade).await,
            Targets::Named(dialled) => Box::pin(self.named(dialled, req)).await?,
            // That of RFC 8441 has a scheme and a path, and is no other request to a proxy than the rest.
            Targets::Asked if *req.method() == Method::CONNECT && req.uri().scheme().is_none() => {
                return Box::pin(self.connect(req, upgrade)).await;
            }
            Targets::Asked => Box::pin(self.asked(req)).await?,
            Targets::Undiscovered(target) => return Err(Error::Undiscovered(target.clone())),
        };
        match others.is_empty() {
            true => self.send(&destination, req, &mut upgrade).await,
            // Rare, and larger than the rest.
            false => Box::pin(self.send_in_turns(destination, others, req, &mut upgrade)).await,
        }
    }

    /// Sends a request to the first of several destinations where there is anybody.
    async fn send_in_turns(
        &self,
        mut destination: Arc<Destination>,
        others: Vec<SocketAddr>,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
    ) -> Result<Response<Body>, Error> {
        for addr in others {
            let headers = req.headers().clone();
            match self.send(&destination, req, upgrade).await {
                Err(error) if error.is_of_dial() => {}
                sent => return sent,
            }
            *req.headers_mut() = headers; // which filters may have changed, and nothing else has been touched
            (destination, _) = self.outbound.target(Addr::Socket(addr)).await?;
        }
        self.send(&destination, req, upgrade).await
    }

    /// Sends a request as what is known of its destination says.
    async fn send(
        &self,
        destination: &Destination,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
    ) -> Result<Response<Body>, Error> {
        let snapshot = destination.snapshot(); // one for the whole request
        let router = router(&snapshot.plan, req.version())?;
        let required = self.required_identity(req);
        let to = |by, backends, prefix, entered| Attempt {
            connection: self,
            by,
            required: required.as_deref(),
            backends,
            prefix,
            entered,
        };
        let routes = match router {
            Router::Routes(routes) => routes,
            Router::Profile(profile) => {
                let attempt = to(By::Profile(profile.routes()), &profile.backends, None, None);
                return Box::pin(profile.send(&attempt, req, upgrade)).await;
            }
        };
        let found = route::find(routes, &Head::of(req.method(), req.uri(), req.headers()));
        let found = found.ok_or(Error::RouteNotFound)?; // O6
        let HttpPlan {
            backends,
            allowed,
            series,
        } = &found.rule.payload;
        let by = By::Route(&found.route.meta);
        let mut entered = Entered::begin(series, req);
        let sent = match filters::apply(&found.rule.filters, req, found.prefix) {
            Err(answer) => Err(answer),
            Ok(()) => match allowed {
                None => {
                    let attempt = to(by, backends, found.prefix, Some((&entered, Last::Certainly)));
                    let started = entered.upload.started();
                    attempt.send(started, req, upgrade, &mut Tried::new(), None, None).await // O7–O11
                }
                // Larger, as it has timers.
                Some(allowed) => {
                    let attempt = to(by, backends, found.prefix, Some((&entered, Last::Perhaps)));
                    let sent = Box::pin(allowed.send(&attempt, req, upgrade, &**entered.series())).await;
                    sent.map(|rsp| {
                        let (route, upload) = (entered.series().clone(), entered.upload.clone());
                        classify::observe(rsp, upload.started(), Passage { route, upload })
                    })
                }
            },
        };
        entered.told(&sent);
        let mut rsp = sent?;
        filter_response(&found.rule.filters, &mut rsp); // O12
        Ok(rsp)
    }

    /// Where the service is that the request names, or what was dialled if it names none.
    async fn named(&self, dialled: &Arc<Destination>, req: &mut Request<Body>) -> Result<Found, Error> {
        let Some(name) = req.headers_mut().remove(names::L5D_DST_OVERRIDE) else {
            return Ok((dialled.clone(), Vec::new()));
        };
        let name = override_target(&name).ok_or(Error::BadRequest(
            "l5d-dst-override is no DNS name, with a port or without, such as web.shop.svc.cluster.local:8080",
        ))?;
        let name = Addr::Name(name);
        // Who sends requests to an ingress may be anybody.
        match self.outbound.discover.destinations.may_have_profile(&name) {
            true => self.outbound.target(name).await,
            false => Err(Error::TargetForbidden(name)),
        }
    }

    /// The identity that the application demands, if any.
    fn required_identity(&self, req: &mut Request<Body>) -> Option<String> {
        headers::get(req.headers(), &names::L5D_REQUIRE_ID)?;
        let required = req.headers_mut().remove(names::L5D_REQUIRE_ID)?;
        Some(String::from_utf8_lossy(required.as_bytes()).into_owned())
    }
}

/// The target that `l5d-dst-override` names.
fn override_target(value: &HeaderValue) -> Option<NameAddr> {
    let text = value.to_str().ok()?;
    match text.contains(':') {
        true => text.parse().ok(),
        false => format!("{text}:80").parse().ok(),
    }
}

fn router(plan: &Plan, version: Version) -> Result<&Router, Error> {
    match plan {
        Plan::Detect { http2, .. } if version == Version::HTTP_2 => Ok(http2),
        Plan::Detect { http1, .. } => Ok(http1),
        Plan::Http1(router) | Plan::Http2(router) => Ok(router),
        Plan::Opaque(_) | Plan::Tls { .. } => Err(Error::InvalidPolicy(
            "this destination does not speak HTTP, or no longer".into(),
        )),
    }
}

fn filter_response(filters: &[Filter], rsp: &mut Response<Body>) {
    if !filters.is_empty() {
        filter::apply_response(filters, rsp.headers_mut());
    }
}

/// A request that its route counts, until it has a response.
struct Entered<'a> {
    route: &'a Arc<RouteSeries>,
    /// Of its host, where hosts are told apart.
    named: Option<Arc<RouteSeries>>,
    upload: Upload,
    is_told: bool,
}

impl<'a> Entered<'a> {
    fn begin(route: &'a Arc<RouteSeries>, req: &mut Request<Body>) -> Self {
        let named = route.named(req);
        let frames = &named.as_ref().unwrap_or(route).frames;
        Self {
            upload: Upload::of(req, Instant::now(), frames),
            route,
            named,
            is_told: false,
        }
    }

    fn series(&self) -> &Arc<RouteSeries> {
        self.named.as_ref().unwrap_or(self.route)
    }

    /// Counts an attempt that begins at `began_at`.
    fn count(&self, backend: Arc<BackendSeries>, last: Last, began_at: Instant) -> Counted {
        let (upload, named) = (self.upload.clone(), self.named.clone());
        Counted::begin(upload, backend, named, last, began_at)
    }

    /// Counts a request that brought no response; of others the response's end tells.
    fn told(&mut self, sent: &Result<Response<Body>, Error>) {
        self.is_told = true;
        if let Err(error) = sent {
            let now = Instant::now();
            self.series()
                .ended(self.upload.started(), now, &classify::failed(error));
        }
    }
}

/// The client has left.
impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if !self.is_told {
            self.told(&Err(Error::Left));
        }
    }
}

/// What decides about a request.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    /// A route of a policy.
    Route(&'a Meta),
    /// The routes of a ServiceProfile.
    Profile(&'a [ProfileRoute]),
}

impl By<'_> {
    /// What an observer of the request is told of its route.
    pub(super) fn told(self, req: &Request<Body>) -> BTreeMap<String, String> {
        match self {
            Self::Route(meta) => {
                let labels = metrics::with_meta(Labels::new(), "route", meta);
                labels.pairs().into_iter().collect()
            }
            Self::Profile(routes) => {
                let index = profile::find(routes, &Head::of(req.method(), req.uri(), req.headers()));
                index.map(|index| routes[index].labels.clone()).unwrap_or_default()
            }
        }
    }
}

/// How a request is sent, whenever it is: to a backend drawn anew.
#[derive(Clone, Copy)]
pub(super) struct Attempt<'a> {
    connection: &'a HttpConnection,
    by: By<'a>,
    /// The identity that the application demands of the endpoint.
    required: Option<&'a str>,
    backends: &'a Backends<Filter>,
    /// Bytes of the path that the route's match covered.
    prefix: Option<usize>,
    /// Of a request that its route counts.
    entered: Option<(&'a Entered<'a>, Last)>,
}

/// Whether nothing follows an attempt, so that its response ends the request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    Certainly,
    Perhaps,
}

impl Attempt<'_> {
    /// Draws a backend and sends what is in `req` to it, beginning at `started`, within `limits`, rather to endpoints that are
    /// not among `tried`; `copy` is what the caller has kept of it, if anything.
    ///
    /// # Errors
    /// As [`Dispatch::run`], or a filter answers.
    pub(super) async fn send(
        &self,
        started: Instant,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
        tried: &mut Tried,
        limits: Option<&mut Limits>,
        copy: Option<&Copy>,
    ) -> Result<Response<Body>, Error> {
        let choice = self.backends.choose()?;
        filters::apply(&choice.filters, req, self.prefix)?;
        let mut counted = self
            .entered
            .zip(choice.series.as_ref())
            .map(|((entered, last), backend)| entered.count(backend.clone(), last, started));
        let dispatch = Dispatch {
            worker: self.connection.worker,
            client: self.connection.client,
            by: self.by,
            backend: &choice.backend,
            required: self.required,
            families: &self.connection.outbound.families,
            drain: &self.connection.drain,
            started,
            n_tried_before: tried.len(),
            // What is the backend's own is in no copy of the caller's, and the limits are on this body alone.
            kept: copy.filter(|copy| choice.filters.is_empty() && copy.has_no_body()),
        };
        let sent = dispatch.run(req, upgrade, tried, limits, &mut counted).await;
        let mut rsp = sent.inspect_err(|error| {
            if let Some(counted) = &mut counted {
                counted.failed(error);
            }
        })?;
        filter_response(&choice.filters, &mut rsp);
        Ok(rsp)
    }

    /// Whether a request would find an endpoint at once.
    pub(super) fn is_available(&self) -> bool {
        self.backends.is_available(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_names_a_target_at_port_80_or_its_own() {
        let target = |value: &'static str| {
            let target = override_target(&HeaderValue::from_static(value));
            target.map(|target| target.to_string())
        };
        assert_eq!(
            target("Web.shop.svc.cluster.local").as_deref(),
            Some("web.shop.svc.cluster.local:80")
        );
        assert_eq!(target("web.shop:8080").as_deref(), Some("web.shop:8080"));
        for bad in [
            "",
            "web:",
            "web:0",
            "10.0.0.1",
            "10.0.0.1:80",
            "[::1]:80",
            "we b",
            "a,b",
        ] {
            assert_eq!(target(bad), None, "{bad:?}");
        }
    }
}
