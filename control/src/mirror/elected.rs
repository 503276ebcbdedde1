//! A controller that runs while this process holds the lease for it.

use kube::Client;
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use super::config::{Config, Scope};
use super::controller::{Controller, SharedState};
use super::link_events::LinkEvents;
use crate::kubernetes::event_recorder::EventPublisher;
use crate::kubernetes::lease::timing::LeaseTiming;
use crate::kubernetes::lease::{self, Candidate};

/// The tasks of a controller.
pub(super) struct ElectedController {
    candidate: Candidate,
    leadership: lease::Leadership,
    controller: Controller,
    event_publisher: EventPublisher,
}

impl ElectedController {
    /// `shared` is the state that all controllers of this process share, if there is one for each Link.
    pub(super) fn new(client: &Client, config: Config, registry: &Registry, shared: Option<SharedState>) -> Self {
        let lease = lease::Config {
            namespace: config.namespace.clone(),
            name: match &config.scope {
                Scope::Link(name) => format!("service-mirror-write-{name}"),
                Scope::ThisCluster(_) | Scope::AllLinks(_) => "local-service-mirror-write".to_owned(),
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
            controller: Controller::new(client.clone(), config, registry, link_events, shared),
            event_publisher,
        }
    }

    /// Runs until the drain.
    pub(super) async fn run(mut self, drain: Watch) {
        tokio::select! {
            // The candidate is polled first, so that the controller does not write after leadership has ended.
            biased;
            () = self.candidate.run(drain) => {}
            () = self.controller.run(self.leadership) => {}
            never = self.event_publisher.publish() => match never {},
        }
    }
}
