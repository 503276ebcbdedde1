//! Parses certificate signing requests.
//!
//! A certificate contains only the authenticated name and the public key. All other content of a request is rejected or
//! ignored.

use rcgen::SubjectPublicKeyInfo;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::error::X509Error;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

/// A signing request whose signature by its own key is valid.
#[derive(Debug)]
pub(crate) struct SigningRequest {
    common_names: Vec<String>,
    names: Vec<Name>,
    /// DER of the public key with its algorithm.
    spki: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum MalformedError {
    #[error("the signing request cannot be read; expected PKCS#10 as DER")]
    Parse(#[source] X509Error),
    #[error("{0} bytes follow the signing request")]
    Trailing(usize),
    #[error("the signing request is not signed by its own key")]
    Signature(#[source] X509Error),
}

/// The names in the signing request are not exactly the requested identity.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum NameError {
    #[error("the signing request has {found} subject alternative names; expected one DNS name, {identity}")]
    Count { found: usize, identity: String },
    #[error("the signing request asks for {kind} {value:?}; expected only the DNS name {identity}")]
    Kind {
        kind: &'static str,
        value: String,
        identity: String,
    },
    #[error("the signing request asks for the DNS name {found:?}; expected {identity}")]
    Dns { found: String, identity: String },
    #[error("the signing request has the common name {found:?}; expected none or {identity}")]
    CommonName { found: String, identity: String },
}

/// The key algorithm is not supported.
#[derive(Debug, thiserror::Error)]
#[error("the signing request has an {algorithm} key; expected ECDSA P-256 or P-384")]
pub(crate) struct KeyError {
    algorithm: String,
}

/// One subject alternative name.
#[derive(Debug)]
enum Name {
    Dns(String),
    Other { kind: &'static str, value: String },
}

impl SigningRequest {
    /// Parses a request and verifies its signature, which proves possession of the private key.
    pub(crate) fn parse(der: &[u8]) -> Result<Self, MalformedError> {
        let (rest, csr) = X509CertificationRequest::from_der(der).map_err(|err| MalformedError::Parse(err.into()))?;
        if !rest.is_empty() {
            return Err(MalformedError::Trailing(rest.len()));
        }
        csr.verify_signature().map_err(MalformedError::Signature)?;
        let info = &csr.certification_request_info;
        let common_names = info
            .subject
            .iter_common_name()
            // A common name that is not text never matches.
            .map(|name| name.as_str().unwrap_or("\u{fffd}").to_owned())
            .collect();
        let names = csr
            .requested_extensions()
            .into_iter()
            .flatten()
            .filter_map(|extension| match extension {
                ParsedExtension::SubjectAlternativeName(san) => Some(&san.general_names),
                _ => None,
            })
            .flatten()
            .map(Name::from)
            .collect();
        Ok(Self {
            common_names,
            names,
            spki: info.subject_pki.raw.to_vec(),
        })
    }

    /// Checks that the request is for this identity only.
    pub(crate) fn check_names(&self, identity: &str) -> Result<(), NameError> {
        let owned_identity = || identity.to_owned();
        for name in &self.names {
            if let Name::Other { kind, value } = name {
                return Err(NameError::Kind {
                    kind,
                    value: value.clone(),
                    identity: owned_identity(),
                });
            }
        }
        match self.names.as_slice() {
            [Name::Dns(name)] if name == identity => {}
            [Name::Dns(name)] => {
                return Err(NameError::Dns {
                    found: name.clone(),
                    identity: owned_identity(),
                });
            }
            names => {
                return Err(NameError::Count {
                    found: names.len(),
                    identity: owned_identity(),
                });
            }
        }
        match self
            .common_names
            .iter()
            .find(|name| !name.is_empty() && *name != identity)
        {
            Some(name) => Err(NameError::CommonName {
                found: name.clone(),
                identity: owned_identity(),
            }),
            None => Ok(()),
        }
    }

    /// The public key, if its algorithm is supported.
    pub(crate) fn public_key(&self) -> Result<SubjectPublicKeyInfo, KeyError> {
        match SubjectPublicKeyInfo::from_der(&self.spki) {
            Ok(key) if is_ecdsa(&key) => Ok(key),
            Ok(key) => Err(KeyError {
                algorithm: format!("{:?}", rcgen::PublicKeyData::algorithm(&key)),
            }),
            Err(_) => Err(KeyError {
                algorithm: "unknown".to_owned(),
            }),
        }
    }

    /// Returns whether the request has a common name in its subject.
    pub(crate) fn has_common_name(&self) -> bool {
        self.common_names.iter().any(|name| !name.is_empty())
    }
}

impl From<&GeneralName<'_>> for Name {
    fn from(name: &GeneralName<'_>) -> Self {
        let other = |kind, value: String| Self::Other { kind, value };
        match name {
            GeneralName::DNSName(name) => Self::Dns((*name).to_owned()),
            GeneralName::RFC822Name(name) => other("the email address", (*name).to_owned()),
            GeneralName::URI(name) => other("the URI", (*name).to_owned()),
            GeneralName::IPAddress(bytes) => other("the IP address", ip_text(bytes)),
            name => other("the name", name.to_string()),
        }
    }
}

fn is_ecdsa(key: &SubjectPublicKeyInfo) -> bool {
    [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384].contains(&rcgen::PublicKeyData::algorithm(key))
}

fn ip_text(bytes: &[u8]) -> String {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return std::net::IpAddr::from(v4).to_string();
    }
    match <[u8; 16]>::try_from(bytes) {
        Ok(v6) => std::net::IpAddr::from(v6).to_string(),
        Err(_) => format!("{bytes:?}"),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    use super::*;

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    fn request(common_name: Option<&str>, sans: &[SanType], key: &KeyPair) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.subject_alt_names = sans.to_vec();
        params.serialize_request(key).unwrap().der().to_vec()
    }

    fn dns(name: &str) -> SanType {
        SanType::DnsName(name.try_into().unwrap())
    }

    #[test]
    fn a_request_must_contain_exactly_the_requested_identity() {
        let key = KeyPair::generate().unwrap();
        let check = |common_name: Option<&str>, sans: &[SanType]| {
            let der = request(common_name, sans, &key);
            SigningRequest::parse(&der)
                .unwrap()
                .check_names(WEB)
                .map_err(|err| err.to_string())
        };
        let refused = |common_name: Option<&str>, sans: &[SanType], expected: &str| {
            let err = check(common_name, sans).unwrap_err();
            assert!(err.contains(expected), "{err} has no {expected}");
        };
        assert_eq!(check(None, &[dns(WEB)]), Ok(()));
        assert_eq!(check(Some(WEB), &[dns(WEB)]), Ok(()));
        assert_eq!(check(Some(""), &[dns(WEB)]), Ok(()));
        refused(None, &[], "has 0 subject alternative names");
        refused(None, &[dns(WEB), dns("b.c")], "has 2 subject alternative names");
        refused(None, &[dns(WEB), dns(WEB)], "has 2 subject alternative names");
        refused(None, &[dns("b.c")], "the DNS name \"b.c\"");
        refused(Some("b.c"), &[dns(WEB)], "the common name \"b.c\"");
        let uri = SanType::URI("spiffe://a/b".try_into().unwrap());
        refused(None, &[dns(WEB), uri], "the URI \"spiffe://a/b\"");
        let email = SanType::Rfc822Name("a@b.c".try_into().unwrap());
        refused(None, &[dns(WEB), email], "the email address \"a@b.c\"");
        for ip in ["10.0.0.1", "fd00::1"] {
            let san = SanType::IpAddress(ip.parse().unwrap());
            refused(None, &[san, dns(WEB)], &format!("the IP address \"{ip}\""));
        }
        refused(None, &[SanType::OtherName((vec![1, 2, 3], "x".into()))], "the name ");
    }

    #[test]
    fn a_request_must_be_whole_and_signed_by_its_own_key() {
        let key = KeyPair::generate().unwrap();
        let good = request(None, &[dns(WEB)], &key);
        let mut long = good.clone();
        long.push(0);
        assert!(matches!(SigningRequest::parse(&long), Err(MalformedError::Trailing(1))));
        let mut forged = good.clone();
        // The last byte is part of the signature.
        *forged.last_mut().unwrap() ^= 1;
        assert!(matches!(
            SigningRequest::parse(&forged),
            Err(MalformedError::Signature(_))
        ));
        for end in 0..good.len() {
            assert!(SigningRequest::parse(&good[..end]).is_err(), "{end}");
        }
        assert!(matches!(SigningRequest::parse(b"hello"), Err(MalformedError::Parse(_))));
    }

    #[test]
    fn only_ecdsa_keys_are_signed() {
        let public_key = |algorithm| {
            let key = KeyPair::generate_for(algorithm).unwrap();
            SigningRequest::parse(&request(None, &[dns(WEB)], &key))
                .unwrap()
                .public_key()
                .map(|_| ())
                .map_err(|err| err.to_string())
        };
        assert_eq!(public_key(&rcgen::PKCS_ECDSA_P256_SHA256), Ok(()));
        assert_eq!(public_key(&rcgen::PKCS_ECDSA_P384_SHA384), Ok(()));
        let refused = [public_key(&rcgen::PKCS_RSA_SHA256), public_key(&rcgen::PKCS_ED25519)];
        for err in refused.map(Result::unwrap_err) {
            assert!(err.contains("expected ECDSA P-256 or P-384"), "{err}");
        }
        assert!(public_key(&rcgen::PKCS_RSA_SHA256).unwrap_err().contains("RSA"));
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(
            flips in proptest::collection::vec((0usize..400, proptest::prelude::any::<u8>()), 1..8)
        ) {
            static GOOD: std::sync::LazyLock<Vec<u8>> =
                std::sync::LazyLock::new(|| request(Some(WEB), &[dns(WEB)], &KeyPair::generate().unwrap()));
            let mut der = GOOD.clone();
            for (i, value) in flips {
                let i = i % der.len();
                der[i] = value;
            }
            if let Ok(request) = SigningRequest::parse(&der) {
                let _ = (request.check_names(WEB), request.public_key().is_ok());
            }
        }
    }
}
