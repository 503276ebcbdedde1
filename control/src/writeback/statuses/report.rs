//! Reports, for a source without statuses, what the statuses would report: the parts of objects that are unserved because of
//! other objects.

use std::collections::BTreeSet;
use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::Mutex;
use tracing::warn;

use crate::cluster::{Cluster, GaugeGuard};
use crate::resources::event::{Event, EventSink};
use crate::resources::unserved::UnservedPart;
use crate::writeback::config::StatusesConfig;
use crate::writeback::statuses::index::StatusIndex;
use crate::writeback::statuses::object_id::ObjectId;

/// The report. Clones share their state.
#[derive(Clone)]
pub(in crate::writeback) struct StatusReport(Arc<Shared>);

struct Shared {
    cluster: Cluster,
    state: Mutex<State>,
}

struct State {
    index: StatusIndex,
    /// The counted parts of each object.
    counted: AHashMap<ObjectId, Vec<(UnservedPart, GaugeGuard)>>,
}

impl StatusReport {
    pub(in crate::writeback) fn new(cluster: Cluster, settings: StatusesConfig) -> Self {
        Self(Arc::new(Shared {
            cluster,
            state: Mutex::new(State {
                index: StatusIndex::new(settings),
                counted: AHashMap::new(),
            }),
        }))
    }

    pub(in crate::writeback) fn sink(&self) -> EventSink {
        let report = self.clone();
        EventSink::new(move |events| report.apply(&events))
    }

    fn apply(&self, events: &[Event]) {
        let mut new = Vec::new();
        {
            let state = &mut *self.0.state.lock();
            let mut affected = BTreeSet::new();
            for event in events {
                affected.extend(state.index.apply_event(event));
                if let Event::Deleted(kind, name) = event {
                    affected.insert(ObjectId::new(*kind, name.clone()));
                }
            }
            for id in affected {
                let parts = state.update(&self.0.cluster, &id);
                new.extend(parts.into_iter().map(|part| (id.clone(), part)));
            }
        }
        for (ObjectId { kind, name }, UnservedPart { field, reason }) in new {
            warn!(kind = kind.info().name, object = %name, field, reason, "the mesh does not apply a part of the object");
        }
    }
}

impl State {
    /// Counts the unserved parts of an object. Returns those that were not counted before.
    fn update(&mut self, cluster: &Cluster, id: &ObjectId) -> Vec<UnservedPart> {
        let found = self.index.unserved_parts(id);
        let before = self.counted.remove(id).unwrap_or_default();
        let is_new = |part: &&UnservedPart| !before.iter().any(|(old, _)| old == *part);
        let new = found.iter().filter(is_new).cloned().collect();
        if !found.is_empty() {
            let counted = found.into_iter().map(|part| {
                let guard = cluster.count_unserved_part(id.kind, &id.name, part.field);
                (part, guard)
            });
            self.counted.insert(id.clone(), counted.collect());
        }
        new
    }
}
