//! Counts the responses that a worker waits for. Each arrival of a response wakes the worker, which can then also do other work.
//! Then the response is released to its client; during a burst of clients, a few at a time.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{Notify, Semaphore};

/// The pending responses of one worker.
pub(crate) struct PendingResponses {
    n: AtomicUsize,
    released: Notify,
    /// One permit for each response that may be released now.
    release_permits: Semaphore,
}

/// A response that is pending from its request until it is released to its client, or until this is dropped.
pub(crate) struct PendingResponse(Arc<PendingResponses>);

/// While this exists, responses are released a few at a time.
pub(crate) struct ReleaseThrottle(Arc<PendingResponses>);

thread_local! {
    static PENDING: Arc<PendingResponses> = Arc::new(PendingResponses {
        n: AtomicUsize::new(0),
        released: Notify::new(),
        release_permits: Semaphore::new(UNLIMITED_PERMITS),
    });
}

/// Larger than any possible number of pending responses.
const UNLIMITED_PERMITS: usize = Semaphore::MAX_PERMITS / 2;

impl PendingResponses {
    pub(crate) fn current() -> Arc<Self> {
        PENDING.with(Arc::clone)
    }

    pub(crate) fn n_pending(&self) -> usize {
        self.n.load(Ordering::Relaxed)
    }

    /// Waits until any pending response is released or dropped.
    pub(crate) async fn wait_for_release_of_any(&self) {
        self.released.notified().await;
    }

    /// From now on, responses are released only by [`ReleaseThrottle::release`]. If there are several throttles, the latest call
    /// decides, and dropping any of them ends throttling.
    pub(crate) fn throttle(self: &Arc<Self>) -> ReleaseThrottle {
        self.release_permits.forget_permits(UNLIMITED_PERMITS);
        ReleaseThrottle(self.clone())
    }

    /// Allows exactly `n` responses to be released.
    fn set_permits(&self, n: usize) {
        self.release_permits.forget_permits(UNLIMITED_PERMITS);
        self.release_permits.add_permits(n);
    }
}

impl ReleaseThrottle {
    /// Allows the next `n` responses to be released, the longest waiting first.
    pub(crate) fn release(&self, n: usize) {
        self.0.set_permits(n);
    }
}

impl Drop for ReleaseThrottle {
    fn drop(&mut self) {
        self.0.set_permits(UNLIMITED_PERMITS);
    }
}

impl PendingResponse {
    pub(crate) fn register() -> Self {
        let responses = PendingResponses::current();
        responses.n.fetch_add(1, Ordering::Relaxed);
        Self(responses)
    }

    /// Waits until this response, which has arrived, is released.
    pub(crate) async fn wait_for_release(self) {
        if let Ok(permit) = self.0.release_permits.acquire().await {
            permit.forget();
        }
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        self.0.n.fetch_sub(1, Ordering::Relaxed);
        self.0.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn every_waiter_is_notified_when_a_response_is_dropped() {
        let responses = PendingResponses::current();
        assert_eq!(responses.n_pending(), 0);
        let (first, second) = (PendingResponse::register(), PendingResponse::register());
        assert_eq!(responses.n_pending(), 2);
        let mut waiters = [(); 2].map(|()| Box::pin(responses.wait_for_release_of_any()));
        for waiter in &mut waiters {
            assert!(waiter.now_or_never().is_none());
        }
        drop(first);
        assert_eq!(responses.n_pending(), 1);
        for waiter in waiters {
            assert!(waiter.now_or_never().is_some());
        }
        assert!(
            responses.wait_for_release_of_any().now_or_never().is_none(),
            "the second is still pending"
        );
        drop(second);
    }

    #[tokio::test]
    async fn throttled_responses_are_released_in_order() {
        let responses = PendingResponses::current();
        let mut releases = [(); 6].map(|()| Box::pin(PendingResponse::register().wait_for_release()));
        let mut is_released = |range: std::ops::Range<usize>| {
            releases[range]
                .iter_mut()
                .map(|release| release.now_or_never().is_some())
                .collect::<Vec<_>>()
        };
        assert_eq!(is_released(0..1), [true]);
        let throttle = responses.throttle();
        assert_eq!(is_released(1..5), [false; 4]);
        throttle.release(2);
        assert_eq!(is_released(1..5), [true, true, false, false]);
        throttle.release(1);
        assert_eq!(is_released(5..6), [false], "others came before");
        assert_eq!(is_released(3..5), [true, false]);
        drop(throttle);
        assert_eq!(is_released(4..6), [true; 2]);
        assert_eq!(responses.n_pending(), 0);
    }
}
