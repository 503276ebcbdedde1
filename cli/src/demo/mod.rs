//! `tulle demo`: a whole mesh of the shipped binaries on this machine, with a live table of its traffic.
//!
//! [`topology`] reads the hosts and services from the manifests, [`mesh`] builds them, and [`run`] watches the mesh, injects
//! faults and checks the result.
//! The demo starts the binaries as an operator would, and observes them only through their ports.

mod active_fault;
mod checks;
mod cleanup;
mod credentials;
mod edges;
mod fault_injection;
mod faults;
mod load_reports;
mod manifests;
mod mesh;
mod options;
mod outcome;
mod process;
mod rows;
mod run;
mod rundir;
mod scrape;
mod state;
mod table;
mod topology;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tulle_core::netns;

use self::faults::Fault;
use self::options::Action;
pub(crate) use self::options::Args;
use crate::runtime;

/// Runs the demo, or injects a fault into the running one.
///
/// Must be called before any thread is started: without root, the demo re-executes itself in a user namespace.
pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    match args.action {
        None => {}
        Some(Action::Cleanup { demo_pid }) => return cleanup::main(demo_pid).map(|()| ExitCode::SUCCESS),
        Some(Action::Break { fault, length }) => return break_running(fault, length),
    }
    netns::rerun_as_namespace_root(&[process::PROXY_UID, process::APP_UID, process::CONTROL_UID])
        .context("the demo creates network namespaces, which requires root or a user namespace")?;
    runtime()?.block_on(run::main(args))
}

fn break_running(fault: Fault, length: Duration) -> anyhow::Result<ExitCode> {
    ensure!(
        (MIN_FAULT..=MAX_FAULT).contains(&length),
        "--for {length:?}: expected a duration from {MIN_FAULT:?} to {MAX_FAULT:?}"
    );
    println!("{}", runtime()?.block_on(faults::send_request(fault, length))?);
    Ok(ExitCode::SUCCESS)
}

/// Minimum duration of a fault.
const MIN_FAULT: Duration = Duration::from_secs(1);
/// Maximum duration of a fault. Certificates live much longer, so none expires during a fault.
const MAX_FAULT: Duration = Duration::from_secs(600);
