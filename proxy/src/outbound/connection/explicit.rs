//! Explicit proxying without a redirect rule: HTTP CONNECT, requests in absolute form, and SOCKS5, on one port.
//!
//! The bytes of a tunnel are handled like a redirected connection: discovery, protocol detection, load balancing, mTLS.

use std::{sync::Arc, time::Duration};

use bytes::BytesMut;
use http::{Request, Response};
use tokio::io::{AsyncWriteExt as _, copy, sink};
use tulle_core::{
    addr::{Addr, ClientAddr},
    drain, info_limited,
};

use crate::{
    http::{
        body::Body,
        client::HttpVersion,
        error::Error,
        upgrade::tunnel::{ClientTunnel, TunnelSide},
    },
    net::{
        copy::CopyFuture,
        detect::{self, DetectedProtocol, Detection},
        io::{Io, Tcp},
        socks::{self, Reply, SocksError},
    },
    outbound::{
        connection::{
            context::{AcceptedClient, Outbound},
            http::{HttpConnection, TargetSource},
            opaque::{self, OpaqueError},
            redirected::Connection,
        },
        destination::snapshot::{Destination, Plan, Snapshot},
        endpoint::LocalEndpoints,
    },
};

impl Outbound {
    /// Serves one connection of the explicit proxy port.
    pub(crate) async fn serve_explicit(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        addr: ClientAddr,
        drain: drain::Watch,
    ) -> Option<CopyFuture> {
        let client = AcceptedClient { worker, addr, drain };
        let Ok(listener) = stream.socket().local_addr().map(Addr::Socket) else {
            return None; // the client has closed the connection
        };
        if let Some(refusal) = self.service_stack.admission.connection_refusal(&stream) {
            self.families
                .record_tcp_error(&listener, refusal.label(), refusal.cause());
            tracing::debug!(client = %addr.0, %refusal, "connection refused");
            stream.reset_on_drop();
            return None;
        }
        let (mut io, mut prefix) = (Io::tcp(stream), BytesMut::new());
        let protocol = match detect::detect(&mut io, &mut prefix, CLIENT_HANDSHAKE_TIMEOUT).await {
            Ok(Detection::Detected(DetectedProtocol::Http1)) => HttpVersion::Http1,
            Ok(Detection::Detected(DetectedProtocol::Http2)) => HttpVersion::Http2,
            Ok(Detection::Detected(_)) if prefix.first() == Some(&socks::VERSION) => {
                let (io, destination, server) = self.socks_handshake(io.prepend(prefix.freeze()), addr).await?;
                let connection = self.new_connection(client, destination);
                return Box::pin(connection.serve(io, server)).await;
            }
            Ok(Detection::Detected(_)) => {
                let client = addr.0;
                info_limited!(self.log_limiter, client.ip(), "refused: the first bytes are neither SOCKS5 nor HTTP", %client);
                io.reset_on_drop();
                return None;
            }
            Ok(Detection::Closed) => return None,
            Ok(Detection::TimedOut) | Err(_) => {
                io.reset_on_drop();
                return None;
            }
        };
        let connection = HttpConnection {
            outbound: self.clone(),
            client: client.clone(),
            target_source: TargetSource::RequestTarget {
                on_connect: |http, req, client_tunnel| Box::pin(serve_connect(http, req, client_tunnel)),
            },
        };
        let stream = (io.prepend(prefix.freeze()), protocol);
        self.serve_http(stream, connection, &listener, &client.drain).await;
        None
    }

