//! Decides whether routes and EgressNetworks are accepted.
//!
//! Used by write-back for the statuses, and by the views where they do not rely on the status.

use std::collections::BTreeSet;
use std::fmt;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tulle_core::networks::NetworkMatch;
use tulle_core::ports::PortSet;

use crate::resources::meta::NamespacedName;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::server::{ProxyProtocol, Server};
use crate::resources::route::{Parent, ParentKind, Route, RouteKind};
use crate::resources::route_support;
use crate::resources::service::{DeclaredProtocol, Service, ServiceKind};

/// Looks up the parents of routes.
pub trait ParentLookup {
    fn server(&self, name: &NamespacedName) -> Option<&Server>;
    fn service(&self, name: &NamespacedName) -> Option<&Service>;
    fn egress_network(&self, name: &NamespacedName) -> Option<&EgressNetwork>;
}

/// Inputs of the decision besides the objects.
#[derive(Clone, Copy, Debug)]
pub struct AcceptanceSettings<'a> {
    pub cluster_networks: &'a [IpNet],
    /// Namespace of the EgressNetworks that apply to namespaces without their own.
    pub global_egress_namespace: &'a str,
    /// Ports that are opaque unless an annotation says otherwise.
    pub default_opaque_ports: &'a PortSet,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteRejection {
    /// The parent does not exist.
    ParentNotFound,
    /// The mesh does not support parents of this kind.
    UnsupportedParentKind,
    /// The reference to a Service or an EgressNetwork has a section, which these do not have.
    ParentHasNoSections,
    /// The reference to an EgressNetwork has no port.
    NoPort,
    /// The EgressNetwork contains addresses of the cluster, and is not accepted itself.
    OverlapsClusterNetworks,
    /// The Service has no ClusterIP, so clients cannot connect to it by address.
    NoClusterIp,
    /// The parent is in another namespace and accepts only routes of its own namespace.
    OtherNamespace,
    /// The Server's protocol does not support routes of this kind. All requests to the Server fail, because the
    /// requests that the route matches cannot be identified.
    ProtocolMismatch(ProxyProtocol),
    /// The port, or each port if the reference has none, has a protocol that does not support routes of this kind.
    PortProtocolMismatch(Option<(u16, DeclaredProtocol)>),
    /// The reference to a Server has a port or a section, which a Server does not have. The route stays attached, and
    /// its requests fail.
    UnsupportedParentField(&'static str),
    /// Routes of kinds that take precedence apply to all ports of the reference.
    RouteOfPrecedingKind,
    /// This older route of the same kind matches the same connections.
    OlderRoute(NamespacedName),
    /// The route uses a feature that proxies do not support, or has unreadable fields. It stays attached, and the
    /// requests that it matches fail.
    Unsupported(String),
}

impl fmt::Display for RouteRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ParentNotFound => f.write_str("the parent does not exist"),
            Self::UnsupportedParentKind => f.write_str("the mesh does not support parents of this kind"),
            Self::ParentHasNoSections => {
                f.write_str("the parentRef has a sectionName, which a parent of this kind does not have; remove it")
            }
            Self::NoPort => f.write_str("the parentRef of an EgressNetwork has no port; add it"),
            Self::OverlapsClusterNetworks => f.write_str(
                "spec.networks of the EgressNetwork overlaps clusterNetworks; use networks outside the cluster, or list its \
                 networks in `except`",
            ),
            Self::NoClusterIp => f.write_str("parent service must have a ClusterIP"),
            Self::OtherNamespace => {
                f.write_str("the parent is in another namespace and accepts only routes of its own namespace")
            }
            Self::ProtocolMismatch(protocol) => write!(
                f,
                "the Server's proxyProtocol is {protocol}, which does not support routes of this kind"
            ),
            Self::PortProtocolMismatch(Some((port, protocol))) => write!(
                f,
                "the protocol of port {port} is {protocol}, which does not support routes of this kind; \
                 check appProtocol and opaque ports of the parent"
            ),
            Self::PortProtocolMismatch(None) => f.write_str(
                "the protocol of each port does not support routes of this kind; check appProtocol and opaque ports of the parent",
            ),
            Self::UnsupportedParentField(field) => write!(
                f,
                "the parentRef has a {field}, which is not supported for a Server; remove it"
            ),
            Self::RouteOfPrecedingKind => f.write_str(
                "routes of kinds that take precedence (GRPCRoute, HTTPRoute, TLSRoute, TCPRoute, in this order) apply to all ports of the parentRef",
            ),
            Self::OlderRoute(name) => write!(f, "{name} is older and matches the same connections"),
            Self::Unsupported(reason) => f.write_str(reason),
        }
    }
}

