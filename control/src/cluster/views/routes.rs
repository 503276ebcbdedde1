//! Route selection and conversion to model values, shared by the inbound and outbound views.

use std::sync::Arc;

use crate::cluster::config::Config;
use crate::cluster::store::reader::Reader;
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{
    Cors, Filter, GrpcMatch, HeaderModifier, HostMatch, HttpMatch, NamedMatch, PathMatch, PathModifier, Redirect,
    UrlRewrite, ValueMatch,
};
use crate::resources::acceptance::{self, AcceptanceSettings, ParentLookup, RouteRejection};
use crate::resources::meta::NamespacedName;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::server::Server;
use crate::resources::route as resource;
use crate::resources::route::{Acceptance, Parent, ParentKind, Route, RouteKind};
use crate::resources::route_support;
use crate::resources::service::Service;

/// Routes that apply to a port of the parent, oldest first.
pub(super) fn attached_routes<'a>(
    reader: &Reader<'a>,
    config: &Config,
    kind: ParentKind,
    parent: &NamespacedName,
    port: Option<u16>,
) -> Vec<&'a Arc<Route>> {
    let routes = reader.routes_of(kind, parent);
    let applies = |route: &Route| {
        route.parents.iter().any(|reference| {
            reference.kind == kind
                && reference.name == *parent
                && reference.section.is_none()
                && (reference.port.is_none() || reference.port == port)
                && is_attached(reader, config, route, reference, &routes)
        })
    };
    routes.iter().filter(|route| applies(route)).copied().collect()
}

/// A route that references a Server of its namespace.
pub(super) struct ServerRoute<'a> {
    pub(super) route: &'a Arc<Route>,
    /// The reason why the route is not accepted. `None` if it is accepted.
    pub(super) rejection: Option<RouteRejection>,
}

impl ServerRoute<'_> {
    /// The filter that makes all requests of a rejected route fail.
    fn rejection_filter(&self) -> Option<Filter> {
        match &self.rejection {
            // Unsupported parts are handled per rule.
            None | Some(RouteRejection::Unsupported(_)) => None,
            Some(rejection) => Some(route_failure_filter(
                self.route,
                self.route.kind.into(),
                &rejection.to_string(),
            )),
        }
    }
}

/// Routes of the Server's namespace that reference the Server, oldest first.
///
/// Acceptance is computed here, because the status may not be written yet. Leaving out a route without a status would let
/// other rules serve its requests.
pub(super) fn server_routes<'a>(reader: &Reader<'a>, config: &Config, server: &NamespacedName) -> Vec<ServerRoute<'a>> {
    let check = |route: &'a Arc<Route>| {
        let parents = route.parents.iter();
        let is_server = |parent: &&Parent| parent.kind == ParentKind::Server && parent.name == *server;
        let rejections = parents
            .filter(is_server)
            .map(|parent| acceptance::check_route(reader, acceptance_settings(config), route, parent, []).err());
        // One accepted reference is enough: it has no rejection (`None`), which sorts first.
        rejections
            .min_by_key(Option::is_some)
            .map(|rejection| ServerRoute { route, rejection })
    };
    let routes = reader.routes_of(ParentKind::Server, server);
    let routes_of_namespace = routes
        .into_iter()
        .filter(|route| *route.meta.namespace() == server.namespace);
    routes_of_namespace.filter_map(check).collect()
}

/// The first route whose kind does not fit the Server's protocol.
pub(super) fn find_protocol_mismatch<'r, 'a>(routes: &'r [ServerRoute<'a>]) -> Option<&'r ServerRoute<'a>> {
    let is_protocol_mismatch =
        |route: &&ServerRoute<'_>| matches!(route.rejection, Some(RouteRejection::ProtocolMismatch(_)));
    routes.iter().find(is_protocol_mismatch)
}

