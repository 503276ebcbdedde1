//! Memory of objects, values and idle streams, counted by the allocator. A control plane has tens of thousands of each.

#![cfg(test)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::body::Body;
use tonic::service::Routes;
use tower::Service as _;
use tulle_control::cluster::remote_clusters::{AllClusters, RemoteCluster, RemoteClusters};
use tulle_control::cluster::{Cluster, Config};
use tulle_control::resources::event::Event;
use tulle_control::resources::{Kind, decode};
use tulle_control::serving::Server;
use tulle_control::serving::limits::{CallKind, Limits};
use tulle_control::serving::metrics::GrpcMetrics;
use tulle_control::tls::mesh_credentials::{ClientCertificates, MeshCredentials};
use tulle_control::{destination, policy};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::destination::GetDestination;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

/// The system allocator, which also counts the bytes in use.
struct CountingAllocator;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator; counting neither allocates nor accesses the memory.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
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
static ALLOCATOR: CountingAllocator = CountingAllocator;

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

/// Returns a message in gRPC's wire format.
fn encoded(message: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut bytes).unwrap();
    bytes.freeze()
}

fn request(path: &str, message: &impl Message) -> Request<Body> {
    let body = Body::new(Full::new(encoded(message)));
    Request::post(format!("http://control/{path}")).body(body).unwrap()
}

/// Returns a pod with a sidecar, as an API server describes it.
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

