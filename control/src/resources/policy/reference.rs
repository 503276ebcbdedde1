//! References between objects, and the identities and networks in policies.

use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use tulle_core::dns_names::is_dns_label_of_any_length;
use tulle_core::identity::Identity;
use tulle_core::networks::NetworkMatch;

use crate::resources::meta::NamespacedName;
use crate::resources::status::{PolicyStatus, TargetRef};

pub const POLICY_GROUP: &str = "policy.linkerd.io";
pub const GATEWAY_GROUP: &str = "gateway.networking.k8s.io";

/// A custom resource before validation of its metadata and spec.
#[derive(Deserialize)]
pub(in crate::resources) struct RawResource<S> {
    pub(in crate::resources) metadata: ObjectMeta,
    pub(in crate::resources) spec: S,
    #[serde(default)]
    pub(in crate::resources) status: PolicyStatus,
}

/// A reference to an object in a manifest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawReference {
    #[serde(default)]
    pub(super) group: String,
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) namespace: Option<String>,
}

impl From<RawReference> for TargetRef {
    fn from(reference: RawReference) -> Self {
        Self {
            group: reference.group,
            kind: reference.kind,
            name: reference.name,
            namespace: reference.namespace,
        }
    }
}

impl RawReference {
    pub(super) fn is_kind(&self, group: &str, kind: &str) -> bool {
        same_kind(&self.group, &self.kind, group, kind)
    }

    pub(super) fn resolve(&self, namespace: &Arc<str>) -> NamespacedName {
        NamespacedName::new(
            self.namespace.as_deref().map_or_else(|| namespace.clone(), Arc::from),
            self.name.as_str(),
        )
    }

    /// # Errors
    /// Fails if the reference names another namespace than that of its own object.
    pub(super) fn check_own_namespace(&self, field: &str, own_namespace: &str) -> Result<(), String> {
        match self.namespace.as_deref() {
            Some(namespace) if !namespace.is_empty() && namespace != own_namespace => {
                Err(other_namespace_error(field, namespace, own_namespace))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn unsupported_kind_error(&self, field: &str, accepted: &str) -> String {
        let group = if self.group.is_empty() { "core" } else { &self.group };
        format!("{field} names a {} of group {group}; accepted: {accepted}", self.kind)
    }
}

pub(super) fn other_namespace_error(field: &str, namespace: &str, own_namespace: &str) -> String {
    format!("{field} refers to the namespace {namespace}; only its own, {own_namespace}, is supported")
}

/// Compares groups and kinds, ignoring case. The empty group is `core`.
pub fn same_kind(group: &str, kind: &str, expected_group: &str, expected_kind: &str) -> bool {
    let group = if group.is_empty() { "core" } else { group };
    let expected_group = if expected_group.is_empty() {
        "core"
    } else {
        expected_group
    };
    group.eq_ignore_ascii_case(expected_group) && kind.eq_ignore_ascii_case(expected_kind)
}

/// Meshed clients that an authorization allows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MeshClient {
    Identity(String),
    /// Any identity that ends with these labels. An empty list matches all identities.
    Suffix(Vec<String>),
    ServiceAccount(NamespacedName),
    Namespace(Arc<str>),
}

impl MeshClient {
    /// Parses a name, `*`, `*.suffix` or a SPIFFE URI.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let invalid = || format!("identity {text:?} is none of: `*`, `*.<suffix>`, a DNS name, a SPIFFE URI");
        if text.starts_with("spiffe://") {
            return text
                .parse::<Identity>()
                .map(|_| Self::Identity(text.to_owned()))
                .map_err(|_| invalid());
        }
        let (wildcard, labels) = match text.strip_prefix('*') {
            Some("") => return Ok(Self::Suffix(Vec::new())),
            Some(rest) => (true, rest.strip_prefix('.').ok_or_else(invalid)?),
            None => (false, text),
        };
        if !labels.split('.').all(is_dns_label_of_any_length) {
            return Err(invalid());
        }
        Ok(if wildcard {
            Self::Suffix(labels.split('.').map(str::to_owned).collect())
        } else {
            Self::Identity(text.to_owned())
        })
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNetwork {
    cidr: String,
    #[serde(default)]
    except: Vec<String>,
}

/// Checks that each exception is inside its network and does not cover all of it.
pub(super) fn parse_networks(raw: Vec<RawNetwork>) -> Result<Vec<NetworkMatch>, String> {
    let mut networks = Vec::with_capacity(raw.len());
    for RawNetwork { cidr, except } in raw {
        let net = parse_network(&cidr)?;
        let mut exceptions = Vec::with_capacity(except.len());
        for text in except {
            let exception = parse_network(&text)?;
            if exception == net {
                return Err(format!("except {text} leaves nothing of {cidr}"));
            }
            if !net.contains(&exception) {
                return Err(format!("except {text} is not inside {cidr}"));
            }
            exceptions.push(exception);
        }
        networks.push(NetworkMatch {
            net,
            except: exceptions,
        });
    }
    Ok(networks)
}

fn parse_network(text: &str) -> Result<IpNet, String> {
    let net = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<std::net::IpAddr>().map(IpNet::from));
    net.map(|net| net.trunc())
        .map_err(|_| format!("{text:?} is neither a network (10.0.0.0/8) nor an IP address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_names_wildcards_or_spiffe_uris() {
        let suffix = |labels: &[&str]| MeshClient::Suffix(labels.iter().map(|label| (*label).to_owned()).collect());
        assert_eq!(MeshClient::parse("*"), Ok(suffix(&[])));
        assert_eq!(MeshClient::parse("*.a.b"), Ok(suffix(&["a", "b"])));
        assert_eq!(
            MeshClient::parse("web.ns"),
            Ok(MeshClient::Identity("web.ns".to_owned()))
        );
        assert!(MeshClient::parse("spiffe://root.local/web").is_ok());
        for invalid in ["", "*a", "a..b", "Web", "-a", "a-", "web.*", "*.", "spiffe://"] {
            assert!(MeshClient::parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn network_exceptions_are_inside_and_do_not_cover_their_network() {
        let check = |cidr: &str, except: &[&str]| {
            let except = except.iter().map(|net| (*net).to_owned()).collect();
            parse_networks(vec![RawNetwork {
                cidr: cidr.to_owned(),
                except,
            }])
        };
        assert!(check("10.0.0.0/8", &["10.1.0.0/16"]).is_ok());
        assert!(check("10.0.0.1", &[]).is_ok());
        for (cidr, except) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.0.0.0/8", "11.0.0.0/16"),
            ("x", "10.0.0.0/8"),
        ] {
            assert!(check(cidr, &[except]).is_err(), "{cidr} except {except}");
        }
    }
}
