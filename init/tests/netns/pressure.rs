//! A full connection tracking table.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, send, setsockopt, socket, sockopt};
use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::fixture::{BACKENDS, FLAGS, Fixture, assert_success, can_run, echo, families, flags};
use crate::lifecycle::open_connections;

/// The kernel drops packets of connections that it cannot track, so none bypasses the proxy. Rules can still be applied and
/// removed.
///
/// The limit applies to the machine, but each namespace is counted separately, so other namespaces are not affected.
#[test]
fn with_a_full_conntrack_table_no_connection_bypasses_the_proxy() {
    if !can_run() {
        return;
    }
    let fixture = Fixture::new(&[8080]);
    let setting = |name: &str| -> u32 {
        let text = fixture.sh(&format!("cat /proc/sys/net/netfilter/{name}"));
        text.trim().parse().unwrap()
    };
    fixture.apply("nft", &[]);
    let mut streams = open_connections(&fixture, 8080);
    let limit = setting("nf_conntrack_max");
    let started = Instant::now();
    track(
        &fixture.pod,
        limit - setting("nf_conntrack_count") - FREE_CONNTRACK_ENTRIES,
    );
    println!("{limit} connections were tracked after {:?}", started.elapsed());
    assert!(
        limit - setting("nf_conntrack_count") <= FREE_CONNTRACK_ENTRIES,
        "the tracked connections are missing"
    );

    // Until the table is full, connections are redirected to the proxy.
    let to = SocketAddr::from((families()[0].pod[0], 8080));
    let mut last = Vec::new();
    while let Some((stream, server)) = try_dial(&fixture.peer, to) {
        assert_eq!(server, "inbound");
        last.push(stream);
        assert!(
            last.len() <= 2 * FREE_CONNTRACK_ENTRIES as usize,
            "the table does not fill up"
        );
    }
    assert!(!last.is_empty());

    for backend in BACKENDS {
        let started = Instant::now();
        fixture.apply(backend, &["-g", "7"]);
        let applied = started.elapsed();
        assert_eq!(
            fixture.exit_code(&flags(backend, &["-g", "7", "--check"])),
            0,
            "{backend}"
        );
        println!(
            "full, {backend}: applied after {applied:?}, compared after {:?}",
            started.elapsed() - applied
        );
        assert!(started.elapsed() < Duration::from_secs(5), "{backend}");
        thread::scope(|scope| {
            for family in families() {
                for (namespace, ip) in [(&fixture.peer, family.pod[0]), (&fixture.pod, family.peer)] {
                    scope.spawn(move || {
                        let established = try_dial(namespace, (ip, 8080).into());
                        assert!(established.is_none(), "{backend}: {ip}: {established:?}");
                    });
                }
            }
        });
        for (stream, server) in &mut streams {
            echo(stream, &[7; 1000]).unwrap_or_else(|error| panic!("{backend}: {server}: {error}"));
        }
    }

    // Draining finds the few relevant connections among all.
    thread::scope(|scope| {
        let cleaning = scope.spawn(|| fixture.init(&["--clean=drain", "--drain-timeout", "20s"]));
        for (stream, server) in &mut streams {
            echo(stream, &vec![7; 1 << 20]).unwrap_or_else(|error| panic!("draining: {server}: {error}"));
        }
        assert!(!cleaning.is_finished(), "did not wait");
        drop((streams, last));
        let started = Instant::now();
        let output = cleaning.join().unwrap();
        assert_success(&output);
        println!("full: drained {:?} after the last connection", started.elapsed());
        assert!(
            !String::from_utf8_lossy(&output.stderr).contains("still open"),
            "{output:?}"
        );
    });
    assert_eq!(fixture.exit_code(&[&FLAGS[..], &["--check"]].concat()), 4);
}

/// Returns the connection and the server's name, if the connection is established in time; then the server must answer in
/// time, too.
fn try_dial(namespace: &Namespace, to: SocketAddr) -> Option<(TcpStream, String)> {
    let stream = namespace
        .run(|| TcpStream::connect_timeout(&to, DIAL_TIMEOUT))
        .unwrap()
        .ok()?;
    stream.set_read_timeout(Some(DIAL_TIMEOUT)).unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    let server = line.split(' ').next().unwrap_or_default().to_owned();
    Some((stream, server))
}

/// Adds connection tracking entries that belong to no socket. They are assured, so the kernel does not evict them.
fn track(namespace: &Namespace, count: u32) {
    let kernel = namespace.run(|| {
        let netfilter = SockProtocol::NetlinkNetFilter;
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::empty(), netfilter).unwrap()
    });
    let kernel = kernel.unwrap();
    setsockopt(&kernel, sockopt::SndBufForce, &(4 << 20)).unwrap();
    let numbers: Vec<u32> = (0..count).collect();
    for part in numbers.chunks(5000) {
        let messages: Vec<u8> = part.iter().flat_map(|n| new_connection(*n)).collect();
        send(kernel.as_raw_fd(), &messages, MsgFlags::empty()).unwrap();
    }
}

/// A ctnetlink request for one assured UDP connection.
fn new_connection(n: u32) -> Vec<u8> {
    let ports = [(n & 0xffff) as u16, (n >> 16) as u16 + 1];
    let ips = [Ipv4Addr::new(10, 200, 0, 1), Ipv4Addr::new(10, 200, 0, 2)];
    let tuple = |kind, from: usize, to: usize| {
        let addresses = [attr(1, &ips[from].octets()), attr(2, &ips[to].octets())].concat();
        let protocol = [
            attr(1, &[17]),
            attr(2, &ports[from].to_be_bytes()),
            attr(3, &ports[to].to_be_bytes()),
        ]
        .concat();
        attr(
            kind | NESTED,
            &[attr(1 | NESTED, &addresses), attr(2 | NESTED, &protocol)].concat(),
        )
    };
    let seen_assured_confirmed: u32 = 1 << 1 | 1 << 2 | 1 << 3;
    let body = [
        vec![libc::AF_INET as u8, 0, 0, 0],
        tuple(1, 0, 1),
        tuple(2, 1, 0),
        attr(3, &seen_assured_confirmed.to_be_bytes()),
        attr(7, &600_u32.to_be_bytes()),
    ]
    .concat();
    let kind = (libc::NFNL_SUBSYS_CTNETLINK as u16) << 8;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_CREATE) as u16;
    let length = 16 + body.len() as u32;
    [
        &length.to_ne_bytes()[..],
        &kind.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &[0; 8],
        &body,
    ]
    .concat()
}

fn attr(kind: u16, data: &[u8]) -> Vec<u8> {
    let mut attr = [&(4 + data.len() as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), data].concat();
    attr.resize(attr.len().next_multiple_of(4), 0);
    attr
}

const NESTED: u16 = 1 << 15;
/// Entries of the table that the test leaves free for connections of its own.
const FREE_CONNTRACK_ENTRIES: u32 = 8;
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
