//! Serving HTTP/1: one task a connection, one request after the other.
//!
//! The body of a request reads from the connection itself, wherever it is polled; the server does nothing with what
//! comes in until that body is at its end or gone. So bodies cross no channel, and a client is read from only as fast
//! as its body is taken.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Method, Request, Response, Version, header};
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    sync::oneshot,
    time::Instant,
};
use tower::Service;
use tulle_core::drain;

use crate::{
    http::{
        body::Body,
        error::Error,
        h1::{
            framing::{Decoded, Framing},
            head::{self, BadHead, RequestHead},
            read,
            write::{self, Afterwards, Answered, Message},
        },
        headers, interim,
        layers::Rescued,
        linger,
        respond::Asker,
        timer::Timer,
        tunnel::Leg,
    },
    net::io::Io,
};

/// How HTTP/1 clients are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Most bytes of a request head.
    pub(crate) max_head: usize,
    /// How long a head may take from its first byte on.
    pub(crate) head_timeout: Duration,
    /// How long a connection may be without a request, and a request with a body without anything that passes in either direction.
    pub(crate) idle_timeout: Duration,
}

/// A connection, shared by the server and the body of the request that it is serving.
struct Connection {
    io: Io,
    /// Read and not used yet.
    inbox: Bytes,
    /// Interim responses not written yet.
    interims: BytesMut,
    receiving: Receiving,
    /// When a part of the response was last written, while more of the request may come; until the request's body looks at it.
    wrote_at: Option<Instant>,
    /// When to look again whether a client is still there that has ended its side of the connection, and after how long then.
    look: Option<(Instant, Duration)>,
    /// Who is told that nobody reads the body any more.
    server: Option<Waker>,
    /// Of who waits for the client: the server for a request, or its body for more of it.
    timer: Timer,
}

type Shared = Arc<Mutex<Connection>>;

/// Where in a request the client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receiving {
    /// All of it has come.
    Nothing,
    Body,
    /// Its body waits for permission to be sent.
    Permission,
    /// The rest of its body is nobody's: the connection cannot carry another request.
    Abandoned,
    /// It has ended, or broken off, amid its body.
    Gone,
}

/// Why there is no further request.
enum End {
    /// The client is done, or idle for too long, or we are ending.
    Quiet,
    /// It hears why.
    Refused(Error),
    Failed(Error),
    /// The connection goes to who asked for it.
    Upgraded(oneshot::Sender<Leg>),
}

/// Serves one connection until it ends, gracefully once `drain` is signaled.
///
/// Idle connections are what there is most of, and a future is as large as the most that it ever holds: so nothing stays in
/// this one that is over, and what it is made of is not kept beside what becomes of it.
///
/// # Errors
/// The connection broke, or the client left amid a request.
pub(in crate::http) fn serve<S>(
    io: Io,
    mut service: Rescued<S>,
    config: &Config,
    drain: &drain::Watch,
) -> impl Future<Output = Result<(), Error>>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    let connection = Arc::new(Mutex::new(Connection {
        io,
        inbox: Bytes::new(),
        interims: BytesMut::new(),
        receiving: Receiving::Nothing,
        wrote_at: None,
        look: None,
        server: None,
        timer: Timer::default(),
    }));
    async move {
        let mut ending = pin!(drain.signaled());
        let end = loop {
            let mut wait = Wait {
                config,
                idle_until: None,
                head_until: None,
                seen: 0,
                is_ending: false,
            };
            let head = match poll_fn(|cx| wait.poll_head(cx, &mut connection.lock(), ending.as_mut())).await {
                Ok(head) => head,
                Err(end) => break end,
            };
            if head.target_encoded {
                service.encoded_target();
            }
            let (asked, request) = Asked::of(head, &connection, config.idle_timeout);
            let answered = {
                let mut answering = pin!(service.call(request));
                poll_fn(|cx| asked.poll_answered(cx, &connection, answering.as_mut())).await
            };
            let passed_on = match answered {
                Ok(rsp) => asked.answer(&connection, rsp, drain).await,
                Err(error) => Err(End::Failed(error)),
            };
            if let Err(end) = passed_on {
                break end;
            }
        };
        match end {
            End::Quiet => close(connection).await,
            End::Refused(error) => refuse(connection, service.refuse(&error, Asker::unknown())).await,
            End::Failed(error) => Err(error),
            End::Upgraded(client) => {
                // Its body is at its end, so nobody else has a hold on it.
                if let Some(connection) = Arc::into_inner(connection) {
                    let Connection { io, inbox, .. } = connection.into_inner();
                    // Whoever joins the two ends may be gone.
                    let _ = client.send(Leg::Connection(io.unread(inbox)));
                }
                Ok(())
            }
        }
    }
}

