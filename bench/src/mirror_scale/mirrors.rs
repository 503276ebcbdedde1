//! The mirrors, as watches of the API server show them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

use super::objects::{Change, IN_NAMESPACE, OTHER_PORT, mirrored_service};
use crate::scale::ApiClient;

/// The watches of the mirrors.
pub(super) struct Mirrors {
    changes: stream::BoxStream<'static, anyhow::Result<MirrorChange>>,
}

/// A mirror was created or has changed.
enum MirrorChange {
    Service { n: usize, port: u64 },
    Endpoints { n: usize, is_empty: bool },
}

impl Mirrors {
    pub(super) async fn follow(local: &ApiClient) -> anyhow::Result<Self> {
        let services = watch(local, "services").await?.map_ok(|object| {
            let port = object["spec"]["ports"][0]["port"].as_u64()?;
            Some(MirrorChange::Service {
                n: service_number(&object)?,
                port,
            })
        });
        let endpoints = watch(local, "endpoints").await?.map_ok(|object| {
            let addresses = object["subsets"][0]["addresses"].as_array();
            let is_empty = addresses.is_none_or(Vec::is_empty);
            Some(MirrorChange::Endpoints {
                n: service_number(&object)?,
                is_empty,
            })
        });
        let changes = stream::select(services, endpoints).try_filter_map(|change| std::future::ready(Ok(change)));
        Ok(Self {
            changes: changes.boxed(),
        })
    }

    /// Waits until `n_services` Services have a mirror with an endpoint.
    pub(super) async fn wait_for_all(&mut self, n_services: usize, deadline: Instant) -> anyhow::Result<()> {
        let (mut services, mut with_endpoints) = (HashSet::new(), HashSet::new());
        while services.len() < n_services || with_endpoints.len() < n_services {
            match self.next(deadline).await.with_context(|| {
                format!(
                    "{} Services and {} Endpoints are mirrored",
                    services.len(),
                    with_endpoints.len()
                )
            })? {
                MirrorChange::Service { n, .. } => services.insert(n),
                MirrorChange::Endpoints { n, is_empty: false } => with_endpoints.insert(n),
                MirrorChange::Endpoints { n, is_empty: true } => with_endpoints.remove(&n),
            };
        }
        Ok(())
    }

    /// Waits until `n_changes` changes have arrived in the mirrors. Returns when each was seen first.
    pub(super) async fn observe_changes(&mut self, n_changes: usize) -> anyhow::Result<HashMap<Change, Instant>> {
        let mut observed = HashMap::new();
        let mut deadline = Instant::now() + CHANGE_TIMEOUT;
        while observed.len() < n_changes {
            let change = self.next(deadline).await;
            match change.with_context(|| format!("{} of {n_changes} changes are mirrored", observed.len()))? {
                MirrorChange::Service { n, port: OTHER_PORT } | MirrorChange::Endpoints { n, is_empty: true } => {
                    let now = Instant::now();
                    observed.entry(Change(n)).or_insert(now);
                    deadline = now + CHANGE_TIMEOUT;
                }
                MirrorChange::Service { .. } | MirrorChange::Endpoints { .. } => {}
            }
        }
        Ok(observed)
    }

    /// Waits for this time.
    ///
    /// # Errors
    /// A mirror changes meanwhile, although no exported Service does.
    pub(super) async fn ensure_unchanged(&mut self, time: Duration) -> anyhow::Result<()> {
        match timeout(time, self.changes.try_next()).await {
            Err(_) => Ok(()),
            Ok(change) => {
                change?.context("a watch has ended")?;
                bail!("a mirror has changed without a change of its Service");
            }
        }
    }

    async fn next(&mut self, deadline: Instant) -> anyhow::Result<MirrorChange> {
        match timeout_at(deadline, self.changes.try_next()).await {
            Ok(change) => change?.context("a watch has ended"),
            Err(_) => bail!("no further change has arrived in time"),
        }
    }
}

/// Watches the objects of this kind in the namespace `scale`: first those that exist, then changes.
async fn watch(
    client: &ApiClient,
    plural: &str,
) -> anyhow::Result<impl Stream<Item = anyhow::Result<Value>> + Send + use<>> {
    let what = format!("watching {plural}");
    let lines = client.watch(&format!("{IN_NAMESPACE}/{plural}")).await?;
    Ok(lines.map(move |line| {
        let mut event: Value = serde_json::from_str(&line.context(what.clone())?).context(what.clone())?;
        ensure!(event["type"] != "ERROR", "{what}: {event}");
        Ok(event["object"].take())
    }))
}

fn service_number(object: &Value) -> Option<usize> {
    mirrored_service(object["metadata"]["name"].as_str()?)
}

/// Maximum time between two changes of mirrors.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
