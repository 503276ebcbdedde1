//! The issuer and the trust anchors of now: read again when their files change, kept when the new ones are bad.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{info, warn};

use super::events::Events;
use super::issuer::{Issuer, IssuerError, rfc3339};
use crate::tls::anchors::{self, TrustAnchors};
use crate::tls::files::Watched;

/// Holds the issuer; empty until the files are there.
pub(crate) struct Authority {
    issuer_dir: PathBuf,
    anchors_path: PathBuf,
    /// What the identity service itself is called; every issuer must be able to sign it.
    name: String,
    current: watch::Sender<Option<Arc<Issuer>>>,
    /// What was wrong when it was looked at last, so that it is told once.
    problem: Mutex<Option<String>>,
    events: Events,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LoadError {
    #[error("loading trust anchors")]
    Anchors(#[source] anchors::Error),
    #[error("loading the issuer")]
    Issuer(#[source] IssuerError),
}

impl Authority {
    pub(crate) fn new(issuer_dir: PathBuf, anchors_path: PathBuf, name: String, events: Events) -> Self {
        Self {
            issuer_dir,
            anchors_path,
            name,
            current: watch::Sender::new(None),
            problem: Mutex::new(None),
            events,
        }
    }

    /// Loads what is there now; the old issuer stays when the new one is bad.
    pub(crate) fn reload(&self) {
        match self.load() {
            Ok(issuer) => {
                self.problem.lock().take();
                self.replace(issuer);
            }
            Err(err) => {
                let problem = Some(format!("{err:?}"));
                if std::mem::replace(&mut *self.problem.lock(), problem.clone()) == problem {
                    return;
                }
                let kept = self.current.borrow().is_some();
                warn!(error = &err as &dyn std::error::Error, kept, "issuer update skipped");
                self.events.issuer_update_skipped(with_causes(&err));
            }
        }
    }

    /// The issuer of now.
    pub(crate) fn issuer(&self) -> Option<Arc<Issuer>> {
        self.current.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<Issuer>>> {
        self.current.subscribe()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What changes matter.
    pub(crate) fn places(&self) -> [Watched<'_>; 2] {
        [Watched::Dir(&self.issuer_dir), Watched::File(&self.anchors_path)]
    }

    fn load(&self) -> Result<Issuer, LoadError> {
        let anchors = TrustAnchors::read(&self.anchors_path).map_err(LoadError::Anchors)?;
        Issuer::load(&self.issuer_dir, anchors, &self.name).map_err(LoadError::Issuer)
    }

    /// Takes a new issuer, unless it is the one that is there: those who wait would renew for nothing.
    fn replace(&self, issuer: Issuer) {
        let is_same =
            |old: &Arc<Issuer>| old.chain() == issuer.chain() && old.anchors().certs() == issuer.anchors().certs();
        if self.current.borrow().as_ref().is_some_and(is_same) {
            return;
        }
        let (expires_at, n_anchors) = (rfc3339(issuer.expires_at()), issuer.anchors().certs().len());
        info!(expires_at, n_anchors, "issuer updated");
        self.events.issuer_updated(format!(
            "the issuer is valid until {expires_at} and leads to one of {n_anchors} trust anchors"
        ));
        self.current.send_replace(Some(Arc::new(issuer)));
    }
}

/// The error and what caused it, on one line.
pub(super) fn with_causes(err: &dyn std::error::Error) -> String {
    let mut text = err.to_string();
    let mut source = err.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
