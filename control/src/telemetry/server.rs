//! Answers questions over HTTP: rows as JSON, and taps as lines of JSON that go on.

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
use tracing::info;
use tulle_core::drain::Watch;
use tulle_core::names::telemetry::{EDGES, GROUP, ROUTES, TAPS, VERSION, WORKLOADS};

use super::recorder::{self, Recorder};
use super::request::{self, Of, Question, Rows};
use super::tap::{Tapper, Wish};
use super::view;
use crate::webhook::https::Respond;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The API.
pub struct Api {
    pub(super) recorder: Arc<Recorder>,
    pub(super) tapper: Tapper,
    pub(super) drain: Watch,
    /// Taps that may run at a time.
    pub(super) taps: Arc<Semaphore>,
    /// Questions that may be answered at a time.
    pub(super) questions: Arc<Semaphore>,
    pub(super) askers: Askers,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Askers {
    /// The API server, which has decided whether they may.
    ApiServer,
    /// Programs of this machine; not the pages that its browsers show, whose requests have the name of a site.
    ThisMachine,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Request(#[from] request::Error),
    #[error("host {0:?} is not this machine; expected localhost or a loopback address such as 127.0.0.1:8089")]
    Host(String),
    #[error("{0} is no way to ask; expected GET")]
    Method(Method),
    #[error("{MOST_TAPS} taps run already; end one of them")]
    TooMany,
    #[error("{MOST_QUESTIONS} questions are being answered already; ask again later")]
    Busy,
    #[error("there is no answer within {QUESTION_LIMIT:?}; ask for one namespace")]
    Slow,
    #[error(transparent)]
    Look(#[from] recorder::Error),
    #[error("computing the answer")]
    Compute(#[from] JoinError),
    #[error("writing the answer")]
    Write(#[from] serde_json::Error),
}

impl Respond for Api {
    type Body = Body;

    async fn respond(&self, req: Request<Incoming>) -> Response<Body> {
        self.answer(&req).await.unwrap_or_else(|refusal| refusal.response())
    }
}

impl Api {
    async fn answer(&self, req: &Request<Incoming>) -> Result<Response<Body>, Refusal> {
        if self.askers == Askers::ThisMachine {
            let host = req.headers().get(HOST).map_or(&b""[..], HeaderValue::as_bytes);
            let host = String::from_utf8_lossy(host);
            if !is_this_machine(&host) {
                return Err(Refusal::Host(host.into_owned()));
            }
        }
        if req.method() != Method::GET {
            return Err(Refusal::Method(req.method().clone()));
        }
        match Question::parse(req.uri())? {
            Question::Resources => whole(StatusCode::OK, &resources()),
            Question::Rows(rows) => self.rows(rows).await,
            Question::Tap(wish) => {
                let user = req.headers().get("x-remote-user").and_then(|user| user.to_str().ok());
                info!(user, ?wish, "a tap begins");
                self.tap(wish)
            }
        }
    }

    async fn rows(&self, rows: Rows) -> Result<Response<Body>, Refusal> {
        let _place = self.questions.try_acquire().map_err(|_| Refusal::Busy)?;
        let answering = async {
            let observed = self.recorder.observe(rows.namespace.as_deref(), rows.window).await?;
            // Proxies are served on this thread.
            let computed = spawn_blocking(move || {
                let (ok, selection) = (StatusCode::OK, &rows.selection);
                match rows.of {
                    Of::Workloads => whole(ok, &view::workloads(&observed, selection)),
                    Of::Edges => whole(ok, &view::edges(&observed, selection)),
                    Of::Routes => whole(ok, &view::routes(&observed, selection)),
                }
            });
            computed.await?
        };
        timeout(QUESTION_LIMIT, answering).await.map_err(|_| Refusal::Slow)?
    }

    /// Begins a tap, which ends when nobody reads it.
    fn tap(&self, wish: Wish) -> Result<Response<Body>, Refusal> {
        let permit = self.taps.clone().try_acquire_owned().map_err(|_| Refusal::TooMany)?;
        let (lines, shown) = mpsc::channel(MOST_WAITING);
        let (tapper, drain) = (self.tapper.clone(), self.drain.clone());
        // Owned by the body: it ends once the receiver has gone, and at the drain.
        tokio::spawn(async move {
            tapper.run(wish, lines, drain).await;
            drop(permit);
        });
        let frames = futures_util::stream::unfold(shown, |mut shown| async move {
            let line = shown.recv().await?;
            let mut text = serde_json::to_vec(&line).unwrap_or_default();
            text.push(b'\n');
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(text))), shown))
        });
        let mut rsp = Response::new(StreamBody::new(frames.boxed()).boxed_unsync());
        rsp.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(rsp)
    }
}

impl Refusal {
    /// As the API server answers, whose clients show the message.
    fn response(&self) -> Response<Body> {
        let (status, reason) = match self {
            Self::Request(request::Error::NotFound) => (StatusCode::NOT_FOUND, "NotFound"),
            Self::Request(request::Error::Bad(_)) => (StatusCode::BAD_REQUEST, "BadRequest"),
            Self::Host(_) => (StatusCode::FORBIDDEN, "Forbidden"),
            Self::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
            Self::TooMany | Self::Busy => (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
            Self::Look(recorder::Error::TooMany { .. }) => (StatusCode::BAD_REQUEST, "BadRequest"),
            Self::Slow => (StatusCode::GATEWAY_TIMEOUT, "Timeout"),
            Self::Look(recorder::Error::Failed(_)) | Self::Compute(_) | Self::Write(_) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
            }
        };
        let value = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.to_string(), "reason": reason, "code": status.as_u16(),
        });
        whole(status, &value).unwrap_or_default()
    }
}