/// Tells a client that it is not understood, or has no answer, and leaves it. A function of its own, because what it needs
/// would otherwise be kept beside what an exchange needs, for as long as the connection.
async fn refuse(connection: Shared, rsp: Response<Body>) -> Result<(), Error> {
    connection.lock().receiving = Receiving::Abandoned;
    let (mut message, _) = write::response(rsp, UNREAD, Afterwards::Closed);
    let written = poll_fn(|cx| message.poll_write(cx, &mut Half(&connection))).await;
    written.map_err(to_client)?;
    close(connection).await
}

/// A request that the service has.
struct Asked {
    version: Version,
    method: Method,
    keep_alive: bool,
    /// Who gets the connection if it is upgraded.
    upgrade: Option<oneshot::Sender<Leg>>,
}

impl Asked {
    /// What of a request stays here, and the request as it goes to the service, with a body that goes on in time.
    fn of(head: RequestHead, connection: &Shared, idle_timeout: Duration) -> (Self, Request<Body>) {
        let RequestHead {
            request,
            framing,
            keep_alive,
            expects,
            target_encoded: _,
        } = head;
        let (version, method) = (request.version(), request.method().clone());
        let (upgrade, upgraded) = match headers::wants_upgrade(&request) {
            true => Some(oneshot::channel()).unzip(),
            false => (None, None),
        };
        let request = request.map(|()| {
            let body = match framing {
                Framing::None | Framing::Length(0) => Body::empty(),
                _ => {
                    let received = Received::new(connection, framing, expects, idle_timeout);
                    Body::h1_request(Box::new(received))
                }
            };
            match upgraded {
                Some(upgraded) => body.upgradable(upgraded),
                None => body,
            }
        });
        let asked = Self {
            version,
            method,
            keep_alive,
            upgrade,
        };
        (asked, request)
    }

    /// Who asks for no other request may end its side, which need not be looked at.
    fn may_have_left(&self) -> bool {
        self.keep_alive
    }

    /// Ready with the response, or when the client does not wait for it any more; passes on what goes before it.
    fn poll_answered(
        &self,
        cx: &mut Context<'_>,
        connection: &Shared,
        answering: Pin<&mut impl Future<Output = Result<Response<Body>, Error>>>,
    ) -> Poll<Result<Response<Body>, Error>> {
        let (polled, interims) = interim::collect(|| answering.poll(cx));
        for rsp in interims {
            connection.lock().pass_interim(cx, &rsp, self.version);
        }
        match polled {
            Poll::Ready(answered) => Poll::Ready(answered),
            Poll::Pending => connection.lock().poll_left(cx, self.may_have_left()).map(Err),
        }
    }

