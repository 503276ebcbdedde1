//! `tulle multicluster gateways`: reads the state of the gateways from the metrics of the service mirrors.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::future::join_all;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde::Serialize;
use tokio::time::timeout;
use tulle_core::duration;
use tulle_core::names::label;

use super::extension::{self, CONTROLLER_SELECTOR};
use crate::kubernetes::forward::{self, PodPort};
use crate::kubernetes::{self, Cluster, reason, resource};
use crate::{runtime, table};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Only the gateway of this cluster
    #[arg(long, value_name = "NAME")]
    cluster_name: Option<String>,
    /// How long to wait for the metrics of the controllers
    #[arg(short, long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    wait: Duration,
    /// Output format
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Json,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    cluster_name: String,
    alive: bool,
    number_of_services: usize,
    /// In milliseconds, of the last probe; 0 while the gateway does not respond.
    latency: u64,
}

/// The state of a gateway in the metrics of its service mirror.
struct Gateway {
    cluster: String,
    alive: bool,
    latency: u64,
}

/// The gateways in the metrics of a service mirror.
struct ControllerMetrics {
    /// The names of the Links whose leases it holds.
    links: Vec<String>,
    /// The reason if the metrics were not read.
    gateways: Result<Vec<Gateway>, String>,
}

/// What the service mirrors know about gateways.
#[derive(Default)]
pub(super) struct Probes {
    /// Whether the gateway of a cluster responds.
    pub(super) alive: BTreeMap<String, bool>,
    /// Why the metrics of a service mirror were not read, by the name of its Link.
    pub(super) failures: BTreeMap<String, String>,
}

impl Probes {
    /// Checks the gateway of the cluster to which this Link leads.
    ///
    /// # Errors
    /// Fails with the reason if the gateway does not respond, or if it is not known whether it does.
    pub(super) fn check(&self, link: &str, cluster: &str) -> Result<(), String> {
        match (self.alive.get(cluster), self.failures.get(link)) {
            (Some(true), _) => Ok(()),
            (Some(false), _) => Err("it does not respond to probes".to_owned()),
            (None, Some(cause)) => Err(cause.clone()),
            (None, None) => Err("no controller has probed it".to_owned()),
        }
    }
}

/// Prints a line for each gateway. A service mirror that does not respond is reported on standard error.
///
/// # Errors
/// Fails if the extension is not installed, or if its objects cannot be read.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let mut rows = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let mut gateways = Vec::new();
        for controller in fetch_all_metrics(&cluster, args.wait).await? {
            match controller.gateways {
                Ok(found) => gateways.extend(found),
                Err(cause) => eprintln!("tulle: {cause}"),
            }
        }
        let counts = count_mirrors(&cluster).await?;
        let row = |gateway: Gateway| Row {
            number_of_services: counts.get(&gateway.cluster).copied().unwrap_or_default(),
            cluster_name: gateway.cluster,
            alive: gateway.alive,
            latency: gateway.latency,
        };
        anyhow::Ok(gateways.into_iter().map(row).collect::<Vec<_>>())
    })?;
    rows.retain(|row| args.cluster_name.as_ref().is_none_or(|name| row.cluster_name == *name));
    rows.sort();
    if args.output == Some(Output::Json) {
        let json = serde_json::to_string_pretty(&rows).context("writing JSON")?;
        return crate::print(&(json + "\n"));
    }
    let rows = rows.into_iter().map(|row| {
        let (alive, latency) = match row.alive {
            true => ("True", format!("{}ms", row.latency)),
            false => ("False", "-".to_owned()),
        };
        [
            row.cluster_name,
            alive.to_owned(),
            row.number_of_services.to_string(),
            latency,
        ]
    });
    crate::print(&table::render(&["CLUSTER", "ALIVE", "NUM_SVC", "LATENCY"], rows))
}

/// Reads from the metrics of the service mirrors whether the gateway of each cluster responds to probes. `limit` is the timeout for
/// finding the service mirrors, and also for the metrics of each.
///
/// # Errors
/// Fails with the reason if the service mirrors are not found in time.
pub(super) async fn read_probes(cluster: &Cluster, limit: Duration) -> Result<Probes, String> {
    let controllers = fetch_all_metrics(cluster, limit).await;
    let mut probes = Probes::default();
    for controller in controllers.map_err(|error| format!("{error:#}"))? {
        match controller.gateways {
            Ok(found) => {
                let alive = found.into_iter().map(|gateway| (gateway.cluster, gateway.alive));
                probes.alive.extend(alive);
            }
            Err(cause) => {
                let failures = controller.links.into_iter().map(|link| (link, cause.clone()));
                probes.failures.extend(failures);
            }
        }
    }
    Ok(probes)
}

/// Reads the metrics of all service mirrors concurrently, so that a slow one does not delay the others.
async fn fetch_all_metrics(cluster: &Cluster, limit: Duration) -> anyhow::Result<Vec<ControllerMetrics>> {
    let pods = timeout(limit, leading_pods(cluster)).await;
    let pods = pods.map_err(|_elapsed| anyhow!("the controllers were not found within {limit:?}"))??;
    let controllers = pods
        .iter()
        .map(|(pod, links)| fetch_controller_metrics(cluster, pod, links, limit));
    Ok(join_all(controllers).await)
}

async fn fetch_controller_metrics(
    cluster: &Cluster,
    pod: &Pod,
    links: &[String],
    limit: Duration,
) -> ControllerMetrics {
    let page = match timeout(limit, fetch_metrics_page(cluster, pod, limit)).await {
        Ok(page) => page.map_err(|error| format!("{error:#}")),
        Err(_) => {
            let (namespace, name) = (resource::namespace(pod), pod.name_any());
            Err(format!(
                "the metrics of pod {namespace}/{name} were not read within {limit:?}"
            ))
        }
    };
    ControllerMetrics {
        links: links.to_vec(),
        gateways: page.map(|page| parse_gateways(&page).collect()),
    }
}

