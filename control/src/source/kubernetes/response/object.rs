//! One object of a response, of which only a part of the metadata is decoded.

use std::borrow::Cow;

use bytes::Bytes;
use prost::Message;
use serde::Deserialize;
use serde::de::value::Error as UnknownVariant;
use serde_json::json;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::resources::labels::Labels;
use crate::resources::unreadable::Unreadable;
use crate::resources::{self, Kind, Object};
use crate::source::kubernetes::kinds::ObjectDetail;
use crate::source::kubernetes::response::protobuf;

/// Why a response or an object cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Protobuf(#[from] prost::DecodeError),
    #[error("{0}")]
    Object(String),
    #[error("the response is a {0}, not a list")]
    NotAList(String),
    #[error("the type of a watch event is unknown")]
    EventType(#[source] UnknownVariant),
    #[error("the object of a watch event is not in protobuf")]
    NotProtobuf,
    #[error("an event of the watch has {0} bytes")]
    EventTooLong(usize),
}

/// An object as it is in the response.
pub(crate) enum EncodedObject<'a> {
    Json(&'a RawValue),
    Protobuf(Bytes),
}

/// An object of which only the head is decoded.
pub(crate) struct PartlyDecodedObject<'a> {
    pub(crate) head: ObjectHead<'a>,
    content: Content<'a>,
}

/// The metadata that a source reads.
pub(crate) struct ObjectHead<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) namespace: Cow<'a, str>,
    pub(crate) resource_version: Cow<'a, str>,
}

enum Content<'a> {
    Json {
        text: &'a str,
        metadata: &'a str,
        managed_fields: Option<&'a RawValue>,
    },
    Protobuf(Bytes),
}

#[derive(Deserialize)]
struct MetadataOnly<'a> {
    #[serde(borrow)]
    metadata: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JsonHead<'a> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    namespace: Cow<'a, str>,
    #[serde(borrow, default)]
    resource_version: Cow<'a, str>,
    #[serde(borrow, default)]
    managed_fields: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ManagedField<'a> {
    #[serde(borrow, default)]
    operation: Cow<'a, str>,
    #[serde(borrow, default)]
    time: Cow<'a, str>,
}

impl<'a> PartlyDecodedObject<'a> {
    pub(crate) fn parse(object: EncodedObject<'a>) -> Result<Self, DecodeError> {
        match object {
            EncodedObject::Json(object) => {
                let text = object.get();
                let metadata = serde_json::from_str::<MetadataOnly<'_>>(text)?.metadata.get();
                let head: JsonHead<'_> = serde_json::from_str(metadata)?;
                let managed_fields = head.managed_fields;
                Ok(Self {
                    head: ObjectHead {
                        name: head.name,
                        namespace: head.namespace,
                        resource_version: head.resource_version,
                    },
                    content: Content::Json {
                        text,
                        metadata,
                        managed_fields,
                    },
                })
            }
            EncodedObject::Protobuf(message) => {
                let head = protobuf::ObjectWithHead::decode(&*message)?
                    .metadata
                    .unwrap_or_default();
                Ok(Self {
                    head: ObjectHead {
                        name: head.name.into(),
                        namespace: head.namespace.into(),
                        resource_version: head.resource_version.into(),
                    },
                    content: Content::Protobuf(message),
                })
            }
        }
    }

    /// Returns the time of the last `Update` in `metadata.managedFields`. Entries of `Apply` are ignored.
    pub(crate) fn last_updated_at(&self) -> Option<OffsetDateTime> {
        match &self.content {
            Content::Json { managed_fields, .. } => {
                let fields: Vec<ManagedField<'_>> = serde_json::from_str((*managed_fields)?.get()).ok()?;
                let updates = fields.iter().filter(|field| field.operation == UPDATE);
                updates
                    .filter_map(|field| OffsetDateTime::parse(&field.time, &Rfc3339).ok())
                    .max()
            }
            Content::Protobuf(message) => {
                let fields = protobuf::ObjectWithManagedFields::decode(&**message)
                    .ok()?
                    .metadata?
                    .managed_fields;
                let updates = fields.iter().filter(|field| field.operation == UPDATE);
                let newest = updates
                    .filter_map(|field| field.time.as_ref())
                    .map(|time| time.seconds)
                    .max();
                OffsetDateTime::from_unix_timestamp(newest?).ok()
            }
        }
    }

