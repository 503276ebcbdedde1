//! A whole mesh in this process: the real control plane, real proxies, and applications of the test.
//!
//! Every mesh has its own network namespace in which all of 10.66.0.0/16 is local. Each workload has its own address,
//! all can use the same ports, and the host's network is not affected. There are no redirect rules: the test sets the
//! original destination of a connection, and the proxies use it in place of the kernel's. Between proxies, connections
//! go to the inbound port with a transport header, which needs no redirect either.

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
use tulle_core::logging::{self, Format};
use tulle_core::netns::{self, Namespace};
use tulle_proxy::app::{App, ProcessContext};

use crate::client::{self, CollectedResponse};
use crate::control::{CONTROL_IP, CONTROL_NS, ControlPlane, ControlPlaneFiles};
use crate::eventually::eventually;

pub const NS: &str = "shop";
/// HTTP port of applications.
pub const HTTP: u16 = 8080;
/// Port of the TCP echo server. It is not marked opaque, so the proxy tries to detect a protocol.
pub const DETECTED_TCP: u16 = 9000;
/// Port of the TCP echo server that is marked opaque, so the proxy detects no protocol.
pub const OPAQUE: u16 = 3306;
/// An address that belongs to no workload.
pub const UNMESHED_IP: Ipv4Addr = Ipv4Addr::new(10, 66, 9, 9);

/// Configuration of a mesh; see [`mesh`].
pub struct Builder {
    workloads: Vec<Workload>,
    manifests: Vec<(String, String)>,
    transport: ProxyTransport,
    flags: Vec<String>,
    env: Vec<(String, String)>,
    /// Annotations of services by app, separated by commas.
    annotations: BTreeMap<String, String>,
    /// The DNS server of the proxies.
    dns: Option<IpAddr>,
    timeout: Duration,
}

/// How proxies connect to each other.
#[derive(Copy, Clone, PartialEq, Eq)]
enum ProxyTransport {
    /// To the inbound port, with a transport header that names the application's port.
    Header,
    /// To the application's HTTP port. There are no redirect rules in these tests, so the proxy listens on this port
    /// and the application on the next one. Other ports are not reachable.
    Transparent,
}

#[derive(Clone)]
struct Workload {
    name: String,
    /// Service account, `app` label and service name.
    app: String,
    sidecar: Sidecar,
    orig_dst_source: OrigDstSource,
    env: Vec<(String, String)>,
}

#[derive(Copy, Clone, PartialEq, Eq)]
enum Sidecar {
    Present,
    Absent,
}

/// Which component tells a proxy the original destination of a connection.
#[derive(Copy, Clone, PartialEq, Eq)]
enum OrigDstSource {
    Test,
    Kernel,
}

pub struct Mesh {
    files: ControlPlaneFiles,
    transport: ProxyTransport,
    flags: Vec<String>,
    control: Mutex<Option<ControlPlane>>,
    ips: BTreeMap<String, Ipv4Addr>,
    services: BTreeMap<String, Ipv4Addr>,
    proxies: BTreeMap<String, Proxy>,
    /// Original destinations by the local address of the client.
    orig_dsts: OrigDsts,
}

type OrigDsts = Arc<Mutex<HashMap<SocketAddr, SocketAddr>>>;

struct Proxy {
    outbound: SocketAddr,
    inbound: SocketAddr,
    admin: SocketAddr,
    /// The token with which it requests a certificate.
    token: PathBuf,
    shutdown: Arc<Notify>,
    thread: Mutex<Option<JoinHandle<anyhow::Result<()>>>>,
}

/// Workers are blocked until this is dropped.
pub struct StalledWorkers {
    _release: mpsc::Sender<()>,
}

/// A mesh without workloads.
pub fn mesh() -> Builder {
    Builder {
        workloads: Vec::new(),
        manifests: Vec::new(),
        transport: ProxyTransport::Header,
        flags: Vec::new(),
        env: Vec::new(),
        annotations: BTreeMap::new(),
        dns: None,
        timeout: DEFAULT_TEST_TIMEOUT,
    }
}

pub fn identity(app: &str) -> String {
    tulle_core::identity::service_account_identity(app, NS, CONTROL_NS, "cluster.local")
}

impl Builder {
    /// Adds a workload with a sidecar, and a service of the same name.
    pub fn workload(self, name: &str) -> Self {
        self.add_workload(name, name, Sidecar::Present)
    }

