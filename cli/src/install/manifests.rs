//! Builds and formats the manifests of a control plane.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use serde_json::{Value, json};
use tulle_core::names::{annotation, label};

use super::charts::{CONTROL_PLANE, Helm};
use super::existing::{self, ExistingInstallation};
use crate::kubernetes;

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    Yaml,
    Json,
}

/// The manifests of a control plane with these values, including its namespace and the Secret that records the values.
pub(super) fn control_plane(helm: &Helm, values: &Value, flags: &kubernetes::Flags) -> anyhow::Result<Vec<Value>> {
    let namespace = &flags.linkerd_namespace;
    let mut manifests = vec![json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": namespace,
            // Pods of the control plane must start while no webhook is available.
            "annotations": { annotation::INJECT: "disabled" },
            "labels": {
                label::ADMISSION_WEBHOOKS: "disabled",
                label::CONTROL_PLANE_NS: namespace,
                label::IS_CONTROL_PLANE: "true",
            },
        },
    })];
    manifests.extend(helm.render(&CONTROL_PLANE, values)?);
    manifests.push(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": existing::OVERRIDES_SECRET,
            "namespace": namespace,
            "labels": { label::CONTROL_PLANE_NS: namespace },
        },
        "stringData": { existing::OVERRIDES_SECRET: serde_yaml_ng::to_string(values).context("writing the values")? },
    }));
    Ok(manifests)
}

/// The recorded values of the last installation or upgrade.
pub(super) fn recorded_overrides<'a>(
    existing: &'a ExistingInstallation,
    flags: &kubernetes::Flags,
) -> anyhow::Result<&'a Value> {
    let namespace = &flags.linkerd_namespace;
    match (&existing.overrides, existing.is_installed) {
        (Some(overrides), _) => Ok(overrides),
        (None, true) => bail!(
            "the control plane in namespace {namespace} was not installed by `tulle install` (there is no Secret {}); \
             if Helm did, use helm upgrade",
            existing::OVERRIDES_SECRET
        ),
        (None, false) => bail!("there is no control plane in namespace {namespace}; install one with `tulle install`"),
    }
}

/// Formats manifests as a stream of documents. `kubectl` reads both formats.
pub(crate) fn format_manifests(manifests: &[Value], output: Output) -> anyhow::Result<String> {
    let mut text = String::new();
    for manifest in manifests {
        match output {
            Output::Yaml => {
                text.push_str("---\n");
                text.push_str(&serde_yaml_ng::to_string(manifest).context("writing YAML")?);
            }
            Output::Json => {
                text.push_str(&serde_json::to_string_pretty(manifest).context("writing JSON")?);
                text.push('\n');
            }
        }
    }
    Ok(text)
}

/// The key of an object: group, kind, namespace, name.
pub(super) fn object_key(object: &Value) -> (String, String, String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let group = version.split_once('/').map(|(group, _)| group).unwrap_or_default();
    let metadata = &object["metadata"];
    (
        group.to_owned(),
        text(&object["kind"]),
        text(&metadata["namespace"]),
        text(&metadata["name"]),
    )
}

pub(super) fn object_keys<'a>(
    objects: impl IntoIterator<Item = &'a Value>,
) -> BTreeSet<(String, String, String, String)> {
    objects.into_iter().map(object_key).collect()
}
