//! The objects whose status we write, the objects that it depends on, and what has to be written.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashMap;
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::resources::acceptance::{self, Parents, Settings};
use crate::resources::meta::Name;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::Server;
use crate::resources::route::{Parent, ParentKind, Route};
use crate::resources::service::Service;
use crate::resources::status::{ACCEPTED, CONTROLLER_NAME, Condition, ParentRef, ParentStatus, PolicyStatus};
use crate::resources::unreadable::Unreadable;
use crate::resources::workload::ExternalWorkload;
use crate::resources::{Kind, Object};
use crate::writeback::statuses::conditions;

/// An object of a cluster.
pub(super) type Id = (Kind, Name);

/// Shares its objects with whoever else heard of them.
pub(super) struct Inventory {
    cluster_networks: Vec<IpNet>,
    global_egress_namespace: String,
    servers: AHashMap<Name, Arc<Server>>,
    services: AHashMap<Name, Arc<Service>>,
    networks: AHashMap<Name, Arc<EgressNetwork>>,
    routes: AHashMap<Id, Arc<Route>>,
    limits: AHashMap<Name, Arc<RateLimitPolicy>>,
    workloads: AHashMap<Name, Arc<ExternalWorkload>>,
    /// Services, pods and external workloads by their addresses; an external workload does not have all that it names.
    addresses: AHashMap<IpAddr, BTreeSet<Id>>,
    pods: AHashMap<Name, Vec<IpAddr>>,
    /// The objects whose status depends on an object.
    dependents: AHashMap<Id, BTreeSet<Id>>,
    /// What we wrote and have not heard of yet, with the version that it replaced.
    written: AHashMap<Id, (String, Status)>,
}

/// The part of a status that is ours.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Status {
    Route(Vec<ParentStatus>),
    Policy(PolicyStatus),
    /// The condition of an external workload that is ours, if there is one.
    Workload(Option<Condition>),
}

/// A status to be written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Patch {
    pub(super) body: Value,
    /// The version that it replaces.
    pub(super) version: String,
    pub(super) status: Status,
}

impl Inventory {
    pub(super) fn new(cluster_networks: Vec<IpNet>, global_egress_namespace: String) -> Self {
        Self {
            cluster_networks,
            global_egress_namespace,
            servers: AHashMap::new(),
            services: AHashMap::new(),
            networks: AHashMap::new(),
            routes: AHashMap::new(),
            limits: AHashMap::new(),
            workloads: AHashMap::new(),
            addresses: AHashMap::new(),
            pods: AHashMap::new(),
            dependents: AHashMap::new(),
            written: AHashMap::new(),
        }
    }

    /// Takes note of an object, and names the objects whose status may be another now.
    pub(super) fn apply(&mut self, object: &Object) -> BTreeSet<Id> {
        let id = (object.kind(), object.meta().name.clone());
        let is_old = |(replaced, _): &(String, Status)| *replaced != object.meta().version;
        if self.written.get(&id).is_some_and(is_old) {
            self.written.remove(&id);
        }
        if let Some(route) = object.route() {
            return self.apply_route(id, route);
        }
        match object {
            Object::RateLimitPolicy(limit) => self.apply_limit(id, limit),
            Object::EgressNetwork(network) => {
                self.networks.insert(id.1.clone(), network.clone());
                let mut concerned = self.dependents_of(&id);
                concerned.insert(id);
                concerned
            }
            Object::Server(server) => {
                let before = self.servers.insert(id.1.clone(), server.clone());
                match before.is_some_and(|before| before.protocol == server.protocol) {
                    true => BTreeSet::new(),
                    false => self.dependents_of(&id),
                }
            }
            Object::Service(service) => {
                let before = self.services.insert(id.1.clone(), service.clone());
                let old = before
                    .as_ref()
                    .map(|before| before.cluster_ips.clone())
                    .unwrap_or_default();
                let mut concerned = self.readdress(&id, &old, &service.cluster_ips);
                if before.is_none_or(|before| before.kind != service.kind) {
                    concerned.extend(self.dependents_of(&id));
                }
                concerned
            }
            Object::Pod(pod) => {
                let addresses: Vec<IpAddr> = pod.claims().collect();
                let old = self.pods.insert(id.1.clone(), addresses.clone()).unwrap_or_default();
                self.readdress(&id, &old, &addresses)
            }
            Object::ExternalWorkload(workload) => {
                let before = self.workloads.insert(id.1.clone(), workload.clone());
                let is_same_rival = before.as_ref().is_some_and(|before| {
                    (&before.ports, before.meta.created_at) == (&workload.ports, workload.meta.created_at)
                });
                let old = before.as_ref().map(|before| before.ips.clone()).unwrap_or_default();
                let mut concerned = self.readdress(&id, &old, &workload.ips);
                if !is_same_rival {
                    concerned.extend(self.workloads_at(&workload.ips));
                }
                let eldest = before.iter().chain([workload]).map(|one| one.meta.seniority()).min();
                concerned.retain(|(_, name)| self.is_younger(name, eldest));
                concerned.insert(id);
                concerned
            }
            _ => BTreeSet::new(),
        }
    }

