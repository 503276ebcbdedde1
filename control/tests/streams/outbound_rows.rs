//! Tables of outbound policy: manifests, and the policy that a client gets.

use serde::Deserialize;
use serde_yaml_ng::{Deserializer, Value};
use tulle_control::resources::event::Event;
use tulle_control::resources::{Kind, decode};

use crate::harness::{Mesh, mesh};
use crate::show::show;

pub(crate) const CLIENT: &str = r#"{"ns":"front","pod":"front-0"}"#;

/// Returns two services. The arguments are added to the metadata and the port of the first one.
pub(crate) fn services(annotations: &str, port: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop, annotations: {{{annotations}}}}}
spec: {{clusterIP: 10.247.0.10, ports: [{{name: a, port: 80{port}}}, {{name: b, port: 90}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web-v2, namespace: shop}}
spec: {{clusterIP: 10.247.0.11, ports: [{{port: 80}}]}}
"
    )
}

/// Returns a route: `id` is `Kind namespace/name`, `more` further metadata.
pub(crate) fn route(id: &str, more: &str, spec: &str) -> String {
    let (kind, id) = id.split_once(' ').unwrap();
    let (namespace, name) = id.split_once('/').unwrap();
    let api_version = match kind {
        "HTTPRoute" | "GRPCRoute" => "gateway.networking.k8s.io/v1",
        "TLSRoute" | "TCPRoute" => "gateway.networking.k8s.io/v1alpha2",
        _ => "policy.linkerd.io/v1beta3",
    };
    let kind = kind.trim_start_matches("policy:");
    format!(
        "---\napiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}{more}}}\nspec: {spec}\n"
    )
}

pub(crate) const TO_WEB: &str = "parentRefs: [{group: core, kind: Service, name: web, namespace: shop, port: 80}]";

/// Returns the policy of an address for the client in `front`, formatted by [`show`].
pub(crate) async fn policy_lines(manifests: &str, target: &str) -> Vec<String> {
    let mesh = mesh(manifests).await;
    assert!(mesh.errors().is_empty(), "{manifests}\n{:?}", mesh.errors());
    show(&mesh.get_policy(CLIENT, target).await.unwrap())
}

pub(crate) async fn check(manifests: &str, target: &str, expected: &[&str]) {
    assert_eq!(policy_lines(manifests, target).await, expected, "{manifests}\n{target}");
}

