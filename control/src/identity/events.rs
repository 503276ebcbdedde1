//! What the identity service tells the readers of Kubernetes objects.

use k8s_openapi::api::core::v1::ObjectReference;

use super::server::Holder;
use crate::kubernetes::recorder::{Note, Recorder, Severity};

/// Events on the Deployment of the identity service, and on service accounts.
#[derive(Clone)]
pub(crate) struct Events {
    recorder: Recorder,
    controller_namespace: String,
}

impl Events {
    pub(crate) fn new(recorder: Recorder, controller_namespace: String) -> Self {
        Self {
            recorder,
            controller_namespace,
        }
    }

    pub(crate) fn issuer_updated(&self, text: String) {
        self.about_us(Severity::Normal, "IssuerUpdated", "Reload", text);
    }

    pub(crate) fn issuer_update_skipped(&self, text: String) {
        self.about_us(Severity::Warning, "IssuerUpdateSkipped", "Reload", text);
    }

    pub(crate) fn issuer_validation_failed(&self, text: String) {
        self.about_us(Severity::Warning, "IssuerValidationFailed", "Certify", text);
    }

    pub(crate) fn issued(&self, holder: &Holder, text: String) {
        self.recorder.record(Note {
            about: ObjectReference {
                kind: Some("ServiceAccount".to_owned()),
                api_version: Some("v1".to_owned()),
                namespace: Some(holder.namespace.clone()),
                name: Some(holder.service_account.clone()),
                uid: holder.uid.clone(),
                ..ObjectReference::default()
            },
            severity: Severity::Normal,
            reason: "IssuedLeafCertificate",
            action: "Certify",
            text,
        });
    }

    fn about_us(&self, severity: Severity, reason: &'static str, action: &'static str, text: String) {
        self.recorder.record(Note {
            about: ObjectReference {
                kind: Some("Deployment".to_owned()),
                api_version: Some("apps/v1".to_owned()),
                namespace: Some(self.controller_namespace.clone()),
                name: Some(super::SERVICE_ACCOUNT.to_owned()),
                ..ObjectReference::default()
            },
            severity,
            reason,
            action,
            text,
        });
    }
}
