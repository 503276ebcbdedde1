//! Two clusters with tulle, linked by `tulle multicluster`: `west` uses Services of `east`.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tulle_bench::load::stats::Report;
use tulle_control::trust;

use crate::cluster::{ClusterPair, Connection, PairNetwork};
use crate::images::Image;
use crate::linkerd::{Linkerd, LinkerdParts};
use crate::meshed::{Client, MeshedCluster};
use crate::{commands, programs};

/// Two clusters with one trust anchor, and a trust domain each. Dropping it stops both.
pub struct LinkedClusters {
    // Fields drop in declaration order.
    pub network: PairNetwork,
    pub west: MeshedCluster,
    pub east: MeshedCluster,
    /// Whether the Link in `west` has a controller of its own, without which Linkerd's chart and commands do not work.
    has_own_controller: bool,
}

impl LinkedClusters {
    /// Starts two clusters, installs the control plane and the multicluster extension in both, and links `west` to `east`. Calls
    /// `progress` before each step.
    ///
    /// # Errors
    /// Fails if a command fails, or a pod does not become ready.
    pub async fn start(connection: Connection, progress: impl Fn(&str)) -> anyhow::Result<Self> {
        Self::start_with_linkerd(connection, [LinkerdParts::None; 2], progress).await
    }

    /// As [`LinkedClusters::start`], with these parts of Linkerd in `west` and in `east`.
    ///
    /// # Errors
    /// The same as [`LinkedClusters::start`], or Linkerd's program fails.
    pub async fn start_with_linkerd(
        connection: Connection,
        linkerd: [LinkerdParts; 2],
        progress: impl Fn(&str),
    ) -> anyhow::Result<Self> {
        progress("starting two clusters");
        let ClusterPair { network, west, east } = ClusterPair::start(connection, 1).await?;
        progress("installing a control plane in both");
        let anchor = trust::create_anchor("root.linkerd.cluster.local", Duration::from_hours(365 * 24))?;
        let (mut west, mut east) = tokio::try_join!(
            MeshedCluster::install(west, WEST_TRUST_DOMAIN, &anchor, linkerd[0]),
            MeshedCluster::install(east, EAST_TRUST_DOMAIN, &anchor, linkerd[1]),
        )?;
        // Proxies of each cluster have connections with those of the other.
        west.has_third_party_proxies |= east.has_third_party_proxies;
        east.has_third_party_proxies = west.has_third_party_proxies;
        let has_own_controller = linkerd != [LinkerdParts::None; 2];
        let linked = Self {
            network,
            west,
            east,
            has_own_controller,
        };
        progress("installing the gateway in east, and the service mirror in west");
        install_extension(&linked.east, &gateway_flag()).await?;
        install_extension(&linked.west, &format!("--gateway=false {}", linked.mirror_flags())).await?;
        linked.wait_for_gateway().await?;
        progress("linking west to east");
        linked.link().await?;
        linked
            .west
            .cluster
            .wait_for_deployment(NAMESPACE, linked.mirror_deployment())
            .await?;
        Ok(linked)
    }

    /// Waits until the gateway is available and has an address.
    ///
    /// # Errors
    /// Fails if the wait times out.
    pub async fn wait_for_gateway(&self) -> anyhow::Result<()> {
        let cluster = &self.east.cluster;
        cluster.wait_for_deployment(NAMESPACE, "linkerd-gateway").await?;
        let path = "jsonpath={.status.loadBalancer.ingress[0].ip}";
        let get = ["get", "service", "-n", NAMESPACE, "linkerd-gateway", "-o", path];
        let has_address = async || {
            ensure!(!cluster.kubectl(&get).await?.is_empty(), "the gateway has no address");
            Ok(())
        };
        cluster.wait_until("the gateway has an address", has_address).await
    }

    /// Runs `tulle multicluster link-gen` in `east`, and applies its output in `west`. A further call replaces the credentials.
    ///
    /// # Errors
    /// Fails if a command fails.
    pub async fn link(&self) -> anyhow::Result<()> {
        link(&self.west, &self.east, "east", "").await
    }

