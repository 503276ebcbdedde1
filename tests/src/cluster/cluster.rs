//! A whole cluster: a control plane, nodes in network namespaces, and DNS.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem};

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::api::Api;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Uid;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tulle_core::netns::{Lab, Namespace};

use super::audit::{AuditPolicy, AuditRecord};
use super::component::{Component, Life, START_LIMIT};
use super::control_plane::{API_PORT, Place, default_account_made, ready};
use super::kubeconfig;
use super::leftovers;
use super::node::{self, Node, node_addr};
use super::pki::Pki;
use crate::images::{self, Image};
use crate::programs;

/// A cluster with nodes; dropping it ends everything and removes all that it made.
///
/// There is one at a time on a machine: the next start waits until this one is gone.
pub struct Cluster {
    // Dropped first to last.
    forwards: Mutex<JoinSet<()>>,
    client: kube::Client,
    components: Vec<Component>,
    nodes: Vec<Node>,
    lab: Option<Lab>,
    images: usize,
    _alone: Flock<File>,
}

/// What a [`Cluster`] has beside the defaults.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Between one and [`MOST_NODES`]; each is a zone of its own.
    pub nodes: u8,
    pub audit: AuditPolicy,
    /// Loaded on every node, beside those that the cluster itself needs.
    pub images: Vec<Image>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            nodes: 1,
            audit: AuditPolicy::default(),
            images: Image::ALL.to_vec(),
        }
    }
}

impl Cluster {
    /// Starts a cluster with so many nodes and all images of this repository.
    ///
    /// # Errors
    /// When a program is missing or a component does not become ready; the end of its log is in the error.
    pub async fn start(nodes: u8) -> anyhow::Result<Self> {
        let options = ClusterOptions {
            nodes,
            ..ClusterOptions::default()
        };
        Self::with(options).await
    }

