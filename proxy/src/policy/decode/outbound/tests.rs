use proto::backend::balance_p2c::{Load, PeakEwma, PenaltyPeakEwma};
use proto::backend::endpoint_discovery::{DestinationGet, Kind as DiscoveryKind};
use proto::backend::{BalanceP2c, EndpointDiscovery, Kind as BackendKind};
use proto::failure_accrual::{ConsecutiveFailures, Kind as AccrualKind, Unified};
use proto::filter_extension::{Cors, Kind as ExtensionKind, RequestMirror, UrlRewrite};
use proto::http_route::distribution::{FirstAvailable, Kind as DistributionKind, RandomAvailable};
use proto::http_route::retry::{Conditions, conditions::StatusRange};
use proto::proxy_protocol::{Detect, Grpc, Http1, Http2, Kind, Opaque, Tls};
use tulle_proto::destination::WeightedAddr;
use tulle_proto::http_route::{PathModifier, path_modifier};
use tulle_proto::meta::{Resource, metadata};

use super::*;
use crate::policy::filter;

pub(super) fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

pub(super) fn metadata(name: &str) -> Option<Metadata> {
    let resource = Resource {
        group: "core".into(),
        kind: "Service".into(),
        name: name.into(),
        namespace: "shop".into(),
        ..Resource::default()
    };
    Some(Metadata {
        kind: Some(metadata::Kind::Resource(resource)),
    })
}

pub(super) fn peak_ewma() -> Load {
    Load::PeakEwma(PeakEwma {
        default_rtt: seconds(1),
        decay: seconds(10),
    })
}

pub(super) fn balance(path: &str, load: Option<Load>) -> Option<BackendKind> {
    let dst = DiscoveryKind::Dst(DestinationGet { path: path.into() });
    let discovery = Some(EndpointDiscovery { kind: Some(dst) });
    Some(BackendKind::Balancer(BalanceP2c { discovery, load }))
}

pub(super) fn backend_with_kind(kind: Option<BackendKind>) -> proto::Backend {
    let queue = Some(proto::Queue {
        capacity: 100,
        failfast_timeout: seconds(3),
    });
    proto::Backend {
        metadata: metadata("web"),
        kind,
        queue,
    }
}

pub(super) fn route_backend(backend: proto::Backend) -> proto::http_route::RouteBackend {
    proto::http_route::RouteBackend {
        backend: Some(backend),
        ..Default::default()
    }
}

pub(super) fn first_available_backends(
    backends: Vec<proto::http_route::RouteBackend>,
) -> Option<proto::http_route::Distribution> {
    let kind = Some(DistributionKind::FirstAvailable(FirstAvailable { backends }));
    Some(proto::http_route::Distribution { kind })
}

pub(super) fn random_available_backends(weights: &[u32]) -> Option<proto::http_route::Distribution> {
    let backends = weights.iter().map(|weight| proto::http_route::WeightedRouteBackend {
        backend: Some(route_backend(backend_with_kind(balance(
            "web.shop:80",
            Some(peak_ewma()),
        )))),
        weight: *weight,
    });
    let kind = Some(DistributionKind::RandomAvailable(RandomAvailable {
        backends: backends.collect(),
    }));
    Some(proto::http_route::Distribution { kind })
}

fn rule() -> proto::http_route::Rule {
    let backends = first_available_backends(vec![route_backend(backend_with_kind(balance(
        "web.shop:80",
        Some(peak_ewma()),
    )))]);
    proto::http_route::Rule {
        backends,
        ..Default::default()
    }
}

pub(super) fn opaque(rules: usize, routes: usize) -> Opaque {
    let kind = Some(proto::opaque_route::distribution::Kind::Empty(Default::default()));
    let rule = proto::opaque_route::Rule {
        backends: Some(proto::opaque_route::Distribution { kind }),
        filters: Vec::new(),
    };
    let route = proto::OpaqueRoute {
        metadata: metadata("o"),
        rules: vec![rule; rules],
    };
    Opaque {
        routes: vec![route; routes],
    }
}

pub(super) fn detect() -> Detect {
    Detect {
        timeout: seconds(10),
        opaque: Some(opaque(1, 1)),
        http1: Some(Http1::default()),
        http2: Some(Http2::default()),
    }
}

pub(super) fn backoff() -> Option<proto::ExponentialBackoff> {
    Some(proto::ExponentialBackoff {
        min_backoff: seconds(1),
        max_backoff: seconds(60),
        jitter_ratio: 0.5,
        respect_retry_after_hint: false,
    })
}

