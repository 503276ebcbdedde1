//! Responses of the destination service's `Get` to manifests.

use tonic::Code;
use tulle_control::cluster::{Config, Ipv6, TransportMode};
use tulle_control::resources::service::EndpointsSource;
use tulle_proto::destination::protocol_hint::Protocol;
use tulle_proto::destination::tls_identity::Strategy;
use tulle_proto::destination::{WeightedAddr, update};

use crate::harness::{added, mesh, mesh_with, next, update_summary};

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.247.0.10
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: bytes, port: 5432, targetPort: data}
";

fn pod(name: &str, ip: &str, more: &str) -> String {
    format!(
        "
---
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: shop
  labels: {{app: web, linkerd.io/control-plane-ns: linkerd}}
  {more}
spec:
  serviceAccountName: web
  containers:
  - name: web
    ports: [{{name: data, containerPort: 5000}}]
status: {{podIP: {ip}}}
"
    )
}

const HTTP: &str = "web.shop.svc.cluster.local:80";
const BYTES: &str = "web.shop.svc.cluster.local:5432";

fn label<'a>(addr: &'a WeightedAddr, key: &str) -> Option<&'a str> {
    addr.metric_labels.get(key).map(String::as_str)
}

#[tokio::test]
async fn pods_behind_a_service_are_meshed_endpoints() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    let update = next(&mut mesh.get(HTTP).await.unwrap()).await;
    let Some(update::Update::Add(set)) = update.update else {
        panic!("no addition")
    };
    assert_eq!(set.metric_labels["service"], "web");
    assert_eq!(set.metric_labels["namespace"], "shop");
    let [addr] = &*set.addrs else { panic!("{:?}", set.addrs) };
    let socket = std::net::SocketAddr::try_from(addr.addr.unwrap()).unwrap();
    assert_eq!(socket.to_string(), "10.1.0.1:8080");
    assert_eq!(addr.weight, 10_000);
    let expected = [
        ("pod", "web-1"),
        ("serviceaccount", "web"),
        ("control_plane_ns", "linkerd"),
    ];
    for (key, value) in expected.into_iter().chain([("zone", ""), ("zone_locality", "unknown")]) {
        assert_eq!(label(addr, key), Some(value), "{key}");
    }
    let hint = addr.protocol_hint.unwrap();
    assert!(matches!(hint.protocol, Some(Protocol::H2(_))));
    assert_eq!(hint.opaque_transport, None);
    let tls = addr.tls_identity.as_ref().unwrap();
    let name = "web.shop.serviceaccount.identity.linkerd.cluster.local";
    assert!(matches!(&tls.strategy, Some(Strategy::DnsLikeIdentity(identity)) if identity.name == name));
    assert_eq!(tls.server_name.as_ref().unwrap().name, name);
}

#[tokio::test]
async fn named_target_ports_are_found_in_the_pod() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    assert_eq!(
        update_summary(&next(&mut mesh.get(BYTES).await.unwrap()).await),
        "+10.1.0.1:5000"
    );
    // A port that the service does not list is used unchanged.
    let unlisted = mesh.get("web.shop.svc.cluster.local:9999").await;
    assert_eq!(update_summary(&next(&mut unlisted.unwrap()).await), "+10.1.0.1:9999");
}

#[tokio::test]
async fn opaque_ports_come_with_a_transport_header() {
    let opaque = "annotations: {config.linkerd.io/opaque-ports: \"data\"}";
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", opaque))).await;
    let addrs = added(next(&mut mesh.get(BYTES).await.unwrap()).await);
    let hint = addrs[0].protocol_hint.unwrap();
    assert!(matches!(hint.protocol, Some(Protocol::Opaque(_))));
    assert_eq!(hint.opaque_transport.unwrap().inbound_port, 4143);
    let addrs = added(next(&mut mesh.get(HTTP).await.unwrap()).await);
    assert!(matches!(
        addrs[0].protocol_hint.unwrap().protocol,
        Some(Protocol::H2(_))
    ));
}

#[tokio::test]
async fn a_port_is_opaque_while_an_opaque_server_selects_it() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    let mut stream = mesh.get(HTTP).await.unwrap();
    let is_opaque =
        |addrs: &[WeightedAddr]| matches!(addrs[0].protocol_hint.unwrap().protocol, Some(Protocol::Opaque(_)));
    assert!(!is_opaque(&added(next(&mut stream).await)));
    let server = "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {name: web, namespace: shop}\n\
        spec: {podSelector: {}, port: 8080, proxyProtocol: opaque}\n";
    mesh.manifests.write("server.yaml", server);
    assert!(is_opaque(&added(next(&mut stream).await)));
    mesh.manifests.remove("server.yaml");
    assert!(!is_opaque(&added(next(&mut stream).await)));
}

