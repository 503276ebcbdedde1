//! `tulle diagnostics`: asks a running control plane what a proxy would ask, and shows the answer.
//!
//! It reads, and changes nothing. The control plane speaks plaintext with its own machine only: its pods are reached
//! through ports that the cluster forwards, and one without Kubernetes on its machine.

mod endpoints;
mod json;
mod policy;
mod profile;

use std::future::Future;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::{Subcommand, ValueEnum};
use http::uri::Authority;
use kube::ResourceExt as _;
use tonic::Status;
use tulle_control::tls::client::{self, Channel};
use tulle_core::addr::Addr;
use tulle_core::duration;
use tulle_core::names::port;

use crate::kubernetes::forward::{self, Forwarded};
use crate::kubernetes::resource::{Kind, Named};
use crate::kubernetes::{self, Cluster};
use crate::{metrics, runtime};

/// What to ask, whom, and how to show it.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    question: Question,
    /// Where endpoints and profiles are served without Kubernetes, such as 127.0.0.1:8086
    #[arg(long, global = true, value_name = "HOST:PORT")]
    destination_addr: Option<Addr>,
    /// Where policies are served without Kubernetes, such as 127.0.0.1:8090
    #[arg(long, global = true, value_name = "HOST:PORT")]
    policy_addr: Option<Addr>,
    /// The pod of the control plane to ask; the first that is ready if not given
    #[arg(long, global = true, value_name = "POD")]
    destination_pod: Option<String>,
    /// How the answer is shown
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// How long to wait for the answer
    #[arg(long, global = true, value_name = "DURATION", default_value = "5s", value_parser = duration::parse)]
    wait: Duration,
}

#[derive(Clone, Debug, Subcommand)]
enum Question {
    /// The endpoints of services
    Endpoints(endpoints::Args),
    /// The profile of a service or an address
    Profile(profile::Args),
    /// What a workload's port accepts, or how a client's traffic to an address is routed
    Policy(policy::Args),
    /// The metrics of the control plane
    ControllerMetrics,
    /// The metrics of proxies
    ProxyMetrics(metrics::Proxies),
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    /// A table, or YAML where the answer is no table
    #[value(alias = "yaml")]
    Table,
    Json,
}

/// Asks, and prints the answer.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    match &args.question {
        Question::ControllerMetrics => return metrics::controllers(flags),
        Question::ProxyMetrics(proxies) => return metrics::proxies(proxies, flags),
        Question::Endpoints(_) | Question::Profile(_) | Question::Policy(_) => {}
    }
    let asked = Asked { args, flags };
    let text = runtime()?.block_on(async {
        match &args.question {
            Question::Endpoints(question) => Box::pin(endpoints::ask(&asked, question)).await,
            Question::Profile(question) => Box::pin(profile::ask(&asked, question)).await,
            Question::Policy(question) => Box::pin(policy::ask(&asked, question)).await,
            Question::ControllerMetrics | Question::ProxyMetrics(_) => Ok(String::new()),
        }
    })?;
    crate::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// A question, and whom to ask it.
struct Asked<'a> {
    args: &'a Args,
    flags: &'a kubernetes::Flags,
}

impl Asked<'_> {
    async fn destination(&self) -> anyhow::Result<Channel> {
        let addr = self.args.destination_addr.as_ref().or(self.flags.api_addr.as_ref());
        self.connect(addr, port::DESTINATION, "--destination-addr").await
    }

    async fn policies(&self) -> anyhow::Result<Channel> {
        self.connect(self.args.policy_addr.as_ref(), port::POLICY, "--policy-addr")
            .await
    }

    async fn connect(&self, addr: Option<&Addr>, port: u16, flag: &str) -> anyhow::Result<Channel> {
        if let Some(addr) = addr {
            let connected = client::connect_plaintext(addr).await;
            return connected.with_context(|| format!("connecting to the control plane at the address of {flag}"));
        }
        let cluster = self.cluster(flag, port).await?;
        let pod = match &self.args.destination_pod {
            Some(pod) => pod.clone(),
            None => destination_pod(&cluster).await?,
        };
        let Forwarded { stream, .. } = forward::open(&cluster, &cluster.control_plane, &pod, port).await?;
        let authority = Authority::from_static("localhost");
        client::connect_over(stream, &authority)
            .await
            .with_context(|| format!("speaking to port {port} of pod {}/{pod}", cluster.control_plane))
    }

    async fn cluster(&self, flag: &str, port: u16) -> anyhow::Result<Cluster> {
        let cluster = self.flags.connect().await;
        cluster.with_context(|| {
            format!("asking a control plane on Kubernetes; ask one without it by {flag} 127.0.0.1:{port}")
        })
    }

    fn output(&self) -> Output {
        self.args.output
    }

    /// Bounds one exchange, and says in words what went wrong.
    async fn answer<T>(&self, api: &str, exchange: impl Future<Output = Result<T, Status>>) -> anyhow::Result<T> {
        match tokio::time::timeout(self.args.wait, exchange).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(status)) => Err(refusal(api, &status)),
            Err(_) => Err(anyhow!("{api} error: no answer within {:?}", self.args.wait)),
        }
    }
}

/// Reads as Linkerd's errors do: `Destination API error: Invalid authority: foo`.
fn refusal(api: &str, status: &Status) -> anyhow::Error {
    match status.message() {
        "" => anyhow!("{api} error: {:?}", status.code()),
        message => anyhow!("{api} error: {message}"),
    }
}

/// A pod of the control plane that answers.
async fn destination_pod(cluster: &Cluster) -> anyhow::Result<String> {
    let all = Named {
        kind: Kind::Pod,
        name: None,
    };
    let pods = all.pods(cluster, &cluster.control_plane).await?;
    let ready = pods.iter().find(|pod| {
        let component = pod
            .labels()
            .get("linkerd.io/control-plane-component")
            .map(String::as_str);
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions
            .into_iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        component == Some("destination") && ready
    });
    let pod = ready.with_context(|| {
        format!(
            "namespace {} has no pod of linkerd-destination that is ready; `tulle check` says why, -L names another namespace",
            cluster.control_plane
        )
    })?;
    Ok(pod.name_any())
}

/// A value that is no table, in the form asked for.
fn show(value: &serde_json::Value, output: Output) -> anyhow::Result<String> {
    Ok(match output {
        Output::Json => serde_json::to_string_pretty(value).context("writing JSON")? + "\n",
        Output::Table => serde_yaml_ng::to_string(value).context("writing YAML")?,
    })
}

const EXAMPLES: &str = "\
  tulle diagnostics endpoints web.shop.svc.cluster.local:80
  tulle diagnostics profile 10.96.0.10:80
  tulle diagnostics policy deploy/web 8080 -n shop
  tulle diagnostics policy svc/web 80 -n shop
  tulle diagnostics proxy-metrics deploy/web -n shop

Without Kubernetes, on the machine of the control plane:

  tulle diagnostics endpoints web.shop.svc.cluster.local:80 --destination-addr 127.0.0.1:8086
  tulle diagnostics policy shop/web-1 8080 --policy-addr 127.0.0.1:8090
  tulle diagnostics policy --outbound 10.96.0.10:80 --namespace shop --policy-addr 127.0.0.1:8090";
