//! Parses a request: the target in its path, and the client in its token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::Deserialize;

use crate::resources::exported_services::ExportedServices;
use crate::resources::meta::NamespacedName;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Address(SocketAddr),
    Service {
        name: NamespacedName,
        port: u16,
        host: String,
    },
    /// One pod of a headless service, by its hostname.
    Instance {
        service: NamespacedName,
        hostname: String,
        port: u16,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TargetError {
    #[error("Invalid authority: {0}")]
    Authority(String),
    #[error("invalid service: {0}")]
    Service(String),
}

/// Parses `host[:port]`. The default port is 80.
pub(super) fn parse(path: &str, cluster_domain: &str) -> Result<Target, TargetError> {
    let invalid = || TargetError::Authority(path.to_owned());
    if let Ok(addr) = path.parse::<SocketAddr>() {
        return if addr.port() == 0 {
            Err(invalid())
        } else {
            Ok(Target::Address(addr))
        };
    }
    let (host, port) = match path.split_once(':') {
        None => (path, 80),
        Some((host, port)) => match port.parse::<u16>() {
            Ok(port) if port > 0 => (host, port),
            _ => return Err(invalid()),
        },
    };
    // The length is limited because a stream keeps the names of its target in memory.
    if host.len() > MAX_NAME_BYTES {
        return Err(invalid());
    }
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(Target::Address(SocketAddr::new(ip, port)));
    }
    let labels = host
        .strip_suffix(cluster_domain)
        .and_then(|rest| rest.strip_suffix(".svc."));
    let labels: Vec<&str> = labels.unwrap_or_default().split('.').collect();
    match *labels {
        [name, namespace] if !name.is_empty() && !namespace.is_empty() => Ok(Target::Service {
            name: NamespacedName::new(namespace, name),
            port,
            host: host.to_owned(),
        }),
        [hostname, name, namespace] if labels.iter().all(|label| !label.is_empty()) => Ok(Target::Instance {
            service: NamespacedName::new(namespace, name),
            hostname: hostname.to_owned(),
            port,
        }),
        _ => Err(TargetError::Service(host.to_owned())),
    }
}

/// The client, according to its context token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct ContextToken {
    #[serde(rename = "ns", default)]
    namespace: String,
    #[serde(rename = "nodeName", default)]
    node: String,
    #[serde(rename = "exportedServices", default)]
    exported_services: String,
}

impl ContextToken {
    /// Parses a context token: JSON, or the deprecated form `ns:<namespace>`.
    ///
    /// # Errors
    /// Fails if the token has neither form.
    pub(super) fn parse(token: &str) -> Result<Self, serde_json::Error> {
        if let Some(namespace) = token.strip_prefix(DEPRECATED_PREFIX) {
            return Ok(Self {
                namespace: namespace.to_owned(),
                ..Self::default()
            });
        }
        if token.is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_str(token)
    }

    /// Whether a token has the deprecated form.
    pub(super) fn is_deprecated(token: &str) -> bool {
        token.starts_with(DEPRECATED_PREFIX)
    }

    pub(super) fn namespace(&self) -> Option<Arc<str>> {
        has_name_length(&self.namespace).then(|| self.namespace.as_str().into())
    }

    pub(super) fn node(&self) -> Option<&str> {
        has_name_length(&self.node).then_some(self.node.as_str())
    }

    /// The Services that the client serves to other clusters, if it is a gateway.
    pub(super) fn exported_services(&self) -> ExportedServices {
        ExportedServices::from_client(&self.exported_services)
    }
}

/// Returns whether the text has a valid length for the name of an object. The length is limited because a stream keeps the names of
/// its token in memory.
fn has_name_length(text: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&text.len())
}

const DEPRECATED_PREFIX: &str = "ns:";
/// Maximum length of a DNS name and of the name of an object.
const MAX_NAME_BYTES: usize = 253;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".*|[a-z.:\\[\\]0-9{}\"]*") {
            let _ = parse(&text, "cluster.local");
            let _ = ContextToken::parse(&text);
        }
    }

    #[test]
    fn targets_are_addresses_services_and_their_pods() {
        let check = |path: &str, expected: Option<Target>| {
            assert_eq!(parse(path, "cluster.local").ok(), expected, "{path}");
        };
        let web = |port| {
            let host = "web.shop.svc.cluster.local".to_owned();
            Some(Target::Service {
                name: NamespacedName::new("shop", "web"),
                port,
                host,
            })
        };
        check("web.shop.svc.cluster.local:8080", web(8080));
        check("web.shop.svc.cluster.local", web(80));
        let service = NamespacedName::new("shop", "db");
        let instance = Target::Instance {
            service,
            hostname: "db-0".to_owned(),
            port: 5432,
        };
        check("db-0.db.shop.svc.cluster.local:5432", Some(instance));
        check("10.0.0.1:80", Some(Target::Address("10.0.0.1:80".parse().unwrap())));
        check("10.0.0.1", Some(Target::Address("10.0.0.1:80".parse().unwrap())));
        check("[fd00::1]:80", Some(Target::Address("[fd00::1]:80".parse().unwrap())));
        for invalid in [
            "",
            ":80",
            "web.shop.svc.cluster.local:0",
            "web.shop.svc.cluster.local:65536",
            "web.shop.svc.cluster.local:http",
            "web.shop.svc.cluster.local.:80",
            "web.shop.svc.example.org:80",
            "shop.svc.cluster.local:80",
            "a.b.c.d.svc.cluster.local:80",
            ".shop.svc.cluster.local:80",
            "svc.cluster.local",
            "fd00::1:80",
            "10.0.0.1:0",
        ] {
            check(invalid, None);
        }
        check(&format!("{}.db.shop.svc.cluster.local:80", "a".repeat(230)), None);
    }

    #[test]
    fn tokens_are_json_or_a_namespace() {
        let check = |token: &str, namespace: &str, node: &str| {
            let expected = ContextToken {
                namespace: namespace.to_owned(),
                node: node.to_owned(),
                exported_services: String::new(),
            };
            assert_eq!(ContextToken::parse(token).unwrap(), expected, "{token}");
            assert_eq!(ContextToken::is_deprecated(token), token == "ns:shop");
        };
        check(r#"{"ns":"shop","nodeName":"node-1","pod":"web-1"}"#, "shop", "node-1");
        check(r#"{"ns":"shop"}"#, "shop", "");
        check("ns:shop", "shop", "");
        check("", "", "");
        assert!(ContextToken::parse("{").is_err());
        let long = "a".repeat(MAX_NAME_BYTES + 1);
        let token = ContextToken::parse(&format!(r#"{{"ns":"{long}","nodeName":"{long}"}}"#)).unwrap();
        assert_eq!((token.namespace(), token.node()), (None, None));
        let gateway = ContextToken::parse(r#"{"ns":"shop","exportedServices":"app=web"}"#).unwrap();
        assert_eq!(gateway.exported_services(), ExportedServices::from_client("app=web"));
    }
}
