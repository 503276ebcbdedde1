//! Interim responses (1xx) on their way from the client of a request to its server.
//!
//! Between the two there is one future and no task, and a future yields one response. So whoever reads an interim
//! response leaves it with its thread, and the server, which polls the future, takes it from there.

use std::{cell::RefCell, task::Poll};

use http::{Response, StatusCode, Version};

use crate::http::headers;

thread_local! {
    static PASSED: RefCell<Vec<Response<()>>> = const { RefCell::new(Vec::new()) };
}

/// Passes an interim response on to whoever serves the request that is being worked on.
pub(crate) fn pass(mut response: Response<()>) {
    // Its connection's business, of which HTTP/2 knows nothing.
    headers::strip_hop_by_hop(response.headers_mut());
    headers::strip_forged(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    PASSED.with_borrow_mut(|passed| passed.push(response));
}

/// Polls the answering of a request by `poll`, and returns the interim responses that came of it.
pub(crate) fn collect<T>(poll: impl FnOnce() -> Poll<T>) -> (Poll<T>, Vec<Response<()>>) {
    let polled = poll();
    (polled, PASSED.take())
}

/// Whether it lets the client send its body.
pub(crate) fn is_permission(response: &Response<()>) -> bool {
    response.status() == StatusCode::CONTINUE
}
