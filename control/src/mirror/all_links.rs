//! Starts a controller for each new Link of a namespace, and stops it when the Link is deleted.
//!
//! Each Link has its own lease. A controller that a chart installs for one Link uses the same lease, so only one of the two mirrors
//! the Link.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::join_all;
use kube::ResourceExt as _;
use kube::api::{Api, DynamicObject};
use kube::runtime::reflector::Store;
use kube::runtime::watcher;
use tokio::task::JoinSet;
use tracing::info;
use tulle_core::drain::{self, Watch};
use tulle_core::metrics::Registry;
use tulle_core::names::multicluster;

use super::config::{Clients, Config, ControllerScope};
use super::controller::SharedState;
use super::elected::ElectedController;
use super::link::Link;
use super::secret_access::SecretAccessWatch;
use crate::kubernetes::watches::{WatchParams, Watches, is_listed};

pub(super) struct AllLinks {
    clients: Clients,
    config: Config,
    registry: Registry,
    /// Names of Links that are not mirrored.
    excluded: BTreeSet<String>,
    shared: SharedState,
}

/// The Links of the namespace.
struct WatchedLinks {
    watches: Watches,
    store: Store<DynamicObject>,
}

/// The controller of one Link.
struct RunningLink {
    signal: drain::Signal,
    /// Its only task. It is cancelled when this is dropped.
    task: JoinSet<()>,
}

impl AllLinks {
    pub(super) fn new(clients: Clients, config: Config, registry: &Registry, excluded: BTreeSet<String>) -> Self {
        Self {
            clients,
            config,
            registry: registry.clone(),
            excluded,
            shared: SharedState::default(),
        }
    }

    /// Runs until the drain.
    pub(super) async fn run(self, drain: Watch) {
        let links = self.watch_links();
        let mut changes = links.watches.changes();
        let mut running: BTreeMap<String, RunningLink> = BTreeMap::new();
        loop {
            // Until the Links are listed, it is unknown which ones exist.
            if is_listed(&links.store) {
                self.update(&links, &mut running).await;
            }
            tokio::select! {
                () = drain.signaled() => break,
                // Does not fail, because `links` keeps the sender.
                _ = changes.changed() => {}
            }
        }
        join_all(running.into_values().map(RunningLink::end)).await;
    }

    fn watch_links(&self) -> WatchedLinks {
        let (client, namespace) = (self.clients.objects.clone(), &self.config.namespace);
        let links = WatchParams {
            api: Api::<DynamicObject>::namespaced_with(client, namespace, &Link::resource()),
            kind: Link::resource(),
            config: watcher::Config::default(),
            prune: |_| {},
        };
        let mut watches = Watches::new("local");
        let store = watches.watch(links, Arc::default());
        WatchedLinks { watches, store }
    }

    /// Ends the controllers of Links that do not exist any more, and starts those of new Links.
    async fn update(&self, links: &WatchedLinks, running: &mut BTreeMap<String, RunningLink>) {
        let names = links.store.state().into_iter().map(|link| link.name_any());
        let names: BTreeSet<_> = names.filter(|name| !self.excluded.contains(name)).collect();
        let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(running)
            .into_iter()
            .partition(|(name, _)| names.contains(name));
        *running = kept;
        for name in ended.keys() {
            info!(link = name, "the Link is deleted; its mirrors stay");
        }
        join_all(ended.into_values().map(RunningLink::end)).await;
        for name in names {
            if let Entry::Vacant(entry) = running.entry(name) {
                let controller = self.start(entry.key(), links);
                entry.insert(controller);
            }
        }
    }

    fn start(&self, link: &str, links: &WatchedLinks) -> RunningLink {
        let config = Config {
            probe_service: Some(multicluster::probe_service(link)),
            ..self.config.clone()
        };
        let (scope, shared) = (ControllerScope::Link(link.to_owned()), Some(self.shared.clone()));
        let controller = ElectedController::new(&self.clients, config, scope, &self.registry, shared);
        let (access_watch, access) = SecretAccessWatch::new(
            self.clients.objects.clone(),
            (&self.config.namespace, link),
            links.store.clone(),
            links.watches.changes(),
        );
        let (signal, drain) = drain::channel();
        let mut task = JoinSet::new();
        let link = link.to_owned();
        task.spawn(async move {
            tokio::select! {
                () = controller.run_with_access(link, access, drain) => {}
                never = access_watch.run() => match never {},
            }
        });
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
