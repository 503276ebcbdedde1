//! Each cluster is linked to the other, and in each one a route splits the requests to `web` evenly between its own pods and the
//! mirror of the other cluster's `web`. Requests loop only for their share, and a loop ends.
//!
//! The route is in the namespace of `web`, so it also applies to the gateway of its cluster: the gateway sends half of the
//! requests from the other cluster back. A gateway refuses a request that has passed it before, because its own identity is in the
//! header `forwarded`. The gateways have different identities, because the clusters have different trust domains. The table has the
//! paths of the requests of a client in `west`, and how many proxies receive each, without the client's own:
//!
//! | Share | Path | Proxies |
//! |---|---|---|
//! | 1/2 | pods of `west` | 1 |
//! | 1/4 | gateway of `east`, pods of `east` | 2 |
//! | 1/8 | gateway of `east`, gateway of `west`, pods of `west` | 3 |
//! | 1/8 | gateway of `east`, gateway of `west`, gateway of `east`, which responds with 508 | 3 |

use std::collections::BTreeMap;

use anyhow::ensure;
use tulle_bench::load::stats::Report;
use tulle_tests::linked_clusters::{CLIENT, CLIENT_MANIFEST, LinkedClusters, NAMESPACE, responding_clusters};
use tulle_tests::meshed::MeshedCluster;

use super::lifecycle::delete_output_of;
use super::traffic::{GATEWAY_ID, proxy_metrics};

/// The cluster of a client, and the other cluster.
struct Sides<'a> {
    own_name: &'a str,
    own: &'a MeshedCluster,
    other: &'a MeshedCluster,
    /// The identity of the gateway of the other cluster.
    other_gateway: &'a str,
}

pub(super) async fn only_their_share_of_requests_loops(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    Box::pin(linked.link_back()).await.unwrap();
    east.apply(CLIENT_MANIFEST).await.unwrap();
    east.cluster.wait_for_deployment("shop", "client").await.unwrap();
    for (cluster, mirror) in [(west, "web-east"), (east, "web-west")] {
        cluster
            .kubectl("label --overwrite -n shop service web mirror.linkerd.io/exported=true")
            .await
            .unwrap();
        cluster.apply(&ROUTE.replace("@mirror", mirror)).await.unwrap();
    }
    let of_west = Sides {
        own_name: "west",
        own: west,
        other: east,
        other_gateway: GATEWAY_ID,
    };
    let of_east = Sides {
        own_name: "east",
        own: east,
        other: west,
        other_gateway: GATEWAY_OF_WEST_ID,
    };
    for sides in [of_west, of_east] {
        wait_until_requests_loop(&sides).await;
        Box::pin(check_shares(&sides)).await;
    }
    clean_up(linked).await;
}

/// Waits until each cluster has one gateway, and the clients and both gateways use the routes: otherwise no request loops.
async fn wait_until_requests_loop(sides: &Sides<'_>) {
    let loops = async || {
        for cluster in [sides.own, sides.other] {
            let gateways = cluster.pods(NAMESPACE, "app=linkerd-gateway").await?;
            ensure!(gateways.len() == 1, "gateways: {gateways:?}");
        }
        let line = format!("{SPLIT} --rate=100 --requests=100");
        let report = sides.own.load(CLIENT, &line).await?;
        ensure!(
            report.failed > 0
                && has_only_loops(&report, sides.other_gateway)
                && responding_clusters(&report).len() == 2,
            "{report:?}"
        );
        Ok(())
    };
    sides.own.cluster.wait_until("requests loop", loops).await.unwrap();
}

/// Sends requests, and compares the proxies that receive them with the table above.
async fn check_shares(sides: &Sides<'_>) {
    let (own, other) = (sides.own, sides.other);
    let (own_before, other_before) = (Counters::read(own).await, Counters::read(other).await);
    let line = format!("{SPLIT} --rate=150 --requests=3000");
    let report = own.load(CLIENT, &line).await.unwrap();
    let (own_after, other_after) = (Counters::read(own).await, Counters::read(other).await);

    let own_growth = own_after.growth_since(&own_before);
    let other_growth = other_after.growth_since(&other_before);
    let received = [
        ("its own pods", own_growth.received_by_servers, 5. / 8.),
        ("the other gateway", other_growth.received_by_gateway, 5. / 8.),
        ("its own gateway", own_growth.received_by_gateway, 1. / 4.),
        ("the other pods", other_growth.received_by_servers, 1. / 4.),
    ];
    let what = format!(
        "{} requests of a client in {}, received by {received:?}: {:?} {:?}",
        report.requests, sides.own_name, report.outcomes, report.errors
    );
    eprintln!("{what}");
    assert!(has_only_loops(&report, sides.other_gateway), "{what}");
    let n_received: u64 = received.iter().map(|(_, n, _)| n).sum();
    assert!(n_received <= MAX_RECEIVED_PER_REQUEST * report.requests, "{what}");
    for (place, n, share) in received.into_iter().chain([("508", report.failed, 1. / 8.)]) {
        let found = n as f64 / report.requests as f64;
        assert!(
            (found - share).abs() < MAX_DIFFERENCE,
            "{place}: {found}, not {share}; {what}"
        );
    }
    // A request of this client arrives at its own gateway only once.
    let loops = (own_growth.loops, other_growth.loops);
    assert_eq!(loops, (0, report.failed), "{what}");
}

