//! View: the client policy of a destination.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tulle_core::names::NOT_EXPORTED_POLICY;

use crate::cluster::config::Config;
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::routes;
use crate::cluster::views::view::View;
use crate::model::outbound::{
    Backend, BackendTarget, Distribution, FailureAccrual, Load, Mirror, Outbound, Policy, Protocol, Retry,
    RetryConditions, Route, Rule, StreamAction, StreamRoute, Timeouts,
};
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HttpMatch};
use crate::resources::acceptance;
use crate::resources::annotations::{self, InvalidAnnotation};
use crate::resources::exported_services::ExportedServices;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::egress_network::{EgressNetwork, TrafficPolicy};
use crate::resources::policy::reference::POLICY_GROUP;
use crate::resources::route::{self as resource, BackendRef, ParentKind, RouteKind, RuleRetry, Rules};
use crate::resources::route_support;
use crate::resources::service::DeclaredProtocol;
use crate::resources::string_map::StringMap;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Namespace of the client. Routes in this namespace apply too.
    pub client_namespace: Arc<str>,
    /// The Services that the client, if it is a gateway, serves to other clusters. They restrict only targets with a name, because
    /// a gateway forwards nothing to addresses. Backends of their routes need not be exported.
    pub exported_services: ExportedServices,
    pub target: Target,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A Service by name; it may not exist.
    Service(NamespacedName, u16),
    Address(SocketAddr),
}

pub(in crate::cluster) struct OutboundView;

impl View for OutboundView {
    type Key = Key;
    type Value = Outbound;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Outbound {
        let context = OutboundContext {
            reader,
            config,
            client_namespace: &key.client_namespace,
        };
        match &key.target {
            Target::Service(name, port) => {
                let labels = reader.service(name).map(|service| &service.meta.labels);
                Outbound::Policy(Box::new(match key.exported_services.contain(labels) {
                    true => context.service_policy(name, *port),
                    false => not_exported_policy(name, *port),
                }))
            }
            Target::Address(addr) => context.address_policy(*addr),
        }
    }

    fn metrics(metrics: &Metrics, _key: &Key, value: &Outbound) -> EntryMetrics {
        let service_namespace = match value {
            Outbound::Policy(policy) => match &policy.reference {
                Reference::Object(object) if object.kind == ParentKind::Service.name() => Some(&*object.namespace),
                _ => None,
            },
            Outbound::NoPolicy => None,
        };
        metrics.outbound(service_namespace)
    }
}

/// The inputs of the policies of clients in one namespace.
struct OutboundContext<'a> {
    reader: &'a Reader<'a>,
    config: &'a Config,
    client_namespace: &'a Arc<str>,
}

/// The parent of routes: a Service or an EgressNetwork, with the default backend and settings of its policy.
struct ParentDefaults<'a> {
    kind: ParentKind,
    name: &'a NamespacedName,
    port: u16,
    reference: Reference,
    default: Backend,
    load: Load,
    accrual: Option<FailureAccrual>,
    timeouts: Timeouts,
    http_retry: Option<Retry>,
    grpc_retry: Option<Retry>,
}