/// Whether the parent accepts the route. On Kubernetes, the status of the route decides, and a route without a status is not
/// attached. For a source without statuses, this function applies the rules by which write-back would set the status.
///
/// Routes with unsupported parts are attached: leaving them out would let other rules serve their requests.
fn is_attached(
    reader: &Reader<'_>,
    config: &Config,
    route: &Route,
    parent: &Parent,
    competing_routes: &[&Arc<Route>],
) -> bool {
    match parent.acceptance {
        Acceptance::Accepted | Acceptance::Unsupported => true,
        Acceptance::NotAccepted => false,
        Acceptance::ComputedByViews => {
            let competing_routes = competing_routes.iter().map(|competing| &***competing);
            let checked = acceptance::check_route(reader, acceptance_settings(config), route, parent, competing_routes);
            matches!(checked, Ok(()) | Err(RouteRejection::Unsupported(_)))
        }
    }
}

fn acceptance_settings(config: &Config) -> AcceptanceSettings<'_> {
    AcceptanceSettings {
        cluster_networks: &config.cluster_networks,
        global_egress_namespace: &config.global_egress_namespace,
        default_opaque_ports: &config.default_opaque_ports,
    }
}

impl ParentLookup for Reader<'_> {
    fn server(&self, name: &NamespacedName) -> Option<&Server> {
        self.server(name).map(|server| &**server)
    }

    fn service(&self, name: &NamespacedName) -> Option<&Service> {
        self.service(name).map(|service| &**service)
    }

    fn egress_network(&self, name: &NamespacedName) -> Option<&EgressNetwork> {
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

/// Matches of an HTTP rule. A rule without matches matches all requests. A rule with an unreadable or invalid match also matches
/// all requests, and its filters make them fail.
pub(super) fn http_matches(rule: &resource::Rule<resource::HttpMatch>) -> Vec<HttpMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(http_match).collect();
    if matches.is_empty() || route_support::validate_http_matches(rule).is_err() {
        vec![HttpMatch::match_all()]
    } else {
        matches
    }
}

fn http_match(matched: &resource::HttpMatch) -> HttpMatch {
    let path = matched.path.as_ref().map(|path| match path.kind {
        resource::PathKind::Exact => PathMatch::Exact(path.value.clone()),
        resource::PathKind::PathPrefix => PathMatch::Prefix(path.value.clone()),
        resource::PathKind::RegularExpression => PathMatch::Regex(path.value.clone()),
    });
    HttpMatch {
        path: path.or_else(|| HttpMatch::match_all().path),
        headers: header_matches(&matched.headers),
        query_params: query_matches(&matched.query_params),
        method: matched.method.clone(),
    }
}

/// Matches of a gRPC rule. A rule without matches matches all requests. A rule with an unreadable or invalid match also matches
/// all requests, and its filters make them fail.
pub(super) fn grpc_matches(rule: &resource::Rule<resource::GrpcMatch>) -> Vec<GrpcMatch> {
    let matches: Vec<_> = rule.matches.iter().flatten().map(grpc_match).collect();
    if matches.is_empty() || route_support::validate_grpc_matches(rule).is_err() {
        vec![GrpcMatch::default()]
    } else {
        matches
    }
}

fn grpc_match(matched: &resource::GrpcMatch) -> GrpcMatch {
    let method = matched.method.as_ref();
    GrpcMatch {
        service: method.and_then(|method| method.service.clone()),
        method: method.and_then(|method| method.method.clone()),
        headers: header_matches(&matched.headers),
    }
}

/// Matches of headers. If several have the same name, the first applies; header names are case-insensitive.
fn header_matches(matches: &[resource::NamedMatch]) -> Vec<NamedMatch> {
    deduplicate_by_name(matches, str::eq_ignore_ascii_case)
}

fn query_matches(matches: &[resource::NamedMatch]) -> Vec<NamedMatch> {
    deduplicate_by_name(matches, |one, other| one == other)
}

fn deduplicate_by_name(matches: &[resource::NamedMatch], is_same: impl Fn(&str, &str) -> bool) -> Vec<NamedMatch> {
    let mut kept: Vec<NamedMatch> = Vec::new();
    for matched in matches {
        if !kept.iter().any(|earlier| is_same(&earlier.name, &matched.name)) {
            kept.push(named_match(matched));
        }
    }
    kept
}

