//! The objects whose status is written, the objects on which it depends, and the required patches.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ahash::AHashMap;
use serde_json::{Value, json};
use tulle_core::names::annotation;

use crate::resources::acceptance::{self, AcceptanceSettings, ParentLookup, RouteRejection};
use crate::resources::event::Event;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::egress_network::EgressNetwork;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::policy::server::Server;
use crate::resources::route::{Parent, ParentKind, Route};
use crate::resources::service::{Service, ServiceKind, ServicePort};
use crate::resources::service_profile::ServiceProfile;
use crate::resources::status::{
    ACCEPTED, CONTROLLER_NAME, Condition, ParentRef, ParentStatus, PolicyStatus, UNSUPPORTED_VALUE,
};
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::UnservedPart;
use crate::resources::workload::ExternalWorkload;
use crate::resources::{Kind, Object};
use crate::writeback::config::StatusesConfig;
use crate::writeback::statuses::conditions::{self, EgressNetworkRejection};
use crate::writeback::statuses::dependencies::{
    parent_kind, parent_object_id, rate_limit_server, reference_fields, route_dependencies,
};
use crate::writeback::statuses::object_id::ObjectId;

/// Returns the parts of a Service that determine which routes it accepts.
fn acceptance_inputs(service: &Service) -> (ServiceKind, &[ServicePort], Option<&str>) {
    let opaque_ports = service.meta.annotation(annotation::OPAQUE_PORTS);
    (service.kind, &service.ports, opaque_ports)
}

/// Index of the objects. They are shared with the other consumers of the events.
pub(super) struct StatusIndex {
    settings: StatusesConfig,
    servers: AHashMap<NamespacedName, Arc<Server>>,
    services: AHashMap<NamespacedName, Arc<Service>>,
    egress_networks: AHashMap<NamespacedName, Arc<EgressNetwork>>,
    /// Empty if the process does not watch ServiceProfiles, which only destination needs.
    profiles: AHashMap<NamespacedName, Arc<ServiceProfile>>,
    routes: AHashMap<ObjectId, Arc<Route>>,
    rate_limits: AHashMap<NamespacedName, Arc<RateLimitPolicy>>,
    external_workloads: AHashMap<NamespacedName, Arc<ExternalWorkload>>,
    /// Services, pods and external workloads by address. External workloads are included for all addresses in their
    /// spec, even if another object has the address.
    objects_by_ip: AHashMap<IpAddr, BTreeSet<ObjectId>>,
    pod_ips: AHashMap<NamespacedName, Vec<IpAddr>>,
    /// The objects whose status depends on an object.
    dependents: AHashMap<ObjectId, BTreeSet<ObjectId>>,
    /// Statuses that are written but not reported by the watch yet, each with the version that it replaces.
    unconfirmed_writes: AHashMap<ObjectId, (String, Status)>,
}

/// The part of a status that this controller writes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Status {
    Route(Vec<ParentStatus>),
    Policy(PolicyStatus),
    /// Our condition of an external workload, if it exists.
    Workload(Option<Condition>),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct StatusPatch {
    pub(super) body: Value,
    /// The resource version that the patch replaces.
    pub(super) version: String,
    pub(super) status: Status,
}

impl StatusIndex {
    pub(super) fn new(settings: StatusesConfig) -> Self {
        Self {
            settings,
            servers: AHashMap::new(),
            services: AHashMap::new(),
            egress_networks: AHashMap::new(),
            profiles: AHashMap::new(),
            routes: AHashMap::new(),
            rate_limits: AHashMap::new(),
            external_workloads: AHashMap::new(),
            objects_by_ip: AHashMap::new(),
            pod_ips: AHashMap::new(),
            dependents: AHashMap::new(),
            unconfirmed_writes: AHashMap::new(),
        }
    }

    /// Applies an event. Returns the objects whose status can change.
    pub(super) fn apply_event(&mut self, event: &Event) -> BTreeSet<ObjectId> {
        match event {
            Event::Applied(object) => self.apply(object),
            Event::Deleted(kind, name) => self.delete(&ObjectId::new(*kind, name.clone())),
            Event::Unreadable(unreadable) => self.apply_unreadable(unreadable),
            Event::Synced => BTreeSet::new(),
        }
    }

