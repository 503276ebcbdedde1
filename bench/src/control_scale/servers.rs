//! Edits of Servers, and the latency from each edit to a subscriber.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt as _};
use hdrhistogram::Histogram;
use tokio::time::{Instant, sleep_until};

use super::cluster::Cluster;
use super::streams::MAX_LATENCY_US;
use super::subscribers::{Subscribers, Subscription};
use crate::scale::run_concurrently;

/// Creates a Server for the pods of each of the first `n_servers` Services.
pub(super) async fn create(cluster: &Cluster, n_servers: usize) -> anyhow::Result<()> {
    run_concurrently(stream::iter(0..n_servers).map(|service| cluster.apply_server(service, "HTTP/1"))).await
}

/// Returns a subscription to the inbound policy of the first pod of each of the first `n_servers` Services.
pub(super) fn subscriptions(cluster: &Cluster, n_servers: usize) -> Vec<Subscription> {
    (0..n_servers)
        .map(|service| first_pod_subscription(cluster, service))
        .collect()
}

/// Edits each Server once within `duration`. Returns the latencies from write to subscriber, in microseconds.
pub(super) async fn edit_all(
    cluster: &Cluster,
    subscribers: &Subscribers,
    n_servers: usize,
    duration: Duration,
) -> anyhow::Result<Histogram<u64>> {
    let start = Instant::now();
    let interval = duration.div_f64(n_servers as f64);
    let edits = (0..n_servers).map(async |service| {
        let subscription = first_pod_subscription(cluster, service);
        let before = subscribers.state(subscription);
        sleep_until(start + interval * u32::try_from(service).context("too many Services")?).await;
        let written_at = Instant::now();
        cluster.apply_server(service, "HTTP/2").await?;
        let changed_at = subscribers.wait_for_message_after(subscription, written_at).await?;
        ensure!(
            subscribers.state(subscription) != before,
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

fn first_pod_subscription(cluster: &Cluster, service: usize) -> Subscription {
    let pod = cluster.initial_endpoints(service)[0].pod;
    Subscription::InboundPolicy { pod }
}
