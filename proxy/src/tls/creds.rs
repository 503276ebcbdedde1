//! Leaf, key and trust anchors, swapped as one.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, aws_lc_rs, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedCipherSuite};
use tokio::sync::watch;
use tulle_core::identity::Identity;
use tulle_core::names::TRANSPORT_ALPN;
use zeroize::Zeroizing;

use crate::tls::chain::{self, ClientChain, ServerChain};
use crate::tls::verify::{self, Validity};

/// The roots that a peer's certificate must chain to.
#[derive(Clone)]
pub struct TrustAnchors {
    roots: Arc<RootCertStore>,
    certificates: Arc<[CertificateDer<'static>]>,
}

/// What a workload shows to its peers: its certificate, the intermediates between it and a root, and its key,
/// which is overwritten when it is dropped; rustls has a copy of its own.
pub(crate) struct Leaf {
    /// Leaf first, then its issuer, towards the root; DER.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: Zeroizing<PrivatePkcs8KeyDer<'static>>,
}

/// The name we go by, and the credentials that prove it, as of now.
///
/// Clones share one state. It starts with trust anchors alone, which is enough to verify a server; both sides of
/// mutual TLS work from the first [`Credentials::install`] on.
#[derive(Clone)]
pub(crate) struct Credentials {
    shared: Arc<Shared>,
}

/// The application protocol that a handshake asks for.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum Alpn {
    /// None is offered; the peer finds the protocol out by looking.
    Unset,
    /// `transport.l5d.io/v1`: a transport header comes before everything else.
    TransportHeader,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    #[error("reading PEM trust anchors")]
    Pem(#[source] pem::PemError),
    #[error("trust anchors hold {found} where a CERTIFICATE block is accepted")]
    NotACertificate { found: String },
    #[error("trust anchors are empty, at least one PEM CERTIFICATE block is needed")]
    NoAnchors,
    #[error("using certificate {number} of the trust anchors")]
    Anchor {
        number: usize,
        #[source]
        source: rustls::Error,
    },
    #[error("a certificate chain without a leaf")]
    EmptyChain,
    #[error("verifying our own certificate")]
    Leaf(#[source] rustls::Error),
    #[error("certificate names [{}] where {expected} is needed", .presented.join(", "))]
    LeafName { expected: Identity, presented: Vec<String> },
    #[error("certificate and private key do not form a pair that rustls can use")]
    Key(#[source] rustls::Error),
    #[error("building a TLS configuration")]
    Config(#[source] rustls::Error),
    #[error("building the client verifier")]
    ClientVerifier(#[source] rustls::server::VerifierBuilderError),
}

struct Shared {
    id: Identity,
    server_name: String,
    provider: Arc<CryptoProvider>,
    state: ArcSwap<State>,
    generation: watch::Sender<u64>,
}

/// One consistent set of credentials; handshakes take one and keep it.
struct State {
    anchors: TrustAnchors,
    leaf: Option<Leaf>,
    validity: Option<Validity>,
    clients: ByAlpn<ClientConfig>,
    servers: Option<ByAlpn<ServerConfig>>,
}

struct ByAlpn<C> {
    unset: Arc<C>,
    transport_header: Arc<C>,
}

impl TrustAnchors {
    /// Those of somebody who trusts nobody yet.
    pub fn none() -> Self {
        Self {
            roots: Arc::new(RootCertStore::empty()),
            certificates: Arc::default(),
        }
    }

    /// These and others, each once.
    pub(crate) fn and(&self, others: &Self) -> Result<Self, CredentialsError> {
        let mut certificates = self.certificates.to_vec();
        let new = others
            .certificates
            .iter()
            .filter(|other| !self.certificates.contains(other));
        certificates.extend(new.cloned());
        Self::from_der(certificates)
    }

    pub fn from_pem(text: &str) -> Result<Self, CredentialsError> {
        let blocks = pem::parse_many(text).map_err(CredentialsError::Pem)?;
        let certificates = blocks.into_iter().map(|block| match block.tag() {
            "CERTIFICATE" => Ok(CertificateDer::from(block.into_contents())),
            found => Err(CredentialsError::NotACertificate {
                found: found.to_owned(),
            }),
        });
        Self::from_der(certificates.collect::<Result<_, _>>()?)
    }

    pub fn from_der(certificates: Vec<CertificateDer<'static>>) -> Result<Self, CredentialsError> {
        if certificates.is_empty() {
            return Err(CredentialsError::NoAnchors);
        }
        let mut roots = RootCertStore::empty();
        for (number, certificate) in (1..).zip(&certificates) {
            roots
                .add(certificate.clone())
                .map_err(|source| CredentialsError::Anchor { number, source })?;
        }
        Ok(Self {
            roots: Arc::new(roots),
            certificates: certificates.into(),
        })
    }
}

#[cfg(test)]
impl TrustAnchors {
    pub(crate) fn roots(&self) -> Arc<RootCertStore> {
        self.roots.clone()
    }
}

impl PartialEq for TrustAnchors {
    fn eq(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }
}

impl Eq for TrustAnchors {}

impl fmt::Debug for TrustAnchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrustAnchors")
            .field("certificates", &self.certificates.len())
            .finish()
    }
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaf")
            .field("certificates", &self.chain.len())
            .field("key", &"…")
            .finish()
    }
}

impl Clone for Leaf {
    fn clone(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: Zeroizing::new(self.key.clone_key()),
        }
    }
}

impl Credentials {
    /// Credentials of `id` that can verify servers, and nothing else before a certificate is installed.
    ///
    /// `server_name` is the SNI under which peers reach us.
    pub(crate) fn new(id: Identity, server_name: &str, anchors: TrustAnchors) -> Result<Self, CredentialsError> {
        let provider = Arc::new(provider());
        let state = State::build(&provider, anchors, None, None)?;
        let shared = Shared {
            id,
            server_name: server_name.trim_end_matches('.').to_ascii_lowercase(),
            provider,
            state: ArcSwap::from_pointee(state),
            generation: watch::Sender::new(0),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    pub(crate) fn id(&self) -> &Identity {
        &self.shared.id
    }

    /// True when a ClientHello with this SNI is meant for us; any other is somebody else's TLS.
    pub(crate) fn is_ours(&self, sni: &str) -> bool {
        sni.trim_end_matches('.').eq_ignore_ascii_case(&self.shared.server_name)
    }

    /// The SNI under which peers reach us.
    pub(super) fn server_name(&self) -> &str {
        &self.shared.server_name
    }

    /// Our own certificate and those between it and a root, and the trust anchors.
    pub(super) fn certificates(&self) -> (Vec<CertificateDer<'static>>, Arc<[CertificateDer<'static>]>) {
        let state = self.shared.state.load();
        let chain = state.leaf.as_ref().map(|leaf| leaf.chain.clone());
        (chain.unwrap_or_default(), state.anchors.certificates.clone())
    }

    /// How many certificates have been installed; 0 before the first.
    pub(crate) fn generation(&self) -> u64 {
        *self.shared.generation.borrow()
    }

    /// Returns once there is a certificate.
    pub(crate) async fn certified(&self) {
        let mut generation = self.shared.generation.subscribe();
        // The sender lives in `self`, so the channel cannot close under us.
        let _ = generation.wait_for(|generation| *generation > 0).await;
    }

    pub(crate) fn anchors(&self) -> TrustAnchors {
        self.shared.state.load().anchors.clone()
    }

    /// The validity of our certificate.
    #[cfg(test)]
    pub(crate) fn validity(&self) -> Option<Validity> {
        self.shared.state.load().validity
    }

    /// Swaps in a certificate; see [`Credentials::replace`].
    #[cfg(test)]
    pub(crate) fn install(&self, leaf: Leaf) -> Result<Validity, CredentialsError> {
        self.replace(leaf, self.anchors())
    }

    /// Swaps in a certificate and trust anchors, after checking that it chains to them, bears our name, and fits its
    /// key.
    ///
    /// Everything stays as it was on any error.
    pub(crate) fn replace(&self, leaf: Leaf, anchors: TrustAnchors) -> Result<Validity, CredentialsError> {
        let (end_entity, intermediates) = leaf.chain.split_first().ok_or(CredentialsError::EmptyChain)?;
        chain::verify_own(end_entity, intermediates, &anchors.roots, &self.shared.provider)
            .map_err(CredentialsError::Leaf)?;
        let facts = verify::facts(end_entity).map_err(CredentialsError::Leaf)?;
        if !facts.names.contains(&self.shared.id) {
            let presented = facts.names.iter().map(ToString::to_string).collect();
            return Err(CredentialsError::LeafName {
                expected: self.shared.id.clone(),
                presented,
            });
        }
        let state = State::build(&self.shared.provider, anchors, Some(leaf), Some(facts.validity))?;
        self.shared.state.store(Arc::new(state));
        self.shared.generation.send_modify(|generation| *generation += 1);
        Ok(facts.validity)
    }

    /// Swaps the trust anchors under the certificate we have.
    ///
    /// Whoever took the issuer of our own certificate out of the bundle means it: peers are judged by the new bundle
    /// at once, and renewing our certificate is up to the caller.
    pub(crate) fn replace_anchors(&self, anchors: TrustAnchors) -> Result<(), CredentialsError> {
        let current = self.shared.state.load_full();
        let state = State::build(&self.shared.provider, anchors, current.leaf.clone(), current.validity)?;
        self.shared.state.store(Arc::new(state));
        Ok(())
    }

    /// The configuration of an outgoing handshake; it presents our certificate if there is one.
    pub(super) fn client_config(&self, alpn: Alpn) -> Arc<ClientConfig> {
        self.shared.state.load().clients.of(alpn)
    }

    /// The configuration of an incoming handshake; none before the first certificate.
    pub(super) fn server_config(&self, alpn: Alpn) -> Option<Arc<ServerConfig>> {
        self.shared
            .state
            .load()
            .servers
            .as_ref()
            .map(|servers| servers.of(alpn))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("id", &self.shared.id)
            .field("generation", &self.generation())
            .finish()
    }
}

impl State {
    fn build(
        provider: &Arc<CryptoProvider>,
        anchors: TrustAnchors,
        leaf: Option<Leaf>,
        validity: Option<Validity>,
    ) -> Result<Self, CredentialsError> {
        let server_chain = Arc::new(ServerChain::new(anchors.roots.clone(), provider));
        let clients = ByAlpn::build(|alpn| client_config(provider, &server_chain, leaf.as_ref(), alpn))?;
        let servers = match &leaf {
            Some(leaf) => {
                let client_chain = ClientChain::new(anchors.roots.clone(), provider);
                let client_chain = Arc::new(client_chain.map_err(CredentialsError::ClientVerifier)?);
                Some(ByAlpn::build(|alpn| {
                    server_config(provider, &client_chain, leaf, alpn)
                })?)
            }
            None => None,
        };
        Ok(Self {
            anchors,
            leaf,
            validity,
            clients,
            servers,
        })
    }
}

impl<C> ByAlpn<C> {
    fn build(config: impl Fn(Alpn) -> Result<C, CredentialsError>) -> Result<Self, CredentialsError> {
        let unset = Arc::new(config(Alpn::Unset)?);
        Ok(Self {
            unset,
            transport_header: Arc::new(config(Alpn::TransportHeader)?),
        })
    }

