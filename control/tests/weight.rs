//! Memory of an idle stream, counted by the allocator. A control plane has tens of thousands of streams.

#![allow(clippy::too_many_lines)]
#![cfg(test)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message;
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

type Opening = std::pin::Pin<Box<dyn Future<Output = Result<http::Response<Body>, std::convert::Infallible>> + Send>>;

const N_STREAMS: usize = 1000;
/// Maximum bytes per stream, without HTTP/2 and the task of the stream.
const MAX_BYTES_PER_STREAM: usize = 1000;
