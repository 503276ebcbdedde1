//! Finds references that have no effect because of other objects:
//! - the target or authentication of an authorization does not exist, or the target is a route without a Server as parent;
//! - the Service after which a ServiceProfile is named does not exist;
//! - the parent of a route is a Service whose ServiceProfile replaces the route.

use ahash::{AHashMap, AHashSet};

use crate::cluster::config::Config;
use crate::cluster::metrics::{GaugeGuard, Metrics};
use crate::cluster::store::objects::{LookupKey, Store};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::profiles;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::authorization::{
    AuthorizationPolicy, AuthorizationTarget, RequiredAuthentication, ServerAuthorization, ServerSelector,
};
use crate::resources::route::{Parent, ParentKind, Route, RouteKind};
use crate::resources::service::ServiceKind;
use crate::resources::service_profile::ServiceProfile;
use crate::resources::unserved::UnservedPart;
use crate::resources::{Kind, Object};

/// The checked authorizations, ServiceProfiles and routes. Only objects that depend on a changed object are checked again.
#[derive(Default)]
pub(in crate::cluster) struct IneffectiveReferences {
    is_synced: bool,
    objects: AHashMap<ObjectId, CheckedObject>,
    /// For each lookup key, the checked objects that depend on its objects.
    dependents: AHashMap<LookupKey, AHashSet<ObjectId>>,
}

type ObjectId = (Kind, NamespacedName);

struct CheckedObject {
    dependencies: AHashSet<LookupKey>,
    /// The references without effect, each with the guard that counts it.
    ineffective: Vec<(UnservedPart, GaugeGuard)>,
}

impl IneffectiveReferences {
    /// Checks the objects that depend on changed objects, counts their references without effect, and returns the references that
    /// were not reported before.
    ///
    /// Does nothing until the source is synced, because objects that are not listed yet would count as missing.
    pub(in crate::cluster) fn update(
        &mut self,
        metrics: &Metrics,
        (store, config): (&Store, &Config),
        changed_keys: &AHashSet<LookupKey>,
        is_synced: bool,
    ) -> Vec<(Kind, NamespacedName, UnservedPart)> {
        let affected = match (self.is_synced, is_synced) {
            (true, _) => self.affected(changed_keys),
            (false, true) => objects_to_check(store),
            (false, false) => return Vec::new(),
        };
        self.is_synced = true;
        let mut new = Vec::new();
        for id in affected {
            let found = self.check(metrics, store, config, &id);
            new.extend(found.into_iter().map(|part| (id.0, id.1.clone(), part)));
        }
        new
    }

    fn affected(&self, changed_keys: &AHashSet<LookupKey>) -> AHashSet<ObjectId> {
        let mut affected = AHashSet::new();
        for key in changed_keys {
            if let LookupKey::Object(kind, name) = key
                && is_checked_kind(*kind)
            {
                affected.insert((*kind, name.clone()));
            }
            affected.extend(self.dependents.get(key).into_iter().flatten().cloned());
        }
        affected
    }

    /// Returns the references without effect that were not counted before.
    fn check(&mut self, metrics: &Metrics, store: &Store, config: &Config, id: &ObjectId) -> Vec<UnservedPart> {
        let before = self.remove(id);
        let reader = Reader::new(store);
        let object = store.object(id.0, &id.1);
        let found = match (object, object.and_then(Object::route)) {
            (Some(Object::AuthorizationPolicy(policy)), _) => check_policy(&reader, policy),
            (Some(Object::ServerAuthorization(authorization)), _) => check_server_authorization(&reader, authorization),
            (Some(Object::ServiceProfile(profile)), _) => check_service_profile(&reader, config, profile),
            (_, Some(route)) => check_route(&reader, config, route),
            _ => return Vec::new(),
        };
        let dependencies = reader.into_dependencies();
        for key in &dependencies {
            self.dependents.entry(key.clone()).or_default().insert(id.clone());
        }
        let is_new = |part: &&UnservedPart| !before.iter().any(|(counted, _)| counted == *part);
        let new = found.iter().filter(is_new).cloned().collect();
        let counted = found.into_iter().map(|part| {
            let guard = metrics.unserved_guard(id.0, &id.1, part.field);
            (part, guard)
        });
        let checked = CheckedObject {
            dependencies,
            ineffective: counted.collect(),
        };
        self.objects.insert(id.clone(), checked);
        new
    }

