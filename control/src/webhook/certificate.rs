//! Webhook certificates. Generated ones are self-signed, because the API server trusts exactly the certificates in the bundle.

use std::fmt;
use std::time::Duration;

use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use rustls::CertificateError;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use zeroize::Zeroize as _;

use crate::tls::anchors::TrustAnchors;
use crate::tls::mesh_credentials;

#[derive(PartialEq)]
pub(super) struct CertificateKeyPair {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    /// The original PEM: Secrets are compared and written back unchanged.
    pub(super) certificate_pem: String,
    pub(super) key_pem: String,
    pub(super) not_before: OffsetDateTime,
    pub(super) not_after: OffsetDateTime,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("generating a certificate")]
    Generate(#[source] rcgen::Error),
    #[error("the {what} is not valid PEM")]
    Pem {
        what: &'static str,
        #[source]
        source: pem::Error,
    },
    #[error("the {what} is not text")]
    Text { what: &'static str },
    #[error("there is no certificate; expected PEM")]
    Empty,
    #[error("the certificate cannot be parsed")]
    Certificate(#[source] x509_parser::error::X509Error),
    #[error("the private key is not the key of the certificate")]
    Key(#[source] rustls::Error),
    #[error("the certificate is not for {name}")]
    Name { name: String },
    #[error("a lifetime of {0:?} ends after the year 9999")]
    Lifetime(Duration),
}

impl CertificateKeyPair {
    /// Generates a self-signed ECDSA P-256 certificate for this DNS name, valid for `lifetime` from now.
    pub(super) fn generate(name: &str, lifetime: Duration) -> Result<Self, Error> {
        let now = OffsetDateTime::now_utc();
        let end = || {
            let lifetime = time::Duration::try_from(lifetime).ok()?;
            now.checked_add(lifetime)
        };
        let mut params = CertificateParams::new([name.to_owned()]).map_err(Error::Generate)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = now - CLOCK_SKEW;
        params.not_after = end().ok_or(Error::Lifetime(lifetime))?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().map_err(Error::Generate)?;
        let certificate = params.self_signed(&key).map_err(Error::Generate)?;
        Self::parse(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
    }

    /// Parses PEM and checks that the key matches the certificate.
    pub(super) fn parse(certificate_pem: &[u8], key_pem: &[u8]) -> Result<Self, Error> {
        let chain = certificates(certificate_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|source| Error::Pem {
            what: "private key",
            source,
        })?;
        let leaf = chain.first().ok_or(Error::Empty)?;
        let (not_before, not_after) = validity(leaf)?;
        mesh_credentials::certified_key(chain.clone(), &key).map_err(Error::Key)?;
        Ok(Self {
            certificate_pem: text("certificate", certificate_pem)?,
            key_pem: text("private key", key_pem)?,
            chain,
            key,
            not_before,
            not_after,
        })
    }

    /// # Errors
    /// Fails if no subject alternative name equals `name`.
    pub(super) fn check_name(&self, name: &str) -> Result<(), Error> {
        let wrong = || Error::Name { name: name.to_owned() };
        let leaf = self.chain.first().ok_or(Error::Empty)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf).map_err(|err| Error::Certificate(err.into()))?;
        let names = parsed.subject_alternative_name().map_err(Error::Certificate)?;
        let matches_name =
            |found: &GeneralName<'_>| matches!(found, GeneralName::DNSName(dns) if dns.eq_ignore_ascii_case(name));
        let has_name = names.is_some_and(|names| names.value.general_names.iter().any(matches_name));
        has_name.then_some(()).ok_or_else(wrong)
    }

    /// Checks that the API server verifies this certificate for the name with this bundle.
    ///
    /// # Errors
    /// Fails with the reason. A CA certificate is accepted, as by Go, although rustls rejects it for a server.
    pub(super) fn verify(&self, bundle: &TrustAnchors, name: &str) -> Result<(), rustls::Error> {
        let (leaf, issuers) = self.chain.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
        let server = ServerName::try_from(name).map_err(|_| rustls::Error::from(CertificateError::NotValidForName))?;
        let check_name = || self.check_name(name).map_err(|_| CertificateError::NotValidForName);
        if bundle.certs().contains(leaf) {
            return check_name().map_err(Into::into);
        }
        match bundle.verify(leaf, issuers, &server, UnixTime::now()) {
            // rustls rejects a CA certificate before it checks the name and the issuer.
            Err(rustls::Error::InvalidCertificate(CertificateError::Other(_))) if is_ca(leaf) => {
                check_name()?;
                match is_signed_by_anchor(leaf, issuers, bundle.certs()) {
                    true => Ok(()),
                    false => Err(CertificateError::UnknownIssuer.into()),
                }
            }
            verified => verified,
        }
    }

    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        self.chain.clone()
    }

    pub(super) fn certified_key(&self) -> Result<CertifiedKey, rustls::Error> {
        mesh_credentials::certified_key(self.chain.clone(), &self.key)
    }
}

impl Drop for CertificateKeyPair {
    fn drop(&mut self) {
        self.key.zeroize();
        self.key_pem.zeroize();
    }
}

impl fmt::Debug for CertificateKeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CertificateKeyPair({} to {})", self.not_before, self.not_after)
    }
}

