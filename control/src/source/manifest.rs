//! The text of one file to objects, or to the first flaw in it and its line.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Deserialize;
use serde_yaml_ng::{Deserializer, Value};

use crate::resources::policy::reference::POLICY_GROUP;
use crate::resources::unreadable::Unreadable;
use crate::resources::{self, KINDS, Kind, Object};
use crate::source::completion;

/// An object and the line its document starts on.
#[derive(Clone, Debug)]
pub(super) struct Manifest {
    pub(super) object: Object,
    pub(super) line: usize,
}

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Flaw {
    pub(super) line: usize,
    pub(super) reason: String,
}

#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) manifests: Vec<Manifest>,
    /// Objects that are refused.
    pub(super) unreadable: Vec<Unreadable>,
    /// The first flaw, which refuses the whole of the file.
    pub(super) flaw: Option<Flaw>,
    /// `apiVersion` and kind of documents that we do not read.
    pub(super) unread_kinds: BTreeSet<(String, String)>,
}

/// Reads all documents of a file, as far as they are YAML.
pub(super) fn parse(text: &str) -> File {
    let starts = document_lines(text);
    let line_of = |document: usize| starts.get(document).or_else(|| starts.last()).copied().unwrap_or(1);
    let mut file = File::default();
    let mut values = Vec::new();
    for (index, document) in Deserializer::from_str(text).enumerate() {
        match Value::deserialize(document) {
            Ok(value) => values.push(value),
            Err(error) => {
                file.flaw = Some(flaw(&error, line_of(index)));
                break;
            }
        }
    }
    for (index, (document, value)) in Deserializer::from_str(text).zip(values).enumerate() {
        let line = line_of(index);
        if value.is_null() {
            continue;
        }
        let kind = value.get("kind").and_then(Value::as_str).unwrap_or_default();
        if let Some(items) = items(kind, &value) {
            for item in items {
                let decode = |kind| resources::decode(kind, item.clone()).map_err(|error| flaw(&error, line));
                file.push(item, line, decode);
            }
        } else {
            let decode = |kind| resources::decode(kind, document).map_err(|error| flaw(&error, line));
            file.push(&value, line, decode);
        }
    }
    file
}

impl File {
    fn push(&mut self, value: &Value, line: usize, decode: impl FnOnce(Kind) -> Result<Object, Flaw>) {
        let (api_version, kind) = match type_of(value) {
            Ok(types) => types,
            Err(reason) => return self.refuse(Flaw { line, reason }, None),
        };
        let Some(known) = Kind::find(&api_version, &kind) else {
            return self.push_unread(&api_version, &kind, value, line);
        };
        match decode(known) {
            Ok(mut object) => {
                object.meta_mut().version = version(value);
                match completion::complete(&mut object) {
                    Ok(()) => self.manifests.push(Manifest { object, line }),
                    Err(reason) => {
                        let unreadable = Unreadable::refused(object, &reason);
                        let reason = format!("{kind} {}: {reason}", unreadable.name);
                        self.refuse(Flaw { line, reason }, Some(unreadable));
                    }
                }
            }
            Err(flaw) => {
                let unreadable = unreadable(known, value, &flaw.reason);
                self.refuse(flaw, unreadable);
            }
        }
    }

    /// A kind that is not read may be anything; but not a version of one that is, nor a policy that is misspelt.
    fn push_unread(&mut self, api_version: &str, kind: &str, value: &Value, line: usize) {
        if let Some(known) = Kind::of_any_version(api_version, kind) {
            let accepted = known.info().versions.join(", ");
            let reason = format!("{kind} of {api_version} is not read; accepted versions: {accepted}");
            let unreadable = unreadable(known, value, &reason);
            return self.refuse(Flaw { line, reason }, unreadable);
        }
        if api_version
            .split_once('/')
            .is_some_and(|(group, _)| group == POLICY_GROUP)
        {
            let of_group = KINDS.iter().filter(|info| info.group == POLICY_GROUP);
            let accepted = of_group.map(|info| info.name).collect::<Vec<_>>().join(", ");
            let reason = format!("{kind} is no kind of {POLICY_GROUP}; accepted: {accepted}");
            return self.refuse(Flaw { line, reason }, None);
        }
        self.unread_kinds.insert((api_version.to_owned(), kind.to_owned()));
    }

    fn refuse(&mut self, flaw: Flaw, unreadable: Option<Unreadable>) {
        self.unreadable.extend(unreadable);
        let is_first = self.flaw.as_ref().is_none_or(|first| flaw.line < first.line);
        if is_first {
            self.flaw = Some(flaw);
        }
    }
}

