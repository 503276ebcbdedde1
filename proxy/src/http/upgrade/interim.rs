//! Passes interim responses (1xx) from the HTTP client to the HTTP server of the same request.

use std::sync::Arc;

use http::{Response, StatusCode, Version, header};

use crate::http::headers;

/// The HTTP server of a request. It writes the interim responses after it has polled the future of the final response.
pub(crate) trait InterimReceiver: Send + Sync {
    fn receive_interim(&self, response: Response<()>);
}

/// Where the HTTP client of a request sends interim responses.
pub(crate) type InterimSender = Arc<dyn InterimReceiver>;

/// Maximum number of interim responses per request. It bounds the bytes that wait for a client that does not read.
pub(crate) const MAX_INTERIM_RESPONSES: usize = 32;

/// Sends an interim response, without the headers that concern one connection only.
pub(crate) fn send(sender: &InterimSender, mut response: Response<()>) {
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
    sender.receive_interim(response);
}

/// Whether the client may now send the request body.
pub(crate) fn is_continue(response: &Response<()>) -> bool {
    response.status() == StatusCode::CONTINUE
}
