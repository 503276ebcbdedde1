use serde_json::json;
use tokio::time::advance;

use super::watched::by_name;
use super::*;
use crate::mirror::plan::inputs::LinkAge;

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
        namespace: "multicluster".to_owned(),
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
