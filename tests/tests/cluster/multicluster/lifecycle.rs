//! Other ways to link clusters, and the end of a link. With `TULLE_TEST_FULL=1` only, because the members of a cluster leave federated
//! Services only a minute after its Link is deleted.

use anyhow::ensure;
use serde_json::Value;
use tulle_tests::images::Image;
use tulle_tests::linked_clusters::{LinkedClusters, NAMESPACE, tulle};
use tulle_tests::meshed::MeshedCluster;

use super::chaos::an_absent_gateway_is_reported;
use super::ipv6::assert_used;
use super::traffic::{GATEWAY_ID, THROUGH_GATEWAY, check_protocols, export};

/// A gateway whose Service has node ports instead of a load balancer is used and checked as any other.
pub(super) async fn a_gateway_with_node_ports_is_used(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    let pause = Image::Pause.reference();
    let install = format!("multicluster install --gateway-service-type NodePort --set gateway.pauseImage={pause}");
    east.apply(&tulle(east, &install).await.unwrap()).await.unwrap();
    let addr = east.cluster.nodes()[0].addr().to_string();
    linked.link_by_addresses(&addr).await.unwrap();
    let port = west
        .kubectl("get link -n linkerd-multicluster east -o jsonpath={.spec.gatewayPort}")
        .await
        .unwrap();
    assert_ne!(port, "4143");
    export(linked, "true", GATEWAY_ID).await;
    check_protocols(linked, "web-east", &THROUGH_GATEWAY).await;
    assert_used(linked, &[addr]).await;
    let is_checked = async || tulle(west, "multicluster check --wait 0").await.map(drop);
    west.cluster.wait_until("all checks pass", is_checked).await.unwrap();
    an_absent_gateway_is_reported(linked).await;
}

/// After `unlink` and `uninstall`, nothing of the other cluster is left, and the other cluster is as before.
pub(super) async fn an_unlinked_cluster_leaves_nothing(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    let before = objects_of_users(east).await;
    delete_output_of(west, "multicluster unlink --cluster-name east").await;
    let members = "get service -n shop web-federated -o jsonpath={.metadata.annotations}";
    let has_left = async || {
        let annotations = west.kubectl(members).await?;
        ensure!(!annotations.contains("web@east"), "{annotations}");
        Ok(())
    };
    west.cluster
        .wait_until("east has left the federated Service", has_left)
        .await
        .unwrap();
    delete_output_of(west, "multicluster uninstall").await;
    // Kubernetes deletes EndpointSlices some time after their Endpoints.
    let is_clean = async || nothing_is_left(west).await;
    west.cluster
        .wait_until("nothing of the other cluster is left", is_clean)
        .await
        .unwrap();
    assert_eq!(objects_of_users(east).await, before);
    east.cluster
        .wait_for_deployment(NAMESPACE, "linkerd-gateway")
        .await
        .unwrap();
}

/// The objects of the application and of the extension, without what Kubernetes changes by itself: statuses, versions, and objects of
/// other kinds, such as pods.
async fn objects_of_users(cluster: &MeshedCluster) -> Vec<Value> {
    let mut objects = Vec::new();
    for namespace in ["shop", NAMESPACE] {
        let get = format!("get {KINDS_OF_USERS} -n {namespace} -o json");
        let mut list: Value = serde_json::from_str(&cluster.kubectl(&get).await.unwrap()).unwrap();
        for object in list["items"].as_array_mut().unwrap() {
            object.as_object_mut().unwrap().remove("status");
            object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
            objects.push(object.take());
        }
    }
    let has = |kind: &str, name: &str| {
        let mut found = objects.iter();
        found.any(|object| object["kind"] == kind && object["metadata"]["name"] == name)
    };
    assert!(
        has("Service", "web") && has("Deployment", "linkerd-gateway"),
        "{objects:?}"
    );
    objects
}

const KINDS_OF_USERS: &str = "services,deployments,statefulsets,configmaps,secrets,serviceaccounts,roles,rolebindings,\
                              servers.policy.linkerd.io,authorizationpolicies.policy.linkerd.io,\
                              meshtlsauthentications.policy.linkerd.io,networkauthentications.policy.linkerd.io";

/// Fails if an object of any kind belongs to a linked cluster, or if there are credentials of one.
async fn nothing_is_left(cluster: &MeshedCluster) -> anyhow::Result<()> {
    let kinds = cluster.kubectl("api-resources --verbs=list -o name").await?;
    let without_labels = ["componentstatuses", "telemetry.tulle.dev"];
    let kinds: Vec<&str> = kinds
        .lines()
        .filter(|kind| !without_labels.iter().any(|other| kind.contains(other)))
        .collect();
    for (kinds, label) in [
        (&*kinds.join(","), "mirror.linkerd.io/cluster-name"),
        ("services,endpoints", "mirror.linkerd.io/mirrored-service"),
        ("secrets", "multicluster.linkerd.io/cluster-name"),
    ] {
        let left = cluster.kubectl(&format!("get {kinds} -A -l {label} -o name")).await?;
        ensure!(left.is_empty(), "with the label {label}: {left}");
    }
    Ok(())
}

/// Deletes the objects that a command prints.
pub(super) async fn delete_output_of(cluster: &MeshedCluster, line: &str) {
    delete_objects(cluster, &tulle(cluster, line).await.unwrap()).await;
}

pub(super) async fn delete_objects(cluster: &MeshedCluster, manifests: &str) {
    let file = cluster.file("deleted.yaml");
    std::fs::write(&file, manifests).unwrap();
    let delete = format!("delete --ignore-not-found -f {}", file.display());
    cluster.kubectl(&delete).await.unwrap();
}
