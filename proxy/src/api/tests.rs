//! Channels and watches against real servers on loopback. Tests of other modules use [`Server`] too.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, Stream, StreamExt, stream};
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

use crate::api::channel::{Channel, ClientCertificate, Config, Connector, ControlAddr, IdentityCheck, Security};
use crate::api::destination::{self, Destinations, ProfileScope};
use crate::api::dns;
use crate::api::metrics::Metrics;
use crate::api::watch::{Position, StreamLimits, WatchState};
use crate::tls::credentials::{Alpn, Credentials};
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
    /// Serves on loopback, with TLS if credentials are given.
    pub(crate) async fn start<S>(addr: SocketAddr, creds: Option<Credentials>, service: S) -> Self
    where
        S: tower::Service<Request<Incoming>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
    {
        let listener = TcpListener::bind(addr).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            // The connections are dropped with this task, which closes them.
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

    /// Stops the server and frees its port.
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
    server.max_concurrent_streams(None); // as in the control plane
    // A test server ignores clients that disconnect.
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

pub(crate) fn test_config() -> Config {
    Config {
        metrics_prefix: "control_test",
        connect_timeout: Duration::from_secs(5),
        backoff: BACKOFF,
        connection_wait_timeout: Duration::from_secs(1),
        client_certificate: ClientCertificate::Optional,
    }
}

/// Fails the test if the future takes too long.
pub(crate) async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("within 20 seconds")
}

const BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(20),
    max: Duration::from_millis(50),
    jitter: 0.1,
};
/// A loopback address whose port the kernel chooses.
const ANY_LOCAL_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// A destination service that responds to each `Get` call with the next step of a script.
#[derive(Clone, Default)]
struct Scripted {
    steps: Arc<Mutex<VecDeque<Step>>>,
    requests: Arc<Mutex<Vec<proto::GetDestination>>>,
    request_received: Arc<Notify>,
    /// The profile of every target.
    profile: sync::watch::Sender<proto::DestinationProfile>,
}

enum Step {
    Refuse(Code),
    Send(Vec<proto::Update>),
    /// Sends updates, then keeps the stream open; reports when the client has cancelled it.
    Hold(Vec<proto::Update>, oneshot::Sender<()>),
}

type Updates = Pin<Box<dyn Stream<Item = Result<proto::Update, Status>> + Send>>;

