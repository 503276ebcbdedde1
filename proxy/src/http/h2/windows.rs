//! How far the windows of a connection are open. A body that nobody takes keeps what its stream may send; a few of them would keep
//! all that their connection may, and everybody else on it would wait for those who do not read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use crate::http::h2::Params;

/// Held for each message that may have a body on its way to us: how many hold it is how many there are.
#[derive(Clone, Default)]
pub(super) struct Member(Arc<Option<Arc<Waiters>>>);

impl Member {
    /// The first one of a connection, whose streams others wait for.
    pub(super) fn awaited_by(waiters: Arc<Waiters>) -> Self {
        Self(Arc::new(Some(waiters)))
    }

    /// How many there are; of this one and those of no message, too.
    pub(super) fn n_held(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(waiters) = &*self.0 {
            waiters.wake_one();
        }
    }
}

/// Requests that wait for a free stream on one of several connections.
pub(crate) struct Waiters {
    n: AtomicUsize,
    freed: Notify,
    /// Streams that the peer permits on a connection, as it said last: a new connection begins with it.
    pub(super) permitted: AtomicUsize,
}

impl Default for Waiters {
    fn default() -> Self {
        Self {
            n: AtomicUsize::new(0),
            freed: Notify::new(),
            permitted: AtomicUsize::new(INITIAL_MAX_STREAMS),
        }
    }
}

/// How many streams a peer permits as long as it has not said how many (RFC 9113, section 6.5.2: no less is recommended).
const INITIAL_MAX_STREAMS: usize = 100;

/// One that waits.
pub(crate) struct Waiting<'a>(&'a Waiters);

impl Waiters {
    pub(crate) fn enter(&self) -> Waiting<'_> {
        self.n.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    fn wake_one(&self) {
        if self.n.load(Ordering::Relaxed) > 0 {
            self.freed.notify_one();
        }
    }

    /// Has all of them look whether there is a stream for them.
    pub(super) fn wake_all(&self) {
        self.freed.notify_waiters();
    }
}

impl Waiting<'_> {
    /// Ready once a stream has become free, perhaps, since this was asked for and enabled.
    pub(crate) fn freed(&self) -> Notified<'_> {
        self.0.freed.notified()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.n.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Opens a connection as its members need it, and its streams the less the more there are.
pub(super) struct Windows {
    members: Member,
    params: Params,
    /// For how many members there is room, whatever they leave unread.
    room: usize,
    /// When there were last members for so much.
    needed: Instant,
}

/// What one stream, and all of them together, may send before it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) stream: u32,
    pub(super) connection: u32,
}

impl Windows {
    pub(super) fn new(params: &Params, members: Member) -> Self {
        Self {
            members,
            params: *params,
            room: at_first(params),
            needed: Instant::now(),
        }
    }

    pub(super) fn member(&self) -> Member {
        self.members.clone()
    }

    /// Has `set` change the windows if others fit the members better; what it refuses is tried again.
    pub(super) fn adapt<E>(&mut self, set: impl FnOnce(Sizes) -> Result<(), E>) {
        let (n, first) = (self.members.n_held(), at_first(&self.params));
        if n <= self.room && self.room == first {
            return;
        }
        if n > self.room / 8 {
            self.needed = Instant::now();
        }
        let room = if n > self.room || self.needed.elapsed() > CALM {
            n.next_power_of_two().max(first)
        } else {
            return;
        };
        if set(sizes(&self.params, room)).is_ok() {
            self.room = room;
        }
    }
}

/// How many members the windows have room for that a connection begins with.
fn at_first(params: &Params) -> usize {
    (params.connection_window / params.stream_window.max(1)).max(1) as usize
}

/// The windows for `room` members, of which those that came early may have been given more than the others.
fn sizes(params: &Params, room: usize) -> Sizes {
    let stream = |room: usize| {
        let share = u32::try_from(TOGETHER / room).unwrap_or(u32::MAX);
        share.max(LEAST).min(params.stream_window)
    };
    let (mut connection, mut n) = (params.connection_window as usize, at_first(params));
    while n < room {
        let more = (n * 2).min(room);
        connection += (more - n) * stream(more) as usize;
        n = more;
    }
    Sizes {
        stream: stream(room),
        connection: u32::try_from(connection)
            .unwrap_or(u32::MAX)
            .min(MOST.max(params.connection_window)),
    }
}

/// What streams share, in bytes, as long as each gets [`LEAST`].
const TOGETHER: usize = 16 << 20;
/// What a stream gets in any case: the protocol's own default (RFC 9113, section 6.9.2).
const LEAST: u32 = (1 << 16) - 1;
/// What a connection gets at most, unless more is configured: enough for some 4000 bodies that nobody reads, and for any number of
/// those that somebody does.
const MOST: u32 = 256 << 20;
/// How long there are few members before streams get more again.
const CALM: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_members_that_read_nothing_leave_room_for_late_ones() {
        let params = Params::default();
        let first = at_first(&params);
        let (mut hoarded, mut told) = (0, params.stream_window);
        for n in 1..3500_usize {
            let room = n.next_power_of_two().max(first);
            let sizes = sizes(&params, room);
            assert!(sizes.stream <= told, "{n} members");
            told = sizes.stream;
            assert!(hoarded + u64::from(told) <= u64::from(sizes.connection), "{n} members");
            hoarded += u64::from(told);
        }
        assert_eq!(sizes(&params, 1 << 20).connection, MOST);
    }

    #[test]
    fn what_is_configured_is_the_most_that_a_stream_gets() {
        let params = Params {
            stream_window: 1000,
            connection_window: 1 << 20,
            ..Params::default()
        };
        let room = at_first(&params);
        let [then, more] = [room, 2 * room].map(|room| sizes(&params, room));
        let stream = 1000;
        assert_eq!(
            then,
            Sizes {
                stream,
                connection: 1 << 20
            }
        );
        assert_eq!(
            more,
            Sizes {
                stream,
                connection: (1 << 20) + 1000 * room as u32
            }
        );
        assert_eq!(sizes(&params, 1 << 40).connection, MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn windows_follow_the_number_of_members() {
        let mut windows = Windows::new(&Params::default(), Member::default());
        let mut told = Vec::new();
        let mut adapt = |windows: &mut Windows| {
            windows.adapt(|sizes| {
                told.push(sizes.stream);
                Ok::<_, ()>(())
            });
        };
        adapt(&mut windows);
        let members: Vec<_> = (0..100).map(|_| windows.member()).collect();
        windows.adapt(|_| Err(())); // and again
        adapt(&mut windows);
        adapt(&mut windows);
        let few: Vec<_> = members.into_iter().take(10).collect();
        adapt(&mut windows);
        tokio::time::advance(CALM * 2).await;
        adapt(&mut windows); // there is room for ten as well
        adapt(&mut windows);
        drop(few);
        tokio::time::advance(CALM * 2).await;
        adapt(&mut windows);
        adapt(&mut windows);
        assert_eq!(told, [128 << 10, 1 << 20, 1 << 20]);
    }
}
