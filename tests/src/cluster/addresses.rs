//! The addresses and names of a cluster. Connected clusters have different addresses and names.

use std::net::{IpAddr, Ipv4Addr};

/// The address ranges of a cluster, its DNS domain and the names of its zones.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClusterAddresses {
    index: u8,
    /// `cluster.local`
    pub domain: &'static str,
    zone_prefix: &'static str,
}

impl ClusterAddresses {
    /// The addresses and names of a cluster that is not connected to another, and of the first of two connected clusters.
    pub const FIRST: Self = Self {
        index: 0,
        domain: "cluster.local",
        zone_prefix: "zone-",
    };
    /// The addresses and names of a cluster that is connected to one with [`ClusterAddresses::FIRST`].
    pub const SECOND: Self = Self {
        index: 1,
        domain: "east.test",
        zone_prefix: "east-zone-",
    };

    /// The address of node `number` in the network of the nodes.
    pub(super) fn node(self, number: u8) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(172, 30, self.index, number))
    }

    /// The router from the network of the nodes to other networks. Only [`super::ClusterPair`] has one; without it, no host has
    /// this address.
    pub(super) fn router(self) -> IpAddr {
        self.node(254)
    }

    /// All pods.
    pub(super) fn pods(self) -> String {
        format!("10.{}.0.0/16", 23 + self.index)
    }

    /// The pods of node `number`.
    pub(super) fn pods_of_node(self, number: u8) -> String {
        format!("10.{}.{number}.0/24", 23 + self.index)
    }

    /// All Services.
    pub(super) fn services(self) -> String {
        format!("10.{}.0.0/16", 247 + self.index)
    }

    /// The Service `kubernetes`, which has the first address of all Services.
    pub(super) fn api_service(self) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(10, 247 + self.index, 0, 1))
    }

    /// The Service of DNS.
    pub(super) fn dns_service(self) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(10, 247 + self.index, 0, 10))
    }

    /// All Services of type `LoadBalancer`, in a network of their own.
    pub(super) fn load_balancers(self) -> String {
        format!("198.18.{}.0/24", self.index)
    }

    /// The address of the load balancer `number`.
    pub(super) fn load_balancer(self, number: u8) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(198, 18, self.index, number))
    }

    /// The zone of node `number`.
    pub(super) fn zone(self, number: u8) -> String {
        format!("{}{number}", self.zone_prefix)
    }
}
