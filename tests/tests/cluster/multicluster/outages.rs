//! Minutes without the other cluster, and changes meanwhile. With `TULLE_TEST_FULL=1` only.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::ensure;
use tokio::time::{Instant, sleep_until};
use tulle_tests::cluster::Cut;
use tulle_tests::linked_clusters::{LinkedClusters, NAMESPACE, SERVICE_MIRROR, tulle};
use tulle_tests::meshed::MeshedCluster;

use super::chaos::{GATEWAY, load_during, scale_deployment, wait_for_rollout};

/// Requests that stay in `west`.
const LOCAL: &str = "http://web:80/echo --rate=500 --body-size=200";
const API_SERVER_OUTAGE: Duration = Duration::from_secs(180);
const NETWORK_OUTAGE: Duration = Duration::from_secs(120);
/// Maximum time from the end of an outage until `west` knows all changes. The watches begin again after at most 30 s.
const MAX_CONVERGENCE: Duration = Duration::from_secs(35);
/// Maximum time until a watch reports a change, and a command shows it.
const MAX_CHANGE_DELAY: Duration = Duration::from_secs(5);

/// While the API server of `east` cannot be reached, its pods are replaced, an exported Service is deleted and another one created.
/// No request through the gateway fails, and `west` knows the changes soon after the outage.
///
/// The outage is long enough to end all watches, so they begin anew, with the token that replaced a revoked one before.
pub(super) async fn changes_arrive_after_an_outage_of_the_api_servers(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    east.apply(&exported_service("before")).await.unwrap();
    let has_mirror = async || {
        ensure!(is_mirrored(west, "before").await?, "no mirror");
        Ok(())
    };
    west.cluster
        .wait_until("the Service is mirrored", has_mirror)
        .await
        .unwrap();
    let outage = Box::pin(async {
        linked.network.cut(Cut::ApiServers)?;
        let end = Instant::now() + API_SERVER_OUTAGE;
        east.kubectl("rollout restart -n shop deploy/web").await?;
        wait_for_rollout(east, "shop", "web").await?;
        east.kubectl("delete -n shop service/before").await?;
        east.apply(&exported_service("during")).await?;
        // West still has the addresses of the pods that are gone.
        let avoids_them = async || {
            let report = linked.load("web-federated:80/ --rate=100 --requests=200").await?;
            ensure!(report.failed == 0, "{report:?}");
            Ok(())
        };
        let what = "requests to addresses of other pods only";
        west.cluster.wait_until(what, avoids_them).await?;
        sleep_until(end).await;
        let mirrored = (is_mirrored(west, "before").await?, is_mirrored(west, "during").await?);
        ensure!(mirrored == (true, false), "changes have arrived during the outage");
        linked.network.restore()?;
        let restored_at = Instant::now();
        let has_converged = async || {
            ensure!(!is_mirrored(west, "before").await?, "the mirror of a deleted Service");
            has_current_state(linked, "during").await
        };
        west.cluster.wait_until("the changes arrive", has_converged).await?;
        ensure_soon("the outage", restored_at, MAX_CONVERGENCE)?;

        scale_deployment(east, "shop", "web", 3).await?;
        east.apply(&exported_service("after")).await?;
        let changed_at = Instant::now();
        let has_arrived = async || has_current_state(linked, "after").await;
        west.cluster.wait_until("further changes arrive", has_arrived).await?;
        ensure_soon("further changes", changed_at, MAX_CHANGE_DELAY)?;
        scale_deployment(east, "shop", "web", 2).await
    });
    load_during(linked, "API servers not reachable for 3 min", GATEWAY, 10, outage).await;
    east.kubectl("delete -n shop service/during service/after")
        .await
        .unwrap();
    let are_gone = async || {
        let mirrored = (is_mirrored(west, "during").await?, is_mirrored(west, "after").await?);
        ensure!(mirrored == (false, false), "mirrors of deleted Services");
        Ok(())
    };
    west.cluster.wait_until("the mirrors are gone", are_gone).await.unwrap();
}

/// While nothing of `east` can be reached, the destination service and the service mirror of `west` restart. No request within `west`
/// fails, the mirrors stay, and both clusters are used again after the outage.
pub(super) async fn local_traffic_continues_without_the_other_cluster(linked: &LinkedClusters) {
    let west = &linked.west;
    let before = mirror_uids(west).await.unwrap();
    let outage = Box::pin(async {
        linked.network.cut(Cut::All)?;
        let end = Instant::now() + NETWORK_OUTAGE;
        for (namespace, name) in [("linkerd", "linkerd-destination"), (NAMESPACE, SERVICE_MIRROR)] {
            west.kubectl(&format!("rollout restart -n {namespace} deploy/{name}"))
                .await?;
            wait_for_rollout(west, namespace, name).await?;
        }
        sleep_until(end).await;
        ensure!(mirror_uids(west).await? == before, "mirrors have changed");
        linked.network.restore()?;
        linked.wait_for_both_clusters().await?;
        let responds = async || {
            let report = linked.load("web-east:80/ --rate=20 --requests=20").await?;
            ensure!(report.failed == 0, "{report:?}");
            Ok(())
        };
        west.cluster.wait_until("the mirror responds", responds).await?;
        ensure!(mirror_uids(west).await? == before, "mirrors have changed");
        Ok(())
    });
    load_during(linked, "east not reachable for 2 min", LOCAL, 10, outage).await;
}

/// Checks that `west` has a mirror of this Service, and the addresses of the pods that `web` has in `east`.
async fn has_current_state(linked: &LinkedClusters, service: &str) -> anyhow::Result<()> {
    ensure!(is_mirrored(&linked.west, service).await?, "no mirror of {service}");
    let pods = "get endpoints -n shop web -o jsonpath={.subsets[*].addresses[*].ip}";
    let pods = linked.east.kubectl(pods).await?;
    let pods: BTreeSet<&str> = pods.split_whitespace().collect();
    let endpoints = tulle(
        &linked.west,
        "diagnostics endpoints web-federated.shop.svc.cluster.local:80",
    )
    .await?;
    let of_east = endpoints.lines().filter(|row| row.contains("linkerd.east.id"));
    let known: BTreeSet<&str> = of_east
        .filter_map(|row| row.split_whitespace().find(|field| field.parse::<IpAddr>().is_ok()))
        .collect();
    ensure!(known == pods, "{known:?} instead of {pods:?}");
    Ok(())
}

async fn is_mirrored(west: &MeshedCluster, service: &str) -> anyhow::Result<bool> {
    let get = format!("get service -n shop {service}-east --ignore-not-found -o name");
    Ok(!west.kubectl(&get).await?.is_empty())
}

async fn mirror_uids(west: &MeshedCluster) -> anyhow::Result<String> {
    let uids = "get services -n shop -l mirror.linkerd.io/mirrored-service -o jsonpath={.items[*].metadata.uid}";
    let uids = west.kubectl(uids).await?;
    ensure!(!uids.is_empty(), "no mirrors");
    Ok(uids)
}

/// Prints the time since `since`, and fails if it is longer than `max`.
fn ensure_soon(what: &str, since: Instant, max: Duration) -> anyhow::Result<()> {
    let took = since.elapsed();
    eprintln!("{what}: west has the state of east after {took:.1?}");
    ensure!(took <= max, "{what}: west has the state of east after {took:.1?}");
    Ok(())
}

fn exported_service(name: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop, labels: {{mirror.linkerd.io/exported: 'true'}}}}
spec: {{ports: [{{name: http, port: 80}}]}}
"
    )
}
