//! Classifies responses as success or failure, including gRPC trailers, and reports their end to an observer.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, Response, StatusCode};
use tokio::time::Instant;

use crate::{
    http::{
        body::{Body, BodyObserver},
        error::{Error, grpc},
        headers,
    },
    metrics::http::{ResponseEnd, ResponseOutcome, Series},
    policy::profile::Class,
};

/// Observes one response until it ends or its receiver drops it.
pub(crate) trait ResponseObserver: Send + 'static {
    /// The metric series that count the response.
    fn series(&self) -> Option<&Series> {
        None
    }
    /// The first body bytes arrived, or the response ended without any.
    fn first_data(&mut self, _now: Instant) {}
    /// A data frame of `len` bytes was forwarded.
    fn data(&mut self, _len: usize) {}
    /// Whether the response counts as a success in `series`.
    fn counts_as_success(&self, outcome: &ResponseOutcome) -> bool {
        outcome.success
    }
    fn response_ended(&mut self, _outcome: ResponseOutcome, _now: Instant) {}
}

/// Counts a response for a route of a ServiceProfile.
pub(crate) struct ProfileResponseObserver {
    pub(crate) series: Arc<Series>,
    /// The class that the route assigns; `None` for the default classification.
    pub(crate) class: Option<Class>,
}

impl ResponseObserver for ProfileResponseObserver {
    fn series(&self) -> Option<&Series> {
        Some(&self.series)
    }

    fn counts_as_success(&self, outcome: &ResponseOutcome) -> bool {
        is_success_for_class(self.class, outcome)
    }
}

/// Whether a response is a success. The class of the route, if there is one, has precedence over the default classification.
pub(crate) fn is_success_for_class(class: Option<Class>, outcome: &ResponseOutcome) -> bool {
    match class {
        Some(class) => class == Class::Success && outcome.end == ResponseEnd::Complete,
        None => outcome.success,
    }
}

/// Observes a response body until its end.
struct ResponseClassifier<E: ResponseObserver> {
    observer: E,
    started_at: Instant,
    status: StatusCode,
    grpc: Option<i32>,
    awaits_first_data: bool,
    is_recorded: bool,
}

/// Reports the events of `response` to `observer`. Latency counts from `started_at`: the arrival of the request, or the start
/// of the attempt that `observer` observes.
pub(crate) fn observe(
    response: Response<Body>,
    started_at: Instant,
    observer: impl ResponseObserver,
) -> Response<Body> {
    let status = response.status();
    let grpc = grpc_status(response.headers());
    let classifier = ResponseClassifier {
        observer,
        started_at,
        status,
        grpc,
        awaits_first_data: true,
        is_recorded: false,
    };
    response.map(|body| body.with_observer(Box::new(classifier)))
}

/// The code of `grpc-status` in headers or trailers. A number that is not a gRPC code counts as UNKNOWN.
pub(crate) fn grpc_status(headers: &HeaderMap) -> Option<i32> {
    let code: i32 = headers::get(headers, &GRPC_STATUS)?.to_str().ok()?.parse().ok()?;
    Some(if (0..=16).contains(&code) { code } else { grpc::UNKNOWN })
}

/// The outcome of a request that failed without a response.
pub(crate) fn failed_outcome(error: &Error) -> ResponseOutcome {
    ResponseOutcome {
        status: error.status().status,
        grpc: None,
        success: false,
        end: ResponseEnd::NoResponse(error.response_labels()),
    }
}

/// Whether a response counts as a success.
///
/// Source: Linkerd's default classification.
pub(crate) fn is_success(status: StatusCode, grpc_status: Option<i32>) -> bool {
    const FAILURES: [i32; 6] = [
        grpc::UNKNOWN,
        grpc::DEADLINE_EXCEEDED,
        grpc::PERMISSION_DENIED,
        grpc::INTERNAL,
        grpc::UNAVAILABLE,
        grpc::DATA_LOSS,
    ];
    match grpc_status {
        Some(code) => !FAILURES.contains(&code),
        None => !status.is_server_error(),
    }
}

impl<E: ResponseObserver> ResponseClassifier<E> {
    fn record_first_data(&mut self, now: Instant) {
        if let Some(series) = self.observer.series() {
            series.record_latency(self.status, now.saturating_duration_since(self.started_at));
        }
        self.observer.first_data(now);
    }

    fn record_end(&mut self, end: ResponseEnd) {
        let now = Instant::now();
        if self.awaits_first_data {
            self.record_first_data(now);
        }
        let mut outcome = ResponseOutcome {
            status: self.status,
            grpc: self.grpc,
            success: end == ResponseEnd::Complete && is_success(self.status, self.grpc),
            end,
        };
        outcome.success = self.observer.counts_as_success(&outcome);
        if let Some(series) = self.observer.series() {
            series.record_response(outcome);
        }
        self.observer.response_ended(outcome, now);
        self.is_recorded = true;
    }
}

impl<E: ResponseObserver> BodyObserver for ResponseClassifier<E> {
    fn data(&mut self, len: usize) {
        if std::mem::take(&mut self.awaits_first_data) {
            self.record_first_data(Instant::now());
        }
        self.observer.data(len);
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        if let Some(code) = grpc_status(trailers) {
            self.grpc = Some(code);
        }
    }

    fn end(&mut self, result: Result<(), &Error>) {
        self.record_end(match result {
            Ok(()) => ResponseEnd::Complete,
            Err(Error::ClientClosed) => ResponseEnd::Cancelled,
            Err(error) => ResponseEnd::EndedEarly(error.response_labels()),
        });
    }
}

impl<E: ResponseObserver> Drop for ResponseClassifier<E> {
    fn drop(&mut self) {
        if !self.is_recorded {
            self.record_end(ResponseEnd::Cancelled);
        }
    }
}

pub(crate) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_codes_have_precedence_over_the_http_status() {
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
