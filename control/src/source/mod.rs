//! Sources of Kubernetes objects: an API server, or a directory of manifests.
//!
//! A source reads objects and reports them as events to an [`EventSink`](crate::resources::event::EventSink). It
//! sends `Synced` after all existing objects.

mod defaulting;
mod derived_endpoints;
pub mod directory_source;
pub mod kubernetes;
mod manifest;
mod manifest_directory;

#[cfg(any(test, fuzzing))]
use {crate::resources::event::Event, manifest::ManifestError, manifest_directory::ManifestDirectory};

/// Loads a directory with one file.
#[cfg(any(test, fuzzing))]
pub(crate) fn load_single_file(bytes: &[u8]) -> (Vec<Event>, Vec<ManifestError>) {
    let reload = ManifestDirectory::load_single_file(bytes);
    (reload.events, reload.errors)
}
