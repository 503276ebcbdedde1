//! The live policy of each port.
//!
//! A port is watched while it is in use; where too many are, the policy of a further one is asked for every now and then. Until the control plane has told its policy, connections wait for it, and are refused
//! when it does not come. A policy once known holds as long as the process lives: when the watch of a port ends, because the port
//! is idle or others need the place, its policy is remembered, and holds again when the control plane cannot be asked.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use tulle_core::ports::PortSet;

use crate::{
    api::{
        policies::{Follow, Policies},
        retry::{MIN_RETRY_DELAY, RetrySignal},
        watch::Watched,
    },
    http::error::Error,
    metrics::unreadable::{self, Message},
    net::first::Learned,
    policy::{
        authz::Authorization,
        decode,
        matches::{Head, path},
        rate_limit::Limiter,
        route::{self, Found},
        server::{PathRules, ServerHttp, ServerPolicy},
    },
};

/// The policies of all ports that were asked for.
pub(crate) struct Ports {
    policies: Policies,
    /// Where policies are counted that cannot be read.
    unreadable: unreadable::Families,
    /// What holds for a port before the control plane has spoken.
    unknown: UnknownPolicy,
    /// For policies that cannot be decoded.
    detect_timeout: Duration,
    /// Ports that stay watched.
    kept: PortSet,
    /// How long other ports stay watched without a connection.
    idle: Duration,
    /// How often the policy of a port is asked for that is not watched.
    ask_interval: Duration,
    state: Arc<Mutex<State>>,
    /// When it was last logged that the policy of a port is not known.
    logged_at: Mutex<Option<Instant>>,
}

/// What holds for a port whose policy the control plane has not told.
pub(crate) enum UnknownPolicy {
    /// Nobody may use it; connections wait for the policy first.
    Refuse,
    /// The environment's default, at once.
    Default(Defaults),
}

/// The policy of ports by the environment.
pub(crate) struct Defaults {
    pub(crate) detect: Arc<Current>,
    pub(crate) opaque: Arc<Current>,
    pub(crate) opaque_ports: PortSet,
}

#[derive(Default)]
struct State {
    watched: HashMap<u16, WatchedPort>,
    /// Ports with connections for which there was no place among those that are watched.
    asked: HashMap<u16, Weak<Port>>,
    /// Policies of ports whose watch has ended.
    remembered: HashMap<u16, Arc<Current>>,
    /// One of each of these, because most ports have the same.
    distinct: Vec<Arc<Current>>,
}

struct WatchedPort {
    port: Arc<Port>,
    used_at: Instant,
}

/// One port of this workload.
pub(crate) struct Port {
    policy: watch::Receiver<Watched<Arc<Current>>>,
    /// In force until the control plane has answered.
    fallback: Arc<Current>,
    origin: FallbackOrigin,
    /// Has the control plane asked again soon.
    retry: RetrySignal,
    watched_since: Instant,
    /// Who speaks first inside TLS, and without it.
    pub(super) learned: [Learned; 2],
}

/// Where the policy comes from that is in force until the control plane has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FallbackOrigin {
    /// Nowhere: it refuses everybody.
    Unknown,
    /// The control plane told it earlier.
    Remembered,
    /// The environment.
    Environment,
}

/// A policy and the state that lives as long as it holds.
pub(crate) struct Current {
    pub(super) policy: ServerPolicy,
    pub(super) limiter: Option<Arc<Limiter>>,
    /// Whether connections have to be HTTP.
    pub(super) demands_http: bool,
    /// Which rules tell requests apart by their path.
    path_rules: PathRules,
    /// Whether it stands for a policy that the control plane has not told.
    pub(super) is_unknown: bool,
}

impl Current {
    pub(crate) fn new(policy: ServerPolicy) -> Arc<Self> {
        Self::after(None, policy)
    }

    /// Refuses everybody, because the policy is not known.
    fn unknown() -> Arc<Self> {
        Arc::new(Self {
            is_unknown: true,
            ..Self::of(ServerPolicy::unknown(), None)
        })
    }

