//! Responses of `Get` for Services whose endpoints are in other clusters.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use tonic::{Code, Streaming};
use tulle_control::cluster::Config;
use tulle_control::cluster::remote_clusters::RemoteCluster;
use tulle_control::destination;
use tulle_core::log_capture::LogCapture;
use tulle_proto::destination::tls_identity::Strategy;
use tulle_proto::destination::{Update, WeightedAddrSet, update};

use crate::harness::{Mesh, eventually, mesh, mesh_with, next, target, update_summary, with_timeout};

const WEB: &str = "web.shop.svc.cluster.local:80";

/// Returns a Service without pods of its own.
pub(crate) fn service(name: &str, metadata: &str) -> String {
    format!(
        "
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop, {metadata}}}
spec: {{clusterIP: None, ports: [{{name: http, port: 80}}]}}
"
    )
}

fn mirror_of(cluster: &str, service: &str) -> String {
    format!(
        "labels: {{multicluster.linkerd.io/remote-discovery: {cluster}, multicluster.linkerd.io/remote-service: {service}}}"
    )
}

pub(crate) fn federation(annotations: &str) -> String {
    format!("annotations: {{{annotations}}}")
}

/// Returns a Service whose pods listen on port 8080, and these pods, by address.
pub(crate) fn exported(name: &str, ips: &[&str]) -> String {
    let mut yaml = format!(
        "
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec:
  clusterIP: 10.247.0.10
  internalTrafficPolicy: Local
  selector: {{app: {name}}}
  ports: [{{name: http, port: 80, targetPort: 8080}}]
"
    );
    for ip in ips {
        yaml += &pod(name, ip, "mesh-system");
    }
    yaml
}

fn pod(app: &str, ip: &str, control_plane: &str) -> String {
    let name = format!("{app}-{}", ip.replace(['.', ':'], "-"));
    format!(
        "
---
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: shop
  labels: {{app: {app}, linkerd.io/control-plane-ns: {control_plane}}}
spec:
  serviceAccountName: web
  nodeName: node1
  containers: [{{name: web, ports: [{{containerPort: 8080}}]}}]
status: {{podIP: {ip}}}
"
    )
}

/// Another cluster with these objects, linked to `mesh`.
pub(crate) async fn link(mesh: &Mesh, name: &str, yaml: &str) -> Mesh {
    let domain = format!("{name}.test");
    let config = Config::default().for_remote_cluster(name, &domain, &domain);
    let remote = mesh_with(yaml, config).await;
    set(mesh, name, RemoteCluster::Listed(remote.cluster.clone()));
    remote
}

fn set(mesh: &Mesh, name: &str, state: RemoteCluster) {
    mesh.remote_clusters.set(name, state);
}

async fn next_summary(stream: &mut Streaming<Update>) -> String {
    update_summary(&next(stream).await)
}

async fn next_set(stream: &mut Streaming<Update>) -> WeightedAddrSet {
    match next(stream).await.update {
        Some(update::Update::Add(set)) => set,
        other => panic!("no addition: {other:?}"),
    }
}

