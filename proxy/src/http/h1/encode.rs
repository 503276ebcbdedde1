//! Writes messages: the head, and bodies with a length, chunked, or until the connection closes.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{self, Write as _},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use tokio::{
    io::AsyncWrite,
    time::{Sleep, sleep},
};

use crate::http::{
    body::Body,
    error::Error,
    h1::{head::is_framing_header, read_buffer},
    header_map_pool, headers,
};

/// Maximum size of body data that is copied behind the head. Larger data is written without a copy.
const MAX_INLINE_BODY_BYTES: usize = 4 * 1024;

/// Maximum size of body data for one write. Each write costs one pass through the network stack, which takes at most 64 KiB at
/// once.
const MAX_WRITE_BYTES: usize = read_buffer::READ_BUFFER_BYTES;

/// Maximum size of a request that is kept for a resend, in bytes. A server normally reads this much in one call, so it has
/// read all or nothing of such a request that was written in one call.
const MAX_RESENDABLE_BYTES: usize = 4 * 1024;

/// Maximum time that a head waits for a short body, so that one write sends both. The body is normally available at
/// once, or slightly later on a busy machine.
const BODY_WAIT_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) trait SendableBody: http_body::Body<Data = Bytes, Error = Error> + Unpin {}

impl<B: http_body::Body<Data = Bytes, Error = Error> + Unpin> SendableBody for B {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyFraming {
    /// Number of body bytes that are not encoded yet.
    Length(u64),
    Chunked,
    UntilClose,
}

/// A message that is being written. The order on the wire is `staged`, `data`, `chunk_end`, then either `deferred_end` or the rest
/// of `body`.
pub(crate) struct OutgoingMessage<B> {
    /// Encoded bytes that are written first: the head, short body data, chunk sizes, trailers.
    staged: PooledBuffer,
    /// Body bytes that are written without a copy, after `staged`.
    data: PieceQueue,
    /// The line end of the chunk in `data`, and the last chunk if it follows. It is written together with `data`; without `data`
    /// it is moved to `staged`.
    chunk_end: &'static [u8],
    body: B,
    framing: BodyFraming,
    /// Whether the end of the body is encoded.
    is_body_encoded: bool,
    /// End of the body that is encoded when `data` is written: trailers or an error.
    deferred_end: Option<Result<HeaderMap, Error>>,
    /// Whether any byte was written.
    has_begun: bool,
    /// Copy of the message, if one short write sent all of it.
    resend_copy: PooledBuffer,
    body_wait: BodyWait,
    /// The error for a failed write: [`Error::ServerIo`] for a request, [`Error::ClientIo`] for a response.
    io_error: fn(io::Error) -> Error,
}

/// Whether a head that is ready to be written waits for its body.
enum BodyWait {
    Never,
    /// The wait begins when the body is not available at once.
    Allowed,
    Until(Pin<Box<Sleep>>),
}

/// The parts of a request line that affect the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLine<'a> {
    pub(crate) version: Version,
    pub(crate) method: &'a Method,
}

/// Whether the connection is reused after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionReuse {
    KeepAlive,
    Close,
}

