//! Traffic that must not be redirected.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, Protocol, Socket, Type};
use tulle_core::netns::Namespace;

use crate::fixture::{
    APP, BACKENDS, Client, Fixture, PROXY, ROOT, assert_success, can_run, eventually, expect, families, flags,
};

#[test]
fn connections_of_the_proxy_are_direct() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[9000]);
    for backend in BACKENDS {
        for family in families() {
            fixture.apply(backend, &[]);
            expect(&fixture.pod, PROXY, (family.peer, 9000), "peer", backend);
            expect(
                &fixture.pod,
                Client { gid: 7777, ..APP },
                (family.peer, 9000),
                "outbound",
                backend,
            );
            fixture.apply(backend, &["--proxy-gid", "7777"]);
            expect(
                &fixture.pod,
                Client { gid: 7777, ..APP },
                (family.peer, 9000),
                "peer",
                backend,
            );
            // 0 is a valid id if it is given.
            fixture.apply(backend, &["--proxy-uid", "0"]);
            expect(&fixture.pod, ROOT, (family.peer, 9000), "peer", backend);
            expect(&fixture.pod, PROXY, (family.peer, 9000), "outbound", backend);
        }
    }
}

#[test]
fn connections_within_the_pod_are_direct() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    for backend in BACKENDS {
        fixture.apply(backend, &[]);
        for family in families() {
            for user in [APP, ROOT, PROXY] {
                for ip in family.loopbacks {
                    expect(
                        &fixture.pod,
                        user,
                        (ip.parse::<IpAddr>().unwrap(), 8080),
                        "app",
                        backend,
                    );
                }
                for ip in family.pod {
                    expect(&fixture.pod, user, (ip, 8080), "app", backend);
                }
            }
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend); // the rules are live
        }
    }
}

#[test]
fn skipped_ports_are_direct_up_to_the_ends_of_their_ranges() {
    if !can_run() {
        return;
    }
    let ports = [4190, 4191, 4189, 4192, 7000, 6999, 7001, 7010, 7020, 7009, 7021, 7015];
    let fixture = Fixture::new(&ports);
    for backend in BACKENDS {
        let skip = "7000,7010-7020";
        fixture.apply(
            backend,
            &["--inbound-ports-to-ignore", skip, "--outbound-ports-to-ignore", skip],
        );
        for family in families() {
            for port in ports {
                let skipped = port == 7000 || (7010..=7020).contains(&port);
                let inbound = if skipped { "app" } else { "inbound" };
                expect(&fixture.peer, ROOT, (family.pod[0], port), inbound, backend);
                let outbound = if skipped { "peer" } else { "outbound" };
                expect(&fixture.pod, APP, (family.peer, port), outbound, backend);
            }
        }
    }
}

/// Tap and admin are not redirected by default; if a list omits them, their ports are redirected.
#[test]
fn the_ports_of_tap_and_admin_are_direct_unless_a_list_says_otherwise() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[4190, 4191, 9191]);
    for backend in BACKENDS {
        for family in families() {
            fixture.apply(backend, &[]);
            for (port, server) in [(4190, "app"), (4191, "app"), (9191, "inbound")] {
                expect(&fixture.peer, ROOT, (family.pod[0], port), server, backend);
            }
            fixture.apply(backend, &["--inbound-ports-to-ignore", "4190,9191"]);
            for (port, server) in [(4190, "app"), (4191, "inbound"), (9191, "app")] {
                expect(&fixture.peer, ROOT, (family.pod[0], port), server, backend);
            }
        }
    }
}

