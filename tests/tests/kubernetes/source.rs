//! Changes of objects on an API server reach the streams of proxies.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::{Status, Streaming};
use tulle_control::cluster::Cluster;
use tulle_control::resources::event::{Event, EventSink};
use tulle_control::resources::labels::Labels;
use tulle_control::resources::service::EndpointsSource;
use tulle_control::resources::{self, Kind, Object};
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_control::source::kubernetes::{self, SourceError};
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, kubernetes as client};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{DestinationProfile, GetDestination, Update, update};
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

/// The destination service with an API server as its source, called in this process.
struct DestinationFixture {
    api: ApiServer,
    cluster: Cluster,
    registry: Registry,
    source: JoinHandle<Result<(), SourceError>>,
    _signal: drain::Signal,
}

impl Drop for DestinationFixture {
    fn drop(&mut self) {
        self.source.abort();
    }
}

/// Starts an API server with namespace `shop` and these objects, and waits until all of them are loaded.
async fn start_fixture(objects: &[Value]) -> DestinationFixture {
    let api = ApiServer::start().await.unwrap();
    api.create_namespace("shop").await.unwrap();
    for object in objects {
        apply(&api, object).await;
    }
    let registry = Registry::new();
    let (signal, drain) = drain::channel();
    let cluster = Cluster::new(tulle_control::cluster::Config::default(), &registry);
    let access = client::Config {
        kubeconfig: Some(api.kubeconfig()),
        ..client::Config::default()
    };
    let config = kubernetes::Config {
        requirements: WatchRequirements {
            destination: true,
            policy: false,
            endpoints_source: EndpointsSource::EndpointSlices,
        },
        log_addr: ":8086".to_owned(),
        stale_kinds: Readiness::new(),
    };
    let client = client::client(&access, &registry).await.unwrap();
    let source = kubernetes::run(client, config, cluster.sink(), registry.clone(), drain);
    let source = tokio::spawn(source);
    with_timeout(cluster.synced()).await;
    DestinationFixture {
        api,
        cluster,
        registry,
        source,
        _signal: signal,
    }
}

async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(60), future)
        .await
        .expect("the result arrives within a minute")
}

/// Applies an object with its status.
async fn apply(api: &ApiServer, object: &Value) {
    let path = api.dir().join("object.json");
    std::fs::write(&path, object.to_string()).unwrap();
    let path = path.to_str().unwrap();
    api.kubectl(&["apply", "-f", path]).await.unwrap();
    if object.get("status").is_some() {
        api.kubectl(&[
            "apply",
            "--subresource=status",
            "--server-side",
            "--force-conflicts",
            "-f",
            path,
        ])
        .await
        .unwrap();
    }
}

impl DestinationFixture {
    fn destination(&self) -> DestinationClient<tulle_control::grpc::Service<destination::server::Service>> {
        let config = destination::config::Config::default();
        DestinationClient::new(destination::server(
            self.cluster.clone(),
            ClientCertificates::Optional,
            config,
        ))
    }

    async fn get(&self, path: &str) -> Result<Streaming<Update>, Status> {
        with_timeout(self.destination().get(target(path)))
            .await
            .map(tonic::Response::into_inner)
    }

    async fn profile(&self, path: &str) -> Streaming<DestinationProfile> {
        with_timeout(self.destination().get_profile(target(path)))
            .await
            .unwrap()
            .into_inner()
    }

    fn has_metric_line(&self, line: &str) -> bool {
        self.registry.render().lines().any(|other| other == line)
    }
}

fn target(path: &str) -> GetDestination {
    GetDestination {
        path: path.to_owned(),
        context_token: r#"{"ns":"shop","nodeName":"node-a","pod":"client"}"#.to_owned(),
        ..GetDestination::default()
    }
}

async fn next<T>(stream: &mut Streaming<T>) -> T {
    with_timeout(stream.message())
        .await
        .unwrap()
        .expect("the stream is open")
}

