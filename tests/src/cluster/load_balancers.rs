//! The load balancers of a cluster, as a cloud provides them: each Service of type `LoadBalancer` gets an address.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::sleep;

use super::addresses::ClusterAddresses;

/// Writes addresses into the status of each Service of type `LoadBalancer` that has none of one of its families, until the task is
/// aborted. The nodes forward connections to them to the endpoints of the Service.
pub(super) async fn assign_addresses(client: Client, addresses: ClusterAddresses) {
    let mut reported = String::new();
    loop {
        if let Err(error) = assign_missing_addresses(&client, addresses).await {
            let error = format!("{error:#}");
            if error != reported {
                eprintln!("cluster: no address for a load balancer: {error}");
                reported = error;
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

async fn assign_missing_addresses(client: &Client, addresses: ClusterAddresses) -> anyhow::Result<()> {
    let services = Api::<Service>::all(client.clone()).list(&ListParams::default()).await?;
    let services = services.items.iter();
    let services: Vec<_> = services.filter(|service| has_load_balancer(service)).collect();
    let used: BTreeSet<IpAddr> = services
        .iter()
        .flat_map(|service| assigned_addresses(service))
        .collect();
    let all = || (1..=254).map(|number| addresses.load_balancer(number));
    let mut free = all().filter(|addrs| addrs.iter().all(|addr| !used.contains(addr)));
    for service in services {
        let (families, assigned) = (ip_families(service), assigned_addresses(service));
        if assigned.len() == families.len() {
            continue;
        }
        // A Service that gets another family keeps the address that it has.
        let addrs = match assigned.first() {
            Some(assigned) => all().find(|addrs| addrs.contains(assigned)),
            None => free.next(),
        };
        let addrs = addrs.context("all addresses of load balancers are in use")?;
        let of_families = addrs
            .iter()
            .filter(|addr| families.contains(&if addr.is_ipv4() { "IPv4" } else { "IPv6" }));
        let ingress: Vec<_> = of_families.map(|addr| json!({"ip": addr})).collect();
        let namespace = service.namespace().context("the namespace of a Service")?;
        let api = Api::<Service>::namespaced(client.clone(), &namespace);
        let status = json!({"status": {"loadBalancer": {"ingress": ingress}}});
        api.patch_status(&service.name_any(), &PatchParams::default(), &Patch::Merge(status))
            .await?;
    }
    Ok(())
}

fn has_load_balancer(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    spec.and_then(|spec| spec.type_.as_deref()) == Some("LoadBalancer")
}

/// `IPv4` and `IPv6`, as far as the Service has them.
fn ip_families(service: &Service) -> Vec<&str> {
    let families = service.spec.iter().flat_map(|spec| spec.ip_families.iter().flatten());
    families.map(String::as_str).collect()
}

fn assigned_addresses(service: &Service) -> Vec<IpAddr> {
    let status = service.status.iter().flat_map(|status| &status.load_balancer);
    let ingress = status.flat_map(|balancer| balancer.ingress.iter().flatten());
    ingress
        .filter_map(|ingress| ingress.ip.as_ref()?.parse().ok())
        .collect()
}

const POLL_INTERVAL: Duration = Duration::from_millis(500);
