//! A whole mesh in this process: the real control plane, real proxies, and applications that a test gives it.
//!
//! Every mesh has a network namespace of its own in which all of 10.66.0.0/16 is local, so that each workload has an
//! address, all may use the same ports, and nothing touches the host's network. There are no redirect rules: a test says
//! what a connection dials, and the proxies believe it as they believe the kernel. Between proxies, connections go to
//! the inbound port with a transport header, which needs no redirect either.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tulle_core::addr::OrigDst;
use tulle_core::netns::{self, Namespace};
use tulle_core::telemetry::{self, Format};
use tulle_proxy::app::{App, Surroundings};

use crate::apps;
use crate::client::{self, Answer};
use crate::control::{CONTROL_IP, CONTROL_NS, ControlPlane, Files};
use crate::eventually::eventually;

/// Namespace of all workloads.
pub const NS: &str = "shop";
/// Where applications speak HTTP.
pub const HTTP: u16 = 8080;
/// Where applications speak anything; nobody told the mesh what.
pub const TCP: u16 = 9000;
/// Where applications speak what the mesh was told not to look at.
pub const OPAQUE: u16 = 3306;
/// An address of no workload.
pub const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 66, 9, 9);

/// A mesh to be; see [`mesh`].
pub struct Builder {
    workloads: Vec<Workload>,
    manifests: Vec<(String, String)>,
    transport: Transport,
    flags: Vec<String>,
    env: Vec<(String, String)>,
    /// Of services, by their app, between commas.
    annotations: BTreeMap<String, String>,
    /// Whom proxies ask for names.
    dns: Option<IpAddr>,
    limit: Duration,
}

/// How proxies reach one another.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Transport {
    /// At the inbound port, with a header that says the application's port.
    Header,
    /// At the application's HTTP port, where redirect rules would lead to the proxy. Without such rules the proxy listens
    /// there itself, and the application one port further. Other ports are not reached.
    Transparent,
}

#[derive(Clone)]
struct Workload {
    name: String,
    /// Service account, `app` label and name of its service.
    app: String,
    sidecar: Sidecar,
    teller: Teller,
    env: Vec<(String, String)>,
}

#[derive(Copy, Clone, PartialEq, Eq)]
enum Sidecar {
    Present,
    Absent,
}

/// Who tells a proxy what a connection has dialled.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Teller {
    Test,
    Kernel,
}

/// A running mesh.
pub struct Mesh {
    files: Files,
    transport: Transport,
    flags: Vec<String>,
    control: Mutex<Option<ControlPlane>>,
    ips: BTreeMap<String, Ipv4Addr>,
    services: BTreeMap<String, Ipv4Addr>,
    proxies: BTreeMap<String, Proxy>,
    /// What connections dialled, by their own address.
    dialled: Dialled,
}

type Dialled = Arc<Mutex<HashMap<SocketAddr, SocketAddr>>>;

/// One proxy on its threads.
struct Proxy {
    outbound: SocketAddr,
    inbound: SocketAddr,
    admin: SocketAddr,
    /// What it shows for a certificate.
    token: PathBuf,
    shutdown: Arc<Notify>,
    thread: Mutex<Option<JoinHandle<anyhow::Result<()>>>>,
}

/// Workers stand still until it is dropped.
pub struct Stalled {
    _release: mpsc::Sender<()>,
}

/// A mesh without workloads.
pub fn mesh() -> Builder {
    Builder {
        workloads: Vec::new(),
        manifests: Vec::new(),
        transport: Transport::Header,
        flags: Vec::new(),
        env: Vec::new(),
        annotations: BTreeMap::new(),
        dns: None,
        limit: LIMIT,
    }
}

/// Runs a test with `client` and the echo server `web`, both meshed, in both ways in which proxies reach one another.
pub fn pair(test: impl AsyncFn(&Mesh) + Send + Sync) {
    for mesh in [mesh(), mesh().transparent()] {
        mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
            apps::echo(mesh, "web").await;
            test(mesh).await;
        });
    }
}

/// The identity of an app's workloads.
pub fn identity(app: &str) -> String {
    tulle_core::identity::service_account(app, NS, CONTROL_NS, "cluster.local")
}

