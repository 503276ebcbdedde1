//! Scrapes the metrics of sidecars while clients query them.
//!
//! The first query scrapes each sidecar twice, [`FIRST_QUERY_WINDOW`] apart. The namespace is then scraped regularly
//! until [`SCRAPE_AFTER_QUERY`] after its last query.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tracing::warn;
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;

use super::counts::Rates;
use super::history::{History, RECENT_SAMPLE_INTERVAL};
use super::scrape::scrape;
use crate::cluster::Cluster;
use crate::cluster::views::workload_list::{Sidecar, Workload, WorkloadKind};
use crate::tls::mesh_credentials::MeshCredentials;

/// Recent metrics of sidecars.
pub(super) struct SidecarScraper {
    cluster: Cluster,
    /// Credentials for mutual TLS with sidecars.
    creds: Arc<MeshCredentials>,
    state: Mutex<State>,
    /// Serializes lookups of workloads, so that concurrent queries share one result.
    lookup_lock: Semaphore,
}

/// Admin address and name of a sidecar. Both, because a new pod can reuse the address of an old one.
type Key = (SocketAddr, Arc<str>);

#[derive(Default)]
struct State {
    /// Time of the last query of a namespace, or of all namespaces.
    last_queried: HashMap<Namespace, Instant>,
    /// Workloads of a namespace, and when they were looked up.
    workloads: HashMap<Namespace, (Instant, Arc<[Workload]>)>,
    histories: HashMap<Key, History>,
}

/// A namespace, or `None` for all namespaces.
type Namespace = Option<Arc<str>>;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{found} sidecars exceed the limit of {MAX_SIDECARS} for one query; query one namespace")]
    TooMany { found: usize },
    #[error("looking up the workloads of the mesh, or computing their rates")]
    Failed(#[from] JoinError),
}

/// Workloads, and the rates per second of their sidecars.
pub(super) struct ObservedWorkloads {
    pub(super) workloads: Vec<(Workload, Option<Rates>)>,
    /// Length of the measured interval in seconds; the longest if they differ between sidecars.
    pub(super) seconds: f64,
    /// Sidecars that could not be scraped, with the reason.
    pub(super) unreachable: Vec<(Workload, String)>,
}

impl SidecarScraper {
    pub(super) fn new(cluster: Cluster, creds: Arc<MeshCredentials>) -> Self {
        Self {
            cluster,
            creds,
            state: Mutex::default(),
            lookup_lock: Semaphore::new(1),
        }
    }

    /// Returns the workloads of a namespace, or of all namespaces, from a lookup that is at most [`MAX_SCRAPE_AGE`] old.
    pub(super) async fn workloads(&self, namespace: Option<&str>) -> Result<Arc<[Workload]>, Error> {
        // The semaphore is never closed.
        let _lock = self.lookup_lock.acquire().await;
        let key: Namespace = namespace.map(Arc::from);
        if let Some((at, workloads)) = self.state.lock().workloads.get(&key)
            && at.elapsed() < MAX_SCRAPE_AGE
        {
            return Ok(workloads.clone());
        }
        let (cluster, namespace) = (self.cluster.clone(), key.clone());
        // Runs on a blocking thread, because this thread also serves the other queries and taps.
        let workloads: Arc<[Workload]> = spawn_blocking(move || cluster.workloads(namespace.as_deref()).into()).await?;
        let mut state = self.state.lock();
        state.workloads.retain(|_, (at, _)| at.elapsed() < MAX_SCRAPE_AGE);
        state.workloads.insert(key, (Instant::now(), workloads.clone()));
        Ok(workloads)
    }

