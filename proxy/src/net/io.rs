//! `Io`, the only stream type: plain TCP, or TLS in either role, with a prefix of bytes read earlier and byte counts.

use std::{
    io,
    net::IpAddr,
    os::fd::AsRawFd as _,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::Instant,
};
use tokio_rustls::{client, server};
use tulle_core::connections::{ConnectionHandle, ConnectionPermit};

use crate::net::{peer_socket, retirement::Retirement, tcp_metrics::ConnectionMetrics};

/// A TCP stream. First bytes that were read earlier are delivered again.
#[derive(Debug)]
pub(crate) struct Tcp {
    stream: TcpStream,
    prefix: Bytes,
    /// Whether the TLS stream that uses this one buffers its writes, up to [`MAX_BUFFERED_BYTES`].
    write_buffering: bool,
    /// Whether the kernel may delay partial packets, so that the last one leaves with the FIN.
    corked: bool,
    /// Whether a write failed with a reset. The kernel reports a reset only once: a later read would return the end of the
    /// stream.
    was_reset: bool,
    /// Whether the peer is known to be a process of this host.
    has_local_peer: bool,
    /// Whether the connection ends with a reset.
    must_reset: AtomicBool,
    /// The permit of an accepted connection; held while the socket is open, even after the connection changes protocol.
    permit: Option<ConnectionPermit>,
}

/// Flags of a corked send. The socket option `TCP_CORK` would cost an extra system call.
const CORK_FLAGS: libc::c_int = libc::MSG_MORE | libc::MSG_NOSIGNAL;

/// Maximum bytes that TLS buffers. Above this, rustls can reach its own limit of queued records and then accept fewer bytes than
/// given.
const MAX_BUFFERED_BYTES: usize = 48 * 1024;

/// How long the kernel keeps the unsent bytes of a connection that was evicted, or stopped because the policy now denies its
/// request ([`ConnectionHandle::prefer_reset`]), if the peer does not read. Without a limit, such clients could fill the
/// kernel's memory with connections that are not counted any more.
const STOPPED_SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Any connection of the proxy, in either direction.
pub(crate) struct Io {
    stream: Stream,
    prefix: Bytes,
    counted: Option<ConnectionCounter>,
    /// `None` if the connection may get requests until it ends.
    retirement: Option<Box<Retirement>>,
}

enum Stream {
    Tcp(Tcp),
    // Boxed: a rustls connection is several hundred bytes, and most futures hold an `Io`.
    TlsClient(Box<client::TlsStream<Tcp>>),
    TlsServer(Box<server::TlsStream<Tcp>>),
}

