//! Mirrors: a Service of this cluster for each exported Service of another one.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Service};
use tulle_core::names::{annotation, label};

use super::inputs::{GatewayState, Inputs, Linked, MirrorStatus, Plan, Rejection, Write};
use super::objects::{
    PROBE_PORT_NAME, check, contains_all, copied_annotations, copied_labels, differs, is_mirror_of, known,
    mirror_labels, mirror_ports, new_metadata, new_service, object_name, rewritten,
};
use crate::mirror::link::{Gateway, Link};
use crate::resources::meta::NamespacedName;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Gateway,
    RemoteDiscovery,
}

struct Planner<'a> {
    inputs: &'a Inputs<'a>,
    link: &'a Link,
    gateway: GatewayState<'a>,
    plan: &'a mut Plan,
    /// The local names of all mirrors that have to exist.
    wanted: HashSet<NamespacedName>,
}

/// Plans the mirrors of a linked cluster.
pub(super) fn plan_mirrors(inputs: &Inputs<'_>, linked: Linked<'_>, plan: &mut Plan) {
    let mut planner = Planner {
        inputs,
        link: linked.link,
        gateway: linked.gateway,
        plan,
        wanted: HashSet::new(),
    };
    for (name, service) in inputs.exporting.exported() {
        planner.mirror(name, service);
    }
    planner.remove_unwanted();
    if let Some(probe_service) = linked.probe_service {
        planner.write_probe_endpoints(probe_service);
    }
}

impl Planner<'_> {
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
        let outcome = check(self.inputs, self.plan, service, &mirror).and_then(|()| {
            let existing = self.inputs.local.services.get(&mirror);
            match existing.filter(|existing| !is_mirror_of(&existing.metadata, &link.cluster)) {
                Some(_) => Err(Rejection::InvalidService(format!(
                    "the Service {mirror} exists and is not a mirror of {}",
                    link.cluster
                ))),
                None => Ok(()),
            }
        });
        if outcome.is_ok() {
            let put_service = self.put_service(mode, name, service, &mirror);
            let write_endpoints = match mode {
                Mode::Gateway => self.put_mirror_endpoints(name, service, &mirror),
                Mode::RemoteDiscovery => self.delete_endpoints(&mirror),
            };
            self.wanted.insert(mirror.clone());
            let writes = put_service.into_iter().chain(write_endpoints);
            self.plan.add_step(mirror.clone(), writes.collect());
        }
        let outcome = outcome.and_then(|()| match mode {
            Mode::Gateway => self.check_gateway(&mirror),
            Mode::RemoteDiscovery => Ok(()),
        });
        self.plan.mirrors.push(MirrorStatus {
            exported: name.clone(),
            mirror: outcome.map(|()| mirror),
        });
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

    fn mirror_service(&self, mode: Mode, name: &NamespacedName, service: &Service, mirror: &NamespacedName) -> Service {
        let link = self.link;
        let mut labels = copied_labels(self.inputs, service);
        labels.extend(mirror_labels(&link.cluster));
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
        new_service(mirror, labels, annotations, mirror_ports(service))
    }

    /// The write that makes the local Service equal to the wanted one, if it is not.
    ///
    /// Other writers can add labels and annotations. They stay until the exported Service changes: removing them at once could be an
    /// endless exchange of writes.
    fn put_service(
        &self,
        mode: Mode,
        name: &NamespacedName,
        service: &Service,
        mirror: &NamespacedName,
    ) -> Option<Write> {
        let mut wanted = self.mirror_service(mode, name, service, mirror);
        if let Some(existing) = self.inputs.local.services.get(mirror) {
            if !differs(existing, &wanted, service) {
                return None;
            }
            wanted = rewritten(existing, wanted);
        }
        Some(Write::PutService(Box::new(wanted)))
    }

    fn put_mirror_endpoints(&self, name: &NamespacedName, service: &Service, mirror: &NamespacedName) -> Option<Write> {
        let settings = self.link.gateway.as_ref()?;
        let addresses = self.gateway.addresses?;
        let exported = self.inputs.exporting.endpoints.get(name);
        let subsets = match exported.is_some_and(|endpoints| has_ready_address(endpoints)) {
            true => {
                let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
                let ports = ports.map(|port| EndpointPort {
                    name: port.name.clone(),
                    port: settings.port.into(),
                    protocol: port.protocol.clone(),
                    ..EndpointPort::default()
                });
                vec![gateway_subset(addresses, self.gateway.is_alive, ports.collect())]
            }
            false => Vec::new(),
        };
        let mut labels = copied_labels(self.inputs, service);
        labels.extend(mirror_labels(&self.link.cluster));
        let mut annotations = gateway_annotations(settings);
        annotations.insert(
            annotation::REMOTE_SERVICE_NAME.to_owned(),
            full_name(name, &self.link.domain),
        );
        self.put_endpoints(new_endpoints(mirror, labels, annotations, subsets))
    }

    /// The Endpoints of the Service through which the gateway is probed. They are always ready, so that it is probed when it is not
    /// alive.
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
            name: Some(PROBE_PORT_NAME.to_owned()),
            port: probe.port.into(),
            protocol: Some("TCP".to_owned()),
            ..EndpointPort::default()
        };
        let labels = BTreeMap::from([(label::MIRRORED_CLUSTER.to_owned(), link.cluster.clone())]);
        let subset = gateway_subset(addresses, true, vec![port]);
        let endpoints = new_endpoints(name, labels, gateway_annotations(settings), vec![subset]);
        let write = self.put_endpoints(endpoints);
        self.plan.add_step(name.clone(), write.into_iter().collect());
    }

    fn put_endpoints(&self, mut wanted: Endpoints) -> Option<Write> {
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

    fn delete_endpoints(&self, name: &NamespacedName) -> Option<Write> {
        let existing = self.inputs.local.endpoints.get(name)?;
        Some(Write::DeleteEndpoints(known(&existing.metadata)))
    }

    fn remove_unwanted(&mut self) {
        let link = self.link;
        let mut steps = Vec::new();
        let mirrors = self.inputs.local.services.iter();
        for (name, service) in mirrors.filter(|(_, service)| is_mirror_of(&service.metadata, &link.cluster)) {
            if self.wanted.contains(name) {
                continue;
            }
            let delete = Write::DeleteService(known(&service.metadata));
            let writes = std::iter::once(delete).chain(self.delete_endpoints(name));
            steps.push((name.clone(), writes.collect()));
        }
        // Kubernetes deletes Endpoints after their Service; if they are left over, nothing else deletes them.
        for (name, endpoints) in &self.inputs.local.endpoints {
            let is_left_over = is_mirror_of(&endpoints.metadata, &link.cluster)
                && !self.wanted.contains(name)
                && !self.inputs.local.services.contains_key(name);
            if is_left_over {
                steps.push((name.clone(), self.delete_endpoints(name).into_iter().collect()));
            }
        }
        for (name, writes) in steps {
            self.plan.add_step(name, writes);
        }
    }
}

/// The addresses and ports of Endpoints, in comparable form.
fn normalized(endpoints: &Endpoints) -> Vec<impl PartialEq + use<>> {
    let ips = |addresses: &Option<Vec<EndpointAddress>>| -> Vec<String> {
        addresses.iter().flatten().map(|address| address.ip.clone()).collect()
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

fn has_ready_address(endpoints: &Endpoints) -> bool {
    let mut subsets = endpoints.subsets.iter().flatten();
    subsets.any(|subset| subset.addresses.as_ref().is_some_and(|addresses| !addresses.is_empty()))
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
