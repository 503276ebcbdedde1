//! Mirrors of a route: backends that get copies of requests, and whose responses are discarded.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    http::lifecycle::tee::BodyCopyMemory,
    outbound::{backend::Backends, endpoint::EndpointContext, metrics::MirrorSeries},
    policy::{
        filter::{Filter, Ratio},
        meta::Meta,
    },
};

/// Maximum number of copies in flight for each mirror.
const MAX_COPIES_IN_FLIGHT: usize = 1024;

/// One mirror of a route rule: the compiled [`MirrorSpec`](crate::policy::client::MirrorSpec).
pub(crate) struct Mirror {
    /// A single backend, without filters.
    pub(in crate::outbound) backends: Backends<Filter>,
    /// The fraction of requests that are copied.
    pub(in crate::outbound) ratio: Ratio,
    pub(in crate::outbound) route: Arc<Meta>,
    pub(in crate::outbound) endpoint_context: Arc<EndpointContext>,
    pub(in crate::outbound) series: MirrorSeries,
    pub(in crate::outbound) usage: Arc<MirrorCopyUsage>,
}

/// The memory that a mirror's copies use, and how many are in flight. A new version of the policy keeps both.
#[derive(Default)]
pub(in crate::outbound) struct MirrorCopyUsage {
    pub(in crate::outbound) memory: Arc<BodyCopyMemory>,
    n_in_flight: AtomicUsize,
}

/// A copy of a request. Counts as in flight until it is dropped.
pub(in crate::outbound) struct MirrorCopyGuard(Arc<Mirror>);

/// The result of a copy, as its metric counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::outbound) enum MirrorCopyResult {
    /// The mirror has sent a response that is not a failure.
    Success,
    /// The mirror has sent a failure or no response, or the request itself was not sent to its end.
    Failure,
    /// The mirror was too slow, or had too many copies in flight.
    Dropped,
}

impl Mirror {
    /// Starts a copy of a request, if the ratio includes the request, and not too many copies are in flight.
    pub(in crate::outbound) fn start_copy(self: &Arc<Self>) -> Option<MirrorCopyGuard> {
        if !self.ratio.includes(|n| fastrand::u32(0..n)) {
            return None;
        }
        let n_before = self.usage.n_in_flight.fetch_add(1, Ordering::Relaxed);
        let guard = MirrorCopyGuard(self.clone());
        if n_before >= MAX_COPIES_IN_FLIGHT {
            guard.record(MirrorCopyResult::Dropped);
            return None;
        }
        Some(guard)
    }
}

impl MirrorCopyGuard {
    pub(in crate::outbound) fn mirror(&self) -> &Mirror {
        &self.0
    }

    pub(in crate::outbound) fn record(self, result: MirrorCopyResult) {
        let series = &self.0.series;
        match result {
            MirrorCopyResult::Success => series.succeeded.inc(),
            MirrorCopyResult::Failure => series.failed.inc(),
            MirrorCopyResult::Dropped => series.dropped.inc(),
        }
    }
}

impl Drop for MirrorCopyGuard {
    fn drop(&mut self) {
        self.0.usage.n_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
