//! Applying, changing and removing rules.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::{fs, io, thread};

use crate::fixture::{
    APP, BACKENDS, BIN, FLAGS, Family, Fixture, PROXY_UID, ROOT, assert_success, can_run, dial, echo, eventually,
    expect, families, fetch_answer, flags, open,
};

#[test]
fn applying_twice_changes_nothing() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    for backend in BACKENDS {
        let more = [
            "--report",
            "json",
            "--subnets-to-ignore",
            "10.0.0.0/8,fd00::/8",
            "--drop-invalid",
        ];
        assert_eq!(result(&fixture.apply(backend, &more)), "applied", "{backend}");
        let before = fixture.dump();
        assert_eq!(result(&fixture.apply(backend, &more)), "unchanged", "{backend}");
        assert_eq!(fixture.dump(), before, "{backend}");
        // Manual changes are repaired.
        match backend {
            "nft" => fixture.sh("nft flush chain inet l5d_init outbound"),
            _ => fixture.sh(&format!("{backend} -t nat -D PROXY_INIT_OUTPUT 1")),
        };
        assert_eq!(result(&fixture.apply(backend, &more)), "applied", "{backend}");
        assert_eq!(fixture.dump(), before, "{backend}");
    }
}

fn result(report: &str) -> String {
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    report["result"].as_str().unwrap().to_owned()
}

/// The commands of Linkerd's init for one family (no flags, redirect all).
pub(crate) fn linkerd_init_commands(program: &str) -> String {
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

/// Each case runs Linkerd's commands with a tool that uses the same kernel interface as the backend, or the other interface.
#[test]
fn linkerds_rules_are_taken_over_and_linkerd_takes_over_ours() {
    if !can_run() {
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
        let fixture = Fixture::new(&[8080]);
        let tools = [tool.to_owned(), tool.replace("ip", "ip6")];
        let expect_jumps = |tool: &str, count: usize| {
            let saved = fixture.sh(&format!("{tool}-save -t nat"));
            for jump in [
                ("-A PREROUTING ", "-j PROXY_INIT_REDIRECT"),
                ("-A OUTPUT ", "-j PROXY_INIT_OUTPUT"),
            ] {
                let is_jump = |line: &&str| line.starts_with(jump.0) && line.contains(jump.1);
                assert_eq!(saved.lines().filter(is_jump).count(), count, "{case}, {tool}: {jump:?}");
            }
        };
        let expect_redirects = || {
            for family in families() {
                expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", &case);
                expect(&fixture.pod, APP, (family.peer, 8080), "outbound", &case);
            }
        };
        for command in &tools {
            fixture.sh(&linkerd_init_commands(command));
            expect_jumps(command, 1);
        }
        fixture.apply(backend, &[]);
        for (command, family) in tools.iter().zip(["iptables", "ip6tables"]) {
            expect_jumps(command, usize::from(backend == tool));
            if backend != "nft" {
                expect_jumps(&backend.replace("iptables", family), 1);
            }
        }
        expect_redirects();
        for command in &tools {
            fixture.sh(&linkerd_init_commands(command));
            expect_jumps(command, 1);
        }
        expect_redirects();
        // `--clean` removes Linkerd's rules too.
        assert_success(&fixture.init(&["--clean"]));
        assert!(
            !fixture.dump().contains("PROXY_INIT") && !fixture.dump().contains("l5d_init"),
            "{case}"
        );
    }
}

#[test]
fn invalid_flags_are_refused_and_change_nothing() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    for backend in BACKENDS {
        fixture.apply(backend, &[]);
        let before = fixture.dump();
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
            let output = fixture.init(&flags(backend, bad));
            assert_eq!(output.status.code(), Some(1), "{bad:?}");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains(bad[0]), "{bad:?}: {stderr}");
        }
        assert_eq!(fixture.dump(), before, "{backend}");
    }
    let output = fixture.init(&flags(
        "nft",
        &["--inbound-ports-to-ignore", "70000,80", "--lenient", "--simulate"],
    ));
    assert_success(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("elements = { 80 }"));
}

