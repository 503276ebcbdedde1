//! Looks for pods that should have a sidecar and have none: those that came while nobody answered reviews, and those
//! that are older than their namespace's annotation.
//!
//! Only pods without the label of the mesh are listed, a page at a time; nothing is changed.

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

use super::metadata::{Metadata, MetadataError};
use super::metrics;
use super::settings::Settings;
use crate::inject::values::ProxyInjector;
use crate::inject::{self, Decision, Subject};

/// When pods are looked at.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Default 5 minutes.
    pub interval: Duration,
}

/// Audits from time to time.
pub struct Audit {
    config: Config,
    client: Client,
    settings: Settings,
    metadata: Metadata,
    gauge: Family<Gauge>,
    report: Report,
}

/// What the last audit found; clones share it.
#[derive(Clone, Default)]
pub struct Report {
    findings: Arc<ArcSwap<Findings>>,
}

/// The outcome of an audit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Findings {
    /// RFC 3339; absent before the first audit has ended.
    pub audited_at: Option<String>,
    /// Pods that should have a sidecar, by namespace and name.
    pub missing: Vec<MissingPod>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingPod {
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

impl Report {
    pub fn findings(&self) -> Arc<Findings> {
        self.findings.load_full()
    }
}

impl Audit {
    pub(super) fn new(
        config: Config,
        client: Client,
        settings: Settings,
        metadata: Metadata,
        registry: &Registry,
    ) -> (Self, Report) {
        let report = Report::default();
        let audit = Self {
            config,
            client,
            settings,
            metadata,
            gauge: metrics::missing(registry),
            report: report.clone(),
        };
        (audit, report)
    }

    /// Audits at once, again when the webhook is surely asked, and then from time to time, until the drain.
    pub async fn run(self, drain: Watch) {
        tokio::select! {
            () = drain.signaled() => {}
            () = self.audit_for_ever() => {}
        }
    }

    async fn audit_for_ever(&self) {
        self.metadata.synced().await;
        // The API server passes over a webhook that it does not reach yet, for a while after the injector is there.
        let mut pause = self.config.interval.min(SETTLED);
        let mut gauges: BTreeMap<String, Arc<Gauge>> = BTreeMap::new();
        loop {
            match self.audit().await {
                Ok(missing) => self.publish(missing, &mut gauges),
                Err(err) => {
                    let error: &dyn std::error::Error = &err;
                    warn!(error, "looking for pods without a sidecar failed and is tried again");
                }
            }
            sleep(pause).await;
            pause = self.config.interval;
        }
    }

    async fn audit(&self) -> Result<BTreeSet<MissingPod>, AuditError> {
        let pods = Api::<Pod>::all(self.client.clone());
        let unmeshed = format!("!{}", label::CONTROL_PLANE_NS);
        let mut params = ListParams::default().labels(&unmeshed).limit(PAGE);
        let mut missing = BTreeSet::new();
        loop {
            let page = pods
                .list(&params)
                .await
                .map_err(|err| AuditError::List(Box::new(err)))?;
            for pod in &page.items {
                if self.is_missing(pod).await? {
                    missing.insert(MissingPod {
                        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
                        name: pod.metadata.name.clone().unwrap_or_default(),
                    });
                }
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(missing),
            }
        }
    }

    /// Whether this pod would get a sidecar if it were created now.
    async fn is_missing(&self, pod: &Pod) -> Result<bool, AuditError> {
        let (meta, Some(spec)) = (&pod.metadata, &pod.spec) else {
            return Ok(false);
        };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = meta.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed"));
        if has_ended {
            return Ok(false);
        }
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let config = self.settings.current();
        // The chart keeps the webhook out of these, whatever the selectors say.
        if config.is_protected(namespace) {
            return Ok(false);
        }
        let of_namespace = self.metadata.namespace(namespace).await?;
        let labels = meta.labels.clone().unwrap_or_default();
        let injector = &config.values.proxy_injector;
        if !is_selected(injector, &of_namespace.labels, &labels) {
            return Ok(false);
        }
        let subject = Subject {
            root: &[],
            metadata: Some(meta),
            spec,
            namespace,
            namespace_annotations: &of_namespace.annotations,
            owner: None,
        };
        Ok(matches!(inject::decide(&config, &subject), Decision::Inject(_)))
    }

    fn publish(&self, missing: BTreeSet<MissingPod>, gauges: &mut BTreeMap<String, Arc<Gauge>>) {
        let mut by_namespace: BTreeMap<&str, i64> = BTreeMap::new();
        for pod in &missing {
            *by_namespace.entry(&pod.namespace).or_default() += 1;
        }
        for (namespace, n_pods) in &by_namespace {
            let label = || Labels::new().with("namespace", namespace);
            let gauge = gauges
                .entry((*namespace).to_owned())
                .or_insert_with(|| self.gauge.get(&label()));
            // Told again only when it changes: the list stands on the admin port.
            if gauge.get() != *n_pods {
                warn!(
                    namespace,
                    n_pods, "pods are annotated for a sidecar and have none; restart their workloads"
                );
            }
        }
        for (namespace, gauge) in gauges.iter() {
            gauge.set(by_namespace.get(namespace.as_str()).copied().unwrap_or(0));
        }
        debug!(n_pods = missing.len(), "looked for pods without a sidecar");
        self.report.findings.store(Arc::new(Findings {
            // Times of this century can be written.
            audited_at: OffsetDateTime::now_utc().format(&Rfc3339).ok(),
            missing: Vec::from_iter(missing),
        }));
    }
}

/// Whether the API server asks the webhook about a pod with these labels, by the chart's selectors or their defaults.
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
            value(annotation::ADMISSION_WEBHOOKS) != Some("disabled")
                && !EXEMPT.contains(&value(label::NAMESPACE_NAME).unwrap_or_default())
        }
    };
    let selects_pod = match &injector.object_selector {
        Some(selector) => selector.matches_map(pod),
        None => !pod.contains_key(label::CONTROL_PLANE_COMPONENT) && !pod.contains_key(label::CNI_RESOURCE),
    };
    in_namespace && selects_pod
}

/// Namespaces that the webhook stays out of unless the chart says otherwise.
const EXEMPT: [&str; 2] = ["kube-system", "cert-manager"];
const PAGE: u32 = 500;
/// How long after the injector's start all API servers ask it.
const SETTLED: Duration = Duration::from_secs(15);
