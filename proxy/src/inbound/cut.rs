//! What goes on unless something happens that hardly ever does.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use pin_project_lite::pin_project;

/// Whether what was waited for may have happened.
struct Woken {
    is_set: AtomicBool,
    /// Who waits.
    task: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.is_set.store(true, Ordering::Release);
        self.task.wake_by_ref();
    }
}

/// Does something to its end, or until `stopped` is ready, which is asked only when it may be: whatever wakes the rest, and that
/// is every request of a connection, costs a look at one flag. All of it has to stay in the task that begins it.
pub(super) fn unless<S, D>(stopped: S, doing: D) -> Unless<S, D> {
    Unless {
        stopped,
        doing,
        woken: None,
    }
}

pin_project! {
    // An async function would hold both twice: there is one for each connection.
    pub(super) struct Unless<S, D> {
        #[pin]
        stopped: S,
        #[pin]
        doing: D,
        woken: Option<Arc<Woken>>,
    }
}

impl<S: Future<Output = ()>, D: Future> Future for Unless<S, D> {
    type Output = Option<D::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(done) = this.doing.poll(cx) {
            return Poll::Ready(Some(done));
        }
        let woken = this.woken.get_or_insert_with(|| {
            Arc::new(Woken {
                is_set: AtomicBool::new(true),
                task: cx.waker().clone(),
            })
        });
        if woken.is_set.load(Ordering::Acquire) {
            // What sets it from here on is seen next time, and what did before is seen now.
            woken.is_set.store(false, Ordering::Release);
            let waker = Waker::from(woken.clone());
            return this.stopped.poll(&mut Context::from_waker(&waker)).map(|()| None);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        future::{pending, poll_fn},
        pin::pin,
    };

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn what_would_stop_it_is_asked_only_when_it_may() {
        let (work, stop, n_asked) = (Notify::new(), Notify::new(), Cell::new(0));
        let mut stopped = pin!(stop.notified());
        let stopped = poll_fn(|cx| {
            n_asked.set(n_asked.get() + 1);
            stopped.as_mut().poll(cx)
        });
        let doing = async {
            for _ in 0..9 {
                work.notified().await;
            }
            pending::<()>().await;
        };
        let others = async {
            for _ in 0..9 {
                work.notify_one();
                tokio::task::yield_now().await;
            }
            assert_eq!(n_asked.get(), 1);
            stop.notify_one();
        };
        let (done, ()) = tokio::join!(tokio::task::unconstrained(unless(stopped, doing)), others);
        assert_eq!((done, n_asked.get()), (None, 2));
        assert_eq!(unless(pending(), async { 1 }).await, Some(1));
    }
}
