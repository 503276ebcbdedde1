//! Rules that change under load, draining under load, and runs that are killed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as SocketAddrUnix, UnixListener};
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::fixture::{
    APP, BACKENDS, BIN, Client, Fixture, ROOT, assert_success, can_run, dial, echo, eventually, families, fetch_answer,
    flags, serve,
};
use crate::lifecycle::{linkerd_init_commands, open_connections};

/// Clients that connect in both directions and families, without pause.
#[derive(Debug, Default)]
struct Load {
    stop: AtomicBool,
    connections: Mutex<Connections>,
}

#[derive(Clone, Debug, Default)]
struct Connections {
    /// By family and direction.
    by_path: BTreeMap<&'static str, Counts>,
    /// Refused, reset, unanswered, or with a wrong original destination.
    failed: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    proxied: usize,
    bypassed: usize,
}

/// Runs six clients until the work is done, and returns their connections. None may have failed.
fn run_under_load(fixture: &Fixture, port: u16, work: impl FnOnce(&Load)) -> Connections {
    // Shortens the tracking of thousands of closed connections.
    fixture.sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1");
    let load = Load::default();
    let [v4, v6] = families();
    let clients: [(&'static str, &Namespace, Client, SocketAddr); 6] = [
        ("ipv4 inbound", &fixture.peer, ROOT, (v4.pod[0], port).into()),
        ("ipv4 inbound", &fixture.peer, ROOT, (v4.pod[1], port).into()),
        ("ipv6 inbound", &fixture.peer, ROOT, (v6.pod[0], port).into()),
        ("ipv4 outbound", &fixture.pod, APP, (v4.peer, port).into()),
        ("ipv6 outbound", &fixture.pod, APP, (v6.peer, port).into()),
        ("ipv6 outbound", &fixture.pod, APP, (v6.other_peer, port).into()),
    ];
    load.connections.lock().by_path = clients.map(|(path, ..)| (path, Counts::default())).into();
    thread::scope(|scope| {
        let load = &load;
        for (path, namespace, user, to) in clients {
            scope.spawn(move || namespace.run(|| load.dial_until_stopped(path, user, to)).unwrap());
        }
        // A panic of the work must also end the clients.
        let worked = std::panic::catch_unwind(AssertUnwindSafe(|| work(load)));
        load.stop.store(true, Ordering::Relaxed);
        worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    let connections = load.connections.into_inner();
    assert_eq!(connections.failed, Vec::<String>::new());
    connections
}

impl Load {
    fn dial_until_stopped(&self, path: &'static str, user: Client, to: SocketAddr) {
        while !self.stop.load(Ordering::Relaxed) {
            let dialled = dial(user, to);
            let mut connections = self.connections.lock();
            let counts = connections.by_path.get_mut(path).unwrap();
            match dialled {
                Ok((stream, answer)) => {
                    socket2::SockRef::from(&stream)
                        .set_linger(Some(Duration::ZERO))
                        .unwrap();
                    match answer.server.as_str() {
                        "inbound" | "outbound" if answer.orig_dst == Some(to) => counts.proxied += 1,
                        "app" | "peer" => counts.bypassed += 1,
                        // An empty answer means a reset.
                        _ => connections.failed.push(format!("{path}: {answer:?}")),
                    }
                }
                Err(error) => connections.failed.push(format!("{path}: {error}")),
            }
        }
    }

    /// Repeats the work until the condition holds for each path, and at least `min_runs` times. Returns the number of runs. A busy
    /// machine connects more slowly, so the number of connections is what matters, not the time.
    fn repeat_until(&self, min_runs: usize, is_enough: impl Fn(&Counts) -> bool, mut work: impl FnMut(usize)) -> usize {
        let deadline = Instant::now() + LOAD_TIMEOUT;
        for n in 0.. {
            let connections = self.connections.lock().clone();
            if n >= min_runs && connections.by_path.values().all(&is_enough) {
                return n;
            }
            assert!(
                Instant::now() < deadline,
                "timed out after {LOAD_TIMEOUT:?} with too few connections: {connections:?}"
            );
            work(n);
        }
        unreachable!("the runs are not limited in number")
    }
}

/// None of at least ten thousand connections bypasses the proxy or is reset, including those that stay open.
#[test]
fn no_connection_bypasses_the_proxy_while_rules_are_replaced() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        fixture.apply(backend, &[]);
        let mut streams = open_connections(&fixture, 8080);
        let mut applied = 0;
        let observed = run_under_load(&fixture, 8080, |load| {
            let is_enough = |counts: &Counts| counts.proxied >= MIN_CONNECTIONS / 4;
            // The flags alternate, so that every run writes rules.
            applied = load.repeat_until(10, is_enough, |n| {
                fixture.apply(backend, &["--proxy-gid", if n % 2 == 0 { "7" } else { "8" }]);
                for (stream, server) in &mut streams {
                    echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
                }
            });
        });
        println!("{backend}: {applied} applications: {observed:?}");
        assert!(
            observed.by_path.values().all(|counts| counts.bypassed == 0),
            "{backend}: {observed:?}"
        );
    }
}

/// Shows that the harness detects a bypass: the commands of Linkerd's init cause some.
#[test]
fn linkerds_sequence_lets_connections_bypass_the_proxy() {
    if !can_run() {
        return;
    }
    for tool in ["iptables-nft", "iptables-legacy"] {
        let fixture = Fixture::new(&[8080]);
        let both = format!(
            "{}\n{}",
            linkerd_init_commands(tool),
            linkerd_init_commands(&tool.replace("ip", "ip6"))
        );
        fixture.sh(&both);
        let observed = run_under_load(&fixture, 8080, |load| {
            let deadline = Instant::now() + LOAD_TIMEOUT;
            while load
                .connections
                .lock()
                .by_path
                .values()
                .all(|counts| counts.bypassed == 0)
            {
                assert!(Instant::now() < deadline, "{tool}: no connection bypassed the proxy");
                fixture.sh(&both);
            }
        });
        println!("self-test, {tool}: {observed:?}");
    }
}

/// A port that is skipped in some runs is served by the application or by the proxy; no connection fails.
#[test]
fn each_connection_follows_the_old_or_the_new_skip_list() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        fixture.apply(backend, &[]);
        let skip = [
            "--inbound-ports-to-ignore",
            "8080",
            "--outbound-ports-to-ignore",
            "8080",
        ];
        let observed = run_under_load(&fixture, 8080, |load| {
            let is_enough = |counts: &Counts| counts.proxied >= 50 && counts.bypassed >= 50;
            load.repeat_until(10, is_enough, |n| {
                fixture.apply(backend, if n % 2 == 0 { &skip } else { &[] });
            });
        });
        println!("{backend}: {observed:?}");
    }
}

