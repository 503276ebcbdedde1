//! View: the client policy of a destination.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::lookup::Reader;
use crate::cluster::metrics::{Metrics, SlotMetrics};
use crate::cluster::routes;
use crate::cluster::table::{Table, View};
use crate::cluster::workload::{is_marked_opaque, service_is_opaque};
use crate::cluster::{Config, State};
use crate::model::outbound::{
    Backend, BackendTarget, Backoff, Distribution, FailureAccrual, Load, Outbound, Policy, Protocol, Retry,
    RetryConditions, Route, Rule, StreamRoute, StreamVerdict, Timeouts,
};
use crate::model::reference::{ObjectRef, Reference};
use crate::model::route::{Filter, GrpcMatch, HttpMatch};
use crate::resources::acceptance;
use crate::resources::annotations::{self, Annotations};
use crate::resources::meta::{Meta, Name};
use crate::resources::policy::egress_network::{EgressNetwork, TrafficPolicy};
use crate::resources::policy::reference::POLICY_GROUP;
use crate::resources::route::{self as raw, BackendRef, ParentKind, RouteKind, Rules};
use crate::resources::route_admission;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Namespace of the client, whose own routes apply too.
    pub client_namespace: Arc<str>,
    pub target: Target,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A service by name, whether or not it exists.
    Service(Name, u16),
    Address(SocketAddr),
}

pub(super) struct OutboundView;

impl View for OutboundView {
    type Key = Key;
    type Value = Outbound;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Outbound {
        let view = Client {
            reader,
            config,
            namespace: &key.client_namespace,
        };
        match &key.target {
            Target::Service(name, port) => Outbound::Policy(Box::new(view.of_service(name, *port))),
            Target::Address(addr) => view.of_address(*addr),
        }
    }

    fn metrics(metrics: &Metrics, _key: &Key, value: &Outbound) -> SlotMetrics {
        let service_namespace = match value {
            Outbound::Policy(policy) => match &policy.reference {
                Reference::Object(object) if object.kind == ParentKind::Service.name() => Some(&*object.namespace),
                _ => None,
            },
            Outbound::Unknown => None,
        };
        metrics.outbound(service_namespace)
    }

    fn table(state: &mut State) -> &mut Table<Self> {
        &mut state.outbound
    }
}

/// A client, by its namespace, and what its policies are computed from.
struct Client<'a> {
    reader: &'a Reader<'a>,
    config: &'a Config,
    namespace: &'a Arc<str>,
}

/// What a policy is about: its defaults and where traffic goes when no route says otherwise.
struct Parent<'a> {
    kind: ParentKind,
    name: &'a Name,
    port: u16,
    reference: Reference,
    default: Backend,
    load: Load,
    accrual: Option<FailureAccrual>,
    timeouts: Timeouts,
    http_retry: Option<Retry>,
    grpc_retry: Option<Retry>,
}

