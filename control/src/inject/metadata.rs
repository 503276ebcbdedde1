//! The labels and annotations that a pod gets, injected or not.

use std::collections::BTreeMap;

use aws_lc_rs::digest;
use tulle_core::names::{annotation, label};

use crate::inject::values::Values;
use crate::inject::{Config, Origin, Subject, containers, decision, ports};
use crate::resources::annotations::Annotations;

/// What is added to a pod's metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Metadata {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) annotations: Annotations,
}

/// The annotations of the namespace that this pod has not, but shall have.
pub(super) fn inherited(subject: &Subject<'_>) -> Annotations {
    let inherited = subject.namespace_annotations.iter().filter(|(key, _)| {
        let is_absent = subject.annotations().is_none_or(|pod| !pod.contains_key(*key));
        is_absent && is_inheritable(key)
    });
    inherited.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What an injected pod gets; `values` have its annotations applied.
pub(super) fn of_injected(config: &Config, values: &Values, subject: &Subject<'_>) -> Metadata {
    let mut annotations = inherited(subject);
    annotations.extend(opaque_ports(config, subject));
    annotations.extend(restrictions(config, subject));
    let created_by = match config.origin {
        Origin::Webhook => "proxy-injector",
        Origin::CommandLine => "cli",
    };
    let version = config.values.version();
    annotations.extend([
        (
            annotation::CREATED_BY.to_owned(),
            format!("linkerd/{created_by} {version}"),
        ),
        (
            annotation::PROXY_VERSION.to_owned(),
            containers::version(values, &values.proxy.image).to_owned(),
        ),
        (annotation::TRUST_ROOT_SHA256.to_owned(), sha256(values.trust_anchors())),
    ]);
    let mut labels = BTreeMap::from([
        (
            label::CONTROL_PLANE_NS.to_owned(),
            config.control_plane_namespace.clone(),
        ),
        (label::WORKLOAD_NS.to_owned(), subject.namespace.to_owned()),
    ]);
    if let Some(owner) = &subject.owner
        && (OWNER_KINDS.contains(&owner.kind.as_str())
            || (owner.kind == "cronjob" && config.origin == Origin::CommandLine))
    {
        labels.insert(
            format!("{}{}", label::PROXY_OWNER_PREFIX, owner.kind),
            label_value(&owner.name).to_owned(),
        );
    }
    Metadata { labels, annotations }
}

/// What a pod gets that is not injected: opaque ports, which its clients' proxies read. A pod that has our sidecar already, from
/// `tulle inject --manual`, is restricted as its namespace says.
pub(super) fn of_skipped(config: &Config, subject: &Subject<'_>) -> Metadata {
    let mut annotations: Annotations = opaque_ports(config, subject).into_iter().collect();
    if decision::has_own_sidecar(subject.spec) {
        annotations.extend(restrictions(config, subject));
    }
    Metadata {
        labels: BTreeMap::new(),
        annotations,
    }
}

/// The annotations that say who may reach the pod, where it has none: of its namespace, or of the chart. The policy of a port is
/// told by the annotations of the pod.
fn restrictions(config: &Config, subject: &Subject<'_>) -> Annotations {
    let of_chart = &config.values.proxy.require_identity_on_inbound_ports;
    let of_chart = (!of_chart.is_empty()).then_some(of_chart);
    let keys = [
        (annotation::DEFAULT_INBOUND_POLICY, None),
        (annotation::REQUIRE_IDENTITY_INBOUND_PORTS, of_chart),
    ];
    let absent = keys
        .into_iter()
        .filter(|(key, _)| subject.annotations().is_none_or(|pod| !pod.contains_key(*key)));
    let values = absent.filter_map(|(key, of_chart)| {
        let value = subject.namespace_annotations.get(key).or(of_chart)?;
        Some((key.to_owned(), value.clone()))
    });
    values.collect()
}

/// The opaque-ports annotation, where the pod has none: of its namespace, or of what it exposes.
fn opaque_ports(config: &Config, subject: &Subject<'_>) -> Option<(String, String)> {
    let key = annotation::OPAQUE_PORTS;
    if subject.annotations().is_some_and(|pod| pod.contains_key(key)) {
        return None;
    }
    let of_namespace = subject.namespace_annotations.get(key).cloned();
    let of_containers = || ports::opaque_of_pod(&config.values.proxy.opaque_ports, subject.spec);
    of_namespace.or_else(of_containers).map(|ports| (key.to_owned(), ports))
}

fn is_inheritable(key: &str) -> bool {
    let is_ours = key == annotation::INJECT
        || key == annotation::DISABLE_TAP
        || key.starts_with("config.linkerd.io/")
        || key.starts_with("config.tulle.dev/")
        || key == annotation::ALPHA_ENABLE_NATIVE_SIDECAR
        || key == annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS;
    is_ours && !NOT_INHERITED.contains(&key)
}

/// A label's value has at most 63 characters, a name up to 253.
fn label_value(name: &str) -> &str {
    let end = name.char_indices().nth(63).map_or(name.len(), |(at, _)| at);
    name[..end].trim_end_matches(|ch: char| !ch.is_ascii_alphanumeric())
}

fn sha256(text: &str) -> String {
    let digest = digest::digest(&digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Owners that label a pod.
const OWNER_KINDS: [&str; 6] = [
    "deployment",
    "replicationcontroller",
    "replicaset",
    "job",
    "daemonset",
    "statefulset",
];

/// Read on pods only, or meant for the namespace itself.
const NOT_INHERITED: [&str; 7] = [
    annotation::ADMISSION_WEBHOOKS,
    annotation::DEBUG_IMAGE,
    annotation::DEBUG_IMAGE_VERSION,
    annotation::DEBUG_IMAGE_PULL_POLICY,
    annotation::CLOSE_WAIT_TIMEOUT,
    annotation::PROXY_CPU_RATIO_LIMIT,
    annotation::ENABLE_GATEWAY,
];
