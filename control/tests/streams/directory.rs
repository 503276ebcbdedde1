//! Tests of manifest files that change, become invalid, move, or are deleted.

use std::os::unix::fs::symlink;

use tulle_control::resources::{KINDS, Kind};

use crate::harness::{Mesh, eventually, mesh, next, update_summary};

fn service(name: &str, pods: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{clusterIP: None, selector: {{app: {pods}}}, ports: [{{port: 80}}]}}\n"
    )
}

fn pod(name: &str, ip: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: web}}}}\n\
         spec: {{containers: []}}\nstatus: {{podIP: {ip}}}\n"
    )
}

const WEB: &str = "web.default.svc.cluster.local:80";

async fn endpoints(mesh: &Mesh) -> String {
    update_summary(&next(&mut mesh.get(WEB).await.unwrap()).await)
}

/// Returns the reported errors, without the path of the directory.
fn errors(mesh: &Mesh) -> Vec<String> {
    let dir = format!("{}/", mesh.manifests.path().display());
    mesh.errors().iter().map(|error| error.replace(&dir, "")).collect()
}

#[tokio::test]
async fn an_invalid_file_keeps_its_last_valid_objects_and_is_reported_until_fixed() {
    let mesh = mesh("").await;
    let good = format!("{}{}", service("web", "web"), pod("web-1", "10.1.0.1"));
    mesh.manifests.write("web.yaml", &good);
    eventually(|| mesh.registry.render().contains("pod_cache_size{cluster=\"local\"} 1")).await;
    mesh.manifests.write("web.yaml", &good.replace("10.1.0.1", "10.1.0"));
    eventually(|| !mesh.errors().is_empty()).await;
    assert_eq!(errors(&mesh).len(), 1);
    assert!(errors(&mesh)[0].starts_with("web.yaml:6: "), "{:?}", errors(&mesh));
    assert!(
        errors(&mesh)[0].contains("\"10.1.0\" is not an IP address"),
        "{:?}",
        errors(&mesh)
    );
    assert!(mesh.registry.render().contains("manifest_errors 1"));
    assert_eq!(endpoints(&mesh).await, "+10.1.0.1:80");
    mesh.manifests.write("web.yaml", &good.replace("10.1.0.1", "10.1.0.2"));
    eventually(|| mesh.errors().is_empty()).await;
    assert!(mesh.registry.render().contains("manifest_errors 0"));
    assert_eq!(endpoints(&mesh).await, "+10.1.0.2:80");
}

#[tokio::test]
async fn kinds_without_objects_are_counted_too() {
    let mesh = mesh(&service("web", "web")).await;
    let page = mesh.registry.render();
    for info in KINDS {
        // A Service without Endpoints gets an object of this kind.
        let n = i32::from(matches!(info.kind, Kind::Service | Kind::Endpoints));
        let line = format!("{}_cache_size{{cluster=\"local\"}} {n}", info.metric_prefix);
        assert!(page.lines().any(|other| other == line), "{line}");
    }
}

#[tokio::test]
async fn a_file_that_was_never_valid_does_not_affect_other_files() {
    let mesh = mesh(&format!("{}{}", service("web", "web"), pod("web-1", "10.1.0.1"))).await;
    mesh.manifests.write("broken.yml", "kind: [");
    eventually(|| mesh.errors().len() == 1).await;
    assert_eq!(endpoints(&mesh).await, "+10.1.0.1:80");
}

#[tokio::test]
async fn files_in_subdirectories_are_read_and_deleting_them_deletes_their_objects() {
    let mesh = mesh(&service("web", "web")).await;
    let mut stream = mesh.get(WEB).await.unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "1");
    std::fs::create_dir_all(mesh.manifests.path().join("a/b")).unwrap();
    std::fs::write(mesh.manifests.path().join("a/b/pods.yaml"), pod("web-1", "10.1.0.1")).unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.1:80");
    std::fs::remove_dir_all(mesh.manifests.path().join("a")).unwrap();
    assert_eq!(update_summary(&next(&mut stream).await), "-10.1.0.1:80");
}

