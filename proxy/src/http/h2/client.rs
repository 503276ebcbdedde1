//! HTTP/2 towards a peer or an application.

use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::task::noop_waker_ref;
use h2::{
    Reason, RecvStream,
    client::{self, ResponseFuture, SendRequest},
};
use http::{Request, Response};
use http_body::Body as _;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    http::{
        body::Body,
        error::Error,
        h2::{
            From, KeepAlive, Params, Received,
            batch::{Batch, Batched, batched},
            send::Sending,
            stream::Stream,
            unanswered,
            windows::{Member, Waiters, Windows},
        },
        headers, interim, websocket,
    },
    net::io::Io,
};

/// Sends one request on a connection, on which it has a place.
pub(crate) struct Sender {
    send: SendRequest<Bytes>,
    member: Member,
    /// Of a connection whose peer has not told its settings.
    untold: Option<Box<Untold>>,
}

/// What is waited for while it is not known how many streams a peer permits.
struct Untold {
    told: watch::Receiver<bool>,
    limit: Arc<Limit>,
}

/// How many streams a peer permits at a time.
struct Limit {
    streams: AtomicUsize,
    /// Whether the peer has told its settings.
    is_told: AtomicBool,
}

impl Limit {
    fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }
}

/// A connection for requests, and for streams that carry other protocols.
#[derive(Clone)]
pub(crate) struct Shared {
    send: SendRequest<Bytes>,
    member: Member,
    /// Whether the peer's settings have come.
    told: watch::Receiver<bool>,
    limit: Arc<Limit>,
    /// Held by each stream that carries another protocol.
    streams: Arc<()>,
    /// When a request was last given a place.
    used_at: Instant,
}

/// Members that a connection has without a stream: its windows and its [`Shared`].
const OF_NO_STREAM: usize = 2;

impl Shared {
    /// Whether no request can be sent on it any more.
    pub(crate) fn is_over(&mut self) -> bool {
        // Ready at once, as this handle waits for no stream of its own.
        let polled = self.send.poll_ready(&mut Context::from_waker(noop_waker_ref()));
        matches!(polled, Poll::Ready(Err(_)))
    }

    /// Streams that are open, or about to be.
    pub(crate) fn n_streams(&self) -> usize {
        self.member.n_held().saturating_sub(OF_NO_STREAM)
    }

    /// Whether the peer permits another stream.
    pub(crate) fn has_room(&self) -> bool {
        self.n_streams() < self.limit.streams()
    }

    /// Whether the peer has not told yet how many streams it permits.
    pub(crate) fn is_untold(&self) -> bool {
        !self.limit.is_told.load(Ordering::Relaxed)
    }

    /// A place for one request.
    pub(crate) fn sender(&self) -> Sender {
        let untold = self.is_untold().then(|| {
            Box::new(Untold {
                told: self.told.clone(),
                limit: self.limit.clone(),
            })
        });
        Sender {
            send: self.send.clone(),
            member: self.member.clone(),
            untold,
        }
    }

    /// Notes that it is needed besides other connections.
    pub(crate) fn use_beside_others(&mut self) {
        self.used_at = Instant::now();
    }

    /// Whether it has not been needed for a while.
    pub(crate) fn is_spare(&self) -> bool {
        self.n_streams() == 0 && self.used_at.elapsed() > SPARE_TIMEOUT
    }

    /// Whether the peer accepts another stream for another protocol, by its settings. Waits for the settings for at most
    /// [`STREAM_TIMEOUT`]: a busy peer may need longer for them than for its TLS handshake.
    pub(crate) async fn takes_stream(&mut self) -> bool {
        let told = async { self.told.wait_for(|told| *told).await.is_ok() };
        let told = timeout(STREAM_TIMEOUT, told).await;
        let send = &self.send;
        // They last, and must not keep requests from theirs.
        let has_room = Arc::strong_count(&self.streams) < send.current_max_send_streams() / 2;
        told == Ok(true) && has_room && send.is_extended_connect_protocol_enabled()
    }
}

