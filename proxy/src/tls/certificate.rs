//! Parses the names and the validity of a certificate.

use std::io;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, CommonState, Error, HandshakeKind};
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
    let bad_encoding = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
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

/// The time at which the first of these certificates expires.
///
/// # Errors
/// There is none, or one cannot be parsed.
pub(super) fn first_expiry(certificates: &[CertificateDer<'_>]) -> Result<SystemTime, Error> {
    let expiries = certificates
        .iter()
        .map(|certificate| parse(certificate).map(|info| info.validity.not_after))
        .collect::<Result<Vec<_>, Error>>()?;
    expiries.into_iter().min().ok_or(Error::NoCertificatesPresented)
}

/// Checks that all certificates of the peer are still valid if its session was resumed: such a handshake does not verify them.
///
/// # Errors
/// A certificate is not valid now; the error is the one of a full handshake.
pub(super) fn check_resumed(session: &CommonState) -> io::Result<()> {
    if session.handshake_kind() != Some(HandshakeKind::Resumed) {
        return Ok(());
    }
    let now = SystemTime::now();
    let check = |certificate| {
        let Validity { not_before, not_after } = parse(certificate)?.validity;
        if now > not_after {
            Err(Error::InvalidCertificate(CertificateError::Expired))
        } else if now < not_before {
            Err(Error::InvalidCertificate(CertificateError::NotValidYet))
        } else {
            Ok(())
        }
    };
    let chain = session.peer_certificates().unwrap_or_default();
    let checked = chain.iter().try_for_each(check);
    checked.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn system_time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.max(0).unsigned_abs())
}
