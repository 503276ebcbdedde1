//! Validates routes without looking up their parents.
//!
//! `validate_*` functions are for admission only. `check_*` functions tell whether the mesh supports a part, which views and
//! statuses need, too.

use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use regex::RegexBuilder;

use crate::resources::annotations;
use crate::resources::route::{
    BackendRef, Filter, GrpcMatch, HeaderModifier, HttpMatch, NamedMatch, ParentKind, PathKind, PathModifier, Redirect,
    Route, RouteKind, Rule, RuleTimeouts, Rules, StreamRule, ValueKind,
};

/// Validates a route for admission.
///
/// # Errors
/// Fails at the first invalid value. The error has the value and the accepted form.
pub fn validate_route(route: &Route) -> Result<(), String> {
    validate_max_entries("spec.parentRefs", route.parents.len(), 32)?;
    validate_max_entries("spec.hostnames", route.hostnames.len(), 16)?;
    for parent in &route.parents {
        if parent.kind == ParentKind::EgressNetwork && parent.port.is_none() {
            return Err(format!(
                "parentRef {} is an EgressNetwork and needs a port",
                parent.name
            ));
        }
    }
    let outbound = |kind| matches!(kind, ParentKind::Service | ParentKind::EgressNetwork);
    if route.parents.iter().any(|parent| outbound(parent.kind)) {
        annotations::parse_http_retry(&route.meta.annotations)?;
        annotations::parse_grpc_retry(&route.meta.annotations)?;
        annotations::parse_timeouts(&route.meta.annotations)?;
    }
    for hostname in &route.hostnames {
        let name = hostname.strip_prefix("*.").unwrap_or(hostname);
        if name.is_empty() || name.contains('*') || name.parse::<std::net::IpAddr>().is_ok() {
            return Err(format!(
                "hostname {hostname:?} is invalid; use a name, or `*.` and a suffix"
            ));
        }
    }
    match &route.rules {
        Rules::Http(rules) => {
            validate_max_entries("spec.rules", rules.len(), 16)?;
            rules.iter().try_for_each(|rule| {
                check_http_matches(rule)?;
                validate_rule(rule, route.kind)
            })
        }
        Rules::Grpc(rules) => {
            validate_max_entries("spec.rules", rules.len(), 16)?;
            rules.iter().try_for_each(|rule| {
                check_grpc_matches(rule)?;
                validate_rule(rule, route.kind)
            })
        }
        Rules::Stream(rules) => check_single_rule(rules),
    }
}

/// Returns the first reason why the mesh does not support a part of a valid route for a parent of this kind.
pub fn unsupported_reason(route: &Route, parent: ParentKind) -> Option<String> {
    if let Some(unreadable) = &route.unreadable {
        return Some(unreadable.reason.clone());
    }
    let check = || match &route.rules {
        Rules::Http(rules) => rules.iter().try_for_each(|rule| {
            check_http_rule(rule, route.kind, parent)?;
            check_backend_filters(&rule.backend_refs, route.kind, parent)
        }),
        Rules::Grpc(rules) => rules.iter().try_for_each(|rule| {
            check_grpc_rule(rule, route.kind, parent)?;
            check_backend_filters(&rule.backend_refs, route.kind, parent)
        }),
        Rules::Stream(rules) => check_stream_rules(rules),
    };
    check().err()
}

/// Returns the first rule field that has no effect because all mesh parents are Servers, such as `timeouts`: the
/// inbound proxy forwards each request once, to the local application, without a timeout.
pub fn unused_inbound_field(route: &Route) -> Option<&'static str> {
    let mut mesh_parents = route.parents.iter().filter(|parent| parent.kind != ParentKind::Foreign);
    if !route.has_mesh_parent() || mesh_parents.any(|parent| parent.kind != ParentKind::Server) {
        return None;
    }
    fn unused<M>(rules: &[Rule<M>]) -> Option<&'static str> {
        let unused_field = |rule: &Rule<M>| match rule.timeouts == RuleTimeouts::default() {
            true => rule.unimplemented_field(),
            false => Some("timeouts"),
        };
        rules.iter().find_map(unused_field)
    }
    match &route.rules {
        Rules::Http(rules) => unused(rules),
        Rules::Grpc(rules) => unused(rules),
        Rules::Stream(_) => None,
    }
}

/// Checks the matches and filters of a rule.
///
/// # Errors
/// Fails if a match or filter is not supported. Requests that match the rule fail then.
pub fn check_http_rule(rule: &Rule<HttpMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    check_rule(rule, parent)?;
    check_http_matches(rule)?;
    rule.filters
        .iter()
        .try_for_each(|filter| check_filter_support(filter, route, parent))
}

