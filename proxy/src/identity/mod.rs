//! The proxy's identity: a key, and a certificate that is renewed in time.
//!
//! The control plane signs a certificate for the proxy's key, or a SPIFFE Workload API on this host provides certificate, key
//! and trust anchors. The result goes into [`crate::tls::credentials::Credentials`]; no other module holds a key.

use std::path::PathBuf;

use tulle_core::identity::Identity;

use crate::identity::anchors::{AnchorsError, TrustAnchorSource};
use crate::tls::credentials::TrustAnchors;

pub(crate) mod anchors;
pub(crate) mod certify;
pub(crate) mod key;
mod metrics;
pub(crate) mod workload_api;

/// The identity of the proxy, and the source of its credentials.
#[derive(Clone, Debug)]
pub struct Config {
    pub id: Identity,
    /// The SNI that peers use for this proxy.
    pub server_name: String,
    pub source: IdentitySource,
}

/// The source of the certificate.
#[derive(Clone, Debug)]
pub enum IdentitySource {
    /// The identity service of the control plane signs a certificate for the proxy's key.
    ControlPlane {
        anchors: TrustAnchorSource,
        certify: certify::Config,
    },
    /// A SPIFFE Workload API provides certificate, key and trust anchors; other trust anchors may be added.
    WorkloadApi {
        socket: PathBuf,
        anchors: Option<TrustAnchorSource>,
    },
}

impl IdentitySource {
    /// The configured trust anchors; none if only a Workload API provides them.
    ///
    /// # Errors
    /// The file cannot be read.
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

#[cfg(test)]
mod tests;
#[cfg(test)]
mod workload_api_tests;
