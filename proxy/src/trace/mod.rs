//! Spans of requests that belong to a sampled trace: a server span for a request that the proxy receives, a client span for one
//! that it sends.
//!
//! A trace is continued if a request is marked as sampled, in any of the known formats. Other requests get no span, unless this
//! proxy is configured to start traces. Spans go to [`export`], which sends them to a collector.

pub(crate) mod context;
pub(crate) mod export;

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use http::{HeaderMap, HeaderName, Request, Response, Uri, header};
use tokio::sync::mpsc;
use tulle_core::{metrics::Counter, names::header as names};
use tulle_proto::trace::{
    self, AnyValue, KeyValue, Status, any_value::Value, span::SpanKind, status::StatusCode as Code,
};

use crate::{
    http::{body::Body, error::Error, lifecycle::classify},
    trace::context::Context,
};

#[derive(Clone)]
pub(crate) struct Tracer {
    direction: &'static str,
    /// The fraction of requests without a trace context for which this proxy starts a trace.
    sampling: f64,
    spans: mpsc::Sender<trace::Span>,
    dropped: Arc<Counter>,
}

/// The span of one request. It is sent to the exporter when it is finished or dropped.
pub(crate) struct RequestSpan {
    tracer: Tracer,
    /// The span to export; `None` after it is finished.
    data: Option<trace::Span>,
}

/// Starts the span of a request that this proxy receives, if it belongs to a sampled trace. Not called for requests that the
/// inbound side refuses.
pub(crate) fn start_server_span(tracer: Option<&Tracer>, req: &mut Request<Body>) -> Option<Box<RequestSpan>> {
    tracer?.server_span(req)
}

/// Starts the span of a request that this proxy sends, if it belongs to a sampled trace.
pub(crate) fn start_client_span(tracer: Option<&Tracer>, req: &mut Request<Body>) -> Option<Box<RequestSpan>> {
    tracer?.client_span(req)
}

/// Finishes the span when the response head has arrived or the request has failed.
#[inline]
pub(crate) fn finish(span: Option<Box<RequestSpan>>, result: &Result<Response<Body>, Error>) {
    if let Some(span) = span {
        span.finish(result);
    }
}

impl Tracer {
    #[cold]
    fn server_span(&self, req: &mut Request<Body>) -> Option<Box<RequestSpan>> {
        let context = match Context::from_headers(req.headers()) {
            Some(context) => context,
            None if self.sampling > 0.0 && !Context::is_marked_unsampled(req.headers()) => {
                let is_sampled = fastrand::f64() < self.sampling;
                let context = Context::new_trace(fastrand::u128(1..).to_be_bytes(), is_sampled);
                // If the request has a `tracestate` with an invalid `traceparent`, it belongs to another trace.
                req.headers_mut().remove(names::TRACESTATE);
                if !is_sampled {
                    // Later hops must make the same decision.
                    context.write(new_span_id(), req.headers_mut());
                }
                context
            }
            None => return None,
        };
        self.begin(SpanKind::Server, context, req)
    }

    #[cold]
    fn client_span(&self, req: &mut Request<Body>) -> Option<Box<RequestSpan>> {
        let context = Context::from_headers(req.headers())?;
        self.begin(SpanKind::Client, context, req)
    }

    fn begin(&self, kind: SpanKind, context: Context, req: &mut Request<Body>) -> Option<Box<RequestSpan>> {
        if !context.is_sampled {
            return None;
        }
        let id = new_span_id();
        context.write(id, req.headers_mut());
        let parent = match context.span_id {
            [0, 0, 0, 0, 0, 0, 0, 0] => Vec::new(), // the trace starts here
            span => span.to_vec(),
        };
        let span = trace::Span {
            trace_id: context.trace_id.to_vec(),
            span_id: id.to_vec(),
            trace_state: tracestate(req.headers()),
            parent_span_id: parent,
            name: truncate(req.uri().path()).to_owned(),
            kind: kind.into(),
            start_time_unix_nano: now(),
            end_time_unix_nano: 0,
            attributes: attributes(self.direction, req),
            status: None,
        };
        Some(Box::new(RequestSpan {
            tracer: self.clone(),
            data: Some(span),
        }))
    }
}

impl RequestSpan {
    #[cold]
    fn finish(mut self: Box<Self>, result: &Result<Response<Body>, Error>) {
        self.record(result.as_ref());
    }

    fn record(&mut self, result: Result<&Response<Body>, &Error>) {
        let Some(mut span) = self.data.take() else { return };
        let mut add = |key: &str, value| span.attributes.push(attribute(key, value));
        let (status, cause) = match result {
            Ok(rsp) => (rsp.status(), None),
            Err(error) => (error.status().status, Some(error.cause())),
        };
        add("http.response.status_code", Value::IntValue(status.as_u16().into()));
        let grpc = result.ok().and_then(|rsp| classify::grpc_status(rsp.headers()));
        if let Some(code) = grpc {
            add("rpc.grpc.status_code", Value::IntValue(code.into()));
        }
        if let Some(cause) = cause {
            add("error.type", text(cause));
        }
        let is_client = span.kind() == SpanKind::Client;
        if cause.is_some() || status.is_server_error() || (is_client && status.is_client_error()) {
            span.status = Some(Status {
                message: cause.unwrap_or_default().to_owned(),
                code: Code::Error.into(),
            });
        }
        span.end_time_unix_nano = now();
        if self.tracer.spans.try_send(span).is_err() {
            self.tracer.dropped.inc();
        }
    }
}

