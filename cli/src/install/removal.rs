//! What of a control plane is in a cluster, for `kubectl delete`: all of it, or what an upgrade left behind.

use std::process::ExitCode;

use anyhow::{anyhow, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use super::charts::{CRDS, Helm};
use super::{Output, existing, keys, overrides, show, values};
use crate::kubernetes::{self, Cluster, reason, resource};
use crate::runtime;

/// What keeps a control plane from being removed.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "  tulle uninstall | kubectl delete -f -")]
pub(crate) struct UninstallArgs {
    /// Go on although there are injected pods or extensions
    #[arg(long)]
    force: bool,
    /// The form of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// How leftovers are shown.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "After an upgrade:\n\n  tulle prune | kubectl delete -f -")]
pub(crate) struct PruneArgs {
    /// The form of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Prints all that belongs to a control plane.
///
/// # Errors
/// Pods and extensions that need it, unless forced.
pub(crate) fn uninstall(args: &UninstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let objects = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        if !args.force {
            ensure_unused(&cluster).await?;
        }
        find(&cluster).await
    })?;
    ensure!(
        !objects.is_empty(),
        "nothing in the cluster belongs to a control plane in namespace {}; name another with -L",
        flags.linkerd_namespace
    );
    crate::print(&show(&objects, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what belongs to a control plane and is in no chart of this version.
///
/// # Errors
/// No installation of this command.
pub(crate) fn prune(args: &PruneArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let (existing, objects) = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        anyhow::Ok((existing::look(&cluster).await?, find(&cluster).await?))
    })?;
    let helm = helm.for_kubernetes(Some(&existing.kubernetes));
    let values = values::merge(&helm, &values::Flags::default(), Some(overrides(&existing, flags)?))?;
    let mut current = super::control_plane(&helm, &values, flags)?;
    current.extend(helm.render(&CRDS, &json!({ "installGatewayAPI": true }))?);
    let current = keys(&current);
    let leftovers = objects
        .into_iter()
        .filter(|object| !current.contains(&super::key(object)) && !is_made_at_run_time(object));
    let leftovers: Vec<_> = leftovers.collect();
    crate::print(&show(&leftovers, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Certificates of webhooks and of telemetry are in no chart: the control plane makes them.
fn is_made_at_run_time(object: &Value) -> bool {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    object["kind"] == "Secret" && name.starts_with("linkerd-") && name.ends_with("-k8s-tls")
}

async fn ensure_unused(cluster: &Cluster) -> anyhow::Result<()> {
    let home = &cluster.control_plane;
    let api: Api<Pod> = Api::all(cluster.client.clone());
    let injected = format!("linkerd.io/control-plane-ns={home},!linkerd.io/control-plane-component");
    let pods = cluster.list(&api, &ListParams::default().labels(&injected)).await;
    let pods = pods.map_err(|error| anyhow!("listing injected pods: {}", reason(&error)))?;
    let names: Vec<_> = pods
        .iter()
        .take(10)
        .map(|pod| format!("{}/{}", resource::namespace(pod), pod.name_any()))
        .collect();
    ensure!(
        pods.is_empty(),
        "{} pods have a proxy of this control plane ({}{}); take `linkerd.io/inject` from their namespaces and workloads and \
         restart them, or use --force",
        pods.len(),
        names.join(", "),
        if pods.len() > names.len() { ", …" } else { "" }
    );
    let api: Api<Namespace> = Api::all(cluster.client.clone());
    let extensions = cluster
        .list(&api, &ListParams::default().labels("linkerd.io/extension"))
        .await;
    let extensions = extensions.map_err(|error| anyhow!("listing namespaces: {}", reason(&error)))?;
    let names: Vec<_> = extensions.iter().map(|namespace| namespace.name_any()).collect();
    ensure!(
        names.is_empty(),
        "extensions are installed in {}; remove them first, or use --force",
        names.join(", ")
    );
    Ok(())
}

/// Everything with the label of this control plane, reduced to what names it.
async fn find(cluster: &Cluster) -> anyhow::Result<Vec<Value>> {
    let home = &cluster.control_plane;
    let labelled = ListParams::default().labels(&format!("linkerd.io/control-plane-ns={home}"));
    let mut objects = Vec::new();
    for (place, group, version, kind) in KINDS {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = match place {
            Place::Anywhere => Api::all_with(cluster.client.clone(), &resource),
            Place::Home => Api::namespaced_with(cluster.client.clone(), home, &resource),
        };
        let found = match cluster.list(&api, &labelled).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Vec::new(),
            found => found.map_err(|error| anyhow!("listing {}: {}", resource.plural, reason(&error)))?,
        };
        for object in found {
            let mut metadata = json!({ "name": object.name_any() });
            if let Some(namespace) = object.namespace() {
                metadata["namespace"] = json!(namespace);
            }
            objects.push(json!({ "apiVersion": resource.api_version, "kind": kind, "metadata": metadata }));
        }
    }
    Ok(objects)
}

#[derive(Clone, Copy)]
enum Place {
    Anywhere,
    /// The namespace of the control plane; labelled pods elsewhere are the user's.
    Home,
}

/// What an installation consists of; what it owns, such as pods, goes with it.
const KINDS: &[(Place, &str, &str, &str)] = &[
    // Kubernetes finishes no deletion of a namespace while an API has nobody who serves it.
    (Place::Anywhere, "apiregistration.k8s.io", "v1", "APIService"),
    (
        Place::Anywhere,
        "admissionregistration.k8s.io",
        "v1",
        "MutatingWebhookConfiguration",
    ),
    (
        Place::Anywhere,
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingWebhookConfiguration",
    ),
    (Place::Home, "apps", "v1", "Deployment"),
    (Place::Home, "batch", "v1", "CronJob"),
    (Place::Home, "policy", "v1", "PodDisruptionBudget"),
    (Place::Home, "", "v1", "Service"),
    (Place::Home, "", "v1", "ConfigMap"),
    (Place::Home, "", "v1", "Secret"),
    (Place::Home, "", "v1", "ServiceAccount"),
    (Place::Home, "monitoring.coreos.com", "v1", "PodMonitor"),
    (Place::Anywhere, "rbac.authorization.k8s.io", "v1", "RoleBinding"),
    (Place::Anywhere, "rbac.authorization.k8s.io", "v1", "Role"),
    (Place::Anywhere, "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding"),
    (Place::Anywhere, "rbac.authorization.k8s.io", "v1", "ClusterRole"),
    (
        Place::Anywhere,
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
    ),
    (Place::Anywhere, "", "v1", "Namespace"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_the_control_plane_made_are_no_leftovers() {
        let object = |kind: &str, name: &str| json!({ "kind": kind, "metadata": { "name": name } });
        assert!(is_made_at_run_time(&object("Secret", "linkerd-proxy-injector-k8s-tls")));
        assert!(!is_made_at_run_time(&object("Secret", "linkerd-identity-issuer")));
        assert!(!is_made_at_run_time(&object(
            "ConfigMap",
            "linkerd-proxy-injector-k8s-tls"
        )));
    }
}