struct ConnectionCounter {
    metrics: Arc<ConnectionMetrics>,
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
            write_buffering: false,
            corked: false,
            was_reset: false,
            has_local_peer: false,
            must_reset: AtomicBool::new(false),
            permit: None,
        }
    }

    /// Attaches the connection's permit, if there is one. The permit tracks the connection's activity.
    pub(crate) fn with_permit(mut self, permit: Option<ConnectionPermit>) -> Self {
        self.permit = permit;
        if !self.prefix.is_empty() {
            self.mark_active();
        }
        self
    }

    /// Marks the peer as a process of this host. Needed if the application is dialled from the client's address:
    /// [`Io::is_local`] compares addresses, and both ends of this connection have different ones.
    pub(crate) fn with_local_peer(mut self) -> Self {
        self.has_local_peer = true;
        self
    }

    /// Makes the connection end with a reset when it is dropped.
    pub(crate) fn reset_on_drop(&self) {
        self.must_reset.store(true, Ordering::Relaxed);
    }

    /// Undoes [`Self::reset_on_drop`].
    pub(crate) fn close_on_drop(&self) {
        self.must_reset.store(false, Ordering::Relaxed);
    }

    pub(crate) fn has_permit(&self) -> bool {
        self.permit.is_some()
    }

    fn mark_active(&self) {
        if let Some(permit) = &self.permit {
            permit.record_activity();
        }
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Puts bytes that were already read in front of the stream again.
    pub(crate) fn prepend(mut self, bytes: Bytes) -> Self {
        self.prefix = concat_prefix(bytes, self.prefix.split_off(0));
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

    fn record_write(&mut self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => self.was_reset = true,
            Poll::Ready(_) => self.mark_active(),
            Poll::Pending => {}
        }
    }

    /// Whether a write of `len` bytes is held back. It then returns `Pending` and registers no waker, and rustls keeps the bytes
    /// until the owner disables buffering and flushes.
    fn must_buffer(&self, len: usize) -> bool {
        self.write_buffering && len < MAX_BUFFERED_BYTES
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let is_requested = self.must_reset.load(Ordering::Relaxed);
        let is_evicted_or_stopped = self.permit.as_ref().is_some_and(ConnectionPermit::prefers_reset);
        // A connection that was evicted or stopped is reset only if the peer has acknowledged all bytes: otherwise the reset
        // could discard a complete response in flight. An owner whose response is incomplete, and could look complete after a
        // FIN, has called `Io::reset_on_drop`.
        let must_reset = is_requested || is_evicted_or_stopped && unacknowledged_bytes(&self.stream) == Some(0);
        let socket = SockRef::from(&self.stream);
        let result = match (must_reset, is_evicted_or_stopped) {
            (true, _) => socket.set_linger(Some(Duration::ZERO)),
            (false, true) => socket.set_tcp_user_timeout(Some(STOPPED_SEND_TIMEOUT)),
            (false, false) => Ok(()),
        };
        if let Err(error) = result {
            tracing::debug!(%error, must_reset, "setting a socket option failed, the connection is closed without it");
        }
    }
}

impl Io {
    pub(crate) fn tcp(tcp: Tcp) -> Self {
        Self::from_stream(Stream::Tcp(tcp))
    }

    pub(crate) fn tls_client(tls: client::TlsStream<Tcp>) -> Self {
        Self::from_stream(Stream::TlsClient(Box::new(tls)))
    }

    pub(crate) fn tls_server(tls: server::TlsStream<Tcp>) -> Self {
        Self::from_stream(Stream::TlsServer(Box::new(tls)))
    }

    fn from_stream(stream: Stream) -> Self {
        Self {
            stream,
            prefix: Bytes::new(),
            counted: None,
            retirement: None,
        }
    }

    /// Sets the time from which the connection gets no further request.
    pub(crate) fn retire(mut self, retirement: Retirement) -> Self {
        self.retirement = Some(Box::new(retirement));
        self
    }

    /// Whether the connection gets no further request. `now` is called only if the connection has a [`Retirement`].
    pub(crate) fn is_retired(&self, now: impl FnOnce() -> Instant) -> bool {
        self.retirement
            .as_ref()
            .is_some_and(|retirement| retirement.is_due(now()))
    }

    pub(crate) fn take_retirement(&mut self) -> Option<Box<Retirement>> {
        self.retirement.take()
    }

    /// Puts bytes that were read from this stream back in front of it.
    pub(crate) fn prepend(mut self, bytes: Bytes) -> Self {
        self.prefix = concat_prefix(bytes, self.prefix.split_off(0));
        self
    }

    /// Counts this connection from now on: bytes both ways, including the prefix, and its end when it is dropped.
    pub(crate) fn count(mut self, metrics: Arc<ConnectionMetrics>) -> Self {
        metrics.record_opened();
        metrics.record_read(self.prefix.len() as u64);
        self.counted = Some(ConnectionCounter { metrics, errno: None });
        self
    }

    /// Makes the connection end with a reset when it is dropped, so that the peer does not see a clean end.
    pub(crate) fn reset_on_drop(&self) {
        self.transport().reset_on_drop();
    }

