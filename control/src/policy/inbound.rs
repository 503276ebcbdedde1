//! GetPort and WatchPort: the policy of one port of one workload.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, Stream};
use tonic::{Request, Response, Status};
use tulle_core::drain;
use tulle_proto::inbound::inbound_server_policies_server::InboundServerPolicies;
use tulle_proto::inbound::{PortSpec, Server};

use crate::cluster::{Cluster, Subscription, inbound as view};
use crate::model::inbound::Server as Model;
use crate::policy::source::{self, Workload};
use crate::policy::translate;

pub struct Service {
    cluster: Cluster,
    drain: drain::Watch,
}

impl Service {
    pub(super) fn new(cluster: Cluster, drain: drain::Watch) -> Self {
        Self { cluster, drain }
    }

    fn subscribe(&self, spec: &PortSpec) -> Result<(Subscription<Option<Model>>, Server), Status> {
        let workload = source::parse(&spec.workload).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let port = match u16::try_from(spec.port) {
            Ok(port) if port > 0 => port,
            _ => return Err(Status::invalid_argument("Invalid port")),
        };
        if !self.cluster.is_synced() {
            return Err(Status::unavailable("the state of the cluster is not known yet"));
        }
        let workload = match workload {
            Workload::Pod(name) => view::Workload::Pod(name),
            Workload::External(name) => view::Workload::External(name),
        };
        let mut subscription = self.cluster.inbound(view::Key { workload, port });
        let first = subscription.current();
        match &*first {
            Some(server) => Ok((subscription, translate::inbound::server(server))),
            None => Err(Status::not_found("unknown server")),
        }
    }
}

#[tonic::async_trait]
impl InboundServerPolicies for Service {
    type WatchPortStream = Pin<Box<dyn Stream<Item = Result<Server, Status>> + Send>>;

    async fn get_port(&self, request: Request<PortSpec>) -> Result<Response<Server>, Status> {
        let (_, server) = self.subscribe(request.get_ref())?;
        Ok(Response::new(server))
    }

    async fn watch_port(&self, request: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        let (subscription, first) = self.subscribe(request.get_ref())?;
        let following = (subscription, self.drain.clone(), Some(first));
        let messages = stream::unfold(following, async |(mut subscription, drain, first)| {
            let message = match first {
                Some(first) => first,
                None => next(&mut subscription, &drain).await?,
            };
            Some((Ok(message), (subscription, drain, None)))
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

/// The next policy, or nothing when the workload has gone or the control plane shuts down.
async fn next(subscription: &mut Subscription<Option<Model>>, drain: &drain::Watch) -> Option<Server> {
    let server: Arc<Option<Model>> = tokio::select! {
        server = subscription.changed() => server,
        () = drain.signaled() => return None,
    };
    server.as_ref().as_ref().map(translate::inbound::server)
}
