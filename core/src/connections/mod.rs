//! Bounds the connections of a listener, so that no client can starve the others.
//!
//! A new connection is admitted even if all places are taken: another connection is closed for it. That is one of a client
//! address that has more than its share, else of a global IPv6 network of which this is true, else of the addresses that have
//! the most one that is not in use, else of any the one that has been silent for the longest.
//! Connections whose peer has proven an identity are closed last. They have three quarters of the places at least, and leave
//! the rest to those who are about to prove theirs: then an identity, or one of its addresses, loses what it has above its share.
//! Where [`Within::Keep`] is chosen, an address does not lose connections that have carried bytes to its own newcomers.

mod shares;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
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
use shares::{Connection, State, Terms};

/// The places of one listener.
pub struct ConnectionLimiter {
    server: &'static str,
    max: usize,
    within: Within,
    state: Mutex<State>,
    warned_at: Mutex<Option<Instant>>,
    /// Connections closed for others, and those that found no place.
    closed: Arc<Counter>,
    refused: Arc<Counter>,
}

/// What happens if a newcomer is of the address that has the most connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Within {
    /// The longest silent connection of the address is closed for it.
    Replace,
    /// A connection that has never carried a byte is closed for it. If there is none, the newcomer is refused: a client that has
    /// too many connections keeps those that it uses.
    Keep,
}

/// The place of one connection, until it is dropped.
pub struct Place {
    limiter: Arc<ConnectionLimiter>,
    connection: Arc<Connection>,
}

/// Says what happens on a connection that has a place.
#[derive(Clone)]
pub struct Activity(Arc<Connection>);

/// A stream whose place knows when it carries bytes.
pub struct Watched<S> {
    stream: S,
    activity: Activity,
}

impl ConnectionLimiter {
    /// A limiter of `max` places for a server of this name, by which metrics and logs know it.
    pub fn new(server: &'static str, max: usize, within: Within, registry: &Registry) -> Arc<Self> {
        Arc::new(Self {
            server,
            max,
            within,
            state: Mutex::default(),
            warned_at: Mutex::default(),
            closed: closed(server, "place_taken", registry),
            refused: closed(server, "no_place", registry),
        })
    }

    /// A place for a connection from this address. If all are taken, another connection is closed. There is no place if none may
    /// be closed.
    pub fn admit(self: &Arc<Self>, client: IpAddr) -> Option<Place> {
        let client = client.to_canonical();
        let terms = Terms {
            max: self.max,
            within: self.within,
            now: Instant::now(),
        };
        let mut state = self.state.lock();
        let mut victim = None;
        if state.n() >= self.max {
            victim = state.take_victim(client, terms);
            if victim.is_none() {
                drop(state);
                self.refused.inc();
                self.warn(client);
                return None;
            }
        }
        let connection = state.add(client, terms.now);
        drop(state);
        if let Some(closed) = victim {
            closed.close();
            self.closed.inc();
            self.warn(closed.ip);
        }
        Some(Place {
            limiter: self.clone(),
            connection,
        })
    }

    /// How many places there are.
    pub fn max(&self) -> usize {
        self.max
    }

    /// How many connections have a place.
    pub fn n(&self) -> usize {
        self.state.lock().n()
    }

    fn warn(&self, client: IpAddr) {
        let now = Instant::now();
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|before| now - before >= WARNING_INTERVAL) {
            *warned_at = Some(now);
            warn!(server = self.server, max = self.max, %client, "all places are taken, closing connections of this client");
        }
    }
}

impl Place {
    /// Says which identity the peer has proven: its connection is closed after those of strangers.
    pub fn verified(&self, identity: &str) {
        self.limiter.state.lock().verify(&self.connection, identity);
    }

    /// Says that bytes came or went.
    pub fn mark(&self) {
        self.connection.mark();
    }

    pub fn activity(&self) -> Activity {
        Activity(self.connection.clone())
    }

    /// The same stream; what it carries from now on counts against silence.
    pub fn watch<S>(&self, stream: S) -> Watched<S> {
        Watched {
            stream,
            activity: self.activity(),
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({})", self.connection.ip)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.limiter.state.lock().remove(&self.connection);
    }
}

impl Activity {
    /// Says that bytes came or went.
    pub fn mark(&self) {
        self.0.mark();
    }

    /// Names the task that serves the connection; it is aborted if its place goes to another connection.
    ///
    /// The task may run before it is named, and have named another one to go on with: that stays.
    pub fn served_by(&self, task: AbortHandle) {
        self.name_task(|current| current.get_or_insert(task));
    }

    /// Names the task that goes on with the connection.
    pub fn handed_to(&self, task: AbortHandle) {
        self.name_task(|current| current.insert(task));
    }

    fn name_task(&self, name: impl FnOnce(&mut Option<AbortHandle>) -> &mut AbortHandle) {
        let mut current = self.0.task.lock();
        let task = name(&mut current);
        if self.0.is_closed.load(Ordering::Relaxed) {
            task.abort();
        }
    }
}

impl fmt::Debug for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Activity({})", self.0.ip)
    }
}

/// Counts connections that a server closes for a reason of its own.
pub(crate) fn closed(server: &str, cause: &str, registry: &Registry) -> Arc<Counter> {
    let family = registry.counter(
        "tulle_connections_closed_total",
        "Connections that a server closed for want of places, or because the client said nothing",
    );
    family.get(&Labels::new().with("server", server).with("cause", cause))
}

/// The network that stands for a client where each client has a bounded number of something: of global IPv6 the /64, as one
/// machine can have all of its addresses; else the address. Machines and pods of a private network share a /64.
pub fn network(client: IpAddr) -> IpAddr {
    let client = client.to_canonical();
    global_network(client).map_or(client, IpAddr::V6)
}

/// The first address of the /64 of a global IPv6 address.
fn global_network(client: IpAddr) -> Option<Ipv6Addr> {
    match client {
        IpAddr::V6(ip) if !(ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local()) => {
            Some(Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)))
        }
        _ => None,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.activity.mark();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        self.activity.mark();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        self.activity.mark();
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

/// How often a listener that is full says so in the log.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