impl OutboundContext<'_> {
    fn address_policy(&self, addr: SocketAddr) -> Outbound {
        if let [service, ..] = *self.reader.services_at(addr.ip()) {
            return Outbound::Policy(Box::new(match service.port(addr.port()) {
                Some(_) => self.service_policy(&service.meta.name, addr.port()),
                None => undefined_port_policy(&service.meta.name, addr.port()),
            }));
        }
        if let Some(network) = self.egress_network(addr) {
            return Outbound::Policy(Box::new(self.egress_network_policy(network, addr)));
        }
        if self.config.cluster_networks.iter().any(|net| net.contains(&addr.ip())) {
            return Outbound::NoPolicy;
        }
        Outbound::Policy(Box::new(egress_fallback_policy(addr)))
    }

    fn service_policy(&self, name: &NamespacedName, port: u16) -> Policy {
        let service = self.reader.service(name);
        let parent = self.service_parent(name, port, service.map(|service| &service.meta));
        let http = self.http_routes(&parent);
        let grpc = self.grpc_routes(&parent);
        let tls = self.stream_routes(&parent, RouteKind::Tls);
        let tcp = self.stream_routes(&parent, RouteKind::Tcp);
        // "opaq" is the name that Linkerd uses in metrics.
        let opaque = parent.default_stream("opaq");
        let tcp_or_default = |tcp: Vec<_>| if tcp.is_empty() { vec![opaque.clone()] } else { tcp };
        let http_or_default = |http: Vec<_>| {
            if http.is_empty() {
                vec![parent.default_http("http")]
            } else {
                http
            }
        };
        let default_opaque_ports = &self.config.default_opaque_ports;
        let declared = match service {
            Some(service) => service.declared_protocol(port, default_opaque_ports),
            None if default_opaque_ports.contains(port) => DeclaredProtocol::Opaque,
            None => DeclaredProtocol::None,
        };
        let protocol = match declared {
            DeclaredProtocol::Http1 => Protocol::Http1(http_or_default(http)),
            DeclaredProtocol::Http2 if grpc.is_empty() => Protocol::Http2(http_or_default(http)),
            DeclaredProtocol::Opaque => Protocol::Opaque(tcp_or_default(tcp)),
            DeclaredProtocol::Http2 => Protocol::Grpc(grpc),
            DeclaredProtocol::None if !grpc.is_empty() => Protocol::Grpc(grpc),
            DeclaredProtocol::None if http.is_empty() && !tls.is_empty() => Protocol::Tls(tls),
            DeclaredProtocol::None if http.is_empty() && !tcp.is_empty() => Protocol::Opaque(tcp),
            DeclaredProtocol::None => Protocol::Detect {
                timeout: DETECT_TIMEOUT,
                http: http_or_default(http),
                opaque: parent.default_stream_with_load_bias("opaq"),
            },
        };
        Policy {
            reference: parent.reference,
            protocol,
            accrual: parent.accrual,
        }
    }

    fn service_parent<'b>(&self, name: &'b NamespacedName, port: u16, meta: Option<&Meta>) -> ParentDefaults<'b> {
        let load = meta
            .and_then(|meta| read_annotation(meta, annotations::parse_load_bias))
            .map_or(Load::PeakEwma, |bias| Load::Penalized {
                penalty: bias.penalty,
                max_retry_after: bias.max_retry_after,
            });
        let reference = service_reference(name, port);
        let default = Backend {
            reference: reference.clone(),
            target: BackendTarget::Balance {
                path: self.service_authority(name, port),
                load,
            },
            filters: Vec::new(),
        };
        let parent = ParentDefaults::without_annotations(ParentKind::Service, (name, port), reference, default, load);
        match meta {
            Some(meta) => parent.with_annotations(meta),
            None => parent,
        }
    }

    fn service_authority(&self, service: &NamespacedName, port: u16) -> String {
        format!(
            "{}.{}.svc.{}:{port}",
            service.name, service.namespace, self.config.cluster_domain
        )
    }

    /// The EgressNetwork with the longest prefix that contains the address: from the client's namespace, or from the global
    /// namespace if the client's namespace has no EgressNetwork.
    fn egress_network(&self, addr: SocketAddr) -> Option<&Arc<EgressNetwork>> {
        let mut networks = self.reader.egress_networks(self.client_namespace);
        if networks.is_empty() {
            networks = self
                .reader
                .egress_networks(&self.config.global_egress_namespace.as_str().into());
        }
        let matched_prefix_len = |network: &EgressNetwork| match &network.networks {
            Some(nets) => nets
                .iter()
                .filter(|net| net.contains(addr.ip()))
                .map(|net| net.net.prefix_len())
                .max(),
            None => (!self.config.cluster_networks.iter().any(|net| net.contains(&addr.ip()))).then_some(0),
        };
        let candidates = networks
            .into_iter()
            .filter_map(|network| Some((matched_prefix_len(network)?, network)));
        candidates
            .min_by(|(a_len, a), (b_len, b)| {
                b_len
                    .cmp(a_len)
                    .then_with(|| a.meta.age_order().cmp(&b.meta.age_order()))
            })
            .map(|(_, network)| network)
    }

    fn egress_network_policy(&self, network: &EgressNetwork, addr: SocketAddr) -> Policy {
        let reference = egress_network_reference(&network.meta.name, Some(addr.port()));
        let default = Backend {
            reference: reference.clone(),
            target: BackendTarget::Forward(addr),
            filters: Vec::new(),
        };
        let (kind, name_and_port) = (ParentKind::EgressNetwork, (&network.meta.name, addr.port()));
        let parent = ParentDefaults::without_annotations(kind, name_and_port, reference, default, Load::PeakEwma);
        let parent = parent.with_annotations(&network.meta);
        if let Some(reason) = &network.unreadable {
            return parent.unreadable_network_policy(reason);
        }
        let mut http = self.http_routes(&parent);
        let mut grpc = self.grpc_routes(&parent);
        let mut tls = self.stream_routes(&parent, RouteKind::Tls);
        let tcp = self.stream_routes(&parent, RouteKind::Tcp);
        let opaque = match network.traffic {
            TrafficPolicy::Allow => parent.default_stream("tcp-egress-allow"),
            TrafficPolicy::Deny => parent.denied_stream("tcp-egress-deny"),
        };
        let tcp_or_default = |tcp: Vec<_>| if tcp.is_empty() { vec![opaque.clone()] } else { tcp };
        let protocol = if network.is_opaque(addr.port(), &self.config.default_opaque_ports) {
            Protocol::Opaque(tcp_or_default(tcp))
        } else if !grpc.is_empty() {
            grpc.push(parent.egress_grpc(network.traffic));
            Protocol::Grpc(grpc)
        } else if http.is_empty() && !tls.is_empty() {
            tls.push(match network.traffic {
                TrafficPolicy::Allow => parent.default_stream("tls-egress-allow"),
                TrafficPolicy::Deny => parent.denied_stream("tls-egress-deny"),
            });
            Protocol::Tls(tls)
        } else if http.is_empty() && !tcp.is_empty() {
            Protocol::Opaque(tcp)
        } else {
            http.push(parent.egress_http(network.traffic));
            Protocol::Detect {
                timeout: DETECT_TIMEOUT,
                http,
                opaque,
            }
        };
        Policy {
            reference: parent.reference,
            protocol,
            accrual: parent.accrual,
        }
    }

    fn http_routes(&self, parent: &ParentDefaults<'_>) -> Vec<Route<HttpMatch>> {
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            if let Rules::Http(rules) = &route.rules {
                let rules = rules.iter().map(|rule| Rule {
                    matches: routes::http_matches(rule),
                    filters: routes::http_filters(route, rule, parent.kind),
                    ..self.rule(route, rule, parent)
                });
                found.push(route_with_rules(route, rules.collect()));
            }
        }
        found
    }

    fn grpc_routes(&self, parent: &ParentDefaults<'_>) -> Vec<Route<GrpcMatch>> {
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            if let Rules::Grpc(rules) = &route.rules {
                let rules = rules.iter().map(|rule| Rule {
                    matches: routes::grpc_matches(rule),
                    filters: routes::grpc_filters(route, rule, parent.kind),
                    ..self.rule(route, rule, parent)
                });
                found.push(route_with_rules(route, rules.collect()));
            }
        }
        found
    }

    /// The TLSRoutes or TCPRoutes of a parent. If several routes match the same connections, only the oldest is served, because
    /// proxies reject a message with more than one.
    fn stream_routes(&self, parent: &ParentDefaults<'_>, kind: RouteKind) -> Vec<StreamRoute> {
        let mut served: Vec<&Arc<resource::Route>> = Vec::new();
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            let Rules::Stream(rules) = &route.rules else { continue };
            let conflicts = |older: &&Arc<resource::Route>| acceptance::matches_same_connections(older, route);
            if route.kind != kind || served.iter().any(conflicts) {
                continue;
            }
            served.push(route);
            let backends = match (&rules[..], route_support::unsupported_reason(route, parent.kind)) {
                ([rule], None) => self.backends(route, &rule.backend_refs, parent),
                (_, reason) => {
                    let reason = reason.as_deref().unwrap_or("it cannot be served");
                    let message = format!("{} {}: {reason}", kind.kind(), route.meta.name);
                    let failing = failing_backend(Reference::Default("invalid"), kind, &message);
                    Distribution::Single(Box::new(failing))
                }
            };
            found.push(StreamRoute {
                reference: routes::reference(route),
                snis: routes::hosts(route),
                action: StreamAction::Forward(backends),
            });
        }
        found
    }

    /// Routes in the parent's namespace apply to all clients; routes in another namespace only to clients in that namespace.
    fn visible_routes(&self, parent: &ParentDefaults<'_>) -> Vec<&Arc<resource::Route>> {
        let mut found = routes::attached_routes(self.reader, self.config, parent.kind, parent.name, Some(parent.port));
        found.retain(|route| {
            let namespace = route.meta.namespace();
            *namespace == parent.name.namespace || namespace == self.client_namespace
        });
        found
    }

    /// The fields that rules of HTTP and gRPC have in common. The caller sets `matches` and `filters`.
    fn rule<R, M>(&self, route: &resource::Route, rule: &resource::Rule<R>, parent: &ParentDefaults<'_>) -> Rule<M> {
        Rule {
            matches: Vec::new(),
            filters: Vec::new(),
            backends: self.backends(route, &rule.backend_refs, parent),
            mirrors: self.mirrors(route, rule, parent),
            timeouts: rule_timeouts(route, rule, parent),
            retry: rule_retry(route, rule, parent),
        }
    }

    fn backends(
        &self,
        route: &resource::Route,
        references: &[BackendRef],
        parent: &ParentDefaults<'_>,
    ) -> Distribution {
        if references.is_empty() {
            let default = match route.kind {
                RouteKind::Tls | RouteKind::Tcp => parent.stream_backend(),
                RouteKind::PolicyHttp | RouteKind::GatewayHttp | RouteKind::Grpc => parent.default.clone(),
            };
            return Distribution::Single(Box::new(default));
        }
        let mut backends = Vec::new();
        for reference in references {
            let mut backend = self.backend(route, reference, parent);
            // The failure filter of an invalid backend comes before the backend's filters.
            let filters = routes::backend_filters(route, &reference.filters, parent.kind);
            backend.filters.extend(filters);
            backends.push((backend, reference.weight));
        }
        // Linkerd's proxy panics if all weights are 0.
        let total: u64 = backends.iter().map(|(_, weight)| u64::from(*weight)).sum();
        if total == 0 || total > u64::from(u32::MAX) {
            let failing = failing_backend(
                Reference::Default("invalid"),
                route.kind,
                "the backend weights add up to 0 or to more than 4294967295",
            );
            return Distribution::Single(Box::new(failing));
        }
        Distribution::Weighted(backends)
    }

    /// The mirrors of a rule. A mirror whose backend does not exist or is not supported is left out and fails no request; the
    /// status of the route reports it, or for a directory of manifests the metric `unserved_configuration`. An invalid mirror is
    /// left out too, but its rule has a filter that makes the requests fail.
    fn mirrors<R>(
        &self,
        route: &resource::Route,
        rule: &resource::Rule<R>,
        parent: &ParentDefaults<'_>,
    ) -> Vec<Mirror> {
        let model_mirror = |mirror: &resource::Mirror| {
            let resource::Fraction { numerator, denominator } = mirror.fraction();
            Mirror {
                backend: self.backend(route, &mirror.backend_ref, parent),
                numerator,
                denominator,
            }
        };
        let is_valid = |mirror: &&resource::Mirror| route_support::validate_mirror(mirror).is_ok();
        let has_backend = |mirror: &Mirror| mirror.backend.target != BackendTarget::Failing;
        let mirrors = rule.mirrors().filter(is_valid).map(model_mirror);
        mirrors.filter(has_backend).collect()
    }

    fn backend(&self, route: &resource::Route, reference: &BackendRef, parent: &ParentDefaults<'_>) -> Backend {
        let name = reference.resolve(route.meta.namespace());
        match (reference.is_service(), reference.port) {
            (true, Some(port)) if self.reader.service(&name).is_none() => failing_backend(
                service_reference(&name, port),
                route.kind,
                &format!("Service not found {}", name.name),
            ),
            (true, Some(port)) => Backend {
                reference: service_reference(&name, port),
                target: BackendTarget::Balance {
                    path: self.service_authority(&name, port),
                    load: match route.kind {
                        RouteKind::Tls | RouteKind::Tcp => Load::PeakEwma,
                        RouteKind::PolicyHttp | RouteKind::GatewayHttp | RouteKind::Grpc => parent.load,
                    },
                },
                filters: Vec::new(),
            },
            (false, port) if reference.is_egress_network() => {
                let network = egress_network_reference(&name, port);
                if self.reader.egress_network(&name).is_none() {
                    failing_backend(network, route.kind, &format!("EgressNetwork not found {}", name.name))
                } else if parent.kind == ParentKind::EgressNetwork && name == *parent.name {
                    Backend {
                        // A reference without a port means the requested port.
                        reference: egress_network_reference(&name, port.or(Some(parent.port))),
                        ..parent.default.clone()
                    }
                } else {
                    let message = "an EgressNetwork can be a backend only of routes that also have it as a parent";
                    failing_backend(network, route.kind, message)
                }
            }
            _ => failing_backend(
                Reference::Default("invalid"),
                route.kind,
                "the backend is neither a Service with a port nor an EgressNetwork",
            ),
        }
    }
}

