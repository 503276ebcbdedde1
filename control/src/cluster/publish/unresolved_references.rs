//! Finds authorizations that authorize no client because another object does not exist: their target or an authentication that
//! they require.

use ahash::{AHashMap, AHashSet};

use crate::cluster::metrics::{GaugeGuard, Metrics};
use crate::cluster::store::objects::{LookupKey, Store};
use crate::cluster::store::reader::Reader;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::authorization::{
    AuthorizationPolicy, AuthorizationTarget, RequiredAuthentication, ServerAuthorization, ServerSelector,
};
use crate::resources::route::RouteKind;
use crate::resources::unsupported::UnsupportedPart;
use crate::resources::{Kind, Object};

/// The AuthorizationPolicies and ServerAuthorizations. Only those that depend on a changed object are checked again.
#[derive(Default)]
pub(in crate::cluster) struct UnresolvedReferences {
    is_synced: bool,
    authorizations: AHashMap<AuthorizationId, CheckedAuthorization>,
    /// For each lookup key, the authorizations that depend on its objects.
    dependents: AHashMap<LookupKey, AHashSet<AuthorizationId>>,
}

type AuthorizationId = (Kind, NamespacedName);

struct CheckedAuthorization {
    dependencies: AHashSet<LookupKey>,
    /// The references to objects that do not exist, as they are counted.
    unresolved: Vec<(UnsupportedPart, GaugeGuard)>,
}

impl UnresolvedReferences {
    /// Checks the authorizations that depend on changed objects, counts those with unresolved references, and returns the
    /// references that were not reported before.
    ///
    /// Until the source is synced it does nothing, because objects that are not listed yet would count as missing.
    pub(in crate::cluster) fn update(
        &mut self,
        metrics: &Metrics,
        store: &Store,
        changed_keys: &AHashSet<LookupKey>,
        is_synced: bool,
    ) -> Vec<(Kind, NamespacedName, UnsupportedPart)> {
        let affected = match (self.is_synced, is_synced) {
            (true, _) => self.affected(changed_keys),
            (false, true) => all_authorizations(store),
            (false, false) => return Vec::new(),
        };
        self.is_synced = true;
        let mut new = Vec::new();
        for id in affected {
            let found = self.check(metrics, store, &id);
            new.extend(found.into_iter().map(|part| (id.0, id.1.clone(), part)));
        }
        new
    }

    fn affected(&self, changed_keys: &AHashSet<LookupKey>) -> AHashSet<AuthorizationId> {
        let mut affected = AHashSet::new();
        for key in changed_keys {
            if let LookupKey::Object(kind @ (Kind::AuthorizationPolicy | Kind::ServerAuthorization), name) = key {
                affected.insert((*kind, name.clone()));
            }
            affected.extend(self.dependents.get(key).into_iter().flatten().cloned());
        }
        affected
    }

    /// Returns the unresolved references that were not counted before.
    fn check(&mut self, metrics: &Metrics, store: &Store, id: &AuthorizationId) -> Vec<UnsupportedPart> {
        let before = self.remove(id);
        let reader = Reader::new(store);
        let found = match store.object(id.0, &id.1) {
            Some(Object::AuthorizationPolicy(policy)) => check_policy(&reader, policy),
            Some(Object::ServerAuthorization(authorization)) => check_server_authorization(&reader, authorization),
            _ => return Vec::new(),
        };
        let dependencies = reader.into_dependencies();
        for key in &dependencies {
            self.dependents.entry(key.clone()).or_default().insert(id.clone());
        }
        let is_new = |part: &&UnsupportedPart| !before.iter().any(|(counted, _)| counted == *part);
        let new = found.iter().filter(is_new).cloned().collect();
        let counted = found.into_iter().map(|part| {
            let guard = metrics.unsupported_guard(id.0, &id.1, part.field);
            (part, guard)
        });
        let checked = CheckedAuthorization {
            dependencies,
            unresolved: counted.collect(),
        };
        self.authorizations.insert(id.clone(), checked);
        new
    }