    /// The status says why the newest form of an object cannot be read, whatever holds meanwhile. What others depend on
    /// stays as it was.
    pub(super) fn apply_unreadable(&mut self, unreadable: &Unreadable) -> BTreeSet<Id> {
        match &unreadable.stand_in {
            Some(Object::Server(_)) if self.servers.contains_key(&unreadable.name) => BTreeSet::new(),
            Some(object) => self.apply(object),
            None => BTreeSet::new(),
        }
    }

    pub(super) fn delete(&mut self, id: &Id) -> BTreeSet<Id> {
        self.written.remove(id);
        let mut concerned = match id.0 {
            Kind::Server => {
                self.servers.remove(&id.1);
                self.dependents_of(id)
            }
            Kind::Service => {
                let old = self.services.remove(&id.1);
                let old = old.map(|old| old.cluster_ips.clone()).unwrap_or_default();
                let mut concerned = self.readdress(id, &old, &[]);
                concerned.extend(self.dependents_of(id));
                concerned
            }
            Kind::Pod => {
                let old = self.pods.remove(&id.1).unwrap_or_default();
                self.readdress(id, &old, &[])
            }
            Kind::ExternalWorkload => {
                let old = self.workloads.remove(&id.1);
                let ips = old.as_ref().map(|old| old.ips.clone()).unwrap_or_default();
                let mut concerned = self.readdress(id, &ips, &[]);
                let age = old.as_ref().map(|old| old.meta.seniority());
                concerned.retain(|(_, name)| self.is_younger(name, age));
                concerned
            }
            Kind::EgressNetwork => {
                self.networks.remove(&id.1);
                self.dependents_of(id)
            }
            Kind::RateLimitPolicy => {
                let old = self.limits.remove(&id.1);
                self.unlink(id, old.iter().map(|old| server_of(old)).collect())
            }
            _ => {
                let old = self.routes.remove(id);
                self.unlink(id, old.map(|old| looks_at(&old)).unwrap_or_default())
            }
        };
        concerned.remove(id);
        concerned
    }

    /// Notes other addresses of an object than before, and names the external workloads that say they have one of them.
    fn readdress(&mut self, id: &Id, old: &[IpAddr], new: &[IpAddr]) -> BTreeSet<Id> {
        if old == new {
            return BTreeSet::new();
        }
        for ip in old {
            if let Some(ids) = self.addresses.get_mut(ip) {
                ids.remove(id);
                if ids.is_empty() {
                    self.addresses.remove(ip);
                }
            }
        }
        for ip in new {
            self.addresses.entry(*ip).or_default().insert(id.clone());
        }
        self.workloads_at(old.iter().chain(new))
    }

    /// Whether an external workload is younger than one of this age, which alone may take an address from it.
    fn is_younger(&self, name: &Name, than: Option<(i64, &Name)>) -> bool {
        let workload = self.workloads.get(name);
        workload.is_some_and(|workload| Some(workload.meta.seniority()) > than)
    }

