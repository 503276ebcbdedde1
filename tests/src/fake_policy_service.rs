//! A policy service and a destination service whose answers the test sets, for policies and endpoints that no manifest can produce.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tulle_control::serving;
use tulle_control::serving::limits::{CallKind, Limits};
use tulle_control::serving::metrics::GrpcMetrics;
use tulle_control::tls::mesh_credentials::{ClientCertificates, MeshCredentials};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::destination::destination_server::{Destination, DestinationServer};
use tulle_proto::destination::{DestinationProfile, GetDestination, Update, WeightedAddr, WeightedAddrSet, update};
use tulle_proto::inbound::inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer};
use tulle_proto::inbound::{PortSpec, Server};
use tulle_proto::outbound::outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer};
use tulle_proto::outbound::{OutboundPolicy, TrafficSpec};

/// The address on which the services listen. Workloads that use them get it as `POLICY_SVC_ADDR`, and for endpoints also as
/// `DESTINATION_SVC_ADDR`.
pub const POLICY_ADDR: &str = "127.0.0.1:8090";

/// A policy service with one answer for every port and one for every destination, and a destination service with the same endpoints
/// for every Service. An answer is a policy or an error status.
pub struct FakePolicyService {
    ports: watch::Sender<Result<Server, Code>>,
    destinations: watch::Sender<Result<OutboundPolicy, Code>>,
    endpoints: watch::Sender<Result<Update, Code>>,
    /// Held so that the service does not drain.
    _signal: drain::Signal,
}

impl FakePolicyService {
    /// Serves in the namespace of the mesh until the runtime ends. At first it has no policy.
    pub async fn serve() -> Self {
        let (ports, port_answers) = watch::channel(Err(Code::Unavailable));
        let (destinations, destination_answers) = watch::channel(Err(Code::NotFound));
        let (endpoints, endpoint_answers) = watch::channel(Err(Code::Unavailable));
        let policy_server = PolicyServer {
            port_answers,
            destination_answers,
        };
        let destination_server = EndpointServer { endpoint_answers };
        let routes = Routes::new(InboundServerPoliciesServer::new(policy_server.clone()))
            .add_service(DestinationServer::new(destination_server));
        let registry = Registry::new();
        let limits = Limits {
            connections: 1000,
            call_kind: CallKind::Streaming,
            streams_per_client: usize::MAX,
            request_memory: usize::MAX,
            connection_age: Duration::from_secs(3600),
        };
        let server = serving::Server::new(
            Arc::new(MeshCredentials::new("unused".into(), ClientCertificates::Required)),
            routes.add_service(OutboundPoliciesServer::new(policy_server)),
            GrpcMetrics::new(&registry),
            limits,
            &registry,
        );
        let addr: SocketAddr = POLICY_ADDR.parse().expect("an address");
        assert_eq!(addr.ip(), Ipv4Addr::LOCALHOST, "plaintext is trusted on loopback only");
        let listener = TcpListener::bind(addr).await.expect("each port is listened on once");
        let (signal, drain) = drain::channel();
        tokio::spawn(server.serve("policy", listener, drain));
        Self {
            ports,
            destinations,
            endpoints,
            _signal: signal,
        }
    }

    /// Sets the policy of every port.
    pub fn set_port_policy(&self, policy: Result<Server, Code>) {
        let _former = self.ports.send_replace(policy);
    }

    /// Sets the policy of every destination.
    pub fn set_destination_policy(&self, policy: Result<OutboundPolicy, Code>) {
        let _former = self.destinations.send_replace(policy);
    }

    /// Adds endpoints to every Service, before its first client asks for them.
    pub fn set_endpoints(&self, addrs: Vec<WeightedAddr>) {
        let set = WeightedAddrSet {
            addrs,
            ..WeightedAddrSet::default()
        };
        let added = Update {
            update: Some(update::Update::Add(set)),
        };
        let _former = self.endpoints.send_replace(Ok(added));
    }
}

struct EndpointServer {
    endpoint_answers: watch::Receiver<Result<Update, Code>>,
}

#[tonic::async_trait]
impl Destination for EndpointServer {
    type GetStream = ResponseStream<Update>;
    type GetProfileStream = ResponseStream<DestinationProfile>;

    async fn get(&self, _: Request<GetDestination>) -> Result<Response<Self::GetStream>, Status> {
        stream_response(&self.endpoint_answers)
    }

    async fn get_profile(&self, _: Request<GetDestination>) -> Result<Response<Self::GetProfileStream>, Status> {
        Err(Status::not_found("no Service has a profile"))
    }
}

#[derive(Clone)]
struct PolicyServer {
    port_answers: watch::Receiver<Result<Server, Code>>,
    destination_answers: watch::Receiver<Result<OutboundPolicy, Code>>,
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn stream_response<T>(answers: &watch::Receiver<Result<T, Code>>) -> Result<Response<ResponseStream<T>>, Status>
where
    T: Clone + Send + Sync + 'static,
{
    if let Err(code) = &*answers.borrow() {
        return Err(Status::new(*code, "set by the test"));
    }
    let changes = WatchStream::new(answers.clone());
    Ok(Response::new(Box::pin(changes.map(|policy| {
        policy.map_err(|code| Status::new(code, "set by the test"))
    }))))
}

#[tonic::async_trait]
impl InboundServerPolicies for PolicyServer {
    type WatchPortStream = ResponseStream<Server>;

    async fn get_port(&self, _: Request<PortSpec>) -> Result<Response<Server>, Status> {
        Err(Status::unimplemented("proxies call WatchPort"))
    }

    async fn watch_port(&self, _: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        stream_response(&self.port_answers)
    }
}

#[tonic::async_trait]
impl OutboundPolicies for PolicyServer {
    type WatchStream = ResponseStream<OutboundPolicy>;

    async fn get(&self, _: Request<TrafficSpec>) -> Result<Response<OutboundPolicy>, Status> {
        Err(Status::unimplemented("proxies call Watch"))
    }

    async fn watch(&self, _: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
        stream_response(&self.destination_answers)
    }
}
