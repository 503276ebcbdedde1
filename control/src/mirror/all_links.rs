//! One controller for each Link of a namespace, while Links are created and deleted.
//!
//! Each Link has a lease of its own, which is that of a controller for this Link alone. So of both kinds of controllers, only one
//! mirrors a Link.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::join_all;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use tokio::task::JoinSet;
use tracing::info;
use tulle_core::drain::{self, Watch};
use tulle_core::metrics::Registry;

use super::config::{Config, Scope};
use super::controller::SharedState;
use super::elected::ElectedController;
use super::link::Link;
use crate::kubernetes::watches::{WatchParams, Watches, is_listed};

pub(super) struct AllLinks {
    client: Client,
    config: Config,
    registry: Registry,
    /// Names of Links that are not mirrored.
    excluded: BTreeSet<String>,
    shared: SharedState,
}

/// The controller of one Link.
struct RunningLink {
    signal: drain::Signal,
    /// Its only task. It is cancelled when this is dropped.
    task: JoinSet<()>,
}

impl AllLinks {
    pub(super) fn new(client: &Client, config: Config, registry: &Registry, excluded: BTreeSet<String>) -> Self {
        Self {
            client: client.clone(),
            config,
            registry: registry.clone(),
            excluded,
            shared: SharedState::default(),
        }
    }

    /// Runs until the drain.
    pub(super) async fn run(self, drain: Watch) {
        let mut watches = Watches::new("local");
        let links = WatchParams {
            api: Api::<DynamicObject>::namespaced_with(self.client.clone(), &self.config.namespace, &Link::resource()),
            kind: Link::resource(),
            config: watcher::Config::default(),
            prune: |_| {},
        };
        let links = watches.watch(links, Arc::default());
        let mut changes = watches.changes();
        let mut running: BTreeMap<String, RunningLink> = BTreeMap::new();
        loop {
            // Until the Links are listed, it is unknown which ones exist.
            if is_listed(&links) {
                let names = links.state().into_iter().map(|link| link.name_any());
                let names: BTreeSet<_> = names.filter(|name| !self.excluded.contains(name)).collect();
                self.update(&names, &mut running).await;
            }
            tokio::select! {
                () = drain.signaled() => break,
                // The sender is in `watches`.
                _ = changes.changed() => {}
            }
        }
        join_all(running.into_values().map(RunningLink::end)).await;
    }

    /// Ends the controllers of Links that do not exist any more, and starts those of new Links.
    async fn update(&self, names: &BTreeSet<String>, running: &mut BTreeMap<String, RunningLink>) {
        let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(running)
            .into_iter()
            .partition(|(name, _)| names.contains(name));
        *running = kept;
        for name in ended.keys() {
            info!(link = name, "the Link is deleted; its mirrors stay");
        }
        join_all(ended.into_values().map(RunningLink::end)).await;
        for name in names {
            if !running.contains_key(name) {
                running.insert(name.clone(), self.start(name));
            }
        }
    }

    fn start(&self, link: &str) -> RunningLink {
        let config = Config {
            scope: Scope::Link(link.to_owned()),
            probe_service: Some(format!("probe-{link}")),
            ..self.config.clone()
        };
        let shared = Some(self.shared.clone());
        let controller = ElectedController::new(&self.client, config, &self.registry, shared);
        let (signal, drain) = drain::channel();
        let mut task = JoinSet::new();
        task.spawn(controller.run(drain));
        RunningLink { signal, task }
    }
}

impl RunningLink {
    /// Ends the controller. Its lease is then released, so another process can mirror the Link at once.
    async fn end(self) {
        let Self { signal, mut task } = self;
        signal.drain().await;
        while task.join_next().await.is_some() {}
    }
}
