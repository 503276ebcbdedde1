//! Writing HTTP/1 requests: the head, and bodies with a length or in chunks.

use std::{
    io::{self, Write as _},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request, Version, header};
use tokio::{
    io::AsyncWrite,
    time::{Sleep, sleep},
};

use crate::http::error::Error;

/// Body bytes that are copied behind the head instead of being written on their own.
const INLINE: usize = 16 * 1024;

/// The longest request that is remembered until its response comes, in bytes. Whoever reads a socket reads as much at
/// once: of such a request that left in one piece, all was read, or nothing.
const ONE_PIECE: usize = 4 * 1024;

/// How long a head waits for a short body that is about to come, so that both leave in one piece. It is there already,
/// or on a busy machine a little later.
const HOLD: Duration = Duration::from_millis(100);

/// A body that can be sent.
pub(crate) trait Sent: http_body::Body<Data = Bytes, Error = Error> + Unpin {}

impl<B: http_body::Body<Data = Bytes, Error = Error> + Unpin> Sent for B {}

/// How the request body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length,
    Chunked,
}

/// A request on its way out: encoded bytes not written yet, then the rest of the body.
pub(crate) struct Upload<B> {
    out: BytesMut,
    /// A piece of body written as it is, after `out`.
    data: Bytes,
    body: B,
    framing: Framing,
    /// Whether the body's end has been encoded.
    encoded: bool,
    /// Whether any byte has left.
    begun: bool,
    /// All of it, once it has left in one short piece.
    piece: BytesMut,
    hold: Hold,
}

/// Whether the head waits for the body.
enum Hold {
    No,
    Possible,
    Until(Pin<Box<Sleep>>),
}

