//! Routes as both policy views use them: which ones a parent has, and their rules as model values.

use std::sync::Arc;

use crate::cluster::Config;
use crate::cluster::lookup::Reader;
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{
    Filter, GrpcMatch, HeaderModifier, HostMatch, HttpMatch, NamedMatch, PathMatch, PathModifier, Redirect, ValueMatch,
};
use crate::resources::acceptance::{self, Parents, Refusal, Settings};
use crate::resources::meta::Name;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::server::Server;
use crate::resources::route as raw;
use crate::resources::route::{Acceptance, Parent, ParentKind, Route, RouteKind};
use crate::resources::route_admission;
use crate::resources::service::Service;

/// Routes that serve a port of the parent, the oldest first.
pub(super) fn attached<'a>(
    reader: &Reader<'a>,
    config: &Config,
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
                && is_attached(reader, config, route, reference, &routes)
        })
    };
    routes.iter().filter(|route| serves(route)).copied().collect()
}

/// What the status says, or what it would say if somebody wrote it. A route that asks for what no proxy does is attached,
/// because without it requests would be served by other rules than those that somebody wrote for them.
fn is_attached(reader: &Reader<'_>, config: &Config, route: &Route, parent: &Parent, rivals: &[&Arc<Route>]) -> bool {
    match parent.acceptance {
        Acceptance::Accepted | Acceptance::Unsupported => true,
        Acceptance::Refused => false,
        Acceptance::Unjudged => {
            let rivals = rivals.iter().map(|rival| &***rival);
            let settings = Settings {
                cluster_networks: &config.cluster_networks,
                global_egress_namespace: &config.global_egress_namespace,
            };
            let judged = acceptance::of_route(reader, settings, route, parent, rivals);
            matches!(judged, Ok(()) | Err(Refusal::Unsupported(_)))
        }
    }
}

impl Parents for Reader<'_> {
    fn server(&self, name: &Name) -> Option<&Server> {
        self.server(name).map(|server| &**server)
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

/// Matches of an HTTP rule; a rule without any matches everything, and so does one with a match that cannot be read.
pub(super) fn http_matches(rule: &raw::Rule<raw::HttpMatch>) -> Vec<HttpMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(http_match).collect();
    if matches.is_empty() || route_admission::http_matches(rule).is_err() {
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
        headers: header_matches(&matched.headers),
        query_params: query_matches(&matched.query_params),
        method: matched.method.clone(),
    }
}

/// The same of a gRPC rule.
pub(super) fn grpc_matches(rule: &raw::Rule<raw::GrpcMatch>) -> Vec<GrpcMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(grpc_match).collect();
    if matches.is_empty() || route_admission::grpc_matches(rule).is_err() {
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
        headers: header_matches(&matched.headers),
    }
}

/// Of several with one name the first counts; names of headers have no case.
fn header_matches(matches: &[raw::NamedMatch]) -> Vec<NamedMatch> {
    first_of_each(matches, str::eq_ignore_ascii_case)
}

fn query_matches(matches: &[raw::NamedMatch]) -> Vec<NamedMatch> {
    first_of_each(matches, |one, other| one == other)
}

fn first_of_each(matches: &[raw::NamedMatch], is_same: impl Fn(&str, &str) -> bool) -> Vec<NamedMatch> {
    let mut kept: Vec<NamedMatch> = Vec::new();
    for matched in matches {
        if !kept.iter().any(|earlier| is_same(&earlier.name, &matched.name)) {
            kept.push(named_match(matched));
        }
    }
    kept
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

/// Filters of a rule of an HTTPRoute; one that cannot be served answers its requests with an error.
pub(super) fn http_filters(route: &Route, rule: &raw::Rule<raw::HttpMatch>, parent: ParentKind) -> Vec<Filter> {
    let served = route_admission::serve_http_rule(rule, route.kind, parent);
    filters_or_failure(route, &rule.filters, served)
}

/// The same of a rule of a GRPCRoute.
pub(super) fn grpc_filters(route: &Route, rule: &raw::Rule<raw::GrpcMatch>, parent: ParentKind) -> Vec<Filter> {
    let served = route_admission::serve_grpc_rule(rule, route.kind, parent);
    filters_or_failure(route, &rule.filters, served)
}

/// The same of a backend.
pub(super) fn backend_filters(route: &Route, filters: &[raw::Filter], parent: ParentKind) -> Vec<Filter> {
    let mut all = filters.iter();
    let served = all.try_for_each(|one| route_admission::serve_filter(one, route.kind, parent));
    filters_or_failure(route, filters, served)
}

fn filters_or_failure(route: &Route, filters: &[raw::Filter], served: Result<(), String>) -> Vec<Filter> {
    let served = match &route.unread {
        Some(unread) => Err(unread.reason.clone()),
        None => served,
    };
    match served {
        Ok(()) => filters.iter().filter_map(filter).collect(),
        Err(reason) => vec![named_failure(route, &reason)],
    }
}

fn named_failure(route: &Route, reason: &str) -> Filter {
    failure(
        route.kind,
        format!("{} {}: {reason}", route.kind.kind(), route.meta.name),
    )
}

/// What answers the requests of a route that cannot be served.
pub(super) fn failure_of(route: &Route) -> Filter {
    let reason = route_admission::unserved(route, ParentKind::Server);
    named_failure(route, reason.as_deref().unwrap_or("it cannot be served"))
}

/// The first route of a protocol of which it cannot be told which requests it is for.
pub(super) fn of_unknown_requests<'a>(routes: &[&'a Arc<Route>], protocol: RouteKind) -> Option<&'a Arc<Route>> {
    let is_unknown =
        |unread: Option<&raw::Unread>| unread.is_some_and(|unread| unread.requests == raw::Requests::Unknown);
    let has_unknown = |route: &&&Arc<Route>| {
        let of_protocol = (route.kind == RouteKind::Grpc) == (protocol == RouteKind::Grpc);
        let rules_are_unknown = match &route.rules {
            raw::Rules::Http(rules) => rules
                .iter()
                .any(|rule| is_unknown(rule.unread.as_ref()) || route_admission::http_matches(rule).is_err()),
            raw::Rules::Grpc(rules) => rules
                .iter()
                .any(|rule| is_unknown(rule.unread.as_ref()) || route_admission::grpc_matches(rule).is_err()),
            raw::Rules::Stream(_) => false,
        };
        of_protocol && (rules_are_unknown || is_unknown(route.unread.as_ref()))
    };
    routes.iter().find(has_unknown).copied()
}

/// Answers instead of sending, in the manner of a route's protocol.
pub(super) fn failure(kind: RouteKind, message: String) -> Filter {
    match kind {
        RouteKind::Grpc => Filter::FailGrpc { code: 13, message },
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => Filter::FailHttp { status: 500, message },
        RouteKind::Tls | RouteKind::Tcp => Filter::FailStream { message },
    }
}

fn filter(filter: &raw::Filter) -> Option<Filter> {
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
        // Refused before.
        raw::Filter::Unsupported(_) => return None,
    })
}

fn header_modifier(modifier: &raw::HeaderModifier) -> HeaderModifier {
    // Of several with one name the first counts here, too.
    let pairs = |headers: &[raw::Header]| {
        let mut kept: Vec<(String, String)> = Vec::new();
        for header in headers {
            if !kept.iter().any(|(name, _)| name.eq_ignore_ascii_case(&header.name)) {
                kept.push((header.name.clone(), header.value.clone()));
            }
        }
        kept
    };
    HeaderModifier {
        add: pairs(&modifier.add),
        set: pairs(&modifier.set),
        remove: modifier.remove.clone(),
    }
}
