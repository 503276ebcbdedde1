//! Metrics of a connection: opened, closed, and bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;
use serde::Serialize;
use tulle_core::metrics::{Counter, Family, Gauge, Labels, Registry};

/// The `tcp_*` families.
#[derive(Clone)]
pub(crate) struct Families {
    open_total: Family<Counter>,
    open: Family<Gauge>,
    close_total: Family<Counter>,
    read: Family<Counter>,
    written: Family<Counter>,
}

/// The series of connections with the same labels.
pub(crate) struct ConnectionMetrics {
    families: Families,
    labels: Labels,
    open_total: Arc<Counter>,
    open: Arc<Gauge>,
    read: Arc<Counter>,
    written: Arc<Counter>,
    /// Counts the same bytes by zone, if zones are known.
    zone_traffic: Option<ZoneTraffic>,
    /// Counter of connections that ended without an error. Kept here because this is the usual end.
    closed_without_error: OnceLock<Arc<Counter>>,
}

/// Bytes of all connections between the same zones.
#[derive(Clone)]
pub(crate) struct ZoneTraffic {
    pub(crate) received: Arc<Counter>,
    pub(crate) sent: Arc<Counter>,
}

impl Families {
    pub(crate) fn new(registry: &Registry) -> Self {
        Self {
            open_total: registry.counter("tcp_open_total", "Connections opened"),
            open: registry.gauge("tcp_open_connections", "Connections open now"),
            close_total: registry.counter("tcp_close_total", "Connections closed, by the error that ended them"),
            read: registry.counter("tcp_read_bytes_total", "Bytes read from peers"),
            written: registry.counter("tcp_write_bytes_total", "Bytes written to peers"),
        }
    }

    pub(crate) fn series(&self, labels: Labels) -> Arc<ConnectionMetrics> {
        self.series_with_zone_traffic(labels, None)
    }

    pub(crate) fn series_with_zone_traffic(
        &self,
        labels: Labels,
        zone_traffic: Option<ZoneTraffic>,
    ) -> Arc<ConnectionMetrics> {
        Arc::new(ConnectionMetrics {
            families: self.clone(),
            open_total: self.open_total.get(&labels),
            open: self.open.get(&labels),
            read: self.read.get(&labels),
            written: self.written.get(&labels),
            zone_traffic,
            closed_without_error: OnceLock::new(),
            labels,
        })
    }
}

/// The open connections with the same labels, and the totals of all connections that had them.
#[derive(Serialize)]
pub(crate) struct ConnectionStatus {
    #[serde(flatten)]
    labels: BTreeMap<String, String>,
    open: i64,
    opened_total: u64,
    bytes_read: u64,
    bytes_written: u64,
}

impl Families {
    /// For each set of labels with open connections: how many are open, and the totals of all connections so far.
    pub(crate) fn snapshot(&self) -> Vec<ConnectionStatus> {
        let open = self.open.all().into_iter().filter(|(_, open)| open.get() > 0);
        open.map(|(labels, open)| ConnectionStatus {
            open: open.get(),
            opened_total: self.open_total.get(&labels).get(),
            bytes_read: self.read.get(&labels).get(),
            bytes_written: self.written.get(&labels).get(),
            labels: labels.pairs().into_iter().collect(),
        })
        .collect()
    }
}

impl ConnectionMetrics {
    pub(crate) fn record_opened(&self) {
        self.open_total.inc();
        self.open.add(1);
    }

    pub(crate) fn record_read(&self, n: u64) {
        self.read.add(n);
        if let Some(zone_traffic) = &self.zone_traffic {
            zone_traffic.received.add(n);
        }
    }

    pub(super) fn record_written(&self, n: u64) {
        self.written.add(n);
        if let Some(zone_traffic) = &self.zone_traffic {
            zone_traffic.sent.add(n);
        }
    }

    pub(crate) fn n_open(&self) -> i64 {
        self.open.get()
    }

    pub(crate) fn record_closed(&self, errno: Option<i32>) {
        self.open.add(-1);
        let counter = |errno: &str| self.families.close_total.get(&self.labels.clone().with("errno", errno));
        match errno {
            None => self.closed_without_error.get_or_init(|| counter("")).inc(),
            Some(errno) => counter(&format!("{:?}", Errno::from_raw(errno))).inc(),
        }
    }
}
