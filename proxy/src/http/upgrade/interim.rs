//! Interim responses (1xx) on their way from the client of a request to its server.
//!
//! Between the two there is one future and no task, and a future yields one response. So whoever reads an interim
//! response leaves it with its thread, and the server, which polls the future, takes it from there.

use std::{cell::RefCell, task::Poll};

use http::{Response, StatusCode, Version, header};

use crate::http::headers;

thread_local! {
    static PASSED: RefCell<Vec<Response<()>>> = const { RefCell::new(Vec::new()) };
}

/// How many interim responses a request may have: nothing else bounds what waits for a client that does not read.
pub(crate) const MAX_INTERIM_RESPONSES: usize = 32;

/// Passes an interim response on to whoever serves the request that is being worked on.
pub(crate) fn forward(mut response: Response<()>) {
    // Whoever switches protocols says so at the end, in HTTP/1.
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return;
    }
    // It has no body, whatever it says, and its connection's business is nothing that HTTP/2 knows of.
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.headers_mut().remove(header::TRANSFER_ENCODING);
    headers::strip_hop_by_hop(response.headers_mut());
    headers::strip_spoofed(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    PASSED.with_borrow_mut(|passed| passed.push(response));
}

/// Polls the answering of a request by `poll`, and returns the interim responses that came of it.
pub(crate) fn poll_and_take<T>(poll: impl FnOnce() -> Poll<T>) -> (Poll<T>, Vec<Response<()>>) {
    let polled = poll();
    (polled, PASSED.take())
}

/// Whether it lets the client send its body.
pub(crate) fn is_continue(response: &Response<()>) -> bool {
    response.status() == StatusCode::CONTINUE
}
