//! Traffic that must arrive at the proxy.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, recv, sendto, socket};
use nix::unistd::{Gid, getgroups, setgroups};
use std::os::fd::AsRawFd;

use crate::fixture::{APP, BACKENDS, Client, Fixture, ROOT, assert_success, can_run, expect, families, flags, serve};

/// Both families, IPv4 clients of dual-stack listeners, ports without a listener, and ports that are skipped in the other
/// direction.
#[test]
fn both_directions_arrive_at_the_proxy_with_their_original_destination() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080, 9000, 4567, 53]);
    for backend in BACKENDS {
        fixture.apply(backend, &["--inbound-ports-to-ignore", "4567"]);
        for family in families() {
            let [pod, second] = family.pod;
            expect(&fixture.peer, ROOT, (pod, 8080), "inbound", backend);
            expect(&fixture.peer, ROOT, (pod, 8081), "inbound", backend); // no application listens on this port
            expect(&fixture.peer, ROOT, (second, 8080), "inbound", backend);
            expect(&fixture.peer, ROOT, (pod, 53), "inbound", backend);
            expect(&fixture.pod, APP, (family.peer, 9000), "outbound", backend);
            expect(&fixture.pod, ROOT, (family.peer, 9000), "outbound", backend);
            expect(&fixture.pod, APP, (family.peer, 4567), "outbound", backend); // skipped for inbound only
            expect(&fixture.pod, APP, (family.peer, 53), "outbound", backend);
        }
    }
}

#[test]
fn a_supplementary_group_is_not_the_skipped_group() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[9000]);
    let groups = getgroups().unwrap();
    for backend in BACKENDS {
        fixture.apply(backend, &["-g", "5555"]);
        for family in families() {
            setgroups(&[Gid::from_raw(5555)]).unwrap();
            expect(&fixture.pod, APP, (family.peer, 9000), "outbound", backend);
            setgroups(&groups).unwrap();
            expect(
                &fixture.pod,
                Client { gid: 5555, ..APP },
                (family.peer, 9000),
                "peer",
                backend,
            );
        }
    }
}

#[test]
fn with_a_list_only_listed_ports_are_redirected() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080, 8081, 8090, 8091, 8092]);
    for backend in BACKENDS {
        fixture.apply(backend, &["--ports-to-redirect", "8080,8090-8091"]);
        for family in families() {
            for (port, server) in [
                (8080, "inbound"),
                (8081, "app"),
                (8090, "inbound"),
                (8091, "inbound"),
                (8092, "app"),
            ] {
                expect(&fixture.peer, ROOT, (family.pod[0], port), server, backend);
            }
        }
    }
}

#[test]
fn data_in_the_first_segment_arrives_at_the_proxy() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    // Enables TCP Fast Open for clients and all new listeners, without cookies.
    for namespace in [&fixture.pod, &fixture.peer] {
        let set = namespace.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "1543"));
        set.unwrap().unwrap();
    }
    fixture.start_proxy();
    for backend in BACKENDS {
        fixture.apply(backend, &[]);
        for family in families() {
            for (from, ip, server) in [
                (&fixture.peer, family.pod[0], "inbound"),
                (&fixture.pod, family.peer, "outbound"),
            ] {
                let to = SocketAddr::from((ip, 8080));
                let before = fast_opens(&fixture);
                let answer = from.run(|| dial_with_data(to)).unwrap();
                assert!(answer.starts_with(&format!("{server} {to} ")), "{backend}: {answer}");
                assert_eq!(
                    fast_opens(&fixture),
                    before + 1,
                    "{backend}: the data arrived in a later segment"
                );
            }
        }
    }
}

