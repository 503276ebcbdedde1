//! Tables of inbound policy: manifests, and the policy of a workload's port.

use std::net::IpAddr;

use tulle_control::cluster::Config;
use tulle_proto::inbound::authn::{Permit, permit_mesh_tls::Clients};
use tulle_proto::inbound::proxy_protocol::Kind;
use tulle_proto::inbound::{Authz, Server};
use tulle_proto::meta::{Metadata, metadata};

use crate::harness::mesh_with;

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  labels: {app: web, linkerd.io/control-plane-ns: linkerd}
  annotations: {ANNOTATIONS}
spec:
  initContainers:
  - name: agent
    restartPolicy: Always
    ports: [{name: agent, containerPort: 7070}]
    startupProbe: {httpGet: {path: /started, port: agent}}
  containers:
  - name: web
    ports: [{name: http, containerPort: 8080}, {name: dns, containerPort: 8081, protocol: UDP}]
    livenessProbe: {httpGet: {path: '/live?verbose=1', port: http}}
    readinessProbe: {httpGet: {port: 8080}}
    startupProbe: {tcpSocket: {port: 8080}}
status: {podIP: 10.1.0.1}
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata:
  name: vm
  namespace: shop
  labels: {app: web}
  annotations: {ANNOTATIONS}
spec:
  meshTLS: {identity: vm.shop, serverName: vm.shop}
  ports: [{name: http, port: 8080}]
  workloadIPs: [{ip: 10.2.0.1}]
";

const WEB: &str = r#"{"ns":"shop","pod":"web-0"}"#;
const VM: &str = r#"{"ns":"shop","external_workload":"vm"}"#;

fn workloads(annotations: &str) -> String {
    POD.replace("ANNOTATIONS", annotations)
}

fn object(api_version: &str, kind: &str, name: &str, spec: &str) -> String {
    let group = match kind {
        "GRPCRoute" => "gateway.networking.k8s.io",
        _ => "policy.linkerd.io",
    };
    format!(
        "---\napiVersion: {group}/{api_version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n"
    )
}

fn server(fields: &str) -> String {
    object(
        "v1beta3",
        "Server",
        "web",
        &format!("{{podSelector: {{matchLabels: {{app: web}}}}, {fields}}}"),
    )
}

async fn get_policy(manifests: &str, config: Config, workload: &str, port: u32) -> Server {
    let mesh = mesh_with(manifests, config).await;
    assert!(mesh.errors().is_empty(), "{manifests}\n{:?}", mesh.errors());
    mesh.get_port(workload, port).await.unwrap()
}

/// Returns the protocol and its routes, each as `name*matches[authorizations]`.
fn protocol(server: &Server) -> String {
    let http = |routes: &[tulle_proto::inbound::HttpRoute]| {
        let shown = routes.iter().map(|route| {
            let n: usize = route.rules.iter().map(|rule| rule.matches.len()).sum();
            let who: Vec<_> = route.authorizations.iter().map(authorization).collect();
            format!(" {}*{n}[{}]", name(route.metadata.as_ref()), who.join(" "))
        });
        shown.collect::<String>()
    };
    match server.protocol.as_ref().unwrap().kind.as_ref().unwrap() {
        Kind::Detect(detect) => format!(
            "detect {}s{}",
            detect.timeout.unwrap().seconds,
            http(&detect.http_routes)
        ),
        Kind::Http1(http1) => format!("http1{}", http(&http1.routes)),
        Kind::Http2(http2) => format!("http2{}", http(&http2.routes)),
        Kind::Grpc(grpc) => {
            let names: String = grpc
                .routes
                .iter()
                .map(|route| format!(" {}", name(route.metadata.as_ref())))
                .collect();
            format!("grpc{names}")
        }
        Kind::Opaque(_) => "opaque".to_owned(),
        Kind::Tls(_) => "tls".to_owned(),
    }
}

fn name(about: Option<&Metadata>) -> String {
    match about.unwrap().kind.as_ref().unwrap() {
        metadata::Kind::Default(name) => name.clone(),
        // Linkerd's control plane omits the namespace.
        metadata::Kind::Resource(resource) => format!("{} {}{}", resource.kind, resource.namespace, resource.name),
    }
}

