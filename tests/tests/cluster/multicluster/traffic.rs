//! Traffic to mirrors, and the metrics of the proxies that carry it.

use anyhow::ensure;
use tokio::time::Instant;
use tulle_bench::load::stats::Report;
use tulle_tests::linked_clusters::{LinkedClusters, responding_clusters, tulle};
use tulle_tests::meshed::{MeshedCluster, assert_all_ok};

/// The identities of the client in `west`, and of the server in each cluster.
pub(super) const CLIENT_ID: &str = "client.shop.serviceaccount.identity.linkerd.cluster.local";
pub(super) const SERVER_ID: &str = "web.shop.serviceaccount.identity.linkerd.east.id";
const SERVER_ID_OF_WEST: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

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

/// Who takes part in the traffic of a mirror or of a federated Service.
pub(super) struct Peers {
    /// The clusters whose servers respond.
    clusters: &'static [&'static str],
    /// The identities that the proxy of the client verifies.
    server_ids: &'static [&'static str],
    /// The identity that the proxies of the servers see.
    client_id: &'static str,
}

pub(super) const THROUGH_GATEWAY: Peers = Peers {
    clusters: &["east"],
    server_ids: &[GATEWAY_ID],
    client_id: GATEWAY_ID,
};
pub(super) const PODS_OF_EAST: Peers = Peers {
    clusters: &["east"],
    server_ids: &[SERVER_ID],
    client_id: CLIENT_ID,
};
pub(super) const PODS_OF_BOTH: Peers = Peers {
    clusters: &["east", "west"],
    server_ids: &[SERVER_ID, SERVER_ID_OF_WEST],
    client_id: CLIENT_ID,
};

/// Sends requests of each protocol, also to a server that speaks first. Checks for each protocol which clusters respond, and that all
/// requests and bytes are between the expected identities.
pub(super) async fn check_protocols(linked: &LinkedClusters, service: &str, peers: &Peers) {
    let mut before = client_metrics(linked).await;
    for (what, target) in HTTP_TARGETS {
        let what = format!("{what} to {service}");
        let report = load(linked, &what, &format!("{service}{target}")).await;
        assert!(
            responding_clusters(&report).iter().eq(peers.clusters),
            "{what}: {report:?}"
        );
        let after = client_metrics(linked).await;
        let requests = growth_by_server(&before, &after, "request_total", peers);
        let all = requests.iter().sum::<f64>() >= f64::from(N_REQUESTS);
        assert!(all && requests.iter().all(|n| *n > 0.), "{what}: {requests:?}");
        before = after;
    }
    let mut before = [before, server_metrics(linked, peers).await];
    for (what, target) in TCP_TARGETS {
        let what = format!("{what} to {service}");
        let report = load(linked, &what, &format!("{service}{target}")).await;
        // Only the server that speaks first says its name.
        if target.contains("--expect-greeting") {
            assert!(
                responding_clusters(&report).iter().eq(peers.clusters),
                "{what}: {report:?}"
            );
        }
        let after = [client_metrics(linked).await, server_metrics(linked, peers).await];
        let n_bytes = f64::from(N_REQUESTS) * TCP_BODY_BYTES;
        let opened = growth_by_server(&before[0], &after[0], "tcp_open_total", peers);
        let sent = growth_by_server(&before[0], &after[0], "tcp_write_bytes_total", peers);
        assert!(opened.iter().all(|n| *n > 0.), "{what}: {opened:?}");
        assert!(sent.iter().sum::<f64>() >= n_bytes, "{what}: {sent:?}");
        let client_id = format!("client_id=\"{}\"", peers.client_id);
        let of_client = ["direction=\"inbound\"", "peer=\"src\"", "tls=\"true\"", &client_id];
        let received = growth(&before[1], &after[1], "tcp_read_bytes_total", &of_client);
        assert!(received >= n_bytes, "{what}: {received} bytes of {client_id}");
        before = after;
    }
}

/// Sends requests, and asserts that none fails.
async fn load(linked: &LinkedClusters, what: &str, target: &str) -> Report {
    let line = format!("{target} --rate=100 --requests={N_REQUESTS}");
    let report = linked.load(&line).await.unwrap();
    assert_all_ok(&report, what);
    report
}

/// The growth of a counter of the client's proxy, for each identity of a server.
fn growth_by_server(before: &str, after: &str, name: &str, peers: &Peers) -> Vec<f64> {
    let by_server = peers.server_ids.iter().map(|server_id| {
        let server_id = format!("server_id=\"{server_id}\"");
        let labels = ["direction=\"outbound\"", "tls=\"true\"", &server_id];
        growth(before, after, name, &labels)
    });
    by_server.collect()
}

/// The growth of a counter, of all series with these labels.
fn growth(before: &str, after: &str, name: &str, labels: &[&str]) -> f64 {
    let sum = |page: &str| -> f64 {
        let series = page
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
        let series = series.filter(|line| labels.iter().all(|label| line.contains(label)));
        series
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    };
    sum(after) - sum(before)
}

async fn client_metrics(linked: &LinkedClusters) -> String {
    tulle(&linked.west, "diagnostics proxy-metrics -n shop deploy/client")
        .await
        .unwrap()
}

/// The metrics of the proxies of the servers in all clusters that respond.
async fn server_metrics(linked: &LinkedClusters, peers: &Peers) -> String {
    let mut pages = String::new();
    for (name, cluster) in [("west", &linked.west), ("east", &linked.east)] {
        if peers.clusters.contains(&name) {
            pages += &tulle(cluster, "diagnostics proxy-metrics -n shop deploy/web")
                .await
                .unwrap();
        }
    }
    pages
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

/// Requests of each protocol.
const N_REQUESTS: u32 = 100;
const HTTP_TARGETS: [(&str, &str); 5] = [
    ("HTTP/1", ":80/"),
    ("HTTP/2", ":80/ --protocol=http2"),
    ("gRPC", ":9090 --protocol=grpc"),
    (
        "gRPC both ways",
        ":9090 --protocol=grpc --grpc-method=bidi --messages=5",
    ),
    ("WebSocket", ":80/ws --protocol=ws --reconnect"),
];
/// A connection for each request, so that the servers of each cluster get some.
const TCP_TARGETS: [(&str, &str); 2] = [
    ("opaque", ":6000 --protocol=tcp --body-size=1000 --reconnect"),
    (
        "a server that speaks first",
        ":5000 --protocol=tcp --expect-greeting=hello --body-size=1000 --reconnect",
    ),
];
const TCP_BODY_BYTES: f64 = 1000.;
