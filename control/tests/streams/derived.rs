//! Tables of the destination service for a directory of manifests: endpoints derived from workloads, and changes of objects.

use tulle_control::resources::service::EndpointsSource;

use crate::destination_rows::{
    CONTAINER, MESHED, PORTS, TOKEN_ON_NODE_A, V4, added_words, check, pod, profile_words, sliced,
};
use crate::harness::{eventually, mesh, next, update_summary};
use crate::mirror_rows::{MIRROR, mirror};

#[tokio::test]
async fn endpoints_and_server_policies_agree_on_opaque_ports() {
    use tulle_proto::inbound::proxy_protocol::Kind;

    let server = |name: &str, age: u8, protocol: &str| {
        format!(
            "---\napiVersion: policy.linkerd.io/v1beta3\nkind: Server\n\
             metadata: {{name: {name}, namespace: shop, creationTimestamp: \"2024-01-0{age}T00:00:00Z\"}}\n\
             spec: {{podSelector: {{}}, port: 5000{protocol}}}\n"
        )
    };
    let (opaque, http) = (", proxyProtocol: opaque", ", proxyProtocol: HTTP/1");
    let row = async |list: Option<&str>, servers: &[String], expected: bool| {
        let annotations = list.map_or_else(String::new, |list| {
            format!(", annotations: {{config.linkerd.io/opaque-ports: \"{list}\"}}")
        });
        let pod = pod("p", "10.1.0.1", &format!("{MESHED}{annotations}"), CONTAINER);
        let mesh = mesh(&format!("{pod}{}", servers.concat())).await;
        let words = profile_words(&mesh, "10.1.0.1:5000").await;
        let policy = mesh.get_port(r#"{"ns":"shop","pod":"p"}"#, 5000).await.unwrap();
        let is_opaque = matches!(policy.protocol.unwrap().kind, Some(Kind::Opaque(_)));
        assert_eq!(is_opaque, expected, "the policy of {list:?} {servers:?}");
        let hinted = words.iter().any(|word| word == "opaque");
        assert_eq!(hinted, expected, "the endpoint of {list:?} {servers:?}");
    };
    for list in ["data,9000", "data,", ",5000", " data , 80", "4000 - 6000", "90O0,data"] {
        row(Some(list), &[], true).await;
    }
    for list in ["", ",", "9000,", "dat", "50O0"] {
        row(Some(list), &[], false).await;
    }
    // The oldest of two Servers decides. Annotations apply to ports without a Server.
    row(None, &[server("a", 1, opaque), server("b", 2, http)], true).await;
    row(None, &[server("a", 2, opaque), server("b", 1, http)], false).await;
    row(None, &[server("a", 1, opaque), server("b", 1, http)], true).await;
    row(Some("data"), &[server("a", 1, http)], false).await;
}

#[tokio::test]
async fn a_client_whose_node_changes_zone_gets_new_endpoints() {
    let hinted = "{addresses: [10.3.0.1], zone: a, hints: {forZones: [{name: a}]}}, \
        {addresses: [10.3.0.2], zone: b, hints: {forZones: [{name: b}]}}";
    let mesh = mesh(&sliced(PORTS, &format!("{V4}endpoints: [{hinted}]"))).await;
    let mut stream = mesh
        .get_from("web.shop.svc.cluster.local:80", TOKEN_ON_NODE_A)
        .await
        .unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "+10.3.0.1:8080");
    let moved = "apiVersion: v1\nkind: Node\nmetadata: {name: node-a, labels: {topology.kubernetes.io/zone: b}}\n";
    let yaml = sliced(PORTS, &format!("{V4}endpoints: [{hinted}]"));
    let others = yaml.replace("name: node-a, labels: {topology.kubernetes.io/zone: a}", "name: node-z");
    mesh.manifests.write("mesh.yaml", &format!("{others}---\n{moved}"));
    let update = next(&mut stream).await;
    assert_eq!(update_summary(&update), "+10.3.0.2:8080");
    check("in its zone", &added_words(update)[0], "zone_locality=local");
    assert_eq!(update_summary(&next(&mut stream).await), "-10.3.0.1:8080");
}