/// Returns an authorization as `kind/name: clients from networks`.
fn authorization(authz: &Authz) -> String {
    let nets = authz.networks.iter().map(|network| {
        let net = network.net.unwrap();
        let ip = IpAddr::try_from(net.ip.unwrap()).unwrap();
        format!("{ip}/{}", net.prefix_len)
    });
    let from = match &nets.collect::<Vec<_>>()[..] {
        [v4, v6] if v4 == "0.0.0.0/0" && v6 == "::/0" => "all".to_owned(),
        nets if nets.len() == 4 => "cluster".to_owned(),
        nets => nets.join(","),
    };
    let domain = ".serviceaccount.identity.linkerd.cluster.local";
    let who = match authz.authentication.as_ref().unwrap().permit.as_ref().unwrap() {
        Permit::Unauthenticated(_) => "any client".to_owned(),
        Permit::MeshTls(mesh) => match mesh.clients.as_ref().unwrap() {
            Clients::Unauthenticated(_) => "tls".to_owned(),
            Clients::Identities(all) => {
                let exact = all.identities.iter().map(|identity| identity.name.clone());
                let suffixes = all
                    .suffixes
                    .iter()
                    .map(|suffix| format!("*.{}", suffix.parts.join(".")));
                exact.chain(suffixes).collect::<Vec<_>>().join(",").replace(domain, "")
            }
        },
    };
    format!("{}/{}: {who} from {from}", authz.labels["kind"], authz.labels["name"])
}

fn authorizations(server: &Server) -> Vec<String> {
    let mut found: Vec<_> = server.authorizations.iter().map(authorization).collect();
    found.sort();
    found
}

/// Default policies that permit clients, and their authorizations.
const PERMISSIVE_POLICIES: [(&str, &str); 5] = [
    (
        "all-unauthenticated",
        "default/all-unauthenticated: any client from all",
    ),
    ("all-authenticated", "default/all-authenticated: *. from all"),
    (
        "cluster-unauthenticated",
        "default/cluster-unauthenticated: any client from cluster",
    ),
    (
        "cluster-authenticated",
        "default/cluster-authenticated: *. from cluster",
    ),
    ("audit", "default/audit: any client from all"),
];

const DETECT: &str = "detect 10s default*1[]";
const ANY_CLIENT: &str = "default/all-unauthenticated: any client from all";
const AUTHENTICATED: &str = "default/all-authenticated: *. from all";

/// Checks a port of workloads with these annotations, in a cluster with this default policy.
async fn check_annotated(cluster: &str, annotations: &str, port: u32, expected_protocol: &str, expected: &[&str]) {
    for workload in [WEB, VM] {
        let config = Config {
            default_policy: cluster.parse().unwrap(),
            default_opaque_ports: "25,3300-3306".parse().unwrap(),
            ..Config::default()
        };
        let policy = get_policy(&workloads(annotations), config, workload, port).await;
        assert_eq!(authorizations(&policy), expected, "{cluster} / {annotations} / {port}");
        assert_eq!(
            protocol(&policy),
            expected_protocol,
            "{cluster} / {annotations} / {port}"
        );
    }
}

#[tokio::test]
async fn annotations_of_workloads_replace_the_cluster_s_defaults() {
    let row = async |cluster: &str, annotations: &str, expected: &[&str]| {
        check_annotated(cluster, annotations, 9000, DETECT, expected).await;
    };
    for (cluster, expected) in PERMISSIVE_POLICIES {
        row(cluster, "", &[expected]).await;
    }
    row("deny", "", &[]).await;
    let policy = |value: &str| format!("config.linkerd.io/default-inbound-policy: {value}");
    row("deny", &policy("all-unauthenticated"), &[ANY_CLIENT]).await;
    row("all-unauthenticated", &policy("deny"), &[]).await;
    // With the line break of a YAML block, which the injector ignores, too.
    row("deny", &policy("\" all-unauthenticated\\n\""), &[ANY_CLIENT]).await;
    // An invalid value denies all clients.
    for unreadable in ["all", "Deny", "'deny,'"] {
        row("all-unauthenticated", &policy(unreadable), &[]).await;
    }
}

