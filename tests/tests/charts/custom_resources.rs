//! The custom resources: served versions, defaults and validation.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tulle_control::resources::{self, Kind, Object};
use tulle_tests::charts::{Helm, install_custom_resources};
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

/// Starts an API server with the definitions of the charts.
async fn start() -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    server
}

/// Applies an object with this `spec` and returns the stored object.
async fn apply(server: &ApiServer, api_version: &str, kind: &str, spec: &str) -> anyhow::Result<Value> {
    let version = api_version.rsplit('/').next().unwrap_or_default();
    let name = format!("{}-{version}.default.svc.cluster.local", kind.to_lowercase());
    let manifest = format!("apiVersion: {api_version}\nkind: {kind}\nmetadata:\n  name: {name}\nspec: {spec}\n");
    fs::write(server.dir().join("object.yaml"), manifest)?;
    let args = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--validate=strict",
        "-f",
        "object.yaml",
        "-o",
        "json",
    ];
    Ok(serde_json::from_str(&server.kubectl(&args).await?)?)
}

/// Applies an object and compares values of the stored object, each with its JSON pointer.
async fn assert_stored(server: &ApiServer, api_version: &str, kind: &str, spec: &str, expected: &[(&str, Value)]) {
    let stored = apply(server, api_version, kind, spec)
        .await
        .unwrap_or_else(|err| panic!("{api_version} {kind}: {err:#}"));
    for (pointer, value) in expected {
        assert_eq!(
            stored.pointer(pointer),
            Some(value),
            "{api_version} {kind} {pointer}: {stored:#}"
        );
    }
}

#[tokio::test]
async fn every_kind_is_stored_in_every_version_with_its_defaults() {
    let server = start().await;
    policies_are_stored(&server).await;
    routes_are_stored(&server).await;
    profiles_and_external_workloads_are_stored(&server).await;
}

async fn policies_are_stored(server: &ApiServer) {
    let unknown = ("/spec/proxyProtocol", json!("unknown"));
    let deny = ("/spec/accessPolicy", json!("deny"));
    let selector = "{podSelector: {matchLabels: {app: web}}, port: http}";
    for version in ["v1alpha1", "v1beta1", "v1beta2"] {
        assert_stored(
            server,
            &format!("policy.linkerd.io/{version}"),
            "Server",
            selector,
            std::slice::from_ref(&unknown),
        )
        .await;
    }
    assert_stored(
        server,
        "policy.linkerd.io/v1beta3",
        "Server",
        selector,
        &[unknown, deny],
    )
    .await;
    let external = "{externalWorkloadSelector: {matchExpressions: [{key: a, operator: In, values: [b]}]}, port: 80}";
    assert_stored(server, "policy.linkerd.io/v1beta3", "Server", external, &[]).await;
    for version in ["v1alpha1", "v1beta1"] {
        let spec = "{server: {name: web}, client: {networks: [{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}], \
                     meshTLS: {identities: ['*'], serviceAccounts: [{name: a, namespace: b}]}}}";
        assert_stored(
            server,
            &format!("policy.linkerd.io/{version}"),
            "ServerAuthorization",
            spec,
            &[],
        )
        .await;
    }
    for (kind, spec) in [
        (
            "AuthorizationPolicy",
            "{targetRef: {group: policy.linkerd.io, kind: Server, name: web}, \
             requiredAuthenticationRefs: [{kind: ServiceAccount, name: a, namespace: b}]}",
        ),
        ("MeshTLSAuthentication", "{identities: ['spiffe://mesh/web', '*.web']}"),
        (
            "NetworkAuthentication",
            "{networks: [{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}]}",
        ),
        (
            "HTTPLocalRateLimitPolicy",
            "{targetRef: {group: policy.linkerd.io, kind: Server, name: web}, total: {requestsPerSecond: 100}, \
             identity: {requestsPerSecond: 10}, \
             overrides: [{requestsPerSecond: 20, clientRefs: [{kind: ServiceAccount, name: a}]}]}",
        ),
        ("EgressNetwork", "{trafficPolicy: Deny}"),
    ] {
        assert_stored(server, "policy.linkerd.io/v1alpha1", kind, spec, &[]).await;
    }
}

