//! Sends one attempt to an endpoint of its backend: picks the endpoint, connects, sends (O8–O11).
//!
//! If the endpoint has not processed the request, or the request is idempotent, it may be sent again, to the same or another
//! endpoint. Such a resend belongs to the same attempt and needs no retry policy.

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
        client::HttpVersion,
        connection_closer::CloseAfterResponse,
        error::{Error, Resendable, Side, TimeoutKind, grpc},
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
            context::{ClientContext, OutgoingRequest},
            observe::{RouteAttemptGuard, RouteSource},
        },
    },
    tap::{RequestInfo, SamplingTaps, TappedRequest},
    tls::status::{NoServerTls, ServerTls},
    trace,
};

/// One attempt at a request, and its backend. Sends the request to endpoints of the backend, until one of them processes it.
pub(super) struct BackendAttempt<'a> {
    pub(super) client: ClientContext<'a>,
    pub(super) connector: RequestConnector<'a>,
    pub(super) route_source: RouteSource<'a>,
    pub(super) started_at: Instant,
    /// The request that the caller keeps for retries, if it equals the one that is sent; `None` otherwise.
    pub(super) kept_for_retry: Option<&'a ReplayableRequest>,
    pub(super) may_resend: bool,
}

/// Records the result of one endpoint in its metrics, load and breaker; observes the response until its end.
struct EndpointObserver {
    /// Counts the request as in flight until the first data of the response.
    in_flight: InFlightGuard<Endpoint>,
    retry_after: Option<Duration>,
    route_attempt: Option<RouteAttemptGuard>,
    /// Whether this is the first endpoint of the request, over all attempts, and a connection was ready without waiting. Only then
    /// is an expired request timeout a failure of the endpoint.
    connected_at_once: bool,
    is_recorded: bool,
}

/// A request that was sent to an endpoint, and the values that the handling of its result needs.
struct SentRequest {
    endpoint: Arc<Endpoint>,
    observer: EndpointObserver,
    started_at: Instant,
    /// The HTTP version of the sent request, from [`ConnectionRequirements::request_protocol`].
    protocol: HttpVersion,
    /// The HTTP version of the client's request.
    client_version: Version,
}