/// On these ports, the default policy permits only authenticated clients.
#[tokio::test]
async fn annotations_of_workloads_require_an_identity_on_ports() {
    let row = async |cluster: &str, ports: &str, port: u32, expected: &[&str]| {
        let annotation = format!("config.linkerd.io/proxy-require-identity-inbound-ports: '{ports}'");
        check_annotated(cluster, &annotation, port, DETECT, expected).await;
    };
    let ports = "9000,9100-9200";
    row("all-unauthenticated", ports, 9000, &[AUTHENTICATED]).await;
    row(
        "cluster-unauthenticated",
        ports,
        9150,
        &["default/cluster-authenticated: *. from cluster"],
    )
    .await;
    row("all-unauthenticated", ports, 9001, &[ANY_CLIENT]).await;
    row("deny", ports, 9000, &[]).await;
    row("audit", ports, 9000, &[AUTHENTICATED]).await;
    for ports in ["9000,", ",9000", "80,, 9000 ,", "http,9000", "8000 - 9100"] {
        row("all-unauthenticated", ports, 9000, &[AUTHENTICATED]).await;
        row("all-unauthenticated", ports, 7999, &[ANY_CLIENT]).await;
    }
    row("all-unauthenticated", "http", 8080, &[AUTHENTICATED]).await;
    // An invalid entry may have meant any port, so other ports deny all clients. Valid entries keep their meaning.
    for ports in ["9000;9001", "htpp", "900O,80", "70000", "9000-", "80,9001-9000"] {
        row("all-unauthenticated", ports, 9000, &[]).await;
    }
    row("all-unauthenticated", "9000,90O1", 9000, &[AUTHENTICATED]).await;
    row("audit", "90O1", 9000, &[]).await;
    row("all-unauthenticated", " , ", 9000, &[ANY_CLIENT]).await;
}

#[tokio::test]
async fn annotations_of_workloads_replace_the_cluster_s_opaque_ports() {
    check_annotated("all-unauthenticated", "", 3301, "opaque", &[ANY_CLIENT]).await;
    let row = async |ports: &str, port: u32, expected_protocol: &str| {
        let annotation = format!("config.linkerd.io/opaque-ports: '{ports}'");
        check_annotated(
            "all-unauthenticated",
            &annotation,
            port,
            expected_protocol,
            &[ANY_CLIENT],
        )
        .await;
    };
    row("9000,9100-9200", 9150, "opaque").await;
    row("9000", 25, DETECT).await;
    for ports in ["http", "http,9000", "http,", "9000, http", "900O,8080"] {
        row(ports, 8080, "opaque").await;
    }
    row("http,", 9000, DETECT).await;
    // Without a valid entry, those of the cluster apply; an empty list is valid.
    row("unknown", 25, "opaque").await;
    row("unknown,9000", 25, DETECT).await;
    row("", 25, DETECT).await;
}

#[tokio::test]
async fn port_names_come_from_running_containers() {
    let pod = "
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: shop, annotations: {config.linkerd.io/opaque-ports: 'setup,agent,data'}}
spec:
  initContainers:
  - {name: setup, ports: [{name: setup, containerPort: 1000}]}
  - {name: agent, restartPolicy: Always, ports: [{name: agent, containerPort: 2000}]}
  containers:
  - {name: web, ports: [{name: data, containerPort: 3000}]}
status: {podIP: 10.1.0.1}
";
    for (port, expected) in [(1000, "detect 10s default*1[]"), (2000, "opaque"), (3000, "opaque")] {
        let policy = get_policy(pod, Config::default(), WEB, port).await;
        assert_eq!(protocol(&policy), expected, "{port}");
    }
}

#[tokio::test]
async fn a_server_sets_the_protocol() {
    for (protocol_field, expected) in [
        ("", "detect 10s default*1[]"),
        (", proxyProtocol: unknown", "detect 10s default*1[]"),
        (", proxyProtocol: HTTP/1", "http1 default*1[]"),
        (", proxyProtocol: HTTP/2", "http2 default*1[]"),
        (", proxyProtocol: gRPC", "grpc default"),
        (", proxyProtocol: opaque", "opaque"),
        (", proxyProtocol: TLS", "tls"),
    ] {
        for port in ["8080", "http"] {
            let manifests = format!("{}{}", workloads(""), server(&format!("port: {port}{protocol_field}")));
            let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
            assert_eq!(protocol(&policy), expected, "{port}{protocol_field}");
            let label = |key: &str| policy.labels[key].clone();
            assert_eq!(
                [label("group"), label("kind"), label("name")],
                ["policy.linkerd.io", "server", "web"]
            );
        }
    }
    // Annotations for opaque ports apply only to ports without a Server.
    let manifests = format!(
        "{}{}",
        workloads("config.linkerd.io/opaque-ports: '8080'"),
        server("port: 8080")
    );
    let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
    assert_eq!(protocol(&policy), "detect 10s default*1[]");
}

