//! `EgressNetwork`: addresses outside the cluster, and whether traffic to them is allowed.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tulle_core::nets::NetworkMatch;

use crate::resources::meta::Meta;
use crate::resources::policy::reference::{self, Raw, RawNetwork, networks};
use crate::resources::status::PolicyStatus;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressNetwork {
    pub meta: Meta,
    /// Changes whenever the spec does.
    pub generation: Option<i64>,
    /// None stands for everything outside the cluster's networks.
    pub networks: Option<Vec<NetworkMatch>>,
    pub traffic: TrafficPolicy,
    pub status: PolicyStatus,
    /// Why it cannot be read; then what it is for is refused, whatever routes say.
    pub unread: Option<Arc<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum TrafficPolicy {
    Allow,
    Deny,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct Spec {
    networks: Option<Vec<RawNetwork>>,
    traffic_policy: TrafficPolicy,
}

impl EgressNetwork {
    pub(in crate::resources) fn from_raw(raw: Raw<Spec>) -> Result<Self, String> {
        if raw.spec.networks.as_ref().is_some_and(Vec::is_empty) {
            return Err("spec.networks is empty; leave it out to mean everything outside the cluster".to_owned());
        }
        Ok(Self {
            generation: raw.metadata.generation,
            meta: Meta::from_kubernetes(raw.metadata)?,
            networks: raw.spec.networks.map(networks).transpose()?,
            traffic: raw.spec.traffic_policy,
            status: raw.status,
            unread: None,
        })
    }

    /// What stands for a network that cannot be read: it is for the addresses that it names, or for everything outside
    /// the cluster where that cannot be told.
    pub(in crate::resources) fn unread(object: &Value, meta: Meta, reason: &str) -> Self {
        let networks = Vec::<RawNetwork>::deserialize(&object["spec"]["networks"]).ok();
        let networks = networks.and_then(|raw| reference::networks(raw).ok());
        Self {
            meta,
            generation: object["metadata"]["generation"].as_i64(),
            networks: networks.filter(|networks| !networks.is_empty()),
            traffic: TrafficPolicy::Deny,
            status: PolicyStatus::deserialize(&object["status"]).unwrap_or_default(),
            unread: Some(reason.into()),
        }
    }
}
