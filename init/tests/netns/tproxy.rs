//! Tproxy mode, with a stub proxy that accepts connections to any address and dials the application from the client's
//! address.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tulle_core::addr;

use crate::fixture::{
    APP, BACKENDS, Client, FLAGS, Fixture, ROOT, assert_success, can_run, echo, eventually, expect, families, flags,
    open, serve,
};

/// Also with strict reverse path filters, and with SYN cookies for every handshake.
#[test]
fn applications_see_client_addresses_and_outbound_arrives_at_the_proxy() {
    if !can_run() {
        return;
    }
    let fixture = fixture();
    let n_proxied = transparent_proxy(&fixture);
    for name in ["all", "eth0", "lo"] {
        fixture.sysctl(&format!("net/ipv4/conf/{name}/rp_filter"), "1");
    }
    for (backend, cookies) in BACKENDS.iter().flat_map(|backend| [(backend, "1"), (backend, "2")]) {
        fixture.apply(backend, &TPROXY);
        fixture.sysctl("net/ipv4/tcp_syncookies", cookies);
        for family in families() {
            let other = Client {
                source: Some(family.other_peer),
                ..ROOT
            };
            for (user, ip) in [(ROOT, family.pod[0]), (ROOT, family.pod[1]), (other, family.pod[0])] {
                let before = n_proxied.load(Ordering::Relaxed);
                // `expect` checks that the application sees this client's address.
                expect(&fixture.peer, user, (ip, 8080), "app", backend);
                assert_eq!(n_proxied.load(Ordering::Relaxed), before + 1, "{backend}: {ip}");
            }
            let before = n_proxied.load(Ordering::Relaxed);
            expect(&fixture.peer, ROOT, (family.pod[0], 4191), "app", backend);
            for ip in family.loopbacks {
                expect(
                    &fixture.pod,
                    APP,
                    SocketAddr::new(ip.parse().unwrap(), 8080),
                    "app",
                    backend,
                );
            }
            expect(&fixture.pod, APP, (family.pod[0], 8080), "app", backend);
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
            assert_eq!(
                n_proxied.load(Ordering::Relaxed),
                before,
                "{backend}: none of these connections passes the transparent proxy"
            );
        }
    }
}

#[test]
fn only_listed_ports_are_proxied_and_skipped_networks_are_not() {
    if !can_run() {
        return;
    }
    let fixture = fixture();
    let n_proxied = transparent_proxy(&fixture);
    for backend in BACKENDS {
        let lists = [
            "--ports-to-redirect",
            "8080,8090-8099",
            "--subnets-to-ignore",
            "10.78.0.0/24,fd78::/64",
        ];
        fixture.apply(backend, &[&TPROXY[..], &lists].concat());
        for family in families() {
            let other = Client {
                source: Some(family.other_peer),
                ..ROOT
            };
            for (user, port, n) in [(ROOT, 8080, 1), (ROOT, 9000, 0), (other, 8080, 0)] {
                let before = n_proxied.load(Ordering::Relaxed);
                expect(&fixture.peer, user, (family.pod[0], port), "app", backend);
                assert_eq!(
                    n_proxied.load(Ordering::Relaxed),
                    before + n,
                    "{backend}: {user:?} to {port}"
                );
            }
        }
    }
}

/// Both without a listener on the proxy's port and with one that is not transparent.
#[test]
fn connections_that_no_proxy_accepts_do_not_reach_the_application() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let application = serve(&fixture.pod, "app", "[::]:8080");
    let expect_timeouts = |backend: &str| {
        for family in families() {
            let to = SocketAddr::from((family.pod[0], 8080));
            let dialled = fixture
                .peer
                .run(|| TcpStream::connect_timeout(&to, DROPPED_CONNECT_TIMEOUT))
                .unwrap();
            let error = dialled.map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{backend}: {to}: {error}");
        }
    };
    for backend in BACKENDS {
        fixture.apply(backend, &TPROXY);
        expect_timeouts(backend);
    }
    serve(&fixture.pod, "inbound", "[::]:4143");
    for backend in BACKENDS {
        fixture.apply(backend, &TPROXY);
        expect_timeouts(backend);
    }
    assert_eq!(application.load(Ordering::Relaxed), 0);
}

