//! Which side speaks first: HTTP is detected by the client's first bytes; in other protocols the server may speak first.
//!
//! If a client is silent for a moment, the server is dialled too, and the side that sends first decides the protocol. The
//! result is remembered for each target: later connections dial the server at once if it speaks first, and wait longer before
//! the dial if the client does.

use std::{
    future::Future,
    io,
    pin::pin,
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncRead, time::Instant};

use crate::net::{
    detect::{self, DetectedProtocol, Detection},
    io::Io,
};

/// Time to wait for the client's first bytes before the server is dialled too. In client-first protocols they arrive within one
/// or two milliseconds.
const CLIENT_WAIT: Duration = Duration::from_millis(15);

/// As [`CLIENT_WAIT`], for a target whose clients spoke first on earlier connections. Longer, because the dial is then probably
/// unnecessary.
const KNOWN_CLIENT_FIRST_WAIT: Duration = Duration::from_millis(25);

/// Time to wait for the client's first bytes if the dial fails, counted from the start of the dial. Long enough for one
/// retransmission of these bytes, such as a TLS ClientHello. An HTTP client can then get an error response.
const CLIENT_WAIT_IF_DIAL_FAILS: Duration = Duration::from_secs(1);

/// Which side has spoken first on earlier connections to one target.
#[derive(Debug, Default)]
pub(crate) struct LearnedSpeaker(AtomicU8);

const SERVER_FIRST: u8 = 1;
const CLIENT_FIRST: u8 = 2;

/// How a connection began.
#[derive(Debug)]
pub(crate) enum FirstBytes {
    /// The client has sent first, or neither side has sent a byte.
    ClientOrNeither {
        /// May be empty.
        client_bytes: Bytes,
        /// The protocol of the client's bytes.
        protocol: DetectedProtocol,
        /// The server connection, if it was dialled.
        server: Option<Io>,
    },
    /// The server sent first. Its bytes are put back in front of its connection; the client's bytes, if any, are returned
    /// separately.
    Server { server: Io, client_bytes: Bytes },
    /// The client closed without sending a byte.
    Closed,
}

impl FirstBytes {
    /// The result of detection on the client's bytes, if the server has sent none. HTTP is recorded in `learned`.
    fn from_client(detection: Detection, client_bytes: BytesMut, server: Option<Io>, learned: &LearnedSpeaker) -> Self {
        let protocol = match detection {
            Detection::Detected(protocol) => protocol,
            Detection::Closed => return Self::Closed,
            // A slow HTTP client: the HTTP server has its own timeout and answers with an error.
            Detection::TimedOut if detect::is_partial_request_with_method(&client_bytes) => DetectedProtocol::Http1,
            Detection::TimedOut => DetectedProtocol::NotHttp,
        };
        // Only HTTP proves that the client speaks first: a client of a server-first protocol may send early, without waiting for
        // the greeting.
        if protocol != DetectedProtocol::NotHttp {
            learned.record(CLIENT_FIRST);
        }
        Self::ClientOrNeither {
            client_bytes: client_bytes.freeze(),
            protocol,
            server,
        }
    }

    /// Number of bytes that were read from the client.
    pub(crate) fn n_read(&self) -> usize {
        match self {
            Self::ClientOrNeither { client_bytes, .. } | Self::Server { client_bytes, .. } => client_bytes.len(),
            Self::Closed => 0,
        }
    }

    /// Whether the bytes look like one complete GET or HEAD request. They are not parsed.
    pub(crate) fn is_complete_request_without_body(&self) -> bool {
        matches!(self, Self::ClientOrNeither { client_bytes, protocol: DetectedProtocol::Http1, .. }
            if client_bytes.ends_with(b"\r\n\r\n")
                && (client_bytes.starts_with(b"GET ") || client_bytes.starts_with(b"HEAD ")))
    }
}

/// Waits up to `limit` for the first bytes of either side; after that the connection is opaque, unless the client has sent the
/// method of an HTTP/1 request.
///
/// `dial` opens the server connection and must authorize the client first. It returns `None` if that is not possible; then only
/// the client is read.
///
/// # Errors
/// Reading from the client failed, or the server connection failed before it sent a byte.
pub(crate) async fn wait_for_either<C, F>(
    client: &mut C,
    learned: &LearnedSpeaker,
    limit: Duration,
    dial: impl FnOnce() -> F,
) -> io::Result<FirstBytes>
where
    C: AsyncRead + Unpin,
    F: Future<Output = Option<Io>>,
{
    let mut client_bytes = BytesMut::new();
    let wait = learned.client_wait().min(limit);
    if wait > Duration::ZERO {
        match detect::detect(client, &mut client_bytes, wait).await? {
            Detection::TimedOut if wait < limit => {}
            detection => return Ok(FirstBytes::from_client(detection, client_bytes, None, learned)),
        }
    }
    let remaining = limit - wait;
    // Boxed: rare, and otherwise this large future would be a part of every connection's future.
    if client_bytes.is_empty() {
        return Box::pin(dial_and_wait(client, learned, remaining, dial)).await;
    }
    // The client has sent part of a request, so it speaks first.
    let detection = Box::pin(detect::detect(client, &mut client_bytes, remaining)).await?;
    Ok(FirstBytes::from_client(detection, client_bytes, None, learned))
}

