//! Writes EndpointSlices for external workloads: for each Service with a selector, the selected workloads of its
//! namespace. The slices are separate from those that Kubernetes writes for pods.
//!
//! Objects come from the shared watches. Each change queues the affected Services, and one worker reconciles one
//! Service at a time while this process is the leader. Failed writes are retried 15 times with backoff. A slice that
//! another client changes or deletes is restored.
//!
//! RBAC: `create`, `update` and `delete` on `endpointslices` of `discovery.k8s.io`, in addition to the rules of the
//! watches.

mod index;
mod reconcile;
pub(in crate::writeback) mod service_ports_report;
#[cfg(test)]
mod tests;
mod write_tracker;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, Error};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, error, trace, warn};
use tulle_core::metrics::Registry;

use crate::kubernetes::lease::{Leadership, Role};
use crate::resources::event::{Event, EventSink};
use crate::resources::meta::NamespacedName;
use crate::resources::{Kind, Object};
use crate::writeback::metrics::QueueMetrics;
use crate::writeback::queue::{FailureOutcome, MAX_RETRIES, WorkQueue};
use crate::writeback::slices::index::{ReconcileInputs, SliceIndex};
use crate::writeback::slices::reconcile::{Plan, reconcile};
use crate::writeback::slices::write_tracker::WriteTracker;

/// The controller. Clones share their state.
#[derive(Clone)]
pub(super) struct Controller(Arc<Shared>);

struct Shared {
    client: Client,
    metrics: QueueMetrics,
    state: Mutex<State>,
    /// Notified when a name is queued.
    queue_changed: Notify,
}

#[derive(Default)]
struct State {
    index: SliceIndex,
    /// `None` while another process is the leader.
    queue: Option<WorkQueue>,
}

