//! HTTP client of one worker for one endpoint: HTTP/1 connections from a pool, and shared HTTP/2 connections. Concurrent
//! requests share one HTTP/2 dial.

use std::{
    future::Future,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
};

use http::{Method, Request, Response, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use crate::{
    http::{
        body::Body,
        error::{Error, Resendable},
        h1::{
            client::{self as http1, Exchange, FailedExchange, ResendTarget, ResendableRequest, ResponseHeadError},
            pool::{ConnectionPool, PoolConfig, ResendPolicy},
        },
        h2::{Http2Config, client as http2, flow_control::StreamWaiters, keep_alive::PeerChecks},
        upgrade::http1_over_http2,
        upgrade::interim::SharedInterimSink,
        upgrade::websocket,
    },
    net::io::Io,
};

/// Opens a connection to the endpoint for one HTTP version. The future is boxed once per connection, not per request.
pub(crate) type ConnectFn =
    Box<dyn Fn(HttpVersion) -> Pin<Box<dyn Future<Output = Result<Io, Error>> + Send>> + Send + Sync>;

/// HTTP version of a connection or of a request. The two can differ: an HTTP/1 WebSocket handshake can use an HTTP/2 connection
/// ([`ConnectionUse::ExtendedConnect`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpVersion {
    Http1,
    Http2,
}

/// Connections of one worker to one endpoint.
pub(crate) struct EndpointClient {
    addr: SocketAddr,
    connect: ConnectFn,
    /// More than one if the peer permits fewer streams than there are concurrent requests.
    http2: Mutex<SmallVec<[http2::SharedConnection; 1]>>,
    stream_waiters: Arc<StreamWaiters>,
    checks: Option<Arc<PeerChecks>>,
    /// Held during an HTTP/2 dial, so that other requests wait for the same connection.
    dial_lock: tokio::sync::Mutex<()>,
    dial_started_at: Mutex<Option<Instant>>,
    /// A request that waited for a failed dial fails with the cause of the dial.
    failed_dials: Mutex<FailedDials>,
    http2_config: Http2Config,
    pool: Arc<ConnectionPool>,
}

#[derive(Clone, Copy, Default)]
struct FailedDials {
    count: u64,
    last_cause: &'static str,
}

/// Maximum number of HTTP/2 connections of one worker to one endpoint.
const MAX_HTTP2_CONNECTIONS: usize = 64;

/// The connection or stream for one request, or the result that no stream is available.
pub(crate) enum ConnectOutcome {
    Http1(http1::ClientConnection, Option<Arc<ConnectionPool>>),
    Http2(http2::StreamSender),
    /// For an extended CONNECT, a stream that carries another protocol (RFC 8441).
    ExtendedConnect(Box<http2::ExtendedConnectSender>),
    /// No extended CONNECT stream is available, for example because the peer does not support them, or because half of the streams
    /// that it permits carry other protocols already. [`EndpointClient::send`] returns this as an error.
    NoExtendedConnectStream,
}

/// The kind of connection that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionUse {
    /// HTTP/1: an idle connection of the pool, or a new one that joins it. HTTP/2: a stream of a shared connection.
    Pooled,
    /// HTTP/1: a new connection for this request only, such as for upgrades and HTTP/1.0. HTTP/2 has no such connections; there it
    /// is the same as [`Self::Pooled`].
    Unpooled,
    /// A stream of a shared HTTP/2 connection that carries another protocol. The request waits for the connection and the
    /// settings of its peer. If no stream is available then, an HTTP/1 request does not wait for one but gets a new HTTP/1
    /// connection.
    ExtendedConnect,
}