impl Client<'_> {
    fn of_address(&self, addr: SocketAddr) -> Outbound {
        if let [service, ..] = *self.reader.services_at(addr.ip()) {
            return Outbound::Policy(Box::new(match service.port(addr.port()) {
                Some(_) => self.of_service(&service.meta.name, addr.port()),
                None => undefined_port(&service.meta.name, addr.port()),
            }));
        }
        if let Some(network) = self.egress_network(addr) {
            return Outbound::Policy(Box::new(self.of_egress_network(network, addr)));
        }
        if self.config.cluster_networks.iter().any(|net| net.contains(&addr.ip())) {
            return Outbound::Unknown;
        }
        Outbound::Policy(Box::new(egress_fallback(addr)))
    }

    fn of_service(&self, name: &Name, port: u16) -> Policy {
        let service = self.reader.service(name);
        let parent = self.service_parent(name, port, service.map(|service| &service.meta));
        let listed = service.and_then(|service| service.port(port));
        let http = self.http_routes(&parent);
        let grpc = self.grpc_routes(&parent);
        let tls = self.stream_routes(&parent, RouteKind::Tls);
        let tcp = self.stream_routes(&parent, RouteKind::Tcp);
        let opaque = parent.default_stream("opaq");
        let opaque_or_tcp = |tcp: Vec<_>| if tcp.is_empty() { vec![opaque.clone()] } else { tcp };
        let http_or_default = |http: Vec<_>| {
            if http.is_empty() {
                vec![parent.default_http("http")]
            } else {
                http
            }
        };
        let is_opaque = match service {
            Some(service) => service_is_opaque(self.config, service, port),
            None => self.config.default_opaque_ports.contains(port),
        };
        let protocol = match listed
            .and_then(|port| port.app_protocol.as_deref())
            .map(str::to_ascii_lowercase)
        {
            Some(protocol) if protocol == "http" => Protocol::Http1(http_or_default(http)),
            Some(protocol) if protocol == "kubernetes.io/h2c" && !grpc.is_empty() => Protocol::Grpc(grpc),
            Some(protocol) if protocol == "kubernetes.io/h2c" => Protocol::Http2(http_or_default(http)),
            Some(_) => Protocol::Opaque(opaque_or_tcp(tcp)),
            None if is_opaque => Protocol::Opaque(opaque_or_tcp(tcp)),
            None if !grpc.is_empty() => Protocol::Grpc(grpc),
            None if http.is_empty() && !tls.is_empty() => Protocol::Tls(tls),
            None if http.is_empty() && !tcp.is_empty() => Protocol::Opaque(tcp),
            None => Protocol::Detect {
                timeout: DETECT_TIMEOUT,
                http: http_or_default(http),
                opaque: parent.detected_stream("opaq"),
            },
        };
        Policy {
            reference: parent.reference,
            protocol,
            accrual: parent.accrual,
        }
    }

    fn service_parent<'b>(&self, name: &'b Name, port: u16, meta: Option<&Meta>) -> Parent<'b> {
        let load = meta
            .and_then(|meta| readable(meta, annotations::load_bias))
            .map_or(Load::PeakEwma, |bias| Load::Penalized {
                penalty: bias.penalty,
                max_retry_after: bias.max_retry_after,
            });
        let reference = service_reference(name, port);
        let default = Backend {
            reference: reference.clone(),
            target: BackendTarget::Balance {
                path: self.path(name, port),
                load,
            },
            filters: Vec::new(),
        };
        Parent::new(ParentKind::Service, name, port, reference, default, load, meta)
    }

    fn path(&self, service: &Name, port: u16) -> String {
        format!(
            "{}.{}.svc.{}:{port}",
            service.name, service.namespace, self.config.cluster_domain
        )
    }

    /// The network of the client's namespace that holds the address most narrowly, or of the global one if it has none.
    fn egress_network(&self, addr: SocketAddr) -> Option<&Arc<EgressNetwork>> {
        let mut networks = self.reader.egress_networks(self.namespace);
        if networks.is_empty() {
            networks = self
                .reader
                .egress_networks(&self.config.global_egress_namespace.as_str().into());
        }
        let narrowness = |network: &EgressNetwork| match &network.networks {
            Some(nets) => nets
                .iter()
                .filter(|net| net.contains(addr.ip()))
                .map(|net| net.net.prefix_len())
                .max(),
            None => (!self.config.cluster_networks.iter().any(|net| net.contains(&addr.ip()))).then_some(0),
        };
        let candidates = networks
            .into_iter()
            .filter_map(|network| Some((narrowness(network)?, network)));
        candidates
            .min_by(|(a_len, a), (b_len, b)| {
                b_len
                    .cmp(a_len)
                    .then_with(|| a.meta.seniority().cmp(&b.meta.seniority()))
            })
            .map(|(_, network)| network)
    }

    fn of_egress_network(&self, network: &EgressNetwork, addr: SocketAddr) -> Policy {
        let reference = egress_network_reference(&network.meta.name, Some(addr.port()));
        let default = Backend {
            reference: reference.clone(),
            target: BackendTarget::Forward(addr),
            filters: Vec::new(),
        };
        let (kind, name, meta) = (ParentKind::EgressNetwork, &network.meta.name, Some(&network.meta));
        let parent = Parent::new(kind, name, addr.port(), reference, default, Load::PeakEwma, meta);
        if let Some(reason) = &network.unread {
            return parent.of_unread_network(reason);
        }
        let allow = network.traffic == TrafficPolicy::Allow;
        let mut http = self.http_routes(&parent);
        let mut grpc = self.grpc_routes(&parent);
        let mut tls = self.stream_routes(&parent, RouteKind::Tls);
        let tcp = self.stream_routes(&parent, RouteKind::Tcp);
        let opaque = parent.egress_stream(allow, "tcp-egress-allow", "tcp-egress-deny");
        let opaque_or_tcp = |tcp: Vec<_>| if tcp.is_empty() { vec![opaque.clone()] } else { tcp };
        // A network declares no ports, so that there are no names for them.
        let is_opaque = is_marked_opaque(self.config, &network.meta, addr.port(), |_| Vec::new());
        let protocol = if is_opaque {
            Protocol::Opaque(opaque_or_tcp(tcp))
        } else if !grpc.is_empty() {
            grpc.push(parent.egress_grpc(allow));
            Protocol::Grpc(grpc)
        } else if http.is_empty() && !tls.is_empty() {
            tls.push(parent.egress_stream(allow, "tls-egress-allow", "tls-egress-deny"));
            Protocol::Tls(tls)
        } else if http.is_empty() && !tcp.is_empty() {
            Protocol::Opaque(tcp)
        } else {
            http.push(parent.egress_http(allow));
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

    fn http_routes(&self, parent: &Parent<'_>) -> Vec<Route<HttpMatch>> {
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            if let Rules::Http(rules) = &route.rules {
                let rules = rules.iter().map(|rule| {
                    let filters = routes::http_filters(route, rule, parent.kind);
                    self.rule(route, rule, parent, routes::http_matches(rule), filters)
                });
                found.push(named(route, rules.collect()));
            }
        }
        found
    }

    fn grpc_routes(&self, parent: &Parent<'_>) -> Vec<Route<GrpcMatch>> {
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            if let Rules::Grpc(rules) = &route.rules {
                let rules = rules.iter().map(|rule| {
                    let filters = routes::grpc_filters(route, rule, parent.kind);
                    self.rule(route, rule, parent, routes::grpc_matches(rule), filters)
                });
                found.push(named(route, rules.collect()));
            }
        }
        found
    }

    /// Routes of one of the kinds that do not look into connections. Of several that take the same connections the oldest
    /// is served: proxies take no message with more.
    fn stream_routes(&self, parent: &Parent<'_>, kind: RouteKind) -> Vec<StreamRoute> {
        let mut served: Vec<&Arc<raw::Route>> = Vec::new();
        let mut found = Vec::new();
        for route in self.visible_routes(parent) {
            let Rules::Stream(rules) = &route.rules else { continue };
            let is_taken = |older: &&Arc<raw::Route>| acceptance::takes_the_same_connections(older, route);
            if route.kind != kind || served.iter().any(is_taken) {
                continue;
            }
            served.push(route);
            let backends = match (&rules[..], route_admission::unserved(route, parent.kind)) {
                ([rule], None) => self.backends(route, &rule.backend_refs, parent),
                (_, reason) => {
                    let reason = reason.as_deref().unwrap_or("it cannot be served");
                    let message = format!("{} {}: {reason}", kind.kind(), route.meta.name);
                    let refusal = failing(Reference::Default("invalid"), kind, &message);
                    Distribution::FirstAvailable(Box::new(refusal))
                }
            };
            found.push(StreamRoute {
                reference: routes::reference(route),
                snis: routes::hosts(route),
                verdict: StreamVerdict::Forward(backends),
            });
        }
        found
    }

    /// Routes of the parent's namespace hold for everybody, those of another only for its own clients.
    fn visible_routes(&self, parent: &Parent<'_>) -> Vec<&Arc<raw::Route>> {
        let mut found = routes::attached(self.reader, self.config, parent.kind, parent.name, Some(parent.port));
        found.retain(|route| {
            let namespace = route.meta.namespace();
            *namespace == parent.name.namespace || namespace == self.namespace
        });
        found
    }

    fn rule<R, M>(
        &self,
        route: &raw::Route,
        rule: &raw::Rule<R>,
        parent: &Parent<'_>,
        matches: Vec<M>,
        filters: Vec<Filter>,
    ) -> Rule<M> {
        Rule {
            matches,
            filters,
            backends: self.backends(route, &rule.backend_refs, parent),
            timeouts: rule_timeouts(route, rule, parent),
            retry: rule_retry(route, parent),
        }
    }

    fn backends(&self, route: &raw::Route, references: &[BackendRef], parent: &Parent<'_>) -> Distribution {
        if references.is_empty() {
            let default = match route.kind {
                RouteKind::Tls | RouteKind::Tcp => parent.stream_backend(),
                RouteKind::PolicyHttp | RouteKind::GatewayHttp | RouteKind::Grpc => parent.default.clone(),
            };
            return Distribution::FirstAvailable(Box::new(default));
        }
        let mut backends = Vec::new();
        for reference in references {
            let mut backend = self.backend(route, reference, parent);
            // The failure that stands for a bad backend comes first, before its filters.
            let filters = routes::backend_filters(route, &reference.filters, parent.kind);
            backend.filters.extend(filters);
            backends.push((backend, reference.weight));
        }
        // Weights that are all 0 send nowhere, and proxies do not survive a distribution of them.
        let total: u64 = backends.iter().map(|(_, weight)| u64::from(*weight)).sum();
        if total == 0 || total > u64::from(u32::MAX) {
            let refusal = failing(
                Reference::Default("invalid"),
                route.kind,
                "the weights of the backends send nowhere",
            );
            return Distribution::FirstAvailable(Box::new(refusal));
        }
        Distribution::Weighted(backends)
    }

    fn backend(&self, route: &raw::Route, reference: &BackendRef, parent: &Parent<'_>) -> Backend {
        let name = reference.resolve(route.meta.namespace());
        match (reference.is_service(), reference.port) {
            (true, Some(port)) if self.reader.service(&name).is_none() => failing(
                service_reference(&name, port),
                route.kind,
                &format!("Service not found {}", name.name),
            ),
            (true, Some(port)) => Backend {
                reference: service_reference(&name, port),
                target: BackendTarget::Balance {
                    path: self.path(&name, port),
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
                    failing(network, route.kind, &format!("EgressNetwork not found {}", name.name))
                } else if parent.kind == ParentKind::EgressNetwork && name == *parent.name {
                    Backend {
                        // Without a port of its own it is the one that was dialled.
                        reference: egress_network_reference(&name, port.or(Some(parent.port))),
                        ..parent.default.clone()
                    }
                } else {
                    let message = "an EgressNetwork is a backend for its own routes only";
                    failing(network, route.kind, message)
                }
            }
            _ => failing(
                Reference::Default("invalid"),
                route.kind,
                "the backend is none that can be sent to",
            ),
        }
    }
}

