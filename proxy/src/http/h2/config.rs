//! Settings of HTTP/2 connections.

use std::time::Duration;

/// HTTP/2 settings of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Http2Config {
    /// Flow-control window of a stream, in bytes.
    pub(crate) stream_window: u32,
    /// Flow-control window of a connection, in bytes.
    pub(crate) connection_window: u32,
    pub(crate) keep_alive: Option<KeepAlive>,
    /// Maximum frame size to receive, in bytes. `None`: [`LARGE_FRAME_SIZE`](Self::LARGE_FRAME_SIZE) on connections to servers and
    /// on TLS connections from clients; 16 KiB, the protocol's default, on plaintext connections from clients.
    pub(crate) max_frame_size: Option<u32>,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS` sent to clients; `None` sends no limit. Not used on connections to servers.
    pub(crate) max_concurrent_streams: Option<u32>,
    pub(crate) max_send_buffer_bytes: Option<usize>,
    /// Maximum number of streams that a client has opened and reset before the server has accepted them.
    pub(crate) max_pending_reset_streams: Option<usize>,
    /// On connections to servers: maximum number of streams reset by this proxy that `h2` remembers, so that it ignores their late
    /// frames.
    pub(crate) max_reset_streams: Option<usize>,
    /// Maximum header list size of one request or response, in bytes.
    pub(crate) max_header_list_bytes: u32,
    /// Maximum total header list size of the requests in flight on one connection, in bytes.
    pub(crate) max_total_header_list_bytes: usize,
}

/// Pings that detect a dead peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeepAlive {
    pub(crate) interval: Duration,
    pub(crate) timeout: Duration,
}

impl Default for Http2Config {
    fn default() -> Self {
        Self {
            // 1 MiB and 4 MiB use 40 % less CPU in bulk transfers than the protocol's 64 KiB; more brings no gain.
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            keep_alive: None,
            max_frame_size: None,
            max_concurrent_streams: None,
            max_send_buffer_bytes: None,
            max_pending_reset_streams: None,
            max_reset_streams: None,
            max_header_list_bytes: Self::header_list_limit(64 << 10),
            max_total_header_list_bytes: Self::DEFAULT_TOTAL_HEADER_LIST_BYTES,
        }
    }
}

impl Http2Config {
    /// Frame size with which large chunks of a body fit into one frame: bulk transfers use 4 % less CPU than with the
    /// protocol's 16 KiB. Plaintext clients get 16 KiB, as from most servers.
    pub(crate) const LARGE_FRAME_SIZE: u32 = 64 << 10;

    /// 16 MiB: enough for about 16,000 requests of usual size. A peer's proxy sends all requests of a worker on one connection.
    pub(crate) const DEFAULT_TOTAL_HEADER_LIST_BYTES: usize = 16 << 20;

    /// The header list limit that corresponds to `max_head_bytes`, the limit of an HTTP/1 head: four times as much. A line of
    /// `n` bytes in HTTP/1, with its colon, space and CRLF, has a size of `n + 28` in a header list (RFC 9113, section 6.5.2),
    /// which is less than `4 * n` for lines of 10 bytes or more.
    pub(crate) fn header_list_limit(max_head_bytes: usize) -> u32 {
        u32::try_from(max_head_bytes.saturating_mul(4)).unwrap_or(u32::MAX)
    }
}
