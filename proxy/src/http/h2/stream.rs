//! A stream of HTTP/2 that carries another protocol, as a connection would (RFC 8441, section 4).

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::h2::windows::Member;

/// Both directions of a stream. Dropped before both have ended, it is reset.
pub(crate) struct Stream {
    send: SendStream<Bytes>,
    received: RecvStream,
    /// Received and not read yet.
    inbox: Bytes,
    /// Held as long as it may take room of its connection's window.
    _member: Member,
    /// By which its connection counts such streams.
    _counted: Option<Arc<()>>,
}

impl Stream {
    pub(super) fn new(send: SendStream<Bytes>, received: RecvStream, member: Member) -> Self {
        Self {
            send,
            received,
            inbox: Bytes::new(),
            _member: member,
            _counted: None,
        }
    }

    pub(super) fn counted(self, by: Arc<()>) -> Self {
        Self {
            _counted: Some(by),
            ..self
        }
    }

    /// Sends a part of `buf`, as far as there is room.
    fn poll_send(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize, h2::Error>> {
        self.send.reserve_capacity(buf.len());
        let mut room = self.send.capacity();
        while room == 0 {
            room = match ready!(self.send.poll_capacity(cx)) {
                Some(room) => room?,
                None => return Poll::Ready(Ok(0)), // the peer closed its side of the stream
            };
        }
        let part = Bytes::copy_from_slice(&buf[..room.min(buf.len())]);
        let len = part.len();
        self.send.send_data(part, false)?;
        Poll::Ready(Ok(len))
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while self.inbox.is_empty() {
            match ready!(self.received.poll_data(cx)) {
                Some(data) => self.inbox = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let n = self.inbox.len().min(buf.remaining());
        buf.put_slice(&self.inbox[..n]);
        self.inbox.advance(n);
        // The window opens as bytes are taken: what is not is held back at its sender.
        let _ = self.received.flow_control().release_capacity(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, buf).map_err(io::Error::other)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(())) // by who drives the connection
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send.send_data(Bytes::new(), true).map_err(io::Error::other))
    }
}