async fn routes_are_stored(server: &ApiServer) {
    let route = "{parentRefs: [{name: web, kind: Server}], rules: [{backendRefs: [{name: web, port: 80}]}]}";
    let defaults = |group: &str| {
        [
            ("/spec/parentRefs/0/group", json!(group)),
            (
                "/spec/rules/0/matches",
                json!([{"path": {"type": "PathPrefix", "value": "/"}}]),
            ),
            (
                "/spec/rules/0/backendRefs/0",
                json!({"group": "", "kind": "Service", "name": "web", "port": 80, "weight": 1}),
            ),
        ]
    };
    for version in ["v1alpha1", "v1beta1", "v1beta2", "v1beta3"] {
        assert_stored(
            server,
            &format!("policy.linkerd.io/{version}"),
            "HTTPRoute",
            route,
            &defaults("policy.linkerd.io"),
        )
        .await;
    }
    let timeouts = "{rules: [{timeouts: {request: 10s, backendRequest: 500ms}}]}";
    assert_stored(server, "policy.linkerd.io/v1beta3", "HTTPRoute", timeouts, &[]).await;
    for version in ["v1beta1", "v1"] {
        let api_version = format!("gateway.networking.k8s.io/{version}");
        assert_stored(
            server,
            &api_version,
            "HTTPRoute",
            route,
            &defaults("gateway.networking.k8s.io"),
        )
        .await;
    }
    let weight = [("/spec/rules/0/backendRefs/0/weight", json!(1))];
    for version in ["v1alpha2", "v1"] {
        let spec = "{parentRefs: [{name: web, kind: Service, group: core, port: 80}], \
                     rules: [{matches: [{method: {service: a.B, method: C}}], backendRefs: [{name: web, port: 80}]}]}";
        assert_stored(
            server,
            &format!("gateway.networking.k8s.io/{version}"),
            "GRPCRoute",
            spec,
            &weight,
        )
        .await;
    }
    for (kind, version) in [
        ("TLSRoute", "v1alpha2"),
        ("TLSRoute", "v1alpha3"),
        ("TLSRoute", "v1"),
        ("TCPRoute", "v1alpha2"),
    ] {
        // Newer versions of TLSRoute require host names.
        let hostnames = match version {
            "v1alpha2" => "",
            _ => "hostnames: [a.b], ",
        };
        let spec = format!(
            "{{{hostnames}parentRefs: [{{name: web, kind: Service, group: core, port: 80}}], \
             rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}"
        );
        assert_stored(
            server,
            &format!("gateway.networking.k8s.io/{version}"),
            kind,
            &spec,
            &weight,
        )
        .await;
    }
}

async fn profiles_and_external_workloads_are_stored(server: &ApiServer) {
    let spec = "{routes: [{name: a, condition: {method: GET, pathRegex: /a, not: {method: PUT}}, isRetryable: true, timeout: 1s, \
                 responseClasses: [{condition: {status: {min: 500, max: 599}}, isFailure: true}]}]}";
    assert_stored(server, "linkerd.io/v1alpha1", "ServiceProfile", spec, &[]).await;
    let spec = "{retryBudget: {retryRatio: 0.2, minRetriesPerSecond: 10, ttl: 10s}, \
                 dstOverrides: [{authority: a.b, weight: 500m}, {authority: c.d, weight: 1}]}";
    assert_stored(server, "linkerd.io/v1alpha2", "ServiceProfile", spec, &[]).await;
    let tcp = [("/spec/ports/0/protocol", json!("TCP"))];
    let spec = "{meshTls: {identity: 'spiffe://mesh/vm', serverName: vm}, ports: [{port: 80}], workloadIPs: [{ip: 192.0.2.1}]}";
    assert_stored(server, "workload.linkerd.io/v1alpha1", "ExternalWorkload", spec, &tcp).await;
    let spec = "{meshTLS: {identity: 'spiffe://mesh/vm', serverName: vm}, ports: [{port: 80}], \
                 workloadIPs: [{ip: 192.0.2.1}, {ip: '2001:db8::1'}]}";
    assert_stored(server, "workload.linkerd.io/v1beta1", "ExternalWorkload", spec, &tcp).await;
}

