//! Reports the ports of Services that a selected external workload does not declare, so that its endpoint does not have them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::Mutex;
use tracing::warn;

use crate::cluster::{Cluster, GaugeGuard};
use crate::resources::event::{Event, EventSink};
use crate::resources::labels::Selector;
use crate::resources::meta::NamespacedName;
use crate::resources::service::{PortRef, Service, ServiceKind};
use crate::resources::unserved::UnservedPart;
use crate::resources::workload::ExternalWorkload;
use crate::resources::{Kind, Object};
use crate::writeback::slices::SKIPPED_NAMESPACE;
use crate::writeback::slices::index::in_namespace;
use crate::writeback::slices::reconcile::undeclared_ports;

/// The report. It does not depend on leadership. Clones share their state.
#[derive(Clone)]
pub(in crate::writeback) struct UndeclaredPortsReport(Arc<Shared>);

struct Shared {
    cluster: Cluster,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The Services that can select external workloads.
    services: BTreeMap<NamespacedName, Arc<Service>>,
    workloads: BTreeMap<NamespacedName, Arc<ExternalWorkload>>,
    /// The undeclared ports that are counted for each Service.
    counted: AHashMap<NamespacedName, Vec<UndeclaredPort>>,
}

struct UndeclaredPort {
    workload: NamespacedName,
    part: UnservedPart,
    _gauge_guard: GaugeGuard,
}

impl UndeclaredPortsReport {
    pub(in crate::writeback) fn new(cluster: Cluster) -> Self {
        Self(Arc::new(Shared {
            cluster,
            state: Mutex::default(),
        }))
    }

    pub(in crate::writeback) fn sink(&self) -> EventSink {
        let report = self.clone();
        EventSink::new(move |events| report.apply(&events))
    }

    pub(in crate::writeback) fn handles(event: &Event) -> bool {
        matches!(event.kind(), Some(Kind::Service | Kind::ExternalWorkload))
    }

    fn apply(&self, events: &[Event]) {
        let mut new = Vec::new();
        {
            let state = &mut *self.0.state.lock();
            let affected: BTreeSet<_> = events.iter().flat_map(|event| state.apply_event(event)).collect();
            for service in affected {
                new.extend(state.update(&self.0.cluster, &service));
            }
        }
        for (workload, UnservedPart { field, reason }) in new {
            let kind = Kind::ExternalWorkload.info().name;
            warn!(kind, object = %workload, field, reason, "the mesh does not apply a part of the object");
        }
    }
}

impl State {
    /// Returns the Services whose endpoints can have other ports.
    fn apply_event(&mut self, event: &Event) -> BTreeSet<NamespacedName> {
        match event {
            Event::Applied(Object::Service(service)) => {
                let name = service.meta.name.clone();
                match selects_workloads(service) {
                    true => self.services.insert(name.clone(), service.clone()),
                    false => self.services.remove(&name),
                };
                BTreeSet::from([name])
            }
            Event::Deleted(Kind::Service, name) => {
                self.services.remove(name);
                BTreeSet::from([name.clone()])
            }
            Event::Applied(Object::ExternalWorkload(workload)) => {
                let before = self.workloads.insert(workload.meta.name.clone(), workload.clone());
                if before
                    .as_ref()
                    .is_some_and(|before| has_same_ports_and_labels(before, workload))
                {
                    return BTreeSet::new();
                }
                let mut affected = self.selecting_services(workload);
                affected.extend(before.iter().flat_map(|before| self.selecting_services(before)));
                affected
            }
            Event::Deleted(Kind::ExternalWorkload, name) => {
                let before = self.workloads.remove(name);
                before
                    .map(|before| self.selecting_services(&before))
                    .unwrap_or_default()
            }
            Event::Applied(_) | Event::Deleted(..) | Event::Unreadable(_) | Event::Synced => BTreeSet::new(),
        }
    }

    fn selecting_services(&self, workload: &ExternalWorkload) -> BTreeSet<NamespacedName> {
        in_namespace(&self.services, workload.meta.namespace())
            .filter(|service| Selector::from_match_labels(&service.selector).matches(&workload.meta.labels))
            .map(|service| service.meta.name.clone())
            .collect()
    }

