//! Configuration of the views.

use std::sync::Arc;

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::resources::policy::server::AccessPolicy;
use crate::resources::service::EndpointsSource;

/// The settings that views depend on, in addition to the store.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the control plane. Default `linkerd`.
    pub controller_namespace: String,
    /// Domain of identities. Default: the cluster domain.
    pub trust_domain: String,
    /// Domain of service names. Default `cluster.local`.
    pub cluster_domain: String,
    /// Networks of the cluster. Default 10/8, 100.64/10, 172.16/12, 192.168/16.
    pub cluster_networks: Vec<IpNet>,
    /// Source networks of health probes. Default none.
    pub probe_networks: Vec<IpNet>,
    /// Policy of ports that no Server selects. Default `all-unauthenticated`.
    pub default_policy: AccessPolicy,
    /// Opaque ports of workloads and Services without the opaque-ports annotation. Default none.
    pub default_opaque_ports: PortSet,
    /// Namespace of the EgressNetworks for client namespaces that have none. Default `linkerd-egress`.
    pub global_egress_namespace: String,
    /// The objects that endpoints are read from. Default EndpointSlices.
    pub endpoints_source: EndpointsSource,
    /// Whether IPv6 endpoints are served. Default no here, and yes for the flag `--enable-ipv6`, which sets it.
    pub ipv6: Ipv6,
    /// Whether clients are instructed to use HTTP/2 to meshed endpoints. Default yes.
    pub h2_upgrade: H2Upgrade,
    /// The ports for which clients send a transport header. Default opaque ports.
    pub transport: TransportMode,
    /// The cluster's name in the labels of mirrors. `None` for the cluster of this control plane.
    pub remote_name: Option<Arc<str>>,
    /// Listen address of the destination service, written in the field `addr` of log lines. Default `:8086`.
    pub log_addr: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6 {
    /// A workload with addresses of both families is reached over IPv6.
    Serve,
    Drop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum H2Upgrade {
    Offer,
    Omit,
}

/// The values of the flag `--outbound-transport-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportMode {
    /// A transport header for opaque ports, except the admin and control ports of a pod.
    Transparent,
    /// A transport header for every port of a meshed endpoint, with the same exceptions.
    TransportHeader,
}

impl Config {
    /// The settings for the endpoints of another cluster. The settings that apply to clients are those of this cluster.
    pub fn for_remote_cluster(&self, name: &str, trust_domain: &str, cluster_domain: &str) -> Self {
        Self {
            remote_name: Some(name.into()),
            trust_domain: trust_domain.to_owned(),
            cluster_domain: cluster_domain.to_owned(),
            ..self.clone()
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        let networks = ["10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"];
        let networks = networks
            .iter()
            .map(|net| net.parse().expect("the literals are networks"))
            .collect();
        Self {
            controller_namespace: "linkerd".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            cluster_domain: "cluster.local".to_owned(),
            cluster_networks: networks,
            probe_networks: Vec::new(),
            default_policy: "all-unauthenticated".parse().expect("the literal is a policy"),
            default_opaque_ports: PortSet::default(),
            global_egress_namespace: "linkerd-egress".to_owned(),
            endpoints_source: EndpointsSource::EndpointSlices,
            ipv6: Ipv6::Drop,
            h2_upgrade: H2Upgrade::Offer,
            transport: TransportMode::Transparent,
            remote_name: None,
            log_addr: ":8086".to_owned(),
        }
    }
}
