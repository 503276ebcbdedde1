//! Tables of the destination service: manifests, requests, and words that the response must contain.

use tulle_control::cluster::{Config, H2Upgrade, Ipv6, TransportMode};
use tulle_control::destination;
use tulle_control::destination::config::ZoneWeights;
use tulle_control::resources::service::EndpointsSource;
use tulle_proto::destination::protocol_hint::Protocol;
use tulle_proto::destination::tls_identity::Strategy;
use tulle_proto::destination::{Update, WeightedAddr, update};

use crate::harness::{Mesh, mesh, mesh_with, next, update_summary};

/// Formats an endpoint as words: address, protocol hint, transport header, identity, authority, values that differ from their
/// defaults, labels.
fn words(addr: &WeightedAddr) -> Vec<String> {
    let mut words = vec![std::net::SocketAddr::try_from(addr.addr.unwrap()).unwrap().to_string()];
    let hint = addr.protocol_hint;
    words.extend(hint.and_then(|hint| hint.protocol).map(|protocol| match protocol {
        Protocol::H2(_) => "h2".to_owned(),
        Protocol::Opaque(_) => "opaque".to_owned(),
    }));
    let transport = hint.and_then(|hint| hint.opaque_transport);
    words.extend(transport.map(|transport| format!("transport={}", transport.inbound_port)));
    if let Some(tls) = &addr.tls_identity {
        words.push(match tls.strategy.as_ref().unwrap() {
            Strategy::DnsLikeIdentity(name) => format!("tls={}", name.name),
            Strategy::UriLikeIdentity(uri) => format!("tls={}", uri.uri),
        });
    }
    words.extend(
        addr.authority_override
            .iter()
            .map(|to| format!("authority={}", to.authority_override)),
    );
    if addr.weight != 10_000 {
        words.push(format!("weight={}", addr.weight));
    }
    if addr.http2.is_some() {
        words.push("http2".to_owned());
    }
    words.extend(addr.metric_labels.iter().map(|(key, value)| format!("{key}={value}")));
    words
}

/// Checks the words of an endpoint: each expected word is present, and `!word` means that no word starts with `word`.
pub(crate) fn check(what: &str, words: &[String], expected: &str) {
    for word in expected.split(' ') {
        let holds = match word.strip_prefix('!') {
            Some(none) => !words.iter().any(|word| word.starts_with(none)),
            None => words.iter().any(|other| other == word),
        };
        assert!(holds, "{what}: {word} of {expected:?} fails in {words:?}");
    }
}

/// Returns the endpoint in the profile of an address, as words.
pub(crate) async fn profile_words(mesh: &Mesh, path: &str) -> Vec<String> {
    let profile = mesh.first_profile(path).await;
    let mut words = words(&profile.endpoint.expect("the profile has an endpoint"));
    if profile.opaque_protocol {
        words.push("opaque-protocol".to_owned());
    }
    words
}

/// Returns a running pod of namespace `shop`. `metadata` and `spec` are added to its fields; [`MESHED`] means that it has a
/// sidecar.
pub(crate) fn pod(name: &str, ip: &str, metadata: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, {metadata}}}\n\
         spec: {{{spec}}}\nstatus: {{podIP: {ip}, phase: Running}}\n"
    )
}

pub(crate) const MESHED: &str = "labels: {linkerd.io/control-plane-ns: linkerd}";

fn owned(kind: &str, name: &str) -> String {
    format!("{MESHED}, ownerReferences: [{{apiVersion: v1, kind: {kind}, name: {name}, uid: u}}]")
}

pub(crate) const CONTAINER: &str = "containers: [{name: app, ports: [{name: data, containerPort: 5000}]}]";

