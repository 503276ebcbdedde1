use crate::http::{h1::server::Http1Config, h2::Http2Config};

/// Settings of an HTTP server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerConfig {
    pub(crate) http1: Http1Config,
    pub(crate) http2: Http2Config,
}
