//! What is known of a name or an address before a connection is made: routes, opaqueness, the endpoint itself.

use std::sync::Arc;
use std::time::Duration;

use crate::model::endpoints::Endpoint;

/// The answer to a profile lookup.
#[derive(Clone, Debug, PartialEq)]
pub enum Profile {
    Service(ServiceProfile),
    Endpoint {
        endpoint: Endpoint,
        opacity: Opacity,
    },
    /// The service does not define the port.
    UndefinedPort,
    ServiceMissing,
    ExternalName,
    /// The service has no pod of that hostname.
    HostnameMissing,
    /// Several objects claim the address.
    Ambiguous(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opacity {
    /// Bytes that nobody parses.
    Opaque,
    Detect,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ServiceProfile {
    pub fqn: String,
    pub namespace: Arc<str>,
    pub service: Arc<str>,
    pub port: u16,
    pub opacity: Opacity,
    /// Namespace and name of the ServiceProfile; none when the default applies.
    pub source: Option<(Arc<str>, Arc<str>)>,
    pub routes: Vec<Route>,
    pub budget: RetryBudget,
    pub overrides: Vec<Override>,
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
    /// Both ends included; 0 stands for no bound.
    Status {
        min: u32,
        max: u32,
    },
}

/// Retries as a share of requests, with a floor.
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
pub struct Override {
    /// Host and port.
    pub authority: String,
    pub weight: u32,
}
