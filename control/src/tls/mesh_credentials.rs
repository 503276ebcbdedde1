//! Certificate and trust anchors of one identity, as a server and as a client, replaced together.

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
use crate::grpc::Caller;

/// A certificate with its chain and private key. The key is overwritten on drop.
pub struct LeafWithKey {
    /// The leaf first, then its issuers.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl LeafWithKey {
    /// Builds the certificate with its signing key. It reads the DER key in place, because copies would not be
    /// overwritten on drop.
    pub(super) fn certified_key(&self) -> Result<CertifiedKey, rustls::Error> {
        certified_key(self.chain.clone(), &self.key)
    }
}

/// Combines a certificate chain with a signing key. Fails if they do not match.
pub(crate) fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
) -> Result<CertifiedKey, rustls::Error> {
    let certified = CertifiedKey::new(chain, aws_lc_rs::sign::any_supported_type(key)?);
    match certified.keys_match() {
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(certified),
        Err(err) => Err(err),
    }
}

impl Drop for LeafWithKey {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl Clone for LeafWithKey {
    fn clone(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: self.key.clone_key(),
        }
    }
}

/// Whether clients need a certificate. A certificate that is sent is always verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ClientCertificates {
    #[default]
    Required,
    /// A client may have no certificate, for example a proxy of Linkerd before it gets its first certificate. The identity
    /// service always uses this rule.
    Optional,
}

impl ClientCertificates {
    /// Returns the identities of the client's certificate, to compare them with the namespace or workload that the request names
    /// as its client. `None` if nothing is compared: certificates are optional, or the client is a process on this host.
    pub(crate) fn identities_to_check(self, caller: Option<&Caller>) -> Option<&[Identity]> {
        match (self, caller) {
            (Self::Optional, _) | (Self::Required, Some(Caller::ThisMachine)) => None,
            (Self::Required, Some(Caller::Peer { identities, .. })) => Some(identities),
            (Self::Required, None) => Some(&[]),
        }
    }
}

/// The credentials for one server name. Empty until the first certificate is installed.
pub struct MeshCredentials {
    name: String,
    client_certificates: ClientCertificates,
    server_config: ArcSwapOption<ServerConfig>,
    leaf_and_anchors: ArcSwapOption<(LeafWithKey, TrustAnchors)>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("the private key of {name} does not match its certificate")]
    Key {
        name: String,
        #[source]
        source: rustls::Error,
    },
    #[error("creating the TLS configuration for {name}")]
    Config {
        name: String,
        #[source]
        source: rustls::Error,
    },
    #[error("creating the client certificate verifier for {name}")]
    Verifier {
        name: String,
        #[source]
        source: VerifierBuilderError,
    },
}

impl MeshCredentials {
    /// Creates credentials for this server name, which clients send as SNI.
    pub fn new(name: String, client_certificates: ClientCertificates) -> Self {
        Self {
            name,
            client_certificates,
            server_config: ArcSwapOption::empty(),
            leaf_and_anchors: ArcSwapOption::empty(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Uses this certificate and these trust anchors for all later handshakes.
    ///
    /// # Errors
    /// Fails if the key does not match the certificate. The former credentials stay in use then.
    pub fn install(&self, leaf: LeafWithKey, anchors: &TrustAnchors) -> Result<(), Error> {
        let name = || self.name.clone();
        let certified = leaf
            .certified_key()
            .map_err(|source| Error::Key { name: name(), source })?;
        // No CA hints: with them, a client whose certificate is of another CA would send none and count as unauthenticated.
        // Without them it sends the certificate, and the handshake fails.
        let verifier = WebPkiClientVerifier::builder_with_provider(anchors.roots(), super::crypto_provider());
        let verifier = match self.client_certificates {
            ClientCertificates::Required => verifier,
            ClientCertificates::Optional => verifier.allow_unauthenticated(),
        };
        let verifier = verifier
            .clear_root_hint_subjects()
            .build()
            .map_err(|source| Error::Verifier { name: name(), source })?;
        let verifier = Arc::new(MeshClientVerifier(verifier));
        let mut config = ServerConfig::builder_with_provider(super::crypto_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| Error::Config { name: name(), source })?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(SniCertResolver {
                name: name(),
                certified: Arc::new(certified),
            }));
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        self.server_config.store(Some(Arc::new(config)));
        self.leaf_and_anchors.store(Some(Arc::new((leaf, anchors.clone()))));
        Ok(())
    }

    /// Returns the certificate and the trust anchors for client connections under this identity. `None` before the first
    /// certificate.
    pub(crate) fn client_credentials(&self) -> Option<(LeafWithKey, TrustAnchors)> {
        let own = self.leaf_and_anchors.load_full()?;
        Some((own.0.clone(), own.1.clone()))
    }

    /// Returns the configuration for the next handshake. `None` before the first certificate.
    pub(crate) fn server_config(&self) -> Option<Arc<ServerConfig>> {
        self.server_config.load_full()
    }
}

/// Returns the identities in a verified certificate.
pub(crate) fn certificate_identities(leaf: &CertificateDer<'_>) -> Vec<Identity> {
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

impl fmt::Debug for MeshCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MeshCredentials({})", self.name)
    }
}

/// Verifies client certificates, and that their issuers are allowed to issue them. A single-identity issuer, which belongs to a
/// workload outside of clusters, may issue for its identity only.
#[derive(Debug)]
struct MeshClientVerifier(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for MeshClientVerifier {
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
        super::verify_issuer_constraints(leaf, issuers)?;
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

/// Returns the certificate if the SNI is this name, otherwise none.
#[derive(Debug)]
struct SniCertResolver {
    name: String,
    certified: Arc<CertifiedKey>,
}

impl ResolvesServerCert for SniCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let server_name = hello.server_name()?;
        server_name
            .eq_ignore_ascii_case(&self.name)
            .then(|| self.certified.clone())
    }
}