    /// A policy that takes the place of another: what stays the same goes on, and what was used of a rate limit is used.
    fn after(previous: Option<&Arc<Self>>, policy: ServerPolicy) -> Arc<Self> {
        if let Some(previous) = previous.filter(|previous| previous.policy == policy) {
            return previous.clone();
        }
        let limit = |policy: &ServerPolicy| policy.protocol.http().and_then(|http| http.rate_limit.clone());
        let limiter = limit(&policy).map(|new| {
            let kept = previous.filter(|previous| limit(&previous.policy).as_ref() == Some(&new));
            let kept = kept.and_then(|previous| previous.limiter.clone());
            kept.unwrap_or_else(|| Arc::new(Limiter::new(&new, Instant::now())))
        });
        Arc::new(Self::of(policy, limiter))
    }

    fn of(policy: ServerPolicy, limiter: Option<Arc<Limiter>>) -> Self {
        Self {
            demands_http: policy.demands_http(),
            path_rules: policy.protocol.http().map_or(PathRules::None, ServerHttp::path_rules),
            policy,
            limiter,
            is_unknown: false,
        }
    }
}

impl Current {
    /// The rule of `http`, which is of this policy, that a request falls under.
    ///
    /// # Errors
    /// Rules that somebody wrote differ by path, and applications could take the path for another one.
    pub(super) fn find<'a>(
        &'a self,
        http: &'a ServerHttp,
        head: Head<'_>,
    ) -> Result<Option<Found<'a, Arc<[Authorization]>>>, Error> {
        let normal = match self.path_rules {
            PathRules::None => None,
            PathRules::OfProbes => path::normal(head.path),
            PathRules::Written => Some(path::normal(head.path).ok_or(Error::AmbiguousPath)?),
        };
        let Some(normal) = normal else {
            return Ok(route::find(&http.routes, &head));
        };
        let found = route::find(&http.routes, &Head { path: &normal, ..head });
        Ok(found.map(|found| found.with_prefix(|length| path::original_len(head.path, length))))
    }
}

impl Ports {
    pub(crate) fn new(
        policies: Policies,
        unknown: UnknownPolicy,
        detect_timeout: Duration,
        kept: PortSet,
        idle: Duration,
        unreadable: unreadable::Families,
    ) -> Self {
        let ports = Self {
            unreadable,
            policies,
            unknown,
            detect_timeout,
            kept,
            idle,
            ask_interval: ASK_INTERVAL,
            state: Arc::default(),
            logged_at: Mutex::default(),
        };
        for port in ports.kept.ranges().flatten() {
            ports.get(port);
        }
        ports
    }

    /// The port, watched from now on until it has not been asked for in a while, or asked for where as many others are in use as may
    /// be watched: clients may try every port, and each one that is watched costs the control plane something.
    pub(super) fn get(&self, port: u16) -> Arc<Port> {
        let now = Instant::now();
        let mut state = self.state.lock();
        if let Some(watched) = state.watched.get_mut(&port) {
            watched.used_at = now;
            return watched.port.clone();
        }
        if !self.kept.contains(port) && self.make_room(&mut state, now).is_none() {
            return self.ask(&mut state, port, now);
        }
        let remembered = state.remembered.get(&port).cloned();
        let made = Arc::new(self.follow(port, Follow::Watch, remembered, now));
        let watched = WatchedPort {
            port: made.clone(),
            used_at: now,
        };
        state.watched.insert(port, watched);
        made
    }

    /// The port, whose policy is asked for from now on while it has connections.
    fn ask(&self, state: &mut State, port: u16, now: Instant) -> Arc<Port> {
        if let Some(asked) = state.asked.get(&port).and_then(Weak::upgrade) {
            return asked;
        }
        state.asked.retain(|_, asked| asked.strong_count() > 0);
        let n_asked = u32::try_from(state.asked.len()).unwrap_or(u32::MAX);
        let interval = self.ask_interval.max(MIN_TIME_BETWEEN_ASKS.saturating_mul(n_asked));
        let remembered = state.remembered.get(&port).cloned();
        let made = Arc::new(self.follow(port, Follow::AskEvery(interval), remembered, now));
        state.asked.insert(port, Arc::downgrade(&made));
        made
    }

