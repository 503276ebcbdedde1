//! Detects dead peers with HTTP/2 pings.

use h2::PingPong;

use crate::http::h2::config::KeepAlive;

/// Ready when the peer has not answered a ping in time. Never ready without keep-alive.
pub(super) async fn wait_ping_timeout(keep_alive: Option<KeepAlive>, pings: Option<PingPong>) {
    let Some((keep_alive, mut pings)) = keep_alive.zip(pings) else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(keep_alive.interval).await;
        match tokio::time::timeout(keep_alive.timeout, pings.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => std::future::pending().await, // the connection is ending and reports the error
            Err(_) => return,
        }
    }
}
