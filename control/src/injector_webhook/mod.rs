//! The proxy injector: reviews new pods and services, and audits pods without a sidecar.
//!
//! `injection/` decides about a pod. This module supplies its input: the namespace's annotations, the pod's owner
//! ([`metadata`]) and the chart's values ([`config_reload`]). It records the decision in metrics and in an Event. A pod is
//! denied with the reason if its sidecar would not enforce a required restriction, would be bypassed by the application,
//! or would never get a certificate. A pod of the control plane's namespace or of `kube-system` is never denied, because
//! the cluster needs these pods to recover.
//!
//! RBAC: cluster-wide `get`, `list`, `watch` of `namespaces`, `replicasets` (apps), `jobs` (batch); `list` of
//! `pods`; `create`, `patch` of `events` (events.k8s.io); and the permissions of `webhook/certificate_controller.rs`. The ConfigMaps
//! with values and trust anchors are mounted.

pub mod audit;
pub mod config_reload;
pub mod metadata;

mod lookups;
mod metrics;
mod rate_limiter;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PodSpec, ServiceSpec, Volume};
use kube::Client;
use kube::core::{DynamicObject, GroupVersionKind};
use serde_json::Value;
use tracing::debug;
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::Registry;
use tulle_core::names::annotation;

use self::audit::{Audit, AuditReport};
use self::config_reload::{ConfigError, ConfigReloader, CurrentConfig, Files};
use self::metadata::{MetadataCache, MetadataError, NamespaceMeta, Owner, Watches};
use self::metrics::Metrics;
use self::rate_limiter::{Rate, RateLimiter};
use crate::injection::{self, Decision, InjectionOutcome, InjectionTarget};
use crate::kubernetes::event_recorder::{EventNote, EventRecorder, Severity};
use crate::webhook::review::{AdmissionResponse, Request, RequestHead};
use crate::webhook::{Failure, ReviewHandler};

#[derive(Clone, Debug)]
pub struct Config {
    pub files: Files,
    pub audit: audit::Config,
}

/// The review handler; see [`open`].
pub struct Injector {
    current_config: CurrentConfig,
    metadata: MetadataCache,
    recorder: EventRecorder,
    /// Limits Events about objects that are known to exist.
    verified_events: RateLimiter,
    /// Limits all other Events. A client can cause any number of them.
    unverified_events: RateLimiter,
    metrics: Metrics,
}

/// The parts of an injector. The caller runs each of them.
pub struct InjectorParts {
    pub injector: Injector,
    pub reload: ConfigReloader,
    pub watches: Watches,
    pub audit: Audit,
    /// Result of the last audit.
    pub report: AuditReport,
}

#[derive(Debug, thiserror::Error)]
enum InjectorError {
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

/// Reads the configuration and prepares the parts. No request is sent to the API server yet.
///
/// # Errors
/// Fails if the configuration is missing or invalid.
pub async fn open(
    config: Config,
    client: &Client,
    recorder: EventRecorder,
    registry: &Registry,
) -> Result<InjectorParts, ConfigError> {
    let (current_config, reload) = config_reload::open(config.files, recorder.clone(), registry).await?;
    let watches = MetadataCache::create_watches(client, registry);
    let metadata = watches.metadata();
    let (audit, report) = Audit::new(
        config.audit,
        client.clone(),
        current_config.clone(),
        metadata.clone(),
        registry,
    );
    let injector = Injector {
        current_config,
        metadata,
        recorder,
        verified_events: RateLimiter::new(VERIFIED_EVENT_RATE),
        unverified_events: RateLimiter::new(UNVERIFIED_EVENT_RATE),
        metrics: Metrics::new(registry),
    };
    Ok(InjectorParts {
        injector,
        reload,
        watches,
        audit,
        report,
    })
}

impl ReviewHandler for Injector {
    /// `Volume` is the largest type in a list of a `PodSpec`. While a `Vec` grows, both its old buffer and its new buffer of twice
    /// the length exist, so each element takes three times its size.
    const TYPED_BYTES_PER_JSON_OBJECT: usize = 3 * size_of::<Volume>();

    async fn review(&self, mut req: Request) -> Result<AdmissionResponse, Failure> {
        let namespace = req.namespace.take().unwrap_or_default();
        let is_protected = self.current_config.get().is_protected(&namespace);
        let kind = req.kind.kind.clone();
        match self.review_object(req, &namespace).await {
            Ok(response) => Ok(response),
            Err(err) if is_protected => {
                Ok(AdmissionResponse::allow().warn(failure_warning(&kind, &ErrorChain(&err).to_string())))
            }
            Err(err) => Err(err.into()),
        }
    }

