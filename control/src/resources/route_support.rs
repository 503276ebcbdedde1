//! Checks which parts of routes are valid, and which the mesh supports, without looking up their parents.
//!
//! `validate_*` functions check only whether values are valid; admission, directories of manifests and views call them. `check_*`
//! functions check in addition whether the mesh supports a part for the kinds of its route and parent; views and statuses use
//! them.

use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use regex::RegexBuilder;

use crate::resources::annotations;
use crate::resources::policy::reference::GATEWAY_GROUP;
use crate::resources::route::{
    BackendRef, Cors, Filter, Fraction, GrpcMatch, HeaderModifier, HttpMatch, Mirror, NamedMatch, ParentKind, PathKind,
    PathModifier, Redirect, Route, RouteKind, Rule, RuleRetry, RuleTimeouts, Rules, StreamRule, UrlRewrite, ValueKind,
};

/// Validates a route for admission.
///
/// # Errors
/// Fails at the first invalid value. The error contains the value and the accepted form.
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
    if route.parents.iter().any(|parent| outbound(parent.kind))
        && let Some(invalid) = annotations::invalid_on_route(&route.meta.annotations).first()
    {
        return Err(invalid.to_string());
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
                validate_http_matches(rule)?;
                validate_rule(rule, route.kind)
            })
        }
        Rules::Grpc(rules) => {
            validate_max_entries("spec.rules", rules.len(), 16)?;
            rules.iter().try_for_each(|rule| {
                validate_grpc_matches(rule)?;
                validate_rule(rule, route.kind)
            })
        }
        Rules::Stream(rules) => validate_single_rule(rules),
    }
}

/// Returns the first reason why a part of the route is unreadable, or not supported for a parent of this kind.
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

/// Returns the rule fields that are set but have no effect because all mesh parents are Servers, such as `timeouts`: the
/// inbound proxy forwards each request once, to the local application, without a timeout.
pub fn fields_without_effect_on_servers(route: &Route) -> Vec<&'static str> {
    fn outbound_fields<M>(rules: &[Rule<M>]) -> Vec<&'static str> {
        let any_rule = |has_field: fn(&Rule<M>) -> bool| rules.iter().any(has_field);
        let fields = [
            ("timeouts", any_rule(|rule| rule.timeouts != RuleTimeouts::default())),
            ("retry", any_rule(|rule| rule.retry.is_some())),
            (
                "sessionPersistence",
                any_rule(|rule| rule.session_persistence.is_some()),
            ),
            ("backendRefs", any_rule(|rule| !rule.backend_refs.is_empty())),
        ];
        let set = fields.into_iter().filter(|(_, is_set)| *is_set);
        set.map(|(field, _)| field).collect()
    }
    match &route.rules {
        Rules::Http(rules) if route.has_only_server_parents() => outbound_fields(rules),
        Rules::Grpc(rules) if route.has_only_server_parents() => outbound_fields(rules),
        // No Server supports a TLSRoute or TCPRoute.
        Rules::Http(_) | Rules::Grpc(_) | Rules::Stream(_) => Vec::new(),
    }
}

/// Checks a rule, for a parent of this kind.
///
/// # Errors
/// Fails if the rule is unreadable, or if a field, match or filter is not supported. Requests that match the rule fail then.
pub fn check_http_rule(rule: &Rule<HttpMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    check_rule(rule, route, parent)?;
    validate_http_matches(rule)?;
    rule.filters
        .iter()
        .try_for_each(|filter| check_filter_support(filter, route, parent))
}

/// Like [`check_http_rule`], for a rule of a GRPCRoute.
///
/// # Errors
/// As [`check_http_rule`].
pub fn check_grpc_rule(rule: &Rule<GrpcMatch>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    check_rule(rule, route, parent)?;
    validate_grpc_matches(rule)?;
    rule.filters
        .iter()
        .try_for_each(|filter| check_filter_support(filter, route, parent))
}

fn check_rule<M>(rule: &Rule<M>, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    if let Some(unreadable) = &rule.unreadable {
        return Err(unreadable.reason.clone());
    }
    if parent == ParentKind::Server {
        return Ok(());
    }
    check_retry_and_unimplemented_fields(rule, route)
}

