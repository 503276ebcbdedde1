//! Writing messages: the head, and bodies with a length, in chunks, or up to the connection's end.

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
    h1::{
        head::{self, is_framing},
        read,
    },
    headers, spare,
};

/// Body bytes that are copied behind the head; more of them are written from where they are.
const INLINE: usize = 4 * 1024;

/// Body bytes that are collected for one write, as far as they are there: each write costs its way through the network,
/// which takes no more than 64 KiB at once.
const TOGETHER: usize = read::SIZE;

/// The longest request that is remembered until its response comes, in bytes. Who reads a socket reads as much at once,
/// as a rule: of such a request that left in one piece, all was read, or nothing.
const ONE_PIECE: usize = 4 * 1024;

/// How long a head waits for a short body that is about to come, so that both leave in one piece. It is there already,
/// or on a busy machine a little later.
const HOLD: Duration = Duration::from_millis(100);

/// A body that can be sent.
pub(crate) trait Sent: http_body::Body<Data = Bytes, Error = Error> + Unpin {}

impl<B: http_body::Body<Data = Bytes, Error = Error> + Unpin> Sent for B {}

/// How the body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Bytes that are still to come.
    Length(u64),
    Chunked,
    UntilClose,
}

/// A message on its way out: encoded bytes not written yet, then the rest of the body.
pub(crate) struct Message<B> {
    out: Buffer,
    /// Body bytes written as they are, after `out`.
    data: Pieces,
    /// What follows `data`.
    tail: &'static [u8],
    body: B,
    framing: Framing,
    /// Whether the body's end has been encoded.
    encoded: bool,
    /// How the body ended after what is still to be written: with trailers, or by failing.
    ending: Option<Result<HeaderMap, Error>>,
    /// Whether any byte has left.
    begun: bool,
    /// All of it, once it has left in one short piece.
    piece: Buffer,
    hold: Hold,
}

/// Whether the head waits for the body.
enum Hold {
    No,
    Possible,
    Until(Pin<Box<Sleep>>),
}

/// What a response answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered<'a> {
    pub(crate) version: Version,
    pub(crate) method: &'a Method,
}

/// Whether the connection goes on after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Afterwards {
    Kept,
    Closed,
}

/// Encodes the head of `req`; its URI must be in the form that goes on the wire.
pub(crate) fn request<B: Sent>(req: Request<B>) -> Message<B> {
    let (parts, body) = req.into_parts();
    let mut out = Buffer::spare();
    let target = parts.uri;
    out.put_slice(parts.method.as_str().as_bytes());
    out.put_u8(b' ');
    // Writing into memory cannot fail.
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
        Some(length) => Framing::Length(length),
        None if ended || parts.version == Version::HTTP_10 => Framing::Length(0),
        None => Framing::Chunked,
    };
    // Who asks for permission to send the body waits for an answer to the head.
    let fits = size.upper().is_some_and(|length| length <= ONE_PIECE as u64);
    let hold = if !ended && fits && !parts.headers.contains_key(header::EXPECT) {
        Hold::Possible
    } else {
        Hold::No
    };
    put_headers(&mut out, &parts.headers);
    if length.is_some() || !ended {
        put_framing(&mut out, framing);
    }
    out.put_slice(b"\r\n");
    spare::keep(parts.headers);
    Message {
        framing,
        encoded: ended,
        ending: None,
        hold,
        ..message(out, body)
    }
}

