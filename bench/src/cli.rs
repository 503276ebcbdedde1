//! The command line of `tulle-bench`.

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "tulle-bench",
    version,
    about = "Echo servers, a load generator and measurements for the tulle mesh"
)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Echo servers: HTTP/1, HTTP/2, gRPC, WebSocket, TCP.
    Serve(crate::serve::Args),
    /// Generates load and reports every outcome.
    Load(crate::load::Args),
    /// Measures tulle and other sidecars in network namespaces; needs root.
    Run(crate::run::Args),
    /// Compares builds of the proxy under many kinds of load; needs root.
    CompareBuilds(crate::run::compare::Args),
    /// Writes docs/reference/benchmarks.md and its plots from the JSON of a run.
    Document(crate::run::DocumentArgs),
    /// Counts the instructions and allocations per request and compares them with the baseline; needs root and valgrind.
    Costs(crate::run::costs::Args),
    /// Sends the HTTP/1 conformance cases through sidecars in network namespaces and reports the results; needs root.
    Conformance(crate::run::ConformanceArgs),
    /// Measures the control plane with many objects on an API server and many streams.
    ControlScale(crate::control_scale::Args),
    /// Measures the service mirror with many exported Services, between two API servers.
    MirrorScale(crate::mirror_scale::Args),
}

/// Runs the command.
///
/// # Errors
/// The command fails.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Serve(args) => crate::serve::main(args).context("serving"),
        Command::Load(args) => crate::load::main(&args).context("generating load"),
        Command::Run(args) => crate::run::main(&args).context("measuring"),
        Command::CompareBuilds(args) => crate::run::compare::main(&args).context("comparing builds"),
        Command::Document(args) => crate::run::document(&args).context("writing the document"),
        Command::Costs(args) => crate::run::costs::main(&args).context("counting costs"),
        Command::Conformance(args) => crate::run::conformance(&args).context("running the conformance tests"),
        Command::ControlScale(args) => crate::control_scale::main(&args).context("measuring the control plane"),
        Command::MirrorScale(args) => crate::mirror_scale::main(&args).context("measuring the service mirror"),
    }
}
