//! TLS between others passes through untouched.

use std::net::SocketAddr;
use std::sync::Arc;

use tulle_core::netns::Namespace;

use crate::openssl::{self, Client};
use crate::scene::{OPEN_TLS, OUTSIDE, SERVER, Scene, TLS, identity, scene, service};

/// Whether `openssl s_client` at `from` is shown the certificate that only the name it asks for leads to, and is answered.
fn check(scene: &Scene, from: &Namespace, to: SocketAddr, at: &Arc<Namespace>) {
    let named = scene.credentials.foreign_leaf(NAME);
    let other = scene.credentials.foreign_leaf("other.example");
    let _server = openssl::server(scene, at, to.port(), NAME, [&named, &other]);
    let client = Client {
        to,
        name: NAME,
        alpn: None,
        shown: None,
    };
    let said = client.say(from, b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(said.certificate(), named.pem.replace("\r\n", "\n").trim());
    // The server's own page about the connection, so bytes pass in both directions.
    assert!(
        said.out.contains("HTTP/1.0 200 ok") && said.out.contains("s_server"),
        "{said:?}"
    );
    // Without that name the same way leads to the other certificate: it is the name that arrives.
    let said = Client {
        name: "nobody.example",
        ..client
    }
    .say(from, b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(said.certificate(), other.pem.replace("\r\n", "\n").trim());
}

#[test]
fn a_foreign_server_outside_the_mesh_shows_its_own_certificate() {
    let Some(scene) = scene(&["openssl"]) else { return };
    check(&scene, &scene.client, (OUTSIDE, TLS).into(), &scene.outside);
    // The client's sidecar was on the way, or this proves nothing.
    let metrics = scene.metrics(&scene.client);
    let series = metrics.lines().find(|line| {
        line.starts_with("tcp_open_total{") && line.contains("10.79.0.40:8443") && line.contains("peer=\"src\"")
    });
    assert!(series.is_some_and(|series| series.ends_with(" 2")), "{metrics}");
}

#[test]
fn a_foreign_name_arrives_at_the_application_through_both_sidecars() {
    let Some(scene) = scene(&["openssl"]) else { return };
    check(&scene, &scene.client, service(TLS), &scene.server);
    scene.counts(
        ALLOWED,
        &["target_port=\"8443\""],
        "client_id",
        &[(&identity("client"), 2)],
    );
}

#[test]
fn a_foreign_name_from_outside_arrives_at_the_application_where_policy_lets_it() {
    let Some(scene) = scene(&["openssl"]) else { return };
    check(&scene, &scene.outside, (SERVER, OPEN_TLS).into(), &scene.server);
    let names = [(NAME, 1), ("nobody.example", 1)];
    scene.counts(ALLOWED, &["tls=\"opaque\""], "sni", &names);
}

const NAME: &str = "pay.example";
const ALLOWED: &str = "inbound_tcp_authz_allow_total";