#[tokio::test]
async fn the_most_specific_protocol_of_all_routes_on_a_port_applies() {
    let spec = |rules: &str| format!("{{{TO_WEB}, rules: [{rules}]}}");
    let v2 = "{backendRefs: [{name: web-v2, port: 80}]}";
    let http = route("HTTPRoute shop/http", "", &spec(v2));
    let policy = route("policy:HTTPRoute shop/old", "", &spec(v2));
    let grpc = route("GRPCRoute shop/grpc", "", &spec(v2));
    let tls = route(
        "TLSRoute shop/tls",
        "",
        &format!("{{{TO_WEB}, hostnames: [a.b, '*.c.d'], rules: [{v2}]}}"),
    );
    let tcp = route("TCPRoute shop/tcp", "", &spec(v2));
    let row = async |port: &str, routes: &[&str], expected: &[&str]| {
        let manifests = format!("{}{}", services("", port), routes.concat());
        check(&manifests, "10.247.0.10:80", expected).await;
    };
    let http_line = "gateway HTTPRoute shop/http -> 1*web-v2.shop:80";
    let policy_line = "policy HTTPRoute shop/old -> 1*web-v2.shop:80";
    let grpc_line = "gateway GRPCRoute shop/grpc -> 1*web-v2.shop:80";
    let tls_line = "gateway TLSRoute shop/tls a.b d.c.* -> 1*web-v2.shop:80";
    let tcp_line = "gateway TCPRoute shop/tcp -> 1*web-v2.shop:80";
    let opaque = "opaq -> web.shop:80";
    let of = |protocol: &str| format!("{protocol} of Service shop/web:80");
    row("", &[&grpc, &http, &policy, &tls, &tcp], &[&of("grpc"), grpc_line]).await;
    row(
        "",
        &[&http, &policy, &tls, &tcp],
        &[&of("detect 10s"), http_line, policy_line, opaque],
    )
    .await;
    row("", &[&tls, &tcp], &[&of("tls"), tls_line]).await;
    row("", &[&tcp], &[&of("opaque"), tcp_line]).await;
    row("", &[], &[&of("detect 10s"), "http -> web.shop:80", opaque]).await;
    // The protocol of the port takes precedence over that of the routes.
    let h2c = ", appProtocol: kubernetes.io/h2c";
    row(h2c, &[&grpc], &[&of("grpc"), grpc_line]).await;
    row(h2c, &[&http], &[&of("http2"), http_line]).await;
    row(h2c, &[], &[&of("http2"), "http -> web.shop:80"]).await;
    row(", appProtocol: HTTP", &[&http, &tcp], &[&of("http1"), http_line]).await;
    row(", appProtocol: grpc", &[&http, &tcp], &[&of("http2"), http_line]).await;
    row(", appProtocol: linkerd.io/tcp", &[&tcp], &[&of("opaque"), tcp_line]).await;
    row(", appProtocol: linkerd.io/opaque", &[&http], &[&of("opaque"), opaque]).await;
    row(", appProtocol: redis", &[], &[&of("opaque"), opaque]).await;
    // Routes that the port's protocol excludes do not displace others.
    row(", appProtocol: HTTP", &[&grpc, &http], &[&of("http1"), http_line]).await;
    row(", appProtocol: redis", &[&grpc, &tls, &tcp], &[&of("opaque"), tcp_line]).await;
    // A reference without a port includes this port.
    let everywhere = |manifest: &str| manifest.replace(", port: 80}], ", "}], ");
    row("", &[&everywhere(&http), &tcp], &[&of("detect 10s"), http_line, opaque]).await;
    row("", &[&everywhere(&grpc), &http], &[&of("grpc"), grpc_line]).await;
    // Routes of one port do not affect others.
    let manifests = format!("{}{tcp}", services("", ""));
    check(
        &manifests,
        "10.247.0.10:90",
        &[
            "detect 10s of Service shop/web:90",
            "http -> web.shop:90",
            "opaq -> web.shop:90",
        ],
    )
    .await;
    let marked = services("config.linkerd.io/opaque-ports: '80'", "");
    check(&format!("{marked}{tcp}"), "10.247.0.10:80", &[&of("opaque"), tcp_line]).await;
}

#[tokio::test]
async fn invalid_backends_fail_with_an_error_of_their_protocol() {
    let backends = "[{name: web, port: 80, weight: 3}, {name: gone, port: 80}, {kind: Bucket, name: b}, \
        {group: policy.linkerd.io, kind: EgressNetwork, name: out}]";
    for (kind, failure) in [
        ("HTTPRoute", "fail 500"),
        ("GRPCRoute", "fail 13"),
        ("TLSRoute", "invalid"),
        ("TCPRoute", "invalid"),
    ] {
        let spec = format!("{{{TO_WEB}, rules: [{{backendRefs: {backends}}}]}}");
        let manifests = format!("{}{}", services("", ""), route(&format!("{kind} shop/r"), "", &spec));
        let line = policy_lines(&manifests, "10.247.0.10:80").await.swap_remove(1);
        let expected = format!(
            "gateway {kind} shop/r -> 3*web.shop:80 | 1*nothing (Service shop/gone:80) {failure} \"Service not found gone\" \
             | 1*nothing (invalid) {failure} \"the backend is neither a Service with a port nor an EgressNetwork\" \
             | 1*nothing (policy EgressNetwork shop/out) {failure} \"EgressNetwork not found out\""
        );
        assert_eq!(line, expected);
    }
}

#[tokio::test]
async fn producer_and_consumer_routes_are_merged_oldest_first() {
    let at = |time: &str| format!(", creationTimestamp: '2026-01-0{time}T00:00:00Z'");
    let spec = format!("{{{TO_WEB}, rules: [{{}}]}}");
    let everywhere = "{parentRefs: [{group: core, kind: Service, name: web, namespace: shop}], rules: [{}]}";
    let manifests = [
        services("", ""),
        route("HTTPRoute shop/third", &at("3"), &spec),
        route("HTTPRoute front/second", &at("2"), &spec),
        route("HTTPRoute other/unseen", &at("1"), &spec),
        route("HTTPRoute shop/first", &at("1"), everywhere),
        route("HTTPRoute shop/last", "", &spec),
    ]
    .concat();
    let route_names = async |target: &str| {
        let lines = policy_lines(&manifests, target).await;
        let names = lines
            .iter()
            .filter_map(|line| line.strip_prefix("gateway HTTPRoute ")?.split(' ').next());
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        route_names("10.247.0.10:80").await,
        ["shop/first", "front/second", "shop/third", "shop/last"]
    );
    // A route without a port applies to all ports.
    assert_eq!(route_names("10.247.0.10:90").await, ["shop/first"]);
}