impl<'a> Parent<'a> {
    fn new(
        kind: ParentKind,
        name: &'a Name,
        port: u16,
        reference: Reference,
        default: Backend,
        load: Load,
        meta: Option<&Meta>,
    ) -> Self {
        let mut parent = Self {
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
        };
        if let Some(meta) = meta {
            parent.accrual = readable(meta, annotations::failure_accrual).map(accrual);
            parent.timeouts = readable(meta, annotations::timeouts).map(timeouts).unwrap_or_default();
            parent.http_retry = readable(meta, annotations::http_retry).map(http_retry);
            parent.grpc_retry = readable(meta, annotations::grpc_retry).map(grpc_retry);
        }
        parent
    }

    /// The default for connections, of which nobody knows whether they failed.
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
            verdict: StreamVerdict::Forward(Distribution::FirstAvailable(Box::new(self.stream_backend()))),
        }
    }

    /// The default for connections that turn out not to be HTTP. They share the balancer of those that are.
    fn detected_stream(&self, name: &'static str) -> StreamRoute {
        StreamRoute {
            verdict: StreamVerdict::Forward(Distribution::FirstAvailable(Box::new(self.default.clone()))),
            ..self.default_stream(name)
        }
    }

    fn egress_stream(&self, allow: bool, allowed: &'static str, denied: &'static str) -> StreamRoute {
        match allow {
            true => self.default_stream(allowed),
            false => StreamRoute {
                verdict: StreamVerdict::Forbidden,
                ..self.default_stream(denied)
            },
        }
    }

    /// Refuses everything: routes may permit what the network that cannot be read was to forbid.
    fn of_unread_network(self, reason: &str) -> Policy {
        let refusal = Filter::FailHttp {
            status: 500,
            message: format!("EgressNetwork {}: {reason}", self.name),
        };
        let name = "http-egress-unreadable";
        Policy {
            protocol: Protocol::Detect {
                timeout: DETECT_TIMEOUT,
                http: vec![self.default_route(name, HttpMatch::everything(), None, vec![refusal])],
                opaque: self.egress_stream(false, "", "tcp-egress-unreadable"),
            },
            accrual: self.accrual,
            reference: self.reference,
        }
    }

    fn default_http(&self, name: &'static str) -> Route<HttpMatch> {
        self.default_route(name, HttpMatch::everything(), self.http_retry.clone(), Vec::new())
    }

    fn egress_http(&self, allow: bool) -> Route<HttpMatch> {
        if allow {
            return self.default_http("http-egress-allow");
        }
        let refusal = Filter::FailHttp {
            status: 403,
            message: NOT_ALLOWED.to_owned(),
        };
        self.default_route("http-egress-deny", HttpMatch::everything(), None, vec![refusal])
    }

    fn egress_grpc(&self, allow: bool) -> Route<GrpcMatch> {
        if allow {
            let retry = self.grpc_retry.clone();
            return self.default_route("grpc-egress-allow", GrpcMatch::default(), retry, Vec::new());
        }
        let refusal = Filter::FailGrpc {
            code: 7,
            message: NOT_ALLOWED.to_owned(),
        };
        self.default_route("grpc-egress-deny", GrpcMatch::default(), None, vec![refusal])
    }

    fn default_route<M>(
        &self,
        name: &'static str,
        everything: M,
        retry: Option<Retry>,
        filters: Vec<Filter>,
    ) -> Route<M> {
        Route {
            reference: Reference::Default(name),
            hosts: Vec::new(),
            rules: vec![Rule {
                matches: vec![everything],
                filters,
                backends: Distribution::FirstAvailable(Box::new(self.default.clone())),
                timeouts: self.timeouts,
                retry,
            }],
        }
    }
}

