//! Addresses behind a service port, and all that a client needs to know of each.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// The endpoints of one service port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    pub existence: Existence,
    pub scope: TrafficScope,
    pub addresses: BTreeMap<SocketAddr, Arc<Endpoint>>,
}

impl Endpoints {
    /// Whether each node has endpoints of its own.
    pub fn is_by_node(&self) -> bool {
        self.scope != TrafficScope::Cluster
    }
}

/// Whether there is a service at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existence {
    #[default]
    Missing,
    /// It is a DNS alias, which has no endpoints of its own.
    ExternalName,
    Present,
}

/// Which endpoints a client may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrafficScope {
    #[default]
    Cluster,
    /// Those on the client's own node.
    Node,
    /// Those that are meant for the client's node, where there are any; every endpoint is meant for some.
    HintedNode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub addr: SocketAddr,
    pub workload: Workload,
    /// Metric labels, a list because maps weigh more; zones and their locality depend on the client and are added for it.
    /// Of two with one name the later counts.
    pub labels: Vec<(Cow<'static, str>, Arc<str>)>,
    pub node: Option<Arc<str>>,
    pub zone: Option<Arc<str>>,
    /// Zones whose clients should use this endpoint; none means all.
    pub hint_zones: Vec<Arc<str>>,
    /// Nodes whose clients should use this endpoint; none means all.
    pub hint_nodes: Vec<Arc<str>>,
    /// What requests are addressed to instead of what the client asked for.
    pub authority_override: Option<Arc<str>>,
    pub protocol: Option<ProtocolHint>,
    /// The proxy's inbound port, when bytes go through it with a transport header.
    pub opaque_transport: Option<u16>,
    pub identity: Option<TlsIdentity>,
    pub http2: Http2Params,
}

/// What runs at the address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    Pod {
        namespace: Arc<str>,
        name: Arc<str>,
    },
    External {
        namespace: Arc<str>,
        name: Arc<str>,
    },
    /// An address and nothing more.
    Unknown,
}

/// How a meshed endpoint wants to be spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolHint {
    H2,
    Opaque,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsIdentity {
    Dns { name: Arc<str>, server_name: Arc<str> },
    Uri { uri: Arc<str>, server_name: Arc<str> },
}

impl TlsIdentity {
    /// What its certificate says.
    pub fn name(&self) -> &str {
        match self {
            Self::Dns { name, .. } | Self::Uri { uri: name, .. } => name,
        }
    }

    /// Under which name it is reached.
    pub fn server_name(&self) -> &str {
        match self {
            Self::Dns { server_name, .. } | Self::Uri { server_name, .. } => server_name,
        }
    }
}

/// Whether the configured HTTP/2 client parameters go along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http2Params {
    Configured,
    Unset,
}

impl Endpoint {
    /// An address that nothing is known about.
    pub fn bare(addr: SocketAddr) -> Self {
        Self {
            addr,
            workload: Workload::Unknown,
            labels: Vec::new(),
            node: None,
            zone: None,
            hint_zones: Vec::new(),
            hint_nodes: Vec::new(),
            authority_override: None,
            protocol: None,
            opaque_transport: None,
            identity: None,
            http2: Http2Params::Unset,
        }
    }
}