#[tokio::test]
async fn an_external_workload_with_an_address_in_use_is_not_served() {
    let workload = |ip: &str| {
        format!(
            "---\napiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
             metadata: {{name: vm, namespace: evil, labels: {{app: vm}}}}\n\
             spec: {{meshTLS: {{identity: vm.evil, serverName: vm.evil}}, ports: [{{port: 80}}], workloadIPs: [{{ip: {ip}}}]}}\n\
             ---\napiVersion: v1\nkind: Service\nmetadata: {{name: vm, namespace: evil}}\n\
             spec: {{clusterIP: 10.247.0.66, selector: {{app: vm}}, ports: [{{port: 80}}]}}\n"
        )
    };
    let others = format!(
        "{}---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\n\
         spec: {{clusterIP: 10.247.0.10, ports: [{{port: 80}}]}}\n{}",
        pod("p", "10.1.0.1", MESHED, CONTAINER),
        pod(
            "host",
            "10.9.0.1",
            "labels: {}",
            "hostNetwork: true, containers: [{name: a, ports: [{containerPort: 81}]}]"
        ),
    );
    for (ip, is_served) in [
        ("10.1.0.1", false),
        ("10.247.0.10", false),
        ("10.9.0.1", false),
        ("10.2.0.1", true),
    ] {
        let mesh = mesh(&format!("{others}{}", workload(ip))).await;
        let update = next(&mut mesh.get("vm.evil.svc.cluster.local:80").await.unwrap()).await;
        let expected = if is_served { format!("+{ip}:80") } else { "1".to_owned() };
        assert_eq!(update_summary(&update), expected, "{ip}");
        let identity = mesh
            .first_profile(&format!("{ip}:80"))
            .await
            .endpoint
            .and_then(|endpoint| endpoint.tls_identity);
        let has_its_identity = format!("{identity:?}").contains("vm.evil");
        assert_eq!(has_its_identity, is_served, "{ip}: {identity:?}");
    }
}

#[tokio::test]
async fn the_oldest_external_workload_of_an_address_is_served() {
    let workload = |namespace: &str, name: &str, day: u8, port: u16| {
        format!(
            "---\napiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
             metadata: {{name: {name}, namespace: {namespace}, labels: {{app: vm}}, \
             creationTimestamp: '2026-01-0{day}T00:00:00Z'}}\n\
             spec: {{meshTLS: {{identity: {name}.{namespace}, serverName: {name}.{namespace}}}, \
             ports: [{{port: {port}}}], workloadIPs: [{{ip: 10.2.0.1}}]}}\n"
        )
    };
    let service = "---\napiVersion: v1\nkind: Service\nmetadata: {name: vm, namespace: evil}\n\
         spec: {clusterIP: 10.247.0.66, selector: {app: vm}, ports: [{port: 80}]}\n";
    let row = async |workloads: &[String], port: u16, expected: Option<&str>| {
        let mesh = mesh(&workloads.concat()).await;
        let profile = mesh.first_profile(&format!("10.2.0.1:{port}")).await;
        let identity = profile.endpoint.and_then(|endpoint| endpoint.tls_identity);
        let identity = format!("{identity:?}");
        let is_expected = expected.map_or(identity == "None", |name| identity.contains(&format!("\"{name}\"")));
        assert!(is_expected, "{workloads:?} {port}: {identity}");
    };
    let (old, young) = (workload("shop", "db", 1, 80), workload("evil", "vm", 2, 80));
    row(&[young.clone(), old.clone()], 80, Some("db.shop")).await;
    row(
        &[workload("evil", "vm", 1, 80), workload("shop", "db", 1, 80)],
        80,
        Some("vm.evil"),
    )
    .await;
    // A workload of another namespace gets no port of the address; one of the same namespace gets the remaining ports.
    row(&[old.clone(), workload("evil", "vm", 2, 90)], 90, None).await;
    row(&[old.clone(), workload("shop", "web", 2, 90)], 90, Some("web.shop")).await;
    row(&[old.clone(), workload("shop", "web", 2, 80)], 80, Some("db.shop")).await;
    let mesh = mesh(&[old, young, service.to_owned()].concat()).await;
    let update = next(&mut mesh.get("vm.evil.svc.cluster.local:80").await.unwrap()).await;
    assert_eq!(update_summary(&update), "1");
}