impl Scripted {
    fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            steps: Arc::new(Mutex::new(steps.into_iter().collect())),
            ..Self::default()
        }
    }

    async fn wait_requests(&self, times: usize) {
        with_timeout(async {
            while self.requests.lock().len() < times {
                self.request_received.notified().await;
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
        self.request_received.notify_one();
        let step = self.steps.lock().pop_front();
        let stream: Updates = match step {
            None => Box::pin(stream::pending()),
            Some(Step::Refuse(code)) => return Err(Status::new(code, "scripted")),
            Some(Step::Send(updates)) => Box::pin(stream::iter(updates.into_iter().map(Ok))),
            Some(Step::Hold(updates, cancelled_tx)) => {
                let hold = stream::pending().map(move |update| {
                    // This closure never runs. It owns the sender, so that the sender is dropped with the stream.
                    let _ = &cancelled_tx;
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
        let updates = WatchStream::new(self.profile.subscribe());
        Ok(tonic::Response::new(Box::pin(updates.map(Ok))))
    }
}

/// An update that is identified by its port.
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

type Endpoints = WatchState<(Position, u32)>;

fn endpoints(channel: Channel, limits: StreamLimits) -> Receiver<Endpoints> {
    endpoints_with(channel, limits, BACKOFF)
}

fn endpoints_with(channel: Channel, limits: StreamLimits, backoff: Backoff) -> Receiver<Endpoints> {
    destinations(channel, limits, backoff).endpoints("web.shop:80", |position, update| (position, port(&update)))
}

async fn wait_endpoints(endpoints: &mut Receiver<Endpoints>, expected: (Position, u32)) {
    with_timeout(endpoints.wait_for(|value| *value == WatchState::Known(expected)))
        .await
        .unwrap();
}

/// Starts a server with the same profile for every target. Returns the sender that changes the profile, the server, and a client of
/// it.
pub(crate) async fn start_profile_server(
    profile: proto::DestinationProfile,
) -> (sync::watch::Sender<proto::DestinationProfile>, Server, Destinations) {
    let (script, server, channel) = scripted([]).await;
    script.profile.send_replace(profile);
    let destinations = destinations(channel, StreamLimits::default(), BACKOFF);
    (script.profile, server, destinations)
}

/// Starts a scripted server with TLS. Returns its script, the server, and a channel to it.
async fn scripted(steps: impl IntoIterator<Item = Step>) -> (Scripted, Server, Channel) {
    let authority = Authority::new();
    let script = Scripted::new(steps);
    let creds = authority.credentials(CONTROL);
    let server = Server::start(ANY_LOCAL_PORT, Some(creds), DestinationServer::new(script.clone())).await;
    let connector = connector(authority.credentials(CLIENT), &Registry::new());
    let channel = connector.channel(server.target(mutual_tls()), test_config());
    (script, server, channel)
}

#[tokio::test]
async fn a_watch_follows_its_stream_over_mutual_tls() {
    let (script, _server, channel) = scripted([Step::Send(vec![added(1), added(2)])]).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    wait_endpoints(&mut watch, (Position::Later, 2)).await;
    script.wait_requests(2).await;
    let expected = proto::GetDestination {
        path: "web.shop:80".to_owned(),
        context_token: "{}".to_owned(),
        accepts_fallback: true,
        ..Default::default()
    };
    assert_eq!(script.requests.lock()[0], expected);
}

#[tokio::test]
async fn a_resumed_stream_starts_over() {
    let steps = [
        Step::Send(vec![added(1), added(2)]),
        Step::Refuse(Code::Unavailable),
        Step::Send(vec![added(3)]),
    ];
    let (_script, _server, channel) = scripted(steps).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    wait_endpoints(&mut watch, (Position::First, 3)).await;
}

#[tokio::test]
async fn a_watch_does_not_back_off_while_the_control_plane_is_unreachable() {
    let authority = Authority::new();
    let creds = authority.credentials(CONTROL);
    let service = DestinationServer::new(Scripted::new([Step::Send(vec![added(1)])]));
    let server = Server::start(ANY_LOCAL_PORT, Some(creds.clone()), service.clone()).await;
    let (addr, target) = (server.addr, server.target(mutual_tls()));
    server.stop().await;
    let limits = StreamLimits {
        initial: Some(Duration::from_secs(1)),
        ..StreamLimits::default()
    };
    let hour = Duration::from_secs(3600);
    let backoff = Backoff {
        min: hour,
        max: hour,
        jitter: 0.0,
    };
    let channel = connector(authority.credentials(CLIENT), &Registry::new()).channel(target, test_config());
    let mut watch = endpoints_with(channel.clone(), limits, backoff);
    // The wait is longer than the limit for opening a stream.
    timeout(Duration::from_millis(1500), watch.changed()).await.unwrap_err();
    assert!(channel.is_failing());
    let _server = Server::start(addr, Some(creds), service).await;
    wait_endpoints(&mut watch, (Position::First, 1)).await;
}

#[tokio::test]
async fn a_refused_target_is_retried_until_it_is_known() {
    for code in [Code::InvalidArgument, Code::FailedPrecondition] {
        let steps = [
            Step::Refuse(Code::Unavailable),
            Step::Refuse(code),
            Step::Refuse(code),
            Step::Send(vec![added(1)]),
        ];
        let (script, _server, channel) = scripted(steps).await;
        let mut watch = endpoints(channel, StreamLimits::default());
        let refused = with_timeout(watch.wait_for(|value| matches!(value, WatchState::Refused(_))))
            .await
            .unwrap()
            .clone();
        let WatchState::Refused(refusal) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            refusal.to_string(),
            format!("the control plane refuses the endpoints of web.shop:80 ({code:?}): scripted")
        );
        // The second refusal is the same and does not notify the receiver.
        with_timeout(watch.changed()).await.unwrap();
        assert_eq!(*watch.borrow(), WatchState::Known((Position::First, 1)));
        assert!(script.requests.lock().len() >= 4);
    }
}

#[tokio::test]
async fn a_denied_stream_is_logged_once_a_minute() {
    const KIND: &str = "the control plane refuses a watch stream, opening it again";
    let steps = [
        Step::Refuse(Code::PermissionDenied),
        Step::Refuse(Code::Unavailable),
        Step::Send(vec![added(1)]),
    ];
    let (_script, _server, channel) = scripted(steps).await;
    let mut watch = endpoints(channel.clone(), StreamLimits::default());
    wait_endpoints(&mut watch, (Position::First, 1)).await;
    let has_logged = |code| channel.log_limiter().allow(KIND, code).is_none();
    assert!(has_logged(Code::PermissionDenied));
    assert!(!has_logged(Code::Unavailable));
}

#[tokio::test]
async fn a_denied_stream_is_opened_again_as_soon_as_another_one_is_permitted() {
    let hold = |n| Step::Hold(vec![added(n)], oneshot::channel().0);
    // A message shows that the client is permitted, and so does an answer about the target.
    for answer in [hold(1), Step::Refuse(Code::FailedPrecondition)] {
        let denials = std::iter::repeat_with(|| Step::Refuse(Code::PermissionDenied)).take(4);
        let (script, _server, channel) = scripted(denials.chain([answer, hold(2)])).await;
        let mut denied = endpoints(channel.clone(), StreamLimits::default());
        with_timeout(denied.wait_for(|value| matches!(value, WatchState::Refused(refusal) if refusal.is_denial())))
            .await
            .unwrap();
        // The next delay is four seconds or more.
        script.wait_requests(4).await;
        let mut other = endpoints(channel, StreamLimits::default());
        let is_permitted = |value: &Endpoints| match value {
            WatchState::Pending => false,
            WatchState::Known(known) => *known == (Position::First, 1),
            WatchState::Refused(refusal) => refusal.code == Code::FailedPrecondition,
        };
        with_timeout(other.wait_for(is_permitted)).await.unwrap();
        drop(other); // is not opened again
        let known = |value: &Endpoints| *value == WatchState::Known((Position::First, 2));
        timeout(Duration::from_secs(2), denied.wait_for(known))
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test]
async fn a_permitted_stream_does_not_wake_denied_ones_with_another_check() {
    let (_script, _server, channel) = scripted([]).await;
    let namespace = channel.permitted(IdentityCheck::Namespace);
    let workload = channel.permitted(IdentityCheck::Workload);
    channel.notify_permitted(IdentityCheck::Namespace);
    assert_eq!(namespace.now_or_never(), Some(()));
    assert_eq!(workload.now_or_never(), None);
}

#[tokio::test]
async fn a_denial_does_not_replace_an_answer_about_the_target() {
    let steps = [Code::InvalidArgument, Code::PermissionDenied].map(Step::Refuse);
    let (script, _server, channel) = scripted(steps).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    let is_refused = |value: &Endpoints| matches!(value, WatchState::Refused(_));
    with_timeout(watch.wait_for(is_refused)).await.unwrap();
    // The third request follows the publication of the second refusal.
    script.wait_requests(3).await;
    let WatchState::Refused(refusal) = watch.borrow().clone() else {
        panic!("no refusal")
    };
    assert_eq!(refusal.code, Code::InvalidArgument);
}

#[tokio::test]
async fn a_refusal_does_not_replace_a_known_value() {
    let steps = [
        Step::Send(vec![added(1)]),
        Step::Refuse(Code::InvalidArgument),
        Step::Send(vec![added(2)]),
    ];
    let (_script, _server, channel) = scripted(steps).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    wait_endpoints(&mut watch, (Position::First, 1)).await;
    wait_endpoints(&mut watch, (Position::First, 2)).await;
}

#[tokio::test]
async fn streams_that_exceed_a_limit_are_opened_again() {
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
        let (first_tx, _first_rx) = oneshot::channel();
        let initial = if limits.initial.is_some() {
            vec![]
        } else {
            vec![added(1)]
        };
        let (script, _server, channel) = scripted([Step::Hold(initial, first_tx), Step::Send(vec![added(2)])]).await;
        let mut watch = endpoints(channel, limits);
        wait_endpoints(&mut watch, (Position::First, 2)).await;
        script.wait_requests(2).await;
    }
}

#[tokio::test]
async fn dropping_the_last_receiver_ends_the_stream() {
    let (cancelled_tx, cancelled_rx) = oneshot::channel();
    let (_script, _server, channel) = scripted([Step::Hold(vec![added(1)], cancelled_tx)]).await;
    let mut watch = endpoints(channel, StreamLimits::default());
    wait_endpoints(&mut watch, (Position::First, 1)).await;
    drop(watch);
    with_timeout(cancelled_rx).await.unwrap_err();
}

#[tokio::test]
async fn known_values_survive_a_restart_of_the_control_plane() {
    let authority = Authority::new();
    let (creds, script) = (authority.credentials(CONTROL), Scripted::new([]));
    let serving = |steps: Vec<Step>| {
        script.steps.lock().extend(steps);
        DestinationServer::new(script.clone())
    };
    let (sender, _left) = oneshot::channel();
    let server = Server::start(
        ANY_LOCAL_PORT,
        Some(creds.clone()),
        serving(vec![Step::Hold(vec![added(1)], sender)]),
    )
    .await;
    let addr = server.addr;
    let registry = Registry::new();
    let channel =
        connector(authority.credentials(CLIENT), &registry).channel(server.target(mutual_tls()), test_config());
    let mut watch = endpoints(channel, StreamLimits::default());
    wait_endpoints(&mut watch, (Position::First, 1)).await;
    server.stop().await;
    assert_eq!(*watch.borrow(), WatchState::Known((Position::First, 1)));
    let _server = Server::start(addr, Some(creds), serving(vec![Step::Send(vec![added(2)])])).await;
    wait_endpoints(&mut watch, (Position::First, 2)).await;
}

#[tokio::test]
async fn the_connected_replica_and_waiting_calls_are_counted() {
    let authority = Authority::new();
    let (creds, registry) = (authority.credentials(CONTROL), Registry::new());
    let service = DestinationServer::new(Scripted::new([]));
    let server = Server::start(ANY_LOCAL_PORT, Some(creds.clone()), service.clone()).await;
    let (addr, target) = (server.addr, server.target(mutual_tls()));
    server.stop().await;
    let mut channel = connector(authority.credentials(CLIENT), &registry).channel(target, test_config());
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
    let waiting = tokio::spawn(async move { waiting.wait_until_connected().await });
    counts(&[
        ("queue_length", "", 1),
        ("p2c_endpoints", "", 1),
        ("endpoints", ready, 0),
        ("endpoints", pending, 1),
    ])
    .await;
    let server = Server::start(addr, Some(creds), service).await;
    with_timeout(waiting).await.unwrap();
    with_timeout(channel.wait_until_connected()).await; // returns immediately
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
    assert!(
        !registry.render().contains("_gate_"),
        "control plane channels do not fail fast"
    );
}

#[tokio::test]
async fn streams_spread_over_three_replicas_and_only_those_of_a_replica_that_ends_are_opened_again() {
    const CHANNELS: usize = 90;
    let authority = Authority::new();
    let replicas = [(); 3].map(|()| Scripted::new([]));
    let mut servers = Vec::new();
    let mut port = 0;
    for (n, replica) in (1..).zip(&replicas) {
        let creds = authority.credentials(CONTROL);
        let service = DestinationServer::new(replica.clone());
        let server = Server::start(([127, 0, 0, n], port).into(), Some(creds), service).await;
        port = server.addr.port();
        servers.push(server);
    }
    let (name_server, _zone) = dns::tests::name_server().await;
    let registry = Registry::new();
    let connector = Connector {
        resolver: dns::tests::resolver(name_server, dns::Config::default(), &registry),
        ..connector(authority.credentials(CLIENT), &registry)
    };
    let target = ControlAddr {
        addr: format!("replicas.mesh.:{port}").parse().unwrap(),
        security: mutual_tls(),
    };
    let watches = (0..CHANNELS).map(|_| {
        let channel = connector.channel(target.clone(), test_config());
        endpoints(channel, StreamLimits::default())
    });
    let _watches: Vec<_> = watches.collect();
    let opened = || replicas.each_ref().map(|replica| replica.requests.lock().len());
    let wait_opened = async |n: usize| {
        let all = async {
            while opened().iter().sum::<usize>() < n {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(
            timeout(Duration::from_secs(20), all).await.is_ok(),
            "{:?} of {n}",
            opened()
        );
    };
    wait_opened(CHANNELS).await;
    let before = opened();
    // Four standard deviations of a random choice.
    assert!(before.iter().all(|n| n.abs_diff(CHANNELS / 3) <= 18), "{before:?}");
    servers.remove(0).stop().await;
    wait_opened(CHANNELS + before[0]).await;
    let after = opened();
    assert_eq!(after[0], before[0]);
    assert_eq!(
        after.iter().sum::<usize>(),
        CHANNELS + before[0],
        "{before:?} {after:?}"
    );
}

#[tokio::test]
async fn a_server_with_another_identity_gets_no_request() {
    let authority = Authority::new();
    let script = Scripted::new([Step::Send(vec![added(1)])]);
    let impostor = authority.credentials("impostor.linkerd.serviceaccount.identity.linkerd.cluster.local");
    let server = Server::start(ANY_LOCAL_PORT, Some(impostor), DestinationServer::new(script.clone())).await;
    let connector = connector(authority.credentials(CLIENT), &Registry::new());
    let channel = connector.channel(server.target(mutual_tls()), test_config());
    let mut client = proto::destination_client::DestinationClient::new(channel);
    let status = with_timeout(client.get(proto::GetDestination::default()))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status.message().contains("the peer has the identities [impostor."),
        "{}",
        status.message()
    );
    assert!(script.requests.lock().is_empty());
}

#[tokio::test]
async fn loopback_names_are_plaintext_and_tried_on_both_families() {
    let (script, registry) = (Scripted::new([Step::Send(vec![added(7)])]), Registry::new());
    let server = Server::start(ANY_LOCAL_PORT, None, DestinationServer::new(script)).await;
    let authority = Authority::new();
    let target = ControlAddr {
        addr: format!("localhost.:{}", server.addr.port()).parse().unwrap(),
        security: Security::Loopback,
    };
    let channel = connector(authority.credentials(CLIENT), &registry).channel(target, test_config());
    // Limits are not used for a control plane on this host.
    let limits = StreamLimits {
        initial: Some(Duration::ZERO),
        ..Default::default()
    };
    wait_endpoints(&mut endpoints(channel, limits), (Position::First, 7)).await;
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
    let (_sender, _server, destinations) = start_profile_server(profile).await;
    let outside: Addr = "192.168.0.1:80".parse().unwrap();
    assert!(destinations.profile(&outside, |_| ()).is_none());
    let inside: Addr = "10.0.0.1:80".parse().unwrap();
    let mut profile = destinations
        .profile(&inside, |profile| profile.fully_qualified_name)
        .unwrap();
    with_timeout(profile.wait_for(|value| *value == WatchState::Known("web.shop".to_owned())))
        .await
        .unwrap();
}
