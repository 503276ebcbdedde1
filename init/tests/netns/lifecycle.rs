//! T40, T41, T45–T54, T62: rules that come, change and go.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::thread;

use crate::scene::{
    APP, BACKENDS, BIN, FLAGS, Family, ROOT, Scene, ask, dial, echo, eventually, expect, families, flags, open, root,
    success,
};

/// T40.
#[test]
fn applying_twice_changes_nothing() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    for backend in BACKENDS {
        let more = [
            "--report",
            "json",
            "--subnets-to-ignore",
            "10.0.0.0/8,fd00::/8",
            "--drop-invalid",
        ];
        assert_eq!(result(&scene.apply(backend, &more)), "applied", "{backend}");
        let before = scene.dump();
        assert_eq!(result(&scene.apply(backend, &more)), "unchanged", "{backend}");
        assert_eq!(scene.dump(), before, "{backend}");
        // What somebody has changed by hand is repaired.
        match backend {
            "nft" => scene.sh("nft flush chain inet l5d_init outbound"),
            _ => scene.sh(&format!("{backend} -t nat -D PROXY_INIT_OUTPUT 1")),
        };
        assert_eq!(result(&scene.apply(backend, &more)), "applied", "{backend}");
        assert_eq!(scene.dump(), before, "{backend}");
    }
}

fn result(report: &str) -> String {
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    report["result"].as_str().unwrap().to_owned()
}

/// What Linkerd's init runs, command by command, for one family (no flag, redirect all).
pub(crate) fn linkerd(program: &str) -> String {
    let commands = "
        if save | grep -q '^:PROXY_INIT_REDIRECT '; then run -F PROXY_INIT_REDIRECT; else run -N PROXY_INIT_REDIRECT; fi
        run -A PROXY_INIT_REDIRECT -p tcp --match multiport --dports 4190,4191 -j RETURN \
            -m comment --comment proxy-init/ignore-port-4190,4191
        run -A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-port 4143 \
            -m comment --comment proxy-init/redirect-all-incoming-to-proxy-port
        save | grep -q '^-A PREROUTING .*-j PROXY_INIT_REDIRECT' || run -A PREROUTING -j PROXY_INIT_REDIRECT \
            -m comment --comment proxy-init/install-proxy-init-prerouting
        if save | grep -q '^:PROXY_INIT_OUTPUT '; then run -F PROXY_INIT_OUTPUT; else run -N PROXY_INIT_OUTPUT; fi
        run -A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -j RETURN -m comment --comment proxy-init/ignore-proxy-user-id
        run -A PROXY_INIT_OUTPUT -o lo -j RETURN -m comment --comment proxy-init/ignore-loopback
        run -A PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-port 4140 \
            -m comment --comment proxy-init/redirect-all-outgoing-to-proxy-port
        save | grep -q '^-A OUTPUT .*-j PROXY_INIT_OUTPUT' || run -A OUTPUT -j PROXY_INIT_OUTPUT \
            -m comment --comment proxy-init/install-proxy-init-output
    ";
    format!("run() {{ {program} -t nat \"$@\"; }}; save() {{ {program}-save -t nat; }}; {commands}")
}

/// T41.
#[test]
fn linkerds_rules_are_taken_over_and_linkerd_takes_over_ours() {
    if !root() {
        return;
    }
    for (backend, tool) in [
        ("nft", "iptables-nft"),
        ("iptables-nft", "iptables-nft"),
        ("iptables-legacy", "iptables-legacy"),
    ] {
        let scene = Scene::new(&[8080]);
        let tool6 = tool.replace("iptables", "ip6tables");
        let jumps = || {
            let lines = scene.sh(&format!("{tool}-save -t nat; {tool6}-save -t nat"));
            lines
                .lines()
                .filter(|line| line.starts_with("-A ") && line.contains("-j PROXY_INIT_"))
                .count()
        };
        let both = || scene.sh(&format!("{}\n{}", linkerd(tool), linkerd(&tool6)));
        both();
        assert_eq!(jumps(), 4);
        scene.apply(backend, &[]);
        assert_eq!(jumps(), if backend == "nft" { 0 } else { 4 }, "{backend}");
        for family in families() {
            expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
        }
        both();
        assert_eq!(jumps(), 4, "{backend}");
    }
}

/// T45.
#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    for backend in BACKENDS {
        scene.apply(backend, &[]);
        let before = scene.dump();
        for bad in [
            &["--incoming-proxy-port", "70000"][..],
            &["--outgoing-proxy-port", "0"],
            &["--inbound-ports-to-ignore", "70000"],
            &["--inbound-ports-to-ignore", ""],
            &["--outbound-ports-to-ignore", "90-80"],
            &["--ports-to-redirect", "http"],
            &["--subnets-to-ignore", "10.0.0.0/33"],
            &["--outbound-subnets-to-ignore", "example.com"],
            &["--proxy-uid", "-5"],
            &["--iptables-mode", "bpf"],
            &["--firewall-bin-path", "/sbin/iptables"],
            &["--no-such-flag"],
        ] {
            let output = scene.init(&flags(backend, bad));
            assert_eq!(output.status.code(), Some(1), "{bad:?}");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains(bad[0]), "{bad:?}: {said}");
        }
        assert_eq!(scene.dump(), before, "{backend}");
    }
    let output = scene.init(&flags(
        "nft",
        &["--inbound-ports-to-ignore", "70000,80", "--lenient", "--simulate"],
    ));
    success(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("elements = { 80, 4190-4191 }"));
}

