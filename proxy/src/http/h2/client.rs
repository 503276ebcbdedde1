//! HTTP/2 client for peers and applications.

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
    sync::{oneshot, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    http::{
        body::Body,
        error::Error,
        h2::{
            body::{BodyOrigin, StreamBody},
            config::Http2Config,
            flow_control::{FlowControlWindows, StreamToken, StreamWaiters, WeakStreamToken},
            keep_alive::{PeerChecks, PingTimeout, Pinger, until_ping_timeout},
            send_body::BodySender,
            upgraded_stream::{UpgradedStream, UpgradedStreamCounter, UpgradedStreamGuard},
            write_batch::{BatchedIo, WriteBatch, batch_writes},
        },
        headers,
        upgrade::interim::{self, SharedInterimSink},
        upgrade::websocket,
    },
    net::{
        io::Io,
        retirement::{Retirement, RetirementTimer},
    },
};

/// Sends one request on a connection, and reserves one of its streams.
pub(crate) struct StreamSender {
    send: SendRequest<Bytes>,
    token: StreamToken,
    /// Set if the peer's settings were not received yet.
    settings_wait: Option<Box<SettingsWait>>,
}

/// Waits for the stream limit in the peer's settings.
struct SettingsWait {
    settings_rx: watch::Receiver<bool>,
    limit: Arc<StreamLimit>,
}

/// Maximum concurrent streams that the peer permits.
struct StreamLimit {
    max_streams: AtomicUsize,
    /// Whether the peer's settings were received.
    settings_received: AtomicBool,
}

impl StreamLimit {
    fn max_streams(&self) -> usize {
        self.max_streams.load(Ordering::Relaxed)
    }
}

/// A connection for requests and for streams that carry other protocols.
pub(crate) struct SharedConnection {
    send: SendRequest<Bytes>,
    token: StreamToken,
    /// True when the peer's settings are received.
    settings_rx: watch::Receiver<bool>,
    limit: Arc<StreamLimit>,
    upgraded_streams: UpgradedStreamCounter,
    /// When the connection was opened, or when a request last used it because the connections before it had no free stream.
    last_needed_at: Instant,
    retirement: Option<RetirementTimer>,
}

/// A reserved stream for another protocol.
pub(crate) struct ExtendedConnectSender {
    send: SendRequest<Bytes>,
    token: StreamToken,
    guard: UpgradedStreamGuard,
}

/// Number of tokens that belong to no stream: [`FlowControlWindows`] has one, and [`SharedConnection`] has one.
const N_TOKENS_WITHOUT_STREAMS: usize = 2;

impl SharedConnection {
    /// Whether the connection accepts no further request.
    pub(crate) fn is_closed(&mut self) -> bool {
        is_closed(&mut self.send)
    }

    /// Whether the connection gets no further request. Its requests in progress continue.
    pub(crate) fn is_retired(&self) -> bool {
        self.retirement.as_ref().is_some_and(RetirementTimer::is_due)
    }

    /// Number of streams that are open or about to open.
    pub(crate) fn n_streams(&self) -> usize {
        self.token.n_tokens().saturating_sub(N_TOKENS_WITHOUT_STREAMS)
    }

    /// Whether the peer permits another stream.
    pub(crate) fn has_free_stream(&self) -> bool {
        self.n_streams() < self.limit.max_streams()
    }

    /// Whether the peer's stream limit is still unknown.
    pub(crate) fn awaits_settings(&self) -> bool {
        !self.limit.settings_received.load(Ordering::Relaxed)
    }

    /// Reserves a stream for one request.
    pub(crate) fn sender(&self) -> StreamSender {
        let settings_wait = self.awaits_settings().then(|| {
            Box::new(SettingsWait {
                settings_rx: self.settings_rx.clone(),
                limit: self.limit.clone(),
            })
        });
        StreamSender {
            send: self.send.clone(),
            token: self.token.clone(),
            settings_wait,
        }
    }

    /// Records that the connections before this one had no free stream.
    pub(crate) fn mark_needed(&mut self) {
        self.last_needed_at = Instant::now();
    }

    /// Whether the connection has no streams and was not needed for [`SURPLUS_CONNECTION_TIMEOUT`].
    pub(crate) fn is_surplus(&self) -> bool {
        self.n_streams() == 0 && self.last_needed_at.elapsed() > SURPLUS_CONNECTION_TIMEOUT
    }

