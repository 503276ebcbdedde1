//! A gRPC channel to one control-plane service: resolves, connects, verifies, and reconnects when the connection is lost.
//!
//! A channel has one HTTP/2 connection, made when a call needs it and kept while it works. One task for each channel dials, so
//! that hundreds of streams that fail together cause one connection, not hundreds.

use std::future::Future;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{Notify, futures::Notified, watch};
use tokio::time::{Instant, timeout};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::Service;
use tracing::{debug, info, warn};
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;
use tulle_core::identity::Identity;
use tulle_core::log_limit::LogLimiter;
use tulle_core::metrics::{Counter, Histogram, Labels};

use crate::api::dns::{DnsError, Resolver};
use crate::api::happy_eyeballs;
use crate::api::metrics::Metrics;
use crate::api::retry_signal::RetrySignal;
use crate::metrics::balancers::{self, UpdateOp};
use crate::tls::client;
use crate::tls::credentials::{Alpn, Credentials};
use crate::tls::status::{ClientTls, NoClientTls};

/// The address of a control-plane service, and its expected identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlAddr {
    pub addr: Addr,
    pub security: Security,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// The service is on this host: plaintext.
    Loopback,
    /// The service must have this identity; the proxy presents its own certificate.
    MutualTls(Identity),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// Prefix of the names of the channel's metrics.
    pub metrics_prefix: &'static str,
    /// Timeout of TCP and TLS together, for each address.
    pub connect_timeout: Duration,
    pub backoff: Backoff,
    /// Maximum time that a call waits for a connection; default [`CONNECTION_WAIT_TIMEOUT`].
    pub connection_wait_timeout: Duration,
    pub client_certificate: ClientCertificate,
}

/// Whether a mutual TLS connection waits until the proxy has a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientCertificate {
    /// The service requires it.
    Required,
    /// The service issues it, or does not require it.
    Optional,
}

/// How the control plane checks the identity of this proxy. It permits either all streams with the same check or none of them.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum IdentityCheck {
    /// The identity belongs to the namespace in the request.
    Namespace,
    /// The identity is that of the workload in the request.
    Workload,
}

#[derive(Clone)]
pub(crate) struct Connector {
    pub creds: Credentials,
    pub resolver: Resolver,
    pub metrics: Metrics,
    /// The runtime of the connections; calls must be made on it.
    pub runtime: Handle,
}

/// A channel; clones share its connection. A call fails with `Unavailable` if no connection is made in time.
#[derive(Clone)]
pub(crate) struct Channel {
    shared: Arc<Shared>,
    connection: watch::Receiver<Connection>,
}

/// True for loopback addresses and `localhost`.
pub(crate) fn is_loopback(addr: &Addr) -> bool {
    match addr {
        Addr::Socket(addr) => addr.ip().to_canonical().is_loopback(),
        Addr::Name(name) => name.name.trim_end_matches('.').eq_ignore_ascii_case("localhost"),
    }
}

struct Shared {
    target: ControlAddr,
    authority: Authority,
    scheme: Scheme,
    /// Notifies the dialling task that a call waits for a connection.
    connect_requested: Notify,
    /// Whether the last attempt to connect failed.
    failing: AtomicBool,
    /// Shortens the backoff before the next attempt.
    retry: RetrySignal,
    connection_wait_timeout: Duration,
    metrics: ChannelMetrics,
    /// One for each `IdentityCheck`: wakes the denied streams with that check when the service permits this proxy again.
    namespace_permitted: Notify,
    workload_permitted: Notify,
    /// Limits log lines about refused streams.
    log_limiter: LogLimiter<Code>,
}

#[derive(Clone)]
enum Connection {
    /// No connection. The text is the error of the last attempt or connection, if there was one.
    Missing(Option<Arc<str>>),
    Ready(SendRequest<Body>),
}

struct ChannelMetrics {
    families: Metrics,
    labels: Labels,
    requests: Arc<Counter>,
    latency: Arc<Histogram>,
    /// The connected replica counts as ready, the others as pending.
    balancer: Arc<balancers::BalancerSeries>,
}

#[derive(Debug, thiserror::Error)]
enum ChannelConnectError {
    #[error(transparent)]
    Resolve(DnsError),
    #[error("connecting to {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("connecting to {addr} failed: {source}")]
    Io { addr: SocketAddr, source: std::io::Error },
    #[error("connecting to {addr} failed: {source}")]
    Tls {
        addr: SocketAddr,
        source: client::TlsConnectError,
    },
    #[error("starting HTTP/2 with {addr} failed: {source}")]
    Http { addr: SocketAddr, source: hyper::Error },
}

