//! The load balancers of a cluster, as a cloud provides them: each Service of type `LoadBalancer` gets an address.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::sleep;

use super::addresses::ClusterAddresses;

/// Writes an address into the status of each Service of type `LoadBalancer` that has none, until the task is aborted. The nodes
/// forward connections to it to the endpoints of the Service.
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
    let (with_address, without): (Vec<_>, Vec<_>) = services
        .items
        .into_iter()
        .filter(|service| service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("LoadBalancer"))
        .partition(|service| assigned_address(service).is_some());
    let mut used: BTreeSet<String> = with_address
        .iter()
        .filter_map(assigned_address)
        .map(str::to_owned)
        .collect();
    for service in without {
        let mut all = (1..=254).map(|number| addresses.load_balancer(number).to_string());
        let free = all.find(|addr| !used.contains(addr));
        let free = free.context("all addresses of load balancers are in use")?;
        let namespace = service.namespace().context("the namespace of a Service")?;
        let api = Api::<Service>::namespaced(client.clone(), &namespace);
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": free}]}}});
        api.patch_status(&service.name_any(), &PatchParams::default(), &Patch::Merge(status))
            .await?;
        used.insert(free);
    }
    Ok(())
}

fn assigned_address(service: &Service) -> Option<&str> {
    let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?;
    ingress.first()?.ip.as_deref()
}

const POLL_INTERVAL: Duration = Duration::from_millis(500);
