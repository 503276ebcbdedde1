//! The admin server: metrics and probes of the core, and what operators may ask of this process.
//!
//! Proxies of its clients reach it by mTLS, as they reach the application, and whoever wants to know this proxy's
//! certificate learns it from a handshake here. TLS proves who we are, and who the client is: requests other than probes are
//! judged by the inbound policy of this port. Routes for this machine alone are closed to others, whatever the policy says.

mod pages;
mod probes;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Response, StatusCode};
use http_body_util::Full;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::info;
use tulle_core::admin::access::{Guard, Tls};
use tulle_core::admin::{Admin, AdminRequest, Version, text};
use tulle_core::metrics::Registry;
use tulle_core::ready::Readiness;
use tulle_core::telemetry::LogHandle;

pub(crate) use pages::Page;
pub(crate) use probes::{Probe, ProbeRefused};

use crate::net::detect::{self, Look, Verdict};
use crate::net::io::{Io, Tcp};
use crate::tls::creds::{Alpn, Credentials};
use crate::tls::server as tls_server;

#[derive(Clone, Debug)]
pub struct Config {
    /// `127.0.0.1:4191`.
    pub listen: SocketAddr,
    pub shutdown_endpoint: ShutdownEndpoint,
    /// Probes of the application that are made here; none.
    pub(crate) probes: Vec<Probe>,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ShutdownEndpoint {
    Disabled,
    Enabled,
}

/// What the routes show and change.
pub(crate) struct Subjects {
    pub registry: Registry,
    pub readiness: Readiness,
    /// None when the process does not log.
    pub log: Option<LogHandle>,
    /// The variables to show; they are readable from the whole network, so secrets do not belong here.
    pub env: BTreeMap<String, String>,
    /// Notified when an operator asks for the end.
    pub shutdown: Arc<Notify>,
    pub creds: Credentials,
    /// Judges requests by the policy of the port.
    pub guard: Guard,
    /// What is below `/debug`.
    pub pages: Vec<Page>,
}

/// A server of all routes, ready to serve.
pub(crate) fn server(config: &Config, subjects: Subjects) -> Admin {
    let Subjects {
        registry,
        readiness,
        log,
        env,
        shutdown,
        creds,
        guard,
        pages,
    } = subjects;
    let shutdown_endpoint = config.shutdown_endpoint;
    let admin = Admin::new(registry.clone(), readiness);
    let admin = probes::routes(admin, config.probes.clone(), &registry);
    pages::routes(admin, pages)
        .route("/proxy-log-level", move |req| {
            std::future::ready(log_level(&req, log.as_ref()))
        })
        .route("/env.json", move |req| std::future::ready(env_json(&req, &env)))
        .route("/shutdown", move |req| {
            std::future::ready(shut_down(&req, shutdown_endpoint, &shutdown))
        })
        .tls(move |stream| terminate(stream, creds.clone()))
        .guarded_by(guard)
}

/// Ends TLS; the server bounds the time this takes.
async fn terminate(stream: TcpStream, creds: Credentials) -> io::Result<(Io, Version, Tls)> {
    let (tls, facts) = tls_server::accept(Tcp::new(stream), &creds, Alpn::Unset)
        .await
        .map_err(io::Error::other)?;
    let (mut io, mut seen) = (Io::tls_server(tls), BytesMut::new());
    let version = match detect::look(&mut io, &mut seen, LOOK_LIMIT).await? {
        Look::Seen(Verdict::Http2) => Version::Http2,
        Look::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        Look::Seen(_) | Look::TimedOut => Version::Http1,
    };
    let tls = Tls::Terminated {
        client_id: facts.client_id,
    };
    Ok((io.unread(seen.freeze()), version, tls))
}

type Answer = Response<Full<Bytes>>;

fn log_level(req: &AdminRequest, log: Option<&LogHandle>) -> Answer {
    let Some(log) = log else {
        return text(StatusCode::NOT_FOUND, "logging is disabled\n");
    };
    if !req.is_loopback() {
        return loopback_only();
    }
    match req.method {
        Method::GET => text(StatusCode::OK, log.current()),
        Method::PUT => match std::str::from_utf8(&req.body).map(|filter| log.set(filter.trim())) {
            Ok(Ok(())) => text(StatusCode::NO_CONTENT, ""),
            Ok(Err(error)) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            Err(_) => text(StatusCode::BAD_REQUEST, "a log filter is UTF-8 text\n"),
        },
        _ => only("GET, PUT"),
    }
}

fn env_json(req: &AdminRequest, env: &BTreeMap<String, String>) -> Answer {
    if req.method != Method::GET {
        return only("GET");
    }
    if !accepts_json(req) {
        return text(
            StatusCode::NOT_ACCEPTABLE,
            "this is application/json, which the request does not accept\n",
        );
    }
    let names = req
        .query
        .as_deref()
        .unwrap_or("")
        .split('&')
        .filter(|name| !name.is_empty());
    let names: Vec<&str> = names.collect();
    if let Some(pair) = names.iter().find(|name| name.contains('=')) {
        return text(
            StatusCode::BAD_REQUEST,
            format!("{pair:?} is not a name; expected ?NAME&NAME\n"),
        );
    }
    let json = match names.is_empty() {
        true => serde_json::to_vec(env),
        // Names that are not set show as null: asked for, and not there.
        false => serde_json::to_vec(
            &names
                .iter()
                .map(|name| (*name, env.get(*name)))
                .collect::<BTreeMap<_, _>>(),
        ),
    };
    let mut rsp = text(StatusCode::OK, json.expect("maps of strings are JSON"));
    rsp.headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    rsp
}

fn shut_down(req: &AdminRequest, endpoint: ShutdownEndpoint, shutdown: &Notify) -> Answer {
    if endpoint == ShutdownEndpoint::Disabled {
        return text(StatusCode::NOT_FOUND, "the shutdown endpoint is not enabled\n");
    }
    if req.method != Method::POST {
        return only("POST");
    }
    if !req.is_loopback() {
        return loopback_only();
    }
    info!(client = %req.client, "shutdown was asked for");
    shutdown.notify_one();
    text(StatusCode::OK, "shutdown\n")
}

/// Without an Accept header everything is accepted.
fn accepts_json(req: &AdminRequest) -> bool {
    let mut accepted = req
        .headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .peekable();
    if accepted.peek().is_none() {
        return true;
    }
    let kinds = accepted.flat_map(|value| value.split(','));
    kinds
        .map(|kind| kind.split(';').next().unwrap_or("").trim())
        .any(|kind| JSON_KINDS.contains(&kind))
}

/// Whether JSON is asked for by its name.
fn wants_json(req: &AdminRequest) -> bool {
    let accepted = req.headers.get_all(ACCEPT).iter();
    accepted
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("application/json"))
}

fn only(methods: &'static str) -> Answer {
    let mut rsp = text(StatusCode::METHOD_NOT_ALLOWED, format!("only {methods}\n"));
    rsp.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    rsp
}

fn loopback_only() -> Answer {
    text(StatusCode::FORBIDDEN, "only from this machine\n")
}

/// How long a client may think about its first request after the handshake, as in the clear.
const LOOK_LIMIT: Duration = Duration::from_secs(60);
const JSON_KINDS: &[&str] = &["application/json", "application/*", "*/*"];

#[cfg(test)]
mod tests;
