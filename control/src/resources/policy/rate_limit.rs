//! `HTTPLocalRateLimitPolicy`: requests per second that each proxy allows to a server.

use std::num::NonZeroU32;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::reference::{POLICY_GROUP, RawReference, RawResource};
use crate::resources::status::{PolicyStatus, TargetRef};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitPolicy {
    pub meta: Meta,
    /// Changes with the spec.
    pub generation: Option<i64>,
    pub server: Arc<str>,
    /// The target reference as in the manifest.
    pub target: TargetRef,
    /// For all clients together.
    pub total: Option<NonZeroU32>,
    /// For the clients of each identity.
    pub per_identity: Option<NonZeroU32>,
    /// Limits of some service accounts, instead of `per_identity`.
    pub overrides: Vec<RateLimitOverride>,
    pub status: PolicyStatus,
    /// Why the object is unreadable. If set, requests to the Server fail.
    pub unreadable: Option<Arc<str>>,
}

/// A limit for some service accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitOverride {
    pub limit: NonZeroU32,
    pub clients: Vec<NamespacedName>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct Spec {
    target_ref: RawReference,
    total: Option<RawLimit>,
    identity: Option<RawLimit>,
    #[serde(default)]
    overrides: Vec<RawOverride>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawLimit {
    requests_per_second: NonZeroU32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawOverride {
    requests_per_second: NonZeroU32,
    client_refs: Vec<RawReference>,
}

impl RateLimitPolicy {
    pub(in crate::resources) fn from_raw(raw: RawResource<Spec>) -> Result<Self, String> {
        let Spec {
            target_ref,
            total,
            identity,
            overrides,
        } = raw.spec;
        let generation = raw.metadata.generation;
        let meta = Meta::from_kubernetes(raw.metadata)?;
        if !target_ref.is_kind(POLICY_GROUP, "Server") {
            return Err(target_ref.unsupported_kind_error("spec.targetRef", "Server"));
        }
        target_ref.check_own_namespace("spec.targetRef", meta.namespace())?;
        let total = total.map(|limit| limit.requests_per_second);
        let within_total = |field: &str, limit: NonZeroU32| match total {
            Some(total) if limit > total => Err(format!("{field} of {limit} is above the total of {total}")),
            _ => Ok(limit),
        };
        let per_identity = identity
            .map(|limit| within_total("spec.identity", limit.requests_per_second))
            .transpose()?;
        let mut parsed = Vec::new();
        for RawOverride {
            requests_per_second,
            client_refs,
        } in overrides
        {
            if let Some(other) = client_refs.iter().find(|client| !client.is_kind("", "ServiceAccount")) {
                return Err(other.unsupported_kind_error("spec.overrides[].clientRefs", "ServiceAccount"));
            }
            parsed.push(RateLimitOverride {
                limit: within_total("spec.overrides[]", requests_per_second)?,
                clients: client_refs
                    .iter()
                    .map(|client| client.resolve(meta.namespace()))
                    .collect(),
            });
        }
        Ok(Self {
            meta,
            generation,
            server: target_ref.name.as_str().into(),
            target: target_ref.into(),
            total,
            per_identity,
            overrides: parsed,
            status: raw.status,
            unreadable: None,
        })
    }

    /// Creates the placeholder for an unreadable rate limit: for the Server of the referenced name in the rate limit's own
    /// namespace, even if the reference names another namespace. Returns `None` if it does not refer to a Server.
    pub(in crate::resources) fn placeholder(object: &Value, meta: Meta, reason: &str) -> Option<Self> {
        // The reference itself can be the unreadable part, for example because of an unknown field.
        let field = |name: &str| object["spec"]["targetRef"][name].as_str().map(str::to_owned);
        let target = RawReference {
            group: field("group").unwrap_or_default(),
            kind: field("kind")?,
            name: field("name")?,
            namespace: field("namespace"),
        };
        target.is_kind(POLICY_GROUP, "Server").then(|| Self {
            meta,
            generation: object["metadata"]["generation"].as_i64(),
            server: target.name.as_str().into(),
            target: target.into(),
            total: None,
            per_identity: None,
            overrides: Vec::new(),
            status: PolicyStatus::deserialize(&object["status"]).unwrap_or_default(),
            unreadable: Some(reason.into()),
        })
    }
}
