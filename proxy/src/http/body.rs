//! The one `Body`: bytes from a client, from a peer, from the application, or from ourselves, and an observer that
//! hears of every frame and of the end.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use tokio::sync::oneshot;

use crate::http::{error::Error, h1, h2, layers::Slot, limits::Limited, replay::Keeping, tunnel::Leg};

/// A request or response body.
#[derive(Default)]
pub(crate) struct Body {
    source: Source,
    observer: Option<Box<dyn Observe>>,
    /// The place among the requests in flight, for as long as the body lives.
    slot: Option<Slot>,
    /// Where the client's side comes, once it has been told that its request was granted.
    upgraded: Option<oneshot::Receiver<Leg>>,
}

#[derive(Default)]
enum Source {
    #[default]
    Empty,
    Full(Bytes),
    /// Received on an HTTP/2 stream.
    H2(h2::Received),
    /// Received from an HTTP/1 client.
    H1Request(Box<h1::server::Received>),
    /// Received from an HTTP/1 server.
    H1Response(Box<h1::client::Received>),
    /// Nothing: the stream has been granted to another protocol, and is taken by the tunnel.
    Stream(Option<Box<h2::stream::Stream>>),
    /// Already received, followed by the rest.
    Replayed(Box<Replayed>),
    /// Kept while it passes.
    Keeping(Box<Keeping>),
    /// Given up when its time is over.
    Limited(Box<Limited>),
}

/// A body of which the first part was kept.
struct Replayed {
    kept: VecDeque<Bytes>,
    /// What came after `kept`; then there is no rest.
    trailers: Option<HeaderMap>,
    rest: Body,
}

/// Hears how a body went. Dropping it before `end` means that the receiver went away.
pub(crate) trait Observe: Send {
    fn data(&mut self, len: usize);
    fn trailers(&mut self, trailers: &HeaderMap);
    fn end(&mut self, result: Result<(), &Error>);
}

/// Two observers of one body.
struct Both(Box<dyn Observe>, Box<dyn Observe>);

impl Observe for Both {
    fn data(&mut self, len: usize) {
        self.0.data(len);
        self.1.data(len);
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        self.0.trailers(trailers);
        self.1.trailers(trailers);
    }

    fn end(&mut self, result: Result<(), &Error>) {
        self.0.end(result);
        self.1.end(result);
    }
}

