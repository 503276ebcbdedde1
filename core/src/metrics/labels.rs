//! Label sets of the Prometheus text format.

use std::fmt::{self, Display, Write};

/// Labels in the order of insertion. Two sets are equal if their text is equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels {
    /// The rendered labels, without braces.
    text: String,
}

impl Labels {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a label; any value is escaped.
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        self.comma();
        write_label(&mut self.text, key, value);
        self
    }

    /// Adds all labels of another set.
    pub fn extend(mut self, other: &Self) -> Self {
        if !other.text.is_empty() {
            self.comma();
            self.text.push_str(&other.text);
        }
        self
    }

    /// The text `a="1",b="2"`, without braces.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Names and values, in order.
    pub fn pairs(&self) -> Vec<(String, String)> {
        parse_labels(&self.text)
    }

    /// Whether the label has this value.
    pub(super) fn has(&self, key: &str, value: &str) -> bool {
        self.pairs().iter().any(|(name, found)| name == key && found == value)
    }

    fn comma(&mut self) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
    }
}

/// Writes one label.
///
/// Characters that are not allowed in a label name become underscores, because some names come from peers. A name that is empty
/// or starts with a digit gets an underscore in front: one invalid name would make Prometheus reject the whole page.
fn write_label(out: &mut String, key: &str, value: impl Display) {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if key.chars().next().is_none_or(|first| first.is_ascii_digit()) {
        out.push('_');
    }
    out.extend(key.chars().map(|c| if allowed(c) { c } else { '_' }));
    out.push_str("=\"");
    // Writing to a string cannot fail.
    let _ = write!(Escaped(out), "{value}");
    out.push('"');
}

/// Escapes backslash, double quote and newline.
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

/// Parses the names and values of labels in the form that [`write_label`] writes.
fn parse_labels(labels: &str) -> Vec<(String, String)> {
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
