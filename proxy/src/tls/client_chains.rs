//! The certificates of clients with open connections: how long they are valid, and whether the trust anchors still verify them.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::{Error, RootCertStore};
use smallvec::SmallVec;
use tokio::sync::Notify;

use crate::tls::certificate;

/// The certificates of a client, shared by its open connections.
pub(crate) struct ClientChain {
    certificates: Box<[CertificateDer<'static>]>,
    not_after: SystemTime,
    is_trusted: AtomicBool,
    became_untrusted: Notify,
}

/// The chains of all clients with open connections.
#[derive(Default)]
pub(super) struct ClientChains {
    hasher: RandomState,
    open: Mutex<OpenChains>,
}

#[derive(Default)]
struct OpenChains {
    by_hash: HashMap<u64, SmallVec<[Weak<ClientChain>; 1]>>,
    /// Number of hashes above which those without an open connection are removed.
    sweep_threshold: usize,
}

impl ClientChain {
    /// The time at which the first of the certificates expires.
    pub(crate) fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// The time until the first of the certificates expires, at most ten years.
    pub(crate) fn remaining_validity(&self) -> Duration {
        certificate::remaining_validity(self.not_after)
    }

    /// Waits until the trust anchors no longer verify the chain.
    pub(crate) async fn wait_untrusted(&self) {
        let mut became_untrusted = pin!(self.became_untrusted.notified());
        // Enabled before the check, so that no notification is lost in between.
        became_untrusted.as_mut().enable();
        if self.is_trusted() {
            became_untrusted.await;
        }
    }

    /// Waits until a certificate of the chain has expired, or the trust anchors no longer verify the chain.
    pub(crate) async fn wait_invalid(&self) {
        tokio::select! {
            () = tokio::time::sleep(self.remaining_validity()) => {}
            () = self.wait_untrusted() => {}
        }
    }

    /// False once the trust anchors no longer verify the chain. It does not become true again.
    pub(crate) fn is_trusted(&self) -> bool {
        self.is_trusted.load(Ordering::Acquire)
    }

    fn mark_untrusted(&self) {
        self.is_trusted.store(false, Ordering::Release);
        self.became_untrusted.notify_waiters();
    }
}

impl fmt::Debug for ClientChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientChain")
            .field("certificates", &self.certificates.len())
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

impl ClientChains {
    /// Returns the chain for a new connection whose client has these certificates.
    ///
    /// # Errors
    /// There is no certificate, or one cannot be parsed.
    pub(super) fn open(
        &self,
        certificates: &[CertificateDer<'static>],
        anchors: &RootCertStore,
    ) -> Result<Arc<ClientChain>, Error> {
        let mut hasher = self.hasher.build_hasher();
        for certificate in certificates {
            hasher.write(certificate);
        }
        let mut open = self.open.lock();
        let same_hash = open.by_hash.entry(hasher.finish()).or_default();
        same_hash.retain(|chain| chain.strong_count() > 0);
        // If the trust anchors verify the certificates again, new connections get a new chain, because those of the former one end.
        let is_same = |chain: &Arc<ClientChain>| *chain.certificates == *certificates && chain.is_trusted();
        if let Some(chain) = same_hash.iter().filter_map(Weak::upgrade).find(is_same) {
            return Ok(chain);
        }
        let chain = Arc::new(ClientChain {
            certificates: certificates.into(),
            not_after: certificate::chain_validity(certificates, anchors)?.not_after,
            is_trusted: AtomicBool::new(true),
            became_untrusted: Notify::new(),
        });
        same_hash.push(Arc::downgrade(&chain));
        open.sweep();
        Ok(chain)
    }

    /// Marks the chains that `is_trusted` refuses; their connections then end. The second argument of `is_trusted` is
    /// [`ClientChain::not_after`].
    pub(super) fn mark_untrusted(&self, is_trusted: impl Fn(&[CertificateDer<'_>], SystemTime) -> bool) {
        // The signatures are verified without the lock.
        let chains: Vec<_> = {
            let open = self.open.lock();
            open.by_hash.values().flatten().filter_map(Weak::upgrade).collect()
        };
        for chain in chains {
            if !is_trusted(&chain.certificates, chain.not_after) {
                chain.mark_untrusted();
            }
        }
    }
}

impl OpenChains {
    fn sweep(&mut self) {
        if self.by_hash.len() > self.sweep_threshold {
            let is_open = |chain: &Weak<ClientChain>| chain.strong_count() > 0;
            self.by_hash.retain(|_, chains| chains.iter().any(is_open));
            self.sweep_threshold = 2 * self.by_hash.len();
        }
    }
}
