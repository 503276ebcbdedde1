//! Other namespaces, few privileges, missing features, and IPv6 only.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::fixture::{
    APP, BACKENDS, BIN, Client, FLAGS, Family, Fixture, PROXY, ROOT, assert_success, can_run, dial, echo, eventually,
    expect, families, fetch_answer, flags, open, serve, serve_on,
};

#[test]
fn simulate_prints_the_rules_and_changes_nothing() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    for (backend, script_command) in [("nft", "nft -f -"), ("iptables-nft", ""), ("iptables-legacy", "")] {
        let before = fixture.dump();
        let trace = tempfile::NamedTempFile::new().unwrap();
        let simulate = [
            "--subnets-to-ignore",
            "10.9.0.0/16,fd09::/16",
            "--simulate",
            "--timeout-close-wait-secs",
            "9",
        ];
        let mut command = fixture.pod.command("strace");
        let output = command
            .args([
                "-f",
                "-o",
                trace.path().to_str().unwrap(),
                "-e",
                "trace=execve,fork,vfork,clone,clone3,socket,openat",
                BIN,
            ])
            .args(flags(backend, &simulate))
            .output()
            .unwrap();
        assert_success(&output);
        let calls = fs::read_to_string(trace.path()).unwrap();
        assert_eq!(
            calls.lines().filter(|line| line.contains("execve(")).count(),
            1,
            "{calls}"
        );
        for call in ["socket(", "clone", "fork(", "/proc/sys/net", "O_WRONLY", "O_RDWR"] {
            assert!(!calls.contains(call), "{call}: {calls}");
        }
        assert_eq!(fixture.dump(), before);

        let script = String::from_utf8(output.stdout).unwrap();
        run_printed_script(&fixture, script_command, &script);
        let printed_rules = fixture.dump();
        assert_success(&fixture.init(&["--clean"]));
        fixture.apply(backend, &simulate[..2]);
        assert_eq!(fixture.dump(), printed_rules, "{backend}");
        assert_success(&fixture.init(&["--clean"]));
    }
}

/// Runs a printed script with `command`; if that is empty, with the commands in the comment lines of the script.
fn run_printed_script(fixture: &Fixture, command: &str, script: &str) {
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
        fixture.sh(&format!("{command} <<'END'\n{script}END"));
    }
}

#[test]
fn rules_are_applied_to_another_namespace_and_only_there() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let setting = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
    // The namespaces in which the program is started and in which the test runs.
    let elsewhere = || {
        [
            fixture.peer.run(|| fs::read_to_string(setting).ok()).unwrap(),
            fs::read_to_string(setting).ok(),
        ]
    };
    let before = elsewhere();
    let pod_path = fixture.pod.path();
    let pod_path = pod_path.to_str().unwrap();
    for (backend, seconds) in BACKENDS.iter().zip(["123", "124", "125"]) {
        let flags = flags(backend, &["--netns", pod_path, "--timeout-close-wait-secs", seconds]);
        assert_success(&fixture.peer.command(BIN).args(flags).output().unwrap());
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
        }
        assert_eq!(fixture.sh(&format!("cat {setting}")).trim(), seconds);
        assert_eq!(elsewhere(), before, "{backend}");
    }
    let list_rules =
        "nft list ruleset; cat /proc/thread-self/net/ip_tables_names /proc/thread-self/net/ip6_tables_names";
    let peer = fixture.peer.command("sh").args(["-c", list_rules]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&peer.stdout), "");
    let missing = Command::new(BIN)
        .args(flags("nft", &["--netns", "/run/netns/ti-none"]))
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(1));
}