/// Encodes the head of `req`; its URI must be in the form for the wire.
pub(crate) fn encode_request<B: SendableBody>(req: Request<B>) -> OutgoingMessage<B> {
    let (parts, body) = req.into_parts();
    let mut out = PooledBuffer::take();
    let target = parts.uri;
    out.put_slice(parts.method.as_str().as_bytes());
    out.put_u8(b' ');
    // Writing to memory cannot fail.
    let _ = match (target.scheme(), target.authority(), target.path_and_query()) {
        (None, Some(authority), _) => write!((&mut *out).writer(), "{authority}"),
        (Some(_), ..) => write!((&mut *out).writer(), "{target}"),
        (None, None, Some(path)) if path.as_str().starts_with('?') => write!((&mut *out).writer(), "{path}"),
        (None, None, Some(path)) => {
            out.put_slice(path.as_str().as_bytes());
            Ok(())
        }
        (None, None, None) => {
            out.put_u8(b'/');
            Ok(())
        }
    };
    out.put_slice(if parts.version == Version::HTTP_10 {
        b" HTTP/1.0\r\n"
    } else {
        b" HTTP/1.1\r\n"
    });
    let ended = body.is_end_stream();
    let size = body.size_hint();
    let length = match headers::content_length(&parts.headers) {
        Some(_) if ended => Some(0),
        declared => declared.or_else(|| size.exact().filter(|_| !ended)),
    };
    let framing = match length {
        Some(length) => BodyFraming::Length(length),
        None if ended || parts.version == Version::HTTP_10 => BodyFraming::Length(0),
        None => BodyFraming::Chunked,
    };
    // With `expect: 100-continue`, the body arrives only after the head was sent.
    let fits = size.upper().is_some_and(|length| length <= MAX_RESENDABLE_BYTES as u64);
    let body_wait = if !ended && fits && !parts.headers.contains_key(header::EXPECT) {
        BodyWait::Allowed
    } else {
        BodyWait::Never
    };
    put_headers(&mut out, &parts.headers);
    if length.is_some() || !ended {
        put_framing(&mut out, framing);
    }
    out.put_slice(b"\r\n");
    header_map_pool::put(parts.headers);
    OutgoingMessage {
        framing,
        is_body_encoded: ended,
        deferred_end: None,
        body_wait,
        ..new_message(out, body)
    }
}

/// Encodes the head of a response. Also returns `reuse`, or `Close` if the body ends with the connection or the head has
/// `connection: close`.
pub(crate) fn encode_response<B: SendableBody>(
    rsp: Response<B>,
    request: RequestLine<'_>,
    mut reuse: ConnectionReuse,
) -> (OutgoingMessage<B>, ConnectionReuse) {
    let (parts, body) = rsp.into_parts();
    let mut out = PooledBuffer::take();
    let is_10 = request.version == Version::HTTP_10;
    out.put_slice(if is_10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " });
    put_status(&mut out, parts.status);
    put_headers(&mut out, &parts.headers);
    let no_body = headers::has_no_body(parts.status, request.method);
    let ended = no_body || body.is_end_stream();
    let declared = headers::content_length(&parts.headers);
    let framing = match declared.or_else(|| body.size_hint().exact()) {
        _ if ended => BodyFraming::Length(0),
        Some(length) => BodyFraming::Length(length),
        None if is_10 => BodyFraming::UntilClose,
        None => BodyFraming::Chunked,
    };
    match declared {
        // A response without a body may declare a length, unless the status or method forbids it.
        Some(length) if no_body && may_have_content_length(parts.status, request.method) => {
            put_framing(&mut out, BodyFraming::Length(length));
        }
        _ if no_body => {}
        _ => put_framing(&mut out, framing),
    }
    if framing == BodyFraming::UntilClose {
        reuse = ConnectionReuse::Close;
    }
    // A filter can set `connection`; the header of the server has been removed.
    match (reuse, is_10) {
        _ if parts.status == StatusCode::SWITCHING_PROTOCOLS => {}
        _ if headers::has_connection_option(&parts.headers, b"close") => reuse = ConnectionReuse::Close,
        (ConnectionReuse::Close, false) => out.put_slice(b"connection: close\r\n"),
        (ConnectionReuse::KeepAlive, true) => out.put_slice(b"connection: keep-alive\r\n"),
        _ => {}
    }
    out.put_slice(b"\r\n");
    header_map_pool::put(parts.headers);
    let message = OutgoingMessage {
        framing,
        is_body_encoded: ended,
        io_error: Error::ClientIo,
        ..new_message(out, body)
    };
    (message, reuse)
}

pub(crate) fn encode_interim(rsp: &Response<()>, out: &mut BytesMut) {
    out.put_slice(b"HTTP/1.1 ");
    put_status(out, rsp.status());
    put_headers(out, rsp.headers());
    out.put_slice(b"\r\n");
}

fn new_message<B>(out: PooledBuffer, body: B) -> OutgoingMessage<B> {
    OutgoingMessage {
        staged: out,
        data: PieceQueue::default(),
        chunk_end: b"",
        body,
        framing: BodyFraming::Length(0),
        is_body_encoded: true,
        deferred_end: None,
        has_begun: false,
        resend_copy: PooledBuffer::default(),
        body_wait: BodyWait::Never,
        io_error: Error::ServerIo,
    }
}

fn may_have_content_length(status: StatusCode, method: &Method) -> bool {
    *method != Method::CONNECT && status != StatusCode::NO_CONTENT && !status.is_informational()
}

fn put_status(out: &mut BytesMut, status: StatusCode) {
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.put_slice(b"\r\n");
}

/// Writes all headers except framing headers, which the writer chooses.
fn put_headers(out: &mut BytesMut, headers: &HeaderMap) {
    for (name, value) in headers {
        if is_framing_header(name) {
            continue;
        }
        out.reserve(name.as_str().len() + value.len() + 4);
        out.put_slice(name.as_str().as_bytes());
        out.put_slice(b": ");
        out.put_slice(value.as_bytes());
        out.put_slice(b"\r\n");
    }
}

fn put_framing(out: &mut BytesMut, framing: BodyFraming) {
    let _ = match framing {
        BodyFraming::Length(length) => write!(out.writer(), "content-length: {length}\r\n"),
        BodyFraming::Chunked => out.writer().write_all(b"transfer-encoding: chunked\r\n"),
        BodyFraming::UntilClose => Ok(()),
    };
}

impl BodyWait {
    /// Ready when the head must be written without waiting longer for the body.
    fn poll_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self, Self::Allowed) {
            *self = Self::Until(Box::pin(sleep(BODY_WAIT_TIMEOUT)));
        }
        if let Self::Until(end) = self {
            ready!(end.as_mut().poll(cx));
            *self = Self::Never;
        }
        Poll::Ready(())
    }
}

