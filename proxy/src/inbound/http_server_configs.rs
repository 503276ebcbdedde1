//! HTTP server settings for meshed, unmeshed and unauthorized clients.

use std::time::Duration;

use crate::http::server_config::ServerConfig;

pub(crate) struct HttpServerConfigs {
    /// Settings for clients with an identity.
    pub(crate) meshed: ServerConfig,
    /// Settings for clients without an identity, if the policy permits them at least one request.
    pub(crate) unmeshed: ServerConfig,
    /// Settings for clients to which the policy permits no request when they connect.
    pub(crate) unauthorized: ServerConfig,
}

impl HttpServerConfigs {
    /// Derives all settings from those of meshed clients.
    pub(crate) fn new(meshed: ServerConfig) -> Self {
        let bounded = |bound: u32| Some(meshed.http2.max_concurrent_streams.unwrap_or(bound).min(bound));
        let mut unmeshed = meshed;
        unmeshed.http2.max_concurrent_streams = bounded(MAX_UNMESHED_STREAMS);
        let mut unauthorized = meshed;
        unauthorized.http2.max_concurrent_streams = bounded(MAX_UNAUTHORIZED_STREAMS);
        unauthorized.http2.max_header_list_bytes = meshed
            .http2
            .max_header_list_bytes
            .min(MAX_UNAUTHORIZED_HEADER_LIST_BYTES);
        let frame_size = meshed.http2.max_frame_size.unwrap_or(MAX_UNAUTHORIZED_FRAME_BYTES);
        unauthorized.http2.max_frame_size = Some(frame_size.min(MAX_UNAUTHORIZED_FRAME_BYTES));
        unauthorized.http2.stream_window = meshed.http2.stream_window.min(MAX_UNAUTHORIZED_WINDOW_BYTES);
        unauthorized.http2.connection_window = meshed.http2.connection_window.min(MAX_UNAUTHORIZED_WINDOW_BYTES);
        unauthorized.limits.header_read_timeout = meshed.limits.header_read_timeout.min(UNAUTHORIZED_IDLE_TIMEOUT);
        unauthorized.limits.idle_timeout = meshed.limits.idle_timeout.min(UNAUTHORIZED_IDLE_TIMEOUT);
        Self {
            meshed,
            unmeshed,
            unauthorized,
        }
    }
}

/// Maximum concurrent streams of an HTTP/2 connection without an identity. The proxy of a meshed client needs more: it sends
/// all requests of a worker on one connection.
const MAX_UNMESHED_STREAMS: u32 = 1024;

/// Maximum concurrent streams of an HTTP/2 connection of an unauthorized client. The h2 crate reads up to twice
/// [`MAX_UNAUTHORIZED_HEADER_LIST_BYTES`] before it resets a stream, so the headers of all streams take at most 1 MiB.
const MAX_UNAUTHORIZED_STREAMS: u32 = 16;
const MAX_UNAUTHORIZED_HEADER_LIST_BYTES: u32 = 32 << 10;

/// Flow-control windows of an HTTP/2 connection of an unauthorized client, and of each of its request bodies, in bytes: the default
/// of HTTP/2 (RFC 9113, section 6.9.2).
const MAX_UNAUTHORIZED_WINDOW_BYTES: u32 = (1 << 16) - 1;

/// Maximum size of a frame from an unauthorized client: the default of HTTP/2 (RFC 9113, section 6.5.2). The h2 crate stores a
/// frame until it is complete, independent of the flow-control windows.
const MAX_UNAUTHORIZED_FRAME_BYTES: u32 = 1 << 14;

/// Maximum idle time of a connection of an unauthorized client, and maximum time for a request head.
const UNAUTHORIZED_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{h2, server_config::HttpLimits};

    #[test]
    fn unauthorized_clients_get_reduced_limits() {
        let meshed = ServerConfig {
            limits: HttpLimits {
                max_header_bytes: 64 << 10,
                header_read_timeout: Duration::from_secs(30),
                idle_timeout: Duration::from_secs(3600),
            },
            http2: h2::Http2Config {
                max_concurrent_streams: Some(16_384),
                ..h2::Http2Config::default()
            },
        };
        let servers = HttpServerConfigs::new(meshed);
        assert_eq!(servers.meshed.http2, meshed.http2);
        assert_eq!(
            servers.unmeshed.http2.max_concurrent_streams,
            Some(MAX_UNMESHED_STREAMS)
        );
        let ServerConfig { limits, http2 } = servers.unauthorized;
        let n_streams = http2.max_concurrent_streams.unwrap_or(u32::MAX);
        assert!(2 * n_streams * http2.max_header_list_bytes <= 1 << 20);
        assert!(http2.stream_window < 1 << 16 && http2.connection_window < 1 << 16);
        assert_eq!(http2.max_frame_size, Some(16 << 10));
        assert_eq!(
            (limits.header_read_timeout, limits.idle_timeout),
            (UNAUTHORIZED_IDLE_TIMEOUT, UNAUTHORIZED_IDLE_TIMEOUT)
        );
        let narrow = ServerConfig {
            http2: h2::Http2Config {
                max_concurrent_streams: Some(4),
                ..meshed.http2
            },
            ..meshed
        };
        let servers = HttpServerConfigs::new(narrow);
        assert_eq!(servers.unmeshed.http2.max_concurrent_streams, Some(4));
        assert_eq!(servers.unauthorized.http2.max_concurrent_streams, Some(4));
    }
}
