//! Connections of applications that say themselves where they lead, as no redirect rule does: HTTP CONNECT, requests in
//! absolute form, and SOCKS5, on one port.
//!
//! What a tunnel carries is treated like a connection that was redirected: looked up, looked at, balanced, protected.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use http::{Request, Response, header, uri::Scheme};
use tokio::{
    io::{AsyncWriteExt as _, copy, sink},
    sync::oneshot,
};
use tulle_core::{
    addr::{Addr, ClientAddr},
    drain,
};

use crate::{
    http::{body::Body, client::Protocol, error::Error, orig_proto, tunnel::Leg},
    net::{
        copy::Carrying,
        detect::{self, Look, Verdict},
        io::{Io, Tcp},
        socks::{self, Reply, SocksError},
    },
    outbound::{
        Connection, Outbound,
        destination::{Destination, Plan, Snapshot},
        discover::Found,
        http::{HttpConnection, Targets},
        opaque::{self, OpaqueError},
    },
};

impl Outbound {
    /// Serves one connection that was accepted where applications say what they want.
    pub(crate) async fn serve_explicit(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        drain: drain::Watch,
    ) -> Option<Carrying> {
        let Ok(listener) = stream.socket().local_addr().map(Addr::Socket) else {
            return None; // the client has left
        };
        if let Some(refusal) = self.wrappers.admission.refusal(&stream) {
            self.families.tcp_failed(&listener, refusal.label(), refusal.cause());
            tracing::debug!(client = %client.0, %refusal, "connection refused");
            return None;
        }
        let (mut io, mut seen) = (Io::tcp(stream), BytesMut::new());
        let protocol = match detect::look(&mut io, &mut seen, PATIENCE).await {
            Ok(Look::Seen(Verdict::Http1)) => Protocol::Http1,
            Ok(Look::Seen(Verdict::Http2)) => Protocol::Http2,
            Ok(Look::Seen(_)) if seen.first() == Some(&socks::VERSION) => {
                let (io, destination, server) = self.socks(io.unread(seen.freeze()), client).await?;
                let connection = self.connection(worker, client, destination, drain);
                return Box::pin(connection.serve(io, server)).await;
            }
            Ok(Look::Seen(_)) => {
                tracing::info!(client = %client.0, "refused: expected SOCKS5 or HTTP, as to a proxy");
                return None;
            }
            Ok(Look::TimedOut | Look::Closed) | Err(_) => return None,
        };
        let connection = HttpConnection {
            outbound: self.clone(),
            worker,
            client: client.0,
            targets: Targets::Asked,
            drain: drain.clone(),
        };
        let io = io.unread(seen.freeze());
        self.http(io, protocol, connection, &listener, &drain).await;
        None
    }

    /// Hears a SOCKS client out and tells it whether it is connected.
    async fn socks(self: &Arc<Self>, mut io: Io, client: ClientAddr) -> Option<(Io, Arc<Destination>, Option<Io>)> {
        let mut seen = BytesMut::new();
        let asked = async {
            let n = understood(&mut io, &mut seen, socks::greeting).await?;
            drop(seen.split_to(n));
            io.write_all(&socks::ACCEPTED).await?;
            io.flush().await?;
            let (target, n) = understood(&mut io, &mut seen, socks::request).await?;
            drop(seen.split_to(n));
            Ok::<_, Refused>(target)
        };
        let refusal = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(target)) => match self.reach(target.clone()).await {
                Ok((destination, server)) => {
                    send(&mut io, &Reply::Succeeded.bytes()).await?;
                    return Some((io.unread(seen.freeze()), destination, server));
                }
                Err(error) => {
                    self.families.tcp_failed(&target, error.label(), error.cause());
                    tracing::info!(client = %client.0, %target, cause = error.cause(), %error, "SOCKS request refused");
                    reply(&error).bytes().to_vec()
                }
            },
            Ok(Err(Refused::Socks(error))) => {
                tracing::info!(client = %client.0, %error, "SOCKS request refused");
                error.answer()
            }
            Ok(Err(Refused::Left)) | Err(_) => return None,
        };
        send(&mut io, &refusal).await?;
        // The answer would be lost to the client with a reset, as which unread bytes end a connection.
        let _ = io.shutdown().await;
        let _ = tokio::time::timeout(LINGER, copy(&mut io, &mut sink())).await;
        None
    }

    /// What is known of a target that was named, and the way to it where bytes may follow that we do not understand.
    ///
    /// # Errors
    /// It is not known, or nobody can be reached there.
    async fn reach(self: &Arc<Self>, target: Addr) -> Result<(Arc<Destination>, Option<Io>), Error> {
        let (mut destination, others) = self.target(target).await?;
        for addr in others {
            match open(&destination.snapshot()).await {
                Err(error) if error.is_of_dial() => {}
                opened => return Ok((destination, opened?)),
            }
            (destination, _) = self.target(Addr::Socket(addr)).await?;
        }
        let server = open(&destination.snapshot()).await?;
        Ok((destination, server))
    }
}

/// A connection to an endpoint, where bytes may follow that we do not understand.
///
/// # Errors
/// Nobody can be reached, or nobody may.
async fn open(snapshot: &Snapshot) -> Result<Option<Io>, Error> {
    let opened = match &snapshot.plan {
        Plan::Opaque(plan) => opaque::open(plan).await.map(Some),
        // What is to be refused as bytes may be permitted as HTTP.
        Plan::Detect { opaque: plan, .. } => match opaque::open(plan).await {
            Err(OpaqueError::Refused(_)) => Ok(None),
            opened => opened.map(Some),
        },
        Plan::Http1(_) | Plan::Http2(_) | Plan::Tls { .. } => Ok(None),
    };
    opened.map_err(|error| answered(error, snapshot))
}

