//! The current policy of each port.
//!
//! A port in use is watched. If [`MAX_ON_DEMAND_WATCHES`] watched ports have connections, the policy of a further port is polled;
//! the next new connection turns the poll into a watch, if one is free by then. Unless the proxy's own default policy applies,
//! connections wait up to [`MAX_POLICY_WAIT`] for the first policy, then they are refused.
//!
//! When a watch ends, its policy is stored as the last known policy of the port until the process ends. The last known policy
//! applies if a new watch has no answer within [`MAX_POLICY_WAIT`], or while the control plane is unreachable.
//!
//! If no application listens on an undeclared port, the client waits for its turn ([`watch_limiter`]) before the port gets a watch
//! or poll. If its turn does not come within [`MAX_POLICY_WAIT`], the connection is refused.

mod watch_limiter;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use tulle_core::{log_limit::LogLimiter, ports::PortSet, warn_limited};

use self::watch_limiter::{Rate, Rates, WatchLimiter};
use crate::{
    api::{
        policies::{Policies, WatchMode},
        retry_signal::{MIN_RETRY_DELAY, RetrySignal},
        watch::{Refusal, WatchState},
    },
    http::error::Error,
    metrics::invalid_updates::{self, UpdateKind},
    net::first_bytes::LearnedSpeaker,
    policy::{
        authz::Authorization,
        decode,
        matches::{RequestAttributes, path},
        rate_limit::Limiter,
        route::{self, RouteMatch},
        server::{PathRules, ServerHttp, ServerPolicy},
    },
};

/// The policies of ports: of the target ports of connections, and of the ports that are always watched.
pub(crate) struct PortPolicies {
    api: Policies,
    invalid_updates: invalid_updates::Families,
    /// The policy of a port until the control plane sends one.
    initial_policy: InitialPolicy,
    /// The proxy's own setting. Policies with a longer detection timeout get this one. It is also the detection timeout of ports
    /// whose policy cannot be decoded: there, the proxy detects HTTP to answer requests with an error.
    detect_timeout: Duration,
    /// Ports whose watch never ends.
    always_watched: PortSet,
    /// Other watches end after this time without a connection.
    idle_timeout: Duration,
    /// Interval between polls of one port that is not watched.
    poll_interval: Duration,
    /// Limits new watches and polls of ports on which no application listens.
    watch_limiter: WatchLimiter,
    /// Whether an application listens on an address.
    is_listening: fn(SocketAddr) -> bool,
    table: Arc<Mutex<PortTable>>,
    /// The policy of connections whose client did not get its turn to start a watch. It refuses every client.
    not_watched: Arc<PortPolicy>,
    /// Limits log lines about unknown policies.
    log_limiter: LogLimiter<()>,
}

/// The policy of a port until the control plane sends one.
pub(crate) enum InitialPolicy {
    /// Connections wait for the policy, and are refused if it does not arrive.
    Refuse,
    /// The proxy's own default policy applies immediately.
    Default(DefaultPolicies),
}

/// The proxy's own default policy, for detected and for opaque ports.
pub(crate) struct DefaultPolicies {
    pub(crate) detect: Arc<ActivePolicy>,
    pub(crate) opaque: Arc<ActivePolicy>,
    pub(crate) opaque_ports: PortSet,
}

#[derive(Default)]
struct PortTable {
    watched: HashMap<u16, WatchedPort>,
    /// Ports in use above the limit of watches.
    polled: HashMap<u16, Weak<PortPolicy>>,
    /// Last policy of each port whose watch has ended or that is polled.
    last_known: HashMap<u16, Arc<ActivePolicy>>,
    /// One copy of each policy in `last_known`, because most ports have the same.
    interned: Vec<Arc<ActivePolicy>>,
}

struct WatchedPort {
    port_policy: Arc<PortPolicy>,
    used_at: Instant,
}

/// The policy of one port, watched or polled.
pub(crate) struct PortPolicy {
    policy_rx: watch::Receiver<WatchState<Arc<ActivePolicy>>>,
    /// The policy in force until the control plane answers.
    fallback: Arc<ActivePolicy>,
    fallback_origin: FallbackOrigin,
    /// Shortens the backoff of the watch or poll.
    retry_signal: RetrySignal,
    watched_since: Instant,
    /// Which side has sent the first bytes on earlier connections without TLS.
    pub(super) learned_speaker_without_tls: LearnedSpeaker,
    /// Which side has sent the first bytes on earlier connections, inside TLS that this proxy terminates.
    pub(super) learned_speaker_inside_tls: LearnedSpeaker,
}

