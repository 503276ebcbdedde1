//! Parses a manifest file: its objects, the readable parts of invalid ones, and its first error with the line number.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use serde::Deserialize;
use serde_yaml_ng::{Deserializer, Value};

use crate::resources::policy::reference::POLICY_GROUP;
use crate::resources::unreadable::Unreadable;
use crate::resources::{self, KINDS, Kind, Object};
use crate::source::defaulting;

/// An error of a manifest directory, for reports. The last valid version of an invalid file stays in use; before there is one,
/// its valid documents are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    pub file: PathBuf,
    /// Counted from 1. `None` if the error has no line.
    pub line: Option<usize>,
    pub reason: String,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file.display(), self.reason),
            None => write!(f, "{}: {}", self.file.display(), self.reason),
        }
    }
}

/// An object and the line where its document starts.
#[derive(Clone, Debug)]
pub(super) struct Manifest {
    pub(super) object: Object,
    pub(super) line: usize,
}

/// An error in the text of a manifest. Together with the name of the file it becomes a [`ManifestError`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ErrorAtLine {
    pub(super) line: usize,
    pub(super) reason: String,
}

#[derive(Debug, Default)]
pub(super) struct ManifestFile {
    pub(super) manifests: Vec<Manifest>,
    /// Documents of supported kinds that are invalid: the readable parts of each, for its placeholder.
    pub(super) unreadable: Vec<Unreadable>,
    /// The first error. It makes the whole file invalid.
    pub(super) error: Option<ErrorAtLine>,
    /// `apiVersion` and kind of documents with an unsupported kind.
    pub(super) unsupported_kinds: BTreeSet<(String, String)>,
}

/// Parses all documents of a file, up to the first YAML syntax error.
pub(super) fn parse(text: &str) -> ManifestFile {
    let starts = document_start_lines(text);
    let start_line = |document: usize| starts.get(document).or_else(|| starts.last()).copied().unwrap_or(1);
    let mut file = ManifestFile::default();
    let mut values = Vec::new();
    for (index, document) in Deserializer::from_str(text).enumerate() {
        match Value::deserialize(document) {
            Ok(value) => values.push(value),
            Err(error) => {
                file.error = Some(yaml_error(&error, start_line(index)));
                break;
            }
        }
    }
    // Reads the text again, because decoding from a `Value` would lose the line numbers of errors. The first pass ended at a
    // syntax error, if there is one.
    for (index, (document, value)) in Deserializer::from_str(text).zip(values).enumerate() {
        let line = start_line(index);
        if value.is_null() {
            continue;
        }
        let kind = value.get("kind").and_then(Value::as_str).unwrap_or_default();
        if let Some(items) = list_items(kind, &value) {
            for item in items {
                let decode = |kind| resources::decode(kind, item.clone()).map_err(|error| yaml_error(&error, line));
                file.push(item, line, decode);
            }
        } else {
            let decode = |kind| resources::decode(kind, document).map_err(|error| yaml_error(&error, line));
            file.push(&value, line, decode);
        }
    }
    file
}

impl ManifestFile {
    fn push(&mut self, value: &Value, line: usize, decode: impl FnOnce(Kind) -> Result<Object, ErrorAtLine>) {
        let (api_version, kind_name) = match api_version_and_kind(value) {
            Ok(types) => types,
            Err(reason) => return self.add_error(ErrorAtLine { line, reason }, None),
        };
        let Some(kind) = Kind::find(&api_version, &kind_name) else {
            return self.push_unsupported(&api_version, &kind_name, value, line);
        };
        match decode(kind) {
            Ok(mut object) => {
                object.meta_mut().version = content_version(value);
                match defaulting::complete_and_validate(&mut object) {
                    Ok(()) => self.manifests.push(Manifest { object, line }),
                    Err(reason) => {
                        let unreadable = invalid_manifest(object, value, &reason);
                        let reason = format!("{kind_name} {}: {reason}", unreadable.name);
                        self.add_error(ErrorAtLine { line, reason }, Some(unreadable));
                    }
                }
            }
            Err(error) => {
                let unreadable = undecodable_manifest(kind, value, &error.reason);
                self.add_error(error, unreadable);
            }
        }
    }

    /// Records a document of an unsupported kind, which is ignored. An unsupported version of a supported kind, and an unknown
    /// kind of the policy group, are errors.
    fn push_unsupported(&mut self, api_version: &str, kind_name: &str, value: &Value, line: usize) {
        if let Some(kind) = Kind::find_any_version(api_version, kind_name) {
            let accepted = kind.info().versions.join(", ");
            let reason = format!("{kind_name} of {api_version} is not supported; supported versions: {accepted}");
            let unreadable = undecodable_manifest(kind, value, &reason);
            return self.add_error(ErrorAtLine { line, reason }, unreadable);
        }
        if api_version
            .split_once('/')
            .is_some_and(|(group, _)| group == POLICY_GROUP)
        {
            let kinds = KINDS.iter().filter(|info| info.group == POLICY_GROUP);
            let accepted = kinds.map(|info| info.name).collect::<Vec<_>>().join(", ");
            let reason = format!("unknown kind {kind_name} in group {POLICY_GROUP}; supported: {accepted}");
            return self.add_error(ErrorAtLine { line, reason }, None);
        }
        self.unsupported_kinds
            .insert((api_version.to_owned(), kind_name.to_owned()));
    }

    fn add_error(&mut self, error: ErrorAtLine, unreadable: Option<Unreadable>) {
        self.unreadable.extend(unreadable);
        let is_first = self.error.as_ref().is_none_or(|first| error.line < first.line);
        if is_first {
            self.error = Some(error);
        }
    }
}

