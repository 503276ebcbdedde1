//! Compares the grants of the chart's roles with the requests that the API server logged.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::Value;
use tulle_tests::cluster::AuditRecord;

/// One verb on one kind for one service account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Permission {
    pub(crate) account: String,
    pub(crate) verb: String,
    pub(crate) group: String,
    /// With its subresource, as in `httproutes/status`.
    pub(crate) resource: String,
    /// Empty for the whole cluster.
    pub(crate) namespace: String,
    /// Empty for all objects.
    pub(crate) name: String,
}

/// A grant that a run may leave unused, and why it is needed.
pub(crate) struct UnusedGrant {
    pub(crate) account: &'static str,
    pub(crate) verb: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) why: &'static str,
}

impl UnusedGrant {
    pub(crate) fn covers(&self, permission: &Permission) -> bool {
        (self.account, self.verb, self.resource) == (&*permission.account, &*permission.verb, &*permission.resource)
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            account,
            verb,
            group,
            resource,
            namespace,
            name,
        } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{account}: {verb} {resource}{dot}{group}")?;
        if !name.is_empty() {
            write!(f, " {name}")?;
        }
        if !namespace.is_empty() {
            write!(f, " in {namespace}")?;
        }
        Ok(())
    }
}

impl Permission {
    /// Whether a request needs this grant and no narrower one. A cluster-wide grant does not count as used by requests in the
    /// namespace of the control plane, because a Role would be enough for them.
    pub(crate) fn is_used_by(&self, requested: &Self) -> bool {
        let is_same = (&self.account, &self.verb, &self.group, &self.resource)
            == (
                &requested.account,
                &requested.verb,
                &requested.group,
                &requested.resource,
            );
        let is_in_namespace = match &*self.namespace {
            "" => requested.namespace != CONTROL_PLANE,
            namespace => requested.namespace == namespace,
        };
        is_same && is_in_namespace && (self.name.is_empty() || self.name == requested.name)
    }
}

/// The grants of the rendered roles to the service accounts that they are bound to.
pub(crate) fn granted_permissions(objects: &[Value]) -> BTreeSet<Permission> {
    let mut all = BTreeSet::new();
    let bindings = objects
        .iter()
        .filter(|object| object["kind"].as_str().is_some_and(|kind| kind.ends_with("Binding")));
    for binding in bindings {
        let role = &binding["roleRef"];
        let is_role = |object: &&Value| object["kind"] == role["kind"] && object["metadata"]["name"] == role["name"];
        let role = objects
            .iter()
            .find(is_role)
            .unwrap_or_else(|| panic!("{role} is not rendered"));
        let namespace = binding["metadata"]["namespace"].as_str().unwrap_or_default();
        for account in string_values(binding, "subjects", Some("name")) {
            for rule in role["rules"].as_array().into_iter().flatten() {
                all.extend(rule_permissions(rule).map(|(verb, group, resource, name)| Permission {
                    account: account.clone(),
                    verb,
                    group,
                    resource,
                    namespace: namespace.to_owned(),
                    name,
                }));
            }
        }
    }
    all
}

/// Each verb, group, resource and name of a rule.
fn rule_permissions(rule: &Value) -> impl Iterator<Item = (String, String, String, String)> {
    let mut names = string_values(rule, "resourceNames", None);
    if names.is_empty() {
        names.push(String::new());
    }
    let (verbs, groups, resources) = (
        string_values(rule, "verbs", None),
        string_values(rule, "apiGroups", None),
        string_values(rule, "resources", None),
    );
    let mut all = Vec::new();
    for verb in &verbs {
        for group in &groups {
            for resource in &resources {
                let of_name = |name: &String| (verb.clone(), group.clone(), resource.clone(), name.clone());
                all.extend(names.iter().map(of_name));
            }
        }
    }
    all.into_iter()
}

/// The strings in a list; with `inner`, the strings in this field of each element.
fn string_values(object: &Value, field: &str, inner: Option<&str>) -> Vec<String> {
    let values = object[field].as_array().into_iter().flatten();
    values
        .filter_map(|value| inner.map_or(value, |inner| &value[inner]).as_str().map(str::to_owned))
        .collect()
}

/// Permitted requests of service accounts in this namespace.
pub(crate) fn permitted_requests(log: &[AuditRecord], namespace: &str) -> BTreeSet<Permission> {
    log.iter()
        .filter(|record| !record.is_forbidden())
        .filter_map(|record| requested_permission(record, namespace))
        .collect()
}

/// Refused requests of service accounts in this namespace. Those that are permitted later do not count, because the API server
/// applies a new Role only some time after it is created.
pub(crate) fn refused_requests(log: &[AuditRecord], namespace: &str) -> BTreeSet<Permission> {
    let mut refused = BTreeSet::new();
    for record in log {
        let Some(requested) = requested_permission(record, namespace) else {
            continue;
        };
        match record.is_forbidden() {
            true => refused.insert(requested),
            false => refused.remove(&requested),
        };
    }
    refused
}

fn requested_permission(record: &AuditRecord, namespace: &str) -> Option<Permission> {
    let account = record
        .user
        .username
        .strip_prefix(&format!("system:serviceaccount:{namespace}:"))?;
    let object = record.object_ref.as_ref()?;
    let resource = match object.subresource.as_str() {
        "" => object.resource.clone(),
        subresource => format!("{}/{subresource}", object.resource),
    };
    Some(Permission {
        account: account.to_owned(),
        verb: record.verb.clone(),
        group: object.api_group.clone(),
        resource,
        namespace: object.namespace.clone(),
        name: object.name.clone(),
    })
}

/// The namespace of the control plane.
pub(crate) const CONTROL_PLANE: &str = "linkerd";
