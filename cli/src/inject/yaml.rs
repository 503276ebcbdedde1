//! YAML as Kubernetes reads it. Unchanged documents keep their text. Changed documents are written so that every parser reads
//! strings as strings.
//!
//! Kubernetes still reads YAML 1.1, where `yes` is true and `0644` is 420.

use anyhow::Context as _;
use serde_json::Value;

/// One document of a stream.
pub(super) struct Document<'a> {
    /// The original text, without the separator line before it.
    pub(super) text: &'a str,
    /// Null for a document that has only comments.
    pub(super) value: Value,
}

/// Parses all documents of a stream.
///
/// # Errors
/// Fails if the text is not YAML; the error contains the position.
pub(super) fn documents(text: &str) -> anyhow::Result<Vec<Document<'_>>> {
    let mut documents = Vec::new();
    for text in split_documents(text) {
        let number = documents.len() + 1;
        let value: serde_yaml_ng::Value =
            serde_yaml_ng::from_str(text).with_context(|| format!("reading document {number}"))?;
        let mut value = serde_json::to_value(value).with_context(|| format!("reading document {number}"))?;
        convert_yaml_1_1_octals(&mut value, false);
        documents.push(Document { text, value });
    }
    Ok(documents)
}

/// Splits the text at separator lines. YAML does not allow such lines inside a document.
fn split_documents(text: &str) -> Vec<&str> {
    let (mut documents, mut start, mut at) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        let end = at + line.len();
        let rest = line
            .strip_prefix("---")
            .filter(|rest| rest.starts_with([' ', '\t', '\r', '\n']) || rest.is_empty());
        if let Some(rest) = rest {
            documents.push(&text[start..at]);
            // A document can begin on the separator line, but a comment there is dropped.
            let is_separator = rest.trim().is_empty() || rest.trim_start().starts_with('#');
            start = if is_separator { end } else { at + "---".len() };
        }
        at = end;
    }
    documents.push(&text[start..]);
    let has_content = |text: &&str| !text.trim().is_empty();
    documents.into_iter().filter(has_content).collect()
}

/// Converts file modes with a leading zero in volumes, such as `0644`, to numbers, because `serde_yaml_ng` parses them as strings.
/// `is_volume` is whether the value is part of a list of volumes.
fn convert_yaml_1_1_octals(value: &mut Value, is_volume: bool) {
    match value {
        Value::Object(map) => {
            for (key, value) in map
                .iter_mut()
                .filter(|(key, _)| !TEXTS_BY_ANY_KEY.contains(&key.as_str()))
            {
                let octal = value
                    .as_str()
                    .filter(|_| is_volume && matches!(key.as_str(), "mode" | "defaultMode"));
                match octal.and_then(|text| u32::from_str_radix(text.strip_prefix('0')?, 8).ok()) {
                    Some(mode) => *value = mode.into(),
                    None => convert_yaml_1_1_octals(value, is_volume || key == "volumes"),
                }
            }
        }
        Value::Array(list) => {
            for value in list {
                convert_yaml_1_1_octals(value, is_volume);
            }
        }
        _ => {}
    }
}

/// Fields of volumes whose keys users choose, and whose values are texts.
const TEXTS_BY_ANY_KEY: [&str; 4] = ["annotations", "labels", "options", "volumeAttributes"];

/// Formats a value as a YAML document that ends with a line break.
pub(super) fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    write(value, 0, &mut out);
    if !out.ends_with('\n') {
        out.push('\n');
    }
    out
}

/// Writes a value at the current position. All lines after the first are indented by `indent`.
fn write(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (n, (key, value)) in map.iter().enumerate() {
                if n > 0 {
                    out.push_str(&" ".repeat(indent));
                }
                out.push_str(&format_scalar(key));
                out.push(':');
                write_child(value, indent, out);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for (n, value) in list.iter().enumerate() {
                if n > 0 {
                    out.push_str(&" ".repeat(indent));
                }
                out.push_str("- ");
                write(value, indent + 2, out);
                if !out.ends_with('\n') {
                    out.push('\n');
                }
            }
        }
        Value::String(text) => out.push_str(&format_scalar(text)),
        // Numbers, true, false, null, {} and [] have the same form in JSON.
        other => out.push_str(&other.to_string()),
    }
}

/// Writes the value of a key whose line is indented by `indent`, and ends the line.
fn write_child(value: &Value, indent: usize, out: &mut String) {
    let (is_map, is_list) = (
        value.as_object().is_some_and(|map| !map.is_empty()),
        value.as_array().is_some_and(|list| !list.is_empty()),
    );
    match (is_map, is_list, value.as_str().filter(|text| is_block(text))) {
        (true, _, _) => {
            out.push('\n');
            out.push_str(&" ".repeat(indent + 2));
            write(value, indent + 2, out);
        }
        (_, true, _) => {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            write(value, indent, out);
        }
        (_, _, Some(text)) => {
            out.push_str(" |\n");
            for line in text.lines() {
                if !line.is_empty() {
                    out.push_str(&" ".repeat(indent + 2));
                    out.push_str(line);
                }
                out.push('\n');
            }
        }
        _ => {
            out.push(' ');
            write(value, indent, out);
            out.push('\n');
        }
    }
}

