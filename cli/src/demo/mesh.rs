//! Builds the mesh: network namespaces, redirect rules, control plane, sidecars and applications.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::time::{Instant, sleep};
use tulle_core::names::port;
use tulle_core::netns::{self, Namespace, VirtualNetwork};

use super::credentials::Credentials;
use super::manifests;
use super::options::Balancer;
use super::process::{APP_UID, CONTROL_UID, Output, PROXY_UID, Process, ProcessSpec};
use super::rundir::{self, FailedRunLogs, RunDir};
use super::scrape::AdminClient;
use super::topology::{App, CONTROL_IP, CONTROL_NAMESPACE, OUTSIDE_IP, Topology, Workload};

/// The running mesh. The order of the fields is the order in which they are dropped: processes, then namespaces, then the
/// directory.
pub(super) struct DemoMesh {
    pub(super) control: RestartableProcess,
    pub(super) sidecars: BTreeMap<String, RestartableProcess>,
    /// The applications, by workload.
    pub(super) apps: BTreeMap<String, RestartableProcess>,
    pub(super) credentials: Credentials,
    pub(super) topology: Topology,
    hosts: BTreeMap<String, Arc<Namespace>>,
    _network: VirtualNetwork,
    pub(super) dir: Arc<RunDir>,
}

/// A process that can be restarted, and its admin servers.
pub(super) struct RestartableProcess {
    pub(super) spec: ProcessSpec,
    pub(super) process: Process,
    pub(super) admin: Vec<AdminClient>,
}

pub(super) struct MeshOptions<'a> {
    /// The user's manifests, used instead of the built-in ones.
    pub(super) manifests: Option<&'a Path>,
    /// The balancer in the sidecar of the load generators.
    pub(super) balancer: Balancer,
}

/// Builds everything and waits until it is ready. Prints progress to standard error.
pub(super) async fn build(options: &MeshOptions<'_>, dir: Arc<RunDir>) -> anyhow::Result<DemoMesh> {
    let manifests = match options.manifests {
        Some(directory) => directory
            .canonicalize()
            .with_context(|| format!("finding {}", directory.display()))?,
        None => {
            manifests::write(&dir.manifests())?;
            dir.manifests()
        }
    };
    let topology = Topology::parse(&manifests::read(&manifests)?)?;
    let binaries = Binaries::install(&dir.bin())?;
    print_progress("creating a trust anchor, an issuer and join tokens");
    let credentials = Credentials::create(&dir.credentials(), &topology)?;

    print_progress(&format!(
        "creating network namespaces for {} hosts",
        topology.workloads.len() + 2
    ));
    let mut network = VirtualNetwork::new(NAMESPACE_PREFIX)?;
    let mut hosts = BTreeMap::new();
    for (name, ip) in [(CONTROL, CONTROL_IP), (OUTSIDE, OUTSIDE_IP)].into_iter().chain(
        topology
            .workloads
            .iter()
            .map(|workload| (workload.name.as_str(), workload.ip)),
    ) {
        let host = network.add_host(name, &format!("{ip}/24"), None)?;
        // Cluster IPs belong to no interface. Packets to them need a route, to reach the redirect rules.
        host.ip("route add default dev eth0\n")?;
        hosts.insert(name.to_owned(), host);
    }

    print_progress("starting the control plane");
    let starter = ProcessStarter {
        topology: &topology,
        credentials: &credentials,
        binaries: &binaries,
        hosts: &hosts,
        logs: dir.logs(),
    };
    let mut control = starter.start_control(&manifests)?;
    control.wait_until_ready().await?;

    print_progress("redirecting the traffic of the workloads, starting applications and sidecars");
    let (mut sidecars, mut apps) = (BTreeMap::new(), BTreeMap::new());
    for workload in &topology.workloads {
        starter.redirect(workload)?;
        if let Some(app) = starter.start_app(workload)? {
            apps.insert(workload.name.clone(), app);
        }
        sidecars.insert(
            workload.name.clone(),
            starter.start_sidecar(workload, options.balancer)?,
        );
    }
    for app in apps.values_mut() {
        starter.wait_until_listening(app).await?;
    }
    for sidecar in sidecars.values_mut() {
        sidecar.wait_until_ready().await?;
    }
    Ok(DemoMesh {
        control,
        sidecars,
        apps,
        credentials,
        topology,
        hosts,
        _network: network,
        dir,
    })
}