#[tokio::test]
async fn a_mirror_has_the_endpoints_of_the_other_cluster() {
    let mesh = mesh(&service("web", &mirror_of("east", "app"))).await;
    let east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    let set = next_set(&mut stream).await;
    for (label, value) in [("namespace", "shop"), ("service", "app"), ("target_cluster", "east")] {
        assert_eq!(set.metric_labels[label], value);
    }
    let [addr] = &set.addrs[..] else { panic!("{set:?}") };
    let socket = std::net::SocketAddr::try_from(addr.addr.unwrap()).unwrap();
    assert_eq!(socket.to_string(), "10.2.0.1:8080");
    assert_eq!(addr.metric_labels["pod"], "app-10-2-0-1");
    // The control plane of the other cluster can be in another namespace.
    let identity = "web.shop.serviceaccount.identity.mesh-system.east.test";
    let tls = addr.tls_identity.as_ref().unwrap();
    assert!(
        matches!(&tls.strategy, Some(Strategy::DnsLikeIdentity(name)) if name.name == identity),
        "{tls:?}"
    );
    east.manifests
        .write("more.yaml", &pod("app", "10.2.0.2", "mesh-system"));
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.2:8080");
    east.manifests.write("mesh.yaml", &exported("app", &[]));
    assert_eq!(next_summary(&mut stream).await, "-10.2.0.1:8080");
    east.manifests.remove("more.yaml");
    assert_eq!(next_summary(&mut stream).await, "-10.2.0.2:8080");
    assert_eq!(next_summary(&mut stream).await, "1");
    east.manifests.write("mesh.yaml", "");
    assert_eq!(next_summary(&mut stream).await, "0");
    let page = east.registry.render();
    let series = "endpoints_subscribers{cluster=\"east\",namespace=\"shop\",service=\"app\",port=\"80\",hostname=\"\",nodename=\"\"} 1";
    assert!(page.contains(series), "{page}");
}

#[tokio::test]
async fn a_mirror_has_the_external_workloads_of_the_other_cluster() {
    let workload = "
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, namespace: shop, labels: {app: app}}
spec:
  meshTLS: {identity: 'spiffe://east.test/vm', serverName: vm.shop}
  ports: [{port: 8080}]
  workloadIPs: [{ip: 10.2.0.9}]
status: {conditions: [{type: Ready, status: 'True'}]}
";
    let mesh = mesh(&service("web", &mirror_of("east", "app"))).await;
    let _east = link(&mesh, "east", &(exported("app", &["10.2.0.1"]) + workload)).await;
    let set = next_set(&mut mesh.get(WEB).await.unwrap()).await;
    let [pod, vm] = &set.addrs[..] else { panic!("{set:?}") };
    assert_eq!(pod.metric_labels["pod"], "app-10-2-0-1");
    assert_eq!(vm.metric_labels["external_workload"], "vm");
    let strategy = vm.tls_identity.as_ref().and_then(|tls| tls.strategy.as_ref());
    assert!(
        matches!(strategy, Some(Strategy::UriLikeIdentity(uri)) if uri.uri == "spiffe://east.test/vm"),
        "{strategy:?}"
    );
}

#[tokio::test]
async fn a_mirror_without_a_service_or_a_cluster_is_refused_with_the_reason() {
    let yaml = service("unnamed", "labels: {multicluster.linkerd.io/remote-discovery: east}")
        + &service("web", &mirror_of("north", "app"))
        + &service("alias", &mirror_of("east", "alias"))
        + &service("missing", &mirror_of("east", "missing"));
    let mesh = mesh(&yaml).await;
    let alias = "
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: shop}
spec: {type: ExternalName, externalName: app.example}
";
    let _east = link(&mesh, "east", alias).await;
    for (name, code, message) in [
        ("unnamed", Code::FailedPrecondition, "missing remote service name"),
        ("web", Code::NotFound, "Remote cluster not found: north"),
        ("alias", Code::InvalidArgument, "alias.shop.svc"),
    ] {
        let status = mesh
            .get(&format!("{name}.shop.svc.cluster.local:80"))
            .await
            .unwrap_err();
        assert_eq!(status.code(), code, "{name}");
        assert!(status.message().contains(message), "{status}");
    }
    let mut stream = mesh.get("missing.shop.svc.cluster.local:80").await.unwrap();
    assert_eq!(next_summary(&mut stream).await, "0");
}

