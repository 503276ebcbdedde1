//! Conditions that select the requests of a tap.

use std::net::SocketAddr;

use http::{Method, uri::Scheme};
use ipnet::IpNet;
use tulle_proto::{
    http_types,
    tap::observe_request::{self as proto, r#match as kinds},
};

use crate::{policy::decode, tap::request_info::RequestInfo};

/// A condition on requests.
#[derive(Clone, Debug)]
pub(crate) enum Match {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Source(AddressMatch),
    Destination(AddressMatch),
    DestinationLabel(LabelMatch),
    RouteLabel(LabelMatch),
    Scheme(Scheme),
    Method(Method),
    Authority(StringMatch),
    Path(StringMatch),
}

#[derive(Clone, Debug)]
pub(crate) enum AddressMatch {
    /// The range includes both ends.
    Ports(u16, u16),
    Network(IpNet),
}

#[derive(Clone, Debug)]
pub(crate) struct LabelMatch {
    key: String,
    value: String,
}

#[derive(Clone, Debug)]
pub(crate) enum StringMatch {
    Exact(String),
    Prefix(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidMatch {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("ports must be from 1 to 65535, and the first must not exceed the last")]
    Ports,
    #[error("a network must have an address and a prefix length from 1 to 32 (IPv4) or 1 to 128 (IPv6)")]
    Network,
    #[error("the method is not an HTTP method")]
    Method,
    #[error("the scheme is not a URI scheme")]
    Scheme,
    #[error("conditions are nested too deeply")]
    Depth,
}

impl Match {
    /// Decodes a condition.
    ///
    /// # Errors
    /// A field is missing or invalid.
    pub(crate) fn decode(message: Option<proto::Match>) -> Result<Self, InvalidMatch> {
        Self::decode_nested(message, 0)
    }

    fn decode_nested(message: Option<proto::Match>, depth: usize) -> Result<Self, InvalidMatch> {
        if depth > MAX_MATCH_DEPTH {
            return Err(InvalidMatch::Depth);
        }
        let decode_all = |seq: kinds::Seq| {
            let matches = seq
                .matches
                .into_iter()
                .map(|message| Self::decode_nested(Some(message), depth + 1));
            matches.collect::<Result<_, _>>()
        };
        let kind = message.and_then(|message| message.r#match);
        Ok(match kind.ok_or(InvalidMatch::Missing("match"))? {
            kinds::Match::All(all) => Self::All(decode_all(all)?),
            kinds::Match::Any(any) => Self::Any(decode_all(any)?),
            kinds::Match::Not(not) => Self::Not(Box::new(Self::decode_nested(Some(*not), depth + 1)?)),
            kinds::Match::Source(tcp) => Self::Source(AddressMatch::decode(tcp)?),
            kinds::Match::Destination(tcp) => Self::Destination(AddressMatch::decode(tcp)?),
            kinds::Match::DestinationLabel(label) => Self::DestinationLabel(LabelMatch::decode(label)?),
            kinds::Match::RouteLabel(label) => Self::RouteLabel(LabelMatch::decode(label)?),
            kinds::Match::Http(http) => Self::decode_http(http)?,
        })
    }

    fn decode_http(http: kinds::Http) -> Result<Self, InvalidMatch> {
        use kinds::http::Match as Kind;
        Ok(match http.r#match.ok_or(InvalidMatch::Missing("HTTP match"))? {
            Kind::Scheme(scheme) => Self::Scheme(decode_scheme(scheme)?),
            Kind::Method(method) => Self::Method(decode::method(method).map_err(|_| InvalidMatch::Method)?),
            Kind::Authority(text) => Self::Authority(StringMatch::decode(text)?),
            Kind::Path(text) => Self::Path(StringMatch::decode(text)?),
        })
    }

    /// Whether the request meets the condition.
    pub(crate) fn matches(&self, request: &RequestInfo<'_>) -> bool {
        match self {
            Self::All(all) => all.iter().all(|one| one.matches(request)),
            Self::Any(any) => any.iter().any(|one| one.matches(request)),
            Self::Not(not) => !not.matches(request),
            Self::Source(address) => address.matches(request.source),
            Self::Destination(address) => address.matches(request.destination),
            Self::DestinationLabel(label) => label.is_in(request.destination_labels.iter()),
            Self::RouteLabel(label) => label.is_in(request.route_labels.iter()),
            Self::Scheme(scheme) => request.uri.scheme().unwrap_or(&Scheme::HTTP) == scheme,
            Self::Method(method) => request.method == method,
            Self::Authority(text) => text.matches(&request.authority()),
            Self::Path(text) => text.matches(request.uri.path()),
        }
    }
}

impl AddressMatch {
    fn decode(tcp: kinds::Tcp) -> Result<Self, InvalidMatch> {
        use kinds::tcp::Match as Kind;
        match tcp.r#match.ok_or(InvalidMatch::Missing("address match"))? {
            Kind::Ports(range) => {
                // A range with only one end means one port.
                let first = if range.min == 0 { range.max } else { range.min };
                let last = if range.max == 0 { range.min } else { range.max };
                let port = |port| {
                    u16::try_from(port)
                        .ok()
                        .filter(|port| *port > 0)
                        .ok_or(InvalidMatch::Ports)
                };
                let (first, last) = (port(first)?, port(last)?);
                match first <= last {
                    true => Ok(Self::Ports(first, last)),
                    false => Err(InvalidMatch::Ports),
                }
            }
            Kind::Netmask(netmask) => {
                let ip = netmask
                    .ip
                    .and_then(|ip| ip.try_into().ok())
                    .ok_or(InvalidMatch::Network)?;
                let bits = u8::try_from(netmask.mask).ok().filter(|bits| *bits > 0);
                let network = IpNet::new(ip, bits.ok_or(InvalidMatch::Network)?);
                network.map(Self::Network).map_err(|_| InvalidMatch::Network)
            }
        }
    }

    fn matches(&self, addr: SocketAddr) -> bool {
        match self {
            Self::Ports(first, last) => (*first..=*last).contains(&addr.port()),
            Self::Network(network) => network.contains(&addr.ip().to_canonical()),
        }
    }
}

impl LabelMatch {
    fn decode(label: kinds::Label) -> Result<Self, InvalidMatch> {
        let kinds::Label { key, value } = label;
        match key.is_empty() || value.is_empty() {
            true => Err(InvalidMatch::Missing("key or value of a label")),
            false => Ok(Self { key, value }),
        }
    }

    fn is_in<'a>(&self, mut labels: impl Iterator<Item = (&'a String, &'a String)>) -> bool {
        labels.any(|(key, value)| *key == self.key && *value == self.value)
    }
}

