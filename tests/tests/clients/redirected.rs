//! Ports of the application, redirected to the sidecar, under policies that demand an identity.

use tulle_tests::credentials::{Leaf, Validity};

use crate::openssl::Client;
use crate::programs::Said;
use crate::scene::{GUARDED, HTTP, SERVER, Scene, identity, scene};

#[test]
fn under_all_authenticated_a_valid_certificate_is_accepted_and_all_others_are_refused() {
    let Some(scene) = scene(&["openssl"]) else { return };
    let peer = identity("peer");
    let valid = scene.credentials.leaf(&peer, Validity::Current);
    let expired = scene.credentials.leaf(&peer, Validity::Over);
    let foreign = scene.credentials.foreign_leaf(&peer);

    let said = ask(&scene, HTTP, Some(&valid));
    assert!(said.out.contains("HTTP/1.1 200 OK"), "{said:?}");
    assert!(said.out.contains(&format!(r#""l5d-client-id":["{peer}"]"#)), "{said:?}");

    let said = ask(&scene, HTTP, None);
    assert!(said.out.contains("HTTP/1.1 403"), "{said:?}");
    scene.counts(DENIED, &[HTTP_LABEL], "reason", &[("no-identity", 1)]);

    let mut refused = Vec::new();
    for (shown, reason) in [(&foreign, "foreign_ca"), (&expired, "expired")] {
        let said = ask(&scene, HTTP, Some(shown));
        assert!(!said.out.contains("HTTP/"), "{reason}: {said:?}");
        refused.push((reason, 1));
        let target = ["target_addr=\"10.79.0.20:8080\""];
        scene.counts("tulle_inbound_tls_failures_total", &target, "reason", &refused);
    }
    scene.counts(ALLOWED, &[HTTP_LABEL], "client_id", &[(&peer, 1)]);
}

#[test]
fn a_valid_identity_that_no_policy_permits_is_refused() {
    let Some(scene) = scene(&["openssl"]) else { return };
    let client = identity("client");
    let permitted = scene.credentials.leaf(&client, Validity::Current);
    let stranger = scene.credentials.leaf(&identity("stranger"), Validity::Current);

    let said = ask(&scene, GUARDED, Some(&stranger));
    assert!(said.out.contains("HTTP/1.1 403"), "{said:?}");
    scene.counts(DENIED, &[GUARDED_LABEL], "reason", &[("identity", 1)]);

    let said = ask(&scene, GUARDED, Some(&permitted));
    assert!(said.out.contains("HTTP/1.1 200 OK"), "{said:?}");
    scene.counts(ALLOWED, &[GUARDED_LABEL], "client_id", &[(&client, 1)]);
}

/// Sends one request from outside.
fn ask(scene: &Scene, port: u16, shown: Option<&Leaf>) -> Said {
    let client = Client {
        to: (SERVER, port).into(),
        name: &identity("server"),
        alpn: None,
        shown,
    };
    client.say(
        &scene.outside,
        b"GET /headers HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n",
    )
}

const DENIED: &str = "tulle_inbound_denied_total";
const ALLOWED: &str = "inbound_http_authz_allow_total";
const HTTP_LABEL: &str = "target_port=\"8080\"";
const GUARDED_LABEL: &str = "target_port=\"8081\"";