impl EndpointClient {
    /// Creates a client without connections. Its HTTP/2 connections send a ping when `checks` requests one.
    pub(crate) fn new(
        addr: SocketAddr,
        connect: ConnectFn,
        http2_config: Http2Config,
        checks: Option<Arc<PeerChecks>>,
        pool: PoolConfig,
    ) -> Self {
        Self {
            addr,
            connect,
            http2: Mutex::default(),
            stream_waiters: Arc::default(),
            checks,
            dial_lock: tokio::sync::Mutex::new(()),
            dial_started_at: Mutex::new(None),
            failed_dials: Mutex::default(),
            http2_config,
            pool: ConnectionPool::new(pool.idle_timeout, pool.max_idle, pool.resend),
        }
    }

    pub(crate) fn resend_policy(&self) -> ResendPolicy {
        self.pool.resend
    }

    /// Returns an open connection, or dials one.
    ///
    /// # Errors
    /// As [`EndpointClient::dial`].
    pub(crate) async fn connection(
        &self,
        protocol: HttpVersion,
        connection_use: ConnectionUse,
    ) -> Result<ConnectOutcome, Error> {
        match self.existing_connection(protocol, connection_use).await {
            Some(outcome) => Ok(outcome),
            // Boxed: rare, for the first request or after a connection was closed.
            None => Box::pin(self.dial(protocol, connection_use)).await,
        }
    }

    /// Returns an open connection that the request can use, if there is one. Does not wait, except that an extended CONNECT waits
    /// for the settings of the peer, at most [`http2::FREE_STREAM_TIMEOUT`] for each connection.
    pub(crate) async fn existing_connection(
        &self,
        protocol: HttpVersion,
        connection_use: ConnectionUse,
    ) -> Option<ConnectOutcome> {
        match (protocol, connection_use) {
            (_, ConnectionUse::ExtendedConnect) => Box::pin(self.reserve_extended_connect_stream()).await,
            (HttpVersion::Http1, ConnectionUse::Unpooled) => None,
            (HttpVersion::Http1, ConnectionUse::Pooled) => Some(ConnectOutcome::Http1(
                http1::ClientConnection::reused(self.pool.take()?),
                Some(self.pool.clone()),
            )),
            (HttpVersion::Http2, _) => self.existing_http2(),
        }
    }

    /// Reserves a stream on the first HTTP/2 connection that has a free one. Drops closed and retired connections, and the last
    /// connection if it is surplus.
    fn existing_http2(&self) -> Option<ConnectOutcome> {
        let mut connections = self.http2.lock();
        let mut index = 0;
        while let Some(connection) = connections.get_mut(index) {
            if connection.is_closed() || connection.is_retired() {
                connections.remove(index);
                continue;
            }
            if connection.has_free_stream() {
                if index > 0 {
                    connection.mark_needed();
                }
                let sender = connection.sender();
                if index + 1 < connections.len() && connections.last().is_some_and(http2::SharedConnection::is_surplus)
                {
                    connections.pop();
                }
                return Some(ConnectOutcome::Http2(sender));
            }
            index += 1;
        }
        None
    }

    /// Whether another HTTP/2 connection can be dialled when no stream is free. It cannot if the limit of connections is reached, or
    /// if the settings of a connection are still unknown. It also cannot if a connection has no open stream: the peer then permits no
    /// stream at all, so another connection would not help.
    fn can_add_http2_connection(&self) -> bool {
        let connections = self.http2.lock();
        connections.len() < MAX_HTTP2_CONNECTIONS
            && connections
                .iter()
                .all(|connection| !connection.awaits_settings() && connection.n_streams() > 0)
    }

    /// Reserves an extended CONNECT stream on the first shared connection on which one is available.
    async fn reserve_extended_connect_stream(&self) -> Option<ConnectOutcome> {
        let waits: SmallVec<[http2::ExtendedConnectWait; 1]> = {
            let connections = self.http2.lock();
            let usable = connections.iter().filter(|connection| !connection.is_retired());
            usable.map(http2::SharedConnection::extended_connect_wait).collect()
        };
        for wait in waits {
            if let Some(sender) = wait.sender().await {
                return Some(ConnectOutcome::ExtendedConnect(Box::new(sender)));
            }
        }
        None
    }

