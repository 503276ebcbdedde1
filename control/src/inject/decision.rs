//! Whether a pod gets a sidecar, and every reason why it does not.

use std::fmt;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tulle_core::names::annotation;

use crate::inject::values::Values;
use crate::inject::{Config, INIT_CONTAINER, Origin, PROXY_CONTAINER, Subject, VALIDATOR_CONTAINER, containers};
use crate::resources::annotations::Annotations;

/// The verdict on one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Inject(Mode),
    /// Never empty.
    Skip(Vec<Reason>),
}

/// How the sidecar takes outbound requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Usual,
    /// By the header `l5d-dst-override`, for ingress controllers that choose endpoints themselves.
    Ingress,
}

/// Whose annotation decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnotatedAt {
    Namespace,
    Workload,
}

/// Why a pod gets no sidecar, in the order in which reasons are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    HostNetwork,
    SidecarExists,
    UnsupportedResource,
    InvalidAtNamespace,
    InvalidAtWorkload,
    Disabled,
    NotEnabled,
    NoServiceAccountToken,
    /// The pod runs on Windows nodes, where there is no proxy.
    Windows,
    /// An annotation was to restrict who may reach the pod, and is not understood.
    InvalidRestriction,
    /// The application runs as the proxy's user.
    RunsAsProxy,
    /// The identity service certifies no service account of this name.
    ServiceAccount,
}

/// Decides on a pod.
pub(super) fn decide(config: &Config, subject: &Subject<'_>) -> Decision {
    let mut reasons = Vec::new();
    if subject.spec.host_network == Some(true) {
        reasons.push(Reason::HostNetwork);
    }
    if has_sidecar(subject.spec) {
        reasons.push(Reason::SidecarExists);
    }
    let mode = annotated(subject).unwrap_or_else(|reason| {
        reasons.push(reason);
        Mode::Usual
    });
    if lacks_token(&config.values, config.origin, subject) {
        reasons.push(Reason::NoServiceAccountToken);
    }
    if is_for_windows(subject.spec) {
        reasons.push(Reason::Windows);
    }
    match reasons.is_empty() {
        true => Decision::Inject(mode),
        false => Decision::Skip(reasons),
    }
}

/// Where the annotation stands that decides on this pod, if anywhere.
pub(super) fn annotated_at(subject: &Subject<'_>) -> Option<AnnotatedAt> {
    let at = |annotations: &Annotations, at| annotations.contains_key(annotation::INJECT).then_some(at);
    let workload = subject.annotations().and_then(|pod| at(pod, AnnotatedAt::Workload));
    workload.or_else(|| at(subject.namespace_annotations, AnnotatedAt::Namespace))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Enabled,
    Ingress,
    Disabled,
    Unsaid,
}

fn annotated(subject: &Subject<'_>) -> Result<Mode, Reason> {
    let namespace = wish(Some(subject.namespace_annotations)).ok_or(Reason::InvalidAtNamespace)?;
    let pod = wish(subject.annotations()).ok_or(Reason::InvalidAtWorkload)?;
    match (namespace, pod) {
        (_, Wish::Enabled) | (Wish::Enabled, Wish::Unsaid) => Ok(Mode::Usual),
        (_, Wish::Ingress) | (Wish::Ingress, Wish::Unsaid) => Ok(Mode::Ingress),
        (Wish::Enabled | Wish::Ingress, Wish::Disabled) => Err(Reason::Disabled),
        (Wish::Disabled | Wish::Unsaid, Wish::Disabled | Wish::Unsaid) => Err(Reason::NotEnabled),
    }
}

fn wish(annotations: Option<&Annotations>) -> Option<Wish> {
    match annotations
        .and_then(|all| all.get(annotation::INJECT))
        .map(String::as_str)
    {
        None | Some("") => Some(Wish::Unsaid),
        Some("enabled") => Some(Wish::Enabled),
        Some("ingress") => Some(Wish::Ingress),
        Some("disabled") => Some(Wish::Disabled),
        Some(_) => None,
    }
}

/// Whether a sidecar of this or another mesh is there already.
pub(super) fn has_sidecar(spec: &PodSpec) -> bool {
    let inits = || spec.init_containers.iter().flatten();
    let is_proxy = |container: &Container| is_one(container, &PROXY_IMAGES, &[PROXY_CONTAINER, "istio-proxy"]);
    let is_init = |container: &Container| {
        is_one(
            container,
            &INIT_IMAGES,
            &[INIT_CONTAINER, VALIDATOR_CONTAINER, "istio-init"],
        )
    };
    spec.containers.iter().any(is_proxy) || inits().any(|container| is_proxy(container) || is_init(container))
}

/// Whether injection has been here: containers of our names, which can be taken out and added anew.
pub fn has_own_sidecar(spec: &PodSpec) -> bool {
    let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    all.any(|container| [PROXY_CONTAINER, INIT_CONTAINER, VALIDATOR_CONTAINER].contains(&container.name.as_str()))
}