    fn workloads_at<'a>(&self, ips: impl IntoIterator<Item = &'a IpAddr>) -> BTreeSet<Id> {
        let at = ips.into_iter().filter_map(|ip| self.addresses.get(ip)).flatten();
        at.filter(|(kind, _)| *kind == Kind::ExternalWorkload)
            .cloned()
            .collect()
    }

    fn apply_route(&mut self, id: Id, route: &Arc<Route>) -> BTreeSet<Id> {
        let old = self.routes.insert(id.clone(), route.clone());
        let before = old.as_ref().map(|old| looks_at(old)).unwrap_or_default();
        let after = looks_at(route);
        let mut concerned = BTreeSet::from([id.clone()]);
        let same_parents = |old: &Arc<Route>| {
            old.parents.iter().map(place).eq(route.parents.iter().map(place))
                && (&old.hostnames, old.meta.created_at) == (&route.hostnames, route.meta.created_at)
        };
        // With the same parents as before it is no other rival than before.
        if !old.as_ref().is_some_and(same_parents) || before != after {
            concerned.extend(self.unlink(&id, before));
            for target in after {
                let dependents = self.dependents.entry(target).or_default();
                concerned.extend(dependents.iter().cloned());
                dependents.insert(id.clone());
            }
        }
        concerned
    }

    fn apply_limit(&mut self, id: Id, limit: &Arc<RateLimitPolicy>) -> BTreeSet<Id> {
        let old = self.limits.insert(id.1.clone(), limit.clone());
        let mut concerned = BTreeSet::from([id.clone()]);
        let same =
            |old: &Arc<RateLimitPolicy>| old.server == limit.server && old.meta.created_at == limit.meta.created_at;
        if !old.as_ref().is_some_and(same) {
            concerned.extend(self.unlink(&id, old.iter().map(|old| server_of(old)).collect()));
            let dependents = self.dependents.entry(server_of(limit)).or_default();
            concerned.extend(dependents.iter().cloned());
            dependents.insert(id);
        }
        concerned
    }

    /// Forgets that an object depends on others, and names what else depends on those.
    fn unlink(&mut self, id: &Id, targets: BTreeSet<Id>) -> BTreeSet<Id> {
        let mut concerned = BTreeSet::new();
        for target in targets {
            if let Some(dependents) = self.dependents.get_mut(&target) {
                dependents.remove(id);
                concerned.extend(dependents.iter().cloned());
                if dependents.is_empty() {
                    self.dependents.remove(&target);
                }
            }
        }
        concerned
    }

    fn dependents_of(&self, id: &Id) -> BTreeSet<Id> {
        self.dependents.get(id).cloned().unwrap_or_default()
    }

    /// Every object that has a status of ours.
    pub(super) fn all(&self) -> Vec<Id> {
        let routes = self.routes.keys().cloned();
        let limits = self.limits.keys().map(|name| (Kind::RateLimitPolicy, name.clone()));
        let networks = self.networks.keys().map(|name| (Kind::EgressNetwork, name.clone()));
        let workloads = self.workloads.keys().map(|name| (Kind::ExternalWorkload, name.clone()));
        routes.chain(limits).chain(networks).chain(workloads).collect()
    }

    /// What has to be written at `now`; nothing if the object is gone or says what it should.
    pub(super) fn patch(&self, id: &Id, now: &str) -> Option<Patch> {
        let (version, current, foreign) = self.current(id)?;
        let wanted = self.wanted(id)?.with_times(&current, now);
        if wanted == current {
            return None;
        }
        // Which version of the API it is sent to is found when it is sent.
        let mut body = json!({ "kind": id.0.info().name, "metadata": { "name": id.1.name } });
        body["status"] = match &wanted {
            Status::Route(ours) => {
                // The list is written whole, and what others have written meanwhile must not be undone.
                body["metadata"]["resourceVersion"] = json!(version);
                let parents: Vec<&ParentStatus> = foreign.iter().chain(ours).collect();
                json!({ "parents": parents })
            }
            Status::Policy(status) => json!(status),
            Status::Workload(ours) => {
                body["metadata"]["resourceVersion"] = json!(version);
                let conditions = self.workloads.get(&id.1).map(|workload| &*workload.conditions);
                let foreign = conditions
                    .unwrap_or_default()
                    .iter()
                    .filter(|condition| !is_ours(condition));
                let all: Vec<Value> = foreign.cloned().chain(ours.iter().map(|ours| json!(ours))).collect();
                json!({ "conditions": all })
            }
        };
        Some(Patch {
            body,
            version,
            status: wanted,
        })
    }

    /// Takes note that a patch was carried out.
    pub(super) fn wrote(&mut self, id: Id, patch: Patch) {
        self.written.insert(id, (patch.version, patch.status));
    }

    /// The object's version, the part of its status that is ours, and that of others.
    fn current(&self, id: &Id) -> Option<(String, Status, Vec<ParentStatus>)> {
        let (meta, status, foreign) = match id.0 {
            Kind::RateLimitPolicy => {
                let limit = self.limits.get(&id.1)?;
                (&limit.meta, Status::Policy(limit.status.clone()), Vec::new())
            }
            Kind::EgressNetwork => {
                let network = self.networks.get(&id.1)?;
                (&network.meta, Status::Policy(network.status.clone()), Vec::new())
            }
            Kind::ExternalWorkload => {
                let workload = self.workloads.get(&id.1)?;
                let ours = workload.conditions.iter().find(|condition| is_ours(condition));
                // One that cannot be read is written anew.
                let ours = ours.and_then(|ours| serde_json::from_value(ours.clone()).ok());
                (&workload.meta, Status::Workload(ours), Vec::new())
            }
            _ => {
                let route = self.routes.get(id)?;
                let statuses = route.statuses.iter().cloned();
                let (ours, foreign) = statuses.partition(|status| status.controller_name == CONTROLLER_NAME);
                (&route.meta, Status::Route(ours), foreign)
            }
        };
        let status = match self.written.get(id) {
            Some((replaced, written)) if *replaced == meta.version => written.clone(),
            _ => status,
        };
        Some((meta.version.clone(), status, foreign))
    }

    /// What our part of the status should be, times left out.
    fn wanted(&self, id: &Id) -> Option<Status> {
        match id.0 {
            Kind::RateLimitPolicy => self.limit_status(self.limits.get(&id.1)?),
            Kind::EgressNetwork => {
                let network = self.networks.get(&id.1)?;
                let overlaps = acceptance::overlaps(network, &self.cluster_networks);
                Some(Status::Policy(PolicyStatus {
                    conditions: vec![conditions::of_network(
                        network.unread.as_deref(),
                        overlaps,
                        network.generation,
                    )],
                    target_ref: None,
                }))
            }
            Kind::ExternalWorkload => {
                let workload = self.workloads.get(&id.1)?;
                let was_judged = workload.conditions.iter().any(is_ours);
                let taken: Vec<_> = workload
                    .ips
                    .iter()
                    .filter_map(|ip| Some((*ip, self.owner_of(*ip, workload)?)))
                    .collect();
                Some(Status::Workload(conditions::of_workload(&taken, was_judged)))
            }
            _ => Some(Status::Route(self.route_status(self.routes.get(id)?))),
        }
    }

    /// Who has an address that an external workload names, in its place: a Service, a pod or another external workload.
    fn owner_of(&self, ip: IpAddr, workload: &ExternalWorkload) -> Option<Id> {
        let ids = self.addresses.get(&ip)?;
        if let Some(owner) = ids.iter().find(|(kind, _)| *kind != Kind::ExternalWorkload) {
            return Some(owner.clone());
        }
        let all = ids.iter().filter_map(|(_, name)| self.workloads.get(name));
        let holder = workload.holder(all.map(|one| &**one))?;
        Some((Kind::ExternalWorkload, holder.meta.name.clone()))
    }

    fn route_status(&self, route: &Route) -> Vec<ParentStatus> {
        let mut statuses: Vec<ParentStatus> = Vec::new();
        for parent in &route.parents {
            let Some((_, group)) = parent_kind(parent.kind) else {
                continue;
            };
            let rivals = self.routes_of(parent);
            let settings = Settings {
                cluster_networks: &self.cluster_networks,
                global_egress_namespace: &self.global_egress_namespace,
            };
            let judged = acceptance::of_route(self, settings, route, parent, rivals);
            let mut found = vec![conditions::of_route(judged, route.generation)];
            if parent.kind != ParentKind::Server {
                found.push(self.references(route));
            }
            let parent_ref = ParentRef {
                group: Some(group.to_owned()),
                kind: Some(parent.kind.name().to_owned()),
                namespace: Some(parent.name.namespace.to_string()),
                name: parent.name.name.to_string(),
                section_name: parent.section.clone(),
                port: parent.port,
            };
            // A parent that is named twice has one status.
            if statuses.iter().all(|status| status.parent_ref != parent_ref) {
                statuses.push(ParentStatus {
                    parent_ref,
                    controller_name: CONTROLLER_NAME.to_owned(),
                    conditions: found,
                });
            }
        }
        statuses
    }

    fn routes_of(&self, parent: &Parent) -> impl Iterator<Item = &Route> {
        let dependents = parent_id(parent).and_then(|id| self.dependents.get(&id));
        let routes = dependents.into_iter().flatten().filter_map(|id| self.routes.get(id));
        routes.map(|route| &**route)
    }

    /// Whether everything that a route sends to is there.
    fn references(&self, route: &Route) -> Condition {
        let mut missing = Vec::new();
        for backend in route.rules.backend_refs() {
            let name = backend.resolve(route.meta.namespace());
            let exists = if backend.is_service() {
                self.services.contains_key(&name)
            } else if backend.is_egress_network() {
                self.networks.contains_key(&name)
            } else {
                return conditions::invalid_backend(&name, route.generation);
            };
            if !exists {
                missing.push(name);
            }
        }
        conditions::of_backends(&missing, route.generation)
    }

    fn limit_status(&self, limit: &RateLimitPolicy) -> Option<Status> {
        let server = server_of(limit);
        let rivals = self
            .dependents
            .get(&server)?
            .iter()
            .filter(|(kind, _)| *kind == Kind::RateLimitPolicy);
        let oldest = rivals
            .filter_map(|(_, name)| self.limits.get(name))
            .min_by(|a, b| a.meta.seniority().cmp(&b.meta.seniority()));
        let holder = oldest.map_or(&limit.meta.name, |oldest| &oldest.meta.name);
        let protocol = self.servers.get(&server.1).map(|server| server.protocol);
        let refused = match (protocol, protocol.and_then(acceptance::without_rate_limits)) {
            _ if limit.unread.is_some() => limit.unread.as_deref().map(conditions::LimitRefusal::Unread),
            (None, _) => Some(conditions::LimitRefusal::NoServer),
            (Some(_), Some(reason)) => Some(conditions::LimitRefusal::Protocol(reason)),
            (Some(_), None) if *holder != limit.meta.name => Some(conditions::LimitRefusal::Older(holder)),
            (Some(_), None) => None,
        };
        Some(Status::Policy(PolicyStatus {
            conditions: vec![conditions::of_limit(refused, limit.generation)],
            target_ref: Some(limit.target.clone()),
        }))
    }
}