/// Connections that are open when draining starts continue, and no new connection fails.
#[test]
fn draining_under_load_fails_no_connection() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        fixture.apply(backend, &[]);
        let mut streams = open_connections(&fixture, 8080);
        let observed = run_under_load(&fixture, 8080, |load| {
            thread::scope(|scope| {
                let cleaning = scope.spawn(|| fixture.init(&["--clean=drain", "--drain-timeout", "60s"]));
                load.repeat_until(
                    10,
                    |counts| counts.bypassed > 500,
                    |_| {
                        for (stream, server) in &mut streams {
                            echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
                        }
                    },
                );
                assert!(!cleaning.is_finished(), "{backend}: did not wait");
                drop(std::mem::take(&mut streams));
                let output = cleaning.join().unwrap();
                assert_success(&output);
                assert!(
                    !String::from_utf8_lossy(&output.stderr).contains("still open"),
                    "{output:?}"
                );
            });
            // After the rules are removed, too.
            for _ in 0..100 {
                fetch_answer(&fixture.peer, ROOT, (families()[0].pod[0], 8080).into()).unwrap();
            }
        });
        println!("drain {backend}: {observed:?}");
        assert_eq!(fixture.exit_code(&flags(backend, &["--check"])), 4, "{backend}");
    }
}

/// A killed run leaves the old or the new rules; with iptables, for each family, and for each table if the programs are killed too.
#[test]
fn a_run_that_is_killed_leaves_the_old_rules_or_the_new_ones() {
    if !can_run() {
        return;
    }
    // Scripts that are larger than a pipe's buffer, in both tables.
    let networks: Vec<String> = (0..700)
        .map(|n| format!("10.{}.{}.0/25,fd00:{n:x}::/64", n / 250, n % 250))
        .collect();
    let networks = networks.join(",");
    let large = [
        &["-g", "7", "--drop-invalid", "--subnets-to-ignore", &networks][..],
        &["-g", "8"],
    ];
    let small = [&["-g", "7"][..], &["-g", "8", "--inbound-ports-to-ignore", "1,3,5"]];
    let n_kills = match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => 50,
        None => 20,
    };
    for backend in BACKENDS {
        assert_kills_leave_a_known_state(backend, small.map(|more| flags(backend, more)), Kill::Init, n_kills);
        assert_kills_leave_a_known_state(backend, [flags(backend, &[]), vec!["--clean"]], Kill::Init, n_kills);
        assert_kills_leave_a_known_state(backend, large.map(|more| flags(backend, more)), Kill::Init, n_kills);
        assert_kills_leave_a_known_state(backend, large.map(|more| flags(backend, more)), Kill::Programs, n_kills);
    }
}

