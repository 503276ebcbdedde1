//! External workloads become endpoints of the Services that select them.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
};
use serde_json::json;

use super::*;

fn workloads(server: &ApiServer, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("workload.linkerd.io", "v1beta1", "ExternalWorkload");
    Api::namespaced_with(server.client(), namespace, &ApiResource::from_gvk(&kind))
}

/// The Service of `docs/how-to/virtual-machines.md`.
fn guide_service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "simple-app-v1", "namespace": "simple-app", "labels": {"app": "simple-app-v1"}},
        "spec": {"selector": {"app": "simple-app-v1"}, "ports": [{"port": 80, "protocol": "TCP"}]},
    })
}

fn workload(name: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "workload.linkerd.io/v1beta1", "kind": "ExternalWorkload",
        "metadata": {"name": name, "namespace": "simple-app", "labels": {"app": "simple-app-v1"}},
        "spec": {
            "meshTLS": {
                "identity": "spiffe://root.linkerd.cluster.local/proxy-harness",
                "serverName": format!("{name}.simple-app.external.identity.linkerd.cluster.local"),
            },
            "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
            "workloadIPs": [{"ip": ip}],
        },
    })
}

async fn create(server: &ApiServer, workload: Value) {
    let workload: DynamicObject = serde_json::from_value(workload).unwrap();
    workloads(server, "simple-app")
        .create(&PostParams::default(), &workload)
        .await
        .unwrap();
}

async fn make_ready(server: &ApiServer, name: &str) {
    let status = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    workloads(server, "simple-app")
        .patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .unwrap();
}

async fn slices(server: &ApiServer) -> Vec<EndpointSlice> {
    let ours =
        ListParams::default().labels("endpointslice.kubernetes.io/managed-by=linkerd-external-workloads-controller");
    let slices = Api::<EndpointSlice>::namespaced(server.client(), "simple-app");
    slices.list(&ours).await.unwrap().items
}

async fn slice_sizes(server: &ApiServer) -> Vec<usize> {
    let mut slice_sizes: Vec<usize> = slices(server).await.iter().map(|slice| slice.endpoints.len()).collect();
    slice_sizes.sort_unstable();
    slice_sizes
}

async fn wait_for_sizes(server: &ApiServer, expected: &[usize]) {
    let what = format!("slices of {expected:?}");
    eventually(&what, async || (slice_sizes(server).await == expected).then_some(())).await;
}

