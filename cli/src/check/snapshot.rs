//! The input of the checks: the objects of a cluster at one moment, and the data fetched from its pods.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::ResourceExt as _;
use serde_json::Value;
use tulle_control::injection;
use tulle_control::injector_webhook::audit::AuditFindings;

use super::problem::{Problem, error, warning};
use super::scope::Scope;
use crate::certificates::Certificate;

/// Objects of one kind, or the error of listing them.
pub(super) type ListResult<T> = Result<Vec<T>, ListError>;

/// A kind that could not be listed, for example because of missing permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListError {
    /// The kind in plural.
    pub(super) kind: &'static str,
    pub(super) reason: String,
}

/// The state of a cluster at one moment.
pub(super) struct Snapshot {
    pub(super) scope: Scope,
    /// Unix time in seconds by the API server's clock, or by the local clock if the response had no date.
    pub(super) now: i64,
    /// Whether a Kubernetes client could be created.
    pub(super) client: Result<(), String>,
    /// The version of Kubernetes, such as `v1.34.2`.
    pub(super) kubernetes_version: Result<String, String>,
    /// Whether the user has each permission that an installation needs.
    pub(super) permissions: BTreeMap<Permission, Result<bool, String>>,
    /// Certificates that webhooks present, by Service name.
    pub(super) webhook_certificates: BTreeMap<String, Result<Certificate, String>>,
    /// Certificate chains that proxies present, by `namespace/pod`.
    pub(super) proxy_certificates: BTreeMap<String, Result<Vec<Certificate>, String>>,
    /// The last result of the injector's audit; absent if no injector runs.
    pub(super) injection_audit: Option<Result<AuditFindings, String>>,

    pub(super) namespaces: ListResult<Namespace>,
    pub(super) crds: ListResult<CustomResourceDefinition>,
    pub(super) cluster_roles: ListResult<ClusterRole>,
    pub(super) cluster_role_bindings: ListResult<ClusterRoleBinding>,
    pub(super) mutating_webhooks: ListResult<MutatingWebhookConfiguration>,
    pub(super) validating_webhooks: ListResult<ValidatingWebhookConfiguration>,
    pub(super) api_services: ListResult<APIService>,
    pub(super) nodes: ListResult<Node>,
    pub(super) node_leases: ListResult<Lease>,
    /// Of all namespaces.
    pub(super) pods: ListResult<Pod>,
    /// Of all namespaces.
    pub(super) services: ListResult<Service>,
    /// Of the control plane's namespace, like the next four lists.
    pub(super) config_maps: ListResult<ConfigMap>,
    pub(super) secrets: ListResult<Secret>,
    pub(super) service_accounts: ListResult<ServiceAccount>,
    pub(super) deployments: ListResult<Deployment>,
    pub(super) replica_sets: ListResult<ReplicaSet>,
    /// Of the namespace of the CNI plugin.
    pub(super) cni_daemon_sets: ListResult<DaemonSet>,
}

/// A permission that an installation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Permission {
    pub(super) verb: &'static str,
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    pub(super) scope: PermissionScope,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PermissionScope {
    Cluster,
    Namespace,
}

impl Snapshot {
    /// Whether the namespace exists.
    ///
    /// # Errors
    /// Fails if namespaces could not be listed.
    pub(super) fn has_namespace(&self, name: &str) -> Result<bool, Problem> {
        Ok(self
            .namespaces
            .as_ref()?
            .iter()
            .any(|namespace| namespace.name_any() == name))
    }

    /// A cluster without objects, whose lists all succeed.
    pub(super) fn empty(scope: Scope, now: i64) -> Self {
        Self {
            scope,
            now,
            client: Ok(()),
            kubernetes_version: Ok(String::new()),
            permissions: BTreeMap::new(),
            webhook_certificates: BTreeMap::new(),
            proxy_certificates: BTreeMap::new(),
            injection_audit: None,
            namespaces: Ok(Vec::new()),
            crds: Ok(Vec::new()),
            cluster_roles: Ok(Vec::new()),
            cluster_role_bindings: Ok(Vec::new()),
            mutating_webhooks: Ok(Vec::new()),
            validating_webhooks: Ok(Vec::new()),
            api_services: Ok(Vec::new()),
            nodes: Ok(Vec::new()),
            node_leases: Ok(Vec::new()),
            pods: Ok(Vec::new()),
            services: Ok(Vec::new()),
            config_maps: Ok(Vec::new()),
            secrets: Ok(Vec::new()),
            service_accounts: Ok(Vec::new()),
            deployments: Ok(Vec::new()),
            replica_sets: Ok(Vec::new()),
            cni_daemon_sets: Ok(Vec::new()),
        }
    }