/// The processes that are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    /// Only the init process. The programs that it started continue to their end.
    Init,
    /// The init process and its programs, as at the end of a container. The programs commit table by table.
    Programs,
}

#[allow(clippy::print_stdout)] // prints measurements, as the tests do
fn assert_kills_leave_a_known_state(backend: &str, variants: [Vec<&str>; 2], kill: Kill, kills: usize) {
    let fixture = Fixture::bare();
    let commands: &[&str] = match backend {
        "nft" => &["nft list ruleset"],
        "iptables-nft" => &["iptables-nft-save", "ip6tables-nft-save"],
        _ => &["iptables-legacy-save", "ip6tables-legacy-save"],
    };
    let dumps = || -> Vec<String> {
        // Programs that still write hold the lock.
        eventually("the programs to end", || {
            let name = <SocketAddrUnix as SocketAddrExt>::from_abstract_name("tulle-init").unwrap();
            fixture.pod.run(|| UnixListener::bind_addr(&name).is_ok()).unwrap()
        });
        let plain = |text: &str| {
            let lines = text.lines().filter(|line| !line.starts_with(['#', ':']));
            lines.collect::<Vec<_>>().join("\n")
        };
        let saved = commands.iter().map(|command| fixture.sh(command));
        match kill {
            Kill::Init => saved.map(|text| plain(&text)).collect(),
            Kill::Programs => saved
                .flat_map(|text| text.split("COMMIT").map(plain).collect::<Vec<_>>())
                .filter(|table| !table.is_empty())
                .collect(),
        }
    };
    // From here on, the tables that iptables creates on demand exist.
    fixture.apply(backend, &["--drop-invalid"]);
    let mut run_time = Duration::ZERO;
    // `run_time` keeps the time of the run that is measured last. That is `variants[0]`, because `variants[1]` can be `--clean`,
    // which takes less time.
    let known_states = [1, 0].map(|variant: usize| {
        let started = Instant::now();
        assert_success(&fixture.init(&variants[variant]));
        run_time = started.elapsed();
        dumps()
    });
    let mut n_by_state = [0; 2];
    for n in 0..kills {
        let mut run = fixture.pod.command(BIN);
        let mut run = run
            .args(&variants[n % 2])
            .stderr(std::process::Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        // At a random time, from before its start to after its end.
        thread::sleep(run_time.mul_f64(fastrand::f64() * 1.2));
        match kill {
            Kill::Init => run.kill().unwrap(),
            // The run may have ended.
            Kill::Programs => drop(killpg(Pid::from_raw(run.id().cast_signed()), Signal::SIGKILL)),
        }
        run.wait().unwrap();
        for (part, dump) in dumps().iter().enumerate() {
            let state = known_states.iter().position(|known| known[part] == *dump);
            let state = state.unwrap_or_else(|| panic!("{backend}, {kill:?}, kill {n}: neither old nor new:\n{dump}"));
            n_by_state[state] += 1;
        }
    }
    println!("{backend}, {kill:?}: {kills} kills, states found {n_by_state:?}");
    assert!(n_by_state.iter().all(|hits| *hits > 0), "{backend}: {n_by_state:?}");
}

/// Replacing one backend's rules by another's leaves no gap, because both exist for a moment. That moment breaks no connection.
#[test]
fn no_connection_bypasses_the_proxy_while_backends_are_switched() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    fixture.start_proxy();
    serve(&fixture.pod, "app", "[::]:8080");
    serve(&fixture.peer, "peer", "[::]:8080");
    assert_success(&fixture.init(&flags("nft", &[])));
    assert_eq!(
        fetch_answer(&fixture.peer, ROOT, (families()[0].pod[0], 8080).into())
            .unwrap()
            .server,
        "inbound"
    );
    let observed = run_under_load(&fixture, 8080, |load| {
        load.repeat_until(
            10,
            |counts| counts.proxied > 500,
            |n| {
                fixture.apply(BACKENDS[(n + 1) % BACKENDS.len()], &[]);
            },
        );
    });
    println!("switching: {observed:?}");
    assert!(
        observed.by_path.values().all(|counts| counts.bypassed == 0),
        "{observed:?}"
    );
}

const MIN_CONNECTIONS: usize = 10_000;
/// A load of a few seconds takes longer on a busy machine.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
