//! `Io`, the one stream type: plain TCP, TLS in either role, bytes that were looked at before, and byte counts.

use std::{
    io,
    net::IpAddr,
    os::fd::AsRawFd as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{client, server};
use tulle_core::connections::{Activity, Place};

use crate::net::{counts::Counts, peer_socket};

/// A TCP stream whose first bytes may have been read already; they are delivered again.
#[derive(Debug)]
pub(crate) struct Tcp {
    stream: TcpStream,
    prefix: Bytes,
    /// Whether TLS on top keeps what it has to write, up to [`HELD`] bytes.
    held: bool,
    /// Whether the kernel shall keep what does not fill a packet until the connection ends.
    corked: bool,
    /// Whether a write was told of a reset: the kernel tells once, and who reads then would find an end.
    was_reset: bool,
    /// Of a connection that was accepted; it is held for as long as the socket is open, whatever the bytes have become.
    place: Option<Place>,
}

/// How what is corked is sent: an option of the socket would cost a system call of its own.
const CORKED: libc::c_int = libc::MSG_MORE | libc::MSG_NOSIGNAL;

/// Bytes that TLS holds back at most. It is ready to keep more, but not in any number of records, so that it may refuse some.
const HELD: usize = 48 * 1024;

/// Any connection the proxy holds, in either direction.
pub(crate) struct Io {
    stream: Stream,
    prefix: Bytes,
    counted: Option<Counted>,
}

enum Stream {
    Tcp(Tcp),
    // Boxed: a rustls connection is several hundred bytes, and most futures hold an `Io`.
    TlsClient(Box<client::TlsStream<Tcp>>),
    TlsServer(Box<server::TlsStream<Tcp>>),
}

/// Where the connection's bytes and its end are counted.
struct Counted {
    metrics: Arc<Counts>,
    errno: Option<i32>,
}

impl Tcp {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self::with_prefix(stream, Bytes::new())
    }

    pub(crate) fn with_prefix(stream: TcpStream, prefix: Bytes) -> Self {
        Self {
            stream,
            prefix,
            held: false,
            corked: false,
            was_reset: false,
            place: None,
        }
    }

    /// Gives this connection its place, if there is one, which is told what the connection carries.
    pub(crate) fn placed(mut self, place: Option<Place>) -> Self {
        self.place = place;
        if !self.prefix.is_empty() {
            self.mark_active();
        }
        self
    }

    /// Has the connection end with a reset when it is dropped.
    pub(crate) fn reset(&self) {
        if let Err(error) = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)) {
            tracing::debug!(%error, "a broken connection ends as if it were not");
        }
    }

    /// Whether this connection was accepted and has a place.
    pub(crate) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    fn mark_active(&self) {
        if let Some(place) = &self.place {
            place.mark();
        }
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Puts bytes that were read back in front.
    pub(crate) fn unread(mut self, bytes: Bytes) -> Self {
        self.prefix = in_front(bytes, self.prefix);
        self
    }

    fn poll_corked(
        &self,
        cx: &mut Context<'_>,
        send: impl Fn(SockRef<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            let sent = self
                .stream
                .try_io(Interest::WRITABLE, || send(SockRef::from(&self.stream)));
            if !matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
                return Poll::Ready(sent);
            }
        }
    }

    fn wrote(&mut self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => self.was_reset = true,
            Poll::Ready(_) => self.mark_active(),
            Poll::Pending => {}
        }
    }

    /// Whether so many bytes are few enough to wait for more.
    fn holds_back(&self, len: usize) -> bool {
        self.held && len < HELD
    }
}

impl Io {
    pub(crate) fn tcp(tcp: Tcp) -> Self {
        Self::of(Stream::Tcp(tcp))
    }

    pub(crate) fn tls_client(tls: client::TlsStream<Tcp>) -> Self {
        Self::of(Stream::TlsClient(Box::new(tls)))
    }

    pub(crate) fn tls_server(tls: server::TlsStream<Tcp>) -> Self {
        Self::of(Stream::TlsServer(Box::new(tls)))
    }

    fn of(stream: Stream) -> Self {
        Self {
            stream,
            prefix: Bytes::new(),
            counted: None,
        }
    }

    /// Puts bytes that were read from this stream back in front of it.
    pub(crate) fn unread(mut self, bytes: Bytes) -> Self {
        self.prefix = in_front(bytes, self.prefix.split_off(0));
        self
    }

