//! The admin server: metrics, probes, and the routes with which operators inspect and control this process.
//!
//! Meshed clients reach it by mTLS, as they reach the application, and the handshake shows the proxy's certificate. Requests
//! other than probes are authorized by the inbound policy of this port. Loopback-only routes are closed to other hosts,
//! whatever the policy says.

mod debug_pages;
mod probes;
mod response;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::info;
use tulle_core::admin::access::{AuthorizeFn, Tls};
use tulle_core::admin::{Admin, AdminRequest, Version, text};
use tulle_core::logging::LogHandle;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;

pub(crate) use debug_pages::DebugPage;
pub(crate) use probes::{InvalidProbe, Probe};
use response::{AdminResponse, forbidden, method_not_allowed};

use crate::net::detect::{self, DetectedProtocol, Detection};
use crate::net::io::{Io, Tcp};
use crate::tls::credentials::{Alpn, Credentials};
use crate::tls::server as tls_server;

#[derive(Clone, Debug)]
pub struct Config {
    /// Default `127.0.0.1:4191`.
    pub listen: SocketAddr,
    pub shutdown_endpoint: ShutdownEndpoint,
    /// Probes of the application that the proxy makes; default none.
    pub(crate) probes: Vec<Probe>,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ShutdownEndpoint {
    Disabled,
    Enabled,
}

/// The state that the routes show and change.
pub(crate) struct AdminParams {
    pub registry: Registry,
    pub readiness: Readiness,
    /// `None` if the process does not log.
    pub log: Option<LogHandle>,
    /// The variables to show. They must not contain secrets: they are not restricted to loopback, and the policy of the port
    /// may permit everyone to read them.
    pub env: BTreeMap<String, String>,
    /// Notified when an operator requests shutdown.
    pub shutdown: Arc<Notify>,
    pub creds: Credentials,
    /// Authorizes requests by the policy of the port.
    pub authorize: AuthorizeFn,
    /// The pages below `/debug`.
    pub pages: Vec<DebugPage>,
}

/// A server with all routes, ready to serve.
pub(crate) fn server(config: &Config, params: AdminParams) -> Admin {
    let AdminParams {
        registry,
        readiness,
        log,
        env,
        shutdown,
        creds,
        authorize,
        pages,
    } = params;
    let shutdown_endpoint = config.shutdown_endpoint;
    let admin = Admin::new(registry.clone(), readiness);
    let admin = probes::routes(admin, config.probes.clone(), &registry);
    debug_pages::routes(admin, pages)
        .route("/proxy-log-level", move |req| {
            std::future::ready(log_level(&req, log.as_ref()))
        })
        .route("/env.json", move |req| std::future::ready(env_json(&req, &env)))
        .route("/shutdown", move |req| {
            std::future::ready(shut_down(&req, shutdown_endpoint, &shutdown))
        })
        .tls(move |stream| accept_tls(stream, creds.clone()))
        .authorize_with(authorize)
}

/// Accepts TLS; the admin server limits the time.
async fn accept_tls(stream: TcpStream, creds: Credentials) -> io::Result<(Io, Version, Tls)> {
    let (tls, client_handshake) = tls_server::accept_or_reset(Tcp::new(stream), &creds, Alpn::Unset)
        .await
        .map_err(io::Error::other)?;
    let (mut io, mut seen) = (Io::tls_server(tls), BytesMut::new());
    let version = match detect::detect(&mut io, &mut seen, FIRST_REQUEST_TIMEOUT).await? {
        Detection::Detected(DetectedProtocol::Http2) => Version::Http2,
        Detection::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        Detection::Detected(_) | Detection::TimedOut => Version::Http1,
    };
    let tls = Tls::Terminated {
        client_id: client_handshake.client_id,
    };
    Ok((io.prepend(seen.freeze()), version, tls))
}

fn log_level(req: &AdminRequest, log: Option<&LogHandle>) -> AdminResponse {
    let Some(log) = log else {
        return text(StatusCode::NOT_FOUND, "logging is disabled\n");
    };
    if !req.is_loopback() {
        return forbidden();
    }
    match req.method {
        Method::GET => text(StatusCode::OK, log.current()),
        Method::PUT => match std::str::from_utf8(&req.body).map(|filter| log.set(filter.trim())) {
            Ok(Ok(())) => text(StatusCode::NO_CONTENT, ""),
            Ok(Err(error)) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            Err(_) => text(StatusCode::BAD_REQUEST, "a log filter must be UTF-8 text\n"),
        },
        _ => method_not_allowed("GET, PUT"),
    }
}

fn env_json(req: &AdminRequest, env: &BTreeMap<String, String>) -> AdminResponse {
    if req.method != Method::GET {
        return method_not_allowed("GET");
    }
    if !accepts_json(req) {
        return text(
            StatusCode::NOT_ACCEPTABLE,
            "the response is application/json, which the request does not accept\n",
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
            format!("{pair:?} is not a variable name, expected ?NAME&NAME\n"),
        );
    }
    let json = match names.is_empty() {
        true => serde_json::to_vec(env),
        // Requested names that are not set are shown as null.
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

fn shut_down(req: &AdminRequest, endpoint: ShutdownEndpoint, shutdown: &Notify) -> AdminResponse {
    if endpoint == ShutdownEndpoint::Disabled {
        return text(StatusCode::NOT_FOUND, "the shutdown endpoint is not enabled\n");
    }
    if req.method != Method::POST {
        return method_not_allowed("POST");
    }
    if !req.is_loopback() {
        return forbidden();
    }
    info!(client = %req.client, "shutdown requested");
    shutdown.notify_one();
    text(StatusCode::OK, "shutdown\n")
}

/// Without an Accept header every type is accepted.
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
        .any(|kind| JSON_MEDIA_TYPES.contains(&kind))
}

/// Never reached: the admin server's own 60 s have begun earlier, with the handshake.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const JSON_MEDIA_TYPES: &[&str] = &["application/json", "application/*", "*/*"];

#[cfg(test)]
mod tests;
