//! What makes a route unacceptable before anybody looks at its parents.

use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use regex::RegexBuilder;

use crate::resources::annotations;
use crate::resources::route::{
    BackendRef, Filter, GrpcMatch, HeaderModifier, HttpMatch, NamedMatch, ParentKind, PathKind, PathModifier, Redirect,
    Route, RouteKind, Rule, RuleTimeouts, Rules, StreamRule, ValueKind,
};

/// Refuses what admission refuses for the kind of the route.
///
/// # Errors
/// The first offence, with its value and what would be accepted.
pub fn admit(route: &Route) -> Result<(), String> {
    at_most("spec.parentRefs", route.parents.len(), 32)?;
    at_most("spec.hostnames", route.hostnames.len(), 16)?;
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
        annotations::http_retry(&route.meta.annotations)?;
        annotations::grpc_retry(&route.meta.annotations)?;
        annotations::timeouts(&route.meta.annotations)?;
    }
    for hostname in &route.hostnames {
        let name = hostname.strip_prefix("*.").unwrap_or(hostname);
        if name.is_empty() || name.contains('*') || name.parse::<std::net::IpAddr>().is_ok() {
            return Err(format!("hostname {hostname:?} is neither a name nor `*.` and a suffix"));
        }
    }
    match &route.rules {
        Rules::Http(rules) => {
            at_most("spec.rules", rules.len(), 16)?;
            rules.iter().try_for_each(|rule| {
                http_matches(rule)?;
                admit_rule(rule, route.kind)
            })
        }
        Rules::Grpc(rules) => {
            at_most("spec.rules", rules.len(), 16)?;
            rules.iter().try_for_each(|rule| {
                grpc_matches(rule)?;
                admit_rule(rule, route.kind)
            })
        }
        Rules::Stream(rules) => one_rule(rules),
    }
}

/// Why some part of a route cannot be served for a parent of this kind, although a route with it can be stored: the first
/// reason.
pub fn unserved(route: &Route, parent: ParentKind) -> Option<String> {
    if let Some(unread) = &route.unread {
        return Some(unread.reason.clone());
    }
    let check = || match &route.rules {
        Rules::Http(rules) => rules.iter().try_for_each(|rule| {
            serve_http_rule(rule, route.kind, parent)?;
            serve_backends(&rule.backend_refs, route.kind, parent)
        }),
        Rules::Grpc(rules) => rules.iter().try_for_each(|rule| {
            serve_grpc_rule(rule, route.kind, parent)?;
            serve_backends(&rule.backend_refs, route.kind, parent)
        }),
        Rules::Stream(rules) => serve_stream_rules(rules),
    };
    check().err()
}

/// Fields of a route's rules that say nothing where all parents of ours are Servers: the inbound side sends to the
/// application alone, once, and as long as it takes.
pub fn unused_inbound(route: &Route) -> Option<&'static str> {
    let mut ours = route.parents.iter().filter(|parent| parent.kind != ParentKind::Foreign);
    if !route.is_ours() || ours.any(|parent| parent.kind != ParentKind::Server) {
        return None;
    }
    fn unused<M>(rules: &[Rule<M>]) -> Option<&'static str> {
        let of_rule = |rule: &Rule<M>| match rule.timeouts == RuleTimeouts::default() {
            true => rule.unimplemented_field(),
            false => Some("timeouts"),
        };
        rules.iter().find_map(of_rule)
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
/// Why requests of this rule are answered with an error.
pub fn serve_http_rule(rule: &Rule<HttpMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    serve_rule(rule, parent)?;
    http_matches(rule)?;
    rule.filters.iter().try_for_each(|one| serve_filter(one, route, parent))
}

/// The same of a rule of a GRPCRoute.
///
/// # Errors
/// As of [`serve_http_rule`].
pub fn serve_grpc_rule(rule: &Rule<GrpcMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    serve_rule(rule, parent)?;
    grpc_matches(rule)?;
    rule.filters.iter().try_for_each(|one| serve_filter(one, route, parent))
}

fn serve_rule<M>(rule: &Rule<M>, parent: ParentKind) -> Result<(), String> {
    if let Some(unread) = &rule.unread {
        return Err(unread.reason.clone());
    }
    match rule.unimplemented_field().filter(|_| parent != ParentKind::Server) {
        Some(field) => Err(format!("rules[].{field} is not supported by the mesh")),
        None => Ok(()),
    }
}

/// Checks the rules of a TLSRoute or a TCPRoute.
///
/// # Errors
/// Why its connections are closed.
pub fn serve_stream_rules(rules: &[StreamRule]) -> Result<(), String> {
    one_rule(rules)?;
    match rules.iter().find_map(|rule| rule.unread.as_ref()) {
        Some(unread) => Err(unread.reason.clone()),
        None => Ok(()),
    }
}

/// # Errors
/// The first match that cannot be read, and why.
pub fn http_matches(rule: &Rule<HttpMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(http_match)
}

/// # Errors
/// As of [`http_matches`].
pub fn grpc_matches(rule: &Rule<GrpcMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(grpc_match)
}

/// The inbound side sends nothing to backends, so that their filters say nothing there.
fn serve_backends(backends: &[BackendRef], route: RouteKind, parent: ParentKind) -> Result<(), String> {
    if parent == ParentKind::Server {
        return Ok(());
    }
    let filters = backends.iter().flat_map(|backend| &backend.filters);
    filters.into_iter().try_for_each(|one| serve_filter(one, route, parent))
}

