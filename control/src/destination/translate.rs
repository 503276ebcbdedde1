//! Converts the model to protobuf: endpoints as a difference to the last state that was sent, profiles completely.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use smallvec::SmallVec;
use tulle_proto::convert::wire_duration;
use tulle_proto::destination::protocol_hint::{H2, Opaque, OpaqueTransport, Protocol};
use tulle_proto::destination::tls_identity::{DnsLikeIdentity, Strategy, UriLikeIdentity};
use tulle_proto::destination::{
    AddrSet, AuthorityOverride, DestinationProfile, HttpStatusRange, NoEndpoints, PathMatch, ProtocolHint,
    RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route, TlsIdentity, Update, WeightedAddr, WeightedAddrSet,
    WeightedDst, request_match, response_match, update,
};
use tulle_proto::meta::{Metadata, Resource, metadata};

use crate::destination::config::{Config, ZoneWeights};
use crate::model::endpoints as model;
use crate::model::endpoints::{
    Endpoint, EndpointWorkload, Endpoints, Existence, Http2Params, SharedEndpointFields, TrafficScope,
};
use crate::model::profile;
use crate::proto_http_method::http_method;
use crate::resources::meta::NamespacedName;

/// Node and zone of a client. They determine which endpoints the client may use, and which of them are local.
#[derive(Clone, Debug, Default)]
pub(super) struct ClientLocation {
    pub(super) node: Option<Box<str>>,
    pub(super) zone: Option<Arc<str>>,
}

/// The endpoints of one Service. There are several members if the target of the client is a federated Service.
#[derive(Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) service: &'a NamespacedName,
    /// The cluster of the Service; `None` for this cluster.
    pub(super) cluster: Option<&'a str>,
    pub(super) endpoints: &'a Endpoints,
    /// Whether the client uses these endpoints only while no other endpoint can take the request.
    pub(super) is_fallback: bool,
}

impl Member<'_> {
    fn is_same_service(&self, other: &Member<'_>) -> bool {
        self.service == other.service && self.cluster == other.cluster
    }

    fn metric_labels(&self) -> impl Iterator<Item = (String, String)> {
        let cluster = self.cluster.map(|name| ("target_cluster".to_owned(), name.to_owned()));
        let service = [
            ("namespace".to_owned(), self.service.namespace.to_string()),
            ("service".to_owned(), self.service.name.to_string()),
        ];
        service.into_iter().chain(cluster)
    }
}

