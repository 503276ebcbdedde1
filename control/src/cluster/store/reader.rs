//! Read access for views. Every lookup is recorded; a value is computed again when one of its lookup keys changes.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashSet;

use crate::cluster::store::objects::{LookupKey, Store, server_keys};
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::authentication::{MeshTlsAuthentication, NetworkAuthentication};
use crate::resources::policy::authorization::{AuthorizationPolicy, ServerAuthorization};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::Server;
use crate::resources::route::{ParentKind, Route};
use crate::resources::service::{EndpointSlice, Endpoints, Service};
use crate::resources::service_profile::ServiceProfile;
use crate::resources::workload::{ExternalWorkload, Node, PartialObjectMetadata, Pod};
use crate::resources::{Kind, Object};

pub(in crate::cluster) struct Reader<'a> {
    store: &'a Store,
    dependencies: RefCell<AHashSet<LookupKey>>,
}

/// Defines a lookup by name for each kind.
macro_rules! lookups_by_name {
    ($($method:ident: $kind:ident($object:ty);)*) => {$(
        pub(in crate::cluster) fn $method(&self, name: &NamespacedName) -> Option<&'a Arc<$object>> {
            match self.object(Kind::$kind, name) {
                Some(Object::$kind(object)) => Some(object),
                _ => None,
            }
        }
    )*};
}

/// Defines a lookup of all objects of a namespace for each kind.
macro_rules! lookups_by_namespace {
    ($($method:ident: $kind:ident($object:ty);)*) => {$(
        pub(in crate::cluster) fn $method(&self, namespace: &Arc<str>) -> Vec<&'a Arc<$object>> {
            self.find(LookupKey::Namespace(Kind::$kind, namespace.clone()), |object| match object {
                Object::$kind(object) => Some(object),
                _ => None,
            })
        }
    )*};
}

impl<'a> Reader<'a> {
    pub(in crate::cluster) fn new(store: &'a Store) -> Self {
        Self {
            store,
            dependencies: RefCell::default(),
        }
    }

    /// The lookup keys that were used.
    pub(in crate::cluster) fn into_dependencies(self) -> AHashSet<LookupKey> {
        self.dependencies.into_inner()
    }

    lookups_by_name! {
        service: Service(Service);
        endpoints: Endpoints(Endpoints);
        pod: Pod(Pod);
        node: Node(Node);
        replica_set: ReplicaSet(PartialObjectMetadata);
        job: Job(PartialObjectMetadata);
        external_workload: ExternalWorkload(ExternalWorkload);
        server: Server(Server);
        egress_network: EgressNetwork(EgressNetwork);
        mesh_tls_authentication: MeshTlsAuthentication(MeshTlsAuthentication);
        network_authentication: NetworkAuthentication(NetworkAuthentication);
        service_profile: ServiceProfile(ServiceProfile);
    }

    lookups_by_namespace! {
        server_authorizations: ServerAuthorization(ServerAuthorization);
        authorization_policies: AuthorizationPolicy(AuthorizationPolicy);
        rate_limits: RateLimitPolicy(RateLimitPolicy);
        servers: Server(Server);
        egress_networks: EgressNetwork(EgressNetwork);
    }