impl StringMatch {
    fn decode(text: kinds::http::StringMatch) -> Result<Self, InvalidMatch> {
        use kinds::http::string_match::Match as Kind;
        Ok(match text.r#match.ok_or(InvalidMatch::Missing("text"))? {
            Kind::Exact(exact) => Self::Exact(exact),
            Kind::Prefix(prefix) => Self::Prefix(prefix),
        })
    }

    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(exact) => text == exact,
            Self::Prefix(prefix) => text.starts_with(prefix),
        }
    }
}

fn decode_scheme(message: http_types::Scheme) -> Result<Scheme, InvalidMatch> {
    use http_types::scheme::{Registered, Type};
    match message.r#type.ok_or(InvalidMatch::Missing("scheme"))? {
        Type::Registered(code) if code == i32::from(Registered::Http) => Ok(Scheme::HTTP),
        Type::Registered(code) if code == i32::from(Registered::Https) => Ok(Scheme::HTTPS),
        Type::Registered(_) => Err(InvalidMatch::Scheme),
        Type::Unregistered(text) => text.parse().map_err(|_| InvalidMatch::Scheme),
    }
}

/// Maximum nesting of conditions, which come from the network.
const MAX_MATCH_DEPTH: usize = 32;

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, collections::BTreeMap};

    use http::Request;
    use tulle_proto::tap::tap_event::ProxyDirection;

    use super::*;
    use crate::http::body::Body;

    fn match_kind(kind: kinds::Match) -> proto::Match {
        proto::Match { r#match: Some(kind) }
    }

    fn http(kind: kinds::http::Match) -> proto::Match {
        match_kind(kinds::Match::Http(kinds::Http { r#match: Some(kind) }))
    }

    fn exact(text: &str) -> kinds::http::StringMatch {
        kinds::http::StringMatch {
            r#match: Some(kinds::http::string_match::Match::Exact(text.into())),
        }
    }

    fn ports(min: u32, max: u32) -> kinds::Tcp {
        kinds::Tcp {
            r#match: Some(kinds::tcp::Match::Ports(kinds::tcp::PortRange { min, max })),
        }
    }

    fn network(ip: &str, mask: u32) -> kinds::Tcp {
        let ip = Some(ip.parse::<std::net::IpAddr>().unwrap().into());
        kinds::Tcp {
            r#match: Some(kinds::tcp::Match::Netmask(kinds::tcp::Netmask { ip, mask })),
        }
    }

    fn label(key: &str, value: &str) -> kinds::Label {
        kinds::Label {
            key: key.into(),
            value: value.into(),
        }
    }

    /// Whether the condition matches the request `POST http://web.test/buy` from 10.0.0.1:4321 to port 8080 of pod `web-1`.
    fn matches_sample(message: proto::Match) -> Result<bool, InvalidMatch> {
        let condition = Match::decode(Some(message))?;
        let req = Request::post("http://web.test/buy?what=tea")
            .body(Body::empty())
            .unwrap();
        let pod = BTreeMap::from([("pod".to_owned(), "web-1".to_owned())]);
        let (from, to) = (([10, 0, 0, 1], 4321).into(), ([10, 0, 1, 1], 8080).into());
        Ok(condition.matches(&RequestInfo {
            destination_labels: Cow::Owned(pod),
            ..RequestInfo::new(&req, ProxyDirection::Inbound, from, to)
        }))
    }

    #[test]
    fn requests_are_matched_by_all_their_attributes() {
        use kinds::Match as Kind;
        let method = |name: &str| http_types::HttpMethod {
            r#type: Some(http_types::http_method::Type::Unregistered(name.into())),
        };
        let (matching, other) = (
            || match_kind(Kind::Source(ports(4321, 0))),
            || match_kind(Kind::Destination(ports(0, 80))),
        );
        let seq = |matches: Vec<proto::Match>| kinds::Seq { matches };
        for (message, expected) in [
            (matching(), true),
            (other(), false),
            (match_kind(Kind::Destination(ports(8000, 9000))), true),
            (match_kind(Kind::Source(network("10.0.0.0", 24))), true),
            (match_kind(Kind::Destination(network("10.0.0.0", 24))), false),
            (match_kind(Kind::Source(network("fd00::", 8))), false),
            (match_kind(Kind::DestinationLabel(label("pod", "web-1"))), true),
            (match_kind(Kind::DestinationLabel(label("pod", "web-2"))), false),
            (match_kind(Kind::RouteLabel(label("route", "buy"))), false),
            (http(kinds::http::Match::Path(exact("/buy"))), true),
            (http(kinds::http::Match::Authority(exact("web.test"))), true),
            (http(kinds::http::Match::Method(method("POST"))), true),
            (http(kinds::http::Match::Method(method("GET"))), false),
            (match_kind(Kind::All(seq(vec![matching(), other()]))), false),
            (match_kind(Kind::All(seq(vec![]))), true),
            (match_kind(Kind::Any(seq(vec![matching(), other()]))), true),
            (match_kind(Kind::Any(seq(vec![]))), false),
            (match_kind(Kind::Not(Box::new(other()))), true),
        ] {
            assert_eq!(matches_sample(message.clone()), Ok(expected), "{message:?}");
        }
    }

    #[test]
    fn invalid_conditions_are_refused() {
        use kinds::Match as Kind;
        let deep = (0..=MAX_MATCH_DEPTH).fold(match_kind(Kind::Source(ports(1, 1))), |inner, _| {
            match_kind(Kind::Not(Box::new(inner)))
        });
        for (message, expected) in [
            (proto::Match::default(), InvalidMatch::Missing("match")),
            (match_kind(Kind::Source(ports(0, 0))), InvalidMatch::Ports),
            (match_kind(Kind::Source(ports(9, 8))), InvalidMatch::Ports),
            (match_kind(Kind::Source(ports(1, 65_536))), InvalidMatch::Ports),
            (match_kind(Kind::Source(network("10.0.0.0", 0))), InvalidMatch::Network),
            (match_kind(Kind::Source(network("10.0.0.0", 33))), InvalidMatch::Network),
            (
                match_kind(Kind::RouteLabel(label("route", ""))),
                InvalidMatch::Missing("key or value of a label"),
            ),
            (deep, InvalidMatch::Depth),
        ] {
            assert_eq!(matches_sample(message), Err(expected));
        }
    }
}