    /// Writes the response, and waits until the whole request has come.
    async fn answer(self, connection: &Shared, rsp: Response<Body>, drain: &drain::Watch) -> Result<(), End> {
        let upgrades = head::switches(rsp.status(), &self.method);
        let asks_to_close = rsp
            .headers()
            .get(header::CONNECTION)
            .is_some_and(|value| value == "close");
        let closes = {
            let mut connection = connection.lock();
            if connection.receiving == Receiving::Permission {
                // An application that answers well may do so while it reads what the client sends unasked; otherwise it does
                // without the body, which then does not come, or would be taken for a request.
                connection.receiving = match rsp.status().is_success() {
                    true => Receiving::Body,
                    false => Receiving::Abandoned,
                };
            }
            let is_lost = matches!(connection.receiving, Receiving::Abandoned | Receiving::Gone);
            !upgrades && (!self.keep_alive || asks_to_close || is_lost || drain.is_signaled())
        };
        let afterwards = if closes { Afterwards::Closed } else { Afterwards::Kept };
        let answered = Answered {
            version: self.version,
            method: &self.method,
        };
        let (message, afterwards) = write::response(rsp, answered, afterwards);
        let is_last = afterwards == Afterwards::Closed;
        written(connection, message, self.may_have_left(), is_last).await?;
        if upgrades {
            let upgrade = self
                .upgrade
                .filter(|_| connection.lock().receiving == Receiving::Nothing);
            return Err(upgrade.map_or(End::Quiet, End::Upgraded));
        }
        poll_fn(|cx| connection.lock().poll_received(cx)).await;
        match (afterwards, connection.lock().receiving) {
            (Afterwards::Kept, Receiving::Nothing) => Ok(()),
            _ => Err(End::Quiet),
        }
    }
}

/// Writes a response, while its client is there. If its body breaks off before any of it has left, the client hears of that.
fn written(
    connection: &Shared,
    message: Message<Body>,
    may_have_left: bool,
    mut is_last: bool,
) -> impl Future<Output = Result<(), End>> {
    let mut writing = Writing { connection, message };
    poll_fn(move |cx| {
        let message = &mut writing.message;
        let encoded = message.poll_encode(cx);
        if is_last && message.is_encoded() {
            connection.lock().cork();
            is_last = false;
        }
        let polled = match encoded {
            Poll::Ready(Err(error)) if !message.has_begun() => return Poll::Ready(Err(End::Refused(error))),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => message.poll_write(cx, &mut Half(connection)),
        };
        let written = match polled {
            Poll::Ready(written) => written,
            Poll::Pending => Err(match message.poll_late(cx) {
                Poll::Ready(late) => late,
                Poll::Pending => ready!(connection.lock().poll_left(cx, may_have_left)),
            }),
        };
        Poll::Ready(written.map_err(|error| End::Failed(to_client(error))))
    })
}

/// A response on its way, which may be given up at any time.
struct Writing<'a> {
    connection: &'a Shared,
    message: Message<Body>,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let Self { connection, message } = self;
        if message.ends_with_connection() && message.has_begun() && !message.is_done() {
            connection.lock().io.reset(); // an end would look like the body's
        }
    }
}

/// Writing a response fails for the client's reasons, unless its body does.
fn to_client(error: Error) -> Error {
    match error {
        Error::Response(source) => Error::Client(source),
        other => other,
    }
}

/// Ends a connection whose last response has been written.
async fn close(connection: Shared) -> Result<(), Error> {
    let is_done = {
        let connection = connection.lock();
        connection.receiving == Receiving::Nothing && connection.inbox.is_empty()
    };
    // A body may still be held by who has read it.
    let is_dropped_next = Arc::strong_count(&connection) == 1;
    let closed = match is_done {
        true if is_dropped_next => poll_fn(|cx| connection.lock().io.poll_goodbye(cx)).await,
        true => Half(&connection).shutdown().await,
        false => linger::close(&mut Half(&connection)).await,
    };
    closed.map_err(Error::Client)
}

/// When a client that has ended its side of the connection is looked for again: who closes a connection ends its side first.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// How often it is looked for while its response has not come.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What is written to whom we have not understood.
const UNREAD: Answered<'static> = Answered {
    version: Version::HTTP_11,
    method: &Method::GET,
};

/// The wait for a request head.
struct Wait<'a> {
    config: &'a Config,
    idle_until: Option<Instant>,
    head_until: Option<Instant>,
    /// Bytes that have been looked at.
    seen: usize,
    /// Whether we are ending.
    is_ending: bool,
}

