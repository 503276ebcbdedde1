//! Writes the status of routes, rate limits, egress networks and external workloads: whether they are accepted, and the
//! reason if not.
//!
//! Objects come from the shared watches. A change queues the objects whose status is affected, and one worker patches
//! them while this process is the leader. Every 10 seconds all objects are checked again, to retry failed patches. The
//! entries of other controllers in a status are kept.
//!
//! RBAC: `patch` on `httproutes/status`, `httplocalratelimitpolicies/status` and `egressnetworks/status` of
//! `policy.linkerd.io`, on `httproutes/status`, `grpcroutes/status`, `tlsroutes/status` and `tcproutes/status` of
//! `gateway.networking.k8s.io`, and on `externalworkloads/status` of `workload.linkerd.io`, in addition to the rules of
//! the watches.

mod conditions;
mod dependencies;
mod index;
mod object_id;
pub(super) mod report;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashSet;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Client, Error};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tracing::{debug, error};
use tulle_core::metrics::Registry;

use crate::kubernetes::lease::{Leadership, Role};
use crate::resources::Kind;
use crate::resources::event::{Event, EventSink};
use crate::resources::status::{CONTROLLER_NAME, timestamp};
use crate::writeback::config::StatusesConfig;
use crate::writeback::metrics::StatusMetrics;
use crate::writeback::statuses::index::{StatusIndex, StatusPatch};
use crate::writeback::statuses::object_id::ObjectId;

/// The controller. Clones share their state.
#[derive(Clone)]
pub(super) struct Controller(Arc<Shared>);

struct Shared {
    client: Client,
    patch_timeout: Duration,
    metrics: StatusMetrics,
    state: Mutex<State>,
    /// Notified when an object is queued.
    queue_changed: Notify,
}

struct State {
    index: StatusIndex,
    /// `None` while another process is the leader.
    queue: Option<StatusQueue>,
}

/// Objects whose status has to be written, without duplicates.
#[derive(Default)]
struct StatusQueue {
    waiting: VecDeque<ObjectId>,
    queued: AHashSet<ObjectId>,
}

