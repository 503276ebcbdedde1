//! Decides whether a pod gets a sidecar, and lists all reasons against it. `inject_pod` adds the reasons for which a pod is denied.

use std::fmt;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tulle_core::names::annotation;

use crate::injection::annotations::Annotations;
use crate::injection::pod::containers;
use crate::injection::target::{
    Config, INIT_CONTAINER, InjectionOrigin, InjectionTarget, PROXY_CONTAINER, ProxyMode, VALIDATOR_CONTAINER,
};
use crate::injection::values::Values;

/// The decision on one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Inject(ProxyMode),
    /// No sidecar is added: the pod stays without one, or is denied. The list of reasons is never empty.
    Skip(Vec<SkipReason>),
}

/// The object that has the annotation `linkerd.io/inject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnotationLocation {
    Namespace,
    /// The pod, which the metrics call `workload`.
    Workload,
}

/// Reasons against a sidecar, in the order in which they are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    HostNetwork,
    SidecarExists,
    InvalidAtNamespace,
    InvalidAtWorkload,
    Disabled,
    NotEnabled,
    NoServiceAccountToken,
    /// The pod runs on Windows nodes. There is no proxy for Windows.
    Windows,
    // Only `inject_pod` returns the following reasons, together with `InjectionOutcome::denial_reason`.
    /// An annotation that restricts access to the pod is invalid.
    InvalidRestriction,
    /// The application runs as the proxy's user or group.
    RunsAsProxyUser,
    /// The identity service does not issue certificates for this service account name.
    InvalidServiceAccount,
}

pub(super) fn decide(config: &Config, target: &InjectionTarget<'_>) -> Decision {
    let mut reasons = Vec::new();
    if target.spec.host_network == Some(true) {
        reasons.push(SkipReason::HostNetwork);
    }
    if has_sidecar(target.spec) {
        reasons.push(SkipReason::SidecarExists);
    }
    let mode = mode_from_annotations(target.namespace_annotations, target.annotations()).unwrap_or_else(|reason| {
        reasons.push(reason);
        ProxyMode::Standard
    });
    if lacks_service_account_token(&config.values, config.origin, target) {
        reasons.push(SkipReason::NoServiceAccountToken);
    }
    if is_for_windows(target.spec) {
        reasons.push(SkipReason::Windows);
    }
    match reasons.is_empty() {
        true => Decision::Inject(mode),
        false => Decision::Skip(reasons),
    }
}

/// The object that has the annotation `linkerd.io/inject`: the pod, or else the namespace.
pub(super) fn annotation_location(target: &InjectionTarget<'_>) -> Option<AnnotationLocation> {
    let if_annotated =
        |annotations: &Annotations, location| annotations.contains_key(annotation::INJECT).then_some(location);
    let workload = target
        .annotations()
        .and_then(|pod| if_annotated(pod, AnnotationLocation::Workload));
    workload.or_else(|| if_annotated(target.namespace_annotations, AnnotationLocation::Namespace))
}

/// The value of the annotation `linkerd.io/inject` of one object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InjectSetting {
    Enabled,
    Ingress,
    Disabled,
    Unset,
}

pub(super) fn mode_from_annotations(
    namespace: &Annotations,
    pod: Option<&Annotations>,
) -> Result<ProxyMode, SkipReason> {
    let namespace = inject_setting(Some(namespace)).ok_or(SkipReason::InvalidAtNamespace)?;
    let pod = inject_setting(pod).ok_or(SkipReason::InvalidAtWorkload)?;
    match (namespace, pod) {
        (_, InjectSetting::Enabled) | (InjectSetting::Enabled, InjectSetting::Unset) => Ok(ProxyMode::Standard),
        (_, InjectSetting::Ingress) | (InjectSetting::Ingress, InjectSetting::Unset) => Ok(ProxyMode::Ingress),
        (InjectSetting::Enabled | InjectSetting::Ingress, InjectSetting::Disabled) => Err(SkipReason::Disabled),
        (InjectSetting::Disabled | InjectSetting::Unset, InjectSetting::Disabled | InjectSetting::Unset) => {
            Err(SkipReason::NotEnabled)
        }
    }
}

/// Warnings about invalid values of `linkerd.io/inject`. A pod with such a value gets no sidecar.
pub(super) fn invalid_inject_warnings(target: &InjectionTarget<'_>) -> Vec<String> {
    let annotated = [
        ("namespace", Some(target.namespace_annotations)),
        ("pod", target.annotations()),
    ];
    let invalid = annotated
        .into_iter()
        .filter(|(_, annotations)| inject_setting(*annotations).is_none());
    let warning = |(object, annotations): (&str, Option<&Annotations>)| {
        let value = annotations.and_then(|all| all.get(annotation::INJECT));
        format!(
            "the {object}'s annotation {} is {:?}, so the pod has no sidecar; expected enabled, ingress or disabled",
            annotation::INJECT,
            value.map_or("", String::as_str)
        )
    };
    invalid.map(warning).collect()
}

