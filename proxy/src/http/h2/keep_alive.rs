//! Detects dead peers with HTTP/2 pings.

use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::http::h2::config::KeepAlive;

/// Requests for pings on the connections to one peer, in addition to those of the keep-alive.
pub(crate) struct PeerChecks {
    requested: Notify,
    n_connections: AtomicUsize,
    on_answer: Box<dyn Fn() + Send + Sync>,
}

impl PeerChecks {
    /// `on_answer` is called whenever the peer has answered a ping.
    pub(crate) fn new(on_answer: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            requested: Notify::new(),
            n_connections: AtomicUsize::new(0),
            on_answer: Box::new(on_answer),
        }
    }

    /// Whether a connection to the peer is open.
    pub(crate) fn has_connections(&self) -> bool {
        self.n_connections.load(Ordering::Relaxed) > 0
    }

    /// Sends a ping on each open connection, except on connections that wait for the answer to a ping.
    pub(crate) fn request(&self) {
        self.requested.notify_waiters();
    }
}

/// Counts an open connection while it exists.
struct ConnectionCount<'a>(Option<&'a PeerChecks>);

impl<'a> ConnectionCount<'a> {
    fn new(checks: Option<&'a PeerChecks>) -> Self {
        if let Some(checks) = checks {
            checks.n_connections.fetch_add(1, Ordering::Relaxed);
        }
        Self(checks)
    }
}

impl Drop for ConnectionCount<'_> {
    fn drop(&mut self) {
        if let Some(checks) = self.0 {
            checks.n_connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Ready when the peer has not answered a ping in time. Never ready without keep-alive.
///
/// If `cannot_answer` returns true when the time is over, the time starts again.
pub(super) async fn wait_ping_timeout(
    keep_alive: Option<KeepAlive>,
    checks: Option<&PeerChecks>,
    pings: Option<PingPong>,
    cannot_answer: impl Fn() -> bool,
) {
    let Some(mut pings) = pings else { return pending().await };
    let _count = ConnectionCount::new(checks);
    let time_limit = keep_alive.map_or(Duration::MAX, |keep_alive| keep_alive.timeout);
    loop {
        tokio::select! {
            () = wait_interval(keep_alive) => {}
            () = wait_request(checks) => {}
        }
        if pings.send_ping(Ping::opaque()).is_err() {
            return pending().await; // the connection is ending and reports the error
        }
        loop {
            match timeout(time_limit, poll_fn(|cx| pings.poll_pong(cx))).await {
                Ok(Ok(_)) => break,
                Ok(Err(_)) => return pending().await,
                Err(_) if cannot_answer() => {}
                Err(_) => return,
            }
        }
        if let Some(checks) = checks {
            (checks.on_answer)();
        }
    }
}

async fn wait_interval(keep_alive: Option<KeepAlive>) {
    match keep_alive {
        Some(keep_alive) => sleep(keep_alive.interval).await,
        None => pending().await,
    }
}

async fn wait_request(checks: Option<&PeerChecks>) {
    match checks {
        Some(checks) => checks.requested.notified().await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::duplex;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_requested_ping_is_answered_by_a_peer_that_is_reachable() {
        let (client, server) = duplex(4096);
        tokio::spawn(async move {
            let mut server = h2::server::handshake(server).await.unwrap();
            while server.accept().await.is_some() {}
        });
        let (_send, mut connection) = h2::client::handshake(client).await.unwrap();
        let pings = connection.ping_pong();
        tokio::spawn(connection);
        let n_answers = Arc::new(AtomicUsize::new(0));
        let counted = n_answers.clone();
        let checks = Arc::new(PeerChecks::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        let requested = checks.clone();
        tokio::spawn(async move { wait_ping_timeout(None, Some(&requested), pings, || false).await });
        let answered = async {
            for expected in 1..=3 {
                while n_answers.load(Ordering::Relaxed) < expected {
                    checks.request();
                    yield_now().await;
                }
            }
        };
        timeout(Duration::from_secs(10), answered).await.unwrap();
        assert!(checks.has_connections());
    }
}