    /// Adds workloads with sidecars, `<app>-0` and so on, behind one service.
    pub fn replicas(self, app: &str, n: usize) -> Self {
        (0..n).fold(self, |mesh, i| {
            mesh.add_workload(&format!("{app}-{i}"), app, Sidecar::Present)
        })
    }

    /// Adds a workload without a sidecar, and a service of the same name.
    pub fn unmeshed(self, name: &str) -> Self {
        self.add_workload(name, name, Sidecar::Absent)
    }

    fn add_workload(mut self, name: &str, app: &str, sidecar: Sidecar) -> Self {
        self.workloads.push(Workload {
            name: name.into(),
            app: app.into(),
            sidecar,
            orig_dst_source: OrigDstSource::Test,
            env: Vec::new(),
        });
        self
    }

    /// Sets a variable of all proxies. `LINKERD2_PROXY_` is added to names that do not start with `TULLE_`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((variable_name(name), value.into()));
        self
    }

    /// Sets a variable of the last added workload; names are as for [`Self::env`].
    pub fn workload_env(mut self, name: &str, value: &str) -> Self {
        self.last_workload().env.push((variable_name(name), value.into()));
        self
    }

    /// Makes the proxy of the last added workload read the original destination from the kernel. Without redirect rules, this is
    /// the proxy's own address.
    pub fn orig_dst_from_kernel(mut self) -> Self {
        self.last_workload().orig_dst_source = OrigDstSource::Kernel;
        self
    }

    fn last_workload(&mut self) -> &mut Workload {
        self.workloads.last_mut().expect("a workload was added before")
    }

    /// Connects proxies to each other without transport headers, on HTTP ports only.
    pub fn transparent(mut self) -> Self {
        self.transport = ProxyTransport::Transparent;
        self
    }

    /// Adds a flag of the control plane.
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Annotates the service of an app: `key: value`, separated by commas.
    pub fn annotated(mut self, app: &str, annotations: &str) -> Self {
        self.annotations.insert(app.into(), annotations.into());
        self
    }

    /// Uses this DNS server on port 53 for the whole mesh; without it no DNS server answers.
    pub fn dns(mut self, server: impl Into<IpAddr>) -> Self {
        self.dns = Some(server.into());
        self
    }

    /// Replaces the default timeout of the test.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Adds a manifest besides those of workloads and services.
    pub fn manifest(mut self, name: &str, yaml: &str) -> Self {
        self.manifests.push((name.into(), yaml.into()));
        self
    }

    /// Starts the mesh, runs the test and stops the mesh.
    ///
    /// Network namespaces need root. Without root the test is skipped with a message, except in CI.
    ///
    /// # Panics
    /// Panics if the mesh cannot be started, the test fails, or takes longer than its timeout (half a minute by default).
    pub fn run(self, test: impl AsyncFnOnce(&Mesh) + Send) {
        if !nix::unistd::Uid::effective().is_root() {
            let reason = "a mesh needs a network namespace, and only root may make one";
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            eprintln!("SKIPPED: {reason}");
            return;
        }
        let namespace = namespace();
        let timeout = self.timeout;
        let inside = || -> anyhow::Result<()> {
            if let Some(server) = self.dns {
                use_dns_server(server).context("replacing /etc/resolv.conf")?;
            }
            let mesh = self.start()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                mesh.wait_until_ready().await;
                let limited = tokio::time::timeout(timeout, test(&mesh));
                limited.await.expect("the test ends before its timeout");
            });
            // Connections of the test end before the proxies do, so that they do not delay the drain.
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
        let files = ControlPlaneFiles::new()?;
        let (mut ips, mut services) = (BTreeMap::new(), BTreeMap::new());
        for (workload, last_octet) in self.workloads.iter().zip(10..) {
            let ip = Ipv4Addr::new(10, 66, 0, last_octet);
            ips.insert(workload.name.clone(), ip);
            files.write(&format!("pod-{}", workload.name), &workload.pod_manifest(ip))?;
            services
                .entry(workload.app.clone())
                .or_insert_with(|| Ipv4Addr::new(10, 66, 1, last_octet));
        }
        for (app, ip) in &services {
            let annotations = self.annotations.get(app).map_or("", String::as_str);
            files.write(&format!("service-{app}"), &service_manifest(app, *ip, annotations))?;
        }
        for (name, yaml) in &self.manifests {
            files.write(name, yaml)?;
        }
        let control = ControlPlane::start(&files, &self.flags)?;
        let orig_dsts = OrigDsts::default();
        let mut proxies = BTreeMap::new();
        for workload in &self.workloads {
            if workload.sidecar == Sidecar::Present {
                let variables = workload.variables(ips[&workload.name], &files, self.transport, &self.env)?;
                let proxy = Proxy::start(&variables, workload.process_context(orig_dsts.clone(), self.transport))
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
            orig_dsts,
        })
    }
}

