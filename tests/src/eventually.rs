//! Waiting for a condition instead of for a time.

use std::time::Duration;

use tokio::time::Instant;

/// Asks again and again until there is an answer.
///
/// # Panics
/// When there is none within twenty seconds; `what` says what was waited for.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}

const LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(10);