#[tokio::test]
async fn a_stream_waits_for_its_cluster_and_follows_it_when_it_is_linked_again() {
    let mesh = mesh(&service("web", &mirror_of("east", "app"))).await;
    mesh.remote_clusters.expect_links();
    let opening = mesh.get(WEB);
    tokio::pin!(opening);
    assert!(timeout(Duration::from_millis(100), &mut opening).await.is_err());
    let first = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let mut stream = with_timeout(opening).await.unwrap();
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.1:8080");
    // Its objects are listed again, with new credentials: only the difference is sent.
    let _second = link(&mesh, "east", &exported("app", &["10.2.0.1", "10.2.0.2"])).await;
    drop(first);
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.2:8080");
    set(&mesh, "east", RemoteCluster::Unlinked);
    assert_eq!(next_summary(&mut stream).await, "-10.2.0.1:8080,10.2.0.2:8080");
    assert_eq!(next_summary(&mut stream).await, "0");
    let _third = link(&mesh, "east", &exported("app", &["10.2.0.3"])).await;
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.3:8080");
}

#[tokio::test]
async fn a_stream_that_begins_while_its_cluster_is_listed_waits_although_others_are_open() {
    let mesh = mesh(&service("web", &mirror_of("east", "app"))).await;
    let first = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    // All streams of one service share the endpoints of the other cluster.
    let mut client = mesh.destination(destination::config::Config::default());
    let mut open = with_timeout(client.get(target(WEB, ""))).await.unwrap().into_inner();
    assert_eq!(next_summary(&mut open).await, "+10.2.0.1:8080");
    set(&mesh, "east", RemoteCluster::Unlinked);
    assert_eq!(next_summary(&mut open).await, "-10.2.0.1:8080");
    assert_eq!(next_summary(&mut open).await, "0");
    let refused = with_timeout(client.get(target(WEB, ""))).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    // A client that reconnects now must not replace its endpoints by none.
    set(&mesh, "east", RemoteCluster::Pending { since: Instant::now() });
    let opening = client.get(target(WEB, ""));
    tokio::pin!(opening);
    assert!(timeout(Duration::from_millis(100), &mut opening).await.is_err());
    drop(first);
    let _second = link(&mesh, "east", &exported("app", &["10.2.0.2"])).await;
    let mut stream = with_timeout(opening).await.unwrap().into_inner();
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.2:8080");
    assert_eq!(next_summary(&mut open).await, "+10.2.0.2:8080");
}

#[tokio::test]
async fn clients_try_again_if_a_cluster_is_not_listed_in_time() {
    let only_remote = federation("multicluster.linkerd.io/remote-discovery: app@east");
    let mesh = mesh(&(service("web", &mirror_of("east", "app")) + &service("all", &only_remote))).await;
    mesh.remote_clusters.expect_links();
    tokio::time::pause();
    // Without endpoints nothing is sent, because clients would replace those that they have.
    for name in ["web", "all"] {
        let start = Instant::now();
        let status = mesh
            .get(&format!("{name}.shop.svc.cluster.local:80"))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("clusters east"), "{status}");
        // Proxies wait three seconds for the first message.
        assert!(start.elapsed() < Duration::from_secs(3));
    }
}

#[tokio::test]
async fn members_that_are_known_are_served_while_another_cluster_stays_unknown() {
    let members =
        federation("multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: app@east");
    let prefer_local = members.replace('}', ", config.tulle.dev/prefer-local: 'true'}");
    let cluster_wide = exported("app", &["10.1.0.1"]).replace("Policy: Local", "Policy: Cluster");
    let mesh = mesh(&(service("web", &members) + &service("local", &prefer_local) + &cluster_wide)).await;
    mesh.remote_clusters.expect_links();
    tokio::time::pause();
    let start = Instant::now();
    let mut local = mesh.get("local.shop.svc.cluster.local:80").await.unwrap();
    assert_eq!(next_summary(&mut local).await, "+10.1.0.1:8080");
    // A client that supports fallback endpoints does not wait for them either.
    let node1 = r#"{"ns":"shop","nodeName":"node1"}"#;
    let mut with_fallback = mesh
        .get_with_fallback("local.shop.svc.cluster.local:80", node1)
        .await
        .unwrap();
    assert_eq!(next_marked(&mut with_fallback).await, "+10.1.0.1:8080");
    assert!(start.elapsed() < Duration::from_secs(1));
    // The wait is counted from the time when the cluster became unknown, not from the request. Otherwise, clients that give up
    // earlier would never be served.
    for _ in 0..3 {
        let opening = timeout(Duration::from_millis(900), mesh.get(WEB)).await;
        if start.elapsed() < Duration::from_secs(2) {
            assert!(opening.is_err());
        }
    }
    let mut stream = mesh.get(WEB).await.unwrap();
    assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080");
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.1:8080");
    assert_eq!(next_marked(&mut with_fallback).await, "+10.2.0.1:8080?");
}

