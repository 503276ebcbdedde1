//! Tests over real sockets, with the client of this crate and with OpenSSL.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;

use bytes::Bytes;
use futures_util::future;
use futures_util::stream::{self, StreamExt as _};
use http_body::Frame;
use http_body_util::StreamBody;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tonic::Status;
use tulle_core::addr::Addr;
use tulle_core::connections::{ConnectionLimiter, SameAddressEviction};
use tulle_core::drain::{self, Signal};
use tulle_core::metrics::Registry;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{GetDestination, Update, destination_server};
use tulle_proto::identity as proto;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::identity::identity_server::{Identity, IdentityServer};

use super::limits::{CONNECTION_AGE, CallKind};
use super::*;
use crate::grpc::{self, Methods};
use crate::tls::accept::{HANDSHAKE_TIMEOUT, MAX_HANDSHAKE_BYTES};
use crate::tls::anchors::TrustAnchors;
use crate::tls::client::{self, Channel, TlsServer};
use crate::tls::mesh_credentials::{ClientCertificates, LeafWithKey};

const NAME: &str = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local";
const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

const MAX_CONNECTIONS: usize = 8;
const MAX_REQUESTS: usize = 3;

type Ca = CertifiedIssuer<'static, KeyPair>;

/// An identity service that returns the requested name as the certificate.
struct Echo;

#[tonic::async_trait]
impl Identity for Echo {
    async fn certify(
        &self,
        req: tonic::Request<proto::CertifyRequest>,
    ) -> Result<tonic::Response<proto::CertifyResponse>, Status> {
        Ok(tonic::Response::new(proto::CertifyResponse {
            leaf_certificate: req.into_inner().identity.into_bytes(),
            ..proto::CertifyResponse::default()
        }))
    }
}

/// A destination service whose streams have one message and no end.
#[derive(Clone)]
struct Endless;

impl Methods for Endless {
    const SERVICE: &'static str = destination_server::SERVICE_NAME;

    async fn call(self, _: &str, req: Request<Body>) -> Response<Body> {
        let first = grpc::encode(&[Update::default()]);
        let messages = stream::iter([first]).chain(stream::pending());
        grpc::stream(req, |_: GetDestination| Ok(messages)).await
    }
}

/// A running server and the CA that its clients trust.
struct TestServer {
    ca: Ca,
    addr: SocketAddr,
    creds: Arc<MeshCredentials>,
    registry: Registry,
    signal: Signal,
    task: JoinHandle<()>,
}

impl TestServer {
    async fn start() -> Self {
        let server = Self::without_certificate().await;
        server
            .creds
            .install(leaf_for_one_day(&server.ca, NAME), &anchors(&server.ca))
            .unwrap();
        server
    }

    async fn without_certificate() -> Self {
        Self::start_with(ClientCertificates::Optional).await
    }

    async fn start_with(clients: ClientCertificates) -> Self {
        Self::start_with_age(clients, CONNECTION_AGE).await
    }

    async fn start_with_age(clients: ClientCertificates, connection_age: Duration) -> Self {
        let creds = Arc::new(MeshCredentials::new(NAME.to_owned(), clients));
        let registry = Registry::new();
        let server = build_server(creds.clone(), CallKind::Unary, connection_age, &registry);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (signal, watch) = drain::channel();
        let task = tokio::spawn(server.serve("test", listener, watch));
        Self {
            ca: ca(),
            addr,
            creds,
            registry,
            signal,
            task,
        }
    }

    async fn connect(&self, name: &str, leaf: Option<LeafWithKey>) -> Result<Channel, client::Error> {
        let anchors = anchors(&self.ca);
        let peer = TlsServer {
            addr: &Addr::Socket(self.addr),
            name,
            identity: None,
            anchors: &anchors,
        };
        client::connect(&peer, leaf).await
    }

