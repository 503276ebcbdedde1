//! The identity of a workload: the name in its certificate.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A TLS identity. Two identities are equal if they have the same kind and spelling.
///
/// DNS names are kept in lower case.
/// Corresponds to the message `TlsIdentity` in `destination.proto`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Identity {
    /// A DNS name, such as `web.shop.serviceaccount.identity.linkerd.cluster.local`.
    Dns(Arc<str>),
    /// A SPIFFE URI, such as `spiffe://example.org/web`.
    Uri(Arc<str>),
}

/// The text is not an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an identity: {reason}; expected a DNS name or spiffe://<trust domain>/<path>")]
pub struct ParseIdentityError {
    text: String,
    reason: &'static str,
}

/// The DNS identity in the certificate of a service account.
pub fn service_account_identity(sa: &str, ns: &str, control_ns: &str, trust_domain: &str) -> String {
    format!("{sa}.{ns}{SERVICE_ACCOUNT_INFIX}{control_ns}.{trust_domain}")
}

/// The account and the namespace in the DNS identity of a service account, of any control plane and trust domain.
pub fn parse_service_account_identity(identity: &str) -> Option<(&str, &str)> {
    let (account_and_namespace, _) = identity.rsplit_once(SERVICE_ACCOUNT_INFIX)?;
    // In Kubernetes, the name of a service account may have dots, that of a namespace has none, so the namespace is the last
    // label. tulle's identity service certifies no names with dots.
    let (account, namespace) = account_and_namespace.rsplit_once('.')?;
    (!account.is_empty() && !namespace.is_empty()).then_some((account, namespace))
}

impl Identity {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Dns(name) | Self::Uri(name) => name,
        }
    }

    /// The namespace of the service account, if this is the [`service_account_identity`] of one in this control plane and trust
    /// domain; otherwise `None`.
    pub fn service_account_namespace(&self, control_ns: &str, trust_domain: &str) -> Option<&str> {
        let Self::Dns(name) = self else {
            return None;
        };
        let rest = strip_suffix_ignore_case(name, trust_domain)?.strip_suffix('.')?;
        let rest = strip_suffix_ignore_case(rest, control_ns)?;
        let (_, ns) = parse_service_account_identity(rest).filter(|_| rest.ends_with(SERVICE_ACCOUNT_INFIX))?;
        Some(ns)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.strip_prefix("spiffe://") {
            Some(_) if text.len() > 2048 => Err("a SPIFFE URI has at most 2048 bytes"),
            Some(rest) => check_spiffe(rest).map(|()| Self::Uri(text.into())),
            None => check_dns(text).map(|()| Self::Dns(text.to_ascii_lowercase().into())),
        };
        parsed.map_err(|reason| ParseIdentityError {
            text: text.to_owned(),
            reason,
        })
    }
}

/// Removes a suffix, ignoring case: DNS identities are in lower case, but configured names may have upper case.
fn strip_suffix_ignore_case<'a>(text: &'a str, suffix: &str) -> Option<&'a str> {
    let (rest, end) = text.split_at_checked(text.len().checked_sub(suffix.len())?)?;
    end.eq_ignore_ascii_case(suffix).then_some(rest)
}

pub(crate) fn check_dns(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("it is empty");
    }
    if name.len() > 253 {
        return Err("a DNS name has at most 253 characters");
    }
    for label in name.split('.') {
        if label.is_empty() || label.len() > 63 {
            return Err("a DNS label has 1 to 63 characters");
        }
        if !label
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        {
            return Err("a DNS label has letters, digits, '-' and '_' only");
        }
        if label.starts_with('-') || label.ends_with('-') {
            return Err("a DNS label neither starts nor ends with '-'");
        }
    }
    // Otherwise an IP address such as 10.0.0.1 would be accepted as a DNS name.
    let last = name.rsplit('.').next().unwrap_or(name);
    if last.bytes().all(|b| b.is_ascii_digit()) {
        return Err("the last DNS label is a number");
    }
    Ok(())
}

