//! Keeps a webhook's certificate in a Secret, and publishes its CA bundle in the webhook configuration. An aggregated
//! API is handled the same way, with its APIService as the configuration.
//!
//! All replicas do this without leader election: a Secret is written only over the version that was read, and on a
//! conflict the replica starts again from the current version. The Secret is owned by the webhook configuration and
//! deleted with it. Without a configuration nothing is written, because nothing calls the webhook.
//!
//! If the configuration does not own the Secret, or cert-manager manages it, its certificate is served, and neither the
//! Secret nor `caBundle` is written. The process is then ready when the API server's bundle verifies the served
//! certificate. If the bundle stops verifying it, a metric and the log report it, and the injector becomes unready if it
//! is the only service of the process, as in the chart.
//!
//! Permissions: `create`, `patch`, `list`, `watch`, `update` of Secrets in the namespace of the control plane by name
//! (they are created by server-side apply, because RBAC cannot restrict a POST by name); `list`, `watch`, `patch` of
//! `mutatingwebhookconfigurations`, `validatingwebhookconfigurations` or `apiservices` by name.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watch_object};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::time::Instant;
use tracing::{debug, info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::names::{label, telemetry::API_SERVICE};
use tulle_core::readiness::Latch;
use tulle_core::wall_clock::Deadline;

use super::certificate::{self, CertificateKeyPair};
use super::rotation::{RotationInput, RotationTimes, SecretContent};
use super::server_credentials::ServerCredentials;
use crate::tls::anchors::{self, TrustAnchors};

/// The certificate, its Secret and its configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub namespace: String,
    /// Service of the webhook.
    pub service: &'static str,
    /// Server name that the API server uses, and subject of the certificate.
    pub server_name: String,
    pub secret: &'static str,
    pub bundle_target: BundleTarget,
    pub unready_when_untrusted: UnreadyWhenUntrusted,
    pub times: RotationTimes,
}

/// When an untrusted certificate makes the process unready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadyWhenUntrusted {
    /// Only until the API server trusts the first certificate. Afterwards the process stays ready, because proxies need it
    /// too.
    UntilFirstTrusted,
    /// At any time. Only for a process that proxies do not need: the injector without other services.
    Always,
}

