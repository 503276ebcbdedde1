//! View: the profile of a service name or of an address.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::cluster::endpoints::subsets;
use crate::cluster::lookup::Reader;
use crate::cluster::metrics::{Metrics, SlotMetrics};
use crate::cluster::table::{Table, View};
use crate::cluster::workload::{
    Subject, declares, external_endpoint, is_taken, pod_endpoint, publishes, service_is_opaque,
};
use crate::cluster::{Config, State};
use crate::model::endpoints::{Endpoint, Http2Params, ProtocolHint};
use crate::model::profile::{
    Opacity, Override, Profile, RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route,
    ServiceProfile as ServiceModel,
};
use crate::resources::meta::Name;
use crate::resources::service::{Service, ServiceKind, Target};
use crate::resources::service_profile as sp;
use crate::resources::text::shared;
use crate::resources::workload::{Phase, Pod};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// A service by name; the answer repeats the name as it was asked for.
    Service {
        service: Name,
        port: u16,
        fqn: String,
        client_namespace: Option<Arc<str>>,
    },
    /// One pod of a headless service.
    Instance { service: Name, hostname: String, port: u16 },
    /// A service or a workload by address.
    Address {
        addr: SocketAddr,
        client_namespace: Option<Arc<str>>,
    },
}

pub(super) struct ProfileView;

impl View for ProfileView {
    type Key = Key;
    type Value = Profile;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Profile {
        match key {
            Key::Service {
                service,
                port,
                fqn,
                client_namespace,
            } => match reader.service(service) {
                Some(service) => {
                    service_profile(reader, config, service, *port, fqn.clone(), client_namespace.as_ref())
                }
                None => Profile::ServiceMissing,
            },
            Key::Instance {
                service,
                hostname,
                port,
            } => instance_profile(reader, config, service, hostname, *port),
            Key::Address { addr, client_namespace } => {
                address_profile(reader, config, *addr, client_namespace.as_ref())
            }
        }
    }

    fn metrics(metrics: &Metrics, key: &Key, value: &Profile) -> SlotMetrics {
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

    fn table(state: &mut State) -> &mut Table<Self> {
        &mut state.profiles
    }
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
            service_profile(reader, config, service, addr.port(), fqn, client_namespace)
        }
        [..] => Profile::Ambiguous(format!("several services have the address {}", addr.ip())),
    }
}

fn service_fqn(service: &Name, config: &Config) -> String {
    format!("{}.{}.svc.{}", service.name, service.namespace, config.cluster_domain)
}

fn service_profile(
    reader: &Reader<'_>,
    config: &Config,
    service: &Service,
    port: u16,
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
    let source = profile_source(reader, config, name, client_namespace);
    let mut profile = ServiceModel {
        namespace: name.namespace.clone(),
        service: name.name.clone(),
        port,
        opacity: opacity(service_is_opaque(config, service, port)),
        source: None,
        routes: Vec::new(),
        budget: RetryBudget::default(),
        overrides: Vec::new(),
        fqn,
    };
    if let Some(source) = source {
        let found = &source.meta.name;
        profile.source = Some((found.namespace.clone(), found.name.clone()));
        profile.routes = source.routes.iter().map(route).collect();
        if let Some(budget) = source.retry_budget {
            let sp::RetryBudget {
                ratio,
                min_per_second,
                ttl,
            } = budget;
            profile.budget = RetryBudget {
                ratio,
                min_per_second,
                ttl,
            };
        }
        let domain = &config.cluster_domain;
        profile.overrides = source
            .overrides
            .iter()
            .map(|dst| override_of(dst, port, domain))
            .collect();
    }
    Profile::Service(profile)
}

/// A profile in the client's namespace wins over one in the service's.
fn profile_source<'a>(
    reader: &Reader<'a>,
    config: &Config,
    service: &Name,
    client_namespace: Option<&Arc<str>>,
) -> Option<&'a Arc<sp::ServiceProfile>> {
    let name: Arc<str> = service_fqn(service, config).into();
    let in_namespace = |namespace: &Arc<str>| reader.service_profile(&Name::new(namespace.clone(), name.clone()));
    client_namespace
        .and_then(in_namespace)
        .or_else(|| in_namespace(&service.namespace))
}

fn opacity(opaque: bool) -> Opacity {
    if opaque { Opacity::Opaque } else { Opacity::Detect }
}

fn instance_profile(reader: &Reader<'_>, config: &Config, service: &Name, hostname: &str, port: u16) -> Profile {
    let Some(service) = reader.service(service) else {
        return Profile::ServiceMissing;
    };
    let addresses = subsets(reader, config, service)
        .into_iter()
        .flat_map(|(_, subset)| &subset.addresses);
    for address in addresses.filter(|address| address.hostname.as_deref() == Some(hostname)) {
        if let Target::Pod(name) = &address.target
            && let Some(pod) = reader.pod(name)
        {
            return pod_profile(reader, config, pod, SocketAddr::new(address.ip, port));
        }
    }
    Profile::HostnameMissing
}

