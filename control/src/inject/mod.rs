//! Injection: from a pod, its namespace and the mesh's values to a decision and a JSON patch.
//!
//! Nothing here asks anybody or waits: the webhook and the command line both call it, and get the same.
//! What is wrong in an annotation becomes a warning, and the pod gets its sidecar all the same. A pod whose sidecar would not
//! restrict what it is to restrict, or would never be certified, is refused.

mod containers;
mod decision;
mod env;
mod metadata;
mod overrides;
mod patch;
mod ports;
mod probes;
mod proxy_user;
mod service_account;
pub mod values;

#[cfg(test)]
mod tests;

use json_patch::Patch;
use k8s_openapi::api::core::v1::{PodSpec, ServicePort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::names::annotation;

pub use self::decision::{AnnotatedAt, Decision, Mode, Reason, has_own_sidecar, joined};
use self::metadata::Metadata;
use self::patch::Additions;
pub use self::probes::restore as restore_probes;
use self::values::Values;
use crate::resources::annotations::Annotations;
use crate::resources::workload::running_containers;

/// What is the same for all pods.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub values: Values,
    pub control_plane_namespace: String,
    pub origin: Origin,
}

impl Config {
    /// Whether a namespace is one without which nothing would be mended: its pods are never kept waiting for a sidecar.
    pub fn is_protected(&self, namespace: &str) -> bool {
        namespace == "kube-system" || namespace == self.control_plane_namespace
    }
}

/// Who injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The webhook, into pods as the API server completed them.
    Webhook,
    /// The command line, into manifests as users write them.
    CommandLine,
}

/// What may be injected: a pod, or the template of a workload's pods.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// Where the template stands in the object that is patched; empty for a pod.
    pub root: &'a [&'a str],
    pub metadata: Option<&'a ObjectMeta>,
    pub spec: &'a PodSpec,
    pub namespace: &'a str,
    pub namespace_annotations: &'a Annotations,
    /// The workload that pods belong to in the end.
    pub owner: Option<Workload>,
}

/// A workload: its kind in lower case, and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    pub kind: String,
    pub name: String,
}

/// What becomes of a subject.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub decision: Decision,
    pub annotated_at: Option<AnnotatedAt>,
    /// Empty when nothing changes.
    pub patch: Patch,
    /// Sentences about annotations that were ignored.
    pub warnings: Vec<String>,
    /// Why the pod must not run as it is: with a sidecar it would not be restricted as it says, or never be ready. The decision is
    /// to skip it, for pods that are never refused.
    pub refusal: Option<String>,
}

/// Decides on a pod and makes its patch; a pod without a sidecar may still be told which of its ports are opaque.
pub fn pod(config: &Config, subject: &Subject<'_>) -> Outcome {
    let decision = decision::decide(config, subject);
    let annotated_at = decision::annotated_at(subject);
    let mut warnings = misspelt(subject);
    let skipped = |decision, warnings, refusal| {
        let mut patch = Additions::below(subject.root);
        patch.metadata(subject.metadata, &metadata::of_skipped(config, subject));
        Outcome {
            decision,
            annotated_at,
            patch: patch.into_patch(),
            warnings,
            refusal,
        }
    };
    let mode = match decision {
        Decision::Inject(mode) => mode,
        Decision::Skip(_) => return skipped(decision, warnings, None),
    };
    let mut annotations = metadata::inherited(subject);
    annotations.extend(subject.annotations().cloned().unwrap_or_default());
    let mut values = config.values.clone();
    let problems = overrides::apply(&mut values, subject.namespace_annotations, &annotations, subject.spec);
    warnings.extend(problems.ignored);
    warnings.extend(proxy_user::of_setup(&values, subject.spec));
    if values.debug_container.enabled && values.debug_container.image.name.is_empty() {
        warnings.push(format!(
            "{} is ignored: there is no image; name one by {} or the value debugContainer.image.name",
            annotation::ENABLE_DEBUG_SIDECAR,
            annotation::DEBUG_IMAGE
        ));
    }
    let as_proxy = proxy_user::of_application(&values, subject.spec);
    let reasons = [
        (Reason::InvalidRestriction, problems.restricting),
        (Reason::RunsAsProxy, as_proxy.into_iter().collect()),
        (
            Reason::ServiceAccount,
            service_account::problem(subject.spec).into_iter().collect(),
        ),
    ];
    let (reasons, texts): (Vec<_>, Vec<_>) = reasons.into_iter().filter(|(_, texts)| !texts.is_empty()).unzip();
    if !reasons.is_empty() {
        let refusal = texts.concat().join("; ");
        return skipped(Decision::Skip(reasons), warnings, Some(refusal));
    }
    let added = metadata::of_injected(config, &values, subject);
    Outcome {
        decision,
        annotated_at,
        patch: patch::injection(config, &values, subject, &added, &annotations, mode),
        warnings,
        refusal: None,
    }
}

