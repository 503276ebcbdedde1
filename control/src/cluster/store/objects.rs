//! All objects of a cluster, with an index by lookup key.

use std::net::IpAddr;
use std::sync::Arc;

use ahash::{AHashMap, AHashSet, RandomState};
use hashbrown::HashTable;
use smallvec::SmallVec;
use tulle_core::identity::Identity;

use crate::resources::event::Event;
use crate::resources::interning::intern;
use crate::resources::labels::Labels;
use crate::resources::meta::NamespacedName;
use crate::resources::route::{ParentKind, Route};
use crate::resources::service::{EndpointSlice, Service};
use crate::resources::workload::{ExternalWorkload, Pod, PodNetwork};
use crate::resources::{Kind, Object};

/// Identifies the objects that one lookup reads. The values of views depend on lookup keys.
///
/// Views can read objects only by lookup key, so the dependencies of a value are complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::cluster) enum LookupKey {
    /// One object, which may not exist.
    Object(Kind, NamespacedName),
    /// All objects of a kind in a namespace.
    Namespace(Kind, Arc<str>),
    /// Services, pods and external workloads with this address.
    Ip(IpAddr),
    /// Pods that use this address of their host, because of the host network or a host port.
    HostIp(IpAddr),
    EndpointSlices(NamespacedName),
    Routes(ParentKind, NamespacedName),
    /// Servers of a namespace that require a label with this value; the value is empty for Servers that require no label.
    ///
    /// The name of the label is left out to save memory: the value is already interned, and a text of name and value would not
    /// be. The lookup therefore also finds Servers that require another label with the same value, which are rare.
    Servers(Arc<str>, Arc<str>),
    /// External workloads of a namespace with this identity, as `Identity` spells it.
    Identity(Arc<str>, Arc<str>),
}

/// Change of the number of objects in a namespace.
pub(in crate::cluster) enum CountChange {
    Added(Kind, Arc<str>),
    Removed(Kind, Arc<str>),
    None,
}

#[derive(Default)]
pub(in crate::cluster) struct Store {
    objects: ObjectTable,
    /// Each list is sorted by kind, namespace and name. There is about one key per pod, and most keys have one object.
    index: AHashMap<LookupKey, SmallVec<[Object; 1]>>,
    /// Names of pods and external workloads, by namespace.
    workloads: AHashMap<Arc<str>, AHashSet<(Kind, Arc<str>)>>,
}

impl Store {
    /// Applies one event and adds the lookup keys of the changed object to `changed_keys`. An equal object changes nothing.
    pub(in crate::cluster) fn apply(&mut self, event: Event, changed_keys: &mut AHashSet<LookupKey>) -> CountChange {
        match event {
            Event::Applied(object) => {
                let (kind, name) = (object.kind(), object.meta().name.clone());
                if self.object(kind, &name) == Some(&object) {
                    return CountChange::None;
                }
                let existed = self.remove(kind, &name, changed_keys);
                for key in lookup_keys(&object) {
                    let listed = self.index.entry(key.clone()).or_default();
                    if let Err(at) = search(listed, id(&object)) {
                        listed.insert(at, object.clone());
                    }
                    changed_keys.insert(key);
                }
                changed_keys.insert(LookupKey::Object(kind, name.clone()));
                if is_workload(kind) {
                    let names = self.workloads.entry(name.namespace.clone()).or_default();
                    names.insert((kind, name.name));
                }
                self.objects.insert_new(object);
                if existed {
                    CountChange::None
                } else {
                    CountChange::Added(kind, name.namespace)
                }
            }
            Event::Deleted(kind, name) => {
                if self.remove(kind, &name, changed_keys) {
                    CountChange::Removed(kind, name.namespace)
                } else {
                    CountChange::None
                }
            }
            Event::Unreadable(unreadable) => match &unreadable.placeholder {
                Some(object) if !self.is_readable(unreadable.kind, &unreadable.name) => {
                    self.apply(Event::Applied(object.clone()), changed_keys)
                }
                _ => CountChange::None,
            },
            Event::Synced => CountChange::None,
        }
    }

    /// Whether the store has a readable version of the object.
    pub(in crate::cluster) fn is_readable(&self, kind: Kind, name: &NamespacedName) -> bool {
        self.object(kind, name).is_some_and(|object| !object.is_placeholder())
    }

    fn remove(&mut self, kind: Kind, name: &NamespacedName, changed_keys: &mut AHashSet<LookupKey>) -> bool {
        let Some(object) = self.objects.remove((kind, name)) else {
            return false;
        };
        for key in lookup_keys(&object) {
            if let Some(listed) = self.index.get_mut(&key) {
                if let Ok(at) = search(listed, (kind, name)) {
                    listed.remove(at);
                }
                if listed.is_empty() {
                    self.index.remove(&key);
                }
            }
            changed_keys.insert(key);
        }
        changed_keys.insert(LookupKey::Object(kind, name.clone()));
        if is_workload(kind)
            && let Some(names) = self.workloads.get_mut(&name.namespace)
        {
            names.remove(&(kind, name.name.clone()));
            if names.is_empty() {
                self.workloads.remove(&name.namespace);
            }
        }
        true
    }

    /// The pods and external workloads of a namespace, in no order.
    pub(in crate::cluster) fn workloads(&self, namespace: &Arc<str>) -> impl Iterator<Item = &Object> {
        let names = self.workloads.get(namespace).into_iter().flatten();
        names.filter_map(|(kind, name)| self.object(*kind, &NamespacedName::new(namespace.clone(), name.clone())))
    }

