//! The configuration of the process: a tree of plain values that never changes after start.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use tulle_core::backoff::Backoff;
use tulle_core::logging::Format;
use tulle_core::ports::PortSet;

use crate::admin;
use crate::api;
use crate::api::destination::{ProfileScope, Suffixes};
use crate::http::stack::access_log;
use crate::identity;
use crate::policy::server::DefaultPolicy;
use crate::tap;
use crate::trace;

/// The whole configuration; [`crate::env::load`] reads it.
#[derive(Clone, Debug)]
pub struct Config {
    pub outbound: Outbound,
    pub inbound: Inbound,
    pub admin: admin::Config,
    /// Tap, if it is enabled.
    pub tap: Option<tap::server::Config>,
    /// Export of trace spans, if it is enabled.
    pub trace: Option<trace::export::Config>,
    pub control: Control,
    pub identity: identity::Config,
    pub workers: Workers,
    pub log: Log,
    /// Maximum duration of the drain; default 2 minutes.
    pub shutdown_grace_period: Duration,
    /// Memory limit in bytes; default the limit of the cgroup, if it has one.
    pub memory_limit_bytes: Option<u64>,
    /// Time that a metric series stays after its connection, endpoint or route is gone; default 10 minutes.
    pub metrics_retain_idle: Duration,
    /// Variables with no effect in this proxy; each is logged at start.
    pub unsupported_variables: Vec<String>,
}

/// The outbound side: from the application.
#[derive(Clone, Debug)]
pub struct Outbound {
    /// One or two addresses; default `127.0.0.1:4140`.
    pub listen: Vec<SocketAddr>,
    pub direction: DirectionSettings,
    /// Maximum number of requests that wait for an endpoint, unless the policy of the destination permits more; default 10 000.
    pub http_queue_capacity: usize,
    /// Maximum time that a request waits for an endpoint, unless the policy of the destination sets it; default 3 s.
    pub http_failfast_timeout: Duration,
    /// Whether responses have headers that explain errors to the application; default shown, except in ingress mode.
    pub informational_headers: Visibility,
    /// Whether route metrics have the label `hostname`; default hidden.
    pub hostname_labels: Visibility,
    pub ingress_mode: IngressMode,
    /// Listener for explicit proxying (HTTP CONNECT, requests in absolute form, SOCKS5), on loopback only; default none.
    pub explicit_listen: Option<SocketAddr>,
    pub load_balancing: LoadBalancing,
}

/// The inbound side: to the application.
#[derive(Clone, Debug)]
pub struct Inbound {
    /// Default `0.0.0.0:4143`.
    pub listen: SocketAddr,
    pub mode: InboundMode,
    pub direction: DirectionSettings,
    /// Maximum time that a request waits for the profile of its name; default 500 ms.
    pub profile_timeout: Duration,
    /// Whether metrics have the label `authority`; default hidden, because clients choose the value.
    pub authority_labels: Visibility,
    /// The action for connections to a port whose policy the control plane has not sent; default refuse.
    pub missing_policy_action: MissingPolicyAction,
    /// The policy that [`MissingPolicyAction::Default`] applies to these ports; default all-unauthenticated.
    pub default_policy: DefaultPolicy,
    /// Ports whose policy is watched from the start.
    pub watched_ports: PortSet,
    /// Ports on which `default_policy` is opaque.
    pub opaque_ports: PortSet,
    /// The proxy's own addresses; empty if unknown.
    pub local_ips: BTreeSet<IpAddr>,
    /// Suffixes of the names that other clusters may reach through this gateway.
    pub gateway_suffixes: Suffixes,
}

/// The settings that each direction, inbound and outbound, has for itself.
#[derive(Clone, Debug)]
pub struct DirectionSettings {
    pub accept: Accept,
    pub connect: Connect,
    pub http1_pool: Http1Pool,
    /// The requests that are sent again; default idempotent ones.
    pub resend_policy: ResendPolicy,
    pub http_server: HttpServer,
    pub http2_server: Http2Server,
    pub http2_client: Http2Windows,
    /// Maximum concurrent HTTP requests; further ones are shed. Default 100 000.
    pub max_in_flight_requests: usize,
    /// Time after which an unused discovery result is dropped; default 90 s inbound, 5 s outbound.
    pub discovery_idle_timeout: Duration,
}

/// Settings of accepted connections.
#[derive(Clone, Debug, PartialEq)]
pub struct Accept {
    /// Idle time before TCP keep-alive probes; default no probes.
    pub keepalive: Option<Duration>,
    /// `TCP_USER_TIMEOUT`; default not set.
    pub user_timeout: Option<Duration>,
    /// Length of the accept queue; default 4096.
    pub backlog: Option<u32>,
    /// Maximum timeout of protocol detection, also if the policy has a longer one. The outbound value also limits discovery (to at
    /// most 10 s). The inbound value also limits the wait for the ClientHello and, separately, the rest of the TLS handshake.
    /// Default 10 s.
    pub detect_timeout: Duration,
}

