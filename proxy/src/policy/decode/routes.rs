//! Hosts, matches and filters, which inbound and outbound routes share.

use http::header::HeaderName;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Method, StatusCode};
use tulle_proto::grpc_route::{GrpcFailureInjector, GrpcRouteMatch};
use tulle_proto::http_route as proto;
use tulle_proto::http_types::{self, Headers, HttpMethod, http_method, scheme};
use tulle_proto::outbound::filter_extension::{self, UrlRewrite};
use tulle_proto::tls_route::{SniMatch, sni_match};

use crate::policy::cors::{AllowedNames, Cors, OriginMatch};
use crate::policy::decode::fields::DecodeError;
use crate::policy::filter::{
    self, Failure, FailureInjector, Filter, HeaderModifier, PathModifier, Ratio, Redirect, RewrittenHost,
};
use crate::policy::matches::{
    GrpcMatch, HeaderMatch, HostMatch, HttpMatch, PathMatch, Pattern, QueryMatch, RequestMatch, ValueMatch,
};

pub(super) fn hosts(messages: Vec<proto::HostMatch>) -> Result<Vec<HostMatch>, DecodeError> {
    messages
        .into_iter()
        .map(
            |message| match message.r#match.ok_or(DecodeError::Missing("host match"))? {
                proto::host_match::Match::Exact(host) => Ok(HostMatch::exact(&host)),
                proto::host_match::Match::Suffix(suffix) => Ok(HostMatch::suffix(&suffix.reverse_labels)),
            },
        )
        .collect()
}

pub(super) fn snis(messages: Vec<SniMatch>) -> Result<Vec<HostMatch>, DecodeError> {
    messages
        .into_iter()
        .map(
            |message| match message.r#match.ok_or(DecodeError::Missing("SNI match"))? {
                sni_match::Match::Exact(name) => Ok(HostMatch::exact(&name)),
                sni_match::Match::Suffix(suffix) => Ok(HostMatch::suffix(&suffix.reverse_labels)),
            },
        )
        .collect()
}

pub(super) fn http_matches(messages: Vec<proto::HttpRouteMatch>) -> Result<Vec<RequestMatch>, DecodeError> {
    messages.into_iter().map(http_match).collect()
}

pub(super) fn grpc_matches(messages: Vec<GrpcRouteMatch>) -> Result<Vec<RequestMatch>, DecodeError> {
    messages
        .into_iter()
        .map(|message| {
            let rpc = message.rpc.unwrap_or_default();
            Ok(RequestMatch::Grpc(GrpcMatch {
                service: rpc.service.into(),
                method: rpc.method.into(),
                headers: header_matches(message.headers)?,
            }))
        })
        .collect()
}

fn http_match(message: proto::HttpRouteMatch) -> Result<RequestMatch, DecodeError> {
    Ok(RequestMatch::Http(HttpMatch {
        path: message.path.map(path_match).transpose()?,
        method: message.method.map(method).transpose()?,
        headers: header_matches(message.headers)?,
        query: message
            .query_params
            .into_iter()
            .map(query_match)
            .collect::<Result<_, _>>()?,
    }))
}

fn path_match(message: proto::PathMatch) -> Result<PathMatch, DecodeError> {
    Ok(match message.kind.ok_or(DecodeError::Missing("path match"))? {
        proto::path_match::Kind::Exact(path) => PathMatch::exact(&path),
        proto::path_match::Kind::Prefix(path) => PathMatch::prefix(&path),
        proto::path_match::Kind::Regex(source) => PathMatch::Regex(pattern("path match", &source)?),
    })
}

fn header_matches(messages: Vec<proto::HeaderMatch>) -> Result<Vec<HeaderMatch>, DecodeError> {
    messages
        .into_iter()
        .map(|message| {
            let value = match message.value.ok_or(DecodeError::Missing("value of a header match"))? {
                proto::header_match::Value::Exact(value) => ValueMatch::Exact(value.into()),
                proto::header_match::Value::Regex(source) => ValueMatch::Regex(pattern("header match", &source)?),
            };
            Ok(HeaderMatch {
                name: header_name(&message.name)?,
                value,
            })
        })
        .collect()
}

fn query_match(message: proto::QueryParamMatch) -> Result<QueryMatch, DecodeError> {
    let value = match message.value.ok_or(DecodeError::Missing("value of a query match"))? {
        proto::query_param_match::Value::Exact(value) => ValueMatch::Exact(value.into_bytes().into()),
        proto::query_param_match::Value::Regex(source) => ValueMatch::Regex(pattern("query match", &source)?),
    };
    Ok(QueryMatch {
        name: message.name.into(),
        value,
    })
}

