//! View: the profile of a service name or of an address.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::cluster::config::Config;
use crate::cluster::metrics::{EntryMetrics, Metrics};
use crate::cluster::store::reader::Reader;
use crate::cluster::views::endpoints::{endpoint_port, service_subsets};
use crate::cluster::views::view::View;
use crate::cluster::views::workload::{
    PodAddress, WorkloadRef, declares_port, external_endpoint, has_address_conflict, pod_endpoint,
};
use crate::model::endpoints::{Endpoint, ProtocolHint};
use crate::model::profile::{self, DstOverride, Profile, RetryBudget};
use crate::resources::exported_services::ExportedServices;
use crate::resources::interning::intern;
use crate::resources::meta::NamespacedName;
use crate::resources::service::{AddressTarget, Service, ServiceKind};
use crate::resources::service_profile::ServiceProfile;
use crate::resources::workload::{Pod, PodPhase};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// A Service by name. `fqn` is the name as the client requested it; the response repeats it.
    Service {
        service: NamespacedName,
        port: u16,
        fqn: String,
        client_namespace: Option<Arc<str>>,
        /// The Services that the client, if it is a gateway, serves to other clusters.
        exported_services: ExportedServices,
    },
    /// One pod of a headless service.
    Instance {
        service: NamespacedName,
        hostname: String,
        port: u16,
        /// As in `Service`.
        exported_services: ExportedServices,
    },
    /// A service or a workload by address.
    Address {
        addr: SocketAddr,
        client_namespace: Option<Arc<str>>,
    },
}

pub(in crate::cluster) struct ProfileView;

impl View for ProfileView {
    type Key = Key;
    type Value = Profile;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Profile {
        if !is_exported(reader, key) {
            return Profile::NotExported;
        }
        match key {
            Key::Service {
                service,
                port,
                fqn,
                client_namespace,
                ..
            } => match reader.service(service) {
                Some(service) => {
                    service_port_profile(reader, config, (service, *port), fqn.clone(), client_namespace.as_ref())
                }
                None => Profile::ServiceMissing,
            },
            Key::Instance {
                service,
                hostname,
                port,
                ..
            } => instance_profile(reader, config, service, hostname, *port),
            Key::Address { addr, client_namespace } => {
                address_profile(reader, config, *addr, client_namespace.as_ref())
            }
        }
    }

    fn metrics(metrics: &Metrics, key: &Key, value: &Profile) -> EntryMetrics {
        if let Profile::Service(profile) = value {
            return metrics.profile(&profile.namespace, &profile.fqn);
        }
        match key {
            Key::Service { service, fqn, .. } => metrics.profile(&service.namespace, fqn),
            Key::Instance { service, hostname, .. } => {
                metrics.profile(&service.namespace, &format!("{hostname}.{}", service.name))
            }
            Key::Address { addr, .. } => metrics.workload(*addr),
        }
    }
}

/// Whether the client serves the target to other clusters, if it is a gateway. A gateway forwards nothing to addresses.
fn is_exported(reader: &Reader<'_>, key: &Key) -> bool {
    let (Key::Service {
        service,
        exported_services,
        ..
    }
    | Key::Instance {
        service,
        exported_services,
        ..
    }) = key
    else {
        return true;
    };
    exported_services.contain(reader.service(service).map(|service| &service.meta.labels))
}

fn address_profile(
    reader: &Reader<'_>,
    config: &Config,
    addr: SocketAddr,
    client_namespace: Option<&Arc<str>>,
) -> Profile {
    match *reader.services_at(addr.ip()) {
        [] => endpoint_profile(reader, config, addr),
        [service] => {
            let fqn = service_fqn(&service.meta.name, config);
            service_port_profile(reader, config, (service, addr.port()), fqn, client_namespace)
        }
        [..] => Profile::Ambiguous(format!("several services have the address {}", addr.ip())),
    }
}

