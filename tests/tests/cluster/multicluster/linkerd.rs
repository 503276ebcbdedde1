//! Links between clusters of which one has Linkerd, or whose multicluster extension is Linkerd's.
//!
//! `TULLE_TEST_LINKERD` names a directory with the program `linkerd` and its images, which this repository does not have.

use anyhow::ensure;
use serde_json::Value;
use tulle_tests::cluster::Connection;
use tulle_tests::linked_clusters::{LinkedClusters, linkerd};
use tulle_tests::linkerd::{Linkerd, LinkerdParts};

use super::lifecycle::delete_objects;
use super::traffic::{
    CLIENT_ID, GATEWAY_ID, PODS_OF_BOTH, PODS_OF_EAST, SERVER_ID, THROUGH_GATEWAY, check_protocols, export,
    proxy_metrics,
};
use super::{NAMESPACE, assert_has_series, label};

/// Linkerd's program, charts and service mirror link clusters with tulle.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_links_clusters_with_tulle() {
    check_link([LinkerdParts::Multicluster; 2]).await;
}

/// The service mirror, destination service and proxies of tulle use a gateway, pods and policies of Linkerd.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn tulle_uses_services_of_a_cluster_with_linkerd() {
    check_link([LinkerdParts::None, LinkerdParts::All]).await;
}

/// The service mirror, destination service and proxies of Linkerd use a gateway, pods and policies of tulle.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_uses_services_of_a_cluster_with_tulle() {
    check_link([LinkerdParts::All, LinkerdParts::None]).await;
}

/// The destination service and proxies of Linkerd use what the service mirror of tulle writes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_uses_mirrors_of_tulle() {
    check_link([LinkerdParts::ControlPlane, LinkerdParts::None]).await;
}

/// Checks each mode of a link, with the identities that both sides see.
async fn check_link(linkerd: [LinkerdParts; 2]) {
    let start = LinkedClusters::start_with_linkerd(Connection::Translated, linkerd, |step| eprintln!("{step}"));
    let linked = start.await.unwrap();
    linked.start_shop().await.unwrap();
    export(&linked, "true", GATEWAY_ID).await;
    check_protocols(&linked, "web-east", &THROUGH_GATEWAY).await;
    let gateway = proxy_metrics(&linked.east, NAMESPACE, "app=linkerd-gateway").await;
    // Gateways of Linkerd count what they forward as outbound responses only.
    assert_has_labels(&gateway, &["direction=\"inbound\"", &label("client_id", CLIENT_ID)]);
    assert_has_series(&gateway, &["direction=\"outbound\"", &label("server_id", SERVER_ID)]);
    eprintln!("through the gateway: right");

    linked.network.set_connection(Connection::Flat).unwrap();
    change_mode_and_replace_client(&linked).await;
    export(&linked, "remote-discovery", SERVER_ID).await;
    check_protocols(&linked, "web-east", &PODS_OF_EAST).await;
    let server = proxy_metrics(&linked.east, "shop", "app=web").await;
    assert_has_series(&server, &["direction=\"inbound\"", &label("client_id", CLIENT_ID)]);
    eprintln!("by addresses of pods: right");

    linked.federate().await.unwrap();
    check_protocols(&linked, "web-federated", &PODS_OF_BOTH).await;
    eprintln!("federated: right");
    commands_of_linkerd_show_the_link_and_remove_it(&linked).await;
    eprintln!("commands of Linkerd: right");
}

