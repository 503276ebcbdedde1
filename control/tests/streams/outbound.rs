//! Responses of the outbound policy service's `Get` and `Watch` to manifests.

use tonic::Code;
use tulle_control::cluster::Config;
use tulle_core::ports::PortSet;
use tulle_proto::meta::{Metadata, metadata};
use tulle_proto::outbound::backend::{Kind as BackendKind, balance_p2c::Load, endpoint_discovery};
use tulle_proto::outbound::http_route::distribution::Kind as Distribution;
use tulle_proto::outbound::http_route::filter::Kind as Filter;
use tulle_proto::outbound::proxy_protocol::{Detect, Kind};
use tulle_proto::outbound::{Backend, HttpRoute, OutboundPolicy, failure_accrual, http_route, opaque_route};

use crate::harness::{eventually, mesh, mesh_with, next};
use crate::show::show;

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.247.0.10
  ports: [{name: http, port: 80}, {name: grpc, port: 90}, {name: bytes, port: 5432}]
---
apiVersion: v1
kind: Service
metadata: {name: web-v2, namespace: shop}
spec: {clusterIP: 10.247.0.11, ports: [{port: 80}]}
";

const CLIENT: &str = r#"{"ns":"front","pod":"front-0"}"#;

fn annotated(annotations: &str) -> String {
    WEB.replacen(
        "namespace: shop}",
        &format!("namespace: shop, annotations: {{{annotations}}}}}"),
        1,
    )
}

fn kind(policy: &OutboundPolicy) -> &Kind {
    policy.protocol.as_ref().unwrap().kind.as_ref().unwrap()
}

fn detect(policy: &OutboundPolicy) -> &Detect {
    match kind(policy) {
        Kind::Detect(detect) => detect,
        other => panic!("no detection: {other:?}"),
    }
}

fn http(policy: &OutboundPolicy) -> &[HttpRoute] {
    &detect(policy).http1.as_ref().unwrap().routes
}

/// Returns the object or default in the metadata, as `kind namespace/name:port`.
fn name(metadata: Option<&Metadata>) -> String {
    match metadata.unwrap().kind.as_ref().unwrap() {
        metadata::Kind::Default(name) => name.clone(),
        metadata::Kind::Resource(resource) => {
            assert!(!resource.group.is_empty());
            format!(
                "{} {}/{}:{}",
                resource.kind, resource.namespace, resource.name, resource.port
            )
        }
    }
}

fn names(routes: &[HttpRoute]) -> Vec<String> {
    routes.iter().map(|route| name(route.metadata.as_ref())).collect()
}

/// Returns the target of a backend: a path, an address, or none.
fn backend_target(backend: &Backend) -> String {
    assert!(backend.queue.unwrap().failfast_timeout.is_some());
    match &backend.kind {
        Some(BackendKind::Balancer(balancer)) => {
            assert!(balancer.load.is_some());
            let Some(endpoint_discovery::Kind::Dst(get)) = &balancer.discovery.as_ref().unwrap().kind else {
                panic!()
            };
            get.path.clone()
        }
        Some(BackendKind::Forward(to)) => std::net::SocketAddr::try_from(to.addr.unwrap()).unwrap().to_string(),
        None => "nowhere".to_owned(),
    }
}

/// Returns the backends of a rule as `weight*target`; `FirstAvailable` backends have no weight.
fn backends(rule: &http_route::Rule) -> Vec<String> {
    match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
        Distribution::FirstAvailable(first) => first
            .backends
            .iter()
            .map(|route| backend_target(route.backend.as_ref().unwrap()))
            .collect(),
        Distribution::RandomAvailable(random) => random
            .backends
            .iter()
            .map(|weighted| {
                let backend = weighted.backend.as_ref().unwrap().backend.as_ref().unwrap();
                format!("{}*{}", weighted.weight, backend_target(backend))
            })
            .collect(),
        Distribution::Empty(_) => Vec::new(),
    }
}