/// Checks whether a parent accepts a route. `competing_routes` are all routes that refer to this parent; a Server needs none.
///
/// # Errors
/// Fails if the parent does not accept the route, with the reason.
pub fn check_route<'a>(
    parents: &impl ParentLookup,
    settings: AcceptanceSettings<'_>,
    route: &Route,
    parent: &Parent,
    competing_routes: impl IntoIterator<Item = &'a Route>,
) -> Result<(), RouteRejection> {
    check_reference(parents, settings, route, parent)?;
    // Routes of a Server do not conflict: the Server defines the protocol.
    if parent.kind != ParentKind::Server {
        check_conflicts(parents, settings, (route, parent), competing_routes)?;
    }
    match route_support::unsupported_reason(route, parent.kind) {
        None => Ok(()),
        Some(reason) => Err(RouteRejection::Unsupported(reason)),
    }
}

/// Checks whether a parent accepts the reference of a route, without regard to other routes and to the route's rules.
fn check_reference(
    parents: &impl ParentLookup,
    settings: AcceptanceSettings<'_>,
    route: &Route,
    parent: &Parent,
) -> Result<(), RouteRejection> {
    if parent.kind != ParentKind::Server && parent.section.is_some() {
        return Err(match parent.kind {
            ParentKind::Foreign => RouteRejection::UnsupportedParentKind,
            _ => RouteRejection::ParentHasNoSections,
        });
    }
    match parent.kind {
        ParentKind::Server => {
            let server = parents.server(&parent.name).ok_or(RouteRejection::ParentNotFound)?;
            check_server_route(server, route, parent)?;
        }
        ParentKind::Service => {
            let service = parents.service(&parent.name).ok_or(RouteRejection::ParentNotFound)?;
            if service.kind != ServiceKind::ClusterIp {
                return Err(RouteRejection::NoClusterIp);
            }
            let protocol = |port| service.declared_protocol(port, settings.default_opaque_ports);
            match parent.port {
                Some(port) => check_port_protocol(route.kind, port, protocol(port))?,
                None => {
                    let checks = service.ports.iter();
                    let mut checks = checks.map(|port| check_port_protocol(route.kind, port.port, protocol(port.port)));
                    if !service.ports.is_empty() && checks.all(|check| check.is_err()) {
                        return Err(RouteRejection::PortProtocolMismatch(None));
                    }
                }
            }
        }
        ParentKind::EgressNetwork => {
            let network = parents.egress_network(&parent.name);
            let network = network.ok_or(RouteRejection::ParentNotFound)?;
            let port = parent.port.ok_or(RouteRejection::NoPort)?;
            if network.is_opaque(port, settings.default_opaque_ports) {
                check_port_protocol(route.kind, port, DeclaredProtocol::Opaque)?;
            }
            if overlaps_cluster_networks(network, settings.cluster_networks) {
                return Err(RouteRejection::OverlapsClusterNetworks);
            }
            let is_global = &*parent.name.namespace == settings.global_egress_namespace;
            if parent.name.namespace != *route.meta.namespace() && !is_global {
                return Err(RouteRejection::OtherNamespace);
            }
        }
        ParentKind::Foreign => return Err(RouteRejection::UnsupportedParentKind),
    }
    Ok(())
}

