//! The Kubernetes source: each kind is listed, then watched from there, for as long as the process lives.
//!
//! A kind has one task, which holds the names and versions of what it has reported and nothing else; objects are pruned
//! as they are decoded. Kinds whose definition is not installed count as empty until it is; an API server that fails, or
//! does not know a kind for a moment, changes nothing: the last state stays. Defaults, admission and status are the API
//! server's, so objects are passed on as they come.

mod answer;
mod freshness;
pub mod kinds;
mod metrics;
mod reflector;
mod request;

use std::time::Duration;

use kube::Client;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::ready::Readiness;

use crate::resources::Kind;
use crate::resources::event::{Event, Writer};
use crate::source::kubernetes::freshness::Freshness;
use crate::source::kubernetes::kinds::{Drives, Needs, Watched};
use crate::source::kubernetes::metrics::Lag;
use crate::source::kubernetes::reflector::Reflector;

/// Which objects are reported, and from where.
#[derive(Clone, Debug)]
pub struct Config {
    pub needs: Needs,
    /// The address of destination, as log lines show it.
    pub addr: String,
    /// Collects why kinds are not known as the API server has them.
    pub kinds: Readiness,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error("watching {kind} ended by itself")]
    Ended { kind: &'static str },
}

/// Reports the objects of the API server until the drain begins.
///
/// # Errors
/// When a part of it ends, which none does by itself. What the API server does not answer is logged and tried again,
/// however long it takes.
pub async fn run(
    client: Client,
    config: Config,
    writer: Writer,
    registry: Registry,
    drain: drain::Watch,
) -> Result<(), SourceError> {
    let watched = kinds::of(&config.needs);
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
        let freshness = Freshness::new(&registry, &config.kinds, kind);
        let reflector = Reflector::new(client.clone(), watched, writer.clone(), lag, freshness, listed.clone());
        tasks.spawn(async move {
            reflector.run().await;
            kind
        });
    }
    drop(listed);
    let mut reminders = interval(REMINDER);
    reminders.set_missed_tick_behavior(MissedTickBehavior::Delay);
    reminders.reset();
    while !waiting.is_empty() {
        // All branches only wait.
        tokio::select! {
            Some(kind) = first_lists.recv() => waiting.retain(|other| *other != kind),
            Some(ended) = tasks.join_next() => return Err(ended_early(ended)),
            () = drain.signaled() => return Ok(()),
            _ = reminders.tick() => {
                let kinds: Vec<_> = waiting.iter().map(|kind| kind.info().plural()).collect();
                let kinds = kinds.join(", ");
                warn!(kinds, "not ready: the API server has not listed everything; see the roles of our service account");
            }
        }
    }
    writer.apply(vec![Event::Synced]);
    tokio::select! {
        Some(ended) = tasks.join_next() => Err(ended_early(ended)),
        // The tasks end with the set that owns them.
        () = drain.signaled() => Ok(()),
    }
}

fn ended_early(ended: Result<Kind, tokio::task::JoinError>) -> SourceError {
    SourceError::Ended {
        kind: ended.map_or("a kind", |kind| kind.info().name),
    }
}

/// How often a start that does not get on is told of.
const REMINDER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
