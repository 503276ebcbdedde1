//! The first bytes of a connection: whether they are TLS that ends here, and who speaks first.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncRead, time::Instant};

use crate::{
    inbound::{
        Connection, Peer,
        policy::{Current, Port},
    },
    net::{
        detect::{self, Verdict},
        first::{self, First},
        io::Tcp,
    },
    policy::server::ServerProtocol,
    tls::{
        server::{self as tls_server, Hello},
        status::ServerTls,
    },
};

/// What it is called that a client does not go on in time.
pub(super) const LATE: &str = "tls detection timeout";

/// The first bytes of a connection, before TLS.
pub(super) enum Opening {
    /// TLS that ends here.
    Ours(Bytes),
    /// TLS for somebody else, which nobody looks into.
    Foreign { seen: Bytes, sni: String },
    /// No TLS: what was seen, and the application's side where it was dialled meanwhile.
    Plain(First),
}

/// Whether a client has said something that is not TLS.
pub(super) fn is_plain(first: &First) -> bool {
    matches!(first, First::Client(seen, ..) if !matches!(tls_server::sni(seen), Hello::ClientHello { .. }))
}

impl Connection {
    /// Looks for TLS. Where the port's protocol is not known, silence may mean that the server speaks first, unless the policy has
    /// rules for requests: those of HTTP come from clients, and nothing else may pass.
    pub(super) async fn opening(
        &self,
        stream: Tcp,
        peer: &Peer,
        plain: &ServerTls,
        port: &Port,
        current: &Current,
    ) -> Result<(Tcp, Opening), &'static str> {
        let limit = self.inbound.detect_timeout;
        let deadline = Instant::now() + limit;
        let mut stream = stream;
        let first = if let ServerProtocol::Detect { timeout, .. } = &current.policy.protocol {
            let limit = (*timeout).min(limit);
            match self.first(&mut stream, peer, plain, port, current, limit).await {
                Ok(first) => first,
                Err(_) => {
                    stream.reset(); // whichever side broke
                    return Err("i/o");
                }
            }
        } else {
            let mut seen = BytesMut::new();
            match more(&mut stream, &mut seen, deadline).await? {
                0 => First::Closed,
                _ => First::Client(seen.freeze(), Verdict::Incomplete, None),
            }
        };
        let First::Client(seen, verdict, app) = first else {
            return Ok((stream, Opening::Plain(first)));
        };
        if seen.is_empty() && app.is_none() {
            stream.reset();
            return Err(LATE); // nothing came, and the application may not be dialled, or cannot be
        }
        let mut seen = BytesMut::from(seen);
        loop {
            match tls_server::sni(&seen) {
                Hello::NotTls => {
                    return Ok((stream, Opening::Plain(First::Client(seen.freeze(), verdict, app))));
                }
                Hello::ClientHello { sni: Some(sni) } if self.inbound.creds.is_ours(&sni) => {
                    return Ok((stream, Opening::Ours(seen.freeze())));
                }
                Hello::ClientHello { sni: Some(sni) } => {
                    return Ok((
                        stream,
                        Opening::Foreign {
                            seen: seen.freeze(),
                            sni,
                        },
                    ));
                }
                Hello::ClientHello { sni: None } => {
                    return Ok((
                        stream,
                        Opening::Plain(First::Client(seen.freeze(), Verdict::NotHttp, app)),
                    ));
                }
                Hello::Incomplete => {
                    if more(&mut stream, &mut seen, deadline).await? == 0 {
                        return Ok((
                            stream,
                            Opening::Plain(First::Client(seen.freeze(), Verdict::NotHttp, app)),
                        ));
                    }
                }
            }
        }
    }

    /// How a connection to a port begins whose protocol has to be found out.
    pub(super) async fn first(
        &self,
        stream: &mut (impl AsyncRead + Unpin),
        peer: &Peer,
        tls: &ServerTls,
        port: &Port,
        current: &Current,
        limit: Duration,
    ) -> std::io::Result<First> {
        let is_terminated = matches!(tls, ServerTls::Terminated { .. });
        let learned = &port.learned[usize::from(is_terminated)];
        if current.demands_http {
            return first::of_client(stream, learned, limit).await;
        }
        let forward = self.forward(peer, tls, port);
        first::words(stream, learned, limit, || forward.open(current)).await
    }
}

/// Reads more of a client's first bytes. If none come in time, the connection is to end with a reset.
async fn more(stream: &mut Tcp, seen: &mut BytesMut, deadline: Instant) -> Result<usize, &'static str> {
    let read = match tokio::time::timeout_at(deadline, detect::read_some(stream, seen)).await {
        Ok(read) => read.map_err(|_| "i/o"),
        Err(_) => Err(LATE),
    };
    if read.is_err() {
        stream.reset();
    }
    read
}