impl ProxyTransport {
    fn flag(self) -> &'static str {
        match self {
            Self::Header => "transport-header",
            Self::Transparent => "transparent",
        }
    }

    fn inbound_port(self) -> u16 {
        match self {
            Self::Header => 4143,
            Self::Transparent => HTTP,
        }
    }

    /// The port that the application listens on when clients dial `port`.
    fn app_port(self, port: u16) -> u16 {
        match self {
            Self::Transparent if port == HTTP => HTTP + 1,
            _ => port,
        }
    }
}

impl Workload {
    fn pod_manifest(&self, ip: Ipv4Addr) -> String {
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
    - {{name: tcp, containerPort: {DETECTED_TCP}}}
    - {{name: opaque, containerPort: {OPAQUE}}}
status: {{podIP: {ip}}}
"
        )
    }

    fn variables(
        &self,
        ip: Ipv4Addr,
        files: &ControlPlaneFiles,
        transport: ProxyTransport,
        mesh_env: &[(String, String)],
    ) -> anyhow::Result<HashMap<String, String>> {
        let control =
            |account| tulle_core::identity::service_account_identity(account, CONTROL_NS, CONTROL_NS, "cluster.local");
        let token = files.create_token_file(&self.name, &self.app, NS)?;
        let variables = [
            ("OUTBOUND_LISTEN_ADDR", format!("{ip}:4140")),
            ("INBOUND_LISTEN_ADDR", format!("{ip}:{}", transport.inbound_port())),
            ("ADMIN_LISTEN_ADDR", format!("{ip}:4191")),
            ("CONTROL_LISTEN_ADDR", format!("{ip}:4190")),
            ("INBOUND_IPS", ip.to_string()),
            ("INBOUND_PORTS", format!("{HTTP},{DETECTED_TCP},{OPAQUE}")),
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
        let defaults = variables.into_iter().map(|(name, value)| (variable_name(name), value));
        Ok(defaults
            .chain(mesh_env.iter().cloned())
            .chain(self.env.iter().cloned())
            .collect())
    }

    fn process_context(&self, orig_dsts: OrigDsts, transport: ProxyTransport) -> ProcessContext {
        let redirected = ProcessContext::with_redirect(None, BTreeMap::new());
        if self.orig_dst_source == OrigDstSource::Kernel {
            return redirected;
        }
        let orig_dst = move |stream: &TcpStream, client: SocketAddr| -> io::Result<OrigDst> {
            if let Some(orig_dst) = orig_dsts.lock().get(&client) {
                return Ok(OrigDst(*orig_dst));
            }
            // A connection from another proxy. With `Transparent`, the original destination is its local address with the port
            // of the application; with `Header`, it is the proxy's own address, and the transport header names that port.
            let mut local = stream.local_addr()?;
            local.set_port(transport.app_port(local.port()));
            Ok(OrigDst(local))
        };
        ProcessContext {
            orig_dst: Arc::new(orig_dst),
            ..redirected
        }
    }
}

/// A connection that its peer has reset.
async fn reset_connection() -> TcpStream {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("a port is free");
    let addr = listener.local_addr().expect("the socket is bound");
    let stream = TcpStream::connect(addr)
        .await
        .expect("the listener accepts connections");
    let (accepted, _) = listener.accept().await.expect("the client has connected");
    accepted.set_zero_linger().expect("the socket is open");
    stream
}

