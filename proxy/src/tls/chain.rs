//! Whether a peer's certificates chain to our trust anchors.
//!
//! Peers come again and again with the same certificates, and what those say does not change: while our credentials stay,
//! and each certificate is within its time, a chain that was verified is known to be good. Then only the signature of
//! the handshake itself, the proof that the peer has the key, is left to verify: one of three.

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
use tulle_core::authority;

use crate::tls::verify::{self, Validity};

/// The chains remembered at a time: more than the peers that most workloads have, at about 1 KiB each, rarely more.
const REMEMBERED: usize = 128;
/// The bytes of the longest chain that is remembered. A peer may present eight times as many.
const LONGEST: usize = 8 * 1024;

/// Verifies that a server's certificate chains to our trust anchors.
///
/// Names are deliberately not looked at here: the identity that we expect is not the SNI that we send, so
/// [`crate::tls::client::connect`] compares it once the handshake is done and before anything is sent.
#[derive(Debug)]
pub(super) struct ServerChain {
    anchors: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    known: Known,
}

/// Verifies that the certificate of a client chains to our trust anchors, if it shows one.
#[derive(Debug)]
pub(super) struct ClientChain {
    verifier: Arc<dyn ClientCertVerifier>,
    known: Known,
}

/// Verifies our own certificate as a peer with these anchors would.
pub(super) fn verify_own(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    anchors: &RootCertStore,
    provider: &CryptoProvider,
) -> Result<(), Error> {
    let algorithms = &provider.signature_verification_algorithms;
    verify_server(end_entity, intermediates, anchors, UnixTime::now(), algorithms)?;
    may_sign(end_entity, intermediates)
}

