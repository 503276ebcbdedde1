//! The Prometheus text format.

use std::fmt::{Display, Write as _};

use super::labels::Labels;

/// Name, type and help text of a metric family, for the documentation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Description {
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    pub help: String,
}

/// Writes the `HELP` and `TYPE` lines of a family.
pub(super) fn write_header(out: &mut String, name: &str, help: &str, kind: &str) {
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    // Writing to a string cannot fail; the same holds below.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Reads the lines that [`write_header`] wrote.
pub(super) fn parse_headers(text: &str) -> Vec<Description> {
    let mut lines = text.lines();
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) else {
            continue;
        };
        let kind = lines
            .next()
            .and_then(|line| line.rsplit_once(' '))
            .map_or("untyped", |(_, kind)| kind);
        found.push(Description {
            name: name.to_owned(),
            kind: kind.to_owned(),
            help: help.to_owned(),
        });
    }
    found
}

/// Writes one sample line.
pub(super) fn write_sample(out: &mut String, name: &str, labels: &Labels, value: impl Display) {
    let _ = match labels.as_str() {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}
