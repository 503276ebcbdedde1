//! The request path of the inbound side: restore, authorize, send, observe (I8–I11).

use std::{borrow::Cow, collections::BTreeMap, pin::Pin, sync::Arc};

use http::{HeaderValue, Request, Response, Version, header, uri::Authority};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::{sync::oneshot, time::Instant};
use tulle_core::{
    addr::{Addr, NameAddr},
    drain, info_limited,
    metrics::{Counter, Labels},
    names::header as names,
};
use tulle_proto::tap::tap_event::ProxyDirection;

use crate::{
    http::{
        body::Body,
        classify::{self, Ended},
        client::{Client, Protocol, Reuse},
        error::{Error, Retry},
        filters, headers,
        orig_proto::{self, Restored},
        replay::{self, Copy},
        respond::Labelled,
        server::Closer,
        tunnel::{self, Leg},
        upload::Upload,
    },
    inbound::{
        App, Inbound, Peer,
        gateway::{self, Gateway, Onward},
        metrics::{RouteSeries, connection_labels, pairs_of, target_labels, with_meta, with_server},
        policy::{Current, Port},
        profiles::{By, Named, Routed},
    },
    metrics::{
        hosts::SaidBy,
        http::{Outcome, Series},
        routes::Kind,
    },
    net::io::{Io, Tcp},
    policy::{
        authz::{self, Authorization, Denied},
        matches::Head,
        meta::Meta,
        profile::Class,
        route,
        server::{ServerPolicy, ServerProtocol},
    },
    tap::{Drawn, Subject, Tapped},
    tls::status::{ClientTls, ServerTls, WhyClientPlain},
    trace,
};

/// One connection that speaks HTTP.
pub(super) struct HttpConnection {
    pub(super) inbound: Arc<Inbound>,
    pub(super) peer: Peer,
    pub(super) tls: ServerTls,
    pub(super) port: Arc<Port>,
    /// What the client speaks.
    pub(super) protocol: Protocol,
    pub(super) to: To,
    /// `l5d-client-id` of every request.
    pub(super) client_id: Option<HeaderValue>,
    pub(super) seen: Mutex<Seen>,
    pub(super) addressed: Mutex<Addressed>,
    /// Ends a connection that was permitted nothing when it came: one that is permitted more has room for more.
    pub(super) unauthorized: Option<Closer>,
    pub(super) drain: drain::Watch,
}

/// Where the requests of a connection go.
pub(super) enum To {
    /// To the application, from this worker.
    App(Arc<Client>),
    /// To a name of another network.
    Onward(Arc<dyn Gateway>, Box<Onward>),
}

/// One request, as its route counts it.
struct Passage {
    counted: Counted,
    upload: Upload,
    /// What a profile's route gives the response, instead of the usual one.
    class: Option<Class>,
    is_over: bool,
}

impl Passage {
    /// Counts a permitted request that came at `started`.
    fn begin(counted: Counted, req: &mut Request<Body>, started: Instant) -> Self {
        let route = &counted.handles.route;
        route.request();
        let upload = Upload::of(req, started, &route.request_frames);
        Self {
            counted,
            upload,
            class: None,
            is_over: false,
        }
    }

    /// It brought no response.
    fn failed(&mut self, error: &Error) {
        let outcome = classify::failed(error);
        self.counted.series().response(outcome);
        self.ended(outcome, Instant::now());
    }
}

/// The client has left.
impl Drop for Passage {
    fn drop(&mut self) {
        if !self.is_over {
            self.failed(&Error::Left);
        }
    }
}

impl Ended for Passage {
    fn series(&self) -> Option<&Series> {
        Some(self.counted.series())
    }

    fn data(&mut self, len: usize) {
        self.counted.handles.route.frame(len);
    }

    fn class(&self, outcome: &Outcome) -> bool {
        classify::succeeded(self.class, outcome)
    }

    fn ended(&mut self, outcome: Outcome, now: Instant) {
        self.is_over = true;
        self.counted.handles.route.ended(&self.upload, &outcome, now);
    }
}

/// Series that requests on this connection were counted in, so that each is looked up once.
pub(super) type Seen = SmallVec<[(Arc<Current>, usize, usize, Arc<Handles>); 1]>;

