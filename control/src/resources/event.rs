//! Changes as sources report them: one type, whatever the source.

use std::sync::Arc;

use crate::resources::meta::Name;
use crate::resources::unreadable::Unreadable;
use crate::resources::{Kind, Object};

#[derive(Clone, Debug)]
pub enum Event {
    /// The object exists in this form.
    Applied(Object),
    Deleted(Kind, Name),
    /// The newest form of the object cannot be read. The last one that could be holds, or what stands for the object.
    Unreadable(Arc<Unreadable>),
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

    /// A writer that also tells another one of the events that it has a use for; the other hears of them later.
    #[must_use]
    pub fn tee(self, wants: impl Fn(&Event) -> bool + Send + Sync + 'static, other: Self) -> Self {
        Self::new(move |events| {
            let copies: Vec<Event> = events.iter().filter(|event| wants(event)).cloned().collect();
            self.apply(events);
            if !copies.is_empty() {
                other.apply(copies);
            }
        })
    }
}

impl Event {
    /// The kind of the object; none where it is about all of them.
    pub fn kind(&self) -> Option<Kind> {
        match self {
            Self::Applied(object) => Some(object.kind()),
            Self::Deleted(kind, _) => Some(*kind),
            Self::Unreadable(unreadable) => Some(unreadable.kind),
            Self::Synced => None,
        }
    }
}
