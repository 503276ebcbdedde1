//! The service mirror between two API servers, with the permissions of the chart.

mod commands;
mod leadership;
mod linkerd_link;
mod recorded;
mod remote_endpoints;

use std::fs;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::events::v1::Event;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tulle_control::mirror::ServiceMirror;
use tulle_control::mirror::config::{Config, LocalMembers, Scope};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_tests::charts::{Helm, install_custom_resources};
use tulle_tests::cluster::{ApiServer, kubeconfig};
use tulle_tests::eventually::{eventually, within};

const NAMESPACE: &str = "linkerd-multicluster";
/// Whether the mirrors of the cluster `east` are up to date.
const SYNCED: &str = "tulle_mirror_remote_synced{target_cluster_name=\"east\"}";

/// A service mirror that runs in this process.
struct Mirror {
    registry: Registry,
    signal: drain::Signal,
    running: JoinHandle<()>,
}

impl Mirror {
    /// Runs with the permissions of the account that the chart creates.
    async fn start(server: &ApiServer, account: &str, scope: Scope) -> Self {
        Self::start_with(server, account, mirror_config(scope)).await
    }

    async fn start_with(server: &ApiServer, account: &str, config: Config) -> Self {
        let access = server.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
        let client = kubeconfig::client(&access).await.unwrap();
        let (registry, (signal, drain)) = (Registry::new(), drain::channel());
        let mirror = ServiceMirror::new(&client, config, &registry);
        let running = tokio::spawn(mirror.run(drain));
        Self {
            registry,
            signal,
            running,
        }
    }

    /// Runs with the permissions of the controller of this Link.
    async fn start_for_link(server: &ApiServer, link: &str) -> Self {
        Self::start(server, &format!("controller-{link}"), Scope::Link(link.to_owned())).await
    }

    async fn end(self) {
        self.signal.drain().await;
        within("the mirror has ended", self.running).await.unwrap();
    }

    fn metric(&self, series: &str) -> Option<f64> {
        metric_value(&self.registry.render(), series)
    }
}

/// The value of a series on a metrics page.
fn metric_value(page: &str, series: &str) -> Option<f64> {
    let value = page
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.map(|value| value.parse().unwrap())
}

fn mirror_config(scope: Scope) -> Config {
    Config {
        namespace: NAMESPACE.to_owned(),
        scope,
        probe_service: None,
        may_create_namespaces: false,
        mirrors_pods: false,
        refresh_period: Duration::from_secs(1),
        lease_holder: "test".to_owned(),
    }
}

/// An API server with the chart installed, for these Links.
async fn cluster(links: &[&str]) -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    for namespace in [NAMESPACE, "linkerd", "shop"] {
        server.create_namespace(namespace).await.unwrap();
    }
    let names = links.iter().enumerate();
    let values: Vec<String> = names
        .map(|(n, link)| format!("--set=controllers[{n}].link.ref.name={link}"))
        .collect();
    let mut args = vec!["--namespace", NAMESPACE];
    args.extend(values.iter().map(String::as_str));
    let manifest = Helm::new().unwrap().template("tulle-multicluster", &args).unwrap();
    fs::write(server.dir().join("multicluster.yaml"), manifest).unwrap();
    server
        .kubectl(&["apply", "--server-side", "-f", "multicluster.yaml"])
        .await
        .unwrap();
    let wait = [
        "wait",
        "--for=condition=Established",
        "crd/links.multicluster.linkerd.io",
    ];
    server.kubectl(&wait).await.unwrap();
    server
}

/// Creates the Secret with access to another cluster, or replaces it.
async fn put_credentials(server: &ApiServer, link: &str, access: &Path) {
    let manifest = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
        "metadata": {"name": format!("cluster-credentials-{link}"), "namespace": NAMESPACE},
        "data": {"kubeconfig": ByteString(fs::read(access).unwrap())},
    });
    apply(server, &manifest).await;
}

