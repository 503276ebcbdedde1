//! The objects from which EndpointSlices of external workloads are computed, and the services that a change affects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::AHashMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tracing::debug;
use tulle_core::names::label;

use crate::resources::labels::Selector;
use crate::resources::meta::NamespacedName;
use crate::resources::service::{EndpointSlice as DecodedSlice, Service, ServiceKind};
use crate::resources::workload::ExternalWorkload;
use crate::writeback::slices::write_tracker::WriteTracker;

/// Index of the objects. They are shared with the other consumers of the events.
#[derive(Default)]
pub(super) struct SliceIndex {
    services: BTreeMap<NamespacedName, Arc<Service>>,
    workloads: BTreeMap<NamespacedName, Arc<ExternalWorkload>>,
    /// EndpointSlices that this controller writes, by Service.
    slices: AHashMap<NamespacedName, BTreeMap<NamespacedName, Arc<EndpointSlice>>>,
    /// The Service of each of these EndpointSlices.
    service_by_slice: AHashMap<NamespacedName, NamespacedName>,
    pub(super) tracker: WriteTracker,
}

pub(super) struct ReconcileInputs {
    pub(super) service: Arc<Service>,
    pub(super) workloads: Vec<Arc<ExternalWorkload>>,
    pub(super) slices: Vec<Arc<EndpointSlice>>,
}

/// Methods that apply a change return the Services whose slices it affects.
impl SliceIndex {
    pub(super) fn apply_service(&mut self, service: &Arc<Service>) -> BTreeSet<NamespacedName> {
        let name = service.meta.name.clone();
        self.services.insert(name.clone(), service.clone());
        BTreeSet::from([name])
    }

    pub(super) fn delete_service(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        self.services.remove(name);
        BTreeSet::from([name.clone()])
    }

    pub(super) fn apply_workload(&mut self, new: &Arc<ExternalWorkload>) -> BTreeSet<NamespacedName> {
        let Some(old) = self.workloads.insert(new.meta.name.clone(), new.clone()) else {
            return self.selecting_services(new);
        };
        if old.meta.version == new.meta.version {
            return BTreeSet::new();
        }
        let endpoints_changed = endpoints_changed(&old, new);
        if old.meta.labels == new.meta.labels {
            if endpoints_changed {
                return self.selecting_services(new);
            }
            let (old, new) = (&old.meta.version, &new.meta.version);
            debug!("skipping update; nothing has changed between old rv {old} and new rv {new}");
            return BTreeSet::new();
        }
        let (before, after) = (self.selecting_services(&old), self.selecting_services(new));
        if endpoints_changed {
            before.union(&after).cloned().collect()
        } else {
            before.symmetric_difference(&after).cloned().collect()
        }
    }

    pub(super) fn delete_workload(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        let old = self.workloads.remove(name);
        old.map(|old| self.selecting_services(&old)).unwrap_or_default()
    }

    pub(super) fn apply_slice(&mut self, slice: &DecodedSlice) -> BTreeSet<NamespacedName> {
        let name = &slice.meta.name;
        let service = slice.meta.label(label::SERVICE_NAME);
        let (Some(managed), Some(service)) = (&slice.managed_object, service) else {
            // Another controller owns the slice. If this one owned it before, it is removed from the index.
            return self.delete_slice(name);
        };
        let service = NamespacedName::new(name.namespace.clone(), service);
        let mut affected = BTreeSet::new();
        if self.service_by_slice.get(name).is_some_and(|before| *before != service) {
            affected.extend(self.delete_slice(name));
            affected.insert(service.clone());
        } else if self.tracker.is_change_by_others(&service, managed) {
            affected.insert(service.clone());
        }
        self.service_by_slice.insert(name.clone(), service.clone());
        let slices = self.slices.entry(service).or_default();
        slices.insert(name.clone(), managed.clone());
        affected
    }

    pub(super) fn delete_slice(&mut self, name: &NamespacedName) -> BTreeSet<NamespacedName> {
        let Some(service) = self.service_by_slice.remove(name) else {
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
            Some(slice) if !self.tracker.record_observed_deletion(&service, &slice) => BTreeSet::from([service]),
            _ => BTreeSet::new(),
        }
    }

    pub(super) fn all_services(&self) -> impl Iterator<Item = &NamespacedName> {
        self.services.keys()
    }

    pub(super) fn has_service(&self, name: &NamespacedName) -> bool {
        self.services.contains_key(name)
    }

    /// Returns the inputs of a Service. `None` if it does not exist or cannot select external workloads.
    pub(super) fn reconcile_inputs(&self, name: &NamespacedName) -> Option<ReconcileInputs> {
        let service = self.services.get(name)?;
        if service.kind == ServiceKind::ExternalName || service.selector.is_empty() {
            return None;
        }
        let selector = Selector::from_match_labels(&service.selector);
        let workloads = in_namespace(&self.workloads, &name.namespace);
        let slices = self.slices.get(name).into_iter().flat_map(BTreeMap::values);
        Some(ReconcileInputs {
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

    fn selecting_services(&self, workload: &ExternalWorkload) -> BTreeSet<NamespacedName> {
        in_namespace(&self.services, workload.meta.namespace())
            .filter(|service| !service.selector.is_empty())
            .filter(|service| Selector::from_match_labels(&service.selector).matches(&workload.meta.labels))
            .map(|service| service.meta.name.clone())
            .collect()
    }
}

pub(super) fn in_namespace<'a, T>(
    objects: &'a BTreeMap<NamespacedName, T>,
    namespace: &'a Arc<str>,
) -> impl Iterator<Item = &'a T> {
    objects
        .range(NamespacedName::new(namespace.clone(), "")..)
        .take_while(move |(name, _)| name.namespace == *namespace)
        .map(|(_, object)| object)
}

/// Returns whether the endpoints of a workload have changed in any way.
fn endpoints_changed(old: &ExternalWorkload, new: &ExternalWorkload) -> bool {
    let endpoint_fields = |workload: &ExternalWorkload| {
        (
            workload.meta.terminating,
            workload.ready,
            workload.ips.clone(),
            workload.ports.clone(),
            workload.non_tcp_ports.clone(),
            // A new object with the same name, or a different zone.
            workload.uid.clone(),
            workload.meta.label(label::ZONE).map(str::to_owned),
        )
    };
    endpoint_fields(old) != endpoint_fields(new)
}
