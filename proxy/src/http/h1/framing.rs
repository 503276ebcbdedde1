//! Body framing: by length, chunked, or until the connection closes.

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::SizeHint;

use crate::http::headers;

/// Maximum size of the trailers of a chunked body, in bytes.
const MAX_TRAILER_BYTES: usize = 64 * 1024;
/// Maximum size of a chunk-size line, extensions included.
const MAX_CHUNK_LINE_BYTES: usize = 1024;

/// Framing of a body, and the part of the body that is not read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// No body, or a body that was read to its end.
    None,
    /// Number of bytes that are left.
    Length(u64),
    Chunked(ChunkState),
    /// The body ends when the connection closes.
    UntilClose,
}

/// Position in a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkState {
    Size,
    Data(u64),
    /// The CRLF after a chunk's data.
    DataEnd,
    /// Number of buffered trailer bytes that were already searched for the end.
    Trailers(usize),
}

#[derive(Debug)]
pub(crate) enum DecodeStep {
    Data(Bytes),
    Trailers(HeaderMap),
    /// The body is complete.
    End,
    NeedsData,
}

impl Framing {
    /// Whether the body is complete.
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

    /// Takes the next piece of the body from `read_buffer`.
    ///
    /// # Errors
    /// The framing is invalid; the error is the reason.
    pub(crate) fn decode(&mut self, read_buffer: &mut Bytes) -> Result<DecodeStep, &'static str> {
        loop {
            match self {
                Self::None | Self::Length(0) => return Ok(DecodeStep::End),
                Self::Length(left) => {
                    return Ok(take_up_to(read_buffer, left).map_or(DecodeStep::NeedsData, DecodeStep::Data));
                }
                Self::UntilClose if read_buffer.is_empty() => return Ok(DecodeStep::NeedsData),
                Self::UntilClose => return Ok(DecodeStep::Data(std::mem::take(read_buffer))),
                Self::Chunked(chunk) => match chunk {
                    ChunkState::Size => {
                        let Some((used, size)) = parse_chunk_size(read_buffer)? else {
                            return Ok(DecodeStep::NeedsData);
                        };
                        read_buffer.advance(used);
                        *chunk = if size == 0 {
                            ChunkState::Trailers(0)
                        } else {
                            ChunkState::Data(size)
                        };
                    }
                    ChunkState::Data(left) => {
                        let Some(data) = take_up_to(read_buffer, left) else {
                            return Ok(DecodeStep::NeedsData);
                        };
                        if *left == 0 {
                            *chunk = ChunkState::DataEnd;
                        }
                        return Ok(DecodeStep::Data(data));
                    }
                    ChunkState::DataEnd => {
                        if !b"\r\n".starts_with(&read_buffer[..read_buffer.len().min(2)]) {
                            return Err("chunk data longer than its chunk size");
                        }
                        if read_buffer.len() < 2 {
                            return Ok(DecodeStep::NeedsData);
                        }
                        read_buffer.advance(2);
                        *chunk = ChunkState::Size;
                    }
                    ChunkState::Trailers(seen) => {
                        // Without trailers the body ends with CRLF directly after the last chunk, which
                        // `has_new_empty_line` does not find.
                        let may_end = *seen < 2 || has_new_empty_line(read_buffer, *seen);
                        *seen = read_buffer.len();
                        let trailers = if may_end { parse_trailers(read_buffer)? } else { None };
                        let Some(trailers) = trailers else {
                            return if read_buffer.len() <= MAX_TRAILER_BYTES {
                                Ok(DecodeStep::NeedsData)
                            } else {
                                Err("malformed or too large trailers")
                            };
                        };
                        *self = Self::None;
                        return Ok(if trailers.is_empty() {
                            DecodeStep::End
                        } else {
                            DecodeStep::Trailers(trailers)
                        });
                    }
                },
            }
        }
    }
}

/// Takes up to `left` bytes from `read_buffer`; `None` if it is empty.
fn take_up_to(read_buffer: &mut Bytes, left: &mut u64) -> Option<Bytes> {
    if read_buffer.is_empty() {
        return None;
    }
    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(read_buffer.len());
    *left -= n as u64;
    // Take the whole buffer when it is used up, so that its memory is freed.
    Some(if n == read_buffer.len() {
        std::mem::take(read_buffer)
    } else {
        read_buffer.split_to(n)
    })
}