    /// Connects to this server as a client with this address, which is not loopback.
    async fn connect_from(&self, ip: IpAddr, leaf: Option<LeafWithKey>, server: Arc<Server>) -> Channel {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = Addr::Socket(listener.local_addr().unwrap());
        let limiter = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new());
        tokio::spawn(async move {
            let (_signal, watch) = drain::channel();
            let (stream, _) = listener.accept().await.unwrap();
            let accepted = AcceptedConnection {
                stream,
                client: (ip, 5000).into(),
                permit: limiter.admit(ip).unwrap(),
                first_byte: 22,
            };
            server.accept_and_serve(accepted, watch).await
        });
        let anchors = anchors(&self.ca);
        let peer = TlsServer {
            addr: &addr,
            name: NAME,
            identity: None,
            anchors: &anchors,
        };
        client::connect(&peer, leaf).await.unwrap()
    }

    async fn openssl(&self, args: &[&str]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), self.ca.pem()).unwrap();
        let output = Command::new("openssl")
            .args(["s_client", "-connect", &self.addr.to_string(), "-CAfile"])
            .arg(file.path())
            .args(args)
            .stdin(Stdio::null())
            .output()
            .await
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        text(&output.stdout) + &text(&output.stderr)
    }
}

fn build_server(
    creds: Arc<MeshCredentials>,
    call_kind: CallKind,
    connection_age: Duration,
    registry: &Registry,
) -> Server {
    let n_budgets = match call_kind {
        CallKind::Unary => 1,
        CallKind::Streaming => 2,
    };
    let limits = Limits {
        connections: MAX_CONNECTIONS,
        call_kind,
        streams_per_client: call_kind.max_streams_per_client(None),
        request_memory: n_budgets * MAX_REQUESTS * call_kind.bytes_per_request(),
        connection_age,
    };
    let routes = Routes::new(IdentityServer::new(Echo)).add_service(grpc::Service(Endless));
    Server::new(creds, routes, GrpcMetrics::new(registry), limits, registry)
}

