//! The churn of a day, compressed into a few minutes: rollouts, scaling, lost nodes and edits of policies.
//!
//! At the end, each subscriber must have the same state as a subscriber of a new process. The control plane must have as much
//! memory and as many tasks and streams as before the day.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::cluster;
use super::cluster::{Cluster, Endpoint, EndpointCondition, N_NODES, Pod};
use super::subscribers::{ReceivedState, Subscription};
use crate::scale::liveness;

/// Number of Services whose pods are never replaced, and whose inbound policies have subscribers.
const STABLE_SERVICES: usize = 20;

/// Changes per day of each Service after the first [`STABLE_SERVICES`].
const ROLLOUTS_PER_SERVICE: usize = 2;
const SCALINGS_PER_SERVICE: usize = 2;
/// Changes per day of each Service.
const POLICY_EDITS_PER_SERVICE: usize = 2;
/// Changes per day of the cluster.
const LOST_NODES: usize = 10;

/// Changes that are in progress at the same time.
const MAX_CONCURRENT_CHANGES: usize = 32;

const MIN_PODS_PER_SERVICE: usize = 5;
const MAX_PODS_PER_SERVICE: usize = 15;

/// Gauges that must not be larger after the day than before it.
const LEAK_GAUGES: [&str; 5] = [
    "tokio_rt_alive_tasks",
    "endpoints_subscribers",
    "profile_subscribers",
    "service_subscribers",
    "policy_subscribers",
];

#[derive(Clone, Copy, Debug)]
enum Change {
    Rollout { service: usize },
    Scaling { service: usize, n_pods: usize },
    PolicyEdit { service: usize, choice: usize },
    LostNode { node: usize },
}

/// The changes of a day, on objects of a cluster.
pub(super) struct Day {
    cluster: Cluster,
    workloads: Vec<Mutex<Workload>>,
    n_pods_created: AtomicUsize,
}

/// A Service and its pods.
struct Workload {
    service: usize,
    endpoints: Vec<Endpoint>,
    has_server: bool,
}

/// Returns the subscriptions that are open during the day.
pub(super) fn subscriptions(cluster: &Cluster, n_services: usize) -> Vec<Subscription> {
    let services = (0..n_services).flat_map(|service| {
        [
            Subscription::Endpoints { service, node: 0 },
            Subscription::Endpoints {
                service,
                node: N_NODES / 2,
            },
            Subscription::Profile { service },
            Subscription::OutboundPolicy { service },
        ]
    });
    let stable = (0..STABLE_SERVICES.min(n_services)).flat_map(|service| cluster.initial_endpoints(service));
    let inbound = stable.map(|endpoint| Subscription::InboundPolicy { pod: endpoint.pod });
    services.chain(inbound).collect()
}

/// Reads the gauges of `LEAK_GAUGES`, each as the sum of its series.
pub(super) async fn gauges(metrics_port: u16) -> anyhow::Result<BTreeMap<&'static str, f64>> {
    let (_, page) = liveness::fetch(metrics_port, "/metrics").await?;
    let sum = |name: &'static str| {
        let series = page.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        let values = series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        (name, values.sum())
    };
    Ok(LEAK_GAUGES.map(sum).into_iter().collect())
}

/// Compares the states of subscribers (`followed`) with the states that a new process sends (`new`). The error contains the first
/// differences.
pub(super) fn check_states_equal(
    followed: &BTreeMap<Subscription, ReceivedState>,
    new: &BTreeMap<Subscription, ReceivedState>,
) -> anyhow::Result<()> {
    let differing = followed
        .iter()
        .filter(|(subscription, state)| new.get(subscription) != Some(state));
    let differing: Vec<_> = differing.collect();
    let examples = differing.iter().take(2).map(|(subscription, state)| {
        let new = new.get(subscription);
        format!("{subscription:?}:\n  followed {state:?}\n  new {new:?}\n")
    });
    ensure!(
        differing.is_empty(),
        "{} of {} subscribers have another state than the subscribers of a new process, such as\n{}",
        differing.len(),
        followed.len(),
        examples.collect::<String>()
    );
    Ok(())
}

