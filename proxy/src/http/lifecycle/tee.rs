//! Copies the body of a request to a second request while it is sent.

use std::{
    collections::VecDeque,
    future::{pending, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;

use crate::http::{
    body::{Body, ReceivedBody},
    error::Error,
};

/// Maximum total size of the frames of one copy that wait for its receiver; a single frame may be larger. Above this size,
/// the copy fails. The size is large, so that the original can be sent at full speed while the receiver connects.
pub(crate) const MAX_PENDING_COPY_BYTES: usize = 4 * 1024 * 1024;

/// Maximum size of the waiting frames of all copies that share a [`BodyCopyMemory`].
const MAX_COPY_MEMORY_BYTES: usize = 16 * 1024 * 1024;

/// Size that is counted for each waiting frame in addition to its data.
const FRAME_OVERHEAD_BYTES: usize = 128;

/// The size of the waiting frames of several copies.
#[derive(Default)]
pub(crate) struct BodyCopyMemory(AtomicUsize);

/// Observes and cancels a copy.
pub(crate) struct BodyCopyMonitor(Option<Arc<Mutex<PendingCopy>>>);

/// Returns the body to send, a copy of it that receives the frames as they are sent, and the monitor of the copy.
///
/// The original does not wait for the receiver of the copy. If many bytes of the copy are waiting, the original yields once,
/// so that the receiver can run. It yields again only after the receiver has polled. The copy fails if the original fails or
/// is dropped before its end, or if the receiver is too slow.
pub(crate) fn copy_while_sent(body: Body, memory: Arc<BodyCopyMemory>) -> (Body, Body, BodyCopyMonitor) {
    if body.is_end_stream() {
        return (body, Body::empty(), BodyCopyMonitor(None));
    }
    let copy = Arc::new(Mutex::new(PendingCopy {
        memory,
        data: VecDeque::new(),
        n_bytes: 0,
        trailers: None,
        state: BodyCopyState::Open,
        remaining: body.size_hint().exact(),
        receiver_waker: None,
        monitor_waker: None,
        has_yielded: false,
    }));
    let original = TeeBody {
        body: Some(body),
        copy: copy.clone(),
    };
    (
        Body::received(Box::new(original)),
        Body::received(Box::new(CopiedBody(copy.clone()))),
        BodyCopyMonitor(Some(copy)),
    )
}

/// The frames of a copy that its receiver has not received yet.
struct PendingCopy {
    memory: Arc<BodyCopyMemory>,
    data: VecDeque<Bytes>,
    /// Size of the frames in `data`, as reserved in `memory`.
    n_bytes: usize,
    trailers: Option<HeaderMap>,
    state: BodyCopyState,
    /// Bytes that the receiver has not received yet, if the length of the body is known.
    remaining: Option<u64>,
    receiver_waker: Option<Waker>,
    monitor_waker: Option<Waker>,
    /// Whether the original has yielded since the receiver has polled.
    has_yielded: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyCopyState {
    Open,
    Complete,
    /// The original failed or was dropped before its end, or the copy was cancelled.
    Failed,
    TooSlow,
    /// The receiver has dropped the copy.
    Abandoned,
}

/// The original. Its frames are copied when they are read.
struct TeeBody {
    /// `None` after [`ReceivedBody::into_inner`].
    body: Option<Body>,
    copy: Arc<Mutex<PendingCopy>>,
}

struct CopiedBody(Arc<Mutex<PendingCopy>>);

impl BodyCopyMemory {
    /// Whether there is space for these bytes, which then count until [`release`](Self::release).
    fn reserve(&self, n_bytes: usize) -> bool {
        let reserved_before = self.0.fetch_add(n_bytes, Ordering::Relaxed);
        let has_space = reserved_before + n_bytes <= MAX_COPY_MEMORY_BYTES;
        if !has_space {
            self.release(n_bytes);
        }
        has_space
    }

    fn release(&self, n_bytes: usize) {
        self.0.fetch_sub(n_bytes, Ordering::Relaxed);
    }
}

impl BodyCopyMonitor {
    pub(crate) fn is_too_slow(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|copy| copy.lock().state == BodyCopyState::TooSlow)
    }

    /// Waits until the copy fails, which may never happen. A receiver that is blocked does not poll the copy, so it does not
    /// notice a failure.
    pub(crate) async fn wait_failed(&self) {
        let Some(copy) = &self.0 else {
            return pending().await;
        };
        poll_fn(|cx| {
            let mut copy = copy.lock();
            if copy.has_failed() {
                return Poll::Ready(());
            }
            copy.monitor_waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Fails the copy if its receiver has not received all of it.
    pub(crate) fn cancel(&self) {
        if let Some(copy) = &self.0 {
            copy.lock().cancel();
        }
    }
}

impl PendingCopy {
    fn push(&mut self, frame: &Frame<Bytes>) {
        if self.state != BodyCopyState::Open {
            return;
        }
        if let Some(data) = frame.data_ref() {
            let size = frame_size(data);
            let is_full = !self.data.is_empty() && self.n_bytes + size > MAX_PENDING_COPY_BYTES;
            if is_full || !self.memory.reserve(size) {
                self.end(BodyCopyState::TooSlow);
                return;
            }
            self.n_bytes += size;
            self.data.push_back(data.clone());
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers = Some(trailers.clone());
        }
        self.wake_receiver();
    }

    fn pop(&mut self) -> Option<Bytes> {
        let data = self.data.pop_front()?;
        let size = frame_size(&data);
        self.n_bytes -= size;
        self.memory.release(size);
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(data.len() as u64);
        }
        Some(data)
    }

    /// Ends the copy in this state. Has no effect if it has ended before.
    fn end(&mut self, state: BodyCopyState) {
        if self.state == BodyCopyState::Open {
            self.state = state;
            if state != BodyCopyState::Complete {
                self.discard_data();
            }
            self.wake_receiver();
        }
    }

    fn discard_data(&mut self) {
        self.data = VecDeque::new();
        self.memory.release(std::mem::take(&mut self.n_bytes));
    }

    fn has_failed(&self) -> bool {
        matches!(self.state, BodyCopyState::Failed | BodyCopyState::TooSlow)
    }

    fn cancel(&mut self) {
        if matches!(self.state, BodyCopyState::Open | BodyCopyState::Complete) {
            self.state = BodyCopyState::Failed;
            self.discard_data();
            self.wake_receiver();
        }
    }

    /// Whether the original must yield so that the receiver can run. Both are tasks of one thread, and the original could
    /// otherwise read a large body without a pause.
    fn must_yield(&mut self) -> bool {
        let must_yield =
            self.state == BodyCopyState::Open && self.n_bytes > MAX_PENDING_COPY_BYTES / 2 && !self.has_yielded;
        if must_yield {
            self.has_yielded = true;
            self.wake_receiver();
        }
        must_yield
    }

    /// Wakes the receiver, and also the monitor if the copy has failed.
    fn wake_receiver(&mut self) {
        if let Some(waker) = self.receiver_waker.take() {
            waker.wake();
        }
        if self.has_failed()
            && let Some(waker) = self.monitor_waker.take()
        {
            waker.wake();
        }
    }
}

fn frame_size(data: &Bytes) -> usize {
    data.len() + FRAME_OVERHEAD_BYTES
}

impl ReceivedBody for TeeBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        if self.copy.lock().must_yield() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        let mut copy = self.copy.lock();
        match &frame {
            Some(Err(_)) => copy.end(BodyCopyState::Failed),
            Some(Ok(frame)) => {
                copy.push(frame);
                // The sender may not poll again after the last frame.
                if body.is_end_stream() {
                    copy.end(BodyCopyState::Complete);
                }
            }
            None => copy.end(BodyCopyState::Complete),
        }
        drop(copy);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }

    fn poll_deadline(&mut self, unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        match &mut self.body {
            Some(body) => body.poll_deadline(unsent, cx),
            None => Poll::Pending,
        }
    }

    fn into_inner(mut self: Box<Self>) -> Option<Body> {
        self.body.take()
    }
}

impl Drop for TeeBody {
    fn drop(&mut self) {
        // The end can become known after the last frame, without a further poll.
        let state = match self.body.as_ref().is_some_and(Body::is_end_stream) {
            true => BodyCopyState::Complete,
            false => BodyCopyState::Failed,
        };
        self.copy.lock().end(state);
    }
}

impl ReceivedBody for CopiedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let mut copy = self.0.lock();
        copy.has_yielded = false;
        if copy.has_failed() {
            return Poll::Ready(Some(Err(Error::AttemptCancelled)));
        }
        if let Some(data) = copy.pop() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(trailers) = copy.trailers.take() {
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        if copy.state == BodyCopyState::Complete {
            return Poll::Ready(None);
        }
        copy.receiver_waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        let copy = self.0.lock();
        copy.state == BodyCopyState::Complete && copy.data.is_empty() && copy.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().remaining.map(SizeHint::with_exact).unwrap_or_default()
    }

    /// A receiver that waits for its peer learns here that the copy has failed.
    fn poll_deadline(&mut self, _unsent: usize, cx: &mut Context<'_>) -> Poll<Error> {
        let mut copy = self.0.lock();
        if copy.has_failed() {
            return Poll::Ready(Error::AttemptCancelled);
        }
        copy.receiver_waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for CopiedBody {
    fn drop(&mut self) {
        let mut copy = self.0.lock();
        copy.end(BodyCopyState::Abandoned);
        copy.discard_data(); // of a complete copy
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn body(pieces: &[&'static [u8]]) -> Body {
        Body::replayed(
            pieces.iter().map(|piece| Bytes::from_static(piece)).collect(),
            Body::empty(),
        )
    }

    /// The original and its copy.
    fn tee(body: Body) -> (Body, Body) {
        let (original, copy, _) = copy_while_sent(body, Arc::default());
        (original, copy)
    }

    #[tokio::test]
    async fn the_copy_gets_each_frame_of_the_original() {
        let (original, copy) = tee(body(&[b"one", b"two"]));
        assert_eq!(copy.size_hint().exact(), Some(6));
        assert_eq!(original.collect().await.unwrap().to_bytes(), "onetwo");
        assert_eq!(copy.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn the_copy_waits_for_the_original() {
        let (mut original, mut copy) = tee(body(&[b"one", b"two"]));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut copy).poll_frame(&mut cx).is_pending());
        original.frame().await.unwrap().unwrap();
        assert_eq!(copy.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        assert!(Pin::new(&mut copy).poll_frame(&mut cx).is_pending());
    }

    #[tokio::test]
    async fn the_copy_fails_if_the_original_is_dropped_before_its_end() {
        let (mut original, mut copy) = tee(body(&[b"one", b"two"]));
        original.frame().await.unwrap().unwrap();
        drop(original);
        assert!(copy.frame().await.unwrap().is_err());
    }

    #[tokio::test]
    async fn the_copy_is_complete_if_the_original_ends_without_a_further_poll() {
        /// One frame, after which the end arrives later.
        struct LateEnd(Option<Bytes>, Arc<AtomicUsize>);
        impl ReceivedBody for LateEnd {
            fn poll_frame(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
                self.0
                    .take()
                    .map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
            }

            fn is_end_stream(&self) -> bool {
                self.1.load(Ordering::Relaxed) > 0
            }

            fn size_hint(&self) -> SizeHint {
                SizeHint::default()
            }
        }
        let ended = Arc::new(AtomicUsize::new(0));
        let (mut original, copy) = tee(Body::received(Box::new(LateEnd(Some("one".into()), ended.clone()))));
        original.frame().await.unwrap().unwrap();
        ended.store(1, Ordering::Relaxed);
        drop(original);
        assert_eq!(copy.collect().await.unwrap().to_bytes(), "one");
    }

    #[tokio::test]
    async fn the_original_yields_once_if_half_of_the_maximum_waits_for_the_receiver() {
        static PIECE: [u8; MAX_PENDING_COPY_BYTES / 4] = [b'x'; MAX_PENDING_COPY_BYTES / 4];
        let (mut original, mut copy) = tee(body(&[&PIECE[..]; 5]));
        let mut cx = Context::from_waker(Waker::noop());
        let mut is_pending = || Pin::new(&mut original).poll_frame(&mut cx).is_pending();
        assert_eq!(
            [(); 4].map(|()| is_pending()),
            [false, false, true, false],
            "a half waits after two pieces"
        );
        copy.frame().await.unwrap().unwrap();
        copy.frame().await.unwrap().unwrap();
        assert_eq!(
            [(); 3].map(|()| is_pending()),
            [false, true, false],
            "the receiver has polled"
        );
    }

    #[tokio::test]
    async fn the_copy_of_a_slow_receiver_fails_without_a_delay_of_the_original() {
        static PIECE: [u8; MAX_PENDING_COPY_BYTES] = [b'x'; MAX_PENDING_COPY_BYTES];
        let memory = Arc::new(BodyCopyMemory::default());
        let (original, mut copy, monitor) = copy_while_sent(body(&[&PIECE, b"more", &PIECE]), memory.clone());
        assert!(!monitor.is_too_slow());
        let sent = original.collect().await.unwrap().to_bytes();
        assert_eq!(sent.len(), 2 * MAX_PENDING_COPY_BYTES + 4);
        assert!(copy.frame().await.unwrap().is_err());
        drop(copy);
        assert!(monitor.is_too_slow());
        assert_eq!(memory.0.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_receiver_that_keeps_up_gets_a_large_copy() {
        static PIECE: [u8; MAX_PENDING_COPY_BYTES] = [b'x'; MAX_PENDING_COPY_BYTES];
        let (mut original, mut copy) = tee(body(&[&PIECE, &PIECE, &PIECE]));
        for _ in 0..3 {
            original.frame().await.unwrap().unwrap();
            let copied = copy.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(copied.len(), MAX_PENDING_COPY_BYTES);
        }
        assert!(original.frame().await.is_none());
        assert!(copy.frame().await.is_none());
    }

    #[tokio::test]
    async fn copies_share_their_memory_and_release_it() {
        static PIECE: [u8; MAX_PENDING_COPY_BYTES] = [b'x'; MAX_PENDING_COPY_BYTES];
        let memory = Arc::new(BodyCopyMemory::default());
        let n_fitting = MAX_COPY_MEMORY_BYTES / (MAX_PENDING_COPY_BYTES + FRAME_OVERHEAD_BYTES);
        let mut waiting = Vec::new();
        for _ in 0..n_fitting {
            let (original, copy, monitor) = copy_while_sent(body(&[&PIECE]), memory.clone());
            original.collect().await.unwrap();
            assert!(!monitor.is_too_slow());
            waiting.push(copy);
        }
        let send_another = async || {
            let (original, copy, monitor) = copy_while_sent(body(&[&PIECE]), memory.clone());
            assert_eq!(original.collect().await.unwrap().to_bytes().len(), PIECE.len());
            drop(copy);
            monitor.is_too_slow()
        };
        assert!(send_another().await);
        let received = waiting.pop().unwrap().collect().await.unwrap().to_bytes();
        assert_eq!(received.len(), PIECE.len());
        assert!(!send_another().await);
        drop(waiting);
        assert_eq!(memory.0.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn the_copy_gets_trailers_and_has_no_length_if_the_original_has_none() {
        let trailers = HeaderMap::from_iter([(http::header::ETAG, http::HeaderValue::from_static("a"))]);
        let (original, copy) = tee(Body::buffered(
            [Bytes::from_static(b"one")].into(),
            Some(trailers.clone()),
        ));
        original.collect().await.unwrap();
        assert_eq!(copy.collect().await.unwrap().trailers(), Some(&trailers));

        struct Endless;
        impl ReceivedBody for Endless {
            fn poll_frame(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
                Poll::Pending
            }

            fn is_end_stream(&self) -> bool {
                false
            }

            fn size_hint(&self) -> SizeHint {
                SizeHint::default()
            }
        }
        let (original, copy) = tee(Body::received(Box::new(Endless)));
        assert_eq!((original.size_hint().exact(), copy.size_hint().exact()), (None, None));
    }

    #[tokio::test]
    async fn the_original_continues_without_a_receiver_of_the_copy() {
        let (original, copy) = tee(body(&[b"one", b"two"]));
        drop(copy);
        assert_eq!(original.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[test]
    fn an_empty_body_has_an_empty_copy() {
        let (original, copy) = tee(Body::empty());
        assert!(original.is_end_stream() && copy.is_end_stream());
    }
}
