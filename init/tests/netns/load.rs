//! T42–T44 and draining: rules that change and go under load, and runs that are killed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as SocketAddrUnix, UnixListener};
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::lifecycle::{connections, linkerd};
use crate::scene::{
    APP, BACKENDS, BIN, ROOT, Scene, Who, ask, dial, echo, eventually, families, flags, root, serve, success,
};

/// What one client met while rules changed.
#[derive(Debug, Default)]
pub(crate) struct Met {
    /// Family and direction.
    pub(crate) way: &'static str,
    pub(crate) proxied: usize,
    pub(crate) bypassed: usize,
    /// Refused, reset, unanswered, or with another original destination than was dialled.
    pub(crate) failed: Vec<String>,
}

/// Six clients dial in both directions and families, as fast as they can, until the work is done.
pub(crate) fn under_load(scene: &Scene, port: u16, work: impl FnOnce()) -> Vec<Met> {
    // Thousands of closed connections need not be remembered.
    scene.sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1");
    let stop = AtomicBool::new(false);
    let [v4, v6] = families();
    let clients: [(&'static str, &Namespace, Who, SocketAddr); 6] = [
        ("ipv4 inbound", &scene.peer, ROOT, (v4.pod[0], port).into()),
        ("ipv4 inbound", &scene.peer, ROOT, (v4.pod[1], port).into()),
        ("ipv6 inbound", &scene.peer, ROOT, (v6.pod[0], port).into()),
        ("ipv4 outbound", &scene.pod, APP, (v4.peer, port).into()),
        ("ipv6 outbound", &scene.pod, APP, (v6.peer, port).into()),
        ("ipv6 outbound", &scene.pod, APP, (v6.other_peer, port).into()),
    ];
    thread::scope(|scope| {
        let stop = &stop;
        let runs = clients.map(|(way, namespace, who, to)| {
            scope.spawn(move || namespace.run(|| dial_until(way, who, to, stop)).unwrap())
        });
        work();
        stop.store(true, Ordering::Relaxed);
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}

fn dial_until(way: &'static str, who: Who, to: SocketAddr, stop: &AtomicBool) -> Met {
    let mut met = Met { way, ..Met::default() };
    while !stop.load(Ordering::Relaxed) {
        match dial(who, to) {
            Ok((stream, answer)) => {
                socket2::SockRef::from(&stream)
                    .set_linger(Some(Duration::ZERO))
                    .unwrap();
                match answer.server.as_str() {
                    "inbound" | "outbound" if answer.orig_dst == Some(to) => met.proxied += 1,
                    "app" | "peer" => met.bypassed += 1,
                    _ => met.failed.push(format!("{answer:?}")), // nothing said is a reset
                }
            }
            Err(error) => met.failed.push(error.to_string()),
        }
    }
    met
}

/// How many connections a way had, by what became of them; none may have failed.
fn count(met: &[Met], ways: &mut BTreeMap<&'static str, [usize; 2]>) {
    for met in met {
        assert_eq!(met.failed, Vec::<String>::new(), "{}", met.way);
        let [proxied, bypassed] = ways.entry(met.way).or_default();
        *proxied += met.proxied;
        *bypassed += met.bypassed;
    }
}

/// Works for this long, and says how often.
pub(crate) fn for_a_while(limit: Duration, mut work: impl FnMut(usize)) -> usize {
    let started = Instant::now();
    let mut times = 0;
    while started.elapsed() < limit {
        work(times);
        times += 1;
    }
    times
}

/// T42: not one of at least ten thousand connections goes past the proxy or is reset, nor is one that stays open.
#[test]
fn no_connection_bypasses_the_proxy_while_rules_are_replaced() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        scene.apply(backend, &[]);
        let mut streams = connections(&scene, 8080);
        let mut ways: BTreeMap<_, [usize; 2]> = BTreeMap::new();
        let mut applied = 0;
        let started = Instant::now();
        // Busy machines dial more slowly; the count is what matters.
        let few =
            |ways: &BTreeMap<_, [usize; 2]>| ways.len() < 4 || ways.values().any(|ways| ways[0] < CONNECTIONS / 4);
        while few(&ways) && started.elapsed() < Duration::from_secs(60) {
            let met = under_load(&scene, 8080, || {
                // Always something else, so that every run writes.
                applied += for_a_while(Duration::from_secs(10), |n| {
                    scene.apply(backend, &["--proxy-gid", if n % 2 == 0 { "7" } else { "8" }]);
                    for (stream, server) in &mut streams {
                        echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
                    }
                });
            });
            count(&met, &mut ways);
        }
        let total: usize = ways.values().map(|[proxied, _]| proxied).sum();
        println!("T42 {backend}: {total} connections over {applied} re-applications; proxied and bypassed: {ways:?}");
        assert!(ways.values().all(|[_, bypassed]| *bypassed == 0), "{backend}: {ways:?}");
        assert!(
            !few(&ways) && applied >= 10,
            "{backend}: {ways:?}, {applied} applications"
        );
    }
}

/// The harness can see a bypass: the sequence of Linkerd's init has some.
#[test]
fn linkerds_sequence_lets_connections_bypass_the_proxy() {
    if !root() {
        return;
    }
    for tool in ["iptables-nft", "iptables-legacy"] {
        let scene = Scene::new(&[8080]);
        let both = format!("{}\n{}", linkerd(tool), linkerd(&tool.replace("ip", "ip6")));
        scene.sh(&both);
        let met = under_load(&scene, 8080, || {
            for_a_while(Duration::from_secs(2), |_| {
                scene.sh(&both);
            });
        });
        let sum = |part: fn(&Met) -> usize| met.iter().map(part).sum::<usize>();
        println!(
            "T42 self-test, {tool}: {} proxied, {} bypassed",
            sum(|met| met.proxied),
            sum(|met| met.bypassed)
        );
        assert!(sum(|met| met.bypassed) > 0, "{tool}");
    }
}

/// T43: a port that is skipped now and then is served by one or the other, and never by nobody.
#[test]
fn a_changing_skip_list_is_the_old_or_the_new_one() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        scene.apply(backend, &[]);
        let skip = [
            "--inbound-ports-to-ignore",
            "8080",
            "--outbound-ports-to-ignore",
            "8080",
        ];
        let met = under_load(&scene, 8080, || {
            for_a_while(Duration::from_secs(4), |n| {
                scene.apply(backend, if n % 2 == 0 { &skip } else { &[] });
            });
        });
        let mut ways = BTreeMap::new();
        count(&met, &mut ways);
        println!("T43 {backend}: proxied and direct: {ways:?}");
        assert!(ways.values().flatten().all(|count| *count >= 50), "{backend}: {ways:?}");
    }
}

