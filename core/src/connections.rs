//! Bounds the connections of a listener, so that no client address can starve the others.
//!
//! A new connection is admitted even if all places are taken: another connection is closed for it. If a client address has
//! more than its share, that is one of the address that has the most, else one of any; and of these the one that has been
//! silent for the longest. Connections whose peer has proven an identity are closed last. Where [`Within::Keep`] is chosen, an address does not lose connections
//! that have carried bytes to its own newcomers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::warn;

use crate::metrics::{Counter, Labels, Registry};

/// The places of one listener.
pub struct ConnectionLimiter {
    server: &'static str,
    max: usize,
    within: Within,
    state: Mutex<State>,
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

/// What is known of a connection that has a place.
#[derive(Clone)]
pub struct Activity(Arc<Connection>);

/// A stream whose place knows when it carries bytes.
pub struct Watched<S> {
    stream: S,
    activity: Activity,
}

struct Connection {
    client: IpAddr,
    /// Whether it has carried bytes: [`NEVER`], [`ACTIVE`] or [`QUIET`].
    state: AtomicU8,
    is_closed: AtomicBool,
    /// Where it is in [`Connections::by_client`]; changed under the lock only.
    position: AtomicU64,
    task: Mutex<Option<AbortHandle>>,
}

#[derive(Default)]
struct State {
    next_position: u64,
    strangers: Connections,
    verified: Connections,
    warned_at: Option<Instant>,
}

/// Connections by client address, those of an address by how long they have been silent.
#[derive(Default)]
struct Connections {
    n: usize,
    by_client: HashMap<IpAddr, BTreeMap<u64, Arc<Connection>>>,
    /// How many connections each address has.
    by_count: BTreeSet<(usize, IpAddr)>,
    /// All of them, by how long they have been silent.
    all: BTreeMap<u64, Arc<Connection>>,
}

impl ConnectionLimiter {
    /// A limiter of `max` places for a server of this name, by which metrics and logs know it.
    pub fn new(server: &'static str, max: usize, within: Within, registry: &Registry) -> Arc<Self> {
        Arc::new(Self {
            server,
            max,
            within,
            state: Mutex::default(),
            closed: closed(server, "place_taken", registry),
            refused: closed(server, "no_place", registry),
        })
    }

    /// A place for a connection from this address. If all are taken, another connection is closed. There is no place if none may
    /// be closed.
    pub fn admit(self: &Arc<Self>, client: IpAddr) -> Option<Place> {
        let client = group(client);
        let mut state = self.state.lock();
        if state.n() >= self.max {
            let Some(closed) = state.take_longest_silent(client, self.max, self.within) else {
                self.refused.inc();
                self.warn(&mut state, client);
                return None;
            };
            closed.close();
            self.closed.inc();
            self.warn(&mut state, closed.client);
        }
        let connection = Arc::new(Connection {
            client,
            state: AtomicU8::new(NEVER),
            is_closed: AtomicBool::new(false),
            position: AtomicU64::new(state.position()),
            task: Mutex::default(),
        });
        state.strangers.insert(connection.clone());
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

    fn warn(&self, state: &mut State, client: IpAddr) {
        let now = Instant::now();
        if state.warned_at.is_none_or(|before| now - before >= WARNING_INTERVAL) {
            state.warned_at = Some(now);
            warn!(server = self.server, max = self.max, %client, "all places are taken, closing connections of this client");
        }
    }
}

impl Place {
    /// Says that the peer has proven an identity: its connection is closed after those of strangers.
    pub fn verified(&self) {
        let mut state = self.limiter.state.lock();
        if state.strangers.remove(&self.connection) {
            state.verified.insert(self.connection.clone());
        }
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

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.limiter.state.lock();
        let _ = state.strangers.remove(&self.connection) || state.verified.remove(&self.connection);
    }
}

impl Activity {
    /// Says that bytes came or went.
    pub fn mark(&self) {
        self.0.state.store(ACTIVE, Ordering::Relaxed);
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
        write!(f, "Activity({})", self.0.client)
    }
}

impl Connection {
    fn close(&self) {
        let task = self.task.lock();
        self.is_closed.store(true, Ordering::Relaxed);
        if let Some(task) = &*task {
            task.abort();
        }
    }
}

impl State {
    fn n(&self) -> usize {
        self.strangers.n + self.verified.n
    }

    fn position(&mut self) -> u64 {
        self.next_position += 1;
        self.next_position
    }

