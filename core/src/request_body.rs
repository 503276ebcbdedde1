//! Reads a request body into memory.

use bytes::{Buf, BufMut, Bytes};
use http_body_util::BodyExt;
use hyper::body::Body;

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError<E> {
    #[error("the body is longer than {max_bytes} bytes")]
    TooLong { max_bytes: usize },
    #[error(transparent)]
    Body(E),
}

/// Reads a body of at most `max_bytes`. The rest of a longer body is received and discarded, so that its client reads the
/// response.
///
/// Copies each frame, because hyper's buffer for a frame has several KiB, even if the frame has one byte. So the memory is at most
/// the `content-length`, or without one, twice the bytes received.
///
/// # Errors
/// Fails if the body is longer, or cannot be received.
pub async fn read<B>(mut body: B, max_bytes: usize) -> Result<Bytes, ReadError<B::Error>>
where
    B: Body + Unpin,
{
    let announced = body
        .size_hint()
        .exact()
        .map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let mut is_too_long = announced.is_some_and(|length| length > max_bytes);
    let mut bytes = Vec::<u8>::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(ReadError::Body)?.into_data() else {
            continue;
        };
        is_too_long |= bytes.len() + data.remaining() > max_bytes;
        if is_too_long {
            bytes = Vec::new();
            continue;
        }
        let n_needed = bytes.len() + data.remaining();
        if n_needed > bytes.capacity() {
            // A vector that grows by itself could exceed the maximum.
            let capacity = announced.unwrap_or(2 * bytes.len()).clamp(n_needed, max_bytes);
            bytes.reserve_exact(capacity - bytes.len());
        }
        bytes.put(data);
    }
    match is_too_long {
        true => Err(ReadError::TooLong { max_bytes }),
        false => Ok(bytes.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::body::{Frame, SizeHint};

    use super::*;

    /// A body of single bytes.
    struct ByteByByte {
        left: usize,
        announced: Option<u64>,
    }

    impl Body for ByteByByte {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.left == 0 {
                return Poll::Ready(None);
            }
            self.left -= 1;
            // Like hyper, if it has read one byte into its large buffer.
            let mut buffer = Bytes::from(vec![b'x'; 8192]);
            Poll::Ready(Some(Ok(Frame::data(buffer.split_to(1)))))
        }

        fn size_hint(&self) -> SizeHint {
            self.announced.map_or_else(SizeHint::new, SizeHint::with_exact)
        }
    }

    #[tokio::test]
    async fn a_body_is_read_up_to_its_maximum_length() {
        for announced in [None, Some(1000)] {
            let body = |left| ByteByByte { left, announced };
            let read_bytes = read(body(1000), 1000).await.unwrap();
            assert_eq!(read_bytes.len(), 1000);
            let owned: Vec<u8> = read_bytes.into();
            assert!(owned.capacity() <= 1000, "{}", owned.capacity());
        }
        let body = ByteByByte {
            left: 1001,
            announced: None,
        };
        let refused = read(body, 1000).await.unwrap_err();
        assert!(matches!(refused, ReadError::TooLong { max_bytes: 1000 }), "{refused:?}");
        let body = ByteByByte {
            left: 10,
            announced: Some(1001),
        };
        assert!(read(body, 1000).await.is_err());
    }
}
