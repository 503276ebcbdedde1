//! Streams with equal messages share their bytes: a message is encoded once for all subscribers.

use bytes::{BufMut, Bytes, BytesMut};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use prost::Message;
use tonic::body::Body;
use tower::Service;
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, policy};
use tulle_proto::destination::{GetDestination, Update};
use tulle_proto::inbound::PortSpec;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

use crate::harness::{Mesh, mesh, update_summary, with_timeout};

const MANIFESTS: &str = "
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
---
apiVersion: v1
kind: Node
metadata: {name: near, labels: {topology.kubernetes.io/zone: east}}
---
apiVersion: v1
kind: Node
metadata: {name: far, labels: {topology.kubernetes.io/zone: west}}
";

const SECOND: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web-2, namespace: shop, labels: {app: web}}
spec: {containers: []}
status: {podIP: 10.1.0.2}
";

const WEB: &str = "web.shop.svc.cluster.local:80";

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
    destination::server(
        mesh.cluster.clone(),
        ClientCertificates::Optional,
        destination::config::Config::default(),
    )
}

#[tokio::test]
async fn clients_in_one_zone_share_every_message_and_others_do_not() {
    let mesh = mesh(MANIFESTS).await;
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
    let mesh = mesh(MANIFESTS).await;
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
    let mesh = mesh(MANIFESTS).await;
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
