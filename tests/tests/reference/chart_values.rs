//! The values of the charts, from the comments of `values.yaml` and the types of `values.schema.json`.

use std::fs;

use serde_json::Value;

use super::{check_page, heading, root, table};

/// A value of a chart.
struct ChartValue {
    path: Vec<String>,
    default: String,
    meaning: String,
}

#[test]
fn chart_values() {
    let mut page = heading(
        "Chart values",
        "values.yaml and values.schema.json of each chart",
        "Each value is set with `--set NAME=VALUE` or in a values file. Unknown values are refused.",
    );
    for chart in ["tulle-crds", "tulle-control-plane", "tulle-multicluster"] {
        let dir = root().join("charts").join(chart);
        let yaml = fs::read_to_string(dir.join("values.yaml")).unwrap();
        let schema: Value = serde_json::from_slice(&fs::read(dir.join("values.schema.json")).unwrap()).unwrap();
        let rows = documented_values(&yaml).into_iter().map(|value| {
            let name = value.path.join(".");
            let kind = value_type(&schema, &value.path).unwrap_or_else(|| panic!("{chart}: the schema has no {name}"));
            let default = match value.default.is_empty() {
                true => String::new(),
                false => format!("`{}`", value.default),
            };
            [format!("`{name}`"), kind, default, value.meaning]
        });
        page += &format!(
            "## {chart}\n\n{}\n",
            table(["Value", "Type", "Default", "Meaning"], rows)
        );
    }
    check_page("chart-values.md", &page);
}

/// The values with a comment that begins with `# --`, or with `# Not used`.
fn documented_values(yaml: &str) -> Vec<ChartValue> {
    let mut values = Vec::new();
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut meaning = String::new();
    for line in yaml.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(comment) = text.strip_prefix('#') {
            let comment = comment.trim();
            match comment.strip_prefix("-- ") {
                Some(start) => meaning = start.to_owned(),
                None if comment.starts_with("Not used") => meaning = comment.to_owned(),
                None if !meaning.is_empty() => meaning = format!("{meaning} {comment}"),
                None => (),
            }
            continue;
        }
        let Some((key, default)) = text.split_once(':').filter(|_| !text.starts_with('-')) else {
            meaning.clear();
            continue;
        };
        path.retain(|(outer, _)| *outer < indent);
        path.push((indent, key.to_owned()));
        if !meaning.is_empty() {
            values.push(ChartValue {
                path: path.iter().map(|(_, key)| key.clone()).collect(),
                // A block of several lines has no default that fits in a cell.
                default: default.trim().trim_start_matches(['|', '>']).to_owned(),
                meaning: std::mem::take(&mut meaning),
            });
        }
    }
    values
}

/// The type of a value, in words.
fn value_type(schema: &Value, path: &[String]) -> Option<String> {
    let mut node = resolve(schema, schema);
    for key in path {
        node = resolve(schema, node);
        node = match &node["properties"][key] {
            Value::Null => &node["additionalProperties"],
            property => property,
        };
        if node.is_null() || *node == Value::Bool(false) {
            return None;
        }
    }
    Some(describe_type(schema, resolve(schema, node)))
}

fn describe_type(schema: &Value, node: &Value) -> String {
    if let Some(choices) = node["enum"].as_array() {
        let choices: Vec<_> = choices
            .iter()
            .map(|choice| format!("`{}`", to_plain_text(choice)))
            .collect();
        return choices.join(", ");
    }
    for keyword in ["anyOf", "oneOf"] {
        if let Some(choices) = node[keyword].as_array() {
            let choices: Vec<_> = choices
                .iter()
                .map(|choice| describe_type(schema, resolve(schema, choice)))
                .filter(|choice| choice != "null")
                .collect();
            return choices.join(" or ");
        }
    }
    match &node["type"] {
        Value::Array(kinds) => {
            let kinds: Vec<_> = kinds.iter().map(to_plain_text).filter(|kind| kind != "null").collect();
            kinds.join(" or ")
        }
        Value::String(kind) => kind.clone(),
        _ => "any".to_owned(),
    }
}

fn to_plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Follows a reference to a definition.
fn resolve<'a>(schema: &'a Value, node: &'a Value) -> &'a Value {
    let name = node["$ref"]
        .as_str()
        .and_then(|path| path.strip_prefix("#/definitions/"));
    name.map_or(node, |name| &schema["definitions"][name])
}