/// Writes a kubeconfig for the account that the chart creates for other clusters. It contains all credentials and refers to no
/// files.
async fn remote_access(server: &ApiServer) -> std::path::PathBuf {
    let account = "linkerd-service-mirror-remote-access-default";
    let path = server.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
    let path = path.to_str().unwrap();
    let flat = server
        .kubectl(&["config", "view", "--flatten", "--raw", "--kubeconfig", path])
        .await
        .unwrap();
    let flattened = server.dir().join("remote-access.conf");
    fs::write(&flattened, flat).unwrap();
    flattened
}

fn link(name: &str) -> Value {
    json!({
        "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "targetClusterName": name, "targetClusterDomain": "east.test",
            "clusterCredentialsSecret": format!("cluster-credentials-{name}"),
            "gatewayAddress": "192.0.2.7", "gatewayPort": "4143", "gatewayIdentity": "gateway.east",
            "selector": {"matchLabels": {"mirror.linkerd.io/exported": "true"}},
            "remoteDiscoverySelector": {"matchLabels": {"mirror.linkerd.io/exported": "remote-discovery"}},
            "federatedServiceSelector": {"matchLabels": {"mirror.linkerd.io/federated": "member"}},
        },
    })
}

fn service(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "shop", "labels": labels},
        "spec": {"ports": [{"name": "http", "port": 80, "targetPort": 8080}]},
    })
}

fn endpoints(name: &str, addresses: &Value) -> Value {
    let subsets = match addresses.as_array().is_some_and(Vec::is_empty) {
        true => json!([]),
        false => json!([{"addresses": addresses, "ports": [{"name": "http", "port": 8080}]}]),
    };
    json!({
        "apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": name, "namespace": "shop"}, "subsets": subsets,
    })
}

/// Creates an object, or replaces it. Waits until the API server has it.
async fn apply(server: &ApiServer, object: &Value) {
    let text = |field: &str| object[field].as_str().unwrap();
    let (group, version) = text("apiVersion")
        .rsplit_once('/')
        .unwrap_or_else(|| ("", text("apiVersion")));
    let plural = match text("kind") {
        "Endpoints" => "endpoints".to_owned(),
        kind => format!("{}s", kind.to_ascii_lowercase()),
    };
    let kind = GroupVersionKind::gvk(group, version, text("kind"));
    let resource = ApiResource::from_gvk_with_plural(&kind, &plural);
    let metadata = &object["metadata"];
    let namespace = metadata["namespace"].as_str().unwrap();
    let api: Api<DynamicObject> = Api::namespaced_with(server.client(), namespace, &resource);
    let params = PatchParams::apply("test").force();
    let name = metadata["name"].as_str().unwrap();
    api.patch(name, &params, &Patch::Apply(object)).await.unwrap();
}

fn services(client: Client) -> Api<Service> {
    Api::namespaced(client, "shop")
}

/// Waits for Endpoints with this number of addresses that are ready.
async fn wait_for_addresses(server: &ApiServer, name: &str, expected: usize) {
    let api = Api::<Endpoints>::namespaced(server.client(), "shop");
    let has_addresses = async || {
        let found = api.get_opt(name).await.unwrap()?;
        let subsets = found.subsets.unwrap_or_default();
        let n: usize = subsets
            .iter()
            .map(|subset| subset.addresses.as_ref().map_or(0, Vec::len))
            .sum();
        (n == expected).then_some(())
    };
    eventually(&format!("{name} has {expected} addresses"), has_addresses).await;
}

async fn wait_until_gone(server: &ApiServer, name: &str) {
    let api = services(server.client());
    let is_gone = async || api.get_opt(name).await.unwrap().is_none().then_some(());
    eventually(&format!("{name} is deleted"), is_gone).await;
}

