//! The Services of other clusters whose endpoints a Service has.

use std::sync::Arc;

/// How a Service gets endpoints from other clusters. All named Services are in the namespace of the Service itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteDiscovery {
    /// A mirror. It has the endpoints of one Service of another cluster.
    Mirror(RemoteService),
    /// A mirror that does not name the Service of the other cluster. It has no endpoints.
    Unnamed,
    /// A federated Service. It has the endpoints of its members.
    Federated(FederatedMembers),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FederatedMembers {
    /// The member in the cluster of the federated Service.
    pub local: Option<Arc<str>>,
    /// In the order of joining.
    pub remote: Vec<RemoteService>,
    pub preference: MemberPreference,
}

/// Which members of a federated Service clients use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberPreference {
    #[default]
    All,
    /// The local member while it can take the request. Clients that support fallback endpoints have the endpoints of all members,
    /// and use those of other clusters for requests that no local endpoint can take. Other clients have only the local member while
    /// each of them has a ready endpoint of it (`Endpoints::serves_all_clients`), and otherwise all members.
    Local,
}

/// A Service of another cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteService {
    pub cluster: Arc<str>,
    pub name: Arc<str>,
}

impl RemoteDiscovery {
    pub fn remote_services(&self) -> &[RemoteService] {
        match self {
            Self::Mirror(service) => std::slice::from_ref(service),
            Self::Unnamed => &[],
            Self::Federated(members) => &members.remote,
        }
    }
}