impl OutgoingMessage<Body> {
    /// Ready with the timeout error when a deadline of the body has expired. Poll it while nothing can be written.
    pub(crate) fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let unsent = self.n_unsent();
        self.body.poll_deadline(unsent, cx)
    }
}

impl<B: SendableBody> OutgoingMessage<B> {
    /// Writes the available data; ready when the whole message is written. Repeats these steps:
    /// 1. encodes the available data, or waits for a short body;
    /// 2. if everything encoded is written: encodes the deferred end, or flushes and finishes;
    /// 3. writes once.
    ///
    /// # Errors
    /// Writing fails, the body fails, or its length differs from `content-length`. The message is truncated then.
    pub(crate) fn poll_write<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut W,
    ) -> Poll<Result<(), Error>> {
        loop {
            match self.poll_encode(cx)? {
                Poll::Ready(()) => {}
                // `data` is empty too: `poll_encode` polls the body only then.
                Poll::Pending if self.staged.is_empty() => {
                    ready!(Pin::new(&mut *io).poll_flush(cx)).map_err(self.io_error)?;
                    return Poll::Pending;
                }
                Poll::Pending => ready!(self.body_wait.poll_timeout(cx)),
            }
            if self.is_written() {
                if let Some(deferred_end) = self.deferred_end.take() {
                    self.encode_end(Some(&deferred_end?))?;
                    continue;
                }
                if self.is_body_encoded {
                    return Pin::new(&mut *io).poll_flush(cx).map_err(self.io_error);
                }
                continue;
            }
            let n = if self.data.is_empty() {
                ready!(Pin::new(&mut *io).poll_write(cx, &self.staged))
            } else {
                let mut parts = [io::IoSlice::new(&[]); MAX_PIECES_PER_WRITE + 2];
                parts[0] = io::IoSlice::new(&self.staged);
                let n = 1 + self.data.fill_slices(&mut parts[1..=MAX_PIECES_PER_WRITE]);
                parts[n] = io::IoSlice::new(self.chunk_end);
                ready!(Pin::new(&mut *io).poll_write_vectored(cx, &parts[..=n]))
            };
            let n = n.map_err(self.io_error)?;
            if n == 0 {
                return Poll::Ready(Err((self.io_error)(io::ErrorKind::WriteZero.into())));
            }
            if self.is_resendable() && n == self.staged.len() {
                self.resend_copy = std::mem::take(&mut self.staged);
                self.has_begun = true;
                continue;
            }
            self.has_begun = true;
            self.advance(n);
        }
    }

    /// Encodes available body data, so that a small body is written with its head. Ready when there is enough to write.
    ///
    /// # Errors
    /// As for [`Self::poll_write`].
    pub(crate) fn poll_encode(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while !self.is_body_encoded
            && self.deferred_end.is_none()
            && self.data.is_empty()
            && self.staged.len() < MAX_INLINE_BODY_BYTES
        {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
            let piece = frame.transpose()?.map_or(BodyPiece::End, BodyPiece::from_frame);
            self.encode_available(cx, piece)?;
        }
        Poll::Ready(Ok(()))
    }

    fn advance(&mut self, n: usize) {
        let n_staged = n.min(self.staged.len());
        self.staged.advance(n_staged);
        let n_chunk_end = self.data.advance(n - n_staged);
        self.chunk_end = &self.chunk_end[n_chunk_end..];
        if self.data.is_empty() {
            // No data is left, so the next write would not include the rest of `chunk_end`.
            self.staged.put_slice(std::mem::take(&mut self.chunk_end));
        }
    }

    /// Encoded bytes that are not written yet.
    pub(crate) fn n_unsent(&self) -> usize {
        self.staged.len() + self.data.len() + self.chunk_end.len()
    }

    /// Whether everything that is encoded so far is written.
    fn is_written(&self) -> bool {
        self.staged.is_empty() && self.data.is_empty()
    }

    /// Encodes the next piece of the body. If it is large, the pieces after it that are available are encoded with it.
    fn encode_available(&mut self, cx: &mut Context<'_>, mut next: BodyPiece) -> Result<(), Error> {
        loop {
            match next {
                BodyPiece::Data(data) => self.data.push(data),
                BodyPiece::Trailers(trailers) if self.data.is_empty() => return self.encode_end(Some(&trailers)),
                BodyPiece::Trailers(trailers) => {
                    self.deferred_end = Some(Ok(trailers));
                    return self.encode_data();
                }
                BodyPiece::End => {
                    self.encode_data()?;
                    return self.encode_end(None);
                }
            }
            if self.body.is_end_stream() {
                next = BodyPiece::End;
                continue;
            }
            if self.data.len() <= MAX_INLINE_BODY_BYTES || !self.data.has_room() {
                return self.encode_data();
            }
            next = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => BodyPiece::from_frame(frame),
                Poll::Ready(None) => BodyPiece::End,
                Poll::Ready(Some(Err(error))) => {
                    self.deferred_end = Some(Err(error));
                    return self.encode_data();
                }
                Poll::Pending => return self.encode_data(),
            };
        }
    }

    /// Encodes `data`: begins its chunk, or counts it towards the known length. Moves it to `staged` if it is short.
    fn encode_data(&mut self) -> Result<(), Error> {
        let len = self.data.len();
        if len == 0 {
            return Ok(());
        }
        match &mut self.framing {
            BodyFraming::Length(left) => *left = left.checked_sub(len as u64).ok_or(Error::ContentLengthMismatch)?,
            BodyFraming::Chunked => {
                let _ = write!((&mut *self.staged).writer(), "{len:x}\r\n");
                self.chunk_end = b"\r\n";
            }
            BodyFraming::UntilClose => {}
        }
        if len <= MAX_INLINE_BODY_BYTES {
            // Short data is always one piece: more pieces are collected only after a large one.
            let data = std::mem::take(&mut self.data);
            self.staged.put_slice(&data.first);
            self.staged.put_slice(std::mem::take(&mut self.chunk_end));
        }
        Ok(())
    }

    fn encode_end(&mut self, trailers: Option<&HeaderMap>) -> Result<(), Error> {
        self.is_body_encoded = true;
        match self.framing {
            BodyFraming::Length(0) | BodyFraming::UntilClose => {}
            BodyFraming::Length(_) => return Err(Error::ContentLengthMismatch),
            BodyFraming::Chunked if trailers.is_none() && !self.data.is_empty() => self.chunk_end = b"\r\n0\r\n\r\n",
            BodyFraming::Chunked => {
                let out = &mut self.staged;
                out.put_slice(b"0\r\n");
                if let Some(trailers) = trailers {
                    put_headers(out, trailers);
                }
                out.put_slice(b"\r\n");
            }
        }
        Ok(())
    }

    /// Whether the message is completely encoded, short, and not written yet.
    fn is_resendable(&self) -> bool {
        !self.has_begun && self.is_body_encoded && self.data.is_empty() && self.staged.len() <= MAX_RESENDABLE_BYTES
    }

    /// Whether the end of the body is encoded.
    pub(crate) fn is_body_encoded(&self) -> bool {
        self.is_body_encoded
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether the body ends with the connection, so that the receiver cannot detect a truncated body.
    pub(crate) fn ends_with_connection(&self) -> bool {
        self.framing == BodyFraming::UntilClose
    }

    /// Returns the message for a resend: unchanged if nothing was written; the saved copy, with `empty` as its body, if one short
    /// write sent all of it; otherwise `None`.
    pub(crate) fn into_resendable(mut self, empty: B) -> Option<Self> {
        if !self.has_begun {
            return Some(self);
        }
        let copy = std::mem::take(&mut self.resend_copy);
        (!copy.is_empty()).then(|| new_message(copy, empty))
    }

    /// Whether the whole message is written.
    pub(crate) fn is_done(&self) -> bool {
        self.is_body_encoded && self.is_written()
    }
}

