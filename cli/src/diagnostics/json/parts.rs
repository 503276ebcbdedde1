//! Conversion to JSON of messages that several responses contain: metadata, networks, durations, route matches.

use std::net::{IpAddr, SocketAddr};

use serde_json::{Map, Value, json};
use tulle_proto::http_types::{Headers, HttpMethod, http_method, scheme};
use tulle_proto::meta::{Metadata, metadata};
use tulle_proto::net::{IpNetwork, TcpAddress};
use tulle_proto::outbound::ExponentialBackoff;
use tulle_proto::{convert, grpc_route, http_route};

/// Builds an object of these fields, without those that are null or empty.
pub(super) fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let is_set = |value: &Value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    };
    let set = fields.into_iter().filter(|(_, value)| is_set(value));
    Value::Object(set.map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>())
}

pub(super) fn optional<T>(value: Option<&T>, show: impl Fn(&T) -> Value) -> Value {
    value.map_or(Value::Null, show)
}

pub(super) fn list<T>(items: &[T], show: impl Fn(&T) -> Value) -> Value {
    items.iter().map(show).collect()
}

/// Converts metadata to `{"default": name}`, or to the fields of a resource.
pub(super) fn metadata(metadata: Option<&Metadata>) -> Value {
    match metadata.and_then(|metadata| metadata.kind.as_ref()) {
        None => Value::Null,
        Some(metadata::Kind::Default(name)) => json!({ "default": name }),
        Some(metadata::Kind::Resource(resource)) => object([
            ("group", json!(resource.group)),
            ("kind", json!(resource.kind)),
            ("namespace", json!(resource.namespace)),
            ("name", json!(resource.name)),
            ("section", json!(resource.section)),
            (
                "port",
                if resource.port == 0 {
                    Value::Null
                } else {
                    json!(resource.port)
                },
            ),
        ]),
    }
}

pub(super) fn duration(duration: Option<&prost_types::Duration>) -> Value {
    optional(duration, |duration| match convert::std_duration(duration) {
        Ok(duration) => json!(format!("{duration:?}")),
        Err(err) => json!(err.to_string()),
    })
}

/// Converts a number by its shortest decimal form. A direct conversion of 0.2 to `f64` would give 0.20000000298023224.
pub(super) fn float(number: f32) -> Value {
    number
        .to_string()
        .parse::<f64>()
        .map_or(Value::Null, |number| json!(number))
}

pub(super) fn network(network: &IpNetwork) -> Value {
    match network.ip.and_then(|ip| IpAddr::try_from(ip).ok()) {
        Some(ip) => json!(format!("{ip}/{}", network.prefix_len)),
        None => json!("not a network"),
    }
}

pub(super) fn address(addr: &TcpAddress) -> Value {
    match SocketAddr::try_from(*addr) {
        Ok(addr) => json!(addr.to_string()),
        Err(err) => json!(err.to_string()),
    }
}

pub(super) fn backoff(backoff: &ExponentialBackoff) -> Value {
    object([
        ("minBackoff", duration(backoff.min_backoff.as_ref())),
        ("maxBackoff", duration(backoff.max_backoff.as_ref())),
        ("jitterRatio", float(backoff.jitter_ratio)),
    ])
}

pub(super) fn host(host: &http_route::HostMatch) -> Value {
    use http_route::host_match::Match;
    match &host.r#match {
        Some(Match::Exact(name)) => json!(name),
        Some(Match::Suffix(suffix)) => {
            let labels: Vec<_> = suffix.reverse_labels.iter().rev().map(String::as_str).collect();
            json!(format!("*.{}", labels.join(".")))
        }
        None => Value::Null,
    }
}

pub(super) fn http_match(matches: &http_route::HttpRouteMatch) -> Value {
    object([
        ("path", optional(matches.path.as_ref(), path)),
        ("headers", list(&matches.headers, header_match)),
        ("queryParams", list(&matches.query_params, query_match)),
        ("method", optional(matches.method.as_ref(), method)),
    ])
}

pub(super) fn grpc_match(matches: &grpc_route::GrpcRouteMatch) -> Value {
    let rpc = |rpc: &grpc_route::GrpcRpcMatch| object([("service", json!(rpc.service)), ("method", json!(rpc.method))]);
    object([
        ("rpc", optional(matches.rpc.as_ref(), rpc)),
        ("headers", list(&matches.headers, header_match)),
    ])
}

