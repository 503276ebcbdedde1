//! Executes the steps of plans, and retries failed steps.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Endpoints, Namespace, Service};
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams, Preconditions};
use kube::{Client, Error, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::{Counter, Family};

use super::gateway::cluster_label;
use super::plan::inputs::{ObjectVersion, Plan, Step, Write};
use super::plan::objects::object_name;
use crate::resources::meta::NamespacedName;

pub(super) struct Writer {
    pub(super) client: Client,
    pub(super) errors: Family<Counter>,
    /// A step has one while it is executed. All writers of this process share them.
    pub(super) permits: Arc<Semaphore>,
}

/// The results of earlier writes.
#[derive(Default)]
pub(super) struct WriteHistory {
    /// The failed steps, by the local Service.
    failures: HashMap<NamespacedName, Failure>,
    /// For each federated Service, the resource version of the member whose ports and metadata were last copied to it.
    pub(super) source_versions: HashMap<NamespacedName, String>,
}

/// A step that has failed in all attempts since it was planned.
struct Failure {
    /// Empty while the step fails only because another writer has changed the object. The watch then reports the change, and the
    /// step is planned again.
    cause: String,
    n_attempts: u32,
    retry_at: Instant,
}

#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Api(#[from] Error),
    #[error("no response within {WRITE_TIMEOUT:?}")]
    Timeout,
}

impl Writer {
    /// Executes the steps of a plan. Returns the time at which the next failed step must be retried.
    pub(super) async fn execute(&self, cluster: &str, planned: &Plan, history: &mut WriteHistory) -> Option<Instant> {
        let now = Instant::now();
        let mut writes = Vec::new();
        for step in &planned.steps {
            let failure = history.failures.get(&step.name);
            if failure.is_none_or(|failure| failure.cause.is_empty() || failure.retry_at <= now) {
                writes.push(self.execute_step(step).map(move |result| (step, result)).boxed());
            }
        }
        let mut results = stream::iter(writes).buffer_unordered(MAX_CONCURRENT_STEPS);
        while let Some((step, result)) = results.next().await {
            match result {
                Ok(()) => {
                    history.failures.remove(&step.name);
                    if let Some(version) = &step.source_version {
                        history.source_versions.insert(step.name.clone(), version.clone());
                    }
                }
                Err(err) => self.record_failure(cluster, &step.name, &err, history),
            }
        }
        let is_planned = |name: &NamespacedName| planned.steps.iter().any(|step| step.name == *name);
        history.failures.retain(|name, _| is_planned(name));
        history.failures.values().map(|failure| failure.retry_at).min()
    }

    fn record_failure(&self, cluster: &str, name: &NamespacedName, err: &WriteError, history: &mut WriteHistory) {
        let failure = history.failures.entry(name.clone()).or_insert_with(|| Failure {
            cause: String::new(),
            n_attempts: 0,
            retry_at: Instant::now(),
        });
        let delay = MIN_RETRY_DELAY
            .saturating_mul(1 << failure.n_attempts.min(10))
            .min(MAX_RETRY_DELAY);
        failure.n_attempts += 1;
        failure.retry_at = Instant::now() + delay;
        let status = match err {
            WriteError::Api(Error::Api(status)) => Some(status),
            _ => None,
        };
        // Another writer has changed the object, and the watch will report the change. But if the object still exists after some
        // attempts to create it, this is a failure.
        let is_stale = status.is_some_and(|status| matches!(status.code, 404 | 409));
        let exists = status.is_some_and(|status| status.reason == "AlreadyExists");
        if is_stale && !(exists && failure.n_attempts >= MAX_STALE_ATTEMPTS) {
            failure.retry_at = Instant::now() + MIN_RETRY_DELAY;
            return;
        }
        let reason = status.map_or("Unreachable", |status| &status.reason);
        self.errors.get(&cluster_label(cluster).with("reason", reason)).inc();
        let cause = ErrorChain(err).to_string();
        if failure.cause != cause {
            warn!(cluster, service = %name, "not mirrored: {cause}");
        }
        failure.cause = cause;
    }

    async fn execute_step(&self, step: &Step) -> Result<(), WriteError> {
        // Without this limit, the steps of one Link could delay those of all others until they time out. The semaphore is never
        // closed.
        let _permit = self.permits.acquire().await;
        for write in &step.writes {
            // The timeout limits the time for which a slow admission webhook delays other steps.
            let written = timeout(WRITE_TIMEOUT, self.execute_write(write)).await;
            written.map_err(|_| WriteError::Timeout)??;
        }
        Ok(())
    }

