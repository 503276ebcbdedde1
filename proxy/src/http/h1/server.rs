//! HTTP/1 server: one task per connection, one request at a time.
//!
//! A request body reads from the connection itself when it is polled. The server reads the next request only after that
//! body has ended or was dropped. So bodies need no channel, and the application's reading speed limits the client.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Method, Request, Response, Version};
use parking_lot::Mutex;
use tokio::{io::AsyncWriteExt as _, sync::oneshot, time::Instant};
use tower::Service;
use tulle_core::{drain, metrics::Counter};

use crate::{
    http::{
        body::Body,
        connection_closer::CloseAfterResponse,
        error::Error,
        h1::{
            encode::{self, ConnectionReuse, OutgoingMessage, RequestLine},
            framing::{self, Framing},
            head::{self, HeadError, RequestHead},
            read_buffer,
            request_body::RequestBody,
            server_connection::{ConnectionIo, RequestBodyState, ServerConnection, SharedServerConnection},
        },
        headers, linger,
        server_config::{FIRST_REQUEST_DRAIN_TIMEOUT, HttpLimits},
        stack::error_response::ErrorFormat,
        stack::head_memory::{ClientHeadMemory, HeadReservation, UNRESERVED_HEAD_BYTES},
        stack::layers::RequestService,
        timer::ResettableTimer,
        upgrade::reply_channels::ReplyChannels,
        upgrade::tunnel::{ClientTunnel, TunnelSide},
    },
    net::io::Io,
};

/// Why the server reads no further request. An ordinary end is also returned as an error, so that `?` ends the connection.
enum ConnectionEnd {
    /// This proxy closes the connection, because the client has closed it, it was idle for too long, its last response is written,
    /// or the proxy drains.
    Closed,
    /// The client gets an error response to a request that the service did not get.
    Refused(Error),
    /// A response of the service failed before its first byte was written. The client gets an error response instead.
    ResponseUnsent(Error),
    Failed(Error),
    /// The tunnel of an upgrade or CONNECT takes the connection.
    Upgraded(oneshot::Sender<TunnelSide>),
}

/// Serves a connection until it ends. Ends it gracefully when `drain` is signaled.
///
/// Most connections are idle, and a future has the size of its largest state. So the future drops finished state early,
/// and arguments are moved into the values that are built from them, so that they are not stored twice.
///
/// # Errors
/// The connection, `service` or a response body fails, or the client closes the connection within a request.
pub(in crate::http) fn serve<S>(
    io: Io,
    mut service: RequestService<S>,
    config: &HttpLimits,
    drain: &drain::Watch,
) -> impl Future<Output = Result<(), Error>>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    let connection = Arc::new(Mutex::new(ServerConnection {
        io,
        read_buffer: Bytes::new(),
        received_interims: Vec::new(),
        unsent_interims: BytesMut::new(),
        request_state: RequestBodyState::Complete,
        wrote_at: None,
        next_close_check: None,
        server_waker: None,
        timer: ResettableTimer::default(),
    }));
    async move {
        let mut drain_signal = pin!(drain.signaled());
        let mut is_first_request = true;
        let end = loop {
            let head = {
                let mut head_reader = HeadReader::new(config, service.head_memory());
                head_reader.is_first_request = std::mem::take(&mut is_first_request);
                poll_fn(|cx| head_reader.poll_head(cx, &mut connection.lock(), drain_signal.as_mut())).await
            };
            let head = match head {
                Ok(head) => head,
                Err(end) => break end,
            };
            if head.target_encoded {
                service.record_encoded_target();
            }
            let (exchange, request) = PendingExchange::start(head, &connection, config.idle_timeout);
            let result = {
                let mut response_future = pin!(service.call(request));
                poll_fn(|cx| exchange.poll_response(cx, &connection, response_future.as_mut())).await
            };
            let write_result = match result {
                Ok(rsp) => {
                    let counter = service.response_counter(rsp.status());
                    exchange.write_response(&connection, rsp, counter, drain).await
                }
                Err(error) => Err(ConnectionEnd::Failed(error)),
            };
            if let Err(end) = write_result {
                break end;
            }
        };
        match end {
            ConnectionEnd::Closed => close(connection).await,
            ConnectionEnd::Refused(error) => {
                service.record_refused(&error);
                write_error(connection, service.error_response(&error, ErrorFormat::http1())).await
            }
            ConnectionEnd::ResponseUnsent(error) => {
                service.record_unsent_response(&error);
                write_error(connection, service.error_response(&error, ErrorFormat::http1())).await
            }
            ConnectionEnd::Failed(error) => Err(error),
            ConnectionEnd::Upgraded(tunnel_tx) => {
                // The body has ended, so nothing else holds the connection.
                if let Some(connection) = Arc::into_inner(connection) {
                    let ServerConnection { io, read_buffer, .. } = connection.into_inner();
                    // The tunnel may have been dropped.
                    let _ = tunnel_tx.send(TunnelSide::Connection(io.prepend(read_buffer)));
                }
                Ok(())
            }
        }
    }
}