#[tokio::test]
async fn ports_and_readiness_from_a_directory_match_a_cluster() {
    let service = |more: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\n\
             spec: {{clusterIP: 10.247.0.10, selector: {{app: web}}, ports: [{{port: 80, targetPort: http}}]{more}}}\n"
        )
    };
    let port =
        |container: &str, port: u16| format!("{{name: {container}, ports: [{{name: http, containerPort: {port}}}]}}");
    let sidecar = |number: u16| format!("{{restartPolicy: Always, {}", port("s", number).trim_start_matches('{'));
    let row = async |spec: String, service: String, ready: &str, expected: &str| {
        let manifest = pod("p", "10.1.0.1", "labels: {app: web}", &spec).replace(
            "phase: Running",
            &format!("phase: Running, conditions: [{{type: Ready, status: '{ready}'}}]"),
        );
        let mesh = mesh(&format!("{manifest}{service}")).await;
        let update = next(&mut mesh.get("web.shop.svc.cluster.local:80").await.unwrap()).await;
        assert_eq!(update_summary(&update), expected, "{spec}");
    };
    let containers = |all: &[String]| format!("containers: [{}]", all.join(", "));
    row(
        containers(&[port("a", 9000), port("b", 8000)]),
        service(""),
        "True",
        "+10.1.0.1:9000",
    )
    .await;
    let with_setup = format!(
        "initContainers: [{}], {}",
        port("i", 7000),
        containers(&[port("a", 9000)])
    );
    row(with_setup, service(""), "True", "+10.1.0.1:9000").await;
    let with_sidecar = format!(
        "initContainers: [{}], {}",
        sidecar(7000),
        containers(&[port("a", 9000)])
    );
    row(with_sidecar, service(""), "True", "+10.1.0.1:9000").await;
    let only_sidecar = format!(
        "initContainers: [{}, {}], containers: [{{name: a}}]",
        port("i", 6000),
        sidecar(7000)
    );
    row(only_sidecar, service(""), "True", "+10.1.0.1:7000").await;
    let one = containers(&[port("a", 9000)]);
    row(one.clone(), service(""), "False", "1").await;
    row(
        one,
        service(", publishNotReadyAddresses: true"),
        "False",
        "+10.1.0.1:9000",
    )
    .await;
}

/// Mirrors have Endpoints. In a cluster, a controller of Kubernetes derives slices from them.
#[tokio::test]
async fn slices_derived_from_the_endpoints_of_a_mirror_lead_to_its_gateway() {
    let manifests = |identity: &str, service: &str, is_ready: bool| {
        let annotations = format!(
            "mirror.linkerd.io/remote-gateway-identity: {identity}, \
             mirror.linkerd.io/remote-svc-fq-name: {service}.shop.svc.east.test"
        );
        mirror(EndpointsSource::Endpoints, &annotations, "203.0.113.9", is_ready)
    };
    let mesh = mesh(&manifests("gateway.a", "web", true)).await;
    let mut stream = mesh.get(MIRROR).await.unwrap();
    // A change of the identity or of the name sends the address again.
    for (identity, service) in [("gateway.a", "web"), ("gateway.b", "web"), ("gateway.b", "api")] {
        mesh.manifests.write("mesh.yaml", &manifests(identity, service, true));
        let words = added_words(next(&mut stream).await);
        let expected = format!(
            "203.0.113.9:4143 h2 tls={identity} authority={service}.shop.svc.east.test:80 target_cluster=east \
             target_service={service} target_service_namespace=shop"
        );
        check("a mirror", &words[0], &expected);
    }
    mesh.manifests.write("mesh.yaml", &manifests("gateway.b", "api", false));
    assert_eq!(update_summary(&next(&mut stream).await), "-203.0.113.9:4143");
    assert_eq!(update_summary(&next(&mut stream).await), "1");
    mesh.manifests.write("mesh.yaml", &manifests("gateway.b", "api", true));
    assert_eq!(update_summary(&next(&mut stream).await), "+203.0.113.9:4143");
}

