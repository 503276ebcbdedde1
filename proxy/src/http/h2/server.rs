//! HTTP/2 server: one task per connection, and one per request in flight.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, atomic::AtomicBool},
    task::{Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::future::{FusedFuture as _, FutureExt as _};
use h2::{
    Reason, RecvStream, SendStream,
    ext::Protocol,
    server::{self, SendResponse},
};
use http::{Method, Request, Response, Version};
use http_body::Body as _;
use parking_lot::Mutex;
use tokio::{
    io::AsyncReadExt as _,
    sync::{Notify, oneshot},
    time::{Instant, interval_at, sleep},
};
use tower::Service;
use tulle_core::drain;

use crate::{
    http::{
        body::Body,
        connection_closer::ConnectionCloser,
        error::Error,
        h2::{
            body::{BodyOrigin, ResponseProgress, StreamBody},
            config::Http2Config,
            flow_control::{FlowControlWindows, StreamToken},
            header_block,
            idle_tracker::{ConnectionActivity, IdleState, IdleTracker},
            keep_alive::{PingTimeout, Pinger, until_ping_timeout},
            send_body::{self, BodySender},
            upgraded_stream::UpgradedStream,
            write_batch::batch_writes,
        },
        headers, linger,
        server_config::{FIRST_REQUEST_DRAIN_TIMEOUT, ServerConfig},
        stack::error_response::ErrorFormat,
        stack::layers::RequestService,
        upgrade::interim::InterimSink,
        upgrade::reply_channels::ReplyChannels,
        upgrade::tunnel::{ClientTunnel, TunnelSide},
    },
    net::io::Io,
};

/// Serves a connection until it ends. Ends it gracefully when `drain` or `closer` signals, when it has had no request for the idle
/// timeout, or when its first request has not arrived within the header timeout.
///
/// An incomplete header block reserves the memory that `h2` may hold for it.
///
/// # Errors
/// The connection fails, the client violates HTTP/2, its preface, a header block or the answer to a ping does not arrive in
/// time, or too little memory is left for its header block.
pub(in crate::http) async fn serve<S>(
    io: Io,
    service: RequestService<S>,
    config: &ServerConfig,
    closer: ConnectionCloser,
    drain: &drain::Watch,
) -> Result<(), Error>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    let params = &config.http2;
    let tls_default = || io.is_encrypted().then_some(Http2Config::LARGE_FRAME_SIZE);
    let max_frame_size = params.max_frame_size.or_else(tls_default);
    let builder = connection_builder(params, max_frame_size);
    let mut close_signal = pin!(wait_for_close(&closer, drain).fuse());
    let Some(io) = wait_for_preface(io, &service, close_signal.as_mut()).await? else {
        return Ok(());
    };
    let (io, batch) = batch_writes(io);
    let max_block_bytes = header_block::max_bytes(params, max_frame_size).min(service.head_memory().max_reservation());
    let (io, mut header_block_limits) = header_block::track(io, max_block_bytes, config.limits.header_read_timeout);
    let mut connection = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let mut windows = FlowControlWindows::new(params, StreamToken::default());
    let task_pool = RequestTaskPool::new(service, windows.token(), config);
    // A client cannot answer a ping within a header block, because no other frames are permitted there.
    let block_state = header_block_limits.block_state().clone();
    let cannot_answer = {
        let block_state = block_state.clone();
        move || block_state.is_unfinished()
    };
    let pinger = Pinger::new(connection.ping_pong(), params.keep_alive, None);
    let mut goaway_sent = false;
    let mut idle_tracker = IdleTracker::new(config.limits.header_read_timeout, config.limits.idle_timeout);
    let mut check_timer = interval_at(
        Instant::now() + idle_tracker.check_interval,
        idle_tracker.check_interval,
    );
    let drive = poll_fn(|cx| {
        let polled = batch.poll_and_flush(cx, |cx| {
            windows.adapt(|sizes| {
                connection.set_initial_window_size(sizes.stream)?;
                connection.set_target_window_size(sizes.connection);
                Ok::<_, h2::Error>(())
            });
            loop {
                match ready!(connection.poll_accept(cx)) {
                    Some(Ok((req, respond))) => task_pool.dispatch(req, respond),
                    Some(Err(error)) => return Poll::Ready(Err(Error::H2(error))),
                    None => return Poll::Ready(Ok(())),
                }
            }
        });
        if polled.is_ready() {
            return polled;
        }
        if let Err(error) = header_block_limits.check(cx, task_pool.service.head_memory()) {
            task_pool.service.record_refused(&error);
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
            // Sends GOAWAY if the socket takes it.
            let _ = batch.poll_and_flush(cx, |cx| connection.poll_closed(cx));
            return Poll::Ready(Err(error));
        }
        let mut is_idle_timeout = false;
        while check_timer.poll_tick(cx).is_ready() {
            task_pool.end_unneeded_tasks();
            if block_state.is_unfinished() {
                continue; // the header block has its own timeout
            }
            match idle_tracker.update(task_pool.take_activity()) {
                IdleState::BelowLimit => {}
                IdleState::LimitExceeded if goaway_sent => return Poll::Ready(Ok(())),
                IdleState::LimitReached | IdleState::LimitExceeded => is_idle_timeout = true,
            }
        }
        let mut must_close = || close_signal.is_terminated() || close_signal.as_mut().poll(cx).is_ready();
        if !goaway_sent && (is_idle_timeout || must_close()) {
            goaway_sent = true;
            connection.graceful_shutdown();
            cx.waker().wake_by_ref(); // to write GOAWAY
        }
        Poll::Pending
    });
    until_ping_timeout(drive, pinger, cannot_answer)
        .await
        .unwrap_or_else(|PingTimeout| Err(Error::ClientClosed))
}

