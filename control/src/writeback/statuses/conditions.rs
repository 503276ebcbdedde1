//! The conditions that the controller writes, with the reasons that other tools expect.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::IpAddr;

use crate::resources::Kind;
use crate::resources::acceptance::RouteRejection;
use crate::resources::meta::NamespacedName;
use crate::resources::status::{ACCEPTED, Condition, UNSUPPORTED_VALUE};
use crate::writeback::statuses::object_id::ObjectId;

/// Why a rate limit is not accepted.
pub(super) enum RateLimitRejection<'a> {
    NoServer,
    /// It cannot be decoded.
    Unreadable(&'a str),
    /// Rate limits do not support the Server's protocol.
    Protocol(String),
    /// An older rate limit for the same Server takes precedence.
    OlderRateLimit(&'a NamespacedName),
}

/// Why an EgressNetwork is not accepted.
pub(super) enum EgressNetworkRejection<'a> {
    /// It cannot be decoded.
    Unreadable(&'a str),
    OverlapsClusterNetworks,
    /// These EgressNetworks apply to all its addresses.
    Overridden(BTreeSet<&'a NamespacedName>),
}

pub(super) fn route_condition(result: Result<(), RouteRejection>, generation: Option<i64>) -> Condition {
    let Err(rejection) = result else {
        return condition_true(ACCEPTED, generation);
    };
    let reason = match rejection {
        RouteRejection::ParentNotFound
        | RouteRejection::UnsupportedParentKind
        | RouteRejection::ParentHasNoSections
        | RouteRejection::NoPort
        | RouteRejection::OverlapsClusterNetworks
        | RouteRejection::NoClusterIp
        | RouteRejection::OtherNamespace
        | RouteRejection::ProtocolMismatch(_)
        | RouteRejection::PortProtocolMismatch(_) => NO_MATCHING_PARENT,
        RouteRejection::RouteOfPrecedingKind | RouteRejection::OlderRoute(_) => ROUTE_REASON_CONFLICTED,
        RouteRejection::UnsupportedParentField(_) | RouteRejection::Unsupported(_) => UNSUPPORTED_VALUE,
    };
    condition_false(ACCEPTED, reason, rejection.to_string(), generation)
}

/// Returns the `ResolvedRefs` condition: whether all backends of a route exist.
pub(super) fn backends_condition(missing: &[NamespacedName], generation: Option<i64>) -> Condition {
    if missing.is_empty() {
        return condition_true(RESOLVED_REFS, generation);
    }
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let message = format!("not found: {}", names.join(", "));
    condition_false(RESOLVED_REFS, "BackendNotFound", message, generation)
}

pub(super) fn invalid_backend_condition(name: &NamespacedName, generation: Option<i64>) -> Condition {
    let message = format!("backend {name} is neither a Service nor an EgressNetwork");
    condition_false(RESOLVED_REFS, "InvalidKind", message, generation)
}

/// Returns the `ResolvedRefs` condition of a route with an EgressNetwork as a backend that is not a parent of the route.
pub(super) fn non_parent_network_condition(name: &NamespacedName, generation: Option<i64>) -> Condition {
    let message = format!("EgressNetwork {name} can be a backend only of routes that also have it as a parent");
    condition_false(RESOLVED_REFS, "InvalidKind", message, generation)
}

/// Returns the `Overridden` condition, which exists only if objects of this kind make the route ineffective.
pub(super) fn overridden_condition(by: Kind, message: String, generation: Option<i64>) -> Condition {
    Condition {
        message,
        reason: by.info().name.to_owned(),
        ..condition_true("Overridden", generation)
    }
}

/// Returns the message that these EgressNetworks make another one ineffective.
pub(super) fn overriding_networks_message(overridden: impl Display, by: &BTreeSet<&NamespacedName>) -> String {
    let names: Vec<String> = by.iter().map(ToString::to_string).collect();
    format!(
        "{overridden} and its routes have no effect: other EgressNetworks ({}) cover all of its addresses with longer prefixes, or \
         with the same prefixes and an older creation time",
        names.join(", ")
    )
}

pub(super) fn egress_network_condition(
    rejection: Option<EgressNetworkRejection<'_>>,
    generation: Option<i64>,
) -> Condition {
    match rejection {
        None => condition_true(ACCEPTED, generation),
        Some(EgressNetworkRejection::Unreadable(reason)) => {
            condition_false(ACCEPTED, UNSUPPORTED_VALUE, reason.to_owned(), generation)
        }
        Some(EgressNetworkRejection::OverlapsClusterNetworks) => {
            let message =
                "spec.networks overlaps clusterNetworks; use networks outside the cluster, or list its networks in `except`. Until \
                 then the routes of this EgressNetwork are ignored, and its trafficPolicy Deny also applies inside the cluster"
                    .to_owned();
            condition_false(ACCEPTED, "EgressReasonNetworkOverlap", message, generation)
        }
        Some(EgressNetworkRejection::Overridden(networks)) => {
            let message = overriding_networks_message("this EgressNetwork", &networks);
            condition_false(ACCEPTED, "EgressReasonConflicted", message, generation)
        }
    }
}

pub(super) fn rate_limit_condition(rejection: Option<RateLimitRejection<'_>>, generation: Option<i64>) -> Condition {
    match rejection {
        None => condition_true(ACCEPTED, generation),
        Some(RateLimitRejection::Unreadable(reason)) => {
            condition_false(ACCEPTED, UNSUPPORTED_VALUE, reason.to_owned(), generation)
        }
        Some(RateLimitRejection::NoServer) => {
            let message = "the Server in spec.targetRef does not exist".to_owned();
            condition_false(ACCEPTED, "NoMatchingTarget", message, generation)
        }
        Some(RateLimitRejection::Protocol(reason)) => condition_false(ACCEPTED, UNSUPPORTED_VALUE, reason, generation),
        Some(RateLimitRejection::OlderRateLimit(name)) => {
            let message = format!("HTTPLocalRateLimitPolicy {name} is older and applies to the Server instead");
            condition_false(ACCEPTED, "RateLimitReasonAlreadyExists", message, generation)
        }
    }
}

/// Returns the condition of an external workload. It exists only if some of its addresses conflict or have conflicted.
pub(super) fn external_workload_condition(conflicts: &[(IpAddr, ObjectId)], had_condition: bool) -> Option<Condition> {
    if conflicts.is_empty() {
        // The status of external workloads has no observed generation.
        return had_condition.then(|| condition_true(ACCEPTED, None));
    }
    let owners = conflicts
        .iter()
        .map(|(ip, id)| format!("{ip} is an address of {} {}", id.kind.info().name, id.name));
    let owners = owners.collect::<Vec<_>>().join(", ");
    let message = format!("{owners}; clients do not reach this ExternalWorkload there");
    Some(condition_false(ACCEPTED, "AddressTaken", message, None))
}

/// Sets the transition time of each condition: that of the condition in `current` if its status is the same, otherwise `now`.
pub(super) fn set_transition_times(wanted: &mut [Condition], current: &[Condition], now: &str) {
    for condition in wanted {
        let before = current
            .iter()
            .find(|before| before.kind == condition.kind && before.status == condition.status);
        let time = before.map_or(now, |before| &*before.last_transition_time);
        condition.last_transition_time = time.to_owned();
    }
}

/// Returns a true condition. Its reason is its type.
fn condition_true(kind: &str, generation: Option<i64>) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: "True".to_owned(),
        reason: kind.to_owned(),
        observed_generation: generation,
        ..Condition::default()
    }
}

fn condition_false(kind: &str, reason: &str, message: String, generation: Option<i64>) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: "False".to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        ..Condition::default()
    }
}

const RESOLVED_REFS: &str = "ResolvedRefs";

const NO_MATCHING_PARENT: &str = "NoMatchingParent";

const ROUTE_REASON_CONFLICTED: &str = "RouteReasonConflicted";
