//! Sends a request: picks an endpoint, connects, sends. Resends it to another endpoint if it was not processed (O7–O11).

use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use std::{borrow::Cow, future::poll_fn, pin::pin, sync::Arc, time::Duration};
use tokio::time::Instant;
use tulle_core::names::header as names;
use tulle_proto::tap::tap_event::ProxyDirection;

use crate::{
    balance::{
        breaker,
        candidate::{Candidate, InFlightGuard},
    },
    http::{
        body::Body,
        client::Protocol,
        error::{Error, Retry, Side, TimeoutKind, grpc},
        headers,
        lifecycle::classify::{self, ResponseObserver},
        lifecycle::deadlines::AttemptDeadlines,
        lifecycle::replay::{self, ReplayableRequest},
        upgrade::http1_over_http2,
        upgrade::tunnel,
    },
    metrics::http::{ResponseEnd, ResponseOutcome, Series},
    outbound::{
        backend::Backend,
        endpoint::Endpoint,
        request::{
            connect::{ConnectionRequirements, RequestConnector, TriedEndpoints},
            context::{OutgoingRequest, RequestContext},
            observe::{RouteAttemptGuard, RouteSource},
        },
    },
    tap::{RequestInfo, SampledObservers, TappedRequest},
    tls::status::{NoServerTls, ServerTls},
    trace,
};

/// Context of one attempt at a request.
pub(super) struct Dispatch<'a> {
    pub(super) context: RequestContext<'a>,
    pub(super) connector: RequestConnector<'a>,
    pub(super) route_source: RouteSource<'a>,
    pub(super) started_at: Instant,
    /// The caller's copy of the request, if it can be sent without changes.
    pub(super) caller_copy: Option<&'a ReplayableRequest>,
}

/// One attempt at one endpoint. Records its result in the endpoint's metrics, load and breaker.
struct EndpointAttempt {
    /// Counts the request as in flight until the first data of the response.
    in_flight: InFlightGuard<Endpoint>,
    retry_after: Option<Duration>,
    route_attempt: Option<RouteAttemptGuard>,
    /// Whether the request was sent to this endpoint first and without waiting. Only then is an expired request timeout the
    /// endpoint's fault.
    is_undelayed: bool,
    is_recorded: bool,
}

/// An exchange with one endpoint.
struct Exchange {
    endpoint: Arc<Endpoint>,
    attempt: EndpointAttempt,
    started: Instant,
    /// The protocol of the endpoint's connection.
    protocol: Protocol,
    /// The version of the client's request.
    version: Version,
}

