//! Writes to the API server: EndpointSlices of external workloads, and statuses of policies, routes and external workloads.
//!
//! Each of the two is written by one replica, the holder of its lease. The controllers receive the events of the shared
//! watches, keep shared references to the objects, and compute the changes with pure functions. A directory of manifests
//! has no statuses, and nothing is written: [`add_status_report`] counts and logs what the statuses would report.
//!
//! RBAC: `get`, `create` and `update` on `leases` of `coordination.k8s.io` in the namespace of the control plane, `get`
//! on `deployments` of `apps` there (the owners of the leases), and the rules in `slices` and `statuses`.

pub mod config;
mod metrics;
mod queue;
mod slices;
mod statuses;

use std::pin::Pin;

use kube::Client;
use tokio::sync::watch;
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use crate::cluster::Cluster;
use crate::kubernetes::lease::timing::LeaseTiming;
use crate::kubernetes::lease::{self, Candidate};
use crate::resources::event::{Event, EventSink};
use crate::writeback::config::{Config, StatusesConfig};
use crate::writeback::slices::service_ports_report::UndeclaredPortsReport;
use crate::writeback::statuses::report::StatusReport;

/// A task that runs until the drain. The process fails if it ends earlier.
pub struct Task {
    pub name: &'static str,
    pub run: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Adds the controllers to the sink of the source's events. Returns the combined sink and the tasks to run.
pub fn add_controllers(
    client: &Client,
    config: Config,
    sink: EventSink,
    registry: &Registry,
    drain: &Watch,
) -> (EventSink, Vec<Task>) {
    let mut tasks = Vec::new();
    let (synced_sender, synced) = watch::channel(false);
    let mut sink = sink.tee(
        |event| matches!(event, Event::Synced),
        EventSink::new(move |_| {
            synced_sender.send_replace(true);
        }),
    );
    let lease = |name: &str, timing| lease::Config {
        namespace: config.controller_namespace.clone(),
        name: name.to_owned(),
        holder: config.lease_holder.clone(),
        field_manager: None,
        owner: Some(config.lease_owner_deployment.clone()),
        timing,
    };
    if config.write_slices {
        let controller = slices::Controller::new(client.clone(), registry);
        sink = sink.tee(slices::Controller::handles, controller.sink());
        let lease = lease("linkerd-destination-endpoint-write", LeaseTiming::FREQUENT);
        let (candidate, leadership) = lease::new_candidate(client, lease, registry);
        tasks.push(Task::new(
            "competing for the lease for EndpointSlices",
            run_candidate_after_sync(candidate, synced.clone(), drain.clone()),
        ));
        tasks.push(Task::new(
            "writing EndpointSlices",
            run_until_drain(drain.clone(), controller.run(leadership)),
        ));
    }
    if let Some(settings) = config.statuses {
        let controller = statuses::Controller::new(client.clone(), settings, registry);
        sink = sink.tee(statuses::Controller::handles, controller.sink());
        let lease = lease::Config {
            field_manager: Some("policy-controller"),
            ..lease("policy-controller-write", LeaseTiming::SPARSE)
        };
        let (candidate, leadership) = lease::new_candidate(client, lease, registry);
        tasks.push(Task::new(
            "competing for the lease for statuses",
            run_candidate_after_sync(candidate, synced, drain.clone()),
        ));
        tasks.push(Task::new(
            "writing statuses",
            run_until_drain(drain.clone(), controller.run(leadership)),
        ));
    }
    (sink, tasks)
}

/// Adds a report to the sink of a source without statuses. The parts of objects that are unserved because of other objects are
/// counted in the metric `unserved_configuration` of the cluster, and logged.
pub fn add_status_report(cluster: &Cluster, settings: StatusesConfig, sink: EventSink) -> EventSink {
    let report = StatusReport::new(cluster.clone(), settings);
    add_undeclared_ports_report(cluster, sink.tee(statuses::Controller::handles, report.sink()))
}

/// Adds a report to the sink of a source. The ports of Services that a selected external workload does not declare are counted
/// and logged, as in [`add_status_report`].
pub fn add_undeclared_ports_report(cluster: &Cluster, sink: EventSink) -> EventSink {
    let report = UndeclaredPortsReport::new(cluster.clone());
    sink.tee(UndeclaredPortsReport::handles, report.sink())
}

impl Task {
    fn new(name: &'static str, run: impl Future<Output = ()> + Send + 'static) -> Self {
        Self {
            name,
            run: Box::pin(run),
        }
    }
}

/// Starts leader election after the source has synced. Before that, objects not yet listed would look deleted.
async fn run_candidate_after_sync(candidate: Candidate, mut synced: watch::Receiver<bool>, drain: Watch) {
    let sync = async {
        if synced.wait_for(|synced| *synced).await.is_err() {
            // The source has ended, so the process is about to end.
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = drain.signaled() => return,
        () = sync => {}
    }
    candidate.run(drain).await;
}

async fn run_until_drain(drain: Watch, run: impl Future<Output = ()>) {
    tokio::select! {
        () = drain.signaled() => {}
        () = run => {}
    }
}
