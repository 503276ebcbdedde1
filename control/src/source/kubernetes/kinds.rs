//! Which kinds the services of a process watch, and how much of each object.

use crate::resources::service::EndpointsSource;
use crate::resources::{KINDS, Kind};

/// The services of the process, and the kind from which endpoints are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchRequirements {
    pub destination: bool,
    pub policy: bool,
    pub endpoints_source: EndpointsSource,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WatchedKind {
    pub(super) kind: Kind,
    pub(super) detail: ObjectDetail,
    pub(super) necessity: Necessity,
}

/// What happens if the account is not permitted to list a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Necessity {
    /// The source waits for the first list of the kind.
    Required,
    /// The kind counts as empty until the permission is given.
    Optional,
}

/// How much of each object is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ObjectDetail {
    Metadata,
    Full,
}

/// Returns the kinds to watch. A kind that two services require is watched once, with the larger detail.
pub(super) fn watched_kinds(requirements: &WatchRequirements) -> Vec<WatchedKind> {
    let mut watched = Vec::new();
    for kind in KINDS.iter().map(|info| info.kind) {
        let destination = requirements
            .destination
            .then(|| destination_detail(kind, requirements.endpoints_source))
            .flatten();
        let policy = requirements.policy.then(|| policy_detail(kind)).flatten();
        let Some(detail) = destination.max(policy) else {
            continue;
        };
        watched.push(WatchedKind {
            kind,
            detail,
            necessity: Necessity::Required,
        });
    }
    watched
}

/// Returns the kinds that determine the endpoints in another cluster. The account there may have fewer permissions.
pub(super) fn remote_kinds(endpoints_source: EndpointsSource) -> Vec<WatchedKind> {
    let endpoints = match endpoints_source {
        EndpointsSource::EndpointSlices => Kind::EndpointSlice,
        EndpointsSource::Endpoints => Kind::Endpoints,
    };
    let required = [Kind::Service, endpoints, Kind::Pod].map(|kind| (kind, ObjectDetail::Full, Necessity::Required));
    let optional = [
        (Kind::ReplicaSet, ObjectDetail::Metadata),
        (Kind::Job, ObjectDetail::Metadata),
        (Kind::ExternalWorkload, ObjectDetail::Full),
        (Kind::Server, ObjectDetail::Full),
    ];
    let optional = optional.map(|(kind, detail)| (kind, detail, Necessity::Optional));
    let all = required.into_iter().chain(optional);
    all.map(|(kind, detail, necessity)| WatchedKind {
        kind,
        detail,
        necessity,
    })
    .collect()
}

/// Returns how much of each object the destination service requests. `None` if it does not watch the kind.
fn destination_detail(kind: Kind, endpoints_source: EndpointsSource) -> Option<ObjectDetail> {
    Some(match (kind, endpoints_source) {
        // Only for the metrics of Endpoints, which Linkerd has with either source.
        (Kind::Endpoints, EndpointsSource::EndpointSlices) => ObjectDetail::Metadata,
        (Kind::EndpointSlice, EndpointsSource::Endpoints) => return None,
        (
            Kind::Endpoints
            | Kind::EndpointSlice
            | Kind::Pod
            | Kind::Service
            | Kind::ServiceProfile
            | Kind::Server
            | Kind::ExternalWorkload,
            _,
        ) => ObjectDetail::Full,
        (Kind::Node | Kind::ReplicaSet | Kind::Job, _) => ObjectDetail::Metadata,
        _ => return None,
    })
}

/// Returns how much of each object the policy service requests. `None` if it does not watch the kind. The service needs all
/// kinds of policies and routes, and pods: for their inbound policies, and because the status of an ExternalWorkload names the
/// pod that has its address.
fn policy_detail(kind: Kind) -> Option<ObjectDetail> {
    match kind {
        Kind::Endpoints
        | Kind::EndpointSlice
        | Kind::Node
        | Kind::Namespace
        | Kind::ReplicaSet
        | Kind::Job
        | Kind::ServiceProfile => None,
        Kind::Service
        | Kind::Pod
        | Kind::ExternalWorkload
        | Kind::Server
        | Kind::ServerAuthorization
        | Kind::AuthorizationPolicy
        | Kind::MeshTlsAuthentication
        | Kind::NetworkAuthentication
        | Kind::RateLimitPolicy
        | Kind::EgressNetwork
        | Kind::PolicyHttpRoute
        | Kind::GatewayHttpRoute
        | Kind::GrpcRoute
        | Kind::TlsRoute
        | Kind::TcpRoute => Some(ObjectDetail::Full),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(destination: bool, policy: bool, endpoints_source: EndpointsSource) -> Vec<String> {
        let requirements = WatchRequirements {
            destination,
            policy,
            endpoints_source,
        };
        let line = |watched: WatchedKind| {
            let detail = if watched.detail == ObjectDetail::Metadata {
                " metadata"
            } else {
                ""
            };
            format!("{}{detail}", watched.kind.info().plural())
        };
        watched_kinds(&requirements).into_iter().map(line).collect()
    }

    #[test]
    fn destination_watches_these_kinds() {
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
        assert_eq!(watched(true, false, EndpointsSource::EndpointSlices), expected);
        let without_slices = watched(true, false, EndpointsSource::Endpoints);
        assert!(without_slices.contains(&"endpoints".to_owned()));
        assert!(!without_slices.contains(&"endpointslices".to_owned()));
    }

    #[test]
    fn no_secret_is_watched() {
        for (destination, policy) in [(true, false), (false, true), (true, true)] {
            let all = watched(destination, policy, EndpointsSource::EndpointSlices);
            assert!(!all.iter().any(|line| line.starts_with("secrets")), "{all:?}");
        }
    }

    #[test]
    fn policy_alone_watches_all_pods_and_no_endpoints() {
        let alone = watched(false, true, EndpointsSource::EndpointSlices);
        assert!(alone.contains(&"pods".to_owned()), "{alone:?}");
        assert!(alone.contains(&"httplocalratelimitpolicies".to_owned()), "{alone:?}");
        for none in ["endpoints", "endpointslices", "nodes", "serviceprofiles"] {
            assert!(!alone.iter().any(|line| line.starts_with(none)), "{none} in {alone:?}");
        }
    }
}
