//! Tests of messages that are incomplete or invalid, and of the reasons with which they are refused.

use proto::backend::balance_p2c::{Load, PeakEwma};
use proto::backend::{BalanceP2c, Kind as BackendKind};
use proto::failure_accrual::{ConsecutiveFailures, Kind as AccrualKind};
use proto::filter_extension::{Cors, Kind as ExtensionKind, RequestMirror, UrlRewrite};
use proto::http_route::filter::Kind as FilterKind;
use proto::http_route::retry::{Conditions, conditions::StatusRange};
use proto::proxy_protocol::{Detect, Kind};
use tulle_proto::destination::{Http2ClientParams, http2_client_params};
use tulle_proto::http_route::{HttpFailureInjector, PathModifier, Ratio, RequestRedirect, path_modifier};
use tulle_proto::meta::metadata;

use super::tests::{
    backend_with_kind, backoff, balance, detect, edited_retry, extension, first_available_backends, opaque, peak_ewma,
    policy_with_protocol, random_available_backends, request_mirror, route_backend, seconds, unified, with_accrual,
    with_backend, with_cors, with_extension, with_filter, with_rule,
};
use super::*;

fn assert_refused(cases: impl IntoIterator<Item = (&'static str, proto::OutboundPolicy)>) {
    for (reason, message) in cases {
        let error = anyhow::Error::new(client_policy(message).unwrap_err());
        assert!(
            format!("{error:#}").contains(reason),
            "{error:#} does not say {reason:?}"
        );
    }
}

fn with_backend_extension(kind: ExtensionKind) -> proto::OutboundPolicy {
    with_rule(|rule| {
        rule.backends = first_available_backends(vec![proto::http_route::RouteBackend {
            filter_extensions: extension(Some(kind)),
            ..route_backend(backend_with_kind(balance("web.shop:80", Some(peak_ewma()))))
        }]);
    })
}

#[test]
fn incomplete_policies_are_refused_with_the_reason() {
    let with_detect = |edit: fn(&mut Detect)| {
        let mut message = detect();
        edit(&mut message);
        policy_with_protocol(Some(Kind::Detect(message)))
    };
    let no_metadata = proto::OutboundPolicy {
        metadata: None,
        ..policy_with_protocol(None)
    };
    let no_namespace = {
        let mut policy = policy_with_protocol(Some(Kind::Opaque(opaque(1, 1))));
        let Some(Metadata {
            kind: Some(metadata::Kind::Resource(resource)),
        }) = &mut policy.metadata
        else {
            panic!()
        };
        resource.namespace.clear();
        policy
    };
    assert_refused([
        ("metadata is missing", no_metadata),
        ("metadata.namespace is missing", no_namespace),
        ("protocol is missing", policy_with_protocol(None)),
        ("detect timeout is missing", with_detect(|detect| detect.timeout = None)),
        (
            "protocol.detect.http1 is missing",
            with_detect(|detect| detect.http1 = None),
        ),
        (
            "protocol.detect.http2 is missing",
            with_detect(|detect| detect.http2 = None),
        ),
        (
            "protocol.detect.opaque is missing",
            with_detect(|detect| detect.opaque = None),
        ),
        (
            "number of opaque routes is \"2\"",
            policy_with_protocol(Some(Kind::Opaque(opaque(1, 2)))),
        ),
        (
            "number of rules is \"0\"",
            policy_with_protocol(Some(Kind::Opaque(opaque(0, 1)))),
        ),
        (
            "number of rules is \"2\"",
            policy_with_protocol(Some(Kind::Opaque(opaque(2, 1)))),
        ),
        ("backends is missing", with_rule(|rule| rule.backends = None)),
        (
            "backends is missing",
            with_rule(|rule| rule.backends = first_available_backends(vec![])),
        ),
        (
            "backends is missing",
            with_rule(|rule| rule.backends = random_available_backends(&[])),
        ),
        (
            "backend is missing",
            with_rule(|rule| rule.backends = first_available_backends(vec![Default::default()])),
        ),
    ]);
}

#[test]
fn incomplete_backends_are_refused_with_the_reason() {
    let with_kind = |kind| with_backend(|backend| backend.kind = kind);
    let no_failfast_timeout = proto::Queue {
        capacity: 1,
        failfast_timeout: None,
    };
    let no_decay = Load::PeakEwma(PeakEwma {
        default_rtt: seconds(1),
        decay: None,
    });
    let negative_rtt = Load::PeakEwma(PeakEwma {
        default_rtt: seconds(-1),
        decay: seconds(1),
    });
    let no_discovery = BalanceP2c {
        discovery: None,
        load: Some(peak_ewma()),
    };
    let no_keep_alive_timeout = WeightedAddr {
        addr: Some(std::net::SocketAddr::from(([10, 0, 0, 1], 80)).into()),
        http2: Some(Http2ClientParams {
            keep_alive: Some(http2_client_params::KeepAlive {
                interval: seconds(10),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    assert_refused([
        ("metadata is missing", with_backend(|backend| backend.metadata = None)),
        ("queue is missing", with_backend(|backend| backend.queue = None)),
        (
            "failfast timeout is missing",
            with_backend(|backend| backend.queue = Some(no_failfast_timeout)),
        ),
        ("balancer.load is missing", with_kind(balance("web:80", None))),
        ("decay is missing", with_kind(balance("web:80", Some(no_decay)))),
        ("invalid default RTT", with_kind(balance("web:80", Some(negative_rtt)))),
        (
            "balancer.discovery.path is missing",
            with_kind(balance("", Some(peak_ewma()))),
        ),
        (
            "balancer.discovery is missing",
            with_kind(Some(BackendKind::Balancer(no_discovery))),
        ),
        (
            "address of an endpoint is missing",
            with_kind(Some(BackendKind::Forward(WeightedAddr::default()))),
        ),
        (
            "HTTP/2 keep-alive timeout of an endpoint is missing",
            with_kind(Some(BackendKind::Forward(no_keep_alive_timeout))),
        ),
    ]);
}

#[test]
fn incomplete_failure_accrual_is_refused_with_the_reason() {
    let consecutive = |backoff| {
        with_accrual(Some(AccrualKind::ConsecutiveFailures(ConsecutiveFailures {
            max_failures: 1,
            backoff,
        })))
    };
    let backoff_of = |edit: fn(&mut proto::ExponentialBackoff)| {
        let mut message = backoff().unwrap();
        edit(&mut message);
        consecutive(Some(message))
    };
    assert_refused([
        ("failure accrual is missing", with_accrual(None)),
        ("failure_accrual.backoff is missing", consecutive(None)),
        (
            "min backoff is missing",
            backoff_of(|backoff| backoff.min_backoff = None),
        ),
        (
            "max backoff is missing",
            backoff_of(|backoff| backoff.max_backoff = None),
        ),
        (
            "max backoff is \"500ms\"",
            backoff_of(|backoff| {
                backoff.max_backoff = Some(prost_types::Duration {
                    seconds: 0,
                    nanos: 500_000_000,
                });
            }),
        ),
        (
            "jitter ratio is \"NaN\"",
            backoff_of(|backoff| backoff.jitter_ratio = f32::NAN),
        ),
        (
            "jitter ratio is \"-1\"",
            backoff_of(|backoff| backoff.jitter_ratio = -1.0),
        ),
        (
            "success rate threshold is \"1.5\"",
            with_accrual(unified(|unified| unified.success_rate_threshold = 1.5)),
        ),
        (
            "decay of a failure accrual is \"0ns\"",
            with_accrual(unified(|unified| unified.decay = seconds(0))),
        ),
        (
            "min requests is \"1000001\"",
            with_accrual(unified(|unified| unified.min_requests = 1_000_001)),
        ),
        (
            "failure_accrual.backoff is missing",
            with_accrual(unified(|unified| unified.backoff = None)),
        ),
    ]);
}

#[test]
fn incomplete_retries_are_refused_with_the_reason() {
    let with_retry = |edit: fn(&mut proto::http_route::Retry)| with_rule(|rule| rule.retry = edited_retry(edit));
    assert_refused([
        (
            "retry.conditions is missing",
            with_retry(|retry| retry.conditions = None),
        ),
        (
            "max retries is \"65536\"",
            with_retry(|retry| retry.max_retries = 65_536),
        ),
        (
            "status range of a retry is \"0-599\"",
            with_retry(|retry| {
                retry.conditions = Some(Conditions {
                    status_ranges: vec![StatusRange { start: 0, end: 599 }],
                });
            }),
        ),
        (
            "status range of a retry is \"500-600\"",
            with_retry(|retry| {
                retry.conditions = Some(Conditions {
                    status_ranges: vec![StatusRange { start: 500, end: 600 }],
                });
            }),
        ),
    ]);
}

#[test]
fn incomplete_filters_are_refused_with_the_reason() {
    let redirect = |replace| {
        with_filter(Some(FilterKind::Redirect(RequestRedirect {
            path: Some(PathModifier { replace }),
            ..Default::default()
        })))
    };
    let failure = |status, ratio| {
        with_filter(Some(FilterKind::FailureInjector(HttpFailureInjector {
            status,
            message: String::new(),
            ratio,
        })))
    };
    let ratio = |numerator, denominator| Some(Ratio { numerator, denominator });
    assert_refused([
        (
            "kind of a filter is missing or unknown to this proxy",
            with_filter(None),
        ),
        ("replacement of a path is missing", redirect(None)),
        (
            "replacement of a path is \"x\"",
            redirect(Some(path_modifier::Replace::Full("x".into()))),
        ),
        (
            "replacement of a path is \"\"",
            redirect(Some(path_modifier::Replace::Prefix(String::new()))),
        ),
        ("injected status is \"99\"", failure(99, None)),
        ("failure ratio is \"1/0\"", failure(503, ratio(1, 0))),
        ("failure ratio is \"2/1\"", failure(503, ratio(2, 1))),
    ]);
}

#[test]
fn incomplete_extensions_are_refused_with_the_reason() {
    let rewrite = |host: &str, path| {
        with_extension(Some(ExtensionKind::UrlRewrite(UrlRewrite {
            host: host.into(),
            path,
        })))
    };
    let relative_path = PathModifier {
        replace: Some(path_modifier::Replace::Prefix("x".into())),
    };
    let ratio_above_one = RequestMirror {
        backend: Some(backend_with_kind(balance("web.shop:80", Some(peak_ewma())))),
        ratio: Some(Ratio {
            numerator: 3,
            denominator: 2,
        }),
    };
    assert_refused([
        (
            "kind of a filter is missing or unknown to this proxy",
            with_extension(None),
        ),
        ("rewritten host is \"a b\"", rewrite("a b", None)),
        ("replacement of a path is \"x\"", rewrite("", Some(relative_path))),
        (
            "backend is missing",
            with_extension(Some(ExtensionKind::RequestMirror(RequestMirror::default()))),
        ),
        (
            "mirror ratio is \"3/2\"",
            with_extension(Some(ExtensionKind::RequestMirror(ratio_above_one))),
        ),
        (
            "filter of a backend is \"RequestMirror\"",
            with_backend_extension(request_mirror()),
        ),
        (
            "filter of a backend is \"CORS\"",
            with_backend_extension(ExtensionKind::Cors(Cors::default())),
        ),
        (
            "allowed origin is \"a.test\"",
            with_cors(|cors| cors.allow_origins = vec!["a.test".into()]),
        ),
        (
            "header name is \"A B\"",
            with_cors(|cors| cors.allow_methods = vec!["A B".into()]),
        ),
    ]);
}
