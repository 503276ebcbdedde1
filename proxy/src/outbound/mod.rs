//! From the application to a backend: the connection path, O1 to O4.
//!
//! A connection is accepted, what it dialled is looked up, its protocol learned; HTTP goes on per request in [`http`],
//! everything else draws a backend per connection in [`opaque`].

pub(crate) mod backend;
mod connector;
mod debug;
mod destination;
pub(crate) mod discover;
mod dispatch;
pub(crate) mod endpoint;
mod explicit;
mod http;
mod known;
pub(crate) mod metrics;
mod named;
mod opaque;
mod profile;
mod reach;
mod resolved;
mod tries;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use tokio::time::Instant;
use tulle_core::{
    addr::{self, Addr, ClientAddr},
    drain, info_limited,
    log_limit::LogLimiter,
};

use crate::{
    http::{
        client::Protocol,
        error::Error,
        headers,
        layers::Wrappers,
        respond::{Place, Reasons},
        server::{self, Closer},
    },
    net::{
        connect::ConnectError,
        copy::Carrying,
        detect::{self, Look, Verdict},
        first::{self, First},
        io::{Io, Tcp},
        orig_dst,
    },
    outbound::{
        destination::{Destination, OpaquePlan, Plan},
        discover::{Discover, Found},
        http::{HttpConnection, Targets},
        metrics::Families,
        opaque::OpaqueError,
    },
    policy::client,
    tls::server::{self as tls_server, Hello},
    trace::{self, Tracer},
};

/// Whose requests these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Of an application, which dials what it wants.
    Sidecar,
    /// Of an ingress, which dials an endpoint that it has chosen, and names the service in `l5d-dst-override`.
    Ingress,
}

/// The outbound side of the process; shared by all workers.
pub(crate) struct Outbound {
    pub(crate) orig_dst: orig_dst::Of,
    /// Our own listeners: a connection that dialled one of them leads nowhere.
    pub(crate) own: Vec<SocketAddr>,
    pub(crate) discover: Arc<Discover>,
    pub(crate) detect_timeout: Duration,
    pub(crate) server: server::Config,
    pub(crate) wrappers: Wrappers,
    pub(crate) reasons: Reasons,
    pub(crate) families: Families,
    /// Who makes spans of traces, where there are any.
    pub(crate) tracer: Option<Tracer>,
    pub(crate) mode: Mode,
    /// Our identity.
    pub(crate) name: Arc<str>,
    /// Keeps clients that are refused from filling the log.
    pub(crate) log: LogLimiter,
}

impl Outbound {
    /// Serves one accepted connection: HTTP to its end, bytes up to where they only have to be carried.
    pub(crate) async fn serve(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        drain: drain::Watch,
    ) -> Option<Carrying> {
        let dst = match (self.orig_dst)(stream.socket(), client.0) {
            Ok(dst) => dst,
            Err(error) => {
                tracing::debug!(client = %client.0, %error, "unknown what the application dialled");
                return None;
            }
        };
        if self.own.iter().any(|own| is_listener(*own, dst.0)) {
            let ip = client.0.ip();
            info_limited!(self.log, ip, "refused: this proxy was dialled itself", client = %client.0, dst = %dst.0);
            stream.reset();
            return None;
        }
        let dst = Addr::Socket(dst.0);
        if let Some(refusal) = self.wrappers.admission.refusal(&stream) {
            self.families.tcp_failed(&dst, refusal.label(), refusal.cause());
            tracing::debug!(%dst, %refusal, "connection refused");
            stream.reset();
            return None;
        }
        let destination = match self.discover.get(dst.clone(), self.detect_timeout).await {
            Ok(destination) => destination,
            Err(error) => {
                tracing::info!(%dst, %error, "connection refused");
                // Rare, and no reason for what goes on to be larger.
                Box::pin(self.refuse(worker, stream, client, dst, &error, drain)).await;
                return None;
            }
        };
        let io = Io::tcp(stream);
        self.connection(worker, client, destination, drain)
            .serve(io, None)
            .await
    }