/// Removes the namespaces and directories of demos that were killed. With [`FailedRunLogs::Remove`], also removes the kept logs of
/// failed demos that ended normally.
pub(super) fn remove_stale(failed_logs: FailedRunLogs) -> anyhow::Result<()> {
    netns::remove_stale(NAMESPACE_PREFIX).context("removing namespaces of an earlier demo")?;
    RunDir::remove_stale_runs(failed_logs);
    Ok(())
}

/// Prints progress to standard error, because standard output is for results.
pub(super) fn print_progress(what: &str) {
    eprintln!("tulle: {what}");
}

impl DemoMesh {
    /// Starts a load generator on this host.
    pub(super) fn start_load_generator(&self, host: &str, name: String, args: Vec<String>) -> anyhow::Result<Process> {
        let host = self
            .hosts
            .get(host)
            .with_context(|| format!("there is no host {host}"))?;
        let spec = ProcessSpec {
            name,
            program: self.dir.bin().join(BENCH),
            args,
            env: Vec::new(),
            host: host.clone(),
            uid: APP_UID,
        };
        spec.start(&self.dir.logs(), Output::Piped)
    }

    pub(super) fn processes(&mut self) -> impl Iterator<Item = &mut RestartableProcess> {
        let sidecars = self.sidecars.values_mut();
        std::iter::once(&mut self.control)
            .chain(sidecars)
            .chain(self.apps.values_mut())
    }
}

impl RestartableProcess {
    /// Restarts the process.
    pub(super) fn restart(&mut self, logs: &Path) -> anyhow::Result<()> {
        self.process = self.spec.start(logs, Output::Log)?;
        Ok(())
    }

    /// Whether all its admin servers report ready.
    pub(super) async fn is_ready(&mut self) -> bool {
        for admin in &mut self.admin {
            if admin.get("/ready").await.is_err() {
                return false;
            }
        }
        true
    }

    async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            self.process.check_alive()?;
            if self.is_ready().await {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{} is not ready after {START_TIMEOUT:?}: {}",
                self.process.name(),
                self.process.log_tail()
            );
            sleep(START_POLL_INTERVAL).await;
        }
    }
}

/// Starts the processes of the mesh.
struct ProcessStarter<'a> {
    topology: &'a Topology,
    credentials: &'a Credentials,
    binaries: &'a Binaries,
    hosts: &'a BTreeMap<String, Arc<Namespace>>,
    logs: PathBuf,
}

