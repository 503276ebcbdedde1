//! Counts connections by client, and selects the one to evict.
//!
//! A check of a connection marks it as idle until it carries data again. A connection that is still idle at its next check is
//! evicted (second chance, as in the CLOCK algorithm). So a read or write only sets an atomic flag, and does not read the clock.
//!
//! [`Connections`] is pure data: the caller holds the lock of the listener and passes the time. A [`Connection`] is shared with
//! the tasks that serve it: its activity and its task change without that lock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Which connection of the same address a new connection replaces at the limit, if the address already has the most
/// connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SameAddressEviction {
    /// An unused one, or else the one that has been idle for the longest time.
    Idlest,
    /// One that has never carried a byte. If there is none, the new connection is refused, so that a client with too many
    /// connections keeps those that it uses.
    UnusedOnly,
}

/// State of an admitted connection.
pub(super) struct Connection {
    pub(super) ip: IpAddr,
    accepted_at: Instant,
    /// [`UNUSED`], [`ACTIVE`] or [`IDLE`].
    state: AtomicU8,
    /// Shared count of the listener's connections that have never carried bytes.
    n_unused: Arc<AtomicUsize>,
    pub(super) is_evicted: AtomicBool,
    /// The result of [`ConnectionPermit::prefers_reset`](super::ConnectionPermit::prefers_reset).
    pub(super) prefers_reset: AtomicBool,
    pub(super) task: Mutex<Option<AbortHandle>>,
    keys: Mutex<IndexKeys>,
}

/// The keys of a connection in a [`ConnectionIndex`], without its address, which never changes. They change only under the lock
/// of the listener, while the connection is in no index.
struct IndexKeys {
    rank: EvictionRank,
    /// Set once the peer's identity is verified.
    identity: Option<Arc<str>>,
}

/// The connections of a listener.
#[derive(Default)]
pub(super) struct Connections {
    next_position: u64,
    n_unused: Arc<AtomicUsize>,
    unverified: ConnectionIndex,
    verified: ConnectionIndex,
}

/// Inputs of an eviction besides the connections.
#[derive(Clone, Copy)]
pub(super) struct EvictionParams {
    pub(super) max: usize,
    pub(super) same_address_eviction: SameAddressEviction,
    pub(super) now: Instant,
}

/// Connections in eviction order: all of them, by client, and by group of clients.
#[derive(Default)]
struct ConnectionIndex {
    all: Queue,
    clients: ConnectionsByKey<Client>,
    /// The last client that rule 3 has checked; the next check continues after it.
    last_checked: Option<Client>,
    groups: ConnectionsByKey<ClientGroup>,
}

/// A client: an address, or a verified identity at an address. Several pods can share the address of their node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Client {
    ip: IpAddr,
    identity: Option<Arc<str>>,
}

/// Clients that one party may control: the addresses of a network, or all addresses with one identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ClientGroup {
    /// A global /64, by its first address.
    Network(Ipv6Addr),
    Identity(Arc<str>),
}

/// Connections in eviction order.
type Queue = BTreeMap<EvictionRank, Arc<Connection>>;

/// Sort key for eviction. First the connections that no search has found used, in the order of acceptance; then the others, in the
/// order in which a search last found them used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    /// Whether a search has found that the connection has carried bytes. Before such a search it is `false`, even if the
    /// connection has carried bytes.
    was_found_used: bool,
    position: u64,
}

/// Connections grouped by key, with the number of connections of each key.
struct ConnectionsByKey<K> {
    by_key: HashMap<K, Queue>,
    by_count: BTreeSet<(usize, K)>,
}

