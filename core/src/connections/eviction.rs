//! Counts connections by client, and selects the one to evict.
//!
//! A check of a connection marks it as idle until it carries data again. A connection that is still idle at its next check is
//! evicted (second chance, as in the CLOCK algorithm), so activity is one atomic flag and needs no time per read or write.
//!
//! Pure data: the caller holds the lock and passes the time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Which of its own connections an address loses to a new one of its own, when the limit is reached and no other address has
/// more connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelfEviction {
    /// The one that has been idle for the longest time.
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
    pub(super) is_closed: AtomicBool,
    pub(super) task: Mutex<Option<AbortHandle>>,
    keys: Mutex<IndexKeys>,
}

/// The keys, besides the address, by which a [`ConnectionIndex`] has the connection. They change only under the lock of the
/// listener, while the connection is in no index.
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
    pub(super) self_eviction: SelfEviction,
    pub(super) now: Instant,
}

/// Connections in eviction order: all of them, by client, and by owner of several clients.
#[derive(Default)]
struct ConnectionIndex {
    all: Queue,
    clients: ConnectionsByKey<Client>,
    /// The last client that rule 3 has checked; the next check continues after it.
    last_checked: Option<Client>,
    owners: ConnectionsByKey<Owner>,
}

/// A client: an address, or a verified identity at an address. Several pods can share the address of their node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Client {
    ip: IpAddr,
    identity: Option<Arc<str>>,
}

/// A party that may control several clients: the addresses of a network, or all addresses with one identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Owner {
    /// A global /64, by its first address.
    Network(Ipv6Addr),
    Identity(Arc<str>),
}

/// Connections in eviction order.
type Queue = BTreeMap<EvictionRank, Arc<Connection>>;

/// Sort key for eviction: unused connections first, then by the time of the last activity check, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    is_used: bool,
    position: u64,
}

/// Connections grouped by key, with the number of connections of each key.
struct ConnectionsByKey<K> {
    by_key: HashMap<K, Queue>,
    by_count: BTreeSet<(usize, K)>,
}