fn ca() -> Ca {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn anchors(ca: &Ca) -> TrustAnchors {
    TrustAnchors::parse(ca.pem().as_bytes(), &PathBuf::from("roots.pem")).unwrap()
}

/// Creates a certificate that is valid from two days ago until `hours` from now.
fn leaf(ca: &Ca, name: &str, hours: i64) -> LeafWithKey {
    let mut params = CertificateParams::new([name.to_owned()]).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let now = OffsetDateTime::now_utc();
    params.not_before = now - time::Duration::days(2);
    params.not_after = now + time::Duration::hours(hours);
    let key = KeyPair::generate().unwrap();
    let cert = params.signed_by(&key, ca).unwrap();
    LeafWithKey {
        chain: vec![cert.der().clone()],
        key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
    }
}

fn leaf_for_one_day(ca: &Ca, name: &str) -> LeafWithKey {
    leaf(ca, name, 24)
}

async fn call_certify(channel: Channel) -> Result<String, Status> {
    let req = proto::CertifyRequest {
        identity: "hello".to_owned(),
        ..proto::CertifyRequest::default()
    };
    let rsp = IdentityClient::new(channel).certify(req).await?.into_inner();
    Ok(String::from_utf8(rsp.leaf_certificate).unwrap())
}

#[tokio::test]
async fn a_client_certificate_is_optional_and_verified_if_sent() {
    let server = TestServer::start().await;
    for client in [None, Some(leaf_for_one_day(&server.ca, WEB))] {
        let channel = server.connect(NAME, client).await.unwrap();
        assert_eq!(call_certify(channel).await.unwrap(), "hello");
    }
    for client in [leaf_for_one_day(&ca(), WEB), leaf(&server.ca, WEB, -1)] {
        // In TLS 1.3 the handshake ends for the client before the server has verified the client certificate.
        let outcome = match server.connect(NAME, Some(client)).await {
            Ok(channel) => call_certify(channel).await.map_err(|_| ()),
            Err(_) => Err(()),
        };
        outcome.unwrap_err();
    }
    let metrics = server.registry.render();
    let started = "grpc_server_started_total{grpc_type=\"unary\",\
                   grpc_service=\"io.linkerd.proxy.identity.Identity\",grpc_method=\"Certify\"} 2\n";
    assert!(metrics.contains(started), "{metrics}");
    assert!(metrics.contains("grpc_code=\"OK\""), "{metrics}");
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused_where_one_is_required() {
    let server = TestServer::start_with(ClientCertificates::Required).await;
    server
        .creds
        .install(leaf_for_one_day(&server.ca, NAME), &anchors(&server.ca))
        .unwrap();
    let refused = match server.connect(NAME, None).await {
        Ok(channel) => call_certify(channel).await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
    let channel = server
        .connect(NAME, Some(leaf_for_one_day(&server.ca, WEB)))
        .await
        .unwrap();
    assert_eq!(call_certify(channel).await.unwrap(), "hello");
    let channel = client::connect_plaintext(&Addr::Socket(server.addr)).await.unwrap();
    assert_eq!(
        call_certify(channel).await.unwrap(),
        "hello",
        "plaintext from this machine, such as a port-forward, needs no certificate"
    );
}

#[test]
fn connections_are_bounded_by_files_and_by_memory() {
    let connections = |files, memory| Limits::from_resources(files, memory, CallKind::Streaming).connections;
    assert_eq!(connections(1_048_576, Some(250 << 20)), 1333);
    assert_eq!(connections(1024, Some(250 << 20)), 204);
    assert_eq!(connections(1024, None), 204);
    assert_eq!(connections(1, Some(1)), 1);
}

#[tokio::test]
async fn unauthenticated_connections_do_not_evict_an_authenticated_client() {
    let server = TestServer::start().await;
    let channel = server
        .connect(NAME, Some(leaf_for_one_day(&server.ca, WEB)))
        .await
        .unwrap();
    assert_eq!(call_certify(channel.clone()).await.unwrap(), "hello");
    let mut unauthenticated = Vec::new();
    for start in [&b""[..], &[0x16, 3, 1, 1, 0], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut client = TcpStream::connect(server.addr).await.unwrap();
            // The server may have closed earlier connections already.
            let _ = client.write_all(start).await;
            unauthenticated.push(client);
        }
    }
    let second_channel = server
        .connect(NAME, Some(leaf_for_one_day(&server.ca, WEB)))
        .await
        .unwrap();
    for channel in [channel, second_channel] {
        assert_eq!(call_certify(channel).await.unwrap(), "hello");
    }
}

#[test]
fn streams_of_a_client_are_bounded_by_memory() {
    let streams = |call_kind, memory| Limits::from_resources(1024, memory, call_kind).streams_per_client;
    assert_eq!(streams(CallKind::Streaming, Some(250 << 20)), 4_000);
    assert_eq!(streams(CallKind::Streaming, Some(16 << 20)), 1_000);
    assert_eq!(streams(CallKind::Streaming, Some(16 << 30)), 32_768);
    assert_eq!(streams(CallKind::Streaming, None), 32_768);
    assert_eq!(streams(CallKind::Unary, Some(16 << 30)), 64);
}

/// Sends a request whose body does not end.
fn send_unfinished(client: &Channel) -> impl Future<Output = hyper::Result<Response<Incoming>>> + Send + use<> {
    let body = StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>());
    let req = Request::post("/io.linkerd.proxy.identity.Identity/Certify").header("content-type", "application/grpc");
    client.clone().call(req.body(Body::new(body)).unwrap())
}

#[tokio::test]
async fn unfinished_requests_do_not_prevent_requests_of_other_clients() {
    let fixture = TestServer::start().await;
    let server = build_server(fixture.creds.clone(), CallKind::Unary, CONNECTION_AGE, &Registry::new());
    let server = Arc::new(server);
    let from = |last| fixture.connect_from(Ipv4Addr::new(10, 0, 0, last).into(), None, server.clone());
    let client = from(1).await;
    // These requests use all memory for requests. They are sent in the order of the calls.
    let [oldest, ..] = [(); MAX_REQUESTS].map(|()| tokio::spawn(send_unfinished(&client)));
    let refused = call_certify(client.clone()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused:?}");
    assert_eq!(call_certify(from(2).await).await.unwrap(), "hello");
    let revoked = oldest.await.unwrap().unwrap();
    assert_eq!(revoked.headers()["grpc-status"], "8", "RESOURCE_EXHAUSTED");
}

#[tokio::test]
async fn unfinished_requests_of_a_workload_have_a_share_of_the_memory() {
    let fixture = TestServer::start().await;
    let server = build_server(
        fixture.creds.clone(),
        CallKind::Streaming,
        CONNECTION_AGE,
        &Registry::new(),
    );
    let server = Arc::new(server);
    let from = |last| {
        let leaf = leaf_for_one_day(&fixture.ca, WEB);
        fixture.connect_from(Ipv4Addr::new(10, 0, 0, last).into(), Some(leaf), server.clone())
    };
    let first = from(1).await;
    let held = [(); MAX_REQUESTS].map(|()| tokio::spawn(send_unfinished(&first)));
    let refused = send_unfinished(&first).await.unwrap();
    assert_eq!(refused.headers()["grpc-status"], "8", "RESOURCE_EXHAUSTED");
    // A request of another workload gets the memory of one of these requests.
    let second = from(2).await;
    let _other = tokio::spawn(send_unfinished(&second));
    let (revoked, _, _) = future::select_all(held).await;
    let revoked = revoked.unwrap().unwrap();
    assert_eq!(revoked.headers()["grpc-status"], "8", "RESOURCE_EXHAUSTED");
}

#[tokio::test]
async fn a_connection_to_the_identity_service_has_few_streams() {
    let server = TestServer::without_certificate().await;
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    client.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    let mut head = [0; 9];
    client.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], 4, "a SETTINGS frame");
    let mut settings = vec![0; usize::from(head[2])];
    client.read_exact(&mut settings).await.unwrap();
    let (settings, _) = settings.as_chunks::<6>();
    let max_streams = settings.iter().find(|setting| setting[..2] == [0, 3]).unwrap();
    assert_eq!(max_streams[2..], 16_u32.to_be_bytes());
}

