//! Memory of objects, values and idle streams, counted by the allocator. A control plane has tens of thousands of each.

#![allow(clippy::too_many_lines)]
#![cfg(test)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message;
use serde_json::{Value, json};
use tonic::body::Body;
use tower::Service as _;
use tulle_control::cluster::{Cluster, Config};
use tulle_control::resources::event::Event;
use tulle_control::resources::{Kind, decode};
use tulle_control::{destination, policy};
use tulle_core::metrics::Registry;
use tulle_proto::destination::GetDestination;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

/// The system allocator, which also counts the bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator; counting neither allocates nor accesses the memory.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SERVICE: &str = r#"{"metadata": {"name": "web", "namespace": "shop"}, "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}}"#;

fn slice(first: &str) -> Event {
    let others = (1..100).map(|n| format!(r#", {{"addresses": ["10.1.0.{n}"]}}"#));
    let json = format!(
        r#"{{"metadata": {{"name": "web-1", "namespace": "shop", "labels": {{"kubernetes.io/service-name": "web"}}}},
            "addressType": "IPv4", "ports": [{{"port": 8080}}], "endpoints": [{{"addresses": ["{first}"]}}{}]}}"#,
        others.collect::<String>()
    );
    Event::Applied(decode(Kind::EndpointSlice, &mut serde_json::Deserializer::from_str(&json)).unwrap())
}

fn request(path: &str, message: &impl Message) -> Request<Body> {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut bytes).unwrap();
    let body = Body::new(Full::new(bytes.freeze()));
    Request::post(format!("http://control/{path}")).body(body).unwrap()
}

