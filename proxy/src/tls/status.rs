//! The TLS state of a connection, or why it has no TLS, for metric labels and taps.

use std::collections::BTreeMap;

use tulle_core::identity::Identity;
use tulle_core::metrics::Labels;

use crate::policy::authz::ConnectionTls;

/// The TLS state of an accepted connection.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum ServerTls {
    /// TLS is terminated here; the client may have presented a certificate.
    Terminated {
        client_id: Option<Identity>,
    },
    /// TLS for another server name. It is not terminated.
    PassedThrough {
        sni: String,
    },
    Plain(NoServerTls),
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum NoServerTls {
    /// The client is on this host.
    Loopback,
    /// The port is opaque, so the proxy does not look for a ClientHello.
    PortSkipped,
    /// The first bytes are not a ClientHello with a server name, for example because the connection is plaintext.
    NoTlsFromRemote,
}

/// The TLS state of a dialled connection.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum ClientTls {
    Meshed(Identity),
    Plain(NoClientTls),
}

#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub(crate) enum NoClientTls {
    /// The endpoint has a loopback address, or an address of this workload.
    Loopback,
    /// Discovery reports no identity for the endpoint.
    NotProvidedByServiceDiscovery,
    /// The client is an ingress. It dialled the endpoint, and named no service in `l5d-dst-override`.
    IngressWithoutOverride,
}

impl ServerTls {
    pub(crate) fn client_id(&self) -> Option<&Identity> {
        match self {
            Self::Terminated { client_id } => client_id.as_ref(),
            Self::PassedThrough { .. } | Self::Plain(_) => None,
        }
    }

    pub(crate) fn metric_labels(&self, labels: Labels) -> Labels {
        match self {
            Self::Terminated { client_id } => labels
                .with("tls", "true")
                .with("client_id", client_id.as_ref().map_or("", Identity::as_str)),
            Self::PassedThrough { sni } => labels.with("tls", "opaque").with("sni", sni),
            Self::Plain(reason) => labels.with("tls", "no_identity").with("no_tls_reason", reason.as_str()),
        }
    }

    /// The TLS state as the authorization check uses it.
    pub(crate) fn to_connection_tls(&self) -> ConnectionTls<'_> {
        match self {
            Self::Terminated { client_id } => ConnectionTls::Terminated {
                client: client_id.as_ref(),
            },
            Self::PassedThrough { .. } | Self::Plain(_) => ConnectionTls::NotTerminated,
        }
    }
}

impl ServerTls {
    pub(crate) fn tap_labels(&self) -> BTreeMap<String, String> {
        match self {
            Self::Terminated { client_id } => {
                let id = client_id.as_ref().map_or("", Identity::as_str);
                to_map([("tls", "true"), ("client_id", id)])
            }
            // Linkerd's tap uses another name than its metrics.
            Self::PassedThrough { sni } => to_map([("tls", "passthru"), ("sni", sni)]),
            Self::Plain(reason) => to_map([("tls", reason.as_str())]),
        }
    }
}

impl ClientTls {
    pub(crate) fn tap_labels(&self) -> BTreeMap<String, String> {
        match self {
            Self::Meshed(server_id) => to_map([("tls", "true"), ("server_id", server_id.as_str())]),
            Self::Plain(reason) => to_map([("tls", reason.as_str())]),
        }
    }
}

fn to_map<const N: usize>(labels: [(&str, &str); N]) -> BTreeMap<String, String> {
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

impl ClientTls {
    pub(crate) fn metric_labels(&self, labels: Labels) -> Labels {
        match self {
            Self::Meshed(server_id) => labels.with("tls", "true").with("server_id", server_id),
            Self::Plain(reason) => labels.with("tls", "no_identity").with("no_tls_reason", reason.as_str()),
        }
    }
}

impl NoServerTls {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::PortSkipped => "port_skipped",
            Self::NoTlsFromRemote => "no_tls_from_remote",
        }
    }
}

impl NoClientTls {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::NotProvidedByServiceDiscovery => "not_provided_by_service_discovery",
            Self::IngressWithoutOverride => "ingress_without_override",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_labels_match_linkerd() {
        let id: Identity = "web.shop".parse().unwrap();
        for (status, expected) in [
            (
                ServerTls::Terminated {
                    client_id: Some(id.clone()),
                },
                r#"tls="true",client_id="web.shop""#,
            ),
            (ServerTls::Terminated { client_id: None }, r#"tls="true",client_id="""#),
            (
                ServerTls::PassedThrough {
                    sni: "example.com".to_owned(),
                },
                r#"tls="opaque",sni="example.com""#,
            ),
            (
                ServerTls::Plain(NoServerTls::PortSkipped),
                r#"tls="no_identity",no_tls_reason="port_skipped""#,
            ),
            (
                ServerTls::Plain(NoServerTls::NoTlsFromRemote),
                r#"tls="no_identity",no_tls_reason="no_tls_from_remote""#,
            ),
        ] {
            assert_eq!(status.metric_labels(Labels::new()).as_str(), expected);
        }
        let not_discovered = NoClientTls::NotProvidedByServiceDiscovery;
        for (status, expected) in [
            (ClientTls::Meshed(id), r#"tls="true",server_id="web.shop""#),
            (
                ClientTls::Plain(not_discovered),
                r#"tls="no_identity",no_tls_reason="not_provided_by_service_discovery""#,
            ),
        ] {
            assert_eq!(status.metric_labels(Labels::new()).as_str(), expected);
        }
    }
}