    /// Takes the place of one connection away for a newcomer; of those with an identity only where an address has several.
    fn take_longest_silent(&mut self, newcomer: IpAddr, max: usize, within: Within) -> Option<Arc<Connection>> {
        let are_strangers = self.strangers.n > 0;
        let from = match are_strangers {
            true => &mut self.strangers,
            false => &mut self.verified,
        };
        let &(count, most) = from.by_count.last()?;
        if !are_strangers && count < 2 {
            return None;
        }
        let of_newcomer = from.by_client.get(&newcomer).map_or(0, BTreeMap::len);
        let n_clients = from.by_client.len() + usize::from(of_newcomer == 0);
        let share = max.div_ceil(n_clients).max(SMALL_SHARE);
        let (client, keeps_quiet) = match within {
            // If it has as many as any other, it is to lose one.
            Within::Keep if count >= share && of_newcomer == count => (Some(newcomer), true),
            _ => ((!are_strangers || count > share).then_some(most), false),
        };
        // The first was found active the longest ago. If it was active since, it goes behind the others.
        let n_seen_at_most = match keeps_quiet {
            true => count.min(MAX_SEEN),
            false => from.n + 1,
        };
        for _ in 0..n_seen_at_most {
            let connection = from.first(client)?;
            from.remove(&connection);
            match connection.state.load(Ordering::Relaxed) {
                NEVER => return Some(connection),
                QUIET if !keeps_quiet => return Some(connection),
                _ => connection.state.store(QUIET, Ordering::Relaxed),
            }
            self.next_position += 1;
            connection.position.store(self.next_position, Ordering::Relaxed);
            from.insert(connection);
        }
        if keeps_quiet {
            return None;
        }
        // All were active again meanwhile.
        let connection = from.first(client)?;
        from.remove(&connection);
        Some(connection)
    }
}

impl Connections {
    fn insert(&mut self, connection: Arc<Connection>) {
        let client = connection.client;
        let of_client = self.by_client.entry(client).or_default();
        let before = of_client.len();
        let position = connection.position.load(Ordering::Relaxed);
        of_client.insert(position, connection.clone());
        self.all.insert(position, connection);
        self.by_count.remove(&(before, client));
        self.by_count.insert((before + 1, client));
        self.n += 1;
    }

    /// The connection of an address, or of any, that was found active the longest ago.
    fn first(&self, client: Option<IpAddr>) -> Option<Arc<Connection>> {
        let connections = match client {
            Some(client) => self.by_client.get(&client)?,
            None => &self.all,
        };
        connections.first_key_value().map(|(_, connection)| connection.clone())
    }

    /// Whether it was here.
    fn remove(&mut self, connection: &Connection) -> bool {
        let client = connection.client;
        let Some(of_client) = self.by_client.get_mut(&client) else {
            return false;
        };
        let before = of_client.len();
        let position = connection.position.load(Ordering::Relaxed);
        if of_client.remove(&position).is_none() {
            return false;
        }
        self.all.remove(&position);
        if before == 1 {
            self.by_client.remove(&client);
        } else {
            self.by_count.insert((before - 1, client));
        }
        self.by_count.remove(&(before, client));
        self.n -= 1;
        true
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

/// The addresses that one client can have: a machine has one of IPv4, and any number of a /64 of IPv6.
pub fn group(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(ip) if !ip.is_loopback() => Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)).into(),
        ip => ip,
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

/// States of a connection: it has carried no bytes yet; it has, since its silence was last looked at; it has, but not since then.
const NEVER: u8 = 0;
const ACTIVE: u8 = 1;
const QUIET: u8 = 2;
/// So many connections are no more than anybody's share: a client that opens one while it closes another is not taken for one
/// that has the most, where each of many others has one.
const SMALL_SHARE: usize = 4;
/// Connections that are looked at before a newcomer is refused; those that were seen go behind the others.
const MAX_SEEN: usize = 64;
/// How often a listener that is full says so in the log.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    fn limiter(max: usize) -> Arc<ConnectionLimiter> {
        ConnectionLimiter::new("test", max, Within::Replace, &Registry::new())
    }

    fn is_closed(place: &Place) -> bool {
        place.connection.is_closed.load(Ordering::Relaxed)
    }

    #[test]
    fn a_newcomer_takes_a_place_of_the_address_that_has_the_most() {
        let limiter = limiter(7);
        let alone = limiter.admit(ip(1)).unwrap();
        let many = [(); 6].map(|()| limiter.admit(ip(2)).unwrap());
        let _newcomer = limiter.admit(ip(3)).unwrap();
        assert!(
            !is_closed(&alone),
            "it has been silent for longer, but has one place only"
        );
        assert_eq!([true, false, false], [0, 1, 2].map(|i| is_closed(&many[i])));
        assert_eq!(limiter.n(), 7);
    }

    #[test]
    fn where_each_of_many_has_one_the_longest_silent_goes_and_not_who_has_two() {
        let limiter = limiter(8);
        let others: Vec<_> = (1..8).map(|n| limiter.admit(ip(n)).unwrap()).collect();
        let [first, second] = [(); 2].map(|()| limiter.admit(ip(9)).unwrap());
        let _newcomer = limiter.admit(ip(10)).unwrap();
        assert_eq!([true, true, false], [0, 1, 2].map(|i| is_closed(&others[i])));
        assert!(!is_closed(&first) && !is_closed(&second));
    }

