//! Plans federated Services: one Service for the Services of the same name in several clusters.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use k8s_openapi::api::core::v1::Service;
use tulle_core::names::{annotation, label};

use super::inputs::{
    Exporter, ExportingCluster, Inputs, Linked, LocalCluster, MirrorStatus, Plan, Rejection, Step, Write,
};
use super::objects::{
    check_mirror, copied_annotations, copied_labels, differs, has_label, mirror_ports, new_service, object_version,
    rewritten,
};
use crate::mirror::link::comma_separated;
use crate::resources::meta::NamespacedName;

struct Planner<'a> {
    inputs: &'a Inputs<'a>,
    plan: &'a mut Plan,
    /// The federated Services that a Service of the exporter must join.
    wanted: HashSet<NamespacedName>,
}

/// Plans the federated Services that the Services of one exporter join or leave.
pub(super) fn plan_federated(inputs: &Inputs<'_>, plan: &mut Plan) {
    let mut planner = Planner {
        inputs,
        plan,
        wanted: HashSet::new(),
    };
    for (name, service) in inputs.exporting.exportable() {
        planner.join(name, service);
    }
    planner.remove_unwanted();
}

impl Planner<'_> {
    fn join(&mut self, name: &NamespacedName, service: &Service) {
        let labels = service.metadata.labels.clone().unwrap_or_default();
        if !self.inputs.federated_selector.matches(&labels) {
            return;
        }
        let federated = NamespacedName::new(&*name.namespace, format!("{}{SUFFIX}", name.name));
        let outcome = self.check_member(service, &federated);
        if outcome.is_ok() {
            self.wanted.insert(federated.clone());
            self.write_membership(name, service, &federated);
        }
        self.plan.federated.push(MirrorStatus {
            exported: name.clone(),
            mirror: outcome.map(|()| federated),
        });
    }

    fn check_member(&mut self, service: &Service, federated: &NamespacedName) -> Result<(), Rejection> {
        let spec = service.spec.as_ref();
        if spec.is_some_and(|spec| spec.cluster_ip.as_deref() == Some("None")) {
            return Err(Rejection::InvalidService(
                "a headless Service cannot join a federated Service".to_owned(),
            ));
        }
        check_mirror(self.inputs, self.plan, service, federated)?;
        match self.inputs.local.services.get(federated) {
            Some(existing) if !is_federated(existing) => Err(Rejection::InvalidService(format!(
                "the Service {federated} exists and is not a federated Service"
            ))),
            _ => Ok(()),
        }
    }

    fn write_membership(&mut self, name: &NamespacedName, service: &Service, federated: &NamespacedName) {
        let entry = membership_entry(self.inputs, name);
        let version = service.metadata.resource_version.clone().unwrap_or_default();
        let Some(existing) = self.inputs.local.services.get(federated) else {
            let memberships = Memberships::default().with_entry(self.inputs, &entry);
            let created = self.federated_service(service, federated, &memberships);
            self.push_federated(federated, Write::PutService(Box::new(created)), Some(version));
            return;
        };
        let memberships = Memberships::from_service(existing);
        let joined = memberships.clone().with_entry(self.inputs, &entry);
        if is_metadata_source(self.inputs, &joined) {
            let wanted = self.federated_service(service, federated, &joined);
            // Labels and annotations of other writers stay until the member whose metadata was copied changes.
            let is_new_version = self.inputs.source_versions.get(federated) != Some(&version);
            let is_equal = !differs(existing, &wanted, service)
                && !(is_new_version
                    && (existing.metadata.labels != wanted.metadata.labels
                        || existing.metadata.annotations != wanted.metadata.annotations));
            if !is_equal {
                let write = Write::PutService(Box::new(rewritten(existing, wanted)));
                self.push_federated(federated, write, Some(version));
            }
        } else if joined != memberships {
            let write = Write::PutService(Box::new(joined.apply_to(existing)));
            self.push_federated(federated, write, None);
        }
    }

    /// A federated Service with the ports and metadata of a member.
    fn federated_service(&self, service: &Service, federated: &NamespacedName, memberships: &Memberships) -> Service {
        let mut labels = copied_labels(self.inputs, service);
        labels.insert(label::MIRRORED_SERVICE.to_owned(), "true".to_owned());
        let mut annotations = copied_annotations(self.inputs, service);
        memberships.write_to(&mut annotations);
        new_service(federated, labels, annotations, mirror_ports(service))
    }

    fn remove_unwanted(&mut self) {
        for (name, service) in self
            .inputs
            .local
            .services
            .iter()
            .filter(|(_, service)| is_federated(service))
        {
            let before = Memberships::from_service(service);
            let mut after = before.clone();
            let is_wanted = self.wanted.contains(name);
            match self.inputs.exporter {
                Exporter::ThisCluster { unlinked } => {
                    if !is_wanted {
                        after.local = None;
                    }
                    after.remote.retain(|entry| !unlinked.contains(entry_cluster(entry)));
                }
                Exporter::Linked(Linked { link, .. }) => {
                    let exported = name.name.strip_suffix(SUFFIX).unwrap_or_default();
                    let wanted = format!("{exported}@{}", link.cluster);
                    let is_ours = |entry: &String| entry_cluster(entry) == link.cluster;
                    after
                        .remote
                        .retain(|entry| !is_ours(entry) || (is_wanted && *entry == wanted));
                }
            }
            if after == before {
                continue;
            }
            let write = match after.is_empty() {
                true => Write::DeleteService(object_version(&service.metadata)),
                false => Write::PutService(Box::new(after.apply_to(service))),
            };
            self.push_federated(name, write, None);
        }
    }

    /// Adds a step, unless a step for the same Service is already planned. The next plan then contains the change.
    fn push_federated(&mut self, name: &NamespacedName, write: Write, source_version: Option<String>) {
        if self.plan.steps.iter().any(|step| step.name == *name) {
            return;
        }
        self.plan.steps.push(Step {
            name: name.clone(),
            writes: vec![write],
            source_version,
        });
    }
}

