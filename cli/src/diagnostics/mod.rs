//! `tulle diagnostics`: asks a running control plane what a proxy would ask, and shows the answer.
//!
//! It reads, and changes nothing. The control plane speaks plaintext with its own machine only: run it there, or through
//! a forwarded port.

mod endpoints;
mod json;
mod policy;
mod profile;

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::{Subcommand, ValueEnum};
use tonic::Status;
use tulle_control::tls::client::{self, Channel};
use tulle_core::addr::Addr;
use tulle_core::duration;

/// What to ask, whom, and how to show it.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    question: Question,
    /// Where endpoints and profiles are served
    #[arg(long, global = true, value_name = "HOST:PORT", default_value = "127.0.0.1:8086")]
    destination_addr: Addr,
    /// Where policies are served
    #[arg(long, global = true, value_name = "HOST:PORT", default_value = "127.0.0.1:8090")]
    policy_addr: Addr,
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
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    /// A table, or YAML where the answer is no table
    Table,
    Json,
}

/// Asks, and prints the answer.
pub(crate) fn main(args: &Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")?;
    let text = runtime.block_on(async {
        match &args.question {
            Question::Endpoints(question) => endpoints::ask(args, question).await,
            Question::Profile(question) => profile::ask(args, question).await,
            Question::Policy(question) => policy::ask(args, question).await,
        }
    })?;
    print!("{text}");
    Ok(())
}

impl Args {
    async fn destination(&self) -> anyhow::Result<Channel> {
        connect(&self.destination_addr, "--destination-addr").await
    }

    async fn policies(&self) -> anyhow::Result<Channel> {
        connect(&self.policy_addr, "--policy-addr").await
    }

    /// Bounds one exchange, and says in words what went wrong.
    async fn answer<T>(&self, api: &str, exchange: impl Future<Output = Result<T, Status>>) -> anyhow::Result<T> {
        match tokio::time::timeout(self.wait, exchange).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(status)) => Err(refusal(api, &status)),
            Err(_) => Err(anyhow!("{api} error: no answer within {:?}", self.wait)),
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

async fn connect(addr: &Addr, flag: &str) -> anyhow::Result<Channel> {
    client::connect_plaintext(addr).await.with_context(|| {
        format!("connecting to the control plane; run this on its machine, forward its port, or give {flag}")
    })
}

/// A value that is no table, in the form asked for.
fn show(value: &serde_json::Value, output: Output) -> anyhow::Result<String> {
    Ok(match output {
        Output::Json => serde_json::to_string_pretty(value).context("writing JSON")? + "\n",
        Output::Table => serde_yaml_ng::to_string(value).context("writing YAML")?,
    })
}

const EXAMPLES: &str = "\
  tulle diagnostics endpoints web.demo.svc.cluster.local:80
  tulle diagnostics profile 10.96.0.10:80
  tulle diagnostics policy demo/web-1 8080
  tulle diagnostics policy --outbound 10.96.0.10:80 --namespace demo";