    pub(in crate::cluster) fn object(&self, kind: Kind, name: &NamespacedName) -> Option<&Object> {
        self.objects.get((kind, name))
    }

    /// Builds a store that contains only these objects.
    pub(in crate::cluster) fn from_objects(objects: Vec<Object>) -> Self {
        let mut store = Self::default();
        for object in objects {
            store.apply(Event::Applied(object), &mut AHashSet::new());
        }
        store
    }

    pub(in crate::cluster) fn all(&self) -> impl Iterator<Item = &Object> {
        self.objects.table.iter()
    }

    /// Objects with this key, sorted by kind, namespace and name.
    pub(in crate::cluster) fn find<'a>(&'a self, key: &LookupKey) -> impl Iterator<Item = &'a Object> + use<'a> {
        self.index.get(key).into_iter().flatten()
    }
}

/// The objects by kind and name. Takes less memory than a map, because the keys are not stored beside the objects.
#[derive(Default)]
struct ObjectTable {
    table: HashTable<Object>,
    hasher: RandomState,
}

impl ObjectTable {
    fn get(&self, key: (Kind, &NamespacedName)) -> Option<&Object> {
        self.table.find(self.hasher.hash_one(key), |object| id(object) == key)
    }

    fn remove(&mut self, key: (Kind, &NamespacedName)) -> Option<Object> {
        let found = self
            .table
            .find_entry(self.hasher.hash_one(key), |object| id(object) == key);
        found.ok().map(|entry| entry.remove().0)
    }

    /// Adds an object that the table does not have.
    fn insert_new(&mut self, object: Object) {
        let hash = |object: &Object| self.hasher.hash_one(id(object));
        self.table.insert_unique(hash(&object), object, hash);
    }
}

fn id(object: &Object) -> (Kind, &NamespacedName) {
    (object.kind(), &object.meta().name)
}

/// Returns the index of an object in a sorted list, or else the index at which it can be inserted.
fn search(objects: &[Object], key: (Kind, &NamespacedName)) -> Result<usize, usize> {
    objects.binary_search_by(|object| id(object).cmp(&key))
}

fn is_workload(kind: Kind) -> bool {
    matches!(kind, Kind::Pod | Kind::ExternalWorkload)
}

/// The lookup keys that find all Servers that select a workload with these labels, and possibly other Servers of its namespace.
pub(in crate::cluster) fn server_keys(
    namespace: &Arc<str>,
    labels: &Labels,
) -> impl Iterator<Item = LookupKey> + use<> {
    let values = labels.entries().iter().map(|(_, value)| value.clone());
    let mut values: SmallVec<[Arc<str>; 8]> = values.chain([intern("")]).collect();
    values.sort_unstable();
    values.dedup();
    let namespace = namespace.clone();
    values
        .into_iter()
        .map(move |value| LookupKey::Servers(namespace.clone(), value))
}

/// The keys under which an object is indexed. `LookupKey::Object` is not among them, because objects are stored by it.
fn lookup_keys(object: &Object) -> Vec<LookupKey> {
    match object {
        Object::Service(service) => service_keys(service),
        Object::EndpointSlice(slice) => slice_keys(slice),
        Object::Pod(pod) => pod_keys(pod),
        Object::ExternalWorkload(workload) => workload_keys(workload),
        Object::PolicyHttpRoute(route)
        | Object::GatewayHttpRoute(route)
        | Object::GrpcRoute(route)
        | Object::TlsRoute(route)
        | Object::TcpRoute(route) => route_keys(route),
        Object::Server(server) => {
            let namespace = server.meta.namespace();
            let value = server.workloads.required_label().map_or("", |(_, value)| value);
            vec![
                LookupKey::Namespace(Kind::Server, namespace.clone()),
                LookupKey::Servers(namespace.clone(), intern(value)),
            ]
        }
        Object::ServerAuthorization(_)
        | Object::AuthorizationPolicy(_)
        | Object::RateLimitPolicy(_)
        | Object::EgressNetwork(_) => vec![LookupKey::Namespace(object.kind(), object.meta().namespace().clone())],
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

fn service_keys(service: &Service) -> Vec<LookupKey> {
    service.cluster_ips.iter().map(|ip| LookupKey::Ip(*ip)).collect()
}

fn slice_keys(slice: &EndpointSlice) -> Vec<LookupKey> {
    slice
        .service
        .iter()
        .map(|service| LookupKey::EndpointSlices(service.clone()))
        .collect()
}

fn pod_keys(pod: &Pod) -> Vec<LookupKey> {
    let mut keys = Vec::new();
    // Pods in the host network share the host's address, so the address does not identify a single pod.
    if pod.network == PodNetwork::Pod {
        keys.extend(pod.ips.iter().map(|ip| LookupKey::Ip(*ip)));
    }
    if pod.network == PodNetwork::Host || pod.ports.iter().any(|port| port.host_port.is_some()) {
        keys.extend(pod.host_ips.iter().map(|ip| LookupKey::HostIp(*ip)));
    }
    keys
}

fn workload_keys(workload: &ExternalWorkload) -> Vec<LookupKey> {
    let mut keys: Vec<_> = workload.ips.iter().map(|ip| LookupKey::Ip(*ip)).collect();
    if let Ok(identity) = workload.identity.parse::<Identity>() {
        let namespace = workload.meta.namespace().clone();
        keys.push(LookupKey::Identity(namespace, identity.as_str().into()));
    }
    keys
}

fn route_keys(route: &Route) -> Vec<LookupKey> {
    route
        .parents
        .iter()
        .map(|parent| LookupKey::Routes(parent.kind, parent.name.clone()))
        .collect()
}
