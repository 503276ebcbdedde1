//! Runs a future until a stop future completes. Efficient if the stop future is rarely woken.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use pin_project_lite::pin_project;

/// Wakes the task, and records that the stop future was woken.
struct StopWaker {
    is_woken: AtomicBool,
    task_waker: Waker,
}

impl Wake for StopWaker {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.task_waker.wake_by_ref();
    }
}

/// Runs `future` until it completes. Returns `None` if `stop_future` completes first. After its first poll, `stop_future` is
/// polled only when its own waker was called, so each poll of `future` costs one atomic load. The returned future must stay in
/// the task that polled it first.
pub(super) fn run_until<S, D>(stop_future: S, future: D) -> RunUntil<S, D> {
    RunUntil {
        stop_future,
        future,
        stop_waker: None,
    }
}

pin_project! {
    // This is not an async function, because that would store both futures twice in each connection.
    pub(super) struct RunUntil<S, D> {
        #[pin]
        stop_future: S,
        #[pin]
        future: D,
        stop_waker: Option<Arc<StopWaker>>,
    }
}

impl<S: Future<Output = ()>, D: Future> Future for RunUntil<S, D> {
    type Output = Option<D::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(done) = this.future.poll(cx) {
            return Poll::Ready(Some(done));
        }
        let stop_waker = this.stop_waker.get_or_insert_with(|| {
            Arc::new(StopWaker {
                is_woken: AtomicBool::new(true), // so that the first poll also polls the stop future
                task_waker: cx.waker().clone(),
            })
        });
        if stop_waker.is_woken.load(Ordering::Acquire) {
            // Cleared before the poll, so that a wake-up during the poll is kept for the next one.
            stop_waker.is_woken.store(false, Ordering::Release);
            let waker = Waker::from(stop_waker.clone());
            return this.stop_future.poll(&mut Context::from_waker(&waker)).map(|()| None);
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
    async fn the_stop_future_is_polled_only_after_a_wakeup() {
        let (work, stop, n_polls) = (Notify::new(), Notify::new(), Cell::new(0));
        let mut stop_future = pin!(stop.notified());
        let stop_future = poll_fn(|cx| {
            n_polls.set(n_polls.get() + 1);
            stop_future.as_mut().poll(cx)
        });
        let future = async {
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
            assert_eq!(n_polls.get(), 1);
            stop.notify_one();
        };
        let (done, ()) = tokio::join!(tokio::task::unconstrained(run_until(stop_future, future)), others);
        assert_eq!((done, n_polls.get()), (None, 2));
        assert_eq!(run_until(pending(), async { 1 }).await, Some(1));
    }
}
