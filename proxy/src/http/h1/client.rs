//! HTTP/1 towards an application or an endpoint without a proxy.
//!
//! A connection belongs to the response body that reads from it: it goes back to the pool at a clean end and closes
//! on drop.

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
        body::Body,
        error::Error,
        h1::{
            framing::{Decoded, Framing},
            head::{self, BadHead, MAX_HEAD, ResponseHead},
            pool::{Pool, Resend},
            read, write,
        },
        headers, interim,
    },
    net::io::Io,
};

/// A connection that is free to carry a request.
pub(crate) struct Connection {
    /// Boxed, because it moves between its pool, requests and bodies.
    io: Box<Io>,
    reused: bool,
}

/// A request without a response.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// The request once more, where it may be sent again.
    pub(crate) again: Option<Again>,
}

/// A request that left in one short piece, or of which nothing has left.
pub(crate) struct Again {
    upload: write::Message<Body>,
    method: Method,
    pub(crate) to: SendAgainTo,
    /// The connection, where it has ended and a reset may follow.
    ended: Option<Box<Io>>,
}

impl Again {
    /// Whether the kernel has thrown something of it away, or the application had the connection reset.
    pub(crate) async fn is_thrown_away(&mut self) -> bool {
        match &self.ended {
            Some(io) => is_thrown_away(io).await,
            None => true,
        }
    }
}

/// Where a request may be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendAgainTo {
    /// To whoever listens: nobody has read it, or it may be processed twice and its connection had been idle.
    Whoever,
    /// To another endpoint only, where it was thrown away and nobody listens here any more. While somebody listens, it may be the
    /// request itself that connections end of.
    Another,
}

/// Why there is no response head.
pub(crate) enum NoHead {
    /// The other side has ended the connection.
    End,
    Reset,
    Error(Error),
}

impl From<Error> for NoHead {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl Connection {
    pub(crate) fn new(io: Io) -> Self {
        Self {
            io: Box::new(io),
            reused: false,
        }
    }

    /// One that has carried requests before.
    pub(super) fn reused(io: Box<Io>) -> Self {
        Self { io, reused: true }
    }

    /// Puts it into the pool unused.
    pub(crate) fn keep(self, pool: &Arc<Pool>) {
        pool.put(self.io);
    }

    /// Begins to send a request, which is taken out of `req`. The connection goes back to `pool` when the response's body
    /// has ended.
    pub(crate) fn send(self, req: &mut Request<Body>, addr: SocketAddr, pool: Option<Arc<Pool>>) -> Exchange {
        let method = req.method().clone();
        let upload = write::request(std::mem::take(req));
        self.exchange(upload, method, addr, pool)
    }

    /// Begins to send a request that another connection has left without a response.
    pub(crate) fn send_again(self, again: Again, addr: SocketAddr, pool: Option<Arc<Pool>>) -> Exchange {
        self.exchange(again.upload, again.method, addr, pool)
    }

    fn exchange(
        self,
        upload: write::Message<Body>,
        method: Method,
        addr: SocketAddr,
        pool: Option<Arc<Pool>>,
    ) -> Exchange {
        Exchange {
            has_no_body: upload.is_encoded(),
            connection: self,
            upload,
            sending: true,
            method,
            addr,
            pool,
            inbox: Bytes::new(),
            coming: Coming::default(),
        }
    }
}

/// A request on its way, and the response head that is coming.
pub(crate) struct Exchange {
    connection: Connection,
    upload: write::Message<Body>,
    sending: bool,
    has_no_body: bool,
    method: Method,
    addr: SocketAddr,
    pool: Option<Arc<Pool>>,
    inbox: Bytes,
    coming: Coming,
}

/// How far a response head has come.
#[derive(Default)]
struct Coming {
    /// Bytes that have been looked at.
    seen: usize,
    /// Interim responses before it.
    n_interims: usize,
}

impl Exchange {
    /// Where the connection goes afterwards.
    pub(crate) fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.clone()
    }