/// Rules, routes and routing rules are added, repaired and removed together.
#[test]
fn routes_are_added_and_removed_with_the_rules() {
    if !can_run() {
        return;
    }
    let fixture = fixture();
    transparent_proxy(&fixture);
    let bare = (fixture.dump(), routes(&fixture));
    for backend in BACKENDS {
        let wanted = flags(backend, &TPROXY);
        let check = [&wanted[..], &["--check"]].concat();
        let result = |flags: &[&str]| {
            let (code, report) = fixture.report(flags);
            (code, report["result"].as_str().unwrap().to_owned())
        };
        assert_eq!(fixture.exit_code(&check), 4, "{backend}");
        assert_eq!(result(&wanted), (0, "applied".to_owned()), "{backend}");
        let applied = (fixture.dump(), routes(&fixture));
        assert_eq!(routes(&fixture).matches("lookup 143").count(), 2, "{applied:?}");
        assert_eq!(
            routes(&fixture).matches("local default dev lo").count(),
            2,
            "{applied:?}"
        );
        assert_eq!(result(&wanted), (0, "unchanged".to_owned()), "{backend}");
        for damage in ["ip -6 rule del lookup 143", "ip route flush table 143"] {
            fixture.sh(damage);
            assert_eq!(fixture.exit_code(&check), 3, "{backend}: {damage}");
            assert_eq!(result(&wanted), (0, "applied".to_owned()), "{backend}: {damage}");
            assert_eq!((fixture.dump(), routes(&fixture)), applied, "{backend}: {damage}");
            assert_eq!(fixture.exit_code(&check), 0, "{backend}: {damage}");
        }
        // Switches to redirect mode and back.
        fixture.apply(backend, &[]);
        assert_eq!(routes(&fixture), bare.1, "{backend}");
        for family in families() {
            let to = SocketAddr::from((family.pod[0], 8080));
            let redirected = fixture
                .peer
                .run(|| TcpStream::connect_timeout(&to, CONNECT_TIMEOUT))
                .unwrap();
            redirected.unwrap_or_else(|error| panic!("{backend}: {error}")); // the stub accepts these as well
        }
        fixture.apply(backend, &TPROXY);
        assert_eq!((fixture.dump(), routes(&fixture)), applied, "{backend}");
        assert_success(&fixture.init(&["--clean"]));
        assert_eq!((fixture.dump(), routes(&fixture)), bare, "{backend}");
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "app", backend);
        }
    }
    // The printed script has the same result.
    let simulated = fixture.init(&flags("nft", &[&TPROXY[..], &["--simulate"]].concat()));
    let script = String::from_utf8(simulated.stdout).unwrap();
    let commands: Vec<&str> = script.lines().filter_map(|line| line.strip_prefix("# ")).collect();
    fixture.sh(&format!("nft -f - <<'END'\n{script}END\n{}", commands.join("\n")));
    assert_eq!(
        fixture.exit_code(&flags("nft", &[&TPROXY[..], &["--check"]].concat())),
        0,
        "{script}"
    );
}

#[test]
fn open_connections_survive_new_changed_and_draining_rules() {
    if !can_run() {
        return;
    }
    for backend in BACKENDS {
        let fixture = fixture();
        let n_proxied = transparent_proxy(&fixture);
        let dial = || families().map(|family| open(&fixture.peer, ROOT, (family.pod[0], 8080).into()).unwrap().0);
        let expect_echo = |streams: &mut [TcpStream], what: &str| {
            for stream in streams {
                echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {what}: {error}"));
            }
        };
        let mut direct = dial();
        fixture.apply(backend, &TPROXY);
        expect_echo(&mut direct, "direct before");
        let mut kept = dial();
        assert_eq!(n_proxied.load(Ordering::Relaxed), 2, "{backend}");
        fixture.apply(
            backend,
            &[&TPROXY[..], &["-g", "7", "--inbound-ports-to-ignore", "8080"]].concat(),
        );
        expect_echo(&mut kept, "kept by previous rules");
        drop(dial());
        assert_eq!(
            n_proxied.load(Ordering::Relaxed),
            2,
            "{backend}: the port is skipped now"
        );

        fixture.apply(backend, &TPROXY);
        thread::scope(|scope| {
            let drained = scope.spawn(|| fixture.report(&["--clean=drain", "--drain-timeout", "20s"]));
            eventually("new connections to be direct", || {
                let before = n_proxied.load(Ordering::Relaxed);
                drop(dial());
                n_proxied.load(Ordering::Relaxed) == before
            });
            expect_echo(&mut kept, "kept while draining");
            assert!(!drained.is_finished(), "{backend}: connections are open");
            drop(kept);
            let (code, report) = drained.join().unwrap();
            assert_eq!(
                (code, &report["warnings"]),
                (0, &serde_json::json!([])),
                "{backend}: {report}"
            );
        });
        assert!(!routes(&fixture).contains("143"), "{backend}");
        expect_echo(&mut direct, "direct to the end");
    }
}

