//! Where the endpoints of a Service are found, if they are those of Services in other clusters.

use std::sync::Arc;

/// All Services that it names are in the namespace of the Service itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteDiscovery {
    /// The endpoints are those of one Service of another cluster.
    Mirror(RemoteService),
    /// It is such a mirror, but does not name the Service of the other cluster.
    Unnamed,
    /// The endpoints are those of all members.
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
    /// The local one while it has endpoints, otherwise the others.
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
