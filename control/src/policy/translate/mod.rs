//! Converts the model to protobuf: parts that inbound and outbound share.

mod backend;
pub(super) mod inbound;
pub(super) mod outbound;
mod stream;

use tulle_proto::grpc_route::{GrpcFailureInjector, GrpcRouteMatch, GrpcRpcMatch};
use tulle_proto::http_route::{
    HeaderMatch, HostMatch, HttpFailureInjector, HttpRouteMatch, PathMatch, PathModifier, QueryParamMatch,
    RequestHeaderModifier, RequestRedirect, ResponseHeaderModifier, header_match, host_match, path_match,
    path_modifier, query_param_match,
};
use tulle_proto::http_types::{Headers, Scheme, headers, scheme};
use tulle_proto::meta::{Metadata, Resource, metadata};

use crate::model::reference::{ObjectRef, Reference};
use crate::model::route;
use crate::proto_http_method::http_method;

fn metadata(reference: &Reference) -> Metadata {
    match reference {
        Reference::Default(name) => default_metadata(name),
        Reference::Object(object) => object_metadata(object),
    }
}

fn default_metadata(name: &str) -> Metadata {
    Metadata {
        kind: Some(metadata::Kind::Default(name.to_owned())),
    }
}

fn object_metadata(object: &ObjectRef) -> Metadata {
    let resource = Resource {
        group: object.group.to_owned(),
        kind: object.kind.to_owned(),
        name: object.name.to_string(),
        namespace: object.namespace.to_string(),
        section: String::new(),
        port: object.port.map_or(0, u32::from),
    };
    Metadata {
        kind: Some(metadata::Kind::Resource(resource)),
    }
}

fn host(host: &route::HostMatch) -> HostMatch {
    let matched = match host {
        route::HostMatch::Exact(name) => host_match::Match::Exact(name.clone()),
        route::HostMatch::Suffix(labels) => host_match::Match::Suffix(host_match::Suffix {
            reverse_labels: labels.clone(),
        }),
    };
    HostMatch { r#match: Some(matched) }
}

fn http_match(matched: &route::HttpMatch) -> HttpRouteMatch {
    let path = matched.path.as_ref().map(|path| match path {
        route::PathMatch::Exact(path) => path_match::Kind::Exact(path.clone()),
        route::PathMatch::Prefix(path) => path_match::Kind::Prefix(path.clone()),
        route::PathMatch::Regex(regex) => path_match::Kind::Regex(regex.clone()),
    });
    HttpRouteMatch {
        path: path.map(|kind| PathMatch { kind: Some(kind) }),
        headers: matched.headers.iter().map(header_match).collect(),
        query_params: matched.query_params.iter().map(query_match).collect(),
        method: matched.method.as_deref().map(http_method),
    }
}

fn header_match(matched: &route::NamedMatch) -> HeaderMatch {
    let value = match &matched.value {
        route::ValueMatch::Exact(value) => header_match::Value::Exact(value.clone().into_bytes()),
        route::ValueMatch::Regex(regex) => header_match::Value::Regex(regex.clone()),
    };
    HeaderMatch {
        name: matched.name.clone(),
        value: Some(value),
    }
}

fn query_match(matched: &route::NamedMatch) -> QueryParamMatch {
    let value = match &matched.value {
        route::ValueMatch::Exact(value) => query_param_match::Value::Exact(value.clone()),
        route::ValueMatch::Regex(regex) => query_param_match::Value::Regex(regex.clone()),
    };
    QueryParamMatch {
        name: matched.name.clone(),
        value: Some(value),
    }
}

fn grpc_match(matched: &route::GrpcMatch) -> GrpcRouteMatch {
    let rpc = GrpcRpcMatch {
        service: matched.service.clone().unwrap_or_default(),
        method: matched.method.clone().unwrap_or_default(),
    };
    GrpcRouteMatch {
        rpc: Some(rpc),
        headers: matched.headers.iter().map(header_match).collect(),
    }
}

fn headers(pairs: &[(String, String)]) -> Option<Headers> {
    let header = |(name, value): &(String, String)| headers::Header {
        name: name.clone(),
        value: value.clone().into_bytes(),
    };
    (!pairs.is_empty()).then(|| Headers {
        headers: pairs.iter().map(header).collect(),
    })
}

fn request_headers(modifier: &route::HeaderModifier) -> RequestHeaderModifier {
    let route::HeaderModifier { add, set, remove } = modifier;
    RequestHeaderModifier {
        add: headers(add),
        set: headers(set),
        remove: remove.clone(),
    }
}

fn response_headers(modifier: &route::HeaderModifier) -> ResponseHeaderModifier {
    let route::HeaderModifier { add, set, remove } = modifier;
    ResponseHeaderModifier {
        add: headers(add),
        set: headers(set),
        remove: remove.clone(),
    }
}

fn redirect(redirect: &route::Redirect) -> RequestRedirect {
    RequestRedirect {
        scheme: redirect.scheme.as_deref().map(scheme),
        host: redirect.host.clone().unwrap_or_default(),
        path: redirect.path.as_ref().map(path_modifier),
        port: redirect.port.map_or(0, u32::from),
        status: redirect.status.map_or(0, u32::from),
    }
}

fn path_modifier(modifier: &route::PathModifier) -> PathModifier {
    let replace = match modifier {
        route::PathModifier::Full(path) => path_modifier::Replace::Full(path.clone()),
        route::PathModifier::Prefix(prefix) => path_modifier::Replace::Prefix(prefix.clone()),
    };
    PathModifier { replace: Some(replace) }
}

fn scheme(scheme: &str) -> Scheme {
    let kind = match scheme.to_ascii_lowercase().as_str() {
        "http" => scheme::Type::Registered(scheme::Registered::Http.into()),
        "https" => scheme::Type::Registered(scheme::Registered::Https.into()),
        _ => scheme::Type::Unregistered(scheme.to_owned()),
    };
    Scheme { r#type: Some(kind) }
}

/// Fails every request: without a ratio the failure always applies.
fn http_failure(status: u16, message: &str) -> HttpFailureInjector {
    HttpFailureInjector {
        status: status.into(),
        message: message.to_owned(),
        ratio: None,
    }
}

fn grpc_failure(code: u16, message: &str) -> GrpcFailureInjector {
    GrpcFailureInjector {
        code: code.into(),
        message: message.to_owned(),
        ratio: None,
    }
}
