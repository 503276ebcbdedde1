//! Sends copies of a request to the mirrors of its rule (O7).

use std::{mem::take, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout};

use crate::{
    http::{
        body::Body,
        error::Error,
        lifecycle::classify,
        lifecycle::tee::{self, BodyCopyMemory, BodyCopyMonitor},
        upgrade::reply_channels::ReplyChannels,
    },
    outbound::{
        mirror::{Mirror, MirrorCopyResult},
        request::{
            attempt::{AttemptParams, AttemptSender},
            connect::TriedEndpoints,
            context::{ClientContext, OutgoingRequest},
            observe::RouteSource,
            retry,
        },
    },
    policy::client::HeaderOverrides,
};

/// Maximum time from the start of a copy to the end of its response.
const MAX_COPY_DURATION: Duration = Duration::from_secs(60);

/// Maximum size of a response that is read to its end, so that its connection can be used again.
const MAX_RESPONSE_BYTES: usize = 1024 * 1024;

/// Starts a copy of the request for each mirror that samples it. The copies neither delay nor fail the request.
pub(super) fn send_copies(
    client: ClientContext<'_>,
    mirrors: &[Arc<Mirror>],
    overrides: HeaderOverrides,
    outgoing: &mut OutgoingRequest<'_>,
) {
    // Upgrades and CONNECT requests are not copied: the bytes after them are not part of a request.
    if mirrors.is_empty()
        || outgoing.mirrors_started
        || outgoing.reply_channels.upgrade.is_some()
        || *outgoing.req.method() == Method::CONNECT
    {
        return;
    }
    outgoing.mirrors_started = true;
    for guard in mirrors.iter().filter_map(Mirror::start_copy) {
        let (mut copy, monitor) = copy_request(outgoing.req, &guard.mirror().usage.memory);
        if overrides == HeaderOverrides::Allow {
            retry::remove_overrides(copy.headers_mut());
        }
        let ClientContext {
            worker,
            client_addr,
            local_endpoints,
            ..
        } = client;
        let drain = client.drain.clone();
        // The drain does not wait for copies.
        tokio::spawn(async move {
            let client = ClientContext {
                worker,
                client_addr,
                families: &guard.mirror().endpoint_context.families,
                drain: &drain,
                local_endpoints,
            };
            let result = tokio::select! {
                result = send_copy(copy, guard.mirror(), client) => result,
                () = monitor.wait_failed() => MirrorCopyResult::Failure,
            };
            let is_too_slow = monitor.is_too_slow();
            // Resets the stream if the response ended before the request.
            monitor.cancel();
            guard.record(match is_too_slow {
                true => MirrorCopyResult::Dropped,
                false => result,
            });
        });
    }
}

/// Returns a request with the same head, whose body receives the frames of the original as they are sent.
fn copy_request(req: &mut Request<Body>, memory: &Arc<BodyCopyMemory>) -> (Request<Body>, BodyCopyMonitor) {
    let (original, body, monitor) = tee::copy_while_sent(take(req.body_mut()), memory.clone());
    *req.body_mut() = original;
    let mut copy = Request::new(body);
    *copy.method_mut() = req.method().clone();
    *copy.uri_mut() = req.uri().clone();
    *copy.version_mut() = req.version();
    *copy.headers_mut() = req.headers().clone();
    (copy, monitor)
}

async fn send_copy(mut copy: Request<Body>, mirror: &Mirror, client: ClientContext<'_>) -> MirrorCopyResult {
    let sender = AttemptSender {
        client,
        route_source: RouteSource::Route(&mirror.route),
        required_identity: None,
        backends: &mirror.backends,
        matched_prefix_len: None,
        route_request: None,
    };
    let mut outgoing = OutgoingRequest {
        req: &mut copy,
        reply_channels: ReplyChannels::default(),
        mirrors_started: true,
    };
    match timeout(MAX_COPY_DURATION, send_and_discard(&sender, &mut outgoing)).await {
        Ok(Ok(true)) => MirrorCopyResult::Success,
        Ok(Ok(false) | Err(_)) | Err(_) => MirrorCopyResult::Failure,
    }
}

/// Sends a copy and discards its response. Returns whether the response is a success.
async fn send_and_discard(sender: &AttemptSender<'_>, outgoing: &mut OutgoingRequest<'_>) -> Result<bool, Error> {
    let params = AttemptParams {
        // A request with a body is not resent, because the kept body frames would not count towards the memory of copies.
        may_resend: outgoing.req.body().is_end_stream(),
        ..AttemptParams::plain(Instant::now())
    };
    let rsp = sender
        .send_attempt(outgoing, &mut TriedEndpoints::new(), params)
        .await?;
    let (head, mut body) = rsp.into_parts();
    let mut grpc_status = classify::grpc_status(&head.headers);
    let mut n_bytes = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame?;
        n_bytes += frame.data_ref().map_or(0, Bytes::len);
        grpc_status = grpc_status.or_else(|| classify::grpc_status(frame.trailers_ref()?));
        if n_bytes > MAX_RESPONSE_BYTES {
            body.discard_with_result(Ok(()));
            break;
        }
    }
    Ok(classify::is_success(head.status, grpc_status))
}
