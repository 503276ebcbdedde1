//! Notices changes in directories of credentials.
//!
//! Directories are watched, not files: Kubernetes and careful people replace files by renaming.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::warn;

/// Changes in some directories, as long as it lives.
pub(crate) struct Changes {
    changed: Arc<Notify>,
    _watcher: RecommendedWatcher,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    #[error("starting to watch files")]
    Start(#[source] notify::Error),
    #[error("watching {path:?} for changes")]
    Watch {
        path: PathBuf,
        #[source]
        source: notify::Error,
    },
}

impl Changes {
    /// Watches these directories, which must exist, without their subdirectories.
    pub(crate) fn watch(dirs: &[&Path]) -> Result<Self, WatchError> {
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
            // Reading the files is an event as well, and would wake us for ever.
            Ok(event) if matches!(event.kind, EventKind::Access(_)) => {}
            Ok(_) => notify.notify_one(),
            Err(err) => {
                warn!(%err, "watching credentials failed, they are read again every {RESCAN:?}");
                notify.notify_one();
            }
        })
        .map_err(WatchError::Start)?;
        for dir in dirs {
            watcher
                .watch(dir, RecursiveMode::NonRecursive)
                .map_err(|source| WatchError::Watch {
                    path: (*dir).to_owned(),
                    source,
                })?;
        }
        Ok(Self {
            changed,
            _watcher: watcher,
        })
    }

    /// Waits for a change and until those who write are probably done.
    ///
    /// Returns after [`RESCAN`] in any case: some file systems report nothing.
    pub(crate) async fn next(&mut self) {
        // An error means that nothing was reported, which is as good a reason to look.
        if timeout(RESCAN, self.changed.notified()).await.is_ok() {
            sleep(SETTLE).await;
        }
    }

    /// Waits until this file has other content, or none.
    pub(crate) async fn wait_for_change_of(&mut self, file: &Path) {
        let before = std::fs::read(file).ok();
        while std::fs::read(file).ok() == before {
            self.next().await;
        }
    }
}

/// The directory to watch for changes of this file.
pub(crate) fn dir_of(file: &Path) -> &Path {
    match file.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// A certificate and its key are written one after the other.
const SETTLE: Duration = Duration::from_millis(100);
const RESCAN: Duration = Duration::from_secs(30);
