//! Redirected connections (O1–O4): the dialled destination, protocol detection, HTTP or opaque bytes.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::Version;
use tokio::time::Instant;
use tulle_core::{
    addr::{Addr, ClientAddr},
    drain, info_limited,
};

use crate::{
    balance::candidate::Candidate as _,
    http::{
        client::{ConnectionUse, HttpVersion},
        error::Error,
    },
    net::{
        copy::CopyFuture,
        detect::{self, DetectedProtocol, Detection},
        first_bytes::{self, FirstBytes},
        io::{Io, Tcp},
    },
    outbound::{
        connection::{
            context::{AcceptedClient, Outbound},
            http::{HttpConnection, TargetSource},
            opaque::{self, OpaqueError},
        },
        destination::snapshot::{CompiledOpaqueRoute, Destination, Plan},
        endpoint::{Endpoint, LocalEndpoints},
        metrics::labels,
        mode::Mode,
    },
    policy::client::{self, TlsRoute},
    tls::server::{self as tls_server, ParsedHello},
};

impl Outbound {
    /// Serves one accepted connection. An HTTP connection is served to its end. For an opaque connection, returns the future that
    /// copies its bytes. The caller then drops this larger future, so that a long connection does not hold it.
    pub(crate) async fn serve(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        drain: drain::Watch,
    ) -> Option<CopyFuture> {
        // O1
        let dst = match (self.orig_dst_lookup)(stream.socket(), client.0) {
            Ok(dst) => dst,
            Err(error) => {
                tracing::debug!(client = %client.0, %error, "cannot read the original destination");
                stream.reset_on_drop();
                return None;
            }
        };
        if self.is_own_listener(dst.0) {
            let ip = client.0.ip();
            info_limited!(self.log_limiter, ip, "refused: the client dialled this proxy", client = %client.0, dst = %dst.0);
            stream.reset_on_drop();
            return None;
        }
        let dst = Addr::Socket(dst.0);
        if let Some(refusal) = self.service_stack.admission.connection_refusal(&stream) {
            self.families.record_tcp_error(&dst, refusal.label(), refusal.cause());
            tracing::debug!(%dst, %refusal, "connection refused");
            stream.reset_on_drop();
            return None;
        }
        // O2
        let destination = match self.discovery.get(dst.clone(), self.detect_timeout).await {
            Ok(destination) => destination,
            Err(error) => {
                let target_and_cause = (dst.clone(), error.cause());
                info_limited!(self.target_log_limiter, target_and_cause, "connection refused", %dst, %error);
                // Boxed because it is rare and would make the future of all connections larger.
                let client = AcceptedClient {
                    worker,
                    addr: client,
                    drain,
                };
                Box::pin(self.refuse_after_failed_discovery(stream, client, dst, &error)).await;
                return None;
            }
        };
        let io = Io::tcp(stream);
        let client = AcceptedClient {
            worker,
            addr: client,
            drain,
        };
        self.new_connection(client, destination).serve(io, None).await
    }

    /// Refuses a connection because the discovery of its destination failed or timed out. HTTP clients get an error response, all
    /// others a reset.
    async fn refuse_after_failed_discovery(
        self: Arc<Self>,
        stream: Tcp,
        client: AcceptedClient,
        dst: Addr,
        error: &Error,
    ) {
        let (mut io, mut prefix) = (Io::tcp(stream), BytesMut::new());
        let protocol = match detect::detect(&mut io, &mut prefix, REFUSAL_DETECT_TIMEOUT).await {
            Ok(Detection::Detected(DetectedProtocol::Http1)) => HttpVersion::Http1,
            Ok(Detection::Detected(DetectedProtocol::Http2)) => HttpVersion::Http2,
            _ => {
                self.families.record_tcp_error(&dst, "discovery timeout", error.cause());
                return io.reset_on_drop();
            }
        };
        let connection = HttpConnection {
            outbound: self.clone(),
            client: client.clone(),
            target_source: TargetSource::DiscoveryFailed(dst.clone()),
        };
        let stream = (io.prepend(prefix.freeze()), protocol);
        self.serve_http(stream, connection, &dst, &client.drain).await;
    }

