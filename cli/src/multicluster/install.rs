//! `tulle multicluster install`, `uninstall` and `allow`: render the chart for `kubectl apply` and `kubectl delete`.

use anyhow::{anyhow, bail, ensure};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use serde_json::{Value, json};
use tulle_core::names::{annotation, label};

use super::extension::{self, DEFAULT_NAMESPACE, links, target_cluster};
use crate::install::charts::{Helm, MULTICLUSTER};
use crate::install::manifests::{Output, show};
use crate::install::removal::{ListedKind, ObjectScope, list_objects};
use crate::install::values::{Assignments, merge_assignments, set_value};
use crate::kubernetes::{self, reason};
use crate::{config, runtime};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct InstallArgs {
    /// Whether the gateway is installed
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    gateway: bool,
    /// The port of the gateway
    #[arg(long, value_name = "PORT", default_value_t = 4143)]
    gateway_port: u16,
    /// How often other clusters probe the gateway, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3)]
    gateway_probe_seconds: u32,
    /// The port of the gateway that other clusters probe
    #[arg(long, value_name = "PORT", default_value_t = 4191)]
    gateway_probe_port: u16,
    /// The type of the gateway's Service: LoadBalancer, NodePort, ClusterIP
    #[arg(long, value_name = "TYPE", default_value = "LoadBalancer")]
    gateway_service_type: String,
    /// The node port at which load balancers check the gateway
    #[arg(long, value_name = "PORT")]
    gateway_healthcheck_nodeport: Option<u16>,
    /// Whether an account for other clusters is created
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    service_mirror_credentials: bool,
    /// Run several replicas, spread over nodes
    #[arg(long)]
    ha: bool,
    /// Do not read the configuration of the control plane from the cluster
    #[arg(long)]
    ignore_cluster: bool,
    #[command(flatten)]
    assignments: Assignments,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "  tulle multicluster uninstall | kubectl delete -f -")]
pub(crate) struct UninstallArgs {
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct AllowArgs {
    /// The name of the account
    #[arg(long, value_name = "NAME")]
    service_account_name: String,
    /// The namespace of the account
    #[arg(long, value_name = "NAMESPACE", default_value = DEFAULT_NAMESPACE)]
    namespace: String,
    /// Do not check whether the account exists
    #[arg(long)]
    ignore_cluster: bool,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Prints the manifests of the extension.
///
/// # Errors
/// Fails if there is no control plane, or if the chart rejects the values.
pub(crate) fn install(args: &InstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let control_plane = match args.ignore_cluster {
        true => None,
        false => Some(runtime()?.block_on(async { config::values(&flags.connect().await?).await })?),
    };
    let helm = Helm::find(DEFAULT_NAMESPACE)?;
    let own = args.values(control_plane.as_ref(), &flags.linkerd_namespace);
    let high_availability = args.ha.then(|| helm.high_availability(&MULTICLUSTER));
    let values = merge_assignments(&helm, high_availability, &args.assignments, &own)?;
    let mut manifests = vec![namespace(DEFAULT_NAMESPACE, &values)];
    manifests.extend(helm.render(&MULTICLUSTER, &values)?);
    crate::print(&show(&manifests, args.output)?)
}

impl InstallArgs {
    /// The values that the flags set, and those that follow from the control plane.
    fn values(&self, control_plane: Option<&Value>, control_plane_namespace: &str) -> Value {
        let mut values = json!({});
        for (key, value) in [
            ("linkerdNamespace", json!(control_plane_namespace)),
            ("gateway.enabled", json!(self.gateway)),
            ("gateway.port", json!(self.gateway_port)),
            ("gateway.probe.seconds", json!(self.gateway_probe_seconds)),
            ("gateway.probe.port", json!(self.gateway_probe_port)),
            ("gateway.serviceType", json!(self.gateway_service_type)),
            ("remoteMirrorServiceAccount", json!(self.service_mirror_credentials)),
        ] {
            set_value(&mut values, key, value);
        }
        if let Some(port) = self.gateway_healthcheck_nodeport {
            set_value(&mut values, "gateway.healthCheckNodePort", json!(port));
        }
        let found = |key: &str| {
            let value = control_plane?[key].as_str()?;
            (!value.is_empty()).then(|| value.to_owned())
        };
        if let Some(domain) = found("identityTrustDomain").or_else(|| found("clusterDomain")) {
            set_value(&mut values, "identityTrustDomain", json!(domain));
        }
        if control_plane.is_some_and(|values| values["cniEnabled"] == json!(true)) {
            set_value(&mut values, "cniEnabled", json!(true));
        }
        values
    }
}

/// The namespace, which `helm install --create-namespace` would create without labels.
fn namespace(name: &str, values: &Value) -> Value {
    // Without the CNI plugin, the init containers of pods change the redirect rules, which needs capabilities.
    let standard = match values["cniEnabled"] == json!(true) {
        true => "restricted",
        false => "privileged",
    };
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": name,
            "labels": {label::EXTENSION: "multicluster", "pod-security.kubernetes.io/enforce": standard},
            "annotations": {annotation::CREATED_BY: concat!("tulle/cli ", env!("CARGO_PKG_VERSION"))},
        },
    })
}

