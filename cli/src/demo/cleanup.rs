//! The cleanup process: cleans up after a demo that was killed or aborted by a panic.
//!
//! It waits until the write end of a pipe closes. Only the demo holds this end, so the kernel closes it when the demo exits for any
//! reason. The kernel also kills the demo's other children. The cleanup process removes network namespaces and files.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::mesh;
use super::rundir::{FailedRunLogs, RunDir};

/// The child process that cleans up if the demo is killed. Dropping this value stops it.
pub(super) struct CleanupProcess(Child);

impl CleanupProcess {
    /// Starts this program again, as `tulle demo cleanup`.
    pub(super) fn spawn() -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let child = Command::new(program)
            .args(["demo", "cleanup", &std::process::id().to_string()])
            .stdin(Stdio::piped())
            // A program that reads our standard output must not wait for the cleanup process.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("starting the cleanup process")?;
        Ok(Self(child))
    }
}

impl Drop for CleanupProcess {
    fn drop(&mut self) {
        // An error cannot be handled here. The next demo cleans up again when it starts.
        if let Some(mut stdin) = self.0.stdin.take() {
            let _ = stdin.write_all(SHUTDOWN_MESSAGE);
        }
        let _ = self.0.wait();
    }
}

/// Runs `tulle demo cleanup`.
pub(super) fn main(demo_pid: u32) -> anyhow::Result<()> {
    let mut message = Vec::new();
    std::io::stdin()
        .read_to_end(&mut message)
        .context("waiting for the demo's end")?;
    if message == SHUTDOWN_MESSAGE {
        return Ok(());
    }
    let proc = format!("/proc/{demo_pid}");
    // The demo can be a zombie for a moment, and `remove_stale` keeps the files of a demo whose process exists. Repeat until the
    // process is gone.
    for _ in 0..MAX_EXIT_POLLS {
        mesh::remove_stale(FailedRunLogs::Keep)?;
        if !Path::new(&proc).exists() {
            break;
        }
        std::thread::sleep(EXIT_POLL_INTERVAL);
    }
    mesh::remove_stale(FailedRunLogs::Keep)?;
    RunDir::remove_empty_base();
    Ok(())
}

const SHUTDOWN_MESSAGE: &[u8] = b"done";
const MAX_EXIT_POLLS: u32 = 100;
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(100);