#[tokio::test]
async fn a_federated_service_has_the_endpoints_of_all_members() {
    let members = federation(
        "multicluster.linkerd.io/local-discovery: app, \
         multicluster.linkerd.io/remote-discovery: 'app@north,api@east,invalid,app@west'",
    );
    let mesh = mesh(&(service("web", &members) + &exported("app", &["10.1.0.1"]))).await;
    let token = r#"{"ns":"shop","nodeName":"node1"}"#;
    let _east = link(&mesh, "east", &exported("api", &["10.2.0.1"])).await;
    let north = link(&mesh, "north", &exported("app", &["10.3.0.1"])).await;
    // West is not linked.
    let mut stream = mesh.get_from(WEB, token).await.unwrap();
    // Proxies take the first addition of a stream for the complete state.
    let added = next_set(&mut stream).await;
    let expected = [
        ("app", None, "10.1.0.1:8080"),
        ("app", Some("north"), "10.3.0.1:8080"),
        ("api", Some("east"), "10.2.0.1:8080"),
    ];
    assert_eq!(added.addrs.len(), expected.len(), "{added:?}");
    for (found, (service, cluster, addr)) in added.addrs.iter().zip(expected) {
        let label = |name: &str| found.metric_labels.get(name).map(String::as_str);
        assert_eq!((label("namespace"), label("service")), (Some("shop"), Some(service)));
        assert_eq!(label("target_cluster"), cluster);
        let socket = std::net::SocketAddr::try_from(found.addr.unwrap()).unwrap();
        assert_eq!(socket.to_string(), addr);
    }
    // Of the local member only the endpoints on the client's node are used, because its Service says so.
    let mut elsewhere = mesh.get_from(WEB, r#"{"ns":"shop","nodeName":"node2"}"#).await.unwrap();
    assert_eq!(next_summary(&mut elsewhere).await, "+10.3.0.1:8080,10.2.0.1:8080");
    // A member without endpoints does not mean that the Service has none.
    north.manifests.write("mesh.yaml", &exported("app", &[]));
    assert_eq!(next_summary(&mut stream).await, "-10.3.0.1:8080");
    // Members join and leave open streams, and clusters are linked later.
    let _west = link(&mesh, "west", &exported("app", &["10.4.0.1"])).await;
    assert_eq!(next_summary(&mut stream).await, "+10.4.0.1:8080");
    let only = federation("multicluster.linkerd.io/remote-discovery: app@west");
    mesh.manifests
        .write("mesh.yaml", &(service("web", &only) + &exported("app", &["10.1.0.1"])));
    assert_eq!(next_summary(&mut stream).await, "-10.1.0.1:8080,10.2.0.1:8080");
    set(&mesh, "west", RemoteCluster::Unlinked);
    assert_eq!(next_summary(&mut stream).await, "-10.4.0.1:8080");
    assert_eq!(next_summary(&mut stream).await, "0");
}

/// `yaml` with a second port of the Services, whose number is 81.
fn with_second_port(yaml: &str) -> String {
    let yaml = yaml.replace("port: 80}]", "port: 80}, {name: more, port: 81}]");
    yaml.replace(
        "targetPort: 8080}]",
        "targetPort: 8080}, {name: more, port: 81, targetPort: 8081}]",
    )
}

#[tokio::test]
async fn a_member_that_lacks_a_port_of_the_federated_service_has_no_endpoints_for_it() {
    let members = federation(
        "multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: 'app@north,app@east'",
    );
    let federated = with_second_port(&service("web", &members));
    let local = exported("app", &["10.1.0.1"]).replace("Policy: Local", "Policy: Cluster");
    let mesh = mesh(&(federated.clone() + &with_second_port(&local))).await;
    let north = link(&mesh, "north", &exported("app", &["10.2.0.1"])).await;
    let _east = link(&mesh, "east", &with_second_port(&exported("app", &["10.3.0.1"]))).await;
    let mut first_port = mesh.get(WEB).await.unwrap();
    assert_eq!(
        next_summary(&mut first_port).await,
        "+10.1.0.1:8080,10.2.0.1:8080,10.3.0.1:8080"
    );
    let mut second_port = mesh.get("web.shop.svc.cluster.local:81").await.unwrap();
    assert_eq!(next_summary(&mut second_port).await, "+10.1.0.1:8081,10.3.0.1:8081");
    // The number of a port that the federated Service lacks, too, is used unchanged, as with other Services.
    let mut unlisted = mesh.get("web.shop.svc.cluster.local:82").await.unwrap();
    assert_eq!(
        next_summary(&mut unlisted).await,
        "+10.1.0.1:82,10.2.0.1:82,10.3.0.1:82"
    );
    // Members get the port, or lose it, while the stream is open.
    north
        .manifests
        .write("mesh.yaml", &with_second_port(&exported("app", &["10.2.0.1"])));
    assert_eq!(next_summary(&mut second_port).await, "+10.2.0.1:8081");
    mesh.manifests.write("mesh.yaml", &(federated + &local));
    assert_eq!(next_summary(&mut second_port).await, "-10.1.0.1:8081");
}

#[tokio::test]
async fn an_address_of_two_members_is_that_of_the_first() {
    let members = federation("multicluster.linkerd.io/remote-discovery: 'app@north,app@east'");
    let mesh = mesh(&service("web", &members)).await;
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1", "10.2.0.2"])).await;
    let north = link(&mesh, "north", &exported("app", &["10.2.0.1"])).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    let set = next_set(&mut stream).await;
    let clusters: Vec<_> = set
        .addrs
        .iter()
        .map(|addr| &*addr.metric_labels["target_cluster"])
        .collect();
    assert_eq!(clusters, ["north", "east"]);
    assert_eq!(
        update_summary(&Update {
            update: Some(update::Update::Add(set))
        }),
        "+10.2.0.1:8080,10.2.0.2:8080"
    );
    // When the first member loses the address, it becomes that of the next member. It is not removed.
    north.manifests.write("mesh.yaml", &exported("app", &[]));
    let set = next_set(&mut stream).await;
    assert_eq!(set.metric_labels["target_cluster"], "east");
    assert_eq!(
        update_summary(&Update {
            update: Some(update::Update::Add(set))
        }),
        "+10.2.0.1:8080"
    );
    north.manifests.write("mesh.yaml", &exported("app", &["10.2.0.9"]));
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.9:8080");
}

#[tokio::test]
async fn an_address_of_the_local_member_is_local_with_a_warning_for_each_pair_of_clusters() {
    let members = federation(
        "multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: 'app@north,app@east'",
    );
    let with_local = |ips: &[&str]| {
        let cluster_wide = exported("app", ips).replace("Policy: Local", "Policy: Cluster");
        service("web", &members) + &cluster_wide
    };
    let log = LogCapture::start();
    let mesh = mesh(&with_local(&["10.2.0.1"])).await;
    let _north = link(&mesh, "north", &exported("app", &["10.2.0.1", "10.2.0.2"])).await;
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1", "10.2.0.2"])).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    assert_eq!(addrs_by_cluster(&next_set(&mut stream).await), ["local", "north"]);
    for _ in 0..2 {
        mesh.manifests.write("mesh.yaml", &with_local(&[]));
        assert_eq!(addrs_by_cluster(&next_set(&mut stream).await), ["north"]);
        mesh.manifests.write("mesh.yaml", &with_local(&["10.2.0.1"]));
        assert_eq!(addrs_by_cluster(&next_set(&mut stream).await), ["local"]);
    }
    let warnings = log.lines_with("pods with the same address");
    let pairs = [("north", "local"), ("east", "local"), ("east", "north")];
    assert_eq!(warnings.len(), pairs.len(), "{warnings:#?}");
    for (warning, (cluster, other)) in warnings.iter().zip(pairs) {
        for name in [cluster, other] {
            assert!(warning.contains(&format!("\"{name}\"")), "{name}: {warning}");
        }
    }
}

/// The clusters of the addresses in a message, in its order.
fn addrs_by_cluster(set: &WeightedAddrSet) -> Vec<&str> {
    let label = "target_cluster";
    let of_set = set.metric_labels.get(label);
    let clusters = set.addrs.iter().map(|addr| addr.metric_labels.get(label).or(of_set));
    clusters.map(|name| name.map_or("local", String::as_str)).collect()
}

#[tokio::test]
async fn a_deleted_federated_service_has_no_endpoints_until_it_is_created_again() {
    let members =
        federation("multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: app@east");
    let member = exported("app", &["10.1.0.1"]).replace("Policy: Local", "Policy: Cluster");
    let all = service("web", &members) + &member;
    let mesh = mesh(&all).await;
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080,10.2.0.1:8080");
    mesh.manifests.write("mesh.yaml", &member);
    assert_eq!(next_summary(&mut stream).await, "-10.1.0.1:8080,10.2.0.1:8080");
    assert_eq!(next_summary(&mut stream).await, "0");
    assert_eq!(mesh.get(WEB).await.unwrap_err().code(), Code::NotFound);
    mesh.manifests.write("mesh.yaml", &all);
    assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080,10.2.0.1:8080");
}

#[tokio::test]
async fn members_of_other_clusters_are_used_with_prefer_local_only_while_the_local_one_does_not_serve_all_clients() {
    let with_local = |ips: &[&str]| service("web", &prefer_local()) + &cluster_wide(ips);
    let mesh = mesh(&with_local(&["10.1.0.1"])).await;
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080");
    mesh.manifests.write("mesh.yaml", &with_local(&[]));
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.1:8080");
    assert_eq!(next_summary(&mut stream).await, "-10.1.0.1:8080");
    mesh.manifests.write("mesh.yaml", &with_local(&["10.1.0.2"]));
    assert_eq!(next_summary(&mut stream).await, "+10.1.0.2:8080");
    assert_eq!(next_summary(&mut stream).await, "-10.2.0.1:8080");
    // A pod that is being deleted is not ready.
    mesh.manifests
        .write("mesh.yaml", &terminating(&with_local(&["10.1.0.2"])));
    assert_eq!(next_summary(&mut stream).await, "+10.2.0.1:8080");
    // If the internal traffic policy of the local Service is `Local`, the endpoints of the other members are used, too.
    let node_scoped = service("web", &prefer_local()) + &exported("app", &["10.1.0.3"]);
    mesh.manifests.write("mesh.yaml", &node_scoped);
    assert_eq!(next_summary(&mut stream).await, "-10.1.0.2:8080");
}

/// The metadata of a federated Service whose clients prefer its local member `app` to `app` in `east`.
fn prefer_local() -> String {
    federation(
        "multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: app@east, \
         config.tulle.dev/prefer-local: 'true'",
    )
}

/// The Service `app`, whose pods serve clients on all nodes.
fn cluster_wide(ips: &[&str]) -> String {
    exported("app", ips).replace("internalTrafficPolicy: Local", "internalTrafficPolicy: Cluster")
}

/// The same objects, with pods that are being deleted.
fn terminating(yaml: &str) -> String {
    yaml.replace(
        "labels: {app",
        "deletionTimestamp: '2026-01-01T00:00:00Z'\n  labels: {app",
    )
}

/// The endpoint 10.1.0.1 of the Service `app`, which is about to end and still serves.
const TERMINATING_SLICE: &str = "
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: app-1, namespace: shop, labels: {kubernetes.io/service-name: app}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.1.0.1], conditions: {ready: false, serving: true, terminating: true}}]
";