    #[test]
    fn of_an_address_the_connection_goes_that_has_been_silent_for_the_longest() {
        let limiter = limiter(3);
        let places = [(); 3].map(|()| limiter.admit(ip(1)).unwrap());
        places[0].activity().mark();
        let _newer = limiter.admit(ip(1)).unwrap();
        assert_eq!([false, true, false], [0, 1, 2].map(|i| is_closed(&places[i])));
        places[2].activity().mark();
        places[0].activity().mark();
        let _newest = limiter.admit(ip(1)).unwrap();
        let closed = [0, 1, 2].map(|i| is_closed(&places[i]));
        assert_eq!([false, true, false], closed, "the one that came in between was silent");
    }

    #[test]
    fn a_client_keeps_the_connections_that_it_uses_and_shares_with_others() {
        let limiter = ConnectionLimiter::new("test", 6, Within::Keep, &Registry::new());
        let [used, ..] = &[(); 4].map(|()| {
            let place = limiter.admit(ip(1)).unwrap();
            place.activity().mark();
            place
        });
        let silent = limiter.admit(ip(1)).unwrap();
        let used_too = limiter.admit(ip(1)).unwrap();
        used_too.activity().mark();
        let newcomer = limiter.admit(ip(1)).unwrap();
        assert_eq!([used, &silent, &used_too].map(is_closed), [false, true, false]);
        newcomer.activity().mark();
        assert!(limiter.admit(ip(1)).is_none());
        let other = limiter.admit(ip(2)).unwrap();
        assert_eq!(limiter.n(), 6, "one of them is closed for another client");
        assert!(!is_closed(&other));
    }

    #[test]
    fn peers_with_an_identity_keep_their_places_while_strangers_have_any() {
        let limiter = limiter(3);
        let peers = [(); 2].map(|()| {
            let place = limiter.admit(ip(1)).unwrap();
            place.verified();
            place
        });
        let stranger = limiter.admit(ip(2)).unwrap();
        let another = limiter.admit(ip(3)).unwrap();
        assert!(is_closed(&stranger) && !peers.iter().any(is_closed));
        another.verified();
        let third = limiter.admit(ip(4)).unwrap();
        assert!(
            is_closed(&peers[0]) && !is_closed(&peers[1]),
            "an address that has several loses one"
        );
        third.verified();
        assert!(limiter.admit(ip(5)).is_none(), "each of them has one");
        drop(peers);
        assert!(limiter.admit(ip(5)).is_some());
    }

    #[test]
    fn addresses_of_one_machine_are_one_client() {
        let v6 = |text: &str| group(text.parse().unwrap());
        assert_eq!(v6("fd00::1:0:0:0:1"), v6("fd00::1:ffff:0:0:2"));
        assert_ne!(v6("fd00:0:0:1::1"), v6("fd00:0:0:2::1"));
        assert_eq!(v6("::ffff:10.0.0.1"), ip(1));
        assert_ne!(v6("::1"), v6("::2"));
    }

    #[tokio::test]
    async fn a_connection_that_loses_its_place_ends_whenever_its_task_is_named() {
        let limiter = limiter(1);
        for is_named_late in [false, true] {
            let place = limiter.admit(ip(1)).unwrap();
            let activity = place.activity();
            let task = tokio::spawn(async move {
                let _place = place;
                std::future::pending::<()>().await;
            });
            let mut newcomer = None;
            if is_named_late {
                newcomer = limiter.admit(ip(2));
            }
            activity.served_by(task.abort_handle());
            newcomer.get_or_insert_with(|| limiter.admit(ip(2)).unwrap());
            assert!(task.await.unwrap_err().is_cancelled());
            assert_eq!(limiter.n(), 1);
        }
    }

    proptest! {
        /// Whatever comes and goes: no more places than there are, and while somebody has more than a share, nobody else loses one.
        #[test]
        fn places_are_bounded_and_shared_fairly(clients in proptest::collection::vec((0_u8..4, any::<bool>()), 1..200)) {
            const PLACES: usize = 24;
            let limiter = limiter(PLACES);
            let mut held: Vec<(u8, Place)> = Vec::new();
            for (client, leaves) in clients {
                if leaves && !held.is_empty() {
                    held.remove(usize::from(client) % held.len());
                }
                let count = |client| held.iter().filter(|(of, _)| *of == client).count();
                let counts = [0, 1, 2, 3].map(count);
                let n_clients = (0..4).filter(|of| *of == client || counts[usize::from(*of)] > 0).count();
                let (most, share) = (counts.into_iter().max().unwrap(), PLACES.div_ceil(n_clients).max(SMALL_SHARE));
                held.push((client, limiter.admit(ip(client)).unwrap()));
                held.retain(|(of, place)| {
                    let is_fair = most <= share || counts[usize::from(*of)] == most;
                    assert!(!is_closed(place) || is_fair, "{counts:?} lost one of {of}");
                    !is_closed(place)
                });
                prop_assert_eq!(limiter.n(), held.len());
                prop_assert!(held.len() <= PLACES);
            }
        }
    }
}
