//! The service mirror between two API servers, with the permissions of the chart.

mod all_links;
mod commands;
mod exported_services;
mod leadership;
mod linkerd_controller;
mod linkerd_link;
mod printed;
mod recorded;
mod recorded_responses;
mod remote_endpoints;
mod remote_failures;
mod several_links;
mod writes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::events::v1::Event;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tulle_control::mirror::ServiceMirror;
use tulle_control::mirror::config::{Clients, Config, LocalMembers, Scope};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_tests::charts::{Helm, install_custom_resources};
use tulle_tests::cluster::{ApiServer, kubeconfig};
use tulle_tests::eventually::{eventually, within};

const NAMESPACE: &str = "linkerd-multicluster";
/// The account that the chart creates for other clusters.
const REMOTE_ACCOUNT: &str = "linkerd-service-mirror-remote-access-default";
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
        let clients = Clients {
            objects: client.clone(),
            leases: client,
        };
        let (registry, (signal, drain)) = (Registry::new(), drain::channel());
        let mirror = ServiceMirror::new(clients, config, &registry);
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
        // The default. It is longer than the tests wait, so mirrors must follow without it.
        refresh_period: Duration::from_secs(60),
        lease_holder: "test".to_owned(),
    }
}

/// An API server with the chart installed, for these Links.
async fn cluster(links: &[&str]) -> ApiServer {
    cluster_with_values(links, &[]).await
}

/// Like [`cluster`], with further values of the chart.
async fn cluster_with_values(links: &[&str], values: &[&str]) -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    for namespace in [NAMESPACE, "linkerd", "shop"] {
        server.create_namespace(namespace).await.unwrap();
    }
    let names = links.iter().enumerate();
    let names = names.map(|(n, link)| format!("--set=controllers[{n}].link.ref.name={link}"));
    let values = values.iter().map(|value| format!("--set={value}"));
    let values: Vec<String> = names.chain(values).collect();
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
async fn remote_access(server: &ApiServer) -> PathBuf {
    flat_kubeconfig(server, REMOTE_ACCOUNT).await
}

/// Like [`remote_access`], for an account that may not read EndpointSlices.
async fn remote_access_without_slices(server: &ApiServer) -> PathBuf {
    let name = "without-slices";
    let role = ["get", "clusterrole", REMOTE_ACCOUNT, "-o", "json"];
    let role = server.kubectl(&role).await.unwrap();
    let mut role: Value = serde_json::from_str(&role).unwrap();
    role["metadata"] = json!({ "name": name });
    let rules = role["rules"].as_array_mut().unwrap();
    let n_rules = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["endpointslices"]));
    assert_eq!(rules.len(), n_rules - 1);
    fs::write(server.dir().join("without-slices.json"), role.to_string()).unwrap();
    let (role, account) = (
        format!("--clusterrole={name}"),
        format!("--serviceaccount={NAMESPACE}:{name}"),
    );
    for args in [
        ["apply", "-f", "without-slices.json"].as_slice(),
        &["create", "clusterrolebinding", name, &role, &account],
    ] {
        server.kubectl(args).await.unwrap();
    }
    flat_kubeconfig(server, name).await
}

async fn flat_kubeconfig(server: &ApiServer, account: &str) -> PathBuf {
    let path = server.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
    let path = path.to_str().unwrap();
    let flat = server
        .kubectl(&["config", "view", "--flatten", "--raw", "--kubeconfig", path])
        .await
        .unwrap();
    let flattened = server.dir().join(format!("{account}-flat.conf"));
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

/// The EndpointSlice of Endpoints. In a cluster with controllers, Kubernetes writes both.
fn slice_of(endpoints: &Value) -> Value {
    let mut addresses = Vec::new();
    for subset in endpoints["subsets"].as_array().into_iter().flatten() {
        for (field, is_ready) in [("addresses", true), ("notReadyAddresses", false)] {
            for address in subset[field].as_array().into_iter().flatten() {
                let mut endpoint = json!({"addresses": [address["ip"]], "conditions": {"ready": is_ready}});
                if let Some(host_name) = address.get("hostname") {
                    endpoint["hostname"] = host_name.clone();
                }
                addresses.push(endpoint);
            }
        }
    }
    let name = endpoints["metadata"]["name"].as_str().unwrap();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": slice_name(name), "namespace": endpoints["metadata"]["namespace"],
            "labels": {"kubernetes.io/service-name": name},
        },
        "endpoints": addresses,
    })
}

/// The name of the EndpointSlice of a Service.
fn slice_name(service: &str) -> String {
    format!("{service}-1")
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

/// The Links of a cluster in an API version.
fn links(server: &ApiServer, version: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("multicluster.linkerd.io", version, "Link");
    Api::namespaced_with(server.client(), NAMESPACE, &ApiResource::from_gvk(&kind))
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
/// condition, and a part of its message. Returns the condition.
async fn wait_for_condition(server: &ApiServer, link: &str, field: &str, expected: (&str, &str, &str)) -> Value {
    let api = links(server, "v1alpha3");
    let (name, status, text) = expected;
    let holds = async || {
        let link = api.get(link).await.unwrap();
        let entries = link.data["status"][field].as_array().cloned().unwrap_or_default();
        let entry = entries.iter().find(|entry| entry["remoteRef"]["name"] == name)?;
        let condition = &entry["conditions"][0];
        let has_text = condition["message"].as_str().unwrap().contains(text);
        (condition["status"] == status && has_text).then(|| condition.clone())
    };
    eventually(&format!("{link}: {field} of {expected:?}"), holds).await
}

/// Waits for an Event on a Link with this reason, whose text contains `text`.
async fn wait_for_link_event(server: &ApiServer, link: &str, reason: &str, text: &str) {
    let events = Api::<Event>::namespaced(server.client(), NAMESPACE);
    eventually(&format!("{link}: an Event {reason} with {text:?}"), async || {
        let found = events.list(&ListParams::default()).await.unwrap();
        let is_wanted = |event: &Event| {
            let regarding = event.regarding.as_ref();
            let is_about_link = regarding.is_some_and(|object| {
                object.kind.as_deref() == Some("Link") && object.name.as_deref() == Some(link) && object.uid.is_some()
            });
            let has_text = event.note.as_deref().is_some_and(|note| note.contains(text));
            is_about_link && has_text && event.reason.as_deref() == Some(reason)
        };
        found.items.iter().any(is_wanted).then_some(())
    })
    .await;
}

/// Waits for a change, and checks that it takes at most this time. Without `TULLE_TEST_FULL=1` it may take five times as long, because
/// other tests use the CPUs.
async fn in_time<T>(limit: Duration, change: impl Future<Output = T>) -> T {
    let started_at = Instant::now();
    let value = change.await;
    let took = started_at.elapsed();
    let limit = match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => limit,
        None => limit * 5,
    };
    assert!(took <= limit, "the change took {took:?}; at most {limit:?}");
    value
}

/// The Links whose clusters join one federated Service, in the order of their names.
const LINKS: [&str; 10] = ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4", "east", "north"];