/// T46.
#[test]
fn a_rule_that_the_kernel_refuses_leaves_the_former_rules() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    scene.apply("nft", &[]);
    let before = scene.dump();
    // The kernel has no NAT that early.
    let output = scene.init(&flags("nft", &["--priority", "-300"]));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("nat at prerouting -300"),
        "{output:?}"
    );
    assert_eq!(scene.dump(), before);

    // IPv6 accepts the trial and then refuses the commit, after IPv4 has been committed.
    let programs = tempfile::tempdir().unwrap();
    let broken = programs.path().join("ip6tables-nft-restore");
    fs::write(
        &broken,
        "#!/bin/sh\ncase \"$*\" in *--test*) exit 0;; *--noflush*) echo refused >&2; exit 1;; esac\n",
    )
    .unwrap();
    fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
    scene.apply("iptables-nft", &[]);
    let before = scene.dump();
    let mut command = scene.pod.command(BIN);
    let output = command
        .args(flags("iptables-nft", &["-g", "7"]))
        .env("PATH", path)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("refused"),
        "{output:?}"
    );
    assert_eq!(scene.dump(), before);
}

/// Open connections in both directions, each family.
fn connections(scene: &Scene, port: u16) -> Vec<(TcpStream, String)> {
    let both = |family: Family| {
        let (inbound, inward) = open(&scene.peer, ROOT, (family.pod[0], port).into()).unwrap();
        let (outbound, outward) = open(&scene.pod, APP, (family.peer, port).into()).unwrap();
        [(inbound, inward.server), (outbound, outward.server)]
    };
    families().into_iter().flat_map(both).collect()
}

/// T47, T48.
#[test]
fn open_connections_survive_rules_that_come_and_change() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        let mut before = connections(&scene, 8080);
        assert!(
            before
                .iter()
                .all(|(_, server)| ["app", "peer"].contains(&server.as_str())),
            "{before:?}"
        );
        scene.apply(backend, &[]);
        let mut between = connections(&scene, 8080);
        assert!(
            between
                .iter()
                .all(|(_, server)| ["inbound", "outbound"].contains(&server.as_str())),
            "{between:?}"
        );
        scene.apply(
            backend,
            &[
                "-g",
                "7",
                "--inbound-ports-to-ignore",
                "8080",
                "--outbound-ports-to-ignore",
                "8080",
            ],
        );
        let mut after = connections(&scene, 8080);
        assert!(
            after
                .iter()
                .all(|(_, server)| ["app", "peer"].contains(&server.as_str())),
            "{after:?}"
        );
        for (stream, server) in before.iter_mut().chain(&mut between).chain(&mut after) {
            echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
        }
    }
}

/// T49, T51.
#[test]
fn cleaning_restores_what_was_there_and_spares_strangers() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        strangers(&scene, backend);
        let before = scene.dump();
        scene.apply(backend, &["--drop-invalid"]);
        for rule in ["10.250.0.1", "table inet stranger", "SOMEBODY"] {
            assert!(scene.dump().contains(rule), "{backend}: {rule}");
        }
        expect(&scene.peer, ROOT, (families()[0].pod[0], 8080), "inbound", backend);
        success(&scene.init(&["--clean=now"]));
        assert_eq!(scene.dump(), before, "{backend}");
        expect(&scene.peer, ROOT, (families()[0].pod[0], 8080), "app", backend);
        let output = scene.init(&["--clean", "--report", "json"]);
        success(&output);
        assert_eq!(result(&String::from_utf8_lossy(&output.stdout)), "absent");
        assert_eq!(scene.dump(), before, "{backend}");
    }
}

/// Rules of others, in our tables and in theirs.
fn strangers(scene: &Scene, backend: &str) {
    let tool = if backend == "nft" { "iptables-nft" } else { backend };
    let tool6 = tool.replace("iptables", "ip6tables");
    let rules = "-t nat -N SOMEBODY; T -t nat -A SOMEBODY -j RETURN; T -t nat -A OUTPUT -p udp -j SOMEBODY; \
                 T -t mangle -A PREROUTING -p udp -j ACCEPT; T -t nat -A PREROUTING -p udp -j ACCEPT";
    scene.sh(&format!("T() {{ {tool} \"$@\"; }}; T {rules}; T -t nat -A PREROUTING -p tcp --dport 1 -j DNAT --to-destination 10.250.0.1"));
    scene.sh(&format!("T() {{ {tool6} \"$@\"; }}; T {rules}"));
    scene.sh("nft 'table inet stranger { chain c { type nat hook output priority -90; tcp dport 2 counter redirect to :3; }; }'");
}