impl Wait<'_> {
    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        connection: &mut Connection,
        ending: Pin<&mut impl Future<Output = ()>>,
    ) -> Poll<Result<RequestHead, End>> {
        let Connection { io, inbox, timer, .. } = connection;
        let broken = |error| End::Failed(Error::Client(error));
        loop {
            // Some clients end a body with an empty line that is not part of it.
            while self.seen == 0 && inbox.starts_with(b"\r\n") {
                inbox.advance(2);
            }
            if let Some(head) = self.parse(inbox).map_err(End::Refused)? {
                return Poll::Ready(Ok(head));
            }
            match read::poll_more(cx, io, inbox) {
                Poll::Ready(Ok(0)) if inbox.is_empty() => return Poll::Ready(Err(End::Quiet)),
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(broken(io::ErrorKind::UnexpectedEof.into()))),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(broken(error))),
                Poll::Pending => break,
            }
        }
        let is_idle = inbox.is_empty();
        if is_idle && (self.is_ending || ending.poll(cx).is_ready()) {
            self.is_ending = true;
            // A request that has come is answered, also where the runtime has not heard of it yet.
            if !io.has_unread() {
                return Poll::Ready(Err(End::Quiet));
            }
        }
        let (until, limit) = match is_idle {
            true => (&mut self.idle_until, self.config.idle_timeout),
            false => (&mut self.head_until, self.config.head_timeout),
        };
        timer.set(*until.get_or_insert_with(|| Instant::now() + limit));
        ready!(timer.poll(cx));
        match is_idle {
            true if io.has_unread() => Poll::Pending, // until the runtime has heard of it
            true => Poll::Ready(Err(End::Quiet)),
            false => Poll::Ready(Err(End::Refused(Error::HeadTimeout(limit)))),
        }
    }

    fn parse(&mut self, inbox: &mut Bytes) -> Result<Option<RequestHead>, Error> {
        let seen = std::mem::replace(&mut self.seen, inbox.len());
        if inbox.is_empty() || (seen > 0 && !head::may_end(inbox, seen)) {
            return self.within_limit(inbox.len()).map(|()| None);
        }
        let before = inbox.len();
        let head = head::request(inbox).map_err(|bad| match bad {
            BadHead::TooLong => self.too_long(),
            BadHead::Wrong(what) => Error::BadRequest(what),
        })?;
        let used = match head {
            Some(_) => before.saturating_sub(inbox.len()), // some of what is left may be longer than it came
            None => before,
        };
        self.within_limit(used).map(|()| head)
    }

    fn within_limit(&self, len: usize) -> Result<(), Error> {
        if len > self.config.max_head {
            Err(self.too_long())
        } else {
            Ok(())
        }
    }

    fn too_long(&self) -> Error {
        Error::HeadTooLong {
            limit: self.config.max_head,
        }
    }
}

impl Connection {
    /// Ready when the client no longer waits: its connection is broken, or closed as far as that can be told. One that has only
    /// ended its own side is answered.
    fn poll_left(&mut self, cx: &mut Context<'_>, may_have_left: bool) -> Poll<Error> {
        // What could not be written at once; errors are the response's, too.
        let _ = self.poll_interims(cx);
        match self.receiving {
            Receiving::Gone => return Poll::Ready(Error::Left),
            Receiving::Nothing if may_have_left && self.inbox.is_empty() => {}
            Receiving::Nothing => return Poll::Pending,
            // Whoever reads the body tells how it ends.
            Receiving::Body | Receiving::Permission | Receiving::Abandoned => {
                self.server = Some(cx.waker().clone());
                return Poll::Pending;
            }
        }
        loop {
            if let Some((at, _)) = self.look {
                self.timer.set(at);
                ready!(self.timer.poll(cx));
            }
            match ready!(read::poll_more(cx, &mut self.io, &mut self.inbox)) {
                Ok(0) if self.io.is_closed_by_peer() == Some(true) => return Poll::Ready(Error::Left),
                Ok(0) => {
                    let pause = self.look.map_or(FIRST_LOOK, |(_, pause)| pause);
                    self.look = Some((Instant::now() + pause, LOOK_INTERVAL.min(pause * 4)));
                }
                Ok(_) => return Poll::Pending, // the next request
                Err(error) => return Poll::Ready(Error::Client(error)),
            }
        }
    }

