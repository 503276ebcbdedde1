//! Edits of Servers, and the latency from each edit to a subscriber.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures_util::future::try_join_all;
use hdrhistogram::Histogram;
use tokio::time::{Instant, sleep_until};

use super::cluster::Cluster;
use super::streams::MAX_LATENCY_US;
use super::views::{Subscription, Views};

/// Creates a Server for the pods of each Service.
pub(super) async fn create(cluster: &Cluster, n_services: usize) -> anyhow::Result<()> {
    for service in 0..n_services {
        cluster.apply_server(service, "HTTP/1").await?;
    }
    Ok(())
}

/// Returns a stream for the first pod of each Service.
pub(super) fn subscriptions(cluster: &Cluster, n_services: usize) -> Vec<Subscription> {
    (0..n_services).map(|service| subscription(cluster, service)).collect()
}

/// Edits each Server once within `duration`. Returns the latencies from write to subscriber, in microseconds.
pub(super) async fn edit_all(
    cluster: &Cluster,
    views: &Views,
    n_services: usize,
    duration: Duration,
) -> anyhow::Result<Histogram<u64>> {
    let start = Instant::now();
    let interval = duration.div_f64(n_services as f64);
    let edits = (0..n_services).map(async |service| {
        let subscription = subscription(cluster, service);
        let before = views.view(subscription);
        sleep_until(start + interval * u32::try_from(service).context("too many Services")?).await;
        let written_at = Instant::now();
        cluster.apply_server(service, "HTTP/2").await?;
        let changed_at = views.changed_since(subscription, written_at).await?;
        ensure!(
            views.view(subscription) != before,
            "the policy of {subscription:?} is the same after the edit of its Server"
        );
        anyhow::Ok(changed_at - written_at)
    });
    let mut latencies = Histogram::new_with_max(MAX_LATENCY_US, 3).context("making a histogram")?;
    for latency in try_join_all(edits).await? {
        latencies.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
    }
    Ok(latencies)
}

fn subscription(cluster: &Cluster, service: usize) -> Subscription {
    let pod = cluster.initial_endpoints(service)[0].pod;
    Subscription::InboundPolicy { pod }
}
