//! Passes interim responses (1xx) from the HTTP client to the HTTP server of the same request.
//!
//! The server polls the client's future directly, and a future yields one response only. So the client stores interim
//! responses in a thread-local list while it is polled, and the server takes them after each poll. A queue in the request would cost
//! an allocation per request; with this list, a request without interim responses costs nothing.

use std::{cell::RefCell, task::Poll};

use http::{Response, StatusCode, Version, header};

use crate::http::headers;

thread_local! {
    static RECEIVED: RefCell<Vec<Response<()>>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of interim responses per request. It bounds the bytes that wait for a client that does not read.
pub(crate) const MAX_INTERIM_RESPONSES: usize = 32;

/// Stores an interim response for the server that polls the current request.
pub(crate) fn forward(mut response: Response<()>) {
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
    RECEIVED.with_borrow_mut(|received| received.push(response));
}

/// Calls `poll` and returns its result with the interim responses that it stored.
pub(crate) fn poll_and_take<T>(poll: impl FnOnce() -> Poll<T>) -> (Poll<T>, Vec<Response<()>>) {
    let polled = poll();
    (polled, RECEIVED.take())
}

/// Whether the client may now send the request body.
pub(crate) fn is_continue(response: &Response<()>) -> bool {
    response.status() == StatusCode::CONTINUE
}
