//! The issuer: a CA from a directory that signs leaf certificates. Immutable after loading.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    Certificate, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use x509_parser::error::X509Error;
use zeroize::Zeroizing;

use crate::tls;
use crate::tls::anchors::TrustAnchors;
use crate::trust;

/// A CA below the trust anchors, with its private key.
pub(crate) struct Issuer {
    anchors: TrustAnchors,
    /// The issuer first, then its parents.
    chain: Vec<CertificateDer<'static>>,
    signer: rcgen::Issuer<'static, KeyPair>,
    /// Earliest expiry of a certificate in the chain.
    expires_at: OffsetDateTime,
    verification_leaf: VerificationLeaf,
}

#[derive(Clone, Copy, Debug)]
pub struct Validity {
    /// Lifetime of a leaf.
    pub lifetime: Duration,
    /// Maximum clock skew in the mesh; added before and after the lifetime.
    pub clock_skew: Duration,
}

/// The content of a leaf certificate.
#[derive(Debug)]
pub(crate) struct LeafContent<'a> {
    pub(crate) identity: &'a str,
    /// Whether the identity is also the common name, for software that does not read subject alternative names.
    pub(crate) with_common_name: bool,
    pub(crate) key: &'a SubjectPublicKeyInfo,
}

#[derive(Debug)]
pub(crate) struct IssuedCertificate {
    pub(crate) certificate: Certificate,
    pub(crate) valid_until: OffsetDateTime,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum IssuerError {
    #[error("no issuer in {dir:?}; expected crt.pem and key.pem, or tls.crt and tls.key")]
    Missing { dir: PathBuf },
    #[error("reading {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} is not PEM; expected {expected}")]
    Pem {
        path: PathBuf,
        expected: &'static str,
        #[source]
        source: pem::Error,
    },
    #[error("{path:?} holds no certificate")]
    Empty { path: PathBuf },
    #[error("{path:?} holds a certificate that cannot be read")]
    Certificate {
        path: PathBuf,
        #[source]
        source: X509Error,
    },
    #[error("{path:?} holds no private key that signs; expected ECDSA, RSA or Ed25519")]
    Key {
        path: PathBuf,
        #[source]
        source: rcgen::Error,
    },
    #[error("the certificate in {path:?} may not sign others; expected an authority (CA, keyCertSign)")]
    NotAuthority { path: PathBuf },
    #[error("the private key in {path:?} does not belong to the issuer's certificate")]
    Mismatch { path: PathBuf },
    #[error("the issuer in {path:?} cannot be used for signing")]
    Signer {
        path: PathBuf,
        #[source]
        source: rcgen::Error,
    },
    #[error(
        "the subject of the issuer in {path:?} has an attribute twice, which is not supported; create an issuer whose subject \
         has each attribute once"
    )]
    Subject { path: PathBuf },
    #[error("{name:?} is not a DNS name")]
    Name {
        name: String,
        #[source]
        source: InvalidDnsNameError,
    },
    #[error("the issuer in {path:?} is not verified by the trust anchors")]
    Unverified {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SignError {
    #[error("signing a certificate for {identity}")]
    Sign {
        identity: String,
        #[source]
        source: rcgen::Error,
    },
    #[error("no randomness for a serial number")]
    Random(#[source] rustls::Error),
}

/// A leaf certificate that is signed at load time, to check that the trust anchors accept the leaf certificates of this issuer.
struct VerificationLeaf {
    name: ServerName<'static>,
    leaf: CertificateDer<'static>,
}

impl Issuer {
    /// Loads the issuer from a directory, and checks that the anchors verify a leaf certificate for `name` that it signs.
    pub(crate) fn load(dir: &Path, anchors: TrustAnchors, name: &str) -> Result<Self, IssuerError> {
        let (cert_path, key_path) = certificate_and_key_paths(dir)?;
        let chain = read_chain(&cert_path)?;
        let (expires_at, spki) = check_chain(&chain, &cert_path)?;
        let key = read_key(&key_path)?;
        if key.subject_public_key_info() != spki {
            return Err(IssuerError::Mismatch { path: key_path });
        }
        let signer = rcgen::Issuer::from_ca_cert_der(&chain[0], key).map_err(|source| IssuerError::Signer {
            path: cert_path.clone(),
            source,
        })?;
        let verification_leaf = VerificationLeaf::sign(&signer, name, expires_at).map_err(|err| match err {
            VerificationLeafError::Name(source) => IssuerError::Name {
                name: name.to_owned(),
                source,
            },
            VerificationLeafError::Sign(source) => IssuerError::Signer {
                path: cert_path.clone(),
                source,
            },
        })?;
        if !trust::issuer_name_matches(&verification_leaf.leaf, &chain[0]) {
            return Err(IssuerError::Subject { path: cert_path });
        }
        let issuer = Self {
            anchors,
            chain,
            signer,
            expires_at,
            verification_leaf,
        };
        match issuer.verify(OffsetDateTime::now_utc()) {
            Ok(()) => Ok(issuer),
            Err(source) => Err(IssuerError::Unverified {
                path: cert_path,
                source,
            }),
        }
    }

    /// Checks that the trust anchors still verify leaves of this issuer.
    pub(crate) fn verify(&self, now: OffsetDateTime) -> Result<(), rustls::Error> {
        let since_epoch = Duration::from_secs(now.unix_timestamp().try_into().unwrap_or(0));
        let now = UnixTime::since_unix_epoch(since_epoch);
        self.anchors.verify(
            &self.verification_leaf.leaf,
            &self.chain,
            &self.verification_leaf.name,
            now,
        )
    }

    /// Signs a leaf for the requested lifetime, but at most until the chain expires.
    ///
    /// The certificate is valid from `now` minus the clock skew until `now` plus the lifetime plus the clock skew, in whole seconds.
    pub(crate) fn sign(
        &self,
        content: &LeafContent<'_>,
        validity: Validity,
        now: OffsetDateTime,
    ) -> Result<IssuedCertificate, SignError> {
        let now = now.replace_nanosecond(0).unwrap_or(now);
        let mut serial = [0; SERIAL_LEN];
        tls::crypto_provider()
            .secure_random
            .fill(&mut serial)
            .map_err(|err| SignError::Random(err.into()))?;
        // Serial numbers must be positive.
        serial[0] &= 0x7f;
        let sign_error = |source| SignError::Sign {
            identity: content.identity.to_owned(),
            source,
        };
        let mut params = leaf_params(content.identity).map_err(sign_error)?;
        if content.with_common_name {
            params
                .distinguished_name
                .push(DnType::CommonName, content.identity.to_owned());
        }
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        (params.not_before, params.not_after) = validity.not_before_and_after(now);
        params.not_after = params.not_after.min(self.expires_at);
        let certificate = params.signed_by(content.key, &self.signer).map_err(sign_error)?;
        Ok(IssuedCertificate {
            certificate,
            valid_until: params.not_after,
        })
    }

    /// The issuer first, then its parents. Peers need them to verify a leaf against the trust anchors.
    pub(crate) fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    pub(crate) fn anchors(&self) -> &TrustAnchors {
        &self.anchors
    }

    /// Earliest expiry of a certificate in the chain.
    pub(crate) fn expires_at(&self) -> OffsetDateTime {
        self.expires_at
    }
}

impl Validity {
    /// Returns `not_before` and `not_after` of a certificate that is issued now. On overflow they are 1970 and [`MAX_NOT_AFTER`].
    fn not_before_and_after(self, now: OffsetDateTime) -> (OffsetDateTime, OffsetDateTime) {
        let signed = |duration| time::Duration::try_from(duration).unwrap_or(time::Duration::MAX);
        let skew = signed(self.clock_skew);
        let end = signed(self.lifetime).saturating_add(skew);
        let last = OffsetDateTime::from_unix_timestamp(MAX_NOT_AFTER).unwrap_or(now);
        (
            now.checked_sub(skew).unwrap_or(OffsetDateTime::UNIX_EPOCH),
            now.checked_add(end).unwrap_or(last),
        )
    }
}

enum VerificationLeafError {
    Name(InvalidDnsNameError),
    Sign(rcgen::Error),
}

impl VerificationLeaf {
    fn sign(
        signer: &rcgen::Issuer<'_, KeyPair>,
        name: &str,
        until: OffsetDateTime,
    ) -> Result<Self, VerificationLeafError> {
        let server_name = ServerName::try_from(name.to_owned()).map_err(VerificationLeafError::Name)?;
        let mut params = leaf_params(name).map_err(VerificationLeafError::Sign)?;
        params.not_before = OffsetDateTime::UNIX_EPOCH;
        params.not_after = until;
        // The private key is dropped, so the identity of the verification leaf cannot be used.
        let key = KeyPair::generate().map_err(VerificationLeafError::Sign)?;
        let leaf = params.signed_by(&key, signer).map_err(VerificationLeafError::Sign)?;
        Ok(Self {
            name: server_name,
            leaf: leaf.der().clone(),
        })
    }
}

pub(crate) fn rfc3339(time: OffsetDateTime) -> String {
    // Only years above 9999 cannot be formatted; certificates cannot contain them.
    time.format(&Rfc3339).unwrap_or_default()
}

/// Parameters that all leaves share.
fn leaf_params(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::DnsName(name.try_into()?)];
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Tries the file names of Linkerd's charts first, then those of Kubernetes TLS Secrets.
fn certificate_and_key_paths(dir: &Path) -> Result<(PathBuf, PathBuf), IssuerError> {
    [("crt.pem", "key.pem"), ("tls.crt", "tls.key")]
        .map(|(cert, key)| (dir.join(cert), dir.join(key)))
        .into_iter()
        .find(|(cert, _)| cert.exists())
        .ok_or_else(|| IssuerError::Missing { dir: dir.to_owned() })
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, IssuerError> {
    let chain = CertificateDer::pem_slice_iter(&read(path)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| IssuerError::Pem {
            path: path.to_owned(),
            expected: "certificates, the issuer's first",
            source,
        })?;
    match chain.is_empty() {
        true => Err(IssuerError::Empty { path: path.to_owned() }),
        false => Ok(chain),
    }
}

fn read_key(path: &Path) -> Result<KeyPair, IssuerError> {
    let pem = Zeroizing::new(read(path)?);
    let der = PrivateKeyDer::from_pem_slice(&pem).map_err(|source| IssuerError::Pem {
        path: path.to_owned(),
        expected: "one private key",
        source,
    })?;
    let der = Zeroizing::new(der);
    KeyPair::try_from(&*der).map_err(|source| IssuerError::Key {
        path: path.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, IssuerError> {
    std::fs::read(path).map_err(|source| IssuerError::Read {
        path: path.to_owned(),
        source,
    })
}

/// Checks that the issuer is a CA. Returns the earliest expiry in the chain and the issuer's public key.
fn check_chain(chain: &[CertificateDer<'_>], path: &Path) -> Result<(OffsetDateTime, Vec<u8>), IssuerError> {
    let unreadable = |source| IssuerError::Certificate {
        path: path.to_owned(),
        source,
    };
    let mut ends = Vec::with_capacity(chain.len());
    let mut spki = Vec::new();
    for (i, der) in chain.iter().enumerate() {
        let (_, cert) = x509_parser::parse_x509_certificate(der).map_err(|err| unreadable(err.into()))?;
        ends.push(cert.validity().not_after.to_datetime());
        if i == 0 {
            if !trust::is_authority(&cert).map_err(unreadable)? {
                return Err(IssuerError::NotAuthority { path: path.to_owned() });
            }
            spki = cert.public_key().raw.to_vec();
        }
    }
    let first_end = ends.into_iter().min().unwrap_or(OffsetDateTime::UNIX_EPOCH);
    Ok((first_end, spki))
}

/// Length of a serial number in bytes. RFC 5280 allows 20; 16 random bytes do not collide in practice.
const SERIAL_LEN: usize = 16;
/// 9999-12-31T23:59:59Z in seconds since 1970.
const MAX_NOT_AFTER: i64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use std::fs;

    use x509_parser::extensions::GeneralName;

    use super::*;
    use crate::trust::CertificateAuthority;

    const IDENTITY: &str = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local";
    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Validity = Validity {
        lifetime: Duration::from_secs(24 * 3600),
        clock_skew: Duration::from_secs(20),
    };

    fn anchor() -> CertificateAuthority {
        trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap()
    }

    fn anchors(authority: &CertificateAuthority) -> TrustAnchors {
        TrustAnchors::parse(authority.certificate.as_bytes(), Path::new("roots.pem")).unwrap()
    }

    fn load(files: &[(&str, &str)], anchor: &CertificateAuthority) -> Result<Issuer, String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        Issuer::load(dir.path(), anchors(anchor), IDENTITY).map_err(|err| {
            let source = std::error::Error::source(&err);
            format!("{err}: {}", source.map(ToString::to_string).unwrap_or_default())
        })
    }

    /// An issuer below this root with unusual parameters.
    fn issuer_with(
        root: &CertificateAuthority,
        customize: impl FnOnce(&mut CertificateParams),
    ) -> CertificateAuthority {
        let root_key = KeyPair::from_pem(&root.key).unwrap();
        let signer = rcgen::Issuer::from_ca_cert_pem(&root.certificate, root_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        customize(&mut params);
        CertificateAuthority {
            certificate: params.signed_by(&key, &signer).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    fn sign(issuer: &Issuer, validity: Validity, now: OffsetDateTime) -> IssuedCertificate {
        let key = KeyPair::generate().unwrap();
        let key = SubjectPublicKeyInfo::from_der(&key.subject_public_key_info()).unwrap();
        let content = LeafContent {
            identity: WEB,
            with_common_name: true,
            key: &key,
        };
        issuer.sign(&content, validity, now).unwrap()
    }

    #[test]
    fn a_leaf_has_exactly_the_content_that_proxies_expect() {
        let root = anchor();
        let ca = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &root).unwrap();
        let issuer = load(&[("crt.pem", &ca.certificate), ("key.pem", &ca.key)], &root).unwrap();
        let now = OffsetDateTime::now_utc();
        let issued = sign(&issuer, DAY, now);
        let der = issued.certificate.der();
        let (_, leaf) = x509_parser::parse_x509_certificate(der).unwrap();

        let issued_at = now.unix_timestamp();
        assert_eq!(leaf.validity().not_before.timestamp(), issued_at - 20);
        assert_eq!(leaf.validity().not_after.timestamp(), issued_at + 24 * 3600 + 20);
        assert_eq!(issued.valid_until.unix_timestamp(), issued_at + 24 * 3600 + 20);
        let usage = leaf.key_usage().unwrap().unwrap().value;
        assert!(usage.digital_signature() && usage.key_encipherment() && !usage.key_cert_sign());
        let extended = leaf.extended_key_usage().unwrap().unwrap().value;
        assert!(extended.server_auth && extended.client_auth);
        let sans = leaf.subject_alternative_name().unwrap().unwrap();
        assert_eq!(sans.value.general_names, [GeneralName::DNSName(WEB)]);
        assert_eq!(leaf.subject().to_string(), format!("CN={WEB}"));
        assert!(!leaf.is_ca());
        assert_ne!(
            sign(&issuer, DAY, now).certificate.der(),
            der,
            "serial numbers do not repeat"
        );

        let name = ServerName::try_from(WEB).unwrap();
        let time = UnixTime::since_unix_epoch(Duration::from_secs(issued_at.unsigned_abs()));
        anchors(&root).verify(der, issuer.chain(), &name, time).unwrap();
    }

    #[test]
    fn a_leaf_does_not_outlive_its_chain() {
        let root = anchor();
        let ca = trust::create_issuer("issuer", HOUR, &root).unwrap();
        let issuer = load(&[("tls.crt", &ca.certificate), ("tls.key", &ca.key)], &root).unwrap();
        let now = OffsetDateTime::now_utc();
        let issued = sign(&issuer, DAY, now);
        assert_eq!(issued.valid_until, issuer.expires_at());
        let (_, leaf) = x509_parser::parse_x509_certificate(issued.certificate.der()).unwrap();
        assert_eq!(leaf.validity().not_after.to_datetime(), issuer.expires_at());
        issuer.verify(now).unwrap();
        assert!(
            issuer.verify(now + HOUR + HOUR).is_err(),
            "the verification fails after the issuer has expired"
        );
    }

    #[test]
    fn a_trust_anchor_can_be_the_issuer() {
        let root = anchor();
        let issuer = load(&[("crt.pem", &root.certificate), ("key.pem", &root.key)], &root).unwrap();
        let now = OffsetDateTime::now_utc();
        assert!(issuer.chain().len() == 1 && issuer.verify(now).is_ok());
    }

    #[test]
    fn an_invalid_issuer_is_rejected_with_the_reason() {
        let root = anchor();
        let other = trust::create_anchor("other", trust::ANCHOR_LIFETIME).unwrap();
        let ca = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &root).unwrap();
        let foreign = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &other).unwrap();
        let expired = issuer_with(&root, |params| params.not_after = OffsetDateTime::now_utc() - HOUR);
        let issuer = load(&[("crt.pem", &ca.certificate), ("key.pem", &ca.key)], &root).unwrap();
        let key = KeyPair::generate().unwrap();
        let spki = SubjectPublicKeyInfo::from_der(&key.subject_public_key_info()).unwrap();
        let content = LeafContent {
            identity: WEB,
            with_common_name: false,
            key: &spki,
        };
        let leaf = issuer.sign(&content, DAY, OffsetDateTime::now_utc()).unwrap();

        let check = |cert: &str, key: &str, expected: &str| {
            let err = load(&[("crt.pem", cert), ("key.pem", key)], &root).err().unwrap();
            assert!(err.contains(expected), "{err} has no {expected}");
        };
        check(&foreign.certificate, &foreign.key, "UnknownIssuer");
        check(&expired.certificate, &expired.key, "xpired");
        check(
            &ca.certificate,
            &foreign.key,
            "does not belong to the issuer's certificate",
        );
        check(&leaf.certificate.pem(), &key.serialize_pem(), "may not sign others");
        check("", &ca.key, "holds no certificate");
        check("-----BEGIN CERTIFICATE-----", &ca.key, "is not PEM");
        check(&ca.certificate, "", "expected one private key");
        let ed25519 = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        check(&ca.certificate, &ed25519.serialize_pem(), "does not belong to");
        let twice = issuer_with(&root, |params| {
            params.distinguished_name.push(DnType::OrganizationName, "a");
            let organization = DnType::CustomDnType(vec![2, 5, 4, 10]);
            params.distinguished_name.push(organization, "b");
        });
        check(&twice.certificate, &twice.key, "has an attribute twice");
        assert!(load(&[], &root).err().unwrap().contains("no issuer in"));
        assert!(
            load(&[("crt.pem", &ca.certificate)], &root)
                .err()
                .unwrap()
                .contains("key.pem")
        );
    }
}