/// An update as text: `+` or `-` with addresses, or whether the service exists (`true` or `false`).
fn describe_update(update: Update) -> String {
    let socket = |addr| std::net::SocketAddr::try_from(addr).unwrap().to_string();
    match update.update.unwrap() {
        update::Update::Add(set) => {
            let addrs = set.addrs.into_iter().map(|weighted| socket(weighted.addr.unwrap()));
            format!("+{}", addrs.collect::<Vec<_>>().join(","))
        }
        update::Update::Remove(set) => {
            let addrs: Vec<_> = set.addrs.into_iter().map(socket).collect();
            format!("-{}", addrs.join(","))
        }
        update::Update::NoEndpoints(none) => none.exists.to_string(),
    }
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"clusterIP": "10.247.0.100", "ports": [{"name": "http", "port": 80}]},
    })
}

fn slice(addresses: &[&str]) -> Value {
    let endpoint = |ip: &&str| {
        json!({
            "addresses": [ip], "zone": "a", "nodeName": "node-a",
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": pod_name(ip)},
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "http", "port": 8080}],
        "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

fn pod_name(ip: &str) -> String {
    format!("web-{}", ip.replace('.', "-"))
}

fn pod(ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod_name(ip), "namespace": "shop", "labels": {"app": "web"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d", "uid": "u"}],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": "web", "image": "web", "ports": [{"containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "192.168.0.1", "hostIPs": [{"ip": "192.168.0.1"}]},
    })
}

fn replica_set() -> Value {
    let template =
        json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "web", "image": "web"}]}});
    json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet",
        "metadata": {
            "name": "web-5d", "namespace": "shop",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "v"}],
        },
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "web"}}, "template": template},
    })
}

fn node() -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "labels": {"topology.kubernetes.io/zone": "a"}}})
}

