//! The labels and annotations that are added to a pod, with or without a sidecar.

use std::collections::BTreeMap;

use aws_lc_rs::digest;
use tulle_core::names::{annotation, label};

use crate::injection::annotations::Annotations;
use crate::injection::pod::containers;
use crate::injection::ports;
use crate::injection::target::{Config, InjectionOrigin, InjectionTarget, has_injected_containers};
use crate::injection::values::Values;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::injection) struct Metadata {
    pub(in crate::injection) labels: BTreeMap<String, String>,
    pub(in crate::injection) annotations: Annotations,
}

/// Inheritable annotations of the namespace that the pod does not have.
pub(in crate::injection) fn inherited_annotations(target: &InjectionTarget<'_>) -> Annotations {
    let inherited = target.namespace_annotations.iter().filter(|(key, _)| {
        let is_absent = target.annotations().is_none_or(|pod| !pod.contains_key(*key));
        is_absent && is_inheritable(key)
    });
    inherited.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Metadata of an injected pod. The pod's annotations are already applied to `values`.
pub(in crate::injection) fn injected_metadata(
    config: &Config,
    values: &Values,
    target: &InjectionTarget<'_>,
) -> Metadata {
    let mut annotations = inherited_annotations(target);
    annotations.extend(opaque_ports(config, target));
    annotations.extend(inherited_policy_annotations(config, target));
    let created_by = match config.origin {
        InjectionOrigin::Webhook => "proxy-injector",
        InjectionOrigin::CommandLine => "cli",
    };
    let version = config.values.version();
    annotations.extend([
        (
            annotation::CREATED_BY.to_owned(),
            format!("linkerd/{created_by} {version}"),
        ),
        (annotation::PROXY_VERSION.to_owned(), proxy_version(values).to_owned()),
        (annotation::TRUST_ROOT_SHA256.to_owned(), sha256(values.trust_anchors())),
    ]);
    let mut labels = BTreeMap::from([
        (
            label::CONTROL_PLANE_NS.to_owned(),
            config.control_plane_namespace.clone(),
        ),
        (label::WORKLOAD_NS.to_owned(), target.namespace.to_owned()),
    ]);
    if let Some(owner) = &target.owner
        && (OWNER_KINDS.contains(&owner.kind.as_str())
            || (owner.kind == "cronjob" && config.origin == InjectionOrigin::CommandLine))
    {
        labels.insert(
            format!("{}{}", label::PROXY_OWNER_PREFIX, owner.kind),
            label_value(&owner.name).to_owned(),
        );
    }
    Metadata { labels, annotations }
}

/// The version of the proxy's image, without a digest.
fn proxy_version(values: &Values) -> &str {
    let version = containers::image_version(values, &values.proxy.image);
    version.split_once('@').map_or(version, |(version, _)| version)
}

/// Metadata of a pod that gets no sidecar: its opaque ports, which the proxies of its clients need. A pod with a sidecar from
/// `tulle inject --manual` also gets the policy annotations of its namespace.
pub(in crate::injection) fn skipped_metadata(config: &Config, target: &InjectionTarget<'_>) -> Metadata {
    let mut annotations: Annotations = opaque_ports(config, target).into_iter().collect();
    if has_injected_containers(target.spec) {
        annotations.extend(inherited_policy_annotations(config, target));
    }
    Metadata {
        labels: BTreeMap::new(),
        annotations,
    }
}

/// The annotations of the default inbound policy and of the ports that require an identity, unless the pod has them. The control
/// plane computes the policy of a port from these annotations.
///
/// The values are those of the namespace. If it has no list of ports, the list of the chart applies. The chart's default policy is
/// not copied, because the control plane gets it as a flag.
fn inherited_policy_annotations(config: &Config, target: &InjectionTarget<'_>) -> Annotations {
    let chart_ports = &config.values.proxy.require_identity_on_inbound_ports;
    let chart_ports = (!chart_ports.is_empty()).then_some(chart_ports);
    let keys = [
        (annotation::DEFAULT_INBOUND_POLICY, None),
        (annotation::REQUIRE_IDENTITY_INBOUND_PORTS, chart_ports),
    ];
    let absent = keys
        .into_iter()
        .filter(|(key, _)| target.annotations().is_none_or(|pod| !pod.contains_key(*key)));
    let values = absent.filter_map(|(key, chart_value)| {
        let value = target.namespace_annotations.get(key).or(chart_value)?;
        Some((key.to_owned(), value.clone()))
    });
    values.collect()
}

/// The opaque-ports annotation, unless the pod has it. The value is that of the namespace, or else the exposed ports of the pod
/// that are opaque by default.
fn opaque_ports(config: &Config, target: &InjectionTarget<'_>) -> Option<(String, String)> {
    let key = annotation::OPAQUE_PORTS;
    if target.annotations().is_some_and(|pod| pod.contains_key(key)) {
        return None;
    }
    let namespace_value = target.namespace_annotations.get(key).cloned();
    let container_ports = || ports::pod_opaque_ports(&config.values.proxy.opaque_ports, target.spec);
    namespace_value
        .or_else(container_ports)
        .map(|ports| (key.to_owned(), ports))
}

fn is_inheritable(key: &str) -> bool {
    let is_mesh_annotation = key == annotation::INJECT
        || key == annotation::DISABLE_TAP
        || key.starts_with("config.linkerd.io/")
        || key.starts_with("config.tulle.dev/")
        || key == annotation::ALPHA_ENABLE_NATIVE_SIDECAR
        || key == annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS;
    is_mesh_annotation && !NOT_INHERITED.contains(&key)
}

/// Shortens a name, which has up to 253 characters, to a valid label value of at most 63 characters.
fn label_value(name: &str) -> &str {
    let end = name.char_indices().nth(63).map_or(name.len(), |(at, _)| at);
    name[..end].trim_end_matches(|ch: char| !ch.is_ascii_alphanumeric())
}

fn sha256(text: &str) -> String {
    let digest = digest::digest(&digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Kinds of owners that get a label on the pod.
const OWNER_KINDS: [&str; 6] = [
    "deployment",
    "replicationcontroller",
    "replicaset",
    "job",
    "daemonset",
    "statefulset",
];

/// Annotations that apply only to the pod or only to the namespace.
const NOT_INHERITED: [&str; 8] = [
    // A label of namespaces. As an annotation it has no effect.
    label::ADMISSION_WEBHOOKS,
    annotation::DEBUG_IMAGE,
    annotation::DEBUG_IMAGE_VERSION,
    annotation::DEBUG_IMAGE_PULL_POLICY,
    annotation::CLOSE_WAIT_TIMEOUT,
    annotation::PROXY_CPU_RATIO_LIMIT,
    annotation::ENABLE_GATEWAY,
    annotation::GATEWAY_EXPORTED_SERVICES,
];
