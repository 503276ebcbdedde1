//! Plans mirrors: a Service of this cluster for each exported Service of another cluster.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Service};
use tulle_core::names::{annotation, label, multicluster};

use super::headless::{headless_subsets, is_headless, is_pod_mirror_of, pod_mirror};
use super::inputs::{GatewayState, Inputs, Linked, MirrorStatus, Plan, Rejection, Write};
use super::objects::{
    check_mirror, check_name_length, contains_all, copied_annotations, copied_labels, differs, is_mirror_of,
    mirror_labels, mirror_ports, new_metadata, new_service, object_name, object_version, rewritten,
};
use crate::mirror::exported_endpoints::Pods;
use crate::mirror::link::{Gateway, Link};
use crate::resources::meta::NamespacedName;

/// How clients reach the endpoints of a mirror.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Through the gateway.
    Gateway,
    /// Through the gateway, with its own mirror for each pod that has a host name.
    Headless,
    /// Directly. The destination service reads the endpoints from the other cluster.
    RemoteDiscovery,
}

/// An exported Service and the name of its mirror, or of the mirror of one of its pods.
#[derive(Clone, Copy)]
struct Exported<'a> {
    name: &'a NamespacedName,
    service: &'a Service,
    mirror: &'a NamespacedName,
    /// The name of the headless mirror, if `mirror` is the mirror of a pod.
    headless_mirror: Option<&'a NamespacedName>,
}

struct Planner<'a> {
    inputs: &'a Inputs<'a>,
    link: &'a Link,
    gateway: GatewayState<'a>,
    plan: &'a mut Plan,
    /// The names of all mirrors that must exist.
    wanted: HashSet<NamespacedName>,
}

/// Plans the mirrors of a linked cluster.
pub(super) fn plan_mirrors(inputs: &Inputs<'_>, linked: Linked<'_>, plan: &mut Plan) {
    let mut planner = Planner::new(inputs, linked, plan);
    for (name, service) in inputs.exporting.exportable() {
        planner.mirror(name, service);
    }
    planner.remove_unwanted();
    if let Some(probe_service) = linked.probe_service {
        planner.write_probe_endpoints(probe_service);
    }
}

/// Plans the Endpoints of existing mirrors, so that they follow the gateway while the exported Services are not known.
pub(super) fn plan_endpoint_repairs(inputs: &Inputs<'_>, linked: Linked<'_>, plan: &mut Plan) {
    let mut planner = Planner::new(inputs, linked, plan);
    planner.repair_endpoints();
    if let Some(probe_service) = linked.probe_service {
        planner.write_probe_endpoints(probe_service);
    }
}

impl<'a> Planner<'a> {
    fn new(inputs: &'a Inputs<'a>, linked: Linked<'a>, plan: &'a mut Plan) -> Self {
        Self {
            inputs,
            link: linked.link,
            gateway: linked.gateway,
            plan,
            wanted: HashSet::new(),
        }
    }

    fn mirror(&mut self, name: &NamespacedName, service: &Service) {
        let link = self.link;
        let labels = service.metadata.labels.clone().unwrap_or_default();
        let mode = if link.remote_discovery_selector.matches(&labels) {
            Mode::RemoteDiscovery
        } else if link.gateway_selector.matches(&labels) {
            Mode::Gateway
        } else {
            return;
        };
        let mirror = NamespacedName::new(&*name.namespace, format!("{}-{}", name.name, link.cluster));
        let outcome = check_mirror(self.inputs, self.plan, service, &mirror).and_then(|()| {
            if self.wanted.contains(&mirror) {
                return Err(Rejection::InvalidService(format!(
                    "the Service {mirror} is the mirror of a pod of a headless Service"
                )));
            }
            let existing = self.inputs.local.services.get(&mirror);
            match existing.filter(|existing| !is_mirror_of(&existing.metadata, &link.cluster)) {
                Some(_) => Err(Rejection::InvalidService(format!(
                    "the Service {mirror} exists and is not a mirror of {}",
                    link.cluster
                ))),
                None => Ok(()),
            }
        });
        let exported = Exported {
            name,
            service,
            mirror: &mirror,
            headless_mirror: None,
        };
        let outcome = outcome.and_then(|()| match self.mirrored_host_names(mode, exported)? {
            Some(host_names) => {
                let pods = self.mirror_pods(exported, &host_names);
                self.write_mirror(Mode::Headless, exported, &host_names);
                pods.and_then(|()| self.check_gateway(&mirror))
            }
            None => {
                self.write_mirror(mode, exported, &BTreeSet::new());
                match mode {
                    Mode::Gateway | Mode::Headless => self.check_gateway(&mirror),
                    Mode::RemoteDiscovery => Ok(()),
                }
            }
        });
        self.plan.mirrors.push(MirrorStatus {
            exported: name.clone(),
            mirror: outcome.map(|()| mirror),
        });
    }

