//! Finds the objects of an installation that already exist in the cluster.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::Value;

use super::charts::documents;
use crate::certificates::Certificate;
use crate::kubernetes::{Cluster, reason};

#[derive(Debug)]
pub(super) struct ExistingInstallation {
    /// The version of Kubernetes, such as `v1.34.2`; empty if unknown.
    pub(super) kubernetes_version: String,
    /// Whether the namespace has a control plane.
    pub(super) is_installed: bool,
    /// The values passed to `tulle install` and to upgrades.
    pub(super) overrides: Option<Value>,
    /// The names of the installed CustomResourceDefinitions.
    pub(super) crds: Vec<String>,
    /// The trust anchors of the running mesh.
    pub(super) anchors: Option<Vec<Certificate>>,
}

/// Reads the existing installation from a cluster.
///
/// # Errors
/// Fails if the user has no permission to read the objects.
pub(super) async fn read_cluster(cluster: &Cluster) -> anyhow::Result<ExistingInstallation> {
    let namespace = &cluster.control_plane_namespace;
    let failed = |what: &str, error: kube::Error| anyhow!("reading {what} of the cluster: {}", reason(&error));
    let version = cluster
        .client
        .apiserver_version()
        .await
        .map_err(|error| failed("the version", error))?;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), namespace);
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let config = maps
        .get_opt(CONFIG_MAP)
        .await
        .map_err(|error| failed("ConfigMaps", error))?;
    let roots = maps
        .get_opt(TRUST_ROOTS_CONFIG_MAP)
        .await
        .map_err(|error| failed("ConfigMaps", error))?;
    let secret = secrets
        .get_opt(OVERRIDES_SECRET)
        .await
        .map_err(|error| failed("Secrets", error))?;
    let crds = cluster
        .list(&crds, &ListParams::default())
        .await
        .map_err(|error| failed("CustomResourceDefinitions", error))?;
    let overrides = secret.and_then(|mut secret| secret.data.as_mut()?.remove(OVERRIDES_SECRET));
    let overrides = overrides.map(|bytes| parse_overrides(&bytes.0)).transpose()?;
    let bundle = roots.and_then(|mut map| map.data.as_mut()?.remove("ca-bundle.crt"));
    Ok(ExistingInstallation {
        kubernetes_version: version.git_version,
        is_installed: config.is_some(),
        overrides,
        crds: crds.iter().map(|crd| crd.name_any()).collect(),
        anchors: parse_anchors(bundle)?,
    })
}

/// Reads the existing installation from manifests, such as the output of `kubectl get configmap,secret -n linkerd -o yaml`.
///
/// # Errors
/// Fails if the file cannot be read or is not YAML, or if the overrides or trust anchors in it are invalid. A file without
/// manifests means that nothing is installed.
pub(super) fn read_manifests(path: &Path, namespace: &str) -> anyhow::Result<ExistingInstallation> {
    let text = read_file(path)?;
    let read = documents(&text).with_context(|| format!("reading manifests from {path:?}"))?;
    let objects = read.into_iter().flat_map(|document| match document["kind"].as_str() {
        Some("List") => document["items"].as_array().cloned().unwrap_or_default(),
        _ => vec![document],
    });
    let objects: Vec<Value> = objects.collect();
    let find = |kind: &str, name: &str| {
        objects.iter().find(|object| {
            let metadata = &object["metadata"];
            object["kind"] == kind && metadata["name"] == name && metadata["namespace"] == namespace
        })
    };
    let overrides = match find("Secret", OVERRIDES_SECRET) {
        Some(object) if object["stringData"][OVERRIDES_SECRET].is_string() => {
            let text = object["stringData"][OVERRIDES_SECRET].as_str().unwrap_or_default();
            Some(parse_overrides(text.as_bytes())?)
        }
        Some(object) => {
            let secret: Secret = serde_json::from_value(object.clone()).context("reading the Secret")?;
            let bytes = secret.data.and_then(|mut data| data.remove(OVERRIDES_SECRET));
            bytes.map(|bytes| parse_overrides(&bytes.0)).transpose()?
        }
        None => None,
    };
    let bundle = find("ConfigMap", TRUST_ROOTS_CONFIG_MAP).and_then(|map| map["data"]["ca-bundle.crt"].as_str());
    Ok(ExistingInstallation {
        kubernetes_version: String::new(),
        is_installed: find("ConfigMap", CONFIG_MAP).is_some(),
        overrides,
        crds: Vec::new(),
        anchors: parse_anchors(bundle.map(str::to_owned))?,
    })
}

fn parse_overrides(yaml: &[u8]) -> anyhow::Result<Value> {
    serde_yaml_ng::from_slice(yaml).with_context(|| format!("reading the values in Secret {OVERRIDES_SECRET}"))
}

fn parse_anchors(bundle: Option<String>) -> anyhow::Result<Option<Vec<Certificate>>> {
    let parsed = bundle.map(|pem| Certificate::parse_bundle(pem.as_bytes())).transpose();
    parsed.with_context(|| format!("reading the trust anchors in ConfigMap {TRUST_ROOTS_CONFIG_MAP}"))
}

/// The Secret that records the values, and the key of the values in it.
pub(super) const OVERRIDES_SECRET: &str = "linkerd-config-overrides";
const CONFIG_MAP: &str = "linkerd-config";
/// The ConfigMap with the trust anchors.
pub(super) const TRUST_ROOTS_CONFIG_MAP: &str = "linkerd-identity-trust-roots";

/// Reads a file; `-` reads standard input.
fn read_file(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("reading standard input");
    }
    std::fs::read_to_string(path).with_context(|| format!("reading {path:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_existing_installation_is_read_from_manifests() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("all.yaml");
        let yaml = "\
apiVersion: v1
kind: List
items:
- {kind: ConfigMap, apiVersion: v1, metadata: {name: linkerd-config, namespace: mesh}}
- kind: Secret
  apiVersion: v1
  metadata: {name: linkerd-config-overrides, namespace: mesh}
  data: {linkerd-config-overrides: Y29udHJvbGxlclJlcGxpY2FzOiAzCg==}
";
        std::fs::write(&path, yaml).unwrap();
        let found = read_manifests(&path, "mesh").unwrap();
        assert!(found.is_installed);
        assert_eq!(found.overrides, Some(serde_json::json!({ "controllerReplicas": 3 })));
        let elsewhere = read_manifests(&path, "linkerd").unwrap();
        assert!(!elsewhere.is_installed && elsewhere.overrides.is_none());
    }
}
