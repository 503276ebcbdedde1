//! Both ends know with whom they speak, and nobody can pretend.

use std::time::Duration;

use http::Request;
use tulle_tests::apps;
use tulle_tests::client::{Http1, empty};
use tulle_tests::eventually::eventually;
use tulle_tests::load::load;
use tulle_tests::mesh::{HTTP, Mesh, STRANGER, identity, mesh, pair};

fn forged() -> Request<tulle_tests::client::AnyBody> {
    let req = Request::get("/headers").header("host", "web.test");
    req.header(
        "l5d-client-id",
        "admin.shop.serviceaccount.identity.linkerd.cluster.local",
    )
    .body(empty())
    .expect("headers are well formed")
}

#[test]
fn the_application_learns_who_its_client_is() {
    pair(async |mesh: &Mesh| {
        let mut client = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        let seen: serde_json::Value = serde_json::from_slice(&client.ask(forged()).await.unwrap().body).unwrap();
        assert_eq!(seen["l5d-client-id"], serde_json::json!([identity("client")]));
    });
}

#[test]
fn a_stranger_cannot_claim_an_identity() {
    mesh().workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
        let answer = client.ask(forged()).await.unwrap();
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((seen.get("l5d-client-id"), answer.status.as_u16()), (None, 200));
    });
}

#[test]
fn both_proxies_count_mutual_tls_with_the_peers_name() {
    pair(async |mesh: &Mesh| {
        assert_eq!(mesh.get("client", mesh.service("web", HTTP), "/").await.status, 200);
        let tls = r#"tls="true""#;
        let client_id = format!("client_id=\"{}\"", identity("client"));
        let server_id = format!("server_id=\"{}\"", identity("web"));
        for name in ["request_total", "response_total"] {
            let inbound = mesh
                .metric("web", name, &[r#"direction="inbound""#, tls, &client_id])
                .await;
            let outbound = mesh
                .metric("client", name, &[r#"direction="outbound""#, tls, &server_id])
                .await;
            assert_eq!((inbound, outbound), (1., 1.), "{name}");
        }
    });
}

#[test]
fn plaintext_is_counted_with_its_reason() {
    mesh()
        .workload("client")
        .workload("web")
        .unmeshed("legacy")
        .run(async |mesh: &Mesh| {
            apps::echo(mesh, "web").await;
            apps::echo(mesh, "legacy").await;
            assert_eq!(mesh.get("client", mesh.service("legacy", HTTP), "/").await.status, 200);
            let reason = r#"no_tls_reason="not_provided_by_service_discovery""#;
            assert_eq!(mesh.metric("client", "request_total", &[reason]).await, 1.);
            let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
            assert_eq!(client.ask(tulle_tests::client::request("/")).await.unwrap().status, 200);
            assert_eq!(
                mesh.metric("web", "request_total", &[r#"no_tls_reason="no_tls_from_remote""#])
                    .await,
                1.
            );
        });
}

#[test]
fn certificates_are_renewed_without_a_failed_request() {
    mesh()
        .flag("--identity-issuance-lifetime=4s")
        .flag("--identity-clock-skew-allowance=1s")
        .env("IDENTITY_MIN_REFRESH", "500ms")
        .workload("client")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::echo(mesh, "web").await;
            let renewed = async || {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let counts = [
                    mesh.metric("client", REFRESHES, &[]).await,
                    mesh.metric("web", REFRESHES, &[]).await,
                ];
                counts.iter().all(|count| *count >= 3.).then_some(())
            };
            let outcome = load(
                mesh,
                "client",
                mesh.service("web", HTTP),
                2,
                eventually("renewals", renewed),
            )
            .await;
            outcome.assert_all_ok();
            // Handshakes are made with the new certificates as well.
            assert_eq!(mesh.get("client", mesh.service("web", HTTP), "/").await.status, 200);
        });
}

const REFRESHES: &str = "control_identity_cert_refreshes_total";