#[tokio::test]
async fn requests_with_an_unsupported_filter_fail() {
    let row = async |id: &str, filter: &str, expected: &str| {
        let spec = format!("{{{TO_WEB}, rules: [{{filters: [{filter}]}}]}}");
        let manifests = format!("{}{}", services("", ""), route(id, "", &spec));
        let lines = policy_lines(&manifests, "10.247.0.10:80").await;
        let found = lines[1].split_once(" -> ").unwrap().0;
        let name = match id.strip_prefix("policy:") {
            Some(id) => format!("policy {id}"),
            None => format!("gateway {id}"),
        };
        assert_eq!(found, format!("{name} {expected}"), "{filter}");
    };
    let request = "{type: RequestHeaderModifier, requestHeaderModifier: {remove: [x]}}";
    let response = "{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [x]}}";
    let redirect = "{type: RequestRedirect, requestRedirect: {statusCode: 301}}";
    for id in ["HTTPRoute shop/r", "policy:HTTPRoute shop/r"] {
        row(id, request, "request-headers").await;
        row(id, redirect, "redirect 301").await;
    }
    row("HTTPRoute shop/r", response, "response-headers").await;
    // The API's default applies even if no API server has inserted it.
    row(
        "HTTPRoute shop/r",
        "{type: RequestRedirect, requestRedirect: {hostname: a.b}}",
        "redirect 302",
    )
    .await;
    row("GRPCRoute shop/r", request, "request-headers").await;
    let extension = "{type: ExtensionRef, extensionRef: {group: a, kind: b, name: c}}";
    let cause = "fail 500 \"HTTPRoute shop/r: filter ExtensionRef is not supported by the mesh\"";
    row("HTTPRoute shop/r", extension, cause).await;
}

#[tokio::test]
async fn rules_rewrite_and_mirror_requests_and_set_cors() {
    let row = async |kind: &str, rule: &str, expected: &str| {
        let spec = format!("{{{TO_WEB}, rules: [{{{rule}}}]}}");
        let manifests = format!("{}{}", services("", ""), route(&format!("{kind} shop/r"), "", &spec));
        let lines = policy_lines(&manifests, "10.247.0.10:80").await;
        assert_eq!(lines[1], format!("gateway {kind} shop/r{expected}"), "{rule}");
    };
    let rewrite = |what: &str| format!("{{type: URLRewrite, urlRewrite: {{{what}}}}}");
    let host = rewrite("hostname: a.b");
    let prefix = |prefix: &str| {
        rewrite(&format!(
            "path: {{type: ReplacePrefixMatch, replacePrefixMatch: '{prefix}'}}"
        ))
    };
    let full = rewrite("hostname: a.b, path: {type: ReplaceFullPath, replaceFullPath: /x}");
    let to_web = " -> web.shop:80";
    for (filter, expected) in [
        (&host, " rewrite a.b"),
        (&full, " rewrite a.b /x"),
        (&prefix("/xyz"), " rewrite  /xyz*"),
        (&prefix(""), " rewrite  /*"),
    ] {
        row(
            "HTTPRoute",
            &format!("filters: [{filter}]"),
            &format!("{expected}{to_web}"),
        )
        .await;
    }
    for (cors, expected) in [
        ("{}", " cors  |  |  |  | 5s"),
        (
            "{allowOrigins: ['https://*.a.b', 'http://c:81'], allowCredentials: true, allowMethods: [GET, PUT], \
             allowHeaders: ['*'], exposeHeaders: [x-a], maxAge: 60}",
            " cors https://*.a.b,http://c:81 | GET,PUT | * | x-a | 60s credentials",
        ),
    ] {
        let rule = format!("filters: [{{type: CORS, cors: {cors}}}]");
        row("HTTPRoute", &rule, &format!("{expected}{to_web}")).await;
    }
    // The backends of one rule have their own rewrites.
    let backends = format!(
        "backendRefs: [{{name: web, port: 80, filters: [{host}]}}, {{name: web-v2, port: 80, filters: [{}]}}]",
        prefix("/v2")
    );
    let expected = " -> 1*web.shop:80 rewrite a.b | 1*web-v2.shop:80 rewrite  /v2*";
    row("HTTPRoute", &backends, expected).await;

    let mirror = |name: &str, fraction: &str| {
        format!("{{type: RequestMirror, requestMirror: {{backendRef: {{name: {name}, port: 80}}{fraction}}}}}")
    };
    for kind in ["HTTPRoute", "GRPCRoute"] {
        for (fraction, expected) in [
            ("", "100/100"),
            (", percent: 42", "42/100"),
            (", percent: 0", "0/100"),
            (", fraction: {numerator: 5}", "5/100"),
            (", fraction: {numerator: 1, denominator: 3}", "1/3"),
        ] {
            let rule = format!("filters: [{}]", mirror("web-v2", fraction));
            row(kind, &rule, &format!(" mirror {expected} to web-v2.shop:80{to_web}")).await;
        }
        // Several mirrors, and one whose backend does not exist.
        let mirrors = ["web", "none", "web-v2"].map(|name| mirror(name, ""));
        let expected = format!(" mirror 100/100 to web.shop:80 mirror 100/100 to web-v2.shop:80{to_web}");
        row(kind, &format!("filters: [{}]", mirrors.join(", ")), &expected).await;
    }
}

