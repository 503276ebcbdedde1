//! What the API server answers: pages of lists, lines of watches, refusals. Objects stay text until one is decoded.

use std::borrow::Cow;

use bytes::{Buf, BytesMut};
use serde::Deserialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::resources::labels::Labels;
use crate::resources::unreadable::Unreadable;
use crate::resources::{self, Kind, Object};
use crate::source::kubernetes::kinds::Part;

/// A page of a list.
#[derive(Deserialize)]
pub(super) struct Page<'a> {
    pub(super) metadata: PageMeta,
    /// Null where a list of metadata is empty.
    #[serde(borrow, default)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMeta {
    pub(super) resource_version: String,
    /// The token of the next page; empty or absent on the last.
    #[serde(default)]
    pub(super) r#continue: String,
}

/// The groups that discovery has.
#[derive(Deserialize)]
pub(super) struct Groups {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    name: String,
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

/// The kinds that discovery has in one version of a group.
#[derive(Deserialize)]
pub(super) struct Resources {
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    /// In the plural.
    name: String,
}

impl Groups {
    /// The versions of a group, none if there is no such group.
    pub(super) fn versions_of(self, name: &str) -> Vec<String> {
        let of_name = self.groups.into_iter().filter(|group| group.name == name);
        of_name
            .flat_map(|group| group.versions)
            .map(|version| version.version)
            .collect()
    }
}

impl Resources {
    pub(super) fn has(&self, plural: &str) -> bool {
        self.resources.iter().any(|resource| resource.name == plural)
    }
}

/// A line of a watch.
#[derive(Deserialize)]
pub(super) struct Change<'a> {
    pub(super) r#type: ChangeType,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum ChangeType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

/// What an error says of itself.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Refusal {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}

/// An object whose metadata has been looked at; the rest is text still.
pub(super) struct Item<'a> {
    text: &'a str,
    metadata: &'a str,
    pub(super) head: Head<'a>,
}

/// The metadata that a source looks at.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Head<'a> {
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
struct Parts<'a> {
    #[serde(borrow)]
    metadata: &'a RawValue,
}

#[derive(Deserialize)]
struct Field<'a> {
    #[serde(borrow, default)]
    operation: Cow<'a, str>,
    #[serde(borrow, default)]
    time: Cow<'a, str>,
}

impl<'a> Item<'a> {
    pub(super) fn read(object: &'a RawValue) -> Result<Self, serde_json::Error> {
        let text = object.get();
        let metadata = serde_json::from_str::<Parts<'_>>(text)?.metadata.get();
        let head = serde_json::from_str(metadata)?;
        Ok(Self { text, metadata, head })
    }

    /// When the object was last written, as far as it says.
    pub(super) fn changed_at(&self) -> Option<OffsetDateTime> {
        let fields: Vec<Field<'_>> = serde_json::from_str(self.head.managed_fields?.get()).ok()?;
        let updates = fields.iter().filter(|field| field.operation == "Update");
        updates
            .filter_map(|field| OffsetDateTime::parse(&field.time, &Rfc3339).ok())
            .max()
    }

    /// Decodes the object and drops what nobody reads.
    pub(super) fn decode(&self, kind: Kind, part: Part) -> Result<Object, serde_json::Error> {
        let text = match part {
            Part::Whole | Part::Nothing => self.without_managed_fields(self.text),
            // Of a kind of its own on the wire, it is an object of ours without anything but metadata.
            Part::Metadata => format!("{{\"metadata\":{}}}", self.without_managed_fields(self.metadata)).into(),
        };
        let mut decoded = resources::decode(kind, &mut serde_json::Deserializer::from_str(&text))?;
        prune(kind, part, &mut decoded);
        Ok(decoded)
    }

    /// What can be told of the object where it cannot be decoded; none where it is none of the mesh.
    pub(super) fn unreadable(&self, kind: Kind, reason: &str) -> Option<Unreadable> {
        let object: serde_json::Value = serde_json::from_str(self.text).unwrap_or_default();
        let mut unreadable = Unreadable::of(kind, &object, reason)?;
        if let Some(stand_in) = &mut unreadable.stand_in {
            prune(kind, Part::Whole, stand_in);
        }
        Some(unreadable)
    }

