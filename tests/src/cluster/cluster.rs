//! A complete cluster: Kubernetes' control plane, nodes in network namespaces, and DNS.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem};

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::Api;
use nix::unistd::Uid;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tulle_core::netns::{Namespace, VirtualNetwork};

use super::addresses::ClusterAddresses;
use super::audit::{AuditPolicy, AuditRecord};
use super::cleanup;
use super::component::{Component, ProcessLifetime, START_TIMEOUT};
use super::kubeconfig;
use super::kubernetes_components::{API_PORT, ComponentContext, check_ready, wait_for_default_account};
use super::node::{self, Node};
use super::pki::Pki;
use super::slot::{self, Slot, SlotLock};
use crate::images::{self, Image};
use crate::{commands, programs};

/// A cluster with nodes. Dropping it stops all processes and removes everything that it created.
///
/// Two clusters can run on a machine at a time, at most one of them detached. The start of another waits until a slot is free.
pub struct Cluster {
    // Fields drop in declaration order.
    forwards: Mutex<JoinSet<()>>,
    client: kube::Client,
    components: Vec<Component>,
    nodes: Vec<Node>,
    addresses: ClusterAddresses,
    network: Option<VirtualNetwork>,
    n_loaded_images: usize,
    lock: SlotLock,
}

/// Options of a [`Cluster`].
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Between one and [`MAX_NODES`]; each node is in its own zone.
    pub nodes: u8,
    pub addresses: ClusterAddresses,
    pub audit: AuditPolicy,
    /// Images to load on every node, in addition to those that the cluster itself needs.
    pub images: Vec<Image>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            nodes: 1,
            addresses: ClusterAddresses::FIRST,
            audit: AuditPolicy::default(),
            images: Image::DEFAULT.to_vec(),
        }
    }
}

impl ClusterOptions {
    /// Checks the options and that the user is root. Called before a slot is locked, because waiting for the lock can take minutes.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(Uid::effective().is_root(), "a cluster with nodes needs root");
        let count = self.nodes;
        ensure!(
            (1..=MAX_NODES).contains(&count),
            "{count} nodes; expected 1 to {MAX_NODES}"
        );
        Ok(())
    }
}

impl Cluster {
    /// Starts a cluster with this number of nodes and the images of [`Image::DEFAULT`].
    ///
    /// # Errors
    /// Fails if a program is missing, or a component does not become ready; the latter error contains the end of the
    /// component's log.
    pub async fn start(nodes: u8) -> anyhow::Result<Self> {
        let options = ClusterOptions {
            nodes,
            ..ClusterOptions::default()
        };
        Self::start_with(options).await
    }

    /// Starts a cluster.
    ///
    /// # Errors
    /// The same as [`Cluster::start`].
    pub async fn start_with(options: ClusterOptions) -> anyhow::Result<Self> {
        options.check()?;
        let lock = slot::lock_free_slot().await?;
        Self::start_in(lock, options).await
    }

    /// Starts a cluster in a slot.
    ///
    /// # Errors
    /// The same as [`Cluster::start`].
    pub(super) async fn start_in(lock: SlotLock, options: ClusterOptions) -> anyhow::Result<Self> {
        Self::launch(lock, options, ProcessLifetime::KilledWithParent).await
    }

    /// Starts a cluster that keeps running after this process exits, until [`stop_detached`].
    ///
    /// # Errors
    /// The same as [`Cluster::start`], or a detached cluster is running.
    pub async fn start_detached(options: ClusterOptions) -> anyhow::Result<()> {
        options.check()?;
        let lock = Slot::detached().lock().await?;
        let mut cluster = Self::launch(lock, options, ProcessLifetime::Detached).await?;
        mem::take(&mut cluster.components).into_iter().for_each(mem::forget);
        mem::forget(mem::take(&mut cluster.nodes));
        mem::forget(cluster.network.take());
        Ok(())
    }

