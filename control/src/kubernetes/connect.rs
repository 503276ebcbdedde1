//! Transport to the API server: name resolution and TCP keep-alive.
//!
//! The client has the service stack of kube's own client, but another connector. It uses HTTP/1.1, so each watch has its own
//! connection. Only TCP keep-alive can distinguish an idle connection from a connection to an unreachable server.

use std::net::IpAddr;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use tower::retry::RetryLayer;
use tower::util::BoxService;
use tower::{BoxError, Service as _, ServiceBuilder, ServiceExt as _};
use tracing::debug;

/// The service that sends requests to the API server.
pub type BoxedClientService = BoxService<Request<Body>, Response<Incoming>, BoxError>;

#[derive(Clone, Copy, Debug)]
struct TcpKeepAlive {
    /// Idle time before the first probe.
    idle: Duration,
    /// Time between probes.
    interval: Duration,
    /// Time without a response to probes, or without an acknowledgement of sent data, after which the connection is
    /// closed.
    timeout: Duration,
}

/// Starts building a client from `config`. Sends no request.
///
/// # Errors
/// Fails if the credentials are invalid or if `config` has an HTTP proxy, which is not supported.
pub fn builder(config: kube::Config) -> Result<ClientBuilder<BoxedClientService>, kube::Error> {
    build_with_tcp_keep_alive(config, TCP_KEEP_ALIVE)
}

fn build_with_tcp_keep_alive(
    config: kube::Config,
    keep_alive: TcpKeepAlive,
) -> Result<ClientBuilder<BoxedClientService>, kube::Error> {
    if let Some(proxy_url) = config.proxy_url {
        let proxy_url = Box::new(proxy_url);
        return Err(kube::Error::ProxyProtocolUnsupported { proxy_url });
    }
    // kube builds the TLS configuration, with the default crypto provider of the process.
    let _already_installed = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(connector(keep_alive))?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let client: legacy::Client<_, Body> = legacy::Client::builder(TokioExecutor::new()).build(connector);
    let retries = config
        .default_retry
        .then(|| RetryLayer::new(RetryPolicy::server_retry()));
    let stack = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(retries)
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_request(|req: Request<Body>| {
            debug!(target: "kube", method = %req.method(), url = %req.uri(), "requesting");
            req
        })
        .map_err(BoxError::from)
        .service(client);
    Ok(ClientBuilder::new(stack.boxed(), config.default_namespace))
}

/// Resolves a host name as connections to the API server do. An IP address is returned unchanged.
///
/// # Errors
/// Fails if the lookup fails or finds nothing.
pub async fn lookup(host: &str) -> Result<Vec<IpAddr>, BoxError> {
    if let Ok(ip) = host.parse() {
        return Ok(vec![ip]);
    }
    let found = resolver::new().call(host.parse()?).await?;
    Ok(found.map(|addr| addr.ip()).collect())
}

fn connector(keep_alive: TcpKeepAlive) -> HttpConnector<resolver::Resolver> {
    let mut connector = HttpConnector::new_with_resolver(resolver::new());
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_keepalive(Some(keep_alive.idle));
    connector.set_keepalive_interval(Some(keep_alive.interval));
    let n_probes = keep_alive.timeout.as_secs() / keep_alive.interval.as_secs().max(1);
    connector.set_keepalive_retries(u32::try_from(n_probes).ok());
    // Keep-alive closes an idle connection if the server does not respond. The user timeout closes a connection with
    // unacknowledged data, and limits the time in both cases.
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(keep_alive.timeout));
    connector
}

/// Name resolution by the system's resolver.
#[cfg(not(target_os = "linux"))]
mod resolver {
    use hyper_util::client::legacy::connect::dns::GaiResolver;

    pub(super) type Resolver = GaiResolver;

    pub(super) fn new() -> Resolver {
        GaiResolver::new()
    }
}

/// Name resolution by /etc/hosts and DNS. On Linux the binaries are static and cannot call getaddrinfo.
#[cfg(target_os = "linux")]
mod resolver {
    use std::net::SocketAddr;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::vec;

    use hickory_resolver::net::NetError;
    use hickory_resolver::{ResolverBuilder, TokioResolver};
    use hyper_util::client::legacy::connect::dns::Name;
    use tower::Service;

    #[derive(Clone, Copy)]
    pub(super) struct Resolver;

    pub(super) fn new() -> Resolver {
        Resolver
    }