#[tokio::test]
async fn a_server_is_chosen_by_labels_port_and_age() {
    let row = async |fields: &str, workload: &str, port: u32, is_chosen: bool| {
        let manifests = format!("{}{}", workloads(""), object("v1beta3", "Server", "web", fields));
        let policy = get_policy(&manifests, Config::default(), workload, port).await;
        assert_eq!(policy.labels["kind"] == "server", is_chosen, "{fields} {port}");
    };
    row("{podSelector: {}, port: 8080}", WEB, 8080, true).await;
    row("{podSelector: {}, port: 8080}", WEB, 8081, false).await;
    row("{podSelector: {}, port: 8080}", VM, 8080, false).await;
    row("{podSelector: {matchLabels: {app: api}}, port: 8080}", WEB, 8080, false).await;
    row(
        "{podSelector: {matchExpressions: [{key: app, operator: In, values: [web]}]}, port: http}",
        WEB,
        8080,
        true,
    )
    .await;
    row("{podSelector: {}, port: agent}", WEB, 7070, true).await;
    row("{podSelector: {}, port: other}", WEB, 8080, false).await;
    row("{externalWorkloadSelector: {}, port: http}", VM, 8080, true).await;
    row("{externalWorkloadSelector: {}, port: 8080}", WEB, 8080, false).await;
    // A Server of another namespace does not select this workload.
    let foreign = server("port: 8080").replace("namespace: shop", "namespace: other");
    let policy = get_policy(&format!("{}{foreign}", workloads("")), Config::default(), WEB, 8080).await;
    assert_eq!(policy.labels["kind"], "default");
}

#[tokio::test]
async fn authorizations_of_a_server() {
    let target = "targetRef: {group: policy.linkerd.io, kind: Server, name: web}";
    let policy = |refs: &str| {
        let spec = format!("{{{target}, requiredAuthenticationRefs: [{refs}]}}");
        object("v1alpha1", "AuthorizationPolicy", "p", &spec)
    };
    let mesh_tls = |fields: &str| object("v1alpha1", "MeshTLSAuthentication", "m", &format!("{{{fields}}}"));
    let network = object(
        "v1alpha1",
        "NetworkAuthentication",
        "n",
        "{networks: [{cidr: 10.7.0.0/16}]}",
    );
    let server_authorization = |client: &str| {
        let spec = format!("{{server: {{name: web}}, client: {{{client}}}}}");
        object("v1beta1", "ServerAuthorization", "s", &spec)
    };
    let (m, n) = (
        "{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: m}",
        "{group: policy.linkerd.io, kind: NetworkAuthentication, name: n}",
    );
    let row = async |access: &str, objects: String, expected: &[&str]| {
        let manifests = format!("{}{}{objects}", workloads(""), server(&format!("port: 8080{access}")));
        let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
        assert_eq!(authorizations(&policy), expected, "{access} {objects}");
    };
    row("", String::new(), &[]).await;
    for (access, expected) in PERMISSIVE_POLICIES {
        let access = format!(", accessPolicy: {access}");
        row(&access, String::new(), &[expected]).await;
        let both = [expected, "serverauthorization/s: any client from cluster"];
        row(&access, server_authorization("unauthenticated: true"), &both).await;
    }
    let account = mesh_tls("identityRefs: [{kind: ServiceAccount, name: a}, {kind: Namespace, name: b}]");
    for (objects, clients) in [
        (policy(""), "any client from all"),
        (policy(n) + &network, "any client from 10.7.0.0/16"),
        (policy("{kind: ServiceAccount, name: a}"), "a.shop from all"),
        (
            policy(&format!("{{kind: ServiceAccount, name: a, namespace: b}}, {n}")) + &network,
            "a.b from 10.7.0.0/16",
        ),
        (policy(m) + &account, "a.shop,*.b from all"),
        (policy(m) + &mesh_tls("identities: ['*']"), "*. from all"),
        (
            policy(m) + &mesh_tls("identities: ['*.a.b', 'spiffe://r/w']"),
            "spiffe://r/w,*.a.b from all",
        ),
    ] {
        row("", objects, &[&format!("authorizationpolicy/p: {clients}")]).await;
    }
    // All required authentications must exist.
    row("", policy(m), &[]).await;
    row("", policy(&format!("{m}, {n}")) + &mesh_tls("identities: ['*']"), &[]).await;
    for (client, clients) in [
        ("unauthenticated: true", "any client from cluster"),
        (
            "unauthenticated: true, networks: [{cidr: 10.7.0.0/16}]",
            "any client from 10.7.0.0/16",
        ),
        ("meshTLS: {unauthenticatedTLS: true}", "tls from cluster"),
        ("meshTLS: {identities: ['*']}", "*. from cluster"),
        (
            "meshTLS: {serviceAccounts: [{name: a}, {name: a, namespace: b}]}",
            "a.shop,a.b from cluster",
        ),
    ] {
        let expected = format!("serverauthorization/s: {clients}");
        row("", server_authorization(client), &[&expected]).await;
    }
    row("", server_authorization("networks: [{cidr: 10.7.0.0/16}]"), &[]).await;
    row("", server_authorization("unauthenticated: false"), &[]).await;
    // Without networks, no client matches.
    row("", server_authorization("unauthenticated: true, networks: []"), &[]).await;
}

