//! `tulle diagnostics policy`: who may reach a port, and how traffic to an address is routed.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use anyhow::Context as _;
use serde_json::json;
use tonic::Code;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec::Target};

use super::{json, refusal, show};

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Args {
    /// <namespace>/<name> of an external workload or a pod
    #[arg(required_unless_present = "outbound", conflicts_with = "outbound", requires = "port")]
    workload: Option<String>,
    /// A port of the workload
    port: Option<NonZeroU16>,
    /// Show how traffic to this address is routed: <ip>:<port>, or <service>.<namespace>.svc.<domain>:<port>
    #[arg(long, value_name = "ADDR")]
    outbound: Option<String>,
    /// The namespace of the client (with --outbound)
    #[arg(short, long, requires = "outbound", default_value = "default")]
    namespace: String,
}

pub(super) async fn ask(args: &super::Args, question: &Args) -> anyhow::Result<String> {
    match (&question.outbound, &question.workload, question.port) {
        (Some(target), ..) => outbound(args, target, &question.namespace).await,
        (None, Some(workload), Some(port)) => inbound(args, workload, port).await,
        (None, ..) => anyhow::bail!("a workload and a port are needed, or --outbound"),
    }
}

async fn inbound(args: &super::Args, workload: &str, port: NonZeroU16) -> anyhow::Result<String> {
    let (namespace, name) = workload
        .split_once('/')
        .with_context(|| format!("{workload:?} is not <namespace>/<name> of a workload"))?;
    let mut client = InboundServerPoliciesClient::new(args.policies().await?);
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
        match args.answer("Policy API", exchange).await? {
            Ok(server) => return show(&json::inbound::server(&server), args.output),
            Err(status) => last = Some(status),
        }
    }
    let status = last.context("nothing was asked")?;
    Err(refusal("Policy API", &status).context(format!("there is neither an ExternalWorkload nor a Pod {workload}")))
}

async fn outbound(args: &super::Args, target: &str, namespace: &str) -> anyhow::Result<String> {
    let target = match target.parse::<SocketAddr>() {
        Ok(addr) => Target::Addr(addr.into()),
        Err(_) => Target::Authority(target.to_owned()),
    };
    let mut client = OutboundPoliciesClient::new(args.policies().await?);
    let request = TrafficSpec {
        source_workload: json!({ "ns": namespace, "pod": "tulle-diagnostics" }).to_string(),
        target: Some(target),
    };
    let exchange = async { Ok(client.get(request).await?.into_inner()) };
    let policy = args.answer("Policy API", exchange).await?;
    show(&json::outbound::policy(&policy), args.output)
}
