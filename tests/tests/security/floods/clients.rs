//! Well-behaved clients: each sends one request on its own connection and requires a response.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::Streaming;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::client::{self, Channel, TlsServer};
use tulle_control::tls::mesh_credentials::LeafWithKey;
use tulle_core::addr::Addr;
use tulle_core::netns::Namespace;
use tulle_proto::destination::GetDestination;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::identity::CertifyRequest;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::tap::observe_request::r#match::http::{StringMatch, string_match};
use tulle_proto::tap::observe_request::{self, Match};
use tulle_proto::tap::tap_client::TapClient;
use tulle_proto::tap::{ObserveRequest, TapEvent};

use super::insecure_tls;
use super::reviews::ReviewRequest;

/// A well-behaved client and its location.
#[derive(Clone)]
pub(crate) struct WellBehavedClient<'a> {
    /// The namespace of the client; `None` is that of this process.
    host: Option<&'a Arc<Namespace>>,
    addr: SocketAddr,
    request: ClientRequest<'a>,
}

#[derive(Clone)]
enum ClientRequest<'a> {
    /// A path, and the expected status.
    Http(&'a str, u16),
    Grpc(GrpcClient<'a>, GrpcRequest),
    ReviewRequest(ReviewRequest),
    /// A request of the API server to the aggregated API, with its client certificate.
    Telemetry(&'a LeafWithKey),
}

/// The identity of a client of gRPC, and of its server.
#[derive(Clone)]
pub(crate) struct GrpcClient<'a> {
    /// Identity of the server.
    pub(crate) server: String,
    pub(crate) anchors: &'a TrustAnchors,
    pub(crate) leaf: Option<&'a LeafWithKey>,
}

#[derive(Clone, Copy)]
pub(crate) enum GrpcRequest {
    Certify,
    Destination,
    Policy,
    Tap,
}

impl<'a> WellBehavedClient<'a> {
    pub(crate) fn http(host: &'a Arc<Namespace>, addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(Some(host), addr, ClientRequest::Http(path, status))
    }

    pub(crate) fn http_in_current_namespace(addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(None, addr, ClientRequest::Http(path, status))
    }

    pub(crate) fn grpc(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        client: GrpcClient<'a>,
        request: GrpcRequest,
    ) -> Self {
        Self::new(Some(host), addr, ClientRequest::Grpc(client, request))
    }

    pub(crate) fn review(addr: SocketAddr, review: ReviewRequest) -> Self {
        Self::new(None, addr, ClientRequest::ReviewRequest(review))
    }

    pub(crate) fn telemetry(addr: SocketAddr, leaf: &'a LeafWithKey) -> Self {
        Self::new(None, addr, ClientRequest::Telemetry(leaf))
    }

    fn new(host: Option<&'a Arc<Namespace>>, addr: SocketAddr, request: ClientRequest<'a>) -> Self {
        Self { host, addr, request }
    }

    /// Sends the request once; the error describes a wrong response.
    pub(crate) fn send_and_check(&self) -> anyhow::Result<()> {
        let send_and_check = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let response = tokio::time::timeout(RESPONSE_TIMEOUT, self.exchange());
                response.await.context("there is no answer")?
            })
        };
        match self.host {
            Some(host) => host.run(send_and_check)?,
            None => send_and_check(),
        }
    }

    pub(crate) async fn exchange(&self) -> anyhow::Result<()> {
        match &self.request {
            ClientRequest::Http(path, expected_status) => {
                let stream = TcpStream::connect(self.addr).await?;
                let status = get(stream, path, self.addr).await?;
                ensure!(status == *expected_status, "expected {expected_status}: {status}");
                Ok(())
            }
            ClientRequest::Grpc(client, request) => request.send(client.connect(self.addr).await?).await,
            ClientRequest::ReviewRequest(review) => review.send_and_check(self.addr).await,
            ClientRequest::Telemetry(leaf) => {
                let tcp = TcpStream::connect(self.addr).await?;
                let name = ServerName::try_from("linkerd-telemetry.linkerd.svc")?;
                let connector = TlsConnector::from(Arc::new(insecure_tls::config(Some(leaf))));
                let tls = connector.connect(name, tcp).await?;
                let status = get(tls, TELEMETRY_PATH, self.addr).await?;
                ensure!(status == 200, "{status}");
                Ok(())
            }
        }
    }
}