/// Connects with data in the first segment, and reads until the echo arrives.
fn dial_with_data(to: SocketAddr) -> String {
    let family = if to.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let client = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
    let fast = MsgFlags::from_bits_retain(libc::MSG_FASTOPEN);
    sendto(client.as_raw_fd(), b"early", &SockaddrStorage::from(to), fast).unwrap();
    let mut received = Vec::new();
    while !received.ends_with(b"\nearly") {
        let mut buffer = [0; 256];
        let len = recv(client.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        assert!(len > 0, "{to}: {:?}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..len]);
    }
    String::from_utf8(received).unwrap()
}

fn fast_opens(fixture: &Fixture) -> u64 {
    let text = fixture
        .pod
        .run(|| std::fs::read_to_string("/proc/thread-self/net/netstat"))
        .unwrap()
        .unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs
        .find(|(name, _)| *name == "TCPFastOpenPassive")
        .unwrap()
        .1
        .parse()
        .unwrap()
}

/// Prints durations for information.
#[test]
fn a_thousand_ports_and_a_thousand_networks_are_skipped() {
    if !can_run() {
        return;
    }
    // The first, a middle and the last entry of each list, and their neighbours.
    let skipped_ports = [10_000, 10_998, 11_998];
    let other_ports = [10_001, 10_999, 12_000];
    let fixture = Fixture::new(&[&skipped_ports[..], &other_ports, &[8080]].concat());
    let ports: Vec<String> = (0..1000).map(|n| (10_000 + 2 * n).to_string()).collect();
    let networks: Vec<String> = (0..500)
        .flat_map(|n| {
            [
                format!("10.{}.{}.0/25", 100 + n / 250, n % 250),
                format!("fd00:{n:x}::/64"),
            ]
        })
        .collect();
    let skipped = [
        "10.100.0.1",
        "10.101.0.1",
        "10.101.249.1",
        "fd00:0::1",
        "fd00:fa::1",
        "fd00:1f3::1",
    ];
    let others = ["10.100.0.129", "10.101.249.129", "fd00:fa:0:1::1", "fd00:1f4::1"];
    for ip in skipped.iter().chain(&others) {
        fixture.peer.ip(&format!("addr add {ip} dev lo\n")).unwrap();
    }
    let (ports, networks) = (ports.join(","), networks.join(","));
    let lists = [
        ["--inbound-ports-to-ignore", &ports],
        ["--outbound-ports-to-ignore", &ports],
        ["--subnets-to-ignore", &networks],
        ["--outbound-subnets-to-ignore", &networks],
    ];
    for backend in BACKENDS {
        // Like a first run, without rules.
        assert_success(&fixture.init(&["--clean"]));
        let millis = |more: &[&str]| {
            let (code, report) = fixture.report(&[&flags(backend, lists.as_flattened()), more].concat());
            assert_eq!(code, 0, "{report}");
            report["durations_ms"]["apply"].as_f64().unwrap()
        };
        println!(
            "apply time of {backend}: applied in {:.0} ms, again in {:.0} ms",
            millis(&["-g", "7"]),
            millis(&[])
        );
        for family in families() {
            let pod = family.pod[0];
            for port in skipped_ports {
                expect(&fixture.peer, ROOT, (pod, port), "app", backend);
                expect(&fixture.pod, APP, (family.peer, port), "peer", backend);
            }
            for port in other_ports {
                expect(&fixture.peer, ROOT, (pod, port), "inbound", backend);
                expect(&fixture.pod, APP, (family.peer, port), "outbound", backend);
            }
            let addresses = |list: &[&str]| -> Vec<IpAddr> {
                let all = list.iter().map(|ip| ip.parse::<IpAddr>().unwrap());
                all.filter(|ip| ip.is_ipv4() == pod.is_ipv4()).collect()
            };
            for (list, inbound, outbound) in [(&skipped[..], "app", "peer"), (&others[..], "inbound", "outbound")] {
                for ip in addresses(list) {
                    let client = Client {
                        source: Some(ip),
                        ..ROOT
                    };
                    expect(&fixture.peer, client, (pod, 8080), inbound, backend);
                    expect(&fixture.pod, APP, (ip, 8080), outbound, backend);
                }
            }
        }
    }
}

/// A connection to the proxy's own port is delivered once.
#[test]
fn the_inbound_port_can_be_dialled_directly() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::bare();
    let n_inbound = serve(&fixture.pod, "inbound", "[::]:4143");
    let n_outbound = serve(&fixture.pod, "outbound", "127.0.0.1:4140");
    for backend in BACKENDS {
        fixture.apply(backend, &[]);
        for family in families() {
            let before = n_inbound.load(Ordering::Relaxed);
            expect(&fixture.peer, ROOT, (family.pod[0], 4143), "inbound", backend);
            assert_eq!(n_inbound.load(Ordering::Relaxed), before + 1, "{backend}");
        }
    }
    assert_eq!(n_outbound.load(Ordering::Relaxed), 0);
}
