//! The proxy's certificates and trust anchors for `/debug/certificates`; never a key.

use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use serde::Serialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::tls::{certificate, credentials::Credentials};

/// The proxy's identity, certificates and trust anchors.
#[derive(Serialize)]
pub(crate) struct CertificateStatus {
    identity: String,
    server_name: String,
    /// The proxy's certificate, then its issuers; empty until the first certificate is installed.
    chain: Vec<Certificate>,
    trust_anchors: Vec<Certificate>,
}

#[derive(Serialize)]
struct Certificate {
    subject: String,
    issuer: String,
    serial: String,
    names: Vec<String>,
    not_before: String,
    not_after: String,
    expires_in_seconds: i64,
}

impl Credentials {
    pub(crate) fn certificate_status(&self) -> CertificateStatus {
        let now = OffsetDateTime::from(SystemTime::now());
        let parse_all = |certificates: &[CertificateDer<'_>]| {
            let certificates = certificates.iter();
            certificates.filter_map(|der| Certificate::from_der(der, now)).collect()
        };
        let (chain, anchors) = self.certificates();
        CertificateStatus {
            identity: self.id().to_string(),
            server_name: self.server_name().to_owned(),
            chain: parse_all(&chain),
            trust_anchors: parse_all(&anchors),
        }
    }
}

impl Certificate {
    fn from_der(der: &CertificateDer<'_>, now: OffsetDateTime) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(der).ok()?;
        let info = certificate::parse(der).ok()?;
        let (not_before, not_after) = (info.validity.not_before.into(), info.validity.not_after.into());
        let format = |at: OffsetDateTime| at.format(&Rfc3339).unwrap_or_default();
        Some(Self {
            subject: parsed.subject().to_string(),
            issuer: parsed.issuer().to_string(),
            serial: parsed.raw_serial_as_string(),
            names: info.names.iter().map(ToString::to_string).collect(),
            not_before: format(not_before),
            not_after: format(not_after),
            expires_in_seconds: (not_after - now).whole_seconds(),
        })
    }
}
