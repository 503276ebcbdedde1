//! Ports whose policy is not known: no client may use them, and a policy that was received once stays in force.

use std::net::SocketAddr;
use std::time::Duration;

use http::Response;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{self, Http1, Http2, full, http2_request, request};
use tulle_tests::mesh::{HTTP, Mesh, UNMESHED_IP, mesh};

/// A port that the pod does not declare, so that its first connection causes the request for its policy.
const UNDECLARED: u16 = 20_000;
/// Another undeclared port, with a Server that denies all clients.
const DENIED: u16 = 20_001;

fn deny() -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: denied, namespace: shop}}
spec: {{podSelector: {{}}, port: {DENIED}, accessPolicy: deny}}
"
    )
}

fn port_addr(mesh: &Mesh, port: u16) -> SocketAddr {
    (mesh.ip("web"), port).into()
}

async fn applications(mesh: &Mesh) -> Vec<App> {
    let mut apps = Vec::new();
    for port in [UNDECLARED, DENIED] {
        let listener = TcpListener::bind(port_addr(mesh, port)).await.unwrap();
        apps.push(apps::serve_http(listener, |_| async { Response::new(full("reached")) }));
    }
    apps
}

async fn status(mesh: &Mesh, port: u16) -> u16 {
    client::get(
        mesh.dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, port))
            .await,
        "/",
    )
    .await
    .status
    .as_u16()
}

async fn wait_for_unknown(mesh: &Mesh, n: f64) {
    let cause = [r#"direction="inbound""#, r#"cause="policy_unknown""#];
    mesh.wait_for_metric("web", "tulle_failures_total", &cause, n).await;
}

#[test]
fn an_unknown_port_is_refused_without_the_control_plane_and_follows_it_when_it_is_back() {
    let mesh = mesh().workload("web").manifest("deny", &deny());
    mesh.run(async |mesh: &Mesh| {
        let _apps = applications(mesh).await;
        mesh.stop_control().await;
        let dialled_at = Instant::now();
        let http1 = async {
            let stream = mesh
                .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, UNDECLARED))
                .await;
            Http1::handshake(stream).await.fetch(request("/")).await.unwrap().status
        };
        let http2 = async {
            let stream = mesh
                .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, UNDECLARED))
                .await;
            Http2::handshake(stream)
                .await
                .fetch(http2_request("/"))
                .await
                .unwrap()
                .status
        };
        let bytes = async |input: &[u8]| {
            let mut stream = mesh
                .dial_inbound_with_orig_dst(UNMESHED_IP, "web", port_addr(mesh, UNDECLARED))
                .await;
            stream.write_all(input).await.unwrap();
            let mut response = Vec::new();
            // The connection may also end with a reset.
            let _ = stream.read_to_end(&mut response).await;
            response
        };
        let (http1, http2, not_http, silence) =
            tokio::join!(http1, http2, bytes(b"not HTTP, and long enough to know\n"), bytes(b""));
        let waited = dialled_at.elapsed();
        assert_eq!((http1.as_u16(), http2.as_u16()), (503, 503));
        assert_eq!((not_http.len(), silence.len()), (0, 0));
        assert!(
            waited >= Duration::from_secs(3) && waited < Duration::from_secs(5),
            "{waited:?}"
        );
        wait_for_unknown(mesh, 4.).await;

        mesh.start_control().await;
        let back_at = Instant::now();
        assert_eq!(status(mesh, UNDECLARED).await, 200);
        assert_eq!(status(mesh, DENIED).await, 403);
        assert!(back_at.elapsed() < Duration::from_secs(1), "{:?}", back_at.elapsed());

        mesh.stop_control().await;
        for _ in 0..5 {
            assert_eq!(status(mesh, UNDECLARED).await, 200);
            assert_eq!(status(mesh, DENIED).await, 403);
        }
        wait_for_unknown(mesh, 4.).await;
    });
}

#[test]
fn a_connection_waits_for_the_first_answer_of_the_control_plane() {
    let mesh = mesh().workload("web").manifest("deny", &deny());
    mesh.run(async |mesh: &Mesh| {
        let _apps = applications(mesh).await;
        mesh.stop_control().await;
        let waiting = [UNDECLARED, DENIED].map(|port| status(mesh, port));
        let statuses = async { futures_util::future::join_all(waiting).await };
        let (statuses, ()) = timeout(Duration::from_secs(3), async {
            tokio::join!(statuses, mesh.start_control())
        })
        .await
        .expect("the connection waits for the policy only");
        assert_eq!(statuses, [200, 403]);
    });
}

#[test]
fn the_proxys_own_default_policy_applies_to_unknown_ports_only_if_enabled() {
    let mesh = mesh()
        .workload("web")
        .workload_env("TULLE_INBOUND_UNKNOWN_POLICY", "default")
        .manifest("deny", &deny());
    mesh.run(async |mesh: &Mesh| {
        let _apps = applications(mesh).await;
        assert_eq!(
            status(mesh, HTTP).await,
            502,
            "the default policy permits the port, and nothing listens there"
        );
        mesh.stop_control().await;
        assert_eq!(status(mesh, UNDECLARED).await, 200);
        wait_for_unknown(mesh, 0.).await;
    });
}
