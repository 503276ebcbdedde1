use serde_json::json;
use tokio::time::advance;

use super::*;

#[tokio::test(start_paused = true)]
async fn a_cluster_is_unlinked_when_it_has_had_no_link_for_a_minute() {
    let federated = json!({"metadata": {
        "name": "web-federated", "namespace": "shop", "labels": {"mirror.linkerd.io/mirrored-service": "true"},
        "annotations": {"multicluster.linkerd.io/remote-discovery": "web@east"},
    }});
    let federated: Service = serde_json::from_value(federated).unwrap();
    let mut local = LocalCluster {
        services: by_name(vec![Arc::new(federated)]).collect(),
        ..LocalCluster::default()
    };
    let link = LinkAge {
        created_at: None,
        name: "to-east".to_owned(),
        cluster: "east".to_owned(),
    };
    let none = BTreeSet::new();
    let mut state = PlanState::default();
    assert_eq!(state.unlinked_clusters(&local), none);
    advance(Duration::from_secs(59)).await;
    assert_eq!(state.unlinked_clusters(&local), none);
    // The Link is created again, and deleted later.
    local.links.push(link);
    assert_eq!(state.unlinked_clusters(&local), none);
    local.links.clear();
    assert_eq!(state.unlinked_clusters(&local), none);
    advance(Duration::from_secs(59)).await;
    assert_eq!(state.unlinked_clusters(&local), none);
    advance(Duration::from_secs(1)).await;
    assert_eq!(state.unlinked_clusters(&local), BTreeSet::from(["east".to_owned()]));
}

#[test]
fn probes_are_sent_to_the_port_of_the_probe_service_and_not_to_that_of_the_gateway() {
    let target = |ports: serde_json::Value| {
        let service = json!({
            "metadata": {"name": "probe-east", "namespace": "multicluster"},
            "spec": {"clusterIP": "10.9.0.7", "ports": ports},
        });
        let target = probe_target(&serde_json::from_value(service).unwrap());
        target.map(|target| (target.host, target.ip.to_string(), target.port))
    };
    let ports = json!([{"name": "other", "port": 4143}, {"name": "mc-probe", "port": 4191}]);
    let expected = ("probe-east.multicluster".to_owned(), "10.9.0.7".to_owned(), 4191);
    assert_eq!(target(ports), Some(expected));
    assert_eq!(target(json!([{"name": "other", "port": 4143}])), None);
}
