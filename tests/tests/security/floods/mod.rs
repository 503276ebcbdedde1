//! Floods of every listening port: while attackers hold as many connections as they can, well-behaved clients get every
//! response, open connections of meshed clients stay open, and no process uses more memory than a pod has.
//! With `TULLE_TEST_FULL=1` floods run one after another, and each response takes less than a second, if nothing else runs on the
//! machine.
//!
//! Each port has well-behaved clients of its own, and is flooded in every way, from one address and from two hundred. Ports with
//! TLS are also flooded by attackers that complete the handshake, with and without an identity. Floods of different listeners run
//! at the same time, those of one listener one after another: eviction starts with clients that have several connections, and the
//! well-behaved clients share one address.
//!
//! Large request heads that do not end need more connections, so they flood a sidecar that may open more files.

mod attackers;
mod clients;
mod held;
mod insecure_tls;
mod reviews;
mod testbed;
mod tls_attackers;
mod webhooks;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::time::Instant;
use tulle_bench::run::process::Process;
use tulle_tests::credentials::{control_plane_identity, identity};

use attackers::{Behaviour, Flood, Sources};
use clients::{GrpcClient, GrpcRequest, NormalClient};
use held::{HeldConnections, MeshedClient, MeshedHttp};
use testbed::{CONTROL, SERVER, Testbed, v6};
use tls_attackers::{TlsAttack, TlsBehaviour};

/// One port: the target of the flood, and the well-behaved clients.
pub(crate) struct FloodedPort<'a> {
    pub(crate) name: &'static str,
    pub(crate) addr: SocketAddr,
    /// Ports with the same name here share a connection limit, or a well-behaved client.
    pub(crate) listener: &'static str,
    pub(crate) clients: Vec<NormalClient<'a>>,
    /// Clients whose connections are open before each flood.
    pub(crate) held: Vec<MeshedClient<'a>>,
    /// Attackers that use TLS.
    pub(crate) tls: Vec<TlsAttack>,
    pub(crate) sources: &'static [Sources],
}

/// One flood of a port.
pub(crate) struct FloodCase<'r, 'a> {
    port: &'r FloodedPort<'a>,
    behaviour: Behaviour<'r>,
    from: Sources,
    n: usize,
}

#[test]
fn every_port_answers_other_clients_during_floods() {
    if !testbed::can_run() {
        return;
    }
    raise_open_file_limit();
    let mut testbed = Testbed::build();
    flood_every_port(&testbed);
    flood_with_large_heads(&mut testbed);
}

