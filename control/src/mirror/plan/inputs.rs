//! The inputs of a plan, and its result.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Namespace, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tulle_core::names::label;

use crate::mirror::exported_endpoints::ExportedEndpoints;
use crate::mirror::link::{Exclusions, ExportSelector, Link};
use crate::resources::meta::NamespacedName;

/// The objects that a plan is computed from.
pub(in crate::mirror) struct Inputs<'a> {
    pub(in crate::mirror) exporter: Exporter<'a>,
    /// Selects the Services that join a federated Service.
    pub(in crate::mirror) federated_selector: &'a ExportSelector,
    pub(in crate::mirror) excluded_labels: &'a Exclusions,
    pub(in crate::mirror) excluded_annotations: &'a Exclusions,
    /// The objects of the exporter.
    pub(in crate::mirror) exporting: &'a ExportingCluster,
    pub(in crate::mirror) local: &'a LocalCluster,
    pub(in crate::mirror) may_create_namespaces: bool,
    /// Whether each pod of a headless Service gets its own mirror.
    pub(in crate::mirror) mirrors_pods: bool,
    /// For each federated Service, the resource version of the member whose ports and metadata were last copied to it.
    pub(in crate::mirror) source_versions: &'a HashMap<NamespacedName, String>,
}

/// The cluster whose exported Services are planned.
#[derive(Clone, Copy)]
pub(in crate::mirror) enum Exporter<'a> {
    /// This cluster. Its Services get no mirrors, and only join federated Services.
    ThisCluster {
        /// Clusters that have had no Link for some time. Their memberships are removed.
        unlinked: &'a BTreeSet<String>,
    },
    Linked(Linked<'a>),
}

/// A linked cluster.
#[derive(Clone, Copy)]
pub(in crate::mirror) struct Linked<'a> {
    pub(in crate::mirror) link: &'a Link,
    pub(in crate::mirror) gateway: GatewayState<'a>,
    /// The Service through which the gateway is probed.
    pub(in crate::mirror) probe_service: Option<&'a NamespacedName>,
}

#[derive(Clone, Copy)]
pub(in crate::mirror) struct GatewayState<'a> {
    /// `None` if no name of the gateway can be resolved. The addresses of mirrors then stay unchanged.
    pub(in crate::mirror) addresses: Option<&'a [IpAddr]>,
    pub(in crate::mirror) is_alive: bool,
}

#[derive(Default)]
pub(in crate::mirror) struct ExportingCluster {
    pub(in crate::mirror) services: BTreeMap<NamespacedName, Arc<Service>>,
    pub(in crate::mirror) endpoints: HashMap<NamespacedName, ExportedEndpoints>,
}

#[derive(Default)]
pub(in crate::mirror) struct LocalCluster {
    pub(in crate::mirror) services: BTreeMap<NamespacedName, Arc<Service>>,
    /// The Endpoints of mirrors and of probe Services.
    pub(in crate::mirror) endpoints: HashMap<NamespacedName, Arc<Endpoints>>,
    /// Namespaces that are not being deleted.
    pub(in crate::mirror) namespaces: HashSet<String>,
    pub(in crate::mirror) links: Vec<LinkAge>,
}

/// The age of a Link; the oldest Link is the smallest. Among the remote members of a federated Service, the member with the oldest
/// Link determines its ports and metadata.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::mirror) struct LinkAge {
    pub(in crate::mirror) created_at: Option<Time>,
    pub(in crate::mirror) name: String,
    pub(in crate::mirror) namespace: String,
    pub(in crate::mirror) cluster: String,
}

#[derive(Debug, Default)]
pub(in crate::mirror) struct Plan {
    pub(in crate::mirror) steps: Vec<Step>,
    pub(in crate::mirror) mirrors: Vec<MirrorStatus>,
    pub(in crate::mirror) federated: Vec<MirrorStatus>,
}

/// Writes that are executed in the order of the list. Steps are independent of each other.
#[derive(Debug, PartialEq)]
pub(in crate::mirror) struct Step {
    /// The local Service, or a name without a namespace if the step creates a namespace.
    pub(in crate::mirror) name: NamespacedName,
    pub(in crate::mirror) writes: Vec<Write>,
    /// The resource version of the member whose ports and metadata this step copies to a federated Service. `None` for other steps.
    pub(in crate::mirror) source_version: Option<String>,
}

/// One write. An object with a resource version replaces the stored object of this version; an object without one is created.
#[derive(Debug, PartialEq)]
pub(in crate::mirror) enum Write {
    CreateNamespace(Box<Namespace>),
    PutService(Box<Service>),
    PutEndpoints(Box<Endpoints>),
    DeleteService(ObjectVersion),
    DeleteEndpoints(ObjectVersion),
}

/// An object in the version that the plan was computed from. It is deleted only if it still has this version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::mirror) struct ObjectVersion {
    pub(in crate::mirror) name: NamespacedName,
    pub(in crate::mirror) uid: Option<String>,
    pub(in crate::mirror) resource_version: Option<String>,
}

/// The outcome for one exported Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::mirror) struct MirrorStatus {
    pub(in crate::mirror) exported: NamespacedName,
    /// The local Service, or the reason why there is none.
    pub(in crate::mirror) mirror: Result<NamespacedName, Rejection>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::mirror) enum Rejection {
    #[error("{0}")]
    InvalidService(String),
    #[error("namespace {0} does not exist here")]
    MissingNamespace(String),
    #[error("{0}")]
    Failed(String),
}

impl ExportingCluster {
    /// The Services that can be exported. Mirrors are excluded: two linked clusters would mirror each other's mirrors endlessly.
    pub(super) fn exportable(&self) -> impl Iterator<Item = (&NamespacedName, &Service)> {
        let services = self.services.iter().map(|(name, service)| (name, &**service));
        services.filter(|(_, service)| {
            let labels = service.metadata.labels.as_ref();
            labels
                .and_then(|labels| labels.get(label::MIRRORED_SERVICE))
                .is_none_or(|value| value != "true")
        })
    }
}

impl Plan {
    /// Adds a step, unless there is nothing to write.
    pub(super) fn add_step(&mut self, name: NamespacedName, writes: Vec<Write>) {
        if !writes.is_empty() {
            self.steps.push(Step {
                name,
                writes,
                source_version: None,
            });
        }
    }
}
