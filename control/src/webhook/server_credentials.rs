//! The server certificate and the client verifier of one port, replaced together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;

use super::certificate::CertificateKeyPair;
use crate::tls;

/// The credentials of one port; empty until certificate and verifier are set.
#[derive(Default)]
pub struct ServerCredentials {
    current: ArcSwapOption<ServerConfig>,
    parts: Mutex<Parts>,
    /// Whether the API server cannot verify the served certificate.
    refused: AtomicBool,
}

#[derive(Default)]
struct Parts {
    certificate: Option<Arc<CertifiedKey>>,
    clients: ClientVerification,
}

/// Returns the same certificate for every ClientHello.
#[derive(Debug)]
struct SingleCertResolver(Arc<CertifiedKey>);

impl ResolvesServerCert for SingleCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[derive(Default)]
enum ClientVerification {
    /// No client certificate: the API server sends none to webhooks.
    #[default]
    NotRequired,
    /// Requires a certificate that the verifier accepts. Without a verifier every client is rejected.
    Verified(Option<Arc<dyn ClientCertVerifier>>),
}

impl ServerCredentials {
    pub fn new() -> Self {
        Self::default()
    }

    /// Credentials that reject every client until [`admit`](Self::admit) sets the verifier.
    pub fn for_verified_clients() -> Self {
        let parts = Parts {
            certificate: None,
            clients: ClientVerification::Verified(None),
        };
        Self {
            parts: Mutex::new(parts),
            ..Self::default()
        }
    }

    /// Accepts the clients of this verifier only, from the next handshake.
    ///
    /// # Errors
    /// Fails if rustls rejects the configuration; the previous one stays.
    pub fn admit(&self, clients: Arc<dyn ClientCertVerifier>) -> Result<(), rustls::Error> {
        self.change(|parts| parts.clients = ClientVerification::Verified(Some(clients)))
    }

    /// Serves this certificate from the next handshake.
    ///
    /// # Errors
    /// Fails if the key does not match the certificate; the previous one stays.
    pub(super) fn install(&self, pair: &CertificateKeyPair) -> Result<(), rustls::Error> {
        let certified = Arc::new(pair.certified()?);
        self.change(|parts| parts.certificate = Some(certified))
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
        let Some(certificate) = parts.certificate.clone() else {
            return Ok(());
        };
        let builder = ServerConfig::builder_with_provider(tls::crypto_provider()).with_protocol_versions(&[&TLS13])?;
        let builder = match &parts.clients {
            ClientVerification::NotRequired => builder.with_no_client_auth(),
            ClientVerification::Verified(None) => return Ok(()),
            ClientVerification::Verified(Some(verifier)) => builder.with_client_cert_verifier(verifier.clone()),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertResolver(certificate)));
        // A resumed session would outlive its certificate.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        self.current.store(Some(Arc::new(config)));
        Ok(())
    }
}
