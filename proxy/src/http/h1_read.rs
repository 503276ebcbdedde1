//! Reading HTTP/1 responses: heads, and the three framings of bodies.

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};

use crate::http::error::Error;

/// Most header lines of a response.
const MAX_HEADERS: usize = 128;
/// Most bytes of a response head, and of a chunked body's trailers.
pub(crate) const MAX_HEAD: usize = 64 * 1024;
/// Most bytes of a chunk-size line.
const MAX_CHUNK_LINE: usize = 1024;

/// How a response body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    None,
    Length(u64),
    Chunked(Chunk),
    /// The connection's end is the body's end.
    UntilClose,
}

/// Where in a chunked body the reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    Size,
    Data(u64),
    /// The line end after a chunk's data.
    DataEnd,
    Trailers,
}

/// A parsed response head.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) response: Response<()>,
    pub(crate) framing: Framing,
    /// Whether the connection may carry another request afterwards.
    pub(crate) keep_alive: bool,
}

/// Parses a response head from the start of `bytes`; `None` while it is incomplete. Consumes what it used.
pub(crate) fn head(bytes: &mut Bytes, method: &Method) -> Result<Option<Head>, Error> {
    let mut lines = [const { std::mem::MaybeUninit::uninit() }; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut []);
    let result = httparse::ParserConfig::default().parse_response_with_uninit_headers(&mut parsed, bytes, &mut lines);
    let used = match result {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => return Ok(None),
        Ok(httparse::Status::Partial) => return Err(Error::BadResponse("its head is too long")),
        Err(_) => return Err(Error::BadResponse("its head is not HTTP/1")),
    };
    let mut response = Response::new(());
    *response.version_mut() = if parsed.version == Some(0) {
        Version::HTTP_10
    } else {
        Version::HTTP_11
    };
    *response.status_mut() = parsed
        .code
        .and_then(|code| StatusCode::from_u16(code).ok())
        .ok_or(Error::BadResponse("its status is not a number from 100 to 999"))?;
    let start = bytes.as_ptr() as usize;
    let headers = response.headers_mut();
    headers.reserve(parsed.headers.len());
    for line in parsed.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| Error::BadResponse("a header name"))?;
        // Shares the bytes of the head instead of copying each value.
        let at = line.value.as_ptr() as usize - start;
        let value = if line.value.is_empty() {
            Bytes::new()
        } else {
            bytes.slice(at..at + line.value.len())
        };
        let value = HeaderValue::from_maybe_shared(value).map_err(|_| Error::BadResponse("a header value"))?;
        headers.append(name, value);
    }
    bytes.advance(used);
    let (framing, clean) = framing(&response, method)?;
    match framing {
        // One framing is passed on, the one that counts.
        Framing::Chunked(_) => drop(response.headers_mut().remove(header::CONTENT_LENGTH)),
        Framing::Length(length) if is_repeated(response.headers()) => {
            response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        }
        Framing::Length(_) | Framing::None | Framing::UntilClose => {}
    }
    let keep_alive = clean && framing != Framing::UntilClose && persistent(&response);
    Ok(Some(Head {
        response,
        framing,
        keep_alive,
    }))
}

/// Source: RFC 9112 §6.3. The second value is false when the message was framed twice: its end is certain, but the
/// connection is not used again.
fn framing(response: &Response<()>, method: &Method) -> Result<(Framing, bool), Error> {
    let status = response.status();
    if *method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
        || (*method == Method::CONNECT && status.is_success())
    {
        return Ok((Framing::None, true));
    }
    let headers = response.headers();
    let length = content_length(headers)?;
    if let Some(coding) = headers.get_all(header::TRANSFER_ENCODING).iter().next_back() {
        let last = coding
            .as_bytes()
            .rsplit(|b| *b == b',')
            .next()
            .unwrap_or_default()
            .trim_ascii();
        if last.eq_ignore_ascii_case(b"chunked") {
            return Ok((Framing::Chunked(Chunk::Size), length.is_none()));
        }
        return Ok((Framing::UntilClose, false));
    }
    Ok((length.map_or(Framing::UntilClose, Framing::Length), true))
}