async fn slice_names(server: &ApiServer) -> BTreeSet<String> {
    slices(server).await.iter().map(ResourceExt::name_any).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_workload_of_the_guide_is_in_the_right_slice() {
    let server = api_server().await;
    let replica = Replica::start(&server.client(), "only");
    let name = "external-simple-app-v1-0e340584";
    apply(&server, &guide_service()).await;
    apply(&server, &workload(name, "172.20.0.8")).await;
    wait_for_sizes(&server, &[1]).await;
    let ready = |slice: &EndpointSlice| slice.endpoints[0].conditions.as_ref().unwrap().ready;
    assert_eq!(
        ready(&slices(&server).await[0]),
        Some(false),
        "the workload has no Ready condition"
    );
    make_ready(&server, name).await;
    let slice = eventually("the endpoint is ready", async || {
        slices(&server).await.pop().filter(|slice| ready(slice) == Some(true))
    })
    .await;

    let services = Api::<Service>::namespaced(server.client(), "simple-app");
    let service_uid = services.get("simple-app-v1").await.unwrap().uid().unwrap();
    let workload_uid = workloads(&server, "simple-app").get(name).await.unwrap().uid().unwrap();
    assert!(
        slice.name_any().starts_with("linkerd-external-simple-app-v1-"),
        "{}",
        slice.name_any()
    );
    assert_eq!(slice.metadata.generation, Some(2), "written twice, and not more often");
    let expected = json!({
        "addressType": "IPv4",
        "labels": {
            "app": "simple-app-v1", "kubernetes.io/service-name": "simple-app-v1",
            "endpointslice.kubernetes.io/managed-by": "linkerd-external-workloads-controller",
        },
        "owners": [{
            "apiVersion": "v1", "kind": "Service", "name": "simple-app-v1", "uid": service_uid,
            "controller": true, "blockOwnerDeletion": true,
        }],
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}],
        "endpoints": [{
            "addresses": ["172.20.0.8"],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {"kind": "ExternalWorkload", "namespace": "simple-app", "name": name, "uid": workload_uid},
        }],
    });
    let found = json!({
        "addressType": slice.address_type, "labels": slice.metadata.labels, "owners": slice.metadata.owner_references,
        "ports": slice.ports, "endpoints": slice.endpoints,
    });
    assert_eq!(found, expected, "{found:#}");
    replica.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_hold_a_hundred_endpoints_and_keep_their_names() {
    let server = api_server().await;
    apply(&server, &guide_service()).await;
    let name = |n: usize| format!("vm-{n:03}");
    let all = futures_util::future::join_all((0..250).map(|n| {
        let ip = format!("172.20.{}.{}", n / 200, 1 + n % 200);
        create(&server, workload(&name(n), &ip))
    }));
    all.await;
    let replica = Replica::start(&server.client(), "only");
    wait_for_sizes(&server, &[50, 100, 100]).await;
    let before = slice_names(&server).await;
    let full_slice = &slices(&server)
        .await
        .into_iter()
        .find(|slice| slice.endpoints.len() == 100)
        .unwrap();
    let api = workloads(&server, "simple-app");
    for endpoint in &full_slice.endpoints[..60] {
        let name = endpoint.target_ref.as_ref().unwrap().name.as_deref().unwrap();
        api.delete(name, &DeleteParams::default()).await.unwrap();
    }
    wait_for_sizes(&server, &[40, 50, 100]).await;
    for n in 250..280 {
        create(&server, workload(&name(n), &format!("172.20.9.{}", n - 200))).await;
    }
    eventually("220 endpoints", async || {
        (slice_sizes(&server).await.iter().sum::<usize>() == 220).then_some(())
    })
    .await;
    assert_eq!(
        slice_names(&server).await,
        before,
        "new endpoints fill the gaps of existing slices"
    );
    let targets: BTreeSet<String> = slices(&server)
        .await
        .iter()
        .flat_map(|slice| slice.endpoints.clone())
        .map(|endpoint| endpoint.target_ref.unwrap().name.unwrap())
        .collect();
    assert_eq!(targets.len(), 220, "each once");

    // Other ports need other slices, which reuse the existing names.
    let mut service = guide_service();
    service["spec"]["ports"] = json!([{"name": "web", "port": 80, "protocol": "TCP"}]);
    apply(&server, &service).await;
    eventually("the ports have a name", async || {
        let named = |slice: &EndpointSlice| slice.ports.as_ref().unwrap()[0].name.as_deref() == Some("web");
        slices(&server).await.iter().all(named).then_some(())
    })
    .await;
    let after = slice_names(&server).await;
    assert!(after.is_subset(&before), "{after:?} of {before:?}");
    assert_eq!(slice_sizes(&server).await.iter().sum::<usize>(), 220);

    // A deleted slice is created again.
    let victim = after.first().unwrap();
    let api = Api::<EndpointSlice>::namespaced(server.client(), "simple-app");
    api.delete(victim, &DeleteParams::default()).await.unwrap();
    eventually("the deleted slice is created again", async || {
        (slice_sizes(&server).await.iter().sum::<usize>() == 220).then_some(())
    })
    .await;
    assert_eq!(
        replica.metric("workqueue_drops_total{name=\"endpoints_controller_workqueue\"}"),
        0.0
    );
    assert!(replica.metric("workqueue_adds_total{name=\"endpoints_controller_workqueue\"}") > 3.0);
    replica.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_leader_writes() {
    let server = api_server().await;
    let leader = Replica::start(&server.client(), "leader");
    wait_for_leader(&server, ENDPOINT_LEASE, "leader").await;
    let follower = Replica::start(&server.client(), "follower");
    apply(&server, &guide_service()).await;
    apply(&server, &workload("vm", "172.20.0.8")).await;
    wait_for_sizes(&server, &[1]).await;
    assert_eq!(
        follower.metric("workqueue_adds_total{name=\"endpoints_controller_workqueue\"}"),
        0.0
    );
    assert_eq!(
        follower.metric("leader_election_master_status{name=\"linkerd-destination-endpoint-write\"}"),
        0.0
    );
    leader.end().await;
    wait_for_leader(&server, ENDPOINT_LEASE, "follower").await;
    apply(&server, &workload("vm-2", "172.20.0.9")).await;
    wait_for_sizes(&server, &[2]).await;
    follower.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_being_deleted_is_not_written_to() {
    let server = api_server().await;
    let replica = Replica::start(&server.client(), "only");
    apply(&server, &guide_service()).await;
    let mut unselected = workload("vm", "172.20.0.8");
    unselected["metadata"]["labels"]["app"] = json!("other");
    create(&server, unselected).await;
    wait_for_leader(&server, ENDPOINT_LEASE, "only").await;
    // Without controllers the namespace stays in this state: objects can be changed but not created.
    server
        .kubectl(&["delete", "namespace", "simple-app", "--wait=false"])
        .await
        .unwrap();
    let services = Api::<Service>::namespaced(server.client(), "simple-app");
    let work = "workqueue_work_duration_seconds_count{name=\"endpoints_controller_workqueue\"}";
    let before = replica.metric(work);
    let selector = json!({"spec": {"selector": {"app": "other"}}});
    services
        .patch("simple-app-v1", &PatchParams::default(), &Patch::Merge(&selector))
        .await
        .unwrap();
    eventually("the controller has handled the service", async || {
        (replica.metric(work) > before).then_some(())
    })
    .await;
    let retries = "workqueue_retries_total{name=\"endpoints_controller_workqueue\"}";
    assert_eq!(replica.metric(retries), 0.0);
    assert_eq!(slice_sizes(&server).await, [0; 0]);
    replica.end().await;
}