impl Parents for Inventory {
    fn server(&self, name: &Name) -> Option<&Server> {
        self.servers.get(name).map(|server| &**server)
    }

    fn service(&self, name: &Name) -> Option<&Service> {
        self.services.get(name).map(|service| &**service)
    }

    fn egress_network(&self, name: &Name) -> Option<&EgressNetwork> {
        self.networks.get(name).map(|network| &**network)
    }
}

impl Status {
    /// Gives conditions the time at which they came to hold.
    fn with_times(mut self, current: &Self, now: &str) -> Self {
        match (&mut self, current) {
            (Self::Route(wanted), Self::Route(current)) => {
                for status in wanted {
                    let before = current.iter().find(|before| before.parent_ref == status.parent_ref);
                    let before = before.map(|before| &*before.conditions).unwrap_or_default();
                    conditions::keep_times(&mut status.conditions, before, now);
                }
            }
            (Self::Policy(wanted), Self::Policy(current)) => {
                conditions::keep_times(&mut wanted.conditions, &current.conditions, now);
            }
            (Self::Workload(Some(wanted)), Self::Workload(current)) => {
                conditions::keep_times(std::slice::from_mut(wanted), current.as_slice(), now);
            }
            _ => {}
        }
        self
    }
}

/// Whether a condition of an external workload is the one that we write.
fn is_ours(condition: &Value) -> bool {
    condition["type"] == ACCEPTED
}