#[tokio::test]
async fn a_service_without_routes_is_balanced_for_every_protocol() {
    let mesh = mesh(WEB).await;
    for target in [
        "10.247.0.10:80",
        "web.shop.svc.cluster.local:80",
        "web.shop.svc:80",
        "web.shop.svc.cluster.local.",
    ] {
        let policy = mesh.get_policy(CLIENT, target).await.unwrap();
        assert_eq!(name(policy.metadata.as_ref()), "Service shop/web:80", "{target}");
        let detect = detect(&policy);
        assert_eq!(detect.timeout.unwrap().seconds, 10);
        assert_eq!(
            detect.http1.as_ref().unwrap().routes,
            detect.http2.as_ref().unwrap().routes
        );
        assert_eq!(names(http(&policy)), ["http"]);
        assert_eq!(backends(&http(&policy)[0].rules[0]), ["web.shop.svc.cluster.local:80"]);
        let [opaque] = &*detect.opaque.as_ref().unwrap().routes else {
            panic!()
        };
        assert_eq!(name(opaque.metadata.as_ref()), "opaq");
        let Some(opaque_route::distribution::Kind::FirstAvailable(first)) =
            &opaque.rules[0].backends.as_ref().unwrap().kind
        else {
            panic!()
        };
        assert_eq!(
            backend_target(first.backends[0].backend.as_ref().unwrap()),
            "web.shop.svc.cluster.local:80"
        );
    }
}

#[tokio::test]
async fn the_protocol_comes_from_the_port_or_the_opaque_annotation() {
    let check = async |yaml: String, config: Config, expected: &str| {
        let mesh = mesh_with(&yaml, config).await;
        let policy = mesh.get_policy(CLIENT, "10.247.0.10:5432").await.unwrap();
        let found = match kind(&policy) {
            Kind::Detect(_) => "detect",
            Kind::Opaque(_) => "opaque",
            Kind::Http1(_) => "http1",
            Kind::Http2(_) => "http2",
            Kind::Grpc(_) => "grpc",
            Kind::Tls(_) => "tls",
        };
        assert_eq!(found, expected, "{yaml}");
        // Proxies carry the bytes of a port with an opaque profile, whatever its policy is.
        let profile = mesh.first_profile("10.247.0.10:5432").await;
        assert!(!profile.opaque_protocol || found == "opaque", "{yaml}");
    };
    let app = |protocol: &str| WEB.replace("port: 5432", &format!("port: 5432, appProtocol: {protocol}"));
    let default = Config::default;
    check(WEB.to_owned(), default(), "detect").await;
    check(app("HTTP"), default(), "http1").await;
    check(app("kubernetes.io/h2c"), default(), "http2").await;
    check(app("linkerd.io/opaque"), default(), "opaque").await;
    check(app("postgres"), default(), "opaque").await;
    check(
        annotated("config.linkerd.io/opaque-ports: \"5432\""),
        default(),
        "opaque",
    )
    .await;
    let opaque = || Config {
        default_opaque_ports: "5432".parse::<PortSet>().unwrap(),
        ..Config::default()
    };
    check(WEB.to_owned(), opaque(), "opaque").await;
    check(annotated("config.linkerd.io/opaque-ports: \"\""), opaque(), "detect").await;
    // A port that is marked as opaque is opaque, whatever its `appProtocol` is.
    check(app("HTTP"), opaque(), "opaque").await;
    let marked = app("kubernetes.io/h2c").replacen(
        "namespace: shop}",
        "namespace: shop, annotations: {config.linkerd.io/opaque-ports: bytes}}",
        1,
    );
    check(marked, default(), "opaque").await;
}

#[tokio::test]
async fn names_of_missing_services_have_a_policy() {
    let mesh = mesh("").await;
    let mut stream = mesh
        .watch_policy(CLIENT, "web.shop.svc.cluster.local:5432")
        .await
        .unwrap();
    assert_eq!(names(http(&next(&mut stream).await)), ["http"]);
    mesh.manifests
        .write("mesh.yaml", &annotated("config.linkerd.io/opaque-ports: \"5432\""));
    assert!(matches!(kind(&next(&mut stream).await), Kind::Opaque(_)));
}