impl Controller {
    pub(super) fn new(client: Client, settings: StatusesConfig, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            client,
            patch_timeout: settings.patch_timeout,
            metrics: StatusMetrics::new(registry),
            state: Mutex::new(State {
                index: StatusIndex::new(settings),
                queue: None,
            }),
            queue_changed: Notify::new(),
        }))
    }

    pub(super) fn sink(&self) -> EventSink {
        let controller = self.clone();
        EventSink::new(move |events| controller.apply(events))
    }

    pub(super) fn handles(event: &Event) -> bool {
        let handles_kind = |kind: Kind| {
            let is_non_route_kind = matches!(
                kind,
                Kind::Service
                    | Kind::Server
                    | Kind::EgressNetwork
                    | Kind::ServiceProfile
                    | Kind::RateLimitPolicy
                    | Kind::Pod
                    | Kind::ExternalWorkload
            );
            is_non_route_kind || kind.is_route()
        };
        event.kind().is_some_and(handles_kind)
    }

    fn apply(&self, events: Vec<Event>) {
        let state = &mut *self.0.state.lock();
        let mut affected = BTreeSet::new();
        for event in &events {
            affected.extend(state.index.apply_event(event));
        }
        self.enqueue_changed(state, affected);
    }

    /// Queues the objects whose status is not up to date.
    fn enqueue_changed(&self, state: &mut State, affected: impl IntoIterator<Item = ObjectId>) {
        let Some(queue) = &mut state.queue else { return };
        for id in affected {
            if queue.queued.contains(&id) || state.index.build_patch(&id, "").is_none() {
                continue;
            }
            if queue.waiting.len() >= MAX_QUEUED_OBJECTS {
                self.0.metrics.overflows.inc();
                continue;
            }
            self.0.metrics.enqueues.inc();
            queue.queued.insert(id.clone());
            queue.waiting.push_back(id);
        }
        if !queue.waiting.is_empty() {
            self.0.queue_changed.notify_one();
        }
    }

    /// Writes while this process is the leader. Never returns.
    pub(super) async fn run(self, mut leadership: Leadership) {
        let mut role = leadership.role();
        loop {
            match role {
                Role::Leader => {
                    self.0.state.lock().queue = Some(StatusQueue::default());
                    role = tokio::select! {
                        role = leadership.changed() => role,
                        never = self.resync_periodically() => match never {},
                        never = self.run_worker() => match never {},
                    };
                    let dropped_queue = self.0.state.lock().queue.take();
                    self.0
                        .metrics
                        .drops
                        .add(dropped_queue.map_or(0, |queue| queue.waiting.len() as u64));
                }
                Role::Follower => role = leadership.changed().await,
            }
        }
    }

    async fn resync_periodically(&self) -> Infallible {
        let mut ticks = interval(RESYNC_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let state = &mut *self.0.state.lock();
            let all = state.index.objects_with_status();
            self.enqueue_changed(state, all);
        }
    }

    async fn run_worker(&self) -> Infallible {
        loop {
            let (id, patch) = self.next_patch().await;
            // The status can have become correct while the object was queued.
            if let Some(patch) = patch {
                self.write_status(id, patch).await;
            }
        }
    }

    async fn next_patch(&self) -> (ObjectId, Option<StatusPatch>) {
        loop {
            {
                let state = &mut *self.0.state.lock();
                if let Some(queue) = &mut state.queue
                    && let Some(id) = queue.waiting.pop_front()
                {
                    queue.queued.remove(&id);
                    self.0.metrics.dequeues.inc();
                    let patch = state.index.build_patch(&id, &timestamp());
                    return (id, patch);
                }
            }
            self.0.queue_changed.notified().await;
        }
    }

    async fn write_status(&self, id: ObjectId, patch: StatusPatch) {
        let (kind, name) = (id.kind.info().name, id.name.clone());
        let metrics = &self.0.metrics;
        let sent_at = Instant::now();
        let ended = timeout(self.0.patch_timeout, self.send_patch(&id, &patch.body)).await;
        if ended.is_ok() {
            metrics.duration.observe(sent_at.elapsed().as_secs_f64());
        }
        match ended {
            Ok(Ok(())) => {
                metrics.patches.inc();
                debug!(kind, object = %name, "status written");
                self.0.state.lock().index.record_write(id, patch);
            }
            // The object is deleted or has changed. The watch reports it.
            Ok(Err(Error::Api(status))) if matches!(status.code, 404 | 409) => {
                metrics.api_errors.inc();
                debug!(kind, object = %name, code = status.code, "status not written");
            }
            Ok(Err(err)) => {
                metrics.api_errors.inc();
                let error: &dyn std::error::Error = &err;
                error!(kind, object = %name, error, "writing the status failed");
            }
            Err(_) => {
                metrics.timeouts.inc();
                let limit = self.0.patch_timeout;
                error!(kind, object = %name, ?limit, "writing the status took too long");
            }
        }
    }

    /// Sends a patch in the newest API version that is served.
    async fn send_patch(&self, ObjectId { kind, name }: &ObjectId, body: &Value) -> Result<(), Error> {
        let info = kind.info();
        let params = PatchParams {
            field_manager: Some(CONTROLLER_NAME.to_owned()),
            ..PatchParams::default()
        };
        let mut versions = info.versions.iter().peekable();
        while let Some(version) = versions.next() {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(info.group, version, info.name));
            let mut body = body.clone();
            body["apiVersion"] = json!(resource.api_version);
            let api: Api<DynamicObject> = Api::namespaced_with(self.0.client.clone(), &name.namespace, &resource);
            match api.patch_status(&name.name, &params, &Patch::Merge(&body)).await {
                // The object or the API version does not exist.
                Err(Error::Api(status)) if status.code == 404 && versions.peek().is_some() => {}
                Err(err) => return Err(err),
                Ok(_) => break,
            }
        }
        Ok(())
    }
}

const MAX_QUEUED_OBJECTS: usize = 10_000;

const RESYNC_INTERVAL: Duration = Duration::from_secs(10);
