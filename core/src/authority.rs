//! What a certificate authority may sign beyond what its name constraints say.
//!
//! Name constraints (RFC 5280, 4.2.1.10) know DNS names, and of URIs only the host: none of them says "this SPIFFE
//! identity and no other". So an authority that names workloads itself, by SPIFFE URIs with a path, may sign these
//! workloads' certificates and nothing else. SPIRE's authorities name a trust domain, without a path, and are not meant.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::Identity;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("a certificate of the chain cannot be read")]
    Unreadable,
    #[error("the authority may sign {} only, and signed {}", .allowed.join(", "), .signed.join(", "))]
    NotItsWorkload { allowed: Vec<String>, signed: Vec<String> },
}

/// Whether all of these authorities, each in DER, may sign this leaf. Signatures are verified elsewhere.
///
/// # Errors
/// A leaf that is not the workload of an authority that has one.
pub fn may_sign<'a>(leaf: &[u8], authorities: impl IntoIterator<Item = &'a [u8]>) -> Result<(), Error> {
    for authority in authorities {
        // What cannot be read signs nothing: it may be there, as long as it is not needed.
        let Ok(allowed) = workloads(authority) else { continue };
        if allowed.is_empty() {
            continue;
        }
        let signed = names(leaf)?;
        if signed.is_empty() || !signed.iter().all(|name| allowed.contains(name)) {
            return Err(Error::NotItsWorkload { allowed, signed });
        }
    }
    Ok(())
}

/// The workloads that an authority names.
fn workloads(authority: &[u8]) -> Result<Vec<String>, Error> {
    let mut names = names(authority)?;
    names.retain(|name| {
        let path = name.strip_prefix("spiffe://").and_then(|rest| rest.split_once('/'));
        path.is_some() && matches!(name.parse(), Ok(Identity::Uri(_)))
    });
    Ok(names)
}

/// All names of a certificate; those that are neither DNS names nor URIs by their kind.
fn names(certificate: &[u8]) -> Result<Vec<String>, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| Error::Unreadable)?;
    let mut names = Vec::new();
    for extension in parsed.extensions() {
        match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(found) => {
                names.extend(found.general_names.iter().map(|name| match name {
                    GeneralName::DNSName(name) | GeneralName::URI(name) => (*name).to_owned(),
                    other => other.to_string(),
                }));
            }
            ParsedExtension::ParseError { .. } => return Err(Error::Unreadable),
            _ => {}
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn certificate(names: &[&str]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names
            .iter()
            .map(|name| match (name.contains("://"), name.parse()) {
                (true, _) => SanType::URI((*name).try_into().unwrap()),
                (false, Ok(ip)) => SanType::IpAddress(ip),
                (false, Err(_)) => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn an_authority_that_names_workloads_signs_these_and_no_others() {
        let (web, db) = ("spiffe://root.test/web", "spiffe://root.test/db");
        for (authority, leaf, expected) in [
            (&[][..], &["a.test"][..], true),
            (&["ca.test"], &["a.test"], true),
            // The authority of a trust domain, as SPIRE makes them.
            (&["spiffe://root.test"], &[web], true),
            (&[web], &[web], true),
            (&[web, db], &[db], true),
            (&[web], &[db], false),
            (&[web], &["a.test"], false),
            (&[web], &[web, "a.test"], false),
            (&[web], &[web, db], false),
            (&[web], &[web, "10.0.0.1"], false),
            (&[web], &[], false),
            (&[web], &["spiffe://root.test/web/more"], false),
            (&[web], &["spiffe://root.test"], false),
        ] {
            let (ca, end) = (certificate(authority), certificate(leaf));
            let unnamed = certificate(&[]);
            let may = may_sign(&end, [&ca[..], &unnamed]);
            assert_eq!(may.is_ok(), expected, "{authority:?} {leaf:?}: {may:?}");
            assert_eq!(may_sign(&end, [&unnamed[..], &ca]), may);
        }
        let ca = certificate(&[web]);
        assert_eq!(may_sign(b"x", [&ca[..]]), Err(Error::Unreadable));
        assert_eq!(may_sign(&ca, [&b"x"[..]]), Ok(()));
    }
}
