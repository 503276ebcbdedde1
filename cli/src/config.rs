//! What the control plane was installed with, as it says itself.

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use serde_json::Value;

use crate::kubernetes::{Cluster, reason};

/// The values of the ConfigMap `linkerd-config`.
///
/// # Errors
/// No control plane in this namespace, or one that the user may not ask.
pub(crate) async fn values(cluster: &Cluster) -> anyhow::Result<Value> {
    let namespace = &cluster.control_plane;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let map = api.get_opt(MAP).await;
    let map = map.map_err(|error| anyhow!("reading ConfigMap {MAP} of namespace {namespace}: {}", reason(&error)))?;
    let yaml = map.and_then(|mut map| map.data.as_mut()?.remove("values"));
    let yaml = yaml.with_context(|| {
        format!("there is no control plane in namespace {namespace} (no ConfigMap {MAP}); name another with -L")
    })?;
    serde_yaml_ng::from_str(&yaml).with_context(|| format!("reading the values in ConfigMap {MAP}"))
}

const MAP: &str = "linkerd-config";