/// Like [`check_http_rule`], for a rule of a GRPCRoute.
///
/// # Errors
/// As [`check_http_rule`].
pub fn check_grpc_rule(rule: &Rule<GrpcMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    check_rule(rule, parent)?;
    check_grpc_matches(rule)?;
    rule.filters
        .iter()
        .try_for_each(|filter| check_filter_support(filter, route, parent))
}

fn check_rule<M>(rule: &Rule<M>, parent: ParentKind) -> Result<(), String> {
    if let Some(unreadable) = &rule.unreadable {
        return Err(unreadable.reason.clone());
    }
    match rule.unimplemented_field().filter(|_| parent != ParentKind::Server) {
        Some(field) => Err(format!("rules[].{field} is not supported by the mesh")),
        None => Ok(()),
    }
}

/// Checks the rules of a TLSRoute or TCPRoute.
///
/// # Errors
/// Fails if the rules are not supported. The connections are closed then.
pub fn check_stream_rules(rules: &[StreamRule]) -> Result<(), String> {
    check_single_rule(rules)?;
    match rules.iter().find_map(|rule| rule.unreadable.as_ref()) {
        Some(unreadable) => Err(unreadable.reason.clone()),
        None => Ok(()),
    }
}

/// # Errors
/// Fails at the first invalid match.
pub fn check_http_matches(rule: &Rule<HttpMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(check_http_match)
}

/// # Errors
/// As [`check_http_matches`].
pub fn check_grpc_matches(rule: &Rule<GrpcMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(check_grpc_match)
}

/// Checks the filters of backends. The inbound proxy does not use backends, so the check is skipped for Servers.
fn check_backend_filters(backends: &[BackendRef], route: RouteKind, parent: ParentKind) -> Result<(), String> {
    if parent == ParentKind::Server {
        return Ok(());
    }
    let filters = backends.iter().flat_map(|backend| &backend.filters);
    filters
        .into_iter()
        .try_for_each(|filter| check_filter_support(filter, route, parent))
}

/// Checks whether the proxy API can express a filter.
///
/// # Errors
/// Fails if it cannot. Requests that match the filter's rule fail then.
pub fn check_filter_support(filter: &Filter, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    let unsupported = |name: &str, place: &str| Err(format!("filter {name} is not supported {place}"));
    match filter {
        Filter::Unsupported(name) => unsupported(name, "by the mesh"),
        Filter::ResponseHeaders(_) if parent == ParentKind::Server => {
            unsupported("ResponseHeaderModifier", "where the parent is a Server")
        }
        Filter::ResponseHeaders(_) if route == RouteKind::Grpc => {
            unsupported("ResponseHeaderModifier", "in a GRPCRoute")
        }
        Filter::Redirect(_) if route == RouteKind::Grpc => unsupported("RequestRedirect", "in a GRPCRoute"),
        Filter::RequestHeaders(_) | Filter::ResponseHeaders(_) | Filter::Redirect(_) => check_filter(filter, route),
    }
}

fn check_single_rule(rules: &[StreamRule]) -> Result<(), String> {
    match rules.len() {
        1 => Ok(()),
        n => Err(format!("spec.rules has {n} entries; exactly one is accepted")),
    }
}

fn validate_max_entries(field: &str, n_entries: usize, limit: usize) -> Result<(), String> {
    if n_entries > limit {
        Err(format!("{field} has {n_entries} entries; at most {limit} are accepted"))
    } else {
        Ok(())
    }
}

fn validate_rule<M>(rule: &Rule<M>, kind: RouteKind) -> Result<(), String> {
    validate_max_entries(
        "rules[].matches",
        rule.matches.iter().flatten().count(),
        MAX_MATCHES_PER_RULE,
    )?;
    validate_max_entries("rules[].backendRefs", rule.backend_refs.len(), 16)?;
    if let (Some(request), Some(backend)) = (rule.timeouts.request, rule.timeouts.backend_request)
        && !request.is_zero()
        && backend > request
    {
        return Err(format!(
            "timeouts.backendRequest of {backend:?} is longer than timeouts.request of {request:?}"
        ));
    }
    if let Some(field) = rule.unimplemented_field().filter(|_| kind == RouteKind::PolicyHttp) {
        return Err(format!("rules[].{field} is not supported by the mesh; leave it out"));
    }
    rule.filters.iter().try_for_each(|filter| check_filter(filter, kind))?;
    for backend in &rule.backend_refs {
        backend
            .filters
            .iter()
            .try_for_each(|filter| check_filter(filter, kind))?;
        if kind != RouteKind::PolicyHttp && backend.is_service() && backend.port.is_none() {
            return Err(format!("backendRef {} is a Service and needs a port", backend.name));
        }
    }
    Ok(())
}