/// Returns the length of a chunk-size line and the chunk size; `None` while the line is incomplete.
///
/// Source: RFC 9112 §7.1. Only CRLF ends the line: parsers disagree on a lone LF.
fn parse_chunk_size(bytes: &[u8]) -> Result<Option<(usize, u64)>, &'static str> {
    const INVALID: &str = "malformed chunk size";
    let Some(end) = bytes.iter().take(MAX_CHUNK_LINE_BYTES).position(|byte| *byte == b'\n') else {
        return if bytes.len() < MAX_CHUNK_LINE_BYTES {
            Ok(None)
        } else {
            Err(INVALID)
        };
    };
    let line = bytes[..end].strip_suffix(b"\r").ok_or(INVALID)?;
    let n_digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (digits, extension) = line.split_at(n_digits);
    let n_blanks = extension.iter().take_while(|byte| b" \t".contains(byte)).count();
    let is_rest_valid = match &extension[n_blanks..] {
        [] => true,
        [b';', rest @ ..] => !rest.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t'),
        _ => false,
    };
    let size = std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match size {
        Some(size) if is_rest_valid => Ok(Some((end + 1, size))),
        _ => Err(INVALID),
    }
}

/// Takes the trailers from `read_buffer`; `None` while they are incomplete. Only CRLF ends a line, because parsers disagree
/// on a lone LF.
fn parse_trailers(read_buffer: &mut Bytes) -> Result<Option<HeaderMap>, &'static str> {
    const INVALID: &str = "malformed or too large trailers";
    let is_lone_lf = |(at, byte): (usize, &u8)| *byte == b'\n' && (at == 0 || read_buffer[at - 1] != b'\r');
    let mut lines = [httparse::EMPTY_HEADER; MAX_STACK_HEADERS];
    match httparse::parse_headers(read_buffer, &mut lines) {
        Ok(httparse::Status::Complete((used, lines))) if used <= MAX_TRAILER_BYTES => {
            let mut trailers = HeaderMap::with_capacity(lines.len());
            for line in lines {
                let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| "malformed trailer")?;
                let value = HeaderValue::from_bytes(line.value).map_err(|_| "malformed trailer")?;
                // Drop fields that apply to one hop or are reserved for proxies.
                if headers::is_forwarded_trailer(&name) {
                    trailers.append(name, value);
                }
            }
            if read_buffer[..used].iter().enumerate().any(is_lone_lf) {
                return Err(INVALID);
            }
            read_buffer.advance(used);
            Ok(Some(trailers))
        }
        Ok(httparse::Status::Partial) if !read_buffer.iter().enumerate().any(is_lone_lf) => Ok(None),
        _ => Err(INVALID),
    }
}

/// Whether the bytes after the first `seen` bytes complete an empty line. If they do not, a head that was incomplete before is still
/// incomplete.
pub(crate) fn has_new_empty_line(bytes: &[u8], seen: usize) -> bool {
    let new = &bytes[seen.saturating_sub(3)..];
    new.windows(2).any(|end| end == b"\n\n") || new.windows(3).any(|end| end == b"\n\r\n")
}

/// Maximum number of trailers. Also the maximum number of header lines that are parsed without a heap allocation.
pub(super) const MAX_STACK_HEADERS: usize = 128;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes `text` in pieces of `step` bytes. Returns the data and the trailers, or the error.
    fn decode(text: &[u8], step: usize) -> Result<(Vec<u8>, Option<HeaderMap>), &'static str> {
        let (mut framing, mut read_buffer, mut data) = (Framing::Chunked(ChunkState::Size), Bytes::new(), Vec::new());
        let mut pieces = text.chunks(step.max(1));
        loop {
            match framing.decode(&mut read_buffer)? {
                DecodeStep::Data(piece) => data.extend_from_slice(&piece),
                DecodeStep::Trailers(trailers) => return Ok((data, Some(trailers))),
                DecodeStep::End => return Ok((data, None)),
                DecodeStep::NeedsData => match pieces.next() {
                    Some(piece) => read_buffer = [&read_buffer[..], piece].concat().into(),
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
    fn ambiguous_chunk_sizes_are_refused() {
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
            assert_eq!(parse_chunk_size(line.as_bytes()).map_err(drop), size, "{line:?}");
        }
        assert!(parse_chunk_size(&[b'1'; MAX_CHUNK_LINE_BYTES]).is_err());
        assert!(decode(b"5\r\nhelloX\r\n0\r\n\r\n", 3).is_err());
    }

    proptest! {
        #[test]
        fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300), step in 1usize..50) {
            let _ = decode(&bytes, step);
        }
    }
}