#[test]
fn verification_detects_replies_that_are_not_routed_back() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let verified = |backend: &str| {
        let (code, report) = fixture.report(&[&FLAGS[..], &["--backend", backend], &TPROXY].concat());
        (code, report["verified"].clone())
    };
    for backend in BACKENDS {
        let redirected = serde_json::json!({"ipv4": "redirected", "ipv6": "redirected"});
        assert_eq!(verified(backend), (0, redirected), "{backend}");
        // A routing rule of another program that is evaluated first.
        fixture.sh("ip rule add priority 50 fwmark 0x2044 lookup main");
        let (code, report) = verified(backend);
        assert_eq!((code, &report["ipv6"]), (95, &"redirected".into()), "{backend}");
        let verdict = report["ipv4"].as_str().unwrap();
        assert!(verdict.contains("are not routed back"), "{backend}: {verdict}");
        fixture.sh("ip rule del priority 50");
    }
}

fn fixture() -> Fixture {
    let fixture = Fixture::bare();
    for port in [8080, 9000, 4191] {
        serve(&fixture.pod, "app", &format!("[::]:{port}"));
        serve(&fixture.peer, "peer", &format!("[::]:{port}"));
    }
    serve(&fixture.pod, "outbound", "127.0.0.1:4140");
    serve(&fixture.pod, "outbound", "[::1]:4140");
    fixture
}

/// Routing rules, and the routes of our table, of both families.
fn routes(fixture: &Fixture) -> String {
    fixture.sh("for family in -4 -6; do ip $family rule; ip $family route show table 143 2>/dev/null || true; done")
}

/// A proxy that accepts connections to any address and connects them to the application, which it dials from the client's
/// address; returns the number of connections that it has accepted.
fn transparent_proxy(fixture: &Fixture) -> Arc<AtomicUsize> {
    let n_proxied = Arc::new(AtomicUsize::new(0));
    let count = n_proxied.clone();
    let start = || -> io::Result<()> {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
        socket.set_only_v6(false)?;
        socket.set_ip_transparent_v4(true)?;
        socket.bind(&SocketAddr::from(([0_u16; 8], 4143)).into())?;
        socket.listen(128)?;
        let listener = TcpListener::from(socket);
        // Threads inherit the namespace of the thread that starts them.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || forward_to_application(&client));
            }
        });
        Ok(())
    };
    fixture.pod.run(start).unwrap().unwrap();
    n_proxied
}

fn forward_to_application(client: &TcpStream) -> io::Result<()> {
    let (peer, dialled) = (
        addr::canonical(client.peer_addr()?),
        addr::canonical(client.local_addr()?),
    );
    if dialled.port() == 4143 {
        return Ok(()); // redirected; the original destination is known only to connection tracking
    }
    let socket = Socket::new(Domain::for_address(dialled), Type::STREAM, None)?;
    socket.set_ip_transparent_v4(true)?;
    socket.set_reuse_address(true)?;
    // With the same port, the address pair would be that of the client's own connection.
    socket.bind(&SocketAddr::new(peer.ip(), fastrand::u16(61_000..)).into())?;
    socket.connect_timeout(&dialled.into(), CONNECT_TIMEOUT)?;
    let application = TcpStream::from(socket);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = io::copy(&mut &application, &mut &*client);
            let _ = client.shutdown(Shutdown::Write);
        });
        let _ = io::copy(&mut &*client, &mut &application);
        application.shutdown(Shutdown::Write)
    })
}

const TPROXY: [&str; 2] = ["--inbound-mode", "tproxy"];
const DROPPED_CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
