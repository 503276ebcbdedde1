//! Responses and request checks that several routes share.

use bytes::Bytes;
use http::header::{ACCEPT, ALLOW};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use tulle_core::admin::{AdminRequest, text};

pub(super) type AdminResponse = Response<Full<Bytes>>;

pub(super) fn method_not_allowed(methods: &'static str) -> AdminResponse {
    let mut rsp = text(
        StatusCode::METHOD_NOT_ALLOWED,
        format!("method not allowed, use one of: {methods}\n"),
    );
    rsp.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    rsp
}

pub(super) fn forbidden() -> AdminResponse {
    text(
        StatusCode::FORBIDDEN,
        "permitted only from a loopback address of this host\n",
    )
}

/// Whether the `Accept` header contains `application/json`.
pub(super) fn wants_json(req: &AdminRequest) -> bool {
    let accepted = req.headers.get_all(ACCEPT).iter();
    accepted
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("application/json"))
}
