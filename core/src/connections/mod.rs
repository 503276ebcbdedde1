//! Connection limit of a listener, shared fairly between clients.
//!
//! When the limit is reached, a new connection replaces an open one without a verified identity. An unused connection has never
//! carried a byte; an idle one has carried none since its last check. The first rule that applies selects the connection:
//! 1. a connection of a client address that has more than its fair share;
//! 2. a connection of a global IPv6 /64 that has at least a quarter of the limit;
//! 3. an unused or idle connection of an address that has the most connections, if it has more than one;
//! 4. an unused connection; if there is none, the one that has been idle for the longest time. An unused connection is spared in
//!    its first second, unless more than a quarter of the limit are unused.
//!
//! The fair share is the limit divided by the number of clients, but at least four connections.
//!
//! With [`SameAddressEviction::UnusedOnly`] there is an exception: an address does not lose used connections to its own new ones.
//! If it has its fair share, and no other address has more connections, its new connection replaces an unused one of its own, or
//! is refused. In rule 3, too, an address loses only unused connections to its own new ones.
//!
//! A connection with a verified identity is evicted in two cases only:
//! - Unverified connections are fewer than a quarter of the limit, and a verified client or identity has more than its fair
//!   share. It loses a connection, so one client or identity cannot keep unverified connections out of this quarter.
//! - All connections are verified, and no client has more than its fair share. The client with the most connections loses one;
//!   if each client has one, the new connection is refused.

mod eviction;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::warn;

use crate::metrics::{Counter, Labels, Registry};
pub use eviction::SameAddressEviction;
use eviction::{Connection, Connections, EvictionParams, global_network};

/// The connection limit of one listener.
pub struct ConnectionLimiter {
    server: &'static str,
    max: usize,
    same_address_eviction: SameAddressEviction,
    state: Mutex<Connections>,
    warned_at: Mutex<Option<Instant>>,
    n_evicted: Arc<Counter>,
    n_refused: Arc<Counter>,
}

/// Counts one connection towards the limit until it is dropped.
pub struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    connection: Arc<Connection>,
}

/// Access to an admitted connection: records its activity, and sets the task that eviction aborts. It is not a permit: the
/// connection may end before its handles.
#[derive(Clone)]
pub struct ConnectionHandle(Arc<Connection>);

/// A stream that records its activity.
pub struct TrackedStream<S> {
    stream: S,
    connection: ConnectionHandle,
}

impl ConnectionLimiter {
    /// A limiter for at most `max` connections. Metrics and logs use the server's name.
    pub fn new(
        server: &'static str,
        max: usize,
        same_address_eviction: SameAddressEviction,
        registry: &Registry,
    ) -> Arc<Self> {
        Arc::new(Self {
            server,
            max,
            same_address_eviction,
            state: Mutex::default(),
            warned_at: Mutex::default(),
            n_evicted: closed_counter(server, "evicted", registry),
            n_refused: closed_counter(server, "limit_reached", registry),
        })
    }

    /// Admits a connection from this address. At the limit, another connection is closed for it; `None` if none may be
    /// closed.
    pub fn admit(self: &Arc<Self>, client: IpAddr) -> Option<ConnectionPermit> {
        let client = client.to_canonical();
        let params = EvictionParams {
            max: self.max,
            same_address_eviction: self.same_address_eviction,
            now: Instant::now(),
        };
        let mut state = self.state.lock();
        let mut victim = None;
        if state.len() >= self.max {
            victim = state.evict_for(client, params);
            if victim.is_none() {
                drop(state);
                self.n_refused.inc();
                self.warn(client);
                return None;
            }
        }
        let connection = state.add(client, params.now);
        drop(state);
        if let Some(evicted) = victim {
            evicted.evict();
            self.n_evicted.inc();
            self.warn(evicted.ip);
        }
        Some(ConnectionPermit {
            limiter: self.clone(),
            connection,
        })
    }

    /// The maximum number of connections.
    pub fn max(&self) -> usize {
        self.max
    }

