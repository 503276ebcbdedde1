//! Echo servers for tests, the demo and the benchmark.
//!
//! On SIGTERM or SIGINT, the listeners close immediately. HTTP connections finish their requests, and TCP connections echo
//! the bytes that they have read. Connections that are still open after ten seconds are closed. All servers run on one
//! `current_thread` runtime, so that a server uses at most one core on every machine.

mod app;
mod grpc;
mod http;
mod tcp;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderValue;
use anyhow::Context as _;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tulle_core::drain::{self, Watch};

use self::app::App;

/// Arguments of `tulle-bench serve`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Serve HTTP/1.1, HTTP/2 by prior knowledge, gRPC and WebSocket at this address (repeatable; port 0 selects a free one).
    #[arg(long, value_name = "ADDR")]
    pub http: Vec<SocketAddr>,
    /// The same over TLS, with a self-signed certificate.
    #[arg(long, value_name = "ADDR")]
    pub https: Vec<SocketAddr>,
    /// Echo TCP bytes at this address.
    #[arg(long, value_name = "ADDR")]
    pub tcp: Vec<SocketAddr>,
    /// Send a greeting line with the server's name, then echo TCP bytes, at this address.
    #[arg(long, value_name = "ADDR")]
    pub tcp_speaks_first: Vec<SocketAddr>,
    /// Wait this long before every response, such as "50ms".
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = tulle_core::duration::parse)]
    pub delay: Duration,
    /// Send the same `date` in all responses, for measurements that count instructions: each new date is a new entry in HPACK
    /// tables, so the count would depend on how long the measurement takes.
    #[arg(long)]
    pub fixed_date: bool,
    /// Server name in `x-replica`, in gRPC replies and in greetings.
    #[arg(long, default_value = "tulle-bench")]
    pub name: String,
    /// Write the "listening" lines to this file once all listeners accept connections.
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
}

#[derive(Clone, Copy)]
enum Protocol {
    Http,
    Https,
    Tcp,
    TcpSpeaksFirst,
}

/// The bound listeners of the server, before [`Server::run`] accepts connections.
pub struct Server {
    app: Arc<App>,
    listeners: Vec<(Protocol, TcpListener)>,
}

/// Serves until SIGTERM or SIGINT.
pub fn main(args: Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(tokio::signal::unix::SignalKind::terminate())?;
        let mut interrupt = signal(tokio::signal::unix::SignalKind::interrupt())?;
        let server = Server::bind(&args).await?;
        server.announce(args.ready_file.as_deref())?;
        server
            .run(async move {
                tokio::select! {
                    _ = terminate.recv() => (),
                    _ = interrupt.recv() => (),
                }
            })
            .await;
        Ok(())
    })
}

fn signal(kind: tokio::signal::unix::SignalKind) -> anyhow::Result<tokio::signal::unix::Signal> {
    tokio::signal::unix::signal(kind).context("watching for signals")
}

impl Server {
    /// Binds the listeners of `args`.
    pub async fn bind(args: &Args) -> anyhow::Result<Self> {
        let replica = HeaderValue::from_str(&args.name)
            .with_context(|| format!("--name {:?} cannot be the value of a header", args.name))?;
        let requested_listeners = (args.http.iter().map(|addr| (Protocol::Http, addr)))
            .chain(args.https.iter().map(|addr| (Protocol::Https, addr)))
            .chain(args.tcp.iter().map(|addr| (Protocol::Tcp, addr)))
            .chain(
                args.tcp_speaks_first
                    .iter()
                    .map(|addr| (Protocol::TcpSpeaksFirst, addr)),
            );
        let mut listeners = Vec::new();
        for (protocol, addr) in requested_listeners {
            let listener = TcpListener::bind(addr)
                .await
                .with_context(|| format!("listening on {addr}"))?;
            listeners.push((protocol, listener));
        }
        anyhow::ensure!(
            !listeners.is_empty(),
            "nothing to serve: give --http, --https, --tcp or --tcp-speaks-first"
        );
        Ok(Self {
            app: Arc::new(App {
                name: args.name.clone(),
                replica,
                delay: args.delay,
                fixed_date: args.fixed_date,
                tls: (!args.https.is_empty()).then(create_tls_acceptor).transpose()?,
            }),
            listeners,
        })
    }

    /// The bound addresses, in the order of `--http`, `--https`, `--tcp`, `--tcp-speaks-first`.
    pub fn addrs(&self) -> anyhow::Result<Vec<SocketAddr>> {
        self.listeners
            .iter()
            .map(|(_, listener)| Ok(listener.local_addr()?))
            .collect()
    }