#[tokio::test]
async fn a_port_that_a_service_does_not_list_is_forbidden() {
    let mesh = mesh(WEB).await;
    let policy = mesh.get_policy(CLIENT, "10.247.0.10:9999").await.unwrap();
    let Kind::Opaque(opaque) = kind(&policy) else { panic!() };
    assert_eq!(name(opaque.routes[0].metadata.as_ref()), "undefined-port");
    let forbidden = &opaque.routes[0].rules[0].filters[0].kind;
    assert!(matches!(forbidden, Some(opaque_route::filter::Kind::Forbidden(_))));
}

#[tokio::test]
async fn a_response_filter_of_a_policy_route_applies_to_responses() {
    // The custom resource definition refuses this filter, so only manifest files can have it.
    let route = "---\napiVersion: policy.linkerd.io/v1beta3\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec:\n  \
                 parentRefs: [{group: core, kind: Service, name: web, port: 80}]\n  \
                 rules: [{filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [x]}}]}]\n";
    let mesh = mesh(&format!("{WEB}{route}")).await;
    let lines = show(&mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap());
    assert!(
        lines[1].starts_with("policy HTTPRoute shop/r response-headers ->"),
        "{lines:?}"
    );
}

const ROUTE: &str = "
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: split, namespace: shop}
spec:
  parentRefs: [{group: core, kind: Service, name: web, port: 80}]
  rules:
  - matches: [{path: {value: /v2}}]
    backendRefs: [{name: web, port: 80, weight: 3}, {name: web-v2, port: 80}, {name: gone, port: 80}]
    timeouts: {request: 2s, backendRequest: 1s}
  - backendRefs:
    - name: web-v2
      port: 80
      filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [x-a]}}]
  - backendRefs: [{name: web, port: 80, weight: 0}]
  - backendRefs: [{name: bucket, kind: Bucket}]
  - {}
";

#[tokio::test]
async fn objects_of_outbound_policies_are_counted() {
    let mesh = mesh(&format!("{WEB}{ROUTE}")).await;
    let watch = mesh.watch_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    let page = mesh.registry.render();
    for line in [
        "outbound_index_service_index_size 2",
        "outbound_index_service_info_index_size 2",
        "outbound_index_service_route_index_size{namespace=\"shop\"} 1",
        "outbound_index_service_port_route_index_size{namespace=\"shop\"} 1",
    ] {
        assert!(page.lines().any(|other| other == line), "no {line} in {page}");
    }
    drop(watch);
    let none = "outbound_index_service_port_route_index_size{namespace=\"shop\"} 0";
    eventually(|| mesh.registry.render().contains(none)).await;
}

#[tokio::test]
async fn routes_split_traffic_and_bad_backends_fail_their_share() {
    let mesh = mesh(&format!("{WEB}{ROUTE}")).await;
    let policy = mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    assert_eq!(names(http(&policy)), ["HTTPRoute shop/split:0"]);
    let [split, filtered, weightless, foreign, plain] = &*http(&policy)[0].rules else {
        panic!()
    };
    let (web, v2) = ("web.shop.svc.cluster.local:80", "web-v2.shop.svc.cluster.local:80");
    assert_eq!(
        backends(split),
        [format!("3*{web}"), format!("1*{v2}"), "1*nowhere".to_owned()]
    );
    let timeouts = split.timeouts.unwrap();
    assert_eq!(
        (timeouts.request.unwrap().seconds, timeouts.response.unwrap().seconds),
        (2, 1)
    );
    assert_eq!(backends(filtered), [format!("1*{v2}")]);
    assert_eq!(backends(weightless), ["nowhere"]);
    assert_eq!(backends(foreign), ["1*nowhere"]);
    assert_eq!(backends(plain), [web]);
    let route_backends = |rule: &http_route::Rule| match rule.backends.clone().unwrap().kind.unwrap() {
        Distribution::FirstAvailable(first) => first.backends,
        Distribution::RandomAvailable(random) => random
            .backends
            .into_iter()
            .map(|weighted| weighted.backend.unwrap())
            .collect(),
        Distribution::Empty(_) => Vec::new(),
    };
    let missing = &route_backends(split)[2];
    assert_eq!(
        name(missing.backend.as_ref().unwrap().metadata.as_ref()),
        "Service shop/gone:80"
    );
    let failure = missing.filters[0].kind.as_ref();
    assert!(matches!(failure, Some(Filter::FailureInjector(fail)) if fail.message == "Service not found gone"));
    let filters = &route_backends(filtered)[0].filters;
    assert!(matches!(filters[0].kind, Some(Filter::ResponseHeaderModifier(_))));
    for rule in [weightless, foreign] {
        let backend = &route_backends(rule)[0];
        assert_eq!(name(backend.backend.as_ref().unwrap().metadata.as_ref()), "invalid");
        assert!(matches!(&backend.filters[0].kind, Some(Filter::FailureInjector(fail)) if fail.status == 500));
    }
    // The route does not apply to other ports of the service.
    assert_eq!(
        names(http(&mesh.get_policy(CLIENT, "10.247.0.10:5432").await.unwrap())),
        ["http"]
    );
}

