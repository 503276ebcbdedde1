//! A gateway with an IPv6 address, beside an IPv4 address and alone.

use anyhow::ensure;
use tulle_tests::linked_clusters::{LinkedClusters, NAMESPACE, responding_clusters, tulle};
use tulle_tests::meshed::assert_all_ok;

use super::traffic::proxy_metrics;

/// The mirror `web-east` gets the addresses of the gateway in both families, and then only the IPv6 address.
pub(super) async fn gateways_with_ipv6_addresses_are_used(linked: &LinkedClusters) {
    let east = &linked.east;
    let gateway = format!("service/linkerd-gateway -n {NAMESPACE}");
    let both_families = r#"{"spec":{"ipFamilyPolicy":"RequireDualStack"}}"#;
    east.kubectl(&format!("patch {gateway} -p {both_families}"))
        .await
        .unwrap();
    let addrs = async || {
        let addrs = format!("get {gateway} -o jsonpath={{.status.loadBalancer.ingress[*].ip}}");
        let addrs = east.kubectl(&addrs).await?;
        let addrs: Vec<String> = addrs.split_whitespace().map(str::to_owned).collect();
        ensure!(addrs.len() == 2, "{addrs:?}");
        Ok(addrs)
    };
    let addrs = east.cluster.wait_until("the gateway has both addresses", addrs);
    let addrs = addrs.await.unwrap();
    linked.link().await.unwrap();
    assert_used(linked, &addrs).await;

    linked.link_by_addresses(&addrs[1]).await.unwrap();
    assert_used(linked, &addrs[1..]).await;
    let gateway = proxy_metrics(&linked.east, NAMESPACE, "app=linkerd-gateway").await;
    let labels = ["response_total{", "direction=\"inbound\"", "target_ip=\"fd23:1:"];
    let is_ipv6 = |line: &str| labels.iter().all(|label| line.contains(label));
    assert!(gateway.lines().any(is_ipv6), "{gateway}");
    linked.link().await.unwrap();
}

/// Waits until the endpoints of `web-east` are these addresses of the gateway, and checks that all of 1,000 requests reach `east`.
pub(super) async fn assert_used(linked: &LinkedClusters, addrs: &[String]) {
    let are_endpoints = async || {
        let endpoints = tulle(&linked.west, "diagnostics endpoints web-east.shop.svc.cluster.local:80").await?;
        let rows = endpoints.lines().skip(1);
        let shown: Vec<_> = rows.filter_map(|row| row.split_whitespace().nth(1)).collect();
        ensure!(shown == addrs, "{endpoints}");
        Ok(())
    };
    let what = format!("{addrs:?} are the endpoints of the mirror");
    linked.west.cluster.wait_until(&what, are_endpoints).await.unwrap();
    let report = linked.load("web-east:80/ --rate=200 --requests=1000").await.unwrap();
    assert_all_ok(&report, &what);
    assert_eq!(
        responding_clusters(&report).into_iter().collect::<Vec<_>>(),
        ["east"],
        "{what}"
    );
}
