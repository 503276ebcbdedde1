//! Connections to one address that are kept for the next request.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::noop_waker_ref;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, ReadBuf},
    task::coop::unconstrained,
    time::Instant,
};

use crate::{http::h1::client::Connection, net::io::Io};

/// Idle connections to one address, of one worker.
pub(crate) struct Pool {
    idle: Mutex<Idle>,
    idle_timeout: Duration,
    max_idle: usize,
}

#[derive(Default)]
struct Idle {
    /// Oldest first.
    connections: Vec<(Box<Io>, Instant)>,
    /// Whether a task is waiting to close the oldest.
    swept: bool,
}

impl Pool {
    pub(crate) fn new(idle_timeout: Duration, max_idle: usize) -> Arc<Self> {
        Arc::new(Self {
            idle: Mutex::default(),
            idle_timeout,
            max_idle,
        })
    }

    /// The connection used last that is still open.
    pub(crate) fn take(&self) -> Option<Connection> {
        loop {
            let (mut io, _) = self.idle.lock().connections.pop()?;
            if is_quiet(&mut io) {
                return Some(Connection::reused(io));
            }
        }
    }

    pub(super) fn put(self: &Arc<Self>, io: Box<Io>) {
        let mut idle = self.idle.lock();
        if idle.connections.len() >= self.max_idle {
            return;
        }
        idle.connections.push((io, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), self.idle_timeout));
        }
    }
}

/// Closes connections that have been idle for the limit; ends with the last one or with the pool.
async fn sweep(pool: std::sync::Weak<Pool>, limit: Duration) {
    loop {
        tokio::time::sleep(limit).await;
        let Some(pool) = pool.upgrade() else { return };
        let now = Instant::now();
        let mut idle = pool.idle.lock();
        idle.connections.retain(|(_, since)| now.duration_since(*since) < limit);
        if idle.connections.is_empty() {
            idle.connections = Vec::new();
            idle.swept = false;
            return;
        }
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
