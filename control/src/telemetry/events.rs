//! Tap events as JSON, in the format of Linkerd's `tap -o json` plus the cause of responses that a proxy generated.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tulle_core::names::header;
use tulle_proto::http_types::{self, http_method, scheme};
use tulle_proto::tap as proto;
use tulle_proto::tap::tap_event::{self, http::Event};

use super::api::{ResourceName, UnreachableSidecar};

/// One line of a tap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TapLine {
    Event(Box<TapEvent>),
    /// A sidecar that could not be tapped.
    Unreachable {
        unreachable: UnreachableSidecar,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TapEvent {
    /// The pod or external workload whose sidecar reported the event.
    pub workload: ResourceName,
    pub source: TapEndpoint,
    pub destination: TapEndpoint,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub route_meta: BTreeMap<String, String>,
    /// `INBOUND` or `OUTBOUND`.
    pub proxy_direction: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_init_event: Option<RequestInit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_init_event: Option<ResponseInit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_end_event: Option<ResponseEnd>,
}

/// One end of a connection, and its labels.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TapEndpoint {
    pub ip: String,
    pub port: u16,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

/// Correlates the events of a request; `base` is the number of the sidecar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamId {
    pub base: u32,
    pub stream: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestInit {
    pub id: StreamId,
    pub method: String,
    pub scheme: String,
    pub authority: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<Header>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResponseInit {
    pub id: StreamId,
    pub since_request_init: ProtoDuration,
    pub http_status: u32,
    /// The `l5d-proxy-cause` header: why another proxy generated the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<Header>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResponseEnd {
    pub id: StreamId,
    pub since_request_init: ProtoDuration,
    pub since_response_init: ProtoDuration,
    pub response_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc_status_code: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_error_code: Option<u32>,
    /// Why the proxy failed the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trailers: Vec<Header>,
}

/// A duration, as in protobuf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProtoDuration {
    pub seconds: i64,
    pub nanos: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    pub name: String,
    pub value_str: String,
}

/// Whether tap lines include headers. Sidecars always send them, because the cause is read from a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Headers {
    Shown,
    Omitted,
}

impl ProtoDuration {
    pub fn micros(self) -> i64 {
        self.seconds
            .saturating_mul(1_000_000)
            .saturating_add(i64::from(self.nanos) / 1_000)
    }
}

impl TapEvent {
    /// Converts an event of the sidecar with this number in the tap. Returns `None` for an event without content.
    pub(super) fn from_proto(
        event: proto::TapEvent,
        workload: &ResourceName,
        number: u32,
        headers: Headers,
    ) -> Option<Self> {
        let proxy_direction = event.proxy_direction().as_str_name().to_owned();
        let mut converted = Self {
            workload: workload.clone(),
            source: TapEndpoint::from_proto(event.source, event.source_meta),
            destination: TapEndpoint::from_proto(event.destination, event.destination_meta),
            route_meta: event.route_meta.unwrap_or_default().labels,
            proxy_direction,
            ..Self::default()
        };
        let id = |id: Option<tap_event::http::StreamId>| StreamId {
            base: number,
            stream: id.unwrap_or_default().stream,
        };
        let shown = |all: Vec<Header>| match headers {
            Headers::Shown => all,
            Headers::Omitted => Vec::new(),
        };
        let tap_event::Event::Http(http) = event.event?;
        match http.event? {
            Event::RequestInit(init) => {
                converted.request_init_event = Some(RequestInit {
                    id: id(init.id),
                    method: method(init.method),
                    scheme: scheme(init.scheme),
                    authority: init.authority,
                    path: init.path,
                    headers: shown(header_list(init.headers)),
                });
            }
            Event::ResponseInit(init) => {
                let all = header_list(init.headers);
                let cause = all.iter().find(|line| line.name == header::L5D_PROXY_CAUSE.as_str());
                converted.response_init_event = Some(ResponseInit {
                    id: id(init.id),
                    since_request_init: proto_duration(init.since_request_init),
                    http_status: init.http_status,
                    cause: cause.map(|line| line.value_str.clone()),
                    headers: shown(all),
                });
            }
            Event::ResponseEnd(end) => {
                let eos = end.eos.and_then(|eos| eos.end);
                let (grpc, reset) = match eos {
                    Some(proto::eos::End::GrpcStatusCode(code)) => (Some(code), None),
                    Some(proto::eos::End::ResetErrorCode(code)) => (None, Some(code)),
                    None => (None, None),
                };
                converted.response_end_event = Some(ResponseEnd {
                    id: id(end.id),
                    since_request_init: proto_duration(end.since_request_init),
                    since_response_init: proto_duration(end.since_response_init),
                    response_bytes: end.response_bytes,
                    grpc_status_code: grpc,
                    reset_error_code: reset,
                    cause: Some(end.cause).filter(|cause| !cause.is_empty()),
                    trailers: shown(header_list(end.trailers)),
                });
            }
        }
        Some(converted)
    }
}

