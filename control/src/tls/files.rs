//! Notices changes of credentials on disk.
//!
//! Directories are watched, not files: Kubernetes and careful people replace files by renaming.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::warn;

/// What is watched.
pub(crate) enum Watched<'a> {
    /// Every file of a directory.
    Dir(&'a Path),
    /// One file, whatever else happens beside it: our own log may be written there.
    File(&'a Path),
}

/// Changes in some places, as long as it lives.
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
    /// Watches these places, whose directories must exist, without subdirectories.
    pub(crate) fn watch(places: &[Watched<'_>]) -> Result<Self, WatchError> {
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        let wanted: Vec<PathBuf> = places.iter().flat_map(Watched::wanted).collect();
        let concerns = move |event: &notify::Event| {
            let is_wanted = |path: &PathBuf| {
                wanted
                    .iter()
                    .any(|wanted| path == wanted || path.parent() == Some(wanted))
            };
            // Reading the files is an event as well, and would wake us for ever.
            !matches!(event.kind, EventKind::Access(_)) && (event.need_rescan() || event.paths.iter().any(is_wanted))
        };
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
            Ok(event) if !concerns(&event) => {}
            Ok(_) => notify.notify_one(),
            Err(err) => {
                warn!(%err, "watching credentials failed, they are read again every {RESCAN:?}");
                notify.notify_one();
            }
        })
        .map_err(WatchError::Start)?;
        for dir in places.iter().map(Watched::dir) {
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

    /// Waits for a change and until those who write are probably done.
    ///
    /// Returns after [`RESCAN`] in any case: some file systems report nothing.
    pub(crate) async fn next(&mut self) {
        // An error means that nothing was reported, which is as good a reason to look.
        if timeout(RESCAN, self.changed.notified()).await.is_ok() {
            sleep(SETTLE).await;
        }
    }

    /// Waits until this file has other content than what was read of it last; `None` is a file that could not be read.
    pub(crate) async fn wait_for_other_content(&mut self, file: &Path, last_read: Option<&[u8]>) {
        while std::fs::read(file).ok().as_deref() == last_read {
            self.next().await;
        }
    }
}

impl Watched<'_> {
    fn dir(&self) -> &Path {
        match self {
            Self::Dir(dir) => dir,
            Self::File(file) => match file.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir,
                _ => Path::new("."),
            },
        }
    }

    /// Paths that matter, themselves or as the directory of what changed.
    fn wanted(&self) -> Vec<PathBuf> {
        match self {
            Self::Dir(dir) => vec![(*dir).to_owned()],
            // Kubernetes swaps a link beside the file, which the file is behind.
            Self::File(file) => vec![
                self.dir().join(file.file_name().unwrap_or_default()),
                self.dir().join("..data"),
            ],
        }
    }
}

/// A certificate and its key are written one after the other.
const SETTLE: Duration = Duration::from_millis(100);
const RESCAN: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    async fn notices(changes: &mut Changes) -> bool {
        timeout(Duration::from_secs(1), changes.changed.notified())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_file_is_watched_and_its_neighbours_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        let mut changes = Changes::watch(&[Watched::File(&file)]).unwrap();
        fs::write(dir.path().join("log"), "x").unwrap();
        assert!(!notices(&mut changes).await);
        fs::write(&file, "x").unwrap();
        assert!(notices(&mut changes).await);
        fs::write(dir.path().join("new"), "y").unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert!(notices(&mut changes).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_since_the_last_reading_is_noticed_whenever_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.crt");
        fs::write(&file, "old").unwrap();
        let mut changes = Changes::watch(&[Watched::File(&file)]).unwrap();
        let mut differs_from = async |last: Option<&[u8]>| {
            timeout(RESCAN * 3, changes.wait_for_other_content(&file, last))
                .await
                .is_ok()
        };
        assert!(!differs_from(Some(b"old")).await);
        // It was replaced while whoever had read it was busy with what it had read.
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
        for place in [Watched::File(&file), Watched::Dir(whole)] {
            let mut changes = Changes::watch(&[place]).unwrap();
            link("..two", "..data_tmp");
            fs::rename(at("..data_tmp"), at("..data")).unwrap();
            assert!(notices(&mut changes).await);
        }
        assert!(matches!(
            Changes::watch(&[Watched::Dir(&at("nothing"))]),
            Err(WatchError::Watch { .. })
        ));
    }
}