/// Writes an error response and closes the connection. A separate function, so that its state does not enlarge the
/// connection's future.
async fn write_error(connection: SharedServerConnection, rsp: Response<Body>) -> Result<(), Error> {
    {
        let mut connection = connection.lock();
        connection.request_state = RequestBodyState::Abandoned;
        connection.read_buffer = Bytes::new(); // a refused head does not take memory while the client reads the response
    }
    let (mut message, _) = encode::encode_response(rsp, ASSUMED_REQUEST_LINE, ConnectionReuse::Close);
    let written = poll_fn(|cx| message.poll_write(cx, &mut ConnectionIo(&connection))).await;
    written?;
    close(connection).await
}

/// A request that the service processes.
struct PendingExchange {
    version: Version,
    method: Method,
    keep_alive: bool,
    /// Sends the connection to the tunnel if it is upgraded.
    upgrade_tx: Option<oneshot::Sender<TunnelSide>>,
}

impl PendingExchange {
    /// Splits a request into the state for its response and the request for the service.
    fn start(head: RequestHead, connection: &SharedServerConnection, idle_timeout: Duration) -> (Self, Request<Body>) {
        let RequestHead {
            request,
            framing,
            keep_alive,
            expects_continue,
            target_encoded: _,
        } = head;
        let (version, method) = (request.version(), request.method().clone());
        let (upgrade_tx, upgrade_rx) = match headers::is_upgrade_request(&request) {
            true => Some(oneshot::channel()).unzip(),
            false => (None, None),
        };
        let request = request.map(|()| {
            let body = match framing {
                Framing::None | Framing::Length(0) => Body::empty(),
                _ => {
                    let received = RequestBody::new(connection, framing, expects_continue, idle_timeout);
                    Body::received(Box::new(received))
                }
            };
            body.with_reply_channels(ReplyChannels {
                upgrade: upgrade_rx.map(ClientTunnel::new),
                interims: Some(connection.clone()),
            })
        });
        let exchange = Self {
            version,
            method,
            keep_alive,
            upgrade_tx,
        };
        (exchange, request)
    }

    /// Whether to check if the client closes the connection. False without keep-alive: such a client may send FIN after its
    /// request, and under TLS a FIN counts as a close.
    fn watches_for_close(&self) -> bool {
        self.keep_alive
    }

    /// Ready with the response, or with an error when the client has closed the connection. Writes interim responses.
    fn poll_response(
        &self,
        cx: &mut Context<'_>,
        connection: &SharedServerConnection,
        response_future: Pin<&mut impl Future<Output = Result<Response<Body>, Error>>>,
    ) -> Poll<Result<Response<Body>, Error>> {
        let polled = response_future.poll(cx);
        let mut connection = connection.lock();
        connection.write_interims(cx, self.version);
        match polled {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => connection.poll_client_closed(cx, self.watches_for_close()).map(Err),
        }
    }

    /// Writes the response, which `counter` counts, and waits until the request body is complete or dropped.
    async fn write_response(
        self,
        connection: &SharedServerConnection,
        rsp: Response<Body>,
        counter: &Counter,
        drain: &drain::Watch,
    ) -> Result<(), ConnectionEnd> {
        let is_switching = head::switches_protocol(rsp.status(), &self.method);
        let asks_to_close = rsp.extensions().get::<CloseAfterResponse>().is_some();
        let is_body_lost = {
            let mut connection = connection.lock();
            connection.stop_awaiting_continue(rsp.status());
            matches!(
                connection.request_state,
                RequestBodyState::Abandoned | RequestBodyState::ConnectionLost
            )
        };
        let must_close = !is_switching && (!self.keep_alive || asks_to_close || is_body_lost || drain.is_signaled());
        let reuse = if must_close {
            ConnectionReuse::Close
        } else {
            ConnectionReuse::KeepAlive
        };
        let request_line = RequestLine {
            version: self.version,
            method: &self.method,
        };
        let (message, reuse) = encode::encode_response(rsp, request_line, reuse);
        let is_last = reuse == ConnectionReuse::Close;
        write_message(connection, message, counter, self.watches_for_close(), is_last).await?;
        if is_switching {
            let upgrade_tx = self
                .upgrade_tx
                .filter(|_| connection.lock().request_state == RequestBodyState::Complete);
            return Err(upgrade_tx.map_or(ConnectionEnd::Closed, ConnectionEnd::Upgraded));
        }
        poll_fn(|cx| connection.lock().poll_body_done(cx)).await;
        match (reuse, connection.lock().request_state) {
            (ConnectionReuse::KeepAlive, RequestBodyState::Complete) => Ok(()),
            _ => Err(ConnectionEnd::Closed),
        }
    }
}

