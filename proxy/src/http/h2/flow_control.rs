//! Counts the open streams of a connection, wakes requests that wait for a free stream, and adapts the sizes of the flow-control
//! windows to the number of streams.
//!
//! An unread body holds the window of its stream. With fixed windows, a few unread bodies would use up the connection's
//! window and block all other streams.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use crate::http::h2::config::Http2Config;

/// Counts the open streams of a connection approximately, by the number of its clones. These hold a clone: each body that is
/// received, each upgraded stream, each sent request until its response head, and each upload that continues after that. Two
/// further clones belong to no stream (`N_TOKENS_WITHOUT_STREAMS` of server and client). Dropping a clone wakes a request that
/// waits for a stream.
#[derive(Clone, Default)]
pub(super) struct StreamToken(Arc<Option<Arc<StreamWaiters>>>);

/// A token that does not count until it is upgraded.
pub(super) struct WeakStreamToken(Weak<Option<Arc<StreamWaiters>>>);

impl WeakStreamToken {
    /// Returns `None` if the connection has ended.
    pub(super) fn upgrade(&self) -> Option<StreamToken> {
        self.0.upgrade().map(StreamToken)
    }
}

impl StreamToken {
    /// The first token of a connection that the proxy has dialled.
    pub(super) fn with_waiters(waiters: Arc<StreamWaiters>) -> Self {
        Self(Arc::new(Some(waiters)))
    }

    /// Number of clones, including those that belong to no stream.
    pub(super) fn n_tokens(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(super) fn downgrade(&self) -> WeakStreamToken {
        WeakStreamToken(Arc::downgrade(&self.0))
    }
}

impl Drop for StreamToken {
    fn drop(&mut self) {
        if let Some(waiters) = &*self.0 {
            waiters.wake_one();
        }
    }
}

/// Requests that wait for a free stream on any of several connections to one peer.
pub(crate) struct StreamWaiters {
    n_waiting: AtomicUsize,
    freed: Notify,
    /// Latest stream limit of the peer; the start value for new connections.
    pub(super) last_max_streams: AtomicUsize,
}

impl Default for StreamWaiters {
    fn default() -> Self {
        Self {
            n_waiting: AtomicUsize::new(0),
            freed: Notify::new(),
            last_max_streams: AtomicUsize::new(DEFAULT_MAX_STREAMS),
        }
    }
}

/// Stream limit of a peer whose settings have never arrived: the minimum that RFC 9113, section 6.5.2, recommends.
const DEFAULT_MAX_STREAMS: usize = 100;

/// A request that waits for a free stream.
pub(crate) struct StreamWaiter<'a>(&'a StreamWaiters);

impl StreamWaiters {
    pub(crate) fn enter(&self) -> StreamWaiter<'_> {
        self.n_waiting.fetch_add(1, Ordering::Relaxed);
        StreamWaiter(self)
    }

    fn wake_one(&self) {
        if self.n_waiting.load(Ordering::Relaxed) > 0 {
            self.freed.notify_one();
        }
    }

    /// Makes all waiting requests check for a free stream.
    pub(super) fn wake_all(&self) {
        self.freed.notify_waiters();
    }
}

impl StreamWaiter<'_> {
    /// Ready when a stream may have become free after the future was enabled.
    pub(crate) fn freed(&self) -> Notified<'_> {
        self.0.freed.notified()
    }
}

impl Drop for StreamWaiter<'_> {
    fn drop(&mut self) {
        self.0.n_waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Adapts the windows of a connection to its number of streams: the more streams, the smaller their windows.
pub(super) struct FlowControlWindows {
    token: StreamToken,
    params: Http2Config,
    /// Number of streams for which the current windows suffice, even if all bodies stay unread.
    n_sized_for: usize,
    /// When the number of open streams was last above an eighth of `n_sized_for`.
    last_needed_at: Instant,
}

/// Bytes that one stream, and all streams together, can send before any data is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowSizes {
    pub(super) stream: u32,
    pub(super) connection: u32,
}

impl FlowControlWindows {
    pub(super) fn new(params: &Http2Config, token: StreamToken) -> Self {
        Self {
            token,
            params: *params,
            n_sized_for: initial_streams(params),
            last_needed_at: Instant::now(),
        }
    }

    pub(super) fn token(&self) -> StreamToken {
        self.token.clone()
    }

    /// Shrinks the windows at once when there are more streams than they are sized for. Enlarges them when at most an eighth of
    /// that number of streams was open for [`WINDOW_GROW_DELAY`]. If `set` fails, the next call tries again.
    pub(super) fn adapt<E>(&mut self, set: impl FnOnce(WindowSizes) -> Result<(), E>) {
        // The number includes the two tokens that belong to no stream, which makes no difference for the sizes.
        let (n, n_initial) = (self.token.n_tokens(), initial_streams(&self.params));
        let must_shrink = n > self.n_sized_for;
        if !must_shrink && self.n_sized_for == n_initial {
            return; // the windows are as large as they can be
        }
        if n > self.n_sized_for / 8 {
            self.last_needed_at = Instant::now();
        }
        if !must_shrink && self.last_needed_at.elapsed() <= WINDOW_GROW_DELAY {
            return;
        }
        let n_streams = n.next_power_of_two().max(n_initial);
        if set(window_sizes(&self.params, n_streams)).is_ok() {
            self.n_sized_for = n_streams;
        }
    }
}

