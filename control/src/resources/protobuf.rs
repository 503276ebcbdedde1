//! Kubernetes' protobuf encoding of pods and of metadata. Encoding it costs an API server about half as much CPU as JSON.
//!
//! The messages declare only the fields that are used; decoding skips all others. They become the types of
//! `k8s-openapi`, so both encodings are checked and pruned by the same code. For a field that is not set, an API server writes
//! the empty value. Here an empty string and an empty list of conditions become `None`, which JSON gives for such a field. The
//! code that uses the other fields treats an empty value like an absent one. Free text can contain bytes that are not UTF-8.
//! They are replaced, as in JSON.
//!
//! Source: `generated.proto` of `k8s.io/api/core/v1`, `k8s.io/apimachinery/pkg/apis/meta/v1` and
//! `k8s.io/apimachinery/pkg/util/intstr`.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use k8s_openapi::apimachinery::pkg::util::intstr;
use k8s_openapi::jiff::Timestamp;
use prost::Message;

use crate::resources::workload::{self, Node, PartialObjectMetadata};
use crate::resources::{Kind, Object, normalize_scope};

/// Returns whether [`decode`] reads a kind. Custom resources have no protobuf encoding; Services, Endpoints and EndpointSlices
/// have one, but are read as JSON.
pub fn is_decodable(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Pod | Kind::Node | Kind::Namespace | Kind::ReplicaSet | Kind::Job
    )
}

/// Decodes an object of a kind that [`is_decodable`]. It can be a `PartialObjectMetadata`, except for pods.
///
/// # Errors
/// Fails like [`resources::decode`](crate::resources::decode).
pub fn decode(kind: Kind, bytes: &[u8]) -> Result<Object, String> {
    let metadata = || -> Result<meta::ObjectMeta, String> {
        let object = MetadataOnly::decode(bytes).map_err(|error| error.to_string())?;
        Ok(object.metadata.unwrap_or_default().into())
    };
    let partial = || PartialObjectMetadata::from_metadata(metadata()?).map(Arc::new);
    let object = match kind {
        Kind::Pod => {
            let pod = Pod::decode(bytes).map_err(|error| error.to_string())?;
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
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(message, optional, tag = "8")]
    creation_timestamp: Option<Time>,
    #[prost(message, optional, tag = "9")]
    deletion_timestamp: Option<Time>,
    #[prost(btree_map = "string, string", tag = "11")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, bytes", tag = "12")]
    annotations: BTreeMap<String, Vec<u8>>,
    #[prost(message, repeated, tag = "13")]
    owner_references: Vec<OwnerReference>,
}

#[derive(Clone, PartialEq, Message)]
struct OwnerReference {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "3")]
    name: String,
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

impl From<ObjectMeta> for meta::ObjectMeta {
    fn from(meta: ObjectMeta) -> Self {
        let owner = |owner: OwnerReference| meta::OwnerReference {
            kind: owner.kind,
            name: owner.name,
            ..Default::default()
        };
        let annotations = meta.annotations.into_iter();
        Self {
            name: not_empty(meta.name),
            namespace: not_empty(meta.namespace),
            resource_version: not_empty(meta.resource_version),
            // An object without this time has an empty message.
            creation_timestamp: meta.creation_timestamp.filter(|time| time.seconds != 0).map(Into::into),
            deletion_timestamp: meta.deletion_timestamp.map(Into::into),
            labels: Some(meta.labels),
            annotations: Some(annotations.map(|(key, value)| (key, text(&value))).collect()),
            owner_references: Some(meta.owner_references.into_iter().map(owner).collect()),
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
            conditions: (!conditions.is_empty()).then_some(conditions),
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
            value: not_empty(text(&variable.value)),
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
            path: not_empty(text(&get.path)),
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

fn convert<T: Into<U>, U>(list: Vec<T>) -> Vec<U> {
    list.into_iter().map(Into::into).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn not_empty(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}
