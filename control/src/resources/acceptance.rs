//! Which routes and networks are accepted, and why others are not.
//!
//! One computation for two readers: views judge by it where an object has no status, and the status of an object says
//! what it comes to.

use ipnet::IpNet;

use crate::resources::meta::Name;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::route::{Parent, ParentKind, Route, RouteKind};
use crate::resources::service::{Service, ServiceKind};

/// Where the parents of routes are looked up.
pub trait Parents {
    fn has_server(&self, name: &Name) -> bool;
    fn service(&self, name: &Name) -> Option<&Service>;
    fn egress_network(&self, name: &Name) -> Option<&EgressNetwork>;
}

/// Why a parent does not accept a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such parent, or it accepts no routes.
    NoParent,
    /// A service without an address is not dialled by it.
    NoClusterIp,
    /// A route of a more specific protocol has the same parent and port.
    Conflict,
}

/// Judges one parent of a route among all routes that name this parent.
///
/// # Errors
/// Why the route is not accepted.
pub fn of_route<'a>(
    parents: &impl Parents,
    cluster_networks: &[IpNet],
    kind: RouteKind,
    parent: &Parent,
    rivals: impl IntoIterator<Item = &'a Route>,
) -> Result<(), Refusal> {
    match parent.kind {
        _ if parent.section.is_some() => return Err(Refusal::NoParent),
        ParentKind::Server => {
            let exists = parent.port.is_none() && parents.has_server(&parent.name);
            // What a server's port speaks is the server's to say, so that routes for it are no rivals.
            return if exists { Ok(()) } else { Err(Refusal::NoParent) };
        }
        ParentKind::Service => match parents.service(&parent.name).map(|service| service.kind) {
            Some(ServiceKind::ClusterIp) => {}
            Some(_) => return Err(Refusal::NoClusterIp),
            None => return Err(Refusal::NoParent),
        },
        ParentKind::EgressNetwork => {
            let network = parents.egress_network(&parent.name);
            if parent.port.is_none() || network.is_none_or(|network| overlaps(network, cluster_networks)) {
                return Err(Refusal::NoParent);
            }
        }
        ParentKind::Foreign => return Err(Refusal::NoParent),
    }
    let loses_to =
        |rival: &Route| rival.kind.outranks(kind) && rival.parents.iter().any(|other| same_port(other, parent));
    if rivals.into_iter().any(loses_to) {
        return Err(Refusal::Conflict);
    }
    Ok(())
}

fn same_port(a: &Parent, b: &Parent) -> bool {
    (a.kind, &a.name, a.port) == (b.kind, &b.name, b.port)
}

/// Whether the network claims addresses of the cluster; one that names no networks leaves those out.
pub fn overlaps(network: &EgressNetwork, cluster_networks: &[IpNet]) -> bool {
    let claims = |net: &IpNet| {
        cluster_networks
            .iter()
            .any(|cluster| cluster.contains(net) || net.contains(cluster))
    };
    network.networks.iter().flatten().any(|network| claims(&network.net))
}
