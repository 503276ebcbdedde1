//! The addresses and names of a cluster. Connected clusters have different addresses and names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address ranges of a cluster, its DNS domain and the names of its zones.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClusterAddresses {
    index: u8,
    dual_stack: bool,
    /// `cluster.local`
    pub domain: &'static str,
    zone_prefix: &'static str,
}

impl ClusterAddresses {
    /// The addresses and names of a cluster that is not connected to another, and of the first of two connected clusters.
    pub const FIRST: Self = Self {
        index: 0,
        dual_stack: false,
        domain: "cluster.local",
        zone_prefix: "zone-",
    };
    /// The addresses and names of a cluster that is connected to one with [`ClusterAddresses::FIRST`].
    pub const SECOND: Self = Self {
        index: 1,
        dual_stack: false,
        domain: "east.test",
        zone_prefix: "east-zone-",
    };

    /// The same addresses and names, with IPv6 addresses beside those of IPv4.
    pub(super) fn with_ipv6(self) -> Self {
        Self {
            dual_stack: true,
            ..self
        }
    }

    /// Whether nodes, pods, Services and load balancers have IPv6 addresses, too.
    pub fn dual_stack(self) -> bool {
        self.dual_stack
    }

    /// The IPv4 address of node `number` in the network of the nodes.
    pub(super) fn node(self, number: u8) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(172, 30, self.index, number))
    }

    /// All addresses of node `number` in the network of the nodes.
    pub(super) fn all_of_node(self, number: u8) -> Vec<IpAddr> {
        self.families(self.node(number), self.ipv6(NODES, number))
    }

    /// All addresses of node `number`, with the length of the prefix of the network of the nodes.
    pub(super) fn interface_of_node(self, number: u8) -> Vec<String> {
        let addrs = self.all_of_node(number).into_iter();
        addrs
            .map(|addr| format!("{addr}/{}", if addr.is_ipv4() { 24 } else { 64 }))
            .collect()
    }

    /// The number of the router from the network of the nodes to other networks, among the nodes. Only [`super::ClusterPair`] has
    /// one; without it, no host has its addresses.
    pub(super) const ROUTER: u8 = 254;

    /// All pods.
    pub(super) fn pods(self) -> Vec<String> {
        self.families(
            format!("10.{}.0.0/16", 23 + self.index),
            format!("{}/48", self.ipv6(PODS, 0)),
        )
    }

    /// The pods of node `number`.
    pub(super) fn pods_of_node(self, number: u8) -> Vec<String> {
        let of_node = Ipv6Addr::from([PODS, self.index.into(), 0, number.into(), 0, 0, 0, 0]);
        self.families(format!("10.{}.{number}.0/24", 23 + self.index), format!("{of_node}/64"))
    }

    /// All Services.
    pub(super) fn services(self) -> Vec<String> {
        self.families(
            format!("10.{}.0.0/16", 247 + self.index),
            format!("{}/108", self.ipv6(SERVICES, 0)),
        )
    }

    /// The Service `kubernetes`, which has the first address of all Services.
    pub(super) fn api_service(self) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(10, 247 + self.index, 0, 1))
    }

    /// The Service of DNS.
    pub(super) fn dns_service(self) -> IpAddr {
        IpAddr::from(Ipv4Addr::new(10, 247 + self.index, 0, 10))
    }

    /// All Services of type `LoadBalancer`, in networks of their own.
    pub(super) fn load_balancers(self) -> Vec<String> {
        self.families(
            format!("198.18.{}.0/24", self.index),
            format!("{}/64", self.ipv6(LOAD_BALANCERS, 0)),
        )
    }

    /// The addresses of the load balancer `number`.
    pub(super) fn load_balancer(self, number: u8) -> Vec<IpAddr> {
        self.families(
            IpAddr::from(Ipv4Addr::new(198, 18, self.index, number)),
            self.ipv6(LOAD_BALANCERS, number),
        )
    }

    /// The IPv4 value, and the IPv6 value if the cluster has both families.
    fn families<T>(self, ipv4: T, ipv6: T) -> Vec<T> {
        let ipv6 = self.dual_stack.then_some(ipv6);
        [ipv4].into_iter().chain(ipv6).collect()
    }

    /// The address `number` of one of the networks of this cluster.
    fn ipv6(self, network: u16, number: u8) -> IpAddr {
        IpAddr::from([network, self.index.into(), 0, 0, 0, 0, 0, number.into()])
    }

    /// The zone of node `number`.
    pub(super) fn zone(self, number: u8) -> String {
        format!("{}{number}", self.zone_prefix)
    }
}

/// The first 16 bits of the IPv6 addresses of each network. All are unique local addresses.
const NODES: u16 = 0xfd30;
const PODS: u16 = 0xfd23;
const SERVICES: u16 = 0xfd47;
const LOAD_BALANCERS: u16 = 0xfd18;
