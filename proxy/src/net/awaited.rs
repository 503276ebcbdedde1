//! Answers that a worker waits for. When one comes the worker is awake, and may as well look after others.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures_util::task::AtomicWaker;

/// What one worker waits for.
#[derive(Default)]
pub(crate) struct Awaited {
    n: AtomicUsize,
    bystander: AtomicWaker,
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

    /// Whether there are any.
    pub(crate) fn any(&self) -> bool {
        self.n.load(Ordering::Relaxed) > 0
    }

    /// Has a task woken when one comes. Only the last that asked is.
    pub(crate) fn wakes(&self, task: &std::task::Waker) {
        self.bystander.register(task);
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
        self.0.bystander.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Poll};

    use super::*;

    #[tokio::test]
    async fn a_bystander_hears_of_the_first_answer_that_comes() {
        let awaited = Awaited::by_this_worker();
        assert!(!awaited.any());
        let (first, second) = (Answer::awaited(), Answer::awaited());
        assert!(awaited.any());
        let bystander = tokio::spawn(async move {
            let mut polled = 0;
            poll_fn(|cx| {
                awaited.wakes(cx.waker());
                polled += 1;
                if polled == 2 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            awaited.any()
        });
        tokio::task::yield_now().await;
        drop(first);
        assert!(bystander.await.unwrap(), "the second is awaited still");
        drop(second);
    }
}
