//! The configuration of the installed control plane.

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use serde_json::Value;

use crate::kubernetes::{Cluster, reason};

/// The values of the ConfigMap `linkerd-config`.
///
/// # Errors
/// Fails if the namespace has no control plane, or if the user has no permission to read its configuration.
pub(crate) async fn values(cluster: &Cluster) -> anyhow::Result<Value> {
    let namespace = &cluster.control_plane_namespace;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let map = api.get_opt(CONFIG_MAP_NAME).await;
    let map = map.map_err(|error| {
        anyhow!(
            "reading ConfigMap {CONFIG_MAP_NAME} of namespace {namespace}: {}",
            reason(&error)
        )
    })?;
    let yaml = map.and_then(|mut map| map.data.as_mut()?.remove("values"));
    let yaml = yaml.with_context(|| {
        format!(
            "there is no control plane in namespace {namespace} (no ConfigMap {CONFIG_MAP_NAME}); use -L for another namespace"
        )
    })?;
    serde_yaml_ng::from_str(&yaml).with_context(|| format!("reading the values in ConfigMap {CONFIG_MAP_NAME}"))
}

const CONFIG_MAP_NAME: &str = "linkerd-config";