#[tokio::test]
async fn egress_defaults_depend_on_the_existing_routes() {
    let network = |policy: &str, more: &str| {
        let meta = "apiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork";
        format!(
            "---\n{meta}\nmetadata: {{name: lab, namespace: front{more}}}\n\
             spec: {{trafficPolicy: {policy}, networks: [{{cidr: 203.0.113.0/24}}]}}\n"
        )
    };
    let parent = "parentRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 443}]";
    let spec = format!(
        "{{{parent}, rules: [{{backendRefs: [{{group: policy.linkerd.io, kind: EgressNetwork, name: lab}}]}}]}}"
    );
    let [http, grpc, tls, tcp] =
        ["HTTPRoute", "GRPCRoute", "TLSRoute", "TCPRoute"].map(|kind| route(&format!("{kind} front/r"), "", &spec));
    let addr = "203.0.113.1:443";
    let row = async |network: String, route: &str, expected: &[&str]| {
        let of = format!("{} of policy EgressNetwork front/lab:443", expected[0]);
        let mut lines = vec![of.as_str()];
        lines.extend(&expected[1..]);
        check(&format!("{network}{route}"), addr, &lines).await;
    };
    let own = |kind: &str| format!("gateway {kind} front/r -> 1*{addr}");
    let to = |name: &str| format!("{name} -> {addr}");
    row(
        network("Allow", ""),
        "",
        &["detect 10s", &to("http-egress-allow"), &to("tcp-egress-allow")],
    )
    .await;
    let refused = format!("http-egress-deny fail 403 \"traffic not allowed\" -> {addr}");
    let closed = "tcp-egress-deny forbidden -> nowhere";
    row(network("Deny", ""), "", &["detect 10s", &refused, closed]).await;
    row(
        network("Deny", ""),
        &http,
        &["detect 10s", &own("HTTPRoute"), &refused, closed],
    )
    .await;
    let grpc_refused = format!("grpc-egress-deny fail 7 \"traffic not allowed\" -> {addr}");
    row(network("Deny", ""), &grpc, &["grpc", &own("GRPCRoute"), &grpc_refused]).await;
    row(
        network("Allow", ""),
        &grpc,
        &["grpc", &own("GRPCRoute"), &to("grpc-egress-allow")],
    )
    .await;
    let tls_refused = "tls-egress-deny forbidden -> nowhere";
    row(network("Deny", ""), &tls, &["tls", &own("TLSRoute"), tls_refused]).await;
    row(
        network("Allow", ""),
        &tls,
        &["tls", &own("TLSRoute"), &to("tls-egress-allow")],
    )
    .await;
    row(network("Deny", ""), &tcp, &["opaque", &own("TCPRoute")]).await;
    let opaque = ", annotations: {config.linkerd.io/opaque-ports: '443'}";
    row(network("Deny", opaque), "", &["opaque", closed]).await;
    row(network("Deny", opaque), &tcp, &["opaque", &own("TCPRoute")]).await;
}

