//! Pods and external workloads as endpoints: identity, protocol, labels, owner.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tulle_core::identity;
use tulle_core::names::{annotation, label, port as proxy_port};

use crate::cluster::config::{Config, H2Upgrade, TransportMode};
use crate::cluster::store::reader::Reader;
use crate::model::endpoints::{
    Endpoint, EndpointWorkload, Http2Params, ProtocolHint, SharedEndpointFields, TlsIdentity,
};
use crate::resources::interning::{Interner, intern};
use crate::resources::meta::{Meta, NamespacedName, Owner};
use crate::resources::policy::server::{ProxyProtocol, Server};
use crate::resources::port_list::{self, PortList, ResolvedPorts};
use crate::resources::workload::{DeclaredPort, ExternalWorkload, Pod, PodNetwork, ProxyContainer, resolve_declared};

/// A workload that policies apply to.
#[derive(Clone, Copy)]
pub(super) enum WorkloadRef<'a> {
    Pod(&'a Pod),
    External(&'a ExternalWorkload),
}

impl<'a> WorkloadRef<'a> {
    pub(super) fn meta(self) -> &'a Meta {
        match self {
            Self::Pod(pod) => &pod.meta,
            Self::External(workload) => &workload.meta,
        }
    }

    fn ports(self) -> &'a [DeclaredPort] {
        match self {
            Self::Pod(pod) => &pod.ports,
            Self::External(workload) => &workload.ports,
        }
    }

    /// The ports in an annotation; `None` without the annotation.
    pub(super) fn annotated_ports(self, key: &str) -> Option<ResolvedPorts> {
        let list = PortList::parse(self.meta().annotation(key)?);
        Some(resolve_declared(&list, self.ports()))
    }

    fn is_selected_by(self, server: &Server, port: u16) -> bool {
        let is_port_selected = match (self, &server.port) {
            (_, None) => true,
            (Self::Pod(pod), Some(server_port)) => pod.resolve_port(server_port).contains(&port),
            (Self::External(workload), Some(server_port)) => workload.resolve_port(server_port).contains(&port),
        };
        is_port_selected
            && match self {
                Self::Pod(pod) => server.workloads.selects_pod(&pod.meta.labels),
                Self::External(workload) => server.workloads.selects_external_workload(&workload.meta.labels),
            }
    }

    /// The Servers that select a port, oldest first. The oldest Server applies.
    pub(super) fn servers<'r>(self, reader: &Reader<'r>, port: u16) -> Vec<&'r Arc<Server>> {
        let mut servers = reader.server_candidates(self.meta());
        servers.retain(|server| self.is_selected_by(server, port));
        servers.sort_by(|a, b| a.meta.age_order().cmp(&b.meta.age_order()));
        servers
    }

    pub(super) fn server<'r>(self, reader: &Reader<'r>, port: u16) -> Option<&'r Arc<Server>> {
        self.servers(reader, port).into_iter().next()
    }

    /// The protocol of a port, for clients and for the inbound policy. The Server of the port sets it. The opaque-ports annotation
    /// applies only to ports without a Server.
    pub(super) fn protocol(self, config: &Config, server: Option<&Server>, port: u16) -> ProxyProtocol {
        match server {
            Some(server) => server.protocol,
            None if self.is_marked_opaque(config, port) => ProxyProtocol::Opaque,
            None => ProxyProtocol::Unknown,
        }
    }

    pub(super) fn is_opaque(self, reader: &Reader<'_>, config: &Config, port: u16) -> bool {
        let server = self.server(reader, port);
        self.protocol(config, server.map(|server| &**server), port) == ProxyProtocol::Opaque
    }

    fn is_marked_opaque(self, config: &Config, port: u16) -> bool {
        let annotated = self.annotated_ports(annotation::OPAQUE_PORTS);
        port_list::contains_or_default(annotated, &config.default_opaque_ports, port)
    }
}

/// Where clients reach a port of a pod. Settings of ports, such as annotations and Servers, apply to the port in the pod's network.
#[derive(Clone, Copy, Debug)]
pub(super) enum PodAddress {
    /// An address in the pod's network.
    Pod(SocketAddr),
    /// A host port. The node forwards it to `container_port`, and to no other port of the pod.
    HostPort { addr: SocketAddr, container_port: u16 },
}

