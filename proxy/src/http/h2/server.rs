//! Serving HTTP/2: one task a connection, and one for each request in flight.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, atomic::AtomicBool},
    task::{Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
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
        error::Error,
        h2::{
            From, Params, Progress, Received,
            batch::batched,
            send::{self, Sending},
            stream::Stream,
            unanswered,
            windows::{Member, Windows},
        },
        headers, interim,
        layers::Rescued,
        linger,
        respond::Asker,
        server::{Closer, Config},
        tunnel::Leg,
    },
    net::io::Io,
};

/// Serves one connection until it ends, gracefully once `drain` or `closer` asks, or nobody has asked for anything for as long as
/// a connection of HTTP/1 may be kept for.
///
/// # Errors
/// The connection broke, or its client broke the rules of HTTP/2 or stopped answering pings.
pub(in crate::http) async fn serve<S>(
    io: Io,
    service: Rescued<S>,
    config: &Config,
    closer: Closer,
    drain: &drain::Watch,
) -> Result<(), Error>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    let params = &config.http2;
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        // Who sends more hears of it without a reason, or loses the connection.
        .max_header_list_size(params.max_header_list.saturating_mul(2))
        .enable_connect_protocol();
    let of_peers = || io.is_encrypted().then_some(Params::FRAME_SIZE);
    if let Some(size) = params.max_frame_size.or_else(of_peers) {
        builder.max_frame_size(size);
    }
    if let Some(streams) = params.max_concurrent_streams {
        builder.max_concurrent_streams(streams);
    }
    if let Some(size) = params.max_send_buffer {
        builder.max_send_buffer_size(size);
    }
    if let Some(streams) = params.max_pending_resets {
        builder.max_pending_accept_reset_streams(streams);
    }
    let io = tokio::select! {
        greeted = greeted(io) => greeted?,
        () = asked_to_end(&closer, drain) => return Ok(()),
        () = sleep(PREFACE_TIMEOUT) => return Err(Error::HeadTimeout(PREFACE_TIMEOUT)),
    };
    let (io, batch) = batched(io);
    let mut connection = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let mut windows = Windows::new(params, Member::default());
    let clerks = Clerks::new(service, windows.member(), config);
    let mut silent = pin!(unanswered(params.keep_alive, connection.ping_pong()));
    let mut ending = pin!(asked_to_end(&closer, drain));
    let mut is_ending = false;
    let mut quiet = Quiet::new(config.http1.head_timeout, config.http1.idle_timeout);
    let mut rounds = interval_at(Instant::now() + quiet.round, quiet.round);
    poll_fn(|cx| {
        let ended = batch.poll(cx, |cx| {
            windows.adapt(|sizes| {
                connection.set_initial_window_size(sizes.stream)?;
                connection.set_target_window_size(sizes.connection);
                Ok::<_, h2::Error>(())
            });
            loop {
                match ready!(connection.poll_accept(cx)) {
                    Some(Ok((req, respond))) => clerks.take(req, respond),
                    Some(Err(error)) => return Poll::Ready(Err(Error::H2(error))),
                    None => return Poll::Ready(Ok(())),
                }
            }
        });
        if ended.is_ready() {
            return ended;
        }
        let mut is_enough = false;
        while rounds.poll_tick(cx).is_ready() {
            match quiet.after(clerks.end_round()) {
                Patience::Left => {}
                Patience::LongOver if is_ending => return Poll::Ready(Ok(())),
                Patience::Over | Patience::LongOver => is_enough = true,
            }
        }
        if !is_ending && (is_enough || ending.as_mut().poll(cx).is_ready()) {
            is_ending = true;
            connection.graceful_shutdown();
            cx.waker().wake_by_ref(); // to write what that means
        }
        silent.as_mut().poll(cx).map(|()| Err(Error::Left))
    })
    .await
}

