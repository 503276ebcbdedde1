//! Statuses of routes and policies, which the leader writes (write-back). They are read completely, to keep the entries of
//! other controllers and to avoid unnecessary writes.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The status of a route for one parent, from one controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentStatus {
    pub parent_ref: ParentRef,
    pub controller_name: String,
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// The reference to a parent, in the spec or the status of a route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentRef {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub section_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

/// A condition of an object. Times stay strings, because they are not used for computation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    pub reason: String,
    pub message: String,
    /// The generation of the object for which the condition was computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When `status` last changed.
    pub last_transition_time: String,
}

/// The object that a policy is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRef {
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyStatus {
    #[serde(default)]
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
}

/// Returns whether the conditions contain a true `Accepted`.
pub fn is_accepted(conditions: &[Condition]) -> bool {
    conditions
        .iter()
        .any(|condition| condition.kind == ACCEPTED && condition.status == "True")
}

/// Returns whether the object was rejected for an unsupported value, not because of its parent.
pub fn is_unsupported(conditions: &[Condition]) -> bool {
    conditions.iter().any(|condition| {
        condition.kind == ACCEPTED && condition.status == "False" && condition.reason == UNSUPPORTED_VALUE
    })
}

/// Returns the current time, in the form and with the resolution of one second that conditions have.
pub fn timestamp() -> String {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// Name of the controller whose status decides whether an object is served.
pub const CONTROLLER_NAME: &str = "linkerd.io/policy-controller";

pub const ACCEPTED: &str = "Accepted";

/// Reason for an object with parts that are unreadable or not supported.
pub const UNSUPPORTED_VALUE: &str = "UnsupportedValue";