#[tokio::test]
async fn the_certificate_is_served_only_for_its_server_name() {
    let server = TestServer::start().await;
    server.connect(&NAME.to_uppercase(), None).await.unwrap();
    for other in [WEB, "127.0.0.1"] {
        let err = server.connect(other, None).await.err().unwrap();
        assert!(
            matches!(&err, client::Error::Handshake { name, .. } if name == other),
            "{err:?}"
        );
    }
}

#[tokio::test]
async fn a_client_rejects_a_server_signed_by_another_ca() {
    let server = TestServer::start().await;
    server
        .creds
        .install(leaf_for_one_day(&ca(), NAME), &anchors(&server.ca))
        .unwrap();
    assert!(matches!(
        server.connect(NAME, None).await,
        Err(client::Error::Handshake { .. })
    ));
}

#[tokio::test]
async fn a_new_certificate_is_used_from_the_next_handshake_on() {
    let server = TestServer::without_certificate().await;
    assert!(server.connect(NAME, None).await.is_err());
    server
        .creds
        .install(leaf_for_one_day(&server.ca, NAME), &anchors(&server.ca))
        .unwrap();
    let old = server.connect(NAME, None).await.unwrap();
    server
        .creds
        .install(leaf_for_one_day(&server.ca, NAME), &anchors(&server.ca))
        .unwrap();
    for channel in [server.connect(NAME, None).await.unwrap(), old] {
        assert_eq!(call_certify(channel).await.unwrap(), "hello");
    }
    let mut mixed = leaf_for_one_day(&server.ca, NAME);
    mixed.key = leaf_for_one_day(&server.ca, NAME).key.clone_key();
    assert!(server.creds.install(mixed, &anchors(&server.ca)).is_err());
    server.connect(NAME, None).await.unwrap();
}