    async fn launch(lock: SlotLock, options: ClusterOptions, lifetime: ProcessLifetime) -> anyhow::Result<Self> {
        let (count, addresses) = (options.nodes, options.addresses);
        let slot = lock.slot.clone();
        ensure!(
            !slot.has_detached_cluster()?,
            "a detached cluster is running; `./run cluster down` stops it"
        );
        cleanup::stop_and_remove(&slot).context("removing leftovers of an earlier cluster")?;
        let dir = slot.dir();
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        if lifetime == ProcessLifetime::Detached {
            slot.mark_detached()?;
        }

        print_progress("control plane");
        let mut virtual_network = VirtualNetwork::new(slot.namespace_prefix())?;
        let nodes: Vec<Node> = (1..=count)
            .map(|number| Node::create(&mut virtual_network, &slot, addresses, number, count))
            .collect::<anyhow::Result<_>>()?;
        let first = nodes[0].namespace.clone();
        let context = ComponentContext {
            dir,
            namespace: Some(&first),
            addresses,
            addr: addresses.node(1),
            lifetime,
        };
        let pki = context.prepare(options.audit)?;
        // Clients outside the namespaces connect through these.
        let mut forwards = JoinSet::new();
        let target = SocketAddr::new(context.addr, API_PORT);
        let server = format!("https://{}", forward(&mut forwards, first.clone(), target)?);
        let user = kubeconfig::certificate_user(&context.pki(), "admin");
        kubeconfig::write(
            &context.kubeconfig_path("outside"),
            &server,
            &context.pki().join("ca.crt"),
            &user,
        )?;
        let client = kubeconfig::client(&context.kubeconfig_path("outside")).await?;
        let mut cluster = Self {
            forwards: Mutex::new(forwards),
            client,
            components: Vec::new(),
            nodes,
            addresses,
            network: Some(virtual_network),
            n_loaded_images: 0,
            lock,
        };
        cluster.start_components(&context, &pki).await?;
        print_progress("images");
        for image in [Image::Pause, Image::CoreDns].iter().chain(&options.images) {
            cluster.load(*image).await?;
        }
        cluster.wait_for_nodes().await?;
        print_progress("DNS");
        let manifest = dir.join("coredns.json");
        let dns_service = addresses.dns_service().to_string();
        let objects = COREDNS.replace("@domain", addresses.domain);
        fs::write(&manifest, objects.replace("@address", &dns_service)).context("writing a manifest")?;
        cluster
            .kubectl(&["apply", "-f", &manifest.display().to_string()])
            .await?;
        cluster.wait_for_deployment("kube-system", "coredns").await?;
        Ok(cluster)
    }

    async fn start_components(&mut self, context: &ComponentContext<'_>, pki: &Pki) -> anyhow::Result<()> {
        self.components.push(context.etcd()?);
        let mut server = context.api_server(context.addr)?;
        for node in &self.nodes {
            node.create_credentials(context, pki)?;
            self.components.push(node.containerd(context)?);
        }
        server
            .wait_until("readiness", async || check_ready(&self.client).await)
            .await?;
        self.components.push(server);
        let mut controllers = context.controller_manager("*")?;
        self.components.push(context.scheduler()?);
        for node in &self.nodes {
            let _lock = slot::lock_device_plugins().await?;
            let mut kubelet = node.kubelet(context)?;
            let listens = async || node.listens_for_device_plugins();
            kubelet
                .wait_until("the socket for device plugins exists", listens)
                .await?;
            self.components.push(kubelet);
            self.components.push(node.kube_proxy(context)?);
        }
        wait_for_default_account(&mut controllers, self.client()).await?;
        self.components.push(controllers);
        Ok(())
    }

    async fn wait_for_nodes(&mut self) -> anyhow::Result<()> {
        print_progress("nodes");
        let objects = Api::<NodeObject>::all(self.client());
        for node in &self.nodes {
            let ready = async || {
                let node = objects.get(&node.name).await?;
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
                ensure!(ready.is_some_and(|ready| ready.status == "True"), "{ready:?}");
                Ok(())
            };
            let waited = self.wait_until(&format!("{} is ready", node.name), ready).await;
            // If a component of a node has exited, its error says more than the timeout.
            for component in &mut self.components {
                component.check_alive()?;
            }
            waited?;
        }
        Ok(())
    }

    /// A client with administrator rights.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The nodes; Kubernetes' control plane runs on the first.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The address ranges and names of this cluster.
    pub fn addresses(&self) -> ClusterAddresses {
        self.addresses
    }

    /// The network of the nodes, while the cluster is running.
    pub(super) fn network(&mut self) -> anyhow::Result<&mut VirtualNetwork> {
        self.network
            .as_mut()
            .context("the network of a cluster that is running")
    }

    /// Adds a machine that is not a node. It can reach nodes, pods and Services, and they can reach it.
    ///
    /// # Errors
    /// Fails if its address is in use or not in the network of the nodes.
    pub fn add_machine(&mut self, name: &str, addr: Ipv4Addr) -> anyhow::Result<Arc<Namespace>> {
        let virtual_network = self
            .network
            .as_mut()
            .context("the network of a cluster that is running")?;
        node::add_machine(virtual_network, name, addr, &self.nodes)
    }

