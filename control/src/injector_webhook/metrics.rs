//! Metrics of the injector.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::metrics::{Counter, Family, Gauge, Labels, Registry};
use tulle_core::names::annotation;

use crate::injection::annotations::Annotations;
use crate::injection::{AnnotationLocation, Decision, join_reasons};

/// Counters of pod reviews and of their decisions.
#[derive(Clone)]
pub(super) struct Metrics {
    requests: Family<Counter>,
    responses: Family<Counter>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            requests: registry.counter(
                "proxy_inject_admission_requests_total",
                "Pods that the injector reviewed.",
            ),
            responses: registry.counter(
                "proxy_inject_admission_responses_total",
                "Pods that the injector reviewed, by decision.",
            ),
        }
    }

    pub(super) fn count_request(&self, labels: &Labels) {
        self.requests.get(labels).inc();
    }

    pub(super) fn count_decision(&self, labels: &Labels, decision: &Decision) {
        let labels = match decision {
            Decision::Inject(_) => labels.clone().with("skip", false).with("skip_reason", ""),
            Decision::Skip(reasons) => labels
                .clone()
                .with("skip", true)
                .with("skip_reason", join_reasons(reasons)),
        };
        self.responses.get(&labels).inc();
    }
}

pub(super) fn uninjected_pods(registry: &Registry) -> Family<Gauge> {
    registry.gauge(
        "tulle_uninjected_pods",
        "Pods without a sidecar that are annotated for one, as of the last audit.",
    )
}

/// The labels of a review. An absent annotation has no label, which Prometheus treats as an empty one.
pub(super) fn labels(
    owner_kind: &str,
    namespace: &str,
    at: Option<AnnotationLocation>,
    pod: &ObjectMeta,
    namespace_annotations: &Annotations,
) -> Labels {
    let mut labels = Labels::new()
        .with("owner_kind", owner_kind)
        .with("namespace", namespace)
        .with("annotation_at", at.map_or("", AnnotationLocation::as_str));
    let pod_annotations = pod.annotations.iter().flatten();
    let inherited = namespace_annotations.iter().filter(|(key, _)| {
        pod.annotations
            .as_ref()
            .is_none_or(|annotations| !annotations.contains_key(*key))
    });
    for (key, value) in pod_annotations.chain(inherited) {
        let Some(name) = key.strip_prefix("config.linkerd.io/").and_then(label_name) else {
            continue;
        };
        // Metrics are readable by others, and environment variables can contain secrets.
        let value: String = match key.as_str() {
            annotation::PROXY_ADDITIONAL_ENV => "set".to_owned(),
            _ => value.chars().take(MAX_LABEL_VALUE_CHARS).collect(),
        };
        labels = labels.with(&name, value);
    }
    labels
}

/// Replaces hyphens, which label names cannot contain. Users can set any annotation: returns `None` for a name that has other
/// characters than lower-case letters and hyphens, or a hyphen at the start, which no annotation of the mesh has.
fn label_name(annotation: &str) -> Option<String> {
    let is_valid = annotation.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    (is_valid && !annotation.starts_with('-')).then(|| annotation.replace('-', "_"))
}

/// Maximum characters of an annotation's value in a label.
const MAX_LABEL_VALUE_CHARS: usize = 64;
