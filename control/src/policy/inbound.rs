//! The service for server policies, with GetPort and WatchPort.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::Stream;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tulle_core::identity::Identity;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_server::SERVICE_NAME;

use crate::cluster::client_namespace::IdentityList;
use crate::cluster::publish::published_value::{EncoderId, EncodingKey, PublishedValue};
use crate::cluster::views::inbound as view;
use crate::cluster::{Cluster, Subscription};
use crate::grpc::{self, Caller, Methods};
use crate::model::inbound::InboundPolicy;
use crate::policy::{messages, translate, workload};
use crate::tls::mesh_credentials::ClientCertificates;

/// The service. Clones share its state.
#[derive(Clone)]
pub struct InboundPolicyService {
    cluster: Cluster,
    client_certificates: ClientCertificates,
    encoder_id: EncoderId,
}

impl InboundPolicyService {
    pub(super) fn new(cluster: Cluster, client_certificates: ClientCertificates) -> Self {
        let encoder_id = cluster.new_encoder_id();
        Self {
            cluster,
            client_certificates,
            encoder_id,
        }
    }

    fn subscribe(
        &self,
        spec: &PortSpec,
        caller: Option<&Caller>,
    ) -> Result<(Subscription<Option<InboundPolicy>>, Bytes), Status> {
        let workload = workload::parse(&spec.workload)
            .map_err(|error| Status::invalid_argument(error.to_string()))?
            .id;
        let port = match u16::try_from(spec.port) {
            Ok(port) if port > 0 => port,
            _ => return Err(Status::invalid_argument("Invalid port")),
        };
        if !self.cluster.is_synced() {
            return Err(Status::unavailable("the objects of the cluster are not loaded yet"));
        }
        self.check_caller(caller, &workload)?;
        let mut subscription = self.cluster.inbound(view::Key { workload, port });
        let first = subscription.current();
        match message(&first, &self.encoder_id) {
            Some(message) => Ok((subscription, message)),
            None => Err(Status::not_found("unknown server")),
        }
    }

    /// Fails if the client is not the workload in its request. Applies only if client certificates are required.
    fn check_caller(&self, caller: Option<&Caller>, workload: &view::WorkloadId) -> Result<(), Status> {
        let Some(identities) = self.client_certificates.identities_to_check(caller) else {
            return Ok(());
        };
        let Some(expected) = self.cluster.workload_identity(workload) else {
            return Err(Status::not_found("unknown server")); // the workload does not exist
        };
        match expected
            .parse()
            .is_ok_and(|expected: Identity| identities.contains(&expected))
        {
            true => Ok(()),
            false => Err(Status::permission_denied(format!(
                "only {expected} may read the policies of this workload; the client's certificate is for {}",
                IdentityList(identities)
            ))),
        }
    }

    fn watch(
        self,
        spec: &PortSpec,
        caller: Option<&Caller>,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (subscription, first) = self.subscribe(spec, caller)?;
        let encoder_id = self.encoder_id;
        Ok(messages::message_stream(subscription, first, move |server| {
            message(server, &encoder_id)
        }))
    }
}

impl Methods for InboundPolicyService {
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

/// Returns the message for a policy. Streams with the same policy share the bytes.
fn message(server: &Arc<PublishedValue<Option<InboundPolicy>>>, encoder_id: &EncoderId) -> Option<Bytes> {
    let model = Option::as_ref(server)?;
    Some(server.encode_cached(&EncodingKey::for_all_subscribers(encoder_id), || {
        grpc::encode(&[translate::inbound::server(model)])
    }))
}