/// Checks `retry` and the other fields of a rule that proxies implement for some kinds of routes only, or not at all.
///
/// # Errors
/// Fails if proxies do not implement a field, or if its value is invalid.
pub fn check_retry_and_unimplemented_fields<M>(rule: &Rule<M>, route: RouteKind) -> Result<(), String> {
    match rule.unimplemented_field(route) {
        Some("retry") => Err(format!(
            "rules[].retry is supported only in an HTTPRoute of {GATEWAY_GROUP}; use the annotations retry.linkerd.io/*"
        )),
        Some(field) => Err(format!("rules[].{field} is not supported by the mesh; leave it out")),
        None => rule.retry.as_ref().map_or(Ok(()), validate_retry),
    }
}

/// # Errors
/// Fails if a code is not a status of an error.
fn validate_retry(retry: &RuleRetry) -> Result<(), String> {
    match retry.codes.iter().find(|code| !(400..=599).contains(*code)) {
        Some(code) => Err(format!("retry code {code}; accepted: 400-599")),
        None => Ok(()),
    }
}

/// Checks the rules of a TLSRoute or TCPRoute.
///
/// # Errors
/// Fails if the rules are not supported. The connections are closed then.
pub fn check_stream_rules(rules: &[StreamRule]) -> Result<(), String> {
    validate_single_rule(rules)?;
    match rules.iter().find_map(|rule| rule.unreadable.as_ref()) {
        Some(unreadable) => Err(unreadable.reason.clone()),
        None => Ok(()),
    }
}

/// # Errors
/// Fails at the first invalid match.
pub fn validate_http_matches(rule: &Rule<HttpMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(validate_http_match)
}

/// # Errors
/// As [`validate_http_matches`].
pub fn validate_grpc_matches(rule: &Rule<GrpcMatch>) -> Result<(), String> {
    rule.matches.iter().flatten().try_for_each(validate_grpc_match)
}

/// Checks the filters of backends. The inbound proxy does not use backends, so the check is skipped for Servers.
fn check_backend_filters(backends: &[BackendRef], route: RouteKind, parent: ParentKind) -> Result<(), String> {
    if parent == ParentKind::Server {
        return Ok(());
    }
    let mut filters = backends.iter().flat_map(|backend| &backend.filters);
    filters.try_for_each(|filter| check_backend_filter_support(filter, route, parent))
}

/// Like [`check_filter_support`], for a filter of a backend.
///
/// # Errors
/// As [`check_filter_support`].
pub fn check_backend_filter_support(filter: &Filter, route: RouteKind, parent: ParentKind) -> Result<(), String> {
    match filter {
        Filter::Mirror(_) => Err(not_in_backend("RequestMirror")),
        // A preflight request and the request that follows it can go to different backends.
        Filter::Cors(_) => Err(not_in_backend("CORS")),
        _ => check_filter_support(filter, route, parent),
    }
}

fn not_in_backend(filter: &str) -> String {
    format!("filter {filter} is not supported in a backendRef; add it to the filters of the rule")
}

/// Checks whether a filter is valid, and whether the proxy API can express it.
///
/// # Errors
/// Fails if not. Requests that match the filter's rule fail then.
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
        Filter::UrlRewrite(_) if route == RouteKind::Grpc => unsupported("URLRewrite", "in a GRPCRoute"),
        Filter::UrlRewrite(_) if parent == ParentKind::Server => {
            unsupported("URLRewrite", "where the parent is a Server")
        }
        Filter::Mirror(_) if parent == ParentKind::Server => {
            unsupported("RequestMirror", "where the parent is a Server")
        }
        Filter::Cors(_) if route == RouteKind::Grpc => unsupported("CORS", "in a GRPCRoute"),
        Filter::Cors(_) if parent == ParentKind::Server => unsupported("CORS", "where the parent is a Server"),
        Filter::RequestHeaders(_)
        | Filter::ResponseHeaders(_)
        | Filter::Redirect(_)
        | Filter::UrlRewrite(_)
        | Filter::Mirror(_)
        | Filter::Cors(_) => validate_filter(filter, route),
    }
}