impl Mesh {
    /// Waits until every proxy with a token has its certificate, and asserts that the control plane has read all manifests.
    async fn wait_until_ready(&self) {
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

    pub fn ip(&self, workload: &str) -> Ipv4Addr {
        self.ips[workload]
    }

    pub fn service_addr(&self, app: &str, port: u16) -> SocketAddr {
        (self.services[app], port).into()
    }

    /// The address that a workload's application listens on when clients dial `port`.
    pub fn app_addr(&self, workload: &str, port: u16) -> SocketAddr {
        let port = match self.proxies.contains_key(workload) {
            true => self.transport.app_port(port),
            false => port,
        };
        (self.ips[workload], port).into()
    }

    /// Listens in place of a workload's application.
    pub async fn listen(&self, workload: &str, port: u16) -> TcpListener {
        TcpListener::bind(self.app_addr(workload, port))
            .await
            .expect("each port is listened on once")
    }

    /// A connection of the application of `workload` to `dst`, through its proxy.
    pub async fn dial(&self, workload: &str, dst: SocketAddr) -> TcpStream {
        self.connect(self.ips[workload], dst, self.proxies[workload].outbound)
            .await
    }

    /// As [`Self::dial`], but a refused connection is an error instead of a panic.
    ///
    /// # Errors
    /// Fails if the connection is refused or reset before `connect` returns.
    pub async fn try_dial(&self, workload: &str, dst: SocketAddr) -> io::Result<TcpStream> {
        self.try_connect(self.ips[workload], dst, self.proxies[workload].outbound)
            .await
    }

    /// As [`Self::dial_inbound`], but a refused connection is an error instead of a panic.
    ///
    /// # Errors
    /// Fails if the connection is refused or reset before `connect` returns.
    pub async fn try_dial_inbound(&self, from: Ipv4Addr, workload: &str, port: u16) -> io::Result<TcpStream> {
        self.try_connect(from, self.app_addr(workload, port), self.proxies[workload].inbound)
            .await
    }

    /// A connection from an address without a proxy to a port of `workload`, through the proxy of `workload`.
    pub async fn dial_inbound(&self, from: Ipv4Addr, workload: &str, port: u16) -> TcpStream {
        self.dial_inbound_with_orig_dst(from, workload, self.app_addr(workload, port))
            .await
    }

    /// A connection to the proxy of `workload` with any original destination.
    pub async fn dial_inbound_with_orig_dst(&self, from: Ipv4Addr, workload: &str, orig_dst: SocketAddr) -> TcpStream {
        self.connect(from, orig_dst, self.proxies[workload].inbound).await
    }

    /// Sends `GET` on its own connection, from the application of `workload` to `dst`.
    pub async fn get(&self, workload: &str, dst: SocketAddr, path: &str) -> CollectedResponse {
        client::get(self.dial(workload, dst).await, path).await
    }

    /// Connects to a proxy. If the proxy resets the connection before `connect` returns, the result is a substitute that is
    /// already reset, so that tests see every reset as an error of the stream.
    async fn connect(&self, from: Ipv4Addr, dst: SocketAddr, listener: SocketAddr) -> TcpStream {
        match self.try_connect(from, dst, listener).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => reset_connection().await,
            connected => connected.expect("the proxy listens"),
        }
    }

