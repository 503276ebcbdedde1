//! HTTP/2 on the `h2` crate directly, for both roles: no channel and no task between a request and its connection.

mod batch;
pub(crate) mod client;
mod send;
pub(crate) mod server;
pub(crate) mod stream;
pub(crate) mod windows;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::{PingPong, RecvStream};
use http_body::{Frame, SizeHint};
use tokio::time::Instant;

use crate::http::{error::Error, headers, timer::Timer};

/// HTTP/2 settings of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Params {
    /// Flow-control window of a stream, in bytes.
    pub(crate) stream_window: u32,
    /// Flow-control window of a connection, in bytes.
    pub(crate) connection_window: u32,
    pub(crate) keep_alive: Option<KeepAlive>,
    /// Largest frame that is taken, in bytes; `None` is [`FRAME_SIZE`](Self::FRAME_SIZE) of peers and servers, and of clients
    /// outside the mesh the protocol's own.
    pub(crate) max_frame_size: Option<u32>,
    /// That a client may have open at a time; `None` is no limit, and what clients of ours have.
    pub(crate) max_concurrent_streams: Option<u32>,
    pub(crate) max_send_buffer: Option<usize>,
    /// Streams that a client may open and reset before they are answered.
    pub(crate) max_pending_resets: Option<usize>,
    /// Streams that we reset, as a client, and whose late frames are still passed over.
    pub(crate) max_resets: Option<usize>,
    /// Upper bound of a header list, in bytes.
    pub(crate) max_header_list: u32,
    /// Upper bound of the header lists of all requests that a client has in flight on one connection, in bytes.
    pub(crate) max_header_lists: usize,
}

/// Pings that find out whether the peer is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeepAlive {
    pub(crate) interval: Duration,
    pub(crate) timeout: Duration,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            // 1 MiB and 4 MiB: 40 % less CPU in bulk than the protocol's 64 KiB, and more brings nothing.
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            keep_alive: None,
            max_frame_size: None,
            max_concurrent_streams: None,
            max_send_buffer: None,
            max_pending_resets: None,
            max_resets: None,
            max_header_list: Self::list_of(64 << 10),
            max_header_lists: Self::HEADER_LISTS,
        }
    }
}

impl Params {
    /// A piece of a body in one frame: 4 % less CPU in bulk than the protocol's 16 KiB. Clients of any make hear of 16 KiB, as
    /// from most servers.
    pub(crate) const FRAME_SIZE: u32 = 64 << 10;

    /// 16 MiB: some 16,000 requests as most are, on a connection that a peer's proxy sends all requests of a worker on.
    pub(crate) const HEADER_LISTS: usize = 16 << 20;

    /// The header list that a head of HTTP/1 may become, of so many bytes. Each header counts 32 bytes more than its name and
    /// value have (RFC 9113, section 10.5.1), and in HTTP/1 it takes 4 more, so that lines of 11 bytes and more have room.
    pub(crate) fn list_of(head: usize) -> u32 {
        u32::try_from(head.saturating_mul(4)).unwrap_or(u32::MAX)
    }
}

/// Ready when the peer has not answered a ping in time; never without pings.
async fn unanswered(keep_alive: Option<KeepAlive>, pings: Option<PingPong>) {
    let Some((keep_alive, mut pings)) = keep_alive.zip(pings) else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(keep_alive.interval).await;
        match tokio::time::timeout(keep_alive.timeout, pings.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => std::future::pending().await, // the connection is ending and will say why
            Err(_) => return,
        }
    }
}

/// A body that arrives on an HTTP/2 stream.
pub(crate) struct Received {
    stream: RecvStream,
    from: From,
    /// Bytes that are still to come, as far as its head told.
    left: Option<u64>,
    /// Of a client's body that has been waited for.
    idle: Option<Box<Idle>>,
    /// Held as long as it may take room of its connection's window.
    _member: windows::Member,
}

/// Whose body it is.
#[derive(Clone)]
enum From {
    Client(Arc<Progress>),
    Server,
}

/// Whether the response to a request goes on while more of the request may come.
struct Progress {
    has_sent: AtomicBool,
    /// How long nothing may pass in either direction.
    idle_timeout: Duration,
}

impl Progress {
    fn sent(&self) {
        self.has_sent.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        self.has_sent.swap(false, Ordering::Relaxed)
    }
}

/// The wait for more of a body.
#[derive(Default)]
struct Idle {
    timer: Timer,
    until: Option<Instant>,
}

impl Idle {
    /// Ready when nothing has passed in either direction for as long as there may be nothing.
    fn poll(&mut self, cx: &mut Context<'_>, progress: &Progress) -> Poll<Error> {
        let limit = progress.idle_timeout;
        loop {
            if progress.take() {
                self.until = None;
            }
            let at = *self.until.get_or_insert_with(|| Instant::now() + limit);
            self.timer.set(at);
            ready!(self.timer.poll(cx));
            if !progress.take() {
                return Poll::Ready(Error::BodyTimeout(limit));
            }
            self.until = None;
        }
    }
}

impl Received {
    fn new(stream: RecvStream, from: From, left: Option<u64>, member: windows::Member) -> Self {
        Self {
            stream,
            from,
            left,
            idle: None,
            _member: member,
        }
    }

    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let polled = self.poll_stream(cx);
        let From::Client(progress) = &self.from else {
            return polled;
        };
        if polled.is_pending() {
            return self
                .idle
                .get_or_insert_default()
                .poll(cx, progress)
                .map(|late| Some(Err(late)));
        }
        if let Some(idle) = &mut self.idle {
            idle.until = None;
        }
        polled
    }

    fn poll_stream(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match ready!(self.stream.poll_data(cx)) {
            Some(Ok(data)) => {
                // The window opens as the client takes data: nothing is buffered here.
                let _ = self.stream.flow_control().release_capacity(data.len());
                self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(self.failed(error)))),
            None => match ready!(self.stream.poll_trailers(cx)) {
                Ok(Some(trailers))
                    if matches!(self.from, From::Client(_))
                        || trailers.keys().any(|name| !headers::is_trailer(name)) =>
                {
                    let sent = trailers.iter().filter(|(name, _)| headers::is_trailer(name));
                    let sent = sent.map(|(name, value)| (name.clone(), value.clone()));
                    Poll::Ready(Some(Ok(Frame::trailers(sent.collect()))))
                }
                Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(None) => Poll::Ready(None),
                Err(error) => Poll::Ready(Some(Err(self.failed(error)))),
            },
        }
    }

    fn failed(&self, error: h2::Error) -> Error {
        match self.from {
            From::Client(_) => Error::from_client(error),
            // We have reset it ourselves, because the request's body has failed: its client is gone, or sends no more.
            From::Server if error.is_reset() && !error.is_remote() && !error.is_library() => Error::Left,
            From::Server => Error::H2(error),
        }
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match self.left {
            _ if self.is_end_stream() => SizeHint::with_exact(0),
            Some(left) => SizeHint::with_exact(left),
            None => SizeHint::default(),
        }
    }
}
