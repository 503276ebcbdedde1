//! The `grpc_server_*` metrics, recorded by one layer around all services of a port.
//!
//! Only the methods of the Linkerd API are counted. Clients can send any other path, which would create an unlimited number of
//! label values.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use ahash::AHashMap;
use bytes::{Buf, Bytes};
use http::{HeaderMap, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tonic::Code;
use tonic::body::Body;
use tower::{Layer, Service};
use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use super::stream_limiter::StreamPermit;

/// Counts gRPC calls. Clones share their counters.
#[derive(Clone)]
pub struct GrpcMetrics {
    methods: Arc<AHashMap<String, Arc<MethodMetrics>>>,
}

/// A service that counts its calls.
#[derive(Clone)]
pub struct CountedService<S> {
    inner: S,
    metrics: GrpcMetrics,
}

struct MethodMetrics {
    labels: Labels,
    started: Arc<Counter>,
    received: Arc<Counter>,
    sent: Arc<Counter>,
    duration: Arc<Histogram>,
    handled: Family<Counter>,
}

impl GrpcMetrics {
    /// Registers the metrics, with one series for each method of the Linkerd API.
    pub fn new(registry: &Registry) -> Self {
        let started = registry.counter("grpc_server_started_total", "Calls started.");
        let received = registry.counter("grpc_server_msg_received_total", "Messages received in calls.");
        let sent = registry.counter("grpc_server_msg_sent_total", "Messages sent in calls.");
        let handled = registry.counter("grpc_server_handled_total", "Calls ended, by status code.");
        let seconds = registry.histogram(
            "grpc_server_handling_seconds",
            "Seconds from start to end of calls.",
            &[0.1, 1.0, 300.0, 3600.0],
        );
        let methods = METHODS.map(|(kind, service, method)| {
            let labels = Labels::new()
                .with("grpc_type", kind)
                .with("grpc_service", service)
                .with("grpc_method", method);
            let handles = MethodMetrics {
                started: started.get(&labels),
                received: received.get(&labels),
                sent: sent.get(&labels),
                duration: seconds.get(&labels),
                handled: handled.clone(),
                labels,
            };
            (format!("/{service}/{method}"), Arc::new(handles))
        });
        Self {
            methods: Arc::new(methods.into_iter().collect()),
        }
    }
}

impl<S> Layer<S> for GrpcMetrics {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> CountedService<S> {
        CountedService {
            inner,
            metrics: self.clone(),
        }
    }
}

impl<S> Service<Request<Body>> for CountedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<Body>) -> Self::Future {
        let stream = req.extensions_mut().remove::<StreamPermit>();
        let Some(method) = self.metrics.methods.get(req.uri().path()) else {
            return Box::pin(self.inner.call(req)); // an unknown method: the inner service rejects it immediately
        };
        method.started.inc();
        let mut call = CallRecorder {
            method: method.clone(),
            started_at: Instant::now(),
            // The status code of a call that the client cancels.
            code: Code::Cancelled,
            _stream: stream,
        };
        let received = MessageCounter::new(method.received.clone());
        let req = req.map(|body| {
            Body::new(CountedBody {
                body,
                messages: received,
                call: None,
            })
        });
        let sent = MessageCounter::new(method.sent.clone());
        let rsp = self.inner.call(req);
        Box::pin(async move {
            let rsp = rsp.await?;
            // A call that fails immediately carries its status in the response headers.
            call.observe_status(rsp.headers());
            Ok(rsp.map(|body| {
                Body::new(CountedBody {
                    body,
                    messages: sent,
                    call: Some(call),
                })
            }))
        })
    }
}

/// A call in progress. Dropping it records its status code and its duration.
struct CallRecorder {
    method: Arc<MethodMetrics>,
    started_at: Instant,
    code: Code,
    /// Held until the call has ended: its response body has ended or is dropped, which only this layer sees.
    _stream: Option<StreamPermit>,
}

impl CallRecorder {
    fn observe_status(&mut self, headers: &HeaderMap) {
        if let Some(status) = headers.get("grpc-status") {
            self.code = Code::from_bytes(status.as_bytes());
        }
    }
}

impl Drop for CallRecorder {
    fn drop(&mut self) {
        let labels = Labels::new()
            .with("grpc_code", code_name(self.code))
            .extend(&self.method.labels);
        self.method.handled.get(&labels).inc();
        self.method.duration.observe(self.started_at.elapsed().as_secs_f64());
    }
}

