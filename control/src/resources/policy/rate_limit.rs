//! `HTTPLocalRateLimitPolicy`: requests a second that one proxy lets through to a server.

use std::num::NonZeroU32;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use crate::resources::meta::{Meta, Name};
use crate::resources::policy::reference::{POLICY_GROUP, Raw, Reference};
use crate::resources::status::{PolicyStatus, TargetRef};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitPolicy {
    pub meta: Meta,
    /// Changes whenever the spec does.
    pub generation: Option<i64>,
    pub server: Arc<str>,
    /// The server as the manifest names it.
    pub target: TargetRef,
    pub total: Option<NonZeroU32>,
    pub identity: Option<NonZeroU32>,
    pub overrides: Vec<RateLimitOverride>,
    pub status: PolicyStatus,
    /// Why it cannot be read; then requests to the server are answered with an error.
    pub unread: Option<Arc<str>>,
}

/// A limit of their own for some service accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitOverride {
    pub limit: NonZeroU32,
    pub clients: Vec<Name>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct Spec {
    target_ref: Reference,
    total: Option<Limit>,
    identity: Option<Limit>,
    #[serde(default)]
    overrides: Vec<Override>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Limit {
    requests_per_second: NonZeroU32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Override {
    requests_per_second: NonZeroU32,
    client_refs: Vec<Reference>,
}

impl RateLimitPolicy {
    pub(in crate::resources) fn from_raw(raw: Raw<Spec>) -> Result<Self, String> {
        let Spec {
            target_ref,
            total,
            identity,
            overrides,
        } = raw.spec;
        let generation = raw.metadata.generation;
        let meta = Meta::from_kubernetes(raw.metadata)?;
        if !target_ref.is(POLICY_GROUP, "Server") {
            return Err(target_ref.refused("spec.targetRef", "Server"));
        }
        let total = total.map(|limit| limit.requests_per_second);
        let within_total = |field: &str, limit: NonZeroU32| match total {
            Some(total) if limit > total => Err(format!("{field} of {limit} is above the total of {total}")),
            _ => Ok(limit),
        };
        let identity = identity
            .map(|limit| within_total("spec.identity", limit.requests_per_second))
            .transpose()?;
        let mut parsed = Vec::new();
        for Override {
            requests_per_second,
            client_refs,
        } in overrides
        {
            if let Some(other) = client_refs.iter().find(|client| !client.is("", "ServiceAccount")) {
                return Err(other.refused("spec.overrides[].clientRefs", "ServiceAccount"));
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
            identity,
            overrides: parsed,
            status: raw.status,
            unread: None,
        })
    }

    /// What stands for a rate limit that cannot be read; nothing for one that names no Server, which limits nobody.
    pub(in crate::resources) fn unread(object: &Value, meta: Meta, reason: &str) -> Option<Self> {
        let target = Reference::deserialize(&object["spec"]["targetRef"]).ok()?;
        target.is(POLICY_GROUP, "Server").then(|| Self {
            meta,
            generation: object["metadata"]["generation"].as_i64(),
            server: target.name.as_str().into(),
            target: target.into(),
            total: None,
            identity: None,
            overrides: Vec::new(),
            status: PolicyStatus::deserialize(&object["status"]).unwrap_or_default(),
            unread: Some(reason.into()),
        })
    }
}
