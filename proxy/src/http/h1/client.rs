//! HTTP/1 client for applications and endpoints.
//!
//! The response body owns the connection: a complete body returns it to the pool, a dropped one closes it.

use std::{
    future::poll_fn,
    io,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use tokio::{
    io::{AsyncWriteExt as _, ReadHalf, WriteHalf},
    sync::oneshot,
};

use crate::{
    http::{
        body::{Body, ReceivedBody},
        error::Error,
        h1::{
            encode,
            framing::{self, DecodeStep, Framing},
            head::{self, HeadError, MAX_RESPONSE_HEAD_BYTES, ResponseHead},
            pool::{ConnectionPool, ResendPolicy},
            read_buffer,
        },
        headers,
        upgrade::interim::{self, SharedInterimSink},
        upgrade::tunnel::TunnelSide,
    },
    net::io::Io,
};

/// A connection that is ready for a request.
pub(crate) struct ClientConnection {
    /// Boxed, because it moves between its pool, requests and bodies.
    io: Box<Io>,
    reused: bool,
}

/// A request that got no response.
pub(crate) struct FailedExchange {
    pub(crate) error: Error,
    /// The request, if it may be resent.
    pub(crate) request: Option<ResendableRequest>,
}

/// A request that is ready to be written from its first byte.
struct EncodedRequest {
    message: encode::OutgoingMessage<Body>,
    method: Method,
    interims: Option<SharedInterimSink>,
}

/// A request that can be resent: it was written in one short write, or not at all.
pub(crate) struct ResendableRequest {
    /// The whole request, even if it was written.
    encoded: EncodedRequest,
    pub(crate) target: ResendTarget,
    /// The connection, if the server closed it with FIN. A reset may follow.
    closed_io: Option<Box<Io>>,
}

impl ResendableRequest {
    /// Whether the kernel discarded unread request data, or the application reset the connection.
    pub(crate) async fn was_discarded_or_reset(&mut self) -> bool {
        match &self.closed_io {
            Some(io) => was_discarded(io).await,
            None => true, // without a FIN, the connection was reset
        }
    }
}

/// Where a request may be resent. [`Exchange::into_failure`] has the conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResendTarget {
    /// A new connection to the same endpoint.
    SameEndpoint,
    /// Another endpoint, if the port of this endpoint is closed now, and the kernel discarded the request or the connection was
    /// reset. While the port is open, the request itself may be the reason why the application closed the connection.
    OtherEndpointIfPortClosed,
}

/// Why there is no response head.
pub(crate) enum ResponseHeadError {
    /// The server closed the connection.
    Eof,
    Reset,
    Error(Error),
}

impl From<Error> for ResponseHeadError {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl ClientConnection {
    pub(crate) fn new(io: Io) -> Self {
        Self {
            io: Box::new(io),
            reused: false,
        }
    }

    /// A connection that has carried requests before.
    pub(crate) fn reused(io: Box<Io>) -> Self {
        Self { io, reused: true }
    }

    /// Returns an unused connection to the pool.
    pub(crate) fn return_to_pool(self, pool: &Arc<ConnectionPool>) {
        pool.put(self.io);
    }

    /// Takes the request out of `req` and starts to send it. The connection returns to `pool` after the response body. Interim
    /// responses go to `interims`.
    pub(crate) fn send(
        self,
        req: &mut Request<Body>,
        addr: SocketAddr,
        pool: Option<Arc<ConnectionPool>>,
        interims: Option<SharedInterimSink>,
    ) -> Exchange {
        let method = req.method().clone();
        let message = encode::encode_request(std::mem::take(req));
        // Before anything is written, only an empty body counts as encoded.
        let has_no_body = message.is_body_encoded();
        let request = EncodedRequest {
            message,
            method,
            interims,
        };
        self.exchange(request, has_no_body, addr, pool)
    }

    /// Starts to send, on this connection, a request that got no response on its first one.
    pub(crate) fn resend(
        self,
        request: ResendableRequest,
        addr: SocketAddr,
        pool: Option<Arc<ConnectionPool>>,
    ) -> Exchange {
        self.exchange(request.encoded, false, addr, pool)
    }

