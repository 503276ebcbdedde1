//! Tracing: a collector receives spans of sampled requests, with the right parents.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::codegen::Service as _;
use tonic::{Response, Status};
use tulle_proto::trace::any_value::Value;
use tulle_proto::trace::span::SpanKind;
use tulle_proto::trace::trace_service_server::{TraceService, TraceServiceServer};
use tulle_proto::trace::{ExportTraceServiceRequest, ExportTraceServiceResponse, KeyValue, Span};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{Http1, empty, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, mesh};

/// An OTLP collector.
struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A running collector, and the requests that it has received.
struct SpanReceiver {
    exports: mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
    _server: App,
}

impl SpanReceiver {
    async fn start() -> Self {
        let (sender, exports) = mpsc::unbounded_channel();
        let listener = TcpListener::bind(COLLECTOR).await.unwrap();
        let service = TraceServiceServer::new(Collector(sender));
        let answer = move |req: Request<Incoming>| {
            let mut service = service.clone();
            async move { service.call(req).await }
        };
        let server = apps::serve_tcp(listener, move |stream| {
            let http2 = http2::Builder::new(TokioExecutor::new());
            let serving = http2.serve_connection(TokioIo::new(stream), service_fn(answer.clone()));
            async move { serving.await.unwrap_or_default() }
        });
        Self {
            exports,
            _server: server,
        }
    }

    /// Waits for `n` spans, by service, direction and span kind.
    async fn wait_for_spans(&mut self, n: usize) -> BTreeMap<(String, String, SpanKind), Span> {
        let mut all = BTreeMap::new();
        while all.len() < n {
            for spans_of_resource in self.exports.recv().await.unwrap().resource_spans {
                let service = value(&spans_of_resource.resource.unwrap().attributes, "service.name");
                for span in spans_of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                    let key = (service.clone(), value(&span.attributes, "direction"), span.kind());
                    all.insert(key, span);
                }
            }
        }
        all
    }
}

fn value(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|found| found.value.clone()?.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        None => panic!("{key} is not among {attributes:?}"),
    }
}

