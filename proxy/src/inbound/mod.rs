//! From a peer to the application: the connection path, I1 to I6.
//!
//! A connection is accepted, its policy found, TLS terminated where it is meant for us, its protocol learned; HTTP goes
//! on per request in [`http`], everything else as bytes in [`forward`].

pub(crate) mod admin;
mod cut;
mod debug;
mod direct;
mod forward;
pub(crate) mod gateway;
mod http;
pub(crate) mod metrics;
mod opening;
pub(crate) mod policy;
pub(crate) mod profiles;
pub(crate) mod servers;
mod start;

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ::http::HeaderValue;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::{
    addr::{Addr, ClientAddr, NameAddr, OrigDst},
    drain, info_limited,
    log_limit::LogLimiter,
};

use crate::{
    http::{
        client::{Client, PoolConfig, Protocol},
        error::Error,
        h2,
        layers::Wrappers,
        respond::{Place, Reasons},
        server::{self, Closer},
    },
    inbound::{
        forward::Forward,
        gateway::{Gateway, Onward},
        http::{HttpConnection, To},
        metrics::Families,
        opening::{LATE, Opening, is_plain},
        policy::{Current, Port, Ports},
        profiles::Profiles,
        servers::Servers,
        start::{BytesStart, HttpStart, Start},
    },
    metrics::hosts::{Hosts, SaidBy},
    net::{
        connect,
        copy::Carrying,
        counts::Counts,
        detect::{self, Verdict},
        first::First,
        io::{Io, Tcp},
        orig_dst,
    },
    policy::{
        authz::{ConnTls, Denied},
        server::ServerProtocol,
    },
    tap::Taps,
    tls::{
        creds::{Alpn, Credentials},
        header::SessionProtocol,
        server as tls_server,
        status::{ServerTls, WhyServerPlain},
        verify::HandshakeFailure,
    },
    trace::Tracer,
};

/// The inbound side of the process; shared by all workers.
pub(crate) struct Inbound {
    /// The proxy's own port.
    pub(crate) own_port: u16,
    /// Addresses of this workload; empty where they are not known.
    pub(crate) ips: BTreeSet<IpAddr>,
    pub(crate) orig_dst: orig_dst::Of,
    pub(crate) creds: Credentials,
    pub(crate) ports: Arc<Ports>,
    pub(crate) profiles: Arc<Profiles>,
    pub(crate) detect_timeout: Duration,
    pub(crate) connect: connect::Config,
    pub(crate) dial_as: DialAs,
    pub(crate) http2_client: h2::Params,
    pub(crate) pool: PoolConfig,
    pub(crate) servers: Servers,
    pub(crate) wrappers: Wrappers,
    pub(crate) families: Families,
    /// Our identity.
    pub(crate) name: Arc<str>,
    /// Who watches requests.
    pub(crate) taps: Arc<Taps>,
    /// Who makes spans of traces, where there are any.
    pub(crate) tracer: Option<Tracer>,
    /// Names that TLS and transport headers are for, which are told apart on metrics.
    pub(crate) names: Hosts<()>,
    /// Names that requests are for, where these are told apart on metrics.
    pub(crate) authorities: Option<Hosts<Arc<str>>>,
    /// Who takes on what is for names of another network, if anybody.
    pub(crate) gateway: Option<Arc<dyn Gateway>>,
    /// Keeps clients that are refused from filling the log.
    pub(crate) log: LogLimiter,
    /// Clients of the application, by worker and what is dialled.
    pub(crate) apps: Vec<Mutex<HashMap<App, Arc<Client>>>>,
}

/// Whom the application sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DialAs {
    Us,
    /// Its client.
    Client,
}

/// The application at an address, and the client it is dialled as, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct App {
    target: SocketAddr,
    client: Option<IpAddr>,
}

/// Addresses of the application that are remembered without a connection to them; peers may try every port.
const MAX_IDLE_APPS: usize = 64;

