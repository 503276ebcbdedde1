//! One client per endpoint and worker: HTTP/1 from a pool, HTTP/2 on one shared connection, dialled once for all who
//! wait.

use std::{
    future::Future,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use http::{Method, Request, Response, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout_at};

use crate::{
    http::{
        body::Body,
        error::{Error, Retry},
        h1::{
            client::{self as http1, Exchange, Failed, NoHead, SendAgainTo},
            pool::{Pool, Resend},
        },
        h2::{Params, client as http2, windows::Waiters},
        orig_proto, websocket,
    },
    net::{awaited::Answer, io::Io},
};

/// Opens a connection to the endpoint for one HTTP version; boxed once a connection, not once a request.
pub(crate) type Connect =
    Box<dyn Fn(Protocol) -> Pin<Box<dyn Future<Output = Result<Io, Error>> + Send>> + Send + Sync>;

/// The HTTP version spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

/// Connections of one worker to one endpoint.
pub(crate) struct Client {
    addr: SocketAddr,
    connect: Connect,
    /// More than one where the peer permits fewer streams than there are requests.
    http2: Mutex<SmallVec<[http2::Shared; 1]>>,
    /// Who waits for a free stream.
    waiters: Arc<Waiters>,
    /// Held while dialling, so that others wait for the same connection.
    dialling: tokio::sync::Mutex<()>,
    dialled_since: Mutex<Option<Instant>>,
    /// Who waited for a dial shares its failure.
    failed: Mutex<FailedDials>,
    params: Params,
    pool: Arc<Pool>,
}

#[derive(Clone, Copy, Default)]
struct FailedDials {
    n: u64,
    /// Of the last one.
    cause: &'static str,
}

/// How HTTP/1 connections are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolConfig {
    pub(crate) idle_timeout: Duration,
    pub(crate) max_idle: usize,
    pub(crate) resend: Resend,
}

/// HTTP/2 connections of one worker to one endpoint at most.
const MAX_HTTP2_CONNECTIONS: usize = 64;

/// A connection that can take a request now.
pub(crate) enum Ready {
    Http1(http1::Connection, Option<Arc<Pool>>),
    Http2(http2::Sender),
    /// For a stream that carries another protocol.
    Stream(Box<http2::Shared>),
    /// Who is there takes no such streams.
    NoStream,
}

/// Whether an HTTP/1 connection may be used for other requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    Pooled,
    /// Upgrades, HTTP/1.0, and the second try after a reused connection turned out to be closed.
    OwnConnection,
    /// What a stream of the shared connection is to carry, where the peer has said that it takes such; HTTP/1 has a connection
    /// of its own otherwise.
    OwnStream,
}

impl Client {
    pub(crate) fn new(addr: SocketAddr, connect: Connect, params: Params, pool: PoolConfig) -> Self {
        Self {
            addr,
            connect,
            http2: Mutex::default(),
            waiters: Arc::default(),
            dialling: tokio::sync::Mutex::new(()),
            dialled_since: Mutex::new(None),
            failed: Mutex::default(),
            params,
            pool: Pool::new(pool.idle_timeout, pool.max_idle, pool.resend),
        }
    }

    /// Which requests may be sent again that may have been processed.
    pub(crate) fn resend(&self) -> Resend {
        self.pool.resend
    }

    /// A connection for one request: an open one where there is one.
    ///
    /// # Errors
    /// As [`Client::dial`].
    pub(crate) async fn ready(&self, protocol: Protocol, reuse: Reuse) -> Result<Ready, Error> {
        match self.open(protocol, reuse).await {
            Some(ready) => Ok(ready),
            // Rare: the first request, or the connection ended.
            None => Box::pin(self.dial(protocol, reuse)).await,
        }
    }

    /// An open connection, if there is one that this request may use.
    pub(crate) async fn open(&self, protocol: Protocol, reuse: Reuse) -> Option<Ready> {
        match (protocol, reuse) {
            (_, Reuse::OwnStream) => Box::pin(self.open_stream()).await,
            (Protocol::Http1, Reuse::OwnConnection) => None,
            (Protocol::Http1, Reuse::Pooled) => Some(Ready::Http1(self.pool.take()?, Some(self.pool.clone()))),
            (Protocol::Http2, _) => self.open_http2(),
        }
    }