/// Prints all objects of the extension.
///
/// # Errors
/// Fails while there are Links, because nothing would update their mirrors any more.
pub(crate) fn uninstall(args: &UninstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let objects = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let links: Vec<_> = links(&cluster).await?.iter().map(target_cluster).collect();
        ensure!(
            links.is_empty(),
            "there are Links to {}; remove each by `tulle multicluster unlink --cluster-name NAME | kubectl delete -f -` first",
            links.join(", ")
        );
        list_objects(&cluster, extension::LABEL, KINDS).await
    })?;
    ensure!(!objects.is_empty(), "the multicluster extension is not installed");
    crate::print(&show(&objects, args.output)?)
}

/// Prints an account for another cluster.
///
/// # Errors
/// Fails if the account exists.
pub(crate) fn allow(args: &AllowArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let (name, namespace_name) = (&args.service_account_name, &args.namespace);
    if !args.ignore_cluster {
        let found = runtime()?.block_on(async {
            let accounts: Api<ServiceAccount> = Api::namespaced(flags.connect().await?.client, namespace_name);
            let found = accounts.get_opt(name).await;
            found.map_err(|error| anyhow!("reading ServiceAccount {namespace_name}/{name}: {}", reason(&error)))
        })?;
        if found.is_some() {
            bail!(
                "ServiceAccount {namespace_name}/{name} exists; choose another name, or print its manifests by --ignore-cluster"
            );
        }
    }
    let values = json!({"remoteMirrorServiceAccount": true, "remoteMirrorServiceAccountName": name});
    let rendered = Helm::find(namespace_name)?.render(&MULTICLUSTER, &values)?;
    let token = format!("{name}-token");
    let is_of_account = |object: &Value| {
        let object = object["metadata"]["name"].as_str();
        object == Some(name) || object == Some(&token)
    };
    let mut manifests = vec![namespace(namespace_name, &values)];
    manifests.extend(rendered.into_iter().filter(is_of_account));
    crate::print(&show(&manifests, args.output)?)
}

/// Other objects are deleted with their namespace.
const KINDS: &[ListedKind] = &[
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
        "rbac.authorization.k8s.io",
        "v1",
        "RoleBinding",
    ),
    (ObjectScope::AllNamespaces, "rbac.authorization.k8s.io", "v1", "Role"),
    (ObjectScope::AllNamespaces, "", "v1", "Namespace"),
];

pub(super) const INSTALL_EXAMPLES: &str = "\
In each cluster that exports Services or uses those of others:

  tulle multicluster install | kubectl apply -f -

For each Link, a controller is needed, which has the name of the Link:

  tulle multicluster install --set 'controllers[0].link.ref.name=east' | kubectl apply -f -";

pub(super) const ALLOW_EXAMPLES: &str = "\
One account for each cluster makes it possible to withdraw the access of one of them:

  tulle multicluster allow --service-account-name west | kubectl apply -f -
  tulle multicluster link-gen --cluster-name east --service-account-name west | kubectl --context west apply -f -";

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: InstallArgs,
    }

    #[test]
    fn values_follow_from_flags_and_from_the_control_plane() {
        let args = Line::parse_from(["install", "--gateway=false", "--gateway-port=9"]).args;
        let values = args.values(Some(&json!({"clusterDomain": "east.test", "cniEnabled": true})), "mesh");
        assert_eq!(values["gateway"]["enabled"], false);
        assert_eq!(values["gateway"]["port"], 9);
        assert_eq!(values["linkerdNamespace"], "mesh");
        assert_eq!(values["identityTrustDomain"], "east.test");
        assert!(values["gateway"].get("healthCheckNodePort").is_none());
        let namespace = namespace("a", &values);
        assert_eq!(
            namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"],
            "restricted"
        );
    }
}
