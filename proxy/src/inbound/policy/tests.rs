use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use futures_util::{Stream, StreamExt, future::join_all, stream};
use tokio::{runtime::Handle, time::timeout};
use tonic::{Request, Response, Status};
use tulle_core::{backoff::Backoff, metrics::Registry};
use tulle_proto::{
    convert::wire_duration,
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
        tests::{CLIENT, CONTROL, Server, connector, mutual_tls, test_config},
        watch::StreamLimits,
    },
    policy::{
        authz::{self, ConnectionTls},
        meta::Meta,
        rate_limit::RateLimit,
        server::ServerProtocol,
    },
    tls::tests::Authority,
};

/// A policy service that permits every client on even ports and none on odd ports. All are opaque, except port 5000, whose
/// protocol is detected for up to an hour.
#[derive(Clone, Default)]
struct Service {
    /// Number of open streams.
    n_watches: Arc<AtomicUsize>,
    /// Number of all streams, including those that have ended.
    n_opened: Arc<AtomicUsize>,
    /// Whether clients are permitted on odd ports instead of even ones.
    is_inverted: Arc<AtomicBool>,
    /// Whether all policies are denied to the proxy.
    denies: Arc<AtomicBool>,
}

struct WatchCountGuard(Arc<AtomicUsize>);

impl Drop for WatchCountGuard {
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
    let any_network = [
        ip_address::Ip::Ipv4(0),
        ip_address::Ip::Ipv6(IPv6 { first: 0, last: 0 }),
    ];
    let permit_all = Authz {
        networks: any_network.map(all).to_vec(),
        authentication: Some(Authn {
            permit: Some(authn::Permit::Unauthenticated(authn::PermitUnauthenticated {})),
        }),
        labels: BTreeMap::from([("name".to_owned(), "default:all-unauthenticated".to_owned())]),
        metadata: None,
    };
    let kind = match port {
        5000 => proxy_protocol::Kind::Detect(proxy_protocol::Detect {
            timeout: Some(wire_duration(Duration::from_secs(3600))),
            ..Default::default()
        }),
        _ => proxy_protocol::Kind::Opaque(proxy_protocol::Opaque {}),
    };
    Answer {
        protocol: Some(ProxyProtocol { kind: Some(kind) }),
        server_ips: Vec::new(),
        authorizations: if port.is_multiple_of(2) {
            vec![permit_all]
        } else {
            vec![]
        },
        labels: BTreeMap::from([("name".to_owned(), "default:test".to_owned())]),
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
        self.n_opened.fetch_add(1, Ordering::Relaxed);
        if self.denies.load(Ordering::Relaxed) {
            self.n_watches.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::permission_denied("another workload"));
        }
        let watching = WatchCountGuard(self.n_watches.clone());
        let port = req.into_inner().port + u32::from(self.is_inverted.load(Ordering::Relaxed));
        let answers = stream::iter([Ok(answer(port))]).chain(stream::pending());
        Ok(Response::new(Box::pin(answers.inspect(move |_| {
            let _until_dropped = &watching;
        }))))
    }
}

fn new_port_policies(
    server: &Server,
    authority: &Authority,
    initial_policy: InitialPolicy,
    idle: Duration,
) -> PortPolicies {
    let backoff = Backoff {
        min: Duration::from_secs(3600),
        max: Duration::from_secs(3600),
        jitter: 0.0,
    };
    let channel = connector(authority.credentials(CLIENT), &Registry::new());
    let mut config = test_config();
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
    let invalid_updates = invalid_updates::Families::new(&Registry::new());
    let config = PortPoliciesConfig {
        initial_policy,
        detect_timeout: Duration::from_secs(10),
        always_watched: PortSet::default(),
        idle_timeout: idle,
        is_listening: |_| true,
    };
    PortPolicies::new(policies, config, invalid_updates)
}

