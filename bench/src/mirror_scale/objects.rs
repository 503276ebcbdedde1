//! Test objects: exported Services on one API server, and the Link to it on the other one.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use futures_util::stream;
use k8s_openapi::ByteString;
use kube::config::Kubeconfig;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};
use tulle_control::kubernetes::remote_credentials::secret_name;
use tulle_core::names::{annotation, label};

use crate::scale::{ApiClient, run_concurrently};

/// How clients reach the endpoints of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Through the gateway, whose address is in the Endpoints of the mirror.
    Gateway,
    /// Directly. The destination service reads the endpoints from the other API server.
    Flat,
}

/// The exported Services on the remote API server.
pub(super) struct ExportedServices {
    pub(super) client: ApiClient,
    pub(super) mode: Mode,
    pub(super) n_services: usize,
    /// Endpoints of each Service.
    pub(super) n_endpoints: usize,
}

/// The n-th change, of the n-th Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Change(pub(super) usize);

impl Change {
    /// Whether the Service loses its endpoints; otherwise it gets another port.
    pub(super) fn empties_endpoints(self) -> bool {
        self.0 % 2 == 1
    }
}

impl Mode {
    /// The value of the label of exported Services.
    fn exported(self) -> &'static str {
        match self {
            Self::Gateway => "true",
            Self::Flat => "remote-discovery",
        }
    }
}

impl ExportedServices {
    pub(super) async fn create(&self) -> anyhow::Result<()> {
        apply(&self.client, "/api/v1", "namespaces", namespace(NAMESPACE)).await?;
        let objects = (0..self.n_services).map(|n| {
            let slice = slice(n, n * self.n_endpoints..(n + 1) * self.n_endpoints);
            [
                (IN_NAMESPACE, "services", self.service(n, PORT)),
                (SLICES_IN_NAMESPACE, "endpointslices", slice),
            ]
        });
        let applied = objects
            .flatten()
            .map(|(parent, plural, object)| apply(&self.client, parent, plural, object));
        run_concurrently(stream::iter(applied)).await
    }

    /// Makes the changes at a steady rate, given per second. Returns when each was written.
    pub(super) async fn write_changes(&self, n_changes: usize, rate: u32) -> anyhow::Result<Vec<(Change, Instant)>> {
        let (start, interval) = (Instant::now(), Duration::from_secs(1) / rate);
        let writes = (0..n_changes).map(|n| async move {
            sleep_until(start + interval * u32::try_from(n)?).await;
            let (change, written_at) = (Change(n), Instant::now());
            match change.empties_endpoints() {
                true => apply(&self.client, SLICES_IN_NAMESPACE, "endpointslices", slice(n, 0..0)).await?,
                false => apply(&self.client, IN_NAMESPACE, "services", self.service(n, OTHER_PORT)).await?,
            }
            anyhow::Ok((change, written_at))
        });
        try_join_all(writes).await
    }

    fn service(&self, n: usize, port: u64) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": service_name(n), "labels": {label::EXPORTED: self.mode.exported()}},
            "spec": {"ports": [{"name": "http", "port": port, "targetPort": 8080}]},
        })
    }
}

/// Creates the Link, the Secrets with access to the other API server, and the namespace of the mirrors.
pub(super) async fn create_link(local: &ApiClient, remote_kubeconfig: &Path, mode: Mode) -> anyhow::Result<()> {
    apply(local, "/api/v1", "namespaces", namespace(NAMESPACE)).await?;
    let kubeconfig = ByteString(inline_files(remote_kubeconfig)?);
    let credentials = secret_name(CLUSTER);
    let secret = |metadata: Value| {
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "mirror.linkerd.io/remote-kubeconfig",
            "metadata": metadata, "data": {"kubeconfig": kubeconfig},
        })
    };
    create_secret(local, LINK_NAMESPACE, secret(json!({"name": credentials}))).await?;
    if mode == Mode::Flat {
        let metadata = json!({
            "name": credentials,
            "labels": {label::CREDENTIALS_OF_CLUSTER: CLUSTER},
            "annotations": {annotation::TRUST_DOMAIN: DOMAIN, annotation::CLUSTER_DOMAIN: DOMAIN},
        });
        create_secret(local, CONTROL_PLANE_NAMESPACE, secret(metadata)).await?;
    }
    let mut spec = json!({
        "targetClusterName": CLUSTER, "targetClusterDomain": DOMAIN, "clusterCredentialsSecret": credentials,
    });
    let selector = json!({"matchLabels": {label::EXPORTED: mode.exported()}});
    match mode {
        Mode::Gateway => {
            spec["gatewayAddress"] = json!("192.0.2.7");
            spec["gatewayPort"] = json!("4143");
            spec["gatewayIdentity"] = json!("gateway.east");
            spec["selector"] = selector;
        }
        Mode::Flat => spec["remoteDiscoverySelector"] = selector,
    }
    let link = json!({
        "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
        "metadata": {"name": CLUSTER}, "spec": spec,
    });
    let in_namespace = format!("/apis/multicluster.linkerd.io/v1alpha3/namespaces/{LINK_NAMESPACE}");
    apply(local, &in_namespace, "links", link).await
}