/// Checks whether a port with this protocol uses routes of this kind.
fn check_port_protocol(kind: RouteKind, port: u16, protocol: DeclaredProtocol) -> Result<(), RouteRejection> {
    match supports(protocol, kind) {
        true => Ok(()),
        false => Err(RouteRejection::PortProtocolMismatch(Some((port, protocol)))),
    }
}

/// Returns whether a port with this protocol uses routes of this kind.
fn supports(protocol: DeclaredProtocol, kind: RouteKind) -> bool {
    match protocol {
        DeclaredProtocol::None => true,
        DeclaredProtocol::Http1 => matches!(kind, RouteKind::PolicyHttp | RouteKind::GatewayHttp),
        DeclaredProtocol::Http2 => matches!(kind, RouteKind::PolicyHttp | RouteKind::GatewayHttp | RouteKind::Grpc),
        DeclaredProtocol::Opaque => kind == RouteKind::Tcp,
    }
}

/// Checks a reference of a route to this Server.
///
/// # Errors
/// Fails if the Server does not accept the route, with the reason.
pub fn check_server_route(server: &Server, route: &Route, parent: &Parent) -> Result<(), RouteRejection> {
    if parent.name.namespace != *route.meta.namespace() {
        return Err(RouteRejection::OtherNamespace);
    }
    let is_supported = match route.kind {
        RouteKind::PolicyHttp | RouteKind::GatewayHttp => matches!(
            server.protocol,
            ProxyProtocol::Unknown | ProxyProtocol::Http1 | ProxyProtocol::Http2
        ),
        RouteKind::Grpc => server.protocol == ProxyProtocol::Grpc,
        RouteKind::Tls | RouteKind::Tcp => false,
    };
    match (is_supported, parent.port, &parent.section) {
        (false, ..) => Err(RouteRejection::ProtocolMismatch(server.protocol)),
        (true, Some(_), _) => Err(RouteRejection::UnsupportedParentField("port")),
        (true, None, Some(_)) => Err(RouteRejection::UnsupportedParentField("sectionName")),
        (true, None, None) => Ok(()),
    }
}

/// Returns why rate limits do not work with a protocol, or `None` if they do.
pub fn rate_limit_unsupported_reason(protocol: ProxyProtocol) -> Option<String> {
    let is_unsupported = matches!(
        protocol,
        ProxyProtocol::Grpc | ProxyProtocol::Opaque | ProxyProtocol::Tls
    );
    is_unsupported.then(|| format!("the Server's proxyProtocol is {protocol}, which does not support rate limits"))
}

/// Checks whether competing routes displace the route: an older one that matches the same connections on a shared port, or routes
/// of preceding kinds on all ports of the reference. A competing route in a third namespace, neither that of the route nor of the
/// parent, does not count, because it applies only to the clients there.
fn check_conflicts<'a>(
    parents: &impl ParentLookup,
    settings: AcceptanceSettings<'_>,
    (route, parent): (&Route, &Parent),
    competing_routes: impl IntoIterator<Item = &'a Route>,
) -> Result<(), RouteRejection> {
    let mut remaining_ports = accepted_ports(parents, settings, route.kind, parent);
    for competing_route in competing_routes {
        let namespace = competing_route.meta.namespace();
        let is_relevant = namespace == route.meta.namespace() || *namespace == parent.name.namespace;
        let takes_precedence = competing_route.kind.takes_precedence_over(route.kind);
        let is_older = competing_route.meta.age_order() < route.meta.age_order();
        let is_older_conflict = is_older && matches_same_connections(competing_route, route);
        if !is_relevant || !(takes_precedence || is_older_conflict) {
            continue;
        }
        let accepted_references = competing_route.parents.iter().filter(|other| {
            (other.kind, &other.name) == (parent.kind, &parent.name)
                && check_reference(parents, settings, competing_route, other).is_ok()
        });
        for other in accepted_references {
            // A reference without a port refers to all ports.
            if is_older_conflict && (other.port.is_none() || parent.port.is_none() || other.port == parent.port) {
                return Err(RouteRejection::OlderRoute(competing_route.meta.name.clone()));
            }
            if takes_precedence {
                let applies = |port: Option<u16>, protocol: DeclaredProtocol| {
                    (other.port.is_none() || other.port == port) && supports(protocol, competing_route.kind)
                };
                remaining_ports.retain(|(port, protocol)| !applies(*port, *protocol));
            }
        }
        if remaining_ports.is_empty() {
            return Err(RouteRejection::RouteOfPrecedingKind);
        }
    }
    Ok(())
}

