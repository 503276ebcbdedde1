//! The directory source: reads manifests from disk instead of from an API server.
//!
//! It reads all `.yaml` and `.yml` files below the directory, and reads them again when they change. An invalid file is
//! reported, and its last valid objects stay. The source adds what a cluster would add: defaults, phase, readiness and host
//! addresses of pods, readiness of external workloads, and endpoints. The events have the same objects as those of an API server.

use std::collections::BTreeMap;
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

use crate::resources::KINDS;
use crate::resources::event::{Event, EventSink};
use crate::source::manifest::ManifestError;
use crate::source::manifest_directory::{ManifestDirectory, Reload};

/// The current errors and unsupported kinds of the manifests. Clones share them.
#[derive(Clone)]
pub struct ManifestReport {
    errors: Arc<Mutex<Vec<ManifestError>>>,
    n_errors: Arc<Gauge>,
    n_unsupported_files: Family<Gauge>,
    /// The files with each unsupported kind, and the gauge that counts them.
    unsupported_kinds: Arc<Mutex<UnsupportedKinds>>,
    /// Held so that kinds without objects have a series, too.
    _cache_size_gauges: Arc<[Arc<Gauge>]>,
}

/// By API version and kind.
type UnsupportedKinds = BTreeMap<(String, String), (Vec<PathBuf>, Arc<Gauge>)>;

impl ManifestReport {
    pub fn new(registry: &Registry) -> Self {
        let family = registry.gauge(
            "manifest_errors",
            "Invalid manifests. Their last valid version stays in use.",
        );
        Self {
            errors: Arc::default(),
            n_errors: family.get(&Labels::new()),
            n_unsupported_files: registry.gauge(
                "tulle_unsupported_manifests",
                "Files with documents of an unsupported kind, by kind.",
            ),
            unsupported_kinds: Arc::default(),
            _cache_size_gauges: KINDS
                .iter()
                .map(|info| info.kind.cache_size_gauge(registry, "local"))
                .collect(),
        }
    }

    /// Replaces the unsupported kinds by those of the last scan, and logs the new ones.
    fn set_unsupported_kinds(&self, found: BTreeMap<(String, String), Vec<PathBuf>>) {
        let mut kinds = self.unsupported_kinds.lock();
        kinds.retain(|kind, (_, gauge)| {
            let stays = found.contains_key(kind);
            if !stays {
                gauge.set(0);
            }
            stays
        });
        for ((api_version, kind), files) in found {
            let labels = Labels::new().with("api_version", &api_version).with("kind", &kind);
            let gauge = self.n_unsupported_files.get(&labels);
            gauge.set(i64::try_from(files.len()).unwrap_or(i64::MAX));
            let file = files[0].display().to_string();
            if kinds
                .insert((api_version.clone(), kind.clone()), (files, gauge))
                .is_none()
            {
                warn!(file, api_version, kind, "documents of an unsupported kind are ignored");
            }
        }
    }

    /// Returns the unsupported kinds, each with the files that contain it.
    pub fn unsupported_kinds(&self) -> Vec<String> {
        let kinds = self.unsupported_kinds.lock();
        let line = |((api_version, kind), (files, _)): (&(String, String), &(Vec<PathBuf>, _))| {
            let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
            format!("unsupported kind {api_version} {kind} is ignored: {}", files.join(", "))
        };
        kinds.iter().map(line).collect()
    }

    pub fn errors(&self) -> Vec<ManifestError> {
        self.errors.lock().clone()
    }

    /// Stores the errors of the last scan in place of earlier ones, and logs those that are new.
    fn set_errors(&self, errors: Vec<ManifestError>) {
        self.n_errors.set(i64::try_from(errors.len()).unwrap_or(i64::MAX));
        let old = std::mem::replace(&mut *self.errors.lock(), errors.clone());
        for error in errors.iter().filter(|error| !old.contains(error)) {
            let line = error.line.unwrap_or_default();
            error!(file = %error.file.display(), line, reason = error.reason, "invalid manifest");
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("{} is not a directory of manifests", .0.display())]
    NotADirectory(PathBuf),
    #[error("reading manifests")]
    Read(#[source] tokio::task::JoinError),
}

/// Reports the objects of a directory until the drain.
///
/// # Errors
/// Fails if `root` is not a directory. Later errors are only added to the report.
pub async fn run(
    root: PathBuf,
    sink: EventSink,
    report: ManifestReport,
    drain: drain::Watch,
) -> Result<(), DirectoryError> {
    if !root.is_dir() {
        return Err(DirectoryError::NotADirectory(root));
    }
    // Watching starts before the first scan, so that no change is missed in between.
    let (changed, mut changes) = mpsc::channel(1);
    let _watcher = watch(&root, changed.clone());
    let mut directory = ManifestDirectory::new(root.clone());
    let mut is_first = true;
    loop {
        let reading = tokio::task::spawn_blocking(move || {
            let reload = directory.reload();
            (directory, reload)
        });
        let (returned, reload) = reading.await.map_err(DirectoryError::Read)?;
        let Reload {
            mut events,
            errors,
            unsupported_kinds,
        } = reload;
        directory = returned;
        report.set_errors(errors);
        report.set_unsupported_kinds(unsupported_kinds);
        let n_events = events.len();
        if std::mem::take(&mut is_first) {
            events.push(Event::Synced);
        }
        if !events.is_empty() {
            info!(directory = %root.display(), n_events, "manifests read");
            sink.apply(events);
        }
        tokio::select! {
            () = debounce(&mut changes) => {}
            // Finds changes behind symbolic links that leave the directory, and changes whose notifications the kernel
            // dropped.
            () = time::sleep(RESCAN_INTERVAL) => {}
            () = drain.signaled() => return Ok(()),
        }
    }
}

/// Watches the directory. Without a watcher, changes are found by the periodic scan.
fn watch(root: &Path, changed: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Ignores the events of our own scan, which opens files.
        let is_own_read = event.is_ok_and(|event| {
            event.kind.is_access() && event.kind != EventKind::Access(AccessKind::Close(AccessMode::Write))
        });
        if !is_own_read {
            // If the channel is full, a change is already pending.
            let _ = changed.try_send(());
        }
    });
    let watching = watcher.and_then(|mut watcher| {
        watcher.watch(root, RecursiveMode::Recursive)?;
        Ok(watcher)
    });
    watching
        .inspect_err(|error| {
            warn!(directory = %root.display(), %error, "cannot watch the directory; changes are detected within {RESCAN_INTERVAL:?}");
        })
        .ok()
}

/// Waits for a change, then until no change follows for `DEBOUNCE_DELAY`, at most `MAX_DEBOUNCE`.
async fn debounce(changes: &mut mpsc::Receiver<()>) {
    if changes.recv().await.is_none() {
        // Cannot happen, because the caller holds a sender.
        std::future::pending::<()>().await;
    }
    let deadline = Instant::now() + MAX_DEBOUNCE;
    loop {
        let quiet_at = (Instant::now() + DEBOUNCE_DELAY).min(deadline);
        match time::timeout_at(quiet_at, changes.recv()).await {
            Ok(Some(())) if Instant::now() < deadline => {}
            _ => return,
        }
    }
}

/// Time without a change before a reload. It is longer than the pauses of a program that writes several files, or of an editor
/// that writes and renames.
const DEBOUNCE_DELAY: Duration = Duration::from_millis(50);

/// Maximum delay of a reload while changes continue.
const MAX_DEBOUNCE: Duration = Duration::from_millis(500);

const RESCAN_INTERVAL: Duration = Duration::from_secs(5);