#[tokio::test]
async fn the_narrowest_then_the_oldest_egress_network_applies() {
    let network = |name: &str, day: u8, cidr: &str| {
        format!(
            "---\napiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork\n\
             metadata: {{name: {name}, namespace: front, creationTimestamp: '2026-01-0{day}T00:00:00Z'}}\n\
             spec: {{trafficPolicy: Allow, networks: [{{cidr: {cidr}}}]}}\n"
        )
    };
    let row = async |networks: &[String], winner: &str| {
        let lines = policy_lines(&networks.concat(), "203.0.113.1:443").await;
        assert_eq!(
            lines[0],
            format!("detect 10s of policy EgressNetwork front/{winner}:443")
        );
    };
    let wide = network("wide", 1, "203.0.0.0/8");
    row(&[wide.clone(), network("narrow", 2, "203.0.113.0/24")], "narrow").await;
    row(
        &[
            network("b", 2, "203.0.113.0/24"),
            network("a", 3, "203.0.113.0/24"),
            wide,
        ],
        "b",
    )
    .await;
    row(
        &[network("b", 2, "203.0.113.0/24"), network("a", 2, "203.0.113.0/24")],
        "a",
    )
    .await;
}

/// Annotations of the service and of its route, a rule of the route, and the retries and timeouts of the rule.
const RETRIES_AND_TIMEOUTS: &[(&str, &str, &str, &str)] = &[
    // Retries of the service; those of the route replace them.
    ("retry.linkerd.io/http: 5xx", "", "{}", " retry 1x 500-599"),
    (
        "retry.linkerd.io/http: 'gateway-error,429,404-405'",
        "",
        "{}",
        " retry 1x 502-504,429-429,404-405",
    ),
    (
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '0'",
        "",
        "{}",
        " retry 1x 500-599",
    ),
    (
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '65535'",
        "",
        "{}",
        " retry 65535x 500-599",
    ),
    (
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/timeout: 300ms",
        "",
        "{}",
        " retry 1x 500-599 each 300ms",
    ),
    ("retry.linkerd.io/limit: '3'", "", "{}", ""),
    (
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '3'",
        "retry.linkerd.io/http: '503'",
        "{}",
        " retry 1x 503-503",
    ),
    // Timeouts.
    (
        "timeout.linkerd.io/request: 1h, timeout.linkerd.io/response: 2m, timeout.linkerd.io/idle: 1d",
        "",
        "{}",
        " timeouts request 3600s response 120s idle 86400s",
    ),
    ("timeout.linkerd.io/request: '0'", "", "{}", ""),
    (
        "timeout.linkerd.io/idle: 5s",
        "",
        "{timeouts: {request: 2s, backendRequest: 1s}}",
        " timeouts request 2s response 1s",
    ),
    // Each annotation of a route takes precedence over the field of its rules.
    (
        "",
        "timeout.linkerd.io/request: 3s",
        "{timeouts: {request: 2s, backendRequest: 1s}}",
        " timeouts request 3s response 1s",
    ),
    (
        "",
        "timeout.linkerd.io/idle: 3s",
        "{timeouts: {request: 2s, backendRequest: 1s}}",
        " timeouts request 2s response 1s idle 3s",
    ),
    ("timeout.linkerd.io/request: 9s", "", "{timeouts: {request: 0s}}", ""),
    ("", "timeout.linkerd.io/request: '0'", "{timeouts: {request: 2s}}", ""),
    (
        "timeout.linkerd.io/idle: 5s",
        "timeout.linkerd.io/request: 3s",
        "{}",
        " timeouts request 3s",
    ),
    ("", "", "{timeouts: {request: 0s}}", ""),
];