    /// Who wrote which field is a large part of many objects, and nobody reads it as a part of them.
    fn without_managed_fields(&self, text: &'a str) -> Cow<'a, str> {
        let Some(fields) = self.head.managed_fields.map(RawValue::get) else {
            return text.into();
        };
        // They are a part of this text.
        let start = fields.as_ptr().addr() - text.as_ptr().addr();
        [&text[..start], "null", &text[start + fields.len()..]].concat().into()
    }
}

/// Annotations of others, such as the whole object as it was last applied, are most of what an object weighs.
fn prune(kind: Kind, part: Part, object: &mut Object) {
    let meta = object.meta_mut();
    meta.annotations.retain(|key, _| is_read(key));
    // Nodes report and pods change state without anything changing that is read.
    if part == Part::Metadata || kind == Kind::Pod {
        meta.version = String::new();
    }
    if part == Part::Metadata && kind != Kind::Node {
        meta.labels = Labels::default();
    }
}

/// Whether an annotation may mean something to destination or policy: those of `linkerd.io` itself are the injector's.
fn is_read(annotation: &str) -> bool {
    annotation
        .split_once('/')
        .is_some_and(|(domain, _)| domain.ends_with(OURS))
}

/// Cuts a stream of bytes into lines.
#[derive(Default)]
pub(super) struct Lines {
    bytes: BytesMut,
    /// Up to here there is no end of a line.
    searched: usize,
}

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Passes on all whole lines.
    pub(super) fn drain(&mut self, mut take: impl FnMut(&[u8])) {
        while let Some(end) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') {
            let end = self.searched + end;
            take(&self.bytes[..end]);
            self.bytes.advance(end + 1);
            self.searched = 0;
        }
        self.searched = self.bytes.len();
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_CAPACITY {
            self.bytes = BytesMut::new();
        }
    }
}

/// The end of the domains of all annotations that the mesh reads.
const OURS: &str = ".linkerd.io";

/// A buffer that one burst has made large is given back.
const KEPT_CAPACITY: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn decode(kind: Kind, part: Part, object: &RawValue) -> Object {
        Item::read(object).unwrap().decode(kind, part).unwrap()
    }

    #[test]
    fn lines_are_cut_wherever_the_bytes_are() {
        let text = b"one\ntwo\n\nthree\nrest";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for chunk in text.chunks(size) {
                lines.push(chunk);
                lines.drain(|line| seen.push(String::from_utf8(line.to_vec()).unwrap()));
            }
            assert_eq!(seen, ["one", "two", "", "three"], "in chunks of {size}");
        }
    }

    #[test]
    fn objects_are_pruned_to_what_is_read() {
        let object = raw(
            r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"n","resourceVersion":"7",
               "managedFields":[{"fieldsV1":{"f:metadata":{}}}],"labels":{"topology.kubernetes.io/zone":"east"},"annotations":{"a":"b"}}}"#,
        );
        let Object::Node(node) = decode(Kind::Node, Part::Metadata, &object) else {
            panic!("not a node");
        };
        assert_eq!(node.zone.as_deref(), Some("east"));
        assert!(node.meta.annotations.is_empty() && node.meta.version.is_empty());
        let object = raw(
            r#"{"metadata":{"name":"web","namespace":"shop","resourceVersion":"8","labels":{"app":"web"},"annotations":{
               "kubectl.kubernetes.io/last-applied-configuration":"{}","linkerd.io/inject":"enabled","config.linkerd.io/opaque-ports":"25"},"managedFields":[7]},
               "spec":{"clusterIP":"10.0.0.1","ports":[{"port":80}]}}"#,
        );
        let decoded = decode(Kind::Service, Part::Whole, &object);
        let keys: Vec<_> = decoded.meta().annotations.keys().collect();
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
        assert_eq!(Item::read(&object).unwrap().changed_at(), Some(expected));
        assert_eq!(Item::read(&raw(r#"{"metadata":{}}"#)).unwrap().changed_at(), None);
    }
}