/// The connections that a search for a connection to evict considers.
#[derive(Clone, Copy)]
enum Scope<'a> {
    All,
    Client(&'a Client),
    Group(&'a ClientGroup),
}

impl Connection {
    /// Records that bytes were read or written.
    pub(super) fn record_activity(&self) {
        if self.state.load(Ordering::Relaxed) != ACTIVE && self.state.swap(ACTIVE, Ordering::Relaxed) == UNUSED {
            self.n_unused.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Decrements `n_unused`, unless the first byte has already done so. Called if the connection ends or its peer is verified.
    fn stop_counting_as_unused(&self) {
        // The atomic swap in `record_activity` ensures that there is one decrement, even if the first byte arrives meanwhile.
        self.record_activity();
    }

    /// Marks the connection as evicted, and aborts its task.
    pub(super) fn evict(&self) {
        self.stop_counting_as_unused();
        let task = self.task.lock();
        self.is_evicted.store(true, Ordering::Relaxed);
        self.prefers_reset.store(true, Ordering::Relaxed);
        if let Some(task) = &*task {
            task.abort();
        }
    }

    fn client(&self) -> Client {
        Client {
            ip: self.ip,
            identity: self.keys.lock().identity.clone(),
        }
    }

    /// The group of the client. Only clients with an identity or a global IPv6 address are in one.
    fn group(&self) -> Option<ClientGroup> {
        match &self.keys.lock().identity {
            Some(identity) => Some(ClientGroup::Identity(identity.clone())),
            None => global_network(self.ip).map(ClientGroup::Network),
        }
    }

    fn rank(&self) -> EvictionRank {
        self.keys.lock().rank
    }

    /// Returns the state, and sets `ACTIVE` to `IDLE`, so that the next check sees activity since this one.
    fn check_activity(&self) -> u8 {
        let seen = self.state.load(Ordering::Relaxed);
        if seen == ACTIVE {
            self.state.store(IDLE, Ordering::Relaxed);
        }
        seen
    }

    fn is_unused(&self) -> bool {
        self.state.load(Ordering::Relaxed) == UNUSED
    }
}

impl Connections {
    pub(super) fn len(&self) -> usize {
        self.unverified.all.len() + self.verified.all.len()
    }

    /// Adds a connection from this address.
    pub(super) fn add(&mut self, ip: IpAddr, now: Instant) -> Arc<Connection> {
        self.n_unused.fetch_add(1, Ordering::Relaxed);
        self.next_position += 1;
        let keys = IndexKeys {
            rank: EvictionRank {
                was_found_used: false,
                position: self.next_position,
            },
            identity: None,
        };
        let connection = Arc::new(Connection {
            ip,
            accepted_at: now,
            state: AtomicU8::new(UNUSED),
            n_unused: self.n_unused.clone(),
            is_evicted: AtomicBool::new(false),
            prefers_reset: AtomicBool::new(false),
            task: Mutex::default(),
            keys: Mutex::new(keys),
        });
        self.unverified.insert(connection.clone());
        connection
    }

    pub(super) fn remove(&mut self, connection: &Connection) {
        connection.stop_counting_as_unused();
        let _ = self.unverified.remove(connection) || self.verified.remove(connection);
    }

    /// Sets the identity of a connection, unless it is already set.
    pub(super) fn set_identity(&mut self, connection: &Arc<Connection>, identity: &str) {
        if self.unverified.remove(connection) {
            connection.stop_counting_as_unused();
            connection.keys.lock().identity = Some(identity.into());
            self.verified.insert(connection.clone());
        }
    }

    /// Removes one connection to make room for a new one; `None` if none may be removed.
    pub(super) fn evict_for(&mut self, new_client: IpAddr, params: EvictionParams) -> Option<Arc<Connection>> {
        let Self {
            next_position,
            n_unused,
            unverified,
            verified,
        } = self;
        let mut eviction = Eviction {
            next_position,
            params,
            has_many_unused: n_unused.load(Ordering::Relaxed) > params.max / 4,
        };
        // While unverified connections have less than a quarter of the limit, a verified client or identity with more than its fair
        // share loses a connection to them.
        let reserved = (params.max / 4).max(1);
        if unverified.all.len() < reserved
            && let Some(connection) = eviction.evict_over_share(verified)
        {
            return Some(connection);
        }
        if !unverified.all.is_empty() {
            return eviction.evict_unverified(unverified, new_client);
        }
        // All connections are verified, and no client or identity has more than its fair share.
        let (count, client) = verified.clients.largest()?;
        if count == 1 {
            return None;
        }
        let client = client.clone();
        eviction.evict(verified, Scope::Client(&client))
    }
}

/// The selection of one connection to evict.
struct Eviction<'s> {
    next_position: &'s mut u64,
    params: EvictionParams,
    /// Whether connections that have never carried a byte exceed a quarter of the limit.
    has_many_unused: bool,
}

impl Eviction<'_> {
    /// Evicts from a verified client that has more than its fair share, or else from an identity that has.
    fn evict_over_share(&mut self, index: &mut ConnectionIndex) -> Option<Arc<Connection>> {
        let max = self.params.max;
        // One more, because the new connection may belong to another client or identity.
        let (count, client) = index.clients.largest()?;
        if count > fair_share(max, index.clients.by_key.len() + 1) {
            let client = client.clone();
            return self.evict(index, Scope::Client(&client));
        }
        let (count, identity) = index.groups.largest()?;
        if count > fair_share(max, index.groups.by_key.len() + 1) {
            let identity = identity.clone();
            return self.evict(index, Scope::Group(&identity));
        }
        None
    }

    /// Evicts by the four rules of the parent module, and their exception for the address of the new connection.
    fn evict_unverified(&mut self, index: &mut ConnectionIndex, new_client: IpAddr) -> Option<Arc<Connection>> {
        let max = self.params.max;
        let new_client = Client {
            ip: new_client,
            identity: None,
        };
        let own_count = index.clients.by_key.get(&new_client).map_or(0, BTreeMap::len);
        let n_clients = index.clients.by_key.len() + usize::from(own_count == 0);
        let fair_share = fair_share(max, n_clients);
        let (largest_count, largest_client) = index.clients.largest()?;

        // The exception: if this address has its fair share, and no address has more connections, a new connection of this address
        // may replace only an unused one of the same address.
        let exception_applies = self.keeps_used_connections() && own_count == largest_count && own_count >= fair_share;
        if exception_applies {
            return self.evict_unused(index, &new_client);
        }
        // Rule 1: a client that has more than its fair share.
        if largest_count > fair_share {
            let client = largest_client.clone();
            return self.evict(index, Scope::Client(&client));
        }
        // Rule 2: a network that has at least a quarter of the limit.
        if let Some((count, network)) = index.groups.largest()
            && count >= (max / 4).max(MIN_CONNECTIONS_PER_CLIENT)
        {
            let network = network.clone();
            return self.evict(index, Scope::Group(&network));
        }
        // Rule 3: an unused or idle connection of the clients that have the most.
        if largest_count > 1
            && let Some(evicted) = self.evict_among_largest(index, &new_client)
        {
            return Some(evicted);
        }
        // Rule 4: an unused connection, or else the one that has been idle for the longest time.
        self.evict(index, Scope::All)
    }

    /// Whether an address does not lose used connections to its own new ones.
    fn keeps_used_connections(&self) -> bool {
        self.params.same_address_eviction == SameAddressEviction::UnusedOnly
    }

    /// Evicts an unused or idle connection of the clients that have the most connections, if there is one.
    ///
    /// Checks at most [`MAX_CHECKS_PER_PASS`] connections, not counting the passes of [`first_unused`](Self::first_unused); the
    /// next call continues with the other clients.
    fn evict_among_largest(&mut self, index: &mut ConnectionIndex, new_client: &Client) -> Option<Arc<Connection>> {
        let largest = index.clients.largest_keys_after(index.last_checked.as_ref());
        let largest: Vec<Client> = largest.take(MAX_CHECKS_PER_PASS).cloned().collect();
        let mut n_checks_left = MAX_CHECKS_PER_PASS;
        let mut candidates: Vec<Arc<Connection>> = Vec::new();
        for client in largest {
            if n_checks_left == 0 {
                break;
            }
            candidates.extend(match self.keeps_used_connections() && client == *new_client {
                true => self.first_unused(index, Scope::Client(&client)),
                false => self.first_unused_or_idle(index, &client, &mut n_checks_left),
            });
            index.last_checked = Some(client);
        }
        let evicted = candidates.into_iter().min_by_key(|candidate| candidate.rank())?;
        index.remove(&evicted);
        Some(evicted)
    }

    /// Evicts a connection of this client that has never carried a byte.
    fn evict_unused(&mut self, index: &mut ConnectionIndex, client: &Client) -> Option<Arc<Connection>> {
        let connection = self.first_unused(index, Scope::Client(client))?;
        index.remove(&connection);
        Some(connection)
    }

    /// Evicts an unused or idle connection, or the one whose last activity check is the oldest.
    fn evict(&mut self, index: &mut ConnectionIndex, scope: Scope<'_>) -> Option<Arc<Connection>> {
        if let Some(unused) = self.first_unused(index, scope)
            && !self.is_protected(&unused, scope)
        {
            index.remove(&unused);
            return Some(unused);
        }
        let first_used = |index: &ConnectionIndex| {
            let mut used = index.queue(scope)?.range(FIRST_USED_RANK..);
            used.next().map(|(_, connection)| connection.clone())
        };
        for _ in 0..MAX_CHECKS_PER_PASS {
            let Some(connection) = first_used(index) else { break };
            if connection.check_activity() == IDLE {
                index.remove(&connection);
                return Some(connection);
            }
            self.move_to_back(index, &connection);
        }
        // No idle connection was found.
        let connection = first_used(index).or_else(|| Some(index.queue(scope)?.first_key_value()?.1.clone()))?;
        index.remove(&connection);
        Some(connection)
    }

    /// Whether a new connection still gets time to send its first byte. Only rule 4 ([`Scope::All`]) gives this time.
    /// Rules 1 to 3 select from a client or network that has too many connections, and a flood of unused connections gets no
    /// time either.
    fn is_protected(&self, unused: &Connection, scope: Scope<'_>) -> bool {
        let is_new = self.params.now - unused.accepted_at < FIRST_BYTE_GRACE;
        matches!(scope, Scope::All) && is_new && !self.has_many_unused
    }

    /// Returns the first unused connection, and moves the used ones before it to the back of the queue. If the first
    /// [`MAX_CHECKS_PER_PASS`] are all used, returns the newest unused one of the newest [`MAX_CHECKS_PER_PASS`] connections.
    fn first_unused(&mut self, index: &mut ConnectionIndex, scope: Scope<'_>) -> Option<Arc<Connection>> {
        for _ in 0..MAX_CHECKS_PER_PASS {
            let (rank, first) = index.queue(scope)?.first_key_value()?;
            if rank.was_found_used {
                return None;
            }
            let first = first.clone();
            if first.is_unused() {
                return Some(first);
            }
            self.move_to_back(index, &first);
        }
        // The newest connections are the most likely to be unused.
        let mut newest = index
            .queue(scope)?
            .range(..FIRST_USED_RANK)
            .rev()
            .take(MAX_CHECKS_PER_PASS);
        newest
            .find(|(_, connection)| connection.is_unused())
            .map(|(_, connection)| connection.clone())
    }

    /// The first unused or idle connection of a client. Active connections before it move to the back of the queue.
    fn first_unused_or_idle(
        &mut self,
        index: &mut ConnectionIndex,
        client: &Client,
        n_checks_left: &mut usize,
    ) -> Option<Arc<Connection>> {
        // Each is checked only once, because the check of an active connection marks it as idle.
        let n_connections = index.clients.by_key.get(client)?.len();
        for _ in 0..n_connections.min(*n_checks_left) {
            *n_checks_left -= 1;
            let (_, first) = index.clients.by_key.get(client)?.first_key_value()?;
            let first = first.clone();
            if first.check_activity() != ACTIVE {
                return Some(first);
            }
            self.move_to_back(index, &first);
        }
        None
    }

    /// Moves a connection that has carried bytes to the back of the queue.
    fn move_to_back(&mut self, index: &mut ConnectionIndex, connection: &Arc<Connection>) {
        index.remove(connection);
        *self.next_position += 1;
        connection.keys.lock().rank = EvictionRank {
            was_found_used: true,
            position: *self.next_position,
        };
        index.insert(connection.clone());
    }
}

impl ConnectionIndex {
    fn insert(&mut self, connection: Arc<Connection>) {
        let rank = connection.rank();
        self.clients.insert(connection.client(), rank, &connection);
        if let Some(group) = connection.group() {
            self.groups.insert(group, rank, &connection);
        }
        self.all.insert(rank, connection);
    }

    /// Returns whether the connection was present.
    fn remove(&mut self, connection: &Connection) -> bool {
        let rank = connection.rank();
        if self.all.remove(&rank).is_none() {
            return false;
        }
        self.clients.remove(&connection.client(), rank);
        if let Some(group) = connection.group() {
            self.groups.remove(&group, rank);
        }
        true
    }

    fn queue(&self, scope: Scope<'_>) -> Option<&Queue> {
        match scope {
            Scope::All => Some(&self.all),
            Scope::Client(client) => self.clients.by_key.get(client),
            Scope::Group(group) => self.groups.by_key.get(group),
        }
    }
}

impl<K> Default for ConnectionsByKey<K> {
    fn default() -> Self {
        Self {
            by_key: HashMap::new(),
            by_count: BTreeSet::new(),
        }
    }
}

impl<K: Clone + Ord + Hash> ConnectionsByKey<K> {
    /// The key with the most connections, and their number.
    fn largest(&self) -> Option<(usize, &K)> {
        self.by_count.last().map(|(count, key)| (*count, key))
    }

    /// All keys with the largest number of connections, in descending order: it starts with the next smaller key than
    /// `last_checked` and wraps around, so `last_checked` itself comes last.
    fn largest_keys_after<'a>(&'a self, last_checked: Option<&'a K>) -> impl Iterator<Item = &'a K> {
        let largest_count = self.by_count.last().map_or(0, |(count, _)| *count);
        let after = last_checked.map(|last| self.by_count.range(..(largest_count, last.clone())).rev());
        let after = after.into_iter().flatten();
        let others = self.by_count.iter().rev();
        let others = others.take_while(move |(_, key)| last_checked.is_none_or(|last| key >= last));
        let has_largest_count = move |entry: &&(usize, K)| entry.0 == largest_count;
        let entries = after
            .take_while(has_largest_count)
            .chain(others.take_while(has_largest_count));
        entries.map(|(_, key)| key)
    }

    fn insert(&mut self, key: K, rank: EvictionRank, connection: &Arc<Connection>) {
        let queue = self.by_key.entry(key.clone()).or_default();
        let before = queue.len();
        queue.insert(rank, connection.clone());
        self.update_count(key, before, before + 1);
    }

    fn remove(&mut self, key: &K, rank: EvictionRank) {
        let Some(queue) = self.by_key.get_mut(key) else { return };
        let before = queue.len();
        queue.remove(&rank);
        let after = queue.len();
        if after == 0 {
            self.by_key.remove(key);
        }
        self.update_count(key.clone(), before, after);
    }

    fn update_count(&mut self, key: K, before: usize, after: usize) {
        let mut entry = (before, key);
        self.by_count.remove(&entry);
        if after > 0 {
            entry.0 = after;
            self.by_count.insert(entry);
        }
    }
}

/// The number of connections that each of `n` clients can have before it loses one to others.
fn fair_share(max: usize, n: usize) -> usize {
    max.div_ceil(n).max(MIN_CONNECTIONS_PER_CLIENT)
}

/// The first address of the /64 of a global IPv6 address.
pub(super) fn global_network(client: IpAddr) -> Option<Ipv6Addr> {
    match client {
        IpAddr::V6(ip) if !(ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local()) => {
            Some(Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)))
        }
        _ => None,
    }
}

/// Connection states. `UNUSED`: no byte yet. `ACTIVE`: bytes since the last check, or just verified. `IDLE`: no bytes since the
/// last check.
const UNUSED: u8 = 0;
const ACTIVE: u8 = 1;
const IDLE: u8 = 2;
/// The lowest rank of connections that a search has found used.
const FIRST_USED_RANK: EvictionRank = EvictionRank {
    was_found_used: true,
    position: 0,
};
/// Minimum fair share. Lets a client open a new connection before it closes an old one.
pub(super) const MIN_CONNECTIONS_PER_CLIENT: usize = 4;
/// Maximum number of connections that one pass checks, because the lock is held meanwhile. An eviction makes at most six passes.
const MAX_CHECKS_PER_PASS: usize = 64;
/// Minimum time for the first byte of a new connection before eviction, unless many connections are unused.
const FIRST_BYTE_GRACE: Duration = Duration::from_secs(1);
