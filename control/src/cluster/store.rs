//! All objects of a cluster, and the facts under which views find them.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashMap;

use crate::resources::event::Event;
use crate::resources::meta::Name;
use crate::resources::route::{ParentKind, Route};
use crate::resources::service::{EndpointSlice, Service};
use crate::resources::workload::{ExternalWorkload, Pod, PodNetwork};
use crate::resources::{Kind, Object};

/// Something a view asks about, and therefore something that makes it out of date.
///
/// Looking objects up and depending on them use the same keys, so that no view can read what it does not depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Fact {
    /// One object, whether or not it exists.
    Object(Kind, Name),
    /// All objects of a kind in a namespace.
    In(Kind, Arc<str>),
    /// Services, pods and external workloads with this address.
    At(IpAddr),
    /// Pods on the host with this address.
    OnHost(IpAddr),
    SlicesOf(Name),
    RoutesOf(ParentKind, Name),
}

/// What an event did to the number of objects in a namespace.
pub(super) enum Change {
    Added(Kind, Arc<str>),
    Removed(Kind, Arc<str>),
    None,
}

#[derive(Default)]
pub(super) struct Store {
    objects: AHashMap<(Kind, Name), Object>,
    /// In the order of kind, namespace and name. Most facts lead to one object, and there are as many facts as pods, so
    /// that these lists are no larger than they must be.
    index: AHashMap<Fact, Vec<(Kind, Name)>>,
}

impl Store {
    /// Applies one event and adds what it changed to `touched`; an object that stays as it was touches nothing.
    pub(super) fn apply(&mut self, event: Event, touched: &mut HashSet<Fact>) -> Change {
        match event {
            Event::Applied(object) => {
                let id = (object.kind(), object.meta().name.clone());
                if self.objects.get(&id) == Some(&object) {
                    return Change::None;
                }
                let existed = self.remove(&id, touched);
                for fact in facts(&object) {
                    let ids = self.index.entry(fact.clone()).or_default();
                    if let Err(at) = ids.binary_search(&id) {
                        ids.reserve_exact(1);
                        ids.insert(at, id.clone());
                    }
                    touched.insert(fact);
                }
                touched.insert(Fact::Object(id.0, id.1.clone()));
                let change = if existed {
                    Change::None
                } else {
                    Change::Added(id.0, id.1.namespace.clone())
                };
                self.objects.insert(id, object);
                change
            }
            Event::Deleted(kind, name) => {
                let id = (kind, name);
                if self.remove(&id, touched) {
                    Change::Removed(id.0, id.1.namespace)
                } else {
                    Change::None
                }
            }
            Event::Unreadable(unreadable) => match &unreadable.stand_in {
                Some(object) if !self.is_readable(unreadable.kind, &unreadable.name) => {
                    self.apply(Event::Applied(object.clone()), touched)
                }
                _ => Change::None,
            },
            Event::Synced => Change::None,
        }
    }

    /// Whether a form of the object is known that could be read.
    pub(super) fn is_readable(&self, kind: Kind, name: &Name) -> bool {
        self.object(kind, name).is_some_and(|object| !object.is_stand_in())
    }

    fn remove(&mut self, id: &(Kind, Name), touched: &mut HashSet<Fact>) -> bool {
        let Some(object) = self.objects.remove(id) else {
            return false;
        };
        for fact in facts(&object) {
            if let Some(ids) = self.index.get_mut(&fact) {
                if let Ok(at) = ids.binary_search(id) {
                    ids.remove(at);
                }
                if ids.is_empty() {
                    self.index.remove(&fact);
                }
            }
            touched.insert(fact);
        }
        touched.insert(Fact::Object(id.0, id.1.clone()));
        true
    }

    pub(super) fn object(&self, kind: Kind, name: &Name) -> Option<&Object> {
        // The key is built for the lookup, because a borrowed pair is none of the map's keys.
        self.objects.get(&(kind, name.clone()))
    }

    /// One of these objects alone.
    pub(super) fn of(objects: Vec<Object>) -> Self {
        let mut store = Self::default();
        let mut touched = HashSet::new();
        for object in objects {
            store.apply(Event::Applied(object), &mut touched);
        }
        store
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// Objects found under a fact, in the order of kind, namespace and name.
    pub(super) fn under(&self, fact: &Fact) -> impl Iterator<Item = &Object> {
        self.index
            .get(fact)
            .into_iter()
            .flatten()
            .filter_map(|id| self.objects.get(id))
    }
}

/// The facts an object is found under, besides its name.
fn facts(object: &Object) -> Vec<Fact> {
    match object {
        Object::Service(service) => service_facts(service),
        Object::EndpointSlice(slice) => slice_facts(slice),
        Object::Pod(pod) => pod_facts(pod),
        Object::ExternalWorkload(workload) => workload_facts(workload),
        Object::PolicyHttpRoute(route)
        | Object::GatewayHttpRoute(route)
        | Object::GrpcRoute(route)
        | Object::TlsRoute(route)
        | Object::TcpRoute(route) => route_facts(route),
        Object::Server(_)
        | Object::ServerAuthorization(_)
        | Object::AuthorizationPolicy(_)
        | Object::RateLimitPolicy(_)
        | Object::EgressNetwork(_) => vec![Fact::In(object.kind(), object.meta().namespace().clone())],
        Object::Endpoints(_)
        | Object::Node(_)
        | Object::Namespace(_)
        | Object::ReplicaSet(_)
        | Object::Job(_)
        | Object::MeshTlsAuthentication(_)
        | Object::NetworkAuthentication(_)
        | Object::ServiceProfile(_) => Vec::new(),
    }
}

fn service_facts(service: &Service) -> Vec<Fact> {
    service.cluster_ips.iter().map(|ip| Fact::At(*ip)).collect()
}

fn slice_facts(slice: &EndpointSlice) -> Vec<Fact> {
    slice
        .service
        .iter()
        .map(|service| Fact::SlicesOf(service.clone()))
        .collect()
}

fn pod_facts(pod: &Pod) -> Vec<Fact> {
    let mut facts = Vec::new();
    // A pod in the host's network shares the host's address with others, so the address does not name it.
    if pod.network == PodNetwork::Own {
        facts.extend(pod.ips.iter().map(|ip| Fact::At(*ip)));
    }
    if pod.network == PodNetwork::Host || pod.ports.iter().any(|port| port.host_port.is_some()) {
        facts.extend(pod.host_ips.iter().map(|ip| Fact::OnHost(*ip)));
    }
    facts
}

fn workload_facts(workload: &ExternalWorkload) -> Vec<Fact> {
    workload.ips.iter().map(|ip| Fact::At(*ip)).collect()
}

fn route_facts(route: &Route) -> Vec<Fact> {
    route
        .parents
        .iter()
        .map(|parent| Fact::RoutesOf(parent.kind, parent.name.clone()))
        .collect()
}