fn named_match(matched: &resource::NamedMatch) -> NamedMatch {
    let value = match matched.kind {
        resource::ValueKind::Exact => ValueMatch::Exact(matched.value.clone()),
        resource::ValueKind::RegularExpression => ValueMatch::Regex(matched.value.clone()),
    };
    NamedMatch {
        name: matched.name.clone(),
        value,
    }
}

/// Filters of an HTTPRoute rule. A rule that is not supported gets one filter that makes its requests fail.
pub(super) fn http_filters(
    route: &Route,
    rule: &resource::Rule<resource::HttpMatch>,
    parent: ParentKind,
) -> Vec<Filter> {
    let support = route_support::check_http_rule(rule, route.kind, parent);
    filters_or_failure_filter(route, &rule.filters, support)
}

/// Filters of a GRPCRoute rule. A rule that is not supported gets one filter that makes its requests fail.
pub(super) fn grpc_filters(
    route: &Route,
    rule: &resource::Rule<resource::GrpcMatch>,
    parent: ParentKind,
) -> Vec<Filter> {
    let support = route_support::check_grpc_rule(rule, route.kind, parent);
    filters_or_failure_filter(route, &rule.filters, support)
}

/// Filters of a backend. Filters that are not supported are replaced by one that makes the requests fail.
pub(super) fn backend_filters(route: &Route, filters: &[resource::Filter], parent: ParentKind) -> Vec<Filter> {
    let mut filters_to_check = filters.iter();
    let support =
        filters_to_check.try_for_each(|filter| route_support::check_backend_filter_support(filter, route.kind, parent));
    filters_or_failure_filter(route, filters, support)
}

fn filters_or_failure_filter(route: &Route, filters: &[resource::Filter], support: Result<(), String>) -> Vec<Filter> {
    let support = match &route.unreadable {
        Some(unreadable) => Err(unreadable.reason.clone()),
        None => support,
    };
    match support {
        Ok(()) => filters.iter().filter_map(filter).collect(),
        Err(reason) => vec![route_failure_filter(route, route.kind.into(), &reason)],
    }
}

fn route_failure_filter(route: &Route, form: ErrorForm, reason: &str) -> Filter {
    failure_filter(form, format!("{} {}: {reason}", route.kind.kind(), route.meta.name))
}

/// Filters of an HTTPRoute rule attached to a Server.
pub(super) fn inbound_http_filters(
    server_route: &ServerRoute<'_>,
    rule: &resource::Rule<resource::HttpMatch>,
) -> Vec<Filter> {
    match server_route.rejection_filter() {
        Some(failure) => vec![failure],
        None => http_filters(server_route.route, rule, ParentKind::Server),
    }
}

/// Filters of a GRPCRoute rule attached to a Server.
pub(super) fn inbound_grpc_filters(
    server_route: &ServerRoute<'_>,
    rule: &resource::Rule<resource::GrpcMatch>,
) -> Vec<Filter> {
    match server_route.rejection_filter() {
        Some(failure) => vec![failure],
        None => grpc_filters(server_route.route, rule, ParentKind::Server),
    }
}

/// Finds a route that makes all requests of the Server fail, because the kind of the route does not fit the Server's protocol, or
/// because one of its matches is unreadable or invalid. Returns the route and the filter that makes the requests fail.
pub(super) fn find_server_wide_failure<'a>(
    routes: &[ServerRoute<'a>],
    form: ErrorForm,
) -> Option<(&'a Arc<Route>, Filter)> {
    if let Some(ServerRoute { route, rejection }) = find_protocol_mismatch(routes) {
        let reason = rejection.as_ref().map(ToString::to_string).unwrap_or_default();
        return Some((route, route_failure_filter(route, form, &reason)));
    }
    let route = find_unusable_match(routes)?;
    let reason = route_support::unsupported_reason(route, ParentKind::Server);
    let reason = reason.as_deref().unwrap_or("it cannot be served");
    Some((route, route_failure_filter(route, form, reason)))
}

