//! What the injector counts.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::metrics::{Counter, Family, Gauge, Labels, Registry};
use tulle_core::names::annotation;

use crate::inject::{AnnotatedAt, Decision, joined};
use crate::resources::annotations::Annotations;

/// Reviews of pods, by what was asked and answered.
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
                "Pods that the API server asked about.",
            ),
            responses: registry.counter(
                "proxy_inject_admission_responses_total",
                "Pods that were decided on, by decision.",
            ),
        }
    }

    pub(super) fn requested(&self, labels: &Labels) {
        self.requests.get(labels).inc();
    }

    pub(super) fn decided(&self, labels: &Labels, decision: &Decision) {
        let labels = match decision {
            Decision::Inject(_) => labels.clone().with("skip", false).with("skip_reason", ""),
            Decision::Skip(reasons) => labels.clone().with("skip", true).with("skip_reason", joined(reasons)),
        };
        self.responses.get(&labels).inc();
    }
}

/// The gauge of pods that have no sidecar although they should.
pub(super) fn missing(registry: &Registry) -> Family<Gauge> {
    registry.gauge(
        "tulle_injection_missing_pods",
        "Pods without a sidecar that are annotated for one, as of the last audit.",
    )
}

/// The labels of a review; an annotation that is absent has none, which means the same as an empty one.
pub(super) fn labels(
    owner_kind: &str,
    namespace: &str,
    at: Option<AnnotatedAt>,
    pod: &ObjectMeta,
    of_namespace: &Annotations,
) -> Labels {
    let mut labels = Labels::new()
        .with("owner_kind", owner_kind)
        .with("namespace", namespace)
        .with("annotation_at", at.map_or("", AnnotatedAt::as_str));
    let of_pod = pod.annotations.iter().flatten();
    let inherited = of_namespace
        .iter()
        .filter(|(key, _)| pod.annotations.as_ref().is_none_or(|own| !own.contains_key(*key)));
    for (key, value) in of_pod.chain(inherited) {
        let Some(name) = key.strip_prefix("config.linkerd.io/").and_then(label_name) else {
            continue;
        };
        // Others can read metrics; variables may hold what they must not see.
        let value: String = match key.as_str() {
            annotation::PROXY_ADDITIONAL_ENV => "set".to_owned(),
            _ => value.chars().take(MAX_VALUE).collect(),
        };
        labels = labels.with(&name, value);
    }
    labels
}

/// Prometheus takes no hyphens; names unlike those of our annotations, which anybody may invent, are left out.
fn label_name(annotation: &str) -> Option<String> {
    let is_ours = annotation.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    (is_ours && !annotation.starts_with('-')).then(|| annotation.replace('-', "_"))
}

/// Characters of an annotation's value that a label repeats.
const MAX_VALUE: usize = 64;
