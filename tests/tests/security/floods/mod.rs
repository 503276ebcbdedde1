//! Floods of every listening port: while attackers hold as many connections as they can, well-behaved clients get every
//! response. With `TULLE_TEST_FULL=1` each response takes less than a second, if nothing else runs on the machine.
//!
//! Each port has well-behaved clients of its own, and is flooded in every way, from one address and from two hundred. Ports with
//! client identities are also flooded by peers with one. Floods run one after another: eviction starts with clients that have
//! several connections, and the well-behaved clients share one address.

mod attackers;
mod clients;
mod insecure_tls;
mod testbed;
mod webhooks;

use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::time::Instant;

use attackers::{Behaviour, Flood, Peers, Sources};
use clients::NormalClient;
use testbed::{CONTROL, SERVER, Testbed, v6};

/// One port: the target of the flood, and the well-behaved clients.
pub(crate) struct FloodedPort<'a> {
    pub(crate) name: &'static str,
    pub(crate) addr: std::net::SocketAddr,
    pub(crate) clients: Vec<NormalClient<'a>>,
    /// Peers with an identity, for ports that accept one.
    pub(crate) peers: Option<Peers>,
}

/// One flood of a port.
pub(crate) struct FloodCase<'r, 'a> {
    port: &'r FloodedPort<'a>,
    behaviour: Behaviour,
    from: Sources,
    n: usize,
}

#[test]
fn every_port_answers_other_clients_during_floods() {
    if !testbed::can_run() {
        return;
    }
    raise_open_file_limit();
    let testbed = Testbed::build();
    let leaf = &testbed.leaf;
    let of_server = |port| (SERVER, port).into();
    let of_server6 = |port| (v6(SERVER), port).into();
    let of_control = |port| (CONTROL, port).into();
    let get = |addr, path| NormalClient::http(&testbed.client, addr, path, 200);
    let probes = |addr| vec![get(addr, "/live"), get(addr, "/ready")];
    let port = |name, addr, clients| FloodedPort {
        name,
        addr,
        clients,
        peers: None,
    };
    let port_for_peers = |name, addr, clients| FloodedPort {
        peers: Some(testbed.peers.clone()),
        ..port(name, addr, clients)
    };
    let ports = [
        port("4191, admin", of_server(4191), probes(of_server(4191))),
        port("4191, by IPv6", of_server6(4191), probes(of_server6(4191))),
        port(
            "4190, tap",
            of_server(4190),
            prepend(
                NormalClient::http2(&testbed.client, of_server(4190)),
                probes(of_server(4191)),
            ),
        ),
        port(
            "4143, by redirect",
            of_server(testbed::HTTP),
            vec![get(of_server(testbed::HTTP), "/")],
        ),
        port(
            "4143, by redirect of IPv6",
            of_server6(testbed::HTTP),
            vec![get(of_server6(testbed::HTTP), "/")],
        ),
        port(
            "4143, itself",
            of_server(4143),
            vec![get(of_server(testbed::HTTP), "/")],
        ),
        port(
            "4140, itself",
            of_server(4140),
            vec![NormalClient::http(
                &testbed.server,
                (testbed::CLIENT, testbed::HTTP).into(),
                "/",
                200,
            )],
        ),
        port(
            "8080, identity",
            of_control(8080),
            vec![NormalClient::certify(
                &testbed.client,
                of_control(8080),
                &testbed.anchors,
            )],
        ),
        port_for_peers(
            "8086, destination",
            of_control(8086),
            prepend(
                NormalClient::destination(&testbed.client, of_control(8086), &testbed.anchors, leaf),
                probes(of_control(9996)),
            ),
        ),
        port_for_peers(
            "8090, policy",
            of_control(8090),
            vec![NormalClient::policy(
                &testbed.client,
                of_control(8090),
                &testbed.anchors,
                leaf,
            )],
        ),
        port(
            "9990, admin of identity and policy",
            of_control(9990),
            probes(of_control(9990)),
        ),
        port("9996, admin of destination", of_control(9996), probes(of_control(9996))),
        port(
            "8089, telemetry",
            of_control(8089),
            vec![NormalClient::http(
                &testbed.control,
                ([127, 0, 0, 1], 8089).into(),
                "/",
                404,
            )],
        ),
    ];
    let many = ["4191, admin", "4190, tap", "8086, destination"];
    let floods = ports
        .iter()
        .flat_map(|port| flood_cases(port, many.contains(&port.name)));
    run(floods.collect(), |flood| testbed.attackers.run(flood).unwrap());
}