#[tokio::test]
async fn routes_of_a_server_are_attached_authorized_and_ordered() {
    let route = |name: &str, parent: &str| {
        object(
            "v1beta3",
            "HTTPRoute",
            name,
            &format!("{{parentRefs: [{parent}], rules: [{{matches: [{{path: {{value: /a}}}}, {{method: GET}}]}}]}}"),
        )
    };
    let web = "{group: policy.linkerd.io, kind: Server, name: web}";
    let row = async |objects: String, expected: &str| {
        let config = Config {
            probe_networks: vec!["192.168.7.0/24".parse().unwrap()],
            ..Config::default()
        };
        let manifests = format!(
            "{}{}{objects}",
            workloads(""),
            server("port: 8080, proxyProtocol: HTTP/1")
        );
        let policy = get_policy(&manifests, config, WEB, 8080).await;
        assert_eq!(protocol(&policy), expected, "{objects}");
    };
    // A Server with a route has no route for probes.
    let probes = "http1 default*1[] probe*2[default/probe: any client from 192.168.7.0/24]";
    row(String::new(), probes).await;
    row(route("r", web), "http1 HTTPRoute r*2[]").await;
    row(
        route("b", web) + &route("a", web),
        "http1 HTTPRoute a*2[] HTTPRoute b*2[]",
    )
    .await;
    row(route("r", &web.replace("web", "other")), probes).await;
    row(route("r", web).replace("namespace: shop", "namespace: other"), probes).await;
    let policy = object(
        "v1alpha1",
        "AuthorizationPolicy",
        "p",
        "{targetRef: {group: policy.linkerd.io, kind: HTTPRoute, name: r}, requiredAuthenticationRefs: []}",
    );
    row(
        route("r", web) + &policy + &route("s", web),
        "http1 HTTPRoute r*2[authorizationpolicy/p: any client from all] HTTPRoute s*2[]",
    )
    .await;
    let calls = object(
        "v1",
        "GRPCRoute",
        "g",
        &format!("{{parentRefs: [{web}], rules: [{{}}]}}"),
    );
    let manifests = format!("{}{}{calls}", workloads(""), server("port: 8080, proxyProtocol: gRPC"));
    let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
    assert_eq!(protocol(&policy), "grpc GRPCRoute g");
}

#[tokio::test]
async fn probes_of_every_container_have_a_route_on_their_port() {
    let row = async |workload: &str, port: u32, expected: &str| {
        let config = Config {
            probe_networks: vec!["192.168.7.0/24".parse().unwrap()],
            ..Config::default()
        };
        let policy = get_policy(&workloads(""), config, workload, port).await;
        assert_eq!(protocol(&policy), expected, "{workload} {port}");
    };
    let probe = |n: usize| format!("detect 10s default*1[] probe*{n}[default/probe: any client from 192.168.7.0/24]");
    row(WEB, 8080, &probe(2)).await;
    row(WEB, 7070, &probe(1)).await;
    row(WEB, 8081, "detect 10s default*1[]").await;
    row(VM, 8080, "detect 10s default*1[]").await;
}