fn inject_setting(annotations: Option<&Annotations>) -> Option<InjectSetting> {
    match annotations
        .and_then(|all| all.get(annotation::INJECT))
        .map(String::as_str)
    {
        None | Some("") => Some(InjectSetting::Unset),
        Some("enabled") => Some(InjectSetting::Enabled),
        Some("ingress") => Some(InjectSetting::Ingress),
        Some("disabled") => Some(InjectSetting::Disabled),
        Some(_) => None,
    }
}

/// Whether the pod already has a sidecar of this or another mesh.
pub(super) fn has_sidecar(spec: &PodSpec) -> bool {
    let inits = || spec.init_containers.iter().flatten();
    let is_proxy =
        |container: &Container| has_image_or_name(container, &PROXY_IMAGE_PREFIXES, &[PROXY_CONTAINER, "istio-proxy"]);
    let is_init = |container: &Container| {
        has_image_or_name(
            container,
            &INIT_IMAGE_PREFIXES,
            &[INIT_CONTAINER, VALIDATOR_CONTAINER, "istio-init"],
        )
    };
    spec.containers.iter().any(is_proxy) || inits().any(|container| is_proxy(container) || is_init(container))
}

/// Whether only Windows nodes can run the pod, because of `spec.os`, the node selector or the node affinity.
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
    // A node matches if one of the terms matches.
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

fn has_image_or_name(container: &Container, images: &[&str], names: &[&str]) -> bool {
    let image = container.image.as_deref().unwrap_or_default();
    names.contains(&container.name.as_str()) || images.iter().any(|prefix| image.starts_with(prefix))
}

/// Whether the pod has no token for the proxy. Without a projected token the proxy needs the token of the pod's service account.
fn lacks_service_account_token(values: &Values, origin: InjectionOrigin, target: &InjectionTarget<'_>) -> bool {
    if values.identity.service_account_token_projection {
        return false;
    }
    // Manifests have no token mount yet: the API server adds it.
    let is_mounted = origin == InjectionOrigin::CommandLine || containers::service_account_mount(target).is_some();
    target.spec.automount_service_account_token == Some(false) || !is_mounted
}

impl SkipReason {
    /// The value in metrics and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HostNetwork => "host_network_enabled",
            Self::SidecarExists => "sidecar_already_exists",
            Self::InvalidAtNamespace => "invalid_inject_annotation_at_ns",
            Self::InvalidAtWorkload => "invalid_inject_annotation_at_workload",
            Self::Disabled => "injection_disable_annotation_present",
            Self::NotEnabled => "injection_enable_annotation_absent",
            // Linkerd's metrics have this name, with the second `account` at its end.
            Self::NoServiceAccountToken => "disabled_automount_service_account_token_account",
            Self::Windows => "windows_node",
            Self::InvalidRestriction => "invalid_restriction",
            Self::RunsAsProxyUser => "runs_as_proxy_user",
            Self::InvalidServiceAccount => "invalid_service_account",
        }
    }

    /// The reason as a sentence, with the fix if there is one.
    pub fn description(self) -> &'static str {
        match self {
            Self::HostNetwork => "hostNetwork is enabled, and redirecting the node's traffic would break it",
            Self::SidecarExists => "the pod has a sidecar already",
            Self::InvalidAtNamespace => {
                "the namespace's annotation linkerd.io/inject is none of: enabled, ingress, disabled"
            }
            Self::InvalidAtWorkload => "the pod's annotation linkerd.io/inject is none of: enabled, ingress, disabled",
            Self::Disabled => "the pod's annotation linkerd.io/inject has the value disabled",
            Self::NotEnabled => "neither the namespace nor the pod has the annotation linkerd.io/inject: enabled",
            Self::NoServiceAccountToken => {
                "the pod mounts no token of its service account; set automountServiceAccountToken to true"
            }
            Self::Windows => "the pod is for Windows nodes, and the proxy runs only on Linux",
            Self::InvalidRestriction => "an annotation that restricts access to the pod is invalid",
            Self::RunsAsProxyUser => {
                "a container runs as the proxy's user or group, so its connections bypass the mesh"
            }
            Self::InvalidServiceAccount => "the name of the pod's service account cannot be part of an identity",
        }
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl AnnotationLocation {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Workload => "workload",
        }
    }
}

/// Reasons separated by commas, as in metric labels.
pub fn join_reasons(reasons: &[SkipReason]) -> String {
    reasons
        .iter()
        .map(|reason| reason.as_str())
        .collect::<Vec<_>>()
        .join(",")
}

const PROXY_IMAGE_PREFIXES: [&str; 3] = [
    "ghcr.io/tulle-mesh/proxy:",
    "cr.l5d.io/linkerd/proxy:",
    "gcr.io/istio-release/proxyv2:",
];
const WINDOWS: &str = "windows";
/// Labels with the operating system of a node. The second one is deprecated.
const OS_LABELS: [&str; 2] = ["kubernetes.io/os", "beta.kubernetes.io/os"];
const INIT_IMAGE_PREFIXES: [&str; 2] = ["cr.l5d.io/linkerd/proxy-init:", "gcr.io/istio-release/proxy_init:"];