    /// A place on the first HTTP/2 connection that has a free stream. Connections that have ended are left, and a further one that
    /// is not needed any more.
    fn open_http2(&self) -> Option<Ready> {
        let mut connections = self.http2.lock();
        let mut index = 0;
        while let Some(connection) = connections.get_mut(index) {
            if connection.is_over() {
                connections.remove(index);
                continue;
            }
            if connection.has_room() {
                if index > 0 {
                    connection.use_beside_others();
                }
                let sender = connection.sender();
                if index + 1 < connections.len() && connections.last().is_some_and(http2::Shared::is_spare) {
                    connections.pop();
                }
                return Some(Ready::Http2(sender));
            }
            index += 1;
        }
        None
    }

    /// Whether another HTTP/2 connection would help, and is permitted: not while a peer has not told how many streams it permits, or
    /// permits none.
    fn needs_http2(&self) -> bool {
        let connections = self.http2.lock();
        let is_full = |connection: &http2::Shared| !connection.is_untold() && connection.n_streams() > 0;
        connections.len() < MAX_HTTP2_CONNECTIONS && connections.iter().all(is_full)
    }

    /// The first shared connection whose peer takes another stream for another protocol.
    async fn open_stream(&self) -> Option<Ready> {
        let connections = self.http2.lock().clone();
        for mut connection in connections {
            if connection.takes_stream().await && !connection.is_over() {
                return Some(Ready::Stream(Box::new(connection)));
            }
        }
        None
    }

    /// Whether there is a connection that requests can share, as far as is known.
    pub(crate) fn is_shared(&self) -> bool {
        !self.http2.lock().is_empty()
    }

    /// A new connection; one of HTTP/2 is shared by all who ask for it meanwhile.
    ///
    /// # Errors
    /// Dialling or the handshake failed. Nothing of the request has been sent.
    pub(crate) async fn dial(&self, protocol: Protocol, reuse: Reuse) -> Result<Ready, Error> {
        if reuse == Reuse::OwnStream {
            self.dial_http2().await?;
            match self.open_stream().await {
                Some(ready) => return Ok(ready),
                None if protocol == Protocol::Http2 => return Ok(Ready::NoStream),
                None => {}
            }
        } else if protocol == Protocol::Http2 {
            return self.dial_http2().await;
        }
        let connection = http1::Connection::new((self.connect)(Protocol::Http1).await?);
        let pool = (reuse == Reuse::Pooled).then(|| self.pool.clone());
        Ok(Ready::Http1(connection, pool))
    }

    /// Keeps a connection that nobody has used.
    pub(crate) fn keep(&self, ready: Ready) {
        if let Ready::Http1(connection, Some(pool)) = ready {
            connection.keep(&pool);
        }
    }

    /// When the dial began that is under way for all who wait for HTTP/2.
    pub(crate) fn dialled_since(&self) -> Option<Instant> {
        *self.dialled_since.lock()
    }

    /// A place on an HTTP/2 connection: on a new one, or where there may be no more, on the first that has a free stream.
    async fn dial_http2(&self) -> Result<Ready, Error> {
        let begun = Instant::now();
        loop {
            let failed_before = self.failed.lock().n;
            {
                let _turn = self.dialling.lock().await;
                if let Some(ready) = self.open_http2() {
                    return Ok(ready); // somebody else dialled meanwhile
                }
                let FailedDials { n, cause } = *self.failed.lock();
                if n != failed_before {
                    // So did the dial that this request waited for.
                    return Err(Error::DialFailed { addr: self.addr, cause });
                }
                if self.needs_http2() {
                    return self.connect_http2().await;
                }
            }
            let (addr, limit) = (self.addr, http2::STREAM_TIMEOUT);
            let waited = timeout_at(begun + limit, self.stream_is_free()).await;
            let sent = false;
            waited.map_err(|_| Error::NoFreeStream { addr, limit, sent })?;
        }
    }

    /// Waits until a connection may have a free stream, or another one may be dialled.
    async fn stream_is_free(&self) {
        let waiting = self.waiters.enter();
        let mut freed = pin!(waiting.freed());
        // Listening starts before looking, so that nothing that happens between the two is missed.
        freed.as_mut().enable();
        let is_free = self.http2.lock().iter().any(http2::Shared::has_room);
        if !is_free && !self.needs_http2() {
            freed.await;
        }
    }

    async fn connect_http2(&self) -> Result<Ready, Error> {
        let dialled = {
            let _dialling = Dialling::begin(&self.dialled_since);
            match (self.connect)(Protocol::Http2).await {
                Ok(io) => http2::connect(io, &self.params, &self.waiters).await,
                Err(error) => Err(error),
            }
        };
        let mut shared = dialled.inspect_err(|error| {
            let mut failed = self.failed.lock();
            (failed.n, failed.cause) = (failed.n + 1, error.cause());
        })?;
        if shared.is_over() {
            return Err(Error::Closed {
                addr: self.addr,
                reused: false,
                sent: false,
            });
        }
        let sender = shared.sender();
        self.http2.lock().push(shared);
        Ok(Ready::Http2(sender))
    }

