//! Metrics of both sidecars for the same requests and connections.

use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_tests::apps;
use tulle_tests::client::{Http1, full};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, OPAQUE, UNMESHED_IP, mesh};

/// A route of the client and a route of the server, for the same requests.
const ROUTES: &str = "\
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: out, namespace: shop}
spec:
  parentRefs: [{group: core, kind: Service, name: web, port: 8080}]
  rules: [{backendRefs: [{name: web, port: 8080}]}]
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web-http, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 8080, accessPolicy: all-unauthenticated}
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: in, namespace: shop}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: Server, name: web-http}]
  rules: [{matches: [{path: {type: PathPrefix, value: /}}]}]
";

#[test]
fn requests_are_counted_by_their_routes_on_both_sides_and_by_their_backends() {
    let mesh = mesh().workload("client").workload("web").manifest("routes", ROUTES);
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let route = ["route_name=\"in\"", "parent_name=\"web-http\"", "parent_port=\"8080\""];
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let mut send_request = async || {
            let req = Request::post("/echo").header("host", "web.test").body(full("hello"));
            assert_eq!(client.fetch(req.unwrap()).await.unwrap().text(), "hello");
        };
        eventually("the routes are known", async || {
            send_request().await;
            (mesh.metric("web", "inbound_http_requests_total", &route).await >= 1.).then_some(())
        })
        .await;
        let n = mesh.metric("web", "inbound_http_requests_total", &route).await + 5.;
        for _ in 0..5 {
            send_request().await;
        }
        for (name, label) in [
            ("inbound_http_requests_total", ""),
            ("inbound_http_statuses_total", "status=\"200\""),
            ("inbound_http_request_duration_seconds_count", ""),
            ("inbound_http_response_duration_seconds_count", ""),
            ("inbound_http_request_frame_size_bytes_sum", ""),
            ("inbound_http_response_frame_size_bytes_sum", ""),
        ] {
            let labels = [&route[..], &[label]].concat();
            let per_request = if name.ends_with("_sum") { 5. } else { 1. }; // the bytes of `hello`, or one request
            mesh.wait_for_metric("web", name, &labels, n * per_request).await;
        }
        let route = ["parent_name=\"web\"", "route_name=\"out\"", "route_namespace=\"shop\""];
        let backend = [
            "backend_kind=\"Service\"",
            "backend_name=\"web\"",
            "backend_port=\"8080\"",
        ];
        let n = mesh
            .metric("client", "outbound_http_route_backend_requests_total", &route)
            .await;
        assert!(n >= 5., "{n}");
        for (name, label) in [
            ("request_duration_seconds_count", ""),
            ("request_statuses_total", "http_status=\"200\""),
            ("request_statuses_total", "error=\"\""),
        ] {
            let labels = [&route[..], &[label]].concat();
            mesh.wait_for_metric("client", &format!("outbound_http_route_{name}"), &labels, n)
                .await;
        }
        for (name, label) in [
            ("requests_total", ""),
            ("response_duration_seconds_count", ""),
            ("response_statuses_total", "http_status=\"200\""),
            ("response_statuses_total", "error=\"\""),
        ] {
            let labels = [&route[..], &backend, &[label]].concat();
            mesh.wait_for_metric("client", &format!("outbound_http_route_backend_{name}"), &labels, n)
                .await;
        }
        let page = [mesh.metrics("client").await, mesh.metrics("web").await].concat();
        for info in ["proxy_build_info{", "rustls_info{"] {
            assert_eq!(page.matches(&format!("\n{info}")).count(), 2, "{info}");
        }
    });
}

#[test]
fn connections_and_their_bytes_are_counted_on_both_sides() {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut stream = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
        stream.write_all(&[b'x'; 1000]).await.unwrap();
        stream.read_exact(&mut [0; 1000]).await.unwrap();
        let mut unmeshed = mesh.dial_inbound(UNMESHED_IP, "web", DETECTED_TCP).await;
        unmeshed.write_all(&[b'x'; 1000]).await.unwrap();
        unmeshed.read_exact(&mut [0; 1000]).await.unwrap();
        let plain = [
            "target_port=\"9000\"",
            "peer=\"src\"",
            "no_tls_reason=\"no_tls_from_remote\"",
        ];
        for name in ["tcp_read_bytes_total", "tcp_write_bytes_total"] {
            mesh.wait_for_metric("web", name, &plain, 1000.).await;
        }
        let port = "target_port=\"3306\"";
        for (workload, direction) in [("client", "direction=\"outbound\""), ("web", "direction=\"inbound\"")] {
            for peer in ["peer=\"src\"", "peer=\"dst\""] {
                let labels = [port, direction, peer];
                for name in ["tcp_open_total", "tcp_open_connections"] {
                    mesh.wait_for_metric(workload, name, &labels, 1.).await;
                }
                for name in ["tcp_read_bytes_total", "tcp_write_bytes_total"] {
                    let n = mesh.metric(workload, name, &labels).await;
                    assert!((1000. ..1100.).contains(&n), "{workload} {name} {peer}: {n}");
                }
            }
        }
        drop(stream);
        for (workload, direction) in [("client", "direction=\"outbound\""), ("web", "direction=\"inbound\"")] {
            for peer in ["peer=\"src\"", "peer=\"dst\""] {
                mesh.wait_for_metric(workload, "tcp_open_connections", &[port, direction, peer], 0.)
                    .await;
                mesh.wait_for_metric(workload, "tcp_close_total", &[port, direction, peer], 1.)
                    .await;
            }
        }
    });
}