pub(super) fn pattern(field: &'static str, source: &str) -> Result<Pattern, DecodeError> {
    Pattern::new(source).map_err(|error| DecodeError::Pattern {
        field,
        pattern: source.to_owned(),
        source: error,
    })
}

pub(crate) fn method(message: HttpMethod) -> Result<Method, DecodeError> {
    use http_method::Registered;
    match message.r#type.ok_or(DecodeError::Missing("method"))? {
        http_method::Type::Registered(number) => match Registered::try_from(number) {
            Ok(Registered::Get) => Ok(Method::GET),
            Ok(Registered::Post) => Ok(Method::POST),
            Ok(Registered::Put) => Ok(Method::PUT),
            Ok(Registered::Delete) => Ok(Method::DELETE),
            Ok(Registered::Patch) => Ok(Method::PATCH),
            Ok(Registered::Options) => Ok(Method::OPTIONS),
            Ok(Registered::Connect) => Ok(Method::CONNECT),
            Ok(Registered::Head) => Ok(Method::HEAD),
            Ok(Registered::Trace) => Ok(Method::TRACE),
            Err(_) => Err(DecodeError::invalid(
                "method",
                number,
                "the number of a registered method",
            )),
        },
        http_method::Type::Unregistered(name) => Method::from_bytes(name.as_bytes())
            .map_err(|_| DecodeError::invalid("method", name, "a token (RFC 9110), such as PROPFIND")),
    }
}

pub(super) fn request_headers(message: proto::RequestHeaderModifier) -> Result<Filter, DecodeError> {
    header_modifier(message.add, message.set, message.remove).map(Filter::RequestHeaders)
}

pub(super) fn response_headers(message: proto::ResponseHeaderModifier) -> Result<Filter, DecodeError> {
    header_modifier(message.add, message.set, message.remove).map(Filter::ResponseHeaders)
}

fn header_modifier(
    add: Option<Headers>,
    set: Option<Headers>,
    remove: Vec<String>,
) -> Result<HeaderModifier, DecodeError> {
    Ok(HeaderModifier {
        add: headers(add)?,
        set: headers(set)?,
        remove: remove.iter().map(|name| header_name(name)).collect::<Result<_, _>>()?,
    })
}

fn headers(message: Option<Headers>) -> Result<Vec<(HeaderName, HeaderValue)>, DecodeError> {
    message
        .unwrap_or_default()
        .headers
        .into_iter()
        .map(|header| {
            let value = HeaderValue::from_bytes(&header.value).map_err(|_| {
                let value = String::from_utf8_lossy(&header.value);
                DecodeError::invalid("header value", value, "a value without control characters")
            })?;
            Ok((header_name(&header.name)?, value))
        })
        .collect()
}

fn header_name(name: &str) -> Result<HeaderName, DecodeError> {
    HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| DecodeError::invalid("header name", name, "a token (RFC 9110), such as x-version"))
}

pub(super) fn redirect(message: proto::RequestRedirect) -> Result<Filter, DecodeError> {
    let status = match message.status {
        0 => StatusCode::MOVED_PERMANENTLY,
        status => status_code("redirect status", status)?,
    };
    let port = u16::try_from(message.port)
        .map_err(|_| DecodeError::invalid("redirect port", message.port, "a port from 1 to 65535, or none"))?;
    let host = match message.host.as_str() {
        "" => None,
        // A port has a field of its own.
        host if host
            .parse::<Authority>()
            .is_ok_and(|authority| authority.host() == host) =>
        {
            Some(host.into())
        }
        host => return Err(DecodeError::invalid("redirect host", host, "a host name")),
    };
    Ok(Filter::Redirect(Redirect {
        scheme: message.scheme.map(redirect_scheme).transpose()?,
        host,
        path: message.path.map(path_modifier).transpose()?,
        port: Some(port).filter(|port| *port > 0),
        status,
    }))
}

pub(super) fn url_rewrite(message: UrlRewrite) -> Result<Filter, DecodeError> {
    let host = match message.host.as_str() {
        "" => None,
        host => {
            Some(RewrittenHost::new(host).ok_or_else(|| DecodeError::invalid("rewritten host", host, "a host name"))?)
        }
    };
    Ok(Filter::UrlRewrite(filter::UrlRewrite {
        host,
        path: message.path.map(path_modifier).transpose()?,
    }))
}

