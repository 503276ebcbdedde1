//! Writes Events on exported Services that are not mirrored or cannot join their federated Service. Services of this cluster are also
//! counted in a metric, because no status of a Link names them.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ObjectReference;
use tracing::warn;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};

use super::plan::inputs::{ExportingCluster, MirrorStatus, Plan, Rejection};
use crate::cluster::GaugeGuard;
use crate::kubernetes::event_recorder::{EventNote, EventRecorder, Severity};
use crate::resources::meta::NamespacedName;
use crate::resources::unserved;

/// Records Events on exported Services of the other cluster.
#[derive(Default)]
pub(super) struct RejectionEvents {
    mirrors: Reported,
    federated: Reported,
}

/// Reports the Services of this cluster that cannot join their federated Services.
pub(super) struct LocalRejections {
    recorder: EventRecorder,
    reported: Reported,
    /// Exported as `unserved_configuration`.
    unserved: Family<Gauge>,
    counted: Vec<GaugeGuard>,
}

/// The rejections that were reported. They are not reported again while they stay the same.
#[derive(Default)]
struct Reported(HashMap<NamespacedName, Rejection>);

impl RejectionEvents {
    /// Records the rejections of a plan that are new. `Rejection::Failed` is left out: a failed write, a missing gateway address or
    /// missing pods can end without a change of the Service.
    pub(super) fn record(&mut self, recorder: &EventRecorder, planned: &Plan, exporting: &ExportingCluster) {
        let Self { mirrors, federated } = self;
        for (reported, statuses, action) in [
            (mirrors, &planned.mirrors, "Mirror"),
            (federated, &planned.federated, FEDERATE),
        ] {
            let rejected = statuses.iter().filter_map(rejection).collect();
            for (service, rejection) in reported.replace(rejected) {
                recorder.record(note(service, rejection, action, exporting));
            }
        }
    }
}

impl LocalRejections {
    pub(super) fn new(recorder: EventRecorder, registry: &Registry) -> Self {
        Self {
            recorder,
            reported: Reported::default(),
            unserved: unserved::metric_family(registry),
            counted: Vec::new(),
        }
    }

    /// Counts the rejections of a plan, and records those that are new. `Rejection::MissingNamespace` is left out: the namespace is
    /// being deleted together with the Service, or is so new that it is not known yet.
    pub(super) fn report(&mut self, planned: &Plan, exporting: &ExportingCluster) {
        let rejected = planned.federated.iter().filter_map(rejection);
        let is_lasting = |rejection: &Rejection| !matches!(rejection, Rejection::MissingNamespace(_));
        let rejected: HashMap<_, _> = rejected.filter(|(_, rejection)| is_lasting(rejection)).collect();
        self.counted = rejected.keys().map(|service| self.count(service)).collect();
        for (service, rejection) in self.reported.replace(rejected) {
            warn!(%service, "not a member of a federated Service: {rejection}");
            self.recorder.record(note(service, rejection, FEDERATE, exporting));
        }
    }

    fn count(&self, service: &NamespacedName) -> GaugeGuard {
        let labels = Labels::new()
            .with("kind", "Service")
            .with("namespace", &service.namespace)
            .with("name", &service.name)
            .with("field", "metadata.labels");
        GaugeGuard::new(self.unserved.get(&labels))
    }
}

impl Reported {
    /// Replaces the rejections, and returns those that are new.
    fn replace<'a>(
        &mut self,
        rejected: HashMap<&'a NamespacedName, &'a Rejection>,
    ) -> Vec<(&'a NamespacedName, &'a Rejection)> {
        self.0.retain(|service, _| rejected.contains_key(service));
        let is_new = |(service, rejection): &(&NamespacedName, &Rejection)| self.0.get(*service) != Some(*rejection);
        let new: Vec<_> = rejected.into_iter().filter(is_new).collect();
        for &(service, rejection) in &new {
            self.0.insert(service.clone(), rejection.clone());
        }
        new
    }
}

fn rejection(status: &MirrorStatus) -> Option<(&NamespacedName, &Rejection)> {
    match &status.mirror {
        Ok(_) | Err(Rejection::Failed(_)) => None,
        Err(rejection) => Some((&status.exported, rejection)),
    }
}

fn note(
    service: &NamespacedName,
    rejection: &Rejection,
    action: &'static str,
    exporting: &ExportingCluster,
) -> EventNote {
    let object = exporting.services.get(service);
    EventNote {
        regarding: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Service".to_owned()),
            namespace: Some(service.namespace.to_string()),
            name: Some(service.name.to_string()),
            uid: object.and_then(|object| object.metadata.uid.clone()),
            ..ObjectReference::default()
        },
        severity: Severity::Warning,
        reason: "NotMirrored",
        action,
        message: rejection.to_string(),
    }
}

const FEDERATE: &str = "Federate";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_that_cannot_join_their_federated_service_are_counted_until_they_can() {
        let registry = Registry::new();
        let mut rejections = LocalRejections::new(EventRecorder::default(), &registry);
        let mut counted_after = |mirror: Result<(), Rejection>| {
            let status = MirrorStatus {
                exported: NamespacedName::new("shop", "web"),
                mirror: mirror.map(|()| NamespacedName::new("shop", "web-federated")),
            };
            let planned = Plan {
                federated: vec![status],
                ..Plan::default()
            };
            rejections.report(&planned, &ExportingCluster::default());
            unserved::counted_parts(&registry)
        };
        let headless = || Err(Rejection::InvalidService("headless".to_owned()));
        assert_eq!(counted_after(headless()), ["web metadata.labels"]);
        assert_eq!(counted_after(headless()), ["web metadata.labels"]);
        let deleted = Err(Rejection::MissingNamespace("shop".to_owned()));
        assert!(counted_after(deleted).is_empty());
        assert_eq!(counted_after(headless()), ["web metadata.labels"]);
        assert!(counted_after(Ok(())).is_empty());
    }
}
