//! `tulle-bench serve | load | run | compare-builds | document | costs | conformance | control-scale`.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "tulle-bench",
    version,
    about = "Workloads and measurements for the tulle mesh"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Echo servers: HTTP/1, HTTP/2, gRPC, WebSocket, TCP.
    Serve(tulle_bench::serve::Args),
    /// Generates load and reports every outcome.
    Load(tulle_bench::load::Args),
    /// Measures tulle and other sidecars in network namespaces; needs root.
    Run(tulle_bench::run::Args),
    /// Compares builds of the proxy under many kinds of load; needs root.
    CompareBuilds(tulle_bench::run::compare::Args),
    /// Writes docs/reference/benchmarks.md and its plots from the JSON of a run.
    Document(tulle_bench::run::DocumentArgs),
    /// Counts the instructions and allocations per request and compares them with the baseline; needs root and valgrind.
    Costs(tulle_bench::run::costs::Args),
    /// Sends the HTTP/1 conformance cases through sidecars in network namespaces and reports the results; needs root.
    Conformance(tulle_bench::run::ConformanceArgs),
    /// Measures the control plane with many objects on an API server and many streams.
    ControlScale(tulle_bench::control_scale::Args),
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tulle-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Serve(args) => tulle_bench::serve::main(args).context("serving"),
        Command::Load(args) => tulle_bench::load::main(&args).context("generating load"),
        Command::Run(args) => tulle_bench::run::main(&args).context("measuring"),
        Command::CompareBuilds(args) => tulle_bench::run::compare::main(&args).context("comparing builds"),
        Command::Document(args) => tulle_bench::run::document(&args).context("writing the document"),
        Command::Costs(args) => tulle_bench::run::costs::main(&args).context("counting costs"),
        Command::Conformance(args) => tulle_bench::run::conformance(&args).context("running the conformance tests"),
        Command::ControlScale(args) => tulle_bench::control_scale::main(&args).context("measuring the control plane"),
    }
}
