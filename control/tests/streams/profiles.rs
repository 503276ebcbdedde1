//! Responses of the destination service's `GetProfile` to manifests.

use tonic::Code;
use tulle_control::cluster::{Config, TransportMode};
use tulle_core::ports::PortSet;
use tulle_proto::destination::protocol_hint::Protocol;
use tulle_proto::destination::{DestinationProfile, request_match, response_match};
use tulle_proto::http_types::http_method;
use tulle_proto::meta::{Metadata, metadata};

use crate::destination_rows::{MESHED, check, profile_words};
use crate::harness::{mesh, mesh_with, next};

pub(crate) const MESH: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {config.linkerd.io/opaque-ports: \"bytes,7000-7001\"}}
spec:
  clusterIP: 10.247.0.10
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: bytes, port: 5432}, {name: more, port: 7000}]
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, selector: {app: web}, ports: [{port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: \"\", port: 5432}]
endpoints: [{addresses: [10.1.0.1], hostname: web-0, targetRef: {kind: Pod, name: web-0, namespace: shop}}]
---
apiVersion: v1
kind: Node
metadata: {name: node-a, labels: {topology.kubernetes.io/zone: a}}
---
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  labels: {app: web, linkerd.io/control-plane-ns: linkerd}
  annotations: {config.linkerd.io/opaque-ports: \"9000\"}
spec:
  nodeName: node-a
  hostname: web-0
  subdomain: db
  containers: [{name: web, ports: [{containerPort: 8080, hostPort: 18080}]}]
status: {podIP: 10.1.0.1, hostIP: 192.168.0.1}
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, namespace: shop}
spec:
  meshTLS: {identity: vm.shop, serverName: vm.shop}
  ports: [{port: 80}]
  workloadIPs: [{ip: 10.2.0.1}]
";

pub(crate) const WEB: &str = "web.shop.svc.cluster.local:80";

/// Returns the address and the protocol hint of the endpoint, and whether it has an identity.
pub(crate) fn endpoint(profile: &DestinationProfile) -> (String, Option<Protocol>, bool) {
    let endpoint = profile.endpoint.as_ref().expect("the profile has an endpoint");
    let addr = std::net::SocketAddr::try_from(endpoint.addr.unwrap()).unwrap();
    let protocol = endpoint.protocol_hint.and_then(|hint| hint.protocol);
    (addr.to_string(), protocol, endpoint.tls_identity.is_some())
}

fn resource(metadata: Option<&Metadata>) -> (String, String, u32) {
    match metadata.and_then(|metadata| metadata.kind.as_ref()) {
        Some(metadata::Kind::Resource(resource)) => (
            resource.kind.clone(),
            format!("{}/{}", resource.namespace, resource.name),
            resource.port,
        ),
        other => panic!("no resource: {other:?}"),
    }
}

#[tokio::test]
async fn a_service_has_one_profile_by_name_and_by_address() {
    let mesh = mesh(MESH).await;
    for path in [WEB, "10.247.0.10:80"] {
        let profile = mesh.first_profile(path).await;
        assert_eq!(profile.fully_qualified_name, "web.shop.svc.cluster.local");
        assert!(!profile.opaque_protocol && profile.routes.is_empty() && profile.endpoint.is_none());
        assert_eq!(
            resource(profile.parent_ref.as_ref()),
            ("Service".to_owned(), "shop/web".to_owned(), 80)
        );
        assert_eq!(
            resource(profile.profile_ref.as_ref()),
            ("ServiceProfile".to_owned(), "/".to_owned(), 0)
        );
        let budget = profile.retry_budget.unwrap();
        assert_eq!(
            (
                budget.retry_ratio,
                budget.min_retries_per_second,
                budget.ttl.unwrap().seconds
            ),
            (0.2, 10, 10)
        );
    }
}

#[tokio::test]
async fn opaque_ports_of_services_are_names_numbers_and_ranges() {
    let mesh = mesh(MESH).await;
    for (port, opaque) in [(80, false), (5432, true), (7000, true)] {
        let profile = mesh.first_profile(&format!("10.247.0.10:{port}")).await;
        assert_eq!(profile.opaque_protocol, opaque, "{port}");
    }
}

#[tokio::test]
async fn a_port_that_a_service_does_not_define_has_an_empty_profile() {
    let mesh = mesh(MESH).await;
    for path in ["10.247.0.10:9999", "web.shop.svc.cluster.local:9999"] {
        assert_eq!(mesh.first_profile(path).await, DestinationProfile::default());
    }
}

#[tokio::test]
async fn an_address_has_the_profile_of_its_pod_or_external_workload() {
    let mesh = mesh(MESH).await;
    let check = async |path: &str, addr: &str, meshed: bool, opaque: bool| {
        let profile = mesh.first_profile(path).await;
        let found = endpoint(&profile);
        assert_eq!(
            (found.0.as_str(), found.2, profile.opaque_protocol),
            (addr, meshed, opaque),
            "{path}"
        );
        assert!(profile.fully_qualified_name.is_empty() && profile.parent_ref.is_none());
        profile
    };
    let pod = check("10.1.0.1:8080", "10.1.0.1:8080", true, false).await;
    let labels = pod.endpoint.unwrap().metric_labels;
    assert_eq!(
        (
            labels["namespace"].as_str(),
            labels["pod"].as_str(),
            labels["zone"].as_str()
        ),
        ("shop", "web-0", "a")
    );
    assert!(!labels.contains_key("zone_locality"));
    check("10.1.0.1:9000", "10.1.0.1:9000", true, true).await;
    check("192.168.0.1:18080", "192.168.0.1:18080", true, false).await;
    check("192.168.0.1:8080", "192.168.0.1:8080", false, false).await;
    check("10.2.0.1:80", "10.2.0.1:80", true, false).await;
    check("10.2.0.1:81", "10.2.0.1:81", false, false).await;
    check("203.0.113.1:443", "203.0.113.1:443", false, false).await;
    check("web-0.db.shop.svc.cluster.local:5432", "10.1.0.1:5432", true, false).await;
}

#[tokio::test]
async fn a_pod_in_its_host_s_network_is_found_by_the_ports_it_declares() {
    let pod = "
apiVersion: v1
kind: Pod
metadata:
  name: agent
  namespace: shop
  labels: {linkerd.io/control-plane-ns: linkerd}
  annotations: {config.linkerd.io/opaque-ports: \"9101\"}
spec: {hostNetwork: true, containers: [{name: agent, ports: [{containerPort: 9100}, {containerPort: 9101}]}]}
status: {podIP: 192.168.0.2}
";
    let mesh = mesh(pod).await;
    assert!(endpoint(&mesh.first_profile("192.168.0.2:9100").await).2);
    assert!(!endpoint(&mesh.first_profile("192.168.0.2:22").await).2);
    // The address of the pod is the node's, so clients can connect to the pod's proxy.
    let opaque = profile_words(&mesh, "192.168.0.2:9101").await;
    check("an opaque port", &opaque, "opaque opaque-protocol transport=4143");
}

const HTTP2_WITH_TLS: &str =
    "h2 http2 tls=default.shop.serviceaccount.identity.linkerd.cluster.local !opaque !transport";
const OPAQUE_WITH_TLS: &str =
    "opaque opaque-protocol http2 tls=default.shop.serviceaccount.identity.linkerd.cluster.local !transport";

/// Labels and annotations of a pod, its container port and host port, and words of the endpoint at the host port.
/// Container ports and host ports are different, and each row has the node 192.168.0.<number of the row>. The annotation
/// `add-invalid-sidecar` is only a marker for this test, which then adds a sidecar without listen addresses.
const HOST_PORTS: &[(&str, &str, &str, u16, u16, &str)] = &[
    ("no settings", MESHED, "", 8080, 18080, HTTP2_WITH_TLS),
    (
        "a skipped container port",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: \"8080\"",
        8080,
        18080,
        "pod !h2 !tls !opaque",
    ),
    (
        "a skipped port by name",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: \"main\"",
        8080,
        18080,
        "pod !h2 !tls !opaque",
    ),
    (
        "the number of the host port is skipped",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: \"18080\"",
        8080,
        18080,
        HTTP2_WITH_TLS,
    ),
    (
        "an opaque container port",
        MESHED,
        "config.linkerd.io/opaque-ports: \"8080\"",
        8080,
        18080,
        OPAQUE_WITH_TLS,
    ),
    (
        "the number of the host port is opaque",
        MESHED,
        "config.linkerd.io/opaque-ports: \"18080\"",
        8080,
        18080,
        HTTP2_WITH_TLS,
    ),
    (
        "a container port that is opaque by default",
        MESHED,
        "",
        3306,
        13306,
        OPAQUE_WITH_TLS,
    ),
    (
        "the number of the host port is opaque by default",
        MESHED,
        "",
        8080,
        3306,
        HTTP2_WITH_TLS,
    ),
    (
        "a Server with an opaque port",
        "labels: {linkerd.io/control-plane-ns: linkerd, app: db}",
        "",
        5000,
        15000,
        OPAQUE_WITH_TLS,
    ),
    (
        "a Server with the number of the host port",
        "labels: {linkerd.io/control-plane-ns: linkerd, app: db}",
        "",
        8080,
        5000,
        HTTP2_WITH_TLS,
    ),
    (
        "a pod without a sidecar",
        "labels: {}",
        "",
        3306,
        13306,
        "pod opaque-protocol !h2 !tls",
    ),
    (
        "a pod whose sidecar has no listen addresses",
        MESHED,
        "add-invalid-sidecar: \"\"",
        3306,
        13306,
        "opaque-protocol !pod !h2 !tls",
    ),
];

#[tokio::test]
async fn settings_of_ports_apply_to_the_container_port_of_a_host_port() {
    let mut yaml = "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {name: db, namespace: shop}\n\
        spec: {podSelector: {matchLabels: {app: db}}, port: 5000, proxyProtocol: opaque}\n"
        .to_owned();
    for (n, (_, labels, annotations, container_port, host_port, _)) in HOST_PORTS.iter().enumerate() {
        let sidecar = if annotations.contains("add-invalid-sidecar") {
            ", {name: linkerd-proxy}"
        } else {
            ""
        };
        yaml += &format!(
            "---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: p{n}, namespace: shop, {labels}, annotations: {{{annotations}}}}}\n\
             spec: {{containers: [{{name: app, ports: [{{name: main, containerPort: {container_port}, \
             hostPort: {host_port}}}]}}{sidecar}]}}\n\
             status: {{podIP: 10.1.0.{n}, hostIP: 192.168.0.{n}, phase: Running}}\n"
        );
    }
    let config = || Config {
        default_opaque_ports: "3306".parse().unwrap(),
        ..Config::default()
    };
    let mesh = mesh_with(&yaml, config()).await;
    for (n, (what, _, _, _, host_port, expected)) in HOST_PORTS.iter().enumerate() {
        let addr = format!("192.168.0.{n}:{host_port}");
        let expected = format!("{addr} {}", expected.replace("pod ", &format!("pod=p{n} ")));
        check(what, &profile_words(&mesh, &addr).await, &expected);
    }
    let forcing = Config {
        transport: TransportMode::TransportHeader,
        ..config()
    };
    let mesh = mesh_with(&yaml, forcing).await;
    for (n, (what, _, _, container_port, host_port, _)) in HOST_PORTS.iter().enumerate() {
        check(
            what,
            &profile_words(&mesh, &format!("192.168.0.{n}:{host_port}")).await,
            "!transport",
        );
        if *what == "no settings" {
            check(
                "the address of the pod",
                &profile_words(&mesh, &format!("10.1.0.{n}:{container_port}")).await,
                "h2 transport=4143",
            );
        }
    }
}

#[tokio::test]
async fn a_pod_that_is_being_deleted_keeps_its_identity_until_it_has_ended() {
    let hosted = |name: &str, ip: &str, phase: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, {MESHED}}}\n\
             spec: {{containers: [{{name: app, ports: [{{containerPort: 80, hostPort: 8080}}]}}]}}\n\
             status: {{podIP: 10.1.0.{ip}, hostIP: 192.168.0.{ip}, phase: {phase}}}\n"
        )
    };
    let deleted = |name: &str, ip: &str, phase: &str| {
        let deletion = "namespace: shop, deletionTimestamp: '2025-01-01T00:00:00Z',";
        hosted(name, ip, phase).replace("namespace: shop,", deletion)
    };
    let slice = "---\napiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\n\
        spec: {clusterIP: None, ports: [{port: 5432}]}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
        metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db}}\n\
        addressType: IPv4\nports: [{name: \"\", port: 5432}]\n\
        endpoints: [{addresses: [10.1.0.1], hostname: db-0, targetRef: {kind: Pod, name: leaving, namespace: shop}}]\n";
    let yaml = deleted("leaving", "1", "Running")
        + &deleted("ended", "2", "Succeeded")
        + &deleted("before", "3", "Running")
        + &hosted("after", "3", "Running")
        + slice;
    let mesh = mesh(&yaml).await;
    let leaving = "pod=leaving h2 tls=default.shop.serviceaccount.identity.linkerd.cluster.local";
    for (what, path, expected) in [
        ("by its address", "10.1.0.1:80", leaving),
        ("by its host port", "192.168.0.1:8080", leaving),
        ("by its hostname", "db-0.db.shop.svc.cluster.local:5432", leaving),
        ("after its end", "10.1.0.2:80", "10.1.0.2:80 !pod !h2 !tls"),
        ("if another pod has its address", "10.1.0.3:80", "pod=after h2"),
        ("if another pod has its host port", "192.168.0.3:8080", "pod=after h2"),
    ] {
        check(what, &profile_words(&mesh, path).await, expected);
    }
}

#[tokio::test]
async fn a_client_that_names_a_pod_by_hostname_names_a_port_of_the_service() {
    let mesh = mesh(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {name: db-0, namespace: shop}\n\
         spec: {containers: [{name: db}]}\nstatus: {phase: Running, podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}]}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\n\
         spec: {clusterIP: None, ports: [{name: sql, port: 5432, targetPort: 6543}]}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db}}\n\
         addressType: IPv4\nports: [{name: sql, port: 6543}]\n\
         endpoints: [{addresses: [10.1.0.1], hostname: db-0, targetRef: {kind: Pod, name: db-0, namespace: shop}}]\n",
    )
    .await;
    for (port, expected) in [(5432, "10.1.0.1:6543"), (80, "10.1.0.1:80")] {
        let path = format!("db-0.db.shop.svc.cluster.local:{port}");
        check(&path, &profile_words(&mesh, &path).await, expected);
    }
}