#[tokio::test]
async fn consumer_routes_are_added_to_producer_routes() {
    let consumer = ROUTE
        .replace("name: split, namespace: shop", "name: mine, namespace: front")
        .replace("name: web, port: 80}]", "name: web, namespace: shop, port: 80}]");
    let mesh = mesh(&format!("{WEB}{ROUTE}{consumer}")).await;
    let front = mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    assert_eq!(
        names(http(&front)),
        ["HTTPRoute front/mine:0", "HTTPRoute shop/split:0"]
    );
    let other = mesh.get_policy("other:pod", "10.247.0.10:80").await.unwrap();
    assert_eq!(names(http(&other)), ["HTTPRoute shop/split:0"]);
}

#[tokio::test]
async fn route_acceptance_follows_the_manifests_not_the_status() {
    let status = "status: {parents: [{controllerName: linkerd.io/policy-controller, \
        parentRef: {group: core, kind: Service, name: web, port: 80}, conditions: [{type: Accepted, status: \"False\"}]}]}\n";
    let accepted = mesh(&format!("{WEB}{ROUTE}{status}")).await;
    let policy = accepted.get_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    assert_eq!(names(http(&policy)), ["HTTPRoute shop/split:0"]);
    // A headless service cannot be the parent of a route.
    let headless = WEB.replace("10.247.0.10", "None");
    let refused = mesh(&format!("{headless}{ROUTE}{status}")).await;
    let policy = refused
        .get_policy(CLIENT, "web.shop.svc.cluster.local:80")
        .await
        .unwrap();
    assert_eq!(names(http(&policy)), ["http"]);
}