    /// A directory for files of a test, removed with the cluster.
    pub fn dir(&self) -> &Path {
        self.lock.slot.dir()
    }

    /// The administrator's kubeconfig for processes on the first node.
    pub fn kubeconfig(&self) -> PathBuf {
        kubeconfig_in_cluster(self.dir())
    }

    /// The administrator's kubeconfig for this process, with an address that it can reach.
    pub fn kubeconfig_outside(&self) -> PathBuf {
        self.dir().join("outside.conf")
    }

    /// The URL of the API server for pods, and for hosts of connected networks.
    pub fn api_server_url(&self) -> String {
        format!("https://{}:{API_PORT}", self.addresses.node(1))
    }

    /// A command on the first node with `KUBECONFIG` set. It can reach pods and Services by address.
    ///
    /// # Errors
    /// Fails if the program does not exist.
    pub fn command(&self, program: &str) -> anyhow::Result<tokio::process::Command> {
        Ok(self.command_for_path(&programs::find(program)?))
    }

    /// As [`Cluster::command`], for the program at this path.
    pub fn command_for_path(&self, program: &Path) -> tokio::process::Command {
        let mut command = self.nodes[0].namespace.command(program);
        command.env("KUBECONFIG", self.kubeconfig()).current_dir(self.dir());
        tokio::process::Command::from(command)
    }

