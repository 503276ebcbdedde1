//! The directory source: manifests on disk stand in for an API server.
//!
//! Everything under the directory that ends in `.yaml` or `.yml` is read, and read again when it changes. A file with a
//! flaw is reported and its last good objects stay; defaults, admission, status and endpoint slices are ours to add,
//! so that nobody behind the events can tell the source from a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{self, Instant};
use tracing::{error, info, warn};
use tulle_core::drain;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use crate::resources::event::{Event, Writer};
use crate::source::directory::{Directory, Reload};

/// A manifest that is not in force, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    pub file: PathBuf,
    /// Counted from 1; none when the flaw is in no line.
    pub line: Option<usize>,
    pub reason: String,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file.display(), self.reason),
            None => write!(f, "{}: {}", self.file.display(), self.reason),
        }
    }
}

/// What is wrong with the manifests now; clones share it.
#[derive(Clone)]
pub struct Report {
    errors: Arc<Mutex<Vec<ManifestError>>>,
    n_errors: Arc<Gauge>,
    unread_files: Family<Gauge>,
    /// The files of each kind that is not read, and what counts them.
    unread_kinds: Arc<Mutex<UnreadKinds>>,
}

type UnreadKinds = BTreeMap<(String, String), (Vec<PathBuf>, Arc<Gauge>)>;

impl Report {
    pub fn new(registry: &Registry) -> Self {
        let family = registry.gauge(
            "manifest_errors",
            "Manifests that are refused; their last good form is in force.",
        );
        Self {
            errors: Arc::default(),
            n_errors: family.get(&Labels::new()),
            unread_files: registry.gauge(
                "tulle_unread_manifests",
                "Files with documents of a kind that is not read, by kind.",
            ),
            unread_kinds: Arc::default(),
        }
    }

    /// Takes the kinds of the latest reading that are not read, and logs those that are new.
    fn replace_unread(&self, found: BTreeMap<(String, String), Vec<PathBuf>>) {
        let mut kinds = self.unread_kinds.lock();
        kinds.retain(|kind, (_, gauge)| {
            let stays = found.contains_key(kind);
            if !stays {
                gauge.set(0);
            }
            stays
        });
        for ((api_version, kind), files) in found {
            let labels = Labels::new().with("api_version", &api_version).with("kind", &kind);
            let gauge = self.unread_files.get(&labels);
            gauge.set(i64::try_from(files.len()).unwrap_or(i64::MAX));
            let file = files[0].display().to_string();
            if kinds
                .insert((api_version.clone(), kind.clone()), (files, gauge))
                .is_none()
            {
                warn!(file, api_version, kind, "documents of this kind are not read");
            }
        }
    }

    /// Kinds that are not read, each with the files that have it.
    pub fn unread_kinds(&self) -> Vec<String> {
        let kinds = self.unread_kinds.lock();
        let line = |((api_version, kind), (files, _)): (&(String, String), &(Vec<PathBuf>, _))| {
            let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
            format!("{api_version} {kind} is not read: {}", files.join(", "))
        };
        kinds.iter().map(line).collect()
    }

    pub fn errors(&self) -> Vec<ManifestError> {
        self.errors.lock().clone()
    }

    /// Takes the errors of the latest reading and logs those that are new.
    fn replace(&self, errors: Vec<ManifestError>) {
        self.n_errors.set(i64::try_from(errors.len()).unwrap_or(i64::MAX));
        let old = std::mem::replace(&mut *self.errors.lock(), errors.clone());
        for error in errors.iter().filter(|error| !old.contains(error)) {
            let line = error.line.unwrap_or_default();
            error!(file = %error.file.display(), line, reason = error.reason, "manifest refused");
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DirError {
    #[error("{} is not a directory of manifests", .0.display())]
    NotADirectory(PathBuf),
    #[error("reading manifests")]
    Read(#[source] tokio::task::JoinError),
}

/// Reports the objects of a directory until the drain begins.
///
/// # Errors
/// When `root` is no directory at the start. Whatever goes wrong later is in the report.
pub async fn run(root: PathBuf, writer: Writer, report: Report, drain: drain::Watch) -> Result<(), DirError> {
    if !root.is_dir() {
        return Err(DirError::NotADirectory(root));
    }
    // Watching begins before reading, so that no change falls between the two.
    let (changed, mut changes) = mpsc::channel(1);
    let _watcher = watch(&root, changed.clone());
    let mut directory = Directory::new(root.clone());
    let mut first = true;
    loop {
        let reading = tokio::task::spawn_blocking(move || {
            let reload = directory.reload();
            (directory, reload)
        });
        let (read, reload) = reading.await.map_err(DirError::Read)?;
        let Reload {
            mut events,
            errors,
            unread_kinds,
        } = reload;
        directory = read;
        report.replace(errors);
        report.replace_unread(unread_kinds);
        let n_events = events.len();
        if std::mem::take(&mut first) {
            events.push(Event::Synced);
        }
        if !events.is_empty() {
            info!(directory = %root.display(), n_events, "manifests read");
            writer.apply(events);
        }
        tokio::select! {
            () = settle(&mut changes) => {}
            // Changes behind links that lead out of the directory, and those the kernel lost, are found by looking.
            () = time::sleep(LOOK_INTERVAL) => {}
            () = drain.signaled() => return Ok(()),
        }
    }
}

/// Watches the directory; without a watcher, changes are found by looking.
fn watch(root: &Path, changed: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Our own reading opens files, and must not make us read again.
        let only_read = event.is_ok_and(|event| {
            event.kind.is_access() && event.kind != EventKind::Access(AccessKind::Close(AccessMode::Write))
        });
        if !only_read {
            // A full channel already says that something changed.
            let _ = changed.try_send(());
        }
    });
    let watching = watcher.and_then(|mut watcher| {
        watcher.watch(root, RecursiveMode::Recursive)?;
        Ok(watcher)
    });
    watching
        .inspect_err(|error| {
            warn!(directory = %root.display(), %error, "not watched; changes take up to {LOOK_INTERVAL:?}");
        })
        .ok()
}

/// Waits for a change, and then until changes pause or have gone on for long enough.
async fn settle(changes: &mut mpsc::Receiver<()>) {
    if changes.recv().await.is_none() {
        // The sender is kept by the caller; without one there is nothing to wait for.
        std::future::pending::<()>().await;
    }
    let latest = Instant::now() + SETTLE_LIMIT;
    loop {
        let quiet = (Instant::now() + SETTLE_PAUSE).min(latest);
        match time::timeout_at(quiet, changes.recv()).await {
            Ok(Some(())) if Instant::now() < latest => {}
            _ => return,
        }
    }
}

/// Writers of several files, and editors that write and rename, pause less than this in between.
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// A directory that never pauses is read this often.
const SETTLE_LIMIT: Duration = Duration::from_millis(500);

const LOOK_INTERVAL: Duration = Duration::from_secs(5);
