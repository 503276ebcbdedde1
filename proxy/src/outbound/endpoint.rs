//! One endpoint: its connections, load, breaker and metrics.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use http::Version;
use tokio::time::Instant;
use tulle_core::{addr, identity::Identity};

use crate::{
    balance::{breaker::Breaker, candidate::Candidate, load::Load},
    http::{
        client::{ConnectOutcome, ConnectionUse, EndpointClient, HttpVersion},
        error::Error,
        h1::pool::PoolConfig,
        h2::{self, keep_alive::PeerChecks},
    },
    metrics::http::Series,
    net::connect::ConnectError,
    outbound::{
        connector::{Connector, ConnectorConfig},
        metrics::{Families, labels::endpoint_labels},
        mode::Mode,
    },
    policy::endpoint::{EndpointSpec, ProtocolHint},
    tap::TapRegistry,
    tls::{
        credentials::Credentials,
        status::{ClientTls, NoClientTls},
    },
    trace::Tracer,
};

/// Settings that all endpoints of the process share.
pub(crate) struct EndpointContext {
    pub(crate) creds: Credentials,
    pub(crate) connector: ConnectorConfig,
    pub(crate) http2: h2::Http2Config,
    pub(crate) pool: PoolConfig,
    pub(crate) families: Families,
    /// Addresses of this workload. Connections to them use no mTLS: they go to the application directly, not through the inbound
    /// side.
    pub(crate) local_ips: BTreeSet<IpAddr>,
    pub(crate) workers: usize,
    pub(crate) taps: Arc<TapRegistry>,
    /// Creates trace spans; `None` if tracing is disabled.
    pub(crate) tracer: Option<Tracer>,
    pub(crate) mode: Mode,
}

/// Whether a request or connection may use local endpoints: those with an address of this workload.
///
/// They get requests directly, without the inbound side and its policies. That is right for requests of the application itself. It
/// is wrong for those that a gateway forwards: the policy of its port authorizes their clients only for other workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalEndpoints {
    Permit,
    Refuse,
}

impl LocalEndpoints {
    pub(super) fn permits(self, endpoint: &Endpoint) -> bool {
        self == Self::Permit || !endpoint.is_local()
    }

    /// # Errors
    /// The endpoint is local, and local endpoints are refused.
    pub(super) fn check(self, endpoint: &Endpoint) -> Result<(), Error> {
        match self.permits(endpoint) {
            true => Ok(()),
            false => Err(Error::Connect(ConnectError::OwnWorkload {
                addr: endpoint.spec.addr,
            })),
        }
    }
}

/// One endpoint, shared by all workers.
pub(crate) struct Endpoint {
    pub(super) spec: Arc<EndpointSpec>,
    load: Arc<Load>,
    breaker: Breaker,
    /// Checks of the peer by pings. `None` if the peer is not a proxy, because other servers may close connections with many pings.
    peer_checks: Option<Arc<PeerChecks>>,
    pub(super) connector: Arc<Connector>,
    /// The HTTP client of each worker. Workers do not share connections.
    clients: Box<[OnceLock<EndpointClient>]>,
    http2: h2::Http2Config,
    pool: PoolConfig,
    pub(super) tls: ClientTls,
    pub(super) series: Arc<Series>,
    pub(super) taps: Arc<TapRegistry>,
    pub(super) tracer: Option<Tracer>,
}

