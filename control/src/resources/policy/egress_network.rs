//! `EgressNetwork`: networks outside the cluster, and whether traffic to them is allowed.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tulle_core::networks::NetworkMatch;
use tulle_core::ports::PortSet;

use crate::resources::meta::Meta;
use crate::resources::policy::reference::{RawNetwork, RawResource, parse_networks};
use crate::resources::port_list;
use crate::resources::status::PolicyStatus;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressNetwork {
    pub meta: Meta,
    /// Changes with the spec.
    pub generation: Option<i64>,
    /// `None` means everything outside the cluster networks.
    pub networks: Option<Vec<NetworkMatch>>,
    pub traffic: TrafficPolicy,
    pub status: PolicyStatus,
    /// Why the object is unreadable. If set, traffic to the network is denied, even if routes match it.
    pub unreadable: Option<Arc<str>>,
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
    pub(in crate::resources) fn from_raw(raw: RawResource<Spec>) -> Result<Self, String> {
        if raw.spec.networks.as_ref().is_some_and(Vec::is_empty) {
            return Err("spec.networks is empty; remove the field to select everything outside the cluster".to_owned());
        }
        Ok(Self {
            generation: raw.metadata.generation,
            meta: Meta::from_kubernetes(raw.metadata)?,
            networks: raw.spec.networks.map(parse_networks).transpose()?,
            traffic: raw.spec.traffic_policy,
            status: raw.status,
            unreadable: None,
        })
    }

    /// Returns whether a port is marked as opaque: by the annotation, or else by the cluster's default.
    pub fn is_opaque(&self, port: u16, default_opaque_ports: &PortSet) -> bool {
        // An EgressNetwork has no named ports.
        port_list::is_marked_opaque(&self.meta, port, default_opaque_ports, |_| Vec::new())
    }

    /// Creates the placeholder for an unreadable network. It covers the networks in the spec, or everything outside the
    /// cluster if those are unreadable, too.
    pub(in crate::resources) fn placeholder(object: &Value, meta: Meta, reason: &str) -> Self {
        let networks = Vec::<RawNetwork>::deserialize(&object["spec"]["networks"]).ok();
        let networks = networks.and_then(|raw| parse_networks(raw).ok());
        Self {
            meta,
            generation: object["metadata"]["generation"].as_i64(),
            networks: networks.filter(|networks| !networks.is_empty()),
            traffic: TrafficPolicy::Deny,
            status: PolicyStatus::deserialize(&object["status"]).unwrap_or_default(),
            unreadable: Some(reason.into()),
        }
    }
}
