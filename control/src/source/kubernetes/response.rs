//! Responses of the API server: pages of lists, lines of watches, errors. Objects are decoded one at a time.

use std::borrow::Cow;

use bytes::{Buf, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::resources::labels::Labels;
use crate::resources::unreadable::Unreadable;
use crate::resources::{self, Kind, Object};
use crate::source::kubernetes::kinds::ObjectDetail;

#[derive(Deserialize)]
pub(super) struct ListPage<'a> {
    pub(super) metadata: ListMeta,
    /// `null` in an empty list of metadata. A response without this field is not a list.
    #[serde(borrow, deserialize_with = "Option::deserialize")]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMeta {
    pub(super) resource_version: String,
    /// The token of the next page. Empty or absent on the last page.
    #[serde(default)]
    pub(super) r#continue: String,
}

#[derive(Deserialize)]
pub(super) struct ApiGroupList {
    groups: Vec<ApiGroup>,
}

#[derive(Deserialize)]
struct ApiGroup {
    name: String,
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

/// The resources of one version of a group in discovery.
#[derive(Deserialize)]
pub(super) struct ApiResourceList {
    resources: Vec<ApiResource>,
}

#[derive(Deserialize)]
struct ApiResource {
    /// The plural name.
    name: String,
}

impl ApiGroupList {
    /// Returns the versions of a group, which are none if the group does not exist.
    pub(super) fn group_versions(self, name: &str) -> Vec<String> {
        let matching_groups = self.groups.into_iter().filter(|group| group.name == name);
        matching_groups
            .flat_map(|group| group.versions)
            .map(|version| version.version)
            .collect()
    }
}

impl ApiResourceList {
    pub(super) fn contains(&self, plural: &str) -> bool {
        self.resources.iter().any(|resource| resource.name == plural)
    }
}

#[derive(Deserialize)]
pub(super) struct WatchEvent<'a> {
    pub(super) r#type: WatchEventType,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum WatchEventType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

/// The body of an error response.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StatusError {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}

/// An object of which only the metadata is decoded.
pub(super) struct RawObject<'a> {
    text: &'a str,
    metadata: &'a str,
    pub(super) head: ObjectHead<'a>,
}

/// The metadata that a source reads.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectHead<'a> {
    #[serde(borrow, default)]
    pub(super) name: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) namespace: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) resource_version: Cow<'a, str>,
    #[serde(borrow, default)]
    managed_fields: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct MetadataOnly<'a> {
    #[serde(borrow)]
    metadata: &'a RawValue,
}

#[derive(Deserialize)]
struct ManagedField<'a> {
    #[serde(borrow, default)]
    operation: Cow<'a, str>,
    #[serde(borrow, default)]
    time: Cow<'a, str>,
}

impl<'a> RawObject<'a> {
    pub(super) fn parse(object: &'a RawValue) -> Result<Self, serde_json::Error> {
        let text = object.get();
        let metadata = serde_json::from_str::<MetadataOnly<'_>>(text)?.metadata.get();
        let head = serde_json::from_str(metadata)?;
        Ok(Self { text, metadata, head })
    }

    /// Returns the time of the last `Update` in `metadata.managedFields`. Entries of `Apply` are ignored.
    pub(super) fn last_updated_at(&self) -> Option<OffsetDateTime> {
        let fields: Vec<ManagedField<'_>> = serde_json::from_str(self.head.managed_fields?.get()).ok()?;
        let updates = fields.iter().filter(|field| field.operation == "Update");
        updates
            .filter_map(|field| OffsetDateTime::parse(&field.time, &Rfc3339).ok())
            .max()
    }

    /// Decodes the object and removes the parts that are not used.
    pub(super) fn decode(&self, kind: Kind, detail: ObjectDetail) -> Result<Object, serde_json::Error> {
        let text = match detail {
            ObjectDetail::Full => self.without_managed_fields(self.text),
            // The API server returns a `PartialObjectMetadata`. It is decoded as an object that has only metadata.
            ObjectDetail::Metadata => format!("{{\"metadata\":{}}}", self.without_managed_fields(self.metadata)).into(),
        };
        let mut decoded = resources::decode(kind, &mut serde_json::Deserializer::from_str(&text))?;
        prune(kind, detail, &mut decoded);
        Ok(decoded)
    }

    /// Returns what is known about an object that cannot be decoded. `None` for objects that do not concern the mesh.
    pub(super) fn unreadable(&self, kind: Kind, reason: &str) -> Option<Unreadable> {
        let object: serde_json::Value = serde_json::from_str(self.text).unwrap_or_default();
        let mut unreadable = Unreadable::from_value(kind, &object, reason)?;
        if let Some(placeholder) = &mut unreadable.placeholder {
            prune(kind, ObjectDetail::Full, placeholder);
        }
        Some(unreadable)
    }

    /// Removes `metadata.managedFields`, which is large and is not used after decoding.
    fn without_managed_fields(&self, text: &'a str) -> Cow<'a, str> {
        let Some(fields) = self.head.managed_fields.map(RawValue::get) else {
            return text.into();
        };
        // `fields` is a slice of `text`.
        let start = fields.as_ptr().addr() - text.as_ptr().addr();
        [&text[..start], "null", &text[start + fields.len()..]].concat().into()
    }
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

/// Splits a byte stream into lines.
#[derive(Default)]
pub(super) struct LineBuffer {
    bytes: BytesMut,
    /// The number of bytes that are known to contain no line end.
    n_searched: usize,
}

impl LineBuffer {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Passes all complete lines to `take`.
    pub(super) fn drain_lines(&mut self, mut take: impl FnMut(&[u8])) {
        while let Some(end) = self.bytes[self.n_searched..].iter().position(|byte| *byte == b'\n') {
            let end = self.n_searched + end;
            take(&self.bytes[..end]);
            self.bytes.advance(end + 1);
            self.n_searched = 0;
        }
        self.n_searched = self.bytes.len();
        if self.bytes.is_empty() && self.bytes.capacity() > MAX_RETAINED_CAPACITY {
            self.bytes = BytesMut::new();
        }
    }
}

/// A larger buffer is freed after use.
const MAX_RETAINED_CAPACITY: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn decode(kind: Kind, detail: ObjectDetail, object: &RawValue) -> Object {
        RawObject::parse(object).unwrap().decode(kind, detail).unwrap()
    }

    #[test]
    fn lines_are_split_across_chunks() {
        let text = b"one\ntwo\n\nthree\nrest";
        for size in 1..text.len() {
            let mut lines = LineBuffer::default();
            let mut seen = Vec::new();
            for chunk in text.chunks(size) {
                lines.push(chunk);
                lines.drain_lines(|line| seen.push(String::from_utf8(line.to_vec()).unwrap()));
            }
            assert_eq!(seen, ["one", "two", "", "three"], "in chunks of {size}");
        }
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
        assert_eq!(RawObject::parse(&object).unwrap().last_updated_at(), Some(expected));
        assert_eq!(
            RawObject::parse(&raw(r#"{"metadata":{}}"#)).unwrap().last_updated_at(),
            None
        );
    }
}
