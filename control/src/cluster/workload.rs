//! A pod or an external workload at one address, as an endpoint: mesh facts, opaqueness, labels, owner.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tulle_core::identity;
use tulle_core::names::{annotation, label, port as proxy_port};
use tulle_core::ports::PortSet;

use crate::cluster::lookup::Reader;
use crate::cluster::{Config, H2Upgrade, TransportMode};
use crate::model::endpoints::{Endpoint, Http2Params, ProtocolHint, TlsIdentity, Workload};
use crate::resources::meta::{Meta, Name, Owner};
use crate::resources::policy::server::{ProxyProtocol, Server, Workloads};
use crate::resources::text::shared;
use crate::resources::workload::{CONTROL_PLANE_COMPONENT, ContainerPort, ExternalWorkload, Pod, ProxyContainer};

/// The endpoint that a pod is at a port, or nothing when its sidecar does not say how to reach it.
pub(super) fn pod_endpoint(reader: &Reader<'_>, config: &Config, pod: &Pod, ip: IpAddr, port: u16) -> Option<Endpoint> {
    let mut endpoint = Endpoint::bare(SocketAddr::new(ip, port));
    endpoint.workload = Workload::Pod {
        namespace: pod.meta.namespace().clone(),
        name: pod.meta.name.name.clone(),
    };
    endpoint.node = pod.node.clone();
    endpoint.labels = pod_labels(reader, pod);
    if pod.meta.label(label::CONTROL_PLANE_NS).is_none_or(str::is_empty) {
        return Some(endpoint);
    }
    let skipped = ports(&pod.meta, annotation::SKIP_INBOUND_PORTS, &pod.ports);
    if skipped.is_some_and(|skipped| skipped.contains(port)) {
        return Some(endpoint);
    }
    let (inbound, admin, control) = match pod.proxy {
        ProxyContainer::Present {
            inbound,
            admin,
            control,
        } => (inbound, admin, control),
        // The control plane terminates TLS itself and needs no sidecar.
        ProxyContainer::Absent if pod.meta.label(CONTROL_PLANE_COMPONENT).is_some() => return Some(endpoint),
        ProxyContainer::Absent | ProxyContainer::Broken => return None,
    };
    let opaque = pod_is_opaque(reader, config, pod, port);
    endpoint.protocol = match (opaque, config.h2_upgrade) {
        (true, _) => Some(ProtocolHint::Opaque),
        (false, H2Upgrade::Offer) => Some(ProtocolHint::H2),
        (false, H2Upgrade::Omit) => None,
    };
    let forced = config.transport == TransportMode::TransportHeader;
    if (forced || opaque) && port != admin && port != control {
        endpoint.opaque_transport = inbound;
    }
    endpoint.identity = pod_identity(config, pod);
    endpoint.http2 = Http2Params::Configured;
    Some(endpoint)
}

/// Who a pod's sidecar is, if our control plane gives it its certificate.
pub(super) fn pod_identity(config: &Config, pod: &Pod) -> Option<TlsIdentity> {
    let control_plane = pod.meta.label(label::CONTROL_PLANE_NS)?;
    if control_plane != config.controller_namespace || config.trust_domain.is_empty() {
        return None;
    }
    let namespace = pod.meta.namespace();
    let name: Arc<str> =
        identity::service_account(&pod.service_account, namespace, control_plane, &config.trust_domain).into();
    Some(TlsIdentity::Dns {
        server_name: name.clone(),
        name,
    })
}

/// The endpoint that an external workload is at a port.
pub(super) fn external_endpoint(
    reader: &Reader<'_>,
    config: &Config,
    workload: &ExternalWorkload,
    ip: IpAddr,
    port: u16,
) -> Endpoint {
    let mut endpoint = Endpoint::bare(SocketAddr::new(ip, port));
    let name = &workload.meta.name;
    endpoint.workload = Workload::External {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
    };
    endpoint.labels = vec![("external_workload".into(), name.name.clone())];
    let (kind, owner) = owner(reader, &workload.meta);
    // An external workload without an owner names itself once.
    if kind != "pod" {
        endpoint.labels.push((kind, owner));
    }
    let opaque = external_is_opaque(reader, config, workload, port);
    endpoint.protocol = Some(if opaque { ProtocolHint::Opaque } else { ProtocolHint::H2 });
    if opaque || config.transport == TransportMode::TransportHeader {
        let named = workload
            .ports
            .iter()
            .find(|port| port.name.as_deref() == Some("linkerd-proxy"));
        endpoint.opaque_transport = Some(named.map_or(proxy_port::INBOUND, |port| port.port));
    }
    endpoint.identity = Some(external_identity(workload));
    endpoint.http2 = Http2Params::Configured;
    endpoint
}

pub(super) fn external_identity(workload: &ExternalWorkload) -> TlsIdentity {
    let (name, server_name): (Arc<str>, Arc<str>) =
        (workload.identity.as_str().into(), workload.server_name.as_str().into());
    if name.contains("://") {
        TlsIdentity::Uri { uri: name, server_name }
    } else {
        TlsIdentity::Dns { name, server_name }
    }
}

pub(super) fn pod_is_opaque(reader: &Reader<'_>, config: &Config, pod: &Pod, port: u16) -> bool {
    let servers = reader.servers(pod.meta.namespace());
    let marked = servers
        .into_iter()
        .any(|server| server.protocol == ProxyProtocol::Opaque && server_selects_pod(server, pod, port));
    marked || opaque_ports(&pod.meta, &pod.ports, config).contains(port)
}

