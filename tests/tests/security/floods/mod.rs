//! Floods of every listening port: while strangers hold all the connections that they can, others get every answer within a
//! second.
//!
//! A row is a port, and what a well-behaved client asks there. Each row is flooded in every way, from one address and from two
//! hundred. Rows run at the same time, a few at once.

mod clients;
mod scene;
mod strangers;
mod webhooks;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::time::Instant;

use clients::Good;
use scene::{CONTROL, SERVER, Scene};
use strangers::{Behaviour, Flood, Sources};

/// One port: where strangers dial, and what others ask meanwhile.
pub(crate) struct Row<'a> {
    pub(crate) name: &'static str,
    pub(crate) port: std::net::SocketAddr,
    pub(crate) good: Vec<Good<'a>>,
}

#[test]
#[ignore = "some clients of the ports of a proxy still lose their connection to a flood"]
fn every_port_answers_others_while_strangers_flood_it() {
    if !scene::can_run() {
        return;
    }
    raise_limit_of_files();
    let scene = Scene::build();
    let leaf = &scene.leaf;
    let of_server = |port| (SERVER, port).into();
    let of_control = |port| (CONTROL, port).into();
    let get = |addr, path| Good::http(&scene.good, addr, path);
    let probes = |addr| vec![get(addr, "/live"), get(addr, "/ready")];
    let application = || vec![get(of_server(scene::HTTP), "/")];
    let rows = [
        Row {
            name: "4191, admin",
            port: of_server(4191),
            good: probes(of_server(4191)),
        },
        Row {
            name: "4190, tap",
            port: of_server(4190),
            good: vec![Good::http2(&scene.good, of_server(4190))],
        },
        Row {
            name: "4143, redirected to it",
            port: of_server(scene::HTTP),
            good: application(),
        },
        Row {
            name: "4143, itself",
            port: of_server(4143),
            good: application(),
        },
        Row {
            name: "4140, itself",
            port: of_server(4140),
            good: vec![Good::http(&scene.server, (scene::GOOD, scene::HTTP).into(), "/")],
        },
        Row {
            name: "8080, identity",
            port: of_control(8080),
            good: vec![Good::certify(&scene.good, of_control(8080), &scene.anchors)],
        },
        Row {
            name: "8086, destination",
            port: of_control(8086),
            good: vec![Good::destination(&scene.good, of_control(8086), &scene.anchors, leaf)],
        },
        Row {
            name: "8090, policy",
            port: of_control(8090),
            good: vec![Good::policy(&scene.good, of_control(8090), &scene.anchors, leaf)],
        },
        Row {
            name: "9990, admin of identity and policy",
            port: of_control(9990),
            good: probes(of_control(9990)),
        },
        Row {
            name: "9996, admin of destination",
            port: of_control(9996),
            good: probes(of_control(9996)),
        },
        Row {
            name: "8089, telemetry",
            port: of_control(8089),
            good: vec![Good::http(&scene.control, ([127, 0, 0, 1], 8089).into(), "/")],
        },
    ];
    let many = ["4191, admin", "4190, tap", "8086, destination"];
    let floods = rows.iter().flat_map(|row| cells(row, many.contains(&row.name)));
    run(floods.collect(), |flood| scene.strangers.run(flood).unwrap());
}

/// All floods of a row.
pub(crate) fn cells<'r, 'a>(row: &'r Row<'a>, many: bool) -> Vec<(&'r Row<'a>, Behaviour, Sources, usize)> {
    let mut cells = Vec::new();
    for from in [Sources::OneAddress, Sources::TwoHundred] {
        for behaviour in Behaviour::ALL {
            cells.push((row, behaviour, from, 400));
        }
        if many {
            cells.push((row, Behaviour::Silent, from, 4000));
        }
    }
    cells
}

/// Runs floods, a few at once, and asserts that well-behaved clients are answered meanwhile. `start` starts a flood where the
/// strangers are.
pub(crate) fn run(cells: Vec<(&Row<'_>, Behaviour, Sources, usize)>, start: impl Fn(&mut (dyn FnMut() + Send)) + Sync) {
    let next = AtomicUsize::new(0);
    let failures = parking_lot::Mutex::new(Vec::new());
    let began_at = Instant::now();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((row, behaviour, from, n)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut flood = None;
                    start(&mut || flood = Some(Flood::start(row.port, *behaviour, *from, *n)));
                    let flood = flood.expect("it has run");
                    for round in 0..ROUNDS {
                        for good in &row.good {
                            let asked_at = Instant::now();
                            let answer = good.ask();
                            let took = asked_at.elapsed();
                            if answer.is_err() || took >= BOUND {
                                let what = format!(
                                    "{} of {n} {behaviour:?} from {from:?}: {good} in round {round} took {took:?}: {answer:?}",
                                    row.name
                                );
                                failures.lock().push(what);
                            }
                        }
                        flood.go_on();
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    eprintln!("{} floods in {:?}", cells.len(), began_at.elapsed());
    assert!(
        failures.is_empty(),
        "{} of them:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

pub(crate) fn raise_limit_of_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

/// What a well-behaved client waits for an answer at most.
const BOUND: Duration = Duration::from_secs(1);
/// Floods that run at the same time.
const AT_ONCE: usize = 3;
/// How often each good client asks during a flood.
const ROUNDS: usize = 2;