#[tokio::test]
async fn an_object_that_moves_to_another_file_is_never_removed() {
    let mesh = mesh(&service("web", "web")).await;
    mesh.manifests.write("a.yaml", &pod("web-1", "10.1.0.1"));
    let mut stream = mesh.get(WEB).await.unwrap();
    // The stream may have started before the file was read.
    if update_summary(&next(&mut stream).await) == "1" {
        assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.1:80");
    }
    std::fs::rename(
        mesh.manifests.path().join("a.yaml"),
        mesh.manifests.path().join("b.yaml"),
    )
    .unwrap();
    mesh.manifests.write("c.yaml", &pod("web-2", "10.1.0.2"));
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.2:80");
}

#[tokio::test]
async fn a_replaced_symbolic_link_changes_all_its_objects_together() {
    let mesh = mesh(&service("web", "web")).await;
    let version = |version: &str, ip: &str| {
        let dir = mesh.manifests.path().join(version);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("pods.yaml"), pod("web-1", ip)).unwrap();
        symlink(version, mesh.manifests.path().join("..new")).unwrap();
        std::fs::rename(
            mesh.manifests.path().join("..new"),
            mesh.manifests.path().join("..data"),
        )
        .unwrap();
    };
    version("..1", "10.1.0.1");
    symlink("..data/pods.yaml", mesh.manifests.path().join("pods.yaml")).unwrap();
    let mut stream = mesh.get(WEB).await.unwrap();
    if update_summary(&next(&mut stream).await) == "1" {
        assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.1:80");
    }
    version("..2", "10.1.0.2");
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.2:80");
    assert_eq!(update_summary(&next(&mut stream).await), "-10.1.0.1:80");
}

#[tokio::test]
async fn a_symbolic_link_that_briefly_dangles_keeps_its_objects() {
    let mesh = mesh(&service("web", "web")).await;
    let behind = tempfile::tempdir().unwrap();
    let target = behind.path().join("pods.yaml");
    std::fs::write(&target, pod("web-1", "10.1.0.1")).unwrap();
    symlink(&target, mesh.manifests.path().join("pods.yaml")).unwrap();
    let mut stream = mesh.get(WEB).await.unwrap();
    if update_summary(&next(&mut stream).await) == "1" {
        assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.1:80");
    }
    std::fs::remove_file(&target).unwrap();
    // Changes of other files are read meanwhile.
    mesh.manifests.write("more.yaml", &pod("web-2", "10.1.0.2"));
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.2:80");
    eventually(|| errors(&mesh).iter().any(|error| error.contains("pods.yaml"))).await;
    std::fs::write(&target, pod("web-1", "10.1.0.3")).unwrap();
    mesh.manifests.write("more.yaml", &pod("web-2", "10.1.0.4"));
    assert_eq!(update_summary(&next(&mut stream).await), "+10.1.0.3:80,10.1.0.4:80");
    // Without the link, its objects are removed.
    std::fs::remove_file(mesh.manifests.path().join("pods.yaml")).unwrap();
    eventually(|| mesh.registry.render().contains("pod_cache_size{cluster=\"local\"} 1")).await;
    assert!(mesh.errors().is_empty());
}

#[tokio::test]
async fn the_first_file_takes_precedence_for_a_duplicate_object() {
    let mesh = mesh(&service("web", "web")).await;
    mesh.manifests.write("a.yaml", &pod("web-1", "10.1.0.1"));
    mesh.manifests.write("b.yaml", &pod("web-1", "10.1.0.9"));
    eventually(|| !mesh.errors().is_empty()).await;
    assert!(
        errors(&mesh)[0].starts_with("b.yaml:2: Pod default/web-1 is already in "),
        "{:?}",
        errors(&mesh)
    );
    assert_eq!(endpoints(&mesh).await, "+10.1.0.1:80");
}

#[tokio::test]
async fn endpoints_objects_replace_derived_slices() {
    let endpoints = "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web}\n\
        subsets: [{addresses: [{ip: 10.9.0.1}], notReadyAddresses: [{ip: 10.9.0.2}], ports: [{port: 8080}]}]\n";
    let mesh = mesh(&format!("{}---\n{endpoints}", service("web", "web"))).await;
    assert_eq!(self::endpoints(&mesh).await, "+10.9.0.1:8080");
}

/// Specs that admission refuses, each with a part of the reason. `SERVER` stands for a reference to a Server.
struct RefusedSpecs {
    kind: &'static str,
    api_version: &'static str,
    specs: &'static [(&'static str, &'static str)],
}

