//! The sidecar's own port: mutual TLS and a transport header, or nothing.

use tulle_core::names::port;
use tulle_tests::credentials::{Leaf, Validity};

use crate::openssl::Client;
use crate::programs::Said;
use crate::scene::{HTTP, SERVER, Scene, identity, scene};

#[test]
fn a_valid_certificate_is_accepted_and_all_others_are_refused_each_for_its_own_reason() {
    let Some(scene) = scene(&["openssl"]) else { return };
    let peer = identity("peer");
    let valid = scene.credentials.leaf(&peer, Validity::Current);
    let expired = scene.credentials.leaf(&peer, Validity::Over);
    let foreign = scene.credentials.foreign_leaf(&peer);

    let said = ask(&scene, ALPN, Some(&valid));
    assert!(said.out.contains("HTTP/1.1 200 OK"), "{said:?}");
    assert!(said.out.contains("ALPN protocol: transport.l5d.io/v1"), "{said:?}");
    let header = "inbound_tcp_transport_header_connections_total";
    scene.counts(header, &["target_port=\"8080\""], "client_id", &[(&peer, 1)]);

    let mut refused = Vec::new();
    for (shown, reason) in [
        (None, "no_certificate"),
        (Some(&foreign), "foreign_ca"),
        (Some(&expired), "expired"),
    ] {
        let said = ask(&scene, ALPN, shown);
        assert!(!said.out.contains("HTTP/"), "{reason}: {said:?}");
        refused.push((reason, 1));
        let target = ["target_addr=\"10.79.0.20:4143\""];
        scene.counts("tulle_inbound_tls_failures_total", &target, "reason", &refused);
    }
    // Who does not say that a header follows is no peer.
    let said = ask(&scene, None, Some(&valid));
    assert!(!said.out.contains("HTTP/"), "{said:?}");
    let cause = ["cause=\"bad-transport-header\""];
    scene.counts("tulle_failures_total", &cause, "direction", &[("inbound", 1)]);
    scene.counts(header, &[], "target_port", &[("8080", 1)]);
}

const ALPN: Option<&str> = Some("transport.l5d.io/v1");

/// Asks for the application's HTTP port from outside.
fn ask(scene: &Scene, alpn: Option<&'static str>, shown: Option<&Leaf>) -> Said {
    let client = Client {
        to: (SERVER, port::INBOUND).into(),
        name: &identity("server"),
        alpn,
        shown,
    };
    client.say(&scene.outside, &[&header(HTTP), REQUEST].concat())
}

/// A transport header, byte by byte: preface, length, and a message whose field 1 is the port.
fn header(port: u16) -> Vec<u8> {
    let mut message = vec![1 << 3];
    let mut rest = port;
    while rest >= 0x80 {
        message.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    message.push(rest as u8);
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&b"transport.l5d.io/v1\r\n\r\n"[..], &length, &message].concat()
}

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n";