    /// Removes an object. Returns its counted references.
    fn remove(&mut self, id: &ObjectId) -> Vec<(UnservedPart, GaugeGuard)> {
        let Some(before) = self.objects.remove(id) else {
            return Vec::new();
        };
        for key in &before.dependencies {
            if let Some(dependents) = self.dependents.get_mut(key) {
                dependents.remove(id);
                if dependents.is_empty() {
                    self.dependents.remove(key);
                }
            }
        }
        before.ineffective
    }
}

fn objects_to_check(store: &Store) -> AHashSet<ObjectId> {
    let checked = store.all().filter(|object| is_checked_kind(object.kind()));
    checked
        .map(|object| (object.kind(), object.meta().name.clone()))
        .collect()
}

fn is_checked_kind(kind: Kind) -> bool {
    let is_authorization = matches!(kind, Kind::AuthorizationPolicy | Kind::ServerAuthorization);
    is_authorization || kind == Kind::ServiceProfile || kind.is_route()
}

fn check_policy(reader: &Reader<'_>, policy: &AuthorizationPolicy) -> Vec<UnservedPart> {
    let mut found = Vec::new();
    let namespace = policy.meta.namespace();
    let missing_target = match &policy.target {
        AuthorizationTarget::Server(name) => missing_object(
            reader,
            Kind::Server,
            &NamespacedName::new(namespace.clone(), name.clone()),
        ),
        AuthorizationTarget::Route(kind, name) => {
            let (kind, name) = (route_kind(*kind), NamespacedName::new(namespace.clone(), name.clone()));
            missing_object(reader, kind, &name).or_else(|| missing_server(reader, kind, &name))
        }
        AuthorizationTarget::Namespace => reader
            .servers(namespace)
            .is_empty()
            .then(|| format!("the namespace {namespace} has no Server")),
    };
    found.extend(missing_target.map(|missing| UnservedPart {
        field: "spec.targetRef",
        reason: format!("{missing}, so the policy has no effect"),
    }));
    let network = policy.network.as_ref();
    let network = network.and_then(|name| missing_object(reader, Kind::NetworkAuthentication, name));
    let client = match &policy.client {
        Some(RequiredAuthentication::MeshTls(name)) => missing_object(reader, Kind::MeshTlsAuthentication, name),
        // Service accounts are not watched.
        Some(RequiredAuthentication::ServiceAccount(_)) | None => None,
    };
    found.extend(network.into_iter().chain(client).map(|missing| UnservedPart {
        field: "spec.requiredAuthenticationRefs",
        reason: format!("{missing}, so the policy authorizes no client"),
    }));
    found
}

fn check_server_authorization(reader: &Reader<'_>, authorization: &ServerAuthorization) -> Vec<UnservedPart> {
    let namespace = authorization.meta.namespace();
    let missing = match &authorization.servers {
        ServerSelector::Name(name) => missing_object(
            reader,
            Kind::Server,
            &NamespacedName::new(namespace.clone(), name.clone()),
        ),
        ServerSelector::Selector(selector) => {
            let servers = reader.servers(namespace);
            let is_selected = servers.iter().any(|server| selector.matches(&server.meta.labels));
            (!is_selected).then(|| format!("the selector matches no Server of the namespace {namespace}"))
        }
    };
    let part = missing.map(|missing| UnservedPart {
        field: "spec.server",
        reason: format!("{missing}, so the ServerAuthorization has no effect"),
    });
    part.into_iter().collect()
}

