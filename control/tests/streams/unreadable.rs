//! Unreadable objects: which policy applies instead, and where the problem is reported.

use tulle_proto::inbound::proxy_protocol::Kind;
use tulle_proto::inbound::{HttpRoute, Server, grpc_route, http_route};

use crate::harness::{Mesh, eventually, mesh, next};
use crate::outbound_rows::{CLIENT, TO_WEB, services};
use crate::show::show;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: shop, labels: {app: web, linkerd.io/control-plane-ns: linkerd}}
spec: {containers: [{name: web, ports: [{name: http, containerPort: 8080}]}]}
status: {podIP: 10.1.0.1}
";

const WEB: &str = r#"{"ns":"shop","pod":"web-0"}"#;

fn object(api_version: &str, kind: &str, name: &str, spec: &str) -> String {
    format!("---\napiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n")
}

fn policy(kind: &str, name: &str, spec: &str) -> String {
    let version = if kind == "Server" { "v1beta3" } else { "v1alpha1" };
    object(&format!("policy.linkerd.io/{version}"), kind, name, spec)
}

fn server(name: &str, spec: &str) -> String {
    policy("Server", name, spec)
}

/// Permits all clients of the Server.
fn permit_all(server: &str) -> String {
    let spec = format!(
        "{{targetRef: {{group: policy.linkerd.io, kind: Server, name: {server}}}, requiredAuthenticationRefs: []}}"
    );
    policy("AuthorizationPolicy", "everybody", &spec)
}

async fn port(mesh: &Mesh, port: u32) -> Server {
    mesh.get_port(WEB, port).await.unwrap()
}

fn n_authorizations(server: &Server) -> usize {
    server.authorizations.len()
}

fn counted(mesh: &Mesh) -> Vec<String> {
    let page = mesh.registry.render();
    let lines = page
        .lines()
        .filter_map(|line| line.strip_prefix("tulle_unreadable_objects"));
    let mut lines: Vec<_> = lines.filter(|line| line.ends_with(" 1")).map(str::to_owned).collect();
    lines.sort();
    lines
}

fn line(kind: &str, name: &str) -> String {
    format!("{{kind=\"{kind}\",namespace=\"shop\",name=\"{name}\"}} 1")
}

#[tokio::test]
async fn an_unreadable_server_denies_all_clients_on_the_ports_it_may_select() {
    let selector = "podSelector: {matchLabels: {app: web}}";
    let other = "podSelector: {matchLabels: {app: other}}";
    // Whether ports 8080 and 9090 are denied.
    for (spec, expected) in [
        (
            format!("{{{selector}, port: 8080, accessPolicy: Nobody}}"),
            [true, false],
        ),
        (format!("{{{selector}, port: http, colour: red}}"), [true, false]),
        (
            format!("{{{selector}, port: 8080, proxyProtocol: HTTP/3}}"),
            [true, false],
        ),
        (format!("{{{other}, port: 8080, colour: red}}"), [false, false]),
        (format!("{{{selector}, port: 80.5}}"), [true, true]),
        (format!("{{{selector}}}"), [true, true]),
        (
            format!("{{{selector}, externalWorkloadSelector: {{}}, port: 8080}}"),
            [true, false],
        ),
        (
            "{podSelector: {matchLabel: {app: other}}, port: 8080}".to_owned(),
            [true, false],
        ),
        ("{serviceSelector: {}, port: 8080}".to_owned(), [true, false]),
        ("everything".to_owned(), [true, true]),
    ] {
        let mesh = mesh(&format!("{POD}{}{}", server("s", &spec), permit_all("s"))).await;
        let denied = [port(&mesh, 8080).await, port(&mesh, 9090).await].map(|policy| n_authorizations(&policy) == 0);
        assert_eq!(denied, expected, "{spec}");
        assert_eq!(counted(&mesh), [line("Server", "s")], "{spec}");
        assert_eq!(mesh.errors().len(), 1, "{spec}");
    }
}

#[tokio::test]
async fn a_server_of_an_unsupported_version_denies_all_clients() {
    let spec = "{podSelector: {}, port: 8080, accessPolicy: all-unauthenticated}";
    let newer = object("policy.linkerd.io/v9", "Server", "s", spec);
    let mesh = mesh(&format!("{POD}{newer}")).await;
    assert_eq!(n_authorizations(&port(&mesh, 8080).await), 0);
    assert_eq!(counted(&mesh), [line("Server", "s")]);
    let error = mesh.errors().concat();
    assert!(
        error.contains("policy.linkerd.io/v9") && error.contains("v1beta3"),
        "{error}"
    );
}

