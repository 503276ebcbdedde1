//! Kubernetes' protobuf encoding of pods, EndpointSlices and metadata. Encoding it costs an API server about half as much CPU
//! as JSON.
//!
//! The messages declare only the fields that are used; decoding skips all others. EndpointSlices have all fields that clients
//! can write, because this control plane replaces the slices that it writes as a whole. The messages become the types of
//! `k8s-openapi`, so both encodings are checked and pruned by the same code. For a field that is not set, an API server writes
//! the empty value, except for fields that are `optional` here. An empty value becomes `None`, which JSON gives for such a
//! field, unless the code that uses the field treats both alike. Free text can contain bytes that are not UTF-8. They are
//! replaced, as in JSON.
//!
//! Source: `generated.proto` of `k8s.io/api/core/v1`, `k8s.io/api/discovery/v1`, `k8s.io/apimachinery/pkg/apis/meta/v1` and
//! `k8s.io/apimachinery/pkg/util/intstr`.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::util::intstr;
use k8s_openapi::jiff::Timestamp;
use prost::Message;

use crate::resources::workload::{self, Node, PartialObjectMetadata};
use crate::resources::{Kind, Object, normalize_scope, service};

/// Returns whether [`decode`] reads a kind. Custom resources have no protobuf encoding; Services and Endpoints have one, but
/// are read as JSON.
pub fn is_decodable(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::EndpointSlice | Kind::Pod | Kind::Node | Kind::Namespace | Kind::ReplicaSet | Kind::Job
    )
}

/// Decodes an object of a kind that [`is_decodable`]. It can be a `PartialObjectMetadata`, except for pods and EndpointSlices.
///
/// # Errors
/// Fails like [`resources::decode`](crate::resources::decode).
pub fn decode(kind: Kind, bytes: &[u8]) -> Result<Object, String> {
    let metadata = || -> Result<meta::ObjectMeta, String> {
        let object: MetadataOnly = decode_message(bytes)?;
        Ok(object.metadata.unwrap_or_default().into())
    };
    let partial = || PartialObjectMetadata::from_metadata(metadata()?).map(Arc::new);
    let object = match kind {
        Kind::EndpointSlice => {
            let slice: EndpointSlice = decode_message(bytes)?;
            Object::EndpointSlice(service::EndpointSlice::from_kubernetes(slice.into())?.into())
        }
        Kind::Pod => {
            let pod: Pod = decode_message(bytes)?;
            Object::Pod(workload::Pod::from_kubernetes(pod.into())?.into())
        }
        Kind::Node => Object::Node(Node::from_metadata(metadata()?)?.into()),
        Kind::Namespace => Object::Namespace(partial()?),
        Kind::ReplicaSet => Object::ReplicaSet(partial()?),
        Kind::Job => Object::Job(partial()?),
        kind => return Err(format!("decoding {} from protobuf is not supported", kind.info().name)),
    };
    Ok(normalize_scope(object))
}

fn decode_message<M: Message + Default>(bytes: &[u8]) -> Result<M, String> {
    M::decode(bytes).map_err(|error| error.to_string())
}

/// Any object: all of them have their metadata in the same field.
#[derive(Clone, PartialEq, Message)]
struct MetadataOnly {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
}