/// What a permitted request is counted in. Somebody beside [`Seen`] has it for as long as such a request, or its tunnel, lasts.
pub(super) struct Handles {
    /// The route's.
    meta: Arc<Meta>,
    authorization: Arc<Meta>,
    allowed: Arc<Counter>,
    series: Arc<Series>,
    route: Arc<RouteSeries>,
    /// The series for one authority, the last that was asked for, where requests are counted by it.
    last: Mutex<Option<(Arc<str>, Arc<Series>)>>,
}

/// What one permitted request is counted in.
struct Counted {
    handles: Arc<Handles>,
    /// By its authority, where requests are counted by it.
    named: Option<Arc<Series>>,
}

impl Counted {
    fn series(&self) -> &Arc<Series> {
        self.named.as_ref().unwrap_or(&self.handles.series)
    }
}

/// What requests of a connection were last addressed to, so that it is looked up once, and what is watched of that.
#[derive(Default)]
pub(super) struct Addressed {
    authority: Box<[u8]>,
    named: Option<Arc<Named>>,
}

/// Who names a request's profile.
enum Naming {
    /// The client's proxy.
    Told,
    /// The request, by whom it is addressed to.
    Addressed,
}

/// A name of DNS, a colon and a port.
const LONGEST_AUTHORITY: usize = 253 + 6;

impl HttpConnection {
    /// Carries one request to the application.
    pub(super) async fn serve(self: &Arc<Self>, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        let started = Instant::now();
        headers::check_request(req)?;
        let restored = self.restore(req)?;
        let app = match &self.to {
            To::App(app) => app,
            To::Onward(gateway, onward) => {
                headers::strip_folded(req.headers_mut());
                let mut sent = Box::pin(self.go_on(&**gateway, onward, req, started)).await;
                if let (Ok(rsp), Some(restored)) = (&mut sent, &restored) {
                    orig_proto::mark_response(rsp, restored)?;
                }
                return sent;
            }
        };
        let upgrade = req.body_mut().take_client();
        match (req.version() <= Version::HTTP_11, &upgrade) {
            (true, None) => headers::strip_hop_by_hop_and_folded(req.headers_mut()),
            (is_http1, _) => {
                headers::strip_folded(req.headers_mut());
                if is_http1 {
                    headers::strip_all_but_upgrade(req.headers_mut());
                }
            }
        }
        match &self.client_id {
            Some(id) => {
                req.headers_mut().insert(names::L5D_CLIENT_ID, id.clone());
            }
            None => {
                req.headers_mut().remove(names::L5D_CLIENT_ID);
            }
        }
        let counted = match self.authorize(req) {
            Ok(counted) => counted,
            Err(error) => {
                let drawn = self.inbound.taps.draw();
                if let Some(tapped) = drawn.and_then(|drawn| self.tap(&drawn, req, None, None)) {
                    tapped.failed(&error);
                }
                return Err(error);
            }
        };
        let mut passage = Passage::begin(counted, req, started);
        let profile = match self.profile(req) {
            Some((named, Naming::Told)) => named.routes().await,
            // Most services have no routes, and their requests nothing to be told apart by.
            Some((named, Naming::Addressed)) => named.routes().await.filter(|routes| !routes.is_empty()),
            None => None,
        };
        let routed = profile.map(|routes| {
            let head = Head::of(req.method(), req.uri(), req.headers());
            Box::new(routes.count(&head))
        });
        let drawn = self.inbound.taps.draw();
        let tapped = drawn.and_then(|drawn| self.tap(&drawn, req, Some(&passage.counted.handles), routed.as_deref()));
        let tracer = self.inbound.tracer.as_ref();
        let came = trace::came(tracer, req);
        let goes = trace::goes(tracer, req);
        let sent = self.send(app, req, upgrade, &passage.counted.handles).await;
        trace::ended(goes, &sent);
        trace::ended(came, &sent);
        let rsp = match sent {
            Ok(rsp) => match tapped {
                Some(tapped) => tapped.response(rsp),
                None => rsp,
            },
            Err(error) => {
                if let Some(mut routed) = routed {
                    routed.failed(&error);
                }
                if let Some(tapped) = tapped {
                    tapped.failed(&error);
                }
                passage.failed(&error);
                return Err(error);
            }
        };
        let rsp = match routed {
            Some(routed) => {
                passage.class = routed.class(rsp.status());
                routed.answered(rsp, started)
            }
            None => rsp,
        };
        let mut rsp = classify::observe(rsp, started, passage);
        if let Some(restored) = &restored {
            orig_proto::mark_response(&mut rsp, restored)?;
        }
        Ok(rsp)
    }