/// The uids and gids in the rules are those of the pod's user namespace; outside of it they are higher by 100000.
#[test]
fn rules_are_applied_from_outside_to_a_namespace_of_another_user_namespace() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    serve(&fixture.peer, "peer", "[::]:8080");
    let mut command = fixture.pod.command("unshare");
    let holder = NamespaceHolder(command.args(["--user", "--net", "sleep", "60"]).spawn().unwrap());
    let pid = holder.0.id();
    let path = format!("/proc/{pid}/ns/net");
    let own = fs::metadata(fixture.pod.path()).unwrap().ino();
    eventually("the namespaces", || {
        let users = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
        users("self") != users(&pid.to_string()) && fs::metadata(&path).unwrap().ino() != own
    });
    for map in ["uid_map", "gid_map"] {
        fs::write(format!("/proc/{pid}/{map}"), "0 100000 65536").unwrap();
    }
    let link = format!(
        "link add w type veth peer name eth0 netns {pid}\naddr add 10.80.0.1/24 dev w\naddr add fd80::1/64 dev w nodad\n\
         link set w up\n"
    );
    fixture.peer.ip(&link).unwrap();
    run_in_namespace(&path, || {
        let addresses = "ip link set lo up; ip link set eth0 up; ip addr add 10.80.0.2/24 dev eth0; \
                         ip addr add fd80::2/64 dev eth0 nodad";
        assert_success(&Command::new("sh").args(["-ec", addresses]).output().unwrap());
        for (name, addr) in [
            ("inbound", "[::]:4143"),
            ("outbound", "127.0.0.1:4140"),
            ("outbound", "[::1]:4140"),
        ] {
            serve_on(TcpListener::bind(addr).unwrap(), name);
        }
    });
    let output = Command::new(BIN)
        .args(flags("nft", &["--netns", &path]))
        .output()
        .unwrap();
    assert_success(&output);
    let mapped = |user: Client| Client {
        uid: 100_000 + user.uid,
        gid: 100_000 + user.gid,
        ..user
    };
    for [peer, pod] in [
        ["10.80.0.1:8080", "10.80.0.2:8080"],
        ["[fd80::1]:8080", "[fd80::2]:8080"],
    ] {
        expect(&fixture.peer, ROOT, pod.parse::<SocketAddr>().unwrap(), "inbound", pod);
        for (user, server) in [(APP, "outbound"), (ROOT, "outbound"), (PROXY, "peer")] {
            let (_, answer) = run_in_namespace(&path, || dial(mapped(user), peer.parse().unwrap())).unwrap();
            assert_eq!(answer.server, server, "{user:?} to {peer}");
        }
    }
}

/// A process that holds a namespace and is killed on drop.
struct NamespaceHolder(Child);

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Runs a closure on a new thread in a network namespace given by its path.
fn run_in_namespace<T: Send>(path: &str, work: impl FnOnce() -> T + Send) -> T {
    let entered = || {
        setns(fs::File::open(path).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(entered).join()).unwrap()
}

/// A copy of the program that every user may start.
fn shared_program() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("tulle-init");
    fs::copy(BIN, &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (directory, program)
}

fn as_unprivileged_user(fixture: &Fixture, capabilities: &str, flags: &[&str]) -> Output {
    let (_directory, program) = shared_program();
    let mut command = fixture.pod.command("unshare");
    let read_only = "mount --make-rprivate / && mount -o remount,ro,bind / && \
                     mount -t tmpfs -o mode=1777 lock /run && exec \"$@\"";
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

#[test]
fn net_admin_is_enough_for_an_unprivileged_user() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080, 9000]);
    // The legacy programs use a raw socket, and an unprivileged user may not list the legacy tables.
    for (backend, capabilities) in [
        ("nft", "-all,+net_admin"),
        ("iptables-nft", "-all,+net_admin"),
        ("iptables-legacy", "-all,+net_admin,+net_raw"),
    ] {
        assert_success(&as_unprivileged_user(&fixture, capabilities, &flags(backend, &[])));
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            expect(&fixture.pod, APP, (family.peer, 9000), "outbound", backend);
        }
        assert_success(&as_unprivileged_user(
            &fixture,
            capabilities,
            &flags(backend, &["--check"]),
        ));
    }
}

#[test]
fn a_user_who_may_not_list_legacy_tables_gets_a_warning() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    fixture.apply("iptables-legacy", &[]);
    let expect_warning = |flags: &[&str], warning: &str| {
        let output = as_unprivileged_user(&fixture, "-all,+net_admin,+net_raw", flags);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(warning), "{flags:?}: {stderr}");
    };
    expect_warning(&[&FLAGS[..], &["--check"]].concat(), "were not looked for");
    expect_warning(&["--clean"], "are not removed");
}