    fn exchange(
        self,
        request: EncodedRequest,
        can_resend_after_idle_close: bool,
        addr: SocketAddr,
        pool: Option<Arc<ConnectionPool>>,
    ) -> Exchange {
        let EncodedRequest {
            message,
            method,
            interims,
        } = request;
        Exchange {
            connection: self,
            message,
            is_sending: true,
            can_resend_after_idle_close,
            method,
            interims,
            addr,
            pool,
            read_buffer: Bytes::new(),
            head_progress: HeadProgress::default(),
        }
    }
}

/// A request, until its response head is complete.
pub(crate) struct Exchange {
    connection: ClientConnection,
    message: encode::OutgoingMessage<Body>,
    is_sending: bool,
    /// Whether the request has no body and is sent for the first time, so that a resend is possible if the server has closed the
    /// idle connection.
    can_resend_after_idle_close: bool,
    method: Method,
    interims: Option<SharedInterimSink>,
    addr: SocketAddr,
    pool: Option<Arc<ConnectionPool>>,
    read_buffer: Bytes,
    head_progress: HeadProgress,
}

/// Progress in reading a response head.
#[derive(Default)]
struct HeadProgress {
    /// Bytes already searched for the end of the head.
    n_scanned: usize,
    /// Interim responses received before the head.
    n_interims: usize,
}

impl Exchange {
    /// The pool to which the connection returns.
    pub(crate) fn pool(&self) -> Option<Arc<ConnectionPool>> {
        self.pool.clone()
    }

