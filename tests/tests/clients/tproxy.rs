//! The tproxy mode with the shipped proxy: applications see the addresses of their clients.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tulle_core::addr::canonical;
use tulle_core::netns::Namespace;
use tulle_tests::hosts::admin_get;
use tulle_tests::programs;

use crate::testbed::{
    CLIENT, GRPC, OPEN_TLS, OUTSIDE, SERVER, Setup, Testbed, both, can_run, identity, redirect, service, v6,
};

/// Runs with each kind of redirect rules. The proxy has only the capability that it needs.
#[test]
fn applications_see_the_addresses_of_all_clients() {
    for backend in ["nft", "iptables-nft", "iptables-legacy"] {
        if !can_run(&[]) {
            return;
        }
        let testbed = Testbed::build(Setup {
            init_flags: &["--inbound-mode", "tproxy", "--backend", backend],
            ..TPROXY_SETUP
        });
        let other = Ipv4Addr::new(10, 79, 0, 41);
        let lines = format!(
            "addr add {other}/24 dev eth0\naddr add {}/64 dev eth0 nodad\n",
            v6(other)
        );
        testbed.outside.ip(&lines).unwrap();
        for port in [OPEN_TLS, GRPC] {
            start_peer_addr_app(&testbed.server, port);
        }
        // Clients outside the mesh, in both families. Requests alternate between clients, because a pooled connection of one client
        // may not be used for another.
        for _ in 0..3 {
            for client in [both(OUTSIDE), both(other)].concat() {
                let [v4, v6] = both(SERVER);
                let to = SocketAddr::new(if client.is_ipv4() { v4 } else { v6 }, OPEN_TLS);
                assert_eq!(
                    send_request(&testbed.outside, Some(client), to, HTTP),
                    client.to_string(),
                    "{backend}"
                );
                assert_eq!(
                    send_request(&testbed.outside, Some(client), to, BYTES),
                    client.to_string(),
                    "{backend}"
                );
            }
        }
        // A client in the mesh. Its sidecar authenticates with its identity, and dials the proxy's own port.
        for to in [OPEN_TLS, GRPC].map(service) {
            assert_eq!(
                send_request(&testbed.client, None, to, HTTP),
                CLIENT.to_string(),
                "{backend}"
            );
        }
        let proven = format!("client_id=\"{}\"", identity("client"));
        testbed.wait_for_count("inbound_http_authz_allow_total", &[&proven, "target_port=\"10000\""], 1);
        // Outbound connections use the proxy's own address, as without tproxy.
        start_peer_addr_app(&testbed.outside, OPEN_TLS);
        let answer = send_request(&testbed.server, None, (OUTSIDE, OPEN_TLS).into(), BYTES);
        assert_eq!(answer, SERVER.to_string(), "{backend}");
        testbed.wait_for_count("tcp_open_total", &["direction=\"outbound\"", "peer=\"src\""], 1);
        // Policy still applies: clients without an identity are refused on this port.
        let refused = send_request(&testbed.outside, None, (SERVER, GRPC).into(), HTTP);
        assert!(refused.starts_with("HTTP/1.1 403"), "{backend}: {refused}");
    }
}

#[test]
fn the_capability_may_be_on_the_file_and_the_error_names_the_fix() {
    if !can_run(&["setcap"]) {
        return;
    }
    let testbed = Testbed::build(Setup::default());
    let start = |file: &str, setpriv_args| {
        let setup = Setup {
            setpriv_args,
            ..TPROXY_SETUP
        };
        testbed.start_sidecar("client", &testbed.outside, &testbed.dir().join(file), setup)
    };
    // As in the image, the file has the capability. The bounding set contains it, as a container runtime arranges when the
    // capability is added for a user other than root.
    fs::copy(
        programs::built_binary("tulle-proxy").unwrap(),
        testbed.dir().join("with-file-capability"),
    )
    .unwrap();
    let mut setcap = Command::new("setcap");
    assert!(
        setcap
            .arg("cap_net_raw=p")
            .arg(testbed.dir().join("with-file-capability"))
            .status()
            .unwrap()
            .success()
    );
    let mut sidecar = start("with-file-capability", &["--bounding-set=-all,+net_raw"]);
    sidecar
        .wait_for("readiness", |_| Ok(admin_get(&testbed.outside, "/ready").is_ok()))
        .unwrap();
    drop(sidecar);
    for file in ["tulle-proxy", "with-file-capability"] {
        let mut without_capability = start(file, &["--bounding-set=-all"]);
        let error = without_capability.wait_for("readiness", |_| Ok(false));
        let error = error.unwrap_err().to_string();
        let expected = "TULLE_PROXY_INBOUND_MODE=tproxy needs the capability NET_RAW: add it to the proxy's container";
        assert!(error.contains(expected), "{file}: {error}");
    }
}

