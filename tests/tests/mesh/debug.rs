//! The debug pages of a proxy, which only clients on the same host can read.

use std::net::Ipv4Addr;
use std::time::Duration;

use http::Request;
use serde_json::Value;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tulle_tests::apps;
use tulle_tests::client::{CollectedResponse, Http1, Http2, empty, http2_request, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, identity, mesh};

/// Reads a page of the admin server of `workload` from a source address.
async fn page(mesh: &Mesh, workload: &str, from: Ipv4Addr, path: &str, accept: &str) -> CollectedResponse {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let stream = socket.connect((mesh.ip(workload), 4191).into()).await.unwrap();
    let req = Request::get(path).header("host", "admin").header("accept", accept);
    let mut client = Http1::handshake(stream).await;
    client.fetch(req.body(empty()).unwrap()).await.unwrap()
}

pub(crate) async fn json(mesh: &Mesh, workload: &str, path: &str) -> Value {
    let answer = page(mesh, workload, Ipv4Addr::LOCALHOST, path, "application/json").await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("content-type")),
        (200, "application/json")
    );
    serde_json::from_str(&answer.text()).unwrap()
}

/// Runs a test with a client connection to `web` that stays open after a request.
fn run_with_open_connection(test: impl AsyncFnOnce(&Mesh) + Send) {
    let mesh = mesh().workload("client").workload("web");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        client.fetch(request("/")).await.unwrap();
        test(mesh).await;
        assert!(client.is_open());
    });
}

#[test]
fn destinations_are_shown_with_their_endpoints() {
    run_with_open_connection(async |mesh: &Mesh| {
        let destinations = json(mesh, "client", "/debug/destinations").await;
        let dialled = mesh.service_addr("web", HTTP).to_string();
        let found = destinations
            .as_array()
            .unwrap()
            .iter()
            .find(|shown| shown["address"] == *dialled);
        let found = found.unwrap_or_else(|| panic!("{destinations:#}"));
        assert_eq!(found["protocol"], "detect");
        assert_eq!(found["open_connections"], 1);
        assert_eq!(found["profile"], "web.shop.svc.cluster.local");
        assert!(
            found["policy"].as_str().unwrap().starts_with("Service/web"),
            "{found:#}"
        );
        let endpoint = &found["services"][0]["endpoints"][0];
        assert_eq!(endpoint["address"], format!("{}:{HTTP}", mesh.ip("web")));
        assert_eq!(endpoint["identity"], identity("web"));
        assert_eq!(endpoint["state"], "available");
        assert_eq!(endpoint["open_connections"], 1);
        assert!(endpoint["rtt_ms"].as_f64().unwrap() > 0.0);
    });
}

#[test]
fn policies_connections_and_certificates_are_shown() {
    run_with_open_connection(async |mesh: &Mesh| {
        // Policies are loaded even if no client has dialled the port.
        let policies = eventually("the policies of both ports are known", async || {
            let policies = json(mesh, "web", "/debug/policies").await;
            let is_known = |port: u16| {
                let all = policies.as_array().unwrap();
                all.iter()
                    .any(|shown| shown["port"] == port && shown["source"] == "control plane")
            };
            (is_known(HTTP) && is_known(OPAQUE)).then_some(policies)
        })
        .await;
        let of = |port: u16| {
            let found = policies.as_array().unwrap().iter().find(|shown| shown["port"] == port);
            found.unwrap_or_else(|| panic!("{policies:#}"))
        };
        assert_eq!(of(HTTP)["protocol"], "detect");
        assert_eq!(of(OPAQUE)["protocol"], "opaque");
        assert!(of(HTTP)["authorizations"].as_array().is_some_and(|all| !all.is_empty()));

        let connections = json(mesh, "web", "/debug/connections").await;
        let of_client = connections.as_array().unwrap().iter();
        let of_client = of_client.filter(|shown| shown["client_id"] == identity("client") && shown["peer"] == "src");
        let of_client: Vec<_> = of_client.collect();
        assert_eq!(of_client.len(), 1, "{connections:#}");
        assert_eq!(of_client[0]["open"], 1);
        assert!(of_client[0]["bytes_read"].as_u64().unwrap() > 0);

        let certificates = json(mesh, "web", "/debug/certificates").await;
        assert_eq!(certificates["identity"], identity("web"));
        assert_eq!(certificates["chain"][0]["names"][0], identity("web"));
        let all = ["chain", "trust_anchors"].map(|list| certificates[list].as_array().unwrap());
        let issuer = &certificates["chain"][0]["issuer"];
        assert!(
            all.into_iter().flatten().any(|other| other["subject"] == *issuer),
            "{certificates:#}"
        );
        assert!(certificates["chain"][0]["expires_in_seconds"].as_i64().unwrap() > 0);
        assert_eq!(certificates["trust_anchors"].as_array().unwrap().len(), 1);
    });
}

