//! What a TLS server shows and whom it believes, swapped as one.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{DigitallySignedStruct, DistinguishedName, InconsistentKeys, ServerConfig, SignatureScheme};
use tulle_core::identity::Identity;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::Zeroize as _;

use super::anchors::TrustAnchors;

/// A certificate with its chain and private key, which is overwritten in the end.
pub struct Leaf {
    /// The leaf first, then its issuers.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Leaf {
    /// The certificate with a key that signs. The key in DER is read and not copied: copies are not overwritten.
    pub(super) fn certified(&self) -> Result<CertifiedKey, rustls::Error> {
        certified(self.chain.clone(), &self.key)
    }
}

/// A certificate with a key that signs, if they belong together.
pub(crate) fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
) -> Result<CertifiedKey, rustls::Error> {
    let certified = CertifiedKey::new(chain, aws_lc_rs::sign::any_supported_type(key)?);
    match certified.keys_match() {
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(certified),
        Err(err) => Err(err),
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl Clone for Leaf {
    fn clone(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: self.key.clone_key(),
        }
    }
}

/// Whether clients have to show a certificate. One that is shown is always verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ClientCertificates {
    #[default]
    Required,
    /// For the identity service, which gives certificates, and for proxies that connect before they have one.
    Optional,
}

/// The credentials of one server name; empty until the first certificate is there.
pub struct ServerCreds {
    name: String,
    clients: ClientCertificates,
    current: ArcSwapOption<ServerConfig>,
    own: ArcSwapOption<(Leaf, TrustAnchors)>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("the private key and the certificate of {name} do not go together")]
    Key {
        name: String,
        #[source]
        source: rustls::Error,
    },
    #[error("preparing TLS for {name}")]
    Config {
        name: String,
        #[source]
        source: rustls::Error,
    },
    #[error("preparing the verification of clients of {name}")]
    Verifier {
        name: String,
        #[source]
        source: VerifierBuilderError,
    },
}

impl ServerCreds {
    /// Credentials for this TLS server name, which clients ask for by SNI.
    pub fn new(name: String, clients: ClientCertificates) -> Self {
        Self {
            name,
            clients,
            current: ArcSwapOption::empty(),
            own: ArcSwapOption::empty(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shows this certificate and believes these anchors, from the next handshake on.
    ///
    /// # Errors
    /// A key that is not the certificate's; what was there before stays.
    pub fn install(&self, leaf: Leaf, anchors: &TrustAnchors) -> Result<(), Error> {
        let name = || self.name.clone();
        let certified = leaf.certified().map_err(|source| Error::Key { name: name(), source })?;
        // Without hints every client sends what it has, and a foreign certificate is refused instead of withheld.
        let verifier = WebPkiClientVerifier::builder_with_provider(anchors.roots(), super::provider());
        let verifier = match self.clients {
            ClientCertificates::Required => verifier,
            ClientCertificates::Optional => verifier.allow_unauthenticated(),
        };
        let verifier = verifier
            .clear_root_hint_subjects()
            .build()
            .map_err(|source| Error::Verifier { name: name(), source })?;
        let verifier = Arc::new(Peers(verifier));
        let mut config = ServerConfig::builder_with_provider(super::provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| Error::Config { name: name(), source })?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(ForName {
                name: name(),
                certified: Arc::new(certified),
            }));
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        self.current.store(Some(Arc::new(config)));
        self.own.store(Some(Arc::new((leaf, anchors.clone()))));
        Ok(())
    }

    /// What a client shows that goes by this name, and whom it believes, if there is a certificate yet.
    pub(crate) fn as_client(&self) -> Option<(Leaf, TrustAnchors)> {
        let own = self.own.load_full()?;
        Some((own.0.clone(), own.1.clone()))
    }

    /// What the next handshake uses, if there is a certificate yet.
    pub(crate) fn current(&self) -> Option<Arc<ServerConfig>> {
        self.current.load_full()
    }
}

/// The identities that a verified certificate carries.
pub(crate) fn identities(leaf: &CertificateDer<'_>) -> Vec<Identity> {
    let Ok((_, leaf)) = X509Certificate::from_der(leaf) else {
        return Vec::new();
    };
    let Ok(Some(names)) = leaf.subject_alternative_name() else {
        return Vec::new();
    };
    let names = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => name.parse().ok(),
        _ => None,
    });
    names.collect()
}

impl fmt::Debug for ServerCreds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerCreds({})", self.name)
    }
}

/// Verifies clients, and that the authorities that they show may sign their certificates: those of virtual machines are
/// for one workload.
#[derive(Debug)]
struct Peers(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for Peers {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(leaf, issuers, now)?;
        super::may_sign(leaf, issuers)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Shows a certificate to those who ask for its name, and nothing to others.
#[derive(Debug)]
struct ForName {
    name: String,
    certified: Arc<CertifiedKey>,
}

impl ResolvesServerCert for ForName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let asked = hello.server_name()?;
        asked.eq_ignore_ascii_case(&self.name).then(|| self.certified.clone())
    }
}
