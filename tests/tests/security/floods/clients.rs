//! Well-behaved clients: each sends one request on its own connection and requires a response.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
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

use super::webhooks::ReviewRequest;

/// A well-behaved client and its location.
#[derive(Clone)]
pub(crate) struct NormalClient<'a> {
    /// The namespace of the client; `None` is that of this process.
    host: Option<&'a Arc<Namespace>>,
    addr: SocketAddr,
    request: ClientRequest<'a>,
}

#[derive(Clone)]
enum ClientRequest<'a> {
    /// A path, and the expected status.
    Http(&'a str, u16),
    /// The expected answer is the SETTINGS frame of HTTP/2.
    Http2,
    Certify(&'a TrustAnchors),
    Destination(&'a TrustAnchors, &'a LeafWithKey),
    Policy(&'a TrustAnchors, &'a LeafWithKey),
    ReviewRequest(ReviewRequest),
}

impl<'a> NormalClient<'a> {
    pub(crate) fn http(host: &'a Arc<Namespace>, addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(Some(host), addr, ClientRequest::Http(path, status))
    }

    pub(crate) fn http_here(addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(None, addr, ClientRequest::Http(path, status))
    }

    pub(crate) fn http2(host: &'a Arc<Namespace>, addr: SocketAddr) -> Self {
        Self::new(Some(host), addr, ClientRequest::Http2)
    }

    pub(crate) fn certify(host: &'a Arc<Namespace>, addr: SocketAddr, anchors: &'a TrustAnchors) -> Self {
        Self::new(Some(host), addr, ClientRequest::Certify(anchors))
    }

    pub(crate) fn destination(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        anchors: &'a TrustAnchors,
        leaf: &'a LeafWithKey,
    ) -> Self {
        Self::new(Some(host), addr, ClientRequest::Destination(anchors, leaf))
    }

    pub(crate) fn policy(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        anchors: &'a TrustAnchors,
        leaf: &'a LeafWithKey,
    ) -> Self {
        Self::new(Some(host), addr, ClientRequest::Policy(anchors, leaf))
    }

    pub(crate) fn review(addr: SocketAddr, review: ReviewRequest) -> Self {
        Self::new(None, addr, ClientRequest::ReviewRequest(review))
    }

    fn new(host: Option<&'a Arc<Namespace>>, addr: SocketAddr, request: ClientRequest<'a>) -> Self {
        Self { host, addr, request }
    }

    /// Sends the request once; the error describes a wrong response.
    pub(crate) fn ask(&self) -> anyhow::Result<()> {
        let ask = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let response = tokio::time::timeout(RESPONSE_TIMEOUT, self.answer());
                response.await.context("there is no answer")?
            })
        };
        match self.host {
            Some(host) => host.run(ask)?,
            None => ask(),
        }
    }

    async fn answer(&self) -> anyhow::Result<()> {
        match &self.request {
            ClientRequest::Http(path, expected_status) => {
                let mut stream = TcpStream::connect(self.addr).await?;
                let request = format!(
                    "GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
                    self.addr
                );
                stream.write_all(request.as_bytes()).await?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await?;
                let status = answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
                ensure!(
                    status == Some(*expected_status),
                    "expected {expected_status}: {answer:?}"
                );
            }
            ClientRequest::Http2 => {
                let mut stream = TcpStream::connect(self.addr).await?;
                stream
                    .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                    .await?;
                let mut head = [0; 9];
                stream.read_exact(&mut head).await?;
                ensure!(head[3] == 4, "{head:?} are no settings");
            }
            ClientRequest::Certify(anchors) => {
                let channel = self.connect("linkerd-identity", anchors, None).await?;
                let refused = IdentityClient::new(channel).certify(CertifyRequest::default()).await;
                let status = refused.err().context("a request without a name was certified")?;
                ensure!(status.message().contains("the request has no identity"), "{status:?}");
            }
            ClientRequest::Destination(anchors, leaf) => {
                let channel = self
                    .connect("linkerd-destination", anchors, Some((*leaf).clone()))
                    .await?;
                let request = GetDestination {
                    path: "server.shop.svc.cluster.local:8080".to_owned(),
                    ..GetDestination::default()
                };
                let mut updates = DestinationClient::new(channel).get(request).await?.into_inner();
                updates.message().await?.context("the stream has ended")?;
            }
            ClientRequest::Policy(anchors, leaf) => {
                let channel = self
                    .connect("linkerd-destination", anchors, Some((*leaf).clone()))
                    .await?;
                let spec = PortSpec {
                    workload: r#"{"ns":"shop","external_workload":"server"}"#.to_owned(),
                    port: super::testbed::HTTP.into(),
                };
                let mut updates = InboundServerPoliciesClient::new(channel)
                    .watch_port(spec)
                    .await?
                    .into_inner();
                updates.message().await?.context("the stream has ended")?;
            }
            ClientRequest::ReviewRequest(review) => review.ask(self.addr).await?,
        }
        Ok(())
    }

    async fn connect(
        &self,
        account: &str,
        anchors: &TrustAnchors,
        leaf: Option<LeafWithKey>,
    ) -> anyhow::Result<Channel> {
        let peer = TlsServer {
            addr: &Addr::Socket(self.addr),
            name: &tulle_tests::credentials::control_plane_identity(account),
            identity: None,
            anchors,
        };
        Ok(client::connect(&peer, leaf).await?)
    }
}

impl fmt::Display for NormalClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let request = match &self.request {
            ClientRequest::Http(path, _) => return write!(f, "GET {}{path}", self.addr),
            ClientRequest::Http2 => "HTTP/2",
            ClientRequest::Certify(_) => "Certify",
            ClientRequest::Destination(..) => "Get",
            ClientRequest::Policy(..) => "WatchPort",
            ClientRequest::ReviewRequest(_) => "a review",
        };
        write!(f, "{request} at {}", self.addr)
    }
}

/// A client without a response after this time has failed.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