impl Day {
    pub(super) fn new(cluster: &Cluster, n_services: usize) -> Self {
        let workload = |service| Workload {
            service,
            endpoints: cluster.initial_endpoints(service),
            has_server: false,
        };
        Self {
            cluster: cluster.clone(),
            n_pods_created: AtomicUsize::new(cluster.n_pods()),
            workloads: (0..n_services).map(workload).map(Mutex::new).collect(),
        }
    }

    /// Creates a Server and an HTTPRoute for each Service.
    pub(super) async fn create_policies(&self) -> anyhow::Result<()> {
        for workload in &self.workloads {
            let mut workload = workload.lock().await;
            self.apply_server(&mut workload, PROTOCOLS[0]).await?;
            self.apply_route(&workload, 1).await?;
        }
        Ok(())
    }

    /// Makes the changes of a day within `duration`. `seed` determines the changes and their random times. Returns their number.
    pub(super) async fn run(self, duration: Duration, seed: u64) -> anyhow::Result<usize> {
        let changes = random_changes(self.workloads.len(), seed);
        let n_changes = changes.len();
        let start = Instant::now();
        let (day, permits) = (Arc::new(self), Arc::new(Semaphore::new(MAX_CONCURRENT_CHANGES)));
        let mut tasks = JoinSet::new();
        for (at, change) in changes {
            sleep_until(start + duration.mul_f64(at)).await;
            let (day, permit) = (day.clone(), permits.clone().acquire_owned().await?);
            tasks.spawn(async move {
                let _permit = permit;
                day.apply(change).await.with_context(|| format!("{change:?}"))
            });
            while let Some(result) = tasks.try_join_next() {
                result.context("a change panicked")??;
            }
        }
        while let Some(result) = tasks.join_next().await {
            result.context("a change panicked")??;
        }
        Ok(n_changes)
    }

    async fn apply(&self, change: Change) -> anyhow::Result<()> {
        match change {
            Change::Rollout { service } => {
                let mut workload = self.workloads[service].lock().await;
                for _ in 0..workload.endpoints.len() {
                    self.replace_pod(&mut workload, 0).await?;
                }
                Ok(())
            }
            Change::Scaling { service, n_pods } => self.scale(&mut *self.workloads[service].lock().await, n_pods).await,
            Change::PolicyEdit { service, choice } => {
                self.edit_policies(&mut *self.workloads[service].lock().await, choice)
                    .await
            }
            Change::LostNode { node } => self.lose_node(node).await,
        }
    }

    /// Replaces the pod of an endpoint, as the controllers do: the new pod is ready before the old one terminates.
    async fn replace_pod(&self, workload: &mut Workload, index: usize) -> anyhow::Result<()> {
        self.add_pod(workload).await?;
        self.remove_pod(workload, index).await
    }

    async fn add_pod(&self, workload: &mut Workload) -> anyhow::Result<()> {
        let pod = Pod {
            n: self.n_pods_created.fetch_add(1, Ordering::Relaxed),
            service: workload.service,
        };
        self.cluster.create_pod(pod).await?;
        workload.endpoints.push(Endpoint::ready(pod));
        self.write_endpoints(workload).await
    }

    async fn remove_pod(&self, workload: &mut Workload, index: usize) -> anyhow::Result<()> {
        workload.endpoints[index].condition = EndpointCondition::Terminating;
        self.write_endpoints(workload).await?;
        self.cluster.delete_pod(workload.endpoints[index].pod).await?;
        workload.endpoints.remove(index);
        self.write_endpoints(workload).await
    }

    async fn write_endpoints(&self, workload: &Workload) -> anyhow::Result<()> {
        self.cluster
            .write_endpoints(workload.service, &workload.endpoints)
            .await
    }

    async fn scale(&self, workload: &mut Workload, n_pods: usize) -> anyhow::Result<()> {
        while workload.endpoints.len() < n_pods {
            self.add_pod(workload).await?;
        }
        while workload.endpoints.len() > n_pods {
            self.remove_pod(workload, 0).await?;
        }
        Ok(())
    }

