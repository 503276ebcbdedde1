//! Responses of the inbound policy service's `GetPort` and `WatchPort` to manifests.

use ipnet::IpNet;
use tonic::Code;
use tulle_control::cluster::Config;
use tulle_proto::inbound::authn::{Permit, permit_mesh_tls::Clients};
use tulle_proto::inbound::proxy_protocol::{Detect, Kind};
use tulle_proto::inbound::{Authz, HttpRoute, Server};
use tulle_proto::meta::metadata;

use crate::harness::{mesh, mesh_with, next, with_timeout};

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  labels: {app: web, linkerd.io/control-plane-ns: linkerd}
spec:
  containers:
  - name: web
    ports: [{name: http, containerPort: 8080}]
    livenessProbe: {httpGet: {path: \"/live?verbose=1\", port: http}}
    readinessProbe: {httpGet: {port: 8080}}
status: {podIP: 10.1.0.1}
";

const WEB: &str = r#"{"ns":"shop","pod":"web-0"}"#;

fn annotated(annotations: &str) -> String {
    POD.replace("  labels:", &format!("  annotations: {{{annotations}}}\n  labels:"))
}

fn detect(server: &Server) -> &Detect {
    match &server.protocol.as_ref().unwrap().kind {
        Some(Kind::Detect(detect)) => detect,
        other => panic!("no detection: {other:?}"),
    }
}

fn route_name(route: &HttpRoute) -> String {
    match &route.metadata.as_ref().unwrap().kind {
        Some(metadata::Kind::Default(name)) => name.clone(),
        Some(metadata::Kind::Resource(resource)) => format!("{}/{}", resource.namespace, resource.name),
        None => panic!("no metadata"),
    }
}

/// Returns an authorization as text: clients, and networks.
fn authorization_summary(authz: &Authz) -> String {
    let ip_net = |net: &tulle_proto::net::IpNetwork| IpNet::try_from(*net).unwrap().to_string();
    let mut networks: Vec<_> = authz
        .networks
        .iter()
        .map(|network| {
            let mut text = ip_net(network.net.as_ref().unwrap());
            for except in &network.except {
                text += &format!("-{}", ip_net(except));
            }
            text
        })
        .collect();
    if networks == ["0.0.0.0/0", "::/0"] {
        networks = vec!["all".to_owned()];
    }
    let clients = match authz.authentication.as_ref().unwrap().permit.as_ref().unwrap() {
        Permit::Unauthenticated(_) => "any client".to_owned(),
        Permit::MeshTls(mesh) => match mesh.clients.as_ref().unwrap() {
            Clients::Unauthenticated(_) => "tls".to_owned(),
            Clients::Identities(identities) => {
                let exact = identities.identities.iter().map(|identity| identity.name.clone());
                let suffixes = identities
                    .suffixes
                    .iter()
                    .map(|suffix| format!("*{}", suffix.parts.join(".")));
                exact.chain(suffixes).collect::<Vec<_>>().join(",")
            }
        },
    };
    format!("{}: {clients} from {}", authz.labels["name"], networks.join(","))
}

fn authorizations(server: &Server) -> Vec<String> {
    server.authorizations.iter().map(authorization_summary).collect()
}

#[tokio::test]
async fn each_default_policy_has_its_authorizations() {
    let cluster = "10.0.0.0/8,100.64.0.0/10,172.16.0.0/12,192.168.0.0/16";
    let check = async |policy: &str, expected: &[String]| {
        let mesh = mesh(&annotated(&format!(
            "config.linkerd.io/default-inbound-policy: {policy}"
        )))
        .await;
        let server = mesh.get_port(WEB, 8080).await.unwrap();
        assert_eq!(authorizations(&server), expected, "{policy}");
        assert_eq!(server.labels["kind"], "default");
        assert_eq!(
            server.labels["name"],
            if policy == "nonsense" { "deny" } else { policy }
        );
    };
    check(
        "all-unauthenticated",
        &["all-unauthenticated: any client from all".to_owned()],
    )
    .await;
    check("all-authenticated", &["all-authenticated: * from all".to_owned()]).await;
    check(
        "cluster-unauthenticated",
        &[format!("cluster-unauthenticated: any client from {cluster}")],
    )
    .await;
    check(
        "cluster-authenticated",
        &[format!("cluster-authenticated: * from {cluster}")],
    )
    .await;
    check("audit", &["audit: any client from all".to_owned()]).await;
    check("deny", &[]).await;
    // An invalid policy denies all clients.
    check("nonsense", &[]).await;
}

#[tokio::test]
async fn the_cluster_default_applies_without_an_annotation() {
    let config = Config {
        default_policy: "deny".parse().unwrap(),
        ..Config::default()
    };
    let mesh = mesh_with(POD, config).await;
    assert_eq!(
        authorizations(&mesh.get_port(WEB, 8080).await.unwrap()),
        Vec::<String>::new()
    );
}

#[tokio::test]
async fn ports_can_be_made_to_require_an_identity() {
    let mesh = mesh(&annotated(
        "config.linkerd.io/proxy-require-identity-inbound-ports: \"8080\"",
    ))
    .await;
    assert_eq!(
        authorizations(&mesh.get_port(WEB, 8080).await.unwrap()),
        ["all-authenticated: * from all"]
    );
    assert_eq!(
        authorizations(&mesh.get_port(WEB, 8081).await.unwrap()),
        ["all-unauthenticated: any client from all"]
    );
}

#[tokio::test]
async fn opaque_ports_have_no_routes() {
    let mesh = mesh(&annotated("config.linkerd.io/opaque-ports: \"5432\"")).await;
    let server = mesh.get_port(WEB, 5432).await.unwrap();
    assert!(matches!(server.protocol.unwrap().kind, Some(Kind::Opaque(_))));
    let server = mesh.get_port(WEB, 8080).await.unwrap();
    assert_eq!(detect(&server).timeout.unwrap().seconds, 10);
    assert_eq!(
        detect(&server).http_routes.iter().map(route_name).collect::<Vec<_>>(),
        ["default"]
    );
}

#[tokio::test]
async fn probes_are_allowed_from_the_probe_networks() {
    let config = Config {
        probe_networks: vec!["192.168.0.0/24".parse().unwrap()],
        ..Config::default()
    };
    let mesh = mesh_with(POD, config).await;
    let server = mesh.get_port(WEB, 8080).await.unwrap();
    let [default, probe] = &*detect(&server).http_routes else {
        panic!()
    };
    assert_eq!(
        (route_name(probe).as_str(), route_name(default).as_str()),
        ("probe", "default")
    );
    assert_eq!(
        probe
            .authorizations
            .iter()
            .map(authorization_summary)
            .collect::<Vec<_>>(),
        ["probe: any client from 192.168.0.0/24"]
    );
    let paths: Vec<_> = probe.rules[0]
        .matches
        .iter()
        .map(|found| found.path.as_ref().and_then(|path| path.kind.clone()).unwrap())
        .collect();
    let exact = |path: &str| tulle_proto::http_route::path_match::Kind::Exact(path.to_owned());
    assert_eq!(paths, [exact("/"), exact("/live")]);
    // Only the probed port has the route.
    assert_eq!(detect(&mesh.get_port(WEB, 8081).await.unwrap()).http_routes.len(), 1);
}

const SERVER: &str = "
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web, namespace: shop, labels: {tier: front}}
spec: {podSelector: {matchLabels: {app: web}}, port: http, proxyProtocol: HTTP/1}
";

const POLICIES: &str = "
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: by-identity, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web}
  requiredAuthenticationRefs:
  - {group: policy.linkerd.io, kind: MeshTLSAuthentication, name: clients}
  - {group: policy.linkerd.io, kind: NetworkAuthentication, name: office}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: by-account, namespace: shop}
