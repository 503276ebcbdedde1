//! What the process is told at start: a tree of plain values that never changes afterwards.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use tulle_core::backoff::Backoff;
use tulle_core::ports::PortSet;
use tulle_core::telemetry::Format;

use crate::admin;
use crate::api;
use crate::api::destination::{ProfileScope, Suffixes};
use crate::http::access_log;
use crate::identity;
use crate::tap;
use crate::trace;

/// Everything; see [`crate::env::load`] for where it comes from.
#[derive(Clone, Debug)]
pub struct Config {
    pub outbound: Outbound,
    pub inbound: Inbound,
    pub admin: admin::Config,
    /// A live view of requests, where somebody may have one.
    pub tap: Option<tap::server::Config>,
    /// Where spans of traces go, if anywhere.
    pub trace: Option<trace::export::Config>,
    pub control: Control,
    pub identity: identity::Config,
    pub workers: Workers,
    pub log: Log,
    /// Upper bound of the drain; 2 minutes.
    pub shutdown_grace_period: Duration,
    /// Memory that the proxy may use, in bytes; that of its control group, if there is a limit.
    pub memory_limit: Option<u64>,
    /// How long metric series outlive their owner; 10 minutes.
    pub metrics_retain_idle: Duration,
    /// Variables that ask for something that this proxy does not do; the process warns of them once.
    pub ignored: Vec<String>,
}

/// From the application.
#[derive(Clone, Debug)]
pub struct Outbound {
    /// One or two; `127.0.0.1:4140`.
    pub listen: Vec<SocketAddr>,
    pub direction: Direction,
    /// Connections that wait for an endpoint at most; 10 000.
    pub tcp_queue_capacity: usize,
    /// How long a connection waits for an endpoint; 3 seconds.
    pub tcp_failfast_timeout: Duration,
    /// Whether responses tell the application what went wrong; shown unless in ingress mode.
    pub informational_headers: Visibility,
    /// Whether route metrics have a `hostname`; hidden.
    pub hostname_labels: Visibility,
    pub ingress: Ingress,
    /// Where applications say themselves what they want to reach, on this machine only; nowhere.
    pub explicit: Option<SocketAddr>,
    pub balancing: Balancing,
}

/// To the application.
#[derive(Clone, Debug)]
pub struct Inbound {
    /// `0.0.0.0:4143`.
    pub listen: SocketAddr,
    pub mode: InboundMode,
    pub direction: Direction,
    /// How long a request waits for the profile of its name; 500 ms.
    pub profile_timeout: Duration,
    /// Whether metrics have an `authority`; hidden, because clients choose it.
    pub authority_labels: Visibility,
    /// What holds for a port whose policy the control plane has not told; it is refused.
    pub unknown_policy: UnknownPolicy,
    /// The environment's default for such ports; everybody may.
    pub default_policy: DefaultPolicy,
    /// Ports whose policy is watched from the start and for good.
    pub ports: PortSet,
    /// Ports that are opaque by the environment's default.
    pub opaque_ports: PortSet,
    /// Our own addresses; empty when they are not known.
    pub ips: BTreeSet<IpAddr>,
    /// Names that other clusters may reach through us.
    pub gateway_suffixes: Suffixes,
}

/// What both directions have, each with its own values.
#[derive(Clone, Debug)]
pub struct Direction {
    pub accept: Accept,
    pub connect: Connect,
    pub http1_pool: Http1Pool,
    /// Idempotent ones.
    pub resend: Resend,
    pub http1_server: Http1Server,
    pub http2_server: Http2Server,
    pub http2_client: Http2Windows,
    /// Concurrent HTTP requests before shedding; 100 000.
    pub max_in_flight: usize,
    /// Requests that wait for an endpoint at most; 10 000.
    pub http_queue_capacity: usize,
    /// How long a request waits for an endpoint; inbound 1 s, outbound 3 s.
    pub http_failfast_timeout: Duration,
    /// How long what was discovered stays without use; inbound 90 s, outbound 5 s.
    pub discovery_idle_timeout: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Accept {
    pub keepalive: Option<Duration>,
    pub user_timeout: Option<Duration>,
    pub backlog: Option<u32>,
    /// How long to look for a protocol; 10 s.
    pub detect_timeout: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Connect {
    pub keepalive: Option<Duration>,
    pub user_timeout: Option<Duration>,
    /// TCP and TLS together; inbound 300 ms, outbound 1 s.
    pub timeout: Duration,
    /// Between attempts; from 100 ms to 10 s (inbound) or 60 s (outbound), jitter 0.1.
    pub backoff: Backoff,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http1Pool {
    /// 10 000.
    pub max_idle_per_endpoint: usize,
    /// 3 s.
    pub idle_timeout: Duration,
}

/// Which requests are sent again that a lost connection has left without a response, though they may have been processed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Resend {
    Never,
    /// `GET`, `HEAD`, `OPTIONS` and `TRACE`.
    Safe,
    /// These, `PUT` and `DELETE`.
    Idempotent,
}

/// Settings of HTTP/1 servers; the timeouts are those of HTTP/2 as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http1Server {
    /// Most bytes of a request head; 64 KiB.
    pub max_head_size: usize,
    /// How long a request head may take from its first byte on, or the first request of an HTTP/2 connection; 30 s.
    pub head_timeout: Duration,
    /// How long a connection may be without a request, or a request with a body without anything that passes; 1 h.
    pub idle_timeout: Duration,
}

/// Initial flow-control windows, in bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Http2Windows {
    /// 1 MiB.
    pub stream: u32,
    /// 4 MiB.
    pub connection: u32,
}

