//! Settings of HTTP servers.

use std::time::Duration;

use crate::http::h2::Http2Config;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerConfig {
    pub(crate) limits: HttpLimits,
    pub(crate) http2: Http2Config,
}

/// Limits that apply to HTTP/1 and HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HttpLimits {
    /// Maximum size of a request head in HTTP/1.
    pub(crate) max_header_bytes: usize,
    /// Maximum time to read a request head or a header block, from its first byte. In HTTP/2 also the maximum time of a
    /// connection until its first request.
    pub(crate) header_read_timeout: Duration,
    /// Maximum time a connection waits for a request, and maximum time without transferred bytes while a request body
    /// is read.
    pub(crate) idle_timeout: Duration,
}

/// Maximum time that a connection without any request delays a drain. Its client has just connected, and a request may be on its
/// way. If a connection that was used before ends, clients send the request again. If a new one ends, they do not.
pub(in crate::http) const FIRST_REQUEST_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
