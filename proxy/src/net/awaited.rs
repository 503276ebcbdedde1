//! Answers that a worker waits for. When one comes the worker is awake, and may as well look after others.

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
};

use tokio::sync::Notify;

/// What one worker waits for.
pub(crate) struct Awaited {
    n: AtomicUsize,
    came: Notify,
    /// How many that have come may be passed on before somebody else's turn; only the worker itself counts.
    left: AtomicUsize,
}

/// An answer that is awaited until this is dropped.
pub(crate) struct Answer(Arc<Awaited>);

/// So long as there is this, only so many answers are passed on.
pub(crate) struct Turn<'a>(&'a Awaited);

thread_local! {
    static BY_THIS_WORKER: Arc<Awaited> = Arc::new(Awaited {
        n: AtomicUsize::new(0),
        came: Notify::new(),
        left: AtomicUsize::new(ANY_NUMBER),
    });
}

/// More than there can be.
const ANY_NUMBER: usize = usize::MAX;

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

    /// Has no more than `most` of them passed on until the turn ends.
    pub(crate) fn turn(&self, most: usize) -> Turn<'_> {
        self.left.store(most, Ordering::Relaxed);
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.left.store(ANY_NUMBER, Ordering::Relaxed);
    }
}

impl Answer {
    pub(crate) fn awaited() -> Self {
        let awaited = Awaited::by_this_worker();
        awaited.n.fetch_add(1, Ordering::Relaxed);
        Self(awaited)
    }

    /// Waits, now that it has come, until it may be passed on. Whoever has limited that must have heard of another by then.
    pub(crate) async fn may_pass(&self) {
        poll_fn(|cx| {
            let left = &self.0.left;
            match left.load(Ordering::Relaxed) {
                0 => {
                    cx.waker().wake_by_ref(); // behind all who have something to do
                    Poll::Pending
                }
                n => {
                    left.store(n - 1, Ordering::Relaxed);
                    Poll::Ready(())
                }
            }
        })
        .await;
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
    async fn only_so_many_answers_are_passed_on_before_the_turn_of_somebody_else() {
        let awaited = Awaited::by_this_worker();
        let answers = [(); 4].map(|()| Answer::awaited());
        let may_pass = || {
            answers
                .each_ref()
                .map(|answer| answer.may_pass().now_or_never().is_some())
        };
        assert_eq!(may_pass(), [true; 4]);
        let turn = awaited.turn(3);
        assert_eq!(may_pass(), [true, true, true, false]);
        drop(turn);
        assert_eq!(may_pass(), [true; 4]);
    }
}
