//! A policy service that says what a test has it say, for what no manifest leads to.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tulle_control::serving;
use tulle_control::serving::metrics::GrpcMetrics;
use tulle_control::tls::creds::{ClientCertificates, ServerCreds};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::inbound::inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer};
use tulle_proto::inbound::{PortSpec, Server};
use tulle_proto::outbound::outbound_policies_server::{OutboundPolicies, OutboundPoliciesServer};
use tulle_proto::outbound::{OutboundPolicy, TrafficSpec};

/// What a workload has as its `POLICY_SVC_ADDR` that listens to this service.
pub const ADDR: &str = "127.0.0.1:8090";

/// What is said of each port and of each destination: the same of all, or a refusal.
pub struct Policies {
    ports: watch::Sender<Result<Server, Code>>,
    destinations: watch::Sender<Result<OutboundPolicy, Code>>,
    /// Held so that nothing ends.
    _signal: drain::Signal,
}

impl Policies {
    /// Serves in the namespace of the mesh, until the runtime ends; at first it knows nothing.
    pub async fn serve() -> Self {
        let (ports, of_ports) = watch::channel(Err(Code::Unavailable));
        let (destinations, of_destinations) = watch::channel(Err(Code::NotFound));
        let says = Says {
            of_ports,
            of_destinations,
        };
        let routes = Routes::new(InboundServerPoliciesServer::new(says.clone()));
        let registry = Registry::new();
        let limits = serving::Limits {
            connections: 1000,
            streams_per_client: serving::STREAMS_PER_CLIENT,
        };
        let server = serving::Server::new(
            Arc::new(ServerCreds::new("nobody".into(), ClientCertificates::Required)),
            routes.add_service(OutboundPoliciesServer::new(says)),
            GrpcMetrics::new(&registry),
            limits,
            &registry,
        );
        let addr: SocketAddr = ADDR.parse().expect("an address");
        assert_eq!(addr.ip(), Ipv4Addr::LOCALHOST, "only there it is believed in the clear");
        let listener = TcpListener::bind(addr).await.expect("each port is listened on once");
        let (signal, drain) = drain::channel();
        tokio::spawn(server.serve("policy", listener, drain));
        Self {
            ports,
            destinations,
            _signal: signal,
        }
    }

    /// Says this of every port from now on.
    pub fn say_of_ports(&self, said: Result<Server, Code>) {
        let _former = self.ports.send_replace(said);
    }

    /// Says this of every destination from now on.
    pub fn say_of_destinations(&self, said: Result<OutboundPolicy, Code>) {
        let _former = self.destinations.send_replace(said);
    }
}

#[derive(Clone)]
struct Says {
    of_ports: watch::Receiver<Result<Server, Code>>,
    of_destinations: watch::Receiver<Result<OutboundPolicy, Code>>,
}

type Said<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn say<T>(what: &watch::Receiver<Result<T, Code>>) -> Result<Response<Said<T>>, Status>
where
    T: Clone + Send + Sync + 'static,
{
    if let Err(code) = &*what.borrow() {
        return Err(Status::new(*code, "as told"));
    }
    let changes = WatchStream::new(what.clone());
    Ok(Response::new(Box::pin(
        changes.map(|said| said.map_err(|code| Status::new(code, "as told"))),
    )))
}

#[tonic::async_trait]
impl InboundServerPolicies for Says {
    type WatchPortStream = Said<Server>;

    async fn get_port(&self, _: Request<PortSpec>) -> Result<Response<Server>, Status> {
        Err(Status::unimplemented("proxies watch"))
    }

    async fn watch_port(&self, _: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        say(&self.of_ports)
    }
}

#[tonic::async_trait]
impl OutboundPolicies for Says {
    type WatchStream = Said<OutboundPolicy>;

    async fn get(&self, _: Request<TrafficSpec>) -> Result<Response<OutboundPolicy>, Status> {
        Err(Status::unimplemented("proxies watch"))
    }

    async fn watch(&self, _: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
        say(&self.of_destinations)
    }
}
