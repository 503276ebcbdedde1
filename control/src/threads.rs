//! Threads with a runtime of their own, for servers that must answer while the streams of proxies keep the others busy.

use std::thread;

use anyhow::{Context as _, Result};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

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
                // An error means that the other side is dropped, which also ends the thread.
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

#[cfg(test)]
mod tests {
    use super::*;

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
