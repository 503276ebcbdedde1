//! Routes as both policy views use them: which ones a parent has, and their rules as model values.

use std::sync::Arc;

use ipnet::IpNet;
use tracing::warn;

use crate::cluster::lookup::Reader;
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{
    Filter, GrpcMatch, HeaderModifier, HostMatch, HttpMatch, NamedMatch, PathMatch, PathModifier, Redirect, ValueMatch,
};
use crate::resources::acceptance::{self, Parents};
use crate::resources::meta::Name;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::route as raw;
use crate::resources::route::{Acceptance, Parent, ParentKind, Route};
use crate::resources::service::Service;

/// Routes that serve a port of the parent, the oldest first.
pub(super) fn attached<'a>(
    reader: &Reader<'a>,
    cluster_networks: &[IpNet],
    kind: ParentKind,
    parent: &Name,
    port: Option<u16>,
) -> Vec<&'a Arc<Route>> {
    let routes = reader.routes_of(kind, parent);
    let serves = |route: &Route| {
        route.parents.iter().any(|reference| {
            reference.kind == kind
                && reference.name == *parent
                && reference.section.is_none()
                && (reference.port.is_none() || reference.port == port)
                && is_accepted(reader, cluster_networks, route, reference, &routes)
        })
    };
    routes.iter().filter(|route| serves(route)).copied().collect()
}

/// What the status says, or what it would say if somebody wrote it.
fn is_accepted(
    reader: &Reader<'_>,
    cluster_networks: &[IpNet],
    route: &Route,
    parent: &Parent,
    rivals: &[&Arc<Route>],
) -> bool {
    match parent.acceptance {
        Acceptance::Accepted => true,
        Acceptance::Refused => false,
        Acceptance::Unjudged => {
            let rivals = rivals.iter().map(|rival| &***rival);
            acceptance::of_route(reader, cluster_networks, route.kind, parent, rivals).is_ok()
        }
    }
}

impl Parents for Reader<'_> {
    fn has_server(&self, name: &Name) -> bool {
        self.server(name).is_some()
    }

    fn service(&self, name: &Name) -> Option<&Service> {
        self.service(name).map(|service| &**service)
    }

    fn egress_network(&self, name: &Name) -> Option<&EgressNetwork> {
        self.egress_network(name).map(|network| &**network)
    }
}

pub(super) fn reference(route: &Route) -> Reference {
    Reference::Object(ObjectRef {
        group: route.kind.group(),
        kind: route.kind.kind(),
        namespace: route.meta.namespace().clone(),
        name: route.meta.name.name.clone(),
        port: None,
    })
}

pub(super) fn hosts(route: &Route) -> Vec<HostMatch> {
    let host = |hostname: &String| match hostname.strip_prefix("*.") {
        Some(suffix) => HostMatch::Suffix(suffix.split('.').rev().map(str::to_owned).collect()),
        None => HostMatch::Exact(hostname.clone()),
    };
    route.hostnames.iter().map(host).collect()
}

/// Matches of an HTTP rule; a rule without any matches everything.
pub(super) fn http_matches(rule: &raw::Rule<raw::HttpMatch>) -> Vec<HttpMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(http_match).collect();
    if matches.is_empty() {
        vec![HttpMatch::everything()]
    } else {
        matches
    }
}

fn http_match(matched: &raw::HttpMatch) -> HttpMatch {
    let path = matched.path.as_ref().map(|path| match path.kind {
        raw::PathKind::Exact => PathMatch::Exact(path.value.clone()),
        raw::PathKind::PathPrefix => PathMatch::Prefix(path.value.clone()),
        raw::PathKind::RegularExpression => PathMatch::Regex(path.value.clone()),
    });
    HttpMatch {
        path: path.or_else(|| HttpMatch::everything().path),
        headers: matched.headers.iter().map(named_match).collect(),
        query_params: matched.query_params.iter().map(named_match).collect(),
        method: matched.method.clone(),
    }
}

/// Matches of a gRPC rule; a rule without any matches everything.
pub(super) fn grpc_matches(rule: &raw::Rule<raw::GrpcMatch>) -> Vec<GrpcMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(grpc_match).collect();
    if matches.is_empty() {
        vec![GrpcMatch::default()]
    } else {
        matches
    }
}

fn grpc_match(matched: &raw::GrpcMatch) -> GrpcMatch {
    let method = matched.method.as_ref();
    GrpcMatch {
        service: method.and_then(|method| method.service.clone()),
        method: method.and_then(|method| method.method.clone()),
        headers: matched.headers.iter().map(named_match).collect(),
    }
}

fn named_match(matched: &raw::NamedMatch) -> NamedMatch {
    let value = match matched.kind {
        raw::ValueKind::Exact => ValueMatch::Exact(matched.value.clone()),
        raw::ValueKind::RegularExpression => ValueMatch::Regex(matched.value.clone()),
    };
    NamedMatch {
        name: matched.name.clone(),
        value,
    }
}

/// Filters of a rule, or nothing when there is one that we do not implement: such a route is not served.
pub(super) fn filters(route: &Route, filters: &[raw::Filter]) -> Option<Vec<Filter>> {
    filters.iter().map(|filter| supported(route, filter)).collect()
}

fn supported(route: &Route, filter: &raw::Filter) -> Option<Filter> {
    Some(match filter {
        raw::Filter::RequestHeaders(modifier) => Filter::RequestHeaders(header_modifier(modifier)),
        raw::Filter::ResponseHeaders(modifier) => Filter::ResponseHeaders(header_modifier(modifier)),
        raw::Filter::Redirect(redirect) => Filter::Redirect(Redirect {
            scheme: redirect.scheme.clone(),
            host: redirect.hostname.clone(),
            path: redirect.path.as_ref().map(|path| match path {
                raw::PathModifier::ReplaceFullPath { path } => PathModifier::Full(path.clone()),
                raw::PathModifier::ReplacePrefixMatch { prefix } => PathModifier::Prefix(prefix.clone()),
            }),
            port: redirect.port,
            status: redirect.status_code,
        }),
        raw::Filter::Unsupported(kind) => {
            warn!(route = %route.meta.name, filter = kind, "the route is not served because of a filter we do not have");
            return None;
        }
    })
}

fn header_modifier(modifier: &raw::HeaderModifier) -> HeaderModifier {
    let pairs = |headers: &[raw::Header]| {
        headers
            .iter()
            .map(|header| (header.name.clone(), header.value.clone()))
            .collect()
    };
    HeaderModifier {
        add: pairs(&modifier.add),
        set: pairs(&modifier.set),
        remove: modifier.remove.clone(),
    }
}
