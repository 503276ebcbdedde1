//! Sending a request: pick an endpoint, connect, send; once more to another one where nothing was processed (O7–O11).

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use std::{borrow::Cow, future::poll_fn, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{sync::oneshot, time::Instant};
use tulle_core::{drain, metrics::Labels, names::header as names};
use tulle_proto::tap::tap_event::ProxyDirection;

use crate::{
    balance::{balancer::Candidate, breaker, load::Pending},
    http::{
        body::Body,
        classify::{self, Ended},
        client::{Protocol, Reuse},
        error::{Error, Late, Retry, Side, grpc},
        headers,
        limits::Limits,
        orig_proto,
        replay::{self, Copy},
        tunnel::{self, Leg},
        upload::Upload,
        websocket,
    },
    metrics::http::{End, Outcome, Series},
    outbound::{
        backend::Backend,
        endpoint::Endpoint,
        http::{By, Last},
        metrics::{BackendSeries, Families, RouteSeries},
        reach::{MAX_TRIES, Tried},
    },
    tap::{Drawn, Subject, Tapped},
    tls::status::{ServerTls, WhyServerPlain},
    trace,
};

/// What a request needs besides itself.
pub(super) struct Dispatch<'a> {
    pub(super) worker: usize,
    /// The application's end of its connection.
    pub(super) client: SocketAddr,
    pub(super) by: By<'a>,
    pub(super) backend: &'a Backend,
    /// The identity that the application demands of the endpoint.
    pub(super) required: Option<&'a str>,
    pub(super) families: &'a Families,
    pub(super) drain: &'a drain::Watch,
    /// When the attempt began.
    pub(super) started: Instant,
    /// Endpoints that earlier tries were sent to.
    pub(super) n_tried_before: usize,
    /// The request as it is to be sent again, where somebody has a copy that stays good.
    pub(super) kept: Option<&'a Copy>,
}

/// One attempt at a request, as its route counts it.
pub(super) struct Counted {
    upload: Upload,
    backend: Arc<BackendSeries>,
    /// The route's series for the request's host, where hosts are told apart.
    named: Option<Arc<RouteSeries>>,
    last: Last,
    began_at: Instant,
    is_over: bool,
}

impl Counted {
    /// Counts an attempt that begins at `began_at`.
    pub(super) fn begin(
        upload: Upload,
        backend: Arc<BackendSeries>,
        named: Option<Arc<RouteSeries>>,
        last: Last,
        began_at: Instant,
    ) -> Self {
        backend.request();
        Self {
            upload,
            backend,
            named,
            last,
            began_at,
            is_over: false,
        }
    }

    /// When the request of this attempt was over, or is: a further one has nothing left to wait for.
    fn sent_at(&self) -> Instant {
        self.upload.ended().max(self.began_at)
    }

    /// The attempt brought no response.
    pub(super) fn failed(&mut self, error: &Error) {
        self.is_over = true;
        self.backend
            .ended(self.sent_at(), Instant::now(), &classify::failed(error));
    }

    fn ended(&mut self, now: Instant, outcome: &Outcome) {
        self.is_over = true;
        self.backend.ended(self.sent_at(), now, outcome);
        if self.last == Last::Certainly {
            let route = self.named.as_ref().unwrap_or(&self.backend.route);
            route.ended(self.upload.started(), now, outcome);
        }
    }
}

/// The client has left.
impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_over {
            self.failed(&Error::Left);
        }
    }
}

/// What a request needs of a connection.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    version: Version,
    /// HTTP/2 cannot stand for it: it asks for an upgrade, or names no host.
    as_it_is: bool,
    reuse: Reuse,
}

/// What a request is on its way to one endpoint.
struct Flight {
    /// At the endpoint, until the first data of the response.
    pending: Pending<Endpoint>,
    /// How long it asks to be left alone.
    retry_after: Option<Duration>,
    counted: Option<Counted>,
    /// Whether the request has been nowhere else, and waited for nobody else.
    is_only: bool,
    is_over: bool,
}

