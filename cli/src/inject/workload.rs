//! The kind and the name of an object, and its pod template.

use std::fmt;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

/// How injection treats a manifest.
pub(super) enum ManifestKind {
    /// An object that has a pod template at this path. The path is empty for a pod, which is its own template.
    Pods(&'static [&'static str]),
    Namespace,
    Service,
    /// Any other object, which is left unchanged.
    Other,
}

/// The kind and the name of an object, for messages.
pub(super) struct ObjectName {
    /// In lower case.
    pub(super) kind: String,
    pub(super) name: String,
}

impl ManifestKind {
    pub(super) fn from_object(object: &Value) -> Self {
        let (group, _) = text(object, "apiVersion").split_once('/').unwrap_or_default();
        match (group, text(object, "kind")) {
            ("", "Pod") => Self::Pods(&[]),
            ("", "Namespace") => Self::Namespace,
            ("", "Service") => Self::Service,
            ("", "ReplicationController")
            | ("apps" | "extensions", "Deployment" | "ReplicaSet" | "DaemonSet" | "StatefulSet")
            | ("batch", "Job") => Self::Pods(&["spec", "template"]),
            ("batch", "CronJob") => Self::Pods(&["spec", "jobTemplate", "spec", "template"]),
            _ => Self::Other,
        }
    }
}

impl ObjectName {
    pub(super) fn from_object(object: &Value) -> Self {
        Self {
            kind: text(object, "kind").to_lowercase(),
            name: text(object.get("metadata").unwrap_or(&Value::Null), "name").to_owned(),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind, self.name)
    }
}

/// Looks up the part of an object at this path.
pub(super) fn part_at<'a>(object: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    path.iter().try_fold(object, |value, key| value.get_mut(*key))
}

/// Parses a pod template.
///
/// # Errors
/// Fails if the template cannot be decoded; the API server would reject it, too.
pub(super) fn parse_template(part: &Value) -> anyhow::Result<PodTemplateSpec> {
    serde_json::from_value(part.clone()).context("this is not a valid pod template")
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}