/// Checks the part after the scheme by the rules of the SPIFFE ID standard.
fn check_spiffe(rest: &str) -> Result<(), &'static str> {
    let (domain, path) = match rest.split_once('/') {
        Some((domain, path)) => (domain, Some(path)),
        None => (rest, None),
    };
    if domain.len() > 255 {
        return Err("a trust domain has at most 255 bytes");
    }
    let in_domain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._".contains(&b);
    if domain.is_empty() || !domain.bytes().all(in_domain) {
        return Err("a trust domain has lower case letters, digits, '-', '.' and '_' only");
    }
    let in_segment = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    for segment in path.into_iter().flat_map(|path| path.split('/')) {
        if segment.is_empty() || segment == "." || segment == ".." || !segment.bytes().all(in_segment) {
            return Err("a SPIFFE path has segments of letters, digits, '-', '.' and '_' only");
        }
    }
    Ok(())
}

/// The text between the namespace of the account and the namespace of the control plane.
const SERVICE_ACCOUNT_INFIX: &str = ".serviceaccount.identity.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_spiffe_uris_are_identities() {
        let web = service_account_identity("web", "shop", "linkerd", "cluster.local");
        assert_eq!(web, "web.shop.serviceaccount.identity.linkerd.cluster.local");
        assert_eq!(web.parse(), Ok(Identity::Dns(web.as_str().into())));
        assert_eq!("WEB.Shop".parse(), Ok(Identity::Dns("web.shop".into())));
        let uri = "spiffe://root.example/ns/Shop/web";
        assert_eq!(uri.parse(), Ok(Identity::Uri(uri.into())));
        assert_eq!(uri.parse::<Identity>().unwrap().to_string(), uri);
    }

    #[test]
    fn the_identity_of_a_service_account_names_its_namespace() {
        let check = |identity: &str, expected: Option<&str>| {
            let identity: Identity = identity.parse().unwrap();
            let found = identity.service_account_namespace("linkerd", "Cluster.local");
            assert_eq!(found, expected, "{identity}");
        };
        check("web.shop.serviceaccount.identity.linkerd.cluster.local", Some("shop"));
        check("WEB.Shop.serviceaccount.identity.linkerd.cluster.local", Some("shop"));
        check("a.b.shop.serviceaccount.identity.linkerd.cluster.local", Some("shop"));
        for other in [
            "web.shop.serviceaccount.identity.mesh.cluster.local",
            "web.shop.serviceaccount.identity.linkerd.example.org",
            "web.shop.serviceaccount.identity.linkerd.cluster.local.example.org",
            "web.shop.serviceaccount.identity.linkerdcluster.local",
            "web.shop.external.identity.linkerd.cluster.local",
            "shop.serviceaccount.identity.linkerd.cluster.local",
            "cluster.local",
            "local",
            "spiffe://cluster.local/web.shop.serviceaccount.identity.linkerd.cluster.local",
        ] {
            check(other, None);
        }
    }

    #[test]
    fn an_account_name_may_have_dots() {
        for (identity, expected) in [
            (
                "web.shop.serviceaccount.identity.linkerd.cluster.local",
                Some(("web", "shop")),
            ),
            (
                "a.b.shop.serviceaccount.identity.mesh.other.test",
                Some(("a.b", "shop")),
            ),
            (
                "a.serviceaccount.identity.b.shop.serviceaccount.identity.linkerd.cluster.local",
                Some(("a.serviceaccount.identity.b", "shop")),
            ),
            ("shop.serviceaccount.identity.linkerd.cluster.local", None),
            ("web.shop.external.identity.linkerd.cluster.local", None),
        ] {
            assert_eq!(parse_service_account_identity(identity), expected, "{identity}");
        }
    }

    #[test]
    fn invalid_identities_are_refused_with_the_reason() {
        for text in [
            "",
            "a..b",
            "a.",
            "-a.b",
            "a b",
            "10.0.0.1",
            "*.b",
            "https://a/b",
            "spiffe://",
            "spiffe://A/b",
            "spiffe://a//b",
            "spiffe://a/../b",
            "spiffe://a/b?c",
        ] {
            let err = text.parse::<Identity>().unwrap_err().to_string();
            assert!(err.starts_with(&format!("{text:?} is not an identity: ")), "{err}");
        }
        assert!("a.".repeat(200).parse::<Identity>().is_err());
        for (longest, reason) in [
            (format!("spiffe://a/{}", "b".repeat(2037)), "at most 2048 bytes"),
            (format!("spiffe://{}", "a".repeat(255)), "at most 255 bytes"),
        ] {
            longest.parse::<Identity>().unwrap();
            let err = format!("{longest}c").parse::<Identity>().unwrap_err().to_string();
            assert!(err.contains(reason), "{err}");
        }
    }
}
