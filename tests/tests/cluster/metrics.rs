//! The metrics of the control plane change in a cluster when their events happen; those in `CONSTANT_METRICS` only exist.

use std::collections::BTreeMap;
use std::fs;

use anyhow::ensure;
use tulle_tests::cluster::Cluster;

/// The metrics pages at one time, by component.
pub(crate) struct MetricsSnapshot(BTreeMap<&'static str, String>);

impl MetricsSnapshot {
    /// Reads the page of the first pod of each component.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub(crate) async fn read(cluster: &Cluster) -> anyhow::Result<Self> {
        let mut pages = BTreeMap::new();
        for (component, port) in [("destination", 9996), ("identity", 9990), ("proxy-injector", 9995)] {
            let selector = format!("linkerd.io/control-plane-component={component}");
            let path = "jsonpath={.items[0].metadata.name}";
            let pod = cluster
                .kubectl(&["get", "pod", "-n", "linkerd", "-l", &selector, "-o", path])
                .await?;
            let path = format!("/api/v1/namespaces/linkerd/pods/{pod}:{port}/proxy/metrics");
            pages.insert(component, cluster.kubectl(&["get", "--raw", &path]).await?);
        }
        Ok(Self(pages))
    }

    /// The series of a metric and their values.
    fn series(&self, component: &str, metric: &str) -> BTreeMap<&str, &str> {
        let of_metric = |line: &&str| {
            let rest = line.strip_prefix(metric);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
        };
        let lines = self.0[component].lines().filter(of_metric);
        lines.filter_map(|line| line.rsplit_once(' ')).collect()
    }
}

/// Causes changes of the metrics that the tutorial leaves unchanged, and waits for all of them.
pub(crate) async fn wait_for_all_changes(cluster: &Cluster, before: &MetricsSnapshot) {
    let kubectl = async |args: &[&str]| cluster.kubectl(args).await.unwrap();
    let path = "jsonpath={.items[0].status.podIP}";
    let ip = kubectl(&["get", "pods", "-n", "quickstart", "-l", "app=web", "-o", path]).await;
    // This load makes a proxy subscribe to the profile of the address until the function ends.
    let mut load = cluster.command("kubectl").unwrap();
    load.args([
        "exec",
        "-n",
        "quickstart",
        "deploy/client",
        "-c",
        "client",
        "--",
        "/tulle-bench",
        "load",
    ])
    .args([&format!("{ip}:8080"), "--rate=5", "--duration=300s"])
    .kill_on_drop(true);
    let _load = load.spawn().unwrap();
    let is_subscribed = async || {
        let pages = MetricsSnapshot::read(cluster).await?;
        let series = format!("workload_subscribers{{ip=\"{ip}\",port=\"8080\"}}");
        ensure!(
            pages
                .series("destination", "workload_subscribers")
                .contains_key(&*series),
            "no {series}"
        );
        Ok(())
    };
    cluster
        .wait_until("a proxy subscribes to the address", is_subscribed)
        .await
        .unwrap();

    let file = cluster.dir().join("profile.yaml");
    fs::write(&file, OBJECTS).unwrap();
    kubectl(&["apply", "-f", file.to_str().unwrap()]).await;
    // This changes endpoints, their profiles, and the policies that proxies watch.
    let opaque = r#"{"spec": {"proxyProtocol": "opaque"}}"#;
    kubectl(&[
        "patch",
        "-n",
        "quickstart",
        "server/web-http",
        "--type=merge",
        "-p",
        opaque,
    ])
    .await;
    kubectl(&["label", "-n", "quickstart", "pod", "-l", "app=web", "tier=front"]).await;

    let all_changed = async || {
        let pages = MetricsSnapshot::read(cluster).await?;
        let unchanged = CHANGING_METRICS.iter().flat_map(|(component, metrics)| {
            let is_unchanged = |metric: &&&str| {
                let series = pages.series(component, metric);
                series.is_empty() || series == before.series(component, metric)
            };
            metrics
                .iter()
                .filter(is_unchanged)
                .map(move |metric| format!("{component}: {metric}"))
        });
        let unchanged: Vec<_> = unchanged.collect();
        ensure!(unchanged.is_empty(), "did not change:\n{}", unchanged.join("\n"));
        for (component, metrics) in CONSTANT_METRICS {
            for metric in *metrics {
                ensure!(
                    !pages.series(component, metric).is_empty(),
                    "{component} does not show {metric}"
                );
            }
        }
        Ok(())
    };
    cluster.wait_until("every metric changes", all_changed).await.unwrap();
}