/// Waits for a condition of a remote Service in `status.<field>` of a Link. `expected` is the name of the Service, the status of the
/// condition, and a part of its message.
async fn wait_for_condition(server: &ApiServer, link: &str, field: &str, expected: (&str, &str, &str)) {
    let kind = GroupVersionKind::gvk("multicluster.linkerd.io", "v1alpha3", "Link");
    let api: Api<DynamicObject> = Api::namespaced_with(server.client(), NAMESPACE, &ApiResource::from_gvk(&kind));
    let (name, status, text) = expected;
    let holds = async || {
        let link = api.get(link).await.unwrap();
        let entries = link.data["status"][field].as_array().cloned().unwrap_or_default();
        let entry = entries.iter().find(|entry| entry["remoteRef"]["name"] == name)?;
        let condition = &entry["conditions"][0];
        let has_text = condition["message"].as_str().unwrap().contains(text);
        (condition["status"] == status && has_text).then_some(())
    };
    eventually(&format!("{link}: {field} of {expected:?}"), holds).await;
}

/// Waits for an Event on an exported Service that contains this text.
async fn wait_for_event(server: &ApiServer, service: &str, text: &str) {
    let events = Api::<Event>::namespaced(server.client(), "shop");
    eventually("an Event on the exported Service", async || {
        let found = events.list(&ListParams::default()).await.unwrap();
        let is_about_service = |event: &&Event| {
            let regarding = event.regarding.as_ref();
            regarding.is_some_and(|object| object.name.as_deref() == Some(service))
        };
        let note = found.items.iter().find(is_about_service)?.note.clone().unwrap();
        assert!(note.contains(text), "{note}");
        Some(())
    })
    .await;
}

/// Checks that changes in the other cluster reach the mirrors, and that a deleted mirror is created again.
async fn check_changes(west: &ApiServer, east: &ApiServer) {
    let exported = json!({"mirror.linkerd.io/exported": "true"});
    let local = services(west.client());
    apply(east, &endpoints("web", &json!([]))).await;
    wait_for_addresses(west, "web-east", 0).await;
    apply(east, &endpoints("web", &json!([{"ip": "10.1.0.2"}]))).await;
    wait_for_addresses(west, "web-east", 1).await;
    apply(east, &service("late", &exported)).await;
    wait_for_condition(west, "east", "mirrorServices", ("late", "True", "")).await;
    services(east.client())
        .delete("late", &Default::default())
        .await
        .unwrap();
    wait_until_gone(west, "late-east").await;

    // A deleted mirror is created again.
    let before = local.get("web-east").await.unwrap().metadata.uid;
    local.delete("web-east", &Default::default()).await.unwrap();
    let is_new = async || {
        let found = local.get_opt("web-east").await.unwrap()?;
        (found.metadata.uid != before).then_some(())
    };
    eventually("web-east exists again", is_new).await;
}