/// A pod with a sidecar, as an API server describes it.
fn pod(service: usize, n: usize) -> Event {
    let app = format!("app-{service}");
    let (ip, host_ip) = (pod_ip(n), "192.168.0.1");
    let env = [("INBOUND", 4143), ("ADMIN", 4191), ("CONTROL", 4190)].map(
        |(name, port)| json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": format!("[::]:{port}")}),
    );
    let probe = |path| json!({"httpGet": {"path": path, "port": 4191}});
    object(
        Kind::Pod,
        json!({
            "metadata": {
                "name": pod_name(service, n), "namespace": "shop",
                "labels": {
                    "app": app, "pod-template-hash": "5d59c8f6b7",
                    "linkerd.io/control-plane-ns": "linkerd", "linkerd.io/workload-ns": "shop",
                },
                "annotations": {"linkerd.io/inject": "enabled", "linkerd.io/created-by": "linkerd/proxy-injector"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{app}-5d59c8f6b7"), "uid": "1"}],
            },
            "spec": {
                "nodeName": format!("node-{}", n % 100), "serviceAccountName": app,
                "initContainers": [{
                    "name": "linkerd-proxy", "restartPolicy": "Always", "env": env,
                    "ports": [{"name": "linkerd-proxy", "containerPort": 4143}, {"name": "linkerd-admin", "containerPort": 4191}],
                    "livenessProbe": probe("/live"), "readinessProbe": probe("/ready"),
                }],
                "containers": [{"name": "app", "ports": [{"name": "http", "containerPort": 8080}]}],
            },
            "status": {
                "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": host_ip, "hostIPs": [{"ip": host_ip}],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }),
    )
}

/// A Service of ten pods, with its slice.
fn service_and_slice(service: usize) -> Vec<Event> {
    let endpoint = |n| {
        json!({
            "addresses": [pod_ip(n)], "nodeName": format!("node-{}", n % 100), "zone": "a",
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": pod_name(service, n)},
        })
    };
    let endpoints: Vec<Value> = (10 * service..10 * service + 10).map(endpoint).collect();
    let ip = format!("10.96.{}.{}", service / 250, service % 250);
    vec![
        object(
            Kind::Service,
            json!({
                "metadata": {"name": format!("web-{service}"), "namespace": "shop", "uid": "3d2a8d5e-9f57-4c1e-8f5a-1c8f2b6a7d10"},
                "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ports": [{"port": 80, "targetPort": 8080}]},
            }),
        ),
        object(
            Kind::EndpointSlice,
            json!({
                "metadata": {
                    "name": format!("web-{service}-x"), "namespace": "shop",
                    "labels": {"kubernetes.io/service-name": format!("web-{service}")},
                },
                "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": endpoints,
            }),
        ),
    ]
}

fn pod_name(service: usize, n: usize) -> String {
    format!("app-{service}-5d59c8f6b7-{n:05}")
}

fn pod_ip(n: usize) -> String {
    format!("10.1.{}.{}", n / 250, n % 250)
}

fn object(kind: Kind, value: Value) -> Event {
    Event::Applied(decode(kind, value).unwrap())
}

/// The next message of a stream, if it is ready.
fn ready_message(body: &mut Body) -> Option<Bytes> {
    // One task polls all streams; its coop budget would be used up before the last one.
    let frame = tokio::task::unconstrained(body.frame()).now_or_never()?;
    Some(frame.unwrap().unwrap().into_data().unwrap())
}

#[tokio::test]
async fn an_idle_stream_uses_less_than_a_kilobyte() {
    let cluster = Cluster::new(Config::default(), &Registry::new());
    let service = decode(Kind::Service, &mut serde_json::Deserializer::from_str(SERVICE)).unwrap();
    let writer = cluster.writer();
    writer.apply(vec![Event::Applied(service), slice("10.2.0.1"), Event::Synced]);
    let mut gets = destination::server(cluster.clone(), destination::config::Config::default());
    let mut profiles = destination::server(cluster.clone(), destination::config::Config::default());
    let mut policies = policy::outbound_server(cluster, policy::config::Config::default());
    let destination = GetDestination {
        path: "web.shop.svc.cluster.local:80".to_owned(),
        context_token: r#"{"ns": "shop", "nodeName": "a-node", "pod": "a-client"}"#.to_owned(),
        ..GetDestination::default()
    };
    let traffic = TrafficSpec {
        source_workload: r#"{"ns": "shop", "pod": "a-client"}"#.to_owned(),
        target: Some(traffic_spec::Target::Authority(
            "web.shop.svc.cluster.local:80".to_owned(),
        )),
    };
    let check = async |name: &str, open: &mut dyn FnMut() -> Opening| {
        // The first stream computes the response, which all streams share.
        let mut first = open().await.unwrap().into_body();
        ready_message(&mut first).unwrap();
        let before = IN_USE.load(Ordering::Relaxed);
        let mut streams = Vec::with_capacity(N_STREAMS);
        for _ in 0..N_STREAMS {
            streams.push(open().await.unwrap().into_body());
        }
        for round in 0..4 {
            for stream in &mut streams {
                let message = ready_message(stream);
                assert!(message.is_some() || round > 0, "{name} has no first message");
                assert!(ready_message(stream).is_none(), "{name} has more than one message");
            }
            let weight = (IN_USE.load(Ordering::Relaxed) - before) / N_STREAMS;
            eprintln!("{name}, round {round}: {weight} bytes");
            assert!(
                weight < MAX_BYTES_PER_STREAM,
                "{name} uses {weight} bytes in round {round}"
            );
            writer.apply(vec![slice(&format!("10.2.1.{round}"))]);
        }
    };
    check("Get", &mut || gets.call(request("x/Get", &destination))).await;
    check("GetProfile", &mut || {
        profiles.call(request("x/GetProfile", &destination))
    })
    .await;
    check("Watch", &mut || policies.call(request("x/Watch", &traffic))).await;
}

#[tokio::test(start_paused = true)]
async fn objects_and_values_are_small() {
    let cluster = Cluster::new(Config::default(), &Registry::new());
    let writer = cluster.writer();
    let in_use = || IN_USE.load(Ordering::Relaxed);
    let check = |what: &str, size: usize, n: usize, max: usize| {
        eprintln!("{what}: {} bytes", size / n);
        assert!(size / n < max, "{what}: {} bytes", size / n);
    };
    let start = in_use();
    for service in 0..N_SERVICES {
        writer.apply((0..10).map(|n| pod(service, 10 * service + n)).collect());
    }
    let with_pods = in_use();
    check("pod", with_pods - start, 10 * N_SERVICES, MAX_BYTES_PER_POD);
    for service in 0..N_SERVICES {
        writer.apply(service_and_slice(service));
    }
    let with_services = in_use();
    check("Service", with_services - with_pods, N_SERVICES, MAX_BYTES_PER_SERVICE);
    writer.apply(vec![Event::Synced]);
    let mut gets = destination::server(cluster.clone(), destination::config::Config::default());
    let mut streams = Vec::with_capacity(N_SERVICES);
    for service in 0..N_SERVICES {
        let get = GetDestination {
            path: format!("web-{service}.shop.svc.cluster.local:80"),
            ..GetDestination::default()
        };
        let mut stream = gets.call(request("x/Get", &get)).await.unwrap().into_body();
        assert!(ready_message(&mut stream).unwrap().len() > 10 * 100);
        streams.push(stream);
    }
    let with_messages = in_use() - with_services;
    let removing = cluster.remove_unused_encodings();
    tokio::time::timeout(Duration::from_secs(60), removing)
        .await
        .unwrap_err();
    let with_streams = in_use();
    assert!(with_messages > with_streams - with_services + N_SERVICES * 1000);
    check("value", with_streams - with_services, N_SERVICES, MAX_BYTES_PER_VALUE);
}

type Opening = std::pin::Pin<Box<dyn Future<Output = Result<http::Response<Body>, std::convert::Infallible>> + Send>>;

/// A stored pod.
const MAX_BYTES_PER_POD: usize = 700;
/// A Service with a slice of ten endpoints.
const MAX_BYTES_PER_SERVICE: usize = 4_000;
/// The endpoints of a Service with ten pods, and one stream.
const MAX_BYTES_PER_VALUE: usize = 6_500;
const N_SERVICES: usize = 500;
const N_STREAMS: usize = 1000;
/// Maximum bytes per stream, without HTTP/2 and the task of the stream.
const MAX_BYTES_PER_STREAM: usize = 1000;
