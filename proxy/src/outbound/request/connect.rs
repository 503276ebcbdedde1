//! Picks an endpoint and a connection to it (O8, O9): an open one, or a new one.
//!
//! If a dial is slow, another endpoint is used or dialled too (hedging), so that an endpoint that is starting or has just stopped
//! does not delay the request. The first dial continues in the background, and its connection goes to the pool.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Version, header};
use smallvec::SmallVec;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};
use tulle_core::metrics::Labels;

use crate::{
    balance::candidate::Candidate,
    http::{
        body::Body,
        client::{ConnectionUse, Protocol, ReadyConnection},
        error::{Error, Retry},
        headers,
        upgrade::websocket,
    },
    outbound::{backend::Backend, endpoint::Endpoint, metrics::Families},
};

/// Endpoints that a request has been sent to, or could not reach.
pub(super) type TriedEndpoints = SmallVec<[Arc<Endpoint>; MAX_ENDPOINTS_PER_REQUEST]>;

struct PendingDial {
    endpoint: Arc<Endpoint>,
    done: oneshot::Receiver<Result<ReadyConnection, Error>>,
}

/// Connects a request to an endpoint of its backend.
#[derive(Clone, Copy)]
pub(super) struct RequestConnector<'a> {
    pub(super) worker: usize,
    pub(super) backend: &'a Backend,
    /// Identity that the endpoint must have, from `l5d-require-id`.
    pub(super) required_identity: Option<&'a str>,
    pub(super) families: &'a Families,
    /// Number of endpoints that earlier attempts were sent to.
    pub(super) n_tried_before: usize,
}

/// What a request requires of its connection.
#[derive(Clone, Copy)]
pub(super) struct ConnectionRequirements {
    version: Version,
    /// Set for a request that cannot be converted to HTTP/2: it asks for an upgrade, or has no host.
    must_stay_http1: bool,
    reuse: ConnectionUse,
}

impl RequestConnector<'_> {
    /// Returns an endpoint and a connection to it. Endpoints that cannot be reached are added to `tried`.
    ///
    /// # Errors
    /// No endpoint is available, the last one that was tried cannot be reached, or an endpoint does not have the required
    /// identity.
    pub(super) async fn connect_endpoint(
        &self,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
    ) -> Result<(Arc<Endpoint>, ReadyConnection), Error> {
        let endpoint = self.backend.pick(tried).await?;
        match self.reuse_connection(&endpoint, needs).await? {
            Some(ready) => Ok((endpoint, ready)),
            // Boxed because it is rare and its timer is large.
            None => Box::pin(self.dial_with_hedging(endpoint, tried, needs)).await,
        }
    }

    /// An open connection to the endpoint, if there is one.
    ///
    /// # Errors
    /// The endpoint does not have the required identity.
    async fn reuse_connection(
        &self,
        endpoint: &Arc<Endpoint>,
        needs: ConnectionRequirements,
    ) -> Result<Option<ReadyConnection>, Error> {
        if let Some(required) = self.required_identity
            && endpoint.identity().is_none_or(|identity| identity.as_str() != required)
        {
            return Err(Error::IdentityMismatch {
                required: required.to_owned(),
                actual: endpoint.identity().cloned(),
            });
        }
        let client = endpoint.client(self.worker);
        let ready = client
            .existing_connection(needs.protocol(endpoint), needs.reuse(endpoint))
            .await;
        if ready.is_some() {
            endpoint.breaker().record_connected();
        }
        Ok(ready)
    }

    /// Dials this endpoint and, if that is slow, others; returns the first connection. If another endpoint has an open connection
    /// that can be shared, returns it immediately.
    async fn dial_with_hedging(
        &self,
        endpoint: Arc<Endpoint>,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
    ) -> Result<(Arc<Endpoint>, ReadyConnection), Error> {
        let mut dials: SmallVec<[PendingDial; MAX_ENDPOINTS_PER_REQUEST]> = SmallVec::new();
        let mut hedge_at = Some(start_dial(&mut dials, endpoint, self.worker, needs));
        if let Some(connected) = self.find_shared_connection(tried, &dials, needs).await {
            return Ok(connected);
        }
        loop {
            let next = tokio::select! {
                biased;
                // Cancel-safe: a completed dial is removed in the same poll that returns it.
                (endpoint, dialled) = first_completed(&mut dials) => match dialled {
                    Ok(ready) => return Ok((endpoint, ready)),
                    Err(error) if error.retry() == Retry::NeverSent && self.can_try_another_endpoint(tried.len()) => {
                        tried.push(endpoint);
                        // The dial has waited for a free stream. Another endpoint is used only if it is available now.
                        let is_full = matches!(error, Error::StreamLimit { .. });
                        let other = self.backend.pick_where(|other| is_full && is_untried(other, tried, &dials));
                        if is_full && dials.is_empty() && other.is_none() {
                            return Err(error);
                        }
                        self.count_resend(error.cause());
                        if !dials.is_empty() {
                            continue;
                        }
                        match other {
                            Some(other) => other,
                            None => self.backend.pick(tried).await?,
                        }
                    }
                    Err(error) if dials.is_empty() => return Err(error),
                    Err(_) => continue,
                },
                () = sleep_until(hedge_at.unwrap_or_else(Instant::now)), if hedge_at.is_some() => {
                    match self.backend.pick_where(|other| is_untried(other, tried, &dials)) {
                        Some(other) => other,
                        None => {
                            hedge_at = None; // no other endpoint is available
                            continue;
                        }
                    }
                }
            };
            if let Some(ready) = self.reuse_connection(&next, needs).await? {
                return Ok((next, ready));
            }
            hedge_at = Some(start_dial(&mut dials, next, self.worker, needs))
                .filter(|_| dials.len() < MAX_ENDPOINTS_PER_REQUEST);
        }
    }

    /// Another endpoint with an open HTTP/2 connection. HTTP/1 connections cannot be shared, and busy ones are no
    /// reason to use another endpoint.
    async fn find_shared_connection(
        &self,
        tried: &TriedEndpoints,
        dials: &[PendingDial],
        needs: ConnectionRequirements,
    ) -> Option<(Arc<Endpoint>, ReadyConnection)> {
        let other = self.backend.pick_where(|other| {
            needs.protocol(other) == Protocol::Http2
                && other.client(self.worker).has_http2_connection()
                && is_untried(other, tried, dials)
        })?;
        let ready = self.reuse_connection(&other, needs).await.ok()??;
        Some((other, ready))
    }

    pub(super) fn can_try_another_endpoint(&self, n_tried: usize) -> bool {
        self.has_attempts_left(n_tried) && !matches!(self.backend, Backend::Forward(_))
    }

    pub(super) fn has_attempts_left(&self, n_tried: usize) -> bool {
        n_tried + 1 < self.n_tried_before + MAX_ENDPOINTS_PER_REQUEST
    }

    pub(super) fn count_resend(&self, cause: &str) {
        self.families.resends.get(&Labels::new().with("cause", cause)).inc();
    }
}

