//! Asks sidecars what they have counted, while somebody wants to know.
//!
//! A first question is answered from two pages a little apart; from then on the namespace is looked at regularly, until
//! nobody has asked for a minute. So a mesh that nobody looks at is left alone.

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

use super::counts::Counts;
use super::history::{History, NEAR_APART};
use super::scrape::scrape;
use crate::cluster::Cluster;
use crate::cluster::members::{Member, MemberKind, Sidecar};
use crate::tls::creds::ServerCreds;
use crate::webhook::with_causes;

/// What sidecars have counted lately.
pub(super) struct Recorder {
    cluster: Cluster,
    /// Who we are to sidecars that must prove who they are.
    creds: Arc<ServerCreds>,
    state: Mutex<State>,
    /// One at a time looks for members: all who ask at once get the same.
    looking: Semaphore,
}

/// The admin address and the name of a sidecar, because a new pod may have the address of an old one.
type Key = (SocketAddr, Arc<str>);

#[derive(Default)]
struct State {
    /// When somebody last asked for a namespace, or for all.
    wanted: HashMap<Namespace, Instant>,
    /// Who was there, and when.
    members: HashMap<Namespace, (Instant, Arc<[Member]>)>,
    histories: HashMap<Key, History>,
}

/// A namespace, or all.
type Namespace = Option<Arc<str>>;

/// Why nothing can be said of a namespace.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "{found} sidecars are more than the {MOST_SIDECARS} that are looked at for one question; ask for a namespace"
    )]
    TooMany { found: usize },
    #[error("looking at the cluster")]
    Failed(#[from] JoinError),
}

/// Members, and what their sidecars did in each second.
pub(super) struct Observed {
    pub(super) members: Vec<(Member, Option<Counts>)>,
    /// Over how many seconds that was measured; the longest of them where they differ.
    pub(super) seconds: f64,
    /// Sidecars that did not answer, and why.
    pub(super) silent: Vec<(Member, String)>,
}

impl Recorder {
    pub(super) fn new(cluster: Cluster, creds: Arc<ServerCreds>) -> Self {
        Self {
            cluster,
            creds,
            state: Mutex::default(),
            looking: Semaphore::new(1),
        }
    }

    /// Who is there in a namespace, or everywhere, as of a second ago at the most.
    pub(super) async fn members(&self, namespace: Option<&str>) -> Result<Arc<[Member]>, Error> {
        // It is never closed.
        let _turn = self.looking.acquire().await;
        let key: Namespace = namespace.map(Arc::from);
        if let Some((at, members)) = self.state.lock().members.get(&key)
            && at.elapsed() < FRESH
        {
            return Ok(members.clone());
        }
        let (cluster, of) = (self.cluster.clone(), key.clone());
        // Proxies are served on this thread.
        let members: Arc<[Member]> = spawn_blocking(move || cluster.members(of.as_deref()).into()).await?;
        let mut state = self.state.lock();
        state.members.retain(|_, (at, _)| at.elapsed() < FRESH);
        state.members.insert(key, (Instant::now(), members.clone()));
        Ok(members)
    }

    /// What there is in a namespace, or everywhere, over a window that is as near to this one as it can be.
    pub(super) async fn observe(&self, namespace: Option<&str>, window: Duration) -> Result<Observed, Error> {
        let members = self.members(namespace).await?;
        let found = members.iter().filter(|member| member.sidecar.is_some()).count();
        if found > MOST_SIDECARS {
            return Err(Error::TooMany { found });
        }
        if found > 0 {
            let now = Instant::now();
            self.state.lock().wanted.insert(namespace.map(Arc::from), now);
        }
        let mut silent = self.look(&members).await;
        if !self.knows_growth(&members) {
            sleep(FIRST_WINDOW).await;
            silent = self.look(&members).await;
        }
        // Pages are shared, and what they differ by is computed without the lock, and beside this thread.
        let histories: Vec<Option<History>> = {
            let state = self.state.lock();
            let of = |member| state.histories.get(&key(member)?).cloned();
            members.iter().map(of).collect()
        };
        let observed = spawn_blocking(move || {
            let mut seconds = 0.0_f64;
            let counted = members.iter().zip(histories).map(|(member, history)| {
                let rates = history.and_then(|history| history.rates(window));
                let counts = rates.map(|(counts, measured)| {
                    seconds = seconds.max(measured);
                    counts
                });
                (member.clone(), counts)
            });
            let members = counted.collect();
            Observed {
                members,
                seconds,
                silent,
            }
        });
        Ok(observed.await?)
    }

