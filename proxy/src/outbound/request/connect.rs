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
    time::{Instant, sleep_until, timeout_at},
};
use tulle_core::metrics::Labels;

use crate::{
    balance::candidate::Candidate,
    http::{
        body::Body,
        client::{ConnectOutcome, ConnectionUse, HttpVersion},
        error::{Error, Resendable},
        headers,
        upgrade::websocket,
    },
    outbound::{
        backend::Backend,
        endpoint::{Endpoint, LocalEndpoints},
        metrics::Families,
    },
};

/// Endpoints that a request has been sent to or could not reach, once for each try.
pub(super) type TriedEndpoints = SmallVec<[Arc<Endpoint>; MAX_ENDPOINTS_PER_ATTEMPT]>;

struct PendingDial {
    endpoint: Arc<Endpoint>,
    result_rx: oneshot::Receiver<Result<ConnectOutcome, Error>>,
}

struct FailedDial {
    endpoint: Arc<Endpoint>,
    error: Error,
    /// Until when the request may dial further endpoints, see [`MAX_REDIAL_TIME`].
    redial_until: Instant,
}

/// Connects a request to an endpoint of its backend.
#[derive(Clone, Copy)]
pub(super) struct RequestConnector<'a> {
    pub(super) worker: usize,
    pub(super) backend: &'a Backend,
    /// Identity that the endpoint must have, from `l5d-require-id`.
    pub(super) required_identity: Option<&'a str>,
    pub(super) local_endpoints: LocalEndpoints,
    pub(super) families: &'a Families,
    /// Number of [`TriedEndpoints`] from earlier attempts of the request.
    pub(super) n_tried_by_earlier_attempts: usize,
}

/// The requirements of a request on its connection.
#[derive(Clone, Copy)]
pub(super) struct ConnectionRequirements {
    version: Version,
    /// True if the request cannot be converted to an HTTP/2 request: it is an HTTP/1 upgrade, or has no host. A WebSocket upgrade
    /// may still use an HTTP/2 connection: then `connection_use` is [`ConnectionUse::ExtendedConnect`].
    requires_http1: bool,
    connection_use: ConnectionUse,
}

