//! The body type of all requests and responses, with an observer of its frames and of its end.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};

use crate::http::{
    error::Error, h2::body::StreamBody, h2::upgraded_stream::UpgradedStream, stack::admission::InFlightSlot,
    upgrade::reply_channels::ReplyChannels, upgrade::tunnel::ClientTunnel, upgrade::tunnel::TunnelSide,
};

/// A request or response body.
#[derive(Default)]
pub(crate) struct Body {
    source: BodySource,
    observer: Option<Box<dyn BodyObserver>>,
    /// In-flight slot, released when the body is dropped.
    slot: Option<InFlightSlot>,
    reply_channels: ReplyChannels,
}

#[derive(Default)]
enum BodySource {
    #[default]
    Empty,
    Full(Bytes),
    /// Received on an HTTP/2 stream.
    H2(StreamBody),
    /// A body from an HTTP/1 connection, or a wrapper around another body.
    Dyn(Box<dyn ReceivedBody>),
    /// No body: the HTTP/2 stream now carries another protocol. `None` after the tunnel has taken the stream.
    Upgraded(Option<Box<UpgradedStream>>),
    Buffered(Box<BufferedBody>),
}

/// A body whose first part, or all of it, is buffered.
struct BufferedBody {
    buffered: VecDeque<Bytes>,
    /// Trailers after `buffered`; `rest` is empty then.
    trailers: Option<HeaderMap>,
    rest: Body,
}

/// A source of frames that a codec or a wrapper implements.
pub(crate) trait ReceivedBody: Send {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>>;

    fn is_end_stream(&self) -> bool;

    fn size_hint(&self) -> SizeHint;

    /// Takes the connection to a server that has switched protocols. Returns `None` on the second call.
    fn take_server_tunnel(&mut self) -> Option<TunnelSide> {
        None
    }

    /// Ready with the timeout error when a deadline of the body has expired. `unsent` is the number of bytes that the
    /// receiver has taken but not sent yet.
    fn poll_deadline(&mut self, _unsent: usize, _cx: &mut Context<'_>) -> Poll<Error> {
        Poll::Pending
    }

    /// The wrapped body. [`Body::discard_with_result`] reports the end to it too.
    fn into_inner(self: Box<Self>) -> Option<Body> {
        None
    }
}

/// Observes the frames and the end of a body. If the observer is dropped before `end` is called, the receiver has dropped the
/// body before its end.
pub(crate) trait BodyObserver: Send {
    fn data(&mut self, len: usize);
    fn trailers(&mut self, trailers: &HeaderMap);
    fn end(&mut self, result: Result<(), &Error>);
}

struct ObserverPair(Box<dyn BodyObserver>, Box<dyn BodyObserver>);

