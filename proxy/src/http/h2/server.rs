//! Serving HTTP/2: one task a connection, and one for each of its streams.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

use bytes::Bytes;
use h2::{
    Reason, RecvStream,
    server::{self, SendResponse},
};
use http::{Request, Response};
use http_body::Body as _;
use tower::Service;
use tulle_core::drain;

use crate::{
    http::{
        body::Body,
        error::Error,
        h2::{
            From, Params, Received,
            send::{self, Sending},
            unanswered,
        },
        headers, interim,
        layers::Rescued,
        server::Closer,
    },
    net::io::Io,
};

/// Serves one connection until it ends, gracefully once `drain` or `closer` asks.
///
/// # Errors
/// The connection broke, or its client broke the rules of HTTP/2 or stopped answering pings.
pub(in crate::http) async fn serve<S>(
    io: Io,
    service: Rescued<S>,
    params: &Params,
    closer: &Closer,
    drain: &drain::Watch,
) -> Result<(), Error>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error> + Clone + Send + 'static,
    S::Future: Send,
{
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(params.stream_window)
        .initial_connection_window_size(params.connection_window)
        .max_header_list_size(params.max_header_list);
    if let Some(streams) = params.max_concurrent_streams {
        builder.max_concurrent_streams(streams);
    }
    if let Some(size) = params.max_frame_size {
        builder.max_frame_size(size);
    }
    if let Some(size) = params.max_send_buffer {
        builder.max_send_buffer_size(size);
    }
    if let Some(streams) = params.max_pending_resets {
        builder.max_pending_accept_reset_streams(streams);
    }
    let mut connection = builder.handshake::<_, Bytes>(io).await.map_err(Error::H2)?;
    let mut silent = pin!(unanswered(params.keep_alive, connection.ping_pong()));
    let mut ending = pin!(asked_to_end(closer, drain));
    let mut is_ending = false;
    poll_fn(|cx| {
        while let Poll::Ready(accepted) = connection.poll_accept(cx) {
            match accepted {
                Some(Ok((req, respond))) => drop(tokio::spawn(answer(service.clone(), req, respond))),
                Some(Err(error)) => return Poll::Ready(Err(Error::H2(error))),
                None => return Poll::Ready(Ok(())),
            }
        }
        if !is_ending && ending.as_mut().poll(cx).is_ready() {
            is_ending = true;
            connection.graceful_shutdown();
            cx.waker().wake_by_ref(); // to write what that means
        }
        silent.as_mut().poll(cx).map(|()| Err(Error::Left))
    })
    .await
}

async fn asked_to_end(closer: &Closer, drain: &drain::Watch) {
    tokio::select! {
        () = closer.notified() => {}
        () = drain.signaled() => {}
    }
}

/// Answers one request, unless its client takes it back.
async fn answer<S>(mut service: Rescued<S>, req: Request<RecvStream>, mut respond: SendResponse<Bytes>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Error>,
{
    let left = headers::content_length(req.headers());
    let req = req.map(|stream| match stream.is_end_stream() {
        true => Body::empty(),
        false => Body::from(Received {
            stream,
            from: From::Client,
            left,
        }),
    });
    let answered = {
        let mut answering = pin!(service.call(req));
        poll_fn(|cx| {
            let (polled, interims) = interim::collect(|| answering.as_mut().poll(cx));
            for rsp in interims {
                if let Err(error) = respond.send_informational(rsp) {
                    tracing::debug!(%error, "an interim response was not sent");
                }
            }
            match polled {
                Poll::Ready(answered) => Poll::Ready(Some(answered)),
                Poll::Pending => respond.poll_reset(cx).map(|_| None),
            }
        })
        .await
    };
    let rsp = match answered {
        None => return,
        Some(Ok(rsp)) => rsp,
        Some(Err(error)) => return respond.send_reset(send::reason(&error, Reason::INTERNAL_ERROR)),
    };
    let (parts, body) = rsp.into_parts();
    let ended = body.is_end_stream();
    match respond.send_response(Response::from_parts(parts, ()), ended) {
        Ok(_) if ended => {}
        Ok(stream) => Sending::new(body, stream).rest().await,
        Err(error) => {
            tracing::debug!(%error, "a response was not sent");
            respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}