    pub(in crate::cluster) fn route(&self, kind: Kind, name: &NamespacedName) -> Option<&'a Arc<Route>> {
        self.object(kind, name)?.route()
    }

    pub(in crate::cluster) fn exists(&self, kind: Kind, name: &NamespacedName) -> bool {
        self.object(kind, name).is_some()
    }

    /// All Servers that select a workload, and possibly other Servers of its namespace.
    pub(in crate::cluster) fn server_candidates(&self, workload: &Meta) -> Vec<&'a Arc<Server>> {
        let keys = server_keys(workload.namespace(), &workload.labels);
        let servers = keys.flat_map(|key| {
            self.find(key, |object| match object {
                Object::Server(server) => Some(server),
                _ => None,
            })
        });
        servers.collect()
    }

    pub(in crate::cluster) fn services_at(&self, ip: IpAddr) -> Vec<&'a Arc<Service>> {
        self.find(LookupKey::Ip(ip), |object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        })
    }

    pub(in crate::cluster) fn pods_at(&self, ip: IpAddr) -> Vec<&'a Arc<Pod>> {
        self.find(LookupKey::Ip(ip), as_pod)
    }

    pub(in crate::cluster) fn pods_using_host_ip(&self, ip: IpAddr) -> Vec<&'a Arc<Pod>> {
        self.find(LookupKey::HostIp(ip), as_pod)
    }

    pub(in crate::cluster) fn external_workloads_at(&self, ip: IpAddr) -> Vec<&'a Arc<ExternalWorkload>> {
        self.find(LookupKey::Ip(ip), |object| match object {
            Object::ExternalWorkload(workload) => Some(workload),
            _ => None,
        })
    }

    pub(in crate::cluster) fn slices_of(&self, service: &NamespacedName) -> Vec<&'a Arc<EndpointSlice>> {
        self.find(LookupKey::EndpointSlices(service.clone()), |object| match object {
            Object::EndpointSlice(slice) => Some(slice),
            _ => None,
        })
    }

    /// Routes that reference the parent, oldest first.
    pub(in crate::cluster) fn routes_of(&self, kind: ParentKind, parent: &NamespacedName) -> Vec<&'a Arc<Route>> {
        let mut routes = self.find(LookupKey::Routes(kind, parent.clone()), |object| match object {
            Object::PolicyHttpRoute(route)
            | Object::GatewayHttpRoute(route)
            | Object::GrpcRoute(route)
            | Object::TlsRoute(route)
            | Object::TcpRoute(route) => Some(route),
            _ => None,
        });
        routes.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
        routes
    }

    fn object(&self, kind: Kind, name: &NamespacedName) -> Option<&'a Object> {
        self.dependencies
            .borrow_mut()
            .insert(LookupKey::Object(kind, name.clone()));
        self.store.object(kind, name)
    }

    fn find<T>(&self, key: LookupKey, select: impl Fn(&'a Object) -> Option<&'a Arc<T>>) -> Vec<&'a Arc<T>> {
        let found = self.store.find(&key).filter_map(select).collect();
        self.dependencies.borrow_mut().insert(key);
        found
    }
}

fn as_pod(object: &Object) -> Option<&Arc<Pod>> {
    match object {
        Object::Pod(pod) => Some(pod),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ahash::AHashMap;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::decode;
    use crate::resources::event::Event;
    use crate::resources::labels::Labels;

    const SELECTORS: [&str; 6] = [
        r#"{"podSelector":{}}"#,
        r#"{"podSelector":{"matchLabels":{"app":"web"}}}"#,
        r#"{"podSelector":{"matchLabels":{"app":"web","tier":"front"}}}"#,
        r#"{"podSelector":{"matchExpressions":[{"key":"app","operator":"In","values":["web","api"]}]}}"#,
        r#"{"podSelector":{"matchExpressions":[{"key":"tier","operator":"Exists"}]}}"#,
        r#"{"externalWorkloadSelector":{"matchLabels":{"tier":"front"}}}"#,
    ];

    fn server(name: usize, selector: usize) -> Arc<Server> {
        let mut spec: Value = serde_json::from_str(SELECTORS[selector]).unwrap();
        spec["port"] = json!(80);
        let object = json!({"metadata": {"name": format!("s{name}"), "namespace": "shop"}, "spec": spec}).to_string();
        match decode(Kind::Server, &mut serde_json::Deserializer::from_str(&object)).unwrap() {
            Object::Server(server) => server,
            other => panic!("{other:?}"),
        }
    }

    fn selects(server: &Server, labels: &Labels) -> bool {
        server.workloads.selects_pod(labels) || server.workloads.selects_external_workload(labels)
    }

    proptest! {
        #[test]
        fn the_candidates_contain_each_server_that_selects_the_workload_once(
            steps in prop::collection::vec((0..4usize, 0..SELECTORS.len(), any::<bool>()), 1..30),
            app in prop::option::of(prop::sample::select(vec!["web", "api", "db"])),
            tier in prop::option::of(prop::sample::select(vec!["front", "back"])),
        ) {
            let (mut store, mut applied) = (Store::default(), AHashMap::<usize, Arc<Server>>::new());
            for (name, selector, is_applied) in steps {
                let server = server(name, selector);
                let event = match is_applied {
                    true => {
                        applied.insert(name, server.clone());
                        Event::Applied(Object::Server(server))
                    }
                    false => {
                        applied.remove(&name);
                        Event::Deleted(Kind::Server, server.meta.name.clone())
                    }
                };
                store.apply(event, &mut AHashSet::new());
            }
            let pairs = [("app", app), ("tier", tier)];
            let labels: Labels = pairs.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
            let workload = Meta { name: NamespacedName::new("shop", "web-1"), labels, ..Meta::default() };
            let candidates = Reader::new(&store).server_candidates(&workload);
            let mut candidates: Vec<_> = candidates.into_iter().map(|server| &server.meta.name).collect();
            candidates.sort();
            for server in applied.values().filter(|server| selects(server, &workload.labels)) {
                prop_assert!(candidates.contains(&&server.meta.name), "{:?}", server.workloads);
            }
            let n_candidates = candidates.len();
            candidates.dedup();
            prop_assert_eq!(candidates.len(), n_candidates);
        }
    }
}
