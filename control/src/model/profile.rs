//! The profile of a name or an address: routes, opaque ports, or a single endpoint.

use std::sync::Arc;
use std::time::Duration;

use crate::model::endpoints::Endpoint;

#[derive(Clone, Debug, PartialEq)]
pub enum Profile {
    Service(ServicePortProfile),
    Endpoint {
        endpoint: Endpoint,
        is_opaque: bool,
    },
    /// The service does not have the port.
    UndefinedPort,
    /// The client is a gateway that does not serve the service to other clusters.
    NotExported,
    ServiceMissing,
    ExternalName,
    /// The service has no pod of that hostname.
    HostnameMissing,
    /// Several objects have the address.
    Ambiguous(String),
}

/// The profile of a port of a Service, with or without a ServiceProfile.
#[derive(Clone, Debug, PartialEq)]
pub struct ServicePortProfile {
    pub fqn: String,
    pub namespace: Arc<str>,
    pub service: Arc<str>,
    pub port: u16,
    /// Whether proxies forward the bytes without detecting the protocol.
    pub is_opaque: bool,
    /// Namespace and name of the ServiceProfile. `None` if the Service has no ServiceProfile; the defaults apply.
    pub resource: Option<(Arc<str>, Arc<str>)>,
    pub routes: Vec<Route>,
    pub budget: RetryBudget,
    pub overrides: Vec<DstOverride>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub name: String,
    pub condition: RequestMatch,
    pub response_classes: Vec<ResponseClass>,
    pub is_retryable: bool,
    pub timeout: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestMatch {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    PathRegex(String),
    Method(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseClass {
    pub condition: ResponseMatch,
    pub is_failure: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseMatch {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    /// An inclusive range. 0 means no bound.
    Status {
        min: u32,
        max: u32,
    },
}

/// Retries as a ratio of requests, with a minimum rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryBudget {
    pub ratio: f32,
    pub min_per_second: u32,
    pub ttl: Duration,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self {
            ratio: 0.2,
            min_per_second: 10,
            ttl: Duration::from_secs(10),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DstOverride {
    pub authority: String,
    /// The weight in the manifest times 10 000: `500m` is 5000.
    pub weight: u32,
}