/// If a span is dropped before it is finished, the client has disconnected.
impl Drop for RequestSpan {
    fn drop(&mut self) {
        self.record(Err(&Error::ClientClosed));
    }
}

/// The value of `tracestate`; empty if it is too long, as the standard permits.
///
/// Source: W3C Trace Context, section 3.3.1.5.
fn tracestate(headers: &HeaderMap) -> String {
    let lines = headers
        .get_all(names::TRACESTATE)
        .iter()
        .filter_map(|line| line.to_str().ok());
    let state = lines.collect::<Vec<_>>().join(",");
    if state.len() > MAX_TRACESTATE_BYTES {
        String::new()
    } else {
        state
    }
}

/// The attributes of a request by OpenTelemetry's semantic conventions.
fn attributes(direction: &'static str, req: &Request<Body>) -> Vec<KeyValue> {
    let (uri, headers) = (req.uri(), req.headers());
    let mut all = vec![
        attribute("direction", text(direction)),
        attribute("http.request.method", text(req.method().as_str())),
        attribute("url.full", text(&url_without_secrets(uri))),
        attribute("url.path", text(uri.path())),
        attribute("network.transport", text("tcp")),
    ];
    let mut add = |key: &str, value: Option<Value>| all.extend(value.map(|value| attribute(key, value)));
    add("url.scheme", uri.scheme_str().map(text));
    let host = host(uri, headers);
    add("server.address", host.as_ref().map(|host| text(host.host())));
    let port = host.as_ref().and_then(|host| host.port_u16());
    add("server.port", port.map(|port| Value::IntValue(port.into())));
    let header_text = |name: &HeaderName| {
        let value = headers.get(name)?;
        Some(text(&String::from_utf8_lossy(value.as_bytes())))
    };
    add("user_agent.original", header_text(&header::USER_AGENT));
    add(
        "http.request.header.content-length",
        header_text(&header::CONTENT_LENGTH),
    );
    add("http.request.header.content-type", header_text(&header::CONTENT_TYPE));
    add(
        "http.request.header.l5d-orig-proto",
        header_text(&names::L5D_ORIG_PROTO),
    );
    all
}

/// The host that the client addressed.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<http::uri::Authority> {
    let parse_header = |name: &str| headers.get(name)?.to_str().ok()?.parse().ok();
    parse_header("x-forwarded-host")
        .or_else(|| uri.authority().cloned())
        .or_else(|| parse_header("host"))
}

/// The URI without its query and without the user information between `//` and `@`: both may contain credentials.
fn url_without_secrets(uri: &Uri) -> String {
    let mut url = String::new();
    if let Some(scheme) = uri.scheme_str() {
        url = format!("{scheme}://");
    }
    if let Some(authority) = uri.authority() {
        let authority = authority.as_str();
        url.push_str(authority.rsplit_once('@').map_or(authority, |(_, host)| host));
    }
    url.push_str(uri.path());
    url
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
    }
}

fn text(text: &str) -> Value {
    Value::StringValue(truncate(text).to_owned())
}

/// Truncates a text from the client to [`MAX_ATTRIBUTE_BYTES`].
fn truncate(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_ATTRIBUTE_BYTES)]
}

fn new_span_id() -> [u8; 8] {
    fastrand::u64(1..).to_be_bytes()
}

/// Nanoseconds since the Unix epoch.
fn now() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

/// Maximum length of an attribute, in bytes.
const MAX_ATTRIBUTE_BYTES: usize = 1024;