#[test]
fn a_rule_that_the_kernel_refuses_leaves_the_former_rules() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    fixture.apply("nft", &[]);
    let before = fixture.dump();
    // The kernel does not allow NAT chains at such an early priority.
    let output = fixture.init(&flags("nft", &["--priority", "-300"]));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("nat at prerouting -300"),
        "{output:?}"
    );
    assert_eq!(fixture.dump(), before);

    // One family is refused while the other is committed, and the commit must be undone. A failing undo is reported.
    for (backend, family) in [
        ("iptables-nft", "ip6tables"),
        ("iptables-nft", "iptables"),
        ("iptables-legacy", "ip6tables"),
        ("iptables-legacy", "iptables"),
    ] {
        fixture.apply(backend, &["--drop-invalid"]);
        let before = fixture.dump();
        // Runs with a restore program that fails if its arguments match this shell pattern.
        let error_with_broken_program = |broken_arguments: &str| {
            let programs = tempfile::tempdir().unwrap();
            let broken = programs
                .path()
                .join(format!("{}-restore", backend.replace("iptables", family)));
            // The kernel refuses a later rule: packets that arrive have no owner.
            let script = format!(
                "#!/bin/sh\ncase \"$*\" in {broken_arguments}) sed 's/^-[AI] PREROUTING/& -m owner --uid-owner 7/' | \
                 PATH=${{PATH#*:}} $(basename $0) \"$@\";; *) PATH=${{PATH#*:}} exec $(basename $0) \"$@\";; esac\n"
            );
            fs::write(&broken, script).unwrap();
            fs::set_permissions(&broken, fs::Permissions::from_mode(0o755)).unwrap();
            let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").unwrap());
            let mut command = fixture.pod.command(BIN);
            let output = command
                .args(flags(backend, &["-g", "7"]))
                .env("PATH", path)
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(1), "{backend}, {family}");
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        let stderr = error_with_broken_program("*--noflush*");
        assert!(
            stderr.contains("failed") && !stderr.contains("could not be put back"),
            "{stderr}"
        );
        assert_eq!(fixture.dump(), before, "{backend}, {family}");
        let stderr = error_with_broken_program("*");
        assert!(stderr.contains("could not be put back"), "{stderr}");
        fixture.apply(backend, &["--drop-invalid"]);
        assert_eq!(fixture.dump(), before, "{backend}, {family}");
    }
}

/// Opens connections in both directions and families.
pub(crate) fn open_connections(fixture: &Fixture, port: u16) -> Vec<(TcpStream, String)> {
    let both = |family: Family| {
        let (inbound, inbound_answer) = open(&fixture.peer, ROOT, (family.pod[0], port).into()).unwrap();
        let (outbound, outbound_answer) = open(&fixture.pod, APP, (family.peer, port).into()).unwrap();
        [(inbound, inbound_answer.server), (outbound, outbound_answer.server)]
    };
    families().into_iter().flat_map(both).collect()
}

#[test]
fn open_connections_survive_new_and_changed_rules() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        let mut before = open_connections(&fixture, 8080);
        assert!(
            before
                .iter()
                .all(|(_, server)| ["app", "peer"].contains(&server.as_str())),
            "{before:?}"
        );
        fixture.apply(backend, &[]);
        let mut between = open_connections(&fixture, 8080);
        assert!(
            between
                .iter()
                .all(|(_, server)| ["inbound", "outbound"].contains(&server.as_str())),
            "{between:?}"
        );
        fixture.apply(
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
        let mut after = open_connections(&fixture, 8080);
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

#[test]
fn cleaning_restores_the_previous_state_and_keeps_other_rules() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        add_other_rules(&fixture);
        let before = fixture.dump();
        fixture.apply(backend, &["--drop-invalid"]);
        assert_eq!(without_ours(&fixture.dump()), before, "{backend}");
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
        }
        assert_success(&fixture.init(&["--clean=now"]));
        assert_eq!(fixture.dump(), before, "{backend}");
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "app", backend);
            expect(&fixture.pod, APP, (family.peer, 8080), "peer", backend);
        }
        let (code, report) = fixture.report(&["--clean"]);
        assert_eq!((code, &report["result"]), (0, &"absent".into()));
        assert_eq!(fixture.dump(), before, "{backend}");
    }
}

