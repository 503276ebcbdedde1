//! Parts of mirrors that are written, and checks of exported Services.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Namespace, Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tulle_core::names::{annotation, label};

use super::inputs::{Exporter, Inputs, Linked, ObjectVersion, Plan, Rejection, Write};
use crate::resources::meta::NamespacedName;

/// Checks whether an exported Service can have a mirror of this name. Plans the namespace of the mirror if it is missing and may be
/// created.
pub(super) fn check_mirror(
    inputs: &Inputs<'_>,
    plan: &mut Plan,
    service: &Service,
    mirror: &NamespacedName,
) -> Result<(), Rejection> {
    let spec = service.spec.as_ref();
    let invalid = |cause: String| Err(Rejection::InvalidService(cause));
    if spec.is_some_and(|spec| spec.type_.as_deref() == Some("ExternalName")) {
        return invalid("a Service of type ExternalName cannot be mirrored".to_owned());
    }
    if spec.is_none_or(|spec| spec.ports.as_ref().is_none_or(Vec::is_empty)) {
        return invalid("the Service has no ports".to_owned());
    }
    check_name_length(mirror)?;
    if !inputs.local.namespaces.contains(&*mirror.namespace) {
        create_namespace(inputs, plan, &mirror.namespace);
        return Err(Rejection::MissingNamespace(mirror.namespace.to_string()));
    }
    Ok(())
}

pub(super) fn check_name_length(mirror: &NamespacedName) -> Result<(), Rejection> {
    let length = mirror.name.len();
    if length > MAX_NAME_LENGTH {
        return Err(Rejection::InvalidService(format!(
            "the name {} of the mirror has {length} characters; at most {MAX_NAME_LENGTH} are accepted",
            mirror.name
        )));
    }
    Ok(())
}

fn create_namespace(inputs: &Inputs<'_>, plan: &mut Plan, name: &str) {
    let Exporter::Linked(Linked { link, .. }) = inputs.exporter else {
        return;
    };
    let step_name = NamespacedName::new("", name);
    let is_planned = plan.steps.iter().any(|step| step.name == step_name);
    if !inputs.may_create_namespaces || is_planned {
        return;
    }
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(mirror_labels(&link.cluster)),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    plan.add_step(step_name, vec![Write::CreateNamespace(Box::new(namespace))]);
}

pub(super) fn copied_labels(inputs: &Inputs<'_>, service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.retain(|name, _| !is_mirror_metadata(name) && !inputs.excluded_labels.contains(name));
    labels
}

pub(super) fn copied_annotations(inputs: &Inputs<'_>, service: &Service) -> BTreeMap<String, String> {
    let mut annotations = service.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|name, _| {
        let is_excluded = NEVER_COPIED_ANNOTATIONS.contains(&name.as_str())
            || is_mirror_metadata(name)
            || inputs.excluded_annotations.contains(name);
        // The opaque-ports annotation is always copied: without it, clients would wait for protocol detection on ports whose server
        // speaks first.
        !is_excluded || name == annotation::OPAQUE_PORTS
    });
    annotations
}

/// Whether a Service must be rewritten, because
/// - its ports differ, or
/// - a wanted label or annotation is missing or has another value, or
/// - it has an unwanted label or annotation that was copied from the exported Service or that controls mirroring.
pub(super) fn differs(existing: &Service, wanted: &Service, exported: &Service) -> bool {
    type Map = Option<BTreeMap<String, String>>;
    let is_left_over = |existing: &Map, wanted: &Map, exported: &Map| {
        let has = |map: &Map, name: &str| map.as_ref().is_some_and(|map| map.contains_key(name));
        let mut names = existing.iter().flatten().map(|(name, _)| name);
        names.any(|name| (is_mirror_metadata(name) || has(exported, name)) && !has(wanted, name))
    };
    let (old, new, source) = (&existing.metadata, &wanted.metadata, &exported.metadata);
    mirror_ports(existing) != mirror_ports(wanted)
        || !contains_all(&old.labels, &new.labels)
        || !contains_all(&old.annotations, &new.annotations)
        || is_left_over(&old.labels, &new.labels, &source.labels)
        || is_left_over(&old.annotations, &new.annotations, &source.annotations)
}

