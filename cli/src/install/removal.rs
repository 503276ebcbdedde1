//! Lists the objects of a control plane for `kubectl delete`: all objects, or those that an upgrade left behind.

use std::process::ExitCode;

use anyhow::{anyhow, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use tulle_core::names::label::{CONTROL_PLANE_COMPONENT, CONTROL_PLANE_NS, EXTENSION};

use super::charts::{CRDS, Helm};
use super::manifests::{Output, control_plane, format_manifests, object_key, object_keys, recorded_overrides};
use super::{existing, values};
use crate::kubernetes::{self, Cluster, reason, resource};
use crate::runtime;

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "  tulle uninstall | kubectl delete -f -")]
pub(crate) struct UninstallArgs {
    /// Continue although injected pods or extensions exist
    #[arg(long)]
    force: bool,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "After an upgrade:\n\n  tulle prune | kubectl delete -f -")]
pub(crate) struct PruneArgs {
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Prints all objects of a control plane.
///
/// # Errors
/// Fails if pods or extensions still need the control plane, unless forced.
pub(crate) fn uninstall(args: &UninstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let objects = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        if !args.force {
            ensure_unused(&cluster).await?;
        }
        list_labelled_objects(&cluster).await
    })?;
    ensure!(
        !objects.is_empty(),
        "no objects of a control plane in namespace {} found; select another namespace with -L",
        flags.linkerd_namespace
    );
    crate::print(&format_manifests(&objects, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the objects of a control plane that the charts of this version do not render with the recorded values, except
/// credentials.
///
/// # Errors
/// Fails if `tulle install` did not install the control plane.
pub(crate) fn prune(args: &PruneArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let (existing, objects) = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        anyhow::Ok((
            existing::read_cluster(&cluster).await?,
            list_labelled_objects(&cluster).await?,
        ))
    })?;
    let helm = helm.with_kubernetes_version(Some(&existing.kubernetes_version));
    let values = values::merge(
        &helm,
        &values::Flags::default(),
        Some(recorded_overrides(&existing, flags)?),
    )?;
    let mut current = control_plane(&helm, &values, flags)?;
    // The CustomResourceDefinitions of this version are included, with the optional ones of the Gateway API, so that `prune` lists
    // only those of older versions.
    current.extend(helm.render(&CRDS, &json!({ "installGatewayAPI": true }))?);
    let current = object_keys(&current);
    let leftovers = objects
        .into_iter()
        .filter(|object| !current.contains(&object_key(object)) && !is_credential(object));
    let leftovers: Vec<_> = leftovers.collect();
    crate::print(&format_manifests(&leftovers, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether this object holds credentials of the control plane. Credentials can be in use although no chart renders them: the
/// control plane creates the certificates of webhooks and of telemetry at run time, and external credentials can still have the
/// label of the control plane if the chart created them once.
fn is_credential(object: &Value) -> bool {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    match object["kind"].as_str() {
        Some("Secret") => name == ISSUER_SECRET || (name.starts_with("linkerd-") && name.ends_with("-k8s-tls")),
        Some("ConfigMap") => name == existing::TRUST_ROOTS_CONFIG_MAP,
        _ => false,
    }
}

async fn ensure_unused(cluster: &Cluster) -> anyhow::Result<()> {
    let namespace = &cluster.control_plane_namespace;
    let api: Api<Pod> = Api::all(cluster.client.clone());
    let injected = format!("{CONTROL_PLANE_NS}={namespace},!{CONTROL_PLANE_COMPONENT}");
    let pods = cluster.list(&api, &ListParams::default().labels(&injected)).await;
    let pods = pods.map_err(|error| anyhow!("listing injected pods: {}", reason(&error)))?;
    let names: Vec<_> = pods
        .iter()
        .take(10)
        .map(|pod| format!("{}/{}", resource::namespace(pod), pod.name_any()))
        .collect();
    ensure!(
        pods.is_empty(),
        "{} a proxy of this control plane ({}{}); remove the annotation `linkerd.io/inject` from their namespaces and workloads and \
         restart them, or use --force",
        if pods.len() == 1 {
            "1 pod has".to_owned()
        } else {
            format!("{} pods have", pods.len())
        },
        names.join(", "),
        if pods.len() > names.len() { ", …" } else { "" }
    );
    let api: Api<Namespace> = Api::all(cluster.client.clone());
    let extensions = cluster.list(&api, &ListParams::default().labels(EXTENSION)).await;
    let extensions = extensions.map_err(|error| anyhow!("listing namespaces: {}", reason(&error)))?;
    let names: Vec<_> = extensions.iter().map(|namespace| namespace.name_any()).collect();
    ensure!(
        names.is_empty(),
        "extensions are installed in {}; remove them first, or use --force",
        names.join(", ")
    );
    Ok(())
}

/// Lists all objects with the label of this control plane, reduced to their identifying fields.
async fn list_labelled_objects(cluster: &Cluster) -> anyhow::Result<Vec<Value>> {
    let namespace = &cluster.control_plane_namespace;
    list_objects(cluster, &format!("{CONTROL_PLANE_NS}={namespace}"), KINDS).await
}

/// The kinds whose objects are listed in all namespaces, and the kinds without namespaces. Deleting the namespace of the control
/// plane does not delete all of these objects.
pub(crate) fn kinds_listed_in_all_namespaces() -> impl Iterator<Item = &'static ListedKind> {
    KINDS
        .iter()
        .filter(|(scope, ..)| matches!(scope, ObjectScope::AllNamespaces))
}

/// Lists the objects that a selector selects, reduced to their identifying fields.
///
/// # Errors
/// Fails if objects of one of the kinds cannot be listed. A kind that the cluster does not have is left out.
pub(crate) async fn list_objects(
    cluster: &Cluster,
    labels: &str,
    kinds: impl IntoIterator<Item = &ListedKind>,
) -> anyhow::Result<Vec<Value>> {
    let selected = ListParams::default().labels(labels);
    let mut objects = Vec::new();
    for (scope, group, version, kind) in kinds {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = match scope {
            ObjectScope::AllNamespaces => Api::all_with(cluster.client.clone(), &resource),
            ObjectScope::ControlPlaneNamespace => {
                Api::namespaced_with(cluster.client.clone(), &cluster.control_plane_namespace, &resource)
            }
        };
        let found = match cluster.list(&api, &selected).await {
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

/// The Secret of the issuer's certificate and key.
const ISSUER_SECRET: &str = "linkerd-identity-issuer";

#[derive(Clone, Copy, Debug)]
pub(crate) enum ObjectScope {
    AllNamespaces,
    /// The namespace of the control plane. Labelled objects of these kinds in other namespaces belong to the user.
    ControlPlaneNamespace,
}

/// The scope in which objects are listed, group, version and kind.
pub(crate) type ListedKind = (ObjectScope, &'static str, &'static str, &'static str);

/// The kinds of an installation's objects. Owned objects, such as pods, are deleted with their owners.
const KINDS: &[ListedKind] = &[
    // Kubernetes does not finish deleting a namespace while an API service has no available server.
    (ObjectScope::AllNamespaces, "apiregistration.k8s.io", "v1", "APIService"),
    (
        ObjectScope::AllNamespaces,
        "admissionregistration.k8s.io",
        "v1",
        "MutatingWebhookConfiguration",
    ),
    (
        ObjectScope::AllNamespaces,
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingWebhookConfiguration",
    ),
    (ObjectScope::ControlPlaneNamespace, "apps", "v1", "Deployment"),
    (ObjectScope::ControlPlaneNamespace, "batch", "v1", "CronJob"),
    (
        ObjectScope::ControlPlaneNamespace,
        "policy",
        "v1",
        "PodDisruptionBudget",
    ),
    (
        ObjectScope::ControlPlaneNamespace,
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
    ),
    (ObjectScope::ControlPlaneNamespace, "", "v1", "Service"),
    // Dashboards can be in the namespace where Grafana reads them.
    (ObjectScope::AllNamespaces, "", "v1", "ConfigMap"),
    (ObjectScope::ControlPlaneNamespace, "", "v1", "Secret"),
    (ObjectScope::ControlPlaneNamespace, "", "v1", "ServiceAccount"),
    (
        ObjectScope::ControlPlaneNamespace,
        "monitoring.coreos.com",
        "v1",
        "PodMonitor",
    ),
    (
        ObjectScope::AllNamespaces,
        "monitoring.coreos.com",
        "v1",
        "PrometheusRule",
    ),
    (
        ObjectScope::AllNamespaces,
        "rbac.authorization.k8s.io",
        "v1",
        "RoleBinding",
    ),
    (ObjectScope::AllNamespaces, "rbac.authorization.k8s.io", "v1", "Role"),
    (
        ObjectScope::AllNamespaces,
        "rbac.authorization.k8s.io",
        "v1",
        "ClusterRoleBinding",
    ),
    (
        ObjectScope::AllNamespaces,
        "rbac.authorization.k8s.io",
        "v1",
        "ClusterRole",
    ),
    (
        ObjectScope::AllNamespaces,
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
    ),
    (ObjectScope::AllNamespaces, "", "v1", "Namespace"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn credentials_of_the_control_plane_are_not_pruned() {
        let object = |kind: &str, name: &str| json!({ "kind": kind, "metadata": { "name": name } });
        for (kind, name) in [
            ("Secret", "linkerd-proxy-injector-k8s-tls"),
            ("Secret", "linkerd-identity-issuer"),
            ("ConfigMap", "linkerd-identity-trust-roots"),
        ] {
            assert!(is_credential(&object(kind, name)), "{kind} {name}");
        }
        for (kind, name) in [
            ("ConfigMap", "linkerd-proxy-injector-k8s-tls"),
            ("ConfigMap", "linkerd-identity-issuer"),
            ("Secret", "linkerd-config-overrides"),
            ("Service", "linkerd-identity-trust-roots"),
        ] {
            assert!(!is_credential(&object(kind, name)), "{kind} {name}");
        }
    }

    #[test]
    fn removal_lists_every_kind_of_the_charts() {
        let charts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts");
        let mut rendered = BTreeSet::new();
        for chart in ["tulle-control-plane", "tulle-crds"] {
            collect_kinds(&charts.join(chart).join("templates"), &mut rendered);
        }
        assert!(rendered.len() > 10, "{rendered:?}");
        let missing: Vec<_> = rendered
            .iter()
            .filter(|kind| {
                KINDS
                    .iter()
                    .all(|(_, group, _, known)| *group != kind.0 || *known != kind.1)
            })
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// Group and kind of every object in the templates below a directory. A template that chooses the kind, such as
    /// `kind: {{ .kind }}Binding`, chooses among kinds of RBAC.
    fn collect_kinds(dir: &Path, found: &mut BTreeSet<(String, String)>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect_kinds(&path, found);
                continue;
            }
            let (mut group, text) = (String::new(), fs::read_to_string(&path).unwrap());
            for line in text.lines() {
                if let Some(version) = line.strip_prefix("apiVersion: ") {
                    group = version
                        .split_once('/')
                        .map(|(group, _)| group)
                        .unwrap_or_default()
                        .to_owned();
                }
                let Some(kind) = line.strip_prefix("kind: ") else {
                    continue;
                };
                match kind.strip_prefix("{{ .kind }}") {
                    Some(rest) => {
                        for kind in ["Role", "ClusterRole"] {
                            found.insert((group.clone(), format!("{kind}{rest}")));
                        }
                    }
                    None => {
                        found.insert((group.clone(), kind.to_owned()));
                    }
                }
            }
        }
    }
}