impl Endpoint {
    /// `authority` is the logical destination, for metrics.
    pub(super) fn new(
        context: &EndpointContext,
        authority: Option<&str>,
        spec: Arc<EndpointSpec>,
        load: Load,
        breaker: Breaker,
    ) -> Self {
        let ip = addr::canonical(spec.addr).ip();
        // A connection to the unspecified address (`0.0.0.0` or `::`) reaches this host.
        let is_local = context.local_ips.contains(&ip) || ip.is_loopback() || ip.is_unspecified();
        let tls = match &spec.tls {
            _ if is_local => ClientTls::Plain(NoClientTls::Loopback),
            Some(tls) => ClientTls::Meshed(tls.identity.clone()),
            None if context.mode == Mode::Ingress && authority.is_none() => {
                ClientTls::Plain(NoClientTls::IngressWithoutOverride)
            }
            None => ClientTls::Plain(NoClientTls::NotProvidedByServiceDiscovery),
        };
        let labels = endpoint_labels(authority, &spec, &tls);
        let zone_traffic = context.families.connections.zone_traffic(spec.locality);
        let metrics = context
            .families
            .tcp
            .series_with_zone_traffic(labels.clone().with("peer", "dst"), Some(zone_traffic));
        let creds = (!is_local).then_some(&context.creds);
        // A local endpoint is the application itself, not its proxy. It does not restore converted requests, and expects its own
        // authority.
        let spec = if is_local && (spec.hint != ProtocolHint::Unknown || spec.authority_override.is_some()) {
            Arc::new(EndpointSpec {
                hint: ProtocolHint::Unknown,
                authority_override: None,
                ..EndpointSpec::clone(&spec)
            })
        } else {
            spec
        };
        let load = Arc::new(load);
        let is_proxy = spec.hint == ProtocolHint::H2 && matches!(tls, ClientTls::Meshed(_));
        let peer_checks = is_proxy.then(|| {
            let load = load.clone();
            Arc::new(PeerChecks::new(move || load.record_response(Instant::now())))
        });
        Self {
            peer_checks,
            connector: Arc::new(Connector::new(&spec, creds, context.connector.clone(), metrics)),
            http2: http2_config(&context.http2, &spec),
            pool: context.pool,
            clients: (0..context.workers).map(|_| OnceLock::new()).collect(),
            series: context.families.http.series(labels),
            taps: context.taps.clone(),
            tracer: context.tracer.clone(),
            tls,
            spec,
            load,
            breaker,
        }
    }

    /// Returns the HTTP client of a worker, which has the worker's connections to this endpoint.
    pub(super) fn client(&self, worker: usize) -> &EndpointClient {
        self.clients[worker].get_or_init(|| {
            let connector = self.connector.clone();
            let open = move |protocol| -> std::pin::Pin<Box<dyn Future<Output = _> + Send>> {
                let connector = connector.clone();
                Box::pin(async move { connector.open(Some(protocol)).await })
            };
            let checks = self.peer_checks.clone();
            EndpointClient::new(self.spec.addr, Box::new(open), self.http2, checks, self.pool)
        })
    }

    /// Dials a connection for a request, and records whether the endpoint can be reached.
    ///
    /// # Errors
    /// Those of [`EndpointClient::dial`].
    pub(super) async fn dial(
        &self,
        worker: usize,
        protocol: HttpVersion,
        connection_use: ConnectionUse,
    ) -> Result<ConnectOutcome, Error> {
        let result = self.client(worker).dial(protocol, connection_use).await;
        match &result {
            Ok(_) | Err(Error::NoFreeStream { .. }) => self.breaker.record_connected(),
            Err(error) => {
                tracing::debug!(addr = %self.spec.addr, %error, "endpoint cannot be reached");
                self.breaker.record_dial_failure(error.cause(), Instant::now());
            }
        }
        result
    }

    /// The HTTP version in which a request with `version` is sent to this endpoint. `requires_http1` says that the request cannot
    /// be converted to HTTP/2.
    pub(super) fn protocol(&self, version: Version, requires_http1: bool) -> HttpVersion {
        match version {
            _ if requires_http1 => HttpVersion::Http1,
            Version::HTTP_2 => HttpVersion::Http2,
            _ if self.spec.hint == ProtocolHint::H2 => HttpVersion::Http2,
            _ => HttpVersion::Http1,
        }
    }

    /// Whether the endpoint's proxy converts HTTP/2 back to HTTP/1.
    pub(super) fn restores_http1(&self) -> bool {
        self.spec.hint == ProtocolHint::H2 && self.identity().is_some()
    }

    /// Whether the endpoint has an address of this workload.
    fn is_local(&self) -> bool {
        self.tls == ClientTls::Plain(NoClientTls::Loopback)
    }