spec:
  targetRef: {kind: Namespace, name: shop}
  requiredAuthenticationRefs: [{kind: ServiceAccount, name: front, namespace: web}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: dangling, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web}
  requiredAuthenticationRefs: [{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: missing}]
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {name: clients, namespace: shop}
spec: {identities: [\"*.front.serviceaccount.identity.linkerd.cluster.local\", \"spiffe://root/vm\", \"*\"]}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {name: office, namespace: shop}
spec: {networks: [{cidr: 10.0.0.0/8, except: [10.9.0.0/16]}]}
---
apiVersion: policy.linkerd.io/v1beta1
kind: ServerAuthorization
metadata: {name: old, namespace: shop}
spec:
  server: {selector: {matchLabels: {tier: front}}}
  client: {networks: [{cidr: 172.16.0.0/12}], meshTLS: {unauthenticatedTLS: true}}
---
apiVersion: policy.linkerd.io/v1beta1
kind: ServerAuthorization
metadata: {name: says-nothing, namespace: shop}
spec: {server: {name: web}, client: {networks: [{cidr: 172.16.0.0/12}]}}
";

#[tokio::test]
async fn a_server_has_all_authorizations_that_refer_to_it() {
    let mesh = mesh(&format!("{POD}{SERVER}{POLICIES}")).await;
    let server = mesh.get_port(WEB, 8080).await.unwrap();
    assert!(matches!(server.protocol.as_ref().unwrap().kind, Some(Kind::Http1(_))));
    assert_eq!(
        (server.labels["group"].as_str(), server.labels["kind"].as_str()),
        ("policy.linkerd.io", "server")
    );
    let mut found = authorizations(&server);
    found.sort();
    let front = "front.serviceaccount.identity.linkerd.cluster.local";
    let expected = [
        "by-account: front.web.serviceaccount.identity.linkerd.cluster.local from all".to_owned(),
        format!("by-identity: spiffe://root/vm,*{front},* from 10.0.0.0/8-10.9.0.0/16"),
        "old: tls from 172.16.0.0/12".to_owned(),
    ];
    assert_eq!(found, expected);
    // The Server does not select another port of the pod.
    assert_eq!(
        authorizations(&mesh.get_port(WEB, 9090).await.unwrap()),
        ["all-unauthenticated: any client from all"]
    );
}

#[tokio::test]
async fn a_server_s_access_policy_is_always_among_its_authorizations() {
    let server = SERVER.replace("proxyProtocol: HTTP/1", "accessPolicy: audit");
    let mesh = mesh(&format!("{POD}{server}{POLICIES}")).await;
    let found = authorizations(&mesh.get_port(WEB, 8080).await.unwrap());
    assert_eq!(found.len(), 4);
    assert!(found.contains(&"audit: any client from all".to_owned()));
}

#[tokio::test]
async fn the_oldest_of_overlapping_servers_applies() {
    let rival = |name: &str, created: &str| {
        SERVER.replace(
            "{name: web,",
            &format!("{{name: {name}, creationTimestamp: \"{created}\","),
        )
    };
    let [young, old] = [rival("a", "2024-02-01T00:00:00Z"), rival("b", "2024-01-01T00:00:00Z")];
    let mesh = mesh(&format!("{POD}{young}{old}")).await;
    assert_eq!(mesh.get_port(WEB, 8080).await.unwrap().labels["name"], "b");
}

#[tokio::test]
async fn routes_of_a_server_carry_their_own_authorizations() {
    let route = "
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: admin, namespace: shop}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: Server, name: web}]
  hostnames: [admin.example, \"*.shop.example\"]
  rules:
  - matches: [{path: {value: /admin}, method: POST, headers: [{name: x-a, value: \"1\"}]}]
    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-b, value: \"2\"}]}}]
status: {parents: []}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: admins, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: HTTPRoute, name: admin}
  requiredAuthenticationRefs: []
";
    let mesh = mesh(&format!("{POD}{SERVER}{route}")).await;
    let server = mesh.get_port(WEB, 8080).await.unwrap();
    let Some(Kind::Http1(http)) = &server.protocol.as_ref().unwrap().kind else {
        panic!()
    };
    let [route] = &*http.routes else {
        panic!("{:?}", http.routes)
    };
    assert_eq!(route_name(route), "/admin");
    assert_eq!(
        route
            .authorizations
            .iter()
            .map(authorization_summary)
            .collect::<Vec<_>>(),
        ["admins: any client from all"]
    );
    assert_eq!(route.hosts.len(), 2);
    assert_eq!((route.rules[0].matches.len(), route.rules[0].filters.len()), (1, 1));
    assert!(server.authorizations.is_empty());
}

#[tokio::test]
async fn grpc_servers_have_grpc_routes() {
    let server = SERVER.replace("HTTP/1", "gRPC");
    let route = "
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: calls, namespace: shop}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: Server, name: web}]
  rules: [{matches: [{method: {service: shop.Items, method: Get}}]}]
";
    let plain = mesh(&format!("{POD}{server}")).await.get_port(WEB, 8080).await.unwrap();
    let routed = mesh(&format!("{POD}{server}{route}"))
        .await
        .get_port(WEB, 8080)
        .await
        .unwrap();
    for (server, service) in [(plain, ""), (routed, "shop.Items")] {
        let Some(Kind::Grpc(grpc)) = &server.protocol.as_ref().unwrap().kind else {
            panic!()
        };
        assert_eq!(
            grpc.routes[0].rules[0].matches[0].rpc.as_ref().unwrap().service,
            service
        );
    }
}

