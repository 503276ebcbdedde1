//! GetPort and WatchPort: the policy of one port of one workload.

use std::fmt;

use bytes::Bytes;
use futures_util::Stream;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tulle_core::drain;
use tulle_core::identity::Identity;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_server::SERVICE_NAME;

use crate::cluster::answer::{Answer, Encoder, For};
use crate::cluster::{Cluster, Subscription, inbound as view};
use crate::grpc::{self, Caller, Methods};
use crate::model::inbound::Server as Model;
use crate::policy::source::{self, Workload};
use crate::policy::{self, translate};
use crate::tls::creds::ClientCertificates;

/// What is known of ports; clones share it.
#[derive(Clone)]
pub struct Policies {
    cluster: Cluster,
    clients: ClientCertificates,
    drain: drain::Watch,
    encoder: Encoder,
}

impl Policies {
    pub(super) fn new(cluster: Cluster, clients: ClientCertificates, drain: drain::Watch) -> Self {
        let encoder = cluster.encoder();
        Self {
            cluster,
            clients,
            drain,
            encoder,
        }
    }

    fn subscribe(
        &self,
        spec: &PortSpec,
        caller: Option<&Caller>,
    ) -> Result<(Subscription<Option<Model>>, Bytes), Status> {
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
        self.check(caller, &workload)?;
        let mut subscription = self.cluster.inbound(view::Key { workload, port });
        let first = subscription.current();
        match message(&first, self.encoder) {
            Some(message) => Ok((subscription, message)),
            None => Err(Status::not_found("unknown server")),
        }
    }

    /// Refuses a caller who is not the workload that it asks about, where callers have to say who they are.
    fn check(&self, caller: Option<&Caller>, workload: &view::Workload) -> Result<(), Status> {
        let identities = match (self.clients, caller) {
            (ClientCertificates::Optional, _) | (ClientCertificates::Required, Some(Caller::ThisMachine)) => {
                return Ok(());
            }
            (ClientCertificates::Required, Some(Caller::Peer { identities, .. })) => &**identities,
            (ClientCertificates::Required, None) => &[],
        };
        let Some(expected) = self.cluster.identity(workload) else {
            return Ok(()); // there is no such workload, and nothing to tell
        };
        match expected
            .parse()
            .is_ok_and(|expected: Identity| identities.contains(&expected))
        {
            true => Ok(()),
            false => Err(Status::permission_denied(format!(
                "only {expected} may ask for the policies of this workload; the client's certificate is for {}",
                Names(identities)
            ))),
        }
    }

    fn watch(
        self,
        spec: &PortSpec,
        caller: Option<&Caller>,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (subscription, first) = self.subscribe(spec, caller)?;
        let encoder = self.encoder;
        Ok(policy::follow(subscription, first, self.drain, move |server| {
            message(server, encoder)
        }))
    }
}

impl Methods for Policies {
    const SERVICE: &'static str = SERVICE_NAME;

    async fn call(self, method: &str, req: Request<Body>) -> Response<Body> {
        let caller = req.extensions().get::<Caller>().cloned();
        let caller = caller.as_ref();
        match method {
            "GetPort" => {
                grpc::unary(req, |spec: PortSpec| {
                    self.subscribe(&spec, caller).map(|(_, server)| server)
                })
                .await
            }
            "WatchPort" => grpc::stream(req, |spec: PortSpec| self.watch(&spec, caller)).await,
            _ => grpc::unimplemented(),
        }
    }
}

/// Identities as an error lists them.
struct Names<'a>(&'a [Identity]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("nobody"),
            [name] => f.write_str(name.as_str()),
            [name, others @ ..] => write!(f, "{name} and {} more", others.len()),
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