    /// Counts the undeclared ports of a Service. Returns those that were not counted before.
    fn update(&mut self, cluster: &Cluster, name: &NamespacedName) -> Vec<(NamespacedName, UnservedPart)> {
        let before = self.counted.remove(name).unwrap_or_default();
        let Some(service) = self.services.get(name) else {
            return Vec::new();
        };
        let selector = Selector::from_match_labels(&service.selector);
        let selected =
            in_namespace(&self.workloads, &name.namespace).filter(|workload| selector.matches(&workload.meta.labels));
        let found: Vec<(NamespacedName, UnservedPart)> = selected
            .flat_map(|workload| {
                let parts = undeclared_parts(service, workload);
                parts.into_iter().map(|part| (workload.meta.name.clone(), part))
            })
            .collect();
        let is_new = |(workload, part): &&(NamespacedName, UnservedPart)| {
            !before
                .iter()
                .any(|counted| counted.workload == *workload && counted.part == *part)
        };
        let new = found.iter().filter(is_new).cloned().collect();
        if !found.is_empty() {
            let counted = found.into_iter().map(|(workload, part)| UndeclaredPort {
                _gauge_guard: cluster.count_unserved_part(Kind::ExternalWorkload, &workload, part.field),
                workload,
                part,
            });
            self.counted.insert(name.clone(), counted.collect());
        }
        new
    }
}

/// Returns whether both versions of a workload declare the same ports and have the same labels, by which Services select them.
/// Most updates change the status only.
fn has_same_ports_and_labels(before: &ExternalWorkload, workload: &ExternalWorkload) -> bool {
    before.meta.labels == workload.meta.labels
        && before.ports == workload.ports
        && before.non_tcp_ports == workload.non_tcp_ports
}

fn selects_workloads(service: &Service) -> bool {
    service.kind != ServiceKind::ExternalName
        && !service.selector.is_empty()
        && **service.meta.namespace() != *SKIPPED_NAMESPACE
}

fn undeclared_parts(service: &Service, workload: &ExternalWorkload) -> Vec<UnservedPart> {
    let undeclared = undeclared_ports(service, workload);
    let part = |(port, target): (u16, &PortRef)| {
        let target = match target {
            PortRef::Number(number) => number.to_string(),
            PortRef::Name(name) => format!("{name:?}"),
        };
        UnservedPart {
            field: "spec.ports",
            reason: format!(
                "Service {} selects the workload, which does not declare the target port {target} of the Service's port {port}, \
                 so clients of this port do not reach the workload",
                service.meta.name
            ),
        }
    };
    undeclared.into_iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::cluster;
    use crate::resources::decode;

    #[test]
    fn a_workload_is_counted_while_it_does_not_declare_a_port_of_its_service() {
        let registry = Registry::new();
        let cluster = Cluster::new(cluster::Config::default(), &registry);
        let report = UndeclaredPortsReport::new(cluster);
        let object = |kind: Kind, name: &str, labels: Value, spec: Value| {
            let metadata = json!({"name": name, "namespace": "shop", "labels": labels});
            Event::Applied(decode(kind, &json!({"metadata": metadata, "spec": spec})).unwrap())
        };
        let service = |target: Value| {
            let ports = json!([{"port": 80, "targetPort": target}]);
            let spec = json!({"clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ports": ports});
            object(Kind::Service, "web", json!({}), spec)
        };
        let workload = |app: &str, ports: Value| {
            let mesh_tls = json!({"identity": "vm.shop", "serverName": "vm.shop"});
            let spec = json!({"meshTLS": mesh_tls, "ports": ports, "workloadIPs": [{"ip": "192.0.2.1"}]});
            object(Kind::ExternalWorkload, "vm", json!({"app": app}), spec)
        };
        let deleted = |kind: Kind, name: &str| Event::Deleted(kind, NamespacedName::new("shop", name));
        let check = |event: Event, is_counted: bool| {
            let text = format!("{event:?}");
            report.apply(&[event]);
            let line = "unserved_configuration{kind=\"ExternalWorkload\",namespace=\"shop\",name=\"vm\",field=\"spec.ports\"} 1";
            assert_eq!(registry.render().contains(line), is_counted, "{text}");
        };
        check(service(json!("http")), false);
        check(workload("web", json!([{"name": "web", "port": 8080}])), true);
        check(workload("web", json!([{"name": "http", "port": 8080}])), false);
        check(service(json!(8081)), true);
        check(service(json!(8080)), false);
        check(workload("web", json!([{"port": 9090}])), true);
        check(workload("api", json!([{"port": 9090}])), false);
        check(workload("web", json!([{"port": 9090}])), true);
        check(workload("web", json!([{"port": 9090}])), true);
        check(deleted(Kind::Service, "web"), false);
        check(service(json!(8080)), true);
        check(deleted(Kind::ExternalWorkload, "vm"), false);
    }
}
