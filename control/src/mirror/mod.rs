//! The service mirror creates Services (mirrors) in this cluster for the exported Services of another cluster.
//!
//! A `Link` names the other cluster, the Secret with its credentials, and its gateway. `plan` compares the exported Services with
//! their mirrors, and `controller` executes the difference after each change. Only the replica that holds a lease writes. `all_links`
//! runs a controller for each Link of a namespace in one process.
//!
//! RBAC in this cluster: `list`, `watch`, `create`, `update` and `delete` on `services` and `endpoints`, and `get` on `endpoints`;
//! `list` and `watch` on `namespaces`, and `create` if namespaces are to be created; `list` and `watch` on `links`, at least in the
//! namespace of the Link; in this namespace also `list` and `watch` on the Secret, `patch` on `links/status`, `get`, `create` and
//! `update` on `leases`, and `create` and `patch` on `events` of `events.k8s.io`. Events on Services of this cluster are in all
//! namespaces. In the other cluster: `list` and `watch` on `services` and `endpointslices` (or `endpoints`), and `create` and `patch` on
//! `events` of `events.k8s.io`.

mod all_links;
pub mod config;
mod controller;
mod elected;
mod exported_endpoints;
mod gateway;
mod link;
mod link_events;
mod metrics;
mod plan;
mod probe_service;
mod rejection_events;
mod secret_access;
mod status;
mod writer;

use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use crate::mirror::all_links::AllLinks;
use crate::mirror::config::{Clients, Config, ControllerScope, Scope};
use crate::mirror::elected::ElectedController;
#[cfg(any(test, fuzzing))]
pub(crate) use crate::mirror::link::Link;

pub struct ServiceMirror(Controllers);

enum Controllers {
    /// Of one Link, or of this cluster.
    One(Box<ElectedController>),
    AllLinks(Box<AllLinks>),
}

impl ServiceMirror {
    pub fn new(clients: Clients, config: Config, registry: &Registry) -> Self {
        let scope = match config.scope.clone() {
            Scope::AllLinks(excluded) => {
                let all = AllLinks::new(clients, config, registry, excluded);
                return Self(Controllers::AllLinks(Box::new(all)));
            }
            Scope::Link(name) => ControllerScope::Link(name),
            Scope::ThisCluster(members) => ControllerScope::ThisCluster(members),
        };
        let controller = ElectedController::new(&clients, config, scope, registry, None);
        Self(Controllers::One(Box::new(controller)))
    }

    /// Runs until the drain.
    pub async fn run(self, drain: Watch) {
        match self.0 {
            Controllers::One(controller) => Box::pin(controller.run(drain)).await,
            Controllers::AllLinks(all) => Box::pin(all.run(drain)).await,
        }
    }
}