    /// Ends a connection of whose target nobody says anything; clients of HTTP are told why.
    async fn refuse(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        dst: Addr,
        error: &Error,
        drain: drain::Watch,
    ) {
        let (mut io, mut seen) = (Io::tcp(stream), BytesMut::new());
        let protocol = match detect::look(&mut io, &mut seen, PATIENCE).await {
            Ok(Look::Seen(Verdict::Http1)) => Protocol::Http1,
            Ok(Look::Seen(Verdict::Http2)) => Protocol::Http2,
            _ => {
                self.families.tcp_failed(&dst, "discovery timeout", error.cause());
                return io.reset();
            }
        };
        let connection = HttpConnection {
            outbound: self.clone(),
            worker,
            client: client.0,
            targets: Targets::Undiscovered(dst.clone()),
            drain: drain.clone(),
        };
        self.http(io.unread(seen.freeze()), protocol, connection, &dst, &drain)
            .await;
    }

    fn connection(
        self: Arc<Self>,
        worker: usize,
        client: ClientAddr,
        destination: Arc<Destination>,
        drain: drain::Watch,
    ) -> Connection {
        Connection {
            outbound: self,
            worker,
            client,
            destination,
            drain,
        }
    }

    /// What is known of a target that somebody names.
    ///
    /// # Errors
    /// The control plane does not answer, DNS knows no address, or the target is this proxy or none that clients are led to.
    async fn target(&self, target: Addr) -> Result<Found, Error> {
        let found = match target {
            Addr::Name(name) => self.discover.named(name, self.detect_timeout).await?,
            Addr::Socket(addr) => {
                self.check_target(addr)?;
                (self.discover.get(target, self.detect_timeout).await?, Vec::new())
            }
        };
        if let Addr::Socket(addr) = found.0.target {
            self.check_target(addr)?;
        }
        Ok(found)
    }

    /// # Errors
    /// The address is a listener of this proxy, or one that somebody who names it is not led to.
    fn check_target(&self, addr: SocketAddr) -> Result<(), Error> {
        if self.own.iter().any(|own| is_listener(*own, addr)) {
            return Err(Error::Connect(ConnectError::Ourselves { addr }));
        }
        match addr::is_local_or_multicast(addr.ip()) {
            true => Err(Error::TargetForbidden(Addr::Socket(addr))),
            false => Ok(()),
        }
    }

    /// Serves HTTP, request by request; `target` is what clients are told that they wanted to reach.
    fn http<'a>(
        &'a self,
        io: Io,
        protocol: Protocol,
        connection: HttpConnection,
        target: &'a Addr,
        drain: &'a drain::Watch,
    ) -> impl Future<Output = ()> {
        let closer = Closer::default();
        let place = Place {
            direction: "outbound",
            hop: self.name.clone(),
            target: target.clone(),
            client: connection.client,
            client_id: None,
            labelled: None,
        };
        let connection = Arc::new(connection);
        let serve = move |mut req| {
            let connection = connection.clone();
            async move {
                let span = trace::came(connection.outbound.tracer.as_ref(), &mut req);
                let mut result = connection.serve(&mut req).await;
                trace::ended(span, &result);
                if let (Ok(rsp), Reasons::Kept) = (&mut result, connection.outbound.reasons) {
                    headers::strip_forged(rsp.headers_mut()); // a peer's proxy has told us, not whoever asks
                }
                result
            }
        };
        let service = self.wrappers.around(serve, self.reasons, place, closer.clone());
        server::serve(io, protocol, service, &self.server, closer, drain).map(move |served| {
            if let Err(error) = served {
                tracing::debug!(dst = %target, %error, "HTTP connection ended");
            }
        })
    }
}

/// One accepted connection.
struct Connection {
    outbound: Arc<Outbound>,
    worker: usize,
    client: ClientAddr,
    destination: Arc<Destination>,
    drain: drain::Watch,
}