pub(super) fn unified(edit: impl FnOnce(&mut Unified)) -> Option<AccrualKind> {
    let mut unified = Unified {
        success_rate_threshold: 0.8,
        decay: None,
        min_requests: 5,
        max_consecutive_failures: 7,
        backoff: backoff(),
    };
    edit(&mut unified);
    Some(AccrualKind::Unified(unified))
}

pub(super) fn edited_retry(edit: impl FnOnce(&mut proto::http_route::Retry)) -> Option<proto::http_route::Retry> {
    let status_ranges = vec![StatusRange { start: 500, end: 599 }];
    let mut retry = proto::http_route::Retry {
        max_retries: 2,
        max_request_bytes: 1024,
        conditions: Some(Conditions { status_ranges }),
        timeout: seconds(1),
        backoff: backoff(),
    };
    edit(&mut retry);
    Some(retry)
}

pub(super) fn policy_with_protocol(kind: Option<Kind>) -> proto::OutboundPolicy {
    proto::OutboundPolicy {
        protocol: Some(proto::ProxyProtocol { kind }),
        metadata: metadata("web"),
    }
}

pub(super) fn with_accrual(kind: Option<AccrualKind>) -> proto::OutboundPolicy {
    let failure_accrual = Some(proto::FailureAccrual { kind, ejection: None });
    policy_with_protocol(Some(Kind::Http1(Http1 {
        routes: Vec::new(),
        failure_accrual,
    })))
}

pub(super) fn with_rule(edit: impl FnOnce(&mut proto::http_route::Rule)) -> proto::OutboundPolicy {
    let mut rule = rule();
    edit(&mut rule);
    let route = proto::HttpRoute {
        metadata: metadata("r"),
        hosts: Vec::new(),
        rules: vec![rule],
    };
    policy_with_protocol(Some(Kind::Http2(Http2 {
        routes: vec![route],
        failure_accrual: None,
    })))
}

pub(super) fn with_backend(edit: impl FnOnce(&mut proto::Backend)) -> proto::OutboundPolicy {
    let mut backend = backend_with_kind(balance("web.shop:80", Some(peak_ewma())));
    edit(&mut backend);
    with_rule(|rule| rule.backends = first_available_backends(vec![route_backend(backend)]))
}

pub(super) fn with_filter(kind: Option<proto::http_route::filter::Kind>) -> proto::OutboundPolicy {
    with_rule(|rule| rule.filters = vec![proto::http_route::Filter { kind }])
}

pub(super) fn extension(kind: Option<ExtensionKind>) -> Vec<proto::FilterExtension> {
    vec![proto::FilterExtension { kind }]
}

pub(super) fn with_extension(kind: Option<ExtensionKind>) -> proto::OutboundPolicy {
    with_rule(|rule| rule.filter_extensions = extension(kind))
}

pub(super) fn with_cors(edit: impl FnOnce(&mut Cors)) -> proto::OutboundPolicy {
    let mut cors = Cors::default();
    edit(&mut cors);
    with_extension(Some(ExtensionKind::Cors(cors)))
}

/// A mirror of all requests.
pub(super) fn request_mirror() -> ExtensionKind {
    ExtensionKind::RequestMirror(RequestMirror {
        backend: Some(backend_with_kind(balance("copy.shop:80", Some(peak_ewma())))),
        ratio: None,
    })
}

/// The action of the only rule of a policy.
fn action(message: proto::OutboundPolicy) -> RouteAction {
    let policy = client_policy(message).unwrap();
    let ClientProtocol::Http2(http) = policy.protocol else {
        panic!("{policy:?}")
    };
    http.routes[0].rules[0].action.clone()
}

