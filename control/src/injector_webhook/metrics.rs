//! Metrics of the injector.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::memory;
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
        let max_series = max_series(memory::limit());
        let requests = registry.counter(
            "proxy_inject_admission_requests_total",
            "Pods that the injector reviewed.",
        );
        let responses = registry.counter(
            "proxy_inject_admission_responses_total",
            "Pods that the injector reviewed, by decision.",
        );
        Self {
            requests: requests.limit_series(max_series),
            responses: responses.limit_series(max_series),
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
        "Pods without a sidecar that are annotated for one, or with an invalid value, as of the last audit.",
    )
}

/// Maximum number of series for a process that may use `memory` bytes. Every client that reaches the webhook can send labels.
fn max_series(memory: Option<u64>) -> usize {
    let max = memory.map_or(u64::MAX, |memory| memory / 64 / BYTES_PER_SERIES);
    usize::try_from(max).unwrap_or(usize::MAX)
}

/// The labels of a review. An absent annotation has no label, which Prometheus treats as an empty one.
pub(super) fn labels(
    owner_kind: &str,
    namespace: &str,
    location: Option<AnnotationLocation>,
    pod: &ObjectMeta,
    namespace_annotations: &Annotations,
) -> Labels {
    let mut labels = Labels::new()
        .with("owner_kind", truncate(owner_kind))
        .with("namespace", namespace)
        .with("annotation_at", location.map_or("", AnnotationLocation::as_str));
    let pod_annotations = pod.annotations.iter().flatten();
    let inherited = namespace_annotations.iter().filter(|(key, _)| {
        pod.annotations
            .as_ref()
            .is_none_or(|annotations| !annotations.contains_key(*key))
    });
    for (key, value) in pod_annotations.chain(inherited) {
        let Some(name) = label_name(key) else { continue };
        // Environment variables can contain secrets, which must not be in metrics.
        let value = match key.as_str() {
            annotation::PROXY_ADDITIONAL_ENV => "set",
            _ => truncate(value),
        };
        labels = labels.with(&name, value);
    }
    labels
}

/// The name of the label for an annotation of the mesh; `None` for other annotations. Hyphens are replaced, because label names
/// cannot contain them.
fn label_name(key: &str) -> Option<String> {
    let name = key.strip_prefix("config.linkerd.io/")?;
    annotation::find(key)?;
    Some(name.replace('-', "_"))
}

fn truncate(value: &str) -> &str {
    &value[..value.floor_char_boundary(MAX_LABEL_VALUE_BYTES)]
}

const MAX_LABEL_VALUE_BYTES: usize = 64;
/// Maximum memory of a series, which has all labels.
const BYTES_PER_SERIES: u64 = 5 * 1024;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_memory_of_the_labels_of_a_review_is_limited() {
        let annotations = |keys: Vec<String>| -> BTreeMap<String, String> {
            keys.into_iter().map(|key| (key, "x".repeat(1000))).collect()
        };
        let known = annotation::ALL.iter().map(|known| known.name.to_owned()).collect();
        let unknown = (0..1000)
            .map(|n| format!("config.linkerd.io/{}", "x".repeat(n)))
            .collect();
        let pod = ObjectMeta {
            annotations: Some(annotations(known)),
            ..ObjectMeta::default()
        };
        let all = labels(&"x".repeat(1000), "shop", None, &pod, &annotations(unknown));
        let n_bytes = all.as_str().len();
        assert!((1024..BYTES_PER_SERIES as usize).contains(&n_bytes), "{n_bytes}");
        assert_eq!(max_series(Some(250 << 20)), 800);
    }

    #[test]
    fn label_names_are_unique_for_all_annotations() {
        let review_label_names = ["owner-kind", "namespace", "annotation-at", "skip", "skip-reason"];
        let keys = review_label_names
            .map(|name| format!("config.linkerd.io/{name}"))
            .into_iter();
        let keys = keys.chain(review_label_names.map(|name| format!("config.linkerd.io/{}", name.replace('-', "_"))));
        let keys = keys.chain(annotation::ALL.iter().map(|known| known.name.to_owned()));
        let annotations: Annotations = keys.map(|key| (key, "x".to_owned())).collect();
        let pod = ObjectMeta {
            annotations: Some(annotations.clone()),
            ..ObjectMeta::default()
        };
        let review_labels = labels("pod", "shop", None, &pod, &annotations);
        let decision_labels = review_labels.with("skip", true).with("skip_reason", "");
        let mut names: Vec<_> = decision_labels.pairs().into_iter().map(|(name, _)| name).collect();
        let n_names = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n_names, "{decision_labels:?}");
    }
}