fn validate_single_rule(rules: &[StreamRule]) -> Result<(), String> {
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
    // Rules of the Gateway API can have fields for other implementations.
    if kind == RouteKind::PolicyHttp {
        check_retry_and_unimplemented_fields(rule, kind)?;
    }
    rule.retry.as_ref().map_or(Ok(()), validate_retry)?;
    rule.filters
        .iter()
        .try_for_each(|filter| validate_filter(filter, kind))?;
    for backend in &rule.backend_refs {
        backend
            .filters
            .iter()
            .try_for_each(|filter| validate_filter(filter, kind))?;
        if kind != RouteKind::PolicyHttp && backend.is_service() && backend.port.is_none() {
            return Err(format!("backendRef {} is a Service and needs a port", backend.name));
        }
    }
    Ok(())
}

fn validate_http_match(condition: &HttpMatch) -> Result<(), String> {
    if let Some(path) = &condition.path {
        if path.kind == PathKind::RegularExpression {
            validate_regex(&path.value)?;
        } else {
            validate_absolute_path(&path.value)?;
        }
    }
    condition.method.as_deref().map_or(Ok(()), validate_method)?;
    condition.headers.iter().try_for_each(validate_header_match)?;
    condition.query_params.iter().try_for_each(validate_value_match)
}

fn validate_method(method: &str) -> Result<(), String> {
    http::Method::from_bytes(method.as_bytes())
        .map(|_| ())
        .map_err(|_| format!("{method:?} is not an HTTP method"))
}

fn validate_grpc_match(condition: &GrpcMatch) -> Result<(), String> {
    if condition
        .method
        .as_ref()
        .is_some_and(|method| method.kind == ValueKind::RegularExpression)
    {
        return Err("gRPC methods are matched by type Exact only".to_owned());
    }
    condition.headers.iter().try_for_each(validate_header_match)
}

fn validate_header_match(condition: &NamedMatch) -> Result<(), String> {
    validate_header_name(&condition.name)?;
    validate_value_match(condition)
}

fn validate_value_match(condition: &NamedMatch) -> Result<(), String> {
    if condition.kind == ValueKind::RegularExpression {
        validate_regex(&condition.value)
    } else {
        Ok(())
    }
}

/// Checks a regular expression both as written and between anchors, because proxies compile both forms.
pub(super) fn validate_regex(text: &str) -> Result<(), String> {
    [text, &format!(r"\A(?:{text})\z")].into_iter().try_for_each(|text| {
        let compiled = RegexBuilder::new(text).size_limit(MAX_COMPILED_REGEX_BYTES).build();
        compiled
            .map(|_| ())
            .map_err(|error| format!("regular expression {text:?}: {error}"))
    })
}

fn validate_absolute_path(path: &str) -> Result<(), String> {
    if path.starts_with('/') {
        Ok(())
    } else {
        Err(format!("path {path:?} does not start with /"))
    }
}

fn validate_filter(filter: &Filter, kind: RouteKind) -> Result<(), String> {
    match filter {
        Filter::RequestHeaders(modifier) | Filter::ResponseHeaders(modifier) => validate_header_modifier(modifier),
        Filter::Redirect(redirect) => validate_redirect(redirect, kind),
        Filter::UrlRewrite(_) if kind == RouteKind::PolicyHttp => Err(not_in_policy_route("URLRewrite")),
        Filter::UrlRewrite(rewrite) => validate_url_rewrite(rewrite),
        Filter::Mirror(_) if kind == RouteKind::PolicyHttp => Err(not_in_policy_route("RequestMirror")),
        Filter::Mirror(mirror) => validate_mirror(mirror),
        Filter::Cors(_) if kind == RouteKind::PolicyHttp => Err(not_in_policy_route("CORS")),
        Filter::Cors(cors) => validate_cors(cors),
        // Gateway API routes can have filters for other implementations. Such a route is valid, and
        // `check_filter_support` decides about it.
        Filter::Unsupported(name) if kind == RouteKind::PolicyHttp => Err(not_in_policy_route(name)),
        Filter::Unsupported(_) => Ok(()),
    }
}

fn not_in_policy_route(filter: &str) -> String {
    format!(
        "filter {filter:?} is none of: RequestHeaderModifier, ResponseHeaderModifier, RequestRedirect; for others, use an \
         HTTPRoute of gateway.networking.k8s.io"
    )
}

