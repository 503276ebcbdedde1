//! Where events come from.
//!
//! A source reads objects, reports them as events into a [`Writer`](crate::resources::event::Writer), and says when it
//! has reported everything there was. What becomes of them is not its concern.

mod completion;
pub mod dir;
mod directory;
pub mod kubernetes;
mod manifest;
mod slices;

#[cfg(any(test, fuzzing))]
use {crate::resources::event::Event, dir::ManifestError, directory::Directory};

/// What a directory with one file comes to.
#[cfg(any(test, fuzzing))]
pub(crate) fn of_one_file(bytes: &[u8]) -> (Vec<Event>, Vec<ManifestError>) {
    let reload = Directory::of_one_file(bytes);
    (reload.events, reload.errors)
}