const WEB: &str = "web.shop.svc.cluster.local:80";

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_follow_the_slices_of_an_api_server() {
    let fixture = start_fixture(&[
        node(),
        replica_set(),
        pod("10.1.0.1"),
        pod("10.1.0.2"),
        service(),
        slice(&["10.1.0.1"]),
    ])
    .await;
    let mut stream = fixture.get(WEB).await.unwrap();
    let first = next(&mut stream).await;
    let Some(update::Update::Add(set)) = &first.update else {
        panic!("no addition: {first:?}")
    };
    let labels = &set.addrs[0].metric_labels;
    let labels = ["pod", "deployment", "zone", "zone_locality"].map(|key| labels.get(key).map(String::as_str));
    assert_eq!(labels, [Some("web-10-1-0-1"), Some("web"), Some("a"), Some("local")]);
    assert_eq!(describe_update(first), "+10.1.0.1:8080");

    apply(&fixture.api, &slice(&["10.1.0.2"])).await;
    assert_eq!(describe_update(next(&mut stream).await), "+10.1.0.2:8080");
    assert_eq!(describe_update(next(&mut stream).await), "-10.1.0.1:8080");
    fixture
        .api
        .kubectl(&["delete", "endpointslice", "-n", "shop", "web-1"])
        .await
        .unwrap();
    assert_eq!(describe_update(next(&mut stream).await), "-10.1.0.2:8080");
    assert_eq!(describe_update(next(&mut stream).await), "true");
    fixture
        .api
        .kubectl(&["delete", "service", "-n", "shop", "web"])
        .await
        .unwrap();
    assert_eq!(describe_update(next(&mut stream).await), "false");
    assert_eq!(
        fixture.get(WEB).await.unwrap_err().message(),
        "Service web.shop not found"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_found_by_its_address_from_its_start_to_its_deletion() {
    let fixture = start_fixture(&[]).await;
    let mut stream = fixture.profile("10.1.0.1:8080").await;
    let pod_of = |profile: DestinationProfile| profile.endpoint.unwrap().metric_labels.remove("pod");
    assert_eq!(pod_of(next(&mut stream).await), None);
    apply(&fixture.api, &pod("10.1.0.1")).await;
    assert_eq!(pod_of(next(&mut stream).await).as_deref(), Some("web-10-1-0-1"));
    let delete = [
        "delete",
        "pod",
        "-n",
        "shop",
        "web-10-1-0-1",
        "--force",
        "--grace-period=0",
    ];
    fixture.api.kubectl(&delete).await.unwrap();
    assert_eq!(pod_of(next(&mut stream).await), None);
}

fn server_definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "servers.policy.linkerd.io"},
        "spec": {
            "group": "policy.linkerd.io", "scope": "Namespaced",
            "names": {"plural": "servers", "singular": "server", "kind": "Server"},
            "versions": [{
                "name": "v1beta3", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn kinds_are_watched_while_their_definition_is_installed() {
    let mut meshed = pod("10.1.0.1");
    meshed["metadata"]["labels"]["linkerd.io/control-plane-ns"] = "linkerd".into();
    let env = ["ADMIN:4191", "CONTROL:4190", "INBOUND:4143"].map(|entry| {
        let (name, port) = entry.split_once(':').unwrap();
        json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": format!("0.0.0.0:{port}")})
    });
    meshed["spec"]["containers"] = json!([{"name": "linkerd-proxy", "image": "proxy", "env": env}]);
    let fixture = start_fixture(&[meshed]).await;
    let mut stream = fixture.profile("10.1.0.1:8080").await;
    assert!(!next(&mut stream).await.opaque_protocol);

    apply(&fixture.api, &server_definition()).await;
    let established = ["wait", "--for=condition=established", "crd/servers.policy.linkerd.io"];
    fixture.api.kubectl(&established).await.unwrap();
    let server = json!({
        "apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"podSelector": {}, "port": 8080, "proxyProtocol": "opaque"},
    });
    apply(&fixture.api, &server).await;
    assert!(next(&mut stream).await.opaque_protocol);
    assert!(fixture.has_metric_line(r#"server_cache_size{cluster="local"} 1"#));

    // An object that cannot be decoded does not end the watch of the others.
    let mut bad = server.clone();
    bad["metadata"]["name"] = "bad".into();
    bad["spec"]["port"] = json!([]);
    apply(&fixture.api, &bad).await;
    fixture
        .api
        .kubectl(&["delete", "crd", "servers.policy.linkerd.io"])
        .await
        .unwrap();
    assert!(!next(&mut stream).await.opaque_protocol);
    eventually("the cache is empty", async || {
        fixture
            .has_metric_line(r#"server_cache_size{cluster="local"} 0"#)
            .then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_and_no_secret_is_requested() {
    let fixture = start_fixture(&[]).await;
    let page = fixture.registry.render();
    let is_counted = |line: &str| {
        page.lines()
            .any(|other| other.starts_with(line) && !other.ends_with(" 0"))
    };
    for line in [
        r#"http_client_requests_total{client="k8s",code="200",method="get"}"#,
        r#"http_client_requests_total{client="l5dCrd",code="404",method="get"}"#,
        r#"http_client_request_latency_seconds_count{client="k8s"}"#,
        r#"endpointslices_cache_size{cluster="local"}"#,
    ] {
        assert!(is_counted(line), "{line} is not in\n{page}");
    }
    assert!(!page.contains("secret_cache_size"), "{page}");
    assert!(page.contains(r#"tulle_kind_is_stale{kind="servers"} 0"#), "{page}");
}

/// Reads an object as JSON, and removes what the source removes: the resource version, and labels that are not used.
async fn decode_json(api: &ApiServer, kind: Kind, name: &str) -> Object {
    let json = api
        .kubectl(&["get", "-n", "shop", kind.info().name, name, "-o", "json"])
        .await
        .unwrap();
    let mut object = resources::decode(kind, &mut serde_json::Deserializer::from_str(&json)).unwrap();
    let meta = object.meta_mut();
    if kind != Kind::EndpointSlice {
        meta.version = String::new();
    }
    if !has_labels(kind) {
        meta.labels = Labels::default();
    }
    object
}

/// Whether the source keeps the labels of a kind that is read in protobuf.
fn has_labels(kind: Kind) -> bool {
    matches!(kind, Kind::EndpointSlice | Kind::Pod | Kind::Node)
}

/// EndpointSlices with all fields, set, empty or left out. This control plane manages the second one, and so keeps all of it.
fn slices_read_in_protobuf() -> [Value; 3] {
    [
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": "web-1", "namespace": "shop",
                "labels": { "kubernetes.io/service-name": "web", "app": "web" },
                "annotations": { "mirror.linkerd.io/remote-gateway-identity": "gw", "other.example/note": "x" },
            },
            "ports": [
                { "name": "http", "port": 8080, "protocol": "TCP", "appProtocol": "http" },
                { "name": "dns", "port": 53, "protocol": "UDP" },
                { "name": "", "port": 9000 },
                { "name": "all" },
            ],
            "endpoints": [
                {
                    "addresses": ["10.1.0.5"], "hostname": "web-0", "nodeName": "node-a", "zone": "east",
                    "conditions": { "ready": true, "serving": true, "terminating": false },
                    "hints": { "forZones": [{ "name": "east" }, { "name": "west" }], "forNodes": [{ "name": "node-a" }] },
                    "targetRef": { "kind": "Pod", "namespace": "shop", "name": "web", "uid": "u" },
                },
                { "addresses": ["10.1.0.6", "10.1.0.7"], "zone": "", "hints": {} },
                {
                    "addresses": ["10.1.0.8"], "conditions": { "ready": false, "serving": true, "terminating": true },
                    "targetRef": { "kind": "ExternalWorkload", "name": "vm" },
                },
                { "addresses": ["10.1.0.9"], "conditions": { "ready": false }, "targetRef": { "kind": "Node", "name": "a" } },
            ],
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv6",
            "metadata": {
                "name": "web-vm", "generateName": "web-", "namespace": "shop", "finalizers": ["other.example/kept"],
                "labels": { "endpointslice.kubernetes.io/managed-by": "linkerd-external-workloads-controller" },
                "annotations": { "other.example/note": "x" },
                "ownerReferences": [{
                    "apiVersion": "v1", "kind": "Service", "name": "web", "uid": "u",
                    "controller": true, "blockOwnerDeletion": false,
                }],
            },
            "ports": [{ "name": "http", "port": 8080, "appProtocol": "kubernetes.io/h2c" }],
            "endpoints": [{
                "addresses": ["fd00::5", "fd00::6"], "conditions": { "ready": true },
                "hints": { "forNodes": [{ "name": "node-a" }] },
                "targetRef": {
                    "apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload", "namespace": "shop", "name": "vm",
                    "uid": "u", "resourceVersion": "7", "fieldPath": "spec",
                },
            }],
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "FQDN",
            "metadata": { "name": "names", "namespace": "shop" },
            "endpoints": [{ "addresses": ["web.example.com"] }], "ports": [],
        }),
    ]
}

/// Objects of each other kind that is read in protobuf.
fn objects_read_in_protobuf() -> [Value; 5] {
    [
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "web", "namespace": "shop",
                "labels": { "app": "web", "linkerd.io/control-plane-ns": "linkerd" },
                "annotations": { "config.linkerd.io/opaque-ports": "25", "other.example/note": "x" },
                "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "u", "controller": true }],
            },
            "spec": {
                "hostname": "web-0", "subdomain": "peers", "nodeName": "node-a",
                "initContainers": [{
                    "name": "linkerd-proxy", "image": "proxy", "restartPolicy": "Always",
                    "env": [
                        { "name": "LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "value": "0.0.0.0:4191" },
                        { "name": "LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "value": "0.0.0.0:4190" },
                        { "name": "LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "value": "0.0.0.0:4143" },
                        { "name": "EMPTY" },
                    ],
                }],
                "containers": [{
                    "name": "web", "image": "web",
                    "ports": [
                        { "containerPort": 8080, "name": "http", "hostPort": 8081 },
                        { "containerPort": 53, "protocol": "UDP" },
                        { "containerPort": 9000 },
                    ],
                    "livenessProbe": { "httpGet": { "path": "/live?x=1", "port": "http" } },
                    "readinessProbe": { "httpGet": { "port": 9000 } },
                    "startupProbe": { "tcpSocket": { "port": 9000 } },
                }],
            },
            "status": {
                "phase": "Running", "podIP": "10.1.0.5", "podIPs": [{ "ip": "10.1.0.5" }, { "ip": "fd00::5" }],
                "hostIP": "10.0.0.1", "hostIPs": [{ "ip": "10.0.0.1" }],
                "conditions": [{ "type": "Ready", "status": "True" }],
            },
        }),
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "bare", "namespace": "shop" },
            "spec": { "hostNetwork": true, "containers": [{ "name": "a", "image": "a" }] },
        }),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "node-a", "labels": { "topology.kubernetes.io/zone": "east" } },
        }),
        json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "once", "namespace": "shop" },
            "spec": { "template": { "spec": { "restartPolicy": "Never", "containers": [{ "name": "a", "image": "a" }] } } },
        }),
        json!({
            "apiVersion": "apps/v1", "kind": "ReplicaSet",
            "metadata": {
                "name": "web", "namespace": "shop",
                "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u", "controller": true }],
            },
            "spec": {
                "selector": { "matchLabels": { "app": "web" } },
                "template": {
                    "metadata": { "labels": { "app": "web" } },
                    "spec": { "containers": [{ "name": "a", "image": "a" }] },
                },
            },
        }),
    ]
}