/// The source of the policy that is in force until the control plane answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FallbackOrigin {
    /// No policy is known: every client is refused.
    Unknown,
    /// No application listens on the port, and clients connect to many such ports. Therefore the port is not watched, and every
    /// client is refused.
    NotWatched,
    /// The control plane; the last policy of an earlier watch.
    LastKnown,
    /// The proxy's own default policy.
    OwnDefault,
}

/// A policy and its runtime state.
pub(crate) struct ActivePolicy {
    pub(super) server_policy: ServerPolicy,
    pub(super) rate_limiter: Option<Arc<Limiter>>,
    /// Whether connections that are not HTTP are refused.
    pub(super) requires_http: bool,
    /// Whether rules depend on the request path.
    path_rules: PathRules,
    /// Whether the control plane has not sent a policy: every client is refused.
    pub(super) is_unknown: bool,
}

impl ActivePolicy {
    pub(crate) fn new(policy: ServerPolicy) -> Arc<Self> {
        Self::updated_from(None, policy)
    }

    /// The policy that refuses every client until the control plane sends one.
    fn unknown(max_detect_timeout: Duration) -> Arc<Self> {
        let policy = ServerPolicy::unknown().with_max_detect_timeout(max_detect_timeout);
        Arc::new(Self {
            is_unknown: true,
            ..Self::with_limiter(policy, None)
        })
    }

    /// The active policy that replaces `previous`. If the policy is equal, `previous` is returned. If the rate limit is equal, its
    /// state is kept.
    fn updated_from(previous: Option<&Arc<Self>>, policy: ServerPolicy) -> Arc<Self> {
        if let Some(previous) = previous.filter(|previous| previous.server_policy == policy) {
            return previous.clone();
        }
        let limit = |policy: &ServerPolicy| policy.protocol.http().and_then(|http| http.rate_limit.clone());
        let limiter = limit(&policy).map(|new| {
            let reused_limiter = previous.filter(|previous| limit(&previous.server_policy).as_ref() == Some(&new));
            let reused_limiter = reused_limiter.and_then(|previous| previous.rate_limiter.clone());
            reused_limiter.unwrap_or_else(|| Arc::new(Limiter::new(&new, Instant::now())))
        });
        Arc::new(Self::with_limiter(policy, limiter))
    }

    fn with_limiter(server_policy: ServerPolicy, rate_limiter: Option<Arc<Limiter>>) -> Self {
        Self {
            requires_http: server_policy.requires_http(),
            path_rules: server_policy
                .protocol
                .http()
                .map_or(PathRules::None, ServerHttp::path_rules),
            server_policy,
            rate_limiter,
            is_unknown: false,
        }
    }

    /// Finds the rule that matches a request. `http` are the routes of this policy.
    ///
    /// # Errors
    /// The path is ambiguous, and user-defined rules depend on the path.
    pub(super) fn find_route<'a>(
        &'a self,
        http: &'a ServerHttp,
        attributes: RequestAttributes<'_>,
    ) -> Result<Option<RouteMatch<'a, Arc<[Authorization]>>>, Error> {
        let normalized_path = match self.path_rules {
            PathRules::None => None,
            PathRules::ProbesOnly => path::normalize(attributes.path),
            PathRules::UserDefined => Some(path::normalize(attributes.path).ok_or(Error::AmbiguousPath)?),
        };
        Ok(match normalized_path {
            Some(path) => route::find_by_normalized_path(&http.routes, &attributes, &path),
            None => route::find(&http.routes, &attributes),
        })
    }
}

pub(crate) struct PortPoliciesConfig {
    pub(crate) initial_policy: InitialPolicy,
    pub(crate) detect_timeout: Duration,
    /// Ports whose watch never ends.
    pub(crate) always_watched: PortSet,
    /// Other watches end after this time without a connection.
    pub(crate) idle_timeout: Duration,
    /// Whether an application listens on an address.
    pub(crate) is_listening: fn(SocketAddr) -> bool,
}