    /// Runs the SOCKS5 handshake: reads the target, connects to it and sends the reply.
    ///
    /// Returns the client's stream, the destination and, for opaque bytes, the connection to the server.
    async fn socks_handshake(
        self: &Arc<Self>,
        mut io: Io,
        client: ClientAddr,
    ) -> Option<(Io, Arc<Destination>, Option<Io>)> {
        let mut prefix = BytesMut::new();
        let handshake = async {
            let n = read_parsed(&mut io, &mut prefix, socks::parse_greeting).await?;
            drop(prefix.split_to(n));
            io.write_all(&socks::METHOD_NO_AUTHENTICATION).await?;
            io.flush().await?;
            let (target, n) = read_parsed(&mut io, &mut prefix, socks::parse_request).await?;
            drop(prefix.split_to(n));
            Ok::<_, SocksFailure>(target)
        };
        let refusal = match tokio::time::timeout(CLIENT_HANDSHAKE_TIMEOUT, handshake).await {
            Ok(Ok(target)) => match self.connect_target(target.clone()).await {
                Ok((destination, server)) => {
                    write_and_flush(&mut io, &Reply::Succeeded.encode()).await?;
                    return Some((io.prepend(prefix.freeze()), destination, server));
                }
                Err(error) => {
                    let (client, cause) = (client.0, error.cause());
                    self.families.record_tcp_error(&target, error.label(), cause);
                    let target_and_cause = (target.clone(), cause);
                    info_limited!(
                        self.target_log_limiter,
                        target_and_cause,
                        "SOCKS request refused",
                        %client,
                        %target,
                        cause,
                        %error
                    );
                    socks_reply(&error).encode().to_vec()
                }
            },
            Ok(Err(SocksFailure::Protocol(error))) => {
                let client = client.0;
                info_limited!(self.log_limiter, client.ip(), "SOCKS request refused", %client, %error);
                error.reply()
            }
            Ok(Err(SocksFailure::ClientClosed)) => return None,
            Err(_) => {
                io.reset_on_drop();
                return None;
            }
        };
        write_and_flush(&mut io, &refusal).await?;
        // Closing a socket with unread bytes sends a reset, by which the client could lose the reply. Therefore its remaining bytes
        // are read first.
        let _ = io.shutdown().await;
        let _ = tokio::time::timeout(REFUSED_LINGER_TIMEOUT, copy(&mut io, &mut sink())).await;
        None
    }

    /// Resolves a target that the client names, and connects to it if opaque bytes may follow.
    ///
    /// If an address of the name cannot be reached, the next one is tried.
    ///
    /// # Errors
    /// The target cannot be resolved or reached, or the policy refuses it.
    async fn connect_target(self: &Arc<Self>, target: Addr) -> Result<(Arc<Destination>, Option<Io>), Error> {
        let (mut destination, fallback_addrs) = self.resolve_target(target).await?;
        let mut fallback_addrs = fallback_addrs.into_iter();
        loop {
            let opened = open_if_opaque(&destination.snapshot()).await;
            match (opened, fallback_addrs.next()) {
                (Err(error), Some(addr)) if error.is_dial_error() => {
                    (destination, _) = self.resolve_target(Addr::Socket(addr)).await?;
                }
                (opened, _) => return Ok((destination, opened?)),
            }
        }
    }
}

/// Connects to an endpoint if opaque bytes may follow; `None` if only HTTP or TLS may.
///
/// # Errors
/// No endpoint can be reached, or the policy refuses the connection.
async fn open_if_opaque(snapshot: &Snapshot) -> Result<Option<Io>, Error> {
    let opened = match &snapshot.plan {
        Plan::Opaque(route) => opaque::open(route, LocalEndpoints::Permit).await.map(Some),
        // The client's protocol is not known yet. A policy that refuses opaque bytes may permit HTTP.
        Plan::Detect { opaque: route, .. } => match opaque::open(route, LocalEndpoints::Permit).await {
            Err(OpaqueError::Policy(_)) => Ok(None),
            opened => opened.map(Some),
        },
        Plan::Http1(_) | Plan::Http2(_) | Plan::Tls { .. } => Ok(None),
    };
    opened.map_err(|error| error.into_http_error(snapshot))
}

/// Connects the application to the target of a CONNECT request.
///
/// # Errors
/// The request is not HTTP/1.1, its target is not `<host>:<port>`, or the target cannot be resolved or reached.
async fn serve_connect(
    http: &HttpConnection,
    req: &mut Request<Body>,
    client_tunnel: Option<ClientTunnel>,
) -> Result<Response<Body>, Error> {
    let client_tunnel = client_tunnel.ok_or(Error::InvalidRequest("this port supports CONNECT in HTTP/1.1 only"))?;
    let target = req.uri().authority().map(|authority| authority.as_str().parse());
    let target: Addr = match target {
        Some(Ok(target)) => target,
        _ => return Err(Error::InvalidRequest("the target of CONNECT is not <host>:<port>")),
    };
    let (destination, server) = http.outbound.connect_target(target).await?;
    let connection = http.outbound.clone().new_connection(http.client.clone(), destination);
    spawn_connect_tunnel(connection, client_tunnel, server);
    Ok(Response::new(Body::empty()))
}

