//! The objects that the commands of `tulle multicluster` print.

use serde::Deserialize as _;

use super::*;

/// Checks that a command printed these objects and no others, in any order.
#[track_caller]
pub(super) fn assert_printed<'a>(text: &str, expected: impl IntoIterator<Item = &'a str>) {
    let mut expected: Vec<&str> = expected.into_iter().collect();
    expected.sort_unstable();
    let mut printed = printed_objects(text);
    printed.sort_unstable();
    assert_eq!(printed, expected);
}

/// Kind, namespace and name of each object, in the order in which they are printed.
pub(super) fn printed_objects(text: &str) -> Vec<String> {
    let describe = |object: Value| {
        let metadata = &object["metadata"];
        let namespace = metadata["namespace"].as_str().map(|namespace| format!("{namespace}/"));
        format!(
            "{} {}{}",
            object["kind"].as_str().unwrap(),
            namespace.unwrap_or_default(),
            metadata["name"].as_str().unwrap()
        )
    };
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    let objects = documents.map(|document| Value::deserialize(document).unwrap());
    objects.filter(|object| !object.is_null()).map(describe).collect()
}

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
pub(super) const LINK: [&str; 7] = [
    "Link linkerd-multicluster/east",
    "Secret linkerd-multicluster/cluster-credentials-east",
    "Role linkerd-multicluster/cluster-credentials-east",
    "RoleBinding linkerd-multicluster/cluster-credentials-east",
    "Secret linkerd/cluster-credentials-east",
    "Role linkerd/cluster-credentials-east",
    "RoleBinding linkerd/cluster-credentials-east",
];

/// What `unlink` also prints once the controller has mirrored the Service `web`.
pub(super) const MIRRORED: [&str; 2] = [
    "Lease linkerd-multicluster/service-mirror-write-east",
    "Service shop/web-east",
];

/// What `uninstall` prints of an installation with a controller for the Link `east`, in the order of deletion. The other objects are
/// deleted with their namespace.
pub(super) const UNINSTALLATION: [&str; 18] = [
    "Service shop/web-federated",
    "RoleBinding linkerd-multicluster/controller-read-remote-creds-east",
    "RoleBinding linkerd-multicluster/linkerd-local-service-mirror",
    "RoleBinding linkerd-multicluster/linkerd-service-mirror",
    "RoleBinding linkerd/remote-discovery-east",
    "Role linkerd-multicluster/controller-read-remote-creds-east",
    "Role linkerd-multicluster/linkerd-local-service-mirror",
    "Role linkerd-multicluster/linkerd-service-mirror",
    "Role linkerd/remote-discovery-east",
    "ClusterRoleBinding linkerd-local-service-mirror-access-local-resources",
    "ClusterRoleBinding linkerd-multicluster-controller-access-local-resources-east",
    "ClusterRoleBinding linkerd-service-mirror-access-local-resources",
    "ClusterRoleBinding linkerd-service-mirror-remote-access-default",
    "ClusterRole linkerd-local-service-mirror-access-local-resources",
    "ClusterRole linkerd-multicluster-controller-access-local-resources",
    "ClusterRole linkerd-service-mirror-remote-access-default",
    "CustomResourceDefinition links.multicluster.linkerd.io",
    "Namespace linkerd-multicluster",
];