/// Whether the length is told more than once.
fn is_repeated(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    lengths.next().is_some_and(|first| first.as_bytes().contains(&b',')) || lengths.next().is_some()
}

fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Error> {
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        for part in value.as_bytes().split(|b| *b == b',') {
            let part = part.trim_ascii();
            let number = (!part.is_empty() && part.iter().all(u8::is_ascii_digit))
                .then(|| std::str::from_utf8(part).ok()?.parse::<u64>().ok())
                .flatten()
                .ok_or(Error::BadResponse("its content-length is not a number"))?;
            if length.is_some_and(|known| known != number) {
                return Err(Error::BadResponse("it has two different content-lengths"));
            }
            length = Some(number);
        }
    }
    Ok(length)
}

fn persistent(response: &Response<()>) -> bool {
    let says = |token: &[u8]| {
        response.headers().get_all(header::CONNECTION).iter().any(|value| {
            value
                .as_bytes()
                .split(|b| *b == b',')
                .any(|part| part.trim_ascii().eq_ignore_ascii_case(token))
        })
    };
    if response.version() == Version::HTTP_10 {
        says(b"keep-alive")
    } else {
        !says(b"close")
    }
}

/// What the next step of decoding a body yields.
#[derive(Debug)]
pub(crate) enum Decoded {
    Data(Bytes),
    Trailers(HeaderMap),
    /// The body is complete.
    End,
    /// More bytes are needed.
    More,
}

impl Framing {
    /// Takes the next piece of the body out of `buf`.
    pub(crate) fn decode(&mut self, buf: &mut BytesMut) -> Result<Decoded, Error> {
        loop {
            match self {
                Self::None | Self::Length(0) => return Ok(Decoded::End),
                Self::Length(left) => {
                    return Ok(take(buf, left).map_or(Decoded::More, Decoded::Data));
                }
                Self::UntilClose if buf.is_empty() => return Ok(Decoded::More),
                Self::UntilClose => return Ok(Decoded::Data(buf.split().freeze())),
                Self::Chunked(chunk) => match chunk {
                    Chunk::Size => {
                        let Some(size) = chunk_size(buf)? else {
                            return Ok(Decoded::More);
                        };
                        *chunk = if size == 0 { Chunk::Trailers } else { Chunk::Data(size) };
                    }
                    Chunk::Data(left) => {
                        let Some(data) = take(buf, left) else {
                            return Ok(Decoded::More);
                        };
                        if *left == 0 {
                            *chunk = Chunk::DataEnd;
                        }
                        return Ok(Decoded::Data(data));
                    }
                    Chunk::DataEnd => {
                        if buf.len() < 2 {
                            return Ok(Decoded::More);
                        }
                        if &buf[..2] != b"\r\n" {
                            return Err(Error::BadResponse("a chunk is longer than it says"));
                        }
                        buf.advance(2);
                        *chunk = Chunk::Size;
                    }
                    Chunk::Trailers => {
                        let Some(trailers) = trailers(buf)? else {
                            return Ok(Decoded::More);
                        };
                        *self = Self::None;
                        return Ok(if trailers.is_empty() {
                            Decoded::End
                        } else {
                            Decoded::Trailers(trailers)
                        });
                    }
                },
            }
        }
    }
}

fn take(buf: &mut BytesMut, left: &mut u64) -> Option<Bytes> {
    if buf.is_empty() {
        return None;
    }
    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(buf.len());
    *left -= n as u64;
    Some(buf.split_to(n).freeze())
}

fn chunk_size(buf: &mut BytesMut) -> Result<Option<u64>, Error> {
    match httparse::parse_chunk_size(buf) {
        Ok(httparse::Status::Complete((used, size))) => {
            buf.advance(used);
            Ok(Some(size))
        }
        Ok(httparse::Status::Partial) if buf.len() < MAX_CHUNK_LINE => Ok(None),
        _ => Err(Error::BadResponse("a chunk size")),
    }
}

