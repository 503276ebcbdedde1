//! Authorization: a client is permitted by the first authorization whose networks and authentication it matches.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ahash::HashSet;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tulle_core::identity::Identity;
use tulle_core::networks::NetworkMatch;

use crate::policy::meta::Meta;

/// Permits clients from some networks, if they authenticate in a given way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Authorization {
    pub(crate) networks: Vec<NetworkMatch>,
    pub(crate) authentication: Authentication,
    pub(crate) meta: Arc<Meta>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Authentication {
    /// No authentication is required.
    Unauthenticated,
    /// TLS terminated by this proxy, with or without a client certificate.
    TlsUnauthenticated,
    /// TLS with a client certificate for one of these identities.
    TlsIdentities {
        identities: HashSet<Box<str>>,
        patterns: Vec<IdentityPattern>,
    },
}

/// A set of identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum IdentityPattern {
    /// Every identity that the trust anchors verify.
    Any,
    /// DNS names that end with this text, which starts with a dot.
    Dns(Box<str>),
}

/// The TLS state of a client's connection, as authorization needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ConnectionTls<'a> {
    /// No TLS, or TLS that this proxy does not terminate.
    NotTerminated,
    Terminated {
        client: Option<&'a Identity>,
    },
}

/// The reason why no authorization permits a client. Variants are ordered: if several authorizations deny the client for different
/// reasons, the greatest reason is reported, which is the closest to a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum Denied {
    #[error("no authorization permits this network")]
    Network,
    #[error("authorization requires TLS terminated by this proxy")]
    NoTls,
    #[error("authorization requires a client identity")]
    NoIdentity,
    #[error("no authorization permits this client identity")]
    Identity,
    /// Authorizations permit the client, but the bytes of its tunnel would bypass the rules for requests.
    #[error("no rule with the method CONNECT permits this tunnel")]
    ConnectTunnel,
    /// No rule matches the request that opened a tunnel any more, or a filter of the rule refuses it.
    #[error("the changed rules refuse the request of this tunnel")]
    TunnelRequest,
    /// A certificate of the client has expired since it connected.
    #[error("the client's certificate has expired")]
    CertificateExpired,
    /// The trust anchor of the client was removed since it connected.
    #[error("the trust anchors do not verify the client's certificate any more")]
    CertificateUntrusted,
    /// The Service behind this gateway was exported when the connection or tunnel was opened.
    #[error("the Service is not exported any more")]
    NotExported,
}

impl Denied {
    /// The name of the reason in labels and headers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Network => "network",
            Self::NoTls => "no-tls",
            Self::NoIdentity => "no-identity",
            Self::Identity => "identity",
            Self::ConnectTunnel => "connect-tunnel",
            Self::TunnelRequest => "tunnel-request",
            Self::CertificateExpired => "certificate-expired",
            Self::CertificateUntrusted => "certificate-untrusted",
            Self::NotExported => "not-exported",
        }
    }

    /// The cause in `tulle_failures_total` of a connection that ends for this reason.
    pub(crate) fn cause(self) -> &'static str {
        match self {
            Self::CertificateExpired => "tls-expired",
            Self::CertificateUntrusted => "tls-untrusted",
            Self::NotExported => "gateway-not-exported",
            _ => "policy-denied",
        }
    }
}

/// The first authorization that permits a client.
///
/// # Errors
/// No authorization permits the client.
pub(crate) fn authorize<'a>(
    authorizations: &'a [Authorization],
    client: IpAddr,
    tls: ConnectionTls<'_>,
) -> Result<&'a Authorization, Denied> {
    let client = client.to_canonical();
    let mut denied = Denied::Network;
    for authorization in authorizations {
        match authorization.permits(client, tls) {
            Ok(()) => return Ok(authorization),
            Err(reason) => denied = denied.max(reason),
        }
    }
    Err(denied)
}

impl Authorization {
    /// An authorization of clients by authentication alone, from any network.
    pub(crate) fn from_any_network(authentication: Authentication, meta: Arc<Meta>) -> Self {
        Self {
            networks: any_network(),
            authentication,
            meta,
        }
    }

    /// The last authorization of every server policy from the control plane: an application may always connect to itself.
    pub(crate) fn localhost() -> Self {
        let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        Self {
            networks: loopback.map(|ip| IpNet::from(ip).into()).to_vec(),
            authentication: Authentication::Unauthenticated,
            meta: Meta::default_named("localhost"),
        }
    }

