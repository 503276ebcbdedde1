//! The context that all requests of an HTTP connection share.

use std::sync::Arc;

use http::HeaderValue;
use parking_lot::Mutex;
use tulle_core::{drain, metrics::Labels};

use crate::{
    http::{
        client::{EndpointClient, Protocol},
        connection_closer::ConnectionCloser,
        error::Error,
        stack::error_response::ErrorLabeler,
    },
    inbound::{
        connection_addrs::ConnectionAddrs,
        context::Inbound,
        gateway::{Gateway, GatewayConnection},
        metrics::{target_labels, with_server},
        policy::PortPolicy,
        profiles::ProfileEntry,
        request::observe::RouteMetricsCache,
    },
    tls::status::ServerTls,
};

pub(in crate::inbound) struct HttpConnection {
    pub(in crate::inbound) inbound: Arc<Inbound>,
    pub(in crate::inbound) addrs: ConnectionAddrs,
    pub(in crate::inbound) tls: ServerTls,
    pub(in crate::inbound) port_policy: Arc<PortPolicy>,
    /// The protocol of the client's connection.
    pub(in crate::inbound) protocol: Protocol,
    pub(in crate::inbound) upstream: Upstream,
    /// Value of `l5d-client-id` in every request; `None` if the client has no identity.
    pub(in crate::inbound) client_id: Option<HeaderValue>,
    pub(in crate::inbound) metrics_cache: Mutex<RouteMetricsCache>,
    pub(in crate::inbound) cached_authority: Mutex<CachedAuthority>,
    /// Closes the connection of an unauthorized client once a policy permits it a request, so that it reconnects with the
    /// normal limits.
    pub(in crate::inbound) unauthorized_closer: Option<ConnectionCloser>,
    pub(in crate::inbound) drain: drain::Watch,
}

/// The target of all requests of a connection.
pub(in crate::inbound) enum Upstream {
    /// The application.
    App(Arc<EndpointClient>),
    /// The service that the client named in the transport header.
    Gateway(Arc<dyn Gateway>, Box<GatewayConnection>),
}

/// The authority of the last request and its profile, so that requests with the same authority need no look-up.
#[derive(Default)]
pub(in crate::inbound) struct CachedAuthority {
    pub(super) authority: Box<[u8]>,
    pub(super) profile: Option<Arc<ProfileEntry>>,
}

impl ErrorLabeler for HttpConnection {
    fn labels(&self, error: &Error) -> Option<Labels> {
        let is_already_counted = match error {
            Error::Unauthorized { .. } => true,
            Error::RouteNotFound => matches!(self.upstream, Upstream::App(_)),
            _ => false,
        };
        let target = self.addrs.target;
        let labels = || {
            with_server(
                target_labels(target),
                &self.port_policy.current().server_policy.meta,
                target.port(),
            )
        };
        (!is_already_counted).then(labels)
    }
}