#[derive(Clone, PartialEq, Message)]
struct ObjectMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    generate_name: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(string, tag = "5")]
    uid: String,
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(int64, tag = "7")]
    generation: i64,
    #[prost(message, optional, tag = "8")]
    creation_timestamp: Option<Time>,
    #[prost(message, optional, tag = "9")]
    deletion_timestamp: Option<Time>,
    #[prost(int64, optional, tag = "10")]
    deletion_grace_period_seconds: Option<i64>,
    #[prost(btree_map = "string, string", tag = "11")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, bytes", tag = "12")]
    annotations: BTreeMap<String, Vec<u8>>,
    #[prost(message, repeated, tag = "13")]
    owner_references: Vec<OwnerReference>,
    #[prost(string, repeated, tag = "14")]
    finalizers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct OwnerReference {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(bytes, tag = "4")]
    uid: Vec<u8>,
    #[prost(bytes, tag = "5")]
    api_version: Vec<u8>,
    #[prost(bool, optional, tag = "6")]
    controller: Option<bool>,
    #[prost(bool, optional, tag = "7")]
    block_owner_deletion: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct Time {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Pod {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    spec: Option<PodSpec>,
    #[prost(message, optional, tag = "3")]
    status: Option<PodStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct PodSpec {
    #[prost(message, repeated, tag = "2")]
    containers: Vec<Container>,
    #[prost(string, tag = "8")]
    service_account_name: String,
    #[prost(string, tag = "9")]
    service_account: String,
    #[prost(string, tag = "10")]
    node_name: String,
    #[prost(bool, tag = "11")]
    host_network: bool,
    #[prost(string, tag = "16")]
    hostname: String,
    #[prost(string, tag = "17")]
    subdomain: String,
    #[prost(message, repeated, tag = "20")]
    init_containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct PodStatus {
    #[prost(string, tag = "1")]
    phase: String,
    #[prost(message, repeated, tag = "2")]
    conditions: Vec<PodCondition>,
    #[prost(string, tag = "5")]
    host_ip: String,
    #[prost(string, tag = "6")]
    pod_ip: String,
    #[prost(message, repeated, tag = "12")]
    pod_ips: Vec<Ip>,
    #[prost(message, repeated, tag = "16")]
    host_ips: Vec<Ip>,
}

#[derive(Clone, PartialEq, Message)]
struct PodCondition {
    #[prost(string, tag = "1")]
    r#type: String,
    #[prost(string, tag = "2")]
    status: String,
}

/// `PodIP` or `HostIP`.
#[derive(Clone, PartialEq, Message)]
struct Ip {
    #[prost(string, tag = "1")]
    ip: String,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "6")]
    ports: Vec<ContainerPort>,
    #[prost(message, repeated, tag = "7")]
    env: Vec<EnvVar>,
    #[prost(message, optional, tag = "10")]
    liveness_probe: Option<Probe>,
    #[prost(message, optional, tag = "11")]
    readiness_probe: Option<Probe>,
    #[prost(message, optional, tag = "22")]
    startup_probe: Option<Probe>,
    #[prost(string, optional, tag = "24")]
    restart_policy: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerPort {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "2")]
    host_port: i32,
    #[prost(int32, tag = "3")]
    container_port: i32,
    #[prost(string, tag = "4")]
    protocol: String,
}

#[derive(Clone, PartialEq, Message)]
struct EnvVar {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes, tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Probe {
    #[prost(message, optional, tag = "1")]
    handler: Option<ProbeHandler>,
}

#[derive(Clone, PartialEq, Message)]
struct ProbeHandler {
    #[prost(message, optional, tag = "2")]
    http_get: Option<HttpGetAction>,
}

#[derive(Clone, PartialEq, Message)]
struct HttpGetAction {
    #[prost(bytes, tag = "1")]
    path: Vec<u8>,
    #[prost(message, optional, tag = "2")]
    port: Option<IntOrString>,
}

#[derive(Clone, PartialEq, Message)]
struct IntOrString {
    /// 0 for a number, 1 for a string.
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int32, tag = "2")]
    number: i32,
    #[prost(string, tag = "3")]
    string: String,
}

#[derive(Clone, PartialEq, Message)]
struct EndpointSlice {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
    #[prost(message, repeated, tag = "2")]
    endpoints: Vec<Endpoint>,
    #[prost(message, repeated, tag = "3")]
    ports: Vec<EndpointPort>,
    #[prost(string, tag = "4")]
    address_type: String,
}

#[derive(Clone, PartialEq, Message)]
struct Endpoint {
    #[prost(string, repeated, tag = "1")]
    addresses: Vec<String>,
    #[prost(message, optional, tag = "2")]
    conditions: Option<EndpointConditions>,
    #[prost(string, optional, tag = "3")]
    hostname: Option<String>,
    #[prost(message, optional, tag = "4")]
    target_ref: Option<ObjectReference>,
    #[prost(string, optional, tag = "6")]
    node_name: Option<String>,
    #[prost(bytes, optional, tag = "7")]
    zone: Option<Vec<u8>>,
    #[prost(message, optional, tag = "8")]
    hints: Option<EndpointHints>,
}

