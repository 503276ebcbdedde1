use std::time::Duration;

use http::HeaderValue;
use tokio_rustls::TlsAcceptor;

/// State shared by all connections.
pub(super) struct App {
    pub(super) name: String,
    /// The server name as the value of the header `x-replica`.
    pub(super) replica: HeaderValue,
    pub(super) delay: Duration,
    /// Whether all responses have the same `date`.
    pub(super) fixed_date: bool,
    /// Present if a listener uses TLS.
    pub(super) tls: Option<TlsAcceptor>,
}

/// Waits for the configured delay.
pub(super) async fn delay_response(delay: Duration) {
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
}
