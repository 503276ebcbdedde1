//! Answers that a worker waits for. When one comes the worker is awake, and may as well look after others.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{Notify, Semaphore};

/// What one worker waits for.
pub(crate) struct Awaited {
    n: AtomicUsize,
    came: Notify,
    /// A permit for each that may be passed on now.
    passes: Semaphore,
}

/// An answer that is awaited until this is dropped.
pub(crate) struct Answer(Arc<Awaited>);

/// So long as there is this, answers are passed on a few at a time.
pub(crate) struct Turns(Arc<Awaited>);

thread_local! {
    static BY_THIS_WORKER: Arc<Awaited> = Arc::new(Awaited {
        n: AtomicUsize::new(0),
        came: Notify::new(),
        passes: Semaphore::new(ANY_NUMBER),
    });
}

/// More than there will ever be.
const ANY_NUMBER: usize = Semaphore::MAX_PERMITS / 2;

impl Awaited {
    pub(crate) fn by_this_worker() -> Arc<Self> {
        BY_THIS_WORKER.with(Arc::clone)
    }

    /// How many there are.
    pub(crate) fn n(&self) -> usize {
        self.n.load(Ordering::Relaxed)
    }

    /// Waits until one has come, or is not awaited any more.
    pub(crate) async fn comes(&self) {
        self.came.notified().await;
    }

    /// Has none passed on but by turns. Of several who want that the latest decides, and any of them ends it.
    pub(crate) fn by_turns(self: &Arc<Self>) -> Turns {
        self.passes.forget_permits(ANY_NUMBER);
        Turns(self.clone())
    }

    /// Has so many passed on, and no more.
    fn pass(&self, n: usize) {
        self.passes.forget_permits(ANY_NUMBER);
        self.passes.add_permits(n);
    }
}

impl Turns {
    /// Has the next `n` passed on, those first that have waited longest.
    pub(crate) fn next(&self, n: usize) {
        self.0.pass(n);
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.0.pass(ANY_NUMBER);
    }
}

impl Answer {
    pub(crate) fn awaited() -> Self {
        let awaited = Awaited::by_this_worker();
        awaited.n.fetch_add(1, Ordering::Relaxed);
        Self(awaited)
    }

    /// Waits, now that it has come, until it may be passed on, and ends.
    pub(crate) async fn pass_on(self) {
        if let Ok(pass) = self.0.passes.acquire().await {
            pass.forget();
        }
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

    #[tokio::test]
    async fn by_turns_only_so_many_answers_are_passed_on_in_their_order() {
        let awaited = Awaited::by_this_worker();
        let mut passing = [(); 6].map(|()| Box::pin(Answer::awaited().pass_on()));
        let mut passed = |mine: std::ops::Range<usize>| {
            passing[mine]
                .iter_mut()
                .map(|answer| answer.now_or_never().is_some())
                .collect::<Vec<_>>()
        };
        assert_eq!(passed(0..1), [true]);
        let turns = awaited.by_turns();
        assert_eq!(passed(1..5), [false; 4]);
        turns.next(2);
        assert_eq!(passed(1..5), [true, true, false, false]);
        turns.next(1);
        assert_eq!(passed(5..6), [false], "others came before");
        assert_eq!(passed(3..5), [true, false]);
        drop(turns);
        assert_eq!(passed(4..6), [true; 2]);
        assert_eq!(awaited.n(), 0);
    }
}
