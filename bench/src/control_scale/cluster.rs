//! Test objects on an API server: Services, EndpointSlices, Servers, and pods whose nodes do not exist.

use std::io;
use std::path::Path;

use futures_util::{Stream, StreamExt as _, stream};
use http::Method;
use serde_json::{Value, json};

use super::streams::Address;
use crate::scale::{ApiClient, run_concurrently};

/// Numbers of objects.
#[derive(Clone, Copy, Debug)]
pub(super) struct ObjectCounts {
    pub(super) services: usize,
    /// Endpoints of each Service.
    pub(super) endpoints: usize,
    /// Pods that belong to no Service.
    pub(super) other_pods: usize,
    /// Endpoints of the Service `rollout`, which is not counted in `services`.
    pub(super) rollout_endpoints: usize,
}

#[derive(Clone)]
pub(super) struct Cluster {
    client: ApiClient,
    counts: ObjectCounts,
}

impl Cluster {
    pub(super) async fn connect(kubeconfig: &Path, counts: ObjectCounts) -> anyhow::Result<Self> {
        let client = ApiClient::connect(kubeconfig).await?;
        Ok(Self { client, counts })
    }

    /// Creates all objects, with up to 32 concurrent requests.
    pub(super) async fn create_objects(&self) -> anyhow::Result<()> {
        self.post("/api/v1/namespaces", &json!({"metadata": {"name": "scale"}}))
            .await?;
        let services = 0..self.counts.services;
        self.post_all(
            services
                .clone()
                .map(|n| ("/api/v1/namespaces/scale/services", service_manifest(&service_name(n)))),
        )
        .await?;
        let slices = services.map(|n| (SLICES_PATH, slice_of_service(n, &self.initial_endpoints(n))));
        self.post_all(slices).await?;
        if self.counts.rollout_endpoints > 0 {
            self.create_rollout_service().await?;
        }
        let n_pods = self.n_pods();
        // The API server does not admit a pod without a service account.
        let accounts = (0..n_pods.div_ceil(self.counts.endpoints)).map(|n| {
            let path = "/api/v1/namespaces/scale/serviceaccounts";
            (path, json!({"metadata": {"name": app_name(n)}}))
        });
        self.post_all(accounts).await?;
        let pods = stream::iter(0..n_pods).map(|n| self.create_pod(self.initial_pod(n)));
        run_concurrently(pods).await
    }

    pub(super) fn n_pods(&self) -> usize {
        self.counts.first_rollout_pod() + self.counts.rollout_endpoints
    }

    /// The n-th pod. The first pods belong to the Services in order, `endpoints` to each. For the remaining pods (`other_pods` and
    /// those of `rollout`), the field `service` is a number beyond that of the last Service.
    pub(super) fn initial_pod(&self, n: usize) -> Pod {
        let service = n / self.counts.endpoints;
        Pod { n, service }
    }

    /// Creates a pod with the status of a running one.
    pub(super) async fn create_pod(&self, pod: Pod) -> anyhow::Result<()> {
        self.post(PODS_PATH, &pod.manifest()).await?;
        let path = format!("{PODS_PATH}/{}/status", pod.name());
        self.send(Method::PATCH, &path, &pod.status()).await
    }

    pub(super) async fn delete_pod(&self, pod: Pod) -> anyhow::Result<()> {
        let now = json!({"gracePeriodSeconds": 0});
        self.send(Method::DELETE, &format!("{PODS_PATH}/{}", pod.name()), &now)
            .await
    }

    /// Writes the EndpointSlice of a Service.
    pub(super) async fn write_endpoints(&self, service: usize, endpoints: &[Endpoint]) -> anyhow::Result<()> {
        let path = format!("{SLICES_PATH}/{}-x", service_name(service));
        self.send(Method::PUT, &path, &slice_of_service(service, endpoints))
            .await
    }

    /// Creates or replaces an object by server-side apply.
    pub(super) async fn apply(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        self.client.apply(path, object).await
    }

    pub(super) async fn patch(&self, path: &str, patch: &Value) -> anyhow::Result<()> {
        self.send(Method::PATCH, path, patch).await
    }

    /// Creates or replaces the Server for the pods of a Service.
    pub(super) async fn apply_server(&self, service: usize, protocol: &str) -> anyhow::Result<()> {
        self.apply(&server_path(service), &server_manifest(service, protocol))
            .await
    }

    pub(super) async fn delete_server(&self, service: usize) -> anyhow::Result<()> {
        self.send(Method::DELETE, &server_path(service), &json!({})).await
    }

