//! Warnings and denials of route fields that the mesh does not support.

use crate::admission::tests::ExpectedAnswer::{Allowed, Denied, Warned};
use crate::admission::tests::{SERVICE, check_specs};

const RETRY: &str = "{retry: {attempts: 3}}";
const SESSION: &str = "{sessionPersistence: {type: Cookie}}";
const TIMEOUTS: &str = "{timeouts: {request: 1s}}";

fn on_service(rule: &str) -> String {
    format!("{{{SERVICE}, rules: [{rule}]}}")
}

fn on_server(rule: &str) -> String {
    format!("{{parentRefs: [{{group: policy.linkerd.io, kind: Server, name: web}}], rules: [{rule}]}}")
}

#[tokio::test]
async fn unsupported_route_fields_produce_warnings() {
    let gateway = [
        (&*on_service("{name: all}"), Allowed),
        (&*on_service(RETRY), Allowed),
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
            &*on_service(SESSION),
            Warned("rules[].sessionPersistence is not supported"),
        ),
        (&*on_service(TIMEOUTS), Allowed),
        (
            &*on_server(RETRY),
            Warned("retry has no effect where the parent is a Server"),
        ),
        (
            &*on_server(TIMEOUTS),
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
}

/// An HTTPRoute of `policy.linkerd.io`, and a GRPCRoute.
#[tokio::test]
async fn unsupported_route_fields_of_other_kinds_produce_warnings_or_denials() {
    let policy = [
        (
            &*on_service(RETRY),
            Denied("rules[].retry is supported only in an HTTPRoute of gateway.networking.k8s.io"),
        ),
        (
            &*on_service(SESSION),
            Denied("rules[].sessionPersistence is not supported"),
        ),
        (
            &*on_server(TIMEOUTS),
            Warned("timeouts has no effect where the parent is a Server"),
        ),
    ];
    check_specs("policy.linkerd.io/v1beta3", "HTTPRoute", policy).await;
    let grpc = [
        (
            &*on_service(RETRY),
            Warned("rules[].retry is supported only in an HTTPRoute of gateway.networking.k8s.io"),
        ),
        (
            &*on_service(SESSION),
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
