//! Which routes and networks are accepted, and why others are not.
//!
//! One computation for two readers: views judge by it where an object has no status, and the status of an object says
//! what it comes to.

use std::fmt;

use ipnet::IpNet;

use crate::resources::meta::Name;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::server::{ProxyProtocol, Server};
use crate::resources::route::{Parent, ParentKind, Route, RouteKind};
use crate::resources::route_admission;
use crate::resources::service::{Service, ServiceKind};

/// Where the parents of routes are looked up.
pub trait Parents {
    fn server(&self, name: &Name) -> Option<&Server>;
    fn service(&self, name: &Name) -> Option<&Service>;
    fn egress_network(&self, name: &Name) -> Option<&EgressNetwork>;
}

/// What acceptance depends on beside objects.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    pub cluster_networks: &'a [IpNet],
    /// Namespace of the EgressNetworks that hold for namespaces without their own.
    pub global_egress_namespace: &'a str,
}

/// Why a parent does not accept a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such parent, or it accepts no routes.
    NoParent,
    /// A service without an address is not dialled by it.
    NoClusterIp,
    /// The parent is in another namespace, where it serves no routes of the route's namespace.
    OtherNamespace,
    /// The Server's protocol has no routes of this kind. All that the Server is asked is answered with an error, as nobody
    /// can tell which requests the route is for.
    Protocol(ProxyProtocol),
    /// The route names a port or a section of a Server, which has neither. It stays attached, and its requests are answered
    /// with an error.
    PartOfServer(&'static str),
    /// A route of a more specific protocol has the same parent and port.
    Conflict,
    /// This older route of the same kind takes all connections that the route is for.
    Older(Name),
    /// The route asks for something that no proxy does, or that cannot be read. It stays attached, and what it asks it of
    /// is answered with an error.
    Unsupported(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoParent => Ok(()),
            Self::NoClusterIp => f.write_str("parent service must have a ClusterIP"),
            Self::OtherNamespace => {
                f.write_str("the parent is in another namespace; routes of that namespace only are served")
            }
            Self::Protocol(protocol) => write!(
                f,
                "the Server's proxyProtocol is {protocol}, which has no routes of this kind"
            ),
            Self::PartOfServer(field) => write!(
                f,
                "the parentRef has a {field}, which means nothing where the parent is a Server; leave it out"
            ),
            Self::Conflict => f.write_str("a route of a more specific protocol has the same parent and port"),
            Self::Older(name) => write!(f, "{name} is older and takes the same connections"),
            Self::Unsupported(reason) => f.write_str(reason),
        }
    }
}

/// Judges one parent of a route among all routes that name this parent.
///
/// # Errors
/// Why the route is not accepted.
pub fn of_route<'a>(
    parents: &impl Parents,
    settings: Settings<'_>,
    route: &Route,
    parent: &Parent,
    rivals: impl IntoIterator<Item = &'a Route>,
) -> Result<(), Refusal> {
    if parent.kind != ParentKind::Server && parent.section.is_some() {
        return Err(Refusal::NoParent);
    }
    match parent.kind {
        ParentKind::Server => of_server(parents, route, parent)?,
        ParentKind::Service => match parents.service(&parent.name).map(|service| service.kind) {
            Some(ServiceKind::ClusterIp) => {}
            Some(_) => return Err(Refusal::NoClusterIp),
            None => return Err(Refusal::NoParent),
        },
        ParentKind::EgressNetwork => {
            let network = parents.egress_network(&parent.name);
            if parent.port.is_none() || network.is_none_or(|network| overlaps(network, settings.cluster_networks)) {
                return Err(Refusal::NoParent);
            }
            let is_global = &*parent.name.namespace == settings.global_egress_namespace;
            if parent.name.namespace != *route.meta.namespace() && !is_global {
                return Err(Refusal::OtherNamespace);
            }
        }
        ParentKind::Foreign => return Err(Refusal::NoParent),
    }
    // What a server's port speaks is the server's to say, so that routes for it are no rivals.
    if parent.kind != ParentKind::Server {
        for rival in rivals {
            beaten_by(route, parent, rival)?;
        }
    }
    match route_admission::unserved(route, parent.kind) {
        None => Ok(()),
        Some(reason) => Err(Refusal::Unsupported(reason)),
    }
}

fn of_server(parents: &impl Parents, route: &Route, parent: &Parent) -> Result<(), Refusal> {
    let server = parents.server(&parent.name).ok_or(Refusal::NoParent)?;
    of_server_route(server, route, parent)
}

/// Judges a reference of a route to this Server by what the two say.
///
/// # Errors
/// Why the route is not accepted.
pub fn of_server_route(server: &Server, route: &Route, parent: &Parent) -> Result<(), Refusal> {
    if parent.name.namespace != *route.meta.namespace() {
        return Err(Refusal::OtherNamespace);
    }
    let is_spoken = match route.kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => matches!(
            server.protocol,
            ProxyProtocol::Unknown | ProxyProtocol::Http1 | ProxyProtocol::Http2
        ),
        RouteKind::Grpc => server.protocol == ProxyProtocol::Grpc,
        RouteKind::Tls | RouteKind::Tcp => false,
    };
    match (is_spoken, parent.port, &parent.section) {
        (false, ..) => Err(Refusal::Protocol(server.protocol)),
        (true, Some(_), _) => Err(Refusal::PartOfServer("port")),
        (true, None, Some(_)) => Err(Refusal::PartOfServer("sectionName")),
        (true, None, None) => Ok(()),
    }
}

/// Why requests that speak a protocol are not limited; nothing where they are.
pub fn without_rate_limits(protocol: ProxyProtocol) -> Option<String> {
    let has_none = matches!(
        protocol,
        ProxyProtocol::Grpc | ProxyProtocol::Opaque | ProxyProtocol::Tls
    );
    has_none.then(|| format!("the Server's proxyProtocol is {protocol}, for which there are no rate limits"))
}

/// Whether the rival takes what the route is for. Clients see routes of the parent's namespace and of their own only, so
/// that routes of other namespaces take nothing from one another.
fn beaten_by(route: &Route, parent: &Parent, rival: &Route) -> Result<(), Refusal> {
    let namespace = rival.meta.namespace();
    let is_seen_beside = namespace == route.meta.namespace() || *namespace == parent.name.namespace;
    if !is_seen_beside {
        return Ok(());
    }
    let is_of = |other: &Parent| (other.kind, &other.name) == (parent.kind, &parent.name);
    let mut parents = rival.parents.iter().filter(|other| is_of(other));
    if rival.kind.outranks(route.kind) && parents.clone().any(|other| other.port == parent.port) {
        return Err(Refusal::Conflict);
    }
    // A reference without a port is one to all ports.
    let shares_a_port = parents.any(|other| other.port.is_none() || parent.port.is_none() || other.port == parent.port);
    let is_older = rival.meta.seniority() < route.meta.seniority();
    if shares_a_port && is_older && takes_the_same_connections(rival, route) {
        return Err(Refusal::Older(rival.meta.name.clone()));
    }
    Ok(())
}

/// Nothing tells the connections of two TCPRoutes apart, and of two TLSRoutes only the server names.
pub fn takes_the_same_connections(a: &Route, b: &Route) -> bool {
    match (a.kind, b.kind) {
        (RouteKind::Tcp, RouteKind::Tcp) => true,
        (RouteKind::Tls, RouteKind::Tls) => {
            let names = (&a.hostnames, &b.hostnames);
            (names.0.is_empty() && names.1.is_empty()) || names.0.iter().any(|name| names.1.contains(name))
        }
        _ => false,
    }
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
