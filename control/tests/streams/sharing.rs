//! Streams with equal messages share their bytes: a message is encoded once for all subscribers.

use bytes::{BufMut, Bytes, BytesMut};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message;
use tonic::body::Body;
use tower::Service;
use tulle_control::cluster::remote_clusters::AllClusters;
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, policy};
use tulle_proto::destination::{GetDestination, Update};
use tulle_proto::inbound::PortSpec;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

use crate::harness::{Mesh, mesh, update_summary, with_timeout};
use crate::remote_clusters::{exported, federation, link, service};

const WEB_MANIFESTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.247.0.10, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web}}
spec: {containers: []}
status: {podIP: 10.1.0.1}
";

const SECOND: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web-2, namespace: shop, labels: {app: web}}
spec: {containers: []}
status: {podIP: 10.1.0.2}
";

const WEB: &str = "web.shop.svc.cluster.local:80";

const NODES: &str = "
---
apiVersion: v1
kind: Node
metadata: {name: near, labels: {topology.kubernetes.io/zone: east}}
---
apiVersion: v1
kind: Node
metadata: {name: far, labels: {topology.kubernetes.io/zone: west}}
";

/// Returns the response body of a stream.
async fn open<S>(service: &mut S, method: &str, message: &impl Message) -> Body
where
    S: Service<Request<Body>, Response = http::Response<Body>, Error = std::convert::Infallible>,
{
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut bytes).unwrap();
    let req = Request::post(format!("http://control/a.Service/{method}"));
    let req = req.body(Body::new(Full::new(bytes.freeze()))).unwrap();
    with_timeout(service.call(req)).await.unwrap().into_body()
}

async fn data(body: &mut Body) -> Bytes {
    with_timeout(body.frame()).await.unwrap().unwrap().into_data().unwrap()
}

fn are_shared(one: &Bytes, other: &Bytes) -> bool {
    (one.as_ptr(), one.len()) == (other.as_ptr(), other.len())
}

fn update(bytes: &Bytes) -> String {
    update_summary(&Update::decode(&bytes[5..]).unwrap())
}

/// Splits the bytes of several messages into the updates.
fn updates(mut bytes: &[u8]) -> Vec<String> {
    let mut all = Vec::new();
    while let Some((prefix, rest)) = bytes.split_first_chunk::<5>() {
        let [_, length @ ..] = prefix;
        let (message, rest) = rest.split_at(usize::try_from(u32::from_be_bytes(*length)).unwrap());
        all.push(update_summary(&Update::decode(message).unwrap()));
        bytes = rest;
    }
    all
}

