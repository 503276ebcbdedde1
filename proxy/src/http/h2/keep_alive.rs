//! Detects dead peers with HTTP/2 pings.

use std::future::{pending, poll_fn};

use h2::{Ping, PingPong};
use tokio::time::{sleep, timeout};

use crate::http::h2::config::KeepAlive;

/// Ready when the peer has not answered a ping in time. Never ready without keep-alive.
///
/// While `cannot_answer` is true, the peer has more time.
pub(super) async fn wait_ping_timeout(
    keep_alive: Option<KeepAlive>,
    pings: Option<PingPong>,
    cannot_answer: impl Fn() -> bool,
) {
    let Some((keep_alive, mut pings)) = keep_alive.zip(pings) else {
        return pending().await;
    };
    loop {
        sleep(keep_alive.interval).await;
        if pings.send_ping(Ping::opaque()).is_err() {
            return pending().await; // the connection is ending and reports the error
        }
        loop {
            match timeout(keep_alive.timeout, poll_fn(|cx| pings.poll_pong(cx))).await {
                Ok(Ok(_)) => break,
                Ok(Err(_)) => return pending().await,
                Err(_) if cannot_answer() => {}
                Err(_) => return,
            }
        }
    }
}
