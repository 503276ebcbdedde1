//! How bodies end: by a length, in chunks, or with their connection.

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::SizeHint;

use crate::http::{
    h1::head::{self, MAX_HEAD_LINES},
    headers,
};

/// Most bytes of a chunked body's trailers.
const MAX_TRAILERS: usize = 64 * 1024;
/// Most bytes of a chunk-size line, extensions included.
const MAX_CHUNK_LINE: usize = 1024;

/// How a body ends, and how far it has been read.
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
    /// Bytes of them that have been looked at.
    Trailers(usize),
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
    /// Whether nothing more can come of the body.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Self::None | Self::Length(0))
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match self {
            Self::None => SizeHint::with_exact(0),
            Self::Length(left) => SizeHint::with_exact(*left),
            Self::Chunked(_) | Self::UntilClose => SizeHint::default(),
        }
    }

    /// Takes the next piece of the body out of `inbox`.
    ///
    /// # Errors
    /// The body is not framed as it should be; says what is wrong.
    pub(crate) fn decode(&mut self, inbox: &mut Bytes) -> Result<Decoded, &'static str> {
        loop {
            match self {
                Self::None | Self::Length(0) => return Ok(Decoded::End),
                Self::Length(left) => {
                    return Ok(take(inbox, left).map_or(Decoded::More, Decoded::Data));
                }
                Self::UntilClose if inbox.is_empty() => return Ok(Decoded::More),
                Self::UntilClose => return Ok(Decoded::Data(std::mem::take(inbox))),
                Self::Chunked(chunk) => match chunk {
                    Chunk::Size => {
                        let Some((used, size)) = chunk_size(inbox)? else {
                            return Ok(Decoded::More);
                        };
                        inbox.advance(used);
                        *chunk = if size == 0 {
                            Chunk::Trailers(0)
                        } else {
                            Chunk::Data(size)
                        };
                    }
                    Chunk::Data(left) => {
                        let Some(data) = take(inbox, left) else {
                            return Ok(Decoded::More);
                        };
                        if *left == 0 {
                            *chunk = Chunk::DataEnd;
                        }
                        return Ok(Decoded::Data(data));
                    }
                    Chunk::DataEnd => {
                        if !b"\r\n".starts_with(&inbox[..inbox.len().min(2)]) {
                            return Err("a chunk is longer than it says");
                        }
                        if inbox.len() < 2 {
                            return Ok(Decoded::More);
                        }
                        inbox.advance(2);
                        *chunk = Chunk::Size;
                    }
                    Chunk::Trailers(seen) => {
                        // An empty line at once ends them, too.
                        let may_end = *seen < 2 || head::may_end(inbox, *seen);
                        *seen = inbox.len();
                        let trailers = if may_end { trailers(inbox)? } else { None };
                        let Some(trailers) = trailers else {
                            return if inbox.len() <= MAX_TRAILERS {
                                Ok(Decoded::More)
                            } else {
                                Err("its trailers")
                            };
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

fn take(inbox: &mut Bytes, left: &mut u64) -> Option<Bytes> {
    if inbox.is_empty() {
        return None;
    }
    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(inbox.len());
    *left -= n as u64;
    // What is used up is let go of, so that nothing keeps its memory.
    Some(if n == inbox.len() {
        std::mem::take(inbox)
    } else {
        inbox.split_to(n)
    })
}

/// The length of a chunk-size line and the size it tells, once the line is complete.
///
/// Source: RFC 9112 §7.1. Only CRLF ends the line: a lone LF ends it for some readers and not for others.
fn chunk_size(bytes: &[u8]) -> Result<Option<(usize, u64)>, &'static str> {
    const BAD: &str = "a chunk size";
    let Some(end) = bytes.iter().take(MAX_CHUNK_LINE).position(|byte| *byte == b'\n') else {
        return if bytes.len() < MAX_CHUNK_LINE {
            Ok(None)
        } else {
            Err(BAD)
        };
    };
    let line = bytes[..end].strip_suffix(b"\r").ok_or(BAD)?;
    let n_digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (digits, extension) = line.split_at(n_digits);
    let n_blanks = extension.iter().take_while(|byte| b" \t".contains(byte)).count();
    let is_extension = match &extension[n_blanks..] {
        [] => true,
        [b';', rest @ ..] => !rest.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t'),
        _ => false,
    };
    let size = std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match size {
        Some(size) if is_extension => Ok(Some((end + 1, size))),
        _ => Err(BAD),
    }
}

/// As with chunk sizes, only CRLF ends a line: of two readers, one would take a lone LF for the end of the message.
fn trailers(inbox: &mut Bytes) -> Result<Option<HeaderMap>, &'static str> {
    const BAD: &str = "its trailers";
    let is_lone = |(at, byte): (usize, &u8)| *byte == b'\n' && (at == 0 || inbox[at - 1] != b'\r');
    let mut lines = [httparse::EMPTY_HEADER; MAX_HEAD_LINES];
    match httparse::parse_headers(inbox, &mut lines) {
        Ok(httparse::Status::Complete((used, lines))) if used <= MAX_TRAILERS => {
            let mut trailers = HeaderMap::with_capacity(lines.len());
            for line in lines {
                let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| "a trailer")?;
                let value = HeaderValue::from_bytes(line.value).map_err(|_| "a trailer")?;
                // Nobody has acted on them while the body passed, and nobody should afterwards.
                if headers::is_trailer(&name) {
                    trailers.append(name, value);
                }
            }
            if inbox[..used].iter().enumerate().any(is_lone) {
                return Err(BAD);
            }
            inbox.advance(used);
            Ok(Some(trailers))
        }
        Ok(httparse::Status::Partial) if !inbox.iter().enumerate().any(is_lone) => Ok(None),
        _ => Err(BAD),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `text` in pieces of `step` bytes and returns data and trailers, or the error.
    fn decode(text: &[u8], step: usize) -> Result<(Vec<u8>, Option<HeaderMap>), &'static str> {
        let (mut framing, mut inbox, mut data) = (Framing::Chunked(Chunk::Size), Bytes::new(), Vec::new());
        let mut pieces = text.chunks(step.max(1));
        loop {
            match framing.decode(&mut inbox)? {
                Decoded::Data(piece) => data.extend_from_slice(&piece),
                Decoded::Trailers(trailers) => return Ok((data, Some(trailers))),
                Decoded::End => return Ok((data, None)),
                Decoded::More => match pieces.next() {
                    Some(piece) => inbox = [&inbox[..], piece].concat().into(),
                    None => return Err("cut"),
                },
            }
        }
    }

    #[test]
    fn chunks_and_trailers_are_decoded_however_they_arrive() {
        let text = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\ngrpc-status: 0\r\nhost: x\r\n\r\n";
        for step in 1..text.len() {
            let (data, trailers) = decode(text, step).unwrap();
            assert_eq!(data, b"hello world");
            let trailers = trailers.unwrap();
            assert_eq!((&trailers["grpc-status"], trailers.len()), (&HeaderValue::from(0), 1));
        }
    }

    #[test]
    fn chunk_sizes_are_read_in_one_way_or_not_at_all() {
        for (line, size) in [
            ("0\r\n", Ok(Some((3, 0)))),
            ("1aF\r\n", Ok(Some((5, 0x1af)))),
            ("5 \r\n", Ok(Some((4, 5)))),
            ("5;a=\"b\"\r\nx", Ok(Some((9, 5)))),
            ("ffffffffffffffff\r\n", Ok(Some((18, u64::MAX)))),
            ("5", Ok(None)),
            ("5\r", Ok(None)),
            ("", Ok(None)),
            ("\r\n", Err(())),
            ("5\n", Err(())),
            ("-5\r\n", Err(())),
            ("+5\r\n", Err(())),
            ("0x5\r\n", Err(())),
            (" 5\r\n", Err(())),
            ("5 5\r\n", Err(())),
            ("5;a\rb\r\n", Err(())),
            ("5\r\r\n", Err(())),
            ("10000000000000000\r\n", Err(())),
        ] {
            assert_eq!(chunk_size(line.as_bytes()).map_err(drop), size, "{line:?}");
        }
        assert!(chunk_size(&[b'1'; MAX_CHUNK_LINE]).is_err());
        assert!(decode(b"5\r\nhelloX\r\n0\r\n\r\n", 3).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), step in 1usize..50) {
            let _ = decode(&bytes, step);
        }
    }
}