/// Connections that are open when draining starts go on, and of those that come meanwhile none fails.
#[test]
fn draining_under_load_fails_no_connection() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        scene.apply(backend, &[]);
        let mut streams = connections(&scene, 8080);
        let met = under_load(&scene, 8080, || {
            thread::scope(|scope| {
                let cleaning = scope.spawn(|| scene.init(&["--clean=drain", "--drain-timeout", "20s"]));
                for_a_while(Duration::from_secs(2), |_| {
                    for (stream, server) in &mut streams {
                        echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
                    }
                });
                assert!(!cleaning.is_finished(), "{backend}: did not wait");
                drop(std::mem::take(&mut streams));
                let output = cleaning.join().unwrap();
                success(&output);
                assert!(
                    !String::from_utf8_lossy(&output.stderr).contains("still open"),
                    "{output:?}"
                );
            });
            // Also without any rule.
            for_a_while(Duration::from_millis(300), |_| {
                ask(&scene.peer, ROOT, (families()[0].pod[0], 8080).into()).unwrap();
            });
        });
        let mut ways = BTreeMap::new();
        count(&met, &mut ways);
        println!("drain {backend}: proxied and direct: {ways:?}");
        assert!(ways.values().all(|[_, direct]| *direct > 500), "{backend}: {ways:?}");
        assert_eq!(scene.code(&flags(backend, &["--check"])), 4, "{backend}");
    }
}

/// T44: whenever a run is killed, the rules are the old or the new ones; with iptables, those of each family are.
#[test]
fn a_run_that_is_killed_leaves_the_old_rules_or_the_new_ones() {
    if !root() {
        return;
    }
    // Scripts that no pipe holds at once, in both tables.
    let networks: Vec<String> = (0..700)
        .map(|n| format!("10.{}.{}.0/25,fd00:{n:x}::/64", n / 250, n % 250))
        .collect();
    let networks = networks.join(",");
    let large = [
        &["-g", "7", "--drop-invalid", "--subnets-to-ignore", &networks][..],
        &["-g", "8"],
    ];
    let small = [&["-g", "7"][..], &["-g", "8", "--inbound-ports-to-ignore", "1,3,5"]];
    for backend in BACKENDS {
        killed(backend, small.map(|more| flags(backend, more)), Kill::Init, KILLS / 4);
        killed(backend, [flags(backend, &[]), vec!["--clean"]], Kill::Init, KILLS / 4);
        killed(backend, large.map(|more| flags(backend, more)), Kill::Init, KILLS / 4);
        killed(
            backend,
            large.map(|more| flags(backend, more)),
            Kill::Programs,
            KILLS / 4,
        );
    }
}

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    /// It alone: the programs that it has started finish.
    Init,
    /// With its programs, as the end of a container does. They commit table by table.
    Programs,
}