    /// Whether there is a shared HTTP/2 connection. It may be closed already.
    pub(crate) fn has_http2_connection(&self) -> bool {
        !self.http2.lock().is_empty()
    }

    /// Dials a connection. For HTTP/2, first waits for the dial of another request, and dials only if no stream is free then; if
    /// no connection can be added, waits for a free stream.
    ///
    /// # Errors
    /// Dialling or the handshake fails, or no HTTP/2 stream becomes free in time for an HTTP/2 request. Nothing of the request
    /// was sent.
    pub(crate) async fn dial(
        &self,
        protocol: HttpVersion,
        connection_use: ConnectionUse,
    ) -> Result<ConnectOutcome, Error> {
        if connection_use == ConnectionUse::ExtendedConnect {
            // Only ensures that there is a connection. If this reserves a stream, the stream is released again.
            match protocol {
                HttpVersion::Http1 => drop(self.try_reserve_shared_stream().await?),
                HttpVersion::Http2 => drop(self.reserve_shared_stream().await?),
            }
            match self.reserve_extended_connect_stream().await {
                Some(outcome) => return Ok(outcome),
                None if protocol == HttpVersion::Http2 => return Ok(ConnectOutcome::NoExtendedConnectStream),
                None => {}
            }
        } else if protocol == HttpVersion::Http2 {
            return self.reserve_shared_stream().await;
        }
        let connection = http1::ClientConnection::new((self.connect)(HttpVersion::Http1).await?);
        let pool = (connection_use == ConnectionUse::Pooled).then(|| self.pool.clone());
        Ok(ConnectOutcome::Http1(connection, pool))
    }

    /// Returns an unused HTTP/1 connection to the pool.
    pub(crate) fn return_to_pool(&self, outcome: ConnectOutcome) {
        if let ConnectOutcome::Http1(connection, Some(pool)) = outcome {
            connection.return_to_pool(&pool);
        }
    }

    /// Start time of the HTTP/2 dial in progress, if there is one.
    pub(crate) fn dial_started_at(&self) -> Option<Instant> {
        *self.dial_started_at.lock()
    }

    /// Reserves a stream on a shared HTTP/2 connection. If no stream is free, dials a connection, or waits for a free stream if no
    /// connection can be added.
    async fn reserve_shared_stream(&self) -> Result<ConnectOutcome, Error> {
        let started_at = Instant::now();
        loop {
            if let Some(outcome) = self.try_reserve_shared_stream().await? {
                return Ok(outcome);
            }
            let waited = http2::FREE_STREAM_TIMEOUT;
            let freed = timeout_at(started_at + waited, self.wait_for_free_stream()).await;
            freed.map_err(|_| Error::NoFreeStream {
                addr: self.addr,
                waited,
                may_be_processed: false,
            })?;
        }
    }

    /// Reserves a stream on a shared HTTP/2 connection. If no stream is free, dials a connection, or returns `None` if no connection
    /// can be added.
    async fn try_reserve_shared_stream(&self) -> Result<Option<ConnectOutcome>, Error> {
        let n_failed_before = self.failed_dials.lock().count;
        let _dial_guard = self.dial_lock.lock().await;
        if let Some(outcome) = self.existing_http2() {
            return Ok(Some(outcome)); // another request has dialled in the meantime
        }
        let FailedDials {
            count: n_failed,
            last_cause: cause,
        } = *self.failed_dials.lock();
        if n_failed != n_failed_before {
            // The dial that this request waited for has failed.
            return Err(Error::DialFailed { addr: self.addr, cause });
        }
        if !self.can_add_http2_connection() {
            return Ok(None);
        }
        self.dial_http2().await.map(Some)
    }