    /// Counts this connection from now on: bytes both ways, those that are in front of it too, and its end when it is dropped.
    pub(crate) fn count(mut self, metrics: Arc<Counts>) -> Self {
        metrics.opened();
        metrics.read(self.prefix.len() as u64);
        self.counted = Some(Counted { metrics, errno: None });
        self
    }

    /// Has the connection end with a reset when it is dropped: its receiver must not take the end for a clean one.
    pub(crate) fn reset(&self) {
        self.transport().reset();
    }

    /// Has the kernel acknowledge what has come: some clients send no more until then.
    pub(crate) fn acknowledge(&self) {
        if let Stream::Tcp(Tcp { stream, .. }) = &self.stream
            && let Err(error) = SockRef::from(stream).set_tcp_quickack(true)
        {
            tracing::debug!(%error, "a client may send the rest later than it could");
        }
    }

    /// Has the kernel keep what does not fill a packet until the connection ends. Without effect under TLS.
    pub(crate) fn cork(&mut self) {
        if let Stream::Tcp(tcp) = &mut self.stream {
            tcp.corked = true;
        }
    }

    /// Says that nothing more comes, to be dropped afterwards: which is all that it takes without TLS.
    pub(crate) fn poll_goodbye(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.stream {
            Stream::Tcp(_) => Poll::Ready(Ok(())),
            Stream::TlsClient(_) | Stream::TlsServer(_) => Pin::new(self).poll_shutdown(cx),
        }
    }

    /// Has TLS keep what is written, as far as it is not much, until this is taken back and somebody flushes. Nobody is woken
    /// for what is kept, nor for what is refused meanwhile. Without TLS it changes nothing.
    pub(crate) fn hold_back(&mut self, held: bool) {
        match &mut self.stream {
            Stream::Tcp(_) => {}
            Stream::TlsClient(tls) => tls.get_mut().0.held = held,
            Stream::TlsServer(tls) => tls.get_mut().0.held = held,
        }
    }

    fn is_held_back(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) => false,
            Stream::TlsClient(tls) => tls.get_ref().0.held,
            Stream::TlsServer(tls) => tls.get_ref().0.held,
        }
    }

    /// Whether its bytes are TLS's: the other end is of the mesh then.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.stream, Stream::Tcp(_))
    }

    /// Whether something has come that was not read, whether or not the runtime has heard of it.
    pub(crate) fn has_unread(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        matches!(SockRef::from(self.socket()).peek(&mut byte), Ok(1..))
    }

    /// Whether a peer that has ended its side of the connection has closed all of it; unknown where that cannot be told. Proxies,
    /// who speak TLS, never end one side alone.
    pub(crate) fn is_closed_by_peer(&self) -> Option<bool> {
        match &self.stream {
            Stream::Tcp(Tcp { stream, .. }) => peer_socket::is_closed(stream),
            Stream::TlsClient(_) | Stream::TlsServer(_) => Some(true),
        }
    }

    fn socket(&self) -> &TcpStream {
        &self.transport().stream
    }

    fn transport(&self) -> &Tcp {
        match &self.stream {
            Stream::Tcp(tcp) => tcp,
            Stream::TlsClient(tls) => tls.get_ref().0,
            Stream::TlsServer(tls) => tls.get_ref().0,
        }
    }

    /// What its place is told, if it was accepted.
    pub(crate) fn activity(&self) -> Option<Activity> {
        self.transport().place.as_ref().map(Place::activity)
    }

    /// Whether this is a plain connection to `peer` on this host.
    pub(crate) fn is_local(&self, peer: IpAddr) -> bool {
        let Stream::Tcp(Tcp { stream, .. }) = &self.stream else {
            return false;
        };
        stream.local_addr().is_ok_and(|local| local.ip() == peer)
    }

    /// Waits until the kernel says that the connection is broken, even if the other side's end has come; at once under TLS.
    pub(crate) async fn broken(&self) {
        if let Stream::Tcp(Tcp { stream, .. }) = &self.stream {
            // What is wrong, and whether it is, is asked for afterwards.
            let _ = stream.ready(Interest::ERROR).await;
        }
    }

    /// Whether what was written was thrown away after the other side's end: the kernel's answer to it has come.
    pub(crate) fn wrote_after_end(&self) -> bool {
        let Stream::Tcp(Tcp { stream, .. }) = &self.stream else {
            return false;
        };
        matches!(stream.take_error(), Ok(Some(error)) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Bytes that were written and that the other side's kernel has not acknowledged; unknown under TLS.
    #[expect(unsafe_code, reason = "no crate asks for it")]
    pub(crate) fn unacknowledged(&self) -> Option<usize> {
        let Stream::Tcp(Tcp { stream, .. }) = &self.stream else {
            return None;
        };
        let mut n: libc::c_int = 0;
        // SAFETY: the socket is open, and the kernel writes one integer, which lives.
        let asked = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) };
        usize::try_from(n).ok().filter(|_| asked == 0)
    }

    fn note_error<T>(&mut self, result: &io::Result<T>) {
        if let (Err(error), Some(counted)) = (result, &mut self.counted) {
            counted.errno = error.raw_os_error().or(counted.errno);
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(counted) = self.counted.take() {
            counted.metrics.closed(counted.errno);
        }
    }
}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.stream {
            Stream::Tcp(_) => "Io::Tcp",
            Stream::TlsClient(_) => "Io::TlsClient",
            Stream::TlsServer(_) => "Io::TlsServer",
        })
    }
}

