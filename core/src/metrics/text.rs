//! The Prometheus text format.

use std::fmt::{self, Display, Write};

use super::Labels;

/// Writes the lines that stand before a family's series.
pub(super) fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Writes one line.
pub(super) fn sample(out: &mut String, name: &str, labels: &Labels, value: impl Display) {
    let _ = match labels.as_str() {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

/// Writes one label.
///
/// What cannot stand in the name of a label becomes an underscore: some names come from others.
pub(super) fn label(out: &mut String, key: &str, value: impl Display) {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    out.extend(key.chars().map(|c| if allowed(c) { c } else { '_' }));
    out.push_str("=\"");
    let _ = write!(Escaped(out), "{value}");
    out.push('"');
}

/// Escapes what the format gives a meaning to.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

/// Names and values of labels as [`label`] writes them, between commas.
pub(super) fn pairs(labels: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut rest = labels;
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut chars = after.chars();
        while let Some(c) = chars.next() {
            match c {
                '"' => break,
                '\\' => value.extend(chars.next().map(|c| if c == 'n' { '\n' } else { c })),
                c => value.push(c),
            }
        }
        pairs.push((name.to_owned(), value));
        rest = chars.as_str();
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    pairs
}
