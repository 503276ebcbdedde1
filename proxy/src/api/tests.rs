//! Channels and watches against real servers on loopback. Other rooms' tests borrow the server.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch::Receiver;
use tokio::sync::{self, Notify, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_stream::wrappers::WatchStream;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::ServiceExt;
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_core::metrics::Registry;
use tulle_proto::destination::destination_server::{Destination, DestinationServer};
use tulle_proto::destination::{self as proto, update};

use crate::api::channel::{Channel, Config, Connector, ControlAddr, OwnIdentity, Security};
use crate::api::destination::{self, Destinations, ProfileScope};
use crate::api::dns;
use crate::api::metrics::Metrics;
use crate::api::watch::{Position, StreamLimits, Watched};
use crate::tls::creds::{Alpn, Credentials};
use crate::tls::server;
use crate::tls::tests::Authority;

pub(crate) const CLIENT: &str = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local";
pub(crate) const CONTROL: &str = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local";

/// A gRPC server; it and its connections end when it is dropped.
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// Serves on loopback, with TLS if there are credentials.
    pub(crate) async fn start<S>(addr: SocketAddr, creds: Option<Credentials>, service: S) -> Self
    where
        S: tower::Service<Request<Incoming>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
    {
        let listener = TcpListener::bind(addr).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            // Dropped with this task, which ends all connections.
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (service, creds) = (service.clone(), creds.clone());
                connections.spawn(async move {
                    match creds {
                        None => serve(stream, service).await,
                        Some(creds) => match server::accept(stream, &creds, Alpn::Unset).await {
                            Ok((stream, _)) => serve(stream, service).await,
                            Err(_refused) => {}
                        },
                    }
                });
            }
        });
        Self { addr, task }
    }

    /// Frees the port for a successor.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        let _cancelled = (&mut self.task).await;
    }

    pub(crate) fn target(&self, security: Security) -> ControlAddr {
        ControlAddr {
            addr: Addr::Socket(self.addr),
            security,
        }
    }
}

pub(crate) async fn serve<IO, S>(io: IO, service: S)
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    S: tower::Service<Request<Incoming>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let service = service_fn(move |req| service.clone().oneshot(req));
    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    server.max_concurrent_streams(None); // as the control plane has it
    // Clients that leave are no concern of a test server.
    let _ = server.serve_connection(TokioIo::new(io), service).await;
}

pub(crate) fn mutual_tls() -> Security {
    Security::MutualTls(CONTROL.parse().unwrap())
}

pub(crate) fn connector(creds: Credentials, registry: &Registry) -> Connector {
    let metrics = Metrics::new(registry);
    let resolver = dns::Resolver::new(dns::Config::default(), metrics.clone());
    Connector {
        creds,
        resolver,
        metrics,
        runtime: Handle::current(),
    }
}

pub(crate) fn quick() -> Config {
    Config {
        client: "control_test",
        connect_timeout: Duration::from_secs(5),
        backoff: BACKOFF,
        call_wait: Duration::from_secs(1),
        own_identity: OwnIdentity::Optional,
    }
}

/// What happens within reason happens within this time.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("within 20 seconds")
}

const BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(20),
    max: Duration::from_millis(50),
    jitter: 0.1,
};
const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Answers `Get` by a script, one act a call.
#[derive(Clone, Default)]
struct Scripted {
    acts: Arc<Mutex<VecDeque<Act>>>,
    requests: Arc<Mutex<Vec<proto::GetDestination>>>,
    asked: Arc<Notify>,
    /// What all profiles are.
    profile: sync::watch::Sender<proto::DestinationProfile>,
}

enum Act {
    Refuse(Code),
    /// Sends updates, then ends the stream.
    Send(Vec<proto::Update>),
    /// Sends updates, then keeps the stream open; tells when the client has left.
    Hold(Vec<proto::Update>, oneshot::Sender<()>),
}

type Updates = Pin<Box<dyn Stream<Item = Result<proto::Update, Status>> + Send>>;

impl Scripted {
    fn play(acts: impl IntoIterator<Item = Act>) -> Self {
        Self {
            acts: Arc::new(Mutex::new(acts.into_iter().collect())),
            ..Self::default()
        }
    }

    async fn asked(&self, times: usize) {
        soon(async {
            while self.requests.lock().len() < times {
                self.asked.notified().await;
            }
        })
        .await;
    }
}

#[tonic::async_trait]
impl Destination for Scripted {
    type GetStream = Updates;
    type GetProfileStream = Pin<Box<dyn Stream<Item = Result<proto::DestinationProfile, Status>> + Send>>;