    async fn try_connect(&self, from: Ipv4Addr, dst: SocketAddr, listener: SocketAddr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4().expect("file descriptors are available");
        socket.bind((from, 0).into()).expect("all addresses are local");
        let local = socket.local_addr().expect("the socket is bound");
        self.orig_dsts.lock().insert(local, dst);
        let stream = socket.connect(listener).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

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

    /// Waits until [`Mesh::metric`] has a value: connections and requests are counted after their end, which the client may see
    /// earlier.
    pub async fn wait_for_metric(&self, workload: &str, name: &str, labels: &[&str], expected: f64) {
        let what = format!("{name}{labels:?} of {workload} is {expected}");
        eventually(&what, async || {
            (self.metric(workload, name, labels).await == expected).then_some(())
        })
        .await;
    }

    /// Waits until [`Mesh::metric`] has at least this value.
    pub async fn wait_for_metric_at_least(&self, workload: &str, name: &str, labels: &[&str], least: f64) {
        let what = format!("{name}{labels:?} of {workload} is at least {least}");
        eventually(&what, async || {
            (self.metric(workload, name, labels).await >= least).then_some(())
        })
        .await;
    }

    /// For the outbound and the inbound listener of a workload's proxy: the connections in the accept queue, and its limit.
    pub fn accept_queues(&self, workload: &str) -> [(u32, u32); 2] {
        let ss = Command::new("ss").arg("-Hltn").output().expect("iproute2 is installed");
        let lines = String::from_utf8_lossy(&ss.stdout);
        let proxy = &self.proxies[workload];
        [proxy.outbound, proxy.inbound].map(|listener| {
            let listener = listener.to_string();
            let mut lines = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let found = lines.find(|columns| columns.get(3) == Some(&listener.as_str()));
            let numbers = found.and_then(|columns| Some((columns[1].parse().ok()?, columns[2].parse().ok()?)));
            numbers.unwrap_or_else(|| panic!("no listener at {listener}"))
        })
    }

    /// Blocks every worker when it accepts its next connection. The test cannot dial until the returned value is dropped.
    pub fn stall_workers(&self) -> StalledWorkers {
        let orig_dsts = self.orig_dsts.clone();
        let (release_tx, release_rx) = mpsc::channel::<()>();
        let (locked_tx, locked_rx) = mpsc::channel();
        thread::spawn(move || {
            // A worker takes this lock to look up an original destination.
            let _lock = orig_dsts.lock();
            locked_tx.send(()).expect("the receiver waits");
            release_rx.recv().expect_err("nothing is sent");
        });
        locked_rx.recv().expect("the thread sends");
        StalledWorkers { _release: release_tx }
    }

    /// The files of the control plane.
    pub fn files(&self) -> &ControlPlaneFiles {
        &self.files
    }

    /// Writes a manifest, or replaces it.
    pub fn write(&self, name: &str, yaml: &str) {
        self.files
            .write(name, yaml)
            .expect("the temporary directory is writable");
    }

    pub fn manifest(&self, name: &str) -> String {
        self.files.read(name).expect("the manifest was written before")
    }

    /// Removes a manifest; the pod of a workload is `pod-<name>`.
    pub fn remove(&self, name: &str) {
        self.files.remove(name).expect("the manifest was written before");
    }

    /// Shuts a proxy down, as its `/shutdown` does.
    pub fn shut_down(&self, workload: &str) {
        self.proxies[workload].shutdown.notify_one();
    }

    /// Waits until a proxy that was shut down has ended.
    pub async fn wait_for_exit(&self, workload: &str) {
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

    pub async fn stop_control(&self) {
        let control = self.control.lock().take();
        tokio::task::spawn_blocking(move || drop(control))
            .await
            .expect("the control plane stops without a panic");
    }

    pub async fn start_control(&self) {
        let control = thread::scope(|scope| scope.spawn(|| ControlPlane::start(&self.files, &self.flags)).join());
        let control = control
            .expect("starting does not panic")
            .expect("the same files were valid at the first start");
        *self.control.lock() = Some(control);
    }
}

impl Proxy {
    fn start(variables: &HashMap<String, String>, context: ProcessContext) -> anyhow::Result<Self> {
        let config = tulle_proxy::env::load(|name| variables.get(name).cloned())
            .map_err(|errors| anyhow::anyhow!("variables: {errors:?}"))?;
        let app = App::build(config, context)?;
        let (outbound, inbound, admin) = app.addrs();
        let shutdown = app.shutdown_handle();
        let thread = thread::Builder::new().name("proxy".into()).spawn(move || app.run())?;
        Ok(Self {
            outbound: *outbound.first().context("no outbound listener")?,
            inbound,
            admin,
            token: PathBuf::from(&variables[&variable_name("IDENTITY_TOKEN_FILE")]),
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

/// Uses this server in `/etc/resolv.conf` for this thread and the threads that it starts.
fn use_dns_server(server: IpAddr) -> anyhow::Result<()> {
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
    static STALE_REMOVED: std::sync::Once = std::sync::Once::new();
    static NAMESPACES: AtomicU32 = AtomicU32::new(0);
    STALE_REMOVED.call_once(|| drop(netns::remove_stale(NAMESPACE_PREFIX)));
    let n = NAMESPACES.fetch_add(1, Ordering::Relaxed);
    let namespace = Namespace::create(&format!("{NAMESPACE_PREFIX}{}-{n}", std::process::id()))
        .expect("root can create namespaces");
    namespace.ip("route add local 10.66.0.0/16 dev lo\n").expect("lo is up");
    namespace
}

/// `TULLE_TEST_LOG=debug cargo test …` shows the logs of proxies and control plane.
fn start_logs() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        if let Ok(filter) = std::env::var("TULLE_TEST_LOG") {
            logging::init(&filter, Format::Plain).expect("TULLE_TEST_LOG is a log filter");
        }
    });
}

fn service_manifest(app: &str, ip: Ipv4Addr, annotations: &str) -> String {
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
  - {{name: tcp, port: {DETECTED_TCP}, targetPort: {DETECTED_TCP}}}
  - {{name: opaque, port: {OPAQUE}, targetPort: {OPAQUE}}}
"
    )
}

/// The full name of a variable: names of Linkerd's variables get their common prefix, those of tulle are already complete.
fn variable_name(name: &str) -> String {
    match name.starts_with("TULLE_") {
        true => name.into(),
        false => format!("LINKERD2_PROXY_{name}"),
    }
}

/// Prefix of network namespace names.
const NAMESPACE_PREFIX: &str = "tulletest";
/// Maximum duration of a test by default.
const DEFAULT_TEST_TIMEOUT: Duration = Duration::from_secs(30);