    async fn create_rollout_service(&self) -> anyhow::Result<()> {
        self.post("/api/v1/namespaces/scale/services", &service_manifest(ROLLOUT_SERVICE))
            .await?;
        for slice in self.rollout_slices() {
            self.post(SLICES_PATH, &slice.manifest()).await?;
        }
        Ok(())
    }

    /// The EndpointSlices of the Service `rollout`, with the addresses of its pods.
    pub(super) fn rollout_slices(&self) -> Vec<RolloutSlice> {
        let first = self.counts.first_rollout_pod();
        let pods: Vec<usize> = (first..first + self.counts.rollout_endpoints).collect();
        let slices = pods
            .chunks(MAX_ENDPOINTS_PER_SLICE)
            .enumerate()
            .map(|(n, pods)| RolloutSlice {
                n,
                endpoints: pods.iter().map(|&pod| Endpoint::ready(self.initial_pod(pod))).collect(),
            });
        slices.collect()
    }

    pub(super) async fn write_slice(&self, slice: &RolloutSlice) -> anyhow::Result<()> {
        self.send(
            Method::PUT,
            &format!("{SLICES_PATH}/{ROLLOUT_SERVICE}-{}", slice.n),
            &slice.manifest(),
        )
        .await
    }

    /// Replaces the address of the first endpoint of a Service, with the same update that the EndpointSlice controller sends.
    pub(super) async fn replace_first_endpoint(&self, service: usize, addr: Address) -> anyhow::Result<()> {
        let mut endpoints = self.initial_endpoints(service);
        if let Some(first) = endpoints.first_mut() {
            first.ip = addr.to_string();
        }
        self.write_endpoints(service, &endpoints).await
    }

    pub(super) fn initial_endpoints(&self, service: usize) -> Vec<Endpoint> {
        let first = service * self.counts.endpoints;
        let pods = first..first + self.counts.endpoints;
        pods.map(|n| Endpoint::ready(self.initial_pod(n))).collect()
    }

    /// Watches the EndpointSlices. Each item is one line of JSON: first the existing objects, then changes.
    pub(super) async fn watch(&self) -> anyhow::Result<impl Stream<Item = io::Result<String>> + Send + use<>> {
        self.client.watch(SLICES_PATH).await
    }

    async fn post_all(&self, objects: impl Iterator<Item = (&'static str, Value)>) -> anyhow::Result<()> {
        run_concurrently(stream::iter(objects).map(async |(path, object)| self.post(path, &object).await)).await
    }

    async fn post(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        self.send(Method::POST, path, object).await
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> anyhow::Result<()> {
        self.client.send(method, path, body).await
    }
}

impl ObjectCounts {
    fn first_rollout_pod(&self) -> usize {
        self.services * self.endpoints + self.other_pods
    }
}

/// An EndpointSlice of the Service `rollout`.
pub(super) struct RolloutSlice {
    n: usize,
    endpoints: Vec<Endpoint>,
}

impl RolloutSlice {
    pub(super) fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Gives the endpoint at this index another address, as if its pod had been replaced.
    pub(super) fn replace_address(&mut self, index: usize, addr: Address) {
        self.endpoints[index].ip = addr.to_string();
    }

    fn manifest(&self) -> Value {
        let endpoints = self.endpoints.iter().map(Endpoint::manifest);
        endpoint_slice(
            &format!("{ROLLOUT_SERVICE}-{}", self.n),
            ROLLOUT_SERVICE,
            &endpoints.collect::<Vec<_>>(),
        )
    }
}

fn service_manifest(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
        },
    })
}

/// A Server for the pods of a Service.
fn server_manifest(service: usize, protocol: &str) -> Value {
    let app = app_name(service);
    json!({
        "apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server", "metadata": {"name": app},
        "spec": {"podSelector": {"matchLabels": {"app": app}}, "port": 8080, "proxyProtocol": protocol},
    })
}

/// A pod. Its number is unique, and determines its name, address and node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pod {
    pub(super) n: usize,
    pub(super) service: usize,
}

/// An endpoint of a slice.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    pub(super) pod: Pod,
    ip: String,
    pub(super) condition: EndpointCondition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndpointCondition {
    Ready,
    NotReady,
    Terminating,
}

impl Endpoint {
    pub(super) fn ready(pod: Pod) -> Self {
        Self {
            pod,
            ip: pod_ip(pod.n),
            condition: EndpointCondition::Ready,
        }
    }