enum BodyPiece {
    Data(Bytes),
    Trailers(HeaderMap),
    End,
}

impl BodyPiece {
    fn from_frame(frame: http_body::Frame<Bytes>) -> Self {
        match frame.into_data().map_err(http_body::Frame::into_trailers) {
            Ok(data) => Self::Data(data),
            Err(Ok(trailers)) => Self::Trailers(trailers),
            Err(Err(_)) => Self::End, // never happens: a frame is data or trailers
        }
    }
}

/// Pieces of body data in the order of writing; in a chunked body they are one chunk.
#[derive(Default)]
struct PieceQueue {
    first: Bytes,
    rest: VecDeque<Bytes>,
}

const MAX_PIECES_PER_WRITE: usize = 8;

impl PieceQueue {
    fn push(&mut self, piece: Bytes) {
        if self.first.is_empty() {
            self.first = piece;
        } else if !piece.is_empty() {
            self.rest.push_back(piece);
        }
    }

    fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    fn len(&self) -> usize {
        self.first.len() + self.rest.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether another piece of the size of the first one fits.
    fn has_room(&self) -> bool {
        self.rest.len() + 1 < MAX_PIECES_PER_WRITE && self.len() + self.first.len() <= MAX_WRITE_BYTES
    }

    /// Fills the start of `slices` and returns the number of slices filled.
    fn fill_slices<'a>(&'a self, slices: &mut [io::IoSlice<'a>]) -> usize {
        let pieces = std::iter::once(&self.first).chain(&self.rest);
        let filled = slices.iter_mut().zip(pieces);
        filled.map(|(slice, piece)| *slice = io::IoSlice::new(piece)).count()
    }

    /// Removes the first `n` bytes. Returns how many of them are not in this queue.
    fn advance(&mut self, mut n: usize) -> usize {
        while n > 0 && !self.first.is_empty() {
            let n_first = n.min(self.first.len());
            self.first.advance(n_first);
            n -= n_first;
            if self.first.is_empty() {
                self.first = self.rest.pop_front().unwrap_or_default();
            }
        }
        n
    }
}

/// Output buffer; later messages of the thread reuse its memory.
#[derive(Default)]
struct PooledBuffer(BytesMut);

thread_local! {
    static SPARE_BUFFERS: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

const MAX_SPARE_BUFFERS: usize = 64;
const MAX_SPARE_BUFFER_BYTES: usize = 2 * MAX_INLINE_BODY_BYTES;

impl PooledBuffer {
    fn take() -> Self {
        let mut bytes = SPARE_BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
        bytes.reserve(1024);
        Self(bytes)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.0);
        bytes.clear();
        // `capacity` excludes bytes already written, but their memory is still allocated.
        let is_large = bytes.try_reclaim(MAX_SPARE_BUFFER_BYTES + 1);
        if bytes.capacity() > 0 && !is_large {
            // Fails only while the thread exits.
            let _ = SPARE_BUFFERS.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < MAX_SPARE_BUFFERS {
                    spare.push(bytes);
                }
            });
        }
    }
}

