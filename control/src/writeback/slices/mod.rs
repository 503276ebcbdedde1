//! Keeps EndpointSlices of external workloads: for each service with a selector, what the workloads in its namespace that
//! it selects ask for, in slices of our own beside those that Kubernetes writes for pods.
//!
//! Objects come from the watches that everybody shares; each change names the services that it concerns, and one worker
//! reconciles one service at a time while this process leads. What the API server refuses is tried again, 15 times with
//! growing pauses; a slice that somebody else changes or deletes is put right.
//!
//! Needs `create`, `update` and `delete` on `endpointslices` of `discovery.k8s.io`, beside what the watches need.

mod inventory;
mod reconcile;
#[cfg(test)]
mod tests;
mod tracker;

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
use crate::resources::event::{Event, Writer};
use crate::resources::meta::Name;
use crate::resources::{Kind, Object};
use crate::writeback::metrics::QueueMetrics;
use crate::writeback::queue::{Failed, MAX_RETRIES, Queue};
use crate::writeback::slices::inventory::{Inputs, Inventory};
use crate::writeback::slices::reconcile::{Plan, reconcile};
use crate::writeback::slices::tracker::Tracker;

/// The controller; clones share it.
#[derive(Clone)]
pub(super) struct Controller(Arc<Shared>);

struct Shared {
    client: Client,
    metrics: QueueMetrics,
    state: Mutex<State>,
    /// Rings when there is something to take from the queue.
    added: Notify,
}

#[derive(Default)]
struct State {
    inventory: Inventory,
    /// None while another process leads.
    queue: Option<Queue>,
}

