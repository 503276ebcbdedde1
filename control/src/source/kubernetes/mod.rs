//! The Kubernetes source: each kind is listed, then watched from there, for as long as the process lives.
//!
//! A kind has one task, which holds the names and versions of what it has reported and nothing else; objects are pruned
//! as they are decoded. Kinds whose definition is not installed count as empty until it is. Defaults, admission and
//! status are the API server's, so objects are passed on as they come.

mod answer;
pub mod kinds;
mod metrics;
mod reflector;
mod request;

use std::time::Duration;

use kube::Client;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;
use tulle_core::drain;
use tulle_core::metrics::Registry;

use crate::resources::Kind;
use crate::resources::event::{Event, Writer};
use crate::source::kubernetes::kinds::{Drives, Needs, Watched};
use crate::source::kubernetes::metrics::Lag;
use crate::source::kubernetes::reflector::Reflector;

/// Which objects are reported, and from where.
#[derive(Clone, Debug)]
pub struct Config {
    pub needs: Needs,
    /// Namespace of the control plane, the only one whose Secrets are watched.
    pub namespace: String,
    /// The address of destination, as log lines show it.
    pub addr: String,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error(
        "the API server has not listed {kinds} within {limit:?}; see the warnings above, and the roles of our service account"
    )]
    NotSynced { kinds: String, limit: Duration },
    #[error("watching {kind} ended by itself")]
    Ended { kind: &'static str },
}

/// Reports the objects of the API server until the drain begins.
///
/// # Errors
/// When not everything could be listed within 60 seconds of the start. Later troubles are logged and tried again.
pub async fn run(
    client: Client,
    config: Config,
    writer: Writer,
    registry: Registry,
    drain: drain::Watch,
) -> Result<(), SourceError> {
    let watched = kinds::of(&config.needs, &config.namespace);
    if config.needs.destination {
        let what = match config.needs.drives {
            Drives::Slices => "EndpointSlice",
            Drives::Endpoints => "Endpoints",
        };
        let component = "endpoints-watcher";
        debug!(addr = config.addr, component, "Watching {what} resources");
    }
    let (listed, mut first_lists) = mpsc::channel(watched.len().max(1));
    let mut tasks = JoinSet::new();
    let mut waiting: Vec<Kind> = Vec::new();
    // Kinds without objects are shown, too.
    let _sizes: Vec<_> = watched.iter().map(|one| one.kind.cache_size(&registry)).collect();
    for watched in watched {
        let Watched { kind, .. } = watched;
        waiting.push(kind);
        let lag = Lag::new(&registry, kind);
        let reflector = Reflector::new(client.clone(), watched, writer.clone(), lag, listed.clone());
        tasks.spawn(async move {
            reflector.run().await;
            kind
        });
    }
    drop(listed);
    let all_listed = timeout(SYNC_LIMIT, async {
        while let Some(kind) = first_lists.recv().await {
            waiting.retain(|other| *other != kind);
            if waiting.is_empty() {
                return;
            }
        }
        // A task that is gone ends the source below.
        std::future::pending().await
    });
    tokio::select! {
        in_time = all_listed => if in_time.is_err() {
            return Err(not_synced(&waiting));
        },
        Some(ended) = tasks.join_next() => return Err(ended_early(ended)),
        () = drain.signaled() => return Ok(()),
    }
    writer.apply(vec![Event::Synced]);
    tokio::select! {
        Some(ended) = tasks.join_next() => Err(ended_early(ended)),
        // The tasks end with the set that owns them.
        () = drain.signaled() => Ok(()),
    }
}

fn not_synced(waiting: &[Kind]) -> SourceError {
    let kinds: Vec<_> = waiting.iter().map(|kind| kind.info().plural()).collect();
    SourceError::NotSynced {
        kinds: kinds.join(", "),
        limit: SYNC_LIMIT,
    }
}

fn ended_early(ended: Result<Kind, tokio::task::JoinError>) -> SourceError {
    SourceError::Ended {
        kind: ended.map_or("a kind", |kind| kind.info().name),
    }
}

/// How long Linkerd's controllers wait for their caches.
const SYNC_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
