//! Detects changes of credential and configuration files.
//!
//! Watches directories instead of files, because files are usually replaced by rename.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::warn;

pub(crate) enum WatchPath<'a> {
    /// All files in a directory.
    Dir(&'a Path),
    /// One file. Changes of other files in its directory are ignored, because our own log could be one of them.
    File(&'a Path),
}

/// Watches some paths until it is dropped.
pub(crate) struct FileWatcher {
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

impl FileWatcher {
    /// Watches these paths without subdirectories. Their directories must exist.
    pub(crate) fn watch(paths: &[WatchPath<'_>]) -> Result<Self, WatchError> {
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        let wanted: Vec<PathBuf> = paths.iter().flat_map(WatchPath::matched_paths).collect();
        let is_relevant = move |event: &notify::Event| {
            let is_wanted = |path: &PathBuf| {
                wanted
                    .iter()
                    .any(|wanted| path == wanted || path.parent() == Some(wanted))
            };
            // Ignores read accesses. Otherwise our own reads would cause endless wakeups.
            !matches!(event.kind, EventKind::Access(_)) && (event.need_rescan() || event.paths.iter().any(is_wanted))
        };
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
            Ok(event) if !is_relevant(&event) => {}
            Ok(_) => notify.notify_one(),
            Err(err) => {
                warn!(%err, "watching files failed; they are read again every {RESCAN_INTERVAL:?}");
                notify.notify_one();
            }
        })
        .map_err(WatchError::Start)?;
        for dir in paths.iter().map(WatchPath::watched_dir) {
            watcher
                .watch(dir, RecursiveMode::NonRecursive)
                .map_err(|source| WatchError::Watch {
                    path: dir.to_owned(),
                    source,
                })?;
        }
        Ok(Self {
            changed,
            _watcher: watcher,
        })
    }

    /// Waits for a change, then for `DEBOUNCE_DELAY`.
    ///
    /// Returns after `RESCAN_INTERVAL` at the latest, because some file systems do not report changes.
    pub(crate) async fn wait_for_change(&mut self) {
        if timeout(RESCAN_INTERVAL, self.changed.notified()).await.is_ok() {
            sleep(DEBOUNCE_DELAY).await;
        }
    }

    /// Waits until the content of the file differs from `last_read`, which is `None` if the file could not be read.
    pub(crate) async fn wait_for_content_change(&mut self, file: &Path, last_read: Option<&[u8]>) {
        while std::fs::read(file).ok().as_deref() == last_read {
            self.wait_for_change().await;
        }
    }
}

impl WatchPath<'_> {
    fn watched_dir(&self) -> &Path {
        match self {
            Self::Dir(dir) => dir,
            Self::File(file) => match file.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir,
                _ => Path::new("."),
            },
        }
    }

    /// Returns the paths with relevant events: an event is relevant if its path, or the parent of its path, is one of these.
    fn matched_paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Dir(dir) => vec![(*dir).to_owned()],
            // In volumes of Kubernetes the file is a symlink through `..data`, which Kubernetes replaces.
            Self::File(file) => vec![
                self.watched_dir().join(file.file_name().unwrap_or_default()),
                self.watched_dir().join("..data"),
            ],
        }
    }
}

/// Delay after a change, so that the writes of a certificate and of its key are read together.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(100);
const RESCAN_INTERVAL: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    async fn is_notified(changes: &mut FileWatcher) -> bool {
        timeout(Duration::from_secs(1), changes.changed.notified())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_file_is_watched_and_its_neighbours_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        let mut changes = FileWatcher::watch(&[WatchPath::File(&file)]).unwrap();
        fs::write(dir.path().join("log"), "x").unwrap();
        assert!(!is_notified(&mut changes).await);
        fs::write(&file, "x").unwrap();
        assert!(is_notified(&mut changes).await);
        fs::write(dir.path().join("new"), "y").unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert!(is_notified(&mut changes).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_since_the_last_read_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        fs::write(&file, "old").unwrap();
        let mut changes = FileWatcher::watch(&[WatchPath::File(&file)]).unwrap();
        let mut differs_from = async |last: Option<&[u8]>| {
            timeout(RESCAN_INTERVAL * 3, changes.wait_for_content_change(&file, last))
                .await
                .is_ok()
        };
        assert!(!differs_from(Some(b"old")).await);
        // The file was replaced after the read and before the next wait.
        fs::write(&file, "new").unwrap();
        assert!(differs_from(Some(b"old")).await);
        assert!(!differs_from(Some(b"new")).await);
        assert!(differs_from(None).await);
        fs::remove_file(&file).unwrap();
        assert!(differs_from(Some(b"new")).await);
    }

    #[tokio::test]
    async fn a_directory_as_kubernetes_mounts_it_is_watched_through_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        for version in ["..one", "..two"] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("ca.crt"), version).unwrap();
        }
        link("..one", "..data");
        link("..data/ca.crt", "ca.crt");
        let (file, whole) = (at("ca.crt"), dir.path());
        for path in [WatchPath::File(&file), WatchPath::Dir(whole)] {
            let mut changes = FileWatcher::watch(&[path]).unwrap();
            link("..two", "..data_tmp");
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
            assert!(is_notified(&mut changes).await);
        }
        assert!(matches!(
            FileWatcher::watch(&[WatchPath::Dir(&at("nothing"))]),
            Err(WatchError::Watch { .. })
        ));
    }
}