/// A body that counts its messages. The response body also keeps the call's recorder until its end.
struct CountedBody {
    body: Body,
    messages: MessageCounter,
    call: Option<CallRecorder>,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        let this = &mut *self;
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.messages.observe_data(data);
                }
                if let (Some(call), Some(trailers)) = (&mut this.call, frame.trailers_ref()) {
                    call.observe_status(trailers);
                }
            }
            Some(Err(status)) => {
                if let Some(call) = &mut this.call {
                    call.code = status.code();
                }
            }
            None => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Counts gRPC messages in a byte stream. Each message has a flag byte, a 4-byte length and its content.
struct MessageCounter {
    counter: Arc<Counter>,
    prefix: [u8; 5],
    n_prefix_bytes: usize,
    /// Bytes of the current message that have not arrived yet.
    n_remaining_bytes: usize,
}

impl MessageCounter {
    fn new(counter: Arc<Counter>) -> Self {
        Self {
            counter,
            prefix: [0; 5],
            n_prefix_bytes: 0,
            n_remaining_bytes: 0,
        }
    }

    fn observe_data(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if self.n_remaining_bytes > 0 {
                let n = self.n_remaining_bytes.min(data.len());
                self.n_remaining_bytes -= n;
                data.advance(n);
                continue;
            }
            self.prefix[self.n_prefix_bytes] = data.get_u8();
            self.n_prefix_bytes += 1;
            if self.n_prefix_bytes == self.prefix.len() {
                let [_, length @ ..] = self.prefix;
                self.n_remaining_bytes = u32::from_be_bytes(length) as usize;
                self.n_prefix_bytes = 0;
                self.counter.inc();
            }
        }
    }
}

/// Returns the code as grpc-go spells it, because dashboards query these names.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

const METHODS: [(&str, &str, &str); 7] = [
    ("unary", "io.linkerd.proxy.identity.Identity", "Certify"),
    ("server_stream", "io.linkerd.proxy.destination.Destination", "Get"),
    (
        "server_stream",
        "io.linkerd.proxy.destination.Destination",
        "GetProfile",
    ),
    ("unary", "io.linkerd.proxy.inbound.InboundServerPolicies", "GetPort"),
    (
        "server_stream",
        "io.linkerd.proxy.inbound.InboundServerPolicies",
        "WatchPort",
    ),
    ("unary", "io.linkerd.proxy.outbound.OutboundPolicies", "Get"),
    ("server_stream", "io.linkerd.proxy.outbound.OutboundPolicies", "Watch"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_counted_across_frame_boundaries() {
        let counter = Registry::new().counter("a_total", "A.").get(&Labels::new());
        let bytes = [0, 0, 0, 0, 3, 1, 2, 3, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0];
        for size in 1..bytes.len() {
            let before = counter.get();
            let mut messages = MessageCounter::new(counter.clone());
            bytes.chunks(size).for_each(|chunk| messages.observe_data(chunk));
            assert_eq!(counter.get() - before, 3, "in pieces of {size}");
        }
    }

    #[tokio::test]
    async fn a_call_is_counted_with_its_code_and_unknown_paths_are_not() {
        let registry = Registry::new();
        let metrics = GrpcMetrics::new(&registry);
        let inner = tower::service_fn(|_| async {
            let status = tonic::Status::failed_precondition("no");
            Ok::<_, Infallible>(status.into_http::<Body>())
        });
        let call = |path: &str| {
            let req = Request::post(format!("http://x{path}")).body(Body::empty()).unwrap();
            tower::ServiceExt::oneshot(metrics.layer(inner), req)
        };
        drop(call("/io.linkerd.proxy.identity.Identity/Certify").await.unwrap());
        drop(call("/a.B/C").await.unwrap());
        drop(call("/io.linkerd.proxy.outbound.OutboundPolicies/Watch"));

        let text = registry.render();
        let certify = r#"grpc_type="unary",grpc_service="io.linkerd.proxy.identity.Identity",grpc_method="Certify""#;
        for line in [
            format!("grpc_server_started_total{{{certify}}} 1"),
            format!("grpc_server_handled_total{{grpc_code=\"FailedPrecondition\",{certify}}} 1"),
            format!("grpc_server_handling_seconds_count{{{certify}}} 1"),
        ] {
            assert!(text.contains(&line), "no {line} in {text}");
        }
        assert!(!text.contains("a.B"));
    }
}
