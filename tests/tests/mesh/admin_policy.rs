//! The admin port is behind the inbound policy of its port; probes are open.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::net::TcpSocket;
use tokio::time::{Instant, timeout};
use tulle_tests::client;
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, Mesh, STRANGER, mesh};
use tulle_tests::policies::{self, Policies};

use crate::invalid_policy::open;

const PERMITTED: Ipv4Addr = Ipv4Addr::new(10, 66, 8, 1);

/// Nobody may use the admin ports of pods but who comes from this address.
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

async fn ask(mesh: &Mesh, from: Ipv4Addr, path: &str) -> u16 {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let stream = socket.connect((mesh.ip("web"), 4191).into()).await.unwrap();
    client::get(stream, path).await.status.as_u16()
}

fn web() -> Builder {
    mesh().workload("web")
}

#[test]
fn the_admin_port_is_judged_by_its_policy_and_probes_are_open() {
    web().manifest("admin", &manifests()).run(async |mesh: &Mesh| {
        for path in ["/metrics", "/env.json", "/proxy-log-level", "/debug", "/shutdown"] {
            assert_eq!(ask(mesh, STRANGER, path).await, 403, "{path}");
        }
        for path in ["/live", "/ready"] {
            assert_eq!(ask(mesh, STRANGER, path).await, 200, "{path}");
        }
        for from in [PERMITTED, Ipv4Addr::LOCALHOST, mesh.ip("web")] {
            assert_eq!(ask(mesh, from, "/metrics").await, 200, "{from}");
        }
        assert_eq!(ask(mesh, PERMITTED, "/debug").await, 403, "for this machine alone");
        let denied = [r#"srv_name="admin""#, r#"srv_port="4191""#];
        assert_eq!(mesh.metric("web", "inbound_http_authz_deny_total", &denied).await, 5.);

        mesh.remove("admin");
        eventually("the default permits scrapes", async || {
            (ask(mesh, STRANGER, "/metrics").await == 200).then_some(())
        })
        .await;
    });
}

#[test]
fn the_admin_port_shows_nothing_to_others_before_its_policy_is_known() {
    let mesh = web().its_env("POLICY_SVC_ADDR", policies::ADDR);
    mesh.run(async |mesh: &Mesh| {
        let asked_at = Instant::now();
        let probed = timeout(Duration::from_secs(1), ask(mesh, STRANGER, "/live")).await;
        assert_eq!(probed, Ok(200), "probes wait for nobody");
        assert_eq!(ask(mesh, STRANGER, "/metrics").await, 503);
        assert!(asked_at.elapsed() >= Duration::from_secs(3), "{:?}", asked_at.elapsed());
        let cause = [r#"cause="policy_unknown""#, r#"direction="inbound""#];
        assert_eq!(mesh.metric("web", "tulle_failures_total", &cause).await, 1.);
        let policies = Policies::serve().await;
        policies.say_of_ports(Ok(open()));
        let scraped = timeout(Duration::from_secs(1), ask(mesh, STRANGER, "/metrics")).await;
        assert_eq!(scraped, Ok(200));
    });
}