/// Checks one filter against what the messages to proxies can carry.
///
/// # Errors
/// Why requests that it is for are answered with an error.
pub fn serve_filter(one: &Filter, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    let refused = |name: &str, place: &str| Err(format!("filter {name} is not supported {place}"));
    match one {
        Filter::Unsupported(name) => refused(name, "by the mesh"),
        Filter::ResponseHeaders(_) if parent == ParentKind::Server => {
            refused("ResponseHeaderModifier", "where the parent is a Server")
        }
        Filter::ResponseHeaders(_) if route == RouteKind::Grpc => refused("ResponseHeaderModifier", "in a GRPCRoute"),
        Filter::Redirect(_) if route == RouteKind::Grpc => refused("RequestRedirect", "in a GRPCRoute"),
        Filter::RequestHeaders(_) | Filter::ResponseHeaders(_) | Filter::Redirect(_) => filter(one, route),
    }
}

fn one_rule(rules: &[StreamRule]) -> Result<(), String> {
    match rules.len() {
        1 => Ok(()),
        n => Err(format!("spec.rules has {n} entries; exactly one is accepted")),
    }
}

fn at_most(field: &str, n_entries: usize, limit: usize) -> Result<(), String> {
    if n_entries > limit {
        Err(format!("{field} has {n_entries} entries; at most {limit} are accepted"))
    } else {
        Ok(())
    }
}

fn admit_rule<M>(rule: &Rule<M>, kind: RouteKind) -> Result<(), String> {
    at_most("rules[].matches", rule.matches.iter().flatten().count(), MATCHES)?;
    at_most("rules[].backendRefs", rule.backend_refs.len(), 16)?;
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
    rule.filters.iter().try_for_each(|admitted| filter(admitted, kind))?;
    for backend in &rule.backend_refs {
        backend.filters.iter().try_for_each(|admitted| filter(admitted, kind))?;
        if kind != RouteKind::PolicyHttp && backend.is_service() && backend.port.is_none() {
            return Err(format!("backendRef {} is a Service and needs a port", backend.name));
        }
    }
    Ok(())
}

fn http_match(matched: &HttpMatch) -> Result<(), String> {
    if let Some(path) = &matched.path {
        if path.kind == PathKind::RegularExpression {
            regex(&path.value)?;
        } else {
            absolute(&path.value)?;
        }
    }
    if let Some(method) = &matched.method {
        http::Method::from_bytes(method.as_bytes()).map_err(|_| format!("{method:?} is not an HTTP method"))?;
    }
    matched.headers.iter().try_for_each(header_match)?;
    matched.query_params.iter().try_for_each(value_match)
}

fn grpc_match(matched: &GrpcMatch) -> Result<(), String> {
    if matched
        .method
        .as_ref()
        .is_some_and(|method| method.kind == ValueKind::RegularExpression)
    {
        return Err("gRPC methods are matched by type Exact only".to_owned());
    }
    matched.headers.iter().try_for_each(header_match)
}

fn header_match(matched: &NamedMatch) -> Result<(), String> {
    header_name(&matched.name)?;
    value_match(matched)
}

fn value_match(matched: &NamedMatch) -> Result<(), String> {
    if matched.kind == ValueKind::RegularExpression {
        regex(&matched.value)
    } else {
        Ok(())
    }
}

/// Proxies compile an expression alone, and again between anchors.
pub(super) fn regex(text: &str) -> Result<(), String> {
    [text, &format!(r"\A(?:{text})\z")].into_iter().try_for_each(|text| {
        let compiled = RegexBuilder::new(text).size_limit(PATTERN_SIZE_LIMIT).build();
        compiled
            .map(|_| ())
            .map_err(|error| format!("regular expression {text:?}: {error}"))
    })
}

fn absolute(path: &str) -> Result<(), String> {
    if path.starts_with('/') {
        Ok(())
    } else {
        Err(format!("path {path:?} does not start with /"))
    }
}

fn filter(admitted: &Filter, kind: RouteKind) -> Result<(), String> {
    match admitted {
        Filter::RequestHeaders(modifier) | Filter::ResponseHeaders(modifier) => header_modifier(modifier),
        Filter::Redirect(redirect) => admit_redirect(redirect, kind),
        // Gateway routes may carry filters for others; such a route is admitted, and not served by us.
        Filter::Unsupported(name) if kind == RouteKind::PolicyHttp => Err(format!(
            "filter {name:?} is none of: RequestHeaderModifier, ResponseHeaderModifier, RequestRedirect"
        )),
        Filter::Unsupported(_) => Ok(()),
    }
}

fn header_modifier(modifier: &HeaderModifier) -> Result<(), String> {
    for header in modifier.add.iter().chain(&modifier.set) {
        header_name(&header.name)?;
        HeaderValue::from_str(&header.value)
            .map_err(|_| format!("header {}: {:?} is not a header value", header.name, header.value))?;
    }
    modifier.remove.iter().try_for_each(|name| header_name(name))
}

fn header_name(name: &str) -> Result<(), String> {
    HeaderName::from_bytes(name.as_bytes())
        .map(|_| ())
        .map_err(|_| format!("{name:?} is not a header name"))
}

fn admit_redirect(redirect: &Redirect, kind: RouteKind) -> Result<(), String> {
    if let Some(PathModifier::ReplaceFullPath { path } | PathModifier::ReplacePrefixMatch { prefix: path }) =
        &redirect.path
    {
        absolute(path)?;
        PathAndQuery::try_from(path.as_str()).map_err(|_| format!("path {path:?} is not one of a URI"))?;
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

/// What proxies compile an expression to at most, in bytes.
const PATTERN_SIZE_LIMIT: usize = 1 << 20;

/// The Gateway API raised its limit of 8 in a later version, and API servers check it before we do.
const MATCHES: usize = 64;
