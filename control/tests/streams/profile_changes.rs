//! Profiles after changes of manifests, and with objects that an API server would refuse.

use tonic::Code;

use crate::harness::{mesh, next};
use crate::profiles::{MESH, PROFILE, WEB, endpoint};

#[tokio::test]
async fn a_stopped_pod_becomes_a_plain_address() {
    let mesh = mesh(MESH).await;
    let mut stream = mesh.get_profile("10.1.0.1:8080", "").await.unwrap();
    assert!(endpoint(&next(&mut stream).await).2);
    mesh.manifests.write(
        "mesh.yaml",
        &MESH.replace("{podIP: 10.1.0.1,", "{phase: Failed, podIP: 10.1.0.1,"),
    );
    assert_eq!(
        endpoint(&next(&mut stream).await),
        ("10.1.0.1:8080".to_owned(), None, false)
    );
    mesh.manifests.write("mesh.yaml", MESH);
    assert!(endpoint(&next(&mut stream).await).2);
}

#[tokio::test]
async fn an_added_or_removed_profile_is_sent_immediately() {
    let mesh = mesh(MESH).await;
    let mut stream = mesh.get_profile(WEB, "").await.unwrap();
    assert!(next(&mut stream).await.routes.is_empty());
    mesh.manifests
        .write("profile.yaml", &PROFILE.replace("NAMESPACE", "shop"));
    assert_eq!(next(&mut stream).await.routes.len(), 1);
    mesh.manifests.remove("profile.yaml");
    assert!(next(&mut stream).await.routes.is_empty());
}

#[tokio::test]
async fn an_address_of_two_services_has_no_profile() {
    let twin = "---\napiVersion: v1\nkind: Service\nmetadata: {name: twin, namespace: shop}\n\
        spec: {clusterIP: 10.247.0.10, ports: [{port: 80}]}\n";
    let mesh = mesh(&format!("{MESH}{twin}")).await;
    let status = mesh.get_profile("10.247.0.10:80", "").await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
}