    /// Ready when nobody reads the body any more.
    fn poll_received(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.receiving == Receiving::Body {
            self.server = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    fn received(&mut self, receiving: Receiving) {
        self.receiving = receiving;
        if let Some(server) = self.server.take() {
            server.wake();
        }
    }

    /// Has the last response leave in one packet with the end of the connection, which follows it at once.
    fn cork(&mut self) {
        if self.receiving == Receiving::Nothing && self.inbox.is_empty() {
            self.io.cork();
        }
    }

    /// Notes that something of the response has been written, for who waits for more of the request.
    fn wrote(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if self.receiving != Receiving::Nothing && matches!(written, Poll::Ready(Ok(1..))) {
            self.wrote_at = Some(Instant::now());
        }
        written
    }

    /// Writes an interim response, where the client knows of such.
    fn pass_interim(&mut self, cx: &mut Context<'_>, rsp: &Response<()>, version: Version) {
        if interim::is_permission(rsp) {
            if self.receiving != Receiving::Permission {
                return;
            }
            self.receiving = Receiving::Body;
        }
        if version == Version::HTTP_11 {
            write::interim(rsp, &mut self.interims);
        }
        // What cannot be written now goes before the response, and errors are the response's, too.
        let _ = self.poll_interims(cx);
    }

    fn poll_interims(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.interims.is_empty() {
            let n = ready!(Pin::new(&mut self.io).poll_write(cx, &self.interims))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.interims.advance(n);
            if self.interims.is_empty() {
                self.interims = BytesMut::new();
                return Pin::new(&mut self.io).poll_flush(cx);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// A connection that is locked for one step at a time.
struct Half<'a>(&'a Shared);

impl AsyncRead for Half<'_> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Half<'_> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut connection = self.0.lock();
        ready!(connection.poll_interims(cx))?;
        let written = Pin::new(&mut connection.io).poll_write(cx, buf);
        connection.wrote(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut connection = self.0.lock();
        ready!(connection.poll_interims(cx))?;
        let written = Pin::new(&mut connection.io).poll_write_vectored(cx, bufs);
        connection.wrote(written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().io).poll_shutdown(cx)
    }
}

/// The body of a request, read from its connection as it is polled.
pub(crate) struct Received {
    connection: Shared,
    framing: Framing,
    idle_timeout: Duration,
    /// When it has been waited for long enough, where it is waited for.
    idle_until: Option<Instant>,
    ended: bool,
}

impl Received {
    fn new(connection: &Shared, framing: Framing, expects: bool, idle_timeout: Duration) -> Self {
        let mut shared = connection.lock();
        shared.wrote_at = None;
        shared.receiving = if expects {
            Receiving::Permission
        } else {
            Receiving::Body
        };
        Self {
            connection: connection.clone(),
            framing,
            idle_timeout,
            idle_until: None,
            ended: false,
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let connection = &mut *self.connection.lock();
        if matches!(connection.receiving, Receiving::Abandoned | Receiving::Gone) {
            return Poll::Ready(Some(Err(Error::from_client("it was answered before it was sent"))));
        }
        let (failed, receiving) = loop {
            let decoded = self.framing.decode(&mut connection.inbox);
            let is_end = self.framing.is_end();
            let frame = match decoded {
                Ok(Decoded::Data(data)) => Some(Ok(Frame::data(data))),
                Ok(Decoded::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
                Ok(Decoded::End) => None,
                Ok(Decoded::More) => match read::poll_more(cx, &mut connection.io, &mut connection.inbox) {
                    Poll::Ready(Ok(0)) => {
                        let end = io::Error::from(io::ErrorKind::UnexpectedEof);
                        break (Error::from_client(end), Receiving::Gone);
                    }
                    Poll::Ready(Ok(_)) => {
                        self.idle_until = None;
                        continue;
                    }
                    Poll::Ready(Err(error)) => break (Error::from_client(error), Receiving::Gone),
                    Poll::Pending => {
                        ready!(Self::poll_idle(&mut self.idle_until, self.idle_timeout, cx, connection));
                        break (Error::BodyTimeout(self.idle_timeout), Receiving::Abandoned);
                    }
                },
                Err(wrong) => break (Error::from_client(wrong), Receiving::Abandoned),
            };
            if is_end {
                self.ended = true;
                connection.received(Receiving::Nothing);
            } else {
                connection.receiving = Receiving::Body;
            }
            return Poll::Ready(frame);
        };
        connection.received(receiving);
        Poll::Ready(Some(Err(failed)))
    }

    /// Ready when nothing of the request has come, and nothing of the response has left, for as long as `limit`.
    fn poll_idle(
        until: &mut Option<Instant>,
        limit: Duration,
        cx: &mut Context<'_>,
        connection: &mut Connection,
    ) -> Poll<()> {
        loop {
            let mut at = until.unwrap_or_else(|| Instant::now() + limit);
            if let Some(wrote_at) = connection.wrote_at.take() {
                at = at.max(wrote_at + limit);
            }
            *until = Some(at);
            connection.timer.set(at);
            ready!(connection.timer.poll(cx));
            if connection.wrote_at.is_none() {
                return Poll::Ready(());
            }
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.framing.is_end()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.framing.size_hint()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut connection = self.connection.lock();
        if connection.receiving == Receiving::Gone {
            return;
        }
        // What is there already can be passed over: a short body, mostly.
        let has_come = loop {
            match self.framing.decode(&mut connection.inbox) {
                Ok(Decoded::Data(_)) => {}
                Ok(Decoded::Trailers(_) | Decoded::End) => break connection.receiving == Receiving::Body,
                Ok(Decoded::More) | Err(_) => break false,
            }
        };
        connection.received(if has_come {
            Receiving::Nothing
        } else {
            Receiving::Abandoned
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use tokio::net::TcpListener;

    use super::*;
    use crate::net::io::Tcp;

    #[tokio::test]
    async fn a_request_that_the_runtime_has_not_heard_of_is_answered_though_we_are_ending() {
        for ends_by in ["drain", "idle timeout"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = Connection {
                io: Io::tcp(Tcp::new(stream)),
                inbox: Bytes::new(),
                interims: BytesMut::new(),
                receiving: Receiving::Nothing,
                wrote_at: None,
                look: None,
                server: None,
                timer: Timer::default(),
            };
            let is_drain = ends_by == "drain";
            let limit = Duration::from_secs(if is_drain { 3600 } else { 0 });
            let config = Config {
                max_head: 1000,
                head_timeout: Duration::from_secs(3600),
                idle_timeout: limit,
            };
            let mut wait = Wait {
                config: &config,
                idle_until: None,
                head_until: None,
                seen: 0,
                is_ending: false,
            };
            let (end, ended) = oneshot::channel::<()>();
            let mut ending = pin!(async { drop(ended.await) });
            if is_drain {
                poll_fn(|cx| {
                    assert!(wait.poll_head(cx, &mut connection, ending.as_mut()).is_pending());
                    Poll::Ready(())
                })
                .await;
                end.send(()).unwrap();
            }
            // The runtime looks at its sockets when this task waits, and not before.
            client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let head = poll_fn(|cx| wait.poll_head(cx, &mut connection, ending.as_mut())).await;
            assert!(head.is_ok_and(|head| head.keep_alive), "{ends_by}");
            // Nothing else has come.
            let last = poll_fn(|cx| wait.poll_head(cx, &mut connection, ending.as_mut())).await;
            assert!(matches!(last, Err(End::Quiet)), "{ends_by}");
        }
    }
}