#[tokio::test]
async fn the_last_readable_version_applies_until_the_object_is_fixed_or_deleted() {
    let good = server("s", "{podSelector: {}, port: 8080}");
    let more = server("s", "{podSelector: {}, port: 8080, accessPolicy: audit}");
    let bad = server("s", "{podSelector: {}, port: 8080, accessPolicy: Nobody}");
    let mesh = mesh(POD).await;
    let mut stream = mesh.watch_port(WEB, 8080).await.unwrap();
    assert_eq!(n_authorizations(&next(&mut stream).await), 1);
    mesh.manifests.write("s.yaml", &more);
    assert_eq!(next(&mut stream).await.authorizations[0].labels["name"], "audit");
    mesh.manifests.write("s.yaml", &bad);
    eventually(|| counted(&mesh) == [line("Server", "s")]).await;
    assert_eq!(port(&mesh, 8080).await.authorizations[0].labels["name"], "audit");
    // The version in force is applied again.
    mesh.manifests.write("s.yaml", &more);
    eventually(|| counted(&mesh).is_empty()).await;
    mesh.manifests.write("s.yaml", &bad);
    eventually(|| counted(&mesh) == [line("Server", "s")]).await;
    mesh.manifests.write("s.yaml", &good);
    assert_eq!(n_authorizations(&next(&mut stream).await), 0);
    assert!(counted(&mesh).is_empty());
    mesh.manifests.write("s.yaml", &bad);
    eventually(|| counted(&mesh) == [line("Server", "s")]).await;
    mesh.manifests.remove("s.yaml");
    assert_eq!(n_authorizations(&next(&mut stream).await), 1);
    eventually(|| counted(&mesh).is_empty()).await;
}

#[tokio::test]
async fn valid_objects_of_a_file_with_invalid_ones_apply() {
    let denied = server("s", "{podSelector: {}, port: 8080}");
    let mesh = mesh(POD).await;
    let mut stream = mesh.watch_port(WEB, 8080).await.unwrap();
    assert_eq!(n_authorizations(&next(&mut stream).await), 1);
    // The second document is not YAML.
    mesh.manifests.write("s.yaml", &format!("{denied}---\nkind: ["));
    assert_eq!(n_authorizations(&next(&mut stream).await), 0);
    assert_eq!(mesh.errors().len(), 1);
}

#[tokio::test]
async fn a_new_object_with_an_error_denies_also_in_a_file_that_was_valid() {
    let on = |name: &str, port: u16, more: &str| server(name, &format!("{{podSelector: {{}}, port: {port}{more}}}"));
    let valid = on("old", 9090, "");
    let mesh = mesh(POD).await;
    let mut stream = mesh.watch_port(WEB, 9090).await.unwrap();
    assert_eq!(n_authorizations(&next(&mut stream).await), 1);
    mesh.manifests.write("s.yaml", &valid);
    assert_eq!(n_authorizations(&next(&mut stream).await), 0);
    let (new, typo) = (on("new", 7070, ""), on("typo", 8080, ", accessPolicy: Nobody"));
    mesh.manifests.write("s.yaml", &[valid.clone(), new, typo].concat());
    eventually(|| counted(&mesh) == [line("Server", "typo")]).await;
    // The valid objects are those of the last valid version.
    for (number, expected) in [(9090, 0), (7070, 1), (8080, 0)] {
        assert_eq!(n_authorizations(&port(&mesh, number).await), expected, "{number}");
    }
    assert_eq!(mesh.errors().len(), 1);
    mesh.manifests.write("s.yaml", &valid);
    eventually(|| counted(&mesh).is_empty()).await;
    assert_eq!(n_authorizations(&port(&mesh, 8080).await), 1);
}