impl PortPolicies {
    pub(crate) fn new(api: Policies, config: PortPoliciesConfig, invalid_updates: invalid_updates::Families) -> Self {
        let ports = Self {
            invalid_updates,
            api,
            initial_policy: config.initial_policy,
            detect_timeout: config.detect_timeout,
            always_watched: config.always_watched,
            idle_timeout: config.idle_timeout,
            poll_interval: POLL_INTERVAL,
            watch_limiter: WatchLimiter::new(NEW_WATCH_RATES),
            is_listening: config.is_listening,
            table: Arc::default(),
            not_watched: Arc::new(PortPolicy::not_watched(config.detect_timeout)),
            log_limiter: LogLimiter::default(),
        };
        for port in ports.always_watched.ranges().flatten() {
            ports.watch_or_poll(port);
        }
        ports
    }

    /// Returns the policy of a port that is watched.
    pub(super) fn get_watched(&self, port: u16) -> Option<Arc<PortPolicy>> {
        self.table.lock().get_watched(port, Instant::now())
    }

    /// Returns the policy of the port of `target` for a connection of `client`, and waits for it up to [`MAX_POLICY_WAIT`].
    ///
    /// If no application listens on the target, and the port is not watched or polled yet, this function first waits for the
    /// client's turn, also up to [`MAX_POLICY_WAIT`]. If the turn does not come, the returned policy refuses every client.
    ///
    /// The caller applies the current policy. While the policy is unknown, it refuses every client.
    pub(super) async fn wait_for_policy(&self, target: SocketAddr, client: IpAddr) -> Arc<PortPolicy> {
        let port = target.port();
        let is_in_use = || self.table.lock().is_in_use(port);
        // `is_in_use` is called again after the wait, because another client may have started the watch.
        let may_watch = is_in_use()
            || (self.is_listening)(target)
            || self.watch_limiter.wait_for_turn(client, MAX_POLICY_WAIT).await
            || is_in_use();
        let port_policy = match may_watch {
            true => self.watch_or_poll(port),
            false => self.not_watched.clone(),
        };
        self.wait_until_received(&port_policy).await;
        port_policy
    }

    /// Returns the policy of a port. The port is watched until it is idle, or polled if too many other ports are in use. The
    /// limit protects the control plane from clients that scan ports: it serves one stream for each watched port.
    fn watch_or_poll(&self, port: u16) -> Arc<PortPolicy> {
        let now = Instant::now();
        let mut table = self.table.lock();
        if let Some(watched) = table.get_watched(port, now) {
            return watched;
        }
        if !self.always_watched.contains(port) && !self.make_room_for_watch(&mut table, now) {
            return table
                .get_polled(port)
                .unwrap_or_else(|| self.poll(&mut table, port, now));
        }
        let last_known = table.last_known.get(&port).cloned();
        let port_policy = Arc::new(self.open_policy_stream(port, WatchMode::Watch, last_known, now));
        let watched = WatchedPort {
            port_policy: port_policy.clone(),
            used_at: now,
        };
        table.watched.insert(port, watched);
        port_policy
    }

    /// Returns the policy of a port that is polled while it has connections.
    fn poll(&self, table: &mut PortTable, port: u16, now: Instant) -> Arc<PortPolicy> {
        table.polled.retain(|_, polled| polled.strong_count() > 0);
        let n_polled = u32::try_from(table.polled.len()).unwrap_or(u32::MAX);
        let interval = self.poll_interval.max(MIN_TIME_BETWEEN_POLLS.saturating_mul(n_polled));
        let last_known = table.last_known.get(&port).cloned();
        let port_policy = Arc::new(self.open_policy_stream(port, WatchMode::Poll(interval), last_known, now));
        table.polled.insert(port, Arc::downgrade(&port_policy));
        port_policy
    }

    /// Whether no connection uses the watch. A connection that began while the port was polled holds the polled policy, and counts
    /// as a user of the watch.
    fn can_end_watch(&self, table: &PortTable, port: u16, watched: &WatchedPort) -> bool {
        let is_polled = table.get_polled(port).is_some();
        !self.always_watched.contains(port) && Arc::strong_count(&watched.port_policy) == 1 && !is_polled
    }