const REFUSED_SPECS: &[RefusedSpecs] = &[
    RefusedSpecs {
        kind: "AuthorizationPolicy",
        api_version: "policy.linkerd.io/v1alpha1",
        specs: &[
            (
                "targetRef: {kind: Pod, name: a}, requiredAuthenticationRefs: []",
                "accepted: Server",
            ),
            (
                "targetRef: {kind: Namespace, name: a}, requiredAuthenticationRefs: []",
                "only its own",
            ),
            (
                "targetRef: SERVER, requiredAuthenticationRefs: [{kind: Secret, name: a}]",
                "Secret",
            ),
            (
                "targetRef: SERVER, requiredAuthenticationRefs: [{kind: ServiceAccount, name: a}, {kind: ServiceAccount, name: b}]",
                "may name one",
            ),
            ("targetRef: SERVER", "requiredAuthenticationRefs"),
            (
                "targetRef: {group: policy.linkerd.io, kind: Server, name: web, namespace: other}, requiredAuthenticationRefs: []",
                "spec.targetRef refers to the namespace other",
            ),
        ],
    },
    RefusedSpecs {
        kind: "MeshTLSAuthentication",
        api_version: "policy.linkerd.io/v1alpha1",
        specs: &[
            ("identities: [\"a.*\"]", "a.*"),
            ("identities: []", "exactly one of"),
            (
                "identities: [a], identityRefs: [{kind: ServiceAccount, name: a}]",
                "exactly one of",
            ),
            (
                "identityRefs: [{kind: Namespace, name: a, namespace: b}]",
                "accepts no namespace field",
            ),
        ],
    },
    RefusedSpecs {
        kind: "NetworkAuthentication",
        api_version: "policy.linkerd.io/v1alpha1",
        specs: &[
            ("networks: []", "empty"),
            ("networks: [{cidr: 10.0.0.0/8, except: [11.0.0.0/8]}]", "not inside"),
        ],
    },
    RefusedSpecs {
        kind: "EgressNetwork",
        api_version: "policy.linkerd.io/v1alpha1",
        specs: &[
            ("trafficPolicy: Allow, networks: []", "empty"),
            ("trafficPolicy: Maybe", "Maybe"),
        ],
    },
    RefusedSpecs {
        kind: "Server",
        api_version: "policy.linkerd.io/v1beta3",
        specs: &[
            (
                "podSelector: {}, port: 80, accessPolicy: some",
                "\"some\" is not an access policy",
            ),
            ("podSelector: {}, port: 80, proxyProtocol: SMTP", "SMTP"),
            ("podSelector: {}, port: 80, colour: red", "colour"),
            (
                "podSelector: {matchExpressions: [{key: a, operator: Like}]}, port: 80",
                "Like",
            ),
            (
                "podSelector: {}, externalWorkloadSelector: {}, port: 80",
                "exactly one of",
            ),
            ("podSelector: {}, port: 65536", "65536"),
        ],
    },
    RefusedSpecs {
        kind: "ServerAuthorization",
        api_version: "policy.linkerd.io/v1beta1",
        specs: &[
            (
                "server: {name: web}, client: {unauthenticated: true, meshTLS: {identities: [a]}}",
                "one of",
            ),
            (
                "server: {name: web}, client: {meshTLS: {unauthenticatedTLS: true, identities: [a]}}",
                "not both",
            ),
            ("server: {}, client: {unauthenticated: true}", "exactly one of"),
        ],
    },
    RefusedSpecs {
        kind: "HTTPRoute",
        api_version: "policy.linkerd.io/v1beta3",
        specs: &[
            ("parentRefs: [{kind: EgressNetwork, name: a}]", "needs a port"),
            ("rules: [{matches: [{path: {value: a}}]}]", "does not start with /"),
            (
                "rules: [{matches: [{path: {type: RegularExpression, value: \"(\"}}]}]",
                "regular expression",
            ),
            ("rules: [{timeouts: {request: 1s, backendRequest: 2s}}]", "longer than"),
            ("rules: [{timeouts: {request: -1s}}]", "-1s"),
            ("rules: [{filters: [{type: URLRewrite}]}]", "urlRewrite"),
            (
                "rules: [{filters: [{type: RequestRedirect, requestRedirect: {statusCode: 307}}]}]",
                "301, 302",
            ),
            (
                "rules: [{filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: \"a b\", value: c}]}}]}]",
                "not a header name",
            ),
        ],
    },
    RefusedSpecs {
        kind: "HTTPRoute",
        api_version: "gateway.networking.k8s.io/v1",
        specs: &[
            ("rules: [{timeouts: {request: 1.5h}}]", "1.5h"),
            ("rules: [{timeouts: {backendRequest: \"10\"}}]", "such as 1h30m"),
            (
                "rules: [{filters: [{type: RequestMirror, requestMirror: \
                 {backendRef: {name: web, port: 80}, fraction: {numerator: 4, denominator: 3}}}]}]",
                "requestMirror copies 4 of 3 requests; accepted are fractions from 0 to 1",
            ),
            ("rules: [{backendRefs: [{name: web}]}]", "needs a port"),
        ],
    },
    RefusedSpecs {
        kind: "HTTPLocalRateLimitPolicy",
        api_version: "policy.linkerd.io/v1alpha1",
        specs: &[
            ("targetRef: {kind: Service, name: web}", "accepted: Server"),
            (
                "targetRef: {group: policy.linkerd.io, kind: Server, name: web, namespace: other}",
                "spec.targetRef refers to the namespace other",
            ),
            ("targetRef: SERVER, total: {requestsPerSecond: 0}", "0"),
            (
                "targetRef: SERVER, total: {requestsPerSecond: 5}, identity: {requestsPerSecond: 6}",
                "above the total",
            ),
            (
                "targetRef: SERVER, overrides: [{requestsPerSecond: 5, clientRefs: [{kind: Pod, name: a}]}]",
                "accepted: ServiceAccount",
            ),
        ],
    },
    RefusedSpecs {
        kind: "ServiceProfile",
        api_version: "linkerd.io/v1alpha2",
        specs: &[
            ("routes: [{name: a}]", "condition"),
            ("routes: [{name: a, condition: {}}]", "sets none of"),
            ("routes: [{name: a, condition: {method: GET}, timeout: soon}]", "soon"),
            (
                "routes: [{name: a, condition: {method: GET}, responseClasses: [{condition: {status: {min: 99}}}]}]",
                "99",
            ),
            (
                "retryBudget: {retryRatio: -1, minRetriesPerSecond: 1, ttl: 10s}",
                "negative",
            ),
            ("retryBudget: {retryRatio: 1, minRetriesPerSecond: 1}", "ttl"),
            (
                "retryBudget: {retryRatio: 1, minRetriesPerSecond: 1, ttl: 61s}",
                "1s-60s",
            ),
            (
                "routes: [{name: a, condition: {pathRegex: \"(\"}}]",
                "regular expression",
            ),
        ],
    },
];

