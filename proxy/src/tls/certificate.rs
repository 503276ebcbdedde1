//! Parses the names and the validity of a certificate.

use std::io;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, TrustAnchor};
use rustls::{CertificateError, CommonState, Error, HandshakeKind, RootCertStore};
use tulle_core::identity::Identity;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The validity period of a certificate.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

/// The fields of a certificate that the proxy needs.
pub(super) struct CertificateInfo {
    /// The DNS and URI subject alternative names that are valid identities, in the order of the certificate.
    pub(super) names: Vec<Identity>,
    pub(super) validity: Validity,
}

/// Parses the names and the validity of a certificate. Names that are not valid identities are ignored.
pub(super) fn parse(certificate: &CertificateDer<'_>) -> Result<CertificateInfo, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(bad_encoding)?;
    let general_names = parsed
        .extensions()
        .iter()
        .filter_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
            _ => None,
        });
    let names = general_names.flatten().filter_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => name.parse().ok(),
        _ => None,
    });
    let validity = Validity {
        not_before: system_time(parsed.validity().not_before.timestamp()),
        not_after: system_time(parsed.validity().not_after.timestamp()),
    };
    Ok(CertificateInfo {
        names: names.collect(),
        validity,
    })
}

/// The time during which the leaf and all intermediates of a chain are valid.
///
/// Roots in the chain do not count, because verification ignores their validity. A root is a self-issued certificate, or a
/// certificate with the name and key of a trust anchor, even if another authority has signed it.
///
/// # Errors
/// There is no certificate, or one cannot be parsed.
pub(super) fn chain_validity(certificates: &[CertificateDer<'_>], anchors: &RootCertStore) -> Result<Validity, Error> {
    let (leaf, issuers) = certificates.split_first().ok_or(Error::NoCertificatesPresented)?;
    let mut validity = parse(leaf)?.validity;
    for issuer in issuers {
        if is_self_issued(issuer)? || is_anchor(issuer, anchors) {
            continue;
        }
        let other = parse(issuer)?.validity;
        validity.not_before = validity.not_before.max(other.not_before);
        validity.not_after = validity.not_after.min(other.not_after);
    }
    Ok(validity)
}

fn is_self_issued(certificate: &CertificateDer<'_>) -> Result<bool, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(bad_encoding)?;
    Ok(parsed.subject().as_raw() == parsed.issuer().as_raw())
}

/// Whether a trust anchor has the name and key of this certificate.
fn is_anchor(certificate: &CertificateDer<'_>, anchors: &RootCertStore) -> bool {
    let mut sent = RootCertStore::empty();
    sent.add(certificate.clone()).is_ok()
        && sent.roots.iter().all(|sent| {
            let is_same = |anchor: &TrustAnchor<'_>| {
                anchor.subject == sent.subject && anchor.subject_public_key_info == sent.subject_public_key_info
            };
            anchors.roots.iter().any(is_same)
        })
}

/// The time until `not_after`, at most [`MAX_REMAINING_VALIDITY`].
pub(super) fn remaining_validity(not_after: SystemTime) -> Duration {
    let remaining = not_after.duration_since(SystemTime::now()).unwrap_or_default();
    remaining.min(MAX_REMAINING_VALIDITY)
}

/// Longer than the certificate of any workload is valid. Without this limit, the time of the expiry might not be representable.
pub(super) const MAX_REMAINING_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Checks that the certificates of the peer are still valid if its session was resumed: such a handshake does not verify them.
///
/// # Errors
/// A certificate is not valid now; the error is the one of a full handshake.
pub(super) fn check_resumed(session: &CommonState, anchors: &RootCertStore) -> io::Result<()> {
    let chain = session.peer_certificates().unwrap_or_default();
    if session.handshake_kind() != Some(HandshakeKind::Resumed) || chain.is_empty() {
        return Ok(());
    }
    let now = SystemTime::now();
    let checked = chain_validity(chain, anchors).and_then(|Validity { not_before, not_after }| {
        if now > not_after {
            Err(Error::InvalidCertificate(CertificateError::Expired))
        } else if now < not_before {
            Err(Error::InvalidCertificate(CertificateError::NotValidYet))
        } else {
            Ok(())
        }
    });
    checked.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn bad_encoding<E>(_: E) -> Error {
    Error::InvalidCertificate(CertificateError::BadEncoding)
}

fn system_time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.max(0).unsigned_abs())
}