    /// Starts a cluster.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn with(options: ClusterOptions) -> anyhow::Result<Self> {
        Self::launch(options, Life::WithStarter).await
    }

    /// Starts a cluster that stays when this process ends, until [`down`].
    ///
    /// # Errors
    /// As [`Cluster::start`], and when there is one already.
    pub async fn leave_running(options: ClusterOptions) -> anyhow::Result<()> {
        let mut cluster = Self::launch(options, Life::OnItsOwn).await?;
        mem::take(&mut cluster.components).into_iter().for_each(mem::forget);
        mem::forget(mem::take(&mut cluster.nodes));
        mem::forget(cluster.lab.take());
        Ok(())
    }

    async fn launch(options: ClusterOptions, life: Life) -> anyhow::Result<Self> {
        ensure!(Uid::effective().is_root(), "a cluster with nodes needs root");
        let count = options.nodes;
        ensure!(
            (1..=MOST_NODES).contains(&count),
            "{count} nodes; expected 1 to {MOST_NODES}"
        );
        let alone = wait_for_turn().await?;
        let dir = Path::new(DIR);
        ensure!(
            !(dir.join(KEPT).exists() && leftovers::is_alive(dir)?),
            "a cluster is running that was started to stay; `./run cluster down` ends it"
        );
        leftovers::remove(dir).context("removing what an earlier cluster left")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {DIR}"))?;
        if life == Life::OnItsOwn {
            fs::write(dir.join(KEPT), "").context("marking the cluster as one that stays")?;
        }

        say("control plane");
        let mut lab = Lab::new(node::NAMESPACE_PREFIX)?;
        let nodes: Vec<Node> = (1..=count)
            .map(|number| Node::create(&mut lab, dir, number, count))
            .collect::<anyhow::Result<_>>()?;
        let first = nodes[0].namespace.clone();
        let place = Place {
            dir,
            namespace: Some(&first),
            addr: node_addr(1),
            life,
        };
        let pki = place.prepare(options.audit)?;
        // What clients outside of the namespaces use.
        let mut forwards = JoinSet::new();
        let target = SocketAddr::new(place.addr, API_PORT);
        let server = format!("https://{}", forward(&mut forwards, first.clone(), target)?);
        let user = kubeconfig::by_certificate(&place.pki(), "admin");
        kubeconfig::write(&place.conf("outside"), &server, &place.pki().join("ca.crt"), &user)?;
        let client = kubeconfig::client(&place.conf("outside")).await?;
        let mut cluster = Self {
            forwards: Mutex::new(forwards),
            client,
            components: Vec::new(),
            nodes,
            lab: Some(lab),
            images: 0,
            _alone: alone,
        };
        cluster.start_components(&place, &pki).await?;
        say("images");
        for image in [Image::Pause, Image::CoreDns].iter().chain(&options.images) {
            cluster.load(*image).await?;
        }
        cluster.nodes_ready().await?;
        say("DNS");
        let manifest = dir.join("coredns.json");
        fs::write(&manifest, COREDNS).context("writing a manifest")?;
        cluster
            .kubectl(&["apply", "-f", &manifest.display().to_string()])
            .await?;
        cluster.deployment_ready("kube-system", "coredns").await?;
        Ok(cluster)
    }

    async fn start_components(&mut self, place: &Place<'_>, pki: &Pki) -> anyhow::Result<()> {
        self.components.push(place.etcd()?);
        let mut server = place.api_server(place.addr)?;
        for node in &self.nodes {
            node.admit(place, pki)?;
            self.components.push(node.containerd(place)?);
        }
        server.until("readiness", async || ready(&self.client).await).await?;
        self.components.push(server);
        let mut controllers = place.controller_manager("*")?;
        self.components.push(place.scheduler()?);
        for node in &self.nodes {
            let mut kubelet = node.kubelet(place)?;
            // All kubelets put theirs at one path: two at the same moment, and one of them ends.
            let listens = async || node.listens_for_device_plugins();
            kubelet.until("a socket for device plugins", listens).await?;
            self.components.push(kubelet);
            self.components.push(node.kube_proxy(place)?);
        }
        default_account_made(&mut controllers, self.client()).await?;
        self.components.push(controllers);
        Ok(())
    }

    async fn nodes_ready(&mut self) -> anyhow::Result<()> {
        say("nodes");
        let objects = Api::<NodeObject>::all(self.client());
        for node in &self.nodes {
            let ready = async || {
                let node = objects.get(&node.name).await?;
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
                ensure!(ready.is_some_and(|ready| ready.status == "True"), "{ready:?}");
                Ok(())
            };
            let waited = self.until(&format!("{} is ready", node.name), ready).await;
            // Nothing says more about a node than its own components, should one have ended.
            for component in &mut self.components {
                component.check_alive()?;
            }
            waited?;
        }
        Ok(())
    }

    /// A client that may do everything.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The nodes, the first with the control plane.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Adds a machine that is no node: it reaches nodes, pods and Services, and they reach it.
    ///
    /// # Errors
    /// When its address is taken, or not one beside the nodes.
    pub fn join(&mut self, name: &str, addr: Ipv4Addr) -> anyhow::Result<Arc<Namespace>> {
        let lab = self.lab.as_mut().context("the network of a cluster that is running")?;
        node::machine(lab, name, addr, self.nodes.len())
    }

    /// For files of a test; removed with the cluster.
    pub fn dir(&self) -> &Path {
        Path::new(DIR)
    }

    /// Where processes on the first node find the API server, and who they are: may do everything.
    pub fn kubeconfig(&self) -> PathBuf {
        conf_inside()
    }

    /// Where this process finds the API server, through an address of its own: may do everything.
    pub fn kubeconfig_outside(&self) -> PathBuf {
        Path::new(DIR).join("outside.conf")
    }

    /// A command on the first node with `KUBECONFIG` set, to dial pods and Services by address.
    ///
    /// # Errors
    /// When there is no such program.
    pub fn command(&self, program: &str) -> anyhow::Result<tokio::process::Command> {
        let mut command = self.nodes[0].namespace.command(programs::find(program)?);
        command.env("KUBECONFIG", conf_inside()).current_dir(DIR);
        Ok(tokio::process::Command::from(command))
    }

    /// Runs `kubectl` as who may do everything, and returns what it prints.
    ///
    /// # Errors
    /// What it says when it fails.
    pub async fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.command("kubectl")?.args(args).output().await?;
        if !output.status.success() {
            let answer = String::from_utf8_lossy(&output.stderr);
            bail!("kubectl {}: {}", args.join(" "), answer.trim());
        }
        String::from_utf8(output.stdout).context("kubectl's output")
    }

    /// A loopback address of this process that leads to an address of a pod, a Service or a node.
    ///
    /// # Errors
    /// When no port is free.
    pub fn forward(&self, target: SocketAddr) -> anyhow::Result<SocketAddr> {
        forward(&mut self.forwards.lock(), self.nodes[0].namespace.clone(), target)
    }

    /// Loads an image of this repository on every node.
    ///
    /// # Errors
    /// When it cannot be made, or what a node answers.
    pub async fn load(&mut self, image: Image) -> anyhow::Result<()> {
        let archive = Path::new(DIR).join(format!("image-{}.tar", self.images));
        self.images += 1;
        images::write(image, &programs::shipped()?, &archive)?;
        self.load_archive(&archive).await
    }

    /// Loads the image of a docker archive on every node.
    ///
    /// # Errors
    /// What a node answers.
    pub async fn load_archive(&self, archive: &Path) -> anyhow::Result<()> {
        for node in &self.nodes {
            self.until("containerd answers", async || node.answers()).await?;
            node.load_image(archive)?;
        }
        Ok(())
    }

    /// Waits until all replicas of a Deployment are available, and none is of an older generation.
    ///
    /// # Errors
    /// What `kubectl describe` says of its pods when that takes too long.
    pub async fn deployment_ready(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
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
                "updated, available and all replicas of {wanted}: {counts:?}"
            );
            Ok(())
        };
        match self
            .until(&format!("deployment {namespace}/{name} is available"), available)
            .await
        {
            Ok(()) => Ok(()),
            Err(error) => {
                let pods = self.kubectl(&["describe", "pods", "--namespace", namespace]).await;
                Err(error.context(pods.unwrap_or_else(|error| format!("{error:#}"))))
            }
        }
    }

    /// Asks again and again until a condition holds.
    ///
    /// # Errors
    /// Its last answer, when it does not within two minutes.
    pub async fn until(
        &self,
        what: &str,
        mut condition: impl AsyncFnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let Err(not_yet) = condition().await else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(not_yet.context(format!("not within {START_LIMIT:?}: {what}")));
            }
            sleep(PAUSE).await;
        }
    }

    /// The requests that the audit policy selects, so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn audit_log(&self) -> anyhow::Result<Vec<AuditRecord>> {
        super::audit::read(&Path::new(DIR).join(super::control_plane::AUDIT_LOG))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.lab.is_none() {
            return; // it was left running
        }
        self.forwards.lock().abort_all();
        self.components.clear();
        self.nodes.clear();
        self.lab = None;
        if let Err(error) = leftovers::remove(Path::new(DIR)) {
            eprintln!("ending the cluster: {error:#}; `./run cluster down` tries again");
        }
    }
}