impl Dispatch<'_> {
    /// Sends what is in `req` to an endpoint of the backend and returns its response; all that it was sent to are then among
    /// `tried`, and its end is told to what is in `counted`.
    ///
    /// # Errors
    /// No endpoint is available, the last one that was tried failed, or it took longer than `limits` let it.
    pub(super) async fn run(
        &self,
        req: &mut Request<Body>,
        upgrade: &mut Option<oneshot::Receiver<Leg>>,
        tried: &mut Tried,
        mut limits: Option<&mut Limits>,
        counted: &mut Option<Counted>,
    ) -> Result<Response<Body>, Error> {
        let needs = Needs::of(req, upgrade.is_some());
        let needs_copy = upgrade.is_none() && self.kept.is_none();
        let mut own = needs_copy.then(|| Copy::of(req, replay::LIMIT));
        loop {
            let copy = own.as_ref().or(self.kept);
            let mut at_once = tried.is_empty();
            let (endpoint, ready) = {
                let mut reached = pin!(self.reach(tried, needs));
                let reached = poll_fn(|cx| {
                    let polled = Limits::poll_head(&mut limits, reached.as_mut().poll(cx), cx);
                    at_once &= polled.is_ready();
                    polled
                });
                reached.await?
            };
            let version = req.version();
            let protocol = needs.protocol(&endpoint);
            prepare(req, &endpoint, protocol)?;
            // What others took of its time is not the endpoint's.
            let started = if at_once { self.started } else { Instant::now() };
            let mut flight = Flight::start(&endpoint, started, at_once);
            let drawn = endpoint.taps.draw();
            let tapped = drawn.and_then(|drawn| self.tap(&drawn, req, &endpoint));
            let span = trace::goes(endpoint.tracer.as_ref(), req);
            let sent = {
                let mut sent = pin!(endpoint.client(self.worker).send(ready, req));
                poll_fn(|cx| Limits::poll_head(&mut limits, sent.as_mut().poll(cx), cx)).await
            };
            trace::ended(span, &sent);
            let sent = match tapped {
                None => sent,
                Some(tapped) => match sent {
                    Ok(rsp) => Ok(tapped.response(rsp)),
                    Err(error) => {
                        tapped.failed(&error);
                        Err(error)
                    }
                },
            };
            let cause = match &sent {
                // Only who has an identity has a proxy that could know.
                Ok(rsp) if endpoint.identity().is_some() && self.may_try_another(tried.len()) => {
                    let unanswered = unanswered(rsp);
                    unanswered.and_then(|(cause, retry)| self.permits(retry, &endpoint, copy).then_some(cause))
                }
                Err(error) if self.resendable(error, &endpoint, copy, tried.len()) => Some(error.cause()),
                _ => None,
            };
            // A request of which no copy is left ends with what has become of it.
            let again = cause.and_then(|cause| Some((cause, copy?.request()?)));
            let sent = match sent {
                Err(error) if cause.is_some() && again.is_none() => Err(Error::TooLargeToRetry(Box::new(error))),
                sent => sent,
            };
            match (again, sent) {
                (None, Ok(mut rsp)) => {
                    flight.judge(&rsp);
                    // Of several endpoints, one says nothing of a connection to all of them.
                    let may_end = endpoint.identity().is_some() && matches!(self.backend, Backend::Forward(_));
                    finish(&mut rsp, protocol, version, may_end);
                    let upgraded = rsp.body_mut().take_upgraded();
                    if upgraded.is_some() && upgrade.is_none() {
                        let error = Error::BadResponse("it switched protocols unasked");
                        flight.failed(&error);
                        return Err(error);
                    }
                    if endpoint.identity().is_none() {
                        headers::strip_forged(rsp.headers_mut());
                    }
                    flight.counted = counted.take();
                    let rsp = classify::observe(rsp, started, flight);
                    tried.push(endpoint);
                    if let (Some(client), Some(upstream)) = (upgrade.take(), upgraded) {
                        tunnel::spawn(client, upstream, self.drain, std::future::pending());
                    }
                    return Ok(rsp);
                }
                (None, Err(error)) => {
                    flight.failed(&error);
                    tried.push(endpoint);
                    return Err(error);
                }
                (Some((cause, again)), sent) => {
                    self.count_resent(cause);
                    match sent {
                        Err(error) => flight.failed(&error),
                        Ok(rsp) => {
                            // Its end tells what the endpoint made of the request.
                            flight.judge(&rsp);
                            let rsp = classify::observe(rsp, started, flight);
                            rsp.into_body().end_with(Ok(()));
                        }
                    }
                    *req = again;
                    own = needs_copy.then(|| Copy::of(req, replay::LIMIT));
                }
            }
            tried.push(endpoint);
        }
    }

    /// Shows an attempt to those of whom it is the turn.
    #[cold]
    fn tap(&self, drawn: &Drawn, req: &Request<Body>, endpoint: &Endpoint) -> Option<Box<Tapped>> {
        let subject = Subject {
            source_labels: ServerTls::Plain(WhyServerPlain::Loopback).told(),
            destination_labels: Cow::Borrowed(&endpoint.spec.labels),
            destination_tls: endpoint.tls.told(),
            route_labels: self.by.told(req),
            ..Subject::of(req, ProxyDirection::Outbound, self.client, endpoint.spec.addr)
        };
        endpoint.taps.show(drawn, subject)
    }

    pub(super) fn may_try_another(&self, n_tried: usize) -> bool {
        self.has_tries_left(n_tried) && !matches!(self.backend, Backend::Forward(_))
    }

    fn has_tries_left(&self, n_tried: usize) -> bool {
        n_tried + 1 < self.n_tried_before + MAX_TRIES
    }

    fn resendable(&self, error: &Error, endpoint: &Endpoint, copy: Option<&Copy>, n_tried: usize) -> bool {
        // A new connection to the same endpoint may do.
        let may_try = match error.is_unprocessed() {
            true => self.has_tries_left(n_tried),
            false => self.may_try_another(n_tried),
        };
        may_try && copy.is_some() && self.permits(error.retry(), endpoint, copy)
    }

    fn permits(&self, retry: Retry, endpoint: &Endpoint, copy: Option<&Copy>) -> bool {
        match retry {
            Retry::No => false,
            Retry::NeverSent => true,
            Retry::IfIdempotent => {
                let resend = endpoint.client(self.worker).resend();
                copy.is_some_and(|copy| resend.permits(copy.method()))
            }
        }
    }

    pub(super) fn count_resent(&self, cause: &str) {
        self.families.retries.get(&Labels::new().with("cause", cause)).inc();
    }
}

