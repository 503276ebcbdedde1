//! The source of the configured trust anchors.

use std::path::PathBuf;

use tulle_core::metrics::Registry;

use crate::metrics::invalid_updates::{self, InvalidUpdateReporter, UpdateKind};
use crate::tls::credentials::{CredentialsError, TrustAnchors};

/// The source of the configured trust anchors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrustAnchorSource {
    Fixed(TrustAnchors),
    /// A PEM file; it is watched while the proxy runs.
    File(PathBuf),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnchorsError {
    #[error("the trust anchors in {} cannot be read", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the trust anchors in {} cannot be used", .path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: CredentialsError,
    },
}

impl TrustAnchorSource {
    /// Creates the reporter of a file of trust anchors that cannot be used.
    pub(super) fn reporter(&self, registry: &Registry) -> InvalidUpdateReporter {
        let source = match self {
            Self::Fixed(_) => String::new(),
            Self::File(path) => path.display().to_string(),
        };
        invalid_updates::Families::new(registry).reporter(UpdateKind::TrustAnchors, source)
    }

    /// Reads the current trust anchors of the source.
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
