//! Detects dead peers with HTTP/2 pings.

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{AbortHandle, Abortable};
use h2::{Ping, PingPong};
use tokio::sync::Notify;
use tokio::task::JoinSet;
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
struct ConnectionCount(Arc<PeerChecks>);

impl ConnectionCount {
    fn new(checks: Arc<PeerChecks>) -> Self {
        checks.n_connections.fetch_add(1, Ordering::Relaxed);
        Self(checks)
    }
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.n_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The pings of one connection.
pub(super) struct Pinger {
    pings: PingPong,
    keep_alive: Option<KeepAlive>,
    checks: Option<ConnectionCount>,
}

/// The peer did not answer a ping in time.
pub(super) struct PingTimeout;

impl Pinger {
    /// `None` without keep-alive and checks, because then there are no pings.
    pub(super) fn new(
        pings: Option<PingPong>,
        keep_alive: Option<KeepAlive>,
        checks: Option<Arc<PeerChecks>>,
    ) -> Option<Self> {
        if keep_alive.is_none() && checks.is_none() {
            return None;
        }
        Some(Self {
            pings: pings?,
            keep_alive,
            checks: checks.map(ConnectionCount::new),
        })
    }

    /// Ready when the peer has not answered a ping in time.
    ///
    /// If `cannot_answer` returns true when the time is over, the time starts again.
    async fn wait_timeout(mut self, cannot_answer: impl Fn() -> bool) {
        let checks = self.checks.as_ref().map(|count| &*count.0);
        let time_limit = self.keep_alive.map_or(Duration::MAX, |keep_alive| keep_alive.timeout);
        loop {
            tokio::select! {
                () = wait_interval(self.keep_alive) => {}
                () = wait_request(checks) => {}
            }
            if self.pings.send_ping(Ping::opaque()).is_err() {
                return pending().await; // the connection is ending and reports the error
            }
            loop {
                match timeout(time_limit, poll_fn(|cx| self.pings.poll_pong(cx))).await {
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
}

/// Polls `connection` until it ends or the peer does not answer a ping.
///
/// The pings have a task of their own. In the task of the connection, each frame would poll their timers, which costs 1.8 % of the
/// instructions of a request.
pub(super) async fn until_ping_timeout<T>(
    connection: impl Future<Output = T>,
    pinger: Option<Pinger>,
    cannot_answer: impl Fn() -> bool + Send + 'static,
) -> Result<T, PingTimeout> {
    let Some(pinger) = pinger else {
        return Ok(connection.await);
    };
    let (connection_end, registration) = AbortHandle::new_pair();
    let mut ping_task = JoinSet::new(); // ends its task when it is dropped
    ping_task.spawn(async move {
        pinger.wait_timeout(cannot_answer).await;
        connection_end.abort();
    });
    Abortable::new(connection, registration)
        .await
        .map_err(|_aborted| PingTimeout)
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
        let pinger = Pinger::new(pings, None, Some(checks.clone())).unwrap();
        tokio::spawn(pinger.wait_timeout(|| false));
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
