//! Serves queries over HTTP: rows as one JSON document, taps as a stream of JSON lines.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::header::{CONTENT_TYPE, HOST};
use http::uri::Authority;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Incoming;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;
use tulle_core::drain::Watch;
use tulle_core::info_limited;
use tulle_core::log_limit::LogLimiter;
use tulle_core::names::telemetry::{EDGES, GROUP, ROUTES, TAPS, VERSION, WORKLOADS};

use super::request::{self, ApiRequest, MetricsQuery, RequestedResource};
use super::rows;
use super::scraper::{self, SidecarScraper};
use super::tap::{TapRequest, Tapper};
use crate::webhook::https::RequestHandler;

type Body = UnsyncBoxBody<Bytes, Infallible>;

pub struct Api {
    pub(super) scraper: Arc<SidecarScraper>,
    pub(super) tapper: Tapper,
    pub(super) drain: Watch,
    /// Limits concurrent taps.
    pub(super) tap_slots: Arc<Semaphore>,
    /// Limits concurrent queries.
    pub(super) query_slots: Arc<Semaphore>,
    pub(super) allowed_clients: AllowedClients,
    /// Limits the log lines of each user. All users have the address of the API server, so they cannot be told apart by
    /// address.
    pub(super) log_limiter: LogLimiter<String>,
}

/// The clients that have access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllowedClients {
    /// Requests that the API server forwards after authorization.
    ApiServer,
    /// Local programs. Requests of web pages in a local browser are rejected by their Host header.
    ThisMachine,
}

#[derive(Debug, thiserror::Error)]
enum QueryError {
    #[error(transparent)]
    Request(#[from] request::Error),
    #[error("host {0:?} is not this machine; expected localhost or a loopback address such as 127.0.0.1:8089")]
    Host(String),
    #[error("method {0} is not supported; expected GET")]
    Method(Method),
    #[error("{MAX_CONCURRENT_TAPS} taps are running, which is the limit; end one of them")]
    TooManyTaps,
    #[error("{MAX_CONCURRENT_QUERIES} queries are in progress, which is the limit; retry later")]
    TooManyQueries,
    #[error("the query took longer than {QUERY_TIMEOUT:?}; query one namespace")]
    Timeout,
    #[error(transparent)]
    Scrape(#[from] scraper::Error),
    #[error("computing the response")]
    Compute(#[from] JoinError),
    #[error("encoding the response")]
    Write(#[from] serde_json::Error),
}

impl RequestHandler for Api {
    type Body = Body;

    async fn respond(&self, _client: IpAddr, req: Request<Incoming>) -> Response<Body> {
        self.handle(&req).await.unwrap_or_else(|error| error.response())
    }
}

impl Api {
    async fn handle(&self, req: &Request<Incoming>) -> Result<Response<Body>, QueryError> {
        if self.allowed_clients == AllowedClients::ThisMachine {
            let host = req.headers().get(HOST).map_or(&b""[..], HeaderValue::as_bytes);
            let host = String::from_utf8_lossy(host);
            if !is_loopback_host(&host) {
                return Err(QueryError::Host(host.into_owned()));
            }
        }
        if req.method() != Method::GET {
            return Err(QueryError::Method(req.method().clone()));
        }
        match ApiRequest::parse(req.uri())? {
            ApiRequest::Resources => json_response(StatusCode::OK, &resources()),
            ApiRequest::Metrics(query) => self.metrics(query).await,
            ApiRequest::Tap(tap) => {
                let user = req.headers().get("x-remote-user").and_then(|user| user.to_str().ok());
                let source = user.unwrap_or_default().to_owned();
                info_limited!(self.log_limiter, source, "a tap starts", user, ?tap);
                self.tap(tap)
            }
        }
    }

    async fn metrics(&self, query: MetricsQuery) -> Result<Response<Body>, QueryError> {
        let _permit = self.query_slots.try_acquire().map_err(|_| QueryError::TooManyQueries)?;
        let responding = async {
            let observed = self.scraper.observe(query.namespace.as_deref(), query.window).await?;
            // Runs on a blocking thread, because this thread also serves the other queries and taps.
            let computed = spawn_blocking(move || {
                let (ok, selection) = (StatusCode::OK, &query.selection);
                match query.resource {
                    RequestedResource::Workloads => json_response(ok, &rows::workloads(&observed, selection)),
                    RequestedResource::Edges => json_response(ok, &rows::edges(&observed, selection)),
                    RequestedResource::Routes => json_response(ok, &rows::routes(&observed, selection)),
                }
            });
            computed.await?
        };
        timeout(QUERY_TIMEOUT, responding)
            .await
            .map_err(|_| QueryError::Timeout)?
    }

    /// Starts a tap. It ends when the client closes the response, and at the drain.
    fn tap(&self, tap: TapRequest) -> Result<Response<Body>, QueryError> {
        let permit = self
            .tap_slots
            .clone()
            .try_acquire_owned()
            .map_err(|_| QueryError::TooManyTaps)?;
        let (lines, receiver) = mpsc::channel(MAX_BUFFERED_LINES);
        let (tapper, drain) = (self.tapper.clone(), self.drain.clone());
        // The response body owns the task: it ends when the body drops the receiver, and at the drain.
        tokio::spawn(async move {
            tapper.run(tap, lines, drain).await;
            drop(permit);
        });
        let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
            let line = receiver.recv().await?;
            let mut text = serde_json::to_vec(&line).unwrap_or_default();
            text.push(b'\n');
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(text))), receiver))
        });
        let mut rsp = Response::new(StreamBody::new(frames.boxed()).boxed_unsync());
        rsp.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(rsp)
    }
}

