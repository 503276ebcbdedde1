//! The objects that the commands of `tulle multicluster` print.

use serde::Deserialize as _;

use super::*;

/// Checks that a command printed these objects and no others, in any order.
#[track_caller]
pub(super) fn assert_printed<'a>(text: &str, expected: impl IntoIterator<Item = &'a str>) {
    let mut expected: Vec<&str> = expected.into_iter().collect();
    expected.sort_unstable();
    assert_eq!(printed_objects(text), expected);
}

/// Kind, namespace and name of each object, sorted; of a Deployment also the number of replicas.
fn printed_objects(text: &str) -> Vec<String> {
    let describe = |object: Value| {
        let metadata = &object["metadata"];
        let namespace = metadata["namespace"].as_str().map(|namespace| format!("{namespace}/"));
        let replicas = object["spec"]["replicas"]
            .as_u64()
            .map(|replicas| format!(" {replicas}"));
        format!(
            "{} {}{}{}",
            object["kind"].as_str().unwrap(),
            namespace.unwrap_or_default(),
            metadata["name"].as_str().unwrap(),
            replicas.unwrap_or_default()
        )
    };
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    let objects = documents.map(|document| Value::deserialize(document).unwrap());
    let mut lines: Vec<_> = objects.filter(|object| !object.is_null()).map(describe).collect();
    lines.sort_unstable();
    lines
}

/// `install`, besides the Deployments.
pub(super) const INSTALLATION: [&str; 28] = [
    "Namespace linkerd-multicluster",
    "CustomResourceDefinition links.multicluster.linkerd.io",
    // The gateway.
    "ServiceAccount linkerd-multicluster/linkerd-gateway",
    "Service linkerd-multicluster/linkerd-gateway",
    "Server linkerd-multicluster/linkerd-gateway",
    "AuthorizationPolicy linkerd-multicluster/linkerd-gateway",
    "MeshTLSAuthentication linkerd-multicluster/any-meshed",
    "NetworkAuthentication linkerd-multicluster/source-cluster",
    // The local service mirror.
    "ServiceAccount linkerd-multicluster/linkerd-local-service-mirror",
    "ClusterRole linkerd-local-service-mirror-access-local-resources",
    "ClusterRoleBinding linkerd-local-service-mirror-access-local-resources",
    "Role linkerd-multicluster/linkerd-local-service-mirror",
    "RoleBinding linkerd-multicluster/linkerd-local-service-mirror",
    // Admin ports.
    "Server linkerd-multicluster/linkerd-admin",
    "AuthorizationPolicy linkerd-multicluster/linkerd-admin",
    "AuthorizationPolicy linkerd-multicluster/linkerd-admin-telemetry",
    "Server linkerd-multicluster/service-mirror",
    "AuthorizationPolicy linkerd-multicluster/service-mirror",
    "Server linkerd-multicluster/controller",
    "AuthorizationPolicy linkerd-multicluster/controller",
    "Server linkerd-multicluster/local-service-mirror",
    "AuthorizationPolicy linkerd-multicluster/local-service-mirror",
    // The account for other clusters.
    "ServiceAccount linkerd-multicluster/linkerd-service-mirror-remote-access-default",
    "ClusterRole linkerd-service-mirror-remote-access-default",
    "ClusterRoleBinding linkerd-service-mirror-remote-access-default",
    "Secret linkerd-multicluster/linkerd-service-mirror-remote-access-default-token",
    // One replica of each.
    "Deployment linkerd-multicluster/linkerd-gateway 1",
    "Deployment linkerd-multicluster/linkerd-local-service-mirror 1",
];

/// What `--ha` and a controller for the Link `east` add to [`INSTALLATION`], instead of its Deployments.
pub(super) const HIGHLY_AVAILABLE_WITH_CONTROLLER: [&str; 14] = [
    "ServiceAccount linkerd-multicluster/controller-east",
    "Service linkerd-multicluster/probe-east",
    "ClusterRole linkerd-multicluster-controller-access-local-resources",
    "ClusterRoleBinding linkerd-multicluster-controller-access-local-resources-east",
    "Role linkerd-multicluster/controller-read-remote-creds-east",
    "RoleBinding linkerd-multicluster/controller-read-remote-creds-east",
    "Role linkerd/remote-discovery-east",
    "RoleBinding linkerd/remote-discovery-east",
    "PodDisruptionBudget linkerd-multicluster/controller-east",
    "PodDisruptionBudget linkerd-multicluster/linkerd-gateway",
    "PodDisruptionBudget linkerd-multicluster/linkerd-local-service-mirror",
    "Deployment linkerd-multicluster/controller-east 2",
    "Deployment linkerd-multicluster/linkerd-gateway 3",
    "Deployment linkerd-multicluster/linkerd-local-service-mirror 2",
];

/// `allow --service-account-name west`.
pub(super) const ACCOUNT: [&str; 4] = [
    "ServiceAccount linkerd-multicluster/west",
    "ClusterRole west",
    "ClusterRoleBinding west",
    "Secret linkerd-multicluster/west-token",
];

/// The controller of the deprecated command `link`, as `unlink` prints it.
pub(super) const LEGACY_CONTROLLER: [&str; 10] = [
    "ClusterRole linkerd-service-mirror-access-local-resources-east",
    "ClusterRoleBinding linkerd-service-mirror-access-local-resources-east",
    "Role linkerd-multicluster/linkerd-service-mirror-read-remote-creds-east",
    "RoleBinding linkerd-multicluster/linkerd-service-mirror-read-remote-creds-east",
    "Role linkerd/linkerd-service-mirror-remote-discovery-east",
    "RoleBinding linkerd/linkerd-service-mirror-remote-discovery-east",
    "ServiceAccount linkerd-multicluster/linkerd-service-mirror-east",
    "Deployment linkerd-multicluster/linkerd-service-mirror-east",
    "PodDisruptionBudget linkerd-multicluster/linkerd-service-mirror-east",
    "Service linkerd-multicluster/probe-gateway-east",
];

/// What `unlink` prints of a Link besides its controller.
pub(super) const LINK: [&str; 3] = [
    "Link linkerd-multicluster/east",
    "Secret linkerd-multicluster/cluster-credentials-east",
    "Secret linkerd/cluster-credentials-east",
];

/// What `unlink` also prints once the controller has mirrored the Service `web`.
pub(super) const MIRRORED: [&str; 2] = [
    "Lease linkerd-multicluster/service-mirror-write-east",
    "Service shop/web-east",
];
