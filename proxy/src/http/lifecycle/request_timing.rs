//! The start and end time of a request, and the sizes of its data frames.

use std::sync::{Arc, OnceLock};

use http::{HeaderMap, Request};
use http_body::Body as _;
use tokio::time::Instant;
use tulle_core::metrics::Histogram;

use crate::http::{
    body::{Body, BodyObserver},
    error::Error,
};

/// When a request started, and when its body ended.
#[derive(Clone)]
pub(crate) struct RequestTiming {
    started: Instant,
    /// `None` for a request without a body.
    ended: Option<Arc<OnceLock<Instant>>>,
}

struct RequestBodyObserver {
    frame_sizes: Arc<Histogram>,
    ended: Arc<OnceLock<Instant>>,
}

impl RequestTiming {
    /// Observes the request body. The sizes of its data frames go to `frame_sizes`, in bytes.
    pub(crate) fn observe(req: &mut Request<Body>, started: Instant, frame_sizes: &Arc<Histogram>) -> Self {
        if req.body().is_end_stream() {
            return Self { started, ended: None };
        }
        let ended = Arc::new(OnceLock::new());
        let observer = RequestBodyObserver {
            frame_sizes: frame_sizes.clone(),
            ended: ended.clone(),
        };
        let body = std::mem::take(req.body_mut());
        *req.body_mut() = body.with_observer(Box::new(observer));
        Self {
            started,
            ended: Some(ended),
        }
    }

    pub(crate) fn started_at(&self) -> Instant {
        self.started
    }

    /// When the body ended; the start if it has not ended, or if there is no body.
    pub(crate) fn body_ended_at(&self) -> Instant {
        let ended = self.ended.as_ref().and_then(|ended| ended.get().copied());
        ended.unwrap_or(self.started)
    }
}

impl BodyObserver for RequestBodyObserver {
    fn data(&mut self, len: usize) {
        self.frame_sizes.observe(len as f64);
    }

    fn trailers(&mut self, _: &HeaderMap) {}

    fn end(&mut self, result: Result<(), &Error>) {
        if result.is_ok() {
            let _ = self.ended.set(Instant::now()); // the first end counts
        }
    }
}