#[tokio::test]
async fn unreadable_authorizations_and_authentications_permit_no_client() {
    let on_server = "targetRef: {group: policy.linkerd.io, kind: Server, name: s}";
    let network = "{group: policy.linkerd.io, kind: NetworkAuthentication, name: n}";
    let mesh_tls = "{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: m}";
    let refers = |to: &str| {
        policy(
            "AuthorizationPolicy",
            "a",
            &format!("{{{on_server}, requiredAuthenticationRefs: [{to}]}}"),
        )
    };
    for (objects, kind, name) in [
        (
            policy(
                "AuthorizationPolicy",
                "a",
                &format!("{{{on_server}, requiredAuthenticationRefs: [], colour: red}}"),
            ),
            "AuthorizationPolicy",
            "a",
        ),
        (
            policy("NetworkAuthentication", "n", "{networks: [{cidr: 10.0.0.0/99}]}") + &refers(network),
            "NetworkAuthentication",
            "n",
        ),
        (
            policy("MeshTLSAuthentication", "m", "{identities: ['*'], colour: red}") + &refers(mesh_tls),
            "MeshTLSAuthentication",
            "m",
        ),
        (
            object(
                "policy.linkerd.io/v1beta1",
                "ServerAuthorization",
                "z",
                "{server: {name: s}, client: {unauthenticated: true, colour: red}}",
            ),
            "ServerAuthorization",
            "z",
        ),
    ] {
        let mesh = mesh(&format!(
            "{POD}{}{objects}",
            server("s", "{podSelector: {}, port: 8080}")
        ))
        .await;
        let policy = port(&mesh, 8080).await;
        assert_eq!(
            (n_authorizations(&policy), &*policy.labels["name"]),
            (0, "s"),
            "{objects}"
        );
        assert_eq!(counted(&mesh), [line(kind, name)]);
    }
}

