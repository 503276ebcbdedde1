//! Counts connections by client, and selects the one to evict.
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

/// What happens if the limit is reached and the new connection is from the address that has the most connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullLimitPolicy {
    /// The connection of the address that has been idle for the longest time is closed.
    CloseIdlest,
    /// A connection that has never carried a byte is closed. If there is none, the new connection is refused, so that a
    /// client with too many connections keeps those that it uses.
    CloseUnusedOnly,
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
    order: Mutex<EvictionState>,
}

/// State that changes only under the lock of the listener.
struct EvictionState {
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
    pub(super) full_limit_policy: FullLimitPolicy,
    pub(super) now: Instant,
}

/// Connections in eviction order: all of them, by client, and by group of clients.
#[derive(Default)]
struct ConnectionIndex {
    all: Queue,
    clients: ConnectionsByKey<Client>,
    groups: ConnectionsByKey<Group>,
}

/// A client: an address, or a verified identity at an address. Several pods can share the address of their node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Client {
    ip: IpAddr,
    identity: Option<Arc<str>>,
}

/// A client group that can use many addresses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Group {
    /// The first address of a /64.
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
    Group(&'a Group),
}

impl Connection {
    /// Records that bytes were read or written.
    pub(super) fn mark(&self) {
        if self.state.load(Ordering::Relaxed) != ACTIVE && self.state.swap(ACTIVE, Ordering::Relaxed) == UNUSED {
            self.n_unused.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Aborts the connection's task; called on eviction.
    pub(super) fn close(&self) {
        self.mark(); // no longer counted as unused
        let task = self.task.lock();
        self.is_closed.store(true, Ordering::Relaxed);
        if let Some(task) = &*task {
            task.abort();
        }
    }

    fn client(&self) -> Client {
        Client {
            ip: self.ip,
            identity: self.order.lock().identity.clone(),
        }
    }

    /// The group of the client. Only clients with an identity or a global IPv6 address have one.
    fn group(&self) -> Option<Group> {
        match &self.order.lock().identity {
            Some(identity) => Some(Group::Identity(identity.clone())),
            None => global_network(self.ip).map(Group::Network),
        }
    }

    /// Returns the state, and sets `ACTIVE` to `IDLE`, so that the next check sees activity since this one.
    fn take_activity(&self) -> u8 {
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
        let order = EvictionState {
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
            order: Mutex::new(order),
        });
        self.unverified.insert(connection.clone());
        connection
    }

    pub(super) fn remove(&mut self, connection: &Connection) {
        connection.mark(); // no longer counted as unused
        let _ = self.unverified.remove(connection) || self.verified.remove(connection);
    }

    /// Sets the identity of a connection, unless it is already set.
    pub(super) fn verify(&mut self, connection: &Arc<Connection>, identity: &str) {
        if self.unverified.remove(connection) {
            connection.mark();
            connection.order.lock().identity = Some(identity.into());
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
            many_unused: n_unused.load(Ordering::Relaxed) > params.max / 4,
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
        let (count, client) = verified.clients.largest()?;
        let (has_several, client) = (count > 1, client.clone());
        has_several
            .then(|| eviction.evict(verified, Selection::Client(&client)))
            .flatten()
    }
}

/// The selection of one connection to evict.
struct Eviction<'s> {
    next_position: &'s mut u64,
    params: EvictionParams,
    /// Whether connections that have never carried a byte exceed a quarter of the limit.
    many_unused: bool,
}

impl Eviction<'_> {
    /// Evicts from a verified client above its fair share, or from an identity above its fair share.
    fn evict_over_share(&mut self, pool: &mut ConnectionIndex) -> Option<Arc<Connection>> {
        let max = self.params.max;
        // One more client, because the new connection may belong to another one.
        let share = |n: usize| max.div_ceil(n + 1).max(MIN_CONNECTIONS_PER_CLIENT);
        let (count, client) = pool.clients.largest()?;
        if count > share(pool.clients.by_key.len()) {
            let client = client.clone();
            return self.evict(pool, Selection::Client(&client));
        }
        let (count, group) = pool.groups.largest()?;
        let (is_above, group) = (count > share(pool.groups.by_key.len()), group.clone());
        is_above.then(|| self.evict(pool, Selection::Group(&group))).flatten()
    }

    fn evict_unverified(&mut self, pool: &mut ConnectionIndex, new_client: IpAddr) -> Option<Arc<Connection>> {
        let EvictionParams {
            max, full_limit_policy, ..
        } = self.params;
        let new_client = Client {
            ip: new_client,
            identity: None,
        };
        let n_of_new_client = pool.clients.by_key.get(&new_client).map_or(0, BTreeMap::len);
        let n_clients = pool.clients.by_key.len() + usize::from(n_of_new_client == 0);
        let share = max.div_ceil(n_clients).max(MIN_CONNECTIONS_PER_CLIENT);
        let (count, most) = pool.clients.largest()?;
        // If no other address has more connections than the new connection's address, that address makes room itself.
        if full_limit_policy == FullLimitPolicy::CloseUnusedOnly && count >= share && n_of_new_client == count {
            return self.evict_unused(pool, &new_client);
        }
        if count > share {
            let most = most.clone();
            return self.evict(pool, Selection::Client(&most));
        }
        if let Some((count, network)) = pool.groups.largest()
            && count >= (max / 4).max(MIN_CONNECTIONS_PER_CLIENT)
        {
            let network = network.clone();
            return self.evict(pool, Selection::Group(&network));
        }
        let chosen = (count > 1).then(|| self.evict_among_largest(pool, &new_client));
        chosen.flatten().or_else(|| self.evict(pool, Selection::All))
    }