/// Returns the ports to which an accepted reference of a route applies, with their protocols. For a reference without a port to a
/// Service without ports, this is one entry with the port `None`.
fn accepted_ports(
    parents: &impl ParentLookup,
    settings: AcceptanceSettings<'_>,
    kind: RouteKind,
    parent: &Parent,
) -> Vec<(Option<u16>, DeclaredProtocol)> {
    let service = match parent.kind {
        ParentKind::Service => parents.service(&parent.name),
        // `check_reference` has refused a port of an EgressNetwork whose protocol does not support the kind of the route.
        ParentKind::EgressNetwork | ParentKind::Server | ParentKind::Foreign => None,
    };
    let protocol = |port| {
        service.map_or(DeclaredProtocol::None, |service| {
            service.declared_protocol(port, settings.default_opaque_ports)
        })
    };
    match (parent.port, service) {
        (None, Some(service)) if !service.ports.is_empty() => {
            let ports = service.ports.iter().map(|port| (Some(port.port), protocol(port.port)));
            ports.filter(|(_, protocol)| supports(*protocol, kind)).collect()
        }
        (port, _) => vec![(port, port.map_or(DeclaredProtocol::None, protocol))],
    }
}

/// Returns whether two routes match the same connections. Two TCPRoutes always do. Two TLSRoutes do if they share a
/// host name, or if neither has one.
pub fn matches_same_connections(a: &Route, b: &Route) -> bool {
    match (a.kind, b.kind) {
        (RouteKind::Tcp, RouteKind::Tcp) => true,
        (RouteKind::Tls, RouteKind::Tls) => {
            let names = (&a.hostnames, &b.hostnames);
            (names.0.is_empty() && names.1.is_empty()) || names.0.iter().any(|name| names.1.contains(name))
        }
        _ => false,
    }
}

/// Returns whether the EgressNetwork contains addresses of the cluster, apart from its exceptions. An EgressNetwork
/// without `spec.networks` never does.
pub fn overlaps_cluster_networks(network: &EgressNetwork, cluster_networks: &[IpNet]) -> bool {
    let overlaps = |network: &NetworkMatch, cluster: &IpNet| {
        // Of two networks with common addresses, one contains the other.
        let common = match (network.net.contains(cluster), cluster.contains(&network.net)) {
            (true, _) => cluster,
            (false, true) => &network.net,
            (false, false) => return false,
        };
        let is_excepted = |excepts: &[IpNet]| excepts.iter().any(|except| except.contains(common));
        let can_be_merged = network.except.len() <= MAX_COMPARED_NETWORKS;
        !(is_excepted(&network.except) || (can_be_merged && is_excepted(&IpNet::aggregate(&network.except))))
    };
    let networks = network.networks.iter().flatten();
    networks
        .flat_map(|network| cluster_networks.iter().map(move |cluster| (network, cluster)))
        .any(|(network, cluster)| overlaps(network, cluster))
}