    pub(super) fn new_connection(self: Arc<Self>, client: AcceptedClient, destination: Arc<Destination>) -> Connection {
        Connection {
            outbound: self,
            client,
            destination,
        }
    }
}

pub(super) struct Connection {
    outbound: Arc<Outbound>,
    pub(super) client: AcceptedClient,
    destination: Arc<Destination>,
}

/// The connection to the server, which may be dialled before the protocol is known.
enum ServerDial {
    NotDialled,
    Connected(Io),
    Failed(Box<OpaqueError>),
}

/// A connection whose protocol is known. If it is opaque, it is connected to the server, and the future copies its bytes.
enum ClassifiedConnection {
    Http(Io, HttpVersion),
    Opaque(CopyFuture),
}

impl Connection {
    /// The dialled address, or the requested name.
    fn dst(&self) -> &Addr {
        &self.destination.target
    }

    /// Serves the client's connection `io`, with the same result as [`Outbound::serve`]. `server` is the connection to the server,
    /// if it was dialled before.
    pub(super) async fn serve(self, io: Io, server: Option<Io>) -> Option<CopyFuture> {
        let metrics = self.destination.connection_metrics.get_or_init(|| {
            let labels = labels::target_labels(self.dst()).with("peer", "src");
            let labels = labels.with("tls", "no_identity").with("no_tls_reason", "loopback");
            self.outbound.families.tcp.series(labels)
        });
        let io = io.count(metrics.clone());
        let server = server.map_or(ServerDial::NotDialled, ServerDial::Connected);
        // O3
        let serving = match self.detect_and_connect(io, server).await? {
            ClassifiedConnection::Http(io, protocol) => self.serve_http(io, protocol),
            ClassifiedConnection::Opaque(copy_future) => return Some(copy_future),
        };
        // Awaited here and not inside the detection future, so that an idle HTTP connection does not hold the state of detection.
        serving.await; // O4
        None
    }

    /// Detects the protocol if the plan requires it, and connects opaque bytes to the server.
    async fn detect_and_connect(&self, mut io: Io, mut server: ServerDial) -> Option<ClassifiedConnection> {
        let snapshot = self.destination.snapshot();
        snapshot.connection_counter.inc();
        if !matches!(snapshot.plan, Plan::Detect { .. }) {
            // Without protocol detection, it is unknown whether the client waits for an acknowledgement (see
            // `connect_by_first_bytes`).
            io.enable_quickack();
        }
        match &snapshot.plan {
            // The protocol of the endpoint that the ingress dials may differ from that of the service in `l5d-dst-override`.
            Plan::Http1(_) | Plan::Http2(_) if self.outbound.mode == Mode::Ingress => {
                self.detect_ingress_http(io).await
            }
            Plan::Http1(_) => Some(ClassifiedConnection::Http(io, HttpVersion::Http1)),
            Plan::Http2(_) => Some(ClassifiedConnection::Http(io, HttpVersion::Http2)),
            Plan::Opaque(opaque) => self.connect_opaque((io, Bytes::new()), opaque, None, server).await,
            Plan::Tls { routes, compiled } => self.connect_tls(io, routes, compiled).await,
            Plan::Detect {
                timeout,
                opaque,
                detect_series,
                ..
            } => {
                // The local setting caps the policy's timeout, so that the operator of this workload can set a shorter one.
                let limit = self.outbound.detect_timeout.min(*timeout);
                let began_at = Instant::now();
                let first = self.wait_first_bytes(&mut io, &mut server, opaque, limit).await;
                detect_series.record(first.as_ref().ok(), began_at.elapsed());
                self.connect_by_first_bytes(io, opaque, first, server).await
            }
        }
    }

