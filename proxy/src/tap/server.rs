//! Serves taps to who may see requests: by mutual TLS, or from this machine in the clear.

use std::{
    net::{SocketAddr, TcpListener},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::Stream;
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
    listener::{Accepted, Listener},
    log_limit::LogLimiter,
    metrics::Registry,
};
use tulle_proto::tap::{
    ObserveRequest, TapEvent,
    observe_request::extract::{Extract, http::Extract as Headers},
    tap_server::{Tap, TapServer},
};

use crate::{
    net::io::Tcp,
    tap::{Taps, Wish, matches::Match},
    tls::{
        creds::{Alpn, Credentials},
        server as tls_server,
    },
};

/// Where taps are served, and to whom.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub clients: Vec<Identity>,
}

/// The service, to one client.
struct Service {
    taps: Arc<Taps>,
    /// Whether this client may see anything.
    is_permitted: bool,
}

/// Accepts until the drain begins, which also ends connections: a tap that nobody ends is no reason to stay.
pub(crate) async fn serve(
    listener: TcpListener,
    clients: Vec<Identity>,
    taps: Arc<Taps>,
    creds: Credentials,
    registry: &Registry,
    drain: drain::Watch,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let listener = Listener::new("tap", listener, MAX_CONNECTIONS, registry).drain_within(Duration::ZERO);
    let clients: Arc<[Identity]> = clients.into();
    let log = Arc::new(LogLimiter::default());
    let serve = move |accepted| connection(accepted, clients.clone(), taps.clone(), creds.clone(), log.clone());
    listener.run(drain.signaled(), serve).await;
    Ok(())
}

async fn connection(
    accepted: Accepted,
    clients: Arc<[Identity]>,
    taps: Arc<Taps>,
    creds: Credentials,
    log: Arc<LogLimiter>,
) {
    let is_tls = accepted.is_tls();
    let Accepted {
        stream, client, place, ..
    } = accepted;
    if !is_tls {
        let is_permitted = client.ip().is_loopback();
        return http2(place.watch(stream), Service { taps, is_permitted }).await;
    }
    let shaking = tls_server::accept(Tcp::new(stream), &creds, Alpn::Unset);
    match tokio::time::timeout(HANDSHAKE_LIMIT, shaking).await {
        Ok(Ok((stream, peer))) => {
            let permitted = peer.client_id.as_ref().filter(|id| clients.contains(id));
            let is_permitted = permitted.is_some();
            match permitted {
                Some(id) => place.verified(id.as_str()),
                None => info_limited!(log, client.ip(), "may not tap", %client, id = ?peer.client_id),
            }
            http2(place.watch(stream), Service { taps, is_permitted }).await;
        }
        Ok(Err(error)) => {
            info_limited!(log, client.ip(), "TLS handshake with a client of tap failed", %client, %error);
        }
        Err(_) => {}
    }
}

/// Speaks to a client, to whom a stranger is told that it may not, and then has to leave.
async fn http2(io: impl AsyncRead + AsyncWrite + Unpin, service: Service) {
    let limit = match service.is_permitted {
        true => Duration::MAX,
        false => STRANGER_LIMIT,
    };
    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    server
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE)
        .max_concurrent_streams(MOST_STREAMS);
    let service = TowerToHyperService::new(TapServer::new(service));
    let serving = server.serve_connection(TokioIo::new(io), service);
    if let Ok(Err(error)) = tokio::time::timeout(limit, serving).await {
        tracing::debug!(%error, "a connection of tap ended");
    }
}

#[tonic::async_trait]
impl Tap for Service {
    type ObserveStream = Shown;

    async fn observe(&self, req: Request<ObserveRequest>) -> Result<Response<Shown>, Status> {
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
                "limit is 0; expected the number of requests to show",
            ));
        }
        let matches = Match::read(r#match).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let headers = extract.and_then(|extract| extract.extract).is_some_and(|extract| {
            let Extract::Http(http) = extract;
            matches!(http.extract, Some(Headers::Headers(_)))
        });
        let (number, events) = self.taps.add(Wish {
            matches,
            limit,
            one_in: sample_one_in,
            headers,
        });
        Ok(Response::new(Shown {
            taps: self.taps.clone(),
            number,
            events,
        }))
    }
}

/// The events of one tap; it ends when this is dropped.
pub(crate) struct Shown {
    taps: Arc<Taps>,
    number: u32,
    events: mpsc::Receiver<TapEvent>,
}

impl Stream for Shown {
    type Item = Result<TapEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(cx).map(|event| event.map(Ok))
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.taps.remove(self.number);
    }
}

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Enough to be told so.
const STRANGER_LIMIT: Duration = Duration::from_secs(5);
/// Who watches may have nothing to see for long.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
const MOST_STREAMS: u32 = 100;
/// Those that nobody permitted, too, as who it is turns out later.
const MAX_CONNECTIONS: usize = 64;
