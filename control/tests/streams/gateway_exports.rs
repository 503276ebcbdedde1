//! The Services that a gateway serves to other clusters: policies and profiles that match the selector which its proxy sends.

use tulle_proto::destination::DestinationProfile;

use crate::harness::{Mesh, mesh, next, update_summary};
use crate::outbound_rows::{self, TO_WEB, route};
use crate::show::show;

const WEB: &str = "web.shop.svc.cluster.local:80";
const POD: &str = "db-0.db.shop.svc.cluster.local:5432";
/// The selector of the chart.
const EXPORTED: &str = "mirror.linkerd.io/exported in (true,remote-discovery)";
const EXPORTED_LABEL: &str = "mirror.linkerd.io/exported: \"true\"";

/// What the proxy of a gateway with this selector sends to both services.
fn gateway(selector: &str) -> String {
    format!(r#"{{"ns":"linkerd-multicluster","pod":"gateway-0","exportedServices":"{selector}"}}"#)
}

/// A Service with a ServiceProfile, and a headless Service with a pod, both with these labels.
fn services(labels: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop, labels: {{{labels}}}}}
spec: {{clusterIP: 10.247.0.10, ports: [{{port: 80}}]}}
---
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {{name: web.shop.svc.cluster.local, namespace: shop}}
spec: {{routes: [{{name: all, condition: {{pathRegex: /.*}}}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: db, namespace: shop, labels: {{{labels}}}}}
spec: {{clusterIP: None, selector: {{app: db}}, ports: [{{port: 5432}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: db-1, namespace: shop, labels: {{kubernetes.io/service-name: db}}}}
addressType: IPv4
ports: [{{name: \"\", port: 5432}}]
endpoints: [{{addresses: [10.1.0.1], hostname: db-0, targetRef: {{kind: Pod, name: db-0, namespace: shop}}}}]
---
apiVersion: v1
kind: Pod
metadata: {{name: db-0, namespace: shop, labels: {{app: db, linkerd.io/control-plane-ns: linkerd}}}}
spec: {{hostname: db-0, subdomain: db, containers: [{{name: db, ports: [{{containerPort: 5432}}]}}]}}
status: {{podIP: 10.1.0.1, phase: Running}}
"
    )
}

/// Whether a policy serves its target. Both outcomes are checked completely.
#[track_caller]
fn is_served(lines: &[String], service: &str) -> bool {
    if lines[0] != "detect 10s of not-exported" {
        return true;
    }
    let [_, http, opaque] = lines else { panic!("{lines:?}") };
    let refused = format!("not-exported fail 404 \"Service {service} is not exported\" -> nothing");
    assert!(http.starts_with(&refused), "{http}");
    assert!(opaque.starts_with("not-exported forbidden"), "{opaque}");
    false
}

async fn profile(mesh: &Mesh, path: &str, client: &str) -> DestinationProfile {
    next(&mut mesh.get_profile(path, client).await.unwrap()).await
}

#[tokio::test]
async fn a_gateway_serves_the_services_that_its_selector_matches() {
    for (labels, selector, expected) in [
        (EXPORTED_LABEL, EXPORTED, true),
        ("mirror.linkerd.io/exported: remote-discovery", EXPORTED, true),
        ("mirror.linkerd.io/exported: \"false\"", EXPORTED, false),
        (
            "mirror.linkerd.io/exported: \"false\"",
            "mirror.linkerd.io/exported",
            true,
        ),
        ("mirror.linkerd.io/federated: member", EXPORTED, false),
        ("", EXPORTED, false),
        // Without a selector, as in Linkerd.
        ("", "", true),
        ("team: a", "team in (a,b),!internal", true),
        ("team: a, internal: \"true\"", "team in (a,b),!internal", false),
        // An invalid selector.
        ("team: a", "team a", false),
    ] {
        let mesh = mesh(&services(labels)).await;
        let client = gateway(selector);
        let what = format!("{labels}, {selector}");
        let lines = show(&mesh.get_policy(&client, WEB).await.unwrap());
        assert_eq!(is_served(&lines, "shop/web"), expected, "{what}");
        let of_service = profile(&mesh, WEB, &client).await;
        assert_eq!(of_service.routes.len(), usize::from(expected), "{what}");
        let of_pod = profile(&mesh, POD, &client).await;
        assert_eq!(of_pod.endpoint.is_some(), expected, "{what}");
        for profile in [of_service, of_pod] {
            assert_eq!(profile != DestinationProfile::default(), expected, "{what}");
        }
    }
}

#[tokio::test]
async fn a_label_that_is_added_or_removed_reaches_the_open_streams_of_a_gateway() {
    let mesh = mesh(&services("")).await;
    let client = gateway(EXPORTED);
    let mut policies = mesh.watch_policy(&client, WEB).await.unwrap();
    let mut profiles = mesh.get_profile(WEB, &client).await.unwrap();
    let mut of_pod = mesh.get_profile(POD, &client).await.unwrap();
    for (labels, expected) in [("", false), (EXPORTED_LABEL, true), ("", false)] {
        mesh.manifests.write("mesh.yaml", &services(labels));
        let lines = show(&next(&mut policies).await);
        assert_eq!(is_served(&lines, "shop/web"), expected, "{lines:?}");
        assert_eq!(!next(&mut profiles).await.routes.is_empty(), expected);
        assert_eq!(next(&mut of_pod).await.endpoint.is_some(), expected);
    }
}

#[tokio::test]
async fn a_gateway_serves_neither_services_of_the_cluster_nor_missing_ones() {
    let service = |namespace: &str, name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{clusterIP: None, ports: [{{port: 443}}]}}\n"
        )
    };
    let mesh = mesh(&(service("default", "kubernetes") + &service("linkerd", "linkerd-policy"))).await;
    for (namespace, name) in [
        ("default", "kubernetes"),
        ("linkerd", "linkerd-policy"),
        ("shop", "missing"),
    ] {
        let path = format!("{name}.{namespace}.svc.cluster.local:443");
        let is_missing = name == "missing";
        for (selector, expected) in [(EXPORTED, false), ("!internal", !is_missing), ("", true)] {
            let client = gateway(selector);
            let lines = show(&mesh.get_policy(&client, &path).await.unwrap());
            let service = format!("{namespace}/{name}");
            assert_eq!(is_served(&lines, &service), expected, "{path}, {selector}");
            if !expected {
                let profile = profile(&mesh, &path, &client).await;
                assert_eq!(profile, DestinationProfile::default(), "{path}, {selector}");
            }
        }
    }
}

#[tokio::test]
async fn the_backends_of_an_exported_service_need_not_be_exported() {
    let labels = format!("namespace: shop, labels: {{{EXPORTED_LABEL}}},");
    let exported = outbound_rows::services("", "").replacen("namespace: shop,", &labels, 1);
    let backends = "rules: [{backendRefs: [{name: web-v2, port: 80}]}]";
    let to_v2 = route("HTTPRoute shop/to-v2", "", &format!("{{{TO_WEB}, {backends}}}"));
    let mesh = mesh(&(exported + &to_v2)).await;
    let client = gateway(EXPORTED);
    let lines = show(&mesh.get_policy(&client, WEB).await.unwrap());
    assert_eq!(
        lines[1], "gateway HTTPRoute shop/to-v2 -> 1*web-v2.shop:80",
        "{lines:?}"
    );
    // The Service exists and has no endpoints.
    let backend = "web-v2.shop.svc.cluster.local:80";
    let update = next(&mut mesh.get_from(backend, &client).await.unwrap()).await;
    assert_eq!(update_summary(&update), "1");
    // A request for its name is refused.
    let lines = show(&mesh.get_policy(&client, backend).await.unwrap());
    assert!(!is_served(&lines, "shop/web-v2"), "{lines:?}");
}