#[tokio::test]
async fn unknown_addresses_follow_the_default_opaque_ports() {
    let opaque = "25,3306".parse::<PortSet>().unwrap();
    let mesh = mesh_with(
        MESH,
        Config {
            default_opaque_ports: opaque,
            ..Config::default()
        },
    )
    .await;
    assert!(mesh.first_profile("203.0.113.1:3306").await.opaque_protocol);
    assert!(mesh.first_profile("10.2.0.1:80").await.endpoint.is_some());
    // An annotation replaces all default ports.
    assert!(!mesh.first_profile("10.1.0.1:3306").await.opaque_protocol);
}

pub(crate) const PROFILE: &str = "
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.shop.svc.cluster.local, namespace: NAMESPACE}
spec:
  routes:
  - name: NAMESPACE-get
    condition: {method: get, pathRegex: /items/\\d+}
    isRetryable: true
    timeout: 1.5s
    responseClasses:
    - condition: {status: {min: 500, max: 599}}
      isFailure: true
  retryBudget: {retryRatio: 0.5, minRetriesPerSecond: 3, ttl: 20s}
  dstOverrides:
  - {authority: web-v1.shop.svc.cluster.local, weight: 500m}
  - {authority: \"web-v2.shop.svc.cluster.local:8080\", weight: 1}
";

#[tokio::test]
async fn service_profiles_are_translated() {
    let mesh = mesh(&format!("{MESH}---{}", PROFILE.replace("NAMESPACE", "shop"))).await;
    let profile = mesh.first_profile("10.247.0.10:80").await;
    let [route] = &*profile.routes else {
        panic!("{:?}", profile.routes)
    };
    assert_eq!(route.metrics_labels["route"], "shop-get");
    assert!(route.is_retryable);
    let timeout = route.timeout.unwrap();
    assert_eq!((timeout.seconds, timeout.nanos), (1, 500_000_000));
    let Some(request_match::Match::All(all)) = &route.condition.as_ref().unwrap().r#match else {
        panic!()
    };
    let [method, path] = &*all.matches else { panic!() };
    let get = http_method::Type::Registered(http_method::Registered::Get.into());
    assert!(matches!(&method.r#match, Some(request_match::Match::Method(method)) if method.r#type == Some(get)));
    assert!(matches!(&path.r#match, Some(request_match::Match::Path(path)) if path.regex == r"/items/\d+"));
    let [class] = &*route.response_classes else { panic!() };
    let status = &class.condition.as_ref().unwrap().r#match;
    assert!(matches!(status, Some(response_match::Match::Status(range)) if (range.min, range.max) == (500, 599)));
    assert!(class.is_failure);
    let budget = profile.retry_budget.unwrap();
    assert_eq!(
        (
            budget.retry_ratio,
            budget.min_retries_per_second,
            budget.ttl.unwrap().seconds
        ),
        (0.5, 3, 20)
    );
    let overrides: Vec<_> = profile
        .dst_overrides
        .iter()
        .map(|dst| (dst.authority.as_str(), dst.weight))
        .collect();
    let expected = [
        ("web-v1.shop.svc.cluster.local:80", 5000),
        ("web-v2.shop.svc.cluster.local:8080", 10_000),
    ];
    assert_eq!(overrides, expected);
    let name = "shop/web.shop.svc.cluster.local".to_owned();
    assert_eq!(
        resource(profile.profile_ref.as_ref()),
        ("ServiceProfile".to_owned(), name, 0)
    );
}

#[tokio::test]
async fn a_profile_in_the_client_s_namespace_takes_precedence() {
    let [own, clients] = ["shop", "front"].map(|namespace| PROFILE.replace("NAMESPACE", namespace));
    let mesh = mesh(&format!("{MESH}---{own}---{clients}")).await;
    let route = async |token: &str| {
        let profile = next(&mut mesh.get_profile(WEB, token).await.unwrap()).await;
        profile.routes[0].metrics_labels["route"].clone()
    };
    assert_eq!(route("").await, "shop-get");
    assert_eq!(route(r#"{"ns":"front"}"#).await, "front-get");
    assert_eq!(route(r#"{"ns":"other"}"#).await, "shop-get");
}

#[tokio::test]
async fn failed_lookups_have_their_status_code() {
    let alias = "---\napiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: shop}\n\
        spec: {type: ExternalName, externalName: example.org}\n";
    let mesh = mesh(&format!("{MESH}{alias}")).await;
    for (path, code) in [
        ("gone.shop.svc.cluster.local:80", Code::Unknown),
        ("alias.shop.svc.cluster.local:80", Code::InvalidArgument),
        ("web-9.db.shop.svc.cluster.local:80", Code::NotFound),
        ("example.org:80", Code::InvalidArgument),
        ("web.shop.svc.cluster.local:0", Code::InvalidArgument),
    ] {
        assert_eq!(mesh.get_profile(path, "").await.unwrap_err().code(), code, "{path}");
    }
}

#[tokio::test]
async fn every_spelling_of_a_name_in_dst_overrides_becomes_the_full_name() {
    for (authority, expected) in [
        ("srv2.shop.svc.cluster.local.:80", "srv2.shop.svc.cluster.local:80"),
        ("srv2.shop.svc.cluster.local.", "srv2.shop.svc.cluster.local:80"),
        ("srv2.shop:8080", "srv2.shop.svc.cluster.local:8080"),
        ("srv2.shop", "srv2.shop.svc.cluster.local:80"),
        ("srv2.shop.svc:80", "srv2.shop.svc.cluster.local:80"),
        ("srv2.shop.svc.:80", "srv2.shop.svc.cluster.local:80"),
        ("Srv2.Shop.SVC.cluster.local:80", "srv2.shop.svc.cluster.local:80"),
        ("db-0.db.shop.svc:5432", "db-0.db.shop.svc.cluster.local:5432"),
    ] {
        let manifests = PROFILE.replace("NAMESPACE", "shop").replace(
            "authority: web-v1.shop.svc.cluster.local,",
            &format!("authority: \"{authority}\","),
        );
        let mesh = mesh(&format!("{MESH}---{manifests}")).await;
        let profile = mesh.first_profile("10.247.0.10:80").await;
        assert_eq!(profile.dst_overrides[0].authority, expected, "{authority}");
    }
}