    /// The identity of the endpoint; `None` if it is not meshed.
    pub(super) fn identity(&self) -> Option<&Identity> {
        match &self.tls {
            ClientTls::Meshed(identity) => Some(identity),
            ClientTls::Plain(_) => None,
        }
    }
}

impl Candidate for Endpoint {
    fn load(&self) -> &Load {
        &self.load
    }

    fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    fn can_be_checked(&self) -> bool {
        self.peer_checks.as_ref().is_some_and(|checks| checks.has_connections())
    }

    fn check(&self) {
        if let Some(checks) = &self.peer_checks {
            checks.request();
        }
    }
}

/// The HTTP/2 settings from discovery. Settings that discovery does not set are those of `defaults`.
fn http2_config(defaults: &h2::Http2Config, spec: &EndpointSpec) -> h2::Http2Config {
    let discovered = &spec.http2;
    h2::Http2Config {
        stream_window: discovered.stream_window.unwrap_or(defaults.stream_window),
        connection_window: discovered.connection_window.unwrap_or(defaults.connection_window),
        keep_alive: discovered
            .keep_alive
            .map(|pings| h2::KeepAlive {
                interval: pings.interval,
                timeout: pings.timeout,
            })
            .or(defaults.keep_alive),
        max_frame_size: discovered.max_frame_size.or(defaults.max_frame_size),
        max_send_buffer_bytes: discovered
            .max_send_buf_size
            .map(|size| size as usize)
            .or(defaults.max_send_buffer_bytes),
        max_reset_streams: discovered
            .max_concurrent_reset_streams
            .map(|streams| streams as usize)
            .or(defaults.max_reset_streams),
        ..*defaults
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tulle_core::metrics::Registry;

    use super::*;
    use crate::{
        http::h1::pool::ResendPolicy,
        metrics::http as http_metrics,
        net::{
            connect::{self, SocketOptions},
            tcp_metrics,
        },
        policy::endpoint::{Http2Params, KeepAlive},
        tls::tests::Authority,
    };

    impl EndpointContext {
        /// Settings of one worker, with a new registry and a certificate of a new authority.
        pub(in crate::outbound) fn with_defaults() -> Self {
            let registry = Registry::new();
            Self {
                creds: Authority::new().credentials("web.shop.serviceaccount.identity.linkerd.cluster.local"),
                connector: ConnectorConfig {
                    connect: connect::Config {
                        timeout: Duration::from_secs(1),
                        options: SocketOptions::default(),
                        own_port: None,
                    },
                    log_limiter: Arc::default(),
                },
                http2: h2::Http2Config::default(),
                pool: PoolConfig {
                    idle_timeout: Duration::from_secs(1),
                    max_idle: 1,
                    resend: ResendPolicy::Never,
                },
                families: Families::new(
                    &registry,
                    http_metrics::Families::with_prefix(&registry, "", ""),
                    tcp_metrics::Families::new(&registry),
                    None,
                ),
                local_ips: BTreeSet::new(),
                workers: 1,
                taps: Arc::new(TapRegistry::default()),
                tracer: None,
                mode: Mode::Sidecar,
            }
        }
    }

    #[test]
    fn http2_settings_from_discovery_override_the_defaults() {
        let defaults = h2::Http2Config::default();
        let (interval, timeout) = (Duration::from_secs(10), Duration::from_secs(3));
        let mut spec = EndpointSpec::plain(([10, 0, 0, 1], 80).into());
        assert_eq!(http2_config(&defaults, &spec), defaults);
        spec.http2 = Http2Params {
            connection_window: Some(1),
            stream_window: Some(2),
            keep_alive: Some(KeepAlive { interval, timeout }),
            max_concurrent_reset_streams: Some(3),
            max_frame_size: Some(4),
            max_send_buf_size: Some(5),
        };
        let expected = h2::Http2Config {
            connection_window: 1,
            stream_window: 2,
            keep_alive: Some(h2::KeepAlive { interval, timeout }),
            max_reset_streams: Some(3),
            max_frame_size: Some(4),
            max_send_buffer_bytes: Some(5),
            ..defaults
        };
        assert_eq!(http2_config(&defaults, &spec), expected);
    }
}