#[derive(Clone, PartialEq, Message)]
struct EndpointConditions {
    #[prost(bool, optional, tag = "1")]
    ready: Option<bool>,
    #[prost(bool, optional, tag = "2")]
    serving: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    terminating: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct ObjectReference {
    #[prost(bytes, tag = "1")]
    kind: Vec<u8>,
    #[prost(bytes, tag = "2")]
    namespace: Vec<u8>,
    #[prost(bytes, tag = "3")]
    name: Vec<u8>,
    #[prost(bytes, tag = "4")]
    uid: Vec<u8>,
    #[prost(bytes, tag = "5")]
    api_version: Vec<u8>,
    #[prost(bytes, tag = "6")]
    resource_version: Vec<u8>,
    #[prost(bytes, tag = "7")]
    field_path: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct EndpointHints {
    #[prost(message, repeated, tag = "1")]
    for_zones: Vec<HintTarget>,
    #[prost(message, repeated, tag = "2")]
    for_nodes: Vec<HintTarget>,
}

/// `ForZone` or `ForNode`.
#[derive(Clone, PartialEq, Message)]
struct HintTarget {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct EndpointPort {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    protocol: Option<String>,
    #[prost(int32, optional, tag = "3")]
    port: Option<i32>,
    #[prost(string, optional, tag = "4")]
    app_protocol: Option<String>,
}

impl From<ObjectMeta> for meta::ObjectMeta {
    fn from(meta: ObjectMeta) -> Self {
        let owner = |owner: OwnerReference| meta::OwnerReference {
            api_version: text(owner.api_version),
            block_owner_deletion: owner.block_owner_deletion,
            controller: owner.controller,
            kind: owner.kind,
            name: owner.name,
            uid: text(owner.uid),
        };
        let owners: Vec<_> = meta.owner_references.into_iter().map(owner).collect();
        let annotations = meta.annotations.into_iter();
        let annotations: BTreeMap<_, _> = annotations.map(|(key, value)| (key, text(value))).collect();
        Self {
            name: not_empty(meta.name),
            generate_name: not_empty(meta.generate_name),
            namespace: not_empty(meta.namespace),
            uid: not_empty(meta.uid),
            resource_version: not_empty(meta.resource_version),
            generation: not_empty(meta.generation),
            // An object without this time has an empty message.
            creation_timestamp: meta.creation_timestamp.filter(|time| time.seconds != 0).map(Into::into),
            deletion_timestamp: meta.deletion_timestamp.map(Into::into),
            deletion_grace_period_seconds: meta.deletion_grace_period_seconds,
            labels: not_empty(meta.labels),
            annotations: not_empty(annotations),
            owner_references: not_empty(owners),
            finalizers: not_empty(meta.finalizers),
            ..Default::default()
        }
    }
}

impl From<Time> for meta::Time {
    fn from(time: Time) -> Self {
        Self(Timestamp::from_second(time.seconds).unwrap_or_default())
    }
}

impl From<Pod> for core::Pod {
    fn from(pod: Pod) -> Self {
        Self {
            metadata: pod.metadata.unwrap_or_default().into(),
            spec: pod.spec.map(Into::into),
            status: pod.status.map(Into::into),
        }
    }
}

impl From<PodSpec> for core::PodSpec {
    fn from(spec: PodSpec) -> Self {
        Self {
            containers: convert(spec.containers),
            service_account_name: not_empty(spec.service_account_name),
            service_account: not_empty(spec.service_account),
            node_name: not_empty(spec.node_name),
            host_network: Some(spec.host_network),
            hostname: not_empty(spec.hostname),
            subdomain: not_empty(spec.subdomain),
            init_containers: Some(convert(spec.init_containers)),
            ..Default::default()
        }
    }
}

impl From<PodStatus> for core::PodStatus {
    fn from(status: PodStatus) -> Self {
        let host_ip = |Ip { ip }| core::HostIP { ip };
        let pod_ip = |Ip { ip }| core::PodIP { ip };
        let condition = |condition: PodCondition| core::PodCondition {
            type_: condition.r#type,
            status: condition.status,
            ..Default::default()
        };
        let conditions: Vec<_> = status.conditions.into_iter().map(condition).collect();
        Self {
            phase: not_empty(status.phase),
            conditions: not_empty(conditions),
            host_ip: not_empty(status.host_ip),
            pod_ip: not_empty(status.pod_ip),
            pod_ips: Some(status.pod_ips.into_iter().map(pod_ip).collect()),
            host_ips: Some(status.host_ips.into_iter().map(host_ip).collect()),
            ..Default::default()
        }
    }
}

impl From<Container> for core::Container {
    fn from(container: Container) -> Self {
        Self {
            name: container.name,
            ports: Some(convert(container.ports)),
            env: Some(convert(container.env)),
            liveness_probe: container.liveness_probe.map(Into::into),
            readiness_probe: container.readiness_probe.map(Into::into),
            startup_probe: container.startup_probe.map(Into::into),
            restart_policy: container.restart_policy,
            ..Default::default()
        }
    }
}

impl From<ContainerPort> for core::ContainerPort {
    fn from(port: ContainerPort) -> Self {
        Self {
            name: not_empty(port.name),
            host_port: Some(port.host_port),
            container_port: port.container_port,
            protocol: not_empty(port.protocol),
            ..Default::default()
        }
    }
}

impl From<EnvVar> for core::EnvVar {
    fn from(variable: EnvVar) -> Self {
        Self {
            name: variable.name,
            value: not_empty(text(variable.value)),
            ..Default::default()
        }
    }
}

impl From<Probe> for core::Probe {
    fn from(probe: Probe) -> Self {
        Self {
            http_get: probe.handler.and_then(|handler| handler.http_get).map(Into::into),
            ..Default::default()
        }
    }
}

impl From<HttpGetAction> for core::HTTPGetAction {
    fn from(get: HttpGetAction) -> Self {
        Self {
            path: not_empty(text(get.path)),
            port: get.port.unwrap_or_default().into(),
            ..Default::default()
        }
    }
}

impl From<IntOrString> for intstr::IntOrString {
    fn from(value: IntOrString) -> Self {
        match value.r#type {
            0 => Self::Int(value.number),
            _ => Self::String(value.string),
        }
    }
}

impl From<EndpointSlice> for discovery::EndpointSlice {
    fn from(slice: EndpointSlice) -> Self {
        Self {
            address_type: slice.address_type,
            endpoints: convert(slice.endpoints),
            metadata: slice.metadata.unwrap_or_default().into(),
            ports: not_empty(convert(slice.ports)),
        }
    }
}

impl From<Endpoint> for discovery::Endpoint {
    fn from(endpoint: Endpoint) -> Self {
        let conditions = |conditions: EndpointConditions| discovery::EndpointConditions {
            ready: conditions.ready,
            serving: conditions.serving,
            terminating: conditions.terminating,
        };
        Self {
            addresses: endpoint.addresses,
            conditions: endpoint.conditions.map(conditions),
            hints: endpoint.hints.map(Into::into),
            hostname: endpoint.hostname,
            node_name: endpoint.node_name,
            target_ref: endpoint.target_ref.map(Into::into),
            zone: endpoint.zone.map(text),
            ..Default::default()
        }
    }
}

impl From<EndpointHints> for discovery::EndpointHints {
    fn from(hints: EndpointHints) -> Self {
        let zone = |HintTarget { name }| discovery::ForZone { name };
        let node = |HintTarget { name }| discovery::ForNode { name };
        Self {
            for_zones: not_empty(hints.for_zones.into_iter().map(zone).collect()),
            for_nodes: not_empty(hints.for_nodes.into_iter().map(node).collect()),
        }
    }
}

impl From<ObjectReference> for core::ObjectReference {
    fn from(reference: ObjectReference) -> Self {
        Self {
            api_version: not_empty(text(reference.api_version)),
            field_path: not_empty(text(reference.field_path)),
            kind: not_empty(text(reference.kind)),
            name: not_empty(text(reference.name)),
            namespace: not_empty(text(reference.namespace)),
            resource_version: not_empty(text(reference.resource_version)),
            uid: not_empty(text(reference.uid)),
        }
    }
}

impl From<EndpointPort> for discovery::EndpointPort {
    fn from(port: EndpointPort) -> Self {
        Self {
            app_protocol: port.app_protocol,
            name: port.name,
            port: port.port,
            protocol: port.protocol,
        }
    }
}

fn convert<T: Into<U>, U>(list: Vec<T>) -> Vec<U> {
    list.into_iter().map(Into::into).collect()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn not_empty<T: Default + PartialEq>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}
