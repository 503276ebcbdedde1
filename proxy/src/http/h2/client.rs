//! HTTP/2 towards a peer or an application.

use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Reason, RecvStream,
    client::{self, ResponseFuture, SendRequest},
};
use http::{Request, Response};
use http_body::Body as _;
use tokio::{sync::watch, time::timeout};

use crate::{
    http::{
        body::Body,
        error::Error,
        h2::{
            From, KeepAlive, Params, Received,
            batch::{Batch, Batched, batched},
            send::Sending,
            stream::Stream,
            unanswered,
            windows::{Member, Windows},
        },
        headers, interim, websocket,
    },
    net::io::Io,
};

/// Sends requests on a connection.
#[derive(Clone)]
pub(crate) struct Sender {
    send: SendRequest<Bytes>,
    member: Member,
}

impl Sender {
    /// One that can take a request now.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) async fn ready(self) -> Result<Self, h2::Error> {
        let send = self.send.ready().await?;
        Ok(Self { send, ..self })
    }
}

/// A connection for requests, and for streams that carry other protocols.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) sender: Sender,
    /// Whether the peer's settings have come.
    told: watch::Receiver<bool>,
    /// Held by each stream that carries another protocol.
    streams: Arc<()>,
}

impl Shared {
    /// Whether the peer takes another stream for another protocol, as its settings say. These are waited for, but not for long.
    pub(crate) async fn takes_stream(&mut self) -> bool {
        let told = async { self.told.wait_for(|told| *told).await.is_ok() };
        let told = timeout(SETTINGS_TIMEOUT, told).await;
        let send = &self.sender.send;
        // They last, and must not keep requests from theirs.
        let has_room = Arc::strong_count(&self.streams) < send.current_max_send_streams() / 2;
        told == Ok(true) && has_room && send.is_extended_connect_protocol_enabled()
    }

    /// As [`Sender::ready`].
    pub(crate) async fn ready(self) -> Result<Self, h2::Error> {
        let sender = self.sender.ready().await?;
        Ok(Self { sender, ..self })
    }
}

/// How long the settings of a peer may take that has accepted a connection.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(1);
/// How many streams a peer permits that has not said how many: more than any can say.
const UNTOLD: usize = usize::MAX - 1;

/// Opens an HTTP/2 connection on `io`. A task drives it until every handle is gone.
///
/// # Errors
/// The connection broke before our settings were written.
pub(crate) async fn connect(io: Io, params: &Params) -> Result<Shared, Error> {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        .max_frame_size(params.max_frame_size.unwrap_or(Params::FRAME_SIZE))
        .max_header_list_size(params.max_header_list)
        .initial_max_send_streams(UNTOLD)
        .enable_push(false);
    if let Some(streams) = params.max_resets {
        builder.max_concurrent_reset_streams(streams);
    }
    if let Some(size) = params.max_send_buffer {
        builder.max_send_buffer_size(size);
    }
    let (io, batch) = batched(io);
    let (send, connection) = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let windows = Windows::new(params);
    let member = windows.member();
    let (tell, told) = watch::channel(false);
    tokio::spawn(drive(connection, batch, windows, params.keep_alive, tell));
    Ok(Shared {
        sender: Sender { send, member },
        told,
        streams: Arc::default(),
    })
}

/// Moves frames until the connection ends, or its peer stops answering pings.
async fn drive(
    mut connection: client::Connection<Batched, Bytes>,
    batch: Batch,
    mut windows: Windows,
    keep_alive: Option<KeepAlive>,
    tell: watch::Sender<bool>,
) {
    let mut tell = Some(tell);
    let pings = connection.ping_pong();
    let moving = poll_fn(|cx| {
        batch.poll(cx, |cx| {
            windows.adapt(|sizes| {
                connection.set_initial_window_size(sizes.stream)?;
                connection.set_target_window_size(sizes.connection);
                Ok::<_, h2::Error>(())
            });
            let polled = Pin::new(&mut connection).poll(cx);
            if tell.is_some()
                && connection.max_concurrent_send_streams() != UNTOLD
                && let Some(tell) = tell.take()
            {
                tell.send_replace(true);
            }
            polled
        })
    });
    tokio::select! {
        ended = moving => if let Err(error) = ended {
            tracing::debug!(%error, "HTTP/2 connection ended");
        },
        () = unanswered(keep_alive, pings) => tracing::debug!("HTTP/2 peer did not answer a ping in time"),
    }
}