/// Sends one request from a client to `web`, and runs a test with the spans after both proxies have ended.
fn run_with_tracing(sampling: &str, traceparent: Option<&str>, test: impl AsyncFnOnce(String, SpanReceiver) + Send) {
    let mesh = mesh()
        .env("TRACE_COLLECTOR_SVC_ADDR", COLLECTOR)
        .env("TULLE_PROXY_TRACE_SAMPLING", sampling);
    let mesh = mesh.workload("client").workload_env("TRACE_SERVICE_NAME", "client");
    let mesh = mesh
        .workload("web")
        .workload_env("TRACE_EXTRA_ATTRIBUTES", "service.name=web");
    mesh.run(async |mesh: &Mesh| {
        let spans = SpanReceiver::start().await;
        let (context_tx, mut contexts) = mpsc::unbounded_channel();
        let _app = apps::serve_http(mesh.listen("web", HTTP).await, move |req| {
            let context = req
                .headers()
                .get("traceparent")
                .map(|value| value.to_str().unwrap().to_owned());
            context_tx.send(context.unwrap_or_default()).unwrap();
            async { http::Response::new(empty()) }
        });
        let mut req = Request::get("/cart?item=1").header("host", "web.test");
        if let Some(traceparent) = traceparent {
            req = req.header("traceparent", traceparent).header("tracestate", "shop=1");
        }
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let answer = client.fetch(req.body(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status, 200);
        drop(client);
        // Remaining spans are exported at shutdown.
        for workload in ["client", "web"] {
            mesh.shut_down(workload);
            mesh.wait_for_exit(workload).await;
        }
        test(contexts.recv().await.unwrap(), spans).await;
    });
}

/// The spans of a request in order from client to server; each is the parent of the next.
async fn chain(spans: &mut SpanReceiver) -> Vec<Span> {
    let all = spans.wait_for_spans(4).await;
    let hops = [
        ("client", "outbound", SpanKind::Server),
        ("client", "outbound", SpanKind::Client),
        ("web", "inbound", SpanKind::Server),
        ("web", "inbound", SpanKind::Client),
    ];
    let of = |(service, direction, kind): (&str, &str, SpanKind)| {
        all[&(service.to_owned(), direction.to_owned(), kind)].clone()
    };
    let chain: Vec<_> = hops.into_iter().map(of).collect();
    for pair in chain.windows(2) {
        assert_eq!(pair[1].parent_span_id, pair[0].span_id);
        assert_eq!(pair[1].trace_id, pair[0].trace_id);
    }
    chain
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_recorded_trace_has_a_span_at_each_end_of_each_proxy() {
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    run_with_tracing("0", Some(&sampled), async |context: String, mut spans: SpanReceiver| {
        let chain = chain(&mut spans).await;
        assert_eq!(
            (hex(&chain[0].trace_id), hex(&chain[0].parent_span_id)),
            (TRACE.into(), PARENT.into())
        );
        assert_eq!(context, format!("00-{TRACE}-{}-01", hex(&chain[3].span_id)));
        for span in &chain {
            assert_eq!((span.name.as_str(), span.trace_state.as_str()), ("/cart", "shop=1"));
            for (key, expected) in [
                ("http.request.method", "GET"),
                ("server.address", "web.test"),
                ("http.response.status_code", "200"),
            ] {
                assert_eq!(value(&span.attributes, key), expected);
            }
        }
    });
}

#[test]
fn the_first_proxy_starts_traces_if_sampling_is_enabled() {
    run_with_tracing("1", None, async |context: String, mut spans: SpanReceiver| {
        let chain = chain(&mut spans).await;
        assert!(chain[0].parent_span_id.is_empty());
        assert_eq!(
            context,
            format!("00-{}-{}-01", hex(&chain[0].trace_id), hex(&chain[3].span_id))
        );
    });
}

#[test]
fn contexts_of_unsampled_traces_pass_unchanged() {
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    run_with_tracing(
        "1",
        Some(&unsampled),
        async |context: String, mut spans: SpanReceiver| {
            assert_eq!(context, unsampled);
            assert!(spans.exports.try_recv().is_err());
        },
    );
    run_with_tracing("0", None, async |context: String, mut spans: SpanReceiver| {
        assert_eq!(context, "");
        assert!(spans.exports.try_recv().is_err());
    });
}

#[test]
fn unauthorized_clients_create_no_spans() {
    let mesh = mesh()
        .flag("--default-policy=all-authenticated")
        .env("INBOUND_DEFAULT_POLICY", "all-authenticated")
        .env("TRACE_COLLECTOR_SVC_ADDR", COLLECTOR);
    mesh.workload("web").run(async |mesh: &Mesh| {
        let mut spans = SpanReceiver::start().await;
        apps::start_echo(mesh, "web").await;
        let send_request = async |from| {
            let mut client = Http1::handshake(mesh.dial_inbound(from, "web", HTTP).await).await;
            let req = Request::get("/").header("host", "web.test");
            let req = req.header("traceparent", format!("00-{TRACE}-{PARENT}-01"));
            client.fetch(req.body(empty()).unwrap()).await.unwrap().status.as_u16()
        };
        assert_eq!(send_request(UNMESHED_IP).await, 403);
        eventually("clients on the same host are permitted", async || {
            (send_request(Ipv4Addr::LOCALHOST).await == 200).then_some(())
        })
        .await;
        mesh.shut_down("web");
        mesh.wait_for_exit("web").await;
        let n_spans = |request: ExportTraceServiceRequest| request.resource_spans[0].scope_spans[0].spans.len();
        assert_eq!(
            spans.exports.recv().await.map(n_spans),
            Some(2),
            "those of the request that was permitted"
        );
        assert!(spans.exports.try_recv().is_err());
    });
}

#[test]
fn batches_and_the_spans_in_them_are_counted() {
    let mesh = mesh()
        .workload("client")
        .workload_env("TRACE_COLLECTOR_SVC_ADDR", COLLECTOR);
    let mesh = mesh.workload_env("TULLE_PROXY_TRACE_SAMPLING", "1");
    mesh.workload("web").run(async |mesh: &Mesh| {
        let mut spans = SpanReceiver::start().await;
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        // A full batch is sent immediately.
        let batch = loop {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            if let Ok(batch) = spans.exports.try_recv() {
                break batch;
            }
        };
        let n_spans = batch.resource_spans[0].scope_spans[0].spans.len();
        for (name, expected) in [
            ("opentelemetry_span_exports", n_spans as f64),
            ("opentelemetry_span_export_requests", 1.0),
            ("opentelemetry_span_export_streams", 1.0),
        ] {
            eventually(&format!("{name} is {expected}"), async || {
                (mesh.metric("client", name, &[]).await == expected).then_some(())
            })
            .await;
        }
    });
}

const COLLECTOR: &str = "127.0.0.1:4317";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
