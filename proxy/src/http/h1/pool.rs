//! Idle connections to one address.
//!
//! A server may close an idle connection at any time, and a request that arrives at that moment is lost. So the pool does not
//! use a connection in the last part of the server's keep-alive timeout. The server announces this timeout, or the pool
//! observes it.

use std::{
    cell::LazyCell,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::noop_waker_ref;
use http::Method;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, ReadBuf},
    task::coop::unconstrained,
    time::{Instant, sleep_until},
};

use crate::net::io::Io;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolConfig {
    pub(crate) idle_timeout: Duration,
    pub(crate) max_idle: usize,
    pub(crate) resend: ResendPolicy,
}

/// Which requests are sent again after a connection was lost without a response, although the server may have processed
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResendPolicy {
    Never,
    /// `GET`, `HEAD`, `OPTIONS` and `TRACE`.
    SafeMethods,
    /// Safe methods, `PUT` and `DELETE`.
    IdempotentMethods,
}

impl ResendPolicy {
    pub(crate) fn allows(self, method: &Method) -> bool {
        match self {
            Self::Never => false,
            Self::SafeMethods => method.is_safe(),
            Self::IdempotentMethods => method.is_idempotent(),
        }
    }
}

/// Idle connections of one worker to one address.
pub(crate) struct ConnectionPool {
    idle: Mutex<IdleConnections>,
    idle_timeout: Duration,
    max_idle: usize,
    pub(crate) resend: ResendPolicy,
}

#[derive(Default)]
struct IdleConnections {
    /// Oldest first.
    connections: Vec<(Box<Io>, Instant)>,
    /// Whether a task waits to close the oldest connection.
    sweep_is_running: bool,
    server_keep_alive: ServerKeepAlive,
}

/// Keep-alive timeout of the server, if known.
#[derive(Default)]
struct ServerKeepAlive {
    /// From the last response that announces it.
    announced: Option<Duration>,
    /// The age at which the server has closed two idle connections.
    observed: Option<ClosedConnection>,
    /// The last connection that the server has closed. A second one confirms its age.
    unconfirmed: Option<ClosedConnection>,
}

/// An idle connection that the server has closed.
#[derive(Clone, Copy)]
struct ClosedConnection {
    age: Duration,
    noticed_at: Instant,
}

impl ClosedConnection {
    fn is_recent(&self, now: Instant) -> bool {
        now - self.noticed_at < OBSERVED_KEEP_ALIVE_TTL
    }
}

impl ServerKeepAlive {
    /// Records a connection that was idle since `idle_since` and that the server has closed. A server that exits closes all
    /// connections at once, whatever their age. So an age counts as its keep-alive timeout only if a second connection, which
    /// became idle after the first closure was noticed, was closed too.
    fn record_closed(&mut self, idle_since: Instant, now: Instant) {
        let age = now - idle_since;
        if age < MIN_OBSERVED_IDLE_AGE {
            return;
        }
        let closed = ClosedConnection { age, noticed_at: now };
        match self.unconfirmed.filter(|first| first.is_recent(now)) {
            Some(first) if idle_since < first.noticed_at => return, // perhaps closed at the same time
            Some(first) => {
                let confirmed_age = first.age.max(age);
                let known = self.observed.filter(|known| known.is_recent(now));
                if known.is_none_or(|known| confirmed_age <= known.age) {
                    self.observed = Some(ClosedConnection {
                        age: confirmed_age,
                        noticed_at: now,
                    });
                }
            }
            None => {}
        }
        self.unconfirmed = Some(closed);
    }

    /// Age at which an idle connection is no longer used; `None` if unknown.
    fn max_idle_age(&self, now: Instant) -> Option<Duration> {
        let recent = || self.observed.filter(|known| known.is_recent(now));
        let keep_alive_timeout = self.announced.or_else(|| recent().map(|known| known.age))?;
        Some(keep_alive_timeout - KEEP_ALIVE_MARGIN.min(keep_alive_timeout / 2))
    }
}

