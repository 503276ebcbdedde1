//! In ingress mode a request goes to the service that it names, independent of the connection's original destination.

use std::collections::BTreeSet;

use http::{Request, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, CollectedResponse, Http1, Http2, empty};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, DETECTED_TCP, HTTP, Mesh, OPAQUE, mesh};

/// A controller in ingress mode, and services for its requests.
fn ingress() -> Builder {
    let mesh = mesh().workload("ingress").workload_env("INGRESS_MODE", "true");
    mesh.workload("web").replicas("other", 2).unmeshed("legacy")
}

async fn start_echo_servers(mesh: &Mesh) {
    for workload in ["web", "other-0", "other-1", "legacy"] {
        apps::start_echo(mesh, workload).await;
    }
}

/// The response to a request that dials the endpoint of `dialled` and names `target`.
async fn fetch_from(mesh: &Mesh, dialled: &str, target: Option<&str>) -> CollectedResponse {
    let mut client = Http1::handshake(mesh.dial("ingress", mesh.app_addr(dialled, HTTP)).await).await;
    client.fetch(request_with_dst_override(target)).await.unwrap()
}

fn request_with_dst_override(target: Option<&str>) -> Request<AnyBody> {
    let mut req = Request::get("/headers").header("host", "shop.example");
    if let Some(target) = target {
        req = req.header("l5d-dst-override", target);
    }
    req.body(empty()).unwrap()
}

fn service_name(service: &str) -> String {
    format!("{service}.shop.svc.cluster.local:{HTTP}")
}

#[test]
fn requests_of_one_connection_go_to_the_services_that_they_name() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let mut client = Http1::handshake(mesh.dial("ingress", mesh.app_addr("web", HTTP)).await).await;
        let (other, web) = (service_name("other"), service_name("Web"));
        for (target, expected) in [(Some(&other), "other"), (None, "web"), (Some(&web), "web")] {
            let answer = client
                .fetch(request_with_dst_override(target.map(String::as_str)))
                .await
                .unwrap();
            assert_eq!(answer.status, 200, "{target:?}: {}", answer.text());
            assert!(answer.header("x-replica").starts_with(expected), "{target:?}");
            assert!(!answer.text().contains("l5d-dst-override"), "{}", answer.text());
        }
        let named = ["authority=\"other.shop.svc.cluster.local:8080\"", "tls=\"true\""];
        mesh.wait_for_metric("ingress", "request_total", &named, 1.0).await;
    });
}

#[test]
fn requests_of_one_http2_connection_are_balanced_over_the_service_that_they_name() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let mut client = Http2::handshake(mesh.dial("ingress", mesh.app_addr("web", HTTP)).await).await;
        let other = service_name("other");
        let replicas = eventually("both replicas answer", async || {
            let mut replicas = BTreeSet::new();
            for _ in 0..20 {
                let mut client = client.clone();
                let req = Request::get("http://shop.example/").version(Version::HTTP_2);
                let req = req.header("l5d-dst-override", &other).body(empty()).unwrap();
                replicas.insert(client.fetch(req).await.unwrap().header("x-replica").to_owned());
            }
            (replicas.len() > 1).then_some(replicas)
        });
        assert_eq!(replicas.await, ["other-0", "other-1"].map(String::from).into());
        let req = Request::get("http://shop.example/").version(Version::HTTP_2);
        let answer = client.fetch(req.body(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.header("x-replica"), "web");
    });
}

#[test]
fn a_request_without_an_override_to_an_unmeshed_endpoint_has_its_own_no_tls_reason() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        assert_eq!(fetch_from(mesh, "legacy", None).await.header("x-replica"), "legacy");
        let plain = ["no_tls_reason=\"ingress_without_override\""];
        mesh.wait_for_metric("ingress", "request_total", &plain, 1.0).await;
    });
}

#[test]
fn an_invalid_override_is_refused_and_not_sent_to_the_original_destination() {
    let mesh_with_causes = ingress().env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", "false");
    mesh_with_causes.run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        for bad in ["10.0.0.1:80", "[::1]:80", "web:0", "we b", ""] {
            let answer = fetch_from(mesh, "web", Some(bad)).await;
            assert_eq!(
                (answer.status.as_u16(), answer.cause()),
                (400, "bad-request"),
                "{bad:?}"
            );
            let error = answer.header("l5d-proxy-error");
            assert!(error.contains("l5d-dst-override is not a DNS name"), "{error}");
        }
    });
}

#[test]
fn a_name_outside_the_profile_suffixes_is_forbidden() {
    let mesh_with_causes = ingress().env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", "false");
    mesh_with_causes.run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        for other in [
            "metadata.internal",
            "localhost:4191",
            "web.shop",
            "svc.cluster.local.example:80",
        ] {
            let answer = fetch_from(mesh, "web", Some(other)).await;
            assert_eq!(
                (answer.status.as_u16(), answer.cause()),
                (403, "target-forbidden"),
                "{other:?}"
            );
        }
    });
}

#[test]
fn an_unknown_name_is_refused_and_ingress_clients_do_not_get_the_cause() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let answer = fetch_from(mesh, "web", Some("missing.shop.svc.cluster.local")).await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.headers.get("l5d-proxy-error"), None);
        assert_eq!(answer.headers.get("l5d-proxy-cause"), None);
    });
}

#[test]
fn byte_streams_go_to_the_original_destination() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        for port in [DETECTED_TCP, OPAQUE] {
            let mut client = mesh.dial("ingress", mesh.app_addr("web", port)).await;
            client.write_all(b"\x01no HTTP at all\n").await.unwrap();
            let mut read = [0; 16];
            client.read_exact(&mut read).await.unwrap();
            assert_eq!(&read, b"\x01no HTTP at all\n", "{port}");
        }
    });
}

#[test]
fn without_ingress_mode_the_header_has_no_effect_and_is_passed_on() {
    mesh()
        .workload("ingress")
        .workload("web")
        .workload("other")
        .run(async |mesh: &Mesh| {
            for workload in ["web", "other"] {
                apps::start_echo(mesh, workload).await;
            }
            let answer = fetch_from(mesh, "web", Some(&service_name("other"))).await;
            assert_eq!(answer.header("x-replica"), "web");
            assert!(answer.text().contains("l5d-dst-override"), "{}", answer.text());
        });
}

#[test]
fn a_service_that_appears_is_found_by_its_name() {
    ingress().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let late = service_name("late");
        assert_eq!(fetch_from(mesh, "web", Some(&late)).await.status, 503);
        let manifest = mesh.manifest("service-other");
        let manifest = manifest.replace("name: other", "name: late");
        mesh.write("service-late", &manifest.replace("10.66.1.", "10.66.2."));
        eventually("the service is found", async || {
            let answer = fetch_from(mesh, "web", Some(&late)).await;
            (answer.status == 200 && answer.header("x-replica").starts_with("other")).then_some(())
        })
        .await;
    });
}
