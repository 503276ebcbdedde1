//! The proxy injector: answers the API server's reviews of new pods and services, and looks for pods that it missed.
//!
//! What a pod gets is decided in `inject/`; here is what that takes: the namespace's annotations and the pod's workload
//! ([`metadata`]), the chart's values ([`settings`]), an event on the workload, and the counters.
//! A pod that asks for a restriction which its sidecar would not keep, or whose service account has no identity, is refused
//! with the reason. A pod of the control plane's own namespace or of `kube-system` is never refused: without them nothing would
//! be mended.
//!
//! Permissions: cluster-wide `namespaces`, `replicasets` (apps), `jobs` (batch) `get`, `list`, `watch`; `pods` `list`;
//! `events` (events.k8s.io) `create`, `patch`; and those of the certificate's keeper in `webhook/`.
//! The ConfigMaps with values and trust anchors are mounted, not asked for.

pub mod audit;
pub mod metadata;
pub mod settings;

mod metrics;

use k8s_openapi::api::core::v1::{PodSpec, ServiceSpec};
use kube::Client;
use kube::core::DynamicObject;
use serde_json::Value;
use tracing::{debug, info};
use tulle_core::metrics::Registry;
use tulle_core::names::annotation;

use self::audit::{Audit, Report};
use self::metadata::{Metadata, MetadataError, NamespaceMeta, Owner, Watches};
use self::metrics::Metrics;
use self::settings::{Files, Reload, Settings, SettingsError};
use crate::inject::{self, Decision, Outcome, Subject};
use crate::kubernetes::recorder::{Note, Recorder, Severity};
use crate::webhook::review::{Answer, Request};
use crate::webhook::{Failure, Handler};

/// How the injector runs.
#[derive(Clone, Debug)]
pub struct Config {
    pub files: Files,
    pub audit: audit::Config,
}

/// Answers reviews; see [`open`].
pub struct Injector {
    settings: Settings,
    metadata: Metadata,
    recorder: Recorder,
    metrics: Metrics,
}

/// The parts of an injector, each to be run by who opened it.
pub struct Parts {
    pub injector: Injector,
    pub reload: Reload,
    pub watches: Watches,
    pub audit: Audit,
    /// What the audit found last.
    pub report: Report,
}