/// Rules of other programs, in shared and in their own tables, for each kernel interface.
fn add_other_rules(fixture: &Fixture) {
    let rules = "-t nat -N SOMEBODY; T -t nat -A SOMEBODY -j RETURN; T -t nat -A OUTPUT -p udp -j SOMEBODY; \
                 T -t mangle -A PREROUTING -p udp -j ACCEPT; T -t nat -A PREROUTING -p udp -j ACCEPT; \
                 T -t filter -A INPUT -p udp --dport 9 -j DROP; T -t raw -A PREROUTING -p udp -j ACCEPT";
    for tool in ["iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"] {
        fixture.sh(&format!("T() {{ {tool} \"$@\"; }}; T {rules}"));
    }
    for tool in ["iptables-nft", "iptables-legacy"] {
        fixture.sh(&format!(
            "{tool} -t nat -A PREROUTING -p tcp --dport 1 -j DNAT --to-destination 10.250.0.1"
        ));
    }
    fixture.sh("nft 'table inet other { chain c { type nat hook output priority -90; tcp dport 2 counter redirect to :3; }; }'");
}

/// A dump without our rules.
fn without_ours(dump: &str) -> String {
    let mut in_our_table = false;
    let lines = dump.lines().filter(|line| {
        in_our_table |= line.starts_with("table inet l5d_init");
        let ours = in_our_table || line.contains("PROXY_INIT");
        in_our_table &= *line != "}";
        !ours
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn draining_lets_open_connections_end() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        fixture.apply(backend, &[]);
        let mut streams = open_connections(&fixture, 8080);
        assert!(
            streams
                .iter()
                .all(|(_, server)| ["inbound", "outbound"].contains(&server.as_str()))
        );
        thread::scope(|scope| {
            let cleaning = scope.spawn(|| fixture.init(&["--clean=drain", "--drain-timeout", "20s"]));
            for family in families() {
                let direct = || {
                    fetch_answer(&fixture.peer, ROOT, (family.pod[0], 8080).into())
                        .unwrap()
                        .server
                        == "app"
                };
                eventually("new connections to be direct", direct);
                expect(&fixture.pod, APP, (family.peer, 8080), "peer", backend);
            }
            assert!(!cleaning.is_finished(), "{backend}: did not wait");
            for (stream, server) in &mut streams {
                echo(stream, &vec![7; 1 << 20]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
            }
            drop(streams);
            let output = cleaning.join().unwrap();
            assert_success(&output);
            assert!(
                !String::from_utf8_lossy(&output.stderr).contains("still open"),
                "{output:?}"
            );
        });
        assert!(
            !fixture.dump().contains("l5d_init") && !fixture.dump().contains("PROXY_INIT"),
            "{backend}"
        );
        // Connections that do not end in time are reset, with a warning.
        fixture.apply(backend, &[]);
        let (mut kept, _) = open(&fixture.peer, ROOT, (families()[0].pod[0], 8080).into()).unwrap();
        echo(&mut kept, b"still here").unwrap();
        let output = fixture.init(&["--clean=drain", "--drain-timeout", "200ms"]);
        assert_success(&output);
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("1 connection was still open"),
            "{output:?}"
        );
        let error = echo(&mut kept, b"cut off").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{backend}");
    }
}

/// Our rules take precedence over existing rules of the other kernel interface, and over other rules in the same chain.
#[test]
fn our_rules_take_precedence_over_foreign_ones_of_both_kernel_interfaces_with_a_warning() {
    if !can_run() {
        return;
    }
    let add_redirects = |tools: [&str; 2], fixture: &Fixture| {
        for (tool, ip) in tools.iter().zip(["10.77.0.1", "fd77::1"]) {
            fixture.sh(&format!(
                "{tool} -t nat -I OUTPUT -p tcp -d {ip} -j REDIRECT --to-port 15001"
            ));
            fixture.sh(&format!(
                "{tool} -t nat -I PREROUTING -p tcp --dport 8080 -j REDIRECT --to-port 15001"
            ));
        }
    };
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        let expect_ours = || {
            for family in families() {
                expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
                expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            }
        };
        // Foreign rules are added through the other iptables flavour, then through the flavour of our backend. The kernel evaluates
        // first the flavour that registered its hooks last, here the backend's own. Within it, our rules must precede the foreign
        // ones.
        let flavours = [
            ["iptables-legacy", "ip6tables-legacy"],
            ["iptables-nft", "ip6tables-nft"],
        ];
        let flavours = if backend == "iptables-legacy" {
            [flavours[1], flavours[0]]
        } else {
            flavours
        };
        for flavour in flavours {
            add_redirects(flavour, &fixture);
        }
        let output = fixture.init(&flags(backend, &[]));
        assert_success(&output);
        let stderr = String::from_utf8_lossy(&output.stderr);
        for chain in ["PREROUTING", "OUTPUT"] {
            for warning in [
                format!("chain {chain} of iptables-legacy (ipv6) redirects"),
                format!("chain {chain} of nftables table nat redirects"),
            ] {
                assert!(stderr.contains(&warning), "{backend}: {stderr}");
            }
        }
        expect_ours();
        // With nftables, a rule that is added later is evaluated after ours. With iptables it can be inserted before ours;
        // then `--check` reports it, and the next run moves ours to the front.
        if backend != "nft" {
            let own = [backend, &backend.replace("ip", "ip6")];
            add_redirects(own, &fixture);
            let connected = fixture
                .pod
                .run(|| dial(APP, (families()[0].peer, 8080).into()))
                .unwrap();
            assert!(connected.is_err(), "{backend}: {connected:?}");
            assert_eq!(fixture.exit_code(&flags(backend, &["--check"])), 3, "{backend}");
            fixture.apply(backend, &[]);
            assert_eq!(fixture.exit_code(&flags(backend, &["--check"])), 0, "{backend}");
            expect_ours();
        }
    }
}