/// Checks that Linkerd's commands understand the objects of each cluster, whichever program created them.
async fn commands_of_linkerd_show_the_link_and_remove_it(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    // Fails if a check has an error.
    let report = linkerd(west, "multicluster check -o json --wait 30s").await.unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    let checks = report["categories"][0]["checks"].as_array().unwrap();
    for description in PASSED_CHECKS {
        // The names of the Links follow on further lines.
        let is_described = |check: &&Value| {
            check["description"]
                .as_str()
                .is_some_and(|text| text.lines().next() == Some(description))
        };
        let mut found = checks.iter().filter(is_described);
        let has_passed = found.any(|check| check["result"] == "success");
        assert!(has_passed, "{description}: {report:#}");
    }
    let gateways = linkerd(west, "multicluster gateways").await.unwrap();
    let gateway = gateways.lines().find(|line| line.trim_start().starts_with("east"));
    let gateway: Vec<_> = gateway.unwrap_or_default().split_whitespace().take(3).collect();
    let version = Linkerd::from_env().unwrap().controller_version().await.unwrap();
    // Older versions expect another name of the controller's port, also in Linkerd's newer charts.
    match west.multicluster_program.is_some() || version.as_slice() >= [25, 6, 3].as_slice() {
        true => assert_eq!(gateway, ["east", "True", "1"], "{gateways}"),
        false => assert!(gateway.is_empty(), "{gateways}"),
    }

    let account = linkerd(east, "multicluster allow --service-account-name another-cluster").await;
    east.apply(&account.unwrap()).await.unwrap();
    let can = format!("auth can-i list services -A --as=system:serviceaccount:{NAMESPACE}:another-cluster");
    assert_eq!(east.kubectl(&can).await.unwrap().trim(), "yes");

    let refused = linkerd(west, "multicluster uninstall").await.unwrap_err().to_string();
    assert!(refused.contains("east"), "{refused}");
    let unlinked = linkerd(west, "multicluster unlink --cluster-name east").await.unwrap();
    delete_objects(west, &unlinked).await;
    for left in [
        "links.multicluster.linkerd.io -A",
        "secrets -A -l multicluster.linkerd.io/cluster-name=east",
        "services -A -l mirror.linkerd.io/mirrored-service=true,mirror.linkerd.io/cluster-name=east",
    ] {
        let left = west.kubectl(&format!("get {left} -o name")).await.unwrap();
        assert_eq!(left, "", "after unlink");
    }
    let uninstalled = linkerd(west, "multicluster uninstall").await.unwrap();
    delete_objects(west, &uninstalled).await;
    let kinds = "namespaces,clusterroles,clusterrolebindings,roles,rolebindings,customresourcedefinitions";
    let left = format!("get {kinds} -A -l linkerd.io/extension=multicluster -o name");
    assert_eq!(west.kubectl(&left).await.unwrap(), "", "after uninstall");
}

/// Exports `web` by the addresses of its pods, and then replaces the client: Linkerd's destination service does not tell proxies that
/// already use a mirror that its mode has changed.
async fn change_mode_and_replace_client(linked: &LinkedClusters) {
    let label = "label --overwrite -n shop service web mirror.linkerd.io/exported=remote-discovery";
    linked.east.kubectl(label).await.unwrap();
    let west = &linked.west;
    let has_changed = async || {
        let labels = west
            .kubectl("get service -n shop web-east -o jsonpath={.metadata.labels}")
            .await?;
        ensure!(labels.contains("remote-discovery"), "{labels}");
        Ok(())
    };
    west.cluster
        .wait_until("the mirror has changed", has_changed)
        .await
        .unwrap();
    west.kubectl("delete pods -n shop -l app=client --wait").await.unwrap();
    west.cluster.wait_for_deployment("shop", "client").await.unwrap();
}

#[track_caller]
fn assert_has_labels(metrics: &str, labels: &[&str]) {
    let has = |line: &str| labels.iter().all(|label| line.contains(label));
    assert!(metrics.lines().any(has), "no series with {labels:?}");
}

/// The checks of `linkerd multicluster check` that pass for objects of either program. The version of a Link is known only if Linkerd's
/// program printed it, and that of proxies is compared with a list in the internet; both give a warning.
const PASSED_CHECKS: [&str; 9] = [
    "Link CRD exists",
    "Link resources are valid",
    "remote cluster access credentials are valid",
    "clusters share trust anchors",
    "service mirror controller has required permissions",
    "service mirror controllers are running",
    "extension is managing controllers",
    "probe services able to communicate with all gateway mirrors",
    "all mirror services are part of a Link",
];
