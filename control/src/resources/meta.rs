//! Metadata of objects: name, labels, annotations, age and owner. Contains only the fields that views use.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::resources::interning::intern;
use crate::resources::labels::Labels;
use crate::resources::string_map::StringMap;

/// The identifier of an object within its kind. The namespace is empty for cluster-scoped kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespacedName {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl NamespacedName {
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub kind: Arc<str>,
    pub name: Arc<str>,
}

/// The metadata that the views read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    pub name: NamespacedName,
    pub labels: Labels,
    /// The annotations that the destination and policy services read. Those of other tools, such as the last applied
    /// configuration of kubectl, would take most of the memory of an object.
    pub annotations: StringMap,
    /// Seconds since 1970. Objects without this time sort last.
    pub created_at: Option<i64>,
    /// The resource version.
    pub version: String,
    pub terminating: bool,
    /// Set only if there is exactly one owner, because several owners identify no workload.
    pub owner: Option<Owner>,
}

impl Meta {
    /// Extracts the metadata. Fails without a name. A missing namespace becomes `default`, as with kubectl.
    pub fn from_kubernetes(meta: ObjectMeta) -> Result<Self, String> {
        let Some(name) = meta.name.filter(|name| !name.is_empty()) else {
            return Err("metadata.name is missing".to_owned());
        };
        let mut owners = meta.owner_references.unwrap_or_default();
        let owner = match owners.len() {
            1 => owners.pop().map(|owner| Owner {
                kind: intern(&owner.kind),
                name: intern(&owner.name),
            }),
            _ => None,
        };
        let annotations = meta.annotations.iter().flatten();
        Ok(Self {
            name: NamespacedName::new(intern(meta.namespace.as_deref().unwrap_or("default")), name),
            labels: meta.labels.iter().flatten().collect(),
            annotations: annotations.filter(|(key, _)| is_used_annotation(key)).collect(),
            created_at: meta.creation_timestamp.map(|time| time.0.as_second()),
            version: meta.resource_version.unwrap_or_default(),
            terminating: meta.deletion_timestamp.is_some(),
            owner,
        })
    }

    pub fn namespace(&self) -> &Arc<str> {
        &self.name.namespace
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key)
    }

    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key)
    }

    /// Returns a sort key: oldest first, then by namespace and name. Of conflicting objects the first in this order takes
    /// precedence.
    pub fn age_order(&self) -> (i64, &NamespacedName) {
        (self.created_at.unwrap_or(i64::MAX), &self.name)
    }
}

/// Returns whether destination or policy may read an annotation. They read no annotation of the domain `linkerd.io`
/// itself.
fn is_used_annotation(annotation: &str) -> bool {
    annotation
        .split_once('/')
        .is_some_and(|(domain, _)| domain.ends_with(LINKERD_DOMAIN_SUFFIX) || domain == TULLE_DOMAIN)
}

/// Suffix of the domains of Linkerd's annotations that the destination and policy services read.
const LINKERD_DOMAIN_SUFFIX: &str = ".linkerd.io";
/// Domain of the annotations that only tulle has.
const TULLE_DOMAIN: &str = "config.tulle.dev";
