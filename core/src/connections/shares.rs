//! Who has how many connections, and which of them is closed for a newcomer.
//!
//! Values only: the caller holds the lock and tells the time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::{Within, global_network};

/// What is known of a connection that has a place.
pub(super) struct Connection {
    pub(super) ip: IpAddr,
    accepted_at: Instant,
    /// Whether it has carried bytes: [`NEVER`], [`ACTIVE`] or [`QUIET`].
    state: AtomicU8,
    /// Connections of the listener that have never carried bytes.
    n_silent: Arc<AtomicUsize>,
    pub(super) is_closed: AtomicBool,
    pub(super) task: Mutex<Option<AbortHandle>>,
    order: Mutex<Order>,
}

/// What changes under the lock of the listener only.
struct Order {
    rank: Rank,
    /// Present once it is verified.
    identity: Option<Arc<str>>,
}

/// The connections of a listener.
#[derive(Default)]
pub(super) struct State {
    next_position: u64,
    n_silent: Arc<AtomicUsize>,
    strangers: Pool,
    verified: Pool,
}

/// What a choice depends on besides the connections.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) max: usize,
    pub(super) within: Within,
    pub(super) now: Instant,
}

/// Connections by age, those of each client, and those of each group of clients.
#[derive(Default)]
struct Pool {
    all: Queue,
    clients: Shares<Client>,
    groups: Shares<Group>,
}

/// Who has a connection: an address, or a verified identity at an address. Several pods may have the address of their node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Client {
    ip: IpAddr,
    identity: Option<Arc<str>>,
}

/// Who may have many addresses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Group {
    /// The first address of a /64.
    Network(Ipv6Addr),
    Identity(Arc<str>),
}

/// Connections in the order in which they are closed.
type Queue = BTreeMap<Rank, Arc<Connection>>;

/// Those that had not carried a byte when they were looked at come first, then those that were looked at the longest ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_used: bool,
    position: u64,
}

/// The connections of each of many, and how many each has.
struct Shares<K> {
    by_key: HashMap<K, Queue>,
    by_count: BTreeSet<(usize, K)>,
}

