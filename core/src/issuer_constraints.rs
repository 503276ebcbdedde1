//! Restricts what a certificate authority may sign beyond its name constraints.
//!
//! Name constraints (RFC 5280, 4.2.1.10) cover DNS names, and only the host of URIs, so they cannot allow a single SPIFFE
//! identity. Therefore an authority certificate that contains SPIFFE URIs with a path may sign certificates for these
//! identities only. SPIRE's authority certificates contain a trust domain without a path; they are not restricted.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::Identity;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("a certificate of the chain cannot be parsed")]
    Unreadable,
    #[error("the authority may sign only {}, but signed {}", .allowed.join(", "), .signed.join(", "))]
    WorkloadNotPermitted { allowed: Vec<String>, signed: Vec<String> },
}

/// Checks that each of these authorities (DER) may sign this leaf. Signatures are verified elsewhere.
///
/// # Errors
/// If the leaf has a name that a restricted authority does not contain, or if the leaf cannot be parsed.
pub fn verify_issuers<'a>(leaf: &[u8], authorities: impl IntoIterator<Item = &'a [u8]>) -> Result<(), Error> {
    for authority in authorities {
        // The chain may contain unused certificates, and one that cannot be parsed cannot have signed the leaf.
        let Ok(allowed) = permitted_identities(authority) else {
            continue;
        };
        if allowed.is_empty() {
            continue;
        }
        let signed = subject_alt_names(leaf)?;
        if signed.is_empty() || !signed.iter().all(|name| allowed.contains(name)) {
            return Err(Error::WorkloadNotPermitted { allowed, signed });
        }
    }
    Ok(())
}

/// The SPIFFE identities with a path that an authority certificate contains.
fn permitted_identities(authority: &[u8]) -> Result<Vec<String>, Error> {
    let mut names = subject_alt_names(authority)?;
    names.retain(|name| {
        let path = name.strip_prefix("spiffe://").and_then(|rest| rest.split_once('/'));
        path.is_some() && matches!(name.parse(), Ok(Identity::Uri(_)))
    });
    Ok(names)
}

/// All subject alternative names. Names other than DNS names and URIs are in their `Display` form.
fn subject_alt_names(certificate: &[u8]) -> Result<Vec<String>, Error> {
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
            // A trust domain's authority, as SPIRE issues it.
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
            let may = verify_issuers(&end, [&ca[..], &unnamed]);
            assert_eq!(may.is_ok(), expected, "{authority:?} {leaf:?}: {may:?}");
            assert_eq!(verify_issuers(&end, [&unnamed[..], &ca]), may);
        }
        let ca = certificate(&[web]);
        assert_eq!(verify_issuers(b"x", [&ca[..]]), Err(Error::Unreadable));
        assert_eq!(verify_issuers(&ca, [&b"x"[..]]), Ok(()));
    }
}
