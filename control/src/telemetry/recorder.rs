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
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tulle_core::drain::Watch;

use super::counts::Counts;
use super::history::{History, NEAR_APART};
use super::scrape::scrape;
use crate::cluster::Cluster;
use crate::cluster::members::Member;
use crate::tls::creds::ServerCreds;
use crate::webhook::with_causes;

/// What sidecars have counted lately.
pub(super) struct Recorder {
    cluster: Cluster,
    /// Whom sidecars take us for.
    creds: Arc<ServerCreds>,
    state: Mutex<State>,
}

/// The admin address and the name of a sidecar, because a new pod may have the address of an old one.
type Key = (SocketAddr, Arc<str>);

#[derive(Default)]
struct State {
    /// When somebody last asked for a namespace, or for all.
    wanted: HashMap<Option<Arc<str>>, Instant>,
    histories: HashMap<Key, History>,
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
        }
    }

    /// What there is in a namespace, or everywhere, over a window that is as near to this one as it can be.
    pub(super) async fn observe(&self, namespace: Option<&str>, window: Duration) -> Observed {
        self.state
            .lock()
            .wanted
            .insert(namespace.map(Arc::from), Instant::now());
        let members = self.cluster.members(namespace);
        let mut silent = self.look(&members).await;
        if !self.knows_growth(&members) {
            sleep(FIRST_WINDOW).await;
            silent = self.look(&members).await;
        }
        let state = self.state.lock();
        let mut seconds = 0.0_f64;
        let members = members.into_iter().map(|member| {
            let rates = key(&member)
                .and_then(|key| state.histories.get(&key))
                .and_then(|history| history.rates(window));
            let counts = rates.map(|(counts, measured)| {
                seconds = seconds.max(measured);
                counts
            });
            (member, counts)
        });
        let members = members.collect();
        Observed {
            members,
            seconds,
            silent,
        }
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
                let members = self.cluster.members(namespace.as_deref());
                tokio::select! {
                    () = drain.signaled() => return,
                    _ = self.look(&members) => {}
                }
            }
        }
    }

    /// Reads the pages that are not quite new; those that cannot be read are returned with the reason.
    async fn look(&self, members: &[Member]) -> Vec<(Member, String)> {
        let due: Vec<_> = {
            let state = self.state.lock();
            let is_due = |(_, key): &(usize, Key)| {
                let read_at = state.histories.get(key).and_then(History::latest);
                read_at.is_none_or(|at| at.elapsed() >= FRESH)
            };
            let keys = members
                .iter()
                .enumerate()
                .filter_map(|(at, member)| Some((at, key(member)?)));
            let sidecar_of = |(at, key): (usize, Key)| Some((at, key, members[at].sidecar.clone()?));
            keys.filter(is_due).filter_map(sidecar_of).collect()
        };
        let mut pages = stream::iter(due)
            .map(|(at, key, sidecar)| async move {
                let page = scrape(&sidecar, &self.creds).await;
                (at, key, page)
            })
            .buffer_unordered(AT_ONCE);
        let mut silent = Vec::new();
        while let Some((at, key, page)) = pages.next().await {
            match page {
                Ok(counts) => {
                    let mut state = self.state.lock();
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
        known.all(|history| history.rates(NEAR_APART).is_some())
    }
}

fn key(member: &Member) -> Option<Key> {
    let sidecar = member.sidecar.as_ref()?;
    Some((sidecar.admin, member.name.name.clone()))
}

/// Sidecars that are asked at a time.
const AT_ONCE: usize = 8;
/// Pages that are kept of all sidecars together; each has some KiB.
const MOST_PAGES: usize = 2000;
/// A page is good enough for so long.
const FRESH: Duration = Duration::from_secs(1);
/// How long a first question takes.
const FIRST_WINDOW: Duration = Duration::from_secs(2);
/// How long a namespace is looked at after it was asked for.
const WANTED_FOR: Duration = Duration::from_secs(60);
