//! The messages around objects in Kubernetes' protobuf encoding.
//!
//! Source: `generated.proto` of `k8s.io/apimachinery/pkg/runtime` and `k8s.io/apimachinery/pkg/apis/meta/v1`.

use bytes::Bytes;
use prost::Message;

/// A message with the kind of its object.
pub(crate) struct TypedObject {
    pub(crate) kind: String,
    pub(crate) message: Bytes,
}

impl TypedObject {
    /// Reads a body. `None` if it is not in this encoding.
    pub(crate) fn parse(body: &Bytes) -> Result<Option<Self>, prost::DecodeError> {
        if !body.starts_with(PREFIX) {
            return Ok(None);
        }
        let unknown = Unknown::decode(body.slice(PREFIX.len()..))?;
        Ok(Some(Self {
            kind: unknown.type_meta.unwrap_or_default().kind,
            message: unknown.raw,
        }))
    }
}

/// `k8s.io/apimachinery/pkg/runtime.Unknown`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Unknown {
    #[prost(message, optional, tag = "1")]
    pub(crate) type_meta: Option<TypeMeta>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) raw: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TypeMeta {
    #[prost(string, tag = "2")]
    pub(crate) kind: String,
}

/// A list of any kind.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct List {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<ListMeta>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(crate) items: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListMeta {
    #[prost(string, tag = "2")]
    pub(crate) resource_version: String,
    #[prost(string, tag = "3")]
    pub(crate) r#continue: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchEvent {
    #[prost(string, tag = "1")]
    pub(crate) r#type: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) object: Option<RawExtension>,
}

/// `k8s.io/apimachinery/pkg/runtime.RawExtension`. Contains a body with prefix.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) raw: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(string, tag = "3")]
    pub(crate) message: String,
    #[prost(int32, tag = "6")]
    pub(crate) code: i32,
}

/// An object of any kind, of which only the head of its metadata is decoded.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ObjectWithHead {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<Head>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Head {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "3")]
    pub(crate) namespace: String,
    #[prost(string, tag = "6")]
    pub(crate) resource_version: String,
}

/// An object of any kind, of which only the managed fields are decoded.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ObjectWithManagedFields {
    #[prost(message, optional, tag = "1")]
    pub(crate) metadata: Option<ManagedFields>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ManagedFields {
    #[prost(message, repeated, tag = "17")]
    pub(crate) managed_fields: Vec<ManagedField>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ManagedField {
    #[prost(string, tag = "2")]
    pub(crate) operation: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) time: Option<Time>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Time {
    #[prost(int64, tag = "1")]
    pub(crate) seconds: i64,
}

/// The first bytes of each body.
pub(crate) const PREFIX: &[u8] = b"k8s\0";
