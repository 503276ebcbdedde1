//! The context that all requests of an HTTP connection share.

use std::sync::Arc;

use http::HeaderValue;
use parking_lot::Mutex;
use tulle_core::{drain, metrics::Labels};

use crate::{
    http::{
        client::{EndpointClient, HttpVersion},
        connection_closer::ConnectionCloser,
        error::Error,
        stack::error_response::ErrorLabeler,
    },
    inbound::{
        client_certificate::ClientCertificate,
        connection_addrs::ConnectionAddrs,
        context::Inbound,
        gateway::{Gateway, GatewayConnection},
        policy::PortPolicy,
        profiles::{ProfileEntry, ProfileLimitReached},
        request::observe::AuthorizedRoutes,
    },
    tls::status::ServerTls,
};

/// An HTTP connection of a client.
pub(in crate::inbound) struct HttpConnection {
    pub(in crate::inbound) inbound: Arc<Inbound>,
    pub(in crate::inbound) addrs: ConnectionAddrs,
    pub(in crate::inbound) tls: ServerTls,
    pub(in crate::inbound) certificate: ClientCertificate,
    pub(in crate::inbound) port_policy: Arc<PortPolicy>,
    /// The protocol of the client's connection.
    pub(in crate::inbound) protocol: HttpVersion,
    pub(in crate::inbound) upstream: Upstream,
    /// Value of `l5d-client-id` in every request; `None` if the client has no identity.
    pub(in crate::inbound) client_id: Option<HeaderValue>,
    pub(in crate::inbound) authorized_routes: Mutex<AuthorizedRoutes>,
    pub(in crate::inbound) cached_authority: Mutex<CachedAuthority>,
    /// Closes the HTTP/2 connection of an unauthorized client once a policy permits the client a request, so that the client
    /// reconnects with the normal limits. An HTTP/1 connection closes after its next response instead. `None` for authorized
    /// clients.
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

/// The authority of the last request, and the profile of this authority. Further requests with the same authority need no lookup.
#[derive(Default)]
pub(in crate::inbound) struct CachedAuthority {
    authority: Box<[u8]>,
    profile: Option<Arc<ProfileEntry>>,
}

impl CachedAuthority {
    /// Returns the profile of `authority`; calls `look_up` unless the last request had the same authority. If the limit of profiles
    /// was reached, the next request looks it up again.
    pub(super) fn profile(
        &mut self,
        authority: &[u8],
        look_up: impl FnOnce() -> Result<Option<Arc<ProfileEntry>>, ProfileLimitReached>,
    ) -> Option<Arc<ProfileEntry>> {
        if *self.authority != *authority {
            let profile = look_up().ok()?;
            *self = Self {
                authority: authority.into(),
                profile,
            };
        }
        self.profile.clone()
    }
}

impl ErrorLabeler for HttpConnection {
    fn labels(&self, error: &Error) -> Option<Labels> {
        let is_already_counted = match error {
            Error::Unauthorized { .. } => true,
            Error::RouteNotFound => matches!(self.upstream, Upstream::App(_)),
            _ => false,
        };
        let labels = || {
            let current = self.port_policy.current();
            let families = &self.inbound.families;
            families.server_labels(self.addrs.target, &current.server_policy.meta)
        };
        (!is_already_counted).then(labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_above_the_limit_is_looked_up_again() {
        let mut cached = CachedAuthority::default();
        assert!(cached.profile(b"web.test", || Err(ProfileLimitReached)).is_none());
        let mut n_lookups = 0;
        for _ in 0..2 {
            let profile = cached.profile(b"web.test", || {
                n_lookups += 1;
                Ok(None)
            });
            assert!(profile.is_none());
        }
        assert_eq!(n_lookups, 1, "that a name has no profile is cached");
    }
}
