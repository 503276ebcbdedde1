//! Looking at the first bytes of a connection: is this HTTP, and which version?

use std::{future::poll_fn, io, pin::Pin, time::Duration};

use bytes::BytesMut;
use tokio::io::{AsyncRead, ReadBuf};

/// What the first bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Http1,
    Http2,
    NotHttp,
    /// More bytes are needed to tell.
    Incomplete,
}

/// How a look at a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// What the bytes are; never `Incomplete`.
    Seen(Verdict),
    /// Nothing decisive within the limit.
    TimedOut,
    /// The peer closed without sending a byte.
    Closed,
}

/// Start of the HTTP/2 connection preface, enough to be sure.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// A look never holds more than this; a request line that is longer is believed to be HTTP by its start.
pub(super) const MAX_LOOK: usize = 4096;

/// Judges the first bytes of a connection. A request is one by its first line: what is wrong with the rest is the server's to
/// refuse, however much of it came at once.
pub(crate) fn classify(bytes: &[u8]) -> Verdict {
    let n = bytes.len().min(H2_PREFACE.len());
    if bytes[..n] == H2_PREFACE[..n] {
        return if n == H2_PREFACE.len() {
            Verdict::Http2
        } else {
            Verdict::Incomplete
        };
    }
    let line = first_line(bytes);
    match httparse::Request::new(&mut []).parse(line) {
        Ok(_) if has_small_letters(line) => Verdict::NotHttp,
        Ok(_) if line.ends_with(b"\n") || line.len() >= H2_PREFACE.len() => Verdict::Http1,
        Ok(_) => Verdict::Incomplete,
        Err(_) => Verdict::NotHttp,
    }
}

/// Whether the first word has. Registered methods are upper case, and a greeting that is not need not wait for more to be told
/// from one.
fn has_small_letters(line: &[u8]) -> bool {
    let word = line.split(|byte| *byte == b' ').next().unwrap_or_default();
    word.iter().any(u8::is_ascii_lowercase)
}

/// Whether what may become a request of HTTP/1 has at least its method.
pub(crate) fn has_method(bytes: &[u8]) -> bool {
    classify(bytes) == Verdict::Incomplete && first_line(bytes).contains(&b' ') && !H2_PREFACE.starts_with(bytes)
}

/// The first line that is not empty, or its beginning.
pub(crate) fn first_line(bytes: &[u8]) -> &[u8] {
    let n_empty = bytes.iter().take_while(|byte| b"\r\n".contains(byte)).count();
    let line = &bytes[n_empty..];
    let end = line.iter().position(|byte| *byte == b'\n');
    end.map_or(line, |end| &line[..=end])
}

/// Reads into `bytes` until they can be judged, the peer closes, or `limit` has passed. Cancel-safe: what was read is
/// in `bytes`.
///
/// # Errors
/// Reading failed.
pub(crate) async fn look<IO: AsyncRead + Unpin>(
    io: &mut IO,
    bytes: &mut BytesMut,
    limit: Duration,
) -> io::Result<Look> {
    let looking = async {
        loop {
            if !bytes.is_empty() {
                match classify(bytes) {
                    Verdict::Incomplete if bytes.len() < MAX_LOOK => {}
                    Verdict::Incomplete => return Ok(Look::Seen(Verdict::NotHttp)),
                    verdict => return Ok(Look::Seen(verdict)),
                }
            }
            if read_some(io, bytes).await? == 0 {
                return Ok(if bytes.is_empty() {
                    Look::Closed
                } else {
                    Look::Seen(Verdict::NotHttp)
                });
            }
        }
    };
    tokio::time::timeout(limit, looking).await.unwrap_or(Ok(Look::TimedOut))
}

/// Appends what the next read yields; allocates only once there is data. Cancel-safe.
pub(crate) async fn read_some<IO: AsyncRead + Unpin>(io: &mut IO, into: &mut BytesMut) -> io::Result<usize> {
    poll_fn(|cx| {
        let mut space = [std::mem::MaybeUninit::uninit(); MAX_LOOK];
        let mut buf = ReadBuf::uninit(&mut space);
        Pin::new(&mut *io).poll_read(cx, &mut buf).map_ok(|()| {
            into.extend_from_slice(buf.filled());
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
    fn first_bytes_are_judged() {
        for (bytes, verdict) in [
            (&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], Verdict::Http1),
            (b"GET /a/long/path/without/end", Verdict::Http1),
            (b"OPTIONS * HTTP/1.1\r\n", Verdict::Http1),
            (b"GET / HTTP/1.0\r\n\r\n", Verdict::Http1),
            (b"GET / HTTP/1.1\r\n", Verdict::Http1),
            (b"\r\nGET / HTTP/1.1\r\n\r\n", Verdict::Http1),
            (b"GET / HTTP/1.1\r\na\0b: c\r\n\r\n", Verdict::Http1),
            (b"GET / HTTP/1.1\r\n\0\r\n\r\n", Verdict::Http1),
            (b"GET / HTTP/9.1\r\nhost: x\r\n\r\n", Verdict::NotHttp),
            (b"CONNECT a:1 HTTP/1.1\r\n\r\n", Verdict::Http1),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Verdict::Http2),
            (b"PRI * HT", Verdict::Incomplete),
            (b"GE", Verdict::Incomplete),
            (b"G2", Verdict::Incomplete),
            (b"\r\n", Verdict::Incomplete),
            (b"\r\nPRI * HTTP/2.0\r\n", Verdict::NotHttp),
            (b"get / HTTP/1.1\r\n\r\n", Verdict::NotHttp),
            (b"good-morning-to-you", Verdict::NotHttp),
            (b"GET / HTTP", Verdict::Incomplete),
            (b"hello", Verdict::NotHttp),
            (b"SSH-2.0-x\r\n", Verdict::NotHttp),
            (b"PING\r\n", Verdict::NotHttp),
            (b"\x16\x03\x01\x02\x00", Verdict::NotHttp),
            (b"EHLO mail.example\r\n", Verdict::NotHttp),
            (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", Verdict::NotHttp),
        ] {
            assert_eq!(classify(bytes), verdict, "{:?}", String::from_utf8_lossy(bytes));
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
            look(&mut b, &mut bytes, limit).await.unwrap(),
            Look::Seen(Verdict::Http1)
        );
        assert!(bytes.starts_with(b"GET / HTTP/1.1"));
        let _open = sending.await.unwrap();
        let mut bytes = BytesMut::new();
        assert_eq!(look(&mut b, &mut bytes, limit).await.unwrap(), Look::TimedOut);
    }

    #[test]
    fn a_method_is_known_by_the_space_after_it() {
        for (bytes, has) in [
            (&b"GET /"[..], true),
            (b"\r\nGET ", true),
            (b"GET", false),
            (b"get /", false),
            (b"PRI * HT", false),
            (b"", false),
        ] {
            assert_eq!(has_method(bytes), has, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            classify(&bytes);
        }
    }
}
