//! Success or failure of a response, gRPC's trailers included, and what its end is reported to.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, Response, StatusCode};
use tokio::time::Instant;

use crate::{
    http::{
        body::{Body, Observe},
        error::{Error, grpc},
        headers,
    },
    metrics::http::{End, Outcome, Series},
    policy::profile::Class,
};

/// Told of one response: how it went, until it has ended or its receiver went away.
pub(crate) trait Ended: Send + 'static {
    /// What the response counts in.
    fn series(&self) -> Option<&Series> {
        None
    }
    /// The first byte of the body arrived, or there is none.
    fn first_data(&mut self, _now: Instant) {}
    /// A piece of the body passed.
    fn data(&mut self, _len: usize) {}
    /// Whether the response counts as a success.
    fn class(&self, outcome: &Outcome) -> bool {
        outcome.success
    }
    fn ended(&mut self, _outcome: Outcome, _now: Instant) {}
}

/// A response, counted by the route of a profile.
pub(crate) struct Classified {
    pub(crate) series: Arc<Series>,
    /// What the route gives it, instead of the usual one.
    pub(crate) class: Option<Class>,
}

impl Ended for Classified {
    fn series(&self) -> Option<&Series> {
        Some(&self.series)
    }

    fn class(&self, outcome: &Outcome) -> bool {
        succeeded(self.class, outcome)
    }
}

/// Whether a response is a success where a route may have given it a class.
pub(crate) fn succeeded(class: Option<Class>, outcome: &Outcome) -> bool {
    match class {
        Some(class) => class == Class::Success && outcome.end == End::Complete,
        None => outcome.success,
    }
}

/// Watches a response body to its end.
struct Classify<E: Ended> {
    told: E,
    started: Instant,
    status: StatusCode,
    grpc: Option<i32>,
    first: bool,
    reported: bool,
}

/// Tells how `response` goes; `started` is when its request came.
pub(crate) fn observe(response: Response<Body>, started: Instant, told: impl Ended) -> Response<Body> {
    let status = response.status();
    let grpc = grpc_status(response.headers());
    let watch = Classify {
        told,
        started,
        status,
        grpc,
        first: true,
        reported: false,
    };
    response.map(|body| body.observed(Box::new(watch)))
}

/// The code of `grpc-status`, in headers or trailers; one that is none of gRPC's means that nobody knows.
pub(crate) fn grpc_status(headers: &HeaderMap) -> Option<i32> {
    let code: i32 = headers::get(headers, &GRPC_STATUS)?.to_str().ok()?.parse().ok()?;
    Some(if (0..=16).contains(&code) { code } else { grpc::UNKNOWN })
}

/// A request that brought no response.
pub(crate) fn failed(error: &Error) -> Outcome {
    Outcome {
        status: error.answer().status,
        grpc: None,
        success: false,
        end: End::Failed(error.fault()),
    }
}

/// Whether a response counts as a success.
///
/// Source: HTTP 5xx and the gRPC codes Unknown, DeadlineExceeded, PermissionDenied, Internal, Unavailable and DataLoss
/// are failures.
pub(crate) fn is_success(status: StatusCode, grpc_status: Option<i32>) -> bool {
    const FAILURES: [i32; 6] = [
        grpc::UNKNOWN,
        grpc::DEADLINE_EXCEEDED,
        grpc::PERMISSION_DENIED,
        grpc::INTERNAL,
        grpc::UNAVAILABLE,
        15,
    ];
    match grpc_status {
        Some(code) => !FAILURES.contains(&code),
        None => !status.is_server_error(),
    }
}

impl<E: Ended> Classify<E> {
    fn first(&mut self, now: Instant) {
        if let Some(series) = self.told.series() {
            series.latency(self.status, now.saturating_duration_since(self.started));
        }
        self.told.first_data(now);
    }

    fn report(&mut self, end: End) {
        let now = Instant::now();
        if self.first {
            self.first(now);
        }
        let mut outcome = Outcome {
            status: self.status,
            grpc: self.grpc,
            success: end == End::Complete && is_success(self.status, self.grpc),
            end,
        };
        outcome.success = self.told.class(&outcome);
        if let Some(series) = self.told.series() {
            series.response(outcome);
        }
        self.told.ended(outcome, now);
        self.reported = true;
    }
}

impl<E: Ended> Observe for Classify<E> {
    fn data(&mut self, len: usize) {
        if std::mem::take(&mut self.first) {
            self.first(Instant::now());
        }
        self.told.data(len);
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        if let Some(code) = grpc_status(trailers) {
            self.grpc = Some(code);
        }
    }

    fn end(&mut self, result: Result<(), &Error>) {
        self.report(match result {
            Ok(()) => End::Complete,
            Err(Error::Left) => End::Abandoned,
            Err(error) => End::Broken(error.fault()),
        });
    }
}

impl<E: Ended> Drop for Classify<E> {
    fn drop(&mut self) {
        if !self.reported {
            self.report(End::Abandoned);
        }
    }
}

/// Where gRPC says how a call ended.
pub(crate) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_codes_win_over_the_http_status() {
        for (status, grpc, success) in [
            (200, None, true),
            (404, None, true),
            (503, None, false),
            (200, Some(14), false),
            (200, Some(5), true),
        ] {
            assert_eq!(
                is_success(StatusCode::from_u16(status).unwrap(), grpc),
                success,
                "{status} {grpc:?}"
            );
        }
    }
}