/// Returns the messages that bring a client from its last state and location to the current ones. Additions come first,
/// so that the client always has an endpoint, then removals. If no endpoint is left, the last message is `NoEndpoints`.
/// No two members of a state have the same address.
///
/// All additions are in one message, because proxies use the first message of a stream as the complete state.
pub(super) fn difference(
    before: Option<(&[Member<'_>], &ClientLocation)>,
    now: &[Member<'_>],
    location: &ClientLocation,
    config: &Config,
) -> Vec<Update> {
    let sent = before.map(|(before, location)| UsableEndpoints::from_members(before, location));
    let usable = UsableEndpoints::from_members(now, location);
    // The message for an endpoint depends on the client's zone, so all endpoints are sent again after a change of the zone.
    let zone_changed = before.is_some_and(|(_, before)| before.zone != location.zone);
    let mut added: Vec<(&Member<'_>, Vec<WeightedAddr>)> = Vec::new();
    for endpoints in &usable {
        let mut sent_members = sent.iter().filter(|_| !zone_changed).flatten();
        // All endpoints of a member are also sent again if they become fallback endpoints, or are no longer.
        let member = &endpoints.member;
        let sent_member = sent_members
            .find(|sent| sent.member.is_same_service(member) && sent.member.is_fallback == member.is_fallback);
        let sent_endpoint = |addr| sent_member.and_then(|sent| sent.get(addr));
        let addrs = endpoints
            .iter()
            .filter(|endpoint| sent_endpoint(endpoint.addr) != Some(endpoint))
            .map(|endpoint| WeightedAddr {
                is_fallback: member.is_fallback,
                ..weighted_addr(endpoint, location, config)
            });
        let addrs: Vec<_> = addrs.collect();
        if !addrs.is_empty() {
            added.push((member, addrs));
        }
    }
    let mut messages: Vec<_> = add_message(added).map(update::Update::Add).into_iter().collect();
    let is_usable = |addr| usable.iter().any(|endpoints| endpoints.get(addr).is_some());
    let removed: Vec<_> = sent
        .iter()
        .flatten()
        .flat_map(UsableEndpoints::iter)
        .filter(|endpoint| !is_usable(endpoint.addr))
        .map(|endpoint| endpoint.addr.into())
        .collect();
    if !removed.is_empty() {
        messages.push(update::Update::Remove(AddrSet { addrs: removed }));
    }
    // Sent if there is no endpoint: at the start, when the last endpoint is removed, and when the existence of the Service changes.
    if let Some(existence) = existence_if_empty(&usable)
        && sent.and_then(|sent| existence_if_empty(&sent)) != Some(existence)
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

/// The message that adds the endpoints of all members.
fn add_message(mut added: Vec<(&Member<'_>, Vec<WeightedAddr>)>) -> Option<WeightedAddrSet> {
    if added.len() == 1 {
        let (member, addrs) = added.pop()?;
        return Some(WeightedAddrSet {
            addrs,
            metric_labels: member.metric_labels().collect(),
        });
    }
    let mut addrs = Vec::new();
    for (member, member_addrs) in added {
        addrs.extend(member_addrs.into_iter().map(|mut addr| {
            addr.metric_labels.extend(member.metric_labels());
            addr
        }));
    }
    (!addrs.is_empty()).then(|| WeightedAddrSet {
        addrs,
        metric_labels: BTreeMap::new(),
    })
}

/// The endpoints of a member that a client at a location may use.
struct UsableEndpoints<'a> {
    member: Member<'a>,
    scope: EndpointScope<'a>,
}

enum EndpointScope<'a> {
    Cluster,
    /// Endpoints on the client's node. No endpoint if the client's node is unknown.
    Node(Option<&'a str>),
    Zone(&'a str),
    /// Endpoints with a hint for the client's node.
    HintedNode(&'a str),
}

impl<'a> UsableEndpoints<'a> {
    fn from_members(members: &[Member<'a>], location: &'a ClientLocation) -> SmallVec<[Self; 1]> {
        members.iter().map(|member| Self::new(*member, location)).collect()
    }

    fn new(member: Member<'a>, location: &'a ClientLocation) -> Self {
        let all = &member.endpoints.endpoints;
        let is_hinted_node = |node: &str| {
            let hinted = |endpoint: &Arc<Endpoint>| endpoint.hint_nodes.iter().any(|hint| **hint == *node);
            all.iter().any(hinted)
        };
        let scope = match (member.endpoints.scope, &location.zone) {
            // The nodes and hints of another cluster do not apply to a client in this cluster.
            _ if member.cluster.is_some() => EndpointScope::Cluster,
            (TrafficScope::Node, _) => EndpointScope::Node(location.node.as_deref()),
            (TrafficScope::HintedNode, _) if location.node.as_deref().is_some_and(is_hinted_node) => {
                EndpointScope::HintedNode(location.node.as_deref().unwrap_or_default())
            }
            // Zone hints apply only if all endpoints have them, because endpoints without hints would get no clients.
            // They are ignored if no endpoint has a hint for the client's zone.
            (TrafficScope::Cluster | TrafficScope::HintedNode, Some(zone))
                if all.iter().all(|endpoint| !endpoint.hint_zones.is_empty())
                    && all.iter().any(|endpoint| endpoint.hint_zones.contains(zone)) =>
            {
                EndpointScope::Zone(zone)
            }
            (TrafficScope::Cluster | TrafficScope::HintedNode, _) => EndpointScope::Cluster,
        };
        Self { member, scope }
    }

    fn contains(&self, endpoint: &Endpoint) -> bool {
        match self.scope {
            EndpointScope::Cluster => true,
            // As in Linkerd, external workloads are left out, because they do not run on a node of the cluster.
            EndpointScope::Node(node) => {
                matches!(endpoint.workload, EndpointWorkload::Pod { .. })
                    && node.is_some()
                    && endpoint.node.as_deref() == node
            }
            EndpointScope::Zone(zone) => endpoint.hint_zones.iter().any(|hint| **hint == *zone),
            EndpointScope::HintedNode(node) => endpoint.hint_nodes.iter().any(|hint| **hint == *node),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &'a Arc<Endpoint>> {
        let all = self.member.endpoints.endpoints.iter();
        all.filter(|endpoint| self.contains(endpoint))
    }

    fn get(&self, addr: SocketAddr) -> Option<&'a Arc<Endpoint>> {
        let found = self.member.endpoints.get(addr);
        found.filter(|endpoint| self.contains(endpoint))
    }
}

/// If there is no usable endpoint, returns whether the Service exists. It exists if one of its members exists.
fn existence_if_empty(usable: &[UsableEndpoints<'_>]) -> Option<Existence> {
    if usable.iter().any(|endpoints| endpoints.iter().next().is_some()) {
        return None;
    }
    let mut existences = usable.iter().map(|endpoints| endpoints.member.endpoints.existence);
    let first = existences.next().unwrap_or_default();
    let is_present = first == Existence::Present || existences.any(|existence| existence == Existence::Present);
    Some(if is_present { Existence::Present } else { first })
}

fn weighted_addr(endpoint: &Endpoint, location: &ClientLocation, config: &Config) -> WeightedAddr {
    let mut addr = endpoint_addr(endpoint, config);
    let locality = match (&location.zone, &endpoint.zone) {
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

/// Returns the message for an endpoint, without the fields that depend on the client.
fn endpoint_addr(endpoint: &Endpoint, config: &Config) -> WeightedAddr {
    let shared = &endpoint.shared;
    let mut labels: BTreeMap<String, String> = shared
        .labels
        .iter()
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect();
    let workload_label = match &endpoint.workload {
        EndpointWorkload::Pod { name, .. } => Some(("pod", name)),
        EndpointWorkload::External { name, .. } => Some(("external_workload", name)),
        EndpointWorkload::Unknown => None,
    };
    if let Some((label, name)) = workload_label {
        labels.insert(label.to_owned(), name.to_string());
        let zone = endpoint.zone.as_deref().unwrap_or_default();
        labels.insert("zone".to_owned(), zone.to_owned());
    }
    WeightedAddr {
        addr: Some(endpoint.addr.into()),
        weight: DEFAULT_WEIGHT,
        metric_labels: labels,
        tls_identity: shared.identity.as_ref().map(tls_identity),
        protocol_hint: protocol_hint(shared),
        authority_override: shared.authority_override.as_ref().map(|authority| AuthorityOverride {
            authority_override: authority.to_string(),
        }),
        http2: match shared.http2 {
            Http2Params::Configured => config.http2,
            Http2Params::Unset => None,
        },
        resource_ref: None,
        is_fallback: false,
    }
}

fn protocol_hint(shared: &SharedEndpointFields) -> Option<ProtocolHint> {
    let protocol = shared.protocol.map(|hint| match hint {
        model::ProtocolHint::H2 => Protocol::H2(H2 {}),
        model::ProtocolHint::Opaque => Protocol::Opaque(Opaque {}),
    });
    let opaque_transport = shared.opaque_transport_port.map(|port| OpaqueTransport {
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

/// Returns the message for the profile of a service.
pub(super) fn service_profile(profile: &profile::ServicePortProfile) -> DestinationProfile {
    let (profile_namespace, profile_name) = profile
        .resource
        .as_ref()
        .map_or(("", ""), |(namespace, name)| (&**namespace, &**name));
    DestinationProfile {
        fully_qualified_name: profile.fqn.clone(),
        opaque_protocol: profile.is_opaque,
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

/// Returns the message for the profile of an address.
pub(super) fn endpoint_profile(endpoint: &Endpoint, is_opaque: bool, config: &Config) -> DestinationProfile {
    DestinationProfile {
        opaque_protocol: is_opaque,
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

const DEFAULT_WEIGHT: u32 = 10_000;