#[tokio::test]
async fn annotations_set_retries_and_timeouts_within_bounds() {
    let row = async |service: &str, on_route: &str, rule: &str, expected: &str| {
        let spec = format!("{{{TO_WEB}, rules: [{rule}]}}");
        let route = route("HTTPRoute shop/r", &format!(", annotations: {{{on_route}}}"), &spec);
        let lines = policy_lines(&format!("{}{route}", services(service, "")), "10.247.0.10:80").await;
        let found = lines[1]
            .strip_prefix("gateway HTTPRoute shop/r")
            .unwrap()
            .split_once(" ->")
            .unwrap()
            .0;
        assert_eq!(found, expected, "{service} / {on_route} / {rule}");
    };
    for &(service, on_route, rule, expected) in RETRIES_AND_TIMEOUTS {
        row(service, on_route, rule, expected).await;
    }
    // An invalid value disables its feature.
    for bad in [
        "retry.linkerd.io/http: 6xx",
        "retry.linkerd.io/http: ''",
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '65536'",
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: many",
        "retry.linkerd.io/http: 5xx, retry.linkerd.io/timeout: 1h30m",
    ] {
        row(
            &format!("{bad}, timeout.linkerd.io/idle: 5s"),
            "",
            "{}",
            " timeouts idle 5s",
        )
        .await;
    }
    for bad in ["1.5s", "-1s", "+1s", "5", "1h30m", "1w", ""] {
        row(&format!("timeout.linkerd.io/request: '{bad}'"), "", "{}", "").await;
    }
}

#[tokio::test]
async fn annotations_set_retries_of_grpc_calls() {
    let spec = format!("{{{TO_WEB}, rules: [{{}}]}}");
    let row = async |service: &str, on_route: &str, expected: &str| {
        let route = route("GRPCRoute shop/r", &format!(", annotations: {{{on_route}}}"), &spec);
        let lines = policy_lines(&format!("{}{route}", services(service, "")), "10.247.0.10:80").await;
        let found = lines[1]
            .strip_prefix("gateway GRPCRoute shop/r")
            .unwrap()
            .split_once(" ->")
            .unwrap()
            .0;
        assert_eq!(found, expected, "{service} / {on_route}");
    };
    let all = "retry.linkerd.io/grpc: 'cancelled,deadline-exceeded,internal,resource-exhausted,unavailable'";
    row(all, "", " retry 1x 1,4,8,13,14").await;
    row(
        all,
        "retry.linkerd.io/grpc: internal, retry.linkerd.io/limit: '2'",
        " retry 2x 13",
    )
    .await;
    row("retry.linkerd.io/grpc: unknown", "", "").await;
    row("retry.linkerd.io/http: 5xx", "", "").await;
}

