//! `tulle diagnostics policy`: which clients may reach a port, and how traffic to an address is routed.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use anyhow::Context as _;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tonic::Code;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec::Target};

use super::context::{QueryContext, format_response, status_error};
use super::json;
use crate::config;
use crate::kubernetes::resource::{self, Kind, ResourceRef};

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Args {
    /// A resource with pods, such as deploy/web, or <namespace>/<name> of a pod or ExternalWorkload: shows which clients may connect
    /// to PORT. A Service, such as svc/web: shows how requests to its PORT are routed
    #[arg(required_unless_present = "outbound", conflicts_with = "outbound", requires = "port")]
    resource: Option<String>,
    /// A port of the resource
    port: Option<NonZeroU16>,
    /// Show how traffic to this address is routed: <ip>:<port>, or <service>.<namespace>.svc.<domain>:<port>
    #[arg(long, value_name = "ADDR")]
    outbound: Option<String>,
    /// The namespace of the resource, or of the client with --outbound
    #[arg(short, long, default_value = "default")]
    namespace: String,
}

pub(super) async fn query(query_context: &QueryContext<'_>, args: &Args) -> anyhow::Result<String> {
    let namespace = &args.namespace;
    match (&args.outbound, &args.resource, args.port) {
        (Some(target), ..) => query_outbound(query_context, target, namespace).await,
        (None, Some(resource), Some(port)) => match ResourceRef::parse(std::slice::from_ref(resource)) {
            Ok(ResourceRef {
                kind: Kind::Service,
                name: Some(name),
            }) => {
                let values = async { config::values(&query_context.flags.connect().await?).await }.await;
                let domain = cluster_domain(values, query_context.has_policy_addr())?;
                query_outbound(
                    query_context,
                    &format!("{name}.{namespace}.svc.{domain}:{port}"),
                    namespace,
                )
                .await
            }
            Ok(resource_ref) => {
                let cluster = query_context.flags.connect().await?;
                let pods = resource_ref.pods(&cluster, namespace).await?;
                let pod = pods
                    .first()
                    .with_context(|| format!("{resource} of namespace {namespace} has no pods"))?;
                let pod_namespace = resource::namespace(pod);
                query_inbound(query_context, &format!("{pod_namespace}/{}", pod.name_any()), port).await
            }
            // If the first part is not a resource type, it is a namespace.
            Err(_) => query_inbound(query_context, resource, port).await,
        },
        (None, ..) => anyhow::bail!("a resource and a port are required, or --outbound"),
    }
}

/// Returns the cluster's domain in the configuration. If the configuration cannot be read and `--policy-addr` is given, returns the
/// default domain.
fn cluster_domain(values: anyhow::Result<Value>, has_policy_addr: bool) -> anyhow::Result<String> {
    let configured = match values {
        Ok(values) => values["clusterDomain"].as_str().map(str::to_owned),
        Err(error) if has_policy_addr => {
            eprintln!(
                "tulle: using the cluster domain {DEFAULT_CLUSTER_DOMAIN}, because the configuration of a cluster cannot be read: {error:#}"
            );
            None
        }
        Err(error) => return Err(error),
    };
    Ok(configured.unwrap_or_else(|| DEFAULT_CLUSTER_DOMAIN.to_owned()))
}

async fn query_inbound(query_context: &QueryContext<'_>, workload: &str, port: NonZeroU16) -> anyhow::Result<String> {
    let (namespace, name) = workload.split_once('/').with_context(|| {
        format!("{workload:?} is neither a resource such as deploy/web, nor <namespace>/<name> of a workload")
    })?;
    let mut client = InboundServerPoliciesClient::new(query_context.connect_to_policy().await?);
    let mut not_found = None;
    // The kind of the workload is unknown, so both kinds are queried.
    for kind in ["external_workload", "pod"] {
        let request = PortSpec {
            workload: json!({ "ns": namespace, kind: name }).to_string(),
            port: u32::from(port.get()),
        };
        let exchange = async {
            match client.get_port(request).await {
                Ok(server) => Ok(Ok(server.into_inner())),
                Err(status) if status.code() == Code::NotFound => Ok(Err(status)),
                Err(status) => Err(status),
            }
        };
        match query_context.with_timeout("Policy API", exchange).await? {
            Ok(server) => return format_response(&json::inbound::server(&server), query_context.output()),
            Err(status) => not_found = Some(status),
        }
    }
    let status = not_found.context("no query was sent")?;
    Err(status_error("Policy API", &status)
        .context(format!("there is neither an ExternalWorkload nor a Pod {workload}")))
}

async fn query_outbound(query_context: &QueryContext<'_>, target: &str, namespace: &str) -> anyhow::Result<String> {
    let target = match target.parse::<SocketAddr>() {
        Ok(addr) => Target::Addr(addr.into()),
        Err(_) => Target::Authority(target.to_owned()),
    };
    let mut client = OutboundPoliciesClient::new(query_context.connect_to_policy().await?);
    let request = TrafficSpec {
        source_workload: json!({ "ns": namespace, "pod": "tulle-diagnostics" }).to_string(),
        target: Some(target),
    };
    let exchange = async { Ok(client.get(request).await?.into_inner()) };
    let policy = query_context.with_timeout("Policy API", exchange).await?;
    format_response(&json::outbound::policy(&policy), query_context.output())
}

const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_needs_no_cluster_if_the_address_of_the_policy_service_is_given() {
        let unreachable = || Err(anyhow::anyhow!("there is no kubeconfig"));
        assert_eq!(cluster_domain(unreachable(), true).unwrap(), "cluster.local");
        assert!(cluster_domain(unreachable(), false).is_err());
        let configured = json!({ "clusterDomain": "example.org" });
        assert_eq!(cluster_domain(Ok(configured), true).unwrap(), "example.org");
    }
}