impl PodAddress {
    /// The address of a pod by its host port; `None` if the pod does not have this host port.
    pub(super) fn from_host_port(pod: &Pod, addr: SocketAddr) -> Option<Self> {
        let declared = pod.ports.iter().find(|port| port.host_port == Some(addr.port()))?;
        Some(match pod.network {
            PodNetwork::Host => Self::Pod(addr),
            PodNetwork::Pod => Self::HostPort {
                addr,
                container_port: declared.port,
            },
        })
    }

    /// The address that clients connect to.
    pub(super) fn addr(self) -> SocketAddr {
        match self {
            Self::Pod(addr) | Self::HostPort { addr, .. } => addr,
        }
    }

    /// The port in the pod's network.
    pub(super) fn container_port(self) -> u16 {
        match self {
            Self::Pod(addr) => addr.port(),
            Self::HostPort { container_port, .. } => container_port,
        }
    }
}

/// The endpoint of a pod's port; `None` if the pod lacks its proxy (see [`Pod::lacks_proxy`]), unless the port skips the proxy.
pub(super) fn pod_endpoint(reader: &Reader<'_>, config: &Config, pod: &Pod, address: PodAddress) -> Option<Endpoint> {
    Some(Endpoint {
        workload: EndpointWorkload::Pod {
            namespace: pod.meta.namespace().clone(),
            name: pod.meta.name.name.clone(),
        },
        node: pod.node.clone(),
        shared: SHARED_FIELDS.intern(shared_fields_of_pod(reader, config, pod, address)?),
        ..Endpoint::from_addr(address.addr())
    })
}

fn shared_fields_of_pod(
    reader: &Reader<'_>,
    config: &Config,
    pod: &Pod,
    address: PodAddress,
) -> Option<SharedEndpointFields> {
    let port = address.container_port();
    let mut shared = SharedEndpointFields {
        labels: pod_labels(reader, pod),
        ..SharedEndpointFields::default()
    };
    if pod.meta.label(label::CONTROL_PLANE_NS).is_none_or(str::is_empty) {
        return Some(shared);
    }
    let workload = WorkloadRef::Pod(pod);
    let skipped = workload.annotated_ports(annotation::SKIP_INBOUND_PORTS);
    if skipped.is_some_and(|skipped| skipped.to_set().contains(port)) {
        return Some(shared);
    }
    let (inbound, admin, control) = match pod.proxy {
        ProxyContainer::Present {
            inbound,
            admin,
            control,
        } => (inbound, admin, control),
        ProxyContainer::Absent | ProxyContainer::Invalid if pod.lacks_proxy() => return None,
        // Pods of the control plane terminate TLS themselves and need no sidecar.
        ProxyContainer::Absent | ProxyContainer::Invalid => return Some(shared),
    };
    let opaque = workload.is_opaque(reader, config, port);
    shared.protocol = match (opaque, config.h2_upgrade) {
        (true, _) => Some(ProtocolHint::Opaque),
        (false, H2Upgrade::Offer) => Some(ProtocolHint::H2),
        (false, H2Upgrade::Omit) => None,
    };
    let forced = config.transport == TransportMode::TransportHeader;
    shared.opaque_transport_port = match address {
        PodAddress::Pod(_) if (forced || opaque) && port != admin && port != control => inbound,
        // The inbound port of the proxy cannot be reached at the node's address.
        PodAddress::Pod(_) | PodAddress::HostPort { .. } => None,
    };
    shared.identity = pod_identity(config, pod);
    shared.http2 = Http2Params::Configured;
    Some(shared)
}

/// The identity of a pod's sidecar; `None` if the control plane of the pod's cluster does not issue its certificate. For a pod of
/// another cluster this is not checked, because the control plane there can be in any namespace.
pub(super) fn pod_identity(config: &Config, pod: &Pod) -> Option<TlsIdentity> {
    let control_plane = pod.meta.label(label::CONTROL_PLANE_NS)?;
    let is_of_other_control_plane = config.remote_name.is_none() && control_plane != config.controller_namespace;
    if is_of_other_control_plane || config.trust_domain.is_empty() {
        return None;
    }
    let namespace = pod.meta.namespace();
    let name: Arc<str> =
        identity::service_account_identity(&pod.service_account, namespace, control_plane, &config.trust_domain).into();
    Some(TlsIdentity::Dns {
        server_name: name.clone(),
        name,
    })
}