impl QueryError {
    /// Returns the error as a Kubernetes `Status`, whose message kubectl and other clients print.
    fn response(&self) -> Response<Body> {
        let (status, reason) = match self {
            Self::Request(request::Error::NotFound) => (StatusCode::NOT_FOUND, "NotFound"),
            Self::Request(request::Error::BadRequest(_)) => (StatusCode::BAD_REQUEST, "BadRequest"),
            Self::Host(_) => (StatusCode::FORBIDDEN, "Forbidden"),
            Self::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
            Self::TooManyTaps | Self::TooManyQueries => (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
            Self::Scrape(scraper::Error::TooMany { .. }) => (StatusCode::BAD_REQUEST, "BadRequest"),
            Self::Timeout => (StatusCode::GATEWAY_TIMEOUT, "Timeout"),
            Self::Scrape(scraper::Error::Failed(_)) | Self::Compute(_) | Self::Write(_) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
            }
        };
        let value = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.to_string(), "reason": reason, "code": status.as_u16(),
        });
        json_response(status, &value).unwrap_or_default()
    }
}

fn json_response(status: StatusCode, value: &impl Serialize) -> Result<Response<Body>, QueryError> {
    let mut rsp = Response::new(Full::from(serde_json::to_vec(value)?).boxed_unsync());
    *rsp.status_mut() = status;
    rsp.headers_mut().insert(CONTENT_TYPE, JSON);
    Ok(rsp)
}

/// Returns whether the host names this machine. Other names are rejected, because DNS rebinding can make any name resolve to
/// this machine.
fn is_loopback_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host();
    let ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

/// Returns the APIResourceList, which the API server fetches as a health check and clients for discovery.
fn resources() -> Value {
    let resource = |name: &str, kind: &str, verb: &str| json!({ "name": name, "singularName": "", "namespaced": true, "kind": kind, "verbs": [verb] });
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{GROUP}/{VERSION}"),
        "resources": [
            resource(WORKLOADS, "Workload", "list"),
            resource(EDGES, "Edge", "list"),
            resource(ROUTES, "Route", "list"),
            resource(TAPS, "Tap", "watch"),
        ],
    })
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(super) const MAX_CONCURRENT_TAPS: usize = 64;
pub(super) const MAX_CONCURRENT_QUERIES: usize = 16;
/// Less than the API server's request timeout of 60 seconds.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum buffered tap lines per client. Sidecars drop events beyond it.
const MAX_BUFFERED_LINES: usize = 400;

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::task::JoinSet;
    use tulle_core::drain;

    use super::*;
    use crate::telemetry::rows::{GroupKind, Selection};
    use crate::telemetry::scraper::tests::cluster;
    use crate::tls::mesh_credentials::{ClientCertificates, MeshCredentials};

    #[tokio::test]
    async fn queries_beyond_the_concurrency_limit_are_refused() {
        // Accepts connections and never responds.
        let unresponsive = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let creds = Arc::new(MeshCredentials::new(
            "telemetry".to_owned(),
            ClientCertificates::default(),
        ));
        let port = unresponsive.local_addr().unwrap().port();
        let scraper = Arc::new(SidecarScraper::new(cluster(1, port), creds.clone()));
        let (_signal, drain) = drain::channel();
        let api = Arc::new(Api {
            scraper: scraper.clone(),
            tapper: Tapper { scraper, creds },
            drain,
            tap_slots: Arc::new(Semaphore::new(1)),
            query_slots: Arc::new(Semaphore::new(MAX_CONCURRENT_QUERIES)),
            allowed_clients: AllowedClients::ThisMachine,
            log_limiter: LogLimiter::default(),
        });
        let query = || MetricsQuery {
            resource: RequestedResource::Workloads,
            namespace: None,
            selection: Selection {
                by: GroupKind::parse("workload").unwrap(),
                name: None,
            },
            window: Duration::from_secs(10),
        };
        let mut waiting = JoinSet::new();
        for _ in 0..MAX_CONCURRENT_QUERIES {
            let (api, query) = (api.clone(), query());
            waiting.spawn(async move { api.metrics(query).await.map(drop) });
        }
        unresponsive.accept().await.unwrap();
        while api.query_slots.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = api.metrics(query()).await.err().unwrap();
        assert_eq!(refused.response().status(), StatusCode::TOO_MANY_REQUESTS, "{refused}");
        assert_eq!(QueryError::Timeout.response().status(), StatusCode::GATEWAY_TIMEOUT);
    }

    #[test]
    fn other_host_names_are_not_loopback() {
        for host in [
            "127.0.0.1:8089",
            "127.0.0.1",
            "localhost:8089",
            "LocalHost",
            "[::1]:8089",
            "[::1]",
        ] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in [
            "",
            "evil.test:8089",
            "localhost.evil.test",
            "127.0.0.1.evil.test",
            "10.0.0.1:8089",
            "a b",
        ] {
            assert!(!is_loopback_host(host), "{host}");
        }
    }
}
