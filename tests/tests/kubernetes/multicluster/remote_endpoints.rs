//! Endpoints of another cluster, read with the permissions of the charts on both sides.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Secret;
use tokio::task::JoinSet;
use tonic::{Code, Streaming};
use tulle_control::cluster::remote_clusters::AllClusters;
use tulle_control::cluster::{self, Cluster};
use tulle_control::destination;
use tulle_control::kubernetes as client;
use tulle_control::remote::RemoteWatches;
use tulle_control::remote::references::ReferencedClusters;
use tulle_control::resources::service::EndpointsSource;
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_control::source::kubernetes::{self as source};
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_core::readiness::Readiness;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{GetDestination, Update, update};
use tulle_tests::cluster::AuditRecord;

use super::*;

pub(super) const CONTROL_PLANE: &str = "linkerd";

/// The destination service of a cluster. It ends when it is dropped.
pub(super) struct Destination {
    clusters: AllClusters,
    registry: Registry,
    _signal: drain::Signal,
    _tasks: JoinSet<()>,
}

impl Destination {
    pub(super) async fn start(server: &ApiServer) -> Self {
        let (registry, (signal, drain)) = (Registry::new(), drain::channel());
        let cluster = Cluster::new(cluster::Config::default(), &registry);
        let clusters = AllClusters::from(cluster.clone());
        let mut tasks = JoinSet::new();
        let (sink, references) = ReferencedClusters::from_events(cluster.sink());
        let access = server
            .service_account_kubeconfig(CONTROL_PLANE, "linkerd-destination")
            .await
            .unwrap();
        let secrets = kubeconfig::client(&access).await.unwrap();
        let watches = RemoteWatches::new(secrets, clusters.clone(), registry.clone(), drain.clone());
        let watches = watches.with_unlink_delay(Duration::from_secs(1));
        tasks.spawn(watches.run(references));
        let admin = client::Config {
            kubeconfig: Some(server.kubeconfig()),
            ..client::Config::default()
        };
        let config = source::Config {
            requirements: WatchRequirements {
                destination: true,
                policy: false,
                endpoints_source: EndpointsSource::EndpointSlices,
            },
            log_addr: ":8086".to_owned(),
            stale_kinds: Readiness::new(),
        };
        let api = client::client(&admin, &registry).await.unwrap();
        let running = source::run(api, config, sink, registry.clone(), drain);
        tasks.spawn(async move { running.await.unwrap() });
        within("the objects are loaded", cluster.synced()).await;
        Self {
            clusters,
            registry,
            _signal: signal,
            _tasks: tasks,
        }
    }

    pub(super) async fn get(&self, name: &str) -> Result<Streaming<Update>, tonic::Status> {
        let config = destination::config::Config::default();
        let service = destination::server(self.clusters.clone(), ClientCertificates::Optional, config);
        let request = GetDestination {
            path: format!("{name}.shop.svc.cluster.local:80"),
            ..GetDestination::default()
        };
        let mut client = DestinationClient::new(service);
        within("the response", client.get(request))
            .await
            .map(tonic::Response::into_inner)
    }
}

/// Waits for an update: `+` and the added addresses, `-` and the removed ones, or `none`.
pub(super) async fn next(stream: &mut Streaming<Update>) -> String {
    let update = within("an update", stream.message()).await.unwrap().unwrap();
    let socket = |addr| SocketAddr::try_from(addr).unwrap().to_string();
    match update.update.unwrap() {
        update::Update::Add(set) => {
            let addrs = set.addrs.into_iter().map(|addr| socket(addr.addr.unwrap()));
            format!("+{}", addrs.collect::<Vec<_>>().join(","))
        }
        update::Update::Remove(set) => {
            format!("-{}", set.addrs.into_iter().map(socket).collect::<Vec<_>>().join(","))
        }
        update::Update::NoEndpoints(_) => "none".to_owned(),
    }
}

pub(super) fn slice(addresses: &[&str]) -> Value {
    let endpoints: Vec<_> = addresses.iter().map(|addr| json!({"addresses": [addr]})).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "app-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "app"}},
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    })
}

