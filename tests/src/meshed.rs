//! Clusters with tulle, installed with `helm install`, and load generators in pods.
//!
//! With `TULLE_TEST_PROXY=image.tar` pods use the proxy of that docker archive, which can be a third-party one. With
//! `TULLE_TEST_PROXY_AT=servers` or `clients` only those pods use it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Child;
use tokio::time::{sleep, timeout};
use tulle_bench::load::stats::Report;
use tulle_control::trust::{self, CertificateAuthority};

use crate::charts::{Helm, chart_path};
use crate::cluster::{Cluster, ClusterOptions};
use crate::commands;
use crate::images::{self, Image};
use crate::linkerd::{Linkerd, LinkerdParts};

/// A cluster with tulle.
pub struct MeshedCluster {
    pub cluster: Cluster,
    pub helm: Helm,
    files: TempDir,
    /// Whether some proxies are not from this repository.
    pub has_third_party_proxies: bool,
    /// The proxy image of clients, if it differs from the others.
    clients_image: Option<String>,
    /// The program for the commands `multicluster …`, if it is not `tulle`.
    pub multicluster_program: Option<PathBuf>,
}

/// Which pods use the third-party proxy: servers, clients, or all.
#[derive(Clone, Copy, Eq, PartialEq)]
enum ThirdPartyProxies {
    Servers,
    Clients,
    Both,
}

/// A container with `tulle-bench`.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    pub namespace: &'static str,
    pub deployment: &'static str,
    pub container: &'static str,
}