#[derive(Debug, thiserror::Error)]
enum SyncError {
    #[error("EndpointSlice informer cache is out of date")]
    Stale,
    #[error("{verb} the EndpointSlice {slice}")]
    Api {
        verb: &'static str,
        slice: Name,
        #[source]
        source: Box<Error>,
    },
    #[error("{verb} the EndpointSlice {slice} took longer than {REQUEST_LIMIT:?}")]
    Timeout { verb: &'static str, slice: Name },
}

impl Controller {
    pub(super) fn new(client: Client, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            client,
            metrics: QueueMetrics::new(registry, "endpoints_controller_workqueue"),
            state: Mutex::default(),
            added: Notify::new(),
        }))
    }

    /// What takes events.
    pub(super) fn writer(&self) -> Writer {
        let controller = self.clone();
        Writer::new(move |events| controller.apply(events))
    }

    pub(super) fn wants(event: &Event) -> bool {
        let wanted = |kind| matches!(kind, Kind::Service | Kind::ExternalWorkload | Kind::EndpointSlice);
        event.kind().is_some_and(wanted)
    }

    fn apply(&self, events: Vec<Event>) {
        let state = &mut *self.0.state.lock();
        let mut concerned = BTreeSet::new();
        for event in events {
            concerned.extend(match event {
                Event::Applied(Object::Service(service)) => state.inventory.service_applied(&service),
                Event::Applied(Object::ExternalWorkload(workload)) => state.inventory.workload_applied(&workload),
                Event::Applied(Object::EndpointSlice(slice)) => state.inventory.slice_applied(&slice),
                Event::Deleted(Kind::Service, name) => state.inventory.service_deleted(&name),
                Event::Deleted(Kind::ExternalWorkload, name) => state.inventory.workload_deleted(&name),
                Event::Deleted(Kind::EndpointSlice, name) => state.inventory.slice_deleted(&name),
                Event::Applied(_) | Event::Deleted(..) | Event::Unreadable(_) | Event::Synced => continue,
            });
        }
        self.add(state, concerned);
    }

    fn add(&self, state: &mut State, services: BTreeSet<Name>) {
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
        self.tell_depth(queue);
        self.0.added.notify_one();
    }

    fn tell_depth(&self, queue: &Queue) {
        self.0.metrics.depth.set(i64::try_from(queue.len()).unwrap_or(i64::MAX));
    }

    /// Reconciles while this process leads. Never ends.
    pub(super) async fn run(self, mut leadership: Leadership) {
        let mut role = leadership.role();
        loop {
            match role {
                Role::Leader => {
                    self.start();
                    role = tokio::select! {
                        // A request that is cut here was sent while we led, and carries the version it replaces.
                        role = leadership.changed() => role,
                        never = self.work() => match never {},
                        never = self.look_regularly() => match never {},
                    };
                    self.stop();
                }
                Role::Follower => role = leadership.changed().await,
            }
        }
    }

    /// Looks at every service anew: what was written before, and by whom, does not count.
    fn start(&self) {
        let state = &mut *self.0.state.lock();
        state.queue = Some(Queue::default());
        state.inventory.tracker = Tracker::default();
        self.add_all(state);
    }

    fn add_all(&self, state: &mut State) {
        let all = state.inventory.all_services().cloned().collect();
        self.add(state, all);
    }

    /// Looks at all services now and then, for those that were given up.
    async fn look_regularly(&self) -> Infallible {
        loop {
            sleep(LOOK_INTERVAL).await;
            self.add_all(&mut self.0.state.lock());
        }
    }

    fn stop(&self) {
        self.0.state.lock().queue = None;
        self.0.metrics.depth.set(0);
        self.0.metrics.ended();
    }

    async fn work(&self) -> Infallible {
        loop {
            let service = self.take().await;
            let ended = self.sync(&service).await;
            self.0.metrics.ended();
            self.settle(service, ended);
        }
    }

    async fn take(&self) -> Name {
        loop {
            let next_at = {
                let mut state = self.0.state.lock();
                let queue = state.queue.as_mut();
                let taken = queue.and_then(|queue| {
                    let taken = queue.take(Instant::now());
                    self.tell_depth(queue);
                    taken
                });
                if let Some((service, waited)) = taken {
                    self.0.metrics.started(waited);
                    return service;
                }
                state.queue.as_ref().and_then(Queue::next_at)
            };
            let pause = async {
                match next_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.0.added.notified() => {}
                () = pause => {}
            }
        }
    }

    fn settle(&self, service: Name, ended: Result<(), SyncError>) {
        let state = &mut *self.0.state.lock();
        let Some(queue) = &mut state.queue else { return };
        let Err(err) = ended else {
            return queue.succeeded(&service);
        };
        let error: &dyn std::error::Error = &err;
        match queue.failed(service.clone(), Instant::now()) {
            Failed::Again(n) => {
                self.0.metrics.retries.inc();
                self.0.metrics.adds.inc();
                // A stale cache has a line of its own.
                if !matches!(err, SyncError::Stale) {
                    warn!(%service, error, "writing EndpointSlices failed; retry {n} of {MAX_RETRIES} follows");
                }
            }
            Failed::Dropped => {
                self.0.metrics.drops.inc();
                error!(%service, error, "writing EndpointSlices failed {MAX_RETRIES} times; given up until something changes");
            }
        }
    }

    /// Brings the slices of one service to what they should be.
    async fn sync(&self, name: &Name) -> Result<(), SyncError> {
        let plan = {
            let state = &mut *self.0.state.lock();
            if !state.inventory.has_service(name) {
                // Its slices are collected with it.
                state.inventory.tracker.forget(name);
            }
            let Some(Inputs {
                service,
                workloads,
                slices,
            }) = state.inventory.inputs(name)
            else {
                return Ok(());
            };
            if state.inventory.tracker.is_stale(name, &slices) {
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
        self.carry_out(name, plan).await
    }

    async fn carry_out(&self, service: &Name, plan: Plan) -> Result<(), SyncError> {
        let namespace = &service.namespace;
        let api: Api<EndpointSlice> = Api::namespaced(self.0.client.clone(), namespace);
        let params = PostParams::default();
        for slice in plan.create {
            // The API server completes this name.
            let name = Name::new(
                namespace.clone(),
                slice.metadata.generate_name.as_deref().unwrap_or_default(),
            );
            trace!("starting create: {name}");
            let created = match call("creating", &name, api.create(&params, &slice)).await {
                Err(SyncError::Api { source, .. }) if is_namespace_terminating(&source) => return Ok(()),
                created => created?,
            };
            self.0.state.lock().inventory.tracker.wrote(service, &created);
            trace!("finished create: {}", slice_name(namespace, &created));
        }
        for slice in plan.update {
            let name = slice_name(namespace, &slice);
            trace!("starting update: {name}");
            let updated = call("updating", &name, api.replace(&name.name, &params, &slice)).await?;
            self.0.state.lock().inventory.tracker.wrote(service, &updated);
            trace!("finished update: {name}");
        }
        for slice in plan.delete {
            let name = slice_name(namespace, &slice);
            trace!("starting delete: {name}");
            match call("deleting", &name, api.delete(&name.name, &DeleteParams::default())).await {
                Ok(_) => self.0.state.lock().inventory.tracker.deleted(service, &slice),
                // Somebody was quicker; the watch will tell.
                Err(SyncError::Api { source, .. }) if is_not_found(&source) => {}
                Err(err) => return Err(err),
            }
            trace!("finished delete: {name}");
        }
        Ok(())
    }
}

async fn call<T>(
    verb: &'static str,
    slice: &Name,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, SyncError> {
    match timeout(REQUEST_LIMIT, request).await {
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

fn slice_name(namespace: &Arc<str>, slice: &EndpointSlice) -> Name {
    Name::new(namespace.clone(), slice.metadata.name.as_deref().unwrap_or_default())
}

fn is_not_found(err: &Error) -> bool {
    matches!(err, Error::Api(status) if status.code == 404)
}

/// Nothing can be created in a namespace that is being deleted, and nothing needs to be.
fn is_namespace_terminating(err: &Error) -> bool {
    let Error::Api(status) = err else { return false };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// How often Linkerd's controllers hear of everything anew.
const LOOK_INTERVAL: Duration = Duration::from_secs(600);

const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Services of the system itself select no external workloads.
const SKIPPED_NAMESPACE: &str = "kube-system";