/// Each kind that is read in protobuf: the decoded objects of a list and of a watch equal those decoded from JSON.
#[tokio::test]
async fn objects_in_protobuf_equal_those_in_json() {
    let api = ApiServer::start().await.unwrap();
    api.create_namespace("shop").await.unwrap();
    let objects = [&objects_read_in_protobuf()[..], &slices_read_in_protobuf()].concat();
    for object in &objects {
        apply(&api, object).await;
    }
    let (events, mut reported) = tokio::sync::mpsc::unbounded_channel();
    let sink = EventSink::new(move |batch| {
        // Fails only after the end of the test.
        batch.into_iter().for_each(|event| drop(events.send(event)));
    });
    let access = client::Config {
        kubeconfig: Some(api.kubeconfig()),
        ..client::Config::default()
    };
    let config = kubernetes::Config {
        requirements: WatchRequirements {
            destination: true,
            policy: false,
            endpoints_source: EndpointsSource::EndpointSlices,
        },
        log_addr: ":8086".to_owned(),
        stale_kinds: Readiness::new(),
    };
    let (_signal, drain) = drain::channel();
    let client = client::client(&access, &Registry::new()).await.unwrap();
    let source = tokio::spawn(kubernetes::run(client, config, sink, Registry::new(), drain));
    let mut applied = Vec::new(); // the kinds are reported in any order
    for change in ["listed", "watched"] {
        for object in &objects {
            let (kind, name) = (
                object["kind"].as_str().unwrap(),
                object["metadata"]["name"].as_str().unwrap(),
            );
            let known_kind = Kind::find(object["apiVersion"].as_str().unwrap(), kind).unwrap();
            if change == "watched" {
                let label = format!("change={change}");
                api.kubectl(&["label", "-n", "shop", kind, name, &label]).await.unwrap();
                if !has_labels(known_kind) {
                    continue;
                }
            }
            let expected = decode_json(&api, known_kind, name).await;
            let receiving = async {
                while !applied.contains(&expected) {
                    if let Some(Event::Applied(object)) = reported.recv().await {
                        applied.push(object);
                    }
                }
            };
            let received = timeout(Duration::from_secs(60), receiving).await;
            assert!(received.is_ok(), "{expected:#?} was not {change}, only {applied:#?}");
        }
    }
    api.kubectl(&["delete", "-n", "shop", "pod", "web", "--force", "--grace-period=0"])
        .await
        .unwrap();
    with_timeout(async {
        while !matches!(reported.recv().await, Some(Event::Deleted(Kind::Pod, name)) if &*name.name == "web") {}
    })
    .await;
    source.abort();
}
