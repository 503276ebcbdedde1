//! Metrics of connections, detected protocols, endpoints, and bytes by zone; authority and host labels of request metrics.

use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_tests::apps;
use tulle_tests::client::{Http1, empty, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, mesh};

#[test]
fn connections_are_counted_by_protocol() {
    let mesh = mesh().workload("client").workload("web").unmeshed("gone");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        client.fetch(request("/")).await.unwrap();
        let of_web = r#"parent_name="web""#;
        let protocols = "outbound_tcp_protocol_connections_total";
        mesh.wait_for_metric("client", protocols, &[r#"protocol="detect""#, of_web], 1.0)
            .await;
        let results = "outbound_tcp_detect_http_results_total";
        mesh.wait_for_metric("client", results, &[r#"result="http/1""#, of_web], 1.0)
            .await;

        let mut bytes = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
        bytes.write_all(b"hello").await.unwrap();
        let mut echoed = [0; 5];
        bytes.read_exact(&mut echoed).await.unwrap();
        mesh.wait_for_metric("client", protocols, &[r#"protocol="opaq""#, of_web], 1.0)
            .await;
        let (port, ip) = (
            format!("target_port=\"{OPAQUE}\""),
            mesh.service_addr("web", OPAQUE).ip(),
        );
        let of_route = [of_web, &port, &format!("target_ip=\"{ip}\"")];
        mesh.wait_for_metric("client", "outbound_tcp_route_open_total", &of_route, 1.0)
            .await;
        mesh.wait_for_metric("client", "outbound_tcp_route_close_total", &of_route, 0.0)
            .await;
        drop(bytes);
        let ended = [&of_route[..], &[r#"error="""#]].concat();
        mesh.wait_for_metric("client", "outbound_tcp_route_close_total", &ended, 1.0)
            .await;

        let mut refused = mesh.dial("client", mesh.service_addr("gone", OPAQUE)).await;
        assert_eq!(refused.read(&mut [0]).await.unwrap_or(0), 0);
        let failed = [r#"parent_name="gone""#, r#"error="unexpected""#];
        mesh.wait_for_metric("client", "outbound_tcp_route_close_total", &failed, 1.0)
            .await;

        let mut unmeshed = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        unmeshed.fetch(request("/")).await.unwrap();
        let labels = [r#"result="http/1""#, r#"srv_port="8080""#];
        let found = mesh.metric("web", "inbound_tcp_detect_http_results_total", &labels);
        assert_eq!(found.await, 1.0);
    });
}

#[test]
fn endpoints_and_bytes_are_counted() {
    let mesh = mesh().workload("client").replicas("web", 2);
    mesh.run(async |mesh: &Mesh| {
        for workload in ["web-0", "web-1"] {
            apps::start_echo(mesh, workload).await;
        }
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        client.fetch(request("/")).await.unwrap();
        let of_web = r#"backend_name="web""#;
        let ready = [r#"endpoint_state="ready""#, of_web];
        mesh.wait_for_metric("client", "outbound_http_balancer_endpoints", &ready, 2.0)
            .await;
        mesh.wait_for_metric("client", "outbound_http_balancer_p2c_endpoints", &[of_web], 2.0)
            .await;
        let resets = [r#"op="Reset""#, of_web];
        mesh.wait_for_metric("client", "outbound_http_balancer_p2c_updates_total", &resets, 1.0)
            .await;
        mesh.remove("pod-web-1");
        mesh.wait_for_metric("client", "outbound_http_balancer_endpoints", &ready, 1.0)
            .await;
        let removals = [r#"op="Remove""#, of_web];
        mesh.wait_for_metric("client", "outbound_http_balancer_p2c_updates_total", &removals, 1.0)
            .await;
        for op in ["Send", "Recv"] {
            let labels = [format!("op=\"{op}\""), r#"zone_locality="Unknown""#.to_owned()];
            let labels = [&*labels[0], &*labels[1]];
            let bytes = mesh.metric("client", "outbound_tcp_transfer_cost_bytes_total", &labels);
            assert!(bytes.await > 100.0, "{op}");
        }
        mesh.wait_for_metric("client", "tokio_rt_workers", &[], 1.0).await;
    });
}

/// Sends requests with each of these hosts through the proxy of `client`, with hostname labels set to `env`.
fn run_with_hosts(env: &str, hosts: &[&str], test: impl AsyncFnOnce(&Mesh) + Send) {
    let mesh = mesh().workload("client").env("OUTBOUND_METRICS_HOSTNAME_LABELS", env);
    mesh.workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        for host in hosts {
            let req = Request::get("/").header("host", *host).body(empty()).unwrap();
            client.fetch(req).await.unwrap();
        }
        test(mesh).await;
    });
}

#[test]
fn authority_labels_are_opt_in_and_bounded() {
    let mesh = mesh().workload("client").workload("web");
    let mesh = mesh.workload_env("INBOUND_METRICS_AUTHORITY_LABELS", "unsafe");
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let wait_for_count = async |name: &str, authority: &str, expected: f64| {
            eventually(&format!("{name} {authority} is {expected}"), async || {
                let labels = [r#"direction="inbound""#, authority];
                (mesh.metric("web", name, &labels).await == expected).then_some(())
            })
            .await;
        };
        let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let mut send_request = async |host: &str, canonical: Option<&str>| {
            let mut req = Request::get("/").header("host", host);
            if let Some(canonical) = canonical {
                req = req.header("l5d-dst-canonical", canonical);
            }
            assert_eq!(client.fetch(req.body(empty()).unwrap()).await.unwrap().status, 200);
        };
        for (host, canonical) in [
            ("web.test", None),
            ("WEB.test:80", None),
            ("other.test:8080", Some("forged.test:80")),
            ("10.0.0.1", None),
        ] {
            send_request(host, canonical).await;
        }
        let mut meshed = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let req = Request::get("/").header("host", "web.test");
        let req = req.header("l5d-dst-canonical", "web.shop.svc.cluster.local:8080");
        meshed.fetch(req.body(empty()).unwrap()).await.unwrap();
        for (authority, expected) in [
            (r#"authority="web.test""#, 2.0),
            (r#"authority="other.test:8080""#, 1.0),
            (r#"authority="web.shop.svc.cluster.local:8080""#, 1.0),
            ("authority=", 4.0),
            ("", 5.0),
        ] {
            for name in ["request_total", "response_total", "response_latency_ms_count"] {
                wait_for_count(name, authority, expected).await;
            }
        }
        for n in 0..1000 {
            send_request(&format!("n{n}.test"), None).await;
        }
        // At most 64 authorities of clients without an identity become label values. Two were used before, so 62 of these
        // requests have the label, in addition to the four above.
        wait_for_count("request_total", "authority=", 66.0).await;
        wait_for_count("request_total", "", 1005.0).await;
    });
}

#[test]
fn requests_are_counted_by_host_if_enabled() {
    let hosts = ["web.test", "WEB.test:80", "other.test"];
    run_with_hosts("true", &hosts, async |mesh: &Mesh| {
        let statuses = "outbound_http_route_request_statuses_total";
        mesh.wait_for_metric("client", statuses, &[r#"hostname="web.test""#], 2.0)
            .await;
        mesh.wait_for_metric("client", statuses, &[r#"hostname="other.test""#], 1.0)
            .await;
    });
    run_with_hosts("false", &hosts, async |mesh: &Mesh| {
        let statuses = "outbound_http_route_request_statuses_total";
        mesh.wait_for_metric("client", statuses, &[r#"hostname="""#], 3.0).await;
    });
}