#[tokio::test]
async fn unserved_fields_are_counted_until_they_are_fixed() {
    let pod = |annotation: &str| {
        pod(
            "p",
            "10.1.0.1",
            &format!("{MESHED}, annotations: {{{annotation}}}"),
            CONTAINER,
        )
    };
    let service = |annotation: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop, annotations: {{{annotation}}}}}\n\
             spec: {{clusterIP: 10.247.0.10, ports: [{{name: http, port: 80, appProtocol: http}}]}}\n"
        )
    };
    let route = "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\n\
        spec: {parentRefs: [{group: '', kind: Service, name: web}], rules: [{filters: [{type: ExtensionRef}]}]}\n";
    let slice = |name: &str, labels: &str, kind: &str| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {name}, namespace: shop, labels: {{{labels}}}}}\n\
             addressType: {kind}\nendpoints: [{{addresses: [10.9.0.1]}}]\n"
        )
    };
    let bad = [
        slice("no-service", "", "IPv4"),
        slice("names", "kubernetes.io/service-name: web", "FQDN"),
        pod("config.linkerd.io/default-inbound-policy: Deny, config.linkerd.io/opaque-ports: 'data,dat'"),
        service(
            "retry.linkerd.io/http: sometimes, timeout.linkerd.io/idle: soon, config.linkerd.io/opaque-ports: 'http,', \
             balancer.alpha.linkerd.io/load-biaser-penalty: 1s",
        ),
        route.to_owned(),
    ];
    let mesh = mesh(&bad.concat()).await;
    let counted = |mesh: &crate::harness::Mesh| {
        let page = mesh.registry.render();
        let lines = page
            .lines()
            .filter(|line| line.starts_with("unserved_configuration{") && !line.ends_with(" 0"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let line = |kind: &str, name: &str, field: &str| {
        format!("unserved_configuration{{kind=\"{kind}\",namespace=\"shop\",name=\"{name}\",field=\"{field}\"}} 1")
    };
    let mut expected = [
        line("EndpointSlice", "no-service", "metadata.labels"),
        line("EndpointSlice", "names", "addressType"),
        line("HTTPRoute", "r", "spec.rules"),
        line("Pod", "p", "config.linkerd.io/default-inbound-policy"),
        line("Pod", "p", "config.linkerd.io/opaque-ports"),
        line("Service", "web", "balancer.alpha.linkerd.io/load-biaser-penalty"),
        line("Service", "web", "retry.linkerd.io/http"),
        line("Service", "web", "spec.ports"),
        line("Service", "web", "timeout.linkerd.io/idle"),
    ];
    expected.sort();
    let mut found = counted(&mesh);
    found.sort();
    assert_eq!(found, expected);
    mesh.manifests.write(
        "mesh.yaml",
        &[pod("config.linkerd.io/opaque-ports: 'data'"), service("")].concat(),
    );
    eventually(|| counted(&mesh).is_empty()).await;
}

#[tokio::test]
async fn servers_without_effect_are_counted_with_the_effective_one() {
    let server = |name: &str, day: u8, port: u16| {
        format!(
            "---\napiVersion: policy.linkerd.io/v1beta3\nkind: Server\n\
             metadata: {{name: {name}, namespace: shop, creationTimestamp: \"2024-01-0{day}T00:00:00Z\"}}\n\
             spec: {{podSelector: {{}}, port: {port}}}\n"
        )
    };
    let pod = pod("p", "10.1.0.1", MESHED, CONTAINER);
    let mesh = mesh(&pod).await;
    let mut stream = mesh.watch_port(r#"{"ns":"shop","pod":"p"}"#, 5000).await.unwrap();
    assert_eq!(next(&mut stream).await.labels["name"], "all-unauthenticated");
    let counted = || {
        let page = mesh.registry.render();
        let lines = page
            .lines()
            .filter_map(|line| line.strip_prefix("tulle_overridden_servers"));
        lines
            .filter(|line| line.ends_with(" 1"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let line = |name: &str, by: &str| format!("{{namespace=\"shop\",name=\"{name}\",by=\"{by}\"}} 1");
    let (a, b) = (server("a", 2, 5000), server("b", 1, 5000));
    mesh.manifests
        .write("mesh.yaml", &format!("{pod}{a}{b}{}", server("c", 3, 5001)));
    assert_eq!(next(&mut stream).await.labels["name"], "b");
    eventually(|| counted() == [line("a", "b")]).await;
    // Of Servers with the same age, the first by name decides.
    mesh.manifests
        .write("mesh.yaml", &format!("{pod}{}{}", server("a", 1, 5000), b));
    assert_eq!(next(&mut stream).await.labels["name"], "a");
    eventually(|| counted() == [line("b", "a")]).await;
    mesh.manifests.write("mesh.yaml", &format!("{pod}{b}"));
    assert_eq!(next(&mut stream).await.labels["name"], "b");
    eventually(|| counted().is_empty()).await;
}

#[tokio::test]
async fn authorizations_of_missing_objects_are_counted_until_the_objects_exist() {
    let object = |kind: &str, version: &str, name: &str, spec: &str| {
        format!(
            "---\napiVersion: policy.linkerd.io/{version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n"
        )
    };
    let policy = object(
        "AuthorizationPolicy",
        "v1alpha1",
        "p",
        "{targetRef: {group: policy.linkerd.io, kind: Server, name: web}, \
          requiredAuthenticationRefs: [{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: clients}]}",
    );
    let server = object("Server", "v1beta3", "web", "{podSelector: {}, port: 80}");
    let clients = object("MeshTLSAuthentication", "v1alpha1", "clients", "{identities: ['*']}");
    let mesh = mesh(&policy).await;
    let counted = |field: &str| {
        let line = format!(
            "unserved_configuration{{kind=\"AuthorizationPolicy\",namespace=\"shop\",name=\"p\",field=\"{field}\"}} 1"
        );
        mesh.registry.render().contains(&line)
    };
    assert!(counted("spec.targetRef") && counted("spec.requiredAuthenticationRefs"));
    mesh.manifests.write("server.yaml", &server);
    eventually(|| !counted("spec.targetRef")).await;
    assert!(counted("spec.requiredAuthenticationRefs"));
    mesh.manifests.write("clients.yaml", &clients);
    eventually(|| !counted("spec.requiredAuthenticationRefs")).await;
}