    /// Adds or replaces an object. Returns the objects whose status can change.
    pub(super) fn apply(&mut self, object: &Object) -> BTreeSet<ObjectId> {
        let id = ObjectId::new(object.kind(), object.meta().name.clone());
        // An event with another version than the one that our patch replaced contains our write, or something newer.
        let is_confirmed = |(replaced, _): &(String, Status)| *replaced != object.meta().version;
        if self.unconfirmed_writes.get(&id).is_some_and(is_confirmed) {
            self.unconfirmed_writes.remove(&id);
        }
        if let Some(route) = object.route() {
            return self.apply_route(id, route);
        }
        match object {
            Object::RateLimitPolicy(limit) => self.apply_rate_limit(id, limit),
            Object::EgressNetwork(network) => {
                let before = self.egress_networks.insert(id.name.clone(), network.clone());
                let mut affected = self.dependents_of(&id);
                let has_same_precedence = before.is_some_and(|before| {
                    (&before.networks, before.meta.created_at) == (&network.networks, network.meta.created_at)
                });
                if !has_same_precedence {
                    affected.extend(self.egress_networks_and_routes_of(&id.name.namespace));
                }
                affected.insert(id);
                affected
            }
            Object::Server(server) => {
                let before = self.servers.insert(id.name.clone(), server.clone());
                match before.is_some_and(|before| before.protocol == server.protocol) {
                    true => BTreeSet::new(),
                    false => self.dependents_of(&id),
                }
            }
            Object::Service(service) => {
                let before = self.services.insert(id.name.clone(), service.clone());
                let old = before
                    .as_ref()
                    .map(|before| before.cluster_ips.clone())
                    .unwrap_or_default();
                let mut affected = self.update_addresses(&id, &old, &service.cluster_ips);
                if before.is_none_or(|before| acceptance_inputs(&before) != acceptance_inputs(service)) {
                    affected.extend(self.dependents_of(&id));
                }
                affected
            }
            Object::Pod(pod) => {
                let addresses: Vec<IpAddr> = pod.claimed_ips().collect();
                let old = self
                    .pod_ips
                    .insert(id.name.clone(), addresses.clone())
                    .unwrap_or_default();
                self.update_addresses(&id, &old, &addresses)
            }
            Object::ExternalWorkload(workload) => self.apply_external_workload(id, workload),
            Object::ServiceProfile(profile) => {
                self.profiles.insert(id.name, profile.clone());
                self.dependents_of_profile(profile)
            }
            _ => BTreeSet::new(),
        }
    }

    /// Applies the placeholder of an object that cannot be read, so that its status reports the reason. Servers have no status,
    /// so their placeholders do not replace a known Server.
    pub(super) fn apply_unreadable(&mut self, unreadable: &Unreadable) -> BTreeSet<ObjectId> {
        match &unreadable.placeholder {
            Some(Object::Server(_)) if self.servers.contains_key(&unreadable.name) => BTreeSet::new(),
            Some(object) => self.apply(object),
            None => BTreeSet::new(),
        }
    }

    pub(super) fn delete(&mut self, id: &ObjectId) -> BTreeSet<ObjectId> {
        self.unconfirmed_writes.remove(id);
        let mut affected = match id.kind {
            Kind::Server => {
                self.servers.remove(&id.name);
                self.dependents_of(id)
            }
            Kind::Service => {
                let old = self.services.remove(&id.name);
                let old = old.map(|old| old.cluster_ips.clone()).unwrap_or_default();
                let mut affected = self.update_addresses(id, &old, &[]);
                affected.extend(self.dependents_of(id));
                affected
            }
            Kind::Pod => {
                let old = self.pod_ips.remove(&id.name).unwrap_or_default();
                self.update_addresses(id, &old, &[])
            }
            Kind::ExternalWorkload => {
                let Some(old) = self.external_workloads.remove(&id.name) else {
                    return BTreeSet::new();
                };
                let mut affected = self.update_addresses(id, &old.ips, &[]);
                affected.retain(|other| self.is_younger(&other.name, old.meta.age_order()));
                affected
            }
            Kind::EgressNetwork => {
                self.egress_networks.remove(&id.name);
                let mut affected = self.dependents_of(id);
                affected.extend(self.egress_networks_and_routes_of(&id.name.namespace));
                affected
            }
            Kind::ServiceProfile => {
                let old = self.profiles.remove(&id.name);
                old.map(|old| self.dependents_of_profile(&old)).unwrap_or_default()
            }
            Kind::RateLimitPolicy => {
                let old = self.rate_limits.remove(&id.name);
                self.remove_dependencies(id, old.iter().map(|old| rate_limit_server(old)).collect())
            }
            _ => {
                let old = self.routes.remove(id);
                self.remove_dependencies(id, old.map(|old| route_dependencies(&old)).unwrap_or_default())
            }
        };
        affected.remove(id);
        affected
    }