/// Checks that the name of a ServiceProfile is the name of a Service that can have a profile.
fn check_service_profile(reader: &Reader<'_>, config: &Config, profile: &ServiceProfile) -> Vec<UnservedPart> {
    let domain = &config.cluster_domain;
    let reason = match profile.service(domain) {
        None => Some(format!(
            "it is not <service>.<namespace>.svc.{domain}; only Services of the cluster have profiles"
        )),
        Some(name) => match reader.service(&name) {
            None => Some(format!("Service {name} does not exist or cannot be read")),
            Some(service) if service.kind == ServiceKind::ExternalName => Some(format!(
                "Service {name} has the type ExternalName, to which no ServiceProfile applies"
            )),
            Some(_) => None,
        },
    };
    let part = reason.map(|reason| UnservedPart {
        field: "metadata.name",
        reason: format!("{reason}, so the ServiceProfile has no effect"),
    });
    part.into_iter().collect()
}

/// Finds references of a route to Services whose ServiceProfile replaces it.
///
/// The profile is the one for clients in the route's namespace. A client namespace can have its own profile of the Service; such
/// a profile is not checked.
fn check_route(reader: &Reader<'_>, config: &Config, route: &Route) -> Vec<UnservedPart> {
    // A parentRef with a sectionName is not accepted for a Service, and the status says so.
    let is_service = |parent: &&Parent| parent.kind == ParentKind::Service && parent.section.is_none();
    let mut found = Vec::new();
    for parent in route.parents.iter().filter(is_service) {
        let namespace = Some(route.meta.namespace());
        let profile = reader
            .service(&parent.name)
            .filter(|service| service.kind == ServiceKind::ClusterIp)
            .and_then(|service| profiles::find_service_profile(reader, config, &service.meta.name, namespace));
        if let Some(profile) = profile.filter(|profile| profile.replaces_routes(route.kind)) {
            let part = UnservedPart {
                field: "spec.parentRefs",
                reason: profile.replacement_message(&parent.name),
            };
            // A parent that is referenced twice counts once.
            if !found.contains(&part) {
                found.push(part);
            }
        }
    }
    found
}

/// Describes that an existing route has no Server as a parent. `None` if it has one.
fn missing_server(reader: &Reader<'_>, kind: Kind, name: &NamespacedName) -> Option<String> {
    let route = reader.route(kind, name)?;
    let is_server = |parent: &Parent| {
        let is_in_namespace = parent.kind == ParentKind::Server && parent.name.namespace == name.namespace;
        is_in_namespace && reader.exists(Kind::Server, &parent.name)
    };
    let has_server = route.parents.iter().any(is_server);
    (!has_server).then(|| {
        format!(
            "{} {name} has no parentRef to a Server that exists in its namespace",
            kind.info().name
        )
    })
}

/// Describes an object that does not exist. `None` if it exists.
fn missing_object(reader: &Reader<'_>, kind: Kind, name: &NamespacedName) -> Option<String> {
    let info = kind.info();
    (!reader.exists(kind, name)).then(|| {
        format!(
            "{} {name} (group {}) does not exist or cannot be read",
            info.name, info.group
        )
    })
}