impl ProcessStarter<'_> {
    fn start_control(&self, manifests: &Path) -> anyhow::Result<RestartableProcess> {
        let credentials = self.credentials;
        let domain = &self.topology.trust_domain;
        let mut args = vec!["all-in-one".to_owned()];
        for (flag, value) in [
            ("--manifests", manifests.display().to_string()),
            ("--trust-anchors", credentials.anchors().display().to_string()),
            ("--issuer", credentials.issuer().display().to_string()),
            ("--token-keys", credentials.token_keys().display().to_string()),
            ("--controller-namespace", CONTROL_NAMESPACE.to_owned()),
            ("--cluster-domain", CLUSTER_DOMAIN.to_owned()),
            ("--identity-trust-domain", domain.clone()),
            ("--cluster-networks", CLUSTER_NETWORKS.to_owned()),
            ("--default-policy", DEFAULT_POLICY.to_owned()),
            ("--identity-issuance-lifetime", "1h".to_owned()),
        ] {
            args.extend([flag.to_owned(), value]);
        }
        let spec = ProcessSpec {
            name: CONTROL.to_owned(),
            program: self.binaries.control.clone(),
            args,
            env: Vec::new(),
            host: self.host(CONTROL)?,
            uid: CONTROL_UID,
        };
        self.start(spec, &CONTROL_ADMIN_PORTS)
    }

    fn redirect(&self, workload: &Workload) -> anyhow::Result<()> {
        let host = self.host(&workload.name)?;
        let mut command = host.command(&self.binaries.init);
        let skipped = format!("{},{}", port::TAP, port::ADMIN);
        command.args(["-p", &port::INBOUND.to_string(), "-o", &port::OUTBOUND.to_string()]);
        command.args(["-u", &PROXY_UID.to_string(), "--inbound-ports-to-ignore", &skipped]);
        let output = command
            .output()
            .with_context(|| format!("starting {}", self.binaries.init.display()))?;
        let log = self.logs.join(format!("{}-init.log", workload.name));
        fs::write(&log, [&output.stdout[..], &output.stderr[..]].concat())
            .with_context(|| format!("writing {}", log.display()))?;
        ensure!(
            output.status.success(),
            "tulle-init on {} ended with {}: {}",
            workload.name,
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// Starts the application of a workload, if it has one.
    fn start_app(&self, workload: &Workload) -> anyhow::Result<Option<RestartableProcess>> {
        let (flag, delay) = match workload.app {
            App::Load => return Ok(None),
            App::Web(delay) => ("--http", delay),
            App::Ws => ("--http", Duration::ZERO),
            App::Tcp => ("--tcp-speaks-first", Duration::ZERO),
        };
        let mut args = vec!["serve".to_owned(), "--name".to_owned(), workload.name.clone()];
        for port in workload.port_numbers() {
            args.extend([flag.to_owned(), format!("{}:{port}", workload.ip)]);
        }
        args.extend(["--delay".to_owned(), format!("{}ms", delay.as_millis())]);
        let spec = ProcessSpec {
            name: format!("{}-app", workload.name),
            program: self.binaries.bench.clone(),
            args,
            env: Vec::new(),
            host: self.host(&workload.name)?,
            uid: APP_UID,
        };
        self.start(spec, &[]).map(Some)
    }

    fn start_sidecar(&self, workload: &Workload, balancer: Balancer) -> anyhow::Result<RestartableProcess> {
        let mut env = self.environment(workload);
        if workload.app == App::Load && balancer == Balancer::RoundRobin {
            env.push(("TULLE_PROXY_BALANCER".to_owned(), "round-robin".to_owned()));
        }
        let spec = ProcessSpec {
            name: format!("{}-sidecar", workload.name),
            program: self.binaries.proxy.clone(),
            args: Vec::new(),
            env,
            host: self.host(&workload.name)?,
            uid: PROXY_UID,
        };
        self.start(spec, &[port::ADMIN])
    }

    /// The environment variables that the injector would set, for a host instead of a pod.
    fn environment(&self, workload: &Workload) -> Vec<(String, String)> {
        let Workload { name, namespace, .. } = workload;
        let domain = &self.topology.trust_domain;
        let control_plane_identity = |account: &str| {
            tulle_core::identity::service_account_identity(account, CONTROL_NAMESPACE, CONTROL_NAMESPACE, domain)
        };
        let ports: Vec<_> = workload.port_numbers().map(|port| port.to_string()).collect();
        let control_plane_addr = |port: u16| format!("{CONTROL_IP}:{port}");
        [
            ("LOG", "warn,tulle=info,tulle_proxy=info".to_owned()),
            ("INBOUND_LISTEN_ADDR", format!("0.0.0.0:{}", port::INBOUND)),
            ("OUTBOUND_LISTEN_ADDRS", format!("127.0.0.1:{}", port::OUTBOUND)),
            ("ADMIN_LISTEN_ADDR", format!("127.0.0.1:{}", port::ADMIN)),
            ("DESTINATION_SVC_ADDR", control_plane_addr(port::DESTINATION)),
            ("DESTINATION_SVC_NAME", control_plane_identity("linkerd-destination")),
            ("POLICY_SVC_ADDR", control_plane_addr(port::POLICY)),
            ("POLICY_SVC_NAME", control_plane_identity("linkerd-destination")),
            ("IDENTITY_SVC_ADDR", control_plane_addr(port::IDENTITY)),
            ("IDENTITY_SVC_NAME", control_plane_identity("linkerd-identity")),
            (
                "DESTINATION_CONTEXT",
                serde_json::json!({ "ns": namespace, "nodeName": "", "pod": name }).to_string(),
            ),
            ("DESTINATION_PROFILE_SUFFIXES", format!("svc.{CLUSTER_DOMAIN}.")),
            ("DESTINATION_PROFILE_NETWORKS", CLUSTER_NETWORKS.to_owned()),
            (
                "POLICY_WORKLOAD",
                serde_json::json!({ "ns": namespace, "external_workload": name }).to_string(),
            ),
            ("POLICY_CLUSTER_NETWORKS", CLUSTER_NETWORKS.to_owned()),
            ("INBOUND_DEFAULT_POLICY", DEFAULT_POLICY.to_owned()),
            ("INBOUND_PORTS", ports.join(",")),
            ("INBOUND_IPS", workload.ip.to_string()),
            ("IDENTITY_TRUST_ANCHORS", self.credentials.anchors_pem().to_owned()),
            (
                "IDENTITY_TOKEN_FILE",
                self.credentials.token(workload).display().to_string(),
            ),
            ("IDENTITY_LOCAL_NAME", workload.identity.clone()),
            // Short, so that sidecars soon have certificates of a new issuer. A certificate is valid for longer than an outage of
            // the control plane.
            ("IDENTITY_MIN_REFRESH", "5s".to_owned()),
            ("IDENTITY_MAX_REFRESH", "10s".to_owned()),
        ]
        .map(|(name, value)| (format!("LINKERD2_PROXY_{name}"), value))
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect()
    }

    fn start(&self, spec: ProcessSpec, admin_ports: &[u16]) -> anyhow::Result<RestartableProcess> {
        Ok(RestartableProcess {
            process: spec.start(&self.logs, Output::Log)?,
            admin: admin_ports
                .iter()
                .map(|port| AdminClient::new(spec.host.clone(), *port))
                .collect(),
            spec,
        })
    }

    /// Waits until an application reports that it listens.
    async fn wait_until_listening(&self, app: &mut RestartableProcess) -> anyhow::Result<()> {
        let log = self.logs.join(format!("{}.log", app.spec.name));
        let deadline = Instant::now() + START_TIMEOUT;
        while !fs::read_to_string(&log).is_ok_and(|text| text.contains("listening")) {
            app.process.check_alive()?;
            ensure!(
                Instant::now() < deadline,
                "{} does not listen after {START_TIMEOUT:?}",
                app.spec.name
            );
            sleep(START_POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn host(&self, name: &str) -> anyhow::Result<Arc<Namespace>> {
        self.hosts
            .get(name)
            .cloned()
            .with_context(|| format!("there is no host {name}"))
    }
}

/// The shipped binaries, linked or copied to a directory that every user can access.
struct Binaries {
    proxy: PathBuf,
    init: PathBuf,
    control: PathBuf,
    bench: PathBuf,
}

impl Binaries {
    /// Links or copies the binaries from the directory of this program.
    fn install(into: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let program_dir = program.parent().context("finding the directory of this program")?;
        let install = |name: &str| {
            let (from, to) = (program_dir.join(name), into.join(name));
            if !from.exists() {
                bail!(
                    "{} is missing; the demo starts the binaries in the directory of this program",
                    from.display()
                );
            }
            fs::hard_link(&from, &to)
                .or_else(|_| fs::copy(&from, &to).map(drop))
                .with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
            Ok(to)
        };
        rundir::create_public_directory(into)?;
        Ok(Self {
            proxy: install("tulle-proxy")?,
            init: install("tulle-init")?,
            control: install("tulle-control")?,
            bench: install(BENCH)?,
        })
    }
}

/// Prefix of the names of network namespaces.
const NAMESPACE_PREFIX: &str = "tulle-demo-";
const CONTROL: &str = "control";
const OUTSIDE: &str = "outside";
const BENCH: &str = "tulle-bench";
const CLUSTER_DOMAIN: &str = "cluster.local";
const CLUSTER_NETWORKS: &str = "10.0.0.0/8";
const DEFAULT_POLICY: &str = "all-authenticated";
/// Port 9996 of the destination service, and port 9990, which the identity and policy services share.
const CONTROL_ADMIN_PORTS: [u16; 2] = [9996, 9990];
const START_TIMEOUT: Duration = Duration::from_secs(30);
const START_POLL_INTERVAL: Duration = Duration::from_millis(50);
