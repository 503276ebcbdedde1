//! The environment of the process besides its configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tulle_core::addr::OrigDst;
use tulle_core::logging::LogHandle;

use crate::net::orig_dst;

/// Looks up the original destination of an accepted connection, given its socket and its peer's address.
pub type OrigDstLookup = Arc<dyn Fn(&TcpStream, SocketAddr) -> std::io::Result<OrigDst> + Send + Sync>;

/// The environment of the process besides its configuration.
pub struct ProcessContext {
    pub log: Option<LogHandle>,
    /// Variables that the admin server may show.
    pub env: BTreeMap<String, String>,
    /// Looks up original destinations; behind redirect rules the kernel knows them.
    pub orig_dst: OrigDstLookup,
}

impl ProcessContext {
    /// The context of a sidecar behind redirect rules.
    pub fn with_redirect(log: Option<LogHandle>, env: BTreeMap<String, String>) -> Self {
        Self {
            log,
            env,
            orig_dst: Arc::new(orig_dst::lookup),
        }
    }
}