/// Who is connected, and to what.
#[derive(Clone, Copy, Debug)]
struct Peer {
    client: ClientAddr,
    /// The application's address.
    target: SocketAddr,
}

impl ServerTls {
    /// What the client has proven by its TLS.
    fn proven(&self) -> ConnTls<'_> {
        match self {
            Self::Terminated { client_id } => ConnTls::Terminated {
                client: client_id.as_ref(),
            },
            Self::PassedThrough { .. } | Self::Plain(_) => ConnTls::NotTerminated,
        }
    }
}

impl Inbound {
    /// Serves one accepted connection: HTTP to its end, bytes up to where they only have to be carried.
    pub(crate) async fn serve(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        drain: drain::Watch,
    ) -> Option<Carrying> {
        let OrigDst(target) = match (self.orig_dst)(stream.socket(), client.0) {
            Ok(target) => target,
            Err(error) => {
                tracing::debug!(client = %client.0, %error, "unknown what the client dialled");
                return None;
            }
        };
        if !self.ips.is_empty() && !self.ips.contains(&target.ip()) {
            let ip = client.0.ip();
            info_limited!(self.log, ip, "refused: not an address of this workload", client = %client.0, %target);
            self.families.foreign_address();
            stream.reset();
            return None;
        }
        if let Some(refusal) = self.wrappers.admission.refusal(&stream) {
            self.families.tcp_failed(target, refusal.label(), refusal.cause());
            tracing::debug!(client = %client.0, %target, %refusal, "connection refused");
            stream.reset();
            return None;
        }
        let connection = Connection {
            inbound: self,
            worker,
            drain,
        };
        let start = if target.port() == connection.inbound.own_port {
            Box::pin(connection.direct(stream, client, target)).await
        } else {
            connection.redirected(stream, Peer { client, target }).await
        };
        // Not from within: idle connections are at this point, and should hold nothing of how they got here.
        let serving = match start? {
            Start::Http(start) => connection.http(start),
            Start::Bytes(start) => return Some(Box::pin(connection.bytes(start))),
        };
        serving.await;
        None
    }

    /// The application's client of one worker.
    fn app(self: &Arc<Self>, worker: usize, peer: &Peer) -> Arc<Client> {
        let app = self.reached_by(peer);
        let mut apps = self.apps[worker].lock();
        if apps.len() >= MAX_IDLE_APPS && !apps.contains_key(&app) {
            apps.retain(|_, client| Arc::strong_count(client) > 1);
        }
        apps.entry(app)
            .or_insert_with(|| Arc::new(http::client(self, app)))
            .clone()
    }

    /// How the application is dialled for a client.
    fn reached_by(&self, peer: &Peer) -> App {
        let client = match (self.dial_as, peer.client.0.ip()) {
            (DialAs::Us, _) => None,
            // Such an address says nothing without the interface that it came by.
            (DialAs::Client, IpAddr::V6(ip)) if ip.is_unicast_link_local() => None,
            (DialAs::Client, ip) => Some(ip),
        };
        App {
            target: peer.target,
            client,
        }
    }

    /// What connections to the application are counted in.
    fn app_counts(&self, target: SocketAddr) -> Arc<Counts> {
        let labels = metrics::target_labels(target)
            .with("peer", "dst")
            .with("tls", "no_identity");
        self.families.tcp.series(labels.with("no_tls_reason", "loopback"))
    }

    fn client_counts(&self, peer: &Peer, tls: &ServerTls, current: &Current) -> Arc<Counts> {
        let labels = metrics::connection_labels(peer.target, tls, &current.policy.meta).with("peer", "src");
        self.families.tcp.series(labels)
    }
}

/// One accepted connection.
struct Connection {
    inbound: Arc<Inbound>,
    worker: usize,
    drain: drain::Watch,
}

