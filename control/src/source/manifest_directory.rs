//! State of the manifest directory: valid objects, errors, and the difference to the previous scan.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::resources::event::Event;
use crate::resources::meta::NamespacedName;
use crate::resources::unreadable::Unreadable;
use crate::resources::{Kind, Object};
use crate::source::derived_endpoints;
use crate::source::manifest::{self, Manifest, ManifestError};

pub(super) struct ManifestDirectory {
    root: PathBuf,
    files: BTreeMap<PathBuf, FileState>,
    /// The objects that consumers have after all events so far.
    published: BTreeMap<(Kind, NamespacedName), Object>,
    /// Objects that were reported as unreadable.
    unreadable: BTreeMap<(Kind, NamespacedName), Arc<Unreadable>>,
}

/// The state of one file. An invalid file keeps the objects of its last valid version.
#[derive(Default)]
struct FileState {
    content_hash: Option<u64>,
    manifests: Vec<Manifest>,
    /// Invalid objects in the current content of the file.
    unreadable: Vec<Arc<Unreadable>>,
    had_valid_version: bool,
    error: Option<ManifestError>,
    unsupported_kinds: BTreeSet<(String, String)>,
}

pub(super) struct Reload {
    pub(super) events: Vec<Event>,
    pub(super) errors: Vec<ManifestError>,
    /// Files with documents of an unsupported kind, by `apiVersion` and kind.
    pub(super) unsupported_kinds: BTreeMap<(String, String), Vec<PathBuf>>,
}

impl ManifestDirectory {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            files: BTreeMap::new(),
            published: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Reads the changed files and returns the changes as events.
    pub(super) fn reload(&mut self) -> Reload {
        let mut errors = Vec::new();
        let mut scan = DirectoryScan::default();
        scan.scan(&self.root);
        // The files of a directory that cannot be read keep their objects.
        self.files
            .retain(|path, _| scan.files.contains(path) || scan.is_inaccessible(path));
        for path in &scan.files {
            let state = self.files.entry(path.clone()).or_default();
            state.read(path);
            errors.extend(state.error.clone());
        }
        errors.extend(scan.errors);
        let objects = self.merge(&mut errors);
        Reload {
            events: self.diff_events(objects),
            errors,
            unsupported_kinds: self.unsupported_kinds(),
        }
    }

    fn unsupported_kinds(&self) -> BTreeMap<(String, String), Vec<PathBuf>> {
        let mut found: BTreeMap<_, Vec<PathBuf>> = BTreeMap::new();
        for (path, state) in &self.files {
            for kind in &state.unsupported_kinds {
                found.entry(kind.clone()).or_default().push(path.clone());
            }
        }
        found
    }

    /// Loads a directory that contains only this file.
    #[cfg(any(test, fuzzing))]
    pub(super) fn load_single_file(bytes: &[u8]) -> Reload {
        let mut directory = Self::new(PathBuf::new());
        let mut state = FileState::default();
        state.parse_if_changed(Path::new("fuzz.yaml"), bytes);
        let mut errors: Vec<_> = state.error.clone().into_iter().collect();
        directory.files.insert("fuzz.yaml".into(), state);
        let objects = directory.merge(&mut errors);
        Reload {
            events: directory.diff_events(objects),
            errors,
            unsupported_kinds: directory.unsupported_kinds(),
        }
    }

    /// Merges the objects of all files. If two files define the same object, the first file takes precedence.
    fn merge(&self, errors: &mut Vec<ManifestError>) -> BTreeMap<(Kind, NamespacedName), Object> {
        let mut objects = BTreeMap::new();
        let mut defining_files: BTreeMap<(Kind, NamespacedName), &Path> = BTreeMap::new();
        for (path, state) in &self.files {
            for Manifest { object, line } in &state.manifests {
                let id = (object.kind(), object.meta().name.clone());
                if let Some(other) = defining_files.get(&id) {
                    let (kind, name) = &id;
                    let reason = format!("{} {name} is already in {}", kind.info().name, other.display());
                    errors.push(ManifestError {
                        file: path.clone(),
                        line: Some(*line),
                        reason,
                    });
                } else {
                    defining_files.insert(id.clone(), path);
                    objects.insert(id, object.clone());
                }
            }
        }
        let derived = derived_endpoints::derive_endpoints(objects.values());
        for object in derived {
            objects
                .entry((object.kind(), object.meta().name.clone()))
                .or_insert(object);
        }
        objects
    }