    /// Starts to reserve a stream for another protocol.
    pub(crate) fn extended_connect_wait(&self) -> ExtendedConnectWait {
        ExtendedConnectWait {
            send: self.send.clone(),
            token: self.token.downgrade(),
            settings_rx: self.settings_rx.clone(),
            upgraded_streams: self.upgraded_streams.clone(),
        }
    }
}

/// Waits for the settings of a peer, without counting as a stream of the connection.
pub(crate) struct ExtendedConnectWait {
    send: SendRequest<Bytes>,
    token: WeakStreamToken,
    settings_rx: watch::Receiver<bool>,
    upgraded_streams: UpgradedStreamCounter,
}

impl ExtendedConnectWait {
    /// Reserves a stream for another protocol, if the connection is open and the peer's settings permit one more. Waits up to
    /// [`FREE_STREAM_TIMEOUT`] for the settings: a busy peer may need longer for them than for its TLS handshake.
    pub(crate) async fn sender(mut self) -> Option<ExtendedConnectSender> {
        let received = async { self.settings_rx.wait_for(|received| *received).await.is_ok() };
        let received = timeout(FREE_STREAM_TIMEOUT, received).await;
        if received != Ok(true) || !self.send.is_extended_connect_protocol_enabled() || is_closed(&mut self.send) {
            return None;
        }
        // These streams are open for a long time, so they may use only half of the streams that the peer permits.
        let max_streams = self.send.current_max_send_streams() / 2;
        Some(ExtendedConnectSender {
            guard: self.upgraded_streams.try_acquire(max_streams)?,
            send: self.send,
            token: self.token.upgrade()?,
        })
    }
}

/// Whether the connection accepts no further request.
fn is_closed(send: &mut SendRequest<Bytes>) -> bool {
    // Never pending, because this handle does not wait for a stream.
    let polled = send.poll_ready(&mut Context::from_waker(noop_waker_ref()));
    matches!(polled, Poll::Ready(Err(_)))
}

/// Stream limit of `h2` before the peer's settings arrive. Settings never result in this value (if they contain no limit, `h2`
/// uses `usize::MAX`), so the first change of the limit shows that they have arrived.
const UNKNOWN_MAX_STREAMS: usize = usize::MAX - 1;
/// Maximum time a request waits for a free stream when no further connection can be dialled. Also the maximum time an extended
/// CONNECT waits for the peer's settings.
pub(crate) const FREE_STREAM_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after which an additional connection that is not needed is closed.
const SURPLUS_CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens an HTTP/2 connection on `io`. A task drives it until all handles are dropped. It sends pings for the keep-alive, and
/// when `checks` requests one.
///
/// # Errors
/// The connection fails before our settings are written.
pub(crate) async fn connect(
    mut io: Io,
    params: &Http2Config,
    waiters: &Arc<StreamWaiters>,
    checks: Option<Arc<PeerChecks>>,
) -> Result<SharedConnection, Error> {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        .max_frame_size(params.max_frame_size.unwrap_or(Http2Config::LARGE_FRAME_SIZE))
        .max_header_list_size(params.max_header_list_bytes)
        .initial_max_send_streams(UNKNOWN_MAX_STREAMS)
        .enable_push(false);
    if let Some(streams) = params.max_reset_streams {
        builder.max_concurrent_reset_streams(streams);
    }
    if let Some(size) = params.max_send_buffer_bytes {
        builder.max_send_buffer_size(size);
    }
    let retirement = io.take_retirement();
    let (io, batch) = batch_writes(io);
    let (send, mut connection) = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let windows = FlowControlWindows::new(params, StreamToken::with_waiters(waiters.clone()));
    let token = windows.token();
    let (settings_tx, settings_rx) = watch::channel(false);
    let limit = Arc::new(StreamLimit {
        // Starts with the limit of the previous connection, to avoid refused streams. A limit of 0 may apply to that
        // connection only.
        max_streams: AtomicUsize::new(waiters.last_max_streams.load(Ordering::Relaxed).max(1)),
        settings_received: AtomicBool::new(false),
    });
    let limit_updater = StreamLimitUpdater {
        current: UNKNOWN_MAX_STREAMS,
        limit: limit.clone(),
        settings_tx,
        waiters: waiters.clone(),
    };
    let pinger = Pinger::new(connection.ping_pong(), params.keep_alive, checks);
    tokio::spawn(drive(connection, batch, windows, pinger, limit_updater));
    Ok(SharedConnection {
        send,
        token,
        settings_rx,
        limit,
        upgraded_streams: UpgradedStreamCounter::default(),
        last_needed_at: Instant::now(),
        retirement: retirement.map(|retirement| Retirement::start_timer(*retirement)),
    })
}

