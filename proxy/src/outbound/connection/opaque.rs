//! Opaque connections: picks an endpoint for each connection, and copies bytes until both sides have ended.

use std::{io, sync::Arc};

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::{io::AsyncWriteExt, time::Instant};

use crate::{
    balance::candidate::{Candidate, InFlightGuard},
    http::error::{Error, Resendable},
    net::{copy, io::Io},
    outbound::{
        destination::snapshot::{self, CompiledOpaqueRoute, PolicyRefusal, Snapshot},
        endpoint::{Endpoint, LocalEndpoints},
    },
};

const MAX_ENDPOINTS_PER_CONNECTION: usize = 3;

/// The reason why a connection reached no endpoint.
#[derive(Debug, thiserror::Error)]
pub(in crate::outbound) enum OpaqueError {
    #[error(transparent)]
    Policy(PolicyRefusal),
    #[error(transparent)]
    Connect(#[from] Error),
}

impl OpaqueError {
    /// Value of the `error` label in the metrics of a route.
    pub(in crate::outbound) fn route_label(&self) -> &'static str {
        match self {
            Self::Policy(refusal) => refusal.label(),
            Self::Connect(Error::NoBackends | Error::InvalidBackend(_)) => "invalid_backend",
            Self::Connect(_) => "unexpected",
        }
    }

    /// The error for HTTP clients. `snapshot` is that of the destination.
    pub(in crate::outbound) fn into_http_error(self, snapshot: &Snapshot) -> Error {
        match self {
            Self::Connect(error) => error,
            Self::Policy(PolicyRefusal::Forbidden) => Error::Forbidden {
                policy: snapshot.policy.meta.to_string(),
            },
            Self::Policy(PolicyRefusal::Invalid(reason)) => Error::InvalidPolicy(reason.to_string()),
            Self::Policy(PolicyRefusal::DiscoveryDenied(reason)) => Error::DiscoveryDenied(reason.to_string()),
        }
    }
}

/// Opens a connection to an endpoint of the route.
///
/// Up to [`MAX_ENDPOINTS_PER_CONNECTION`] endpoints are dialled, each once. If none can be reached, the client's connection fails
/// as it would without a proxy, and the client decides whether to try again.
///
/// # Errors
/// The policy refuses the connection, no endpoint can be reached, or `local_endpoints` refuses the one that was picked.
pub(in crate::outbound) async fn open(
    route: &CompiledOpaqueRoute,
    local_endpoints: LocalEndpoints,
) -> Result<Io, OpaqueError> {
    if let Some(refusal) = &route.refusal {
        return Err(OpaqueError::Policy(refusal.clone()));
    }
    let choice = route.backends.choose()?;
    if let Some(refusal) = snapshot::policy_refusal(&choice.filters) {
        return Err(OpaqueError::Policy(refusal));
    }
    let mut tried: SmallVec<[Arc<Endpoint>; MAX_ENDPOINTS_PER_CONNECTION]> = SmallVec::new();
    let mut endpoint = choice.backend.pick(&tried).await?;
    local_endpoints.check(&endpoint)?;
    loop {
        let mut in_flight = InFlightGuard::new(endpoint.clone(), Instant::now());
        let error = match endpoint.connector.open(None).await {
            Ok(io) => {
                endpoint.breaker().record_connected();
                // The load of opaque connections is the time to connect. Open connections do not count as in flight.
                in_flight.record_response(Instant::now());
                return Ok(io);
            }
            Err(error) => error,
        };
        endpoint.breaker().record_dial_failure(error.cause(), Instant::now());
        tracing::debug!(addr = %endpoint.spec.addr, %error, "endpoint cannot be reached");
        tried.push(endpoint);
        let is_untried = |other: &Arc<Endpoint>| {
            local_endpoints.permits(other) && !tried.iter().any(|tried| Arc::ptr_eq(tried, other))
        };
        let another = match error.resendable() == Resendable::Always && tried.len() < MAX_ENDPOINTS_PER_CONNECTION {
            true => choice.backend.pick_where(is_untried),
            false => None,
        };
        endpoint = another.ok_or(error)?;
    }
}

/// Copies bytes between client and server until both have ended. `client_prefix` are bytes that were already read from the client.
///
/// # Errors
/// One side failed; the other side is then reset.
pub(in crate::outbound) async fn copy_streams(mut client: Io, mut server: Io, client_prefix: Bytes) -> io::Result<()> {
    let copying = async {
        if !client_prefix.is_empty() {
            let writing = async {
                server.write_all(&client_prefix).await?;
                server.flush().await
            };
            writing.await.inspect_err(|_| client.reset_on_drop())?;
        }
        copy::copy_bidirectional(&mut client, &mut server).await
    };
    copying
        .await
        .inspect_err(|error| tracing::debug!(%error, "connection ended"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::client::{ClientPolicy, ClientProtocol};

    #[test]
    fn the_error_of_an_opaque_connection_has_the_reason_of_the_policy_refusal() {
        let (second, reason) = (Duration::from_secs(1), "it has no backends");
        for (policy, text, cause, label) in [
            (
                ClientPolicy::invalid(reason.to_owned(), second),
                "the policy is invalid: it has no backends",
                "invalid-policy",
                "invalid_policy",
            ),
            (
                ClientPolicy::denied("only clients in namespace shop", second),
                "only clients in namespace shop",
                "discovery-denied",
                "discovery_denied",
            ),
        ] {
            let ClientProtocol::Detect {
                opaque: Some(route), ..
            } = policy.protocol
            else {
                panic!("{policy:?}");
            };
            let refusal = snapshot::policy_refusal(&route.filters).unwrap();
            assert_eq!(refusal.cause(), cause);
            let error = OpaqueError::Policy(refusal);
            assert_eq!((error.to_string().as_str(), error.route_label()), (text, label));
        }
    }
}