/// Reads the client's preface, and puts it back. Who sends something else hears the end of the connection, not a reset.
async fn greeted(mut io: Io) -> Result<Io, Error> {
    let mut seen = BytesMut::with_capacity(PREFACE.len());
    while seen.len() < PREFACE.len() {
        let n = io.read_buf(&mut seen).await.map_err(Error::Client)?;
        if n == 0 || !PREFACE.starts_with(&seen[..seen.len().min(PREFACE.len())]) {
            linger::close(&mut io).await.map_err(Error::Client)?;
            return Err(Error::BadRequest("it does not begin as HTTP/2 does"));
        }
    }
    Ok(io.unread(seen.freeze()))
}

/// How long a client may take to say that it speaks HTTP/2.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Source: RFC 9113 §3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

async fn asked_to_end(closer: &Closer, drain: &drain::Watch) {
    tokio::select! {
        () = closer.notified() => {}
        () = drain.signaled() => {}
    }
}

/// For how long a connection has had no request.
struct Quiet {
    /// How often that is looked at.
    round: Duration,
    lasted: Duration,
    /// How long it may last.
    limit: Duration,
    /// The same from the first request on.
    idle_timeout: Duration,
}

/// What is left of the patience with a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    Left,
    /// It is asked to leave.
    Over,
    /// It has been asked to, and has not even said that it heard.
    LongOver,
}

impl Quiet {
    fn new(head_timeout: Duration, idle_timeout: Duration) -> Self {
        let limit = head_timeout.min(idle_timeout);
        Self {
            round: ROUND.min(limit).max(Duration::from_millis(1)),
            lasted: Duration::ZERO,
            limit,
            idle_timeout,
        }
    }

    fn after(&mut self, round: Round) -> Patience {
        match round {
            Round::Quiet => self.lasted += self.round,
            Round::Busy => (self.lasted, self.limit) = (Duration::ZERO, self.idle_timeout),
        }
        match self.lasted {
            lasted if lasted < self.limit => Patience::Left,
            lasted if lasted < self.limit.saturating_add(self.round) => Patience::Over,
            _ => Patience::LongOver,
        }
    }
}

/// A request, and where its response goes.
struct Job {
    req: Request<Body>,
    /// What its head counts as, in bytes.
    list_size: usize,
    respond: SendResponse<Bytes>,
    extended: Option<Box<Extended>>,
}

/// A stream that is to carry another protocol (RFC 8441), if it is granted to it.
struct Extended {
    received: RecvStream,
    member: Member,
    /// Who gets it then.
    client: oneshot::Sender<Leg>,
}

impl Extended {
    /// Whether somebody waits to join it with something.
    fn is_awaited(&self) -> bool {
        !self.client.is_closed()
    }

    fn grant(self, send: SendStream<Bytes>) {
        let stream = Stream::new(send, self.received, self.member);
        let _ = self.client.send(Leg::Stream(Box::new(stream))); // or it is reset
    }
}

/// Tasks that answer the requests of one connection.
///
/// A task of its own for each request would cost more than most of what it does: some kilobytes to be found, filled and
/// given back. So a task that is done waits for another request, and ends with the connection.
struct Clerks<S> {
    service: Rescued<S>,
    member: Member,
    /// Longest header list that is served.
    max_list: usize,
    /// Most bytes of all header lists in flight.
    max_lists: usize,
    /// How long a request with a body may go without anything that passes.
    idle_timeout: Duration,
    waiting: Arc<Mutex<Waiting>>,
}

/// Who waits for a request.
struct Waiting {
    desks: Vec<Arc<Desk>>,
    /// Requests that are being answered.
    n_busy: usize,
    /// What their heads count as, in bytes.
    list_sizes: usize,
    /// Whether there was any stream in this round.
    was_busy: bool,
    /// The fewest that have waited since the last round.
    spare: usize,
    /// Whether there will be none any more.
    closed: bool,
}

/// Where a task finds its next request.
struct Desk {
    job: Mutex<Option<Job>>,
    called: Notify,
    progress: Arc<Progress>,
}

/// What a connection has had to do since it was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    Quiet,
    Busy,
}