#[test]
fn a_missing_capability_is_named() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    for flags in BACKENDS
        .map(|backend| flags(backend, &[]))
        .iter()
        .map(Vec::as_slice)
        .chain([&FLAGS[..]])
    {
        let output = as_unprivileged_user(&fixture, "-all", flags);
        assert_eq!(output.status.code(), Some(1), "{flags:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("NET_ADMIN"), "{flags:?}: {stderr}");
    }
    assert_eq!(fixture.dump(), "");
}

#[test]
fn no_program_is_needed() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let run = |flags: &[&str]| {
        fixture
            .pod
            .command(BIN)
            .args(flags)
            .env("PATH", "/nonexistent")
            .output()
            .unwrap()
    };
    let expect_redirects = || {
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", "nft");
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", "nft");
        }
    };
    assert_success(&run(&flags("nft", &[])));
    expect_redirects();
    assert_success(&run(&["--clean"]));
    // If a chart asks for iptables and it is missing, a warning is logged, and the rules are applied over netlink.
    let args = [&FLAGS[..], &["--firewall-bin-path", "iptables-nft", "--verify=false"]].concat();
    let output = run(&args);
    assert_success(&output);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("iptables-nft-save"),
        "{output:?}"
    );
    expect_redirects();
    // If iptables is available, it is used, and the rules that were applied over netlink are removed.
    assert_success(&fixture.init(&args));
    let dump = fixture.dump();
    assert!(
        dump.contains("PROXY_INIT_REDIRECT") && !dump.contains("l5d_init"),
        "{dump}"
    );
    // The plain programs are used too, regardless of their flavour.
    assert_success(&fixture.init(&["--clean"]));
    fixture.apply("iptables", &["--drop-invalid"]);
    expect_redirects();
    assert_eq!(fixture.exit_code(&flags("iptables", &["--drop-invalid", "--check"])), 0);
    assert_success(&fixture.init(&["--clean"]));
    assert_eq!(fixture.dump(), "");
}

#[test]
fn without_ipv6_only_ipv4_is_redirected_unless_ipv6_is_required() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::new(&[8080]);
        fixture.sysctl("net/ipv6/conf/all/disable_ipv6", "1");
        let before = fixture.dump();
        let output = fixture.init(&flags(backend, &["--ipv6"]));
        assert_eq!(output.status.code(), Some(1), "{backend}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("--ipv6=false"),
            "{output:?}"
        );
        assert_eq!(fixture.dump(), before);
        let output = fixture.init(&flags(backend, &[]));
        assert_success(&output);
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("no IPv6"),
            "{output:?}"
        );
        expect(&fixture.peer, ROOT, (families()[0].pod[0], 8080), "inbound", backend);
        expect(&fixture.pod, APP, (families()[0].peer, 8080), "outbound", backend);
        assert_success(&fixture.init(&flags(backend, &["--ipv6=false", "--check"])));
    }
}

#[test]
fn inbound_ipv6_that_is_enabled_later_is_dropped_unless_it_is_allowed() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080, 4191]);
    let ip = families()[1].pod[0];
    for backend in BACKENDS {
        for (more, is_dropped) in [
            (&[][..], true),
            (&["--ipv6=false"], true),
            (&["--unredirected-ipv6=allow"], false),
        ] {
            fixture.sysctl("net/ipv6/conf/all/disable_ipv6", "1");
            fixture.apply(backend, more);
            let check = [more, &["--check"]].concat();
            assert_eq!(fixture.exit_code(&flags(backend, &check)), 0, "{backend}, {more:?}");
            fixture.sysctl("net/ipv6/conf/all/disable_ipv6", "0");
            fixture.pod.ip("addr replace fd77::2/64 dev eth0 nodad\n").unwrap();
            // A skipped port: the address is reachable.
            expect(&fixture.peer, ROOT, (ip, 4191), "app", backend);
            if is_dropped {
                let dial = || TcpStream::connect_timeout(&(ip, 8080).into(), Duration::from_millis(300));
                let error = fixture.peer.run(dial).unwrap().unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{backend}, {more:?}");
            } else {
                expect(&fixture.peer, ROOT, (ip, 8080), "app", backend);
            }
            assert_success(&fixture.init(&["--clean"]));
        }
    }
}