/// Tells whether the injector would use this value of an annotation.
///
/// # Errors
/// Why not, and what it would use.
pub fn check_annotation(key: &str, value: &str) -> Result<(), String> {
    let mut values = Values::default();
    // Whether it is on is known to the cluster only.
    values.proxy_init.run_as_root = true;
    let annotations = Annotations::from([(key.to_owned(), value.to_owned())]);
    // Names of ports are known to the pod only.
    if let Some(checked) = overrides::check_ports(key, value) {
        return checked;
    }
    let problems = overrides::apply(&mut values, &Annotations::new(), &annotations, &PodSpec::default());
    let mut all = problems.restricting.into_iter().chain(problems.ignored);
    all.next().map_or(Ok(()), Err)
}

/// Decides on a pod, without a patch.
pub fn decide(config: &Config, subject: &Subject<'_>) -> Decision {
    decision::decide(config, subject)
}

/// The patch of a Service: only its opaque ports, of its namespace or of what it exposes, where it names none.
pub fn service(
    config: &Config,
    metadata: Option<&ObjectMeta>,
    ports: &[ServicePort],
    namespace_annotations: &Annotations,
) -> Patch {
    let existing = metadata.and_then(|meta| meta.annotations.as_ref());
    if existing.is_some_and(|annotations| annotations.contains_key(annotation::OPAQUE_PORTS)) {
        return Patch::default();
    }
    let of_namespace = namespace_annotations.get(annotation::OPAQUE_PORTS).cloned();
    let opaque = of_namespace.or_else(|| ports::opaque_of_service(&config.values.proxy.opaque_ports, ports));
    let added = Metadata {
        annotations: Annotations::from_iter(opaque.map(|ports| (annotation::OPAQUE_PORTS.to_owned(), ports))),
        ..Metadata::default()
    };
    let mut patch = Additions::below(&[]);
    patch.metadata(metadata, &added);
    patch.into_patch()
}

/// Warns of the annotation that users write instead of the one that injects.
fn misspelt(subject: &Subject<'_>) -> Vec<String> {
    let (wrong, right) = (annotation::INJECTED_TYPO, annotation::INJECT);
    let at = [
        ("pod", subject.annotations()),
        ("namespace", Some(subject.namespace_annotations)),
    ];
    let found = at
        .into_iter()
        .filter(|(_, annotations)| annotations.is_some_and(|all| all.contains_key(wrong)));
    found
        .map(|(what, _)| format!("the {what}'s annotation {wrong} injects nothing; the key is {right}"))
        .collect()
}

impl Subject<'_> {
    fn annotations(&self) -> Option<&Annotations> {
        self.metadata.and_then(|meta| meta.annotations.as_ref())
    }

    /// Whether containers expose UDP ports, which no proxy sees.
    pub fn has_udp_ports(&self) -> bool {
        let mut ports = running_containers(self.spec).flat_map(|container| container.ports.iter().flatten());
        ports.any(|port| port.protocol.as_deref() == Some("UDP"))
    }
}

/// Every volume that injection may add.
pub const VOLUMES: [&str; 4] = [
    "linkerd-proxy-init-xtables-lock",
    containers::END_ENTITY_VOLUME,
    containers::TOKEN_VOLUME,
    containers::PODINFO_VOLUME,
];
/// The container of the sidecar.
pub const PROXY_CONTAINER: &str = "linkerd-proxy";
/// The container that redirects.
pub const INIT_CONTAINER: &str = "linkerd-init";
/// The container that proves redirection where a CNI plugin redirects.
pub const VALIDATOR_CONTAINER: &str = "linkerd-network-validator";
/// The container with network tools.
pub const DEBUG_CONTAINER: &str = "linkerd-debug";
