//! Compiles the policy and the profile of a destination into a snapshot.

use std::sync::Arc;

use tulle_core::addr::Addr;

use crate::{
    balance::weighted::Weights,
    metrics::routes::StatusKind,
    outbound::{
        backend::{Backend, BackendChoice, BackendFactory, Backends},
        destination::{
            profile::CompiledProfile,
            snapshot::{CompiledAction, CompiledOpaqueRoute, Plan, PolicyRefusal, Router, Snapshot, policy_refusal},
            timeouts_and_retries::TimeoutsAndRetries,
        },
        metrics::{MetricScope, connections::DestinationProtocol},
        mirror::Mirror,
    },
    policy::{
        client::{
            ClientHttp, ClientPolicy, ClientProtocol, FailureAccrual, MirrorSpec, OpaqueFilter, OpaqueRoute, Queue,
            RouteAction,
        },
        matches::RequestMatch,
        meta::Meta,
        profile::{Profile, RetryBudgetState},
        route::{Route, Rule},
    },
};

/// Compiles the policy and the profile of a destination.
pub(super) struct Compiler<'a> {
    pub(super) factory: &'a BackendFactory,
    pub(super) policy: ClientPolicy,
    pub(super) profile: Option<&'a Profile>,
    pub(super) queue: Queue,
    /// Address that applications dial, or name that they request.
    pub(super) dst: &'a Addr,
    /// The snapshot that is replaced.
    pub(super) previous: Option<&'a Snapshot>,
}

