//! Metrics of the service mirror.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tulle_core::metrics::{Counter, Family, Gauge, Registry};

use super::gateway::GatewayMetrics;

pub(super) struct Metrics {
    pub(super) gateway: GatewayMetrics,
    pub(super) synced: Family<Gauge>,
    pub(super) credentials_expiry: Family<Gauge>,
    pub(super) errors: Family<Counter>,
    pub(super) repairs: Family<Counter>,
}

/// Sets a gauge to 0 when it is dropped, because its value is then unknown.
pub(super) struct ZeroOnDrop(pub(super) Arc<Gauge>);

/// The number of users of the series of each cluster in this process. While a Link replaces another one, both use them.
#[derive(Clone, Default)]
pub(super) struct SeriesUsers(Arc<Mutex<HashMap<String, usize>>>);

/// The series of a linked cluster. They end when the last user is dropped: with the Link, or when another replica is the leader.
pub(super) struct ClusterSeries {
    registry: Registry,
    users: SeriesUsers,
    cluster: String,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            gateway: GatewayMetrics::new(registry),
            synced: registry.gauge(
                "tulle_mirror_remote_synced",
                "Whether the exported Services of a linked cluster are known and up to date.",
            ),
            credentials_expiry: registry.gauge(
                "tulle_mirror_credentials_expiry_seconds",
                "Seconds until the credentials for a linked cluster expire, updated every minute.",
            ),
            errors: registry.counter("tulle_mirror_errors_total", "Failures of mirroring, by reason."),
            repairs: registry.counter(
                "service_mirror_endpoint_repairs",
                "Comparisons of all mirrors with the exported Services.",
            ),
        }
    }
}

impl Drop for ZeroOnDrop {
    fn drop(&mut self) {
        self.0.set(0);
    }
}

impl ClusterSeries {
    pub(super) fn new(registry: &Registry, users: &SeriesUsers, cluster: String) -> Self {
        *users.0.lock().entry(cluster.clone()).or_default() += 1;
        Self {
            registry: registry.clone(),
            users: users.clone(),
            cluster,
        }
    }

    pub(super) fn cluster(&self) -> &str {
        &self.cluster
    }
}

impl Drop for ClusterSeries {
    fn drop(&mut self) {
        // A new user waits for the lock, so its series are not removed.
        let mut users = self.users.0.lock();
        let n_others = users.remove(&self.cluster).unwrap_or_default().saturating_sub(1);
        if n_others > 0 {
            users.insert(self.cluster.clone(), n_others);
            return;
        }
        self.registry.remove_series("target_cluster_name", &self.cluster);
        // The series of the cluster of this process have the label `cluster="local"`. They stay, also if a Link has this name.
        if self.cluster != "local" {
            self.registry.remove_series("cluster", &self.cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::metrics::Labels;

    use super::*;
    use crate::mirror::gateway::cluster_label;

    #[test]
    fn the_series_of_a_cluster_end_with_its_link() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry);
        let sizes = registry.gauge("service_cache_size", "Objects of this kind that are known.");
        for cluster in ["east", "local"] {
            metrics.synced.get(&cluster_label(cluster)).set(1);
            let errors = cluster_label(cluster).with("reason", "Unreadable");
            metrics.errors.get(&errors).inc();
            sizes.get(&Labels::new().with("cluster", cluster)).set(3);
        }
        let users = SeriesUsers::default();
        let [first, second] = ["east", "east"].map(|name| ClusterSeries::new(&registry, &users, name.to_owned()));
        drop(first);
        assert!(registry.render().contains("\"east\""));
        drop(second);
        let page = registry.render();
        assert!(!page.contains("\"east\""), "{page}");
        let synced = "tulle_mirror_remote_synced{target_cluster_name=\"local\"} 1\n";
        assert!(page.contains(synced), "{page}");

        drop(ClusterSeries::new(&registry, &users, "local".to_owned()));
        let page = registry.render();
        assert!(!page.contains("target_cluster_name"), "{page}");
        let size = "service_cache_size{cluster=\"local\"} 3\n";
        assert!(page.contains(size), "{page}");
    }
}