/// Sends GET on a new connection; returns the status.
async fn get(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str, host: SocketAddr) -> anyhow::Result<u16> {
    // In requests to the aggregated API, the API server sets `x-remote-user`. Other servers ignore it.
    let head = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nx-remote-user: me\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    // A connection that ends without a TLS close_notify has also ended.
    if let Err(error) = stream.read_to_end(&mut answer).await {
        ensure!(error.kind() == std::io::ErrorKind::UnexpectedEof, "{error}");
    }
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.with_context(|| format!("no response: {answer:?}"))
}

impl GrpcClient<'_> {
    pub(crate) async fn connect(&self, addr: SocketAddr) -> anyhow::Result<Channel> {
        let peer = TlsServer {
            addr: &Addr::Socket(addr),
            name: &self.server,
            identity: None,
            anchors: self.anchors,
        };
        Ok(client::connect(&peer, self.leaf.cloned()).await?)
    }
}

/// Taps the requests with [`TAPPED_PATH`].
pub(crate) async fn tap(channel: Channel) -> anyhow::Result<Streaming<TapEvent>> {
    let path = StringMatch {
        r#match: Some(string_match::Match::Exact(TAPPED_PATH.to_owned())),
    };
    let path = observe_request::r#match::Http {
        r#match: Some(observe_request::r#match::http::Match::Path(path)),
    };
    let request = ObserveRequest {
        limit: u32::MAX,
        r#match: Some(Match {
            r#match: Some(observe_request::r#match::Match::Http(path)),
        }),
        ..ObserveRequest::default()
    };
    Ok(TapClient::new(channel).observe(request).await?.into_inner())
}

impl GrpcRequest {
    /// Sends the request, and checks the response.
    pub(crate) async fn send(self, channel: Channel) -> anyhow::Result<()> {
        match self {
            Self::Certify => {
                // The fields are as large as those of a valid request.
                let request = CertifyRequest {
                    token: vec![b'x'; 1500],
                    certificate_signing_request: vec![0; 400],
                    ..CertifyRequest::default()
                };
                let refused = IdentityClient::new(channel).certify(request).await;
                let status = refused.err().context("a request without a name was certified")?;
                ensure!(status.message().contains("the request has no identity"), "{status:?}");
            }
            Self::Destination => {
                let request = GetDestination {
                    path: "server.shop.svc.cluster.local:8080".to_owned(),
                    ..GetDestination::default()
                };
                let mut updates = DestinationClient::new(channel).get(request).await?.into_inner();
                updates.message().await?.context("the stream has ended")?;
            }
            Self::Policy => {
                let spec = PortSpec {
                    workload: r#"{"ns":"shop","external_workload":"server"}"#.to_owned(),
                    port: super::testbed::HTTP.into(),
                };
                let updates = InboundServerPoliciesClient::new(channel).watch_port(spec).await?;
                updates.into_inner().message().await?.context("the stream has ended")?;
            }
            Self::Tap => drop(tap(channel).await?),
        }
        Ok(())
    }
}

impl fmt::Display for WellBehavedClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let request = match &self.request {
            ClientRequest::Http(path, _) => return write!(f, "GET {}{path}", self.addr),
            ClientRequest::Grpc(_, GrpcRequest::Certify) => "Certify",
            ClientRequest::Grpc(_, GrpcRequest::Destination) => "Get",
            ClientRequest::Grpc(_, GrpcRequest::Policy) => "WatchPort",
            ClientRequest::Grpc(_, GrpcRequest::Tap) => "Observe",
            ClientRequest::Telemetry(_) => "the telemetry API",
            ClientRequest::ReviewRequest(_) => "a review",
        };
        write!(f, "{request} at {}", self.addr)
    }
}

/// A path that only the tapped client requests of the application; other clients request it of admin servers.
pub(crate) const TAPPED_PATH: &str = "/ready";
/// The resources of the aggregated API.
pub(crate) const TELEMETRY_PATH: &str = "/apis/telemetry.tulle.dev/v1alpha1";
/// A client without a response after this time has failed. An API server waits as long for a webhook.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
