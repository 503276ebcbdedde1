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

/// A route that names a Server of its namespace.
pub(super) struct OfServer<'a> {
    pub(super) route: &'a Arc<Route>,
    /// Why the route is not served as it is written.
    pub(super) refusal: Option<Refusal>,
}

impl OfServer<'_> {
    /// What answers all requests of the route.
    fn failure(&self) -> Option<Filter> {
        match &self.refusal {
            // Of these, each rule tells for itself.
            None | Some(Refusal::Unsupported(_)) => None,
            Some(refusal) => Some(named_failure(self.route, self.route.kind, &refusal.to_string())),
        }
    }
}

/// Routes that name the Server, of its namespace, the oldest first. They are judged here, and not by their status, which
/// may not be written yet: without one of them requests would be served by other rules than those that somebody wrote.
pub(super) fn of_server<'a>(reader: &Reader<'a>, config: &Config, server: &Name) -> Vec<OfServer<'a>> {
    let judged = |route: &'a Arc<Route>| {
        let parents = route.parents.iter();
        let names = |parent: &&Parent| parent.kind == ParentKind::Server && parent.name == *server;
        let mut judged: Vec<_> = parents
            .filter(names)
            .map(|parent| acceptance::of_route(reader, settings(config), route, parent, []).err())
            .collect();
        // A route that names the Server twice is served if one of the references is right.
        judged.sort_by_key(Option::is_some);
        judged.into_iter().next().map(|refusal| OfServer { route, refusal })
    };
    let routes = reader.routes_of(ParentKind::Server, server);
    let own = routes
        .into_iter()
        .filter(|route| *route.meta.namespace() == server.namespace);
    own.filter_map(judged).collect()
}

/// The first route whose kind the Server's protocol does not have.
pub(super) fn of_other_protocol<'r, 'a>(routes: &'r [OfServer<'a>]) -> Option<&'r OfServer<'a>> {
    let is_of_other = |route: &&OfServer<'_>| matches!(route.refusal, Some(Refusal::Protocol(_)));
    routes.iter().find(is_of_other)
}

/// What the status says, or what it would say if somebody wrote it. A route that asks for what no proxy does is attached,
/// because without it requests would be served by other rules than those that somebody wrote for them.
fn is_attached(reader: &Reader<'_>, config: &Config, route: &Route, parent: &Parent, rivals: &[&Arc<Route>]) -> bool {
    match parent.acceptance {
        Acceptance::Accepted | Acceptance::Unsupported => true,
        Acceptance::Refused => false,
        Acceptance::Unjudged => {
            let rivals = rivals.iter().map(|rival| &***rival);
            let judged = acceptance::of_route(reader, settings(config), route, parent, rivals);
            matches!(judged, Ok(()) | Err(Refusal::Unsupported(_)))
        }
    }
}

fn settings(config: &Config) -> Settings<'_> {
    Settings {
        cluster_networks: &config.cluster_networks,
        global_egress_namespace: &config.global_egress_namespace,
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
        Err(reason) => vec![named_failure(route, route.kind, &reason)],
    }
}

/// In the manner of a protocol, which is not always the route's.
fn named_failure(route: &Route, protocol: RouteKind, reason: &str) -> Filter {
    failure(protocol, format!("{} {}: {reason}", route.kind.kind(), route.meta.name))
}

/// Filters of a rule of a Server's HTTPRoute.
pub(super) fn inbound_http_filters(of_server: &OfServer<'_>, rule: &raw::Rule<raw::HttpMatch>) -> Vec<Filter> {
    match of_server.failure() {
        Some(failure) => vec![failure],
        None => http_filters(of_server.route, rule, ParentKind::Server),
    }
}

/// The same of a Server's GRPCRoute.
pub(super) fn inbound_grpc_filters(of_server: &OfServer<'_>, rule: &raw::Rule<raw::GrpcMatch>) -> Vec<Filter> {
    match of_server.failure() {
        Some(failure) => vec![failure],
        None => grpc_filters(of_server.route, rule, ParentKind::Server),
    }
}

/// The route for whose sake all requests of a Server are answered with an error, in the manner of the Server's protocol:
/// its kind is none of the protocol's, or it cannot be told which requests it is for.
pub(super) fn failing_all<'a>(routes: &[OfServer<'a>], protocol: RouteKind) -> Option<(&'a Arc<Route>, Filter)> {
    if let Some(OfServer { route, refusal }) = of_other_protocol(routes) {
        let reason = refusal.as_ref().map(ToString::to_string).unwrap_or_default();
        return Some((route, named_failure(route, protocol, &reason)));
    }
    let route = of_unknown_requests(routes)?;
    let reason = route_admission::unserved(route, ParentKind::Server);
    let reason = reason.as_deref().unwrap_or("it cannot be served");
    Some((route, named_failure(route, protocol, reason)))
}

/// The first route of which it cannot be told which requests it is for.
fn of_unknown_requests<'a>(routes: &[OfServer<'a>]) -> Option<&'a Arc<Route>> {
    let is_unknown =
        |unread: Option<&raw::Unread>| unread.is_some_and(|unread| unread.requests == raw::Requests::Unknown);
    let has_unknown = |route: &&Arc<Route>| {
        let rules_are_unknown = match &route.rules {
            raw::Rules::Http(rules) => rules
                .iter()
                .any(|rule| is_unknown(rule.unread.as_ref()) || route_admission::http_matches(rule).is_err()),
            raw::Rules::Grpc(rules) => rules
                .iter()
                .any(|rule| is_unknown(rule.unread.as_ref()) || route_admission::grpc_matches(rule).is_err()),
            raw::Rules::Stream(_) => false,
        };
        rules_are_unknown || is_unknown(route.unread.as_ref())
    };
    routes.iter().map(|of_server| of_server.route).find(has_unknown)
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