/// Members that a connection has without a stream: its windows and its clerks.
const OF_NO_MESSAGE: usize = 2;
/// Tasks that wait at most, on one connection.
const WAITING: usize = 64;
/// How often those that are not needed are ended, and what a connection has to do is looked at; more often where a timeout is shorter.
const ROUND: Duration = Duration::from_secs(10);

impl<S> Clerks<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    fn new(service: Rescued<S>, member: Member, config: &Config) -> Self {
        let waiting = Waiting {
            desks: Vec::new(),
            n_busy: 0,
            list_sizes: 0,
            was_busy: false,
            spare: 0,
            closed: false,
        };
        Self {
            service,
            member,
            max_list: config.http2.max_header_list as usize,
            max_lists: config.http2.max_header_lists,
            idle_timeout: config.http1.idle_timeout,
            waiting: Arc::new(Mutex::new(waiting)),
        }
    }

    fn take(&self, req: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let list_size = headers::list_size(&req);
        let desk = {
            let mut waiting = self.waiting.lock();
            if list_size <= self.max_list && waiting.list_sizes + list_size > self.max_lists {
                drop(waiting);
                self.service.refused(&Error::TooManyHeaders { limit: self.max_lists });
                return respond.send_reset(Reason::REFUSED_STREAM);
            }
            waiting.list_sizes += list_size;
            waiting.n_busy += 1;
            waiting.was_busy = true;
            let desk = waiting.desks.pop();
            waiting.spare = waiting.spare.min(waiting.desks.len());
            desk
        };
        let is_waiting = desk.is_some();
        let desk = desk.unwrap_or_else(|| Arc::new(Desk::new(self.idle_timeout)));
        let left = headers::content_length(req.headers());
        let is_extended = *req.method() == Method::CONNECT && req.extensions().get::<Protocol>().is_some();
        let member = || self.member.clone();
        let mut extended = None;
        let req = req.map(|stream| match stream.is_end_stream() {
            _ if is_extended => {
                let (client, upgraded) = oneshot::channel();
                extended = Some(Box::new(Extended {
                    received: stream,
                    member: member(),
                    client,
                }));
                Body::empty().upgradable(upgraded)
            }
            true => Body::empty(),
            false => {
                let from = From::Client(desk.progress.clone());
                Body::from(Received::new(stream, from, left, member()))
            }
        });
        *desk.job.lock() = Some(Job {
            req,
            list_size,
            respond,
            extended,
        });
        if is_waiting {
            desk.called.notify_one();
        } else {
            let (service, waiting) = (self.service.clone(), self.waiting.clone());
            tokio::spawn(work(service, self.max_list, desk, waiting));
        }
    }
}

impl Desk {
    fn new(idle_timeout: Duration) -> Self {
        Self {
            job: Mutex::default(),
            called: Notify::new(),
            progress: Arc::new(Progress {
                has_sent: AtomicBool::new(false),
                idle_timeout,
            }),
        }
    }
}

impl<S> Clerks<S> {
    /// Ends those that nobody has needed for a round, and says what it was like.
    fn end_round(&self) -> Round {
        let mut waiting = self.waiting.lock();
        let spare = waiting.spare.min(waiting.desks.len());
        for desk in waiting.desks.drain(..spare) {
            desk.called.notify_one();
        }
        waiting.spare = waiting.desks.len();
        // Other protocols, and bodies that nobody answers any more, are still on their way.
        let is_busy = waiting.n_busy > 0 || self.member.n_held() > OF_NO_MESSAGE;
        match std::mem::replace(&mut waiting.was_busy, is_busy) {
            true => Round::Busy,
            false => Round::Quiet,
        }
    }
}

impl<S> Drop for Clerks<S> {
    fn drop(&mut self) {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        for desk in waiting.desks.drain(..) {
            desk.called.notify_one();
        }
    }
}

