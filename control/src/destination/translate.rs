//! Model to protobuf: endpoints as a difference to what was sent last, profiles as a whole.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tulle_proto::convert::wire_duration;
use tulle_proto::destination::protocol_hint::{H2, Opaque, OpaqueTransport, Protocol};
use tulle_proto::destination::tls_identity::{DnsLikeIdentity, Strategy, UriLikeIdentity};
use tulle_proto::destination::{
    AddrSet, AuthorityOverride, DestinationProfile, HttpStatusRange, NoEndpoints, PathMatch, ProtocolHint,
    RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route, TlsIdentity, Update, WeightedAddr, WeightedAddrSet,
    WeightedDst, request_match, response_match, update,
};
use tulle_proto::meta::{Metadata, Resource, metadata};

use crate::destination::{Config, ZoneWeights};
use crate::model::endpoints as model;
use crate::model::endpoints::{Endpoint, Endpoints, Existence, Http2Params, TrafficScope, Workload};
use crate::model::profile;
use crate::resources::meta::Name;
use crate::wire::http_method;

/// Where the client is, which decides what it may use and what is near.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    pub(super) node: Option<Box<str>>,
    pub(super) zone: Option<Arc<str>>,
}

/// The messages that bring a client from what it was told, and where it was then, to what is now: additions first, so that
/// it always has somewhere to go, then removals, and at last whether nothing is left.
pub(super) fn difference(
    before: Option<(&Endpoints, &Place)>,
    now: &Endpoints,
    service: &Name,
    place: &Place,
    config: &Config,
) -> Vec<Update> {
    let told = before.map(|(before, place)| Usable::new(before, place));
    let usable = Usable::new(now, place);
    // What is told of an endpoint depends on the client's zone.
    let has_moved = before.is_some_and(|(_, before)| before.zone != place.zone);
    let told_of = |addr: &SocketAddr| told.as_ref().filter(|_| !has_moved).and_then(|told| told.get(addr));
    let added: Vec<_> = usable
        .iter()
        .filter(|(addr, endpoint)| told_of(addr) != Some(endpoint))
        .map(|(_, endpoint)| weighted_addr(endpoint, place, config))
        .collect();
    let removed: Vec<_> = told
        .iter()
        .flat_map(Usable::iter)
        .filter(|(addr, _)| usable.get(addr).is_none())
        .map(|(addr, _)| (*addr).into())
        .collect();
    let mut messages = Vec::new();
    if !added.is_empty() {
        let metric_labels = BTreeMap::from([
            ("namespace".to_owned(), service.namespace.to_string()),
            ("service".to_owned(), service.name.to_string()),
        ]);
        messages.push(update::Update::Add(WeightedAddrSet {
            addrs: added,
            metric_labels,
        }));
    }
    if !removed.is_empty() {
        messages.push(update::Update::Remove(AddrSet { addrs: removed }));
    }
    // Said once, and again only when the service comes or goes.
    if let Some(existence) = usable.lacks()
        && told.and_then(|told| told.lacks()) != Some(existence)
    {
        messages.push(update::Update::NoEndpoints(NoEndpoints {
            exists: existence == Existence::Present,
        }));
    }
    messages
        .into_iter()
        .map(|message| Update { update: Some(message) })
        .collect()
}

/// The endpoints that a client at one place may use.
struct Usable<'a> {
    endpoints: &'a Endpoints,
    within: Within<'a>,
}