impl Connector {
    /// Creates a channel to a service. The channel dials on the first call.
    pub(crate) fn channel(&self, target: ControlAddr, config: Config) -> Channel {
        let (connection_tx, connection_rx) = watch::channel(Connection::Missing(None));
        let shared = Arc::new(Shared {
            authority: authority(&target.addr),
            scheme: match target.security {
                Security::Loopback => Scheme::HTTP,
                Security::MutualTls(_) => Scheme::HTTPS,
            },
            connect_requested: Notify::new(),
            failing: AtomicBool::new(false),
            retry: RetrySignal::default(),
            connection_wait_timeout: config.connection_wait_timeout,
            namespace_permitted: Notify::new(),
            workload_permitted: Notify::new(),
            log_limiter: LogLimiter::default(),
            metrics: ChannelMetrics::new(&self.metrics, config.metrics_prefix, &target),
            target,
        });
        let dialler = ConnectTask {
            connector: self.clone(),
            config,
            shared: shared.clone(),
        };
        // Ends with the last clone of the channel.
        self.runtime.spawn(dialler.run(connection_tx));
        Channel {
            shared,
            connection: connection_rx,
        }
    }
}

impl Channel {
    pub(super) fn log_limiter(&self) -> &LogLimiter<Code> {
        &self.shared.log_limiter
    }

    /// Wakes the denied streams with this check, because a stream with the same check was permitted.
    pub(super) fn notify_permitted(&self, check: IdentityCheck) {
        self.permit_signal(check).notify_waiters();
    }

    /// Completes when a stream of this channel with this check is permitted after this call.
    pub(super) fn permitted(&self, check: IdentityCheck) -> Notified<'_> {
        self.permit_signal(check).notified()
    }

    fn permit_signal(&self, check: IdentityCheck) -> &Notify {
        match check {
            IdentityCheck::Namespace => &self.shared.namespace_permitted,
            IdentityCheck::Workload => &self.shared.workload_permitted,
        }
    }

    pub(crate) fn target(&self) -> &ControlAddr {
        &self.shared.target
    }

    /// Whether the last attempt to reach the service failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.shared.failing.load(Ordering::Relaxed)
    }

    /// If there is no connection, shortens the delay before the next attempt to connect.
    pub(crate) fn retry_soon(&self) {
        if matches!(*self.connection.borrow(), Connection::Missing(_)) {
            self.shared.retry.retry_soon();
        }
    }

    async fn send(mut self, mut req: Request<Body>) -> Result<Response<Incoming>, Status> {
        let shared = self.shared.clone();
        set_uri(&mut req, &shared)?;
        let mut connection = self.connection_within_timeout().await?;
        shared.metrics.requests.inc();
        let started_at = Instant::now();
        let sent = connection.send_request(req).await;
        shared.metrics.latency.observe(started_at.elapsed().as_secs_f64() * 1e3);
        shared.metrics.record_response(sent.as_ref().ok());
        sent.map_err(|error| Status::unavailable(format!("calling {}: {}", shared.target.addr, ErrorChain(&error))))
    }

    /// Waits for a working connection, without a limit.
    pub(crate) async fn wait_until_connected(&mut self) {
        if self.wait_for_connection().await.is_none() {
            // The runtime is shutting down and drops this future.
            std::future::pending::<()>().await;
        }
    }

    /// Waits for a working connection; `None` if the runtime of the channel has ended.
    async fn wait_for_connection(&mut self) -> Option<SendRequest<Body>> {
        let balancer = &self.shared.metrics.balancer;
        let mut waiting = None;
        loop {
            match &*self.connection.borrow_and_update() {
                Connection::Ready(connection) if !connection.is_closed() => return Some(connection.clone()),
                Connection::Ready(_) | Connection::Missing(_) => self.shared.connect_requested.notify_one(),
            }
            waiting.get_or_insert_with(|| balancer.enter_queue());
            self.connection.changed().await.ok()?;
        }
    }

    /// The connection for a call, if there is one within the timeout of the channel.
    async fn connection_within_timeout(&mut self) -> Result<SendRequest<Body>, Status> {
        let shared = self.shared.clone();
        let Shared {
            connection_wait_timeout,
            target,
            ..
        } = &*shared;
        match timeout(*connection_wait_timeout, self.wait_for_connection()).await {
            Ok(Some(connection)) => Ok(connection),
            Ok(None) => Err(Status::unavailable("the runtime of control plane clients has ended")),
            Err(_) => Err(Status::unavailable(match &*self.connection.borrow() {
                Connection::Missing(Some(reason)) => format!("no connection to {}: {reason}", target.addr),
                _ => format!("no connection to {} within {connection_wait_timeout:?}", target.addr),
            })),
        }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        Box::pin(self.clone().send(req))
    }
}

