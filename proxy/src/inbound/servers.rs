//! How clients are served over HTTP, by what the policy permits them and who they are.

use std::time::Duration;

use crate::http::server;

/// How clients are served over HTTP.
pub(crate) struct Servers {
    /// Those with an identity.
    pub(crate) peers: server::Config,
    /// Those without, where the policy permits them something.
    pub(crate) strangers: server::Config,
    /// Those whom the policy permits nothing when they come.
    pub(crate) unauthorized: server::Config,
}

impl Servers {
    /// From what peers get.
    pub(crate) fn new(peers: server::Config) -> Self {
        let bounded = |bound: u32| Some(peers.http2.max_concurrent_streams.unwrap_or(bound).min(bound));
        let mut strangers = peers;
        strangers.http2.max_concurrent_streams = bounded(MAX_STRANGER_STREAMS);
        let mut unauthorized = peers;
        unauthorized.http2.max_concurrent_streams = bounded(MAX_UNAUTHORIZED_STREAMS);
        unauthorized.http2.max_header_list = peers.http2.max_header_list.min(MAX_UNAUTHORIZED_HEADER_LIST);
        unauthorized.http2.stream_window = peers.http2.stream_window.min(MAX_UNAUTHORIZED_WINDOW);
        unauthorized.http2.connection_window = peers.http2.connection_window.min(MAX_UNAUTHORIZED_WINDOW);
        unauthorized.http1.head_timeout = peers.http1.head_timeout.min(UNAUTHORIZED_IDLE_TIMEOUT);
        unauthorized.http1.idle_timeout = peers.http1.idle_timeout.min(UNAUTHORIZED_IDLE_TIMEOUT);
        Self {
            peers,
            strangers,
            unauthorized,
        }
    }
}

/// Concurrent streams of an HTTP/2 connection without an identity. A peer's proxy needs more: it sends all requests of a worker on
/// one connection.
const MAX_STRANGER_STREAMS: u32 = 1024;

/// Concurrent streams of an HTTP/2 connection that the policy permits nothing. With [`MAX_UNAUTHORIZED_HEADER_LIST`], of which
/// twice as much is read before a stream is reset, its requests have no more than 1 MiB of headers.
const MAX_UNAUTHORIZED_STREAMS: u32 = 16;
const MAX_UNAUTHORIZED_HEADER_LIST: u32 = 32 << 10;

/// Bytes of one body that are taken before its request is answered on an HTTP/2 connection that the policy permits nothing: the
/// protocol's own default (RFC 9113, section 6.9.2). A connection's window grows with the number of its bodies.
const MAX_UNAUTHORIZED_WINDOW: u32 = (1 << 16) - 1;

/// Maximum time that a connection which the policy permits nothing is without a request, or with a part of one.
const UNAUTHORIZED_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{h1, h2};

    #[test]
    fn who_is_permitted_nothing_gets_little_memory_and_time() {
        let peers = server::Config {
            http1: h1::server::Config {
                max_head: 64 << 10,
                head_timeout: Duration::from_secs(30),
                idle_timeout: Duration::from_secs(3600),
            },
            http2: h2::Params {
                max_concurrent_streams: Some(16_384),
                ..h2::Params::default()
            },
        };
        let servers = Servers::new(peers);
        assert_eq!(servers.peers.http2, peers.http2);
        assert_eq!(
            servers.strangers.http2.max_concurrent_streams,
            Some(MAX_STRANGER_STREAMS)
        );
        let server::Config { http1, http2 } = servers.unauthorized;
        let n_streams = http2.max_concurrent_streams.unwrap_or(u32::MAX);
        assert!(2 * n_streams * http2.max_header_list <= 1 << 20);
        assert!(http2.stream_window < 1 << 16 && http2.connection_window < 1 << 16);
        assert_eq!(
            (http1.head_timeout, http1.idle_timeout),
            (UNAUTHORIZED_IDLE_TIMEOUT, UNAUTHORIZED_IDLE_TIMEOUT)
        );
        let narrow = server::Config {
            http2: h2::Params {
                max_concurrent_streams: Some(4),
                ..peers.http2
            },
            ..peers
        };
        let servers = Servers::new(narrow);
        assert_eq!(servers.strangers.http2.max_concurrent_streams, Some(4));
        assert_eq!(servers.unauthorized.http2.max_concurrent_streams, Some(4));
    }
}