#[tokio::test]
async fn pods_without_a_mesh_label_and_skipped_ports_are_plain() {
    let skipped = "annotations: {config.linkerd.io/skip-inbound-ports: \"8000-8100\"}";
    let plain = pod("web-1", "10.1.0.1", "").replace(", linkerd.io/control-plane-ns: linkerd", "");
    for pod in [plain, pod("web-1", "10.1.0.1", skipped)] {
        let mesh = mesh(&format!("{WEB}{pod}")).await;
        let addrs = added(next(&mut mesh.get(HTTP).await.unwrap()).await);
        assert_eq!((&addrs[0].tls_identity, addrs[0].protocol_hint), (&None, None));
        assert_eq!(label(&addrs[0], "pod"), Some("web-1"));
    }
}

#[tokio::test]
async fn a_pod_whose_sidecar_has_no_listen_addresses_is_omitted() {
    let broken = pod("web-2", "10.1.0.2", "").replace("  - name: web\n", "  - name: linkerd-proxy\n");
    let mesh = mesh(&format!("{WEB}{}{broken}", pod("web-1", "10.1.0.1", ""))).await;
    assert_eq!(
        update_summary(&next(&mut mesh.get(HTTP).await.unwrap()).await),
        "+10.1.0.1:8080"
    );
}

#[tokio::test]
async fn forced_transport_headers_go_to_every_meshed_port() {
    let config = Config {
        transport: TransportMode::TransportHeader,
        ..Config::default()
    };
    let mesh = mesh_with(&format!("{WEB}{}", pod("web-1", "10.1.0.1", "")), config).await;
    let hint = added(next(&mut mesh.get(HTTP).await.unwrap()).await)[0]
        .protocol_hint
        .unwrap();
    assert_eq!(hint.opaque_transport.unwrap().inbound_port, 4143);
    let admin = mesh.get("web.shop.svc.cluster.local:4191").await;
    let hint = added(next(&mut admin.unwrap()).await)[0].protocol_hint.unwrap();
    assert_eq!(hint.opaque_transport, None);
}

#[tokio::test]
async fn additions_come_before_removals_and_an_empty_set_is_sent_immediately() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    let mut stream = mesh.get(HTTP).await.unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.1:8080");
    mesh.manifests
        .write("mesh.yaml", &format!("{WEB}{}", pod("web-2", "10.1.0.2", "")));
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.2:8080");
    assert_eq!(update_summary(&next(&mut stream).await), "-10.1.0.1:8080");
    mesh.manifests.write("mesh.yaml", WEB);
    assert_eq!(update_summary(&next(&mut stream).await), "-10.1.0.2:8080");
    assert_eq!(update_summary(&next(&mut stream).await), "1");
    mesh.manifests.write("mesh.yaml", "");
    assert_eq!(update_summary(&next(&mut stream).await), "0");
    mesh.manifests
        .write("mesh.yaml", &format!("{WEB}{}", pod("web-3", "10.1.0.3", "")));
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.3:8080");
}

#[tokio::test]
async fn an_empty_service_is_empty_from_the_first_message() {
    let mesh = mesh(WEB).await;
    assert_eq!(update_summary(&next(&mut mesh.get(HTTP).await.unwrap()).await), "1");
}

#[tokio::test]
async fn terminated_pods_and_pods_that_are_not_ready_are_omitted() {
    let status = |status: &str| pod("web-2", "10.1.0.2", "").replace("{podIP: 10.1.0.2}", status);
    for status in [
        status("{podIP: 10.1.0.2, phase: Succeeded}"),
        status("{podIP: 10.1.0.2, phase: Running, conditions: [{type: Ready, status: \"False\"}]}"),
    ] {
        let mesh = mesh(&format!("{WEB}{}{status}", pod("web-1", "10.1.0.1", ""))).await;
        assert_eq!(
            update_summary(&next(&mut mesh.get(HTTP).await.unwrap()).await),
            "+10.1.0.1:8080"
        );
    }
}

