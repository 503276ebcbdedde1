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
        error::{Error, Resendable},
        headers,
        upgrade::websocket,
    },
    outbound::{backend::Backend, endpoint::Endpoint, metrics::Families},
};

/// Endpoints that a request has been sent to, or could not reach.
pub(super) type TriedEndpoints = SmallVec<[Arc<Endpoint>; MAX_ENDPOINTS_PER_REQUEST]>;

struct PendingDial {
    endpoint: Arc<Endpoint>,
    result_rx: oneshot::Receiver<Result<ReadyConnection, Error>>,
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
    /// True if the request cannot be converted to an HTTP/2 request: it is an HTTP/1 upgrade, or has no host. A WebSocket upgrade
    /// may still use an HTTP/2 connection, as an extended CONNECT; `connection_use` says so.
    requires_http1: bool,
    connection_use: ConnectionUse,
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
            .existing_connection(needs.protocol(endpoint), needs.connection_use(endpoint))
            .await;
        if ready.is_some() {
            endpoint.breaker().record_connected();
        }
        Ok(ready)
    }

    /// Dials this endpoint and, if that is slow or fails, others; returns the first connection. If another endpoint has an open
    /// connection that can be shared, returns it immediately.
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
                (endpoint, result) = first_completed(&mut dials) => match result {
                    Ok(ready) => return Ok((endpoint, ready)),
                    Err(error) => match self.next_after_failed_dial(endpoint, error, tried, &dials).await? {
                        Some(other) => other,
                        None => continue,
                    },
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
            let next_hedge_at = start_dial(&mut dials, next, self.worker, needs);
            hedge_at = (dials.len() < MAX_ENDPOINTS_PER_REQUEST).then_some(next_hedge_at);
        }
    }

    /// Chooses the endpoint that is used after a failed dial; `None` while other dials are in progress.
    ///
    /// # Errors
    /// No dial is in progress, and no other endpoint may be tried or is available.
    async fn next_after_failed_dial(
        &self,
        failed: Arc<Endpoint>,
        error: Error,
        tried: &mut TriedEndpoints,
        dials: &[PendingDial],
    ) -> Result<Option<Arc<Endpoint>>, Error> {
        let may_try_another = error.resendable() == Resendable::Always && self.can_try_another_endpoint(tried.len());
        if may_try_another {
            tried.push(failed);
        }
        if !dials.is_empty() {
            if may_try_another {
                self.count_resend(error.cause());
            }
            return Ok(None);
        }
        if !may_try_another {
            return Err(error);
        }
        if matches!(error, Error::StreamLimit { .. }) {
            // This dial has waited for a free stream already. Another endpoint is used only if it is available now.
            let Some(other) = self.backend.pick_where(|other| is_untried(other, tried, dials)) else {
                return Err(error);
            };
            self.count_resend(error.cause());
            return Ok(Some(other));
        }
        self.count_resend(error.cause());
        self.backend.pick(tried).await.map(Some)
    }

    /// Another endpoint with an open HTTP/2 connection. HTTP/1 connections carry one request at a time: that all of an endpoint
    /// are in use is no reason to choose another endpoint.
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

    /// Whether the request may be given to another endpoint of the backend, after `n_tried` endpoints.
    pub(super) fn can_try_another_endpoint(&self, n_tried: usize) -> bool {
        self.may_send_again(n_tried) && !matches!(self.backend, Backend::Forward(_))
    }

    /// Whether the request may be sent once more in this attempt, possibly to the same endpoint.
    pub(super) fn may_send_again(&self, n_tried: usize) -> bool {
        n_tried + 1 < self.n_tried_before + MAX_ENDPOINTS_PER_REQUEST
    }

    pub(super) fn count_resend(&self, cause: &str) {
        self.families.resends.get(&Labels::new().with("cause", cause)).inc();
    }
}

impl ConnectionRequirements {
    pub(super) fn of_request(req: &Request<Body>, is_upgrade: bool) -> Self {
        let version = req.version();
        // Without a host, a server may assume that all requests of the connection are for the same site.
        let has_no_host = req.uri().authority().is_none() && headers::get(req.headers(), &header::HOST).is_none();
        let is_http1 = version <= Version::HTTP_11;
        Self {
            version,
            requires_http1: (is_upgrade || has_no_host) && is_http1,
            connection_use: match is_upgrade {
                true if !is_http1 || (!has_no_host && websocket::can_use_extended_connect(req)) => {
                    ConnectionUse::ExtendedConnect
                }
                false if version != Version::HTTP_10 && !has_no_host => ConnectionUse::Pooled,
                _ => ConnectionUse::NewConnection,
            },
        }
    }

    /// How the request may use a connection to this endpoint.
    pub(super) fn connection_use(&self, endpoint: &Endpoint) -> ConnectionUse {
        match self.connection_use {
            // Other endpoints do not convert an extended CONNECT back to an HTTP/1 upgrade.
            ConnectionUse::ExtendedConnect if self.requires_http1 && !endpoint.restores_http1() => {
                ConnectionUse::NewConnection
            }
            connection_use => connection_use,
        }
    }

    /// The HTTP version in which the request is sent to this endpoint, unless it becomes an extended CONNECT.
    pub(super) fn protocol(&self, endpoint: &Endpoint) -> Protocol {
        endpoint.protocol(self.version, self.requires_http1)
    }
}

/// Whether the request has neither tried this endpoint nor is dialling it.
fn is_untried(endpoint: &Arc<Endpoint>, tried: &TriedEndpoints, dials: &[PendingDial]) -> bool {
    let mut excluded = tried.iter().chain(dials.iter().map(|dial| &dial.endpoint));
    !excluded.any(|excluded| Arc::ptr_eq(excluded, endpoint))
}

/// Dials an endpoint in a task that completes even if the request ends before. Returns the time at which another endpoint is
/// dialled if this dial has not succeeded.
fn start_dial(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_REQUEST]>,
    endpoint: Arc<Endpoint>,
    worker: usize,
    needs: ConnectionRequirements,
) -> Instant {
    let (result_tx, result_rx) = oneshot::channel();
    let dialled = endpoint.clone();
    tokio::spawn(async move {
        let client = dialled.client(worker);
        let result = client
            .dial(needs.protocol(&dialled), needs.connection_use(&dialled))
            .await;
        match &result {
            Ok(_) | Err(Error::StreamLimit { .. }) => dialled.breaker().record_connected(),
            Err(error) => {
                tracing::debug!(addr = %dialled.spec.addr, %error, "endpoint cannot be reached");
                dialled.breaker().record_dial_failure(error.cause(), Instant::now());
            }
        }
        // If the request has ended, the connection is kept for the next one.
        if let Err(Ok(ready)) = result_tx.send(result) {
            client.return_to_pool(ready);
        }
    });
    // Another request may have started the dial of this endpoint earlier; then this dial waits for that one.
    let dial_started_at = endpoint.client(worker).dial_started_at().unwrap_or_else(Instant::now);
    dials.push(PendingDial { endpoint, result_rx });
    dial_started_at + HEDGED_DIAL_DELAY
}

/// Waits for the first dial that completes, and removes it from `dials`, which must not be empty.
async fn first_completed(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_REQUEST]>,
) -> (Arc<Endpoint>, Result<ReadyConnection, Error>) {
    let poll = |cx: &mut Context<'_>| {
        for index in 0..dials.len() {
            if let Poll::Ready(result) = Pin::new(&mut dials[index].result_rx).poll(cx) {
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