impl Body {
    pub(crate) fn empty() -> Self {
        Self::default()
    }

    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        if bytes.is_empty() {
            Self::default()
        } else {
            Self::of(Source::Full(bytes))
        }
    }

    /// The body of a request to us.
    pub(crate) fn h1_request(received: Box<h1::server::Received>) -> Self {
        Self::of(Source::H1Request(received))
    }

    /// The body of a response to us.
    pub(crate) fn h1_response(received: Box<h1::client::Received>) -> Self {
        Self::of(Source::H1Response(received))
    }

    /// The body of a request that asks for another protocol.
    pub(crate) fn upgradable(mut self, upgraded: oneshot::Receiver<Leg>) -> Self {
        self.upgraded = Some(upgraded);
        self
    }

    /// Where the side of a client that asks for another protocol comes; once.
    pub(crate) fn take_client(&mut self) -> Option<oneshot::Receiver<Leg>> {
        self.upgraded.take()
    }

    /// The answer that grants a stream.
    pub(crate) fn stream(stream: h2::stream::Stream) -> Self {
        Self::of(Source::Stream(Some(Box::new(stream))))
    }

    pub(crate) fn replayed(kept: VecDeque<Bytes>, rest: Self) -> Self {
        let trailers = None;
        Self::of(Source::Replayed(Box::new(Replayed { kept, trailers, rest })))
    }

    /// A body that has been received to its end.
    pub(crate) fn received(kept: VecDeque<Bytes>, trailers: Option<HeaderMap>) -> Self {
        let rest = Self::empty();
        Self::of(Source::Replayed(Box::new(Replayed { kept, trailers, rest })))
    }

    pub(crate) fn limited(limited: Box<Limited>) -> Self {
        Self::of(Source::Limited(limited))
    }

    /// The server's side behind the answer that grants another protocol; once.
    pub(crate) fn take_upgraded(&mut self) -> Option<Leg> {
        match &mut self.source {
            Source::H1Response(received) => received.take_upgraded().map(Leg::Connection),
            Source::Stream(stream) => stream.take().map(Leg::Stream),
            _ => None,
        }
    }

    pub(crate) fn keeping(keeping: Box<Keeping>) -> Self {
        Self::of(Source::Keeping(keeping))
    }

    fn of(source: Source) -> Self {
        Self {
            source,
            observer: None,
            slot: None,
            upgraded: None,
        }
    }

    pub(crate) fn holding(mut self, slot: Option<Slot>) -> Self {
        self.slot = slot;
        if http_body::Body::is_end_stream(&self) {
            self.ended(Ok(()));
        }
        self
    }

    /// Tells `observer` what passes from now on. A body that is already at its end reports that at once.
    pub(crate) fn observed(mut self, mut observer: Box<dyn Observe>) -> Self {
        if http_body::Body::is_end_stream(&self) {
            observer.end(Ok(()));
        } else {
            self.observer = Some(match self.observer.take() {
                None => observer,
                Some(first) => Box::new(Both(first, observer)),
            });
        }
        self
    }

    /// Drops a body before its end; observers hear that it ended so.
    pub(crate) fn end_with(mut self, result: Result<(), &Error>) {
        self.ended(result);
        let inner = match self.source {
            Source::Replayed(replayed) => Some(replayed.rest),
            Source::Limited(limited) => limited.into_inner(),
            _ => None,
        };
        if let Some(inner) = inner {
            inner.end_with(result);
        }
    }

    /// Whether its time is over, to be asked while its receiver takes nothing of it, because it has so many bytes of it left.
    pub(crate) fn poll_late(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        let Source::Limited(limited) = &mut self.source else {
            return Poll::Pending;
        };
        let late = ready!(limited.poll_late(unsent, cx));
        self.ended(Err(&late));
        Poll::Ready(late)
    }

    fn ended(&mut self, result: Result<(), &Error>) {
        if let Some(mut observer) = self.observer.take() {
            observer.end(result);
        }
        if let Some(slot) = &mut self.slot {
            slot.ended(result);
        }
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.source {
            Source::Empty | Source::Stream(_) => Poll::Ready(None),
            Source::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                self.source = Source::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Source::H2(received) => received.poll_frame(cx),
            Source::H1Request(received) => received.poll_frame(cx),
            Source::H1Response(received) => received.poll_frame(cx),
            Source::Keeping(keeping) => keeping.poll_frame(cx),
            Source::Limited(limited) => limited.poll_frame(cx),
            Source::Replayed(replayed) => match (replayed.kept.pop_front(), replayed.trailers.take()) {
                (Some(bytes), trailers) => {
                    replayed.trailers = trailers;
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                }
                (None, Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                (None, None) => Pin::new(&mut replayed.rest).poll_frame(cx),
            },
        }
    }
}

impl From<h2::Received> for Body {
    fn from(received: h2::Received) -> Self {
        Self::of(Source::H2(received))
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Body")
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        let frame = ready!(this.poll_source(cx));
        match &frame {
            None => this.ended(Ok(())),
            Some(Err(error)) => this.ended(Err(error)),
            Some(Ok(frame)) => {
                if let Some(observer) = &mut this.observer {
                    if let Some(data) = frame.data_ref() {
                        observer.data(data.len());
                    } else if let Some(trailers) = frame.trailers_ref() {
                        observer.trailers(trailers);
                    }
                }
                // Receivers may stop asking once the end is known, so it is reported with the last frame.
                let is_watched = this.observer.is_some() || this.slot.is_some();
                if is_watched && http_body::Body::is_end_stream(this) {
                    this.ended(Ok(()));
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Empty | Source::Stream(_) => true,
            Source::Full(_) => false,
            Source::H2(received) => received.is_end_stream(),
            Source::H1Request(received) => received.is_end_stream(),
            Source::H1Response(received) => received.is_end_stream(),
            Source::Keeping(keeping) => keeping.is_end_stream(),
            Source::Limited(limited) => limited.is_end_stream(),
            Source::Replayed(replayed) => {
                replayed.kept.is_empty() && replayed.trailers.is_none() && replayed.rest.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Empty | Source::Stream(_) => SizeHint::with_exact(0),
            Source::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Source::H2(received) => received.size_hint(),
            Source::H1Request(received) => received.size_hint(),
            Source::H1Response(received) => received.size_hint(),
            Source::Keeping(keeping) => keeping.size_hint(),
            Source::Limited(limited) => limited.size_hint(),
            Source::Replayed(replayed) => {
                let kept: u64 = replayed.kept.iter().map(|bytes| bytes.len() as u64).sum();
                match replayed.rest.size_hint().exact() {
                    Some(rest) => SizeHint::with_exact(kept + rest),
                    None => SizeHint::default(),
                }
            }
        }
    }
}