#[tokio::test]
async fn annotations_set_failure_accrual_within_bounds() {
    let row = async |annotations: &str, expected: &str| {
        let lines = policy_lines(&services(annotations, ""), "10.247.0.10:80").await;
        assert_eq!(
            lines[0],
            format!("detect 10s{expected} of Service shop/web:80"),
            "{annotations}"
        );
    };
    let consecutive = |more: &str| format!("balancer.linkerd.io/failure-accrual: consecutive{more}");
    let unified = |more: &str| format!("balancer.linkerd.io/failure-accrual: unified{more}");
    let key = |name: &str, value: &str| format!(", balancer.linkerd.io/failure-accrual-consecutive-{name}: '{value}'");
    let rate = |name: &str, value: &str| format!(", balancer.alpha.linkerd.io/failure-accrual-{name}: '{value}'");
    row(&consecutive(""), " accrual 7 1s-60s~0.5").await;
    let all = [
        key("max-failures", "3"),
        key("min-penalty", "2s"),
        key("max-penalty", "2s"),
        key("jitter-ratio", "100"),
    ];
    row(&consecutive(&all.concat()), " accrual 3 2s-2s~100").await;
    row(
        &consecutive(&rate("honor-retry-after", "true")),
        " accrual 7 1s-60s~0.5",
    )
    .await;
    row(&unified(""), " accrual 7 or 0.8 of 5 in 10s 1s-60s~0.5").await;
    let all = [
        rate("success-rate-threshold", "0.5"),
        rate("success-rate-window", "10ms"),
        rate("success-rate-min-requests", "1000000"),
        rate("honor-retry-after", "T"),
        key("max-failures", "0"),
    ];
    row(
        &unified(&all.concat()),
        " accrual 0 or 0.5 of 1000000 in 10ms 1s-60s~0.5 retry-after",
    )
    .await;
    let off = [
        rate("success-rate-threshold", "0"),
        rate("success-rate-window", "1ms"),
        rate("success-rate-min-requests", "0"),
    ];
    row(&unified(&off.concat()), " accrual 7 or 0 of 0 in 1ms 1s-60s~0.5").await;
    // Proxies refuse a policy with so many requests, for any threshold.
    let too_many = [
        rate("success-rate-threshold", "0"),
        rate("success-rate-min-requests", "1000001"),
    ];
    row(&unified(&too_many.concat()), "").await;
    for bad in [
        consecutive(&key("max-failures", "-1")),
        consecutive(&key("max-penalty", "0")),
        consecutive(&key("min-penalty", "61s")),
        consecutive(&key("jitter-ratio", "100.1")),
        consecutive(&key("jitter-ratio", "-1")),
        unified(&rate("success-rate-threshold", "1.1")),
        unified(&rate("success-rate-window", "9ms")),
        unified(&rate("success-rate-min-requests", "0")),
        unified(&rate("success-rate-min-requests", "1000001")),
        unified(&rate("honor-retry-after", "yes")),
        "balancer.linkerd.io/failure-accrual: sometimes".to_owned(),
    ] {
        row(&bad, "").await;
    }
    // The failure penalty is a setting of the balancer.
    let row = async |annotations: &str, expected: &str| {
        let lines = policy_lines(&services(annotations, ""), "10.247.0.10:80").await;
        assert_eq!(lines[1], format!("http -> web.shop:80{expected}"), "{annotations}");
    };
    let bias = |more: &str| format!("balancer.alpha.linkerd.io/penalize-failures: 'true'{more}");
    row(&bias(""), " penalty 5s retry-after 300s").await;
    row(
        &bias(
            ", balancer.alpha.linkerd.io/load-biaser-penalty: 1s, balancer.alpha.linkerd.io/load-biaser-max-retry-after: 1m",
        ),
        " penalty 1s retry-after 60s",
    )
    .await;
    row("balancer.alpha.linkerd.io/penalize-failures: 'false'", "").await;
    row("balancer.alpha.linkerd.io/penalize-failures: 'yes'", "").await;
}

/// Stores objects as if an API server had sent them.
pub(crate) fn store(mesh: &Mesh, manifests: &str) {
    let events = Deserializer::from_str(manifests).map(|document| {
        let value = Value::deserialize(document).unwrap();
        let kind = Kind::find(value["apiVersion"].as_str().unwrap(), value["kind"].as_str().unwrap()).unwrap();
        Event::Applied(decode(kind, value).unwrap())
    });
    mesh.cluster.sink().apply(events.collect());
}

#[tokio::test]
async fn the_written_status_decides_on_route_acceptance() {
    let row = async |status: &str, is_served: bool| {
        let spec = format!("{{{TO_WEB}, rules: [{{}}]}}");
        let mesh = mesh("").await;
        store(&mesh, &services("", ""));
        store(
            &mesh,
            &format!("{}{status}", route("HTTPRoute shop/r", "", &spec).replace("---\n", "")),
        );
        let lines = show(&mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap());
        assert_eq!(
            lines[1].starts_with("gateway HTTPRoute shop/r"),
            is_served,
            "{status}: {lines:?}"
        );
    };
    let status = |controller: &str, parent: &str, condition: &str| {
        format!(
            "status: {{parents: [{{controllerName: {controller}, \
             parentRef: {{group: core, kind: Service, namespace: shop, {parent}}}, conditions: [{condition}]}}]}}\n"
        )
    };
    let (ours, web) = ("linkerd.io/policy-controller", "name: web, port: 80");
    let accepted = "{type: Accepted, status: 'True'}";
    row("", false).await;
    row(&status(ours, web, accepted), true).await;
    row(
        &status(
            ours,
            web,
            &format!("{{type: ResolvedRefs, status: 'False'}}, {accepted}"),
        ),
        true,
    )
    .await;
    row(&status(ours, web, "{type: Accepted, status: 'False'}"), false).await;
    row(&status(ours, web, "{type: ResolvedRefs, status: 'True'}"), false).await;
    row(&status("example.com/gateway", web, accepted), false).await;
    row(&status(ours, "name: web-v2, port: 80", accepted), false).await;
    row(&status(ours, "name: web, port: 90", accepted), false).await;
}