fn trailers(buf: &mut BytesMut) -> Result<Option<HeaderMap>, Error> {
    let mut lines = [httparse::EMPTY_HEADER; MAX_HEADERS];
    match httparse::parse_headers(buf, &mut lines) {
        Ok(httparse::Status::Complete((used, lines))) => {
            let mut trailers = HeaderMap::with_capacity(lines.len());
            for line in lines {
                let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| Error::BadResponse("a trailer"))?;
                let value = HeaderValue::from_bytes(line.value).map_err(|_| Error::BadResponse("a trailer"))?;
                trailers.append(name, value);
            }
            buf.advance(used);
            Ok(Some(trailers))
        }
        Ok(httparse::Status::Partial) if buf.len() < MAX_HEAD => Ok(None),
        _ => Err(Error::BadResponse("its trailers")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Option<Head>, Error> {
        head(&mut Bytes::copy_from_slice(text.as_bytes()), &Method::GET)
    }

    #[test]
    fn framing_follows_the_head() {
        for (text, framing, keep_alive) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Framing::Length(5), true),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\n",
                Framing::Length(5),
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
                Framing::Chunked(Chunk::Size),
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
                Framing::Chunked(Chunk::Size),
                false,
            ),
            ("HTTP/1.1 200 OK\r\n\r\n", Framing::UntilClose, false),
            ("HTTP/1.1 204 No Content\r\n\r\n", Framing::None, true),
            (
                "HTTP/1.1 200 OK\r\nconnection: x, close\r\ncontent-length: 0\r\n\r\n",
                Framing::Length(0),
                false,
            ),
            (
                "HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
                Framing::Length(0),
                false,
            ),
            (
                "HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\ncontent-length: 1\r\n\r\n",
                Framing::Length(1),
                true,
            ),
        ] {
            let head = parse(text).unwrap().unwrap();
            assert_eq!((head.framing, head.keep_alive), (framing, keep_alive), "{text}");
            let told: Vec<_> = head
                .response
                .headers()
                .get_all("content-length")
                .iter()
                .cloned()
                .collect();
            match framing {
                Framing::Length(length) => assert_eq!(told, [HeaderValue::from(length)], "{text}"),
                _ => assert!(told.is_empty(), "{text}"),
            }
        }
    }

    #[test]
    fn doubtful_heads_are_refused() {
        for text in [
            "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "SMTP ready\r\n",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("HTTP/1.1 200 OK\r\ncontent-le").unwrap().is_none());
    }

    /// Feeds `text` in pieces of `step` bytes and returns data and trailers, or the error.
    fn decode(text: &[u8], step: usize) -> Result<(Vec<u8>, Option<HeaderMap>), Error> {
        let (mut framing, mut buf, mut data) = (Framing::Chunked(Chunk::Size), BytesMut::new(), Vec::new());
        let mut pieces = text.chunks(step.max(1));
        loop {
            match framing.decode(&mut buf)? {
                Decoded::Data(piece) => data.extend_from_slice(&piece),
                Decoded::Trailers(trailers) => return Ok((data, Some(trailers))),
                Decoded::End => return Ok((data, None)),
                Decoded::More => match pieces.next() {
                    Some(piece) => buf.extend_from_slice(piece),
                    None => return Err(Error::BadResponse("cut")),
                },
            }
        }
    }

    #[test]
    fn chunks_and_trailers_are_decoded_however_they_arrive() {
        let text = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\ngrpc-status: 0\r\n\r\n";
        for step in 1..text.len() {
            let (data, trailers) = decode(text, step).unwrap();
            assert_eq!(data, b"hello world");
            assert_eq!(trailers.unwrap()["grpc-status"], "0");
        }
        assert!(decode(b"5\r\nhelloX\r\n0\r\n\r\n", 3).is_err());
        assert!(decode(b"-5\r\nhello\r\n0\r\n\r\n", 3).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), step in 1usize..50) {
            let _ = decode(&bytes, step);
            let _ = head(&mut Bytes::from(bytes), &Method::GET);
        }
    }
}