/// Checks that mirrors do not change while the credentials are broken, and that new credentials are used without a restart.
async fn check_broken_access(west: &ApiServer, east: &ApiServer, mirror: &Mirror) {
    let (local, access) = (services(west.client()), remote_access(east).await);
    let unreachable = access.with_extension("unreachable");
    let text = fs::read_to_string(&access).unwrap().replace(":6443", ":1");
    fs::write(&unreachable, text).unwrap();
    put_credentials(west, "east", &unreachable).await;
    wait_for_condition(
        west,
        "east",
        "mirrorServices",
        ("web", "Unknown", "the mirrors stay as they are"),
    )
    .await;
    assert_eq!(mirror.metric(SYNCED), Some(0.0));
    services(east.client())
        .delete("new", &Default::default())
        .await
        .unwrap();
    assert!(local.get_opt("new-east").await.unwrap().is_some());
    put_credentials(west, "east", &access).await;
    wait_until_gone(west, "new-east").await;
    wait_for_condition(west, "east", "mirrorServices", ("web", "True", "")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exported_services_are_mirrored_while_their_cluster_can_be_read_and_kept_while_it_cannot() {
    let (west, east) = tokio::join!(cluster(&["east"]), cluster(&[]));
    let access = remote_access(&east).await;
    let exported = json!({"mirror.linkerd.io/exported": "true", "app": "web"});
    apply(&east, &service("web", &exported)).await;
    apply(&east, &endpoints("web", &json!([{"ip": "10.1.0.1"}]))).await;
    apply(
        &east,
        &service("direct", &json!({"mirror.linkerd.io/exported": "remote-discovery"})),
    )
    .await;
    apply(&east, &service("private", &json!({}))).await;
    apply(&west, &service("taken-east", &json!({}))).await;
    apply(&east, &service("taken", &exported)).await;
    // Endpoints with the name of a mirror exist already, without the labels of a mirror.
    apply(&west, &endpoints("web-east", &json!([{"ip": "10.9.9.9"}]))).await;
    apply(&west, &link("east")).await;

    // Without credentials nothing is mirrored, and the process waits for them.
    let mirror = Mirror::start_for_link(&west, "east").await;
    eventually("the missing Secret is reported", async || {
        (mirror.metric(SYNCED)? == 0.0).then_some(())
    })
    .await;
    put_credentials(&west, "east", &access).await;

    wait_for_condition(&west, "east", "mirrorServices", ("web", "True", "")).await;
    wait_for_addresses(&west, "web-east", 1).await;
    wait_for_condition(
        &west,
        "east",
        "mirrorServices",
        ("taken", "False", "is not a mirror of east"),
    )
    .await;
    wait_for_event(&east, "taken", "is not a mirror of east").await;
    assert_eq!(mirror.metric(SYNCED), Some(1.0));
    let local = services(west.client());
    let web = local.get("web-east").await.unwrap();
    assert_eq!(web.metadata.labels.as_ref().unwrap()["app"], "web");
    assert_eq!(
        web.metadata.annotations.as_ref().unwrap()["mirror.linkerd.io/remote-svc-fq-name"],
        "web.shop.svc.east.test"
    );
    assert!(web.spec.unwrap().cluster_ip.is_some_and(|ip| ip != "None"));
    let direct = local.get("direct-east").await.unwrap();
    assert_eq!(
        direct.metadata.labels.unwrap()["multicluster.linkerd.io/remote-service"],
        "direct"
    );
    let all = Api::<Endpoints>::namespaced(west.client(), "shop");
    let subsets = all.get("web-east").await.unwrap().subsets.unwrap();
    assert_eq!(subsets[0].addresses.as_ref().unwrap()[0].ip, "192.0.2.7");
    assert!(all.get_opt("direct-east").await.unwrap().is_none());
    assert!(local.get_opt("private-east").await.unwrap().is_none());

    check_changes(&west, &east).await;

    // A service mirror applies the changes that the other cluster made while it did not run.
    mirror.end().await;
    services(east.client())
        .delete("direct", &Default::default())
        .await
        .unwrap();
    apply(&east, &service("new", &exported)).await;
    let mirror = Mirror::start_for_link(&west, "east").await;
    wait_until_gone(&west, "direct-east").await;
    wait_for_condition(&west, "east", "mirrorServices", ("new", "True", "")).await;

    check_broken_access(&west, &east, &mirror).await;

    // The deletion of a Link does not delete its mirrors: `unlink` deletes them.
    west.kubectl(&["delete", "links.multicluster.linkerd.io", "east", "-n", NAMESPACE])
        .await
        .unwrap();
    services(east.client())
        .delete("web", &Default::default())
        .await
        .unwrap();
    mirror.end().await;
    assert!(local.get_opt("web-east").await.unwrap().is_some());

    let refused: Vec<_> = [&west, &east]
        .iter()
        .flat_map(|server| server.audit_log().unwrap())
        .filter(tulle_tests::cluster::AuditRecord::is_forbidden)
        .map(|record| (record.user.username, record.verb))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_are_repaired_while_the_api_server_of_their_cluster_is_away() {
    let (west, east) = tokio::join!(cluster(&["east"]), cluster(&[]));
    let access = remote_access(&east).await;
    apply(&east, &service("web", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    apply(&east, &endpoints("web", &json!([{"ip": "10.1.0.1"}]))).await;
    apply(&west, &link("east")).await;
    put_credentials(&west, "east", &access).await;
    let mirror = Mirror::start_for_link(&west, "east").await;
    wait_for_condition(&west, "east", "mirrorServices", ("web", "True", "")).await;
    wait_for_addresses(&west, "web-east", 1).await;

    drop(east);
    eventually("the failure is reported", async || {
        (mirror.metric(SYNCED)? == 0.0).then_some(())
    })
    .await;
    wait_for_condition(&west, "east", "mirrorServices", ("web", "Unknown", "")).await;
    let all = Api::<Endpoints>::namespaced(west.client(), "shop");
    let emptied = Patch::Merge(json!({"subsets": null}));
    all.patch("web-east", &PatchParams::default(), &emptied).await.unwrap();
    wait_for_addresses(&west, "web-east", 1).await;
    // The repair did not change the status.
    wait_for_condition(&west, "east", "mirrorServices", ("web", "Unknown", "")).await;
    assert_eq!(mirror.metric(SYNCED), Some(0.0));
    mirror.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn services_of_several_clusters_join_and_leave_a_federated_service() {
    // Both Links refer to one cluster.
    let (west, other) = tokio::join!(cluster(&["east", "north"]), cluster(&[]));
    let access = remote_access(&other).await;
    let member = json!({"mirror.linkerd.io/federated": "member"});
    apply(&other, &service("web", &member)).await;
    apply(&west, &service("web", &member)).await;
    let selector = "mirror.linkerd.io/federated=member".parse().unwrap();
    let members = LocalMembers::new(selector, "", "");
    let this = Mirror::start(&west, "linkerd-local-service-mirror", Scope::ThisCluster(members)).await;
    let mut mirrors = Vec::new();
    for name in ["east", "north"] {
        apply(&west, &link(name)).await;
        put_credentials(&west, name, &access).await;
        mirrors.push(Mirror::start_for_link(&west, name).await);
    }
    let local = services(west.client());
    let members = async || {
        let found = local.get_opt("web-federated").await.unwrap()?;
        let annotations = found.metadata.annotations.unwrap_or_default();
        let value = |name: &str| annotations.get(name).cloned().unwrap_or_default();
        let remote = value("multicluster.linkerd.io/remote-discovery");
        let mut remote: Vec<String> = remote.split(',').map(str::to_owned).collect();
        remote.sort_unstable();
        Some((value("multicluster.linkerd.io/local-discovery"), remote.join(",")))
    };
    let wait_for = async |own: &str, remote: &str| {
        let expected = Some((own.to_owned(), remote.to_owned()));
        let holds = async || (members().await == expected).then_some(());
        eventually(&format!("the members are {expected:?}"), holds).await;
    };
    wait_for("web", "web@east,web@north").await;
    wait_for_condition(&west, "east", "federatedServices", ("web", "True", "")).await;
    apply(&west, &service("web", &json!({}))).await;
    wait_for("", "web@east,web@north").await;

    // A member that leaves while its controller does not run is removed when the controller runs again.
    for mirror in mirrors {
        mirror.end().await;
    }
    services(other.client())
        .delete("web", &Default::default())
        .await
        .unwrap();
    apply(&other, &service("still", &member)).await;
    let east = Mirror::start_for_link(&west, "east").await;
    wait_for("", "web@north").await;
    let north = Mirror::start_for_link(&west, "north").await;
    wait_until_gone(&west, "web-federated").await;
    assert!(
        Api::<Endpoints>::namespaced(west.client(), "shop")
            .get_opt("still-federated")
            .await
            .unwrap()
            .is_none()
    );
    for mirror in [this, east, north] {
        mirror.end().await;
    }
}
