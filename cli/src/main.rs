//! `tulle`: runs and inspects a tulle service mesh.
#![allow(clippy::print_stderr)] // a command prints its errors

use std::process::ExitCode;

use clap::Parser as _;
use tulle_cli::app::{self, Cli};

fn main() -> ExitCode {
    match app::run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tulle: {error:#}");
            ExitCode::FAILURE
        }
    }
}