    async fn get(&self, req: tonic::Request<proto::GetDestination>) -> Result<tonic::Response<Updates>, Status> {
        self.requests.lock().push(req.into_inner());
        self.asked.notify_one();
        let act = self.acts.lock().pop_front();
        let stream: Updates = match act {
            None => Box::pin(stream::pending()),
            Some(Act::Refuse(code)) => return Err(Status::new(code, "scripted")),
            Some(Act::Send(updates)) => Box::pin(stream::iter(updates.into_iter().map(Ok))),
            Some(Act::Hold(updates, left)) => {
                let hold = stream::pending().map(move |update| {
                    // Never runs; the closure owns the sender, and is dropped with the stream.
                    let _ = &left;
                    update
                });
                Box::pin(stream::iter(updates.into_iter().map(Ok)).chain(hold))
            }
        };
        Ok(tonic::Response::new(stream))
    }

    async fn get_profile(
        &self,
        _: tonic::Request<proto::GetDestination>,
    ) -> Result<tonic::Response<Self::GetProfileStream>, Status> {
        let said = WatchStream::new(self.profile.subscribe());
        Ok(tonic::Response::new(Box::pin(said.map(Ok))))
    }
}

/// An update that is told from others by its port.
fn added(port: u32) -> proto::Update {
    let addr = proto::WeightedAddr {
        addr: Some(tulle_proto::net::TcpAddress {
            port,
            ..Default::default()
        }),
        ..Default::default()
    };
    let set = proto::WeightedAddrSet {
        addrs: vec![addr],
        ..Default::default()
    };
    proto::Update {
        update: Some(update::Update::Add(set)),
    }
}

fn port(update: &proto::Update) -> u32 {
    match &update.update {
        Some(update::Update::Add(set)) => set.addrs[0].addr.as_ref().unwrap().port,
        other => panic!("{other:?}"),
    }
}

fn destinations(channel: Channel, limits: StreamLimits, backoff: Backoff) -> Destinations {
    let profiles = ProfileScope {
        networks: vec!["10.0.0.0/8".parse().unwrap()],
        ..Default::default()
    };
    let config = destination::Config {
        context_token: "{}".to_owned(),
        profiles,
        limits,
        backoff,
    };
    Destinations::new(channel, Handle::current(), config)
}

type Endpoints = Watched<(Position, u32)>;

fn endpoints(channel: Channel, limits: StreamLimits) -> Receiver<Endpoints> {
    endpoints_with(channel, limits, BACKOFF)
}

fn endpoints_with(channel: Channel, limits: StreamLimits, backoff: Backoff) -> Receiver<Endpoints> {
    destinations(channel, limits, backoff).endpoints("web.shop:80", |position, update| (position, port(&update)))
}

async fn becomes(endpoints: &mut Receiver<Endpoints>, expected: (Position, u32)) {
    soon(endpoints.wait_for(|value| *value == Watched::Known(expected)))
        .await
        .unwrap();
}

/// A server that says the same profile of everything, a client of it, and what changes the profile.
pub(crate) async fn profiles_of(
    profile: proto::DestinationProfile,
) -> (sync::watch::Sender<proto::DestinationProfile>, Server, Destinations) {
    let (script, server, channel) = scripted([]).await;
    script.profile.send_replace(profile);
    let destinations = destinations(channel, StreamLimits::default(), BACKOFF);
    (script.profile, server, destinations)
}

/// A scripted server with TLS, and a channel to it.
async fn scripted(acts: impl IntoIterator<Item = Act>) -> (Scripted, Server, Channel) {
    let authority = Authority::new();
    let script = Scripted::play(acts);
    let creds = authority.credentials(CONTROL);
    let server = Server::start(ANYWHERE, Some(creds), DestinationServer::new(script.clone())).await;
    let connector = connector(authority.credentials(CLIENT), &Registry::new());
    let channel = connector.channel(server.target(mutual_tls()), quick());
    (script, server, channel)
}

#[tokio::test]
async fn a_watch_follows_its_stream_over_mutual_tls() {
    let (script, _server, channel) = scripted([Act::Send(vec![added(1), added(2)])]).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    becomes(&mut watch, (Position::Later, 2)).await;
    script.asked(2).await;
    let expected = proto::GetDestination {
        path: "web.shop:80".to_owned(),
        context_token: "{}".to_owned(),
        ..Default::default()
    };
    assert_eq!(script.requests.lock()[0], expected);
}

#[tokio::test]
async fn a_resumed_stream_starts_over() {
    let acts = [
        Act::Send(vec![added(1), added(2)]),
        Act::Refuse(Code::Unavailable),
        Act::Send(vec![added(3)]),
    ];
    let (_script, _server, channel) = scripted(acts).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    becomes(&mut watch, (Position::First, 3)).await;
}