/// The members of a federated Service, as listed in its annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Memberships {
    local: Option<String>,
    /// `<service>@<cluster>`, in the order of joining.
    remote: Vec<String>,
}

impl Memberships {
    fn from_service(service: &Service) -> Self {
        let annotations = service.metadata.annotations.as_ref();
        let value = |name: &str| {
            annotations
                .and_then(|all| all.get(name))
                .filter(|value| !value.is_empty())
        };
        let remote = value(annotation::REMOTE_DISCOVERY).map_or("", String::as_str);
        Self {
            local: value(annotation::LOCAL_DISCOVERY).cloned(),
            remote: comma_separated(remote).map(str::to_owned).collect(),
        }
    }

    fn with_entry(mut self, inputs: &Inputs<'_>, entry: &str) -> Self {
        match inputs.exporter {
            Exporter::ThisCluster { .. } => self.local = Some(entry.to_owned()),
            Exporter::Linked(_) if self.remote.iter().any(|other| other == entry) => {}
            Exporter::Linked(_) => self.remote.push(entry.to_owned()),
        }
        self
    }

    fn is_empty(&self) -> bool {
        self.local.is_none() && self.remote.is_empty()
    }

    fn write_to(&self, annotations: &mut BTreeMap<String, String>) {
        annotations.remove(annotation::LOCAL_DISCOVERY);
        annotations.remove(annotation::REMOTE_DISCOVERY);
        if let Some(local) = &self.local {
            annotations.insert(annotation::LOCAL_DISCOVERY.to_owned(), local.clone());
        }
        if !self.remote.is_empty() {
            annotations.insert(annotation::REMOTE_DISCOVERY.to_owned(), self.remote.join(","));
        }
    }

    /// Returns the Service with these members.
    fn apply_to(&self, service: &Service) -> Service {
        let mut service = service.clone();
        service.metadata.managed_fields = None;
        self.write_to(service.metadata.annotations.get_or_insert_default());
        service
    }
}

/// The clusters of members of federated Services that no Link names.
pub(in crate::mirror) fn clusters_without_link(local: &LocalCluster) -> BTreeSet<String> {
    let federated = local.services.values().filter(|service| is_federated(service));
    let members = federated.flat_map(|service| Memberships::from_service(service).remote);
    let clusters = members.map(|entry| entry_cluster(&entry).to_owned());
    clusters
        .filter(|cluster| !local.links.iter().any(|link| link.cluster == *cluster))
        .collect()
}

/// The members that lack ports of their federated Service, by the name of the member, each with a text for the status. They have no
/// endpoints for these ports.
pub(in crate::mirror) fn members_without_ports(
    planned: &Plan,
    exporting: &ExportingCluster,
    local: &LocalCluster,
) -> HashMap<NamespacedName, String> {
    let member = |status: &MirrorStatus| {
        let name = status.mirror.as_ref().ok()?;
        let planned_write = planned.steps.iter().filter(|step| step.name == *name);
        let planned_service = planned_write
            .flat_map(|step| &step.writes)
            .find_map(|write| match write {
                Write::PutService(service) => Some(&**service),
                _ => None,
            });
        let federated = planned_service.or_else(|| local.services.get(name).map(|service| &**service))?;
        let ports = port_numbers(exporting.services.get(&status.exported)?);
        let missing: Vec<_> = port_numbers(federated).difference(&ports).map(i32::to_string).collect();
        let text = format!(
            "the Service lacks ports of {name}, and has no endpoints for them: {}",
            missing.join(", ")
        );
        (!missing.is_empty()).then(|| (status.exported.clone(), text))
    };
    planned.federated.iter().filter_map(member).collect()
}

fn port_numbers(service: &Service) -> BTreeSet<i32> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    ports.map(|port| port.port).collect()
}

/// The entry for a Service of `inputs.exporter` in the annotations of a federated Service.
fn membership_entry(inputs: &Inputs<'_>, name: &NamespacedName) -> String {
    match inputs.exporter {
        Exporter::ThisCluster { .. } => name.name.to_string(),
        Exporter::Linked(Linked { link, .. }) => format!("{}@{}", name.name, link.cluster),
    }
}

fn entry_cluster(entry: &str) -> &str {
    entry.split_once('@').map_or("", |(_, cluster)| cluster)
}

/// Whether the exporter's member determines the ports and metadata of the federated Service. The local member does. If there is no
/// local member, the member with the oldest Link does.
fn is_metadata_source(inputs: &Inputs<'_>, memberships: &Memberships) -> bool {
    let Exporter::Linked(Linked { link, .. }) = inputs.exporter else {
        return true;
    };
    let is_member = |cluster: &str| memberships.remote.iter().any(|entry| entry_cluster(entry) == cluster);
    let members = inputs.local.links.iter().filter(|other| is_member(&other.cluster));
    let oldest = members.min();
    memberships.local.is_none() && oldest.is_none_or(|oldest| oldest.cluster == link.cluster)
}

/// Whether the Service is a federated Service that the mirror controllers created.
fn is_federated(service: &Service) -> bool {
    let metadata = &service.metadata;
    has_label(metadata, label::MIRRORED_SERVICE, "true")
        && metadata
            .labels
            .as_ref()
            .is_none_or(|labels| !labels.contains_key(label::MIRRORED_CLUSTER))
        && metadata.name.as_ref().is_some_and(|name| name.ends_with(SUFFIX))
}

const SUFFIX: &str = "-federated";
