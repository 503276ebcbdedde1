//! Spans of requests that belong to a recorded trace: one where a request comes in, one where it goes on.
//!
//! A trace is continued where a request says that it is recorded, in whatever form it says so. Others are left as they are,
//! unless this proxy is told to begin traces itself. Spans go to [`export`], which sends them to a collector.

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
    http::{body::Body, classify, error::Error},
    trace::context::Context,
};

/// Makes the spans of one direction.
#[derive(Clone)]
pub(crate) struct Tracer {
    direction: &'static str,
    /// The share of requests without a context that begin a trace.
    sampling: f64,
    spans: mpsc::Sender<trace::Span>,
    dropped: Arc<Counter>,
}

/// A request on its way, as a part of a trace.
pub(crate) struct Span {
    tracer: Tracer,
    /// Until it has been told how it ended.
    span: Option<trace::Span>,
}

/// The span of a request that has come in and may, where it belongs to a recorded trace. Strangers make none.
pub(crate) fn came(tracer: Option<&Tracer>, req: &mut Request<Body>) -> Option<Box<Span>> {
    tracer?.came(req)
}

/// The span of a request that goes on to whoever serves it.
pub(crate) fn goes(tracer: Option<&Tracer>, req: &mut Request<Body>) -> Option<Box<Span>> {
    tracer?.goes(req)
}

/// The head of the response has come, or there is none.
#[inline]
pub(crate) fn ended(span: Option<Box<Span>>, result: &Result<Response<Body>, Error>) {
    if let Some(span) = span {
        span.ended(result);
    }
}

impl Tracer {
    #[cold]
    fn came(&self, req: &mut Request<Body>) -> Option<Box<Span>> {
        let context = match Context::of(req.headers()) {
            Some(context) => context,
            None if self.sampling > 0.0 && !Context::is_refused(req.headers()) => {
                let is_sampled = fastrand::f64() < self.sampling;
                let context = Context::begin(fastrand::u128(1..).to_be_bytes(), is_sampled);
                if !is_sampled {
                    // Nobody after us shall decide otherwise.
                    context.write(new_span(), req.headers_mut());
                }
                context
            }
            None => return None,
        };
        self.begin(SpanKind::Server, context, req)
    }

    #[cold]
    fn goes(&self, req: &mut Request<Body>) -> Option<Box<Span>> {
        let context = Context::of(req.headers())?;
        self.begin(SpanKind::Client, context, req)
    }

    fn begin(&self, kind: SpanKind, context: Context, req: &mut Request<Body>) -> Option<Box<Span>> {
        if !context.is_sampled {
            return None;
        }
        let id = new_span();
        context.write(id, req.headers_mut());
        let parent = match context.span {
            [0, 0, 0, 0, 0, 0, 0, 0] => Vec::new(), // the trace begins here
            span => span.to_vec(),
        };
        let span = trace::Span {
            trace_id: context.trace.to_vec(),
            span_id: id.to_vec(),
            trace_state: state(req.headers()),
            parent_span_id: parent,
            name: cut(req.uri().path()).to_owned(),
            kind: kind.into(),
            start_time_unix_nano: now(),
            end_time_unix_nano: 0,
            attributes: attributes(self.direction, req),
            status: None,
        };
        Some(Box::new(Span {
            tracer: self.clone(),
            span: Some(span),
        }))
    }
}

impl Span {
    #[cold]
    fn ended(mut self: Box<Self>, result: &Result<Response<Body>, Error>) {
        self.tell(result.as_ref());
    }

