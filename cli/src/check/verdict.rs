//! What a check is, and what it can find.

use super::snapshot::{Snapshot, Unreadable};

/// Checks about one part of the mesh, in order.
pub(super) struct Category {
    pub(super) name: &'static str,
    pub(super) checks: Vec<Check>,
}

/// A question to a snapshot of the cluster.
#[derive(Clone, Copy)]
pub(super) struct Check {
    pub(super) description: &'static str,
    pub(super) judge: fn(&Snapshot) -> Judgement,
    /// What time may heal is asked again until the wait is over.
    pub(super) patience: Patience,
    /// Whether later checks mean anything when this one fails.
    pub(super) weight: Weight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    AskOnce,
    UntilItSettles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    Others,
    /// Nothing after a failure of this one is worth asking.
    EndsTheRun,
}

pub(super) type Judgement = Result<(), Problem>;

/// What is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) severity: Severity,
    pub(super) what: String,
    /// A command, or a sentence where no command does it.
    pub(super) fix: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    Warning,
    Error,
}

impl Check {
    pub(super) fn new(description: &'static str, judge: fn(&Snapshot) -> Judgement) -> Self {
        Self {
            description,
            judge,
            patience: Patience::AskOnce,
            weight: Weight::Others,
        }
    }

    pub(super) fn settles(self) -> Self {
        Self {
            patience: Patience::UntilItSettles,
            ..self
        }
    }

    pub(super) fn ends_the_run(self) -> Self {
        Self {
            weight: Weight::EndsTheRun,
            ..self
        }
    }
}

/// A problem that makes the command fail.
pub(super) fn error(what: impl Into<String>, fix: impl Into<String>) -> Problem {
    Problem {
        severity: Severity::Error,
        what: what.into(),
        fix: fix.into(),
    }
}

/// A problem that somebody should look at.
pub(super) fn warning(what: impl Into<String>, fix: impl Into<String>) -> Problem {
    Problem {
        severity: Severity::Warning,
        ..error(what, fix)
    }
}

/// Several findings of one kind as one text, the first ten of them.
pub(super) fn listing(heading: &str, lines: &[String]) -> String {
    let mut text = heading.to_owned();
    for line in lines.iter().take(SHOWN) {
        text.push_str("\n  * ");
        text.push_str(line);
    }
    if lines.len() > SHOWN {
        text.push_str(&format!("\n  … and {} more", lines.len() - SHOWN));
    }
    text
}

impl From<&Unreadable> for Problem {
    fn from(unreadable: &Unreadable) -> Self {
        warning(
            format!("cannot tell: {unreadable}"),
            format!(
                "act as a user who may list {} (--as USER, --context NAME)",
                unreadable.what
            ),
        )
    }
}

/// Of findings that are alike.
pub(super) const SHOWN: usize = 10;