/// Settings of HTTP/2 servers; what is `None` stays as the library has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http2Server {
    pub windows: Http2Windows,
    pub flow_control: FlowControl,
    pub keep_alive: Option<KeepAlive>,
    /// On one connection; 16 384. That is for memory's sake alone: a peer's proxy sends all requests of a worker on one.
    pub max_concurrent_streams: u32,
    pub max_frame_size: Option<u32>,
    pub max_header_list_size: Option<u32>,
    pub max_pending_accept_reset_streams: Option<usize>,
    pub max_send_buf_size: Option<usize>,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    pub interval: Duration,
    pub timeout: Duration,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FlowControl {
    Fixed,
    Adaptive,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Visibility {
    Shown,
    Hidden,
}

/// How connections get to the inbound listener.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum InboundMode {
    /// Translated to its address; the kernel knows what was dialled, and the application sees us.
    #[default]
    Redirect,
    /// As they are; it takes them for any address, and the application sees its client.
    Tproxy,
}

/// Whether the target of a request is told by its headers (an ingress) or by what was dialled.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ingress {
    Off,
    On,
}

/// How one of several endpoints is chosen.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Balancing {
    /// The cheaper of two, by latency and requests in flight.
    #[default]
    PeakEwma,
    /// One after the other, for comparison.
    RoundRobin,
}

/// What becomes of connections to a port whose policy the control plane has not told.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum UnknownPolicy {
    /// They wait for it, and are refused when it does not come.
    #[default]
    Refuse,
    /// The environment's default holds, as in Linkerd's proxy.
    Default,
}

/// Who may use a port by the environment's default.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum DefaultPolicy {
    Deny,
    AllAuthenticated,
    #[default]
    AllUnauthenticated,
    ClusterAuthenticated,
    ClusterUnauthenticated,
    /// Everybody may, and it is logged.
    Audit,
}

/// The control plane.
#[derive(Clone, Debug)]
pub struct Control {
    pub destination: api::channel::ControlAddr,
    pub policy: api::channel::ControlAddr,
    /// Sent with every lookup, verbatim.
    pub context_token: String,
    /// Sent with every policy lookup, verbatim.
    pub workload: String,
    /// What GetProfile is asked for.
    pub profiles: ProfileScope,
    /// What the cluster-wide default policies call the cluster.
    pub cluster_networks: Vec<IpNet>,
    pub stream_limits: api::watch::StreamLimits,
    pub dns: api::dns::Config,
}

/// How many workers there are, given how many CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Workers {
    /// 1; also what `LINKERD2_PROXY_CORES` says.
    pub min: usize,
    pub max: Option<usize>,
    /// A share of the CPUs, above 0 and at most 1; `max` wins.
    pub max_ratio: Option<f64>,
}

#[derive(Clone, Debug)]
pub struct Log {
    pub filter: String,
    pub format: Format,
    /// Of requests, where it is wanted, and of which directions.
    pub access: Option<access_log::Format>,
    pub access_directions: Directions,
}

/// Which requests have lines in the access log.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Directions {
    #[default]
    Inbound,
    Outbound,
    Both,
}

impl Directions {
    pub fn inbound(self) -> bool {
        self != Self::Outbound
    }

    pub fn outbound(self) -> bool {
        self != Self::Inbound
    }
}

impl Workers {
    /// At least one, at least `min` if there are that many CPUs, and never more than there are.
    pub fn count(&self, cpus: usize) -> usize {
        let share = self.max_ratio.map(|ratio| (cpus as f64 * ratio).round() as usize);
        self.max.or(share).unwrap_or(1).max(self.min).min(cpus).max(1)
    }
}

impl DefaultPolicy {
    /// Whether it speaks of the cluster's networks, and therefore needs them.
    pub fn needs_cluster_networks(self) -> bool {
        matches!(
            self,
            Self::ClusterAuthenticated | Self::ClusterUnauthenticated | Self::Audit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_stay_between_their_bounds_and_the_machine() {
        for (min, max, max_ratio, cpus, expected) in [
            (1, None, None, 8, 1),
            (2, None, None, 8, 2),
            (1, Some(4), None, 8, 4),
            (1, Some(16), None, 8, 8),
            (1, None, Some(0.5), 8, 4),
            (1, None, Some(0.01), 8, 1),
            (1, Some(2), Some(1.0), 8, 2),
            (6, Some(4), None, 8, 6),
            (4, None, None, 2, 2),
        ] {
            let workers = Workers { min, max, max_ratio };
            assert_eq!(workers.count(cpus), expected, "{workers:?} on {cpus} CPUs");
        }
    }
}