impl Needs {
    fn of(req: &Request<Body>, upgrade: bool) -> Self {
        let version = req.version();
        // Without a host, a server may take the whole connection to be for one site.
        let anonymous = req.uri().authority().is_none() && headers::get(req.headers(), &header::HOST).is_none();
        let is_http1 = version <= Version::HTTP_11;
        Self {
            version,
            as_it_is: (upgrade || anonymous) && is_http1,
            reuse: match upgrade {
                true if !is_http1 || (!anonymous && websocket::can_be_carried(req)) => Reuse::OwnStream,
                false if version != Version::HTTP_10 && !anonymous => Reuse::Pooled,
                _ => Reuse::OwnConnection,
            },
        }
    }

    /// What of a connection to this endpoint is the request's own.
    pub(super) fn reuse(&self, endpoint: &Endpoint) -> Reuse {
        match self.reuse {
            // Nobody else makes HTTP/1 of it again.
            Reuse::OwnStream if self.as_it_is && !endpoint.restores_http1() => Reuse::OwnConnection,
            reuse => reuse,
        }
    }

    /// The version in which the request travels to this endpoint.
    pub(super) fn protocol(&self, endpoint: &Endpoint) -> Protocol {
        endpoint.protocol(self.version, self.as_it_is)
    }
}

/// Gives the request the form in which it travels.
fn prepare(req: &mut Request<Body>, endpoint: &Endpoint, protocol: Protocol) -> Result<(), Error> {
    if let Some(authority) = &endpoint.spec.authority_override {
        req.headers_mut().remove(header::HOST);
        req.headers_mut().remove(names::L5D_DST_CANONICAL);
        let mut parts = std::mem::take(req.uri_mut()).into_parts();
        parts.scheme = parts.scheme.or(Some(http::uri::Scheme::HTTP));
        parts.authority = Some(authority.clone());
        parts.path_and_query = parts
            .path_and_query
            .or_else(|| Some(http::uri::PathAndQuery::from_static("/")));
        *req.uri_mut() = Uri::from_parts(parts).map_err(|_| Error::BadRequest("its target"))?;
        if protocol == Protocol::Http1 {
            orig_proto::make_origin(req);
        }
    }
    if protocol == Protocol::Http2 && req.version() != Version::HTTP_2 {
        return orig_proto::upgrade(req);
    }
    Ok(())
}