#[tokio::test]
async fn plaintext_is_served_on_loopback_only() {
    let server = TestServer::without_certificate().await;
    let channel = client::connect_plaintext(&Addr::Socket(server.addr)).await.unwrap();
    assert_eq!(call_certify(channel).await.unwrap(), "hello");

    let server = build_server(server.creds.clone(), CallKind::Unary, CONNECTION_AGE, &Registry::new());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let elsewhere: SocketAddr = "10.0.0.1:5000".parse().unwrap();
    let (_signal, watch) = drain::channel();
    let permit = ConnectionLimiter::new("test", 1, SameAddressEviction::Idlest, &Registry::new()).admit(elsewhere.ip());
    let accepted = AcceptedConnection {
        stream,
        client: elsewhere,
        permit: permit.unwrap(),
        first_byte: b'P',
    };
    let refused = server.accept_and_serve(accepted, watch).await;
    assert!(matches!(refused, Err(ConnectionError::Plaintext)), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_stalled_handshake_is_closed() {
    let server = TestServer::start().await;
    // A handshake record that announces 256 bytes and never sends them.
    for start in [&b""[..], &[0x16, 3, 1, 1, 0]] {
        let mut client = TcpStream::connect(server.addr).await.unwrap();
        client.write_all(start).await.unwrap();
        let closed = timeout(2 * HANDSHAKE_TIMEOUT, client.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{start:?}");
    }
}

#[tokio::test]
async fn a_handshake_that_is_too_long_is_closed_at_once() {
    let server = TestServer::start().await;
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    // A ClientHello of 60,000 bytes, of which the last ones are missing.
    let hello = [&[1, 0, 0xea, 0x60][..], &[0; MAX_HANDSHAKE_BYTES + 16_000]].concat();
    for part in hello.chunks(16_000) {
        let [high, low] = u16::try_from(part.len()).unwrap().to_be_bytes();
        // The server may have closed the connection before it has read everything.
        let _ = client.write_all(&[&[22, 3, 1, high, low], part].concat()).await;
    }
    let closed = timeout(HANDSHAKE_TIMEOUT / 2, client.read_to_end(&mut Vec::new())).await;
    assert!(closed.is_ok());
}

#[tokio::test]
async fn a_request_that_is_too_long_is_refused() {
    let server = TestServer::start().await;
    let mut client = IdentityClient::new(server.connect(NAME, None).await.unwrap());
    let req = proto::CertifyRequest {
        token: vec![0; CallKind::Unary.max_request_bytes()],
        ..proto::CertifyRequest::default()
    };
    client.certify(req).await.unwrap_err();
    client.certify(proto::CertifyRequest::default()).await.unwrap();
}

#[tokio::test]
async fn a_drain_sends_goaway_and_ends() {
    let server = TestServer::start().await;
    let channel = server.connect(NAME, None).await.unwrap();
    call_certify(channel.clone()).await.unwrap();
    timeout(DRAIN_TIMEOUT, server.signal.drain()).await.unwrap();
    server.task.await.unwrap();
    call_certify(channel).await.unwrap_err();
    assert!(TcpStream::connect(server.addr).await.is_err());
}

#[tokio::test]
async fn a_connection_ends_at_its_maximum_age_with_its_streams() {
    let age = Duration::from_secs(1);
    let server = TestServer::start_with_age(ClientCertificates::Optional, age).await;
    let channel = client::connect_plaintext(&Addr::Socket(server.addr)).await.unwrap();
    let mut destination = DestinationClient::new(channel.clone());
    let mut updates = destination.get(GetDestination::default()).await.unwrap().into_inner();
    assert!(updates.message().await.unwrap().is_some());
    let end = timeout(20 * age, updates.message()).await.unwrap();
    assert!(end.unwrap().is_none(), "the stream ends without an error");
    call_certify(channel).await.unwrap_err();
    let metrics = server.registry.render();
    let ended = "grpc_server_handled_total{grpc_code=\"OK\",grpc_type=\"server_stream\"";
    assert!(metrics.contains(ended), "{metrics}");
    let channel = client::connect_plaintext(&Addr::Socket(server.addr)).await.unwrap();
    assert_eq!(call_certify(channel).await.unwrap(), "hello");
}

#[test]
fn connections_that_began_together_end_at_different_times() {
    let limits = Limits::from_resources(1024, None, CallKind::Streaming);
    let ages: Vec<_> = (0..1000).map(|_| limits.random_connection_age()).collect();
    let minutes = |n: u64| Duration::from_secs(n * 60);
    assert!(ages.iter().all(|age| (minutes(24)..=minutes(36)).contains(age)));
    assert!(ages.iter().any(|age| *age < minutes(26)) && ages.iter().any(|age| *age > minutes(34)));
}

#[tokio::test]
async fn openssl_sees_tls_1_3_without_alpn() {
    let server = TestServer::start().await;
    let text = server
        .openssl(&["-servername", NAME, "-verify_hostname", NAME, "-alpn", "h2"])
        .await;
    for line in ["Verify return code: 0 (ok)", "TLSv1.3", "No ALPN negotiated"] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    let text = server.openssl(&["-servername", NAME, "-tls1_2"]).await;
    assert!(text.contains("alert protocol version"), "{text}");
    for args in [&["-servername", WEB][..], &["-noservername"]] {
        let text = server.openssl(args).await;
        assert!(text.contains("no peer certificate available"), "{text}");
    }
}