    /// Sends the request and reads the response head. The request may still be incomplete then.
    ///
    /// # Errors
    /// The connection ends before a response head, the request body fails, or the response is not valid HTTP/1.
    pub(crate) async fn head(&mut self) -> Result<ResponseHead, ResponseHeadError> {
        let head = poll_fn(|cx| self.poll_head(cx)).await?;
        if self.is_sending && head::switches_protocol(head.response.status(), &self.method) {
            // Boxed because it is rare. The new protocol starts after the end of the request.
            Box::pin(poll_fn(|cx| self.message.poll_write(cx, &mut *self.connection.io))).await?;
            self.is_sending = false;
        }
        Ok(head)
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<ResponseHead, ResponseHeadError>> {
        let io = &mut *self.connection.io;
        if self.is_sending {
            match self.message.poll_write(cx, io) {
                Poll::Ready(Err(error)) if error.is_request_body_error() => return Poll::Ready(Err(error.into())),
                // The application may have sent a response before it stopped reading.
                Poll::Ready(_) => self.is_sending = false,
                Poll::Pending => {}
            }
        }
        loop {
            let head = ready!(poll_any_head(
                cx,
                io,
                &mut self.read_buffer,
                &mut self.head_progress,
                &self.method
            ))?;
            let status = head.response.status();
            if !status.is_informational() || status == StatusCode::SWITCHING_PROTOCOLS {
                return Poll::Ready(Ok(head));
            }
            self.head_progress.n_scanned = 0;
            self.head_progress.n_interims += 1;
            if self.head_progress.n_interims > interim::MAX_INTERIM_RESPONSES {
                return Poll::Ready(Err(Error::InvalidResponse("too many interim responses").into()));
            }
            if let Some(interims) = &self.interims {
                interim::send(interims, head.response);
            }
        }
    }

    /// Converts a missing response head to an error, and decides whether the request may be resent. `policy` says which requests
    /// may be resent although the server may have processed them. The first case of the table that applies decides:
    ///
    /// | Case | May be resent |
    /// |---|---|
    /// | 1. The connection was idle before, the request has no body, and `policy` permits it | to the same endpoint |
    /// | 2. A local application has not read the request | to the same endpoint |
    /// | 3. A local application may have read it, and `policy` permits it | [`ResendTarget::OtherEndpointIfPortClosed`] |
    /// | 4. The endpoint is remote, and nothing of the request was written | to another endpoint |
    /// | 5. The connection was idle before, and `policy` permits it | to another endpoint |
    /// | 6. Any other | no |
    ///
    /// In the cases 1 to 3, the request is returned with the error. They apply only to a request that was written in one short
    /// write or not at all, because no other request is kept.
    ///
    /// In the cases 4 and 5, only [`Error::resendable`] tells that the request may be resent: the caller of
    /// `EndpointClient::send` has a copy of the request and sends that to another endpoint. In case 3, the caller does the same if
    /// the connection was idle before, whether or not the port is closed.
    ///
    /// Only the kernel of this host knows whether a local application has read the request: it answers data that cannot be
    /// read any more with a reset. A reset alone is no proof, because an application can also cause one after it has read
    /// everything (`SO_LINGER` of 0).
    pub(crate) async fn into_failure(self, head_error: ResponseHeadError, policy: ResendPolicy) -> FailedExchange {
        if let ResponseHeadError::Error(error) = head_error {
            return FailedExchange { error, request: None };
        }
        let (addr, ClientConnection { io, reused }) = (self.addr, self.connection);
        let (is_local, is_permitted) = (io.is_local(addr.ip()), policy.allows(&self.method));
        // A server may close an idle connection at any time.
        let may_be_idle_close = is_permitted && reused && self.can_resend_after_idle_close && self.pool.is_some();
        let got_fin = matches!(head_error, ResponseHeadError::Eof);
        let was_written = self.message.has_begun();
        let message = self.message.into_resendable(Body::empty());
        let delivery = if !was_written {
            Delivery::NotWritten
        } else if self.head_progress.n_interims > 0 {
            Delivery::Read
        } else if got_fin
            && is_local
            && !may_be_idle_close // such a request is resent in any case
            && let Some(message) = &message
            && arrived_after_close(&io, message.n_unsent()).await
        {
            Delivery::DiscardedUnread
        } else {
            Delivery::MaybeRead
        };
        let target = match delivery {
            _ if may_be_idle_close => Some(ResendTarget::SameEndpoint),
            Delivery::NotWritten | Delivery::DiscardedUnread if is_local => Some(ResendTarget::SameEndpoint),
            Delivery::MaybeRead if is_local && is_permitted => Some(ResendTarget::OtherEndpointIfPortClosed),
            _ => None,
        };
        FailedExchange {
            error: Error::ConnectionClosed {
                addr,
                reused,
                may_be_processed: !matches!(delivery, Delivery::NotWritten | Delivery::DiscardedUnread),
            },
            request: target.zip(message).map(|(target, message)| ResendableRequest {
                encoded: EncodedRequest {
                    message,
                    method: self.method,
                    interims: self.interims,
                },
                target,
                closed_io: got_fin.then_some(io),
            }),
        }
    }

    /// Returns the response; its body reads from the connection.
    pub(crate) fn into_response(self, head: ResponseHead) -> Response<Body> {
        let ResponseHead {
            response,
            framing,
            keep_alive,
        } = head;
        let pool = self
            .pool
            .filter(|_| keep_alive && (self.is_sending || self.message.is_done()));
        if let Some(pool) = &pool {
            pool.set_server_keep_alive(headers::keep_alive_timeout(response.headers()));
        }
        let (io, read_buffer) = (self.connection.io, self.read_buffer);
        if head::switches_protocol(response.status(), &self.method) {
            let upgraded = ResponseBody {
                source: Some(ResponseIo::Upgraded(Some(io.prepend(read_buffer)))),
                read_buffer: Bytes::new(),
                framing,
                pool,
            };
            return response.map(|()| Body::received(Box::new(upgraded)));
        }
        let source = if self.is_sending {
            send_rest(*io, self.message)
        } else {
            ResponseIo::Whole(io)
        };
        // The usual case of a small response: the body arrived with the head.
        let has_whole_body = !read_buffer.is_empty() && framing == Framing::Length(read_buffer.len() as u64);
        let mut received = ResponseBody {
            source: Some(source),
            read_buffer,
            framing,
            pool,
        };
        if has_whole_body {
            let data = std::mem::take(&mut received.read_buffer);
            received.finish();
            return response.map(|()| Body::full(data));
        }
        if framing.is_end() {
            received.finish();
            return response.map(|()| Body::empty());
        }
        response.map(|()| Body::received(Box::new(received)))
    }
}

/// Whether the server has read a request that got no response, as far as known.
#[derive(Clone, Copy)]
enum Delivery {
    /// No byte of the request was written.
    NotWritten,
    /// The request arrived after the application had closed the connection, so the kernel discarded it.
    DiscardedUnread,
    MaybeRead,
    /// The application has sent an interim response.
    Read,
}

/// Sends the rest of a request in a new task, while the response body is read.
fn send_rest(io: Io, mut message: encode::OutgoingMessage<Body>) -> ResponseIo {
    let (read, mut write) = tokio::io::split(io);
    let (mut write_half_tx, write_half_rx) = oneshot::channel();
    tokio::spawn(async move {
        let written = tokio::select! {
            written = poll_fn(|cx| message.poll_write(cx, &mut write)) => written,
            () = wait_grace_after_response(&mut write_half_tx) => Err(Error::AttemptCancelled),
        };
        match written {
            // If the response has already ended, this closes the connection.
            Ok(()) => drop(write_half_tx.send(write)),
            Err(error) => {
                tracing::debug!(%error, "request body ended early");
                // Tells the server that no more data follows. This fails if the server has closed the connection.
                let _ = write.shutdown().await;
            }
        }
    });
    ResponseIo::ReadHalf { read, write_half_rx }
}

/// Maximum time that the request body is still sent after its response has ended.
const REQUEST_BODY_GRACE: Duration = Duration::from_secs(1);

/// Waits until the response body, which holds the receiver of the write half, is dropped, and then for [`REQUEST_BODY_GRACE`].
async fn wait_grace_after_response<T>(write_half_tx: &mut oneshot::Sender<T>) {
    write_half_tx.closed().await;
    tokio::time::sleep(REQUEST_BODY_GRACE).await;
}

/// Maximum time to wait, after the application's FIN, until it closes the connection and the kernel discards unread
/// data. A throttled container may need 100 ms until it runs again.
const RESET_WAIT_TIMEOUT: Duration = Duration::from_millis(250);

/// Whether the `len` bytes of a request arrived after the application's FIN and were discarded. A FIN acknowledges all
/// bytes that arrived before it, so these bytes are still unacknowledged.
async fn arrived_after_close(io: &Io, len: usize) -> bool {
    io.unacknowledged_bytes() == Some(len) && was_discarded(io).await
}

/// Whether the kernel reports that bytes written after the peer's FIN were discarded.
async fn was_discarded(io: &Io) -> bool {
    let _ = tokio::time::timeout(RESET_WAIT_TIMEOUT, io.wait_for_error()).await;
    io.take_broken_pipe_error()
}

/// Reads until the head of an interim or of the final response is complete.
fn poll_any_head(
    cx: &mut Context<'_>,
    io: &mut Io,
    read_buffer: &mut Bytes,
    progress: &mut HeadProgress,
    method: &Method,
) -> Poll<Result<ResponseHead, ResponseHeadError>> {
    loop {
        if !read_buffer.is_empty()
            && (progress.n_scanned == 0 || framing::has_new_empty_line(read_buffer, progress.n_scanned))
            && let Some(head) = head::parse_response_head(read_buffer, method).map_err(invalid_head_error)?
        {
            return Poll::Ready(Ok(head));
        }
        if read_buffer.len() > MAX_RESPONSE_HEAD_BYTES {
            return Poll::Ready(Err(invalid_head_error(HeadError::TooLarge).into()));
        }
        progress.n_scanned = read_buffer.len();
        match ready!(read_buffer::poll_read_into(cx, io, read_buffer)) {
            Ok(0) if read_buffer.is_empty() => return Poll::Ready(Err(ResponseHeadError::Eof)),
            Ok(0) => {
                return Poll::Ready(Err(Error::InvalidResponse(
                    "the connection ended within the response head",
                )
                .into()));
            }
            Ok(_) => {}
            Err(error) if read_buffer.is_empty() && is_reset(&error) => {
                return Poll::Ready(Err(ResponseHeadError::Reset));
            }
            Err(error) => return Poll::Ready(Err(Error::ServerIo(error).into())),
        }
    }
}

fn invalid_head_error(error: HeadError) -> Error {
    Error::InvalidResponse(match error {
        HeadError::TooLarge => "the response head is too long",
        HeadError::InvalidFirstLine(reason) | HeadError::Invalid(reason) => reason,
    })
}

fn is_reset(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted
    )
}

/// A response body that is read from an HTTP/1 connection.
pub(crate) struct ResponseBody {
    /// `None` after the end of the body.
    source: Option<ResponseIo>,
    read_buffer: Bytes,
    framing: Framing,
    /// The pool to which the connection returns after a complete body.
    pool: Option<Arc<ConnectionPool>>,
}

enum ResponseIo {
    /// Both halves of the connection.
    Whole(Box<Io>),
    /// A task still writes the request body to the other half, at most [`REQUEST_BODY_GRACE`] longer than this body
    /// exists. It returns that half through `write_half_rx` when the request body is written.
    ReadHalf {
        read: ReadHalf<Io>,
        write_half_rx: oneshot::Receiver<WriteHalf<Io>>,
    },
    /// The connection no longer carries HTTP. `None` after the tunnel has taken it.
    Upgraded(Option<Io>),
}

impl ResponseBody {
    /// The connection after a protocol switch; `None` on the second call.
    fn take_upgraded_io(&mut self) -> Option<Io> {
        match &mut self.source {
            Some(ResponseIo::Upgraded(io)) => io.take(),
            _ => None,
        }
    }

