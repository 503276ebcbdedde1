//! Reports stale kinds in a metric and in `/ready`.

use std::sync::Arc;

use tulle_core::metrics::{Gauge, Labels, Registry};
use tulle_core::readiness::{Latch, Readiness};

use crate::resources::Kind;

/// Whether one kind is stale.
pub(super) struct Freshness {
    kind: String,
    /// 1 while the API server cannot be read and the last known state is in use.
    stale: Arc<Gauge>,
    all_kinds: Readiness,
    /// Latch of `all_kinds`, held while the kind is stale.
    latch: Option<Latch>,
}

impl Freshness {
    /// Creates the state of a kind that is not listed yet, and therefore stale. `all_kinds` is ready while no kind is stale.
    pub(super) fn new(registry: &Registry, all_kinds: &Readiness, kind: Kind) -> Self {
        let kind = kind.info().plural();
        let help = "1 while the last known state of a kind is served because the API server cannot be read.";
        let stale = registry
            .gauge("tulle_kind_is_stale", help)
            .get(&Labels::new().with("kind", &kind));
        stale.set(1);
        Self {
            latch: Some(all_kinds.latch(format!("{kind}: not listed yet"))),
            kind,
            stale,
            all_kinds: all_kinds.clone(),
        }
    }

    /// Marks the kind as stale: the API server does not return its objects.
    pub(super) fn mark_stale(&mut self, reason: String) {
        self.stale.set(1);
        let reason = format!("{}: {reason}", self.kind);
        match &self.latch {
            Some(latch) => latch.set_reason(reason),
            None => self.latch = Some(self.all_kinds.latch(reason)),
        }
    }

    pub(super) fn mark_fresh(&mut self) {
        self.stale.set(0);
        self.latch = None;
    }
}