    /// Returns the EgressNetworks of a namespace, which compete for addresses, and their routes. Returns an empty list if the
    /// EgressNetworks are too many to compare.
    fn egress_networks_and_routes_of(&self, namespace: &str) -> Vec<ObjectId> {
        let names = self.egress_networks.keys();
        let names: Vec<_> = names.filter(|name| *name.namespace == *namespace).collect();
        if names.len() > acceptance::MAX_COMPARED_NETWORKS {
            return Vec::new();
        }
        let ids = names
            .into_iter()
            .map(|name| ObjectId::new(Kind::EgressNetwork, name.clone()));
        ids.flat_map(|id| self.dependents_of(&id).into_iter().chain([id]))
            .collect()
    }

    /// Replaces the addresses of an object. Returns the external workloads that have one of the old or new addresses.
    fn update_addresses(&mut self, id: &ObjectId, old: &[IpAddr], new: &[IpAddr]) -> BTreeSet<ObjectId> {
        if old == new {
            return BTreeSet::new();
        }
        for ip in old {
            if let Some(ids) = self.objects_by_ip.get_mut(ip) {
                ids.remove(id);
                if ids.is_empty() {
                    self.objects_by_ip.remove(ip);
                }
            }
        }
        for ip in new {
            self.objects_by_ip.entry(*ip).or_default().insert(id.clone());
        }
        self.workloads_at(old.iter().chain(new))
    }

    /// Returns whether an external workload was created after a workload of this age. The oldest workload of an address keeps
    /// it, so the change of a workload affects the younger ones only.
    fn is_younger(&self, name: &NamespacedName, age: (i64, &NamespacedName)) -> bool {
        let workload = self.external_workloads.get(name);
        workload.is_some_and(|workload| workload.meta.age_order() > age)
    }