    /// Sends a request, which is taken out of `req`, on a connection of this client.
    ///
    /// # Errors
    /// See [`Error::retry`] for what may be tried again.
    pub(crate) async fn send(&self, ready: Ready, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        let answer = Answer::awaited();
        let answered = match ready {
            Ready::Http1(connection, pool) => {
                let mut exchange = connection.send(req, self.addr, pool);
                match exchange.head().await {
                    Ok(head) => Ok(exchange.response(head)),
                    // Rare, and much larger than the rest.
                    Err(why) => Box::pin(self.send_again(exchange, why)).await,
                }
            }
            Ready::Http2(send) => http2::send(send, req, self.addr).await,
            Ready::Stream(shared) => Box::pin(self.send_extended(*shared, req)).await,
            Ready::NoStream => Err(Error::NoStream { addr: self.addr }),
        };
        answer.pass_on().await;
        answered
    }

    /// Asks for a stream that carries another protocol. HTTP/1 that asks for a WebSocket gets a connection of its own where the
    /// shared one has just ended.
    async fn send_extended(&self, shared: http2::Shared, req: &mut Request<Body>) -> Result<Response<Body>, Error> {
        if req.version() == Version::HTTP_2 {
            return http2::extend(shared, std::mem::take(req), self.addr).await;
        }
        match http2::extend(shared, websocket::carried(req)?, self.addr).await {
            Ok(mut rsp) => {
                if websocket::opens_stream(&rsp) {
                    websocket::granted(req, &mut rsp);
                } else {
                    orig_proto::downgrade(&mut rsp);
                }
                Ok(rsp)
            }
            Err(error) if !self.may_send_again(&error) => Err(error),
            Err(error) => {
                let io = (self.connect)(Protocol::Http1).await;
                let io = io.map_err(|failed| self.gone(&error, failed))?;
                let mut exchange = http1::Connection::new(io).send(req, self.addr, None);
                match exchange.head().await {
                    Ok(head) => Ok(exchange.response(head)),
                    Err(why) => Err(exchange.failed(why, self.resend()).await.error),
                }
            }
        }
    }

    /// Whether a WebSocket may be asked for again: a GET, which may have been processed.
    fn may_send_again(&self, error: &Error) -> bool {
        match error.retry() {
            Retry::NeverSent => true,
            Retry::IfIdempotent => self.resend().permits(&Method::GET),
            Retry::No => false,
        }
    }

    /// Sends a request once more that nobody has read, or that may be processed twice.
    async fn send_again(&self, exchange: Exchange, why: NoHead) -> Result<Response<Body>, Error> {
        let pool = exchange.pool();
        let Failed { error, again } = exchange.failed(why, self.resend()).await;
        let Some(mut again) = again else { return Err(error) };
        let io = match ((self.connect)(Protocol::Http1).await, again.to) {
            (Ok(io), SendAgainTo::Whoever) => io,
            (Err(failed), SendAgainTo::Whoever) => return Err(self.gone(&error, failed)),
            (Err(failed), SendAgainTo::Another) if failed.is_refusal() && again.is_thrown_away().await => {
                return Err(self.gone(&error, failed));
            }
            (Ok(_) | Err(_), SendAgainTo::Another) => return Err(error),
        };
        let mut exchange = http1::Connection::new(io).send_again(again, self.addr, pool);
        match exchange.head().await {
            Ok(head) => Ok(exchange.response(head)),
            Err(why) => Err(exchange.failed(why, self.resend()).await.error),
        }
    }

    /// Why a request was not sent again after `error`, where a connection for it could not be had.
    fn gone(&self, error: &Error, dial: Error) -> Error {
        match error.retry() {
            Retry::NeverSent => dial,
            Retry::IfIdempotent | Retry::No => Error::Gone {
                addr: self.addr,
                cause: dial.cause(),
            },
        }
    }
}

/// A dial that is under way, until it has ended or nobody waits for it any more.
struct Dialling<'a>(&'a Mutex<Option<Instant>>);

impl<'a> Dialling<'a> {
    fn begin(since: &'a Mutex<Option<Instant>>) -> Self {
        *since.lock() = Some(Instant::now());
        Self(since)
    }
}