    /// Ends watches of ports without connections: of those that are idle, and of the least used if there are too many.
    fn make_room(&self, state: &mut State, now: Instant) -> Option<()> {
        let can_end =
            |port: u16, watched: &WatchedPort| !self.kept.contains(port) && Arc::strong_count(&watched.port) == 1;
        let idle = state
            .watched
            .iter()
            .filter(|(port, watched)| can_end(**port, watched) && now.duration_since(watched.used_at) >= self.idle);
        for port in idle.map(|(port, _)| *port).collect::<Vec<_>>() {
            state.end_watch(port);
        }
        let n_others = state.watched.keys().filter(|port| !self.kept.contains(**port)).count();
        if n_others >= MAX_OTHER_WATCHES {
            let free = state.watched.iter().filter(|(port, watched)| can_end(**port, watched));
            let (&port, _) = free.min_by_key(|(_, watched)| (watched.port.eviction_rank(), watched.used_at))?;
            state.end_watch(port);
        }
        Some(())
    }

    /// Waits until it is known who may use `port`, for [`MAX_POLICY_WAIT`] at most.
    ///
    /// Afterwards the port's current policy is to be judged by, which refuses everybody if it is not known.
    pub(super) async fn wait_until_known(&self, port: &Port) {
        if !self.must_wait(port) {
            return;
        }
        let mut policy = port.policy.clone();
        let began_at = match port.origin {
            // What was known is waited for once, not by each connection.
            FallbackOrigin::Remembered => port.watched_since,
            FallbackOrigin::Unknown | FallbackOrigin::Environment => Instant::now(),
        };
        let deadline = began_at + MAX_POLICY_WAIT;
        while self.must_wait(port) && Instant::now() < deadline {
            self.policies.retry_soon(&port.retry);
            let until = deadline.min(Instant::now() + MIN_RETRY_DELAY);
            let has_ended = matches!(timeout_at(until, policy.changed()).await, Ok(Err(_)));
            if has_ended {
                sleep_until(until).await; // its answer was final
            }
        }
    }

    /// Whether the policy in force may be an old one, or none at all, and the control plane may tell the one that holds.
    fn must_wait(&self, port: &Port) -> bool {
        !port.is_known()
            && match port.origin {
                FallbackOrigin::Unknown => true,
                FallbackOrigin::Remembered => self.policies.can_answer(),
                FallbackOrigin::Environment => false,
            }
    }

    /// Logs that connections to `port` are refused because its policy is not known; once a minute.
    pub(super) fn log_unknown(&self, port: u16) {
        let now = Instant::now();
        let mut logged_at = self.logged_at.lock();
        if logged_at.is_none_or(|logged_at| now.duration_since(logged_at) >= UNKNOWN_LOG_INTERVAL) {
            *logged_at = Some(now);
            tracing::warn!(
                port,
                "connections are refused (policy_unknown): the control plane has not told who may use this port"
            );
        }
    }

    /// What `of` makes of each port whose policy is followed.
    pub(super) fn each<T>(&self, of: impl Fn(u16, &Port) -> T) -> Vec<T> {
        let state = self.state.lock();
        let watched = state
            .watched
            .iter()
            .map(|(number, watched)| (*number, watched.port.clone()));
        let asked = state
            .asked
            .iter()
            .filter(|(number, _)| !state.watched.contains_key(number));
        let asked = asked.filter_map(|(number, port)| Some((*number, port.upgrade()?)));
        watched.chain(asked).map(|(number, port)| of(number, &port)).collect()
    }