/// The webhook configuration or APIService that refers to this server.
#[derive(Clone, Copy, Debug)]
pub enum BundleTarget {
    Mutating(&'static str),
    Validating(&'static str),
    ApiService(&'static str),
}

/// Maintains the certificate of one webhook.
pub struct CertificateController {
    config: Config,
    creds: Arc<ServerCredentials>,
    secrets: Api<Secret>,
    configurations: Api<DynamicObject>,
    configuration_kind: ApiResource,
    /// `None` until the first watch event, `Some(None)` if it does not exist.
    secret: Option<Option<Secret>>,
    /// `None` until the first watch event, `Some(None)` if it does not exist.
    configuration: Option<Option<DynamicObject>>,
    /// The content of the Secret after the last successful reconciliation. It restores a deleted Secret.
    last_known: Option<SecretContent>,
    /// The certificate that this process serves.
    served: Option<Arc<CertificateKeyPair>>,
    /// The published bundle, and the time since which it is published.
    published: Option<(String, Instant)>,
    /// Field manager of server-side apply. It is random, so that two replicas cannot both create the Secret.
    manager: String,
    /// The last reported problem of an externally managed certificate.
    reported_problem: Option<String>,
}

/// The readiness condition of one certificate.
struct CertificateReadiness {
    latch: Latch,
    /// Whether it was ready before: the API server trusted the certificate, or no configuration existed.
    was_ready: bool,
}

/// Why the API server does not trust an externally managed certificate.
#[derive(Debug, thiserror::Error)]
enum BundleError {
    #[error("{configuration} has no CA bundle, and Secret {secret} is managed externally; set caBundle")]
    NoBundle {
        configuration: &'static str,
        secret: &'static str,
    },
    #[error("the CA bundle of {configuration} is invalid")]
    Bundle {
        configuration: &'static str,
        #[source]
        source: anchors::Error,
    },
    #[error("the certificate in Secret {secret} is not verified by the CA bundle of {configuration}")]
    Chain {
        configuration: &'static str,
        secret: &'static str,
        #[source]
        source: rustls::Error,
    },
    #[error("Secret {secret} does not exist; create it, or remove the cert-manager annotation of {configuration}")]
    NoSecret {
        configuration: &'static str,
        secret: &'static str,
    },
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("generating the certificate")]
    Certificate(#[source] certificate::Error),
    #[error("the externally managed Secret is invalid; expected tls.crt and tls.key in PEM")]
    ExternalSecret(#[source] certificate::Error),
    #[error("installing the certificate")]
    Install(#[source] rustls::Error),
    #[error("writing Secret {name}")]
    Secret {
        name: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("writing the CA bundle of {name}")]
    Bundle {
        name: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
}

impl Config {
    /// Returns the configuration for a process that runs the injector only. With other services, set
    /// [`UnreadyWhenUntrusted::UntilFirstTrusted`].
    pub fn proxy_injector(namespace: String) -> Self {
        let bundle_target = BundleTarget::Mutating("linkerd-proxy-injector-webhook-config");
        Self {
            unready_when_untrusted: UnreadyWhenUntrusted::Always,
            ..Self::new(
                namespace,
                "linkerd-proxy-injector",
                "linkerd-proxy-injector-k8s-tls",
                bundle_target,
            )
        }
    }

    pub fn sp_validator(namespace: String) -> Self {
        let bundle_target = BundleTarget::Validating("linkerd-sp-validator-webhook-config");
        Self::new(
            namespace,
            "linkerd-sp-validator",
            "linkerd-sp-validator-k8s-tls",
            bundle_target,
        )
    }

    pub fn policy_validator(namespace: String) -> Self {
        let bundle_target = BundleTarget::Validating("linkerd-policy-validator-webhook-config");
        Self::new(
            namespace,
            "linkerd-policy-validator",
            "linkerd-policy-validator-k8s-tls",
            bundle_target,
        )
    }

    pub fn telemetry(namespace: String) -> Self {
        let bundle_target = BundleTarget::ApiService(API_SERVICE);
        Self::new(
            namespace,
            "linkerd-telemetry",
            "linkerd-telemetry-k8s-tls",
            bundle_target,
        )
    }

    fn new(namespace: String, service: &'static str, secret: &'static str, bundle_target: BundleTarget) -> Self {
        Self {
            server_name: format!("{service}.{namespace}.svc"),
            namespace,
            service,
            secret,
            bundle_target,
            unready_when_untrusted: UnreadyWhenUntrusted::UntilFirstTrusted,
            times: RotationTimes::default(),
        }
    }
}

impl BundleTarget {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mutating(name) | Self::Validating(name) | Self::ApiService(name) => name,
        }
    }

    fn kind(self) -> ApiResource {
        let (group, kind) = match self {
            Self::Mutating(_) => ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
            Self::Validating(_) => ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration"),
            Self::ApiService(_) => ("apiregistration.k8s.io", "APIService"),
        };
        ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind))
    }

    /// Returns the CA bundles in the object, one for each webhook. A bundle that is not set is empty.
    fn bundles(self, object: &DynamicObject) -> Vec<Vec<u8>> {
        let bundle = |value: Option<&Value>| {
            let bytes = value.and_then(|bundle| serde_json::from_value::<ByteString>(bundle.clone()).ok());
            bytes.map(|bytes| bytes.0).unwrap_or_default()
        };
        match self {
            Self::ApiService(_) if object.data.pointer("/spec/insecureSkipTLSVerify") == Some(&Value::Bool(true)) => {
                Vec::new()
            }
            Self::ApiService(_) => vec![bundle(object.data.pointer("/spec/caBundle"))],
            Self::Mutating(_) | Self::Validating(_) => webhooks(object)
                .map(|webhook| bundle(webhook.pointer("/clientConfig/caBundle")))
                .collect(),
        }
    }

    /// Returns whether the object has exactly this bundle everywhere.
    fn has_bundle(self, object: &DynamicObject, bundle: &Value) -> bool {
        match self {
            Self::ApiService(_) => object.data.pointer("/spec/caBundle") == Some(bundle),
            Self::Mutating(_) | Self::Validating(_) => {
                webhooks(object).all(|webhook| webhook.pointer("/clientConfig/caBundle") == Some(bundle))
            }
        }
    }

    /// Returns a patch that sets this bundle. The resourceVersion makes the patch fail if the object has changed.
    fn bundle_patch(self, object: &DynamicObject, bundle: &Value) -> Patch<Value> {
        let metadata = json!({"resourceVersion": object.resource_version()});
        match self {
            Self::ApiService(_) => Patch::Merge(json!({"metadata": metadata, "spec": {"caBundle": bundle}})),
            Self::Mutating(_) | Self::Validating(_) => {
                // Strategic merge merges this list by the name of the webhook.
                let webhooks: Vec<Value> = webhooks(object)
                    .map(|webhook| json!({"name": webhook.get("name"), "clientConfig": {"caBundle": bundle}}))
                    .collect();
                Patch::Strategic(json!({"metadata": metadata, "webhooks": webhooks}))
            }
        }
    }
}

impl CertificateController {
    pub fn new(client: Client, config: Config, creds: Arc<ServerCredentials>) -> Self {
        let configuration_kind = config.bundle_target.kind();
        Self {
            secrets: Api::namespaced(client.clone(), &config.namespace),
            configurations: Api::all_with(client, &configuration_kind),
            configuration_kind,
            config,
            creds,
            secret: None,
            configuration: None,
            last_known: None,
            served: None,
            published: None,
            manager: format!("tulle-control-{:016x}", fastrand::u64(..)),
            reported_problem: None,
        }
    }

    /// Runs until the drain. Releases the latch when the API server can call the webhook, or when no configuration
    /// exists.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut readiness = CertificateReadiness {
            latch,
            was_ready: false,
        };
        let mut retries = RECONCILE_BACKOFF.start();
        let secrets = watch_object(self.secrets.clone(), self.config.secret);
        let mut secrets = pin!(secrets.default_backoff());
        let name = self.config.bundle_target.name();
        let configurations = watch_object(self.configurations.clone(), name);
        let mut configurations = pin!(configurations.default_backoff());
        loop {
            let wait = match self.reconcile(&mut readiness).await {
                Ok(wait) => {
                    retries.reset();
                    wait
                }
                Err(err) => {
                    let webhook = self.config.service;
                    // A conflict: another replica wrote first, and the watch delivers its version.
                    match err.is_conflict() {
                        true => debug!(webhook, "another replica wrote first"),
                        false => warn!(
                            webhook,
                            error = &err as &dyn std::error::Error,
                            "updating the certificate failed"
                        ),
                    }
                    // The previously served certificate stays.
                    readiness.set_unready_until_first_trusted(|| format!("{webhook}: {}", ErrorChain(&err)));
                    retries.next_delay()
                }
            };
            let due = Deadline::after(wait, SystemTime::now);
            // Cancel-safe: all branches only wait, and dropping the `next` of a stream loses no event.
            tokio::select! {
                () = drain.signaled() => return,
                Some(seen) = secrets.next() => {
                    self.secret = watched_object(seen, self.config.secret).or_else(|| self.secret.take());
                }
                Some(seen) = configurations.next() => {
                    self.configuration = watched_object(seen, name).or_else(|| self.configuration.take());
                }
                () = due.wait() => {}
            }
        }
    }

