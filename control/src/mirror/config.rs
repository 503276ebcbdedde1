//! Configuration of the service mirror.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::Client;

use super::link::{Exclusions, comma_separated};
use crate::resources::labels::Selector;

#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of Links, credentials, leases and probe Services.
    pub namespace: String,
    pub scope: Scope,
    /// The Service through which the gateway is probed. Default none: the gateway is not probed. With [`Scope::AllLinks`], each Link
    /// has its own, which is created if it does not exist.
    pub probe_service: Option<String>,
    /// Whether the namespace of a mirror is created if this cluster does not have it. Default false.
    pub may_create_namespaces: bool,
    /// Whether each pod of a headless Service that has a host name gets its own mirror. Default false.
    pub mirrors_pods: bool,
    /// Interval at which the gateway's names are resolved, and all mirrors are compared with the exported Services even without a
    /// change. Default one minute.
    pub refresh_period: Duration,
    /// Name of this process in the lease. It is the name of the pod.
    pub lease_holder: String,
}

/// The Services that are mirrored.
#[derive(Clone, Debug)]
pub enum Scope {
    /// The Services of the cluster of the Link with this name.
    Link(String),
    /// The Services of the clusters of all Links except those with these names.
    AllLinks(BTreeSet<String>),
    /// The Services of this cluster, as members of federated Services.
    ThisCluster(LocalMembers),
}

/// Clients of the API server of this cluster.
#[derive(Clone)]
pub struct Clients {
    pub objects: Client,
    /// It has its own queue and rate limit, so that no lease is lost while many mirrors are written.
    pub leases: Client,
}

/// The Services that one controller mirrors.
pub(super) enum ControllerScope {
    /// See [`Scope::Link`].
    Link(String),
    /// See [`Scope::ThisCluster`].
    ThisCluster(LocalMembers),
}

/// Settings for the Services of this cluster that join federated Services.
#[derive(Clone, Debug)]
pub struct LocalMembers {
    pub(super) selector: Selector,
    pub(super) excluded_labels: Exclusions,
    pub(super) excluded_annotations: Exclusions,
}

impl Scope {
    /// All Links except those in a comma-separated list of names.
    pub fn all_links_except(excluded: &str) -> Self {
        Self::AllLinks(comma_separated(excluded).map(str::to_owned).collect())
    }
}

impl LocalMembers {
    /// The exclusions are comma-separated lists of names and prefixes.
    pub fn new(selector: Selector, excluded_labels: &str, excluded_annotations: &str) -> Self {
        Self {
            selector,
            excluded_labels: Exclusions::from_list(excluded_labels),
            excluded_annotations: Exclusions::from_list(excluded_annotations),
        }
    }
}
