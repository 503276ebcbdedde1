//! The ServiceProfile that `tulle profile` prints.

use serde::Serialize;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Profile {
    pub(super) api_version: &'static str,
    pub(super) kind: &'static str,
    pub(super) metadata: Metadata,
    pub(super) spec: Spec,
}

#[derive(Serialize)]
pub(super) struct Metadata {
    pub(super) name: String,
    pub(super) namespace: String,
}

#[derive(Serialize)]
pub(super) struct Spec {
    pub(super) routes: Vec<Route>,
}

/// A route of a profile, with the fields that this command sets.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Route {
    pub(super) name: String,
    pub(super) condition: Condition,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) response_classes: Vec<ResponseClass>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timeout: Option<String>,
}

#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Condition {
    pub(super) method: String,
    pub(super) path_regex: String,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResponseClass {
    pub(super) condition: ResponseCondition,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_failure: bool,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct ResponseCondition {
    pub(super) status: StatusRange,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct StatusRange {
    pub(super) min: u16,
    pub(super) max: u16,
}