impl Compiler<'_> {
    /// Compiles the snapshot. Backends that stay the same keep their endpoints and connections, and rules that stay the same keep
    /// the state of their retry budgets.
    pub(super) fn compile(self) -> Snapshot {
        let plan = self.plan();
        let families = &self.factory.endpoint_context.families.connections;
        Snapshot {
            connection_counter: families.protocol_counter(plan.protocol(), &self.policy.meta),
            plan,
            profile: self.profile.cloned(),
            is_unknown_name: false,
            policy: self.policy,
        }
    }

    fn plan(&self) -> Plan {
        let protocol = &self.policy.protocol;
        if let Some(profile) = self.overriding_profile().filter(|profile| profile.is_opaque) {
            return Plan::Opaque(self.compile_opaque_profile(profile));
        }
        let http = |routes| Arc::new(self.router(StatusKind::Http, routes));
        match protocol {
            ClientProtocol::Detect {
                timeout,
                http1,
                http2,
                opaque,
            } => {
                let http1_router = http(http1);
                Plan::Detect {
                    timeout: *timeout,
                    detect_series: self
                        .factory
                        .endpoint_context
                        .families
                        .connections
                        .detect_series(&self.policy.meta),
                    http2: if http1 == http2 {
                        http1_router.clone()
                    } else {
                        http(http2)
                    },
                    http1: http1_router,
                    opaque: self.compile_opaque_route(opaque.as_ref(), DestinationProtocol::Opaque),
                }
            }
            ClientProtocol::Http1(routes) => Plan::Http1(http(routes)),
            ClientProtocol::Http2(routes) => Plan::Http2(http(routes)),
            ClientProtocol::Grpc(routes) => Plan::Http2(Arc::new(self.router(StatusKind::Grpc, routes))),
            ClientProtocol::Opaque(route) => {
                Plan::Opaque(self.compile_opaque_route(route.as_ref(), DestinationProtocol::Opaque))
            }
            ClientProtocol::Tls(routes) => Plan::Tls {
                routes: routes.clone(),
                compiled: routes
                    .iter()
                    .map(|route| self.compile_opaque_route(Some(&route.route), DestinationProtocol::Tls))
                    .collect(),
            },
        }
    }

    /// The profile, if it may override the policy. No profile overrides the policy of an EgressNetwork, because then its traffic
    /// policy and its routes would be bypassed.
    fn overriding_profile(&self) -> Option<&Profile> {
        self.profile.filter(|_| !self.policy.is_egress_network())
    }

    /// The route of a port that the profile declares as opaque. The protocol of the policy is ignored.
    fn compile_opaque_profile(&self, profile: &Profile) -> Arc<CompiledOpaqueRoute> {
        match &self.policy.protocol {
            ClientProtocol::Opaque(route) | ClientProtocol::Detect { opaque: route, .. } => {
                self.compile_opaque_route(route.as_ref(), DestinationProtocol::Opaque)
            }
            _ if profile.overrides_opaque_policy() => {
                let backends = self.traffic_split_backends(profile, None, DestinationProtocol::Opaque);
                self.new_opaque_route(None, None, backends, DestinationProtocol::Opaque)
            }
            // The policy has no route for opaque bytes, and the profile has no traffic split. Opaque bytes go to the profile's
            // service.
            _ => {
                let backend = self.profile_service_backend(profile, None, DestinationProtocol::Opaque);
                self.new_opaque_route(None, None, Backends::single(backend), DestinationProtocol::Opaque)
            }
        }
    }

    fn router(&self, kind: StatusKind, http: &ClientHttp) -> Router {
        if let Some(profile) = self
            .overriding_profile()
            .filter(|profile| profile.overrides_http_policy())
        {
            return self.profile_router(profile, http.failure_accrual);
        }
        let parent = &self.policy.meta;
        let scope = self.metric_scope(parent, ANY_HTTP);
        let compile = |route: &Route<RouteAction>| {
            let series = self.factory.endpoint_context.families.route(kind, parent, &route.meta);
            route.map(|rule| CompiledAction {
                backends: self
                    .factory
                    .backends(&rule.action.backends, http.failure_accrual, &scope, |meta| {
                        Some(series.backend(meta))
                    }),
                mirrors: self.mirrors(rule, &route.meta, &scope),
                timeouts_and_retries: TimeoutsAndRetries::from_action(&rule.action, || {
                    self.previous_budget(&route.meta, &rule.matches)
                }),
                series: series.clone(),
            })
        };
        Router::Routes(http.routes.iter().map(compile).collect())
    }

    fn mirrors(&self, rule: &Rule<RouteAction>, route: &Arc<Meta>, scope: &MetricScope<'_>) -> Vec<Arc<Mirror>> {
        if rule.action.mirrors.is_empty() {
            return Vec::new();
        }
        let endpoint_context = &self.factory.endpoint_context;
        let previous = self.previous_action(route, &rule.matches);
        let previous = previous.map_or(&[][..], |action| &action.mirrors);
        let compile = |(n, spec): (usize, &MirrorSpec)| {
            let families = &endpoint_context.families;
            Arc::new(Mirror {
                backends: Backends::single(self.factory.backend(&spec.backend, None, scope)),
                ratio: spec.ratio,
                route: route.clone(),
                endpoint_context: endpoint_context.clone(),
                series: families.mirror(scope.parent, route, &spec.backend.meta),
                usage: previous
                    .get(n)
                    .map(|previous| previous.usage.clone())
                    .unwrap_or_default(),
            })
        };
        rule.action.mirrors.iter().enumerate().map(compile).collect()
    }

    /// Routes of a ServiceProfile. They replace the routes of the policy, whose filters and backends could contradict
    /// them.
    fn profile_router(&self, profile: &Profile, accrual: Option<FailureAccrual>) -> Router {
        let dst = format!("{}:{}", profile.name.as_deref().unwrap_or_default(), self.dst.port());
        let backends = match profile.traffic_split.is_empty() {
            true => Backends::single(self.profile_service_backend(profile, accrual, ANY_HTTP)),
            false => self.traffic_split_backends(profile, accrual, ANY_HTTP),
        };
        let families = &self.factory.endpoint_context.families.profiles;
        let previous = self.previous_routers().find_map(|router| match router {
            Router::Profile(previous) => Some(&**previous),
            Router::Routes(_) => None,
        });
        Router::Profile(Box::new(CompiledProfile::new(
            families, profile, &dst, backends, previous,
        )))
    }

    fn previous_routers(&self) -> impl Iterator<Item = &Router> {
        self.previous.into_iter().flat_map(|previous| previous.plan.routers())
    }

    /// Retry budget of the same rule in the previous snapshot.
    fn previous_budget(&self, route: &Arc<Meta>, matches: &[RequestMatch]) -> Option<Arc<RetryBudgetState>> {
        let action = self.previous_action(route, matches)?;
        Some(action.timeouts_and_retries.as_ref()?.budget().clone())
    }

    /// The action of the same rule in the previous snapshot.
    fn previous_action(&self, route: &Arc<Meta>, matches: &[RequestMatch]) -> Option<&CompiledAction> {
        let routes = self.previous_routers().filter_map(|router| match router {
            Router::Routes(routes) => Some(routes),
            Router::Profile(_) => None,
        });
        let same_route = routes.flatten().filter(|previous| previous.meta == *route);
        let mut rules = same_route.flat_map(|previous| &previous.rules);
        rules.find(|rule| rule.matches == matches).map(|rule| &rule.action)
    }

    /// Compiles an opaque or TLS route. The profile may override its backends.
    fn compile_opaque_route(
        &self,
        route: Option<&OpaqueRoute>,
        protocol: DestinationProtocol,
    ) -> Arc<CompiledOpaqueRoute> {
        let filter_refusal = route.and_then(|route| policy_refusal(&route.filters));
        let traffic_split = self
            .overriding_profile()
            .filter(|profile| profile.overrides_opaque_policy());
        let (refusal, backends) = match (traffic_split, route) {
            (Some(profile), _) => (filter_refusal, self.traffic_split_backends(profile, None, protocol)),
            (None, Some(route)) => {
                let scope = self.metric_scope(&self.policy.meta, protocol);
                let backends = self.factory.backends(&route.backends, None, &scope, |_| None);
                (filter_refusal, backends)
            }
            (None, None) => {
                let reason = "the policy has no route for opaque bytes";
                (Some(PolicyRefusal::Invalid(reason.into())), Backends::None)
            }
        };
        self.new_opaque_route(route, refusal, backends, protocol)
    }

    fn new_opaque_route(
        &self,
        route: Option<&OpaqueRoute>,
        refusal: Option<PolicyRefusal>,
        backends: Backends<OpaqueFilter>,
        protocol: DestinationProtocol,
    ) -> Arc<CompiledOpaqueRoute> {
        let families = &self.factory.endpoint_context.families.connections;
        let parent = &self.policy.meta;
        let meta = route.map_or(parent, |route| &route.meta);
        Arc::new(CompiledOpaqueRoute {
            refusal,
            backends,
            series: match protocol {
                DestinationProtocol::Tls => families.tls_route(parent, meta),
                _ => families.tcp_route(parent, meta, self.dst),
            },
        })
    }

    /// The backend of a profile without a traffic split: its service, or its single endpoint.
    fn profile_service_backend(
        &self,
        profile: &Profile,
        accrual: Option<FailureAccrual>,
        protocol: DestinationProtocol,
    ) -> Backend {
        match (&profile.name, &profile.endpoint) {
            (Some(name), _) => self.service_backend(&format!("{name}:{}", self.dst.port()), accrual, protocol),
            (None, Some(endpoint)) => Backend::Forward(self.factory.fixed_endpoint(endpoint)),
            (None, None) => Backend::Fail,
        }
    }

    /// The backends of a profile's traffic split.
    fn traffic_split_backends<F>(
        &self,
        profile: &Profile,
        accrual: Option<FailureAccrual>,
        protocol: DestinationProtocol,
    ) -> Backends<F> {
        let choices = profile.traffic_split.iter().map(|destination| BackendChoice {
            filters: Vec::new(),
            series: None,
            backend: self.service_backend(&destination.destination.to_string(), accrual, protocol),
        });
        match Weights::new(profile.traffic_split.iter().map(|destination| destination.weight)) {
            Some(weights) => Backends::ByWeight(weights, choices.collect()),
            None => Backends::None,
        }
    }

    /// `authority` is the service's name and port.
    fn service_backend(
        &self,
        authority: &str,
        accrual: Option<FailureAccrual>,
        protocol: DestinationProtocol,
    ) -> Backend {
        let scope = self.metric_scope(&self.policy.meta, protocol);
        self.factory
            .service_backend(&authority.into(), self.queue, accrual, &scope)
    }

    fn metric_scope<'a>(&'a self, parent: &'a Meta, protocol: DestinationProtocol) -> MetricScope<'a> {
        MetricScope {
            protocol,
            parent,
            dst: self.dst,
        }
    }
}