#[derive(Debug, thiserror::Error)]
enum SyncError {
    /// Has the message of Linkerd, so that searches for it find this error. What Linkerd calls an informer is a reflector here.
    #[error("EndpointSlice informer cache is out of date")]
    Stale,
    #[error("{verb} the EndpointSlice {slice}")]
    Api {
        verb: &'static str,
        slice: NamespacedName,
        #[source]
        source: Box<Error>,
    },
    #[error("{verb} the EndpointSlice {slice} took longer than {REQUEST_TIMEOUT:?}")]
    Timeout { verb: &'static str, slice: NamespacedName },
}

impl Controller {
    pub(super) fn new(client: Client, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            client,
            metrics: QueueMetrics::new(registry, "endpoints_controller_workqueue"),
            state: Mutex::default(),
            queue_changed: Notify::new(),
        }))
    }

    pub(super) fn sink(&self) -> EventSink {
        let controller = self.clone();
        EventSink::new(move |events| controller.apply(events))
    }

    pub(super) fn handles(event: &Event) -> bool {
        let handles_kind = |kind| matches!(kind, Kind::Service | Kind::ExternalWorkload | Kind::EndpointSlice);
        event.kind().is_some_and(handles_kind)
    }

    fn apply(&self, events: Vec<Event>) {
        let state = &mut *self.0.state.lock();
        let mut affected = BTreeSet::new();
        for event in events {
            affected.extend(match event {
                Event::Applied(Object::Service(service)) => state.index.apply_service(&service),
                Event::Applied(Object::ExternalWorkload(workload)) => state.index.apply_workload(&workload),
                Event::Applied(Object::EndpointSlice(slice)) => state.index.apply_slice(&slice),
                Event::Deleted(Kind::Service, name) => state.index.delete_service(&name),
                Event::Deleted(Kind::ExternalWorkload, name) => state.index.delete_workload(&name),
                Event::Deleted(Kind::EndpointSlice, name) => state.index.delete_slice(&name),
                Event::Applied(_) | Event::Deleted(..) | Event::Unreadable(_) | Event::Synced => continue,
            });
        }
        self.enqueue(state, affected);
    }

    fn enqueue(&self, state: &mut State, services: BTreeSet<NamespacedName>) {
        let Some(queue) = &mut state.queue else { return };
        let now = Instant::now();
        for service in services
            .into_iter()
            .filter(|service| &*service.namespace != SKIPPED_NAMESPACE)
        {
            if queue.add(service, now) {
                self.0.metrics.adds.inc();
            }
        }
        self.record_queue_depth(queue);
        self.0.queue_changed.notify_one();
    }

    fn record_queue_depth(&self, queue: &WorkQueue) {
        self.0.metrics.depth.set(i64::try_from(queue.len()).unwrap_or(i64::MAX));
    }

    /// Reconciles while this process is the leader. Never returns.
    pub(super) async fn run(self, mut leadership: Leadership) {
        let mut role = leadership.role();
        loop {
            match role {
                Role::Leader => {
                    self.start_leading();
                    role = tokio::select! {
                        // Cancelling a request is safe: it was sent while we were the leader. An update has the resource version
                        // that it replaces; the next leader corrects a create or delete that is applied late.
                        role = leadership.changed() => role,
                        never = self.run_worker() => match never {},
                        never = self.resync_periodically() => match never {},
                    };
                    self.stop_leading();
                }
                Role::Follower => role = leadership.changed().await,
            }
        }
    }

    /// Queues all Services. Forgets earlier writes, because another leader can have changed the slices since.
    fn start_leading(&self) {
        let state = &mut *self.0.state.lock();
        state.queue = Some(WorkQueue::default());
        state.index.tracker = WriteTracker::default();
        self.enqueue_all(state);
    }

    fn enqueue_all(&self, state: &mut State) {
        let all = state.index.all_services().cloned().collect();
        self.enqueue(state, all);
    }

    /// Queues all Services regularly, to retry those that were dropped.
    async fn resync_periodically(&self) -> Infallible {
        loop {
            sleep(RESYNC_INTERVAL).await;
            self.enqueue_all(&mut self.0.state.lock());
        }
    }

    fn stop_leading(&self) {
        self.0.state.lock().queue = None;
        self.0.metrics.depth.set(0);
        self.0.metrics.record_end();
    }

    async fn run_worker(&self) -> Infallible {
        loop {
            let service = self.next_service().await;
            let result = self.sync(&service).await;
            self.0.metrics.record_end();
            self.record_result(service, result);
        }
    }

    async fn next_service(&self) -> NamespacedName {
        loop {
            let next_at = {
                let mut state = self.0.state.lock();
                let queue = state.queue.as_mut();
                let next = queue.and_then(|queue| {
                    let next = queue.pop(Instant::now());
                    self.record_queue_depth(queue);
                    next
                });
                if let Some((service, waited)) = next {
                    self.0.metrics.record_start(waited);
                    return service;
                }
                state.queue.as_ref().and_then(WorkQueue::next_retry_at)
            };
            let retry = async {
                match next_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.0.queue_changed.notified() => {}
                () = retry => {}
            }
        }
    }

    fn record_result(&self, service: NamespacedName, result: Result<(), SyncError>) {
        let state = &mut *self.0.state.lock();
        let Some(queue) = &mut state.queue else { return };
        let Err(err) = result else {
            return queue.record_success(&service);
        };
        let error: &dyn std::error::Error = &err;
        match queue.record_failure(service.clone(), Instant::now()) {
            FailureOutcome::Retry(n) => {
                self.0.metrics.retries.inc();
                self.0.metrics.adds.inc();
                // A stale cache has its own log message.
                if !matches!(err, SyncError::Stale) {
                    warn!(%service, error, "writing EndpointSlices failed; retry {n} of {MAX_RETRIES} follows");
                }
            }
            FailureOutcome::Dropped => {
                self.0.metrics.drops.inc();
                error!(%service, error, "writing EndpointSlices failed, also after {MAX_RETRIES} retries; the next attempt is at the next change or resync");
            }
        }
    }

    /// Creates, updates and deletes the slices of one Service as needed.
    async fn sync(&self, name: &NamespacedName) -> Result<(), SyncError> {
        let plan = {
            let state = &mut *self.0.state.lock();
            if !state.index.has_service(name) {
                // Kubernetes garbage-collects its slices.
                state.index.tracker.remove_service(name);
            }
            let Some(ReconcileInputs {
                service,
                workloads,
                slices,
            }) = state.index.reconcile_inputs(name)
            else {
                return Ok(());
            };
            if state.index.tracker.is_stale(name, &slices) {
                // The log message of Linkerd.
                warn!("detected EndpointSlice informer cache is out of date when processing {name}");
                return Err(SyncError::Stale);
            }
            reconcile(&service, &workloads, &slices)
        };
        debug!(
            "reconciliation result for {name}: {} to add, {} to update, {} to remove",
            plan.create.len(),
            plan.update.len(),
            plan.delete.len()
        );
        if plan.is_empty() {
            return Ok(());
        }
        self.apply_plan(name, plan).await
    }

    async fn apply_plan(&self, service: &NamespacedName, plan: Plan) -> Result<(), SyncError> {
        let namespace = &service.namespace;
        let api: Api<EndpointSlice> = Api::namespaced(self.0.client.clone(), namespace);
        let params = PostParams::default();
        for slice in plan.create {
            // The API server completes the name.
            let name = NamespacedName::new(
                namespace.clone(),
                slice.metadata.generate_name.as_deref().unwrap_or_default(),
            );
            trace!("starting create: {name}");
            let created = match with_request_timeout("creating", &name, api.create(&params, &slice)).await {
                Err(SyncError::Api { source, .. }) if is_namespace_terminating(&source) => return Ok(()),
                created => created?,
            };
            self.0.state.lock().index.tracker.record_write(service, &created);
            trace!("finished create: {}", slice_name(namespace, &created));
        }
        for slice in plan.update {
            let name = slice_name(namespace, &slice);
            trace!("starting update: {name}");
            let updated = with_request_timeout("updating", &name, api.replace(&name.name, &params, &slice)).await?;
            self.0.state.lock().index.tracker.record_write(service, &updated);
            trace!("finished update: {name}");
        }
        for slice in plan.delete {
            let name = slice_name(namespace, &slice);
            trace!("starting delete: {name}");
            match with_request_timeout("deleting", &name, api.delete(&name.name, &DeleteParams::default())).await {
                Ok(_) => self.0.state.lock().index.tracker.record_delete(service, &slice),
                // The slice is already deleted. The watch reports it.
                Err(SyncError::Api { source, .. }) if is_not_found(&source) => {}
                Err(err) => return Err(err),
            }
            trace!("finished delete: {name}");
        }
        Ok(())
    }
}

async fn with_request_timeout<T>(
    verb: &'static str,
    slice: &NamespacedName,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, SyncError> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(SyncError::Api {
            verb,
            slice: slice.clone(),
            source: Box::new(source),
        }),
        Err(_) => Err(SyncError::Timeout {
            verb,
            slice: slice.clone(),
        }),
    }
}

fn slice_name(namespace: &Arc<str>, slice: &EndpointSlice) -> NamespacedName {
    NamespacedName::new(namespace.clone(), slice.metadata.name.as_deref().unwrap_or_default())
}

fn is_not_found(err: &Error) -> bool {
    matches!(err, Error::Api(status) if status.code == 404)
}

/// Returns whether the namespace is being deleted, so that nothing can be created in it.
fn is_namespace_terminating(err: &Error) -> bool {
    let Error::Api(status) = err else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The resync interval of Linkerd's controllers.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Services in this namespace select no external workloads.
const SKIPPED_NAMESPACE: &str = "kube-system";