    /// Makes the kernel acknowledge received data immediately: some clients wait for this before they send more. No effect under
    /// TLS.
    pub(crate) fn enable_quickack(&self) {
        if let Stream::Tcp(Tcp { stream, .. }) = &self.stream
            && let Err(error) = SockRef::from(stream).set_tcp_quickack(true)
        {
            tracing::debug!(%error, "enabling TCP_QUICKACK failed, the client may send later");
        }
    }

    /// Lets the kernel delay partial packets, so that the last one leaves with the FIN. No effect under TLS.
    pub(crate) fn cork(&mut self) {
        if let Stream::Tcp(tcp) = &mut self.stream {
            tcp.corked = true;
        }
    }

    /// Sends TLS close_notify before the connection is dropped. Without TLS there is nothing to send.
    pub(crate) fn poll_close_notify(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.stream {
            Stream::Tcp(_) => Poll::Ready(Ok(())),
            Stream::TlsClient(_) | Stream::TlsServer(_) => Pin::new(self).poll_shutdown(cx),
        }
    }

    /// Makes TLS buffer small writes until buffering is disabled again and the stream is flushed. No task is woken for a buffered
    /// write. No effect without TLS.
    pub(crate) fn set_write_buffering(&mut self, is_enabled: bool) {
        match &mut self.stream {
            Stream::Tcp(_) => {}
            Stream::TlsClient(tls) => tls.get_mut().0.write_buffering = is_enabled,
            Stream::TlsServer(tls) => tls.get_mut().0.write_buffering = is_enabled,
        }
    }