    /// Ends idle watches, and one more if the limit is still reached. Returns whether another port can be watched.
    fn make_room_for_watch(&self, table: &mut PortTable, now: Instant) -> bool {
        let idle = table.watched.iter().filter(|(port, watched)| {
            self.can_end_watch(table, **port, watched) && now.duration_since(watched.used_at) >= self.idle_timeout
        });
        for port in idle.map(|(port, _)| *port).collect::<Vec<_>>() {
            table.end_watch(port);
        }
        let n_on_demand = table
            .watched
            .keys()
            .filter(|port| !self.always_watched.contains(**port))
            .count();
        if n_on_demand >= MAX_ON_DEMAND_WATCHES {
            let watches = table.watched.iter();
            let evictable = watches.filter(|(port, watched)| self.can_end_watch(table, **port, watched));
            let evicted = evictable.min_by_key(|(_, watched)| (watched.port_policy.eviction_rank(), watched.used_at));
            let Some((&port, _)) = evicted else { return false };
            table.end_watch(port);
        }
        true
    }

    /// Waits up to [`MAX_POLICY_WAIT`] for the policy of a port.
    async fn wait_until_received(&self, port_policy: &PortPolicy) {
        if !self.must_wait(port_policy) {
            return;
        }
        let mut policy_rx = port_policy.policy_rx.clone();
        let began_at = match port_policy.fallback_origin {
            // With a last known policy, connections wait only during the first [`MAX_POLICY_WAIT`] of the watch.
            FallbackOrigin::LastKnown => port_policy.watched_since,
            FallbackOrigin::Unknown | FallbackOrigin::NotWatched | FallbackOrigin::OwnDefault => Instant::now(),
        };
        let deadline = began_at + MAX_POLICY_WAIT;
        // Requests a retry of the watch or poll every [`MIN_RETRY_DELAY`], until connections need not wait or the time is over.
        while self.must_wait(port_policy) && Instant::now() < deadline {
            self.api.retry_soon(&port_policy.retry_signal);
            let next_retry_at = deadline.min(Instant::now() + MIN_RETRY_DELAY);
            let watch_has_ended = matches!(timeout_at(next_retry_at, policy_rx.changed()).await, Ok(Err(_)));
            if watch_has_ended {
                sleep_until(next_retry_at).await; // `changed` has returned immediately
            }
        }
    }

    /// Whether connections must wait: no policy is known, or the last known one may be outdated and the control plane is reachable.
    fn must_wait(&self, port_policy: &PortPolicy) -> bool {
        !port_policy.is_received()
            && match port_policy.fallback_origin {
                FallbackOrigin::Unknown => true,
                FallbackOrigin::LastKnown => self.api.is_reachable(),
                FallbackOrigin::NotWatched | FallbackOrigin::OwnDefault => false,
            }
    }

    /// Logs, at most once a minute for each reason, that connections are refused because the policy of `port` is unknown.
    pub(super) fn warn_unknown_policy(&self, port: u16, port_policy: &PortPolicy, client: IpAddr) {
        let log = &self.log_limiter;
        match (port_policy.fallback_origin, port_policy.denial()) {
            (FallbackOrigin::NotWatched, _) => warn_limited!(
                log,
                (),
                "connections are refused (port-not-watched): clients connect to many ports on which no application listens",
                port,
                %client
            ),
            (_, Some(denial)) => warn_limited!(
                log,
                (),
                "connections are refused (discovery-denied): the control plane denies this proxy the policy of this port",
                port,
                message = denial.message
            ),
            (_, None) => warn_limited!(
                log,
                (),
                "connections are refused (policy_unknown): the control plane has not sent the policy of this port",
                port
            ),
        }
    }

    /// Calls `map` for each watched or polled port, and returns the results.
    pub(super) fn map_ports<T>(&self, map: impl Fn(u16, &PortPolicy) -> T) -> Vec<T> {
        let table = self.table.lock();
        let watched = table
            .watched
            .iter()
            .map(|(port, watched)| (*port, watched.port_policy.clone()));
        let polled = table
            .polled
            .iter()
            .filter(|(port, _)| !table.watched.contains_key(port));
        let polled = polled.filter_map(|(port, port_policy)| Some((*port, port_policy.upgrade()?)));
        let all = watched.chain(polled);
        all.map(|(port, port_policy)| map(port, &port_policy)).collect()
    }

