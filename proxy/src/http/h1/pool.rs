//! Connections to one address that are kept for the next request.
//!
//! A server may close an idle connection at any time, and a request that is on its way then is lost. So a connection is not used
//! in the last part of the time that its server keeps it for: as the server says, or as it turned out before.

use std::{
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

use crate::{http::h1::client::Connection, net::io::Io};

/// Which requests are sent again that a lost connection has left without a response, though they may have been processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resend {
    Never,
    /// `GET`, `HEAD`, `OPTIONS` and `TRACE`.
    Safe,
    /// These, `PUT` and `DELETE`.
    Idempotent,
}

impl Resend {
    pub(crate) fn permits(self, method: &Method) -> bool {
        match self {
            Self::Never => false,
            Self::Safe => method.is_safe(),
            Self::Idempotent => method.is_idempotent(),
        }
    }
}

/// Idle connections to one address, of one worker.
pub(crate) struct Pool {
    idle: Mutex<Idle>,
    idle_timeout: Duration,
    max_idle: usize,
    pub(crate) resend: Resend,
}

#[derive(Default)]
struct Idle {
    /// Oldest first.
    connections: Vec<(Box<Io>, Instant)>,
    /// Whether a task is waiting to close the oldest.
    swept: bool,
    server: Server,
}

/// For how long the server keeps an idle connection, as far as is known.
#[derive(Default)]
struct Server {
    /// As it said last.
    told: Option<Duration>,
    /// The least age of an idle connection that it has closed, and when that was noticed last.
    closed: Option<(Duration, Instant)>,
}

impl Server {
    /// Notes that an idle connection of this age was closed.
    fn has_closed(&mut self, age: Duration, now: Instant) {
        if age < LEAST_AGE {
            return; // it may have ended, with all of its connections
        }
        let known = self.closed.filter(|(_, at)| now - *at < REMEMBERED);
        let least = known.map_or(age, |(known, _)| known.min(age));
        self.closed = Some((least, now));
    }

    /// The age from which on an idle connection is not used, where that is known.
    fn usable_for(&self, now: Instant) -> Option<Duration> {
        let closed = || self.closed.filter(|(_, at)| now - *at < REMEMBERED);
        let kept_for = self.told.or_else(|| closed().map(|(age, _)| age))?;
        Some(kept_for - MARGIN.min(kept_for / 2))
    }
}

/// What is left of the time that a server keeps an idle connection for when it is not used any more; half of a shorter time.
const MARGIN: Duration = Duration::from_secs(1);
/// Age of an idle connection whose end says nothing about the others.
const LEAST_AGE: Duration = Duration::from_millis(100);
/// How long it counts at which age idle connections were closed.
const REMEMBERED: Duration = Duration::from_secs(600);

impl Pool {
    pub(crate) fn new(idle_timeout: Duration, max_idle: usize, resend: Resend) -> Arc<Self> {
        Arc::new(Self {
            idle: Mutex::default(),
            idle_timeout,
            max_idle,
            resend,
        })
    }

    /// Notes how long the server says that it keeps idle connections.
    pub(super) fn told(&self, kept_for: Option<Duration>) {
        if kept_for.is_some() {
            self.idle.lock().server.told = kept_for;
        }
    }

    /// The connection used last that is still open, and will be for a while.
    pub(crate) fn take(&self) -> Option<Connection> {
        loop {
            let mut idle = self.idle.lock();
            let (mut io, since) = idle.connections.pop()?;
            if !is_quiet(&mut io) {
                let now = Instant::now();
                idle.server.has_closed(now - since, now);
                continue;
            }
            let is_known = idle.server.told.is_some() || idle.server.closed.is_some();
            let now = is_known.then(Instant::now);
            let is_old = now.is_some_and(|now| {
                let limit = idle.server.usable_for(now);
                limit.is_some_and(|limit| now - since >= limit)
            });
            if is_old {
                // The others are older.
                let old = std::mem::take(&mut idle.connections);
                drop(idle);
                drop((io, old));
                return None;
            }
            return Some(Connection::reused(io));
        }
    }

