//! Tables of outbound policy: routes that conflict, and fields of routes that are not supported.

use crate::harness::mesh;
use crate::outbound_rows::{CLIENT, TO_WEB, check, policy_lines, route, services, store};
use crate::show::show;

#[tokio::test]
async fn the_oldest_of_conflicting_connection_routes_is_served() {
    let at = |day: u8| format!(", creationTimestamp: '2026-01-0{day}T00:00:00Z'");
    let to = |name: &str| format!("{{backendRefs: [{{name: {name}, port: 80}}]}}");
    let tcp = |id: &str, day: u8, parents: &str, backend: &str| {
        let spec = format!("{{{parents}, rules: [{}]}}", to(backend));
        route(&format!("TCPRoute {id}"), &at(day), &spec)
    };
    let row = async |routes: &[String], target: &str, expected: &[&str]| {
        let manifests = format!("{}{}", services("", ""), routes.concat());
        check(&manifests, target, expected).await;
    };
    let of = |protocol: &str| format!("{protocol} of Service shop/web:80");
    let served = |name: &str, backend: &str| format!("gateway TCPRoute {name} -> 1*{backend}.shop:80");
    let web = "10.247.0.10:80";
    // The oldest route wins, then the first by name.
    let (young, old) = (tcp("shop/a", 2, TO_WEB, "web-v2"), tcp("shop/b", 1, TO_WEB, "web"));
    row(&[young.clone(), old], web, &[&of("opaque"), &served("shop/b", "web")]).await;
    let same = tcp("shop/b", 2, TO_WEB, "web");
    row(
        &[same, young.clone()],
        web,
        &[&of("opaque"), &served("shop/a", "web-v2")],
    )
    .await;
    // A reference without a port includes this port.
    let everywhere = "parentRefs: [{group: core, kind: Service, name: web, namespace: shop}]";
    let all_ports = tcp("shop/all", 1, everywhere, "web");
    row(
        &[young.clone(), all_ports],
        web,
        &[&of("opaque"), &served("shop/all", "web")],
    )
    .await;
    // Routes of namespaces that do not apply to the client do not conflict with its routes.
    let unseen = tcp("other/a", 1, TO_WEB, "web");
    row(&[young, unseen], web, &[&of("opaque"), &served("shop/a", "web-v2")]).await;
    // TLSRoutes with different server names do not conflict.
    let tls = |name: &str, day: u8, hosts: &str| {
        let spec = format!("{{{TO_WEB}{hosts}, rules: [{}]}}", to("web-v2"));
        route(&format!("TLSRoute shop/{name}"), &at(day), &spec)
    };
    let line = |name: &str| format!("gateway TLSRoute shop/{name} -> 1*web-v2.shop:80");
    let routes = [
        tls("a", 2, ", hostnames: [a.b]"),
        tls("b", 1, ", hostnames: [a.b, c.d]"),
        tls("c", 3, ", hostnames: [e.f]"),
        tls("d", 5, ""),
        tls("e", 4, ""),
    ];
    let expected = [line("b a.b c.d"), line("c e.f"), line("e")];
    row(&routes, web, &[&of("tls"), &expected[0], &expected[1], &expected[2]]).await;
    // The same applies to EgressNetworks.
    let network = "---\napiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork\n\
        metadata: {name: lab, namespace: front}\nspec: {trafficPolicy: Deny, networks: [{cidr: 203.0.113.0/24}]}\n";
    let parent = "parentRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 443}]";
    let egress = |name: &str, day: u8| {
        let spec = format!(
            "{{{parent}, rules: [{{backendRefs: [{{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 443}}]}}]}}"
        );
        route(&format!("TCPRoute front/{name}"), &at(day), &spec)
    };
    row(
        &[network.to_owned(), egress("a", 2), egress("b", 1)],
        "203.0.113.1:443",
        &[
            "opaque of policy EgressNetwork front/lab:443",
            "gateway TCPRoute front/b -> 1*203.0.113.1:443",
        ],
    )
    .await;
}

#[tokio::test]
async fn an_egress_network_backend_has_the_port_of_the_reference() {
    use tulle_proto::meta::metadata;
    use tulle_proto::outbound::opaque_route::distribution;
    use tulle_proto::outbound::proxy_protocol;

    let spec = "{parentRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 443}], \
        rules: [{backendRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 8443}]}]}";
    let manifests = format!(
        "apiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork\nmetadata: {{name: lab, namespace: front}}\n\
         spec: {{trafficPolicy: Deny, networks: [{{cidr: 203.0.113.0/24}}]}}\n{}",
        route("TCPRoute front/r", "", spec)
    );
    let mesh = mesh(&manifests).await;
    let policy = mesh.get_policy(CLIENT, "203.0.113.1:443").await.unwrap();
    let Some(proxy_protocol::Kind::Opaque(opaque)) = policy.protocol.unwrap().kind else {
        panic!("not opaque")
    };
    let backends = opaque.routes[0].rules[0].backends.clone().unwrap();
    let Some(distribution::Kind::RandomAvailable(random)) = backends.kind else {
        panic!("no weights")
    };
    let backend = random.backends[0].backend.clone().unwrap().backend.unwrap();
    let Some(metadata::Kind::Resource(resource)) = backend.metadata.unwrap().kind else {
        panic!("no resource")
    };
    assert_eq!(
        (&*resource.kind, &*resource.name, resource.port),
        ("EgressNetwork", "lab", 8443)
    );
}