impl Connection {
    /// A connection that was redirected to us: the policy of the port it went to decides all.
    async fn redirected(&self, stream: Tcp, peer: Peer) -> Option<Start> {
        let (port, current) = self.port(&peer).await;
        if current.policy.protocol == ServerProtocol::Opaque {
            let tls = ServerTls::Plain(WhyServerPlain::PortSkipped);
            let io = self.counted(stream, &peer, &tls, &current);
            return Some(Start::bytes(io, peer, tls, port));
        }
        let plain = ServerTls::Plain(WhyServerPlain::NoTlsFromRemote);
        let began_at = Instant::now();
        let (stream, opening) = match self.opening(stream, &peer, &plain, &port, &current).await {
            Ok(opened) => opened,
            Err(error) => {
                if self.forward(&peer, &plain, &port).permit(&current).is_some() {
                    let cause = if error == LATE { "detect-timeout" } else { "client-left" };
                    self.inbound.families.tcp_failed(peer.target, error, cause);
                }
                tracing::debug!(client = %peer.client.0, error, "connection ended before it was served");
                return None;
            }
        };
        match opening {
            Opening::Ours(seen) => {
                let (io, tls) = self.terminate(stream, seen, &peer, Alpn::Unset).await?;
                let io = io.count(self.inbound.client_counts(&peer, &tls, &current));
                self.terminated(io, peer, tls, port, current).await
            }
            Opening::Foreign { seen, sni } => {
                let sni = self
                    .inbound
                    .names
                    .get(&sni, SaidBy::Stranger, |_| ())
                    .map_or_else(String::new, |()| sni);
                let tls = ServerTls::PassedThrough { sni };
                if current.demands_http {
                    self.refuse_bytes(&peer, &tls, &port, &current);
                    stream.reset();
                    return None;
                }
                let io = self.counted(stream.unread(seen), &peer, &tls, &current);
                Some(Start::bytes(io, peer, tls, port))
            }
            Opening::Plain(first) if current.policy.protocol == ServerProtocol::Tls && is_plain(&first) => {
                let labels = metrics::connection_labels(peer.target, &plain, &current.policy.meta);
                self.inbound.families.tcp_denied(&labels, Denied::NoTls);
                let (client, target) = (peer.client.0, peer.target);
                info_limited!(self.inbound.log, client.ip(), "connection refused: this port speaks TLS", %client, %target);
                stream.reset();
                None
            }
            Opening::Plain(first) => {
                let counts = self.inbound.client_counts(&peer, &plain, &current);
                counts.read(first.n_read() as u64);
                let io = Io::tcp(stream).count(counts);
                self.detected(Some(&first), &peer, &current, began_at);
                self.begun(io, first, peer, plain, port, current).await
            }
        }
    }

