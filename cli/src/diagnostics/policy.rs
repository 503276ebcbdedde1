//! `tulle diagnostics policy`: who may reach a port, and how traffic to an address is routed.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use anyhow::Context as _;
use kube::ResourceExt as _;
use serde_json::json;
use tonic::Code;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec::Target};

use super::{json, refusal, show};
use crate::config;
use crate::kubernetes::resource::{Kind, Named};

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Args {
    /// deploy/web or another resource with pods, svc/web for the client's side, or <namespace>/<name> of a workload
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

pub(super) async fn ask(asked: &super::Asked<'_>, question: &Args) -> anyhow::Result<String> {
    let namespace = &question.namespace;
    match (&question.outbound, &question.resource, question.port) {
        (Some(target), ..) => outbound(asked, target, namespace).await,
        (None, Some(resource), Some(port)) => match Named::parse(std::slice::from_ref(resource)) {
            Ok(Named {
                kind: Kind::Service,
                name: Some(name),
            }) => {
                let values = config::values(&asked.flags.connect().await?).await?;
                let domain = values["clusterDomain"].as_str().unwrap_or("cluster.local");
                outbound(asked, &format!("{name}.{namespace}.svc.{domain}:{port}"), namespace).await
            }
            Ok(named) => {
                let cluster = asked.flags.connect().await?;
                let pods = named.pods(&cluster, namespace).await?;
                let pod = pods
                    .first()
                    .with_context(|| format!("{resource} of namespace {namespace} has no pods"))?;
                inbound(asked, &format!("{namespace}/{}", pod.name_any()), port).await
            }
            // What is no type of a resource is a namespace.
            Err(_) => inbound(asked, resource, port).await,
        },
        (None, ..) => anyhow::bail!("a resource and a port are needed, or --outbound"),
    }
}

async fn inbound(asked: &super::Asked<'_>, workload: &str, port: NonZeroU16) -> anyhow::Result<String> {
    let (namespace, name) = workload.split_once('/').with_context(|| {
        format!("{workload:?} is neither a resource such as deploy/web, nor <namespace>/<name> of a workload")
    })?;
    let mut client = InboundServerPoliciesClient::new(asked.policies().await?);
    let mut last = None;
    // The name alone does not tell which kind it is.
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
        match asked.answer("Policy API", exchange).await? {
            Ok(server) => return show(&json::inbound::server(&server), asked.output()),
            Err(status) => last = Some(status),
        }
    }
    let status = last.context("nothing was asked")?;
    Err(refusal("Policy API", &status).context(format!("there is neither an ExternalWorkload nor a Pod {workload}")))
}

async fn outbound(asked: &super::Asked<'_>, target: &str, namespace: &str) -> anyhow::Result<String> {
    let target = match target.parse::<SocketAddr>() {
        Ok(addr) => Target::Addr(addr.into()),
        Err(_) => Target::Authority(target.to_owned()),
    };
    let mut client = OutboundPoliciesClient::new(asked.policies().await?);
    let request = TrafficSpec {
        source_workload: json!({ "ns": namespace, "pod": "tulle-diagnostics" }).to_string(),
        target: Some(target),
    };
    let exchange = async { Ok(client.get(request).await?.into_inner()) };
    let policy = asked.answer("Policy API", exchange).await?;
    show(&json::outbound::policy(&policy), asked.output())
}