    /// Connects TLS that this proxy does not terminate, by its server name (SNI).
    async fn connect_tls(
        &self,
        mut io: Io,
        routes: &[TlsRoute],
        compiled: &[Arc<CompiledOpaqueRoute>],
    ) -> Option<ClassifiedConnection> {
        let families = &self.outbound.families;
        let sni = tokio::time::timeout(self.outbound.detect_timeout, read_server_name(&mut io)).await;
        let Ok(Some((sni, prefix))) = sni else {
            families.record_tcp_error(self.dst(), "no server name", "no-server-name");
            io.reset_on_drop();
            return None;
        };
        match client::find_tls_route(routes, &sni) {
            Some(index) => {
                self.connect_opaque((io, prefix), &compiled[index], Some(&sni), ServerDial::NotDialled)
                    .await
            }
            None => {
                families.record_tcp_error(self.dst(), "no route", "no-route");
                io.reset_on_drop();
                None
            }
        }
    }

    /// Waits for the first bytes of the client or of the server, which is dialled if the client is silent.
    ///
    /// A connection to the server moves from `server` into the result. If the dial fails, `server` keeps the error.
    async fn wait_first_bytes(
        &self,
        io: &mut Io,
        server: &mut ServerDial,
        route: &Arc<CompiledOpaqueRoute>,
        limit: Duration,
    ) -> std::io::Result<FirstBytes> {
        let connect = move || async move {
            match connect_server(std::mem::replace(server, ServerDial::NotDialled), route).await {
                Ok(connected) => Some(connected),
                Err(error) => {
                    *server = ServerDial::Failed(error);
                    None
                }
            }
        };
        first_bytes::wait_for_either(io, &self.destination.learned_speaker, limit, connect).await
    }

    /// Chooses HTTP or opaque bytes by the first bytes, and connects opaque bytes to the server.
    async fn connect_by_first_bytes(
        &self,
        io: Io,
        route: &Arc<CompiledOpaqueRoute>,
        first: std::io::Result<FirstBytes>,
        server: ServerDial,
    ) -> Option<ClassifiedConnection> {
        let first = match first {
            Ok(first) => first,
            Err(error) => {
                tracing::debug!(dst = %self.dst(), %error, "connection failed during protocol detection");
                io.reset_on_drop(); // the client or the server has failed
                return None;
            }
        };
        if !first.is_complete_request_without_body() {
            // A complete request is acknowledged together with its response, which saves a packet. After other first bytes, the
            // client may wait for the acknowledgement before it sends more.
            io.enable_quickack();
        }
        match first {
            FirstBytes::Closed => None,
            FirstBytes::ClientOrNeither {
                client_bytes,
                protocol,
                server: connected,
            } => {
                let version = match protocol {
                    DetectedProtocol::Http1 => HttpVersion::Http1,
                    DetectedProtocol::Http2 => HttpVersion::Http2,
                    _ => {
                        let server = connected.map_or(server, ServerDial::Connected);
                        return self.connect_opaque((io, client_bytes), route, None, server).await;
                    }
                };
                if version == HttpVersion::Http2
                    && let Some(endpoint) = route.backends.fixed_endpoint()
                    && let Err(error) = self.check_reachable(endpoint).await
                {
                    let (outbound, dst, cause) = (&self.outbound, self.dst(), error.cause());
                    outbound.families.record_tcp_error(dst, error.label(), cause);
                    info_limited!(outbound.target_log_limiter, (dst.clone(), cause), "connection refused", %dst, %error);
                    io.reset_on_drop();
                    return None;
                }
                Some(ClassifiedConnection::Http(io.prepend(client_bytes), version))
            }
            FirstBytes::Server { server, client_bytes } => {
                self.connect_opaque((io, client_bytes), route, None, ServerDial::Connected(server))
                    .await
            }
        }
    }

