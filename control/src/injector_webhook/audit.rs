//! Finds pods that should have a sidecar and have none: pods created while the webhook was unavailable, or before their
//! namespace was annotated.
//!
//! Only pods without the label of the mesh are listed, in pages. The audit changes no object.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::sleep;
use tracing::{debug, warn};
use tulle_core::drain::Watch;
use tulle_core::metrics::{Family, Gauge, Labels, Registry};
use tulle_core::names::{annotation, label};

use super::config_reload::CurrentConfig;
use super::metadata::{MetadataCache, MetadataError};
use super::metrics;
use crate::injection::values::ProxyInjector;
use crate::injection::{self, Decision, InjectionTarget, SkipReason};

#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Time between audits, 5 minutes by default.
    pub interval: Duration,
}

/// Audits periodically.
pub struct Audit {
    config: Config,
    client: Client,
    current_config: CurrentConfig,
    metadata: MetadataCache,
    gauge: Family<Gauge>,
    report: AuditReport,
}

/// Result of the last audit. Clones share it.
#[derive(Clone, Default)]
pub struct AuditReport {
    findings: Arc<ArcSwap<AuditFindings>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AuditFindings {
    /// Time of the last audit, in RFC 3339; absent until the first audit has ended.
    pub audited_at: Option<String>,
    /// Pods that should have a sidecar, sorted by namespace and name.
    pub uninjected_pods: Vec<UninjectedPod>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UninjectedPod {
    pub namespace: String,
    pub name: String,
}

#[derive(Debug, thiserror::Error)]
enum AuditError {
    #[error("listing pods")]
    List(#[source] Box<kube::Error>),
    #[error(transparent)]
    Metadata(#[from] MetadataError),
}

impl AuditReport {
    pub fn findings(&self) -> Arc<AuditFindings> {
        self.findings.load_full()
    }
}

impl Audit {
    pub(super) fn new(
        config: Config,
        client: Client,
        current_config: CurrentConfig,
        metadata: MetadataCache,
        registry: &Registry,
    ) -> (Self, AuditReport) {
        let report = AuditReport::default();
        let audit = Self {
            config,
            client,
            current_config,
            metadata,
            gauge: metrics::uninjected_pods(registry),
            report: report.clone(),
        };
        (audit, report)
    }

    /// Audits when the caches are complete, again after 15 seconds, and then every interval until the drain.
    pub async fn run(self, drain: Watch) {
        tokio::select! {
            () = drain.signaled() => {}
            () = self.run_audits() => {}
        }
    }

    async fn run_audits(&self) {
        self.metadata.synced().await;
        // For some seconds after the injector's start, API servers may not reach it and create pods without a sidecar. The
        // second audit finds these pods.
        let mut pause = self.config.interval.min(SECOND_AUDIT_DELAY);
        let mut gauges: BTreeMap<String, Arc<Gauge>> = BTreeMap::new();
        loop {
            match self.audit().await {
                Ok(uninjected) => self.publish(uninjected, &mut gauges),
                Err(err) => {
                    let error: &dyn std::error::Error = &err;
                    warn!(error, "the audit of pods without a sidecar failed; retrying");
                }
            }
            sleep(pause).await;
            pause = self.config.interval;
        }
    }

    async fn audit(&self) -> Result<BTreeSet<UninjectedPod>, AuditError> {
        let pods = Api::<Pod>::all(self.client.clone());
        let unmeshed = format!("!{}", label::CONTROL_PLANE_NS);
        let mut params = ListParams::default().labels(&unmeshed).limit(PAGE_SIZE);
        let mut uninjected = BTreeSet::new();
        loop {
            let page = pods
                .list(&params)
                .await
                .map_err(|err| AuditError::List(Box::new(err)))?;
            for pod in &page.items {
                if self.should_have_sidecar(pod).await? {
                    uninjected.insert(UninjectedPod {
                        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
                        name: pod.metadata.name.clone().unwrap_or_default(),
                    });
                }
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(uninjected),
            }
        }
    }

    /// Returns whether the pod should have a sidecar. There are two cases:
    /// - a pod that is created now with these annotations gets a sidecar or is denied;
    /// - the value of `linkerd.io/inject` of the pod or its namespace is invalid.
    async fn should_have_sidecar(&self, pod: &Pod) -> Result<bool, AuditError> {
        let (meta, Some(spec)) = (&pod.metadata, &pod.spec) else {
            return Ok(false);
        };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = meta.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"));
        if has_ended {
            return Ok(false);
        }
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let config = self.current_config.get();
        // The chart exempts these namespaces from the webhook, whatever the selectors are.
        if config.is_protected(namespace) {
            return Ok(false);
        }
        let namespace_meta = match self.metadata.namespace(namespace, None).await {
            Ok(meta) => meta,
            // The namespace was deleted after its pods were listed.
            Err(err) if err.is_not_found() => return Ok(false),
            Err(err) => return Err(err.into()),
        };
        let labels = meta.labels.clone().unwrap_or_default();
        let injector = &config.values.proxy_injector;
        if !is_selected(injector, &namespace_meta.labels, &labels) {
            return Ok(false);
        }
        let target = InjectionTarget {
            pointer: &[],
            metadata: Some(meta),
            spec,
            namespace,
            namespace_annotations: &namespace_meta.annotations,
            owner: None,
        };
        Ok(match injection::decide(&config, &target) {
            Decision::Inject(_) => true,
            Decision::Skip(reasons) => reasons
                .iter()
                .all(|reason| matches!(reason, SkipReason::InvalidAtNamespace | SkipReason::InvalidAtWorkload)),
        })
    }

    fn publish(&self, uninjected: BTreeSet<UninjectedPod>, gauges: &mut BTreeMap<String, Arc<Gauge>>) {
        let mut by_namespace: BTreeMap<&str, i64> = BTreeMap::new();
        for pod in &uninjected {
            *by_namespace.entry(&pod.namespace).or_default() += 1;
        }
        for (namespace, n_pods) in &by_namespace {
            let label = || Labels::new().with("namespace", namespace);
            let gauge = gauges
                .entry((*namespace).to_owned())
                .or_insert_with(|| self.gauge.get(&label()));
            // Logged again only if the number changes; the admin port serves the list.
            if gauge.get() != *n_pods {
                warn!(
                    namespace,
                    n_pods,
                    "pods should have a sidecar and have none; correct invalid values of {}, then restart their workloads",
                    annotation::INJECT
                );
            }
        }
        for (namespace, gauge) in gauges.iter() {
            gauge.set(by_namespace.get(namespace.as_str()).copied().unwrap_or(0));
        }
        debug!(n_pods = uninjected.len(), "audited pods without a sidecar");
        self.report.findings.store(Arc::new(AuditFindings {
            // Cannot fail for a current time.
            audited_at: OffsetDateTime::now_utc().format(&Rfc3339).ok(),
            uninjected_pods: Vec::from_iter(uninjected),
        }));
    }
}

/// Returns whether the webhook is called for a pod with these labels, by the chart's selectors or their defaults.
#[must_use]
pub fn is_selected(
    injector: &ProxyInjector,
    namespace: &BTreeMap<String, String>,
    pod: &BTreeMap<String, String>,
) -> bool {
    let in_namespace = match &injector.namespace_selector {
        Some(selector) => selector.matches_map(namespace),
        None => {
            let value = |key| namespace.get(key).map(String::as_str);
            value(label::ADMISSION_WEBHOOKS) != Some("disabled")
                && !DEFAULT_EXEMPT_NAMESPACES.contains(&value(label::NAMESPACE_NAME).unwrap_or_default())
        }
    };
    let selects_pod = match &injector.object_selector {
        Some(selector) => selector.matches_map(pod),
        None => !pod.contains_key(label::CONTROL_PLANE_COMPONENT) && !pod.contains_key(label::CNI_RESOURCE),
    };
    in_namespace && selects_pod
}

/// Namespaces that the chart's default selector exempts.
const DEFAULT_EXEMPT_NAMESPACES: [&str; 2] = ["kube-system", "cert-manager"];
const PAGE_SIZE: u32 = 500;
/// Time from the first to the second audit. After this time, all API servers call the injector.
const SECOND_AUDIT_DELAY: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::injector_webhook::config_reload::{self, Files};
    use crate::kubernetes::event_recorder::EventRecorder;

    /// Returns the response of an API server with pods in the namespaces `gone` and `shop`. The namespace `gone` does not exist. The
    /// namespace `shop` is annotated for injection; two of its pods have their own annotation.
    fn answer(path: &str) -> (StatusCode, Value) {
        let pod = |namespace: &str| json!({"metadata": {"name": "web", "namespace": namespace}, "spec": {}});
        let annotated = |name: &str, inject: &str| {
            let annotations = json!({"linkerd.io/inject": inject});
            json!({"metadata": {"name": name, "namespace": "shop", "annotations": annotations}, "spec": {}})
        };
        match path {
            "/api/v1/pods" => {
                let pods = [
                    pod("gone"),
                    pod("shop"),
                    annotated("misspelled", "true"),
                    annotated("plain", "disabled"),
                ];
                let list = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods});
                (StatusCode::OK, list)
            }
            "/api/v1/namespaces/shop" => {
                let annotations = json!({"linkerd.io/inject": "enabled"});
                let namespace = json!({"metadata": {"name": "shop", "annotations": annotations}});
                (StatusCode::OK, namespace)
            }
            _ => {
                let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
                (StatusCode::NOT_FOUND, status)
            }
        }
    }

    fn client() -> Client {
        let service = tower::service_fn(|req: Request<Body>| {
            let (status, body) = answer(req.uri().path());
            let rsp = Response::builder().status(status);
            let rsp = rsp.body(Body::from(body.to_string().into_bytes()));
            std::future::ready(Ok::<_, Infallible>(rsp.unwrap()))
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn pods_annotated_for_a_sidecar_or_with_an_invalid_value_are_found_in_existing_namespaces() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::in_dir(dir.path());
        std::fs::write(&files.values, "identityTrustAnchorsPEM: anchors").unwrap();
        let (client, registry) = (client(), Registry::new());
        let opened = config_reload::open(files, EventRecorder::default(), &registry).await;
        let (current_config, _reload) = opened.unwrap();
        let metadata = MetadataCache::create_watches(&client, &registry).metadata();
        let config = Config {
            interval: Duration::from_secs(300),
        };
        let (audit, _) = Audit::new(config, client, current_config, metadata, &registry);
        let expected = ["misspelled", "web"].map(|name| UninjectedPod {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        });
        assert_eq!(audit.audit().await.unwrap(), BTreeSet::from(expected));
    }
}