#[tokio::test]
async fn a_rate_limit_has_a_total_and_a_limit_per_client() {
    let limit = "
---
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {name: limit, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web}
  total: {requestsPerSecond: 100}
  identity: {requestsPerSecond: 10}
  overrides:
  - requestsPerSecond: 50
    clientRefs: [{kind: ServiceAccount, name: front, namespace: web}]
";
    let mesh = mesh(&format!("{POD}{SERVER}{limit}")).await;
    let server = mesh.get_port(WEB, 8080).await.unwrap();
    let Some(Kind::Http1(http)) = &server.protocol.as_ref().unwrap().kind else {
        panic!()
    };
    let limit = http.local_rate_limit.as_ref().unwrap();
    assert_eq!(limit.total.unwrap().requests_per_second, 100);
    assert_eq!(limit.identity.unwrap().requests_per_second, 10);
    let front = &limit.overrides[0];
    assert_eq!(front.limit.unwrap().requests_per_second, 50);
    let identity = &front.clients.as_ref().unwrap().identities[0].name;
    assert_eq!(identity, "front.web.serviceaccount.identity.linkerd.cluster.local");
}

#[tokio::test]
async fn the_oldest_of_overlapping_rate_limits_applies() {
    let limit = |name: &str, created: &str, total: u32| {
        format!(
            "
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {{name: {name}, namespace: shop, creationTimestamp: \"{created}\"}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: web}}
  total: {{requestsPerSecond: {total}}}
"
        )
    };
    let young = limit("a", "2024-02-01T00:00:00Z", 2);
    let mesh = mesh(&format!("{POD}{SERVER}---{young}")).await;
    let mut stream = mesh.watch_port(WEB, 8080).await.unwrap();
    let mut total = async || match next(&mut stream).await.protocol.unwrap().kind {
        Some(Kind::Http1(http)) => http.local_rate_limit.unwrap().total.unwrap().requests_per_second,
        other => panic!("no HTTP/1: {other:?}"),
    };
    assert_eq!(total().await, 2);
    mesh.manifests.write("old.yaml", &limit("b", "2024-01-01T00:00:00Z", 1));
    assert_eq!(total().await, 1);
    mesh.manifests.remove("old.yaml");
    assert_eq!(total().await, 2);
}

#[tokio::test]
async fn external_workloads_have_their_own_servers() {
    let workload = "
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, namespace: shop, labels: {app: web}}
spec:
  meshTLS: {identity: vm.shop, serverName: vm.shop}
  ports: [{name: http, port: 80}]
  workloadIPs: [{ip: 10.2.0.1}]
";
    let server = SERVER.replace("podSelector", "externalWorkloadSelector");
    let mesh = mesh(&format!("{workload}{server}")).await;
    let workload = r#"{"ns":"shop","external_workload":"vm"}"#;
    assert_eq!(mesh.get_port(workload, 80).await.unwrap().labels["name"], "web");
    assert_eq!(mesh.get_port(workload, 81).await.unwrap().labels["kind"], "default");
}

#[tokio::test]
async fn a_watch_follows_changes_and_ends_with_its_pod() {
    let mesh = mesh(POD).await;
    let mut stream = mesh.watch_port("shop:web-0", 8080).await.unwrap();
    assert_eq!(next(&mut stream).await.labels["kind"], "default");
    mesh.manifests.write("policy.yaml", &SERVER.replace("\n---", ""));
    assert_eq!(next(&mut stream).await.labels["kind"], "server");
    mesh.manifests.write("policy.yaml", "");
    assert_eq!(next(&mut stream).await.labels["kind"], "default");
    mesh.manifests.write("mesh.yaml", "");
    assert!(with_timeout(stream.message()).await.unwrap().is_none());
}

#[tokio::test]
async fn failed_requests_have_their_status_code_and_message() {
    let mesh = mesh(POD).await;
    for (workload, port, code, message) in [
        (WEB, 0, Code::InvalidArgument, "Invalid port"),
        (WEB, 65_536, Code::InvalidArgument, "Invalid port"),
        ("shop:gone", 80, Code::NotFound, "unknown server"),
        (r#"{"ns":"none","pod":"web-0"}"#, 80, Code::NotFound, "unknown server"),
        (
            r#"{"ns":"shop","external_workload":"web-0"}"#,
            80,
            Code::NotFound,
            "unknown server",
        ),
    ] {
        let status = mesh.get_port(workload, port).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, message), "{workload} {port}");
    }
    assert_eq!(
        mesh.get_port("shop", 80).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn a_server_whose_port_no_workload_declares_is_counted() {
    let server = SERVER.replace("port: http", "port: htpp");
    let mesh = mesh(&format!("{POD}{server}")).await;
    let line = "unserved_configuration{kind=\"Server\",namespace=\"shop\",name=\"web\",field=\"spec.port\"}";
    let is_counted = || mesh.registry.render().contains(&format!("{line} 1"));
    assert!(server.contains("htpp") && is_counted());
    mesh.manifests.write("mesh.yaml", &format!("{POD}{SERVER}"));
    crate::harness::eventually(|| !is_counted()).await;
    mesh.manifests.write("mesh.yaml", &format!("{POD}{server}"));
    crate::harness::eventually(is_counted).await;
    // Without a selected workload, it is unknown whether the port is declared.
    mesh.manifests
        .write("mesh.yaml", server.trim_start().trim_start_matches("---"));
    crate::harness::eventually(|| !is_counted()).await;
}