    /// The host names of the pods that get their own mirrors. `None` if the pods of this Service get no mirrors.
    ///
    /// Fails if there is no pod yet, so it is unknown whether the pods have host names.
    fn mirrored_host_names(&self, mode: Mode, exported: Exported<'_>) -> Result<Option<BTreeSet<String>>, Rejection> {
        if mode != Mode::Gateway || !self.inputs.mirrors_pods || !is_headless(exported.service) {
            return Ok(None);
        }
        let endpoints = self.inputs.exporting.endpoints.get(exported.name);
        match endpoints.map_or(&Pods::None, |endpoints| &endpoints.pods) {
            Pods::WithHostNames(host_names) => Ok(Some(host_names.clone())),
            Pods::WithoutHostNames => Ok(None),
            // A headless mirror stays headless, and another mirror keeps its cluster IP.
            Pods::None => match self.inputs.local.services.get(exported.mirror) {
                Some(existing) => Ok(is_headless(existing).then(BTreeSet::new)),
                None => Err(Rejection::Failed(
                    "the headless Service has no pods yet, so it is unknown whether they have host names".to_owned(),
                )),
            },
        }
    }

    /// Plans the mirror of a Service and its Endpoints.
    fn write_mirror(&mut self, mode: Mode, exported: Exported<'_>, host_names: &BTreeSet<String>) {
        let mut writes = self.service_writes(exported, self.mirror_service(mode, exported));
        writes.extend(match mode {
            Mode::Gateway => self.gateway_endpoints_write(exported, full_name(exported.name, &self.link.domain)),
            Mode::Headless => self.headless_endpoints_write(exported, host_names),
            Mode::RemoteDiscovery => self.endpoints_deletion(exported.mirror),
        });
        self.wanted.insert(exported.mirror.clone());
        self.plan.add_step(exported.mirror.clone(), writes);
    }

    /// Plans a mirror for each of these pods. If a name is already in use, plans the other mirrors and then fails.
    fn mirror_pods(&mut self, exported: Exported<'_>, host_names: &BTreeSet<String>) -> Result<(), Rejection> {
        let mut outcome = Ok(());
        for host_name in host_names {
            let mirror = pod_mirror(host_name, &self.link.cluster, exported.mirror);
            let checked = check_name_length(&mirror).and_then(|()| self.check_pod_mirror(&mirror, exported));
            if checked.is_err() {
                outcome = outcome.and(checked);
                continue;
            }
            let pod = Exported {
                mirror: &mirror,
                headless_mirror: Some(exported.mirror),
                ..exported
            };
            let service = self.pod_mirror_service(host_name, pod);
            let mut writes = self.service_writes(pod, service);
            let remote_name = format!("{host_name}.{}", full_name(exported.name, &self.link.domain));
            writes.extend(self.gateway_endpoints_write(pod, remote_name));
            self.wanted.insert(mirror.clone());
            self.plan.add_step(mirror, writes);
        }
        outcome
    }

    /// Fails if another Service has the name of the mirror.
    fn check_pod_mirror(&self, mirror: &NamespacedName, exported: Exported<'_>) -> Result<(), Rejection> {
        let existing = self.inputs.local.services.get(mirror);
        let is_taken =
            existing.is_some_and(|existing| !is_pod_mirror_of(existing, &self.link.cluster, exported.mirror));
        if is_taken || self.wanted.contains(mirror) {
            return Err(Rejection::InvalidService(format!(
                "the Service {mirror} exists and is not the mirror of a pod of {}",
                exported.name
            )));
        }
        Ok(())
    }

    fn pod_mirror_service(&self, host_name: &str, exported: Exported<'_>) -> Service {
        let remote_name = format!("{host_name}.{}", full_name(exported.name, &self.link.domain));
        let annotations = BTreeMap::from([
            (annotation::REMOTE_SERVICE_NAME.to_owned(), remote_name),
            (
                annotation::REMOTE_RESOURCE_VERSION.to_owned(),
                self.pod_mirror_version(exported),
            ),
        ]);
        new_service(
            exported.mirror,
            self.labels(exported),
            annotations,
            mirror_ports(exported.service),
        )
    }