/// The next message of a stream, with `?` after each fallback endpoint.
async fn next_marked(stream: &mut Streaming<Update>) -> String {
    let update = next(stream).await;
    let summary = update_summary(&update);
    let Some(update::Update::Add(set)) = update.update else {
        return summary;
    };
    let addrs = summary.trim_start_matches('+').split(',').zip(&set.addrs);
    let marked = addrs.map(|(addr, weighted)| format!("{addr}{}", if weighted.is_fallback { "?" } else { "" }));
    format!("+{}", marked.collect::<Vec<_>>().join(","))
}

#[tokio::test]
async fn members_of_other_clusters_are_fallback_endpoints_with_prefer_local_for_clients_that_support_them() {
    let with_local = |ips: &[&str]| service("web", &prefer_local()) + &cluster_wide(ips);
    let mesh = mesh(&with_local(&["10.1.0.1"])).await;
    let east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let node1 = r#"{"ns":"shop","nodeName":"node1"}"#;
    let mut stream = mesh.get_with_fallback(WEB, node1).await.unwrap();
    assert_eq!(next_marked(&mut stream).await, "+10.1.0.1:8080,10.2.0.1:8080?");
    east.manifests
        .write("more.yaml", &pod("app", "10.2.0.2", "mesh-system"));
    assert_eq!(next_marked(&mut stream).await, "+10.2.0.2:8080?");
    // Terminating endpoints are not preferred. The local one is sent again, because it has no labels of a pod any more.
    let terminating = with_local(&[]) + TERMINATING_SLICE;
    mesh.manifests.write("mesh.yaml", &terminating);
    let all = "+10.1.0.1:8080,10.2.0.1:8080,10.2.0.2:8080";
    assert_eq!(next_marked(&mut stream).await, all);
    mesh.manifests.write("mesh.yaml", &with_local(&["10.1.0.1"]));
    let marked = "+10.1.0.1:8080,10.2.0.1:8080?,10.2.0.2:8080?";
    assert_eq!(next_marked(&mut stream).await, marked);
    mesh.manifests.write("mesh.yaml", &with_local(&[]));
    assert_eq!(next_marked(&mut stream).await, "-10.1.0.1:8080");
    // With the internal traffic policy `Local`, a client without a local endpoint on its node has only fallback endpoints.
    let node_scoped = service("web", &prefer_local()) + &exported("app", &["10.1.0.3"]);
    mesh.manifests.write("mesh.yaml", &node_scoped);
    assert_eq!(next_marked(&mut stream).await, "+10.1.0.3:8080");
    let node2 = r#"{"ns":"shop","nodeName":"node2"}"#;
    let mut elsewhere = mesh.get_with_fallback(WEB, node2).await.unwrap();
    assert_eq!(next_marked(&mut elsewhere).await, "+10.2.0.1:8080?,10.2.0.2:8080?");
    // Without the annotation all members are equal.
    let all = node_scoped.replace("prefer-local: 'true'", "prefer-local: 'false'");
    mesh.manifests.write("mesh.yaml", &all);
    assert_eq!(next_marked(&mut elsewhere).await, "+10.2.0.1:8080,10.2.0.2:8080");
}