    /// Sends the request, as far as that is needed, and reads the response head.
    ///
    /// # Errors
    /// The connection ended first, or what came back is not HTTP/1.
    pub(crate) async fn head(&mut self) -> Result<ResponseHead, NoHead> {
        let head = poll_fn(|cx| self.poll_head(cx)).await?;
        if self.sending && head::switches(head.response.status(), &self.method) {
            // Boxed: rare. The other protocol begins where the request ends.
            Box::pin(poll_fn(|cx| self.upload.poll_write(cx, &mut *self.connection.io))).await?;
            self.sending = false;
        }
        Ok(head)
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<ResponseHead, NoHead>> {
        let io = &mut *self.connection.io;
        if self.sending {
            match self.upload.poll_write(cx, io) {
                Poll::Ready(Err(error)) if error.is_of_request_body() => return Poll::Ready(Err(error.into())),
                // An application that stops reading may still have answered.
                Poll::Ready(_) => self.sending = false,
                Poll::Pending => {}
            }
        }
        let (inbox, coming) = (&mut self.inbox, &mut self.coming);
        poll_head(cx, io, inbox, coming, &self.method)
    }

    /// What can be done where there was no head; `resend` says which requests may be sent again that may have been processed.
    ///
    /// What is known of the application is what the kernel of this host tells: it answers what nobody can read any more with a
    /// reset. A reset alone says nothing, as applications may ask for one after they have read everything (`SO_LINGER` of 0).
    pub(crate) async fn failed(self, why: NoHead, resend: Resend) -> Failed {
        if let NoHead::Error(error) = why {
            return Failed { error, again: None };
        }
        let (addr, Connection { io, reused }) = (self.addr, self.connection);
        let has_begun = self.upload.has_begun();
        let is_local = io.is_local(addr.ip());
        let may_repeat = resend.permits(&self.method);
        // An application may close an idle connection at any time.
        let is_repeatable = may_repeat && reused && self.has_no_body && self.pool.is_some();
        // Who has answered something has read something.
        let has_ended = matches!(why, NoHead::End);
        let may_be_late = has_ended && is_local && self.coming.n_interims == 0 && !is_repeatable;
        let upload = self.upload.into_unread(Body::empty());
        let is_unread = match &upload {
            Some(upload) => !has_begun || (may_be_late && is_late(&io, upload.unsent()).await),
            None => false,
        };
        let to = if is_repeatable || (is_unread && is_local) {
            Some(SendAgainTo::Whoever)
        } else {
            (may_repeat && !is_unread && is_local && self.coming.n_interims == 0).then_some(SendAgainTo::Another)
        };
        Failed {
            error: Error::Closed {
                addr,
                reused,
                sent: !is_unread,
            },
            again: to.zip(upload).map(|(to, upload)| Again {
                upload,
                method: self.method,
                to,
                ended: has_ended.then_some(io),
            }),
        }
    }

    /// The response with its body, which reads from the connection.
    pub(crate) fn response(self, head: ResponseHead) -> Response<Body> {
        let ResponseHead {
            response,
            framing,
            keep_alive,
        } = head;
        let pool = self
            .pool
            .filter(|_| keep_alive && (self.sending || self.upload.is_done()));
        if let Some(pool) = &pool {
            pool.told(headers::keep_alive_timeout(response.headers()));
        }
        let upgraded = head::switches(response.status(), &self.method);
        let (io, mut inbox, mut upload) = (self.connection.io, self.inbox, self.upload);
        let source = if upgraded {
            Source::Upgraded(Some(io.unread(std::mem::take(&mut inbox))))
        } else if self.sending {
            let (read, mut write) = tokio::io::split(*io);
            let (mut whole, uploaded) = oneshot::channel();
            tokio::spawn(async move {
                let upload = tokio::select! {
                    upload = poll_fn(|cx| upload.poll_write(cx, &mut write)) => upload,
                    () = soon_after(&mut whole) => Err(Error::TakenBack),
                };
                match upload {
                    // Where the response has ended before, the connection ends here.
                    Ok(()) => drop(whole.send(write)),
                    Err(error) => {
                        tracing::debug!(%error, "request body ended early");
                        // So that nobody waits for the rest of it; who has gone away needs not be told.
                        let _ = write.shutdown().await;
                    }
                }
            });
            Source::Half { read, uploaded }
        } else {
            Source::Whole(io)
        };
        let mut received = Received {
            source: Some(source),
            inbox: Bytes::new(),
            framing,
            pool,
        };
        if framing == Framing::Length(inbox.len() as u64) && !inbox.is_empty() {
            // The whole body came with the head, as it does for small answers.
            received.finish();
            return response.map(|()| Body::full(inbox));
        }
        received.inbox = inbox;
        if framing.is_end() && !upgraded {
            received.finish();
            return response.map(|()| Body::empty());
        }
        response.map(|()| Body::h1_response(Box::new(received)))
    }
}

/// How long a request body may go on when its response has ended: an application that needed it would have waited.
const AFTERGLOW: Duration = Duration::from_secs(1);

async fn soon_after<T>(response: &mut oneshot::Sender<T>) {
    response.closed().await;
    tokio::time::sleep(AFTERGLOW).await;
}

/// How long an application that has ended its side of a connection may take until it closes it, by which what it has not
/// read is thrown away: no time at all, or as long as it waits for a processor. A container that has used up its share gets
/// the next one after up to 100 ms.
const CLOSING: Duration = Duration::from_millis(250);

/// Whether a request of so many bytes came to an application that had ended the connection before, so that it could not answer
/// any more, and closed it: an end acknowledges all that has come until then.
async fn is_late(io: &Io, len: usize) -> bool {
    io.unacknowledged() == Some(len) && is_thrown_away(io).await
}

/// Whether the kernel says that what was written was thrown away, after the other side's end.
async fn is_thrown_away(io: &Io) -> bool {
    let _ = tokio::time::timeout(CLOSING, io.broken()).await;
    io.wrote_after_end()
}

/// Reads until a final response head is complete. Interim ones are passed on.
fn poll_head(
    cx: &mut Context<'_>,
    io: &mut Io,
    inbox: &mut Bytes,
    coming: &mut Coming,
    method: &Method,
) -> Poll<Result<ResponseHead, NoHead>> {
    loop {
        if !inbox.is_empty()
            && (coming.seen == 0 || head::may_end(inbox, coming.seen))
            && let Some(head) = head::response(inbox, method).map_err(bad_head)?
        {
            let status = head.response.status();
            if status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS {
                coming.seen = 0;
                coming.n_interims += 1;
                if coming.n_interims > interim::MOST {
                    return Poll::Ready(Err(Error::BadResponse("it has too many interim responses").into()));
                }
                interim::pass(head.response);
                continue;
            }
            return Poll::Ready(Ok(head));
        }
        if inbox.len() > MAX_HEAD {
            return Poll::Ready(Err(bad_head(BadHead::TooLong).into()));
        }
        coming.seen = inbox.len();
        match ready!(read::poll_more(cx, io, inbox)) {
            Ok(0) if inbox.is_empty() => return Poll::Ready(Err(NoHead::End)),
            Ok(0) => return Poll::Ready(Err(Error::BadResponse("it ended within its head").into())),
            Ok(_) => {}
            Err(error) if inbox.is_empty() && is_reset(&error) => return Poll::Ready(Err(NoHead::Reset)),
            Err(error) => return Poll::Ready(Err(Error::Response(error).into())),
        }
    }
}

fn bad_head(bad: BadHead) -> Error {
    Error::BadResponse(match bad {
        BadHead::TooLong => "its head is too long",
        BadHead::Wrong(what) => what,
    })
}

fn is_reset(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted
    )
}