/// T50.
#[test]
fn draining_lets_open_connections_end() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        scene.apply(backend, &[]);
        let mut streams = connections(&scene, 8080);
        assert!(
            streams
                .iter()
                .all(|(_, server)| ["inbound", "outbound"].contains(&server.as_str()))
        );
        thread::scope(|scope| {
            let cleaning = scope.spawn(|| scene.init(&["--clean=drain", "--drain-timeout", "20s"]));
            for family in families() {
                let direct = || ask(&scene.peer, ROOT, (family.pod[0], 8080).into()).unwrap().server == "app";
                eventually("new connections to be direct", direct);
                expect(&scene.pod, APP, (family.peer, 8080), "peer", backend);
            }
            assert!(!cleaning.is_finished(), "{backend}: did not wait");
            for (stream, server) in &mut streams {
                echo(stream, &vec![7; 1 << 20]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
            }
            drop(streams);
            let output = cleaning.join().unwrap();
            success(&output);
            assert!(
                !String::from_utf8_lossy(&output.stderr).contains("still open"),
                "{output:?}"
            );
        });
        assert!(
            !scene.dump().contains("l5d_init") && !scene.dump().contains("PROXY_INIT"),
            "{backend}"
        );
        // Who does not end in time is cut off, with a warning.
        scene.apply(backend, &[]);
        let (_kept, _) = open(&scene.peer, ROOT, (families()[0].pod[0], 8080).into()).unwrap();
        let output = scene.init(&["--clean=drain", "--drain-timeout", "200ms"]);
        success(&output);
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("1 connections were still open"),
            "{output:?}"
        );
    }
}

/// T52.
#[test]
fn with_rules_in_both_worlds_ours_win_and_a_warning_says_so() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080]);
    scene.sh("iptables-legacy -t nat -A OUTPUT -p tcp -d 10.77.0.1 -j REDIRECT --to-port 15001");
    scene.sh("nft 'table ip other { chain c { type nat hook output priority -100; ip daddr 10.77.0.1 tcp dport 1-60000 redirect to :15001; }; }'");
    let output = scene.init(&flags("nft", &[]));
    success(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("chain OUTPUT of iptables-legacy (ipv4) redirects too"),
        "{said}"
    );
    assert!(said.contains("chain c of nftables table other redirects too"), "{said}");
    expect(&scene.pod, APP, (families()[0].peer, 8080), "outbound", "nft");
}

/// T53.
#[test]
fn runs_at_the_same_time_agree() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        for _ in 0..3 {
            let scene = Scene::bare();
            let other = flags(backend, &["-g", "7"]);
            let usual = flags(backend, &[]);
            thread::scope(|scope| {
                let runs: Vec<_> = [&usual, &other, &usual, &other]
                    .map(|flags| scope.spawn(|| scene.init(flags)))
                    .into();
                runs.into_iter().for_each(|run| success(&run.join().unwrap()));
            });
            let codes = [&usual, &other].map(|flags| scene.code(&[flags.as_slice(), &["--check"]].concat()));
            assert!(matches!(codes, [0, 3] | [3, 0]), "{backend}: {codes:?}");
        }
    }
}

/// T54.
#[test]
fn without_a_proxy_connections_are_refused_not_direct() {
    if !root() {
        return;
    }
    for backend in BACKENDS {
        let scene = Scene::bare();
        crate::scene::serve(&scene.pod, "app", "[::]:8080");
        crate::scene::serve(&scene.peer, "peer", "[::]:8080");
        scene.apply(backend, &[]);
        for family in families() {
            for (from, who, to) in [(&scene.peer, ROOT, family.pod[0]), (&scene.pod, APP, family.peer)] {
                let to = SocketAddr::from((to, 8080));
                let error = from.run(|| dial(who, to)).unwrap().unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{backend}: {to}");
            }
        }
    }
}

/// T62.
#[test]
fn checking_tells_equal_different_and_absent_apart() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    let check: Vec<&str> = FLAGS.iter().copied().chain(["--check"]).collect();
    for backend in BACKENDS {
        let check = flags(backend, &["--check"]);
        assert_eq!(scene.code(&check), 4, "{backend}");
        scene.apply(backend, &[]);
        let before = scene.dump();
        assert_eq!(scene.code(&check), 0, "{backend}");
        assert_eq!(scene.code(&[check.as_slice(), &["-g", "7"]].concat()), 3, "{backend}");
        assert_eq!(scene.dump(), before, "{backend}");
        success(&scene.init(&["--clean"]));
    }
    // Without a backend named, whoever holds the rules is found.
    assert_eq!(scene.code(&check), 4);
    scene.apply("iptables-nft", &[]);
    assert_eq!(scene.code(&check), 0);
}
