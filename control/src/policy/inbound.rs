//! GetPort and WatchPort: the policy of one port of one workload.

use bytes::Bytes;
use futures_util::Stream;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tulle_core::drain;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_server::SERVICE_NAME;

use crate::cluster::answer::{Answer, Encoder, For};
use crate::cluster::{Cluster, Subscription, inbound as view};
use crate::grpc::{self, Methods};
use crate::model::inbound::Server as Model;
use crate::policy::source::{self, Workload};
use crate::policy::{self, translate};

/// What is known of ports; clones share it.
#[derive(Clone)]
pub struct Policies {
    cluster: Cluster,
    drain: drain::Watch,
    encoder: Encoder,
}

impl Policies {
    pub(super) fn new(cluster: Cluster, drain: drain::Watch) -> Self {
        let encoder = cluster.encoder();
        Self {
            cluster,
            drain,
            encoder,
        }
    }

    fn subscribe(&self, spec: &PortSpec) -> Result<(Subscription<Option<Model>>, Bytes), Status> {
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
        match message(&first, self.encoder) {
            Some(message) => Ok((subscription, message)),
            None => Err(Status::not_found("unknown server")),
        }
    }

    fn watch(self, spec: &PortSpec) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (subscription, first) = self.subscribe(spec)?;
        let encoder = self.encoder;
        Ok(policy::follow(subscription, first, self.drain, move |server| {
            message(server, encoder)
        }))
    }
}

impl Methods for Policies {
    const SERVICE: &'static str = SERVICE_NAME;

    async fn call(self, method: &str, req: Request<Body>) -> Response<Body> {
        match method {
            "GetPort" => grpc::unary(req, |spec: PortSpec| self.subscribe(&spec).map(|(_, server)| server)).await,
            "WatchPort" => grpc::stream(req, |spec: PortSpec| self.watch(&spec)).await,
            _ => grpc::unimplemented(),
        }
    }
}

/// The message for a policy, as bytes that all who follow it share.
fn message(server: &Answer<Option<Model>>, encoder: Encoder) -> Option<Bytes> {
    let model = server.as_ref()?;
    Some(server.encoded(&For::all(encoder), || {
        grpc::encode(&[translate::inbound::server(model)])
    }))
}