    /// The number of admitted connections.
    pub fn n_connections(&self) -> usize {
        self.state.lock().len()
    }

    fn warn(&self, client: IpAddr) {
        let now = Instant::now();
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|before| now - before >= FULL_WARNING_INTERVAL) {
            *warned_at = Some(now);
            warn!(server = self.server, max = self.max, %client, "connection limit reached, closing or refusing connections of this client");
        }
    }
}

impl ConnectionPermit {
    /// Sets the verified identity of the peer. Such a connection is evicted in the two cases of the module documentation only.
    pub fn set_identity(&self, identity: &str) {
        self.limiter.state.lock().set_identity(&self.connection, identity);
    }

    /// Records that bytes were read or written.
    pub fn record_activity(&self) {
        self.connection.record_activity();
    }

    pub fn handle(&self) -> ConnectionHandle {
        ConnectionHandle(self.connection.clone())
    }

    /// Whether the connection should end with a reset instead of a close, because the server stops it: it was evicted, or
    /// [`ConnectionHandle::prefer_reset`] was called. `Tcp` in `proxy/src/net/io.rs` resets such a connection if the peer has
    /// acknowledged all data. A [`Listener`](crate::listener::Listener) ignores this flag.
    pub fn prefers_reset(&self) -> bool {
        self.connection.prefers_reset.load(Ordering::Relaxed)
    }

    /// Wraps the stream so that its reads and writes are recorded as activity.
    pub fn track<S>(&self, stream: S) -> TrackedStream<S> {
        TrackedStream {
            stream,
            connection: self.handle(),
        }
    }
}

impl fmt::Debug for ConnectionPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionPermit({})", self.connection.ip)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.state.lock().remove(&self.connection);
    }
}

impl ConnectionHandle {
    /// Records that bytes were read or written.
    pub fn record_activity(&self) {
        self.0.record_activity();
    }

    /// Sets [`ConnectionPermit::prefers_reset`], because the server stops the connection.
    pub fn prefer_reset(&self) {
        self.0.prefers_reset.store(true, Ordering::Relaxed);
    }

    /// Sets the first task that serves the connection; eviction aborts it.
    ///
    /// The task is already running. If it has handed the connection over with [`replace_task`](Self::replace_task) before this
    /// call, the newer task is kept.
    pub fn set_task(&self, task: AbortHandle) {
        let mut current = self.0.task.lock();
        let task = current.get_or_insert(task);
        self.abort_if_evicted(task);
    }

    /// Sets the task that continues to serve the connection; eviction aborts it instead of the previous one.
    pub fn replace_task(&self, task: AbortHandle) {
        let mut current = self.0.task.lock();
        let task = current.insert(task);
        self.abort_if_evicted(task);
    }

    /// Aborts a task of a connection that was evicted before the task was set.
    fn abort_if_evicted(&self, task: &AbortHandle) {
        if self.0.is_evicted.load(Ordering::Relaxed) {
            task.abort();
        }
    }
}

impl fmt::Debug for ConnectionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionHandle({})", self.0.ip)
    }
}

/// The counter of connections that a server closes for this cause.
pub(crate) fn closed_counter(server: &str, cause: &str, registry: &Registry) -> Arc<Counter> {
    let family = registry.counter(
        "tulle_connections_closed_total",
        "Connections that the server closed, by cause: `evicted`, an open connection replaced by a new one; `limit_reached`, a new connection, because no open one may be closed; `first_byte_timeout`, the client sent no data; `failed`, the TLS handshake, the protocol or the connection to the client failed",
    );
    family.get(&Labels::new().with("server", server).with("cause", cause))
}

/// The client's network for limits per client: the /64 of a global IPv6 address, because one machine can use all of its
/// addresses; otherwise the address itself. Hosts and pods of a private network can share a /64.
pub fn client_network(client: IpAddr) -> IpAddr {
    let client = client.to_canonical();
    global_network(client).map_or(client, IpAddr::V6)
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.connection.record_activity();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        self.connection.record_activity();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        self.connection.record_activity();
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Minimum time between two warnings about a full listener.
const FULL_WARNING_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