impl Builder {
    /// Adds a workload with a sidecar, and a service of the same name.
    pub fn workload(self, name: &str) -> Self {
        self.add(name, name, Sidecar::Present)
    }

    /// Adds several workloads with sidecars, `<app>-0` and so on, behind one service.
    pub fn replicas(self, app: &str, n: usize) -> Self {
        (0..n).fold(self, |mesh, i| mesh.add(&format!("{app}-{i}"), app, Sidecar::Present))
    }

    /// Adds a workload without a sidecar, and a service of the same name.
    pub fn unmeshed(self, name: &str) -> Self {
        self.add(name, name, Sidecar::Absent)
    }

    fn add(mut self, name: &str, app: &str, sidecar: Sidecar) -> Self {
        self.workloads.push(Workload {
            name: name.into(),
            app: app.into(),
            sidecar,
            teller: Teller::Test,
            env: Vec::new(),
        });
        self
    }

    /// Sets a variable of all proxies; `name` is without `LINKERD2_PROXY_`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((full(name), value.into()));
        self
    }

    /// Sets a variable of the workload that was added last.
    pub fn its_env(mut self, name: &str, value: &str) -> Self {
        self.last().env.push((full(name), value.into()));
        self
    }

    /// Has the proxy of the workload that was added last ask the kernel what was dialled; without rules that is the proxy itself.
    pub fn asks_the_kernel(mut self) -> Self {
        self.last().teller = Teller::Kernel;
        self
    }

    fn last(&mut self) -> &mut Workload {
        self.workloads.last_mut().expect("a workload was added before")
    }

    /// Lets proxies reach one another without transport headers, at HTTP ports only.
    pub fn transparent(mut self) -> Self {
        self.transport = Transport::Transparent;
        self
    }

    /// Starts the control plane with a flag.
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Annotates the service of an app: `key: value`, between commas.
    pub fn annotated(mut self, app: &str, annotations: &str) -> Self {
        self.annotations.insert(app.into(), annotations.into());
        self
    }

    /// Lets all of the mesh ask this DNS server, at port 53; without it nobody answers.
    pub fn dns(mut self, server: impl Into<IpAddr>) -> Self {
        self.dns = Some(server.into());
        self
    }

    /// Lets the test take longer than others.
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts with a manifest besides those of workloads and services.
    pub fn manifest(mut self, name: &str, yaml: &str) -> Self {
        self.manifests.push((name.into(), yaml.into()));
        self
    }

    /// Starts the mesh, runs the test and ends the mesh.
    ///
    /// Without root there are no network namespaces, and the test is skipped with a word, but not in CI.
    ///
    /// # Panics
    /// When the mesh cannot be started, the test fails, or takes more than half a minute where nothing else is said.
    pub fn run(self, test: impl AsyncFnOnce(&Mesh) + Send) {
        if !nix::unistd::Uid::effective().is_root() {
            let reason = "a mesh needs a network namespace, and only root may make one";
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            eprintln!("SKIPPED: {reason}");
            return;
        }
        let namespace = namespace();
        let limit = self.limit;
        let inside = || -> anyhow::Result<()> {
            if let Some(server) = self.dns {
                ask_dns(server).context("replacing /etc/resolv.conf")?;
            }
            let mesh = self.start()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                mesh.ready().await;
                let limited = tokio::time::timeout(limit, test(&mesh));
                limited.await.expect("the test ends in time");
            });
            // Connections of the test end before the proxies do, so that nothing holds their drain open.
            drop(runtime);
            Ok(())
        };
        namespace
            .run(inside)
            .expect("entering the namespace")
            .expect("starting the mesh");
    }

    fn start(mut self) -> anyhow::Result<Mesh> {
        start_logs();
        self.flags
            .push(format!("--outbound-transport-mode={}", self.transport.flag()));
        let files = Files::new()?;
        let (mut ips, mut services) = (BTreeMap::new(), BTreeMap::new());
        for (workload, last) in self.workloads.iter().zip(10..) {
            let ip = Ipv4Addr::new(10, 66, 0, last);
            ips.insert(workload.name.clone(), ip);
            files.write(&format!("pod-{}", workload.name), &workload.pod(ip))?;
            services
                .entry(workload.app.clone())
                .or_insert_with(|| Ipv4Addr::new(10, 66, 1, last));
        }
        for (app, ip) in &services {
            let annotations = self.annotations.get(app).map_or("", String::as_str);
            files.write(&format!("service-{app}"), &service(app, *ip, annotations))?;
        }
        for (name, yaml) in &self.manifests {
            files.write(name, yaml)?;
        }
        let control = ControlPlane::start(&files, &self.flags)?;
        let dialled = Dialled::default();
        let mut proxies = BTreeMap::new();
        for workload in &self.workloads {
            if workload.sidecar == Sidecar::Present {
                let variables = workload.variables(ips[&workload.name], &files, self.transport, &self.env)?;
                let proxy = Proxy::start(&variables, workload.surroundings(dialled.clone(), self.transport))
                    .with_context(|| format!("starting the proxy of {}", workload.name))?;
                proxies.insert(workload.name.clone(), proxy);
            }
        }
        Ok(Mesh {
            files,
            transport: self.transport,
            flags: self.flags,
            control: Mutex::new(Some(control)),
            ips,
            services,
            proxies,
            dialled,
        })
    }
}

