//! Trust anchors: the accepted root certificates, read from a PEM bundle.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, VerifierBuilderError};

/// A bundle of root certificates. Cheap to clone.
#[derive(Clone)]
pub struct TrustAnchors {
    certs: Arc<[CertificateDer<'static>]>,
    roots: Arc<RootCertStore>,
    verifier: Arc<WebPkiServerVerifier>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("reading trust anchors from {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the trust anchors in {path:?} are not PEM certificates")]
    Pem {
        path: PathBuf,
        #[source]
        source: pem::Error,
    },
    #[error("{path:?} contains no certificate; expected a PEM bundle of trust anchors")]
    Empty { path: PathBuf },
    #[error("certificate {number} in {path:?} cannot be a trust anchor")]
    Anchor {
        path: PathBuf,
        /// Counted from 1.
        number: usize,
        #[source]
        source: rustls::Error,
    },
    #[error("creating a certificate verifier from {path:?}")]
    Verifier {
        path: PathBuf,
        #[source]
        source: VerifierBuilderError,
    },
}

impl TrustAnchors {
    /// Reads a PEM bundle. One invalid certificate makes the bundle invalid, because an incomplete bundle would break a
    /// part of the mesh.
    ///
    /// # Errors
    /// Fails if the file contains no certificate or an invalid one.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let pem = std::fs::read(path).map_err(|source| Error::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&pem, path)
    }

    /// Like [`read`](Self::read). `path` is only used in errors.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(pem: &[u8], path: &Path) -> Result<Self, Error> {
        let certs = CertificateDer::pem_slice_iter(pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| Error::Pem {
                path: path.to_owned(),
                source,
            })?;
        if certs.is_empty() {
            return Err(Error::Empty { path: path.to_owned() });
        }
        let mut roots = RootCertStore::empty();
        for (i, cert) in certs.iter().enumerate() {
            roots.add(cert.clone()).map_err(|source| Error::Anchor {
                path: path.to_owned(),
                number: i + 1,
                source,
            })?;
        }
        let roots = Arc::new(roots);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), super::crypto_provider())
            .build()
            .map_err(|source| Error::Verifier {
                path: path.to_owned(),
                source,
            })?;
        Ok(Self {
            certs: certs.into(),
            roots,
            verifier,
        })
    }

    pub fn certs(&self) -> &[CertificateDer<'static>] {
        &self.certs
    }

    pub(crate) fn roots(&self) -> Arc<RootCertStore> {
        self.roots.clone()
    }

    /// Verifies a leaf for a server name at a given time.
    pub(crate) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        self.verifier.verify_server_cert(leaf, issuers, name, &[], now)?;
        super::verify_issuer_constraints(leaf, issuers)
    }

    /// Verifies a certificate chain at the current time, leaf first, for any server name.
    ///
    /// # Errors
    /// Fails if the verification fails.
    pub fn verify_chain(&self, chain: &[Vec<u8>]) -> Result<(), rustls::Error> {
        let chain: Vec<_> = chain.iter().map(|der| CertificateDer::from(&der[..])).collect();
        let (leaf, issuers) = chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
        self.verify_chain_at(leaf, issuers, UnixTime::now())
    }

    /// Like [`verify_chain`](Self::verify_chain), at a given time.
    pub(super) fn verify_chain_at(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let algorithms = super::crypto_provider().signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, issuers, now, algorithms)?;
        super::verify_issuer_constraints(leaf, issuers)
    }
}

impl fmt::Debug for TrustAnchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrustAnchors({})", self.certs.len())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};

    use super::*;
    use crate::trust::{self, CertificateAuthority};

    /// Signs a leaf with these names without checking the issuer's constraints. Returns the leaf and its issuer.
    fn sign_without_checks(names: &[&str], by: &CertificateAuthority) -> Vec<Vec<u8>> {
        let authority = CertificateDer::from_pem_slice(by.certificate.as_bytes()).unwrap();
        let issuer = Issuer::from_ca_cert_der(&authority, KeyPair::from_pem(&by.key).unwrap()).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.contains("://") {
                true => SanType::URI((*name).try_into().unwrap()),
                false => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let leaf = params.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
        vec![leaf.der().to_vec(), authority.to_vec()]
    }

    #[test]
    fn a_single_identity_issuer_cannot_issue_for_other_identities() {
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let anchors = TrustAnchors::parse(anchor.certificate.as_bytes(), Path::new("ca.crt")).unwrap();
        let (vm, hour) = ("spiffe://root.test/vm", Duration::from_secs(3600));
        let issuer = trust::create_single_identity_issuer(vm, trust::ISSUER_LIFETIME, &anchor).unwrap();
        anchors
            .verify_chain(&trust::create_svid(vm, hour, &issuer).unwrap().chain)
            .unwrap();
        let (other, web) = (
            "spiffe://root.test/other",
            "web.shop.serviceaccount.identity.linkerd.cluster.local",
        );
        for names in [&[other][..], &[web], &[vm, web], &[vm, other], &[]] {
            let err = anchors.verify_chain(&sign_without_checks(names, &issuer)).unwrap_err();
            assert!(matches!(err, rustls::Error::InvalidCertificate(_)), "{names:?}: {err}");
        }
        // DNS names are rejected by the name constraints alone, which other proxies check, too.
        let chain: Vec<_> = sign_without_checks(&[web], &issuer)
            .into_iter()
            .map(CertificateDer::from)
            .collect();
        let algorithms = crate::tls::crypto_provider().signature_verification_algorithms.all;
        let leaf = ParsedCertificate::try_from(&chain[0]).unwrap();
        let (roots, now) = (anchors.roots(), UnixTime::now());
        let err = verify_server_cert_signed_by_trust_anchor(&leaf, &roots, &chain[1..], now, algorithms).unwrap_err();
        assert!(format!("{err:?}").contains("NameConstraintViolation"), "{err:?}");
    }

    #[test]
    fn a_bundle_with_one_invalid_certificate_is_rejected() {
        let path = Path::new("roots.pem");
        let anchor = || {
            trust::create_anchor("root", trust::ANCHOR_LIFETIME)
                .unwrap()
                .certificate
        };
        let bundle = [anchor(), anchor()].concat();
        assert_eq!(TrustAnchors::parse(bundle.as_bytes(), path).unwrap().certs().len(), 2);
        let check = |text: &str, expected: &str| {
            let err = TrustAnchors::parse(text.as_bytes(), path).unwrap_err().to_string();
            assert!(err.starts_with(expected), "{err}");
        };
        check("", "\"roots.pem\" contains no certificate");
        check(
            &bundle[..bundle.len() - 40],
            "the trust anchors in \"roots.pem\" are not PEM",
        );
        let invalid_certificate = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
        check(
            &format!("{bundle}{invalid_certificate}"),
            "certificate 3 in \"roots.pem\" cannot be",
        );
        assert!(matches!(
            TrustAnchors::read(Path::new("/does/not/exist")),
            Err(Error::Read { .. })
        ));
    }
}