    fn is_write_buffering(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) => false,
            Stream::TlsClient(tls) => tls.get_ref().0.write_buffering,
            Stream::TlsServer(tls) => tls.get_ref().0.write_buffering,
        }
    }

    /// Whether the connection is TLS, terminated or started by this proxy; the peer is then assumed to be a proxy.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.stream, Stream::Tcp(_))
    }

    /// Whether the socket has unread data. Asks the kernel, because the runtime may not know of it yet.
    pub(crate) fn has_unread(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        matches!(SockRef::from(self.socket()).peek(&mut byte), Ok(1..))
    }

    /// Whether a peer that has closed its write side has closed the whole connection; `None` if unknown. A TLS peer is assumed
    /// to be a proxy, which never half-closes a connection on which it sends HTTP/1 requests.
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

    /// The handle of an accepted connection; `None` if it was dialled.
    pub(crate) fn handle(&self) -> Option<ConnectionHandle> {
        self.transport().permit.as_ref().map(ConnectionPermit::handle)
    }

    /// Whether `peer`, the remote address, is an address of this host: it equals the local address, or the connection was
    /// created [`with_local_peer`](Tcp::with_local_peer). False under TLS.
    pub(crate) fn is_local(&self, peer: IpAddr) -> bool {
        let Stream::Tcp(tcp) = &self.stream else {
            return false;
        };
        tcp.has_local_peer || tcp.stream.local_addr().is_ok_and(|local| local.ip() == peer)
    }

    /// Waits until the kernel reports an error on the connection, even after the peer's FIN; returns immediately under TLS.
    pub(crate) async fn wait_for_error(&self) {
        if let Stream::Tcp(Tcp { stream, .. }) = &self.stream {
            // The caller checks the error afterwards.
            let _ = stream.ready(Interest::ERROR).await;
        }
    }

    /// Whether data was written after the peer closed, and the peer answered with a reset. Clears the error of the socket, so only
    /// the first call can return true.
    pub(crate) fn take_broken_pipe_error(&self) -> bool {
        let Stream::Tcp(Tcp { stream, .. }) = &self.stream else {
            return false;
        };
        matches!(stream.take_error(), Ok(Some(error)) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Bytes written that the peer's kernel has not acknowledged; `None` under TLS.
    pub(crate) fn unacknowledged_bytes(&self) -> Option<usize> {
        match &self.stream {
            Stream::Tcp(Tcp { stream, .. }) => unacknowledged_bytes(stream),
            Stream::TlsClient(_) | Stream::TlsServer(_) => None,
        }
    }

    fn record_error<T>(&mut self, result: &io::Result<T>) {
        if let (Err(error), Some(counted)) = (result, &mut self.counted) {
            counted.errno = error.raw_os_error().or(counted.errno);
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if let Some(counted) = self.counted.take() {
            counted.metrics.record_closed(counted.errno);
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

/// Bytes written that the peer's kernel has not acknowledged; `None` if the kernel does not know.
#[expect(unsafe_code, reason = "no crate wraps this ioctl")]
fn unacknowledged_bytes(stream: &TcpStream) -> Option<usize> {
    let mut n: libc::c_int = 0;
    // SAFETY: the socket is open, and the kernel writes one integer, which outlives the call.
    let status = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) };
    usize::try_from(n).ok().filter(|_| status == 0)
}

fn concat_prefix(bytes: Bytes, prefix: Bytes) -> Bytes {
    match prefix.is_empty() {
        true => bytes,
        false => [bytes, prefix].concat().into(),
    }
}

/// Copies as much of `prefix` as fits; returns true if it delivered something.
fn deliver_prefix(prefix: &mut Bytes, buf: &mut ReadBuf<'_>) -> bool {
    if prefix.is_empty() || buf.remaining() == 0 {
        return false;
    }
    let n = prefix.len().min(buf.remaining());
    buf.put_slice(&prefix[..n]);
    prefix.advance(n);
    if prefix.is_empty() {
        *prefix = Bytes::new(); // frees the allocation
    }
    true
}

impl AsyncRead for Tcp {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if deliver_prefix(&mut self.prefix, buf) {
            return Poll::Ready(Ok(()));
        }
        let n_before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > n_before {
            self.mark_active();
        } else if self.was_reset && matches!(read, Poll::Ready(Ok(()))) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        read
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.must_buffer(buf.len()) {
            return Poll::Pending;
        }
        let written = match self.corked {
            true => self.poll_corked(cx, |socket| socket.send_with_flags(buf, CORK_FLAGS)),
            false => Pin::new(&mut self.stream).poll_write(cx, buf),
        };
        self.record_write(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.must_buffer(bufs.iter().map(|buf| buf.len()).sum()) {
            return Poll::Pending;
        }
        let written = match self.corked {
            true => self.poll_corked(cx, |socket| socket.send_vectored_with_flags(bufs, CORK_FLAGS)),
            false => Pin::new(&mut self.stream).poll_write_vectored(cx, bufs),
        };
        self.record_write(&written);
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

/// Calls a poll function of the stream, whichever variant it is.
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
        let n_before = buf.filled().len();
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_read(cx, buf)));
        self.record_error(&result);
        if let Some(counted) = &self.counted {
            counted.metrics.record_read((buf.filled().len() - n_before) as u64);
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_write(cx, buf)));
        self.record_write(&result);
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_write_vectored(cx, bufs)));
        self.record_write(&result);
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_write_buffering() {
            return Poll::Ready(Ok(()));
        }
        let result = ready!(on_stream!(self, s => Pin::new(s).poll_flush(cx)));
        self.record_error(&result);
        Poll::Ready(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.set_write_buffering(false);
        on_stream!(self, s => Pin::new(s).poll_shutdown(cx))
    }
}

