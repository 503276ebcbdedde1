//! Statuses of routes, rate limits and egress networks.

use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use serde_json::json;

use super::*;

const POLICY: &str = "policy.linkerd.io";
const GATEWAY: &str = "gateway.networking.k8s.io";

fn api(server: &ApiServer, api_version: &str, kind: &str) -> Api<DynamicObject> {
    let (group, version) = api_version.split_once('/').expect("our kinds have groups");
    let kind = GroupVersionKind::gvk(group, version, kind);
    Api::namespaced_with(server.client(), "simple-app", &ApiResource::from_gvk(&kind))
}

fn manifest(api_version: &str, kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": "simple-app"}, "spec": spec,
    })
}

fn service(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "simple-app"},
        "spec": {"ports": [{"port": 80}]},
    })
}

/// The conditions that our controller wrote on an object, as `type=status reason`.
fn own_conditions(object: &DynamicObject) -> Vec<String> {
    let status = &object.data["status"];
    let mut lists = vec![&status["conditions"]];
    for parent in status["parents"].as_array().into_iter().flatten() {
        if parent["controllerName"] == "linkerd.io/policy-controller" {
            lists.push(&parent["conditions"]);
        }
    }
    let conditions = lists.into_iter().filter_map(Value::as_array).flatten();
    conditions
        .filter(|condition| condition["observedGeneration"].as_i64() == object.metadata.generation)
        .map(|condition| {
            let [kind, status, reason] = ["type", "status", "reason"].map(|field| condition[field].as_str().unwrap());
            format!("{kind}={status} {reason}")
        })
        .collect()
}