    /// Makes a request HTTP/1 again that was. Only proxies upgrade, and they say who they are: of others the mark means nothing.
    fn restore(&self, req: &mut Request<Body>) -> Result<Option<Restored>, Error> {
        if self.client_id.is_none() {
            if headers::get(req.headers(), &names::L5D_ORIG_PROTO).is_some() {
                req.headers_mut().remove(names::L5D_ORIG_PROTO);
            }
            return Ok(None);
        }
        let restored = orig_proto::restore(req)?;
        if restored.is_some() {
            headers::check_restored(req)?;
        }
        Ok(restored)
    }

    /// Sends a request on to a name of another network, if the client may.
    async fn go_on(
        &self,
        gateway: &dyn Gateway,
        onward: &Onward,
        req: &mut Request<Body>,
        started: Instant,
    ) -> Result<Response<Body>, Error> {
        let (own, client) = (&*self.inbound.name, self.tls.client_id().map_or("", |id| id.as_str()));
        req.headers_mut().remove(names::L5D_CLIENT_ID); // the next proxy says who we are
        let counted = self.authorize(req)?;
        gateway::check_loop(own, client, Some(req))?;
        gateway::mark(own, client, req);
        let mut passage = Passage::begin(counted, req, started);
        let span = trace::came(self.inbound.tracer.as_ref(), req);
        let sent = gateway.send(onward, req).await;
        trace::ended(span, &sent);
        match sent {
            Ok(rsp) => Ok(classify::observe(rsp, started, passage)),
            Err(error) => {
                passage.failed(&error);
                Err(error)
            }
        }
    }

    /// The profile that the client's proxy says it went by, in which strangers are not believed; else that of the name that the
    /// request is addressed to.
    fn profile(&self, req: &Request<Body>) -> Option<(Arc<Named>, Naming)> {
        let peer = self.client_id.as_ref();
        if let Some(name) = peer.and_then(|_| headers::get(req.headers(), &names::L5D_DST_CANONICAL)) {
            let named = self.inbound.profiles.named(name.as_bytes(), By::Peers);
            return named.map(|named| (named, Naming::Told));
        }
        let authority = match req.uri().authority() {
            Some(authority) => authority.as_str().as_bytes(),
            None => headers::get(req.headers(), &header::HOST)?.as_bytes(),
        };
        if authority.len() > LONGEST_AUTHORITY {
            return None;
        }
        let mut addressed = self.addressed.lock();
        if *addressed.authority != *authority {
            let by = if peer.is_some() { By::Peers } else { By::Strangers };
            let name = Authority::try_from(authority).ok().as_ref().and_then(name_of);
            *addressed = Addressed {
                named: name.and_then(|name| self.inbound.profiles.named(name.to_string().as_bytes(), by)),
                authority: authority.into(),
            };
        }
        let named = addressed.named.clone();
        named.map(|named| (named, Naming::Addressed))
    }

    /// Shows the request to those of whom it is the turn; `handles` are those of one that is permitted.
    #[cold]
    fn tap(
        &self,
        drawn: &Drawn,
        req: &Request<Body>,
        handles: Option<&Handles>,
        routed: Option<&Routed>,
    ) -> Option<Box<Tapped>> {
        let Peer { client, target } = self.peer;
        let current = self.port.current();
        let owned = |(key, value): (String, &str)| (key, value.to_owned());
        let mut labels = BTreeMap::from(pairs_of("srv", &current.policy.meta).map(owned));
        let mut route_labels = routed.map(Routed::told).unwrap_or_default();
        if let Some(handles) = handles {
            let route = pairs_of("route", &handles.meta).map(owned);
            route_labels.extend(route.clone());
            labels.extend(route);
            labels.extend(pairs_of("authz", &handles.authorization).map(owned));
        }
        let subject = Subject {
            source_labels: self.tls.told(),
            destination_labels: Cow::Owned(labels),
            destination_tls: ClientTls::Plain(WhyClientPlain::Loopback).told(),
            route_labels,
            ..Subject::of(req, ProxyDirection::Inbound, client.0, target)
        };
        self.inbound.taps.show(drawn, subject)
    }