/// Every version of HTTP, in the metric scope of balancers. The metrics of balancers distinguish only HTTP, opaque and TLS.
const ANY_HTTP: DestinationProtocol = DestinationProtocol::Http1;

#[cfg(test)]
mod tests {
    use std::{sync::LazyLock, time::Duration};

    use parking_lot::Mutex;
    use tulle_core::metrics::Registry;
    use tulle_proto::destination::DestinationProfile;

    use super::*;
    use crate::{
        api::tests::start_profile_server,
        balance::balancer::Strategy,
        metrics::invalid_updates,
        outbound::endpoint::EndpointContext,
        policy::{
            client::{Distribution, TlsRoute},
            endpoint::EndpointSpec,
            meta::Resource,
            profile::WeightedDestination,
        },
    };

    static DST: LazyLock<Addr> = LazyLock::new(|| "10.1.2.3:3306".parse().unwrap());
    const DETECT_TIMEOUT: Duration = Duration::from_secs(10);
    const QUEUE: Queue = Queue {
        capacity: 1,
        failfast_timeout: Duration::from_secs(1),
    };

    async fn factory() -> BackendFactory {
        let (_, _, destinations) = start_profile_server(DestinationProfile::default()).await;
        BackendFactory {
            endpoint_context: Arc::new(EndpointContext::with_defaults()),
            destinations,
            strategy: Strategy::PeakEwma,
            min_queue_capacity: 1,
            invalid_updates: invalid_updates::Families::new(&Registry::new()),
            services: Mutex::default(),
            fixed_endpoints: Mutex::default(),
        }
    }