pub(super) fn cors(message: filter_extension::Cors) -> Result<Filter, DecodeError> {
    let origin = |text: &String| {
        OriginMatch::parse(text).ok_or_else(|| {
            DecodeError::invalid("allowed origin", text, "* or an origin, such as https://*.example.com")
        })
    };
    // Browsers do not accept `*` for requests with credentials.
    let is_exposed = |name: &String| !(message.allow_credentials && name == "*");
    let exposed_headers = message
        .expose_headers
        .into_iter()
        .filter(is_exposed)
        .collect::<Vec<_>>();
    Ok(Filter::Cors(Box::new(Cors {
        origins: message.allow_origins.iter().map(origin).collect::<Result<_, _>>()?,
        allows_credentials: message.allow_credentials,
        methods: allowed_names(&message.allow_methods)?,
        headers: allowed_names(&message.allow_headers)?,
        exposed_headers: name_list(&exposed_headers)?,
        max_age: message.max_age_seconds,
    })))
}

fn allowed_names(names: &[String]) -> Result<AllowedNames, DecodeError> {
    match names.iter().any(|name| name == "*") {
        true => Ok(AllowedNames::Any),
        false => name_list(names).map(AllowedNames::Listed),
    }
}

/// Methods or headers as the value of a header. `None` for an empty list.
fn name_list(names: &[String]) -> Result<Option<HeaderValue>, DecodeError> {
    for name in names {
        // The syntax of methods and of headers is the same, except that methods are case-sensitive.
        header_name(name)?;
    }
    let list = names.join(", ");
    let value = HeaderValue::try_from(list.as_str())
        .map_err(|_| DecodeError::invalid("list of names", list, "names without control characters"))?;
    Ok(Some(value).filter(|value| !value.is_empty()))
}

fn redirect_scheme(message: http_types::Scheme) -> Result<Scheme, DecodeError> {
    use scheme::Registered;
    match message.r#type.ok_or(DecodeError::Missing("scheme"))? {
        scheme::Type::Registered(number) => match Registered::try_from(number) {
            Ok(Registered::Http) => Ok(Scheme::HTTP),
            Ok(Registered::Https) => Ok(Scheme::HTTPS),
            Err(_) => Err(DecodeError::invalid(
                "scheme",
                number,
                "the number of a registered scheme",
            )),
        },
        scheme::Type::Unregistered(name) => name
            .parse()
            .map_err(|_| DecodeError::invalid("scheme", name, "a URI scheme, such as https")),
    }
}

fn path_modifier(message: proto::PathModifier) -> Result<PathModifier, DecodeError> {
    use proto::path_modifier::Replace;
    let replace = message.replace.ok_or(DecodeError::Missing("replacement of a path"))?;
    let (Replace::Full(path) | Replace::Prefix(path)) = &replace;
    if !path.starts_with('/') || PathAndQuery::try_from(path.as_str()).is_err() {
        return Err(DecodeError::invalid(
            "replacement of a path",
            path,
            "a path that starts with /",
        ));
    }
    Ok(match replace {
        Replace::Full(path) => PathModifier::Full(path.into()),
        Replace::Prefix(path) => PathModifier::Prefix(path.into()),
    })
}

pub(super) fn http_failure(message: proto::HttpFailureInjector) -> Result<Filter, DecodeError> {
    let failure = Failure::Http {
        status: status_code("injected status", message.status)?,
        message: message.message.into(),
    };
    Ok(Filter::Failure(FailureInjector {
        failure,
        ratio: ratio("failure ratio", message.ratio)?,
    }))
}

pub(super) fn grpc_failure(message: GrpcFailureInjector) -> Result<Filter, DecodeError> {
    let code = u16::try_from(message.code)
        .map_err(|_| DecodeError::invalid("injected gRPC code", message.code, "a code up to 65535"))?;
    let failure = Failure::Grpc {
        code,
        message: message.message.into(),
    };
    Ok(Filter::Failure(FailureInjector {
        failure,
        ratio: ratio("failure ratio", message.ratio)?,
    }))
}

pub(super) fn ratio(field: &'static str, message: Option<proto::Ratio>) -> Result<Ratio, DecodeError> {
    let Some(proto::Ratio { numerator, denominator }) = message else {
        return Ok(Ratio::ALWAYS);
    };
    Ratio::new(numerator, denominator)
        .ok_or_else(|| DecodeError::invalid(field, format!("{numerator}/{denominator}"), "a ratio from 0 to 1"))
}

/// The status of a final response.
fn status_code(field: &'static str, status: u32) -> Result<StatusCode, DecodeError> {
    u16::try_from(status)
        .ok()
        .and_then(|status| StatusCode::from_u16(status).ok())
        .filter(|status| !status.is_informational())
        .ok_or_else(|| DecodeError::invalid(field, status, "a status from 200 to 999"))
}