    fn tell(&mut self, result: Result<&Response<Body>, &Error>) {
        let Some(mut span) = self.span.take() else { return };
        let mut say = |key: &str, value| span.attributes.push(attribute(key, value));
        let (status, cause) = match result {
            Ok(rsp) => (rsp.status(), None),
            Err(error) => (error.answer().status, Some(error.cause())),
        };
        say("http.response.status_code", Value::IntValue(status.as_u16().into()));
        let grpc = result.ok().and_then(|rsp| classify::grpc_status(rsp.headers()));
        if let Some(code) = grpc {
            say("rpc.grpc.status_code", Value::IntValue(code.into()));
        }
        if let Some(cause) = cause {
            say("error.type", text(cause));
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

/// The client has left.
impl Drop for Span {
    fn drop(&mut self) {
        self.tell(Err(&Error::Left));
    }
}

/// What other systems say of the trace; too much of it is dropped, as the standard permits.
///
/// Source: W3C Trace Context, section 3.3.1.5.
fn state(headers: &HeaderMap) -> String {
    let lines = headers
        .get_all("tracestate")
        .iter()
        .filter_map(|line| line.to_str().ok());
    let state = lines.collect::<Vec<_>>().join(",");
    if state.len() > MOST_STATE { String::new() } else { state }
}

/// What OpenTelemetry's conventions have to say of a request.
fn attributes(direction: &'static str, req: &Request<Body>) -> Vec<KeyValue> {
    let (uri, headers) = (req.uri(), req.headers());
    let mut all = vec![
        attribute("direction", text(direction)),
        attribute("http.request.method", text(req.method().as_str())),
        attribute("url.full", text(&full_url(uri))),
        attribute("url.path", text(uri.path())),
        attribute("network.transport", text("tcp")),
    ];
    let mut say = |key: &str, value: Option<Value>| all.extend(value.map(|value| attribute(key, value)));
    say("url.scheme", uri.scheme_str().map(text));
    say("url.query", uri.query().map(text));
    let host = host(uri, headers);
    say("server.address", host.as_ref().map(|host| text(host.host())));
    let port = host.as_ref().and_then(|host| host.port_u16());
    say("server.port", port.map(|port| Value::IntValue(port.into())));
    let headers = |name: &HeaderName| {
        let value = headers.get(name)?;
        Some(text(&String::from_utf8_lossy(value.as_bytes())))
    };
    say("user_agent.original", headers(&header::USER_AGENT));
    say("http.request.header.content-length", headers(&header::CONTENT_LENGTH));
    say("http.request.header.content-type", headers(&header::CONTENT_TYPE));
    say("http.request.header.l5d-orig-proto", headers(&names::L5D_ORIG_PROTO));
    all
}

/// The host that the client means.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<http::uri::Authority> {
    let of = |name: &str| headers.get(name)?.to_str().ok()?.parse().ok();
    of("x-forwarded-host")
        .or_else(|| uri.authority().cloned())
        .or_else(|| of("host"))
}

/// Without what is between `//` and `@`, which may be a password.
fn full_url(uri: &Uri) -> String {
    let mut url = String::new();
    if let Some(scheme) = uri.scheme_str() {
        url = format!("{scheme}://");
    }
    if let Some(authority) = uri.authority() {
        let authority = authority.as_str();
        url.push_str(authority.rsplit_once('@').map_or(authority, |(_, host)| host));
    }
    url.push_str(uri.path_and_query().map_or("", |path| path.as_str()));
    url
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
    }
}

fn text(text: &str) -> Value {
    Value::StringValue(cut(text).to_owned())
}

/// As much of a text as a span tells: clients write it.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(LONGEST_TEXT)]
}

