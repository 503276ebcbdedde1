//! View: the endpoints of a service port.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use tulle_core::names::{annotation, label};

use crate::cluster::lookup::Reader;
use crate::cluster::metrics::{Metrics, SlotMetrics};
use crate::cluster::table::{Table, View};
use crate::cluster::workload::{external_endpoint, is_taken, pod_endpoint};
use crate::cluster::{Config, EndpointsFrom, H2Upgrade, Ipv6, State};
use crate::model::endpoints::{
    Endpoint, Endpoints, Existence, Http2Params, ProtocolHint, TlsIdentity, TrafficScope, Workload,
};
use crate::resources::meta::{Meta, Name};
use crate::resources::service::{Address, InternalTraffic, Readiness, Service, ServiceKind, Subset, Target, Unready};

/// A service port, or one pod of a headless service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub service: Name,
    pub port: u16,
    pub hostname: Option<String>,
}

pub(super) struct EndpointsView;

impl View for EndpointsView {
    type Key = Key;
    type Value = Endpoints;

    fn compute(reader: &Reader<'_>, config: &Config, key: &Key) -> Endpoints {
        let Some(service) = reader.service(&key.service) else {
            return Endpoints::default();
        };
        if service.kind == ServiceKind::ExternalName {
            return Endpoints {
                existence: Existence::ExternalName,
                ..Endpoints::default()
            };
        }
        let (mut addresses, mut leaving) = (BTreeMap::new(), BTreeMap::new());
        for (meta, subset) in subsets(reader, config, service) {
            // Slices of a service that lists no ports list none either, and say nothing of any port.
            if subset.ports.is_empty() {
                continue;
            }
            let Some(port) = target_port(service, key.port, subset) else {
                continue;
            };
            for address in subset.addresses.iter().filter(|address| is_wanted(address, key)) {
                let mirror = Mirror { meta, port: key.port };
                if let Some((endpoint, stay)) = resolve(reader, config, address, port, &mirror) {
                    let among = match (stay, service.unready) {
                        (Stay::Ends, Unready::Withheld) => &mut leaving,
                        (Stay::Ends, Unready::Published) | (Stay::Lasts, _) => &mut addresses,
                    };
                    among.insert(endpoint.addr, Arc::new(endpoint));
                }
            }
        }
        // Slices may name the old pod still and the new one not yet; the old one is better than nobody.
        if addresses.is_empty() {
            addresses = leaving;
        }
        prefer_family(config, &mut addresses);
        let is_hinted = |endpoint: &Arc<Endpoint>| !endpoint.hint_nodes.is_empty();
        let scope = match service.traffic {
            InternalTraffic::Local => TrafficScope::Node,
            // As hints of zones, those of nodes count only when every endpoint has them.
            InternalTraffic::Cluster if !addresses.is_empty() && addresses.values().all(is_hinted) => {
                TrafficScope::HintedNode
            }
            InternalTraffic::Cluster => TrafficScope::Cluster,
        };
        Endpoints {
            existence: Existence::Present,
            scope,
            addresses,
        }
    }

    fn metrics(metrics: &Metrics, key: &Key, _value: &Endpoints) -> SlotMetrics {
        metrics.endpoints(&key.service, key.port, key.hostname.as_deref())
    }

    fn observe(metrics: &SlotMetrics, value: &Endpoints) {
        metrics.sized(value.addresses.len(), value.existence == Existence::Present);
    }

    fn share(old: &Endpoints, new: &mut Endpoints) {
        for (addr, endpoint) in &mut new.addresses {
            if let Some(old) = old.addresses.get(addr)
                && old == endpoint
            {
                *endpoint = old.clone();
            }
        }
    }

    fn table(state: &mut State) -> &mut Table<Self> {
        &mut state.endpoints
    }
}

/// The addresses of a service, from whichever kind of object drives, each with the metadata of its object.
pub(super) fn subsets<'a>(reader: &Reader<'a>, config: &Config, service: &Service) -> Vec<(&'a Meta, &'a Subset)> {
    match config.endpoints_from {
        EndpointsFrom::Slices => reader
            .slices_of(&service.meta.name)
            .into_iter()
            .map(|slice| (&slice.meta, &slice.subset))
            .collect(),
        EndpointsFrom::Endpoints => reader
            .endpoints(&service.meta.name)
            .into_iter()
            .flat_map(|endpoints| endpoints.subsets.iter().map(|subset| (&endpoints.meta, subset)))
            .collect(),
    }
}

