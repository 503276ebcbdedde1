//! The tap server. Authorized clients use mutual TLS, or plaintext on loopback.

use std::{
    net::{SocketAddr, TcpListener},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, future::OptionFuture};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};
use tonic::{Code, Request, Response, Status};
use tulle_core::{
    drain,
    identity::Identity,
    info_limited,
    listener::{AcceptedConnection, ConnectionEnd, Listener},
    log_limit::LogLimiter,
    metrics::Registry,
};
use tulle_proto::tap::{
    ObserveRequest, TapEvent,
    observe_request::extract::{Extract, http::Extract as Headers},
    tap_server::{self, Tap},
};

use crate::{
    net::io::Tcp,
    tap::{TapParams, TapRegistry, matches::Match},
    tls::{
        client_chains::ClientChain,
        credentials::{Alpn, Credentials},
        server as tls_server,
    },
};

/// The address of the tap listener, and the permitted clients.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub clients: Vec<Identity>,
}

/// The tap API for one client.
struct TapService {
    taps: Arc<TapRegistry>,
    /// Whether this client may tap.
    is_permitted: bool,
}

/// The server of the tap API.
#[derive(Clone)]
pub(crate) struct TapServer {
    /// Identities that may tap, besides plaintext clients with a loopback address.
    clients: Arc<[Identity]>,
    taps: Arc<TapRegistry>,
    creds: Credentials,
    log: Arc<LogLimiter>,
}

impl TapServer {
    pub(crate) fn new(clients: Vec<Identity>, taps: Arc<TapRegistry>, creds: Credentials) -> Self {
        Self {
            clients: clients.into(),
            taps,
            creds,
            log: Arc::new(LogLimiter::default()),
        }
    }

    /// Accepts connections until the drain begins. The drain closes all connections, because a tap may never end by itself.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub(crate) async fn serve(
        self,
        listener: TcpListener,
        registry: &Registry,
        drain: drain::Watch,
    ) -> std::io::Result<()> {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let listener = Listener::new("tap", listener, MAX_CONNECTIONS, registry).with_drain_timeout(Duration::ZERO);
        listener
            .run(drain.signaled(), move |accepted| {
                serve_connection(accepted, self.clone())
            })
            .await;
        Ok(())
    }
}

async fn serve_connection(accepted: AcceptedConnection, server: TapServer) -> ConnectionEnd {
    let TapServer {
        clients,
        taps,
        creds,
        log,
    } = server;
    let is_tls = accepted.is_tls();
    let AcceptedConnection {
        stream, client, permit, ..
    } = accepted;
    if !is_tls {
        let is_permitted = client.ip().is_loopback();
        return serve_http2(permit.track(stream), TapService { taps, is_permitted }, None).await;
    }
    let handshake = tls_server::accept_or_reset(Tcp::new(stream), &creds, Alpn::Unset);
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(Ok((stream, peer))) => {
            let permitted = peer.client_id.as_ref().filter(|id| clients.contains(id));
            let is_permitted = permitted.is_some();
            match permitted {
                Some(id) => permit.set_identity(id.as_str()),
                None => {
                    info_limited!(log, client.ip(), "tap refused, the client is not authorized", %client, id = ?peer.client_id)
                }
            }
            serve_http2(permit.track(stream), TapService { taps, is_permitted }, peer.chain).await
        }
        Ok(Err(error)) => {
            info_limited!(log, client.ip(), "TLS handshake with a tap client failed", %client, %error);
            ConnectionEnd::Failed
        }
        Err(_) => ConnectionEnd::Failed,
    }
}

/// Serves a client until its certificates in `chain` expire or are not trusted any more. An unauthorized client gets an error and
/// is then disconnected.
async fn serve_http2(
    io: impl AsyncRead + AsyncWrite + Unpin,
    service: TapService,
    chain: Option<Arc<ClientChain>>,
) -> ConnectionEnd {
    let time_limit = match service.is_permitted {
        true => Duration::MAX,
        false => UNAUTHORIZED_TIMEOUT,
    };
    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    server
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS);
    let service = TowerToHyperService::new(tap_server::TapServer::new(service));
    let serving = server.serve_connection(TokioIo::new(io), service);
    tokio::select! {
        served = tokio::time::timeout(time_limit, serving) => match served {
            Ok(Err(error)) => {
                tracing::debug!(%error, "tap connection failed");
                ConnectionEnd::Failed
            }
            // An unauthorized client is disconnected after its error.
            Ok(Ok(())) | Err(_) => ConnectionEnd::Closed,
        },
        // Without a chain, the result is `None`, which does not match.
        Some(()) = OptionFuture::from(chain.as_deref().map(ClientChain::wait_invalid)) => ConnectionEnd::Closed,
    }
}

#[tonic::async_trait]
impl Tap for TapService {
    type ObserveStream = EventStream;

    async fn observe(&self, req: Request<ObserveRequest>) -> Result<Response<EventStream>, Status> {
        if !self.is_permitted {
            return Err(Status::new(
                Code::Unauthenticated,
                "only the identities in LINKERD2_PROXY_TAP_SVC_NAME may tap",
            ));
        }
        let ObserveRequest {
            limit,
            r#match,
            extract,
            sample_one_in,
        } = req.into_inner();
        if limit == 0 {
            return Err(Status::invalid_argument(
                "limit is 0, expected the number of requests to show",
            ));
        }
        let condition = Match::decode(r#match).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let shows_headers = extract.and_then(|extract| extract.extract).is_some_and(|extract| {
            let Extract::Http(http) = extract;
            matches!(http.extract, Some(Headers::Headers(_)))
        });
        let (id, events) = self.taps.add(TapParams {
            condition,
            limit,
            sample_one_in,
            shows_headers,
        });
        Ok(Response::new(EventStream {
            taps: self.taps.clone(),
            id,
            events,
        }))
    }
}

/// The events of one tap; the tap ends when this is dropped.
pub(crate) struct EventStream {
    taps: Arc<TapRegistry>,
    id: u32,
    events: mpsc::Receiver<TapEvent>,
}

impl Stream for EventStream {
    type Item = Result<TapEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx).map(|event| event.map(Ok))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.taps.remove(self.id);
    }
}

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for an unauthorized client to receive the error.
const UNAUTHORIZED_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of pings, which keep the connections of idle taps open.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const MAX_CONCURRENT_STREAMS: u32 = 100;
/// Maximum number of connections, unauthorized clients included: the identity is known only after a connection is accepted.
const MAX_CONNECTIONS: usize = 64;