/// If IPv6 is not redirected, inbound IPv6 must not bypass the proxy either.
#[test]
fn inbound_ipv6_that_is_not_redirected_is_dropped_unless_it_is_allowed() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080, 7000, 4191]);
    let [v4, v6] = families();
    let without_ipv6 = |more: &[&'static str]| [&["--ipv6=false"][..], more].concat();
    let other = Client {
        source: Some(v6.other_peer),
        ..ROOT
    };
    let dial_error = |ip: IpAddr| {
        let dial = || TcpStream::connect_timeout(&(ip, 8080).into(), Duration::from_millis(300));
        fixture.peer.run(dial).unwrap().unwrap_err().kind()
    };
    for backend in BACKENDS {
        fixture.apply(
            backend,
            &without_ipv6(&[
                "--inbound-ports-to-ignore",
                "4191,7000",
                "--subnets-to-ignore",
                "fd78::/64",
            ]),
        );
        expect(&fixture.peer, ROOT, (v4.pod[0], 8080), "inbound", backend);
        for ip in v6.pod {
            assert_eq!(dial_error(ip), io::ErrorKind::TimedOut, "{backend}");
        }
        for port in [7000, 4191] {
            expect(&fixture.peer, ROOT, (v6.pod[0], port), "app", backend);
        }
        expect(&fixture.peer, other, (v6.pod[0], 8080), "app", backend);
        // Connections that the pod opens are not redirected: neither to other hosts nor to its own address (over loopback).
        expect(&fixture.pod, APP, (v6.peer, 8080), "peer", backend);
        expect(&fixture.pod, APP, (v6.pod[0], 8080), "app", backend);
        assert_eq!(
            fixture.exit_code(&flags(backend, &without_ipv6(&["--check"]))),
            3,
            "other lists: {backend}"
        );

        fixture.apply(backend, &without_ipv6(&["--ports-to-redirect", "8080"]));
        assert_eq!(dial_error(v6.pod[0]), io::ErrorKind::TimedOut, "{backend}");
        expect(&fixture.peer, ROOT, (v6.pod[0], 7000), "app", backend);
        assert_eq!(
            fixture.exit_code(&flags(
                backend,
                &without_ipv6(&["--check", "--ports-to-redirect", "8080"])
            )),
            0,
            "{backend}"
        );

        fixture.apply(backend, &without_ipv6(&["--unredirected-ipv6=allow"]));
        expect(&fixture.peer, ROOT, (v6.pod[0], 8080), "app", backend);
        fixture.apply(backend, &without_ipv6(&[]));
        assert_eq!(dial_error(v6.pod[0]), io::ErrorKind::TimedOut, "{backend}");
        fixture.apply(backend, &[]);
        expect(&fixture.peer, ROOT, (v6.pod[0], 8080), "inbound", backend);
        assert_success(&fixture.init(&["--clean"]));
        expect(&fixture.peer, ROOT, (v6.pod[0], 8080), "app", backend);
    }
}

/// Rules that drop IPv6 are removed when another backend takes over, and by `--clean`.
#[test]
fn rules_that_drop_ipv6_do_not_outlive_their_backend() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let ip = families()[1].pod[0];
    for backend in BACKENDS {
        for next in BACKENDS.into_iter().filter(|next| *next != backend) {
            fixture.apply(backend, &["--ipv6=false"]);
            fixture.apply(next, &[]);
            expect(
                &fixture.peer,
                ROOT,
                (ip, 8080),
                "inbound",
                &format!("{backend}, then {next}"),
            );
        }
        fixture.apply(backend, &["--ipv6=false"]);
        assert_success(&fixture.init(&["--clean"]));
        expect(&fixture.peer, ROOT, (ip, 8080), "app", backend);
        let left = fixture.dump();
        assert!(!left.contains("PROXY_INIT_"), "{backend}: {left}");
    }
}

/// Each interface has its own setting; `all` only contains the value that was last written to it.
#[test]
fn ipv6_of_one_interface_counts_although_it_was_turned_off_for_all() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    fixture.sysctl("net/ipv6/conf/all/disable_ipv6", "1");
    fixture.sysctl("net/ipv6/conf/eth0/disable_ipv6", "0");
    let v6 = families()[1];
    fixture
        .pod
        .ip(&format!("addr add {}/64 dev eth0 nodad\n", v6.pod[0]))
        .unwrap();
    fixture.apply("nft", &[]);
    expect(&fixture.peer, ROOT, (v6.pod[0], 8080), "inbound", "nft");
}

/// Skip lists with networks of both families.
#[test]
fn skipped_networks_are_direct_in_both_families() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let networks = "10.78.0.0/24,fd78::/64,192.168.7.0/24";
    for backend in BACKENDS {
        fixture.apply(
            backend,
            &[
                "--subnets-to-ignore",
                networks,
                "--outbound-subnets-to-ignore",
                networks,
            ],
        );
        for family in families() {
            let other = Client {
                source: Some(family.other_peer),
                ..ROOT
            };
            expect(&fixture.peer, other, (family.pod[0], 8080), "app", backend);
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend);
            expect(&fixture.pod, APP, (family.other_peer, 8080), "peer", backend);
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
        }
    }
}

#[test]
fn datagrams_echo_requests_and_neighbour_discovery_pass() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[]);
    for (backend, more) in BACKENDS
        .iter()
        .flat_map(|backend| [(*backend, &[][..]), (*backend, &["--drop-invalid"])])
    {
        fixture.apply(backend, more);
        for family in families() {
            expect(&fixture.peer, ROOT, (family.pod[0], 8080), "inbound", backend); // the rules are live
            expect(&fixture.pod, APP, (family.peer, 8080), "outbound", backend);
            for (from, to, ip) in [
                (&fixture.peer, &fixture.pod, family.pod[0]),
                (&fixture.pod, &fixture.peer, family.peer),
            ] {
                // The first packet must resolve its neighbour again.
                let flushed = from.command("ip").args(["neigh", "flush", "dev", "eth0"]).output();
                assert_success(&flushed.unwrap());
                datagram(from, to, ip).unwrap_or_else(|error| panic!("{backend}: UDP to {ip}: {error}"));
                ping(from, ip).unwrap_or_else(|error| panic!("{backend}: echo of {ip}: {error}"));
            }
        }
    }
}

