//! The sidecar's own port: mutual TLS and a transport header, or nothing.

use std::collections::BTreeMap;

use tulle_core::names::port;

use crate::credentials::{Leaf, Validity};
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

    let said = ask(&scene, Some(&valid));
    assert!(said.out.contains("HTTP/1.1 200 OK"), "{said:?}");
    assert!(said.out.contains("ALPN protocol: transport.l5d.io/v1"), "{said:?}");
    let header = "inbound_tcp_transport_header_connections_total";
    let direct = scene.series(&scene.server, header, &["target_port=\"8080\""], "client_id");
    assert_eq!(direct, BTreeMap::from([(peer, 1)]));

    for (shown, reason) in [
        (None, "no_certificate"),
        (Some(&foreign), "foreign_ca"),
        (Some(&expired), "expired"),
    ] {
        let before = failures(&scene);
        let said = ask(&scene, shown);
        assert!(!said.out.contains("HTTP/"), "{reason}: {said:?}");
        let mut expected = before;
        *expected.entry(reason.to_owned()).or_default() += 1;
        assert_eq!(failures(&scene), expected, "{said:?}");
    }
    println!("refused: {:?}", failures(&scene));
    assert_eq!(
        scene.series(&scene.server, header, &[], "target_port"),
        BTreeMap::from([("8080".into(), 1)])
    );
}

/// Asks for the application's HTTP port from outside.
fn ask(scene: &Scene, shown: Option<&Leaf>) -> Said {
    let client = Client {
        to: (SERVER, port::INBOUND).into(),
        name: &identity("server"),
        alpn: Some("transport.l5d.io/v1"),
        shown,
    };
    client.say(&scene.outside, &[&header(HTTP), REQUEST].concat())
}

/// Handshakes that the server's sidecar ended, by reason.
fn failures(scene: &Scene) -> BTreeMap<String, u64> {
    scene.series(
        &scene.server,
        "tulle_inbound_tls_failures_total",
        &["target_addr=\"10.79.0.20:4143\""],
        "reason",
    )
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