/// Which of the endpoints they are.
enum Within<'a> {
    Cluster,
    /// The client's node; none is known of a client that does not say.
    Node(Option<&'a str>),
    Zone(&'a str),
    /// What is meant for the client's node.
    HintedNode(&'a str),
}

impl<'a> Usable<'a> {
    fn new(endpoints: &'a Endpoints, place: &'a Place) -> Self {
        let addresses = &endpoints.addresses;
        let is_for = |node: &str| {
            let hinted = |endpoint: &Arc<Endpoint>| endpoint.hint_nodes.iter().any(|hint| **hint == *node);
            addresses.values().any(hinted)
        };
        let within = match (endpoints.scope, &place.zone) {
            (TrafficScope::Node, _) => Within::Node(place.node.as_deref()),
            (TrafficScope::HintedNode, _) if place.node.as_deref().is_some_and(is_for) => {
                Within::HintedNode(place.node.as_deref().unwrap_or_default())
            }
            // Hints count only when every endpoint has them, because the others would be left without clients; and
            // where they leave nothing they do not count either.
            (TrafficScope::Cluster | TrafficScope::HintedNode, Some(zone))
                if addresses.values().all(|endpoint| !endpoint.hint_zones.is_empty())
                    && addresses.values().any(|endpoint| endpoint.hint_zones.contains(zone)) =>
            {
                Within::Zone(zone)
            }
            (TrafficScope::Cluster | TrafficScope::HintedNode, _) => Within::Cluster,
        };
        Self { endpoints, within }
    }

    fn holds(&self, endpoint: &Endpoint) -> bool {
        match self.within {
            Within::Cluster => true,
            Within::Node(node) => {
                matches!(endpoint.workload, Workload::Pod { .. }) && node.is_some() && endpoint.node.as_deref() == node
            }
            Within::Zone(zone) => endpoint.hint_zones.iter().any(|hint| **hint == *zone),
            Within::HintedNode(node) => endpoint.hint_nodes.iter().any(|hint| **hint == *node),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&'a SocketAddr, &'a Arc<Endpoint>)> {
        self.endpoints
            .addresses
            .iter()
            .filter(|(_, endpoint)| self.holds(endpoint))
    }

    fn get(&self, addr: &SocketAddr) -> Option<&'a Arc<Endpoint>> {
        self.endpoints
            .addresses
            .get(addr)
            .filter(|endpoint| self.holds(endpoint))
    }

    /// What is there instead of endpoints, when there is none.
    fn lacks(&self) -> Option<Existence> {
        self.iter().next().is_none().then_some(self.endpoints.existence)
    }
}

fn weighted_addr(endpoint: &Endpoint, place: &Place, config: &Config) -> WeightedAddr {
    let mut addr = endpoint_addr(endpoint, config);
    let locality = match (&place.zone, &endpoint.zone) {
        (Some(client), Some(zone)) if client == zone => "local",
        (Some(_), Some(_)) => "remote",
        (None, _) | (_, None) => "unknown",
    };
    addr.metric_labels
        .insert("zone_locality".to_owned(), locality.to_owned());
    if locality == "local" && config.zone_weights == ZoneWeights::PreferLocal {
        addr.weight *= 10;
    }
    addr
}

/// The endpoint as any client sees it.
fn endpoint_addr(endpoint: &Endpoint, config: &Config) -> WeightedAddr {
    let mut labels: BTreeMap<String, String> = endpoint
        .labels
        .iter()
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect();
    if endpoint.workload != Workload::Unknown {
        labels.insert(
            "zone".to_owned(),
            endpoint.zone.as_deref().unwrap_or_default().to_owned(),
        );
    }
    WeightedAddr {
        addr: Some(endpoint.addr.into()),
        weight: WEIGHT,
        metric_labels: labels,
        tls_identity: endpoint.identity.as_ref().map(tls_identity),
        protocol_hint: protocol_hint(endpoint),
        authority_override: endpoint.authority_override.as_ref().map(|authority| AuthorityOverride {
            authority_override: authority.to_string(),
        }),
        http2: match endpoint.http2 {
            Http2Params::Configured => config.http2,
            Http2Params::Unset => None,
        },
        resource_ref: None,
    }
}

fn protocol_hint(endpoint: &Endpoint) -> Option<ProtocolHint> {
    let protocol = endpoint.protocol.map(|hint| match hint {
        model::ProtocolHint::H2 => Protocol::H2(H2 {}),
        model::ProtocolHint::Opaque => Protocol::Opaque(Opaque {}),
    });
    let opaque_transport = endpoint.opaque_transport.map(|port| OpaqueTransport {
        inbound_port: port.into(),
    });
    if protocol.is_none() && opaque_transport.is_none() {
        return None;
    }
    Some(ProtocolHint {
        opaque_transport,
        protocol,
    })
}

fn tls_identity(identity: &model::TlsIdentity) -> TlsIdentity {
    let (strategy, server_name) = match identity {
        model::TlsIdentity::Dns { name, server_name } => (
            Strategy::DnsLikeIdentity(DnsLikeIdentity { name: name.to_string() }),
            server_name,
        ),
        model::TlsIdentity::Uri { uri, server_name } => (
            Strategy::UriLikeIdentity(UriLikeIdentity { uri: uri.to_string() }),
            server_name,
        ),
    };
    TlsIdentity {
        server_name: Some(DnsLikeIdentity {
            name: server_name.to_string(),
        }),
        strategy: Some(strategy),
    }
}

/// The message for a profile of a service.
pub(super) fn service_profile(profile: &profile::ServiceProfile) -> DestinationProfile {
    let (profile_namespace, profile_name) = profile
        .source
        .as_ref()
        .map_or(("", ""), |(namespace, name)| (&**namespace, &**name));
    DestinationProfile {
        fully_qualified_name: profile.fqn.clone(),
        opaque_protocol: profile.opacity == profile::Opacity::Opaque,
        retry_budget: Some(retry_budget(profile.budget)),
        routes: profile.routes.iter().map(route).collect(),
        dst_overrides: profile
            .overrides
            .iter()
            .map(|dst| WeightedDst {
                authority: dst.authority.clone(),
                weight: dst.weight,
                backend_ref: None,
            })
            .collect(),
        endpoint: None,
        parent_ref: Some(resource(
            "core",
            "Service",
            &profile.service,
            &profile.namespace,
            profile.port,
        )),
        profile_ref: Some(resource(
            "linkerd.io",
            "ServiceProfile",
            profile_name,
            profile_namespace,
            0,
        )),
    }
}

/// The message for a profile of an address.
pub(super) fn endpoint_profile(endpoint: &Endpoint, opacity: profile::Opacity, config: &Config) -> DestinationProfile {
    DestinationProfile {
        opaque_protocol: opacity == profile::Opacity::Opaque,
        retry_budget: Some(retry_budget(profile::RetryBudget::default())),
        endpoint: Some(endpoint_addr(endpoint, config)),
        ..DestinationProfile::default()
    }
}

fn resource(group: &str, kind: &str, name: &str, namespace: &str, port: u16) -> Metadata {
    let resource = Resource {
        group: group.to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        section: String::new(),
        port: port.into(),
    };
    Metadata {
        kind: Some(metadata::Kind::Resource(resource)),
    }
}

fn retry_budget(budget: profile::RetryBudget) -> RetryBudget {
    RetryBudget {
        retry_ratio: budget.ratio,
        min_retries_per_second: budget.min_per_second,
        ttl: Some(wire_duration(budget.ttl)),
    }
}

fn route(route: &profile::Route) -> Route {
    Route {
        condition: Some(request_match(&route.condition)),
        response_classes: route
            .response_classes
            .iter()
            .map(|class| ResponseClass {
                condition: Some(response_match(&class.condition)),
                is_failure: class.is_failure,
            })
            .collect(),
        metrics_labels: BTreeMap::from([("route".to_owned(), route.name.clone())]),
        is_retryable: route.is_retryable,
        timeout: route.timeout.map(wire_duration),
    }
}

fn request_match(matched: &profile::RequestMatch) -> RequestMatch {
    let seq = |matches: &[_]| request_match::Seq {
        matches: matches.iter().map(request_match).collect(),
    };
    let matched = match matched {
        profile::RequestMatch::All(all) => request_match::Match::All(seq(all)),
        profile::RequestMatch::Any(any) => request_match::Match::Any(seq(any)),
        profile::RequestMatch::Not(not) => request_match::Match::Not(Box::new(request_match(not))),
        profile::RequestMatch::PathRegex(regex) => request_match::Match::Path(PathMatch { regex: regex.clone() }),
        profile::RequestMatch::Method(method) => request_match::Match::Method(http_method(method)),
    };
    RequestMatch { r#match: Some(matched) }
}

fn response_match(matched: &profile::ResponseMatch) -> ResponseMatch {
    let seq = |matches: &[_]| response_match::Seq {
        matches: matches.iter().map(response_match).collect(),
    };
    let matched = match matched {
        profile::ResponseMatch::All(all) => response_match::Match::All(seq(all)),
        profile::ResponseMatch::Any(any) => response_match::Match::Any(seq(any)),
        profile::ResponseMatch::Not(not) => response_match::Match::Not(Box::new(response_match(not))),
        profile::ResponseMatch::Status { min, max } => {
            response_match::Match::Status(HttpStatusRange { min: *min, max: *max })
        }
    };
    ResponseMatch { r#match: Some(matched) }
}

/// The weight of an endpoint that nothing sets apart.
const WEIGHT: u32 = 10_000;
