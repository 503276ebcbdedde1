//! A directory of manifests as it was last read: what is good in it, what is not, and what changed.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::resources::event::Event;
use crate::resources::meta::Name;
use crate::resources::{Kind, Object};
use crate::source::dir::ManifestError;
use crate::source::manifest::{self, Manifest};
use crate::source::slices;

pub(super) struct Directory {
    root: PathBuf,
    files: BTreeMap<PathBuf, FileState>,
    /// What the last events amount to.
    published: BTreeMap<(Kind, Name), Object>,
    /// Kinds that were warned of.
    warned: HashSet<String>,
}

/// A file and what is held of it; a file with a flaw keeps the objects it had before.
#[derive(Default)]
struct FileState {
    content: Option<u64>,
    manifests: Vec<Manifest>,
    error: Option<ManifestError>,
}

/// What reading the directory again came to.
pub(super) struct Reload {
    pub(super) events: Vec<Event>,
    pub(super) errors: Vec<ManifestError>,
}

impl Directory {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            files: BTreeMap::new(),
            published: BTreeMap::new(),
            warned: HashSet::new(),
        }
    }

    /// Reads what has changed since the last time and returns it as events.
    pub(super) fn reload(&mut self) -> Reload {
        let mut errors = Vec::new();
        let mut walk = Walk::default();
        walk.enter(&self.root);
        // A directory that cannot be read says nothing about its files, so they stay as they are.
        self.files
            .retain(|path, _| walk.files.contains(path) || walk.is_unreadable(path));
        for path in &walk.files {
            let state = self.files.entry(path.clone()).or_default();
            for unknown in state.read(path) {
                if self.warned.insert(unknown.clone()) {
                    warn!(file = %path.display(), kind = unknown, "documents of this kind are not read");
                }
            }
            errors.extend(state.error.clone());
        }
        errors.extend(walk.errors);
        let objects = self.merge(&mut errors);
        Reload {
            events: self.publish(objects),
            errors,
        }
    }

    /// What a directory with one file comes to.
    #[cfg(any(test, fuzzing))]
    pub(super) fn of_one_file(bytes: &[u8]) -> Reload {
        let mut directory = Self::new(PathBuf::new());
        let mut state = FileState::default();
        state.take(Path::new("fuzz.yaml"), bytes);
        let mut errors: Vec<_> = state.error.clone().into_iter().collect();
        directory.files.insert("fuzz.yaml".into(), state);
        let objects = directory.merge(&mut errors);
        Reload {
            events: directory.publish(objects),
            errors,
        }
    }

    /// All objects of all files; of two with one name the first file's holds.
    fn merge(&self, errors: &mut Vec<ManifestError>) -> BTreeMap<(Kind, Name), Object> {
        let mut objects = BTreeMap::new();
        let mut owners: BTreeMap<(Kind, Name), &Path> = BTreeMap::new();
        for (path, state) in &self.files {
            for Manifest { object, line } in &state.manifests {
                let id = (object.kind(), object.meta().name.clone());
                if let Some(owner) = owners.get(&id) {
                    let (kind, name) = &id;
                    let reason = format!("{} {name} is already in {}", kind.info().name, owner.display());
                    errors.push(ManifestError {
                        file: path.clone(),
                        line: Some(*line),
                        reason,
                    });
                } else {
                    owners.insert(id.clone(), path);
                    objects.insert(id, object.clone());
                }
            }
        }
        let derived = slices::derive(objects.values());
        for slice in derived {
            objects
                .entry((slice.kind(), slice.meta().name.clone()))
                .or_insert(slice);
        }
        objects
    }

    fn publish(&mut self, objects: BTreeMap<(Kind, Name), Object>) -> Vec<Event> {
        let mut events = Vec::new();
        for (id, object) in &objects {
            if self.published.get(id) != Some(object) {
                events.push(Event::Applied(object.clone()));
            }
        }
        for (kind, name) in self.published.keys().filter(|id| !objects.contains_key(*id)) {
            events.push(Event::Deleted(*kind, name.clone()));
        }
        self.published = objects;
        events
    }
}

impl FileState {
    /// Reads the file if its content is new; returns kinds in it that we do not read.
    fn read(&mut self, path: &Path) -> BTreeSet<String> {
        match std::fs::read(path) {
            Ok(bytes) => self.take(path, &bytes),
            Err(error) => {
                self.content = None;
                self.fail(path, None, format!("reading the file: {error}"));
                BTreeSet::new()
            }
        }
    }

    fn take(&mut self, path: &Path, bytes: &[u8]) -> BTreeSet<String> {
        let content = hash(bytes);
        if self.content == Some(content) {
            return BTreeSet::new();
        }
        self.content = Some(content);
        let parsed = match std::str::from_utf8(bytes) {
            Ok(text) => manifest::parse(text).map_err(|flaw| (Some(flaw.line), flaw.reason)),
            Err(error) => Err((None, format!("the file is not UTF-8: {error}"))),
        };
        match parsed {
            Ok(file) => {
                self.manifests = file.manifests;
                self.error = None;
                file.unknown
            }
            Err((line, reason)) => {
                self.fail(path, line, reason);
                BTreeSet::new()
            }
        }
    }

    fn fail(&mut self, path: &Path, line: Option<usize>, reason: String) {
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

/// One walk through the directory.
#[derive(Default)]
struct Walk {
    files: BTreeSet<PathBuf>,
    unreadable: Vec<PathBuf>,
    errors: Vec<ManifestError>,
    /// Directories on the way down, by their real path: a link back to one of them would not end.
    above: Vec<PathBuf>,
}

impl Walk {
    fn enter(&mut self, dir: &Path) {
        if let Err(error) = self.list(dir) {
            let reason = format!("reading the directory: {error}");
            self.errors.push(ManifestError {
                file: dir.to_owned(),
                line: None,
                reason,
            });
            self.unreadable.push(dir.to_owned());
        }
    }

    fn list(&mut self, dir: &Path) -> io::Result<()> {
        let real = dir.canonicalize()?;
        if self.above.contains(&real) {
            return Ok(());
        }
        let entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
        self.above.push(real);
        for entry in entries {
            let path = entry.path();
            // Hidden names are editors' copies, and the directories behind the links of mounted volumes.
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let is_manifest = matches!(path.extension().and_then(OsStr::to_str), Some("yaml" | "yml"));
            // Links are followed. One that leads nowhere is a file being replaced: its objects stay until it is gone itself.
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() => self.enter(&path),
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
                    self.unreadable.push(path);
                }
            }
        }
        self.above.pop();
        Ok(())
    }

    fn is_unreadable(&self, path: &Path) -> bool {
        self.unreadable.iter().any(|dir| path.starts_with(dir))
    }
}
