//! One endpoint, as service discovery describes it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use http::uri::Authority;
use tulle_core::identity::Identity;

use crate::policy::meta::Meta;

/// The address of an endpoint, and the settings of connections to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EndpointSpec {
    pub(crate) addr: SocketAddr,
    pub(crate) weight: Weight,
    /// Metric labels; the endpoint's own labels override those of its set.
    pub(crate) labels: BTreeMap<String, String>,
    /// `None` if the peer is not meshed; then connections to it are in plaintext.
    pub(crate) tls: Option<EndpointTls>,
    pub(crate) hint: ProtocolHint,
    /// Port of the peer's proxy for connections with a transport header.
    pub(crate) opaque_transport: Option<NonZeroU16>,
    pub(crate) authority_override: Option<Authority>,
    pub(crate) http2: Http2Params,
    pub(crate) locality: Locality,
    /// To be used only while no other endpoint of the service can take the request.
    pub(crate) is_fallback: FallbackFlag,
    /// The workload that the control plane names, for debug output.
    pub(crate) resource: Option<Arc<Meta>>,
}

/// The weight of an endpoint, for debug output only: balancing ignores it. All weights compare equal, so that an endpoint is
/// kept if only its weight changes. Clones share the value.
#[derive(Clone)]
pub(crate) struct Weight(Arc<AtomicU32>);

/// Whether an endpoint is a fallback. Both values compare equal, so that an endpoint is kept if it becomes a fallback endpoint or a
/// preferred one. Clones share the value.
#[derive(Clone)]
pub(crate) struct FallbackFlag(Arc<AtomicBool>);

/// The identity that an endpoint must prove, and the SNI to send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EndpointTls {
    pub(crate) identity: Identity,
    pub(crate) server_name: Arc<str>,
}

/// The protocol that an endpoint's proxy supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum ProtocolHint {
    #[default]
    Unknown,
    /// HTTP/1 may be carried over HTTP/2.
    H2,
    /// Opaque: no protocol detection.
    Opaque,
}

/// Whether an endpoint is in the proxy's zone; used to count bytes that cross zones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Locality {
    #[default]
    Unknown,
    Local,
    Remote,
}

/// The largest flow-control window that HTTP/2 allows, in bytes (RFC 9113, section 6.9.1).
pub(crate) const MAX_WINDOW: u32 = (1 << 31) - 1;
/// The range that HTTP/2 allows for the largest frame, in bytes (RFC 9113, section 6.5.2).
pub(crate) const FRAME_SIZES: RangeInclusive<u32> = 1 << 14..=(1 << 24) - 1;

/// HTTP/2 settings for one endpoint; an absent value means the client's default.
///
/// Two settings of the API are ignored. `while_idle` is always on, so that a dead peer is detected before a request needs the
/// connection. `adaptive_flow_control` (windows by measured bandwidth) is always off: windows are adapted to the number of streams
/// instead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Http2Params {
    /// Bytes.
    pub(crate) connection_window: Option<u32>,
    /// Bytes.
    pub(crate) stream_window: Option<u32>,
    pub(crate) keep_alive: Option<KeepAlive>,
    /// Maximum number of streams reset by this side that are remembered, so that late frames on them are ignored.
    pub(crate) max_concurrent_reset_streams: Option<u32>,
    /// Bytes.
    pub(crate) max_frame_size: Option<u32>,
    /// Bytes.
    pub(crate) max_send_buf_size: Option<u32>,
}

/// Pings to the endpoint. Both times are above zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeepAlive {
    pub(crate) interval: Duration,
    pub(crate) timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndpointUpdate {
    Add(Vec<EndpointSpec>),
    Remove(Vec<SocketAddr>),
    /// The service has no endpoints, or does not exist.
    NoEndpoints,
}

impl Weight {
    pub(crate) fn new(weight: u32) -> Self {
        Self(Arc::new(AtomicU32::new(weight)))
    }

    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, weight: u32) {
        self.0.store(weight, Ordering::Relaxed);
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.get(), f)
    }
}

impl PartialEq for Weight {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Weight {}

impl FallbackFlag {
    pub(crate) fn new(is_fallback: bool) -> Self {
        Self(Arc::new(AtomicBool::new(is_fallback)))
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns whether the value has changed.
    pub(crate) fn set(&self, is_fallback: bool) -> bool {
        self.0.swap(is_fallback, Ordering::Relaxed) != is_fallback
    }
}

impl fmt::Debug for FallbackFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.get(), f)
    }
}

impl PartialEq for FallbackFlag {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for FallbackFlag {}

impl EndpointSpec {
    /// An unmeshed endpoint that is known by its address only.
    pub(crate) fn plain(addr: SocketAddr) -> Self {
        Self {
            addr,
            weight: Weight::new(1),
            labels: BTreeMap::new(),
            tls: None,
            hint: ProtocolHint::Unknown,
            opaque_transport: None,
            authority_override: None,
            http2: Http2Params::default(),
            locality: Locality::Unknown,
            is_fallback: FallbackFlag::new(false),
            resource: None,
        }
    }
}