impl BackendAttempt<'_> {
    /// Sends a request to an endpoint of the backend and returns the response.
    ///
    /// Endpoints that the request was sent to are added to `tried`. `route_attempt` records the result.
    ///
    /// # Errors
    /// No endpoint is available, the last endpoint failed, or a deadline has passed.
    pub(super) async fn run(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        deadlines: Option<&mut AttemptDeadlines>,
        route_attempt: Option<RouteAttemptGuard>,
    ) -> Result<Response<Body>, Error> {
        match self.send_until_processed(outgoing, tried, deadlines).await {
            Ok((rsp, mut sent)) => {
                sent.observer.route_attempt = route_attempt;
                Ok(classify::observe(rsp, sent.started_at, sent.observer)) // O11
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
    ///
    /// A resend needs the request as it was sent. Either the caller or this function keeps it. An upgrade request is not kept and
    /// is sent once.
    async fn send_until_processed(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        mut deadlines: Option<&mut AttemptDeadlines>,
    ) -> Result<(Response<Body>, SentRequest), Error> {
        let needs = ConnectionRequirements::from_request(outgoing.req, outgoing.reply_channels.upgrade.is_some());
        let must_keep_request =
            self.may_resend && outgoing.reply_channels.upgrade.is_none() && self.kept_for_retry.is_none();
        let keep_request =
            |req: &mut Request<Body>| ReplayableRequest::of_request(req, replay::DEFAULT_MAX_REPLAY_BYTES);
        let mut own_kept_request = must_keep_request.then(|| keep_request(outgoing.req));
        loop {
            let (sent, result) = self.send_once(outgoing, tried, needs, deadlines.as_deref_mut()).await?;
            let endpoint = sent.endpoint.clone();
            let kept_request = own_kept_request.as_ref().or(self.kept_for_retry);
            let cause = match self.may_resend {
                true => self.resend_cause(&result, &endpoint, kept_request, tried.len()),
                false => None,
            };
            tried.push(endpoint);
            let Some(cause) = cause else {
                return self.finish(outgoing, sent, result);
            };
            let Some(req) = kept_request.and_then(ReplayableRequest::take_request) else {
                // The body was too large to be kept, or the request is an upgrade, which is never kept.
                let result = result.map_err(|error| Error::TooLargeToResend(Box::new(error)));
                return self.finish(outgoing, sent, result);
            };
            self.connector.count_resend(cause);
            sent.discard(result);
            *outgoing.req = req;
            own_kept_request = must_keep_request.then(|| keep_request(outgoing.req));
        }
    }

    /// Connects to an endpoint and sends the request to it. The inner result is that of the endpoint.
    async fn send_once(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
        mut deadlines: Option<&mut AttemptDeadlines>,
    ) -> Result<(SentRequest, Result<Response<Body>, Error>), Error> {
        let req = &mut *outgoing.req;
        let mut connected_at_once = tried.is_empty();
        let (endpoint, outcome) = {
            let mut connecting = pin!(self.connector.connect_endpoint(tried, needs)); // O8, O9
            let connected = poll_fn(|cx| {
                let polled =
                    AttemptDeadlines::check_head_deadline(deadlines.as_deref_mut(), connecting.as_mut().poll(cx), cx);
                connected_at_once &= polled.is_ready(); // true only if the first poll is ready, that is, without waiting
                polled
            });
            connected.await?
        };
        let client_version = req.version();
        let protocol = needs.request_protocol(&endpoint);
        prepare_request(req, &endpoint, protocol)?;
        // Time spent on other endpoints is not part of this endpoint's latency.
        let started_at = if connected_at_once {
            self.started_at
        } else {
            Instant::now()
        };
        let observer = EndpointObserver::start(&endpoint, started_at, connected_at_once);
        let taps = endpoint.taps.sample();
        let tapped = taps.and_then(|taps| self.start_tap(&taps, req, &endpoint));
        let span = trace::start_client_span(endpoint.tracer.as_ref(), req);
        let result = {
            let client = endpoint.client(self.client.worker);
            let mut response = pin!(client.send(outcome, req, outgoing.reply_channels.interims.as_ref())); // O10
            poll_fn(|cx| {
                AttemptDeadlines::check_head_deadline(deadlines.as_deref_mut(), response.as_mut().poll(cx), cx)
            })
            .await
        };
        trace::finish(span, &result);
        let result = match tapped {
            None => result,
            Some(tapped) => match result {
                Ok(rsp) => Ok(tapped.show_response(rsp)),
                Err(error) => {
                    tapped.show_failure(&error);
                    Err(error)
                }
            },
        };
        let sent = SentRequest {
            endpoint,
            observer,
            started_at,
            protocol,
            client_version,
        };
        Ok((sent, result))
    }

    /// The cause of a resend in this attempt; `None` if the request is not sent again and `result` is the result of the attempt.
    fn resend_cause(
        &self,
        result: &Result<Response<Body>, Error>,
        endpoint: &Endpoint,
        kept_request: Option<&ReplayableRequest>,
        n_tried_so_far: usize,
    ) -> Option<&'static str> {
        match result {
            // Only a meshed endpoint has a proxy that can report an error of its own.
            Ok(rsp) if endpoint.identity().is_some() && self.connector.may_send_to_another_endpoint(n_tried_so_far) => {
                let (cause, resendable) = peer_proxy_error(rsp)?;
                self.allows_resend(resendable, endpoint, kept_request).then_some(cause)
            }
            Err(error) if self.can_resend_after_error(error, endpoint, kept_request, n_tried_so_far) => {
                Some(error.cause())
            }
            _ => None,
        }
    }

    /// Records the result of the endpoint. Prepares the response for the client, and starts the tunnel of an upgrade.
    fn finish(
        &self,
        outgoing: &mut OutgoingRequest<'_>,
        mut sent: SentRequest,
        result: Result<Response<Body>, Error>,
    ) -> Result<(Response<Body>, SentRequest), Error> {
        let mut rsp = match result {
            Ok(rsp) => rsp,
            Err(error) => {
                sent.observer.record_error(&error);
                return Err(error);
            }
        };
        sent.observer.record_failed_status(&rsp);
        let is_meshed = sent.endpoint.identity().is_some();
        // If the backend has several endpoints, none of them may close the client's connection to the service.
        let may_close_client = is_meshed && matches!(self.connector.backend, Backend::Forward(_));
        finish_response(&mut rsp, sent.protocol, sent.client_version, may_close_client);
        let server_tunnel = rsp.body_mut().take_server_tunnel();
        if server_tunnel.is_some() && outgoing.reply_channels.upgrade.is_none() {
            let error = Error::InvalidResponse("the server switched protocols without an upgrade request");
            sent.observer.record_error(&error);
            return Err(error);
        }
        if !is_meshed {
            headers::strip_proxy_headers(rsp.headers_mut());
        }
        if let (Some(client_tunnel), Some(server_tunnel)) = (outgoing.reply_channels.upgrade.take(), server_tunnel) {
            tunnel::spawn_tunnel(client_tunnel, server_tunnel, self.client.drain);
        }
        Ok((rsp, sent))
    }

    /// Shows this attempt to the taps that have sampled it and match it.
    #[cold]
    fn start_tap(&self, taps: &SamplingTaps, req: &Request<Body>, endpoint: &Endpoint) -> Option<Box<TappedRequest>> {
        let request_info = RequestInfo {
            source_labels: ServerTls::Plain(NoServerTls::Loopback).tap_labels(),
            destination_labels: Cow::Borrowed(&endpoint.spec.labels),
            destination_tls: endpoint.tls.tap_labels(),
            route_labels: self.route_source.route_labels(req),
            ..RequestInfo::new(
                req,
                ProxyDirection::Outbound,
                self.client.client_addr,
                endpoint.spec.addr,
            )
        };
        endpoint.taps.show(taps, request_info)
    }

    /// Whether the request may be sent again after `error`.
    fn can_resend_after_error(
        &self,
        error: &Error,
        endpoint: &Endpoint,
        kept_request: Option<&ReplayableRequest>,
        n_tried_so_far: usize,
    ) -> bool {
        // After a refused stream, the request can also be sent on a new connection to the same endpoint.
        let may_send = match error.is_refused_stream() {
            true => self.connector.may_send_again(n_tried_so_far),
            false => self.connector.may_send_to_another_endpoint(n_tried_so_far),
        };
        may_send && kept_request.is_some() && self.allows_resend(error.resendable(), endpoint, kept_request)
    }

    /// Whether the request may be sent again after a result with this `resendable`.
    fn allows_resend(
        &self,
        resendable: Resendable,
        endpoint: &Endpoint,
        kept_request: Option<&ReplayableRequest>,
    ) -> bool {
        match resendable {
            Resendable::Never => false,
            Resendable::Always => true,
            Resendable::IfIdempotent => {
                let resend = endpoint.client(self.client.worker).resend_policy();
                kept_request.is_some_and(|kept| resend.allows(kept.method()))
            }
        }
    }
}

/// Applies the endpoint's authority override, and converts HTTP/1 to HTTP/2 if `protocol` requires it.
fn prepare_request(req: &mut Request<Body>, endpoint: &Endpoint, protocol: HttpVersion) -> Result<(), Error> {
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
        if protocol == HttpVersion::Http1 {
            http1_over_http2::set_origin_form(req);
        }
    }
    if protocol == HttpVersion::Http2 && req.version() != Version::HTTP_2 {
        return http1_over_http2::request_to_http2(req);
    }
    Ok(())
}

