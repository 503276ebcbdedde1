use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::*;

/// The expected answer of a table row.
#[derive(Clone, Copy)]
pub(super) enum ExpectedAnswer {
    Allowed,
    /// The reason contains this text.
    Denied(&'static str),
    /// Allowed, and the warning contains this text.
    Warned(&'static str),
}

use ExpectedAnswer::{Allowed, Denied, Warned};

pub(super) async fn review(
    api_version: &str,
    kind: &str,
    metadata: &str,
    spec: &str,
    handler: impl ReviewHandler,
) -> AdmissionResponse {
    let yaml = |text: &str| serde_yaml_ng::from_str::<Value>(text).unwrap();
    let (group, version) = api_version.split_once('/').unwrap();
    let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": yaml(metadata)});
    if !spec.is_empty() {
        object["spec"] = yaml(spec);
    }
    let req = json!({
        "uid": "1", "operation": "CREATE", "userInfo": {}, "namespace": "shop",
        "kind": {"group": group, "version": version, "kind": kind},
        "resource": {"group": group, "version": version, "resource": "x"},
        "object": object,
    });
    handler.review(serde_json::from_value(req).unwrap()).await.unwrap()
}

pub(super) fn assert_answer(row: &str, answer: &AdmissionResponse, expected: ExpectedAnswer) {
    match (expected, answer.denial_reason(), answer.warnings()) {
        (Allowed, None, []) => {}
        (Denied(text), Some(reason), _) if reason.contains(text) => {}
        (Warned(text), None, [warning]) if warning.contains(text) => {}
        _ => panic!("{row}\n{answer:?}"),
    }
}

/// Reviews specs of one kind.
pub(super) async fn check_specs<const N: usize>(api_version: &str, kind: &str, rows: [(&str, ExpectedAnswer); N]) {
    for (spec, expected) in rows {
        let answer = review(api_version, kind, "{name: x, namespace: shop}", spec, PolicyValidator).await;
        assert_answer(spec, &answer, expected);
    }
}

#[tokio::test]
async fn authorization_policies() {
    let server = "targetRef: {group: policy.linkerd.io, kind: Server, name: web}";
    let rows = [
        (format!("{{{server}, requiredAuthenticationRefs: []}}"), Allowed),
        (
            format!(
                "{{{server}, requiredAuthenticationRefs: [{{kind: ServiceAccount, name: a}}, \
                 {{group: policy.linkerd.io, kind: NetworkAuthentication, name: b}}]}}"
            ),
            Allowed,
        ),
        (format!("{{{server}}}"), Denied("requiredAuthenticationRefs")),
        (
            format!("{{{server}, requiredAuthenticationRefs: [{{kind: Secret, name: a}}]}}"),
            Denied("accepted: MeshTLSAuthentication"),
        ),
    ];
    for (spec, expected) in rows {
        check_specs("policy.linkerd.io/v1alpha1", "AuthorizationPolicy", [(&spec, expected)]).await;
    }
    for (group, kind, name, expected) in [
        ("policy.linkerd.io", "server", "web", Allowed),
        ("policy.linkerd.io", "HTTPRoute", "web", Allowed),
        ("gateway.networking.k8s.io", "HTTPRoute", "web", Allowed),
        ("gateway.networking.k8s.io", "GRPCRoute", "web", Allowed),
        ("core", "Namespace", "shop", Allowed),
        ("\"\"", "Namespace", "other", Denied("only its own, shop")),
        ("policy.linkerd.io", "Server", "web, namespace: shop", Allowed),
        (
            "policy.linkerd.io",
            "Server",
            "web, namespace: other",
            Denied("spec.targetRef refers to the namespace other; only its own, shop"),
        ),
        (
            "gateway.networking.k8s.io",
            "HTTPRoute",
            "web, namespace: other",
            Denied("only its own, shop"),
        ),
        (
            "core",
            "Service",
            "web",
            Denied("accepted: Server, Namespace, HTTPRoute, GRPCRoute"),
        ),
        (
            "gateway.networking.k8s.io",
            "TCPRoute",
            "web",
            Denied("accepted: Server"),
        ),
    ] {
        let spec =
            format!("{{targetRef: {{group: {group}, kind: {kind}, name: {name}}}, requiredAuthenticationRefs: []}}");
        check_specs("policy.linkerd.io/v1alpha1", "AuthorizationPolicy", [(&spec, expected)]).await;
    }
    let mesh = "{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: m}";
    let net = "{group: policy.linkerd.io, kind: NetworkAuthentication, name: n}";
    let account = "{kind: ServiceAccount, name: s}";
    for (refs, expected) in [
        (format!("{mesh}, {net}"), Allowed),
        (format!("{account}, {net}"), Allowed),
        (format!("{mesh}, {mesh}"), Denied("may name one")),
        (format!("{account}, {account}"), Denied("may name one")),
        (format!("{mesh}, {account}"), Denied("may name one")),
        (format!("{net}, {net}"), Denied("may name one")),
    ] {
        let spec = format!("{{{server}, requiredAuthenticationRefs: [{refs}]}}");
        check_specs("policy.linkerd.io/v1alpha1", "AuthorizationPolicy", [(&spec, expected)]).await;
    }
}

#[tokio::test]
async fn authentications() {
    let mesh_tls = [
        ("identities: ['*']", Allowed),
        (
            "identities: ['*.shop.serviceaccount.identity.linkerd.cluster.local']",
            Allowed,
        ),
        (
            "identities: [web.shop.serviceaccount.identity.linkerd.cluster.local]",
            Allowed,
        ),
        ("identities: ['spiffe://root.linkerd.cluster.local/vm']", Allowed),
        ("identities: [Web]", Denied("\"Web\" is none of")),
        ("identities: ['web.*']", Denied("is none of")),
        ("identities: ['*web']", Denied("is none of")),
        ("identities: ['http://x']", Denied("is none of")),
        ("identities: []", Denied("exactly one of identities and identityRefs")),
        ("{}", Denied("exactly one of")),
        (
            "{identities: ['*'], identityRefs: [{kind: ServiceAccount, name: a}]}",
            Denied("exactly one of"),
        ),
        (
            "identityRefs: [{kind: ServiceAccount, name: a, namespace: other}]",
            Allowed,
        ),
        ("identityRefs: [{kind: Namespace, name: other}]", Allowed),
        (
            "identityRefs: [{kind: Namespace, name: other, namespace: x}]",
            Denied("accepts no namespace field"),
        ),
        (
            "identityRefs: [{kind: Pod, name: a}]",
            Denied("accepted: ServiceAccount, Namespace"),
        ),
    ];
    check_specs("policy.linkerd.io/v1alpha1", "MeshTLSAuthentication", mesh_tls).await;
    let networks = [
        ("networks: [{cidr: 10.0.0.0/8, except: [10.1.0.0/16]}]", Allowed),
        ("networks: [{cidr: 'fd00::/8'}]", Allowed),
        ("networks: [{cidr: 10.0.0.1}]", Allowed),
        ("networks: []", Denied("spec.networks is empty")),
        ("{}", Denied("networks")),
        ("networks: [{cidr: 10.0.0.0/33}]", Denied("neither a network")),
        (
            "networks: [{cidr: 10.0.0.0/8, except: [11.0.0.0/16]}]",
            Denied("is not inside 10.0.0.0/8"),
        ),
        (
            "networks: [{cidr: 10.0.0.0/8, except: [10.0.0.0/8]}]",
            Denied("leaves nothing of"),
        ),
        (
            "networks: [{cidr: 10.0.0.0/8, except: [0.0.0.0/0]}]",
            Denied("is not inside"),
        ),
    ];
    check_specs("policy.linkerd.io/v1alpha1", "NetworkAuthentication", networks).await;
}

#[tokio::test]
async fn servers() {
    for policy in [
        "all-unauthenticated",
        "all-authenticated",
        "cluster-unauthenticated",
        "cluster-authenticated",
        "deny",
        "audit",
    ] {
        let spec = format!("{{podSelector: {{}}, port: 80, accessPolicy: {policy}}}");
        check_specs("policy.linkerd.io/v1beta3", "Server", [(&spec, Allowed)]).await;
    }
    for protocol in ["unknown", "HTTP/1", "HTTP/2", "gRPC", "opaque", "TLS"] {
        let spec = format!("{{podSelector: {{}}, port: http, proxyProtocol: {protocol}}}");
        check_specs("policy.linkerd.io/v1beta1", "Server", [(&spec, Allowed)]).await;
    }
    let rows = [
        (
            "{externalWorkloadSelector: {matchLabels: {app: db}}, port: 5432}",
            Allowed,
        ),
        (
            "{podSelector: {}, port: 80, accessPolicy: all}",
            Denied("\"all\" is not an access policy"),
        ),
        (
            "{podSelector: {}, port: 80, proxyProtocol: http}",
            Denied("unknown variant `http`"),
        ),
        (
            "{podSelector: {matchExpressions: [{key: app, operator: Near, values: [a]}]}, port: 80}",
            Denied("selector on app: Near"),
        ),
        ("{podSelector: {}}", Denied("port")),
        ("{podSelector: {}, port: 0}", Denied("spec.port")),
        (
            "{podSelector: {}, externalWorkloadSelector: {}, port: 80}",
            Denied("exactly one of"),
        ),
        ("{port: 80}", Denied("exactly one of")),
        (
            "{podSelector: {}, port: 80, proxyprotocol: HTTP/1}",
            Denied("unknown field `proxyprotocol`"),
        ),
    ];
    check_specs("policy.linkerd.io/v1beta3", "Server", rows).await;
}

#[tokio::test]
async fn server_authorizations() {
    let rows = [
        ("{server: {name: web}, client: {unauthenticated: true}}", Allowed),
        (
            "{server: {selector: {}}, client: {meshTLS: {identities: ['*']}}}",
            Allowed,
        ),
        (
            "{server: {name: web}, client: {meshTLS: {serviceAccounts: [{name: a}]}}}",
            Allowed,
        ),
        (
            "{server: {name: web}, client: {meshTLS: {unauthenticatedTLS: true}}}",
            Allowed,
        ),
        (
            "{server: {name: web}, client: {networks: [{cidr: 10.0.0.0/8}], unauthenticated: true}}",
            Allowed,
        ),
        (
            "{server: {name: web}, client: {}}",
            Warned("spec.client: it names no client"),
        ),
        (
            "{server: {name: web}, client: {unauthenticated: true, networks: []}}",
            Warned("spec.client.networks: it is empty"),
        ),
        (
            "{server: {name: web}, client: {unauthenticated: true, meshTLS: {identities: ['*']}}}",
            Denied("one of unauthenticated and meshTLS"),
        ),
        (
            "{server: {name: web}, client: {meshTLS: {unauthenticatedTLS: true, identities: ['*']}}}",
            Denied("not both"),
        ),
        (
            "{server: {name: web}, client: {meshTLS: {unauthenticatedTLS: true, serviceAccounts: [{name: a}]}}}",
            Denied("not both"),
        ),
        (
            "{server: {name: web}, client: {networks: [{cidr: 10.0.0.0/8, except: [10.0.0.0/8]}]}}",
            Denied("leaves nothing of"),
        ),
        ("{server: {}, client: {}}", Denied("exactly one of name and selector")),
        ("{server: {name: web}}", Denied("client")),
    ];
    check_specs("policy.linkerd.io/v1beta1", "ServerAuthorization", rows).await;
}

#[tokio::test]
async fn rate_limits() {
    let target = "targetRef: {group: policy.linkerd.io, kind: Server, name: web}";
    for (limits, expected) in [
        (
            "total: {requestsPerSecond: 10}, identity: {requestsPerSecond: 10}",
            Allowed,
        ),
        ("identity: {requestsPerSecond: 10}", Allowed),
        (
            "total: {requestsPerSecond: 10}, overrides: [{requestsPerSecond: 5, clientRefs: [{kind: ServiceAccount, name: a}]}]",
            Allowed,
        ),
        ("total: {requestsPerSecond: 0}", Denied("nonzero")),
        ("identity: {requestsPerSecond: 0}", Denied("nonzero")),
        ("overrides: [{requestsPerSecond: 0, clientRefs: []}]", Denied("nonzero")),
        ("total: {requestsPerSecond: -1}", Denied("invalid value")),
        (
            "total: {requestsPerSecond: 10}, identity: {requestsPerSecond: 11}",
            Denied("spec.identity of 11 is above the total of 10"),
        ),
        (
            "total: {requestsPerSecond: 10}, overrides: [{requestsPerSecond: 11, clientRefs: []}]",
            Denied("is above the total of 10"),
        ),
        (
            "overrides: [{requestsPerSecond: 1, clientRefs: [{kind: Namespace, name: a}]}]",
            Denied("accepted: ServiceAccount"),
        ),
    ] {
        let spec = format!("{{{target}, {limits}}}");
        check_specs(
            "policy.linkerd.io/v1alpha1",
            "HTTPLocalRateLimitPolicy",
            [(&spec, expected)],
        )
        .await;
    }
    let rows = [
        ("{targetRef: {kind: Service, name: web}}", Denied("accepted: Server")),
        (
            "{targetRef: {group: policy.linkerd.io, kind: Server, name: web, namespace: other}}",
            Denied("spec.targetRef refers to the namespace other; only its own, shop"),
        ),
    ];
    check_specs("policy.linkerd.io/v1alpha1", "HTTPLocalRateLimitPolicy", rows).await;
}

#[tokio::test]
async fn egress_networks() {
    let rows = [
        ("trafficPolicy: Allow", Allowed),
        (
            "{trafficPolicy: Deny, networks: [{cidr: 203.0.113.0/24, except: [203.0.113.1/32]}]}",
            Allowed,
        ),
        ("{trafficPolicy: Deny, networks: []}", Denied("spec.networks is empty")),
        ("trafficPolicy: Maybe", Denied("unknown variant `Maybe`")),
        ("networks: [{cidr: 203.0.113.0/24}]", Denied("trafficPolicy")),
        (
            "{trafficPolicy: Deny, networks: [{cidr: 203.0.113.0/24, except: [203.0.113.0/24]}]}",
            Denied("leaves nothing of"),
        ),
    ];
    check_specs("policy.linkerd.io/v1alpha1", "EgressNetwork", rows).await;
}

pub(super) const SERVICE: &str = "parentRefs: [{group: core, kind: Service, name: web, port: 80}]";
const EGRESS: &str = "parentRefs: [{group: policy.linkerd.io, kind: EgressNetwork, name: out}]";

#[tokio::test]
async fn http_routes_of_both_groups() {
    for (rules, expected) in [
        (
            "[{matches: [{path: {value: /a}}], backendRefs: [{name: web, port: 80}]}]",
            Allowed,
        ),
        (
            "[{matches: [{path: {type: Exact, value: a}}]}]",
            Denied("path \"a\" does not start with /"),
        ),
        (
            "[{matches: [{path: {type: RegularExpression, value: '('}}]}]",
            Denied("regular expression"),
        ),
        (
            "[{matches: [{headers: [{name: 'a b', value: x}]}]}]",
            Denied("is not a header name"),
        ),
        ("[{matches: [{method: 'G T'}]}]", Denied("is not an HTTP method")),
        (
            "[{filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: Content-Length, value: '1'}]}}]}]",
            Denied("header \"Content-Length\" frames the body"),
        ),
        (
            "[{filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [transfer-encoding]}}]}]",
            Denied("header \"transfer-encoding\" frames the body"),
        ),
        (
            "[{filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: a, value: \"x\\ny\"}]}}]}]",
            Denied("is not a header value"),
        ),
        (
            "[{filters: [{type: RequestRedirect, requestRedirect: {path: {type: ReplaceFullPath, replaceFullPath: a}}}]}]",
            Denied("does not start with /"),
        ),
        (
            "[{filters: [{type: RequestRedirect, requestRedirect: {path: {type: ReplacePrefixMatch, replacePrefixMatch: a}}}]}]",
            Denied("does not start with /"),
        ),
        (
            "[{filters: [{type: RequestRedirect, requestRedirect: {scheme: 'h ttp'}}]}]",
            Denied("is not a URI scheme"),
        ),
        (
            "[{filters: [{type: RequestRedirect, requestRedirect: {hostname: 'a.test:81'}}]}]",
            Denied("redirect hostname \"a.test:81\" is not a host name"),
        ),
        (
            "[{filters: [{type: RequestRedirect, requestRedirect: {statusCode: 200}}]}]",
            Denied("redirect status 200"),
        ),
        (
            "[{timeouts: {request: 1s, backendRequest: 2s}}]",
            Denied("timeouts.backendRequest of 2s is longer than timeouts.request of 1s"),
        ),
        ("[{timeouts: {request: 0s, backendRequest: 2s}}]", Allowed),
    ] {
        for api_version in ["policy.linkerd.io/v1beta3", "gateway.networking.k8s.io/v1"] {
            let spec = format!("{{{SERVICE}, rules: {rules}}}");
            let metadata = "{generateName: x-, namespace: shop}";
            let answer = review(api_version, "HTTPRoute", metadata, &spec, PolicyValidator).await;
            assert_answer(&format!("{api_version} {spec}"), &answer, expected);
        }
    }
}

#[tokio::test]
async fn routes_differ_by_group() {
    let backend = format!("{{{SERVICE}, rules: [{{backendRefs: [{{name: web}}]}}]}}");
    let filter = format!("{{{SERVICE}, rules: [{{filters: [{{type: URLRewrite, urlRewrite: {{}}}}]}}]}}");
    let extension = "{type: ExtensionRef, extensionRef: {group: a, kind: b, name: c}}";
    let extension = format!("{{{SERVICE}, rules: [{{filters: [{extension}]}}]}}");
    let with_cors = |cors: &str| format!("{{{SERVICE}, rules: [{{filters: [{{type: CORS, cors: {cors}}}]}}]}}");
    let (cors, invalid_cors) = (with_cors("{}"), with_cors("{allowOrigins: [a.b]}"));
    let mirror = format!(
        "{{{SERVICE}, rules: [{{filters: [{{type: RequestMirror, requestMirror: {{backendRef: {{name: web}}}}}}]}}]}}"
    );
    let negative = format!("{{{SERVICE}, rules: [{{timeouts: {{request: -1s}}}}]}}");
    let shape = format!("{{{SERVICE}, rules: 7}}");
    let see_other = format!(
        "{{{SERVICE}, rules: [{{filters: [{{type: RequestRedirect, requestRedirect: {{statusCode: 303}}}}]}}]}}"
    );
    let policy = [
        (&*backend, Allowed),
        (&*filter, Denied("\"URLRewrite\" is none of")),
        (&*cors, Denied("\"CORS\" is none of")),
        (&*negative, Denied("is not a duration")),
        (&*shape, Denied("invalid type")),
        (&*see_other, Denied("accepted: 301, 302")),
    ];
    check_specs("policy.linkerd.io/v1beta3", "HTTPRoute", policy).await;
    let gateway = [
        (&*backend, Denied("backendRef web is a Service and needs a port")),
        (&*filter, Allowed),
        (&*extension, Warned("filter ExtensionRef is not supported by the mesh")),
        (&*cors, Allowed),
        (&*invalid_cors, Denied("origin \"a.b\" is not supported")),
        (
            &*mirror,
            Denied("backendRef web of requestMirror is a Service and needs a port"),
        ),
        (&*negative, Denied("is not a duration")),
        (
            &*shape,
            Denied("cannot read this HTTPRoute: invalid type: integer `7`, expected a sequence"),
        ),
        (&*see_other, Allowed),
    ];
    check_specs("gateway.networking.k8s.io/v1beta1", "HTTPRoute", gateway).await;
}

#[tokio::test]
async fn grpc_routes() {
    let rows = [
        (
            format!("{{{SERVICE}, rules: [{{matches: [{{method: {{service: a.B, method: c}}}}]}}]}}"),
            Allowed,
        ),
        (
            format!("{{{SERVICE}, rules: [{{backendRefs: [{{kind: Service, name: web}}]}}]}}"),
            Denied("needs a port"),
        ),
        (
            format!("{{{SERVICE}, rules: [{{matches: [{{headers: [{{name: '', value: x}}]}}]}}]}}"),
            Denied("is not a header name"),
        ),
        (
            format!("{{{SERVICE}, rules: [{{matches: [{{method: {{type: RegularExpression, service: a}}}}]}}]}}"),
            Denied("type Exact only"),
        ),
        (
            format!("{{{SERVICE}, rules: [{{matches: 7}}]}}"),
            Denied("cannot read this GRPCRoute: invalid type: integer `7`"),
        ),
    ];
    for (spec, expected) in rows {
        check_specs("gateway.networking.k8s.io/v1", "GRPCRoute", [(&spec, expected)]).await;
    }
}

#[tokio::test]
async fn tls_and_tcp_routes() {
    for kind in ["TLSRoute", "TCPRoute"] {
        let rows = [
            (
                format!("{{{SERVICE}, rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}"),
                Allowed,
            ),
            (
                format!("{{{SERVICE}, rules: []}}"),
                Denied("spec.rules has 0 entries; exactly one is accepted"),
            ),
            (
                format!("{{{SERVICE}, rules: [{{}}, {{}}]}}"),
                Denied("spec.rules has 2 entries"),
            ),
            (
                format!("{{{EGRESS}, rules: [{{}}]}}"),
                Denied("is an EgressNetwork and needs a port"),
            ),
            // The text ends where the names of the two kinds differ.
            (format!("{{{SERVICE}, rules: 7}}"), Denied("cannot read this T")),
        ];
        for (spec, expected) in rows {
            check_specs("gateway.networking.k8s.io/v1alpha2", kind, [(&spec, expected)]).await;
        }
    }
}

#[tokio::test]
async fn parents_and_annotations_of_routes() {
    let routes = [
        ("policy.linkerd.io/v1beta3", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("gateway.networking.k8s.io/v1", "GRPCRoute"),
    ];
    let server = "parentRefs: [{group: policy.linkerd.io, kind: Server, name: web}]";
    let egress = EGRESS.replace("name: out", "name: out, port: 443");
    for (api_version, kind) in routes {
        check_specs(
            api_version,
            kind,
            [(EGRESS, Denied("shop/out is an EgressNetwork and needs a port"))],
        )
        .await;
        check_specs(api_version, kind, [(&*egress, Allowed), (server, Allowed)]).await;
        for annotation in [
            "retry.linkerd.io/http: 6xx",
            "retry.linkerd.io/grpc: sometimes",
            "timeout.linkerd.io/request: 1.5s",
            "timeout.linkerd.io/response: -1s",
            "timeout.linkerd.io/idle: soon",
        ] {
            let metadata = format!("{{name: x, namespace: shop, annotations: {{{annotation}}}}}");
            for (parents, is_outbound) in [(SERVICE, true), (&*egress, true), (server, false)] {
                let answer = review(api_version, kind, &metadata, &format!("{{{parents}}}"), PolicyValidator).await;
                let key = annotation.split(':').next().unwrap();
                let named = answer.denial_reason().is_some_and(|reason| reason.starts_with(key));
                assert_eq!(named, is_outbound, "{kind} {annotation} {parents}: {answer:?}");
            }
        }
    }
}

#[tokio::test]
async fn other_kinds_and_reviews_without_objects_are_denied() {
    let answer = review("apps/v1", "Deployment", "{name: x}", "{}", PolicyValidator).await;
    assert_answer("", &answer, Denied("unsupported resource type: apps.v1.Deployment"));
    // The spec is required.
    let rows = [("", Denied("missing field `spec`"))];
    check_specs("policy.linkerd.io/v1beta3", "Server", rows).await;
    let deletion = json!({
        "uid": "1", "operation": "DELETE", "userInfo": {}, "object": null,
        "kind": {"group": "policy.linkerd.io", "version": "v1beta3", "kind": "Server"},
        "resource": {"group": "policy.linkerd.io", "version": "v1beta3", "resource": "servers"},
    });
    let answer = PolicyValidator
        .review(serde_json::from_value(deletion).unwrap())
        .await
        .unwrap();
    assert_answer("", &answer, Denied("no object"));
}

/// Field names of the validated kinds.
const FIELDS: &[&str] = &[
    "targetRef",
    "requiredAuthenticationRefs",
    "group",
    "kind",
    "name",
    "namespace",
    "identities",
    "identityRefs",
    "networks",
    "cidr",
    "except",
    "podSelector",
    "matchLabels",
    "matchExpressions",
    "port",
    "proxyProtocol",
    "accessPolicy",
    "server",
    "client",
    "meshTLS",
    "parentRefs",
    "rules",
    "matches",
    "path",
    "value",
    "type",
    "headers",
    "filters",
    "requestRedirect",
    "backendRefs",
    "weight",
    "timeouts",
    "request",
    "total",
    "overrides",
    "requestsPerSecond",
    "trafficPolicy",
    "routes",
    "condition",
    "all",
    "not",
    "status",
    "min",
    "retryBudget",
    "ttl",
    "dstOverrides",
    "hostnames",
];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-zA-Z*./:0-9%é-]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 64, 6, |inner| {
        let fields = btree_map(select(FIELDS), inner.clone(), 0..6);
        prop_oneof![
            vec(inner, 0..4).prop_map(Value::from),
            fields.prop_map(|fields| fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

proptest! {
    #[test]
    fn reviewing_never_panics(spec in any_json(), text in "[-a-z0-9,.*%é]{0,12}") {
        let kinds = [
            ("policy.linkerd.io", ["AuthorizationPolicy", "MeshTLSAuthentication", "NetworkAuthentication", "Server"]),
            ("policy.linkerd.io", ["ServerAuthorization", "HTTPLocalRateLimitPolicy", "EgressNetwork", "HTTPRoute"]),
            ("gateway.networking.k8s.io", ["HTTPRoute", "GRPCRoute", "TLSRoute", "TCPRoute"]),
        ];
        let annotations = json!({"retry.linkerd.io/http": text, "timeout.linkerd.io/request": text});
        let request = |group: &str, kind: &str| {
            let gvk = json!({"group": group, "version": "v1", "kind": kind});
            let req = json!({
                "uid": "1", "operation": "CREATE", "userInfo": {}, "kind": gvk,
                "resource": {"group": group, "version": "v1", "resource": "x"},
                "object": {"metadata": {"name": text, "annotations": annotations}, "spec": spec},
            });
            serde_json::from_value::<Request>(req).unwrap()
        };
        for (group, kinds) in kinds {
            for kind in kinds {
                policy::review(request(group, kind));
            }
        }
        profile::review(request("linkerd.io", "ServiceProfile"));
    }
}