fn datagram(from: &Namespace, to: &Namespace, ip: IpAddr) -> io::Result<()> {
    let server = to.run(|| UdpSocket::bind((ip, 8080))).unwrap()?;
    server.set_read_timeout(Some(IO_TIMEOUT))?;
    let client = from
        .run(|| UdpSocket::bind(if ip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }))
        .unwrap()?;
    client.set_read_timeout(Some(IO_TIMEOUT))?;
    client.send_to(b"there", (ip, 8080))?;
    let mut buffer = [0; 8];
    let (len, peer) = server.recv_from(&mut buffer)?;
    server.send_to(&buffer[..len], peer)?;
    let (len, peer) = client.recv_from(&mut buffer)?;
    assert_eq!((&buffer[..len], peer), (&b"there"[..], SocketAddr::new(ip, 8080)));
    Ok(())
}

/// Sends an echo request over a raw socket, as `ping` does.
fn ping(from: &Namespace, ip: IpAddr) -> io::Result<()> {
    let (domain, protocol, request, reply) = match ip {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let socket = from.run(|| Socket::new(domain, Type::RAW, Some(protocol))).unwrap()?;
    socket.set_read_timeout(Some(IO_TIMEOUT))?;
    let mut packet = [request, 0, 0, 0, 0x12, 0x34, 0, 1];
    if ip.is_ipv4() {
        let sum = checksum(&packet); // the kernel sets it for IPv6
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    socket.send_to(&packet, &SocketAddr::new(ip, 0).into())?;
    loop {
        let mut received = [0; 128];
        let len = recv(socket.as_raw_fd(), &mut received, MsgFlags::empty())?;
        let message = &received[if ip.is_ipv4() { 20 } else { 0 }..len];
        if message[0] == reply && message[4..] == packet[4..] {
            return Ok(());
        }
    }
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

#[test]
fn forwarded_traffic_is_redirected_only_with_scope_all() {
    if !can_run() {
        return;
    }
    let mut fixture = Fixture::new(&[9000]);
    let inner = fixture.add_inner_namespace();
    for backend in BACKENDS {
        for family in families() {
            fixture.apply(backend, &[]);
            expect(&inner, ROOT, (family.peer, 9000), "peer", backend);
            fixture.apply(backend, &["--inbound-scope", "all"]);
            expect(&inner, ROOT, (family.peer, 9000), "inbound", backend);
        }
        let [v4, v6] = families();
        fixture.apply(backend, &["--inbound-scope", "all", "--ipv6=false"]);
        expect(&inner, ROOT, (v4.peer, 9000), "inbound", backend);
        let dial = || TcpStream::connect_timeout(&(v6.peer, 9000).into(), Duration::from_millis(300));
        let error = inner.run(dial).unwrap().unwrap_err();
        assert_eq!(
            error.kind(),
            io::ErrorKind::TimedOut,
            "forwarded IPv6 is dropped: {backend}"
        );
    }
}

/// A segment without a connection is answered with a reset, unless such segments are dropped.
#[test]
fn invalid_segments_provoke_no_reset_when_dropped() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    for backend in BACKENDS {
        for family in families() {
            let to = SocketAddr::from((family.pod[0], 8080));
            fixture.apply(backend, &[]);
            // Strict tracking marks a segment without a connection as invalid instead of creating a connection for it.
            fixture.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0");
            let before = resets(&fixture);
            stray_segment(&fixture.peer, family.peer, to);
            eventually("the reset", || resets(&fixture) > before);

            fixture.apply(backend, &["--drop-invalid"]);
            let before = resets(&fixture);
            stray_segment(&fixture.peer, family.peer, to);
            // The reset for the segment would be sent before a later connection is served.
            expect(&fixture.peer, ROOT, to, "inbound", backend);
            assert_eq!(resets(&fixture), before, "{backend}: {to}");
        }
    }
}

/// The number of resets that the pod has sent.
fn resets(fixture: &Fixture) -> u64 {
    let text = fixture
        .pod
        .run(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))
        .unwrap()
        .unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(name, _)| *name == "OutRsts").unwrap().1.parse().unwrap()
}

/// Sends an ACK segment that belongs to no connection.
fn stray_segment(from: &Namespace, source: IpAddr, to: SocketAddr) {
    let mut segment = Vec::new();
    segment.extend_from_slice(&40_000_u16.to_be_bytes());
    segment.extend_from_slice(&to.port().to_be_bytes());
    segment.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1, 5 << 4, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    // The pseudo header is the same for both families: addresses, protocol, length.
    let length = u8::try_from(segment.len()).unwrap();
    let pseudo = [octets(source), octets(to.ip()), vec![0, 6, 0, length], segment.clone()].concat();
    let sum = checksum(&pseudo);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    let open = || Socket::new(Domain::for_address(to), Type::RAW, Some(Protocol::TCP));
    let socket = from.run(open).unwrap().unwrap();
    // IPv6 raw sockets require port 0.
    socket.send_to(&segment, &SocketAddr::new(to.ip(), 0).into()).unwrap();
}

const IO_TIMEOUT: Duration = Duration::from_secs(5);