#[tokio::test]
async fn grpc_routes_take_precedence_over_http_routes_of_the_same_port() {
    let grpc = "
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata:
  name: calls
  namespace: shop
  annotations: {retry.linkerd.io/grpc: \"unavailable,deadline-exceeded\", retry.linkerd.io/limit: \"2\"}
spec:
  parentRefs: [{group: core, kind: Service, name: web, port: 80}]
  rules: [{matches: [{method: {service: shop.Items}}], backendRefs: [{name: web-v2, port: 80}]}]
";
    let mesh = mesh(&format!("{WEB}{ROUTE}{grpc}")).await;
    let policy = mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap();
    let Kind::Grpc(found) = kind(&policy) else {
        panic!("{policy:?}")
    };
    let rule = &found.routes[0].rules[0];
    assert_eq!(rule.matches[0].rpc.as_ref().unwrap().service, "shop.Items");
    let retry = rule.retry.as_ref().unwrap();
    assert_eq!((retry.max_retries, retry.max_request_bytes), (2, 65_536));
    let conditions = retry.conditions.unwrap();
    assert!(conditions.unavailable && conditions.deadine_exceeded && !conditions.internal);
}

#[tokio::test]
async fn annotations_of_a_service_apply_to_its_routes() {
    let annotations = "retry.linkerd.io/http: 5xx, retry.linkerd.io/timeout: 300ms, timeout.linkerd.io/request: 2s, \
        balancer.linkerd.io/failure-accrual: consecutive, balancer.alpha.linkerd.io/penalize-failures: \"true\"";
    let mesh = mesh(&format!("{}{ROUTE}", annotated(annotations))).await;
    for port in [80, 5432] {
        let policy = mesh.get_policy(CLIENT, &format!("10.247.0.10:{port}")).await.unwrap();
        let accrual = detect(&policy).http1.as_ref().unwrap().failure_accrual.unwrap();
        let Some(failure_accrual::Kind::ConsecutiveFailures(failures)) = accrual.kind else {
            panic!()
        };
        assert_eq!(
            (
                failures.max_failures,
                failures.backoff.unwrap().max_backoff.unwrap().seconds
            ),
            (7, 60)
        );
        let rule = http(&policy)[0].rules.last().unwrap();
        let retry = rule.retry.as_ref().unwrap();
        let range = retry.conditions.as_ref().unwrap().status_ranges[0];
        assert_eq!(
            (range.start, range.end, retry.timeout.unwrap().nanos),
            (500, 599, 300_000_000)
        );
        assert_eq!(rule.timeouts.unwrap().request.unwrap().seconds, 2);
        let Some(Distribution::FirstAvailable(first)) = &rule.backends.as_ref().unwrap().kind else {
            panic!()
        };
        let Some(BackendKind::Balancer(balancer)) = &first.backends[0].backend.as_ref().unwrap().kind else {
            panic!()
        };
        assert!(matches!(&balancer.load, Some(Load::PenaltyPeakEwma(load)) if load.penalty.unwrap().seconds == 5));
    }
}

#[tokio::test]
async fn addresses_outside_the_cluster_are_forwarded_and_unknown_ones_inside_have_no_policy() {
    let mesh = mesh(WEB).await;
    let policy = mesh.get_policy(CLIENT, "203.0.113.1:443").await.unwrap();
    assert_eq!(name(policy.metadata.as_ref()), "egress-fallback");
    assert_eq!(backends(&http(&policy)[0].rules[0]), ["203.0.113.1:443"]);
    let status = mesh.get_policy(CLIENT, "10.1.0.1:8080").await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "No such service"));
}

fn egress(name: &str, namespace: &str, policy: &str, networks: &str) -> String {
    format!(
        "---\napiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec: {{trafficPolicy: {policy}{networks}}}\n"
    )
}

#[tokio::test]
async fn egress_networks_of_the_client_or_the_mesh_apply_outside_the_cluster() {
    let mesh = mesh(&format!(
        "{}{}{}",
        egress("all", "linkerd-egress", "Deny", ""),
        egress("wide", "front", "Allow", ", networks: [{cidr: 203.0.0.0/8}]"),
        egress(
            "narrow",
            "front",
            "Deny",
            ", networks: [{cidr: 203.0.113.0/24, except: [203.0.113.9/32]}]"
        ),
    ))
    .await;
    let check = async |client: &str, target: &str, expected: &str, route: &str| {
        let policy = mesh.get_policy(client, target).await.unwrap();
        assert_eq!(name(policy.metadata.as_ref()), expected, "{client} {target}");
        assert_eq!(names(http(&policy)), [route], "{client} {target}");
        assert_eq!(backends(&http(&policy)[0].rules[0]), [target]);
    };
    check(
        CLIENT,
        "203.0.114.1:443",
        "EgressNetwork front/wide:443",
        "http-egress-allow",
    )
    .await;
    check(
        CLIENT,
        "203.0.113.1:443",
        "EgressNetwork front/narrow:443",
        "http-egress-deny",
    )
    .await;
    check(
        CLIENT,
        "203.0.113.9:443",
        "EgressNetwork front/wide:443",
        "http-egress-allow",
    )
    .await;
    check(CLIENT, "198.51.100.1:443", "egress-fallback", "egress-fallback").await;
    check(
        "other:pod",
        "198.51.100.1:443",
        "EgressNetwork linkerd-egress/all:443",
        "http-egress-deny",
    )
    .await;
    let denied = mesh.get_policy("other:pod", "198.51.100.1:443").await.unwrap();
    let filter = &http(&denied)[0].rules[0].filters[0].kind;
    let Some(Filter::FailureInjector(failure)) = filter else {
        panic!()
    };
    assert_eq!((failure.status, failure.message.as_str()), (403, "traffic not allowed"));
    let opaque = &detect(&denied).opaque.as_ref().unwrap().routes[0];
    assert_eq!(name(opaque.metadata.as_ref()), "tcp-egress-deny");
    assert!(matches!(
        opaque.rules[0].filters[0].kind,
        Some(opaque_route::filter::Kind::Forbidden(_))
    ));
}

