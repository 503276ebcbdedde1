//! Statuses that the policy controller writes: read whole, so that what others wrote is kept and nothing is written twice.

use serde::{Deserialize, Serialize};

/// What one controller says about a route and one of its parents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ParentStatus {
    pub parent_ref: ParentRef,
    pub controller_name: String,
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// A parent as statuses name it.
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

/// One statement about an object. Times stay text: nobody counts with them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    pub reason: String,
    pub message: String,
    /// The generation of the object that this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When `status` became what it is.
    pub last_transition_time: String,
}

/// The object that a policy of ours is attached to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRef {
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The status of a policy of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyStatus {
    #[serde(default)]
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
}

/// Whether a list of conditions says that the object was accepted.
pub fn is_accepted(conditions: &[Condition]) -> bool {
    conditions
        .iter()
        .any(|condition| condition.kind == ACCEPTED && condition.status == "True")
}

/// Whether it was refused for what it asks, and not for its parent.
pub fn is_unsupported(conditions: &[Condition]) -> bool {
    conditions
        .iter()
        .any(|condition| condition.kind == ACCEPTED && condition.status == "False" && condition.reason == UNSUPPORTED)
}

/// Who must have accepted an object for us to serve it.
pub const CONTROLLER_NAME: &str = "linkerd.io/policy-controller";

pub const ACCEPTED: &str = "Accepted";

/// Reason of a route that asks for what no proxy does.
pub const UNSUPPORTED: &str = "UnsupportedValue";
