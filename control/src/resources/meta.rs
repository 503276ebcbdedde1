//! Metadata of objects: name, labels, annotations, age and owner. Contains only what the views read.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::resources::interning::intern;
use crate::resources::labels::Labels;

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
    pub annotations: BTreeMap<String, String>,
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
        Ok(Self {
            name: NamespacedName::new(meta.namespace.unwrap_or_else(|| "default".to_owned()), name),
            labels: meta.labels.iter().flatten().collect(),
            annotations: meta.annotations.unwrap_or_default(),
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
        self.annotations.get(key).map(String::as_str)
    }

    /// Sort key: oldest first, then by namespace and name. Of conflicting objects the first in this order takes
    /// precedence.
    pub fn age_order(&self) -> (i64, &NamespacedName) {
        (self.created_at.unwrap_or(i64::MAX), &self.name)
    }
}

/// Returns whether a name is a DNS-1123 subdomain, which Kubernetes requires for object names.
pub fn is_dns_subdomain(name: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 253
        && name.split('.').all(|label| {
            let bytes = label.as_bytes();
            bytes.first().is_some_and(alphanumeric)
                && bytes.last().is_some_and(alphanumeric)
                && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
        })
}