fn service_fqn(service: &NamespacedName, config: &Config) -> String {
    format!("{}.{}.svc.{}", service.name, service.namespace, config.cluster_domain)
}

fn service_port_profile(
    reader: &Reader<'_>,
    config: &Config,
    (service, port): (&Service, u16),
    fqn: String,
    client_namespace: Option<&Arc<str>>,
) -> Profile {
    if service.kind == ServiceKind::ExternalName {
        return Profile::ExternalName;
    }
    if service.port(port).is_none() {
        return Profile::UndefinedPort;
    }
    let name = &service.meta.name;
    let resource = find_service_profile(reader, config, name, client_namespace);
    let mut profile = profile::ServicePortProfile {
        namespace: name.namespace.clone(),
        service: name.name.clone(),
        port,
        is_opaque: service.is_opaque(port, &config.default_opaque_ports),
        resource: None,
        routes: Vec::new(),
        budget: RetryBudget::default(),
        overrides: Vec::new(),
        fqn,
    };
    if let Some(resource) = resource {
        let found = &resource.meta.name;
        profile.resource = Some((found.namespace.clone(), found.name.clone()));
        profile.routes = resource.routes.clone();
        if let Some(budget) = resource.retry_budget {
            profile.budget = budget;
        }
        let domain = &config.cluster_domain;
        profile.overrides = resource
            .overrides
            .iter()
            .map(|dst| destination_override(dst, port, domain))
            .collect();
    }
    Profile::Service(profile)
}

/// A profile in the client's namespace takes precedence over one in the Service's namespace.
pub(in crate::cluster) fn find_service_profile<'a>(
    reader: &Reader<'a>,
    config: &Config,
    service: &NamespacedName,
    client_namespace: Option<&Arc<str>>,
) -> Option<&'a Arc<ServiceProfile>> {
    let name: Arc<str> = service_fqn(service, config).into();
    let in_namespace =
        |namespace: &Arc<str>| reader.service_profile(&NamespacedName::new(namespace.clone(), name.clone()));
    client_namespace
        .and_then(in_namespace)
        .or_else(|| in_namespace(&service.namespace))
}

fn instance_profile(
    reader: &Reader<'_>,
    config: &Config,
    service: &NamespacedName,
    hostname: &str,
    port: u16,
) -> Profile {
    let Some(service) = reader.service(service) else {
        return Profile::ServiceMissing;
    };
    for (_, subset) in service_subsets(reader, config, service) {
        // Clients that name a pod instead of connecting to its address, such as gateways, name a port of the Service.
        let port = endpoint_port(service, port, subset).unwrap_or(port);
        let addresses = subset.addresses.iter();
        for address in addresses.filter(|address| address.hostname.as_deref() == Some(hostname)) {
            if let AddressTarget::Pod(name) = &address.target
                && let Some(pod) = reader.pod(name)
            {
                let address = PodAddress::Pod(SocketAddr::new(address.ip, port));
                return pod_profile(reader, config, pod, address);
            }
        }
    }
    Profile::HostnameMissing
}

/// The profile of a pod by its address, of a pod by its host's address and port, of an external workload, or of an unmeshed
/// address.
fn endpoint_profile(reader: &Reader<'_>, config: &Config, addr: SocketAddr) -> Profile {
    if let Some(profile) = profile_of_pod_at(reader, config, addr, |pod| !pod.meta.terminating) {
        return profile;
    }
    let (ip, port) = (addr.ip(), addr.port());
    let mut workloads = reader.external_workloads_at(ip).into_iter();
    let workload =
        workloads.find(|workload| declares_port(&workload.ports, port) && !has_address_conflict(reader, workload, ip));
    if let Some(workload) = workload {
        let mut endpoint = external_endpoint(reader, config, workload, ip, port);
        add_namespace_label(&mut endpoint, workload.meta.namespace());
        endpoint.zone = workload.meta.label(tulle_core::names::label::ZONE).map(intern);
        return profile_from_endpoint(endpoint);
    }
    // A pod that is being deleted keeps its address until it ends. Without the identity of the pod, clients would send plaintext.
    profile_of_pod_at(reader, config, addr, |pod| pod.meta.terminating)
        .unwrap_or_else(|| unmeshed_profile(config, addr, port))
}

