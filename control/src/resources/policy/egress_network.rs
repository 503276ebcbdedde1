//! `EgressNetwork`: addresses outside the cluster, and whether traffic to them is allowed.

use serde::Deserialize;
use tulle_core::nets::NetworkMatch;

use crate::resources::meta::Meta;
use crate::resources::policy::reference::{Raw, RawNetwork, networks};
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
        })
    }
}
