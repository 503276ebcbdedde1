//! Tests with tables of messages: each message is accepted, or refused with a reason.

use proto::http_route::retry::{Conditions, conditions::StatusRange};
use proto::proxy_protocol::{Grpc, Http1, Kind, Opaque, Tls};
use tulle_proto::http_route::RequestRedirect;
use tulle_proto::meta::{Resource, metadata};

use super::tests::{
    backend_with_kind, balance, edited_retry, metadata, peak_ewma, policy_with_protocol, random_available_backends,
    unified, with_accrual, with_filter, with_rule,
};
use super::*;

/// The reason why a policy is refused; empty if it is accepted.
fn reason(message: proto::OutboundPolicy) -> String {
    client_policy(message)
        .err()
        .map_or_else(String::new, |error| format!("{:#}", anyhow::Error::new(error)))
}

fn assert_reasons(cases: impl IntoIterator<Item = (proto::OutboundPolicy, &'static str)>) {
    for (message, expected) in cases {
        let reason = reason(message);
        assert_eq!(reason.is_empty(), expected.is_empty(), "{expected:?}: {reason}");
        assert!(reason.contains(expected), "{reason} does not say {expected:?}");
    }
}

#[test]
fn a_resource_needs_group_kind_namespace_and_name() {
    type Change = fn(&mut Resource);
    let cases: [(Change, &str); 6] = [
        (|resource| resource.group.clear(), "metadata.group is missing"),
        (|resource| resource.kind.clear(), "metadata.kind is missing"),
        (|resource| resource.name.clear(), "metadata.name is missing"),
        (|resource| resource.namespace.clear(), "metadata.namespace is missing"),
        (|resource| resource.port = 65_536, "metadata.port is \"65536\""),
        (|resource| (resource.port, resource.section) = (80, "http".into()), ""),
    ];
    for (edit, expected) in cases {
        let mut policy = policy_with_protocol(Some(Kind::Tls(Tls::default())));
        if let Some(Metadata {
            kind: Some(metadata::Kind::Resource(resource)),
        }) = &mut policy.metadata
        {
            edit(resource);
        }
        let reason = reason(policy);
        assert_eq!(reason.is_empty(), expected.is_empty(), "{expected:?}: {reason}");
        assert!(reason.contains(expected), "{reason} does not say {expected:?}");
    }
    let mut default = policy_with_protocol(Some(Kind::Tls(Tls::default())));
    default.metadata = Some(Metadata {
        kind: Some(metadata::Kind::Default("fallback".into())),
    });
    assert_eq!(reason(default), "");
}

/// The backends of a route.
#[derive(Clone, Copy)]
enum Backends {
    /// No distribution.
    Missing,
    /// `FirstAvailable` or `RandomAvailable` of no backends.
    EmptyFirst,
    EmptyRandom,
    /// An entry without a backend.
    NoneInFirst,
    NoneInRandom,
    Valid,
}

/// Creates a function for each kind of route. It returns a policy with one route that has the given metadata and backends, and a
/// filter of unknown kind if `has_unknown_filter` is true.
macro_rules! route_kinds {
    ($($name:literal: $module:ident, $wrap:expr;)*) => {
        [$((
            $name,
            Box::new(|metadata, backends: Backends, has_unknown_filter: bool| {
                use proto::$module::distribution::{FirstAvailable, Kind as Distributed, RandomAvailable};
                let route_backend = |backend| proto::$module::RouteBackend { backend, ..Default::default() };
                let valid = || Some(backend_with_kind(balance("web.shop:80", Some(peak_ewma()))));
                let first = |backends| Some(Distributed::FirstAvailable(FirstAvailable { backends }));
                let random = |backends| Some(Distributed::RandomAvailable(RandomAvailable { backends }));
                let kind = match backends {
                    Backends::Missing => None,
                    Backends::EmptyFirst => first(vec![]),
                    Backends::EmptyRandom => random(vec![]),
                    Backends::NoneInFirst => first(vec![route_backend(None)]),
                    Backends::NoneInRandom => {
                        random(vec![proto::$module::WeightedRouteBackend { backend: None, weight: 1 }])
                    }
                    Backends::Valid => first(vec![route_backend(valid())]),
                };
                let rule = proto::$module::Rule {
                    backends: Some(proto::$module::Distribution { kind }),
                    filters: has_unknown_filter.then(Default::default).into_iter().collect(),
                    ..Default::default()
                };
                $wrap(metadata, rule)
            }) as Box<dyn Fn(Option<Metadata>, Backends, bool) -> proto::OutboundPolicy>,
        )),*]
    };
}

#[allow(clippy::needless_update)] // some kinds have fields that others lack
#[test]
fn routes_of_every_kind_need_metadata_backends_and_known_filters() {
    let kinds = route_kinds! {
        "HTTP": http_route, |metadata, rule| policy_with_protocol(Some(Kind::Http1(Http1 {
            routes: vec![proto::HttpRoute { metadata, rules: vec![rule], ..Default::default() }],
            failure_accrual: None,
        })));
        "gRPC": grpc_route, |metadata, rule| policy_with_protocol(Some(Kind::Grpc(Grpc {
            routes: vec![proto::GrpcRoute { metadata, rules: vec![rule], ..Default::default() }],
            failure_accrual: None,
        })));
        "bytes": opaque_route, |metadata, rule| policy_with_protocol(Some(Kind::Opaque(Opaque {
            routes: vec![proto::OpaqueRoute { metadata, rules: vec![rule] }],
        })));
        "TLS": tls_route, |metadata, rule| policy_with_protocol(Some(Kind::Tls(Tls {
            routes: vec![proto::TlsRoute { metadata, rules: vec![rule], ..Default::default() }],
        })));
    };
    for (name, policy) in &kinds {
        for (message, expected) in [
            (policy(metadata("r"), Backends::Valid, false), ""),
            (policy(None, Backends::Valid, false), "metadata is missing"),
            (policy(metadata("r"), Backends::Missing, false), "backends is missing"),
            (
                policy(metadata("r"), Backends::EmptyFirst, false),
                "backends is missing",
            ),
            (
                policy(metadata("r"), Backends::EmptyRandom, false),
                "backends is missing",
            ),
            (
                policy(metadata("r"), Backends::NoneInFirst, false),
                "backend is missing",
            ),
            (
                policy(metadata("r"), Backends::NoneInRandom, false),
                "backend is missing",
            ),
            (
                policy(metadata("r"), Backends::Valid, true),
                "kind of a filter is missing or unknown to this proxy",
            ),
        ] {
            let reason = reason(message);
            assert_eq!(reason.is_empty(), expected.is_empty(), "{name}: {reason}");
            assert!(reason.contains(expected), "{name}: {reason} does not say {expected:?}");
        }
    }
    let tls = |rules| {
        let route = proto::TlsRoute {
            metadata: metadata("r"),
            rules: vec![proto::tls_route::Rule::default(); rules],
            ..Default::default()
        };
        reason(policy_with_protocol(Some(Kind::Tls(Tls { routes: vec![route] }))))
    };
    assert!(tls(0).contains("number of rules is \"0\"") && tls(2).contains("number of rules is \"2\""));
}

#[test]
fn values_out_of_range_are_refused() {
    let range = |start, end| {
        with_rule(|rule| {
            rule.retry = edited_retry(|retry| {
                retry.conditions = Some(Conditions {
                    status_ranges: vec![StatusRange { start, end }],
                });
            });
        })
    };
    let retries = |n| with_rule(|rule| rule.retry = edited_retry(|retry| retry.max_retries = n));
    let threshold = |rate| with_accrual(unified(|unified| unified.success_rate_threshold = rate));
    let window = |nanos| {
        let window = prost_types::Duration { seconds: 0, nanos };
        with_accrual(unified(|unified| unified.decay = Some(window)))
    };
    let requests = |n| with_accrual(unified(|unified| unified.min_requests = n));
    for (message, is_accepted) in [
        (range(1, 599), true),
        (range(503, 503), true),
        (range(504, 503), false),
        (range(1, 600), false),
        (retries(65_535), true),
        (retries(65_536), false),
        (threshold(0.0), true),
        (threshold(1.0), true),
        (threshold(-0.1), false),
        (threshold(f64::NAN), false),
        (window(10_000_000), true),
        (window(9_999_999), false),
        (requests(1_000_000), true),
        (requests(1_000_001), false),
        (
            with_rule(|rule| rule.backends = random_available_backends(&[u32::MAX, 0])),
            true,
        ),
        (
            with_rule(|rule| rule.backends = random_available_backends(&[u32::MAX, 1])),
            true,
        ),
    ] {
        assert_eq!(reason(message.clone()).is_empty(), is_accepted, "{message:?}");
    }
}

#[test]
fn matches_are_decoded_or_refused_with_the_reason() {
    use http_route::header_match::Value as HeaderValue;
    use http_route::path_match::Kind as Path;
    use http_route::query_param_match::Value as QueryValue;
    use http_route::{HeaderMatch, HttpRouteMatch, PathMatch, QueryParamMatch};
    use tulle_proto::http_types::{HttpMethod, http_method::Type as Method};

    let matching = |found: HttpRouteMatch| with_rule(|rule| rule.matches = vec![found]);
    let path = |kind| {
        matching(HttpRouteMatch {
            path: Some(PathMatch { kind }),
            ..Default::default()
        })
    };
    let header = |name: &str, value| {
        let name = name.into();
        matching(HttpRouteMatch {
            headers: vec![HeaderMatch { name, value }],
            ..Default::default()
        })
    };
    let query = |value| {
        let name = "q".into();
        matching(HttpRouteMatch {
            query_params: vec![QueryParamMatch { name, value }],
            ..Default::default()
        })
    };
    let method = |kind| {
        matching(HttpRouteMatch {
            method: Some(HttpMethod { r#type: kind }),
            ..Default::default()
        })
    };
    assert_reasons([
        (matching(HttpRouteMatch::default()), ""),
        (path(None), "path match is missing"),
        (path(Some(Path::Exact("/a".into()))), ""),
        (path(Some(Path::Prefix("/a".into()))), ""),
        (path(Some(Path::Regex("/a+".into()))), ""),
        (path(Some(Path::Regex("(".into()))), "path match is \"(\""),
        (header("x-a", None), "value of a header match is missing"),
        (
            header("x a", Some(HeaderValue::Exact(b"v".to_vec()))),
            "header name is \"x a\"",
        ),
        (header("x-a", Some(HeaderValue::Exact(b"v".to_vec()))), ""),
        (
            header("x-a", Some(HeaderValue::Regex("[".into()))),
            "header match is \"[\"",
        ),
        (query(None), "value of a query match is missing"),
        (query(Some(QueryValue::Exact("v".into()))), ""),
        (query(Some(QueryValue::Regex("[".into()))), "query match is \"[\""),
        (method(None), "method is missing"),
        (method(Some(Method::Registered(8))), ""),
        (method(Some(Method::Registered(9))), "method is \"9\""),
        (method(Some(Method::Unregistered("PROPFIND".into()))), ""),
        (method(Some(Method::Unregistered("A B".into()))), "method is \"A B\""),
    ]);
}

#[test]
fn filters_are_decoded_or_refused_with_the_reason() {
    use http_route::{RequestHeaderModifier, ResponseHeaderModifier};
    use proto::http_route::filter::Kind as FilterKind;
    use tulle_proto::http_types::{Headers, Scheme, headers::Header, scheme};

    let headers = |name: &str, value: &[u8]| Headers {
        headers: vec![Header {
            name: name.into(),
            value: value.into(),
        }],
    };
    let adding = |name: &str, value: &[u8]| {
        with_filter(Some(FilterKind::RequestHeaderModifier(RequestHeaderModifier {
            add: Some(headers(name, value)),
            ..Default::default()
        })))
    };
    let setting = |name: &str| {
        with_filter(Some(FilterKind::ResponseHeaderModifier(ResponseHeaderModifier {
            set: Some(headers(name, b"v")),
            remove: vec!["x-gone".into()],
            ..Default::default()
        })))
    };
    let redirect = |edit: &dyn Fn(&mut RequestRedirect)| {
        let mut redirect = RequestRedirect::default();
        edit(&mut redirect);
        with_filter(Some(FilterKind::Redirect(redirect)))
    };
    let to_scheme = |kind: Option<scheme::Type>| redirect(&|to| to.scheme = Some(Scheme { r#type: kind.clone() }));
    assert_reasons([
        (adding("x-a", b"v"), ""),
        (adding("x a", b"v"), "header name is \"x a\""),
        (adding("x-a", b"\n"), "header value is"),
        (setting("x-a"), ""),
        (setting(""), "header name is \"\""),
        (redirect(&|_| ()), ""),
        (redirect(&|to| to.status = 308), ""),
        (redirect(&|to| to.status = 100), "redirect status is \"100\""),
        (redirect(&|to| to.port = 65_536), "redirect port is \"65536\""),
        (redirect(&|to| to.host = "a.test".into()), ""),
        (redirect(&|to| to.host = "[fd00::1]".into()), ""),
        (redirect(&|to| to.host = "a b".into()), "redirect host is \"a b\""),
        (
            redirect(&|to| to.host = "a.test:81".into()),
            "redirect host is \"a.test:81\"",
        ),
        (redirect(&|to| to.host = "user@a.test".into()), "redirect host is"),
        (to_scheme(None), "scheme is missing"),
        (to_scheme(Some(scheme::Type::Registered(1))), ""),
        (to_scheme(Some(scheme::Type::Registered(2))), "scheme is \"2\""),
        (to_scheme(Some(scheme::Type::Unregistered("gopher".into()))), ""),
        (
            to_scheme(Some(scheme::Type::Unregistered(":".into()))),
            "scheme is \":\"",
        ),
    ]);
}
