//! Stores the manifests of a test in a temporary directory. `tests/tests/rows` replaces this module by one with an API server,
//! which needs the arguments that are unused here.

use std::path::Path;

use tempfile::TempDir;
use tulle_control::cluster::Config;
use tulle_control::resources::event::EventSink;
use tulle_control::source::directory_source::{self, ManifestReport};
use tulle_core::drain;
use tulle_core::metrics::Registry;

pub(crate) struct ManifestStore {
    dir: TempDir,
    report: ManifestReport,
}

impl ManifestStore {
    pub(crate) async fn new(yaml: &str, registry: &Registry) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("mesh.yaml"), yaml).unwrap();
        Self {
            dir,
            report: ManifestReport::new(registry),
        }
    }

    /// Returns a source that reads and watches the directory.
    pub(crate) async fn source(
        &self,
        _config: &Config,
        sink: EventSink,
        _registry: &Registry,
        drain: drain::Watch,
    ) -> impl Future<Output = ()> + Send + use<> {
        let source = directory_source::run(self.dir.path().to_owned(), sink, self.report.clone(), drain);
        async { source.await.unwrap() }
    }

    pub(crate) fn errors(&self) -> Vec<String> {
        self.report.errors().iter().map(ToString::to_string).collect()
    }

    /// Replaces a file atomically, by a rename.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        let new = self.path().join(format!(".{}.tmp", name.replace('/', "_")));
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.path().join(name)).unwrap();
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}