    /// Waits until a stream may be free or another connection can be dialled.
    async fn wait_for_free_stream(&self) {
        let waiting = self.stream_waiters.enter();
        let mut freed = pin!(waiting.freed());
        // Enabled before the check, so that no notification is lost in between.
        freed.as_mut().enable();
        let is_free = self.http2.lock().iter().any(http2::SharedConnection::has_free_stream);
        if !is_free && !self.can_add_http2_connection() {
            freed.await;
        }
    }

    async fn dial_http2(&self) -> Result<ConnectOutcome, Error> {
        let dialled = {
            let _dialling = DialGuard::start(&self.dial_started_at);
            match (self.connect)(HttpVersion::Http2).await {
                Ok(io) => http2::connect(io, &self.http2_config, &self.stream_waiters, self.checks.clone()).await,
                Err(error) => Err(error),
            }
        };
        let mut shared = dialled.inspect_err(|error| {
            let mut failed = self.failed_dials.lock();
            (failed.count, failed.last_cause) = (failed.count + 1, error.cause());
        })?;
        if shared.is_closed() {
            return Err(Error::ConnectionClosed {
                addr: self.addr,
                reused: false,
                may_be_processed: false,
            });
        }
        let sender = shared.sender();
        self.http2.lock().push(shared);
        Ok(ConnectOutcome::Http2(sender))
    }

    /// Takes the request out of `req` and sends it on a connection of this client. Interim responses go to `interims`.
    ///
    /// # Errors
    /// The request gets no response head. [`Error::resendable`] says whether it can be sent again.
    pub(crate) async fn send(
        &self,
        outcome: ConnectOutcome,
        req: &mut Request<Body>,
        interims: Option<&SharedInterimSink>,
    ) -> Result<Response<Body>, Error> {
        match outcome {
            ConnectOutcome::Http1(connection, pool) => {
                let mut exchange = connection.send(req, self.addr, pool, interims.cloned());
                match exchange.head().await {
                    Ok(head) => Ok(exchange.into_response(head)),
                    // Boxed: rare, and much larger than the rest of this future.
                    Err(head_error) => Box::pin(self.resend(exchange, head_error)).await,
                }
            }
            ConnectOutcome::Http2(send) => http2::send(send, req, self.addr, interims).await,
            ConnectOutcome::ExtendedConnect(sender) => {
                Box::pin(self.send_extended_connect(*sender, req, interims)).await
            }
            ConnectOutcome::NoExtendedConnectStream => Err(Error::NoExtendedConnectStream { addr: self.addr }),
        }
    }

    /// Sends an extended CONNECT. If it fails and can be sent again, for example because the connection has just closed or the
    /// stream was refused, an HTTP/1 upgrade request is sent on a new HTTP/1 connection.
    async fn send_extended_connect(
        &self,
        sender: http2::ExtendedConnectSender,
        req: &mut Request<Body>,
        interims: Option<&SharedInterimSink>,
    ) -> Result<Response<Body>, Error> {
        if req.version() == Version::HTTP_2 {
            return http2::send_extended_connect(sender, std::mem::take(req), self.addr, interims).await;
        }
        let connect = http1_over_http2::to_extended_connect(req)?;
        match http2::send_extended_connect(sender, connect, self.addr, interims).await {
            Ok(mut rsp) => {
                if websocket::is_tunnel_response(&rsp) {
                    websocket::set_handshake_response(req, &mut rsp);
                } else {
                    http1_over_http2::response_to_http1(&mut rsp);
                }
                Ok(rsp)
            }
            Err(error) if !self.can_resend(&error) => Err(error),
            Err(error) => {
                let io = (self.connect)(HttpVersion::Http1).await;
                let io = io.map_err(|dial_error| self.reconnect_error(&error, dial_error))?;
                let mut exchange = http1::ClientConnection::new(io).send(req, self.addr, None, interims.cloned());
                match exchange.head().await {
                    Ok(head) => Ok(exchange.into_response(head)),
                    Err(head_error) => Err(exchange.into_failure(head_error, self.resend_policy()).await.error),
                }
            }
        }
    }

