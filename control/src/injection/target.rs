//! The input of injection: the pod, the configuration, and the names of the containers that are added.

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::injection::annotations::Annotations;
use crate::injection::values::Values;
use crate::resources::workload::long_running_containers;

/// Configuration that is the same for all pods.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub values: Values,
    pub control_plane_namespace: String,
    pub origin: InjectionOrigin,
}

impl Config {
    /// Returns true for `kube-system` and the control plane's namespace. Their pods are never denied, because repairing the
    /// cluster depends on them.
    pub fn is_protected(&self, namespace: &str) -> bool {
        namespace == "kube-system" || namespace == self.control_plane_namespace
    }
}

/// The caller of injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectionOrigin {
    /// The webhook. The API server has already set defaults in the pod.
    Webhook,
    /// The command line. Manifests are as users write them.
    CommandLine,
}

/// A pod, or the pod template of an owner such as a Deployment.
#[derive(Clone, Debug)]
pub struct InjectionTarget<'a> {
    /// JSON pointer to the template in the patched object; empty for a pod.
    pub pointer: &'a [&'a str],
    pub metadata: Option<&'a ObjectMeta>,
    pub spec: &'a PodSpec,
    pub namespace: &'a str,
    pub namespace_annotations: &'a Annotations,
    /// The top-level owner of the pod.
    pub owner: Option<PodOwner>,
}

/// The top-level owner of a pod, or the pod itself; `kind` is in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodOwner {
    pub kind: String,
    pub name: String,
}

/// How the sidecar routes outbound requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    Standard,
    /// Routes by the header `l5d-dst-override`, for ingress controllers that select endpoints themselves.
    Ingress,
}

impl InjectionTarget<'_> {
    pub(super) fn annotations(&self) -> Option<&Annotations> {
        self.metadata.and_then(|meta| meta.annotations.as_ref())
    }

    /// Whether containers expose UDP ports, which the proxy does not handle.
    pub fn has_udp_ports(&self) -> bool {
        let mut ports = long_running_containers(self.spec).flat_map(|container| container.ports.iter().flatten());
        ports.any(|port| port.protocol.as_deref() == Some("UDP"))
    }
}

/// Whether the pod has containers with the names that injection uses.
pub fn has_injected_containers(spec: &PodSpec) -> bool {
    let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    all.any(|container| [PROXY_CONTAINER, INIT_CONTAINER, VALIDATOR_CONTAINER].contains(&container.name.as_str()))
}

pub const PROXY_CONTAINER: &str = "linkerd-proxy";
/// The init container that sets up the redirection.
pub const INIT_CONTAINER: &str = "linkerd-init";
/// The init container that checks the redirection of a CNI plugin.
pub const VALIDATOR_CONTAINER: &str = "linkerd-network-validator";
/// The optional container with network tools.
pub const DEBUG_CONTAINER: &str = "linkerd-debug";

/// All inputs of the containers that are added to a pod.
#[derive(Clone, Copy)]
pub(in crate::injection) struct PodInputs<'a> {
    pub(in crate::injection) config: &'a Config,
    /// The values of the chart with the pod's annotations applied.
    pub(in crate::injection) values: &'a Values,
    pub(in crate::injection) target: &'a InjectionTarget<'a>,
    /// The annotations of the pod and those inherited from the namespace.
    pub(in crate::injection) annotations: &'a Annotations,
    pub(in crate::injection) mode: ProxyMode,
}