/// Whether all failed requests were refused by this gateway because they had passed it before.
fn has_only_loops(report: &Report, gateway: &str) -> bool {
    let hop = format!("; hop={gateway};");
    report
        .errors
        .keys()
        .all(|error| error.starts_with("status 508: gateway-loop;") && error.contains(&hop))
}

/// The counters of the proxies of a cluster, by pod and series.
struct Counters {
    gateway: BTreeMap<String, u64>,
    servers: BTreeMap<String, u64>,
}

/// How much the counters of a cluster have grown.
struct Growth {
    received_by_gateway: u64,
    received_by_servers: u64,
    /// Requests that the gateway has refused because they had passed it before.
    loops: u64,
}

impl Counters {
    async fn read(cluster: &MeshedCluster) -> Self {
        Self {
            gateway: parse_counters(&proxy_metrics(cluster, NAMESPACE, "app=linkerd-gateway").await),
            servers: parse_counters(&proxy_metrics(cluster, "shop", "app=web").await),
        }
    }

    fn growth_since(&self, before: &Self) -> Growth {
        // Only requests of meshed clients have an identity; those of the kubelet have none.
        let received = [" request_total{", "direction=\"inbound\"", ".serviceaccount.identity."];
        let loops = [
            " tulle_failures_total{",
            "direction=\"inbound\"",
            "cause=\"gateway-loop\"",
        ];
        Growth {
            received_by_gateway: sum_growth(&before.gateway, &self.gateway, received),
            received_by_servers: sum_growth(&before.servers, &self.servers, received),
            loops: sum_growth(&before.gateway, &self.gateway, loops),
        }
    }
}

/// The counters of the pages of several pods.
fn parse_counters(pages: &str) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    let mut pod = "";
    for line in pages.lines() {
        if line.starts_with("# POD ") {
            pod = line;
        } else if let Some((series, value)) = line.rsplit_once(' ')
            && let Ok(value) = value.parse::<u64>()
        {
            counters.insert(format!("{pod} {series}"), value);
        }
    }
    counters
}

/// How much the counters whose series contain all these parts have grown together. A series that was idle for long may have been
/// removed in between; it has not grown.
fn sum_growth(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>, parts: [&str; 3]) -> u64 {
    let counted = after
        .iter()
        .filter(|(series, _)| parts.iter().all(|part| series.contains(part)));
    counted
        .map(|(series, value)| value - before.get(series).unwrap_or(&0))
        .sum()
}

/// Removes what the test has created, so that only `west` is linked.
async fn clean_up(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    for cluster in [west, east] {
        cluster
            .kubectl("delete -n shop httproutes.gateway.networking.k8s.io/split")
            .await
            .unwrap();
    }
    west.kubectl("label -n shop service web mirror.linkerd.io/exported-")
        .await
        .unwrap();
    delete_output_of(east, "multicluster unlink --cluster-name west").await;
    let gateway = format!("-n {NAMESPACE} deploy/linkerd-gateway service/linkerd-gateway");
    let controller = format!("{CONTROLLER_KINDS} -A -l {CONTROLLER_LABELS}");
    let probe = format!("-n {NAMESPACE} service/probe-west");
    let client = "-n shop deploy/client serviceaccount/client".to_owned();
    for (cluster, objects) in [(west, gateway), (east, controller), (east, probe), (east, client)] {
        cluster.kubectl(&format!("delete {objects}")).await.unwrap();
    }
}

const SPLIT: &str = "http://web:80/echo --body-size=200";
/// The longest path in the table.
const MAX_RECEIVED_PER_REQUEST: u64 = 3;
/// Maximum difference of a share from the expected one: more than five standard deviations of each of them, with 3000 requests.
const MAX_DIFFERENCE: f64 = 0.05;
/// The identity of the gateway of `west`.
const GATEWAY_OF_WEST_ID: &str = "linkerd-gateway.linkerd-multicluster.serviceaccount.identity.linkerd.cluster.local";
/// The cluster role is also that of the service mirror for all Links.
const CONTROLLER_KINDS: &str = "deployment,serviceaccount,role,rolebinding,clusterrolebinding";
const CONTROLLER_LABELS: &str = "linkerd.io/extension=multicluster,component=controller";
const ROUTE: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: split, namespace: shop}
spec:
  parentRefs: [{group: core, kind: Service, name: web, port: 80}]
  rules:
    - backendRefs:
        - {name: web, port: 80, weight: 1}
        - {name: '@mirror', port: 80, weight: 1}
";