    /// Starts to watch or poll the policy of a port.
    fn open_policy_stream(
        &self,
        port: u16,
        mode: WatchMode,
        last_known: Option<Arc<ActivePolicy>>,
        now: Instant,
    ) -> PortPolicy {
        let detect_timeout = self.detect_timeout;
        let latest = Mutex::new(last_known.clone());
        let retry_signal = RetrySignal::default();
        let mut reporter = self
            .invalid_updates
            .reporter(UpdateKind::InboundPolicy, port.to_string());
        // A polled policy is stored as the last known one immediately, a watched one when its watch ends.
        let store_in = matches!(mode, WatchMode::Poll(_)).then(|| self.table.clone());
        let policy_rx = self.api.inbound(port, mode, retry_signal.clone(), move |update| {
            let policy = decode::inbound::server_policy(update).unwrap_or_else(|error| {
                reporter.report(&error); // connections are refused until a valid policy arrives
                ServerPolicy::invalid(detect_timeout)
            });
            let policy = policy.with_max_detect_timeout(detect_timeout);
            let mut latest = latest.lock();
            let current = ActivePolicy::updated_from(latest.as_ref(), policy);
            *latest = Some(current.clone());
            if let Some(table) = &store_in {
                table.lock().store_last_known(port, &current);
            }
            current
        });
        let (fallback, fallback_origin) = match (last_known, &self.initial_policy) {
            (Some(last_known), _) => (last_known, FallbackOrigin::LastKnown),
            (None, InitialPolicy::Refuse) => (ActivePolicy::unknown(detect_timeout), FallbackOrigin::Unknown),
            (None, InitialPolicy::Default(defaults)) => {
                let current = match defaults.opaque_ports.contains(port) {
                    true => defaults.opaque.clone(),
                    false => defaults.detect.clone(),
                };
                (current, FallbackOrigin::OwnDefault)
            }
        };
        PortPolicy {
            policy_rx,
            fallback,
            fallback_origin,
            retry_signal,
            watched_since: now,
            learned_speaker_without_tls: LearnedSpeaker::default(),
            learned_speaker_inside_tls: LearnedSpeaker::default(),
        }
    }
}

impl PortTable {
    fn get_watched(&mut self, port: u16, now: Instant) -> Option<Arc<PortPolicy>> {
        let watched = self.watched.get_mut(&port)?;
        watched.used_at = now;
        Some(watched.port_policy.clone())
    }

    fn get_polled(&self, port: u16) -> Option<Arc<PortPolicy>> {
        self.polled.get(&port).and_then(Weak::upgrade)
    }

    /// Whether a port is watched or polled.
    fn is_in_use(&self, port: u16) -> bool {
        self.watched.contains_key(&port) || self.get_polled(port).is_some()
    }

    /// Ends the watch of a port, and stores its policy as the last known one.
    fn end_watch(&mut self, port: u16) {
        let Some(WatchedPort { port_policy, .. }) = self.watched.remove(&port) else {
            return;
        };
        if let WatchState::Known(current) = &*port_policy.policy_rx.borrow() {
            self.store_last_known(port, current);
        }
    }

    fn store_last_known(&mut self, port: u16, current: &Arc<ActivePolicy>) {
        let interned = self.intern(current);
        self.last_known.insert(port, interned);
    }

    /// Returns an equal policy that is already stored, or stores this one. Policies with a rate limit are not shared, because
    /// each port has its own state.
    fn intern(&mut self, current: &Arc<ActivePolicy>) -> Arc<ActivePolicy> {
        if current.rate_limiter.is_some() {
            return current.clone();
        }
        if let Some(equal) = self
            .interned
            .iter()
            .find(|other| other.server_policy == current.server_policy)
        {
            return equal.clone();
        }
        self.interned.retain(|other| Arc::strong_count(other) > 1);
        self.interned.push(current.clone());
        current.clone()
    }
}

impl PortPolicy {
    /// The policy of a port that is not watched. It refuses every client, and never changes.
    fn not_watched(max_detect_timeout: Duration) -> Self {
        let (_, policy_rx) = watch::channel(WatchState::Pending);
        Self {
            policy_rx,
            fallback: ActivePolicy::unknown(max_detect_timeout),
            fallback_origin: FallbackOrigin::NotWatched,
            retry_signal: RetrySignal::default(),
            watched_since: Instant::now(),
            learned_speaker_without_tls: LearnedSpeaker::default(),
            learned_speaker_inside_tls: LearnedSpeaker::default(),
        }
    }

