//! The messages of policy streams.

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tulle_core::drain;

use crate::cluster::Subscription;
use crate::cluster::publish::shared_response::SharedResponse;

/// The messages of a stream: the first one, and one per change. The stream ends on shutdown, and if the new value has no
/// message, for example because the workload was deleted. The proxy sends a new request then.
pub(super) fn message_stream<T>(
    subscription: Subscription<T>,
    first: Bytes,
    drain: drain::Watch,
    message: impl Fn(&SharedResponse<T>) -> Option<Bytes> + Send,
) -> impl Stream<Item = Bytes> + Send
where
    T: Send + Sync + 'static,
{
    stream::unfold(
        (subscription, Some(first), drain, message),
        async |(mut subscription, first, drain, message)| {
            let next = match first {
                Some(first) => first,
                None => {
                    let now = tokio::select! {
                        now = subscription.changed() => now,
                        () = drain.signaled() => return None,
                    };
                    message(&now)?
                }
            };
            Some((next, (subscription, None, drain, message)))
        },
    )
}