impl RequestConnector<'_> {
    /// Returns an endpoint and a connection to it. Endpoints that cannot be reached are added to `tried`.
    ///
    /// # Errors
    /// No endpoint is available, the last one that was tried cannot be reached, or the request must not be sent to an endpoint that
    /// was picked.
    pub(super) async fn connect_endpoint(
        &self,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
    ) -> Result<(Arc<Endpoint>, ConnectOutcome), Error> {
        let endpoint = self.backend.pick(tried).await?;
        self.check_endpoint(&endpoint)?;
        match self.reuse_connection(&endpoint, needs).await {
            Some(outcome) => Ok((endpoint, outcome)),
            // Boxed because it is rare and its timer is large.
            None => Box::pin(self.dial_with_hedging(endpoint, tried, needs)).await,
        }
    }

    /// # Errors
    /// The endpoint does not have the required identity, or it is local and local endpoints are refused.
    fn check_endpoint(&self, endpoint: &Endpoint) -> Result<(), Error> {
        self.local_endpoints.check(endpoint)?;
        match self.required_identity {
            Some(required) if !has_identity(endpoint, required) => Err(Error::IdentityMismatch {
                required: required.to_owned(),
                actual: endpoint.identity().cloned(),
            }),
            _ => Ok(()),
        }
    }

    /// Whether an endpoint can replace those that the request has tried or is dialling. An endpoint that [`Self::check_endpoint`]
    /// refuses cannot, because the request must not be sent to it.
    fn is_alternative(&self, endpoint: &Arc<Endpoint>, tried: &TriedEndpoints, dials: &[PendingDial]) -> bool {
        let mut excluded = tried.iter().chain(dials.iter().map(|dial| &dial.endpoint));
        !excluded.any(|excluded| Arc::ptr_eq(excluded, endpoint))
            && self.local_endpoints.permits(endpoint)
            && self
                .required_identity
                .is_none_or(|required| has_identity(endpoint, required))
    }

    /// An open connection to the endpoint, if there is one.
    async fn reuse_connection(
        &self,
        endpoint: &Arc<Endpoint>,
        needs: ConnectionRequirements,
    ) -> Option<ConnectOutcome> {
        let client = endpoint.client(self.worker);
        let outcome = client
            .existing_connection(needs.request_protocol(endpoint), needs.connection_use(endpoint))
            .await;
        if outcome.is_some() {
            endpoint.breaker().record_connected();
        }
        outcome
    }

    /// Dials this endpoint and, if that is slow or fails, others; returns the first connection. If another endpoint has an open
    /// connection that can be shared, returns it immediately.
    async fn dial_with_hedging(
        &self,
        endpoint: Arc<Endpoint>,
        tried: &mut TriedEndpoints,
        needs: ConnectionRequirements,
    ) -> Result<(Arc<Endpoint>, ConnectOutcome), Error> {
        let mut dials: SmallVec<[PendingDial; MAX_ENDPOINTS_PER_ATTEMPT]> = SmallVec::new();
        let redial_until = Instant::now() + MAX_REDIAL_TIME;
        let first_hedge_at = start_dial(&mut dials, endpoint, self.worker, needs);
        let mut hedge_at = self.may_dial_another_endpoint(tried, &dials).then_some(first_hedge_at);
        if let Some(connected) = self.find_shared_connection(tried, &dials, needs).await {
            return Ok(connected);
        }
        loop {
            let next = tokio::select! {
                biased;
                // Cancel-safe: a completed dial is removed in the same poll that returns it.
                (endpoint, result) = first_completed(&mut dials) => match result {
                    Ok(outcome) => return Ok((endpoint, outcome)),
                    Err(error) => {
                        let failed = FailedDial { endpoint, error, redial_until };
                        match self.next_after_failed_dial(failed, tried, &dials).await? {
                            Some(other) => other,
                            None => continue,
                        }
                    }
                },
                () = sleep_until(hedge_at.unwrap_or_else(Instant::now)), if hedge_at.is_some() => {
                    match self.backend.pick_where(|other| self.is_alternative(other, tried, &dials)) {
                        Some(other) => other,
                        None => {
                            hedge_at = None; // no other endpoint is available
                            continue;
                        }
                    }
                }
            };
            if let Some(outcome) = self.reuse_connection(&next, needs).await {
                return Ok((next, outcome));
            }
            let next_hedge_at = start_dial(&mut dials, next, self.worker, needs);
            hedge_at = self.may_dial_another_endpoint(tried, &dials).then_some(next_hedge_at);
        }
    }

    /// Chooses the endpoint to use after a failed dial. Returns `None` if other dials are in progress; the request then waits for
    /// them.
    ///
    /// # Errors
    /// No dial is in progress, and no other endpoint may be tried, is available, or passes [`Self::check_endpoint`].
    async fn next_after_failed_dial(
        &self,
        failed: FailedDial,
        tried: &mut TriedEndpoints,
        dials: &[PendingDial],
    ) -> Result<Option<Arc<Endpoint>>, Error> {
        let FailedDial {
            endpoint,
            error,
            redial_until,
        } = failed;
        let may_try_another = self.may_send_to_another_endpoint(tried.len());
        tried.push(endpoint);
        let cause = error.cause();
        if !dials.is_empty() {
            self.count_resend(cause);
            return Ok(None);
        }
        if error.resendable() != Resendable::Always {
            return Err(error);
        }
        if !may_try_another {
            return self.redial_refused(error, tried, redial_until).await.map(Some);
        }
        if matches!(error, Error::NoFreeStream { .. }) {
            // The dial has already waited for a free stream, so the request does not also wait for another endpoint to become
            // available.
            let available = self
                .backend
                .pick_where(|other| self.is_alternative(other, tried, dials));
            let other = available.ok_or(error)?;
            self.count_resend(cause);
            return Ok(Some(other));
        }
        self.count_resend(cause);
        let other = self.backend.pick(tried).await?;
        self.check_endpoint(&other)?;
        Ok(Some(other))
    }

    /// Chooses another endpoint for a request that has already tried [`MAX_ENDPOINTS_PER_ATTEMPT`], if the last of them refused the
    /// connection. Another dial can succeed: an address in front of several pods refuses some of the connections while it still
    /// forwards to a pod that is gone.
    ///
    /// # Errors
    /// Returns `error` if the last endpoint did not refuse the connection, or no endpoint is available before `until`.
    async fn redial_refused(
        &self,
        error: Error,
        tried: &TriedEndpoints,
        until: Instant,
    ) -> Result<Arc<Endpoint>, Error> {
        let cause = error.cause();
        if cause != "connect-refused" || matches!(self.backend, Backend::Forward(_)) {
            return Err(error);
        }
        match timeout_at(until, self.backend.pick(tried)).await {
            Ok(Ok(other)) if Instant::now() < until => {
                self.count_resend(cause);
                self.check_endpoint(&other)?;
                Ok(other)
            }
            Ok(_) | Err(_) => Err(error),
        }
    }

    /// Finds another endpoint with an open HTTP/2 connection. HTTP/1 connections are not searched: each request in progress
    /// occupies one, so it is normal that an endpoint has no free connection.
    async fn find_shared_connection(
        &self,
        tried: &TriedEndpoints,
        dials: &[PendingDial],
        needs: ConnectionRequirements,
    ) -> Option<(Arc<Endpoint>, ConnectOutcome)> {
        if !self.may_dial_another_endpoint(tried, dials) {
            return None;
        }
        // A fallback endpoint is used only if the request already dials one. Otherwise a preferred endpoint can take the request,
        // although it has no connection yet.
        let may_use_fallback = dials.iter().any(|dial| dial.endpoint.spec.is_fallback.get());
        let other = self.backend.pick_where(|other| {
            (may_use_fallback || !other.spec.is_fallback.get())
                && needs.request_protocol(other) == HttpVersion::Http2
                && other.client(self.worker).has_http2_connection()
                && self.is_alternative(other, tried, dials)
        })?;
        let outcome = self.reuse_connection(&other, needs).await?;
        Some((other, outcome))
    }

    /// Whether this attempt may dial one more endpoint, besides those that it has tried and those that it is dialling.
    fn may_dial_another_endpoint(&self, tried: &TriedEndpoints, dials: &[PendingDial]) -> bool {
        tried.len() - self.n_tried_by_earlier_attempts + dials.len() < MAX_ENDPOINTS_PER_ATTEMPT
    }

    /// Whether the request may be sent to another endpoint of the backend, after the endpoint that has just failed.
    /// `n_tried_so_far` is that of [`Self::may_send_again`].
    pub(super) fn may_send_to_another_endpoint(&self, n_tried_so_far: usize) -> bool {
        self.may_send_again(n_tried_so_far) && !matches!(self.backend, Backend::Forward(_))
    }

    /// Whether the request may be sent once more in this attempt, to the endpoint that has just failed or another one.
    /// `n_tried_so_far` is the number of endpoints that were tried before this endpoint, over all attempts.
    pub(super) fn may_send_again(&self, n_tried_so_far: usize) -> bool {
        let n_in_this_attempt = n_tried_so_far + 1 - self.n_tried_by_earlier_attempts;
        n_in_this_attempt < MAX_ENDPOINTS_PER_ATTEMPT
    }

    /// Counts a resend, or a request that goes on with other endpoints after a failed dial.
    pub(super) fn count_resend(&self, cause: &str) {
        self.families.resends.get(&Labels::new().with("cause", cause)).inc();
    }
}

