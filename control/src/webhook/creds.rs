//! What a webhook shows to the API server, swapped as one.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;

use super::certificate::Pair;
use crate::tls;

/// The credentials of one webhook; empty until the first certificate is there.
#[derive(Default)]
pub struct Creds {
    current: ArcSwapOption<ServerConfig>,
}

impl Creds {
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows this certificate from the next handshake on.
    ///
    /// # Errors
    /// A key that is not the certificate's; what was there before stays.
    pub(super) fn install(&self, pair: &Pair) -> Result<(), rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_single_cert(pair.chain(), pair.key())?;
        // A session would outlive the certificate it was made with.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        self.current.store(Some(Arc::new(config)));
        Ok(())
    }

    pub(super) fn current(&self) -> Option<Arc<ServerConfig>> {
        self.current.load_full()
    }
}