impl Dispatch<'_> {
    /// Sends a request to an endpoint of the backend and returns the response.
    ///
    /// Endpoints that the request was sent to are added to `tried`. `route_attempt` records the result.
    ///
    /// # Errors
    /// No endpoint is available, the last endpoint failed, or a timeout in `limits` expired.
    pub(super) async fn run(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        limits: Option<&mut AttemptDeadlines>,
        route_attempt: Option<RouteAttemptGuard>,
    ) -> Result<Response<Body>, Error> {
        match self.send_until_final(outgoing, tried, limits).await {
            Ok((rsp, mut exchange)) => {
                exchange.attempt.route_attempt = route_attempt;
                Ok(classify::observe(rsp, exchange.started, exchange.attempt))
            }
            Err(error) => {
                if let Some(mut route_attempt) = route_attempt {
                    route_attempt.record_error(&error);
                }
                Err(error)
            }
        }
    }

    /// Sends a request to endpoints in turn, until one processes it or it may not be sent again.
    async fn send_until_final(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        mut limits: Option<&mut AttemptDeadlines>,
    ) -> Result<(Response<Body>, Exchange), Error> {
        let needs = ConnectionRequirements::of_request(outgoing.req, outgoing.upgrade.is_some());
        let needs_copy = outgoing.upgrade.is_none() && self.caller_copy.is_none();
        let copied = |req: &mut Request<Body>| ReplayableRequest::of_request(req, replay::DEFAULT_MAX_REPLAY_BYTES);
        let mut own_copy = needs_copy.then(|| copied(outgoing.req));
        loop {
            let (exchange, sent) = self.send_once(outgoing.req, tried, needs, &mut limits).await?;
            let endpoint = exchange.endpoint.clone();
            let copy = own_copy.as_ref().or(self.caller_copy);
            let cause = self.resend_cause(&sent, &endpoint, copy, tried.len());
            // Without a copy of the request, the client gets this result.
            let resend = cause.and_then(|cause| Some((cause, copy?.to_request()?)));
            let Some((cause, req)) = resend else {
                let sent = match sent {
                    Err(error) if cause.is_some() => Err(Error::TooLargeToRetry(Box::new(error))),
                    sent => sent,
                };
                tried.push(endpoint);
                return self.finish(outgoing, exchange, sent);
            };
            self.connector.count_resend(cause);
            exchange.discard(sent);
            *outgoing.req = req;
            own_copy = needs_copy.then(|| copied(outgoing.req));
            tried.push(endpoint);
        }
    }

    /// Connects to an endpoint and sends the request to it. The inner result is that of the endpoint.
    async fn send_once(
        &self,
        req: &mut Request<Body>,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
        limits: &mut Option<&mut AttemptDeadlines>,
    ) -> Result<(Exchange, Result<Response<Body>, Error>), Error> {
        let mut is_undelayed = tried.is_empty();
        let (endpoint, ready) = {
            let mut connected = pin!(self.connector.connect_endpoint(tried, needs));
            let connected = poll_fn(|cx| {
                let polled = AttemptDeadlines::poll_head(limits, connected.as_mut().poll(cx), cx);
                is_undelayed &= polled.is_ready();
                polled
            });
            connected.await?
        };
        let version = req.version();
        let protocol = needs.protocol(&endpoint);
        prepare_request(req, &endpoint, protocol)?;
        // Time spent on other endpoints is not part of this endpoint's latency.
        let started = if is_undelayed { self.started_at } else { Instant::now() };
        let attempt = EndpointAttempt::start(&endpoint, started, is_undelayed);
        let sampled = endpoint.taps.sample();
        let tapped = sampled.and_then(|sampled| self.start_tap(&sampled, req, &endpoint));
        let span = trace::start_outbound(endpoint.tracer.as_ref(), req);
        let sent = {
            let mut sent = pin!(endpoint.client(self.context.worker).send(ready, req));
            poll_fn(|cx| AttemptDeadlines::poll_head(limits, sent.as_mut().poll(cx), cx)).await
        };
        trace::finish(span, &sent);
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
        let exchange = Exchange {
            endpoint,
            attempt,
            started,
            protocol,
            version,
        };
        Ok((exchange, sent))
    }

    /// The cause for which the request may be sent again; `None` if the client gets this result.
    fn resend_cause(
        &self,
        sent: &Result<Response<Body>, Error>,
        endpoint: &Endpoint,
        copy: Option<&ReplayableRequest>,
        n_tried: usize,
    ) -> Option<&'static str> {
        match sent {
            // Only a meshed endpoint has a proxy that can report an error of its own.
            Ok(rsp) if endpoint.identity().is_some() && self.connector.can_try_another_endpoint(n_tried) => {
                let (cause, retry) = peer_proxy_error(rsp)?;
                self.allows_resend(retry, endpoint, copy).then_some(cause)
            }
            Err(error) if self.can_resend(error, endpoint, copy, n_tried) => Some(error.cause()),
            _ => None,
        }
    }

    /// Records the result of the endpoint. Prepares the response for the client, and starts the tunnel of an upgrade.
    fn finish(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        mut exchange: Exchange,
        sent: Result<Response<Body>, Error>,
    ) -> Result<(Response<Body>, Exchange), Error> {
        let mut rsp = match sent {
            Ok(rsp) => rsp,
            Err(error) => {
                exchange.attempt.record_error(&error);
                return Err(error);
            }
        };
        exchange.attempt.penalize_failed_head(&rsp);
        let is_meshed = exchange.endpoint.identity().is_some();
        // With several endpoints, one of them must not close the client's connection to the service.
        let may_end = is_meshed && matches!(self.connector.backend, Backend::Forward(_));
        finish_response(&mut rsp, exchange.protocol, exchange.version, may_end);
        let upgraded = rsp.body_mut().take_server_tunnel();
        if upgraded.is_some() && outgoing.upgrade.is_none() {
            let error = Error::InvalidResponse("the server switched protocols without an upgrade request");
            exchange.attempt.record_error(&error);
            return Err(error);
        }
        if !is_meshed {
            headers::strip_spoofed(rsp.headers_mut());
        }
        if let (Some(client), Some(upstream)) = (outgoing.upgrade.take(), upgraded) {
            tunnel::spawn_tunnel(client, upstream, self.context.drain, std::future::pending());
        }
        Ok((rsp, exchange))
    }

    /// Sends this attempt to the tap observers that sampled it.
    #[cold]
    fn start_tap(
        &self,
        sampled: &SampledObservers,
        req: &Request<Body>,
        endpoint: &Endpoint,
    ) -> Option<Box<TappedRequest>> {
        let subject = RequestInfo {
            source_labels: ServerTls::Plain(NoServerTls::Loopback).label_map(),
            destination_labels: Cow::Borrowed(&endpoint.spec.labels),
            destination_tls: endpoint.tls.label_map(),
            route_labels: self.route_source.route_labels(req),
            ..RequestInfo::of(req, ProxyDirection::Outbound, self.context.client, endpoint.spec.addr)
        };
        endpoint.taps.show(sampled, subject)
    }

    fn can_resend(&self, error: &Error, endpoint: &Endpoint, copy: Option<&ReplayableRequest>, n_tried: usize) -> bool {
        // An unprocessed request can also be sent on a new connection to the same endpoint.
        let may_try = match error.is_unprocessed() {
            true => self.connector.has_attempts_left(n_tried),
            false => self.connector.can_try_another_endpoint(n_tried),
        };
        may_try && copy.is_some() && self.allows_resend(error.retry(), endpoint, copy)
    }

    fn allows_resend(&self, retry: Retry, endpoint: &Endpoint, copy: Option<&ReplayableRequest>) -> bool {
        match retry {
            Retry::No => false,
            Retry::NeverSent => true,
            Retry::IfIdempotent => {
                let resend = endpoint.client(self.context.worker).resend_policy();
                copy.is_some_and(|copy| resend.allows(copy.method()))
            }
        }
    }
}

