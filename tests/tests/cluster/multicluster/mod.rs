//! Two clusters: pods of `west` use a Service of `east` through a gateway, by the addresses of pods, and federated.

mod anchors;
mod chaos;
mod exports;
mod grants;
mod ipv6;
mod lifecycle;
mod linkerd;
mod loops;
mod outages;
mod traffic;

use std::env;

use anyhow::ensure;
use tulle_tests::cluster::Connection;
use tulle_tests::linked_clusters::{CLIENT, LinkedClusters, NAMESPACE, tulle};
use tulle_tests::meshed::{Client, MeshedCluster, assert_all_ok};

use self::chaos::load_during;
use self::traffic::{
    CLIENT_ID, GATEWAY_ID, PODS_OF_BOTH, PODS_OF_EAST, SERVER_ID, THROUGH_GATEWAY, check_protocols, export,
    proxy_metrics,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_uses_services_of_another() {
    let linked = LinkedClusters::start(Connection::Translated, |step| eprintln!("{step}")).await;
    let linked = linked.unwrap();
    linked.start_shop().await.unwrap();
    traffic_through_the_gateway_has_both_identities(&linked).await;
    exports::the_gateway_serves_only_exported_services(&linked).await;
    commands_show_the_other_cluster(&linked).await;
    each_pod_of_a_stateful_set_has_a_name(&linked).await;
    ipv6::gateways_with_ipv6_addresses_are_used(&linked).await;
    linked.network.set_connection(Connection::Flat).unwrap();
    traffic_to_pods_has_both_identities(&linked).await;
    pods_permit_identities_of_the_other_cluster(&linked).await;
    linked.federate().await.unwrap();
    check_protocols(&linked, "web-federated", &PODS_OF_BOTH).await;
    chaos::no_request_is_lost(&linked).await;
    grants::permissions_are_those_that_are_used(&linked).await;
    if env::var_os("TULLE_TEST_FULL").is_some() {
        Box::pin(outages::changes_arrive_after_an_outage_of_the_api_servers(&linked)).await;
        Box::pin(outages::local_traffic_continues_without_the_other_cluster(&linked)).await;
        loops::only_their_share_of_requests_loops(&linked).await;
        anchors::another_anchor_loses_no_request(&linked).await;
        lifecycle::a_gateway_with_node_ports_is_used(&linked).await;
        lifecycle::an_unlinked_cluster_leaves_nothing(&linked).await;
    }
}

/// Checks each protocol against a mirror whose endpoint is the gateway of `east`, which is all that `west` can reach.
async fn traffic_through_the_gateway_has_both_identities(linked: &LinkedClusters) {
    export(linked, "true", GATEWAY_ID).await;
    check_protocols(linked, "web-east", &THROUGH_GATEWAY).await;
    let client = proxy_metrics(&linked.west, "shop", "app=client").await;
    let target = [
        "dst_target_cluster=\"east\"",
        "dst_target_service=\"web\"",
        "tls=\"true\"",
    ];
    assert_has_series(&client, &[&target[..], &[&label("server_id", GATEWAY_ID)]].concat());
    let gateway = proxy_metrics(&linked.east, NAMESPACE, "app=linkerd-gateway").await;
    assert_has_series(&gateway, &["direction=\"inbound\"", &label("client_id", CLIENT_ID)]);
    assert_has_series(&gateway, &["direction=\"outbound\"", &label("server_id", SERVER_ID)]);
    let server = proxy_metrics(&linked.east, "shop", "app=web").await;
    assert_has_series(&server, &["direction=\"inbound\"", &label("client_id", GATEWAY_ID)]);
}

async fn commands_show_the_other_cluster(linked: &LinkedClusters) {
    for cluster in [&linked.west, &linked.east] {
        // Fails unless all checks pass.
        tulle(cluster, "multicluster check --proxy --wait 0").await.unwrap();
    }
    let gateways = tulle(&linked.west, "multicluster gateways").await.unwrap();
    let gateway: Vec<_> = gateways.lines().nth(1).unwrap().split_whitespace().take(3).collect();
    assert_eq!(gateway, ["east", "True", "1"], "{gateways}");
    let commands = Box::pin(async {
        let gateway_id = format!(" src_client_id={GATEWAY_ID}");
        assert_tapped(&linked.east, "deploy/web", &[" proxy=in ", " tls=true ", &gateway_id]).await;
        let server_id = format!(" dst_server_id={GATEWAY_ID}");
        let target = [" proxy=out ", " dst_target_cluster=east", " dst_target_service=web"];
        assert_tapped(&linked.west, "deploy/client", &[&target[..], &[&server_id]].concat()).await;
        let edges = tulle(&linked.west, "edges deploy/client -n shop").await?;
        let edge = edges.lines().find(|line| line.contains("svc/web")).unwrap_or_default();
        let edge: Vec<_> = edge.split_whitespace().take(5).collect();
        assert_eq!(edge, ["deploy/client", "svc/web", "shop", "shop", "east"], "{edges}");
        let stat = tulle(&linked.west, "stat svc/web -n shop").await?;
        let row = stat.lines().find(|line| line.contains(" east "));
        let row: Vec<_> = row.unwrap_or_default().split_whitespace().take(4).collect();
        assert_eq!(row, ["web", "east", "-", "100.00%"], "{stat}");
        let edges = tulle(&linked.east, "edges deploy/web -n shop").await?;
        assert!(edges.contains("linkerd-gateway.linkerd-multicluster"), "{edges}");
        for (line, expected) in [
            ("stat deploy/web -n shop", ["web", "2/2", "100.00%"]),
            (
                "stat deploy/linkerd-gateway -n linkerd-multicluster",
                ["linkerd-gateway", "1/1", "100.00%"],
            ),
        ] {
            let stat = tulle(&linked.east, line).await?;
            let row = stat.lines().nth(1).unwrap_or_default().split_whitespace().take(3);
            assert_eq!(row.collect::<Vec<_>>(), expected, "{stat}");
        }
        anyhow::Ok(())
    });
    load_during(
        linked,
        "requests while commands run",
        ECHO_AT_50_PER_SECOND,
        1,
        commands,
    )
    .await;
}

/// Checks that each tapped request of a workload has these texts.
async fn assert_tapped(cluster: &MeshedCluster, workload: &str, texts: &[&str]) {
    // Without the probes of the kubelet.
    let line = format!("tap {workload} -n shop --path /echo -o wide --count 3");
    let events = tulle(cluster, &line).await.unwrap();
    let requests: Vec<&str> = events.lines().filter(|line| line.starts_with("req id=")).collect();
    assert!(requests.len() >= 3, "{events}");
    for request in requests {
        assert!(texts.iter().all(|text| request.contains(text)), "{texts:?}: {request}");
    }
}

/// Checks that the name of a pod of `east` leads to that pod only, through the gateway.
async fn each_pod_of_a_stateful_set_has_a_name(linked: &LinkedClusters) {
    linked.east.apply(STATEFUL_SET).await.unwrap();
    for pod in ["store-0", "store-1"] {
        let line = format!("{pod}.store-east:80/ --rate=100 --requests=100");
        let reaches_the_pod = async || {
            let report = linked.load(&line).await?;
            ensure!(report.failed == 0, "{report:?}");
            let replicas: Vec<_> = report.replicas.keys().collect();
            assert_eq!(replicas, [pod]);
            Ok(())
        };
        let what = format!("{pod}.store-east responds");
        linked.west.cluster.wait_until(&what, reaches_the_pod).await.unwrap();
    }
    linked
        .east
        .kubectl("delete -n shop statefulset/store service/store")
        .await
        .unwrap();
}

/// Checks each protocol against a mirror whose endpoints are the pods of `east`.
async fn traffic_to_pods_has_both_identities(linked: &LinkedClusters) {
    export(linked, "remote-discovery", SERVER_ID).await;
    check_protocols(linked, "web-east", &PODS_OF_EAST).await;
    let client = proxy_metrics(&linked.west, "shop", "app=client").await;
    let target = [
        "dst_target_cluster=\"east\"",
        "dst_deployment=\"web\"",
        "dst_zone_locality=\"remote\"",
    ];
    assert_has_series(&client, &[&target[..], &[&label("server_id", SERVER_ID)]].concat());
    let server = proxy_metrics(&linked.east, "shop", "app=web").await;
    assert_has_series(&server, &["direction=\"inbound\"", &label("client_id", CLIENT_ID)]);
    let commands = Box::pin(async {
        let server_id = format!(" dst_server_id={SERVER_ID}");
        let target = [" proxy=out ", " dst_target_cluster=east", " dst_deployment=web"];
        assert_tapped(&linked.west, "deploy/client", &[&target[..], &[&server_id]].concat()).await;
        anyhow::Ok(())
    });
    load_during(linked, "requests while tap runs", ECHO_AT_50_PER_SECOND, 1, commands).await;
    let endpoints = "diagnostics endpoints web-east.shop.svc.cluster.local:80";
    let endpoints = tulle(&linked.west, endpoints).await.unwrap();
    assert_eq!(endpoints.matches(SERVER_ID).count(), 2, "{endpoints}");
}

/// Checks that a policy in `east` that names the client of `west` permits that client only.
async fn pods_permit_identities_of_the_other_cluster(linked: &LinkedClusters) {
    linked.east.apply(ONLY_CLIENT).await.unwrap();
    let other = Client {
        deployment: "web",
        container: "web",
        ..CLIENT
    };
    let line = "web-east:80/ --rate=20 --requests=20";
    let refused = async || {
        let report = linked.west.load(other, line).await?;
        ensure!(report.outcomes.get("4xx") == Some(&20), "{report:?}");
        Ok(())
    };
    linked
        .west
        .cluster
        .wait_until("other identities are refused", refused)
        .await
        .unwrap();
    assert_all_ok(&linked.load(line).await.unwrap(), "the client that the policy names");
    linked
        .east
        .kubectl("delete -n shop server/web authorizationpolicy/web")
        .await
        .unwrap();
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{value}\"")
}

#[track_caller]
fn assert_has_series(metrics: &str, labels: &[&str]) {
    let has = |line: &str| line.starts_with("response_total{") && labels.iter().all(|label| line.contains(label));
    assert!(metrics.lines().any(has), "no series with {labels:?}");
}

const ECHO_AT_50_PER_SECOND: &str = "web-east:80/echo --rate=50 --body-size=200";
const STATEFUL_SET: &str = include_str!("stateful.yaml");
const ONLY_CLIENT: &str = "
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  port: http
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {name: client-of-west, namespace: shop}
spec: {identities: [client.shop.serviceaccount.identity.linkerd.cluster.local]}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: web, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web}
  requiredAuthenticationRefs:
    - {group: policy.linkerd.io, kind: MeshTLSAuthentication, name: client-of-west}
";
