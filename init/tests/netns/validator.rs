//! T70 and `--verify`: is traffic redirected?

use std::io::Write;
use std::net::TcpListener;
use std::process::{Output, Stdio};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::scene::{BACKENDS, BIN, FLAGS, Scene, eventually, root, success};

const V4: [&str; 4] = ["validate", "--timeout=2s", "--connect-addr", "10.99.0.1:1404"];
const V6: [&str; 6] = [
    "validate",
    "--timeout=2s",
    "--listen-addr",
    "[::]:4140",
    "--connect-addr",
    "[fd99::1]:20001",
];

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// T70.
#[test]
fn the_validator_succeeds_with_rules_only() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    // The peer has what is dialled, and says something of its own.
    scene
        .peer
        .ip("addr add 10.99.0.1/32 dev lo\naddr add fd99::1/128 dev lo nodad\n")
        .unwrap();
    for addr in ["10.99.0.1:1404", "[fd99::1]:20001"] {
        let listener = scene.peer.run(|| TcpListener::bind(addr)).unwrap().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                stream.unwrap().write_all(b"somebody else\n").unwrap();
            }
        });
    }
    for trial in [&V4[..], &V6] {
        let output = scene.init(trial);
        assert_eq!(output.status.code(), Some(95), "{output:?}");
        assert!(said(&output).contains("somebody else"), "{output:?}");
    }
    for backend in BACKENDS {
        scene.apply(backend, &[]);
        for trial in [&V4[..], &V6] {
            success(&scene.init(trial));
        }
    }
    // Under Linkerd's name it is the validator without being told.
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("linkerd2-network-validator");
    std::os::unix::fs::symlink(BIN, &link).unwrap();
    success(&scene.pod.command(&link).args(&V4[1..]).output().unwrap());
}

/// T70.
#[test]
fn the_validator_says_what_is_wrong() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    // Nobody answers: the peer drops what it is asked.
    scene
        .peer
        .command("nft")
        .args(["table inet t { chain c { type filter hook input priority 0; meta l4proto tcp drop; }; }"])
        .status()
        .unwrap();
    let dial = ["validate", "--connect-addr", "10.77.0.1:1404"];
    let output = scene.init(&[&dial[..], &["--timeout", "300ms"]].concat());
    assert_eq!(output.status.code(), Some(95));
    assert!(said(&output).contains("no answer within 300ms"), "{output:?}");

    let mut run = scene.pod.command(BIN);
    let run = run
        .args(dial)
        .args(["--timeout", "20s"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It handles signals by the time it listens.
    eventually("the listener", || scene.sh("ss -ltn 'sport = :4140'").contains("4140"));
    kill(Pid::from_raw(run.id().cast_signed()), Signal::SIGTERM).unwrap();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(95));
    assert!(said(&output).contains("SIGTERM"), "{output:?}");

    scene.pod.ip("route del default\n").unwrap();
    let output = scene.init(&["validate"]);
    assert_eq!(output.status.code(), Some(95));
    assert!(
        said(&output).contains("there is no route to 192.0.2.2:1404"),
        "{output:?}"
    );
    for bad in [["validate", "--timeout=10"], ["validate", "--listen-addr=4140"]] {
        assert_eq!(scene.code(&bad), 1, "{bad:?}");
    }
}

#[test]
fn verifying_proves_each_family_that_has_a_route() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    let verify = |more: &[&str]| {
        let output = scene.init(&[&FLAGS[..], &["--report", "json"], more].concat());
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), report["verified"].clone())
    };
    for backend in BACKENDS {
        let (code, verified) = verify(&["--backend", backend]);
        assert_eq!(
            (code, &verified["ipv4"], &verified["ipv6"]),
            (0, &"redirected".into(), &"redirected".into())
        );
    }
    let skipped = |verified: &serde_json::Value, family: &str, reason: &str| {
        let said = verified[family].as_str().unwrap();
        assert!(said.starts_with("skipped: ") && said.contains(reason), "{said}");
    };
    scene.sh("ip -6 route del default");
    let (code, verified) = verify(&[]);
    assert_eq!((code, &verified["ipv4"]), (0, &"redirected".into()));
    skipped(&verified, "ipv6", "no route");
    skipped(&verify(&["-u", "0"]).1, "ipv4", "runs as the proxy");

    // A stranger that comes first takes connections away, and that is found out.
    let thief =
        "table ip thief { chain c { type nat hook output priority -110; tcp dport 1-60000 redirect to :15001; }; }";
    success(&scene.pod.command("nft").arg(thief).output().unwrap());
    let (code, verified) = verify(&["-g", "7"]);
    assert_eq!(code, 95, "{verified}");
    assert!(
        verified["ipv4"]
            .as_str()
            .unwrap()
            .starts_with("not redirected: dialling 192.0.2.2:1404"),
        "{verified}"
    );
    success(
        &scene
            .pod
            .command("nft")
            .args(["delete", "table", "ip", "thief"])
            .output()
            .unwrap(),
    );

    scene.proxy();
    let (code, verified) = verify(&[]);
    assert_eq!(code, 0);
    skipped(&verified, "ipv4", "held");
}
