//! The conditions that we write, with the reasons that others look for.

use std::net::IpAddr;

use crate::resources::acceptance::Refusal;
use crate::resources::meta::Name;
use crate::resources::status::{ACCEPTED, Condition, UNSUPPORTED};
use crate::writeback::statuses::inventory::Id;

/// Why a rate limit does not hold.
pub(super) enum LimitRefusal<'a> {
    NoServer,
    /// It cannot be read.
    Unread(&'a str),
    /// Requests of this protocol are not counted.
    Protocol(String),
    /// An older one for the same server does.
    Older(&'a Name),
}

pub(super) fn of_route(judged: Result<(), Refusal>, generation: Option<i64>) -> Condition {
    let Err(refusal) = judged else {
        return yes(ACCEPTED, generation);
    };
    let reason = match refusal {
        Refusal::NoParent | Refusal::NoClusterIp | Refusal::OtherNamespace | Refusal::Protocol(_) => NO_PARENT,
        Refusal::Conflict | Refusal::Older(_) => CONFLICTED,
        Refusal::PartOfServer(_) | Refusal::Unsupported(_) => UNSUPPORTED,
    };
    no(ACCEPTED, reason, refusal.to_string(), generation)
}

/// Whether all backends of a route exist.
pub(super) fn of_backends(missing: &[Name], generation: Option<i64>) -> Condition {
    if missing.is_empty() {
        return yes(RESOLVED, generation);
    }
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let message = format!("there is no {}", names.join(", "));
    no(RESOLVED, "BackendNotFound", message, generation)
}

pub(super) fn invalid_backend(name: &Name, generation: Option<i64>) -> Condition {
    let message = format!("backend {name} is neither a Service nor an EgressNetwork");
    no(RESOLVED, "InvalidKind", message, generation)
}

pub(super) fn of_network(unread: Option<&str>, overlaps: bool, generation: Option<i64>) -> Condition {
    if let Some(reason) = unread {
        return no(ACCEPTED, UNSUPPORTED, reason.to_owned(), generation);
    }
    if !overlaps {
        return yes(ACCEPTED, generation);
    }
    let message = "networks overlap with clusterNetworks: what it denies is denied all the same, also within the cluster, and no route \
                   permits any of it; name networks outside of the cluster"
        .to_owned();
    no(ACCEPTED, "EgressReasonNetworkOverlap", message, generation)
}

pub(super) fn of_limit(refused: Option<LimitRefusal<'_>>, generation: Option<i64>) -> Condition {
    match refused {
        None => yes(ACCEPTED, generation),
        Some(LimitRefusal::Unread(reason)) => no(ACCEPTED, UNSUPPORTED, reason.to_owned(), generation),
        Some(LimitRefusal::NoServer) => no(ACCEPTED, "NoMatchingTarget", String::new(), generation),
        Some(LimitRefusal::Protocol(reason)) => no(ACCEPTED, UNSUPPORTED, reason, generation),
        Some(LimitRefusal::Older(name)) => {
            let message = format!("{name} is older");
            no(ACCEPTED, "RateLimitReasonAlreadyExists", message, generation)
        }
    }
}

/// What is said of an external workload: nothing, unless some of its addresses are somebody else's, or were.
pub(super) fn of_workload(taken: &[(IpAddr, Id)], was_judged: bool) -> Option<Condition> {
    if taken.is_empty() {
        // The definition of external workloads knows no generation that a condition is about.
        return was_judged.then(|| yes(ACCEPTED, None));
    }
    let taken = taken
        .iter()
        .map(|(ip, (kind, name))| format!("{ip} is an address of {} {name}", kind.info().name));
    let message = format!("{}; it is not served", taken.collect::<Vec<_>>().join(", "));
    Some(no(ACCEPTED, "AddressTaken", message, None))
}

/// Takes over the time of conditions that have the status they had.
pub(super) fn keep_times(wanted: &mut [Condition], current: &[Condition], now: &str) {
    for condition in wanted {
        let before = current
            .iter()
            .find(|before| before.kind == condition.kind && before.status == condition.status);
        let time = before.map_or(now, |before| &*before.last_transition_time);
        condition.last_transition_time = time.to_owned();
    }
}

/// The reason of what is as it should be is its name.
fn yes(kind: &str, generation: Option<i64>) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: "True".to_owned(),
        reason: kind.to_owned(),
        observed_generation: generation,
        ..Condition::default()
    }
}

fn no(kind: &str, reason: &str, message: String, generation: Option<i64>) -> Condition {
    Condition {
        kind: kind.to_owned(),
        status: "False".to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        ..Condition::default()
    }
}

const RESOLVED: &str = "ResolvedRefs";

const NO_PARENT: &str = "NoMatchingParent";

const CONFLICTED: &str = "RouteReasonConflicted";