#[tokio::test]
async fn the_failure_penalty_applies_where_responses_are_parsed() {
    let bias = "balancer.alpha.linkerd.io/penalize-failures: 'true'";
    let penalty = " penalty 5s retry-after 300s";
    let lines = policy_lines(&services(bias, ""), "10.247.0.10:80").await;
    // Connections that are not HTTP use the same balancer as HTTP.
    let both = ["http", "opaq"].map(|name| format!("{name} -> web.shop:80{penalty}"));
    assert_eq!(lines[1..], both);
    let opaque = format!("{bias}, config.linkerd.io/opaque-ports: '80'");
    let lines = policy_lines(&services(&opaque, ""), "10.247.0.10:80").await;
    assert_eq!(lines[1..], ["opaq -> web.shop:80"]);
    let to_parent = ("", "web.shop:80");
    let to_other = ("backendRefs: [{name: web-v2, port: 80}]", "1*web-v2.shop:80");
    for (kind, expected, rules) in [
        ("HTTPRoute", penalty, &[to_parent, to_other][..]),
        ("GRPCRoute", penalty, &[to_parent, to_other]),
        // These kinds require a backend.
        ("TLSRoute", "", &[to_other]),
        ("TCPRoute", "", &[to_other]),
    ] {
        for (backends, shown) in rules {
            let spec = format!("{{{TO_WEB}, rules: [{{{backends}}}]}}");
            let manifests = format!("{}{}", services(bias, ""), route(&format!("{kind} shop/r"), "", &spec));
            let lines = policy_lines(&manifests, "10.247.0.10:80").await;
            assert_eq!(lines[1], format!("gateway {kind} shop/r -> {shown}{expected}"));
        }
    }
}

#[tokio::test]
async fn the_first_of_duplicate_matches_is_used() {
    use tulle_proto::http_route::header_match::Value;
    use tulle_proto::outbound::proxy_protocol;

    let spec = format!(
        "{{{TO_WEB}, rules: [{{matches: [{{headers: [{{name: X-Canary, value: a}}, {{name: x-canary, value: b}}, \
         {{name: other, value: c}}], queryParams: [{{name: q, value: a}}, {{name: Q, value: b}}]}}], \
         filters: [{{type: RequestHeaderModifier, requestHeaderModifier: \
         {{set: [{{name: X-A, value: a}}, {{name: x-a, value: b}}]}}}}]}}]}}"
    );
    let mesh = mesh(&format!("{}{}", services("", ""), route("HTTPRoute shop/r", "", &spec))).await;
    let policy = mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    let Some(proxy_protocol::Kind::Detect(detect)) = policy.protocol.unwrap().kind else {
        panic!("nothing to detect")
    };
    let rule = detect.http1.unwrap().routes[0].rules[0].clone();
    let [matched] = &rule.matches[..] else {
        panic!("{:?}", rule.matches)
    };
    let headers: Vec<_> = matched
        .headers
        .iter()
        .map(|header| (&*header.name, header.value.clone().unwrap()))
        .collect();
    assert_eq!(
        headers,
        [
            ("X-Canary", Value::Exact(b"a".to_vec())),
            ("other", Value::Exact(b"c".to_vec()))
        ]
    );
    let params: Vec<_> = matched.query_params.iter().map(|param| &*param.name).collect();
    assert_eq!(params, ["q", "Q"]);
    let set = format!("{:?}", rule.filters);
    assert!(set.contains("X-A") && !set.contains("x-a"), "{set}");
}