/// Ends the cluster of this machine, whoever started it, and removes what is left of it.
///
/// # Errors
/// When something cannot be ended or removed.
pub async fn down() -> anyhow::Result<()> {
    let dir = Path::new(DIR);
    // One that was started to stay holds no lock; one of a test does, and its test ends it.
    let _alone = wait_for_turn().await?;
    leftovers::remove(dir)
}

/// The command line that runs a program on the first node of the running cluster, as who may do everything.
///
/// # Errors
/// When there is no cluster, or no such program.
pub fn inside(program: &str) -> anyhow::Result<std::process::Command> {
    let entries = fs::read_dir("/run/netns").context("no cluster is running; `./run cluster up` starts one")?;
    let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let first = entries
        .filter_map(name)
        .find(|name| name.starts_with(node::NAMESPACE_PREFIX) && name.ends_with("-node1"))
        .context("no cluster is running; `./run cluster up` starts one")?;
    let mut command = std::process::Command::new("nsenter");
    command
        .arg(format!("--net=/run/netns/{first}"))
        .arg(programs::find(program)?)
        .env("KUBECONFIG", conf_inside());
    Ok(command)
}

/// Loads the image of a docker archive on every node of the running cluster.
///
/// # Errors
/// When there is no cluster, or what a node answers.
pub fn load_archive(archive: &Path) -> anyhow::Result<()> {
    let sockets = node::sockets(Path::new(DIR));
    ensure!(
        !sockets.is_empty(),
        "no cluster is running; `./run cluster up` starts one"
    );
    sockets.iter().try_for_each(|socket| node::load_image(socket, archive))
}

async fn wait_for_turn() -> anyhow::Result<Flock<File>> {
    let path = format!("{DIR}.lock");
    let mut file = File::create(&path).with_context(|| format!("creating {path}"))?;
    let mut told = false;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((back, nix::Error::EWOULDBLOCK)) => file = back,
            Err((_, error)) => return Err(error).with_context(|| format!("locking {path}")),
        }
        if !mem::replace(&mut told, true) {
            say("waiting for the end of another cluster");
        }
        sleep(PAUSE).await;
    }
}

/// A loopback address that leads to `target`, as seen from a namespace, while its task runs.
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
                let dial = move || namespace.run(|| std::net::TcpStream::connect_timeout(&target, DIAL_LIMIT));
                // Where nobody answers the client's connection is closed.
                let Ok(Ok(Ok(server))) = tokio::task::spawn_blocking(dial).await else {
                    return;
                };
                let server = server.set_nonblocking(true).and_then(|()| TcpStream::from_std(server));
                if let Ok(mut server) = server {
                    // Whichever side breaks it off, the other one learns.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
            while connections.try_join_next().is_some() {}
        }
    });
    Ok(addr)
}

fn conf_inside() -> PathBuf {
    Path::new(DIR).join("admin.conf")
}

/// Progress, for who waits.
fn say(what: &str) {
    eprintln!("cluster: {what}");
}

/// The most nodes that a cluster may have.
pub const MOST_NODES: u8 = 3;
/// Everything that a cluster writes. Beside what this names, only sockets of containerd lie elsewhere.
const DIR: &str = "/var/tmp/tulle-cluster";
/// Tells a cluster that shall stay from one whose test was killed.
const KEPT: &str = "started-to-stay";
const COREDNS: &str = include_str!("coredns.json");
const PAUSE: Duration = Duration::from_millis(100);
const DIAL_LIMIT: Duration = Duration::from_secs(5);