    /// A connection to our own port: mTLS with a transport header, or nothing.
    async fn direct(&self, stream: Tcp, client: ClientAddr, local: SocketAddr) -> Option<Start> {
        let peer = Peer { client, target: local };
        let (families, log) = (&self.inbound.families, &self.inbound.log);
        let fail = |failure: HandshakeFailure| {
            families.handshake_failed(local, failure);
            info_limited!(log, client.0.ip(), "direct connection refused", client = %client.0, %failure);
        };
        let deadline = Instant::now() + self.inbound.detect_timeout;
        // Which has the same limit.
        let (io, tls) = self
            .terminate(stream, Bytes::new(), &peer, Alpn::TransportHeader)
            .await?;
        let ServerTls::Terminated { client_id: Some(_) } = &tls else {
            fail(HandshakeFailure::NoCertificate);
            return None;
        };
        let (io, header) =
            match tokio::time::timeout_at(deadline, direct::header(io, self.inbound.gateway.is_some())).await {
                Ok(Ok(read)) => read,
                Ok(Err(error)) => {
                    families.tcp_failed(local, "transport header", "bad-transport-header");
                    info_limited!(log, client.0.ip(), "direct connection refused", client = %client.0, %error);
                    return None;
                }
                Err(_) => {
                    families.tcp_failed(local, "transport header timeout", "detect-timeout");
                    return None;
                }
            };
        let known = |name: &NameAddr| self.inbound.names.get(&name.name, SaidBy::Known, |_| ()).is_some();
        let label = header.name.as_ref().filter(|name| known(name));
        direct::count(families, &header, label, &tls);
        let peer = match &header.name {
            // What is for others is permitted by the policy of our own port.
            Some(_) => peer,
            None => Peer {
                client,
                target: direct::target(local, &header),
            },
        };
        let (port, current) = self.port(&peer).await;
        let io = io.count(self.inbound.client_counts(&peer, &tls, &current));
        let protocol = match header.protocol {
            // The client's proxy takes it for bytes; the policy of the port decides.
            None if current.demands_http && header.name.is_none() => {
                return self.terminated(io, peer, tls, port, current).await;
            }
            None if current.demands_http => {
                self.refuse_bytes(&peer, &tls, &port, &current);
                io.reset();
                return None;
            }
            None => {
                let mut server = None;
                if let Some(name) = &header.name {
                    server = self.onward(name, &peer, &tls, &port, &current).await;
                    if server.is_none() {
                        io.reset();
                        return None;
                    }
                }
                return Some(Start::Bytes(BytesStart {
                    io,
                    app: server,
                    first: Bytes::new(),
                    peer,
                    tls,
                    port,
                }));
            }
            Some(SessionProtocol::Http1) => Protocol::Http1,
            Some(SessionProtocol::Http2) => Protocol::Http2,
        };
        Some(Start::Http(HttpStart {
            io,
            protocol,
            peer,
            tls,
            port,
            name: header.name,
        }))
    }

    /// The way for bytes to a name of another network, if the client may have it.
    async fn onward(
        &self,
        name: &NameAddr,
        peer: &Peer,
        tls: &ServerTls,
        port: &Port,
        current: &Current,
    ) -> Option<Io> {
        let inbound = &self.inbound;
        let permitted = self.forward(peer, tls, port).permit(current)?;
        let opened = async {
            gateway::check_loop(&inbound.name, tls.client_id().map_or("", |id| id.as_str()), None)?;
            inbound.gateway.as_ref().ok_or(Error::RouteNotFound)?.open(name).await
        };
        match opened.await {
            Ok(io) => {
                inbound.families.tcp_allow.get(&permitted).inc();
                Some(io)
            }
            Err(error) => {
                let client = peer.client.0;
                info_limited!(inbound.log, client.ip(), "connection refused", %client, target = %name, %error);
                inbound.families.tcp_failed(peer.target, error.label(), error.cause());
                None
            }
        }
    }

    /// The port that a client wants, and the policy that it is judged by: once that is known, or has been waited for.
    async fn port(&self, peer: &Peer) -> (Arc<Port>, Arc<Current>) {
        let ports = &self.inbound.ports;
        let port = ports.get(peer.target.port());
        if !port.is_known() {
            Box::pin(ports.wait_until_known(&port)).await;
        }
        let current = port.current();
        if current.is_unknown {
            ports.log_unknown(peer.target.port());
        }
        (port, current)
    }

    fn counted(&self, tcp: Tcp, peer: &Peer, tls: &ServerTls, current: &Current) -> Io {
        Io::tcp(tcp).count(self.inbound.client_counts(peer, tls, current))
    }

    fn forward<'a>(&'a self, peer: &'a Peer, tls: &'a ServerTls, port: &'a Port) -> Forward<'a> {
        Forward {
            inbound: &self.inbound,
            peer,
            tls,
            port,
        }
    }

    /// Refuses a connection whose bytes are not the HTTP that its port demands.
    fn refuse_bytes(&self, peer: &Peer, tls: &ServerTls, port: &Port, current: &Current) {
        if self.forward(peer, tls, port).permit(current).is_some() {
            self.inbound.families.not_http(peer.target);
            tracing::debug!(client = %peer.client.0, target = %peer.target, "connection refused: it is not HTTP");
        }
    }

