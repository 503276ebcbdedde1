//! A policy that cannot be understood lets nobody in.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tulle_control::serving;
use tulle_control::serving::metrics::GrpcMetrics;
use tulle_control::tls::creds::ServerCreds;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::inbound::inbound_server_policies_server::{InboundServerPolicies, InboundServerPoliciesServer};
use tulle_proto::inbound::{Authn, Authz, Network, PortSpec, ProxyProtocol, Server, authn, proxy_protocol};
use tulle_proto::net::{IpAddress, IpNetwork, ip_address};
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, STRANGER, mesh};

/// Says the same of every port.
struct Policies(watch::Receiver<Server>);

#[tonic::async_trait]
impl InboundServerPolicies for Policies {
    type WatchPortStream = Pin<Box<dyn Stream<Item = Result<Server, Status>> + Send>>;

    async fn get_port(&self, _: Request<PortSpec>) -> Result<Response<Server>, Status> {
        Err(Status::unimplemented("proxies watch"))
    }

    async fn watch_port(&self, _: Request<PortSpec>) -> Result<Response<Self::WatchPortStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.0.clone()).map(Ok))))
    }
}

/// Everybody may.
fn open() -> Server {
    let authz = Authz {
        networks: vec![Network {
            net: Some(IpNetwork {
                ip: Some(IpAddress {
                    ip: Some(ip_address::Ip::Ipv4(0)),
                }),
                prefix_len: 0,
            }),
            except: Vec::new(),
        }],
        authentication: Some(Authn {
            permit: Some(authn::Permit::Unauthenticated(authn::PermitUnauthenticated {})),
        }),
        labels: BTreeMap::from([("name".into(), "everybody".into())]),
        metadata: None,
    };
    Server {
        protocol: Some(ProxyProtocol {
            kind: Some(proxy_protocol::Kind::Detect(proxy_protocol::Detect {
                timeout: Some(prost_types::Duration { seconds: 10, nanos: 0 }),
                ..Default::default()
            })),
        }),
        server_ips: Vec::new(),
        authorizations: vec![authz],
        labels: BTreeMap::from([("name".into(), "open".into())]),
    }
}

#[test]
fn an_update_that_cannot_be_understood_denies_and_cuts() {
    let mesh = mesh().workload("web").its_env("POLICY_SVC_ADDR", "127.0.0.1:8090");
    mesh.run(async |mesh: &Mesh| {
        let (said, says) = watch::channel(open());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 8090)).await.unwrap();
        let routes = Routes::new(InboundServerPoliciesServer::new(Policies(says)));
        let server = serving::Server {
            creds: Arc::new(ServerCreds::new("nobody".into())),
            routes: routes.prepare(),
            metrics: GrpcMetrics::new(&Registry::new()),
        };
        let (_signal, drain) = drain::channel();
        tokio::spawn(server.serve(listener, drain));
        apps::echo(mesh, "web").await;
        let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
        let known = [r#"srv_name="open""#];
        eventually("the policy is known", async || {
            assert_eq!(client.ask(request("/")).await.unwrap().status, 200);
            (mesh.metric("web", "inbound_http_authz_allow_total", &known).await >= 1.).then_some(())
        })
        .await;
        let mut bytes = mesh.arrive(STRANGER, "web", OPAQUE).await;
        bytes.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        bytes.read_exact(&mut [0; 8]).await.unwrap();

        said.send_modify(|server| server.authorizations[0].networks.clear());
        eventually("requests are refused", async || {
            let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
            (client.ask(request("/")).await.unwrap().status == 500).then_some(())
        })
        .await;
        let mut rest = Vec::new();
        // A reset is an end as well.
        let _ = bytes.read_to_end(&mut rest).await;

        said.send_replace(open());
        eventually("a good policy is in force again", async || {
            let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
            (client.ask(request("/")).await.unwrap().status == 200).then_some(())
        })
        .await;
    });
}