impl MeshedCluster {
    /// Starts two nodes with `tulle-crds` and `tulle-control-plane`, and waits until all pods of the control plane are ready.
    ///
    /// # Errors
    /// Fails if Helm fails or the pods do not become ready.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(ClusterOptions {
            nodes: 2,
            ..ClusterOptions::default()
        })
        .await
    }

    /// As [`MeshedCluster::start`], with these options.
    ///
    /// # Errors
    /// The same as [`MeshedCluster::start`].
    pub async fn start_with(options: ClusterOptions) -> anyhow::Result<Self> {
        let cluster = Cluster::start_with(options).await?;
        let anchor = trust::create_anchor("root.linkerd.cluster.local", YEAR)?;
        Self::install(cluster, "cluster.local", &anchor, LinkerdParts::None).await
    }

    /// Installs a control plane with this trust domain and an issuer below the anchor, and waits until all pods of the control plane
    /// are ready.
    ///
    /// # Errors
    /// The same as [`MeshedCluster::start`], or Linkerd's program fails.
    pub async fn install(
        cluster: Cluster,
        trust_domain: &str,
        anchor: &CertificateAuthority,
        linkerd: LinkerdParts,
    ) -> anyhow::Result<Self> {
        let files = tempfile::tempdir().context("creating a directory")?;
        let mut meshed = Self {
            helm: Helm::with_kubeconfig(cluster.kubeconfig_outside())?,
            cluster,
            files,
            has_third_party_proxies: linkerd.include_control_plane(),
            clients_image: None,
            multicluster_program: None,
        };
        let mut settings = meshed.proxy_image().await?;
        anchor.write(&meshed.file("ca.crt"), &meshed.file("ca.key"))?;
        let issuer = trust::create_issuer(&format!("identity.linkerd.{trust_domain}"), YEAR, anchor)?;
        issuer.write(&meshed.file("issuer.crt"), &meshed.file("issuer.key"))?;
        if linkerd != LinkerdParts::None {
            for image in Linkerd::from_env()?.images()? {
                meshed.cluster.load_archive(&image).await?;
            }
        }
        if linkerd.include_multicluster() {
            meshed.multicluster_program = Some(Linkerd::from_env()?.program());
            settings.push("--set=linkedClusters={east}".to_owned());
        }
        match linkerd.include_control_plane() {
            true => meshed.install_linkerd(trust_domain).await?,
            false => meshed.install_tulle(trust_domain, &settings)?,
        }
        meshed.wait_for_control_plane().await?;
        meshed.wait_for_injection().await?;
        Ok(meshed)
    }

    /// Installs `tulle-crds` and `tulle-control-plane`.
    fn install_tulle(&self, trust_domain: &str, settings: &[String]) -> anyhow::Result<()> {
        let (crds, control_plane) = (chart_path("tulle-crds"), chart_path("tulle-control-plane"));
        let install = ["install", "--namespace", "linkerd", "--create-namespace"];
        let crds_release = ["tulle-crds", &crds, "--set=installGatewayAPI=true"];
        self.helm.run(&[&install[..], &crds_release].concat())?;
        let set = |value: &str, file: &str| format!("--set-file={value}={}", self.file(file).display());
        let credentials = [
            set("identityTrustAnchorsPEM", "ca.crt"),
            set("identity.issuer.tls.crtPEM", "issuer.crt"),
            set("identity.issuer.tls.keyPEM", "issuer.key"),
        ];
        let networks = [
            format!("--set=clusterDomain={}", self.cluster.addresses().domain),
            format!("--set=identityTrustDomain={trust_domain}"),
            format!("--set=disableIPv6={}", !self.cluster.addresses().dual_stack()),
        ];
        let set: Vec<&str> = credentials
            .iter()
            .chain(&networks)
            .chain(settings)
            .map(String::as_str)
            .collect();
        let control_plane_release = ["tulle-control-plane", &control_plane];
        self.helm.run(&[&install[..], &control_plane_release, &set].concat())?;
        Ok(())
    }

    /// Installs Linkerd's control plane by its own program.
    async fn install_linkerd(&self, trust_domain: &str) -> anyhow::Result<()> {
        let file = |flag: &str, file: &str| format!("--identity-{flag}-file={}", self.file(file).display());
        let control_plane = [
            "install".to_owned(),
            file("trust-anchors", "ca.crt"),
            file("issuer-certificate", "issuer.crt"),
            file("issuer-key", "issuer.key"),
            format!("--cluster-domain={}", self.cluster.addresses().domain),
            format!("--identity-trust-domain={trust_domain}"),
            format!("--set=disableIPv6={}", !self.cluster.addresses().dual_stack()),
            "--disable-heartbeat".to_owned(),
            // The default of newer versions.
            "--set=proxy.nativeSidecar=true".to_owned(),
        ];
        let crds = ["install", "--crds", "--set=installGatewayAPI=true"].map(str::to_owned);
        for args in [&crds[..], &control_plane] {
            let line = format!("linkerd {}", args.join(" "));
            let mut linkerd = self.cluster.command_for_path(&Linkerd::from_env()?.program());
            linkerd.args(args);
            let output = commands::output(&line, linkerd).await?;
            let answer = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{line}: {}", answer.trim());
            self.apply(&String::from_utf8(output.stdout).context("the output of linkerd")?)
                .await?;
        }
        Ok(())
    }

    /// Loads the proxy image of `TULLE_TEST_PROXY`, and returns the chart settings for it.
    async fn proxy_image(&mut self) -> anyhow::Result<Vec<String>> {
        let Some(archive) = env::var_os("TULLE_TEST_PROXY") else {
            return Ok(Vec::new());
        };
        let at = match env::var("TULLE_TEST_PROXY_AT").as_deref() {
            Ok("servers") => ThirdPartyProxies::Servers,
            Ok("clients") => ThirdPartyProxies::Clients,
            Err(env::VarError::NotPresent) => ThirdPartyProxies::Both,
            other => bail!("TULLE_TEST_PROXY_AT is {other:?}, not servers or clients"),
        };
        let archive = Path::new(&archive);
        self.cluster.load_archive(archive).await?;
        let third_party = images::archive_reference(archive)?;
        let own = Image::Proxy.reference();
        self.has_third_party_proxies = true;
        self.clients_image = match at {
            ThirdPartyProxies::Servers => Some(own),
            ThirdPartyProxies::Clients => Some(third_party.clone()),
            ThirdPartyProxies::Both => None,
        };
        if at == ThirdPartyProxies::Clients {
            return Ok(Vec::new());
        }
        let (name, version) = third_party.rsplit_once(':').context("a tag of the image")?;
        Ok(vec![
            format!("--set=proxy.image.name={name}"),
            format!("--set=proxy.image.version={version}"),
        ])
    }

    /// Sets the proxy image of this run for the Deployment of a client, and waits for the Deployment.
    ///
    /// # Errors
    /// Fails if the wait times out; the error describes its pods.
    pub async fn set_up_client(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        if let Some((image, version)) = self.clients_image.as_deref().and_then(|image| image.rsplit_once(':')) {
            let annotations = json!({
                "config.linkerd.io/proxy-image": image,
                "config.linkerd.io/proxy-version": version,
            });
            let patch = json!({"spec": {"template": {"metadata": {"annotations": annotations}}}});
            let (deployment, patch) = (format!("deploy/{name}"), patch.to_string());
            let args = ["patch", "-n", namespace, &deployment, "-p", &patch];
            self.cluster.kubectl(&args).await?;
        }
        self.cluster.wait_for_deployment(namespace, name).await
    }

    /// With third-party proxies, marks a port opaque on a Service and on the pods of the Deployment of the same name: they need
    /// this for server-speaks-first protocols, which the proxies of tulle detect.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub async fn mark_opaque_for_third_party_proxies(
        &self,
        namespace: &str,
        name: &str,
        port: u16,
    ) -> anyhow::Result<()> {
        if !self.has_third_party_proxies {
            return Ok(());
        }
        let annotations = json!({"config.linkerd.io/opaque-ports": port.to_string()});
        let (service, deployment) = (format!("service/{name}"), format!("deploy/{name}"));
        let metadata = json!({"metadata": {"annotations": annotations}});
        for (object, patch) in [
            (service, metadata.clone()),
            (deployment, json!({"spec": {"template": metadata}})),
        ] {
            let args = ["patch", "-n", namespace, &object, "-p", &patch.to_string()];
            self.cluster.kubectl(&args).await?;
        }
        Ok(())
    }

    /// Waits until new pods get a sidecar. The API server ignores an injector that it cannot reach yet.
    async fn wait_for_injection(&self) -> anyhow::Result<()> {
        let file = self.file("injected.yaml");
        fs::write(&file, INJECTED_POD).context("writing a manifest")?;
        let containers = "jsonpath={.spec.initContainers[*].name}";
        let file = file.display().to_string();
        let args = ["apply", "--dry-run=server", "-f", &file, "-o", containers];
        let injected = async || {
            let containers = self.cluster.kubectl(&args).await?;
            ensure!(containers.contains("linkerd-proxy"), "init containers: {containers:?}");
            Ok(())
        };
        self.cluster.wait_until("pods are injected", injected).await
    }

    /// The path of a file for the test.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Waits for every pod of the control plane.
    ///
    /// # Errors
    /// Fails if the wait times out; the error describes its pods.
    pub async fn wait_for_control_plane(&self) -> anyhow::Result<()> {
        for component in COMPONENTS {
            let name = format!("linkerd-{component}");
            self.cluster.wait_for_deployment("linkerd", &name).await?;
        }
        Ok(())
    }

    /// Runs `kubectl` with a command line, split at spaces.
    ///
    /// # Errors
    /// Fails if the command fails; the error contains its output.
    pub async fn kubectl(&self, line: &str) -> anyhow::Result<String> {
        self.cluster.kubectl(&line.split_whitespace().collect::<Vec<_>>()).await
    }

    /// Applies a manifest, with retries until the webhooks accept it.
    ///
    /// # Errors
    /// Fails if the API server refuses for too long.
    pub async fn apply(&self, manifest: &str) -> anyhow::Result<()> {
        let file = self.file("manifest.yaml");
        fs::write(&file, manifest).context("writing a manifest")?;
        self.apply_files(&file).await
    }

    /// Applies a file, or all files of a directory.
    ///
    /// # Errors
    /// The same as [`MeshedCluster::apply`].
    pub async fn apply_files(&self, path: &Path) -> anyhow::Result<()> {
        let path = path.to_str().context("a path in UTF-8")?;
        let apply = async || self.cluster.kubectl(&["apply", "-f", path]).await.map(drop);
        self.cluster
            .wait_until("the API server accepts the manifests", apply)
            .await
    }

    /// Runs load in a container and returns its report, including failures.
    ///
    /// # Errors
    /// Fails if the load cannot run.
    pub async fn load(&self, client: Client, line: &str) -> anyhow::Result<Report> {
        let mut running = self.start_load(client, line)?;
        let (total, _) = running.reports().await.with_context(|| line.to_owned())?;
        Ok(total)
    }

    /// Starts load in a container. Dropping the value ends it.
    ///
    /// # Errors
    /// Fails if `kubectl` cannot be started.
    pub fn start_load(&self, client: Client, line: &str) -> anyhow::Result<RunningLoad> {
        let Client {
            namespace,
            deployment,
            container,
        } = client;
        let target = format!("deploy/{deployment}");
        let mut kubectl = self.cluster.command("kubectl")?;
        kubectl
            .args([
                "exec",
                "-n",
                namespace,
                &target,
                "-c",
                container,
                "--",
                "/tulle-bench",
                "load",
                "--json",
            ])
            .args(line.split_whitespace());
        kubectl.stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = kubectl.spawn().context("starting kubectl")?;
        let output = child.stdout.take().context("its output")?;
        Ok(RunningLoad {
            _child: child,
            lines: BufReader::new(output).lines(),
        })
    }

    /// Runs load in a container for at least `min_duration`, and disturbs it one second after its start. The load ends after the
    /// disturbance. Returns the report of the whole load, and one report for each further second.
    ///
    /// # Errors
    /// Fails if the load cannot run, or the disturbance fails or takes longer than `MAX_LOAD_DURATION`.
    pub async fn load_during(
        &self,
        client: Client,
        line: &str,
        min_duration: Duration,
        disturb: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<(Report, Vec<Report>)> {
        // The header identifies the process of this load.
        let id = format!("x-load:{}", client.namespace);
        let duration = MAX_LOAD_DURATION.as_secs();
        let mut running = self.start_load(
            client,
            &format!("{line} --header={id} --duration={duration}s --report-every=1s"),
        )?;
        running.next().await?.context("the first second of load")?;
        let disturb_and_end = async {
            let (disturbed, ()) = tokio::join!(disturb, sleep(min_duration));
            let process = find_process("the load, which ends after the disturbance", |read| {
                let line = read("cmdline");
                line.starts_with("/tulle-bench\0load\0") && line.contains(&id)
            });
            let stopped = process.and_then(|process| Ok(kill(process, Signal::SIGTERM)?));
            // If the disturbance took too long, the load has ended, and the error of the disturbance says more.
            disturbed.and(stopped)
        };
        let (reports, disturbed) = tokio::join!(running.reports(), disturb_and_end);
        disturbed?;
        reports
    }

    /// The metrics of a pod's proxy.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub async fn proxy_metrics(&self, namespace: &str, pod: &str) -> anyhow::Result<String> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:4191/proxy/metrics");
        self.cluster.kubectl(&["get", "--raw", &path]).await
    }

    /// The metrics of a pod's proxy, read by a client in the mesh. Third-party proxies refuse some metrics to the API
    /// server, which has no identity.
    ///
    /// # Errors
    /// Fails if the client fails.
    pub async fn proxy_metrics_from_client(
        &self,
        client: Client,
        namespace: &str,
        pod: &str,
    ) -> anyhow::Result<String> {
        let addr = format!("get pod -n {namespace} {pod} -o jsonpath={{.status.podIP}}");
        let addr = self.kubectl(&addr).await?;
        let Client {
            namespace,
            deployment,
            container,
        } = client;
        let url = format!("http://{addr}:4191/metrics");
        let line = format!("exec -n {namespace} deploy/{deployment} -c {container} -- curl -sSf {url}");
        self.kubectl(&line).await
    }

    /// The names of the pods that the selector selects.
    ///
    /// # Errors
    /// Fails if there are no pods.
    pub async fn pods(&self, namespace: &str, selector: &str) -> anyhow::Result<Vec<String>> {
        let path = "jsonpath={.items[*].metadata.name}";
        let args = ["get", "pods", "-n", namespace, "-l", selector, "-o", path];
        let names = self.cluster.kubectl(&args).await?;
        ensure!(!names.is_empty(), "no pods of {selector} in {namespace}");
        Ok(names.split_whitespace().map(str::to_owned).collect())
    }
}