impl<'a> ParentDefaults<'a> {
    /// Defaults without the settings of annotations: timeouts, retries and failure accrual.
    fn without_annotations(
        kind: ParentKind,
        (name, port): (&'a NamespacedName, u16),
        reference: Reference,
        default: Backend,
        load: Load,
    ) -> Self {
        Self {
            kind,
            name,
            port,
            reference,
            default,
            load,
            accrual: None,
            timeouts: Timeouts::default(),
            http_retry: None,
            grpc_retry: None,
        }
    }

    /// Sets timeouts, retries and failure accrual from the annotations of the parent.
    fn with_annotations(mut self, meta: &Meta) -> Self {
        self.accrual = read_annotation(meta, annotations::parse_failure_accrual);
        self.timeouts = without_zeros(read_annotation(meta, annotations::parse_timeouts).unwrap_or_default());
        self.http_retry = read_annotation(meta, annotations::parse_http_retry);
        self.grpc_retry = read_annotation(meta, annotations::parse_grpc_retry);
        self
    }

    /// The default backend of connections. It has no load bias (`Load::Penalized`), because it is unknown whether a connection
    /// succeeded.
    fn stream_backend(&self) -> Backend {
        let mut backend = self.default.clone();
        if let BackendTarget::Balance { load, .. } = &mut backend.target {
            *load = Load::PeakEwma;
        }
        backend
    }

    fn default_stream(&self, name: &'static str) -> StreamRoute {
        StreamRoute {
            reference: Reference::Default(name),
            snis: Vec::new(),
            action: StreamAction::Forward(Distribution::Single(Box::new(self.stream_backend()))),
        }
    }

    /// The default route for connections in which detection finds no HTTP. Its backend equals the backend of HTTP requests,
    /// including the load bias, so that both share one balancer.
    fn default_stream_with_load_bias(&self, name: &'static str) -> StreamRoute {
        StreamRoute {
            action: StreamAction::Forward(Distribution::Single(Box::new(self.default.clone()))),
            ..self.default_stream(name)
        }
    }

    fn denied_stream(&self, name: &'static str) -> StreamRoute {
        StreamRoute {
            action: StreamAction::Forbidden,
            ..self.default_stream(name)
        }
    }

    /// The policy of an unreadable EgressNetwork. It denies all traffic, because the unreadable part may forbid traffic that the
    /// routes permit.
    fn unreadable_network_policy(self, reason: &str) -> Policy {
        let failure = Filter::FailHttp {
            status: 500,
            message: format!("EgressNetwork {}: {reason}", self.name),
        };
        let name = "http-egress-unreadable";
        Policy {
            protocol: Protocol::Detect {
                timeout: DETECT_TIMEOUT,
                http: vec![self.default_route(name, HttpMatch::match_all(), None, vec![failure])],
                opaque: self.denied_stream("tcp-egress-unreadable"),
            },
            accrual: self.accrual,
            reference: self.reference,
        }
    }

    fn default_http(&self, name: &'static str) -> Route<HttpMatch> {
        self.default_route(name, HttpMatch::match_all(), self.http_retry.clone(), Vec::new())
    }

    fn egress_http(&self, traffic: TrafficPolicy) -> Route<HttpMatch> {
        if traffic == TrafficPolicy::Allow {
            return self.default_http("http-egress-allow");
        }
        let failure = Filter::FailHttp {
            status: 403,
            message: EGRESS_DENIED_MESSAGE.to_owned(),
        };
        self.default_route("http-egress-deny", HttpMatch::match_all(), None, vec![failure])
    }

    fn egress_grpc(&self, traffic: TrafficPolicy) -> Route<GrpcMatch> {
        if traffic == TrafficPolicy::Allow {
            let retry = self.grpc_retry.clone();
            return self.default_route("grpc-egress-allow", GrpcMatch::default(), retry, Vec::new());
        }
        let failure = Filter::FailGrpc {
            code: 7,
            message: EGRESS_DENIED_MESSAGE.to_owned(),
        };
        self.default_route("grpc-egress-deny", GrpcMatch::default(), None, vec![failure])
    }

    fn default_route<M>(
        &self,
        name: &'static str,
        match_all: M,
        retry: Option<Retry>,
        filters: Vec<Filter>,
    ) -> Route<M> {
        Route {
            reference: Reference::Default(name),
            hosts: Vec::new(),
            rules: vec![Rule {
                matches: vec![match_all],
                filters,
                backends: Distribution::Single(Box::new(self.default.clone())),
                mirrors: Vec::new(),
                timeouts: self.timeouts,
                retry,
            }],
        }
    }
}

fn route_with_rules<M>(route: &resource::Route, rules: Vec<Rule<M>>) -> Route<M> {
    Route {
        reference: routes::reference(route),
        hosts: routes::hosts(route),
        rules,
    }
}

/// Timeouts of a route replace all timeouts of its parent. Annotations of the route take precedence over its rules.
fn rule_timeouts<R>(route: &resource::Route, rule: &resource::Rule<R>, parent: &ParentDefaults<'_>) -> Timeouts {
    let annotated = read_annotation(&route.meta, annotations::parse_timeouts);
    if annotated.is_none() && rule.timeouts == resource::RuleTimeouts::default() {
        return parent.timeouts;
    }
    let annotated = annotated.unwrap_or_default();
    without_zeros(Timeouts {
        request: annotated.request.or(rule.timeouts.request),
        response: annotated.response.or(rule.timeouts.backend_request),
        idle: annotated.idle,
    })
}

/// In annotations and in the Gateway API, zero means no timeout.
fn without_zeros(timeouts: Timeouts) -> Timeouts {
    let non_zero = |timeout: Option<Duration>| timeout.filter(|timeout| !timeout.is_zero());
    Timeouts {
        request: non_zero(timeouts.request),
        response: non_zero(timeouts.response),
        idle: non_zero(timeouts.idle),
    }
}

/// The retries of a rule, by the annotation of the route, otherwise by `retry` of the rule, otherwise by the annotations of the
/// parent.
fn rule_retry<R>(route: &resource::Route, rule: &resource::Rule<R>, parent: &ParentDefaults<'_>) -> Option<Retry> {
    if route.kind == RouteKind::Grpc {
        return read_annotation(&route.meta, annotations::parse_grpc_retry).or_else(|| parent.grpc_retry.clone());
    }
    match (read_annotation(&route.meta, annotations::parse_http_retry), &rule.retry) {
        (Some(annotated), _) => Some(annotated),
        // The retry is left out, because proxies would reject the policy. A filter of the rule makes its requests fail.
        (None, Some(_)) if route_support::check_retry_and_unimplemented_fields(rule, route.kind).is_err() => None,
        (None, Some(retry)) => retry_of_rule(retry, &rule.timeouts),
        (None, None) => parent.http_retry.clone(),
    }
}

/// Converts the field `retry` of a rule. `None` if it permits no retry. An attempt that exceeds the rule's
/// `timeouts.backendRequest` is retried, even if an annotation sets another timeout.
fn retry_of_rule(retry: &RuleRetry, timeouts: &resource::RuleTimeouts) -> Option<Retry> {
    let limit = retry.attempts.unwrap_or(annotations::DEFAULT_RETRY_LIMIT);
    let codes = match &retry.codes[..] {
        [] => vec![DEFAULT_RETRIED_STATUSES],
        codes => codes.iter().map(|code| *code..=*code).collect(),
    };
    (limit > 0).then_some(Retry {
        limit,
        timeout: timeouts.backend_request.filter(|timeout| !timeout.is_zero()),
        backoff: retry.backoff,
        conditions: RetryConditions::Http(codes),
    })
}

/// Reads the settings of an annotation. An invalid annotation has no effect.
fn read_annotation<T>(meta: &Meta, read: impl FnOnce(&StringMap) -> Result<Option<T>, InvalidAnnotation>) -> Option<T> {
    read(&meta.annotations).unwrap_or_default()
}

fn service_reference(name: &NamespacedName, port: u16) -> Reference {
    Reference::Object(ObjectRef {
        group: "core",
        kind: ParentKind::Service.name(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port: Some(port),
    })
}

fn egress_network_reference(name: &NamespacedName, port: Option<u16>) -> Reference {
    Reference::Object(ObjectRef {
        group: POLICY_GROUP,
        kind: ParentKind::EgressNetwork.name(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port,
    })
}

/// A backend that answers with an error.
fn failing_backend(reference: Reference, kind: RouteKind, message: &str) -> Backend {
    Backend {
        reference,
        target: BackendTarget::Failing,
        filters: vec![routes::failure_filter(kind.into(), message.to_owned())],
    }
}

fn undefined_port_policy(service: &NamespacedName, port: u16) -> Policy {
    let route = StreamRoute {
        reference: Reference::Default("undefined-port"),
        snis: Vec::new(),
        action: StreamAction::Forbidden,
    };
    Policy {
        reference: service_reference(service, port),
        protocol: Protocol::Opaque(vec![route]),
        accrual: None,
    }
}

/// The policy of a Service that a gateway does not serve. Proxies recognize it by its reference.
fn not_exported_policy(service: &NamespacedName, port: u16) -> Policy {
    let reference = Reference::Default(NOT_EXPORTED_POLICY);
    let message = format!("Service {service} is not exported");
    let backend = failing_backend(service_reference(service, port), RouteKind::GatewayHttp, &message);
    let name_and_port = (service, port);
    let parent = ParentDefaults::without_annotations(
        ParentKind::Service,
        name_and_port,
        reference.clone(),
        backend,
        Load::PeakEwma,
    );
    let failure = Filter::FailHttp { status: 404, message };
    Policy {
        protocol: Protocol::Detect {
            timeout: DETECT_TIMEOUT,
            http: vec![parent.default_route(NOT_EXPORTED_POLICY, HttpMatch::match_all(), None, vec![failure])],
            opaque: parent.denied_stream(NOT_EXPORTED_POLICY),
        },
        accrual: None,
        reference,
    }
}

/// Addresses outside the cluster that match no EgressNetwork are forwarded unchanged.
fn egress_fallback_policy(addr: SocketAddr) -> Policy {
    let reference = Reference::Default("egress-fallback");
    let backend = Backend {
        reference: reference.clone(),
        target: BackendTarget::Forward(addr),
        filters: Vec::new(),
    };
    let empty_name = NamespacedName::new("", "");
    let kind = ParentKind::EgressNetwork;
    let name_and_port = (&empty_name, addr.port());
    let parent = ParentDefaults::without_annotations(kind, name_and_port, reference.clone(), backend, Load::PeakEwma);
    let protocol = Protocol::Detect {
        timeout: DETECT_TIMEOUT,
        http: vec![parent.default_http("egress-fallback")],
        opaque: parent.default_stream("egress-fallback"),
    };
    Policy {
        reference,
        protocol,
        accrual: None,
    }
}

/// Statuses that a rule retries if it specifies none. Proxies respond with them if a connection fails or times out.
const DEFAULT_RETRIED_STATUSES: RangeInclusive<u16> = 502..=504;

/// Timeout of protocol detection in the proxy.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

const EGRESS_DENIED_MESSAGE: &str = "traffic not allowed";
