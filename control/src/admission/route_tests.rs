//! Verdicts about parts of routes that the mesh does not read.

use crate::admission::tests::Verdict::{Allowed, Denied, Warned};
use crate::admission::tests::{SERVICE, policies};

#[tokio::test]
async fn fields_of_routes_that_nobody_reads_are_told() {
    let on_service = |rule: &str| format!("{{{SERVICE}, rules: [{rule}]}}");
    let on_server = |rule: &str| {
        format!("{{parentRefs: [{{group: policy.linkerd.io, kind: Server, name: web}}], rules: [{rule}]}}")
    };
    let retry = "{retry: {attempts: 3}}";
    let session = "{sessionPersistence: {type: Cookie}}";
    let timeouts = "{timeouts: {request: 1s}}";
    let gateway = [
        (&*on_service("{name: all}"), Allowed),
        (
            &*on_service(retry),
            Warned("rules[].retry is not supported by the mesh"),
        ),
        (
            &*on_service(session),
            Warned("rules[].sessionPersistence is not supported"),
        ),
        (&*on_service(timeouts), Allowed),
        (
            &*on_server(retry),
            Warned("retry says nothing where the parent is a Server"),
        ),
        (
            &*on_server(timeouts),
            Warned("timeouts says nothing where the parent is a Server"),
        ),
        (
            &*on_service("{retries: 3}"),
            Denied("unknown field `retries`, expected one of"),
        ),
        (
            &*on_service("{matches: [{path: {value: /, kind: Exact}}]}"),
            Denied("unknown field `kind`"),
        ),
        (
            &*on_service("{backendRefs: [{name: web, port: 80, wight: 3}]}"),
            Denied("unknown field `wight`"),
        ),
        (&*format!("{{{SERVICE}, rule: []}}"), Denied("unknown field `rule`")),
        (&*format!("{{{SERVICE}, useDefaultGateways: All}}"), Allowed),
    ];
    policies("gateway.networking.k8s.io/v1", "HTTPRoute", gateway).await;
    let policy = [
        (
            &*on_service(retry),
            Denied("rules[].retry is not supported by the mesh; leave it out"),
        ),
        (
            &*on_service(session),
            Denied("rules[].sessionPersistence is not supported"),
        ),
        (
            &*on_server(timeouts),
            Warned("timeouts says nothing where the parent is a Server"),
        ),
    ];
    policies("policy.linkerd.io/v1beta3", "HTTPRoute", policy).await;
    let grpc = [
        (
            &*on_service(session),
            Warned("rules[].sessionPersistence is not supported"),
        ),
        (&*on_service("{matches: [{path: /}]}"), Denied("unknown field `path`")),
    ];
    policies("gateway.networking.k8s.io/v1", "GRPCRoute", grpc).await;
}

#[tokio::test]
async fn routes_for_gateways_alone_are_for_others_to_judge() {
    let parents = "parentRefs: [{name: gateway}]";
    for (kind, version) in [
        ("HTTPRoute", "v1"),
        ("GRPCRoute", "v1"),
        ("TLSRoute", "v1alpha2"),
        ("TCPRoute", "v1alpha2"),
    ] {
        for rules in [
            "7",
            "[]",
            "[{}, {}]",
            "[{backendRefs: [{name: web}]}]",
            "[{retries: 3}]",
        ] {
            let spec = format!("{{{parents}, rules: {rules}}}");
            policies(
                &format!("gateway.networking.k8s.io/{version}"),
                kind,
                [(&*spec, Allowed)],
            )
            .await;
        }
        let spec = "{parentRefs: [{name: 7}], rules: []}";
        let rows = [(spec, Denied("invalid type: integer `7`"))];
        policies(&format!("gateway.networking.k8s.io/{version}"), kind, rows).await;
    }
}