/// The only process of this machine, including pods, for which `is_match` returns true. `is_match` gets a function that reads
/// a file below `/proc/<pid>`.
///
/// # Errors
/// Fails if no process matches, or more than one.
pub fn find_process(what: &str, is_match: impl Fn(&dyn Fn(&str) -> String) -> bool) -> anyhow::Result<Pid> {
    let pids = fs::read_dir("/proc").context("reading /proc")?.flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // A process may exit while it is read.
    let read = |pid: i32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let found: Vec<i32> = pids.filter(|pid| is_match(&|file| read(*pid, file))).collect();
    ensure!(found.len() == 1, "{what}: {found:?}");
    Ok(Pid::from_raw(found[0]))
}

/// Load in a container, which prints reports.
pub struct RunningLoad {
    _child: Child,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl RunningLoad {
    /// The next report; `None` after the last.
    ///
    /// # Errors
    /// Fails if the output is not a report.
    pub async fn next(&mut self) -> anyhow::Result<Option<Report>> {
        let Some(line) = self.lines.next_line().await? else {
            return Ok(None);
        };
        let report = serde_json::from_str(&line).with_context(|| format!("a report: {line}"))?;
        Ok(Some(report))
    }

    /// The last report, which covers the whole load, and the earlier reports, one for each second.
    async fn reports(&mut self) -> anyhow::Result<(Report, Vec<Report>)> {
        let mut reports = Vec::new();
        let read = async {
            while let Some(report) = self.next().await? {
                reports.push(report);
            }
            anyhow::Ok(())
        };
        let ended = timeout(LOAD_TIMEOUT, read).await;
        ended.with_context(|| format!("the load has not ended within {LOAD_TIMEOUT:?}"))??;
        let total = reports.pop().context("load that ended without a report")?;
        Ok((total, reports))
    }
}

/// Asserts that every request succeeded.
pub fn assert_all_ok(report: &Report, what: &str) {
    assert!(
        report.requests > 0 && report.failed == 0,
        "{what}: {} of {} failed: {:?} {:?}",
        report.failed,
        report.requests,
        report.outcomes,
        report.errors
    );
}

const INJECTED_POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: injected, namespace: default, annotations: {linkerd.io/inject: enabled}}
spec: {containers: [{name: app, image: 'ghcr.io/tulle-mesh/bench:0.1.0'}]}
";
const YEAR: Duration = Duration::from_hours(365 * 24);
const MAX_LOAD_DURATION: Duration = Duration::from_secs(300);
const LOAD_TIMEOUT: Duration = Duration::from_secs(320);
pub const COMPONENTS: [&str; 3] = ["destination", "identity", "proxy-injector"];