#[tokio::test]
async fn probes_are_permitted_at_the_path_that_the_kubelet_sends() {
    use tulle_proto::http_route::path_match;

    for (path, expected) in [
        ("healthz", "/healthz"),
        ("'healthz?full=1'", "/healthz"),
        ("'/a b'", "/a%20b"),
        ("'/a%20b'", "/a%20b"),
        ("'/100%'", "/100%25"),
        ("''", "/"),
    ] {
        let config = Config {
            probe_networks: vec!["192.168.7.0/24".parse().unwrap()],
            ..Config::default()
        };
        let manifests = workloads("").replace("'/live?verbose=1'", path);
        let policy = get_policy(&manifests, config, WEB, 8080).await;
        let Some(Kind::Detect(detect)) = policy.protocol.unwrap().kind else {
            panic!("nothing to detect")
        };
        let matches = &detect.http_routes[1].rules[0].matches;
        let paths = matches.iter().map(|one| one.path.clone().unwrap().kind.unwrap());
        let is_there = paths
            .clone()
            .any(|kind| kind == path_match::Kind::Exact(expected.to_owned()));
        assert!(is_there, "{path}: {:?}", paths.collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn requests_of_unsupported_rules_fail() {
    let row = async |kind: &str, protocol: &str, rule: &str, cause: &str| {
        let parent = "group: policy.linkerd.io, kind: Server, name: web";
        let (code, message) = failure_of(kind, protocol, parent, rule).await;
        assert_eq!(code, if kind == "GRPCRoute" { 13 } else { 500 }, "{rule}");
        assert_eq!(message, format!("{kind} shop/r: {cause}"));
    };
    let response = "{filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [x]}}]}";
    let on_server = "filter ResponseHeaderModifier is not supported where the parent is a Server";
    row("HTTPRoute", "HTTP/1", response, on_server).await;
    row("GRPCRoute", "gRPC", response, on_server).await;
    let mirror = "{filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}}}]}";
    let on_server = "filter RequestMirror is not supported where the parent is a Server";
    row("GRPCRoute", "gRPC", mirror, on_server).await;
}

/// Returns the injected failure of the only rule of the first route.
async fn failure_of(kind: &str, protocol: &str, parent: &str, rule: &str) -> (u32, String) {
    let server = server(&format!("port: 8080, proxyProtocol: {protocol}"));
    let manifests = format!("{}{server}{}", workloads(""), gateway_route(kind, parent, rule));
    let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
    failure(policy.protocol.unwrap().kind.unwrap())
}

fn gateway_route(kind: &str, parent: &str, rule: &str) -> String {
    let version = if ["TCPRoute", "TLSRoute"].contains(&kind) {
        "v1alpha2"
    } else {
        "v1"
    };
    let spec = format!("{{parentRefs: [{{{parent}}}], rules: [{rule}]}}");
    let metadata = "metadata: {name: r, namespace: shop}";
    format!("---\n{{apiVersion: gateway.networking.k8s.io/{version}, kind: {kind}, {metadata}, spec: {spec}}}\n")
}

fn failure(kind: Kind) -> (u32, String) {
    use tulle_proto::inbound::{HttpRoute, grpc_route, http_route};

    let of_http = |routes: &[HttpRoute]| match &routes[0].rules[0].filters[..] {
        [
            http_route::Filter {
                kind: Some(http_route::filter::Kind::FailureInjector(fail)),
            },
        ] => (fail.status, fail.message.clone()),
        other => panic!("{other:?}"),
    };
    match kind {
        Kind::Detect(detect) => of_http(&detect.http_routes),
        Kind::Http1(http) => of_http(&http.routes),
        Kind::Http2(http) => of_http(&http.routes),
        Kind::Grpc(grpc) => match &grpc.routes[0].rules[0].filters[..] {
            [
                grpc_route::Filter {
                    kind: Some(grpc_route::filter::Kind::FailureInjector(fail)),
                },
            ] => (fail.code, fail.message.clone()),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_route_that_does_not_fit_its_server_permits_nothing() {
    let web = "group: policy.linkerd.io, kind: Server, name: web";
    // It is unknown which requests of another protocol the route selects.
    for (kind, protocol, code) in [
        ("GRPCRoute", "unknown", 500),
        ("GRPCRoute", "HTTP/1", 500),
        ("GRPCRoute", "HTTP/2", 500),
        ("HTTPRoute", "gRPC", 13),
    ] {
        let failure = failure_of(kind, protocol, web, "{}").await;
        let cause = format!("the Server's proxyProtocol is {protocol}, which does not support routes of this kind");
        assert_eq!(failure, (code, format!("{kind} shop/r: {cause}")), "{protocol}");
    }
    for protocol in ["opaque", "TLS"] {
        let server = server(&format!(
            "port: 8080, proxyProtocol: {protocol}, accessPolicy: all-unauthenticated"
        ));
        let open = format!("{}{server}", workloads(""));
        let before = get_policy(&open, Config::default(), WEB, 8080).await;
        assert_eq!(authorizations(&before).len(), 1, "{protocol}");
        let closed = format!("{open}{}", gateway_route("HTTPRoute", web, "{}"));
        let after = get_policy(&closed, Config::default(), WEB, 8080).await;
        assert_eq!(authorizations(&after), [""; 0], "{protocol}");
    }
    for (protocol, kind, code) in [("HTTP/1", "HTTPRoute", 500), ("gRPC", "GRPCRoute", 13)] {
        for field in ["port", "sectionName"] {
            let parent = format!("{web}, {field}: {}", if field == "port" { "8080" } else { "x" });
            let failure = failure_of(kind, protocol, &parent, "{}").await;
            let cause = format!("the parentRef has a {field}, which is not supported for a Server; remove it");
            assert_eq!(failure, (code, format!("{kind} shop/r: {cause}")));
        }
    }
    // Routes of other namespaces deny nothing.
    let foreign = gateway_route("HTTPRoute", &format!("{web}, namespace: shop"), "{}")
        .replace("r, namespace: shop", "r, namespace: other");
    let manifests = format!(
        "{}{}{foreign}",
        workloads(""),
        server("port: 8080, proxyProtocol: gRPC")
    );
    let policy = get_policy(&manifests, Config::default(), WEB, 8080).await;
    assert_eq!(protocol(&policy), "grpc default");
}

#[tokio::test]
async fn routes_that_do_not_fit_their_server_are_counted() {
    let web = "group: policy.linkerd.io, kind: Server, name: web";
    let row = async |protocol: &str, parent: &str, expected: usize| {
        let server = server(&format!("port: 8080, proxyProtocol: {protocol}"));
        let manifests = format!("{}{server}{}", workloads(""), gateway_route("GRPCRoute", parent, "{}"));
        assert_eq!(
            count_unserved(&manifests, "spec.parentRefs").await,
            expected,
            "{protocol} {parent}"
        );
    };
    row("gRPC", web, 0).await;
    row("HTTP/2", web, 1).await;
    row("gRPC", &format!("{web}, sectionName: x"), 1).await;
}

#[tokio::test]
async fn a_rate_limit_of_a_grpc_server_denies_requests() {
    let spec = "{targetRef: {group: policy.linkerd.io, kind: Server, name: web}, total: {requestsPerSecond: 5}}";
    let limit = object("v1alpha1", "HTTPLocalRateLimitPolicy", "limit", spec);
    let manifests = |protocol: &str| {
        let server = server(&format!("port: 8080, proxyProtocol: {protocol}"));
        format!("{}{server}{limit}", workloads(""))
    };
    let policy = get_policy(&manifests("gRPC"), Config::default(), WEB, 8080).await;
    let cause = "the Server's proxyProtocol is gRPC, which does not support rate limits";
    let expected = format!("HTTPLocalRateLimitPolicy shop/limit: {cause}");
    assert_eq!(failure(policy.protocol.unwrap().kind.unwrap()), (13, expected));
    for (protocol, expected) in [("HTTP/1", 0), ("gRPC", 1), ("opaque", 1), ("TLS", 1)] {
        let counted = count_unserved(&manifests(protocol), "spec.targetRef").await;
        assert_eq!(counted, expected, "{protocol}");
    }
}

/// Returns the number of objects for which this field is counted as unserved.
async fn count_unserved(manifests: &str, field: &str) -> usize {
    let mesh = mesh_with(manifests, Config::default()).await;
    let counted = mesh.registry.render();
    let suffix = format!("field=\"{field}\"}} 1");
    let is_of_field = |line: &&str| line.starts_with("unserved_configuration{") && line.ends_with(&suffix);
    counted.lines().filter(is_of_field).count()
}