impl HttpConnection {
    /// What holds for the target of a request in absolute form, which then becomes one as servers expect it.
    ///
    /// # Errors
    /// It has no such target, or the target is not known.
    pub(super) async fn asked(&self, req: &mut Request<Body>) -> Result<Found, Error> {
        let Some(authority) = req.uri().authority() else {
            return Err(Error::BadRequest(
                "this port is a proxy; expected a target such as http://web.shop.svc.cluster.local/, or CONNECT",
            ));
        };
        if req.uri().scheme().is_some_and(|scheme| *scheme != Scheme::HTTP) {
            return Err(Error::BadRequest(
                "its target is not of http; others are reached by CONNECT",
            ));
        }
        let port = authority.port_u16().unwrap_or(80);
        let target = format!("{}:{port}", authority.host()).parse();
        let target: Addr = target.map_err(|_| Error::BadRequest("its target is not <host> or <host>:<port>"))?;
        req.headers_mut().remove(header::PROXY_AUTHORIZATION);
        if req.version() < http::Version::HTTP_2 {
            orig_proto::make_origin(req);
        }
        self.outbound.target(target).await
    }

    /// Connects the application with the target of CONNECT.
    ///
    /// # Errors
    /// Nobody can be reached there.
    pub(super) async fn connect(
        &self,
        req: &mut Request<Body>,
        client: Option<oneshot::Receiver<Leg>>,
    ) -> Result<Response<Body>, Error> {
        let client = client.ok_or(Error::BadRequest("CONNECT is for HTTP/1.1 here"))?;
        let target = req.uri().authority().map(|authority| authority.as_str().parse());
        let target: Addr = match target {
            Some(Ok(target)) => target,
            _ => return Err(Error::BadRequest("the target of CONNECT is not <host>:<port>")),
        };
        let (destination, server) = self.outbound.reach(target).await?;
        let (worker, from) = (self.worker, ClientAddr(self.client));
        let outbound = self.outbound.clone();
        let connection = outbound.connection(worker, from, destination, self.drain.clone());
        tunnel(connection, client, server);
        Ok(Response::new(Body::empty()))
    }
}

/// Serves what follows a CONNECT, once the HTTP server lets go of it.
fn tunnel(connection: Connection, client: oneshot::Receiver<Leg>, server: Option<Io>) {
    let guard = connection.drain.guard();
    tokio::spawn(async move {
        let _guard = guard;
        if let Ok(Leg::Connection(io)) = client.await
            && let Some(carrying) = connection.serve(io, server).await
        {
            carrying.await;
        }
    });
}

/// Why a SOCKS client is not served.
enum Refused {
    Socks(SocksError),
    Left,
}

impl From<std::io::Error> for Refused {
    fn from(_: std::io::Error) -> Self {
        Self::Left
    }
}

/// Reads until there is enough to be understood; what follows is in `seen` as well.
async fn understood<T>(
    io: &mut Io,
    seen: &mut BytesMut,
    parse: impl Fn(&[u8]) -> Result<Option<T>, SocksError>,
) -> Result<T, Refused> {
    loop {
        if let Some(found) = parse(seen).map_err(Refused::Socks)? {
            return Ok(found);
        }
        if detect::read_some(io, seen).await? == 0 {
            return Err(Refused::Left);
        }
    }
}

async fn send(io: &mut Io, bytes: &[u8]) -> Option<()> {
    io.write_all(bytes).await.ok()?;
    io.flush().await.ok()
}

/// A refusal of bytes, as HTTP clients are told.
pub(super) fn answered(error: OpaqueError, snapshot: &Snapshot) -> Error {
    match error {
        OpaqueError::Unreached(error) => error,
        OpaqueError::Refused(refusal) => Error::Unauthorized {
            rule: snapshot.policy.meta.to_string(),
            why: refusal.label(),
        },
    }
}

/// The same, as SOCKS clients are told.
fn reply(error: &Error) -> Reply {
    match error {
        error if error.is_refusal() => Reply::Refused,
        Error::Unauthorized { .. } | Error::TargetForbidden(_) => Reply::Forbidden,
        Error::Unresolved { .. }
        | Error::Undiscovered(_)
        | Error::ConnectTimeout(_)
        | Error::Connect(_)
        | Error::NoEndpoints
        | Error::NoBackends
        | Error::FailFast(..)
        | Error::Unavailable(_) => Reply::HostUnreachable,
        _ => Reply::Failed,
    }
}

/// How long an application may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a client that was refused may take to leave.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::net::connect::ConnectError;

    #[test]
    fn socks_clients_are_told_what_their_protocol_has_words_for() {
        let addr = SocketAddr::from(([10, 0, 0, 1], 80));
        let io = |kind: std::io::ErrorKind| {
            Error::Connect(ConnectError::Io {
                addr,
                source: kind.into(),
            })
        };
        let forbidden = Error::Unauthorized {
            rule: String::new(),
            why: "forbidden",
        };
        for (error, expected) in [
            (io(std::io::ErrorKind::ConnectionRefused), Reply::Refused),
            (io(std::io::ErrorKind::HostUnreachable), Reply::HostUnreachable),
            (Error::NoEndpoints, Reply::HostUnreachable),
            (forbidden, Reply::Forbidden),
            (Error::TargetForbidden(Addr::Socket(addr)), Reply::Forbidden),
            (Error::Shed, Reply::Failed),
        ] {
            assert_eq!(reply(&error), expected, "{error:?}");
        }
    }
}