/// A pod by its own address, a pod by its host's, an external workload, or just the address.
fn endpoint_profile(reader: &Reader<'_>, config: &Config, addr: SocketAddr) -> Profile {
    let (ip, port) = (addr.ip(), addr.port());
    let ambiguous = |what: &str| Profile::Ambiguous(format!("several {what} have the address {addr}"));
    let alive = |pod: &&&Arc<Pod>| pod.phase != Some(Phase::Over) && !pod.meta.terminating;
    let pods = reader.pods_at(ip);
    let pods: Vec<_> = pods.iter().filter(alive).collect();
    match *pods {
        [] => {}
        [pod] => return pod_profile(reader, config, pod, addr),
        [..] => return ambiguous("pods"),
    }
    let hosted = reader.pods_on_host(ip);
    let hosted: Vec<_> = hosted.iter().filter(alive).filter(|pod| publishes(pod, port)).collect();
    match *hosted {
        [] => {}
        [pod] => return pod_profile(reader, config, pod, addr),
        [..] => return ambiguous("pods' hosts"),
    }
    let mut workloads = reader.external_workloads_at(ip).into_iter();
    let workload = workloads.find(|workload| declares(&workload.ports, port) && !is_taken(reader, workload, ip));
    match workload {
        None => bare_profile(config, addr),
        Some(workload) => {
            let mut endpoint = external_endpoint(reader, config, workload, ip, port);
            endpoint
                .labels
                .push(("namespace".into(), workload.meta.namespace().clone()));
            endpoint.zone = workload.meta.label(tulle_core::names::label::ZONE).map(shared);
            profile_of(endpoint)
        }
    }
}

fn pod_profile(reader: &Reader<'_>, config: &Config, pod: &Pod, addr: SocketAddr) -> Profile {
    if !pod.is_serving() {
        return bare_profile(config, addr);
    }
    let Some(mut endpoint) = pod_endpoint(reader, config, pod, addr.ip(), addr.port()) else {
        return bare_profile(config, addr);
    };
    endpoint.labels.push(("namespace".into(), pod.meta.namespace().clone()));
    let node = pod.node.as_deref().and_then(|node| reader.node(&Name::new("", node)));
    endpoint.zone = node.and_then(|node| node.zone.clone());
    let opaque = Subject::Pod(pod).is_opaque(reader, config, addr.port());
    Profile::Endpoint {
        endpoint,
        opacity: opacity(opaque),
    }
}

fn profile_of(endpoint: Endpoint) -> Profile {
    let opaque = endpoint.protocol == Some(ProtocolHint::Opaque);
    Profile::Endpoint {
        endpoint,
        opacity: opacity(opaque),
    }
}

fn bare_profile(config: &Config, addr: SocketAddr) -> Profile {
    let mut endpoint = Endpoint::bare(addr);
    endpoint.http2 = Http2Params::Unset;
    Profile::Endpoint {
        endpoint,
        opacity: opacity(config.default_opaque_ports.contains(addr.port())),
    }
}

fn route(route: &sp::ProfileRoute) -> Route {
    Route {
        name: route.name.clone(),
        condition: request_match(&route.condition),
        response_classes: route
            .response_classes
            .iter()
            .map(|class| ResponseClass {
                condition: response_match(&class.condition),
                is_failure: class.is_failure,
            })
            .collect(),
        is_retryable: route.is_retryable,
        timeout: route.timeout,
    }
}

fn request_match(matched: &sp::RequestMatch) -> RequestMatch {
    match matched {
        sp::RequestMatch::All(all) => RequestMatch::All(all.iter().map(request_match).collect()),
        sp::RequestMatch::Any(any) => RequestMatch::Any(any.iter().map(request_match).collect()),
        sp::RequestMatch::Not(not) => RequestMatch::Not(Box::new(request_match(not))),
        sp::RequestMatch::PathRegex(regex) => RequestMatch::PathRegex(regex.clone()),
        sp::RequestMatch::Method(method) => RequestMatch::Method(method.clone()),
    }
}

fn response_match(matched: &sp::ResponseMatch) -> ResponseMatch {
    match matched {
        sp::ResponseMatch::All(all) => ResponseMatch::All(all.iter().map(response_match).collect()),
        sp::ResponseMatch::Any(any) => ResponseMatch::Any(any.iter().map(response_match).collect()),
        sp::ResponseMatch::Not(not) => ResponseMatch::Not(Box::new(response_match(not))),
        sp::ResponseMatch::Status { min, max } => ResponseMatch::Status { min: *min, max: *max },
    }
}

/// A name of a Service is written out, as proxies resolve it; what is none stays as it is, and nothing is found there.
fn override_of(dst: &sp::Override, port: u16, cluster_domain: &str) -> Override {
    let authority = match dst.destination(cluster_domain) {
        Ok(destination) => destination.authority(port, cluster_domain),
        Err(_) => dst.authority.clone(),
    };
    Override {
        authority,
        weight: dst.weight,
    }
}