fn connection_builder(params: &Http2Config, max_frame_size: Option<u32>) -> server::Builder {
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        // Over this limit, `h2` refuses a request without a reason or closes the connection. So it is twice our own
        // limit.
        .max_header_list_size(params.max_header_list_bytes.saturating_mul(2))
        .enable_connect_protocol();
    if let Some(size) = max_frame_size {
        builder.max_frame_size(size);
    }
    if let Some(streams) = params.max_concurrent_streams {
        builder.max_concurrent_streams(streams);
    }
    if let Some(size) = params.max_send_buffer_bytes {
        builder.max_send_buffer_size(size);
    }
    if let Some(streams) = params.max_pending_reset_streams {
        builder.max_pending_accept_reset_streams(streams);
    }
    builder
}

/// Waits for the client preface, and prepends it to the connection again. `None` if the preface is not complete
/// [`FIRST_REQUEST_DRAIN_TIMEOUT`] after `close_signal`. The wait is needed because a request may be on its way, and a client whose
/// connection ends without GOAWAY does not know whether it may send the request again.
///
/// As in HTTP/1, other bytes, and a preface that is incomplete after [`PREFACE_TIMEOUT`], count as a refused request; silence does
/// not.
///
/// # Errors
/// The client sends other bytes, or not the whole preface in time, or the connection ends.
async fn wait_for_preface<S>(
    mut io: Io,
    service: &RequestService<S>,
    close_signal: impl Future<Output = ()>,
) -> Result<Option<Io>, Error> {
    let mut preface = BytesMut::with_capacity(PREFACE.len());
    let read = tokio::select! {
        biased;
        read = read_preface(&mut io, &mut preface) => read,
        () = close_signal.then(|()| sleep(FIRST_REQUEST_DRAIN_TIMEOUT)) => return Ok(None),
        () = sleep(PREFACE_TIMEOUT) => Err(Error::HeaderReadTimeout(PREFACE_TIMEOUT)),
    };
    let Err(error) = read else {
        return Ok(Some(io.prepend(preface.freeze())));
    };
    match &error {
        Error::InvalidRequest(_) => {
            service.record_refused(&error);
            // FIN, because h2spec does not accept a reset. If this fails, the connection has ended already.
            let _ = linger::close(&mut io).await;
        }
        Error::HeaderReadTimeout(_) if !preface.is_empty() => {
            service.record_refused(&error);
            io.reset_on_drop();
        }
        _ => {}
    }
    Err(error)
}