#[allow(clippy::print_stdout)] // the figures, as in the tests themselves
fn killed(backend: &str, variants: [Vec<&str>; 2], kill: Kill, kills: usize) {
    let scene = Scene::bare();
    let commands: &[&str] = match backend {
        "nft" => &["nft list ruleset"],
        "iptables-nft" => &["iptables-nft-save", "ip6tables-nft-save"],
        _ => &["iptables-legacy-save", "ip6tables-legacy-save"],
    };
    let dumps = || -> Vec<String> {
        // What still writes holds the lock.
        eventually("the programs to end", || {
            let name = <SocketAddrUnix as SocketAddrExt>::from_abstract_name("tulle-init").unwrap();
            scene.pod.run(|| UnixListener::bind_addr(&name).is_ok()).unwrap()
        });
        let plain = |text: &str| {
            let lines = text.lines().filter(|line| !line.starts_with(['#', ':']));
            lines.collect::<Vec<_>>().join("\n")
        };
        let saved = commands.iter().map(|command| scene.sh(command));
        match kill {
            Kill::Init => saved.map(|text| plain(&text)).collect(),
            Kill::Programs => saved
                .flat_map(|text| text.split("COMMIT").map(plain).collect::<Vec<_>>())
                .filter(|table| !table.is_empty())
                .collect(),
        }
    };
    // The tables that iptables makes as it needs them are there from now on.
    scene.apply(backend, &["--drop-invalid"]);
    let mut whole = Duration::ZERO;
    let known = [1, 0].map(|variant: usize| {
        let started = Instant::now();
        success(&scene.init(&variants[variant]));
        whole = started.elapsed();
        dumps()
    });
    let mut hit = [0; 2];
    for n in 0..kills {
        let mut run = scene.pod.command(BIN);
        let mut run = run
            .args(&variants[n % 2])
            .stderr(std::process::Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        // Anywhere from before its start to after its end.
        thread::sleep(whole.mul_f64(fastrand::f64() * 1.2));
        match kill {
            Kill::Init => run.kill().unwrap(),
            // It may be over already.
            Kill::Programs => drop(killpg(Pid::from_raw(run.id().cast_signed()), Signal::SIGKILL)),
        }
        run.wait().unwrap();
        for (part, dump) in dumps().iter().enumerate() {
            let is = known.iter().position(|known| known[part] == *dump);
            hit[is.unwrap_or_else(|| panic!("{backend}, {kill:?}, kill {n}: neither old nor new:\n{dump}"))] += 1;
        }
    }
    println!("T44 {backend}, {kill:?}: {kills} kills, states found {hit:?}");
    assert!(hit.iter().all(|hits| *hits > 0), "{backend}: {hit:?}");
}

/// Rules of both backends at once, as one is replaced by the other, leave no gap either.
#[test]
fn switching_backends_under_load_lets_nothing_bypass() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    scene.proxy();
    serve(&scene.pod, "app", "[::]:8080");
    serve(&scene.peer, "peer", "[::]:8080");
    success(&scene.init(&flags("nft", &[])));
    assert_eq!(
        ask(&scene.peer, ROOT, (families()[0].pod[0], 8080).into())
            .unwrap()
            .server,
        "inbound"
    );
    let met = under_load(&scene, 8080, || {
        for_a_while(Duration::from_secs(4), |n| {
            scene.apply(BACKENDS[(n + 1) % BACKENDS.len()], &[]);
        });
    });
    let mut ways: BTreeMap<_, [usize; 2]> = BTreeMap::new();
    count(&met, &mut ways);
    println!("switching: proxied and bypassed: {ways:?}");
    assert!(
        ways.values()
            .all(|[proxied, bypassed]| *proxied > 500 && *bypassed == 0),
        "{ways:?}"
    );
}

const CONNECTIONS: usize = 10_000;
const KILLS: usize = 200;