    /// Ends TLS here; the failure is counted by its reason.
    ///
    /// A connection of peers has to say by its ALPN that a transport header follows.
    async fn terminate(&self, stream: Tcp, seen: Bytes, peer: &Peer, alpn: Alpn) -> Option<(Io, ServerTls)> {
        let shaking = tls_server::accept(stream.unread(seen), &self.inbound.creds, alpn);
        match tokio::time::timeout(self.inbound.detect_timeout, shaking).await {
            Ok(Ok((_, facts))) if facts.alpn != alpn => {
                let families = &self.inbound.families;
                families.tcp_failed(peer.target, "transport header", "bad-transport-header");
                let client = peer.client.0;
                info_limited!(self.inbound.log, client.ip(), "direct connection refused: no transport header follows", %client);
                None
            }
            Ok(Ok((tls, facts))) => Some((
                Io::tls_server(tls),
                ServerTls::Terminated {
                    client_id: facts.client_id,
                },
            )),
            Ok(Err(error)) => {
                self.inbound.families.handshake_failed(peer.target, error.failure());
                let (client, target) = (peer.client.0, peer.target);
                info_limited!(self.inbound.log, client.ip(), "TLS handshake failed", %client, %target, %error);
                None
            }
            Err(_) => {
                let families = &self.inbound.families;
                families.tcp_failed(peer.target, "tls detection timeout", "detect-timeout");
                None
            }
        }
    }

    /// A connection whose TLS ended here: learns its protocol where the policy does not say.
    async fn terminated(
        &self,
        mut io: Io,
        peer: Peer,
        tls: ServerTls,
        port: Arc<Port>,
        current: Arc<Current>,
    ) -> Option<Start> {
        let protocol = match &current.policy.protocol {
            ServerProtocol::Detect { timeout, .. } => {
                let began_at = Instant::now();
                let first = self.first(&mut io, &peer, &tls, &port, &current, *timeout).await;
                self.detected(first.as_ref().ok(), &peer, &current, began_at);
                return match first {
                    Ok(first) => self.begun(io, first, peer, tls, port, current).await,
                    Err(_) => {
                        self.inbound.families.tcp_failed(peer.target, "i/o", "client-left");
                        io.reset(); // whichever side broke
                        None
                    }
                };
            }
            // A peer's proxy may have upgraded what the application speaks as HTTP/1.
            ServerProtocol::Http1(_) => {
                let mut seen = BytesMut::new();
                let looked = detect::look(&mut io, &mut seen, self.inbound.detect_timeout).await;
                io = io.unread(seen.freeze());
                match looked {
                    Ok(detect::Look::Seen(Verdict::Http2)) => Protocol::Http2,
                    Ok(detect::Look::Closed) | Err(_) => return None,
                    Ok(_) => Protocol::Http1,
                }
            }
            ServerProtocol::Http2(_) | ServerProtocol::Grpc(_) => Protocol::Http2,
            ServerProtocol::Opaque | ServerProtocol::Tls => {
                return Some(Start::bytes(io, peer, tls, port));
            }
        };
        Some(Start::Http(HttpStart {
            io,
            protocol,
            peer,
            tls,
            port,
            name: None,
        }))
    }

    /// Counts what a connection turned out to be, where the policy does not say.
    fn detected(&self, first: Option<&First>, peer: &Peer, current: &Current, began_at: Instant) {
        if let ServerProtocol::Detect { .. } = &current.policy.protocol {
            let families = &self.inbound.families;
            let series = families.detected(&current.policy.meta, peer.target.port());
            series.found(first, began_at.elapsed());
        }
    }