impl BodyObserver for ObserverPair {
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
            Self::from_source(BodySource::Full(bytes))
        }
    }

    pub(crate) fn received(source: Box<dyn ReceivedBody>) -> Self {
        Self::from_source(BodySource::Dyn(source))
    }

    /// Attaches the reply channels of the request whose body this is.
    pub(crate) fn with_reply_channels(mut self, reply_channels: ReplyChannels) -> Self {
        self.reply_channels = reply_channels;
        self
    }

    /// The client's side of the tunnel, if this is the body of an upgrade request and its reply channels were not taken.
    pub(crate) fn client_tunnel_mut(&mut self) -> Option<&mut ClientTunnel> {
        self.reply_channels.upgrade.as_mut()
    }

    /// Takes the reply channels of the request. Returns empty ones on the second call.
    pub(crate) fn take_reply_channels(&mut self) -> ReplyChannels {
        std::mem::take(&mut self.reply_channels)
    }

    /// The body of a response that accepts an extended CONNECT.
    pub(crate) fn upgraded(stream: UpgradedStream) -> Self {
        Self::from_source(BodySource::Upgraded(Some(Box::new(stream))))
    }

    /// A body that consists of `buffered` and then `rest`.
    pub(crate) fn replayed(buffered: VecDeque<Bytes>, rest: Self) -> Self {
        let trailers = None;
        Self::from_source(BodySource::Buffered(Box::new(BufferedBody {
            buffered,
            trailers,
            rest,
        })))
    }

    /// A body that was received completely.
    pub(crate) fn buffered(buffered: VecDeque<Bytes>, trailers: Option<HeaderMap>) -> Self {
        let rest = Self::empty();
        Self::from_source(BodySource::Buffered(Box::new(BufferedBody {
            buffered,
            trailers,
            rest,
        })))
    }

    /// Takes the server's side of the tunnel after a response that switches protocols. Returns `None` on the second call.
    pub(crate) fn take_server_tunnel(&mut self) -> Option<TunnelSide> {
        match &mut self.source {
            BodySource::Dyn(received) => received.take_server_tunnel(),
            BodySource::Upgraded(stream) => stream.take().map(TunnelSide::Stream),
            _ => None,
        }
    }

    fn from_source(source: BodySource) -> Self {
        Self {
            source,
            observer: None,
            slot: None,
            reply_channels: ReplyChannels::default(),
        }
    }

    pub(crate) fn with_slot(mut self, slot: Option<InFlightSlot>) -> Self {
        self.slot = slot;
        if http_body::Body::is_end_stream(&self) {
            self.report_end(Ok(()));
        }
        self
    }

    /// Adds an observer of the remaining frames. If the body is already at its end, `observer` gets the end immediately.
    pub(crate) fn with_observer(mut self, mut observer: Box<dyn BodyObserver>) -> Self {
        if http_body::Body::is_end_stream(&self) {
            observer.end(Ok(()));
        } else {
            self.observer = Some(match self.observer.take() {
                None => observer,
                Some(first) => Box::new(ObserverPair(first, observer)),
            });
        }
        self
    }

    /// Discards the rest of the body, and reports `result` as its end to its observers.
    pub(crate) fn discard_with_result(mut self, result: Result<(), &Error>) {
        self.report_end(result);
        let inner = match self.source {
            BodySource::Buffered(body) => Some(body.rest),
            BodySource::Dyn(received) => received.into_inner(),
            _ => None,
        };
        if let Some(inner) = inner {
            inner.discard_with_result(result);
        }
    }

    /// Ready with the timeout error when a deadline of the body has expired. Poll it while the receiver still has `unsent`
    /// bytes and does not poll for frames.
    pub(crate) fn poll_deadline(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        let BodySource::Dyn(received) = &mut self.source else {
            return Poll::Pending;
        };
        let timeout_error = ready!(received.poll_deadline(unsent, cx));
        self.report_end(Err(&timeout_error));
        Poll::Ready(timeout_error)
    }

    fn report_end(&mut self, result: Result<(), &Error>) {
        if let Some(mut observer) = self.observer.take() {
            observer.end(result);
        }
        if let Some(slot) = &mut self.slot {
            slot.record_end(result);
        }
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.source {
            BodySource::Empty | BodySource::Upgraded(_) => Poll::Ready(None),
            BodySource::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                self.source = BodySource::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            BodySource::H2(received) => received.poll_frame(cx),
            BodySource::Dyn(received) => received.poll_frame(cx),
            BodySource::Buffered(body) => {
                if let Some(bytes) = body.buffered.pop_front() {
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                } else if let Some(trailers) = body.trailers.take() {
                    Poll::Ready(Some(Ok(Frame::trailers(trailers))))
                } else {
                    Pin::new(&mut body.rest).poll_frame(cx)
                }
            }
        }
    }
}

impl From<StreamBody> for Body {
    fn from(received: StreamBody) -> Self {
        Self::from_source(BodySource::H2(received))
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
            None => this.report_end(Ok(())),
            Some(Err(error)) => this.report_end(Err(error)),
            Some(Ok(frame)) => {
                if let Some(observer) = &mut this.observer {
                    if let Some(data) = frame.data_ref() {
                        observer.data(data.len());
                    } else if let Some(trailers) = frame.trailers_ref() {
                        observer.trailers(trailers);
                    }
                }
                // A receiver may stop polling when `is_end_stream` is true, so the end is reported with the last frame.
                let must_report_end = this.observer.is_some() || this.slot.is_some();
                if must_report_end && http_body::Body::is_end_stream(this) {
                    this.report_end(Ok(()));
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            BodySource::Empty | BodySource::Upgraded(_) => true,
            BodySource::Full(_) => false,
            BodySource::H2(received) => received.is_end_stream(),
            BodySource::Dyn(received) => received.is_end_stream(),
            BodySource::Buffered(body) => {
                body.buffered.is_empty() && body.trailers.is_none() && body.rest.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            BodySource::Empty | BodySource::Upgraded(_) => SizeHint::with_exact(0),
            BodySource::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            BodySource::H2(received) => received.size_hint(),
            BodySource::Dyn(received) => received.size_hint(),
            BodySource::Buffered(body) => {
                let n_buffered: u64 = body.buffered.iter().map(|bytes| bytes.len() as u64).sum();
                match body.rest.size_hint().exact() {
                    Some(rest) => SizeHint::with_exact(n_buffered + rest),
                    None => SizeHint::default(),
                }
            }
        }
    }
}