/// The connections from which one is selected.
#[derive(Clone, Copy)]
enum Selection<'a> {
    All,
    Client(&'a Client),
    Owner(&'a Owner),
}

impl Connection {
    /// Records that bytes were read or written.
    pub(super) fn record_activity(&self) {
        if self.state.load(Ordering::Relaxed) != ACTIVE && self.state.swap(ACTIVE, Ordering::Relaxed) == UNUSED {
            self.n_unused.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ends the count of this connection as unused, because the connection ends or has a verified peer.
    fn leave_unused_count(&self) {
        // The same change as that by the first byte. Both can happen at the same time, and only one may decrease the count.
        self.record_activity();
    }

    /// Aborts the connection's task; called on eviction.
    pub(super) fn close(&self) {
        self.leave_unused_count();
        let task = self.task.lock();
        self.is_closed.store(true, Ordering::Relaxed);
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

    /// The owner of the client. Only clients with an identity or a global IPv6 address have one.
    fn owner(&self) -> Option<Owner> {
        match &self.keys.lock().identity {
            Some(identity) => Some(Owner::Identity(identity.clone())),
            None => global_network(self.ip).map(Owner::Network),
        }
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
    pub(super) fn n(&self) -> usize {
        self.unverified.all.len() + self.verified.all.len()
    }

    /// Adds a connection from this address.
    pub(super) fn add(&mut self, ip: IpAddr, now: Instant) -> Arc<Connection> {
        self.n_unused.fetch_add(1, Ordering::Relaxed);
        self.next_position += 1;
        let keys = IndexKeys {
            rank: EvictionRank {
                is_used: false,
                position: self.next_position,
            },
            identity: None,
        };
        let connection = Arc::new(Connection {
            ip,
            accepted_at: now,
            state: AtomicU8::new(UNUSED),
            n_unused: self.n_unused.clone(),
            is_closed: AtomicBool::new(false),
            task: Mutex::default(),
            keys: Mutex::new(keys),
        });
        self.unverified.insert(connection.clone());
        connection
    }

    pub(super) fn remove(&mut self, connection: &Connection) {
        connection.leave_unused_count();
        let _ = self.unverified.remove(connection) || self.verified.remove(connection);
    }

    /// Sets the identity of a connection, unless it is already set.
    pub(super) fn verify(&mut self, connection: &Arc<Connection>, identity: &str) {
        if self.unverified.remove(connection) {
            connection.leave_unused_count();
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
        // Verified clients leave a quarter of the limit to connections that are not verified yet.
        let reserved = (params.max / 4).max(1);
        if unverified.all.len() < reserved
            && let Some(connection) = eviction.evict_over_share(verified)
        {
            return Some(connection);
        }
        if !unverified.all.is_empty() {
            return eviction.evict_unverified(unverified, new_client);
        }
        // All connections are verified, and nobody has more than its fair share.
        let (count, client) = verified.clients.largest()?;
        if count == 1 {
            return None;
        }
        let client = client.clone();
        eviction.evict(verified, Selection::Client(&client))
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
            return self.evict(index, Selection::Client(&client));
        }
        let (count, identity) = index.owners.largest()?;
        if count > fair_share(max, index.owners.by_key.len() + 1) {
            let identity = identity.clone();
            return self.evict(index, Selection::Owner(&identity));
        }
        None
    }

    /// Evicts by the four rules of the parent module.
    fn evict_unverified(&mut self, index: &mut ConnectionIndex, new_client: IpAddr) -> Option<Arc<Connection>> {
        let EvictionParams { max, self_eviction, .. } = self.params;
        let new_client = Client {
            ip: new_client,
            identity: None,
        };
        let own_count = index.clients.by_key.get(&new_client).map_or(0, BTreeMap::len);
        let n_clients = index.clients.by_key.len() + usize::from(own_count == 0);
        let fair_share = fair_share(max, n_clients);
        let (largest_count, largest_client) = index.clients.largest()?;

        // Before rule 1: the address of the new connection makes room itself if it has its share and nobody has more.
        let is_own_turn = own_count == largest_count && largest_count >= fair_share;
        if self_eviction == SelfEviction::UnusedOnly && is_own_turn {
            return self.evict_unused(index, &new_client);
        }
        // Rule 1: a client that has more than its fair share.
        if largest_count > fair_share {
            let client = largest_client.clone();
            return self.evict(index, Selection::Client(&client));
        }
        // Rule 2: a network that has at least a quarter of the limit.
        if let Some((count, network)) = index.owners.largest()
            && count >= (max / 4).max(MIN_CONNECTIONS_PER_CLIENT)
        {
            let network = network.clone();
            return self.evict(index, Selection::Owner(&network));
        }
        // Rule 3: an unused or idle connection of the clients that have the most.
        if largest_count > 1
            && let Some(evicted) = self.evict_among_largest(index, &new_client)
        {
            return Some(evicted);
        }
        // Rule 4: the connection that has been idle for the longest time.
        self.evict(index, Selection::All)
    }

    /// Evicts an unused or idle connection of the clients that have the most connections, if there is one.
    ///
    /// Of more than [`MAX_EVICTION_CANDIDATES`] clients, the next evictions check the others.
    fn evict_among_largest(&self, index: &mut ConnectionIndex, new_client: &Client) -> Option<Arc<Connection>> {
        let (largest_count, _) = index.clients.largest()?;
        let mut chosen: Option<(EvictionRank, &Arc<Connection>)> = None;
        let mut last_checked = None;
        let tied_clients = index.clients.keys_with(largest_count, index.last_checked.as_ref());
        for client in tied_clients.take(MAX_EVICTION_CANDIDATES) {
            last_checked = Some(client);
            let queue = index.clients.by_key.get(client)?;
            let (rank, first_in_queue) = queue.first_key_value()?;
            let keeps_used = self.params.self_eviction == SelfEviction::UnusedOnly && client == new_client;
            let can_be_evicted = match first_in_queue.check_activity() {
                UNUSED => true,
                IDLE => !keeps_used,
                _ => false,
            };
            if can_be_evicted && chosen.is_none_or(|(lowest_rank, _)| *rank < lowest_rank) {
                chosen = Some((*rank, first_in_queue));
            }
        }
        let evicted = chosen.map(|(_, connection)| connection.clone());
        index.last_checked = last_checked.cloned();
        let evicted = evicted?;
        index.remove(&evicted);
        Some(evicted)
    }

    /// Evicts a connection of this client that has never carried a byte.
    fn evict_unused(&mut self, index: &mut ConnectionIndex, client: &Client) -> Option<Arc<Connection>> {
        let connection = self.first_unused(index, Selection::Client(client))?;
        index.remove(&connection);
        Some(connection)
    }

    /// Evicts an unused or idle connection, or the one whose last activity check is the oldest.
    fn evict(&mut self, index: &mut ConnectionIndex, selection: Selection<'_>) -> Option<Arc<Connection>> {
        if let Some(unused) = self.first_unused(index, selection) {
            // If no client exceeds its share, a new client gets time to send its first byte.
            let is_in_grace_period = self.params.now - unused.accepted_at < FIRST_BYTE_GRACE && !self.has_many_unused;
            if !matches!(selection, Selection::All) || !is_in_grace_period {
                index.remove(&unused);
                return Some(unused);
            }
        }
        let first_used = |index: &ConnectionIndex| {
            let mut used = index.queue(selection)?.range(FIRST_USED_RANK..);
            used.next().map(|(_, connection)| connection.clone())
        };
        for _ in 0..MAX_EVICTION_CANDIDATES {
            let Some(connection) = first_used(index) else { break };
            if connection.check_activity() == IDLE {
                index.remove(&connection);
                return Some(connection);
            }
            self.move_to_back(index, &connection);
        }
        // All checked connections were active.
        let connection = first_used(index).or_else(|| Some(index.queue(selection)?.first_key_value()?.1.clone()))?;
        index.remove(&connection);
        Some(connection)
    }

    /// The first unused connection. Used connections before it move to the back of the queue.
    fn first_unused(&mut self, index: &mut ConnectionIndex, selection: Selection<'_>) -> Option<Arc<Connection>> {
        loop {
            let (rank, first) = index.queue(selection)?.first_key_value()?;
            if rank.is_used {
                return None;
            }
            let first = first.clone();
            if first.is_unused() {
                return Some(first);
            }
            self.move_to_back(index, &first);
        }
    }

    /// Moves a connection that has carried bytes to the back of the queue.
    fn move_to_back(&mut self, index: &mut ConnectionIndex, connection: &Arc<Connection>) {
        index.remove(connection);
        *self.next_position += 1;
        connection.keys.lock().rank = EvictionRank {
            is_used: true,
            position: *self.next_position,
        };
        index.insert(connection.clone());
    }
}

impl ConnectionIndex {
    fn insert(&mut self, connection: Arc<Connection>) {
        let rank = connection.keys.lock().rank;
        self.clients.insert(connection.client(), rank, &connection);
        if let Some(owner) = connection.owner() {
            self.owners.insert(owner, rank, &connection);
        }
        self.all.insert(rank, connection);
    }

    /// Returns whether the connection was present.
    fn remove(&mut self, connection: &Connection) -> bool {
        let rank = connection.keys.lock().rank;
        if self.all.remove(&rank).is_none() {
            return false;
        }
        self.clients.remove(&connection.client(), rank);
        if let Some(owner) = connection.owner() {
            self.owners.remove(&owner, rank);
        }
        true
    }

    fn queue(&self, selection: Selection<'_>) -> Option<&Queue> {
        match selection {
            Selection::All => Some(&self.all),
            Selection::Client(client) => self.clients.by_key.get(client),
            Selection::Owner(owner) => self.owners.by_key.get(owner),
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

    /// The keys with this number of connections, which is the largest, in descending order: first those below `start`, then
    /// the others.
    fn keys_with<'a>(&'a self, count: usize, start: Option<&'a K>) -> impl Iterator<Item = &'a K> {
        let below = start.map(|start| self.by_count.range(..(count, start.clone())).rev());
        let below = below.into_iter().flatten();
        let others = self.by_count.iter().rev();
        let others = others.take_while(move |(_, key)| start.is_none_or(|start| key >= start));
        let is_tied = move |entry: &&(usize, K)| entry.0 == count;
        let keys = below.take_while(is_tied).chain(others.take_while(is_tied));
        keys.map(|(_, key)| key)
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

/// Connection states. `UNUSED`: no byte yet. `ACTIVE`: bytes since the last check. `IDLE`: no bytes since the last check.
const UNUSED: u8 = 0;
const ACTIVE: u8 = 1;
const IDLE: u8 = 2;
/// The lowest rank of connections that have carried bytes.
const FIRST_USED_RANK: EvictionRank = EvictionRank {
    is_used: true,
    position: 0,
};
/// Minimum fair share. Lets a client open a new connection before it closes an old one.
pub(super) const MIN_CONNECTIONS_PER_CLIENT: usize = 4;
/// Maximum number of connections that one eviction checks.
const MAX_EVICTION_CANDIDATES: usize = 64;
/// Minimum time for the first byte of a new connection before eviction, unless many connections are unused.
const FIRST_BYTE_GRACE: Duration = Duration::from_secs(1);
