//! Objects of the multicluster extension.

use anyhow::anyhow;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use tulle_control::kubernetes::remote_credentials::secret_name;
use tulle_core::names::label;
use tulle_core::names::multicluster::SERVICE_MIRROR;

use crate::kubernetes::{Cluster, reason};

/// Selects the namespace and the cluster-scoped objects of the extension.
pub(super) const EXTENSION_SELECTOR: &str = "linkerd.io/extension in (multicluster, linkerd-multicluster)";
/// Selects the Deployments and pods of service mirrors: the one for all Links, and those of single Links, including those that
/// `link` creates.
pub(super) const CONTROLLER_SELECTOR: &str = "component in (service-mirror, linkerd-service-mirror, controller)";
pub(super) const DEFAULT_NAMESPACE: &str = "linkerd-multicluster";
/// Prefix of the names of probe Services that `link` creates.
pub(super) const PROBE_SERVICE_PREFIX: &str = "probe-gateway-";
/// The type of Secrets with credentials for another cluster.
pub(super) const CREDENTIALS_SECRET_TYPE: &str = "mirror.linkerd.io/remote-kubeconfig";

/// The role that the service mirror and all controllers of the chart share.
pub(super) const LOCAL_ACCESS_OF_CHART: &str = "linkerd-multicluster-controller-access-local-resources";

/// The API version of Roles and their bindings.
pub(super) const RBAC: &str = "rbac.authorization.k8s.io/v1";

/// Names of the objects of a controller that `link` creates. Linkerd uses the same names.
pub(super) struct LegacyController {
    /// The ServiceAccount, Deployment and PodDisruptionBudget.
    pub(super) service_mirror: String,
    /// The permissions for Services and Endpoints of all namespaces.
    pub(super) local_access: String,
    /// The permissions for Links and for the credentials in their namespace.
    pub(super) credentials: String,
    /// The permission of the destination service to read its copy of the credentials. Linkerd has no such Role: its destination
    /// service can read all Secrets of its namespace.
    pub(super) destination_credentials: String,
    pub(super) probe_service: String,
}

impl LegacyController {
    pub(super) fn new(link: &str) -> Self {
        Self {
            service_mirror: format!("linkerd-service-mirror-{link}"),
            local_access: format!("linkerd-service-mirror-access-local-resources-{link}"),
            credentials: format!("linkerd-service-mirror-read-remote-creds-{link}"),
            destination_credentials: format!("linkerd-service-mirror-remote-discovery-{link}"),
            probe_service: format!("{PROBE_SERVICE_PREFIX}{link}"),
        }
    }
}

/// The Links of all namespaces. `None` if the cluster does not have the kind.
///
/// # Errors
/// Fails if they cannot be listed.
pub(super) async fn links(cluster: &Cluster) -> anyhow::Result<Option<Vec<DynamicObject>>> {
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &link_resource());
    match cluster.list(&api, &ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        links => links
            .map(Some)
            .map_err(|error| anyhow!("listing Links: {}", reason(&error))),
    }
}

pub(super) fn link_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("multicluster.linkerd.io", "v1alpha3", "Link"))
}

/// The name of the cluster to which a Link leads.
pub(super) fn target_cluster(link: &DynamicObject) -> String {
    let name = link.data["spec"]["targetClusterName"].as_str();
    name.map_or_else(|| link.name_any(), str::to_owned)
}

/// The namespace in which the extension is installed. `None` if it is not.
///
/// # Errors
/// Fails if namespaces cannot be listed.
pub(super) async fn namespace(cluster: &Cluster) -> anyhow::Result<Option<String>> {
    let api: Api<Namespace> = Api::all(cluster.client.clone());
    let found = cluster
        .list(&api, &ListParams::default().labels(EXTENSION_SELECTOR))
        .await;
    let found = found.map_err(|error| anyhow!("listing namespaces: {}", reason(&error)))?;
    Ok(found.first().map(kube::ResourceExt::name_any))
}

/// The Roles and RoleBindings by which two accounts may read the Secret with the credentials for a linked cluster: the service
/// mirror in the namespace of the Link, and the destination service in that of the control plane. All have the name of the Secret.
pub(super) fn credentials_permissions(cluster: &str, link_namespace: &str, control_plane: &str) -> [Value; 4] {
    let [role, binding] = secret_permissions(cluster, link_namespace, SERVICE_MIRROR);
    let [destination_role, destination_binding] = secret_permissions(cluster, control_plane, "linkerd-destination");
    [role, binding, destination_role, destination_binding]
}

fn secret_permissions(cluster: &str, namespace: &str, account: &str) -> [Value; 2] {
    let name = secret_name(cluster);
    let metadata = json!({
        "name": name, "namespace": namespace, "labels": {label::EXTENSION: "multicluster"},
    });
    let rule =
        json!({"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["list", "watch"]});
    let subject = json!({"kind": "ServiceAccount", "name": account, "namespace": namespace});
    [
        json!({"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": [rule]}),
        json!({
            "apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [subject],
        }),
    ]
}

/// An object with only the fields that `kubectl delete` needs.
pub(super) fn object_ref(api_version: &str, kind: &str, namespace: Option<&str>, name: &str) -> Value {
    let mut metadata = json!({"name": name});
    if let Some(namespace) = namespace {
        metadata["namespace"] = json!(namespace);
    }
    json!({"apiVersion": api_version, "kind": kind, "metadata": metadata})
}

/// Returns the object as [`object_ref`] does, if it exists.
///
/// # Errors
/// Fails if the API server does not tell whether it exists.
pub(super) async fn find_object(
    cluster: &Cluster,
    api_version: &str,
    kind: &str,
    namespace: Option<&str>,
    name: &str,
) -> anyhow::Result<Option<Value>> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let client = cluster.client.clone();
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    let found = api.get_metadata_opt(name).await;
    let found = found.map_err(|error| anyhow!("reading {kind} {name}: {}", reason(&error)))?;
    Ok(found.map(|_| object_ref(api_version, kind, namespace, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_mirror_and_the_destination_service_may_read_the_credentials_for_one_cluster() {
        let objects = credentials_permissions("east", "links", "mesh");
        let rule = json!({
            "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["cluster-credentials-east"],
            "verbs": ["list", "watch"],
        });
        for (pair, (namespace, account)) in objects
            .chunks(2)
            .zip([("links", "linkerd-service-mirror"), ("mesh", "linkerd-destination")])
        {
            let (role, binding) = (&pair[0], &pair[1]);
            assert_eq!(role["rules"], json!([rule]));
            for object in [role, binding] {
                assert_eq!(object["metadata"]["name"], "cluster-credentials-east");
                assert_eq!(object["metadata"]["namespace"], namespace);
            }
            assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
            let subject = json!({"kind": "ServiceAccount", "name": account, "namespace": namespace});
            assert_eq!(binding["subjects"], json!([subject]));
        }
    }
}