/// What `h2` has for the streams that a peer permits until its settings come: more than any can say.
const UNTOLD: usize = usize::MAX - 1;
/// Maximum wait for a free stream where the endpoint may have no more connections, and for the settings that permit streams.
pub(crate) const STREAM_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a connection that is one too many is kept.
const SPARE_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens an HTTP/2 connection on `io`. A task drives it until every handle is gone.
///
/// # Errors
/// The connection broke before our settings were written.
pub(crate) async fn connect(io: Io, params: &Params, waiters: &Arc<Waiters>) -> Result<Shared, Error> {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        .max_frame_size(params.max_frame_size.unwrap_or(Params::FRAME_SIZE))
        .max_header_list_size(params.max_header_list)
        .initial_max_send_streams(UNTOLD)
        .enable_push(false);
    if let Some(streams) = params.max_resets {
        builder.max_concurrent_reset_streams(streams);
    }
    if let Some(size) = params.max_send_buffer {
        builder.max_send_buffer_size(size);
    }
    let (io, batch) = batched(io);
    let (send, connection) = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let windows = Windows::new(params, Member::awaited_by(waiters.clone()));
    let member = windows.member();
    let (tell, told) = watch::channel(false);
    let limit = Arc::new(Limit {
        // What another connection was told spares requests a refusal. None at all may have been for that connection alone.
        streams: AtomicUsize::new(waiters.permitted.load(Ordering::Relaxed).max(1)),
        is_told: AtomicBool::new(false),
    });
    let permitted = Permitted {
        known: UNTOLD,
        limit: limit.clone(),
        tell,
        waiters: waiters.clone(),
    };
    tokio::spawn(drive(connection, batch, windows, params.keep_alive, permitted));
    Ok(Shared {
        send,
        member,
        told,
        limit,
        streams: Arc::default(),
        used_at: Instant::now(),
    })
}

/// How many streams a peer permits, and who is told.
struct Permitted {
    known: usize,
    limit: Arc<Limit>,
    tell: watch::Sender<bool>,
    waiters: Arc<Waiters>,
}

impl Permitted {
    fn are(&mut self, now: usize) {
        if std::mem::replace(&mut self.known, now) != now {
            self.limit.streams.store(now, Ordering::Relaxed);
            self.waiters.permitted.store(now, Ordering::Relaxed);
            self.limit.is_told.store(true, Ordering::Relaxed);
            self.tell.send_replace(true);
            self.waiters.wake_all();
        }
    }
}

/// The connection has ended.
impl Drop for Permitted {
    fn drop(&mut self) {
        self.waiters.wake_all();
    }
}

/// Moves frames until the connection ends, or its peer stops answering pings.
async fn drive(
    mut connection: client::Connection<Batched, Bytes>,
    batch: Batch,
    mut windows: Windows,
    keep_alive: Option<KeepAlive>,
    mut permitted: Permitted,
) {
    let pings = connection.ping_pong();
    let moving = poll_fn(|cx| {
        batch.poll(cx, |cx| {
            windows.adapt(|sizes| {
                connection.set_initial_window_size(sizes.stream)?;
                connection.set_target_window_size(sizes.connection);
                Ok::<_, h2::Error>(())
            });
            let polled = Pin::new(&mut connection).poll(cx);
            permitted.are(connection.max_concurrent_send_streams());
            polled
        })
    });
    tokio::select! {
        ended = moving => if let Err(error) = ended {
            tracing::debug!(%error, "HTTP/2 connection ended");
        },
        () = unanswered(keep_alive, pings) => tracing::debug!("HTTP/2 peer did not answer a ping in time"),
    }
}

/// Sends one request, taken out of `req`, on a connection that has capacity for it, and waits for the response head.
///
/// The request body is sent from here until then; what still streams afterwards gets a task of its own.
///
/// # Errors
/// The stream was refused or reset, the connection broke, or the request body failed.
pub(crate) async fn send(
    Sender { send, member, untold }: Sender,
    req: &mut Request<Body>,
    addr: SocketAddr,
) -> Result<Response<Body>, Error> {
    let Some(untold) = untold else {
        return send_on(send, member, req, addr).await;
    };
    // Rare, and its timer is large.
    Box::pin(async {
        tokio::select! {
            sent = send_on(send, member, req, addr) => sent,
            () = untold.permits_none() => Err(Error::NoFreeStream { addr, limit: STREAM_TIMEOUT, sent: true }),
        }
    })
    .await
}