    pub(super) fn put(self: &Arc<Self>, io: Box<Io>) {
        let now = Instant::now();
        let mut idle = self.idle.lock();
        let limit = self.limit(&idle, now);
        if idle.connections.len() >= self.max_idle || limit.is_zero() {
            return;
        }
        idle.connections.push((io, now));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), now + limit));
        }
    }

    /// How long a connection may be idle.
    fn limit(&self, idle: &Idle, now: Instant) -> Duration {
        let usable_for = idle.server.usable_for(now);
        usable_for.map_or(self.idle_timeout, |limit| limit.min(self.idle_timeout))
    }
}

/// Closes connections that have been idle for the limit; ends with the last one or with the pool.
async fn sweep(pool: std::sync::Weak<Pool>, mut at: Instant) {
    loop {
        sleep_until(at).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        let mut idle = pool.idle.lock();
        let limit = pool.limit(&idle, now);
        let n_old = idle.connections.partition_point(|(_, since)| now - *since >= limit);
        let old: Vec<_> = idle.connections.drain(..n_old).collect();
        let Some((_, oldest)) = idle.connections.first() else {
            idle.connections = Vec::new();
            idle.swept = false;
            return;
        };
        // Not for each of many.
        at = (*oldest + limit).max(now + limit / 8);
        drop(idle);
        drop(old);
    }
}

/// True when nothing has arrived on an idle connection: an end or stray bytes make it useless.
fn is_quiet(io: &mut Io) -> bool {
    let mut byte = [0];
    let mut buf = ReadBuf::new(&mut byte);
    let look = poll_fn(|cx| Poll::Ready(Pin::new(&mut *io).poll_read(cx, &mut buf).is_pending()));
    // A task that has done much in its turn would be told to wait, and not what there is.
    let mut look = pin!(unconstrained(look));
    look.as_mut().poll(&mut Context::from_waker(noop_waker_ref())) == Poll::Ready(true)
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::net::io::Tcp;

    /// A pool, and what gives a connection to put into it, with the server's end of it.
    async fn pool() -> (Arc<Pool>, impl AsyncFn() -> (Box<Io>, TcpStream)) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let connect = async move || {
            let (ours, theirs) = tokio::join!(TcpStream::connect(addr), listener.accept());
            (Box::new(Io::tcp(Tcp::new(ours.unwrap()))), theirs.unwrap().0)
        };
        (Pool::new(Duration::from_secs(30), 10, Resend::Idempotent), connect)
    }

    #[tokio::test]
    async fn a_connection_is_not_used_in_the_last_part_of_the_time_that_its_server_keeps_it() {
        for (told, usable_for) in [(10, 9.0), (2, 1.0), (1, 0.5), (0, 0.0)] {
            let (pool, connect) = pool().await;
            let usable_for = Duration::from_secs_f64(usable_for);
            pool.told(Some(Duration::from_secs(told)));
            pool.told(None); // a response that says nothing
            tokio::time::pause();
            for (age, is_used) in [
                (usable_for.saturating_sub(Duration::from_millis(1)), told > 0),
                (usable_for, false),
            ] {
                let (io, _server) = connect().await;
                pool.put(io);
                tokio::time::advance(age).await;
                assert_eq!(pool.take().is_some(), is_used, "{told} s, after {age:?}");
            }
            tokio::time::resume();
        }
    }

    #[tokio::test]
    async fn a_server_that_says_nothing_is_known_by_when_it_has_closed() {
        let (pool, connect) = pool().await;
        tokio::time::pause();
        let advance = async |ms| tokio::time::advance(Duration::from_millis(ms)).await;
        // As it does when it ends.
        let (io, server) = connect().await;
        pool.put(io);
        drop(server);
        advance(50).await;
        assert!(pool.take().is_none());
        for (age, closes, is_used) in [
            (20_000, false, true),
            (6000, true, false),
            (4999, false, true),
            (5000, false, false),
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
        assert!(pool.take().is_some(), "it is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_closed_before_their_server_does() {
        let (pool, connect) = pool().await;
        pool.told(Some(Duration::from_secs(4)));
        let (io, _server) = connect().await;
        pool.put(io);
        tokio::time::sleep(Duration::from_millis(2900)).await;
        assert_eq!(pool.idle.lock().connections.len(), 1);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(pool.idle.lock().connections.len(), 0);
    }
}
