//! The Prometheus text format.

use std::fmt::{Display, Write as _};

use super::labels::Labels;

/// Writes the `HELP` and `TYPE` lines of a family.
pub(super) fn write_header(out: &mut String, name: &str, help: &str, kind: &str) {
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    // Writing to a string cannot fail; the same holds below.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Writes one sample line.
pub(super) fn write_sample(out: &mut String, name: &str, labels: &Labels, value: impl Display) {
    let _ = match labels.as_str() {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}
