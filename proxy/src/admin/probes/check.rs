//! A declared probe and its execution.

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::time::Duration;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tulle_core::probes::{Handler, Header, Kind, OriginalProbe};

use super::connection::{ProbeError, dial};
use super::grpc;
use super::https::{self, HttpGetAction};

/// A declared probe whose fields are valid.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    pub(super) container: String,
    pub(super) kind: Kind,
    pub(super) path: String,
    pub(super) port: u16,
    pub(super) timeout: Duration,
    action: ProbeAction,
}

#[derive(Clone, Debug)]
enum ProbeAction {
    Connect,
    Grpc { service: String },
    Https(HttpGetAction),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InvalidProbe {
    #[error("the path of probe {path} is longer than 65534 bytes")]
    Path { path: String },
    #[error("{name:?} of probe {path} is not a valid header name")]
    HeaderName { path: String, name: String },
    #[error("the value of header {name} of probe {path} has characters that are not permitted in headers")]
    HeaderValue { path: String, name: String },
    #[error("the Host header of probe {path} is not a valid host")]
    Host { path: String },
}

impl Probe {
    /// Runs the probe once; the caller sets the timeout.
    ///
    /// # Errors
    /// The probe fails before the application has returned a status.
    pub(super) async fn check(&self, addr: SocketAddr, user_agent: &HeaderValue) -> Result<StatusCode, ProbeError> {
        match &self.action {
            ProbeAction::Connect => dial(addr).await.map(|_| StatusCode::OK),
            ProbeAction::Grpc { service } => grpc::check(addr, service, self.timeout, user_agent)
                .await
                .map(|()| StatusCode::OK),
            ProbeAction::Https(action) => https::send(action, addr, user_agent).await,
        }
    }
}

impl TryFrom<OriginalProbe> for Probe {
    type Error = InvalidProbe;

    fn try_from(declared: OriginalProbe) -> Result<Self, InvalidProbe> {
        let path = declared.path();
        let action = match declared.handler {
            Handler::TcpSocket { .. } => ProbeAction::Connect,
            Handler::Grpc { service, .. } => ProbeAction::Grpc {
                service: service.unwrap_or_default(),
            },
            Handler::HttpGet {
                path: target,
                http_headers,
                ..
            } => {
                let (headers, host) = headers(&path, http_headers)?;
                ProbeAction::Https(HttpGetAction {
                    path_and_query: https::path_to_target(target.as_deref().unwrap_or_default())
                        .map_err(|_| InvalidProbe::Path { path: path.clone() })?,
                    headers,
                    host,
                })
            }
        };
        Ok(Self {
            container: declared.container,
            kind: declared.kind,
            path,
            port: NonZeroU16::get(declared.port),
            timeout: Duration::from_secs(declared.timeout_seconds.get().into()),
            action,
        })
    }
}

/// The headers that the kubelet would send, and the value of the `Host` header, if there is one.
fn headers(path: &str, declared: Vec<Header>) -> Result<(HeaderMap, Option<Authority>), InvalidProbe> {
    let (mut headers, mut host) = (HeaderMap::new(), None);
    for Header { name, value } in declared {
        let invalid_value = || InvalidProbe::HeaderValue {
            path: path.to_owned(),
            name: name.clone(),
        };
        let parsed: HeaderName = name.parse().map_err(|_| InvalidProbe::HeaderName {
            path: path.to_owned(),
            name: name.clone(),
        })?;
        let mut value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| invalid_value())?;
        match parsed {
            http::header::HOST if host.is_none() => {
                let invalid_host = |_| InvalidProbe::Host { path: path.to_owned() };
                host = Some(Authority::try_from(value.as_bytes()).map_err(invalid_host)?);
            }
            // Go, the language of the kubelet, sets these headers itself.
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
