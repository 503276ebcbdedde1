//! Who speaks first: HTTP is recognised by the client's first bytes, other protocols may start with the server's.
//!
//! A client that stays silent for a moment is given the server's side: it is dialled, and whoever speaks first
//! decides. What a target turned out to be is remembered, so that later connections wait less or not at all.

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
    detect::{self, Look, Verdict},
    io::Io,
};

/// How long a client may think before the server is dialled as well. Clients of client-first protocols have their
/// first bytes ready within a millisecond or two.
const GRACE: Duration = Duration::from_millis(15);

/// The same where clients have spoken first before.
const GRACE_OF_SPEAKERS: Duration = Duration::from_millis(25);

/// How long a silent client is listened to at least, from when the server's side was dialled, where that cannot be opened. A
/// peer's first TLS bytes may have been lost once and come again, and a client of HTTP is told more.
const LAST_CHANCE: Duration = Duration::from_secs(1);

/// What connections to one target have shown so far.
#[derive(Debug, Default)]
pub(crate) struct Learned(AtomicU8);

const SERVER_SPEAKS: u8 = 1;
const CLIENT_SPEAKS: u8 = 2;

/// How a connection began.
#[derive(Debug)]
pub(crate) enum First {
    /// The client spoke, or will be taken for silent: its bytes, what they are, and the server's side where it was
    /// dialled meanwhile.
    Client(Bytes, Verdict, Option<Io>),
    /// The server spoke; its bytes are in front of its side again. The client's, if any, are not.
    Server { server: Io, client: Bytes },
    /// The client left without a byte.
    Closed,
}

impl First {
    /// Bytes that were read from the client.
    pub(crate) fn n_read(&self) -> usize {
        match self {
            Self::Client(client, ..) | Self::Server { client, .. } => client.len(),
            Self::Closed => 0,
        }
    }

    /// Whether these are all of a request, to be answered next; as far as that shows without reading it.
    pub(crate) fn is_request(&self) -> bool {
        matches!(self, Self::Client(client, Verdict::Http1, _)
            if client.ends_with(b"\r\n\r\n") && (client.starts_with(b"GET ") || client.starts_with(b"HEAD ")))
    }
}

/// Waits for the first bytes of either side, `limit` at most; after that the connection is opaque.
///
/// `dial` opens the server's side; it must have authorized the client before. It yields `None` when that is not
/// possible, and then only the client is listened to.
///
/// # Errors
/// Reading from the client failed, or the server's side broke before it said anything.
pub(crate) async fn words<C, F>(
    client: &mut C,
    learned: &Learned,
    limit: Duration,
    dial: impl FnOnce() -> F,
) -> io::Result<First>
where
    C: AsyncRead + Unpin,
    F: Future<Output = Option<Io>>,
{
    let mut seen = BytesMut::new();
    let patience = learned.patience().min(limit);
    if patience > Duration::ZERO {
        match detect::look(client, &mut seen, patience).await? {
            Look::TimedOut if patience < limit => {}
            look => return Ok(learned.client(look, seen, None)),
        }
    }
    // Rare, and much larger than what a plain request needs.
    Box::pin(both(client, seen, learned, limit, dial)).await
}

/// Waits for the first bytes of the client alone, `limit` at most.
///
/// # Errors
/// Reading from the client failed.
pub(crate) async fn of_client<C: AsyncRead + Unpin>(
    client: &mut C,
    learned: &Learned,
    limit: Duration,
) -> io::Result<First> {
    let mut seen = BytesMut::new();
    let look = detect::look(client, &mut seen, limit).await?;
    Ok(learned.client(look, seen, None))
}

async fn both<C, F>(
    client: &mut C,
    mut seen: BytesMut,
    learned: &Learned,
    limit: Duration,
    dial: impl FnOnce() -> F,
) -> io::Result<First>
where
    C: AsyncRead + Unpin,
    F: Future<Output = Option<Io>>,
{
    if !seen.is_empty() {
        // A request that comes in pieces: the client is the one who speaks.
        let look = detect::look(client, &mut seen, limit).await?;
        return Ok(learned.client(look, seen, None));
    }
    let mut said = BytesMut::new();
    let chance_until = Instant::now() + limit.min(LAST_CHANCE);
    let (look, server) = {
        let mut looking = pin!(detect::look(client, &mut seen, limit));
        // The client may still speak while the server is dialled.
        tokio::select! {
            biased;
            look = &mut looking => (look?, None),
            // It would be here several times over, and as long as the client is waited for.
            dialled = Box::pin(dial()) => match dialled {
                None => (chance(looking, chance_until).await?, None),
                Some(mut server) => tokio::select! {
                    biased;
                    look = &mut looking => (look?, Some(server)),
                    read = detect::read_some(&mut server, &mut said) => match read {
                        Ok(_) => (Look::TimedOut, Some(server)),
                        Err(broken) => match chance(looking, chance_until).await? {
                            Look::TimedOut => return Err(broken),
                            look => (look, None),
                        },
                    },
                },
            },
        }
    };
    match server {
        Some(server) if !said.is_empty() => {
            learned.note(SERVER_SPEAKS);
            Ok(First::Server {
                server: server.unread(said.freeze()),
                client: seen.freeze(),
            })
        }
        server => Ok(learned.client(look, seen, server)),
    }
}

async fn chance(looking: impl Future<Output = io::Result<Look>>, until: Instant) -> io::Result<Look> {
    tokio::time::timeout_at(until, looking)
        .await
        .unwrap_or(Ok(Look::TimedOut))
}

impl Learned {
    /// How long a client is waited for alone. However long ago it was that the client of this target spoke first, one
    /// that is silent gets its server soon: what was learned may have been an accident, or a stranger's doing.
    fn patience(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            SERVER_SPEAKS => Duration::ZERO,
            CLIENT_SPEAKS => GRACE_OF_SPEAKERS,
            _ => GRACE,
        }
    }

    fn note(&self, what: u8) {
        self.0.store(what, Ordering::Relaxed);
    }

    fn client(&self, look: Look, seen: BytesMut, server: Option<Io>) -> First {
        let verdict = match look {
            Look::Seen(verdict) => verdict,
            Look::Closed => return First::Closed,
            // A client that takes its time: its server will not wait for ever, and says so.
            Look::TimedOut if detect::has_method(&seen) => Verdict::Http1,
            Look::TimedOut => Verdict::NotHttp,
        };
        // Only HTTP proves who speaks first: other clients may have answered a greeting that we have not seen.
        if verdict != Verdict::NotHttp {
            self.note(CLIENT_SPEAKS);
        }
        First::Client(seen.freeze(), verdict, server)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_head_without_a_body_is_taken_for_a_request() {
        for (bytes, is_request) in [
            (&b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..], true),
            (b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", true),
            (b"GET / HTTP/1.1\r\nhost: x\r\n", false),
            (b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n", false),
            (b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\na", false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false),
            (b"hello\r\n\r\n", false),
        ] {
            let first = First::Client(Bytes::from_static(bytes), detect::classify(bytes), None);
            assert_eq!(first.is_request(), is_request, "{first:?}");
        }
        assert!(!First::Closed.is_request());
    }
}