fn new_span() -> [u8; 8] {
    fastrand::u64(1..).to_be_bytes()
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes of a text in a span.
const LONGEST_TEXT: usize = 1024;
/// Bytes of what other systems say of a trace.
const MOST_STATE: usize = 512;

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

    fn said(span: &Span) -> &trace::Span {
        span.span.as_ref().unwrap()
    }

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn value(span: &trace::Span, key: &str) -> Option<Value> {
        let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
        found.value.clone()?.value
    }

    #[test]
    fn a_recorded_trace_is_continued_and_described() {
        let (tracer, mut sent) = tracer(0.0);
        let mut req = request(Some(SAMPLED));
        let came = tracer.came(&mut req).unwrap();
        let goes = tracer.goes(&mut req).unwrap();
        assert_eq!(said(&goes).parent_span_id, said(&came).span_id);
        let mut rsp = Response::new(Body::empty());
        *rsp.status_mut() = StatusCode::BAD_GATEWAY;
        came.ended(&Ok(rsp));
        let span = sent.try_recv().unwrap();
        assert_eq!(span.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
        assert_eq!((span.name.as_str(), span.kind()), ("/a", SpanKind::Server));
        assert_eq!(span.status.as_ref().unwrap().code(), Code::Error);
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
        for (key, expected) in [
            ("direction", text("outbound")),
            ("url.full", text("http://web.test:8080/a?b=c")),
            ("url.query", text("b=c")),
            ("server.address", text("web.test")),
            ("server.port", Value::IntValue(8080)),
            ("http.response.status_code", Value::IntValue(502)),
        ] {
            assert_eq!(value(&span, key), Some(expected), "{key}");
        }
    }

    #[test]
    fn a_client_that_leaves_leaves_a_span() {
        let (tracer, mut sent) = tracer(0.0);
        drop(tracer.came(&mut request(Some(SAMPLED))).unwrap());
        assert_eq!(
            value(&sent.try_recv().unwrap(), "error.type"),
            Some(text("client-left"))
        );
        tracer
            .came(&mut request(Some(SAMPLED)))
            .unwrap()
            .ended(&Err(Error::Shed));
        assert_eq!(value(&sent.try_recv().unwrap(), "error.type"), Some(text("overload")));
        assert!(sent.try_recv().is_err(), "once is enough");
    }

    #[test]
    fn what_clients_write_is_cut() {
        let (tracer, mut sent) = tracer(0.0);
        let mut req = request(Some(SAMPLED));
        *req.uri_mut() = format!("http://web.test/{}", "x".repeat(60_000)).parse().unwrap();
        let agent = "\u{e4}".repeat(1000);
        req.headers_mut()
            .insert("user-agent", agent.as_bytes().try_into().unwrap());
        for line in ["shop=1", "other=2"] {
            req.headers_mut().append("tracestate", line.parse().unwrap());
        }
        drop(tracer.came(&mut req));
        let span = sent.try_recv().unwrap();
        assert_eq!(
            (span.name.len(), span.trace_state.as_str()),
            (LONGEST_TEXT, "shop=1,other=2")
        );
        assert_eq!(value(&span, "user_agent.original"), Some(text(&agent[..1024])));
        assert!(prost::Message::encoded_len(&span) < 8 * LONGEST_TEXT);
        req.headers_mut()
            .append("tracestate", format!("long={}", "x".repeat(500)).parse().unwrap());
        drop(tracer.came(&mut req));
        assert_eq!(sent.try_recv().unwrap().trace_state, "");
    }

    #[test]
    fn spans_that_find_no_room_are_counted() {
        let (tracer, _sent) = tracer(0.0);
        for n in 0..3 {
            let span = tracer.came(&mut request(Some(SAMPLED))).unwrap();
            span.ended(&Err(Error::NoBackends));
            assert_eq!(tracer.dropped.get(), n, "one has room");
        }
    }

    #[test]
    fn only_who_is_told_to_begins_traces_and_all_after_it_know() {
        let (never, _sent) = tracer(0.0);
        let mut plain = request(None);
        assert!(never.came(&mut plain).is_none());
        assert!(!plain.headers().contains_key("traceparent"));
        let mut not = request(Some(&SAMPLED.replace("-01", "-00")));
        assert!(never.came(&mut not).is_none());

        let (always, _sent) = tracer(1.0);
        let mut req = request(None);
        let span = always.came(&mut req).unwrap();
        assert!(said(&span).parent_span_id.is_empty());
        let next = always.goes(&mut req).unwrap();
        assert_eq!(said(&next).parent_span_id, said(&span).span_id);
        assert!(always.came(&mut not).is_none(), "others have decided");

        let mut refused = request(None);
        refused.headers_mut().insert("x-b3-sampled", "0".parse().unwrap());
        assert!(always.came(&mut refused).is_none());
        assert!(!refused.headers().contains_key("traceparent"));

        let (seldom, _sent) = tracer(f64::MIN_POSITIVE);
        assert!(seldom.came(&mut plain).is_none());
        assert!(!Context::of(plain.headers()).unwrap().is_sampled);
        assert!(always.came(&mut plain).is_none());
    }
}