/// There is no conversion between versions: the API server only changes the version of the object.
#[tokio::test]
async fn an_external_workload_written_in_either_version_is_valid_when_read_as_v1beta1() {
    let server = start().await;
    for (version, field) in [("v1alpha1", "meshTls"), ("v1beta1", "meshTLS")] {
        let spec = format!(
            "{{{field}: {{identity: 'spiffe://mesh/vm', serverName: vm}}, ports: [{{port: 80}}], workloadIPs: [{{ip: 192.0.2.1}}]}}"
        );
        let api_version = format!("workload.linkerd.io/{version}");
        let written = apply(&server, &api_version, "ExternalWorkload", &spec).await.unwrap();
        let name = written["metadata"]["name"].as_str().unwrap();
        let read = [
            "get",
            "externalworkloads.v1beta1.workload.linkerd.io",
            name,
            "-o",
            "json",
        ];
        let read: Value = serde_json::from_str(&server.kubectl(&read).await.unwrap()).unwrap();
        let Object::ExternalWorkload(workload) = resources::decode(Kind::ExternalWorkload, read).unwrap() else {
            panic!("an ExternalWorkload was decoded as another kind");
        };
        assert_eq!(
            (&*workload.identity, &*workload.server_name),
            ("spiffe://mesh/vm", "vm"),
            "{version}"
        );
        assert_eq!(
            workload.ips,
            ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()],
            "{version}"
        );
        // An object of either version has the fields that v1beta1 requires, so its status can be written as v1beta1.
        let status = r#"{"status":{"conditions":[{"type":"Ready","status":"True"}]}}"#;
        let patch = [
            "patch",
            "externalworkloads.v1beta1.workload.linkerd.io",
            name,
            "--subresource=status",
            "--type=merge",
            "-p",
            status,
        ];
        server.kubectl(&patch).await.unwrap();
    }
}

/// Values of `spec` that the API server refuses, each with a part of the refusal.
type RefusedSpecs = &'static [(&'static str, &'static str)];

/// API version, kind, and invalid values of `spec`.
const INVALID_SPECS: &[(&str, &str, RefusedSpecs)] = &[
    (
        "policy.linkerd.io/v1beta3",
        "Server",
        &[
            ("{podSelector: {}}", "spec.port: Required"),
            ("{port: 80}", "must validate one and only one schema (oneOf)"),
            (
                "{port: 80, podSelector: {}, externalWorkloadSelector: {}}",
                "must validate one and only one schema (oneOf)",
            ),
            ("{port: 80, podSelector: {}, protocol: TLS}", "spec.protocol"),
        ],
    ),
    (
        "policy.linkerd.io/v1alpha1",
        "MeshTLSAuthentication",
        &[
            ("{identities: []}", "spec.identities"),
            (
                "{identities: ['*'], identityRefs: [{kind: ServiceAccount, name: a}]}",
                "oneOf",
            ),
        ],
    ),
    (
        "policy.linkerd.io/v1alpha1",
        "EgressNetwork",
        &[("{trafficPolicy: Maybe}", "\"Allow\", \"Deny\"")],
    ),
    (
        "policy.linkerd.io/v1alpha1",
        "AuthorizationPolicy",
        &[("{requiredAuthenticationRefs: []}", "spec.targetRef")],
    ),
    (
        "policy.linkerd.io/v1beta3",
        "HTTPRoute",
        &[
            ("{parentRefs: [{name: a, port: 0}]}", "spec.parentRefs[0].port"),
            (
                "{rules: [{filters: [{type: URLRewrite}]}]}",
                "spec.rules[0].filters[0].type",
            ),
        ],
    ),
    (
        "policy.linkerd.io/v1beta2",
        "HTTPRoute",
        &[("{rules: [{timeouts: {request: 1s}}]}", "timeouts")],
    ),
    (
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        &[("{rules: [{backendRefs: [{name: a, weight: -1}]}]}", "weight")],
    ),
    (
        "workload.linkerd.io/v1beta1",
        "ExternalWorkload",
        &[
            (
                "{meshTLS: {identity: a, serverName: a}, workloadIPs: [{ip: a}, {ip: b}, {ip: c}]}",
                "must have at most 2 items",
            ),
            ("{meshTLS: {identity: '', serverName: a}}", "spec.meshTLS.identity"),
            (
                "{meshTLS: {identity: a, serverName: a}, ports: [{port: 65536}]}",
                "spec.ports[0].port",
            ),
        ],
    ),
    (
        "linkerd.io/v1alpha2",
        "ServiceProfile",
        &[("{routes: [{name: a}]}", "spec.routes[0].condition")],
    ),
];

