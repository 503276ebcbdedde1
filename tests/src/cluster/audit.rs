//! The audit log of the API server.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Value, json};

/// Which requests are logged, and with how much detail.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum AuditPolicy {
    /// All requests of service accounts, for every kind, without bodies. Shows which permissions are used.
    #[default]
    ServiceAccounts,
    /// Requests of any user for kinds of the core group, `linkerd.io`, `policy.linkerd.io` and `gateway.networking.k8s.io`,
    /// with bodies.
    WithBodies,
}

/// One request at one stage.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditRecord {
    /// `RequestReceived`, `ResponseStarted` (watches) or `ResponseComplete`.
    pub stage: String,
    #[serde(rename = "requestURI")]
    pub uri: String,
    pub verb: String,
    pub user: AuditUser,
    #[serde(default)]
    pub object_ref: Option<AuditObject>,
    #[serde(default)]
    pub response_status: Option<AuditStatus>,
    #[serde(default)]
    pub user_agent: String,
    #[serde(default)]
    pub request_object: Option<Value>,
    /// RFC 3339, with microseconds.
    #[serde(default)]
    pub request_received_timestamp: String,
    /// The authorization decision and its reason.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct AuditUser {
    /// `system:serviceaccount:<namespace>:<name>` for a service account.
    pub username: String,
}

/// The object of a request; absent for paths that are not resources (`/healthz`).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuditObject {
    /// The plural name (`pods`).
    pub resource: String,
    pub subresource: String,
    /// Empty for core kinds.
    pub api_group: String,
    pub namespace: String,
    pub name: String,
}

/// The response status of a request.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct AuditStatus {
    /// The HTTP status.
    #[serde(default)]
    pub code: u16,
}

impl AuditRecord {
    /// Whether the server refused the request because a permission is missing.
    pub fn is_forbidden(&self) -> bool {
        self.response_status.as_ref().is_some_and(|status| status.code == 403)
    }
}

impl AuditPolicy {
    /// Writes the policy file that the API server reads.
    pub(super) fn write(self, path: &Path) -> anyhow::Result<()> {
        let all_of = |groups: &[&str]| {
            let resources: Vec<Value> = groups
                .iter()
                .map(|group| json!({"group": group, "resources": ["*"]}))
                .collect();
            json!({"level": "RequestResponse", "resources": resources})
        };
        let rules = match self {
            Self::ServiceAccounts => vec![json!({
                "level": "Metadata",
                "userGroups": ["system:serviceaccounts"],
                "omitStages": ["RequestReceived"],
            })],
            Self::WithBodies => vec![
                all_of(&[""]),
                all_of(&["linkerd.io", "policy.linkerd.io", "gateway.networking.k8s.io"]),
            ],
        };
        let rules: Vec<Value> = rules.into_iter().chain([json!({"level": "None"})]).collect();
        let policy = json!({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules});
        fs::write(path, policy.to_string()).with_context(|| format!("writing {}", path.display()))
    }
}

pub(super) fn read(path: &Path) -> anyhow::Result<Vec<AuditRecord>> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    // A last line without a newline is still being written.
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    let record = |line| serde_json::from_str(line).with_context(|| format!("an audit record: {line}"));
    complete.lines().map(record).collect()
}
