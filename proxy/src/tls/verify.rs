//! Parses verified certificates, and classifies handshake failures.

use std::fmt;
use std::io;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use rustls::{AlertDescription, CertificateError, Error};
use tulle_core::identity::Identity;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The validity period of a certificate.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

/// Why a handshake failed, as operators need to distinguish it.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum HandshakeFailure {
    /// A certificate is needed and the peer presented none.
    NoCertificate,
    /// The certificate does not chain to the trust anchors.
    UnknownCa,
    Expired,
    NotYetValid,
    /// It is valid, but for another identity than the expected one.
    WrongIdentity,
    /// It is valid, but has no DNS or URI name that can be an identity.
    NoIdentity,
    /// Any other certificate error: encoding, extensions, key usage.
    BadCertificate,
    /// The proxy has no certificate yet.
    NotCertified,
    /// The peer aborted the handshake with an alert.
    Refused,
    /// The peer's TLS is incompatible, for example not TLS 1.3.
    Protocol,
    /// The connection ended or failed.
    Closed,
}

/// The fields of a verified certificate.
pub(super) struct CertificateInfo {
    /// DNS and URI subject alternative names, in the order of the certificate.
    pub(super) names: Vec<Identity>,
    pub(super) validity: Validity,
}

/// Parses names and validity of a certificate; names that cannot be an identity are ignored.
pub(super) fn parse_certificate(certificate: &CertificateDer<'_>) -> Result<CertificateInfo, Error> {
    let bad = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(bad)?;
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

fn system_time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.max(0).unsigned_abs())
}

impl HandshakeFailure {
    /// The cause code for `l5d-proxy-cause`.
    pub(crate) fn cause(self) -> &'static str {
        match self {
            Self::WrongIdentity => "tls-identity-mismatch",
            Self::UnknownCa => "tls-untrusted",
            Self::Expired | Self::NotYetValid | Self::NotCertified => "tls-expired",
            Self::Refused => "tls-refused",
            Self::NoCertificate | Self::NoIdentity | Self::BadCertificate | Self::Protocol | Self::Closed => {
                "tls-handshake"
            }
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::NoCertificate => "no_certificate",
            Self::UnknownCa => "foreign_ca",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::WrongIdentity => "wrong_identity",
            Self::NoIdentity => "no_identity",
            Self::BadCertificate => "bad_certificate",
            Self::NotCertified => "not_certified",
            Self::Refused => "refused",
            Self::Protocol => "protocol",
            Self::Closed => "closed",
        }
    }

    /// Finds the reason in the error of a TLS stream or handshake.
    pub(crate) fn of(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(error) => Self::from(error),
            None => Self::Closed,
        }
    }
}

impl From<&Error> for HandshakeFailure {
    fn from(error: &Error) -> Self {
        match error {
            Error::InvalidCertificate(reason) => Self::from(reason),
            Error::NoCertificatesPresented | Error::AlertReceived(AlertDescription::CertificateRequired) => {
                Self::NoCertificate
            }
            Error::AlertReceived(_) => Self::Refused,
            _ => Self::Protocol,
        }
    }
}

impl From<&CertificateError> for HandshakeFailure {
    fn from(error: &CertificateError) -> Self {
        match error {
            // Roots of different meshes often have the same name; then the signature does not match.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownCa,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => Self::WrongIdentity,
            _ => Self::BadCertificate,
        }
    }
}

impl fmt::Display for HandshakeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
