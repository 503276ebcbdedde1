//! TLS of applications passes through sidecars unchanged, with the server name of the client.

use std::net::SocketAddr;
use std::sync::Arc;

use tulle_core::netns::Namespace;

use crate::openssl::{self, Client};
use crate::testbed::{OPEN_TLS, OUTSIDE, SERVER, TLS, Testbed, identity, service, start_testbed};

/// Checks that `openssl s_client` at `from` gets the certificate of the requested server name, and a response.
fn check(testbed: &Testbed, from: &Namespace, to: SocketAddr, server_host: &Arc<Namespace>) {
    let named = testbed.credentials.foreign_leaf(FOREIGN_SERVER_NAME);
    let other = testbed.credentials.foreign_leaf("other.example");
    let _server = openssl::server(testbed, server_host, to.port(), FOREIGN_SERVER_NAME, [&named, &other]);
    let client = Client {
        to,
        name: FOREIGN_SERVER_NAME,
        alpn: None,
        certificate: None,
    };
    let output = client.connect_and_send(from, b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(output.certificate(), named.pem.replace("\r\n", "\n").trim());
    // The response is the server's status page about the connection, which shows that bytes pass in both directions.
    assert!(
        output.out.contains("HTTP/1.0 200 ok") && output.out.contains("s_server"),
        "{output:?}"
    );
    // With another SNI the server presents its other certificate, so it receives the client's SNI.
    let output = Client {
        name: "unknown.example",
        ..client
    }
    .connect_and_send(from, b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(output.certificate(), other.pem.replace("\r\n", "\n").trim());
}

#[test]
fn a_foreign_server_outside_the_mesh_shows_its_own_certificate() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    check(&testbed, &testbed.client, (OUTSIDE, TLS).into(), &testbed.outside);
    // Checks that the connection passed the client's sidecar.
    let metrics = testbed.metrics(&testbed.client);
    let series = metrics.lines().find(|line| {
        line.starts_with("tcp_open_total{") && line.contains("10.79.0.40:8443") && line.contains("peer=\"src\"")
    });
    assert!(series.is_some_and(|series| series.ends_with(" 2")), "{metrics}");
}

#[test]
fn a_foreign_server_name_arrives_at_the_application_through_both_sidecars() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    check(&testbed, &testbed.client, service(TLS), &testbed.server);
    testbed.wait_for_series(
        ALLOWED,
        &["target_port=\"8443\""],
        "client_id",
        &[(&identity("client"), 2)],
    );
}

#[test]
fn a_foreign_server_name_from_outside_arrives_at_the_application_if_the_policy_permits() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    check(&testbed, &testbed.outside, (SERVER, OPEN_TLS).into(), &testbed.server);
    let names = [(FOREIGN_SERVER_NAME, 1), ("unknown.example", 1)];
    testbed.wait_for_series(ALLOWED, &["tls=\"opaque\""], "sni", &names);
}

/// A server name that is not an identity of the mesh.
const FOREIGN_SERVER_NAME: &str = "pay.example";
const ALLOWED: &str = "inbound_tcp_authz_allow_total";