#[tokio::test]
async fn failed_lookups_have_their_status_code_and_message() {
    let alias = "---\napiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: shop}\n\
        spec: {type: ExternalName, externalName: example.org}\n";
    let mesh = mesh(&format!("{WEB}{alias}")).await;
    let cases = [
        (
            "web.shop.svc.cluster.local:http",
            Code::InvalidArgument,
            "Invalid authority: web.shop.svc.cluster.local:http",
        ),
        (
            "example.org:80",
            Code::InvalidArgument,
            "Invalid authority: example.org:80",
        ),
        (
            "10.1.0.1:80",
            Code::InvalidArgument,
            "IP queries not supported by Get API: host=10.1.0.1",
        ),
        (
            "gone.shop.svc.cluster.local:80",
            Code::NotFound,
            "Service gone.shop not found",
        ),
        (
            "alias.shop.svc.cluster.local:80",
            Code::InvalidArgument,
            "Invalid authority: alias.shop.svc.cluster.local:80",
        ),
    ];
    for (path, code, message) in cases {
        let status = mesh.get(path).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (code, message), "{path}");
    }
}

#[tokio::test]
async fn external_workloads_are_endpoints_with_their_own_identity() {
    let workload = |identity: &str| {
        format!(
            "---\napiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
             metadata: {{name: vm, namespace: shop, labels: {{app: web}}}}\n\
             spec:\n  meshTLS: {{identity: \"{identity}\", serverName: vm.shop}}\n  \
             ports: [{{port: 8080}}, {{name: linkerd-proxy, port: 4243}}]\n  workloadIPs: [{{ip: 10.2.0.1}}]\n"
        )
    };
    let config = || Config {
        transport: TransportMode::TransportHeader,
        ..Config::default()
    };
    let mesh = mesh_with(&format!("{WEB}{}", workload("spiffe://root/vm")), config()).await;
    let mut stream = mesh.get(HTTP).await.unwrap();
    let addrs = added(next(&mut stream).await);
    assert_eq!(label(&addrs[0], "external_workload"), Some("vm"));
    assert_eq!(
        addrs[0].protocol_hint.unwrap().opaque_transport.unwrap().inbound_port,
        4243
    );
    let tls = addrs[0].tls_identity.as_ref().unwrap();
    assert!(matches!(&tls.strategy, Some(Strategy::UriLikeIdentity(uri)) if uri.uri == "spiffe://root/vm"));
    assert_eq!(tls.server_name.as_ref().unwrap().name, "vm.shop");
    mesh.manifests
        .write("mesh.yaml", &format!("{WEB}{}", workload("vm.shop.example")));
    let addrs = added(next(&mut stream).await);
    let tls = addrs[0].tls_identity.as_ref().unwrap();
    assert!(matches!(&tls.strategy, Some(Strategy::DnsLikeIdentity(name)) if name.name == "vm.shop.example"));
    // The workload does not serve a port that it does not declare.
    assert_eq!(update_summary(&next(&mut mesh.get(BYTES).await.unwrap()).await), "1");
}

const SLICE: &str = "
---
apiVersion: v1
kind: Node
metadata: {name: node-a, labels: {topology.kubernetes.io/zone: a}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-x, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.3.0.1], zone: a, hints: {forZones: [{name: a}]}, nodeName: node-a}
- {addresses: [10.3.0.2], zone: b, hints: {forZones: [{name: b}]}, hostname: web-0}
- {addresses: [10.3.0.3], conditions: {ready: false}}
";

#[tokio::test]
async fn slices_replace_the_selector_and_their_hints_choose_zones() {
    let mesh = mesh(&format!("{WEB}{SLICE}{}", pod("web-1", "10.1.0.1", ""))).await;
    let first =
        async |path: &str, token: &str| update_summary(&next(&mut mesh.get_from(path, token).await.unwrap()).await);
    assert_eq!(first(HTTP, "").await, "+10.3.0.1:8080,10.3.0.2:8080");
    assert_eq!(
        first(HTTP, r#"{"ns":"shop","nodeName":"node-a"}"#).await,
        "+10.3.0.1:8080"
    );
    assert_eq!(
        first(HTTP, r#"{"ns":"shop","nodeName":"node-z"}"#).await,
        "+10.3.0.1:8080,10.3.0.2:8080"
    );
    assert_eq!(first("web-0.web.shop.svc.cluster.local:80", "").await, "+10.3.0.2:8080");
}

#[tokio::test]
async fn local_traffic_stays_on_the_client_s_node() {
    let local = WEB.replace("  selector:", "  internalTrafficPolicy: Local\n  selector:");
    let on = |name: &str, ip: &str, node: &str| {
        pod(name, ip, "").replace(
            "  serviceAccountName",
            &format!("  nodeName: {node}\n  serviceAccountName"),
        )
    };
    let mesh = mesh(&format!(
        "{local}{}{}",
        on("web-1", "10.1.0.1", "a"),
        on("web-2", "10.1.0.2", "b")
    ))
    .await;
    let mut stream = mesh.get_from(HTTP, r#"{"nodeName":"b"}"#).await.unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.2:8080");
    assert_eq!(update_summary(&next(&mut mesh.get(HTTP).await.unwrap()).await), "1");
}

#[tokio::test]
async fn a_dual_stack_pod_is_reached_by_one_family() {
    let both =
        pod("web-1", "10.1.0.1", "").replace("{podIP: 10.1.0.1}", "{podIPs: [{ip: 10.1.0.1}, {ip: \"fd00::1\"}]}");
    let v4 = mesh(&format!("{WEB}{both}")).await;
    assert_eq!(
        update_summary(&next(&mut v4.get(HTTP).await.unwrap()).await),
        "+10.1.0.1:8080"
    );
    let v6 = mesh_with(
        &format!("{WEB}{both}"),
        Config {
            ipv6: Ipv6::Serve,
            ..Config::default()
        },
    )
    .await;
    assert_eq!(
        update_summary(&next(&mut v6.get(HTTP).await.unwrap()).await),
        "+[fd00::1]:8080"
    );
}

#[tokio::test]
async fn endpoints_objects_can_be_used_instead_of_slices() {
    let config = Config {
        endpoints_source: EndpointsSource::Endpoints,
        ..Config::default()
    };
    let mesh = mesh_with(&format!("{WEB}{}", pod("web-1", "10.1.0.1", "")), config).await;
    assert_eq!(
        update_summary(&next(&mut mesh.get(HTTP).await.unwrap()).await),
        "+10.1.0.1:8080"
    );
}

#[tokio::test]
async fn series_without_subscribers_are_removed() {
    let mesh = mesh(WEB).await;
    let stream = mesh.get(HTTP).await.unwrap();
    let series = "endpoints_subscribers{cluster=\"local\",namespace=\"shop\",service=\"web\",port=\"80\",hostname=\"\",nodename=\"\"} 1";
    assert!(mesh.registry.render().contains(series), "{}", mesh.registry.render());
    drop(stream);
    mesh.registry.retire(std::time::Duration::ZERO);
    assert!(!mesh.registry.render().contains("endpoints_subscribers{"));
    assert!(
        mesh.registry
            .render()
            .contains("service_cache_size{cluster=\"local\"} 1")
    );
}

#[tokio::test]
async fn series_of_profiles_are_removed_with_their_last_subscriber() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    let of_service = [
        "profile_subscribers{namespace=\"shop\",profile=\"web.shop.svc.cluster.local\"}",
        "service_subscribers{namespace=\"shop\",name=\"web\"}",
    ];
    let of_address = ["workload_subscribers{ip=\"10.1.0.1\",port=\"8080\"}"];
    for (path, counted, updates) in [
        (HTTP, &of_service[..], "profile_updates{"),
        ("10.1.0.1:8080", &of_address[..], "workload_updates{"),
    ] {
        let check_subscribers = |n: usize| {
            let page = mesh.registry.render();
            for series in counted {
                let line = format!("\n{series} {n}\n");
                assert!(page.contains(&line), "no {line} in {page}");
            }
            assert!(page.contains(updates), "no {updates} in {page}");
        };
        let first = mesh.get_profile(path, "").await.unwrap();
        let last = mesh.get_profile(path, "").await.unwrap();
        check_subscribers(2);
        drop(first);
        mesh.registry.retire(std::time::Duration::ZERO);
        check_subscribers(1);
        drop(last);
        // The first pass sees a change, the second that there is no subscriber.
        mesh.registry.retire(std::time::Duration::ZERO);
        mesh.registry.retire(std::time::Duration::ZERO);
        let page = mesh.registry.render();
        for series in counted.iter().copied().chain([updates]) {
            let family = series.split_inclusive('{').next().unwrap();
            assert!(!page.contains(family), "{family} in {page}");
        }
    }
}

#[tokio::test]
async fn requests_with_an_invalid_context_token_are_counted_and_served() {
    let mesh = mesh(&format!("{WEB}{}", pod("web-1", "10.1.0.1", ""))).await;
    for (token, n_counted) in [("", 0), (r#"{"ns":"shop"}"#, 0), ("ns:shop", 0), ("{", 1), ("shop", 2)] {
        let update = next(&mut mesh.get_from(HTTP, token).await.unwrap()).await;
        assert_eq!(update_summary(&update), "+10.1.0.1:8080", "{token}");
        let line = format!("tulle_invalid_context_tokens_total {n_counted}\n");
        assert!(mesh.registry.render().contains(&line), "no {line} with {token}");
    }
}
