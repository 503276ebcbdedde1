//! Configuration of the service mirror.

use std::time::Duration;

use super::link::Exclusions;
use crate::resources::labels::Selector;

#[derive(Clone, Debug)]
pub struct Config {
    /// The namespace of Links, credentials, leases and probe Services.
    pub namespace: String,
    pub scope: Scope,
    /// The Service through which the gateway is probed. Default none: it is not probed.
    pub probe_service: Option<String>,
    /// Whether namespaces that only the other cluster has are created. Default false.
    pub may_create_namespaces: bool,
    /// Whether pods of headless Services that have host names get mirrors of their own. Default false.
    pub mirrors_pods: bool,
    /// Time between two lookups of the gateway's names, and between comparisons without a change. Default one minute.
    pub refresh_period: Duration,
    /// The name of this process in the lease: that of its pod.
    pub lease_holder: String,
}

/// Whose Services are mirrored.
#[derive(Clone, Debug)]
pub enum Scope {
    /// Those of the cluster of this Link.
    Link(String),
    /// Those of this cluster, as members of federated Services.
    ThisCluster(LocalMembers),
}

#[derive(Clone, Debug)]
pub struct LocalMembers {
    pub(super) selector: Selector,
    pub(super) excluded_labels: Exclusions,
    pub(super) excluded_annotations: Exclusions,
}

impl LocalMembers {
    /// Exclusions are comma-separated lists.
    pub fn new(selector: Selector, excluded_labels: &str, excluded_annotations: &str) -> Self {
        Self {
            selector,
            excluded_labels: Exclusions::from_list(excluded_labels),
            excluded_annotations: Exclusions::from_list(excluded_annotations),
        }
    }
}
