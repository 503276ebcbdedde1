//! Changes of objects, in the same form for all sources.

use std::sync::Arc;

use crate::resources::meta::NamespacedName;
use crate::resources::unreadable::Unreadable;
use crate::resources::{Kind, Object};

#[derive(Clone, Debug)]
pub enum Event {
    /// The object was created or changed.
    Applied(Object),
    Deleted(Kind, NamespacedName),
    /// The current version of the object is unreadable. Its last readable version stays in use, or its placeholder.
    Unreadable(Arc<Unreadable>),
    /// All objects that existed at the start of the source have been reported.
    Synced,
}

/// Receives batches of events in order. The views are recomputed once per batch.
#[derive(Clone)]
pub struct EventSink(Arc<dyn Fn(Vec<Event>) + Send + Sync>);

impl EventSink {
    pub fn new(apply: impl Fn(Vec<Event>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(apply))
    }

    pub fn apply(&self, events: Vec<Event>) {
        (self.0)(events);
    }

    /// Returns a sink that applies each batch to `self`, then passes the events that `wants` selects to `other`.
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
    /// Returns the kind of the object. `None` for an event about all kinds.
    pub fn kind(&self) -> Option<Kind> {
        match self {
            Self::Applied(object) => Some(object.kind()),
            Self::Deleted(kind, _) => Some(*kind),
            Self::Unreadable(unreadable) => Some(unreadable.kind),
            Self::Synced => None,
        }
    }
}