    /// The values that the control plane was installed with, read from its ConfigMap.
    pub(super) fn values(&self) -> Result<Value, Problem> {
        serde_yaml_ng::from_str(self.values_text()?).map_err(|parse_error| {
            error(
                format!("the values in ConfigMap {CONFIG_MAP} are not YAML: {parse_error}"),
                self.scope.upgrade_command(),
            )
        })
    }

    /// The same values, parsed by the injector's code.
    pub(super) fn injector_values(&self) -> Result<injection::values::Values, Problem> {
        injection::values::Values::from_yaml(self.values_text()?).map_err(|parse_error| {
            let cause = std::error::Error::source(&parse_error)
                .map(|cause| format!(": {cause}"))
                .unwrap_or_default();
            error(
                format!("the values in ConfigMap {CONFIG_MAP} cannot be used: {parse_error}{cause}"),
                self.scope.upgrade_command(),
            )
        })
    }

    fn values_text(&self) -> Result<&str, Problem> {
        let yaml = self
            .config_map(CONFIG_MAP)?
            .and_then(|map| map.data.as_ref()?.get("values"));
        yaml.map(String::as_str).ok_or_else(|| {
            error(
                format!(
                    "ConfigMap {CONFIG_MAP} with the key \"values\" is not in namespace {}",
                    self.scope.control_plane_namespace
                ),
                self.scope.install_command(),
            )
        })
    }

    pub(super) fn config_map(&self, name: &str) -> Result<Option<&ConfigMap>, Problem> {
        let found = self.config_maps.as_ref()?.iter();
        Ok(found.into_iter().find(|map| map.metadata.name.as_deref() == Some(name)))
    }

    pub(super) fn secret(&self, name: &str) -> Result<Option<&Secret>, Problem> {
        let found = self.secrets.as_ref()?.iter();
        Ok(found
            .into_iter()
            .find(|secret| secret.metadata.name.as_deref() == Some(name)))
    }

    /// The trust anchors of the mesh.
    pub(super) fn trust_anchors(&self) -> Result<Vec<Certificate>, Problem> {
        let map = self.config_map(TRUST_ROOTS_CONFIG_MAP)?;
        let Some(pem) = map.and_then(|map| map.data.as_ref()?.get("ca-bundle.crt")) else {
            return Err(error(
                format!(
                    "ConfigMap {TRUST_ROOTS_CONFIG_MAP} with the key \"ca-bundle.crt\" is not in namespace {}",
                    self.scope.control_plane_namespace
                ),
                self.scope.upgrade_command(),
            ));
        };
        Certificate::parse_bundle(pem.as_bytes()).map_err(|parse_error| {
            error(
                format!("the trust anchors in ConfigMap {TRUST_ROOTS_CONFIG_MAP} cannot be used: {parse_error:#}"),
                format!(
                    "{} --identity-trust-anchors-file ca.crt | kubectl apply -f -",
                    self.scope.tulle_command("upgrade")
                ),
            )
        })
    }
}

/// Looks up a value by its dotted path in the chart's values.
pub(super) fn value_at<'a>(values: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(values, |value, key| &value[key])
}

impl From<&ListError> for Problem {
    fn from(list_error: &ListError) -> Self {
        warning(
            format!("unknown: {list_error}"),
            format!(
                "act as a user with permission to list {} (--as USER, --context NAME)",
                list_error.kind
            ),
        )
    }
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be read: {}", self.kind, self.reason)
    }
}

pub(super) const CONFIG_MAP: &str = "linkerd-config";
pub(super) const TRUST_ROOTS_CONFIG_MAP: &str = "linkerd-identity-trust-roots";
pub(super) const ISSUER_SECRET: &str = "linkerd-identity-issuer";