/// Encodes the head of `req`; its URI must be in the form that goes on the wire.
pub(crate) fn start<B: Sent>(req: Request<B>) -> Upload<B> {
    let (parts, body) = req.into_parts();
    let mut out = BytesMut::with_capacity(512);
    let target = parts.uri;
    out.put_slice(parts.method.as_str().as_bytes());
    out.put_u8(b' ');
    // Writing into memory cannot fail.
    let _ = match (target.scheme(), target.authority(), target.path_and_query()) {
        (None, Some(authority), _) => write!((&mut out).writer(), "{authority}"),
        (Some(_), ..) => write!((&mut out).writer(), "{target}"),
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
    let has_length = parts.headers.contains_key(header::CONTENT_LENGTH);
    let framing = if has_length || parts.version == Version::HTTP_10 {
        Framing::Length
    } else {
        Framing::Chunked
    };
    put_headers(&mut out, &parts.headers, framing);
    let no_body = body.is_end_stream();
    // Who asks for permission to send the body waits for an answer to the head.
    let fits = body
        .size_hint()
        .upper()
        .is_some_and(|length| length <= ONE_PIECE as u64);
    let hold = if !no_body && fits && !parts.headers.contains_key(header::EXPECT) {
        Hold::Possible
    } else {
        Hold::No
    };
    if framing == Framing::Chunked && !no_body {
        match body.size_hint().exact() {
            Some(length) => {
                let _ = write!((&mut out).writer(), "content-length: {length}\r\n");
                return Upload {
                    framing: Framing::Length,
                    hold,
                    ..finish_head(out, body, no_body)
                };
            }
            None => out.put_slice(b"transfer-encoding: chunked\r\n"),
        }
    }
    Upload {
        framing,
        hold,
        ..finish_head(out, body, no_body)
    }
}

fn finish_head<B>(mut out: BytesMut, body: B, encoded: bool) -> Upload<B> {
    out.put_slice(b"\r\n");
    upload(out, body, encoded)
}

fn upload<B>(out: BytesMut, body: B, encoded: bool) -> Upload<B> {
    Upload {
        out,
        data: Bytes::new(),
        body,
        framing: Framing::Length,
        encoded,
        begun: false,
        piece: BytesMut::new(),
        hold: Hold::No,
    }
}

/// A body of known length is framed by its `content-length`; any other framing is ours to choose.
fn put_headers(out: &mut BytesMut, headers: &HeaderMap, framing: Framing) {
    for (name, value) in headers {
        if *name == header::TRANSFER_ENCODING || (framing == Framing::Chunked && *name == header::CONTENT_LENGTH) {
            continue;
        }
        out.put_slice(name.as_str().as_bytes());
        out.put_slice(b": ");
        out.put_slice(value.as_bytes());
        out.put_slice(b"\r\n");
    }
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

impl<B: Sent> Upload<B> {
    /// Writes what there is to write; ready when the whole request is on its way.
    pub(crate) fn poll_write<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        io: &mut W,
    ) -> Poll<Result<(), Error>> {
        loop {
            // One look at the body before the first write, so that a small body leaves with its head.
            if !self.encoded && self.data.is_empty() && self.out.len() < INLINE {
                match Pin::new(&mut self.body).poll_frame(cx) {
                    Poll::Ready(frame) => {
                        self.encode(frame.transpose()?);
                        continue;
                    }
                    Poll::Pending if self.out.is_empty() => {
                        ready!(Pin::new(&mut *io).poll_flush(cx)).map_err(Error::Response)?;
                        return Poll::Pending;
                    }
                    Poll::Pending => ready!(self.hold.poll_end(cx)),
                }
            }
            if self.out.is_empty() && self.data.is_empty() {
                if self.encoded {
                    return Pin::new(&mut *io).poll_flush(cx).map_err(Error::Response);
                }
                continue;
            }
            let n = if self.data.is_empty() {
                ready!(Pin::new(&mut *io).poll_write(cx, &self.out))
            } else {
                let both = [io::IoSlice::new(&self.out), io::IoSlice::new(&self.data)];
                ready!(Pin::new(&mut *io).poll_write_vectored(cx, &both))
            };
            let mut n = n.map_err(Error::Response)?;
            if n == 0 {
                return Poll::Ready(Err(Error::Response(io::ErrorKind::WriteZero.into())));
            }
            if self.is_one_piece() && n == self.out.len() {
                self.piece = std::mem::take(&mut self.out);
                n = 0;
            }
            self.begun = true;
            let head = n.min(self.out.len());
            self.out.advance(head);
            n -= head;
            self.data.advance(n);
            // The line end of a chunk written on its own follows it.
            if self.data.is_empty() && n > 0 && self.framing == Framing::Chunked {
                self.out.put_slice(b"\r\n");
            }
        }
    }

    fn encode(&mut self, frame: Option<http_body::Frame<Bytes>>) {
        let Some(frame) = frame else {
            if self.framing == Framing::Chunked {
                self.out.put_slice(b"0\r\n\r\n");
            }
            self.encoded = true;
            return;
        };
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.framing == Framing::Chunked {
                    let _ = write!((&mut self.out).writer(), "{:x}\r\n", data.len());
                }
                if data.len() <= INLINE {
                    self.out.put_slice(&data);
                    if self.framing == Framing::Chunked {
                        self.out.put_slice(b"\r\n");
                    }
                } else {
                    self.data = data;
                }
            }
            Err(frame) => {
                if let (Ok(trailers), Framing::Chunked) = (frame.into_trailers(), self.framing) {
                    self.out.put_slice(b"0\r\n");
                    for (name, value) in &trailers {
                        self.out.put_slice(name.as_str().as_bytes());
                        self.out.put_slice(b": ");
                        self.out.put_slice(value.as_bytes());
                        self.out.put_slice(b"\r\n");
                    }
                    self.out.put_slice(b"\r\n");
                }
                self.encoded = true;
            }
        }
        if !self.encoded && self.data.is_empty() && self.body.is_end_stream() {
            if self.framing == Framing::Chunked {
                self.out.put_slice(b"0\r\n\r\n");
            }
            self.encoded = true;
        }
    }

    /// Whether all of it is encoded, short, and yet to leave.
    fn is_one_piece(&self) -> bool {
        !self.begun && self.encoded && self.data.is_empty() && self.out.len() <= ONE_PIECE
    }

    /// Whether any byte has left.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// The request once more: whole where nothing has left, and as it was written where it left in one short piece, with
    /// this as its body.
    pub(crate) fn into_unread(self, empty: B) -> Option<Self> {
        if !self.begun {
            return Some(self);
        }
        (!self.piece.is_empty()).then(|| upload(self.piece, empty, true))
    }

    /// True when nothing of the request can be left to send.
    pub(crate) fn is_done(&self) -> bool {
        self.encoded && self.out.is_empty() && self.data.is_empty()
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
        let mut upload = start(req.map(|body| body.map_err(|never| match never {})));
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
        let mut upload = start(post.body(Late(Some(body))).unwrap());
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
        let mut upload = start(Request::post("/").body(body(b"hey")).unwrap());
        poll_fn(|cx| upload.poll_write(cx, &mut ours)).await.unwrap();
        let again = upload.into_unread(body(b"")).unwrap();
        assert_eq!(again.out, "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nhey");
    }

    #[tokio::test]
    async fn a_large_chunk_is_followed_by_its_line_end() {
        static LARGE: [u8; 50_000] = [b'x'; 50_000];
        let text = written(Request::post("/").body(streamed(&LARGE)).unwrap()).await;
        assert!(text.contains("\r\nc350\r\nxxx"));
        assert!(text.ends_with("xxx\r\n0\r\nt: 1\r\n\r\n"));
    }
}