impl Drop for Dialling<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
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

    /// What becomes of a request to an application that does this with its connection, and whether it came on a second one.
    /// Where there is no error for a second dial, the application listens still.
    async fn ended(
        end: impl AsyncFnOnce(TcpStream),
        again: impl Fn(SocketAddr) -> Option<ConnectError> + Send + Sync + 'static,
    ) -> (Result<Response<Body>, Error>, bool) {
        let post = Request::post("/").body(Body::full(Bytes::from_static(b"a body")));
        asked(post.unwrap(), end, again).await
    }

    async fn asked(
        mut req: Request<Body>,
        end: impl AsyncFnOnce(TcpStream),
        again: impl Fn(SocketAddr) -> Option<ConnectError> + Send + Sync + 'static,
    ) -> (Result<Response<Body>, Error>, bool) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let dials = AtomicU64::new(0);
        let connect: Connect = Box::new(move |_| {
            let is_first = dials.fetch_add(1, Ordering::Relaxed) == 0;
            let failed = again(addr).filter(|_| !is_first).map(Error::connect);
            Box::pin(async move {
                match failed {
                    Some(failed) => Err(failed),
                    None => Ok(Io::tcp(Tcp::new(TcpStream::connect(addr).await.unwrap()))),
                }
            })
        });
        let pool = PoolConfig {
            idle_timeout: Duration::from_secs(1),
            max_idle: 1,
            resend: Resend::Idempotent,
        };
        let client = Client::new(addr, connect, Params::default(), pool);
        let ready = client.ready(Protocol::Http1, Reuse::Pooled).await.unwrap();
        let (application, _) = listener.accept().await.unwrap();
        let mut twice = false;
        let sent = {
            let end_and_answer = async {
                end(application).await;
                loop {
                    let (mut second, _) = listener.accept().await.unwrap();
                    twice |= second.read(&mut [0; 1024]).await.is_ok_and(|n| n > 0);
                    // Who only asked whether somebody listens is gone.
                    let _ = second.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
                }
            };
            tokio::select! {
                biased; // what ends at once ends before
                () = end_and_answer => unreachable!(),
                sent = client.send(ready, &mut req) => sent,
            }
        };
        (sent, twice)
    }

    /// Whether it may be sent to another endpoint, where the second dial fails with this.
    async fn retry_where(
        end: impl AsyncFnOnce(TcpStream),
        again: impl Fn(SocketAddr) -> ConnectError + Send + Sync + 'static,
    ) -> Retry {
        ended(end, move |addr| Some(again(addr))).await.0.unwrap_err().retry()
    }

    fn refused(addr: SocketAddr) -> ConnectError {
        let source = io::ErrorKind::ConnectionRefused.into();
        ConnectError::Io { addr, source }
    }

    fn timed_out(addr: SocketAddr) -> ConnectError {
        let limit = Duration::from_secs(1);
        ConnectError::Timeout { addr, limit }
    }

    /// With the request unread.
    async fn reset(application: TcpStream) {
        application.peek(&mut [0]).await.unwrap();
    }

    /// As on a machine with more to do than processors, where whoever is told of the end runs before who has ended.
    async fn reset_a_while_after_the_end(mut application: TcpStream) {
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
        let after_it_was_read = async |mut application: TcpStream| {
            read(&mut application, b"a body").await;
            application.set_zero_linger().unwrap();
        };
        let late = reset_a_while_after_the_end;
        for again in [refused, timed_out, out_of_files] {
            for retry in [
                retry_where(reset, again).await,
                retry_where(late, again).await,
                retry_where(after_it_was_read, again).await,
            ] {
                assert_eq!(retry, Retry::No);
            }
        }
    }

    #[tokio::test]
    async fn a_request_that_was_read_is_not_sent_again() {
        let whole = async |mut application: TcpStream| read(&mut application, b"a body").await;
        let to_a_reset = async |mut application: TcpStream| {
            read(&mut application, b"a body").await;
            application.shutdown().await.unwrap();
            application.set_zero_linger().unwrap();
        };
        let to_its_middle = async |mut application: TcpStream| {
            application.read_exact(&mut [0; 32]).await.unwrap();
            application.shutdown().await.unwrap();
        };
        for (sent, twice) in [
            ended(whole, |_| None).await,
            ended(to_a_reset, |_| None).await,
            ended(to_its_middle, |_| None).await,
            ended(reset_a_while_after_the_end, |_| None).await,
        ] {
            assert!(matches!(sent, Err(Error::Closed { .. })) && !twice, "{sent:?}");
        }
        assert_ne!(retry_where(whole, refused).await, Retry::NeverSent);
    }

    /// Its application had closed the connection before, which nobody had noticed yet.
    #[tokio::test]
    async fn a_request_that_came_after_the_end_is_sent_again() {
        let closed = async |application: TcpStream| drop(application);
        let (sent, twice) = ended(closed, |_| None).await;
        assert!(sent.is_ok() && twice, "{sent:?}");
        assert_eq!(retry_where(closed, refused).await, Retry::NeverSent);
    }

    #[tokio::test]
    async fn a_request_that_may_be_processed_twice_goes_elsewhere_once_nobody_listens() {
        let get = || Request::get("/").body(Body::empty()).unwrap();
        let reset = async |mut application: TcpStream| {
            read(&mut application, b"\r\n\r\n").await;
            application.set_zero_linger().unwrap();
        };
        let (sent, _) = asked(get(), reset, |addr| Some(refused(addr))).await;
        let gone = sent.unwrap_err();
        assert_eq!(gone.retry(), Retry::IfIdempotent);
        assert_eq!(gone.told(), "connection-closed; then=connect-refused");
        // It may be the request that ends connections.
        let (sent, twice) = asked(get(), reset, |_| None).await;
        assert!(!twice);
        assert_eq!(sent.unwrap_err().retry(), Retry::No);
    }

    /// A server of HTTP/1 that says for how long it keeps connections.
    #[tokio::test]
    async fn a_connection_is_used_as_long_as_its_server_says() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let connect: Connect =
            Box::new(move |_| Box::pin(async move { Ok(Io::tcp(Tcp::new(TcpStream::connect(addr).await.unwrap()))) }));
        let pool = PoolConfig {
            idle_timeout: Duration::from_secs(60),
            max_idle: 1,
            resend: Resend::Idempotent,
        };
        let client = Client::new(addr, connect, Params::default(), pool);
        let answered = async || {
            let ready = client.ready(Protocol::Http1, Reuse::Pooled).await.unwrap();
            let mut get = Request::get("/").body(Body::empty()).unwrap();
            let (sent, server) = tokio::join!(client.send(ready, &mut get), async {
                let (mut server, _) = listener.accept().await.unwrap();
                let head = b"HTTP/1.1 204 No Content\r\nkeep-alive: timeout=40\r\n\r\n";
                server.write_all(head).await.unwrap();
                server
            });
            assert_eq!(sent.unwrap().status(), 204);
            server
        };
        for (idle, is_open) in [(30, true), (39, false)] {
            let _server = answered().await;
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(idle)).await;
            let open = client.open(Protocol::Http1, Reuse::Pooled).await;
            assert_eq!(open.is_some(), is_open, "{idle} s");
            tokio::time::resume();
        }
    }

    #[tokio::test]
    async fn a_dial_that_nobody_waits_for_any_more_is_over() {
        let addr = ([127, 0, 0, 1], 1).into();
        let connect: Connect = Box::new(|_| Box::pin(std::future::pending()));
        let pool = PoolConfig {
            idle_timeout: Duration::from_secs(1),
            max_idle: 1,
            resend: Resend::Idempotent,
        };
        let client = Client::new(addr, connect, Params::default(), pool);
        {
            let mut dial = pin!(client.dial(Protocol::Http2, Reuse::Pooled));
            assert!(futures_util::poll!(&mut dial).is_pending());
            assert!(client.dialled_since().is_some());
        }
        assert!(client.dialled_since().is_none());
    }

    /// What a server of HTTP/2 has a WebSocket, and an extended CONNECT, go by.
    async fn ready_for(server: &h2::server::Builder) -> [Ready; 2] {
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
        let connect: Connect =
            Box::new(move |_| Box::pin(async move { Ok(Io::tcp(Tcp::new(TcpStream::connect(addr).await.unwrap()))) }));
        let pool = PoolConfig {
            idle_timeout: Duration::from_secs(1),
            max_idle: 1,
            resend: Resend::Idempotent,
        };
        let client = Client::new(addr, connect, Params::default(), pool);
        let websocket = client.ready(Protocol::Http1, Reuse::OwnStream).await.unwrap();
        [
            websocket,
            client.ready(Protocol::Http2, Reuse::OwnStream).await.unwrap(),
        ]
    }

    #[tokio::test]
    async fn streams_carry_other_protocols_only_where_the_peer_takes_them_and_has_room() {
        let mut server = h2::server::Builder::new();
        assert!(matches!(
            ready_for(&server).await,
            [Ready::Http1(_, None), Ready::NoStream]
        ));
        server.enable_connect_protocol();
        assert!(matches!(ready_for(&server).await, [Ready::Stream(_), Ready::Stream(_)]));
        server.max_concurrent_streams(4);
        assert!(matches!(
            ready_for(&server).await,
            [Ready::Http1(_, None), Ready::NoStream]
        ));
    }
}