/// Returns the other EgressNetworks that together apply to all addresses of `network`, so that it is never used. The set is empty
/// if `network` applies to some address, or if there are too many networks to compare. `others` are the EgressNetworks of the
/// namespace, and can include `network`.
///
/// Other namespaces do not matter: their EgressNetworks replace the global ones only for their own clients, and a namespace
/// without EgressNetworks, which uses the global ones, can appear at any time.
pub fn overriding_networks<'a>(
    network: &EgressNetwork,
    others: impl IntoIterator<Item = &'a EgressNetwork>,
    cluster_networks: &[IpNet],
) -> BTreeSet<&'a NamespacedName> {
    let others = others.into_iter().filter(|other| other.meta.name != network.meta.name);
    let others: Vec<_> = others.collect();
    let n_networks = |network: &EgressNetwork| network.networks.as_ref().map_or(1, Vec::len);
    if n_networks(network) + others.iter().map(|other| n_networks(other)).sum::<usize>() > MAX_COMPARED_NETWORKS {
        return BTreeSet::new();
    }
    let own_networks = effective_networks(network, cluster_networks);
    let others: Vec<_> = others
        .into_iter()
        .map(|other| (other, effective_networks(other, cluster_networks)))
        .collect();
    let mut overriding = BTreeSet::new();
    for own in &own_networks {
        // `own` does not apply to its exceptions, nor to smaller networks of the same EgressNetwork, which the loop checks
        // separately.
        let smaller = own_networks.iter().filter(|smaller| smaller.except.is_empty());
        let smaller =
            smaller.filter(|smaller| smaller.net.prefix_len() > own.net.prefix_len() && own.net.contains(&smaller.net));
        let mut covered: Vec<IpNet> = own.except.clone();
        covered.extend(smaller.map(|smaller| smaller.net));
        for (other, other_networks) in &others {
            let is_older = other.meta.age_order() < network.meta.age_order();
            for other_network in other_networks.iter().filter(|other| own.net.contains(&other.net)) {
                let has_precedence = other_network.net.prefix_len() > own.net.prefix_len() || is_older;
                let is_excepted = |except: &IpNet| own.except.iter().any(|net| net.contains(except));
                if has_precedence && other_network.except.iter().all(is_excepted) {
                    covered.push(other_network.net);
                    overriding.insert(&other.meta.name);
                }
            }
        }
        if !IpNet::aggregate(&covered).iter().any(|net| net.contains(&own.net)) {
            return BTreeSet::new();
        }
    }
    overriding
}

/// Maximum number of networks in the EgressNetworks of a namespace that are compared, and of exceptions of a network that are
/// merged. The time grows with the square of this number, so without the limit a user of one namespace could delay all others.
pub const MAX_COMPARED_NETWORKS: usize = 200;