    fn of(&self, alpn: Alpn) -> Arc<C> {
        match alpn {
            Alpn::Unset => self.unset.clone(),
            Alpn::TransportHeader => self.transport_header.clone(),
        }
    }
}

impl Alpn {
    fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Unset => Vec::new(),
            Self::TransportHeader => vec![TRANSPORT_ALPN.to_vec()],
        }
    }

    pub(super) fn negotiated(protocol: Option<&[u8]>) -> Self {
        if protocol == Some(TRANSPORT_ALPN) {
            Self::TransportHeader
        } else {
            Self::Unset
        }
    }
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    server_chain: &Arc<ServerChain>,
    leaf: Option<&Leaf>,
    alpn: Alpn,
) -> Result<ClientConfig, CredentialsError> {
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(CredentialsError::Config)?
        .dangerous()
        .with_custom_certificate_verifier(server_chain.clone());
    let mut config = match leaf {
        Some(leaf) => {
            let key = PrivateKeyDer::Pkcs8(leaf.key.clone_key());
            builder
                .with_client_auth_cert(leaf.chain.clone(), key)
                .map_err(CredentialsError::Key)?
        }
        None => builder.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    config.alpn_protocols = alpn.protocols();
    Ok(config)
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    client_chain: &Arc<ClientChain>,
    leaf: &Leaf,
    alpn: Alpn,
) -> Result<ServerConfig, CredentialsError> {
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(CredentialsError::Config)?
        .with_client_cert_verifier(client_chain.clone())
        .with_single_cert(leaf.chain.clone(), PrivateKeyDer::Pkcs8(leaf.key.clone_key()))
        .map_err(CredentialsError::Key)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = alpn.protocols();
    Ok(config)
}

/// The names of cipher suites and of key exchanges, in order.
pub(crate) fn algorithms() -> (String, String) {
    let CryptoProvider {
        cipher_suites,
        kx_groups,
        ..
    } = provider();
    let suites: Vec<_> = cipher_suites
        .iter()
        .map(|suite| format!("{:?}", suite.suite()))
        .collect();
    let groups: Vec<_> = kx_groups.iter().map(|group| format!("{:?}", group.name())).collect();
    (suites.join(","), groups.join(","))
}

/// Suites and key exchanges in the order in which we prefer them; the hybrid with ML-KEM comes first because traffic
/// recorded today must not become readable later.
fn provider() -> CryptoProvider {
    use aws_lc_rs::{cipher_suite, kx_group};
    let [aes_128, aes_256] = aes_gcm();
    CryptoProvider {
        cipher_suites: vec![aes_128, aes_256, cipher_suite::TLS13_CHACHA20_POLY1305_SHA256],
        kx_groups: vec![
            kx_group::X25519MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ],
        ..aws_lc_rs::default_provider()
    }
}

/// AES-GCM of the library that is the faster one on this processor.
///
/// An instruction of AES does four blocks with AVX-512, which aws-lc knows, two with VAES alone, which only ring knows, and else
/// one. VAES alone is what Zen 3 has, and Intel's Alder Lake: aws-lc seals 16 KiB in 4.0 µs on a Zen 3, ring in 2.4; 150 bytes in
/// 0.26 and 0.17.
fn aes_gcm() -> [SupportedCipherSuite; 2] {
    if has_vaes_without_avx512() {
        use ring::cipher_suite;
        [
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
        ]
    } else {
        use aws_lc_rs::cipher_suite;
        [
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
        ]
    }
}

#[cfg(target_arch = "x86_64")]
fn has_vaes_without_avx512() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("vaes") && has!("vpclmulqdq") && has!("avx2") && !has!("avx512bw")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_vaes_without_avx512() -> bool {
    false
}