fn prepend<'a>(first: NormalClient<'a>, others: Vec<NormalClient<'a>>) -> Vec<NormalClient<'a>> {
    [first].into_iter().chain(others).collect()
}

/// All floods of a port; `many` adds 4,000 idle connections.
pub(crate) fn flood_cases<'r, 'a>(port: &'r FloodedPort<'a>, many: bool) -> Vec<FloodCase<'r, 'a>> {
    let mut cases = Vec::new();
    for from in [Sources::OneAddress, Sources::TwoHundred] {
        let mut add = |behaviour, n| {
            cases.push(FloodCase {
                port,
                behaviour,
                from,
                n,
            });
        };
        for behaviour in Behaviour::OF_UNMESHED_CLIENTS {
            add(behaviour, 400);
        }
        if port.peers.is_some() {
            add(Behaviour::Verified, 400);
        }
        if many {
            add(Behaviour::Silent, N_IDLE_CONNECTIONS);
        }
    }
    cases
}

/// Runs floods and asserts that well-behaved clients get responses meanwhile. `start` starts a flood in the namespace
/// of the attackers.
pub(crate) fn run(cases: Vec<FloodCase<'_, '_>>, start: impl Fn(&mut (dyn FnMut() + Send)) + Sync) {
    let began_at = Instant::now();
    let failures: Vec<_> = cases.iter().flat_map(|case| case.run(&start)).collect();
    eprintln!("{} floods in {:?}", cases.len(), began_at.elapsed());
    assert!(
        failures.is_empty(),
        "{} of them:\n{}",
        failures.len(),
        failures[..failures.len().min(MAX_LISTED_FAILURES)].join("\n")
    );
}

impl FloodCase<'_, '_> {
    /// Runs the flood and the clients; returns the failures.
    fn run(&self, start: impl Fn(&mut (dyn FnMut() + Send))) -> Vec<String> {
        let Self {
            port,
            behaviour,
            from,
            n,
        } = self;
        let mut failures = Vec::new();
        let mut flood = None;
        start(&mut || flood = Some(Flood::start(port.addr, *behaviour, *from, *n, port.peers.as_ref())));
        let flood = flood.expect("the flood has run");
        assert!(flood.n_connections() > 0, "{}: no connection at all", port.name);
        let mut slowest = vec![Duration::ZERO; port.clients.len()];
        let bound = max_response_time();
        for round in 0..ROUNDS {
            flood.wait_for_byte();
            for (client, slowest) in port.clients.iter().zip(&mut slowest) {
                let asked_at = Instant::now();
                let answer = client.ask();
                let took = asked_at.elapsed();
                *slowest = took.max(*slowest);
                if answer.is_err() || took >= bound {
                    failures.push(format!(
                        "{} of {n} {behaviour:?} from {from:?}: {client} in round {round} took {took:?}: {}",
                        port.name,
                        answer.map_or_else(|error| format!("{error:#}"), |()| "answered".to_owned())
                    ));
                }
            }
        }
        if *n == N_IDLE_CONNECTIONS {
            for (client, slowest) in port.clients.iter().zip(slowest) {
                eprintln!(
                    "{}, {n} {behaviour:?} from {from:?}: {client} took {slowest:?}",
                    port.name
                );
            }
        }
        failures
    }
}

pub(crate) fn raise_open_file_limit() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

/// The maximum time for a response to a well-behaved client.
fn max_response_time() -> Duration {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => Duration::from_secs(1),
        None => Duration::MAX, // the client has its own timeout
    }
}

/// Requests of each well-behaved client during a flood; for slow floods, one after each further byte.
const ROUNDS: usize = 2;
const N_IDLE_CONNECTIONS: usize = 4000;
const MAX_LISTED_FAILURES: usize = 50;