/// Serves the tunnel of a CONNECT request when the HTTP server passes on the client's connection.
fn spawn_connect_tunnel(connection: Connection, client_tunnel: ClientTunnel, server: Option<Io>) {
    let guard = connection.client.drain.guard();
    tokio::spawn(async move {
        let _guard = guard;
        if let Some(TunnelSide::Connection(io)) = client_tunnel.wait_side().await
            && let Some(copy_future) = connection.serve(io, server).await
        {
            copy_future.await;
        }
    });
}

enum SocksFailure {
    Protocol(SocksError),
    ClientClosed,
}

impl From<std::io::Error> for SocksFailure {
    fn from(_: std::io::Error) -> Self {
        Self::ClientClosed
    }
}

/// Reads into `prefix` until `parse` returns a message. `prefix` may hold more bytes after the message.
async fn read_parsed<T>(
    io: &mut Io,
    prefix: &mut BytesMut,
    parse: impl Fn(&[u8]) -> Result<Option<T>, SocksError>,
) -> Result<T, SocksFailure> {
    loop {
        if let Some(found) = parse(prefix).map_err(SocksFailure::Protocol)? {
            return Ok(found);
        }
        if detect::read_some(io, prefix).await? == 0 {
            return Err(SocksFailure::ClientClosed);
        }
    }
}

async fn write_and_flush(io: &mut Io, bytes: &[u8]) -> Option<()> {
    io.write_all(bytes).await.ok()?;
    io.flush().await.ok()
}

/// The reply code for SOCKS clients.
fn socks_reply(error: &Error) -> Reply {
    match error {
        error if error.is_connection_refused() => Reply::ConnectionRefused,
        Error::Forbidden { .. }
        | Error::InvalidPolicy(_)
        | Error::DiscoveryDenied(_)
        | Error::Unauthorized { .. }
        | Error::TargetForbidden(_) => Reply::NotAllowed,
        Error::NameUnresolved { .. }
        | Error::DiscoveryTimeout(_)
        | Error::ConnectTimeout(_)
        | Error::Connect(_)
        | Error::NoEndpoints
        | Error::NoBackends
        | Error::QueueTimeout(..)
        | Error::FailingFast(_) => Reply::HostUnreachable,
        _ => Reply::GeneralFailure,
    }
}

/// Maximum time for the client's first bytes, and for its SOCKS handshake.
const CLIENT_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to wait until a refused SOCKS client closes its connection.
const REFUSED_LINGER_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::net::connect::ConnectError;

    #[test]
    fn errors_map_to_socks_replies() {
        let addr = SocketAddr::from(([10, 0, 0, 1], 80));
        let io = |kind: std::io::ErrorKind| {
            Error::Connect(ConnectError::Io {
                addr,
                source: kind.into(),
            })
        };
        let denied = Error::Unauthorized {
            rule: String::new(),
            why: "no-tls",
        };
        for (error, expected) in [
            (io(std::io::ErrorKind::ConnectionRefused), Reply::ConnectionRefused),
            (io(std::io::ErrorKind::HostUnreachable), Reply::HostUnreachable),
            (Error::NoEndpoints, Reply::HostUnreachable),
            (denied, Reply::NotAllowed),
            (Error::TargetForbidden(Addr::Socket(addr)), Reply::NotAllowed),
            (Error::Forbidden { policy: String::new() }, Reply::NotAllowed),
            (Error::InvalidPolicy("a reason".to_owned()), Reply::NotAllowed),
            (Error::DiscoveryDenied("a reason".to_owned()), Reply::NotAllowed),
            (Error::MaxInFlight, Reply::GeneralFailure),
        ] {
            assert_eq!(socks_reply(&error), expected, "{error:?}");
        }
    }
}