impl std::ops::Deref for PooledBuffer {
    type Target = BytesMut;

    fn deref(&self) -> &BytesMut {
        &self.0
    }
}

impl std::ops::DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut BytesMut {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::stream;
    use http::HeaderMap;
    use http_body::Frame;
    use http_body_util::{BodyExt, Empty, Full, StreamBody};
    use tokio::io::AsyncReadExt;

    use super::*;

    /// The bytes of a request.
    async fn written<B>(req: Request<B>) -> String
    where
        B: http_body::Body<Data = Bytes, Error = std::convert::Infallible> + Unpin,
    {
        let (mut ours, mut theirs) = tokio::io::duplex(100_000);
        let mut message = encode_request(req.map(|body| body.map_err(|never| match never {})));
        poll_fn(|cx| message.poll_write(cx, &mut ours)).await.unwrap();
        assert!(message.is_done());
        drop(ours);
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        text
    }

    /// A body of unknown length, with a trailer.
    fn streamed(data: &'static [u8]) -> impl http_body::Body<Data = Bytes, Error = std::convert::Infallible> + Unpin {
        let mut trailers = HeaderMap::new();
        trailers.insert("t", "1".parse().unwrap());
        let frames = [Frame::data(Bytes::from_static(data)), Frame::trailers(trailers)];
        StreamBody::new(stream::iter(frames.map(Ok)))
    }

