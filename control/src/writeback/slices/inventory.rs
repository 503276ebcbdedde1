//! The objects that EndpointSlices of external workloads follow from, and which services a change concerns.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::AHashMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tracing::debug;
use tulle_core::names::label;

use crate::resources::labels::Selector;
use crate::resources::meta::Name;
use crate::resources::service::{EndpointSlice as Pruned, Service, ServiceKind};
use crate::resources::workload::ExternalWorkload;
use crate::writeback::slices::tracker::Tracker;

/// Shares its objects with whoever else heard of them.
#[derive(Default)]
pub(super) struct Inventory {
    services: BTreeMap<Name, Arc<Service>>,
    workloads: BTreeMap<Name, Arc<ExternalWorkload>>,
    /// Slices that we write, by their service.
    slices: AHashMap<Name, BTreeMap<Name, Arc<EndpointSlice>>>,
    /// The service of each of these slices.
    owners: AHashMap<Name, Name>,
    pub(super) tracker: Tracker,
}

/// What a service's slices are reconciled with.
pub(super) struct Inputs {
    pub(super) service: Arc<Service>,
    pub(super) workloads: Vec<Arc<ExternalWorkload>>,
    pub(super) slices: Vec<Arc<EndpointSlice>>,
}

impl Inventory {
    pub(super) fn service_applied(&mut self, service: &Arc<Service>) -> BTreeSet<Name> {
        let name = service.meta.name.clone();
        self.services.insert(name.clone(), service.clone());
        BTreeSet::from([name])
    }

    pub(super) fn service_deleted(&mut self, name: &Name) -> BTreeSet<Name> {
        self.services.remove(name);
        BTreeSet::from([name.clone()])
    }

    pub(super) fn workload_applied(&mut self, new: &Arc<ExternalWorkload>) -> BTreeSet<Name> {
        let Some(old) = self.workloads.insert(new.meta.name.clone(), new.clone()) else {
            return self.services_of(new);
        };
        if old.meta.version == new.meta.version {
            return BTreeSet::new();
        }
        let endpoints_changed = endpoints_changed(&old, new);
        if old.meta.labels == new.meta.labels {
            if endpoints_changed {
                return self.services_of(new);
            }
            let (old, new) = (&old.meta.version, &new.meta.version);
            debug!("skipping update; nothing has changed between old rv {old} and new rv {new}");
            return BTreeSet::new();
        }
        let (before, after) = (self.services_of(&old), self.services_of(new));
        if endpoints_changed {
            before.union(&after).cloned().collect()
        } else {
            before.symmetric_difference(&after).cloned().collect()
        }
    }

    pub(super) fn workload_deleted(&mut self, name: &Name) -> BTreeSet<Name> {
        let old = self.workloads.remove(name);
        old.map(|old| self.services_of(&old)).unwrap_or_default()
    }

    pub(super) fn slice_applied(&mut self, slice: &Pruned) -> BTreeSet<Name> {
        let name = &slice.meta.name;
        let service = slice.meta.label(label::SERVICE_NAME);
        let (Some(managed), Some(service)) = (&slice.managed, service) else {
            // It may have been ours before.
            return self.slice_deleted(name);
        };
        let service = Name::new(name.namespace.clone(), service);
        let mut concerned = BTreeSet::new();
        if self.owners.get(name).is_some_and(|before| *before != service) {
            concerned.extend(self.slice_deleted(name));
            concerned.insert(service.clone());
        } else if self.tracker.is_news(&service, managed) {
            concerned.insert(service.clone());
        }
        self.owners.insert(name.clone(), service.clone());
        let slices = self.slices.entry(service).or_default();
        slices.insert(name.clone(), managed.clone());
        concerned
    }

    pub(super) fn slice_deleted(&mut self, name: &Name) -> BTreeSet<Name> {
        let Some(service) = self.owners.remove(name) else {
            return BTreeSet::new();
        };
        let mut slice = None;
        if let Some(slices) = self.slices.get_mut(&service) {
            slice = slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        match slice {
            Some(slice) if !self.tracker.saw_deletion(&service, &slice) => BTreeSet::from([service]),
            _ => BTreeSet::new(),
        }
    }

    pub(super) fn all_services(&self) -> impl Iterator<Item = &Name> {
        self.services.keys()
    }

    pub(super) fn has_service(&self, name: &Name) -> bool {
        self.services.contains_key(name)
    }

    /// What to reconcile; nothing for a service that has no endpoints of workloads or does not exist.
    pub(super) fn inputs(&self, name: &Name) -> Option<Inputs> {
        let service = self.services.get(name)?;
        if service.kind == ServiceKind::ExternalName || service.selector.is_empty() {
            return None;
        }
        let selector = Selector::exact(&service.selector);
        let workloads = in_namespace(&self.workloads, &name.namespace);
        let slices = self.slices.get(name).into_iter().flat_map(BTreeMap::values);
        Some(Inputs {
            service: service.clone(),
            workloads: workloads
                .filter(|workload| selector.matches(&workload.meta.labels))
                .cloned()
                .collect(),
            slices: slices
                .filter(|slice| slice.metadata.deletion_timestamp.is_none())
                .cloned()
                .collect(),
        })
    }

    /// The services that select a workload.
    fn services_of(&self, workload: &ExternalWorkload) -> BTreeSet<Name> {
        in_namespace(&self.services, workload.meta.namespace())
            .filter(|service| !service.selector.is_empty())
            .filter(|service| Selector::exact(&service.selector).matches(&workload.meta.labels))
            .map(|service| service.meta.name.clone())
            .collect()
    }
}

fn in_namespace<'a, T>(objects: &'a BTreeMap<Name, T>, namespace: &'a Arc<str>) -> impl Iterator<Item = &'a T> {
    objects
        .range(Name::new(namespace.clone(), "")..)
        .take_while(move |(name, _)| name.namespace == *namespace)
        .map(|(_, object)| object)
}

/// Whether the endpoints of a workload are others now, in whatever services it is.
fn endpoints_changed(old: &ExternalWorkload, new: &ExternalWorkload) -> bool {
    let facts = |workload: &ExternalWorkload| {
        (
            workload.meta.terminating,
            workload.ready,
            workload.ips.clone(),
            workload.ports.clone(),
            workload.other_ports.clone(),
            // One of the same name has taken its place, or it has moved.
            workload.uid.clone(),
            workload.meta.label(label::ZONE).map(str::to_owned),
        )
    };
    facts(old) != facts(new)
}
