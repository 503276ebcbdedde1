//! Applies the filters of a route to a request.

use http::Request;

use crate::{
    http::{body::Body, error::Error},
    policy::filter::{self, Failure, Filter, FilterResponse, RequestHead},
};

/// Applies the request filters of a route rule or a backend. Returns `matched_prefix_len`, which a rewrite of the path updates.
///
/// # Errors
/// A filter responds itself (redirect or injected failure), the policy contains an unknown filter, or the control plane denies the
/// policy.
pub(crate) fn apply_request_filters(
    filters: &[Filter],
    req: &mut Request<Body>,
    matched_prefix_len: Option<usize>,
) -> Result<Option<usize>, Error> {
    if filters.is_empty() {
        return Ok(matched_prefix_len);
    }
    let mut uri = std::mem::take(req.uri_mut());
    let mut head = RequestHead {
        uri: &mut uri,
        headers: req.headers_mut(),
        matched_prefix_len,
    };
    let applied = filter::apply_request(filters, &mut head, |n| fastrand::u32(0..n)).map(|()| head.matched_prefix_len);
    *req.uri_mut() = uri;
    applied.map_err(|response| match response {
        FilterResponse::Redirect { status, location } => Error::Redirect { status, location },
        FilterResponse::Failure(Failure::Http { status, message }) => Error::Injected {
            status,
            message: message.to_string(),
        },
        FilterResponse::Failure(Failure::Grpc { code, message }) => Error::InjectedGrpc {
            code: i32::from(code),
            message: message.to_string(),
        },
        FilterResponse::Invalid(reason) => Error::InvalidPolicy(reason.into_owned()),
        FilterResponse::DiscoveryDenied(reason) => Error::DiscoveryDenied(reason.to_string()),
    })
}
