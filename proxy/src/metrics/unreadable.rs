//! What the control plane or an operator says and the proxy cannot read: counted, and logged once a minute at most for each
//! source.

use std::{error::Error, sync::Arc, time::Duration};

use tokio::time::Instant;
use tulle_core::metrics::{Counter, Family, Labels, Registry};

/// What cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    OutboundPolicy,
    InboundPolicy,
    Profile,
    /// One endpoint of several.
    Endpoint,
    /// A file, or a bundle that comes with a certificate.
    TrustAnchors,
}

/// Counts messages by their kind.
#[derive(Clone)]
pub(crate) struct Families(Family<Counter>);

/// Reports what cannot be read of one source.
pub(crate) struct Reporter {
    message: Message,
    /// What is watched.
    target: String,
    counter: Arc<Counter>,
    logged_at: Option<Instant>,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self(registry.counter(
            "tulle_unreadable_updates_total",
            "Updates that the proxy cannot read, of the control plane or of a file, by what they are: the last good one stays, but a port is closed",
        ))
    }

    pub(crate) fn reporter(&self, message: Message, target: String) -> Reporter {
        Reporter {
            message,
            target,
            counter: self.0.get(&Labels::new().with("kind", message.label())),
            logged_at: None,
        }
    }
}

impl Message {
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

impl Reporter {
    /// Reports one that cannot be read; returns the reason in words.
    pub(crate) fn report(&mut self, error: &dyn Error) -> String {
        let reason = causes(error);
        self.counter.inc();
        let now = Instant::now();
        if self.logged_at.is_none_or(|at| now - at >= LOG_INTERVAL) {
            self.logged_at = Some(now);
            tracing::warn!(
                kind = self.message.label(),
                target = self.target,
                reason,
                "update cannot be read"
            );
        }
        reason
    }
}

/// The error and what caused it.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

const LOG_INTERVAL: Duration = Duration::from_secs(60);
