//! JSON of the profile of a service or an address.

use serde_json::{Value, json};
use tulle_proto::destination::{
    DestinationProfile, RequestMatch, ResponseMatch, RetryBudget, Route, WeightedAddr, WeightedDst, protocol_hint,
    request_match, response_match, tls_identity,
};

use super::parts::{address, duration, float, list, metadata, method, object, optional};

pub(in super::super) fn profile(profile: &DestinationProfile) -> Value {
    object([
        ("fullyQualifiedName", json!(profile.fully_qualified_name)),
        ("opaqueProtocol", json!(profile.opaque_protocol)),
        ("parentRef", metadata(profile.parent_ref.as_ref())),
        ("profileRef", metadata(profile.profile_ref.as_ref())),
        ("endpoint", optional(profile.endpoint.as_ref(), endpoint)),
        ("retryBudget", optional(profile.retry_budget.as_ref(), retry_budget)),
        ("routes", list(&profile.routes, route)),
        ("dstOverrides", list(&profile.dst_overrides, destination)),
    ])
}

fn endpoint(endpoint: &WeightedAddr) -> Value {
    let identity = endpoint.tls_identity.as_ref().and_then(|tls| tls.strategy.as_ref());
    let protocol = endpoint.protocol_hint.and_then(|hint| hint.protocol);
    object([
        ("addr", optional(endpoint.addr.as_ref(), address)),
        ("weight", json!(endpoint.weight)),
        ("labels", json!(endpoint.metric_labels)),
        (
            "identity",
            optional(identity, |identity| match identity {
                tls_identity::Strategy::DnsLikeIdentity(dns) => json!(dns.name),
                tls_identity::Strategy::UriLikeIdentity(uri) => json!(uri.uri),
            }),
        ),
        (
            "protocolHint",
            optional(protocol.as_ref(), |protocol| match protocol {
                protocol_hint::Protocol::H2(_) => json!("h2"),
                protocol_hint::Protocol::Opaque(_) => json!("opaque"),
            }),
        ),
    ])
}

fn retry_budget(budget: &RetryBudget) -> Value {
    object([
        ("retryRatio", float(budget.retry_ratio)),
        ("minRetriesPerSecond", json!(budget.min_retries_per_second)),
        ("ttl", duration(budget.ttl.as_ref())),
    ])
}

fn route(route: &Route) -> Value {
    let class = |class: &tulle_proto::destination::ResponseClass| {
        object([
            (
                "condition",
                optional(class.condition.as_ref(), |condition| {
                    response_condition(condition, MAX_CONDITION_DEPTH)
                }),
            ),
            ("isFailure", json!(class.is_failure)),
        ])
    };
    object([
        (
            "condition",
            optional(route.condition.as_ref(), |condition| {
                request_condition(condition, MAX_CONDITION_DEPTH)
            }),
        ),
        ("responseClasses", list(&route.response_classes, class)),
        ("metricsLabels", json!(route.metrics_labels)),
        ("isRetryable", json!(route.is_retryable)),
        ("timeout", duration(route.timeout.as_ref())),
    ])
}

/// Converts the condition of a request. Conditions can be nested; the depth is limited, so that they cannot overflow the stack.
fn request_condition(condition: &RequestMatch, depth: usize) -> Value {
    use request_match::Match;
    let Some(deeper) = depth.checked_sub(1) else {
        return json!("…");
    };
    match &condition.r#match {
        None => Value::Null,
        Some(Match::All(all)) => json!({ "all": list(&all.matches, |inner| request_condition(inner, deeper)) }),
        Some(Match::Any(any)) => json!({ "any": list(&any.matches, |inner| request_condition(inner, deeper)) }),
        Some(Match::Not(not)) => json!({ "not": request_condition(not, deeper) }),
        Some(Match::Path(path)) => json!({ "path": path.regex }),
        Some(Match::Method(name)) => json!({ "method": method(name) }),
    }
}

fn response_condition(condition: &ResponseMatch, depth: usize) -> Value {
    use response_match::Match;
    let Some(deeper) = depth.checked_sub(1) else {
        return json!("…");
    };
    match &condition.r#match {
        None => Value::Null,
        Some(Match::All(all)) => json!({ "all": list(&all.matches, |inner| response_condition(inner, deeper)) }),
        Some(Match::Any(any)) => json!({ "any": list(&any.matches, |inner| response_condition(inner, deeper)) }),
        Some(Match::Not(not)) => json!({ "not": response_condition(not, deeper) }),
        Some(Match::Status(range)) => json!({ "status": format!("{}-{}", range.min, range.max) }),
    }
}

fn destination(destination: &WeightedDst) -> Value {
    object([
        ("authority", json!(destination.authority)),
        ("weight", json!(destination.weight)),
        ("backendRef", metadata(destination.backend_ref.as_ref())),
    ])
}

const MAX_CONDITION_DEPTH: usize = 32;

#[cfg(test)]
mod tests {
    use tulle_proto::destination::PathMatch;

    use super::*;

    #[test]
    fn a_profile_shows_its_routes_and_where_they_apply() {
        let path = RequestMatch {
            r#match: Some(request_match::Match::Path(PathMatch {
                regex: "/orders/.*".to_owned(),
            })),
        };
        let not = RequestMatch {
            r#match: Some(request_match::Match::Not(Box::new(path))),
        };
        let input = DestinationProfile {
            fully_qualified_name: "web.demo.svc.cluster.local".to_owned(),
            routes: vec![Route {
                condition: Some(not),
                is_retryable: true,
                ..Route::default()
            }],
            ..DestinationProfile::default()
        };
        let expected = json!({
            "fullyQualifiedName": "web.demo.svc.cluster.local",
            "opaqueProtocol": false,
            "routes": [{ "condition": { "not": { "path": "/orders/.*" } }, "isRetryable": true }],
        });
        assert_eq!(profile(&input), expected);
    }

    #[test]
    fn deeply_nested_conditions_are_truncated() {
        let mut condition = RequestMatch::default();
        for _ in 0..100 {
            condition = RequestMatch {
                r#match: Some(request_match::Match::Not(Box::new(condition))),
            };
        }
        assert!(
            request_condition(&condition, MAX_CONDITION_DEPTH)
                .to_string()
                .contains('…')
        );
    }
}