/// Our rules do not take precedence if the backend's kernel interface registered before the other one; verification detects
/// it.
#[test]
fn rules_with_precedence_over_ours_are_named_and_detected() {
    if !can_run() {
        return;
    }
    for (backend, evaluated_first) in [("iptables-nft", "iptables-legacy"), ("iptables-legacy", "iptables-nft")] {
        let fixture = Fixture::bare();
        fixture.sh(&format!(
            "{backend} -t nat -A OUTPUT -j ACCEPT; {backend} -t nat -F OUTPUT"
        ));
        fixture.sh(&format!(
            "{evaluated_first} -t nat -A OUTPUT -p tcp -d 192.0.2.0/24 -j REDIRECT --to-port 15001"
        ));
        let mut verified = flags(backend, &[]);
        verified.retain(|flag| *flag != "--verify=false");
        let (code, report) = fixture.report(&verified);
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
        let chain = if evaluated_first == "iptables-legacy" {
            "chain OUTPUT of iptables-legacy (ipv4)"
        } else {
            "chain OUTPUT of nftables table nat"
        };
        assert!(warnings.contains(chain), "{report}");
        // The chains of the backend `nft` are newer than the foreign ones, so they are evaluated first. A chain that is added
        // later precedes them, unless they have a lower priority number.
        let nft = |more: &[&str]| fixture.report(&[&FLAGS[..], &["--backend", "nft"], more].concat()).0;
        assert_eq!(nft(&[]), 0);
        fixture.sh("nft 'table ip later { chain c { type nat hook output priority -100; tcp dport 1-60000 redirect to :15001; }; }'");
        assert_eq!(nft(&[]), 95);
        assert_eq!(nft(&["--priority", "-101"]), 0);
    }
}