#[tokio::test]
async fn invalid_specs_are_refused_with_the_invalid_field() {
    let server = start().await;
    let check = async |api_version: &str, kind: &str, spec: &str, expected: &str| {
        let refusal = apply(&server, api_version, kind, spec).await.unwrap_err();
        let refusal = format!("{refusal:#}");
        assert!(refusal.contains(expected), "{kind} {spec}: {refusal}");
    };
    for &(api_version, kind, specs) in INVALID_SPECS {
        for &(spec, expected) in specs {
            check(api_version, kind, spec, expected).await;
        }
    }
    let names = format!("{{hostnames: [{}]}}", vec!["a.b"; 17].join(", "));
    let too_many = "must have at most 16 items";
    check("policy.linkerd.io/v1beta3", "HTTPRoute", &names, too_many).await;
    check("gateway.networking.k8s.io/v1", "HTTPRoute", &names, "spec.hostnames").await;
}

/// Versions of Link, the oldest first.
const LINK_VERSIONS: [&str; 3] = ["v1alpha1", "v1alpha2", "v1alpha3"];

/// Starts an API server with the definition of Link, which is part of the multicluster extension.
async fn start_with_links() -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    let only_links = ["--show-only=templates/link.yaml"];
    let definition = Helm::new()
        .unwrap()
        .template("tulle-multicluster", &only_links)
        .unwrap();
    fs::write(server.dir().join("link.yaml"), definition).unwrap();
    let args = ["apply", "--server-side", "-f", "link.yaml"];
    server.kubectl(&args).await.unwrap();
    server.wait_for_custom_resources().await.unwrap();
    server
}

#[tokio::test]
async fn a_link_of_any_version_is_served_in_all_versions_and_stored_as_v1alpha3() {
    let server = start_with_links().await;
    let fields = "{targetClusterName: east, gatewayAddress: 192.0.2.1, gatewayPort: '4143', gatewayIdentity: gateway.east, \
                  selector: {matchLabels: {a: b}}, \
                  remoteDiscoverySelector: {matchExpressions: [{key: a, operator: In, values: [b]}]}}";
    for version in LINK_VERSIONS {
        let api_version = format!("multicluster.linkerd.io/{version}");
        let written = apply(&server, &api_version, "Link", fields).await.unwrap();
        let name = written["metadata"]["name"].as_str().unwrap();
        for served in LINK_VERSIONS {
            let resource = format!("links.{served}.multicluster.linkerd.io");
            let read = server.kubectl(&["get", &resource, name, "-o", "json"]).await.unwrap();
            let read: Value = serde_json::from_str(&read).unwrap();
            assert_eq!(read["apiVersion"], format!("multicluster.linkerd.io/{served}"));
            assert_eq!(read["spec"], written["spec"], "{version} read as {served}");
        }
    }
    let definition = ["get", "crd", "links.multicluster.linkerd.io", "-o", "json"];
    let definition: Value = serde_json::from_str(&server.kubectl(&definition).await.unwrap()).unwrap();
    assert_eq!(definition["status"]["storedVersions"], json!(["v1alpha3"]));
}

#[tokio::test]
async fn a_probe_of_a_link_has_defaults_only_if_the_link_has_a_probe() {
    let server = start_with_links().await;
    let probe = |probe: Value| json!({"targetClusterName": "east", "probeSpec": probe});
    let cases = [
        ("{targetClusterName: east}", json!({"targetClusterName": "east"})),
        (
            "{targetClusterName: east, probeSpec: {}}",
            probe(json!({"timeout": "30s", "failureThreshold": "3"})),
        ),
        (
            "{targetClusterName: east, probeSpec: {path: /ready, port: '4191', period: 3s, timeout: 1s}}",
            probe(json!({"path": "/ready", "port": "4191", "period": "3s", "timeout": "1s", "failureThreshold": "3"})),
        ),
    ];
    for version in LINK_VERSIONS {
        let api_version = format!("multicluster.linkerd.io/{version}");
        for (spec, expected) in &cases {
            let expected = [("/spec", expected.clone())];
            assert_stored(&server, &api_version, "Link", spec, &expected).await;
        }
    }
}