/// Number of streams that the initial windows are sized for.
fn initial_streams(params: &Http2Config) -> usize {
    (params.connection_window / params.stream_window.max(1)).max(1) as usize
}

/// Sizes of the windows for this number of streams.
///
/// A stream that was opened when windows were larger may still hold such a window of unread data. So the connection window is
/// the sum of the windows with which the streams were opened. The first [`initial_streams`] have the configured size. When the
/// number of streams doubles to `n`, the added `n / 2` streams have the stream window for `n` streams.
fn window_sizes(params: &Http2Config, n_streams: usize) -> WindowSizes {
    let stream = |n_streams: usize| {
        let stream_share = u32::try_from(SHARED_STREAM_WINDOW_BYTES / n_streams).unwrap_or(u32::MAX);
        stream_share.max(MIN_STREAM_WINDOW).min(params.stream_window)
    };
    let (mut connection, mut n) = (params.connection_window as usize, initial_streams(params));
    while n < n_streams {
        let next_n = (n * 2).min(n_streams);
        connection += (next_n - n) * stream(next_n) as usize;
        n = next_n;
    }
    WindowSizes {
        stream: stream(n_streams),
        connection: u32::try_from(connection)
            .unwrap_or(u32::MAX)
            .min(MAX_CONNECTION_WINDOW.max(params.connection_window)),
    }
}

/// Total size of all stream windows, if neither [`MIN_STREAM_WINDOW`] nor the configured window limits them.
const SHARED_STREAM_WINDOW_BYTES: usize = 16 << 20;
/// Minimum window of a stream: the protocol's default (RFC 9113, section 6.9.2).
const MIN_STREAM_WINDOW: u32 = (1 << 16) - 1;
/// Maximum window of a connection, unless a larger one is configured: enough for about 4000 unread bodies.
const MAX_CONNECTION_WINDOW: u32 = 256 << 20;
/// Time with few open streams after which the windows grow again.
const WINDOW_GROW_DELAY: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_early_streams_leave_a_window_for_later_streams() {
        let params = Http2Config::default();
        let first = initial_streams(&params);
        let (mut unread_bytes, mut stream_window) = (0, params.stream_window);
        for n in 1..3500_usize {
            let n_streams = n.next_power_of_two().max(first);
            let sizes = window_sizes(&params, n_streams);
            assert!(sizes.stream <= stream_window, "{n} streams");
            stream_window = sizes.stream;
            assert!(
                unread_bytes + u64::from(stream_window) <= u64::from(sizes.connection),
                "{n} streams"
            );
            unread_bytes += u64::from(stream_window);
        }
        assert_eq!(window_sizes(&params, 1 << 20).connection, MAX_CONNECTION_WINDOW);
    }

    #[test]
    fn the_configured_stream_window_is_the_maximum() {
        let params = Http2Config {
            stream_window: 1000,
            connection_window: 1 << 20,
            ..Http2Config::default()
        };
        let n_streams = initial_streams(&params);
        let [initial, larger] = [n_streams, 2 * n_streams].map(|n_streams| window_sizes(&params, n_streams));
        let stream = 1000;
        assert_eq!(
            initial,
            WindowSizes {
                stream,
                connection: 1 << 20
            }
        );
        assert_eq!(
            larger,
            WindowSizes {
                stream,
                connection: (1 << 20) + 1000 * n_streams as u32
            }
        );
        assert_eq!(window_sizes(&params, 1 << 40).connection, MAX_CONNECTION_WINDOW);
    }

    #[tokio::test(start_paused = true)]
    async fn windows_follow_the_number_of_streams() {
        let mut windows = FlowControlWindows::new(&Http2Config::default(), StreamToken::default());
        let mut windows_set = Vec::new();
        let mut adapt = |windows: &mut FlowControlWindows| {
            windows.adapt(|sizes| {
                windows_set.push(sizes.stream);
                Ok::<_, ()>(())
            });
        };
        adapt(&mut windows);
        let tokens: Vec<_> = (0..100).map(|_| windows.token()).collect();
        windows.adapt(|_| Err(())); // the next call tries again
        adapt(&mut windows);
        adapt(&mut windows);
        let few: Vec<_> = tokens.into_iter().take(10).collect();
        adapt(&mut windows);
        tokio::time::advance(WINDOW_GROW_DELAY * 2).await;
        adapt(&mut windows); // still sized for more than ten streams
        adapt(&mut windows);
        drop(few);
        tokio::time::advance(WINDOW_GROW_DELAY * 2).await;
        adapt(&mut windows);
        adapt(&mut windows);
        assert_eq!(windows_set, [128 << 10, 1 << 20, 1 << 20]);
    }
}