/// Found by the name of the service's port; a port that the service does not list stands for itself.
fn target_port(service: &Service, port: u16, subset: &Subset) -> Option<u16> {
    match service.port(port) {
        Some(listed) => subset
            .ports
            .iter()
            .find(|port| port.name == listed.name)
            .map(|port| port.port),
        None => Some(port),
    }
}

fn is_wanted(address: &Address, key: &Key) -> bool {
    let named = key.hostname.is_none() || address.hostname == key.hostname;
    named && address.ready != Readiness::NotReady
}

/// Whether it is going: its slice says so, or it is a pod that is being deleted, whose application may listen no more by
/// the time the slices say so.
#[derive(Clone, Copy)]
enum Stay {
    Lasts,
    Ends,
}

fn resolve(
    reader: &Reader<'_>,
    config: &Config,
    address: &Address,
    port: u16,
    mirror: &Mirror<'_>,
) -> Option<(Endpoint, Stay)> {
    let mut stay = match address.ready {
        Readiness::Leaving => Stay::Ends,
        Readiness::Ready | Readiness::NotReady => Stay::Lasts,
    };
    let mut endpoint = match &address.target {
        Target::Pod(name) => {
            let pod = reader.pod(name)?;
            if pod.meta.terminating {
                stay = Stay::Ends;
            }
            pod_endpoint(reader, config, pod, address.ip, port)?
        }
        Target::ExternalWorkload(name) => {
            let workload = reader.external_workload(name)?;
            if is_taken(reader, workload, address.ip) {
                return None;
            }
            external_endpoint(reader, config, workload, address.ip, port)
        }
        Target::Nothing => mirror.endpoint(config, address.ip, port),
        Target::Other => return None,
    };
    endpoint.node = endpoint.node.or_else(|| address.node.clone());
    endpoint.zone = address.zone.clone();
    endpoint.hint_zones = address.hint_zones.clone();
    endpoint.hint_nodes = address.hint_nodes.clone();
    Some((endpoint, stay))
}

/// The object that lists an address without a workload, and the port that was asked for: the address may be that of a
/// gateway to another cluster.
struct Mirror<'a> {
    meta: &'a Meta,
    port: u16,
}

impl Mirror<'_> {
    fn endpoint(&self, config: &Config, ip: IpAddr, port: u16) -> Endpoint {
        let mut endpoint = Endpoint::bare((ip, port).into());
        let annotated = |key| self.meta.annotation(key).filter(|text| !text.is_empty());
        let remote = annotated(annotation::REMOTE_SERVICE_NAME);
        endpoint.authority_override = remote.map(|name| format!("{name}:{}", self.port).into());
        if let Some(identity) = annotated(annotation::REMOTE_GATEWAY_IDENTITY) {
            let name: Arc<str> = identity.into();
            endpoint.identity = Some(TlsIdentity::Dns {
                server_name: name.clone(),
                name,
            });
            endpoint.protocol = (config.h2_upgrade == H2Upgrade::Offer).then_some(ProtocolHint::H2);
            endpoint.http2 = Http2Params::Configured;
        }
        if let Some(cluster) = self.meta.label(label::MIRRORED_CLUSTER) {
            endpoint.labels.push(("target_cluster".into(), cluster.into()));
            // Of one pod of a headless Service the name has a label more.
            let labels: Vec<&str> = remote.unwrap_or_default().split('.').collect();
            let at = labels
                .iter()
                .position(|label| *label == "svc")
                .and_then(|at| at.checked_sub(2));
            if let Some([service, namespace]) = at.and_then(|at| labels.get(at..at + 2)) {
                endpoint.labels.push(("target_service".into(), (*service).into()));
                endpoint
                    .labels
                    .push(("target_service_namespace".into(), (*namespace).into()));
            }
        }
        endpoint
    }
}

/// Without IPv6 its addresses are dropped; with it, it is preferred for workloads that have both.
fn prefer_family(config: &Config, addresses: &mut BTreeMap<std::net::SocketAddr, Arc<Endpoint>>) {
    match config.ipv6 {
        Ipv6::Drop => addresses.retain(|addr, _| addr.is_ipv4()),
        Ipv6::Serve => {
            let twins: HashSet<Workload> = addresses
                .values()
                .filter(|endpoint| endpoint.addr.is_ipv6() && endpoint.workload != Workload::Unknown)
                .map(|endpoint| endpoint.workload.clone())
                .collect();
            addresses.retain(|addr, endpoint| addr.is_ipv6() || !twins.contains(&endpoint.workload));
        }
    }
}
