//! `tulle`: runs and inspects a tulle service mesh.
#![allow(clippy::print_stderr)] // this is what a command does

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
