//! The `tulle` command: credentials, diagnostics, clusters, and the demo.

#![allow(clippy::print_stdout, clippy::print_stderr)] // a command prints its output

pub mod app;
mod authz;
mod certificates;
mod check;
mod config;
#[cfg(target_os = "linux")]
mod demo;
mod diagnostics;
mod explain;
mod identity;
mod inject;
mod install;
mod kubernetes;
mod metrics;
mod multicluster;
mod profile;
mod screen;
mod table;
mod telemetry;
mod trust;
mod version;
#[cfg(target_os = "linux")]
mod workload_api;

use std::io::Write as _;

use anyhow::Context as _;

/// Prints the output of a command. A closed pipe, such as a pipe to `head`, is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("writing to standard output")
        }
        _ => Ok(()),
    }
}

/// Creates the runtime for a command that uses the network.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("building the runtime")
}