/// Reads the client preface into `preface`. More bytes may follow it there.
///
/// # Errors
/// The client sends other bytes, or the connection ends.
async fn read_preface(io: &mut Io, preface: &mut BytesMut) -> Result<(), Error> {
    while preface.len() < PREFACE.len() {
        let n = io.read_buf(preface).await.map_err(Error::ClientIo)?;
        if !PREFACE.starts_with(&preface[..preface.len().min(PREFACE.len())]) {
            return Err(Error::InvalidRequest(
                "the connection does not begin with the HTTP/2 preface",
            ));
        }
        if n == 0 {
            return Err(Error::ClientClosed);
        }
    }
    Ok(())
}

/// Maximum time to wait for the client preface.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Source: RFC 9113 §3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

async fn wait_for_close(closer: &ConnectionCloser, drain: &drain::Watch) {
    tokio::select! {
        () = closer.notified() => {}
        () = drain.signaled() => {}
    }
}

/// A request and the handle for its response.
struct PendingRequest {
    req: Request<Body>,
    /// Header list size of the request, in bytes.
    list_size: usize,
    respond: SendResponse<Bytes>,
    extended: Option<Box<ExtendedConnect>>,
}

/// An extended CONNECT stream (RFC 8441) that is not accepted yet.
struct ExtendedConnect {
    received: RecvStream,
    token: StreamToken,
    /// Sends the accepted stream to the tunnel.
    tunnel_tx: oneshot::Sender<TunnelSide>,
}

impl ExtendedConnect {
    /// Whether the tunnel still waits for the stream.
    fn is_awaited(&self) -> bool {
        !self.tunnel_tx.is_closed()
    }

    fn open_tunnel(self, send: SendStream<Bytes>) {
        let stream = UpgradedStream::new(send, self.received, self.token);
        let _ = self.tunnel_tx.send(TunnelSide::Stream(Box::new(stream))); // without receiver, the stream is dropped and reset
    }
}

/// Tasks that serve the requests of one connection.
///
/// A new task for each request would cost more than most of its work: several kilobytes are allocated, initialized and
/// freed. So a finished task waits for the next request, until it is not needed any more or the connection ends.
struct RequestTaskPool<S> {
    service: RequestService<S>,
    token: StreamToken,
    /// Maximum header list size of one request.
    max_header_list_bytes: usize,
    /// Maximum total header list size of the requests in flight.
    max_total_header_list_bytes: usize,
    /// Maximum time without bytes in either direction while a request body is read.
    idle_timeout: Duration,
    state: Arc<Mutex<TaskPoolState>>,
}

struct TaskPoolState {
    idle_tasks: Vec<Arc<RequestTask>>,
    /// Requests in progress.
    n_busy: usize,
    /// Total header list size of the requests in progress.
    header_list_bytes: usize,
    /// Whether a stream was open since the last check.
    was_busy: bool,
    /// Minimum number of idle tasks since the last check.
    min_idle: usize,
    /// Whether the connection has ended.
    closed: bool,
}

/// The state of a task that serves requests one at a time. Contains the next request.
struct RequestTask {
    request: Mutex<Option<PendingRequest>>,
    wake: Notify,
    interims: Arc<InterimQueue>,
    progress: Arc<ResponseProgress>,
}

/// Interim responses from upstream to the request of a task. They are not sent to the client yet.
#[derive(Default)]
struct InterimQueue(Mutex<Vec<Response<()>>>);

impl InterimSink for InterimQueue {
    fn receive_interim(&self, response: Response<()>) {
        self.0.lock().push(response);
    }
}

