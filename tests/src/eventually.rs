//! Waiting for a condition, with a time limit, instead of a fixed sleep.

use std::time::Duration;

use tokio::time::Instant;

/// Polls `ask` until it returns a value.
///
/// # Panics
/// Panics if there is no value within 20 seconds; the message contains `what`.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {WAIT_TIMEOUT:?}: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Polls `condition` until it holds, in a test without a runtime.
///
/// # Panics
/// Panics if it does not hold within 20 seconds; the message contains `what`.
pub fn eventually_blocking(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {WAIT_TIMEOUT:?}: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a future ends.
///
/// # Panics
/// Panics if it does not end within 20 seconds; the message contains `what`.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(WAIT_TIMEOUT, future).await;
    ended.unwrap_or_else(|_| panic!("not within {WAIT_TIMEOUT:?}: {what}"))
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
