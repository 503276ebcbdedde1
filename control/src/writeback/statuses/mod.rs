//! Writes the status of routes, rate limits, egress networks and external workloads: who accepts them, and why not.
//!
//! Objects come from the watches that everybody shares. A change names the objects whose status it may have changed, and
//! one worker patches what is not as it should be while this process leads; every 10 seconds all of them are looked at
//! again, for patches that failed. What other controllers wrote into a status stays.
//!
//! Needs `patch` on `httproutes/status`, `httplocalratelimitpolicies/status` and `egressnetworks/status` of
//! `policy.linkerd.io` and on `httproutes/status`, `grpcroutes/status`, `tlsroutes/status` and `tcproutes/status` of
//! `gateway.networking.k8s.io`, and on `externalworkloads/status` of `workload.linkerd.io`, beside what the watches need.

mod conditions;
mod inventory;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashSet;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch as Body, PatchParams};
use kube::{Client, Error};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tracing::{debug, error};
use tulle_core::metrics::Registry;

use crate::kubernetes::lease::{Leadership, Role};
use crate::resources::Kind;
use crate::resources::event::{Event, Writer};
use crate::resources::status::CONTROLLER_NAME;
use crate::writeback::Statuses;
use crate::writeback::metrics::StatusMetrics;
use crate::writeback::statuses::inventory::{Id, Inventory, Patch};

/// The controller; clones share it.
#[derive(Clone)]
pub(super) struct Controller(Arc<Shared>);

struct Shared {
    client: Client,
    patch_timeout: Duration,
    metrics: StatusMetrics,
    state: Mutex<State>,
    /// Rings when there is something to take from the queue.
    added: Notify,
}

struct State {
    inventory: Inventory,
    /// None while another process leads.
    queue: Option<Queue>,
}

/// Objects whose status has to be written, each once.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<Id>,
    queued: AHashSet<Id>,
}

impl Controller {
    pub(super) fn new(client: Client, settings: Statuses, registry: &Registry) -> Self {
        Self(Arc::new(Shared {
            client,
            patch_timeout: settings.patch_timeout,
            metrics: StatusMetrics::new(registry),
            state: Mutex::new(State {
                inventory: Inventory::new(settings.cluster_networks, settings.global_egress_namespace),
                queue: None,
            }),
            added: Notify::new(),
        }))
    }

    /// What takes events.
    pub(super) fn writer(&self) -> Writer {
        let controller = self.clone();
        Writer::new(move |events| controller.apply(events))
    }

    pub(super) fn wants(event: &Event) -> bool {
        let wanted = |kind| {
            let on_its_own = matches!(
                kind,
                Kind::Service
                    | Kind::Server
                    | Kind::EgressNetwork
                    | Kind::RateLimitPolicy
                    | Kind::Pod
                    | Kind::ExternalWorkload
            );
            on_its_own || kind.is_route()
        };
        event.kind().is_some_and(wanted)
    }

    fn apply(&self, events: Vec<Event>) {
        let state = &mut *self.0.state.lock();
        let mut concerned = BTreeSet::new();
        for event in events {
            concerned.extend(match event {
                Event::Applied(object) => state.inventory.apply(&object),
                Event::Deleted(kind, name) => state.inventory.delete(&(kind, name)),
                Event::Unreadable(unreadable) => state.inventory.apply_unreadable(&unreadable),
                Event::Synced => continue,
            });
        }
        self.add(state, concerned);
    }

    /// Queues those of the objects whose status is not what it should be.
    fn add(&self, state: &mut State, concerned: impl IntoIterator<Item = Id>) {
        let Some(queue) = &mut state.queue else { return };
        for id in concerned {
            if queue.queued.contains(&id) || state.inventory.patch(&id, "").is_none() {
                continue;
            }
            if queue.waiting.len() >= MAX_QUEUED {
                self.0.metrics.overflows.inc();
                continue;
            }
            self.0.metrics.enqueues.inc();
            queue.queued.insert(id.clone());
            queue.waiting.push_back(id);
        }
        if !queue.waiting.is_empty() {
            self.0.added.notify_one();
        }
    }

    /// Writes while this process leads. Never ends.
    pub(super) async fn run(self, mut leadership: Leadership) {
        let mut role = leadership.role();
        loop {
            match role {
                Role::Leader => {
                    self.0.state.lock().queue = Some(Queue::default());
                    role = tokio::select! {
                        role = leadership.changed() => role,
                        never = self.look_regularly() => match never {},
                        never = self.work() => match never {},
                    };
                    let left = self.0.state.lock().queue.take();
                    self.0
                        .metrics
                        .drops
                        .add(left.map_or(0, |queue| queue.waiting.len() as u64));
                }
                Role::Follower => role = leadership.changed().await,
            }
        }
    }

    async fn look_regularly(&self) -> Infallible {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let state = &mut *self.0.state.lock();
            let all = state.inventory.all();
            self.add(state, all);
        }
    }

    async fn work(&self) -> Infallible {
        loop {
            let (id, patch) = self.take().await;
            // By now it may be as it should be.
            if let Some(patch) = patch {
                self.write(id, patch).await;
            }
        }
    }

    async fn take(&self) -> (Id, Option<Patch>) {
        loop {
            {
                let state = &mut *self.0.state.lock();
                if let Some(queue) = &mut state.queue
                    && let Some(id) = queue.waiting.pop_front()
                {
                    queue.queued.remove(&id);
                    self.0.metrics.dequeues.inc();
                    let patch = state.inventory.patch(&id, &now());
                    return (id, patch);
                }
            }
            self.0.added.notified().await;
        }
    }

    async fn write(&self, id: Id, patch: Patch) {
        let (kind, name) = (id.0.info().name, id.1.clone());
        let metrics = &self.0.metrics;
        let sent_at = Instant::now();
        let ended = timeout(self.0.patch_timeout, self.send(&id, &patch.body)).await;
        if ended.is_ok() {
            metrics.duration.observe(sent_at.elapsed().as_secs_f64());
        }
        match ended {
            Ok(Ok(())) => {
                metrics.patches.inc();
                debug!(kind, object = %name, "status written");
                self.0.state.lock().inventory.wrote(id, patch);
            }
            // The object is gone, or has changed: the watch will tell.
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

    /// Sends a patch to the newest version of the API that is served.
    async fn send(&self, (kind, name): &Id, body: &Value) -> Result<(), Error> {
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
            match api.patch_status(&name.name, &params, &Body::Merge(&body)).await {
                // There may be no such object, or no such version.
                Err(Error::Api(status)) if status.code == 404 && versions.peek().is_some() => {}
                Err(err) => return Err(err),
                Ok(_) => break,
            }
        }
        Ok(())
    }
}

fn now() -> String {
    let now = Timestamp::now();
    // Statuses count in seconds.
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

const MAX_QUEUED: usize = 10_000;

const LOOK_INTERVAL: Duration = Duration::from_secs(10);
