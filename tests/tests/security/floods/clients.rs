//! Well-behaved clients: each asks one thing, on a connection of its own, and needs an answer.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::client::{self, Channel, Peer};
use tulle_control::tls::creds::Leaf;
use tulle_core::addr::Addr;
use tulle_core::netns::Namespace;
use tulle_proto::destination::GetDestination;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::identity::CertifyRequest;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;

use super::webhooks::Review;

/// One client, and where it is.
#[derive(Clone)]
pub(crate) struct Good<'a> {
    /// None is this process's own network.
    host: Option<&'a Arc<Namespace>>,
    addr: SocketAddr,
    question: Question<'a>,
}

#[derive(Clone)]
enum Question<'a> {
    /// A path, and the status that it is answered with.
    Http(&'a str, u16),
    /// Answered by the settings of HTTP/2.
    Http2,
    Certify(&'a TrustAnchors),
    Destination(&'a TrustAnchors, &'a Leaf),
    Policy(&'a TrustAnchors, &'a Leaf),
    Review(Review),
}

impl<'a> Good<'a> {
    pub(crate) fn http(host: &'a Arc<Namespace>, addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(Some(host), addr, Question::Http(path, status))
    }

    pub(crate) fn http_here(addr: SocketAddr, path: &'a str, status: u16) -> Self {
        Self::new(None, addr, Question::Http(path, status))
    }

    pub(crate) fn http2(host: &'a Arc<Namespace>, addr: SocketAddr) -> Self {
        Self::new(Some(host), addr, Question::Http2)
    }

    pub(crate) fn certify(host: &'a Arc<Namespace>, addr: SocketAddr, anchors: &'a TrustAnchors) -> Self {
        Self::new(Some(host), addr, Question::Certify(anchors))
    }

    pub(crate) fn destination(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        anchors: &'a TrustAnchors,
        leaf: &'a Leaf,
    ) -> Self {
        Self::new(Some(host), addr, Question::Destination(anchors, leaf))
    }

    pub(crate) fn policy(
        host: &'a Arc<Namespace>,
        addr: SocketAddr,
        anchors: &'a TrustAnchors,
        leaf: &'a Leaf,
    ) -> Self {
        Self::new(Some(host), addr, Question::Policy(anchors, leaf))
    }

    pub(crate) fn review(addr: SocketAddr, review: Review) -> Self {
        Self::new(None, addr, Question::Review(review))
    }

    fn new(host: Option<&'a Arc<Namespace>>, addr: SocketAddr, question: Question<'a>) -> Self {
        Self { host, addr, question }
    }

    /// Asks once; the error says what was wrong with the answer.
    pub(crate) fn ask(&self) -> anyhow::Result<()> {
        let ask = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let asking = tokio::time::timeout(LIMIT, self.answer());
                asking.await.context("there is no answer")?
            })
        };
        match self.host {
            Some(host) => host.run(ask)?,
            None => ask(),
        }
    }

    async fn answer(&self) -> anyhow::Result<()> {
        match &self.question {
            Question::Http(path, due) => {
                let mut stream = TcpStream::connect(self.addr).await?;
                let request = format!(
                    "GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
                    self.addr
                );
                stream.write_all(request.as_bytes()).await?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await?;
                let status = answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
                ensure!(status == Some(*due), "expected {due}: {answer:?}");
            }
            Question::Http2 => {
                let mut stream = TcpStream::connect(self.addr).await?;
                stream
                    .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                    .await?;
                let mut head = [0; 9];
                stream.read_exact(&mut head).await?;
                ensure!(head[3] == 4, "{head:?} are no settings");
            }
            Question::Certify(anchors) => {
                let channel = self.connect("linkerd-identity", anchors, None).await?;
                let refused = IdentityClient::new(channel).certify(CertifyRequest::default()).await;
                let status = refused.err().context("nobody may be certified without a name")?;
                ensure!(status.message().contains("the request has no identity"), "{status:?}");
            }
            Question::Destination(anchors, leaf) => {
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
            Question::Policy(anchors, leaf) => {
                let channel = self
                    .connect("linkerd-destination", anchors, Some((*leaf).clone()))
                    .await?;
                let spec = PortSpec {
                    workload: r#"{"ns":"shop","external_workload":"server"}"#.to_owned(),
                    port: super::scene::HTTP.into(),
                };
                let mut updates = InboundServerPoliciesClient::new(channel)
                    .watch_port(spec)
                    .await?
                    .into_inner();
                updates.message().await?.context("the stream has ended")?;
            }
            Question::Review(review) => review.ask(self.addr).await?,
        }
        Ok(())
    }

    async fn connect(&self, account: &str, anchors: &TrustAnchors, leaf: Option<Leaf>) -> anyhow::Result<Channel> {
        let peer = Peer {
            addr: &Addr::Socket(self.addr),
            name: &tulle_core::identity::service_account(account, "linkerd", "linkerd", "cluster.local"),
            identity: None,
            anchors,
        };
        Ok(client::connect(&peer, leaf).await?)
    }
}

impl fmt::Display for Good<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let question = match &self.question {
            Question::Http(path, _) => return write!(f, "GET {}{path}", self.addr),
            Question::Http2 => "HTTP/2",
            Question::Certify(_) => "Certify",
            Question::Destination(..) => "Get",
            Question::Policy(..) => "WatchPort",
            Question::Review(_) => "a review",
        };
        write!(f, "{question} at {}", self.addr)
    }
}

/// A client that has no answer by then is not answered.
const LIMIT: Duration = Duration::from_secs(5);
