//! Tables of Services of other clusters: endpoints of mirrors with a gateway, and profiles and policies of mirrors and federated
//! Services.

use tulle_control::cluster::{Config, Ipv6};
use tulle_control::resources::service::EndpointsSource;
use tulle_proto::destination::DestinationProfile;

use crate::destination_rows::{CONTAINER, added_words, check, pod};
use crate::harness::{mesh, mesh_with, next, update_summary};
use crate::outbound_rows::{self, CLIENT, TO_WEB, route, services};
use crate::show::show;

pub(crate) const MIRROR: &str = "web-east.shop.svc.cluster.local:80";

/// Returns a mirror with a gateway at `ip`: the Service, and the object that lists the gateway, with `annotations`.
pub(crate) fn mirror(source: EndpointsSource, annotations: &str, ip: &str, is_ready: bool) -> String {
    let metadata = |name: &str, labels: &str| {
        format!(
            "metadata: {{name: {name}, namespace: shop, labels: {{{labels}mirror.linkerd.io/mirrored-service: \"true\", \
             mirror.linkerd.io/cluster-name: east}}, annotations: {{{annotations}}}}}"
        )
    };
    let listing = match source {
        EndpointsSource::Endpoints => {
            let addresses = if is_ready { "addresses" } else { "notReadyAddresses" };
            format!(
                "apiVersion: v1\nkind: Endpoints\n{}\n\
                 subsets: [{{{addresses}: [{{ip: \"{ip}\"}}], ports: [{{name: http, port: 4143}}]}}]\n",
                metadata("web-east", "")
            )
        }
        EndpointsSource::EndpointSlices => {
            let family = if ip.contains(':') { "IPv6" } else { "IPv4" };
            format!(
                "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n{}\naddressType: {family}\n\
                 ports: [{{name: http, port: 4143}}]\n\
                 endpoints: [{{addresses: [\"{ip}\"], conditions: {{ready: {is_ready}}}}}]\n",
                metadata("web-east-1", "kubernetes.io/service-name: web-east, ")
            )
        }
    };
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web-east, namespace: shop}}\n\
         spec: {{clusterIP: 10.247.0.21, ports: [{{name: http, port: 80, targetPort: 1}}]}}\n---\n{listing}"
    )
}

const GATEWAY: &str = "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east";
const REMOTE_NAME: &str = "mirror.linkerd.io/remote-svc-fq-name: web.shop.svc.east.test";

#[tokio::test]
async fn mirror_addresses_lead_to_the_gateway_with_the_remote_service_name() {
    let identity = format!("mirror.linkerd.io/remote-gateway-identity: {GATEWAY}");
    let both = format!("{identity}, {REMOTE_NAME}");
    let tls = format!("h2 tls={GATEWAY}");
    let target = "authority=web.shop.svc.east.test:80 target_service=web target_service_namespace=shop";
    let rows = [
        (
            "IPv4",
            &*both,
            "203.0.113.9",
            format!("203.0.113.9:4143 {tls} {target}"),
        ),
        (
            "IPv6",
            &*both,
            "2001:db8::9",
            format!("[2001:db8::9]:4143 {tls} {target}"),
        ),
        (
            "without identity",
            REMOTE_NAME,
            "203.0.113.9",
            format!("203.0.113.9:4143 {target} !tls !h2"),
        ),
        (
            "without name",
            &*identity,
            "203.0.113.9",
            format!("203.0.113.9:4143 {tls} !authority !target_service"),
        ),
    ];
    for source in [EndpointsSource::EndpointSlices, EndpointsSource::Endpoints] {
        for (what, annotations, ip, expected) in &rows {
            let config = Config {
                endpoints_source: source,
                ipv6: Ipv6::Serve,
                ..Config::default()
            };
            let mesh = mesh_with(&mirror(source, annotations, ip, true), config).await;
            let endpoints = added_words(next(&mut mesh.get(MIRROR).await.unwrap()).await);
            assert_eq!(endpoints.len(), 1, "{what}: {endpoints:?}");
            let expected = format!("{expected} target_cluster=east !transport !opaque");
            check(&format!("{what}, {source:?}"), &endpoints[0], &expected);
        }
    }
}

