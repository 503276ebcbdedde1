//! The slots for clusters on a machine. Each slot has its own names for files, network namespaces and cgroups.

use std::fs::File;
use std::mem;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::fcntl::{Flock, FlockArg};
use tokio::time::sleep;

use super::processes;

/// A slot for one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    dir: PathBuf,
    namespace_prefix: String,
    cgroup_prefix: String,
}

/// The right to start and remove a cluster in a slot.
pub(super) struct SlotLock {
    pub(super) slot: Slot,
    _lock: Flock<File>,
}

impl Slot {
    /// The slot of detached clusters.
    pub(super) fn detached() -> Self {
        Self::new(1)
    }

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (1..=N_SLOTS).map(Self::new)
    }

    fn new(number: u8) -> Self {
        let name = format!("tulle-cluster-{number}");
        Self {
            dir: Path::new(PARENT_DIR).join(&name),
            namespace_prefix: format!("{name}-"),
            cgroup_prefix: format!("{name}-node"),
        }
    }

    /// Directory of the files of the cluster. Programs also write some to other paths.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Prefix of the network namespaces.
    pub(super) fn namespace_prefix(&self) -> &str {
        &self.namespace_prefix
    }

    /// Prefix of the cgroups of nodes, which are also the names of their pod networks.
    pub(super) fn cgroup_prefix(&self) -> &str {
        &self.cgroup_prefix
    }

    /// Marks the cluster of this slot as one that outlives the process that started it.
    pub(super) fn mark_detached(&self) -> anyhow::Result<()> {
        std::fs::write(self.dir.join(DETACHED_MARKER), "").context("marking the cluster as detached")
    }

    /// Whether a detached cluster is running in this slot.
    pub(super) fn has_detached_cluster(&self) -> anyhow::Result<bool> {
        Ok(self.dir.join(DETACHED_MARKER).exists() && processes::is_alive(&self.dir)?)
    }

    /// Locks this slot; `None` if the cluster of a running test uses it.
    pub(super) fn try_lock(&self) -> anyhow::Result<Option<SlotLock>> {
        let path = self.dir.with_extension("lock");
        let lock = try_lock_file(&path)?.map(|lock| SlotLock {
            slot: self.clone(),
            _lock: lock,
        });
        Ok(lock)
    }

    /// Waits until no running test uses this slot, and locks it.
    pub(super) async fn lock(&self) -> anyhow::Result<SlotLock> {
        wait_for_lock(|| self.try_lock()).await
    }
}

/// Locks the socket for device plugins, which all kubelets of a machine create at the same path: if two do so at the same moment,
/// one of them exits.
pub(super) async fn lock_device_plugins() -> anyhow::Result<Flock<File>> {
    wait_for_lock(try_lock_device_plugins).await
}

/// Returns `None` while the kubelet of another cluster starts.
pub(super) fn try_lock_device_plugins() -> anyhow::Result<Option<Flock<File>>> {
    try_lock_file(&Path::new(PARENT_DIR).join("tulle-kubelet.lock"))
}

/// Waits for a slot without a cluster, and locks it.
pub(super) async fn lock_free_slot() -> anyhow::Result<SlotLock> {
    wait_for_lock(|| {
        for slot in Slot::all() {
            if slot.has_detached_cluster()? {
                continue;
            }
            if let Some(lock) = slot.try_lock()? {
                return Ok(Some(lock));
            }
        }
        Ok(None)
    })
    .await
}

/// Waits until no slot has a cluster, and locks all slots.
pub(super) async fn lock_all_slots() -> anyhow::Result<Vec<SlotLock>> {
    let mut locks = Vec::new();
    // In the same order everywhere, so that two callers do not wait for each other.
    for slot in Slot::all() {
        ensure!(
            !slot.has_detached_cluster()?,
            "a detached cluster is running; `./run cluster down` stops it"
        );
        locks.push(slot.lock().await?);
    }
    Ok(locks)
}

async fn wait_for_lock<T>(try_lock: impl Fn() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    let mut is_printed = false;
    loop {
        if let Some(lock) = try_lock()? {
            return Ok(lock);
        }
        if !mem::replace(&mut is_printed, true) {
            eprintln!("cluster: waiting for another cluster");
        }
        sleep(POLL_INTERVAL).await;
    }
}

fn try_lock_file(path: &Path) -> anyhow::Result<Option<Flock<File>>> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error).with_context(|| format!("locking {}", path.display())),
    }
}

/// Also the number of cluster tests that `.config/nextest.toml` runs at a time.
const N_SLOTS: u8 = 2;
const PARENT_DIR: &str = "/var/tmp";
/// Distinguishes a detached cluster from one whose test was killed.
const DETACHED_MARKER: &str = "detached";
const POLL_INTERVAL: Duration = Duration::from_millis(100);