    fn meta(kind: &str) -> Arc<Meta> {
        Arc::new(Meta::Resource(Resource {
            group: "policy.linkerd.io".into(),
            kind: kind.into(),
            namespace: "shop".into(),
            name: "out".into(),
            section: "".into(),
            port: None,
        }))
    }

    /// The profile of an opaque port of a pod, or of an address without a pod whose port is opaque by default.
    fn opaque_profile() -> Profile {
        Profile {
            is_opaque: true,
            endpoint: Some(Arc::new(EndpointSpec::plain(([10, 1, 2, 3], 3306).into()))),
            ..Profile::default()
        }
    }

    /// The profile of a service with a traffic split.
    fn split_profile() -> Profile {
        let destination = WeightedDestination {
            destination: "other.shop.svc.cluster.local:3306".parse().unwrap(),
            weight: 1,
            backend: None,
        };
        Profile {
            name: Some("web.shop.svc.cluster.local".into()),
            traffic_split: [destination].into(),
            ..Profile::default()
        }
    }

    fn denied_route() -> OpaqueRoute {
        OpaqueRoute {
            meta: Meta::default_named("egress-deny"),
            filters: vec![OpaqueFilter::Forbidden],
            backends: Distribution::Empty,
        }
    }

    /// Each kind of protocol that an EgressNetwork can have, and the protocol of the plan that is compiled from it.
    fn denying_protocols() -> Vec<(ClientProtocol, DestinationProtocol)> {
        let http = || ClientHttp {
            routes: Arc::default(),
            failure_accrual: None,
        };
        let detect = ClientProtocol::Detect {
            timeout: DETECT_TIMEOUT,
            http1: http(),
            http2: http(),
            opaque: Some(denied_route()),
        };
        let tls_route = TlsRoute {
            snis: Vec::new(),
            route: denied_route(),
        };
        vec![
            (ClientProtocol::Tls([tls_route].into()), DestinationProtocol::Tls),
            (ClientProtocol::Grpc(http()), DestinationProtocol::Http2),
            (ClientProtocol::Http1(http()), DestinationProtocol::Http1),
            (ClientProtocol::Http2(http()), DestinationProtocol::Http2),
            (detect, DestinationProtocol::Detect),
            (
                ClientProtocol::Opaque(Some(denied_route())),
                DestinationProtocol::Opaque,
            ),
        ]
    }

    fn compile_plan(factory: &BackendFactory, kind: &str, protocol: &ClientProtocol, profile: &Profile) -> Plan {
        let compiler = Compiler {
            factory,
            policy: ClientPolicy {
                meta: meta(kind),
                protocol: protocol.clone(),
            },
            profile: Some(profile),
            queue: QUEUE,
            dst: &DST,
            previous: None,
        };
        compiler.compile().plan
    }

    #[tokio::test]
    async fn no_profile_overrides_the_policy_of_an_egress_network() {
        let factory = factory().await;
        for (protocol, expected) in denying_protocols() {
            for profile in [opaque_profile(), split_profile()] {
                let plan = compile_plan(&factory, "EgressNetwork", &protocol, &profile);
                assert_eq!(plan.protocol(), expected, "{protocol:?} {profile:?}");
                let is_by_policy = |router: &Router| matches!(router, Router::Routes(_));
                assert!(plan.routers().all(is_by_policy), "{protocol:?} {profile:?}");
                let (Plan::Opaque(opaque) | Plan::Detect { opaque, .. }) = &plan else {
                    if let Plan::Tls { compiled, .. } = &plan {
                        assert_eq!(compiled[0].refusal, Some(PolicyRefusal::Forbidden));
                    }
                    continue;
                };
                assert_eq!(opaque.refusal, Some(PolicyRefusal::Forbidden));
                assert!(matches!(opaque.backends, Backends::None), "{protocol:?} {profile:?}");
            }
        }
    }

    #[tokio::test]
    async fn an_opaque_profile_overrides_the_protocol_of_other_policies() {
        let factory = factory().await;
        for (protocol, _) in denying_protocols() {
            let plan = compile_plan(&factory, "Service", &protocol, &opaque_profile());
            assert_eq!(plan.protocol(), DestinationProtocol::Opaque, "{protocol:?}");
        }
    }
}
