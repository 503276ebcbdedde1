//! T42–T44: rules that change under load, and runs that are killed.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use crate::lifecycle::linkerd;
use crate::scene::{APP, BACKENDS, BIN, ROOT, Scene, Who, ask, dial, families, flags, root, serve, success};

/// What clients met while rules were re-applied.
#[derive(Debug, Default)]
struct Met {
    proxied: AtomicUsize,
    bypassed: AtomicUsize,
    failed: AtomicUsize,
}

/// Six clients dial in both directions and families, as fast as they can, until the work is done.
fn under_load(scene: &Scene, port: u16, work: impl FnOnce()) -> Met {
    // Thousands of closed connections need not be remembered.
    scene.sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1");
    let met = Met::default();
    let stop = AtomicBool::new(false);
    let [v4, v6] = families();
    let clients: [(bool, Who, SocketAddr); 6] = [
        (true, ROOT, (v4.pod[0], port).into()),
        (true, ROOT, (v4.pod[1], port).into()),
        (true, ROOT, (v6.pod[0], port).into()),
        (false, APP, (v4.peer, port).into()),
        (false, APP, (v6.peer, port).into()),
        (false, APP, (v6.other_peer, port).into()),
    ];
    thread::scope(|scope| {
        for (from_peer, who, to) in clients {
            let namespace = if from_peer { &scene.peer } else { &scene.pod };
            let (met, stop) = (&met, &stop);
            scope.spawn(move || namespace.run(|| dial_until(who, to, met, stop)).unwrap());
        }
        work();
        stop.store(true, Ordering::Relaxed);
    });
    met
}

fn dial_until(who: Who, to: SocketAddr, met: &Met, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let count = match dial(who, to) {
            Ok((stream, answer)) => {
                socket2::SockRef::from(&stream)
                    .set_linger(Some(Duration::ZERO))
                    .unwrap();
                match answer.server.as_str() {
                    "inbound" | "outbound" => &met.proxied,
                    "app" | "peer" => &met.bypassed,
                    _ => &met.failed, // nothing was said: reset
                }
            }
            Err(_) => &met.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Works for this long, and says how often.
fn for_a_while(limit: Duration, mut work: impl FnMut(usize)) -> usize {
    let started = Instant::now();
    let mut times = 0;
    while started.elapsed() < limit {
        work(times);
        times += 1;
    }
    times
}

/// T42: not one of at least ten thousand connections goes past the proxy or is reset.
#[test]
fn no_connection_bypasses_the_proxy_while_rules_are_replaced() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        scene.apply(backend, &[]);
        let mut total = 0;
        let mut applied = 0;
        let started = Instant::now();
        // Busy machines dial more slowly; the count is what matters.
        while total < CONNECTIONS && started.elapsed() < Duration::from_secs(60) {
            let met = under_load(&scene, 8080, || {
                // Always something else, so that every run writes.
                applied += for_a_while(Duration::from_secs(10), |n| {
                    scene.apply(backend, &["--proxy-gid", if n % 2 == 0 { "7" } else { "8" }]);
                });
            });
            assert_eq!(met.bypassed.load(Ordering::Relaxed), 0, "{backend}: {met:?}");
            assert_eq!(met.failed.load(Ordering::Relaxed), 0, "{backend}: {met:?}");
            total += met.proxied.load(Ordering::Relaxed);
        }
        println!("T42 {backend}: {total} connections over {applied} re-applications, 0 bypassed, 0 reset");
        assert!(
            total >= CONNECTIONS && applied >= 10,
            "{backend}: {total} connections, {applied} applications"
        );
    }
}

/// The harness can see a bypass: the sequence of Linkerd's init has some.
#[test]
fn linkerds_sequence_lets_connections_bypass_the_proxy() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080]);
    let both = format!("{}\n{}", linkerd("iptables-nft"), linkerd("ip6tables-nft"));
    scene.sh(&both);
    let met = under_load(&scene, 8080, || {
        for_a_while(Duration::from_secs(3), |_| {
            scene.sh(&both);
        });
    });
    println!("T42 self-test: {met:?}");
    assert!(met.bypassed.load(Ordering::Relaxed) > 0, "{met:?}");
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
        println!("T43 {backend}: {met:?}");
        assert_eq!(met.failed.load(Ordering::Relaxed), 0, "{backend}: {met:?}");
        assert!(
            met.proxied.load(Ordering::Relaxed) > 0 && met.bypassed.load(Ordering::Relaxed) > 0,
            "{met:?}"
        );
    }
}

/// T44: whenever a run is killed, the rules are the old or the new ones; with iptables, those of each family are.
#[test]
fn a_run_that_is_killed_leaves_the_old_rules_or_the_new_ones() {
    if !root() {
        return;
    }
    for backend in ["nft", "iptables-nft"] {
        let scene = Scene::bare();
        let variants = [&["-g", "7"][..], &["-g", "8", "--inbound-ports-to-ignore", "1,3,5"]];
        let commands: &[&str] = match backend {
            "nft" => &["nft list ruleset"],
            _ => &["iptables-nft-save -t nat", "ip6tables-nft-save -t nat"],
        };
        let dumps = || -> Vec<String> {
            let plain = |text: String| {
                text.lines()
                    .filter(|line| !line.starts_with('#'))
                    .collect::<Vec<_>>()
                    .join("\n")
            };
            commands.iter().map(|command| plain(scene.sh(command))).collect()
        };
        let mut whole = Duration::ZERO;
        let known = [1, 0].map(|variant: usize| {
            let started = Instant::now();
            scene.apply(backend, variants[variant]);
            whole = started.elapsed();
            dumps()
        });
        let mut hit = [0; 2];
        for n in 0..KILLS {
            let mut run = scene.pod.command(BIN);
            let mut run = run
                .args(flags(backend, variants[n % 2]))
                .stderr(std::process::Stdio::null())
                .spawn()
                .unwrap();
            // Anywhere from before its start to after its end.
            thread::sleep(whole.mul_f64(fastrand::f64() * 1.2));
            run.kill().unwrap();
            run.wait().unwrap();
            for (part, dump) in dumps().iter().enumerate() {
                let is = known.iter().position(|known| known[part] == *dump);
                hit[is.unwrap_or_else(|| panic!("{backend}, kill {n}: neither old nor new:\n{dump}"))] += 1;
            }
        }
        println!("T44 {backend}: {KILLS} kills, states found {hit:?}");
        assert!(hit.iter().all(|hits| *hits > 0), "{backend}: {hit:?}");
    }
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
    println!("switching: {met:?}");
    assert_eq!(met.bypassed.load(Ordering::Relaxed), 0, "{met:?}");
}

const CONNECTIONS: usize = 10_000;
const KILLS: usize = 200;
