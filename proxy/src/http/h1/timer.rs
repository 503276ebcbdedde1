//! A timer that is set often and rarely fires: setting it notes a time, and the runtime's timer wheel, one a worker,
//! hears of it when the time noted before has passed.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::time::{Instant, Sleep, sleep_until};

#[derive(Default)]
pub(super) struct Timer {
    at: Option<Instant>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Timer {
    pub(super) fn set(&mut self, at: Instant) {
        self.at = Some(at);
        if let Some(sleep) = &mut self.sleep
            && sleep.deadline() > at
        {
            sleep.as_mut().reset(at);
        }
    }

    /// Ready once the time that was set last has come.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(at) = self.at else { return Poll::Pending };
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(at);
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
}