/// Stores the peer's stream limit and announces its changes.
struct StreamLimitUpdater {
    current: usize,
    limit: Arc<StreamLimit>,
    settings_tx: watch::Sender<bool>,
    waiters: Arc<StreamWaiters>,
}

impl StreamLimitUpdater {
    fn set(&mut self, max_streams: usize) {
        if std::mem::replace(&mut self.current, max_streams) != max_streams {
            self.limit.max_streams.store(max_streams, Ordering::Relaxed);
            self.waiters.last_max_streams.store(max_streams, Ordering::Relaxed);
            self.limit.settings_received.store(true, Ordering::Relaxed);
            self.settings_tx.send_replace(true);
            self.waiters.wake_all();
        }
    }
}

/// The connection has ended, so waiting requests look for another one.
impl Drop for StreamLimitUpdater {
    fn drop(&mut self) {
        self.waiters.wake_all();
    }
}

/// Drives the connection until it ends or the peer does not answer a ping.
async fn drive(
    mut connection: client::Connection<BatchedIo, Bytes>,
    batch: WriteBatch,
    mut windows: FlowControlWindows,
    pinger: Option<Pinger>,
    mut limit_updater: StreamLimitUpdater,
) {
    let drive_frames = poll_fn(|cx| {
        batch.poll_and_flush(cx, |cx| {
            windows.adapt(|sizes| {
                connection.set_initial_window_size(sizes.stream)?;
                connection.set_target_window_size(sizes.connection);
                Ok::<_, h2::Error>(())
            });
            let polled = Pin::new(&mut connection).poll(cx);
            limit_updater.set(connection.max_concurrent_send_streams());
            polled
        })
    });
    match until_ping_timeout(drive_frames, pinger, || false).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "HTTP/2 connection ended"),
        Err(PingTimeout) => tracing::debug!("HTTP/2 peer did not answer a ping in time"),
    }
}

/// Takes the request out of `req`, sends it on a connection with a free stream, and waits for the response head. Interim responses
/// go to `interims`.
///
/// Until the response head arrives, this future sends the request body. After that, a new task sends the rest.
///
/// # Errors
/// The peer permits no stream, the stream is refused or reset, the connection fails, or the request body fails.
pub(crate) async fn send(
    StreamSender {
        send,
        token,
        settings_wait,
    }: StreamSender,
    req: &mut Request<Body>,
    addr: SocketAddr,
    interims: Option<&SharedInterimSink>,
) -> Result<Response<Body>, Error> {
    let Some(settings_wait) = settings_wait else {
        return send_request(send, token, req, addr, interims).await;
    };
    // Boxed because it is rare and its timer is large.
    Box::pin(async {
        tokio::select! {
            sent = send_request(send, token, req, addr, interims) => sent,
            () = settings_wait.wait_free_stream_timeout() => Err(Error::NoFreeStream {
                addr,
                waited: FREE_STREAM_TIMEOUT,
                may_be_processed: true,
            }),
        }
    })
    .await
}

impl SettingsWait {
    /// Ready when the peer's settings permit no stream for [`FREE_STREAM_TIMEOUT`].
    async fn wait_free_stream_timeout(mut self) {
        if self.settings_rx.wait_for(|received| *received).await.is_err() {
            std::future::pending::<()>().await; // the connection has ended; `send_request` returns its error
        }
        loop {
            if self.limit.max_streams() > 0 {
                std::future::pending::<()>().await;
            }
            sleep(FREE_STREAM_TIMEOUT).await;
            if self.limit.max_streams() == 0 {
                return;
            }
        }
    }
}

