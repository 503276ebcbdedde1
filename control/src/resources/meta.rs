//! What every object has: its name, labels, annotations, age and owner, pruned to what views read.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::resources::labels::Labels;
use crate::resources::text::shared;

/// Namespace and name of an object; the namespace is empty for kinds that have none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl Name {
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The one object that an object belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub kind: Arc<str>,
    pub name: Arc<str>,
}

/// Metadata that views read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    pub name: Name,
    pub labels: Labels,
    pub annotations: BTreeMap<String, String>,
    /// Seconds since 1970; unknown ages sort last.
    pub created_at: Option<i64>,
    /// Changes whenever the object does.
    pub version: String,
    pub terminating: bool,
    /// Set only when there is exactly one owner, because more than one names no workload.
    pub owner: Option<Owner>,
}

impl Meta {
    /// Takes what we use; an object without a name is refused, and one without a namespace is in `default`, where the
    /// clients of an API server would put it.
    pub fn from_kubernetes(meta: ObjectMeta) -> Result<Self, String> {
        let Some(name) = meta.name.filter(|name| !name.is_empty()) else {
            return Err("metadata.name is missing".to_owned());
        };
        let mut owners = meta.owner_references.unwrap_or_default();
        let owner = match owners.len() {
            1 => owners.pop().map(|owner| Owner {
                kind: shared(&owner.kind),
                name: shared(&owner.name),
            }),
            _ => None,
        };
        Ok(Self {
            name: Name::new(meta.namespace.unwrap_or_else(|| "default".to_owned()), name),
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

    /// Sorts the oldest first, then by namespace and name: the order in which rivals win.
    pub fn seniority(&self) -> (i64, &Name) {
        (self.created_at.unwrap_or(i64::MAX), &self.name)
    }
}

/// Whether an object can be called this: a DNS-1123 subdomain.
pub fn is_subdomain(name: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 253
        && name.split('.').all(|label| {
            let bytes = label.as_bytes();
            bytes.first().is_some_and(alphanumeric)
                && bytes.last().is_some_and(alphanumeric)
                && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
        })
}
