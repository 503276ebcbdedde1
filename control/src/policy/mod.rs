//! The policy services: what a workload's port accepts, and how clients reach a destination.
//!
//! A request names a workload and a port, or a client and a target; both become keys of the cluster that a stream
//! follows, and `translate` turns answers into messages. Nothing here reads objects.

pub mod inbound;
pub mod outbound;
mod source;
mod translate;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tulle_core::drain;

use crate::cluster::answer::Answer;
use crate::cluster::{Cluster, Subscription};
use crate::grpc::Service;
use crate::tls::creds::ClientCertificates;

/// What the services add to the cluster's answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Whether proxies honour `l5d-timeout` and `l5d-retry-*` of requests. Default no.
    pub request_headers: RequestHeaders,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestHeaders {
    #[default]
    Ignore,
    Honour,
}

/// Policies of workload ports; the streams end when the drain begins. Where clients have to show certificates, a workload is
/// told of its own ports only.
pub fn inbound_server(
    cluster: Cluster,
    clients: ClientCertificates,
    drain: drain::Watch,
) -> Service<inbound::Policies> {
    Service(inbound::Policies::new(cluster, clients, drain))
}

/// Policies of destinations; the streams end when the drain begins.
pub fn outbound_server(cluster: Cluster, config: Config, drain: drain::Watch) -> Service<outbound::Policies> {
    Service(outbound::Policies::new(cluster, config, drain))
}

/// The messages of a stream: the first, and one for each change. It ends when there is no message for a change, so that the
/// proxy asks anew, and when the control plane shuts down.
fn follow<T>(
    subscription: Subscription<T>,
    first: Bytes,
    drain: drain::Watch,
    message: impl Fn(&Answer<T>) -> Option<Bytes> + Send,
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
