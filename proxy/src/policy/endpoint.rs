//! One endpoint as discovery describes it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use tulle_core::identity::Identity;

use crate::policy::meta::Meta;

/// An address and all that decides how to speak to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    pub addr: SocketAddr,
    pub weight: u32,
    /// For metrics; the endpoint's own labels win over those of its set.
    pub labels: BTreeMap<String, String>,
    /// Absent: the peer is not meshed and is spoken to in plain text.
    pub tls: Option<EndpointTls>,
    pub hint: ProtocolHint,
    /// Port of the peer's proxy that takes connections behind a transport header.
    pub opaque_transport: Option<NonZeroU16>,
    pub authority_override: Option<Authority>,
    pub http2: Http2Params,
    pub locality: Locality,
    pub resource: Option<Arc<Meta>>,
}

/// Whom to expect at an endpoint, and the name to ask for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointTls {
    pub identity: Identity,
    pub server_name: Arc<str>,
}

/// What an endpoint's proxy understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProtocolHint {
    #[default]
    Unknown,
    /// HTTP/1 may be carried over HTTP/2.
    H2,
    /// Bytes, whatever they look like.
    Opaque,
}

/// Whether an endpoint is in our zone, for counting bytes that cross zones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Locality {
    #[default]
    Unknown,
    Local,
    Remote,
}

/// HTTP/2 settings for one endpoint; what is absent is the client's own default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Http2Params {
    /// Bytes.
    pub connection_window: Option<u32>,
    /// Bytes.
    pub stream_window: Option<u32>,
    pub adaptive_window: bool,
    pub keep_alive: Option<KeepAlive>,
    pub max_concurrent_reset_streams: Option<u32>,
    /// Bytes.
    pub max_frame_size: Option<u32>,
    /// Bytes.
    pub max_send_buf_size: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeepAlive {
    pub interval: Duration,
    pub timeout: Duration,
    pub while_idle: bool,
}

/// A change to a set of endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointUpdate {
    Add(Vec<EndpointSpec>),
    Remove(Vec<SocketAddr>),
    /// The service has no endpoints, or does not exist.
    NoEndpoints,
}

impl EndpointSpec {
    /// An unmeshed endpoint that is known by its address only.
    pub fn plain(addr: SocketAddr) -> Self {
        Self {
            addr,
            weight: 1,
            labels: BTreeMap::new(),
            tls: None,
            hint: ProtocolHint::Unknown,
            opaque_transport: None,
            authority_override: None,
            http2: Http2Params::default(),
            locality: Locality::Unknown,
            resource: None,
        }
    }
}
