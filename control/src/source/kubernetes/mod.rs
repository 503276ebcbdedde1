//! The Kubernetes source. It lists each kind, then watches it from that resource version, until the process ends.
//!
//! One task per kind keeps only the names and versions of the reported objects. Objects are pruned when they are
//! decoded, and otherwise reported as they are: the API server has already applied defaults and admission. A kind whose
//! CRD is not installed counts as empty. If the API server fails, or omits a kind for a short time, the last known state
//! stays.

mod freshness;
pub mod kinds;
mod metrics;
mod reflector;
mod request;
mod response;

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;

use crate::resources::Kind;
use crate::resources::event::{Event, EventSink};
use crate::resources::service::EndpointsSource;
use crate::source::kubernetes::freshness::Freshness;
use crate::source::kubernetes::kinds::{WatchRequirements, WatchedKind};
use crate::source::kubernetes::metrics::InformerLag;
use crate::source::kubernetes::reflector::{ApiServer, KindMetrics, Reflector};

/// Which objects the source reports, and other settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub requirements: WatchRequirements,
    /// The address of the destination service in log lines.
    pub log_addr: String,
    /// The reason of each stale kind, which `/ready` shows. It does not affect the readiness of the process.
    pub stale_kinds: Readiness,
}

/// Which objects of another cluster the source reports, and other settings.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// The name of the cluster.
    pub cluster: Arc<str>,
    pub endpoints_source: EndpointsSource,
    /// The reason of each kind that cannot be read.
    pub stale_kinds: Readiness,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error("the watch of {kind} ended unexpectedly")]
    WatchEnded { kind: &'static str },
}

/// Reports the objects of the API server until the drain.
///
/// # Errors
/// Fails if a reflector task ends, which happens only by a panic. API errors are logged and retried without limit.
pub async fn run(
    client: Client,
    config: Config,
    sink: EventSink,
    registry: Registry,
    drain: drain::Watch,
) -> Result<(), SourceError> {
    let watched = kinds::watched_kinds(&config.requirements);
    if config.requirements.destination {
        let kind_name = match config.requirements.endpoints_source {
            EndpointsSource::EndpointSlices => "EndpointSlice",
            EndpointsSource::Endpoints => "Endpoints",
        };
        let component = "endpoints-watcher";
        debug!(addr = config.log_addr, component, "Watching {kind_name} resources");
    }
    // Held so that kinds without objects have a series, too.
    let _cache_size_gauges: Vec<_> = watched
        .iter()
        .map(|watched| watched.kind.cache_size_gauge(&registry, "local"))
        .collect();
    let source = Source {
        client,
        watched,
        cluster: None,
        stale_kinds: config.stale_kinds,
        sink,
        registry,
    };
    source.run(drain).await
}

/// Reports the objects that determine the endpoints in another cluster, until the drain. The metrics of these watches are not
/// exported, because the metrics for the local cluster have the same names.
///
/// # Errors
/// As [`run`].
pub async fn run_remote(
    client: Client,
    config: RemoteConfig,
    sink: EventSink,
    drain: drain::Watch,
) -> Result<(), SourceError> {
    let source = Source {
        client,
        watched: kinds::remote_kinds(config.endpoints_source),
        cluster: Some(config.cluster),
        stale_kinds: config.stale_kinds,
        sink,
        registry: Registry::new(),
    };
    source.run(drain).await
}

struct Source {
    client: Client,
    watched: Vec<WatchedKind>,
    /// `None` for the cluster of this process.
    cluster: Option<Arc<str>>,
    stale_kinds: Readiness,
    sink: EventSink,
    registry: Registry,
}

impl Source {
    async fn run(self, drain: drain::Watch) -> Result<(), SourceError> {
        let (listed, mut first_lists) = mpsc::channel(self.watched.len().max(1));
        let mut tasks = JoinSet::new();
        let mut unlisted: Vec<Kind> = Vec::new();
        for watched in self.watched {
            let WatchedKind { kind, .. } = watched;
            unlisted.push(kind);
            let metrics = KindMetrics {
                lag: InformerLag::new(&self.registry, kind),
                freshness: Freshness::new(&self.registry, &self.stale_kinds, kind),
            };
            let server = ApiServer {
                client: self.client.clone(),
                cluster: self.cluster.clone(),
            };
            let reflector = Reflector::new(server, watched, self.sink.clone(), metrics, listed.clone());
            tasks.spawn(async move {
                reflector.run().await;
                kind
            });
        }
        drop(listed);
        let mut log_ticks = interval(START_LOG_INTERVAL);
        log_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        log_ticks.reset();
        while !unlisted.is_empty() {
            // All branches are cancel-safe.
            tokio::select! {
                Some(kind) = first_lists.recv() => unlisted.retain(|other| *other != kind),
                Some(ended) = tasks.join_next() => return Err(watch_ended_error(ended)),
                () = drain.signaled() => return Ok(()),
                _ = log_ticks.tick() => {
                    let kinds: Vec<_> = unlisted.iter().map(|kind| kind.info().plural()).collect();
                    let (kinds, cluster) = (kinds.join(", "), self.cluster.as_deref().unwrap_or("local"));
                    warn!(
                        kinds,
                        cluster, "not ready: some kinds are not listed yet; check the RBAC roles of the service account"
                    );
                }
            }
        }
        self.sink.apply(vec![Event::Synced]);
        tokio::select! {
            Some(ended) = tasks.join_next() => Err(watch_ended_error(ended)),
            // Dropping the `JoinSet` aborts the tasks.
            () = drain.signaled() => Ok(()),
        }
    }
}

fn watch_ended_error(ended: Result<Kind, tokio::task::JoinError>) -> SourceError {
    SourceError::WatchEnded {
        kind: ended.map_or("a kind", |kind| kind.info().name),
    }
}

/// Decodes bytes as the response to a list, and as the response to a watch, of each kind.
#[cfg(any(test, fuzzing))]
pub(crate) fn decode_response(bytes: &[u8]) -> Vec<crate::resources::Object> {
    use response::{EncodedObject, FrameBuffer, ListPage, PartlyDecodedObject, WatchEncoding, WatchEvent};

    let body = bytes::Bytes::copy_from_slice(bytes);
    let mut decoded = Vec::new();
    let mut decode = |object: EncodedObject<'_>| {
        let Ok(object) = PartlyDecodedObject::parse(object) else {
            return;
        };
        object.last_updated_at();
        for kind in crate::resources::KINDS.iter().map(|info| info.kind) {
            match object.decode(kind, kinds::ObjectDetail::Full) {
                Ok(object) => decoded.push(object),
                Err(err) => drop(object.unreadable(kind, &err.to_string())),
            }
        }
    };
    if let Ok(page) = ListPage::parse(&body) {
        page.items.into_iter().for_each(&mut decode);
    }
    for encoding in [WatchEncoding::Json, WatchEncoding::Protobuf] {
        let mut frames = FrameBuffer::new(encoding);
        frames.push(bytes);
        while let Ok(Some(frame)) = frames.next_frame() {
            if let Ok(event) = WatchEvent::parse(&frame, encoding) {
                decode(event.object);
            }
        }
    }
    decoded
}

/// Interval between log messages about kinds that are not listed yet.
const START_LOG_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
