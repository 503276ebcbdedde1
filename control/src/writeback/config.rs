//! Settings of the write-back controllers.

use std::time::Duration;

use ipnet::IpNet;
use tulle_core::ports::PortSet;

#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the leases. Default `linkerd`.
    pub controller_namespace: String,
    /// The holder identity in leases: the name of this pod.
    pub lease_holder: String,
    /// The Deployment that owns the leases, which are deleted with it. Default `linkerd-destination`.
    pub lease_owner_deployment: String,
    /// Whether this process writes EndpointSlices.
    pub write_slices: bool,
    /// `None` if this process does not write statuses.
    pub statuses: Option<StatusesConfig>,
}

#[derive(Clone, Debug)]
pub struct StatusesConfig {
    /// Domain of Service names, and so of the names of ServiceProfiles. Default `cluster.local`.
    pub cluster_domain: String,
    /// Networks that an EgressNetwork must not overlap. Default 10/8, 100.64/10, 172.16/12, 192.168/16.
    pub cluster_networks: Vec<IpNet>,
    /// Namespace of the EgressNetworks that apply to namespaces without their own. Default `linkerd-egress`.
    pub global_egress_namespace: String,
    /// Ports that are opaque unless an annotation says otherwise.
    pub default_opaque_ports: PortSet,
    /// Timeout of one patch. Default 5 s.
    pub patch_timeout: Duration,
}
