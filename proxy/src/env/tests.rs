//! Tests of defaults, of the syntax of each value, and of the report of all errors at once.

use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt as _;

use tulle_core::logging::Format;

use super::*;
use crate::identity::IdentitySource;
use crate::identity::anchors::TrustAnchorSource;
use crate::tls::tests::Authority;

const TRACE_COLLECTOR: [(&str, &str); 2] = [
    ("TRACE_COLLECTOR_SVC_ADDR", "collector.obs:4317"),
    ("TRACE_COLLECTOR_SVC_NAME", "collector.obs"),
];

/// The variables without a default.
pub(super) fn required() -> HashMap<String, String> {
    let id = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local";
    let variables = [
        (
            "DESTINATION_SVC_ADDR",
            "linkerd-dst-headless.linkerd.svc.cluster.local.:8086",
        ),
        ("DESTINATION_SVC_NAME", id),
        ("POLICY_SVC_ADDR", "linkerd-policy.linkerd.svc.cluster.local.:8090"),
        ("POLICY_SVC_NAME", id),
        ("IDENTITY_SVC_ADDR", "localhost.:8080"),
        ("POLICY_WORKLOAD", r#"{"ns":"emojivoto", "pod":"web-1"}"#),
        ("IDENTITY_TRUST_ANCHORS", "/var/run/anchors.pem"),
        ("IDENTITY_TOKEN_FILE", "/var/run/secrets/tokens/linkerd-identity-token"),
        (
            "IDENTITY_LOCAL_NAME",
            "web.emojivoto.serviceaccount.identity.linkerd.cluster.local",
        ),
    ];
    variables
        .map(|(name, value)| (full_name(name), value.to_owned()))
        .into()
}

fn load_with(changes: &[(&str, &str)]) -> Result<Config, Vec<EnvError>> {
    let mut variables = required();
    variables.extend(
        changes
            .iter()
            .map(|(name, value)| (full_name(name), (*value).to_owned())),
    );
    load(|name| variables.get(name).cloned())
}

#[test]
fn defaults_are_as_documented() {
    let config = load_with(&[]).unwrap();
    assert_eq!(config.outbound.listen, ["127.0.0.1:4140".parse().unwrap()]);
    assert_eq!(config.inbound.listen, "0.0.0.0:4143".parse().unwrap());
    assert_eq!(config.admin.listen, "127.0.0.1:4191".parse().unwrap());
    assert_eq!(config.admin.shutdown_endpoint, ShutdownEndpoint::Disabled);
    assert_eq!(config.shutdown_grace_period, Duration::from_secs(120));
    assert_eq!(config.metrics_retain_idle, Duration::from_secs(600));
    assert_eq!(
        config.workers,
        Workers {
            min: 1,
            max: None,
            max_ratio: None
        }
    );
    assert_eq!(config.log.format, Format::Plain);
    assert_eq!(config.outbound.load_balancing, LoadBalancing::PeakEwma);
    assert_eq!(config.inbound.mode, InboundMode::Redirect);
    assert_eq!(config.outbound.informational_headers, Visibility::Shown);
    assert_eq!(config.inbound.default_policy, DefaultPolicy::AllUnauthenticated);
    assert_eq!(config.inbound.missing_policy_action, MissingPolicyAction::Refuse);
    assert_eq!(config.control.stream_limits, StreamLimits::default());
    let windows = Http2Windows {
        stream: 1 << 20,
        connection: 4 << 20,
    };
    let (outbound, inbound) = (&config.outbound.direction, &config.inbound.direction);
    for direction in [outbound, inbound] {
        assert_eq!(direction.http2_client, windows);
        assert_eq!(direction.http2_server.windows, windows);
        assert_eq!(direction.http2_server.keep_alive, None);
        assert_eq!(direction.http2_server.max_concurrent_streams, 16_384);
        assert_eq!(direction.max_in_flight_requests, 100_000);
        assert_eq!(direction.accept.detect_timeout, Duration::from_secs(10));
        assert_eq!(direction.http1_pool.idle_timeout, Duration::from_secs(3));
        assert_eq!(direction.resend_policy, ResendPolicy::IdempotentMethods);
    }
    assert_eq!(
        (outbound.connect.timeout, inbound.connect.timeout),
        (Duration::from_secs(1), Duration::from_secs(4))
    );
    assert_eq!(outbound.connect.backoff.max, Duration::from_secs(60));
    assert_eq!(inbound.connect.backoff.max, Duration::from_secs(10));
    assert_eq!(config.outbound.http_failfast_timeout, Duration::from_secs(3));
    assert_eq!(config.outbound.http_queue_capacity, 10_000);
    assert_eq!(outbound.discovery_idle_timeout, Duration::from_secs(5));
    assert_eq!(inbound.discovery_idle_timeout, Duration::from_secs(90));
    let IdentitySource::ControlPlane { certify, .. } = &config.identity.source else {
        panic!("the control plane certifies")
    };
    assert_eq!(certify.min_refresh, Duration::from_secs(10));
    assert_eq!(certify.max_refresh, Duration::from_secs(86_400));
    assert_eq!(config.unsupported_variables, [""; 0]);
}

#[test]
fn loopback_control_addresses_are_plaintext_and_others_name_an_identity() {
    let config = load_with(&[("POLICY_SVC_ADDR", "[::1]:8090")]).unwrap();
    let IdentitySource::ControlPlane { certify, .. } = &config.identity.source else {
        panic!("the control plane certifies")
    };
    assert_eq!(certify.service.security, Security::Loopback);
    assert_eq!(config.control.policy.security, Security::Loopback);
    assert!(matches!(config.control.destination.security, Security::MutualTls(_)));
}

/// Values of many variables, as a chart may set them.
const CHART: &[(&str, &str)] = &[
    ("OUTBOUND_LISTEN_ADDR", "127.0.0.1:9999"),
    ("OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140,[::1]:4140"),
    ("INBOUND_LISTEN_ADDR", "[::]:4143"),
    ("INBOUND_ACCEPT_KEEPALIVE", "10000ms"),
    ("OUTBOUND_CONNECT_USER_TIMEOUT", "30s"),
    ("OUTBOUND_CONNECT_EXP_BACKOFF_MIN", "50ms"),
    ("OUTBOUND_CONNECT_EXP_BACKOFF_MAX", "5s"),
    ("INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "10s"),
    ("INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT", "3s"),
    ("INBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE", "70000"),
    ("INBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE", "80000"),
    ("MAX_IDLE_CONNS_PER_ENDPOINT", "7"),
    ("CONTROL_STREAM_INITIAL_TIMEOUT", "3s"),
    ("CONTROL_STREAM_IDLE_TIMEOUT", "5m"),
    ("CONTROL_STREAM_LIFETIME", "1h"),
    ("INBOUND_PORTS", "80,8000-8002"),
    (
        "INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION",
        "25,587,3306,4444,5432,6379,9300,11211",
    ),
    ("INBOUND_IPS", "10.0.0.7,fd00::7"),
    ("INBOUND_DEFAULT_POLICY", "cluster-authenticated"),
    ("POLICY_CLUSTER_NETWORKS", "10.0.0.0/8,192.168.0.1"),
    ("DESTINATION_PROFILE_NETWORKS", "10.0.0.0/8"),
    ("INGRESS_MODE", "true"),
    ("CORES", "3"),
    ("CORES_MIN", "2"),
    ("CORES_MAX_RATIO", "0.5"),
    ("LOG_FORMAT", "JSON"),
    ("LOG", ""),
    ("INBOUND_METRICS_AUTHORITY_LABELS", "unsafe"),
    (
        "TAP_SVC_NAME",
        "tap.linkerd-viz.serviceaccount.identity.linkerd.cluster.local",
    ),
    ("TULLE_INBOUND_UNKNOWN_POLICY", "default"),
    ("TULLE_PROXY_BALANCER", "round-robin"),
    ("TULLE_PROXY_INBOUND_MODE", "tproxy"),
    ("TULLE_PROXY_EXPLICIT_LISTEN_ADDR", "127.0.0.1:15001"),
    ("INBOUND_PORTS_REQUIRE_IDENTITY", "?"),
    ("SOMETHING_NEW", "?"),
];

#[test]
fn values_of_a_chart_are_understood() {
    let anchors = Authority::new().certificate.pem();
    let trust_anchors = ("IDENTITY_TRUST_ANCHORS", anchors.as_str());
    let config = load_with(&[CHART, &[trust_anchors]].concat()).unwrap();
    assert_eq!(
        config.outbound.listen,
        ["127.0.0.1:4140".parse().unwrap(), "[::1]:4140".parse().unwrap()]
    );
    let inbound = &config.inbound;
    assert_eq!(inbound.direction.accept.keepalive, Some(Duration::from_secs(10)));
    assert_eq!(inbound.direction.http1_pool.max_idle_per_endpoint, 7);
    assert_eq!(
        inbound.direction.http2_server.windows,
        Http2Windows {
            stream: 70_000,
            connection: 80_000
        }
    );
    let keep_alive = KeepAlive {
        interval: Duration::from_secs(10),
        timeout: Duration::from_secs(3),
    };
    assert_eq!(inbound.direction.http2_server.keep_alive, Some(keep_alive));
    assert!(inbound.watched_ports.contains(8001) && !inbound.watched_ports.contains(8003));
    assert!(inbound.opaque_ports.contains(5432));
    assert_eq!(inbound.local_ips.len(), 2);
    assert_eq!(inbound.default_policy, DefaultPolicy::ClusterAuthenticated);
    assert_eq!(inbound.missing_policy_action, MissingPolicyAction::Default);
    assert_eq!(inbound.mode, InboundMode::Tproxy);
    assert_eq!(inbound.authority_labels, Visibility::Shown);
    let backoff = config.outbound.direction.connect.backoff;
    assert_eq!(
        (backoff.min, backoff.max),
        (Duration::from_millis(50), Duration::from_secs(5))
    );
    assert_eq!(config.outbound.informational_headers, Visibility::Hidden);
    assert_eq!(config.outbound.load_balancing, LoadBalancing::RoundRobin);
    assert_eq!(config.control.cluster_networks.len(), 2);
    assert_eq!(config.control.stream_limits.lifetime, Some(Duration::from_secs(3600)));
    assert!(matches!(
        config.identity.source,
        IdentitySource::ControlPlane {
            anchors: TrustAnchorSource::Fixed(_),
            ..
        }
    ));
    assert_eq!(
        config.workers,
        Workers {
            min: 2,
            max: None,
            max_ratio: Some(0.5)
        }
    );
    assert_eq!(
        (config.log.format, config.log.filter.as_str()),
        (Format::Json, DEFAULT_LOG)
    );
    let tap = config.tap.unwrap();
    assert_eq!(tap.listen.port(), 4190);
    assert_eq!(tap.clients.len(), 1, "{tap:?}");
    assert_eq!(config.outbound.ingress_mode, IngressMode::On);
    assert_eq!(config.outbound.explicit_listen, Some(([127, 0, 0, 1], 15001).into()));
    assert!(
        config.unsupported_variables.is_empty(),
        "{:?}",
        config.unsupported_variables
    );
}

#[test]
fn the_inbound_connect_timeout_covers_two_retransmissions_of_the_syn() {
    for (value, expected) in [("100ms", 4), ("0s", 4), ("10s", 10)] {
        let config = load_with(&[("INBOUND_CONNECT_TIMEOUT", value)]).unwrap();
        assert_eq!(
            config.inbound.direction.connect.timeout,
            Duration::from_secs(expected),
            "{value}"
        );
    }
}

#[test]
fn unsupported_variables_are_reported() {
    let set = [
        ("OUTBOUND_TCP_QUEUE_CAPACITY", "10"),
        ("OUTBOUND_TCP_FAILFAST_TIMEOUT", "1s"),
        ("INBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL", "true"),
        ("OUTBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL", "true"),
        ("INBOUND_HTTP_QUEUE_CAPACITY", "10"),
        ("INBOUND_HTTP_FAILFAST_TIMEOUT", "1s"),
        ("INBOUND_PORTS_REQUIRE_TLS", "80"),
    ];
    assert_eq!(
        load_with(&set).unwrap().unsupported_variables,
        set.map(|(name, _)| full_name(name))
    );
}

#[test]
fn all_problems_are_listed_at_once() {
    let errors = load(|_| None::<String>).unwrap_err();
    let names: Vec<_> = errors
        .iter()
        .map(|error| error.name.trim_start_matches(LINKERD_PREFIX))
        .collect();
    assert_eq!(
        names,
        [
            "IDENTITY_TRUST_ANCHORS",
            "IDENTITY_TOKEN_FILE",
            "IDENTITY_SVC_ADDR",
            "IDENTITY_LOCAL_NAME",
            "DESTINATION_SVC_ADDR",
            "POLICY_SVC_ADDR",
            "POLICY_WORKLOAD",
        ]
    );
    assert_eq!(
        errors[0].to_string(),
        "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS: it is required"
    );
}

/// Variables with a bad value, and a part of the reason.
const BAD_VALUES: &[(&str, &str, &str)] = &[
    (
        "INBOUND_DETECT_TIMEOUT",
        "10",
        "expected digits and one of ms, s, m, h, d",
    ),
    ("SHUTDOWN_ENDPOINT_ENABLED", "yes", "expected true or false"),
    (
        "INBOUND_LISTEN_ADDR",
        "localhost:4143",
        "expected <ip>:<port> or [<ipv6>]:<port>",
    ),
    (
        "OUTBOUND_LISTEN_ADDRS",
        "1.1.1.1:1,1.1.1.1:2,1.1.1.1:3",
        "expected one or two addresses, found 3",
    ),
    ("INBOUND_PORTS", "80-", "80-"),
    ("INBOUND_IPS", "10.0.0.1,web", "found \"web\""),
    (
        "DESTINATION_PROFILE_NETWORKS",
        "10.0.0.0/40",
        "expected a comma-separated list of CIDRs",
    ),
    (
        "DESTINATION_PROFILE_SUFFIXES",
        "svc..local",
        "expected a comma-separated list of DNS suffixes",
    ),
    ("INBOUND_DEFAULT_POLICY", "allow", "expected deny or all-authenticated"),
    (
        "INBOUND_DEFAULT_POLICY",
        "audit",
        "needs LINKERD2_PROXY_POLICY_CLUSTER_NETWORKS",
    ),
    ("TULLE_INBOUND_UNKNOWN_POLICY", "allow", "expected refuse or default"),
    ("CORES", "0", "at least 1"),
    ("CORES_MAX_RATIO", "1.5", "above 0 and at most 1"),
    ("CORES_MAX_RATIO", "NaN", "above 0 and at most 1"),
    ("HTTP2_INITIAL_STREAM_WINDOW_SIZE", "2147483648", "1 to 2147483647"),
    ("INBOUND_SERVER_HTTP2_MAX_FRAME_SIZE", "100", "16384 to 16777215"),
    ("OUTBOUND_TCP_LISTEN_BACKLOG", "-1", "not negative"),
    ("LOG_FORMAT", "xml", "expected plain or json"),
    ("INBOUND_METRICS_AUTHORITY_LABELS", "true", "expected unsafe"),
    (
        "IDENTITY_TRUST_ANCHORS",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        "certificate 1",
    ),
    ("IDENTITY_LOCAL_NAME", "a b", "is not an identity"),
    ("IDENTITY_DISABLED", "1", "unset this variable"),
    (
        "IDENTITY_SPIRE_SOCKET",
        "tcp://127.0.0.1:80",
        "expected unix:///<absolute path of a socket>",
    ),
    (
        "IDENTITY_SPIRE_WORKLOAD_API_ADDRESS",
        "unix:///run/spire.sock",
        "needs LINKERD2_PROXY_IDENTITY_SERVER_ID, a spiffe:// URI",
    ),
    ("TULLE_PROXY_BALANCER", "random", "expected peak-ewma or round-robin"),
    ("TULLE_PROXY_INBOUND_MODE", "transparent", "expected redirect or tproxy"),
    (
        "TULLE_PROXY_OUTBOUND_RESEND",
        "always",
        "expected never or safe or idempotent",
    ),
    (
        "TULLE_PROXY_EXPLICIT_LISTEN_ADDR",
        "0.0.0.0:15001",
        "expected a loopback address",
    ),
    (
        "IDENTITY_MIN_REFRESH",
        "2d",
        "above LINKERD2_PROXY_IDENTITY_MAX_REFRESH",
    ),
];

#[test]
fn bad_values_are_refused_with_the_value_the_reason_and_the_accepted_values() {
    for &(name, value, expected) in BAD_VALUES {
        let errors = load_with(&[(name, value)]).unwrap_err();
        let [error] = &errors[..] else {
            panic!("{name}={value}: {errors:?}")
        };
        assert_eq!(error.name, full_name(name));
        assert!(
            error.value.as_ref().is_some_and(|shown| value.starts_with(shown)),
            "{error}"
        );
        assert!(error.reason.contains(expected), "{error}");
    }
}

#[test]
fn variables_that_belong_together_must_be_set_together() {
    for (set, value, missing) in [
        (
            "INBOUND_CONNECT_EXP_BACKOFF_MIN",
            "1s",
            "INBOUND_CONNECT_EXP_BACKOFF_MAX",
        ),
        (
            "INBOUND_SERVER_HTTP2_KEEP_ALIVE_TIMEOUT",
            "1s",
            "INBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL",
        ),
        (
            "OUTBOUND_SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
            "70000",
            "OUTBOUND_SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
        ),
        ("IDENTITY_SERVER_ID", "spiffe://root/vm", "IDENTITY_SERVER_NAME"),
    ] {
        let errors = load_with(&[(set, value)]).unwrap_err();
        assert_eq!(
            errors.iter().map(|error| error.name.clone()).collect::<Vec<_>>(),
            [full_name(missing)]
        );
        assert!(errors[0].reason.contains(set), "{}", errors[0]);
    }
    let errors = load_with(&[("DESTINATION_SVC_NAME", "")]).unwrap_err();
    assert_eq!(errors[0].name, "LINKERD2_PROXY_DESTINATION_SVC_NAME");
}

#[test]
fn stream_limits_must_not_decrease() {
    let limits = [
        ("CONTROL_STREAM_INITIAL_TIMEOUT", "2h"),
        ("CONTROL_STREAM_LIFETIME", "1h"),
    ];
    let errors = load_with(&limits).unwrap_err();
    assert_eq!(
        errors[0].to_string(),
        "LINKERD2_PROXY_CONTROL_STREAM_INITIAL_TIMEOUT=\"2h\": it is above LINKERD2_PROXY_CONTROL_STREAM_LIFETIME"
    );
}

#[test]
fn a_separate_server_id_and_name_override_the_local_name() {
    let names = [
        ("IDENTITY_SERVER_ID", "vm.shop.example.com"),
        ("IDENTITY_SERVER_NAME", "vm.example.com"),
    ];
    let config = load_with(&names).unwrap();
    assert_eq!(config.identity.id, Identity::Dns("vm.shop.example.com".into()));
    assert_eq!(config.identity.server_name, "vm.example.com");
    let errors = load_with(&[("IDENTITY_SERVER_ID", "spiffe://root/vm"), names[1]]).unwrap_err();
    assert_eq!(errors[0].name, "LINKERD2_PROXY_IDENTITY_SERVER_ID");
    assert!(errors[0].reason.contains("SPIRE_WORKLOAD_API_ADDRESS"), "{}", errors[0]);
}

#[test]
fn a_workload_api_needs_no_token_no_identity_service_and_no_trust_anchors() {
    for (name, value) in [
        ("IDENTITY_SPIRE_SOCKET", "unix:///run/spire.sock"),
        ("IDENTITY_SPIRE_WORKLOAD_API_ADDRESS", "unix:/run/spire.sock"),
        ("IDENTITY_SPIRE_WORKLOAD_API_ADDRESS", "/run/spire.sock"),
    ] {
        let variables = [
            (name, value),
            ("IDENTITY_SERVER_ID", "spiffe://root/vm"),
            ("IDENTITY_SERVER_NAME", "vm.example.com"),
            ("IDENTITY_TOKEN_FILE", ""),
            ("IDENTITY_TRUST_ANCHORS", ""),
            ("IDENTITY_SVC_ADDR", ""),
        ];
        let config = load_with(&variables).unwrap();
        assert_eq!(config.identity.id, Identity::Uri("spiffe://root/vm".into()));
        assert_eq!(config.identity.server_name, "vm.example.com");
        let IdentitySource::WorkloadApi { socket, anchors } = &config.identity.source else {
            panic!("{name} asks for a Workload API")
        };
        assert_eq!((socket.to_str(), anchors), (Some("/run/spire.sock"), &None));
    }
}

#[test]
fn only_variables_of_the_proxy_are_shown() {
    // The headers of probes may contain credentials.
    let variables = [
        "LINKERD2_PROXY_LOG",
        "TULLE_PROXY_BALANCER",
        "TULLE_PROXY_PROBES",
        "DATABASE_PASSWORD",
    ];
    let shown = public_variables(variables.iter().map(|name| ((*name).into(), "x".into())));
    assert_eq!(
        shown.keys().collect::<Vec<_>>(),
        ["LINKERD2_PROXY_LOG", "TULLE_PROXY_BALANCER"]
    );
}

#[test]
fn values_that_are_not_utf8_are_refused_only_in_variables_that_the_proxy_reads() {
    let not_utf8 = || OsString::from_vec(b"a\xff".to_vec());
    for (name, scenario) in [
        ("LINKERD2_PROXY_INBOUND_PORTS", &[][..]),
        ("LINKERD2_PROXY_LOG", &[]),
        ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", &[]),
        ("TULLE_PROXY_BALANCER", &[]),
        ("OTEL_RESOURCE_ATTRIBUTES", &TRACE_COLLECTOR),
        ("HOSTNAME", &TRACE_COLLECTOR),
    ] {
        let mut variables: HashMap<String, OsString> = required()
            .into_iter()
            .map(|(name, value)| (name, value.into()))
            .collect();
        variables.extend(scenario.iter().map(|(name, value)| (full_name(name), value.into())));
        variables.insert(name.to_owned(), not_utf8());
        let errors = load(|name| variables.get(name).cloned()).unwrap_err();
        let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors, [format!("{name}=\"a\u{fffd}\": it is not UTF-8")]);
    }
    let others = [
        ("LINKERD2_PROXY_UNKNOWN".into(), not_utf8()),
        ("PATH".into(), not_utf8()),
        (not_utf8(), "x".into()),
    ];
    let shown = public_variables(others.into_iter());
    assert_eq!(
        shown,
        [("LINKERD2_PROXY_UNKNOWN".to_owned(), "a\u{fffd}".to_owned())].into()
    );
}

#[test]
fn declared_probes_are_read_or_refused_with_the_reason() {
    let declared = r#"[
        {"container":"a","probe":"readiness","port":80,"timeoutSeconds":1,"tcpSocket":{"port":"http"}},
        {"container":"a","probe":"startup","port":81,"timeoutSeconds":2,"grpc":{"port":81,"service":"up"}},
        {"container":"b","probe":"liveness","port":82,"timeoutSeconds":3,
         "httpGet":{"path":"/x","port":82,"scheme":"HTTPS","httpHeaders":[{"name":"Authorization","value":"secret"}]}}
    ]"#;
    let probes = load_with(&[("TULLE_PROXY_PROBES", declared)]).unwrap().admin.probes;
    assert_eq!(probes.len(), 3);
    assert!(!format!("{probes:?}").contains("secret"), "{probes:?}");
    let probe =
        |rest: &str| format!(r#"[{{"container":"a","probe":"readiness","port":80,"timeoutSeconds":1,{rest}}}]"#);
    for (value, reason) in [
        ("80".to_owned(), "expected probes such as"),
        (probe(r#""exec":{}"#), "expected probes such as"),
        (
            probe(r#""httpGet":{"port":80,"scheme":"HTTP"}"#),
            "expected probes such as",
        ),
        (
            probe(r#""httpGet":{"port":80,"scheme":"HTTPS","httpHeaders":[{"name":"a b","value":"x"}]}"#),
            "not a valid header name",
        ),
        (
            probe(r#""httpGet":{"port":80,"scheme":"HTTPS","httpHeaders":[{"name":"Host","value":"a b"}]}"#),
            "is not a valid host",
        ),
        (
            probe(r#""tcpSocket":{"port":80}"#).replace(r#""port":80,"t"#, r#""port":0,"t"#),
            "expected probes such as",
        ),
    ] {
        let errors = load_with(&[("TULLE_PROXY_PROBES", &value)]).unwrap_err();
        let [error] = &errors[..] else { panic!("{errors:?}") };
        assert_eq!(error.name, "TULLE_PROXY_PROBES");
        assert!(error.reason.contains(reason), "{value}: {error}");
        assert!(
            error
                .value
                .as_ref()
                .is_some_and(|shown| value.starts_with(shown.trim_end_matches('…')))
        );
    }
}

#[test]
fn traces_need_a_collector_and_valid_attributes() {
    let [addr, name] = TRACE_COLLECTOR;
    let collector = [
        addr,
        name,
        ("TRACE_EXTRA_ATTRIBUTES", "a=1\n\nb = x=y \n"),
        ("TULLE_PROXY_TRACE_SAMPLING", "0.25"),
    ];
    assert!(load_with(&[]).unwrap().trace.is_none());
    let trace = load_with(&collector).unwrap().trace.unwrap();
    assert_eq!((trace.service.as_str(), trace.sampling), ("linkerd-proxy", 0.25));
    let pairs = [("a", "1"), ("b", "x=y")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(trace.attributes, pairs.into());
    let listed = values::attribute_list("a=1%2C2%,b=%zz%+5").unwrap();
    assert_eq!((listed["a"].as_str(), listed["b"].as_str()), ("1,2%", "%zz%+5"));

    for (change, name) in [
        (
            ("TRACE_COLLECTOR_SVC_NAME", ""),
            "LINKERD2_PROXY_TRACE_COLLECTOR_SVC_NAME",
        ),
        (("TRACE_EXTRA_ATTRIBUTES", "a"), "LINKERD2_PROXY_TRACE_EXTRA_ATTRIBUTES"),
        (("TULLE_PROXY_TRACE_SAMPLING", "2"), "TULLE_PROXY_TRACE_SAMPLING"),
        (("TRACE_COLLECTOR_SVC_ADDR", ""), "TULLE_PROXY_TRACE_SAMPLING"),
    ] {
        let errors = load_with(&[&collector[..], &[change]].concat()).unwrap_err();
        assert_eq!(
            errors.iter().map(|error| error.name.as_str()).collect::<Vec<_>>(),
            [name]
        );
    }
}