const CHANGING_METRICS: &[(&str, &[&str])] = &[
    (
        "destination",
        &[
            "endpoints_cache_size",
            "endpointslices_cache_size",
            "pod_cache_size",
            "service_cache_size",
            "serviceprofile_cache_size",
            "server_cache_size",
            "externalworkload_cache_size",
            "replicaset_cache_size",
            "job_cache_size",
            "endpointslices_informer_lag_seconds_count",
            "services_informer_lag_seconds_count",
            "servers_informer_lag_seconds_count",
            "pods_informer_lag_seconds_count",
            "externalworkload_informer_lag_seconds_count",
            "serviceprofiles_informer_lag_seconds_count",
            "endpoints_subscribers",
            "endpoints_updates",
            "endpoints_pods",
            "endpoints_exists",
            "workload_subscribers",
            "workload_updates",
            "profile_subscribers",
            "profile_updates",
            "service_subscribers",
            "workqueue_adds_total",
            "workqueue_queue_duration_seconds_count",
            "workqueue_work_duration_seconds_count",
            "grpc_server_started_total",
            "grpc_server_handled_total",
            "grpc_server_msg_received_total",
            "grpc_server_msg_sent_total",
            "grpc_server_handling_seconds_count",
            "http_server_requests_total",
            "http_server_request_latency_seconds_count",
            "http_server_response_size_bytes_count",
            "http_client_requests_total",
            "http_client_request_latency_seconds_count",
            "resource_status_patches_total",
            "resource_status_patch_dequeues_total",
            "resource_status_patch_enqueues_total",
            "resource_status_patch_duration_seconds_count",
            "inbound_index_meshtls_authentication_index_size",
            "inbound_index_network_authentication_index_size",
            "inbound_index_pod_index_size",
            "inbound_index_external_workload_index_size",
            "inbound_index_server_index_size",
            "inbound_index_server_authorization_index_size",
            "inbound_index_authorization_policy_index_size",
            "inbound_index_http_route_index_size",
            "outbound_index_service_index_size",
            "outbound_index_service_info_index_size",
            "outbound_index_service_route_index_size",
            "outbound_index_service_port_route_index_size",
            "process_cpu_seconds_total",
        ],
    ),
    (
        "identity",
        &[
            "issuer_cert_ttl_seconds",
            "grpc_server_started_total",
            "grpc_server_handled_total",
            "grpc_server_handling_seconds_count",
            "http_client_requests_total",
        ],
    ),
    (
        "proxy-injector",
        &[
            "namespace_cache_size",
            "replicaset_cache_size",
            "job_cache_size",
            "proxy_inject_admission_requests_total",
            "proxy_inject_admission_responses_total",
            "http_server_requests_total",
            "http_server_request_latency_seconds_count",
            "http_client_requests_total",
        ],
    ),
];

/// Metrics that do not change here: settings, nodes, gauges of short activity, and counts of failures.
const CONSTANT_METRICS: &[(&str, &[&str])] = &[(
    "destination",
    &[
        "node_cache_size",
        "http_client_errors_total",
        "http_client_qps",
        "http_client_burst",
        "http_client_in_flight_requests",
        "workqueue_depth",
        "workqueue_retries_total",
        "workqueue_drops_total",
        "workqueue_unfinished_work_seconds",
        "workqueue_longest_running_processor_seconds",
        "resource_status_patch_api_errors_total",
        "resource_status_patch_timeouts_total",
        "resource_status_patch_drops_total",
        "resource_status_patch_enqueue_overflows_total",
    ],
)];

const OBJECTS: &str = "
apiVersion: linkerd.io/v1alpha2
kind: ServiceProfile
metadata: {name: web.quickstart.svc.cluster.local, namespace: quickstart}
spec: {routes: [{name: all, condition: {pathRegex: '/.*'}}]}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {name: all, namespace: quickstart}
spec: {identities: ['*']}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {name: all, namespace: quickstart}
spec: {networks: [{cidr: 0.0.0.0/0}]}
---
apiVersion: policy.linkerd.io/v1beta1
kind: ServerAuthorization
metadata: {name: all, namespace: quickstart}
spec: {server: {name: web-http}, client: {meshTLS: {identities: ['*']}}}
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: all, namespace: quickstart}
spec: {parentRefs: [{name: web, kind: Service, group: core, port: 80}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, namespace: quickstart}
spec: {meshTLS: {identity: 'spiffe://cluster.local/vm', serverName: vm}, workloadIPs: [{ip: 192.0.2.10}]}
---
apiVersion: batch/v1
kind: Job
metadata: {name: ends, namespace: quickstart}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{name: app, image: 'ghcr.io/tulle-mesh/bench:0.1.0', args: [--version]}]
";
