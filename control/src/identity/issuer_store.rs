//! The current issuer and trust anchors. They are reloaded when their files change; invalid files are ignored.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{info, warn};
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::Registry;

use super::events::Events;
use super::issuer::{Issuer, IssuerError, rfc3339};
use crate::tls::anchors::{self, TrustAnchors};
use crate::tls::file_watcher::WatchPath;
use crate::tls::unserved_files::UnservedFiles;

/// Holds the issuer; `None` until valid files exist.
pub(crate) struct IssuerStore {
    issuer_dir: PathBuf,
    anchors_path: PathBuf,
    /// TLS name of the identity service; every issuer must be able to sign a certificate for it.
    name: String,
    current: watch::Sender<Option<Arc<Issuer>>>,
    /// The last load error, so that a repeated error is logged only once.
    last_error: Mutex<Option<String>>,
    events: Events,
    unserved: UnservedFiles,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LoadError {
    #[error("loading trust anchors")]
    Anchors(#[source] anchors::Error),
    #[error("loading the issuer")]
    Issuer(#[source] IssuerError),
}

impl IssuerStore {
    pub(crate) fn new(
        issuer_dir: PathBuf,
        anchors_path: PathBuf,
        name: String,
        events: Events,
        registry: &Registry,
    ) -> Self {
        Self {
            issuer_dir,
            anchors_path,
            name,
            current: watch::Sender::new(None),
            last_error: Mutex::new(None),
            events,
            unserved: UnservedFiles::new(registry, "issuer"),
        }
    }

    /// Loads the files. Invalid files are counted in `unserved_configuration`, and the previous issuer stays.
    pub(crate) fn reload(&self) {
        let loaded = self.load();
        self.unserved.set(loaded.as_ref().err().map(|err| match err {
            LoadError::Anchors(_) => &*self.anchors_path,
            LoadError::Issuer(_) => &*self.issuer_dir,
        }));
        match loaded {
            Ok(issuer) => {
                self.last_error.lock().take();
                self.replace(issuer);
            }
            Err(err) => {
                let error = Some(format!("{err:?}"));
                if std::mem::replace(&mut *self.last_error.lock(), error.clone()) == error {
                    return;
                }
                let previous_issuer_stays = self.current.borrow().is_some();
                warn!(
                    error = &err as &dyn std::error::Error,
                    previous_issuer_stays, "issuer update skipped"
                );
                self.events.issuer_update_skipped(ErrorChain(&err).to_string());
            }
        }
    }

    pub(crate) fn issuer(&self) -> Option<Arc<Issuer>> {
        self.current.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<Issuer>>> {
        self.current.subscribe()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Paths to watch for changes.
    pub(crate) fn watch_paths(&self) -> [WatchPath<'_>; 2] {
        [WatchPath::Dir(&self.issuer_dir), WatchPath::File(&self.anchors_path)]
    }

    fn load(&self) -> Result<Issuer, LoadError> {
        let anchors = TrustAnchors::read(&self.anchors_path).map_err(LoadError::Anchors)?;
        Issuer::load(&self.issuer_dir, anchors, &self.name).map_err(LoadError::Issuer)
    }

    /// Replaces the issuer if it has changed. Otherwise subscribers would renew their certificates without need.
    fn replace(&self, issuer: Issuer) {
        let is_same =
            |old: &Arc<Issuer>| old.chain() == issuer.chain() && old.anchors().certs() == issuer.anchors().certs();
        if self.current.borrow().as_ref().is_some_and(is_same) {
            return;
        }
        let (expires_at, n_anchors) = (rfc3339(issuer.expires_at()), issuer.anchors().certs().len());
        info!(expires_at, n_anchors, "issuer updated");
        self.events.issuer_updated(format!(
            "the issuer is valid until {expires_at} and is verified by one of {n_anchors} trust anchors"
        ));
        self.current.send_replace(Some(Arc::new(issuer)));
    }
}