    fn diff_events(&mut self, objects: BTreeMap<(Kind, NamespacedName), Object>) -> Vec<Event> {
        let mut unreadable = BTreeMap::new();
        for found in self.files.values().flat_map(|state| &state.unreadable) {
            let id = (found.kind, found.name.clone());
            unreadable.entry(id).or_insert_with(|| found.clone());
        }
        let mut events = Vec::new();
        for (id, object) in &objects {
            // Consumers must also receive an object that was unreadable and is now the same as before.
            let is_readable_again = self.unreadable.contains_key(id) && !unreadable.contains_key(id);
            if is_readable_again || self.published.get(id) != Some(object) {
                events.push(Event::Applied(object.clone()));
            }
        }
        for (id, found) in &unreadable {
            if self.unreadable.get(id) != Some(found) {
                events.push(Event::Unreadable(found.clone()));
            }
        }
        let before: BTreeSet<_> = self.published.keys().chain(self.unreadable.keys()).collect();
        let exists = |id: &(Kind, NamespacedName)| objects.contains_key(id) || unreadable.contains_key(id);
        for (kind, name) in before.into_iter().filter(|id| !exists(id)) {
            events.push(Event::Deleted(*kind, name.clone()));
        }
        self.published = objects;
        self.unreadable = unreadable;
        events
    }
}

impl FileState {
    /// Reads the file if its content is new.
    fn read(&mut self, path: &Path) {
        match std::fs::read(path) {
            Ok(bytes) => self.parse_if_changed(path, &bytes),
            Err(error) => {
                self.content_hash = None;
                self.set_error(path, None, format!("reading the file: {error}"));
            }
        }
    }

    /// Parses the file if its content has changed. The last valid version of an invalid file stays in use. Before there is one,
    /// the valid objects of the file are used. In both cases, invalid objects are reported as unreadable: one without a valid
    /// version is replaced by its placeholder.
    fn parse_if_changed(&mut self, path: &Path, bytes: &[u8]) {
        let content = hash(bytes);
        if self.content_hash == Some(content) {
            return;
        }
        self.content_hash = Some(content);
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => return self.set_error(path, None, format!("the file is not UTF-8: {error}")),
        };
        let manifest::ManifestFile {
            manifests,
            unreadable,
            error,
            unsupported_kinds,
        } = manifest::parse(text);
        self.unreadable = unreadable.into_iter().map(Arc::new).collect();
        self.unsupported_kinds = unsupported_kinds;
        self.had_valid_version |= error.is_none();
        if error.is_none() || !self.had_valid_version {
            self.manifests = manifests;
        }
        match error {
            Some(error) => self.set_error(path, Some(error.line), error.reason),
            None => self.error = None,
        }
    }

    fn set_error(&mut self, path: &Path, line: Option<usize>, reason: String) {
        self.error = Some(ManifestError {
            file: path.to_owned(),
            line,
            reason,
        });
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// One scan of the directory tree.
#[derive(Default)]
struct DirectoryScan {
    files: BTreeSet<PathBuf>,
    /// Directories and files that could not be read.
    inaccessible_paths: Vec<PathBuf>,
    errors: Vec<ManifestError>,
    /// Canonical paths of the parent directories, to detect links that form a loop.
    ancestors: Vec<PathBuf>,
}

impl DirectoryScan {
    fn scan(&mut self, dir: &Path) {
        if let Err(error) = self.scan_entries(dir) {
            let reason = format!("reading the directory: {error}");
            self.errors.push(ManifestError {
                file: dir.to_owned(),
                line: None,
                reason,
            });
            self.inaccessible_paths.push(dir.to_owned());
        }
    }

    fn scan_entries(&mut self, dir: &Path) -> io::Result<()> {
        let real = dir.canonicalize()?;
        if self.ancestors.contains(&real) {
            return Ok(());
        }
        let entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
        self.ancestors.push(real);
        for entry in entries {
            let path = entry.path();
            // Hidden names are backup copies of editors, and the real directories of mounted Kubernetes volumes.
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let is_manifest = matches!(path.extension().and_then(OsStr::to_str), Some("yaml" | "yml"));
            // Symbolic links are followed. A dangling link is a file that is being replaced: its objects stay until the
            // link is gone.
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() => self.scan(&path),
                Ok(_) if is_manifest => drop(self.files.insert(path)),
                Ok(_) => {}
                Err(error) => {
                    if is_manifest {
                        self.errors.push(ManifestError {
                            file: path.clone(),
                            line: None,
                            reason: format!("reading the file: {error}"),
                        });
                    }
                    self.inaccessible_paths.push(path);
                }
            }
        }
        self.ancestors.pop();
        Ok(())
    }

    fn is_inaccessible(&self, path: &Path) -> bool {
        self.inaccessible_paths.iter().any(|dir| path.starts_with(dir))
    }
}