/// The first route with an unreadable or invalid match, so that it is unknown which requests the route applies to.
fn find_unusable_match<'a>(routes: &[ServerRoute<'a>]) -> Option<&'a Arc<Route>> {
    let is_unreadable =
        |part: Option<&resource::UnreadablePart>| part.is_some_and(|unreadable| !unreadable.matches_are_readable);
    let has_unusable_match = |route: &&Arc<Route>| {
        let in_rules = match &route.rules {
            resource::Rules::Http(rules) => rules.iter().any(|rule| {
                is_unreadable(rule.unreadable.as_ref()) || route_support::validate_http_matches(rule).is_err()
            }),
            resource::Rules::Grpc(rules) => rules.iter().any(|rule| {
                is_unreadable(rule.unreadable.as_ref()) || route_support::validate_grpc_matches(rule).is_err()
            }),
            resource::Rules::Stream(_) => false,
        };
        in_rules || is_unreadable(route.unreadable.as_ref())
    };
    routes
        .iter()
        .map(|server_route| server_route.route)
        .find(has_unusable_match)
}

/// The form in which the client gets an error. It depends on the protocol of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorForm {
    Http,
    Grpc,
    /// The connection is closed.
    Stream,
}

impl From<RouteKind> for ErrorForm {
    fn from(kind: RouteKind) -> Self {
        match kind {
            RouteKind::PolicyHttp | RouteKind::GatewayHttp => Self::Http,
            RouteKind::Grpc => Self::Grpc,
            RouteKind::Tls | RouteKind::Tcp => Self::Stream,
        }
    }
}

/// A filter that answers with an error.
pub(super) fn failure_filter(form: ErrorForm, message: String) -> Filter {
    match form {
        ErrorForm::Http => Filter::FailHttp { status: 500, message },
        ErrorForm::Grpc => Filter::FailGrpc { code: 13, message },
        ErrorForm::Stream => Filter::FailStream { message },
    }
}

fn filter(filter: &resource::Filter) -> Option<Filter> {
    Some(match filter {
        resource::Filter::RequestHeaders(modifier) => Filter::RequestHeaders(header_modifier(modifier)),
        resource::Filter::ResponseHeaders(modifier) => Filter::ResponseHeaders(header_modifier(modifier)),
        resource::Filter::Redirect(redirect) => Filter::Redirect(Redirect {
            scheme: redirect.scheme.clone(),
            host: redirect.hostname.clone(),
            path: redirect.path.as_ref().map(path_modifier),
            port: redirect.port,
            status: redirect.status_code,
        }),
        resource::Filter::UrlRewrite(rewrite) => Filter::UrlRewrite(UrlRewrite {
            host: rewrite.hostname.clone(),
            path: rewrite.path.as_ref().map(path_modifier),
        }),
        resource::Filter::Cors(cors) => Filter::Cors(Cors {
            allow_origins: cors.allow_origins.clone(),
            allow_credentials: cors.allow_credentials,
            allow_methods: cors.allow_methods.clone(),
            allow_headers: cors.allow_headers.clone(),
            expose_headers: cors.expose_headers.clone(),
            max_age_seconds: cors.max_age,
        }),
        // A mirror is not a filter of the model, and `filters_or_failure_filter` has already replaced unsupported filters.
        resource::Filter::Mirror(_) | resource::Filter::Unsupported(_) => return None,
    })
}

fn path_modifier(modifier: &resource::PathModifier) -> PathModifier {
    match modifier {
        resource::PathModifier::ReplaceFullPath { path } => PathModifier::Full(path.clone()),
        // An empty prefix and `/` are equivalent; proxies accept `/` only.
        resource::PathModifier::ReplacePrefixMatch { prefix } if prefix.is_empty() => {
            PathModifier::Prefix("/".to_owned())
        }
        resource::PathModifier::ReplacePrefixMatch { prefix } => PathModifier::Prefix(prefix.clone()),
    }
}

fn header_modifier(modifier: &resource::HeaderModifier) -> HeaderModifier {
    // If several headers have the same name, the first applies.
    let pairs = |headers: &[resource::Header]| {
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