#[tokio::test]
async fn a_change_of_the_kind_of_discovery_reaches_open_streams() {
    let cluster_wide = |name: &str, ip: &str| exported(name, &[ip]).replace("Policy: Local", "Policy: Cluster");
    let local = cluster_wide("web", "10.1.0.1");
    let members =
        federation("multicluster.linkerd.io/local-discovery: app, multicluster.linkerd.io/remote-discovery: app@east");
    let mirror = service("web", &mirror_of("east", "app"));
    let federated = service("web", &members) + &cluster_wide("app", "10.1.0.2");
    let mesh = mesh(&local).await;
    let _east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    for (changed, addrs) in [(&mirror, "10.2.0.1:8080"), (&federated, "10.1.0.2:8080,10.2.0.1:8080")] {
        let mut stream = mesh.get(WEB).await.unwrap();
        assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080");
        // Additions come before removals, so that the client always has endpoints.
        for _ in 0..2 {
            mesh.manifests.write("mesh.yaml", changed);
            assert_eq!(next_summary(&mut stream).await, format!("+{addrs}"));
            assert_eq!(next_summary(&mut stream).await, "-10.1.0.1:8080");
            mesh.manifests.write("mesh.yaml", &local);
            assert_eq!(next_summary(&mut stream).await, "+10.1.0.1:8080");
            assert_eq!(next_summary(&mut stream).await, format!("-{addrs}"));
        }
    }
}