/// Creates the Secret that the destination service reads, or replaces it.
pub(super) async fn put_discovery_credentials(server: &ApiServer, access: &Path) {
    let manifest = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
        "metadata": {
            "name": "cluster-credentials-east", "namespace": CONTROL_PLANE,
            "labels": {"multicluster.linkerd.io/cluster-name": "east"},
            "annotations": {
                "multicluster.linkerd.io/trust-domain": "east.test",
                "multicluster.linkerd.io/cluster-domain": "east.test",
            },
        },
        "data": {"kubeconfig": ByteString(fs::read(access).unwrap())},
    });
    apply(server, &manifest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_of_a_linked_cluster_are_served_while_its_secret_exists() {
    // The credentials of `east` later lead to the cluster `moved`.
    let (west, east, moved) = tokio::join!(cluster(&["east"]), cluster(&[]), cluster(&[]));
    let account = ["create", "serviceaccount", "linkerd-destination", "-n", CONTROL_PLANE];
    west.kubectl(&account).await.unwrap();
    let access = remote_access(&east).await;
    apply(&east, &service("app", &json!({}))).await;
    apply(&east, &slice(&["10.2.0.1"])).await;
    let destination = Destination::start(&west).await;
    let mirror = json!({
        "multicluster.linkerd.io/remote-discovery": "east", "multicluster.linkerd.io/remote-service": "app",
    });
    apply(&west, &service("app-east", &mirror)).await;
    eventually("the missing Secret is noticed", async || {
        let status = destination.get("app-east").await.err()?;
        status
            .message()
            .contains("Remote cluster not found: east")
            .then_some(())
    })
    .await;

    put_discovery_credentials(&west, &access).await;
    let mut stream = eventually("the cluster is known", async || {
        match destination.get("app-east").await {
            Ok(stream) => Some(stream),
            Err(status) => {
                assert!(matches!(status.code(), Code::NotFound | Code::Unavailable), "{status}");
                None
            }
        }
    })
    .await;
    // While the objects of the other cluster are listed, the client waits.
    assert_eq!(next(&mut stream).await, "+10.2.0.1:8080");
    assert!(destination.registry.render().contains("cluster_store_size 1\n"));
    apply(&east, &slice(&["10.2.0.1", "10.2.0.2"])).await;
    assert_eq!(next(&mut stream).await, "+10.2.0.2:8080");

    // New credentials are used when they have given a complete list. Until then the old ones are.
    let unreachable = access.with_extension("unreachable");
    let text = fs::read_to_string(&access).unwrap().replace(":6443", ":1");
    fs::write(&unreachable, text).unwrap();
    put_discovery_credentials(&west, &unreachable).await;
    apply(&east, &slice(&["10.2.0.2"])).await;
    assert_eq!(next(&mut stream).await, "-10.2.0.1:8080");
    apply(&moved, &service("app", &json!({}))).await;
    apply(&moved, &slice(&["10.2.0.2", "10.3.0.1"])).await;
    put_discovery_credentials(&west, &remote_access(&moved).await).await;
    assert_eq!(next(&mut stream).await, "+10.3.0.1:8080");
    eventually("the cluster is up to date", async || {
        let page = destination.registry.render();
        page.contains("tulle_remote_cluster_up_to_date{cluster=\"east\"} 1\n")
            .then_some(())
    })
    .await;

    let secrets = Api::<Secret>::namespaced(west.client(), CONTROL_PLANE);
    secrets
        .delete("cluster-credentials-east", &Default::default())
        .await
        .unwrap();
    assert_eq!(next(&mut stream).await, "-10.2.0.2:8080,10.3.0.1:8080");
    assert_eq!(next(&mut stream).await, "none");
    assert!(destination.registry.render().contains("cluster_store_size 0\n"));

    let refused: Vec<_> = [&west, &east, &moved]
        .iter()
        .flat_map(|server| server.audit_log().unwrap())
        .filter(AuditRecord::is_forbidden)
        .map(|record| (record.user.username, record.verb))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
    let as_destination = format!("--as=system:serviceaccount:{CONTROL_PLANE}:linkerd-destination");
    for verb in ["list", "get", "watch"] {
        let question = ["auth", "can-i", verb, "secrets", "-n", CONTROL_PLANE, &as_destination];
        assert!(west.kubectl(&question).await.is_err(), "all Secrets: {verb}");
    }
}
