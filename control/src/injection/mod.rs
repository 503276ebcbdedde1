//! Sidecar injection: decides whether a pod gets a sidecar, and makes the JSON patch.
//!
//! Injection does no I/O, so the webhook and the CLI share it; [`InjectionOrigin`] selects the behaviour for each. An invalid
//! annotation is ignored with a warning. A pod is denied if its sidecar would not enforce a required restriction, would be bypassed
//! by the application, or would never get a certificate.

pub mod annotations;
mod checks;
mod decision;
mod patch;
mod pod;
mod ports;
mod target;
pub mod values;

#[cfg(test)]
mod tests;

use json_patch::Patch;
use k8s_openapi::api::core::v1::{PodSpec, ServicePort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::names::annotation;

use self::annotations::Annotations;
use self::checks::{proxy_user, service_account};
pub use self::decision::{AnnotationLocation, Decision, SkipReason, join_reasons};
use self::patch::PatchBuilder;
use self::pod::metadata::Metadata;
pub use self::pod::probes::restore_probes;
use self::pod::{containers, metadata};
use self::target::PodInputs;
pub use self::target::{
    Config, DEBUG_CONTAINER, INIT_CONTAINER, InjectionOrigin, InjectionTarget, PROXY_CONTAINER, PodOwner, ProxyMode,
    VALIDATOR_CONTAINER, has_injected_containers,
};
use self::values::Values;

/// The result of injection.
#[derive(Clone, Debug)]
pub struct InjectionOutcome {
    pub decision: Decision,
    pub annotation_location: Option<AnnotationLocation>,
    /// Empty if nothing changes.
    pub patch: Patch,
    /// Messages about annotations that are ignored, misspelled or invalid, and about init containers that bypass the mesh.
    pub warnings: Vec<String>,
    /// The reason to deny the pod: its sidecar would not enforce a restriction, would be bypassed, or would never be ready. If it
    /// is set, `decision` is `Skip` and the patch adds no sidecar, so that the caller can admit the pod anyway: pods of protected
    /// namespaces are never denied.
    pub denial_reason: Option<String>,
}

/// Decides whether a pod gets a sidecar, and makes its patch. The patch can also add annotations to a pod without a sidecar.
pub fn inject_pod(config: &Config, target: &InjectionTarget<'_>) -> InjectionOutcome {
    let decision = decision::decide(config, target);
    let annotated_at = decision::annotation_location(target);
    let mut warnings = misspelling_warnings(target);
    warnings.extend(decision::invalid_inject_warnings(target));
    let skipped_outcome = |decision, warnings, denial_reason| {
        let mut patch = PatchBuilder::at(target.pointer);
        patch.add_metadata(target.metadata, &metadata::skipped_metadata(config, target));
        InjectionOutcome {
            decision,
            annotation_location: annotated_at,
            patch: patch.into_patch(),
            warnings,
            denial_reason,
        }
    };
    let mode = match decision {
        Decision::Inject(mode) => mode,
        Decision::Skip(_) => return skipped_outcome(decision, warnings, None),
    };
    let mut annotations = metadata::inherited_annotations(target);
    annotations.extend(target.annotations().cloned().unwrap_or_default());
    let mut values = config.values.clone();
    let problems = annotations::apply_annotations(&mut values, target.namespace_annotations, &annotations, target.spec);
    warnings.extend(problems.ignored);
    warnings.extend(proxy_user::init_container_warnings(&values, target.spec));
    if values.debug_container.enabled && values.debug_container.image.name.is_empty() {
        warnings.push(format!(
            "{} is ignored: there is no image; name one by {} or the value debugContainer.image.name",
            annotation::ENABLE_DEBUG_SIDECAR,
            annotation::DEBUG_IMAGE
        ));
    }
    let runs_as_proxy = proxy_user::application_error(&values, target.spec);
    let errors = [
        (SkipReason::InvalidRestriction, problems.restriction_errors),
        (SkipReason::RunsAsProxyUser, runs_as_proxy.into_iter().collect()),
        (
            SkipReason::InvalidServiceAccount,
            service_account::name_error(target.spec).into_iter().collect(),
        ),
    ];
    let errors = errors.into_iter().filter(|(_, texts)| !texts.is_empty());
    let (reasons, reason_texts): (Vec<_>, Vec<_>) = errors.unzip();
    if !reasons.is_empty() {
        let denial_reason = reason_texts.concat().join("; ");
        return skipped_outcome(Decision::Skip(reasons), warnings, Some(denial_reason));
    }
    let added = metadata::injected_metadata(config, &values, target);
    let inputs = PodInputs {
        config,
        values: &values,
        target,
        annotations: &annotations,
        mode,
    };
    InjectionOutcome {
        decision,
        annotation_location: annotated_at,
        patch: patch::pod_patch(inputs, &added),
        warnings,
        denial_reason: None,
    }
}

/// Checks whether the injector accepts a value of an annotation.
///
/// # Errors
/// Returns the reason and the expected values.
pub fn check_annotation(key: &str, value: &str) -> Result<(), String> {
    let mut values = Values::default();
    // The setting of the cluster is unknown here. It is `true` because otherwise each close-wait-timeout would be invalid.
    values.proxy_init.run_as_root = true;
    let annotations = Annotations::from([(key.to_owned(), value.to_owned())]);
    // Port names cannot be checked without the pod.
    if let Some(checked) = annotations::check_ports(key, value) {
        return checked;
    }
    let problems = annotations::apply_annotations(&mut values, &Annotations::new(), &annotations, &PodSpec::default());
    let mut all = problems.restriction_errors.into_iter().chain(problems.ignored);
    all.next().map_or(Ok(()), Err)
}

/// Whether the annotations of the pod and its namespace request a sidecar.
pub fn is_sidecar_requested(namespace_annotations: &Annotations, pod_annotations: &Annotations) -> bool {
    decision::mode_from_annotations(namespace_annotations, Some(pod_annotations)).is_ok()
}

/// Decides whether a pod gets a sidecar, without the checks for which [`inject_pod`] denies pods, and without making a patch.
pub fn decide(config: &Config, target: &InjectionTarget<'_>) -> Decision {
    decision::decide(config, target)
}

/// Makes the patch of a Service, which adds the opaque-ports annotation if the Service does not have it. The value is that of the
/// namespace, or else the exposed ports that are opaque by default.
pub fn annotate_service(
    config: &Config,
    metadata: Option<&ObjectMeta>,
    ports: &[ServicePort],
    namespace_annotations: &Annotations,
) -> Patch {
    let existing = metadata.and_then(|meta| meta.annotations.as_ref());
    if existing.is_some_and(|annotations| annotations.contains_key(annotation::OPAQUE_PORTS)) {
        return Patch::default();
    }
    let inherited = namespace_annotations.get(annotation::OPAQUE_PORTS).cloned();
    let opaque = inherited.or_else(|| ports::service_opaque_ports(&config.values.proxy.opaque_ports, ports));
    let added = Metadata {
        annotations: Annotations::from_iter(opaque.map(|ports| (annotation::OPAQUE_PORTS.to_owned(), ports))),
        ..Metadata::default()
    };
    let mut patch = PatchBuilder::at(&[]);
    patch.add_metadata(metadata, &added);
    patch.into_patch()
}

/// Warnings about a common misspelling of the annotation `linkerd.io/inject`.
fn misspelling_warnings(target: &InjectionTarget<'_>) -> Vec<String> {
    let (wrong, right) = (annotation::INJECTED_TYPO, annotation::INJECT);
    let objects = [
        ("pod", target.annotations()),
        ("namespace", Some(target.namespace_annotations)),
    ];
    let misspelled = objects
        .into_iter()
        .filter(|(_, annotations)| annotations.is_some_and(|all| all.contains_key(wrong)));
    misspelled
        .map(|(object, _)| format!("the {object}'s annotation {wrong} injects nothing; the key is {right}"))
        .collect()
}

/// The names of all volumes that injection can add. The first is the default name of the volume for the xtables lock; the value
/// `proxyInit.xtMountPath.name` can set another name.
pub const INJECTED_VOLUMES: [&str; 4] = [
    "linkerd-proxy-init-xtables-lock",
    containers::END_ENTITY_VOLUME,
    containers::TOKEN_VOLUME,
    containers::PODINFO_VOLUME,
];