/// Encodes the head of a response.
pub(crate) fn response<B: Sent>(
    rsp: Response<B>,
    to: Answered<'_>,
    mut afterwards: Afterwards,
) -> (Message<B>, Afterwards) {
    let (parts, body) = rsp.into_parts();
    let mut out = Buffer::spare();
    let is_10 = to.version == Version::HTTP_10;
    out.put_slice(if is_10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " });
    put_status(&mut out, parts.status);
    put_headers(&mut out, &parts.headers);
    let no_body = head::has_no_body(parts.status, to.method);
    let ended = no_body || body.is_end_stream();
    let declared = headers::content_length(&parts.headers);
    let framing = match declared.or_else(|| body.size_hint().exact()) {
        _ if ended => Framing::Length(0),
        Some(length) => Framing::Length(length),
        None if is_10 => Framing::UntilClose,
        None => Framing::Chunked,
    };
    match declared {
        // What a body would have been may be told, unless the status forbids it.
        Some(length) if no_body && may_declare(parts.status, to.method) => {
            put_framing(&mut out, Framing::Length(length));
        }
        _ if no_body => {}
        _ => put_framing(&mut out, framing),
    }
    if framing == Framing::UntilClose {
        afterwards = Afterwards::Closed;
    }
    if parts.status != StatusCode::SWITCHING_PROTOCOLS && !parts.headers.contains_key(header::CONNECTION) {
        match (afterwards, is_10) {
            (Afterwards::Closed, false) => out.put_slice(b"connection: close\r\n"),
            (Afterwards::Kept, true) => out.put_slice(b"connection: keep-alive\r\n"),
            _ => {}
        }
    }
    out.put_slice(b"\r\n");
    spare::keep(parts.headers);
    let message = Message {
        framing,
        encoded: ended,
        ending: None,
        ..message(out, body)
    };
    (message, afterwards)
}

/// Encodes an interim response.
pub(crate) fn interim(rsp: &Response<()>, out: &mut BytesMut) {
    out.put_slice(b"HTTP/1.1 ");
    put_status(out, rsp.status());
    put_headers(out, rsp.headers());
    out.put_slice(b"\r\n");
}

fn message<B>(out: Buffer, body: B) -> Message<B> {
    Message {
        out,
        data: Pieces::default(),
        tail: b"",
        body,
        framing: Framing::Length(0),
        encoded: true,
        ending: None,
        begun: false,
        piece: Buffer::default(),
        hold: Hold::No,
    }
}

fn may_declare(status: StatusCode, method: &Method) -> bool {
    *method != Method::CONNECT && status != StatusCode::NO_CONTENT && !status.is_informational()
}

/// The rest of a status line.
fn put_status(out: &mut BytesMut, status: StatusCode) {
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.put_slice(b"\r\n");
}

/// All headers but those that frame the body, which are ours to choose.
fn put_headers(out: &mut BytesMut, headers: &HeaderMap) {
    for (name, value) in headers {
        if is_framing(name) {
            continue;
        }
        out.reserve(name.as_str().len() + value.len() + 4);
        out.put_slice(name.as_str().as_bytes());
        out.put_slice(b": ");
        out.put_slice(value.as_bytes());
        out.put_slice(b"\r\n");
    }
}

fn put_framing(out: &mut BytesMut, framing: Framing) {
    let _ = match framing {
        Framing::Length(length) => write!(out.writer(), "content-length: {length}\r\n"),
        Framing::Chunked => out.writer().write_all(b"transfer-encoding: chunked\r\n"),
        Framing::UntilClose => Ok(()),
    };
}

impl Hold {
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if matches!(self, Self::Possible) {
            *self = Self::Until(Box::pin(sleep(HOLD)));
        }
        if let Self::Until(end) = self {
            ready!(end.as_mut().poll(cx));
            *self = Self::No;
        }
        Poll::Ready(())
    }
}

impl Message<Body> {
    /// Whether the time of its body is over, to be asked while nothing more can be written.
    pub(crate) fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        let unsent = self.unsent();
        self.body.poll_late(unsent, cx)
    }
}

