//! An endpoint and a connection to it (O8, O9): an open one, or a new one. A dial goes on without the request that began
//! it where another endpoint is connected, or connects sooner: one that has just gone, or is only starting, holds nobody
//! up.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use smallvec::SmallVec;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

use crate::{
    balance::balancer::Candidate,
    http::{
        client::{Protocol, Ready},
        error::{Error, Retry},
    },
    outbound::{
        dispatch::{Dispatch, Needs},
        endpoint::Endpoint,
    },
};

/// Endpoints that a request has been sent to, or could not reach.
pub(super) type Tried = SmallVec<[Arc<Endpoint>; MAX_TRIES]>;

/// An endpoint that is being dialled.
struct Dial {
    endpoint: Arc<Endpoint>,
    done: oneshot::Receiver<Result<Ready, Error>>,
}

impl Dispatch<'_> {
    /// An endpoint and a connection to it; endpoints that cannot be reached are added to `tried`.
    ///
    /// # Errors
    /// No endpoint is available, or the last one that was tried cannot be reached.
    pub(super) async fn reach(&self, tried: &mut Tried, needs: Needs) -> Result<(Arc<Endpoint>, Ready), Error> {
        let endpoint = self.backend.pick(tried).await?;
        match self.open(&endpoint, needs).await? {
            Some(ready) => Ok((endpoint, ready)),
            // Rare, and its timer is large.
            None => Box::pin(self.dial(endpoint, tried, needs)).await,
        }
    }

    /// An open connection to the endpoint, if there is one.
    async fn open(&self, endpoint: &Arc<Endpoint>, needs: Needs) -> Result<Option<Ready>, Error> {
        if let Some(required) = self.required
            && endpoint.identity().is_none_or(|identity| identity.as_str() != required)
        {
            return Err(Error::RequireId {
                required: required.to_owned(),
                actual: endpoint.identity().cloned(),
            });
        }
        let client = endpoint.client(self.worker);
        let ready = client.open(needs.protocol(endpoint), needs.reuse(endpoint)).await;
        if ready.is_some() {
            endpoint.breaker().connected();
        }
        Ok(ready)
    }

    /// The first connection among those to this endpoint and, where it takes its time, to others; at once where another
    /// has one.
    async fn dial(
        &self,
        endpoint: Arc<Endpoint>,
        tried: &mut Tried,
        needs: Needs,
    ) -> Result<(Arc<Endpoint>, Ready), Error> {
        let mut dials: SmallVec<[Dial; MAX_TRIES]> = SmallVec::new();
        let mut patience = Some(start(&mut dials, endpoint, self.worker, needs));
        if let Some(connected) = self.connected(tried, &dials, needs).await {
            return Ok(connected);
        }
        loop {
            let next = tokio::select! {
                biased;
                // May be dropped at any time: who has ended is taken out as it is seen.
                (endpoint, dialled) = first(&mut dials) => match dialled {
                    Ok(ready) => return Ok((endpoint, ready)),
                    Err(error) if error.retry() == Retry::NeverSent && self.may_try_another(tried.len()) => {
                        tried.push(endpoint);
                        // An endpoint that is there, and has no free stream, has been waited for.
                        let is_full = matches!(error, Error::NoFreeStream { .. });
                        let other = self.backend.pick_where(|other| is_full && is_other(other, tried, &dials));
                        if is_full && dials.is_empty() && other.is_none() {
                            return Err(error);
                        }
                        self.count_resent(error.cause());
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
                () = sleep_until(patience.unwrap_or_else(Instant::now)), if patience.is_some() => {
                    match self.backend.pick_where(|other| is_other(other, tried, &dials)) {
                        Some(other) => other,
                        None => {
                            patience = None; // nobody else is there
                            continue;
                        }
                    }
                }
            };
            if let Some(ready) = self.open(&next, needs).await? {
                return Ok((next, ready));
            }
            patience = Some(start(&mut dials, next, self.worker, needs)).filter(|_| dials.len() < MAX_TRIES);
        }
    }

    /// Another endpoint and its connection, where that is one that requests share: busy connections of HTTP/1 are no
    /// reason to go elsewhere.
    async fn connected(&self, tried: &Tried, dials: &[Dial], needs: Needs) -> Option<(Arc<Endpoint>, Ready)> {
        let other = self.backend.pick_where(|other| {
            needs.protocol(other) == Protocol::Http2
                && other.client(self.worker).is_shared()
                && is_other(other, tried, dials)
        })?;
        let ready = self.open(&other, needs).await.ok()??;
        Some((other, ready))
    }
}

/// Whether the request has not tried this endpoint, and is not dialling it.
fn is_other(other: &Arc<Endpoint>, tried: &Tried, dials: &[Dial]) -> bool {
    let mut passed = tried.iter().chain(dials.iter().map(|dial| &dial.endpoint));
    !passed.any(|passed| Arc::ptr_eq(passed, other))
}

/// Dials an endpoint, to the end even if nobody waits for it any more; returns until when to wait for nobody else.
fn start(dials: &mut SmallVec<[Dial; MAX_TRIES]>, endpoint: Arc<Endpoint>, worker: usize, needs: Needs) -> Instant {
    let (tell, done) = oneshot::channel();
    let dialled = endpoint.clone();
    tokio::spawn(async move {
        let client = dialled.client(worker);
        let ready = client.dial(needs.protocol(&dialled), needs.reuse(&dialled)).await;
        match &ready {
            Ok(_) | Err(Error::NoFreeStream { .. }) => dialled.breaker().connected(),
            Err(error) => {
                tracing::debug!(addr = %dialled.spec.addr, %error, "endpoint cannot be reached");
                dialled.breaker().connect_failed(error.cause(), Instant::now());
            }
        }
        if let Err(Ok(ready)) = tell.send(ready) {
            client.keep(ready); // for the next request
        }
    });
    let since = endpoint.client(worker).dialled_since().unwrap_or_else(Instant::now);
    dials.push(Dial { endpoint, done });
    since + PATIENCE
}

/// Waits for the first dial that ends, and takes it out; there must be one.
async fn first(dials: &mut SmallVec<[Dial; MAX_TRIES]>) -> (Arc<Endpoint>, Result<Ready, Error>) {
    let poll = |cx: &mut Context<'_>| {
        for index in 0..dials.len() {
            if let Poll::Ready(told) = Pin::new(&mut dials[index].done).poll(cx) {
                let Dial { endpoint, .. } = dials.swap_remove(index);
                let (addr, cause) = (endpoint.spec.addr, "connect-refused");
                return Poll::Ready((endpoint, told.unwrap_or(Err(Error::DialFailed { addr, cause }))));
            }
        }
        Poll::Pending
    };
    poll_fn(poll).await
}

/// Endpoints that one request is sent to at most.
pub(super) const MAX_TRIES: usize = 3;
/// Longer than a dial within a data centre takes, mutual TLS included.
const PATIENCE: Duration = Duration::from_millis(20);