/// The annotations are a contract: any program can list addresses that lead to another cluster.
#[tokio::test]
async fn the_annotations_of_mirrors_describe_addresses_of_any_service_but_not_pods() {
    let annotations = format!("mirror.linkerd.io/remote-gateway-identity: {GATEWAY}, {REMOTE_NAME}");
    let labels = "mirror.linkerd.io/mirrored-service: \"true\", mirror.linkerd.io/cluster-name: east";
    let target = "targetRef: {kind: Pod, name: web-1, namespace: shop}";
    for source in [EndpointsSource::EndpointSlices, EndpointsSource::Endpoints] {
        let listing = mirror(source, &annotations, "203.0.113.9", true);
        assert!(listing.contains(labels), "{listing}");
        let unlabelled = listing.replace(labels, "");
        let of_pod = unlabelled
            .replace("\"203.0.113.9\"}", &format!("\"203.0.113.9\", {target}}}"))
            .replace("\"203.0.113.9\"]", &format!("\"203.0.113.9\"], {target}"));
        let of_pod = of_pod + &pod("web-1", "203.0.113.9", "labels: {}", CONTAINER);
        let gateway = format!("h2 tls={GATEWAY} authority=web.shop.svc.east.test:80 !target");
        for (what, manifests, expected) in [
            ("an address without a pod", unlabelled, &*gateway),
            ("a pod", of_pod, "pod=web-1 !authority !tls !target"),
        ] {
            let config = Config {
                endpoints_source: source,
                ..Config::default()
            };
            let mesh = mesh_with(&manifests, config).await;
            let endpoints = added_words(next(&mut mesh.get(MIRROR).await.unwrap()).await);
            assert_eq!(endpoints.len(), 1, "{what}: {endpoints:?}");
            let expected = format!("203.0.113.9:4143 {expected}");
            check(&format!("{what}, {source:?}"), &endpoints[0], &expected);
        }
    }
}

#[tokio::test]
async fn a_mirror_whose_gateway_is_not_ready_exists_without_endpoints() {
    for source in [EndpointsSource::EndpointSlices, EndpointsSource::Endpoints] {
        let config = Config {
            endpoints_source: source,
            ..Config::default()
        };
        let mesh = mesh_with(&mirror(source, REMOTE_NAME, "203.0.113.9", false), config).await;
        let update = next(&mut mesh.get(MIRROR).await.unwrap()).await;
        assert_eq!(update_summary(&update), "1", "{source:?}");
    }
}

/// A mirror with a gateway, a mirror with remote discovery, the mirror of a pod, and a federated Service, each with its address.
const KINDS: [(&str, &str, &str); 4] = [
    (
        "web-east",
        "10.247.0.21",
        "labels: {mirror.linkerd.io/mirrored-service: \"true\", mirror.linkerd.io/cluster-name: east}",
    ),
    (
        "app-east",
        "10.247.0.22",
        "labels: {mirror.linkerd.io/mirrored-service: \"true\", mirror.linkerd.io/cluster-name: east, \
         multicluster.linkerd.io/remote-discovery: east, multicluster.linkerd.io/remote-service: app}",
    ),
    (
        "db-0-east",
        "10.247.0.23",
        "labels: {mirror.linkerd.io/mirrored-service: \"true\", mirror.linkerd.io/cluster-name: east, \
         mirror.linkerd.io/headless-mirror-svc-name: db-east}",
    ),
    (
        "all-federated",
        "10.247.0.24",
        "labels: {mirror.linkerd.io/mirrored-service: \"true\"}",
    ),
];