fn check_http_match(condition: &HttpMatch) -> Result<(), String> {
    if let Some(path) = &condition.path {
        if path.kind == PathKind::RegularExpression {
            check_regex(&path.value)?;
        } else {
            check_absolute_path(&path.value)?;
        }
    }
    if let Some(method) = &condition.method {
        http::Method::from_bytes(method.as_bytes()).map_err(|_| format!("{method:?} is not an HTTP method"))?;
    }
    condition.headers.iter().try_for_each(check_header_match)?;
    condition.query_params.iter().try_for_each(check_value_match)
}

fn check_grpc_match(condition: &GrpcMatch) -> Result<(), String> {
    if condition
        .method
        .as_ref()
        .is_some_and(|method| method.kind == ValueKind::RegularExpression)
    {
        return Err("gRPC methods are matched by type Exact only".to_owned());
    }
    condition.headers.iter().try_for_each(check_header_match)
}

fn check_header_match(condition: &NamedMatch) -> Result<(), String> {
    check_header_name(&condition.name)?;
    check_value_match(condition)
}

fn check_value_match(condition: &NamedMatch) -> Result<(), String> {
    if condition.kind == ValueKind::RegularExpression {
        check_regex(&condition.value)
    } else {
        Ok(())
    }
}

/// Checks a regular expression both as written and between anchors, because proxies compile both forms.
pub(super) fn check_regex(text: &str) -> Result<(), String> {
    [text, &format!(r"\A(?:{text})\z")].into_iter().try_for_each(|text| {
        let compiled = RegexBuilder::new(text).size_limit(MAX_COMPILED_REGEX_BYTES).build();
        compiled
            .map(|_| ())
            .map_err(|error| format!("regular expression {text:?}: {error}"))
    })
}

fn check_absolute_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') {
        Ok(())
    } else {
        Err(format!("path {path:?} does not start with /"))
    }
}

fn check_filter(filter: &Filter, kind: RouteKind) -> Result<(), String> {
    match filter {
        Filter::RequestHeaders(modifier) | Filter::ResponseHeaders(modifier) => check_header_modifier(modifier),
        Filter::Redirect(redirect) => check_redirect(redirect, kind),
        // Gateway API routes can have filters for other implementations. Such a route is valid, and
        // `check_filter_support` decides about it.
        Filter::Unsupported(name) if kind == RouteKind::PolicyHttp => Err(format!(
            "filter {name:?} is none of: RequestHeaderModifier, ResponseHeaderModifier, RequestRedirect"
        )),
        Filter::Unsupported(_) => Ok(()),
    }
}

fn check_header_modifier(modifier: &HeaderModifier) -> Result<(), String> {
    for header in modifier.add.iter().chain(&modifier.set) {
        check_header_name(&header.name)?;
        HeaderValue::from_str(&header.value)
            .map_err(|_| format!("header {}: {:?} is not a header value", header.name, header.value))?;
    }
    modifier.remove.iter().try_for_each(|name| check_header_name(name))
}

fn check_header_name(name: &str) -> Result<(), String> {
    HeaderName::from_bytes(name.as_bytes())
        .map(|_| ())
        .map_err(|_| format!("{name:?} is not a header name"))
}

fn check_redirect(redirect: &Redirect, kind: RouteKind) -> Result<(), String> {
    if let Some(PathModifier::ReplaceFullPath { path } | PathModifier::ReplacePrefixMatch { prefix: path }) =
        &redirect.path
    {
        check_absolute_path(path)?;
        PathAndQuery::try_from(path.as_str()).map_err(|_| format!("path {path:?} is not a valid URI path"))?;
    }
    if let Some(hostname) = &redirect.hostname {
        let parsed = hostname.parse::<Authority>();
        parsed.map_err(|_| format!("redirect hostname {hostname:?} is not a host name"))?;
    }
    if let Some(scheme) = &redirect.scheme {
        http::uri::Scheme::try_from(scheme.as_str()).map_err(|_| format!("{scheme:?} is not a URI scheme"))?;
    }
    if redirect.port == Some(0) {
        return Err("redirect to port 0; accepted: 1-65535".to_owned());
    }
    match redirect.status_code {
        Some(code) if kind == RouteKind::PolicyHttp && !matches!(code, 301 | 302) => {
            Err(format!("redirect status {code}; accepted: 301, 302"))
        }
        Some(code) if !(300..=399).contains(&code) => Err(format!("redirect status {code}; accepted: 300-399")),
        _ => Ok(()),
    }
}

/// Maximum size of a compiled regular expression in proxies, in bytes.
const MAX_COMPILED_REGEX_BYTES: usize = 1 << 20;

/// A later version of the Gateway API has raised its limit of 8. API servers apply the limit of their version first.
const MAX_MATCHES_PER_RULE: usize = 64;