/// Whether the authorities that the peer shows may sign its certificate: those of virtual machines are for one workload.
fn may_sign(end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> Result<(), Error> {
    authority::may_sign(end_entity, intermediates.iter().map(AsRef::as_ref))
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

/// The chains last verified against one set of anchors, the newest last.
#[derive(Default)]
struct Known(Mutex<VecDeque<Chain>>);

struct Chain {
    /// As the peer presented them, leaf first.
    certificates: Vec<CertificateDer<'static>>,
    /// When all of them are valid.
    validity: Validity,
}

impl Known {
    /// Calls `verify`, unless it has said before that these certificates are good and all of them are within their time.
    fn or(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        verify: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs());
        let is_this = |chain: &Chain| chain.is(end_entity, intermediates);
        if self
            .0
            .lock()
            .iter()
            .rev()
            .find(|chain| is_this(chain))
            .is_some_and(|chain| chain.is_valid(now))
        {
            return Ok(());
        }
        verify()?;
        may_sign(end_entity, intermediates)?;
        let length: usize = intermediates
            .iter()
            .chain([end_entity])
            .map(|certificate| certificate.len())
            .sum();
        // A certificate that cannot be read may be there, as long as it is not needed.
        if length <= LONGEST
            && let Ok(chain) = Chain::new(end_entity, intermediates)
        {
            let mut known = self.0.lock();
            known.retain(|chain| !is_this(chain));
            if known.len() == REMEMBERED {
                known.pop_front();
            }
            known.push_back(chain);
        }
        Ok(())
    }
}

impl Chain {
    fn new(end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> Result<Self, Error> {
        let mut validity = verify::facts(end_entity)?.validity;
        for certificate in intermediates {
            let other = verify::facts(certificate)?.validity;
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

    fn is(&self, end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> bool {
        self.certificates
            .split_first()
            .is_some_and(|(first, others)| first == end_entity && others == intermediates)
    }

    fn is_valid(&self, now: SystemTime) -> bool {
        self.validity.not_before <= now && now <= self.validity.not_after
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").field("chains", &self.0.lock().len()).finish()
    }
}

impl ServerChain {
    pub(super) fn new(anchors: Arc<RootCertStore>, provider: &CryptoProvider) -> Self {
        Self {
            anchors,
            algorithms: provider.signature_verification_algorithms,
            known: Known::default(),
        }
    }
}

impl ClientChain {
    pub(super) fn new(
        anchors: Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, VerifierBuilderError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(anchors, provider.clone())
            .allow_unauthenticated()
            // Peers have one certificate, so naming our roots would only make every handshake longer.
            .clear_root_hint_subjects()
            .build()?;
        Ok(Self {
            verifier,
            known: Known::default(),
        })
    }
}

impl ServerCertVerifier for ServerChain {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.known.or(end_entity, intermediates, now, || {
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

impl ClientCertVerifier for ClientChain {
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
        self.known.or(end_entity, intermediates, now, || {
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
    use crate::tls::tests::{Authority, in_an_hour};
    use crate::tls::verify::HandshakeFailure;

    fn at(time: SystemTime) -> UnixTime {
        UnixTime::since_unix_epoch(time.duration_since(SystemTime::UNIX_EPOCH).unwrap())
    }

    /// Whether a chain had to be verified.
    fn had_to(known: &Known, chain: &[CertificateDer<'_>], now: SystemTime, result: Result<(), Error>) -> bool {
        let called = Cell::new(false);
        let outcome = known.or(&chain[0], &chain[1..], at(now), || {
            called.set(true);
            result.clone()
        });
        assert!(!called.get() || outcome == result);
        called.get()
    }

    #[test]
    fn what_was_verified_is_not_verified_again() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let chain = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let longer = [chain[0].clone(), authority.root.der().clone()];
        let other = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let known = Known::default();
        for chain in [&chain[..], &longer, &other] {
            assert!(had_to(&known, chain, now, Ok(())));
            assert!(!had_to(&known, chain, now, Ok(())));
        }
        assert!(!had_to(&known, &chain, now, Ok(())));
    }

    #[test]
    fn what_is_bad_is_not_remembered() {
        let chain = Authority::new().leaf(&["a.example.com"], in_an_hour()).chain;
        let known = Known::default();
        let bad = Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        assert!(had_to(&known, &chain, SystemTime::now(), bad.clone()));
        assert!(had_to(&known, &chain, SystemTime::now(), bad));
    }

    #[test]
    fn a_chain_is_known_while_all_of_it_is_valid() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let long = authority
            .leaf(&["a.example.com"], now + Duration::from_secs(7200))
            .chain;
        let short = authority.leaf(&["b.example.com"], in_an_hour()).chain;
        let chain = [long[0].clone(), short[0].clone()];
        let known = Known::default();
        assert!(had_to(&known, &chain, now, Ok(())));
        for (minutes, has_to) in [(-70, true), (-50, false), (0, false), (50, false), (70, true)] {
            let offset = Duration::from_secs(60 * i64::unsigned_abs(minutes));
            let then = if minutes < 0 { now - offset } else { now + offset };
            assert_eq!(
                had_to(&known, &chain, then, Ok(())),
                has_to,
                "{minutes} minutes from now"
            );
        }
    }

    #[test]
    fn the_issuer_of_a_virtual_machine_makes_nobody_else() {
        let authority = Authority::new();
        let vm = "spiffe://root.linkerd.cluster.local/vm-1";
        let issuer = authority.workload_issuer(vm);
        let roots = authority.anchors().roots();
        let provider = Arc::new(aws_lc_rs::default_provider());
        let server = ServerChain::new(roots.clone(), &provider);
        let client = ClientChain::new(roots.clone(), &provider).unwrap();
        let name = ServerName::try_from("web.example.com").unwrap();
        let judged = |names: &[&str]| {
            let chain = issuer.leaf(names, in_an_hour()).chain;
            let (leaf, above) = (&chain[0], [issuer.root.der().clone()]);
            let now = at(SystemTime::now());
            // Twice: what was refused is not remembered as good.
            [(); 2].map(|()| {
                [
                    server.verify_server_cert(leaf, &above, &name, &[], now).map(drop),
                    client.verify_client_cert(leaf, &above, now).map(drop),
                    verify_own(leaf, &above, &roots, &provider),
                ]
            })
        };
        for result in judged(&[vm]).concat() {
            result.unwrap();
        }
        let web = "web.shop.serviceaccount.identity.linkerd.cluster.local";
        let other = "spiffe://root.linkerd.cluster.local/vm-2";
        for names in [&[other][..], &[web], &[vm, web], &[vm, other]] {
            for result in judged(names).concat() {
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
    fn so_many_are_remembered_and_none_that_are_long_or_cannot_be_read() {
        let authority = Authority::new();
        let now = SystemTime::now();
        let known = Known::default();
        let leaf = authority.leaf(&["a.example.com"], in_an_hour()).chain;
        let long = vec![leaf[0].clone(); LONGEST / leaf[0].len() + 1];
        assert!(had_to(&known, &long, now, Ok(())) && had_to(&known, &long, now, Ok(())));
        let unread = [leaf[0].clone(), CertificateDer::from(vec![0; 10])];
        assert!(had_to(&known, &unread, now, Ok(())) && had_to(&known, &unread, now, Ok(())));
        for _ in 0..=REMEMBERED {
            let chain = authority.leaf(&["a.example.com"], in_an_hour()).chain;
            assert!(had_to(&known, &chain, now, Ok(())));
        }
        assert_eq!(known.0.lock().len(), REMEMBERED);
    }
}