/// Policies of ports, of which ports 1 to 256 are watched: no further watch is free. The watches last while the returned port
/// policies are held.
async fn ports_without_free_watches(server: &Server, authority: &Authority) -> (PortPolicies, Vec<Arc<PortPolicy>>) {
    let ports = new_port_policies(server, authority, InitialPolicy::Refuse, Duration::from_secs(3600));
    let most = u16::try_from(MAX_ON_DEMAND_WATCHES).unwrap();
    let held: Vec<_> = (1..=most).map(|port| ports.watch_or_poll(port)).collect();
    for port in &held {
        ports.wait_until_received(port).await;
    }
    (ports, held)
}

async fn start_server(authority: &Authority, service: Service) -> Server {
    let (addr, creds) = (([127, 0, 0, 1], 0).into(), authority.credentials(CONTROL));
    Server::start(addr, Some(creds), InboundServerPoliciesServer::new(service)).await
}

/// Whether a client is authorized; `None` if the policy is unknown.
async fn authorize_client(ports: &PortPolicies, number: u16) -> Option<bool> {
    authorize(ports, [10, 0, 0, 1].into(), number).await
}

async fn authorize(ports: &PortPolicies, client: IpAddr, number: u16) -> Option<bool> {
    let target = ([10, 0, 0, 9], number).into();
    let current = ports.wait_for_policy(target, client).await.current();
    let authorized = authz::authorize(
        &current.server_policy.authorizations,
        client,
        ConnectionTls::NotTerminated,
    );
    (!current.is_unknown).then_some(authorized.is_ok())
}

#[tokio::test]
async fn policies_of_three_hundred_ports_stay_in_force_while_the_control_plane_is_down() {
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
    // An idle timeout of zero: every port is idle immediately.
    let ports = new_port_policies(&server, &authority, InitialPolicy::Refuse, Duration::ZERO);
    for port in 1000..1300 {
        assert_eq!(authorize_client(&ports, port).await, Some(port % 2 == 0), "{port}");
    }
    assert!(n_watches.load(Ordering::Relaxed) <= MAX_ON_DEMAND_WATCHES);
    server.stop().await;
    for round in 0..2 {
        for port in 1000..1300 {
            let permitted = timeout(2 * MAX_POLICY_WAIT, authorize_client(&ports, port)).await;
            assert_eq!(permitted, Ok(Some(port % 2 == 0)), "{port}, round {round}");
        }
    }
    let began_at = Instant::now();
    assert_eq!(authorize_client(&ports, 2000).await, None, "no policy is known");
    assert!(began_at.elapsed() >= MAX_POLICY_WAIT && began_at.elapsed() < 2 * MAX_POLICY_WAIT);

    let _server = start(addr).await;
    for port in [2000, 2001, 1000, 1001] {
        let permitted = timeout(Duration::from_secs(1), authorize_client(&ports, port)).await;
        assert_eq!(permitted, Ok(Some(port % 2 == 0)), "{port}, within a second");
    }
}

#[tokio::test]
async fn watches_of_restrictive_ports_are_evicted_last() {
    let authority = Authority::new();
    let server = start_server(&authority, Service::default()).await;
    let ports = new_port_policies(&server, &authority, InitialPolicy::Refuse, Duration::from_secs(3600));
    assert_eq!(authorize_client(&ports, 1).await, Some(false));
    let n_even = u16::try_from(MAX_ON_DEMAND_WATCHES).unwrap() + 10;
    for port in 1..=n_even {
        assert_eq!(authorize_client(&ports, 2 * port).await, Some(true), "{port}");
    }
    let mut watched = ports.map_ports(|number, _| number);
    watched.sort_unstable();
    assert_eq!((watched.len(), watched[0]), (MAX_ON_DEMAND_WATCHES, 1));
    assert!(
        !watched.contains(&2),
        "the least recently used port that permits every client"
    );
    assert_eq!(ports.table.lock().interned.len(), 1, "equal policies are stored once");
    assert_eq!(authorize_client(&ports, 2).await, Some(true));
}