#[derive(Debug, thiserror::Error)]
enum ReviewError {
    #[error("the review has no object")]
    NoObject,
    #[error("the object has no namespace")]
    NoNamespace,
    #[error("the {kind}'s spec cannot be read")]
    Spec {
        kind: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Metadata(#[from] MetadataError),
}

/// Reads the configuration and prepares everything; nothing is asked of the API server yet.
///
/// # Errors
/// A configuration that is missing or cannot be used.
pub async fn open(
    config: Config,
    client: &Client,
    recorder: Recorder,
    registry: &Registry,
) -> Result<Parts, SettingsError> {
    let (settings, reload) = settings::open(config.files).await?;
    let watches = Metadata::watched(client, registry);
    let metadata = watches.metadata();
    let (audit, report) = Audit::new(
        config.audit,
        client.clone(),
        settings.clone(),
        metadata.clone(),
        registry,
    );
    let injector = Injector {
        settings,
        metadata,
        recorder,
        metrics: Metrics::new(registry),
    };
    Ok(Parts {
        injector,
        reload,
        watches,
        audit,
        report,
    })
}

impl Handler for Injector {
    async fn review(&self, mut req: Request) -> Result<Answer, Failure> {
        let namespace = req.namespace.take().unwrap_or_default();
        let is_protected = self.settings.current().is_protected(&namespace);
        match self.decide(req, &namespace).await {
            Ok(answer) => Ok(answer),
            Err(err) if is_protected => Ok(Answer::allow().warn(format!("no proxy was injected: {err}"))),
            Err(err) => Err(err.into()),
        }
    }
}

impl Injector {
    async fn decide(&self, req: Request, namespace: &str) -> Result<Answer, ReviewError> {
        let object = req.object.ok_or(ReviewError::NoObject)?;
        if namespace.is_empty() {
            return Err(ReviewError::NoNamespace);
        }
        match (req.kind.group.as_str(), req.kind.kind.as_str()) {
            ("", "Pod") => self.pod(object, namespace, req.dry_run).await,
            ("", "Service") => self.service(object, namespace).await,
            // A configuration of webhooks that asks for more gets no more.
            _ => Ok(Answer::allow()),
        }
    }

    async fn pod(&self, mut object: DynamicObject, namespace: &str, dry_run: bool) -> Result<Answer, ReviewError> {
        let spec: PodSpec = spec("pod", &mut object.data)?;
        let of_namespace = self.metadata.namespace(namespace).await?;
        let owner = self.metadata.owner(namespace, &object.metadata).await;
        let config = self.settings.current();
        let subject = Subject {
            root: &[],
            metadata: Some(&object.metadata),
            spec: &spec,
            namespace,
            namespace_annotations: &of_namespace.annotations,
            owner: Some(owner.workload.clone()),
        };
        let outcome = inject::pod(&config, &subject);
        let is_refused = outcome.refusal.is_some() && !config.is_protected(namespace);
        self.count(&owner, namespace, &object, &of_namespace, &outcome);
        log(&owner, namespace, &outcome);
        // Events outlive the review, and a dry run must leave nothing behind.
        if !dry_run {
            self.record(owner, &outcome, is_refused);
        }
        let answer = match outcome.refusal {
            Some(refusal) if is_refused => Answer::deny(refusal),
            Some(refusal) => Answer::allow().patch(outcome.patch).warn(refusal),
            None => Answer::allow().patch(outcome.patch),
        };
        Ok(outcome.warnings.into_iter().fold(answer, Answer::warn))
    }

    async fn service(&self, mut object: DynamicObject, namespace: &str) -> Result<Answer, ReviewError> {
        let spec: ServiceSpec = spec("service", &mut object.data)?;
        let of_namespace = self.metadata.namespace(namespace).await?;
        let config = self.settings.current();
        let ports = spec.ports.unwrap_or_default();
        let patch = inject::service(&config, Some(&object.metadata), &ports, &of_namespace.annotations);
        Ok(Answer::allow().patch(patch))
    }

    fn count(
        &self,
        owner: &Owner,
        namespace: &str,
        object: &DynamicObject,
        of_namespace: &NamespaceMeta,
        outcome: &Outcome,
    ) {
        let labels = metrics::labels(
            &owner.workload.kind,
            namespace,
            outcome.annotated_at,
            &object.metadata,
            &of_namespace.annotations,
        );
        self.metrics.requested(&labels);
        self.metrics.decided(&labels, &outcome.decision);
    }

    /// Tells those who look at the workload.
    fn record(&self, owner: Owner, outcome: &Outcome, is_refused: bool) {
        let Some(about) = owner.reference else { return };
        let misspelt = outcome
            .warnings
            .iter()
            .any(|text| text.contains(annotation::INJECTED_TYPO));
        let severity = match misspelt || outcome.refusal.is_some() {
            true => Severity::Warning,
            false => Severity::Normal,
        };
        let (reason, mut text) = match &outcome.decision {
            Decision::Inject(_) => ("Injected", "the sidecar proxy was injected".to_owned()),
            Decision::Skip(reasons) => {
                let reasons: Vec<_> = reasons.iter().map(|reason| reason.sentence()).collect();
                (
                    "InjectionSkipped",
                    format!("no sidecar proxy was injected: {}", reasons.join("; ")),
                )
            }
        };
        let reason = if is_refused { "InjectionRefused" } else { reason };
        for more in outcome.refusal.iter().chain(&outcome.warnings) {
            text = format!("{text}; {more}");
        }
        self.recorder.record(Note {
            about,
            severity,
            reason,
            action: "Inject",
            text,
        });
    }
}

fn spec<T: serde::de::DeserializeOwned + Default>(kind: &'static str, data: &mut Value) -> Result<T, ReviewError> {
    match data.get_mut("spec").map(Value::take) {
        None => Ok(T::default()),
        Some(spec) => serde_json::from_value(spec).map_err(|source| ReviewError::Spec { kind, source }),
    }
}

fn log(owner: &Owner, namespace: &str, outcome: &Outcome) {
    let (kind, name) = (&owner.workload.kind, &owner.workload.name);
    match &outcome.decision {
        Decision::Inject(_) => info!(namespace, kind, name, "injecting a proxy"),
        Decision::Skip(reasons) => {
            let reasons = inject::joined(reasons);
            debug!(namespace, kind, name, reasons, "injecting no proxy");
        }
    }
    if let Some(refusal) = &outcome.refusal {
        info!(namespace, kind, name, refusal, "a pod must not run as it is");
    }
    for warning in &outcome.warnings {
        info!(namespace, kind, name, warning, "an annotation was ignored");
    }
}