    /// As [`LinkedClusters::link`], with these addresses of the gateway, separated by commas, instead of those of its Service.
    ///
    /// # Errors
    /// Fails if a command fails.
    pub async fn link_by_addresses(&self, gateway: &str) -> anyhow::Result<()> {
        let flags = format!("--gateway-addresses {gateway}");
        link(&self.west, &self.east, "east", &flags).await
    }

    /// Flags of `install` for the service mirror of `west`.
    fn mirror_flags(&self) -> &'static str {
        match self.has_own_controller {
            true => CONTROLLER_OF_EAST,
            false => "--set serviceMirror.enableHeadlessServices=true",
        }
    }

    /// The Deployment of the service mirror of `west`.
    fn mirror_deployment(&self) -> &'static str {
        match self.has_own_controller {
            true => "controller-east",
            false => SERVICE_MIRROR,
        }
    }

    /// Installs a gateway in `west` and a controller of the chart for this Link in `east`, and links `east` to `west`, so that each
    /// cluster can use Services of the other. The gateway of `east` gets its default number of replicas, one.
    ///
    /// # Errors
    /// Fails if a command fails, or a pod does not become ready.
    pub async fn link_back(&self) -> anyhow::Result<()> {
        let gateway = gateway_flag();
        install_extension(&self.west, &format!("{gateway} {}", self.mirror_flags())).await?;
        install_extension(&self.east, &format!("{gateway} {CONTROLLER_OF_WEST}")).await?;
        for cluster in [&self.west, &self.east] {
            cluster
                .cluster
                .wait_for_deployment(NAMESPACE, "linkerd-gateway")
                .await?;
        }
        link(&self.east, &self.west, "west", "").await?;
        self.east
            .cluster
            .wait_for_deployment(NAMESPACE, "controller-west")
            .await
    }

    /// Starts the Service `web` of the namespace `shop` in both clusters, with two replicas each, and [`CLIENT`] in `west`. The
    /// Service is not exported.
    ///
    /// # Errors
    /// Fails if a pod does not become available.
    pub async fn start_shop(&self) -> anyhow::Result<()> {
        for (cluster, name) in [(&self.west, "west"), (&self.east, "east")] {
            cluster.apply(&WEB.replace("@cluster", name)).await?;
        }
        self.west.apply(CLIENT_MANIFEST).await?;
        for cluster in [&self.west, &self.east] {
            cluster.mark_opaque_for_third_party_proxies("shop", "web", 5000).await?;
            cluster.cluster.wait_for_deployment("shop", "web").await?;
        }
        self.west.set_up_client("shop", "client").await
    }

    /// Makes `web` of both clusters members of `web-federated`, and waits until both respond to the client.
    ///
    /// # Errors
    /// Fails if the wait times out.
    pub async fn federate(&self) -> anyhow::Result<()> {
        for cluster in [&self.west, &self.east] {
            cluster
                .kubectl("label -n shop service web mirror.linkerd.io/federated=member")
                .await?;
        }
        self.wait_for_both_clusters().await
    }

    /// Waits until `web-federated` responds from both clusters, without a failure.
    ///
    /// # Errors
    /// Fails if the wait times out.
    pub async fn wait_for_both_clusters(&self) -> anyhow::Result<()> {
        let respond = async || {
            let report = self.load("web-federated:80/ --rate=100 --requests=100").await?;
            ensure!(
                report.failed == 0 && responding_clusters(&report).len() == 2,
                "{:?} {:?}",
                report.replicas,
                report.errors
            );
            Ok(())
        };
        self.west.cluster.wait_until("both clusters respond", respond).await
    }

    /// Runs load in [`CLIENT`] and returns its report, including failures.
    ///
    /// # Errors
    /// Fails if the load cannot run.
    pub async fn load(&self, line: &str) -> anyhow::Result<Report> {
        self.west.load(CLIENT, line).await
    }
}