fn external_is_opaque(reader: &Reader<'_>, config: &Config, workload: &ExternalWorkload, port: u16) -> bool {
    let servers = reader.servers(workload.meta.namespace());
    let marked = servers
        .into_iter()
        .any(|server| server.protocol == ProxyProtocol::Opaque && server_selects_external(server, workload, port));
    marked || opaque_ports(&workload.meta, &workload.ports, config).contains(port)
}

fn opaque_ports(meta: &Meta, declared: &[ContainerPort], config: &Config) -> PortSet {
    ports(meta, annotation::OPAQUE_PORTS, declared).unwrap_or_else(|| config.default_opaque_ports.clone())
}

pub(super) fn server_selects_pod(server: &Server, pod: &Pod, port: u16) -> bool {
    let Workloads::Pods(selector) = &server.workloads else {
        return false;
    };
    pod.resolve(&server.port).contains(&port) && selector.matches(&pod.meta.labels)
}

pub(super) fn server_selects_external(server: &Server, workload: &ExternalWorkload, port: u16) -> bool {
    let Workloads::External(selector) = &server.workloads else {
        return false;
    };
    workload.resolve(&server.port).contains(&port) && selector.matches(&workload.meta.labels)
}

/// Ports that an annotation lists by name, number or range; an empty annotation lists none, an absent one is `None`.
fn ports(meta: &Meta, key: &str, declared: &[ContainerPort]) -> Option<PortSet> {
    let text = meta.annotation(key)?;
    Some(named_ports(text, |name| {
        declared
            .iter()
            .filter(|port| port.name.as_deref() == Some(name))
            .map(|port| port.port)
            .collect()
    }))
}

/// Reads a list of ports whose names `resolve` knows; what is neither name nor number is left out.
pub(super) fn named_ports(text: &str, resolve: impl Fn(&str) -> Vec<u16>) -> PortSet {
    let mut ports = PortSet::default();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let named = resolve(entry);
        if named.is_empty() {
            for range in entry.parse::<PortSet>().iter().flat_map(PortSet::ranges) {
                ports.insert_range(range);
            }
        } else {
            named.into_iter().for_each(|port| ports.insert(port));
        }
    }
    ports
}

fn pod_labels(reader: &Reader<'_>, pod: &Pod) -> Vec<(Cow<'static, str>, Arc<str>)> {
    let own = [
        ("control_plane_ns", label::CONTROL_PLANE_NS),
        ("pod_template_hash", label::POD_TEMPLATE_HASH),
    ];
    let own = own
        .into_iter()
        .filter_map(|(label, key)| Some((label.into(), shared(pod.meta.label(key)?))));
    let mut labels = vec![
        ("pod".into(), pod.meta.name.name.clone()),
        ("serviceaccount".into(), pod.service_account.clone()),
        owner(reader, &pod.meta),
    ];
    labels.extend(own);
    labels.shrink_to_fit();
    labels
}

/// The label and name of what a workload belongs to: the workload itself when nothing else is known.
pub(super) fn owner(reader: &Reader<'_>, meta: &Meta) -> (Cow<'static, str>, Arc<str>) {
    let own = || ("pod".into(), meta.name.name.clone());
    let Some(owner) = &meta.owner else { return own() };
    let name = Name::new(meta.namespace().clone(), owner.name.clone());
    let above = match &*owner.kind {
        "Job" => reader.job(&name).and_then(|job| job.meta.owner.as_ref()),
        "ReplicaSet" => reader
            .replica_set(&name)
            .and_then(|set| set.meta.owner.as_ref())
            .filter(|above| ["Job", "StatefulSet", "DaemonSet", "Deployment"].contains(&&*above.kind)),
        _ => None,
    };
    let Owner { kind, name } = above.unwrap_or(owner);
    owner_label(kind).map_or_else(own, |label| (label, name.clone()))
}

/// The label of an owner's kind; kinds that others define have theirs too, unless it would stand for something else.
fn owner_label(kind: &str) -> Option<Cow<'static, str>> {
    Some(Cow::Borrowed(match kind {
        "Deployment" => "deployment",
        "DaemonSet" => "daemonset",
        "StatefulSet" => "statefulset",
        "ReplicaSet" => "replicaset",
        "ReplicationController" => "replicationcontroller",
        "Job" => "k8s_job",
        "CronJob" => "cronjob",
        "Node" => "node",
        kind => {
            let label = kind.to_ascii_lowercase();
            let is_name = label.bytes().all(|byte| byte.is_ascii_alphanumeric());
            return (is_name && !label.is_empty() && !TAKEN_LABELS.contains(&&*label)).then_some(label.into());
        }
    }))
}

/// Labels that say something else of an endpoint, or of its service.
const TAKEN_LABELS: &[&str] = &["namespace", "pod", "service", "serviceaccount", "zone"];

/// Whether a workload declares the port.
pub(super) fn declares(ports: &[ContainerPort], port: u16) -> bool {
    ports.iter().any(|declared| declared.port == port)
}

/// Whether a pod publishes the port on its host.
pub(super) fn publishes(pod: &Pod, port: u16) -> bool {
    pod.ports.iter().any(|declared| declared.host_port == Some(port))
}
