//! `tulle multicluster gateways`: reads the state of the gateways from the metrics of the service mirrors.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde::Serialize;
use tokio::time::timeout;
use tulle_core::names::label;

use super::extension::{self, CONTROLLER_SELECTOR};
use crate::kubernetes::resource::ports;
use crate::kubernetes::{self, Cluster, forward, reason};
use crate::{runtime, table};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Only the gateway of this cluster
    #[arg(long, value_name = "NAME")]
    cluster_name: Option<String>,
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

/// Prints a line for each gateway. A service mirror that does not respond is reported on standard error.
///
/// # Errors
/// Fails if the extension is not installed, or if its objects cannot be read.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let mut rows = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let gateways = fetch_gateways(&cluster).await?;
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

/// Reads from the metrics of the service mirrors whether the gateway of each cluster responds to probes.
///
/// # Errors
/// Fails with the reason if the metrics of the service mirrors are not read in time.
pub(super) async fn gateway_liveness(cluster: &Cluster, limit: Duration) -> Result<BTreeMap<String, bool>, String> {
    match timeout(limit, fetch_gateways(cluster)).await {
        Ok(Ok(found)) => Ok(found
            .into_iter()
            .map(|gateway| (gateway.cluster, gateway.alive))
            .collect()),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(_) => Err(format!("the metrics of the controllers were not read within {limit:?}")),
    }
}

async fn fetch_gateways(cluster: &Cluster) -> anyhow::Result<Vec<Gateway>> {
    let namespace = extension::namespace(cluster).await?;
    let namespace = namespace.context(
        "the multicluster extension is not installed (no namespace has the label linkerd.io/extension=multicluster); \
         `tulle multicluster install` prints its manifests",
    )?;
    let leaders = leaders(cluster, &namespace).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let pods = cluster
        .list(&pods, &ListParams::default().labels(CONTROLLER_SELECTOR))
        .await;
    let pods = pods.map_err(|error| anyhow!("listing pods of {namespace}: {}", reason(&error)))?;
    let mut found = Vec::new();
    for pod in pods.iter().filter(|pod| leaders.contains(&pod.name_any())) {
        match fetch_metrics(cluster, &namespace, pod).await {
            Ok(page) => found.extend(parse_gateways(&page)),
            Err(error) => eprintln!("tulle: {error:#}"),
        }
    }
    Ok(found)
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

/// The pods that hold the lease of a Link.
async fn leaders(cluster: &Cluster, namespace: &str) -> anyhow::Result<BTreeSet<String>> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let leases = cluster.list(&leases, &ListParams::default()).await;
    let leases = leases.map_err(|error| anyhow!("listing Leases of {namespace}: {}", reason(&error)))?;
    let link_leases = leases
        .into_iter()
        .filter(|lease| lease.name_any().contains("service-mirror-write"));
    Ok(link_leases.filter_map(|lease| lease.spec?.holder_identity).collect())
}

async fn fetch_metrics(cluster: &Cluster, namespace: &str, pod: &Pod) -> anyhow::Result<String> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut mirrors = containers.filter(|container| ["service-mirror", "controller"].contains(&&*container.name));
    let name = pod.name_any();
    let port = mirrors.find_map(|container| ports(container).find(|(name, _)| name.ends_with("-admin")));
    let (_, port) = port.with_context(|| format!("pod {namespace}/{name} has no port for metrics"))?;
    forward::get(cluster, namespace, &name, port, "/metrics").await
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
}
