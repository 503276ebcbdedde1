//! The inbound port of the sidecar accepts only mutual TLS with a transport header.

use tulle_core::names::port;
use tulle_tests::credentials::{Leaf, Validity};

use crate::openssl::Client;
use crate::programs::ProgramOutput;
use crate::testbed::{HTTP, SERVER, Testbed, identity, start_testbed};

#[test]
fn a_valid_certificate_is_accepted_and_all_others_are_refused_each_for_its_own_reason() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    let peer = identity("peer");
    let valid = testbed.credentials.leaf(&peer, Validity::Current);
    let expired = testbed.credentials.leaf(&peer, Validity::Expired);
    let of_other_ca = testbed.credentials.foreign_leaf(&peer);

    let output = send_openssl_request(&testbed, ALPN, Some(&valid));
    assert!(output.out.contains("HTTP/1.1 200 OK"), "{output:?}");
    assert!(output.out.contains("ALPN protocol: transport.l5d.io/v1"), "{output:?}");
    let header = "inbound_tcp_transport_header_connections_total";
    testbed.wait_for_series(header, &["target_port=\"8080\""], "client_id", &[(&peer, 1)]);

    let mut refused = Vec::new();
    for (certificate, reason) in [
        (None, "no_certificate"),
        (Some(&of_other_ca), "unknown_ca"),
        (Some(&expired), "expired"),
    ] {
        let output = send_openssl_request(&testbed, ALPN, certificate);
        assert!(!output.out.contains("HTTP/"), "{reason}: {output:?}");
        refused.push((reason, 1));
        let target = ["target_addr=\"10.79.0.20:4143\""];
        testbed.wait_for_series("tulle_inbound_tls_failures_total", &target, "reason", &refused);
    }
    // A client whose ALPN does not announce the transport header is refused.
    let output = send_openssl_request(&testbed, None, Some(&valid));
    assert!(!output.out.contains("HTTP/"), "{output:?}");
    let cause = ["cause=\"bad-transport-header\""];
    testbed.wait_for_series("tulle_failures_total", &cause, "direction", &[("inbound", 1)]);
    testbed.wait_for_series(header, &[], "target_port", &[("8080", 1)]);
}

const ALPN: Option<&str> = Some("transport.l5d.io/v1");

/// Sends a request for the application's HTTP port from outside the mesh.
fn send_openssl_request(
    testbed: &Testbed,
    alpn: Option<&'static str>,
    client_certificate: Option<&Leaf>,
) -> ProgramOutput {
    let client = Client {
        to: (SERVER, port::INBOUND).into(),
        name: &identity("server"),
        alpn,
        certificate: client_certificate,
    };
    client.connect_and_send(&testbed.outside, &[&header(HTTP), REQUEST].concat())
}

/// A transport header as bytes: preface, length, and a message with the port as field 1.
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