    /// Goes on looking at what somebody has asked for, until the drain.
    pub(super) async fn keep(&self, drain: Watch) {
        let mut ticks = interval(NEAR_APART);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Both may be dropped at any time.
            tokio::select! {
                () = drain.signaled() => return,
                _ = ticks.tick() => {}
            }
            let wanted: Vec<_> = {
                let mut state = self.state.lock();
                state.wanted.retain(|_, asked_at| asked_at.elapsed() < WANTED_FOR);
                state.histories.retain(|_, history| {
                    let read_at = history.latest();
                    read_at.is_some_and(|at| at.elapsed() < WANTED_FOR)
                });
                state.wanted.keys().cloned().collect()
            };
            for namespace in wanted {
                let looking = async {
                    let members = self.members(namespace.as_deref()).await?;
                    self.look(&members).await;
                    Ok::<_, Error>(())
                };
                tokio::select! {
                    () = drain.signaled() => return,
                    looked = looking => if let Err(err) = looked {
                        warn!(error = &err as &dyn std::error::Error, "looking at sidecars failed");
                    }
                }
            }
        }
    }

    /// Reads the pages that are not quite new; those that cannot be read are returned with the reason.
    async fn look(&self, members: &[Member]) -> Vec<(Member, String)> {
        let due: Vec<_> = {
            let state = self.state.lock();
            let is_due = |due: &Due| {
                let read_at = state.histories.get(&due.key).and_then(History::latest);
                read_at.is_none_or(|at| at.elapsed() >= FRESH)
            };
            let all = members.iter().enumerate().filter_map(|(at, member)| {
                Some(Due {
                    at,
                    key: key(member)?,
                    kind: member.kind,
                    sidecar: member.sidecar.clone()?,
                })
            });
            all.filter(is_due).collect()
        };
        let mut pages = stream::iter(due)
            .map(|due: Due| async move {
                let page = scrape(&due.sidecar, due.kind, &self.creds).await;
                (due.at, due.key, page)
            })
            .buffer_unordered(AT_ONCE);
        let mut silent = Vec::new();
        while let Some((at, key, page)) = pages.next().await {
            match page {
                Ok(counts) => {
                    let mut state = self.state.lock();
                    if state.histories.len() >= MOST_SIDECARS && !state.histories.contains_key(&key) {
                        let reason = format!("{MOST_SIDECARS} sidecars are looked at already");
                        silent.push((members[at].clone(), reason));
                        continue;
                    }
                    let most = MOST_PAGES / state.histories.len().max(1);
                    let history = state.histories.entry(key).or_default();
                    history.push(Instant::now(), counts, most.max(2));
                }
                Err(err) => silent.push((members[at].clone(), with_causes(&err))),
            }
        }
        silent
    }

    /// Whether all sidecars that answer have been looked at before.
    fn knows_growth(&self, members: &[Member]) -> bool {
        let state = self.state.lock();
        let mut known = members.iter().filter_map(|member| state.histories.get(&key(member)?));
        known.all(History::shows_growth)
    }
}

/// A sidecar that is to be asked.
struct Due {
    /// Which of the members it is of.
    at: usize,
    key: Key,
    kind: MemberKind,
    sidecar: Sidecar,
}

fn key(member: &Member) -> Option<Key> {
    let sidecar = member.sidecar.as_ref()?;
    Some((sidecar.admin, member.name.name.clone()))
}

/// Sidecars that are asked at a time, for one question.
const AT_ONCE: usize = 16;
/// Sidecars whose pages are kept, and that one question looks at.
const MOST_SIDECARS: usize = 2000;
/// Pages that are kept of all sidecars together, but for two of each; each has some KiB.
const MOST_PAGES: usize = 2000;
/// A page is good enough for so long.
const FRESH: Duration = Duration::from_secs(1);
/// How long a first question takes.
const FIRST_WINDOW: Duration = Duration::from_secs(2);
/// How long a namespace is looked at after it was asked for.
const WANTED_FOR: Duration = Duration::from_secs(60);

#[cfg(test)]
pub(super) mod tests {
    use std::net::Ipv4Addr;

    use tulle_core::metrics::Registry;

    use super::*;
    use crate::cluster::Config;
    use crate::resources::event::Event;
    use crate::resources::{self, Kind};
    use crate::tls::creds::ClientCertificates;

    /// A cluster of pods with sidecars, each on a loopback address of its own with this admin port.
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
        cluster.writer().apply(pods.collect());
        cluster
    }

    fn recorder(n_pods: u32) -> Recorder {
        Recorder::new(
            cluster(n_pods, 1),
            Arc::new(ServerCreds::new("telemetry".to_owned(), ClientCertificates::default())),
        )
    }

    #[tokio::test]
    async fn more_sidecars_than_a_process_can_look_at_are_refused() {
        let n = u32::try_from(MOST_SIDECARS).unwrap() + 1;
        let recorder = recorder(n);
        let refused = recorder.observe(None, Duration::from_secs(10)).await.err().unwrap();
        assert!(
            matches!(refused, Error::TooMany { found } if found == MOST_SIDECARS + 1),
            "{refused}"
        );
        assert!(
            recorder.state.lock().wanted.is_empty(),
            "nobody goes on looking at them"
        );
    }

    #[tokio::test]
    async fn who_asks_at_once_shares_one_look_at_the_cluster() {
        let recorder = recorder(3);
        let (one, other) = tokio::join!(recorder.members(Some("shop")), recorder.members(Some("shop")));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!(one.len(), 3);
        assert!(recorder.members(Some("other")).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_namespace_without_sidecars_is_not_looked_at_any_further() {
        let recorder = recorder(1);
        recorder
            .observe(Some("nothing"), Duration::from_secs(10))
            .await
            .unwrap();
        assert!(recorder.state.lock().wanted.is_empty());
    }
}
