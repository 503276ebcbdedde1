//! A gRPC channel to one control-plane service: finds it, verifies it, and finds it again when it is gone.
//!
//! A channel has one HTTP/2 connection, made when a call needs it and kept while it works. One task a channel dials,
//! so that hundreds of streams that break together make one connection, not hundreds.

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
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tonic::Status;
use tonic::body::Body;
use tower::Service;
use tracing::{debug, info, warn};
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_core::identity::Identity;
use tulle_core::metrics::{Counter, Histogram, Labels};

use crate::api::attempts;
use crate::api::dns::{DnsError, Resolver};
use crate::api::metrics::Metrics;
use crate::api::retry::RetrySignal;
use crate::metrics::balancers::{self, Op};
use crate::tls::client;
use crate::tls::creds::{Alpn, Credentials};
use crate::tls::status::{ClientTls, WhyClientPlain};

/// Where a control-plane service is, and what it must prove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlAddr {
    pub addr: Addr,
    pub security: Security,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// The service is on this machine: plaintext.
    Loopback,
    /// The service must have this identity; we show ours.
    MutualTls(Identity),
}

/// How a channel connects.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// What the names of its metrics begin with.
    pub client: &'static str,
    /// TCP and TLS together, for each address.
    pub connect_timeout: Duration,
    pub backoff: Backoff,
    /// How long a call waits for a connection; [`CALL_WAIT`].
    pub call_wait: Duration,
    pub own_identity: OwnIdentity,
}

/// Whether a connection by mutual TLS waits until we have a certificate to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnIdentity {
    /// The service asks for it.
    Required,
    /// The service gives it, or asks for none.
    Optional,
}

/// What all channels share.
#[derive(Clone)]
pub(crate) struct Connector {
    pub creds: Credentials,
    pub resolver: Resolver,
    pub metrics: Metrics,
    /// Where connections live, and calls must be made.
    pub runtime: Handle,
}

/// A channel; clones share its connection. Calls fail with `Unavailable` when there is none for too long.
#[derive(Clone)]
pub(crate) struct Channel {
    shared: Arc<Shared>,
    connection: watch::Receiver<Connection>,
}

/// True for addresses of this machine, by number or as `localhost`.
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
    /// Tells the dialling task that a call waits.
    wanted: Notify,
    /// Whether the last attempt to connect was in vain.
    failing: AtomicBool,
    /// Cuts the pause before the next attempt short.
    retry: RetrySignal,
    call_wait: Duration,
    metrics: ChannelMetrics,
}

#[derive(Clone)]
enum Connection {
    /// None; why the last attempt failed, if it did.
    Missing(Option<Arc<str>>),
    Ready(SendRequest<Body>),
}

struct ChannelMetrics {
    families: Metrics,
    labels: Labels,
    requests: Arc<Counter>,
    latency: Arc<Histogram>,
    /// The replica that there is a connection to is ready, and the others pending.
    balancer: Arc<balancers::Series>,
}

#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Resolve(DnsError),
    #[error("connecting to {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("connecting to {addr}: {source}")]
    Io { addr: SocketAddr, source: std::io::Error },
    #[error("connecting to {addr}: {source}")]
    Tls {
        addr: SocketAddr,
        source: client::ConnectError,
    },
    #[error("starting HTTP/2 with {addr}: {source}")]
    Http { addr: SocketAddr, source: hyper::Error },
}

impl Connector {
    /// A channel to a service; nothing is dialled before the first call.
    pub(crate) fn channel(&self, target: ControlAddr, config: Config) -> Channel {
        let (sender, connection) = watch::channel(Connection::Missing(None));
        let shared = Arc::new(Shared {
            authority: authority(&target.addr),
            scheme: match target.security {
                Security::Loopback => Scheme::HTTP,
                Security::MutualTls(_) => Scheme::HTTPS,
            },
            wanted: Notify::new(),
            failing: AtomicBool::new(false),
            retry: RetrySignal::default(),
            call_wait: config.call_wait,
            metrics: ChannelMetrics::new(&self.metrics, config.client, &target),
            target,
        });
        let dialler = Dialler {
            connector: self.clone(),
            config,
            shared: shared.clone(),
        };
        // Ends with the last clone of the channel.
        self.runtime.spawn(dialler.run(sender));
        Channel { shared, connection }
    }
}

