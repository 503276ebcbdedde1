//! Protocol detection by the first bytes of a connection: HTTP/1, HTTP/2 or neither.

use std::{future::poll_fn, io, pin::Pin, time::Duration};

use bytes::BytesMut;
use tokio::io::{AsyncRead, ReadBuf};

/// The protocol of the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetectedProtocol {
    Http1,
    Http2,
    NotHttp,
    /// More bytes are needed to decide.
    Incomplete,
}

/// How protocol detection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detection {
    /// The detected protocol; never `Incomplete`.
    Detected(DetectedProtocol),
    /// The time limit expired before the protocol was decided.
    TimedOut,
    /// The peer closed without sending a byte.
    Closed,
}

/// Start of the HTTP/2 connection preface, long enough to be unambiguous.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// An incomplete line of at least this length counts as HTTP/1 if it can be the start of a request; a shorter one is undecided.
const MIN_HTTP1_PREFIX_BYTES: usize = H2_PREFACE.len();
/// Maximum size of one read. A connection that is still undecided after this many bytes is not HTTP.
pub(super) const MAX_DETECT_BYTES: usize = 4096;

/// Classifies the first bytes of a connection. Only the first line counts; the HTTP server rejects errors in later lines.
pub(crate) fn classify(bytes: &[u8]) -> DetectedProtocol {
    let n = bytes.len().min(H2_PREFACE.len());
    if bytes[..n] == H2_PREFACE[..n] {
        return if n == H2_PREFACE.len() {
            DetectedProtocol::Http2
        } else {
            DetectedProtocol::Incomplete
        };
    }
    let line = first_line(bytes);
    match httparse::Request::new(&mut []).parse(line) {
        Ok(_) if has_lowercase_method(line) => DetectedProtocol::NotHttp,
        Ok(_) if line.ends_with(b"\n") || line.len() >= MIN_HTTP1_PREFIX_BYTES => DetectedProtocol::Http1,
        Ok(_) => DetectedProtocol::Incomplete,
        Err(_) => DetectedProtocol::NotHttp,
    }
}

/// Whether the first word has a lower-case letter. Registered methods are upper case, so a greeting in lower case is not HTTP,
/// and detection need not wait for more bytes.
fn has_lowercase_method(line: &[u8]) -> bool {
    let word = line.split(|byte| *byte == b' ').next().unwrap_or_default();
    word.iter().any(u8::is_ascii_lowercase)
}

/// Whether the bytes are too few to be classified, but begin with a method and a space.
pub(crate) fn is_partial_request_with_method(bytes: &[u8]) -> bool {
    classify(bytes) == DetectedProtocol::Incomplete
        && first_line(bytes).contains(&b' ')
        && !H2_PREFACE.starts_with(bytes)
}

/// The first line that is not empty, or its beginning.
pub(crate) fn first_line(bytes: &[u8]) -> &[u8] {
    let n_empty = bytes.iter().take_while(|byte| b"\r\n".contains(byte)).count();
    let line = &bytes[n_empty..];
    let end = line.iter().position(|byte| *byte == b'\n');
    end.map_or(line, |end| &line[..=end])
}

/// Reads into `bytes` until they can be classified, the peer closes, or `limit` has passed. Cancel-safe: all read bytes
/// are in `bytes`.
///
/// # Errors
/// Reading failed.
pub(crate) async fn detect<IO: AsyncRead + Unpin>(
    io: &mut IO,
    bytes: &mut BytesMut,
    limit: Duration,
) -> io::Result<Detection> {
    let detecting = async {
        loop {
            if !bytes.is_empty() {
                match classify(bytes) {
                    DetectedProtocol::Incomplete if bytes.len() < MAX_DETECT_BYTES => {}
                    DetectedProtocol::Incomplete => return Ok(Detection::Detected(DetectedProtocol::NotHttp)),
                    protocol => return Ok(Detection::Detected(protocol)),
                }
            }
            if read_some(io, bytes).await? == 0 {
                return Ok(if bytes.is_empty() {
                    Detection::Closed
                } else {
                    Detection::Detected(DetectedProtocol::NotHttp)
                });
            }
        }
    };
    tokio::time::timeout(limit, detecting)
        .await
        .unwrap_or(Ok(Detection::TimedOut))
}