    fn workloads_at<'a>(&self, ips: impl IntoIterator<Item = &'a IpAddr>) -> BTreeSet<ObjectId> {
        let ids = ips.into_iter().filter_map(|ip| self.objects_by_ip.get(ip)).flatten();
        ids.filter(|id| id.kind == Kind::ExternalWorkload).cloned().collect()
    }

    fn apply_external_workload(&mut self, id: ObjectId, workload: &Arc<ExternalWorkload>) -> BTreeSet<ObjectId> {
        let before = self.external_workloads.insert(id.name.clone(), workload.clone());
        let old_ips = before.as_ref().map(|before| before.ips.clone()).unwrap_or_default();
        let mut affected = self.update_addresses(&id, &old_ips, &workload.ips);
        // Ports and age decide which workload gets an address.
        let has_same_precedence = before.as_ref().is_some_and(|before| {
            (&before.ports, before.meta.created_at) == (&workload.ports, workload.meta.created_at)
        });
        if !has_same_precedence {
            affected.extend(self.workloads_at(&workload.ips));
        }
        let older_age = match &before {
            Some(before) => before.meta.age_order().min(workload.meta.age_order()),
            None => workload.meta.age_order(),
        };
        affected.retain(|id| self.is_younger(&id.name, older_age));
        affected.insert(id);
        affected
    }

    fn apply_route(&mut self, id: ObjectId, route: &Arc<Route>) -> BTreeSet<ObjectId> {
        let old = self.routes.insert(id.clone(), route.clone());
        let before = old.as_ref().map(|old| route_dependencies(old)).unwrap_or_default();
        let after = route_dependencies(route);
        let mut affected = BTreeSet::from([id.clone()]);
        let competes_as_before = |old: &Arc<Route>| {
            old.parents
                .iter()
                .map(reference_fields)
                .eq(route.parents.iter().map(reference_fields))
                && (&old.hostnames, old.meta.created_at) == (&route.hostnames, route.meta.created_at)
        };
        // A route with the same parents, hostnames and age as before does not affect the other routes of these parents.
        if !old.as_ref().is_some_and(competes_as_before) || before != after {
            affected.extend(self.remove_dependencies(&id, before));
            for target in after {
                let dependents = self.dependents.entry(target).or_default();
                affected.extend(dependents.iter().cloned());
                dependents.insert(id.clone());
            }
        }
        affected
    }

    fn apply_rate_limit(&mut self, id: ObjectId, limit: &Arc<RateLimitPolicy>) -> BTreeSet<ObjectId> {
        let old = self.rate_limits.insert(id.name.clone(), limit.clone());
        let mut affected = BTreeSet::from([id.clone()]);
        let same =
            |old: &Arc<RateLimitPolicy>| old.server == limit.server && old.meta.created_at == limit.meta.created_at;
        if !old.as_ref().is_some_and(same) {
            affected.extend(self.remove_dependencies(&id, old.iter().map(|old| rate_limit_server(old)).collect()));
            let dependents = self.dependents.entry(rate_limit_server(limit)).or_default();
            affected.extend(dependents.iter().cloned());
            dependents.insert(id);
        }
        affected
    }

    /// Removes the dependencies of an object. Returns the other objects with the same dependencies.
    fn remove_dependencies(&mut self, id: &ObjectId, targets: BTreeSet<ObjectId>) -> BTreeSet<ObjectId> {
        let mut affected = BTreeSet::new();
        for target in targets {
            if let Some(dependents) = self.dependents.get_mut(&target) {
                dependents.remove(id);
                affected.extend(dependents.iter().cloned());
                if dependents.is_empty() {
                    self.dependents.remove(&target);
                }
            }
        }
        affected
    }

    fn dependents_of(&self, id: &ObjectId) -> BTreeSet<ObjectId> {
        self.dependents.get(id).cloned().unwrap_or_default()
    }

    /// Returns the objects that depend on the Service of a ServiceProfile.
    fn dependents_of_profile(&self, profile: &ServiceProfile) -> BTreeSet<ObjectId> {
        let service = profile.service(&self.settings.cluster_domain);
        let dependents = service.map(|name| self.dependents_of(&ObjectId::new(Kind::Service, name)));
        dependents.unwrap_or_default()
    }

    /// Returns all objects whose status this controller writes.
    pub(super) fn objects_with_status(&self) -> Vec<ObjectId> {
        let routes = self.routes.keys().cloned();
        let limits = self
            .rate_limits
            .keys()
            .map(|name| ObjectId::new(Kind::RateLimitPolicy, name.clone()));
        let networks = self
            .egress_networks
            .keys()
            .map(|name| ObjectId::new(Kind::EgressNetwork, name.clone()));
        let workloads = self
            .external_workloads
            .keys()
            .map(|name| ObjectId::new(Kind::ExternalWorkload, name.clone()));
        routes.chain(limits).chain(networks).chain(workloads).collect()
    }

    /// Builds the patch for an object. `None` if the object does not exist or its status is up to date.
    pub(super) fn build_patch(&self, id: &ObjectId, now: &str) -> Option<StatusPatch> {
        let (version, current, foreign) = self.current_status(id)?;
        let wanted = self.desired_status(id)?.with_transition_times(&current, now);
        if wanted == current {
            return None;
        }
        // The API version is added when the patch is sent.
        let mut body = json!({ "kind": id.kind.info().name, "metadata": { "name": id.name.name } });
        body["status"] = match &wanted {
            Status::Route(ours) => {
                // The patch replaces the complete list. The resource version prevents overwriting concurrent changes.
                body["metadata"]["resourceVersion"] = json!(version);
                let parents: Vec<&ParentStatus> = foreign.iter().chain(ours).collect();
                json!({ "parents": parents })
            }
            Status::Policy(ours) => {
                body["metadata"]["resourceVersion"] = json!(version);
                json!(PolicyStatus {
                    conditions: [self.foreign_policy_conditions(id), ours.conditions.clone()].concat(),
                    target_ref: ours.target_ref.clone(),
                })
            }
            Status::Workload(ours) => {
                body["metadata"]["resourceVersion"] = json!(version);
                let conditions = self
                    .external_workloads
                    .get(&id.name)
                    .map(|workload| &*workload.conditions);
                let foreign = conditions
                    .unwrap_or_default()
                    .iter()
                    .filter(|condition| !is_managed(condition));
                let all: Vec<Value> = foreign.cloned().chain(ours.iter().map(|ours| json!(ours))).collect();
                json!({ "conditions": all })
            }
        };
        Some(StatusPatch {
            body,
            version,
            status: wanted,
        })
    }

    /// Records that a patch has succeeded.
    pub(super) fn record_write(&mut self, id: ObjectId, patch: StatusPatch) {
        self.unconfirmed_writes.insert(id, (patch.version, patch.status));
    }

    /// Returns the version of an object, our part of its status, and the entries of other controllers in the status of a route.
    fn current_status(&self, id: &ObjectId) -> Option<(String, Status, Vec<ParentStatus>)> {
        let (meta, status, foreign) = match id.kind {
            Kind::RateLimitPolicy => {
                let limit = self.rate_limits.get(&id.name)?;
                (&limit.meta, our_policy_status(&limit.status), Vec::new())
            }
            Kind::EgressNetwork => {
                let network = self.egress_networks.get(&id.name)?;
                (&network.meta, our_policy_status(&network.status), Vec::new())
            }
            Kind::ExternalWorkload => {
                let workload = self.external_workloads.get(&id.name)?;
                let our_condition = workload.conditions.iter().find(|condition| is_managed(condition));
                // A condition that cannot be decoded is written again.
                let decoded = our_condition.and_then(|condition| serde_json::from_value(condition.clone()).ok());
                (&workload.meta, Status::Workload(decoded), Vec::new())
            }
            _ => {
                let route = self.routes.get(id)?;
                let statuses = route.statuses.iter().cloned();
                let (ours, foreign) = statuses.partition(|status| status.controller_name == CONTROLLER_NAME);
                (&route.meta, Status::Route(ours), foreign)
            }
        };
        let status = match self.unconfirmed_writes.get(id) {
            Some((replaced, written)) if *replaced == meta.version => written.clone(),
            _ => status,
        };
        Some((meta.version.clone(), status, foreign))
    }

    /// Returns the conditions of other controllers in the status of a rate limit or an egress network.
    fn foreign_policy_conditions(&self, id: &ObjectId) -> Vec<Condition> {
        let status = match id.kind {
            Kind::RateLimitPolicy => self.rate_limits.get(&id.name).map(|limit| &limit.status),
            _ => self.egress_networks.get(&id.name).map(|network| &network.status),
        };
        let conditions = status.map(|status| &*status.conditions).unwrap_or_default();
        let foreign = conditions.iter().filter(|condition| condition.kind != ACCEPTED);
        foreign.cloned().collect()
    }

    /// Returns our part of the status without times.
    fn desired_status(&self, id: &ObjectId) -> Option<Status> {
        match id.kind {
            Kind::RateLimitPolicy => self.rate_limit_status(self.rate_limits.get(&id.name)?),
            Kind::EgressNetwork => {
                let network = self.egress_networks.get(&id.name)?;
                let rejection = self.egress_network_rejection(network);
                Some(Status::Policy(PolicyStatus {
                    conditions: vec![conditions::egress_network_condition(rejection, network.generation)],
                    target_ref: None,
                }))
            }
            Kind::ExternalWorkload => {
                let workload = self.external_workloads.get(&id.name)?;
                let had_condition = workload.conditions.iter().any(is_managed);
                let conflicts: Vec<_> = workload
                    .ips
                    .iter()
                    .filter_map(|ip| Some((*ip, self.address_owner(*ip, workload)?)))
                    .collect();
                Some(Status::Workload(conditions::external_workload_condition(
                    &conflicts,
                    had_condition,
                )))
            }
            _ => Some(Status::Route(self.route_status(self.routes.get(id)?))),
        }
    }

    /// Returns why an EgressNetwork is not accepted, or `None` if it is.
    fn egress_network_rejection<'a>(&'a self, network: &'a EgressNetwork) -> Option<EgressNetworkRejection<'a>> {
        if let Some(reason) = &network.unreadable {
            return Some(EgressNetworkRejection::Unreadable(reason));
        }
        let cluster_networks = &self.settings.cluster_networks;
        if acceptance::overlaps_cluster_networks(network, cluster_networks) {
            return Some(EgressNetworkRejection::OverlapsClusterNetworks);
        }
        let all = self.egress_networks.values().map(|other| &**other);
        // Unreadable EgressNetworks are left out: their last readable version stays in force, but its networks are not known here.
        let readable = all.filter(|other| other.unreadable.is_none());
        let in_same_namespace = readable.filter(|other| other.meta.namespace() == network.meta.namespace());
        let overriding = acceptance::overriding_networks(network, in_same_namespace, cluster_networks);
        (!overriding.is_empty()).then_some(EgressNetworkRejection::Overridden(overriding))
    }

    /// Returns the object that takes precedence for an address of an external workload: a Service, a Pod, or another
    /// external workload.
    fn address_owner(&self, ip: IpAddr, workload: &ExternalWorkload) -> Option<ObjectId> {
        let ids = self.objects_by_ip.get(&ip)?;
        if let Some(owner) = ids.iter().find(|id| id.kind != Kind::ExternalWorkload) {
            return Some(owner.clone());
        }
        let all = ids.iter().filter_map(|id| self.external_workloads.get(&id.name));
        let older = workload.conflicting_older_workload(all.map(|workload| &**workload))?;
        Some(ObjectId::new(Kind::ExternalWorkload, older.meta.name.clone()))
    }

    fn route_status(&self, route: &Route) -> Vec<ParentStatus> {
        let mut statuses: Vec<ParentStatus> = Vec::new();
        for parent in &route.parents {
            let Some(kind) = parent_kind(parent.kind) else {
                continue;
            };
            let checked = self.check_parent(route, parent);
            let overridden = checked
                .is_ok()
                .then(|| self.overridden_condition(route, parent))
                .flatten();
            let mut found = vec![conditions::route_condition(checked, route.generation)];
            if parent.kind != ParentKind::Server {
                found.push(self.resolved_refs_condition(route));
            }
            found.extend(overridden);
            let parent_ref = ParentRef {
                // The core group is the empty string, as in the Gateway API.
                group: Some(kind.info().group.to_owned()),
                kind: Some(parent.kind.name().to_owned()),
                namespace: Some(parent.name.namespace.to_string()),
                name: parent.name.name.to_string(),
                section_name: parent.section.clone(),
                port: parent.port,
            };
            // A parent that is referenced twice has one status.
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

    /// Returns the condition of a route that a ServiceProfile replaces, or whose EgressNetwork is not used. Such a route stays
    /// accepted, so that it is in force as soon as its EgressNetwork is.
    fn overridden_condition(&self, route: &Route, parent: &Parent) -> Option<Condition> {
        if let Some(profile) = self.replacing_profile(route, parent) {
            let message = profile.replacement_message(&parent.name);
            return Some(conditions::overridden_condition(
                Kind::ServiceProfile,
                message,
                route.generation,
            ));
        }
        if parent.kind != ParentKind::EgressNetwork {
            return None;
        }
        let network = self.egress_network(&parent.name)?;
        let Some(EgressNetworkRejection::Overridden(networks)) = self.egress_network_rejection(network) else {
            return None;
        };
        let message = conditions::overriding_networks_message(format_args!("EgressNetwork {}", parent.name), &networks);
        Some(conditions::overridden_condition(
            Kind::EgressNetwork,
            message,
            route.generation,
        ))
    }

    /// Returns the ServiceProfile that replaces a route, for clients in the namespace of the route.
    fn replacing_profile(&self, route: &Route, parent: &Parent) -> Option<&ServiceProfile> {
        if parent.kind != ParentKind::Service || self.profiles.is_empty() {
            return None;
        }
        let NamespacedName { namespace, name } = &parent.name;
        let profile_name: Arc<str> = format!("{name}.{namespace}.svc.{}", self.settings.cluster_domain).into();
        let in_namespace = |namespace: &Arc<str>| {
            let name = NamespacedName::new(namespace.clone(), profile_name.clone());
            self.profiles.get(&name)
        };
        let profile = in_namespace(route.meta.namespace()).or_else(|| in_namespace(namespace))?;
        profile.replaces_routes(route.kind).then_some(&**profile)
    }

    /// Checks whether a parent accepts a route.
    fn check_parent(&self, route: &Route, parent: &Parent) -> Result<(), RouteRejection> {
        let settings = AcceptanceSettings {
            cluster_networks: &self.settings.cluster_networks,
            global_egress_namespace: &self.settings.global_egress_namespace,
            default_opaque_ports: &self.settings.default_opaque_ports,
        };
        acceptance::check_route(self, settings, route, parent, self.routes_of_parent(parent))
    }

    /// Returns the parts of an object that are unserved because of other objects, each with the reason in its status.
    ///
    /// Unsupported parts, and those that the protocol of the Server does not support, are left out: `cluster` counts them for all
    /// sources.
    pub(super) fn unserved_parts(&self, id: &ObjectId) -> Vec<UnservedPart> {
        if let Some(route) = self.routes.get(id) {
            return self.unserved_route_parts(route);
        }
        let (field, conditions) = match (id.kind, self.desired_status(id)) {
            (Kind::RateLimitPolicy, Some(Status::Policy(status))) => ("spec.targetRef", status.conditions),
            (Kind::EgressNetwork, Some(Status::Policy(status))) => ("spec.networks", status.conditions),
            (Kind::ExternalWorkload, Some(Status::Workload(Some(condition)))) => ("spec.workloadIPs", vec![condition]),
            _ => return Vec::new(),
        };
        let is_unserved = |condition: &Condition| condition.status == "False" && condition.reason != UNSUPPORTED_VALUE;
        let conditions = conditions.into_iter().filter(is_unserved);
        conditions
            .map(|Condition { message: reason, .. }| UnservedPart { field, reason })
            .collect()
    }

    fn unserved_route_parts(&self, route: &Route) -> Vec<UnservedPart> {
        let mut found = Vec::new();
        let is_in_mesh = |parent: &&Parent| parent.kind != ParentKind::Foreign;
        for parent in route.parents.iter().filter(is_in_mesh) {
            let rejection = match self.check_parent(route, parent) {
                Ok(())
                | Err(
                    RouteRejection::Unsupported(_)
                    | RouteRejection::UnsupportedParentField(_)
                    | RouteRejection::ProtocolMismatch(_),
                ) => continue,
                Err(rejection) => rejection,
            };
            let port = parent.port.map(|port| format!(":{port}")).unwrap_or_default();
            let part = UnservedPart {
                field: "spec.parentRefs",
                reason: format!("{} {}{port}: {rejection}", parent.kind.name(), parent.name),
            };
            // As in a status, a parent that is referenced twice counts once.
            if !found.contains(&part) {
                found.push(part);
            }
        }
        let uses_backends = |parent: &Parent| matches!(parent.kind, ParentKind::Service | ParentKind::EgressNetwork);
        let condition = self.resolved_refs_condition(route);
        if route.parents.iter().any(uses_backends) && condition.status == "False" {
            found.push(UnservedPart {
                field: "spec.rules",
                reason: format!("backends: {}", condition.message),
            });
        }
        found
    }

    fn routes_of_parent(&self, parent: &Parent) -> impl Iterator<Item = &Route> {
        let dependents = parent_object_id(parent).and_then(|id| self.dependents.get(&id));
        let routes = dependents.into_iter().flatten().filter_map(|id| self.routes.get(id));
        routes.map(|route| &**route)
    }

    /// Returns the condition that tells whether all backends of a route exist and can be its backends.
    fn resolved_refs_condition(&self, route: &Route) -> Condition {
        let mut missing = Vec::new();
        for backend in route.rules.backend_refs() {
            let name = backend.resolve(route.meta.namespace());
            let exists = if backend.is_service() {
                self.services.contains_key(&name)
            } else if backend.is_egress_network() {
                let is_parent = |parent: &Parent| parent.kind == ParentKind::EgressNetwork && parent.name == name;
                let exists = self.egress_networks.contains_key(&name);
                if exists && !route.parents.iter().any(is_parent) {
                    return conditions::non_parent_network_condition(&name, route.generation);
                }
                exists
            } else {
                return conditions::invalid_backend_condition(&name, route.generation);
            };
            if !exists {
                missing.push(name);
            }
        }
        conditions::backends_condition(&missing, route.generation)
    }

    fn rate_limit_status(&self, limit: &RateLimitPolicy) -> Option<Status> {
        let server = rate_limit_server(limit);
        let competing = self
            .dependents
            .get(&server)?
            .iter()
            .filter(|id| id.kind == Kind::RateLimitPolicy);
        let oldest = competing
            .filter_map(|id| self.rate_limits.get(&id.name))
            .min_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
        let oldest_name = oldest.map_or(&limit.meta.name, |oldest| &oldest.meta.name);
        let protocol = self.servers.get(&server.name).map(|server| server.protocol);
        let rejection = match (protocol, protocol.and_then(acceptance::rate_limit_unsupported_reason)) {
            _ if limit.unreadable.is_some() => limit
                .unreadable
                .as_deref()
                .map(conditions::RateLimitRejection::Unreadable),
            (None, _) => Some(conditions::RateLimitRejection::NoServer),
            (Some(_), Some(reason)) => Some(conditions::RateLimitRejection::Protocol(reason)),
            (Some(_), None) if *oldest_name != limit.meta.name => {
                Some(conditions::RateLimitRejection::OlderRateLimit(oldest_name))
            }
            (Some(_), None) => None,
        };
        Some(Status::Policy(PolicyStatus {
            conditions: vec![conditions::rate_limit_condition(rejection, limit.generation)],
            target_ref: Some(limit.target.clone()),
        }))
    }
}

impl ParentLookup for StatusIndex {
    fn server(&self, name: &NamespacedName) -> Option<&Server> {
        self.servers.get(name).map(|server| &**server)
    }

    fn service(&self, name: &NamespacedName) -> Option<&Service> {
        self.services.get(name).map(|service| &**service)
    }

    fn egress_network(&self, name: &NamespacedName) -> Option<&EgressNetwork> {
        self.egress_networks.get(name).map(|network| &**network)
    }
}

impl Status {
    fn with_transition_times(mut self, current: &Self, now: &str) -> Self {
        match (&mut self, current) {
            (Self::Route(wanted), Self::Route(current)) => {
                for status in wanted {
                    let before = current.iter().find(|before| before.parent_ref == status.parent_ref);
                    let before = before.map(|before| &*before.conditions).unwrap_or_default();
                    conditions::set_transition_times(&mut status.conditions, before, now);
                }
            }
            (Self::Policy(wanted), Self::Policy(current)) => {
                conditions::set_transition_times(&mut wanted.conditions, &current.conditions, now);
            }
            (Self::Workload(Some(wanted)), Self::Workload(current)) => {
                conditions::set_transition_times(std::slice::from_mut(wanted), current.as_slice(), now);
            }
            _ => {}
        }
        self
    }
}

/// Returns the part of a policy's status that this controller writes.
fn our_policy_status(status: &PolicyStatus) -> Status {
    let mut ours = status.clone();
    ours.conditions.retain(|condition| condition.kind == ACCEPTED);
    Status::Policy(ours)
}

/// Returns whether this controller writes a condition of an external workload.
fn is_managed(condition: &Value) -> bool {
    condition["type"] == ACCEPTED
}