/// Takes out of a response what only proxies should see.
///
/// `may_end` says whether it may ask for the end of the application's connection: that is for a proxy to say which stands for
/// all that is behind it.
fn finish(rsp: &mut Response<Body>, protocol: Protocol, asked: Version, may_end: bool) {
    let upgraded = asked != Version::HTTP_2 && protocol == Protocol::Http2;
    if upgraded {
        orig_proto::downgrade(rsp);
    } else if protocol == Protocol::Http1 {
        match rsp.status() {
            StatusCode::SWITCHING_PROTOCOLS => headers::strip_all_but_upgrade(rsp.headers_mut()),
            _ => headers::strip_hop_by_hop(rsp.headers_mut()),
        }
    }
    let words = headers::strip_proxy_headers(rsp.headers_mut());
    if let Some(error) = words.error {
        tracing::debug!(status = %rsp.status(), ?error, "peer's proxy answered");
    }
    if words.close && may_end && asked <= Version::HTTP_11 && !upgraded {
        rsp.headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Why the peer's proxy has no response of its application, if it says that another endpoint may have one: ours by a code,
/// Linkerd's, which has none, in the words of its HTTP/1 client.
fn unanswered<B>(rsp: &Response<B>) -> Option<(&'static str, Retry)> {
    let headers = rsp.headers();
    // Such an answer reaches gRPC clients as a status inside a 200.
    let by_status = match (rsp.status(), classify::grpc_status(headers)) {
        (StatusCode::BAD_GATEWAY, _) | (_, Some(grpc::UNAVAILABLE)) => "connect-refused",
        (StatusCode::GATEWAY_TIMEOUT, _) | (_, Some(grpc::DEADLINE_EXCEEDED)) => "connect-timeout",
        _ => return None,
    };
    // A code alone has come through an application: what passes it on removes the message.
    let error = headers.get(names::L5D_PROXY_ERROR)?;
    let code = headers
        .get(names::L5D_PROXY_CAUSE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let known = [
        ("connect-refused", "connect-refused", Retry::NeverSent),
        ("connect-timeout", "connect-timeout", Retry::NeverSent),
        ("connection-closed; then=", "connection-closed", Retry::IfIdempotent),
    ];
    let by_code = known.iter().find(|(begins, ..)| code.starts_with(begins.as_bytes()));
    match by_code {
        Some((_, cause, retry)) => Some((cause, *retry)),
        None => (error == "client error (Connect)").then_some((by_status, Retry::NeverSent)),
    }
}

impl Flight {
    fn start(endpoint: &Arc<Endpoint>, started: Instant, is_only: bool) -> Self {
        endpoint.series.request();
        Self {
            pending: Pending::new(endpoint.clone(), started),
            retry_after: None,
            counted: None,
            is_only,
            is_over: false,
        }
    }

    /// A failure counts as slow, where the policy says so, however fast it came.
    fn judge(&mut self, rsp: &Response<Body>) {
        let status = rsp.status();
        let code = classify::grpc_status(rsp.headers());
        let overloaded = status == StatusCode::TOO_MANY_REQUESTS || code == Some(grpc::RESOURCE_EXHAUSTED);
        let away = overloaded || status == StatusCode::SERVICE_UNAVAILABLE || code == Some(grpc::UNAVAILABLE);
        if away {
            self.retry_after = headers::retry_after(rsp.headers());
        }
        if overloaded || (code != Some(grpc::PERMISSION_DENIED) && !classify::is_success(status, code)) {
            self.pending.failed(self.retry_after, Instant::now());
        }
    }

    /// The attempt brought no response.
    fn failed(mut self, error: &Error) {
        self.is_over = true;
        let endpoint = self.pending.endpoint().clone();
        endpoint.series.response(classify::failed(error));
        let error = match error {
            Error::TooLargeToRetry(error) => &**error,
            error => error,
        };
        let is_its_fault = match error {
            // A pooled connection that turned out to be closed says nothing against its endpoint.
            Error::Closed { reused: true, .. } => false,
            // Nor does one that is over when it has become old.
            error if error.is_graceful_end() => false,
            // Others may have used up what the whole may take.
            Error::Late(Late::Request(_) | Late::Profile(_)) => self.is_only,
            error => error.side() == Side::Peer && !error.is_of_request_body(),
        };
        if !is_its_fault {
            return;
        }
        let now = Instant::now();
        self.pending.failed(None, now);
        endpoint.breaker().record(breaker::Outcome::Failure, None, now);
    }
}

impl Ended for Flight {
    fn series(&self) -> Option<&Series> {
        Some(&self.pending.endpoint().series)
    }

    fn first_data(&mut self, now: Instant) {
        self.pending.answered(now);
    }

    fn data(&mut self, len: usize) {
        if let Some(counted) = &self.counted {
            counted.backend.frame(len);
        }
    }

    fn ended(&mut self, outcome: Outcome, now: Instant) {
        self.is_over = true;
        if let Some(counted) = &mut self.counted {
            counted.ended(now, &outcome);
        }
        let overloaded =
            outcome.status == StatusCode::TOO_MANY_REQUESTS || outcome.grpc == Some(grpc::RESOURCE_EXHAUSTED);
        let verdict = match outcome {
            _ if overloaded => breaker::Outcome::Overloaded,
            Outcome { success: true, .. } => breaker::Outcome::Success,
            Outcome {
                end: End::Abandoned,
                status,
                grpc,
                ..
            } if classify::is_success(status, grpc) => return,
            _ => breaker::Outcome::Failure,
        };
        self.pending.endpoint().breaker().record(verdict, self.retry_after, now);
    }
}

/// The client has left.
impl Drop for Flight {
    fn drop(&mut self) {
        if !self.is_over {
            self.pending.endpoint().series.response(classify::failed(&Error::Left));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_closes_where_a_proxy_says_so() {
        for (protocol, version, may_end, closes) in [
            (Protocol::Http1, Version::HTTP_11, true, true),
            (Protocol::Http2, Version::HTTP_2, true, false), // which has other means
            (Protocol::Http2, Version::HTTP_11, true, false), // its connection is another's too
            (Protocol::Http1, Version::HTTP_11, false, false),
        ] {
            let rsp = Response::builder().header("l5d-proxy-connection", "close");
            let mut rsp = rsp.body(Body::empty()).unwrap();
            finish(&mut rsp, protocol, version, may_end);
            assert_eq!(
                rsp.headers().contains_key("connection"),
                closes,
                "{protocol:?} {version:?}"
            );
            assert!(!rsp.headers().contains_key("l5d-proxy-connection"));
        }
    }

    #[test]
    fn proxies_without_a_response_of_their_application_are_understood() {
        let answer = |status: u16, headers: &[(&str, &str)]| {
            let mut rsp = Response::builder().status(status);
            for (name, value) in headers {
                rsp = rsp.header(*name, *value);
            }
            unanswered(&rsp.body(()).unwrap())
        };
        let (grpc, unavailable) = (("content-type", "application/grpc"), ("grpc-status", "14"));
        let (code, error) = ("l5d-proxy-cause", ("l5d-proxy-error", "refused"));
        let linkerd = ("l5d-proxy-error", "client error (Connect)");
        let refused = Some(("connect-refused", Retry::NeverSent));
        let timed_out = Some(("connect-timeout", Retry::NeverSent));
        let gone = Some(("connection-closed", Retry::IfIdempotent));
        for (status, headers, expected) in [
            (502, vec![error, (code, "connect-refused")], refused),
            (504, vec![error, (code, "connect-timeout")], timed_out),
            (200, vec![grpc, unavailable, error, (code, "connect-refused")], refused),
            (502, vec![error, (code, "connect-timeout")], timed_out),
            (502, vec![linkerd], refused),
            (504, vec![linkerd], timed_out),
            (
                502,
                vec![("l5d-proxy-error", "endpoint 10.0.0.1:80: client error (Connect)")],
                None,
            ),
            (502, vec![("l5d-proxy-error", "client error (SendRequest)")], None),
            (504, vec![("l5d-proxy-error", "HTTP response timeout after 1s")], None),
            (502, vec![(code, "connect-refused")], None),
            (502, vec![error, (code, "connection-closed; direction=inbound")], None),
            (
                502,
                vec![error, (code, "connection-closed; then=connect-refused")],
                gone,
            ),
            (502, vec![], None),
            (200, vec![error, (code, "connect-refused")], None),
        ] {
            assert_eq!(answer(status, &headers), expected, "{status} {headers:?}");
        }
    }
}