impl ConnectionRequirements {
    pub(super) fn from_request(req: &Request<Body>, is_upgrade: bool) -> Self {
        let version = req.version();
        // Without a host, a server may assume that all requests of the connection are for the same site.
        let has_no_host = req.uri().authority().is_none() && headers::get(req.headers(), &header::HOST).is_none();
        let is_http1 = version <= Version::HTTP_11;
        let can_use_extended_connect = || !is_http1 || (!has_no_host && websocket::can_use_extended_connect(req));
        let connection_use = if is_upgrade && can_use_extended_connect() {
            ConnectionUse::ExtendedConnect
        } else if is_upgrade || has_no_host || version == Version::HTTP_10 {
            ConnectionUse::Unpooled
        } else {
            ConnectionUse::Pooled
        };
        Self {
            version,
            requires_http1: (is_upgrade || has_no_host) && is_http1,
            connection_use,
        }
    }

    /// How the request may use a connection to this endpoint.
    pub(super) fn connection_use(&self, endpoint: &Endpoint) -> ConnectionUse {
        match self.connection_use {
            // Other endpoints do not convert an extended CONNECT back to an HTTP/1 upgrade.
            ConnectionUse::ExtendedConnect if self.requires_http1 && !endpoint.restores_http1() => {
                ConnectionUse::Unpooled
            }
            connection_use => connection_use,
        }
    }

    /// The HTTP version of the request that is passed to [`EndpointClient`](crate::http::client::EndpointClient). A WebSocket
    /// upgrade of HTTP/1 is still HTTP/1 here, even if that sends it as an extended CONNECT on an HTTP/2 connection.
    pub(super) fn request_protocol(&self, endpoint: &Endpoint) -> HttpVersion {
        endpoint.protocol(self.version, self.requires_http1)
    }
}

fn has_identity(endpoint: &Endpoint, required: &str) -> bool {
    endpoint
        .identity()
        .is_some_and(|identity| identity.as_str() == required)
}