/// Whether nothing but a Windows node can run the pod, by its own words or by those for the scheduler.
fn is_for_windows(spec: &PodSpec) -> bool {
    if let Some(os) = &spec.os {
        return os.name == WINDOWS;
    }
    let selected = spec.node_selector.iter().flatten();
    let mut selected = selected.filter(|(key, _)| OS_LABELS.contains(&key.as_str()));
    if selected.any(|(_, os)| os == WINDOWS) {
        return true;
    }
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let terms = required.map_or(&[][..], |required| &required.node_selector_terms);
    // A node has to match one of the terms.
    !terms.is_empty()
        && terms.iter().all(|term| {
            let mut expressions = term.match_expressions.iter().flatten();
            expressions.any(|expression| {
                let values = expression.values.as_deref().unwrap_or_default();
                OS_LABELS.contains(&expression.key.as_str())
                    && match expression.operator.as_str() {
                        "In" => !values.is_empty() && values.iter().all(|os| os == WINDOWS),
                        "NotIn" => values.iter().any(|os| os == "linux"),
                        _ => false,
                    }
            })
        })
}

fn is_one(container: &Container, images: &[&str], names: &[&str]) -> bool {
    let image = container.image.as_deref().unwrap_or_default();
    names.contains(&container.name.as_str()) || images.iter().any(|prefix| image.starts_with(prefix))
}

/// Without a token of its own a proxy needs that of the service account, to prove who it is.
fn lacks_token(values: &Values, origin: Origin, subject: &Subject<'_>) -> bool {
    if values.identity.service_account_token_projection {
        return false;
    }
    // In a manifest nothing is mounted yet: the API server does that.
    let is_mounted = origin == Origin::CommandLine || containers::service_account_mount(subject).is_some();
    subject.spec.automount_service_account_token == Some(false) || !is_mounted
}

impl Reason {
    /// As metrics and events name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HostNetwork => "host_network_enabled",
            Self::SidecarExists => "sidecar_already_exists",
            Self::UnsupportedResource => "unsupported_resource",
            Self::InvalidAtNamespace => "invalid_inject_annotation_at_ns",
            Self::InvalidAtWorkload => "invalid_inject_annotation_at_workload",
            Self::Disabled => "injection_disable_annotation_present",
            Self::NotEnabled => "injection_enable_annotation_absent",
            Self::NoServiceAccountToken => "disabled_automount_service_account_token_account",
            Self::Windows => "windows_node",
            Self::InvalidRestriction => "invalid_restriction",
            Self::RunsAsProxy => "runs_as_proxy_user",
            Self::ServiceAccount => "invalid_service_account",
        }
    }

    /// The reason as a sentence, with the fix where there is one.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::HostNetwork => "hostNetwork is enabled, and redirecting the node's traffic would break it",
            Self::SidecarExists => "the pod has a sidecar already",
            Self::UnsupportedResource => "this kind of resource has no pods",
            Self::InvalidAtNamespace => {
                "the namespace's annotation linkerd.io/inject is none of: enabled, ingress, disabled"
            }
            Self::InvalidAtWorkload => "the pod's annotation linkerd.io/inject is none of: enabled, ingress, disabled",
            Self::Disabled => "the pod's annotation linkerd.io/inject is disabled",
            Self::NotEnabled => "neither the namespace nor the pod has the annotation linkerd.io/inject: enabled",
            Self::NoServiceAccountToken => {
                "the pod mounts no token of its service account; set automountServiceAccountToken to true"
            }
            Self::Windows => "the pod is for Windows nodes, and the proxy runs on Linux alone",
            Self::InvalidRestriction => "an annotation that restricts who may reach the pod is not understood",
            Self::RunsAsProxy => "a container runs as the proxy's user or group, whose connections bypass the mesh",
            Self::ServiceAccount => "the name of the pod's service account cannot be part of an identity",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl AnnotatedAt {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Workload => "workload",
        }
    }
}

/// Reasons as labels have them.
pub fn joined(reasons: &[Reason]) -> String {
    reasons
        .iter()
        .map(|reason| reason.as_str())
        .collect::<Vec<_>>()
        .join(",")
}

const PROXY_IMAGES: [&str; 3] = [
    "ghcr.io/tulle-mesh/proxy:",
    "cr.l5d.io/linkerd/proxy:",
    "gcr.io/istio-release/proxyv2:",
];
const WINDOWS: &str = "windows";
/// The labels that tell a node's system; the second is the older one.
const OS_LABELS: [&str; 2] = ["kubernetes.io/os", "beta.kubernetes.io/os"];
const INIT_IMAGES: [&str; 2] = ["cr.l5d.io/linkerd/proxy-init:", "gcr.io/istio-release/proxy_init:"];