/// The other side of a connection, where it was dialled before, or why it cannot be.
type Dialled = Option<Result<Io, Box<OpaqueError>>>;

/// What a connection is for, once that is known.
enum Start {
    Http(Io, Protocol),
    Bytes(Carrying),
}

impl Connection {
    /// What was dialled.
    fn dst(&self) -> &Addr {
        &self.destination.target
    }

    /// Serves what comes on `io`; `server` is the other side, where it had to be dialled before.
    async fn serve(self, io: Io, server: Option<Io>) -> Option<Carrying> {
        let counts = self.destination.counts.get_or_init(|| {
            let labels = metrics::target_labels(self.dst()).with("peer", "src");
            let labels = labels.with("tls", "no_identity").with("no_tls_reason", "loopback");
            self.outbound.families.tcp.series(labels)
        });
        let io = io.count(counts.clone());
        // Idle connections are at the end of this, and should hold nothing of how they got there.
        let serving = match self.start(io, server).await? {
            Start::Http(io, protocol) => self.http(io, protocol),
            Start::Bytes(carrying) => return Some(carrying),
        };
        serving.await;
        None
    }

    async fn start(&self, mut io: Io, mut server: Option<Io>) -> Option<Start> {
        let snapshot = self.destination.snapshot();
        snapshot.connections.inc();
        if !matches!(snapshot.plan, Plan::Detect { .. }) {
            io.acknowledge();
        }
        match &snapshot.plan {
            // What is told of the endpoint that an ingress dials need not hold for the services that it names.
            Plan::Http1(_) | Plan::Http2(_) if self.outbound.mode == Mode::Ingress => self.http_of_ingress(io).await,
            Plan::Http1(_) => Some(Start::Http(io, Protocol::Http1)),
            Plan::Http2(_) => Some(Start::Http(io, Protocol::Http2)),
            Plan::Opaque(opaque) => self.opaque(io, opaque, None, server.map(Ok), Bytes::new()).await,
            Plan::Tls { routes, plans } => {
                let sni = tokio::time::timeout(self.outbound.detect_timeout, server_name(&mut io)).await;
                let Ok(Some((sni, seen))) = sni else {
                    self.outbound
                        .families
                        .tcp_failed(self.dst(), "no server name", "no-server-name");
                    io.reset();
                    return None;
                };
                match client::find_tls(routes, &sni) {
                    Some(index) => self.opaque(io, &plans[index], Some(&sni), None, seen).await,
                    None => {
                        let families = &self.outbound.families;
                        families.tcp_failed(self.dst(), "no route", "no-route");
                        io.reset();
                        None
                    }
                }
            }
            Plan::Detect {
                timeout,
                opaque,
                detected,
                ..
            } => {
                // That an application cannot be waited for so long may be known where the proxy runs, and nowhere else.
                let limit = self.outbound.detect_timeout.min(*timeout);
                let mut failed = None;
                let (ready, failure) = (&mut server, &mut failed);
                let dial = move || async move {
                    match ready.take() {
                        None => match opaque::open(opaque).await {
                            Ok(server) => Some(server),
                            Err(error) => {
                                *failure = Some(Box::new(error));
                                None
                            }
                        },
                        dialled => dialled,
                    }
                };
                let began_at = Instant::now();
                let first = first::words(&mut io, &self.destination.learned, limit, dial).await;
                detected.found(first.as_ref().ok(), began_at.elapsed());
                let first = match first {
                    Ok(first) => first,
                    Err(error) => {
                        tracing::debug!(dst = %self.dst(), %error, "connection broke before it was served");
                        io.reset(); // whichever side it was
                        return None;
                    }
                };
                if !first.is_request() {
                    io.acknowledge();
                }
                match first {
                    First::Closed => None,
                    First::Client(seen, Verdict::Http1, _) => Some(Start::Http(io.unread(seen), Protocol::Http1)),
                    First::Client(seen, Verdict::Http2, _) => Some(Start::Http(io.unread(seen), Protocol::Http2)),
                    First::Client(seen, _, dialled) => {
                        let dialled = dialled.or(server).map(Ok);
                        self.opaque(io, opaque, None, dialled.or_else(|| failed.map(Err)), seen)
                            .await
                    }
                    First::Server { server, client } => self.opaque(io, opaque, None, Some(Ok(server)), client).await,
                }
            }
        }
    }

