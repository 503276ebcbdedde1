//! `tulle multicluster install`, `uninstall` and `allow`: render the chart for `kubectl apply` and `kubectl delete`.

use std::time::Duration;

use anyhow::{anyhow, ensure};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::Api;
use serde_json::{Value, json};
use tulle_core::dns_names::is_dns_subdomain;
use tulle_core::duration;
use tulle_core::names::{annotation, label};

use super::extension::{self, DEFAULT_NAMESPACE, links, target_cluster};
use crate::install::charts::{Helm, MULTICLUSTER};
use crate::install::manifests::{Output, format_manifests};
use crate::install::removal::{ListedKind, ObjectScope, kinds_listed_in_all_namespaces, list_objects};
use crate::install::values::{HelmFlags, merge_values, set_value, write_values};
use crate::kubernetes::{self, reason};
use crate::{check, config, runtime};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct InstallArgs {
    /// Whether the gateway is installed [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    gateway: Option<bool>,
    /// The port of the gateway [default: 4143]
    #[arg(long, value_name = "PORT")]
    gateway_port: Option<u16>,
    /// How often other clusters probe the gateway, in seconds [default: 3]
    #[arg(long, value_name = "SECONDS")]
    gateway_probe_seconds: Option<u32>,
    /// The port of the gateway that other clusters probe [default: 4191]
    #[arg(long, value_name = "PORT")]
    gateway_probe_port: Option<u16>,
    /// The type of the gateway's Service: LoadBalancer, NodePort, ClusterIP [default: LoadBalancer]
    #[arg(long, value_name = "TYPE")]
    gateway_service_type: Option<String>,
    /// The node port at which load balancers check the gateway
    #[arg(long, value_name = "PORT")]
    gateway_healthcheck_nodeport: Option<u16>,
    /// Whether an account for other clusters is created [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    service_mirror_credentials: Option<bool>,
    /// Run several replicas, spread over nodes
    #[arg(long)]
    ha: bool,
    /// Neither check the control plane nor read its configuration from the cluster
    #[arg(long)]
    ignore_cluster: bool,
    /// How long to wait for parts of the control plane that are not ready yet
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    wait: Duration,
    #[command(flatten)]
    helm: HelmFlags,
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
/// Fails if a check of the control plane fails, or if the chart rejects the values.
pub(crate) fn install(args: &InstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let control_plane = match args.ignore_cluster {
        true => None,
        false => Some(runtime()?.block_on(async {
            let cluster = flags.connect().await?;
            check::wait_for_control_plane(&cluster, args.wait).await?;
            config::values(&cluster).await
        })?),
    };
    let helm = Helm::find(DEFAULT_NAMESPACE)?;
    let derived_values = control_plane_values(control_plane.as_ref(), &flags.linkerd_namespace);
    let mut files = vec![write_values(&helm, "values-of-control-plane.yaml", &derived_values)?];
    files.extend(args.ha.then(|| helm.high_availability_values(&MULTICLUSTER)));
    let values = merge_values(&helm, files, &args.helm, &args.values())?;
    let mut manifests = vec![namespace_manifest(&values)];
    manifests.extend(helm.render(&MULTICLUSTER, &values)?);
    crate::print(&format_manifests(&manifests, args.output)?)
}

/// The values of the chart that depend on the control plane.
fn control_plane_values(control_plane: Option<&Value>, namespace: &str) -> Value {
    let mut values = json!({"linkerdNamespace": namespace});
    let text = |key: &str| {
        let value = control_plane?[key].as_str()?;
        (!value.is_empty()).then(|| value.to_owned())
    };
    if let Some(domain) = text("identityTrustDomain").or_else(|| text("clusterDomain")) {
        values["identityTrustDomain"] = json!(domain);
    }
    if control_plane.is_some_and(|values| values["cniEnabled"] == json!(true)) {
        values["cniEnabled"] = json!(true);
    }
    values
}

impl InstallArgs {
    /// The values that the flags set.
    fn values(&self) -> Value {
        let mut values = json!({});
        for (key, value) in [
            ("gateway.enabled", self.gateway.map(|value| json!(value))),
            ("gateway.port", self.gateway_port.map(|value| json!(value))),
            (
                "gateway.probe.seconds",
                self.gateway_probe_seconds.map(|value| json!(value)),
            ),
            ("gateway.probe.port", self.gateway_probe_port.map(|value| json!(value))),
            (
                "gateway.serviceType",
                self.gateway_service_type.as_ref().map(|value| json!(value)),
            ),
            (
                "gateway.healthCheckNodePort",
                self.gateway_healthcheck_nodeport.map(|value| json!(value)),
            ),
            (
                "remoteMirrorServiceAccount",
                self.service_mirror_credentials.map(|value| json!(value)),
            ),
        ] {
            if let Some(value) = value {
                set_value(&mut values, key, value);
            }
        }
        values
    }
}

/// The namespace, which `helm install --create-namespace` would create without labels.
fn namespace_manifest(values: &Value) -> Value {
    // Without the CNI plugin, the init containers of pods install the redirect rules, which needs capabilities.
    let pod_security_level = match values["cniEnabled"] == json!(true) {
        true => "restricted",
        false => "privileged",
    };
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": DEFAULT_NAMESPACE,
            "labels": {label::EXTENSION: "multicluster", "pod-security.kubernetes.io/enforce": pod_security_level},
            "annotations": {annotation::CREATED_BY: concat!("tulle/cli ", env!("CARGO_PKG_VERSION"))},
        },
    })
}