    /// Finds the route, asks its authorizations, applies its filters and the rate limit.
    fn authorize(&self, req: &mut Request<Body>) -> Result<Counted, Error> {
        let current = self.port.current();
        let policy = &current.policy;
        let labels = || connection_labels(self.peer.target, &self.tls, &policy.meta);
        let Some(http) = policy.protocol.http() else {
            return Err(Error::InvalidPolicy("this port does not speak HTTP any more".into()));
        };
        let head = Head::of(req.method(), req.uri(), req.headers());
        let found = current.find(http, head)?.ok_or_else(|| {
            if current.is_unknown {
                return Error::PolicyUnknown;
            }
            self.inbound.families.no_route(&labels());
            Error::RouteNotFound
        })?;
        let permitted = authz::authorize(&found.rule.payload, self.peer.client.0.ip(), self.tls.proven());
        let authorization = permitted.map_err(|denied| {
            let labels = with_meta(labels(), "route", &found.route.meta);
            self.inbound.families.http_denied(&labels, denied);
            let (client, target) = (self.peer.client.0, self.peer.target);
            info_limited!(self.inbound.log, client.ip(), "request refused", %client, %target, %denied);
            Error::Unauthorized {
                rule: policy.meta.to_string(),
                why: denied.name(),
            }
        })?;
        if authorization.meta.is_audit() {
            tracing::info!(client = %self.peer.client.0, target = %self.peer.target, "request audited");
        }
        let handles = self.handles(&current, found.route, authorization);
        let named = self.named(&handles, req);
        let counted = Counted { handles, named };
        counted.handles.allowed.inc();
        counted.series().request();
        let refused = |error: Error| {
            counted.series().response(classify::failed(&error));
            error
        };
        if !found.rule.filters.is_empty() {
            let (filters, prefix) = (&found.rule.filters, found.prefix);
            filters::apply(filters, req, prefix).map_err(refused)?;
        }
        if let (Some(limiter), Some(limit)) = (&current.limiter, &http.rate_limit)
            && let Err(which) = limiter.check(self.tls.client_id(), Instant::now())
        {
            self.inbound.families.over_limit(labels(), &limit.meta, which);
            let limit = limit.meta.to_string();
            return Err(refused(Error::RateLimited { limit }));
        }
        Ok(counted)
    }

    /// The series for requests that this authorization permits on this route.
    fn handles<T>(
        &self,
        current: &Arc<Current>,
        route: &route::Route<T>,
        authorization: &Authorization,
    ) -> Arc<Handles> {
        // The addresses identify route and authorization for as long as `current`, which owns them, is held.
        let (at_route, at_authorization) = (
            std::ptr::from_ref(route).addr(),
            std::ptr::from_ref(authorization).addr(),
        );
        let mut seen = self.seen.lock();
        let known = seen
            .iter()
            .find(|(of, r, a, _)| Arc::ptr_eq(of, current) && *r == at_route && *a == at_authorization);
        if let Some((.., handles)) = known {
            return handles.clone();
        }
        seen.retain(|(of, .., handles)| Arc::ptr_eq(of, current) || Arc::strong_count(handles) > 1);
        let labels = connection_labels(self.peer.target, &self.tls, &current.policy.meta);
        let labels = with_meta(labels, "route", &route.meta);
        let labels: Labels = with_meta(labels, "authz", &authorization.meta);
        let families = &self.inbound.families;
        let kind = match &current.policy.protocol {
            ServerProtocol::Grpc(_) => Kind::Grpc,
            _ => Kind::Http,
        };
        let handles = Arc::new(Handles {
            meta: route.meta.clone(),
            authorization: authorization.meta.clone(),
            allowed: families.http_allow.get(&labels),
            series: families.http.series(labels),
            route: families.route(kind, &current.policy.meta, self.peer.target.port(), &route.meta),
            last: Mutex::default(),
        });
        seen.push((current.clone(), at_route, at_authorization, handles.clone()));
        handles
    }

