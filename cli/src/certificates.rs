//! Parses certificates: subject, validity, algorithms and issuer.

use anyhow::{Context as _, ensure};
use x509_parser::certificate::X509Certificate;
use x509_parser::oid_registry::{
    OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_PKCS1_RSAENCRYPTION, OID_PKCS1_SHA256WITHRSA,
    OID_SIG_ECDSA_WITH_SHA256,
};
use x509_parser::prelude::{FromDer as _, GeneralName, ParsedExtension};
use x509_parser::public_key::PublicKey;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Certificate {
    pub(crate) der: Vec<u8>,
    /// The common name, or the whole subject if it has none.
    pub(crate) name: String,
    /// DNS names and URIs.
    pub(crate) subject_alt_names: Vec<String>,
    /// Unix time in seconds.
    pub(crate) not_before: i64,
    /// Unix time in seconds.
    pub(crate) not_after: i64,
    pub(crate) key: Key,
    pub(crate) signature: Signature,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    EcdsaP256,
    /// The length of the modulus, in bits.
    Rsa(usize),
    Other(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Signature {
    EcdsaSha256,
    RsaSha256,
    Other(String),
}

impl Certificate {
    /// Parses one certificate in DER format.
    ///
    /// # Errors
    /// Fails if the bytes are not a certificate.
    pub(crate) fn parse(der: &[u8]) -> anyhow::Result<Self> {
        let cert = parse_x509(der)?;
        let common_name = cert
            .subject()
            .iter_common_name()
            .next()
            .and_then(|name| name.as_str().ok());
        let subject_alt_names = cert
            .extensions()
            .iter()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
                _ => None,
            });
        let subject_alt_names = subject_alt_names.into_iter().flatten().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            GeneralName::URI(uri) => Some((*uri).to_owned()),
            _ => None,
        });
        Ok(Self {
            der: der.to_vec(),
            name: common_name.map_or_else(|| cert.subject().to_string(), str::to_owned),
            subject_alt_names: subject_alt_names.collect(),
            not_before: cert.validity().not_before.timestamp(),
            not_after: cert.validity().not_after.timestamp(),
            key: public_key_algorithm(&cert),
            signature: signature_algorithm(&cert),
        })
    }

    /// Parses the certificates of a PEM bundle, in its order.
    ///
    /// # Errors
    /// Fails if the text has no certificate, or one that cannot be parsed.
    pub(crate) fn parse_bundle(pem: &[u8]) -> anyhow::Result<Vec<Self>> {
        let blocks = pem::parse_many(pem).context("parsing PEM")?;
        let certs = blocks.iter().filter(|block| block.tag() == "CERTIFICATE");
        let certs = certs
            .map(|block| Self::parse(block.contents()))
            .collect::<Result<Vec<_>, _>>()?;
        ensure!(!certs.is_empty(), "no certificate found");
        Ok(certs)
    }

    /// Encodes the certificate as PEM.
    pub(crate) fn to_pem(&self) -> String {
        pem::encode_config(
            &pem::Pem::new("CERTIFICATE", self.der.clone()),
            pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
        )
    }

    /// Whether the key of `issuer` signed this certificate.
    pub(crate) fn signed_by(&self, issuer: &Self) -> bool {
        let (Ok(cert), Ok(issuer)) = (parse_x509(&self.der), parse_x509(&issuer.der)) else {
            return false;
        };
        cert.issuer() == issuer.subject() && cert.verify_signature(Some(issuer.public_key())).is_ok()
    }
}

/// Whether the first certificate of the chain leads to one of the anchors, if necessary through the other certificates.
pub(crate) fn chains_to(chain: &[Certificate], anchors: &[Certificate]) -> bool {
    let Some(mut current) = chain.first() else {
        return false;
    };
    // A chain of n certificates has at most n steps.
    for _ in chain {
        if anchors
            .iter()
            .any(|anchor| anchor.der == current.der || current.signed_by(anchor))
        {
            return true;
        }
        match chain
            .iter()
            .find(|next| next.der != current.der && current.signed_by(next))
        {
            Some(next) => current = next,
            None => return false,
        }
    }
    false
}

fn parse_x509(der: &[u8]) -> anyhow::Result<X509Certificate<'_>> {
    let (_, cert) = X509Certificate::from_der(der).context("parsing the certificate")?;
    Ok(cert)
}

fn public_key_algorithm(cert: &X509Certificate<'_>) -> Key {
    let info = cert.public_key();
    let algorithm = &info.algorithm.algorithm;
    let curve = info.algorithm.parameters.as_ref().and_then(|any| any.as_oid().ok());
    if *algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve == Some(OID_EC_P256) {
        return Key::EcdsaP256;
    }
    match info.parsed() {
        Ok(PublicKey::RSA(rsa)) if *algorithm == OID_PKCS1_RSAENCRYPTION => Key::Rsa(rsa.key_size()),
        _ => Key::Other(curve.map_or_else(
            || algorithm.to_string(),
            |curve| format!("{algorithm} on curve {curve}"),
        )),
    }
}

fn signature_algorithm(cert: &X509Certificate<'_>) -> Signature {
    let algorithm = &cert.signature_algorithm.algorithm;
    if *algorithm == OID_SIG_ECDSA_WITH_SHA256 {
        Signature::EcdsaSha256
    } else if *algorithm == OID_PKCS1_SHA256WITHRSA {
        Signature::RsaSha256
    } else {
        Signature::Other(algorithm.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tulle_control::trust;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn a_certificate_verifies_only_against_the_anchor_that_signed_it() {
        let anchor = trust::create_anchor("root", 100 * DAY).unwrap();
        let issuer = trust::create_issuer("issuer", 10 * DAY, &anchor).unwrap();
        let other = trust::create_anchor("root", 100 * DAY).unwrap();
        let [anchor, issuer, other] =
            [&anchor, &issuer, &other].map(|ca| Certificate::parse_bundle(ca.certificate.as_bytes()).unwrap());
        assert!(chains_to(&issuer, &anchor));
        assert!(chains_to(&anchor, &anchor));
        // Same name, different key.
        assert!(!chains_to(&issuer, &other));
        assert!(!chains_to(&[], &anchor));
    }

    #[test]
    fn certificate_fields_are_parsed() {
        let anchor = trust::create_anchor("root.linkerd.cluster.local", 100 * DAY).unwrap();
        let cert = Certificate::parse_bundle(anchor.certificate.as_bytes())
            .unwrap()
            .remove(0);
        assert_eq!(cert.name, "root.linkerd.cluster.local");
        assert_eq!(
            (cert.key.clone(), cert.signature.clone()),
            (Key::EcdsaP256, Signature::EcdsaSha256)
        );
        assert!(cert.not_after - cert.not_before >= 8_640_000);
        assert_eq!(Certificate::parse_bundle(cert.to_pem().as_bytes()).unwrap(), [cert]);
    }

    #[test]
    fn invalid_certificates_are_refused() {
        for pem in [
            "",
            "hello",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ] {
            assert!(Certificate::parse_bundle(pem.as_bytes()).is_err(), "{pem}");
        }
    }
}