/// For each rule of a port's routes, the number of its matches and the message of its injected failure.
fn failures(server: &Server) -> Vec<(usize, Option<String>)> {
    let of_route = |route: &HttpRoute| {
        let rules = route.rules.iter().map(|rule| {
            let fail = rule.filters.iter().find_map(|filter| match &filter.kind {
                Some(http_route::filter::Kind::FailureInjector(fail)) => Some((fail.status, fail.message.clone())),
                _ => None,
            });
            assert!(fail.as_ref().is_none_or(|(status, _)| *status == 500), "{fail:?}");
            (rule.matches.len(), fail.map(|(_, message)| message))
        });
        rules.collect::<Vec<_>>()
    };
    match server.protocol.as_ref().unwrap().kind.as_ref().unwrap() {
        Kind::Detect(detect) => detect.http_routes.iter().flat_map(of_route).collect(),
        Kind::Http1(http) => http.routes.iter().flat_map(of_route).collect(),
        Kind::Grpc(grpc) => {
            let rules = grpc.routes.iter().flat_map(|route| &route.rules);
            let failure = |rule: &grpc_route::Rule| {
                let fail = rule.filters.iter().find_map(|filter| match &filter.kind {
                    Some(grpc_route::filter::Kind::FailureInjector(fail)) => Some((fail.code, fail.message.clone())),
                    _ => None,
                });
                assert!(fail.as_ref().is_none_or(|(code, _)| *code == 13), "{fail:?}");
                (rule.matches.len(), fail.map(|(_, message)| message))
            };
            rules.map(failure).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn unreadable_rules_fail_alone_and_all_rules_fail_if_their_matches_are_unknown() {
    let parent = "parentRefs: [{group: policy.linkerd.io, kind: Server, name: s}]";
    let open = |kind: &str| {
        let api_version = if kind == "GRPCRoute" {
            "gateway.networking.k8s.io/v1"
        } else {
            "policy.linkerd.io/v1beta3"
        };
        object(api_version, kind, "open", &format!("{{{parent}, rules: [{{}}]}}"))
    };
    let row = async |kind: &str, spec: &str, expected: &[Option<&str>]| {
        let protocol = if kind == "GRPCRoute" {
            ", proxyProtocol: gRPC"
        } else {
            ""
        };
        let manifests = format!(
            "{POD}{}{}{}",
            server("s", &format!("{{podSelector: {{}}, port: 8080{protocol}}}")),
            open(kind),
            object("gateway.networking.k8s.io/v1", kind, "r", spec),
        );
        let mesh = mesh(&manifests).await;
        let found = failures(&port(&mesh, 8080).await);
        assert_eq!(found.len(), expected.len(), "{spec}: {found:?}");
        for ((_, failure), expected) in found.iter().zip(expected) {
            let is_expected = match (failure, expected) {
                (Some(message), Some(part)) => {
                    message.starts_with(&format!("{kind} shop/r: ")) && message.contains(part)
                }
                (None, None) => true,
                _ => false,
            };
            assert!(is_expected, "{spec}: {found:?}");
        }
        assert_eq!(counted(&mesh), [line(kind, "r")]);
    };
    let admin = "matches: [{path: {value: /admin}}]";
    row(
        "HTTPRoute",
        &format!("{{{parent}, rules: [{{}}, {{{admin}, timeouts: {{request: soon}}}}]}}"),
        &[None, None, Some("soon")],
    )
    .await;
    row(
        "HTTPRoute",
        &format!(
            "{{{parent}, rules: [{{{admin}, filters: [{{type: RequestRedirect, requestRedirect: {{port: -1}}}}]}}]}}"
        ),
        &[None, Some("-1")],
    )
    .await;
    let elsewhere = "matches: [{paths: [/admin]}]";
    row(
        "HTTPRoute",
        &format!("{{{parent}, rules: [{{}}, {{{elsewhere}}}]}}"),
        &[Some("paths")],
    )
    .await;
    row("HTTPRoute", &format!("{{{parent}, rules: 7}}"), &[Some("7")]).await;
    row(
        "HTTPRoute",
        &format!("{{{parent}, hostnames: web, rules: [{{}}]}}"),
        &[Some("web")],
    )
    .await;
    row(
        "GRPCRoute",
        &format!("{{{parent}, rules: [{{filters: 7}}]}}"),
        &[None, Some("7")],
    )
    .await;
    row(
        "GRPCRoute",
        &format!("{{{parent}, rules: [{{matches: [{{path: /a}}]}}]}}"),
        &[Some("path")],
    )
    .await;
}

#[tokio::test]
async fn an_unreadable_route_to_a_service_fails_with_the_cause() {
    let policy_lines = async |kind: &str, rules: &str| {
        let version = if kind.starts_with('T') { "v1alpha2" } else { "v1" };
        let spec = format!("{{{TO_WEB}, rules: {rules}}}");
        let route = object(&format!("gateway.networking.k8s.io/{version}"), kind, "r", &spec);
        let mesh = mesh(&format!("{}{route}", services("", ""))).await;
        assert_eq!(counted(&mesh), [line(kind, "r")]);
        show(&mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap())
    };
    let good = "{matches: [{path: {value: /a}}], backendRefs: [{name: web-v2, port: 80}]}";
    let lines = policy_lines("HTTPRoute", &format!("[{good}, {{timeouts: {{request: soon}}}}]")).await;
    assert_eq!(lines[1], "gateway HTTPRoute shop/r -> 1*web-v2.shop:80");
    assert!(
        lines[2].starts_with("gateway HTTPRoute shop/r fail 500 \"HTTPRoute shop/r: spec.rules: "),
        "{lines:?}"
    );
    for (kind, status) in [
        ("HTTPRoute", "fail 500"),
        ("GRPCRoute", "fail 13"),
        ("TLSRoute", "invalid"),
        ("TCPRoute", "invalid"),
    ] {
        for rules in ["7", "[{backendRefs: [{name: web, port: 80, colour: red}]}]"] {
            let lines = policy_lines(kind, rules).await;
            let is_this_route = lines[1].starts_with(&format!("gateway {kind} shop/r"));
            let cause = format!("{status} \"{kind} shop/r: spec.rules: ");
            assert!(is_this_route && lines[1].contains(&cause), "{kind} {rules}: {lines:?}");
        }
    }
}

#[tokio::test]
async fn an_unreadable_egress_network_or_rate_limit_denies_its_requests() {
    let network = object(
        "policy.linkerd.io/v1alpha1",
        "EgressNetwork",
        "lab",
        "{trafficPolicy: Maybe, networks: [{cidr: 203.0.113.0/24}]}",
    );
    let client = CLIENT.replace("front", "shop");
    let mesh = mesh(&format!("{POD}{network}")).await;
    let shown = async |addr: &str| show(&mesh.get_policy(&client, addr).await.unwrap()).join("\n");
    let denied = shown("203.0.113.1:443").await;
    assert!(
        denied.contains("fail 500 \"EgressNetwork shop/lab: ") && denied.contains("Maybe"),
        "{denied}"
    );
    assert!(!shown("198.51.100.1:443").await.contains("fail"));
    assert_eq!(counted(&mesh), [line("EgressNetwork", "lab")]);

    for spec in [
        "{targetRef: {group: policy.linkerd.io, kind: Server, name: s}, total: {requestsPerSecond: 0}}",
        "{targetRef: {group: policy.linkerd.io, kind: Server, name: s, sectionName: x}, total: {requestsPerSecond: 5}}",
    ] {
        let limit = object("policy.linkerd.io/v1alpha1", "HTTPLocalRateLimitPolicy", "l", spec);
        let mesh = crate::harness::mesh(&format!("{POD}{}{limit}", server("s", "{podSelector: {}, port: 8080}"))).await;
        let failures = failures(&port(&mesh, 8080).await);
        let message = failures[0].1.as_deref().unwrap();
        assert!(message.starts_with("HTTPLocalRateLimitPolicy shop/l: "), "{message}");
        assert_eq!(counted(&mesh), [line("HTTPLocalRateLimitPolicy", "l")]);
    }
}

/// An API server refuses such names.
#[tokio::test]
async fn a_policy_with_an_invalid_name_in_a_directory_denies_its_requests() {
    let permits = server(
        "Web_S",
        "{podSelector: {}, port: 8080, accessPolicy: all-unauthenticated}",
    );
    let denied = mesh(&format!("{POD}{permits}")).await;
    assert_eq!(n_authorizations(&port(&denied, 8080).await), 0);
    assert_ne!(n_authorizations(&port(&denied, 9090).await), 0);

    let spec = "{trafficPolicy: Deny, networks: [{cidr: 203.0.113.0/24}]}";
    let denied = mesh(&format!("{POD}{}", policy("EgressNetwork", "Lab_E", spec))).await;
    let client = CLIENT.replace("front", "shop");
    let shown = show(&denied.get_policy(&client, "203.0.113.1:443").await.unwrap()).join("\n");
    assert!(shown.contains("fail 500 \"EgressNetwork shop/Lab_E: "), "{shown}");

    let spec = "{targetRef: {group: policy.linkerd.io, kind: Server, name: s}, total: {requestsPerSecond: 5}}";
    let limit = policy("HTTPLocalRateLimitPolicy", "Limit_L", spec);
    let denied = mesh(&format!("{POD}{}{limit}", server("s", "{podSelector: {}, port: 8080}"))).await;
    let failures = failures(&port(&denied, 8080).await);
    let message = failures[0].1.as_deref().unwrap();
    assert!(
        message.starts_with("HTTPLocalRateLimitPolicy shop/Limit_L: "),
        "{message}"
    );
}

#[tokio::test]
async fn a_route_with_only_gateway_parents_is_ignored() {
    let spec = "{parentRefs: [{name: gateway}], rules: [{retries: 7}]}";
    let mesh = mesh(&object("gateway.networking.k8s.io/v1", "HTTPRoute", "r", spec)).await;
    assert!(counted(&mesh).is_empty());
}

#[tokio::test]
async fn unsupported_kinds_in_a_directory_are_reported() {
    let config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n";
    let misspelt = object(
        "policy.linkerd.io/v1beta3",
        "Sever",
        "s",
        "{podSelector: {}, port: 8080}",
    );
    let mesh = mesh(config).await;
    let metric = |n: u8| format!("tulle_unsupported_manifests{{api_version=\"v1\",kind=\"ConfigMap\"}} {n}");
    assert!(
        mesh.registry.render().contains(&metric(1)),
        "{}",
        mesh.registry.render()
    );
    assert!(mesh.errors().is_empty());
    mesh.manifests.write("more.yaml", config);
    eventually(|| mesh.registry.render().contains(&metric(2))).await;
    mesh.manifests.write("more.yaml", &misspelt);
    eventually(|| mesh.errors().len() == 1).await;
    let error = mesh.errors().concat();
    assert!(
        error.contains("unknown kind Sever in group policy.linkerd.io; supported: Server"),
        "{error}"
    );
}

#[tokio::test]
async fn requests_of_unimplemented_fields_fail_with_the_cause_and_are_counted() {
    let route = |field: &str, parent: &str| {
        let spec = format!("{{{parent}, rules: [{{{field}}}]}}");
        object("gateway.networking.k8s.io/v1", "HTTPRoute", "r", &spec)
    };
    let unsupported = "unserved_configuration{kind=\"HTTPRoute\",namespace=\"shop\",name=\"r\",field=\"spec.rules\"} 1";
    let session = "sessionPersistence: {type: Cookie}";
    let mesh = mesh(&format!("{}{}", services("", ""), route(session, TO_WEB))).await;
    let lines = show(&mesh.get_policy(CLIENT, "10.247.0.10:80").await.unwrap());
    let cause = "fail 500 \"HTTPRoute shop/r: rules[].sessionPersistence is not supported by the mesh";
    assert!(lines[1].contains(cause), "{lines:?}");
    assert!(mesh.registry.render().contains(unsupported));
    // Inbound rules forward to the application only.
    for field in [session, "retry: {attempts: 3}"] {
        let on_server = "parentRefs: [{group: policy.linkerd.io, kind: Server, name: s}]";
        let servers = server("s", "{podSelector: {}, port: 8080}");
        let mesh = crate::harness::mesh(&format!("{POD}{servers}{}", route(field, on_server))).await;
        assert_eq!(failures(&port(&mesh, 8080).await), [(1, None)]);
        assert!(mesh.registry.render().contains(unsupported));
    }
}
