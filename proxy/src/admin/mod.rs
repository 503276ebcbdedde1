//! The admin server: metrics, probes, and routes for operators who inspect and control this process.
//!
//! Meshed clients connect with mutual TLS, as to the application, and the server presents the proxy's certificate. The
//! inbound policy of this port authorizes requests other than probes. Loopback-only routes are closed to other hosts, even if
//! the policy permits them.

mod certified_stream;
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

use certified_stream::CertifiedStream;
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
    /// Probes of the application that the proxy runs; default none.
    pub(crate) probes: Vec<Probe>,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ShutdownEndpoint {
    Disabled,
    Enabled,
}

/// The values that the routes show and change.
pub(crate) struct AdminParams {
    pub registry: Registry,
    pub readiness: Readiness,
    /// `None` if the process does not log.
    pub log: Option<LogHandle>,
    /// The environment variables of `/env.json`. They must not contain secrets: this page is not restricted to loopback, and
    /// the policy of the port may permit all clients to read it.
    pub env: BTreeMap<String, String>,
    /// Notified when an operator requests shutdown.
    pub shutdown: Arc<Notify>,
    pub creds: Credentials,
    /// Authorizes requests by the policy of the port.
    pub authorize: AuthorizeFn,
    /// The pages below `/debug`.
    pub pages: Vec<DebugPage>,
}

/// Creates the server with all its routes.
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
    let admin = probes::add_routes(admin, config.probes.clone(), &registry);
    debug_pages::add_routes(admin, pages)
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

/// Terminates TLS and detects the HTTP version. The timeout is that of the admin server.
async fn accept_tls(stream: TcpStream, creds: Credentials) -> io::Result<(CertifiedStream, Version, Tls)> {
    let (tls, client_handshake) = tls_server::accept_or_reset(Tcp::new(stream), &creds, Alpn::Unset)
        .await
        .map_err(io::Error::other)?;
    let (mut io, mut first_bytes) = (Io::tls_server(tls), BytesMut::new());
    let version = match detect::detect(&mut io, &mut first_bytes, FIRST_REQUEST_TIMEOUT).await? {
        Detection::Detected(DetectedProtocol::Http2) => Version::Http2,
        Detection::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        Detection::Detected(_) | Detection::TimedOut => Version::Http1,
    };
    let tls = Tls::Terminated {
        client_id: client_handshake.client_id,
    };
    let io = io.prepend(first_bytes.freeze());
    Ok((CertifiedStream::new(io, client_handshake.chain), version, tls))
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
        // The value of a requested variable that is not set is null.
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

/// Whether the client accepts JSON. Without an `Accept` header it accepts all types.
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
    let media_types = accepted.flat_map(|value| value.split(','));
    media_types
        .map(|media_type| media_type.split(';').next().unwrap_or("").trim())
        .any(|media_type| JSON_MEDIA_TYPES.contains(&media_type))
}

/// The limit of [`detect::detect`]. It is never reached: the admin server has a timeout of 60 s too, which starts earlier, with
/// the TLS handshake, and ends the connection.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const JSON_MEDIA_TYPES: &[&str] = &["application/json", "application/*", "*/*"];

#[cfg(test)]
mod tests;
