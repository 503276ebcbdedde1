//! Ports of the application, redirected to the sidecar, with policies that require an identity.

use tulle_tests::credentials::{Leaf, Validity};

use crate::openssl::Client;
use crate::programs::ProgramOutput;
use crate::scene::{HTTP, RESTRICTED, SERVER, Testbed, identity, scene};

#[test]
fn under_all_authenticated_a_valid_certificate_is_accepted_and_all_others_are_refused() {
    let Some(scene) = scene(&["openssl"]) else { return };
    let peer = identity("peer");
    let valid = scene.credentials.leaf(&peer, Validity::Current);
    let expired = scene.credentials.leaf(&peer, Validity::Expired);
    let foreign = scene.credentials.foreign_leaf(&peer);

    let output = ask(&scene, HTTP, Some(&valid));
    assert!(output.out.contains("HTTP/1.1 200 OK"), "{output:?}");
    assert!(
        output.out.contains(&format!(r#""l5d-client-id":["{peer}"]"#)),
        "{output:?}"
    );

    let output = ask(&scene, HTTP, None);
    assert!(output.out.contains("HTTP/1.1 403"), "{output:?}");
    scene.wait_for_series(DENIED, &[HTTP_LABEL], "reason", &[("no-identity", 1)]);

    let mut refused = Vec::new();
    for (shown, reason) in [(&foreign, "foreign_ca"), (&expired, "expired")] {
        let output = ask(&scene, HTTP, Some(shown));
        assert!(!output.out.contains("HTTP/"), "{reason}: {output:?}");
        refused.push((reason, 1));
        let target = ["target_addr=\"10.79.0.20:8080\""];
        scene.wait_for_series("tulle_inbound_tls_failures_total", &target, "reason", &refused);
    }
    scene.wait_for_series(ALLOWED, &[HTTP_LABEL], "client_id", &[(&peer, 1)]);
}

#[test]
fn a_valid_identity_that_no_policy_permits_is_refused() {
    let Some(scene) = scene(&["openssl"]) else { return };
    let client = identity("client");
    let permitted = scene.credentials.leaf(&client, Validity::Current);
    let stranger = scene.credentials.leaf(&identity("stranger"), Validity::Current);

    let output = ask(&scene, RESTRICTED, Some(&stranger));
    assert!(output.out.contains("HTTP/1.1 403"), "{output:?}");
    scene.wait_for_series(DENIED, &[GUARDED_LABEL], "reason", &[("identity", 1)]);

    let output = ask(&scene, RESTRICTED, Some(&permitted));
    assert!(output.out.contains("HTTP/1.1 200 OK"), "{output:?}");
    scene.wait_for_series(ALLOWED, &[GUARDED_LABEL], "client_id", &[(&client, 1)]);
}

/// Sends one request from outside the mesh.
fn ask(scene: &Testbed, port: u16, shown: Option<&Leaf>) -> ProgramOutput {
    let client = Client {
        to: (SERVER, port).into(),
        name: &identity("server"),
        alpn: None,
        certificate: shown,
    };
    client.connect_and_send(
        &scene.outside,
        b"GET /headers HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n",
    )
}

const DENIED: &str = "tulle_inbound_denied_total";
const ALLOWED: &str = "inbound_http_authz_allow_total";
const HTTP_LABEL: &str = "target_port=\"8080\"";
const GUARDED_LABEL: &str = "target_port=\"8081\"";
