//! Which kinds the services of a process need, and how much of each.

use tulle_core::names::label;

use crate::resources::{KINDS, Kind};

/// The services that ask, and what endpoints are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    pub destination: bool,
    pub policy: bool,
    pub drives: Drives,
}

/// The kind whose changes move endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drives {
    Slices,
    Endpoints,
}

/// One kind as it is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    pub(super) kind: Kind,
    pub(super) part: Part,
    /// Only objects with this label.
    pub(super) label: Option<&'static str>,
}

/// How much of an object is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Nothing,
    Metadata,
    Whole,
}

/// What these needs amount to; a kind that two services need is watched once.
pub(super) fn of(needs: &Needs) -> Vec<Watched> {
    let mut watched = Vec::new();
    for kind in KINDS.iter().map(|info| info.kind) {
        let destination = match needs.destination {
            true => for_destination(kind, needs.drives),
            false => Part::Nothing,
        };
        let policy = match needs.policy {
            true => for_policy(kind),
            false => Part::Nothing,
        };
        let part = destination.max(policy);
        if part == Part::Nothing {
            continue;
        }
        watched.push(Watched {
            kind,
            part,
            // Policies hold for workloads of the mesh only; destination answers for all.
            label: (kind == Kind::Pod && destination == Part::Nothing).then_some(label::CONTROL_PLANE_NS),
        });
    }
    watched
}

fn for_destination(kind: Kind, drives: Drives) -> Part {
    match (kind, drives) {
        (Kind::Endpoints, Drives::Slices) => Part::Metadata,
        (Kind::EndpointSlice, Drives::Endpoints) => Part::Nothing,
        (
            Kind::Endpoints
            | Kind::EndpointSlice
            | Kind::Pod
            | Kind::Service
            | Kind::ServiceProfile
            | Kind::Server
            | Kind::ExternalWorkload,
            _,
        ) => Part::Whole,
        (Kind::Node | Kind::ReplicaSet | Kind::Job, _) => Part::Metadata,
        _ => Part::Nothing,
    }
}

fn for_policy(kind: Kind) -> Part {
    match kind {
        Kind::Endpoints
        | Kind::EndpointSlice
        | Kind::Node
        | Kind::Namespace
        | Kind::ReplicaSet
        | Kind::Job
        | Kind::ServiceProfile => Part::Nothing,
        _ => Part::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(destination: bool, policy: bool, drives: Drives) -> Vec<String> {
        let needs = Needs {
            destination,
            policy,
            drives,
        };
        let line = |watched: Watched| {
            let part = if watched.part == Part::Metadata {
                " metadata"
            } else {
                ""
            };
            let label = watched.label.map(|label| format!(" with {label}")).unwrap_or_default();
            format!("{}{part}{label}", watched.kind.info().plural())
        };
        of(&needs).into_iter().map(line).collect()
    }

    #[test]
    fn destination_watches_what_its_answers_are_made_of() {
        let expected = [
            "services",
            "endpoints metadata",
            "endpointslices",
            "pods",
            "nodes metadata",
            "replicasets metadata",
            "jobs metadata",
            "externalworkloads",
            "servers",
            "serviceprofiles",
        ];
        assert_eq!(watched(true, false, Drives::Slices), expected);
        let without_slices = watched(true, false, Drives::Endpoints);
        assert!(without_slices.contains(&"endpoints".to_owned()));
        assert!(!without_slices.contains(&"endpointslices".to_owned()));
    }

    #[test]
    fn no_secret_is_watched() {
        for (destination, policy) in [(true, false), (false, true), (true, true)] {
            let all = watched(destination, policy, Drives::Slices);
            assert!(!all.iter().any(|line| line.starts_with("secrets")), "{all:?}");
        }
    }

    #[test]
    fn policy_alone_watches_meshed_pods_and_no_endpoints() {
        let alone = watched(false, true, Drives::Slices);
        assert!(
            alone.contains(&"pods with linkerd.io/control-plane-ns".to_owned()),
            "{alone:?}"
        );
        assert!(alone.contains(&"httplocalratelimitpolicies".to_owned()), "{alone:?}");
        for none in ["endpoints", "endpointslices", "nodes", "serviceprofiles"] {
            assert!(!alone.iter().any(|line| line.starts_with(none)), "{none} in {alone:?}");
        }
        assert!(watched(true, true, Drives::Slices).contains(&"pods".to_owned()));
    }
}