    pub(super) fn current(&self) -> Arc<ActivePolicy> {
        match &*self.policy_rx.borrow() {
            WatchState::Known(current) => current.clone(),
            WatchState::Pending | WatchState::Refused(_) => self.fallback.clone(),
        }
    }

    /// Whether the control plane has sent a policy since this watch or poll began.
    pub(super) fn is_received(&self) -> bool {
        matches!(&*self.policy_rx.borrow(), WatchState::Known(_))
    }

    /// The denial of the policy, if the control plane denies it to this proxy and has not sent one before.
    pub(super) fn denial(&self) -> Option<Refusal> {
        match &*self.policy_rx.borrow() {
            WatchState::Refused(refusal) if refusal.is_denial() => Some(refusal.clone()),
            _ => None,
        }
    }

    pub(super) fn is_denied(&self) -> bool {
        matches!(&*self.policy_rx.borrow(), WatchState::Refused(refusal) if refusal.is_denial())
    }

    /// The error of clients that are refused because the policy is unknown. It does not contain the message of the control plane,
    /// which is about this proxy.
    pub(super) fn unknown_policy_error(&self) -> Error {
        match self.fallback_origin {
            FallbackOrigin::NotWatched => Error::PortNotWatched,
            _ if self.is_denied() => {
                Error::DiscoveryDenied("the control plane denies the server's proxy the policy of this port".to_owned())
            }
            _ => Error::PolicyUnknown,
        }
    }

    /// The source of the policy that is in force until the control plane answers.
    pub(super) fn fallback_origin(&self) -> FallbackOrigin {
        self.fallback_origin
    }

    /// The order in which ports lose their watch, lowest rank first: ports without a policy, then ports that permit every client,
    /// then all others. An outdated policy is the most harmful if it restricts clients.
    fn eviction_rank(&self) -> u8 {
        match &*self.policy_rx.borrow() {
            WatchState::Pending | WatchState::Refused(_) => 0,
            WatchState::Known(current) if current.server_policy.permits_every_client() && !current.requires_http => 1,
            WatchState::Known(_) => 2,
        }
    }

    /// Waits until the policy in force is not `previous`, and returns it.
    pub(super) async fn wait_changed(&self, previous: &Arc<ActivePolicy>) -> Arc<ActivePolicy> {
        let mut policy = self.policy_rx.clone();
        loop {
            let current = self.current();
            if !Arc::ptr_eq(&current, previous) {
                return current;
            }
            if policy.changed().await.is_err() {
                std::future::pending::<()>().await; // the watch has ended, so the policy does not change any more
            }
        }
    }
}

/// Maximum time that a connection waits for the policy of its port. Then the last known policy applies, or the connection is
/// refused.
const MAX_POLICY_WAIT: Duration = Duration::from_secs(3);

/// Maximum number of watched ports, besides those that are always watched.
const MAX_ON_DEMAND_WATCHES: usize = 256;

/// Interval between polls of one port, unless many are polled. A changed policy that denies a connection closes it after about
/// this time.
const POLL_INTERVAL: Duration = Duration::from_secs(30);

/// Minimum average interval between polls of all ports. With many polled ports, each is polled less often.
const MIN_TIME_BETWEEN_POLLS: Duration = Duration::from_millis(50);

/// Rates of new watches and polls of undeclared ports on which no application listens.
///
/// - For each client network: an application that has not started yet, or has ended, has only a few such ports, and all clients
///   share their watches. 16 new ports at once, and then one a second, are enough.
/// - For all networks together: after 64 new ports at once, one new stream per [`MIN_TIME_BETWEEN_POLLS`], that is 20 a second,
///   the same rate as for polls. If fewer than 20 networks scan ports, tokens are left for other clients. If 60 networks scan
///   ports, the first connection of another client waits for at most 60 tokens, which takes as long as [`MAX_POLICY_WAIT`].
const NEW_WATCH_RATES: Rates = Rates {
    per_network: Rate {
        burst: 16,
        interval: Duration::from_secs(1),
    },
    shared: Rate {
        burst: 64,
        interval: MIN_TIME_BETWEEN_POLLS,
    },
};

#[cfg(test)]
mod tests;
