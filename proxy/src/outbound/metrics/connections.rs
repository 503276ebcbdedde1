//! Metrics of connections: protocol of the destination, detected protocol, bytes by zone, and routes of opaque and TLS
//! connections.

use std::sync::{Arc, OnceLock};

use tulle_core::{
    addr::Addr,
    metrics::{Counter, Family, Labels, Registry},
};

use crate::{
    metrics::hosts::{HostMap, HostSource},
    net::{detect_metrics, tcp_metrics::ZoneTraffic},
    outbound::metrics::labels::{with_meta, with_meta_and_port, with_target},
    policy::{endpoint::Locality, meta::Meta},
};

#[derive(Clone)]
pub(crate) struct Families {
    protocols: Family<Counter>,
    detect: detect_metrics::Families,
    zone_traffic: Family<Counter>,
    tcp_routes: OpaqueRouteFamilies,
    tls_routes: OpaqueRouteFamilies,
    /// `None` if connections of TLS routes are not counted by server name (SNI).
    host_source: Option<HostSource>,
}

/// Metric families of opaque or TLS routes.
#[derive(Clone)]
struct OpaqueRouteFamilies {
    opened: Family<Counter>,
    closed: Family<Counter>,
}

/// Protocol of the connections to a destination, as the `protocol` label names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DestinationProtocol {
    Http1,
    Http2,
    Detect,
    Opaque,
    Tls,
}

/// The series of an opaque or TLS route.
pub(crate) struct OpaqueRouteSeries {
    families: OpaqueRouteFamilies,
    labels: Labels,
    /// Counters of each server name, if TLS connections are counted by it.
    by_host: Option<(HostMap<OpaqueRouteCounters>, HostSource)>,
    /// Counters of connections without a server name, or whose name has no counters of its own.
    without_host: OpaqueRouteCounters,
}

/// Counters of the connections of a route that have the same labels.
#[derive(Clone)]
pub(crate) struct OpaqueRouteCounters {
    labels: Labels,
    opened: Arc<Counter>,
    closed: Family<Counter>,
    /// Counter of connections that ended without an error. Almost all do, so this counter is looked up only once.
    closed_ok: Arc<OnceLock<Arc<Counter>>>,
}

impl Families {
    pub(crate) fn new(registry: &Registry, host_source: Option<HostSource>) -> Self {
        let routes = |protocol: &str| OpaqueRouteFamilies {
            opened: registry.counter(
                &format!("outbound_{protocol}_route_open_total"),
                "Connections opened on a route",
            ),
            closed: registry.counter(
                &format!("outbound_{protocol}_route_close_total"),
                "Connections closed, by the error that ended them",
            ),
        };
        Self {
            protocols: registry.counter(
                "outbound_tcp_protocol_connections_total",
                "Connections by protocol of their destination",
            ),
            detect: detect_metrics::Families::new(registry, "outbound"),
            zone_traffic: registry.counter(
                "outbound_tcp_transfer_cost_bytes_total",
                "Bytes to and from endpoints, by whether the endpoint is in the same zone",
            ),
            tcp_routes: routes("tcp"),
            tls_routes: routes("tls"),
            host_source,
        }
    }

    /// Counts connections with this protocol under the policy of `parent`.
    pub(in crate::outbound) fn protocol_counter(&self, protocol: DestinationProtocol, parent: &Meta) -> Arc<Counter> {
        let labels = Labels::new().with("protocol", protocol.name());
        self.protocols.get(&with_meta_and_port(labels, "parent", parent))
    }

    pub(in crate::outbound) fn detect_series(&self, parent: &Meta) -> detect_metrics::Series {
        self.detect.series(with_meta_and_port(Labels::new(), "parent", parent))
    }

    /// Byte counters of endpoints with this locality.
    pub(in crate::outbound) fn zone_traffic(&self, locality: Locality) -> ZoneTraffic {
        let zone = match locality {
            Locality::Unknown => "Unknown",
            Locality::Local => "Local",
            Locality::Remote => "Remote",
        };
        let bytes = |op| {
            self.zone_traffic
                .get(&Labels::new().with("op", op).with("zone_locality", zone))
        };
        ZoneTraffic {
            received: bytes("Recv"),
            sent: bytes("Send"),
        }
    }

    /// The series of an opaque route; `dst` is the dialled address or name.
    pub(in crate::outbound) fn tcp_route(&self, parent: &Meta, route: &Meta, dst: &Addr) -> OpaqueRouteSeries {
        let labels = with_target(route_labels(parent, route), dst);
        OpaqueRouteSeries {
            without_host: self.tcp_routes.counters(labels.clone()),
            families: self.tcp_routes.clone(),
            labels,
            by_host: None,
        }
    }

    pub(in crate::outbound) fn tls_route(&self, parent: &Meta, route: &Meta) -> OpaqueRouteSeries {
        let labels = route_labels(parent, route);
        OpaqueRouteSeries {
            without_host: self.tls_routes.counters(labels.clone().with("hostname", "")),
            families: self.tls_routes.clone(),
            labels,
            by_host: self.host_source.map(|source| (HostMap::default(), source)),
        }
    }
}

impl DestinationProtocol {
    pub(in crate::outbound) fn name(self) -> &'static str {
        match self {
            Self::Http1 => "http/1",
            Self::Http2 => "http/2",
            Self::Detect => "detect",
            Self::Opaque => "opaq",
            Self::Tls => "tls",
        }
    }
}

impl OpaqueRouteFamilies {
    fn counters(&self, labels: Labels) -> OpaqueRouteCounters {
        OpaqueRouteCounters {
            opened: self.opened.get(&labels),
            closed: self.closed.clone(),
            closed_ok: Arc::default(),
            labels,
        }
    }
}

impl OpaqueRouteSeries {
    /// Counts an opened connection; `name` is its server name (SNI).
    pub(in crate::outbound) fn record_open(&self, name: Option<&str>) -> OpaqueRouteCounters {
        let host_counters = self.by_host.as_ref().zip(name).and_then(|((hosts, source), name)| {
            hosts.get(name, *source, |name| {
                self.families.counters(self.labels.clone().with("hostname", name))
            })
        });
        let counters = host_counters.unwrap_or_else(|| self.without_host.clone());
        counters.opened.inc();
        counters
    }
}

impl OpaqueRouteCounters {
    /// Counts a closed connection; `error` is empty if there was none.
    pub(in crate::outbound) fn record_close(&self, error: &'static str) {
        let counter = || self.closed.get(&self.labels.clone().with("error", error));
        match error {
            "" => self.closed_ok.get_or_init(counter).inc(),
            _ => counter().inc(),
        }
    }
}

fn route_labels(parent: &Meta, route: &Meta) -> Labels {
    with_meta(with_meta_and_port(Labels::new(), "parent", parent), "route", route)
}