/// Whose connections one is chosen from.
#[derive(Clone, Copy)]
enum Of<'a> {
    All,
    Client(&'a Client),
    Group(&'a Group),
}

impl Connection {
    /// Says that bytes came or went.
    pub(super) fn mark(&self) {
        if self.state.load(Ordering::Relaxed) != ACTIVE && self.state.swap(ACTIVE, Ordering::Relaxed) == NEVER {
            self.n_silent.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Closes it for another one.
    pub(super) fn close(&self) {
        self.mark(); // it does not count as silent any more
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

    /// The group of its client; other clients than those of an identity or a global IPv6 address have none.
    fn group(&self) -> Option<Group> {
        match &self.order.lock().identity {
            Some(identity) => Some(Group::Identity(identity.clone())),
            None => global_network(self.ip).map(Group::Network),
        }
    }

    /// Looks whether it was active since the last look.
    fn look(&self) -> u8 {
        let seen = self.state.load(Ordering::Relaxed);
        if seen == ACTIVE {
            self.state.store(QUIET, Ordering::Relaxed);
        }
        seen
    }

    fn is_silent(&self) -> bool {
        self.state.load(Ordering::Relaxed) == NEVER
    }
}

impl State {
    pub(super) fn n(&self) -> usize {
        self.strangers.all.len() + self.verified.all.len()
    }

    /// Adds a connection of this address.
    pub(super) fn add(&mut self, ip: IpAddr, now: Instant) -> Arc<Connection> {
        self.n_silent.fetch_add(1, Ordering::Relaxed);
        self.next_position += 1;
        let order = Order {
            rank: Rank {
                is_used: false,
                position: self.next_position,
            },
            identity: None,
        };
        let connection = Arc::new(Connection {
            ip,
            accepted_at: now,
            state: AtomicU8::new(NEVER),
            n_silent: self.n_silent.clone(),
            is_closed: AtomicBool::new(false),
            task: Mutex::default(),
            order: Mutex::new(order),
        });
        self.strangers.insert(connection.clone());
        connection
    }

    pub(super) fn remove(&mut self, connection: &Connection) {
        connection.mark(); // it does not count as silent any more
        let _ = self.strangers.remove(connection) || self.verified.remove(connection);
    }

    /// Says whose connection it is, unless that is known.
    pub(super) fn verify(&mut self, connection: &Arc<Connection>, identity: &str) {
        if self.strangers.remove(connection) {
            connection.mark();
            connection.order.lock().identity = Some(identity.into());
            self.verified.insert(connection.clone());
        }
    }

    /// Takes one connection out, whose place a newcomer gets; none if all are to stay.
    pub(super) fn take_victim(&mut self, newcomer: IpAddr, terms: Terms) -> Option<Arc<Connection>> {
        let Self {
            next_position,
            n_silent,
            strangers,
            verified,
        } = self;
        let mut choice = Choice {
            next_position,
            terms,
            are_many_silent: n_silent.load(Ordering::Relaxed) > terms.max / 4,
        };
        // Whoever has proven an identity leaves some places to those who are about to.
        let reserved = (terms.max / 4).max(1);
        if strangers.all.len() < reserved
            && let Some(connection) = choice.of_those_above_their_share(verified)
        {
            return Some(connection);
        }
        if !strangers.all.is_empty() {
            return choice.of_strangers(strangers, newcomer);
        }
        let (count, client) = verified.clients.most()?;
        let (several, client) = (count > 1, client.clone());
        several.then(|| choice.take(verified, Of::Client(&client))).flatten()
    }
}

/// One choice of a connection to close.
struct Choice<'s> {
    next_position: &'s mut u64,
    terms: Terms,
    /// Whether connections that have never carried a byte have more than a quarter of the places.
    are_many_silent: bool,
}

impl Choice<'_> {
    /// Of a verified client that has more than its share, or of an identity that has.
    fn of_those_above_their_share(&mut self, pool: &mut Pool) -> Option<Arc<Connection>> {
        let max = self.terms.max;
        // The newcomer may be another one.
        let share = |n: usize| max.div_ceil(n + 1).max(SMALL_SHARE);
        let (count, client) = pool.clients.most()?;
        if count > share(pool.clients.by_key.len()) {
            let client = client.clone();
            return self.take(pool, Of::Client(&client));
        }
        let (count, group) = pool.groups.most()?;
        let (is_above, group) = (count > share(pool.groups.by_key.len()), group.clone());
        is_above.then(|| self.take(pool, Of::Group(&group))).flatten()
    }

    fn of_strangers(&mut self, pool: &mut Pool, newcomer: IpAddr) -> Option<Arc<Connection>> {
        let Terms { max, within, .. } = self.terms;
        let newcomer = Client {
            ip: newcomer,
            identity: None,
        };
        let of_newcomer = pool.clients.by_key.get(&newcomer).map_or(0, BTreeMap::len);
        let n_clients = pool.clients.by_key.len() + usize::from(of_newcomer == 0);
        let share = max.div_ceil(n_clients).max(SMALL_SHARE);
        let (count, most) = pool.clients.most()?;
        // If it has as many as any other, it is to lose one.
        if within == Within::Keep && count >= share && of_newcomer == count {
            return self.take_silent(pool, &newcomer);
        }
        if count > share {
            let most = most.clone();
            return self.take(pool, Of::Client(&most));
        }
        if let Some((count, network)) = pool.groups.most()
            && count >= (max / 4).max(SMALL_SHARE)
        {
            let network = network.clone();
            return self.take(pool, Of::Group(&network));
        }
        let chosen = (count > 1).then(|| self.of_several(pool, &newcomer));
        chosen.flatten().or_else(|| self.take(pool, Of::All))
    }

    /// One that is not in use, of those clients that have the most and nevertheless few.
    fn of_several(&mut self, pool: &mut Pool, newcomer: &Client) -> Option<Arc<Connection>> {
        let (most, _) = pool.clients.most()?;
        let several = pool.clients.by_count.iter().rev().take(MAX_SEEN);
        let several = several.take_while(|(count, _)| *count == most);
        let firsts = several.filter_map(|(_, client)| {
            let (rank, first) = pool.clients.by_key.get(client)?.first_key_value()?;
            let keeps_used = self.terms.within == Within::Keep && client == newcomer;
            let is_victim = match first.look() {
                NEVER => true,
                QUIET => !keeps_used,
                _ => false,
            };
            is_victim.then(|| (*rank, first.clone()))
        });
        let (_, first) = firsts.min_by_key(|(rank, _)| *rank)?;
        pool.remove(&first);
        Some(first)
    }

    /// One that has never carried a byte, of this client.
    fn take_silent(&mut self, pool: &mut Pool, client: &Client) -> Option<Arc<Connection>> {
        let connection = self.first_unused(pool, Of::Client(client))?;
        pool.remove(&connection);
        Some(connection)
    }

    /// One that is silent, or else the one that was not active for the longest.
    fn take(&mut self, pool: &mut Pool, of: Of<'_>) -> Option<Arc<Connection>> {
        if let Some(unused) = self.first_unused(pool, of) {
            // Where nobody has too many, a client that has just come is given time to speak.
            let is_waited_for = self.terms.now - unused.accepted_at < SPEAK_GRACE && !self.are_many_silent;
            if !matches!(of, Of::All) || !is_waited_for {
                pool.remove(&unused);
                return Some(unused);
            }
        }
        let used = |pool: &Pool| {
            let mut used = pool.queue(of)?.range(FIRST_USED..);
            used.next().map(|(_, connection)| connection.clone())
        };
        for _ in 0..MAX_SEEN {
            let Some(connection) = used(pool) else { break };
            if connection.look() == QUIET {
                pool.remove(&connection);
                return Some(connection);
            }
            self.put_last(pool, &connection);
        }
        // All were active meanwhile.
        let connection = used(pool).or_else(|| Some(pool.queue(of)?.first_key_value()?.1.clone()))?;
        pool.remove(&connection);
        Some(connection)
    }

    /// The first that has carried no byte; those before it that have go behind the others.
    fn first_unused(&mut self, pool: &mut Pool, of: Of<'_>) -> Option<Arc<Connection>> {
        loop {
            let (rank, first) = pool.queue(of)?.first_key_value()?;
            if rank.is_used {
                return None;
            }
            let first = first.clone();
            if first.is_silent() {
                return Some(first);
            }
            self.put_last(pool, &first);
        }
    }

    /// Puts a connection that has carried bytes behind the others.
    fn put_last(&mut self, pool: &mut Pool, connection: &Arc<Connection>) {
        pool.remove(connection);
        *self.next_position += 1;
        connection.order.lock().rank = Rank {
            is_used: true,
            position: *self.next_position,
        };
        pool.insert(connection.clone());
    }
}

impl Pool {
    fn insert(&mut self, connection: Arc<Connection>) {
        let rank = connection.order.lock().rank;
        self.clients.insert(connection.client(), rank, &connection);
        if let Some(group) = connection.group() {
            self.groups.insert(group, rank, &connection);
        }
        self.all.insert(rank, connection);
    }

    /// Whether it was here.
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

    fn queue(&self, of: Of<'_>) -> Option<&Queue> {
        match of {
            Of::All => Some(&self.all),
            Of::Client(client) => self.clients.by_key.get(client),
            Of::Group(group) => self.groups.by_key.get(group),
        }
    }
}

impl<K> Default for Shares<K> {
    fn default() -> Self {
        Self {
            by_key: HashMap::new(),
            by_count: BTreeSet::new(),
        }
    }
}

impl<K: Clone + Ord + Hash> Shares<K> {
    /// Who has the most, and how many.
    fn most(&self) -> Option<(usize, &K)> {
        self.by_count.last().map(|(count, key)| (*count, key))
    }

    fn insert(&mut self, key: K, rank: Rank, connection: &Arc<Connection>) {
        let queue = self.by_key.entry(key.clone()).or_default();
        let before = queue.len();
        queue.insert(rank, connection.clone());
        self.count(key, before, before + 1);
    }

    fn remove(&mut self, key: &K, rank: Rank) {
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

/// States of a connection: it has carried no bytes yet; it has, since it was last looked at; it has, but not since then.
const NEVER: u8 = 0;
const ACTIVE: u8 = 1;
const QUIET: u8 = 2;
/// Before all that have carried bytes.
const FIRST_USED: Rank = Rank {
    is_used: true,
    position: 0,
};
/// So many connections are no more than anybody's share: a client that opens one while it closes another is not taken for one
/// that has too many.
pub(super) const SMALL_SHARE: usize = 4;
/// Connections that are looked at for one choice.
const MAX_SEEN: usize = 64;
/// How long a client may take to say something before its connection is closed for want of places, unless many are silent.
const SPEAK_GRACE: Duration = Duration::from_secs(1);