/// Dials an endpoint in a task that completes even if the request ends before. Returns the time at which another endpoint is
/// dialled if this dial has not succeeded.
fn start_dial(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_ATTEMPT]>,
    endpoint: Arc<Endpoint>,
    worker: usize,
    needs: ConnectionRequirements,
) -> Instant {
    let (result_tx, result_rx) = oneshot::channel();
    let dialled = endpoint.clone();
    tokio::spawn(async move {
        let (protocol, connection_use) = (needs.request_protocol(&dialled), needs.connection_use(&dialled));
        let result = dialled.dial(worker, protocol, connection_use).await;
        // If the request has ended, the connection is kept for the next request.
        if let Err(Ok(outcome)) = result_tx.send(result) {
            dialled.client(worker).return_to_pool(outcome);
        }
    });
    // Another request may already dial this endpoint. Then this dial waits for the earlier one, whose start counts.
    let dial_started_at = endpoint.client(worker).dial_started_at().unwrap_or_else(Instant::now);
    dials.push(PendingDial { endpoint, result_rx });
    dial_started_at + HEDGED_DIAL_DELAY
}

/// Waits for the first dial that completes, and removes it from `dials`, which must not be empty.
async fn first_completed(
    dials: &mut SmallVec<[PendingDial; MAX_ENDPOINTS_PER_ATTEMPT]>,
) -> (Arc<Endpoint>, Result<ConnectOutcome, Error>) {
    let poll = |cx: &mut Context<'_>| {
        for index in 0..dials.len() {
            if let Poll::Ready(result) = Pin::new(&mut dials[index].result_rx).poll(cx) {
                let PendingDial { endpoint, .. } = dials.swap_remove(index);
                // Without a result, the task of the dial has panicked, or was cancelled because the process ends.
                let (addr, cause) = (endpoint.spec.addr, "connect-refused");
                return Poll::Ready((endpoint, result.unwrap_or(Err(Error::DialFailed { addr, cause }))));
            }
        }
        Poll::Pending
    };
    poll_fn(poll).await
}