fn flood_every_port(testbed: &Testbed) {
    let (client, server, control) = (&testbed.client, &testbed.server, &testbed.control);
    let of_server = |port| (SERVER, port).into();
    let of_server6 = |port| (v6(SERVER), port).into();
    let of_control = |port| (CONTROL, port).into();
    let of_control6 = |port| (v6(CONTROL), port).into();
    let get = |addr, path| NormalClient::http(client, addr, path, 200);
    let probes = |addr| vec![get(addr, "/live"), get(addr, "/ready")];
    let application = |addr| vec![get(addr, "/")];
    let grpc = |server, leaf| GrpcClient {
        server,
        anchors: &testbed.anchors,
        leaf,
    };
    let identity_client = grpc(control_plane_identity("linkerd-identity"), None);
    let proxy = grpc(control_plane_identity("linkerd-destination"), Some(&testbed.leaf));
    let tap = grpc(identity("server"), Some(&testbed.tap_leaf));
    let certify = |addr| {
        vec![NormalClient::grpc(
            client,
            addr,
            identity_client.clone(),
            GrpcRequest::Certify,
        )]
    };
    let of_proxy = |addr, request| NormalClient::grpc(client, addr, proxy.clone(), request);
    let held_grpc = |addr, request| vec![MeshedClient::grpc(client, addr, proxy.clone(), request)];
    let held_http = |addr, path, config, prefix| {
        let http = MeshedHttp {
            config,
            server: testbed::server_name(identity("server")),
            prefix,
            path,
        };
        MeshedClient::http(client, addr, http)
    };
    let held_in_tls = |addr, path| held_http(addr, path, testbed.client_config(), Vec::new());
    let both = |strangers: TlsAttack| vec![testbed.peers(&strangers), strangers];
    let port = |name, listener, addr, clients| FloodedPort {
        name,
        addr,
        listener,
        clients,
        held: Vec::new(),
        tls: Vec::new(),
        sources: Sources::ALL,
    };
    let in_tls = |name, listener, addr, clients, held, tls| FloodedPort {
        held,
        tls,
        ..port(name, listener, addr, clients)
    };
    // What depends on the address family is the network of a client.
    let ipv6 = |port| FloodedPort {
        sources: &[Sources::TwoHundred],
        ..port
    };
    let admin = |name, addr| {
        let held = vec![held_in_tls(addr, "/ready")];
        in_tls(
            name,
            "admin",
            addr,
            probes(addr),
            held,
            both(Testbed::strangers_of_server("/live")),
        )
    };
    let taps = |name, addr| {
        let clients = prepend(
            NormalClient::grpc(client, addr, tap.clone(), GrpcRequest::Tap),
            probes(of_server(4191)),
        );
        let tapped = get(of_server(testbed::HTTP), clients::TAPPED_PATH);
        let held = vec![MeshedClient::tap(client, addr, tap.clone(), tapped)];
        let tls = both(Testbed::strangers_of_server("/io.linkerd.proxy.tap.Tap/Observe"));
        in_tls(name, "admin", addr, clients, held, tls)
    };
    let inbound = |name, addr| {
        let tls = both(Testbed::strangers_of_server("/echo"));
        // No identity counts on this port, so a flood can end an idle connection of a meshed client.
        in_tls(name, "inbound", addr, application(addr), Vec::new(), tls)
    };
    let direct = in_tls(
        "4143, itself",
        "inbound",
        of_server(4143),
        application(of_server(testbed::HTTP)),
        Vec::new(),
        vec![
            testbed::direct(
                testbed.peers(&Testbed::strangers_of_server("/echo")),
                tls_attackers::ON_HTTP2,
            ),
            testbed::direct(Testbed::strangers_of_server("/echo"), &[TlsBehaviour::Silent]),
        ],
    );
    let outbound = |name, addr| {
        let to_client = NormalClient::http(server, (testbed::CLIENT, testbed::HTTP).into(), "/", 200);
        port(name, "outbound", addr, vec![to_client])
    };
    let identity_port = |name, addr| {
        let tls = Testbed::strangers_of_control("linkerd-identity", "/io.linkerd.proxy.identity.Identity/Certify");
        in_tls(name, "identity", addr, certify(addr), Vec::new(), vec![tls])
    };
    let destination = |name, addr| {
        let clients = prepend(of_proxy(addr, GrpcRequest::Destination), probes(of_control(9996)));
        let held = held_grpc(addr, GrpcRequest::Destination);
        let tls = Testbed::strangers_of_control("linkerd-destination", "/io.linkerd.proxy.destination.Destination/Get");
        in_tls(name, "destination", addr, clients, held, both(tls))
    };
    let policy = |name, addr| {
        let held = held_grpc(addr, GrpcRequest::Policy);
        let path = "/io.linkerd.proxy.inbound.InboundServerPolicies/WatchPort";
        let tls = both(Testbed::strangers_of_control("linkerd-destination", path));
        in_tls(
            name,
            "policy",
            addr,
            vec![of_proxy(addr, GrpcRequest::Policy)],
            held,
            tls,
        )
    };
    let telemetry = NormalClient::http(control, ([127, 0, 0, 1], 8089).into(), "/", 404);
    let ports = [
        admin("4191, admin", of_server(4191)),
        admin("4191, by IPv6", of_server6(4191)),
        taps("4190, tap", of_server(4190)),
        ipv6(taps("4190, by IPv6", of_server6(4190))),
        inbound("4143, by redirect", of_server(testbed::HTTP)),
        inbound("4143, by redirect of IPv6", of_server6(testbed::HTTP)),
        direct,
        outbound("4140, itself", of_server(4140)),
        ipv6(outbound("4140, by IPv6", of_server6(4140))),
        identity_port("8080, identity", of_control(8080)),
        ipv6(identity_port("8080, by IPv6", of_control6(8080))),
        destination("8086, destination", of_control(8086)),
        ipv6(destination("8086, by IPv6", of_control6(8086))),
        policy("8090, policy", of_control(8090)),
        ipv6(policy("8090, by IPv6", of_control6(8090))),
        port(
            "9990, admin of identity and policy",
            "9990",
            of_control(9990),
            probes(of_control(9990)),
        ),
        ipv6(port(
            "9990, by IPv6",
            "9990",
            of_control6(9990),
            probes(of_control6(9990)),
        )),
        port(
            "9996, admin of destination",
            "destination",
            of_control(9996),
            probes(of_control(9996)),
        ),
        ipv6(port(
            "9996, by IPv6",
            "destination",
            of_control6(9996),
            probes(of_control6(9996)),
        )),
        port("8089, telemetry", "telemetry", of_control(8089), vec![telemetry]),
    ];
    let many = ["4191, admin", "4190, tap", "8086, destination"];
    let floods = ports
        .iter()
        .flat_map(|port| flood_cases(port, many.contains(&port.name)));
    run(floods.collect(), &testbed.flooded(), |flood| {
        testbed.attackers.run(flood).unwrap()
    });
}