#[test]
fn a_tproxy_sidecar_with_redirect_rules_closes_connections_and_logs_the_fix() {
    if !can_run(&[]) {
        return;
    }
    let testbed = Testbed::build(Setup {
        init_flags: &["--inbound-mode", "tproxy"],
        ..TPROXY_SETUP
    });
    start_peer_addr_app(&testbed.server, OPEN_TLS);
    redirect(&testbed.server, &["--inbound-mode", "redirect"]);
    let answer = send_request(&testbed.outside, None, (SERVER, OPEN_TLS).into(), HTTP);
    assert_eq!(answer, "", "closed");
    let log = fs::read_to_string(testbed.dir().join("sidecar-server.log")).unwrap();
    assert!(
        log.contains("run tulle-init with --inbound-mode tproxy, or unset the variable"),
        "{log}"
    );
    // Peers reach the proxy's own port without redirect rules; but replies of the application need the tproxy rules.
    redirect(&testbed.server, &["--inbound-mode", "tproxy"]);
    assert_eq!(
        send_request(&testbed.client, None, service(OPEN_TLS), HTTP),
        CLIENT.to_string()
    );
}

/// An application that returns the address of its client: as HTTP for an HTTP request, as a line otherwise.
fn start_peer_addr_app(host: &Namespace, port: u16) {
    let listener = host
        .run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)))
        .unwrap()
        .unwrap();
    // The thread ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || respond(&stream));
        }
    });
}

fn respond(mut stream: &TcpStream) -> std::io::Result<()> {
    let peer = canonical(stream.peer_addr()?).ip().to_string();
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next() {
        if !line?.contains("HTTP/1.1") {
            return writeln!(stream, "{peer}");
        }
        while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
        write!(
            stream,
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{peer}",
            peer.len()
        )?;
    }
    Ok(())
}

/// The last line of the response, or the whole response if it is an error.
fn send_request(host: &Namespace, from: Option<IpAddr>, to: SocketAddr, input: &str) -> String {
    let mut answer = String::new();
    let exchange = || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        if let Some(from) = from {
            socket.bind(&SocketAddr::new(from, 0).into())?;
        }
        socket.connect_timeout(&to.into(), READ_TIMEOUT)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.write_all(input.as_bytes())?;
        stream.read_to_string(&mut answer)
    };
    match host.run(exchange).unwrap() {
        // The proxy may reset the connection while the client connects, writes or reads.
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{from:?} to {to}: {error}"),
        _ => {}
    }
    if answer.starts_with("HTTP/") && !answer.starts_with("HTTP/1.1 200") {
        return answer;
    }
    answer.lines().last().unwrap_or_default().to_owned()
}

/// A sidecar that keeps the client addresses, with only the capability for that.
const TPROXY_SETUP: Setup<'static> = Setup {
    control: &["-enable-ipv6=false"],
    init_flags: &[],
    variables: &[("TULLE_PROXY_INBOUND_MODE", "tproxy")],
    setpriv_args: &[
        "--inh-caps=-all,+net_raw",
        "--ambient-caps=-all,+net_raw",
        "--bounding-set=-all,+net_raw",
    ],
};
const HTTP: &str = "GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n";
const BYTES: &str = "who\n";
const READ_TIMEOUT: Duration = Duration::from_secs(10);