/// Installs the extension with these flags, or changes it.
async fn install_extension(cluster: &MeshedCluster, flags: &str) -> anyhow::Result<()> {
    let manifests = tulle(cluster, &format!("multicluster install {flags}")).await?;
    cluster.apply(&manifests).await
}

fn gateway_flag() -> String {
    format!("--set gateway.pauseImage={}", Image::Pause.reference())
}

/// Links `source` to `target`, whose name in `source` is `target_name`, with further flags of `link-gen`.
async fn link(source: &MeshedCluster, target: &MeshedCluster, target_name: &str, flags: &str) -> anyhow::Result<()> {
    let api_server = target.cluster.api_server_url();
    let line = format!("multicluster link-gen --cluster-name {target_name} --api-server-address {api_server} {flags}");
    // Kubernetes writes the token of the account shortly after the account, and the load balancer gets its address shortly after
    // the Service.
    let link = async || source.apply(&tulle(target, &line).await?).await;
    let what = format!("the link to {target_name} is applied");
    source.cluster.wait_until(&what, link).await
}

/// Runs `tulle` as the administrator of a cluster, or Linkerd's program if the cluster has its multicluster extension and the command
/// is for it, and returns its output.
///
/// # Errors
/// Fails if the command fails; the error contains its output.
pub async fn tulle(cluster: &MeshedCluster, line: &str) -> anyhow::Result<String> {
    let program = match &cluster.multicluster_program {
        Some(program) if line.starts_with("multicluster ") => program.clone(),
        _ => programs::static_binaries_dir()?.join("tulle"),
    };
    run_program(cluster, &program, line).await
}

/// Runs Linkerd's program as the administrator of a cluster, and returns its output.
///
/// # Errors
/// Fails if there is none, or if the command fails; the error contains its output.
pub async fn linkerd(cluster: &MeshedCluster, line: &str) -> anyhow::Result<String> {
    run_program(cluster, &Linkerd::from_env()?.program(), line).await
}

async fn run_program(cluster: &MeshedCluster, program: &Path, line: &str) -> anyhow::Result<String> {
    let line_with_program = format!("{} {line}", program.display());
    let mut command = cluster.cluster.command_for_path(program);
    command
        .args(line.split_whitespace())
        .env("PATH", programs::search_path());
    let Output { status, stdout, stderr } = commands::output(&line_with_program, command).await?;
    let stdout = String::from_utf8(stdout).with_context(|| format!("the output of {line_with_program}"))?;
    ensure!(
        status.success(),
        "{line_with_program}: {stdout}{}",
        String::from_utf8_lossy(&stderr).trim()
    );
    Ok(stdout)
}

/// The clusters whose replicas have responded.
pub fn responding_clusters(report: &Report) -> BTreeSet<&str> {
    let names = report.replicas.keys().filter_map(|replica| replica.split_once('/'));
    names.map(|(cluster, _)| cluster).collect()
}

/// The client of `shop`, in `west`.
pub const CLIENT: Client = Client {
    namespace: "shop",
    deployment: "client",
    container: "client",
};
const WEB: &str = include_str!("web.yaml");
/// [`CLIENT`], for a cluster that has the namespace `shop`.
pub const CLIENT_MANIFEST: &str = include_str!("client.yaml");
/// The namespace of the extension.
pub const NAMESPACE: &str = "linkerd-multicluster";
/// The Deployment of the service mirror for all Links.
pub const SERVICE_MIRROR: &str = "linkerd-service-mirror";
const CONTROLLER_OF_EAST: &str =
    "--set controllers[0].link.ref.name=east --set controllers[0].enableHeadlessServices=true";
const CONTROLLER_OF_WEST: &str = "--set controllers[0].link.ref.name=west";
const WEST_TRUST_DOMAIN: &str = "cluster.local";
const EAST_TRUST_DOMAIN: &str = "east.id";