    /// Goes on with a connection of which the first bytes are known.
    async fn begun(
        &self,
        io: Io,
        first: First,
        peer: Peer,
        tls: ServerTls,
        port: Arc<Port>,
        current: Arc<Current>,
    ) -> Option<Start> {
        let (first, verdict, app) = match first {
            First::Closed => return None,
            First::Server { server, client } => (client, Verdict::NotHttp, Some(server)),
            First::Client(seen, verdict, app) => (seen, verdict, app),
        };
        let protocol = match (&current.policy.protocol, verdict) {
            (ServerProtocol::Http1(_), _) | (ServerProtocol::Detect { .. }, Verdict::Http1) => Protocol::Http1,
            (ServerProtocol::Http2(_) | ServerProtocol::Grpc(_), _)
            | (ServerProtocol::Detect { .. }, Verdict::Http2) => Protocol::Http2,
            _ if current.demands_http => {
                self.refuse_bytes(&peer, &tls, &port, &current);
                io.reset();
                return None;
            }
            _ => {
                return Some(Start::Bytes(BytesStart {
                    io,
                    app,
                    first,
                    peer,
                    tls,
                    port,
                }));
            }
        };
        drop(app); // dialled in case the server spoke first
        Some(Start::Http(HttpStart {
            io: io.unread(first),
            protocol,
            peer,
            tls,
            port,
            name: None,
        }))
    }

    /// Carries bytes to the application and back.
    async fn bytes(self, start: BytesStart) {
        let BytesStart {
            io,
            app,
            first,
            peer,
            tls,
            port,
        } = start;
        self.forward(&peer, &tls, &port).run(io, app, first).await;
    }

    /// Serves HTTP, request by request.
    fn http(&self, start: HttpStart) -> impl Future<Output = ()> {
        let HttpStart {
            io,
            protocol,
            peer,
            tls,
            port,
            name,
        } = start;
        let inbound = &self.inbound;
        let is_authorized = port
            .current()
            .policy
            .permits_some_request(peer.client.0.ip(), tls.proven());
        let config = match (is_authorized, tls.client_id()) {
            (false, _) => &inbound.servers.unauthorized,
            (true, None) => &inbound.servers.strangers,
            (true, Some(_)) => &inbound.servers.peers,
        };
        let closer = Closer::default();
        let client_id = tls.client_id().and_then(|id| HeaderValue::from_str(id.as_str()).ok());
        let reasons = if client_id.is_some() {
            Reasons::Told
        } else {
            Reasons::Kept
        };
        let target = name.clone().map_or(Addr::Socket(peer.target), Addr::Name);
        let to = match (name, &inbound.gateway) {
            (Some(name), Some(gateway)) => {
                let onward = Onward {
                    name,
                    worker: self.worker,
                    client: peer.client.0,
                    drain: self.drain.clone(),
                };
                To::Onward(gateway.clone(), Box::new(onward))
            }
            _ => To::App(inbound.app(self.worker, &peer)),
        };
        let connection = Arc::new(HttpConnection {
            protocol,
            to,
            inbound: inbound.clone(),
            peer,
            tls,
            port,
            client_id: client_id.clone(),
            seen: Mutex::default(),
            addressed: Mutex::default(),
            unauthorized: (!is_authorized).then(|| closer.clone()),
            drain: self.drain.clone(),
        });
        let place = Place {
            direction: "inbound",
            hop: inbound.name.clone(),
            target,
            client: peer.client.0,
            client_id,
            labelled: Some(connection.clone()),
        };
        let refused = connection.clone().refused();
        let serve = move |mut req| {
            let connection = connection.clone();
            async move { connection.serve(&mut req).await }
        };
        let service = inbound.wrappers.around(serve, reasons, place, closer.clone());
        let serving = server::serve(io, protocol, service, config, closer, &self.drain);
        cut::unless(refused, serving).map(move |served| {
            if let Some(Err(error)) = served {
                tracing::debug!(client = %peer.client.0, %error, "HTTP connection ended");
            }
        })
    }
}