async fn wait_for_conditions(
    server: &ApiServer,
    api_version: &str,
    kind: &str,
    name: &str,
    expected: &[&str],
) -> DynamicObject {
    let api = api(server, api_version, kind);
    let what = format!("{kind} {name}: {expected:?}");
    eventually(&what, async || {
        let object = api.get(name).await.unwrap();
        (own_conditions(&object) == expected).then_some(object)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_report_whether_they_are_accepted_and_resolved() {
    let server = api_server().await;
    let replica = Replica::start(&server.client(), "only");
    wait_for_leader(&server, STATUS_LEASE, "only").await;
    apply(&server, &service("web")).await;
    let parents = json!([{"group": "core", "kind": "Service", "name": "web", "port": 80}]);
    let http = |backend: &str| {
        let rules = json!([{"backendRefs": [{"name": backend, "port": 80}]}]);
        manifest(
            "gateway.networking.k8s.io/v1",
            "HTTPRoute",
            "http",
            json!({"parentRefs": parents, "rules": rules}),
        )
    };
    let check = async |expected: &[&str]| {
        wait_for_conditions(&server, &format!("{GATEWAY}/v1"), "HTTPRoute", "http", expected).await
    };
    apply(&server, &http("web")).await;
    check(&["Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"]).await;
    apply(&server, &http("gone")).await;
    check(&["Accepted=True Accepted", "ResolvedRefs=False BackendNotFound"]).await;
    apply(&server, &service("gone")).await;
    check(&["Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"]).await;

    let grpc = manifest(
        "gateway.networking.k8s.io/v1",
        "GRPCRoute",
        "grpc",
        json!({"parentRefs": parents}),
    );
    apply(&server, &grpc).await;
    let accepted = ["Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"];
    wait_for_conditions(&server, &format!("{GATEWAY}/v1"), "GRPCRoute", "grpc", &accepted).await;
    let route = check(&["Accepted=False RouteReasonConflicted", "ResolvedRefs=True ResolvedRefs"]).await;
    let manager = route
        .managed_fields()
        .iter()
        .find(|fields| fields.subresource.as_deref() == Some("status"));
    assert_eq!(
        manager.unwrap().manager.as_deref(),
        Some("linkerd.io/policy-controller")
    );

    // Another controller adds its part of the status. Our part is updated without a change of the other.
    let mut parents = route.data["status"]["parents"].as_array().unwrap().clone();
    let foreign = json!({
        "parentRef": {"group": GATEWAY, "kind": "Gateway", "name": "edge"}, "controllerName": "example.com/edge",
        "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    });
    parents.push(foreign.clone());
    let routes = api(&server, &format!("{GATEWAY}/v1"), "HTTPRoute");
    let patch = json!({"status": {"parents": parents}});
    routes
        .patch_status("http", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    server
        .kubectl(&["-n", "simple-app", "delete", "grpcroute", "grpc"])
        .await
        .unwrap();
    let route = check(&["Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"]).await;
    assert!(
        route.data["status"]["parents"].as_array().unwrap().contains(&foreign),
        "{}",
        route.data["status"]
    );

    assert_eq!(replica.metric("resource_status_patch_timeouts_total"), 0.0);
    assert!(replica.metric("resource_status_patches_total") >= 5.0);
    assert!(replica.metric("resource_status_patch_duration_seconds_count") >= 5.0);
    assert!(
        replica.metric("resource_status_patch_dequeues_total")
            <= replica.metric("resource_status_patch_enqueues_total")
    );
    replica.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_report_whether_they_are_accepted() {
    let server = api_server().await;
    let replica = Replica::start(&server.client(), "only");
    wait_for_leader(&server, STATUS_LEASE, "only").await;
    let route = manifest(
        &format!("{POLICY}/v1beta3"),
        "HTTPRoute",
        "inbound",
        json!({"parentRefs": [{"group": POLICY, "kind": "Server", "name": "srv"}]}),
    );
    apply(&server, &route).await;
    let target = json!({"group": POLICY, "kind": "Server", "name": "srv"});
    let limit = |name: &str| {
        let spec = json!({"targetRef": target, "total": {"requestsPerSecond": 5}});
        manifest(&format!("{POLICY}/v1alpha1"), "HTTPLocalRateLimitPolicy", name, spec)
    };
    apply(&server, &limit("a")).await;
    let routes = format!("{POLICY}/v1beta3");
    let (version, kind) = (format!("{POLICY}/v1alpha1"), "HTTPLocalRateLimitPolicy");
    wait_for_conditions(
        &server,
        &routes,
        "HTTPRoute",
        "inbound",
        &["Accepted=False NoMatchingParent"],
    )
    .await;
    wait_for_conditions(&server, &version, kind, "a", &["Accepted=False NoMatchingTarget"]).await;
    let server_spec = json!({"podSelector": {}, "port": 80});
    apply(
        &server,
        &manifest(&format!("{POLICY}/v1beta3"), "Server", "srv", server_spec),
    )
    .await;
    wait_for_conditions(&server, &routes, "HTTPRoute", "inbound", &["Accepted=True Accepted"]).await;
    let accepted_limit = wait_for_conditions(&server, &version, kind, "a", &["Accepted=True Accepted"]).await;
    assert_eq!(accepted_limit.data["status"]["targetRef"], target);
    apply(&server, &limit("b")).await;
    wait_for_conditions(
        &server,
        &version,
        kind,
        "b",
        &["Accepted=False RateLimitReasonAlreadyExists"],
    )
    .await;

    for (name, cidr, expected) in [
        ("out", "192.0.2.0/24", "Accepted=True Accepted"),
        ("in", "10.1.0.0/16", "Accepted=False EgressReasonNetworkOverlap"),
    ] {
        let spec = json!({"trafficPolicy": "Allow", "networks": [{"cidr": cidr}]});
        apply(
            &server,
            &manifest(&format!("{POLICY}/v1alpha1"), "EgressNetwork", name, spec),
        )
        .await;
        wait_for_conditions(
            &server,
            &format!("{POLICY}/v1alpha1"),
            "EgressNetwork",
            name,
            &[expected],
        )
        .await;
    }
    replica.end().await;
}
