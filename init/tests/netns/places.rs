//! T55–T61: other namespaces, few rights, missing parts.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::scene::{APP, BIN, FLAGS, ROOT, Scene, expect, families, flags, root, success};

/// T55.
#[test]
fn simulating_does_nothing_and_prints_what_would_be_done() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    for (backend, by_hand) in [("nft", "nft -f -"), ("iptables-nft", "")] {
        let before = scene.dump();
        let trace = tempfile::NamedTempFile::new().unwrap();
        let simulate = [
            "--subnets-to-ignore",
            "10.9.0.0/16,fd09::/16",
            "--simulate",
            "--timeout-close-wait-secs",
            "9",
        ];
        let mut command = scene.pod.command("strace");
        let output = command
            .args([
                "-f",
                "-o",
                trace.path().to_str().unwrap(),
                "-e",
                "trace=execve,fork,vfork,clone,socket,openat",
                BIN,
            ])
            .args(flags(backend, &simulate))
            .output()
            .unwrap();
        success(&output);
        let calls = fs::read_to_string(trace.path()).unwrap();
        assert_eq!(
            calls.lines().filter(|line| line.contains("execve(")).count(),
            1,
            "{calls}"
        );
        for call in ["socket(", "clone", "fork(", "/proc/sys/net", "O_WRONLY", "O_RDWR"] {
            assert!(!calls.contains(call), "{call}: {calls}");
        }
        assert_eq!(scene.dump(), before);

        let script = String::from_utf8(output.stdout).unwrap();
        feed(&scene, by_hand, &script);
        let handmade = scene.dump();
        success(&scene.init(&["--clean"]));
        scene.apply(backend, &simulate[..2]);
        assert_eq!(scene.dump(), handmade, "{backend}");
        success(&scene.init(&["--clean"]));
    }
}

/// Runs a printed script as its head lines say, or with the given command.
fn feed(scene: &Scene, command: &str, script: &str) {
    let parts: Vec<(String, String)> = match command {
        "" => script
            .split("# ")
            .skip(1)
            .map(|part| part.split_once('\n').unwrap())
            .map(|(command, script)| (command.to_owned(), script.to_owned()))
            .collect(),
        command => vec![(command.to_owned(), script.to_owned())],
    };
    for (command, script) in parts {
        scene.sh(&format!("{command} <<'END'\n{script}END"));
    }
}

/// T56.
#[test]
fn another_namespace_is_programmed_and_only_that_one() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080]);
    let setting = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    let here = fs::read_to_string(setting).ok();
    let there = scene.pod.path();
    let there = there.to_str().unwrap();
    for backend in ["nft", "iptables-nft"] {
        let flags = flags(backend, &["--netns", there, "--timeout-close-wait-secs", "123"]);
        success(&scene.peer.command(BIN).args(flags).output().unwrap());
        for family in families() {
            expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
        }
        assert_eq!(scene.sh(&format!("cat {setting}")), "123\n");
    }
    assert_eq!(fs::read_to_string(setting).ok(), here);
    let peer = scene.peer.command("nft").args(["list", "ruleset"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&peer.stdout), "");
    let missing = Command::new(BIN)
        .args(flags("nft", &["--netns", "/run/netns/ti-none"]))
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(1));
}

/// T57.
#[test]
fn a_namespace_of_another_user_namespace_is_programmed_from_outside() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    let mut command = scene.pod.command("unshare");
    let mut holder = command
        .args(["--user", "--map-root-user", "--net", "sleep", "60"])
        .spawn()
        .unwrap();
    let path = format!("/proc/{}/ns/net", holder.id());
    let own = fs::read_link(scene.pod.path()).ok();
    crate::scene::eventually("the namespaces", || {
        let uid_map = fs::read_to_string(format!("/proc/{}/uid_map", holder.id())).unwrap_or_default();
        uid_map.split_whitespace().nth(2) == Some("1") && fs::read_link(&path).ok() != own
    });
    let output = Command::new(BIN)
        .args(flags("nft", &["--netns", &path, "--proxy-uid", "0"]))
        .output()
        .unwrap();
    let listed = Command::new("nsenter")
        .args([&format!("--net={path}"), "nft", "list", "ruleset"])
        .output()
        .unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    success(&output);
    assert!(
        String::from_utf8_lossy(&listed.stdout).contains("meta skuid 0"),
        "{listed:?}"
    );
}

/// The program where any user may start it.
fn shared_program() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("tulle-init");
    fs::copy(BIN, &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (directory, program)
}