/// Converts a response to the HTTP version of the client's request, `client_version`, and removes headers that only proxies use.
///
/// `may_close_client` says whether the peer's proxy may close the client's connection. It may if the backend has only this
/// endpoint.
fn finish_response(rsp: &mut Response<Body>, protocol: HttpVersion, client_version: Version, may_close_client: bool) {
    let was_converted_to_http2 = client_version != Version::HTTP_2 && protocol == HttpVersion::Http2;
    if was_converted_to_http2 {
        http1_over_http2::response_to_http1(rsp);
    } else if protocol == HttpVersion::Http1 {
        match rsp.status() {
            StatusCode::SWITCHING_PROTOCOLS => headers::strip_hop_by_hop_except_upgrade(rsp.headers_mut()),
            _ => headers::strip_hop_by_hop(rsp.headers_mut()),
        }
    }
    let proxy_headers = headers::take_proxy_headers(rsp.headers_mut());
    if let Some(error) = proxy_headers.error {
        tracing::debug!(status = %rsp.status(), ?error, "the peer's proxy returned an error");
    }
    let is_http1 = client_version <= Version::HTTP_11 && !was_converted_to_http2;
    if proxy_headers.closes_connection && may_close_client && is_http1 {
        rsp.extensions_mut().insert(CloseAfterResponse);
    }
}

