//! Reports stale kinds in a metric and, for information, in `/ready`. They do not affect the readiness of the process.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tulle_core::metrics::{Gauge, Labels, Registry};
use tulle_core::readiness::{Latch, Readiness};

use crate::resources::Kind;

/// Whether one kind is stale: its last known state is in use, and can be older than a minute. Clones share the state.
#[derive(Clone)]
pub(super) struct Freshness(Arc<Shared>);

struct Shared {
    kind: String,
    /// 1 while the kind is stale.
    stale: Arc<Gauge>,
    /// The reasons of all stale kinds.
    stale_kinds: Readiness,
    state: Mutex<State>,
    /// Notified when the time changes at which a kind without a watch becomes stale.
    stale_deadline_changed: Notify,
}

struct State {
    /// The reason in `stale_kinds`, held while the kind is stale. It does not affect the readiness of the process.
    reason: Option<Latch>,
    watch_is_open: bool,
    /// The last time at which the known state was that of the API server.
    up_to_date_at: Instant,
}

/// How a watch ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WatchEndCause {
    /// The API server ended it or closed the connection, so all changes until then have arrived.
    Server,
    /// The API server was unreachable, for an unknown time before the end.
    ConnectionLost,
}

impl Freshness {
    /// Creates the state of a kind that is not listed yet, and therefore stale. `stale_kinds` has a reason for each stale kind.
    pub(super) fn new(registry: &Registry, stale_kinds: &Readiness, kind: Kind) -> Self {
        let kind = kind.info().plural();
        let help = "1 while the last known state of a kind is served because the API server cannot be read.";
        let stale = registry
            .gauge("tulle_kind_is_stale", help)
            .get(&Labels::new().with("kind", &kind));
        stale.set(1);
        let state = State {
            reason: Some(stale_kinds.latch(format!("{kind}: not listed yet"))),
            watch_is_open: false,
            up_to_date_at: Instant::now(),
        };
        Self(Arc::new(Shared {
            kind,
            stale,
            stale_kinds: stale_kinds.clone(),
            state: Mutex::new(state),
            stale_deadline_changed: Notify::new(),
        }))
    }

    /// Marks the kind as stale: the API server does not return its objects.
    pub(super) fn mark_stale(&self, reason: &str) {
        self.0.mark_stale(&mut self.0.state.lock(), reason);
    }

    /// Records that the known state is that of the API server at this time. The kind is then no longer stale, unless `at` is
    /// `MAX_TIME_WITHOUT_WATCH` ago or more.
    pub(super) fn mark_up_to_date(&self, at: Instant) {
        let mut state = self.0.state.lock();
        state.up_to_date_at = at;
        if at.elapsed() < MAX_TIME_WITHOUT_WATCH {
            state.reason = None;
            self.0.stale.set(0);
        }
        // An open watch has no time limit, and calls this for each change.
        if !state.watch_is_open {
            self.0.stale_deadline_changed.notify_one();
        }
    }

    pub(super) fn watch_opened(&self) {
        self.0.state.lock().watch_is_open = true;
    }

    /// Records that the watch has ended. Without another watch, the kind becomes stale after `MAX_TIME_WITHOUT_WATCH`. The time is
    /// counted from this end if the API server has ended the watch, and from the last change if it does not respond.
    pub(super) fn watch_ended(&self, cause: WatchEndCause) {
        let mut state = self.0.state.lock();
        state.watch_is_open = false;
        // The watch of a stale kind can end before it has caught up.
        if cause == WatchEndCause::Server && state.reason.is_none() {
            state.up_to_date_at = Instant::now();
        }
        self.0.stale_deadline_changed.notify_one();
    }

    /// Marks the kind as stale when it has been without a watch for too long. Never returns.
    pub(super) async fn mark_stale_without_watch(&self) -> Infallible {
        loop {
            let stale_at = {
                let state = self.0.state.lock();
                let has_limit = !state.watch_is_open && state.reason.is_none();
                has_limit.then_some(state.up_to_date_at + MAX_TIME_WITHOUT_WATCH)
            };
            match stale_at {
                None => self.0.stale_deadline_changed.notified().await,
                Some(at) if at > Instant::now() => tokio::select! {
                    () = self.0.stale_deadline_changed.notified() => {}
                    () = sleep_until(at) => {}
                },
                Some(_) => {
                    let mut state = self.0.state.lock();
                    if !state.watch_is_open {
                        let reason = format!("no watch for {MAX_TIME_WITHOUT_WATCH:?}");
                        self.0.mark_stale(&mut state, &reason);
                    }
                }
            }
        }
    }
}

impl Shared {
    fn mark_stale(&self, state: &mut State, reason: &str) {
        self.stale.set(1);
        let reason = format!("{}: {reason}", self.kind);
        match &state.reason {
            Some(latch) => latch.set_reason(reason),
            None => state.reason = Some(self.stale_kinds.latch(reason)),
        }
    }
}

/// Time without a watch after which a kind is stale. TCP keep-alive detects an unreachable server within 35 s, so that the state of
/// a kind that is not stale is at most a minute old.
const MAX_TIME_WITHOUT_WATCH: Duration = Duration::from_secs(15);
