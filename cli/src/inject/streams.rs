//! Reads files, directories and standard input, and writes the resulting documents.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use super::yaml;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Output {
    #[default]
    Yaml,
    Json,
}

/// Reads the inputs. Returns the name, for error messages, and the text of each. `-` is standard input; a directory stands for its
/// YAML and JSON files.
pub(super) fn read_inputs(inputs: &[PathBuf]) -> anyhow::Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for input in inputs {
        if input.as_os_str() == "-" {
            let mut text = String::new();
            io::stdin()
                .read_to_string(&mut text)
                .context("reading standard input")?;
            texts.push(("standard input".to_owned(), text));
            continue;
        }
        for path in manifest_files(input)? {
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            texts.push((path.display().to_string(), text));
        }
    }
    Ok(texts)
}

fn manifest_files(input: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !input.is_dir() {
        return Ok(vec![input.to_owned()]);
    }
    let context = || format!("reading {}", input.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(input).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let is_manifest = path
            .extension()
            .is_some_and(|kind| ["yaml", "yml", "json"].iter().any(|known| kind == *known));
        if path.is_dir() {
            found.extend(manifest_files(&path)?);
        } else if is_manifest {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Applies `transform` to each object of the inputs, including the items of lists, and prints all documents.
///
/// As YAML, unchanged documents keep their text. As JSON, documents that have only comments are omitted.
///
/// # Errors
/// Fails if the input cannot be read, or if `transform` fails.
pub(super) fn transform_objects(
    inputs: &[PathBuf],
    output: Output,
    mut transform: impl FnMut(&mut Value) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut out = String::new();
    for (name, text) in read_inputs(inputs)? {
        for document in yaml::documents(&text).with_context(|| name.clone())? {
            let mut value = document.value.clone();
            transform_items(&mut value, &mut transform).with_context(|| name.clone())?;
            let text = match (value == document.value, output) {
                (_, Output::Json) if value.is_null() => continue,
                (_, Output::Json) => serde_json::to_string_pretty(&value)? + "\n",
                (true, Output::Yaml) => document.text.trim_end().to_owned() + "\n",
                (false, Output::Yaml) => yaml::to_yaml(&value),
            };
            if output == Output::Yaml && !out.is_empty() {
                out.push_str("---\n");
            }
            out.push_str(&text);
        }
    }
    crate::print(&out)
}

fn transform_items(
    value: &mut Value,
    transform: &mut impl FnMut(&mut Value) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let is_list = value
        .get("kind")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind.ends_with("List"));
    match value.get_mut("items").and_then(Value::as_array_mut).filter(|_| is_list) {
        Some(items) => items.iter_mut().try_for_each(|item| transform_items(item, transform)),
        None => transform(value),
    }
}