#[tokio::test]
async fn a_watch_does_not_back_off_from_a_control_plane_that_is_not_there() {
    let authority = Authority::new();
    let creds = authority.credentials(CONTROL);
    let service = DestinationServer::new(Scripted::play([Act::Send(vec![added(1)])]));
    let server = Server::start(ANYWHERE, Some(creds.clone()), service.clone()).await;
    let (addr, target) = (server.addr, server.target(mutual_tls()));
    server.stop().await;
    let limits = StreamLimits {
        initial: Some(Duration::from_millis(20)),
        ..StreamLimits::default()
    };
    let hour = Duration::from_secs(3600);
    let backoff = Backoff {
        min: hour,
        max: hour,
        jitter: 0.0,
    };
    let channel = connector(authority.credentials(CLIENT), &Registry::new()).channel(target, quick());
    let mut watch = endpoints_with(channel.clone(), limits, backoff);
    // Longer than a stream may take to open.
    timeout(Duration::from_millis(200), watch.changed()).await.unwrap_err();
    assert!(channel.is_failing());
    let _server = Server::start(addr, Some(creds), service).await;
    becomes(&mut watch, (Position::First, 1)).await;
}

#[tokio::test]
async fn what_is_refused_is_asked_for_again_until_it_is_known() {
    for code in [Code::InvalidArgument, Code::FailedPrecondition] {
        let acts = [
            Act::Refuse(Code::Unavailable),
            Act::Refuse(code),
            Act::Refuse(code),
            Act::Send(vec![added(1)]),
        ];
        let (script, _server, channel) = scripted(acts).await;
        let mut watch = endpoints(channel, StreamLimits::default());
        let refused = soon(watch.wait_for(|value| matches!(value, Watched::Refused(_))))
            .await
            .unwrap()
            .clone();
        let Watched::Refused(refusal) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            refusal.to_string(),
            format!("control plane refuses endpoints of web.shop:80 ({code:?}): scripted")
        );
        // The second refusal is the same, and wakes nobody.
        soon(watch.changed()).await.unwrap();
        assert_eq!(*watch.borrow(), Watched::Known((Position::First, 1)));
        assert!(script.requests.lock().len() >= 4);
    }
}

#[tokio::test]
async fn a_refusal_does_not_take_what_is_known() {
    let acts = [
        Act::Send(vec![added(1)]),
        Act::Refuse(Code::InvalidArgument),
        Act::Send(vec![added(2)]),
    ];
    let (_script, _server, channel) = scripted(acts).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    becomes(&mut watch, (Position::First, 1)).await;
    becomes(&mut watch, (Position::First, 2)).await;
}

#[tokio::test]
async fn streams_that_break_a_limit_are_opened_again() {
    let limit = Some(Duration::from_millis(50));
    for limits in [
        StreamLimits {
            initial: limit,
            ..Default::default()
        },
        StreamLimits {
            idle: limit,
            ..Default::default()
        },
        StreamLimits {
            lifetime: limit,
            ..Default::default()
        },
    ] {
        let (first, _left) = oneshot::channel();
        let initial = if limits.initial.is_some() {
            vec![]
        } else {
            vec![added(1)]
        };
        let (script, _server, channel) = scripted([Act::Hold(initial, first), Act::Send(vec![added(2)])]).await;
        let mut watch = endpoints(channel, limits);
        becomes(&mut watch, (Position::First, 2)).await;
        script.asked(2).await;
    }
}

#[tokio::test]
async fn dropping_the_last_receiver_ends_the_stream() {
    let (sender, left) = oneshot::channel();
    let (_script, _server, channel) = scripted([Act::Hold(vec![added(1)], sender)]).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    becomes(&mut watch, (Position::First, 1)).await;
    drop(watch);
    soon(left).await.unwrap_err();
}

#[tokio::test]
async fn what_is_known_survives_a_restart_of_the_control_plane() {
    let authority = Authority::new();
    let (creds, script) = (authority.credentials(CONTROL), Scripted::play([]));
    let serving = |acts: Vec<Act>| {
        script.acts.lock().extend(acts);
        DestinationServer::new(script.clone())
    };
    let (sender, _left) = oneshot::channel();
    let server = Server::start(
        ANYWHERE,
        Some(creds.clone()),
        serving(vec![Act::Hold(vec![added(1)], sender)]),
    )
    .await;
    let addr = server.addr;
    let registry = Registry::new();
    let channel = connector(authority.credentials(CLIENT), &registry).channel(server.target(mutual_tls()), quick());
    let mut watch = endpoints(channel, StreamLimits::default());
    becomes(&mut watch, (Position::First, 1)).await;
    server.stop().await;
    assert_eq!(*watch.borrow(), Watched::Known((Position::First, 1)));
    let _server = Server::start(addr, Some(creds), serving(vec![Act::Send(vec![added(2)])])).await;
    becomes(&mut watch, (Position::First, 2)).await;
}

