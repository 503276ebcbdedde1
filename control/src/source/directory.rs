//! A directory of manifests as it was last read: what is good in it, what is not, and what changed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::resources::event::Event;
use crate::resources::meta::Name;
use crate::resources::unreadable::Unreadable;
use crate::resources::{Kind, Object};
use crate::source::dir::ManifestError;
use crate::source::manifest::{self, Manifest};
use crate::source::slices;

pub(super) struct Directory {
    root: PathBuf,
    files: BTreeMap<PathBuf, FileState>,
    /// What the last events amount to.
    published: BTreeMap<(Kind, Name), Object>,
    /// Objects that were reported as unreadable.
    unreadable: BTreeMap<(Kind, Name), Arc<Unreadable>>,
}

/// A file and what is held of it; a file with a flaw keeps the objects it had before.
#[derive(Default)]
struct FileState {
    content: Option<u64>,
    manifests: Vec<Manifest>,
    /// Objects that its newest form has and that are refused.
    unreadable: Vec<Arc<Unreadable>>,
    /// Whether it had a form without a flaw, which holds.
    was_good: bool,
    error: Option<ManifestError>,
    unread_kinds: BTreeSet<(String, String)>,
}

/// What reading the directory again came to.
pub(super) struct Reload {
    pub(super) events: Vec<Event>,
    pub(super) errors: Vec<ManifestError>,
    /// Files that have documents of a kind that is not read, by its `apiVersion` and name.
    pub(super) unread_kinds: BTreeMap<(String, String), Vec<PathBuf>>,
}

impl Directory {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            files: BTreeMap::new(),
            published: BTreeMap::new(),
            unreadable: BTreeMap::new(),
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
            state.read(path);
            errors.extend(state.error.clone());
        }
        errors.extend(walk.errors);
        let objects = self.merge(&mut errors);
        Reload {
            events: self.publish(objects),
            errors,
            unread_kinds: self.unread_kinds(),
        }
    }

    fn unread_kinds(&self) -> BTreeMap<(String, String), Vec<PathBuf>> {
        let mut found: BTreeMap<_, Vec<PathBuf>> = BTreeMap::new();
        for (path, state) in &self.files {
            for kind in &state.unread_kinds {
                found.entry(kind.clone()).or_default().push(path.clone());
            }
        }
        found
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
            unread_kinds: directory.unread_kinds(),
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
        let mut unreadable = BTreeMap::new();
        for found in self.files.values().flat_map(|state| &state.unreadable) {
            let id = (found.kind, found.name.clone());
            unreadable.entry(id).or_insert_with(|| found.clone());
        }
        let mut events = Vec::new();
        for (id, object) in &objects {
            // One that could not be read for a while may be what it was before.
            let is_mended = self.unreadable.contains_key(id) && !unreadable.contains_key(id);
            if is_mended || self.published.get(id) != Some(object) {
                events.push(Event::Applied(object.clone()));
            }
        }
        for (id, found) in &unreadable {
            if self.unreadable.get(id) != Some(found) {
                events.push(Event::Unreadable(found.clone()));
            }
        }
        let before: BTreeSet<_> = self.published.keys().chain(self.unreadable.keys()).collect();
        let is_there = |id: &(Kind, Name)| objects.contains_key(id) || unreadable.contains_key(id);
        for (kind, name) in before.into_iter().filter(|id| !is_there(id)) {
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
            Ok(bytes) => self.take(path, &bytes),
            Err(error) => {
                self.content = None;
                self.fail(path, None, format!("reading the file: {error}"));
            }
        }
    }

    /// Of a file that never was without a flaw the objects hold that have none.
    fn take(&mut self, path: &Path, bytes: &[u8]) {
        let content = hash(bytes);
        if self.content == Some(content) {
            return;
        }
        self.content = Some(content);
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => return self.fail(path, None, format!("the file is not UTF-8: {error}")),
        };
        let manifest::File {
            manifests,
            unreadable,
            flaw,
            unread_kinds,
        } = manifest::parse(text);
        self.unreadable = unreadable.into_iter().map(Arc::new).collect();
        self.unread_kinds = unread_kinds;
        self.was_good |= flaw.is_none();
        if flaw.is_none() || !self.was_good {
            self.manifests = manifests;
        }
        match flaw {
            Some(flaw) => self.fail(path, Some(flaw.line), flaw.reason),
            None => self.error = None,
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