/// What the status of a route depends on.
fn looks_at(route: &Route) -> BTreeSet<Id> {
    let mut targets: BTreeSet<Id> = route.parents.iter().filter_map(parent_id).collect();
    for backend in route.rules.backend_refs() {
        let name = backend.resolve(route.meta.namespace());
        if backend.is_service() {
            targets.insert((Kind::Service, name));
        } else if backend.is_egress_network() {
            targets.insert((Kind::EgressNetwork, name));
        }
    }
    targets
}

fn place(parent: &Parent) -> (ParentKind, &Name, Option<u16>) {
    (parent.kind, &parent.name, parent.port)
}

fn parent_id(parent: &Parent) -> Option<Id> {
    Some((parent_kind(parent.kind)?.0, parent.name.clone()))
}

/// The kind of a parent of ours, and the group that statuses give for it.
fn parent_kind(kind: ParentKind) -> Option<(Kind, &'static str)> {
    let kind = match kind {
        ParentKind::Server => Kind::Server,
        ParentKind::Service => Kind::Service,
        ParentKind::EgressNetwork => Kind::EgressNetwork,
        ParentKind::Foreign => return None,
    };
    let group = kind.info().group;
    Some((kind, if group.is_empty() { "core" } else { group }))
}

fn server_of(limit: &RateLimitPolicy) -> Id {
    let name = Name::new(limit.meta.namespace().clone(), limit.server.clone());
    (Kind::Server, name)
}
