//! The properties of a request that taps match and show.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version, header};
use tulle_core::names;
use tulle_proto::http_types::{self, headers::Header};
use tulle_proto::tap::TapEvent;
use tulle_proto::tap::tap_event::{EndpointMeta, ProxyDirection, RouteMeta};

use crate::http::body::Body;

pub(crate) struct RequestInfo<'a> {
    pub(crate) direction: ProxyDirection,
    pub(crate) source: SocketAddr,
    pub(crate) source_labels: BTreeMap<String, String>,
    pub(crate) destination: SocketAddr,
    /// Outbound: the endpoint's labels from discovery. Inbound: server, route and authorization.
    pub(crate) destination_labels: Cow<'a, BTreeMap<String, String>>,
    /// The TLS state of the connection to the endpoint or application.
    pub(crate) destination_tls: BTreeMap<String, String>,
    pub(crate) route_labels: BTreeMap<String, String>,
    pub(crate) method: &'a Method,
    pub(crate) uri: &'a Uri,
    pub(crate) version: Version,
    pub(crate) headers: &'a HeaderMap,
}

impl<'a> RequestInfo<'a> {
    /// The properties of `req` in its current state, without labels.
    pub(crate) fn new(
        req: &'a Request<Body>,
        direction: ProxyDirection,
        source: SocketAddr,
        destination: SocketAddr,
    ) -> Self {
        Self {
            direction,
            source,
            source_labels: BTreeMap::new(),
            destination,
            destination_labels: Cow::default(),
            destination_tls: BTreeMap::new(),
            route_labels: BTreeMap::new(),
            method: req.method(),
            uri: req.uri(),
            version: req.version(),
            headers: req.headers(),
        }
    }

    /// The authority of the request's target, or its `host` header.
    pub(crate) fn authority(&self) -> Cow<'_, str> {
        match (self.uri.authority(), self.headers.get(header::HOST)) {
            (Some(authority), _) => authority.as_str().into(),
            (None, Some(host)) => String::from_utf8_lossy(host.as_bytes()),
            (None, None) => "".into(),
        }
    }

    /// The fields that all events of this request have. Moves the labels out of `self`, to avoid a copy.
    pub(super) fn common_fields(&mut self) -> TapEvent {
        let meta = |labels| EndpointMeta { labels };
        let mut destination = std::mem::take(&mut self.destination_labels).into_owned();
        destination.append(&mut self.destination_tls);
        let route = std::mem::take(&mut self.route_labels);
        TapEvent {
            source: Some(self.source.into()),
            destination: Some(self.destination.into()),
            event: None,
            destination_meta: (!destination.is_empty()).then(|| meta(destination)),
            source_meta: Some(meta(std::mem::take(&mut self.source_labels))),
            proxy_direction: self.direction.into(),
            route_meta: (!route.is_empty()).then_some(RouteMeta { labels: route }),
        }
    }

    /// The headers of the request; in HTTP/2 after the pseudo-headers.
    pub(super) fn all_headers(&self) -> http_types::Headers {
        if self.version != Version::HTTP_2 {
            return headers([], self.headers);
        }
        let pseudo = [
            (":method", self.method.as_str().to_owned()),
            (":scheme", self.uri.scheme_str().unwrap_or_default().to_owned()),
            (":authority", self.authority().into_owned()),
            // Without the query, which may contain credentials.
            (":path", self.uri.path().to_owned()),
        ];
        headers(pseudo, self.headers)
    }
}

/// The headers for an event: `pseudo`, then `rest`. Credentials are replaced.
pub(super) fn headers<const N: usize>(pseudo: [(&str, String); N], rest: &HeaderMap) -> http_types::Headers {
    let line = |name: &str, value: &[u8]| Header {
        name: name.to_owned(),
        value: value.to_vec(),
    };
    let rest = rest.iter().map(|(name, value): (&HeaderName, &HeaderValue)| {
        // A client marks a value as sensitive if intermediaries must not store it.
        let is_secret = names::header::CREDENTIALS.contains(name) || value.is_sensitive();
        line(name.as_str(), if is_secret { REDACTED } else { value.as_bytes() })
    });
    let pseudo = pseudo.iter().map(|(name, value)| line(name, value.as_bytes()));
    http_types::Headers {
        headers: pseudo.chain(rest).collect(),
    }
}

/// Replaces the value of a header that contains a credential.
const REDACTED: &[u8] = b"(not shown)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_credential_headers_are_replaced() {
        let mut all = HeaderMap::new();
        for name in ["Authorization", "proxy-authorization", "cookie", "set-cookie", "accept"] {
            let name: HeaderName = name.parse().unwrap();
            all.append(&name, HeaderValue::from_static("a value"));
            all.append(&name, HeaderValue::from_static("a value"));
        }
        let mut marked = HeaderValue::from_static("a value");
        marked.set_sensitive(true);
        all.append("x-key", marked);
        let shown = headers([(":path", "/a value".to_owned())], &all).headers;
        let values_of = |name: &str| -> Vec<&[u8]> {
            let lines = shown.iter().filter(|header| header.name == name);
            lines.map(|header| &header.value[..]).collect()
        };
        for name in ["authorization", "proxy-authorization", "cookie", "set-cookie"] {
            assert_eq!(values_of(name), [REDACTED; 2], "{name}");
        }
        assert_eq!(values_of("x-key"), [REDACTED]);
        assert_eq!(values_of("accept"), [b"a value"; 2]);
        assert_eq!(values_of(":path"), [b"/a value"]);
    }
}