fn as_nobody(scene: &Scene, capabilities: &str, flags: &[&str]) -> Output {
    let (_directory, program) = shared_program();
    let mut command = scene.pod.command("unshare");
    let read_only = "mount --make-rprivate / && mount -o remount,ro,bind / && exec \"$@\"";
    command.args([
        "--mount",
        "sh",
        "-c",
        read_only,
        "sh",
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ]);
    command.args([
        &format!("--inh-caps={capabilities}"),
        &format!("--ambient-caps={capabilities}"),
    ]);
    command
        .args([&format!("--bounding-set={capabilities}"), "--no-new-privs"])
        .arg(program)
        .args(flags);
    command.output().unwrap()
}

/// T58.
#[test]
fn net_admin_alone_is_enough_for_nobody() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080, 9000]);
    success(&as_nobody(&scene, "-all,+net_admin", &flags("nft", &[])));
    for family in families() {
        expect(&scene.peer, ROOT, (family.pod[0], 8080), "inbound", "nobody");
        expect(&scene.pod, APP, (family.peer, 9000), "outbound", "nobody");
    }
    success(&as_nobody(
        &scene,
        "-all,+net_admin,+net_raw",
        &flags("iptables-nft", &[]),
    ));
    expect(&scene.peer, ROOT, (families()[1].pod[0], 8080), "inbound", "nobody");
}

/// T59.
#[test]
fn a_missing_capability_is_named() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    let output = as_nobody(&scene, "-all", &flags("nft", &[]));
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("NET_ADMIN"), "{said}");
    let output = as_nobody(&scene, "-all", &FLAGS); // also when the backend is up to us
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("NET_ADMIN"));
    assert_eq!(scene.dump(), "");
}

/// T60.
#[test]
fn no_program_is_needed() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080]);
    let run = |flags: &[&str]| {
        scene
            .pod
            .command(BIN)
            .args(flags)
            .env("PATH", "/nonexistent")
            .output()
            .unwrap()
    };
    success(&run(&flags("nft", &[])));
    expect(&scene.peer, ROOT, (families()[0].pod[0], 8080), "inbound", "nft");
    success(&run(&["--clean"]));
    // Where a chart asks for iptables, its absence is a warning and the rules come all the same.
    let asked = [&FLAGS[..], &["--firewall-bin-path", "iptables-nft", "--verify=false"]].concat();
    let output = run(&asked);
    success(&output);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("iptables-nft-save"),
        "{output:?}"
    );
    expect(&scene.peer, ROOT, (families()[0].pod[0], 8080), "inbound", "nft");
    // With iptables there, what the chart asked for is used, and the native rules go.
    success(&scene.init(&asked));
    let dump = scene.dump();
    assert!(
        dump.contains("PROXY_INIT_REDIRECT") && !dump.contains("l5d_init"),
        "{dump}"
    );
}

/// T61.
#[test]
fn without_ipv6_the_rest_is_redirected_unless_ipv6_was_asked_for() {
    if !root() {
        return;
    }
    for backend in ["nft", "iptables-nft"] {
        let scene = Scene::new(&[8080]);
        scene.sysctl("net/ipv6/conf/all/disable_ipv6", "1");
        let before = scene.dump();
        let output = scene.init(&flags(backend, &["--ipv6"]));
        assert_eq!(output.status.code(), Some(1), "{backend}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("--ipv6=false"),
            "{output:?}"
        );
        assert_eq!(scene.dump(), before);
        let output = scene.init(&flags(backend, &[]));
        success(&output);
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("no IPv6"),
            "{output:?}"
        );
        expect(&scene.peer, ROOT, (families()[0].pod[0], 8080), "inbound", backend);
        success(&scene.init(&flags(backend, &["--ipv6=false", "--check"])));
    }
}

/// `--ipv6=false` leaves IPv6 alone.
#[test]
fn ipv6_stays_direct_when_it_is_not_wanted() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080]);
    let [v4, v6] = families();
    for backend in ["nft", "iptables-nft"] {
        scene.apply(backend, &["--ipv6=false"]);
        expect(&scene.peer, ROOT, (v4.pod[0], 8080), "inbound", backend);
        expect(&scene.pod, APP, (v4.peer, 8080), "outbound", backend);
        expect(&scene.peer, ROOT, SocketAddr::from((v6.pod[0], 8080)), "app", backend);
        expect(&scene.pod, APP, (v6.peer, 8080), "peer", backend);
        success(&scene.init(&["--clean"]));
    }
}