#[tokio::test]
async fn owners_are_labels() {
    let owner_object = |kind: &str, name: &str, owner: &str| {
        let group = if kind == "Job" { "batch/v1" } else { "apps/v1" };
        format!("---\napiVersion: {group}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop, {owner}}}\n")
    };
    let two =
        "ownerReferences: [{apiVersion: v1, kind: A, name: a, uid: u}, {apiVersion: v1, kind: B, name: b, uid: v}]";
    let rows = [
        ("no owner", MESHED.to_owned(), "pod=p !deployment !replicaset"),
        ("two", format!("{MESHED}, {two}"), "pod=p !a= !b="),
        (
            "a ReplicaSet of a Deployment",
            owned("ReplicaSet", "web-5d"),
            "deployment=web !replicaset",
        ),
        (
            "a ReplicaSet of something else",
            owned("ReplicaSet", "roll-5d"),
            "replicaset=roll-5d !rollout",
        ),
        ("a ReplicaSet alone", owned("ReplicaSet", "lone"), "replicaset=lone"),
        (
            "a Job of a CronJob",
            owned("Job", "nightly-1"),
            "cronjob=nightly !k8s_job",
        ),
        ("a Job alone", owned("Job", "once"), "k8s_job=once !job"),
        ("a StatefulSet", owned("StatefulSet", "db"), "statefulset=db"),
        ("a DaemonSet", owned("DaemonSet", "agent"), "daemonset=agent"),
        ("a third-party kind", owned("CloneSet", "clones"), "cloneset=clones"),
        (
            "a kind whose label has another meaning",
            owned("Zone", "far"),
            "pod=p zone= !zone=far",
        ),
    ];
    let mut yaml = owner_object("ReplicaSet", "web-5d", &owned("Deployment", "web"))
        + &owner_object("ReplicaSet", "roll-5d", &owned("Rollout", "roll"))
        + &owner_object("ReplicaSet", "lone", "labels: {}")
        + &owner_object("Job", "nightly-1", &owned("CronJob", "nightly"))
        + &owner_object("Job", "once", "labels: {}");
    for (n, (_, metadata, _)) in rows.iter().enumerate() {
        yaml +=
            &pod("p", &format!("10.1.0.{}", n + 1), metadata, CONTAINER).replace("name: p,", &format!("name: p{n},"));
    }
    let mesh = mesh(&yaml).await;
    for (n, (what, _, expected)) in rows.iter().enumerate() {
        let words = profile_words(&mesh, &format!("10.1.0.{}:80", n + 1)).await;
        let expected = expected.replace("pod=p", &format!("pod=p{n}"));
        check(
            what,
            &words,
            &format!("{expected} namespace=shop serviceaccount=default"),
        );
    }
}

const NATIVE_SIDECAR: &str = "{name: linkerd-proxy, env: [\
    {name: LINKERD2_PROXY_INBOUND_LISTEN_ADDR, value: \"[::]:14143\"}, \
    {name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR, value: \"[::]:14191\"}, \
    {name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR, value: \"0.0.0.0:4190\"}]}";

const SIDECAR_WITH_INVALID_ADMIN_ADDRESS: &str = "{name: linkerd-proxy, env: [\
    {name: LINKERD2_PROXY_INBOUND_LISTEN_ADDR, value: \"[::]:14143\"}, \
    {name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR, value: \"nowhere\"}, \
    {name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR, value: \"0.0.0.0:4190\"}]}";

/// Labels, annotations and init containers of a pod, one of its ports, and words of the endpoint.
const PODS: &[(&str, &str, &str, &str, u16, &str)] = &[
    (
        "meshed",
        MESHED,
        "",
        "",
        80,
        "h2 http2 !transport tls=web.shop.serviceaccount.identity.linkerd.cluster.local control_plane_ns=linkerd",
    ),
    (
        "not meshed",
        "labels: {}",
        "",
        "",
        80,
        "!h2 !http2 !tls !control_plane_ns pod=p",
    ),
    (
        "of another control plane",
        "labels: {linkerd.io/control-plane-ns: other, pod-template-hash: 5d}",
        "",
        "",
        80,
        "h2 !tls control_plane_ns=other pod_template_hash=5d",
    ),
    (
        "of the control plane itself",
        "labels: {linkerd.io/control-plane-ns: linkerd, linkerd.io/control-plane-component: identity}",
        "",
        "",
        80,
        "!h2 !tls pod=p",
    ),
    (
        "a skipped port",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: \"70-90\"",
        "",
        80,
        "!h2 !tls !http2 pod=p",
    ),
    (
        "a port that is not skipped",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: data",
        "",
        80,
        "h2 tls=web.shop.serviceaccount.identity.linkerd.cluster.local",
    ),
    (
        "a skipped port by name",
        MESHED,
        "config.linkerd.io/skip-inbound-ports: data",
        "",
        5000,
        "!h2 !tls",
    ),
    (
        "opaque by number",
        MESHED,
        "config.linkerd.io/opaque-ports: \"80\"",
        "",
        80,
        "opaque transport=4143 opaque-protocol !h2",
    ),
    (
        "opaque by name",
        MESHED,
        "config.linkerd.io/opaque-ports: data",
        "",
        5000,
        "opaque transport=4143",
    ),
    (
        "opaque by range",
        MESHED,
        "config.linkerd.io/opaque-ports: \"1-3,79-81\"",
        "",
        80,
        "opaque",
    ),
    (
        "opaque by default",
        MESHED,
        "",
        "",
        3306,
        "opaque transport=4143 opaque-protocol",
    ),
    (
        "explicitly not opaque",
        MESHED,
        "config.linkerd.io/opaque-ports: \"\"",
        "",
        3306,
        "h2 !opaque",
    ),
    (
        "opaque, of a native sidecar",
        MESHED,
        "config.linkerd.io/opaque-ports: \"80,14191\"",
        NATIVE_SIDECAR,
        80,
        "opaque transport=14143",
    ),
    (
        "opaque, but the sidecar's own port",
        MESHED,
        "config.linkerd.io/opaque-ports: \"80,14191\"",
        NATIVE_SIDECAR,
        14191,
        "opaque !transport",
    ),
    (
        "of a sidecar with an invalid admin address",
        MESHED,
        "",
        SIDECAR_WITH_INVALID_ADMIN_ADDRESS,
        80,
        "!h2 !tls !pod",
    ),
];