    /// Updates the Secret, the bundle and the served certificate as far as possible. Returns the delay until the next
    /// call.
    async fn reconcile(&mut self, readiness: &mut CertificateReadiness) -> Result<Duration, Error> {
        let (Some(secret), Some(configuration)) = (self.secret.clone(), self.configuration.clone()) else {
            return Ok(RESYNC_INTERVAL);
        };
        let Some(configuration) = configuration else {
            self.mark_ready(readiness);
            return Ok(RESYNC_INTERVAL);
        };
        if self.is_externally_managed(secret.as_ref(), &configuration) {
            if let Some(secret) = &secret {
                self.serve_external_certificate(secret)?;
            }
            match self.check_external_bundle(secret.as_ref(), &configuration) {
                Ok(()) => self.mark_ready(readiness),
                Err(err) => self.report_untrusted(&err, readiness),
            }
            return Ok(RESYNC_INTERVAL);
        }
        let state = self.update_secret(secret, &configuration).await?;
        self.publish_bundle(&state, configuration).await?;
        let wait = self.serve_certificate(&state)?;
        self.mark_ready(readiness);
        self.last_known = Some(state);
        Ok(wait)
    }

    /// Returns whether cert-manager manages the certificate, or the configuration does not own its Secret.
    fn is_externally_managed(&self, secret: Option<&Secret>, configuration: &DynamicObject) -> bool {
        let is_injected_by_cert_manager = |key: &String| key.starts_with("cert-manager.io/inject-ca-from");
        let is_foreign = |secret: &Secret| !secret.owner_references().iter().any(|owner| self.is_owner(owner));
        configuration.annotations().keys().any(is_injected_by_cert_manager) || secret.is_some_and(is_foreign)
    }

