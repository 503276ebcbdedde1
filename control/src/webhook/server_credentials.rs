//! The server certificate and the client verifier of one port. Each can be replaced at any time.

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

/// The credentials of one port. Handshakes fail until the certificate is set and, if clients are verified, also their verifier.
#[derive(Default)]
pub struct ServerCredentials {
    server_config: ArcSwapOption<ServerConfig>,
    settings: Mutex<TlsSettings>,
    /// Whether the API server cannot verify the served certificate.
    untrusted: AtomicBool,
}

#[derive(Clone, Default)]
struct TlsSettings {
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

#[derive(Clone, Default)]
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

    /// Returns credentials that reject every client until [`set_client_verifier`](Self::set_client_verifier).
    pub fn for_verified_clients() -> Self {
        let settings = TlsSettings {
            certificate: None,
            clients: ClientVerification::Verified(None),
        };
        Self {
            settings: Mutex::new(settings),
            ..Self::default()
        }
    }

    /// Accepts the clients of this verifier only, from the next handshake.
    ///
    /// # Errors
    /// Fails if rustls rejects the configuration; the previous one stays.
    pub fn set_client_verifier(&self, verifier: Arc<dyn ClientCertVerifier>) -> Result<(), rustls::Error> {
        self.change(|settings| settings.clients = ClientVerification::Verified(Some(verifier)))
    }

    /// Rejects every client from the next handshake, until [`set_client_verifier`](Self::set_client_verifier).
    pub fn reject_all_clients(&self) {
        let mut settings = self.settings.lock();
        settings.clients = ClientVerification::Verified(None);
        self.server_config.store(None);
    }

    /// Serves this certificate from the next handshake.
    ///
    /// # Errors
    /// Fails if the key does not match the certificate; the previous one stays.
    pub(super) fn install(&self, pair: &CertificateKeyPair) -> Result<(), rustls::Error> {
        let certified = Arc::new(pair.certified_key()?);
        self.change(|settings| settings.certificate = Some(certified))
    }

    pub(super) fn set_untrusted(&self, untrusted: bool) {
        self.untrusted.store(untrusted, Ordering::Relaxed);
    }

    pub(super) fn is_untrusted(&self) -> bool {
        self.untrusted.load(Ordering::Relaxed)
    }

    pub(super) fn server_config(&self) -> Option<Arc<ServerConfig>> {
        self.server_config.load_full()
    }

    fn change(&self, change: impl FnOnce(&mut TlsSettings)) -> Result<(), rustls::Error> {
        let mut stored = self.settings.lock();
        let mut settings = stored.clone();
        change(&mut settings);
        if let Some(config) = settings.server_config()? {
            self.server_config.store(Some(Arc::new(config)));
        }
        *stored = settings;
        Ok(())
    }
}

impl TlsSettings {
    /// `None` while no client can be served.
    fn server_config(&self) -> Result<Option<ServerConfig>, rustls::Error> {
        let Some(certificate) = self.certificate.clone() else {
            return Ok(None);
        };
        let builder = ServerConfig::builder_with_provider(tls::crypto_provider()).with_protocol_versions(&[&TLS13])?;
        let builder = match &self.clients {
            ClientVerification::NotRequired => builder.with_no_client_auth(),
            ClientVerification::Verified(None) => return Ok(None),
            ClientVerification::Verified(Some(verifier)) => builder.with_client_cert_verifier(verifier.clone()),
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertResolver(certificate)));
        // A resumed session would outlive its certificate.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Some(config))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::server::WebPkiClientVerifier;

    use super::*;
    use crate::tls::anchors::TrustAnchors;
    use crate::trust;

    #[test]
    fn clients_are_rejected_until_a_verifier_is_set_and_after_it_is_withdrawn() {
        let ca = trust::create_anchor("ca", Duration::from_secs(600)).unwrap();
        let anchors = TrustAnchors::parse(ca.certificate.as_bytes(), "ca.pem".as_ref()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(anchors.roots(), tls::crypto_provider())
            .build()
            .unwrap();
        let pair = CertificateKeyPair::generate("telemetry", Duration::from_secs(600)).unwrap();
        let creds = ServerCredentials::for_verified_clients();
        creds.install(&pair).unwrap();
        assert!(
            creds.server_config().is_none(),
            "no handshake succeeds without a configuration"
        );
        creds.set_client_verifier(verifier.clone()).unwrap();
        assert!(creds.server_config().is_some());
        creds.reject_all_clients();
        assert!(creds.server_config().is_none());
        creds.install(&pair).unwrap();
        assert!(
            creds.server_config().is_none(),
            "a new certificate does not restore the verifier"
        );
        creds.set_client_verifier(verifier).unwrap();
        assert!(creds.server_config().is_some());
    }
}