#[tokio::test]
async fn pods_determine_how_they_are_reached() {
    let mut yaml = String::new();
    for (n, (_, labels, annotations, sidecar, ..)) in PODS.iter().enumerate() {
        yaml += &pod(
            &format!("p{n}"),
            &format!("10.1.0.{}", n + 1),
            &format!("{labels}, annotations: {{{annotations}}}"),
            &format!("initContainers: [{sidecar}], serviceAccountName: web, {CONTAINER}"),
        );
    }
    let config = || Config {
        default_opaque_ports: "25,3306".parse().unwrap(),
        ..Config::default()
    };
    let mesh = mesh_with(&yaml, config()).await;
    for (n, (what, _, _, _, port, expected)) in PODS.iter().enumerate() {
        let words = profile_words(&mesh, &format!("10.1.0.{}:{port}", n + 1)).await;
        check(what, &words, &expected.replace("pod=p", &format!("pod=p{n}")));
    }
    let omitting = Config {
        h2_upgrade: H2Upgrade::Omit,
        ..config()
    };
    let mesh = mesh_with(&yaml, omitting).await;
    check(
        "without HTTP/2",
        &profile_words(&mesh, "10.1.0.1:80").await,
        "!h2 !opaque tls=web.shop.serviceaccount.identity.linkerd.cluster.local",
    );
    let forcing = Config {
        transport: TransportMode::TransportHeader,
        ..config()
    };
    let mesh = mesh_with(&yaml, forcing).await;
    check(
        "with forced headers",
        &profile_words(&mesh, "10.1.0.1:80").await,
        "h2 transport=4143",
    );
}

/// A service `web` with a slice; nodes `node-a` and `node-b` in zones a and b.
pub(crate) fn sliced(service: &str, slice: &str) -> String {
    let node = |name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: node-{name}, labels: {{topology.kubernetes.io/zone: {name}}}}}\n"
        )
    };
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop, uid: u}}\n\
         spec: {{clusterIP: 10.247.0.100, {service}}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: web-1, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n{slice}\n{}{}",
        node("a"),
        node("b")
    )
}

pub(crate) const PORTS: &str = "ports: [{name: http, port: 80, targetPort: 1}, {name: admin, port: 81}]";
pub(crate) const V4: &str = "addressType: IPv4\nports: [{name: http, port: 8080}]\n";