    fn manifest(&self) -> Value {
        let n = self.pod.n;
        let (is_ready, is_terminating) = (
            self.condition == EndpointCondition::Ready,
            self.condition == EndpointCondition::Terminating,
        );
        json!({
            "addresses": [self.ip],
            "conditions": {"ready": is_ready, "serving": is_ready || is_terminating, "terminating": is_terminating},
            "nodeName": node_name(n),
            "zone": ZONES[n % ZONES.len()],
            "targetRef": {"kind": "Pod", "namespace": "scale", "name": self.pod.name()},
        })
    }
}

fn server_path(service: usize) -> String {
    format!(
        "/apis/policy.linkerd.io/v1beta3/namespaces/scale/servers/{}",
        app_name(service)
    )
}

/// The only EndpointSlice of a Service.
fn slice_of_service(service: usize, endpoints: &[Endpoint]) -> Value {
    let endpoints: Vec<Value> = endpoints.iter().map(Endpoint::manifest).collect();
    let service = service_name(service);
    endpoint_slice(&format!("{service}-x"), &service, &endpoints)
}

fn endpoint_slice(name: &str, service: &str, endpoints: &[Value]) -> Value {
    json!({
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

impl Pod {
    pub(super) fn name(self) -> String {
        format!("{}-5d59c8f6b7-{:05}", app_name(self.service), self.n)
    }

    pub(super) fn node(self) -> usize {
        self.n % N_NODES
    }

    /// A pod with an injected proxy, reduced to the fields that the control plane reads or stores.
    fn manifest(self) -> Value {
        let variables = [
            ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "[::]:4143"),
            ("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "[::]:4191"),
            ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "[::]:4190"),
            ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140"),
        ];
        let env: Vec<Value> = variables
            .iter()
            .map(|(name, value)| json!({"name": name, "value": value}))
            .collect();
        let probe = json!({"httpGet": {"path": "/ready", "port": 4191}});
        let app = app_name(self.service);
        json!({
            "metadata": {
                "name": self.name(),
                "labels": {
                    "app": app,
                    "pod-template-hash": "5d59c8f6b7",
                    "linkerd.io/control-plane-ns": "linkerd",
                    "linkerd.io/proxy-deployment": app,
                    "linkerd.io/workload-ns": "scale",
                },
                "annotations": {"linkerd.io/inject": "enabled", "linkerd.io/created-by": "linkerd/proxy-injector"},
                "ownerReferences": [{
                    "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{app}-5d59c8f6b7"),
                    "uid": "3d2a8d5e-9f57-4c1e-8f5a-1c8f2b6a7d10", "controller": true,
                }],
            },
            "spec": {
                "nodeName": node_name(self.n),
                "serviceAccountName": app,
                "initContainers": [{
                    "name": "linkerd-proxy", "image": "proxy", "restartPolicy": "Always", "env": env,
                    "ports": [
                        {"name": "linkerd-proxy", "containerPort": 4143},
                        {"name": "linkerd-admin", "containerPort": 4191},
                    ],
                    "livenessProbe": {"httpGet": {"path": "/live", "port": 4191}},
                    "readinessProbe": probe,
                }],
                "containers": [{
                    "name": "app", "image": "app", "ports": [{"name": "http", "containerPort": 8080}],
                    "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}},
                }],
            },
        })
    }

    fn status(self) -> Value {
        let n = self.n;
        json!({"status": {
            "phase": "Running",
            "podIP": pod_ip(n), "podIPs": [{"ip": pod_ip(n)}],
            "hostIP": host_ip(n), "hostIPs": [{"ip": host_ip(n)}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }})
    }
}

pub(super) fn service_name(n: usize) -> String {
    format!("svc-{n}")
}

/// Name of the workload and the service account of a Service.
fn app_name(service: usize) -> String {
    format!("app-{service}")
}

fn node_name(n: usize) -> String {
    format!("node-{}", n % N_NODES)
}

fn pod_ip(n: usize) -> String {
    format!("10.{}.{}.{}", 100 + n / 62500, n / 250 % 250, 1 + n % 250)
}

fn host_ip(n: usize) -> String {
    format!("192.168.0.{}", 1 + n % N_NODES)
}

pub(super) const N_NODES: usize = 100;
const ZONES: [&str; 3] = ["a", "b", "c"];
const PODS_PATH: &str = "/api/v1/namespaces/scale/pods";
const SLICES_PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/scale/endpointslices";
/// The Service whose pods are all replaced by the load `rollout`.
pub(super) const ROLLOUT_SERVICE: &str = "rollout";
/// The default limit of the EndpointSlice controller.
const MAX_ENDPOINTS_PER_SLICE: usize = 100;
