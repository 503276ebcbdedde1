//! Events on exported Services of the other cluster that cannot be mirrored, for those who exported them.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ObjectReference;

use super::plan::inputs::{ExportingCluster, MirrorStatus, Plan, Rejection};
use crate::kubernetes::event_recorder::{EventNote, EventRecorder, Severity};
use crate::resources::meta::NamespacedName;

/// The rejections for which an Event was recorded. No further Event is recorded while the rejection stays the same.
#[derive(Default)]
pub(super) struct RejectionEvents {
    mirrors: HashMap<NamespacedName, Rejection>,
    federated: HashMap<NamespacedName, Rejection>,
}

impl RejectionEvents {
    /// Records the rejections of a plan that are new. `Rejection::Failed` is left out: a failed write, a missing gateway address or
    /// missing pods can end without a change of the Service.
    pub(super) fn record(&mut self, recorder: &EventRecorder, planned: &Plan, exporting: &ExportingCluster) {
        let Self { mirrors, federated } = self;
        for (recorded, statuses, action) in [
            (mirrors, &planned.mirrors, "Mirror"),
            (federated, &planned.federated, "Federate"),
        ] {
            let rejected: HashMap<_, _> = statuses.iter().filter_map(rejection).collect();
            recorded.retain(|service, _| rejected.contains_key(service));
            for (service, rejection) in rejected {
                if recorded.get(service) != Some(rejection) {
                    recorder.record(note(service, rejection, action, exporting));
                    recorded.insert(service.clone(), rejection.clone());
                }
            }
        }
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