/// Returns the networks of an EgressNetwork. Without `spec.networks` these are all addresses outside the cluster.
fn effective_networks(network: &EgressNetwork, cluster_networks: &[IpNet]) -> Vec<NetworkMatch> {
    let outside_cluster = |net: IpNet| NetworkMatch {
        net,
        except: cluster_networks.to_vec(),
    };
    match &network.networks {
        Some(networks) => networks.clone(),
        None => [IpNet::from(Ipv4Net::default()), IpNet::from(Ipv6Net::default())]
            .map(outside_cluster)
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::{Kind, Object, decode};

    /// Returns an EgressNetwork that was created on this day of January 2026. Each network is a CIDR, then its exceptions after
    /// `!`; without networks it selects everything outside the cluster.
    fn network(name: &str, day: u8, networks: &[&str]) -> EgressNetwork {
        let to_json = |text: &&str| {
            let mut parts = text.split('!');
            json!({"cidr": parts.next(), "except": parts.collect::<Vec<_>>()})
        };
        let created = format!("2026-01-0{day}T00:00:00Z");
        let mut spec = json!({"trafficPolicy": "Deny"});
        if !networks.is_empty() {
            spec["networks"] = networks.iter().map(to_json).collect();
        }
        let metadata = json!({"name": name, "namespace": "shop", "creationTimestamp": created});
        match decode(Kind::EgressNetwork, json!({"metadata": metadata, "spec": spec})).unwrap() {
            Object::EgressNetwork(network) => (*network).clone(),
            object => panic!("{object:?}"),
        }
    }

    #[test]
    fn a_network_overlaps_the_cluster_unless_it_excepts_the_common_addresses() {
        let cluster_networks: [IpNet; 2] = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let check = |networks: &[&str], expected: bool| {
            let found = overlaps_cluster_networks(&network("own", 1, networks), &cluster_networks);
            assert_eq!(found, expected, "{networks:?}");
        };
        check(&[], false);
        check(&["203.0.113.0/24"], false);
        check(&["10.1.0.0/16"], true);
        check(&["0.0.0.0/0"], true);
        check(&["0.0.0.0/0!10.0.0.0/8"], false);
        check(&["0.0.0.0/0!10.0.0.0/9!10.128.0.0/9"], false);
        check(&["0.0.0.0/0!10.0.0.0/9"], true);
        check(&["0.0.0.0/0!10.0.0.0/8", "::/0"], true);
        check(&["0.0.0.0/0!10.0.0.0/8", "::/0!fc00::/7"], false);
        check(&["10.1.0.0/16!10.1.0.0/17!10.1.128.0/17"], false);
    }

    #[test]
    fn a_network_is_overridden_if_others_apply_to_all_its_addresses() {
        let check = |own: &[&str], others: &[(u8, &[&str])], expected: &[&str]| {
            let own = network("own", 5, own);
            let names = ["a", "b"];
            let others = names.iter().zip(others);
            let mut all: Vec<_> = others.map(|(name, (day, nets))| network(name, *day, nets)).collect();
            all.push(own.clone());
            let cluster_networks: [IpNet; 2] = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
            let found = overriding_networks(&own, &all, &cluster_networks);
            let found: Vec<&str> = found.iter().map(|name| &*name.name).collect();
            assert_eq!(found, expected, "{all:?}");
        };
        let net = "203.0.113.0/24";
        check(&[net], &[], &[]);
        check(&[net], &[(1, &[net])], &["a"]);
        check(&[net], &[(9, &[net])], &[]);
        // The same age: the name decides.
        check(&[net], &[(5, &[net])], &["a"]);
        // Networks without `spec.networks`.
        check(&[], &[(1, &[])], &["a"]);
        check(&[], &[(9, &[])], &[]);
        check(&[], &[(1, &["0.0.0.0/0"])], &[]);
        check(&[], &[(1, &["0.0.0.0/0", "::/0"])], &["a"]);
        // A longer prefix takes precedence, whatever the age, and a shorter one never does.
        check(&[net], &[(1, &["203.0.0.0/16"]), (1, &[])], &[]);
        check(&[net], &[(9, &["203.0.113.0/25"])], &[]);
        check(
            &[net],
            &[(9, &["203.0.113.0/25"]), (9, &["203.0.113.128/25"])],
            &["a", "b"],
        );
        check(&[net], &[(9, &["203.0.113.0/25", "203.0.113.128/25"])], &["a"]);
        // Exceptions.
        check(&[net], &[(1, &["203.0.113.0/24!203.0.113.8/29"])], &[]);
        check(
            &["203.0.113.0/24!203.0.113.0/28"],
            &[(1, &["203.0.113.0/24!203.0.113.8/29"])],
            &["a"],
        );
        check(
            &["203.0.113.0/24!203.0.113.128/25"],
            &[(9, &["203.0.113.0/25"])],
            &["a"],
        );
        // Each network counts.
        check(&[net, "198.51.100.0/24"], &[(1, &[net])], &[]);
        check(
            &[net, "198.51.100.0/24"],
            &[(1, &[net]), (1, &["198.51.100.0/24"])],
            &["a", "b"],
        );
        check(&[net, "203.0.113.0/25"], &[(1, &["203.0.113.0/25"])], &[]);
        check(
            &[net, "203.0.113.0/25"],
            &[(1, &["203.0.113.0/25", "203.0.113.128/25"])],
            &["a"],
        );
    }

    #[test]
    fn too_many_networks_are_not_compared() {
        for (n_others, is_overridden) in [(MAX_COMPARED_NETWORKS - 1, true), (MAX_COMPARED_NETWORKS, false)] {
            let own = network("own", 5, &["203.0.113.0/24"]);
            let others: Vec<_> = (0..n_others)
                .map(|n| network(&format!("a{n}"), 1, &["203.0.113.0/24"]))
                .collect();
            assert_eq!(
                !overriding_networks(&own, &others, &[]).is_empty(),
                is_overridden,
                "{n_others}"
            );
        }
    }
}
