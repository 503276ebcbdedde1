//! Changes as sources report them: one type, whatever the source.

use std::sync::Arc;

use crate::resources::meta::Name;
use crate::resources::{Kind, Object};

#[derive(Clone, Debug)]
pub enum Event {
    /// The object exists in this form.
    Applied(Object),
    Deleted(Kind, Name),
    /// Everything that existed when the source started has been reported.
    Synced,
}

/// Takes batches of events in order; what one batch touches is recomputed once.
#[derive(Clone)]
pub struct Writer(Arc<dyn Fn(Vec<Event>) + Send + Sync>);

impl Writer {
    pub fn new(apply: impl Fn(Vec<Event>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(apply))
    }

    pub fn apply(&self, events: Vec<Event>) {
        (self.0)(events);
    }
}