/// What can be told of a document that cannot be decoded.
fn unreadable(kind: Kind, value: &Value, reason: &str) -> Option<Unreadable> {
    let json = serde_json::to_value(value).ok()?;
    let mut unreadable = Unreadable::of(kind, &json, reason)?;
    if let Some(stand_in) = &mut unreadable.stand_in {
        stand_in.meta_mut().version = version(value);
        completion::forget_status(stand_in);
    }
    Some(unreadable)
}

fn flaw(error: &serde_yaml_ng::Error, line: usize) -> Flaw {
    let line = error.location().map_or(line, |location| location.line());
    Flaw {
        line,
        reason: error.to_string(),
    }
}

fn type_of(value: &Value) -> Result<(String, String), String> {
    let field = |name: &str| {
        let text = value.get(name).and_then(Value::as_str);
        text.map(str::to_owned)
            .ok_or_else(|| format!("{name} is missing; every document needs apiVersion and kind"))
    };
    Ok((field("apiVersion")?, field("kind")?))
}

fn items<'a>(kind: &str, value: &'a Value) -> Option<&'a Vec<Value>> {
    if kind.ends_with("List") {
        value.get("items")?.as_sequence()
    } else {
        None
    }
}

/// A resource version: the same for the same content, whatever the file looks like.
fn version(value: &Value) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The line of the first content of each document, counted from 1.
fn document_lines(text: &str) -> Vec<usize> {
    let mut starts = Vec::new();
    // Whether the document that the last marker opened still waits for its first line of content.
    let mut waiting = true;
    for (index, line) in text.lines().enumerate() {
        let marker = line == "---" || line.starts_with("--- ");
        if marker {
            if waiting && !starts.is_empty() {
                // The document before this marker is empty; it still counts.
                starts.push(index);
            }
            waiting = true;
            continue;
        }
        let content = line.trim_start();
        if waiting && !content.is_empty() && !content.starts_with('#') && !line.starts_with('%') {
            starts.push(index + 1);
            waiting = false;
        }
    }
    starts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_text_panics(text in "(apiVersion: v1\nkind: (Service|Pod|List)\n)?[-{}:&*! a-z0-9\"\n\\[\\],#%|>]{0,80}") {
            parse(&text);
        }
    }

    #[test]
    fn documents_and_lists_become_objects() {
        let text = "# a comment\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n---\n\
            apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n1}}\n\
            - {apiVersion: v1, kind: ConfigMap, metadata: {name: c}}\n";
        let file = parse(text);
        assert_eq!(file.flaw, None);
        let found: Vec<_> = file
            .manifests
            .iter()
            .map(|found| (found.object.kind(), found.line))
            .collect();
        assert_eq!(found, [(Kind::Namespace, 3), (Kind::Node, 8)]);
        assert_eq!(
            file.unread_kinds.into_iter().collect::<Vec<_>>(),
            [("v1".to_owned(), "ConfigMap".to_owned())]
        );
    }

    #[test]
    fn flaws_have_their_line_and_reason() {
        let check = |text: &str, line: usize, reason: &str| {
            let flaw = parse(text).flaw.unwrap();
            assert_eq!(flaw.line, line, "{flaw:?}");
            assert!(flaw.reason.contains(reason), "{flaw:?}");
        };
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n";
        check("kind: Service\n", 1, "apiVersion");
        check("a: [\n", 2, "");
        check(
            &format!("{service}spec:\n  clusterIP: 10.0.0.1\n  ports:\n  - port: many\n"),
            7,
            "invalid type",
        );
        check(&format!("# x\n---\n{service}spec: {{}}\n"), 3, "clusterIP");
        check(
            &format!("{service}spec: {{clusterIP: None}}\n---\n{service}"),
            6,
            "clusterIP",
        );
        check(
            &format!("{service}spec: {{clusterIP: None}}\n---\n{service}spec:\n  ports: 1\n"),
            10,
            "ports",
        );
        check(
            "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {name: web}\nspec:\n  podSelector: {}\n  port: 80\n  proxyProtocol: HTTP/3\n",
            7,
            "HTTP/3",
        );
    }

    #[test]
    fn versions_follow_content_only() {
        let version = |text: &str| parse(text).manifests[0].object.meta().version.clone();
        let a = version("apiVersion: v1\nkind: Node\nmetadata: {name: n1}\n");
        assert_eq!(
            a,
            version("# other\napiVersion: v1\nkind: Node\nmetadata:\n  name: n1\n")
        );
        assert_ne!(
            a,
            version("apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {a: b}}\n")
        );
    }
}