/// Floods the inbound port on many connections. In total their heads are larger than the memory for heads. In a full run the port has
/// almost as many connections as it permits, and the heads are larger than the whole memory of the sidecar, if it may open 18,000
/// files; a sidecar without optimization needs seconds to read them, so the other runs have fewer.
fn flood_with_large_heads(testbed: &mut Testbed) {
    let max_connections = testbed.restart_sidecar_with_many_files();
    let n_connections = max_connections.saturating_sub(N_CONNECTIONS_OF_OTHERS);
    let n_connections = match is_full_run() {
        true => n_connections,
        false => n_connections.min(N_LARGE_HEADS),
    };
    let addr = (SERVER, testbed::HTTP).into();
    let port = FloodedPort {
        name: "4143, with many connections",
        addr,
        listener: "inbound",
        clients: vec![NormalClient::http(&testbed.client, addr, "/", 200)],
        held: Vec::new(),
        tls: Vec::new(),
        sources: Sources::ALL,
    };
    let cases_from = |from: &Sources| {
        Behaviour::LARGE_HEADS.map(|behaviour| FloodCase {
            port: &port,
            behaviour,
            from: *from,
            n: n_connections,
        })
    };
    run(
        port.sources.iter().flat_map(cases_from).collect(),
        &testbed.flooded(),
        |flood| testbed.attackers.run(flood).unwrap(),
    );
}

fn prepend<'a>(first: NormalClient<'a>, others: Vec<NormalClient<'a>>) -> Vec<NormalClient<'a>> {
    [first].into_iter().chain(others).collect()
}

/// All floods of a port; `many` adds 4,000 idle connections.
pub(crate) fn flood_cases<'r, 'a>(port: &'r FloodedPort<'a>, many: bool) -> Vec<FloodCase<'r, 'a>> {
    let mut cases = Vec::new();
    for from in port.sources {
        let mut add = |behaviour, n| {
            cases.push(FloodCase {
                port,
                behaviour,
                from: *from,
                n,
            });
        };
        for behaviour in Behaviour::WITHOUT_TLS {
            add(behaviour, 400);
        }
        for attack in &port.tls {
            for behaviour in attack.behaviours {
                add(Behaviour::InsideTls(attack, *behaviour), behaviour.n_connections());
            }
        }
        if many {
            add(Behaviour::Silent, N_IDLE_CONNECTIONS);
        }
    }
    cases
}