/// Returns a Service of these pods, with its slice.
fn service_and_slice(service: usize, pods: Range<usize>) -> Vec<Event> {
    let endpoint = |n| {
        json!({
            "addresses": [pod_ip(n)], "nodeName": format!("node-{}", n % 100), "zone": "a",
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": pod_name(service, n)},
        })
    };
    let endpoints: Vec<Value> = pods.map(endpoint).collect();
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

/// Returns the next message of a stream, if it is ready.
fn ready_message(body: &mut Body) -> Option<Bytes> {
    // One task polls all streams; tokio's cooperative budget would be used up before the last one.
    let frame = tokio::task::unconstrained(body.frame()).now_or_never()?;
    Some(frame.unwrap().unwrap().into_data().unwrap())
}

#[tokio::test]
async fn an_idle_stream_uses_less_than_a_kilobyte() {
    let cluster = Cluster::new(Config::default(), &Registry::new());
    let service = decode(Kind::Service, &mut serde_json::Deserializer::from_str(SERVICE)).unwrap();
    let sink = cluster.sink();
    sink.apply(vec![Event::Applied(service), slice("10.2.0.1"), Event::Synced]);
    let mut gets = destination::server(
        cluster.clone(),
        ClientCertificates::Optional,
        destination::config::Config::default(),
    );
    let mut profiles = destination::server(
        cluster.clone(),
        ClientCertificates::Optional,
        destination::config::Config::default(),
    );
    let mut policies =
        policy::outbound_server(cluster, ClientCertificates::Optional, policy::config::Config::default());
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
            let bytes_per_stream = (IN_USE.load(Ordering::Relaxed) - before) / N_STREAMS;
            eprintln!("{name}, round {round}: {bytes_per_stream} bytes");
            assert!(
                bytes_per_stream < MAX_BYTES_PER_STREAM,
                "{name} uses {bytes_per_stream} bytes in round {round}"
            );
            sink.apply(vec![slice(&format!("10.2.1.{round}"))]);
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
    let sink = cluster.sink();
    let in_use = || IN_USE.load(Ordering::Relaxed);
    let check = |what: &str, size: usize, n: usize, max: usize| {
        eprintln!("{what}: {} bytes", size / n);
        assert!(size / n < max, "{what}: {} bytes", size / n);
    };
    let start = in_use();
    for service in 0..N_SERVICES {
        sink.apply((0..10).map(|n| pod(service, 10 * service + n)).collect());
    }
    let with_pods = in_use();
    check("pod", with_pods - start, 10 * N_SERVICES, MAX_BYTES_PER_POD);
    for service in 0..N_SERVICES {
        sink.apply(service_and_slice(service, 10 * service..10 * service + 10));
    }
    let with_services = in_use();
    check("Service", with_services - with_pods, N_SERVICES, MAX_BYTES_PER_SERVICE);
    sink.apply(vec![Event::Synced]);
    let mut gets = destination::server(
        cluster.clone(),
        ClientCertificates::Optional,
        destination::config::Config::default(),
    );
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
    let with_messages = in_use();
    let removing = cluster.remove_unused_encodings();
    tokio::time::timeout(Duration::from_secs(60), removing)
        .await
        .unwrap_err();
    let with_streams = in_use();
    assert!(with_messages > with_streams + N_SERVICES * 1000);
    check("value", with_streams - with_services, N_SERVICES, MAX_BYTES_PER_VALUE);
}

/// Returns a federated Service whose member is in the cluster `east`, and a node in each of two zones.
fn federated_service_and_nodes() -> Vec<Event> {
    let node = |name: &str, zone: &str| {
        let labels = json!({"topology.kubernetes.io/zone": zone});
        object(Kind::Node, json!({"metadata": {"name": name, "labels": labels}}))
    };
    let annotations = json!({"multicluster.linkerd.io/remote-discovery": "web-0@east"});
    let service = json!({
        "metadata": {"name": "all", "namespace": "shop", "annotations": annotations},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    });
    vec![
        object(Kind::Service, service),
        node("near", "a"),
        node("far", "b"),
        Event::Synced,
    ]
}

/// Waits for the next message of a stream.
async fn next_message(body: &mut Body) -> Bytes {
    let frame = tokio::time::timeout(Duration::from_secs(20), body.frame()).await;
    frame.unwrap().unwrap().unwrap().into_data().unwrap()
}

/// All clients share the endpoints of the member and one encoded message for each zone, and nothing is kept for a client that does
/// not read.
#[tokio::test]
async fn clients_of_a_federated_service_need_no_memory_for_its_endpoints() {
    let in_use = || IN_USE.load(Ordering::Relaxed);
    let cluster = Cluster::new(Config::default(), &Registry::new());
    cluster.sink().apply(federated_service_and_nodes());
    let config = Config::default().for_remote_cluster("east", "east.test", "east.test");
    let east = Cluster::new(config, &Registry::new());
    let sink = east.sink();
    sink.apply((0..2 * N_MEMBER_PODS).map(|n| pod(0, n)).collect());
    // Each replaces all endpoints.
    let endpoints = |n: usize| service_and_slice(0, n % 2 * N_MEMBER_PODS..(n % 2 + 1) * N_MEMBER_PODS);
    sink.apply(endpoints(0));
    sink.apply(vec![Event::Synced]);
    let clusters = AllClusters {
        local: cluster,
        remote: RemoteClusters::default(),
    };
    clusters.remote.set("east", RemoteCluster::Listed(east));
    let config = destination::config::Config::default();
    let mut gets = destination::server(clusters, ClientCertificates::Optional, config);
    let mut streams = Vec::with_capacity(N_STREAMS);
    let start = in_use();
    let mut with_value = 0;
    for n in 0..N_STREAMS {
        let get = GetDestination {
            path: "all.shop.svc.cluster.local:80".to_owned(),
            context_token: format!(r#"{{"ns": "shop", "nodeName": "{}"}}"#, ["near", "far"][n % 2]),
            ..GetDestination::default()
        };
        let mut stream = gets.call(request("x/Get", &get)).await.unwrap().into_body();
        assert!(next_message(&mut stream).await.len() > N_MEMBER_PODS * 100);
        streams.push(stream);
        // Then both zones have their message.
        if n == 1 {
            with_value = in_use();
        }
    }
    let check_streams = |when: &str| {
        let bytes_per_stream = in_use().saturating_sub(with_value) / N_STREAMS;
        eprintln!("stream of a federated Service, {when}: {bytes_per_stream} bytes");
        assert!(
            bytes_per_stream < MAX_BYTES_PER_STREAM,
            "{when}: {bytes_per_stream} bytes"
        );
    };
    check_streams("at the start");
    let before_changes = in_use();
    for n in 1..=N_CHANGES {
        sink.apply(endpoints(n));
        // One client reads, so that no change is skipped.
        next_message(&mut streams[0]).await;
    }
    let (growth, value) = (in_use().saturating_sub(before_changes), with_value - start);
    eprintln!("unread changes of a federated Service: {growth} bytes, its endpoints and two messages: {value} bytes");
    assert!(
        growth < value,
        "{growth} bytes; the endpoints and two messages have {value}"
    );
    for stream in &mut streams[1..] {
        next_message(stream).await;
        assert!(ready_message(stream).is_none(), "one difference");
    }
    check_streams("after all changes");
}

/// A client can request policies of Services that do not exist. No other stream shares them.
#[tokio::test(start_paused = true)]
async fn a_policy_of_a_missing_service_is_small() {
    let cluster = Cluster::new(Config::default(), &Registry::new());
    cluster.sink().apply(vec![Event::Synced]);
    let mut policies = policy::outbound_server(
        cluster.clone(),
        ClientCertificates::Optional,
        policy::config::Config::default(),
    );
    let before = IN_USE.load(Ordering::Relaxed);
    let mut streams = Vec::with_capacity(N_SERVICES);
    for n in 0..N_SERVICES {
        let traffic = TrafficSpec {
            source_workload: r#"{"ns": "shop", "pod": "a-client"}"#.to_owned(),
            target: Some(traffic_spec::Target::Authority(format!("{n:0>200}.shop.svc:80"))),
        };
        let mut stream = policies.call(request("x/Watch", &traffic)).await.unwrap().into_body();
        ready_message(&mut stream).unwrap();
        streams.push(stream);
    }
    let removing = cluster.remove_unused_encodings();
    tokio::time::timeout(Duration::from_secs(60), removing)
        .await
        .unwrap_err();
    let bytes_per_stream = (IN_USE.load(Ordering::Relaxed) - before) / N_SERVICES;
    eprintln!("policy of a missing Service: {bytes_per_stream} bytes");
    assert!(bytes_per_stream < 4_000, "{bytes_per_stream} bytes");
}

/// Returns the frames of a gRPC call whose request is one message.
fn call_frames(stream_id: u32, path: &str, message: &[u8]) -> Vec<u8> {
    // HPACK with the static table and literals without indexing.
    let mut headers = vec![0x83, 0x86];
    for (name, value) in [
        (&[0x04][..], path),
        (&[0x01], "control"),
        (&[0x0f, 0x10], "application/grpc"),
    ] {
        headers.extend(name);
        headers.push(u8::try_from(value.len()).unwrap());
        headers.extend(value.as_bytes());
    }
    let mut frames = frame(TYPE_HEADERS, END_HEADERS, stream_id, &headers);
    frames.extend(frame(TYPE_DATA, END_STREAM, stream_id, message));
    frames
}

fn frame(kind: u8, flags: u8, stream_id: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream_id.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Reads until all streams have a message. The messages fit into the initial window of the connection.
async fn read_messages(io: &mut TcpStream, n_streams: usize) {
    let mut streams = std::collections::HashSet::new();
    while streams.len() < n_streams {
        let mut header = [0; 9];
        io.read_exact(&mut header).await.unwrap();
        let length = usize::from(header[1]) << 8 | usize::from(header[2]);
        let mut payload = vec![0; length];
        io.read_exact(&mut payload).await.unwrap();
        if header[3] == TYPE_DATA {
            streams.insert(header[5..].to_vec());
        }
    }
}

/// A third of the memory is for frame buffers. h2 keeps them at the size that they had when all streams of the connection began
/// at once.
#[tokio::test]
async fn an_idle_stream_over_http2_uses_less_than_four_kilobytes() {
    let cluster = Cluster::new(Config::default(), &Registry::new());
    let service = decode(Kind::Service, &mut serde_json::Deserializer::from_str(SERVICE)).unwrap();
    cluster.sink().apply(vec![Event::Applied(service), Event::Synced]);
    let routes = Routes::new(destination::server(
        cluster,
        ClientCertificates::Optional,
        destination::config::Config::default(),
    ));
    let creds = Arc::new(MeshCredentials::new("control".to_owned(), ClientCertificates::Optional));
    let registry = Registry::new();
    let limits = Limits::from_resources(1024, None, CallKind::Streaming);
    let server = Server::new(creds, routes, GrpcMetrics::new(&registry), limits, &registry);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (_signal, watch) = drain::channel();
    tokio::spawn(server.serve("destination", listener, watch));
    let get = GetDestination {
        path: "web.shop.svc.cluster.local:80".to_owned(),
        ..GetDestination::default()
    };
    let message = encoded(&get);
    let mut connections = Vec::new();
    let mut before = 0;
    // The first connection also allocates memory that all connections share: it is not counted.
    for n in 0..=N_CONNECTIONS {
        if n == 1 {
            before = IN_USE.load(Ordering::Relaxed);
        }
        let mut io = TcpStream::connect(addr).await.unwrap();
        io.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        io.write_all(&frame(TYPE_SETTINGS, 0, 0, &[])).await.unwrap();
        for stream in 0..STREAMS_PER_CONNECTION {
            let path = "/io.linkerd.proxy.destination.Destination/Get";
            io.write_all(&call_frames(2 * stream + 1, path, &message))
                .await
                .unwrap();
        }
        read_messages(&mut io, STREAMS_PER_CONNECTION as usize).await;
        connections.push(io);
    }
    let n_streams = N_CONNECTIONS * STREAMS_PER_CONNECTION as usize;
    let bytes_per_stream = (IN_USE.load(Ordering::Relaxed) - before) / n_streams;
    eprintln!("stream over HTTP/2: {bytes_per_stream} bytes");
    assert!(bytes_per_stream < 4_000, "{bytes_per_stream} bytes");
}

/// The call that opens a stream.
type Opening = std::pin::Pin<Box<dyn Future<Output = Result<http::Response<Body>, std::convert::Infallible>> + Send>>;

/// Maximum memory of a stored pod.
const MAX_BYTES_PER_POD: usize = 700;
/// Maximum memory of a Service with a slice of ten endpoints.
const MAX_BYTES_PER_SERVICE: usize = 4_000;
/// Maximum memory of the endpoints of a Service with ten pods, and of one stream.
const MAX_BYTES_PER_VALUE: usize = 6_500;
const N_CONNECTIONS: usize = 20;
const STREAMS_PER_CONNECTION: u32 = 100;
const TYPE_DATA: u8 = 0;
const TYPE_HEADERS: u8 = 1;
const TYPE_SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const N_SERVICES: usize = 500;
const N_MEMBER_PODS: usize = 1000;
/// Changes of a federated Service. The number is odd, so that the last differs from the state before the first.
const N_CHANGES: usize = 11;
const N_STREAMS: usize = 1000;
/// Maximum memory of a stream, not counting HTTP/2 and the task of the stream.
const MAX_BYTES_PER_STREAM: usize = 1000;