    /// Whether a WebSocket handshake that failed with `error` can be sent again. It is a GET request.
    fn can_resend(&self, error: &Error) -> bool {
        match error.resendable() {
            Resendable::Always => true,
            Resendable::IfIdempotent => self.resend_policy().allows(&Method::GET),
            Resendable::Never => false,
        }
    }

    /// Sends a request again to this endpoint if [`Exchange::into_failure`] permits it. Otherwise returns an error, which says
    /// whether another endpoint can get the request.
    async fn resend(&self, exchange: Exchange, head_error: ResponseHeadError) -> Result<Response<Body>, Error> {
        let pool = exchange.pool();
        let FailedExchange { error, request } = exchange.into_failure(head_error, self.resend_policy()).await;
        match request {
            None => Err(error),
            Some(request) if request.target == ResendTarget::SameEndpoint => {
                self.reconnect_and_resend(request, error, pool).await
            }
            Some(request) => Err(self.error_after_port_check(request, error).await),
        }
    }

    /// If the port is closed, and the request was discarded or the connection was reset, returns an error that permits a resend
    /// to another endpoint; otherwise returns `error`. Dials only to learn whether the application still listens; the
    /// connection is not used.
    async fn error_after_port_check(&self, mut request: ResendableRequest, error: Error) -> Error {
        match (self.connect)(HttpVersion::Http1).await {
            Err(dial_error) if dial_error.is_connection_refused() && request.was_discarded_or_reset().await => {
                self.reconnect_error(&error, dial_error)
            }
            Ok(_) | Err(_) => error,
        }
    }

    /// Sends a request that failed with `error` on a new connection.
    async fn reconnect_and_resend(
        &self,
        request: ResendableRequest,
        error: Error,
        pool: Option<Arc<ConnectionPool>>,
    ) -> Result<Response<Body>, Error> {
        let io = (self.connect)(HttpVersion::Http1).await;
        let io = io.map_err(|dial_error| self.reconnect_error(&error, dial_error))?;
        let mut exchange = http1::ClientConnection::new(io).resend(request, self.addr, pool);
        match exchange.head().await {
            Ok(head) => Ok(exchange.into_response(head)),
            Err(head_error) => Err(exchange.into_failure(head_error, self.resend_policy()).await.error),
        }
    }

    /// The error of a request that failed with `error` and whose next dial failed with `dial_error`.
    fn reconnect_error(&self, error: &Error, dial_error: Error) -> Error {
        match error.resendable() {
            Resendable::Always => dial_error,
            Resendable::IfIdempotent | Resendable::Never => Error::ReconnectFailed {
                addr: self.addr,
                cause: dial_error.cause(),
            },
        }
    }
}

/// Marks a dial as in progress until it ends or is cancelled.
struct DialGuard<'a>(&'a Mutex<Option<Instant>>);

impl<'a> DialGuard<'a> {
    fn start(started_at: &'a Mutex<Option<Instant>>) -> Self {
        *started_at.lock() = Some(Instant::now());
        Self(started_at)
    }
}