#[tokio::test]
async fn ports_above_the_watch_limit_are_polled_and_authorized() {
    let authority = Authority::new();
    let service = Service::default();
    let server = start_server(&authority, service.clone()).await;
    let (mut ports, _held) = ports_without_free_watches(&server, &authority).await;
    ports.poll_interval = MIN_RETRY_DELAY;
    for port in 1000..1020 {
        assert_eq!(authorize_client(&ports, port).await, Some(port % 2 == 0), "{port}");
    }
    let (port, same) = (ports.watch_or_poll(1000), ports.watch_or_poll(1000));
    assert!(Arc::ptr_eq(&port, &same), "one poll for each port");
    ports.wait_until_received(&port).await;
    let seen = port.current();
    service.is_inverted.store(true, Ordering::Relaxed);
    timeout(Duration::from_secs(5), port.wait_changed(&seen)).await.unwrap();
    assert_eq!(authorize_client(&ports, 1000).await, Some(false));
    drop((port, same));
    server.stop().await;
    assert_eq!(
        authorize_client(&ports, 1000).await,
        Some(false),
        "the last known policy"
    );
    assert_eq!(
        authorize_client(&ports, 1002).await,
        Some(true),
        "each port has its own last known policy"
    );
    assert_eq!(ports.map_ports(|_, _| ()).len(), MAX_ON_DEMAND_WATCHES);
}

#[tokio::test]
async fn a_polled_port_is_watched_as_soon_as_a_watch_is_free_and_needs_no_turn() {
    let authority = Authority::new();
    let service = Service::default();
    let server = start_server(&authority, service.clone()).await;
    let (mut ports, mut held) = ports_without_free_watches(&server, &authority).await;
    ports.poll_interval = Duration::from_secs(3600);
    let polled = ports.watch_or_poll(1000);
    ports.wait_until_received(&polled).await;
    let no_turn = Rate {
        burst: 0,
        interval: Duration::from_secs(3600),
    };
    ports.watch_limiter = WatchLimiter::new(Rates {
        per_network: no_turn,
        shared: no_turn,
    });
    ports.is_listening = |_| false;
    assert_eq!(authorize_client(&ports, 1000).await, Some(true), "polled");
    assert_eq!(authorize_client(&ports, 1002).await, None, "neither watched nor polled");

    held.pop();
    assert_eq!(authorize_client(&ports, 1000).await, Some(true));
    assert!(ports.get_watched(1000).is_some());
    assert_eq!(ports.map_ports(|number, _| number).len(), MAX_ON_DEMAND_WATCHES);
}

#[tokio::test]
async fn polled_ports_with_connections_do_not_take_each_others_watch() {
    let authority = Authority::new();
    let service = Service::default();
    let server = start_server(&authority, service.clone()).await;
    let (mut ports, mut held) = ports_without_free_watches(&server, &authority).await;
    ports.poll_interval = Duration::from_secs(3600);
    let _polled = [ports.watch_or_poll(1000), ports.watch_or_poll(1002)];
    held.pop();
    for _ in 0..10 {
        for port in [1000, 1002] {
            assert_eq!(authorize_client(&ports, port).await, Some(true));
        }
    }
    assert!(ports.get_watched(1000).is_some() && ports.get_watched(1002).is_none());
    let n_opened = service.n_opened.load(Ordering::Relaxed);
    assert_eq!(n_opened, MAX_ON_DEMAND_WATCHES + 3, "two polls, and one more watch");
}

#[tokio::test]
async fn a_client_that_scans_ports_causes_few_streams_and_is_refused_beyond_them() {
    const BURST: u32 = 16;
    let authority = Authority::new();
    let (scanner, other) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
    for initial_policy in [InitialPolicy::Refuse, own_default_policies()] {
        let service = Service::default();
        let server = start_server(&authority, service.clone()).await;
        let mut ports = new_port_policies(&server, &authority, initial_policy, Duration::from_secs(3600));
        let rate = |burst| Rate {
            burst,
            interval: Duration::from_secs(3600),
        };
        ports.watch_limiter = WatchLimiter::new(Rates {
            per_network: rate(BURST),
            shared: rate(2 * BURST),
        });
        ports.is_listening = |target| target.port() >= 4000;
        let scanned = join_all((1000..2000).map(|port| authorize(&ports, scanner, port))).await;
        let n_known = scanned.iter().flatten().count();
        assert_eq!(n_known, BURST as usize, "the others are refused");
        assert_eq!(ports.not_watched.unknown_policy_error().cause(), "port-not-watched");
        assert_eq!(authorize(&ports, other, 3000).await, Some(true));
        assert_eq!(authorize(&ports, scanner, 3000).await, Some(true), "already watched");
        let n_opened = service.n_opened.load(Ordering::Relaxed);
        assert!(n_opened <= BURST as usize + 1, "{n_opened}");
        assert_eq!(
            authorize(&ports, scanner, 4000).await,
            Some(true),
            "an application listens"
        );
    }
}