fn named<M>(route: &raw::Route, rules: Vec<Rule<M>>) -> Route<M> {
    Route {
        reference: routes::reference(route),
        hosts: routes::hosts(route),
        rules,
    }
}

/// What a route says of itself replaces what its parent says wholesale; its annotations come before its rules.
fn rule_timeouts<R>(route: &raw::Route, rule: &raw::Rule<R>, parent: &Parent<'_>) -> Timeouts {
    let annotated = readable(&route.meta, annotations::timeouts).map(timeouts);
    if annotated.is_none() && rule.timeouts == raw::RuleTimeouts::default() {
        return parent.timeouts;
    }
    let annotated = annotated.unwrap_or_default();
    // The Gateway API writes 0 for none.
    let or_rule = |annotated: Option<Duration>, rule: Option<Duration>| {
        annotated.or_else(|| rule.filter(|timeout| !timeout.is_zero()))
    };
    Timeouts {
        request: or_rule(annotated.request, rule.timeouts.request),
        response: or_rule(annotated.response, rule.timeouts.backend_request),
        idle: annotated.idle,
    }
}

fn rule_retry(route: &raw::Route, parent: &Parent<'_>) -> Option<Retry> {
    if route.kind == RouteKind::Grpc {
        readable(&route.meta, annotations::grpc_retry)
            .map(grpc_retry)
            .or_else(|| parent.grpc_retry.clone())
    } else {
        readable(&route.meta, annotations::http_retry)
            .map(http_retry)
            .or_else(|| parent.http_retry.clone())
    }
}