/// The pods of service mirrors that hold leases of Links, each with the names of these Links.
async fn leading_pods(cluster: &Cluster) -> anyhow::Result<Vec<(Pod, Vec<String>)>> {
    let namespace = extension::namespace(cluster).await?;
    let namespace = namespace.context(
        "the multicluster extension is not installed (no namespace has the label linkerd.io/extension=multicluster); \
         `tulle multicluster install` prints its manifests",
    )?;
    let mut leaders = leaders(cluster, &namespace).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let pods = cluster
        .list(&pods, &ListParams::default().labels(CONTROLLER_SELECTOR))
        .await;
    let pods = pods.map_err(|error| anyhow!("listing pods of {namespace}: {}", reason(&error)))?;
    let leading = pods.into_iter().filter_map(|pod| {
        let links = leaders.remove(&pod.name_any())?;
        Some((pod, links))
    });
    Ok(leading.collect())
}

/// Parses the gateways on the metrics page of a service mirror.
fn parse_gateways(page: &str) -> impl Iterator<Item = Gateway> {
    let (alive, latency) = (
        gauge_by_cluster(page, "gateway_alive"),
        gauge_by_cluster(page, "gateway_latency"),
    );
    let enabled = gauge_by_cluster(page, "gateway_enabled").into_iter();
    enabled.filter(|(_, value)| *value == 1).map(move |(cluster, _)| {
        let alive = alive.get(&cluster) == Some(&1);
        Gateway {
            latency: latency.get(&cluster).copied().filter(|_| alive).unwrap_or_default(),
            cluster,
            alive,
        }
    })
}

/// The names of the Links whose leases each pod holds.
async fn leaders(cluster: &Cluster, namespace: &str) -> anyhow::Result<BTreeMap<String, Vec<String>>> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let leases = cluster.list(&leases, &ListParams::default()).await;
    let leases = leases.map_err(|error| anyhow!("listing Leases of {namespace}: {}", reason(&error)))?;
    let mut leaders = BTreeMap::<String, Vec<String>>::new();
    for lease in leases {
        let name = lease.name_any();
        let link = name.strip_prefix("service-mirror-write-");
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        if let (Some(link), Some(holder)) = (link, holder) {
            leaders.entry(holder).or_default().push(link.to_owned());
        }
    }
    Ok(leaders)
}

async fn fetch_metrics_page(cluster: &Cluster, pod: &Pod, limit: Duration) -> anyhow::Result<String> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut mirrors = containers.filter(|container| ["service-mirror", "controller"].contains(&&*container.name));
    let (namespace, name) = (resource::namespace(pod), pod.name_any());
    let port = mirrors.find_map(|container| resource::ports(container).find(|(name, _)| name.ends_with("-admin")));
    let (_, port) = port.with_context(|| format!("pod {namespace}/{name} has no port for metrics"))?;
    let target = PodPort {
        namespace,
        pod: &name,
        port,
    };
    forward::get_within(cluster, target, "/metrics", limit).await
}

/// The number of mirrors of each cluster.
async fn count_mirrors(cluster: &Cluster) -> anyhow::Result<BTreeMap<String, usize>> {
    let mirrored = ListParams::default().labels(&format!("{}=true", label::MIRRORED_SERVICE));
    let services = cluster
        .list(&Api::<Service>::all(cluster.client.clone()), &mirrored)
        .await;
    let services = services.map_err(|error| anyhow!("listing mirrors: {}", reason(&error)))?;
    let mut counts = BTreeMap::new();
    for service in services {
        if let Some(name) = service.labels().get(label::MIRRORED_CLUSTER) {
            *counts.entry(name.clone()).or_default() += 1;
        }
    }
    Ok(counts)
}

/// The values of a gauge on a metrics page, by cluster.
fn gauge_by_cluster(page: &str, name: &str) -> BTreeMap<String, u64> {
    let values = page.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
        let mut labels = labels.split(',');
        let cluster = labels.find_map(|label| label.strip_prefix("target_cluster_name=\"")?.strip_suffix('"'))?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "milliseconds and flags"
        )]
        let value = value.trim().parse::<f64>().ok()? as u64;
        Some((cluster.to_owned(), value))
    });
    values.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauges_are_parsed_by_cluster() {
        let page = "# HELP gateway_alive x\ngateway_alive{target_cluster_name=\"north\"} 0\n\
                    gateway_alive{target_cluster_name=\"east\"} 1\ngateway_latency{target_cluster_name=\"east\"} 12.0\n";
        let entry = |name: &str, value| (name.to_owned(), value);
        assert_eq!(
            gauge_by_cluster(page, "gateway_alive"),
            [entry("north", 0), entry("east", 1)].into()
        );
        assert_eq!(gauge_by_cluster(page, "gateway_latency"), [entry("east", 12)].into());
        assert_eq!(gauge_by_cluster(page, "gateway_enabled"), [].into());
    }

    #[test]
    fn a_gateway_without_metrics_is_reported_with_the_cause_of_its_link() {
        let text = str::to_owned;
        let probes = Probes {
            alive: [(text("east"), true), (text("north"), false)].into(),
            failures: [(text("to-south"), text("no response within 10s"))].into(),
        };
        let problem = |link, cluster| probes.check(link, cluster).err();
        assert_eq!(problem("east", "east"), None);
        assert_eq!(problem("north", "north"), Some(text("it does not respond to probes")));
        assert_eq!(problem("to-south", "south"), Some(text("no response within 10s")));
        assert_eq!(problem("west", "west"), Some(text("no controller has probed it")));
    }
}
