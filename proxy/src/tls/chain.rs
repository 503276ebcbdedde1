//! Verifies that a peer's certificates chain to the trust anchors.
//!
//! Peers reconnect with the same certificates, so verified chains are cached while the credentials stay the same and each
//! certificate is valid. For a cached chain, only the signature of the handshake is verified, which proves that the peer has
//! the private key: one signature instead of three.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
};
use tulle_core::issuer_constraints;

use crate::tls::certificate::{self, Validity};

/// Maximum number of cached chains; most workloads have fewer peers. Each takes about 1 KiB.
const MAX_CACHED_CHAINS: usize = 128;
/// Maximum size of a cached chain, in bytes. rustls accepts certificate messages of up to 64 KiB.
const MAX_CACHED_CHAIN_BYTES: usize = 8 * 1024;

/// Verifies that a server's certificate chains to the trust anchors.
///
/// Names are deliberately not checked here: the expected identity is not the SNI that is sent. [`crate::tls::client::connect`]
/// compares the identity after the handshake and before any data is sent.
#[derive(Debug)]
pub(super) struct ServerChainVerifier {
    anchors: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    cache: VerifiedChains,
}

/// Verifies that a client's certificate, if there is one, chains to the trust anchors.
#[derive(Debug)]
pub(super) struct ClientChainVerifier {
    verifier: Arc<dyn ClientCertVerifier>,
    cache: VerifiedChains,
}

/// Verifies the proxy's own certificate as a peer with these anchors would.
pub(super) fn verify_own(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    anchors: &RootCertStore,
    provider: &CryptoProvider,
) -> Result<(), Error> {
    let algorithms = &provider.signature_verification_algorithms;
    verify_server(end_entity, intermediates, anchors, UnixTime::now(), algorithms)?;
    check_issuer_constraints(end_entity, intermediates)
}