struct ConnectTask {
    connector: Connector,
    config: Config,
    shared: Arc<Shared>,
}

type Driver = Pin<Box<dyn Future<Output = Result<(), hyper::Error>> + Send>>;

impl ConnectTask {
    async fn run(self, connection: watch::Sender<Connection>) {
        // Both branches are cancel-safe: when the last clone of the channel is dropped, a dial in progress is no longer needed.
        tokio::select! {
            () = connection.closed() => {}
            () = self.dial_on_demand(&connection) => {}
        }
    }

    async fn dial_on_demand(&self, connection: &watch::Sender<Connection>) {
        let addr = &self.shared.target.addr;
        let mut delays = self.config.backoff.capped_at(MAX_CONNECT_BACKOFF).start();
        let (failing, balancer) = (&self.shared.failing, &self.shared.metrics.balancer);
        loop {
            self.shared.connect_requested.notified().await;
            let is_mutual = matches!(self.shared.target.security, Security::MutualTls(_));
            if is_mutual && self.config.client_certificate == ClientCertificate::Required {
                self.connector.creds.wait_certified().await;
            }
            let dialled_at = Instant::now();
            let reason = match self.dial().await {
                Ok((n_addrs, (sender, driver))) => {
                    balancer.set_endpoints(1, n_addrs - 1);
                    if failing.swap(false, Ordering::Relaxed) {
                        info!(%addr, "control plane is reachable again");
                    }
                    debug!(%addr, "connected to the control plane");
                    connection.send_replace(Connection::Ready(sender));
                    let ended = driver.await;
                    balancer.set_endpoints(0, n_addrs);
                    debug!(%addr, ?ended, "connection to the control plane ended");
                    ended.err().map(|error| Arc::from(ErrorChain(&error).to_string()))
                }
                Err(error) => {
                    // Logged as a warning only once for each outage, because the known configuration stays in use.
                    if !failing.swap(true, Ordering::Relaxed) {
                        warn!(%addr, %error, "control plane is not reachable, trying again");
                    }
                    debug!(%addr, %error, "connecting to the control plane failed");
                    Some(Arc::from(error.to_string()))
                }
            };
            connection.send_replace(Connection::Missing(reason));
            // Backoff also applies to a server that accepts and closes immediately.
            if dialled_at.elapsed() > self.config.backoff.max.min(STABLE_CONNECTION_AGE) {
                delays.reset();
            }
            self.shared.retry.wait(delays.next_delay()).await;
        }
    }

    /// Tries all addresses; also returns their number.
    async fn dial(&self) -> Result<(usize, (SendRequest<Body>, Driver)), ChannelConnectError> {
        let addrs = self.addrs().await.map_err(ChannelConnectError::Resolve)?;
        let n_addrs = addrs.len();
        self.shared.metrics.balancer.record_update(UpdateOp::Reset);
        self.shared.metrics.balancer.set_endpoints(0, n_addrs);
        let connected = happy_eyeballs::connect_first(addrs, |addr| async move {
            let limit = self.config.connect_timeout;
            let connected = timeout(limit, self.connect(addr)).await;
            let connected = connected.unwrap_or(Err(ChannelConnectError::Timeout { addr, limit }));
            connected.inspect_err(|error| debug!(%addr, %error, "control plane address failed"))
        });
        let connected = connected.await.map(|connected| (n_addrs, connected));
        connected.map_err(|last| last.expect("a lookup that succeeds has an address"))
    }

    async fn addrs(&self) -> Result<Vec<SocketAddr>, DnsError> {
        let port = self.shared.target.addr.port();
        match &self.shared.target.addr {
            Addr::Socket(addr) => Ok(vec![*addr]),
            addr if is_loopback(addr) => Ok(vec![
                (Ipv4Addr::LOCALHOST, port).into(),
                (Ipv6Addr::LOCALHOST, port).into(),
            ]),
            Addr::Name(name) => self.connector.resolver.resolve(name).await,
        }
    }