impl Transport {
    /// Of the control plane.
    fn flag(self) -> &'static str {
        match self {
            Self::Header => "transport-header",
            Self::Transparent => "transparent",
        }
    }

    /// The inbound port of proxies.
    fn inbound(self) -> u16 {
        match self {
            Self::Header => 4143,
            Self::Transparent => HTTP,
        }
    }

    /// Where the application listens that others dial at `port`.
    fn app(self, port: u16) -> u16 {
        match self {
            Self::Transparent if port == HTTP => HTTP + 1,
            _ => port,
        }
    }
}

impl Workload {
    fn pod(&self, ip: Ipv4Addr) -> String {
        let Self { name, app, sidecar, .. } = self;
        let meshed = match sidecar {
            Sidecar::Present => format!(", linkerd.io/control-plane-ns: {CONTROL_NS}"),
            Sidecar::Absent => String::new(),
        };
        format!(
            "\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: {NS}
  labels: {{app: {app}{meshed}}}
  annotations: {{config.linkerd.io/opaque-ports: \"{OPAQUE}\"}}
spec:
  serviceAccountName: {app}
  containers:
  - name: app
    ports:
    - {{name: http, containerPort: {HTTP}}}
    - {{name: tcp, containerPort: {TCP}}}
    - {{name: opaque, containerPort: {OPAQUE}}}
status: {{podIP: {ip}}}
"
        )
    }

    fn variables(
        &self,
        ip: Ipv4Addr,
        files: &Files,
        transport: Transport,
        more: &[(String, String)],
    ) -> anyhow::Result<HashMap<String, String>> {
        let control = |account| tulle_core::identity::service_account(account, CONTROL_NS, CONTROL_NS, "cluster.local");
        let token = files.token(&self.name, &self.app, NS)?;
        let variables = [
            ("OUTBOUND_LISTEN_ADDR", format!("{ip}:4140")),
            ("INBOUND_LISTEN_ADDR", format!("{ip}:{}", transport.inbound())),
            ("ADMIN_LISTEN_ADDR", format!("{ip}:4191")),
            ("CONTROL_LISTEN_ADDR", format!("{ip}:4190")),
            ("INBOUND_IPS", ip.to_string()),
            ("INBOUND_PORTS", format!("{HTTP},{TCP},{OPAQUE}")),
            ("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", OPAQUE.to_string()),
            ("DESTINATION_SVC_ADDR", format!("{CONTROL_IP}:8086")),
            ("DESTINATION_SVC_NAME", control("linkerd-destination")),
            (
                "DESTINATION_CONTEXT",
                format!(r#"{{"ns":"{NS}", "pod":"{}"}}"#, self.name),
            ),
            ("DESTINATION_PROFILE_NETWORKS", "10.66.0.0/16".into()),
            ("POLICY_SVC_ADDR", format!("{CONTROL_IP}:8090")),
            ("POLICY_SVC_NAME", control("linkerd-destination")),
            ("POLICY_WORKLOAD", format!(r#"{{"ns":"{NS}", "pod":"{}"}}"#, self.name)),
            ("POLICY_CLUSTER_NETWORKS", "10.66.0.0/16".into()),
            ("IDENTITY_SVC_ADDR", format!("{CONTROL_IP}:8080")),
            ("IDENTITY_SVC_NAME", control("linkerd-identity")),
            ("IDENTITY_TRUST_ANCHORS", files.anchors.clone()),
            ("IDENTITY_TOKEN_FILE", token.display().to_string()),
            ("IDENTITY_LOCAL_NAME", identity(&self.app)),
            ("SHUTDOWN_GRACE_PERIOD", "5s".into()),
        ];
        let defaults = variables.into_iter().map(|(name, value)| (full(name), value));
        Ok(defaults
            .chain(more.iter().cloned())
            .chain(self.env.iter().cloned())
            .collect())
    }

    fn surroundings(&self, dialled: Dialled, transport: Transport) -> Surroundings {
        let redirected = Surroundings::redirected(None, BTreeMap::new());
        if self.teller == Teller::Kernel {
            return redirected;
        }
        let orig_dst = move |stream: &TcpStream, client: SocketAddr| -> io::Result<OrigDst> {
            if let Some(said) = dialled.lock().get(&client) {
                return Ok(OrigDst(*said));
            }
            // Another proxy: it has dialled where it arrived, or where that stands for.
            let mut local = stream.local_addr()?;
            local.set_port(transport.app(local.port()));
            Ok(OrigDst(local))
        };
        Surroundings {
            orig_dst: Arc::new(orig_dst),
            ..redirected
        }
    }
}

/// A connection whose other side has reset it.
async fn reset() -> TcpStream {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("ports are left");
    let addr = listener.local_addr().expect("the socket is bound");
    let stream = TcpStream::connect(addr).await.expect("it is listened there");
    let (accepted, _) = listener.accept().await.expect("it has connected");
    accepted.set_zero_linger().expect("the socket is open");
    stream
}

impl Mesh {
    /// Waits until every proxy that has a token has its certificate.
    async fn ready(&self) {
        for (name, proxy) in self.proxies.iter().filter(|(_, proxy)| proxy.token.exists()) {
            eventually(&format!("the proxy of {name} is ready"), async || {
                let stream = TcpStream::connect(proxy.admin).await.ok()?;
                (client::get(stream, "/ready").await.status == 200).then_some(())
            })
            .await;
        }
        let stream = TcpStream::connect((CONTROL_IP, 9996))
            .await
            .expect("the control plane listens");
        let errors = client::get(stream, "/manifest-errors").await.text();
        assert_eq!(errors, "", "manifests of the test");
    }

    /// The address of a workload.
    pub fn ip(&self, workload: &str) -> Ipv4Addr {
        self.ips[workload]
    }

    /// The address that clients of a service dial.
    pub fn service(&self, app: &str, port: u16) -> SocketAddr {
        (self.services[app], port).into()
    }

    /// Where the application of a workload listens that others dial at `port`.
    pub fn app(&self, workload: &str, port: u16) -> SocketAddr {
        let port = match self.proxies.contains_key(workload) {
            true => self.transport.app(port),
            false => port,
        };
        (self.ips[workload], port).into()
    }

    /// Listens as the application of a workload.
    pub async fn listen(&self, workload: &str, port: u16) -> TcpListener {
        TcpListener::bind(self.app(workload, port))
            .await
            .expect("each port is listened on once")
    }

    /// A connection that the application of `workload` makes to `dst`, through its proxy.
    pub async fn dial(&self, workload: &str, dst: SocketAddr) -> TcpStream {
        self.connect(self.ips[workload], dst, self.proxies[workload].outbound)
            .await
    }

    /// As [`Self::dial`], where the connection may be refused.
    ///
    /// # Errors
    /// It is, before it is known to be established.
    pub async fn try_dial(&self, workload: &str, dst: SocketAddr) -> io::Result<TcpStream> {
        self.try_connect(self.ips[workload], dst, self.proxies[workload].outbound)
            .await
    }

    /// As [`Self::arrive`], where the connection may be refused.
    ///
    /// # Errors
    /// It is, before it is known to be established.
    pub async fn try_arrive(&self, from: Ipv4Addr, workload: &str, port: u16) -> io::Result<TcpStream> {
        self.try_connect(from, self.app(workload, port), self.proxies[workload].inbound)
            .await
    }

    /// A connection from an address without a proxy to a port of `workload`, through the latter's proxy.
    pub async fn arrive(&self, from: Ipv4Addr, workload: &str, port: u16) -> TcpStream {
        self.stray(from, workload, self.app(workload, port)).await
    }

    /// A connection that arrives at the proxy of `workload`, whatever it has dialled.
    pub async fn stray(&self, from: Ipv4Addr, workload: &str, dst: SocketAddr) -> TcpStream {
        self.connect(from, dst, self.proxies[workload].inbound).await
    }

    /// `GET` over a connection of its own, from the application of `workload` to `dst`.
    pub async fn get(&self, workload: &str, dst: SocketAddr, path: &str) -> Answer {
        client::get(self.dial(workload, dst).await, path).await
    }

    /// A connection that the proxy resets may be gone before it is known to be established: then one that is reset stands for it.
    async fn connect(&self, from: Ipv4Addr, dst: SocketAddr, listener: SocketAddr) -> TcpStream {
        match self.try_connect(from, dst, listener).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => reset().await,
            connected => connected.expect("the proxy listens"),
        }
    }

    async fn try_connect(&self, from: Ipv4Addr, dst: SocketAddr, listener: SocketAddr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4().expect("descriptors are left");
        socket.bind((from, 0).into()).expect("all addresses are local");
        let local = socket.local_addr().expect("the socket is bound");
        self.dialled.lock().insert(local, dst);
        let stream = socket.connect(listener).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The metrics page of a workload's proxy.
    pub async fn metrics(&self, workload: &str) -> String {
        let admin = self.proxies[workload].admin;
        let stream = TcpStream::connect(admin).await.expect("the admin server listens");
        client::get(stream, "/metrics").await.text()
    }

    /// The sum of the series of a metric whose labels contain all of `labels` (`name="value"`).
    pub async fn metric(&self, workload: &str, name: &str, labels: &[&str]) -> f64 {
        let page = self.metrics(workload).await;
        let of_name = page.lines().filter_map(|line| line.strip_prefix(name));
        let matching =
            of_name.filter(|rest| rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label)));
        matching
            .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Of the outbound and the inbound listener of a workload's proxy: connections that wait to be accepted, and how many may.
    pub fn waiting(&self, workload: &str) -> [(u32, u32); 2] {
        let ss = Command::new("ss").arg("-Hltn").output().expect("iproute2 is installed");
        let lines = String::from_utf8_lossy(&ss.stdout);
        let proxy = &self.proxies[workload];
        [proxy.outbound, proxy.inbound].map(|listener| {
            let listener = listener.to_string();
            let mut lines = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let found = lines.find(|columns| columns.get(3) == Some(&listener.as_str()));
            let numbers = found.and_then(|columns| Some((columns[1].parse().ok()?, columns[2].parse().ok()?)));
            numbers.unwrap_or_else(|| panic!("nobody listens at {listener}"))
        })
    }

    /// Has workers stand still that accept a connection from now on; meanwhile the test can dial nothing.
    pub fn stall(&self) -> Stalled {
        let dialled = self.dialled.clone();
        let (release, released) = mpsc::channel::<()>();
        let (held, holds) = mpsc::channel();
        thread::spawn(move || {
            let _dialled = dialled.lock();
            held.send(()).expect("it is waited for");
            released.recv().expect_err("nothing is sent");
        });
        holds.recv().expect("the thread says so");
        Stalled { _release: release }
    }

    /// What the control plane reads.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Writes a manifest, or replaces it.
    pub fn write(&self, name: &str, yaml: &str) {
        self.files.write(name, yaml).expect("the temporary directory is ours");
    }

    /// The text of a manifest.
    pub fn manifest(&self, name: &str) -> String {
        self.files.read(name).expect("the manifest was written before")
    }

    /// Removes a manifest; the pod of a workload is `pod-<name>`.
    pub fn remove(&self, name: &str) {
        self.files.remove(name).expect("the manifest was written before");
    }

    /// Asks a proxy to end, as its `/shutdown` does.
    pub fn shut_down(&self, workload: &str) {
        self.proxies[workload].shutdown.notify_one();
    }

    /// Waits until the proxy that was asked to end has ended.
    pub async fn ended(&self, workload: &str) {
        let proxy = &self.proxies[workload];
        eventually("the proxy has ended", async || {
            proxy
                .thread
                .lock()
                .as_ref()
                .is_none_or(JoinHandle::is_finished)
                .then_some(())
        })
        .await;
    }

    /// Ends the control plane.
    pub async fn stop_control(&self) {
        let control = self.control.lock().take();
        tokio::task::spawn_blocking(move || drop(control))
            .await
            .expect("the control plane ends well");
    }

    /// Starts the control plane again.
    pub async fn start_control(&self) {
        let control = thread::scope(|scope| scope.spawn(|| ControlPlane::start(&self.files, &self.flags)).join());
        let control = control
            .expect("starting does not panic")
            .expect("it was started before");
        *self.control.lock() = Some(control);
    }
}

impl Proxy {
    fn start(variables: &HashMap<String, String>, surroundings: Surroundings) -> anyhow::Result<Self> {
        let config = tulle_proxy::env::load(|name| variables.get(name).cloned())
            .map_err(|errors| anyhow::anyhow!("variables: {errors:?}"))?;
        let app = App::build(config, surroundings)?;
        let (outbound, inbound, admin) = app.addrs();
        let shutdown = app.shutdown();
        let thread = thread::Builder::new().name("proxy".into()).spawn(move || app.run())?;
        Ok(Self {
            outbound: *outbound.first().context("no outbound listener")?,
            inbound,
            admin,
            token: PathBuf::from(&variables[&full("IDENTITY_TOKEN_FILE")]),
            shutdown,
            thread: Mutex::new(Some(thread)),
        })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shutdown.notify_one();
        let ended = self.thread.lock().take().map(JoinHandle::join);
        if !thread::panicking() {
            match ended {
                None | Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => panic!("a proxy could not run: {error:#}"),
                Some(Err(_)) => panic!("a proxy panicked"),
            }
        }
    }
}

/// Lets this thread, and those that it starts, find this server in `/etc/resolv.conf`.
fn ask_dns(server: IpAddr) -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let mut file = tempfile::NamedTempFile::new()?;
    writeln!(file, "nameserver {server}")?;
    mount(Some(file.path()), "/etc/resolv.conf", none, MsFlags::MS_BIND, none)?;
    Ok(())
}

/// A namespace in which all addresses of the mesh are local.
fn namespace() -> Namespace {
    static SWEPT: std::sync::Once = std::sync::Once::new();
    static NAMESPACES: AtomicU32 = AtomicU32::new(0);
    SWEPT.call_once(|| drop(netns::sweep(PREFIX)));
    let n = NAMESPACES.fetch_add(1, Ordering::Relaxed);
    let namespace = Namespace::create(&format!("{PREFIX}{}-{n}", std::process::id())).expect("root may");
    namespace.ip("route add local 10.66.0.0/16 dev lo\n").expect("lo is up");
    namespace
}

/// `TULLE_TEST_LOG=debug cargo test …` shows what proxies and control plane say.
fn start_logs() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        if let Ok(filter) = std::env::var("TULLE_TEST_LOG") {
            telemetry::init(&filter, Format::Plain).expect("TULLE_TEST_LOG is a log filter");
        }
    });
}

fn service(app: &str, ip: Ipv4Addr, annotations: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata:
  name: {app}
  namespace: {NS}
  annotations: {{config.linkerd.io/opaque-ports: \"{OPAQUE}\", {annotations}}}
spec:
  clusterIP: {ip}
  selector: {{app: {app}}}
  ports:
  - {{name: http, port: {HTTP}, targetPort: {HTTP}}}
  - {{name: tcp, port: {TCP}, targetPort: {TCP}}}
  - {{name: opaque, port: {OPAQUE}, targetPort: {OPAQUE}}}
"
    )
}

fn full(name: &str) -> String {
    match name.starts_with("TULLE_") {
        true => name.into(),
        false => format!("LINKERD2_PROXY_{name}"),
    }
}

/// Of the names of network namespaces.
const PREFIX: &str = "tulletest";
/// What a test should not need.
const LIMIT: Duration = Duration::from_secs(30);