#[tokio::test]
async fn a_denied_port_has_a_cause_of_its_own_until_the_control_plane_permits_it() {
    let authority = Authority::new();
    let service = Service::default();
    let server = start_server(&authority, service.clone()).await;
    let ports = new_port_policies(&server, &authority, InitialPolicy::Refuse, Duration::from_secs(3600));
    service.denies.store(true, Ordering::Relaxed);
    let port = ports.watch_or_poll(2000);
    assert_eq!(port.unknown_policy_error().cause(), "policy_unknown", "no answer yet");
    let mut policy_rx = port.policy_rx.clone();
    let refused = policy_rx.wait_for(|state| matches!(state, WatchState::Refused(_)));
    drop(timeout(Duration::from_secs(5), refused).await.unwrap().unwrap());
    assert!(port.current().is_unknown);
    let error = port.unknown_policy_error();
    assert_eq!(error.cause(), "discovery-denied");
    assert!(!error.to_string().contains("another workload"), "{error}");

    service.denies.store(false, Ordering::Relaxed);
    assert_eq!(authorize_client(&ports, 2000).await, Some(true));
}

fn own_default_policies() -> InitialPolicy {
    let permit_all = || ActivePolicy::new(decode::inbound::server_policy(answer(0)).unwrap());
    InitialPolicy::Default(DefaultPolicies {
        detect: permit_all(),
        opaque: permit_all(),
        opaque_ports: PortSet::default(),
    })
}

#[tokio::test]
async fn the_proxys_own_default_policy_applies_without_waiting() {
    let authority = Authority::new();
    let server = start_server(&authority, Service::default()).await;
    let ports = new_port_policies(&server, &authority, own_default_policies(), Duration::ZERO);
    server.stop().await;
    let began_at = Instant::now();
    assert_eq!(authorize_client(&ports, 1).await, Some(true));
    assert!(began_at.elapsed() < MAX_POLICY_WAIT);
}

#[tokio::test]
async fn the_proxys_own_setting_caps_the_detection_timeout_of_policies() {
    let authority = Authority::new();
    let server = start_server(&authority, Service::default()).await;
    let ports = new_port_policies(&server, &authority, InitialPolicy::Refuse, Duration::ZERO);
    let (port, own) = (ports.watch_or_poll(5000), ports.detect_timeout);
    ports.wait_until_received(&port).await;
    let protocol = port.current().server_policy.protocol.clone();
    assert!(
        matches!(protocol, ServerProtocol::Detect { timeout, .. } if timeout == own),
        "{protocol:?}"
    );
}

#[test]
fn rate_limiter_state_survives_unrelated_policy_changes() {
    let limited = |total, timeout| {
        let mut policy = ServerPolicy::invalid(Duration::from_secs(timeout));
        if let ServerProtocol::Detect { http, .. } = &mut policy.protocol {
            http.rate_limit = Some(Arc::new(RateLimit {
                meta: Meta::default_named("limit"),
                total: Some(total),
                per_identity: None,
                overrides: Vec::new(),
            }));
        }
        policy
    };
    let now = Instant::now();
    let is_free = |current: &ActivePolicy| current.rate_limiter.as_ref().unwrap().check(None, now).is_ok();
    let first = ActivePolicy::new(limited(1, 1));
    assert!(is_free(&first) && !is_free(&first));
    let same = ActivePolicy::updated_from(Some(&first), limited(1, 1));
    assert!(Arc::ptr_eq(&same, &first));
    let changed = ActivePolicy::updated_from(Some(&first), limited(1, 2));
    assert!(!Arc::ptr_eq(&changed, &first) && !is_free(&changed));
    assert!(is_free(&ActivePolicy::updated_from(Some(&first), limited(2, 2))));
}
