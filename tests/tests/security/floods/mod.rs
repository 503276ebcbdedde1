//! Floods of every listening port: while attackers hold as many connections as they can, well-behaved clients get every
//! response, open connections of meshed clients stay open, and no process uses more memory than a pod has.
//! With `TULLE_TEST_FULL=1` floods run one after another, and each response takes less than a second, if nothing else runs on the
//! machine; during floods with large heads only if the sidecar is built with optimization.
//!
//! Each port has well-behaved clients of its own, and is flooded in every way, from one address and from two hundred. By IPv6,
//! most ports are flooded from two hundred only. Ports with TLS are also flooded by attackers that complete the handshake, with
//! and without an identity. Floods of different groups run at the same time, those of one group one after another: eviction
//! starts with clients that have several connections, and the well-behaved clients share one address.
//!
//! Large request heads that do not end need more connections, so they flood a sidecar that may open more files.

mod attackers;
mod clients;
mod held;
mod insecure_tls;
mod ports;
mod reviews;
mod testbed;
mod tls_attackers;
mod webhooks;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::time::Instant;
use tulle_bench::run::process::Process;

use attackers::{Behaviour, Flood, Sources};
use clients::WellBehavedClient;
use held::HeldConnections;
use ports::{FloodedPort, ports_of_the_control_plane, ports_of_the_sidecar};
use testbed::{SERVER, Testbed};

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
    let mut ports = ports_of_the_sidecar(testbed);
    ports.extend(ports_of_the_control_plane(testbed));
    let many = ["4191, admin", "4190, tap", "8086, destination"];
    let floods = ports
        .iter()
        .flat_map(|port| flood_cases(port, many.contains(&port.name)));
    run(floods.collect(), &testbed.flooded(), |flood| {
        testbed.attackers.run(flood).unwrap()
    });
}

/// Floods the inbound port on many connections. In total their heads are larger than the memory for heads. In a full run the port
/// has almost as many connections as it permits, and the heads are larger than the whole memory of the sidecar, if it may open
/// at least 18,000 files. A sidecar without optimization needs seconds to read them, so runs with such a sidecar have fewer.
fn flood_with_large_heads(testbed: &mut Testbed) {
    let max_connections = testbed.restart_sidecar_with_many_files();
    let n_connections = max_connections.saturating_sub(N_CONNECTIONS_OF_OTHERS);
    let n_connections = match is_full_run() && !cfg!(debug_assertions) {
        true => n_connections,
        false => n_connections.min(N_LARGE_HEADS),
    };
    let addr = (SERVER, testbed::HTTP).into();
    let clients = vec![WellBehavedClient::http(&testbed.client, addr, "/", 200)];
    let port = FloodedPort::new("4143, with many connections", "inbound", addr, clients);
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

/// All floods of a port; with `many`, also one with 4,000 silent connections.
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
        for behaviour in Behaviour::WITHOUT_TLS_HANDSHAKE {
            add(behaviour, 400);
        }
        for attack in &port.tls {
            for behaviour in attack.behaviours {
                add(Behaviour::InsideTls(attack, *behaviour), behaviour.n_connections());
            }
        }
        if many {
            add(Behaviour::Silent, N_SILENT_CONNECTIONS);
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
    let mut by_group = BTreeMap::<_, Vec<_>>::new();
    for case in &cases {
        by_group.entry(case.port.serial_group).or_default().push(case);
    }
    let run_all =
        |cases: &[&FloodCase<'_, '_>]| -> Vec<String> { cases.iter().flat_map(|case| case.run(&start)).collect() };
    let mut failures: Vec<_> = match is_full_run() {
        true => by_group.values().flat_map(|cases| run_all(cases)).collect(),
        false => thread::scope(|scope| {
            let running: Vec<_> = by_group.values().map(|cases| scope.spawn(|| run_all(cases))).collect();
            let failures = running.into_iter().flat_map(|running| running.join().unwrap());
            failures.collect()
        }),
    };
    eprintln!("{} floods in {:?}", cases.len(), began_at.elapsed());
    failures.extend(flooded.iter().filter_map(|process| testbed::memory_fault(process)));
    let log_tail = |process: &&Process| format!("end of the log of {}:\n{}", process.name(), process.log_tail());
    assert!(
        failures.is_empty(),
        "{} failures:\n{}\n\n{}",
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
        let flood_name = format!("{} at {} of {n} {behaviour:?} from {from:?}", port.name, port.addr);
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
        let bound = max_response_time(*behaviour);
        for round in 0..ROUNDS {
            flood.wait_before_round(round);
            for (client, slowest) in port.clients.iter().zip(&mut slowest) {
                let asked_at = Instant::now();
                let answer = client.send_and_check();
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
        if *n == N_SILENT_CONNECTIONS {
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

/// The maximum time for a response to a well-behaved client. A sidecar without optimization needs seconds to read large heads.
fn max_response_time(behaviour: Behaviour<'_>) -> Duration {
    let is_slow = cfg!(debug_assertions) && matches!(behaviour, Behaviour::LargeHead | Behaviour::LargeHeaderBlock);
    match is_full_run() && !is_slow {
        true => Duration::from_secs(1),
        false => Duration::MAX, // the client has its own timeout
    }
}

fn is_full_run() -> bool {
    std::env::var_os("TULLE_TEST_FULL").is_some()
}

/// Requests of each well-behaved client during a flood; for slow floods, one after each further byte.
const ROUNDS: usize = 2;
const N_SILENT_CONNECTIONS: usize = 4000;
/// Connections below the limit of a port that are left for well-behaved clients.
const N_CONNECTIONS_OF_OTHERS: usize = 100;
/// 60 MB, which is twice the memory for heads.
const N_LARGE_HEADS: usize = 1_000;
const MAX_LISTED_FAILURES: usize = 50;
