//! A pod or an external workload at one address, as an endpoint: mesh facts, opaqueness, labels, owner.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tulle_core::identity;
use tulle_core::names::{annotation, label, port as proxy_port};

use crate::cluster::lookup::Reader;
use crate::cluster::{Config, H2Upgrade, TransportMode};
use crate::model::endpoints::{Endpoint, Http2Params, ProtocolHint, TlsIdentity, Workload};
use crate::resources::meta::{Meta, Name, Owner};
use crate::resources::policy::server::{ProxyProtocol, Server, Workloads};
use crate::resources::port_list::{PortList, ResolvedPorts};
use crate::resources::service::Service;
use crate::resources::text::shared;
use crate::resources::workload::{
    CONTROL_PLANE_COMPONENT, ContainerPort, ExternalWorkload, Pod, ProxyContainer, resolve_declared,
};

/// What has ports that policies are about.
#[derive(Clone, Copy)]
pub(super) enum Subject<'a> {
    Pod(&'a Pod),
    External(&'a ExternalWorkload),
}

impl<'a> Subject<'a> {
    pub(super) fn meta(self) -> &'a Meta {
        match self {
            Self::Pod(pod) => &pod.meta,
            Self::External(workload) => &workload.meta,
        }
    }

    fn ports(self) -> &'a [ContainerPort] {
        match self {
            Self::Pod(pod) => &pod.ports,
            Self::External(workload) => &workload.ports,
        }
    }

    /// The ports that an annotation lists; none without the annotation.
    pub(super) fn listed_ports(self, key: &str) -> Option<ResolvedPorts> {
        let list = PortList::parse(self.meta().annotation(key)?);
        Some(resolve_declared(&list, self.ports()))
    }

    fn is_selected_by(self, server: &Server, port: u16) -> bool {
        let is_its_port = match (self, &server.port) {
            (_, None) => true,
            (Self::Pod(pod), Some(its)) => pod.resolve(its).contains(&port),
            (Self::External(workload), Some(its)) => workload.resolve(its).contains(&port),
        };
        is_its_port
            && match (self, &server.workloads) {
                (_, Workloads::All) => true,
                (Self::Pod(pod), Workloads::Pods(selector)) => selector.matches(&pod.meta.labels),
                (Self::External(workload), Workloads::External(selector)) => selector.matches(&workload.meta.labels),
                (Self::Pod(_), Workloads::External(_)) | (Self::External(_), Workloads::Pods(_)) => false,
            }
    }

    /// The Servers that select a port, the oldest first: that one decides.
    pub(super) fn servers<'r>(self, reader: &Reader<'r>, port: u16) -> Vec<&'r Arc<Server>> {
        let mut servers = reader.servers(self.meta().namespace());
        servers.retain(|server| self.is_selected_by(server, port));
        servers.sort_by(|a, b| a.meta.seniority().cmp(&b.meta.seniority()));
        servers
    }

    pub(super) fn server<'r>(self, reader: &Reader<'r>, port: u16) -> Option<&'r Arc<Server>> {
        self.servers(reader, port).into_iter().next()
    }

    /// What speaks on a port, for its clients and for its policy alike: what the Server says; annotations that mark ports as
    /// opaque are for ports without one.
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
        match self.listed_ports(annotation::OPAQUE_PORTS) {
            Some(ports) => ports.to_set().contains(port),
            None => config.default_opaque_ports.contains(port),
        }
    }
}

/// Whether a Service, or the cluster where it says nothing, marks a port as opaque for its clients.
pub(super) fn service_is_opaque(config: &Config, service: &Service, port: u16) -> bool {
    is_marked_opaque(config, &service.meta, port, |name| {
        let named = service.ports.iter().filter(|port| port.name == name);
        named.map(|port| port.port).collect()
    })
}

/// The same for an object whose ports may be named as `declared` tells.
pub(super) fn is_marked_opaque(config: &Config, meta: &Meta, port: u16, declared: impl Fn(&str) -> Vec<u16>) -> bool {
    match meta.annotation(annotation::OPAQUE_PORTS) {
        Some(text) => PortList::parse(text).resolve(declared).to_set().contains(port),
        None => config.default_opaque_ports.contains(port),
    }
}

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
    let subject = Subject::Pod(pod);
    let skipped = subject.listed_ports(annotation::SKIP_INBOUND_PORTS);
    if skipped.is_some_and(|skipped| skipped.to_set().contains(port)) {
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
    let opaque = subject.is_opaque(reader, config, port);
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
    let opaque = Subject::External(workload).is_opaque(reader, config, port);
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

/// Whether an address that an external workload names is somebody else's: of a Service, a pod or a host, or of an older
/// external workload.
pub(super) fn is_taken(reader: &Reader<'_>, workload: &ExternalWorkload, ip: IpAddr) -> bool {
    let all = reader.external_workloads_at(ip);
    is_claimed(reader, ip) || workload.holder(all.into_iter().map(|one| &**one)).is_some()
}

/// Whether an address is that of a Service, or of a pod that is not over, or of the host of one: no external workload has
/// it, whatever it says.
fn is_claimed(reader: &Reader<'_>, ip: IpAddr) -> bool {
    let claims = |pod: &Arc<Pod>| pod.claims().any(|claimed| claimed == ip);
    !reader.services_at(ip).is_empty()
        || reader.pods_at(ip).into_iter().any(claims)
        || reader.pods_on_host(ip).into_iter().any(claims)
}

/// Whether a pod publishes the port on its host.
pub(super) fn publishes(pod: &Pod, port: u16) -> bool {
    pod.ports.iter().any(|declared| declared.host_port == Some(port))
}