    fn follow(&self, port: u16, follow: Follow, remembered: Option<Arc<Current>>, now: Instant) -> Port {
        let timeout = self.detect_timeout;
        let last = Mutex::new(remembered.clone());
        let retry = RetrySignal::default();
        let mut reporter = self.unreadable.reporter(Message::InboundPolicy, port.to_string());
        // Of a port that is watched, the policy is remembered when its watch ends.
        let state = matches!(follow, Follow::AskEvery(_)).then(|| self.state.clone());
        let policy = self.policies.inbound(port, follow, retry.clone(), move |update| {
            let policy = decode::inbound::server_policy(update).unwrap_or_else(|error| {
                reporter.report(&error); // nobody may use the port until it can be read
                ServerPolicy::invalid(timeout)
            });
            let mut last = last.lock();
            let current = Current::after(last.as_ref(), policy);
            *last = Some(current.clone());
            if let Some(state) = &state {
                state.lock().remember(port, &current);
            }
            current
        });
        let (fallback, origin) = match (remembered, &self.unknown) {
            (Some(remembered), _) => (remembered, FallbackOrigin::Remembered),
            (None, UnknownPolicy::Refuse) => (Current::unknown(), FallbackOrigin::Unknown),
            (None, UnknownPolicy::Default(defaults)) => {
                let current = match defaults.opaque_ports.contains(port) {
                    true => defaults.opaque.clone(),
                    false => defaults.detect.clone(),
                };
                (current, FallbackOrigin::Environment)
            }
        };
        Port {
            policy,
            fallback,
            origin,
            retry,
            watched_since: now,
            learned: Default::default(),
        }
    }
}

impl State {
    /// Ends the watch of a port; its policy stays in force.
    fn end_watch(&mut self, port: u16) {
        let Some(WatchedPort { port: watched, .. }) = self.watched.remove(&port) else {
            return;
        };
        if let Watched::Known(current) = &*watched.policy.borrow() {
            self.remember(port, current);
        }
    }

    fn remember(&mut self, port: u16, current: &Arc<Current>) {
        let shared = self.shared(current);
        self.remembered.insert(port, shared);
    }

    /// An equal policy that is remembered already, if there is one. What was used of a rate limit is each port's own.
    fn shared(&mut self, current: &Arc<Current>) -> Arc<Current> {
        if current.limiter.is_some() {
            return current.clone();
        }
        if let Some(same) = self.distinct.iter().find(|other| other.policy == current.policy) {
            return same.clone();
        }
        self.distinct.retain(|other| Arc::strong_count(other) > 1);
        self.distinct.push(current.clone());
        current.clone()
    }
}

impl Port {
    /// The policy in force.
    pub(super) fn current(&self) -> Arc<Current> {
        match &*self.policy.borrow() {
            Watched::Known(current) => current.clone(),
            Watched::Pending | Watched::Refused(_) => self.fallback.clone(),
        }
    }

    /// Whether the control plane has told the policy since the port is watched.
    pub(super) fn is_known(&self) -> bool {
        matches!(&*self.policy.borrow(), Watched::Known(_))
    }

    /// Where the policy comes from that is in force while the control plane has not answered.
    pub(super) fn fallback_origin(&self) -> FallbackOrigin {
        self.origin
    }

    /// Whose watch ends first when there are too many; lowest first.
    fn eviction_rank(&self) -> u8 {
        match &*self.policy.borrow() {
            Watched::Pending | Watched::Refused(_) => 0,
            Watched::Known(current) if current.policy.permits_everybody() && !current.demands_http => 1,
            Watched::Known(_) => 2,
        }
    }

    /// Waits until another policy than `seen` is in force.
    pub(super) async fn changed_from(&self, seen: &Arc<Current>) -> Arc<Current> {
        let mut policy = self.policy.clone();
        loop {
            let current = self.current();
            if !Arc::ptr_eq(&current, seen) {
                return current;
            }
            if policy.changed().await.is_err() {
                std::future::pending::<()>().await; // the watch has ended; what is known stays
            }
        }
    }
}