fn only_backend(message: proto::OutboundPolicy) -> Arc<BackendSpec> {
    match action(message).backends {
        Distribution::FirstAvailable(backends) => backends[0].backend.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_complete_policy_is_decoded() {
    let policy = client_policy(policy_with_protocol(Some(Kind::Detect(detect())))).unwrap();
    assert_eq!(policy.meta.to_string(), "Service/web.shop");
    let ClientProtocol::Detect {
        timeout, opaque: route, ..
    } = &policy.protocol
    else {
        panic!()
    };
    assert_eq!(*timeout, Duration::from_secs(10));
    assert_eq!(route.as_ref().unwrap().meta.name(), "o");
    let again = client_policy(policy_with_protocol(Some(Kind::Detect(detect())))).unwrap();
    assert_eq!(policy, again, "policies decoded from equal messages are equal");

    for (kind, expected) in [
        (Kind::Opaque(opaque(1, 0)), ClientProtocol::Opaque(None)),
        (Kind::Tls(Tls::default()), ClientProtocol::Tls(Arc::new([]))),
        (
            Kind::Grpc(Grpc::default()),
            ClientProtocol::Grpc(ClientHttp {
                routes: Arc::new([]),
                failure_accrual: None,
            }),
        ),
    ] {
        assert_eq!(
            client_policy(policy_with_protocol(Some(kind))).unwrap().protocol,
            expected
        );
    }
}

#[test]
fn backends_are_decoded() {
    let backend = only_backend(with_backend(|_| ()));
    assert_eq!(
        backend.queue,
        Queue {
            capacity: 100,
            failfast_timeout: Duration::from_secs(3)
        }
    );
    let (default_rtt, decay) = (Duration::from_secs(1), Duration::from_secs(10));
    let load = LoadParams::PeakEwma { default_rtt, decay };
    assert_eq!(
        backend.target,
        BackendTarget::Balance {
            authority: "web.shop:80".into(),
            load
        }
    );

    let penalty = Some(Load::PenaltyPeakEwma(PenaltyPeakEwma::default()));
    let backend = only_backend(with_backend(|backend| backend.kind = balance("web:80", penalty)));
    let BackendTarget::Balance { load, .. } = backend.target else {
        panic!()
    };
    let expected = LoadParams::PenaltyPeakEwma {
        default_rtt: Duration::from_millis(30),
        decay: Duration::from_secs(10),
        penalty: Duration::from_secs(5),
        max_retry_after: Duration::from_secs(300),
    };
    assert_eq!(load, expected);

    let addr: std::net::SocketAddr = ([10, 0, 0, 1], 80).into();
    let forward = WeightedAddr {
        addr: Some(addr.into()),
        ..Default::default()
    };
    let backend = only_backend(with_backend(|backend| {
        backend.kind = Some(BackendKind::Forward(forward))
    }));
    assert!(matches!(&backend.target, BackendTarget::Forward(spec) if spec.addr == addr));
    let backend = only_backend(with_backend(|backend| backend.kind = None));
    assert_eq!(backend.target, BackendTarget::Fail);
}

#[test]
fn weights_that_are_all_zero_select_no_backend() {
    let distribution =
        |weights: &[u32]| action(with_rule(|rule| rule.backends = random_available_backends(weights))).backends;
    assert_eq!(distribution(&[0, 0]), Distribution::Empty);
    assert_eq!(distribution(&[0]), Distribution::Empty);
    assert!(matches!(distribution(&[5]), Distribution::FirstAvailable(list) if list.len() == 1));
    let Distribution::RandomAvailable(list) = distribution(&[1, 0, 9]) else {
        panic!()
    };
    assert_eq!(list.iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [1, 0, 9]);
}

#[test]
fn timeouts_and_retries_are_decoded() {
    let message = with_rule(|rule| rule.request_timeout = seconds(7));
    assert_eq!(action(message).timeouts.request, Some(Duration::from_secs(7)));
    let message = with_rule(|rule| {
        rule.request_timeout = seconds(7);
        rule.timeouts = Some(http_route::Timeouts {
            request: seconds(5),
            response: None,
            idle: seconds(3),
        });
        rule.retry = edited_retry(|_| ());
        rule.allow_l5d_request_headers = true;
    });
    let action = action(message);
    let (request, idle) = (Some(Duration::from_secs(5)), Some(Duration::from_secs(3)));
    assert_eq!(
        action.timeouts,
        Timeouts {
            request,
            response: None,
            idle
        }
    );
    assert_eq!(action.header_overrides, HeaderOverrides::Allow);
    let retry = action.retry.unwrap();
    assert_eq!((retry.max_retries, retry.max_request_bytes), (2, 1024));
    assert_eq!(retry.conditions.http, [500..=599]);
}

#[test]
fn grpc_conditions_are_status_codes() {
    let conditions = proto::grpc_route::retry::Conditions {
        cancelled: true,
        deadine_exceeded: true,
        resource_exhausted: true,
        internal: true,
        unavailable: true,
    };
    let message = proto::grpc_route::Retry {
        conditions: Some(conditions),
        ..Default::default()
    };
    assert_eq!(grpc_retry(message).unwrap().conditions.grpc, [1, 4, 8, 13, 14]);
}

#[test]
fn failure_accrual_is_decoded() {
    let accrual = |kind| match client_policy(with_accrual(kind)).unwrap().protocol {
        ClientProtocol::Http1(http) => http.failure_accrual.unwrap(),
        other => panic!("{other:?}"),
    };
    let expected = Backoff {
        min: Duration::from_secs(1),
        max: Duration::from_secs(60),
        jitter: 0.5,
    };
    let consecutive = ConsecutiveFailures {
        max_failures: 7,
        backoff: backoff(),
    };
    let read = accrual(Some(AccrualKind::ConsecutiveFailures(consecutive)));
    assert_eq!(
        read.kind,
        crate::policy::client::AccrualKind::Consecutive { max_failures: 7 }
    );
    assert_eq!(read.backoff.delays, expected);
    let window = Duration::from_secs(10);
    let unified = accrual(unified(|_| ())).kind;
    assert!(matches!(unified, crate::policy::client::AccrualKind::Unified { window: found, .. } if found == window));
}

#[test]
fn rewrites_are_filters_and_mirrors_are_backends() {
    let rewrite = ExtensionKind::UrlRewrite(UrlRewrite {
        host: "other.shop".into(),
        path: Some(PathModifier {
            replace: Some(path_modifier::Replace::Prefix("/new".into())),
        }),
    });
    let policy = client_policy(with_rule(|rule| {
        rule.filter_extensions = [Some(rewrite), Some(request_mirror())]
            .into_iter()
            .flat_map(extension)
            .collect();
    }))
    .unwrap();
    let ClientProtocol::Http2(http) = &policy.protocol else {
        panic!("{policy:?}")
    };
    let rule = &http.routes[0].rules[0];
    let expected = Filter::UrlRewrite(filter::UrlRewrite {
        host: filter::RewrittenHost::new("other.shop"),
        path: Some(filter::PathModifier::Prefix("/new".into())),
    });
    assert_eq!(rule.filters, [expected]);
    let [mirror] = &rule.action.mirrors[..] else {
        panic!("{rule:?}")
    };
    assert_eq!(mirror.ratio, filter::Ratio::ALWAYS);
    assert!(
        matches!(&mirror.backend.target, BackendTarget::Balance { authority, .. } if &**authority == "copy.shop:80")
    );
    let empty = client_policy(with_extension(Some(ExtensionKind::UrlRewrite(UrlRewrite::default())))).unwrap();
    assert!(matches!(empty.protocol, ClientProtocol::Http2(_)));
}

#[test]
fn lists_of_a_cors_filter_become_header_values() {
    use crate::policy::cors::{self, AllowedNames, OriginMatch};

    let decoded = |edit: &dyn Fn(&mut Cors)| {
        let policy = client_policy(with_cors(edit)).unwrap();
        let ClientProtocol::Http2(http) = &policy.protocol else {
            panic!("{policy:?}")
        };
        filter::find_cors(&http.routes[0].rules[0].filters).cloned().unwrap()
    };
    let strings = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let value = |text| Some(http::HeaderValue::from_static(text));
    let expected = cors::Cors {
        origins: vec![OriginMatch::parse("https://*.a.test").unwrap()],
        allows_credentials: false,
        methods: AllowedNames::Listed(value("GET, PUT")),
        headers: AllowedNames::Any,
        exposed_headers: value("*, x-a"),
        max_age: 7,
    };
    let found = decoded(&|cors| {
        cors.allow_origins = strings(&["https://*.a.test"]);
        cors.allow_methods = strings(&["GET", "PUT"]);
        cors.allow_headers = strings(&["*"]);
        cors.expose_headers = strings(&["*", "x-a"]);
        cors.max_age_seconds = 7;
    });
    assert_eq!(found, expected);
    let with_credentials = |names: &'static [&str]| {
        let edit = |cors: &mut Cors| (cors.allow_credentials, cors.expose_headers) = (true, strings(names));
        decoded(&edit).exposed_headers
    };
    assert_eq!(with_credentials(&["*", "x-a"]), value("x-a"));
    assert_eq!(with_credentials(&["*"]), None);
}

#[test]
fn a_refusal_names_the_resource() {
    let error = client_policy(with_backend(|backend| backend.queue = None)).unwrap_err();
    assert_eq!(
        format!("{:#}", anyhow::Error::new(error)),
        "in Service/r.shop: in Service/web.shop: queue is missing"
    );
}