    /// The version of the exported endpoints with which the mirror of a pod was created. It does not follow the endpoints, because
    /// then each change of one pod would rewrite the mirrors of all pods.
    fn pod_mirror_version(&self, exported: Exported<'_>) -> String {
        let existing = self.inputs.local.services.get(exported.mirror);
        let existing = existing.and_then(|service| service.metadata.annotations.as_ref());
        let existing = existing.and_then(|annotations| annotations.get(annotation::REMOTE_RESOURCE_VERSION));
        let endpoints = self.inputs.exporting.endpoints.get(exported.name);
        let current = || endpoints.and_then(|endpoints| endpoints.resource_version.clone());
        existing.cloned().or_else(current).unwrap_or_default()
    }

    /// Fails if a mirror has no Endpoints, because no address of the gateway is known.
    fn check_gateway(&self, mirror: &NamespacedName) -> Result<(), Rejection> {
        match &self.link.gateway {
            None => Err(Rejection::Failed(
                "the Link has no gateway (spec.gatewayAddress)".to_owned(),
            )),
            Some(gateway) if self.gateway.addresses.is_none() && !self.inputs.local.endpoints.contains_key(mirror) => {
                let hosts = gateway.hosts.join(",");
                Err(Rejection::Failed(format!("no address of the gateway {hosts} is found")))
            }
            Some(_) => Ok(()),
        }
    }

    /// The labels of a mirror and of its Endpoints.
    fn labels(&self, exported: Exported<'_>) -> BTreeMap<String, String> {
        let mut labels = copied_labels(self.inputs, exported.service);
        labels.extend(mirror_labels(&self.link.cluster));
        if let Some(headless) = exported.headless_mirror {
            labels.insert(label::HEADLESS_MIRROR.to_owned(), headless.name.to_string());
        }
        labels
    }

    fn mirror_service(&self, mode: Mode, exported: Exported<'_>) -> Service {
        let Exported {
            name, service, mirror, ..
        } = exported;
        let link = self.link;
        let mut labels = self.labels(exported);
        if mode == Mode::RemoteDiscovery {
            labels.insert(label::REMOTE_DISCOVERY.to_owned(), link.cluster.clone());
            labels.insert(label::REMOTE_SERVICE.to_owned(), name.name.to_string());
        }
        let mut annotations = copied_annotations(self.inputs, service);
        annotations.insert(
            annotation::REMOTE_SERVICE_NAME.to_owned(),
            full_name(name, &link.domain),
        );
        annotations.insert(
            annotation::REMOTE_RESOURCE_VERSION.to_owned(),
            service.metadata.resource_version.clone().unwrap_or_default(),
        );
        let mut service = new_service(mirror, labels, annotations, mirror_ports(service));
        if let Some(spec) = service.spec.as_mut().filter(|_| mode == Mode::Headless) {
            spec.cluster_ip = Some("None".to_owned());
        }
        service
    }

    /// The writes that change the local Service to the wanted Service; none if they are equal.
    ///
    /// Other writers can add labels and annotations. These stay until the exported Service changes: if they were removed
    /// immediately, both writers could change the Service endlessly.
    fn service_writes(&self, exported: Exported<'_>, wanted: Service) -> Vec<Write> {
        let put = |service| Write::PutService(Box::new(service));
        let Some(existing) = self.inputs.local.services.get(exported.mirror) else {
            return vec![put(wanted)];
        };
        // The API server does not permit to make a headless Service one with a cluster IP, or the reverse.
        if is_headless(existing) != is_headless(&wanted) {
            return vec![Write::DeleteService(object_version(&existing.metadata)), put(wanted)];
        }
        match differs(existing, &wanted, exported.service) {
            true => vec![put(rewritten(existing, wanted))],
            false => Vec::new(),
        }
    }

