//! Traffic to mirrors, and the metrics of the proxies that carry it.

use anyhow::ensure;
use tokio::time::Instant;
use tulle_tests::linked_clusters::{LinkedClusters, tulle};
use tulle_tests::meshed::{MeshedCluster, assert_all_ok};

/// The identity of the gateway of `east`.
pub(super) const GATEWAY_ID: &str = "linkerd-gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.id";

/// Exports the Service `web` of `east`, and waits until the client gets responses from servers with this identity.
pub(super) async fn export(linked: &LinkedClusters, how: &str, server_id: &str) {
    let label = format!("label --overwrite -n shop service web mirror.linkerd.io/exported={how}");
    linked.east.kubectl(&label).await.unwrap();
    let begun = Instant::now();
    let server_id = format!("server_id=\"{server_id}\"");
    let responds = async || {
        let report = linked.load("web-east:80/ --rate=20 --requests=20").await?;
        ensure!(report.failed == 0, "{report:?}");
        let metrics = proxy_metrics(&linked.west, "shop", "app=client").await;
        let is_series = |line: &str| line.contains("dst_service=\"web") && line.contains(&server_id);
        ensure!(metrics.lines().any(is_series), "no request to {server_id}");
        Ok(())
    };
    linked
        .west
        .cluster
        .wait_until("the mirror responds", responds)
        .await
        .unwrap();
    eprintln!("exported={how} after {:.1?}", begun.elapsed());
}

/// Sends requests of each protocol, also to a server that speaks first.
pub(super) async fn check_protocols(linked: &LinkedClusters, service: &str) {
    let targets = [
        ("HTTP/1", ":80/"),
        ("HTTP/2", ":80/ --protocol=http2"),
        ("gRPC", ":9090 --protocol=grpc"),
        (
            "gRPC both ways",
            ":9090 --protocol=grpc --grpc-method=bidi --messages=5",
        ),
        ("WebSocket", ":80/ws --protocol=ws"),
        ("opaque", ":6000 --protocol=tcp --body-size=1000"),
        (
            "a server that speaks first",
            ":5000 --protocol=tcp --expect-greeting=hello --body-size=1000",
        ),
    ];
    for (what, target) in targets {
        let line = format!("{service}{target} --rate=100 --requests=100");
        let report = linked.load(&line).await.unwrap();
        assert_all_ok(&report, &format!("{what} to {service}"));
    }
}

/// The metrics of the proxies of all pods that the selector selects.
pub(super) async fn proxy_metrics(cluster: &MeshedCluster, namespace: &str, selector: &str) -> String {
    let mut pages = String::new();
    for pod in cluster.pods(namespace, selector).await.unwrap() {
        // Through a forwarded port, because a policy protects the metrics of gateways.
        let line = format!("diagnostics proxy-metrics -n {namespace} po/{pod}");
        pages += &tulle(cluster, &line).await.unwrap();
    }
    pages
}
