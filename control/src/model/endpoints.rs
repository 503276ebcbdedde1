//! The endpoints of a service port, with everything that a client needs to connect to them.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::model::remote_discovery::RemoteDiscovery;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    pub existence: Existence,
    pub scope: TrafficScope,
    /// Sorted by address.
    pub endpoints: Box<[Arc<Endpoint>]>,
    /// Whether all endpoints are terminating. They are used while there are no others.
    pub are_terminating: bool,
    /// Whether the Service lists the port. For a federated Service, this is the federated Service, not its local member.
    pub is_port_listed: bool,
    /// Set if the Service has endpoints in other clusters. `endpoints` then has only the endpoints of its local member.
    pub remote: Option<Arc<RemoteDiscovery>>,
}

impl Endpoints {
    /// Returns whether the endpoints depend on the client's node.
    pub fn is_node_scoped(&self) -> bool {
        self.scope != TrafficScope::Cluster
    }

    /// Whether every client has an endpoint that is ready.
    pub fn serves_all_clients(&self) -> bool {
        !self.endpoints.is_empty() && !self.are_terminating && self.scope != TrafficScope::Node
    }

    /// The same Service without endpoints: a member of a federated Service has none for a port that it lacks, because the number of
    /// this port means nothing to its pods.
    pub fn without_port(&self) -> Self {
        Self {
            existence: self.existence,
            ..Self::default()
        }
    }

    pub fn get(&self, addr: SocketAddr) -> Option<&Arc<Endpoint>> {
        let found = self.endpoints.binary_search_by_key(&addr, |endpoint| endpoint.addr);
        found.ok().map(|at| &self.endpoints[at])
    }
}

/// Whether the service exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existence {
    #[default]
    Missing,
    /// The service is a DNS alias without endpoints.
    ExternalName,
    Present,
}

/// Which endpoints a client can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrafficScope {
    /// Endpoints with a hint for the client's zone if zone hints apply, otherwise all.
    #[default]
    Cluster,
    /// Only endpoints on the client's node.
    Node,
    /// Endpoints with a hint for the client's node; if there are none, the same endpoints as for `Cluster`. Set only if every
    /// endpoint has node hints.
    HintedNode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub addr: SocketAddr,
    pub workload: EndpointWorkload,
    pub node: Option<Arc<str>>,
    pub zone: Option<Arc<str>>,
    /// Zones whose clients should use this endpoint. Ignored unless every endpoint of the port has at least one zone.
    pub hint_zones: Arc<[Arc<str>]>,
    /// Nodes whose clients should use this endpoint. Ignored unless every endpoint of the port has at least one node.
    pub hint_nodes: Arc<[Arc<str>]>,
    /// Shared by the replicas of an owner.
    pub shared: Arc<SharedEndpointFields>,
}

/// Fields of an endpoint that are usually equal for all replicas of an owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct SharedEndpointFields {
    /// Metric labels, as a list because a map needs more memory. If a name occurs twice, the later entry applies. The translation
    /// to protobuf adds the labels for the name of the workload, `zone` and `zone_locality`.
    pub labels: Vec<(Cow<'static, str>, Arc<str>)>,
    /// The authority that replaces the one in the client's request.
    pub authority_override: Option<Arc<str>>,
    pub protocol: Option<ProtocolHint>,
    /// The inbound port of the endpoint's proxy, if connections to the endpoint use a transport header.
    pub opaque_transport_port: Option<u16>,
    pub identity: Option<TlsIdentity>,
    pub http2: Http2Params,
}

/// The workload at the address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum EndpointWorkload {
    Pod { namespace: Arc<str>, name: Arc<str> },
    External { namespace: Arc<str>, name: Arc<str> },
    Unknown,
}

/// The protocol that clients use with a meshed endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProtocolHint {
    H2,
    Opaque,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TlsIdentity {
    Dns { name: Arc<str>, server_name: Arc<str> },
    Uri { uri: Arc<str>, server_name: Arc<str> },
}

impl TlsIdentity {
    /// The name in the workload's certificate.
    pub fn name(&self) -> &str {
        match self {
            Self::Dns { name, .. } | Self::Uri { uri: name, .. } => name,
        }
    }

    /// The SNI for connections to the workload.
    pub fn server_name(&self) -> &str {
        match self {
            Self::Dns { server_name, .. } | Self::Uri { server_name, .. } => server_name,
        }
    }
}

/// Whether the configured HTTP/2 client parameters are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Http2Params {
    Configured,
    #[default]
    Unset,
}

impl Endpoint {
    /// Creates an endpoint of which only the address is known.
    pub fn from_addr(addr: SocketAddr) -> Self {
        Self {
            addr,
            workload: EndpointWorkload::Unknown,
            node: None,
            zone: None,
            hint_zones: Arc::default(),
            hint_nodes: Arc::default(),
            shared: Arc::default(),
        }
    }
}
