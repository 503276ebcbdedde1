//! Requests to the admin port are subject to its inbound policy, except probes.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::net::TcpSocket;
use tokio::time::{Instant, timeout};
use tulle_tests::client;
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{Builder, Mesh, UNMESHED_IP, mesh};

use crate::invalid_policy::allow_all_server;

const PERMITTED: Ipv4Addr = Ipv4Addr::new(10, 66, 8, 1);

/// Only clients from this address may use the admin ports of pods.
fn manifests() -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: admin, namespace: shop}}
spec: {{podSelector: {{}}, port: 4191, proxyProtocol: HTTP/1, accessPolicy: deny}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: scrapes, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: admin}}
  requiredAuthenticationRefs: [{{group: policy.linkerd.io, kind: NetworkAuthentication, name: scrapes}}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: scrapes, namespace: shop}}
spec: {{networks: [{{cidr: {PERMITTED}/32}}]}}
"
    )
}

async fn request_status(mesh: &Mesh, from: Ipv4Addr, path: &str) -> u16 {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let stream = socket.connect((mesh.ip("web"), 4191).into()).await.unwrap();
    client::get(stream, path).await.status.as_u16()
}

fn web() -> Builder {
    mesh().workload("web")
}

#[test]
fn the_policy_of_the_admin_port_applies_except_to_probes() {
    web().manifest("admin", &manifests()).run(async |mesh: &Mesh| {
        for path in ["/metrics", "/env.json", "/proxy-log-level", "/debug", "/shutdown"] {
            assert_eq!(request_status(mesh, UNMESHED_IP, path).await, 403, "{path}");
        }
        for path in ["/live", "/ready"] {
            assert_eq!(request_status(mesh, UNMESHED_IP, path).await, 200, "{path}");
        }
        for from in [PERMITTED, Ipv4Addr::LOCALHOST, mesh.ip("web")] {
            assert_eq!(request_status(mesh, from, "/metrics").await, 200, "{from}");
        }
        assert_eq!(
            request_status(mesh, PERMITTED, "/debug").await,
            403,
            "only clients on this host may read this page"
        );
        let denied = [r#"srv_name="admin""#, r#"srv_port="4191""#];
        mesh.wait_for_metric("web", "inbound_http_authz_deny_total", &denied, 5.)
            .await;

        mesh.remove("admin");
        eventually("the default permits scrapes", async || {
            (request_status(mesh, UNMESHED_IP, "/metrics").await == 200).then_some(())
        })
        .await;
    });
}

#[test]
fn before_its_policy_is_known_the_admin_port_answers_only_probes() {
    let mesh = web().workload_env("POLICY_SVC_ADDR", POLICY_ADDR);
    mesh.run(async |mesh: &Mesh| {
        let asked_at = Instant::now();
        let probed = timeout(Duration::from_secs(1), request_status(mesh, UNMESHED_IP, "/live")).await;
        assert_eq!(probed, Ok(200), "probes do not wait for the policy");
        assert_eq!(request_status(mesh, UNMESHED_IP, "/metrics").await, 503);
        assert!(asked_at.elapsed() >= Duration::from_secs(3), "{:?}", asked_at.elapsed());
        let cause = [r#"cause="policy_unknown""#, r#"direction="inbound""#];
        mesh.wait_for_metric("web", "tulle_failures_total", &cause, 1.).await;
        let policies = FakePolicyService::serve().await;
        policies.set_port_policy(Ok(allow_all_server()));
        let scraped = timeout(Duration::from_secs(1), request_status(mesh, UNMESHED_IP, "/metrics")).await;
        assert_eq!(scraped, Ok(200));
    });
}