/// Whether the text can be written as a block scalar: several printable lines that end with exactly one line break.
fn is_block(text: &str) -> bool {
    let is_plain = |ch: char| ch == '\n' || !(ch.is_control() || ['\u{feff}', '\u{2028}', '\u{2029}'].contains(&ch));
    let inner = text.strip_suffix('\n').unwrap_or_default();
    inner.contains('\n') && !inner.ends_with('\n') && !inner.starts_with([' ', '\n']) && text.chars().all(is_plain)
}

/// Formats a string: without quotes if every parser reads it as a string, otherwise with quotes.
fn format_scalar(text: &str) -> String {
    let is_word = text.starts_with(|ch: char| ch.is_ascii_alphabetic() || ch == '/')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte));
    let is_reserved = RESERVED_WORDS.iter().any(|word| text.eq_ignore_ascii_case(word));
    match is_word && !is_reserved {
        true => text.to_owned(),
        false => quote(text),
    }
}

/// Quotes a string as JSON does, and also escapes characters that YAML treats as line breaks or rejects.
fn quote(text: &str) -> String {
    let mut out = String::new();
    for ch in Value::from(text).to_string().chars() {
        match ch {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(ch)))
            }
            _ => out.push(ch),
        }
    }
    out
}

/// Words that YAML 1.1 parses as a boolean or null.
const RESERVED_WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn texts(stream: &str) -> Vec<&str> {
        documents(stream)
            .unwrap()
            .iter()
            .map(|document| document.text)
            .collect()
    }

    #[test]
    fn documents_are_split_at_their_separators_only() {
        assert_eq!(
            texts("a: 1\n---\nb: |\n  ---\n  x\n---\n---\n# c\n"),
            ["a: 1\n", "b: |\n  ---\n  x\n", "# c\n"]
        );
        assert_eq!(texts("--- # first\na: 1\n--- {b: 2}\n--- \n"), ["a: 1\n", " {b: 2}\n"]);
        assert_eq!(texts("a: ----\r\n---\r\nb: 1"), ["a: ----\r\n", "b: 1"]);
        assert!(texts("").is_empty());
        let error = documents("a: 1\n---\nb: [").err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("reading document 2"));
    }

    #[test]
    fn file_modes_are_octal_and_other_texts_are_unchanged() {
        let yaml = "volumes: [{secret: {defaultMode: 0644, items: [{mode: 0400}]}}, {csi: {volumeAttributes: {mode: '0755'}}}]\n\
                    metadata: {annotations: {mode: '0644'}}\ndata: {mode: '0755'}\nid: '0644'\nmode: '9'\n";
        let value = documents(yaml).unwrap().remove(0).value;
        let secret = json!({"secret": {"defaultMode": 420, "items": [{"mode": 256}]}});
        let csi = json!({"csi": {"volumeAttributes": {"mode": "0755"}}});
        let expected = json!({
            "volumes": [secret, csi], "metadata": {"annotations": {"mode": "0644"}}, "data": {"mode": "0755"},
            "id": "0644", "mode": "9",
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn written_yaml_is_readable() {
        let value = json!({
            "args": ["-c", "on", "x y"], "empty": {}, "none": [], "port": 80, "nested": [[1, 2], {"a": null, "b": "yes"}],
            "pem": "BEGIN\nEND\n", "linkerd.io/inject": "enabled",
        });
        assert_eq!(
            to_yaml(&value),
            "args:\n- \"-c\"\n- \"on\"\n- \"x y\"\nempty: {}\nlinkerd.io/inject: enabled\nnested:\n- - 1\n  - 2\n\
             - a: null\n  b: \"yes\"\nnone: []\npem: |\n  BEGIN\n  END\nport: 80\n"
        );
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[ -~\n\t\u{85}\u{e9}]{0,12}".prop_map(Value::from),
            prop_oneof![
                Just("yes"),
                Just("0644"),
                Just("1e3"),
                Just("~"),
                Just("- a"),
                Just("a: b"),
                Just("a\nb\n")
            ]
            .prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[ -~]{0,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().filter(|(key, _)| key != "mode").collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn written_yaml_is_parsed_to_the_same_value(value in any_value()) {
            let text = to_yaml(&value);
            let read: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
            prop_assert_eq!(serde_json::to_value(read).unwrap(), value, "{}", text);
        }
    }
}
