//! T40, T41, T45–T54, T62: rules that come, change and go.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::{fs, io, thread};

use crate::scene::{
    APP, BACKENDS, BIN, FLAGS, Family, PROXY_UID, ROOT, Scene, ask, dial, echo, eventually, expect, families, flags,
    open, root, success,
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

/// T41; the tool is of the same world as the backend, or of the other.
#[test]
fn linkerds_rules_are_taken_over_and_linkerd_takes_over_ours() {
    if !root() {
        return;
    }
    for (backend, tool) in [
        ("nft", "iptables-nft"),
        ("nft", "iptables-legacy"),
        ("iptables-nft", "iptables-nft"),
        ("iptables-nft", "iptables-legacy"),
        ("iptables-legacy", "iptables-legacy"),
        ("iptables-legacy", "iptables-nft"),
    ] {
        let case = format!("{backend}, {tool}");
        let scene = Scene::new(&[8080]);
        let tools = [tool.to_owned(), tool.replace("ip", "ip6")];
        let expect_jumps = |tool: &str, count: usize| {
            let saved = scene.sh(&format!("{tool}-save -t nat"));
            for jump in [
                ("-A PREROUTING ", "-j PROXY_INIT_REDIRECT"),
                ("-A OUTPUT ", "-j PROXY_INIT_OUTPUT"),
            ] {
                let is = |line: &&str| line.starts_with(jump.0) && line.contains(jump.1);
                assert_eq!(saved.lines().filter(is).count(), count, "{case}, {tool}: {jump:?}");
            }
        };
        let expect_redirects = || {
            for family in families() {
                expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", &case);
                expect(&scene.pod, APP, (family.peer, 8080), "outbound", &case);
            }
        };
        for command in &tools {
            scene.sh(&linkerd(command));
            expect_jumps(command, 1);
        }
        scene.apply(backend, &[]);
        for (command, family) in tools.iter().zip(["iptables", "ip6tables"]) {
            expect_jumps(command, usize::from(backend == tool));
            if backend != "nft" {
                expect_jumps(&backend.replace("iptables", family), 1);
            }
        }
        expect_redirects();
        for command in &tools {
            scene.sh(&linkerd(command));
            expect_jumps(command, 1);
        }
        expect_redirects();
        // What Linkerd has made goes as ours does.
        success(&scene.init(&["--clean"]));
        assert!(
            !scene.dump().contains("PROXY_INIT") && !scene.dump().contains("l5d_init"),
            "{case}"
        );
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
    assert!(String::from_utf8_lossy(&output.stdout).contains("elements = { 80 }"));
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

    // One family is refused while the other is committed, which must be undone; also when the undoing fails it is told.
    for (backend, family) in [
        ("iptables-nft", "ip6tables"),
        ("iptables-nft", "iptables"),
        ("iptables-legacy", "ip6tables"),
        ("iptables-legacy", "iptables"),
    ] {
        scene.apply(backend, &["--drop-invalid"]);
        let before = scene.dump();
        let refused = |refuses: &str| {
            let programs = tempfile::tempdir().unwrap();
            let broken = programs
                .path()
                .join(format!("{}-restore", backend.replace("iptables", family)));
            // The kernel's own refusal, after rules that it takes: packets that arrive have no owner.
            let script = format!(
                "#!/bin/sh\ncase \"$*\" in {refuses}) sed 's/^-[AI] PREROUTING/& -m owner --uid-owner 7/' | \
                 PATH=${{PATH#*:}} $(basename $0) \"$@\";; *) PATH=${{PATH#*:}} exec $(basename $0) \"$@\";; esac\n"
            );
            fs::write(&broken, script).unwrap();
            fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
            let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
            let mut command = scene.pod.command(BIN);
            let output = command
                .args(flags(backend, &["-g", "7"]))
                .env("PATH", path)
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(1), "{backend}, {family}");
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        let said = refused("*--noflush*");
        assert!(
            said.contains("failed") && !said.contains("could not be put back"),
            "{said}"
        );
        assert_eq!(scene.dump(), before, "{backend}, {family}");
        let said = refused("*");
        assert!(said.contains("could not be put back"), "{said}");
        scene.apply(backend, &["--drop-invalid"]);
        assert_eq!(scene.dump(), before, "{backend}, {family}");
    }
}

/// Open connections in both directions, each family.
pub(crate) fn connections(scene: &Scene, port: u16) -> Vec<(TcpStream, String)> {
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
        strangers(&scene);
        let before = scene.dump();
        scene.apply(backend, &["--drop-invalid"]);
        assert_eq!(without_ours(&scene.dump()), before, "{backend}");
        for family in families() {
            expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            expect(&scene.pod, APP, (family.peer, 8080), "outbound", backend);
        }
        success(&scene.init(&["--clean=now"]));
        assert_eq!(scene.dump(), before, "{backend}");
        for family in families() {
            expect(&scene.peer, ROOT, (family.pod[0], 8080), "app", backend);
            expect(&scene.pod, APP, (family.peer, 8080), "peer", backend);
        }
        let (code, report) = scene.report(&["--clean"]);
        assert_eq!((code, &report["result"]), (0, &"absent".into()));
        assert_eq!(scene.dump(), before, "{backend}");
    }
}

/// Rules of others, in our tables and in theirs, of each world.
fn strangers(scene: &Scene) {
    let rules = "-t nat -N SOMEBODY; T -t nat -A SOMEBODY -j RETURN; T -t nat -A OUTPUT -p udp -j SOMEBODY; \
                 T -t mangle -A PREROUTING -p udp -j ACCEPT; T -t nat -A PREROUTING -p udp -j ACCEPT; \
                 T -t filter -A INPUT -p udp --dport 9 -j DROP; T -t raw -A PREROUTING -p udp -j ACCEPT";
    for tool in ["iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"] {
        scene.sh(&format!("T() {{ {tool} \"$@\"; }}; T {rules}"));
    }
    for tool in ["iptables-nft", "iptables-legacy"] {
        scene.sh(&format!(
            "{tool} -t nat -A PREROUTING -p tcp --dport 1 -j DNAT --to-destination 10.250.0.1"
        ));
    }
    scene.sh("nft 'table inet stranger { chain c { type nat hook output priority -90; tcp dport 2 counter redirect to :3; }; }'");
}

/// A dump without the lines that are ours.
fn without_ours(dump: &str) -> String {
    let mut table_of_ours = false;
    let lines = dump.lines().filter(|line| {
        table_of_ours |= line.starts_with("table inet l5d_init");
        let ours = table_of_ours || line.contains("PROXY_INIT");
        table_of_ours &= *line != "}";
        !ours
    });
    lines.collect::<Vec<_>>().join("\n")
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
        let (mut kept, _) = open(&scene.peer, ROOT, (families()[0].pod[0], 8080).into()).unwrap();
        echo(&mut kept, b"still here").unwrap();
        let output = scene.init(&["--clean=drain", "--drain-timeout", "200ms"]);
        success(&output);
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("1 connections were still open"),
            "{output:?}"
        );
        let error = echo(&mut kept, b"cut off").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{backend}");
    }
}

