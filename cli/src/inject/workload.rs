//! Where the pods of an object are described.

use std::fmt;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

/// What a manifest is to injection.
pub(super) enum Workload {
    /// Describes pods below this path, which is empty for a pod.
    Pods(&'static [&'static str]),
    Namespace,
    Service,
    /// Anything else passes through.
    Other,
}

/// The name that people know an object by.
pub(super) struct Title {
    /// In lower case.
    pub(super) kind: String,
    pub(super) name: String,
}

impl Workload {
    pub(super) fn of(object: &Value) -> Self {
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

impl Title {
    pub(super) fn of(object: &Value) -> Self {
        Self {
            kind: text(object, "kind").to_lowercase(),
            name: text(object.get("metadata").unwrap_or(&Value::Null), "name").to_owned(),
        }
    }
}

impl fmt::Display for Title {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind, self.name)
    }
}

/// The part of an object at this path.
pub(super) fn at<'a>(object: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    path.iter().try_fold(object, |value, key| value.get_mut(*key))
}

/// The pods that a template describes.
///
/// # Errors
/// A template that the API server would refuse, too.
pub(super) fn template(part: &Value) -> anyhow::Result<PodTemplateSpec> {
    serde_json::from_value(part.clone()).context("this is no pod as Kubernetes knows it")
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}