fn get(path: &str, node: &str) -> GetDestination {
    GetDestination {
        path: path.to_owned(),
        context_token: format!(r#"{{"ns":"shop","nodeName":"{node}"}}"#),
        ..GetDestination::default()
    }
}

fn destination(
    mesh: &Mesh,
) -> impl Service<Request<Body>, Response = http::Response<Body>, Error = std::convert::Infallible> {
    let clusters = AllClusters {
        local: mesh.cluster.clone(),
        remote: mesh.remote_clusters.clone(),
    };
    destination::server(
        clusters,
        ClientCertificates::Optional,
        destination::config::Config::default(),
    )
}

#[tokio::test]
async fn clients_in_one_zone_share_every_message_and_others_do_not() {
    let mesh = mesh(&(WEB_MANIFESTS.to_owned() + NODES)).await;
    let mut service = destination(&mesh);
    let mut streams = Vec::new();
    for node in ["near", "near", "far", "unknown"] {
        streams.push(open(&mut service, "Get", &get(WEB, node)).await);
    }
    let [one, other, far, unknown] = &mut *streams else {
        unreachable!()
    };
    let (first, second) = (data(one).await, data(other).await);
    assert_eq!(update(&first), "+10.1.0.1:8080");
    assert!(are_shared(&first, &second));
    let elsewhere = [data(far).await, data(unknown).await];
    assert!(elsewhere.iter().all(|theirs| !are_shared(&first, theirs)));

    mesh.manifests.write("second.yaml", SECOND);
    let (first, second) = (data(one).await, data(other).await);
    assert_eq!(update(&first), "+10.1.0.2:8080");
    assert!(are_shared(&first, &second));
    // A new stream gets both addresses in one message.
    let late = data(&mut open(&mut service, "Get", &get(WEB, "near")).await).await;
    assert_eq!(update(&late), "+10.1.0.1:8080,10.1.0.2:8080");
}

#[tokio::test]
async fn services_with_other_settings_do_not_share() {
    let mesh = mesh(&(WEB_MANIFESTS.to_owned() + NODES)).await;
    let near = get(WEB, "near");
    let first = data(&mut open(&mut destination(&mesh), "Get", &near).await).await;
    let config = destination::config::Config {
        zone_weights: destination::config::ZoneWeights::PreferLocal,
        ..destination::config::Config::default()
    };
    let mut other = destination::server(mesh.cluster.clone(), ClientCertificates::Optional, config);
    assert!(!are_shared(
        &first,
        &data(&mut open(&mut other, "Get", &near).await).await
    ));
}

#[tokio::test]
async fn profiles_and_policies_are_shared_by_all() {
    let mesh = mesh(&(WEB_MANIFESTS.to_owned() + NODES)).await;
    let mut service = destination(&mesh);
    // A response is kept while it has a subscriber.
    let mut followed = open(&mut service, "GetProfile", &get(WEB, "near")).await;
    let mut other = open(&mut service, "GetProfile", &get(WEB, "far")).await;
    assert!(are_shared(&data(&mut followed).await, &data(&mut other).await));

    let mut inbound = policy::inbound_server(mesh.cluster.clone(), ClientCertificates::Optional);
    let port = PortSpec {
        workload: "shop:web-1".to_owned(),
        port: 8080,
    };
    let mut followed = open(&mut inbound, "WatchPort", &port).await;
    let mut once = open(&mut inbound, "GetPort", &port).await;
    assert!(are_shared(&data(&mut followed).await, &data(&mut once).await));

    let mut outbound = policy::outbound_server(
        mesh.cluster.clone(),
        ClientCertificates::Optional,
        policy::config::Config::default(),
    );
    let traffic = TrafficSpec {
        source_workload: "shop:client".to_owned(),
        target: Some(traffic_spec::Target::Authority(WEB.to_owned())),
    };
    let mut followed = open(&mut outbound, "Watch", &traffic).await;
    let mut once = open(&mut outbound, "Get", &traffic).await;
    assert!(are_shared(&data(&mut followed).await, &data(&mut once).await));
}

/// A rollout of 1000 pods of another cluster, with 500 clients of a federated Service in two zones.
#[tokio::test]
async fn clients_of_a_federated_service_share_every_message_of_a_rollout() {
    let pods = |step: usize| {
        let ips = (step * N_REPLACED..step * N_REPLACED + N_PODS).map(|n| format!("10.2.{}.{}", n / 250, n % 250 + 1));
        let ips: Vec<_> = ips.collect();
        exported("app", &ips.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let members = federation("multicluster.linkerd.io/remote-discovery: app@east");
    let mesh = mesh(&(service("web", &members) + NODES)).await;
    let east = link(&mesh, "east", &pods(0)).await;
    let mut destination = destination(&mesh);
    let mut streams = Vec::new();
    for n in 0..N_CLIENTS {
        let node = ["near", "far"][n % 2];
        streams.push(open(&mut destination, "Get", &get(WEB, node)).await);
    }
    let n_computed = || {
        let page = east.registry.render();
        let series = "endpoints_updates{cluster=\"east\",namespace=\"shop\",service=\"app\",port=\"80\"";
        page.lines()
            .find_map(|line| line.strip_prefix(series)?.rsplit(' ').next()?.parse::<usize>().ok())
    };
    let n_before = n_computed().unwrap();
    for step in 0..N_STEPS {
        if step > 0 {
            east.manifests.write("mesh.yaml", &pods(step));
        }
        let mut messages = Vec::new();
        for stream in &mut streams {
            messages.push(data(stream).await);
        }
        // One encoding for each zone.
        let [near, far, ..] = &messages[..] else { unreachable!() };
        assert!(!are_shared(near, far));
        for (n, message) in messages.iter().enumerate() {
            assert!(are_shared(message, [near, far][n % 2]), "client {n} in step {step}");
        }
        let sizes = |updates: &[String]| -> Vec<_> {
            let size = |update: &String| (update.starts_with('+'), update.split(',').count());
            updates.iter().map(size).collect()
        };
        let expected = match step {
            0 => vec![(true, N_PODS)],
            _ => vec![(true, N_REPLACED), (false, N_REPLACED)],
        };
        assert_eq!(sizes(&updates(near)), expected, "step {step}");
        // Each step is computed once.
        assert_eq!(n_computed(), Some(n_before + step));
    }
}

const N_CLIENTS: usize = 500;
const N_PODS: usize = 1000;
/// Pods that each step of the rollout replaces.
const N_REPLACED: usize = 50;
const N_STEPS: usize = 4;