/// Endpoints of the slice of a service, and the addresses at the service's port 80. `1` means that there are none, although the
/// service exists ([`update_summary`]).
const ENDPOINTS: &[(&str, &str, &str)] = &[
    (
        "the slice's port counts, not the target port",
        "{addresses: [10.3.0.1]}",
        "+10.3.0.1:8080",
    ),
    (
        "an endpoint without conditions is ready",
        "{addresses: [10.3.0.1], conditions: {}}",
        "+10.3.0.1:8080",
    ),
    (
        "only readiness counts",
        "{addresses: [10.3.0.1], conditions: {ready: true, terminating: true, serving: false}}",
        "+10.3.0.1:8080",
    ),
    (
        "not ready",
        "{addresses: [10.3.0.1], conditions: {ready: false, serving: true}}",
        "1",
    ),
    (
        "a serving, terminating endpoint without a ready one",
        "{addresses: [10.3.0.1], conditions: {ready: false, serving: true, terminating: true}}, \
         {addresses: [10.3.0.2], conditions: {ready: false, serving: false, terminating: true}}",
        "+10.3.0.1:8080",
    ),
    (
        "a terminating endpoint and a ready endpoint",
        "{addresses: [10.3.0.1], conditions: {ready: false, serving: true, terminating: true}}, {addresses: [10.3.0.2]}",
        "+10.3.0.2:8080",
    ),
    (
        "only the first of several addresses of an endpoint is used",
        "{addresses: [10.3.0.2, 10.3.0.1]}, {addresses: [10.3.0.3]}",
        "+10.3.0.2:8080,10.3.0.3:8080",
    ),
    (
        "a pod that is not known",
        "{addresses: [10.3.0.1], targetRef: {kind: Pod, name: gone, namespace: shop}}",
        "1",
    ),
    (
        "a target that is neither a pod nor a workload",
        "{addresses: [10.3.0.1], targetRef: {kind: Node, name: node-a}}",
        "+10.3.0.1:8080",
    ),
];

#[tokio::test]
async fn slices_determine_the_addresses() {
    let row = async |what: &str, yaml: &str, port: u16, expected: &str| {
        let mesh = mesh(yaml).await;
        let path = format!("web.shop.svc.cluster.local:{port}");
        let found = update_summary(&next(&mut mesh.get(&path).await.unwrap()).await);
        assert_eq!(found, expected, "{what}");
    };
    let slice_of = |service: &str, endpoints: &str| sliced(service, &format!("{V4}endpoints: [{endpoints}]\n"));
    for &(what, endpoints, expected) in ENDPOINTS {
        row(what, &slice_of(PORTS, endpoints), 80, expected).await;
    }
    let one = slice_of(PORTS, "{addresses: [10.3.0.1]}");
    row("a port that the slice does not name", &one, 81, "1").await;
    row("a port that the service does not list", &one, 9999, "+10.3.0.1:9999").await;
    let owned = one.replace(
        "labels: {kubernetes.io/service-name: web}",
        "ownerReferences: [{apiVersion: v1, kind: Service, name: web, uid: u}]",
    );
    row("the owner of the slice names the service", &owned, 80, "+10.3.0.1:8080").await;
    let nameless = sliced(
        "ports: [{port: 80}]",
        "addressType: IPv4\nports: [{name: \"\", port: 8080}]\nendpoints: [{addresses: [10.3.0.1]}]",
    );
    row("a service without a port name", &nameless, 80, "+10.3.0.1:8080").await;
    let portless = sliced(PORTS, "addressType: IPv4\nendpoints: [{addresses: [10.3.0.1]}]");
    row("a slice without ports", &portless, 80, "1").await;
    let fqdn_slice = sliced(
        PORTS,
        "addressType: FQDN\nports: [{name: http, port: 8080}]\nendpoints: [{addresses: [example.org]}]",
    );
    row("a slice of DNS names", &fqdn_slice, 80, "1").await;

    let deleted = pod(
        "web",
        "10.3.0.1",
        "deletionTimestamp: '2025-01-01T00:00:00Z'",
        "containers: []",
    );
    let endpoint = "{addresses: [10.3.0.1], targetRef: {kind: Pod, name: web, namespace: shop}}";
    let both = format!("{endpoint}, {{addresses: [10.3.0.2]}}");
    let publishing = format!("{PORTS}, publishNotReadyAddresses: true");
    for (what, service, endpoints, expected) in [
        (
            "a pod that is being deleted, and another pod",
            PORTS,
            &*both,
            "+10.3.0.2:8080",
        ),
        ("only a pod that is being deleted", PORTS, endpoint, "+10.3.0.1:8080"),
        (
            "a pod that is being deleted, of a service that publishes such pods",
            &publishing,
            &both,
            "+10.3.0.1:8080,10.3.0.2:8080",
        ),
    ] {
        row(what, &(slice_of(service, endpoints) + &deleted), 80, expected).await;
    }
}

