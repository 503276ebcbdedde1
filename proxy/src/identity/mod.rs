//! Our own identity: a key, and a certificate that is renewed in time.
//!
//! The control plane signs it, or a SPIFFE Workload API on this machine hands out both.
//! What comes out goes into [`crate::tls::creds::Credentials`]; nobody else holds a key.

use std::path::PathBuf;

use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;

use crate::metrics::unreadable::{self, Message, Reporter};
use crate::tls::creds::TrustAnchors;

pub(crate) mod certify;
pub(crate) mod key;
mod metrics;
pub(crate) mod workload_api;

/// Who we are, and where the proofs are.
#[derive(Clone, Debug)]
pub struct Config {
    pub id: Identity,
    /// The SNI that peers send to reach us.
    pub server_name: String,
    pub source: Source,
}

/// Who gives us our certificate.
#[derive(Clone, Debug)]
pub enum Source {
    /// The identity service of the control plane signs a key of ours.
    ControlPlane { anchors: Anchors, certify: certify::Config },
    /// A SPIFFE Workload API hands out certificate, key and trust anchors, to which others may be added.
    WorkloadApi { socket: PathBuf, anchors: Option<Anchors> },
}

/// Where trust anchors come from at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Anchors {
    Fixed(TrustAnchors),
    /// A PEM file; it is followed while we run.
    File(PathBuf),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnchorsError {
    #[error("reading trust anchors from {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("using trust anchors from {}", .path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: crate::tls::creds::CredentialsError,
    },
}

impl Source {
    /// What is trusted at start; nobody, until a Workload API has said whom.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn anchors(&self) -> Result<TrustAnchors, AnchorsError> {
        match self {
            Self::ControlPlane { anchors, .. }
            | Self::WorkloadApi {
                anchors: Some(anchors), ..
            } => anchors.read(),
            Self::WorkloadApi { anchors: None, .. } => Ok(TrustAnchors::none()),
        }
    }
}

impl Anchors {
    /// What tells of those that cannot be read.
    fn reporter(&self, registry: &Registry) -> Reporter {
        let source = match self {
            Self::Fixed(_) => String::new(),
            Self::File(path) => path.display().to_string(),
        };
        unreadable::Families::new(registry).reporter(Message::TrustAnchors, source)
    }

    /// The bundle as it is now.
    pub fn read(&self) -> Result<TrustAnchors, AnchorsError> {
        let path = match self {
            Self::Fixed(anchors) => return Ok(anchors.clone()),
            Self::File(path) => path.clone(),
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => TrustAnchors::from_pem(&text).map_err(|source| AnchorsError::Parse { path, source }),
            Err(source) => Err(AnchorsError::Read { path, source }),
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod workload_tests;