#[tokio::test]
async fn manifests_that_admission_refuses_are_reported_with_the_reason() {
    let manifest = |kind: &str, version: &str, metadata: &str, spec: &str| {
        format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{{metadata}}}\nspec: {{{spec}}}\n")
    };
    let annotated_network = |annotation: &str| {
        let metadata = format!("name: x, annotations: {{{annotation}}}");
        manifest(
            "EgressNetwork",
            "policy.linkerd.io/v1alpha1",
            &metadata,
            "trafficPolicy: Allow",
        )
    };
    let mut refused = vec![
        (
            annotated_network("balancer.linkerd.io/failure-accrual: sometimes"),
            "\"sometimes\" is not supported",
        ),
        (
            annotated_network("config.linkerd.io/opaque-ports: 'many'"),
            "many is neither a port",
        ),
        (
            manifest(
                "ServiceProfile",
                "linkerd.io/v1alpha2",
                "name: x.shop.svc.test",
                "dstOverrides: [{authority: \"www.example.com:80\", weight: 1}]",
            ),
            "expected <service>.<namespace>.svc.test:<port>",
        ),
        (
            "apiVersion: v1\nkind: Node\nmetadata: {name: A_B}\n".to_owned(),
            "lower-case",
        ),
    ];
    for group in REFUSED_SPECS {
        for &(spec, reason) in group.specs {
            let spec = spec.replace("SERVER", "{group: policy.linkerd.io, kind: Server, name: web}");
            refused.push((manifest(group.kind, group.api_version, "name: x", &spec), reason));
        }
    }
    let mesh = mesh("").await;
    for (index, (text, _)) in refused.iter().enumerate() {
        mesh.manifests.write(&format!("{index:02}.yaml"), text);
    }
    eventually(|| mesh.errors().len() == refused.len()).await;
    for (error, (text, reason)) in errors(&mesh).iter().zip(&refused) {
        assert!(
            error.contains(reason),
            "{error} does not contain {reason:?} for\n{text}"
        );
    }
}