    /// Returns the connection to the pool, or closes it if it cannot be reused.
    fn finish(&mut self) {
        let (source, pool) = (self.source.take(), self.pool.take());
        let Some(pool) = pool.filter(|_| self.read_buffer.is_empty()) else {
            return;
        };
        match source {
            Some(ResponseIo::Whole(io)) => pool.put(io),
            Some(ResponseIo::ReadHalf {
                read,
                mut write_half_rx,
            }) => {
                if let Ok(write) = write_half_rx.try_recv() {
                    pool.put(Box::new(read.unsplit(write)));
                }
            }
            Some(ResponseIo::Upgraded(_)) | None => {}
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match &mut self.source {
            Some(ResponseIo::Whole(io)) => read_buffer::poll_read_into(cx, &mut **io, &mut self.read_buffer),
            Some(ResponseIo::ReadHalf { read, .. }) => read_buffer::poll_read_into(cx, read, &mut self.read_buffer),
            Some(ResponseIo::Upgraded(_)) | None => Poll::Ready(Ok(0)),
        }
    }
}

impl ReceivedBody for ResponseBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            match self.framing.decode(&mut self.read_buffer) {
                Ok(DecodeStep::Data(data)) => {
                    if self.framing == Framing::Length(0) {
                        self.finish();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(DecodeStep::Trailers(trailers)) => {
                    self.finish();
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(DecodeStep::End) => {
                    self.finish();
                    return Poll::Ready(None);
                }
                Ok(DecodeStep::NeedsData) => {}
                Err(reason) => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Error::InvalidResponse(reason))));
                }
            }
            match ready!(self.poll_fill(cx)) {
                Ok(0) if self.framing == Framing::UntilClose => {
                    self.source = None;
                    self.framing = Framing::None;
                    return Poll::Ready(None);
                }
                Ok(0) => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Error::ServerIo(io::ErrorKind::UnexpectedEof.into()))));
                }
                Ok(_) => {}
                Err(error) => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Error::ServerIo(error))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.framing.is_end()
    }

    fn size_hint(&self) -> SizeHint {
        self.framing.size_hint()
    }

    fn take_server_tunnel(&mut self) -> Option<TunnelSide> {
        self.take_upgraded_io().map(TunnelSide::Connection)
    }
}
