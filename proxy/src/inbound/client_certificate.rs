//! Closes connections whose client certificate has expired or is no longer trusted.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{policy::authz::Denied, tls::client_chains::ClientChain};

/// The certificates of the client of an HTTP connection, and whether the connection has to close because of them.
#[derive(Debug, Default)]
pub(in crate::inbound) struct ClientCertificate {
    /// `None` if the client has no certificate.
    pub(in crate::inbound) chain: Option<Arc<ClientChain>>,
    /// Whether the connection closes gracefully: from [`CertificateDeadlines::close_at`] on, or once the chain has become untrusted.
    is_closing: AtomicBool,
    /// Whether further requests are refused: from [`CertificateDeadlines::expires_at`] on, or [`UNTRUSTED_CLOSE_TIME`] after the
    /// chain has become untrusted.
    is_refused: AtomicBool,
}

/// When the certificate of a client ends an HTTP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::inbound) struct CertificateDeadlines {
    /// The connection starts to close gracefully, so that the client sends further requests on a new connection.
    pub(in crate::inbound) close_at: Instant,
    /// Further requests are refused from then on.
    pub(in crate::inbound) expires_at: Instant,
}

impl ClientCertificate {
    pub(in crate::inbound) fn new(chain: Option<Arc<ClientChain>>) -> Self {
        Self {
            chain,
            ..Self::default()
        }
    }

    pub(in crate::inbound) fn deadlines(&self) -> Option<CertificateDeadlines> {
        let remaining = self.chain.as_ref()?.remaining_validity();
        Some(CertificateDeadlines::new(Instant::now(), remaining))
    }

    /// Checks that the client may send a request.
    ///
    /// # Errors
    /// A certificate of the client has expired, or the trust anchors no longer verify it.
    pub(in crate::inbound) fn check(&self) -> Result<(), Denied> {
        if !self.is_refused.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.chain.as_ref().is_none_or(|chain| chain.is_trusted()) {
            true => Err(Denied::CertificateExpired),
            false => Err(Denied::CertificateUntrusted),
        }
    }

    /// Whether the connection closes after its next response.
    pub(in crate::inbound) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    pub(in crate::inbound) fn set_closing(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    pub(in crate::inbound) fn set_refused(&self) {
        self.is_refused.store(true, Ordering::Relaxed);
    }
}

impl CertificateDeadlines {
    fn new(now: Instant, remaining: Duration) -> Self {
        let expires_at = now + remaining;
        Self {
            close_at: expires_at - MAX_GRACEFUL_CLOSE_TIME.min(remaining / 4),
            expires_at,
        }
    }
}

/// Waits until the trust anchors no longer verify the certificates of the client.
pub(in crate::inbound) async fn wait_untrusted(chain: Option<&ClientChain>) {
    match chain {
        // Boxed, so that the futures of connections without a certificate stay small.
        Some(chain) => Box::pin(chain.wait_untrusted()).await,
        None => pending().await,
    }
}

/// Maximum time of the graceful close before the expiry. Clients with tulle's proxy have replaced the connection before it starts
/// (`Retirement`).
const MAX_GRACEFUL_CLOSE_TIME: Duration = Duration::from_secs(60);
/// Time of the graceful close of a connection whose client the trust anchors no longer verify.
pub(in crate::inbound) const UNTRUSTED_CLOSE_TIME: Duration = Duration::from_secs(5);
/// Maximum time for requests in progress to end after the proxy has started to refuse further requests of their client.
pub(in crate::inbound) const REFUSED_CLIENT_GRACE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_begins_to_close_a_minute_or_a_quarter_of_the_validity_before_the_expiry() {
        let now = Instant::now();
        let seconds = Duration::from_secs;
        for (remaining, close_time) in [(24 * 3600, 60), (240, 60), (8, 2), (0, 0)] {
            let expected = CertificateDeadlines {
                close_at: now + seconds(remaining - close_time),
                expires_at: now + seconds(remaining),
            };
            assert_eq!(
                CertificateDeadlines::new(now, seconds(remaining)),
                expected,
                "{remaining}"
            );
        }
    }
}