/// Applies the endpoint's authority override, and converts HTTP/1 to HTTP/2 if `protocol` requires it.
fn prepare_request(req: &mut Request<Body>, endpoint: &Endpoint, protocol: Protocol) -> Result<(), Error> {
    if let Some(authority) = &endpoint.spec.authority_override {
        req.headers_mut().remove(header::HOST);
        req.headers_mut().remove(names::L5D_DST_CANONICAL);
        let mut parts = std::mem::take(req.uri_mut()).into_parts();
        parts.scheme = parts.scheme.or(Some(http::uri::Scheme::HTTP));
        parts.authority = Some(authority.clone());
        parts.path_and_query = parts
            .path_and_query
            .or_else(|| Some(http::uri::PathAndQuery::from_static("/")));
        *req.uri_mut() = Uri::from_parts(parts).map_err(|_| Error::InvalidRequest("the request target is invalid"))?;
        if protocol == Protocol::Http1 {
            http1_over_http2::set_origin_form(req);
        }
    }
    if protocol == Protocol::Http2 && req.version() != Version::HTTP_2 {
        return http1_over_http2::upgrade(req);
    }
    Ok(())
}

/// Converts a response to the version that the client client_version for, and removes headers that are for proxies only.
///
/// `may_end` is whether the peer's proxy may close the client's connection: only if its endpoint is the only one of the backend.
fn finish_response(rsp: &mut Response<Body>, protocol: Protocol, client_version: Version, may_end: bool) {
    let upgraded = client_version != Version::HTTP_2 && protocol == Protocol::Http2;
    if upgraded {
        http1_over_http2::downgrade(rsp);
    } else if protocol == Protocol::Http1 {
        match rsp.status() {
            StatusCode::SWITCHING_PROTOCOLS => headers::strip_all_but_upgrade(rsp.headers_mut()),
            _ => headers::strip_hop_by_hop(rsp.headers_mut()),
        }
    }
    let proxy_headers = headers::take_proxy_headers(rsp.headers_mut());
    if let Some(error) = proxy_headers.error {
        tracing::debug!(status = %rsp.status(), ?error, "the peer's proxy returned an error");
    }
    if proxy_headers.closes_connection && may_end && client_version <= Version::HTTP_11 && !upgraded {
        rsp.headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Cause and retry class of an error response that the peer's proxy generated, if another endpoint may answer. A tulle proxy
/// sends a cause header. Linkerd's proxy sends none and is recognized by its error text.
fn peer_proxy_error<B>(rsp: &Response<B>) -> Option<(&'static str, Retry)> {
    let headers = rsp.headers();
    // For gRPC, the error is a `grpc-status` in a response with status 200.
    let by_status = match (rsp.status(), classify::grpc_status(headers)) {
        (StatusCode::BAD_GATEWAY, _) | (_, Some(grpc::UNAVAILABLE)) => "connect-refused",
        (StatusCode::GATEWAY_TIMEOUT, _) | (_, Some(grpc::DEADLINE_EXCEEDED)) => "connect-timeout",
        _ => return None,
    };
    // Proxies remove `l5d-proxy-error` from a response that they forward. A cause without it was forwarded by an application, and
    // is not an error of the peer's proxy.
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

impl Exchange {
    /// Records a result that the client does not get, because the request is sent again.
    fn discard(mut self, sent: Result<Response<Body>, Error>) {
        match sent {
            Err(error) => self.attempt.record_error(&error),
            Ok(rsp) => {
                self.attempt.penalize_failed_head(&rsp);
                // Ending the body records the result of this endpoint.
                let rsp = classify::observe(rsp, self.started, self.attempt);
                rsp.into_body().finish(Ok(()));
            }
        }
    }
}

impl EndpointAttempt {
    fn start(endpoint: &Arc<Endpoint>, started: Instant, is_undelayed: bool) -> Self {
        endpoint.series.request();
        Self {
            in_flight: InFlightGuard::new(endpoint.clone(), started),
            retry_after: None,
            route_attempt: None,
            is_undelayed,
            is_recorded: false,
        }
    }

    /// Counts a failed response as a slow one, if the policy has a penalty for failures.
    fn penalize_failed_head(&mut self, rsp: &Response<Body>) {
        let status = rsp.status();
        let code = classify::grpc_status(rsp.headers());
        let overloaded = status == StatusCode::TOO_MANY_REQUESTS || code == Some(grpc::RESOURCE_EXHAUSTED);
        let is_unavailable = overloaded || status == StatusCode::SERVICE_UNAVAILABLE || code == Some(grpc::UNAVAILABLE);
        if is_unavailable {
            self.retry_after = headers::retry_after(rsp.headers());
        }
        if overloaded || (code != Some(grpc::PERMISSION_DENIED) && !classify::is_success(status, code)) {
            self.in_flight.record_failure(self.retry_after, Instant::now());
        }
    }

    /// Records an attempt without a response.
    fn record_error(mut self, error: &Error) {
        self.is_recorded = true;
        let endpoint = self.in_flight.endpoint().clone();
        endpoint.series.response(classify::failed_outcome(error));
        let error = match error {
            Error::TooLargeToRetry(error) => &**error,
            error => error,
        };
        let is_its_fault = match error {
            // A pooled connection may be closed at any time. That is not a failure of the endpoint.
            Error::ConnectionClosed { reused: true, .. } => false,
            // Neither is a connection that ends with GOAWAY because of its age.
            error if error.is_graceful_go_away() => false,
            // Other endpoints may have used up the timeout of the request.
            Error::Timeout(TimeoutKind::Request(_) | TimeoutKind::Profile(_)) => self.is_undelayed,
            error => error.side() == Side::Peer && !error.is_request_body_error(),
        };
        if !is_its_fault {
            return;
        }
        let now = Instant::now();
        self.in_flight.record_failure(None, now);
        endpoint
            .breaker()
            .record_outcome(breaker::RequestOutcome::Failure, None, now);
    }
}

impl ResponseObserver for EndpointAttempt {
    fn series(&self) -> Option<&Series> {
        Some(&self.in_flight.endpoint().series)
    }

    fn first_data(&mut self, now: Instant) {
        self.in_flight.record_response(now);
    }

    fn data(&mut self, len: usize) {
        if let Some(route_attempt) = &self.route_attempt {
            route_attempt.backend_series.record_frame(len);
        }
    }

    fn response_ended(&mut self, outcome: ResponseOutcome, now: Instant) {
        self.is_recorded = true;
        if let Some(route_attempt) = &mut self.route_attempt {
            route_attempt.record_response(now, &outcome);
        }
        let overloaded =
            outcome.status == StatusCode::TOO_MANY_REQUESTS || outcome.grpc == Some(grpc::RESOURCE_EXHAUSTED);
        let request_outcome = match outcome {
            _ if overloaded => breaker::RequestOutcome::Overloaded,
            ResponseOutcome { success: true, .. } => breaker::RequestOutcome::Success,
            ResponseOutcome {
                end: ResponseEnd::Abandoned,
                status,
                grpc,
                ..
            } if classify::is_success(status, grpc) => return,
            _ => breaker::RequestOutcome::Failure,
        };
        self.in_flight
            .endpoint()
            .breaker()
            .record_outcome(request_outcome, self.retry_after, now);
    }
}

/// Dropped without a result: the client has cancelled the request.
impl Drop for EndpointAttempt {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.in_flight
                .endpoint()
                .series
                .response(classify::failed_outcome(&Error::ClientClosed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l5d_proxy_connection_close_ends_the_http1_connection() {
        for (protocol, version, may_end, closes) in [
            (Protocol::Http1, Version::HTTP_11, true, true),
            (Protocol::Http2, Version::HTTP_2, true, false), // HTTP/2 has no Connection header
            (Protocol::Http2, Version::HTTP_11, true, false), // other clients may share the connection to the peer
            (Protocol::Http1, Version::HTTP_11, false, false),
        ] {
            let rsp = Response::builder().header("l5d-proxy-connection", "close");
            let mut rsp = rsp.body(Body::empty()).unwrap();
            finish_response(&mut rsp, protocol, version, may_end);
            assert_eq!(
                rsp.headers().contains_key("connection"),
                closes,
                "{protocol:?} {version:?}"
            );
            assert!(!rsp.headers().contains_key("l5d-proxy-connection"));
        }
    }

    #[test]
    fn errors_generated_by_a_peer_proxy_are_recognized() {
        let answer = |status: u16, headers: &[(&str, &str)]| {
            let mut rsp = Response::builder().status(status);
            for (name, value) in headers {
                rsp = rsp.header(*name, *value);
            }
            peer_proxy_error(&rsp.body(()).unwrap())
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