    /// The series for the authority of a request, where requests are counted by it.
    fn named(&self, handles: &Handles, req: &Request<Body>) -> Option<Arc<Series>> {
        let authorities = self.inbound.authorities.as_ref()?;
        let said_by = match self.client_id {
            Some(_) => SaidBy::Known,
            None => SaidBy::Stranger,
        };
        let authority = authorities.get(&self.authority(req)?, said_by, |name| name.into())?;
        let mut last = handles.last.lock();
        if let Some((of, series)) = &*last
            && Arc::ptr_eq(of, &authority)
        {
            return Some(series.clone());
        }
        let series = handles.series.with("authority", &authority);
        *last = Some((authority, series.clone()));
        Some(series)
    }

    /// The name that a request is for, with its port unless that is 80: the one that the client's proxy says, or that of
    /// the request itself.
    fn authority(&self, req: &Request<Body>) -> Option<String> {
        let meshed = self.client_id.as_ref();
        let canonical = || req.headers().get(names::L5D_DST_CANONICAL)?.to_str().ok()?.parse().ok();
        let told = || headers::authority(req).and_then(|authority| name_of(&authority));
        let NameAddr { name, port } = meshed.and_then(|_| canonical()).or_else(told)?;
        let name = name.trim_end_matches('.');
        Some(match port {
            80 => name.to_owned(),
            _ => format!("{name}:{port}"),
        })
    }

    /// Waits until the client has something under way that the policy does not permit any more.
    pub(super) async fn refused(self: Arc<Self>) {
        loop {
            let current = self.port.current();
            if let Some(closer) = &self.unauthorized
                && current
                    .policy
                    .permits_some_request(self.peer.client.0.ip(), self.tls.proven())
            {
                closer.notify_one();
            }
            if let Some(denied) = self.denied(&current.policy) {
                let labels = connection_labels(self.peer.target, &self.tls, &current.policy.meta);
                self.inbound.families.tcp_terminated(&labels, denied);
                return tracing::info!(client = %self.peer.client.0, %denied, "requests ended by a changed policy");
            }
            self.port.changed_from(&current).await;
        }
    }

    /// Why a policy does not permit something of what is under way: by the route of the same name, or by the server's
    /// authorizations where there is none any more.
    fn denied(&self, policy: &ServerPolicy) -> Option<Denied> {
        let (client, tls) = (self.peer.client.0.ip(), self.tls.proven());
        let permit = |authorizations: &[Authorization]| authz::authorize(authorizations, client, tls).map(drop);
        let routes = || policy.protocol.http().into_iter().flat_map(|http| http.routes.iter());
        let seen = self.seen.lock();
        let under_way = seen.iter().map(|(.., handles)| handles);
        under_way
            .filter(|handles| Arc::strong_count(handles) > 1)
            .find_map(|handles| {
                let same = routes().filter(|route| route.meta == handles.meta);
                let rules = same.flat_map(|route| &route.rules).map(|rule| permit(&rule.payload));
                let permitted = rules.reduce(Result::or);
                permitted.unwrap_or_else(|| permit(&policy.authorizations)).err()
            })
    }

