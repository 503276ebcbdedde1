//! What is counted of connections: how they are carried, what they turned out to be, what their bytes cost, and the routes of
//! those that nobody looks into.

use std::sync::{Arc, OnceLock};

use tulle_core::{
    addr::Addr,
    metrics::{Counter, Family, Labels, Registry},
};

use crate::{
    metrics::hosts::{Hosts, SaidBy},
    net::{counts::Cost, detected},
    outbound::metrics::{with_meta, with_place, with_target},
    policy::{endpoint::Locality, meta::Meta},
};

#[derive(Clone)]
pub(crate) struct Families {
    protocols: Family<Counter>,
    detected: detected::Families,
    costs: Family<Counter>,
    tcp_routes: RouteFamilies,
    tls_routes: RouteFamilies,
    /// Whether routes of TLS are counted by the name that clients ask for.
    by_name: Option<SaidBy>,
}

/// Families of the routes of bytes.
#[derive(Clone)]
struct RouteFamilies {
    opened: Family<Counter>,
    closed: Family<Counter>,
}

/// How the connections to a destination are carried, as they are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
    Detect,
    Opaque,
    Tls,
}

/// A route of bytes.
pub(crate) struct RouteSeries {
    families: RouteFamilies,
    labels: Labels,
    /// Those for each name, where connections of TLS are counted by it.
    hosts: Option<(Hosts<Passages>, SaidBy)>,
    /// Connections without a name of their own.
    unnamed: Passages,
}

/// The connections of a route that share their labels.
#[derive(Clone)]
pub(crate) struct Passages {
    labels: Labels,
    opened: Arc<Counter>,
    closed: Family<Counter>,
    /// Those that ended without an error, which almost all do.
    ended: Arc<OnceLock<Arc<Counter>>>,
}

impl Families {
    pub(crate) fn new(registry: &Registry, by_name: Option<SaidBy>) -> Self {
        let routes = |protocol: &str| RouteFamilies {
            opened: registry.counter(
                &format!("outbound_{protocol}_route_open_total"),
                "Connections that came to a route",
            ),
            closed: registry.counter(
                &format!("outbound_{protocol}_route_close_total"),
                "Connections that are over, by the error that ended them",
            ),
        };
        Self {
            protocols: registry.counter(
                "outbound_tcp_protocol_connections_total",
                "Connections by how their destination is carried",
            ),
            detected: detected::Families::new(registry, "outbound"),
            costs: registry.counter(
                "outbound_tcp_transfer_cost_bytes_total",
                "Bytes to and from endpoints, by whether these are in our zone",
            ),
            tcp_routes: routes("tcp"),
            tls_routes: routes("tls"),
            by_name,
        }
    }

    /// Connections that are carried so, under the policy of `parent`.
    pub(in crate::outbound) fn carried(&self, protocol: Protocol, parent: &Meta) -> Arc<Counter> {
        let labels = Labels::new().with("protocol", protocol.name());
        self.protocols.get(&with_place(labels, "parent", parent))
    }

    pub(in crate::outbound) fn detected(&self, parent: &Meta) -> detected::Series {
        self.detected.series(with_place(Labels::new(), "parent", parent))
    }

    /// The bytes of endpoints in one place.
    pub(in crate::outbound) fn cost(&self, locality: Locality) -> Cost {
        let zone = match locality {
            Locality::Unknown => "Unknown",
            Locality::Local => "Local",
            Locality::Remote => "Remote",
        };
        let bytes = |op| {
            self.costs
                .get(&Labels::new().with("op", op).with("zone_locality", zone))
        };
        Cost {
            received: bytes("Recv"),
            sent: bytes("Send"),
        }
    }

    /// A route of bytes that go to what was dialled.
    pub(in crate::outbound) fn tcp_route(&self, parent: &Meta, route: &Meta, dst: &Addr) -> RouteSeries {
        let labels = with_target(route_labels(parent, route), dst);
        RouteSeries {
            unnamed: self.tcp_routes.passages(labels.clone()),
            families: self.tcp_routes.clone(),
            labels,
            hosts: None,
        }
    }

    /// A route of TLS.
    pub(in crate::outbound) fn tls_route(&self, parent: &Meta, route: &Meta) -> RouteSeries {
        let labels = route_labels(parent, route);
        RouteSeries {
            unnamed: self.tls_routes.passages(labels.clone().with("hostname", "")),
            families: self.tls_routes.clone(),
            labels,
            hosts: self.by_name.map(|said_by| (Hosts::default(), said_by)),
        }
    }
}

impl Protocol {
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

impl RouteFamilies {
    fn passages(&self, labels: Labels) -> Passages {
        Passages {
            opened: self.opened.get(&labels),
            closed: self.closed.clone(),
            ended: Arc::default(),
            labels,
        }
    }
}

impl RouteSeries {
    /// Counts a connection that came; `name` is what its TLS asks for.
    pub(in crate::outbound) fn open(&self, name: Option<&str>) -> Passages {
        let named = self.hosts.as_ref().zip(name).and_then(|((hosts, said_by), name)| {
            hosts.get(name, *said_by, |name| {
                self.families.passages(self.labels.clone().with("hostname", name))
            })
        });
        let passages = named.unwrap_or_else(|| self.unnamed.clone());
        passages.opened.inc();
        passages
    }
}

impl Passages {
    /// Counts the end of a connection; `error` is empty where there was none.
    pub(in crate::outbound) fn close(&self, error: &'static str) {
        let by = || self.closed.get(&self.labels.clone().with("error", error));
        match error {
            "" => self.ended.get_or_init(by).inc(),
            _ => by().inc(),
        }
    }
}

fn route_labels(parent: &Meta, route: &Meta) -> Labels {
    with_meta(with_place(Labels::new(), "parent", parent), "route", route)
}
