//! Accept loop with a connection limit that client addresses share fairly, and a timeout for the first byte; for protocols in
//! which the client sends first.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::addr::canonical;
use crate::connections::{self, ConnectionLimiter, ConnectionPermit, SameAddressEviction};
use crate::log_limit::LogLimiter;
use crate::metrics::{Counter, Registry};
use crate::warn_limited;

/// A listening socket with its connection limit.
pub struct Listener {
    name: &'static str,
    tcp: TcpListener,
    limiter: Arc<ConnectionLimiter>,
    drain_timeout: Duration,
    closed: CloseCounters,
}

/// Counts connections that sent no first byte in time, and those that failed ([`ConnectionEnd::Failed`]). [`ConnectionLimiter`]
/// counts evicted and refused ones.
#[derive(Clone)]
struct CloseCounters {
    first_byte_timeouts: Arc<Counter>,
    failed: Arc<Counter>,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    Closed,
    /// The TLS handshake or the protocol failed, or the client was lost.
    Failed,
}

/// An accepted connection whose first byte was peeked, not consumed.
pub struct AcceptedConnection {
    pub stream: TcpStream,
    /// IPv4-mapped addresses are converted to IPv4.
    pub client: SocketAddr,
    pub permit: ConnectionPermit,
    pub first_byte: u8,
}

impl AcceptedConnection {
    /// Whether the first byte starts a TLS handshake.
    pub fn is_tls(&self) -> bool {
        self.first_byte == TLS_RECORD_HANDSHAKE
    }
}

impl Listener {
    /// A listener for at most `max` connections. Metrics and logs use its name.
    pub fn new(name: &'static str, tcp: TcpListener, max: usize, registry: &Registry) -> Self {
        Self {
            name,
            tcp,
            limiter: ConnectionLimiter::new(name, max, SameAddressEviction::Idlest, registry),
            drain_timeout: DRAIN_TIMEOUT,
            closed: CloseCounters {
                first_byte_timeouts: connections::closed_counter(name, "first_byte_timeout", registry),
                failed: connections::closed_counter(name, "failed", registry),
            },
        }
    }

    /// Sets how long connections may continue after the end of accepting; 5 seconds by default.
    pub fn with_drain_timeout(mut self, limit: Duration) -> Self {
        self.drain_timeout = limit;
        self
    }

    /// Serves until `stop` completes, then waits for the open connections until the drain timeout.
    pub async fn run<F>(
        self,
        stop: impl Future<Output = ()>,
        serve: impl Fn(AcceptedConnection) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = ConnectionEnd> + Send + 'static,
    {
        let (serve, mut connections) = (Arc::new(serve), JoinSet::new());
        let mut stop = std::pin::pin!(stop);
        let mut n_accepted = 0_usize;
        let log_limiter = LogLimiter::<()>::default();
        loop {
            // `accept` and `join_next` are cancel-safe, so no accepted connection is lost when another branch is taken.
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(_) = connections.join_next() => {}
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, client)) => {
                        self.spawn_connection(&mut connections, stream, canonical(client), &serve);
                        n_accepted += 1;
                        // Lets accepted connections make progress before later ones evict them.
                        if n_accepted.is_multiple_of(MAX_ACCEPTS_BEFORE_YIELD) {
                            tokio::task::yield_now().await;
                        }
                    }
                    Err(err) => {
                        warn_limited!(log_limiter, (), "accepting a connection failed", %err, server = self.name);
                        // The usual reason is that no file descriptor is left; an immediate retry would only use CPU.
                        sleep(ACCEPT_ERROR_BACKOFF).await;
                    }
                },
            }
        }
        drop(self.tcp);
        let ended = timeout(self.drain_timeout, async {
            while connections.join_next().await.is_some() {}
        })
        .await;
        if ended.is_err() {
            warn!(
                server = self.name,
                n_connections = connections.len(),
                "closing connections that did not end within the drain timeout"
            );
        }
    }

    fn spawn_connection<S, F>(
        &self,
        connections: &mut JoinSet<()>,
        stream: TcpStream,
        client: SocketAddr,
        serve: &Arc<S>,
    ) where
        S: Fn(AcceptedConnection) -> F + Send + Sync + 'static,
        F: Future<Output = ConnectionEnd> + Send + 'static,
    {
        let Some(permit) = self.limiter.admit(client.ip()) else {
            reset_on_drop(&stream);
            return debug!(%client, server = self.name, "connection limit reached, connection refused");
        };
        let handle = permit.handle();
        let (name, serve, closed) = (self.name, serve.clone(), self.closed.clone());
        let task = connections.spawn(async move {
            let mut first = [0];
            match timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut first)).await {
                Ok(Ok(0)) => debug!(%client, server = name, "the client closed the connection before its first byte"),
                Ok(Ok(_)) => {
                    let [first_byte] = first;
                    let accepted = AcceptedConnection {
                        stream,
                        client,
                        permit,
                        first_byte,
                    };
                    if serve(accepted).await == ConnectionEnd::Failed {
                        closed.failed.inc();
                    }
                }
                Ok(Err(err)) => debug!(%client, server = name, %err, "reading the first byte failed"),
                Err(_) => {
                    closed.first_byte_timeouts.inc();
                    reset_on_drop(&stream);
                    debug!(%client, server = name, "the client sent no byte within {FIRST_BYTE_TIMEOUT:?}");
                }
            }
        });
        handle.set_task(task);
    }
}