impl ConnectionRequirements {
    pub(super) fn of_request(req: &Request<Body>, upgrade: bool) -> Self {
        let version = req.version();
        // Without a host, a server may assume that all requests of the connection are for the same site.
        let has_no_host = req.uri().authority().is_none() && headers::get(req.headers(), &header::HOST).is_none();
        let is_http1 = version <= Version::HTTP_11;
        Self {
            version,
            must_stay_http1: (upgrade || has_no_host) && is_http1,
            reuse: match upgrade {
                true if !is_http1 || (!has_no_host && websocket::can_use_extended_connect(req)) => {
                    ConnectionUse::ExtendedConnect
                }
                false if version != Version::HTTP_10 && !has_no_host => ConnectionUse::Pooled,
                _ => ConnectionUse::NewConnection,
            },
        }
    }

    /// How the request may use a connection to this endpoint.
    pub(super) fn reuse(&self, endpoint: &Endpoint) -> ConnectionUse {
        match self.reuse {
            // Other endpoints do not convert an extended CONNECT back to an HTTP/1 upgrade.
            ConnectionUse::ExtendedConnect if self.must_stay_http1 && !endpoint.restores_http1() => {
                ConnectionUse::NewConnection
            }
            reuse => reuse,
        }
    }

    /// The HTTP version of the request on the connection to this endpoint.
    pub(super) fn protocol(&self, endpoint: &Endpoint) -> Protocol {
        endpoint.protocol(self.version, self.must_stay_http1)
    }
}

/// Whether the request has neither tried this endpoint nor is dialling it.
fn is_untried(other: &Arc<Endpoint>, tried: &TriedEndpoints, dials: &[PendingDial]) -> bool {
    let mut excluded = tried.iter().chain(dials.iter().map(|dial| &dial.endpoint));
    !excluded.any(|excluded| Arc::ptr_eq(excluded, other))
}

/// Dials an endpoint in a task that completes even if the request ends before. Returns the time at which another endpoint is
/// dialled.
fn start_dial(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_REQUEST]>,
    endpoint: Arc<Endpoint>,
    worker: usize,
    needs: ConnectionRequirements,
) -> Instant {
    let (done_tx, done) = oneshot::channel();
    let dialled = endpoint.clone();
    tokio::spawn(async move {
        let client = dialled.client(worker);
        let ready = client.dial(needs.protocol(&dialled), needs.reuse(&dialled)).await;
        match &ready {
            Ok(_) | Err(Error::StreamLimit { .. }) => dialled.breaker().record_connected(),
            Err(error) => {
                tracing::debug!(addr = %dialled.spec.addr, %error, "endpoint cannot be reached");
                dialled.breaker().record_dial_failure(error.cause(), Instant::now());
            }
        }
        if let Err(Ok(ready)) = done_tx.send(ready) {
            client.return_to_pool(ready); // for the next request
        }
    });
    let since = endpoint.client(worker).dial_started_at().unwrap_or_else(Instant::now);
    dials.push(PendingDial { endpoint, done });
    since + HEDGED_DIAL_DELAY
}

/// Waits for the first dial that completes, and removes it from `dials`, which must not be empty.
async fn first_completed(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_REQUEST]>,
) -> (Arc<Endpoint>, Result<ReadyConnection, Error>) {
    let poll = |cx: &mut Context<'_>| {
        for index in 0..dials.len() {
            if let Poll::Ready(result) = Pin::new(&mut dials[index].done).poll(cx) {
                let PendingDial { endpoint, .. } = dials.swap_remove(index);
                let (addr, cause) = (endpoint.spec.addr, "connect-refused");
                return Poll::Ready((endpoint, result.unwrap_or(Err(Error::DialFailed { addr, cause }))));
            }
        }
        Poll::Pending
    };
    poll_fn(poll).await
}

pub(super) const MAX_ENDPOINTS_PER_REQUEST: usize = 3;
/// Delay before another endpoint is dialled. Longer than a dial with mTLS takes within one data centre.
const HEDGED_DIAL_DELAY: Duration = Duration::from_millis(20);
