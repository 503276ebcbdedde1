//! Whether what is known of a kind is what the API server has: a metric, and a line of `/ready`.

use std::sync::Arc;

use tulle_core::metrics::{Gauge, Labels, Registry};
use tulle_core::ready::{Latch, Readiness};

use crate::resources::Kind;

/// One kind's.
pub(super) struct Freshness {
    kind: String,
    /// 1 while the last known state is served because the API server does not give another.
    stale: Arc<Gauge>,
    kinds: Readiness,
    /// Held while the kind is stale.
    latch: Option<Latch>,
}

impl Freshness {
    /// Of a kind that has not been listed yet; `kinds` collects the reasons of all.
    pub(super) fn new(registry: &Registry, kinds: &Readiness, kind: Kind) -> Self {
        let kind = kind.info().plural();
        let help = "1 while the last known state of a kind is served because the API server cannot be asked for it.";
        let stale = registry
            .gauge("tulle_kind_is_stale", help)
            .get(&Labels::new().with("kind", &kind));
        stale.set(1);
        Self {
            latch: Some(kinds.latch(format!("{kind}: not listed yet"))),
            kind,
            stale,
            kinds: kinds.clone(),
        }
    }

    /// The API server does not say what there is.
    pub(super) fn lost(&mut self, reason: String) {
        self.stale.set(1);
        let reason = format!("{}: {reason}", self.kind);
        match &self.latch {
            Some(latch) => latch.explain(reason),
            None => self.latch = Some(self.kinds.latch(reason)),
        }
    }

    /// What is known is what there is.
    pub(super) fn regained(&mut self) {
        self.stale.set(0);
        self.latch = None;
    }
}
