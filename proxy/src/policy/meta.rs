//! The resource that a decision comes from, as metric labels and logs show it.

use std::fmt::{Display, Formatter, Result as FmtResult};
use std::num::NonZeroU16;
use std::sync::Arc;

use tulle_core::names::NOT_EXPORTED_POLICY;

/// The source of a decision: a resource of the cluster, or a built-in default.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Meta {
    /// A built-in decision such as `all-unauthenticated`, `localhost` or `audit`.
    Default(Arc<str>),
    Resource(Resource),
}

/// A named object of the cluster, with the section and the port that the decision comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Resource {
    pub(crate) group: Arc<str>,
    pub(crate) kind: Arc<str>,
    /// Empty if the control plane does not send it; that is possible for resources in server policies only.
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
    /// Empty unless the decision comes from a part of the resource.
    pub(crate) section: Arc<str>,
    pub(crate) port: Option<NonZeroU16>,
}

impl Meta {
    pub(crate) fn default_named(name: &str) -> Arc<Self> {
        Arc::new(Self::Default(name.into()))
    }

    /// The Service of a name such as `web.shop.svc.cluster.local:80`; for other names, the default `unknown`.
    pub(crate) fn from_service_authority(authority: &str) -> Arc<Self> {
        let service = || {
            let (host, port) = authority.rsplit_once(':')?;
            let [name, namespace, "svc", ..] = *host.split('.').collect::<Vec<_>>() else {
                return None;
            };
            Some(Resource {
                group: "core".into(),
                kind: "Service".into(),
                namespace: namespace.into(),
                name: name.into(),
                section: "".into(),
                port: port.parse().ok(),
            })
        };
        service().map_or_else(
            || Self::default_named("unknown"),
            |service| Arc::new(Self::Resource(service)),
        )
    }

    pub(crate) fn group(&self) -> &str {
        match self {
            Self::Default(_) => "",
            Self::Resource(resource) => &resource.group,
        }
    }

    pub(crate) fn kind(&self) -> &str {
        match self {
            Self::Default(_) => "default",
            Self::Resource(resource) => &resource.kind,
        }
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Default(name) => name,
            Self::Resource(resource) => &resource.name,
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        self.resource().map_or("", |resource| &resource.namespace)
    }

    /// The section of the resource that decides; empty if the whole resource decides.
    pub(crate) fn section(&self) -> &str {
        self.resource().map_or("", |resource| &resource.section)
    }

    pub(crate) fn port(&self) -> Option<NonZeroU16> {
        self.resource().and_then(|resource| resource.port)
    }

    fn resource(&self) -> Option<&Resource> {
        match self {
            Self::Default(_) => None,
            Self::Resource(resource) => Some(resource),
        }
    }

    /// Whether the decision comes from a built-in default.
    pub(crate) fn is_default(&self) -> bool {
        matches!(self, Self::Default(_))
    }

    /// Whether this is the built-in authorization `audit`, which permits every client and logs it.
    pub(crate) fn is_audit(&self) -> bool {
        matches!(self, Self::Default(name) if &**name == AUDIT)
    }

    /// Whether this is the policy of a Service that a gateway does not serve to other clusters.
    pub(crate) fn is_not_exported(&self) -> bool {
        matches!(self, Self::Default(name) if &**name == NOT_EXPORTED_POLICY)
    }

    /// Whether this is the route that the control plane generates for the probes of a pod.
    pub(crate) fn is_probe(&self) -> bool {
        matches!(self, Self::Default(name) if &**name == "probe")
    }
}

impl Display for Meta {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        match self {
            Self::Default(name) => write!(f, "default:{name}"),
            Self::Resource(resource) => {
                write!(f, "{}/{}", resource.kind, resource.name)?;
                if !resource.namespace.is_empty() {
                    write!(f, ".{}", resource.namespace)?;
                }
                resource.port.map_or(Ok(()), |port| write!(f, ":{port}"))
            }
        }
    }
}

/// Name of the default authorization that permits and logs.
pub(crate) const AUDIT: &str = "audit";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_recognized_by_their_dns_names() {
        for (authority, expected) in [
            ("web.shop.svc.cluster.local:80", "Service/web.shop:80"),
            ("web.shop.svc:80", "Service/web.shop:80"),
            ("web.shop:80", "default:unknown"),
            ("example.com:443", "default:unknown"),
            ("", "default:unknown"),
        ] {
            assert_eq!(
                Meta::from_service_authority(authority).to_string(),
                expected,
                "{authority}"
            );
        }
    }
}