impl<B: Sent> Message<B> {
    /// Writes what there is to write; ready when the whole message is on its way.
    ///
    /// # Errors
    /// Writing failed, the body did, or it is not as long as was said. The message is cut then.
    pub(crate) fn poll_write<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut W,
    ) -> Poll<Result<(), Error>> {
        loop {
            match self.poll_encode(cx)? {
                Poll::Ready(()) => {}
                Poll::Pending if self.out.is_empty() => {
                    ready!(Pin::new(&mut *io).poll_flush(cx)).map_err(Error::Response)?;
                    return Poll::Pending;
                }
                Poll::Pending => ready!(self.hold.poll_end(cx)),
            }
            if self.is_written() {
                if let Some(ending) = self.ending.take() {
                    self.encode_end(Some(&ending?))?;
                    continue;
                }
                if self.encoded {
                    return Pin::new(&mut *io).poll_flush(cx).map_err(Error::Response);
                }
                continue;
            }
            let n = if self.data.is_empty() {
                ready!(Pin::new(&mut *io).poll_write(cx, &self.out))
            } else {
                let mut parts = [io::IoSlice::new(&[]); PIECES + 2];
                parts[0] = io::IoSlice::new(&self.out);
                let n = 1 + self.data.slices(&mut parts[1..=PIECES]);
                parts[n] = io::IoSlice::new(self.tail);
                ready!(Pin::new(&mut *io).poll_write_vectored(cx, &parts[..=n]))
            };
            let n = n.map_err(Error::Response)?;
            if n == 0 {
                return Poll::Ready(Err(Error::Response(io::ErrorKind::WriteZero.into())));
            }
            if self.is_one_piece() && n == self.out.len() {
                self.piece = std::mem::take(&mut self.out);
                self.begun = true;
                continue;
            }
            self.begun = true;
            self.advance(n);
        }
    }

    /// Encodes what there is of the body, so that a small one leaves with its head: ready when there is enough to write.
    ///
    /// # Errors
    /// As of [`Message::poll_write`].
    pub(crate) fn poll_encode(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while !self.encoded && self.ending.is_none() && self.data.is_empty() && self.out.len() < INLINE {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
            self.encode(cx, frame.transpose()?)?;
        }
        Poll::Ready(Ok(()))
    }

    fn advance(&mut self, n: usize) {
        let of_out = n.min(self.out.len());
        self.out.advance(of_out);
        let of_tail = self.data.advance(n - of_out);
        self.tail = &self.tail[of_tail..];
        if self.data.is_empty() {
            // The rest of it is copied, so that a tail only ever follows data.
            self.out.put_slice(std::mem::take(&mut self.tail));
        }
    }

    /// Bytes that are encoded and still to be written.
    pub(crate) fn unsent(&self) -> usize {
        self.out.len() + self.data.len() + self.tail.len()
    }

    fn is_written(&self) -> bool {
        self.out.is_empty() && self.data.is_empty()
    }

    fn encode(&mut self, cx: &mut Context<'_>, frame: Option<http_body::Frame<Bytes>>) -> Result<(), Error> {
        let mut next = frame.map(http_body::Frame::into_data);
        loop {
            match next {
                Some(Ok(data)) => self.data.push(data),
                Some(Err(trailers)) => {
                    let trailers = trailers.into_trailers().ok();
                    if self.data.is_empty() {
                        return self.encode_end(trailers.as_ref());
                    }
                    self.ending = trailers.map(Ok);
                    return self.encode_data();
                }
                None => {
                    self.encode_data()?;
                    return self.encode_end(None);
                }
            }
            if self.body.is_end_stream() {
                next = None;
                continue;
            }
            // With large data goes what follows and is there already.
            if self.data.len() <= INLINE || !self.data.has_room() {
                return self.encode_data();
            }
            next = match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => Some(frame.into_data()),
                Poll::Ready(None) => None,
                Poll::Ready(Some(Err(error))) => {
                    self.ending = Some(Err(error));
                    return self.encode_data();
                }
                Poll::Pending => return self.encode_data(),
            };
        }
    }

    /// Encodes what `data` holds.
    fn encode_data(&mut self) -> Result<(), Error> {
        let len = self.data.len();
        if len == 0 {
            return Ok(());
        }
        match &mut self.framing {
            Framing::Length(left) => *left = left.checked_sub(len as u64).ok_or(Error::Miscounted)?,
            Framing::Chunked => {
                let _ = write!((&mut *self.out).writer(), "{len:x}\r\n");
                self.tail = b"\r\n";
            }
            Framing::UntilClose => {}
        }
        if len <= INLINE {
            let data = std::mem::take(&mut self.data);
            self.out.put_slice(&data.first);
            self.out.put_slice(std::mem::take(&mut self.tail));
        }
        Ok(())
    }

    fn encode_end(&mut self, trailers: Option<&HeaderMap>) -> Result<(), Error> {
        self.encoded = true;
        match self.framing {
            Framing::Length(0) | Framing::UntilClose => {}
            Framing::Length(_) => return Err(Error::Miscounted),
            Framing::Chunked if trailers.is_none() && !self.data.is_empty() => self.tail = b"\r\n0\r\n\r\n",
            Framing::Chunked => {
                let out = &mut self.out;
                out.put_slice(b"0\r\n");
                if let Some(trailers) = trailers {
                    put_headers(out, trailers);
                }
                out.put_slice(b"\r\n");
            }
        }
        Ok(())
    }

    /// Whether all of it is encoded, short, and yet to leave.
    fn is_one_piece(&self) -> bool {
        !self.begun && self.encoded && self.data.is_empty() && self.out.len() <= ONE_PIECE
    }

    /// Whether nothing more will come of the body.
    pub(crate) fn is_encoded(&self) -> bool {
        self.encoded
    }

    /// Whether any byte has left.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Whether a reader cannot tell that the rest is missing once the connection ends.
    pub(crate) fn ends_with_connection(&self) -> bool {
        self.framing == Framing::UntilClose
    }

    /// The message once more: whole where nothing has left, and as it was written where it left in one short piece, with
    /// this as its body.
    pub(crate) fn into_unread(mut self, empty: B) -> Option<Self> {
        if !self.begun {
            return Some(self);
        }
        let piece = std::mem::take(&mut self.piece);
        (!piece.is_empty()).then(|| message(piece, empty))
    }

    /// True when nothing of the message can be left to send.
    pub(crate) fn is_done(&self) -> bool {
        self.encoded && self.is_written()
    }
}