pub(crate) const TOKEN_ON_NODE_A: &str = r#"{"ns":"shop","nodeName":"node-a","pod":"client"}"#;

const ONE_IN_EACH_ZONE: &str = "{addresses: [10.3.0.1], hints: {forZones: [{name: a}]}}, \
    {addresses: [10.3.0.2], hints: {forZones: [{name: b}]}}";

/// Endpoints, the token of the client, and the addresses that it gets.
const HINTS: &[(&str, &str, &str, &str)] = &[
    ("the client's zone", ONE_IN_EACH_ZONE, TOKEN_ON_NODE_A, "+10.3.0.1:8080"),
    (
        "a client without a node name",
        ONE_IN_EACH_ZONE,
        "",
        "+10.3.0.1:8080,10.3.0.2:8080",
    ),
    (
        "a token that cannot be read",
        ONE_IN_EACH_ZONE,
        "{",
        "+10.3.0.1:8080,10.3.0.2:8080",
    ),
    (
        "an old token",
        ONE_IN_EACH_ZONE,
        "ns:shop",
        "+10.3.0.1:8080,10.3.0.2:8080",
    ),
    (
        "one endpoint for both zones",
        "{addresses: [10.3.0.1], hints: {forZones: [{name: a}, {name: b}]}}, \
         {addresses: [10.3.0.2], hints: {forZones: [{name: b}]}}",
        TOKEN_ON_NODE_A,
        "+10.3.0.1:8080",
    ),
    (
        "if one endpoint has no hints, all endpoints are used",
        "{addresses: [10.3.0.1], hints: {forZones: [{name: a}]}}, \
         {addresses: [10.3.0.2], hints: {forZones: [{name: b}]}}, {addresses: [10.3.0.3]}",
        TOKEN_ON_NODE_A,
        "+10.3.0.1:8080,10.3.0.2:8080,10.3.0.3:8080",
    ),
    (
        "if hints exclude all endpoints, all are used",
        "{addresses: [10.3.0.2], hints: {forZones: [{name: b}]}}",
        TOKEN_ON_NODE_A,
        "+10.3.0.2:8080",
    ),
    (
        "the client's node",
        "{addresses: [10.3.0.1], hints: {forNodes: [{name: node-a}], forZones: [{name: a}]}}, \
         {addresses: [10.3.0.2], hints: {forNodes: [{name: node-c}], forZones: [{name: a}]}}",
        TOKEN_ON_NODE_A,
        "+10.3.0.1:8080",
    ),
    (
        "no hint for the client's node, but one for its zone",
        "{addresses: [10.3.0.1], hints: {forNodes: [{name: node-b}], forZones: [{name: b}]}}, \
         {addresses: [10.3.0.2], hints: {forNodes: [{name: node-c}], forZones: [{name: a}]}}",
        TOKEN_ON_NODE_A,
        "+10.3.0.2:8080",
    ),
    (
        "if one endpoint has no hints of nodes, all endpoints are used",
        "{addresses: [10.3.0.1], hints: {forNodes: [{name: node-a}]}}, {addresses: [10.3.0.2]}",
        TOKEN_ON_NODE_A,
        "+10.3.0.1:8080,10.3.0.2:8080",
    ),
];

#[tokio::test]
async fn hints_and_traffic_policies_choose_endpoints() {
    let on_node =
        |name: &str, ip: &str, node: &str| pod(name, ip, "labels: {}", &format!("nodeName: {node}, {CONTAINER}"));
    let pods = on_node("p1", "10.1.0.1", "node-a") + &on_node("p2", "10.1.0.2", "node-b");
    let row = async |what: &str, service: &str, endpoints: &str, token: &str, expected: &str| {
        let mesh = mesh(&(sliced(service, &format!("{V4}endpoints: [{endpoints}]")) + &pods)).await;
        let mut stream = mesh.get_from("web.shop.svc.cluster.local:80", token).await.unwrap();
        assert_eq!(update_summary(&next(&mut stream).await), expected, "{what}");
    };
    for &(what, endpoints, token, expected) in HINTS {
        row(what, PORTS, endpoints, token, expected).await;
    }
    let local = format!("internalTrafficPolicy: Local, {PORTS}");
    let on_nodes = "{addresses: [10.1.0.1], nodeName: node-a, targetRef: {kind: Pod, name: p1, namespace: shop}}, \
        {addresses: [10.1.0.2], nodeName: node-b, targetRef: {kind: Pod, name: p2, namespace: shop}}, \
        {addresses: [10.3.0.3], nodeName: node-a}";
    let what = "local traffic goes to pods of the node only";
    row(what, &local, on_nodes, TOKEN_ON_NODE_A, "+10.1.0.1:8080").await;
    row(
        "local traffic of a client without a node name has no endpoints",
        &local,
        on_nodes,
        "",
        "1",
    )
    .await;
}

