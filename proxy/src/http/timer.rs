//! A timer that is set often and rarely fires: setting it notes a time, and the runtime's timer wheel, one a worker,
//! hears of it when the time noted before has passed.

use std::{
    cell::RefCell,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep, sleep_until},
};

#[derive(Default)]
pub(super) struct Timer {
    at: Option<Instant>,
    entry: Option<Entry>,
}

/// A place in the wheel of a runtime.
struct Entry {
    runtime: Id,
    sleep: Pin<Box<Sleep>>,
}

thread_local! {
    /// What timers leave behind stays in the wheel for those that come: the way in and the way out each lock it, and the first
    /// one in wakes the worker. Who had it before may be woken once for nothing; what is left of a task that is over goes then.
    static SPARE: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
}

/// Entries that a thread keeps.
const ENTRIES: usize = 64;

impl Timer {
    pub(super) fn set(&mut self, at: Instant) {
        self.at = Some(at);
        if let Some(entry) = &mut self.entry {
            entry.bring_forward(at);
        }
    }

    /// Ready once the time that was set last has come.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(at) = self.at else { return Poll::Pending };
        let sleep = &mut self.entry.get_or_insert_with(|| Entry::until(at)).sleep;
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(at);
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let Some(entry) = self.entry.take() else { return };
        // A thread that ends keeps nothing.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < ENTRIES {
                spare.push(entry);
            }
        });
    }
}

impl Entry {
    /// An entry that does not stay beyond `at`.
    fn until(at: Instant) -> Self {
        let runtime = Handle::current().id();
        match SPARE.with_borrow_mut(Vec::pop) {
            Some(mut entry) if entry.runtime == runtime => {
                entry.bring_forward(at);
                entry
            }
            _ => Self {
                runtime,
                sleep: Box::pin(sleep_until(at)),
            },
        }
    }

    fn bring_forward(&mut self, at: Instant) {
        if self.sleep.deadline() > at {
            self.sleep.as_mut().reset(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_time_that_was_set_last_counts() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut timer = Timer::default();
        for (first, last) in [(10, 30), (60, 40)] {
            timer.set(after(first));
            assert!(poll_fn(|cx| Poll::Ready(timer.poll(cx))).await.is_pending());
            timer.set(after(last));
            poll_fn(|cx| timer.poll(cx)).await;
            assert_eq!(begun.elapsed().as_secs(), last);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_another_timer_left_behind_fires_neither_early_nor_late() {
        for left_at in [1, 10, 60] {
            for is_over in [false, true] {
                let mut left = Timer::default();
                left.set(Instant::now() + Duration::from_secs(left_at));
                match is_over {
                    true => poll_fn(|cx| left.poll(cx)).await,
                    false => assert!(poll_fn(|cx| Poll::Ready(left.poll(cx))).await.is_pending()),
                }
                drop(left);
                let (begun, mut timer) = (Instant::now(), Timer::default());
                timer.set(begun + Duration::from_secs(10));
                poll_fn(|cx| timer.poll(cx)).await;
                assert_eq!(begun.elapsed().as_secs(), 10, "{left_at} {is_over}");
            }
        }
    }

    #[test]
    fn nothing_is_left_behind_for_another_runtime() {
        for _ in 0..2 {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let mut timer = Timer::default();
                timer.set(Instant::now() + Duration::from_secs(1));
                poll_fn(|cx| timer.poll(cx)).await;
            });
        }
    }
}
