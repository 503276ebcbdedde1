//! `validate` and `--verify`: whether traffic is redirected.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Output, Stdio};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{BACKENDS, BIN, FLAGS, Fixture, assert_success, can_run, eventually};

const V4: [&str; 4] = ["validate", "--timeout=2s", "--connect-addr", "10.99.0.1:1404"];
const V6: [&str; 6] = [
    "validate",
    "--timeout=2s",
    "--listen-addr",
    "[::]:4140",
    "--connect-addr",
    "[fd99::1]:20001",
];

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_validator_succeeds_only_with_rules() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    // The peer has the test address, and sends another answer.
    fixture
        .peer
        .ip("addr add 10.99.0.1/32 dev lo\naddr add fd99::1/128 dev lo nodad\n")
        .unwrap();
    for addr in ["10.99.0.1:1404", "[fd99::1]:20001"] {
        let listener = fixture.peer.run(|| TcpListener::bind(addr)).unwrap().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                stream.unwrap().write_all(b"another server\n").unwrap();
            }
        });
    }
    for check in [&V4[..], &V6] {
        let output = fixture.init(check);
        assert_eq!(output.status.code(), Some(95), "{output:?}");
        assert!(stderr(&output).contains("another server"), "{output:?}");
    }
    for backend in BACKENDS {
        fixture.apply(backend, &[]);
        for check in [&V4[..], &V6] {
            assert_success(&fixture.init(check));
        }
    }
    // Under the name of Linkerd's program, it runs `validate`.
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("linkerd2-network-validator");
    std::os::unix::fs::symlink(BIN, &link).unwrap();
    assert_success(&fixture.pod.command(&link).args(&V4[1..]).output().unwrap());
}

#[test]
fn the_validator_reports_the_reason_of_a_failure() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    // No answer: the peer drops the packets.
    fixture
        .peer
        .command("nft")
        .args(["table inet t { chain c { type filter hook input priority 0; meta l4proto tcp drop; }; }"])
        .status()
        .unwrap();
    for (arguments, unrouted_addr) in [
        (
            [
                "validate",
                "--connect-addr",
                "10.77.0.1:1404",
                "--listen-addr=0.0.0.0:4140",
            ],
            "192.0.2.2:1404",
        ),
        (
            [
                "validate",
                "--connect-addr",
                "[fd77::1]:1404",
                "--listen-addr=[::]:4140",
            ],
            "[2001:db8::2]:1404",
        ),
    ] {
        let (connect_addr, listen_flag) = (arguments[2], arguments[3]);
        let output = fixture.init(&[&arguments[..], &["--timeout", "300ms"]].concat());
        assert_eq!(output.status.code(), Some(95));
        assert!(stderr(&output).contains("no answer within 300ms"), "{output:?}");

        let mut run = fixture.pod.command(BIN);
        let run = run
            .args(arguments)
            .args(["--timeout", "20s"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The validator handles signals before it listens.
        eventually("the listener", || {
            fixture.sh("ss -ltn 'sport = :4140'").contains("4140")
        });
        kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGTERM).unwrap();
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(95));
        assert!(stderr(&output).contains("SIGTERM"), "{output:?}");

        // Connects to a closed port of the pod's own address.
        let refused = connect_addr.replace("77.0.1", "77.0.2").replace("::1", "::2");
        let output = fixture.init(&["validate", listen_flag, "--connect-addr", &refused]);
        assert_eq!(output.status.code(), Some(95));
        assert!(stderr(&output).contains("refused"), "{output:?}");

        fixture.sh(if unrouted_addr.starts_with('[') {
            "ip -6 route del default"
        } else {
            "ip route del default"
        });
        let output = fixture.init(&["validate", listen_flag, "--connect-addr", unrouted_addr]);
        assert_eq!(output.status.code(), Some(95));
        assert!(
            stderr(&output).contains(&format!("there is no route to {unrouted_addr}")),
            "{output:?}"
        );
    }
    for bad in [["validate", "--timeout=10"], ["validate", "--listen-addr=4140"]] {
        assert_eq!(fixture.exit_code(&bad), 1, "{bad:?}");
    }
}

#[test]
fn verification_covers_each_family_that_has_a_route() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let verify = |more: &[&str]| {
        let (code, report) = fixture.report(&[&FLAGS[..], more].concat());
        (code, report["verified"].clone(), report["warnings"].to_string())
    };
    // A family that was not checked also causes a warning.
    let expect_skipped = |more: &[&str], family: &str, reason: &str| {
        let (code, verified, warnings) = verify(more);
        let verdict = verified[family].as_str().unwrap();
        assert!(
            code == 0 && verdict.starts_with("skipped: ") && verdict.contains(reason),
            "{verdict}"
        );
        assert!(
            warnings.contains(&format!("{family} was not checked")) && warnings.contains(reason),
            "{warnings}"
        );
    };
    let foreign = |family: &str| {
        format!(
            "table {family} foreign {{ chain c {{ type nat hook output priority -110; tcp dport 1-60000 redirect to :15001; }}; }}"
        )
    };
    for backend in BACKENDS {
        let named = ["--backend", backend];
        let (code, verified, warnings) = verify(&named);
        assert_eq!(
            (code, &verified["ipv4"], &verified["ipv6"]),
            (0, &"redirected".into(), &"redirected".into())
        );
        assert!(!warnings.contains("not checked"), "{warnings}");
        // A chain of another program that takes precedence and redirects connections is detected.
        for (family, affected, other) in [("ip", "ipv4", "ipv6"), ("ip6", "ipv6", "ipv4")] {
            fixture.sh(&format!("nft '{}'", foreign(family)));
            let (code, verified, _) = verify(&named);
            assert_eq!(
                (code, &verified[other]),
                (95, &"redirected".into()),
                "{backend}: {verified}"
            );
            let verdict = verified[affected].as_str().unwrap();
            assert!(verdict.starts_with("not redirected: dialling "), "{backend}: {verdict}");
            fixture.sh(&format!("nft delete table {family} foreign"));
        }
        expect_skipped(&[&named[..], &["-u", "0"]].concat(), "ipv4", "runs as the proxy");
    }
    fixture.sh("ip -6 route del default");
    expect_skipped(&[], "ipv6", "no route");
    assert_eq!(verify(&[]).1["ipv4"], "redirected");

    fixture.start_proxy();
    for backend in BACKENDS {
        expect_skipped(&["--backend", backend], "ipv4", "in use");
    }
}