/// Annotations that cannot be read turn off their own feature and nothing else.
fn readable<T>(meta: &Meta, read: impl FnOnce(&Annotations) -> Result<Option<T>, String>) -> Option<T> {
    read(&meta.annotations).unwrap_or_default()
}

fn timeouts(timeouts: annotations::Timeouts) -> Timeouts {
    Timeouts {
        request: timeouts.request,
        response: timeouts.response,
        idle: timeouts.idle,
    }
}

fn http_retry(retry: annotations::Retry<annotations::HttpConditions>) -> Retry {
    Retry {
        limit: retry.limit,
        timeout: retry.timeout,
        conditions: RetryConditions::Http(retry.conditions),
    }
}

fn grpc_retry(retry: annotations::Retry<annotations::GrpcConditions>) -> Retry {
    let annotations::GrpcConditions {
        cancelled,
        deadline_exceeded,
        internal,
        resource_exhausted,
        unavailable,
    } = retry.conditions;
    let conditions = RetryConditions::Grpc {
        cancelled,
        deadline_exceeded,
        internal,
        resource_exhausted,
        unavailable,
    };
    Retry {
        limit: retry.limit,
        timeout: retry.timeout,
        conditions,
    }
}

fn accrual(accrual: annotations::FailureAccrual) -> FailureAccrual {
    let backoff = |backoff: annotations::Backoff| {
        let annotations::Backoff {
            min,
            max,
            jitter,
            honor_retry_after,
        } = backoff;
        Backoff {
            min,
            max,
            jitter,
            honor_retry_after,
        }
    };
    match accrual {
        annotations::FailureAccrual::Consecutive {
            max_failures,
            backoff: penalty,
        } => FailureAccrual::Consecutive {
            max_failures,
            backoff: backoff(penalty),
        },
        annotations::FailureAccrual::Unified {
            threshold,
            window,
            min_requests,
            max_failures,
            backoff: penalty,
        } => FailureAccrual::Unified {
            threshold,
            window,
            min_requests,
            max_failures,
            backoff: backoff(penalty),
        },
    }
}

