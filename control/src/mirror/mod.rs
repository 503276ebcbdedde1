//! The service mirror creates Services (mirrors) in this cluster for the exported Services of another cluster.
//!
//! A `Link` names the other cluster, the Secret with its credentials, and its gateway. `plan` compares the exported Services with
//! their mirrors, and `controller` executes the difference after each change. Only the replica that holds a lease writes.
//!
//! RBAC in this cluster: `list`, `watch`, `create`, `update` and `delete` on `services` and `endpoints`, and `get` on `endpoints`;
//! `list` and `watch` on `namespaces`, and `create` if namespaces are to be created; in the namespace of the Link `list` and `watch`
//! on `links` and on the Secret, `patch` on `links/status`, `create` and `patch` on `events` of `events.k8s.io`, and `get`, `create`
//! and `update` on `leases`. In the other cluster:
//! `list` and `watch` on `services` and `endpointslices` (or `endpoints`), and `create` and `patch` on `events` of `events.k8s.io`.

pub mod config;
mod controller;
mod exported_endpoints;
mod gateway;
mod link;
mod link_events;
mod metrics;
mod plan;
mod rejection_events;
mod status;
mod writer;

use kube::Client;
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use crate::kubernetes::event_recorder::EventPublisher;
use crate::kubernetes::lease::timing::LeaseTiming;
use crate::kubernetes::lease::{self, Candidate};
use crate::mirror::config::{Config, Scope};
use crate::mirror::controller::Controller;
#[cfg(any(test, fuzzing))]
pub(crate) use crate::mirror::link::Link;
use crate::mirror::link_events::LinkEvents;

/// The tasks of the service mirror.
pub struct ServiceMirror {
    candidate: Candidate,
    leadership: lease::Leadership,
    controller: Controller,
    event_publisher: EventPublisher,
}

impl ServiceMirror {
    pub fn new(client: &Client, config: Config, registry: &Registry) -> Self {
        let lease = lease::Config {
            namespace: config.namespace.clone(),
            name: match &config.scope {
                Scope::Link(name) => format!("service-mirror-write-{name}"),
                Scope::ThisCluster(_) => "local-service-mirror-write".to_owned(),
            },
            holder: config.lease_holder.clone(),
            field_manager: None,
            owner: None,
            timing: LeaseTiming::FREQUENT,
        };
        let (candidate, leadership) = lease::new_candidate(client, lease, registry);
        let (link_events, event_publisher) = LinkEvents::new(client.clone(), &config.lease_holder, registry);
        Self {
            candidate,
            leadership,
            controller: Controller::new(client.clone(), config, registry, link_events),
            event_publisher,
        }
    }

    /// Runs until the drain.
    pub async fn run(self, drain: Watch) {
        let Self {
            candidate,
            leadership,
            controller,
            mut event_publisher,
        } = self;
        tokio::select! {
            // The candidate is polled first, so that the controller does not write after leadership has ended.
            biased;
            () = candidate.run(drain) => {}
            () = controller.run(leadership) => {}
            never = event_publisher.publish() => match never {},
        }
    }
}
