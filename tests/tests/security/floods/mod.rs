//! Floods of every listening port: while others hold all the connections that they can, well-behaved clients get every answer;
//! with `TULLE_TEST_FULL=1` within a second, as long as nothing else runs on the machine.
//!
//! A row is a port, and what well-behaved clients ask meanwhile. Each row is flooded in every way, from one address and from two
//! hundred; where clients prove an identity, also by peers with one. One flood after the other: a client that has
//! several connections loses one first, and those who ask here have one address.

mod anybody;
mod clients;
mod scene;
mod strangers;
mod webhooks;

use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::time::Instant;

use clients::Good;
use scene::{CONTROL, SERVER, Scene, v6};
use strangers::{Behaviour, Flood, Peers, Sources};

/// One port: where the flood dials, and what others ask meanwhile.
pub(crate) struct Row<'a> {
    pub(crate) name: &'static str,
    pub(crate) port: std::net::SocketAddr,
    pub(crate) good: Vec<Good<'a>>,
    /// Peers with an identity, where they are believed.
    pub(crate) peers: Option<Peers>,
}

/// A flood of a row.
pub(crate) struct Cell<'r, 'a> {
    row: &'r Row<'a>,
    behaviour: Behaviour,
    from: Sources,
    n: usize,
}

#[test]
fn every_port_answers_others_while_strangers_flood_it() {
    if !scene::can_run() {
        return;
    }
    raise_limit_of_files();
    let scene = Scene::build();
    let leaf = &scene.leaf;
    let of_server = |port| (SERVER, port).into();
    let of_server6 = |port| (v6(SERVER), port).into();
    let of_control = |port| (CONTROL, port).into();
    let get = |addr, path| Good::http(&scene.good, addr, path, 200);
    let probes = |addr| vec![get(addr, "/live"), get(addr, "/ready")];
    let row = |name, port, good| Row {
        name,
        port,
        good,
        peers: None,
    };
    let of_peers = |name, port, good| Row {
        peers: Some(scene.peers.clone()),
        ..row(name, port, good)
    };
    let rows = [
        row("4191, admin", of_server(4191), probes(of_server(4191))),
        row("4191, by IPv6", of_server6(4191), probes(of_server6(4191))),
        row(
            "4190, tap",
            of_server(4190),
            and(Good::http2(&scene.good, of_server(4190)), probes(of_server(4191))),
        ),
        row(
            "4143, redirected to it",
            of_server(scene::HTTP),
            vec![get(of_server(scene::HTTP), "/")],
        ),
        row(
            "4143, redirected to it by IPv6",
            of_server6(scene::HTTP),
            vec![get(of_server6(scene::HTTP), "/")],
        ),
        row("4143, itself", of_server(4143), vec![get(of_server(scene::HTTP), "/")]),
        row(
            "4140, itself",
            of_server(4140),
            vec![Good::http(&scene.server, (scene::GOOD, scene::HTTP).into(), "/", 200)],
        ),
        row(
            "8080, identity",
            of_control(8080),
            vec![Good::certify(&scene.good, of_control(8080), &scene.anchors)],
        ),
        of_peers(
            "8086, destination",
            of_control(8086),
            and(
                Good::destination(&scene.good, of_control(8086), &scene.anchors, leaf),
                probes(of_control(9996)),
            ),
        ),
        of_peers(
            "8090, policy",
            of_control(8090),
            vec![Good::policy(&scene.good, of_control(8090), &scene.anchors, leaf)],
        ),
        row(
            "9990, admin of identity and policy",
            of_control(9990),
            probes(of_control(9990)),
        ),
        row("9996, admin of destination", of_control(9996), probes(of_control(9996))),
        row(
            "8089, telemetry",
            of_control(8089),
            vec![Good::http(&scene.control, ([127, 0, 0, 1], 8089).into(), "/", 404)],
        ),
    ];
    let many = ["4191, admin", "4190, tap", "8086, destination"];
    let floods = rows.iter().flat_map(|row| cells(row, many.contains(&row.name)));
    run(floods.collect(), |flood| scene.strangers.run(flood).unwrap());
}

fn and<'a>(first: Good<'a>, others: Vec<Good<'a>>) -> Vec<Good<'a>> {
    [first].into_iter().chain(others).collect()
}

/// All floods of a row; `many` adds 4,000 idle connections.
pub(crate) fn cells<'r, 'a>(row: &'r Row<'a>, many: bool) -> Vec<Cell<'r, 'a>> {
    let mut cells = Vec::new();
    for from in [Sources::OneAddress, Sources::TwoHundred] {
        let mut add = |behaviour, n| {
            cells.push(Cell {
                row,
                behaviour,
                from,
                n,
            });
        };
        for behaviour in Behaviour::OF_STRANGERS {
            add(behaviour, 400);
        }
        if row.peers.is_some() {
            add(Behaviour::Verified, 400);
        }
        if many {
            add(Behaviour::Silent, MANY);
        }
    }
    cells
}

/// Runs floods and asserts that well-behaved clients are answered meanwhile. `start` starts a flood where the
/// strangers are.
pub(crate) fn run(cells: Vec<Cell<'_, '_>>, start: impl Fn(&mut (dyn FnMut() + Send)) + Sync) {
    let began_at = Instant::now();
    let failures: Vec<_> = cells.iter().flat_map(|cell| cell.run(&start)).collect();
    eprintln!("{} floods in {:?}", cells.len(), began_at.elapsed());
    assert!(
        failures.is_empty(),
        "{} of them:\n{}",
        failures.len(),
        failures[..failures.len().min(SHOWN)].join("\n")
    );
}

impl Cell<'_, '_> {
    /// Floods and asks; returns what was wrong.
    fn run(&self, start: impl Fn(&mut (dyn FnMut() + Send))) -> Vec<String> {
        let Self {
            row,
            behaviour,
            from,
            n,
        } = self;
        let mut failures = Vec::new();
        let mut flood = None;
        start(&mut || flood = Some(Flood::start(row.port, *behaviour, *from, *n, row.peers.as_ref())));
        let flood = flood.expect("it has run");
        assert!(flood.n() > 0, "{}: no connection at all", row.name);
        let mut slowest = vec![Duration::ZERO; row.good.len()];
        let bound = bound();
        for round in 0..ROUNDS {
            flood.wait_for_byte();
            for (good, slowest) in row.good.iter().zip(&mut slowest) {
                let asked_at = Instant::now();
                let answer = good.ask();
                let took = asked_at.elapsed();
                *slowest = took.max(*slowest);
                if answer.is_err() || took >= bound {
                    failures.push(format!(
                        "{} of {n} {behaviour:?} from {from:?}: {good} in round {round} took {took:?}: {}",
                        row.name,
                        answer.map_or_else(|error| format!("{error:#}"), |()| "answered".to_owned())
                    ));
                }
            }
        }
        if *n == MANY {
            for (good, slowest) in row.good.iter().zip(slowest) {
                eprintln!("{}, {n} {behaviour:?} from {from:?}: {good} took {slowest:?}", row.name);
            }
        }
        failures
    }
}

pub(crate) fn raise_limit_of_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

/// What a well-behaved client waits for an answer at most.
fn bound() -> Duration {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => Duration::from_secs(1),
        None => Duration::MAX, // it gives up by itself
    }
}

/// How often each good client asks during a flood; where it says a byte each second, after each of them.
const ROUNDS: usize = 2;
const MANY: usize = 4000;
/// Failures that are written out.
const SHOWN: usize = 50;