/// Continues a [`wait_for_either`] in which neither side sent a byte, for up to `limit`. `server` is the dialled connection.
///
/// # Errors
/// Reading from the client failed, or the server connection failed before it sent a byte.
pub(crate) async fn wait_longer<C: AsyncRead + Unpin>(
    client: &mut C,
    learned: &LearnedSpeaker,
    limit: Duration,
    server: Io,
) -> io::Result<FirstBytes> {
    dial_and_wait(client, learned, limit, || std::future::ready(Some(server))).await
}

/// Waits up to `limit` for the client's first bytes.
///
/// # Errors
/// Reading from the client failed.
pub(crate) async fn wait_for_client<C: AsyncRead + Unpin>(
    client: &mut C,
    learned: &LearnedSpeaker,
    limit: Duration,
) -> io::Result<FirstBytes> {
    let mut client_bytes = BytesMut::new();
    let detection = detect::detect(client, &mut client_bytes, limit).await?;
    Ok(FirstBytes::from_client(detection, client_bytes, None, learned))
}

/// Which side has sent the first bytes.
enum FirstSpeaker {
    /// With the server connection, if it was dialled.
    ClientOrNeither(Detection, Option<Io>),
    Server(Io),
}

/// Dials the server, and waits up to `limit` for the first bytes of either side.
async fn dial_and_wait<C, F>(
    client: &mut C,
    learned: &LearnedSpeaker,
    limit: Duration,
    dial: impl FnOnce() -> F,
) -> io::Result<FirstBytes>
where
    C: AsyncRead + Unpin,
    F: Future<Output = Option<Io>>,
{
    let (mut client_bytes, mut server_bytes) = (BytesMut::new(), BytesMut::new());
    let give_up_at = Instant::now() + limit.min(CLIENT_WAIT_IF_DIAL_FAILS);
    let speaker = {
        let mut detecting = pin!(detect::detect(client, &mut client_bytes, limit));
        // The client may still send while the server is dialled.
        tokio::select! {
            biased;
            detection = &mut detecting => FirstSpeaker::ClientOrNeither(detection?, None),
            // Boxed: otherwise this future would contain several copies of the dial for the whole wait.
            dialled = Box::pin(dial()) => match dialled {
                None => FirstSpeaker::ClientOrNeither(detect_until(give_up_at, detecting).await?, None),
                Some(mut server) => tokio::select! {
                    biased;
                    detection = &mut detecting => FirstSpeaker::ClientOrNeither(detection?, Some(server)),
                    read = detect::read_some(&mut server, &mut server_bytes) => match read {
                        // The server has closed the connection, and the client has sent nothing until now that decides the
                        // protocol.
                        Ok(0) => FirstSpeaker::ClientOrNeither(Detection::TimedOut, Some(server)),
                        Ok(_) => FirstSpeaker::Server(server),
                        Err(server_error) => match detect_until(give_up_at, detecting).await? {
                            Detection::TimedOut => return Err(server_error),
                            detection => FirstSpeaker::ClientOrNeither(detection, None),
                        },
                    },
                },
            },
        }
    };
    match speaker {
        FirstSpeaker::Server(server) => {
            learned.record(SERVER_FIRST);
            Ok(FirstBytes::Server {
                server: server.prepend(server_bytes.freeze()),
                client_bytes: client_bytes.freeze(),
            })
        }
        FirstSpeaker::ClientOrNeither(detection, server) => {
            Ok(FirstBytes::from_client(detection, client_bytes, server, learned))
        }
    }
}

async fn detect_until(
    give_up_at: Instant,
    detecting: impl Future<Output = io::Result<Detection>>,
) -> io::Result<Detection> {
    tokio::time::timeout_at(give_up_at, detecting)
        .await
        .unwrap_or(Ok(Detection::TimedOut))
}

impl LearnedSpeaker {
    /// How long to wait before the server is dialled. The wait is short even for a client-first target, because the learned
    /// speaker can be wrong: by chance, or because another client caused it on purpose.
    fn client_wait(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            SERVER_FIRST => Duration::ZERO,
            CLIENT_FIRST => KNOWN_CLIENT_FIRST_WAIT,
            _ => CLIENT_WAIT,
        }
    }

    fn record(&self, speaker: u8) {
        self.0.store(speaker, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[test]
    fn only_a_whole_get_or_head_request_is_complete_without_a_body() {
        for (bytes, is_request) in [
            (&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], true),
            (b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", true),
            (b"GET / HTTP/1.1\r\nhost: x\r\n", false),
            (b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n", false),
            (b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\na", false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false),
            (b"hello\r\n\r\n", false),
        ] {
            let first = FirstBytes::ClientOrNeither {
                client_bytes: Bytes::from_static(bytes),
                protocol: detect::classify(bytes),
                server: None,
            };
            assert_eq!(first.is_complete_request_without_body(), is_request, "{first:?}");
        }
        assert!(!FirstBytes::Closed.is_complete_request_without_body());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_an_undecided_client_ends_at_the_limit() {
        for sent in [&b""[..], b"GE"] {
            let (mut client, mut peer) = tokio::io::duplex(10);
            peer.write_all(sent).await.unwrap();
            let (limit, started_at) = (Duration::from_secs(1), Instant::now());
            let dial = std::future::pending::<Option<Io>>;
            let first = wait_for_either(&mut client, &LearnedSpeaker::default(), limit, dial).await;
            assert!(matches!(
                first,
                Ok(FirstBytes::ClientOrNeither {
                    protocol: DetectedProtocol::NotHttp,
                    server: None,
                    ..
                })
            ));
            assert_eq!(started_at.elapsed(), limit, "{sent:?}");
        }
    }
}
