//! A timer that is set often and rarely fires. Setting a later time only stores it; the runtime's timer is reset when the
//! earlier time has passed.

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
pub(super) struct ResettableTimer {
    at: Option<Instant>,
    entry: Option<SleepEntry>,
}

/// A sleep in the timer wheel of a runtime.
struct SleepEntry {
    runtime: Id,
    sleep: Pin<Box<Sleep>>,
}

thread_local! {
    /// Sleeps of dropped timers. They stay in the timer wheel for reuse, because each insertion and each removal locks the
    /// wheel, and an insertion that is earlier than all others also wakes the worker.
    ///
    /// A spare sleep keeps the waker of the task that polled it last. If it fires, this task is woken without need. If the
    /// task has ended, its memory is freed only when the sleep fires or another task polls the sleep.
    static SPARE_SLEEPS: RefCell<Vec<SleepEntry>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of sleeps that a thread keeps.
const MAX_SPARE_SLEEPS: usize = 64;

impl ResettableTimer {
    pub(super) fn set(&mut self, at: Instant) {
        self.at = Some(at);
        if let Some(entry) = &mut self.entry {
            entry.bring_forward(at);
        }
    }

    /// Ready when the last set time has passed. Pending if none was set.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(at) = self.at else { return Poll::Pending };
        let sleep = &mut self.entry.get_or_insert_with(|| SleepEntry::until(at)).sleep;
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(at);
        }
    }
}

impl Drop for ResettableTimer {
    fn drop(&mut self) {
        let Some(entry) = self.entry.take() else { return };
        // Fails when the thread ends; the sleep is dropped then.
        let _ = SPARE_SLEEPS.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MAX_SPARE_SLEEPS {
                spare.push(entry);
            }
        });
    }
}

impl SleepEntry {
    /// Returns a spare or new entry whose deadline is at most `at`.
    fn until(at: Instant) -> Self {
        let runtime = Handle::current().id();
        match SPARE_SLEEPS.with_borrow_mut(Vec::pop) {
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

    /// Makes the sleep end at `at` if it would end later.
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
    async fn the_last_set_time_counts() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut timer = ResettableTimer::default();
        for (first, last) in [(10, 30), (60, 40)] {
            timer.set(after(first));
            assert!(poll_fn(|cx| Poll::Ready(timer.poll(cx))).await.is_pending());
            timer.set(after(last));
            poll_fn(|cx| timer.poll(cx)).await;
            assert_eq!(begun.elapsed().as_secs(), last);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reused_sleep_fires_on_time() {
        for earlier_seconds in [1, 10, 60] {
            for fires in [false, true] {
                let mut earlier = ResettableTimer::default();
                earlier.set(Instant::now() + Duration::from_secs(earlier_seconds));
                match fires {
                    true => poll_fn(|cx| earlier.poll(cx)).await,
                    false => assert!(poll_fn(|cx| Poll::Ready(earlier.poll(cx))).await.is_pending()),
                }
                drop(earlier);
                let (begun, mut timer) = (Instant::now(), ResettableTimer::default());
                timer.set(begun + Duration::from_secs(10));
                poll_fn(|cx| timer.poll(cx)).await;
                assert_eq!(begun.elapsed().as_secs(), 10, "{earlier_seconds} {fires}");
            }
        }
    }

    #[test]
    fn a_sleep_is_not_reused_in_another_runtime() {
        for _ in 0..2 {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let mut timer = ResettableTimer::default();
                timer.set(Instant::now() + Duration::from_secs(1));
                poll_fn(|cx| timer.poll(cx)).await;
            });
        }
    }
}