/// Makes the connection end with a reset when the stream is dropped.
fn reset_on_drop(stream: &TcpStream) {
    if let Err(err) = stream.set_zero_linger() {
        debug!(%err, "setting SO_LINGER failed, the connection ends without a reset");
    }
}

/// Maximum time from accepting a connection to its first byte.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(5);
/// The TLS record type of a handshake.
const TLS_RECORD_HANDSHAKE: u8 = 22;
/// Number of connections accepted before the accept loop yields to other tasks.
const MAX_ACCEPTS_BEFORE_YIELD: usize = 16;
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(100);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;

    /// Starts a listener that sends its connections to a channel, which keeps them open.
    async fn start(max: usize) -> (SocketAddr, mpsc::UnboundedReceiver<AcceptedConnection>, Registry) {
        let registry = Registry::new();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = tcp.local_addr().unwrap();
        let listener = Listener::new("test", tcp, max, &registry);
        let (accepted_tx, accepted_rx) = mpsc::unbounded_channel();
        tokio::spawn(listener.run(std::future::pending(), move |accepted| {
            accepted_tx.send(accepted).unwrap();
            std::future::pending()
        }));
        (addr, accepted_rx, registry)
    }

    #[tokio::test]
    async fn failed_connections_are_counted() {
        let registry = Registry::new();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = tcp.local_addr().unwrap();
        let (stop_tx, stop_rx) = tokio::sync::oneshot::channel::<()>();
        let listener = Listener::new("test", tcp, 4, &registry);
        let serving = tokio::spawn(listener.run(
            async move { drop(stop_rx.await) },
            async |accepted: AcceptedConnection| match accepted.is_tls() {
                true => ConnectionEnd::Failed,
                false => ConnectionEnd::Closed,
            },
        ));
        for first in [22, b'G', 22] {
            let mut client = TcpStream::connect(addr).await.unwrap();
            client.write_all(&[first]).await.unwrap();
            // The server closes it with the byte unread.
            let _ = client.read(&mut [0]).await;
        }
        drop(stop_tx);
        serving.await.unwrap();
        let text = registry.render();
        let line = "tulle_connections_closed_total{server=\"test\",cause=\"failed\"} 2\n";
        assert!(text.contains(line), "{text}");
    }

    #[tokio::test]
    async fn a_client_that_sends_is_served_while_silent_clients_fill_the_limit() {
        let (addr, mut accepted_rx, registry) = start(4).await;
        let mut silent = Vec::new();
        for _ in 0..12 {
            silent.push(TcpStream::connect(addr).await.unwrap());
        }
        let mut kept = Vec::new();
        for first in [22, b'G'] {
            let mut client = TcpStream::connect(addr).await.unwrap();
            client.write_all(&[first]).await.unwrap();
            let accepted = accepted_rx.recv().await.unwrap();
            assert_eq!((accepted.first_byte, accepted.is_tls()), (first, first == 22));
            kept.push((client, accepted));
        }
        for closed in &mut silent[..8] {
            assert_eq!(closed.read(&mut [0]).await.unwrap(), 0);
        }
        let text = registry.render();
        let line = "tulle_connections_closed_total{server=\"test\",cause=\"evicted\"} 10\n";
        assert!(text.contains(line), "{text}");
    }

    #[tokio::test]
    async fn a_connection_over_the_limit_is_reset() {
        let (addr, mut accepted_rx, _registry) = start(1).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(b"G").await.unwrap();
        let accepted = accepted_rx.recv().await.unwrap();
        accepted.permit.set_identity("a peer");
        let mut refused = TcpStream::connect(addr).await.unwrap();
        let read = refused.read(&mut [0]).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_byte_is_reset_after_five_seconds() {
        let (addr, _accepted_rx, registry) = start(4).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        let read = timeout(2 * FIRST_BYTE_TIMEOUT, client.read(&mut [0])).await;
        assert_eq!(read.unwrap().unwrap_err().kind(), ErrorKind::ConnectionReset);
        let text = registry.render();
        let line = "tulle_connections_closed_total{server=\"test\",cause=\"first_byte_timeout\"} 1\n";
        assert!(text.contains(line), "{text}");
    }
}