fn in_front(bytes: Bytes, of: Bytes) -> Bytes {
    match of.is_empty() {
        true => bytes,
        false => [bytes, of].concat().into(),
    }
}

/// Copies as much of `prefix` as fits; true when it delivered something.
fn deliver_prefix(prefix: &mut Bytes, buf: &mut ReadBuf<'_>) -> bool {
    if prefix.is_empty() || buf.remaining() == 0 {
        return false;
    }
    let n = prefix.len().min(buf.remaining());
    buf.put_slice(&prefix[..n]);
    prefix.advance(n);
    if prefix.is_empty() {
        *prefix = Bytes::new(); // gives the allocation back
    }
    true
}

impl AsyncRead for Tcp {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if deliver_prefix(&mut self.prefix, buf) {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.mark_active();
        } else if self.was_reset && matches!(read, Poll::Ready(Ok(()))) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        read
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.holds_back(buf.len()) {
            return Poll::Pending;
        }
        if self.corked {
            return self.poll_corked(cx, |socket| socket.send_with_flags(buf, CORKED));
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.holds_back(bufs.iter().map(|buf| buf.len()).sum()) {
            return Poll::Pending;
        }
        if self.corked {
            return self.poll_corked(cx, |socket| socket.send_vectored_with_flags(bufs, CORKED));
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Runs a poll function on whichever stream this is.
macro_rules! on_stream {
    ($self:ident, $s:ident => $call:expr) => {
        match &mut $self.stream {
            Stream::Tcp($s) => $call,
            Stream::TlsClient($s) => $call,
            Stream::TlsServer($s) => $call,
        }
    };
}

impl AsyncRead for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if deliver_prefix(&mut self.prefix, buf) {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_read(cx, buf)));
        self.note_error(&result);
        if let Some(counted) = &self.counted {
            counted.metrics.read((buf.filled().len() - before) as u64);
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_write(cx, buf)));
        self.wrote(&result);
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_write_vectored(cx, bufs)));
        self.wrote(&result);
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_held_back() {
            return Poll::Ready(Ok(()));
        }
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_flush(cx)));
        self.note_error(&result);
        Poll::Ready(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.hold_back(false);
        on_stream!(self, s => Pin::new(s).poll_shutdown(cx))
    }
}

impl Io {
    fn wrote(&mut self, result: &io::Result<usize>) {
        self.note_error(result);
        if let (Ok(n), Some(counted)) = (result, &self.counted) {
            counted.metrics.written(*n as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// The kernel tells of a reset once, whoever hears of it first.
    #[tokio::test]
    async fn a_reset_that_a_write_was_told_of_is_no_end_for_who_reads() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut peer, _) = listener.accept().await.unwrap();
        peer.write_all(b"half").await.unwrap();
        SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
        drop(peer);
        ours.ready(Interest::ERROR).await.unwrap();
        let mut ours = Io::tcp(Tcp::new(ours));
        let written = ours.write_all(b"more of a request").await;
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        let mut all = Vec::new();
        let read = ours.read_to_end(&mut all).await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset, "{all:?}");
    }
}
