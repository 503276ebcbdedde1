//! The objects on which the status of an object depends.

use std::collections::BTreeSet;

use crate::resources::Kind;
use crate::resources::meta::NamespacedName;
use crate::resources::policy::rate_limit::RateLimitPolicy;
use crate::resources::route::{Parent, ParentKind, Route};
use crate::writeback::statuses::object_id::ObjectId;

/// Returns the objects on which the status of a route depends.
pub(super) fn route_dependencies(route: &Route) -> BTreeSet<ObjectId> {
    let mut targets: BTreeSet<ObjectId> = route.parents.iter().filter_map(parent_object_id).collect();
    for backend in route.rules.backend_refs() {
        let name = backend.resolve(route.meta.namespace());
        if backend.is_service() {
            targets.insert(ObjectId::new(Kind::Service, name));
        } else if backend.is_egress_network() {
            targets.insert(ObjectId::new(Kind::EgressNetwork, name));
        }
    }
    targets
}

/// Returns the fields of a parent that come from `parentRefs`, without `acceptance`, which comes from the status.
pub(super) fn reference_fields(parent: &Parent) -> (ParentKind, &NamespacedName, Option<u16>, Option<&str>) {
    (parent.kind, &parent.name, parent.port, parent.section.as_deref())
}

pub(super) fn parent_object_id(parent: &Parent) -> Option<ObjectId> {
    Some(ObjectId::new(parent_kind(parent.kind)?, parent.name.clone()))
}

pub(super) fn parent_kind(kind: ParentKind) -> Option<Kind> {
    match kind {
        ParentKind::Server => Some(Kind::Server),
        ParentKind::Service => Some(Kind::Service),
        ParentKind::EgressNetwork => Some(Kind::EgressNetwork),
        ParentKind::Foreign => None,
    }
}

pub(super) fn rate_limit_server(limit: &RateLimitPolicy) -> ObjectId {
    let name = NamespacedName::new(limit.meta.namespace().clone(), limit.server.clone());
    ObjectId::new(Kind::Server, name)
}