/// Answers one request after the other.
async fn work<S>(mut service: Rescued<S>, max_list: usize, desk: Arc<Desk>, waiting: Arc<Mutex<Waiting>>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    loop {
        let job = desk.job.lock().take();
        let Some(job) = job else { return };
        let list_size = job.list_size;
        match list_size > max_list {
            true => refuse(&service, max_list, job),
            false => answer(&mut service, job, &desk.progress).await,
        }
        {
            let mut waiting = waiting.lock();
            waiting.n_busy -= 1;
            waiting.list_sizes -= list_size;
            if waiting.closed || waiting.desks.len() >= WAITING {
                return;
            }
            waiting.desks.push(desk.clone());
        }
        desk.called.notified().await;
    }
}

/// Tells a client that the head of its request is too long.
#[cold]
fn refuse<S>(service: &Rescued<S>, limit: usize, mut job: Job) {
    let (head, _) = service
        .refuse(&Error::HeadTooLong { limit }, Asker::of(&job.req))
        .into_parts();
    if let Err(error) = job.respond.send_response(Response::from_parts(head, ()), true) {
        tracing::debug!(%error, "a refusal was not sent");
    }
}

/// Answers one request, unless its client takes it back.
async fn answer<S>(service: &mut Rescued<S>, job: Job, progress: &Arc<Progress>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    let Job {
        req,
        mut respond,
        extended,
        ..
    } = job;
    // Many clients that reset what they ask for should cost nobody else anything.
    if poll_fn(|cx| Poll::Ready(respond.poll_reset(cx).is_ready())).await {
        return;
    }
    let answered = {
        let mut answering = pin!(service.call(req));
        poll_fn(|cx| {
            let (polled, interims) = interim::collect(|| answering.as_mut().poll(cx));
            for rsp in interims {
                if let Err(error) = respond.send_informational(rsp) {
                    tracing::debug!(%error, "an interim response was not sent");
                }
            }
            match polled {
                Poll::Ready(answered) => Poll::Ready(Some(answered)),
                Poll::Pending => respond.poll_reset(cx).map(|_| None),
            }
        })
        .await
    };
    let rsp = match answered {
        None => return,
        Some(Ok(rsp)) => rsp,
        Some(Err(error)) => return respond.send_reset(send::reason(&error, Reason::INTERNAL_ERROR)),
    };
    let (parts, body) = rsp.into_parts();
    let granted = extended.filter(|extended| parts.status.is_success() && extended.is_awaited());
    let ended = body.is_end_stream() && granted.is_none();
    let of_grpc = headers::is_grpc(Version::HTTP_2, &parts.headers);
    let stream = match respond.send_response(Response::from_parts(parts, ()), ended) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "a response was not sent");
            return respond.send_reset(Reason::INTERNAL_ERROR);
        }
    };
    match granted {
        Some(extended) => extended.grant(stream),
        None if ended => {}
        None => {
            progress.sent();
            let sending = Sending::new(body, stream).of_grpc(of_grpc);
            sending.heard_by(progress.clone()).rest().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_connection_without_requests_is_asked_to_end_and_then_left() {
        use Patience::{Left, LongOver, Over};
        use Round::{Busy, Quiet as Q};
        let cases: [(_, _, &[_]); 4] = [
            (30 * S, 3600 * S, &[(Q, Left), (Q, Left), (Q, Over), (Q, LongOver)]),
            // The first request has come: from now on there is more time.
            (
                10 * S,
                30 * S,
                &[(Busy, Left), (Q, Left), (Q, Left), (Q, Over), (Busy, Left)],
            ),
            // What is under way when it is asked to end is no reason to leave it.
            (
                10 * S,
                20 * S,
                &[(Q, Over), (Busy, Left), (Q, Left), (Q, Over), (Q, LongOver)],
            ),
            (S / 5, S / 10, &[(Q, Over), (Q, LongOver)]),
        ];
        for (head, idle, rounds) in cases {
            let mut quiet = Quiet::new(head, idle);
            for (round, expected) in rounds {
                assert_eq!(quiet.after(*round), *expected, "{head:?}, {idle:?}: {rounds:?}");
            }
        }
        assert_eq!(Quiet::new(30 * S, 3600 * S).round, ROUND);
        assert!(Quiet::new(Duration::ZERO, Duration::ZERO).round > Duration::ZERO);
    }
}