/// Writes a response unless the client closes the connection. If the response body fails before the first byte is
/// written, the client gets an error response. Otherwise `counter` counts the response.
fn write_message(
    connection: &SharedServerConnection,
    message: OutgoingMessage<Body>,
    counter: &Counter,
    watch_for_close: bool,
    mut is_last: bool,
) -> impl Future<Output = Result<(), ConnectionEnd>> {
    let mut writing = ResponseWrite { connection, message };
    let mut uncounted = Some(counter);
    poll_fn(move |cx| {
        let message = &mut writing.message;
        let encoded = message.poll_encode(cx);
        if is_last && message.is_body_encoded() {
            connection.lock().cork();
            is_last = false;
        }
        let polled = match encoded {
            Poll::Ready(Err(error)) if !message.has_begun() => {
                return Poll::Ready(Err(ConnectionEnd::ResponseUnsent(error)));
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => message.poll_write(cx, &mut ConnectionIo(connection)),
        };
        if message.has_begun()
            && let Some(counter) = uncounted.take()
        {
            counter.inc();
        }
        if let Poll::Ready(written) = polled {
            return Poll::Ready(written.map_err(ConnectionEnd::Failed));
        }
        if let Poll::Ready(timeout) = message.poll_deadline(cx) {
            return Poll::Ready(Err(ConnectionEnd::Failed(timeout)));
        }
        let closed = connection.lock().poll_client_closed(cx, watch_for_close);
        closed.map(|error| Err(ConnectionEnd::Failed(error)))
    })
}

/// A response that is being written; it can be dropped at any time.
struct ResponseWrite<'a> {
    connection: &'a SharedServerConnection,
    message: OutgoingMessage<Body>,
}

impl Drop for ResponseWrite<'_> {
    fn drop(&mut self) {
        let Self { connection, message } = self;
        if message.ends_with_connection() && message.has_begun() && !message.is_done() {
            connection.lock().io.reset_on_drop(); // a FIN would look like the end of the body
        }
    }
}

/// Closes a connection after its last response.
async fn close(connection: SharedServerConnection) -> Result<(), Error> {
    let is_done = {
        let connection = connection.lock();
        connection.request_state == RequestBodyState::Complete && connection.read_buffer.is_empty()
    };
    // If the request body still holds the connection, dropping this reference sends no FIN. The connection is then shut down
    // explicitly.
    let is_sole_owner = Arc::strong_count(&connection) == 1;
    let closed = match is_done {
        true if is_sole_owner => poll_fn(|cx| connection.lock().io.poll_close_notify(cx)).await,
        true => ConnectionIo(&connection).shutdown().await,
        false => linger::close(&mut ConnectionIo(&connection)).await,
    };
    closed.map_err(Error::ClientIo)
}

/// The request line that an error response assumes, because the request may not have been parsed.
const ASSUMED_REQUEST_LINE: RequestLine<'static> = RequestLine {
    version: Version::HTTP_11,
    method: &Method::GET,
};

/// Reads a request head within its time limits.
struct HeadReader<'a> {
    config: &'a HttpLimits,
    memory: &'a ClientHeadMemory,
    /// Memory for a large incomplete head.
    reserved: HeadReservation,
    idle_deadline: Option<Instant>,
    head_deadline: Option<Instant>,
    /// Bytes already searched for the end of the head.
    n_scanned: usize,
    /// Whether the drain is signaled.
    is_draining: bool,
    /// Whether the connection has had no request yet.
    is_first_request: bool,
}