/// Prints all objects of the extension.
///
/// # Errors
/// Fails if there are Links, because after the removal nothing would update their mirrors.
pub(crate) fn uninstall(args: &UninstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let objects = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let links: Vec<_> = links(&cluster).await?.iter().flatten().map(target_cluster).collect();
        ensure!(
            links.is_empty(),
            "there are Links to {}; remove each by `tulle multicluster unlink --cluster-name NAME | kubectl delete -f -` first",
            links.join(", ")
        );
        let mut objects = list_objects(&cluster, &format!("{}=true", label::MIRRORED_SERVICE), MIRROR_KINDS).await?;
        // Other objects are deleted with their namespace.
        objects.extend(list_objects(&cluster, extension::EXTENSION_SELECTOR, kinds_listed_in_all_namespaces()).await?);
        anyhow::Ok(objects)
    })?;
    ensure!(!objects.is_empty(), "the multicluster extension is not installed");
    crate::print(&format_manifests(&objects, args.output)?)
}

/// Prints an account for another cluster.
///
/// # Errors
/// Fails if the account exists, or if its namespace does not.
pub(crate) fn allow(args: &AllowArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let (name, namespace) = (&args.service_account_name, &args.namespace);
    ensure!(
        is_dns_subdomain(name),
        "--service-account-name {name:?} is not a name of Kubernetes; use lower-case letters, digits, - and ."
    );
    if !args.ignore_cluster {
        let (has_namespace, has_account) = runtime()?.block_on(async {
            let client = flags.connect().await?.client;
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
            let found = namespaces.get_opt(namespace).await;
            let has_namespace = found.map_err(|error| anyhow!("reading namespace {namespace}: {}", reason(&error)))?;
            let found = accounts.get_opt(name).await;
            let has_account =
                found.map_err(|error| anyhow!("reading ServiceAccount {namespace}/{name}: {}", reason(&error)))?;
            anyhow::Ok((has_namespace.is_some(), has_account.is_some()))
        })?;
        ensure!(
            has_namespace,
            "there is no namespace {namespace}; run `tulle multicluster install | kubectl apply -f -` first, or name another by --namespace"
        );
        ensure!(
            !has_account,
            "ServiceAccount {namespace}/{name} exists; choose another name, or print its manifests by --ignore-cluster"
        );
    }
    let values = json!({"remoteMirrorServiceAccount": true, "remoteMirrorServiceAccountName": name});
    let rendered = Helm::find(namespace)?.render(&MULTICLUSTER, &values)?;
    let token = format!("{name}-token");
    let belongs_to_account = |object: &Value| {
        let expected = match object["kind"].as_str() {
            Some("ServiceAccount" | "ClusterRole" | "ClusterRoleBinding") => name,
            Some("Secret") => &token,
            _ => return false,
        };
        object["metadata"]["name"].as_str() == Some(expected)
    };
    let manifests: Vec<_> = rendered.into_iter().filter(belongs_to_account).collect();
    crate::print(&format_manifests(&manifests, args.output)?)
}

/// All mirrors are Services. Federated Services are deleted too, because without a service mirror nothing removes their local
/// members.
const MIRROR_KINDS: &[ListedKind] = &[(ObjectScope::AllNamespaces, "", "v1", "Service")];

pub(super) const INSTALL_EXAMPLES: &str = "\
In each cluster that exports Services or uses those of others:

  tulle multicluster install | kubectl apply -f -

The service mirror mirrors all Links. To give the Link east a controller of its own:

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
    fn values_depend_on_flags_and_on_the_control_plane() {
        let args = Line::parse_from(["install", "--gateway=false", "--gateway-port=9"]).args;
        let values = args.values();
        assert_eq!(values, json!({"gateway": {"enabled": false, "port": 9}}));
        let values = control_plane_values(Some(&json!({"clusterDomain": "east.test", "cniEnabled": true})), "mesh");
        assert_eq!(values["linkerdNamespace"], "mesh");
        assert_eq!(values["identityTrustDomain"], "east.test");
        let labels = &namespace_manifest(&values)["metadata"]["labels"];
        assert_eq!(labels["pod-security.kubernetes.io/enforce"], "restricted");
    }
}