#[tokio::test]
async fn rules_set_retries() {
    let row = async |service: &str, on_route: &str, rule: &str, expected: &str| {
        let spec = format!("{{{TO_WEB}, rules: [{{{rule}}}]}}");
        let route = route("HTTPRoute shop/r", &format!(", annotations: {{{on_route}}}"), &spec);
        let lines = policy_lines(&format!("{}{route}", services(service, "")), "10.247.0.10:80").await;
        let expected = format!("gateway HTTPRoute shop/r{expected} -> web.shop:80");
        assert_eq!(lines[1], expected, "{service} / {on_route} / {rule}");
    };
    let own = async |rule: &str, expected: &str| row("", "", rule, expected).await;
    own("retry: {codes: [503]}", " retry 1x 503-503").await;
    own("retry: {codes: [500, 429], attempts: 3}", " retry 3x 500-500,429-429").await;
    own("retry: {}", " retry 1x 502-504").await;
    own("retry: {codes: [503], attempts: 0}", "").await;
    own(
        "retry: {attempts: 65535, backoff: 1s500ms}",
        " retry 65535x 502-504 after 1500ms-15s~1",
    )
    .await;
    own("retry: {backoff: 5ms}", " retry 1x 502-504 after 5ms-250ms~1").await;
    own("retry: {backoff: 0s}", " retry 1x 502-504 after 0s-250ms~1").await;
    // Attempts that time out are retried.
    own(
        "retry: {codes: [503]}, timeouts: {request: 2s, backendRequest: 1s}",
        " timeouts request 2s response 1s retry 1x 503-503 each 1s",
    )
    .await;
    row(
        "timeout.linkerd.io/response: 1s",
        "",
        "retry: {codes: [503]}",
        " timeouts response 1s retry 1x 503-503",
    )
    .await;
    // An annotation of the route takes precedence over the rule, and the rule over the annotations of the parent.
    let rule = "retry: {codes: [503], attempts: 2, backoff: 1s}";
    let of_rule = " retry 2x 503-503 after 1s-10s~1";
    let of_service = "retry.linkerd.io/http: 5xx, retry.linkerd.io/limit: '7', retry.linkerd.io/timeout: 1s";
    row(of_service, "", rule, of_rule).await;
    row(of_service, "", "retry: {attempts: 0}", "").await;
    row(of_service, "retry.linkerd.io/http: '404'", rule, " retry 1x 404-404").await;
    row("", "retry.linkerd.io/limit: '7'", rule, of_rule).await;
    row("", "retry.linkerd.io/grpc: internal", rule, of_rule).await;
}

#[tokio::test]
async fn requests_of_unsupported_rules_get_an_error_with_the_cause() {
    let row = async |kind: &str, rule: &str, expected: &str| {
        let mesh = mesh("").await;
        store(&mesh, &services("", ""));
        let spec = format!("{{{TO_WEB}, rules: [{{}}, {rule}]}}");
        let status = "status: {parents: [{controllerName: linkerd.io/policy-controller, \
            parentRef: {group: core, kind: Service, namespace: shop, name: web, port: 80}, \
            conditions: [{type: Accepted, status: 'False', reason: UnsupportedValue}]}]}\n";
        let manifest = route(&format!("{kind} shop/r"), "", &spec).replace("---\n", "");
        store(&mesh, &format!("{manifest}{status}"));
        let lines = show(&mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap());
        // The other rules are served.
        assert_eq!(lines[1], format!("gateway {kind} shop/r -> web.shop:80"), "{rule}");
        let cause = format!("gateway {kind} shop/r fail {expected}");
        assert!(lines[2].starts_with(&cause), "{rule}: {lines:?}");
        assert!(!lines[2].contains(" retry 1x"), "{rule}: {lines:?}");
    };
    let unsupported = |name: &str| format!("500 \"HTTPRoute shop/r: filter {name} is not supported by the mesh\"");
    let extension = "{type: ExtensionRef, extensionRef: {group: a, kind: b, name: c}}";
    let rule = format!("{{filters: [{extension}]}}");
    row("HTTPRoute", &rule, &unsupported("ExtensionRef")).await;
    for rule in [
        "{matches: [{path: {type: RegularExpression, value: '('}}]}",
        "{matches: [{headers: [{name: a, type: RegularExpression, value: 'a)|(b'}]}]}",
        "{matches: [{headers: [{name: 'a b', value: c}]}]}",
        "{filters: [{type: RequestRedirect, requestRedirect: {hostname: 'a b'}}]}",
        "{filters: [{type: RequestRedirect, requestRedirect: {statusCode: 200}}]}",
        "{filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: a, value: \"b\\n\"}]}}]}",
        "{retry: {codes: [399]}}",
        "{retry: {codes: [503, 600]}}",
        "{filters: [{type: CORS, cors: {allowOrigins: [a.b]}}]}",
    ] {
        row("HTTPRoute", rule, "500 \"HTTPRoute shop/r: ").await;
    }
    let response = "{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [x]}}";
    let cors = "{type: CORS, cors: {}}";
    for filter in [response, "{type: URLRewrite, urlRewrite: {hostname: x}}", cors] {
        row(
            "GRPCRoute",
            &format!("{{filters: [{filter}]}}"),
            "13 \"GRPCRoute shop/r: filter ",
        )
        .await;
    }
    row(
        "GRPCRoute",
        "{retry: {attempts: 1}}",
        "13 \"GRPCRoute shop/r: rules[].retry is supported only in an HTTPRoute of gateway.networking.k8s.io; ",
    )
    .await;
    // An unsupported filter of a backend fails its share of the requests.
    let spec = format!(
        "{{{TO_WEB}, rules: [{{backendRefs: [{{name: web, port: 80}}, {{name: web-v2, port: 80, filters: [{extension}]}}]}}]}}"
    );
    let manifests = format!("{}{}", services("", ""), route("HTTPRoute shop/r", "", &spec));
    let lines = policy_lines(&manifests, "10.247.0.10:80").await;
    assert_eq!(
        lines[1],
        format!(
            "gateway HTTPRoute shop/r -> 1*web.shop:80 | 1*web-v2.shop:80 fail {}",
            unsupported("ExtensionRef")
        )
    );
}
