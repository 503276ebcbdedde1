//! What the control plane writes into the cluster: EndpointSlices of external workloads, and statuses of policies.
//!
//! Of several replicas one writes each of the two: the one that holds the lease for it. The controllers hear what the
//! shared watches report, keep what they need of it (the objects themselves are shared with the cluster's state), and
//! compute what is missing by pure functions. A source without an API server has nowhere to write to, and needs none of
//! this.
//!
//! RBAC: `get`, `create` and `update` on `leases` of `coordination.k8s.io` in the namespace of the control plane, `get` on
//! `deployments` of `apps` there (who owns the leases), and what `slices` and `statuses` name.

mod metrics;
mod queue;
mod slices;
mod statuses;

use std::pin::Pin;
use std::time::Duration;

use ipnet::IpNet;
use kube::Client;
use tokio::sync::watch;
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use crate::kubernetes::lease::{self, Candidate, Timing};
use crate::resources::event::{Event, Writer};

#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the leases. Default `linkerd`.
    pub controller_namespace: String,
    /// The name under which this process holds leases: that of its pod.
    pub holder: String,
    /// The Deployment that the leases are deleted with. Default `linkerd-destination`.
    pub deployment: String,
    /// None where this process does not write EndpointSlices.
    pub slices: Option<Slices>,
    /// None where this process does not write statuses.
    pub statuses: Option<Statuses>,
}

#[derive(Clone, Copy, Debug)]
pub struct Slices;

#[derive(Clone, Debug)]
pub struct Statuses {
    /// Networks that an EgressNetwork must not claim. Default 10/8, 100.64/10, 172.16/12, 192.168/16.
    pub cluster_networks: Vec<IpNet>,
    /// Namespace of the EgressNetworks that hold for namespaces without their own. Default `linkerd-egress`.
    pub global_egress_namespace: String,
    /// How long one patch may take. Default 5 s.
    pub patch_timeout: Duration,
}

/// Something to be run until the drain; without it the process is of no use.
pub struct Task {
    pub name: &'static str,
    pub run: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Puts the controllers beside whoever takes the source's events now. Returns what the source writes into instead, and
/// the tasks to be run.
pub fn attach(
    client: &Client,
    config: Config,
    writer: Writer,
    registry: &Registry,
    drain: &Watch,
) -> (Writer, Vec<Task>) {
    let mut tasks = Vec::new();
    let (synced, is_synced) = watch::channel(false);
    let mut writer = writer.tee(
        |event| matches!(event, Event::Synced),
        Writer::new(move |_| {
            synced.send_replace(true);
        }),
    );
    let lease = |name, timing| lease::Config {
        namespace: config.controller_namespace.clone(),
        name,
        holder: config.holder.clone(),
        field_manager: None,
        owner: Some(config.deployment.clone()),
        timing,
    };
    if config.slices.is_some() {
        let controller = slices::Controller::new(client.clone(), registry);
        writer = writer.tee(slices::Controller::wants, controller.writer());
        let lease = lease("linkerd-destination-endpoint-write", Timing::FREQUENT);
        let (candidate, leadership) = lease::candidate(client, lease, registry);
        tasks.push(Task::new(
            "holding the lease for EndpointSlices",
            campaign(candidate, is_synced.clone(), drain.clone()),
        ));
        tasks.push(Task::new(
            "writing EndpointSlices",
            until(drain.clone(), controller.run(leadership)),
        ));
    }
    if let Some(settings) = config.statuses {
        let controller = statuses::Controller::new(client.clone(), settings, registry);
        writer = writer.tee(statuses::Controller::wants, controller.writer());
        let lease = lease::Config {
            field_manager: Some("policy-controller"),
            ..lease("policy-controller-write", Timing::SPARSE)
        };
        let (candidate, leadership) = lease::candidate(client, lease, registry);
        tasks.push(Task::new(
            "holding the lease for statuses",
            campaign(candidate, is_synced, drain.clone()),
        ));
        tasks.push(Task::new(
            "writing statuses",
            until(drain.clone(), controller.run(leadership)),
        ));
    }
    (writer, tasks)
}

impl Task {
    fn new(name: &'static str, run: impl Future<Output = ()> + Send + 'static) -> Self {
        Self {
            name,
            run: Box::pin(run),
        }
    }
}

/// Campaigns once this process knows the cluster: before, what it has not heard of would look deleted.
async fn campaign(candidate: Candidate, mut is_synced: watch::Receiver<bool>, drain: Watch) {
    let synced = async {
        if is_synced.wait_for(|synced| *synced).await.is_err() {
            // There is no source any more, and the end is near.
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = drain.signaled() => return,
        () = synced => {}
    }
    candidate.run(drain).await;
}

async fn until(drain: Watch, run: impl Future<Output = ()>) {
    tokio::select! {
        () = drain.signaled() => {}
        () = run => {}
    }
}