    /// Replaces the pods of a node after they have become not ready, except those of the stable Services.
    async fn lose_node(&self, node: usize) -> anyhow::Result<()> {
        for workload in self.workloads.iter().skip(STABLE_SERVICES) {
            let workload = &mut *workload.lock().await;
            let mut is_affected = false;
            for endpoint in workload
                .endpoints
                .iter_mut()
                .filter(|endpoint| endpoint.pod.node() == node)
            {
                endpoint.condition = EndpointCondition::NotReady;
                is_affected = true;
            }
            if !is_affected {
                continue;
            }
            self.write_endpoints(workload).await?;
            let lost = |endpoint: &Endpoint| endpoint.condition == EndpointCondition::NotReady;
            while let Some(index) = workload.endpoints.iter().position(lost) {
                self.replace_pod(workload, index).await?;
            }
        }
        Ok(())
    }

    /// Creates, changes or deletes a policy of a workload.
    ///
    /// Half of the edits set the Server's protocol. A sixth delete the Server; without a Server, they set the timeout of the
    /// route. A sixth set the timeout of the route. A twelfth set opaque ports, and a twelfth remove them.
    async fn edit_policies(&self, workload: &mut Workload, choice: usize) -> anyhow::Result<()> {
        match choice % 6 {
            0..3 => self.apply_server(workload, PROTOCOLS[choice % PROTOCOLS.len()]).await,
            3 if workload.has_server => {
                workload.has_server = false;
                self.cluster.delete_server(workload.service).await
            }
            3 | 4 => self.apply_route(workload, 1 + choice % 9).await,
            _ => {
                let opaque_ports = if choice % 4 == 1 { json!("80") } else { Value::Null };
                let path = format!(
                    "/api/v1/namespaces/scale/services/{}",
                    cluster::service_name(workload.service)
                );
                let annotations = json!({"config.linkerd.io/opaque-ports": opaque_ports});
                let patch = json!({"metadata": {"annotations": annotations}});
                self.cluster.patch(&path, &patch).await
            }
        }
    }

    async fn apply_server(&self, workload: &mut Workload, protocol: &str) -> anyhow::Result<()> {
        workload.has_server = true;
        self.cluster.apply_server(workload.service, protocol).await
    }

    async fn apply_route(&self, workload: &Workload, timeout_seconds: usize) -> anyhow::Result<()> {
        let service = cluster::service_name(workload.service);
        let path = format!("/apis/gateway.networking.k8s.io/v1/namespaces/scale/httproutes/{service}");
        self.cluster.apply(&path, &http_route(&service, timeout_seconds)).await
    }
}

fn http_route(service: &str, seconds: usize) -> Value {
    let port = 80;
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": service},
        "spec": {
            "parentRefs": [{"group": "", "kind": "Service", "name": service, "port": port}],
            "rules": [{
                "backendRefs": [{"name": service, "port": port}],
                "timeouts": {"request": format!("{seconds}s")},
            }],
        },
    })
}

/// Returns the changes of a day, each with its time as a fraction of the day.
fn random_changes(n_services: usize, seed: u64) -> Vec<(f64, Change)> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut changes = Vec::new();
    for service in 0..n_services {
        let is_stable = service < STABLE_SERVICES;
        for _ in 0..if is_stable { 0 } else { ROLLOUTS_PER_SERVICE } {
            changes.push(Change::Rollout { service });
        }
        for _ in 0..if is_stable { 0 } else { SCALINGS_PER_SERVICE } {
            let n_pods = rng.usize(MIN_PODS_PER_SERVICE..=MAX_PODS_PER_SERVICE);
            changes.push(Change::Scaling { service, n_pods });
        }
        for _ in 0..POLICY_EDITS_PER_SERVICE {
            let choice = rng.usize(..10_000);
            changes.push(Change::PolicyEdit { service, choice });
        }
    }
    for _ in 0..LOST_NODES {
        let node = rng.usize(..N_NODES);
        changes.push(Change::LostNode { node });
    }
    let mut changes: Vec<_> = changes.into_iter().map(|change| (rng.f64(), change)).collect();
    changes.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    changes
}

const PROTOCOLS: [&str; 4] = ["HTTP/1", "HTTP/2", "gRPC", "opaque"];