/// Pieces of a body, one after the other.
#[derive(Default)]
struct Pieces {
    first: Bytes,
    more: VecDeque<Bytes>,
}

/// How many pieces go together at most.
const PIECES: usize = 8;

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        if self.first.is_empty() {
            self.first = piece;
        } else if !piece.is_empty() {
            self.more.push_back(piece);
        }
    }

    fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    fn len(&self) -> usize {
        self.first.len() + self.more.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether another still fits, if it is like the first.
    fn has_room(&self) -> bool {
        self.more.len() + 1 < PIECES && self.len() + self.first.len() <= TOGETHER
    }

    /// Fills the beginning of `slices`, and says how many they are.
    fn slices<'a>(&'a self, slices: &mut [io::IoSlice<'a>]) -> usize {
        let pieces = std::iter::once(&self.first).chain(&self.more);
        let filled = slices.iter_mut().zip(pieces);
        filled.map(|(slice, piece)| *slice = io::IoSlice::new(piece)).count()
    }

    /// Forgets the first `n` bytes, and says how many of these it did not have.
    fn advance(&mut self, mut n: usize) -> usize {
        while n > 0 && !self.first.is_empty() {
            let of_first = n.min(self.first.len());
            self.first.advance(of_first);
            n -= of_first;
            if self.first.is_empty() {
                self.first = self.more.pop_front().unwrap_or_default();
            }
        }
        n
    }
}

/// Bytes on their way out; their memory serves the next message of the thread.
#[derive(Default)]
struct Buffer(BytesMut);

thread_local! {
    static SPARE: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

const SPARE_BUFFERS: usize = 64;
const SPARE_SIZE: usize = 2 * INLINE;

impl Buffer {
    fn spare() -> Self {
        let mut bytes = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        bytes.reserve(1024);
        Self(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut bytes = std::mem::take(&mut self.0);
        bytes.clear();
        // What has been written is no part of the capacity, and yet of the memory.
        let is_large = bytes.try_reclaim(SPARE_SIZE + 1);
        if bytes.capacity() > 0 && !is_large {
            // A thread that ends has no use for it.
            let _ = SPARE.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < SPARE_BUFFERS {
                    spare.push(bytes);
                }
            });
        }
    }
}