    async fn connect(&self, addr: SocketAddr) -> Result<(SendRequest<Body>, Driver), ChannelConnectError> {
        let io = |source| ChannelConnectError::Io { addr, source };
        let stream = TcpStream::connect(addr).await.map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        let started = match &self.shared.target.security {
            Security::Loopback => start_http2(stream).await,
            Security::MutualTls(identity) => {
                let server = client::Server {
                    id: identity,
                    name: &server_name(&self.shared.target, identity),
                    alpn: Alpn::Unset,
                    sessions: None,
                };
                let stream = client::connect(stream, &self.connector.creds, server)
                    .await
                    .map_err(|source| ChannelConnectError::Tls { addr, source })?;
                start_http2(stream).await
            }
        };
        started.map_err(|source| ChannelConnectError::Http { addr, source })
    }
}

async fn start_http2<IO>(io: IO) -> Result<(SendRequest<Body>, Driver), hyper::Error>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .handshake(TokioIo::new(io))
        .await?;
    Ok((sender, Box::pin(connection)))
}

/// The SNI: the identity if it is a DNS name, otherwise the host of the service's address.
fn server_name(target: &ControlAddr, identity: &Identity) -> String {
    match (identity, &target.addr) {
        (Identity::Dns(name), _) => name.to_string(),
        (Identity::Uri(_), Addr::Name(addr)) => addr.name.trim_end_matches('.').to_owned(),
        (Identity::Uri(_), Addr::Socket(addr)) => addr.ip().to_string(),
    }
}

fn authority(addr: &Addr) -> Authority {
    Authority::from_maybe_shared(addr.to_string()).expect("addresses are authorities")
}

/// tonic sets only the path of the method; HTTP/2 needs the full URI.
fn set_uri(req: &mut Request<Body>, shared: &Shared) -> Result<(), Status> {
    let path = req
        .uri()
        .path_and_query()
        .cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"));
    let uri = Uri::builder()
        .scheme(shared.scheme.clone())
        .authority(shared.authority.clone())
        .path_and_query(path);
    *req.uri_mut() = uri.build().map_err(|error| Status::internal(error.to_string()))?;
    Ok(())
}

impl ChannelMetrics {
    fn new(families: &Metrics, metrics_prefix: &str, target: &ControlAddr) -> Self {
        let tls = match &target.security {
            Security::Loopback => ClientTls::Plain(NoClientTls::Loopback),
            Security::MutualTls(identity) => ClientTls::Meshed(identity.clone()),
        };
        let labels = Labels::new().with("addr", &target.addr);
        let balancer = families.balancer(metrics_prefix, &labels);
        let labels = tls.metric_labels(labels);
        let (requests, latency) = (families.requests.get(&labels), families.latency.get(&labels));
        Self {
            families: families.clone(),
            labels,
            requests,
            latency,
            balancer,
        }
    }

    /// Counts a response by its head; a stream that fails later still counts as a success.
    fn record_response(&self, rsp: Option<&Response<Incoming>>) {
        let status = rsp.map_or_else(String::new, |rsp| rsp.status().as_u16().to_string());
        let grpc_status = rsp
            .and_then(|rsp| rsp.headers().get("grpc-status"))
            .and_then(|status| status.to_str().ok());
        let failed =
            !rsp.is_some_and(|rsp| rsp.status().is_success()) || grpc_status.is_some_and(|status| status != "0");
        let labels = self.labels.clone().with("status_code", status);
        let labels = labels.with("classification", if failed { "failure" } else { "success" });
        self.families
            .responses
            .get(&labels.with("grpc_status", grpc_status.unwrap_or("")))
            .inc();
    }
}

/// Default time that calls wait for a connection.
pub(crate) const CONNECTION_WAIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum message size: the endpoints of a large service exceed the 4 MiB of tonic's default.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Maximum backoff between attempts to connect: endpoints change while a control plane restarts, and stale endpoints make
/// requests fail.
const MAX_CONNECT_BACKOFF: Duration = Duration::from_secs(5);
/// Minimum duration of an attempt and its connection after which the backoff is reset. If the configured maximum backoff is
/// shorter, that duration is used instead.
const STABLE_CONNECTION_AGE: Duration = Duration::from_secs(10);
/// With this interval a dead peer is detected within 13 seconds while streams are open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);