/// Returns all certificates of a PEM bundle.
pub(super) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let certs = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    certs.map_err(|source| Error::Pem {
        what: "certificate",
        source,
    })
}

/// Returns `not_before` and `not_after`.
pub(super) fn validity(cert: &CertificateDer<'_>) -> Result<(OffsetDateTime, OffsetDateTime), Error> {
    let (_, parsed) = x509_parser::parse_x509_certificate(cert).map_err(|err| Error::Certificate(err.into()))?;
    let validity = parsed.validity();
    Ok((validity.not_before.to_datetime(), validity.not_after.to_datetime()))
}

fn is_ca(cert: &CertificateDer<'_>) -> bool {
    x509_parser::parse_x509_certificate(cert).is_ok_and(|(_, cert)| cert.is_ca())
}

/// Returns whether a chain of signatures leads from an anchor to the certificate, directly or through intermediate
/// certificates.
fn is_signed_by_anchor(
    leaf: &CertificateDer<'static>,
    intermediates: &[CertificateDer<'static>],
    anchors: &[CertificateDer<'static>],
) -> bool {
    let mut cert = leaf;
    for _ in 0..=intermediates.len() {
        if anchors.iter().any(|anchor| has_signed(anchor, cert)) {
            return true;
        }
        match intermediates.iter().find(|issuer| has_signed(issuer, cert)) {
            Some(issuer) => cert = issuer,
            None => return false,
        }
    }
    false
}

fn has_signed(issuer: &CertificateDer<'_>, cert: &CertificateDer<'_>) -> bool {
    let parsed = [issuer, cert].map(|der| x509_parser::parse_x509_certificate(der));
    let [Ok((_, issuer)), Ok((_, cert))] = parsed else {
        return false;
    };
    issuer.subject().as_raw() == cert.issuer().as_raw() && cert.verify_signature(Some(issuer.public_key())).is_ok()
}

fn text(what: &'static str, pem: &[u8]) -> Result<String, Error> {
    String::from_utf8(pem.to_vec()).map_err(|_| Error::Text { what })
}

/// Maximum clock skew between the API server and this process.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, GeneralSubtree, IsCa, Issuer, NameConstraints};

    use super::*;

    const NAME: &str = "web.linkerd.svc";

    /// Creates a CA. Returns its certificate as a bundle, and the CA.
    fn create_ca(permitted_name: &str) -> (TrustAnchors, Issuer<'static, KeyPair>) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName(permitted_name.to_owned())],
            excluded_subtrees: Vec::new(),
        });
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        let bundle = TrustAnchors::parse(certificate.as_bytes(), "ca.crt".as_ref()).unwrap();
        (bundle, Issuer::new(params, key))
    }

    fn create_leaf(name: &str, is_ca: IsCa, ca: &Issuer<'static, KeyPair>) -> CertificateKeyPair {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = is_ca;
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, ca).unwrap().pem();
        CertificateKeyPair::parse(certificate.as_bytes(), key.serialize_pem().as_bytes()).unwrap()
    }

    #[test]
    fn a_certificate_is_verified_as_the_api_server_does() {
        let (bundle, ca) = create_ca("linkerd.svc");
        let (other_bundle, _) = create_ca("linkerd.svc");
        let (constrained_bundle, constrained_ca) = create_ca("other.svc");
        for is_ca in [IsCa::NoCa, IsCa::Ca(BasicConstraints::Unconstrained)] {
            let leaf = create_leaf(NAME, is_ca, &ca);
            assert!(leaf.verify(&bundle, NAME).is_ok(), "{is_ca:?}");
            assert!(leaf.verify(&other_bundle, NAME).is_err(), "{is_ca:?}");
            assert!(leaf.verify(&bundle, "api.linkerd.svc").is_err(), "{is_ca:?}");
        }
        let leaf = create_leaf(NAME, IsCa::NoCa, &constrained_ca);
        assert!(
            leaf.verify(&constrained_bundle, NAME).is_err(),
            "a name constraint is violated"
        );
    }

    #[test]
    fn a_generated_pair_parses_unchanged() {
        let made = CertificateKeyPair::generate("web.linkerd.svc", Duration::from_secs(3600)).unwrap();
        let read = CertificateKeyPair::parse(made.certificate_pem.as_bytes(), made.key_pem.as_bytes()).unwrap();
        assert_eq!(made, read);
        assert!(read.check_name("Web.linkerd.svc").is_ok());
        assert!(matches!(read.check_name("other.linkerd.svc"), Err(Error::Name { .. })));
        assert_eq!(read.not_after - read.not_before, Duration::from_secs(3600) + CLOCK_SKEW);
        assert!(!format!("{read:?}").contains("PRIVATE"));
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let [one, other] = [(); 2].map(|()| CertificateKeyPair::generate("web", Duration::from_secs(60)).unwrap());
        let parse = |cert: &str, key: &str| CertificateKeyPair::parse(cert.as_bytes(), key.as_bytes()).unwrap_err();
        assert!(matches!(parse(&one.certificate_pem, &other.key_pem), Error::Key(_)));
        assert!(matches!(parse("", &one.key_pem), Error::Empty));
        assert!(matches!(parse(&one.certificate_pem, "x"), Error::Pem { .. }));
        assert!(matches!(
            CertificateKeyPair::generate("web", Duration::MAX),
            Err(Error::Lifetime(_))
        ));
    }
}
