//! Lists workloads with their owner, Services and sidecar addresses.
//!
//! The list is computed per call for telemetry queries, and is not published.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tulle_core::addr::is_local_or_multicast;
use tulle_core::identity::parse_service_account_identity;
use tulle_core::names::port;

use crate::cluster::config::Config;
use crate::cluster::store::objects::Store;
use crate::cluster::store::reader::Reader;
use crate::cluster::views::workload::{external_identity, owner, pod_identity};
use crate::model::endpoints::TlsIdentity;
use crate::resources::Object;
use crate::resources::labels::Labels;
use crate::resources::meta::NamespacedName;
use crate::resources::workload::{ExternalWorkload, Pod, ProxyContainer};

/// A running pod or an external workload.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: NamespacedName,
    pub kind: WorkloadKind,
    /// Kind of the owner, as metric labels spell it, and its name. The pod or external workload itself if it has no owner.
    pub owner: (Cow<'static, str>, Arc<str>),
    /// The Services that select it, sorted by name.
    pub services: Vec<Arc<str>>,
    pub sidecar: Option<Sidecar>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    Pod,
    External,
}

/// Addresses and identity of a sidecar.
#[derive(Clone, Debug)]
pub struct Sidecar {
    pub admin_addr: SocketAddr,
    pub tap_addr: SocketAddr,
    /// Identity of the sidecar; `None` if this control plane does not issue the certificate of a pod.
    pub identity: Option<TlsIdentity>,
}

/// The objects that [`list`] needs. Includes pods, external workloads and Services of all namespaces, because their addresses are
/// compared, but only the owners of the requested namespace.
pub(in crate::cluster) fn input_objects(store: &Store, namespace: Option<&str>) -> Vec<Object> {
    let is_needed = |object: &&Object| match object {
        Object::Pod(_) | Object::ExternalWorkload(_) | Object::Service(_) => true,
        Object::ReplicaSet(owner) | Object::Job(owner) => {
            namespace.is_none_or(|namespace| *namespace == **owner.meta.namespace())
        }
        _ => false,
    };
    store.all().filter(is_needed).cloned().collect()
}

/// The workloads in a namespace, or in all namespaces, sorted by name.
pub(in crate::cluster) fn list(store: &Store, config: &Config, namespace: Option<&str>) -> Vec<Workload> {
    let reader = Reader::new(store);
    let namespaces_by_ip = namespaces_by_ip(store);
    let mut workloads = Vec::new();
    let mut services: HashMap<_, Vec<_>> = HashMap::new();
    for object in store.all() {
        if namespace.is_some_and(|namespace| *namespace != **object.meta().namespace()) {
            continue;
        }
        match object {
            Object::Pod(pod) if pod.is_serving() => {
                workloads.push((pod_workload(&reader, config, pod), &pod.meta.labels))
            }
            Object::ExternalWorkload(external) => {
                let mut workload = external_workload(&reader, external);
                workload.sidecar = workload
                    .sidecar
                    .filter(|sidecar| belongs_to_namespace(external, sidecar, &namespaces_by_ip));
                workloads.push((workload, &external.meta.labels));
            }
            Object::Service(service) if !service.selector.is_empty() => {
                services.entry(service.meta.namespace()).or_default().push(service);
            }
            _ => {}
        }
    }
    for services in services.values_mut() {
        services.sort_by(|a, b| a.meta.name.cmp(&b.meta.name));
    }
    workloads.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let with_services = workloads.into_iter().map(|(mut workload, labels)| {
        let selects = |selector: &Labels| selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let selecting = services.get(&workload.name.namespace).into_iter().flatten();
        let selecting = selecting.filter(|service| selects(&service.selector));
        workload.services = selecting.map(|service| service.meta.name.name.clone()).collect();
        workload
    });
    with_services.collect()
}

/// The namespaces of the pods, external workloads and Services with an address.
type NamespacesByIp<'a> = HashMap<IpAddr, Vec<&'a Arc<str>>>;

fn namespaces_by_ip(store: &Store) -> NamespacesByIp<'_> {
    let mut namespaces_by_ip = NamespacesByIp::new();
    for object in store.all() {
        let ips = match object {
            Object::Pod(pod) => &pod.ips[..],
            Object::ExternalWorkload(workload) => &workload.ips[..],
            Object::Service(service) => &service.cluster_ips[..],
            _ => continue,
        };
        for ip in ips {
            namespaces_by_ip.entry(*ip).or_default().push(object.meta().namespace());
        }
    }
    namespaces_by_ip
}