    /// Returns the rates of a namespace, or of all namespaces, over an interval as close to `window` as the stored pages allow.
    pub(super) async fn observe(&self, namespace: Option<&str>, window: Duration) -> Result<ObservedWorkloads, Error> {
        let workloads = self.workloads(namespace).await?;
        let found = workloads.iter().filter(|workload| workload.sidecar.is_some()).count();
        if found > MAX_SIDECARS {
            return Err(Error::TooMany { found });
        }
        if found > 0 {
            let now = Instant::now();
            self.state.lock().last_queried.insert(namespace.map(Arc::from), now);
        }
        let mut unreachable = self.scrape_stale(&workloads).await;
        if !self.all_have_two_pages(&workloads) {
            sleep(FIRST_QUERY_WINDOW).await;
            unreachable = self.scrape_stale(&workloads).await;
        }
        // Rates are computed without the lock and on a blocking thread; pages are shared by reference.
        let histories: Vec<Option<History>> = {
            let state = self.state.lock();
            let history = |workload| state.histories.get(&key(workload)?).cloned();
            workloads.iter().map(history).collect()
        };
        let observed = spawn_blocking(move || {
            let mut seconds = 0.0_f64;
            let workloads_with_rates = workloads.iter().zip(histories).map(|(workload, history)| {
                let rates = history.and_then(|history| history.rates(window));
                let rates = rates.map(|(rates, measured)| {
                    seconds = seconds.max(measured);
                    rates
                });
                (workload.clone(), rates)
            });
            let workloads = workloads_with_rates.collect();
            ObservedWorkloads {
                workloads,
                seconds,
                unreachable,
            }
        });
        Ok(observed.await?)
    }

    /// Scrapes recently queried namespaces until the drain.
    pub(super) async fn run(&self, drain: Watch) {
        let mut ticks = interval(RECENT_SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Cancel-safe: both branches only wait.
            tokio::select! {
                () = drain.signaled() => return,
                _ = ticks.tick() => {}
            }
            let last_queried: Vec<_> = {
                let mut state = self.state.lock();
                state
                    .last_queried
                    .retain(|_, asked_at| asked_at.elapsed() < SCRAPE_AFTER_QUERY);
                state.histories.retain(|_, history| {
                    let read_at = history.latest();
                    read_at.is_some_and(|at| at.elapsed() < SCRAPE_AFTER_QUERY)
                });
                state.last_queried.keys().cloned().collect()
            };
            for namespace in last_queried {
                let scraping = async {
                    let workloads = self.workloads(namespace.as_deref()).await?;
                    self.scrape_stale(&workloads).await;
                    Ok::<_, Error>(())
                };
                tokio::select! {
                    () = drain.signaled() => return,
                    scraped = scraping => if let Err(err) = scraped {
                        warn!(error = &err as &dyn std::error::Error, "scraping sidecars failed");
                    }
                }
            }
        }
    }

    /// Scrapes sidecars whose latest page is older than [`MAX_SCRAPE_AGE`]. Returns those that failed, with the reason.
    async fn scrape_stale(&self, workloads: &[Workload]) -> Vec<(Workload, String)> {
        let due: Vec<_> = {
            let state = self.state.lock();
            let is_due = |target: &ScrapeTarget| {
                let read_at = state.histories.get(&target.key).and_then(History::latest);
                read_at.is_none_or(|at| at.elapsed() >= MAX_SCRAPE_AGE)
            };
            let all = workloads.iter().enumerate().filter_map(|(workload_index, workload)| {
                Some(ScrapeTarget {
                    workload_index,
                    key: key(workload)?,
                    kind: workload.kind,
                    sidecar: workload.sidecar.clone()?,
                })
            });
            all.filter(is_due).collect()
        };
        let mut pages = stream::iter(due)
            .map(|target: ScrapeTarget| async move {
                let page = scrape(&target.sidecar, target.kind, &self.creds).await;
                (target.workload_index, target.key, page)
            })
            .buffer_unordered(MAX_CONCURRENT_SCRAPES);
        let mut unreachable = Vec::new();
        while let Some((workload_index, key, page)) = pages.next().await {
            match page {
                Ok(counts) => {
                    let mut state = self.state.lock();
                    if state.histories.len() >= MAX_SIDECARS && !state.histories.contains_key(&key) {
                        let reason =
                            format!("the metrics of {MAX_SIDECARS} other sidecars are stored, which is the limit");
                        unreachable.push((workloads[workload_index].clone(), reason));
                        continue;
                    }
                    let max_pages = MAX_METRICS_PAGES / state.histories.len().max(1);
                    let history = state.histories.entry(key).or_default();
                    history.push(Instant::now(), counts, max_pages.max(2));
                }
                Err(err) => unreachable.push((workloads[workload_index].clone(), ErrorChain(&err).to_string())),
            }
        }
        unreachable
    }