/// Number of tokens that belong to no stream: [`FlowControlWindows`] has one, and [`RequestTaskPool`] has one.
const N_TOKENS_WITHOUT_STREAMS: usize = 2;
/// Maximum number of idle tasks of one connection.
const MAX_IDLE_TASKS: usize = 64;

impl<S> RequestTaskPool<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    fn new(service: RequestService<S>, token: StreamToken, config: &ServerConfig) -> Self {
        let state = TaskPoolState {
            idle_tasks: Vec::new(),
            n_busy: 0,
            header_list_bytes: 0,
            was_busy: false,
            min_idle: 0,
            closed: false,
        };
        Self {
            service,
            token,
            max_header_list_bytes: config.http2.max_header_list_bytes as usize,
            max_total_header_list_bytes: config.http2.max_total_header_list_bytes,
            idle_timeout: config.limits.idle_timeout,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Passes a request to an idle task or a new one.
    fn dispatch(&self, req: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let list_size = headers::header_list_size(&req);
        let idle_task = {
            let mut state = self.state.lock();
            if list_size <= self.max_header_list_bytes
                && state.header_list_bytes + list_size > self.max_total_header_list_bytes
            {
                drop(state);
                self.service.record_refused(&Error::HeaderListsTooLarge {
                    limit: self.max_total_header_list_bytes,
                });
                return respond.send_reset(Reason::REFUSED_STREAM);
            }
            state.header_list_bytes += list_size;
            state.n_busy += 1;
            state.was_busy = true;
            let idle_task = state.idle_tasks.pop();
            state.min_idle = state.min_idle.min(state.idle_tasks.len());
            idle_task
        };
        let is_reused = idle_task.is_some();
        let task = idle_task.unwrap_or_else(|| Arc::new(RequestTask::new(self.idle_timeout)));
        let content_length = headers::content_length(req.headers());
        let is_extended = *req.method() == Method::CONNECT && req.extensions().get::<Protocol>().is_some();
        let token = || self.token.clone();
        let mut extended = None;
        let req = req.map(|stream| {
            let mut upgrade = None;
            let body = match stream.is_end_stream() {
                _ if is_extended => {
                    let (tunnel_tx, tunnel_rx) = oneshot::channel();
                    upgrade = Some(ClientTunnel::new(tunnel_rx));
                    extended = Some(Box::new(ExtendedConnect {
                        received: stream,
                        token: token(),
                        tunnel_tx,
                    }));
                    Body::empty()
                }
                true => Body::empty(),
                false => {
                    let origin = BodyOrigin::Client(task.progress.clone());
                    Body::from(StreamBody::new(stream, origin, content_length, token()))
                }
            };
            body.with_reply_channels(ReplyChannels {
                upgrade,
                interims: Some(task.interims.clone()),
            })
        });
        *task.request.lock() = Some(PendingRequest {
            req,
            list_size,
            respond,
            extended,
        });
        if is_reused {
            task.wake.notify_one();
        } else {
            let (service, state) = (self.service.clone(), self.state.clone());
            tokio::spawn(run_task(service, self.max_header_list_bytes, task, state));
        }
    }
}

impl RequestTask {
    fn new(idle_timeout: Duration) -> Self {
        Self {
            request: Mutex::default(),
            wake: Notify::new(),
            interims: Arc::default(),
            progress: Arc::new(ResponseProgress {
                sent_since_check: AtomicBool::new(false),
                idle_timeout,
            }),
        }
    }
}

impl<S> RequestTaskPool<S> {
    /// Ends idle tasks that were not needed since the last check.
    fn end_unneeded_tasks(&self) {
        let mut state = self.state.lock();
        let n_unneeded = state.min_idle.min(state.idle_tasks.len());
        for task in state.idle_tasks.drain(..n_unneeded) {
            task.wake.notify_one();
        }
        state.min_idle = state.idle_tasks.len();
    }