impl Channel {
    pub(crate) fn target(&self) -> &ControlAddr {
        &self.shared.target
    }

    /// Whether the service could not be reached when it was last needed.
    pub(crate) fn is_failing(&self) -> bool {
        self.shared.failing.load(Ordering::Relaxed)
    }

    /// Has the next attempt to connect made soon, if there is no connection.
    pub(crate) fn retry_soon(&self) {
        if matches!(*self.connection.borrow(), Connection::Missing(_)) {
            self.shared.retry.retry_soon();
        }
    }

    async fn send(mut self, mut req: Request<Body>) -> Result<Response<Incoming>, Status> {
        let shared = self.shared.clone();
        address(&mut req, &shared)?;
        let mut connection = self.ready().await?;
        shared.metrics.requests.inc();
        let started_at = Instant::now();
        let sent = connection.send_request(req).await;
        shared.metrics.latency.observe(started_at.elapsed().as_secs_f64() * 1e3);
        shared.metrics.response(sent.as_ref().ok());
        sent.map_err(|error| Status::unavailable(format!("asking {}: {}", shared.target.addr, Causes(&error))))
    }

    /// Waits for a connection that works, however long that takes.
    pub(crate) async fn connected(&mut self) {
        if self.connection().await.is_none() {
            // The runtime is ending, and takes who waits with it.
            std::future::pending::<()>().await;
        }
    }

    /// The connection, as soon as there is one that works; none when the runtime of the channel has ended.
    async fn connection(&mut self) -> Option<SendRequest<Body>> {
        let balancer = &self.shared.metrics.balancer;
        let mut waiting = None;
        loop {
            match &*self.connection.borrow_and_update() {
                Connection::Ready(connection) if !connection.is_closed() => return Some(connection.clone()),
                Connection::Ready(_) | Connection::Missing(_) => self.shared.wanted.notify_one(),
            }
            waiting.get_or_insert_with(|| balancer.wait());
            self.connection.changed().await.ok()?;
        }
    }