/// The profile of the pod that has this address, or else of the pod that has this host port. `None` if no such pod meets the
/// condition. Pods that have ended are left out, because they have released their address.
fn profile_of_pod_at(
    reader: &Reader<'_>,
    config: &Config,
    addr: SocketAddr,
    condition: impl Fn(&Pod) -> bool,
) -> Option<Profile> {
    let ip = addr.ip();
    let is_candidate = |pod: &&Arc<Pod>| !has_ended(pod) && condition(pod);
    let pods: Vec<_> = reader.pods_at(ip).into_iter().filter(is_candidate).collect();
    match *pods {
        [] => {}
        [pod] => return Some(pod_profile(reader, config, pod, PodAddress::Pod(addr))),
        [..] => return Some(Profile::Ambiguous(format!("several pods have the address {ip}"))),
    }
    let host_port_pods = reader.pods_using_host_ip(ip).into_iter().filter(is_candidate);
    let host_port_pods: Vec<_> = host_port_pods
        .filter_map(|pod| Some((pod, PodAddress::from_host_port(pod, addr)?)))
        .collect();
    match *host_port_pods {
        [] => None,
        [(pod, address)] => Some(pod_profile(reader, config, pod, address)),
        [..] => Some(Profile::Ambiguous(format!("several pods use the host port {addr}"))),
    }
}

fn has_ended(pod: &Pod) -> bool {
    pod.phase == Some(PodPhase::Terminated)
}

fn pod_profile(reader: &Reader<'_>, config: &Config, pod: &Pod, address: PodAddress) -> Profile {
    let port = address.container_port();
    if has_ended(pod) {
        return unmeshed_profile(config, address.addr(), port);
    }
    let Some(mut endpoint) = pod_endpoint(reader, config, pod, address) else {
        return unmeshed_profile(config, address.addr(), port);
    };
    add_namespace_label(&mut endpoint, pod.meta.namespace());
    let node = pod
        .node
        .as_deref()
        .and_then(|node| reader.node(&NamespacedName::new("", node)));
    endpoint.zone = node.and_then(|node| node.zone.clone());
    Profile::Endpoint {
        endpoint,
        is_opaque: WorkloadRef::Pod(pod).is_opaque(reader, config, port),
    }
}

/// Adds the label `namespace` to an endpoint. Endpoints of Services do not need it: the message that lists them has this label.
fn add_namespace_label(endpoint: &mut Endpoint, namespace: &Arc<str>) {
    let labels = &mut Arc::make_mut(&mut endpoint.shared).labels;
    labels.push(("namespace".into(), namespace.clone()));
}

fn profile_from_endpoint(endpoint: Endpoint) -> Profile {
    Profile::Endpoint {
        is_opaque: endpoint.shared.protocol == Some(ProtocolHint::Opaque),
        endpoint,
    }
}

/// The profile of an address that belongs to no workload, or to a pod that has ended or lacks its proxy. `port` is the port at
/// which the application listens.
fn unmeshed_profile(config: &Config, addr: SocketAddr, port: u16) -> Profile {
    Profile::Endpoint {
        endpoint: Endpoint::from_addr(addr),
        is_opaque: config.default_opaque_ports.contains(port),
    }
}

/// Replaces the name of a Service by its full name, which proxies can resolve. Keeps any other name: proxies find no endpoints
/// for it.
fn destination_override(dst: &DstOverride, port: u16, cluster_domain: &str) -> DstOverride {
    let authority = match dst.parse_destination(cluster_domain) {
        Ok(destination) => destination.authority(port, cluster_domain),
        Err(_) => dst.authority.clone(),
    };
    DstOverride {
        authority,
        weight: dst.weight,
    }
}