fn whole(status: StatusCode, value: &impl Serialize) -> Result<Response<Body>, Refusal> {
    let mut rsp = Response::new(Full::from(serde_json::to_vec(value)?).boxed_unsync());
    *rsp.status_mut() = status;
    rsp.headers_mut().insert(CONTENT_TYPE, JSON);
    Ok(rsp)
}

/// A name of somebody else's that leads here (DNS rebinding) is none of ours.
fn is_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let name = authority.host();
    let ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

/// What the API server asks for to see whether we are there, and clients to learn what there is.
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
pub(super) const MOST_TAPS: usize = 64;
pub(super) const MOST_QUESTIONS: usize = 16;
/// Less than the 60 seconds that the API server waits.
const QUESTION_LIMIT: Duration = Duration::from_secs(30);
/// Lines that wait for a reader; sidecars leave out what does not fit.
const MOST_WAITING: usize = 400;

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::task::JoinSet;
    use tulle_core::drain;

    use super::*;
    use crate::telemetry::recorder::tests::cluster;
    use crate::telemetry::view::{By, Selection};
    use crate::tls::creds::{ClientCertificates, ServerCreds};

    #[tokio::test]
    async fn questions_beyond_those_that_are_being_answered_are_refused() {
        // It accepts, and says nothing.
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let creds = Arc::new(ServerCreds::new("telemetry".to_owned(), ClientCertificates::default()));
        let port = silent.local_addr().unwrap().port();
        let recorder = Arc::new(Recorder::new(cluster(1, port), creds.clone()));
        let (_signal, drain) = drain::channel();
        let api = Arc::new(Api {
            recorder: recorder.clone(),
            tapper: Tapper { recorder, creds },
            drain,
            taps: Arc::new(Semaphore::new(1)),
            questions: Arc::new(Semaphore::new(MOST_QUESTIONS)),
            askers: Askers::ThisMachine,
        });
        let question = || Rows {
            of: Of::Workloads,
            namespace: None,
            selection: Selection {
                by: By::parse("workload").unwrap(),
                name: None,
            },
            window: Duration::from_secs(10),
        };
        let mut waiting = JoinSet::new();
        for _ in 0..MOST_QUESTIONS {
            let (api, question) = (api.clone(), question());
            waiting.spawn(async move { api.rows(question).await.map(drop) });
        }
        silent.accept().await.unwrap();
        while api.questions.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = api.rows(question()).await.err().unwrap();
        assert_eq!(refused.response().status(), StatusCode::TOO_MANY_REQUESTS, "{refused}");
        assert_eq!(Refusal::Slow.response().status(), StatusCode::GATEWAY_TIMEOUT);
    }

    #[test]
    fn names_of_others_are_not_this_machine() {
        for host in [
            "127.0.0.1:8089",
            "127.0.0.1",
            "localhost:8089",
            "LocalHost",
            "[::1]:8089",
            "[::1]",
        ] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in [
            "",
            "evil.test:8089",
            "localhost.evil.test",
            "127.0.0.1.evil.test",
            "10.0.0.1:8089",
            "a b",
        ] {
            assert!(!is_this_machine(host), "{host}");
        }
    }
}
