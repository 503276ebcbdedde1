//! `tulle multicluster unlink`: prints the objects that belong to a Link.

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1::{Secret, Service};
use kube::api::{DynamicObject, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::Value;
use tulle_control::kubernetes::remote_credentials::secret_name;
use tulle_core::names::label;

use super::extension::{
    DEFAULT_NAMESPACE, LegacyController, RBAC, find_object, link_resource, links, object_ref, target_cluster,
};
use crate::install::manifests::{Output, format_manifests};
use crate::kubernetes::{self, Cluster, reason};
use crate::runtime;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// The name of the Link
    #[arg(long, value_name = "NAME")]
    cluster_name: String,
    /// The namespace of the Link
    #[arg(long, value_name = "NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    namespace: String,
    /// Print only the controller that `link` has created, so that the chart can manage a new one
    #[arg(long)]
    only_controller: bool,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Prints the objects.
///
/// # Errors
/// Fails if the Link does not exist.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let objects = runtime()?.block_on(async { list_objects(args, &flags.connect().await?).await })?;
    crate::print(&format_manifests(&objects, args.output)?)
}

async fn list_objects(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Value>> {
    let (namespace, name) = (&args.namespace, &args.cluster_name);
    let link_api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, &link_resource());
    let link = link_api.get_opt(name).await;
    let link = link.map_err(|error| anyhow!("reading Link {namespace}/{name}: {}", reason(&error)))?;
    let link = link.with_context(|| {
        format!("there is no Link {namespace}/{name}; `kubectl get links -A` lists all, and --namespace names another namespace")
    })?;
    let target = target_cluster(&link);
    let mut objects = Vec::new();
    let legacy_objects = legacy_controller(name, namespace, &cluster.control_plane_namespace);
    for (api_version, kind, namespace, object) in legacy_objects {
        // `kubectl delete` fails for an object that does not exist.
        objects.extend(find_object(cluster, api_version, kind, namespace, &object).await?);
    }
    if args.only_controller {
        return Ok(objects);
    }
    let secret = link.data["spec"]["clusterCredentialsSecret"].as_str();
    let secret = secret.map_or_else(|| secret_name(name), str::to_owned);
    let link_namespace = Some(&**namespace);
    let lease = format!("service-mirror-write-{name}");
    for (api_version, kind, object) in [
        ("v1", "Secret", &secret),
        (RBAC, "Role", &secret),
        (RBAC, "RoleBinding", &secret),
        ("coordination.k8s.io/v1", "Lease", &lease),
    ] {
        objects.extend(find_object(cluster, api_version, kind, link_namespace, object).await?);
    }
    objects.push(object_ref(
        "multicluster.linkerd.io/v1alpha3",
        "Link",
        link_namespace,
        name,
    ));
    let is_other = |other: &DynamicObject| {
        target_cluster(other) == target
            && (other.name_any(), other.namespace()) != (name.clone(), Some(namespace.clone()))
    };
    if links(cluster).await?.iter().flatten().any(is_other) {
        eprintln!(
            "tulle: another Link also leads to {target}; it needs the mirrors, and the credentials of the destination service, so these are not printed"
        );
        return Ok(objects);
    }

    let (mirrored, cluster_label) = (label::MIRRORED_SERVICE, label::MIRRORED_CLUSTER);
    let mirrors = ListParams::default().labels(&format!("{mirrored}=true,{cluster_label}={target}"));
    let services = cluster
        .list(&Api::<Service>::all(cluster.client.clone()), &mirrors)
        .await;
    let services = services.map_err(|error| anyhow!("listing mirrors: {}", reason(&error)))?;
    objects.extend(
        services
            .iter()
            .map(|service| object_ref("v1", "Service", service.namespace().as_deref(), &service.name_any())),
    );
    let control_plane = &cluster.control_plane_namespace;
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), control_plane);
    let credentials_of_target = ListParams::default().labels(&format!("{}={target}", label::CREDENTIALS_OF_CLUSTER));
    let secrets = cluster.list(&secrets, &credentials_of_target).await;
    let secrets = secrets.map_err(|error| anyhow!("listing Secrets of {control_plane}: {}", reason(&error)))?;
    objects.extend(
        secrets
            .iter()
            .map(|secret| object_ref("v1", "Secret", Some(control_plane), &secret.name_any())),
    );
    for kind in ["Role", "RoleBinding"] {
        objects.extend(find_object(cluster, RBAC, kind, Some(control_plane), &secret_name(&target)).await?);
    }
    Ok(objects)
}

/// The objects of the controller that `link` creates: API version, kind, namespace if the kind has one, and name.
pub(super) fn legacy_controller<'a>(
    link: &str,
    namespace: &'a str,
    control_plane: &'a str,
) -> Vec<(&'static str, &'static str, Option<&'a str>, String)> {
    let names = LegacyController::new(link);
    let (namespace, control_plane) = (Some(namespace), Some(control_plane));
    vec![
        (RBAC, "ClusterRole", None, names.local_access.clone()),
        (RBAC, "ClusterRoleBinding", None, names.local_access),
        (RBAC, "Role", namespace, names.credentials.clone()),
        (RBAC, "RoleBinding", namespace, names.credentials),
        (RBAC, "Role", control_plane, names.destination_credentials.clone()),
        (RBAC, "RoleBinding", control_plane, names.destination_credentials),
        ("v1", "ServiceAccount", namespace, names.service_mirror.clone()),
        ("apps/v1", "Deployment", namespace, names.service_mirror.clone()),
        ("policy/v1", "PodDisruptionBudget", namespace, names.service_mirror),
        ("v1", "Service", namespace, names.probe_service),
    ]
}

pub(super) const EXAMPLES: &str = "\
  tulle multicluster unlink --cluster-name east | kubectl delete -f -

If the value `controllers` of the chart has an entry for the Link, remove it, too. Federated Services lose the members of that cluster after about a minute.";