    /// Returns whether every sidecar with a page has at least two.
    fn all_have_two_pages(&self, workloads: &[Workload]) -> bool {
        let state = self.state.lock();
        let mut histories = workloads
            .iter()
            .filter_map(|workload| state.histories.get(&key(workload)?));
        histories.all(History::has_two_pages)
    }
}

struct ScrapeTarget {
    /// Index in the list of workloads.
    workload_index: usize,
    key: Key,
    kind: WorkloadKind,
    sidecar: Sidecar,
}

fn key(workload: &Workload) -> Option<Key> {
    let sidecar = workload.sidecar.as_ref()?;
    Some((sidecar.admin_addr, workload.name.name.clone()))
}

/// Maximum concurrent scrapes of one query.
const MAX_CONCURRENT_SCRAPES: usize = 16;
/// Maximum sidecars of one query, and maximum sidecars whose pages are stored.
const MAX_SIDECARS: usize = 2000;
/// Maximum parsed pages stored over all sidecars, but at least two for each sidecar. A parsed page usually takes a few KiB, that
/// of a busy sidecar much more.
const MAX_METRICS_PAGES: usize = 2000;
/// Maximum age of a page, or of a lookup of workloads, that is used again.
const MAX_SCRAPE_AGE: Duration = Duration::from_secs(1);
/// Interval between the two scrapes of the first query.
const FIRST_QUERY_WINDOW: Duration = Duration::from_secs(2);
/// How long a namespace is scraped after its last query.
const SCRAPE_AFTER_QUERY: Duration = Duration::from_secs(60);

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use tulle_core::metrics::Registry;

    use super::*;
    use crate::cluster::Config;
    use crate::resources::event::Event;
    use crate::resources::{self, Kind};
    use crate::tls::mesh_credentials::ClientCertificates;

    /// Returns a cluster of pods with sidecars: each has its own loopback address, all have this admin port.
    pub(in crate::telemetry) fn cluster(n_pods: u32, admin: u16) -> Cluster {
        let cluster = Cluster::new(Config::default(), &Registry::new());
        let pods = (1..=n_pods).map(|n| {
            let ip = Ipv4Addr::from(0x7f00_0000 + n);
            let yaml = format!(
                "\
metadata: {{name: web-{n}, namespace: shop, labels: {{linkerd.io/control-plane-ns: linkerd}}}}
spec:
  containers:
  - name: linkerd-proxy
    env:
    - {{name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR, value: '0.0.0.0:{admin}'}}
    - {{name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR, value: '0.0.0.0:{admin}'}}
status:
  phase: Running
  podIP: {ip}
  conditions: [{{type: Ready, status: 'True'}}]
"
            );
            let yaml = serde_yaml_ng::Deserializer::from_str(&yaml);
            Event::Applied(resources::decode(Kind::Pod, yaml).unwrap())
        });
        cluster.sink().apply(pods.collect());
        cluster
    }

    fn scraper(n_pods: u32) -> SidecarScraper {
        SidecarScraper::new(
            cluster(n_pods, 1),
            Arc::new(MeshCredentials::new(
                "telemetry".to_owned(),
                ClientCertificates::default(),
            )),
        )
    }

    #[tokio::test]
    async fn queries_of_too_many_sidecars_are_refused() {
        let n = u32::try_from(MAX_SIDECARS).unwrap() + 1;
        let scraper = scraper(n);
        let refused = scraper.observe(None, Duration::from_secs(10)).await.err().unwrap();
        assert!(
            matches!(refused, Error::TooMany { found } if found == MAX_SIDECARS + 1),
            "{refused}"
        );
        assert!(
            scraper.state.lock().last_queried.is_empty(),
            "they are not scraped further"
        );
    }

    #[tokio::test]
    async fn concurrent_queries_share_one_lookup_of_workloads() {
        let scraper = scraper(3);
        let (one, other) = tokio::join!(scraper.workloads(Some("shop")), scraper.workloads(Some("shop")));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!(one.len(), 3);
        assert!(scraper.workloads(Some("other")).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_namespace_without_sidecars_is_not_scraped_further() {
        let scraper = scraper(1);
        scraper.observe(Some("nothing"), Duration::from_secs(10)).await.unwrap();
        assert!(scraper.state.lock().last_queried.is_empty());
    }
}