/// T52: ours win over rules of the other world that were there before, and over strangers' in the same chain.
#[test]
fn with_rules_in_both_worlds_ours_win_and_a_warning_says_so() {
    if !root() {
        return;
    }
    let thieves = |tools: [&str; 2], scene: &Scene| {
        for (tool, ip) in tools.iter().zip(["10.77.0.1", "fd77::1"]) {
            scene.sh(&format!(
                "{tool} -t nat -I OUTPUT -p tcp -d {ip} -j REDIRECT --to-port 15001"
            ));
            scene.sh(&format!(
                "{tool} -t nat -I PREROUTING -p tcp --dport 8080 -j REDIRECT --to-port 15001"
            ));
        }
    };
    for backend in BACKENDS {
        let scene = Scene::new(&[8080]);
        let expect_ours = || {
            for family in families() {
                expect(&scene.pod, APP, (family.peer, 8080), "outbound", backend);
                expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            }
        };
        // Whoever is registered last comes first: the other world, then our own, in it strangers and then we.
        let worlds = [
            ["iptables-legacy", "ip6tables-legacy"],
            ["iptables-nft", "ip6tables-nft"],
        ];
        let worlds = if backend == "iptables-legacy" {
            [worlds[1], worlds[0]]
        } else {
            worlds
        };
        for world in worlds {
            thieves(world, &scene);
        }
        let output = scene.init(&flags(backend, &[]));
        success(&output);
        let said = String::from_utf8_lossy(&output.stderr);
        for chain in ["PREROUTING", "OUTPUT"] {
            for place in [
                format!("chain {chain} of iptables-legacy (ipv6) redirects"),
                format!("chain {chain} of nftables table nat redirects"),
            ] {
                assert!(said.contains(&place), "{backend}: {said}");
            }
        }
        expect_ours();
        // One who comes later is behind ours in its own table, or found out and put behind by the next run.
        if backend != "nft" {
            let own = [backend, &backend.replace("ip", "ip6")];
            thieves(own, &scene);
            let who = scene.pod.run(|| dial(APP, (families()[0].peer, 8080).into())).unwrap();
            assert!(who.is_err(), "{backend}: {who:?}");
            assert_eq!(scene.code(&flags(backend, &["--check"])), 3, "{backend}");
            scene.apply(backend, &[]);
            assert_eq!(scene.code(&flags(backend, &["--check"])), 0, "{backend}");
            expect_ours();
        }
    }
}