/// With `--unredirected-ipv6=allow`, `--ipv6=false` does not touch IPv6; by default inbound IPv6 is dropped (`direct.rs`).
#[test]
fn ipv6_is_not_redirected_if_it_is_disabled_by_flag() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let [v4, v6] = families();
    for backend in BACKENDS {
        fixture.apply(backend, &["--ipv6=false", "--unredirected-ipv6=allow"]);
        expect(&fixture.peer, ROOT, (v4.pod[0], 8080), "inbound", backend);
        expect(&fixture.pod, APP, (v4.peer, 8080), "outbound", backend);
        expect(&fixture.peer, ROOT, SocketAddr::from((v6.pod[0], 8080)), "app", backend);
        expect(&fixture.pod, APP, (v6.peer, 8080), "peer", backend);
        assert_success(&fixture.init(&["--clean"]));
    }
}

/// A pod without an IPv4 address supports redirection, skipping, verification, draining and cleaning.
#[test]
fn a_pod_with_only_ipv6_is_redirected() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = Fixture::bare();
        for namespace in [&fixture.pod, &fixture.peer] {
            assert_success(
                &namespace
                    .command("ip")
                    .args(["-4", "addr", "flush", "scope", "global"])
                    .output()
                    .unwrap(),
            );
        }
        let family = families()[1];
        let lists = [
            ["--inbound-ports-to-ignore", "7000"],
            ["--outbound-ports-to-ignore", "7001"],
            ["--subnets-to-ignore", "fd78::/64,10.0.0.0/8"],
            ["--outbound-subnets-to-ignore", "fd78::/64,10.0.0.0/8"],
        ];
        let mut flags = flags(backend, lists.as_flattened());
        flags.retain(|flag| *flag != "--verify=false");
        let (code, report) = fixture.report(&flags);
        assert_eq!(
            (code, &report["verified"]["ipv6"]),
            (0, &"redirected".into()),
            "{report}"
        );
        assert!(
            report["warnings"]
                .to_string()
                .contains("ipv4 was not checked: no route"),
            "{report}"
        );
        assert_success(&fixture.init(&[
            "validate",
            "--listen-addr",
            "[::]:4140",
            "--connect-addr",
            "[fd99::1]:20001",
        ]));

        fixture.start_proxy();
        for port in [8080, 7000, 7001] {
            serve(&fixture.pod, "app", &format!("[::]:{port}"));
            serve(&fixture.peer, "peer", &format!("[::]:{port}"));
        }
        let other = Client {
            source: Some(family.other_peer),
            ..ROOT
        };
        expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
        expect(&fixture.peer, ROOT, (family.pod[1], 7001), "inbound", backend);
        expect(&fixture.peer, ROOT, (family.pod[0], 7000), "app", backend);
        expect(&fixture.peer, other, (family.pod[0], 8080), "app", backend);
        expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
        expect(&fixture.pod, APP, (family.peer, 7000), "outbound", backend);
        expect(&fixture.pod, APP, (family.peer, 7001), "peer", backend);
        expect(&fixture.pod, APP, (family.other_peer, 8080), "peer", backend);
        expect(&fixture.pod, PROXY, (family.peer, 8080), "peer", backend);

        assert_clean_waits_for_connections(&fixture, family, backend);
        assert_eq!(
            fixture.exit_code(&[flags.as_slice(), &["--check"]].concat()),
            4,
            "{backend}"
        );
    }
}

/// Removes the rules while connections of the pod are open, and checks that this waits until they are closed.
fn assert_clean_waits_for_connections(fixture: &Fixture, family: Family, backend: &str) {
    let mut kept = [
        open(&fixture.peer, ROOT, (family.pod[0], 8080).into()).unwrap().0,
        open(&fixture.pod, APP, (family.peer, 8080).into()).unwrap().0,
    ];
    thread::scope(|scope| {
        let cleaning = scope.spawn(|| fixture.init(&["--clean=drain"]));
        eventually("new connections to be direct", || {
            fetch_answer(&fixture.peer, ROOT, (family.pod[0], 8080).into())
                .unwrap()
                .server
                == "app"
        });
        expect(&fixture.pod, APP, (family.peer, 8080), "peer", backend);
        for stream in &mut kept {
            echo(stream, &vec![7; 1 << 20]).unwrap();
        }
        assert!(!cleaning.is_finished(), "{backend}: did not wait");
        drop(kept);
        assert_success(&cleaning.join().unwrap());
    });
}
