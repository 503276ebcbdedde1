//! How views read the store: every look is noted, and a view is computed again when what it looked at changes.

use std::cell::RefCell;
use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use crate::cluster::store::{Fact, Store};
use crate::resources::meta::Name;
use crate::resources::policy::authentication::{MeshTlsAuthentication, NetworkAuthentication};
use crate::resources::policy::authorization::{AuthorizationPolicy, ServerAuthorization};
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::Server;
use crate::resources::route::{ParentKind, Route};
use crate::resources::service::{EndpointSlice, Endpoints, Service};
use crate::resources::service_profile::ServiceProfile;
use crate::resources::workload::{Bare, ExternalWorkload, Node, Pod};
use crate::resources::{Kind, Object};

pub(super) struct Reader<'a> {
    store: &'a Store,
    facts: RefCell<HashSet<Fact>>,
}

/// Writes a lookup by name for one kind.
macro_rules! by_name {
    ($($method:ident: $kind:ident($object:ty);)*) => {$(
        pub(super) fn $method(&self, name: &Name) -> Option<&'a Arc<$object>> {
            match self.object(Kind::$kind, name) {
                Some(Object::$kind(object)) => Some(object),
                _ => None,
            }
        }
    )*};
}

/// Writes a listing by namespace for one kind.
macro_rules! by_namespace {
    ($($method:ident: $kind:ident($object:ty);)*) => {$(
        pub(super) fn $method(&self, namespace: &Arc<str>) -> Vec<&'a Arc<$object>> {
            self.under(Fact::In(Kind::$kind, namespace.clone()), |object| match object {
                Object::$kind(object) => Some(object),
                _ => None,
            })
        }
    )*};
}

impl<'a> Reader<'a> {
    pub(super) fn new(store: &'a Store) -> Self {
        Self {
            store,
            facts: RefCell::default(),
        }
    }

    /// What has been looked at.
    pub(super) fn into_facts(self) -> HashSet<Fact> {
        self.facts.into_inner()
    }

    by_name! {
        service: Service(Service);
        endpoints: Endpoints(Endpoints);
        pod: Pod(Pod);
        node: Node(Node);
        replica_set: ReplicaSet(Bare);
        job: Job(Bare);
        external_workload: ExternalWorkload(ExternalWorkload);
        server: Server(Server);
        egress_network: EgressNetwork(EgressNetwork);
        mesh_tls_authentication: MeshTlsAuthentication(MeshTlsAuthentication);
        network_authentication: NetworkAuthentication(NetworkAuthentication);
        service_profile: ServiceProfile(ServiceProfile);
    }

    by_namespace! {
        servers: Server(Server);
        server_authorizations: ServerAuthorization(ServerAuthorization);
        authorization_policies: AuthorizationPolicy(AuthorizationPolicy);
        rate_limits: RateLimitPolicy(RateLimitPolicy);
        egress_networks: EgressNetwork(EgressNetwork);
    }

    pub(super) fn services_at(&self, ip: IpAddr) -> Vec<&'a Arc<Service>> {
        self.under(Fact::At(ip), |object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        })
    }

    pub(super) fn pods_at(&self, ip: IpAddr) -> Vec<&'a Arc<Pod>> {
        self.under(Fact::At(ip), as_pod)
    }

    pub(super) fn pods_on_host(&self, ip: IpAddr) -> Vec<&'a Arc<Pod>> {
        self.under(Fact::OnHost(ip), as_pod)
    }

    pub(super) fn external_workloads_at(&self, ip: IpAddr) -> Vec<&'a Arc<ExternalWorkload>> {
        self.under(Fact::At(ip), |object| match object {
            Object::ExternalWorkload(workload) => Some(workload),
            _ => None,
        })
    }

    pub(super) fn slices_of(&self, service: &Name) -> Vec<&'a Arc<EndpointSlice>> {
        self.under(Fact::SlicesOf(service.clone()), |object| match object {
            Object::EndpointSlice(slice) => Some(slice),
            _ => None,
        })
    }

    /// Routes that name the parent, the oldest first.
    pub(super) fn routes_of(&self, kind: ParentKind, parent: &Name) -> Vec<&'a Arc<Route>> {
        let mut routes = self.under(Fact::RoutesOf(kind, parent.clone()), |object| match object {
            Object::PolicyHttpRoute(route)
            | Object::GatewayHttpRoute(route)
            | Object::GrpcRoute(route)
            | Object::TlsRoute(route)
            | Object::TcpRoute(route) => Some(route),
            _ => None,
        });
        routes.sort_by(|a, b| a.meta.seniority().cmp(&b.meta.seniority()));
        routes
    }

    fn object(&self, kind: Kind, name: &Name) -> Option<&'a Object> {
        self.facts.borrow_mut().insert(Fact::Object(kind, name.clone()));
        self.store.object(kind, name)
    }

    fn under<T>(&self, fact: Fact, select: impl Fn(&'a Object) -> Option<&'a Arc<T>>) -> Vec<&'a Arc<T>> {
        let found = self.store.under(&fact).filter_map(select).collect();
        self.facts.borrow_mut().insert(fact);
        found
    }
}

fn as_pod(object: &Object) -> Option<&Arc<Pod>> {
    match object {
        Object::Pod(pod) => Some(pod),
        _ => None,
    }
}
