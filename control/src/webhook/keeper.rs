//! Keeps a webhook's certificate in a Secret, and the bundle of its webhook configuration in step; and those of an
//! aggregated API, whose APIService takes the place of the configuration.
//!
//! All replicas do the same, without a leader: a Secret is written only over the version that was read,
//! and whoever comes second starts again from what the first wrote.
//! The Secret belongs to the webhook configuration, so that it goes with it; without a configuration nothing is
//! written, because nobody calls.
//! A Secret that does not belong to it is somebody else's: it is shown as it is, and so is one that cert-manager feeds;
//! their bundles are not ours either, and the process is ready when the API server's bundle leads to what is shown.
//! Where it stops leading there, a metric and the log say so, and the injector, which has a pod of its own, is not ready any more.
//!
//! Permissions: Secrets in the namespace of the control plane by name `create`, `patch`, `list`, `watch`, `update`: they
//! are made by a server-side apply, as a POST that creates cannot be permitted by name;
//! `mutatingwebhookconfigurations`, `validatingwebhookconfigurations` or `apiservices` by name `list`, `watch`, `patch`.

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
use tulle_core::due::Due;
use tulle_core::names::{label, telemetry::API_SERVICE};
use tulle_core::ready::Latch;

use super::certificate::{self, Pair};
use super::creds::Creds;
use super::rotation::{Situation, State, Times};
use crate::tls::anchors::{self, TrustAnchors};

/// Whose certificate is kept, and where.
#[derive(Clone, Debug)]
pub struct Config {
    pub namespace: String,
    /// The Service of the webhook.
    pub service: &'static str,
    /// The name that the API server calls, and that the certificate is for.
    pub server_name: String,
    pub secret: &'static str,
    pub configuration: Configuration,
    pub not_ready: NotReady,
    pub times: Times,
}

/// When the process is not ready because the API server would not take the certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// Until the API server takes one; later proxies need this process, whether the API server can call it or not.
    UntilFirst,
    /// At any time: nobody but the API server needs this process.
    Whenever,
}

