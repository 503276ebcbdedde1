//! Byte streams: an endpoint is drawn per connection, and bytes pass until both sides are done.

use std::{io, sync::Arc};

use bytes::Bytes;
use smallvec::SmallVec;
use tokio::{io::AsyncWriteExt, time::Instant};

use crate::{
    balance::{balancer::Candidate, load::Pending},
    http::error::{Error, Retry},
    net::{copy, io::Io},
    outbound::{
        destination::{self, OpaquePlan, Refusal},
        endpoint::Endpoint,
    },
};

/// Endpoints that are dialled for one connection at most.
const MAX_TRIES: usize = 3;

/// Why a connection reached no endpoint.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpaqueError {
    #[error("refused by policy: {}", .0.label())]
    Refused(Refusal),
    #[error(transparent)]
    Unreached(#[from] Error),
}

impl OpaqueError {
    /// What it is called where connections of a route are counted.
    pub(super) fn route_label(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.label(),
            Self::Unreached(Error::NoBackends | Error::NoBackend(_)) => "invalid_backend",
            Self::Unreached(_) => "unexpected",
        }
    }
}

/// Opens a connection to an endpoint of the plan; one that cannot be reached is replaced by another. None is dialled twice: a
/// client is told that it failed, as by the network, and decides itself whether to try again.
///
/// # Errors
/// The policy refuses, or no endpoint could be reached.
pub(super) async fn open(plan: &OpaquePlan) -> Result<Io, OpaqueError> {
    if let Some(refusal) = plan.refusal {
        return Err(OpaqueError::Refused(refusal));
    }
    let choice = plan.backends.choose()?;
    if let Some(refusal) = destination::refusal(&choice.filters) {
        return Err(OpaqueError::Refused(refusal));
    }
    let mut tried: SmallVec<[Arc<Endpoint>; MAX_TRIES]> = SmallVec::new();
    let mut endpoint = choice.backend.pick(&tried).await?;
    loop {
        let mut pending = Pending::new(endpoint.clone(), Instant::now());
        let error = match endpoint.connector.open(None).await {
            Ok(io) => {
                endpoint.breaker().connected();
                pending.answered(Instant::now());
                return Ok(io);
            }
            Err(error) => error,
        };
        endpoint.breaker().connect_failed(error.cause(), Instant::now());
        tracing::debug!(addr = %endpoint.spec.addr, %error, "endpoint cannot be reached");
        tried.push(endpoint);
        let is_new = |other: &Arc<Endpoint>| !tried.iter().any(|tried| Arc::ptr_eq(tried, other));
        let another = match error.retry() == Retry::NeverSent && tried.len() < MAX_TRIES {
            true => choice.backend.pick_where(is_new),
            false => None,
        };
        endpoint = another.ok_or(error)?;
    }
}

/// Copies between the two sides until both are done; `first` is what the client said before.
///
/// # Errors
/// One of them broke off; then the other ends with a reset.
pub(super) async fn join(mut client: Io, mut server: Io, first: Bytes) -> io::Result<()> {
    let result = async {
        if !first.is_empty() {
            let written = async {
                server.write_all(&first).await?;
                server.flush().await
            };
            written.await.inspect_err(|_| client.reset())?;
        }
        copy::both(&mut client, &mut server).await
    };
    result
        .await
        .inspect_err(|error| tracing::debug!(%error, "connection ended"))
}