    /// The connection that a call is made on.
    async fn ready(&mut self) -> Result<SendRequest<Body>, Status> {
        let shared = self.shared.clone();
        let Shared { call_wait, target, .. } = &*shared;
        match timeout(*call_wait, self.connection()).await {
            Ok(Some(connection)) => Ok(connection),
            Ok(None) => Err(Status::unavailable("the runtime of control plane clients has ended")),
            Err(_) => Err(Status::unavailable(match &*self.connection.borrow() {
                Connection::Missing(Some(reason)) => format!("no connection to {}: {reason}", target.addr),
                _ => format!("no connection to {} within {call_wait:?}", target.addr),
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

/// Makes the connections of one channel.
struct Dialler {
    connector: Connector,
    config: Config,
    shared: Arc<Shared>,
}

type Driver = Pin<Box<dyn Future<Output = Result<(), hyper::Error>> + Send>>;

impl Dialler {
    async fn run(self, connection: watch::Sender<Connection>) {
        // Both branches only wait; when the channel is gone, so is everything that was under way.
        tokio::select! {
            () = connection.closed() => {}
            () = self.dial_on_demand(&connection) => {}
        }
    }

    async fn dial_on_demand(&self, connection: &watch::Sender<Connection>) {
        let addr = &self.shared.target.addr;
        let mut delays = self.config.backoff.at_most(LONGEST_PAUSE).steps();
        let (failing, balancer) = (&self.shared.failing, &self.shared.metrics.balancer);
        loop {
            self.shared.wanted.notified().await;
            let is_mutual = matches!(self.shared.target.security, Security::MutualTls(_));
            if is_mutual && self.config.own_identity == OwnIdentity::Required {
                self.connector.creds.certified().await;
            }
            let dialled_at = Instant::now();
            let reason = match self.dial().await {
                Ok((n_addrs, (sender, driver))) => {
                    balancer.endpoints(1, n_addrs - 1);
                    if failing.swap(false, Ordering::Relaxed) {
                        info!(%addr, "control plane is reachable again");
                    }
                    debug!(%addr, "connected to the control plane");
                    connection.send_replace(Connection::Ready(sender));
                    let ended = driver.await;
                    balancer.endpoints(0, n_addrs);
                    debug!(%addr, ?ended, "connection to the control plane ended");
                    ended.err().map(|error| Arc::from(Causes(&error).to_string()))
                }
                Err(error) => {
                    // Once an outage: what is known goes on being served.
                    if !failing.swap(true, Ordering::Relaxed) {
                        warn!(%addr, %error, "control plane is not reachable, trying again");
                    }
                    debug!(%addr, %error, "connecting to the control plane failed");
                    Some(Arc::from(error.to_string()))
                }
            };
            connection.send_replace(Connection::Missing(reason));
            // A server that accepts and hangs up at once must not be dialled at once.
            if dialled_at.elapsed() > self.config.backoff.max.min(SETTLED) {
                delays.reset();
            }
            self.shared.retry.pause(delays.next_delay()).await;
        }
    }

    /// Tries all addresses; also says how many there are.
    async fn dial(&self) -> Result<(usize, (SendRequest<Body>, Driver)), ConnectError> {
        let addrs = self.addrs().await.map_err(ConnectError::Resolve)?;
        let n_addrs = addrs.len();
        self.shared.metrics.balancer.told(Op::Reset);
        self.shared.metrics.balancer.endpoints(0, n_addrs);
        let connected = attempts::first(addrs, |addr| async move {
            let limit = self.config.connect_timeout;
            let connected = timeout(limit, self.connect(addr)).await;
            let connected = connected.unwrap_or(Err(ConnectError::Timeout { addr, limit }));
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

    async fn connect(&self, addr: SocketAddr) -> Result<(SendRequest<Body>, Driver), ConnectError> {
        let io = |source| ConnectError::Io { addr, source };
        let stream = TcpStream::connect(addr).await.map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        let started = match &self.shared.target.security {
            Security::Loopback => start_http2(stream).await,
            Security::MutualTls(identity) => {
                let server_name = server_name(&self.shared.target, identity);
                let stream = client::connect(stream, &self.connector.creds, identity, &server_name, Alpn::Unset)
                    .await
                    .map_err(|source| ConnectError::Tls { addr, source })?;
                start_http2(stream).await
            }
        };
        started.map_err(|source| ConnectError::Http { addr, source })
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

/// A SPIFFE identity is no host name; then the service is asked for by the name it is found under.
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

/// tonic knows the path of a method only; HTTP/2 needs all of the URI.
fn address(req: &mut Request<Body>, shared: &Shared) -> Result<(), Status> {
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
    fn new(families: &Metrics, client: &str, target: &ControlAddr) -> Self {
        let tls = match &target.security {
            Security::Loopback => ClientTls::Plain(WhyClientPlain::Loopback),
            Security::MutualTls(identity) => ClientTls::Meshed(identity.clone()),
        };
        let labels = Labels::new().with("addr", &target.addr);
        let balancer = families.balancer(client, &labels);
        let labels = tls.labels(labels);
        let (requests, latency) = (families.requests.get(&labels), families.latency.get(&labels));
        Self {
            families: families.clone(),
            labels,
            requests,
            latency,
            balancer,
        }
    }

    /// Counts a response by its head; a stream that fails later was a success so far.
    fn response(&self, rsp: Option<&Response<Incoming>>) {
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

/// An error with its causes on one line, for messages that leave the world of errors.
struct Causes<'a>(&'a (dyn std::error::Error + 'static));

impl std::fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// How long calls of the proxy wait for a connection.
pub(crate) const CALL_WAIT: Duration = Duration::from_secs(10);
/// The largest message that is read: the endpoints of a large service take more than the 4 MiB of tonic's default.
pub(super) const MESSAGE_LIMIT: usize = 64 * 1024 * 1024;
/// Between attempts to connect: endpoints change while a control plane comes back, and who learns it late fails.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A connection that lasted this long was a good one.
const SETTLED: Duration = Duration::from_secs(10);
/// Dead peers are found out within 13 seconds while streams are open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);
