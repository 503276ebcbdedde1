//! Threads with a runtime of their own, for servers that must answer while the streams of proxies keep the main runtime busy. A
//! heartbeat shows whether the main runtime is stuck, because these servers would answer even then.

use std::convert::Infallible;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// Threads by name. They end when this value is dropped.
#[derive(Default)]
pub(crate) struct Threads(Vec<Thread>);

struct Thread {
    name: &'static str,
    runtime: Handle,
    _end: oneshot::Sender<()>,
}

impl Threads {
    /// Returns the runtime of a thread, which is started on the first call.
    ///
    /// # Errors
    /// Fails if the thread or its runtime cannot be started.
    pub(crate) fn runtime(&mut self, name: &'static str) -> Result<Handle> {
        if let Some(thread) = self.0.iter().find(|thread| thread.name == name) {
            return Ok(thread.runtime.clone());
        }
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.with_context(|| format!("starting the runtime of the thread {name}"))?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Nothing is ever sent: the thread ends when the sender is dropped.
                let _ = runtime.block_on(ended);
            })
            .with_context(|| format!("starting the thread {name}"))?;
        self.0.push(Thread {
            name,
            runtime: handle.clone(),
            _end: end,
        });
        Ok(handle)
    }
}

/// Tells whether a runtime still runs its tasks.
#[derive(Clone)]
pub(crate) struct Heartbeat {
    last: Arc<Mutex<Instant>>,
}

impl Heartbeat {
    pub(crate) fn new() -> Self {
        Self {
            last: Arc::new(Mutex::new(Instant::now())),
        }
    }

    /// Records the time of each beat, while the current runtime runs its tasks.
    pub(crate) async fn run(self) -> Infallible {
        loop {
            *self.last.lock() = Instant::now();
            sleep(HEARTBEAT_INTERVAL).await;
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.last.lock().elapsed() < MAX_HEARTBEAT_AGE
    }
}

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum age of the last beat of a live runtime. It is longer than any work without an await, such as computing all values
/// again after the API server has listed many objects.
pub(crate) const MAX_HEARTBEAT_AGE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_runs_no_tasks_is_not_alive() {
        let heartbeat = Heartbeat::new();
        let beating = tokio::spawn(heartbeat.clone().run());
        sleep(2 * MAX_HEARTBEAT_AGE).await;
        assert!(heartbeat.is_alive());
        beating.abort();
        sleep(MAX_HEARTBEAT_AGE).await;
        assert!(!heartbeat.is_alive());
    }

    #[tokio::test]
    async fn a_thread_answers_while_another_is_busy_and_is_started_once() {
        let mut threads = Threads::default();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = threads.runtime("busy").unwrap().spawn(async move { released.recv() });
        let name = || thread::current().name().map(str::to_owned);
        for _ in 0..2 {
            let answer = threads.runtime("idle").unwrap().spawn(async move { name() }).await;
            assert_eq!(answer.unwrap().as_deref(), Some("idle"));
        }
        assert_eq!(threads.0.len(), 2);
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
    }
}