    /// Returns the activity since the last check.
    fn take_activity(&self) -> ConnectionActivity {
        let mut state = self.state.lock();
        // Streams of other protocols, and request bodies that are read after the response, also count.
        let is_busy = state.n_busy > 0 || self.token.n_tokens() > N_TOKENS_WITHOUT_STREAMS;
        match std::mem::replace(&mut state.was_busy, is_busy) {
            true => ConnectionActivity::Busy,
            false => ConnectionActivity::Idle,
        }
    }
}

impl<S> Drop for RequestTaskPool<S> {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        state.closed = true;
        for task in state.idle_tasks.drain(..) {
            task.wake.notify_one();
        }
    }
}

/// Serves requests one at a time, until the connection ends or enough tasks are idle.
async fn run_task<S>(
    mut service: RequestService<S>,
    max_header_list_bytes: usize,
    task: Arc<RequestTask>,
    state: Arc<Mutex<TaskPoolState>>,
) where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    loop {
        let pending = task.request.lock().take();
        let Some(pending) = pending else { return };
        let list_size = pending.list_size;
        match list_size > max_header_list_bytes {
            true => send_header_too_large(&service, max_header_list_bytes, pending),
            false => serve_request(&mut service, pending, &task).await,
        }
        {
            let mut state = state.lock();
            state.n_busy -= 1;
            state.header_list_bytes -= list_size;
            if state.closed || state.idle_tasks.len() >= MAX_IDLE_TASKS {
                return;
            }
            state.idle_tasks.push(task.clone());
        }
        task.wake.notified().await;
    }
}

/// Refuses a request whose header list is too large.
#[cold]
fn send_header_too_large<S>(service: &RequestService<S>, limit: usize, mut pending: PendingRequest) {
    let error = Error::HeaderTooLarge { limit };
    service.record_refused(&error);
    let (head, _) = service
        .error_response(&error, ErrorFormat::from_request(&pending.req))
        .into_parts();
    if let Err(error) = pending.respond.send_response(Response::from_parts(head, ()), true) {
        tracing::debug!(%error, "error response not sent");
    }
}

