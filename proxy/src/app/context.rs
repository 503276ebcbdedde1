//! What the proxy gets besides its configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use tulle_core::logging::LogHandle;

use crate::net::orig_dst;
use crate::trace::Tracer;

pub use crate::net::orig_dst::OrigDstLookup;

/// What the caller passes to the proxy besides its configuration.
pub struct ProcessContext {
    pub log: Option<LogHandle>,
    /// Variables that the admin server may show.
    pub env: BTreeMap<String, String>,
    /// Looks up original destinations. With redirect rules, it asks the kernel.
    pub orig_dst: OrigDstLookup,
}

impl ProcessContext {
    /// The context of a sidecar behind redirect rules.
    pub fn with_redirect(log: Option<LogHandle>, env: BTreeMap<String, String>) -> Self {
        Self {
            log,
            env,
            orig_dst: Arc::new(orig_dst::lookup),
        }
    }
}

/// The tracers of both directions; `None` if no collector is configured.
#[derive(Default)]
pub(super) struct Tracers {
    pub(super) inbound: Option<Tracer>,
    pub(super) outbound: Option<Tracer>,
}
