//! Options of `tulle demo`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use tulle_core::duration;

use super::faults::Fault;

#[derive(clap::Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, after_long_help = HELP)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(super) action: Option<Action>,
    /// Run for this many seconds, check the result, and exit. If SECONDS is at least 20, the control plane is stopped for 10
    /// seconds after the first quarter of the run
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(super) once: Option<u64>,
    /// How the load generator's sidecar balances over web's replicas
    #[arg(long, value_enum, default_value_t = Balancer::PeakEwma)]
    pub(super) balancer: Balancer,
    /// A directory of manifests to use instead of the built-in ones. The control plane reads them again when they change; hosts
    /// and applications stay as they were at the start
    #[arg(long, value_name = "DIR")]
    pub(super) manifests: Option<PathBuf>,
    /// Write the final table as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Output format of the final table [default: table; with --once and without --json, also JSON]
    #[arg(short, long, value_enum)]
    pub(super) output: Option<Output>,
}

#[derive(Clone, Debug, Subcommand)]
pub(super) enum Action {
    /// Inject a fault into the running demo, from another terminal
    Break {
        fault: Fault,
        /// How long the process stays stopped; has no effect on `certificate`, which ends when all sidecars have renewed their
        /// certificates
        #[arg(long = "for", value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
        length: Duration,
    },
    /// Wait until a demo ends, and clean up after it
    #[command(hide = true)]
    Cleanup { demo_pid: u32 },
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Balancer {
    /// The cheaper of two random replicas, by latency and load
    PeakEwma,
    /// Each replica in turn, for comparison
    RoundRobin,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Output {
    Table,
    Json,
}

const HELP: &str = "\
Builds a mesh in network namespaces: a control plane fed from manifests; a load generator, a service `web` with three
replicas of which one is slow, a WebSocket service `ws` and a TCP service `tcp`, each with redirected traffic and a
sidecar; and a host `outside` the mesh, which is refused. Then shows one row per edge, each second:

  REQ/S, SUCCESS, P50..P99  what the client sees; latency from the scheduled time of a request
  BYTES/S                   payload in both directions
  CLIENT IDENTITY           identity verified by the server's sidecar; `-` if none
  SERVER IDENTITY           identity verified by the client's sidecar

Inject faults from another terminal, and watch the traffic continue:

  tulle demo break control-plane --for 20s
  tulle demo break replica
  tulle demo break certificate

For scripts and CI: `tulle demo --once 30` checks its result and exits with 1 if a check fails.";