/// Whether the address and the identity of an external workload belong to its own namespace. A user who can create external
/// workloads in one namespace must not use them to read the traffic of other namespaces.
fn belongs_to_namespace(workload: &ExternalWorkload, sidecar: &Sidecar, namespaces_by_ip: &NamespacesByIp<'_>) -> bool {
    let namespace = workload.meta.namespace();
    let ip = sidecar.admin_addr.ip().to_canonical();
    if is_local_or_multicast(ip) {
        return false;
    }
    if namespaces_by_ip
        .get(&ip)
        .is_some_and(|namespaces| namespaces.iter().any(|other| *other != namespace))
    {
        return false;
    }
    let Some(TlsIdentity::Dns { name, .. }) = &sidecar.identity else {
        return true;
    };
    // Names in certificates are lower-case.
    let name = name.to_ascii_lowercase();
    parse_service_account_identity(&name).is_none_or(|(_, account_namespace)| account_namespace == &**namespace)
}

fn pod_workload(reader: &Reader<'_>, config: &Config, pod: &Pod) -> Workload {
    let sidecar = match (pod.proxy, pod.ips.first()) {
        (ProxyContainer::Present { admin, control, .. }, Some(ip)) => Some(Sidecar {
            admin_addr: SocketAddr::new(*ip, admin),
            tap_addr: SocketAddr::new(*ip, control),
            identity: pod_identity(config, pod),
        }),
        _ => None,
    };
    Workload {
        name: pod.meta.name.clone(),
        kind: WorkloadKind::Pod,
        owner: owner(reader, &pod.meta).unwrap_or_else(|| ("pod".into(), pod.meta.name.name.clone())),
        services: Vec::new(),
        sidecar,
    }
}

fn external_workload(reader: &Reader<'_>, workload: &ExternalWorkload) -> Workload {
    let port = |name: &str, default: u16| {
        let named = workload.ports.iter().find(|port| port.name.as_deref() == Some(name));
        named.map_or(default, |port| port.port)
    };
    let sidecar = workload.ips.first().map(|ip| Sidecar {
        admin_addr: SocketAddr::new(*ip, port("linkerd-admin", port::ADMIN)),
        tap_addr: SocketAddr::new(*ip, port("linkerd-control", port::TAP)),
        identity: Some(external_identity(workload)),
    });
    let itself = || ("external_workload".into(), workload.meta.name.name.clone());
    Workload {
        name: workload.meta.name.clone(),
        kind: WorkloadKind::External,
        owner: owner(reader, &workload.meta).unwrap_or_else(itself),
        services: Vec::new(),
        sidecar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::{self, Kind};

    fn workload(ip: &str, identity: &str) -> ExternalWorkload {
        let yaml = format!(
            "\
metadata: {{name: vm, namespace: mine}}
spec:
  meshTLS: {{identity: '{identity}', serverName: vm.test}}
  workloadIPs: [{{ip: '{ip}'}}]
"
        );
        let yaml = serde_yaml_ng::Deserializer::from_str(&yaml);
        match resources::decode(Kind::ExternalWorkload, yaml).unwrap() {
            Object::ExternalWorkload(workload) => (*workload).clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn external_workloads_with_an_address_or_identity_of_another_namespace_have_no_sidecar() {
        let (mine, theirs): (Arc<str>, Arc<str>) = ("mine".into(), "theirs".into());
        let entry = |ip: &str, namespace| (ip.parse().unwrap(), vec![namespace]);
        let namespaces_by_ip = NamespacesByIp::from([entry("10.0.0.1", &mine), entry("10.0.0.2", &theirs)]);
        let own = "vm.mine.serviceaccount.identity.linkerd.cluster.local";
        for (ip, identity, expected) in [
            ("10.0.0.1", own, true),
            ("10.0.0.9", own, true),
            ("10.0.0.9", "spiffe://root/vm", true),
            ("10.0.0.9", "vm.example.com", true),
            ("10.0.0.2", own, false),
            (
                "10.0.0.9",
                "web.theirs.serviceaccount.identity.linkerd.cluster.local",
                false,
            ),
            (
                "10.0.0.9",
                "a.mine.theirs.serviceaccount.identity.linkerd.cluster.local",
                false,
            ),
            (
                "10.0.0.9",
                "WEB.Theirs.ServiceAccount.identity.linkerd.cluster.local",
                false,
            ),
            ("127.0.0.1", own, false),
            ("0.0.0.0", own, false),
            ("::ffff:127.0.0.1", own, false),
            ("::ffff:10.0.0.2", own, false),
        ] {
            let workload = workload(ip, identity);
            let sidecar = Sidecar {
                admin_addr: SocketAddr::new(workload.ips[0], port::ADMIN),
                tap_addr: SocketAddr::new(workload.ips[0], port::TAP),
                identity: Some(external_identity(&workload)),
            };
            assert_eq!(
                belongs_to_namespace(&workload, &sidecar, &namespaces_by_ip),
                expected,
                "{ip} {identity}"
            );
        }
    }
}