/// Connections of processes that run as the proxy's user are not redirected.
#[test]
fn processes_of_the_proxys_user_are_named() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let uid = PROXY_UID.to_string();
    let mut application = fixture.pod.command("setpriv");
    application.args(["--reuid", &uid, "--clear-groups", "sleep", "60"]);
    let mut application = application.spawn().unwrap();
    let pid = application.id();
    let comm = format!("/proc/{pid}/comm");
    eventually("it runs as the proxy's user", || {
        fs::read_to_string(&comm).unwrap() == "sleep\n"
    });
    let read_warnings = || fixture.report(&flags("nft", &[])).1["warnings"].to_string();
    let (warnings, other_report) = (read_warnings(), fixture.report(&flags("nft", &["-u", "2103"])).1);
    application.kill().unwrap();
    application.wait().unwrap();
    assert!(
        warnings.contains(&format!("the connections of sleep (pid {pid}) bypass")),
        "{warnings}"
    );
    assert_eq!(other_report["warnings"].to_string(), "[]");
    assert_eq!(read_warnings(), "[]");
}

#[test]
fn concurrent_runs_leave_the_rules_of_one_run() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        for _ in 0..3 {
            let fixture = Fixture::bare();
            let other = flags(backend, &["-g", "7"]);
            let usual = flags(backend, &[]);
            thread::scope(|scope| {
                let runs: Vec<_> = [&usual, &other, &usual, &other]
                    .map(|flags| scope.spawn(|| fixture.init(flags)))
                    .into();
                runs.into_iter().for_each(|run| assert_success(&run.join().unwrap()));
            });
            let codes = [&usual, &other].map(|flags| fixture.exit_code(&[flags.as_slice(), &["--check"]].concat()));
            assert!(matches!(codes, [0, 3] | [3, 0]), "{backend}: {codes:?}");
        }
    }
}

#[test]
fn without_a_proxy_connections_are_refused_not_direct() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::bare();
        crate::fixture::serve(&fixture.pod, "app", "[::]:8080");
        crate::fixture::serve(&fixture.peer, "peer", "[::]:8080");
        fixture.apply(backend, &[]);
        for family in families() {
            for (from, user, to) in [(&fixture.peer, ROOT, family.pod[0]), (&fixture.pod, APP, family.peer)] {
                let to = SocketAddr::from((to, 8080));
                let error = from.run(|| dial(user, to)).unwrap().unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{backend}: {to}");
            }
        }
    }
}

#[test]
fn check_distinguishes_equal_different_and_absent_rules() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let check: Vec<&str> = FLAGS.iter().copied().chain(["--check"]).collect();
    for backend in BACKENDS {
        let check = flags(backend, &["--check"]);
        assert_eq!(fixture.exit_code(&check), 4, "{backend}");
        fixture.apply(backend, &[]);
        let before = fixture.dump();
        assert_eq!(fixture.exit_code(&check), 0, "{backend}");
        assert_eq!(
            fixture.exit_code(&[check.as_slice(), &["-g", "7"]].concat()),
            3,
            "{backend}"
        );
        assert_eq!(fixture.dump(), before, "{backend}");
        // Differences in one family count too.
        assert_eq!(
            fixture.exit_code(&[check.as_slice(), &["--subnets-to-ignore", "fd01::/64"]].concat()),
            3,
            "{backend}"
        );
        if backend != "nft" {
            fixture.sh(&format!(
                "{} -t nat -D PROXY_INIT_OUTPUT 1",
                backend.replace("ip", "ip6")
            ));
            assert_eq!(fixture.exit_code(&check), 3, "{backend}");
        }
        assert_success(&fixture.init(&["--clean"]));
    }
    // Without `--backend`, the backend that holds the rules is found.
    assert_eq!(fixture.exit_code(&check), 4);
    fixture.apply("iptables-nft", &[]);
    assert_eq!(fixture.exit_code(&check), 0);
}
