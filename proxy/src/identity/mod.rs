//! Our own identity: a key, and a certificate that the control plane signs and we renew in time.
//!
//! What comes out goes into [`crate::tls::creds::Credentials`]; nobody else holds a key.

use std::path::PathBuf;
use std::time::Duration;

use tulle_core::identity::Identity;

use crate::tls::creds::TrustAnchors;

pub(crate) mod certify;
pub(crate) mod key;

/// Who we are, and where the proofs are.
#[derive(Clone, Debug)]
pub struct Config {
    pub id: Identity,
    /// The SNI that peers send to reach us.
    pub server_name: String,
    /// Where `key.p8` and `csr.der` may be; we make our own where there are none.
    pub dir: Option<PathBuf>,
    pub anchors: Anchors,
    /// Read again for every request, because it is replaced before it expires.
    pub token_file: PathBuf,
    /// Bounds of the time between two certificates; 10 s and 24 h.
    pub min_refresh: Duration,
    pub max_refresh: Duration,
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

impl Anchors {
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