/// T52, where ours do not win: the world of our backend was there before the other one. That is told and found out.
#[test]
fn strangers_who_come_first_are_named_and_found_out() {
    if !root() {
        return;
    }
    for (backend, first) in [("iptables-nft", "iptables-legacy"), ("iptables-legacy", "iptables-nft")] {
        let scene = Scene::bare();
        scene.sh(&format!(
            "{backend} -t nat -A OUTPUT -j ACCEPT; {backend} -t nat -F OUTPUT"
        ));
        scene.sh(&format!(
            "{first} -t nat -A OUTPUT -p tcp -d 192.0.2.0/24 -j REDIRECT --to-port 15001"
        ));
        let mut verified = flags(backend, &[]);
        verified.retain(|flag| *flag != "--verify=false");
        let (code, report) = scene.report(&verified);
        assert_eq!(code, 95, "{report}");
        assert!(
            report["verified"]["ipv4"]
                .as_str()
                .unwrap()
                .starts_with("not redirected"),
            "{report}"
        );
        assert_eq!(report["verified"]["ipv6"], "redirected");
        let warnings = report["warnings"].to_string();
        let place = if first == "iptables-legacy" {
            "chain OUTPUT of iptables-legacy (ipv4)"
        } else {
            "chain OUTPUT of nftables table nat"
        };
        assert!(warnings.contains(place), "{report}");
        // Natively ours are new, and ahead of who comes later if told to be.
        let native = |more: &[&str]| scene.report(&[&FLAGS[..], &["--backend", "nft"], more].concat()).0;
        assert_eq!(native(&[]), 0);
        scene.sh("nft 'table ip later { chain c { type nat hook output priority -100; tcp dport 1-60000 redirect to :15001; }; }'");
        assert_eq!(native(&[]), 95);
        assert_eq!(native(&["--priority", "-101"]), 0);
    }
}

/// A connection of the proxy's user is left alone, whoever's it is.
#[test]
fn applications_of_the_proxys_user_are_named() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    let uid = PROXY_UID.to_string();
    let mut application = scene.pod.command("setpriv");
    application.args(["--reuid", &uid, "--clear-groups", "sleep", "60"]);
    let mut application = application.spawn().unwrap();
    let pid = application.id();
    let comm = format!("/proc/{pid}/comm");
    eventually("it runs as the proxy's user", || {
        fs::read_to_string(&comm).unwrap() == "sleep\n"
    });
    let warned = || scene.report(&flags("nft", &[])).1["warnings"].to_string();
    let (with, other) = (warned(), scene.report(&flags("nft", &["-u", "2103"])).1);
    application.kill().unwrap();
    application.wait().unwrap();
    assert!(
        with.contains(&format!("the connections of sleep (pid {pid}) bypass")),
        "{with}"
    );
    assert_eq!(other["warnings"].to_string(), "[]");
    assert_eq!(warned(), "[]");
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
                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{backend}: {to}");
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
        // Also when it is in one family only.
        assert_eq!(
            scene.code(&[check.as_slice(), &["--subnets-to-ignore", "fd01::/64"]].concat()),
            3,
            "{backend}"
        );
        if backend != "nft" {
            scene.sh(&format!(
                "{} -t nat -D PROXY_INIT_OUTPUT 1",
                backend.replace("ip", "ip6")
            ));
            assert_eq!(scene.code(&check), 3, "{backend}");
        }
        success(&scene.init(&["--clean"]));
    }
    // Without a backend named, whoever holds the rules is found.
    assert_eq!(scene.code(&check), 4);
    scene.apply("iptables-nft", &[]);
    assert_eq!(scene.code(&check), 0);
}