/// Checks that each intermediate has signed only identities that it may sign. The issuer of an external workload may sign one
/// identity only.
fn check_issuer_constraints(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<(), Error> {
    issuer_constraints::verify_issuers(end_entity, intermediates.iter().map(AsRef::as_ref))
        .map_err(|err| CertificateError::Other(OtherError(Arc::new(err))).into())
}

fn verify_server(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    anchors: &RootCertStore,
    now: UnixTime,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<(), Error> {
    let parsed = ParsedCertificate::try_from(end_entity)?;
    verify_server_cert_signed_by_trust_anchor(&parsed, anchors, intermediates, now, algorithms.all)
}

/// The chains that were last verified against one set of anchors, newest last.
#[derive(Default)]
struct VerifiedChains(Mutex<VecDeque<Chain>>);

struct Chain {
    /// As presented by the peer, leaf first.
    certificates: Vec<CertificateDer<'static>>,
    /// The intersection of their validity periods.
    validity: Validity,
}

impl VerifiedChains {
    /// Calls `verify`, unless the same chain was verified before and all its certificates are still valid.
    fn verify_cached(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        verify: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs());
        let is_same_chain = |chain: &Chain| chain.matches(end_entity, intermediates);
        if self
            .0
            .lock()
            .iter()
            .rev()
            .find(|chain| is_same_chain(chain))
            .is_some_and(|chain| chain.is_valid(now))
        {
            return Ok(());
        }
        verify()?;
        check_issuer_constraints(end_entity, intermediates)?;
        let length: usize = intermediates
            .iter()
            .chain([end_entity])
            .map(|certificate| certificate.len())
            .sum();
        // A chain whose validity cannot be read is not cached, so it is verified each time.
        if length <= MAX_CACHED_CHAIN_BYTES
            && let Ok(chain) = Chain::new(end_entity, intermediates)
        {
            let mut cache = self.0.lock();
            cache.retain(|chain| !is_same_chain(chain));
            if cache.len() == MAX_CACHED_CHAINS {
                cache.pop_front();
            }
            cache.push_back(chain);
        }
        Ok(())
    }
}

impl Chain {
    fn new(end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> Result<Self, Error> {
        let mut validity = certificate::parse(end_entity)?.validity;
        for certificate in intermediates {
            let other = certificate::parse(certificate)?.validity;
            validity.not_before = validity.not_before.max(other.not_before);
            validity.not_after = validity.not_after.min(other.not_after);
        }
        let certificates = [end_entity].into_iter().chain(intermediates);
        Ok(Self {
            certificates: certificates
                .map(|certificate| certificate.clone().into_owned())
                .collect(),
            validity,
        })
    }

    fn matches(&self, end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> bool {
        self.certificates
            .split_first()
            .is_some_and(|(first, others)| first == end_entity && others == intermediates)
    }

    fn is_valid(&self, now: SystemTime) -> bool {
        self.validity.not_before <= now && now <= self.validity.not_after
    }
}

impl fmt::Debug for VerifiedChains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifiedChains")
            .field("chains", &self.0.lock().len())
            .finish()
    }
}

impl ServerChainVerifier {
    pub(super) fn new(anchors: Arc<RootCertStore>, provider: &CryptoProvider) -> Self {
        Self {
            anchors,
            algorithms: provider.signature_verification_algorithms,
            cache: VerifiedChains::default(),
        }
    }
}

impl ClientChainVerifier {
    pub(super) fn new(
        anchors: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(anchors, provider.clone())
            .allow_unauthenticated()
            // Peers have one certificate, so sending root hints would only make handshakes longer.
            .clear_root_hint_subjects()
            .build()?;
        Ok(Self {
            verifier,
            cache: VerifiedChains::default(),
        })
    }

    /// Whether the trust anchors verify these certificates of a client, the first of which expires at `not_after`. If that time has
    /// passed, they are verified as of that time, so that the result does not depend on the expiry.
    pub(super) fn trusts(&self, certificates: &[CertificateDer<'_>], not_after: SystemTime) -> bool {
        let at = SystemTime::now().min(not_after).duration_since(SystemTime::UNIX_EPOCH);
        let at = UnixTime::since_unix_epoch(at.unwrap_or_default());
        certificates.split_first().is_some_and(|(end_entity, intermediates)| {
            let verified = self.verifier.verify_client_cert(end_entity, intermediates, at);
            verified.is_ok()
        })
    }
}

impl ServerCertVerifier for ServerChainVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.cache.verify_cached(end_entity, intermediates, now, || {
            verify_server(end_entity, intermediates, &self.anchors, now, &self.algorithms)
        })?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for ClientChainVerifier {
    fn offer_client_auth(&self) -> bool {
        self.verifier.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.verifier.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.cache.verify_cached(end_entity, intermediates, now, || {
            self.verifier
                .verify_client_cert(end_entity, intermediates, now)
                .map(drop)
        })?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustls::crypto::aws_lc_rs;

    use super::*;
    use crate::tls::handshake_failure::HandshakeFailure;
    use crate::tls::tests::{Authority, in_an_hour};

    fn at(time: SystemTime) -> UnixTime {
        UnixTime::since_unix_epoch(time.duration_since(SystemTime::UNIX_EPOCH).unwrap())
    }

    /// Whether `verify` was called: the chain was not in the cache.
    fn verify_was_called(
        cache: &VerifiedChains,
        chain: &[CertificateDer<'_>],
        now: SystemTime,
        result: Result<(), Error>,
    ) -> bool {
        let called = Cell::new(false);
        let outcome = cache.verify_cached(&chain[0], &chain[1..], at(now), || {
            called.set(true);
            result.clone()
        });
        assert!(!called.get() || outcome == result);
        called.get()
    }

    #[test]
    fn a_cached_chain_is_not_verified_again() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let chain = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let longer = [chain[0].clone(), authority.certificate.der().clone()];
        let other = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let cache = VerifiedChains::default();
        for chain in [&chain[..], &longer, &other] {
            assert!(verify_was_called(&cache, chain, now, Ok(())));
            assert!(!verify_was_called(&cache, chain, now, Ok(())));
        }
        assert!(!verify_was_called(&cache, &chain, now, Ok(())));
    }

    #[test]
    fn refused_chains_are_not_cached() {
        let chain = Authority::new().leaf(&["a.example.com"], in_an_hour()).chain;
        let cache = VerifiedChains::default();
        let bad = Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        assert!(verify_was_called(&cache, &chain, SystemTime::now(), bad.clone()));
        assert!(verify_was_called(&cache, &chain, SystemTime::now(), bad));
    }

    #[test]
    fn a_chain_is_cached_while_all_its_certificates_are_valid() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let long = authority
            .leaf(&["a.example.com"], now + Duration::from_secs(7200))
            .chain;
        let short = authority.leaf(&["b.example.com"], in_an_hour()).chain;
        let chain = [long[0].clone(), short[0].clone()];
        let cache = VerifiedChains::default();
        assert!(verify_was_called(&cache, &chain, now, Ok(())));
        for (minutes, must_verify) in [(-70, true), (-50, false), (0, false), (50, false), (70, true)] {
            let offset = Duration::from_secs(60 * i64::unsigned_abs(minutes));
            let time = if minutes < 0 { now - offset } else { now + offset };
            assert_eq!(
                verify_was_called(&cache, &chain, time, Ok(())),
                must_verify,
                "{minutes} minutes from now"
            );
        }
    }

    #[test]
    fn a_single_identity_issuer_cannot_sign_other_identities() {
        let authority = Authority::new();
        let vm = "spiffe://root.linkerd.cluster.local/vm-1";
        let issuer = authority.single_identity_issuer(vm);
        let roots = authority.anchors().roots();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let server = ServerChainVerifier::new(roots.clone(), &provider);
        let client = ClientChainVerifier::new(roots.clone(), &provider).unwrap();
        let name = ServerName::try_from("web.example.com").unwrap();
        let verify_all = |names: &[&str]| {
            let chain = issuer.leaf(names, in_an_hour()).chain;
            let (leaf, intermediates) = (&chain[0], [issuer.certificate.der().clone()]);
            let now = at(SystemTime::now());
            // Twice, because a refused chain must not be cached.
            [(); 2].map(|()| {
                [
                    server
                        .verify_server_cert(leaf, &intermediates, &name, &[], now)
                        .map(drop),
                    client.verify_client_cert(leaf, &intermediates, now).map(drop),
                    verify_own(leaf, &intermediates, &roots, &provider),
                ]
            })
        };
        for result in verify_all(&[vm]).concat() {
            result.unwrap();
        }
        let web = "web.shop.serviceaccount.identity.linkerd.cluster.local";
        let other = "spiffe://root.linkerd.cluster.local/vm-2";
        for names in [&[other][..], &[web], &[vm, web], &[vm, other]] {
            for result in verify_all(names).concat() {
                let Err(Error::InvalidCertificate(reason)) = result else {
                    panic!("{names:?}: {result:?}");
                };
                assert_eq!(
                    HandshakeFailure::from(&reason),
                    HandshakeFailure::BadCertificate,
                    "{names:?}"
                );
            }
        }
    }

    #[test]
    fn a_chain_with_an_invalid_intermediate_is_refused() {
        let [leaf, ..] = &Authority::new().leaf(&["a.example.com"], in_an_hour()).chain[..] else {
            panic!("the chain is empty");
        };
        let invalid = CertificateDer::from(vec![0; 10]);
        let now = at(SystemTime::now());
        let result = VerifiedChains::default().verify_cached(leaf, &[invalid], now, || Ok(()));
        assert!(
            matches!(result, Err(Error::InvalidCertificate(CertificateError::Other(_)))),
            "its constraints are unknown: {result:?}"
        );
    }

    #[test]
    fn the_cache_is_bounded_and_does_not_store_long_chains() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let cache = VerifiedChains::default();
        let leaf = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let long = vec![leaf[0].clone(); MAX_CACHED_CHAIN_BYTES / leaf[0].len() + 1];
        assert!(verify_was_called(&cache, &long, now, Ok(())) && verify_was_called(&cache, &long, now, Ok(())));
        for _ in 0..=MAX_CACHED_CHAINS {
            let chain = authority.leaf(&["a.example.com"], in_an_hour()).chain;
            assert!(verify_was_called(&cache, &chain, now, Ok(())));
        }
        assert_eq!(cache.0.lock().len(), MAX_CACHED_CHAINS);
    }
}