/// Maximum time that a connection waits for the policy of its port; then it is refused.
const MAX_POLICY_WAIT: Duration = Duration::from_secs(3);

/// Ports that are watched at a time beside those that stay watched.
const MAX_OTHER_WATCHES: usize = 256;

/// Between two questions for the policy of one port that is not watched, which is how late its connections are cut when it turns.
const ASK_INTERVAL: Duration = Duration::from_secs(30);

/// Between two such questions for any port, on average: where many ports are in use, each is asked for less often.
const MIN_TIME_BETWEEN_ASKS: Duration = Duration::from_millis(50);

/// Between log lines about ports whose policy is not known.
const UNKNOWN_LOG_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        pin::Pin,
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    use futures_util::{Stream, StreamExt, stream};
    use tokio::{runtime::Handle, time::timeout};
    use tonic::{Request, Response, Status};
    use tulle_core::{backoff::Backoff, metrics::Registry};
    use tulle_proto::{
        inbound::{
            Authn, Authz, Network, PortSpec, ProxyProtocol, Server as Answer, authn,
            inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer},
            proxy_protocol,
        },
        net::{IPv6, IpAddress, IpNetwork, ip_address},
    };

    use super::*;
    use crate::{
        api::{
            policies,
            tests::{CLIENT, CONTROL, Server, connector, mutual_tls, quick},
            watch::StreamLimits,
        },
        policy::{
            authz::{ConnTls, authorize},
            meta::Meta,
            rate_limit::RateLimit,
            server::ServerProtocol,
        },
        tls::tests::Authority,
    };

    /// A policy service that permits everybody at even ports and nobody at odd ones.
    #[derive(Clone, Default)]
    struct Service {
        n_watches: Arc<AtomicUsize>,
        /// Says the opposite.
        has_turned: Arc<AtomicBool>,
    }

    struct Watching(Arc<AtomicUsize>);

    impl Drop for Watching {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn answer(port: u32) -> Answer {
        let all = |ip| Network {
            net: Some(IpNetwork {
                ip: Some(IpAddress { ip: Some(ip) }),
                prefix_len: 0,
            }),
            except: Vec::new(),
        };
        let everywhere = [
            ip_address::Ip::Ipv4(0),
            ip_address::Ip::Ipv6(IPv6 { first: 0, last: 0 }),
        ];
        let everybody = Authz {
            networks: everywhere.map(all).to_vec(),
            authentication: Some(Authn {
                permit: Some(authn::Permit::Unauthenticated(authn::PermitUnauthenticated {})),
            }),
            labels: BTreeMap::from([("name".to_owned(), "default:all-unauthenticated".to_owned())]),
            metadata: None,
        };
        Answer {
            protocol: Some(ProxyProtocol {
                kind: Some(proxy_protocol::Kind::Opaque(proxy_protocol::Opaque {})),
            }),
            server_ips: Vec::new(),
            authorizations: if port.is_multiple_of(2) {
                vec![everybody]
            } else {
                vec![]
            },
            labels: BTreeMap::from([("name".to_owned(), "default:as-told".to_owned())]),
        }
    }

    #[tonic::async_trait]
    impl InboundServerPolicies for Service {
        type WatchPortStream = Pin<Box<dyn Stream<Item = Result<Answer, Status>> + Send>>;

        async fn get_port(&self, _: Request<PortSpec>) -> Result<Response<Answer>, Status> {
            Err(Status::unimplemented("proxies watch"))
        }

        async fn watch_port(&self, req: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
            self.n_watches.fetch_add(1, Ordering::Relaxed);
            let watching = Watching(self.n_watches.clone());
            let port = req.into_inner().port + u32::from(self.has_turned.load(Ordering::Relaxed));
            let answers = stream::iter([Ok(answer(port))]).chain(stream::pending());
            Ok(Response::new(Box::pin(answers.inspect(move |_| {
                let _until_dropped = &watching;
            }))))
        }
    }

    fn ports_of(server: &Server, authority: &Authority, unknown: UnknownPolicy, idle: Duration) -> Ports {
        let backoff = Backoff {
            min: Duration::from_secs(3600),
            max: Duration::from_secs(3600),
            jitter: 0.0,
        };
        let channel = connector(authority.credentials(CLIENT), &Registry::new());
        let mut config = quick();
        config.backoff = backoff;
        let policies = Policies::new(
            channel.channel(server.target(mutual_tls()), config),
            Handle::current(),
            policies::Config {
                workload: "web".to_owned(),
                limits: StreamLimits::default(),
                inbound_backoff: backoff,
                outbound_backoff: backoff,
            },
        );
        let unreadable = unreadable::Families::new(&Registry::new());
        let limit = Duration::from_secs(10);
        Ports::new(policies, unknown, limit, PortSet::default(), idle, unreadable)
    }

    /// What a connection to a port comes to: whether it is permitted, or nothing if nobody knows.
    async fn ask(ports: &Ports, number: u16) -> Option<bool> {
        let port = ports.get(number);
        ports.wait_until_known(&port).await;
        let current = port.current();
        let client = [10, 0, 0, 1].into();
        let authorized = authorize(&current.policy.authorizations, client, ConnTls::NotTerminated);
        (!current.is_unknown).then_some(authorized.is_ok())
    }

    #[tokio::test]
    async fn what_was_said_of_three_hundred_ports_holds_while_the_control_plane_is_dead() {
        let authority = Authority::new();
        let creds = authority.credentials(CONTROL);
        let service = Service::default();
        let n_watches = service.n_watches.clone();
        let start = |addr| {
            Server::start(
                addr,
                Some(creds.clone()),
                InboundServerPoliciesServer::new(service.clone()),
            )
        };
        let server = start(([127, 0, 0, 1], 0).into()).await;
        let addr = server.addr;
        // Every port is idle at once, as after ten minutes.
        let ports = ports_of(&server, &authority, UnknownPolicy::Refuse, Duration::ZERO);
        for port in 1000..1300 {
            assert_eq!(ask(&ports, port).await, Some(port % 2 == 0), "{port}");
        }
        assert!(n_watches.load(Ordering::Relaxed) <= MAX_OTHER_WATCHES);
        server.stop().await;
        for round in 0..2 {
            for port in 1000..1300 {
                let permitted = timeout(2 * MAX_POLICY_WAIT, ask(&ports, port)).await;
                assert_eq!(permitted, Ok(Some(port % 2 == 0)), "{port}, round {round}");
            }
        }
        let began_at = Instant::now();
        assert_eq!(ask(&ports, 2000).await, None, "nobody has said anything of it");
        assert!(began_at.elapsed() >= MAX_POLICY_WAIT && began_at.elapsed() < 2 * MAX_POLICY_WAIT);

        let _server = start(addr).await;
        for port in [2000, 2001, 1000, 1001] {
            let permitted = timeout(Duration::from_secs(1), ask(&ports, port)).await;
            assert_eq!(permitted, Ok(Some(port % 2 == 0)), "{port}, within a second");
        }
    }

    #[tokio::test]
    async fn ports_that_refuse_somebody_are_the_last_whose_watch_ends() {
        let authority = Authority::new();
        let creds = authority.credentials(CONTROL);
        let addr = ([127, 0, 0, 1], 0).into();
        let server = Server::start(addr, Some(creds), InboundServerPoliciesServer::new(Service::default())).await;
        let ports = ports_of(&server, &authority, UnknownPolicy::Refuse, Duration::from_secs(3600));
        assert_eq!(ask(&ports, 1).await, Some(false));
        let n_even = u16::try_from(MAX_OTHER_WATCHES).unwrap() + 10;
        for port in 1..=n_even {
            assert_eq!(ask(&ports, 2 * port).await, Some(true), "{port}");
        }
        let mut watched = ports.each(|number, _| number);
        watched.sort_unstable();
        assert_eq!((watched.len(), watched[0]), (MAX_OTHER_WATCHES, 1));
        assert!(!watched.contains(&2), "the least used of those that permit everybody");
        assert_eq!(
            ports.state.lock().distinct.len(),
            1,
            "equal policies are remembered once"
        );
        assert_eq!(ask(&ports, 2).await, Some(true));
    }

    #[tokio::test]
    async fn connections_to_further_ports_are_judged_as_well_and_follow_their_policy() {
        let authority = Authority::new();
        let creds = authority.credentials(CONTROL);
        let addr = ([127, 0, 0, 1], 0).into();
        let service = Service::default();
        let server = Server::start(addr, Some(creds), InboundServerPoliciesServer::new(service.clone())).await;
        let mut ports = ports_of(&server, &authority, UnknownPolicy::Refuse, Duration::from_secs(3600));
        ports.ask_interval = MIN_RETRY_DELAY;
        let most = u16::try_from(MAX_OTHER_WATCHES).unwrap();
        let held: Vec<_> = (1..=most).map(|port| ports.get(port)).collect();
        for port in &held {
            ports.wait_until_known(port).await;
        }
        for port in 1000..1020 {
            assert_eq!(ask(&ports, port).await, Some(port % 2 == 0), "{port}");
        }
        let (port, same) = (ports.get(1000), ports.get(1000));
        assert!(Arc::ptr_eq(&port, &same), "asked for once");
        ports.wait_until_known(&port).await;
        let seen = port.current();
        service.has_turned.store(true, Ordering::Relaxed);
        timeout(Duration::from_secs(5), port.changed_from(&seen)).await.unwrap();
        assert_eq!(ask(&ports, 1000).await, Some(false));
        drop((port, same));
        server.stop().await;
        assert_eq!(ask(&ports, 1000).await, Some(false), "the last that was told");
        assert_eq!(ask(&ports, 1002).await, Some(true), "which it was of this one");
        assert_eq!(ports.each(|_, _| ()).len(), MAX_OTHER_WATCHES);
    }

    #[tokio::test]
    async fn the_environment_s_default_holds_at_once_where_it_is_asked_for() {
        let authority = Authority::new();
        let addr = ([127, 0, 0, 1], 0).into();
        let creds = authority.credentials(CONTROL);
        let server = Server::start(addr, Some(creds), InboundServerPoliciesServer::new(Service::default())).await;
        let everybody = || Current::new(decode::inbound::server_policy(answer(0)).unwrap());
        let defaults = Defaults {
            detect: everybody(),
            opaque: everybody(),
            opaque_ports: PortSet::default(),
        };
        let ports = ports_of(&server, &authority, UnknownPolicy::Default(defaults), Duration::ZERO);
        server.stop().await;
        let began_at = Instant::now();
        assert_eq!(ask(&ports, 1).await, Some(true));
        assert!(began_at.elapsed() < MAX_POLICY_WAIT);
    }

    #[test]
    fn what_was_used_of_a_rate_limit_stays_used_when_other_things_change() {
        let limited = |total, timeout| {
            let mut policy = ServerPolicy::invalid(Duration::from_secs(timeout));
            if let ServerProtocol::Detect { http, .. } = &mut policy.protocol {
                http.rate_limit = Some(Arc::new(RateLimit {
                    meta: Meta::default_named("limit"),
                    total: Some(total),
                    identity: None,
                    overrides: Vec::new(),
                }));
            }
            policy
        };
        let now = Instant::now();
        let is_free = |current: &Current| current.limiter.as_ref().unwrap().check(None, now).is_ok();
        let first = Current::new(limited(1, 1));
        assert!(is_free(&first) && !is_free(&first));
        let same = Current::after(Some(&first), limited(1, 1));
        assert!(Arc::ptr_eq(&same, &first));
        let changed = Current::after(Some(&first), limited(1, 2));
        assert!(!Arc::ptr_eq(&changed, &first) && !is_free(&changed));
        assert!(is_free(&Current::after(Some(&first), limited(2, 2))));
    }
}