async fn send_request(
    mut send: SendRequest<Bytes>,
    token: StreamToken,
    req: &mut Request<Body>,
    addr: SocketAddr,
    interims: Option<&SharedInterimSink>,
) -> Result<Response<Body>, Error> {
    let (parts, body) = std::mem::take(req).into_parts();
    let (no_body, method) = (body.is_end_stream(), parts.method.clone());
    let (mut response, stream) = send
        .send_request(Request::from_parts(parts, ()), no_body)
        .map_err(|error| stream_error(error, addr))?;
    let mut interims = InterimForwarder {
        n_received: 0,
        interims,
    };
    let mut cancel_upload = None;
    let head = if no_body {
        poll_fn(|cx| interims.poll_head(cx, &mut response)).await
    } else {
        let mut sending = Some(BodySender::new(body, stream));
        let head = poll_fn(|cx| {
            if let Poll::Ready(head) = interims.poll_head(cx, &mut response) {
                return Poll::Ready(Ok(head));
            }
            if let Some(body) = &mut sending {
                match body.poll_send(cx) {
                    Poll::Ready(Err(error)) if error.is_request_body_error() => return Poll::Ready(Err(error)),
                    // A peer that stops reading may still send a response with the reason.
                    Poll::Ready(_) => sending = None,
                    Poll::Pending => {}
                }
            }
            Poll::Pending
        })
        .await?;
        if let (Some(sending), Ok(response)) = (sending, &head) {
            let (cancel, cancelled) = oneshot::channel();
            // A response without a body can be dropped as soon as its head has arrived. This does not cancel the upload.
            if !headers::has_no_body(response.status(), &method) {
                cancel_upload = Some(cancel);
            }
            let token = token.clone();
            tokio::spawn(async move {
                send_rest_unless_cancelled(sending, cancelled).await;
                drop(token); // the stream was open until now
            });
        }
        head
    };
    let response = head.map_err(|error| stream_error(error, addr))?;
    Ok(with_stream_body(response, token).map(|body| Body::from(body.with_upload_cancellation(cancel_upload))))
}

/// Sends the rest of a request body. While data waits for the peer's window, the request body is not polled and cannot report a
/// cancellation. So a dropped response body cancels the upload.
async fn send_rest_unless_cancelled(sending: BodySender, cancelled: oneshot::Receiver<()>) {
    tokio::select! {
        biased;
        () = sending.send_rest() => {}
        // Dropping the sender resets the stream.
        Ok(()) = cancelled => {}
    }
}

/// Sends an extended CONNECT request (RFC 8441) and waits for the response head. The peer may answer with a response
/// that refuses the tunnel.
///
/// # Errors
/// The stream is refused or reset, or the connection fails.
pub(crate) async fn send_extended_connect(
    ExtendedConnectSender { mut send, token, guard }: ExtendedConnectSender,
    req: Request<Body>,
    addr: SocketAddr,
    interims: Option<&SharedInterimSink>,
) -> Result<Response<Body>, Error> {
    let sent = send.send_request(req.map(drop), false);
    let (mut response, mut stream) = sent.map_err(|error| stream_error(error, addr))?;
    let mut interims = InterimForwarder {
        n_received: 0,
        interims,
    };
    let head = poll_fn(|cx| interims.poll_head(cx, &mut response)).await;
    let response = head.map_err(|error| stream_error(error, addr))?;
    if websocket::is_tunnel_response(&response) {
        return Ok(
            response.map(|received| Body::upgraded(UpgradedStream::new(stream, received, token).with_guard(guard)))
        );
    }
    // The peer refuses the tunnel, so this side ends. An error means that the peer has closed the stream.
    let _ = stream.send_data(Bytes::new(), true);
    Ok(with_stream_body(response, token).map(Body::from))
}

fn with_stream_body(response: Response<RecvStream>, token: StreamToken) -> Response<StreamBody> {
    let content_length = headers::content_length(response.headers());
    response.map(|stream| StreamBody::new(stream, BodyOrigin::Server, content_length, token))
}

/// Forwards the interim responses to one request.
struct InterimForwarder<'a> {
    n_received: usize,
    interims: Option<&'a SharedInterimSink>,
}

impl InterimForwarder<'_> {
    /// Polls for the final response head.
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        response: &mut ResponseFuture,
    ) -> Poll<Result<Response<RecvStream>, h2::Error>> {
        while let Poll::Ready(Some(Ok(interim))) = response.poll_informational(cx) {
            self.n_received += 1;
            if self.n_received > interim::MAX_INTERIM_RESPONSES {
                return Poll::Ready(Err(Reason::ENHANCE_YOUR_CALM.into()));
            }
            if let Some(interims) = self.interims {
                interim::send(interims, interim);
            }
        }
        Pin::new(response).poll(cx)
    }
}

/// Distinguishes a lost connection from a reset stream.
pub(crate) fn stream_error(error: h2::Error, addr: SocketAddr) -> Error {
    if error.is_io() {
        Error::Http2ConnectionEnded { addr }
    } else {
        Error::H2(error)
    }
}
