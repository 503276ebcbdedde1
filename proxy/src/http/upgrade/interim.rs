//! Passes interim responses (1xx) from upstream to the client of the same request.

use std::sync::Arc;

use http::{Response, StatusCode, Version, header};

use crate::http::headers;

/// Receives the interim responses to one request. HTTP servers implement it, and write the interim responses after they have
/// polled the future of the final response.
pub(crate) trait InterimSink: Send + Sync {
    fn receive_interim(&self, response: Response<()>);
}

/// The sink for the interim responses to one request.
pub(crate) type SharedInterimSink = Arc<dyn InterimSink>;

/// Maximum number of interim responses to one request. It limits the bytes that wait for a client that does not read.
pub(crate) const MAX_INTERIM_RESPONSES: usize = 32;

/// Sends an interim response, without the headers that concern one connection only.
pub(crate) fn send(sink: &SharedInterimSink, mut response: Response<()>) {
    // 101 is a final response: it ends HTTP on the connection.
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return;
    }
    // An interim response has no body, and HTTP/2 does not allow connection-specific headers.
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.headers_mut().remove(header::TRANSFER_ENCODING);
    headers::strip_hop_by_hop(response.headers_mut());
    headers::strip_proxy_headers(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    sink.receive_interim(response);
}

/// Whether the client may now send the request body.
pub(crate) fn is_continue(response: &Response<()>) -> bool {
    response.status() == StatusCode::CONTINUE
}