    fn is_owner(&self, owner: &OwnerReference) -> bool {
        owner.kind == self.configuration_kind.kind && owner.name == self.config.bundle_target.name()
    }

    /// Serves an externally managed certificate.
    fn serve_external_certificate(&mut self, secret: &Secret) -> Result<(), Error> {
        let entry = |key: &str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(key));
            bytes.map(|bytes| bytes.0.as_slice()).unwrap_or_default()
        };
        let pair = CertificateKeyPair::parse(entry("tls.crt"), entry("tls.key")).map_err(Error::ExternalSecret)?;
        if self.served.as_ref().is_some_and(|served| **served == pair) {
            return Ok(());
        }
        self.creds.install(&pair).map_err(Error::Install)?;
        info!(webhook = self.config.service, until = %pair.not_after, "serving an externally managed certificate");
        self.served = Some(Arc::new(pair));
        Ok(())
    }

    /// Checks that the API server's CA bundles verify the externally managed certificate.
    fn check_external_bundle(&self, secret: Option<&Secret>, object: &DynamicObject) -> Result<(), BundleError> {
        let (configuration, name) = (self.config.bundle_target.name(), self.config.secret);
        let (Some(_), Some(served)) = (secret, &self.served) else {
            return Err(BundleError::NoSecret {
                configuration,
                secret: name,
            });
        };
        for bundle in self.config.bundle_target.bundles(object) {
            if bundle.is_empty() {
                return Err(BundleError::NoBundle {
                    configuration,
                    secret: name,
                });
            }
            let bundle = TrustAnchors::parse(&bundle, Path::new("caBundle"))
                .map_err(|source| BundleError::Bundle { configuration, source })?;
            served
                .verify(&bundle, &self.config.server_name)
                .map_err(|source| BundleError::Chain {
                    configuration,
                    secret: name,
                    source,
                })?;
        }
        Ok(())
    }

    /// Marks the webhook ready: the API server can call it, or no configuration refers to it.
    fn mark_ready(&mut self, readiness: &mut CertificateReadiness) {
        if self.reported_problem.take().is_some() {
            info!(
                webhook = self.config.service,
                "the reported problem of the webhook's certificate no longer exists"
            );
        }
        self.creds.set_untrusted(false);
        readiness.set_ready();
    }

    /// Reports why the API server cannot call the webhook: in `/ready`, in a metric, and once per occurrence in the
    /// log.
    fn report_untrusted(&mut self, err: &BundleError, readiness: &CertificateReadiness) {
        let webhook = self.config.service;
        let text = ErrorChain(err).to_string();
        self.creds.set_untrusted(true);
        readiness.set_untrusted(self.config.unready_when_untrusted, || format!("{webhook}: {text}"));
        if self.reported_problem.as_ref() != Some(&text) {
            warn!(webhook, error = text, "the API server cannot call this webhook");
            self.reported_problem = Some(text);
        }
    }

    /// Computes the content of the Secret, and writes it if it differs.
    async fn update_secret(
        &mut self,
        secret: Option<Secret>,
        configuration: &DynamicObject,
    ) -> Result<SecretContent, Error> {
        let webhook = self.config.service;
        let name = self.config.server_name.clone();
        let stored = secret.as_ref().and_then(|secret| {
            let data = secret.data.clone().unwrap_or_default();
            SecretContent::from_data(&data, &name)
                .inspect_err(|err| {
                    warn!(
                        webhook,
                        error = err as &dyn std::error::Error,
                        "the content of the Secret is invalid"
                    )
                })
                .ok()
        });
        let published_for = stored.as_ref().and_then(|stored| {
            let (bundle, at) = self.published.as_ref()?;
            (*bundle == stored.bundle_pem()).then(|| at.elapsed())
        });
        let input = RotationInput {
            stored: stored.clone(),
            last_known: self.last_known.clone(),
            served: self.served.as_deref(),
            published_for,
            now: OffsetDateTime::now_utc(),
        };
        let state = SecretContent::rotate(input, &name, &self.config.times).map_err(Error::Certificate)?;
        let owner = self.owner(configuration);
        // A recreated owner has another uid, and Kubernetes would delete the Secret together with the old owner.
        let is_owned = secret
            .as_ref()
            .is_some_and(|secret| secret.owner_references().contains(&owner));
        if stored.as_ref() == Some(&state) && is_owned {
            return Ok(state);
        }
        info!(webhook, until = %state.current.not_after, has_next = state.next.is_some(), "writing a certificate");
        let written = match secret {
            Some(mut secret) => {
                secret.data = Some(state.to_data());
                secret.metadata.owner_references = Some(vec![owner]);
                secret.metadata.managed_fields = None;
                let params = PostParams::default();
                self.secrets.replace(self.config.secret, &params, &secret).await
            }
            None => {
                let secret = self.new_secret(&state, owner);
                let params = PatchParams::apply(&self.manager);
                self.secrets
                    .patch(self.config.secret, &params, &Patch::Apply(&secret))
                    .await
            }
        };
        let written = written.map_err(|source| Error::Secret {
            name: self.config.secret,
            source: Box::new(source),
        })?;
        self.secret = Some(Some(written));
        Ok(state)
    }

    fn owner(&self, configuration: &DynamicObject) -> OwnerReference {
        OwnerReference {
            api_version: self.configuration_kind.api_version.clone(),
            kind: self.configuration_kind.kind.clone(),
            name: configuration.name_any(),
            uid: configuration.uid().unwrap_or_default(),
            ..OwnerReference::default()
        }
    }

    fn new_secret(&self, state: &SecretContent, owner: OwnerReference) -> Secret {
        let namespace = &self.config.namespace;
        Secret {
            metadata: ObjectMeta {
                name: Some(self.config.secret.to_owned()),
                namespace: Some(namespace.clone()),
                labels: Some([(label::CONTROL_PLANE_NS.to_owned(), namespace.clone())].into()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            data: Some(state.to_data()),
            ..Secret::default()
        }
    }

    /// Publishes the bundle of the state, and records the time since which it is published.
    async fn publish_bundle(&mut self, state: &SecretContent, configuration: DynamicObject) -> Result<(), Error> {
        let bundle = state.bundle_pem();
        let wanted = json!(ByteString(bundle.clone().into_bytes()));
        let target = self.config.bundle_target;
        if target.has_bundle(&configuration, &wanted) {
            let since = match self.published.take() {
                Some((published, since)) if published == bundle => since,
                _ => Instant::now(),
            };
            self.published = Some((bundle, since));
            return Ok(());
        }
        self.published = None;
        let name = target.name();
        info!(
            webhook = self.config.service,
            configuration = name,
            "writing the CA bundle"
        );
        let patched = self
            .configurations
            .patch(
                name,
                &PatchParams::default(),
                &target.bundle_patch(&configuration, &wanted),
            )
            .await
            .map_err(|source| Error::Bundle {
                name,
                source: Box::new(source),
            })?;
        self.configuration = Some(Some(patched));
        self.published = Some((bundle, Instant::now()));
        Ok(())
    }

    /// Serves the current certificate once the API server trusts it. Returns the delay until the next call.
    ///
    /// | current certificate | served one | bundle with the current one | action |
    /// |---|---|---|---|
    /// | is served | | | none; wait until it is due, or until the next one is trusted |
    /// | is not served | none, or expired | | serve the current one |
    /// | is not served | valid | published for `settle_time` | serve the current one |
    /// | is not served | valid | published for less | wait |
    fn serve_certificate(&mut self, state: &SecretContent) -> Result<Duration, Error> {
        let now = OffsetDateTime::now_utc();
        let mut is_served = self.served.as_ref().is_some_and(|served| **served == *state.current);
        let served_is_valid = self.served.as_ref().is_some_and(|served| now < served.not_after);
        let published_for = self
            .published
            .as_ref()
            .map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let until_trusted = self.config.times.settle_time.saturating_sub(published_for);
        let until_due = Duration::try_from(state.due_at() - now)
            .unwrap_or(Duration::ZERO)
            .min(RESYNC_INTERVAL);
        if !is_served && (!served_is_valid || until_trusted.is_zero()) {
            self.creds.install(&state.current).map_err(Error::Install)?;
            self.served = Some(state.current.clone());
            info!(webhook = self.config.service, until = %state.current.not_after, "serving a certificate");
            is_served = true;
        }
        let wait = match is_served && state.next.is_none() {
            true => until_due,
            // The next certificate may have become trusted after `state` was computed. The next call serves it.
            false => until_trusted.min(until_due),
        };
        Ok(wait.max(MIN_REQUEUE_DELAY))
    }
}

impl CertificateReadiness {
    fn set_ready(&mut self) {
        self.latch.release();
        self.was_ready = true;
    }

    fn set_unready_until_first_trusted(&self, reason: impl FnOnce() -> String) {
        if !self.was_ready {
            self.latch.set_reason(reason());
        }
    }

    fn set_untrusted(&self, when: UnreadyWhenUntrusted, reason: impl FnOnce() -> String) {
        match when {
            UnreadyWhenUntrusted::UntilFirstTrusted => self.set_unready_until_first_trusted(reason),
            UnreadyWhenUntrusted::Always => self.latch.set_reason(reason()),
        }
    }
}

impl Error {
    /// Returns true for a 409 Conflict.
    fn is_conflict(&self) -> bool {
        match self {
            Self::Secret { source, .. } | Self::Bundle { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if status.code == 409)
            }
            Self::Certificate(_) | Self::ExternalSecret(_) | Self::Install(_) => false,
        }
    }
}

