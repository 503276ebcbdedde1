//! Splits the byte stream of a watch into its events.

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_TYPE;

use crate::source::kubernetes::response::object::DecodeError;

/// How a watch encodes and separates its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEncoding {
    /// A line for each event.
    Json,
    /// A message for each event, after its length in four bytes.
    Protobuf,
}

impl WatchEncoding {
    pub(crate) fn from_headers(headers: &HeaderMap) -> Self {
        let content_type = headers.get(CONTENT_TYPE).map_or(&[][..], |value| value.as_bytes());
        match content_type.starts_with(b"application/vnd.kubernetes.protobuf") {
            true => Self::Protobuf,
            false => Self::Json,
        }
    }
}

/// The received bytes of a watch that are not yet taken.
pub(crate) struct FrameBuffer {
    encoding: WatchEncoding,
    bytes: BytesMut,
    /// The number of bytes that are known to contain no line end.
    n_searched: usize,
}

impl FrameBuffer {
    pub(crate) fn new(encoding: WatchEncoding) -> Self {
        Self {
            encoding,
            bytes: BytesMut::new(),
            n_searched: 0,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next complete event, without its line end or length. `None` if the buffer has none.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Bytes>, DecodeError> {
        let frame = match self.encoding {
            WatchEncoding::Json => self.next_line(),
            WatchEncoding::Protobuf => self.next_message()?,
        };
        if frame.is_none() && self.bytes.is_empty() && self.bytes.capacity() > MAX_RETAINED_CAPACITY {
            self.bytes = BytesMut::new();
        }
        Ok(frame)
    }

    fn next_line(&mut self) -> Option<Bytes> {
        let Some(end) = self.bytes[self.n_searched..].iter().position(|byte| *byte == b'\n') else {
            self.n_searched = self.bytes.len();
            return None;
        };
        let line = self.bytes.split_to(self.n_searched + end).freeze();
        self.bytes.advance(1);
        self.n_searched = 0;
        Some(line)
    }

    fn next_message(&mut self) -> Result<Option<Bytes>, DecodeError> {
        let Some(prefix) = self.bytes.first_chunk() else {
            return Ok(None);
        };
        let n_bytes = u32::from_be_bytes(*prefix) as usize;
        if n_bytes > MAX_EVENT_BYTES {
            return Err(DecodeError::EventTooLong(n_bytes));
        }
        if self.bytes.len() < LENGTH_BYTES + n_bytes {
            return Ok(None);
        }
        self.bytes.advance(LENGTH_BYTES);
        Ok(Some(self.bytes.split_to(n_bytes).freeze()))
    }
}

/// The length of the prefix of a message.
const LENGTH_BYTES: usize = size_of::<u32>();

/// Maximum length of an event. It is much larger than an object, of which etcd stores at most 1.5 MiB by default. A larger
/// length prefix shows that the response is not in protobuf.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;

/// Maximum capacity of an empty buffer. A larger buffer is freed.
const MAX_RETAINED_CAPACITY: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the bytes in chunks of this size, and takes all events.
    fn split(encoding: WatchEncoding, bytes: &[u8], chunk_size: usize) -> Vec<Bytes> {
        let mut frames = FrameBuffer::new(encoding);
        let mut seen = Vec::new();
        for chunk in bytes.chunks(chunk_size) {
            frames.push(chunk);
            while let Some(frame) = frames.next_frame().unwrap() {
                seen.push(frame);
            }
        }
        seen
    }

    #[test]
    fn events_are_split_across_chunks() {
        let text = b"one\ntwo\n\nthree\nrest";
        for size in 1..=text.len() {
            let lines = split(WatchEncoding::Json, text, size);
            assert_eq!(lines, ["one", "two", "", "three"], "in chunks of {size}");
        }
        let messages = b"\0\0\0\x03one\0\0\0\0\0\0\x01\x00two\n";
        let long = [b"\0\0\x01\0".as_slice(), &[b'x'; 256], &messages[..]].concat();
        for size in 1..=long.len() {
            let frames = split(WatchEncoding::Protobuf, &long, size);
            assert_eq!(frames.len(), 3, "in chunks of {size}");
            assert_eq!(
                (frames[0].len(), &*frames[1], &*frames[2]),
                (256, &b"one"[..], &b""[..])
            );
        }
    }

    #[test]
    fn a_text_in_place_of_messages_is_refused() {
        let mut frames = FrameBuffer::new(WatchEncoding::Protobuf);
        frames.push(b"<html>");
        assert!(matches!(frames.next_frame(), Err(DecodeError::EventTooLong(_))));
    }
}