pub(super) fn method(method: &HttpMethod) -> Value {
    match &method.r#type {
        None => Value::Null,
        Some(http_method::Type::Unregistered(name)) => json!(name),
        Some(http_method::Type::Registered(number)) => match http_method::Registered::try_from(*number) {
            Ok(known) => json!(known.as_str_name()),
            Err(_) => json!(number),
        },
    }
}

pub(super) fn request_headers(modifier: &http_route::RequestHeaderModifier) -> Value {
    header_modifier(modifier.add.as_ref(), modifier.set.as_ref(), &modifier.remove)
}

pub(super) fn response_headers(modifier: &http_route::ResponseHeaderModifier) -> Value {
    header_modifier(modifier.add.as_ref(), modifier.set.as_ref(), &modifier.remove)
}

pub(super) fn http_failure(failure: &http_route::HttpFailureInjector) -> Value {
    object([
        ("status", json!(failure.status)),
        ("message", json!(failure.message)),
        ("ratio", optional(failure.ratio.as_ref(), ratio)),
    ])
}

pub(super) fn grpc_failure(failure: &grpc_route::GrpcFailureInjector) -> Value {
    object([
        ("code", json!(failure.code)),
        ("message", json!(failure.message)),
        ("ratio", optional(failure.ratio.as_ref(), ratio)),
    ])
}

pub(super) fn redirect(redirect: &http_route::RequestRedirect) -> Value {
    let scheme = redirect.scheme.as_ref().and_then(|scheme| scheme.r#type.as_ref());
    object([
        (
            "scheme",
            optional(scheme, |scheme| match scheme {
                scheme::Type::Unregistered(name) => json!(name),
                scheme::Type::Registered(number) => match scheme::Registered::try_from(*number) {
                    Ok(known) => json!(known.as_str_name()),
                    Err(_) => json!(number),
                },
            }),
        ),
        ("host", json!(redirect.host)),
        ("path", optional(redirect.path.as_ref(), path_modifier)),
        (
            "port",
            if redirect.port == 0 {
                Value::Null
            } else {
                json!(redirect.port)
            },
        ),
        ("status", json!(redirect.status)),
    ])
}

pub(super) fn path_modifier(modifier: &http_route::PathModifier) -> Value {
    use http_route::path_modifier::Replace;
    optional(modifier.replace.as_ref(), |replace| match replace {
        Replace::Full(full) => json!({ "full": full }),
        Replace::Prefix(prefix) => json!({ "prefix": prefix }),
    })
}

fn path(path: &http_route::PathMatch) -> Value {
    use http_route::path_match::Kind;
    match &path.kind {
        None => Value::Null,
        Some(Kind::Exact(text)) => json!({ "exact": text }),
        Some(Kind::Prefix(text)) => json!({ "prefix": text }),
        Some(Kind::Regex(text)) => json!({ "regex": text }),
    }
}

fn header_match(header: &http_route::HeaderMatch) -> Value {
    use http_route::header_match::Value as Match;
    let (exact, regex) = match &header.value {
        Some(Match::Exact(bytes)) => (json!(String::from_utf8_lossy(bytes)), Value::Null),
        Some(Match::Regex(text)) => (Value::Null, json!(text)),
        None => (Value::Null, Value::Null),
    };
    object([("name", json!(header.name)), ("exact", exact), ("regex", regex)])
}

fn query_match(param: &http_route::QueryParamMatch) -> Value {
    use http_route::query_param_match::Value as Match;
    let (exact, regex) = match &param.value {
        Some(Match::Exact(text)) => (json!(text), Value::Null),
        Some(Match::Regex(text)) => (Value::Null, json!(text)),
        None => (Value::Null, Value::Null),
    };
    object([("name", json!(param.name)), ("exact", exact), ("regex", regex)])
}

fn header_modifier(add: Option<&Headers>, set: Option<&Headers>, remove: &[String]) -> Value {
    let show = |headers: &Headers| {
        list(&headers.headers, |header| {
            json!(format!("{}: {}", header.name, String::from_utf8_lossy(&header.value)))
        })
    };
    object([
        ("add", optional(add, show)),
        ("set", optional(set, show)),
        ("remove", json!(remove)),
    ])
}

pub(super) fn ratio(ratio: &http_route::Ratio) -> Value {
    json!(format!("{}/{}", ratio.numerator, ratio.denominator))
}
