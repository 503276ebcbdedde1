//! The server policy of one workload port.

use std::sync::Arc;
use std::time::Duration;

use tulle_core::nets::NetworkMatch;

use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HostMatch, HttpMatch};

/// What speaks on a port, and who may speak to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub reference: ServerReference,
    pub protocol: Protocol,
    pub authorizations: Vec<Authorization>,
    pub routes: Routes,
    pub rate_limit: Option<RateLimit>,
    /// Younger Servers of its namespace that select the port in vain.
    pub overridden: Vec<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerReference {
    /// No Server selects the port; the policy of this name applies.
    Default(&'static str),
    Server(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Peek at most this long to find out.
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
    pub clients: Clients,
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
pub enum Clients {
    Unauthenticated,
    /// TLS without an identity is enough.
    UnauthenticatedTls,
    Authenticated(Identities),
}

/// Names and suffixes of which one must match; an empty suffix matches every identity.
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
    /// Bytes have no routes.
    Nothing,
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

/// Requests a second that one proxy lets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimit {
    pub reference: ObjectRef,
    pub total: Option<u32>,
    pub identity: Option<u32>,
    /// Limits of their own for some identities.
    pub overrides: Vec<(u32, Vec<String>)>,
}