/// Returns the words of the endpoints that an update adds.
pub(crate) fn added_words(update: Update) -> Vec<Vec<String>> {
    match update.update {
        Some(update::Update::Add(set)) => set.addrs.iter().map(words).collect(),
        other => panic!("no addition: {other:?}"),
    }
}

#[tokio::test]
async fn zones_are_labels_and_can_set_weights() {
    let endpoints = "{addresses: [10.3.0.1], zone: a}, {addresses: [10.3.0.2], zone: b}, {addresses: [10.3.0.3]}";
    let mesh = mesh(&sliced(PORTS, &format!("{V4}endpoints: [{endpoints}]"))).await;
    let path = "web.shop.svc.cluster.local:80";
    let equal = destination::config::Config::default();
    let preferring = destination::config::Config {
        zone_weights: ZoneWeights::PreferLocal,
        ..destination::config::Config::default()
    };
    let rows = [
        (
            &equal,
            TOKEN_ON_NODE_A,
            [
                "zone_locality=local !weight",
                "zone_locality=remote",
                "zone_locality=unknown",
            ],
        ),
        (&equal, "", ["zone_locality=unknown"; 3]),
        (
            &preferring,
            TOKEN_ON_NODE_A,
            [
                "zone_locality=local weight=100000",
                "zone_locality=remote !weight",
                "zone_locality=unknown !weight",
            ],
        ),
    ];
    for (config, token, expected) in rows {
        let found = added_words(next(&mut mesh.get_with(config.clone(), path, token).await.unwrap()).await);
        assert_eq!(found.len(), expected.len());
        for (words, expected) in found.iter().zip(expected) {
            check(token, words, expected);
        }
    }
}

#[tokio::test]
async fn a_pod_with_two_families_is_one_endpoint() {
    let target = "targetRef: {kind: Pod, name: p1, namespace: shop}";
    let slices = format!(
        "{V4}endpoints: [{{addresses: [10.1.0.1], {target}}}, {{addresses: [10.3.0.9]}}]\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: web-6, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv6\nports: [{{name: http, port: 8080}}]\n\
         endpoints: [{{addresses: [\"fd00::1\"], {target}}}]\n"
    );
    let yaml = sliced(PORTS, &slices) + &pod("p1", "10.1.0.1", "labels: {}", CONTAINER);
    for (ipv6, expected) in [
        (Ipv6::Drop, "+10.1.0.1:8080,10.3.0.9:8080"),
        (Ipv6::Serve, "+10.3.0.9:8080,[fd00::1]:8080"),
    ] {
        let config = Config {
            ipv6,
            ..Config::default()
        };
        let mesh = mesh_with(&yaml, config).await;
        let mut stream = mesh.get("web.shop.svc.cluster.local:80").await.unwrap();
        assert_eq!(update_summary(&next(&mut stream).await), expected, "{ipv6:?}");
    }
}

#[tokio::test]
async fn a_terminating_endpoint_is_used_until_one_of_a_served_family_is_ready() {
    let terminating = "conditions: {ready: false, serving: true, terminating: true}";
    let slices = format!(
        "{V4}endpoints: [{{addresses: [10.3.0.1], {terminating}}}]\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: web-6, namespace: shop, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv6\nports: [{{name: http, port: 8080}}]\n\
         endpoints: [{{addresses: [\"fd00::2\"]}}]\n"
    );
    for (ipv6, expected) in [(Ipv6::Drop, "+10.3.0.1:8080"), (Ipv6::Serve, "+[fd00::2]:8080")] {
        let config = Config {
            ipv6,
            ..Config::default()
        };
        let mesh = mesh_with(&sliced(PORTS, &slices), config).await;
        let mut stream = mesh.get("web.shop.svc.cluster.local:80").await.unwrap();
        assert_eq!(update_summary(&next(&mut stream).await), expected, "{ipv6:?}");
    }
}