/// The existing Service with the labels, annotations and ports of the wanted Service.
pub(super) fn rewritten(existing: &Service, wanted: Service) -> Service {
    let mut service = existing.clone();
    service.metadata.labels = wanted.metadata.labels;
    service.metadata.annotations = wanted.metadata.annotations;
    service.metadata.managed_fields = None;
    if let (Some(spec), Some(wanted)) = (&mut service.spec, wanted.spec) {
        spec.ports = wanted.ports;
    }
    service
}

pub(super) fn contains_all(
    existing: &Option<BTreeMap<String, String>>,
    wanted: &Option<BTreeMap<String, String>>,
) -> bool {
    let value = |name: &String| existing.as_ref().and_then(|map| map.get(name));
    wanted
        .iter()
        .flatten()
        .all(|(name, wanted)| value(name) == Some(wanted))
}

pub(super) fn mirror_ports(service: &Service) -> Vec<ServicePort> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let ports = ports.map(|port| ServicePort {
        name: port.name.clone(),
        protocol: port.protocol.clone(),
        port: port.port,
        target_port: port.target_port.clone(),
        app_protocol: port.app_protocol.clone(),
        node_port: None,
    });
    ports.collect()
}

pub(in crate::mirror) fn new_service(
    name: &NamespacedName,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    ports: Vec<ServicePort>,
) -> Service {
    Service {
        metadata: new_metadata(name, labels, annotations),
        spec: Some(ServiceSpec {
            ports: Some(ports),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

pub(super) fn new_metadata(
    name: &NamespacedName,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.name.to_string()),
        namespace: Some(name.namespace.to_string()),
        labels: Some(labels),
        annotations: Some(annotations),
        ..ObjectMeta::default()
    }
}

pub(super) fn mirror_labels(cluster: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (label::MIRRORED_SERVICE.to_owned(), "true".to_owned()),
        (label::MIRRORED_CLUSTER.to_owned(), cluster.to_owned()),
    ])
}

pub(super) fn is_mirror_of(metadata: &ObjectMeta, cluster: &str) -> bool {
    has_label(metadata, label::MIRRORED_SERVICE, "true") && has_label(metadata, label::MIRRORED_CLUSTER, cluster)
}

pub(super) fn has_label(metadata: &ObjectMeta, name: &str, value: &str) -> bool {
    let labels = metadata.labels.as_ref();
    labels
        .and_then(|labels| labels.get(name))
        .is_some_and(|found| found == value)
}

pub(in crate::mirror) fn object_name(metadata: &ObjectMeta) -> NamespacedName {
    NamespacedName::new(
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default(),
    )
}

/// The current version of an object.
pub(super) fn object_version(metadata: &ObjectMeta) -> ObjectVersion {
    ObjectVersion {
        name: object_name(metadata),
        uid: metadata.uid.clone(),
        resource_version: metadata.resource_version.clone(),
    }
}

/// Whether a label or annotation of this name controls mirroring. It is never copied, and on mirrors and federated Services only
/// the mirror controllers write it.
fn is_mirror_metadata(name: &str) -> bool {
    name.starts_with("mirror.linkerd.io/") || name.starts_with("multicluster.linkerd.io/")
}

/// Annotations that are never copied, because they apply only to the original in its own cluster.
const NEVER_COPIED_ANNOTATIONS: [&str; 3] = [
    "service.kubernetes.io/topology-aware-hints",
    "service.kubernetes.io/topology-mode",
    "kubectl.kubernetes.io/last-applied-configuration",
];

/// Maximum length of the name of a Service.
const MAX_NAME_LENGTH: usize = 63;
