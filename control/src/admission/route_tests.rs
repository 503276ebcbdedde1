//! Warnings and denials of route fields that the mesh does not support.

use crate::admission::tests::ExpectedAnswer::{Allowed, Denied, Warned};
use crate::admission::tests::{SERVICE, check_specs};

#[tokio::test]
async fn unsupported_route_fields_produce_warnings() {
    let on_service = |rule: &str| format!("{{{SERVICE}, rules: [{rule}]}}");
    let on_server = |rule: &str| {
        format!("{{parentRefs: [{{group: policy.linkerd.io, kind: Server, name: web}}], rules: [{rule}]}}")
    };
    let retry = "{retry: {attempts: 3}}";
    let session = "{sessionPersistence: {type: Cookie}}";
    let timeouts = "{timeouts: {request: 1s}}";
    let gateway = [
        (&*on_service("{name: all}"), Allowed),
        (&*on_service(retry), Allowed),
        (
            &*on_service("{retry: {codes: [503, 399]}}"),
            Denied("retry code 399; accepted: 400-599"),
        ),
        (
            &*on_service("{retry: {attempts: 65536}}"),
            Denied("invalid value: integer `65536`, expected u16"),
        ),
        (
            &*on_service("{retry: {backoff: -1s}}"),
            Denied("\"-1s\" is not a duration"),
        ),
        (&*on_service("{retry: {tries: 1}}"), Denied("unknown field `tries`")),
        (
            &*on_service(session),
            Warned("rules[].sessionPersistence is not supported"),
        ),
        (&*on_service(timeouts), Allowed),
        (
            &*on_server(retry),
            Warned("retry has no effect where the parent is a Server"),
        ),
        (
            &*on_server(timeouts),
            Warned("timeouts has no effect where the parent is a Server"),
        ),
        (
            &*on_server("{backendRefs: [{name: web, port: 80}]}"),
            Warned("backendRefs has no effect where the parent is a Server"),
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
    check_specs("gateway.networking.k8s.io/v1", "HTTPRoute", gateway).await;
    let policy = [
        (
            &*on_service(retry),
            Denied("rules[].retry is supported only in an HTTPRoute of gateway.networking.k8s.io"),
        ),
        (
            &*on_service(session),
            Denied("rules[].sessionPersistence is not supported"),
        ),
        (
            &*on_server(timeouts),
            Warned("timeouts has no effect where the parent is a Server"),
        ),
    ];
    check_specs("policy.linkerd.io/v1beta3", "HTTPRoute", policy).await;
    let grpc = [
        (
            &*on_service(retry),
            Warned("rules[].retry is supported only in an HTTPRoute of gateway.networking.k8s.io"),
        ),
        (
            &*on_service(session),
            Warned("rules[].sessionPersistence is not supported"),
        ),
        (&*on_service("{matches: [{path: /}]}"), Denied("unknown field `path`")),
    ];
    check_specs("gateway.networking.k8s.io/v1", "GRPCRoute", grpc).await;
}

#[tokio::test]
async fn routes_with_only_gateway_parents_are_allowed() {
    let parents = "parentRefs: [{name: gateway}]";
    for (kind, version) in [
        ("HTTPRoute", "v1"),
        ("GRPCRoute", "v1"),
        ("TLSRoute", "v1"),
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
            check_specs(
                &format!("gateway.networking.k8s.io/{version}"),
                kind,
                [(&*spec, Allowed)],
            )
            .await;
        }
        let spec = "{parentRefs: [{name: 7}], rules: []}";
        let rows = [(spec, Denied("invalid type: integer `7`"))];
        check_specs(&format!("gateway.networking.k8s.io/{version}"), kind, rows).await;
    }
}
