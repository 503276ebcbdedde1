//! `Server`: a port of some workloads, its protocol and its access policy.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::{Deserialize, Deserializer};

use crate::resources::labels::{Labels, Selector};
use crate::resources::meta::Meta;
use crate::resources::policy::reference::RawResource;
use crate::resources::service::PortRef;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub meta: Meta,
    pub workloads: WorkloadSelector,
    /// `None` means all ports. Only a placeholder with an unreadable port has `None`.
    pub port: Option<PortRef>,
    pub protocol: ProxyProtocol,
    pub access_policy: AccessPolicy,
    /// Why the object is unreadable. If set, the Server allows no client, even if authorizations match.
    pub unreadable: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkloadSelector {
    Pods(Selector),
    ExternalWorkloads(Selector),
    /// All workloads, because the selector of the Server cannot be read.
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

impl WorkloadSelector {
    /// Returns a label that every selected workload has, or `None` if the selector requires none.
    pub fn required_label(&self) -> Option<(&str, &str)> {
        match self {
            Self::All => None,
            Self::Pods(selector) | Self::ExternalWorkloads(selector) => selector.required_label(),
        }
    }

    pub fn selects_pod(&self, labels: &Labels) -> bool {
        match self {
            Self::All => true,
            Self::Pods(selector) => selector.matches(labels),
            Self::ExternalWorkloads(_) => false,
        }
    }

    pub fn selects_external_workload(&self, labels: &Labels) -> bool {
        match self {
            Self::All => true,
            Self::Pods(_) => false,
            Self::ExternalWorkloads(selector) => selector.matches(labels),
        }
    }
}

impl fmt::Display for ProxyProtocol {
    /// Formats the protocol as in manifests.
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

/// Which clients a Server, or a port that no Server selects, authorizes besides those of authorization policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessPolicy {
    Allow {
        clients: AccessPolicyClients,
        from: AccessPolicyNetworks,
    },
    Deny,
    /// Allows all clients, with a policy name of its own in metrics.
    Audit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessPolicyClients {
    Authenticated,
    Unauthenticated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessPolicyNetworks {
    All,
    Cluster,
}

impl Server {
    /// Returns the name of the port. `None` if the Server has a port number.
    pub fn port_name(&self) -> Option<&str> {
        match &self.port {
            Some(PortRef::Name(name)) => Some(name),
            Some(PortRef::Number(_)) | None => None,
        }
    }
}

impl AccessPolicy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow {
                clients: AccessPolicyClients::Authenticated,
                from: AccessPolicyNetworks::All,
            } => "all-authenticated",
            Self::Allow {
                clients: AccessPolicyClients::Unauthenticated,
                from: AccessPolicyNetworks::All,
            } => "all-unauthenticated",
            Self::Allow {
                clients: AccessPolicyClients::Authenticated,
                from: AccessPolicyNetworks::Cluster,
            } => "cluster-authenticated",
            Self::Allow {
                clients: AccessPolicyClients::Unauthenticated,
                from: AccessPolicyNetworks::Cluster,
            } => "cluster-unauthenticated",
            Self::Deny => "deny",
            Self::Audit => "audit",
        }
    }
}

impl fmt::Display for AccessPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an access policy; accepted: all-authenticated, all-unauthenticated, cluster-authenticated, \
     cluster-unauthenticated, deny, audit"
)]
pub struct UnknownAccessPolicy(String);

impl FromStr for AccessPolicy {
    type Err = UnknownAccessPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Values from YAML block scalars end with a line break.
        let (clients, from) = match text.trim() {
            "all-authenticated" => (AccessPolicyClients::Authenticated, AccessPolicyNetworks::All),
            "all-unauthenticated" => (AccessPolicyClients::Unauthenticated, AccessPolicyNetworks::All),
            "cluster-authenticated" => (AccessPolicyClients::Authenticated, AccessPolicyNetworks::Cluster),
            "cluster-unauthenticated" => (AccessPolicyClients::Unauthenticated, AccessPolicyNetworks::Cluster),
            "deny" => return Ok(Self::Deny),
            "audit" => return Ok(Self::Audit),
            _ => return Err(UnknownAccessPolicy(text.to_owned())),
        };
        Ok(Self::Allow { clients, from })
    }
}

impl<'de> Deserialize<'de> for AccessPolicy {
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
    access_policy: Option<AccessPolicy>,
}

impl Server {
    pub(in crate::resources) fn from_raw(raw: RawResource<Spec>) -> Result<Self, String> {
        let workloads = match (raw.spec.pod_selector, raw.spec.external_workload_selector) {
            (Some(pods), None) => WorkloadSelector::Pods(pods),
            (None, Some(workloads)) => WorkloadSelector::ExternalWorkloads(workloads),
            _ => return Err("spec needs exactly one of podSelector and externalWorkloadSelector".to_owned()),
        };
        Ok(Self {
            meta: Meta::from_kubernetes(raw.metadata)?,
            workloads,
            port: Some(PortRef::from_kubernetes(raw.spec.port).map_err(|error| format!("spec.port: {error}"))?),
            protocol: raw.spec.proxy_protocol,
            access_policy: raw.spec.access_policy.unwrap_or(AccessPolicy::Deny),
            unreadable: None,
        })
    }
}
