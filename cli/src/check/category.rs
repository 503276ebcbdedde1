//! Categories of checks, and what happens if a check fails.

use super::problem::CheckResult;
use super::snapshot::Snapshot;

/// An ordered list of checks of one part of the mesh.
pub(super) struct Category {
    pub(super) name: &'static str,
    pub(super) checks: Vec<Check>,
}

#[derive(Clone, Copy)]
pub(super) struct Check {
    pub(super) description: &'static str,
    pub(super) run: fn(&Snapshot) -> CheckResult,
    /// Whether the check is repeated until it succeeds or the wait time ends.
    pub(super) retry: RetryMode,
    /// Whether a failure ends the run.
    pub(super) on_failure: OnFailure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryMode {
    Never,
    UntilTimeout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnFailure {
    Continue,
    /// A failure ends the run, because later checks depend on this one.
    Abort,
}

impl Check {
    pub(super) fn new(description: &'static str, run: fn(&Snapshot) -> CheckResult) -> Self {
        Self {
            description,
            run,
            retry: RetryMode::Never,
            on_failure: OnFailure::Continue,
        }
    }

    pub(super) fn with_retry(self) -> Self {
        Self {
            retry: RetryMode::UntilTimeout,
            ..self
        }
    }

    pub(super) fn fatal(self) -> Self {
        Self {
            on_failure: OnFailure::Abort,
            ..self
        }
    }
}
