//! `tulle demo`: a whole mesh of the shipped binaries on this machine, and a live table of what it does.
//!
//! [`topology`] says what there is, as the manifests have it; [`stage`] builds it; [`run`] watches, breaks and judges it.
//! Nothing here looks into the binaries: they are started as an operator would start them, and asked over their ports.

mod broken;
mod checks;
mod credentials;
mod edges;
mod faults;
mod janitor;
mod load;
mod manifests;
mod outcome;
mod process;
mod rows;
mod run;
mod rundir;
mod scrape;
mod stage;
mod table;
mod topology;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Subcommand, ValueEnum};
use tulle_core::{duration, netns};

use self::faults::Fault;

/// How to run the demo.
#[derive(clap::Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, after_long_help = HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    /// Run this many seconds, break the control plane for 10 of them (from 20 on), check the result, and end
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(5..=3600))]
    once: Option<u64>,
    /// How the load generator's sidecar chooses among web's replicas
    #[arg(long, value_enum, default_value_t = Balancer::PeakEwma)]
    balancer: Balancer,
    /// Your own manifests instead of the built-in ones; read again when they change
    #[arg(long, value_name = "DIR")]
    manifests: Option<PathBuf>,
    /// Write the final table as JSON into this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What the final table is printed as; both if not given
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

#[derive(Clone, Debug, Subcommand)]
enum Action {
    /// Break a part of the running demo, from another terminal
    Break {
        fault: Fault,
        /// How long it stays broken
        #[arg(long = "for", value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
        length: Duration,
    },
    /// Wait for the end of a demo and clean up after it
    #[command(hide = true)]
    Janitor { demo: u32 },
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Balancer {
    /// The cheaper of two random replicas, by latency and load
    PeakEwma,
    /// Each replica in turn, to compare with
    RoundRobin,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    Table,
    Json,
}

/// Runs the demo, or breaks the one that runs.
///
/// Call it before there is any thread: without root it starts itself again in a user namespace.
pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    match args.action {
        None => {}
        Some(Action::Janitor { demo }) => return janitor::main(demo).map(|()| ExitCode::SUCCESS),
        Some(Action::Break { fault, length }) => return break_running(fault, length),
    }
    netns::enter_user_namespace(&[stage::PROXY_UID, stage::APP_UID, stage::CONTROL_UID])
        .context("the demo makes network namespaces, which needs root or a user namespace")?;
    runtime()?.block_on(run::main(args))
}

fn break_running(fault: Fault, length: Duration) -> anyhow::Result<ExitCode> {
    ensure!(
        (MIN_FAULT..=MAX_FAULT).contains(&length),
        "--for {length:?}: something can be broken for {MIN_FAULT:?} to {MAX_FAULT:?}"
    );
    println!("{}", runtime()?.block_on(faults::ask(fault, length))?);
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")
}

/// How long something may be broken.
const MIN_FAULT: Duration = Duration::from_secs(1);
/// Certificates live much longer, so that only what is broken is.
const MAX_FAULT: Duration = Duration::from_secs(600);

const HELP: &str = "\
Builds a mesh in network namespaces: a control plane fed from manifests; a load generator, a service `web` with three
replicas of which one is slow, a WebSocket service `ws` and a TCP service `tcp`, each with redirected traffic and a
sidecar; and a host `outside` that is in no mesh and is refused. Then shows one row per edge, each second:

  REQ/S, SUCCESS, P50..P99  what the client sees; latency from the time a request was due
  BYTES/S                   payload in both directions
  CLIENT IDENTITY           whom the server's sidecar has verified; `-` is nobody
  SERVER IDENTITY           whom the client's sidecar has verified

Break it from another terminal, and watch the traffic go on:

  tulle demo break control-plane --for 20s
  tulle demo break replica
  tulle demo break certificate

Without a terminal, as in CI, `tulle demo --once 30` checks itself and ends with 1 if anything is off.";
