//! What a port shows to the API server and whom it believes, swapped as one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;

use super::certificate::Pair;
use crate::tls;

/// The credentials of one port; empty until all parts are there.
#[derive(Default)]
pub struct Creds {
    current: ArcSwapOption<ServerConfig>,
    parts: Mutex<Parts>,
    /// Whether the API server does not take what is shown, as far as we know.
    refused: AtomicBool,
}

#[derive(Default)]
struct Parts {
    shown: Option<Arc<CertifiedKey>>,
    clients: Clients,
}

/// Shows the one certificate to whoever asks.
#[derive(Debug)]
struct Shown(Arc<CertifiedKey>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// Who may connect.
#[derive(Default)]
enum Clients {
    /// Whoever does: the API server sends webhooks no certificate.
    #[default]
    Anybody,
    /// Who has a certificate that this accepts; nobody until it is known.
    Verified(Option<Arc<dyn ClientCertVerifier>>),
}

impl Creds {
    pub fn new() -> Self {
        Self::default()
    }

    /// Credentials of a port that nobody may connect to before [`admit`](Self::admit) has said who.
    pub fn for_verified_clients() -> Self {
        let parts = Parts {
            shown: None,
            clients: Clients::Verified(None),
        };
        Self {
            parts: Mutex::new(parts),
            ..Self::default()
        }
    }

    /// Lets these clients connect and no others, from the next handshake on.
    ///
    /// # Errors
    /// None that is known of; what was there before stays.
    pub fn admit(&self, clients: Arc<dyn ClientCertVerifier>) -> Result<(), rustls::Error> {
        self.change(|parts| parts.clients = Clients::Verified(Some(clients)))
    }

    /// Shows this certificate from the next handshake on.
    ///
    /// # Errors
    /// A key that is not the certificate's; what was there before stays.
    pub(super) fn install(&self, pair: &Pair) -> Result<(), rustls::Error> {
        let certified = Arc::new(pair.certified()?);
        self.change(|parts| parts.shown = Some(certified))
    }

    pub(super) fn set_refused(&self, refused: bool) {
        self.refused.store(refused, Ordering::Relaxed);
    }

    pub(super) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    pub(super) fn current(&self) -> Option<Arc<ServerConfig>> {
        self.current.load_full()
    }

    fn change(&self, change: impl FnOnce(&mut Parts)) -> Result<(), rustls::Error> {
        let mut parts = self.parts.lock();
        change(&mut parts);
        let Some(shown) = parts.shown.clone() else {
            return Ok(());
        };
        let builder = ServerConfig::builder_with_provider(tls::provider()).with_protocol_versions(&[&TLS13])?;
        let builder = match &parts.clients {
            Clients::Anybody => builder.with_no_client_auth(),
            Clients::Verified(None) => return Ok(()),
            Clients::Verified(Some(verifier)) => builder.with_client_cert_verifier(verifier.clone()),
        };
        let mut config = builder.with_cert_resolver(Arc::new(Shown(shown)));
        // A session would outlive the certificate it was made with.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        self.current.store(Some(Arc::new(config)));
        Ok(())
    }
}