impl TapEndpoint {
    fn from_proto(addr: Option<tulle_proto::net::TcpAddress>, meta: Option<tap_event::EndpointMeta>) -> Self {
        let addr = addr.and_then(|addr| SocketAddr::try_from(addr).ok());
        Self {
            ip: addr.map(|addr| addr.ip().to_string()).unwrap_or_default(),
            port: addr.map_or(0, |addr| addr.port()),
            metadata: meta.unwrap_or_default().labels,
        }
    }
}

fn header_list(headers: Option<http_types::Headers>) -> Vec<Header> {
    let headers = headers.unwrap_or_default().headers.into_iter();
    // tulle's proxy redacts credentials, other proxies do not.
    let is_secret = |name: &str| {
        header::CREDENTIALS
            .iter()
            .any(|secret| name.eq_ignore_ascii_case(secret.as_str()))
    };
    let line = |line: http_types::headers::Header| Header {
        value_str: match is_secret(&line.name) {
            true => "(not shown)".to_owned(),
            false => String::from_utf8_lossy(&line.value).into_owned(),
        },
        name: line.name,
    };
    headers.map(line).collect()
}

fn proto_duration(duration: Option<prost_types::Duration>) -> ProtoDuration {
    let prost_types::Duration { seconds, nanos } = duration.unwrap_or_default();
    ProtoDuration { seconds, nanos }
}

fn method(method: Option<http_types::HttpMethod>) -> String {
    match method.and_then(|method| method.r#type) {
        Some(http_method::Type::Registered(known)) => http_method::Registered::try_from(known)
            .map(|known| known.as_str_name().to_owned())
            .unwrap_or_default(),
        Some(http_method::Type::Unregistered(name)) => name,
        None => String::new(),
    }
}

fn scheme(scheme: Option<http_types::Scheme>) -> String {
    match scheme.and_then(|scheme| scheme.r#type) {
        Some(scheme::Type::Registered(known)) => scheme::Registered::try_from(known)
            .map(|known| known.as_str_name().to_ascii_lowercase())
            .unwrap_or_default(),
        Some(scheme::Type::Unregistered(name)) => name,
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_redacted_in_every_event() {
        let all = ["Authorization", "proxy-authorization", "cookie", "set-cookie", "accept"];
        let headers = Some(http_types::Headers {
            headers: all
                .map(|name| http_types::headers::Header {
                    name: name.to_owned(),
                    value: format!("value of {name}").into(),
                })
                .into(),
        });
        let events = [
            Event::RequestInit(tap_event::http::RequestInit {
                headers: headers.clone(),
                ..Default::default()
            }),
            Event::ResponseInit(tap_event::http::ResponseInit {
                headers: headers.clone(),
                ..Default::default()
            }),
            Event::ResponseEnd(tap_event::http::ResponseEnd {
                trailers: headers,
                ..Default::default()
            }),
        ];
        for event in events {
            let event = proto::TapEvent {
                event: Some(tap_event::Event::Http(tap_event::Http { event: Some(event) })),
                ..Default::default()
            };
            let text = |headers| {
                let read = TapEvent::from_proto(event.clone(), &ResourceName::default(), 0, headers).unwrap();
                serde_json::to_string(&read).unwrap()
            };
            let shown = text(Headers::Shown);
            assert_eq!(shown.matches("value of ").count(), 1, "{shown}");
            assert!(
                shown.contains("value of accept") && shown.contains("Authorization"),
                "{shown}"
            );
            assert!(!text(Headers::Omitted).contains("accept"));
        }
    }
}
