//! Updates of the control plane or the operator that cannot be decoded. They are counted, and logged at most once a minute for
//! each source.

use std::{error::Error, sync::Arc, time::Duration};

use tokio::time::Instant;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Family, Labels, Registry};

/// The kind of an update, for the label `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateKind {
    OutboundPolicy,
    InboundPolicy,
    /// A profile, or the keep-alive settings of its endpoint.
    Profile,
    /// One endpoint of a set, or its keep-alive settings.
    Endpoint,
    /// A file of trust anchors.
    TrustAnchors,
}

#[derive(Clone)]
pub(crate) struct Families(Family<Counter>);

/// Reports the invalid updates of one source.
pub(crate) struct InvalidUpdateReporter {
    kind: UpdateKind,
    target: String,
    counter: Arc<Counter>,
    logged_at: Option<Instant>,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self(registry.counter(
            "tulle_unreadable_updates_total",
            "Updates of the control plane or of a file that cannot be decoded, by kind. The last valid one stays in force, with two exceptions: with an invalid inbound policy the port refuses all connections and requests, and an invalid endpoint is left out. A discovered endpoint with incomplete HTTP/2 keep-alive settings counts too, and is used without them. In a policy, such settings make the whole policy invalid",
        ))
    }

    pub(crate) fn reporter(&self, kind: UpdateKind, target: String) -> InvalidUpdateReporter {
        InvalidUpdateReporter {
            kind,
            target,
            counter: self.0.get(&Labels::new().with("kind", kind.label())),
            logged_at: None,
        }
    }
}

impl UpdateKind {
    fn label(self) -> &'static str {
        match self {
            Self::OutboundPolicy => "outbound_policy",
            Self::InboundPolicy => "inbound_policy",
            Self::Profile => "profile",
            Self::Endpoint => "endpoint",
            Self::TrustAnchors => "trust_anchors",
        }
    }
}

impl InvalidUpdateReporter {
    /// Reports an invalid update; returns the reason as text.
    pub(crate) fn report(&mut self, error: &dyn Error) -> String {
        let reason = ErrorChain(error).to_string();
        self.counter.inc();
        let now = Instant::now();
        if self.logged_at.is_none_or(|at| now - at >= LOG_INTERVAL) {
            self.logged_at = Some(now);
            tracing::warn!(
                kind = self.kind.label(),
                target = self.target,
                reason,
                "update cannot be decoded"
            );
        }
        reason
    }
}

/// Minimum time between two log messages about one source.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