impl Drop for DialGuard<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::{
        io,
        sync::atomic::{AtomicU64, Ordering},
    };

    use bytes::Bytes;
    use http::Request;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::net::connect::ConnectError;
    use crate::net::io::Tcp;

    /// A client with at most one idle connection.
    fn new_client(addr: SocketAddr, connect: ConnectFn, idle_timeout_secs: u64) -> EndpointClient {
        let pool = PoolConfig {
            idle_timeout: Duration::from_secs(idle_timeout_secs),
            max_idle: 1,
            resend: ResendPolicy::IdempotentMethods,
        };
        EndpointClient::new(addr, connect, Http2Config::default(), None, pool)
    }

    fn connect_to(addr: SocketAddr) -> ConnectFn {
        Box::new(move |_| Box::pin(async move { Ok(Io::tcp(Tcp::new(TcpStream::connect(addr).await.unwrap()))) }))
    }

    /// Sends a POST to an application that handles its first connection with `close`. Returns the result, and whether the
    /// request arrived on a second connection. The second dial fails with `dial_error`, if there is one.
    async fn send_post(
        close: impl AsyncFnOnce(TcpStream),
        dial_error: impl Fn(SocketAddr) -> Option<ConnectError> + Send + Sync + 'static,
    ) -> (Result<Response<Body>, Error>, bool) {
        let post = Request::post("/").body(Body::full(Bytes::from_static(b"a body")));
        send_request(post.unwrap(), close, dial_error).await
    }

    async fn send_request(
        mut req: Request<Body>,
        close: impl AsyncFnOnce(TcpStream),
        dial_error: impl Fn(SocketAddr) -> Option<ConnectError> + Send + Sync + 'static,
    ) -> (Result<Response<Body>, Error>, bool) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let dials = AtomicU64::new(0);
        let connect: ConnectFn = Box::new(move |_| {
            let is_first = dials.fetch_add(1, Ordering::Relaxed) == 0;
            let failed = dial_error(addr).filter(|_| !is_first).map(Error::from_connect);
            Box::pin(async move {
                match failed {
                    Some(failed) => Err(failed),
                    None => Ok(Io::tcp(Tcp::new(TcpStream::connect(addr).await.unwrap()))),
                }
            })
        });
        let client = new_client(addr, connect, 1);
        let outcome = client
            .connection(HttpVersion::Http1, ConnectionUse::Pooled)
            .await
            .unwrap();
        let (application, _) = listener.accept().await.unwrap();
        let mut is_resent = false;
        let sent = {
            let close_and_answer = async {
                close(application).await;
                loop {
                    let (mut second, _) = listener.accept().await.unwrap();
                    is_resent |= second.read(&mut [0; 1024]).await.is_ok_and(|n| n > 0);
                    // Fails if the client only checked whether the port is open.
                    let _ = second.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
                }
            };
            tokio::select! {
                biased; // an application that closes immediately does so before the request is sent
                () = close_and_answer => unreachable!(),
                sent = client.send(outcome, &mut req, None) => sent,
            }
        };
        (sent, is_resent)
    }

    /// Whether the request can be sent to another endpoint after the second dial failed with `dial_error`.
    async fn resendable_when_redial_fails(
        close: impl AsyncFnOnce(TcpStream),
        dial_error: impl Fn(SocketAddr) -> ConnectError + Send + Sync + 'static,
    ) -> Resendable {
        send_post(close, move |addr| Some(dial_error(addr)))
            .await
            .0
            .unwrap_err()
            .resendable()
    }

    fn refused(addr: SocketAddr) -> ConnectError {
        let source = io::ErrorKind::ConnectionRefused.into();
        ConnectError::Io { addr, source }
    }

    fn timed_out(addr: SocketAddr) -> ConnectError {
        let limit = Duration::from_secs(1);
        ConnectError::Timeout { addr, limit }
    }

    /// Closes with unread data, so that the kernel sends a reset.
    async fn reset(application: TcpStream) {
        application.peek(&mut [0]).await.unwrap();
    }

    /// Sends a FIN, and later a reset, as an application on a busy machine does.
    async fn reset_after_fin(mut application: TcpStream) {
        application.peek(&mut [0]).await.unwrap();
        application.shutdown().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    async fn read(application: &mut TcpStream, end: &[u8]) {
        let mut request = Vec::new();
        while !request.ends_with(end) {
            application.read_buf(&mut request).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_request_that_was_reset_may_have_been_processed() {
        let out_of_files = |addr| ConnectError::Io {
            addr,
            source: nix::Error::EMFILE.into(),
        };
        let after_read = async |mut application: TcpStream| {
            read(&mut application, b"a body").await;
            application.set_zero_linger().unwrap();
        };
        let after_fin = reset_after_fin;
        for dial_error in [refused, timed_out, out_of_files] {
            for resendable in [
                resendable_when_redial_fails(reset, dial_error).await,
                resendable_when_redial_fails(after_fin, dial_error).await,
                resendable_when_redial_fails(after_read, dial_error).await,
            ] {
                assert_eq!(resendable, Resendable::Never);
            }
        }
    }

    #[tokio::test]
    async fn a_request_that_was_read_is_not_sent_again() {
        let close_after_read = async |mut application: TcpStream| read(&mut application, b"a body").await;
        let reset_after_read = async |mut application: TcpStream| {
            read(&mut application, b"a body").await;
            application.shutdown().await.unwrap();
            application.set_zero_linger().unwrap();
        };
        let fin_after_part = async |mut application: TcpStream| {
            application.read_exact(&mut [0; 32]).await.unwrap();
            application.shutdown().await.unwrap();
        };
        for (sent, is_resent) in [
            send_post(close_after_read, |_| None).await,
            send_post(reset_after_read, |_| None).await,
            send_post(fin_after_part, |_| None).await,
            send_post(reset_after_fin, |_| None).await,
        ] {
            assert!(
                matches!(sent, Err(Error::ConnectionClosed { .. })) && !is_resent,
                "{sent:?}"
            );
        }
        let resendable = resendable_when_redial_fails(close_after_read, refused).await;
        assert_ne!(resendable, Resendable::Always);
    }

    /// The application closes the connection before the request, and this proxy has not noticed yet.
    #[tokio::test]
    async fn a_request_sent_after_the_server_closed_is_resent() {
        let closed = async |application: TcpStream| drop(application);
        let (sent, is_resent) = send_post(closed, |_| None).await;
        assert!(sent.is_ok() && is_resent, "{sent:?}");
        assert_eq!(resendable_when_redial_fails(closed, refused).await, Resendable::Always);
    }

    #[tokio::test]
    async fn an_idempotent_request_goes_to_another_endpoint_when_the_port_is_closed() {
        let get = || Request::get("/").body(Body::empty()).unwrap();
        let reset = async |mut application: TcpStream| {
            read(&mut application, b"\r\n\r\n").await;
            application.set_zero_linger().unwrap();
        };
        let (sent, _) = send_request(get(), reset, |addr| Some(refused(addr))).await;
        let error = sent.unwrap_err();
        assert_eq!(error.resendable(), Resendable::IfIdempotent);
        assert_eq!(error.cause_header(), "connection-closed; then=connect-refused");
        // While the port is open, the request itself may make the application close its connections.
        let (sent, is_resent) = send_request(get(), reset, |_| None).await;
        assert!(!is_resent);
        assert_eq!(sent.unwrap_err().resendable(), Resendable::Never);
    }

    #[tokio::test]
    async fn an_idle_connection_is_reused_until_shortly_before_the_keep_alive_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let client = new_client(addr, connect_to(addr), 60);
        let send_get = async || {
            let outcome = client
                .connection(HttpVersion::Http1, ConnectionUse::Pooled)
                .await
                .unwrap();
            let mut get = Request::get("/").body(Body::empty()).unwrap();
            let (sent, server) = tokio::join!(client.send(outcome, &mut get, None), async {
                let (mut server, _) = listener.accept().await.unwrap();
                let head = b"HTTP/1.1 204 No Content\r\nkeep-alive: timeout=40\r\n\r\n";
                server.write_all(head).await.unwrap();
                server
            });
            assert_eq!(sent.unwrap().status(), 204);
            server
        };
        for (idle, is_open) in [(30, true), (39, false)] {
            let _server = send_get().await;
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(idle)).await;
            let open = client
                .existing_connection(HttpVersion::Http1, ConnectionUse::Pooled)
                .await;
            assert_eq!(open.is_some(), is_open, "{idle} s");
            tokio::time::resume();
        }
    }

    #[tokio::test]
    async fn a_dial_without_waiters_is_cancelled() {
        let addr = ([127, 0, 0, 1], 1).into();
        let connect: ConnectFn = Box::new(|_| Box::pin(std::future::pending()));
        let client = new_client(addr, connect, 1);
        {
            let mut dial = pin!(client.dial(HttpVersion::Http2, ConnectionUse::Pooled));
            assert!(futures_util::poll!(&mut dial).is_pending());
            assert!(client.dial_started_at().is_some());
        }
        assert!(client.dial_started_at().is_none());
    }

    #[tokio::test]
    async fn a_request_that_waits_for_settings_is_not_counted_as_a_stream() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let client = new_client(addr, connect_to(addr), 1);
        // The server sends no settings.
        let mut waiting = pin!(client.connection(HttpVersion::Http2, ConnectionUse::ExtendedConnect));
        while client.http2.lock().is_empty() {
            assert!(futures_util::poll!(&mut waiting).is_pending());
            tokio::task::yield_now().await;
        }
        assert!(futures_util::poll!(&mut waiting).is_pending());
        assert_eq!(client.http2.lock()[0].n_streams(), 0);
    }

    /// Starts an HTTP/2 server, and returns a client of it.
    async fn http2_client(server: &h2::server::Builder) -> EndpointClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = server.clone();
                tokio::spawn(async move {
                    if let Ok(mut connection) = server.handshake::<_, Bytes>(stream).await {
                        while connection.accept().await.is_some() {}
                    }
                });
            }
        });
        new_client(addr, connect_to(addr), 1)
    }

    /// The outcomes for a WebSocket handshake and an extended CONNECT request to an HTTP/2 server.
    async fn extended_connect_outcomes(server: &h2::server::Builder) -> [ConnectOutcome; 2] {
        let client = http2_client(server).await;
        let connection_use = ConnectionUse::ExtendedConnect;
        let connect = async |version| client.connection(version, connection_use).await.unwrap();
        [connect(HttpVersion::Http1).await, connect(HttpVersion::Http2).await]
    }

    #[tokio::test]
    async fn a_websocket_does_not_wait_for_a_free_stream() {
        let mut server = h2::server::Builder::new();
        server.enable_connect_protocol().max_concurrent_streams(0);
        let client = http2_client(&server).await;
        let connect_websocket = async || {
            let outcome = client
                .connection(HttpVersion::Http1, ConnectionUse::ExtendedConnect)
                .await;
            assert!(matches!(outcome, Ok(ConnectOutcome::Http1(_, None))));
        };
        connect_websocket().await; // dials the connection whose settings permit no stream
        tokio::time::pause();
        let started_at = Instant::now();
        connect_websocket().await;
        assert!(started_at.elapsed().is_zero());
    }

    #[tokio::test]
    async fn extended_connect_is_used_if_the_peer_supports_it_and_has_free_streams() {
        use ConnectOutcome::{ExtendedConnect, Http1, NoExtendedConnectStream};

        let mut server = h2::server::Builder::new();
        let connections = extended_connect_outcomes(&server).await;
        assert!(matches!(connections, [Http1(_, None), NoExtendedConnectStream]));
        server.enable_connect_protocol();
        let connections = extended_connect_outcomes(&server).await;
        assert!(matches!(connections, [ExtendedConnect(_), ExtendedConnect(_)]));
        server.max_concurrent_streams(4);
        let connections = extended_connect_outcomes(&server).await;
        assert!(matches!(connections, [ExtendedConnect(_), ExtendedConnect(_)]));
        server.max_concurrent_streams(2);
        let connections = extended_connect_outcomes(&server).await;
        assert!(matches!(connections, [ExtendedConnect(_), NoExtendedConnectStream]));
        server.max_concurrent_streams(1);
        let connections = extended_connect_outcomes(&server).await;
        assert!(matches!(connections, [Http1(_, None), NoExtendedConnectStream]));
    }
}
