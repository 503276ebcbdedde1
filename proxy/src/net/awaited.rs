//! Answers that a worker waits for. When one comes the worker is awake, and may as well look after others.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// What one worker waits for.
#[derive(Default)]
pub(crate) struct Awaited {
    n: AtomicUsize,
    came: Notify,
}

/// An answer that is awaited until this is dropped.
pub(crate) struct Answer(Arc<Awaited>);

thread_local! {
    static BY_THIS_WORKER: Arc<Awaited> = Arc::default();
}

impl Awaited {
    pub(crate) fn by_this_worker() -> Arc<Self> {
        BY_THIS_WORKER.with(Arc::clone)
    }

    /// How many there are.
    pub(crate) fn n(&self) -> usize {
        self.n.load(Ordering::Relaxed)
    }

    /// Waits until one comes.
    pub(crate) async fn comes(&self) {
        self.came.notified().await;
    }
}

impl Answer {
    pub(crate) fn awaited() -> Self {
        let awaited = Awaited::by_this_worker();
        awaited.n.fetch_add(1, Ordering::Relaxed);
        Self(awaited)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.0.n.fetch_sub(1, Ordering::Relaxed);
        self.0.came.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn all_who_wait_hear_of_an_answer_that_comes_and_not_of_those_that_do_not() {
        let awaited = Awaited::by_this_worker();
        assert_eq!(awaited.n(), 0);
        let (first, second) = (Answer::awaited(), Answer::awaited());
        assert_eq!(awaited.n(), 2);
        let mut waiting = [Box::pin(awaited.comes()), Box::pin(awaited.comes())];
        for waits in &mut waiting {
            assert!(waits.now_or_never().is_none());
        }
        drop(first);
        assert_eq!(awaited.n(), 1);
        for waits in waiting {
            assert!(waits.now_or_never().is_some());
        }
        assert!(awaited.comes().now_or_never().is_none(), "the second is awaited still");
        drop(second);
    }
}