    /// Checks whether an address that could not be reached before can be reached now.
    ///
    /// gRPC clients connect to several servers, and send requests to each server that accepts the connection. If the proxy
    /// accepted connections to an address at which no server answers, these clients would send requests there again and again.
    ///
    /// # Errors
    /// The address still cannot be reached.
    async fn check_reachable(&self, endpoint: &Endpoint) -> Result<(), Error> {
        if endpoint.breaker().dial_failure_cause().is_none() {
            return Ok(());
        }
        let worker = self.client.worker;
        let protocol = endpoint.protocol(Version::HTTP_2, false);
        match endpoint.dial(worker, protocol, ConnectionUse::Pooled).await {
            Ok(outcome) => {
                endpoint.client(worker).return_to_pool(outcome);
                Ok(())
            }
            Err(Error::NoFreeStream { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Detects HTTP/1 or HTTP/2 from the first bytes. Other bytes are handled as HTTP/1, which answers with an error.
    async fn detect_ingress_http(&self, mut io: Io) -> Option<ClassifiedConnection> {
        let mut prefix = BytesMut::new();
        match detect::detect(&mut io, &mut prefix, self.outbound.detect_timeout).await {
            Ok(Detection::Detected(DetectedProtocol::Http2)) => Some(ClassifiedConnection::Http(
                io.prepend(prefix.freeze()),
                HttpVersion::Http2,
            )),
            Ok(Detection::Detected(_) | Detection::TimedOut) => Some(ClassifiedConnection::Http(
                io.prepend(prefix.freeze()),
                HttpVersion::Http1,
            )),
            Ok(Detection::Closed) => None,
            Err(_) => {
                io.reset_on_drop();
                None
            }
        }
    }

    /// Connects opaque bytes to an endpoint. `name` is the server name (SNI) of TLS. If the dial fails, the client's connection is
    /// reset.
    async fn connect_opaque(
        &self,
        (io, client_prefix): (Io, Bytes),
        route: &Arc<CompiledOpaqueRoute>,
        name: Option<&str>,
        server: ServerDial,
    ) -> Option<ClassifiedConnection> {
        let route_counters = route.series.record_open(name);
        let server = match connect_server(server, route).await {
            Ok(server) => server,
            Err(error) => {
                let (label, cause) = match &*error {
                    OpaqueError::Policy(refusal) => (refusal.label(), refusal.cause()),
                    OpaqueError::Connect(error) => (error.label(), error.cause()),
                };
                route_counters.record_close(error.route_label());
                let (outbound, dst) = (&self.outbound, self.dst());
                outbound.families.record_tcp_error(dst, label, cause);
                info_limited!(outbound.target_log_limiter, (dst.clone(), cause), "connection refused", %dst, %error);
                io.reset_on_drop();
                return None;
            }
        };
        let destination = self.destination.clone();
        Some(ClassifiedConnection::Opaque(Box::pin(async move {
            let copied = opaque::copy_streams(io, server, client_prefix).await;
            route_counters.record_close(if copied.is_ok() { "" } else { "unexpected" });
            drop(destination); // held until here, so that the cache does not evict it
        })))
    }

    fn serve_http(&self, io: Io, protocol: HttpVersion) -> impl Future<Output = ()> {
        let outbound = &self.outbound;
        let connection = HttpConnection {
            outbound: outbound.clone(),
            client: self.client.clone(),
            target_source: match outbound.mode {
                Mode::Sidecar => TargetSource::Fixed(self.destination.clone()),
                Mode::Ingress => TargetSource::Override(self.destination.clone()),
            },
        };
        outbound.serve_http((io, protocol), connection, self.dst(), &self.client.drain)
    }
}

/// Returns the connection to the server; dials it unless it was dialled before.
///
/// # Errors
/// No endpoint can be reached, or the policy refuses the connection.
async fn connect_server(server: ServerDial, route: &CompiledOpaqueRoute) -> Result<Io, Box<OpaqueError>> {
    match server {
        ServerDial::NotDialled => opaque::open(route, LocalEndpoints::Permit).await.map_err(Box::new),
        ServerDial::Connected(io) => Ok(io),
        ServerDial::Failed(error) => Err(error),
    }
}

/// Maximum time for the client's first bytes after discovery has failed.
const REFUSAL_DETECT_TIMEOUT: Duration = Duration::from_millis(100);

/// Reads a ClientHello and returns its server name (SNI) and the bytes that were read; `None` if there is no server name.
async fn read_server_name(io: &mut Io) -> Option<(String, Bytes)> {
    let mut prefix = BytesMut::new();
    loop {
        match tls_server::parse_client_hello(&prefix) {
            ParsedHello::ClientHello { sni } => return Some((sni?, prefix.freeze())),
            ParsedHello::NotTls => return None,
            ParsedHello::Incomplete => {}
        }
        if detect::read_some(io, &mut prefix).await.ok()? == 0 {
            return None;
        }
    }
}
