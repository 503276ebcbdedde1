//! A controller that runs while this process holds the lease for it.

use std::convert::Infallible;

use kube::Client;
use tokio::sync::watch;
use tulle_core::drain::{self, Watch};
use tulle_core::metrics::Registry;

use super::config::{Clients, Config, ControllerScope};
use super::controller::{Controller, SharedState};
use super::secret_access::SecretAccess;
use crate::kubernetes::event_recorder::EventPublisher;
use crate::kubernetes::lease::timing::LeaseTiming;
use crate::kubernetes::lease::{self, LeaseReader};

pub(super) struct ElectedController {
    lease_client: Client,
    lease: lease::Config,
    registry: Registry,
    controller: Controller,
    event_publisher: EventPublisher,
}

impl ElectedController {
    /// `shared` is the state that all controllers of this process share, if there is one for each Link.
    pub(super) fn new(
        clients: &Clients,
        config: Config,
        scope: ControllerScope,
        registry: &Registry,
        shared: Option<SharedState>,
    ) -> Self {
        let lease = lease::Config {
            namespace: config.namespace.clone(),
            name: match &scope {
                ControllerScope::Link(name) => format!("service-mirror-write-{name}"),
                ControllerScope::ThisCluster(_) => "local-service-mirror-write".to_owned(),
            },
            holder: config.lease_holder.clone(),
            field_manager: None,
            owner: None,
            timing: LeaseTiming::FREQUENT,
        };
        let (controller, event_publisher) = Controller::new(clients.objects.clone(), config, scope, registry, shared);
        Self {
            lease_client: clients.leases.clone(),
            lease,
            registry: registry.clone(),
            controller,
            event_publisher,
        }
    }

    /// Runs until the drain.
    pub(super) async fn run(mut self, drain: Watch) {
        Box::pin(self.compete(drain)).await;
    }

    /// Runs until the drain. Competes for the lease of the Link only while its Secret can be read: a leader that cannot read it would
    /// keep the lease from a controller that can. While no process holds the lease, reports why the Secret cannot be read.
    pub(super) async fn run_with_access(
        mut self,
        link: String,
        mut access: watch::Receiver<SecretAccess>,
        drain: Watch,
    ) {
        while !drain.is_signaled() {
            let known = access.borrow_and_update().clone();
            match known {
                SecretAccess::Readable => {
                    let (signal, candidacy) = drain::channel();
                    let end = async {
                        tokio::select! {
                            () = drain.signaled() => {}
                            () = wait_until_unreadable(&mut access) => {}
                        }
                        signal.drain().await;
                    };
                    tokio::join!(Box::pin(self.compete(candidacy)), end);
                }
                SecretAccess::Unreadable(cause) => {
                    let lease = LeaseReader::new(&self.lease_client, &self.lease);
                    tokio::select! {
                        () = drain.signaled() => {}
                        _ = access.changed() => {}
                        never = report_while_lease_not_held(&self.controller, &link, &cause, lease) => match never {},
                        never = self.event_publisher.publish() => match never {},
                    }
                }
                SecretAccess::Unknown => {
                    tokio::select! {
                        () = drain.signaled() => {}
                        _ = access.changed() => {}
                    }
                }
            }
        }
    }

    /// Competes for the lease until the drain, and mirrors while this process holds it.
    async fn compete(&mut self, drain: Watch) {
        let (candidate, leadership) = lease::new_candidate(&self.lease_client, self.lease.clone(), &self.registry);
        tokio::select! {
            // The candidate is polled first, so that the controller does not write after leadership has ended.
            biased;
            () = candidate.run(drain) => {}
            never = self.controller.run(leadership) => match never {},
            never = self.event_publisher.publish() => match never {},
        }
    }
}

/// Reports why the Secret of a Link cannot be read whenever no process holds the lease of the Link. A process that holds it reports
/// the state of the Link itself.
async fn report_while_lease_not_held(
    controller: &Controller,
    link: &str,
    cause: &str,
    mut lease: LeaseReader,
) -> Infallible {
    loop {
        lease.wait_until_not_held().await;
        tokio::select! {
            () = lease.wait_until_held() => {}
            never = controller.report_unreadable_secret(link, cause) => match never {},
        }
    }
}

async fn wait_until_unreadable(access: &mut watch::Receiver<SecretAccess>) {
    let is_unreadable = |access: &SecretAccess| matches!(access, SecretAccess::Unreadable(_));
    if access.wait_for(is_unreadable).await.is_err() {
        // Does not happen, because the sender runs as long as the controller.
        std::future::pending::<()>().await;
    }
}