/// Settings of connections that the proxy dials.
#[derive(Clone, Debug, PartialEq)]
pub struct Connect {
    /// Idle time before TCP keep-alive probes; default no probes.
    pub keepalive: Option<Duration>,
    /// `TCP_USER_TIMEOUT`; default not set.
    pub user_timeout: Option<Duration>,
    /// Timeout of TCP and TLS together. Default: 4 s inbound, which is also the minimum there; 1 s outbound.
    pub timeout: Duration,
    /// Backoff of streams from the control plane, and of dials to the control plane, where it is at most 5 s. Dials to endpoints do
    /// not use it. The inbound value is for streams of inbound policies, and for dials if the control plane has a loopback address;
    /// the outbound value is for all others. Default from 100 ms to 10 s (inbound) or 60 s (outbound), jitter 0.1.
    pub backoff: Backoff,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http1Pool {
    /// Maximum idle connections of each worker to an endpoint; default 10 000.
    pub max_idle_per_endpoint: usize,
    /// Maximum time that an idle connection is kept; default 3 s.
    pub idle_timeout: Duration,
}

/// The requests that are sent again if the connection was lost before the response, although the server may have processed them.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ResendPolicy {
    Never,
    /// `GET`, `HEAD`, `OPTIONS` and `TRACE`.
    SafeMethods,
    /// The safe methods, `PUT` and `DELETE`.
    IdempotentMethods,
}

/// Settings of HTTP servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpServer {
    /// Maximum size of a request head in HTTP/1, in bytes; default 64 KiB.
    pub max_header_bytes: usize,
    /// Timeout of a request head, from its first byte, or of the first request of an HTTP/2 connection; default 30 s.
    pub header_read_timeout: Duration,
    /// Maximum time of a connection without a request, and, while a request body is received, maximum time without bytes in
    /// either direction; default 1 h.
    pub idle_timeout: Duration,
}

/// Initial flow-control windows, in bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Http2Windows {
    /// Default 1 MiB.
    pub stream: u32,
    /// Default 4 MiB.
    pub connection: u32,
}

/// Settings of HTTP/2 servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http2Server {
    pub windows: Http2Windows,
    /// HTTP/2 pings to clients; default none.
    pub keep_alive: Option<KeepAlive>,
    /// Maximum concurrent streams of a connection; default 16 384. The limit only protects memory. It is high, because a peer's
    /// proxy sends all requests of a worker on one connection.
    pub max_concurrent_streams: u32,
    /// Maximum size of a frame from a client, in bytes; default 64 KiB for clients with TLS, 16 KiB for others.
    pub max_frame_size: Option<u32>,
    /// Maximum size of the header list of a request, in bytes; default four times [`HttpServer::max_header_bytes`].
    pub max_header_list_bytes: Option<u32>,
    /// Maximum number of streams that a client has reset and the proxy has not accepted; default that of the h2 crate.
    pub max_pending_reset_streams: Option<usize>,
    /// Maximum number of buffered bytes of each stream to a client; default that of the h2 crate.
    pub max_send_buffer_bytes: Option<usize>,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    pub interval: Duration,
    pub timeout: Duration,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Visibility {
    Shown,
    Hidden,
}

/// How connections reach the inbound listener.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum InboundMode {
    /// By REDIRECT: the kernel rewrites the destination to the listener's address, and remembers the original one. The application
    /// sees the proxy's address.
    #[default]
    Redirect,
    /// By TPROXY: connections keep their destination, and the listener accepts any. The application sees the client's address.
    Tproxy,
}

/// Whether requests with `l5d-dst-override` go to the Service that it names. All others go to the original destination.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum IngressMode {
    Off,
    On,
}

/// How an endpoint is chosen.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadBalancing {
    /// The cheaper of two random endpoints, by latency and requests in flight.
    #[default]
    PeakEwma,
    /// Round robin, for comparison.
    RoundRobin,
}

/// The action for connections to a port whose policy the control plane has not sent.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum MissingPolicyAction {
    /// Connections wait for the policy, and are refused if it does not arrive in time.
    #[default]
    Refuse,
    /// The default policy applies, as in Linkerd's proxy.
    Default,
}

/// The control plane.
#[derive(Clone, Debug)]
pub struct Control {
    pub destination: api::channel::ControlAddr,
    pub policy: api::channel::ControlAddr,
    /// Text that is sent unchanged with every lookup of endpoints or of a profile.
    pub context_token: String,
    /// Text that is sent unchanged with every policy lookup.
    pub workload: String,
    /// The targets that may have a profile.
    pub profiles: ProfileScope,
    /// The cluster's networks, used by the `cluster-*` default policies.
    pub cluster_networks: Vec<IpNet>,
    pub stream_limits: api::watch::StreamLimits,
    pub dns: api::dns::Config,
}

/// Number of workers: `max`, or `max_ratio` of the CPUs, or 1; raised to `min`, then limited to the number of CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Workers {
    /// Default 1; also set by `LINKERD2_PROXY_CORES`.
    pub min: usize,
    pub max: Option<usize>,
    /// A fraction of the CPUs, above 0 and at most 1.
    pub max_ratio: Option<f64>,
}

#[derive(Clone, Debug)]
pub struct Log {
    pub filter: String,
    pub format: Format,
    /// Format of the access log; by default there is no access log.
    pub access_log_format: Option<access_log::Format>,
    /// The directions that the access log covers; default inbound.
    pub access_log_directions: AccessLogDirections,
}

/// The directions that the access log covers.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLogDirections {
    #[default]
    Inbound,
    Outbound,
    Both,
}

impl AccessLogDirections {
    pub fn includes_inbound(self) -> bool {
        self != Self::Outbound
    }

    pub fn includes_outbound(self) -> bool {
        self != Self::Inbound
    }
}

impl Workers {
    /// The number on a machine with `cpus` CPUs; at least 1.
    pub fn count(&self, cpus: usize) -> usize {
        let ratio_workers = self.max_ratio.map(|ratio| (cpus as f64 * ratio).round() as usize);
        self.max.or(ratio_workers).unwrap_or(1).max(self.min).min(cpus).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_workers_is_max_or_the_ratio_of_cpus_at_least_min_and_at_most_the_cpus() {
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