/// Creates a Secret and its namespace.
async fn create_secret(local: &ApiClient, in_namespace: &str, secret: Value) -> anyhow::Result<()> {
    apply(local, "/api/v1", "namespaces", namespace(in_namespace)).await?;
    apply(local, &format!("/api/v1/namespaces/{in_namespace}"), "secrets", secret).await
}

/// The kubeconfig, with the contents of the files that it names.
fn inline_files(kubeconfig: &Path) -> anyhow::Result<Vec<u8>> {
    let reading = || format!("reading {}", kubeconfig.display());
    let parsed = Kubeconfig::read_from(kubeconfig).with_context(reading)?;
    let mut config = serde_json::to_value(parsed).with_context(reading)?;
    for (list, item, fields) in [
        ("clusters", "cluster", &["certificate-authority"][..]),
        ("users", "user", &["client-certificate", "client-key"]),
    ] {
        for entry in config[list].as_array_mut().into_iter().flatten() {
            for field in fields {
                let Some(path) = entry[item][field].as_str() else {
                    continue;
                };
                let contents = std::fs::read(path).with_context(|| format!("reading {path}"))?;
                entry[item][format!("{field}-data")] = json!(ByteString(contents));
                entry[item][field].take();
            }
        }
    }
    Ok(config.to_string().into_bytes())
}

/// Creates or replaces an object by server-side apply.
async fn apply(client: &ApiClient, parent: &str, plural: &str, object: Value) -> anyhow::Result<()> {
    let name = object["metadata"]["name"].as_str().context("an object has no name")?;
    client.apply(&format!("{parent}/{plural}/{name}"), &object).await
}

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

/// The EndpointSlice of a Service, with the addresses of these pods.
fn slice(service: usize, pods: Range<usize>) -> Value {
    let service = service_name(service);
    let address = |pod: usize| format!("10.{}.{}.{}", 100 + pod / 62500, pod / 250 % 250, 1 + pod % 250);
    let endpoints: Vec<Value> = pods
        .map(|pod| json!({"addresses": [address(pod)], "conditions": {"ready": true}}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "endpoints": endpoints, "ports": [{"name": "http", "port": 8080}],
    })
}

fn service_name(n: usize) -> String {
    format!("svc-{n}")
}

/// The name of the mirror of the n-th Service.
pub(super) fn mirror_name(n: usize) -> String {
    format!("{}-{CLUSTER}", service_name(n))
}

/// The number of the Service with a mirror of this name; `None` if it is no mirror.
pub(super) fn mirrored_service(name: &str) -> Option<usize> {
    let service = name.strip_suffix(CLUSTER)?.strip_suffix('-')?;
    service.strip_prefix("svc-")?.parse().ok()
}

const NAMESPACE: &str = "scale";
pub(super) const IN_NAMESPACE: &str = "/api/v1/namespaces/scale";
const SLICES_IN_NAMESPACE: &str = "/apis/discovery.k8s.io/v1/namespaces/scale";
pub(super) const LINK_NAMESPACE: &str = "linkerd-multicluster";
/// The default of the destination service.
const CONTROL_PLANE_NAMESPACE: &str = "linkerd";
/// The name of the cluster with the exported Services. It is also that of the Link.
pub(super) const CLUSTER: &str = "east";
/// The domain of both clusters, which is the default of the destination service.
const DOMAIN: &str = "cluster.local";
const PORT: u64 = 80;
/// The port that a change gives to a Service.
pub(super) const OTHER_PORT: u64 = 81;