/// Serves one request, unless the client resets its stream.
async fn serve_request<S>(service: &mut RequestService<S>, pending: PendingRequest, task: &RequestTask)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    let PendingRequest {
        req,
        mut respond,
        extended,
        ..
    } = pending;
    // A request that is already reset is not served, so that clients with many resets do not take time from others.
    if poll_fn(|cx| Poll::Ready(respond.poll_reset(cx).is_ready())).await {
        return;
    }
    let result = {
        let mut response_future = pin!(service.call(req));
        poll_fn(|cx| {
            let polled = response_future.as_mut().poll(cx);
            for rsp in std::mem::take(&mut *task.interims.0.lock()) {
                if let Err(error) = respond.send_informational(rsp) {
                    tracing::debug!(%error, "interim response not sent");
                }
            }
            match polled {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending => respond.poll_reset(cx).map(|_| None),
            }
        })
        .await
    };
    let rsp = match result {
        None => return,
        Some(Ok(rsp)) => rsp,
        Some(Err(error)) => return respond.send_reset(send_body::reset_reason(&error, Reason::INTERNAL_ERROR)),
    };
    let (parts, body) = rsp.into_parts();
    let status = parts.status;
    let accepted_tunnel = extended.filter(|extended| parts.status.is_success() && extended.is_awaited());
    let ended = body.is_end_stream() && accepted_tunnel.is_none();
    let is_grpc = headers::is_grpc(Version::HTTP_2, &parts.headers);
    let grpc_error_detail = is_grpc.then(|| service.error_detail());
    let stream = match respond.send_response(Response::from_parts(parts, ()), ended) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "response not sent");
            return respond.send_reset(Reason::INTERNAL_ERROR);
        }
    };
    service.response_counter(status).inc();
    match accepted_tunnel {
        Some(extended) => extended.open_tunnel(stream),
        None if ended => {}
        None => {
            task.progress.record_sent();
            let sending = BodySender::new(body, stream).with_grpc_error_detail(grpc_error_detail);
            sending.with_progress(task.progress.clone()).send_rest().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt as _, stream::FuturesUnordered};
    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
    };
    use tulle_core::metrics::{Registry, samples::Samples};

    use super::*;
    use crate::{
        http::{
            h2::config::KeepAlive,
            server_config::HttpLimits,
            stack::error_response::ErrorDetail,
            stack::head_memory::HeadMemory,
            stack::layers::tests::{connection_info, service_stack},
            stack::layers::{self, ServiceStack},
        },
        net::{io::Tcp, memory::MemoryPressure},
    };

    const S: Duration = Duration::from_secs(1);

    /// A config in which `limit` is the timeout of heads and of idle connections.
    fn config(limit: Duration) -> ServerConfig {
        ServerConfig {
            limits: HttpLimits {
                max_header_bytes: 1000,
                header_read_timeout: limit,
                idle_timeout: limit,
            },
            http2: Http2Config::default(),
        }
    }

    /// Serves a connection whose first bytes are `received`, until the client has seen its end. Returns the result of the
    /// client's read, and the metrics at this time.
    async fn serve_until_end(received: &'static [u8]) -> (Result<usize, std::io::ErrorKind>, Samples) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = Tcp::with_prefix(listener.accept().await.unwrap().0, Bytes::from_static(received));
        let registry = Registry::new();
        let service = service_stack(&registry).build(
            |_| async { Ok::<_, Error>(Response::new(Body::empty())) },
            ErrorDetail::Omit,
            connection_info(),
            ConnectionCloser::default(),
        );
        let config = config(Duration::from_secs(3600));
        let serving = tokio::spawn(async move {
            let (_signal, drain) = drain::channel();
            serve(Io::tcp(stream), service, &config, ConnectionCloser::default(), &drain).await
        });
        let ended = client.read(&mut [0]).await.map_err(|error| error.kind());
        let counted = Samples::parse(&registry.render());
        client.shutdown().await.ok();
        drop(client);
        serving.await.unwrap().unwrap_err();
        (ended, counted)
    }

    #[tokio::test(start_paused = true)]
    async fn an_invalid_or_late_preface_is_counted_before_the_client_sees_the_end_and_silence_is_not() {
        use std::io::ErrorKind::ConnectionReset;
        for (received, expected_end, cause, n) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], Ok(0), "bad-request", 1.),
            (b"PRI * HTTP/2.0\r\n", Err(ConnectionReset), "head-timeout", 1.),
            (b"", Ok(0), "head-timeout", 0.),
        ] {
            let (ended, counted) = serve_until_end(received).await;
            assert_eq!(ended, expected_end, "{received:?}");
            let n_failures = |labels: &[(&str, &str)]| counted.sum("tulle_failures_total", labels);
            assert_eq!(
                (n_failures(&[("cause", cause)]), n_failures(&[])),
                (n, n),
                "{received:?}"
            );
        }
    }

    /// Connects to a server with these layers and this timeout of header blocks. Idle connections have a timeout of an hour.
    async fn connect(stack: &ServiceStack, client: u8, header_read_timeout: Duration) -> TcpStream {
        let (connected, io, service) = layers::tests::connect(stack, client).await;
        let mut config = config(Duration::from_secs(3600));
        config.limits.header_read_timeout = header_read_timeout;
        // Shorter than the timeout of header blocks, as with the values of the chart.
        config.http2.keep_alive = Some(KeepAlive {
            interval: header_read_timeout / 10,
            timeout: header_read_timeout / 10,
        });
        tokio::spawn(async move {
            let (_signal, drain) = drain::channel();
            drop(serve(io, service, &config, ConnectionCloser::default(), &drain).await);
        });
        connected
    }

    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

    /// The start of the header block of a `GET`, without END_HEADERS.
    fn block_start(stream: u8) -> [u8; 10] {
        [0, 0, 1, 1, 1, 0, 0, 0, stream, 0x82]
    }

    /// The rest of the header block, for `http://x/`, with END_HEADERS.
    fn block_end(stream: u8) -> [u8; 14] {
        [0, 0, 5, 9, 4, 0, 0, 0, stream, 0x86, 0x84, 0x41, 1, b'x']
    }

    async fn wait_for_response(client: &mut TcpStream, stream: u8) {
        let mut received = Vec::new();
        // The kind and the stream of HEADERS.
        while !received
            .windows(6)
            .any(|bytes| bytes[0] == 1 && bytes[2..] == [0, 0, 0, stream])
        {
            assert_ne!(client.read_buf(&mut received).await.unwrap(), 0, "{received:?}");
        }
    }

    #[tokio::test]
    async fn a_new_connection_gets_the_response_to_its_first_request_during_a_drain() {
        let registry = Registry::new();
        let stack = service_stack(&registry);
        let request = [PREFACE, SETTINGS, &block_start(1), &block_end(1)].concat();
        for arrives in ["before the server reads", "after the server has waited"] {
            let (mut client, io, service) = layers::tests::connect(&stack, 1).await;
            let (signal, drain) = drain::channel();
            signal.drain().await;
            let config = config(Duration::from_secs(3600));
            let mut serving = pin!(serve(io, service, &config, ConnectionCloser::default(), &drain));
            if arrives == "after the server has waited" {
                assert!(serving.as_mut().now_or_never().is_none(), "{arrives}");
            }
            client.write_all(&request).await.unwrap();
            let (served, ()) = tokio::join!(serving, async {
                wait_for_response(&mut client, 1).await;
                client.shutdown().await.unwrap();
            });
            drop(served); // the client has closed the connection
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_any_byte_delays_a_drain_for_one_second_at_most() {
        let (_client, io, service) = layers::tests::connect(&service_stack(&Registry::new()), 1).await;
        let (signal, drain) = drain::channel();
        signal.drain().await;
        let config = config(Duration::from_secs(3600));
        let started = Instant::now();
        serve(io, service, &config, ConnectionCloser::default(), &drain)
            .await
            .unwrap();
        assert_eq!(started.elapsed().as_secs(), FIRST_REQUEST_DRAIN_TIMEOUT.as_secs());
    }

    #[tokio::test]
    async fn header_blocks_that_do_not_end_take_limited_memory_and_other_clients_are_answered() {
        let registry = Registry::new();
        let stack = ServiceStack {
            // 4 MiB: four header blocks of the default limit.
            head_memory: HeadMemory::new(Some(32 << 20), MemoryPressure::default()),
            ..service_stack(&registry)
        };
        let unfinished_request = [PREFACE, SETTINGS, &block_start(1)].concat();
        let mut unfinished = FuturesUnordered::new();
        for _ in 0..6 {
            let mut client = connect(&stack, 1, 3600 * S).await;
            client.write_all(&unfinished_request).await.unwrap();
            // Until the server closes or resets the connection.
            unfinished.push(async move { drop(client.read_to_end(&mut Vec::new()).await) });
        }
        for _ in 0..6 - 4 {
            unfinished.next().await;
        }

        let mut other = connect(&stack, 2, 3600 * S).await;
        other.write_all(&unfinished_request).await.unwrap();
        unfinished.next().await; // the other client gets the memory of this block
        other.write_all(&block_end(1)).await.unwrap();
        wait_for_response(&mut other, 1).await;

        let counted = Samples::parse(&registry.render());
        assert_eq!(counted.sum("tulle_failures_total", &[("cause", "overload")]), 3.);
    }

    #[tokio::test]
    async fn a_header_block_that_does_not_end_in_time_is_refused_also_after_other_requests() {
        let registry = Registry::new();
        let mut client = connect(&service_stack(&registry), 1, S).await;
        let sent = [PREFACE, SETTINGS, &block_start(1), &block_end(1), &block_start(3)].concat();
        client.write_all(&sent).await.unwrap();
        drop(client.read_to_end(&mut Vec::new()).await); // closed or reset
        let counted = Samples::parse(&registry.render());
        assert_eq!(counted.sum("tulle_failures_total", &[("cause", "head-timeout")]), 1.);
    }
}