impl std::ops::Deref for Buffer {
    type Target = BytesMut;

    fn deref(&self) -> &BytesMut {
        &self.0
    }
}

impl std::ops::DerefMut for Buffer {
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

    async fn written<B>(req: Request<B>) -> String
    where
        B: http_body::Body<Data = Bytes, Error = std::convert::Infallible> + Unpin,
    {
        let (mut ours, mut theirs) = tokio::io::duplex(100_000);
        let mut upload = request(req.map(|body| body.map_err(|never| match never {})));
        poll_fn(|cx| upload.poll_write(cx, &mut ours)).await.unwrap();
        assert!(upload.is_done());
        drop(ours);
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        text
    }

    /// A body whose length nobody knows, with a trailer.
    fn streamed(data: &'static [u8]) -> impl http_body::Body<Data = Bytes, Error = std::convert::Infallible> + Unpin {
        let mut trailers = HeaderMap::new();
        trailers.insert("t", "1".parse().unwrap());
        let frames = [Frame::data(Bytes::from_static(data)), Frame::trailers(trailers)];
        StreamBody::new(stream::iter(frames.map(Ok)))
    }

    #[tokio::test]
    async fn requests_are_framed_by_what_is_known_of_their_body() {
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

    /// A body of three bytes that comes later.
    struct Late(Option<tokio::sync::oneshot::Receiver<Bytes>>);

    impl http_body::Body for Late {
        type Data = Bytes;
        type Error = Error;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
            let Some(late) = &mut self.0 else {
                return Poll::Ready(None);
            };
            let data = ready!(Pin::new(late).poll(cx)).unwrap();
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
    async fn a_head_waits_for_a_short_body_and_not_for_ever() {
        let (mut ours, mut theirs) = tokio::io::duplex(100_000);
        let (send, body) = tokio::sync::oneshot::channel();
        let post = Request::post("/").header("content-length", "3");
        let mut upload = request(post.body(Late(Some(body))).unwrap());
        let mut read = async || {
            let mut buf = [0; 100];
            let n = theirs.read(&mut buf).await.unwrap();
            String::from_utf8_lossy(&buf[..n]).into_owned()
        };
        let begun = tokio::time::Instant::now();
        let writing = poll_fn(|cx| upload.poll_write(cx, &mut ours));
        let reading = async {
            assert_eq!(read().await, "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n");
            assert!(begun.elapsed() >= HOLD);
            send.send(Bytes::from_static(b"hey")).unwrap();
            assert_eq!(read().await, "hey");
        };
        let (written, ()) = tokio::join!(writing, reading);
        written.unwrap();
        assert!(upload.into_unread(Late(None)).is_none());
    }

    #[tokio::test]
    async fn what_left_in_one_piece_is_remembered() {
        let (mut ours, _theirs) = tokio::io::duplex(100_000);
        let body = |text| Full::new(Bytes::from_static(text)).map_err(|never| match never {});
        let mut upload = request(Request::post("/").body(body(b"hey")).unwrap());
        poll_fn(|cx| upload.poll_write(cx, &mut ours)).await.unwrap();
        let again = upload.into_unread(body(b"")).unwrap();
        assert_eq!(&**again.out, b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nhey");
    }

    #[tokio::test]
    async fn a_large_chunk_is_followed_by_its_line_end() {
        static LARGE: [u8; 50_000] = [b'x'; 50_000];
        let text = written(Request::post("/").body(streamed(&LARGE)).unwrap()).await;
        assert!(text.contains("\r\nc350\r\nxxx"));
        assert!(text.ends_with("xxx\r\n0\r\nt: 1\r\n\r\n"));
    }
}
