//! The mirrors: their Services and endpoints, as watches of the API server or streams of the destination service show them.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

use super::objects::{Change, IN_NAMESPACE, OTHER_PORT, mirrored_service};
use crate::scale::ApiClient;

/// The mirrors that exist, and their changes.
pub(super) struct Mirrors {
    changes: BoxStream<'static, anyhow::Result<MirrorChange>>,
    services: HashSet<usize>,
    /// The number of endpoints of a complete mirror.
    n_endpoints: usize,
    complete: HashSet<usize>,
}

/// The mirror of the n-th Service was created or has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MirrorChange {
    Service { n: usize, port: u64 },
    Endpoints { n: usize, n_endpoints: usize },
}

impl MirrorChange {
    /// The change of the exported Service that has arrived, if any. After a change of the port, no endpoints are no sign of a change:
    /// a stream can remove the endpoints of the old port before it adds those of the new one.
    fn arrived_change(self) -> Option<Change> {
        match self {
            Self::Service { n, port: OTHER_PORT } => Some(Change(n)).filter(|change| !change.empties_endpoints()),
            Self::Endpoints { n, n_endpoints: 0 } => Some(Change(n)).filter(|change| change.empties_endpoints()),
            Self::Service { .. } | Self::Endpoints { .. } => None,
        }
    }
}

impl Mirrors {
    /// Follows the Services of the mirrors. A mirror is complete if it has this number of endpoints.
    pub(super) async fn follow_services(local: &ApiClient, n_endpoints: usize) -> anyhow::Result<Self> {
        let services = watch(local, "services", |object| {
            let port = object["spec"]["ports"][0]["port"].as_u64()?;
            let n = service_number(object)?;
            Some(MirrorChange::Service { n, port })
        });
        Ok(Self {
            changes: services.await?,
            services: HashSet::new(),
            n_endpoints,
            complete: HashSet::new(),
        })
    }

    /// Follows the Services and the Endpoints of the mirrors. A mirror is complete if it has the address of the gateway.
    pub(super) async fn follow_with_endpoints(local: &ApiClient) -> anyhow::Result<Self> {
        let mut mirrors = Self::follow_services(local, 1).await?;
        let endpoints = watch(local, "endpoints", |object| {
            let addresses = object["subsets"][0]["addresses"].as_array();
            let n = service_number(object)?;
            let n_endpoints = addresses.map_or(0, Vec::len);
            Some(MirrorChange::Endpoints { n, n_endpoints })
        });
        mirrors.follow(endpoints.await?);
        Ok(mirrors)
    }

    /// Follows other changes, too.
    pub(super) fn follow(&mut self, changes: impl Stream<Item = anyhow::Result<MirrorChange>> + Send + 'static) {
        let followed = mem::replace(&mut self.changes, stream::empty().boxed());
        self.changes = stream::select(followed, changes).boxed();
    }

    /// Waits until `n_services` Services have a mirror.
    pub(super) async fn wait_for_services(&mut self, n_services: usize, deadline: Instant) -> anyhow::Result<()> {
        while self.services.len() < n_services {
            let change = self.next(deadline).await;
            change.with_context(|| format!("{} of {n_services} Services are mirrored", self.services.len()))?;
        }
        Ok(())
    }

    /// Waits until the mirrors of `n_services` Services have all their endpoints.
    pub(super) async fn wait_for_endpoints(&mut self, n_services: usize, deadline: Instant) -> anyhow::Result<()> {
        while self.complete.len() < n_services {
            let change = self.next(deadline).await;
            change.with_context(|| format!("{} of {n_services} mirrors have their endpoints", self.complete.len()))?;
        }
        Ok(())
    }

    /// Waits until `n_changes` changes have arrived in the mirrors. Returns when each was seen first.
    pub(super) async fn observe_changes(&mut self, n_changes: usize) -> anyhow::Result<HashMap<Change, Instant>> {
        let mut observed = HashMap::new();
        let mut deadline = Instant::now() + CHANGE_TIMEOUT;
        while observed.len() < n_changes {
            let change = self.next(deadline).await;
            let change = change.with_context(|| format!("{} of {n_changes} changes are mirrored", observed.len()))?;
            if let Some(change) = change.arrived_change() {
                let now = Instant::now();
                observed.entry(change).or_insert(now);
                deadline = now + CHANGE_TIMEOUT;
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
        let change = match timeout_at(deadline, self.changes.try_next()).await {
            Ok(change) => change?.context("a watch has ended")?,
            Err(_) => bail!("no further change has arrived in time"),
        };
        match change {
            MirrorChange::Service { n, .. } => self.services.insert(n),
            MirrorChange::Endpoints { n, n_endpoints } if n_endpoints >= self.n_endpoints => self.complete.insert(n),
            MirrorChange::Endpoints { n, .. } => self.complete.remove(&n),
        };
        Ok(change)
    }
}

/// Watches the objects of this kind in the namespace `scale`: first those that exist, then changes.
async fn watch(
    client: &ApiClient,
    plural: &str,
    parse: fn(&Value) -> Option<MirrorChange>,
) -> anyhow::Result<BoxStream<'static, anyhow::Result<MirrorChange>>> {
    let what = format!("watching {plural}");
    let lines = client.watch(&format!("{IN_NAMESPACE}/{plural}")).await?;
    let changes = lines.map(move |line| {
        let event: Value = serde_json::from_str(&line.context(what.clone())?).context(what.clone())?;
        ensure!(event["type"] != "ERROR", "{what}: {event}");
        anyhow::Ok(parse(&event["object"]))
    });
    let mirror_changes = changes.try_filter_map(|change| std::future::ready(Ok(change)));
    Ok(mirror_changes.boxed())
}

fn service_number(object: &Value) -> Option<usize> {
    mirrored_service(object["metadata"]["name"].as_str()?)
}

/// Maximum time between two changes of mirrors.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_arrived_where_its_kind_is_visible() {
        let service = |n, port| MirrorChange::Service { n, port };
        let endpoints = |n, n_endpoints| MirrorChange::Endpoints { n, n_endpoints };
        for (seen, arrived) in [
            (service(4, 81), Some(Change(4))),
            (service(4, 80), None),
            (service(5, 81), None),
            (endpoints(5, 0), Some(Change(5))),
            (endpoints(5, 10), None),
            (endpoints(4, 0), None),
        ] {
            assert_eq!(seen.arrived_change(), arrived, "{seen:?}");
        }
    }

    #[tokio::test]
    async fn a_mirror_is_complete_while_it_has_all_its_endpoints() {
        let endpoints = |n, n_endpoints| Ok(MirrorChange::Endpoints { n, n_endpoints });
        for (changes, n_complete) in [
            (vec![endpoints(0, 2), endpoints(1, 1)], 1),
            (vec![endpoints(0, 2), endpoints(1, 1), endpoints(1, 2)], 2),
            (vec![endpoints(0, 2), endpoints(0, 0), endpoints(1, 2)], 1),
        ] {
            let mut mirrors = Mirrors {
                changes: stream::empty().boxed(),
                services: HashSet::new(),
                n_endpoints: 2,
                complete: HashSet::new(),
            };
            mirrors.follow(stream::iter(changes));
            let deadline = Instant::now() + Duration::from_secs(1);
            let waited = mirrors.wait_for_endpoints(2, deadline).await;
            assert_eq!(mirrors.complete.len(), n_complete);
            assert_eq!(waited.is_ok(), n_complete == 2, "{waited:?}");
        }
    }
}
