//! Ports of the application, redirected to the sidecar, with policies that require an identity.

use tulle_tests::credentials::{Leaf, Validity};

use crate::openssl::Client;
use crate::programs::ProgramOutput;
use crate::testbed::{HTTP, RESTRICTED, SERVER, Testbed, identity, start_testbed};

#[test]
fn under_all_authenticated_a_valid_certificate_is_accepted_and_all_others_are_refused() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    let peer = identity("peer");
    let valid = testbed.credentials.leaf(&peer, Validity::Current);
    let expired = testbed.credentials.leaf(&peer, Validity::Expired);
    let of_other_ca = testbed.credentials.foreign_leaf(&peer);

    let output = send_openssl_request(&testbed, HTTP, Some(&valid));
    assert!(output.out.contains("HTTP/1.1 200 OK"), "{output:?}");
    assert!(
        output.out.contains(&format!(r#""l5d-client-id":["{peer}"]"#)),
        "{output:?}"
    );

    let output = send_openssl_request(&testbed, HTTP, None);
    assert!(output.out.contains("HTTP/1.1 403"), "{output:?}");
    testbed.wait_for_series(DENIED, &[HTTP_LABEL], "reason", &[("no-identity", 1)]);

    let mut refused = Vec::new();
    for (certificate, reason) in [(&of_other_ca, "unknown_ca"), (&expired, "expired")] {
        let output = send_openssl_request(&testbed, HTTP, Some(certificate));
        assert!(!output.out.contains("HTTP/"), "{reason}: {output:?}");
        refused.push((reason, 1));
        let target = ["target_addr=\"10.79.0.20:8080\""];
        testbed.wait_for_series("tulle_inbound_tls_failures_total", &target, "reason", &refused);
    }
    testbed.wait_for_series(ALLOWED, &[HTTP_LABEL], "client_id", &[(&peer, 1)]);
}

#[test]
fn a_valid_identity_that_no_policy_permits_is_refused() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    let client = identity("client");
    let permitted = testbed.credentials.leaf(&client, Validity::Current);
    let other = testbed.credentials.leaf(&identity("stranger"), Validity::Current);

    let output = send_openssl_request(&testbed, RESTRICTED, Some(&other));
    assert!(output.out.contains("HTTP/1.1 403"), "{output:?}");
    testbed.wait_for_series(DENIED, &[RESTRICTED_LABEL], "reason", &[("identity", 1)]);

    let output = send_openssl_request(&testbed, RESTRICTED, Some(&permitted));
    assert!(output.out.contains("HTTP/1.1 200 OK"), "{output:?}");
    testbed.wait_for_series(ALLOWED, &[RESTRICTED_LABEL], "client_id", &[(&client, 1)]);
}

/// Sends one request from outside the mesh.
fn send_openssl_request(testbed: &Testbed, port: u16, client_certificate: Option<&Leaf>) -> ProgramOutput {
    let client = Client {
        to: (SERVER, port).into(),
        name: &identity("server"),
        alpn: None,
        certificate: client_certificate,
    };
    client.connect_and_send(
        &testbed.outside,
        b"GET /headers HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n",
    )
}

const DENIED: &str = "tulle_inbound_denied_total";
const ALLOWED: &str = "inbound_http_authz_allow_total";
const HTTP_LABEL: &str = "target_port=\"8080\"";
const RESTRICTED_LABEL: &str = "target_port=\"8081\"";
