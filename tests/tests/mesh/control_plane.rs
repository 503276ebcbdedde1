//! Traffic continues without the control plane, and follows its updates when it runs again.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::{interval, timeout};
use tulle_tests::apps;
use tulle_tests::client::{Http1, Http2, http2_request, request};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::POLICY_ADDR;
use tulle_tests::load::load;
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, mesh};

#[test]
fn traffic_continues_without_the_control_plane_and_follows_updates_after_its_restart() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        for i in 0..2 {
            apps::start_echo(mesh, &format!("web-{i}")).await;
        }
        let dst = mesh.service_addr("web", HTTP);
        assert_eq!(mesh.get("client", dst, "/").await.status, 200);
        let during = async {
            mesh.stop_control().await;
            for _ in 0..50 {
                assert_eq!(mesh.get("client", dst, "/").await.status, 200);
            }
            mesh.remove("pod-web-1");
            mesh.start_control().await;
            let mut client = Http1::handshake(mesh.dial("client", dst).await).await;
            eventually("the change is known", async || {
                for _ in 0..20 {
                    if client.fetch(request("/")).await.unwrap().text() != "web-0\n" {
                        return None;
                    }
                }
                Some(())
            })
            .await;
        };
        load(mesh, "client", dst, 2, during).await.assert_all_ok();
    });
}

#[test]
fn destinations_of_frequent_short_connections_stay_cached() {
    mesh()
        .workload("client")
        .workload("web")
        .env("OUTBOUND_DISCOVERY_IDLE_TIMEOUT", "500ms")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let dst = mesh.service_addr("web", HTTP);
            assert_eq!(mesh.get("client", dst, "/").await.status, 200);
            // Most of the time there is no connection, but pauses are shorter than the idle timeout, also while the control plane
            // shuts down.
            let known_requests = async {
                let mut due = interval(Duration::from_millis(25));
                for _ in 0..80 {
                    due.tick().await;
                    let answer = timeout(Duration::from_secs(1), mesh.get("client", dst, "/")).await;
                    assert_eq!(answer.expect("known destinations need no control plane").status, 200);
                }
            };
            tokio::join!(mesh.stop_control(), known_requests);
        });
}

#[test]
fn destinations_stay_cached_while_the_control_plane_is_down() {
    mesh()
        .workload("client")
        .workload("web")
        .env("OUTBOUND_DISCOVERY_IDLE_TIMEOUT", "1s")
        .env("INBOUND_DISCOVERY_IDLE_TIMEOUT", "1s")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let dst = mesh.service_addr("web", HTTP);
            assert_eq!(mesh.get("client", dst, "/").await.status, 200);
            mesh.stop_control().await;
            // Each pause is longer than the idle timeout of discovery.
            let mut due = interval(Duration::from_millis(1500));
            for _ in 0..3 {
                due.tick().await;
                let answer = timeout(Duration::from_secs(1), mesh.get("client", dst, "/")).await;
                assert_eq!(answer.expect("known destinations need no control plane").status, 200);
            }
        });
}

#[test]
fn a_policy_once_known_outlives_the_control_plane() {
    let deny = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web, namespace: shop}
spec: {podSelector: {}, port: 8080, accessPolicy: deny}
";
    mesh()
        .workload("client")
        .workload("web")
        .manifest("deny", deny)
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let dst = mesh.service_addr("web", HTTP);
            eventually("the policy is known", async || {
                (mesh.get("client", dst, "/").await.status == 403).then_some(())
            })
            .await;
            mesh.stop_control().await;
            for _ in 0..10 {
                assert_eq!(mesh.get("client", dst, "/").await.status, 403);
            }
        });
}

#[test]
fn http_clients_get_an_error_while_the_control_plane_is_connected_but_silent() {
    let mesh = mesh()
        .workload("client")
        .workload_env("POLICY_SVC_ADDR", POLICY_ADDR)
        .workload_env("OUTBOUND_DETECT_TIMEOUT", "300ms")
        .workload("web");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let _silent = TcpListener::bind(POLICY_ADDR).await.unwrap();
        let dst = mesh.service_addr("web", HTTP);
        let mut http1 = Http1::handshake(mesh.dial("client", dst).await).await;
        let mut http2 = Http2::handshake(mesh.dial("client", dst).await).await;
        for answer in [http1.fetch(request("/")).await, http2.fetch(http2_request("/")).await] {
            let answer = answer.unwrap();
            assert_eq!((answer.status.as_u16(), answer.cause()), (503, "discovery-timeout"));
        }
        eventually("the connections are closed", async || {
            (!http1.is_open() && !http2.is_open()).then_some(())
        })
        .await;
        let mut bytes = mesh.dial("client", mesh.service_addr("web", DETECTED_TCP)).await;
        bytes.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        assert!(matches!(bytes.read(&mut [0]).await, Ok(0) | Err(_)));
        let cause = ["direction=\"outbound\"", "cause=\"discovery-timeout\""];
        mesh.wait_for_metric("client", "tulle_failures_total", &cause, 3.).await;
    });
}