    fn announce(&self, ready_file: Option<&std::path::Path>) -> anyhow::Result<()> {
        let mut lines = String::new();
        for ((protocol, _), addr) in self.listeners.iter().zip(self.addrs()?) {
            lines.push_str(&format!("listening {} {addr}\n", protocol.name()));
        }
        let mut out = std::io::stdout().lock();
        out.write_all(lines.as_bytes())
            .and_then(|()| out.flush())
            .context("writing to standard output")?;
        let Some(path) = ready_file else { return Ok(()) };
        // Written to a temporary file and renamed, so that readers never see a partial file.
        let partial = path.with_extension("partial");
        std::fs::write(&partial, lines)
            .and_then(|()| std::fs::rename(&partial, path))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Serves until `stop` completes, then drains.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (signal, watch) = drain::channel();
        let mut accepting = JoinSet::new();
        for (protocol, listener) in self.listeners {
            accepting.spawn(accept(protocol, listener, self.app.clone(), watch.clone()));
        }
        stop.await;
        // Listeners close before any connection is drained.
        accepting.shutdown().await;
        // Connections that are still open after the timeout end with the process.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, signal.drain()).await;
    }
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::Tcp => "tcp",
            Self::TcpSpeaksFirst => "tcp-speaks-first",
        }
    }
}

async fn accept(protocol: Protocol, listener: TcpListener, app: Arc<App>, watch: Watch) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(serve(protocol, stream, app.clone(), watch.clone()));
            }
            // The usual cause is the limit of file descriptors. Connections that end release their descriptors.
            Err(error) => {
                eprintln!("tulle-bench: accepting on {}: {error}", protocol.name());
                tokio::time::sleep(ACCEPT_ERROR_BACKOFF).await;
            }
        }
    }
}

async fn serve(protocol: Protocol, stream: TcpStream, app: Arc<App>, watch: Watch) {
    // A small response must not wait for the acknowledgement of the previous one. If this fails, the first read fails too.
    let _ = stream.set_nodelay(true);
    let _guard = watch.guard();
    match protocol {
        Protocol::Http => http::serve(stream, app, watch).await,
        Protocol::Https => {
            let Some(acceptor) = &app.tls else { return };
            // A failed handshake needs no response.
            let Ok(Ok(tls)) = tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await else {
                return;
            };
            http::serve(tls, app.clone(), watch).await;
        }
        Protocol::Tcp => tcp::echo(stream, &app, watch).await,
        Protocol::TcpSpeaksFirst => tcp::greet_and_echo(stream, &app, watch).await,
    }
}

/// Creates an acceptor that terminates TLS with a self-signed certificate.
fn create_tls_acceptor() -> anyhow::Result<TlsAcceptor> {
    let certificate = rcgen::generate_simple_self_signed(["tulle-bench".to_owned()]).context("making a certificate")?;
    let key = PrivateKeyDer::try_from(certificate.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.cert.der().clone()], key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::oneshot;

    use super::*;

    fn args(name: &str) -> Args {
        Args {
            http: vec![([127, 0, 0, 1], 0).into()],
            https: Vec::new(),
            tcp: Vec::new(),
            tcp_speaks_first: Vec::new(),
            delay: Duration::ZERO,
            fixed_date: false,
            name: name.to_owned(),
            ready_file: None,
        }
    }

    #[tokio::test]
    async fn a_request_that_arrived_before_the_process_drains_gets_its_response() {
        let server = Server::bind(&args("one")).await.unwrap();
        let addr = server.addrs().unwrap()[0];
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(server.run(async { stopped.await.unwrap() }));
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(REQUEST).await.unwrap();
        read_response(&mut client).await;
        // The connection is idle. The server notices the request and the signal at the same time.
        assert_eq!(client.try_write(REQUEST).unwrap(), REQUEST.len());
        stop.send(()).unwrap();
        read_response(&mut client).await;
        running.await.unwrap();
    }

    /// Reads the head of a response without body.
    async fn read_response(client: &mut TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await.expect("a response"));
        }
        assert!(
            head.starts_with(b"HTTP/1.1 200 "),
            "{:?}",
            String::from_utf8_lossy(&head)
        );
    }

    const REQUEST: &[u8] = b"HEAD / HTTP/1.1\r\nhost: one\r\n\r\n";

    #[tokio::test]
    async fn a_server_name_that_is_not_a_header_value_is_refused() {
        assert!(Server::bind(&args("one")).await.is_ok());
        let error = Server::bind(&args("a\nb")).await.err().unwrap();
        assert_eq!(error.to_string(), "--name \"a\\nb\" cannot be the value of a header");
    }
}