/// Maximum length of `tracestate`, in bytes.
const MAX_TRACESTATE_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    fn tracer(sampling: f64) -> (Tracer, mpsc::Receiver<trace::Span>) {
        let (spans, sent) = mpsc::channel(1);
        let tracer = Tracer {
            direction: "outbound",
            sampling,
            spans,
            dropped: Arc::default(),
        };
        (tracer, sent)
    }

    fn request(traceparent: Option<&str>) -> Request<Body> {
        let mut req = Request::get("http://user:secret@web.test:8080/a?b=c");
        if let Some(traceparent) = traceparent {
            req = req.header("traceparent", traceparent);
        }
        req.body(Body::empty()).unwrap()
    }

    fn span_data(span: &RequestSpan) -> &trace::Span {
        span.data.as_ref().unwrap()
    }

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn value(span: &trace::Span, key: &str) -> Option<Value> {
        let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
        found.value.clone()?.value
    }

    #[test]
    fn a_sampled_trace_is_continued_and_described() {
        let (tracer, mut sent) = tracer(0.0);
        let mut req = request(Some(SAMPLED));
        let server_span = tracer.server_span(&mut req).unwrap();
        let client_span = tracer.client_span(&mut req).unwrap();
        assert_eq!(span_data(&client_span).parent_span_id, span_data(&server_span).span_id);
        let mut rsp = Response::new(Body::empty());
        *rsp.status_mut() = StatusCode::BAD_GATEWAY;
        server_span.finish(&Ok(rsp));
        let span = sent.try_recv().unwrap();
        assert_eq!(span.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
        assert_eq!((span.name.as_str(), span.kind()), ("/a", SpanKind::Server));
        assert_eq!(span.status.as_ref().unwrap().code(), Code::Error);
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
        for (key, expected) in [
            ("direction", text("outbound")),
            ("url.full", text("http://web.test:8080/a")),
            ("server.address", text("web.test")),
            ("server.port", Value::IntValue(8080)),
            ("http.response.status_code", Value::IntValue(502)),
        ] {
            assert_eq!(value(&span, key), Some(expected), "{key}");
        }
        assert_eq!(value(&span, "url.query"), None, "may contain credentials");
    }

    #[test]
    fn a_request_whose_client_disconnects_has_a_span() {
        let (tracer, mut sent) = tracer(0.0);
        drop(tracer.server_span(&mut request(Some(SAMPLED))).unwrap());
        assert_eq!(
            value(&sent.try_recv().unwrap(), "error.type"),
            Some(text("client-left"))
        );
        tracer
            .server_span(&mut request(Some(SAMPLED)))
            .unwrap()
            .finish(&Err(Error::MaxInFlight));
        assert_eq!(value(&sent.try_recv().unwrap(), "error.type"), Some(text("overload")));
        assert!(sent.try_recv().is_err(), "the span is sent once");
    }

    #[test]
    fn attributes_from_clients_are_truncated() {
        let (tracer, mut sent) = tracer(0.0);
        let mut req = request(Some(SAMPLED));
        *req.uri_mut() = format!("http://web.test/{}", "x".repeat(60_000)).parse().unwrap();
        let agent = "\u{e4}".repeat(1000);
        req.headers_mut()
            .insert("user-agent", agent.as_bytes().try_into().unwrap());
        for line in ["shop=1", "other=2"] {
            req.headers_mut().append("tracestate", line.parse().unwrap());
        }
        drop(tracer.server_span(&mut req));
        let span = sent.try_recv().unwrap();
        assert_eq!(
            (span.name.len(), span.trace_state.as_str()),
            (MAX_ATTRIBUTE_BYTES, "shop=1,other=2")
        );
        assert_eq!(value(&span, "user_agent.original"), Some(text(&agent[..1024])));
        assert!(prost::Message::encoded_len(&span) < 8 * MAX_ATTRIBUTE_BYTES);
        req.headers_mut()
            .append("tracestate", format!("long={}", "x".repeat(500)).parse().unwrap());
        drop(tracer.server_span(&mut req));
        assert_eq!(sent.try_recv().unwrap().trace_state, "");
    }

    #[test]
    fn a_new_trace_does_not_keep_the_tracestate_of_an_invalid_traceparent() {
        let (tracer, mut sent) = tracer(1.0);
        let mut req = request(Some("00-invalid"));
        req.headers_mut().insert(names::TRACESTATE, "shop=1".parse().unwrap());
        drop(tracer.server_span(&mut req).unwrap());
        assert_eq!(sent.try_recv().unwrap().trace_state, "");
        assert!(!req.headers().contains_key(names::TRACESTATE));
    }

    #[test]
    fn spans_beyond_the_queue_limit_are_counted() {
        let (tracer, _sent) = tracer(0.0);
        for n in 0..3 {
            let span = tracer.server_span(&mut request(Some(SAMPLED))).unwrap();
            span.finish(&Err(Error::NoBackends));
            assert_eq!(tracer.dropped.get(), n, "the queue has room for one");
        }
    }

    #[test]
    fn only_a_sampling_proxy_starts_traces_and_propagates_the_decision() {
        let (never, _sent) = tracer(0.0);
        let mut plain = request(None);
        assert!(never.server_span(&mut plain).is_none());
        assert!(!plain.headers().contains_key("traceparent"));
        let mut unsampled = request(Some(&SAMPLED.replace("-01", "-00")));
        assert!(never.server_span(&mut unsampled).is_none());

        let (always, _sent) = tracer(1.0);
        let mut req = request(None);
        let span = always.server_span(&mut req).unwrap();
        assert!(span_data(&span).parent_span_id.is_empty());
        let next = always.client_span(&mut req).unwrap();
        assert_eq!(span_data(&next).parent_span_id, span_data(&span).span_id);
        assert!(
            always.server_span(&mut unsampled).is_none(),
            "an earlier hop has decided"
        );

        let mut refused = request(None);
        refused.headers_mut().insert("x-b3-sampled", "0".parse().unwrap());
        assert!(always.server_span(&mut refused).is_none());
        assert!(!refused.headers().contains_key("traceparent"));

        let (seldom, _sent) = tracer(f64::MIN_POSITIVE);
        assert!(seldom.server_span(&mut plain).is_none());
        assert!(!Context::from_headers(plain.headers()).unwrap().is_sampled);
        assert!(always.server_span(&mut plain).is_none());
    }
}
