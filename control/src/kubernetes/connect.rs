//! The way to the API server: how its name is looked up, and how it is noticed that it has gone.
//!
//! This is the stack of kube's own client, with a connector of ours below it. It speaks HTTP/1.1, so that each watch has a
//! connection of its own, and nothing but the kernel tells a quiet one from one whose other end has vanished.

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
use tower::{BoxError, ServiceBuilder, ServiceExt as _};
use tracing::debug;

/// What requests to the API server go through.
pub type Stack = BoxService<Request<Body>, Response<Incoming>, BoxError>;

/// How a connection is watched that says nothing.
#[derive(Clone, Copy, Debug)]
struct Liveness {
    /// After so much silence the other end is asked whether it is there.
    idle: Duration,
    /// How often it is asked.
    interval: Duration,
    /// How long it may not answer, and not acknowledge what is sent.
    limit: Duration,
}

/// The beginning of a client that is reached as `config` says; nothing is sent yet.
///
/// # Errors
/// Credentials that cannot be used, and a proxy on the way, which is not supported.
pub fn builder(config: kube::Config) -> Result<ClientBuilder<Stack>, kube::Error> {
    build(config, LIVENESS)
}

fn build(config: kube::Config, liveness: Liveness) -> Result<ClientBuilder<Stack>, kube::Error> {
    if let Some(proxy_url) = config.proxy_url {
        let proxy_url = Box::new(proxy_url);
        return Err(kube::Error::ProxyProtocolUnsupported { proxy_url });
    }
    // The configuration of TLS is kube's, which goes by the default of the process.
    let _already_installed = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(connector(liveness))?);
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

fn connector(liveness: Liveness) -> HttpConnector<names::Names> {
    let mut connector = HttpConnector::new_with_resolver(names::names());
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_keepalive(Some(liveness.idle));
    connector.set_keepalive_interval(Some(liveness.interval));
    let asked = liveness.limit.as_secs() / liveness.interval.as_secs().max(1);
    connector.set_keepalive_retries(u32::try_from(asked).ok());
    // Keep-alive ends what is idle; this ends what has something to send, and bounds both.
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(liveness.limit));
    connector
}

/// Where names come from: the system's resolver.
#[cfg(not(target_os = "linux"))]
mod names {
    use hyper_util::client::legacy::connect::dns::GaiResolver;

    pub(super) type Names = GaiResolver;

    pub(super) fn names() -> Names {
        GaiResolver::new()
    }
}

/// Where names come from: /etc/hosts and DNS. Binaries are static on Linux, and there is no getaddrinfo in them.
#[cfg(target_os = "linux")]
mod names {
    use std::net::SocketAddr;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::vec;

    use hickory_resolver::net::NetError;
    use hickory_resolver::{ResolverBuilder, TokioResolver};
    use hyper_util::client::legacy::connect::dns::Name;
    use tower::Service;

    #[derive(Clone, Copy)]
    pub(super) struct Names;

    pub(super) fn names() -> Names {
        Names
    }

    impl Service<Name> for Names {
        type Response = vec::IntoIter<SocketAddr>;
        type Error = NetError;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, NetError>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), NetError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, name: Name) -> Self::Future {
            Box::pin(async move {
                // Connections are few, and what is configured may have changed since the last.
                let resolver = TokioResolver::builder_tokio().and_then(ResolverBuilder::build)?;
                let found = resolver.lookup_ip(name.as_str()).await?;
                // The connector knows the port.
                let addrs: Vec<_> = found.iter().map(|ip| SocketAddr::new(ip, 0)).collect();
                Ok(addrs.into_iter())
            })
        }
    }
}

/// What client-go does for its connections: a server that vanishes is missed after half a minute.
const LIVENESS: Liveness = Liveness {
    idle: Duration::from_secs(15),
    interval: Duration::from_secs(5),
    limit: Duration::from_secs(30),
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
    use tulle_core::netns::{self, Lab};

    use super::*;

    #[tokio::test]
    async fn names_of_the_hosts_file_are_found() {
        let name = "localhost".parse().unwrap();
        let found: Vec<_> = names::names().call(name).await.unwrap().collect();
        assert!(
            !found.is_empty() && found.iter().all(|addr| addr.ip().is_loopback()),
            "{found:?}"
        );
    }

    #[tokio::test]
    async fn a_proxy_on_the_way_is_refused_by_name() {
        let mut config = kube::Config::new("https://10.0.0.1:6443".parse().unwrap());
        config.proxy_url = Some("http://proxy.example:3128".parse().unwrap());
        let refused = builder(config).err().unwrap().to_string();
        assert!(refused.contains("proxy.example:3128"), "{refused}");
    }

    /// Two hosts: on one an API server that begins an answer and falls silent, on the other the client.
    #[test]
    fn a_quiet_watch_lasts_and_one_whose_server_has_vanished_ends() {
        if !nix::unistd::Uid::effective().is_root() {
            let reason = "two hosts need network namespaces, and only root may make them";
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            eprintln!("SKIPPED: {reason}");
            return;
        }
        drop(netns::sweep(PREFIX));
        let mut lab = Lab::new(PREFIX).unwrap();
        let server = lab.host("server", "10.66.0.1/24", None).unwrap();
        let client = lab.host("client", "10.66.0.2/24", None).unwrap();
        let (ended, is_ended) = mpsc::channel::<()>();
        let (listens, is_listening) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let serve = move || {
                    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let listener = TcpListener::bind("10.66.0.1:6443").await.unwrap();
                        listens.send(()).unwrap();
                        let (mut stream, _) = listener.accept().await.unwrap();
                        let mut head = [0; 16];
                        stream.read_exact(&mut head).await.unwrap();
                        let begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n";
                        stream.write_all(begun).await.unwrap();
                        let wait = move || is_ended.recv().unwrap_err();
                        tokio::task::spawn_blocking(wait).await.unwrap();
                    });
                };
                server.run(serve).unwrap();
            });
            is_listening.recv().unwrap();
            let watch = || {
                let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let config = kube::Config::new("http://10.66.0.1:6443".parse().unwrap());
                    let quick = Liveness {
                        idle: Duration::from_secs(1),
                        interval: Duration::from_secs(1),
                        limit: Duration::from_secs(3),
                    };
                    let client = build(config, quick).unwrap().build();
                    let request = Request::get("/watch").body(Body::empty()).unwrap();
                    let mut body = client.send(request).await.unwrap().into_body();
                    assert!(body.frame().await.unwrap().is_ok());
                    let quiet = timeout(2 * quick.limit, body.frame()).await;
                    assert!(quiet.is_err(), "a quiet watch ended: {quiet:?}");
                    server.ip("link set eth0 down\n").unwrap();
                    let cut_at = Instant::now();
                    let cut = timeout(5 * quick.limit, body.frame()).await.expect("it ends");
                    assert!(cut.unwrap().is_err());
                    println!("missed after {:?}", cut_at.elapsed());
                });
            };
            client.run(watch).unwrap();
            drop(ended);
        });
    }

    const PREFIX: &str = "tulleapi";
}