    /// The write of Endpoints with the addresses of the gateway. `remote_name` is the name by which the gateway finds the endpoints.
    fn gateway_endpoints_write(&self, exported: Exported<'_>, remote_name: String) -> Option<Write> {
        let port = i32::from(self.link.gateway.as_ref()?.port);
        let addresses = self.gateway.addresses?;
        let endpoints = self.inputs.exporting.endpoints.get(exported.name);
        let subsets = match endpoints.is_some_and(|endpoints| endpoints.has_ready_address) {
            true => {
                let ports = endpoint_ports(exported.service, |_| port);
                vec![gateway_subset(addresses, self.gateway.is_alive, ports)]
            }
            false => Vec::new(),
        };
        self.mirror_endpoints_write(exported, remote_name, subsets)
    }

    fn headless_endpoints_write(&self, exported: Exported<'_>, host_names: &BTreeSet<String>) -> Option<Write> {
        let ports = endpoint_ports(exported.service, |port| port);
        let (cluster, local) = (&self.link.cluster, self.inputs.local);
        let subsets = headless_subsets(host_names, ports, cluster, exported.mirror, local);
        self.mirror_endpoints_write(exported, full_name(exported.name, &self.link.domain), subsets)
    }

    fn mirror_endpoints_write(
        &self,
        exported: Exported<'_>,
        remote_name: String,
        subsets: Vec<EndpointSubset>,
    ) -> Option<Write> {
        let mut annotations = gateway_annotations(self.link.gateway.as_ref()?);
        annotations.insert(annotation::REMOTE_SERVICE_NAME.to_owned(), remote_name);
        let labels = self.labels(exported);
        self.endpoints_write(new_endpoints(exported.mirror, labels, annotations, subsets))
    }

    /// Plans Endpoints with the present addresses, port and readiness of the gateway for each mirror that has endpoints. Empty
    /// Endpoints stay empty, because only the exported Service shows whether it has endpoints.
    fn repair_endpoints(&mut self) {
        let (link, local) = (self.link, self.inputs.local);
        let (Some(settings), Some(addresses)) = (&link.gateway, self.gateway.addresses) else {
            return;
        };
        for (name, endpoints) in &local.endpoints {
            // The endpoints of a headless mirror are the mirrors of its pods.
            let service = local.services.get(name).filter(|service| !is_headless(service));
            let is_mirror = is_mirror_of(&endpoints.metadata, &link.cluster)
                && service.is_some_and(|service| is_mirror_of(&service.metadata, &link.cluster));
            let Some(subset) = endpoints.subsets.iter().flatten().next().filter(|_| is_mirror) else {
                continue;
            };
            let ports = subset.ports.iter().flatten().map(|port| EndpointPort {
                port: settings.port.into(),
                ..port.clone()
            });
            let subset = gateway_subset(addresses, self.gateway.is_alive, ports.collect());
            let mut annotations = endpoints.metadata.annotations.clone().unwrap_or_default();
            annotations.extend(gateway_annotations(settings));
            let labels = endpoints.metadata.labels.clone().unwrap_or_default();
            let write = self.endpoints_write(new_endpoints(name, labels, annotations, vec![subset]));
            self.plan.add_step(name.clone(), write.into_iter().collect());
        }
    }

    /// Plans the Endpoints of the Service through which the gateway is probed. They are always ready, so that the gateway is also
    /// probed while it is not alive.
    fn write_probe_endpoints(&mut self, name: &NamespacedName) {
        let link = self.link;
        let (Some(settings), Some(probe), Some(addresses)) = (&link.gateway, &link.probe, self.gateway.addresses)
        else {
            return;
        };
        if !self.inputs.local.services.contains_key(name) {
            return;
        }
        let port = EndpointPort {
            name: Some(multicluster::PROBE_PORT.to_owned()),
            port: probe.port.into(),
            protocol: Some("TCP".to_owned()),
            ..EndpointPort::default()
        };
        let labels = BTreeMap::from([(label::MIRRORED_CLUSTER.to_owned(), link.cluster.clone())]);
        let subset = gateway_subset(addresses, true, vec![port]);
        let endpoints = new_endpoints(name, labels, gateway_annotations(settings), vec![subset]);
        let write = self.endpoints_write(endpoints);
        self.plan.add_step(name.clone(), write.into_iter().collect());
    }

    fn endpoints_write(&self, mut wanted: Endpoints) -> Option<Write> {
        let name = object_name(&wanted.metadata);
        if let Some(existing) = self.inputs.local.endpoints.get(&name) {
            let is_equal = contains_all(&existing.metadata.labels, &wanted.metadata.labels)
                && contains_all(&existing.metadata.annotations, &wanted.metadata.annotations)
                && normalized(existing) == normalized(&wanted);
            if is_equal {
                return None;
            }
            wanted
                .metadata
                .resource_version
                .clone_from(&existing.metadata.resource_version);
            wanted.metadata.uid.clone_from(&existing.metadata.uid);
        }
        Some(Write::PutEndpoints(Box::new(wanted)))
    }