    impl Service<Name> for Resolver {
        type Response = vec::IntoIter<SocketAddr>;
        type Error = NetError;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, NetError>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), NetError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, name: Name) -> Self::Future {
            Box::pin(async move {
                // Connections are rare, so each lookup reads the current configuration.
                let resolver = TokioResolver::builder_tokio().and_then(ResolverBuilder::build)?;
                let found = resolver.lookup_ip(name.as_str()).await?;
                // The connector sets the port.
                let addrs: Vec<_> = found.iter().map(|ip| SocketAddr::new(ip, 0)).collect();
                Ok(addrs.into_iter())
            })
        }
    }
}

/// With these values an unreachable server is detected within 35 s.
const TCP_KEEP_ALIVE: TcpKeepAlive = TcpKeepAlive {
    idle: Duration::from_secs(15),
    interval: Duration::from_secs(5),
    timeout: Duration::from_secs(30),
};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc;

    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::runtime::Builder;
    use tokio::time::{Instant, timeout};
    use tower::Service as _;
    use tulle_core::netns::{self, VirtualNetwork};

    use super::*;

    #[tokio::test]
    async fn names_of_the_hosts_file_are_found() {
        let name = "localhost".parse().unwrap();
        let found: Vec<_> = resolver::new().call(name).await.unwrap().collect();
        assert!(
            !found.is_empty() && found.iter().all(|addr| addr.ip().is_loopback()),
            "{found:?}"
        );
    }

    #[tokio::test]
    async fn an_http_proxy_is_rejected_with_its_url() {
        let mut config = kube::Config::new("https://10.0.0.1:6443".parse().unwrap());
        config.proxy_url = Some("http://proxy.example:3128".parse().unwrap());
        let refused = builder(config).err().unwrap().to_string();
        assert!(refused.contains("proxy.example:3128"), "{refused}");
    }

    /// The API server starts a response and then sends nothing. The client is on another host.
    #[test]
    fn an_idle_watch_stays_open_and_ends_when_its_server_is_unreachable() {
        if !nix::unistd::Uid::effective().is_root() {
            let reason = "network namespaces for two hosts need root";
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            eprintln!("SKIPPED: {reason}");
            return;
        }
        drop(netns::remove_stale(NETWORK_NAME_PREFIX));
        let mut network = VirtualNetwork::new(NETWORK_NAME_PREFIX).unwrap();
        let server = network.add_host("server", "10.66.0.1/24", None).unwrap();
        let client = network.add_host("client", "10.66.0.2/24", None).unwrap();
        let (end, ended) = mpsc::channel::<()>();
        let (listening_sender, listening) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let serve = move || {
                    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let listener = TcpListener::bind("10.66.0.1:6443").await.unwrap();
                        listening_sender.send(()).unwrap();
                        let (mut stream, _) = listener.accept().await.unwrap();
                        let mut head = [0; 16];
                        stream.read_exact(&mut head).await.unwrap();
                        let begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n";
                        stream.write_all(begun).await.unwrap();
                        let wait = move || ended.recv().unwrap_err();
                        tokio::task::spawn_blocking(wait).await.unwrap();
                    });
                };
                server.run(serve).unwrap();
            });
            listening.recv().unwrap();
            let watch = || {
                let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let config = kube::Config::new("http://10.66.0.1:6443".parse().unwrap());
                    let quick = TcpKeepAlive {
                        idle: Duration::from_secs(1),
                        interval: Duration::from_secs(1),
                        timeout: Duration::from_secs(3),
                    };
                    let client = build_with_tcp_keep_alive(config, quick).unwrap().build();
                    let request = Request::get("/watch").body(Body::empty()).unwrap();
                    let mut body = client.send(request).await.unwrap().into_body();
                    assert!(body.frame().await.unwrap().is_ok());
                    let quiet = timeout(2 * quick.timeout, body.frame()).await;
                    assert!(quiet.is_err(), "a quiet watch ended: {quiet:?}");
                    server.ip("link set eth0 down\n").unwrap();
                    let cut_at = Instant::now();
                    let cut = timeout(5 * quick.timeout, body.frame()).await.expect("the watch ends");
                    assert!(cut.unwrap().is_err());
                    println!("the watch ended after {:?}", cut_at.elapsed());
                });
            };
            client.run(watch).unwrap();
            drop(end);
        });
    }

    const NETWORK_NAME_PREFIX: &str = "tulleapi";
}
