//! Success or failure of a response, gRPC's trailers included, and what its end is reported to.

use std::sync::Arc;

use http::{HeaderMap, Response, StatusCode};
use tokio::time::Instant;

use crate::{
    http::{
        body::{Body, Observe},
        error::{Error, grpc},
    },
    metrics::http::{End, Outcome, Series},
};

/// Told once, when a response has ended or its receiver went away.
pub(crate) trait Ended: Send + 'static {
    /// The first byte of the body arrived, or there is none.
    fn first_data(&mut self);
    /// A piece of the body passed.
    fn data(&mut self, _len: usize) {}
    /// Whether the response counts as a success.
    fn class(&self, outcome: &Outcome) -> bool {
        outcome.success
    }
    fn ended(&mut self, outcome: Outcome);
}

/// Nobody else cares.
impl Ended for () {
    fn first_data(&mut self) {}
    fn ended(&mut self, _: Outcome) {}
}

/// Watches a response body to its end and tells `series` and `also`.
struct Classify<E: Ended> {
    series: Option<Arc<Series>>,
    also: E,
    started: Instant,
    status: StatusCode,
    grpc: Option<i32>,
    first: bool,
    reported: bool,
}

/// Counts `response` in `series` when it ends. `started` is when its request came.
pub(crate) fn observe(
    response: Response<Body>,
    series: Arc<Series>,
    started: Instant,
    also: impl Ended,
) -> Response<Body> {
    watch(response, Some(series), started, also)
}

/// Tells `also` how `response` went, and nobody else.
pub(crate) fn tell(response: Response<Body>, also: impl Ended) -> Response<Body> {
    watch(response, None, Instant::now(), also)
}

fn watch(response: Response<Body>, series: Option<Arc<Series>>, started: Instant, also: impl Ended) -> Response<Body> {
    let status = response.status();
    let grpc = grpc_status(response.headers());
    let watch = Classify {
        series,
        also,
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
    let code: i32 = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
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
    fn first(&mut self) {
        if self.first {
            self.first = false;
            if let Some(series) = &self.series {
                series.latency(self.status, self.started.elapsed());
            }
            self.also.first_data();
        }
    }

    fn report(&mut self, end: End) {
        self.first();
        let mut outcome = Outcome {
            status: self.status,
            grpc: self.grpc,
            success: end == End::Complete && is_success(self.status, self.grpc),
            end,
        };
        outcome.success = self.also.class(&outcome);
        if let Some(series) = &self.series {
            series.response(outcome);
        }
        self.also.ended(outcome);
        self.reported = true;
    }
}

impl<E: Ended> Observe for Classify<E> {
    fn data(&mut self, len: usize) {
        self.first();
        self.also.data(len);
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        if let Some(code) = grpc_status(trailers) {
            self.grpc = Some(code);
        }
    }

    fn end(&mut self, result: Result<(), &Error>) {
        self.report(match result {
            Ok(()) => End::Complete,
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