    /// The version of HTTP that the application speaks, as its first bytes tell; anything else is answered as HTTP/1.
    async fn http_of_ingress(&self, mut io: Io) -> Option<Start> {
        let mut seen = BytesMut::new();
        match detect::look(&mut io, &mut seen, self.outbound.detect_timeout).await {
            Ok(Look::Seen(Verdict::Http2)) => Some(Start::Http(io.unread(seen.freeze()), Protocol::Http2)),
            Ok(Look::Seen(_) | Look::TimedOut) => Some(Start::Http(io.unread(seen.freeze()), Protocol::Http1)),
            Ok(Look::Closed) | Err(_) => None,
        }
    }

    /// Opens the way for bytes; `name` is what their TLS asks for, and `server` the other side where it was dialled before. Where
    /// there is none, the connection ends as one does that is refused: with a reset.
    async fn opaque(
        &self,
        io: Io,
        plan: &Arc<OpaquePlan>,
        name: Option<&str>,
        server: Dialled,
        first: Bytes,
    ) -> Option<Start> {
        let passage = plan.series.open(name);
        let dialled = match server {
            Some(dialled) => dialled,
            None => opaque::open(plan).await.map_err(Box::new),
        };
        let server = match dialled {
            Ok(server) => server,
            Err(error) => {
                let (label, cause) = match &*error {
                    OpaqueError::Refused(refusal) => (refusal.label(), refusal.cause()),
                    OpaqueError::Unreached(error) => (error.label(), error.cause()),
                };
                passage.close(error.route_label());
                self.outbound.families.tcp_failed(self.dst(), label, cause);
                tracing::info!(dst = %self.dst(), %error, "connection refused");
                io.reset();
                return None;
            }
        };
        let destination = self.destination.clone();
        Some(Start::Bytes(Box::pin(async move {
            let joined = opaque::join(io, server, first).await;
            passage.close(if joined.is_ok() { "" } else { "unexpected" });
            drop(destination); // known for as long as somebody uses it
        })))
    }

    /// Serves HTTP, request by request.
    fn http(&self, io: Io, protocol: Protocol) -> impl Future<Output = ()> {
        let outbound = &self.outbound;
        let connection = HttpConnection {
            outbound: outbound.clone(),
            worker: self.worker,
            client: self.client.0,
            targets: match outbound.mode {
                Mode::Sidecar => Targets::Dialled(self.destination.clone()),
                Mode::Ingress => Targets::Named(self.destination.clone()),
            },
            drain: self.drain.clone(),
        };
        outbound.http(io, protocol, connection, self.dst(), &self.drain)
    }
}

/// How long a client may still take for its first bytes, when all the time to find out about its target is over.
const PATIENCE: Duration = Duration::from_millis(100);

/// Whether a connection to `dst` would come back to the listener at `own`.
fn is_listener(own: SocketAddr, dst: SocketAddr) -> bool {
    own.port() == dst.port() && (own.ip() == dst.ip() || own.ip().is_unspecified())
}

/// Reads until the name in a ClientHello is known; the bytes stay with the caller.
async fn server_name(io: &mut Io) -> Option<(String, Bytes)> {
    let mut seen = BytesMut::new();
    loop {
        match tls_server::sni(&seen) {
            Hello::ClientHello { sni } => return Some((sni?, seen.freeze())),
            Hello::NotTls => return None,
            Hello::Incomplete => {}
        }
        if detect::read_some(io, &mut seen).await.ok()? == 0 {
            return None;
        }
    }
}