    async fn execute_write(&self, write: &Write) -> Result<(), Error> {
        match write {
            Write::CreateNamespace(namespace) => {
                let api = Api::<Namespace>::all(self.client.clone());
                api.create(&PostParams::default(), namespace).await?;
                info!(namespace = namespace.name_any(), "created a namespace for mirrors");
                Ok(())
            }
            Write::PutService(service) => self.put(&**service).await,
            Write::PutEndpoints(endpoints) => self.put_endpoints(endpoints).await,
            Write::DeleteService(known) => {
                self.delete::<Service>(known).await?;
                info!(service = %known.name, "deleted a mirror or federated Service");
                Ok(())
            }
            Write::DeleteEndpoints(known) => self.delete::<Endpoints>(known).await,
        }
    }

    async fn put_endpoints(&self, endpoints: &Endpoints) -> Result<(), Error> {
        match self.put(endpoints).await {
            Err(Error::Api(status)) if status.reason == "AlreadyExists" => {
                // Only Endpoints with the labels of mirrors are watched. The Service is a mirror, so its Endpoints are replaced.
                let name = object_name(&endpoints.metadata);
                let api = Api::<Endpoints>::namespaced(self.client.clone(), &name.namespace);
                let mut endpoints = endpoints.clone();
                endpoints.metadata.resource_version = api.get(&name.name).await?.metadata.resource_version;
                self.put(&endpoints).await
            }
            result => result,
        }
    }

    /// Replaces the object if it has a resource version, otherwise creates it.
    async fn put<K>(&self, object: &K) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + k8s_openapi::Metadata<Ty = ObjectMeta>,
        K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
    {
        let params = PostParams::default();
        let name = object_name(Resource::meta(object));
        let api = Api::<K>::namespaced(self.client.clone(), &name.namespace);
        match Resource::meta(object).resource_version {
            Some(_) => api.replace(&name.name, &params, object).await.map(drop),
            None => api.create(&params, object).await.map(drop),
        }
    }

    async fn delete<K>(&self, known: &ObjectVersion) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + std::fmt::Debug + DeserializeOwned,
    {
        let api = Api::<K>::namespaced(self.client.clone(), &known.name.namespace);
        let params = DeleteParams::default().preconditions(Preconditions {
            uid: known.uid.clone(),
            resource_version: known.resource_version.clone(),
        });
        match api.delete(&known.name.name, &params).await {
            // The object is already deleted.
            Err(Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(drop),
        }
    }
}

impl WriteHistory {
    /// The cause why the local Service could not be written. `None` if no step has failed, or only because of another writer.
    pub(super) fn cause_of_failure(&self, name: &NamespacedName) -> Option<&str> {
        let failure = self.failures.get(name)?;
        Some(&*failure.cause).filter(|cause| !cause.is_empty())
    }
}

const MIN_RETRY_DELAY: Duration = Duration::from_millis(500);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of attempts to create an object that already exists, after which this counts as a failure.
const MAX_STALE_ATTEMPTS: u32 = 5;
/// Maximum number of steps that one process executes at a time, for all Links.
pub(super) const MAX_CONCURRENT_STEPS: usize = 16;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use kube::client::Body;
    use tulle_core::metrics::Registry;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_writers_of_all_links_send_a_limited_number_of_requests_at_a_time() {
        let n_requests = Arc::new(AtomicUsize::new(0));
        let n_sent = n_requests.clone();
        let api = tower::service_fn(move |_: Request<Body>| {
            n_sent.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<Result<Response<Body>, Infallible>>()
        });
        let writer = Writer {
            client: Client::new(api, "default"),
            errors: Registry::new().counter("errors", "Errors."),
            permits: Arc::new(Semaphore::new(MAX_CONCURRENT_STEPS)),
        };
        let steps = (0..MAX_CONCURRENT_STEPS).map(|n| {
            let name = NamespacedName::new("shop", format!("web-{n}"));
            let known = ObjectVersion {
                name: name.clone(),
                uid: None,
                resource_version: None,
            };
            Step {
                name,
                writes: vec![Write::DeleteService(known)],
                source_version: None,
            }
        });
        let plan = Plan {
            steps: steps.collect(),
            ..Plan::default()
        };
        let (mut first, mut second) = (WriteHistory::default(), WriteHistory::default());
        let both = async {
            tokio::join!(
                writer.execute("east", &plan, &mut first),
                writer.execute("north", &plan, &mut second),
            )
        };
        // No request gets a response, and the next ones are sent when these have timed out.
        assert!(timeout(WRITE_TIMEOUT / 2, both).await.is_err());
        assert_eq!(n_requests.load(Ordering::Relaxed), MAX_CONCURRENT_STEPS);
    }
}
