//! Route filters of either direction, applied to a request.

use http::Request;

use crate::{
    http::{body::Body, error::Error},
    policy::filter::{self, Answer, Failure, Filter, RequestHead},
};

/// Applies the request filters of a rule or a backend.
///
/// # Errors
/// A filter answers the request itself: a redirect, an injected failure, or one that we do not know.
pub(crate) fn apply(filters: &[Filter], req: &mut Request<Body>, prefix: Option<usize>) -> Result<(), Error> {
    if filters.is_empty() {
        return Ok(());
    }
    let uri = req.uri().clone();
    let mut head = RequestHead {
        uri: &uri,
        headers: req.headers_mut(),
        prefix,
    };
    filter::apply_request(filters, &mut head, |n| fastrand::u32(0..n)).map_err(|answer| match answer {
        Answer::Redirect { status, location } => Error::Redirect { status, location },
        Answer::Failure(Failure::Http { status, message }) => Error::Injected {
            status,
            message: message.to_string(),
        },
        Answer::Failure(Failure::Grpc { code, message }) => Error::InjectedGrpc {
            code: i32::from(code),
            message: message.to_string(),
        },
        Answer::Broken(what) => Error::InvalidPolicy(what.into()),
    })
}