#[tokio::test]
async fn streams_of_one_service_share_a_union_that_ends_with_the_last() {
    let members = federation("multicluster.linkerd.io/remote-discovery: app@east");
    let mesh = mesh(&service("web", &members)).await;
    let east = link(&mesh, "east", &exported("app", &["10.2.0.1"])).await;
    let mut streams = Vec::new();
    let mut client = mesh.destination(destination::config::Config::default());
    for _ in 0..3 {
        let mut stream = with_timeout(client.get(target(WEB, ""))).await.unwrap().into_inner();
        assert_eq!(next_summary(&mut stream).await, "+10.2.0.1:8080");
        streams.push(stream);
    }
    let subscribers = || {
        let page = east.registry.render();
        let series = "endpoints_subscribers{cluster=\"east\"";
        page.lines()
            .find_map(|line| line.strip_prefix(series)?.rsplit(' ').next()?.parse::<usize>().ok())
    };
    assert_eq!(subscribers(), Some(1));
    drop(streams);
    eventually(|| subscribers().unwrap_or_default() == 0).await;
}

/// Messages for a slow client are not queued. Otherwise, a burst of changes in another cluster would need memory for each client.
#[tokio::test]
async fn a_client_that_does_not_read_during_a_burst_of_changes_gets_one_difference() {
    let mesh = mesh(&service("web", &mirror_of("east", "app"))).await;
    let east = link(&mesh, "east", &exported("app", &["10.2.0.0"])).await;
    let mut client = mesh.destination(destination::config::Config::default());
    let mut fast = with_timeout(client.get(target(WEB, ""))).await.unwrap().into_inner();
    let mut slow = with_timeout(client.get(target(WEB, ""))).await.unwrap().into_inner();
    for stream in [&mut fast, &mut slow] {
        assert_eq!(next_summary(stream).await, "+10.2.0.0:8080");
    }
    for n in 1..=10 {
        let ip = format!("10.2.0.{n}");
        east.manifests.write("mesh.yaml", &exported("app", &[&ip]));
        assert_eq!(next_summary(&mut fast).await, format!("+{ip}:8080"));
        assert_eq!(next_summary(&mut fast).await, format!("-10.2.0.{}:8080", n - 1));
    }
    assert_eq!(next_summary(&mut slow).await, "+10.2.0.10:8080");
    assert_eq!(next_summary(&mut slow).await, "-10.2.0.0:8080");
}