/// A response body that arrives on an HTTP/1 connection.
pub(crate) struct Received {
    source: Option<Source>,
    inbox: Bytes,
    framing: Framing,
    /// Where the connection goes at a clean end.
    pool: Option<Arc<Pool>>,
}

enum Source {
    Whole(Box<Io>),
    /// The request body still goes out on the other half, until a while after the receiver is dropped; the receiver gets
    /// that half when the body has left.
    Half {
        read: ReadHalf<Io>,
        uploaded: oneshot::Receiver<WriteHalf<Io>>,
    },
    /// No longer HTTP: taken by the tunnel.
    Upgraded(Option<Io>),
}

impl Received {
    /// The connection of an answer that switched protocols; once.
    pub(crate) fn take_upgraded(&mut self) -> Option<Io> {
        match &mut self.source {
            Some(Source::Upgraded(io)) => io.take(),
            _ => None,
        }
    }

    /// Gives the connection back, or closes it where it cannot be used again.
    fn finish(&mut self) {
        let (source, pool) = (self.source.take(), self.pool.take());
        let Some(pool) = pool.filter(|_| self.inbox.is_empty()) else {
            return;
        };
        match source {
            Some(Source::Whole(io)) => pool.put(io),
            Some(Source::Half { read, mut uploaded }) => {
                if let Ok(write) = uploaded.try_recv() {
                    pool.put(Box::new(read.unsplit(write)));
                }
            }
            Some(Source::Upgraded(_)) | None => {}
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            match self.framing.decode(&mut self.inbox) {
                Ok(Decoded::Data(data)) => {
                    if self.framing == Framing::Length(0) {
                        self.finish();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(Decoded::Trailers(trailers)) => {
                    self.finish();
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(Decoded::End) => {
                    self.finish();
                    return Poll::Ready(None);
                }
                Ok(Decoded::More) => {}
                Err(wrong) => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Error::BadResponse(wrong))));
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
                    return Poll::Ready(Some(Err(Error::Response(io::ErrorKind::UnexpectedEof.into()))));
                }
                Ok(_) => {}
                Err(error) => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Error::Response(error))));
                }
            }
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match &mut self.source {
            Some(Source::Whole(io)) => read::poll_more(cx, &mut **io, &mut self.inbox),
            Some(Source::Half { read, .. }) => read::poll_more(cx, read, &mut self.inbox),
            Some(Source::Upgraded(_)) | None => Poll::Ready(Ok(0)),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.framing.is_end()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.framing.size_hint()
    }
}
