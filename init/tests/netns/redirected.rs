//! T01–T12: what must arrive at the proxy.

use std::net::SocketAddr;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, recv, sendto, socket};
use nix::unistd::{Gid, getgroups, setgroups};
use std::os::fd::AsRawFd;

use crate::scene::{APP, BACKENDS, ROOT, Scene, Who, ask, expect, families, root, said};

/// T01, T02, T03, T04 (the IPv4 client of the dual-stack listener), T05, T06, T08, T10.
#[test]
fn both_directions_arrive_at_the_proxy_with_what_was_dialled() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080, 9000, 4567, 53]);
    for backend in BACKENDS {
        scene.apply(backend, &["--inbound-ports-to-ignore", "4567"]);
        for family in families() {
            let [pod, second] = family.pod;
            expect(&scene.peer, ROOT, (pod, 8080), "inbound", backend);
            expect(&scene.peer, ROOT, (pod, 8081), "inbound", backend); // nobody listens there
            expect(&scene.peer, ROOT, (second, 8080), "inbound", backend);
            expect(&scene.peer, ROOT, (pod, 53), "inbound", backend);
            expect(&scene.pod, APP, (family.peer, 9000), "outbound", backend);
            expect(&scene.pod, ROOT, (family.peer, 9000), "outbound", backend);
            expect(&scene.pod, APP, (family.peer, 4567), "outbound", backend); // skipped inbound only
            expect(&scene.pod, APP, (family.peer, 53), "outbound", backend);
        }
    }
}

/// T07.
#[test]
fn a_supplementary_group_is_not_the_skipped_group() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[9000]);
    let groups = getgroups().unwrap();
    for backend in BACKENDS {
        scene.apply(backend, &["-g", "5555"]);
        for family in families() {
            setgroups(&[Gid::from_raw(5555)]).unwrap();
            expect(&scene.pod, APP, (family.peer, 9000), "outbound", backend);
            setgroups(&groups).unwrap();
            expect(
                &scene.pod,
                Who { gid: 5555, ..APP },
                (family.peer, 9000),
                "peer",
                backend,
            );
        }
    }
}

/// T09.
#[test]
fn with_a_list_only_listed_ports_are_redirected() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[8080, 8081, 8090, 8091, 8092]);
    for backend in BACKENDS {
        scene.apply(backend, &["--ports-to-redirect", "8080,8090-8091"]);
        for family in families() {
            for (port, server) in [
                (8080, "inbound"),
                (8081, "app"),
                (8090, "inbound"),
                (8091, "inbound"),
                (8092, "app"),
            ] {
                expect(&scene.peer, ROOT, (family.pod[0], port), server, backend);
            }
        }
    }
}

/// T11.
#[test]
fn data_in_the_first_segment_arrives_at_the_proxy() {
    if !root() {
        return;
    }
    let scene = Scene::bare();
    // Client and all listeners to come, without cookies.
    scene.sysctl("net/ipv4/tcp_fastopen", "1543");
    scene
        .peer
        .run(|| std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "1543"))
        .unwrap()
        .unwrap();
    scene.proxy();
    for backend in BACKENDS {
        scene.apply(backend, &[]);
        for family in families() {
            let to = SocketAddr::from((family.pod[0], 8080));
            let before = fast_opens(&scene);
            let answer = scene.peer.run(|| {
                let family = if to.is_ipv4() {
                    AddressFamily::Inet
                } else {
                    AddressFamily::Inet6
                };
                let client = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
                let fast = MsgFlags::from_bits_retain(libc::MSG_FASTOPEN);
                sendto(client.as_raw_fd(), b"early", &SockaddrStorage::from(to), fast).unwrap();
                let mut heard = Vec::new();
                while !heard.ends_with(b"\nearly") {
                    let mut buffer = [0; 256];
                    let len = recv(client.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
                    assert!(len > 0, "{backend}: {:?}", String::from_utf8_lossy(&heard));
                    heard.extend_from_slice(&buffer[..len]);
                }
                String::from_utf8(heard).unwrap()
            });
            assert_eq!(answer.unwrap(), format!("inbound {to}\nearly"), "{backend}");
            assert_eq!(fast_opens(&scene), before + 1, "{backend}: the data came later");
        }
    }
}

fn fast_opens(scene: &Scene) -> u64 {
    let text = scene
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

/// T12; the time is printed for the record.
#[test]
fn a_thousand_ports_and_a_thousand_networks_are_skipped() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[10_000, 10_001, 10_998, 8080, 9000]);
    let ports: Vec<String> = (0..1000).map(|n| (10_000 + 2 * n).to_string()).collect();
    let networks: Vec<String> = (0..500)
        .flat_map(|n| {
            [
                format!("10.{}.{}.0/25", 100 + n / 250, n % 250),
                format!("fd00:{n:x}::/64"),
            ]
        })
        .chain(["10.78.0.1/32".to_owned(), "fd78::1".to_owned()])
        .collect();
    let (ports, networks) = (ports.join(","), networks.join(","));
    for backend in BACKENDS {
        let report = scene.apply(
            backend,
            &[
                "--inbound-ports-to-ignore",
                &ports,
                "--outbound-ports-to-ignore",
                &ports,
                "--subnets-to-ignore",
                &networks,
                "--outbound-subnets-to-ignore",
                &networks,
                "--report",
                "json",
            ],
        );
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        println!("T12 {backend}: applied in {} ms", report["durations_ms"]["apply"]);
        for family in families() {
            let pod = family.pod[0];
            expect(&scene.peer, ROOT, (pod, 10_000), "app", backend);
            expect(&scene.peer, ROOT, (pod, 10_001), "inbound", backend);
            expect(&scene.peer, ROOT, (pod, 10_998), "app", backend);
            expect(
                &scene.peer,
                Who {
                    from: Some(family.other_peer),
                    ..ROOT
                },
                (pod, 8080),
                "app",
                backend,
            );
            expect(&scene.peer, ROOT, (pod, 8080), "inbound", backend);
            expect(&scene.pod, APP, (family.peer, 10_998), "peer", backend);
            expect(&scene.pod, APP, (family.other_peer, 9000), "peer", backend);
            expect(&scene.pod, APP, (family.peer, 9000), "outbound", backend);
        }
    }
}

/// T31: what is for the proxy itself is delivered once.
#[test]
fn the_inbound_port_can_be_dialled_directly() {
    if !root() {
        return;
    }
    let scene = Scene::new(&[]);
    for backend in BACKENDS {
        scene.apply(backend, &[]);
        for family in families() {
            let to = SocketAddr::from((family.pod[0], 4143));
            assert_eq!(ask(&scene.peer, ROOT, to).unwrap(), said("inbound", to), "{backend}");
        }
    }
}
