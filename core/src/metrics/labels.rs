//! Label sets, kept as the text that will be printed.

use std::fmt::{self, Display, Write};

/// A label set in the order in which it was built; equal when it prints equally.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels {
    text: String,
}

impl Labels {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a label; the value may hold anything.
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        self.comma();
        self.text.push_str(key);
        self.text.push_str("=\"");
        // Writing to a string cannot fail.
        let _ = write!(Escaped(&mut self.text), "{value}");
        self.text.push('"');
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

    /// `a="1",b="2"`, without braces.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn comma(&mut self) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
    }
}

/// Escapes what the text format gives a meaning to.
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
