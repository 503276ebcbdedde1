//! Who is there to be looked at: workloads, whose they are, and where their sidecars are.
//!
//! This is no view that is kept: telemetry asks for it when somebody asks telemetry.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;

use tulle_core::names::port;

use crate::cluster::Config;
use crate::cluster::lookup::Reader;
use crate::cluster::store::Store;
use crate::cluster::workload::{external_identity, owner, pod_identity};
use crate::model::endpoints::TlsIdentity;
use crate::resources::Object;
use crate::resources::meta::Name;
use crate::resources::workload::{ExternalWorkload, Pod, ProxyContainer};

/// A pod that runs, or an external workload.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: Name,
    /// What it is itself.
    pub kind: MemberKind,
    /// The kind of what it belongs to, as labels of metrics spell it, and its name; itself if there is nothing else.
    pub owner: (Cow<'static, str>, Arc<str>),
    /// The services that select it, in the order of their names.
    pub services: Vec<Arc<str>>,
    pub sidecar: Option<Sidecar>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberKind {
    Pod,
    External,
}

/// Where a sidecar can be asked.
#[derive(Clone, Debug)]
pub struct Sidecar {
    pub admin: SocketAddr,
    pub tap: SocketAddr,
    /// Who it is; nobody whose certificate comes from elsewhere.
    pub identity: Option<TlsIdentity>,
}

/// The members in a namespace, or everywhere, in the order of their names.
pub(super) fn members(store: &Store, config: &Config, namespace: Option<&str>) -> Vec<Member> {
    let reader = Reader::new(store);
    let mut members = Vec::new();
    let mut services = Vec::new();
    for object in store.all() {
        if namespace.is_some_and(|namespace| *namespace != **object.meta().namespace()) {
            continue;
        }
        match object {
            Object::Pod(pod) if pod.is_serving() => members.push((of_pod(&reader, config, pod), &pod.meta.labels)),
            Object::ExternalWorkload(workload) => {
                members.push((of_external(&reader, workload), &workload.meta.labels));
            }
            Object::Service(service) if !service.selector.is_empty() => services.push(service),
            _ => {}
        }
    }
    services.sort_by(|a, b| a.meta.name.cmp(&b.meta.name));
    members.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let with_services = members.into_iter().map(|(mut member, labels)| {
        let selects = |selector: &std::collections::BTreeMap<String, String>| {
            selector.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        let selecting = services
            .iter()
            .filter(|service| service.meta.namespace() == &member.name.namespace && selects(&service.selector));
        member.services = selecting.map(|service| service.meta.name.name.clone()).collect();
        member
    });
    with_services.collect()
}

fn of_pod(reader: &Reader<'_>, config: &Config, pod: &Pod) -> Member {
    let sidecar = match (pod.proxy, pod.ips.first()) {
        (ProxyContainer::Present { admin, control, .. }, Some(ip)) => Some(Sidecar {
            admin: SocketAddr::new(*ip, admin),
            tap: SocketAddr::new(*ip, control),
            identity: pod_identity(config, pod),
        }),
        _ => None,
    };
    Member {
        name: pod.meta.name.clone(),
        kind: MemberKind::Pod,
        owner: owner(reader, &pod.meta),
        services: Vec::new(),
        sidecar,
    }
}

fn of_external(reader: &Reader<'_>, workload: &ExternalWorkload) -> Member {
    let port = |name: &str, default: u16| {
        let named = workload.ports.iter().find(|port| port.name.as_deref() == Some(name));
        named.map_or(default, |port| port.port)
    };
    let sidecar = workload.ips.first().map(|ip| Sidecar {
        admin: SocketAddr::new(*ip, port("linkerd-admin", port::ADMIN)),
        tap: SocketAddr::new(*ip, port("linkerd-control", port::TAP)),
        identity: Some(external_identity(workload)),
    });
    let owner = match owner(reader, &workload.meta) {
        (kind, _) if kind == "pod" => ("external_workload".into(), workload.meta.name.name.clone()),
        owner => owner,
    };
    Member {
        name: workload.meta.name.clone(),
        kind: MemberKind::External,
        owner,
        services: Vec::new(),
        sidecar,
    }
}