/// Values of `spec` that Linkerd's commands write, all with the name `east`.
const LINKERD_LINKS: [&str; 4] = [
    "{targetClusterName: east, probeSpec: {}, selector: {}, remoteDiscoverySelector: {matchLabels: {a: b}}}",
    // Version 2.17 and before, with a gateway.
    "{targetClusterName: east, targetClusterDomain: east.test, targetClusterLinkerdNamespace: linkerd, \
      clusterCredentialsSecret: cluster-credentials-east, gatewayAddress: '192.0.2.1,gateway.test', gatewayPort: '4143', \
      gatewayIdentity: gateway.east, selector: {matchLabels: {a: b}}, \
      probeSpec: {failureThreshold: '3', path: /ready, port: '4191', period: 3s, timeout: 30s}}",
    // The same versions, with `--gateway=false`.
    "{targetClusterName: east, targetClusterDomain: east.test, targetClusterLinkerdNamespace: linkerd, \
      clusterCredentialsSecret: cluster-credentials-east, gatewayAddress: '', gatewayPort: '0', gatewayIdentity: '', \
      selector: {}, remoteDiscoverySelector: {}, \
      probeSpec: {failureThreshold: '0', path: '', port: '0', period: 0s, timeout: 0s}}",
    // A period of several minutes, as Go prints it.
    "{targetClusterName: east, probeSpec: {path: /ready, port: '4191', period: 1h10m0.5s, timeout: 1m30s}}",
];

/// Values of `spec` that cannot work, each with a part of the refusal.
const INVALID_LINKS: [(&str, &str); 17] = [
    ("{targetClusterName: ''}", "must be a DNS label"),
    ("{targetClusterName: East}", "must be a DNS label"),
    ("{targetClusterName: 'a,b'}", "must be a DNS label"),
    ("{targetClusterName: a-}", "must be a DNS label"),
    ("{gatewayAddress: a, gatewayIdentity: a}", "gatewayPort of a Link"),
    (
        "{gatewayAddress: a, gatewayPort: http, gatewayIdentity: a}",
        "gatewayPort of a Link",
    ),
    (
        "{gatewayAddress: a, gatewayPort: '0', gatewayIdentity: a}",
        "gatewayPort of a Link",
    ),
    (
        "{gatewayAddress: a, gatewayPort: '65536', gatewayIdentity: a}",
        "gatewayPort of a Link",
    ),
    ("{gatewayAddress: a, gatewayPort: '4143'}", "gatewayIdentity of a Link"),
    ("{probeSpec: {path: /ready}}", "port of a probe"),
    ("{probeSpec: {path: /ready, port: http}}", "port of a probe"),
    (
        "{probeSpec: {path: /ready, port: '1', period: 0s}}",
        "period of a probe",
    ),
    (
        "{probeSpec: {path: /ready, port: '1', timeout: soon}}",
        "timeout of a probe",
    ),
    (
        "{probeSpec: {path: /ready, port: '1', timeout: 0ms}}",
        "timeout of a probe",
    ),
    (
        "{probeSpec: {path: /ready, port: '1', failureThreshold: '-1'}}",
        "failureThreshold of a probe",
    ),
    (
        "{selector: {matchExpressions: [{key: a, operator: In}]}}",
        "In and NotIn need values",
    ),
    (
        "{remoteDiscoverySelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}",
        "Exists and DoesNotExist have none",
    ),
];

#[tokio::test]
async fn links_of_linkerds_commands_are_accepted_and_links_that_cannot_work_are_refused() {
    let server = start_with_links().await;
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/recorded/multicluster/link-gen.yaml");
    for namespace in ["linkerd-multicluster", "linkerd"] {
        server.create_namespace(namespace).await.unwrap();
    }
    let args = ["apply", "--server-side", "-f", recorded.to_str().unwrap()];
    server.kubectl(&args).await.unwrap();
    for version in LINK_VERSIONS {
        let api_version = format!("multicluster.linkerd.io/{version}");
        for spec in LINKERD_LINKS {
            let name = [("/spec/targetClusterName", json!("east"))];
            assert_stored(&server, &api_version, "Link", spec, &name).await;
            // The next specification gets a new Link. Applied to this one, it would set an empty selector that it lacks to null,
            // which is invalid.
            server
                .kubectl(&["delete", "links.multicluster.linkerd.io", "--all"])
                .await
                .unwrap();
        }
        for (spec, expected) in INVALID_LINKS {
            let refusal = apply(&server, &api_version, "Link", spec).await.unwrap_err();
            let refusal = format!("{refusal:#}");
            assert!(refusal.contains(expected), "{version} {spec}: {refusal}");
        }
    }
    invalid_links_from_before_the_rules_can_be_changed(&server).await;
}