    /// Runs `kubectl` as the administrator and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command fails, or does not end within two minutes; the error contains its output.
    pub async fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut kubectl = self.command("kubectl")?;
        kubectl.args(args);
        let line = format!("kubectl {}", args.join(" "));
        let output = commands::output(&line, kubectl).await?;
        if !output.status.success() {
            let answer = String::from_utf8_lossy(&output.stderr);
            bail!("{line}: {}", answer.trim());
        }
        String::from_utf8(output.stdout).context("kubectl's output")
    }

    /// A loopback address in this process that forwards to an address of a pod, a Service or a node.
    ///
    /// # Errors
    /// Fails if no port is free.
    pub fn forward(&self, target: SocketAddr) -> anyhow::Result<SocketAddr> {
        forward(&mut self.forwards.lock(), self.nodes[0].namespace.clone(), target)
    }

    /// Loads an image of this repository on every node.
    ///
    /// # Errors
    /// Fails if the image cannot be built, or a node refuses it.
    pub async fn load(&mut self, image: Image) -> anyhow::Result<()> {
        let archive = self.dir().join(format!("image-{}.tar", self.n_loaded_images));
        self.n_loaded_images += 1;
        images::write(image, &programs::static_binaries_dir()?, &archive)?;
        self.load_archive(&archive).await
    }

    /// Loads the image of a docker archive on every node.
    ///
    /// # Errors
    /// Fails if a node refuses it.
    pub async fn load_archive(&self, archive: &Path) -> anyhow::Result<()> {
        for node in &self.nodes {
            self.wait_until("containerd answers", async || node.check_containerd())
                .await?;
            node.load_image(archive)?;
        }
        Ok(())
    }

    /// Waits until all replicas of a Deployment are available and none is of an older generation.
    ///
    /// # Errors
    /// Fails if the wait times out; the error contains `kubectl describe` of its pods.
    pub async fn wait_for_deployment(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        let deployments = Api::<Deployment>::namespaced(self.client(), namespace);
        let available = async || {
            let deployment = deployments.get(name).await?;
            let wanted = deployment.spec.and_then(|spec| spec.replicas).unwrap_or(1);
            let status = deployment.status.unwrap_or_default();
            let current = status.observed_generation >= deployment.metadata.generation;
            let counts = [status.updated_replicas, status.available_replicas, status.replicas];
            let counts = counts.map(|count| count.unwrap_or(0));
            ensure!(
                current && counts == [wanted; 3],
                "{wanted} replicas expected; updated, available and all: {counts:?}"
            );
            Ok(())
        };
        match self
            .wait_until(&format!("deployment {namespace}/{name} is available"), available)
            .await
        {
            Ok(()) => Ok(()),
            Err(error) => {
                let pods = self.kubectl(&["describe", "pods", "--namespace", namespace]).await;
                Err(error.context(pods.unwrap_or_else(|error| format!("{error:#}"))))
            }
        }
    }

    /// Polls until a condition holds, and returns its value.
    ///
    /// # Errors
    /// Fails if the condition does not hold within two minutes; the error contains its last result.
    pub async fn wait_until<T>(
        &self,
        what: &str,
        mut condition: impl AsyncFnMut() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let not_yet = match condition().await {
                Ok(value) => return Ok(value),
                Err(not_yet) => not_yet,
            };
            if Instant::now() > deadline {
                return Err(not_yet.context(format!("timed out after {START_TIMEOUT:?}, waiting for: {what}")));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// The audit records so far; the audit policy selects which requests are recorded.
    ///
    /// # Errors
    /// Fails if the log cannot be read.
    pub fn audit_log(&self) -> anyhow::Result<Vec<AuditRecord>> {
        super::audit::read(&self.dir().join(super::kubernetes_components::AUDIT_LOG))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.network.is_none() {
            return; // the cluster was started detached
        }
        self.forwards.lock().abort_all();
        self.components.clear();
        self.nodes.clear();
        self.network = None;
        if let Err(error) = cleanup::stop_and_remove(&self.lock.slot) {
            eprintln!("ending the cluster: {error:#}; `./run cluster down` tries again");
        }
    }
}

/// Stops the detached cluster, no matter which process started it, and removes what killed tests left behind.
///
/// # Errors
/// Fails if a process cannot be stopped or a file cannot be removed.
pub async fn stop_detached() -> anyhow::Result<()> {
    let detached = Slot::detached();
    // A detached cluster holds no lock. The cluster of a running test holds it until the test ends.
    let _lock = detached.lock().await?;
    cleanup::stop_and_remove(&detached)?;
    for slot in Slot::all().filter(|slot| *slot != detached) {
        if let Some(_lock) = slot.try_lock()? {
            cleanup::stop_and_remove(&slot)?;
        }
    }
    Ok(())
}

/// Whether a cluster is running that [`Cluster::start_detached`] started.
///
/// # Errors
/// Fails if the processes of this machine cannot be listed.
pub fn is_detached_running() -> anyhow::Result<bool> {
    Slot::detached().has_detached_cluster()
}

/// The command that runs a program on the first node of the detached cluster as the administrator.
///
/// # Errors
/// Fails if no detached cluster is running, or the program does not exist.
pub fn command_on_first_detached_node(program: &str) -> anyhow::Result<std::process::Command> {
    let slot = Slot::detached();
    let entries =
        fs::read_dir("/run/netns").context("no detached cluster is running; `./run cluster up` starts one")?;
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let first = entries
        .filter_map(name)
        .find(|name| name.starts_with(slot.namespace_prefix()) && name.ends_with("-node1"))
        .context("no detached cluster is running; `./run cluster up` starts one")?;
    let mut command = std::process::Command::new("nsenter");
    command
        .arg(format!("--net=/run/netns/{first}"))
        .arg(programs::find(program)?)
        .env("KUBECONFIG", kubeconfig_in_cluster(slot.dir()));
    Ok(command)
}

/// Loads the image of a docker archive on every node of the detached cluster.
///
/// # Errors
/// Fails if no detached cluster is running, or a node refuses the image.
pub fn load_archive_on_detached(archive: &Path) -> anyhow::Result<()> {
    let sockets = node::sockets(Slot::detached().dir());
    ensure!(
        !sockets.is_empty(),
        "no detached cluster is running; `./run cluster up` starts one"
    );
    sockets.iter().try_for_each(|socket| node::load_image(socket, archive))
}

/// A loopback address that forwards to `target`, dialled from a namespace, while its task runs.
fn forward(tasks: &mut JoinSet<()>, namespace: Arc<Namespace>, target: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").context("listening on loopback")?;
    listener.set_nonblocking(true).context("listening on loopback")?;
    let addr = listener.local_addr().context("a listener's address")?;
    let listener = TcpListener::from_std(listener).context("listening on loopback")?;
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let namespace = namespace.clone();
            connections.spawn(async move {
                let dial = move || namespace.run(|| std::net::TcpStream::connect_timeout(&target, DIAL_TIMEOUT));
                // If the target does not answer, the client's connection is closed.
                let Ok(Ok(Ok(server))) = tokio::task::spawn_blocking(dial).await else {
                    return;
                };
                let server = server.set_nonblocking(true).and_then(|()| TcpStream::from_std(server));
                if let Ok(mut server) = server {
                    // An error of one side closes the other side.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
            while connections.try_join_next().is_some() {}
        }
    });
    Ok(addr)
}

fn kubeconfig_in_cluster(dir: &Path) -> PathBuf {
    dir.join("admin.conf")
}

fn print_progress(what: &str) {
    eprintln!("cluster: {what}");
}

pub const MAX_NODES: u8 = 3;
const COREDNS: &str = include_str!("coredns.json");
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
