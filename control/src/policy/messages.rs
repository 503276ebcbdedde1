//! The messages of policy streams.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{self, Stream};

use crate::cluster::Subscription;
use crate::cluster::publish::published_value::PublishedValue;

/// Returns the messages of a stream: the first one, and one per change. The stream ends if the new value has no message, for
/// example because the workload was deleted. The proxy sends a new request then.
pub(super) fn message_stream<T>(
    subscription: Subscription<T>,
    first: Bytes,
    message: impl Fn(&Arc<PublishedValue<T>>) -> Option<Bytes> + Send,
) -> impl Stream<Item = Bytes> + Send
where
    T: Send + Sync + 'static,
{
    stream::unfold(
        (subscription, Some(first), message),
        async |(mut subscription, first, message)| {
            let next = match first {
                Some(first) => first,
                None => {
                    let now = subscription.changed().await;
                    message(&now)?
                }
            };
            Some((next, (subscription, None, message)))
        },
    )
}