/// The endpoint of an external workload's port.
pub(super) fn external_endpoint(
    reader: &Reader<'_>,
    config: &Config,
    workload: &ExternalWorkload,
    ip: IpAddr,
    port: u16,
) -> Endpoint {
    let name = &workload.meta.name;
    let opaque = WorkloadRef::External(workload).is_opaque(reader, config, port);
    let mut shared = SharedEndpointFields {
        labels: owner(reader, &workload.meta).into_iter().collect(),
        // As in Linkerd, `config.h2_upgrade` does not apply to external workloads.
        protocol: Some(if opaque { ProtocolHint::Opaque } else { ProtocolHint::H2 }),
        identity: Some(external_identity(workload)),
        http2: Http2Params::Configured,
        ..SharedEndpointFields::default()
    };
    if opaque || config.transport == TransportMode::TransportHeader {
        let named = workload
            .ports
            .iter()
            .find(|port| port.name.as_deref() == Some("linkerd-proxy"));
        shared.opaque_transport_port = Some(named.map_or(proxy_port::INBOUND, |port| port.port));
    }
    Endpoint {
        workload: EndpointWorkload::External {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
        },
        shared: SHARED_FIELDS.intern(shared),
        ..Endpoint::from_addr(SocketAddr::new(ip, port))
    }
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

fn pod_labels(reader: &Reader<'_>, pod: &Pod) -> Vec<(Cow<'static, str>, Arc<str>)> {
    let copied_labels = [
        ("control_plane_ns", label::CONTROL_PLANE_NS),
        ("pod_template_hash", label::POD_TEMPLATE_HASH),
    ];
    let copied_labels = copied_labels
        .into_iter()
        .filter_map(|(label, key)| Some((label.into(), intern(pod.meta.label(key)?))));
    let service_account = ("serviceaccount".into(), pod.service_account.clone());
    let labels = [service_account].into_iter();
    labels.chain(owner(reader, &pod.meta)).chain(copied_labels).collect()
}

/// The label and name of a workload's owner, or of the owner of that owner. `None` without an owner, or if its kind has no
/// label.
pub(super) fn owner(reader: &Reader<'_>, meta: &Meta) -> Option<(Cow<'static, str>, Arc<str>)> {
    let owner = meta.owner.as_ref()?;
    let name = NamespacedName::new(meta.namespace().clone(), owner.name.clone());
    let parent_owner = match &*owner.kind {
        "Job" => reader.job(&name).and_then(|job| job.meta.owner.as_ref()),
        "ReplicaSet" => reader
            .replica_set(&name)
            .and_then(|set| set.meta.owner.as_ref())
            .filter(|parent| ["Job", "StatefulSet", "DaemonSet", "Deployment"].contains(&&*parent.kind)),
        _ => None,
    };
    let Owner { kind, name } = parent_owner.unwrap_or(owner);
    Some((owner_label(kind)?, name.clone()))
}

/// The label of an owner's kind. Custom kinds become labels too, unless the label has another meaning.
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
            return (is_name && !label.is_empty() && !RESERVED_LABELS.contains(&&*label)).then_some(label.into());
        }
    }))
}

/// The interned fields that the endpoints of an owner have in common.
pub(super) static SHARED_FIELDS: Interner<SharedEndpointFields> = Interner::new();

/// Labels that have another meaning for endpoints or Services.
const RESERVED_LABELS: &[&str] = &["namespace", "pod", "service", "serviceaccount", "zone"];

pub(super) fn declares_port(ports: &[DeclaredPort], port: u16) -> bool {
    ports.iter().any(|declared| declared.port == port)
}

/// Whether the address of an external workload belongs to another object: a Service, a pod, or an older external workload.
pub(super) fn has_address_conflict(reader: &Reader<'_>, workload: &ExternalWorkload, ip: IpAddr) -> bool {
    let all = reader.external_workloads_at(ip);
    is_pod_or_service_ip(reader, ip)
        || workload
            .conflicting_older_workload(all.into_iter().map(|workload| &**workload))
            .is_some()
}

/// Whether a Service has the address, or a pod [claims](Pod::claimed_ips) it. External workloads cannot use such an address.
fn is_pod_or_service_ip(reader: &Reader<'_>, ip: IpAddr) -> bool {
    let claims = |pod: &Arc<Pod>| pod.claimed_ips().any(|claimed| claimed == ip);
    !reader.services_at(ip).is_empty()
        || reader.pods_at(ip).into_iter().any(claims)
        || reader.pods_using_host_ip(ip).into_iter().any(claims)
}