    /// Removes an authorization. Returns the references that are counted.
    fn remove(&mut self, id: &AuthorizationId) -> Vec<(UnsupportedPart, GaugeGuard)> {
        let Some(before) = self.authorizations.remove(id) else {
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
        before.unresolved
    }
}

fn all_authorizations(store: &Store) -> AHashSet<AuthorizationId> {
    let is_authorization =
        |object: &&Object| matches!(object, Object::AuthorizationPolicy(_) | Object::ServerAuthorization(_));
    let authorizations = store.all().filter(is_authorization);
    authorizations
        .map(|object| (object.kind(), object.meta().name.clone()))
        .collect()
}

fn check_policy(reader: &Reader<'_>, policy: &AuthorizationPolicy) -> Vec<UnsupportedPart> {
    let mut found = Vec::new();
    let namespace = policy.meta.namespace();
    let missing_target = match &policy.target {
        AuthorizationTarget::Server(name) => missing_object(
            reader,
            Kind::Server,
            &NamespacedName::new(namespace.clone(), name.clone()),
        ),
        AuthorizationTarget::Route(kind, name) => missing_object(
            reader,
            route_kind(*kind),
            &NamespacedName::new(namespace.clone(), name.clone()),
        ),
        AuthorizationTarget::Namespace => reader
            .servers(namespace)
            .is_empty()
            .then(|| format!("the namespace {namespace} has no Server")),
    };
    found.extend(missing_target.map(|missing| UnsupportedPart {
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
    found.extend(network.into_iter().chain(client).map(|missing| UnsupportedPart {
        field: "spec.requiredAuthenticationRefs",
        reason: format!("{missing}, so the policy authorizes no client"),
    }));
    found
}

fn check_server_authorization(reader: &Reader<'_>, authorization: &ServerAuthorization) -> Vec<UnsupportedPart> {
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
    let part = missing.map(|missing| UnsupportedPart {
        field: "spec.server",
        reason: format!("{missing}, so the ServerAuthorization has no effect"),
    });
    part.into_iter().collect()
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
    use crate::cluster::store::objects::Changes;
    use crate::resources::event::Event;
    use crate::resources::{decode, unsupported};

    struct TestCluster {
        registry: Registry,
        metrics: Metrics,
        store: Store,
        unresolved: UnresolvedReferences,
        is_synced: bool,
    }

    impl TestCluster {
        fn new() -> Self {
            let registry = Registry::new();
            Self {
                metrics: Metrics::new(&registry),
                registry,
                store: Store::default(),
                unresolved: UnresolvedReferences::default(),
                is_synced: true,
            }
        }

        /// Applies events. Returns the reported references, as `name field: reason`.
        fn apply(&mut self, events: Vec<Event>) -> Vec<String> {
            let mut changes = Changes::default();
            for event in events {
                self.store.apply(event, &mut changes);
            }
            let reported = self
                .unresolved
                .update(&self.metrics, &self.store, &changes.keys, self.is_synced);
            let line = |(_, name, part): (Kind, NamespacedName, UnsupportedPart)| {
                format!("{} {}: {}", name.name, part.field, part.reason)
            };
            let mut reported: Vec<_> = reported.into_iter().map(line).collect();
            reported.sort();
            reported
        }

        fn counted(&self) -> Vec<String> {
            unsupported::counted_parts(&self.registry)
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

    fn deleted(kind: Kind, name: &str) -> Event {
        Event::Deleted(kind, NamespacedName::new("shop", name))
    }

    #[test]
    fn references_are_counted_while_their_object_does_not_exist() {
        let mut cluster = TestCluster::new();
        let reported = cluster.apply(vec![
            server("web"),
            policy("clients", "Server/web", &[("MeshTLSAuthentication", "web-clients")]),
            policy("networks", "Server/web", &[("NetworkAuthentication", "lan")]),
            policy("account", "Server/web", &[("ServiceAccount", "any")]),
            policy("of-server", "Server/wbe", &[]),
            policy("of-route", "GRPCRoute/calls", &[]),
            policy("of-policy-route", "HTTPRoute/pages", &[]),
            policy("of-namespace", "Namespace/shop", &[]),
            server_authorization("old-name", json!({"name": "wbe"})),
            server_authorization("old-labels", json!({"selector": {"matchLabels": {"app": "wbe"}}})),
            server_authorization("old-good", json!({"selector": {"matchLabels": {"app": "web"}}})),
        ]);
        let expected = [
            "clients spec.requiredAuthenticationRefs",
            "networks spec.requiredAuthenticationRefs",
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

        let rules = json!({"parentRefs": [], "rules": []});
        let reported = cluster.apply(vec![
            mesh_tls("web-clients"),
            networks("lan"),
            server("wbe"),
            object(Kind::GrpcRoute, "calls", json!({}), rules.clone()),
            // A route of the same name in another group is another object.
            object(Kind::GatewayHttpRoute, "pages", json!({}), rules),
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
            deleted(Kind::AuthorizationPolicy, "of-namespace"),
            deleted(Kind::ServerAuthorization, "old-name"),
            deleted(Kind::ServerAuthorization, "old-labels"),
            deleted(Kind::ServerAuthorization, "old-good"),
        ]);
        assert_eq!(cluster.counted(), [""; 0]);
        assert!(cluster.unresolved.dependents.is_empty());
    }

    #[test]
    fn nothing_is_missing_before_all_objects_are_listed() {
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