/// Maximum number of endpoints that one attempt is sent to or dials, resends included.
pub(super) const MAX_ENDPOINTS_PER_ATTEMPT: usize = 3;
/// Time for which a request dials more than [`MAX_ENDPOINTS_PER_ATTEMPT`] endpoints, if they refuse the connection. Each endpoint is
/// dialled again only after its backoff.
const MAX_REDIAL_TIME: Duration = Duration::from_secs(1);
/// Delay before another endpoint is dialled. Within one data centre, a dial with mTLS takes less time.
const HEDGED_DIAL_DELAY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use tokio::{net::TcpSocket, time::sleep};

    use super::*;
    use crate::{
        balance::{
            breaker::{Breaker, BreakerGroup},
            load::Load,
        },
        outbound::endpoint::EndpointContext,
        policy::{
            client::LoadParams,
            endpoint::{EndpointSpec, EndpointTls},
        },
    };

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
    const OTHER: &str = "other.shop.serviceaccount.identity.linkerd.cluster.local";

    /// An endpoint with this identity; `None` for an endpoint that is not meshed.
    fn endpoint_with_identity(context: &EndpointContext, identity: Option<&str>) -> Arc<Endpoint> {
        let spec = EndpointSpec {
            tls: identity.map(|identity| EndpointTls {
                identity: identity.parse().unwrap(),
                server_name: identity.into(),
            }),
            ..EndpointSpec::plain(([192, 0, 2, 1], 80).into())
        };
        new_endpoint(context, spec)
    }

    fn new_endpoint(context: &EndpointContext, spec: EndpointSpec) -> Arc<Endpoint> {
        let (now, ms) = (Instant::now(), Duration::from_millis(1));
        let params = LoadParams::PeakEwma {
            default_rtt: ms,
            decay: ms,
        };
        let breaker = Breaker::new(None, BreakerGroup::default(), now);
        Arc::new(Endpoint::new(
            context,
            None,
            Arc::new(spec),
            Load::new(params, now),
            breaker,
        ))
    }

    #[tokio::test(start_paused = true)]
    async fn one_attempt_is_sent_to_or_dials_at_most_three_endpoints() {
        // The accept queue is full, so the kernel drops the packets of further connections.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(0).unwrap();
        let addr = listener.local_addr().unwrap();
        let _queued = std::net::TcpStream::connect(addr).unwrap();

        let mut context = EndpointContext::with_defaults();
        context.connector.connect.timeout = HEDGED_DIAL_DELAY * 3 / 2;
        let req = Request::get("http://web.test/").body(Body::empty()).unwrap();
        let needs = ConnectionRequirements::from_request(&req, false);
        // The number of endpoints that earlier attempts have tried, and the number of endpoints that this attempt was sent to.
        for (n_tried_by_earlier_attempts, n_sent) in [(0, 0), (4, 0), (0, 1), (0, 2), (4, 2)] {
            let endpoints: Vec<_> = (0..10)
                .map(|_| new_endpoint(&context, EndpointSpec::plain(addr)))
                .collect();
            let backend = Backend::with_endpoints(&endpoints);
            let connector = RequestConnector {
                worker: 0,
                backend: &backend,
                required_identity: None,
                local_endpoints: LocalEndpoints::Permit,
                families: &context.families,
                n_tried_by_earlier_attempts,
            };
            let mut tried: TriedEndpoints = endpoints[..n_tried_by_earlier_attempts + n_sent]
                .iter()
                .cloned()
                .collect();
            let connected = connector.connect_endpoint(&mut tried, needs).await;
            assert!(
                matches!(connected, Err(Error::ConnectTimeout(_))),
                "{n_tried_by_earlier_attempts} {n_sent}"
            );
            let is_dialled = |endpoint: &&Arc<Endpoint>| endpoint.breaker().dial_failure_cause().is_some();
            let n_dialled = endpoints.iter().filter(is_dialled).count();
            assert_eq!(
                n_sent + n_dialled,
                MAX_ENDPOINTS_PER_ATTEMPT,
                "{n_tried_by_earlier_attempts} {n_sent}"
            );
            assert_eq!(
                tried.len(),
                n_tried_by_earlier_attempts + MAX_ENDPOINTS_PER_ATTEMPT,
                "{n_tried_by_earlier_attempts} {n_sent}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn endpoints_that_refuse_connections_are_dialled_again_for_a_second() {
        let context = EndpointContext::with_defaults();
        let req = Request::get("http://web.test/").body(Body::empty()).unwrap();
        let needs = ConnectionRequirements::from_request(&req, false);
        for (listens_after, is_connected) in [(Duration::from_millis(600), true), (Duration::from_secs(2), false)] {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
            let addr = socket.local_addr().unwrap();
            let endpoints: Vec<_> = (0..2)
                .map(|_| new_endpoint(&context, EndpointSpec::plain(addr)))
                .collect();
            let connector = RequestConnector {
                worker: 0,
                backend: &Backend::with_endpoints(&endpoints),
                required_identity: None,
                local_endpoints: LocalEndpoints::Permit,
                families: &context.families,
                n_tried_by_earlier_attempts: 0,
            };
            let listening = tokio::spawn(async move {
                sleep(listens_after).await;
                socket.listen(8).unwrap()
            });
            let started = Instant::now();
            let mut tried = TriedEndpoints::new();
            let connected = connector.connect_endpoint(&mut tried, needs).await;
            assert!(tried.len() > MAX_ENDPOINTS_PER_ATTEMPT, "{}", tried.len());
            match connected {
                Ok(_) => assert!(is_connected),
                Err(error) => assert!(!is_connected && error.cause() == "connect-refused", "{error}"),
            }
            assert!(started.elapsed() <= MAX_REDIAL_TIME, "{:?}", started.elapsed());
            drop(listening.await.unwrap());
        }
    }

    #[tokio::test]
    async fn an_endpoint_without_the_required_identity_is_no_alternative_to_a_dial_in_progress() {
        let context = EndpointContext::with_defaults();
        let connector = |required_identity| RequestConnector {
            worker: 0,
            backend: &Backend::Fail,
            required_identity,
            local_endpoints: LocalEndpoints::Permit,
            families: &context.families,
            n_tried_by_earlier_attempts: 0,
        };
        let dialled = endpoint_with_identity(&context, Some(WEB));
        let (_result_tx, result_rx) = oneshot::channel();
        let dials = [PendingDial {
            endpoint: dialled.clone(),
            result_rx,
        }];
        let tried = TriedEndpoints::new();
        for (identity, is_alternative) in [(Some(WEB), true), (Some(OTHER), false), (None, false)] {
            let other = endpoint_with_identity(&context, identity);
            let connector_for_web = connector(Some(WEB));
            assert_eq!(
                connector_for_web.is_alternative(&other, &tried, &dials),
                is_alternative,
                "{identity:?}"
            );
            assert!(connector(None).is_alternative(&other, &tried, &dials), "{identity:?}");
        }
        assert!(!connector(None).is_alternative(&dialled, &tried, &dials));
    }
}