    async fn review_undecoded(&self, head: RequestHead, reason: String) -> AdmissionResponse {
        let namespace = head.namespace.as_deref().unwrap_or_default();
        let config = self.current_config.get();
        let namespace_meta = match config.is_protected(namespace) {
            true => Ok(NamespaceMeta::default()),
            false => self.metadata.namespace(namespace, head.client).await,
        };
        match namespace_meta {
            Ok(meta) => decide_undecoded(&config, &meta.annotations, &head, reason),
            Err(_) => AdmissionResponse::deny(reason),
        }
    }
}

impl Injector {
    async fn review_object(&self, req: Request, namespace: &str) -> Result<AdmissionResponse, InjectorError> {
        let object = req.object.ok_or(InjectorError::NoObject)?;
        if namespace.is_empty() {
            return Err(InjectorError::NoNamespace);
        }
        match (req.kind.group.as_str(), req.kind.kind.as_str()) {
            ("", "Pod") => self.review_pod(object, namespace, req.dry_run, req.client).await,
            ("", "Service") => self.review_service(object, namespace, req.client).await,
            // Other kinds that a webhook configuration selects are allowed unchanged.
            _ => Ok(AdmissionResponse::allow()),
        }
    }

    async fn review_pod(
        &self,
        mut object: DynamicObject,
        namespace: &str,
        dry_run: bool,
        client: Option<IpAddr>,
    ) -> Result<AdmissionResponse, InjectorError> {
        let spec: PodSpec = take_spec("pod", &mut object.data)?;
        let namespace_meta = self.metadata.namespace(namespace, client).await?;
        let owner = self.metadata.owner(namespace, &object.metadata, client).await;
        let config = self.current_config.get();
        let target = InjectionTarget {
            pointer: &[],
            metadata: Some(&object.metadata),
            spec: &spec,
            namespace,
            namespace_annotations: &namespace_meta.annotations,
            owner: Some(owner.top_owner.clone()),
        };
        let outcome = injection::inject_pod(&config, &target);
        let is_denied = outcome.denial_reason.is_some() && !config.is_protected(namespace);
        let labels = metrics::labels(
            &owner.top_owner.kind,
            namespace,
            outcome.annotation_location,
            &object.metadata,
            &namespace_meta.annotations,
        );
        self.metrics.count_request(&labels);
        self.metrics.count_decision(&labels, &outcome.decision);
        log(&owner, namespace, &outcome, is_denied);
        // A dry run must have no side effects, so it records no Event.
        if !dry_run {
            self.record_event(owner, &outcome, is_denied, client);
        }
        let response = match outcome.denial_reason {
            Some(denial_reason) if is_denied => AdmissionResponse::deny(denial_reason),
            Some(denial_reason) => AdmissionResponse::allow().patch(outcome.patch).warn(denial_reason),
            None => AdmissionResponse::allow().patch(outcome.patch),
        };
        Ok(outcome.warnings.into_iter().fold(response, AdmissionResponse::warn))
    }

    async fn review_service(
        &self,
        mut object: DynamicObject,
        namespace: &str,
        client: Option<IpAddr>,
    ) -> Result<AdmissionResponse, InjectorError> {
        let spec: ServiceSpec = take_spec("service", &mut object.data)?;
        let namespace_meta = self.metadata.namespace(namespace, client).await?;
        let config = self.current_config.get();
        let ports = spec.ports.unwrap_or_default();
        let patch = injection::annotate_service(&config, Some(&object.metadata), &ports, &namespace_meta.annotations);
        Ok(AdmissionResponse::allow().patch(patch))
    }

