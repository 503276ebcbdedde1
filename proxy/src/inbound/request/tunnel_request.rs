//! The request by which a tunnel was opened, to check it again when the policy changes.

use http::{HeaderMap, Method, Request, Uri};

use crate::{
    http::{body::Body, headers},
    policy::matches::RequestAttributes,
};

/// A copy of the head of a request that asks for a tunnel, as it was authorized.
pub(in crate::inbound) struct TunnelRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    pub(super) is_connect_tunnel: bool,
}

impl TunnelRequest {
    pub(super) fn new(req: &Request<Body>) -> Self {
        Self {
            method: req.method().clone(),
            uri: req.uri().clone(),
            headers: req.headers().clone(),
            is_connect_tunnel: headers::is_connect_tunnel(req),
        }
    }

    pub(super) fn attributes(&self) -> RequestAttributes<'_> {
        RequestAttributes::new(&self.method, &self.uri, &self.headers)
    }

    /// A request with this head and without a body.
    pub(super) fn to_request(&self) -> Request<Body> {
        let mut req = Request::new(Body::empty());
        *req.method_mut() = self.method.clone();
        *req.uri_mut() = self.uri.clone();
        *req.headers_mut() = self.headers.clone();
        req
    }
}
