//! `Server`: names a port of some workloads and says what speaks there and who may by default.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::{Deserialize, Deserializer};

use crate::resources::labels::Selector;
use crate::resources::meta::Meta;
use crate::resources::policy::reference::Raw;
use crate::resources::service::PortRef;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub meta: Meta,
    pub workloads: Workloads,
    /// None, of a Server that cannot be read, stands for every port.
    pub port: Option<PortRef>,
    pub protocol: ProxyProtocol,
    pub access: DefaultPolicy,
    /// Why it cannot be read; then it permits nobody, whatever authorizations say.
    pub unread: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workloads {
    Pods(Selector),
    External(Selector),
    /// It cannot be read which.
    All,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum ProxyProtocol {
    #[default]
    #[serde(rename = "unknown")]
    Unknown,
    #[serde(rename = "HTTP/1")]
    Http1,
    #[serde(rename = "HTTP/2")]
    Http2,
    #[serde(rename = "gRPC")]
    Grpc,
    #[serde(rename = "opaque")]
    Opaque,
    #[serde(rename = "TLS")]
    Tls,
}

impl fmt::Display for ProxyProtocol {
    /// As manifests spell it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Http1 => "HTTP/1",
            Self::Http2 => "HTTP/2",
            Self::Grpc => "gRPC",
            Self::Opaque => "opaque",
            Self::Tls => "TLS",
        })
    }
}

/// Who may use a port that no authorization speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DefaultPolicy {
    Allow {
        clients: Clients,
        from: Networks,
    },
    Deny,
    /// Allows everything, under its own name in metrics.
    Audit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Clients {
    Authenticated,
    Unauthenticated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Networks {
    All,
    Cluster,
}

impl DefaultPolicy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow {
                clients: Clients::Authenticated,
                from: Networks::All,
            } => "all-authenticated",
            Self::Allow {
                clients: Clients::Unauthenticated,
                from: Networks::All,
            } => "all-unauthenticated",
            Self::Allow {
                clients: Clients::Authenticated,
                from: Networks::Cluster,
            } => "cluster-authenticated",
            Self::Allow {
                clients: Clients::Unauthenticated,
                from: Networks::Cluster,
            } => "cluster-unauthenticated",
            Self::Deny => "deny",
            Self::Audit => "audit",
        }
    }
}

impl fmt::Display for DefaultPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no default policy; accepted: all-authenticated, all-unauthenticated, cluster-authenticated, \
     cluster-unauthenticated, deny, audit"
)]
pub struct UnknownPolicy(String);

impl FromStr for DefaultPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Blocks of YAML end with a line break.
        let (clients, from) = match text.trim() {
            "all-authenticated" => (Clients::Authenticated, Networks::All),
            "all-unauthenticated" => (Clients::Unauthenticated, Networks::All),
            "cluster-authenticated" => (Clients::Authenticated, Networks::Cluster),
            "cluster-unauthenticated" => (Clients::Unauthenticated, Networks::Cluster),
            "deny" => return Ok(Self::Deny),
            "audit" => return Ok(Self::Audit),
            _ => return Err(UnknownPolicy(text.to_owned())),
        };
        Ok(Self::Allow { clients, from })
    }
}

impl<'de> Deserialize<'de> for DefaultPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct Spec {
    pod_selector: Option<Selector>,
    external_workload_selector: Option<Selector>,
    port: IntOrString,
    #[serde(default)]
    proxy_protocol: ProxyProtocol,
    access_policy: Option<DefaultPolicy>,
}

impl Server {
    pub(in crate::resources) fn from_raw(raw: Raw<Spec>) -> Result<Self, String> {
        let workloads = match (raw.spec.pod_selector, raw.spec.external_workload_selector) {
            (Some(pods), None) => Workloads::Pods(pods),
            (None, Some(workloads)) => Workloads::External(workloads),
            _ => return Err("spec needs exactly one of podSelector and externalWorkloadSelector".to_owned()),
        };
        Ok(Self {
            meta: Meta::from_kubernetes(raw.metadata)?,
            workloads,
            port: Some(PortRef::from_kubernetes(raw.spec.port).map_err(|error| format!("spec.port: {error}"))?),
            protocol: raw.spec.proxy_protocol,
            access: raw.spec.access_policy.unwrap_or(DefaultPolicy::Deny),
            unread: None,
        })
    }
}
