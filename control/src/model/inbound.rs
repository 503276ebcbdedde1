//! The server policy of one workload port.

use std::sync::Arc;
use std::time::Duration;

use tulle_core::networks::NetworkMatch;

use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HostMatch, HttpMatch};

/// The policy of one port of a workload: its protocol, the authorized clients, routes and the rate limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundPolicy {
    pub reference: ServerReference,
    pub protocol: Protocol,
    pub authorizations: Vec<Authorization>,
    pub routes: Routes,
    pub rate_limit: Option<RateLimit>,
    /// Younger Servers of the namespace that select the same port and have no effect.
    pub overridden_servers: Vec<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerReference {
    /// No Server selects the port. The default policy of this name applies.
    Default(&'static str),
    Server(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Protocol detection with this timeout.
    Detect(Duration),
    Http1,
    Http2,
    Grpc,
    Opaque,
    Tls,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorization {
    pub reference: AuthorizationReference,
    pub networks: Vec<NetworkMatch>,
    pub authentication: ClientAuthentication,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorizationReference {
    Default(&'static str),
    Object {
        kind: &'static str,
        namespace: Arc<str>,
        name: Arc<str>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientAuthentication {
    Unauthenticated,
    /// TLS is required, but no identity.
    UnauthenticatedTls,
    Authenticated(Identities),
}

/// Identities of clients. A client matches if one of its identities is in `exact` or has one of the suffixes. An empty suffix
/// matches all identities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identities {
    pub exact: Vec<String>,
    pub suffixes: Vec<Vec<String>>,
}

impl Identities {
    pub fn any() -> Self {
        Self {
            exact: Vec::new(),
            suffixes: vec![Vec::new()],
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routes {
    Http(Vec<Route<HttpMatch>>),
    Grpc(Vec<Route<GrpcMatch>>),
    /// Opaque connections have no routes.
    Opaque,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route<M> {
    pub reference: Reference,
    pub hosts: Vec<HostMatch>,
    pub authorizations: Vec<Authorization>,
    pub rules: Vec<Rule<M>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule<M> {
    pub matches: Vec<M>,
    pub filters: Vec<Filter>,
}

/// Requests per second that each proxy allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimit {
    pub reference: ObjectRef,
    /// For all clients together.
    pub total: Option<u32>,
    /// For the clients of each identity.
    pub per_identity: Option<u32>,
    /// Limits of some identities, instead of `per_identity`.
    pub overrides: Vec<(u32, Vec<String>)>,
}