/// The definition of Link without its rules, as an earlier version of the chart had it.
fn without_rules(definition: &Value) -> Value {
    match definition {
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(name, _)| !LINK_RULES.contains(&name.as_str()));
            kept.map(|(name, value)| (name.clone(), without_rules(value))).collect()
        }
        Value::Array(items) => items.iter().map(without_rules).collect(),
        other => other.clone(),
    }
}

/// The fields of a schema that only refuse values.
const LINK_RULES: [&str; 4] = ["x-kubernetes-validations", "maxLength", "minLength", "maxItems"];

/// Stores a Link with a definition without rules. Its status and metadata can still be changed when the definition has rules.
async fn invalid_links_from_before_the_rules_can_be_changed(server: &ApiServer) {
    let text = fs::read_to_string(server.dir().join("link.yaml")).unwrap();
    let definition: Value = serde_yaml_ng::from_str(&text).unwrap();
    fs::write(server.dir().join("before.json"), without_rules(&definition).to_string()).unwrap();
    let args = ["apply", "--server-side", "-f", "before.json"];
    server.kubectl(&args).await.unwrap();
    let invalid = "{targetClusterName: East, gatewayAddress: a, gatewayPort: http, probeSpec: {path: /ready}}";
    // The API server uses a changed definition a moment later.
    let stored = eventually("the rules are gone", async || {
        let version = "multicluster.linkerd.io/v1alpha3";
        apply(server, version, "Link", invalid).await.ok()
    })
    .await;
    let name = stored["metadata"]["name"].as_str().unwrap();
    let args = ["apply", "--server-side", "-f", "link.yaml"];
    server.kubectl(&args).await.unwrap();
    let mut n = 0;
    eventually("the rules apply", async || {
        // Another Link, with another value each time: a value that is stored already is accepted.
        n += 1;
        let spec = format!("{{targetClusterName: W{n}}}");
        let version = "multicluster.linkerd.io/v1alpha1";
        let refusal = apply(server, version, "Link", &spec).await.err()?;
        format!("{refusal:#}").contains("must be a DNS label").then_some(())
    })
    .await;
    let resource = "links.v1alpha3.multicluster.linkerd.io";
    let status = r#"{"status":{"mirrorServices":[],"federatedServices":[]}}"#;
    let args = [
        "patch",
        resource,
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        status,
    ];
    server.kubectl(&args).await.unwrap();
    server.kubectl(&["label", resource, name, "a=b"]).await.unwrap();
}

#[tokio::test]
async fn a_selector_of_a_link_without_operator_or_with_an_unknown_one_is_refused() {
    let server = start_with_links().await;
    for version in LINK_VERSIONS {
        let api_version = format!("multicluster.linkerd.io/{version}");
        for field in ["selector", "remoteDiscoverySelector", "federatedServiceSelector"] {
            if (version, field) == ("v1alpha1", "federatedServiceSelector") {
                continue;
            }
            let operator = format!("spec.{field}.matchExpressions[0].operator");
            let cases = [
                ("{key: a}", format!("{operator}: Required")),
                (
                    "{key: a, operator: Foo}",
                    format!("{operator}: Unsupported value: \"Foo\""),
                ),
            ];
            for (expression, expected) in cases {
                let spec = format!("{{{field}: {{matchExpressions: [{expression}]}}}}");
                let refusal = apply(&server, &api_version, "Link", &spec).await.unwrap_err();
                let refusal = format!("{refusal:#}");
                assert!(refusal.contains(&expected), "{version} {spec}: {refusal}");
            }
        }
    }
}

/// The policies of the demo are written for a directory; an API server accepts the same files.
#[tokio::test]
async fn the_policies_of_the_demo_are_accepted_without_changes() {
    let server = start().await;
    server.create_namespace("demo").await.unwrap();
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/policy.yaml");
    let args = [
        "apply",
        "--server-side",
        "--validate=strict",
        "-f",
        policies.to_str().unwrap(),
    ];
    let accepted = server.kubectl(&args).await.unwrap();
    assert!(accepted.contains("serverside-applied"), "{accepted}");
}
