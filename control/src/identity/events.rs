//! Kubernetes Events of the identity service, about its Deployment and about service accounts.

use k8s_openapi::api::core::v1::ObjectReference;

use crate::kubernetes::event_recorder::{EventNote, EventRecorder, Severity};

#[derive(Debug)]
pub(super) struct AuthenticatedServiceAccount {
    pub(super) namespace: String,
    pub(super) service_account: String,
    /// UID of the ServiceAccount object; `None` for join tokens.
    pub(super) uid: Option<String>,
}

#[derive(Clone)]
pub(crate) struct Events {
    recorder: EventRecorder,
    controller_namespace: String,
}

impl Events {
    pub(crate) fn new(recorder: EventRecorder, controller_namespace: String) -> Self {
        Self {
            recorder,
            controller_namespace,
        }
    }

    pub(crate) fn issuer_updated(&self, text: String) {
        self.record_on_deployment(Severity::Normal, "IssuerUpdated", "Reload", text);
    }

    pub(crate) fn issuer_update_skipped(&self, text: String) {
        self.record_on_deployment(Severity::Warning, "IssuerUpdateSkipped", "Reload", text);
    }

    pub(crate) fn issuer_validation_failed(&self, text: String) {
        self.record_on_deployment(Severity::Warning, "IssuerValidationFailed", "Certify", text);
    }

    pub(crate) fn issued(&self, holder: &AuthenticatedServiceAccount, text: String) {
        self.recorder.record(EventNote {
            regarding: ObjectReference {
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
            message: text,
        });
    }

    fn record_on_deployment(&self, severity: Severity, reason: &'static str, action: &'static str, text: String) {
        self.recorder.record(EventNote {
            regarding: ObjectReference {
                kind: Some("Deployment".to_owned()),
                api_version: Some("apps/v1".to_owned()),
                namespace: Some(self.controller_namespace.clone()),
                name: Some(SERVICE_ACCOUNT.to_owned()),
                ..ObjectReference::default()
            },
            severity,
            reason,
            action,
            message: text,
        });
    }
}

/// The service account of the identity service itself, and the name of its Deployment.
pub(super) const SERVICE_ACCOUNT: &str = "linkerd-identity";