#[tokio::test]
async fn only_ready_addresses_of_endpoints_objects_are_used() {
    let yaml = sliced(PORTS, &format!("{V4}endpoints: [{{addresses: [10.9.9.9]}}]"))
        + "---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: web, namespace: shop}\nsubsets:\n\
           - addresses: [{ip: 10.3.0.1, hostname: web-0}]\n  notReadyAddresses: [{ip: 10.3.0.2}]\n  \
           ports: [{name: http, port: 8080}]\n";
    let config = Config {
        endpoints_source: EndpointsSource::Endpoints,
        ..Config::default()
    };
    let mesh = mesh_with(&yaml, config).await;
    for path in ["web.shop.svc.cluster.local:80", "web-0.web.shop.svc.cluster.local:80"] {
        assert_eq!(
            update_summary(&next(&mut mesh.get(path).await.unwrap()).await),
            "+10.3.0.1:8080",
            "{path}"
        );
    }
    let other = mesh.get("web-1.web.shop.svc.cluster.local:80").await;
    assert_eq!(update_summary(&next(&mut other.unwrap()).await), "1");
}

#[tokio::test]
async fn an_address_is_resolved_to_its_pod_or_external_workload() {
    let hosted = |name: &str, ip: &str, phase: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, {MESHED}}}\n\
             spec: {{containers: [{{name: app, ports: [{{containerPort: 80, hostPort: 8080}}]}}]}}\n\
             status: {{podIP: {ip}, hostIP: 192.168.0.1, phase: {phase}}}\n"
        )
    };
    let vm = |name: &str, ip: &str, port: u16| {
        format!(
            "---\napiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
             metadata: {{name: {name}, namespace: shop}}\n\
             spec: {{meshTLS: {{identity: \"spiffe://root/{name}\", serverName: {name}.shop}}, ports: [{{port: {port}}}], \
             workloadIPs: [{{ip: {ip}}}]}}\n"
        )
    };
    let yaml = hosted("p1", "10.1.0.1", "Running")
        + &hosted("p2", "10.1.0.2", "Succeeded")
        + &hosted("p3", "10.1.0.3", "Pending")
        + &vm("vm", "10.2.0.1", 80)
        + &vm("twin-1", "10.2.0.2", 80)
        + &vm("twin-2", "10.2.0.2", 80)
        + &hosted("same-1", "10.1.0.9", "Running").replace("192.168.0.1", "192.168.0.9")
        + &hosted("same-2", "10.1.0.9", "Running").replace("192.168.0.1", "192.168.0.9");
    let mesh = mesh(&yaml.replace("hostIP: 192.168.0.1, phase: Pending", "phase: Pending")).await;
    let rows = [
        ("a pod by its address", "10.1.0.1:80", "10.1.0.1:80 pod=p1 h2"),
        ("a pod at a port it does not declare", "10.1.0.1:9", "pod=p1 h2"),
        (
            "a pod by its host's port",
            "192.168.0.1:8080",
            "192.168.0.1:8080 pod=p1 h2",
        ),
        (
            "a port of the host that no pod has",
            "192.168.0.1:80",
            "192.168.0.1:80 !pod !h2",
        ),
        ("a pod that has ended", "10.1.0.2:80", "10.1.0.2:80 !pod !h2 !tls"),
        ("a pod that does not run yet", "10.1.0.3:80", "10.1.0.3:80 pod=p3 h2"),
        (
            "an external workload",
            "10.2.0.1:80",
            "external_workload=vm h2 tls=spiffe://root/vm namespace=shop !zone_locality",
        ),
        (
            "two external workloads",
            "10.2.0.2:80",
            "external_workload=twin-1 tls=spiffe://root/twin-1",
        ),
        (
            "a port that it does not declare",
            "10.2.0.1:81",
            "10.2.0.1:81 !external_workload !tls",
        ),
        ("unknown address", "203.0.113.7:80", "203.0.113.7:80 !pod !namespace"),
    ];
    for (what, path, expected) in rows {
        check(what, &profile_words(&mesh, path).await, expected);
    }
    for ambiguous in ["10.1.0.9:80", "192.168.0.9:8080"] {
        let status = mesh.get_profile(ambiguous, "").await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{ambiguous}");
        assert!(status.message().contains("several"), "{status}");
    }
}