#[tokio::test]
async fn the_replica_of_a_connection_is_counted_and_who_waits_for_one() {
    let authority = Authority::new();
    let (creds, registry) = (authority.credentials(CONTROL), Registry::new());
    let service = DestinationServer::new(Scripted::play([]));
    let server = Server::start(ANYWHERE, Some(creds.clone()), service.clone()).await;
    let (addr, target) = (server.addr, server.target(mutual_tls()));
    server.stop().await;
    let mut channel = connector(authority.credentials(CLIENT), &registry).channel(target, quick());
    let counts = async |expected: &[(&str, &str, u32)]| {
        let lines = expected.iter().map(|(name, label, value)| {
            let label = if label.is_empty() {
                String::new()
            } else {
                format!(",{label}")
            };
            format!("control_test_balancer_{name}{{addr=\"{addr}\"{label}}} {value}\n")
        });
        let lines: Vec<_> = lines.collect();
        let counted = async {
            while !lines.iter().all(|line| registry.render().contains(line)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let is_counted = timeout(Duration::from_secs(20), counted).await.is_ok();
        assert!(is_counted, "{lines:?} in {}", registry.render());
    };
    let (ready, pending) = ("endpoint_state=\"ready\"", "endpoint_state=\"pending\"");
    let mut waiting = channel.clone();
    let waiting = tokio::spawn(async move { waiting.connected().await });
    counts(&[
        ("queue_length", "", 1),
        ("p2c_endpoints", "", 1),
        ("endpoints", ready, 0),
        ("endpoints", pending, 1),
    ])
    .await;
    let server = Server::start(addr, Some(creds), service).await;
    soon(waiting).await.unwrap();
    soon(channel.connected()).await; // which waits for nothing
    counts(&[
        ("queue_length", "", 0),
        ("queue_requests_total", "", 1),
        ("queue_latency_seconds_count", "", 1),
        ("endpoints", ready, 1),
        ("endpoints", pending, 0),
    ])
    .await;
    server.stop().await;
    counts(&[("endpoints", ready, 0), ("endpoints", pending, 1)]).await;
    assert!(!registry.render().contains("_gate_"), "nobody fails for others");
}

#[tokio::test]
async fn a_server_with_another_identity_is_never_asked() {
    let authority = Authority::new();
    let script = Scripted::play([Act::Send(vec![added(1)])]);
    let impostor = authority.credentials("impostor.linkerd.serviceaccount.identity.linkerd.cluster.local");
    let server = Server::start(ANYWHERE, Some(impostor), DestinationServer::new(script.clone())).await;
    let connector = connector(authority.credentials(CLIENT), &Registry::new());
    let channel = connector.channel(server.target(mutual_tls()), quick());
    let mut client = proto::destination_client::DestinationClient::new(channel);
    let status = soon(client.get(proto::GetDestination::default())).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("peer is [impostor."), "{}", status.message());
    assert!(script.requests.lock().is_empty());
}

#[tokio::test]
async fn loopback_names_are_plaintext_and_tried_on_both_families() {
    let (script, registry) = (Scripted::play([Act::Send(vec![added(7)])]), Registry::new());
    let server = Server::start(ANYWHERE, None, DestinationServer::new(script)).await;
    let authority = Authority::new();
    let target = ControlAddr {
        addr: format!("localhost.:{}", server.addr.port()).parse().unwrap(),
        security: Security::Loopback,
    };
    let channel = connector(authority.credentials(CLIENT), &registry).channel(target, quick());
    // Limits do not hold for a control plane on this machine.
    let limits = StreamLimits {
        initial: Some(Duration::ZERO),
        ..Default::default()
    };
    becomes(&mut endpoints(channel, limits), (Position::First, 7)).await;
    let metrics = registry.render();
    let labels = format!(
        r#"addr="localhost.:{}",tls="no_identity",no_tls_reason="loopback""#,
        server.addr.port()
    );
    for line in [
        format!("control_request_total{{{labels}}}"),
        format!(r#"control_response_total{{{labels},status_code="200",classification="success",grpc_status=""}}"#),
        format!("control_response_latency_ms_count{{{labels}}}"),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

#[tokio::test]
async fn profiles_are_watched_in_scope_only() {
    let profile = proto::DestinationProfile {
        fully_qualified_name: "web.shop".to_owned(),
        ..Default::default()
    };
    let (_said, _server, destinations) = profiles_of(profile).await;
    let outside: Addr = "192.168.0.1:80".parse().unwrap();
    assert!(destinations.profile(&outside, |_| ()).is_none());
    let inside: Addr = "10.0.0.1:80".parse().unwrap();
    let mut profile = destinations
        .profile(&inside, |profile| profile.fully_qualified_name)
        .unwrap();
    soon(profile.wait_for(|value| *value == Watched::Known("web.shop".to_owned())))
        .await
        .unwrap();
}
