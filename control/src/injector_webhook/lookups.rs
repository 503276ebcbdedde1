//! Limits the requests for objects that the watches have not delivered. Every client that reaches the webhook can name such objects,
//! but this process can send only a limited number of requests per second to the API server.

use std::net::IpAddr;
use std::time::Duration;

use tulle_core::per_client_limiter::{Limits, PerClientLimiter};

use super::rate_limiter::{Rate, RateLimiter};

/// Limits the unsuccessful lookups of each client network: those that find nothing, time out, or are cancelled by the client. The
/// queue serves the networks in turn.
pub(super) struct LookupLimiter {
    unsuccessful: RateLimiter,
    queue: PerClientLimiter,
}

/// Why a lookup has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum LookupError {
    #[error("no object can have this name")]
    InvalidName,
    #[error("too many lookups of the client's network found no object or did not end; retry later")]
    TooManyUnsuccessful,
    #[error("the API server did not respond within {LOOKUP_TIMEOUT:?}")]
    Timeout,
    #[error(transparent)]
    Api(Box<kube::Error>),
}

impl LookupError {
    /// Whether the object does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Api(error) if matches!(&**error, kube::Error::Api(status) if status.is_not_found()))
    }
}

impl LookupLimiter {
    pub(super) fn new() -> Self {
        Self {
            unsuccessful: RateLimiter::new(UNSUCCESSFUL_LOOKUP_RATE),
            queue: PerClientLimiter::new(LOOKUP_LIMITS),
        }
    }

    /// Runs a lookup of a client when it is the turn of its network. The lookup counts as unsuccessful if it finds no object, or if
    /// the returned future is dropped before it ends: by a timeout, or because the client cancels.
    ///
    /// # Errors
    /// Fails if the lookup fails, or if there were too many unsuccessful lookups of the network.
    pub(super) async fn run<T>(
        &self,
        client: IpAddr,
        lookup: impl Future<Output = Result<T, LookupError>>,
    ) -> Result<T, LookupError> {
        if !self.unsuccessful.try_take(client) {
            return Err(LookupError::TooManyUnsuccessful);
        }
        let looked_up = self.queue.run(client, 1, lookup).await;
        // The queue is never full, because `requests_per_network` of `LOOKUP_LIMITS` is unlimited.
        let found = looked_up.unwrap_or(Err(LookupError::TooManyUnsuccessful));
        if !found.as_ref().is_err_and(LookupError::is_not_found) {
            self.unsuccessful.put_back(client);
        }
        found
    }
}

/// Timeout of one lookup. A review has up to two lookups, of the namespace and the owner, and the API server waits 10 seconds.
pub(super) const LOOKUP_TIMEOUT: Duration = Duration::from_secs(3);
/// Rate of unsuccessful lookups. The burst is larger than the number of concurrent reviews of a client network. It suffices for an
/// API server: the objects in its reviews exist, except for owners that were deleted.
pub(super) const UNSUCCESSFUL_LOOKUP_RATE: Rate = Rate {
    burst: 20,
    interval: Duration::from_secs(1),
};
const LOOKUP_LIMITS: Limits = Limits {
    total_weight: 32,
    // The maximum number of concurrent reviews of a network.
    queued_or_running_per_network: 8,
    requests_per_network: usize::MAX,
};