/// Appends the result of the next read; allocates only once there is data. Cancel-safe.
pub(crate) async fn read_some<IO: AsyncRead + Unpin>(io: &mut IO, buffer: &mut BytesMut) -> io::Result<usize> {
    poll_fn(|cx| {
        let mut space = [std::mem::MaybeUninit::uninit(); MAX_DETECT_BYTES];
        let mut buf = ReadBuf::uninit(&mut space);
        Pin::new(&mut *io).poll_read(cx, &mut buf).map_ok(|()| {
            buffer.extend_from_slice(buf.filled());
            buf.filled().len()
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn first_bytes_are_classified() {
        for (bytes, protocol) in [
            (&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], DetectedProtocol::Http1),
            (b"GET /a/long/path/without/end", DetectedProtocol::Http1),
            (b"OPTIONS * HTTP/1.1\r\n", DetectedProtocol::Http1),
            (b"GET / HTTP/1.0\r\n\r\n", DetectedProtocol::Http1),
            (b"GET / HTTP/1.1\r\n", DetectedProtocol::Http1),
            (b"\r\nGET / HTTP/1.1\r\n\r\n", DetectedProtocol::Http1),
            (b"GET / HTTP/1.1\r\na\0b: c\r\n\r\n", DetectedProtocol::Http1),
            (b"GET / HTTP/1.1\r\n\0\r\n\r\n", DetectedProtocol::Http1),
            (b"GET / HTTP/9.1\r\nhost: x\r\n\r\n", DetectedProtocol::NotHttp),
            (b"CONNECT a:1 HTTP/1.1\r\n\r\n", DetectedProtocol::Http1),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", DetectedProtocol::Http2),
            (b"PRI * HT", DetectedProtocol::Incomplete),
            (b"GE", DetectedProtocol::Incomplete),
            (b"G2", DetectedProtocol::Incomplete),
            (b"\r\n", DetectedProtocol::Incomplete),
            (b"\r\nPRI * HTTP/2.0\r\n", DetectedProtocol::NotHttp),
            (b"get / HTTP/1.1\r\n\r\n", DetectedProtocol::NotHttp),
            (b"good-morning-to-you", DetectedProtocol::NotHttp),
            (b"GET / HTTP", DetectedProtocol::Incomplete),
            (b"hello", DetectedProtocol::NotHttp),
            (b"SSH-2.0-x\r\n", DetectedProtocol::NotHttp),
            (b"PING\r\n", DetectedProtocol::NotHttp),
            (b"\x16\x03\x01\x02\x00", DetectedProtocol::NotHttp),
            (b"EHLO mail.example\r\n", DetectedProtocol::NotHttp),
            (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", DetectedProtocol::NotHttp),
        ] {
            assert_eq!(classify(bytes), protocol, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_in_pieces_is_recognised_and_silence_times_out() {
        let (mut a, mut b) = tokio::io::duplex(64);
        let sending = tokio::spawn(async move {
            for piece in ["GE", "T / HT", "TP/1.1\r\n"] {
                tokio::io::AsyncWriteExt::write_all(&mut a, piece.as_bytes())
                    .await
                    .unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            a
        });
        let mut bytes = BytesMut::new();
        let limit = Duration::from_secs(10);
        assert_eq!(
            detect(&mut b, &mut bytes, limit).await.unwrap(),
            Detection::Detected(DetectedProtocol::Http1)
        );
        assert!(bytes.starts_with(b"GET / HTTP/1.1"));
        let _open = sending.await.unwrap();
        let mut bytes = BytesMut::new();
        assert_eq!(detect(&mut b, &mut bytes, limit).await.unwrap(), Detection::TimedOut);
    }

    #[test]
    fn a_partial_request_has_a_complete_method_followed_by_a_space() {
        for (bytes, expected) in [
            (&b"GET /"[..], true),
            (b"\r\nGET ", true),
            (b"GET", false),
            (b"get /", false),
            (b"PRI * HT", false),
            (b"", false),
        ] {
            assert_eq!(
                is_partial_request_with_method(bytes),
                expected,
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }

    proptest! {
        #[test]
        fn detection_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            classify(&bytes);
        }
    }
}