    #[tokio::test]
    async fn request_framing_depends_on_the_known_body_length() {
        let req = Request::get("/a?b").header("host", "x").body(Empty::new()).unwrap();
        assert_eq!(written(req).await, "GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n");
        let hey = || Full::new(Bytes::from_static(b"hey"));
        let expected = "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nhey";
        assert_eq!(written(Request::post("/").body(hey()).unwrap()).await, expected);
        assert_eq!(
            written(Request::post("/").header("content-length", "3").body(hey()).unwrap()).await,
            expected
        );
        assert_eq!(
            written(Request::post("/").body(streamed(b"hey")).unwrap()).await,
            "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhey\r\n0\r\nt: 1\r\n\r\n"
        );
    }

    /// A body of three bytes that arrives later.
    struct LateBody(Option<tokio::sync::oneshot::Receiver<Bytes>>);

    impl http_body::Body for LateBody {
        type Data = Bytes;
        type Error = Error;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
            let Some(receiver) = &mut self.0 else {
                return Poll::Ready(None);
            };
            let data = ready!(Pin::new(receiver).poll(cx)).unwrap();
            self.0 = None;
            Poll::Ready(Some(Ok(Frame::data(data))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_none()
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(3)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_waits_for_a_short_body_for_a_limited_time() {
        let (mut ours, mut theirs) = tokio::io::duplex(100_000);
        let (body_tx, body_rx) = tokio::sync::oneshot::channel();
        let post = Request::post("/").header("content-length", "3");
        let mut message = encode_request(post.body(LateBody(Some(body_rx))).unwrap());
        let mut read = async || {
            let mut buf = [0; 100];
            let n = theirs.read(&mut buf).await.unwrap();
            String::from_utf8_lossy(&buf[..n]).into_owned()
        };
        let begun = tokio::time::Instant::now();
        let writing = poll_fn(|cx| message.poll_write(cx, &mut ours));
        let reading = async {
            assert_eq!(read().await, "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n");
            assert!(begun.elapsed() >= BODY_WAIT_TIMEOUT);
            body_tx.send(Bytes::from_static(b"hey")).unwrap();
            assert_eq!(read().await, "hey");
        };
        let (written, ()) = tokio::join!(writing, reading);
        written.unwrap();
        assert!(message.into_resendable(LateBody(None)).is_none());
    }

    #[tokio::test]
    async fn a_short_message_written_at_once_can_be_resent() {
        let (mut ours, _theirs) = tokio::io::duplex(100_000);
        let body = |text| Full::new(Bytes::from_static(text)).map_err(|never| match never {});
        let mut message = encode_request(Request::post("/").body(body(b"hey")).unwrap());
        poll_fn(|cx| message.poll_write(cx, &mut ours)).await.unwrap();
        let again = message.into_resendable(body(b"")).unwrap();
        assert_eq!(&**again.staged, b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nhey");
    }

    #[tokio::test]
    async fn a_failed_read_from_the_server_is_an_error_of_the_server() {
        let reset = Error::ServerIo(io::ErrorKind::ConnectionReset.into());
        let failed_body = StreamBody::new(stream::iter([Err::<Frame<Bytes>, _>(reset)]));
        let request_line = RequestLine {
            version: Version::HTTP_11,
            method: &Method::GET,
        };
        let (mut ours, theirs) = tokio::io::duplex(100);
        let (mut message, _) = encode_response(Response::new(failed_body), request_line, ConnectionReuse::KeepAlive);
        let error = poll_fn(|cx| message.poll_write(cx, &mut ours)).await.unwrap_err();
        assert!(matches!(error, Error::ServerIo(_)), "{error:?}");
        drop(theirs);
        let body = Empty::new().map_err(|never| match never {});
        let (mut message, _) = encode_response(Response::new(body), request_line, ConnectionReuse::KeepAlive);
        let error = poll_fn(|cx| message.poll_write(cx, &mut ours)).await.unwrap_err();
        assert!(matches!(error, Error::ClientIo(_)), "{error:?}");
    }

    #[test]
    fn a_connection_closes_after_a_response_with_connection_close() {
        let request_line = RequestLine {
            version: Version::HTTP_11,
            method: &Method::GET,
        };
        for (value, expected) in [
            ("close", ConnectionReuse::Close),
            ("x, Close", ConnectionReuse::Close),
            ("x", ConnectionReuse::KeepAlive),
        ] {
            let rsp = Response::builder().header("connection", value).body(Body::empty());
            let (_, reuse) = encode_response(rsp.unwrap(), request_line, ConnectionReuse::KeepAlive);
            assert_eq!(reuse, expected, "{value}");
        }
    }

    #[test]
    fn a_close_is_announced_beside_another_connection_option_of_a_filter() {
        let request_line = RequestLine {
            version: Version::HTTP_11,
            method: &Method::GET,
        };
        let rsp = Response::builder().header("connection", "x").body(Body::empty());
        let (message, _) = encode_response(rsp.unwrap(), request_line, ConnectionReuse::Close);
        let head = String::from_utf8(message.into_resendable(Body::empty()).unwrap().staged.to_vec()).unwrap();
        for line in ["\r\nconnection: x\r\n", "\r\nconnection: close\r\n"] {
            assert!(head.contains(line), "{head}");
        }
    }

    #[tokio::test]
    async fn a_large_chunk_is_followed_by_its_line_end() {
        static LARGE: [u8; 50_000] = [b'x'; 50_000];
        let text = written(Request::post("/").body(streamed(&LARGE)).unwrap()).await;
        assert!(text.contains("\r\nc350\r\nxxx"));
        assert!(text.ends_with("xxx\r\n0\r\nt: 1\r\n\r\n"));
    }
}