    /// Records the decision as an Event on the owner, unless the client has caused too many Events.
    fn record_event(&self, owner: Owner, outcome: &InjectionOutcome, is_denied: bool, client: Option<IpAddr>) {
        let Some(regarding) = owner.reference else { return };
        let limiter = match owner.is_verified {
            true => &self.verified_events,
            false => &self.unverified_events,
        };
        if client.is_some_and(|client| !limiter.try_take(client)) {
            self.recorder.count_dropped();
            return;
        }
        let severity = match !outcome.warnings.is_empty() || outcome.denial_reason.is_some() {
            true => Severity::Warning,
            false => Severity::Normal,
        };
        let (reason, mut text) = match &outcome.decision {
            Decision::Inject(_) => ("Injected", "the sidecar proxy was injected".to_owned()),
            Decision::Skip(reasons) => {
                let reasons: Vec<_> = reasons.iter().map(|reason| reason.description()).collect();
                (
                    "InjectionSkipped",
                    format!("no sidecar proxy was injected: {}", reasons.join("; ")),
                )
            }
        };
        let reason = if is_denied { "InjectionRefused" } else { reason };
        for detail in outcome.denial_reason.iter().chain(&outcome.warnings) {
            text = format!("{text}; {detail}");
        }
        self.recorder.record(EventNote {
            regarding,
            severity,
            reason,
            action: "Inject",
            message: text,
        });
    }
}

/// Denies an object that cannot be decoded: if it were admitted without a sidecar, nothing would enforce its restrictions.
/// Exceptions are objects of protected namespaces, and pods that request no sidecar.
fn decide_undecoded(
    config: &injection::Config,
    namespace_annotations: &BTreeMap<String, String>,
    head: &RequestHead,
    reason: String,
) -> AdmissionResponse {
    let GroupVersionKind { group, kind, .. } = &head.kind;
    let is_protected = config.is_protected(head.namespace.as_deref().unwrap_or_default());
    let annotations = head.inject_annotation().map(inject_annotation).unwrap_or_default();
    let requests_no_sidecar = (group.as_str(), kind.as_str()) == ("", "Pod")
        && !injection::is_sidecar_requested(namespace_annotations, &annotations);
    match is_protected || requests_no_sidecar {
        true => AdmissionResponse::allow().warn(failure_warning(kind, &reason)),
        false => AdmissionResponse::deny(reason),
    }
}

fn inject_annotation(value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(annotation::INJECT.to_owned(), value.to_owned())])
}

/// The warning about an object that is admitted although its review failed.
fn failure_warning(kind: &str, cause: &str) -> String {
    match kind {
        "Pod" => format!("no proxy was injected: {cause}"),
        "Service" => format!("the annotation {} was not added: {cause}", annotation::OPAQUE_PORTS),
        _ => format!("the review failed: {cause}"),
    }
}

fn take_spec<T: serde::de::DeserializeOwned + Default>(
    kind: &'static str,
    data: &mut Value,
) -> Result<T, InjectorError> {
    match data.get_mut("spec").map(Value::take) {
        None => Ok(T::default()),
        Some(spec) => serde_json::from_value(spec).map_err(|source| InjectorError::Spec { kind, source }),
    }
}

/// Logs a decision. The level is `debug`, because every client that reaches the webhook can cause such lines; the Event on the
/// owner and the response have the same content.
fn log(owner: &Owner, namespace: &str, outcome: &InjectionOutcome, is_denied: bool) {
    let (kind, name) = (&owner.top_owner.kind, &owner.top_owner.name);
    match &outcome.decision {
        Decision::Inject(_) => debug!(namespace, kind, name, "injecting a proxy"),
        Decision::Skip(reasons) => {
            let reasons = injection::join_reasons(reasons);
            debug!(namespace, kind, name, reasons, "injecting no proxy");
        }
    }
    if let Some(denial_reason) = &outcome.denial_reason {
        match is_denied {
            true => debug!(namespace, kind, name, denial_reason, "the pod is denied"),
            false => debug!(
                namespace,
                kind, name, denial_reason, "the pod is admitted without a proxy, because its namespace is protected"
            ),
        }
    }
    for warning in &outcome.warnings {
        debug!(namespace, kind, name, warning, "the injector warns about the pod");
    }
}

