//! Keeping a request's body until its response head comes, so that it can be sent once more.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;

use crate::http::{body::Body, error::Error};

/// Longest body that is kept, in bytes.
const LIMIT: usize = 64 * 1024;

/// The way to get a body back whose sender has been dropped.
pub(crate) struct Kept(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    frames: VecDeque<Bytes>,
    len: usize,
    /// Too long, or its trailers have passed: the body cannot be repeated.
    spent: bool,
    /// What the sender had not read yet, once it is dropped.
    rest: Option<Body>,
}

/// A body that is kept while it is sent.
pub(crate) struct Keeping {
    body: Body,
    state: Arc<Mutex<State>>,
}

/// Splits a body into what is sent and the way to get it back.
pub(crate) fn keep(body: Body) -> (Body, Kept) {
    if body.size_hint().lower() > LIMIT as u64 {
        let state = State {
            spent: true,
            ..State::default()
        };
        return (body, Kept(Arc::new(Mutex::new(state))));
    }
    let state = Arc::<Mutex<State>>::default();
    (
        Body::keeping(Box::new(Keeping {
            body,
            state: state.clone(),
        })),
        Kept(state),
    )
}

impl Kept {
    /// The body from its start, where that is still possible.
    pub(crate) fn again(self) -> Option<Body> {
        let mut state = self.0.lock();
        if state.spent {
            return None;
        }
        let rest = state.rest.take()?;
        Some(Body::replayed(std::mem::take(&mut state.frames), rest))
    }
}

impl Keeping {
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let mut state = self.state.lock();
        if !state.spent {
            match &frame {
                Some(Ok(frame)) if let Some(data) = frame.data_ref() => {
                    state.len += data.len();
                    state.frames.push_back(data.clone());
                    state.spent = state.len > LIMIT;
                }
                Some(_) => state.spent = true,
                None => {}
            }
            if state.spent {
                state.frames = VecDeque::new();
            }
        }
        Poll::Ready(frame)
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.state.lock().rest = Some(std::mem::take(&mut self.body));
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_body_sent_in_part_is_whole_again() {
        let pieces: VecDeque<_> = ["one", "two", "three"].map(|s| Bytes::from_static(s.as_bytes())).into();
        let (mut sent, kept) = keep(Body::replayed(pieces, Body::empty()));
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        drop(sent);
        assert_eq!(kept.again().unwrap().collect().await.unwrap().to_bytes(), "onetwothree");
    }

    #[tokio::test]
    async fn a_long_body_is_not_kept() {
        let pieces: VecDeque<_> = vec![Bytes::from(vec![0; LIMIT]), Bytes::from_static(b"x")].into();
        let (sent, kept) = keep(Body::replayed(pieces, Body::empty()));
        sent.collect().await.unwrap();
        assert!(kept.again().is_none());
    }
}