fn webhooks(configuration: &DynamicObject) -> impl Iterator<Item = &Value> {
    let webhooks = configuration.data.get("webhooks").and_then(Value::as_array);
    webhooks.into_iter().flatten()
}

/// Returns the object of a watch event: `Some(None)` if it does not exist, `None` after an error. The watch continues after
/// errors.
fn watched_object<T>(seen: Result<Option<T>, watcher::Error>, name: &str) -> Option<Option<T>> {
    seen.inspect_err(|err| warn!(name, error = err as &dyn std::error::Error, "watching failed"))
        .ok()
}

const RECONCILE_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(30),
    jitter: 0.5,
};
/// Maximum time between two reconciliations without a watch event.
const RESYNC_INTERVAL: Duration = Duration::from_secs(3600);
/// Minimum delay before the next reconciliation. It prevents a busy loop.
const MIN_REQUEUE_DELAY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use tokio::time::advance;
    use tulle_core::readiness::Readiness;

    use super::*;

    /// Returns a client whose requests get no response.
    fn silent_client() -> Client {
        let service =
            tower::service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
        Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn a_next_certificate_that_becomes_trusted_is_served_soon() {
        let config = Config::policy_validator("linkerd".to_owned());
        let (name, times) = (config.server_name.clone(), config.times);
        let rotate = |stored, now| {
            let input = RotationInput {
                stored,
                last_known: None,
                served: None,
                published_for: None,
                now,
            };
            SecretContent::rotate(input, &name, &times).unwrap()
        };
        let now = OffsetDateTime::now_utc();
        let state = rotate(Some(rotate(None, now)), now + times.lifetime * 3 / 4);
        assert!(state.next.is_some());
        let mut controller = CertificateController::new(silent_client(), config, Arc::new(ServerCredentials::new()));
        controller.published = Some((state.bundle_pem(), Instant::now()));
        let mut serve = || controller.serve_certificate(&state).unwrap();
        assert_eq!(serve(), times.settle_time, "the first call");
        advance(times.settle_time - Duration::from_secs(1)).await;
        assert_eq!(serve(), Duration::from_secs(1));
        // The certificate becomes trusted between the computation of `state` and this call.
        advance(Duration::from_secs(1)).await;
        assert_eq!(serve(), MIN_REQUEUE_DELAY);
    }

    #[test]
    fn a_process_that_proxies_need_stays_ready_after_it_was_ready() {
        for (when, expected) in [
            (UnreadyWhenUntrusted::UntilFirstTrusted, true),
            (UnreadyWhenUntrusted::Always, false),
        ] {
            let process = Readiness::new();
            let mut readiness = CertificateReadiness {
                latch: process.latch("webhook"),
                was_ready: false,
            };
            readiness.set_untrusted(when, || "no bundle".to_owned());
            assert_eq!(process.reasons(), ["no bundle"]);
            readiness.set_ready();
            assert!(process.is_ready());
            readiness.set_untrusted(when, || "another bundle".to_owned());
            assert_eq!(process.is_ready(), expected, "{when:?}");
            readiness.set_ready();
            assert!(process.is_ready());
        }
    }

    #[test]
    fn only_the_injector_becomes_unready_after_it_was_ready() {
        let unready_when_untrusted = [
            Config::proxy_injector,
            Config::policy_validator,
            Config::sp_validator,
            Config::telemetry,
        ]
        .map(|config| config("linkerd".to_owned()).unready_when_untrusted);
        let [injector, others @ ..] = unready_when_untrusted;
        assert_eq!(injector, UnreadyWhenUntrusted::Always);
        assert_eq!(others, [UnreadyWhenUntrusted::UntilFirstTrusted; 3]);
    }
}