impl<'a> HeadReader<'a> {
    fn new(config: &'a HttpLimits, memory: &'a ClientHeadMemory) -> Self {
        Self {
            config,
            memory,
            reserved: HeadReservation::default(),
            idle_deadline: None,
            head_deadline: None,
            n_scanned: 0,
            is_draining: false,
            is_first_request: false,
        }
    }

    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        connection: &mut ServerConnection,
        drain_signal: Pin<&mut impl Future<Output = ()>>,
    ) -> Poll<Result<RequestHead, ConnectionEnd>> {
        let ServerConnection {
            io, read_buffer, timer, ..
        } = connection;
        let io_error = |error| ConnectionEnd::Failed(Error::ClientIo(error));
        loop {
            // Some clients send an extra CRLF after a body (RFC 9112, section 2.2).
            while self.n_scanned == 0 && read_buffer.starts_with(b"\r\n") {
                read_buffer.advance(2);
            }
            if let Some(head) = self.parse(read_buffer).map_err(ConnectionEnd::Refused)? {
                return Poll::Ready(Ok(head));
            }
            match read_buffer::poll_read_into(cx, io, read_buffer) {
                Poll::Ready(Ok(0)) if read_buffer.is_empty() => return Poll::Ready(Err(ConnectionEnd::Closed)),
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io_error(io::ErrorKind::UnexpectedEof.into()))),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(io_error(error))),
                Poll::Pending => break,
            }
        }
        if read_buffer.len() <= UNRESERVED_HEAD_BYTES {
            // Copies the few bytes, so that they do not keep the large buffer of their read allocated.
            *read_buffer = Bytes::copy_from_slice(read_buffer);
        }
        self.reserved
            .update(cx, self.memory, read_buffer.len())
            .map_err(ConnectionEnd::Refused)?;
        let is_idle = read_buffer.is_empty();
        if is_idle && !self.is_draining && drain_signal.poll(cx).is_ready() {
            self.is_draining = true;
            let timeout = match self.is_first_request {
                true => FIRST_REQUEST_DRAIN_TIMEOUT.min(self.config.idle_timeout),
                false => Duration::ZERO,
            };
            self.idle_deadline = Some(Instant::now() + timeout);
        }
        let (deadline, limit) = match is_idle {
            true => (&mut self.idle_deadline, self.config.idle_timeout),
            false => (&mut self.head_deadline, self.config.header_read_timeout),
        };
        timer.set(*deadline.get_or_insert_with(|| Instant::now() + limit));
        ready!(timer.poll(cx));
        match is_idle {
            // A request in the socket buffer is served, even if the runtime has not reported the socket as readable yet.
            true if io.has_unread() => Poll::Pending,
            true => Poll::Ready(Err(ConnectionEnd::Closed)),
            false => Poll::Ready(Err(ConnectionEnd::Refused(Error::HeaderReadTimeout(limit)))),
        }
    }

    fn parse(&mut self, read_buffer: &mut Bytes) -> Result<Option<RequestHead>, Error> {
        let seen = std::mem::replace(&mut self.n_scanned, read_buffer.len());
        if read_buffer.is_empty() || (seen > 0 && !framing::has_new_empty_line(read_buffer, seen)) {
            return self.check_size(read_buffer.len()).map(|()| None);
        }
        let n_before = read_buffer.len();
        let head = head::parse_request_head(read_buffer).map_err(|error| match error {
            HeadError::TooLarge => self.size_error(),
            HeadError::InvalidFirstLine(reason) | HeadError::Invalid(reason) => Error::InvalidRequest(reason),
        })?;
        let used = match head {
            Some(_) => n_before.saturating_sub(read_buffer.len()),
            None => n_before,
        };
        self.check_size(used).map(|()| head)
    }

    fn check_size(&self, len: usize) -> Result<(), Error> {
        if len > self.config.max_header_bytes {
            Err(self.size_error())
        } else {
            Ok(())
        }
    }

    fn size_error(&self) -> Error {
        Error::HeaderTooLarge {
            limit: self.config.max_header_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use futures_util::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
    use http_body::{Frame, SizeHint};
    use tokio::{
        io::AsyncReadExt as _,
        net::{TcpListener, TcpStream},
    };
    use tulle_core::metrics::{Registry, samples::Samples};

    use super::*;
    use crate::{
        http::{
            body::ReceivedBody,
            connection_closer::ConnectionCloser,
            stack::error_response::ErrorDetail,
            stack::head_memory::{ClientKind, HeadMemory},
            stack::layers::tests::{connection_info, service_stack},
            stack::layers::{self, ServiceStack},
        },
        net::{io::Tcp, memory::MemoryPressure},
    };

    /// A response body of five bytes that fails when it is polled.
    struct BrokenBody;

    impl ReceivedBody for BrokenBody {
        fn poll_frame(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
            Poll::Ready(Some(Err(Error::InvalidResponse("the body is missing"))))
        }

        fn is_end_stream(&self) -> bool {
            false
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(5)
        }
    }

    #[tokio::test]
    async fn a_response_that_fails_before_its_first_byte_is_counted_once_as_the_error_response() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let registry = Registry::new();
        let service = service_stack(&registry).build(
            |_| async { Ok::<_, Error>(Response::new(Body::received(Box::new(BrokenBody)))) },
            ErrorDetail::Omit,
            connection_info(),
            ConnectionCloser::default(),
        );
        let limit = Duration::from_secs(3600);
        let config = HttpLimits {
            max_header_bytes: 1000,
            header_read_timeout: limit,
            idle_timeout: limit,
        };
        let (_signal, drain) = drain::channel();
        let serving = serve(Io::tcp(Tcp::new(stream)), service, &config, &drain);
        let asking = async move {
            let head = b"GET / HTTP/1.1\r\nhost: web\r\n\r\n";
            tokio::io::AsyncWriteExt::write_all(&mut client, head).await.unwrap();
            let mut rsp = String::new();
            client.read_to_string(&mut rsp).await.unwrap();
            rsp
        };
        let (served, rsp) = tokio::join!(serving, asking);
        served.unwrap();
        assert!(rsp.starts_with("HTTP/1.1 502 "), "{rsp}");
        let counted = Samples::parse(&registry.render());
        for (name, labels) in [
            ("tulle_http_responses_total", &[("status_class", "5xx")][..]),
            ("tulle_http_responses_total", &[]),
            ("tulle_http_requests_total", &[]),
            ("tulle_failures_total", &[("cause", "bad-response")]),
            ("tulle_failures_total", &[]),
            ("inbound_http_errors_total", &[]),
        ] {
            assert_eq!(counted.sum(name, labels), 1., "{name}{labels:?}");
        }
    }

    /// Connects to a server with these layers.
    async fn connect(stack: &ServiceStack, client: u8) -> TcpStream {
        let (connected, io, service) = layers::tests::connect(stack, client).await;
        tokio::spawn(async move {
            let config = HttpLimits {
                max_header_bytes: 64 << 10,
                header_read_timeout: Duration::from_secs(3600),
                idle_timeout: Duration::from_secs(3600),
            };
            let (_signal, drain) = drain::channel();
            drop(serve(io, service, &config, &drain).await);
        });
        connected
    }

    async fn read_status(client: &mut TcpStream) -> String {
        let mut status = vec![0; "HTTP/1.1 200".len()];
        client.read_exact(&mut status).await.unwrap();
        String::from_utf8(status).unwrap()
    }

    #[tokio::test]
    async fn large_heads_that_do_not_end_take_limited_memory_and_other_clients_are_answered() {
        let registry = Registry::new();
        let stack = ServiceStack {
            // 1 MiB: 16 heads.
            head_memory: HeadMemory::new(Some(8 << 20), MemoryPressure::default()),
            ..service_stack(&registry)
        };
        let head_start = [&b"GET / HTTP/1.1\r\nhost: web\r\nx: "[..], &[b'x'; 60_000]].concat();
        let mut unfinished = FuturesUnordered::new();
        for _ in 0..40 {
            let mut client = connect(&stack, 1).await;
            client.write_all(&head_start).await.unwrap();
            unfinished.push(async move { (read_status(&mut client).await, client) });
        }
        let mut refused = Vec::new();
        for _ in 0..40 - 16 {
            refused.extend(unfinished.next().await);
        }

        let mut other = connect(&stack, 2).await;
        other.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
        assert_eq!(read_status(&mut other).await, "HTTP/1.1 200");
        let mut other = connect(&stack, 3).await;
        other.write_all(&head_start).await.unwrap();
        refused.extend(unfinished.next().await); // the other client gets the memory of this head
        other.write_all(b"\r\n\r\n").await.unwrap();
        assert_eq!(read_status(&mut other).await, "HTTP/1.1 200");

        assert!(
            refused.iter().all(|(status, _)| status == "HTTP/1.1 503"),
            "{refused:?}"
        );
        let counted = Samples::parse(&registry.render());
        assert_eq!(counted.sum("tulle_failures_total", &[("cause", "overload")]), 25.);
    }

    /// A connection that waits for a request and has read `read_buffer`.
    fn waiting_connection(stream: TcpStream, read_buffer: Bytes) -> ServerConnection {
        ServerConnection {
            io: Io::tcp(Tcp::new(stream)),
            read_buffer,
            received_interims: Vec::new(),
            unsent_interims: BytesMut::new(),
            request_state: RequestBodyState::Complete,
            wrote_at: None,
            next_close_check: None,
            server_waker: None,
            timer: ResettableTimer::default(),
        }
    }

    #[tokio::test]
    async fn a_small_part_of_a_head_does_not_keep_the_buffer_of_its_read() {
        for n_bytes in [0, 1, UNRESERVED_HEAD_BYTES] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let read = Bytes::from(vec![b'G'; 60_000]);
            let mut connection = waiting_connection(stream, read.slice(read.len() - n_bytes..));
            let config = HttpLimits {
                max_header_bytes: 64 << 10,
                header_read_timeout: Duration::from_secs(3600),
                idle_timeout: Duration::from_secs(3600),
            };
            let memory = HeadMemory::new(None, MemoryPressure::default());
            let memory = ClientHeadMemory::new(memory, ([10, 0, 0, 2], 4321).into(), ClientKind::WithoutIdentity);
            let mut head_reader = HeadReader::new(&config, &memory);
            let mut no_drain = pin!(std::future::pending());
            poll_fn(|cx| {
                let polled = head_reader.poll_head(cx, &mut connection, no_drain.as_mut());
                assert!(polled.is_pending(), "{n_bytes}");
                Poll::Ready(())
            })
            .await;
            assert_eq!(connection.read_buffer.len(), n_bytes);
            assert!(read.is_unique(), "{n_bytes}");
        }
    }

    #[tokio::test]
    async fn a_new_connection_gets_the_response_to_its_first_request_during_a_drain() {
        let registry = Registry::new();
        let (mut client, io, service) = layers::tests::connect(&service_stack(&registry), 1).await;
        let (signal, drain) = drain::channel();
        signal.drain().await;
        let limit = Duration::from_secs(3600);
        let config = HttpLimits {
            max_header_bytes: 1000,
            header_read_timeout: limit,
            idle_timeout: limit,
        };
        let mut serving = pin!(serve(io, service, &config, &drain));
        assert!(serving.as_mut().now_or_never().is_none());
        client.write_all(b"GET / HTTP/1.1\r\nhost: web\r\n\r\n").await.unwrap();
        let mut received = String::new();
        let (served, read) = tokio::join!(serving, client.read_to_string(&mut received));
        served.unwrap();
        read.unwrap();
        assert!(received.starts_with("HTTP/1.1 200 "), "{received}");
        assert!(received.contains("connection: close\r\n"), "{received}");
    }

    #[tokio::test]
    async fn a_request_in_the_socket_buffer_is_served_during_drain() {
        for ends_by in ["drain", "idle timeout"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = waiting_connection(stream, Bytes::new());
            let is_drain = ends_by == "drain";
            let limit = Duration::from_secs(if is_drain { 3600 } else { 0 });
            let config = HttpLimits {
                max_header_bytes: 1000,
                header_read_timeout: Duration::from_secs(3600),
                idle_timeout: limit,
            };
            let memory = HeadMemory::new(None, MemoryPressure::default());
            let memory = ClientHeadMemory::new(memory, ([10, 0, 0, 2], 4321).into(), ClientKind::WithoutIdentity);
            let mut head_reader = HeadReader::new(&config, &memory);
            let (drain_tx, drain_rx) = oneshot::channel::<()>();
            let mut drain_signal = pin!(async { drop(drain_rx.await) });
            if is_drain {
                poll_fn(|cx| {
                    assert!(
                        head_reader
                            .poll_head(cx, &mut connection, drain_signal.as_mut())
                            .is_pending()
                    );
                    Poll::Ready(())
                })
                .await;
                drain_tx.send(()).unwrap();
            }
            // The runtime polls its sockets only when this task waits, so it does not report these bytes before the
            // first poll.
            client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let head = poll_fn(|cx| head_reader.poll_head(cx, &mut connection, drain_signal.as_mut())).await;
            assert!(head.is_ok_and(|head| head.keep_alive), "{ends_by}");
            let last = poll_fn(|cx| head_reader.poll_head(cx, &mut connection, drain_signal.as_mut())).await;
            assert!(matches!(last, Err(ConnectionEnd::Closed)), "{ends_by}");
        }
    }
}
