//! The accept loop of servers whose clients speak first: places shared by address, and no place for those who say nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::addr::canonical;
use crate::connections::{self, ConnectionLimiter, Place, Within};
use crate::metrics::{Counter, Registry};

/// One port, and how much it takes on.
pub struct Listener {
    name: &'static str,
    tcp: TcpListener,
    limiter: Arc<ConnectionLimiter>,
    drain_limit: Duration,
    silent: Arc<Counter>,
}

/// A connection that has said something, of which nothing has been read.
pub struct Accepted {
    pub stream: TcpStream,
    /// In its short form.
    pub client: SocketAddr,
    pub place: Place,
    pub first_byte: u8,
}

impl Accepted {
    /// Whether the client begins a TLS handshake.
    pub fn is_tls(&self) -> bool {
        self.first_byte == TLS_HANDSHAKE
    }
}

impl Listener {
    /// A listener with `max` places; metrics and logs know it by its name.
    pub fn new(name: &'static str, tcp: TcpListener, max: usize, registry: &Registry) -> Self {
        Self {
            name,
            tcp,
            limiter: ConnectionLimiter::new(name, max, Within::Replace, registry),
            drain_limit: DRAIN_LIMIT,
            silent: connections::closed(name, "silent", registry),
        }
    }

    /// Another time that connections may go on; default 5 s.
    pub fn drain_within(mut self, limit: Duration) -> Self {
        self.drain_limit = limit;
        self
    }

    /// Serves until `stop` ends, then lets connections end, bounded.
    pub async fn run<F>(self, stop: impl Future<Output = ()>, serve: impl Fn(Accepted) -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (serve, mut connections) = (Arc::new(serve), JoinSet::new());
        let mut stop = std::pin::pin!(stop);
        let mut n_accepted = 0_usize;
        loop {
            // All branches only wait; an accepted connection is never lost, because `accept` is cancel-safe.
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(_) = connections.join_next() => {}
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, client)) => {
                        self.start(&mut connections, stream, canonical(client), &serve);
                        n_accepted += 1;
                        // Others are served while many come, before they lose their places to these.
                        if n_accepted.is_multiple_of(ACCEPTED_AT_ONCE) {
                            tokio::task::yield_now().await;
                        }
                    }
                    Err(err) => {
                        warn!(%err, server = self.name, "accepting a connection failed");
                        // Out of descriptors, most likely: trying again at once would only burn the CPU.
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        drop(self.tcp);
        let ended = timeout(self.drain_limit, async {
            while connections.join_next().await.is_some() {}
        })
        .await;
        if ended.is_err() {
            warn!(
                server = self.name,
                n_connections = connections.len(),
                "cutting connections that did not end"
            );
        }
    }

    fn start<S, F>(&self, connections: &mut JoinSet<()>, stream: TcpStream, client: SocketAddr, serve: &Arc<S>)
    where
        S: Fn(Accepted) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(place) = self.limiter.admit(client.ip()) else {
            return debug!(%client, server = self.name, "there is no place for a connection");
        };
        let activity = place.activity();
        let (name, serve, silent) = (self.name, serve.clone(), self.silent.clone());
        let task = connections.spawn(async move {
            let mut first = [0];
            match timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut first)).await {
                Ok(Ok(0)) => debug!(%client, server = name, "a client left before it said anything"),
                Ok(Ok(_)) => {
                    let [first_byte] = first;
                    let accepted = Accepted {
                        stream,
                        client,
                        place,
                        first_byte,
                    };
                    serve(accepted).await;
                }
                Ok(Err(err)) => debug!(%client, server = name, %err, "reading the first byte failed"),
                Err(_) => {
                    silent.inc();
                    debug!(%client, server = name, "a client said nothing for {FIRST_BYTE_TIMEOUT:?}");
                }
            }
        });
        activity.served_by(task);
    }
}

/// How long a client may take to say its first byte.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(5);
/// The type of the first TLS record.
const TLS_HANDSHAKE: u8 = 22;
/// Connections that are accepted before those that are there have a turn.
const ACCEPTED_AT_ONCE: usize = 16;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;

    /// A listener that tells of those it serves, and keeps their connections.
    async fn start(max: usize) -> (SocketAddr, mpsc::UnboundedReceiver<Accepted>, Registry) {
        let registry = Registry::new();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = tcp.local_addr().unwrap();
        let listener = Listener::new("test", tcp, max, &registry);
        let (served, serving) = mpsc::unbounded_channel();
        tokio::spawn(listener.run(std::future::pending(), move |accepted| {
            served.send(accepted).unwrap();
            std::future::pending()
        }));
        (addr, serving, registry)
    }

    #[tokio::test]
    async fn a_client_that_speaks_is_served_while_silent_ones_hold_all_places() {
        let (addr, mut serving, registry) = start(4).await;
        let mut silent = Vec::new();
        for _ in 0..12 {
            silent.push(TcpStream::connect(addr).await.unwrap());
        }
        let mut kept = Vec::new();
        for first in [22, b'G'] {
            let mut client = TcpStream::connect(addr).await.unwrap();
            client.write_all(&[first]).await.unwrap();
            let served = serving.recv().await.unwrap();
            assert_eq!((served.first_byte, served.is_tls()), (first, first == 22));
            kept.push((client, served));
        }
        for closed in &mut silent[..8] {
            assert_eq!(closed.read(&mut [0]).await.unwrap(), 0);
        }
        let text = registry.render();
        let line = "tulle_connections_closed_total{server=\"test\",cause=\"place_taken\"} 10\n";
        assert!(text.contains(line), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_for_five_seconds_is_closed() {
        let (addr, _serving, registry) = start(4).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        let closed = timeout(2 * FIRST_BYTE_TIMEOUT, client.read(&mut [0])).await;
        assert_eq!(closed.unwrap().unwrap(), 0);
        let text = registry.render();
        let line = "tulle_connections_closed_total{server=\"test\",cause=\"silent\"} 1\n";
        assert!(text.contains(line), "{text}");
    }
}