    /// Evicts an idle or unused connection of the clients that have the most connections, if there is one.
    fn evict_among_largest(&mut self, pool: &mut ConnectionIndex, new_client: &Client) -> Option<Arc<Connection>> {
        let (most, _) = pool.clients.largest()?;
        let several = pool.clients.by_count.iter().rev().take(MAX_EVICTION_CANDIDATES);
        let several = several.take_while(|(count, _)| *count == most);
        let firsts = several.filter_map(|(_, client)| {
            let (rank, first) = pool.clients.by_key.get(client)?.first_key_value()?;
            let keeps_used = self.params.full_limit_policy == FullLimitPolicy::CloseUnusedOnly && client == new_client;
            let is_victim = match first.take_activity() {
                UNUSED => true,
                IDLE => !keeps_used,
                _ => false,
            };
            is_victim.then(|| (*rank, first.clone()))
        });
        let (_, first) = firsts.min_by_key(|(rank, _)| *rank)?;
        pool.remove(&first);
        Some(first)
    }

    /// Evicts a connection of this client that has never carried a byte.
    fn evict_unused(&mut self, pool: &mut ConnectionIndex, client: &Client) -> Option<Arc<Connection>> {
        let connection = self.first_unused(pool, Selection::Client(client))?;
        pool.remove(&connection);
        Some(connection)
    }

    /// Evicts an unused or idle connection, or the one whose last activity check is the oldest.
    fn evict(&mut self, pool: &mut ConnectionIndex, of: Selection<'_>) -> Option<Arc<Connection>> {
        if let Some(unused) = self.first_unused(pool, of) {
            // If no client exceeds its share, a new client gets time to send its first byte.
            let is_in_grace_period = self.params.now - unused.accepted_at < FIRST_BYTE_GRACE && !self.many_unused;
            if !matches!(of, Selection::All) || !is_in_grace_period {
                pool.remove(&unused);
                return Some(unused);
            }
        }
        let used = |pool: &ConnectionIndex| {
            let mut used = pool.queue(of)?.range(FIRST_USED_RANK..);
            used.next().map(|(_, connection)| connection.clone())
        };
        for _ in 0..MAX_EVICTION_CANDIDATES {
            let Some(connection) = used(pool) else { break };
            if connection.take_activity() == IDLE {
                pool.remove(&connection);
                return Some(connection);
            }
            self.move_to_back(pool, &connection);
        }
        // All checked connections were active.
        let connection = used(pool).or_else(|| Some(pool.queue(of)?.first_key_value()?.1.clone()))?;
        pool.remove(&connection);
        Some(connection)
    }

    /// The first unused connection. Used connections before it move to the back of the queue.
    fn first_unused(&mut self, pool: &mut ConnectionIndex, of: Selection<'_>) -> Option<Arc<Connection>> {
        loop {
            let (rank, first) = pool.queue(of)?.first_key_value()?;
            if rank.is_used {
                return None;
            }
            let first = first.clone();
            if first.is_unused() {
                return Some(first);
            }
            self.move_to_back(pool, &first);
        }
    }

    /// Moves a connection that has carried bytes to the back of the queue.
    fn move_to_back(&mut self, pool: &mut ConnectionIndex, connection: &Arc<Connection>) {
        pool.remove(connection);
        *self.next_position += 1;
        connection.order.lock().rank = EvictionRank {
            is_used: true,
            position: *self.next_position,
        };
        pool.insert(connection.clone());
    }
}

impl ConnectionIndex {
    fn insert(&mut self, connection: Arc<Connection>) {
        let rank = connection.order.lock().rank;
        self.clients.insert(connection.client(), rank, &connection);
        if let Some(group) = connection.group() {
            self.groups.insert(group, rank, &connection);
        }
        self.all.insert(rank, connection);
    }

    /// Returns whether the connection was present.
    fn remove(&mut self, connection: &Connection) -> bool {
        let rank = connection.order.lock().rank;
        if self.all.remove(&rank).is_none() {
            return false;
        }
        self.clients.remove(&connection.client(), rank);
        if let Some(group) = connection.group() {
            self.groups.remove(&group, rank);
        }
        true
    }

    fn queue(&self, of: Selection<'_>) -> Option<&Queue> {
        match of {
            Selection::All => Some(&self.all),
            Selection::Client(client) => self.clients.by_key.get(client),
            Selection::Group(group) => self.groups.by_key.get(group),
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

    fn insert(&mut self, key: K, rank: EvictionRank, connection: &Arc<Connection>) {
        let queue = self.by_key.entry(key.clone()).or_default();
        let before = queue.len();
        queue.insert(rank, connection.clone());
        self.count(key, before, before + 1);
    }

    fn remove(&mut self, key: &K, rank: EvictionRank) {
        let Some(queue) = self.by_key.get_mut(key) else { return };
        let before = queue.len();
        queue.remove(&rank);
        let after = queue.len();
        if after == 0 {
            self.by_key.remove(key);
        }
        self.count(key.clone(), before, after);
    }

    fn count(&mut self, key: K, before: usize, after: usize) {
        let mut entry = (before, key);
        self.by_count.remove(&entry);
        if after > 0 {
            entry.0 = after;
            self.by_count.insert(entry);
        }
    }
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