/// Returns the readable parts of a document that cannot be decoded.
fn undecodable_manifest(kind: Kind, value: &Value, reason: &str) -> Option<Unreadable> {
    let json = serde_json::to_value(value).ok()?;
    let mut unreadable = Unreadable::from_value(kind, &json, reason)?;
    if let Some(placeholder) = &mut unreadable.placeholder {
        placeholder.meta_mut().version = content_version(value);
        defaulting::clear_status(placeholder);
    }
    Some(unreadable)
}

/// Returns the readable parts of a document that is decoded but invalid.
fn invalid_manifest(object: Object, value: &Value, reason: &str) -> Unreadable {
    let json = serde_json::to_value(value).unwrap_or_default();
    let mut unreadable = Unreadable::from_rejected(object, &json, reason);
    if let Some(placeholder) = &mut unreadable.placeholder {
        defaulting::clear_status(placeholder);
    }
    unreadable
}

/// Returns the error at its own line, or at `line` if it has none.
fn yaml_error(error: &serde_yaml_ng::Error, line: usize) -> ErrorAtLine {
    let line = error.location().map_or(line, |location| location.line());
    ErrorAtLine {
        line,
        reason: error.to_string(),
    }
}

fn api_version_and_kind(value: &Value) -> Result<(String, String), String> {
    let field = |name: &str| {
        let text = value.get(name).and_then(Value::as_str);
        text.map(str::to_owned)
            .ok_or_else(|| format!("{name} is missing; every document needs apiVersion and kind"))
    };
    Ok((field("apiVersion")?, field("kind")?))
}

fn list_items<'a>(kind: &str, value: &'a Value) -> Option<&'a Vec<Value>> {
    if kind.ends_with("List") {
        value.get("items")?.as_sequence()
    } else {
        None
    }
}

/// Derives a resource version from the content. It does not depend on the formatting of the file.
fn content_version(value: &Value) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The state of the document that a line belongs to.
#[derive(PartialEq)]
enum DocumentState {
    /// There is no marker and no content yet.
    None,
    /// There is no content after its marker `---` yet.
    Empty,
    HasContent,
}

/// Returns the line of the first content of each document, counted from 1.
fn document_start_lines(text: &str) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut state = DocumentState::None;
    for (index, line) in text.lines().enumerate() {
        let is_marker = line == "---" || line.starts_with("--- ");
        if is_marker {
            if state == DocumentState::Empty {
                // An empty document counts, too. It gets the number of the line before this marker, which is `index`, because
                // lines are counted from 1.
                starts.push(index);
            }
            state = DocumentState::Empty;
            continue;
        }
        let content = line.trim_start();
        let is_content = !content.is_empty() && !content.starts_with('#') && !line.starts_with('%');
        if is_content && state != DocumentState::HasContent {
            starts.push(index + 1);
            state = DocumentState::HasContent;
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
        fn parsing_a_manifest_never_panics(text in "(apiVersion: v1\nkind: (Service|Pod|List)\n)?[-{}:&*! a-z0-9\"\n\\[\\],#%|>]{0,80}") {
            parse(&text);
        }
    }

    #[test]
    fn documents_and_lists_become_objects() {
        let text = "# a comment\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n---\n---\n\
            apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n1}}\n\
            - {apiVersion: v1, kind: ConfigMap, metadata: {name: c}}\n";
        let file = parse(text);
        assert_eq!(file.error, None);
        let found: Vec<_> = file
            .manifests
            .iter()
            .map(|found| (found.object.kind(), found.line))
            .collect();
        assert_eq!(found, [(Kind::Namespace, 3), (Kind::Node, 8)]);
        assert_eq!(
            file.unsupported_kinds.into_iter().collect::<Vec<_>>(),
            [("v1".to_owned(), "ConfigMap".to_owned())]
        );
    }

    /// The versions that releases 1.1 to 1.6 of the Gateway API serve, newest first, which is the order in which they are
    /// requested from an API server.
    #[test]
    fn routes_are_read_in_every_version_of_the_gateway_api() {
        for (kind, versions) in [
            (Kind::GatewayHttpRoute, &["v1", "v1beta1"][..]),
            (Kind::GrpcRoute, &["v1", "v1alpha2"]),
            (Kind::TlsRoute, &["v1", "v1alpha3", "v1alpha2"]),
            (Kind::TcpRoute, &["v1", "v1alpha2"]),
        ] {
            let info = kind.info();
            assert_eq!(info.versions, versions);
            for version in versions {
                let file = parse(&format!(
                    "apiVersion: {}/{version}\nkind: {}\nmetadata: {{name: r, namespace: shop}}\n\
                     spec: {{parentRefs: [{{kind: Service, group: '', name: web, port: 80}}], rules: [{{}}]}}\n",
                    info.group, info.name
                ));
                assert_eq!(file.error, None, "{version} {kind:?}");
                let found: Vec<_> = file.manifests.iter().map(|found| found.object.kind()).collect();
                assert_eq!(found, [kind], "{version}");
            }
        }
    }

    #[test]
    fn errors_have_their_line_and_reason() {
        let check = |text: &str, line: usize, reason: &str| {
            let error = parse(text).error.unwrap();
            assert_eq!(error.line, line, "{error:?}");
            assert!(error.reason.contains(reason), "{error:?}");
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
            &format!("---\n---\n{service}spec: {{}}\n---\n{service}spec: {{clusterIP: None}}\n"),
            3,
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
    fn the_version_depends_on_the_content_only() {
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