/// Runs floods of some processes, and asserts that well-behaved clients get responses meanwhile, and that the processes do not use
/// too much memory. `start` starts a flood in the namespace of the attackers.
pub(crate) fn run(
    cases: Vec<FloodCase<'_, '_>>,
    flooded: &[&Process],
    start: impl Fn(&mut (dyn FnMut() + Send)) + Sync,
) {
    let began_at = Instant::now();
    let mut by_listener = BTreeMap::<_, Vec<_>>::new();
    for case in &cases {
        by_listener.entry(case.port.listener).or_default().push(case);
    }
    let run_all =
        |cases: &[&FloodCase<'_, '_>]| -> Vec<String> { cases.iter().flat_map(|case| case.run(&start)).collect() };
    let mut failures: Vec<_> = match is_full_run() {
        true => by_listener.values().flat_map(|cases| run_all(cases)).collect(),
        false => thread::scope(|scope| {
            let running: Vec<_> = by_listener
                .values()
                .map(|cases| scope.spawn(|| run_all(cases)))
                .collect();
            let failures = running.into_iter().flat_map(|running| running.join().unwrap());
            failures.collect()
        }),
    };
    eprintln!("{} floods in {:?}", cases.len(), began_at.elapsed());
    failures.extend(flooded.iter().filter_map(|process| testbed::memory_fault(process)));
    let log_tail = |process: &&Process| format!("end of the log of {}:\n{}", process.name(), process.log_tail());
    assert!(
        failures.is_empty(),
        "{} of them:\n{}\n\n{}",
        failures.len(),
        failures[..failures.len().min(MAX_LISTED_FAILURES)].join("\n"),
        flooded.iter().map(log_tail).collect::<Vec<_>>().join("\n\n"),
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
        let flood_name = format!("{} of {n} {behaviour:?} from {from:?}", port.name);
        let held: Vec<_> = port
            .held
            .iter()
            .map(|client| {
                client
                    .open()
                    .unwrap_or_else(|error| panic!("before {flood_name}: {error:#}"))
            })
            .collect();
        let use_held = |failures: &mut Vec<String>, when: &str| {
            let use_all = |held: &HeldConnections<'_>| Some(format!("{held}: {:#}", held.use_all().err()?));
            let errors = held.iter().filter_map(use_all);
            failures.extend(errors.map(|error| format!("{flood_name}: {when}: {error}")));
        };
        use_held(&mut failures, "before");
        let mut flood = None;
        start(&mut || flood = Some(Flood::start(port.addr, *behaviour, *from, *n)));
        let flood = flood.expect("the flood has run");
        assert!(flood.n_connections() > 0, "{flood_name}: no connection at all");
        let mut slowest = vec![Duration::ZERO; port.clients.len()];
        let bound = max_response_time();
        for round in 0..ROUNDS {
            flood.wait_before_round(round);
            for (client, slowest) in port.clients.iter().zip(&mut slowest) {
                let asked_at = Instant::now();
                let answer = client.ask();
                let took = asked_at.elapsed();
                *slowest = took.max(*slowest);
                if answer.is_err() || took >= bound {
                    failures.push(format!(
                        "{flood_name}: {client} in round {round} took {took:?}: {}",
                        answer.map_or_else(|error| format!("{error:#}"), |()| "answered".to_owned())
                    ));
                }
            }
            use_held(&mut failures, &format!("in round {round}"));
        }
        if *n == N_IDLE_CONNECTIONS {
            for (client, slowest) in port.clients.iter().zip(slowest) {
                eprintln!("{flood_name}: {client} took {slowest:?}");
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
    match is_full_run() {
        true => Duration::from_secs(1),
        false => Duration::MAX, // the client has its own timeout
    }
}

fn is_full_run() -> bool {
    std::env::var_os("TULLE_TEST_FULL").is_some()
}

/// Requests of each well-behaved client during a flood; for slow floods, one after each further byte.
const ROUNDS: usize = 2;
const N_IDLE_CONNECTIONS: usize = 4000;
/// Connections below the limit of a port that are left for well-behaved clients.
const N_CONNECTIONS_OF_OTHERS: usize = 100;
/// 60 MB, which is twice the memory for heads.
const N_LARGE_HEADS: usize = 1_000;
const MAX_LISTED_FAILURES: usize = 50;