/// Connections are not used in this last part of the server's keep-alive timeout. For a timeout below 2 s, it is half of the
/// timeout.
const KEEP_ALIVE_MARGIN: Duration = Duration::from_secs(1);
/// Minimum age of a closed idle connection that counts as an observation.
const MIN_OBSERVED_IDLE_AGE: Duration = Duration::from_millis(100);
/// Lifetime of the observed keep-alive timeout.
const OBSERVED_KEEP_ALIVE_TTL: Duration = Duration::from_secs(600);

impl ConnectionPool {
    pub(crate) fn new(idle_timeout: Duration, max_idle: usize, resend: ResendPolicy) -> Arc<Self> {
        Arc::new(Self {
            idle: Mutex::default(),
            idle_timeout,
            max_idle,
            resend,
        })
    }

    /// Stores the keep-alive timeout of a response; `None` keeps the previous one.
    pub(super) fn set_server_keep_alive(&self, keep_alive_timeout: Option<Duration>) {
        if keep_alive_timeout.is_some() {
            self.idle.lock().server_keep_alive.announced = keep_alive_timeout;
        }
    }

    /// Takes the most recently used connection that is open, not retired, and not in the last part of its keep-alive timeout.
    pub(crate) fn take(&self) -> Option<Box<Io>> {
        loop {
            let mut idle = self.idle.lock();
            let (mut io, idle_since) = idle.connections.pop()?;
            // The clock is read at most once, and not for a connection that cannot be too old.
            let now = LazyCell::new(Instant::now);
            if !is_usable(&mut io) {
                idle.server_keep_alive.record_closed(idle_since, *now);
                continue;
            }
            if io.is_retired(|| *now) {
                continue;
            }
            let is_known = idle.server_keep_alive.announced.is_some() || idle.server_keep_alive.observed.is_some();
            let is_old = is_known && {
                let limit = idle.server_keep_alive.max_idle_age(*now);
                limit.is_some_and(|limit| *now - idle_since >= limit)
            };
            if is_old {
                // All other idle connections are older.
                let old = std::mem::take(&mut idle.connections);
                drop(idle);
                drop((io, old));
                return None;
            }
            return Some(io);
        }
    }

    pub(super) fn put(self: &Arc<Self>, io: Box<Io>) {
        let now = Instant::now();
        let mut idle = self.idle.lock();
        let limit = self.idle_limit(&idle, now);
        if idle.connections.len() >= self.max_idle || limit.is_zero() {
            return;
        }
        idle.connections.push((io, now));
        if !idle.sweep_is_running {
            idle.sweep_is_running = true;
            tokio::spawn(close_idle(Arc::downgrade(self), now + limit));
        }
    }

    /// Maximum time a connection stays idle.
    fn idle_limit(&self, idle: &IdleConnections, now: Instant) -> Duration {
        let usable_for = idle.server_keep_alive.max_idle_age(now);
        usable_for.map_or(self.idle_timeout, |limit| limit.min(self.idle_timeout))
    }
}

/// Closes connections that have reached the idle limit. Ends when no idle connection is left or the pool is dropped.
async fn close_idle(pool: std::sync::Weak<ConnectionPool>, mut at: Instant) {
    loop {
        sleep_until(at).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        let mut idle = pool.idle.lock();
        let limit = pool.idle_limit(&idle, now);
        let n_old = idle
            .connections
            .partition_point(|(_, idle_since)| now - *idle_since >= limit);
        let old: Vec<_> = idle.connections.drain(..n_old).collect();
        let Some((_, oldest)) = idle.connections.first() else {
            idle.connections = Vec::new();
            idle.sweep_is_running = false;
            return;
        };
        // Waits for at least an eighth of the limit, so that one sweep closes many connections.
        at = (*oldest + limit).max(now + limit / 8);
        drop(idle);
        drop(old);
    }
}