const DENY: &str = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: closed, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 8080, accessPolicy: deny}
";

#[test]
fn a_blocked_worker_delays_no_pages_policies_or_certificates() {
    let mesh = mesh().workload("web");
    let mesh = mesh
        .env("IDENTITY_MIN_REFRESH", "100ms")
        .env("IDENTITY_MAX_REFRESH", "300ms");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http2::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let mut served = async || {
            timeout(Duration::from_millis(200), client.fetch(http2_request("/")))
                .await
                .ok()
        };
        assert_eq!(served().await.unwrap().unwrap().status, 200);
        let stalled = mesh.stall_workers();
        // The next accepted connection blocks the worker.
        let _unserved = TcpStream::connect((mesh.ip("web"), 4143)).await.unwrap();
        eventually("the worker is blocked", async || served().await.is_none().then_some(())).await;

        mesh.write("closed", DENY);
        let renewed = async || mesh.metric("web", "control_identity_cert_refreshes_total", &[]).await;
        let before = renewed().await;
        eventually("a policy and a certificate have arrived", async || {
            let policies = json(mesh, "web", "/debug/policies").await;
            let closed = policies.to_string().contains("server/closed");
            (closed && renewed().await > before).then_some(())
        })
        .await;
        assert!(served().await.is_none(), "the worker is still blocked");
        drop(stalled);
        let refused = eventually("the worker continues", async || served().await).await;
        assert_eq!(refused.unwrap().status, 403);
    });
}

#[test]
fn a_gateway_knows_the_policy_of_its_inbound_port_before_the_first_connection() {
    let mesh = mesh().workload("web").workload("gate");
    let mesh = mesh.workload_env("INBOUND_GATEWAY_SUFFIXES", "svc.cluster.local.");
    mesh.run(async |mesh: &Mesh| {
        let source = async |workload: &str| {
            let policies = json(mesh, workload, "/debug/policies").await;
            let own = policies.as_array().unwrap().iter().find(|shown| shown["port"] == 4143);
            own.map(|own| own["source"].as_str().unwrap().to_owned())
        };
        eventually("the policy is known", async || {
            (source("gate").await.as_deref() == Some("control plane")).then_some(())
        })
        .await;
        assert_eq!(
            source("web").await,
            None,
            "without a gateway the policy is requested on demand"
        );
    });
}

#[test]
fn pages_are_text_or_json_and_only_for_this_machine() {
    run_with_open_connection(async |mesh: &Mesh| {
        let index = page(mesh, "web", Ipv4Addr::LOCALHOST, "/debug", "*/*").await;
        for path in ["destinations", "policies", "connections", "certificates"] {
            let path = format!("/debug/{path}");
            assert!(index.text().contains(&path), "{}", index.text());
            let text = page(mesh, "web", Ipv4Addr::LOCALHOST, &path, "*/*").await;
            assert_eq!((text.status.as_u16(), text.header("content-type")), (200, "text/plain"));
            assert!(!text.text().contains("PRIVATE"), "{}", text.text());
            let json = page(mesh, "web", Ipv4Addr::LOCALHOST, &format!("{path}?format=json"), "*/*").await;
            assert!(serde_json::from_str::<Value>(&json.text()).is_ok());
            let refused = page(mesh, "web", Ipv4Addr::LOCALHOST, &format!("{path}?format=xml"), "*/*").await;
            assert_eq!(refused.status, 400);
            assert_eq!(page(mesh, "web", UNMESHED_IP, &path, "*/*").await.status, 403);
        }
    });
}
