//! `tulle multicluster gateways`: asks the service mirrors for what they know of the gateways.

use std::collections::BTreeSet;

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde::Serialize;
use tulle_core::names::label;

use super::extension;
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

/// Prints a line for each gateway.
///
/// # Errors
/// Fails if the extension is not installed, or if a service mirror does not respond.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let mut rows = runtime()?.block_on(async { rows(args, &flags.connect().await?).await })?;
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
    crate::print(&table::text(&["CLUSTER", "ALIVE", "NUM_SVC", "LATENCY"], rows))
}

async fn rows(args: &Args, cluster: &Cluster) -> anyhow::Result<Vec<Row>> {
    let namespace = extension::namespace(cluster).await?;
    let namespace = namespace.context(
        "the multicluster extension is not installed (no namespace has the label linkerd.io/extension=multicluster); \
         `tulle multicluster install` prints its manifests",
    )?;
    let leaders = leaders(cluster, &namespace).await?;
    let mut selector = "component in (linkerd-service-mirror, controller)".to_owned();
    if let Some(name) = &args.cluster_name {
        selector += &format!(",{}={name}", label::MIRRORED_CLUSTER);
    }
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let pods = cluster.list(&pods, &ListParams::default().labels(&selector)).await;
    let pods = pods.map_err(|error| anyhow!("listing pods of {namespace}: {}", reason(&error)))?;
    let mut rows = Vec::new();
    for pod in pods.iter().filter(|pod| leaders.contains(&pod.name_any())) {
        let page = metrics(cluster, &namespace, pod).await?;
        let Some(name) = pod.labels().get(label::MIRRORED_CLUSTER) else {
            continue;
        };
        if gauge(&page, "gateway_enabled", name) != Some(1) {
            continue;
        }
        let alive = gauge(&page, "gateway_alive", name) == Some(1);
        rows.push(Row {
            number_of_services: count_mirrors(cluster, name).await?,
            latency: gauge(&page, "gateway_latency", name)
                .filter(|_| alive)
                .unwrap_or_default(),
            cluster_name: name.clone(),
            alive,
        });
    }
    Ok(rows)
}

/// The pods that hold the lease of a Link.
async fn leaders(cluster: &Cluster, namespace: &str) -> anyhow::Result<BTreeSet<String>> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let leases = cluster.list(&leases, &ListParams::default()).await;
    let leases = leases.map_err(|error| anyhow!("listing Leases of {namespace}: {}", reason(&error)))?;
    let of_links = leases
        .into_iter()
        .filter(|lease| lease.name_any().contains("service-mirror-write"));
    Ok(of_links.filter_map(|lease| lease.spec?.holder_identity).collect())
}

async fn metrics(cluster: &Cluster, namespace: &str, pod: &Pod) -> anyhow::Result<String> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut mirrors = containers.filter(|container| ["service-mirror", "controller"].contains(&&*container.name));
    let name = pod.name_any();
    let port = mirrors.find_map(|container| ports(container).find(|(name, _)| name.ends_with("-admin")));
    let (_, port) = port.with_context(|| format!("pod {namespace}/{name} has no port for metrics"))?;
    forward::get(cluster, namespace, &name, port, "/metrics").await
}

async fn count_mirrors(cluster: &Cluster, name: &str) -> anyhow::Result<usize> {
    let labels = format!("{}=true,{}={name}", label::MIRRORED_SERVICE, label::MIRRORED_CLUSTER);
    let services = cluster
        .list(
            &Api::<Service>::all(cluster.client.clone()),
            &ListParams::default().labels(&labels),
        )
        .await;
    let services = services.map_err(|error| anyhow!("listing mirrors: {}", reason(&error)))?;
    Ok(services.len())
}

/// The value of a gauge for this cluster on a metrics page.
fn gauge(page: &str, name: &str, cluster: &str) -> Option<u64> {
    let of_cluster = format!("target_cluster_name=\"{cluster}\"");
    page.lines().find_map(|line| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
        let is_of_cluster = labels.split(',').any(|label| label == of_cluster);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "milliseconds and flags"
        )]
        is_of_cluster.then(|| value.trim().parse::<f64>().ok().map(|value| value as u64))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauges_are_those_of_the_cluster() {
        let page = "# HELP gateway_alive x\ngateway_alive{target_cluster_name=\"north\"} 0\n\
                    gateway_alive{target_cluster_name=\"east\"} 1\ngateway_latency{target_cluster_name=\"east\"} 12.0\n";
        assert_eq!(gauge(page, "gateway_alive", "east"), Some(1));
        assert_eq!(gauge(page, "gateway_alive", "north"), Some(0));
        assert_eq!(gauge(page, "gateway_latency", "east"), Some(12));
        assert_eq!(gauge(page, "gateway_alive", "west"), None);
    }
}