    /// Whether every client is permitted: from any address, without authentication.
    pub(crate) fn permits_every_client(&self) -> bool {
        let covers = |is_ipv4: bool| {
            let mut nets = self.networks.iter().filter(|network| network.except.is_empty());
            nets.any(|network| network.net.prefix_len() == 0 && network.net.addr().is_ipv4() == is_ipv4)
        };
        self.authentication == Authentication::Unauthenticated && covers(true) && covers(false)
    }

    fn permits(&self, client: IpAddr, tls: ConnectionTls<'_>) -> Result<(), Denied> {
        if !self.networks.iter().any(|network| network.contains(client)) {
            return Err(Denied::Network);
        }
        self.authentication.permits(tls)
    }
}

impl Authentication {
    /// Any identity that the trust anchors verify.
    pub(crate) fn any_identity() -> Self {
        Self::TlsIdentities {
            identities: HashSet::default(),
            patterns: vec![IdentityPattern::Any],
        }
    }

    fn permits(&self, tls: ConnectionTls<'_>) -> Result<(), Denied> {
        let (identities, patterns) = match (self, tls) {
            (Self::Unauthenticated, _) => return Ok(()),
            (_, ConnectionTls::NotTerminated) => return Err(Denied::NoTls),
            (Self::TlsUnauthenticated, ConnectionTls::Terminated { .. }) => return Ok(()),
            (Self::TlsIdentities { identities, patterns }, ConnectionTls::Terminated { .. }) => (identities, patterns),
        };
        let ConnectionTls::Terminated { client: Some(client) } = tls else {
            return Err(Denied::NoIdentity);
        };
        let permitted = identities.contains(client.as_str()) || patterns.iter().any(|pattern| pattern.matches(client));
        if permitted { Ok(()) } else { Err(Denied::Identity) }
    }
}

impl IdentityPattern {
    /// Creates a pattern from labels in order: `["ns", "cluster", "local"]` matches all names below `ns.cluster.local`.
    pub(crate) fn from_labels<S: AsRef<str>>(labels: &[S]) -> Self {
        if labels.is_empty() {
            return Self::Any;
        }
        let mut suffix = String::new();
        for label in labels {
            suffix.push('.');
            // Identities are stored in lower case.
            suffix.push_str(&label.as_ref().to_ascii_lowercase());
        }
        Self::Dns(suffix.into())
    }

    fn matches(&self, client: &Identity) -> bool {
        match (self, client) {
            (Self::Any, _) => true,
            (Self::Dns(suffix), Identity::Dns(name)) => name.ends_with(&**suffix),
            // A suffix of a URI would permit identities of other trust domains, because the trust domain is at the start of a URI.
            (Self::Dns(_), Identity::Uri(_)) => false,
        }
    }
}