#[tokio::test]
async fn default_opaque_ports_apply_outside_the_cluster_too() {
    let config = Config {
        default_opaque_ports: "3306".parse().unwrap(),
        ..Config::default()
    };
    let network = egress("lab", "front", "Allow", ", networks: [{cidr: 203.0.113.0/24}]");
    for (marked, port, protocol) in [
        (network.clone(), 3306, "opaque"),
        (network.clone(), 443, "detect 10s"),
        (
            network.replace(
                "name: lab",
                "annotations: {config.linkerd.io/opaque-ports: '443'}, name: lab",
            ),
            3306,
            "detect 10s",
        ),
    ] {
        let mesh = mesh_with(&marked, config.clone()).await;
        let lines = show(&mesh.get_policy(CLIENT, &format!("203.0.113.1:{port}")).await.unwrap());
        assert_eq!(
            lines[0],
            format!("{protocol} of policy EgressNetwork front/lab:{port}"),
            "{marked}"
        );
    }
}

#[tokio::test]
async fn routes_of_egress_networks_do_not_apply_to_cluster_addresses() {
    let route = "
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: api, namespace: front}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab, port: 80}]
  hostnames: [api.example]
  rules: [{backendRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: lab}]}]
";
    let check = async |net: &str, target: &str, expected: &[&str]| {
        let network = egress("lab", "front", "Deny", &format!(", networks: [{{cidr: {net}}}]"));
        let mesh = mesh(&format!("{network}{route}")).await;
        let policy = mesh.get_policy(CLIENT, target).await.unwrap();
        assert_eq!(names(http(&policy)), expected);
        policy
    };
    let allowed = check(
        "203.0.113.0/24",
        "203.0.113.1:80",
        &["HTTPRoute front/api:0", "http-egress-deny"],
    )
    .await;
    assert_eq!(backends(&http(&allowed)[0].rules[0]), ["1*203.0.113.1:80"]);
    check("203.0.113.0/24", "203.0.113.1:81", &["http-egress-deny"]).await;
    check("10.77.0.0/16", "10.77.0.1:80", &["http-egress-deny"]).await;
}

#[tokio::test]
async fn a_stream_ends_when_its_address_is_no_longer_known() {
    let network = egress("lab", "front", "Allow", ", networks: [{cidr: 10.77.0.0/16}]");
    let mesh = mesh(&network).await;
    let mut stream = mesh.watch_policy(CLIENT, "10.77.0.5:80").await.unwrap();
    next(&mut stream).await;
    mesh.manifests.write("mesh.yaml", "");
    assert!(crate::harness::with_timeout(stream.message()).await.unwrap().is_none());
}

#[tokio::test]
async fn malformed_requests_are_refused() {
    let mesh = mesh(WEB).await;
    for (client, target, code) in [
        ("", "10.247.0.10:80", Code::InvalidArgument),
        (CLIENT, "10.247.0.10:0", Code::InvalidArgument),
        (CLIENT, "", Code::InvalidArgument),
        (CLIENT, "example.org:80", Code::NotFound),
    ] {
        assert_eq!(
            mesh.get_policy(client, target).await.unwrap_err().code(),
            code,
            "{client} {target}"
        );
    }
}