    /// Decodes the object and removes the parts that are not used.
    pub(crate) fn decode(&self, kind: Kind, detail: ObjectDetail) -> Result<Object, DecodeError> {
        let mut decoded = match &self.content {
            Content::Json {
                text,
                metadata,
                managed_fields,
            } => {
                let text = match detail {
                    ObjectDetail::Full => without_managed_fields(text, *managed_fields),
                    // The API server returns a `PartialObjectMetadata`. It is decoded as an object that has only metadata.
                    ObjectDetail::Metadata => {
                        format!("{{\"metadata\":{}}}", without_managed_fields(metadata, *managed_fields)).into()
                    }
                };
                resources::decode(kind, &mut serde_json::Deserializer::from_str(&text))?
            }
            Content::Protobuf(message) => resources::protobuf::decode(kind, message).map_err(DecodeError::Object)?,
        };
        prune(kind, detail, &mut decoded);
        Ok(decoded)
    }

    /// Returns the readable parts of an object that cannot be decoded. `None` if the object does not concern the mesh.
    pub(crate) fn unreadable(&self, kind: Kind, reason: &str) -> Option<Unreadable> {
        let object = match &self.content {
            Content::Json { text, .. } => serde_json::from_str(text).unwrap_or_default(),
            // The kinds in protobuf need no placeholder.
            Content::Protobuf(_) => json!({ "metadata": { "name": self.head.name, "namespace": self.head.namespace } }),
        };
        let mut unreadable = Unreadable::from_value(kind, &object, reason)?;
        if let Some(placeholder) = &mut unreadable.placeholder {
            prune(kind, ObjectDetail::Full, placeholder);
        }
        Some(unreadable)
    }
}

/// Replaces `metadata.managedFields` by `null`: it is large and is not used after decoding. `fields` must be a slice of `text`.
fn without_managed_fields<'a>(text: &'a str, fields: Option<&RawValue>) -> Cow<'a, str> {
    let Some(fields) = fields.map(RawValue::get) else {
        return text.into();
    };
    let start = fields.as_ptr().addr() - text.as_ptr().addr();
    [&text[..start], "null", &text[start + fields.len()..]].concat().into()
}

/// Removes unused parts of the metadata.
fn prune(kind: Kind, detail: ObjectDetail, object: &mut Object) {
    let meta = object.meta_mut();
    // Node heartbeats and most updates of a pod's status change only the version. With it, each would count as a change.
    if detail == ObjectDetail::Metadata || kind == Kind::Pod {
        meta.version = String::new();
    }
    if detail == ObjectDetail::Metadata && kind != Kind::Node {
        meta.labels = Labels::default();
    }
}

/// The operation in managed fields of all writes except those by server-side apply, which have `Apply`.
const UPDATE: &str = "Update";

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn decode(kind: Kind, detail: ObjectDetail, object: &RawValue) -> Object {
        PartlyDecodedObject::parse(EncodedObject::Json(object))
            .unwrap()
            .decode(kind, detail)
            .unwrap()
    }

    #[test]
    fn objects_are_pruned_to_the_fields_in_use() {
        let object = raw(
            r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"n","resourceVersion":"7",
               "managedFields":[{"fieldsV1":{"f:metadata":{}}}],"labels":{"topology.kubernetes.io/zone":"east"},"annotations":{"a":"b"}}}"#,
        );
        let Object::Node(node) = decode(Kind::Node, ObjectDetail::Metadata, &object) else {
            panic!("not a node");
        };
        assert_eq!(node.zone.as_deref(), Some("east"));
        assert!(node.meta.annotations.is_empty() && node.meta.version.is_empty());
        let object = raw(
            r#"{"metadata":{"name":"web","namespace":"shop","resourceVersion":"8","labels":{"app":"web"},"annotations":{
               "kubectl.kubernetes.io/last-applied-configuration":"{}","linkerd.io/inject":"enabled","config.linkerd.io/opaque-ports":"25"},"managedFields":[7]},
               "spec":{"clusterIP":"10.0.0.1","ports":[{"port":80}]}}"#,
        );
        let decoded = decode(Kind::Service, ObjectDetail::Full, &object);
        let keys: Vec<_> = decoded.meta().annotations.iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["config.linkerd.io/opaque-ports"]);
        assert_eq!(decoded.meta().version, "8");
        assert_eq!(decoded.meta().label("app"), Some("web"));
    }

    #[test]
    fn the_newest_update_says_when_an_object_changed() {
        let object = raw(r#"{"metadata":{"name":"a","managedFields":[
               {"operation":"Update","time":"2025-06-01T00:00:01Z"},{"operation":"Update","time":"2025-06-01T00:00:03Z"},
               {"operation":"Apply","time":"2025-06-01T00:00:09Z"}]}}"#);
        let expected = OffsetDateTime::parse("2025-06-01T00:00:03Z", &Rfc3339).unwrap();
        assert_eq!(
            PartlyDecodedObject::parse(EncodedObject::Json(&object))
                .unwrap()
                .last_updated_at(),
            Some(expected)
        );
        assert_eq!(
            PartlyDecodedObject::parse(EncodedObject::Json(&raw(r#"{"metadata":{}}"#)))
                .unwrap()
                .last_updated_at(),
            None
        );
    }
}