/// Sends one request, taken out of `req`, on a connection that has capacity for it, and waits for the response head.
///
/// The request body is sent from here until then; what still streams afterwards gets a task of its own.
///
/// # Errors
/// The stream was refused or reset, the connection broke, or the request body failed.
pub(crate) async fn send(
    Sender { mut send, member }: Sender,
    req: &mut Request<Body>,
    addr: SocketAddr,
) -> Result<Response<Body>, Error> {
    let (parts, body) = std::mem::take(req).into_parts();
    let no_body = body.is_end_stream();
    let (mut response, stream) = send
        .send_request(Request::from_parts(parts, ()), no_body)
        .map_err(|error| lost(error, addr))?;
    let mut n_interims = 0;
    let head = if no_body {
        poll_fn(|cx| poll_head(cx, &mut response, &mut n_interims)).await
    } else {
        let mut sending = Some(Sending::new(body, stream));
        let head = poll_fn(|cx| {
            if let Poll::Ready(head) = poll_head(cx, &mut response, &mut n_interims) {
                return Poll::Ready(Ok(head));
            }
            if let Some(body) = &mut sending {
                match body.poll_send(cx) {
                    Poll::Ready(Err(error)) if error.is_of_request_body() => return Poll::Ready(Err(error)),
                    // A peer that stops reading may still answer; the response says what happened.
                    Poll::Ready(_) => sending = None,
                    Poll::Pending => {}
                }
            }
            Poll::Pending
        })
        .await?;
        if let (Some(sending), true) = (sending, head.is_ok()) {
            tokio::spawn(sending.rest());
        }
        head
    };
    let response = head.map_err(|error| lost(error, addr))?;
    Ok(received(response, member))
}

/// Asks for a stream that carries another protocol, and waits for the response head, which may be another answer.
///
/// # Errors
/// The stream was refused or reset, or the connection broke.
pub(crate) async fn extend(
    Shared { sender, streams, .. }: Shared,
    req: Request<Body>,
    addr: SocketAddr,
) -> Result<Response<Body>, Error> {
    let Sender { mut send, member } = sender;
    let asked = send.send_request(req.map(drop), false);
    let (mut response, mut stream) = asked.map_err(|error| lost(error, addr))?;
    let mut n_interims = 0;
    let head = poll_fn(|cx| poll_head(cx, &mut response, &mut n_interims)).await;
    let response = head.map_err(|error| lost(error, addr))?;
    if websocket::opens_stream(&response) {
        return Ok(response.map(|received| Body::stream(Stream::new(stream, received, member).counted(streams))));
    }
    // Who has answered may not want it any more.
    let _ = stream.send_data(Bytes::new(), true);
    Ok(received(response, member))
}

/// A response with its body.
fn received(response: Response<RecvStream>, member: Member) -> Response<Body> {
    let left = headers::content_length(response.headers());
    response.map(|stream| {
        Body::from(Received {
            stream,
            from: From::Server,
            left,
            _member: member,
        })
    })
}

/// Waits for the final response; interim ones are passed on.
fn poll_head(
    cx: &mut Context<'_>,
    response: &mut ResponseFuture,
    n_interims: &mut usize,
) -> Poll<Result<Response<RecvStream>, h2::Error>> {
    while let Poll::Ready(Some(Ok(interim))) = response.poll_informational(cx) {
        *n_interims += 1;
        if *n_interims > interim::MOST {
            return Poll::Ready(Err(Reason::ENHANCE_YOUR_CALM.into()));
        }
        interim::pass(interim);
    }
    Pin::new(response).poll(cx)
}

/// Tells a connection that ended under us from a stream that was reset.
pub(crate) fn lost(error: h2::Error, addr: SocketAddr) -> Error {
    if error.is_io() {
        Error::Closed {
            addr,
            reused: true,
            sent: true,
        }
    } else {
        Error::H2(error)
    }
}
