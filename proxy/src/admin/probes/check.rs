//! One declared probe, and how it is made.

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::time::Duration;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::net::TcpStream;
use tulle_core::probes::{DeclaredProbe, Handler, Header, Kind};

use super::grpc;
use super::https::{self, Get};

/// A declared probe whose parts can be used.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    pub(super) container: String,
    pub(super) kind: Kind,
    /// Where it is asked for.
    pub(super) path: String,
    pub(super) port: u16,
    pub(super) limit: Duration,
    check: Check,
}

#[derive(Clone, Debug)]
enum Check {
    Connect,
    Grpc { service: String },
    Https(Get),
}

/// Why a declared probe cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ProbeRefused {
    #[error("the path that {path} asks for is longer than 65534 bytes")]
    Path { path: String },
    #[error("{name:?} of {path} is not the name of a header")]
    HeaderName { path: String, name: String },
    #[error("the value of header {name} of {path} has characters that no header may have")]
    HeaderValue { path: String, name: String },
    #[error("the header Host of {path} is no host")]
    Host { path: String },
}

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum ProbeError {
    #[error("probing {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("dialling {addr}")]
    Dial {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("TLS handshake with {addr}")]
    Tls {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("HTTP with {addr}")]
    Http {
        addr: SocketAddr,
        #[source]
        source: hyper::Error,
    },
    #[error("{addr} redirected more than {limit} times")]
    Redirects { addr: SocketAddr, limit: usize },
    #[error("{addr} redirected to a target that cannot be used: {location:?}")]
    Location { addr: SocketAddr, location: String },
    #[error("the health check of service {service:?} failed with {code:?}: {message}")]
    HealthCheck {
        service: String,
        code: tonic::Code,
        message: String,
    },
    #[error("the health check of service {service:?} says {status}")]
    NotServing { service: String, status: String },
}

impl Probe {
    /// Makes it once; the caller bounds the time.
    ///
    /// # Errors
    /// Why it failed, where the application did not answer with a status.
    pub(super) async fn check(&self, addr: SocketAddr, user_agent: &HeaderValue) -> Result<StatusCode, ProbeError> {
        match &self.check {
            Check::Connect => dial(addr).await.map(|_| StatusCode::OK),
            Check::Grpc { service } => grpc::check(addr, service, self.limit, user_agent)
                .await
                .map(|()| StatusCode::OK),
            Check::Https(get) => https::get(get, addr, user_agent).await,
        }
    }
}

/// Connects to a port of this machine.
pub(super) async fn dial(addr: SocketAddr) -> Result<TcpStream, ProbeError> {
    let stream = TcpStream::connect(addr).await;
    stream.map_err(|source| ProbeError::Dial { addr, source })
}

impl TryFrom<DeclaredProbe> for Probe {
    type Error = ProbeRefused;

    fn try_from(declared: DeclaredProbe) -> Result<Self, ProbeRefused> {
        let path = declared.path();
        let check = match declared.handler {
            Handler::TcpSocket { .. } => Check::Connect,
            Handler::Grpc { service, .. } => Check::Grpc {
                service: service.unwrap_or_default(),
            },
            Handler::HttpGet {
                path: target,
                http_headers,
                ..
            } => {
                let (headers, host) = headers(&path, http_headers)?;
                Check::Https(Get {
                    target: https::target(target.as_deref().unwrap_or_default())
                        .map_err(|_| ProbeRefused::Path { path: path.clone() })?,
                    headers,
                    host,
                })
            }
        };
        Ok(Self {
            container: declared.container,
            kind: declared.probe,
            path,
            port: NonZeroU16::get(declared.port),
            limit: Duration::from_secs(declared.timeout_seconds.get().into()),
            check,
        })
    }
}

/// Headers as the kubelet sends them, and the host that one of them names.
fn headers(path: &str, declared: Vec<Header>) -> Result<(HeaderMap, Option<Authority>), ProbeRefused> {
    let (mut headers, mut host) = (HeaderMap::new(), None);
    for Header { name, value } in declared {
        let refused = || ProbeRefused::HeaderValue {
            path: path.to_owned(),
            name: name.clone(),
        };
        let parsed: HeaderName = name.parse().map_err(|_| ProbeRefused::HeaderName {
            path: path.to_owned(),
            name: name.clone(),
        })?;
        let mut value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| refused())?;
        match parsed {
            http::header::HOST if host.is_none() => {
                let no_host = |_| ProbeRefused::Host { path: path.to_owned() };
                host = Some(Authority::try_from(value.as_bytes()).map_err(no_host)?);
            }
            // Go writes these itself.
            http::header::HOST
            | http::header::CONTENT_LENGTH
            | http::header::TRANSFER_ENCODING
            | http::header::TRAILER => {}
            name => {
                value.set_sensitive(true);
                headers.append(name, value);
            }
        }
    }
    Ok((headers, host))
}
