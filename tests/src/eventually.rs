//! Waits for a condition with a timeout, instead of a fixed sleep.

use std::time::Duration;

use tokio::time::Instant;

/// Polls `poll` until it returns a value.
///
/// # Panics
/// Panics if there is no value within 20 seconds; the message contains `what`.
pub async fn eventually<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(value) = poll().await {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "timed out after {WAIT_TIMEOUT:?}, waiting for: {what}"
        );
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
        assert!(
            Instant::now() < deadline,
            "timed out after {WAIT_TIMEOUT:?}, waiting for: {what}"
        );
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a future ends.
///
/// # Panics
/// Panics if it does not end within 20 seconds; the message contains `what`.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(WAIT_TIMEOUT, future).await;
    ended.unwrap_or_else(|_| panic!("timed out after {WAIT_TIMEOUT:?}, waiting for: {what}"))
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