fn validate_url_rewrite(rewrite: &UrlRewrite) -> Result<(), String> {
    if let Some(path) = &rewrite.path {
        validate_path_modifier(path)?;
        // The query of the request is kept.
        if path.replacement().contains(['?', '#']) {
            return Err(format!(
                "path {:?} of urlRewrite has a query or fragment",
                path.replacement()
            ));
        }
    }
    rewrite
        .hostname
        .as_deref()
        .map_or(Ok(()), |hostname| validate_hostname("rewrite", hostname))
}

/// # Errors
/// Fails if the fraction is not between 0 and 1 or is given twice, or if the backend is a Service without a port.
pub fn validate_mirror(mirror: &Mirror) -> Result<(), String> {
    if mirror.percent.is_some() && mirror.fraction.is_some() {
        return Err("requestMirror has percent and fraction; only one of them is accepted".to_owned());
    }
    let Fraction { numerator, denominator } = mirror.fraction();
    if denominator == 0 || numerator > denominator {
        return Err(format!(
            "requestMirror copies {numerator} of {denominator} requests; accepted are fractions from 0 to 1"
        ));
    }
    if mirror.backend_ref.is_service() && mirror.backend_ref.port.is_none() {
        return Err(format!(
            "backendRef {} of requestMirror is a Service and needs a port",
            mirror.backend_ref.name
        ));
    }
    Ok(())
}

fn validate_cors(cors: &Cors) -> Result<(), String> {
    for (field, values) in [
        ("allowOrigins", &cors.allow_origins),
        ("allowMethods", &cors.allow_methods),
        ("allowHeaders", &cors.allow_headers),
    ] {
        if values.len() > 1 && values.iter().any(|value| value == "*") {
            return Err(format!(
                "cors.{field} has \"*\" and other values; \"*\" is accepted alone"
            ));
        }
    }
    cors.allow_origins
        .iter()
        .try_for_each(|origin| validate_origin(origin))?;
    cors.allow_methods
        .iter()
        .try_for_each(|method| validate_method(method))?;
    let headers = cors.allow_headers.iter().chain(&cors.expose_headers);
    headers.into_iter().try_for_each(|name| validate_header_name(name))?;
    match cors.max_age {
        0 => Err("cors.maxAge is 0; at least 1 is accepted".to_owned()),
        _ => Ok(()),
    }
}

/// Checks that an origin has the form that the CRD requires, and a valid port.
fn validate_origin(origin: &str) -> Result<(), String> {
    let is_label = |label: &str| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && label.bytes().all(is_valid)
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_authority = |authority: &str| {
        let (host, port) = authority.split_once(':').unwrap_or((authority, "80"));
        let name = host.strip_prefix("*.").unwrap_or(host);
        (host == "*" || name.split('.').all(is_label)) && is_port(port)
    };
    let authority = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    match origin == "*" || authority.is_some_and(is_authority) {
        true => Ok(()),
        false => Err(format!(
            "origin {origin:?} is not supported; accepted: \"*\", or http:// or https:// with a host, or with \"*.\" and a suffix"
        )),
    }
}

fn validate_path_modifier(modifier: &PathModifier) -> Result<(), String> {
    let path = modifier.replacement();
    // The empty prefix removes the matched one.
    if matches!(modifier, PathModifier::ReplacePrefixMatch { .. }) && path.is_empty() {
        return Ok(());
    }
    validate_absolute_path(path)?;
    match PathAndQuery::try_from(path) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("path {path:?} is not a valid URI path")),
    }
}

fn validate_hostname(filter: &str, hostname: &str) -> Result<(), String> {
    match hostname.parse::<Authority>() {
        Ok(authority) if authority.host() == hostname => Ok(()),
        _ => Err(format!("{filter} hostname {hostname:?} is not a host name")),
    }
}