fn service_reference(name: &Name, port: u16) -> Reference {
    Reference::Object(ObjectRef {
        group: "core",
        kind: ParentKind::Service.name(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port: Some(port),
    })
}

fn egress_network_reference(name: &Name, port: Option<u16>) -> Reference {
    Reference::Object(ObjectRef {
        group: POLICY_GROUP,
        kind: ParentKind::EgressNetwork.name(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        port,
    })
}

/// A backend that answers instead of sending.
fn failing(reference: Reference, kind: RouteKind, message: &str) -> Backend {
    Backend {
        reference,
        target: BackendTarget::Nothing,
        filters: vec![routes::failure(kind, message.to_owned())],
    }
}

fn undefined_port(service: &Name, port: u16) -> Policy {
    let route = StreamRoute {
        reference: Reference::Default("undefined-port"),
        snis: Vec::new(),
        verdict: StreamVerdict::Forbidden,
    };
    Policy {
        reference: service_reference(service, port),
        protocol: Protocol::Opaque(vec![route]),
        accrual: None,
    }
}

/// Addresses outside the cluster that no EgressNetwork speaks of are forwarded as they are.
fn egress_fallback(addr: SocketAddr) -> Policy {
    let reference = Reference::Default("egress-fallback");
    let backend = Backend {
        reference: reference.clone(),
        target: BackendTarget::Forward(addr),
        filters: Vec::new(),
    };
    let nowhere = Name::new("", "");
    let kind = ParentKind::EgressNetwork;
    let parent = Parent::new(
        kind,
        &nowhere,
        addr.port(),
        reference.clone(),
        backend,
        Load::PeakEwma,
        None,
    );
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

/// How long a proxy peeks for the protocol.
const DETECT_TIMEOUT: Duration = Duration::from_secs(10);

const NOT_ALLOWED: &str = "traffic not allowed";