    /// Sends the request to the application; a pooled connection that turns out to be closed is replaced once, where
    /// that is safe.
    async fn send(
        self: &Arc<Self>,
        app: &Client,
        req: &mut Request<Body>,
        upgrade: Option<oneshot::Receiver<Leg>>,
        handles: &Arc<Handles>,
    ) -> Result<Response<Body>, Error> {
        let protocol = if req.version() == Version::HTTP_2 {
            Protocol::Http2
        } else {
            Protocol::Http1
        };
        let reuse = match (protocol, &upgrade) {
            (Protocol::Http2, Some(_)) => Reuse::OwnStream,
            (Protocol::Http1, Some(_)) => Reuse::OwnConnection,
            (_, None) if req.version() == Version::HTTP_10 => Reuse::OwnConnection,
            (_, None) => Reuse::Pooled,
        };
        // The client of HTTP/1 knows by itself what it may send once more.
        let copy = (protocol == Protocol::Http2 && upgrade.is_none()).then(|| Copy::of(req, replay::LIMIT));
        let ready = app.ready(protocol, reuse).await.map_err(unreachable_app)?;
        let mut rsp = match app.send(ready, req).await {
            Err(error) => match copy {
                Some(copy) => Box::pin(send_again(app, copy, error)).await?,
                None => return Err(unreachable_app(error)),
            },
            Ok(rsp) => rsp,
        };
        match (upgrade, rsp.body_mut().take_upgraded()) {
            (Some(client), Some(upstream)) => {
                let (connection, handles) = (self.clone(), handles.clone());
                let refused = async move {
                    match connection.protocol {
                        Protocol::Http1 => connection.refused().await,
                        // Its stream ends with the client's connection, which is cut for it.
                        Protocol::Http2 => std::future::pending().await,
                    }
                    drop(handles); // under way until then
                };
                tunnel::spawn(client, upstream, &self.drain, refused);
                headers::strip_all_but_upgrade(rsp.headers_mut());
                headers::strip_forged(rsp.headers_mut());
            }
            (None, Some(_)) => return Err(Error::BadResponse("it switched protocols unasked")),
            (_, None) => headers::strip_hop_by_hop_and_forged(rsp.headers_mut()),
        }
        Ok(rsp)
    }
}

impl Labelled for HttpConnection {
    fn labels(&self, error: &Error) -> Option<Labels> {
        let has_its_own = match error {
            Error::Unauthorized { .. } => true,
            Error::RouteNotFound => matches!(self.to, To::App(_)),
            _ => false,
        };
        let target = self.peer.target;
        let labels = || with_server(target_labels(target), &self.port.current().policy.meta, target.port());
        (!has_its_own).then(labels)
    }
}

/// The name in an authority; none if it is an address.
fn name_of(authority: &Authority) -> Option<NameAddr> {
    let port = authority.port_u16().unwrap_or(80);
    match format!("{}:{port}", authority.host()).parse() {
        Ok(Addr::Name(name)) => Some(name),
        Ok(Addr::Socket(_)) | Err(_) => None,
    }
}

/// Sends a request of HTTP/2 once more, on a connection that may be another one, as long as what became of it permits that.
///
/// # Errors
/// It may have been processed, its body is too long to be kept, or it was tried often enough.
async fn send_again(app: &Client, mut copy: Copy, mut error: Error) -> Result<Response<Body>, Error> {
    for _ in 1..MAX_SENDS {
        let may_send = match error.retry() {
            Retry::NeverSent => true,
            Retry::IfIdempotent => app.resend().permits(copy.method()),
            Retry::No => false,
        };
        if !may_send {
            break;
        }
        let Some(mut req) = copy.request() else {
            return Err(Error::TooLargeToRetry(Box::new(error)));
        };
        copy = Copy::of(&mut req, replay::LIMIT);
        let ready = app.ready(Protocol::Http2, Reuse::Pooled).await;
        error = match app.send(ready.map_err(unreachable_app)?, &mut req).await {
            Ok(rsp) => return Ok(rsp),
            Err(error) => error,
        };
    }
    Err(unreachable_app(error))
}

/// How often a request of HTTP/2 is sent to the application at most.
const MAX_SENDS: usize = 3;

/// An application that cannot be dialled is a bad gateway, whatever the reason: the peer may try another endpoint.
fn unreachable_app(error: Error) -> Error {
    match error {
        Error::ConnectTimeout(source) => Error::Connect(source),
        other => other,
    }
}

/// The client for the application at one address.
pub(super) fn client(inbound: &Arc<Inbound>, app: App) -> Client {
    let App { target, client } = app;
    let (connect, counts) = (inbound.connect, inbound.app_counts(target));
    let open = move |_: Protocol| -> Pin<Box<dyn Future<Output = _> + Send>> {
        let counts = counts.clone();
        Box::pin(async move {
            let stream = crate::net::connect::dial_as(client, target, &connect)
                .await
                .map_err(Error::connect)?;
            Ok(Io::tcp(Tcp::new(stream)).count(counts))
        })
    };
    Client::new(target, Box::new(open), inbound.http2_client, inbound.pool)
}