/// Whether nothing has arrived on an idle connection. After a FIN or unexpected bytes it cannot be used.
fn is_usable(io: &mut Io) -> bool {
    let mut byte = [0];
    let mut buf = ReadBuf::new(&mut byte);
    let probe = poll_fn(|cx| Poll::Ready(Pin::new(&mut *io).poll_read(cx, &mut buf).is_pending()));
    // Without tokio's cooperative budget: a task that has used it up would get `Pending` even if the socket has data.
    let mut probe = pin!(unconstrained(probe));
    probe.as_mut().poll(&mut Context::from_waker(noop_waker_ref())) == Poll::Ready(true)
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::net::{io::Tcp, retirement::Retirement};

    /// A pool, and a function that opens a connection and also returns its server side.
    async fn pool() -> (Arc<ConnectionPool>, impl AsyncFn() -> (Box<Io>, TcpStream)) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let connect = async move || {
            let (ours, theirs) = tokio::join!(TcpStream::connect(addr), listener.accept());
            (Box::new(Io::tcp(Tcp::new(ours.unwrap()))), theirs.unwrap().0)
        };
        (
            ConnectionPool::new(Duration::from_secs(30), 10, ResendPolicy::IdempotentMethods),
            connect,
        )
    }

    #[tokio::test]
    async fn connections_are_not_used_near_the_end_of_the_keep_alive_timeout() {
        for (announced_secs, usable_for) in [(10, 9.0), (2, 1.0), (1, 0.5), (0, 0.0)] {
            let (pool, connect) = pool().await;
            let usable_for = Duration::from_secs_f64(usable_for);
            pool.set_server_keep_alive(Some(Duration::from_secs(announced_secs)));
            pool.set_server_keep_alive(None); // a response without keep-alive timeout
            tokio::time::pause();
            for (age, is_used) in [
                (usable_for.saturating_sub(Duration::from_millis(1)), announced_secs > 0),
                (usable_for, false),
            ] {
                let (io, _server) = connect().await;
                pool.put(io);
                tokio::time::advance(age).await;
                assert_eq!(pool.take().is_some(), is_used, "{announced_secs} s, after {age:?}");
            }
            tokio::time::resume();
        }
    }

    #[tokio::test]
    async fn a_retired_connection_is_not_used() {
        let (pool, connect) = pool().await;
        for (secs, is_used) in [(0, false), (60, true)] {
            let (io, _server) = connect().await;
            let retirement = Retirement {
                at: Instant::now() + Duration::from_secs(secs),
                anchor_removed_at: Arc::default(),
                delay_after_removal: Duration::ZERO,
            };
            pool.put(Box::new(io.retire(retirement)));
            assert_eq!(pool.take().is_some(), is_used, "retired in {secs} s");
        }
    }

    #[tokio::test]
    async fn the_keep_alive_timeout_is_learned_from_closed_connections() {
        let (pool, connect) = pool().await;
        tokio::time::pause();
        let advance = async |ms| tokio::time::advance(Duration::from_millis(ms)).await;
        for (age, closes, is_used) in [
            (50, true, false), // shortly after use, which does not count
            (6000, true, false),
            (20_000, false, true), // one observation does not count
            (6000, true, false),
            (4999, false, true),
            (5000, false, false),
            (4000, true, false),
            (4999, false, true),
            (4000, true, false),
            (3000, false, false),
            (2999, false, true),
        ] {
            let (io, server) = connect().await;
            pool.put(io);
            let _server = Some(server).filter(|_| !closes);
            advance(age).await;
            assert_eq!(pool.take().is_some(), is_used, "after {age} ms");
        }
        advance(600_000).await;
        let (io, _server) = connect().await;
        pool.put(io);
        advance(20_000).await;
        assert!(pool.take().is_some(), "the observation has expired");
    }

    #[tokio::test]
    async fn a_server_that_exits_and_closes_all_connections_has_no_keep_alive_timeout() {
        let (pool, connect) = pool().await;
        tokio::time::pause();
        for _ in 0..3 {
            let (io, server) = connect().await;
            pool.put(io);
            drop(server);
            tokio::time::advance(Duration::from_millis(150)).await;
        }
        assert!(pool.take().is_none());
        let (io, _server) = connect().await;
        pool.put(io);
        tokio::time::advance(Duration::from_secs(20)).await;
        assert!(pool.take().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_closed_before_the_server_closes_them() {
        let (pool, connect) = pool().await;
        pool.set_server_keep_alive(Some(Duration::from_secs(4)));
        let (io, _server) = connect().await;
        pool.put(io);
        tokio::time::sleep(Duration::from_millis(2900)).await;
        assert_eq!(pool.idle.lock().connections.len(), 1);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(pool.idle.lock().connections.len(), 0);
    }
}