/// The cause of an error response that the peer's proxy generated, and the requests that may be resent after it. `None` if no
/// request may be resent. A tulle proxy sends a header with the cause. An error of Linkerd's proxy is recognized by its text.
fn peer_proxy_error<B>(rsp: &Response<B>) -> Option<(&'static str, Resendable)> {
    let headers = rsp.headers();
    // For gRPC, the error is a `grpc-status` in a response with status 200.
    let by_status = match (rsp.status(), classify::grpc_status(headers)) {
        (StatusCode::BAD_GATEWAY, _) | (_, Some(grpc::UNAVAILABLE)) => "connect-refused",
        (StatusCode::GATEWAY_TIMEOUT, _) | (_, Some(grpc::DEADLINE_EXCEEDED)) => "connect-timeout",
        _ => return None,
    };
    // Every proxy removes `l5d-proxy-error` from a response that it forwards. Without it, `l5d-proxy-cause` is from a proxy that is
    // further away: the peer's application has forwarded a response of that proxy.
    let error = headers.get(names::L5D_PROXY_ERROR)?;
    let cause_header = headers
        .get(names::L5D_PROXY_CAUSE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let resendable_causes = [
        ("connect-refused", "connect-refused", Resendable::Always),
        ("connect-timeout", "connect-timeout", Resendable::Always),
        // The header of `Error::ReconnectFailed`: an open connection was closed, and the dial after it failed.
        (
            "connection-closed; then=",
            "connection-closed",
            Resendable::IfIdempotent,
        ),
    ];
    let by_cause = resendable_causes
        .iter()
        .find(|(prefix, ..)| cause_header.starts_with(prefix.as_bytes()));
    match by_cause {
        Some((_, cause, resendable)) => Some((cause, *resendable)),
        None => (error == "client error (Connect)").then_some((by_status, Resendable::Always)),
    }
}

impl SentRequest {
    /// Records a result that the client does not get, because the request is sent again.
    fn discard(mut self, result: Result<Response<Body>, Error>) {
        match result {
            Err(error) => self.observer.record_error(&error),
            Ok(rsp) => {
                self.observer.record_failed_status(&rsp);
                // Discarding the body records the result of this endpoint.
                let rsp = classify::observe(rsp, self.started_at, self.observer);
                rsp.into_body().discard_with_result(Ok(()));
            }
        }
    }
}

impl EndpointObserver {
    fn start(endpoint: &Arc<Endpoint>, started_at: Instant, connected_at_once: bool) -> Self {
        endpoint.series.record_request();
        Self {
            in_flight: InFlightGuard::new(endpoint.clone(), started_at),
            retry_after: None,
            route_attempt: None,
            connected_at_once,
            is_recorded: false,
        }
    }

    /// Records a failed status in the endpoint's load; with `PenaltyPeakEwma` it counts as slower than it was. Keeps `Retry-After`
    /// of an unavailable endpoint for its breaker.
    fn record_failed_status(&mut self, rsp: &Response<Body>) {
        let status = rsp.status();
        let code = classify::grpc_status(rsp.headers());
        let is_overloaded = status == StatusCode::TOO_MANY_REQUESTS || code == Some(grpc::RESOURCE_EXHAUSTED);
        let is_unavailable =
            is_overloaded || status == StatusCode::SERVICE_UNAVAILABLE || code == Some(grpc::UNAVAILABLE);
        if is_unavailable {
            self.retry_after = headers::retry_after(rsp.headers());
        }
        // `PERMISSION_DENIED` is about the client and not a failure of the endpoint.
        let is_denied = code == Some(grpc::PERMISSION_DENIED);
        if is_overloaded || (!is_denied && !classify::is_success(status, code)) {
            let now = Instant::now();
            self.in_flight.endpoint().load().record_response(now);
            self.in_flight.record_failure(self.retry_after, now);
        }
    }

    /// Records that the endpoint returned no response.
    fn record_error(mut self, error: &Error) {
        self.is_recorded = true;
        let endpoint = self.in_flight.endpoint().clone();
        endpoint.series.record_response(classify::failed_outcome(error));
        let error = match error {
            Error::TooLargeToResend(error) => &**error,
            error => error,
        };
        let is_endpoint_failure = match error {
            // A server may close a pooled connection at any time. That is not a failure of the endpoint.
            Error::ConnectionClosed { reused: true, .. } => false,
            // A connection that ends with GOAWAY because of its age is no failure of the endpoint either.
            error if error.is_graceful_go_away() => false,
            // Other endpoints may have used up the timeout of the request.
            Error::Timeout(TimeoutKind::Request(_) | TimeoutKind::Profile(_)) => self.connected_at_once,
            error => error.side() == Side::Upstream && !error.is_request_body_error(),
        };
        if !is_endpoint_failure {
            return;
        }
        let now = Instant::now();
        self.in_flight.record_failure(None, now);
        endpoint
            .breaker()
            .record_outcome(breaker::RequestOutcome::Failure, None, now);
    }
}

impl ResponseObserver for EndpointObserver {
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
        let is_overloaded =
            outcome.status == StatusCode::TOO_MANY_REQUESTS || outcome.grpc == Some(grpc::RESOURCE_EXHAUSTED);
        let request_outcome = match outcome {
            _ if is_overloaded => breaker::RequestOutcome::Overloaded,
            ResponseOutcome { success: true, .. } => breaker::RequestOutcome::Success,
            // The client cancelled a response that was a success until then. This says nothing about the endpoint.
            ResponseOutcome {
                end: ResponseEnd::Cancelled,
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

/// Records that the client cancelled the request, if no result was recorded.
impl Drop for EndpointObserver {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.in_flight
                .endpoint()
                .series
                .record_response(classify::failed_outcome(&Error::ClientClosed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l5d_proxy_connection_close_ends_the_http1_connection() {
        for (protocol, version, may_close_client, closes) in [
            (HttpVersion::Http1, Version::HTTP_11, true, true),
            (HttpVersion::Http2, Version::HTTP_2, true, false), // HTTP/2 has no Connection header
            (HttpVersion::Http2, Version::HTTP_11, true, false), // other clients may share the connection to the peer
            (HttpVersion::Http1, Version::HTTP_11, false, false),
        ] {
            let rsp = Response::builder().header("l5d-proxy-connection", "close");
            let mut rsp = rsp.body(Body::empty()).unwrap();
            finish_response(&mut rsp, protocol, version, may_close_client);
            assert_eq!(
                rsp.extensions().get::<CloseAfterResponse>().is_some(),
                closes,
                "{protocol:?} {version:?}"
            );
            assert!(!rsp.headers().contains_key("l5d-proxy-connection"));
        }
    }

    #[test]
    fn errors_generated_by_a_peer_proxy_are_recognized() {
        let proxy_error = |status: u16, headers: &[(&str, &str)]| {
            let mut rsp = Response::builder().status(status);
            for (name, value) in headers {
                rsp = rsp.header(*name, *value);
            }
            peer_proxy_error(&rsp.body(()).unwrap())
        };
        let (grpc, unavailable) = (("content-type", "application/grpc"), ("grpc-status", "14"));
        let (cause, error) = ("l5d-proxy-cause", ("l5d-proxy-error", "refused"));
        let linkerd = ("l5d-proxy-error", "client error (Connect)");
        let refused = Some(("connect-refused", Resendable::Always));
        let timed_out = Some(("connect-timeout", Resendable::Always));
        let gone = Some(("connection-closed", Resendable::IfIdempotent));
        for (status, headers, expected) in [
            (502, vec![error, (cause, "connect-refused")], refused),
            (504, vec![error, (cause, "connect-timeout")], timed_out),
            (200, vec![grpc, unavailable, error, (cause, "connect-refused")], refused),
            (502, vec![error, (cause, "connect-timeout")], timed_out),
            (502, vec![linkerd], refused),
            (504, vec![linkerd], timed_out),
            (
                502,
                vec![("l5d-proxy-error", "endpoint 10.0.0.1:80: client error (Connect)")],
                None,
            ),
            (502, vec![("l5d-proxy-error", "client error (SendRequest)")], None),
            (504, vec![("l5d-proxy-error", "HTTP response timeout after 1s")], None),
            (502, vec![(cause, "connect-refused")], None),
            (502, vec![error, (cause, "connection-closed; direction=inbound")], None),
            (
                502,
                vec![error, (cause, "connection-closed; then=connect-refused")],
                gone,
            ),
            (502, vec![], None),
            (200, vec![error, (cause, "connect-refused")], None),
        ] {
            assert_eq!(proxy_error(status, &headers), expected, "{status} {headers:?}");
        }
    }
}