/// Which webhook configuration calls this webhook, or which APIService this API.
#[derive(Clone, Copy, Debug)]
pub enum Configuration {
    Mutating(&'static str),
    Validating(&'static str),
    ApiService(&'static str),
}

/// Keeps the certificate of one webhook.
pub struct Keeper {
    config: Config,
    creds: Arc<Creds>,
    secrets: Api<Secret>,
    configurations: Api<DynamicObject>,
    kind: ApiResource,
    /// `None` until it was looked for, `Some(None)` while it is not there.
    secret: Option<Option<Secret>>,
    configuration: Option<Option<DynamicObject>>,
    held: Option<State>,
    shown: Option<Arc<Pair>>,
    /// Since when the API server has had which bundle.
    published: Option<(String, Instant)>,
    /// Who makes the Secret, as the API server tells writers apart: no two replicas make it at once.
    manager: String,
    /// What was told last of a certificate that is given.
    problem: Option<String>,
}

/// Readiness, as far as one certificate decides about it.
struct Gate {
    latch: Latch,
    was_open: bool,
}

/// Why the API server would not take a certificate that is given.
#[derive(Debug, thiserror::Error)]
enum Untrusted {
    #[error("{configuration} has no CA bundle, and Secret {secret} is not ours to publish")]
    NoBundle {
        configuration: &'static str,
        secret: &'static str,
    },
    #[error("the CA bundle of {configuration} is not usable")]
    Bundle {
        configuration: &'static str,
        #[source]
        source: anchors::Error,
    },
    #[error("the certificate in Secret {secret} does not lead to the CA bundle of {configuration}")]
    Chain {
        configuration: &'static str,
        secret: &'static str,
        #[source]
        source: rustls::Error,
    },
    #[error("Secret {secret} is not there, and is kept by whoever feeds {configuration}")]
    NoSecret {
        configuration: &'static str,
        secret: &'static str,
    },
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("making the certificate")]
    Certificate(#[source] certificate::Error),
    #[error("the Secret is not usable; expected tls.crt and tls.key, PEM, from whoever keeps it")]
    Given(#[source] certificate::Error),
    #[error("installing the certificate")]
    Install(#[source] rustls::Error),
    #[error("writing Secret {name}")]
    Secret {
        name: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("writing the bundle of {name}")]
    Bundle {
        name: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
}

impl Config {
    /// The certificate of the proxy injector.
    pub fn proxy_injector(namespace: String) -> Self {
        let configuration = Configuration::Mutating("linkerd-proxy-injector-webhook-config");
        Self {
            not_ready: NotReady::Whenever,
            ..Self::new(
                namespace,
                "linkerd-proxy-injector",
                "linkerd-proxy-injector-k8s-tls",
                configuration,
            )
        }
    }

    /// The certificate of the ServiceProfile validator.
    pub fn sp_validator(namespace: String) -> Self {
        let configuration = Configuration::Validating("linkerd-sp-validator-webhook-config");
        Self::new(
            namespace,
            "linkerd-sp-validator",
            "linkerd-sp-validator-k8s-tls",
            configuration,
        )
    }

    /// The certificate of the policy validator.
    pub fn policy_validator(namespace: String) -> Self {
        let configuration = Configuration::Validating("linkerd-policy-validator-webhook-config");
        Self::new(
            namespace,
            "linkerd-policy-validator",
            "linkerd-policy-validator-k8s-tls",
            configuration,
        )
    }

    /// The certificate of the telemetry API.
    pub fn telemetry(namespace: String) -> Self {
        let configuration = Configuration::ApiService(API_SERVICE);
        Self::new(
            namespace,
            "linkerd-telemetry",
            "linkerd-telemetry-k8s-tls",
            configuration,
        )
    }

    fn new(namespace: String, service: &'static str, secret: &'static str, configuration: Configuration) -> Self {
        Self {
            server_name: format!("{service}.{namespace}.svc"),
            namespace,
            service,
            secret,
            configuration,
            not_ready: NotReady::UntilFirst,
            times: Times::default(),
        }
    }
}

impl Configuration {
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

    /// The bundles by which the API server verifies us, one for each caller, as far as it does.
    fn bundles(self, object: &DynamicObject) -> Vec<Vec<u8>> {
        let bundle = |of: Option<&Value>| {
            let bytes = of.and_then(|bundle| serde_json::from_value::<ByteString>(bundle.clone()).ok());
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

    /// Whether the API server trusts exactly this bundle.
    fn has(self, object: &DynamicObject, bundle: &Value) -> bool {
        match self {
            Self::ApiService(_) => object.data.pointer("/spec/caBundle") == Some(bundle),
            Self::Mutating(_) | Self::Validating(_) => {
                webhooks(object).all(|webhook| webhook.pointer("/clientConfig/caBundle") == Some(bundle))
            }
        }
    }

    /// What makes the API server trust this bundle, and the version makes sure that it is applied to what we saw.
    fn patch(self, object: &DynamicObject, bundle: &Value) -> Patch<Value> {
        let metadata = json!({"resourceVersion": object.resource_version()});
        match self {
            Self::ApiService(_) => Patch::Merge(json!({"metadata": metadata, "spec": {"caBundle": bundle}})),
            Self::Mutating(_) | Self::Validating(_) => {
                // Lists are merged by the names of webhooks.
                let webhooks: Vec<Value> = webhooks(object)
                    .map(|webhook| json!({"name": webhook.get("name"), "clientConfig": {"caBundle": bundle}}))
                    .collect();
                Patch::Strategic(json!({"metadata": metadata, "webhooks": webhooks}))
            }
        }
    }
}

impl Keeper {
    pub fn new(client: Client, config: Config, creds: Arc<Creds>) -> Self {
        let kind = config.configuration.kind();
        Self {
            secrets: Api::namespaced(client.clone(), &config.namespace),
            configurations: Api::all_with(client, &kind),
            kind,
            config,
            creds,
            secret: None,
            configuration: None,
            held: None,
            shown: None,
            published: None,
            manager: format!("tulle-control-{:016x}", fastrand::u64(..)),
            problem: None,
        }
    }

    /// Keeps it until the drain; the latch is released when the API server can call, or nobody wants it to.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut gate = Gate { latch, was_open: false };
        let mut retries = RETRIES.steps();
        let secrets = watch_object(self.secrets.clone(), self.config.secret);
        let mut secrets = pin!(secrets.default_backoff());
        let name = self.config.configuration.name();
        let configurations = watch_object(self.configurations.clone(), name);
        let mut configurations = pin!(configurations.default_backoff());
        loop {
            let wait = match self.reconcile(&mut gate).await {
                Ok(wait) => {
                    retries.reset();
                    wait
                }
                Err(err) => {
                    let webhook = self.config.service;
                    // Another replica wrote first; the watch brings what it wrote.
                    match err.is_conflict() {
                        true => debug!(webhook, "another replica was first"),
                        false => warn!(
                            webhook,
                            error = &err as &dyn std::error::Error,
                            "keeping a certificate failed"
                        ),
                    }
                    // What was shown before stays.
                    gate.close(NotReady::UntilFirst, || {
                        format!("{webhook}: {}", super::with_causes(&err))
                    });
                    retries.next_delay()
                }
            };
            let due = Due::after(wait, SystemTime::now);
            // All branches only wait, and a stream that is not polled to its end loses nothing.
            tokio::select! {
                () = drain.signaled() => return,
                Some(seen) = secrets.next() => update(&mut self.secret, seen, self.config.secret),
                Some(seen) = configurations.next() => update(&mut self.configuration, seen, name),
                () = due.wait() => {}
            }
        }
    }

    /// Brings Secret, bundle and what is shown in line, as far as possible now; returns when to look again.
    async fn reconcile(&mut self, gate: &mut Gate) -> Result<Duration, Error> {
        let (Some(secret), Some(configuration)) = (self.secret.clone(), self.configuration.clone()) else {
            return Ok(IDLE);
        };
        let Some(configuration) = configuration else {
            self.settled(gate);
            return Ok(IDLE);
        };
        if self.is_given(secret.as_ref(), &configuration) {
            if let Some(secret) = &secret {
                self.show_given(secret)?;
            }
            match self.check_given(secret.as_ref(), &configuration) {
                Ok(()) => self.settled(gate),
                Err(err) => self.tell(&err, gate),
            }
            return Ok(IDLE);
        }
        let state = self.store(secret, &configuration).await?;
        self.publish(&state, configuration).await?;
        let wait = self.show(&state)?;
        self.settled(gate);
        self.held = Some(state);
        Ok(wait)
    }

    /// Whether the certificate is none of our making.
    fn is_given(&self, secret: Option<&Secret>, configuration: &DynamicObject) -> bool {
        let is_fed = |key: &String| key.starts_with("cert-manager.io/inject-ca-from");
        let is_foreign = |secret: &Secret| !secret.owner_references().iter().any(|owner| self.is_owner(owner));
        configuration.annotations().keys().any(is_fed) || secret.is_some_and(is_foreign)
    }

    fn is_owner(&self, owner: &OwnerReference) -> bool {
        owner.kind == self.kind.kind && owner.name == self.config.configuration.name()
    }

    /// Shows a certificate that somebody else keeps.
    fn show_given(&mut self, secret: &Secret) -> Result<(), Error> {
        let entry = |key: &str| {
            let bytes = secret.data.as_ref().and_then(|data| data.get(key));
            bytes.map(|bytes| bytes.0.as_slice()).unwrap_or_default()
        };
        let pair = Pair::parse(entry("tls.crt"), entry("tls.key")).map_err(Error::Given)?;
        if self.shown.as_ref().is_some_and(|shown| **shown == pair) {
            return Ok(());
        }
        self.creds.install(&pair).map_err(Error::Install)?;
        info!(webhook = self.config.service, until = %pair.not_after, "showing a certificate that is given");
        self.shown = Some(Arc::new(pair));
        Ok(())
    }

    /// Whether the API server takes what is shown of a certificate that somebody else keeps.
    fn check_given(&self, secret: Option<&Secret>, object: &DynamicObject) -> Result<(), Untrusted> {
        let (configuration, name) = (self.config.configuration.name(), self.config.secret);
        let (Some(_), Some(shown)) = (secret, &self.shown) else {
            return Err(Untrusted::NoSecret {
                configuration,
                secret: name,
            });
        };
        for bundle in self.config.configuration.bundles(object) {
            if bundle.is_empty() {
                return Err(Untrusted::NoBundle {
                    configuration,
                    secret: name,
                });
            }
            let bundle = TrustAnchors::parse(&bundle, Path::new("caBundle"))
                .map_err(|source| Untrusted::Bundle { configuration, source })?;
            shown
                .verify(&bundle, &self.config.server_name)
                .map_err(|source| Untrusted::Chain {
                    configuration,
                    secret: name,
                    source,
                })?;
        }
        Ok(())
    }

    /// The API server can call, or nobody wants it to.
    fn settled(&mut self, gate: &mut Gate) {
        if self.problem.take().is_some() {
            info!(
                webhook = self.config.service,
                "nothing keeps the API server from calling us"
            );
        }
        self.creds.set_refused(false);
        gate.open();
    }

    /// Says why the API server cannot call: in `/ready`, by a metric, and in the log, there once for each time that it begins.
    fn tell(&mut self, err: &Untrusted, gate: &Gate) {
        let webhook = self.config.service;
        let text = super::with_causes(err);
        self.creds.set_refused(true);
        gate.close(self.config.not_ready, || format!("{webhook}: {text}"));
        if self.problem.as_ref() != Some(&text) {
            warn!(webhook, error = text, "the API server cannot call us");
            self.problem = Some(text);
        }
    }

    /// Decides what the Secret should hold, and writes it if it holds something else.
    async fn store(&mut self, secret: Option<Secret>, configuration: &DynamicObject) -> Result<State, Error> {
        let webhook = self.config.service;
        let name = self.config.server_name.clone();
        let stored = secret.as_ref().and_then(|secret| {
            let data = secret.data.clone().unwrap_or_default();
            State::from_data(&data, &name)
                .inspect_err(|err| {
                    warn!(
                        webhook,
                        error = err as &dyn std::error::Error,
                        "the Secret is not usable"
                    )
                })
                .ok()
        });
        let published_for = stored.as_ref().and_then(|stored| {
            let (bundle, at) = self.published.as_ref()?;
            (*bundle == stored.bundle_pem()).then(|| at.elapsed())
        });
        let situation = Situation {
            stored: stored.clone(),
            held: self.held.clone(),
            shown: self.shown.as_deref(),
            published_for,
            now: OffsetDateTime::now_utc(),
        };
        let state = State::decide(situation, &name, &self.config.times).map_err(Error::Certificate)?;
        let owner = self.owner(configuration);
        // An owner that was made anew has another uid, and the Secret would be collected with the old one.
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
            api_version: self.kind.api_version.clone(),
            kind: self.kind.kind.clone(),
            name: configuration.name_any(),
            uid: configuration.uid().unwrap_or_default(),
            ..OwnerReference::default()
        }
    }

    fn new_secret(&self, state: &State, owner: OwnerReference) -> Secret {
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

    /// Makes the API server trust what the state says, and remembers since when.
    async fn publish(&mut self, state: &State, configuration: DynamicObject) -> Result<(), Error> {
        let bundle = state.bundle_pem();
        let wanted = json!(ByteString(bundle.clone().into_bytes()));
        let caller = self.config.configuration;
        if caller.has(&configuration, &wanted) {
            let since = match self.published.take() {
                Some((published, since)) if published == bundle => since,
                _ => Instant::now(),
            };
            self.published = Some((bundle, since));
            return Ok(());
        }
        self.published = None;
        let name = caller.name();
        info!(
            webhook = self.config.service,
            configuration = name,
            "writing the bundle"
        );
        let patched = self
            .configurations
            .patch(name, &PatchParams::default(), &caller.patch(&configuration, &wanted))
            .await
            .map_err(|source| Error::Bundle {
                name,
                source: Box::new(source),
            })?;
        self.configuration = Some(Some(patched));
        self.published = Some((bundle, Instant::now()));
        Ok(())
    }

    /// Shows the certificate of the state as soon as the API server trusts it; returns when to look again.
    fn show(&mut self, state: &State) -> Result<Duration, Error> {
        let now = OffsetDateTime::now_utc();
        let is_shown = self.shown.as_ref().is_some_and(|shown| **shown == *state.current);
        let is_good = self.shown.as_ref().is_some_and(|shown| now < shown.not_after);
        let known_for = self
            .published
            .as_ref()
            .map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let unsettled = self.config.times.settle.saturating_sub(known_for);
        let due = Duration::try_from(state.due_at() - now)
            .unwrap_or(Duration::ZERO)
            .min(IDLE);
        if !is_shown && (!is_good || unsettled.is_zero()) {
            self.creds.install(&state.current).map_err(Error::Install)?;
            self.shown = Some(state.current.clone());
            info!(webhook = self.config.service, until = %state.current.not_after, "showing a certificate");
        } else if !is_shown || (state.next.is_some() && !unsettled.is_zero()) {
            return Ok(unsettled.min(due).max(SOON));
        }
        Ok(due.max(SOON))
    }
}

impl Gate {
    fn open(&mut self) {
        self.latch.release();
        self.was_open = true;
    }

    fn close(&self, when: NotReady, why: impl FnOnce() -> String) {
        if !self.was_open || when == NotReady::Whenever {
            self.latch.explain(why());
        }
    }
}

impl Error {
    /// Whether somebody else wrote in between.
    fn is_conflict(&self) -> bool {
        match self {
            Self::Secret { source, .. } | Self::Bundle { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if status.code == 409)
            }
            Self::Certificate(_) | Self::Given(_) | Self::Install(_) => false,
        }
    }
}

fn webhooks(configuration: &DynamicObject) -> impl Iterator<Item = &Value> {
    let webhooks = configuration.data.get("webhooks").and_then(Value::as_array);
    webhooks.into_iter().flatten()
}

/// Takes what a watch saw; a watch that fails goes on by itself, and what was known stays.
fn update<T>(known: &mut Option<Option<T>>, seen: Result<Option<T>, watcher::Error>, name: &str) {
    match seen {
        Ok(seen) => *known = Some(seen),
        Err(err) => warn!(name, error = &err as &dyn std::error::Error, "watching failed"),
    }
}

const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(30),
    jitter: 0.5,
};
/// Everything is looked at anew this often at the latest, although watches report changes.
const IDLE: Duration = Duration::from_secs(3600);
/// A time that is due already is looked at this much later, so that no mistake spins.
const SOON: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use tulle_core::ready::Readiness;

    use super::*;

    #[test]
    fn a_process_that_proxies_need_stays_ready_once_it_was() {
        for (when, expected) in [(NotReady::UntilFirst, true), (NotReady::Whenever, false)] {
            let readiness = Readiness::new();
            let mut gate = Gate {
                latch: readiness.latch("webhook"),
                was_open: false,
            };
            gate.close(when, || "no bundle".to_owned());
            assert_eq!(readiness.reasons(), ["no bundle"]);
            gate.open();
            assert!(readiness.is_ready());
            gate.close(when, || "another bundle".to_owned());
            assert_eq!(readiness.is_ready(), expected, "{when:?}");
            gate.open();
            assert!(readiness.is_ready());
        }
    }

    #[test]
    fn of_all_webhooks_the_injector_alone_has_a_process_that_nobody_else_needs() {
        let not_ready = [
            Config::proxy_injector,
            Config::policy_validator,
            Config::sp_validator,
            Config::telemetry,
        ]
        .map(|config| config("linkerd".to_owned()).not_ready);
        let [injector, others @ ..] = not_ready;
        assert_eq!(injector, NotReady::Whenever);
        assert_eq!(others, [NotReady::UntilFirst; 3]);
    }
}
