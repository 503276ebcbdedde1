//! A request's body on its way: its pieces, and when it was over.

use std::sync::{Arc, OnceLock};

use http::{HeaderMap, Request};
use http_body::Body as _;
use tokio::time::Instant;
use tulle_core::metrics::Histogram;

use crate::http::{
    body::{Body, BodyObserver},
    error::Error,
};

/// When a request began and was sent to its end.
#[derive(Clone)]
pub(crate) struct RequestTiming {
    started: Instant,
    /// Nothing where the request ended with its head.
    ended: Option<Arc<OnceLock<Instant>>>,
}

struct UploadObserver {
    frame_sizes: Arc<Histogram>,
    ended: Arc<OnceLock<Instant>>,
}

impl RequestTiming {
    /// Watches the body of a request that has just begun; `pieces` hears of their sizes.
    pub(crate) fn observe(req: &mut Request<Body>, started: Instant, pieces: &Arc<Histogram>) -> Self {
        if req.body().is_end_stream() {
            return Self { started, ended: None };
        }
        let ended = Arc::new(OnceLock::new());
        let watch = UploadObserver {
            frame_sizes: pieces.clone(),
            ended: ended.clone(),
        };
        let body = std::mem::take(req.body_mut());
        *req.body_mut() = body.with_observer(Box::new(watch));
        Self {
            started,
            ended: Some(ended),
        }
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// When it was over; its start, as long as it is not.
    pub(crate) fn ended(&self) -> Instant {
        let ended = self.ended.as_ref().and_then(|ended| ended.get().copied());
        ended.unwrap_or(self.started)
    }
}

impl BodyObserver for UploadObserver {
    fn data(&mut self, len: usize) {
        self.frame_sizes.observe(len as f64);
    }

    fn trailers(&mut self, _: &HeaderMap) {}

    fn end(&mut self, result: Result<(), &Error>) {
        if result.is_ok() {
            let _ = self.ended.set(Instant::now()); // once is enough
        }
    }
}