fn any_network() -> Vec<NetworkMatch> {
    [Ipv4Net::default().into(), Ipv6Net::default().into()]
        .map(|net: IpNet| net.into())
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identities(names: &[&str], patterns: Vec<IdentityPattern>) -> Authentication {
        Authentication::TlsIdentities {
            identities: names.iter().map(|name| (*name).into()).collect(),
            patterns,
        }
    }

    fn authorization_from(net: &str, except: &str, authentication: Authentication) -> Authorization {
        let except = tulle_core::networks::parse_networks(except).unwrap();
        Authorization {
            networks: vec![NetworkMatch {
                net: net.parse().unwrap(),
                except,
            }],
            authentication,
            meta: Meta::default_named(net),
        }
    }

    fn check(authorizations: &[Authorization], client: &str, tls: ConnectionTls<'_>) -> Result<String, Denied> {
        authorize(authorizations, client.parse().unwrap(), tls).map(|found| found.meta.name().to_owned())
    }

    #[test]
    fn clients_outside_the_networks_or_in_their_exceptions_are_denied() {
        let open = [authorization_from(
            "10.0.0.0/8",
            "10.1.0.0/16",
            Authentication::Unauthenticated,
        )];
        for (client, expected) in [
            ("10.0.0.1", Ok("10.0.0.0/8".to_owned())),
            ("::ffff:10.0.0.1", Ok("10.0.0.0/8".to_owned())),
            ("10.1.0.1", Err(Denied::Network)),
            ("192.168.0.1", Err(Denied::Network)),
            ("fd00::1", Err(Denied::Network)),
        ] {
            assert_eq!(check(&open, client, ConnectionTls::NotTerminated), expected, "{client}");
        }
    }

    #[test]
    fn clients_in_the_networks_are_denied_without_the_authentication() {
        let dns: Identity = "web.shop.serviceaccount.identity.linkerd.cluster.local"
            .parse()
            .unwrap();
        let uri: Identity = "spiffe://root.test/shop/web".parse().unwrap();
        let none = ConnectionTls::NotTerminated;
        let anonymous = ConnectionTls::Terminated { client: None };
        let as_dns = ConnectionTls::Terminated { client: Some(&dns) };
        let as_uri = ConnectionTls::Terminated { client: Some(&uri) };
        let suffix = |labels: &[&str]| identities(&[], vec![IdentityPattern::from_labels(labels)]);
        for (authentication, expected) in [
            (Authentication::Unauthenticated, [Ok(()), Ok(()), Ok(()), Ok(())]),
            (
                Authentication::TlsUnauthenticated,
                [Err(Denied::NoTls), Ok(()), Ok(()), Ok(())],
            ),
            (
                Authentication::any_identity(),
                [Err(Denied::NoTls), Err(Denied::NoIdentity), Ok(()), Ok(())],
            ),
            (
                identities(&[dns.as_str()], vec![]),
                [
                    Err(Denied::NoTls),
                    Err(Denied::NoIdentity),
                    Ok(()),
                    Err(Denied::Identity),
                ],
            ),
            (
                identities(&[uri.as_str()], vec![]),
                [
                    Err(Denied::NoTls),
                    Err(Denied::NoIdentity),
                    Err(Denied::Identity),
                    Ok(()),
                ],
            ),
            (
                suffix(&["linkerd", "cluster", "local"]),
                [
                    Err(Denied::NoTls),
                    Err(Denied::NoIdentity),
                    Ok(()),
                    Err(Denied::Identity),
                ],
            ),
            (
                suffix(&["kerd", "cluster", "local"]),
                [
                    Err(Denied::NoTls),
                    Err(Denied::NoIdentity),
                    Err(Denied::Identity),
                    Err(Denied::Identity),
                ],
            ),
            (
                identities(&[], vec![]),
                [
                    Err(Denied::NoTls),
                    Err(Denied::NoIdentity),
                    Err(Denied::Identity),
                    Err(Denied::Identity),
                ],
            ),
        ] {
            let list = [Authorization::from_any_network(
                authentication.clone(),
                Meta::default_named("x"),
            )];
            let found = [none, anonymous, as_dns, as_uri].map(|tls| check(&list, "10.0.0.1", tls).map(drop));
            assert_eq!(found, expected, "{authentication:?}");
        }
    }

    #[test]
    fn a_dns_suffix_matches_only_dns_names_below_it() {
        let suffix = IdentityPattern::from_labels(&["cluster", "local"]);
        let matches = |name: &str| suffix.matches(&name.parse().unwrap());
        assert!(matches("a.cluster.local"));
        assert!(!matches("cluster.local"));
        assert!(!matches("spiffe://a.cluster.local"));
    }

    #[test]
    fn the_first_match_permits_and_the_closest_denial_is_reported() {
        let dns: Identity = "a.test".parse().unwrap();
        let list = [
            authorization_from("10.0.0.0/8", "", identities(&["b.test"], vec![])),
            authorization_from("10.0.0.0/16", "", Authentication::any_identity()),
            authorization_from("10.0.0.0/24", "", Authentication::Unauthenticated),
            Authorization::localhost(),
        ];
        let meshed = ConnectionTls::Terminated { client: Some(&dns) };
        assert_eq!(check(&list, "10.0.0.1", meshed), Ok("10.0.0.0/16".to_owned()));
        assert_eq!(
            check(&list, "10.0.0.1", ConnectionTls::NotTerminated),
            Ok("10.0.0.0/24".to_owned())
        );
        assert_eq!(check(&list, "10.1.0.1", meshed), Err(Denied::Identity));
        assert_eq!(
            check(&list, "10.1.0.1", ConnectionTls::NotTerminated),
            Err(Denied::NoTls)
        );
        assert_eq!(
            check(&list, "::1", ConnectionTls::NotTerminated),
            Ok("localhost".to_owned())
        );
        assert_eq!(check(&[], "10.0.0.1", meshed), Err(Denied::Network));
    }
}
