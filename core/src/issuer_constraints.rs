//! A restriction of certificate authorities in addition to name constraints: an authority whose own certificate has SPIFFE
//! identities may sign certificates of these identities only.
//!
//! Name constraints (RFC 5280, 4.2.1.10) cover DNS names, and only the host of URIs, so they cannot allow a single SPIFFE
//! identity. An authority is restricted if its certificate contains a SPIFFE URI with a path. SPIRE's authority certificates
//! contain a trust domain without a path; they are not restricted.

use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
use x509_parser::prelude::{FromDer, X509Certificate};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("a certificate of the chain, or its subject alternative names, cannot be parsed")]
    Unreadable,
    #[error("the authority may sign only {}, but signed {}", .allowed.join(", "), list_names(.signed))]
    WorkloadNotPermitted { allowed: Vec<String>, signed: Vec<String> },
}

/// Checks that each of these authorities (DER) may sign this leaf. Signatures are verified elsewhere.
///
/// `authorities` are all certificates of authorities that the peer sent. An authority that the chain does not need restricts the
/// leaf, too. An authority that cannot be parsed is an error, because it may be restricted: the TLS library reads fewer fields, so
/// it may accept a certificate that this parser rejects.
///
/// # Errors
/// If an authority cannot be parsed. If an authority is restricted, and the leaf cannot be parsed, has no names, or has a name
/// that is not one of the authority's SPIFFE identities. If no authority is restricted, the leaf is not parsed.
pub fn verify_issuers<'a>(leaf: &[u8], authorities: impl IntoIterator<Item = &'a [u8]>) -> Result<(), Error> {
    for authority in authorities {
        let allowed = permitted_identities(authority)?;
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

/// The SPIFFE URIs with a path that an authority certificate contains; if there are none, it is not restricted.
///
/// A URI that is not a valid identity counts too: it restricts the authority, although no valid leaf matches it.
fn permitted_identities(authority: &[u8]) -> Result<Vec<String>, Error> {
    let mut names = subject_alt_names(authority)?;
    names.retain(|name| {
        name.split_once("://")
            .is_some_and(|(scheme, rest)| scheme.eq_ignore_ascii_case("spiffe") && rest.contains('/'))
    });
    Ok(names)
}

/// All subject alternative names. Names other than DNS names and URIs are in their `Display` form.
fn subject_alt_names(certificate: &[u8]) -> Result<Vec<String>, Error> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| Error::Unreadable)?;
    let mut names = Vec::new();
    for extension in parsed.extensions() {
        if extension.oid != OID_X509_EXT_SUBJECT_ALT_NAME {
            continue;
        }
        let ParsedExtension::SubjectAlternativeName(found) = extension.parsed_extension() else {
            return Err(Error::Unreadable);
        };
        for name in &found.general_names {
            names.push(match name {
                GeneralName::DNSName(name) | GeneralName::URI(name) => (*name).to_owned(),
                GeneralName::Invalid(..) => return Err(Error::Unreadable),
                other => other.to_string(),
            });
        }
    }
    Ok(names)
}

fn list_names(names: &[String]) -> String {
    match names {
        [] => "a certificate without names".to_owned(),
        names => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, CustomExtension, KeyPair, SanType};

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
            let (ca, leaf_der) = (certificate(authority), certificate(leaf));
            let unnamed = certificate(&[]);
            let result = verify_issuers(&leaf_der, [&ca[..], &unnamed]);
            assert_eq!(result.is_ok(), expected, "{authority:?} {leaf:?}: {result:?}");
            assert_eq!(verify_issuers(&leaf_der, [&unnamed[..], &ca]), result);
        }
        let ca = certificate(&[web]);
        assert_eq!(verify_issuers(b"x", [&ca[..]]), Err(Error::Unreadable));
        let unnamed = verify_issuers(&certificate(&[]), [&ca[..]]).unwrap_err().to_string();
        assert!(unnamed.ends_with("but signed a certificate without names"), "{unnamed}");
    }

    #[test]
    fn an_authority_whose_names_cannot_be_decoded_signs_nothing() {
        let leaf = certificate(&["spiffe://root.test/web"]);
        assert_eq!(verify_issuers(&leaf, [&b"x"[..]]), Err(Error::Unreadable));
        // The content of the extension is no sequence of names, or a name is not UTF-8.
        for names in [&b"\x02\x01\x00"[..], b"\x30\x03\x86\x01\xff"] {
            let mut params = CertificateParams::default();
            let extension = CustomExtension::from_oid_content(&[2, 5, 29, 17], names.to_vec());
            params.custom_extensions = vec![extension];
            let authority = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            assert_eq!(
                verify_issuers(&leaf, [&authority.der()[..]]),
                Err(Error::Unreadable),
                "{names:?}"
            );
        }
    }

    #[test]
    fn an_authority_with_an_invalid_spiffe_uri_is_restricted_too() {
        let leaf = certificate(&["spiffe://root.test/web"]);
        for uri in [
            "spiffe://ROOT.test/web",
            "SPIFFE://root.test/db",
            "spiffe://root.test/",
            "spiffe://root.test/a?b",
        ] {
            let result = verify_issuers(&leaf, [&certificate(&[uri])[..]]);
            assert!(
                matches!(result, Err(Error::WorkloadNotPermitted { .. })),
                "{uri}: {result:?}"
            );
        }
    }
}
