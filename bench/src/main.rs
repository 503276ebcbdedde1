//! `tulle-bench serve | load | run | compare-builds | document | costs | conformance | control-scale | mirror-scale`.

use std::process::ExitCode;

use clap::Parser as _;
use tulle_bench::cli;

fn main() -> ExitCode {
    match cli::run(cli::Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tulle-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