/// Rate of Events about objects that are known to exist. It is higher than the other rate, because the number of these objects is
/// bounded, and equal Events become one Event with a count.
const VERIFIED_EVENT_RATE: Rate = Rate {
    burst: 1_000,
    interval: Duration::from_millis(50),
};
/// Rate of Events about StatefulSets, DaemonSets, other kinds, and pods without an owner. Each pod of a rollout counts, even if its
/// Event is aggregated. After the burst, the rate permits 300 pods per minute.
const UNVERIFIED_EVENT_RATE: Rate = Rate {
    burst: 200,
    interval: Duration::from_millis(200),
};

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::Ipv4Addr;

    use http::{Method, Request as HttpRequest, Response};
    use http_body_util::BodyExt as _;
    use kube::client::Body;
    use serde_json::json;
    use tokio::sync::mpsc;
    use tulle_core::drain;

    use super::*;
    use crate::injection::InjectionOrigin;
    use crate::injection::values::Values;
    use crate::kubernetes::event_recorder::{self, Reporter};

    /// Returns a client whose API server has every namespace, and a receiver of the names that its Events are about.
    fn api_server() -> (Client, mpsc::UnboundedReceiver<String>) {
        let (seen, events) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |req: HttpRequest<Body>| {
            let seen = seen.clone();
            async move {
                let body = match *req.method() {
                    Method::POST => {
                        let event = req.into_body().collect().await.unwrap().to_bytes();
                        let object: Value = serde_json::from_slice(&event).unwrap();
                        let _ = seen.send(object["regarding"]["name"].as_str().unwrap().to_owned());
                        event.to_vec()
                    }
                    _ => json!({"metadata": {}}).to_string().into_bytes(),
                };
                Ok::<_, Infallible>(Response::new(Body::from(body)))
            }
        });
        (Client::new(service, "default"), events)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_causes_few_events_about_owners_that_may_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::in_dir(dir.path());
        std::fs::write(&files.values, "identityTrustAnchorsPEM: anchors").unwrap();
        let config = Config {
            files,
            audit: audit::Config {
                interval: Duration::from_secs(300),
            },
        };
        let ((client, mut events), registry) = (api_server(), Registry::new());
        let reporter = Reporter {
            controller: "linkerd-proxy-injector".to_owned(),
            instance: "linkerd-proxy-injector-0".to_owned(),
        };
        let (recorder, publisher) = event_recorder::new_recorder(client.clone(), reporter, &registry);
        let (signal, drain) = drain::channel();
        let publishing = tokio::spawn(publisher.run(drain));
        let InjectorParts { injector, .. } = open(config, &client, recorder, &registry).await.unwrap();
        let review = async |client: [u8; 4], owner: String| {
            let owner = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": owner, "uid": "1"});
            let review = json!({
                "kind": {"group": "", "version": "v1", "kind": "Pod"}, "namespace": "shop",
                "object": {"metadata": {"ownerReferences": [owner]}, "spec": {"containers": []}},
            });
            let mut review: Request = serde_json::from_value(review).unwrap();
            review.client = Some(Ipv4Addr::from(client).into());
            injector.review(review).await.unwrap();
        };
        for n in 0..500 {
            review([10, 0, 0, 1], format!("none-{n}")).await;
        }
        review([10, 0, 0, 2], "web".to_owned()).await;
        for n in 0..UNVERIFIED_EVENT_RATE.burst {
            assert_eq!(events.recv().await.unwrap(), format!("none-{n}"));
        }
        assert_eq!(events.recv().await.unwrap(), "web");
        signal.drain().await;
        publishing.await.unwrap();
        assert!(events.try_recv().is_err());
        let metrics = registry.render();
        assert!(metrics.contains("outcome=\"dropped\"} 300"), "{metrics}");
    }

    #[test]
    fn the_warning_of_a_failed_review_names_what_is_missing_and_the_causes() {
        let err = take_spec::<ServiceSpec>("service", &mut json!({"spec": {"ports": 1}})).unwrap_err();
        let warning = failure_warning("Service", &ErrorChain(&err).to_string());
        let expected =
            "the annotation config.linkerd.io/opaque-ports was not added: the service's spec cannot be read: ";
        assert!(
            warning.strip_prefix(expected).is_some_and(|cause| !cause.is_empty()),
            "{warning}"
        );
        assert_eq!(
            failure_warning("Pod", &InjectorError::NoNamespace.to_string()),
            "no proxy was injected: the object has no namespace"
        );
    }

    #[test]
    fn an_object_that_is_not_decoded_is_denied_only_if_it_could_need_a_sidecar() {
        let config = injection::Config {
            values: Values::default(),
            control_plane_namespace: "linkerd".to_owned(),
            origin: InjectionOrigin::Webhook,
        };
        let check = |kind: &str, namespace: &str, [of_namespace, of_pod]: [Option<&str>; 2], is_denied: bool| {
            let annotations = |inject: Option<&str>| inject.map(inject_annotation).unwrap_or_default();
            let head = json!({
                "kind": {"group": "", "version": "v1", "kind": kind}, "namespace": namespace,
                "object": {"metadata": {"annotations": annotations(of_pod)}},
            });
            let head: RequestHead = serde_json::from_value(head).unwrap();
            let answer = decide_undecoded(&config, &annotations(of_namespace), &head, "too large".to_owned());
            let row = format!("{kind} {namespace} {of_namespace:?} {of_pod:?}: {answer:?}");
            match is_denied {
                true => assert_eq!(answer.denial_reason(), Some("too large"), "{row}"),
                false => {
                    assert_eq!(answer.denial_reason(), None, "{row}");
                    assert!(answer.warnings()[0].ends_with(": too large"), "{row}");
                }
            }
        };
        let (enabled, disabled) = (Some("enabled"), Some("disabled"));
        check("Pod", "shop", [None, enabled], true);
        check("Pod", "shop", [enabled, None], true);
        check("Pod", "shop", [None, Some("ingress")], true);
        check("Pod", "shop", [None, None], false);
        check("Pod", "shop", [enabled, disabled], false);
        check("Pod", "linkerd", [enabled, enabled], false);
        check("Pod", "kube-system", [None, enabled], false);
        check("Service", "shop", [None, None], true);
        check("Service", "kube-system", [None, None], false);
    }
}
