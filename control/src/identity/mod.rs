//! The identity service: it gives workloads that prove who they are a certificate that says so.
//!
//! Proof is a token, which a [`tokens::Reviewer`] judges; the certificate is signed by an issuer from a directory, which
//! must lead to the trust anchors.
//! Both directories are watched: good files take effect at once, bad ones are reported and change nothing.
//! Requests enter at [`server`]; the control plane's own certificates are kept by [`leaf`].
//! Where tokens come from, and how the server is reached, is not known here.

mod authority;
pub(crate) mod claims;
pub(crate) mod csr;
mod events;
pub mod issuer;
pub mod leaf;
mod metrics;
pub mod server;
pub mod token_review;
pub mod tokens;
mod turns;

use std::path::PathBuf;
use std::sync::Arc;

use tulle_core::drain::Watch;
use tulle_core::identity;
use tulle_core::metrics::Registry;
use tulle_proto::identity::identity_server::IdentityServer;

use crate::tls::files::{Changes, WatchError, Watched};
use authority::Authority;
use events::Events;
use issuer::Validity;
use metrics::Metrics;
use server::{IdentityService, Naming};
use tokens::Reviewer;

use crate::kubernetes::recorder::Recorder;

/// What the identity service needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// Holds `crt.pem` and `key.pem`, or `tls.crt` and `tls.key`.
    pub issuer: PathBuf,
    /// PEM bundle.
    pub trust_anchors: PathBuf,
    pub controller_namespace: String,
    pub trust_domain: String,
    pub validity: Validity,
}

/// Reads the credentials again when they change.
pub struct Reload {
    service: IdentityService,
    changes: Changes,
}

impl IdentityService {
    /// A service with the issuer that is there now, if it is good, and the task that keeps it current.
    ///
    /// # Errors
    /// Directories that cannot be watched.
    pub fn new(
        config: &Config,
        reviewer: Reviewer,
        recorder: Recorder,
        registry: &Registry,
    ) -> Result<(Self, Reload), WatchError> {
        let ns = &config.controller_namespace;
        let name = identity::service_account(SERVICE_ACCOUNT, ns, ns, &config.trust_domain);
        let events = Events::new(recorder, ns.clone());
        let authority = Arc::new(Authority::new(
            config.issuer.clone(),
            config.trust_anchors.clone(),
            name,
            events.clone(),
        ));
        let [issuer, anchors] = authority.places();
        // Watched before it is read, so that no change falls in between.
        let places: Vec<_> = [issuer, anchors]
            .into_iter()
            .chain(reviewer.dir().map(Watched::Dir))
            .collect();
        let changes = Changes::watch(&places)?;
        authority.reload();
        let service = Self {
            metrics: Metrics::new(registry, authority.clone()),
            authority,
            reviewer: Arc::new(reviewer),
            naming: Arc::new(Naming {
                controller_namespace: ns.clone(),
                trust_domain: config.trust_domain.clone(),
            }),
            validity: config.validity,
            events,
        };
        let reload = Reload {
            service: service.clone(),
            changes,
        };
        Ok((service, reload))
    }

    /// The TLS name under which proxies look for this service.
    pub fn name(&self) -> &str {
        self.authority.name()
    }

    /// The gRPC service.
    pub fn server(&self) -> IdentityServer<Self> {
        IdentityServer::new(self.clone()).max_decoding_message_size(MAX_REQUEST)
    }
}

impl Reload {
    /// Runs until the drain.
    pub async fn run(mut self, drain: Watch) {
        loop {
            // Both branches only wait; a change that comes during a reload is noticed at the next turn.
            tokio::select! {
                () = drain.signaled() => return,
                () = self.changes.next() => {}
            }
            self.service.authority.reload();
            self.service.reviewer.reload();
        }
    }
}

/// Whose identity the identity service has.
const SERVICE_ACCOUNT: &str = "linkerd-identity";
/// A token and a signing request are a few KiB.
const MAX_REQUEST: usize = 64 * 1024;

#[cfg(test)]
mod tests;