/// A Service of each kind, whose port 7000 is opaque.
fn services_of_other_clusters() -> String {
    let manifest = |(name, ip, labels): (&str, &str, &str)| {
        let members = match name {
            "all-federated" => ", multicluster.linkerd.io/remote-discovery: all@east",
            _ => "",
        };
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop, {labels}, \
             annotations: {{config.linkerd.io/opaque-ports: \"7000\"{members}}}}}\nspec: {{clusterIP: {ip}, ports: [\
             {{name: http, port: 80}}, {{name: h2, port: 90, appProtocol: kubernetes.io/h2c}}, {{name: bytes, port: 7000}}]}}\n"
        )
    };
    KINDS.map(manifest).concat()
}

#[tokio::test]
async fn the_profile_of_a_mirror_or_federated_service_is_the_same_by_name_and_by_address() {
    let profiles = KINDS.map(|(name, ..)| {
        format!(
            "---\napiVersion: linkerd.io/v1alpha2\nkind: ServiceProfile\n\
             metadata: {{name: {name}.shop.svc.cluster.local, namespace: shop}}\n\
             spec: {{routes: [{{name: of-{name}, condition: {{pathRegex: /}}}}]}}\n"
        )
    });
    let mesh = mesh(&(services_of_other_clusters() + &profiles.concat())).await;
    for (name, ip, _) in KINDS {
        let host = format!("{name}.shop.svc.cluster.local");
        for (port, is_opaque) in [(80, false), (7000, true)] {
            let by_name = mesh.first_profile(&format!("{host}:{port}")).await;
            let by_address = mesh.first_profile(&format!("{ip}:{port}")).await;
            assert_eq!(by_name, by_address, "{name}:{port}");
            assert_eq!(by_name.fully_qualified_name, host);
            assert_eq!(by_name.opaque_protocol, is_opaque, "{name}:{port}");
            let routes: Vec<_> = by_name
                .routes
                .iter()
                .map(|route| &*route.metrics_labels["route"])
                .collect();
            assert_eq!(routes, [format!("of-{name}")]);
        }
        for undefined in [format!("{host}:81"), format!("{ip}:81")] {
            let profile = mesh.first_profile(&undefined).await;
            assert_eq!(profile, DestinationProfile::default(), "{undefined}");
        }
    }
}

#[tokio::test]
async fn the_policy_of_a_mirror_or_federated_service_is_that_of_a_local_service() {
    let mesh = mesh(&services_of_other_clusters()).await;
    let policy = async |target: &str| show(&mesh.get_policy(CLIENT, target).await.unwrap());
    for (name, ip, _) in KINDS {
        for host in [format!("{name}.shop.svc.cluster.local"), ip.to_owned()] {
            for (port, protocol, routes) in [
                (80, "detect 10s", &["http", "opaq"][..]),
                (90, "http2", &["http"]),
                (7000, "opaque", &["opaq"]),
            ] {
                let mut expected = vec![format!("{protocol} of Service shop/{name}:{port}")];
                expected.extend(routes.iter().map(|route| format!("{route} -> {name}.shop:{port}")));
                assert_eq!(policy(&format!("{host}:{port}")).await, expected, "{host}");
            }
        }
        let lines = policy(&format!("{ip}:81")).await;
        assert!(lines[1].starts_with("undefined-port forbidden"), "{name}: {lines:?}");
    }
}

#[tokio::test]
async fn routes_split_traffic_between_mirrors_and_federated_services() {
    let backends = "[{name: web-east, port: 80, weight: 3}, {name: app-east, port: 80, weight: 2}, \
                    {name: all-federated, port: 80, weight: 1}]";
    let split = route(
        "HTTPRoute shop/split",
        "",
        &format!("{{{TO_WEB}, rules: [{{backendRefs: {backends}}}]}}"),
    );
    outbound_rows::check(
        &(services("", "") + &services_of_other_clusters() + &split),
        "10.247.0.10:80",
        &[
            "detect 10s of Service shop/web:80",
            "gateway HTTPRoute shop/split -> 3*web-east.shop:80 | 2*app-east.shop:80 | 1*all-federated.shop:80",
            "opaq -> web.shop:80",
        ],
    )
    .await;
}
