//! The identity service: authenticates workloads by their token and signs their certificates.
//!
//! A [`reviewer::Reviewer`] checks the token. The issuer is read from a directory and must be verified by the trust
//! anchors. The directories of the issuer and of the token keys and the file of the trust anchors are watched: valid files take
//! effect immediately, invalid ones are logged and ignored.
//! [`server`] handles requests; [`own_certificate`] renews the control plane's own certificates.

pub(crate) mod claims;
pub(crate) mod csr;
mod events;
pub mod issuer;
mod issuer_store;
mod metrics;
pub mod own_certificate;
pub mod reviewer;
pub mod server;
pub mod token_review;
mod token_review_result;

use std::path::PathBuf;
use std::sync::Arc;

use tulle_core::drain::Watch;
use tulle_core::identity;
use tulle_core::metrics::Registry;
use tulle_proto::identity::identity_server::IdentityServer;

use crate::tls::file_watcher::{FileWatcher, WatchError, WatchPath};
use events::{Events, SERVICE_ACCOUNT};
use issuer::Validity;
use issuer_store::IssuerStore;
use metrics::Metrics;
use reviewer::Reviewer;
use server::{IdentityNames, IdentityService};

use crate::kubernetes::event_recorder::EventRecorder;

#[derive(Clone, Debug)]
pub struct Config {
    /// Directory with `crt.pem` and `key.pem`, or `tls.crt` and `tls.key`.
    pub issuer: PathBuf,
    /// File with the trust anchors, a PEM bundle.
    pub trust_anchors: PathBuf,
    pub controller_namespace: String,
    pub trust_domain: String,
    pub validity: Validity,
}

/// Reloads the credentials when their files change.
pub struct CredentialReloader {
    service: IdentityService,
    changes: FileWatcher,
}

impl IdentityService {
    /// Creates the service with the current issuer, if it is valid, and the task that reloads it.
    ///
    /// # Errors
    /// Fails if a directory cannot be watched.
    pub fn new(
        config: &Config,
        reviewer: Reviewer,
        recorder: EventRecorder,
        registry: &Registry,
    ) -> Result<(Self, CredentialReloader), WatchError> {
        let ns = &config.controller_namespace;
        let name = identity::service_account_identity(SERVICE_ACCOUNT, ns, ns, &config.trust_domain);
        let events = Events::new(recorder, ns.clone());
        let issuer_store = Arc::new(IssuerStore::new(
            config.issuer.clone(),
            config.trust_anchors.clone(),
            name,
            events.clone(),
            registry,
        ));
        let [issuer, anchors] = issuer_store.watch_paths();
        // All files are read after the watch has started, so that no change is missed. The reviewer has already read the token
        // keys, and reads them again.
        let watch_paths: Vec<_> = [issuer, anchors]
            .into_iter()
            .chain(reviewer.watched_dir().map(WatchPath::Dir))
            .collect();
        let changes = FileWatcher::watch(&watch_paths)?;
        issuer_store.reload();
        reviewer.reload();
        let service = Self {
            metrics: Metrics::new(registry, issuer_store.clone()),
            issuer_store,
            reviewer: Arc::new(reviewer),
            identity_names: Arc::new(IdentityNames {
                controller_namespace: ns.clone(),
                trust_domain: config.trust_domain.clone(),
            }),
            validity: config.validity,
            events,
            log_limiters: Arc::default(),
        };
        let reload = CredentialReloader {
            service: service.clone(),
            changes,
        };
        Ok((service, reload))
    }

    /// The TLS server name of this service.
    pub fn name(&self) -> &str {
        self.issuer_store.name()
    }

    pub fn server(&self) -> IdentityServer<Self> {
        IdentityServer::new(self.clone()).max_decoding_message_size(MAX_REQUEST_BYTES)
    }
}

impl CredentialReloader {
    /// Runs until the drain.
    pub async fn run(mut self, drain: Watch) {
        loop {
            // Cancel-safe: both branches only wait. A change during a reload is reported by the next wait.
            tokio::select! {
                () = drain.signaled() => return,
                () = self.changes.wait_for_change() => {}
            }
            self.service.issuer_store.reload();
            self.service.reviewer.reload();
        }
    }
}

/// Maximum size of a request. A token and a signing request have a few KiB.
const MAX_REQUEST_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests;
