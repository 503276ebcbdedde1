//! The problems that a check reports.

pub(crate) type CheckResult = Result<(), Problem>;

/// A problem and its fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) severity: Severity,
    pub(crate) message: String,
    /// A command, or a sentence if no command fixes the problem.
    pub(crate) fix: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    Warning,
    Error,
}

/// A problem that makes the command fail.
pub(crate) fn error(message: impl Into<String>, fix: impl Into<String>) -> Problem {
    Problem {
        severity: Severity::Error,
        message: message.into(),
        fix: fix.into(),
    }
}

/// A problem that does not make the command fail.
pub(crate) fn warning(message: impl Into<String>, fix: impl Into<String>) -> Problem {
    Problem {
        severity: Severity::Warning,
        ..error(message, fix)
    }
}

/// Joins several findings under one heading and shows at most [`MAX_LISTED_FINDINGS`] of them.
pub(crate) fn listing(heading: &str, lines: &[String]) -> String {
    let mut text = heading.to_owned();
    for line in lines.iter().take(MAX_LISTED_FINDINGS) {
        text.push_str("\n  * ");
        text.push_str(line);
    }
    if lines.len() > MAX_LISTED_FINDINGS {
        text.push_str(&format!("\n  … and {} more", lines.len() - MAX_LISTED_FINDINGS));
    }
    text
}

/// Maximum number of findings that [`listing`] shows.
pub(crate) const MAX_LISTED_FINDINGS: usize = 10;