fn validate_header_modifier(modifier: &HeaderModifier) -> Result<(), String> {
    let written = modifier.add.iter().chain(&modifier.set);
    let names = written.clone().map(|header| &header.name).chain(&modifier.remove);
    for name in names {
        if FRAMING_HEADERS.iter().any(|framing| name.eq_ignore_ascii_case(framing)) {
            return Err(format!(
                "header {name:?} frames the body and cannot be modified; remove it from the filter"
            ));
        }
    }
    for header in written {
        validate_header_name(&header.name)?;
        HeaderValue::from_str(&header.value)
            .map_err(|_| format!("header {}: {:?} is not a header value", header.name, header.value))?;
    }
    modifier.remove.iter().try_for_each(|name| validate_header_name(name))
}

fn validate_header_name(name: &str) -> Result<(), String> {
    HeaderName::from_bytes(name.as_bytes())
        .map(|_| ())
        .map_err(|_| format!("{name:?} is not a header name"))
}

fn validate_redirect(redirect: &Redirect, kind: RouteKind) -> Result<(), String> {
    redirect.path.as_ref().map_or(Ok(()), validate_path_modifier)?;
    redirect
        .hostname
        .as_deref()
        .map_or(Ok(()), |hostname| validate_hostname("redirect", hostname))?;
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

/// Headers by which a proxy and its peers find the end of a body. If one is modified, they can disagree about where the
/// body ends.
const FRAMING_HEADERS: [&str; 2] = ["content-length", "transfer-encoding"];

/// Maximum size of a compiled regular expression in proxies, in bytes.
const MAX_COMPILED_REGEX_BYTES: usize = 1 << 20;

/// Maximum number of matches of a rule, as in newer versions of the Gateway API. The CRDs of older versions allow 8.
const MAX_MATCHES_PER_RULE: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rewrite(rewrite: Value) -> Filter {
        serde_json::from_value(json!({"type": "URLRewrite", "urlRewrite": rewrite})).unwrap()
    }

    fn cors(cors: Value) -> Filter {
        serde_json::from_value(json!({"type": "CORS", "cors": cors})).unwrap()
    }

    fn mirror(fraction: Value) -> Filter {
        let mut mirror = json!({"backendRef": {"name": "web", "port": 80}});
        let fields = fraction.as_object().unwrap().clone();
        mirror.as_object_mut().unwrap().extend(fields);
        serde_json::from_value(json!({"type": "RequestMirror", "requestMirror": mirror})).unwrap()
    }

    #[test]
    fn rewrites_mirrors_and_cors_are_supported_for_outbound_requests() {
        let (host, all) = (rewrite(json!({"hostname": "x"})), mirror(json!({})));
        let cors = cors(json!({"allowOrigins": ["*"]}));
        for (filter, route, parent, is_supported) in [
            (&host, RouteKind::GatewayHttp, ParentKind::Service, true),
            (&host, RouteKind::GatewayHttp, ParentKind::EgressNetwork, true),
            (&host, RouteKind::GatewayHttp, ParentKind::Server, false),
            (&host, RouteKind::PolicyHttp, ParentKind::Service, false),
            (&host, RouteKind::Grpc, ParentKind::Service, false),
            (&all, RouteKind::GatewayHttp, ParentKind::Service, true),
            (&all, RouteKind::GatewayHttp, ParentKind::EgressNetwork, true),
            (&all, RouteKind::GatewayHttp, ParentKind::Server, false),
            (&all, RouteKind::PolicyHttp, ParentKind::Service, false),
            (&all, RouteKind::Grpc, ParentKind::Service, true),
            (&cors, RouteKind::GatewayHttp, ParentKind::Service, true),
            (&cors, RouteKind::GatewayHttp, ParentKind::EgressNetwork, true),
            (&cors, RouteKind::GatewayHttp, ParentKind::Server, false),
            (&cors, RouteKind::PolicyHttp, ParentKind::Service, false),
            (&cors, RouteKind::Grpc, ParentKind::Service, false),
        ] {
            let checked = check_filter_support(filter, route, parent);
            assert_eq!(
                checked.is_ok(),
                is_supported,
                "{filter:?} {route:?} {parent:?}: {checked:?}"
            );
        }
        let in_backend = |filter| check_backend_filter_support(filter, RouteKind::GatewayHttp, ParentKind::Service);
        assert_eq!(in_backend(&host), Ok(()));
        for filter in [&all, &cors] {
            assert!(in_backend(filter).unwrap_err().contains("the rule"));
        }
    }

    #[test]
    fn cors_origins_and_names_have_the_form_of_the_crd() {
        let origin = |origin: &str| json!({"allowOrigins": [origin]});
        for (value, expected) in [
            (json!({}), ""),
            (origin("*"), ""),
            (origin("https://a.b"), ""),
            (origin("http://*.a.b:8080"), ""),
            (origin("https://*"), ""),
            (origin("https://*:443"), ""),
            (origin("a.b"), "origin \"a.b\" is not supported"),
            (origin("ftp://a.b"), "origin"),
            (origin("https://"), "origin"),
            (origin("https://a.*"), "origin"),
            (origin("https://*a.b"), "origin"),
            (origin("https://a.b/"), "origin"),
            (origin("https://a.b:"), "origin"),
            (origin("https://a.b:65536"), "origin"),
            (origin("https://[::1]"), "origin"),
            (
                json!({"allowOrigins": ["*", "https://a.b"]}),
                "cors.allowOrigins has \"*\" and other values",
            ),
            (json!({"allowMethods": ["GET", "*"]}), "cors.allowMethods"),
            (json!({"allowMethods": ["GET", "PUT"]}), ""),
            (json!({"allowMethods": ["A B"]}), "is not an HTTP method"),
            (json!({"allowHeaders": ["*", "x-a"]}), "cors.allowHeaders"),
            (json!({"allowHeaders": ["x a"]}), "is not a header name"),
            (json!({"exposeHeaders": ["*", "x-a"]}), ""),
            (json!({"exposeHeaders": ["x a"]}), "is not a header name"),
            (json!({"maxAge": 0}), "cors.maxAge is 0"),
        ] {
            let checked = validate_filter(&cors(value.clone()), RouteKind::GatewayHttp);
            let reason = checked.err().unwrap_or_default();
            assert_eq!(reason.is_empty(), expected.is_empty(), "{value}: {reason}");
            assert!(reason.contains(expected), "{value}: {reason}");
        }
    }

    #[test]
    fn a_mirror_copies_a_fraction_from_0_to_1() {
        let fraction = |numerator: u32, denominator: u32| json!({"fraction": {"numerator": numerator, "denominator": denominator}});
        for (value, expected) in [
            (json!({}), Ok((100, 100))),
            (json!({"percent": 0}), Ok((0, 100))),
            (json!({"percent": 42}), Ok((42, 100))),
            (json!({"fraction": {"numerator": 5}}), Ok((5, 100))),
            (fraction(1, 3), Ok((1, 3))),
            (fraction(3, 3), Ok((3, 3))),
            (json!({"percent": 101}), Err("101 of 100")),
            (fraction(4, 3), Err("4 of 3")),
            (fraction(0, 0), Err("0 of 0")),
            (
                json!({"percent": 1, "fraction": {"numerator": 1}}),
                Err("only one of them"),
            ),
        ] {
            let Filter::Mirror(mirror) = mirror(value.clone()) else {
                panic!("{value}")
            };
            let Fraction { numerator, denominator } = mirror.fraction();
            match (validate_mirror(&mirror), expected) {
                (Ok(()), Ok(expected)) => assert_eq!((numerator, denominator), expected, "{value}"),
                (Err(reason), Err(expected)) => assert!(reason.contains(expected), "{value}: {reason}"),
                (checked, _) => panic!("{value}: {checked:?}"),
            }
        }
    }

    #[test]
    fn a_rewrite_needs_a_host_name_and_an_absolute_path() {
        let prefix = |prefix: &str| json!({"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": prefix}});
        let full = |path: &str| json!({"path": {"type": "ReplaceFullPath", "replaceFullPath": path}});
        for (value, is_valid) in [
            (json!({}), true),
            (json!({"hostname": "a.b"}), true),
            (json!({"hostname": "a b"}), false),
            (prefix("/x"), true),
            (prefix("/"), true),
            (prefix(""), true),
            (prefix("x"), false),
            (full("/x"), true),
            (full(""), false),
            (full("/x y"), false),
        ] {
            let checked = validate_filter(&rewrite(value.clone()), RouteKind::GatewayHttp);
            assert_eq!(checked.is_ok(), is_valid, "{value}: {checked:?}");
        }
    }
}
