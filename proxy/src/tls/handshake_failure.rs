//! Reasons of failed TLS handshakes.

use std::fmt;
use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// Why a handshake failed. The variants are the cases that operators must distinguish.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum HandshakeFailure {
    /// A certificate is required, but the peer presented none, or it reports that this proxy presented none.
    NoCertificate,
    /// The certificate does not chain to the trust anchors.
    UnknownCa,
    Expired,
    NotYetValid,
    /// The certificate is valid, but not for the expected identity.
    WrongIdentity,
    /// The certificate is valid, but none of its DNS and URI names is a valid identity.
    NoIdentity,
    /// Any other error of the certificate: encoding, extensions, key usage.
    BadCertificate,
    /// The proxy has no certificate yet.
    NotCertified,
    /// The peer aborted the handshake with an alert.
    Refused,
    /// Any other error: usually the peer's TLS is incompatible, for example not TLS 1.3; or the server name cannot be sent as SNI.
    Protocol,
    /// The connection ended or failed.
    Closed,
}

impl HandshakeFailure {
    /// The cause code for `l5d-proxy-cause`.
    pub(crate) fn cause(self) -> &'static str {
        match self {
            Self::WrongIdentity => "tls-identity-mismatch",
            Self::UnknownCa => "tls-untrusted",
            // The advice is the same: check the renewal of certificates.
            Self::Expired | Self::NotYetValid | Self::NotCertified => "tls-expired",
            Self::Refused => "tls-refused",
            Self::NoCertificate | Self::NoIdentity | Self::BadCertificate | Self::Protocol | Self::Closed => {
                "tls-handshake"
            }
        }
    }

    /// The name of the reason in logs and errors.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::NoCertificate => "no_certificate",
            Self::UnknownCa => "unknown_ca",
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
    pub(crate) fn from_io_error(error: &io::Error) -> Self {
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
            // The roots of two meshes often have the same name. The error is then a bad signature.
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