    fn endpoints_deletion(&self, name: &NamespacedName) -> Option<Write> {
        let existing = self.inputs.local.endpoints.get(name)?;
        Some(Write::DeleteEndpoints(object_version(&existing.metadata)))
    }

    fn remove_unwanted(&mut self) {
        let link = self.link;
        let mut steps = Vec::new();
        let mirrors = self.inputs.local.services.iter();
        for (name, service) in mirrors.filter(|(_, service)| is_mirror_of(&service.metadata, &link.cluster)) {
            if self.wanted.contains(name) {
                continue;
            }
            let delete = Write::DeleteService(object_version(&service.metadata));
            let writes = std::iter::once(delete).chain(self.endpoints_deletion(name));
            steps.push((name.clone(), writes.collect()));
        }
        // Kubernetes deletes Endpoints after their Service. If this did not happen, only this step deletes them.
        for (name, endpoints) in &self.inputs.local.endpoints {
            let is_left_over = is_mirror_of(&endpoints.metadata, &link.cluster)
                && !self.wanted.contains(name)
                && !self.inputs.local.services.contains_key(name);
            if is_left_over {
                steps.push((name.clone(), self.endpoints_deletion(name).into_iter().collect()));
            }
        }
        for (name, writes) in steps {
            self.plan.add_step(name, writes);
        }
    }
}

/// The addresses and ports of Endpoints in a form that can be compared.
fn normalized(endpoints: &Endpoints) -> Vec<impl PartialEq + use<>> {
    let ips = |addresses: &Option<Vec<EndpointAddress>>| -> Vec<(String, Option<String>)> {
        let addresses = addresses.iter().flatten();
        addresses
            .map(|address| (address.ip.clone(), address.hostname.clone()))
            .collect()
    };
    let ports = |subset: &EndpointSubset| -> Vec<_> {
        let port = |port: &EndpointPort| {
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
            (port.name.clone(), port.port, protocol)
        };
        subset.ports.iter().flatten().map(port).collect()
    };
    let subsets = endpoints.subsets.iter().flatten();
    let subset = |subset: &EndpointSubset| (ips(&subset.addresses), ips(&subset.not_ready_addresses), ports(subset));
    subsets.map(subset).collect()
}

/// The endpoint ports for the ports of a Service. `map_number` converts the number of each port.
fn endpoint_ports(service: &Service, map_number: impl Fn(i32) -> i32) -> Vec<EndpointPort> {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let ports = ports.map(|port| EndpointPort {
        name: port.name.clone(),
        port: map_number(port.port),
        protocol: port.protocol.clone(),
        ..EndpointPort::default()
    });
    ports.collect()
}

fn gateway_subset(addresses: &[IpAddr], is_alive: bool, ports: Vec<EndpointPort>) -> EndpointSubset {
    let mut ips: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    ips.sort_unstable();
    ips.dedup();
    let address = |ip| EndpointAddress {
        ip,
        ..EndpointAddress::default()
    };
    let addresses: Vec<_> = ips.into_iter().map(address).collect();
    let (ready, not_ready) = match is_alive {
        true => (Some(addresses), None),
        false => (None, Some(addresses)),
    };
    EndpointSubset {
        addresses: ready,
        not_ready_addresses: not_ready,
        ports: Some(ports),
    }
}

fn gateway_annotations(gateway: &Gateway) -> BTreeMap<String, String> {
    let identity = gateway.identity.clone();
    let identity = identity.map(|identity| (annotation::REMOTE_GATEWAY_IDENTITY.to_owned(), identity));
    identity.into_iter().collect()
}

fn new_endpoints(
    name: &NamespacedName,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    subsets: Vec<EndpointSubset>,
) -> Endpoints {
    Endpoints {
        metadata: new_metadata(name, labels, annotations),
        subsets: Some(subsets),
    }
}

/// The DNS name of a Service in a cluster with this domain.
fn full_name(name: &NamespacedName, domain: &str) -> String {
    format!("{}.{}.svc.{domain}", name.name, name.namespace)
}