fn route_kind(kind: RouteKind) -> Kind {
    match kind {
        RouteKind::PolicyHttp => Kind::PolicyHttpRoute,
        RouteKind::GatewayHttp => Kind::GatewayHttpRoute,
        RouteKind::Grpc => Kind::GrpcRoute,
        RouteKind::Tls => Kind::TlsRoute,
        RouteKind::Tcp => Kind::TcpRoute,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::resources::event::Event;
    use crate::resources::{decode, unserved};

    struct TestCluster {
        registry: Registry,
        metrics: Metrics,
        store: Store,
        ineffective: IneffectiveReferences,
        is_synced: bool,
    }

    impl TestCluster {
        fn new() -> Self {
            let registry = Registry::new();
            Self {
                metrics: Metrics::new(&registry),
                registry,
                store: Store::default(),
                ineffective: IneffectiveReferences::default(),
                is_synced: true,
            }
        }

        /// Applies events. Returns the reported references, as `name field: reason`.
        fn apply(&mut self, events: Vec<Event>) -> Vec<String> {
            let mut changed_keys = AHashSet::new();
            for event in events {
                self.store.apply(event, &mut changed_keys);
            }
            let reported = self.ineffective.update(
                &self.metrics,
                (&self.store, &Config::default()),
                &changed_keys,
                self.is_synced,
            );
            let line = |(_, name, part): (Kind, NamespacedName, UnservedPart)| {
                format!("{} {}: {}", name.name, part.field, part.reason)
            };
            let mut reported: Vec<_> = reported.into_iter().map(line).collect();
            reported.sort();
            reported
        }

        fn counted(&self) -> Vec<String> {
            unserved::counted_parts(&self.registry)
        }
    }

    fn object(kind: Kind, name: &str, labels: Value, spec: Value) -> Event {
        let metadata = json!({"name": name, "namespace": "shop", "labels": labels});
        Event::Applied(decode(kind, &json!({"metadata": metadata, "spec": spec})).unwrap())
    }

    fn policy(name: &str, target: &str, authentications: &[(&str, &str)]) -> Event {
        let (kind, target) = target.split_once('/').unwrap();
        let group = match kind {
            "Namespace" => "",
            "GRPCRoute" => "gateway.networking.k8s.io",
            _ => "policy.linkerd.io",
        };
        let authentications = authentications.iter().map(|(kind, name)| {
            let group = if *kind == "ServiceAccount" {
                ""
            } else {
                "policy.linkerd.io"
            };
            json!({"group": group, "kind": kind, "name": name})
        });
        let spec = json!({
            "targetRef": {"group": group, "kind": kind, "name": target},
            "requiredAuthenticationRefs": authentications.collect::<Vec<_>>(),
        });
        object(Kind::AuthorizationPolicy, name, json!({}), spec)
    }

    fn server_authorization(name: &str, server: Value) -> Event {
        let spec = json!({"server": server, "client": {"unauthenticated": true}});
        object(Kind::ServerAuthorization, name, json!({}), spec)
    }

    fn server(name: &str) -> Event {
        let spec = json!({"podSelector": {}, "port": 80});
        object(Kind::Server, name, json!({"app": name}), spec)
    }

    fn networks(name: &str) -> Event {
        let spec = json!({"networks": [{"cidr": "10.0.0.0/8"}]});
        object(Kind::NetworkAuthentication, name, json!({}), spec)
    }

    fn mesh_tls(name: &str) -> Event {
        object(
            Kind::MeshTlsAuthentication,
            name,
            json!({}),
            json!({"identities": ["*"]}),
        )
    }

    fn route(kind: Kind, name: &str, parent: Value) -> Event {
        object(kind, name, json!({}), json!({"parentRefs": [parent], "rules": [{}]}))
    }

    fn server_ref(name: &str) -> Value {
        json!({"group": "policy.linkerd.io", "kind": "Server", "name": name})
    }

    fn service(name: &str, spec: Value) -> Event {
        object(Kind::Service, name, json!({}), spec)
    }

    fn deleted(kind: Kind, name: &str) -> Event {
        Event::Deleted(kind, NamespacedName::new("shop", name))
    }

    /// A Server `web`, and authorizations that refer to objects that exist and to objects that do not exist.
    fn authorizations() -> Vec<Event> {
        vec![
            server("web"),
            policy("clients", "Server/web", &[("MeshTLSAuthentication", "web-clients")]),
            policy("networks", "Server/web", &[("NetworkAuthentication", "lan")]),
            policy("account", "Server/web", &[("ServiceAccount", "any")]),
            policy("of-server", "Server/wbe", &[]),
            policy("of-route", "GRPCRoute/calls", &[]),
            policy("of-policy-route", "HTTPRoute/pages", &[]),
            policy("of-outbound-route", "GRPCRoute/outbound", &[]),
            policy("of-lost-route", "GRPCRoute/lost", &[]),
            policy("of-namespace", "Namespace/shop", &[]),
            route(
                Kind::GrpcRoute,
                "outbound",
                json!({"group": "", "kind": "Service", "name": "web"}),
            ),
            route(Kind::GrpcRoute, "lost", server_ref("wbe")),
            server_authorization("old-name", json!({"name": "wbe"})),
            server_authorization("old-labels", json!({"selector": {"matchLabels": {"app": "wbe"}}})),
            server_authorization("old-good", json!({"selector": {"matchLabels": {"app": "web"}}})),
        ]
    }

    #[test]
    fn references_are_counted_while_their_object_does_not_exist() {
        let mut cluster = TestCluster::new();
        let reported = cluster.apply(authorizations());
        let expected = [
            "clients spec.requiredAuthenticationRefs",
            "networks spec.requiredAuthenticationRefs",
            "of-lost-route spec.targetRef",
            "of-outbound-route spec.targetRef",
            "of-policy-route spec.targetRef",
            "of-route spec.targetRef",
            "of-server spec.targetRef",
            "old-labels spec.server",
            "old-name spec.server",
        ];
        assert_eq!(cluster.counted(), expected);
        assert_eq!(
            reported[0],
            "clients spec.requiredAuthenticationRefs: MeshTLSAuthentication shop/web-clients (group policy.linkerd.io) \
             does not exist or cannot be read, so the policy authorizes no client"
        );
        assert_eq!(reported.len(), expected.len());
        assert!(
            reported.contains(
                &"of-outbound-route spec.targetRef: GRPCRoute shop/outbound has no parentRef to a Server that exists in its \
                  namespace, so the policy has no effect"
                    .to_owned()
            ),
            "{reported:?}"
        );

        let reported = cluster.apply(vec![
            mesh_tls("web-clients"),
            networks("lan"),
            server("wbe"),
            route(Kind::GrpcRoute, "calls", server_ref("web")),
            route(Kind::GrpcRoute, "outbound", server_ref("web")),
            // A route of the same name in another group is another object.
            route(Kind::GatewayHttpRoute, "pages", server_ref("web")),
        ]);
        assert_eq!(reported, [""; 0]);
        assert_eq!(cluster.counted(), ["of-policy-route spec.targetRef"]);

        let reported = cluster.apply(vec![deleted(Kind::NetworkAuthentication, "lan")]);
        assert_eq!(reported.len(), 1, "{reported:?}");
        assert_eq!(
            cluster.apply(vec![networks("wan")]),
            [""; 0],
            "the same reason is reported once"
        );
        cluster.apply(vec![deleted(Kind::Server, "wbe"), deleted(Kind::Server, "web")]);
        let all_targets = cluster.counted();
        assert!(
            all_targets.contains(&"of-namespace spec.targetRef".to_owned()),
            "{all_targets:?}"
        );
        cluster.apply(vec![
            deleted(Kind::AuthorizationPolicy, "clients"),
            deleted(Kind::AuthorizationPolicy, "networks"),
            deleted(Kind::AuthorizationPolicy, "account"),
            deleted(Kind::AuthorizationPolicy, "of-server"),
            deleted(Kind::AuthorizationPolicy, "of-route"),
            deleted(Kind::AuthorizationPolicy, "of-policy-route"),
            deleted(Kind::AuthorizationPolicy, "of-outbound-route"),
            deleted(Kind::AuthorizationPolicy, "of-lost-route"),
            deleted(Kind::AuthorizationPolicy, "of-namespace"),
            deleted(Kind::ServerAuthorization, "old-name"),
            deleted(Kind::ServerAuthorization, "old-labels"),
            deleted(Kind::ServerAuthorization, "old-good"),
        ]);
        assert_eq!(cluster.counted(), [""; 0]);
        assert!(cluster.ineffective.dependents.is_empty());
    }

    #[test]
    fn service_profiles_without_a_service_are_counted() {
        let mut cluster = TestCluster::new();
        let profile = |name: &str| object(Kind::ServiceProfile, name, json!({}), json!({}));
        let reported = cluster.apply(vec![
            service("web", json!({"clusterIP": "10.0.0.1", "ports": [{"port": 80}]})),
            service("alias", json!({"type": "ExternalName", "externalName": "example.org"})),
            profile("web.shop.svc.cluster.local"),
            profile("wbe.shop.svc.cluster.local"),
            profile("alias.shop.svc.cluster.local"),
            profile("web.shop.svc.example.org"),
            profile("web-0.web.shop.svc.cluster.local"),
            profile("example.org"),
        ]);
        let expected = [
            "alias.shop.svc.cluster.local metadata.name",
            "example.org metadata.name",
            "wbe.shop.svc.cluster.local metadata.name",
            "web-0.web.shop.svc.cluster.local metadata.name",
            "web.shop.svc.example.org metadata.name",
        ];
        assert_eq!(cluster.counted(), expected);
        assert_eq!(
            reported[1..3],
            [
                "example.org metadata.name: it is not <service>.<namespace>.svc.cluster.local; only Services of the cluster have \
                 profiles, so the ServiceProfile has no effect",
                "wbe.shop.svc.cluster.local metadata.name: Service shop/wbe does not exist or cannot be read, so the \
                 ServiceProfile has no effect",
            ]
        );
        cluster.apply(vec![service(
            "wbe",
            json!({"clusterIP": "10.0.0.2", "ports": [{"port": 80}]}),
        )]);
        assert!(!cluster.counted().contains(&expected[2].to_owned()));
        cluster.apply(vec![deleted(Kind::Service, "web")]);
        assert!(
            cluster
                .counted()
                .contains(&"web.shop.svc.cluster.local metadata.name".to_owned())
        );
    }

    #[test]
    fn routes_that_a_profile_replaces_are_counted() {
        let mut cluster = TestCluster::new();
        let in_namespace = |namespace: &str, kind: Kind, name: &str, spec: Value| {
            let metadata = json!({"name": name, "namespace": namespace});
            Event::Applied(decode(kind, &json!({"metadata": metadata, "spec": spec})).unwrap())
        };
        let profile = |namespace: &str, spec: Value| {
            in_namespace(namespace, Kind::ServiceProfile, "web.shop.svc.cluster.local", spec)
        };
        let web = json!({"group": "", "kind": "Service", "name": "web", "namespace": "shop", "port": 80});
        let routes = json!({"routes": [{"name": "get", "condition": {"method": "GET"}}]});
        let split = json!({"dstOverrides": [{"authority": "web.shop.svc.cluster.local", "weight": "1"}]});
        let backends = json!([{"backendRefs": [{"name": "web", "port": 80}]}]);
        cluster.apply(vec![
            service("web", json!({"clusterIP": "10.0.0.1", "ports": [{"port": 80}]})),
            route(Kind::GatewayHttpRoute, "http", web.clone()),
            route(Kind::GrpcRoute, "grpc", web.clone()),
            route(Kind::PolicyHttpRoute, "inbound", server_ref("web")),
            object(
                Kind::TcpRoute,
                "tcp",
                json!({}),
                json!({"parentRefs": [web], "rules": backends}),
            ),
            in_namespace(
                "front",
                Kind::GatewayHttpRoute,
                "consumer",
                json!({"parentRefs": [web], "rules": [{}]}),
            ),
        ]);
        assert_eq!(cluster.counted(), [""; 0]);
        let reported = cluster.apply(vec![profile("shop", routes)]);
        assert_eq!(
            cluster.counted(),
            [
                "consumer spec.parentRefs",
                "grpc spec.parentRefs",
                "http spec.parentRefs"
            ]
        );
        assert_eq!(
            reported[2],
            "http spec.parentRefs: ServiceProfile shop/web.shop.svc.cluster.local replaces the route for Service shop/web, because \
             it has routes or dstOverrides; remove the route, or these fields"
        );
        // Clients in `front` have their own profile, which replaces no route.
        cluster.apply(vec![profile("front", json!({}))]);
        assert_eq!(cluster.counted(), ["grpc spec.parentRefs", "http spec.parentRefs"]);
        cluster.apply(vec![profile("shop", split)]);
        assert_eq!(
            cluster.counted(),
            ["grpc spec.parentRefs", "http spec.parentRefs", "tcp spec.parentRefs"]
        );
        cluster.apply(vec![profile("shop", json!({}))]);
        assert_eq!(cluster.counted(), [""; 0]);
    }

    #[test]
    fn nothing_is_counted_before_all_objects_are_listed() {
        let mut cluster = TestCluster::new();
        cluster.is_synced = false;
        cluster.apply(vec![policy("p", "Server/web", &[("NetworkAuthentication", "lan")])]);
        assert_eq!(cluster.counted(), [""; 0]);
        cluster.apply(vec![networks("lan")]);
        cluster.is_synced = true;
        assert_eq!(cluster.apply(Vec::new()).len(), 1);
        assert_eq!(cluster.counted(), ["p spec.targetRef"]);
    }
}