impl Untold {
    /// Ready when the peer has told that it permits no stream, and for how long one waits.
    async fn permits_none(mut self) {
        if self.told.wait_for(|told| *told).await.is_err() {
            std::future::pending::<()>().await; // the connection has ended, and says so
        }
        loop {
            if self.limit.streams() > 0 {
                std::future::pending::<()>().await;
            }
            sleep(STREAM_TIMEOUT).await;
            if self.limit.streams() == 0 {
                return;
            }
        }
    }
}

async fn send_on(
    mut send: SendRequest<Bytes>,
    member: Member,
    req: &mut Request<Body>,
    addr: SocketAddr,
) -> Result<Response<Body>, Error> {
    let (parts, body) = std::mem::take(req).into_parts();
    let no_body = body.is_end_stream();
    let (mut response, stream) = send
        .send_request(Request::from_parts(parts, ()), no_body)
        .map_err(|error| lost(error, addr))?;
    let mut n_interims = 0;
    let head = if no_body {
        poll_fn(|cx| poll_head(cx, &mut response, &mut n_interims)).await
    } else {
        let mut sending = Some(Sending::new(body, stream));
        let head = poll_fn(|cx| {
            if let Poll::Ready(head) = poll_head(cx, &mut response, &mut n_interims) {
                return Poll::Ready(Ok(head));
            }
            if let Some(body) = &mut sending {
                match body.poll_send(cx) {
                    Poll::Ready(Err(error)) if error.is_of_request_body() => return Poll::Ready(Err(error)),
                    // A peer that stops reading may still answer; the response says what happened.
                    Poll::Ready(_) => sending = None,
                    Poll::Pending => {}
                }
            }
            Poll::Pending
        })
        .await?;
        if let (Some(sending), true) = (sending, head.is_ok()) {
            let member = member.clone();
            tokio::spawn(async move {
                sending.rest().await;
                drop(member); // its stream is open until then
            });
        }
        head
    };
    let response = head.map_err(|error| lost(error, addr))?;
    Ok(received(response, member))
}

/// Asks for a stream that carries another protocol, and waits for the response head, which may be another answer.
///
/// # Errors
/// The stream was refused or reset, or the connection broke.
pub(crate) async fn extend(
    Shared {
        mut send,
        member,
        streams,
        ..
    }: Shared,
    req: Request<Body>,
    addr: SocketAddr,
) -> Result<Response<Body>, Error> {
    let asked = send.send_request(req.map(drop), false);
    let (mut response, mut stream) = asked.map_err(|error| lost(error, addr))?;
    let mut n_interims = 0;
    let head = poll_fn(|cx| poll_head(cx, &mut response, &mut n_interims)).await;
    let response = head.map_err(|error| lost(error, addr))?;
    if websocket::opens_stream(&response) {
        return Ok(response.map(|received| Body::stream(Stream::new(stream, received, member).counted(streams))));
    }
    // Who has answered may not want it any more.
    let _ = stream.send_data(Bytes::new(), true);
    Ok(received(response, member))
}

/// A response with its body.
fn received(response: Response<RecvStream>, member: Member) -> Response<Body> {
    let left = headers::content_length(response.headers());
    response.map(|stream| Body::from(Received::new(stream, From::Server, left, member)))
}

/// Waits for the final response; interim ones are passed on.
fn poll_head(
    cx: &mut Context<'_>,
    response: &mut ResponseFuture,
    n_interims: &mut usize,
) -> Poll<Result<Response<RecvStream>, h2::Error>> {
    while let Poll::Ready(Some(Ok(interim))) = response.poll_informational(cx) {
        *n_interims += 1;
        if *n_interims > interim::MOST {
            return Poll::Ready(Err(Reason::ENHANCE_YOUR_CALM.into()));
        }
        interim::pass(interim);
    }
    Pin::new(response).poll(cx)
}

/// Tells a connection that ended under us from a stream that was reset.
pub(crate) fn lost(error: h2::Error, addr: SocketAddr) -> Error {
    if error.is_io() {
        Error::ConnectionLost { addr }
    } else {
        Error::H2(error)
    }
}