impl Io {
    fn record_write(&mut self, result: &io::Result<usize>) {
        self.record_error(result);
        if let (Ok(n), Some(counted)) = (result, &self.counted) {
            counted.metrics.record_written(*n as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };
    use tulle_core::{
        connections::{ConnectionLimiter, SameAddressEviction},
        metrics::Registry,
    };

    use super::*;

    /// Accepts a connection, passes it to `drop_connection`, and returns the result of the peer's read.
    async fn peer_read_after(drop_connection: impl FnOnce(Tcp)) -> io::Result<usize> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        drop_connection(Tcp::new(listener.accept().await.unwrap().0));
        peer.read(&mut [0]).await
    }

    #[tokio::test]
    async fn a_refused_or_stopped_connection_is_reset_and_any_other_is_closed() {
        let limiter = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new());
        let admit = |last| limiter.admit(IpAddr::from([10, 0, 0, last]));
        assert_eq!(peer_read_after(drop).await.unwrap(), 0);
        assert_eq!(peer_read_after(|tcp| drop(tcp.with_permit(admit(1)))).await.unwrap(), 0);
        let refused = peer_read_after(|tcp| tcp.reset_on_drop()).await;
        let stopped = peer_read_after(|tcp| {
            let tcp = tcp.with_permit(admit(1));
            Io::tcp(tcp).handle().unwrap().prefer_reset();
        });
        let evicted = peer_read_after(|tcp| {
            let tcp = tcp.with_permit(admit(1));
            drop((admit(2), tcp));
        });
        for reset in [refused, stopped.await, evicted.await] {
            assert_eq!(reset.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        let closed = peer_read_after(|tcp| {
            tcp.reset_on_drop();
            tcp.close_on_drop();
        });
        assert_eq!(closed.await.unwrap(), 0);
    }

    /// A connection with a full send buffer whose peer does not read, the peer, and the number of bytes written.
    async fn unread_connection() -> (Tcp, TcpStream, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let peer = socket.connect(listener.local_addr().unwrap()).await.unwrap();
        let tcp = Tcp::new(listener.accept().await.unwrap().0);
        let mut n_written = 0;
        while let Ok(n) = SockRef::from(&tcp.stream).send(&[b'x'; 1 << 16]) {
            n_written += n;
        }
        assert!(unacknowledged_bytes(&tcp.stream).unwrap() > 0);
        (tcp, peer, n_written)
    }

    #[tokio::test]
    async fn unsent_data_of_an_evicted_connection_is_delivered_unless_its_owner_requested_a_reset() {
        let limiter = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new());
        for must_reset in [false, true] {
            let (tcp, mut peer, n_written) = unread_connection().await;
            let tcp = tcp.with_permit(limiter.admit([10, 0, 0, 1].into()));
            if must_reset {
                tcp.reset_on_drop();
            }
            drop((limiter.admit([10, 0, 0, 2].into()), tcp));
            let mut all = Vec::new();
            let read = peer.read_to_end(&mut all).await.map_err(|error| error.kind());
            match must_reset {
                false => assert_eq!(read, Ok(n_written)),
                true => assert_eq!(read, Err(io::ErrorKind::ConnectionReset)),
            }
        }
    }

    #[tokio::test]
    async fn unsent_data_of_an_evicted_connection_is_discarded_if_the_peer_does_not_read() {
        let limiter = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new());
        let (tcp, peer, _) = unread_connection().await;
        let (from, to) = (tcp.stream.local_addr().unwrap(), peer.local_addr().unwrap());
        drop((
            tcp.with_permit(limiter.admit([10, 0, 0, 1].into())),
            limiter.admit([10, 0, 0, 2].into()),
        ));
        while peer_socket::query_inode(from, to).unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn a_read_fails_after_a_write_failed_with_a_reset() {
        for is_corked in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut peer, _) = listener.accept().await.unwrap();
            peer.write_all(b"half").await.unwrap();
            SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
            drop(peer);
            ours.ready(Interest::ERROR).await.unwrap();
            let mut ours = Io::tcp(Tcp::new(ours));
            if is_corked {
                ours.cork();
            }
            let written = ours.write_all(b"more of a request").await;
            assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            let mut all = Vec::new();
            let read = ours.read_to_end(&mut all).await;
            assert_eq!(
                read.unwrap_err().kind(),
                io::ErrorKind::ConnectionReset,
                "corked: {is_corked}, {all:?}"
            );
        }
    }
}
